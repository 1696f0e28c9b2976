"""What lookups pinned: read locks that outlive the request that took them.

A lookup holds every chunk it found, once per reader that is to come, until the readers came, the engine let go, or the
time limit passed. Pins belong to a request id, so nobody can use up the pins of another request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from kvshm.store.chunk_store import ChunkStore, Entry

__all__ = ["Found", "LookupPins"]


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What a lookup needs of one worker and object group: consecutive chunks."""

    worker_id: int
    first_chunk: int  # counted from the first token of the prompt
    entries: list[Entry]


@dataclass(slots=True, eq=False)
class _Row:
    """Pinned chunks of one worker and object group, and how many holds are left on each."""

    found: Found
    num_holds: list[int]


@dataclass(slots=True, eq=False)
class _Lookup:
    num_chunks: int | None  # None: the result was handed out
    rows: list[_Row]
    deadline: float

    @property
    def num_pins(self) -> int:
        return sum(sum(row.num_holds) for row in self.rows)


class LookupPins:
    """The pins and results of all lookups that found something."""

    def __init__(self, store: ChunkStore, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._lookups: OrderedDict[str, _Lookup] = OrderedDict()  # the oldest first

    def __len__(self) -> int:
        """Lookups with pins or an untold result."""
        return len(self._lookups)

    @property
    def num_pins(self) -> int:
        """Holds on objects, all lookups together."""
        return sum(lookup.num_pins for lookup in self._lookups.values())

    def pin(self, request_id: str, num_chunks: int, found: Sequence[Found], num_readers: int, now: float) -> None:
        """Hold what was found for ``num_readers`` readers; what an earlier lookup of this request pinned is let go."""
        for part in found:
            self._store.hold(part.entries, num_readers)
        self.end(request_id)
        rows = [_Row(part, [num_readers] * len(part.entries)) for part in found]
        self._lookups[request_id] = _Lookup(num_chunks, rows, now + self._ttl_s)

    def result(self, request_id: str) -> int:
        """Chunks that the lookup found, once; 0 for an unknown request and from the second time on."""
        lookup = self._lookups.get(request_id)
        if lookup is None or lookup.num_chunks is None:
            return 0
        num_chunks, lookup.num_chunks = lookup.num_chunks, None
        self._forget_if_done(request_id, lookup)
        return num_chunks

    def release_one(self, request_id: str, worker_id: int, chunks: range) -> None:
        """A reader is done: give up one hold on each of its objects."""
        self._release(request_id, worker_id, chunks, all_readers=False)

    def release_all(self, request_id: str, worker_id: int | None, chunks: range) -> None:
        """Give up what is left on these chunks, of one worker or (None) of all."""
        self._release(request_id, worker_id, chunks, all_readers=True)

    def end(self, request_id: str) -> None:
        """Forget a request with all its pins."""
        lookup = self._lookups.pop(request_id, None)
        if lookup is not None:
            self._let_go(lookup, None, None, all_readers=True)

    def expire(self, now: float) -> int:
        """End the requests whose time is over; returns how many."""
        late = list(takewhile(lambda request_id: self._lookups[request_id].deadline <= now, self._lookups))
        for request_id in late:
            self.end(request_id)
        return len(late)

    def end_all(self) -> None:
        """Forget all requests."""
        for request_id in list(self._lookups):
            self.end(request_id)

    def _release(self, request_id: str, worker_id: int | None, chunks: range, *, all_readers: bool) -> None:
        lookup = self._lookups.get(request_id)
        if lookup is not None:
            self._let_go(lookup, worker_id, chunks, all_readers=all_readers)
            self._forget_if_done(request_id, lookup)

    def _let_go(self, lookup: _Lookup, worker_id: int | None, chunks: range | None, *, all_readers: bool) -> None:
        for row in lookup.rows:
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

    def _forget_if_done(self, request_id: str, lookup: _Lookup) -> None:
        if lookup.num_chunks is None and not lookup.num_pins:
            del self._lookups[request_id]
