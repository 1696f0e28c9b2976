"""Which order of axes makes an array contiguous, without moving a byte.

Engines hand out their caches with axes in the order that suits their kernels: storage [block, head, slot, element]
may be exposed as [block, slot, head, element]. What a cache is called follows from the order in memory, so the axes
are first put back into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from kvshm.spec import ArraySpec

__all__ = ["ArrayTree", "attempt_permute_to_contiguous_view", "first_axis_padding", "storage_order"]

Array: TypeAlias = "np.ndarray[Any, Any]"
ArrayLike = TypeVar("ArrayLike", ArraySpec, "np.ndarray[Any, Any]")
ArrayTree: TypeAlias = Any
"""An array, a spec, or nested lists of them."""


def storage_order(spec: ArraySpec) -> tuple[int, ...]:
    """The axes of ``spec`` from outermost to innermost in memory.

    Axes go by falling stride, those of size 1 inside others of the same stride. An axis of size 1 takes part in
    this only if all of them have the stride that a dense array would give them in that order: with one head, its
    stride alone tells [slot, head] from [head, slot]. Else those strides mean nothing, and the axes of size 1
    keep their places while the others are ordered around them.
    """
    shape, stride = spec.shape, spec.stride
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


def _tight(spec: ArraySpec) -> ArraySpec:
    """``spec`` with the tight stride on axes of size 1, where the stride moves nothing."""
    stride = list(spec.stride)
    tight = 1
    for axis in reversed(range(len(stride))):
        if spec.shape[axis] == 1:
            stride[axis] = tight
        tight = spec.shape[axis] * stride[axis]
    return ArraySpec(spec.shape, tuple(stride), spec.storage_offset, spec.dtype)


def first_axis_padding(spec: ArraySpec) -> int:
    """Elements between the end of one item of the first axis and the start of the next; 0 if contiguous.

    Raises:
        ValueError: ``spec`` is neither contiguous nor contiguous but for such padding, which needs rank 3 at
            least; the message says where it is not.
    """
    if spec.is_contiguous:
        return 0
    shape, stride = spec.shape, spec.stride
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
    return stride[0] - block


def _permuted_spec(spec: ArraySpec) -> ArraySpec:
    if not spec.shape:
        raise ValueError("an array of rank 0 is no paged cache; give at least one axis")
    if 0 in spec.shape:
        return spec
    permuted = _tight(spec.transpose(storage_order(spec)))
    first_axis_padding(permuted)
    return permuted


def _permuted_array(array: Array) -> Array:
    spec = ArraySpec.of(array)
    permuted = _permuted_spec(spec)
    if permuted is spec:
        return array
    transposed = array.transpose(storage_order(spec))
    strides = tuple(step * array.dtype.itemsize for step in permuted.stride)
    if transposed.strides == strides:
        return array if transposed.shape == array.shape and array.strides == strides else transposed
    return np.lib.stride_tricks.as_strided(transposed, permuted.shape, strides)


def attempt_permute_to_contiguous_view(x: ArrayTree) -> ArrayTree:
    """The same bytes with the axes in memory order: contiguous, or padded along the first axis alone.

    Takes arrays or specs, or nested lists of them, and gives the same kind back, never a copy. Axes of size 1
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
