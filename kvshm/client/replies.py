"""Reads the results of replies. Whatever else comes is the server's failure, so it never is an engine's crash."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from kvshm.client.connections import CacheServerError

__all__ = [
    "Slot",
    "chunks_and_offsets",
    "copied",
    "count",
    "decoded",
    "fields",
    "flag",
    "lent_to_retrieve",
    "lent_to_store",
    "optional_count",
    "optional_integer",
    "text",
]

_T = TypeVar("_T")


class Slot(NamedTuple):
    """Bytes of the pool that the server lends for one chunk."""

    offset: int
    nbytes: int


def decoded(operation: str, read: Callable[[Any], _T], result: Any) -> _T:
    """A result as ``read`` understands it.

    Raises:
        CacheServerError: It does not.
    """
    try:
        return read(result)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError):
        raise CacheServerError(
            f"{operation}: the server answered {reprlib.repr(result)}, which makes no sense; is it of another version?"
        ) from None


def count(result: Any) -> int:
    """A number from 0 on."""
    if type(result) is not int or result < 0:
        raise ValueError
    return result


def optional_count(result: Any) -> int | None:
    """The same, or nothing yet."""
    return None if result is None else count(result)


def optional_integer(result: Any) -> int | None:
    """Any number, or none."""
    if result is not None and type(result) is not int:
        raise TypeError
    return result


def text(result: Any) -> str:
    """A string."""
    if type(result) is not str:
        raise TypeError
    return result


def copied(result: Any) -> tuple[bytes, bool]:
    """The handle and the success of a store or a retrieve."""
    handle, is_good = result
    if type(handle) is not bytes or type(is_good) is not bool:
        raise TypeError
    return handle, is_good


def flag(result: Any) -> bool:
    """Yes or no."""
    if type(result) is not bool:
        raise TypeError
    return result


def chunks_and_offsets(result: Any) -> list[dict[int, int]]:
    """Per object group, the offset in the pool of each chunk's slot."""
    groups = [[(count(chunk), count(offset)) for chunk, offset in of_group] for of_group in result]
    found = [dict(of_group) for of_group in groups]
    if any(len(slots) != len(of_group) for slots, of_group in zip(found, groups, strict=True)):
        raise ValueError
    return found


def fields(result: Any) -> dict[str, Any]:
    """A map, empty where there is none."""
    if result is None:
        return {}
    if type(result) is not dict:
        raise TypeError
    return dict(result)


def lent_to_store(result: Any) -> dict[int, Slot] | None:
    """Slots by the chunk that they are for; None where none are lent."""
    context = fields(fields(result).get("context"))
    slots, indices = context.get("slots"), context.get("chunk_indices")
    if slots is None or indices is None:
        return None
    found = {count(index): _slot(slot) for index, slot in zip(indices, slots, strict=True)}
    if len(found) != len(slots):
        raise ValueError
    return found


def lent_to_retrieve(result: Any) -> list[Slot]:
    """A slot per chunk."""
    return [_slot(slot) for slot in fields(result["context"])["slots"]]


def _slot(slot: Any) -> Slot:
    return Slot(count(slot["offset"]), count(slot["length"]))
