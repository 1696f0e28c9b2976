"""What lookups pinned: read locks that outlive the request that took them.

A lookup holds every chunk it found, once per reader that is to come, until the readers came, the engine let go, or the
time limit passed. Pins belong to a request id, so nobody can use up the pins of another request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvshm.store import ChunkStore, Entry

__all__ = ["LookupPins", "PinKey"]


class PinKey(NamedTuple):
    """Which object of a request a pin is for."""

    worker_id: int
    object_group_idx: int
    chunk_idx: int  # counted from the first token of the prompt


@dataclass(slots=True, eq=False)
class _Lookup:
    num_chunks: int | None  # None: the result was handed out
    pins: dict[PinKey, list[Entry]]  # one hold each
    deadline: float


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
        return sum(len(holds) for lookup in self._lookups.values() for holds in lookup.pins.values())

    def pin(self, request_id: str, num_chunks: int, found: dict[PinKey, Entry], num_readers: int, now: float) -> None:
        """Hold ``found`` for ``num_readers`` readers; what an earlier lookup of this request pinned is let go."""
        for _ in range(num_readers):
            self._store.hold(found.values())
        self.end(request_id)
        pins = {key: [entry] * num_readers for key, entry in found.items()}
        self._lookups[request_id] = _Lookup(num_chunks, pins, now + self._ttl_s)

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
        self._release(request_id, lambda key: key.worker_id == worker_id and key.chunk_idx in chunks, all_readers=False)

    def release_all(self, request_id: str, worker_id: int | None, chunks: range) -> None:
        """Give up what is left on these chunks, of one worker or (None) of all."""
        self._release(
            request_id,
            lambda key: (worker_id is None or key.worker_id == worker_id) and key.chunk_idx in chunks,
            all_readers=True,
        )

    def end(self, request_id: str) -> None:
        """Forget a request with all its pins."""
        lookup = self._lookups.pop(request_id, None)
        if lookup is not None:
            for holds in lookup.pins.values():
                self._store.release(holds)

    def expire(self, now: float) -> int:
        """End the requests whose time is over; returns how many."""
        late = []
        for request_id, lookup in self._lookups.items():
            if lookup.deadline > now:
                break
            late.append(request_id)
        for request_id in late:
            self.end(request_id)
        return len(late)

    def end_all(self) -> None:
        """Forget all requests."""
        for request_id in list(self._lookups):
            self.end(request_id)

    def _release(self, request_id: str, is_meant: Callable[[PinKey], bool], all_readers: bool) -> None:
        lookup = self._lookups.get(request_id)
        if lookup is None:
            return
        # Backwards, so that the head of the prefix is used last and evicted last.
        for key in list(filter(is_meant, lookup.pins))[::-1]:
            holds = lookup.pins[key]
            self._store.release(holds if all_readers else [holds.pop()])
            if all_readers or not holds:
                del lookup.pins[key]
        self._forget_if_done(request_id, lookup)

    def _forget_if_done(self, request_id: str, lookup: _Lookup) -> None:
        if not lookup.pins and lookup.num_chunks is None:
            del self._lookups[request_id]
