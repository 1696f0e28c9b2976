"""What lookups pinned, and which retrieves use it up.

Engines of kvshm's client say who they are, so a lookup belongs to an engine and a request id of its own choosing, and
the workers of one world share it. Of LMCache's frames only the client is known that sent them (of LMCache's clients the
connection), so there a lookup belongs to a client and a request id; a worker's retrieve and the end of the session may
come from another one, and are matched by what they are about. Engines reuse request ids: nobody gets what another's
lookup found.

Not thread-safe: all of this belongs to the server's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Generic, TypeVar

from kvshm.prefix import is_about
from kvshm.server.hits import Hit
from kvshm.store.chunk_store import ChunkStore, Entry
from kvshm.store.pins import PinnedChunks

__all__ = ["EngineLookups", "PlainLookups", "Scope"]

Scope = tuple[str, int, str]
"""Whose chunks a lookup is about: model, world size, salt."""

_MAX_OF_ENGINE = 256  # lookups of an engine that wait for their retrieve; past this the oldest is given up
_MAX_OF_CLIENT = 10_000  # lookups of LMCache's frames that a client is remembered for, ended ones too


@dataclass(slots=True, eq=False)
class _Lookup:
    scope: Scope
    request_id: str | None
    hashes: Sequence[bytes]  # of the chunks found
    pins: PinnedChunks
    deadline: float


@dataclass(slots=True, eq=False)
class _EngineLookup(_Lookup):
    maker: int  # the engine that asked first
    workers: dict[int, int] = field(default_factory=dict)  # of the engines that asked, or retrieved, by instance id
    done: set[int] = field(default_factory=set)  # workers that have retrieved

    @property
    def is_awaited(self) -> bool:
        """Whether an engine that asked has not retrieved yet."""
        return any(worker_id not in self.done for worker_id in self.workers.values())

    def is_open_to(self, worker_id: int) -> bool:
        """Whether an engine that has not asked, of this worker, may use what is pinned for it."""
        return worker_id not in self.workers.values() and self.pins.is_pinned(worker_id)


@dataclass(slots=True, eq=False)
class _PlainLookup(_Lookup):
    client: bytes
    is_told: bool = False  # its result was handed out, which happens once
    clients: set[bytes] = field(default_factory=set)  # others that spoke of it

    @property
    def is_open(self) -> bool:
        """Whether something is pinned, or the result still to be handed out."""
        return not self.is_told or self.pins.is_pinned(None)


L = TypeVar("L", bound=_Lookup)


class _Lookups(Generic[L]):
    """Lookups by request, by whose they are (an engine's or a client's), and in the order of their deadlines."""

    def __init__(self) -> None:
        self._in_order: dict[L, None] = {}
        self._by_request: dict[str | None, list[L]] = {}
        self._by_owner: dict[Hashable, dict[L, None]] = {}

    def __iter__(self) -> Iterator[L]:
        return iter(list(self._in_order))

    def __len__(self) -> int:
        return len(self._in_order)

    @property
    def num_pins(self) -> int:
        """Pins on objects, all lookups together."""
        return sum(lookup.pins.num_pins for lookup in self._in_order)

    def of_request(self, request_id: str | None) -> list[L]:
        """The lookups of a request id, the oldest first."""
        return list(self._by_request.get(request_id, ()))

    def of_owner(self, owner: Hashable) -> list[L]:
        """The lookups of an engine or a client, the oldest first."""
        return list(self._by_owner.get(owner, ()))

    def excess_of(self, owner: Hashable, most: int) -> list[L]:
        """The oldest of an owner that has more than ``most``; the owner has one too many at most."""
        of_owner = self._by_owner.get(owner, {})
        return [next(iter(of_owner))] if len(of_owner) > most else []

    def add(self, lookup: L, owner: Hashable) -> None:
        """Enter one whose time is over after that of all others."""
        self._in_order[lookup] = None
        self._by_request.setdefault(lookup.request_id, []).append(lookup)
        self.join(lookup, owner)

    def join(self, lookup: L, owner: Hashable) -> None:
        """Let one be another's too."""
        self._by_owner.setdefault(owner, {})[lookup] = None

    def part(self, lookup: L, owner: Hashable) -> None:
        """Let one be somebody's no more."""
        of_owner = self._by_owner[owner]
        del of_owner[lookup]
        if not of_owner:
            del self._by_owner[owner]

    def renew(self, lookup: L, deadline: float) -> None:
        """Let one last longer than all others."""
        lookup.deadline = deadline
        del self._in_order[lookup]
        self._in_order[lookup] = None

    def drop(self, lookup: L, owners: Iterable[Hashable]) -> None:
        """Take one out and release its pins."""
        del self._in_order[lookup]
        others = self._by_request[lookup.request_id]
        others.remove(lookup)
        if not others:
            del self._by_request[lookup.request_id]
        for owner in owners:
            self.part(lookup, owner)
        lookup.pins.release_all()

    def late(self, now: float) -> list[L]:
        """Those whose time is over."""
        return list(takewhile(lambda lookup: lookup.deadline <= now, self._in_order))


