"""Integers as callers give them, one or an array of them: checked where they come in, and trusted behind that."""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Ints", "checked_int", "int64_array"]

Ints: TypeAlias = "Sequence[int] | NDArray[Any]"


def checked_int(value: Any, name: str, expected: str = "an integer") -> int:
    """One integer; ``name`` and ``expected`` are the words of an error.

    >>> checked_int(np.int32(3), "world_size")
    3

    Raises:
        ValueError: No integer; a boolean is no integer here.
    """
    try:
        if not isinstance(value, bool | np.bool_):
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError(f"invalid {name}: expected {expected}, got {value!r}")


def int64_array(values: Ints, name: str) -> NDArray[np.int64]:
    """Integers as a one-dimensional array of little-endian int64; ``name`` is what an error calls them.

    >>> int64_array([3, 1, 2], "token_ids").tolist()
    [3, 1, 2]

    Raises:
        ValueError: Neither a sequence nor an array, or something in it is no integer of 64 bits; booleans are not
            integers here.
    """
    given: Any = values
    if isinstance(given, np.ndarray):
        return _of_array(given, name)
    is_view = isinstance(given, memoryview) and not _is_bytes(given)
    if isinstance(given, Sequence) and not isinstance(given, str | memoryview) and not _is_bytes(given):
        return _of_sequence(given, name)
    if not is_view and not any(hasattr(given, protocol) for protocol in ("__array__", "__array_interface__")):
        raise ValueError(
            f"{name} is of type {type(given).__name__}; give a sequence of integers, such as a list, or a "
            f"one-dimensional array of them"
        )
    try:
        return _of_array(np.asarray(given), name)
    except Exception as error:  # whatever an array of another library raises
        raise ValueError(f"{name} ({type(given).__name__}) cannot be read as an array of integers: {error}") from None


def _is_bytes(given: Any) -> bool:
    """Bytes are a sequence of integers, but they are rather the bytes of an array, whose integers are others."""
    if isinstance(given, memoryview):
        return given.format in ("B", "b", "c") and isinstance(given.obj, bytes | bytearray)
    return isinstance(given, bytes | bytearray)


def _of_array(values: NDArray[Any], name: str) -> NDArray[np.int64]:
    if isinstance(values, np.ma.MaskedArray):
        raise ValueError(f"{name} is a masked array, in which entries may be missing; give a plain array of integers")
    if values.ndim != 1 or (values.dtype.kind not in "iu" and values.size):
        raise ValueError(
            f"{name} is an array of shape {values.shape} and dtype {values.dtype}; "
            f"give a one-dimensional array of integers"
        )
    if values.dtype == np.uint64 and values.size and int(values.max()) >= 2**63:
        raise ValueError(f"{name} holds {int(values.max())}, which does not fit in 64 signed bits")
    return np.ascontiguousarray(values, dtype="<i8")


def _of_sequence(values: Sequence[int], name: str) -> NDArray[np.int64]:
    try:
        # Three times as fast as np.array for a list of Python ints, and it refuses floats and strings.
        packed = struct.pack(f"<{len(values)}q", *values)
    except (struct.error, TypeError) as error:
        raise ValueError(f"{name} must be a sequence of integers of 64 signed bits: {error}") from None
    array = np.frombuffer(packed, dtype="<i8")
    # True and False pack as 1 and 0; only those places need a look at the Python type.
    for index in np.flatnonzero((array | 1) == 1).tolist():
        if isinstance(values[index], bool | np.bool_):
            raise ValueError(f"{name}[{index}] is {values[index]}, a boolean, not an integer")
    return array
