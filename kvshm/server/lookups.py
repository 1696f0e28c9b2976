"""What lookups pinned, and which retrieves use it up.

Engines of kvshm's client say who they are, so a lookup belongs to an engine and a request id of its own choosing, and
the workers of one world share it. Of LMCache's frames only the connection is known, so there a lookup belongs to a
connection and a request id; a worker's retrieve and the end of the session may come over another connection, and are
matched by what they are about. Engines reuse request ids: nobody gets what another's lookup found.

Not thread-safe: all of this belongs to the server's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Generic, TypeVar

from kvshm.server.hits import Hit
from kvshm.store.chunk_store import ChunkStore, Entry
from kvshm.store.pins import PinnedChunks

__all__ = ["EngineLookups", "PlainLookups", "Scope"]

Scope = tuple[str, int, str]
"""Whose chunks a lookup is about: model, world size, salt."""

_MAX_OF_ENGINE = 256  # lookups of an engine that wait for their retrieve; past this the oldest is given up
_MANY = 10_000  # lookups of LMCache's are remembered until their session ends; past this, only what holds something


@dataclass(slots=True, eq=False)
class _Lookup:
    scope: Scope
    request_id: str | None
    hashes: Sequence[bytes]  # of the chunks found
    pins: PinnedChunks
    deadline: float

    def is_about(self, hashes: Sequence[bytes]) -> bool:
        """Whether a prompt with these chunks begins as what was found, as far as both go."""
        length = min(len(self.hashes), len(hashes))
        # A chunk's hash covers the whole prefix before it.
        return length > 0 and self.hashes[length - 1] == hashes[length - 1]


@dataclass(slots=True, eq=False)
class _EngineLookup(_Lookup):
    instance_id: int
    worker_id: int
    done: set[int]  # workers that have retrieved


@dataclass(slots=True, eq=False)
class _PlainLookup(_Lookup):
    connection: bytes
    is_told: bool = False  # its result was handed out, which happens once
    connections: set[bytes] = field(default_factory=set)  # that the request was seen on

    @property
    def is_open(self) -> bool:
        """Whether it holds something, or a result that is still to be handed out."""
        return not self.is_told or self.pins.is_pinned(None)


L = TypeVar("L", bound=_Lookup)


class _Lookups(Generic[L]):
    """Lookups by request, and in the order in which their time is over."""

    def __init__(self) -> None:
        self._in_order: dict[L, None] = {}
        self._by_request: dict[str | None, list[L]] = {}

    def __iter__(self) -> Iterator[L]:
        return iter(list(self._in_order))

    def __len__(self) -> int:
        return len(self._in_order)

    def of(self, request_id: str) -> list[L]:
        """The lookups of a request id, the oldest first."""
        return list(self._by_request.get(request_id, ()))

    def add(self, lookup: L) -> None:
        """Enter one whose time is over after that of all others."""
        self._in_order[lookup] = None
        self._by_request.setdefault(lookup.request_id, []).append(lookup)

    def drop(self, lookup: L) -> None:
        """Take one out and give up its pins."""
        del self._in_order[lookup]
        others = self._by_request[lookup.request_id]
        others.remove(lookup)
        if not others:
            del self._by_request[lookup.request_id]
        lookup.pins.release_all()

    def expire(self, now: float) -> list[L]:
        """Take out those whose time is over."""
        late = list(takewhile(lambda lookup: lookup.deadline <= now, self._in_order))
        for lookup in late:
            self.drop(lookup)
        return late


class EngineLookups:
    """The lookups of kvshm's engines.

    Args:
        ttl_s: How long pins last whose engine never comes back for them.
    """

    def __init__(self, store: ChunkStore, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._lookups: _Lookups[_EngineLookup] = _Lookups()
        self._by_engine: dict[int, dict[_EngineLookup, None]] = {}

    def __len__(self) -> int:
        """Lookups that hold something."""
        return len(self._lookups)

    @property
    def num_pins(self) -> int:
        """Holds on objects, all lookups together."""
        return sum(lookup.pins.num_pins for lookup in self._lookups)

    def look_up(
        self,
        scope: Scope,
        request_id: str | None,
        instance_id: int,
        worker_id: int,
        hashes: Sequence[bytes],
        search: Callable[[Iterable[int]], Hit[Entry]],
        now: float,
    ) -> int:
        """Chunks found, and pinned: for the retrieves of all workers of the world, or (without a request id) for one
        retrieve by this worker.

        A second lookup of a request by the same engine replaces its first. One by another worker joins the lookup that
        is there, so that all workers of a request get one answer.

        Args:
            hashes: Of all chunks of the prompt.
            search: Finds what some workers can retrieve; those that have retrieved already need nothing any more.
        """
        own, others = self._of_request(scope, request_id, instance_id, worker_id)
        joined = [other for other in others if other.is_about(hashes) and other.pins.is_pinned(worker_id)]
        if own is None and joined:
            return min(len(joined[-1].hashes), len(hashes))
        # An engine that has retrieved and looks up again begins anew: engines reuse request ids.
        is_again = own is not None and worker_id not in own.done and own.is_about(hashes)
        done = set(own.done) if is_again and own is not None else set()
        hit = search([worker for worker in range(scope[1]) if worker not in done])
        if hit.num_chunks:
            found = [part for part in hit.found if request_id is not None or part.worker_id == worker_id]
            pins = PinnedChunks(self._store, found)
            prefix = hashes[: hit.num_chunks]
            self._add(_EngineLookup(scope, request_id, prefix, pins, now + self._ttl_s, instance_id, worker_id, done))
        if own is not None:
            self._drop(own)
        return hit.num_chunks

    def use_up(
        self, scope: Scope, request_id: str | None, instance_id: int, worker_id: int, hashes: Sequence[bytes]
    ) -> None:
        """A worker retrieves: what lookups of this request pinned for it is used up; without a request id, the latest
        lookup that found at least these chunks.

        Args:
            hashes: Of the chunks that it retrieves.
        """
        if request_id is None:
            lookup = self._latest(instance_id, hashes, len(hashes))
            if lookup is not None:
                self._drop(lookup)
            return
        own, others = self._of_request(scope, request_id, instance_id, worker_id)
        for lookup in [*others, *([] if own is None else [own])]:
            if lookup.is_about(hashes):
                lookup.pins.release_all(worker_id)
                lookup.done.add(worker_id)
                if not lookup.pins.is_pinned(None):
                    self._drop(lookup)

    def release(self, scope: Scope, request_id: str, instance_id: int, worker_id: int) -> None:
        """Give up what is left of a request: of this engine's lookup, or else of the other workers'."""
        own, others = self._of_request(scope, request_id, instance_id, worker_id)
        for lookup in others if own is None else [own]:
            self._drop(lookup)

    def release_latest(self, instance_id: int, hashes: Sequence[bytes]) -> None:
        """Give up the latest lookup without a request id that was about these chunks."""
        lookup = self._latest(instance_id, hashes, 1)
        if lookup is not None:
            self._drop(lookup)

    def end_of(self, instance_id: int) -> None:
        """Give up all lookups of an engine."""
        for lookup in self._of_engine(instance_id):
            self._drop(lookup)

    def expire(self, now: float) -> int:
        """End the lookups whose time is over; returns how many."""
        late = self._lookups.expire(now)
        for lookup in late:
            self._forget(lookup)
        return len(late)

    def end_all(self) -> None:
        """Give up everything."""
        for lookup in self._lookups:
            self._drop(lookup)

    def _add(self, lookup: _EngineLookup) -> None:
        self._lookups.add(lookup)
        of_engine = self._by_engine.setdefault(lookup.instance_id, {})
        of_engine[lookup] = None
        if len(of_engine) > _MAX_OF_ENGINE:
            self._drop(next(iter(of_engine)))

    def _drop(self, lookup: _EngineLookup) -> None:
        self._lookups.drop(lookup)
        self._forget(lookup)

    def _forget(self, lookup: _EngineLookup) -> None:
        of_engine = self._by_engine[lookup.instance_id]
        del of_engine[lookup]
        if not of_engine:
            del self._by_engine[lookup.instance_id]

    def _of_engine(self, instance_id: int) -> list[_EngineLookup]:
        """The oldest first."""
        return list(self._by_engine.get(instance_id, ()))

    def _latest(self, instance_id: int, hashes: Sequence[bytes], least: int) -> _EngineLookup | None:
        """The latest lookup of an engine, without a request id, that found so many of these chunks."""
        for lookup in reversed(self._of_engine(instance_id)):
            if lookup.request_id is None and len(lookup.hashes) >= least and lookup.is_about(hashes):
                return lookup
        return None

    def _of_request(
        self, scope: Scope, request_id: str | None, instance_id: int, worker_id: int
    ) -> tuple[_EngineLookup | None, list[_EngineLookup]]:
        """This engine's lookup of a request, and those that other workers made for it too.

        Another engine of the same worker is another replica of the model, and its lookups are its own.
        """
        own, others = None, []
        for lookup in self._lookups.of(request_id) if request_id is not None else ():
            if lookup.scope == scope:
                if lookup.instance_id == instance_id:
                    own = lookup
                elif lookup.worker_id != worker_id:
                    others.append(lookup)
        return own, others


class PlainLookups:
    """The lookups of LMCache's frames.

    Args:
        ttl_s: How long pins and results last that nobody comes back for.
    """

    def __init__(self, store: ChunkStore, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._lookups: _Lookups[_PlainLookup] = _Lookups()
        self._many = _MANY

    def __len__(self) -> int:
        """Lookups that hold something, or an untold result."""
        return sum(lookup.is_open for lookup in self._lookups)

    @property
    def num_pins(self) -> int:
        """Holds on objects, all lookups together."""
        return sum(lookup.pins.num_pins for lookup in self._lookups)

    def look_up(
        self,
        connection: bytes,
        scope: Scope,
        request_id: str,
        hashes: Sequence[bytes],
        hit: Hit[Entry],
        num_readers: int,
        now: float,
    ) -> None:
        """Pin what was found for ``num_readers`` retrieves by each worker, in place of what this request had pinned."""
        pins = PinnedChunks(self._store, hit.found, num_readers)
        for lookup in self._lookups.of(request_id):
            if lookup.connection == connection:
                self._lookups.drop(lookup)
        self._lookups.add(
            _PlainLookup(scope, request_id, hashes[: hit.num_chunks], pins, now + self._ttl_s, connection)
        )
        if len(self._lookups) > self._many:
            self._forget_ended()
            self._many = max(_MANY, 2 * len(self._lookups))  # so that looking through them stays rare

    def result(self, connection: bytes, request_id: str) -> int:
        """Chunks that a lookup of this connection found, once; 0 for an unknown request and from the second time on."""
        for lookup in self._lookups.of(request_id):
            if lookup.connection == connection and not lookup.is_told:
                lookup.is_told = True
                if not lookup.hashes:
                    self._lookups.drop(lookup)
                return len(lookup.hashes)
        return 0

    def release_one(
        self,
        connection: bytes,
        scope: Scope,
        request_id: str,
        hashes: Sequence[bytes],
        worker_id: int,
        chunks: range,
    ) -> None:
        """A worker has retrieved, or tried to: give up one hold on each of these chunks.

        Args:
            hashes: Of the prompt's chunks up to the last one of these.
        """
        lookup = self._find(connection, scope, request_id, hashes, worker_id)
        if lookup is not None:
            lookup.pins.release_one(worker_id, chunks)

    def release_all(
        self,
        connection: bytes,
        scope: Scope,
        request_id: str,
        hashes: Sequence[bytes],
        worker_id: int | None,
        chunks: range,
    ) -> None:
        """Give up what is left on these chunks, of one worker or (None) of all."""
        lookup = self._find(connection, scope, request_id, hashes, worker_id)
        if lookup is not None:
            lookup.pins.release_all(worker_id, chunks)

    def end(self, connection: bytes, request_id: str, models: Iterable[tuple[str, int]]) -> None:
        """A session is over: nothing of its request is kept.

        Args:
            models: Model and world size of the engines on this connection. They tell whose session it is where the
                request was never seen on this connection; where several remain, nothing is ended.
        """
        lookups = self._lookups.of(request_id)
        mine = [lookup for lookup in lookups if connection == lookup.connection or connection in lookup.connections]
        if not mine:
            known = set(models)
            mine = [lookup for lookup in lookups if not known or lookup.scope[:2] in known]
            mine = mine if len(mine) == 1 else []
        for lookup in mine:
            self._lookups.drop(lookup)

    def expire(self, now: float) -> int:
        """End the lookups whose time is over; returns how many were open still."""
        num_open = len(self)
        self._lookups.expire(now)
        return num_open - len(self)

    def end_all(self) -> None:
        """Give up everything."""
        for lookup in self._lookups:
            self._lookups.drop(lookup)

    def _find(
        self, connection: bytes, scope: Scope, request_id: str, hashes: Sequence[bytes], worker_id: int | None
    ) -> _PlainLookup | None:
        """The lookup that a request is about: of this connection, else the oldest that fits and is not used up."""
        fitting = [
            lookup
            for lookup in self._lookups.of(request_id)
            if lookup.scope == scope and lookup.is_about(hashes) and lookup.pins.is_pinned(worker_id)
        ]
        fitting.sort(key=lambda lookup: connection != lookup.connection and connection not in lookup.connections)
        if not fitting:
            return None
        fitting[0].connections.add(connection)
        return fitting[0]

    def _forget_ended(self) -> None:
        for lookup in self._lookups:
            if not lookup.is_open:
                self._lookups.drop(lookup)
