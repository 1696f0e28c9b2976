"""What all operations of the cache server share: its state, and what is derived from a request's key.

One thread, the server's loop, uses everything here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvshm.cache import MappedCache
from kvshm.layout import ObjectLayout
from kvshm.prefix import chunk_hashes
from kvshm.protocol import CacheKey, EngineIdentity
from kvshm.server.hits import Hit, Need, longest_hit
from kvshm.server.jobs import Done
from kvshm.server.loans import Loans
from kvshm.server.lookups import EngineLookups, PlainLookups, Scope
from kvshm.server.registrations import Registration, Registrations, ServerDriven, object_keys, scope_of_engine
from kvshm.server.settings import Settings
from kvshm.store.chunk_store import ChunkStore, Entry
from kvshm.store.pool_memory import PoolMemory

__all__ = ["DEFERRED", "Call", "Counters", "Refused", "ServerState", "scope_of", "worker_of"]

DEFERRED = object()
"""What an operation returns that answers its call later."""

_logger = logging.getLogger("kvshm")


class Refused(ValueError):
    """A request that cannot be served; its text goes to the client."""


class Call(Protocol):
    """One request, to be answered once."""

    @property
    def client(self) -> bytes:
        """Whose it is: a client's of kvshm, or else a connection's."""

    def answer(self, result: Any) -> None:
        """Send the result."""

    def fail(self, reason: str) -> None:
        """Send the operation's failure value and why."""


@dataclass(slots=True)
class Counters:
    """What has happened since the start."""

    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    stores: int = 0
    stored_bytes: int = 0
    retrieves: int = 0
    retrieved_bytes: int = 0
    failed_stores: int = 0
    failed_retrieves: int = 0
    late_stores: int = 0  # finished after their client had given up: not published
    expired_lookups: int = 0
    expired_slots: int = 0
    reaped: int = 0


