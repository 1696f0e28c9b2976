# Everything runs in .venv, which is made on the first use and again when what the package needs has changed.
#
#   make demo    two engines share a prompt's KV cache        make lint   ruff and mypy
#   make test    all tests                                    make bench  copies, mappings, the server
#   make test-quick  those that take no seconds
#   make interop tests against a real LMCache, which is installed in .venv-interop
#   make clean   remove what these made

PYTHON ?= python3
VENV ?= .venv
# Versions to install instead of the newest; see CONTRIBUTING.md.
CONSTRAINTS ?= /dev/null
BIN := $(VENV)/bin
NEEDS := setup.cfg pyproject.toml
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# To use another environment with LMCache 0.5.6 than our own, give its Python; see docs/interop.md.
INTEROP := .venv-interop
KVSHM_INTEROP_PYTHON ?= $(INTEROP)/bin/python
INTEROP_TORCH ?= torch==2.13.0+cpu
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: demo test test-quick lint bench interop clean

demo: $(VENV)/.server
	$(BIN)/kvshm demo $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest $(ARGS)

test-quick: $(VENV)/.test
	$(BIN)/python -m pytest -m 'not slow' $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(VENV)/.test
	$(BIN)/kvshm bench $(ARGS)

interop: $(VENV)/.test $(if $(filter $(INTEROP)/%,$(KVSHM_INTEROP_PYTHON)),$(INTEROP)/.lmcache)
	KVSHM_INTEROP_PYTHON=$(KVSHM_INTEROP_PYTHON) $(BIN)/python -m pytest -rs --timeout 300 tests/interop $(ARGS)

clean:
	rm -rf $(VENV) $(INTEROP) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# pip is the last that venv brings: without it the environment is half made.
$(BIN)/pip:
	$(PYTHON) -m venv --clear $(VENV)

# Each stamp stands for one set of packages in the one environment; -e: the environment follows the sources.
$(VENV)/.server: $(NEEDS) | $(BIN)/pip
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e '.[server]'
	touch $@

$(VENV)/.test: $(NEEDS) | $(BIN)/pip
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e '.[test]'
	touch $@

$(VENV)/.dev: $(NEEDS) | $(BIN)/pip
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e '.[dev]'
	touch $@

$(INTEROP)/bin/pip:
	$(PYTHON) -m venv --clear $(INTEROP)

# Torch for CPUs: from PyTorch's own index where pip finds none. LMCache without its dependencies, many of which are
# CUDA's; the list has what it imports on a host without an accelerator. Most of it is never imported: not compiled.
$(INTEROP)/.lmcache: tests/interop/requirements.txt | $(INTEROP)/bin/pip
	$(INTEROP)/bin/pip install -q --no-compile $(INTEROP_TORCH) || \
	$(INTEROP)/bin/pip install -q --no-compile $(INTEROP_TORCH) --extra-index-url $(TORCH_CPU_INDEX)
	$(INTEROP)/bin/pip install -q --no-compile -r tests/interop/requirements.txt
	$(INTEROP)/bin/pip install -q --no-compile --no-deps lmcache==0.5.6
	touch $@
