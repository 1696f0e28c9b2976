# Everything runs in .venv, which is made on the first use and again when what the package needs has changed.
#
#   make demo    two engines share a prompt's KV cache        make lint   ruff and mypy
#   make test    all tests                                    make bench  copies, mappings, the server
#   make clean   remove what these made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NEEDS := setup.cfg pyproject.toml
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint bench clean

demo: $(VENV)/.demo
	$(BIN)/kvshm demo $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(VENV)/.test
	$(BIN)/kvshm bench $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# pip is the last that venv brings: without it the environment is half made.
$(BIN)/pip:
	$(PYTHON) -m venv --clear $(VENV)

# Each stamp stands for one set of packages in the one environment; -e: the environment follows the sources.
$(VENV)/.demo: $(NEEDS) | $(BIN)/pip
	$(BIN)/pip install -q -e .
	touch $@

$(VENV)/.test: $(NEEDS) | $(BIN)/pip
	$(BIN)/pip install -q -e '.[test]'
	touch $@

$(VENV)/.dev: $(NEEDS) | $(BIN)/pip
	$(BIN)/pip install -q -e '.[dev]'
	touch $@
