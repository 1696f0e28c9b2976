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

__all__ = ["CHUNK_HASH_NBYTES", "Tokens", "chunk_hashes", "token_array"]

CHUNK_HASH_NBYTES = 32

Tokens = Sequence[int] | NDArray[Any]


def token_array(token_ids: Tokens) -> NDArray[np.int64]:
    """Token ids as a one-dimensional array of little-endian int64.

    >>> token_array([3, 1, 2]).tolist()
    [3, 1, 2]

    Raises:
        ValueError: Something in it is no integer of 64 bits; booleans are not integers here.
    """
    if isinstance(token_ids, np.ndarray):
        if token_ids.ndim != 1 or (token_ids.dtype.kind not in "iu" and token_ids.size):
            raise ValueError(
                f"token_ids is an array of shape {token_ids.shape} and dtype {token_ids.dtype}; "
                f"give a one-dimensional array of integers"
            )
        if token_ids.dtype == np.uint64 and token_ids.size and int(token_ids.max()) >= 2**63:
            raise ValueError(f"token id {int(token_ids.max())} does not fit in 64 signed bits")
        return np.ascontiguousarray(token_ids, dtype="<i8")
    try:
        # Three times as fast as np.array for a list of Python ints, and it refuses floats and strings.
        packed = struct.pack(f"<{len(token_ids)}q", *token_ids)
    except (struct.error, TypeError) as error:
        raise ValueError(f"token_ids must be a sequence of integers of 64 signed bits: {error}") from None
    array = np.frombuffer(packed, dtype="<i8")
    # True and False pack as 1 and 0; only those places need a look at the Python type.
    for index in np.flatnonzero((array | 1) == 1).tolist():
        if isinstance(token_ids[index], bool | np.bool_):
            raise ValueError(f"token_ids[{index}] is {token_ids[index]}, a boolean; token ids are integers")
    return array


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
