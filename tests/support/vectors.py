"""Golden vectors: one recorded case a line, and the notation of the caches in them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from kvshm.dtypes import dtype_from_name, dtype_name
from kvshm.spec import ArraySpec

DIRECTORY = Path(__file__).parents[1] / "vectors"

T = TypeVar("T")


def load(name: str) -> list[dict[str, Any]]:
    """The cases of a file."""
    with gzip.open(DIRECTORY / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def each(cases: list[dict[str, Any]]) -> pytest.MarkDecorator:
    """One test a case."""
    assert cases
    return pytest.mark.parametrize("case", cases, ids=[case["id"] for case in cases])


def is_error(value: Any) -> bool:
    """A recorded error, or one of ours."""
    return isinstance(value, dict) and "error" in value


def attempt(function: Callable[..., T], *arguments: Any) -> T | dict[str, str]:
    """The value, or the error in the notation of the vectors."""
    try:
        return function(*arguments)
    except (ValueError, IndexError) as error:
        return {"error": type(error).__name__, "message": str(error)}


def same(found: Any, recorded: Any) -> bool:
    """Equal, where any error equals any other."""
    if is_error(found) or is_error(recorded):
        return is_error(found) and is_error(recorded)
    if isinstance(recorded, list):
        return len(found) == len(recorded) and all(map(same, found, recorded))
    return bool(found == recorded)


def leaves(tree: Any) -> Iterator[dict[str, Any]]:
    """All arrays of a cache, depth first."""
    if isinstance(tree, dict):
        yield tree
    else:
        for item in tree:
            yield from leaves(item)


def spec_of(leaf: dict[str, Any]) -> ArraySpec:
    """One array as a spec in its storage."""
    return ArraySpec(tuple(leaf["shape"]), tuple(leaf["stride"]), leaf["offset"], dtype_from_name(leaf["dtype"]))


def specs_of(tree: Any) -> Any:
    """A cache as specs."""
    return spec_of(tree) if isinstance(tree, dict) else [specs_of(item) for item in tree]


class Storages:
    """A cache as arrays, in one buffer per storage."""

    def __init__(self, tree: Any) -> None:
        nbytes: dict[int, int] = {}
        for leaf in leaves(tree):
            size = leaf["storage_elems"] * dtype_from_name(leaf["dtype"]).itemsize
            nbytes[leaf["storage"]] = max(size, nbytes.get(leaf["storage"], 0))
        self.buffers = {number: np.zeros(size, np.uint8) for number, size in nbytes.items()}
        self.arrays = self._arrays(tree)

    def _arrays(self, tree: Any) -> Any:
        if isinstance(tree, dict):
            return spec_of(tree).view(self.buffers[tree["storage"]])
        return [self._arrays(item) for item in tree]

    def place(self, address: int) -> tuple[int, int] | None:
        """Storage and byte offset of an address; None for 0, and for what lies in no storage."""
        for number, buffer in self.buffers.items():
            start = buffer.ctypes.data
            if address and start <= address < start + buffer.nbytes:
                return number, int(address) - start
        return None


def described(tree: Any, storages: Storages | None = None) -> Any:
    """A normalised cache in the notation, without storages where there are specs only."""
    if isinstance(tree, list):
        return [described(item, storages) for item in tree]
    spec = tree if isinstance(tree, ArraySpec) else ArraySpec.of(tree)
    found = {"dtype": dtype_name(spec.dtype), "shape": list(spec.shape), "stride": list(spec.stride)}
    if storages is None:
        return found | {"offset": spec.storage_offset}
    place = storages.place(tree.ctypes.data)
    if place is None:
        return found
    return found | {"storage": place[0], "offset": place[1] // spec.dtype.itemsize}
