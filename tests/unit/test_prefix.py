"""Chunk hashes: stable, chained, strict about what a token id is."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from kvshm.prefix import chunk_hashes, token_array

TOKENS = list(range(7, 7 + 53))


def test_hashes_count_full_chunks_only() -> None:
    assert len(chunk_hashes(token_array(TOKENS), 11)) == 4
    assert chunk_hashes(token_array(TOKENS[:10]), 11) == []
    assert chunk_hashes(token_array([]), 11) == []


def test_a_hash_covers_the_whole_prefix() -> None:
    base = chunk_hashes(token_array(TOKENS), 5)
    for changed in (0, 4, 5, 23, 49):
        other = TOKENS[:]
        other[changed] += 1
        hashes = chunk_hashes(token_array(other), 5)
        first = changed // 5
        assert hashes[:first] == base[:first]
        assert not set(hashes[first:]) & set(base[first:])


def test_every_kind_of_sequence_gives_the_same_hashes() -> None:
    expected = chunk_hashes(token_array(TOKENS), 7)
    for given in (
        tuple(TOKENS),
        np.array(TOKENS),
        np.array(TOKENS, dtype=np.uint16),
        np.array(TOKENS, dtype=">i4"),
        np.repeat(np.array(TOKENS), 2)[::2],
        [np.int32(token) for token in TOKENS],
    ):
        assert chunk_hashes(token_array(given), 7) == expected


def test_known_answer() -> None:
    """A fixed value: caches of different kvshm versions and machines may meet."""
    (digest,) = chunk_hashes(token_array([1, 2, 3]), 3)
    assert digest.hex() == "4309cdc8741445bfc9bcdbe384e54da89b00f953dfc4b01763cfed613426736b"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([1, True, 3], r"token_ids\[1\] is True, a boolean"),
        ([1.5, 2], "sequence of integers"),
        (["1"], "sequence of integers"),
        ([2**63], "64 signed bits"),
        ([None], "sequence of integers"),
        (np.array([1.0]), "dtype float64"),
        (np.array([[1]]), r"shape \(1, 1\)"),
        (np.array([True]), "dtype bool"),
        (np.array([2**63], dtype=np.uint64), "holds 9223372036854775808, which does not fit"),
        (7, "token_ids is of type int; give a sequence of integers, such as a list, or a one-dimensional array"),
        (None, "token_ids is of type NoneType"),
        ("123", "token_ids is of type str"),
        (b"\1\2", "token_ids is of type bytes"),
        (bytearray(b"\1"), "token_ids is of type bytearray"),
        (memoryview(b"\1\2"), "token_ids is of type memoryview"),
        (np.zeros((2, 2), "<i8").data, r"array of shape \(2, 2\) and dtype int64"),
        (np.zeros(2).data, r"array of shape \(2,\) and dtype float64"),
        (memoryview(bytearray(b"\1")), "token_ids is of type memoryview"),
        (np.ma.array([1, 2], mask=[False, True]), "token_ids is a masked array"),
        ({1, 2}, "token_ids is of type set"),
        ({1: 2}, "token_ids is of type dict"),
        ({1: 2}.values(), "token_ids is of type dict_values"),
        ((token for token in (1, 2)), "token_ids is of type generator"),
    ],
)
def test_what_is_no_token_id_is_refused(given: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        token_array(given)  # type: ignore[arg-type]


def test_zeros_and_ones_are_tokens() -> None:
    assert token_array([0, 1, 0]).tolist() == [0, 1, 0]
    assert token_array([-1, -(2**63), 2**63 - 1]).tolist() == [-1, -(2**63), 2**63 - 1]


def test_hashes_do_not_depend_on_the_hash_seed() -> None:
    code = "from kvshm.prefix import *; print([h.hex() for h in chunk_hashes(token_array(list(range(100))), 13)])"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert outputs == {f"{[h.hex() for h in chunk_hashes(token_array(list(range(100))), 13)]}\n"}
