"""What detection looks at: arrays or specs, alone or in lists, and the ways to name and split them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from kvshm.contiguity import ArrayTree
from kvshm.spec import ArraySpec, restride

__all__ = ["Entry", "Leaf", "is_leaf", "leaves_of", "split_axis", "unknown_layout"]

Leaf: TypeAlias = "ArraySpec | np.ndarray[Any, Any]"
Entry: TypeAlias = "Leaf | list[Leaf]"


def is_leaf(x: object) -> TypeGuard[Leaf]:
    """Whether it is an array or a spec, and no list of them."""
    return isinstance(x, (np.ndarray, ArraySpec))


def leaves_of(tree: ArrayTree) -> Iterator[Any]:
    """The arrays or specs of a structure, depth first."""
    if is_leaf(tree):
        yield tree
    else:
        for item in tree:
            yield from leaves_of(item)


def split_axis(leaf: Leaf, axis: int, sizes: tuple[int, ...]) -> Leaf:
    """One axis as several, row-major: a view for any stride, where ``reshape`` might copy. Sizes of 1 are tight."""
    spec = leaf if isinstance(leaf, ArraySpec) else ArraySpec.of(leaf)
    steps: list[int] = []
    step = spec.stride[axis]
    tight = spec.shape[axis + 1] * spec.stride[axis + 1] if axis + 1 < len(spec.shape) else 1
    for size in reversed(sizes):
        steps.append(tight if size == 1 else step)
        step *= size
        tight = size * steps[-1]
    shape = (*spec.shape[:axis], *sizes, *spec.shape[axis + 1 :])
    stride = (*spec.stride[:axis], *reversed(steps), *spec.stride[axis + 1 :])
    if isinstance(leaf, ArraySpec):
        return ArraySpec(shape, stride, spec.storage_offset, spec.dtype)
    return restride(leaf, shape, tuple(step * leaf.dtype.itemsize for step in stride))


def unknown_layout(engine: str, found: ArrayTree, wanted: str) -> ValueError:
    """The error for what no layout of an engine is."""
    return ValueError(f"no known {engine} layout is {_shapes(found)}; known are {wanted}")


def _shapes(found: ArrayTree) -> str:
    if is_leaf(found):
        return f"{list(found.shape)} of {found.dtype}"
    return f"[{', '.join(_shapes(item) for item in found[:3])}{', ...' if len(found) > 3 else ''}]"
