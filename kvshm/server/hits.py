"""The longest prefix that is cached: for all workers, in all object groups, windows included.

A pure search. What is cached is asked for row by row: the chunks of one worker and kind of object, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvshm.layout import ObjectLayout
from kvshm.store.pins import Found

__all__ = ["Hit", "Need", "longest_hit"]

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Need:
    """The chunk objects that a retrieve by one worker reads, of one object group."""

    worker_id: int
    layout: ObjectLayout


@dataclass(frozen=True, slots=True, eq=False)
class Hit(Generic[E]):
    """The longest cached prefix, and the objects that it is served from."""

    num_chunks: int
    found: list[Found[E]]


def longest_hit(needs: Iterable[Need], num_chunks: int, cached: Callable[[Need, int], Sequence[E | None]]) -> Hit[E]:
    """The longest prefix of at most ``num_chunks`` chunks that every need can be served from.

    Args:
        cached: Per need and number of chunks, the objects of these first chunks; None where one is not cached.
    """
    limit = num_chunks
    rows: list[tuple[Need, Sequence[E | None]]] = []
    windows: list[tuple[int, list[int]]] = []
    for need in dict.fromkeys(needs):
        if not limit:
            return Hit(0, [])
        row = cached(need, limit)
        rows.append((need, row))
        window = need.layout.num_chunks_in_sw
        if window < 0:
            limit = row.index(None) if None in row else len(row)
        else:
            windows.append((window, _run_lengths(row)))
            limit = _within(windows[-1:], limit)
    limit = _within(windows, limit)
    if not limit or not rows:
        return Hit(0, [])
    found = []
    for need, row in rows:
        chunks = need.layout.needed_chunks(limit)
        entries = [entry for entry in row[chunks.start : chunks.stop] if entry is not None]
        found.append(Found(need.worker_id, chunks.start, entries))
    return Hit(limit, found)


def _within(windows: list[tuple[int, list[int]]], limit: int) -> int:
    """The longest prefix of at most ``limit`` chunks whose windows are cached in all these groups."""
    while limit and any(runs[limit - 1] < min(window, limit) for window, runs in windows):
        limit -= 1
    return limit


def _run_lengths(row: Sequence[object]) -> list[int]:
    """Per chunk, how many cached ones end with it."""
    runs, length = [], 0
    for entry in row:
        length = 0 if entry is None else length + 1
        runs.append(length)
    return runs
