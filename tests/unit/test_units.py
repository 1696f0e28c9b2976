"""Amounts as people write and read them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from kvshm.units import checked_seconds, format_nbytes, format_seconds, parse_nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("7 B", 7),
        ("3kib", 3 * 1024),
        (" 512MiB ", 512 << 20),
        ("1.5 GiB", 3 << 29),
        ("2TiB", 2 << 40),
        ("5kB", 5000),
        ("1.000001 MB", 1_000_001),
        ("0.3GB", 300_000_000),
        ("1TB", 10**12),
    ],
)
def test_amounts_are_read(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "-1", "GiB", "1 GG", "1e9", "0x10", "1_000", "1 2", "٣", "1.", ".5 GiB", "nan"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no amount of bytes"):
        parse_nbytes(text)


def test_part_of_a_byte_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'0.3 KiB' is 307.2 bytes, which is no whole number"):
        parse_nbytes("0.3 KiB")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (64 << 20, "64 MiB"),
        (10**9, "953.7 MiB"),
        (5 << 40, "5 TiB"),
    ],
)
def test_amounts_are_written(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text


def test_times_are_written() -> None:
    assert [format_seconds(s) for s in (0.0, 0.0012345, 0.9994, 1.0, 71.236)] == [
        "0.00 ms",
        "1.23 ms",
        "999.40 ms",
        "1.00 s",
        "71.24 s",
    ]


@pytest.mark.parametrize("seconds", [1e-9, 1, 2.5, np.float32(3), Fraction(1, 3), 1e8])
def test_times_that_can_be_waited_for(seconds: Any) -> None:
    assert checked_seconds("timeout_s", seconds) == float(seconds)


@pytest.mark.parametrize(
    "seconds", [0, 0.0, -1, 1e8 + 1, 10**400, float("inf"), float("nan"), "1", None, True, 1j, [1]]
)
def test_times_that_cannot(seconds: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout_s is .*; give a number of seconds above 0, at most 100000000"):
        checked_seconds("timeout_s", seconds)


def test_no_time_at_all() -> None:
    assert checked_seconds("timeout_s", 0, is_zero_allowed=True) == 0.0
    with pytest.raises(ValueError, match="from 0 on"):
        checked_seconds("timeout_s", -1e-9, is_zero_allowed=True)
