"""Pinned chunks: what a lookup found, kept from eviction for the retrieves that are to come.

A :class:`PinnedChunks` counts, per worker and chunk, how many retrieves are still to come. Who may use which of them up
is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvshm.store.chunk_store import ChunkStore, Entry

__all__ = ["Found", "PinnedChunks"]

E = TypeVar("E")


@dataclass(frozen=True, slots=True, eq=False)
class Found(Generic[E]):
    """What a hit is served from in one worker and object group: consecutive chunks."""

    worker_id: int
    first_chunk: int  # counted from the first token of the prompt
    entries: list[E]


@dataclass(slots=True, eq=False)
class _Row:
    """Chunks of one worker and object group, and how many holds are left on each."""

    found: Found[Entry]
    num_holds: list[int]


class PinnedChunks:
    """The pins of one lookup: ``num_readers`` holds on each chunk that it found."""

    __slots__ = ("_rows", "_store")

    def __init__(self, store: ChunkStore, found: Iterable[Found[Entry]], num_readers: int = 1) -> None:
        self._store = store
        self._rows = [_Row(part, [num_readers] * len(part.entries)) for part in found]
        for row in self._rows:
            store.hold(row.found.entries, num_readers)

    @property
    def num_pins(self) -> int:
        """Holds that are left."""
        return sum(sum(row.num_holds) for row in self._rows)

    def is_pinned(self, worker_id: int | None) -> bool:
        """Whether holds are left for a worker, or (None) for any."""
        return any(any(row.num_holds) for row in self._rows if worker_id in (None, row.found.worker_id))

    def release_one(self, worker_id: int, chunks: range) -> None:
        """A retrieve is done: give up one hold on each of its chunks."""
        self._release(worker_id, chunks, all_readers=False)

    def release_all(self, worker_id: int | None = None, chunks: range | None = None) -> None:
        """Give up what is left of one worker or (None) of all, on some chunks or (None) on all."""
        self._release(worker_id, chunks, all_readers=True)

    def _release(self, worker_id: int | None, chunks: range | None, *, all_readers: bool) -> None:
        for row in self._rows:
            if worker_id is not None and row.found.worker_id != worker_id:
                continue
            first, length = row.found.first_chunk, len(row.found.entries)
            start, stop = (0, length) if chunks is None else (chunks.start - first, chunks.stop - first)
            released = []
            for index in range(max(start, 0), min(stop, length)):
                times = row.num_holds[index] if all_readers else min(row.num_holds[index], 1)
                row.num_holds[index] -= times
                released += [row.found.entries[index]] * times
            self._store.release(released)
