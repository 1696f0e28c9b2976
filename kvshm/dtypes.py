"""The names that dtypes have on the wire, and the NumPy dtypes behind them.

Names are PyTorch's without the module (``bfloat16``, ``float8_e4m3fn``), because that is what the other side of the
wire writes. Only those that NumPy or ml_dtypes can hold exist here. A dtype's own short code is never used: NumPy
prints bfloat16 as ``V2``, which loses the type.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["DTYPES", "DType", "DTypeLike", "as_dtype", "dtype_from_name", "dtype_name"]

DType = np.dtype[Any]
DTypeLike = Any  # a NumPy dtype, a scalar type, or a wire name

_NUMPY_NAMES = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
_ML_DTYPES_NAMES = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)

DTYPES: dict[str, DType] = {name: np.dtype(name) for name in _NUMPY_NAMES} | {
    name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_DTYPES_NAMES
}
_NAMES: dict[DType, str] = {dtype: name for name, dtype in DTYPES.items()}


def dtype_from_name(name: str) -> DType:
    """The NumPy dtype of a wire name, in the machine's byte order.

    >>> dtype_from_name("bfloat16").itemsize
    2

    Raises:
        ValueError: No such name, or neither NumPy nor ml_dtypes has the type.
    """
    try:
        return DTYPES[name]
    except (KeyError, TypeError):
        raise ValueError(f"unknown dtype {name!r}; known are {', '.join(DTYPES)}") from None


def dtype_name(dtype: DType) -> str:
    """The wire name of a NumPy dtype.

    Raises:
        ValueError: The dtype has no name on the wire (a structured dtype, another byte order ...).
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        raise ValueError(f"dtype {dtype!r} has no name on the wire; use one of {', '.join(DTYPES)}") from None


def as_dtype(dtype: DTypeLike) -> DType:
    """The dtype that a caller means: a NumPy dtype, a scalar type, or a wire name.

    Raises:
        ValueError: It is no dtype that the wire can name.
    """
    if isinstance(dtype, str):
        return dtype_from_name(dtype)
    if dtype is None:  # float64 to NumPy
        raise ValueError(f"no dtype was given; use one of {', '.join(DTYPES)}")
    try:
        found = np.dtype(dtype)
    except TypeError:
        raise ValueError(f"{dtype!r} is no dtype; use one of {', '.join(DTYPES)}") from None
    return DTYPES[dtype_name(found)]
