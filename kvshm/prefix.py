"""Chunk identities: what makes a chunk of a prompt the same chunk in every process.

A chunk's hash covers all tokens up to its end, so equal hashes mean equal prefixes. It is a chain of keyed BLAKE2b over
the token ids as little-endian 64-bit integers: independent of PYTHONHASHSEED, of the machine and of the process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvshm.integers import Ints, int64_array

__all__ = ["CHUNK_HASH_NBYTES", "chunk_hashes", "is_about", "token_array"]

CHUNK_HASH_NBYTES = 32


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


def is_about(found: Sequence[bytes], hashes: Sequence[bytes]) -> bool:
    """Whether two prompts, given by the hashes of their chunks, begin alike as far as both go.

    >>> is_about([b"a", b"b"], [b"a"]), is_about([b"a"], [b"x", b"b"]), is_about([], [b"a"])
    (True, False, False)
    """
    length = min(len(found), len(hashes))
    # A chunk's hash covers the whole prefix before it.
    return length > 0 and found[length - 1] == hashes[length - 1]
