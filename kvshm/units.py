"""Amounts of bytes and times as people write and read them."""

from __future__ import annotations

import re
from decimal import Decimal
from numbers import Real
from typing import Any

__all__ = ["MAX_SECONDS", "checked_seconds", "format_nbytes", "format_seconds", "parse_nbytes"]

MAX_SECONDS = 1e8  # three years: in nanoseconds it fits in 64 bits, whatever a clock shows

_BINARY = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = {name.lower(): factor for name, factor in (_BINARY | _DECIMAL).items()}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", re.ASCII)


def parse_nbytes(text: str) -> int:
    """Bytes of an amount such as ``4096``, ``512MiB`` or ``1.5 GB``; the unit's case does not matter.

    >>> parse_nbytes("1.5 KiB"), parse_nbytes("2GB")
    (1536, 2000000000)

    Raises:
        ValueError: It is no such amount, or no whole number of bytes.
    """
    match = _AMOUNT.fullmatch(text.strip())
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is no amount of bytes; write a number and one of B, KiB, MiB, GiB, TiB, kB ... TB")
    nbytes = Decimal(match[1]) * factor
    if nbytes != int(nbytes):
        raise ValueError(f"{text!r} is {nbytes} bytes, which is no whole number")
    return int(nbytes)


def checked_seconds(name: str, seconds: Any, *, is_zero_allowed: bool = False) -> float:
    """A time that can be waited for; ``name`` is what an error calls it.

    Raises:
        ValueError: No number, not positive, or more than a clock can hold.
    """
    is_number = not isinstance(seconds, bool) and isinstance(seconds, Real)
    if not is_number or not 0 <= seconds <= MAX_SECONDS or not (seconds or is_zero_allowed):
        least = "from 0 on" if is_zero_allowed else "above 0"
        raise ValueError(f"{name} is {seconds!r}; give a number of seconds {least}, at most {MAX_SECONDS:.0f}")
    return float(seconds)


def format_nbytes(nbytes: int) -> str:
    """An amount of bytes in the largest binary unit of which it is at least one.

    >>> format_nbytes(2048), format_nbytes(15_900_000), format_nbytes(12)
    ('2 KiB', '15.2 MiB', '12 bytes')
    """
    for unit, factor in reversed(_BINARY.items()):
        if nbytes >= factor > 1:
            return f"{nbytes / factor:.1f}".removesuffix(".0") + f" {unit}"
    return f"{nbytes} bytes"


def format_seconds(seconds: float) -> str:
    """A time in seconds, or in milliseconds below one.

    >>> format_seconds(3.21), format_seconds(0.00456)
    ('3.21 s', '4.56 ms')
    """
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