class EngineLookups:
    """The lookups of kvshm's engines.

    Args:
        ttl_s: How long pins last whose engine never comes back for them.
    """

    def __init__(self, store: ChunkStore, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._lookups: _Lookups[_EngineLookup] = _Lookups()

    def __len__(self) -> int:
        """Lookups whose chunks are pinned."""
        return len(self._lookups)

    @property
    def num_pins(self) -> int:
        """Pins on objects, all lookups together."""
        return self._lookups.num_pins

    def look_up(
        self,
        scope: Scope,
        request_id: str | None,
        instance_id: int,
        worker_id: int,
        hashes: Sequence[bytes],
        search: Callable[[Iterable[int], int], Hit[Entry]],
        now: float,
    ) -> int:
        """Chunks found, and pinned: for the retrieves of all workers of the world, or (without a request id) for one
        retrieve by this worker.

        A second lookup of a request by the same engine replaces its first. One by another worker joins the lookup that
        is there, where what is pinned serves it, so that all workers of a request get one answer. What others rely on
        is not replaced, and nobody is promised more than they were.

        Args:
            hashes: Of all chunks of the prompt.
            search: Finds what some workers can retrieve of the first chunks, given their number.
        """
        mine, others = self._of_request(scope, request_id, instance_id, worker_id)
        # An engine that has retrieved and looks up again begins anew: engines reuse request ids.
        again = [lookup for lookup in mine if worker_id not in lookup.done and is_about(lookup.hashes, hashes)]
        relied_on = [lookup for lookup in again if lookup.done or len(lookup.workers) > 1]
        if not mine:
            relied_on = [lookup for lookup in others if is_about(lookup.hashes, hashes)]
        limit = len(hashes)
        for lookup in relied_on:
            limit = min(limit, len(lookup.hashes))
            hit = search([worker_id], limit)
            if hit.num_chunks == limit and lookup.pins.covers(hit.found):
                self._lookups.renew(lookup, now + self._ttl_s)
                self._join(lookup, instance_id, worker_id)
                return limit
        done = set[int]().union(*(lookup.done for lookup in again))
        hit = search([worker for worker in range(scope[1]) if worker not in done], limit)
        new: _EngineLookup | None = None
        if hit.num_chunks:
            found = [part for part in hit.found if request_id is not None or part.worker_id == worker_id]
            # Before the old pins go: what is found must not be evicted meanwhile.
            pins = PinnedChunks(self._store, found)
            prefix = hashes[: hit.num_chunks]
            new = _EngineLookup(scope, request_id, prefix, pins, now + self._ttl_s, instance_id, done=done)
        for lookup in mine:
            self._leave(lookup, instance_id)
        if new is not None:
            self._lookups.add(new, instance_id)
            self._join(new, instance_id, worker_id)
        return hit.num_chunks

    def use_up(
        self,
        scope: Scope,
        request_id: str | None,
        instance_id: int,
        worker_id: int,
        hashes: Sequence[bytes],
        entries: Collection[Entry],
    ) -> None:
        """A worker retrieves: what a lookup of this request pinned for it is used up, of its own or else of another
        worker's; without a request id, its latest lookup that found at least these chunks.

        Args:
            hashes: Of the chunks that it retrieves.
            entries: The objects that it reads, none on a miss. Of another worker's lookup nothing is used up unless
                some of them are pinned there: else it was made for an engine of another layout.
        """
        if request_id is None:
            latest = self._latest(instance_id, hashes, len(hashes))
            if latest is not None:
                self._drop(latest)
            return
        mine, others = self._of_request(scope, request_id, instance_id, worker_id)
        for lookup in [*mine, *(other for other in others if other.pins.touches(worker_id, entries))]:
            if worker_id not in lookup.done and is_about(lookup.hashes, hashes):
                self._join(lookup, instance_id, worker_id)
                self._use_share(lookup, worker_id)
                return

    def release(self, scope: Scope, request_id: str, instance_id: int, worker_id: int) -> None:
        """Give up what is left of a request, for all workers.

        An engine that neither looked it up nor retrieved means another worker's lookup, where there is but one.
        """
        mine, others = self._of_request(scope, request_id, instance_id, worker_id)
        if not mine and len(others) == 1:
            mine = others
        for lookup in mine:
            self._drop(lookup)

    def release_latest(self, instance_id: int, hashes: Sequence[bytes]) -> None:
        """Give up the latest lookup without a request id that was about these chunks."""
        lookup = self._latest(instance_id, hashes, 1)
        if lookup is not None:
            self._drop(lookup)

    def end_of(self, instance_id: int) -> None:
        """Give up all lookups of an engine, but for what other workers were promised."""
        for lookup in self._lookups.of_owner(instance_id):
            self._leave(lookup, instance_id)

    def expire(self, now: float) -> int:
        """End the lookups whose time is over; returns how many."""
        late = self._lookups.late(now)
        for lookup in late:
            self._drop(lookup)
        return len(late)

    def end_all(self) -> None:
        """Give up everything."""
        for lookup in self._lookups:
            self._drop(lookup)

    def _join(self, lookup: _EngineLookup, instance_id: int, worker_id: int) -> None:
        lookup.workers[instance_id] = worker_id
        self._lookups.join(lookup, instance_id)
        for oldest in self._lookups.excess_of(instance_id, _MAX_OF_ENGINE):
            self._leave(oldest, instance_id)

    def _leave(self, lookup: _EngineLookup, instance_id: int) -> None:
        """An engine needs a lookup no more; it goes unless others rely on it."""
        worker_id = lookup.workers.pop(instance_id)
        self._lookups.part(lookup, instance_id)
        if lookup.maker in lookup.workers or lookup.is_awaited:
            self._use_share(lookup, worker_id)
        else:
            self._drop(lookup)

    def _use_share(self, lookup: _EngineLookup, worker_id: int) -> None:
        lookup.pins.release_all(worker_id)
        lookup.done.add(worker_id)
        if not lookup.pins.is_pinned(None):
            self._drop(lookup)

    def _drop(self, lookup: _EngineLookup) -> None:
        self._lookups.drop(lookup, lookup.workers)

    def _latest(self, instance_id: int, hashes: Sequence[bytes], least: int) -> _EngineLookup | None:
        """The latest lookup of an engine, without a request id, that found at least ``least`` of these chunks."""
        for lookup in reversed(self._lookups.of_owner(instance_id)):
            if lookup.request_id is None and len(lookup.hashes) >= least and is_about(lookup.hashes, hashes):
                return lookup
        return None

    def _of_request(
        self, scope: Scope, request_id: str | None, instance_id: int, worker_id: int
    ) -> tuple[list[_EngineLookup], list[_EngineLookup]]:
        """The lookups of a request that are this engine's, and those of other workers that are open to it.

        Another engine of the same worker is another replica of the model, and its lookups are its own.
        """
        of_request = [
            lookup
            for lookup in (() if request_id is None else self._lookups.of_request(request_id))
            if lookup.scope == scope
        ]
        return (
            [lookup for lookup in of_request if instance_id in lookup.workers],
            [lookup for lookup in of_request if instance_id not in lookup.workers and lookup.is_open_to(worker_id)],
        )


class PlainLookups:
    """The lookups of LMCache's frames.

    Args:
        ttl_s: How long pins and results last that nobody comes back for.
    """

    def __init__(self, store: ChunkStore, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._lookups: _Lookups[_PlainLookup] = _Lookups()

    def __len__(self) -> int:
        """Lookups whose chunks are pinned, or whose result is still to be handed out."""
        return sum(lookup.is_open for lookup in self._lookups)

    @property
    def num_pins(self) -> int:
        """Pins on objects, all lookups together."""
        return self._lookups.num_pins

    def look_up(
        self,
        client: bytes,
        scope: Scope,
        request_id: str,
        hashes: Sequence[bytes],
        hit: Hit[Entry],
        num_readers: int,
        now: float,
    ) -> None:
        """Pin what was found for ``num_readers`` retrieves by each worker, in place of what this request had pinned."""
        pins = PinnedChunks(self._store, hit.found, num_readers)
        for lookup in self._lookups.of_request(request_id):
            if lookup.client == client:
                self._drop(lookup)
        # Remembered until the session ends, also where nothing is pinned: it shows whose session that is.
        prefix = hashes[: hit.num_chunks]
        self._lookups.add(_PlainLookup(scope, request_id, prefix, pins, now + self._ttl_s, client), client)
        for oldest in self._lookups.excess_of(client, _MAX_OF_CLIENT):
            self._drop(oldest)

    def result(self, client: bytes, request_id: str) -> int:
        """Chunks that a lookup of this client found, once; 0 for an unknown request and from the second time on."""
        for lookup in self._lookups.of_request(request_id):
            if lookup.client == client and not lookup.is_told:
                lookup.is_told = True
                return len(lookup.hashes)
        return 0

    def release_one(
        self,
        client: bytes,
        scope: Scope,
        request_id: str,
        hashes: Sequence[bytes],
        worker_id: int,
        chunks: range,
    ) -> None:
        """A worker has retrieved, or tried to: release one pin on each of these chunks.

        Args:
            hashes: Of the prompt's chunks up to the last one of these.
        """
        lookup = self._find(client, scope, request_id, hashes, worker_id)
        if lookup is not None:
            lookup.pins.release_one(worker_id, chunks)

    def release_all(
        self,
        client: bytes,
        scope: Scope,
        request_id: str,
        hashes: Sequence[bytes],
        worker_id: int | None,
        chunks: range,
    ) -> None:
        """Give up what is left on these chunks, of one worker or (None) of all."""
        lookup = self._find(client, scope, request_id, hashes, worker_id)
        if lookup is not None:
            lookup.pins.release_all(worker_id, chunks)

    def end(self, client: bytes, request_id: str, models: Iterable[tuple[str, int]]) -> None:
        """A session is over: nothing of its request is kept.

        Args:
            models: Model and world size of the engines on this client. They show whose session it is where the
                request was never seen on this client; where several remain, nothing is ended.
        """
        lookups = self._lookups.of_request(request_id)
        mine = [lookup for lookup in lookups if client == lookup.client or client in lookup.clients]
        if not mine:
            known = set(models)
            mine = [lookup for lookup in lookups if not known or lookup.scope[:2] in known]
            mine = mine if len(mine) == 1 else []
        for lookup in mine:
            self._drop(lookup)

    def expire(self, now: float) -> int:
        """End the lookups whose time is over; returns how many were open still."""
        late = self._lookups.late(now)
        num_open = sum(lookup.is_open for lookup in late)
        for lookup in late:
            self._drop(lookup)
        return num_open

    def end_all(self) -> None:
        """Give up everything."""
        for lookup in self._lookups:
            self._drop(lookup)

    def _drop(self, lookup: _PlainLookup) -> None:
        self._lookups.drop(lookup, [lookup.client])

    def _find(
        self, client: bytes, scope: Scope, request_id: str, hashes: Sequence[bytes], worker_id: int | None
    ) -> _PlainLookup | None:
        """The lookup that a request is about: of this client, else the oldest that fits and is not used up."""
        fitting = [
            lookup
            for lookup in self._lookups.of_request(request_id)
            if lookup.scope == scope and is_about(lookup.hashes, hashes) and lookup.pins.is_pinned(worker_id)
        ]
        fitting.sort(key=lambda lookup: client != lookup.client and client not in lookup.clients)
        if not fitting:
            return None
        fitting[0].clients.add(client)
        return fitting[0]
