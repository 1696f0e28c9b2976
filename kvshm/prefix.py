"""Chunk identities: what makes a chunk of a prompt the same chunk in every process.

A chunk's hash covers all tokens up to its end, so equal hashes mean equal prefixes. It is a chain of keyed BLAKE2b over
the token ids as little-endian 64-bit integers: independent of PYTHONHASHSEED, of the machine and of the process.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["CHUNK_HASH_NBYTES", "Ints", "chunk_hashes", "int64_array", "token_array"]

CHUNK_HASH_NBYTES = 32

Ints = Sequence[int] | NDArray[Any]


def int64_array(values: Ints, name: str) -> NDArray[np.int64]:
    """Integers as a one-dimensional array of little-endian int64; ``name`` is what an error calls them.

    Raises:
        ValueError: Something in it is no integer of 64 bits; booleans are not integers here.
    """
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or (values.dtype.kind not in "iu" and values.size):
            raise ValueError(
                f"{name} is an array of shape {values.shape} and dtype {values.dtype}; "
                f"give a one-dimensional array of integers"
            )
        if values.dtype == np.uint64 and values.size and int(values.max()) >= 2**63:
            raise ValueError(f"{name} holds {int(values.max())}, which does not fit in 64 signed bits")
        return np.ascontiguousarray(values, dtype="<i8")
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


def token_array(token_ids: Ints) -> NDArray[np.int64]:
    """Token ids as a one-dimensional array of little-endian int64.

    >>> token_array([3, 1, 2]).tolist()
    [3, 1, 2]

    Raises:
        ValueError: Something in it is no integer of 64 bits; booleans are not integers here.
    """
    return int64_array(token_ids, "token_ids")


def chunk_hashes(tokens: NDArray[np.int64], chunk_size: int) -> list[bytes]:
    """One hash per full chunk of ``tokens``, from the first token on; the rest of the tokens does not count.

    >>> one, two = chunk_hashes(token_array([1, 2, 3, 4, 5]), chunk_size=2)
    >>> [one] == chunk_hashes(token_array([1, 2]), chunk_size=2)
    True
    """
    view = memoryview(tokens.tobytes())
    step = chunk_size * tokens.itemsize
    hashes: list[bytes] = []
    parent = b""
    for start in range(0, len(view) - step + 1, step):
        parent = hashlib.blake2b(view[start : start + step], digest_size=CHUNK_HASH_NBYTES, key=parent).digest()
        hashes.append(parent)
    return hashes