@dataclass(slots=True)
class ServerState:
    """The state of a server.

    Args:
        run: Takes work for another thread, and what the loop does with its result.
    """

    settings: Settings
    objects: ChunkStore
    pool: PoolMemory
    run: Callable[[Callable[[], Any], Done], None]
    clock: Callable[[], float] = time.monotonic
    counters: Counters = field(default_factory=Counters)
    last_error: str = ""
    registrations: Registrations = field(init=False)
    lookups: EngineLookups = field(init=False)
    plain_lookups: PlainLookups = field(init=False)
    loans: Loans = field(init=False)
    retired: list[Registration] = field(default_factory=list)  # gone, but a copy still runs on their memory

    def __post_init__(self) -> None:
        self.registrations = Registrations(self.settings.reap_after_s, self.settings.grace_s)
        self.lookups = EngineLookups(self.objects, self.settings.pin_ttl_s)
        self.plain_lookups = PlainLookups(self.objects, self.settings.pin_ttl_s)
        self.loans = Loans(self.objects, self.settings.prepare_ttl_s)

    # Keys

    def chunks_in_range(self, key: CacheKey) -> range:
        """Full chunks of the key's range, counted from the first token."""
        size = self.settings.chunk_size
        return range(-(-key.start // size), key.end // size)

    def hashes_up_to(self, key: CacheKey) -> list[bytes]:
        """Hashes of all full chunks from the first token to the end of the key's range.

        Raises:
            Refused: The range ends beyond the tokens.
        """
        if key.end > key.token_ids.size:
            raise Refused(f"the range ends at token {key.end} but {key.token_ids.size} token ids came")
        return self.hashes_of(key.token_ids[: key.end])

    def hashes_in_range(self, key: CacheKey) -> list[bytes]:
        """Hashes of the full chunks of the key's range. Raises as above."""
        chunks = self.chunks_in_range(key)
        return self.hashes_up_to(key)[chunks.start : chunks.stop]

    def hashes_of(self, tokens: NDArray[np.int64]) -> list[bytes]:
        """Hashes of all full chunks of a prompt."""
        return chunk_hashes(tokens, self.settings.chunk_size)

    # Engines

    def registration(self, instance_id: int) -> Registration:
        """The engine of an id, its lease renewed. NotRegisteredError: there is none."""
        return self.registrations.get(instance_id, self.clock())

    def kvshm_engine(self, instance_id: int) -> tuple[Registration, EngineIdentity]:
        """An engine of kvshm's client, its lease renewed.

        Raises:
            NotRegisteredError: There is none.
            Refused: It was registered by LMCache's client.
        """
        registration = self.registration(instance_id)
        if not isinstance(registration.identity, EngineIdentity):
            raise Refused(f"instance {instance_id} was registered by LMCache's client; use LMCache's operations")
        return registration, registration.identity

    def enter(self, registration: Registration) -> None:
        """Enter an engine in place of the one that had its id."""
        previous = self.registrations.add(registration)
        if previous is not None:
            self.retire(previous, lambda: None)

    def retire(self, registration: Registration, then: Callable[[], None]) -> None:
        """Close the context of an engine that is gone, once no copy runs on it."""
        self.retired.append(registration)

        def close() -> None:
            self.retired.remove(registration)
            if isinstance(registration.way, ServerDriven):
                self.close_cache(registration.way.cache, then)
            else:
                then()

        registration.when_idle(close)

    def when_idle(self, instance_id: int, then: Callable[[], None]) -> None:
        """Call back once no copy runs on the memory of an engine, be it registered still or not."""
        for registration in [*self.registrations, *self.retired]:
            if registration.instance_id == instance_id and registration.num_running:
                registration.when_idle(lambda: self.when_idle(instance_id, then))
                return
        then()

    def unregister(self, instance_id: int, then: Callable[[], None]) -> None:
        """An engine leaves: its pins are released, and it uses nothing that it was lent."""
        self.lookups.end_of(instance_id)
        self.count_expired(self.loans.end_of(instance_id))
        registration = self.registrations.remove(instance_id)
        if registration is None:
            then()
        else:
            self.retire(registration, then)

    def close_cache(self, cache: MappedCache, then: Callable[[], None]) -> None:
        """Unmap an engine's cache. In another thread: unmapping gigabytes takes longer than a ping may."""
        self.run(cache.close, lambda result, reason: then())

    def reap(self, registration: Registration) -> None:
        """Drop an engine that fell silent.

        It may be stopped in the middle of writing and go on one day, so what it was lent stays lent, see
        :mod:`kvshm.server.loans`.
        """
        self.registrations.remove(registration.instance_id)
        self.lookups.end_of(registration.instance_id)
        self.counters.reaped += 1
        self.retire(registration, lambda: None)

    def count_expired(self, num_slots: int) -> None:
        """Slots came back that were lent for writing and not committed."""
        self.counters.expired_slots += num_slots

    # Objects

    def bytes_of(self, entry: Entry) -> NDArray[np.uint8]:
        """An object's bytes in the pool."""
        return self.pool.bytes[entry.offset : entry.offset + entry.nbytes]

    def longest_hit(self, scope: Scope, needs: list[Need], hashes: list[bytes]) -> Hit[Entry]:
        """The longest cached prefix of a prompt with these chunks that all needs can be served from."""
        return longest_hit(
            needs, len(hashes), lambda need, count: self._row(scope, need.worker_id, need.layout, hashes[:count])
        )

    def hit_of(self, registration: Registration, workers: Iterable[int], hashes: list[bytes]) -> Hit[Entry]:
        """The longest cached prefix that some workers of an engine of kvshm's client can retrieve."""
        assert isinstance(registration.identity, EngineIdentity)
        needs = self.registrations.needs_of(registration, workers)
        return self.longest_hit(scope_of_engine(registration.identity), needs, hashes)

    def num_found(self, registration: Registration, hashes: list[bytes]) -> int:
        """Chunks that a lookup by an engine of kvshm's client would find now."""
        return self.hit_of(registration, range(registration.model[1]), hashes).num_chunks

    def use_up(
        self, registration: Registration, request_id: str | None, hashes: list[bytes], entries: list[Entry]
    ) -> None:
        """An engine of kvshm's client retrieves these objects (none on a miss): its pins of the request are used up."""
        identity = registration.identity
        assert isinstance(identity, EngineIdentity)
        self.lookups.use_up(
            scope_of_engine(identity), request_id, registration.instance_id, identity.worker_id, hashes, entries
        )

    def cached(
        self, scope: Scope, worker_id: int, registration: Registration, hashes: list[bytes]
    ) -> dict[int, list[Entry | None]]:
        """Per served object group the objects of these chunks; None where the window does not reach.

        Raises:
            Refused: One is missing.
        """
        found: dict[int, list[Entry | None]] = {}
        for group, layout in enumerate(registration.objects):
            if not layout.is_served:
                continue
            needed = layout.needed_chunks(len(hashes))
            row = self._row(scope, worker_id, layout, hashes[needed.start :])
            if None in row:
                raise Refused(f"{row.count(None)} of {len(row)} chunks are not cached in object group {group}")
            found[group] = [*[None] * needed.start, *row]
        return found

    def _row(self, scope: Scope, worker_id: int, layout: ObjectLayout, hashes: list[bytes]) -> list[Entry | None]:
        """The visible objects of these chunks."""
        return [self.objects.get(name) for name in object_keys(scope, worker_id, layout, hashes)]

    # Records

    def record(self, reason: str) -> str:
        """Remember what went wrong last, and return it."""
        self.last_error = reason
        _logger.info("kvshm server: %s", reason)
        return reason

    def no_room(self) -> Refused:
        """The refusal of a store for which there is no room."""
        self.counters.failed_stores += 1
        allocator = self.objects.allocator
        return Refused(
            self.record(
                f"no room: {allocator.busy_nbytes} of {allocator.nbytes} bytes are pinned or being written; "
                f"raise the capacity or store less at once"
            )
        )


def worker_of(key: CacheKey) -> int:
    """The worker that a key is about.

    Raises:
        Refused: It is about all.
    """
    if key.worker_id is None:
        raise Refused("worker_id is nil; only lookups are about all workers")
    return key.worker_id


def scope_of(key: CacheKey) -> Scope:
    """Whose chunks a key is about."""
    return key.model_name, key.world_size, key.cache_salt
