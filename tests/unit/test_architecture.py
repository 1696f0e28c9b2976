"""Arrows between rooms point down, and the metadata half knows nothing of memory."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import kvshm

PACKAGE = Path(kvshm.__file__).parent

# From the ground up, as ARCHITECTURE.md has them; rooms in one row do not know each other.
DRAWING = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text()
FLOORS = [
    line.split() for line in re.findall(r"^```floors\n(.*?)^```", DRAWING, re.MULTILINE | re.DOTALL)[0].splitlines()
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
METADATA = ("dtypes", "spec", "contiguity", "formats", "layout")
MEMORY = ("shm", "posix_shm", "migrate", "wrapper", "wire", "registry")
MODULE = r"kvshm(\.\w+)+"
FACE = "__init__"  # hands names on, imports what it likes


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    """The rooms that a file imports, anywhere in it."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(MODULE, node.value):
            modules = [node.value]  # loaded by its name, perhaps
        else:
            continue
        for module in modules:
            first, _, rest = module.partition(".")
            if first == "kvshm" and rest.partition(".")[0] in FLOOR:
                rooms.add(rest.partition(".")[0])
    return rooms


FILES = sorted(path for path in PACKAGE.rglob("*.py") if _room(path) != FACE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_point_down(path: Path) -> None:
    room = _room(path)
    assert room in FLOOR, f"{room} has no floor: enter it in ARCHITECTURE.md and here"
    for imported in _imports(path) - {room}:
        assert FLOOR[imported] < FLOOR[room], f"{path} imports {imported}, which does not stand below {room}"
        assert not (room in METADATA and imported in MEMORY), f"{path}: the metadata half imports {imported}"
