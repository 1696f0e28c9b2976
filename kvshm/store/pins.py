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
    """Chunks of one worker and object group, and how many pins are left on each."""

    found: Found[Entry]
    num_pins: list[int]


class PinnedChunks:
    """The pins of one lookup: ``num_readers`` on each chunk that it found."""

    __slots__ = ("_num_pins", "_rows", "_store")

    def __init__(self, store: ChunkStore, found: Iterable[Found[Entry]], num_readers: int = 1) -> None:
        self._store = store
        self._rows = [_Row(part, [num_readers] * len(part.entries)) for part in found]
        self._num_pins: dict[int, int] = {}  # that are left, per worker
        for row in self._rows:
            store.pin(row.found.entries, num_readers)
            worker_id = row.found.worker_id
            self._num_pins[worker_id] = self._num_pins.get(worker_id, 0) + sum(row.num_pins)

    @property
    def num_pins(self) -> int:
        """Pins that are left."""
        return sum(self._num_pins.values())

    def is_pinned(self, worker_id: int | None) -> bool:
        """Whether pins are left for a worker, or (None) for any."""
        return bool(self.num_pins if worker_id is None else self._num_pins.get(worker_id))

    def covers(self, found: Iterable[Found[Entry]]) -> bool:
        """Whether a pin is left, for its worker, on each of these chunks."""
        return all(self._pinned(part.worker_id).issuperset(part.entries) for part in found)

    def touches(self, worker_id: int, entries: Iterable[Entry]) -> bool:
        """Whether a pin is left, for a worker, on any of these objects."""
        return not self._pinned(worker_id).isdisjoint(entries)

    def _pinned(self, worker_id: int) -> set[Entry]:
        return {
            entry
            for row in self._rows
            if row.found.worker_id == worker_id
            for entry, num_pins in zip(row.found.entries, row.num_pins, strict=True)
            if num_pins
        }

    def release_one(self, worker_id: int, chunks: range) -> None:
        """A retrieve is done: release one pin on each of its chunks."""
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
                times = row.num_pins[index] if all_readers else min(row.num_pins[index], 1)
                row.num_pins[index] -= times
                released += [row.found.entries[index]] * times
            self._num_pins[row.found.worker_id] -= len(released)
            self._store.unpin(released)
