"""Which order of axes makes an array contiguous, without moving a byte.

Engines hand out their caches with axes in the order that suits their kernels: storage [block, head, slot, element]
may be exposed as [block, slot, head, element]. What a cache is called follows from the order in memory, so the axes
are first put back into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from kvshm.spec import ArraySpec, restride

__all__ = [
    "ArrayTree",
    "attempt_permute_to_contiguous_view",
    "axes_in_memory",
    "check_first_axis_padding",
    "storage_order",
]

Array: TypeAlias = "np.ndarray[Any, Any]"
ArrayTree: TypeAlias = Any
"""An array, a spec, or nested lists of them."""


def storage_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of an array from outermost to innermost in memory.

    Axes go by falling stride, those of size 1 inside others of the same stride. An axis of size 1 takes part in
    this only if all of them have the stride that a dense array would give them in that order: with one head, its
    stride alone distinguishes [slot, head] from [head, slot]. Else those strides mean nothing, and the axes of size 1
    keep their places while the others are ordered around them.
    """
    axes = range(len(shape))
    order = sorted(axes, key=lambda axis: (-stride[axis], shape[axis] == 1))
    tight = 1
    for axis in reversed(order):
        if shape[axis] == 1 and stride[axis] != tight:
            break
        tight = shape[axis] * stride[axis]
    else:
        return tuple(order)
    moving = iter([axis for axis in order if shape[axis] != 1])
    return tuple(axis if shape[axis] == 1 else next(moving) for axis in axes)


def check_first_axis_padding(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """Refuse an array that is neither contiguous nor contiguous but for padding between the items of its first axis.

    Raises:
        ValueError: There are other gaps, or such padding in an array of rank below 3; the message says where.
    """
    spec = ArraySpec(shape, stride, 0, np.dtype(np.uint8))
    if spec.is_contiguous:
        return
    where = f"array of shape {shape} and stride {stride} (elements)"
    advice = "; copy it to a contiguous array first"
    if len(shape) < 3:
        raise ValueError(f"{where} has gaps, and rank {len(shape)} allows none{advice}")
    if shape[-1] > 1 and stride[-1] != 1:
        raise ValueError(f"{where} steps by {stride[-1]} along its innermost axis, not by 1{advice}")
    block = 1
    for axis in range(len(shape) - 1, 0, -1):
        if shape[axis] > 1 and stride[axis] != block:
            raise ValueError(
                f"{where} steps by {stride[axis]} along axis {axis} where its rows take {block}; only the first "
                f"axis may be padded{advice}"
            )
        block *= shape[axis]
    if stride[0] < block:
        raise ValueError(f"{where}: items of the first axis take {block} elements and overlap{advice}")


@lru_cache(maxsize=4096)  # the layers of a cache are alike: a stack of them costs one look at its shape
def _in_storage_order(
    shape: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Order of the axes, and shape and stride in that order, with the tight stride on axes of size 1."""
    if not shape:
        raise ValueError("an array of rank 0 is no paged cache; give at least one axis")
    order = tuple(range(len(shape))) if 0 in shape else storage_order(shape, stride)
    shape = tuple(shape[axis] for axis in order)
    steps = [stride[axis] for axis in order]
    if 0 not in shape:
        tight = 1
        for axis in reversed(range(len(shape))):
            if shape[axis] == 1:
                steps[axis] = tight
            tight = shape[axis] * steps[axis]
        check_first_axis_padding(shape, tuple(steps))
    return order, shape, tuple(steps)


def axes_in_memory(leaf: ArraySpec | Array) -> tuple[int, ...]:
    """The axes of an array or a spec in the order in which :func:`attempt_permute_to_contiguous_view` puts them.

    Raises:
        ValueError: As there.
    """
    if isinstance(leaf, np.ndarray):
        if _is_in_order(leaf):
            return tuple(range(leaf.ndim))
        leaf = ArraySpec.of(leaf)
    return _in_storage_order(leaf.shape, leaf.stride)[0]


def _is_in_order(array: Array) -> bool:
    """Whether nothing is to be done, found without a look at the strides."""
    return bool(array.flags.c_contiguous) and array.size > 1 and 1 not in array.shape


def _permuted_spec(spec: ArraySpec) -> ArraySpec:
    _, shape, stride = _in_storage_order(spec.shape, spec.stride)
    return ArraySpec(shape, stride, spec.storage_offset, spec.dtype)


def _permuted_array(array: Array) -> Array:
    if _is_in_order(array):
        return array
    spec = ArraySpec.of(array)
    order, shape, stride = _in_storage_order(spec.shape, spec.stride)
    transposed: Array = array.transpose(order)
    strides = tuple(step * array.dtype.itemsize for step in stride)
    if transposed.strides == strides or 0 in shape:
        return transposed
    return restride(transposed, shape, strides)


def attempt_permute_to_contiguous_view(x: ArrayTree) -> ArrayTree:
    """The same bytes with the axes in memory order: contiguous, or padded along the first axis alone.

    Takes arrays or specs, or nested lists of them, and returns the same kind, never a copy. Axes of size 1
    come back with the tight stride; arrays without elements come back as they are.

    >>> heads_first = np.zeros((7, 3, 5, 2)).transpose(0, 2, 1, 3)  # stored [7, 3, 5, 2], exposed [7, 5, 3, 2]
    >>> attempt_permute_to_contiguous_view(heads_first).shape
    (7, 3, 5, 2)

    Raises:
        ValueError: No order of the axes is contiguous up to padding of the first axis, or the rank is 0.
    """
    if isinstance(x, ArraySpec):
        return _permuted_spec(x)
    if isinstance(x, np.ndarray):
        return _permuted_array(x)
    if isinstance(x, Sequence) and not isinstance(x, (str, bytes)):
        return [attempt_permute_to_contiguous_view(item) for item in x]
    raise ValueError(f"expected an array, an ArraySpec or nested lists of them, not {type(x).__name__}")
