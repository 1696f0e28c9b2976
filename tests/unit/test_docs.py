"""Examples in the documentation run, and what it says of tests is true."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshm import strategies

ROOT = Path(__file__).parents[2]
STRATEGIES = (ROOT / "docs" / "strategies.md").read_text()
DIFFERENCES = (ROOT / "docs" / "differences.md").read_text()

EXAMPLES = re.findall(r"^```python\n(.*?)^```", STRATEGIES, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(1, len(EXAMPLES) + 1))
def test_examples_of_strategies_run(example: str, tmp_path: Path) -> None:
    path = tmp_path / "example.py"  # a file, as Hypothesis reads the source of its tests
    path.write_text(example)
    scope = runpy.run_path(str(path))
    tests = [value for name, value in scope.items() if name.startswith("test_")]
    assert len(tests) == 1
    tests[0]()


def test_all_strategies_are_documented() -> None:
    missing = [name for name in strategies.__all__ if f"`{name}" not in STRATEGIES]
    assert missing == []


def rows() -> list[list[str]]:
    """Cells of the table of differences."""
    lines = [line for line in DIFFERENCES.splitlines() if re.match(r"\| \d+ \|", line)]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def functions(path: Path) -> Iterator[str]:
    """Names of the tests in a file, with their classes."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}::{item.name}" for item in node.body if isinstance(item, ast.FunctionDef))
        elif isinstance(node, ast.FunctionDef):
            yield node.name


def test_every_difference_has_a_line() -> None:
    assert [int(row[0]) for row in rows()] == list(range(1, 26))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_every_difference_names_tests_that_exist(row: list[str]) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", row[-1])
    assert named
    for path, test in named:
        assert (ROOT / path).exists(), path
        assert test in set(functions(ROOT / path)), f"{path} has no {test}"
