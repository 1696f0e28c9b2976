"""Which bytes of a buffer a spec names, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvshm.spec import ArraySpec

Addresses = np.ndarray[Any, np.dtype[np.int64]]


def addresses(spec: ArraySpec) -> Addresses:
    """Byte addresses of all bytes of all elements, in the order of the indices."""
    found = np.full(spec.shape, spec.storage_offset, dtype=np.int64)
    for axis, (size, step) in enumerate(zip(spec.shape, spec.stride, strict=True)):
        along = [1] * len(spec.shape)
        along[axis] = size
        found = found + (np.arange(size) * step).reshape(along)
    itemsize = spec.dtype.itemsize
    return (found.reshape(-1, 1) * itemsize + np.arange(itemsize)).reshape(-1)


def leaves_of(tree: Any) -> Iterator[Any]:
    """Arrays or specs of a structure, depth first."""
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from leaves_of(item)
    else:
        yield tree


def all_addresses(tree: Any) -> Addresses:
    """Byte addresses of a whole structure of specs."""
    return np.concatenate([addresses(spec) for spec in leaves_of(tree)] or [np.empty(0, np.int64)])


def loose(spec: ArraySpec) -> tuple[Any, ...]:
    """A spec without the strides of axes of size 1, which move nothing."""
    stride = tuple(step for size, step in zip(spec.shape, spec.stride, strict=True) if size != 1)
    return spec.shape, stride, spec.storage_offset, spec.dtype
