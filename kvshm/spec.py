"""ArraySpec: a strided array in some buffer, described and never touched.

All layout math runs on specs, so the layout of a cache of any size costs no memory. A spec has the fields that the
wire carries; :meth:`ArraySpec.of` and :meth:`ArraySpec.view` go to and from real arrays.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from kvshm.dtypes import DType, as_dtype

__all__ = ["ArraySpec", "dense_strides", "restride"]


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a C-contiguous array; axes of size 0 count as 1.

    >>> dense_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def restride(array: np.ndarray[Any, Any], shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A view of other shape and strides (in bytes) that begins at the same element; the caller keeps it inside.

    Whatever the dtype: NumPy's ``as_strided`` takes float8_e5m2 for a NumPy float of one byte, and fails.
    """
    raw = np.lib.stride_tricks.as_strided(array.view(f"V{array.dtype.itemsize}"), shape, strides)
    view: np.ndarray[Any, Any] = raw.view(array.dtype)
    return view


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """A strided array in some buffer. Describes bytes; never touches them.

    >>> ArraySpec((2, 3), stride=(8, 1), storage_offset=32, dtype=np.dtype("float16")).byte_span
    86

    Raises:
        ValueError: The ranks of shape and stride differ, or a number is negative.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements per step along each axis, as on the wire
    storage_offset: int  # elements from the buffer's start to index (0, ..., 0)
    dtype: DType

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "shape", tuple(map(operator.index, self.shape)))
            object.__setattr__(self, "stride", tuple(map(operator.index, self.stride)))
            object.__setattr__(self, "storage_offset", operator.index(self.storage_offset))
        except TypeError:
            raise ValueError(
                f"shape {self.shape}, stride {self.stride} and storage_offset {self.storage_offset} must be integers"
            ) from None
        dtype: Any = self.dtype
        if not isinstance(dtype, np.dtype):
            object.__setattr__(self, "dtype", as_dtype(dtype))
        if len(self.shape) != len(self.stride):
            raise ValueError(
                f"shape {self.shape} has rank {len(self.shape)} but stride {self.stride} has rank "
                f"{len(self.stride)}; give one stride per axis"
            )
        if min((*self.shape, *self.stride, self.storage_offset)) < 0:
            raise ValueError(
                f"shape {self.shape}, stride {self.stride} and storage_offset {self.storage_offset} "
                f"must hold no negative number"
            )

    @classmethod
    def dense(cls, shape: tuple[int, ...], dtype: DType, storage_offset: int = 0) -> ArraySpec:
        """A C-contiguous array of this shape."""
        return cls(tuple(shape), dense_strides(tuple(shape)), storage_offset, dtype)

    @classmethod
    def of(cls, array: np.ndarray[Any, Any]) -> ArraySpec:
        """The spec of an array within the memory that starts at its first element.

        Raises:
            ValueError: A stride is negative or no multiple of the item size. Axes of one element, whose
                stride moves nothing, take the tight stride instead.
        """
        itemsize = array.dtype.itemsize
        shape = array.shape
        strides = array.strides
        if any(step % itemsize or step < 0 for step in strides):
            tight = dense_strides(shape)
            moved = 0 not in shape  # without elements no stride moves anything
            strides = tuple(
                step if moved and n > 1 else one * itemsize for n, step, one in zip(shape, strides, tight, strict=True)
            )
            if any(step % itemsize or step < 0 for step in strides):
                raise ValueError(
                    f"strides {array.strides} (bytes) of shape {shape} must be multiples of the item size "
                    f"{itemsize} of {array.dtype}, and not negative; copy the array first"
                )
        return cls(shape, tuple(step // itemsize for step in strides), 0, array.dtype)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements together, gaps between them not counted."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def byte_span(self) -> int:
        """Bytes from the buffer's start to just past the last element; 0 without elements."""
        if 0 in self.shape:
            return 0
        reach = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return (self.storage_offset + reach + 1) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Elements follow one another in C order; the strides of axes of size 1 do not count."""
        if 0 in self.shape:
            return True
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1:
                if step != expected:
                    return False
                expected *= size
        return True

    def transpose(self, axes: tuple[int, ...]) -> ArraySpec:
        """The same bytes with the axes in another order."""
        return ArraySpec(
            tuple(self.shape[axis] for axis in axes),
            tuple(self.stride[axis] for axis in axes),
            self.storage_offset,
            self.dtype,
        )

    def __getitem__(self, index: tuple[int | slice | None, ...]) -> ArraySpec:
        """Index as NumPy would, with whole-axis slices, integers and ``None`` (a new axis of size 1).

        >>> ArraySpec.dense((2, 3, 4), np.dtype("uint8"))[1, :, None, :]
        ArraySpec(shape=(3, 1, 4), stride=(4, 4, 1), storage_offset=12, dtype=dtype('uint8'))
        """
        shape: list[int] = []
        stride: list[int] = []
        offset = self.storage_offset
        axis = 0
        for item in index:
            if item is None:
                shape.append(1)
                stride.append(self.shape[axis] * self.stride[axis] if axis < len(self.shape) else 1)
                continue
            if isinstance(item, slice):
                if item != slice(None):
                    raise IndexError(f"a spec takes whole-axis slices only, not {item}")
                shape.append(self.shape[axis])
                stride.append(self.stride[axis])
            else:
                if not 0 <= item < self.shape[axis]:
                    raise IndexError(f"index {item} is outside axis {axis} of shape {self.shape}")
                offset += item * self.stride[axis]
            axis += 1
        return ArraySpec((*shape, *self.shape[axis:]), (*stride, *self.stride[axis:]), offset, self.dtype)

    def view(self, buffer: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The described array as a view of ``buffer``, a one-dimensional uint8 array.

        Raises:
            ValueError: The array does not fit in the buffer.
        """
        if self.byte_span > buffer.nbytes:
            raise ValueError(
                f"array of shape {self.shape} and stride {self.stride} ({self.dtype}) needs bytes "
                f"[0, {self.byte_span}) but the buffer has {buffer.nbytes}"
            )
        itemsize = self.dtype.itemsize
        start = self.storage_offset * itemsize
        if 0 in self.shape:
            start = min(start, buffer.nbytes)
        array: np.ndarray[Any, Any] = np.ndarray(
            self.shape,
            self.dtype,
            buffer=buffer,
            offset=start,
            strides=tuple(step * itemsize for step in self.stride),
        )
        return array
