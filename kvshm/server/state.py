"""What all operations of the cache server share: its books, its settings, and what is derived from a request's key.

One thread, the server's loop, uses everything here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvshm.context import CPUCacheContext
from kvshm.prefix import chunk_hashes
from kvshm.protocol import CacheKey
from kvshm.server.jobs import Done
from kvshm.server.registrations import ChunkLayout, PreparedStore, Registration, Registrations, object_keys
from kvshm.shm.objects import is_in_use, is_posix_name
from kvshm.store.chunk_store import ChunkStore, Entry
from kvshm.store.pins import Found, LookupPins
from kvshm.store.pool_memory import PoolMemory

__all__ = ["DEFERRED", "Call", "Counters", "Refused", "ServerState", "Settings", "worker_of"]

DEFERRED = object()
"""What an operation returns that answers its call later."""

_logger = logging.getLogger("kvshm")


class Refused(ValueError):
    """A request that cannot be served; its text goes to the client."""


class Call(Protocol):
    """One request, to be answered once."""

    def answer(self, result: Any) -> None:
        """Send the result."""

    def fail(self, reason: str) -> None:
        """Send the operation's failure value and why."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What an operator may choose. Times in seconds.

    Raises:
        ValueError: A number that makes no sense.
    """

    chunk_size: int = 256  # tokens
    null_block_id: int = 0
    reap_after_s: float = 30.0  # silence of an engine that ever pinged
    grace_s: float = 3600.0  # silence of one that never did
    pin_ttl_s: float = 300.0  # of a lookup's read locks
    prepare_ttl_s: float = 600.0  # of slots lent to an engine that copies by itself
    verify: bool = False  # gather twice and compare, to find engines that write to blocks while they are stored

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size is {self.chunk_size} tokens; it must be at least 1")
        for name in ("reap_after_s", "grace_s", "pin_ttl_s", "prepare_ttl_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")


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
    """The books of a server.

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
    quarantine: list[PreparedStore] = field(default_factory=list)  # lent to engines that fell silent
    registrations: Registrations = field(init=False)
    pins: LookupPins = field(init=False)

    def __post_init__(self) -> None:
        self.registrations = Registrations(self.settings.reap_after_s, self.settings.grace_s)
        self.pins = LookupPins(self.objects, self.settings.pin_ttl_s)

    # Keys

    def chunks_in_range(self, key: CacheKey) -> range:
        """Full chunks of the key's range, counted from the first token."""
        size = self.settings.chunk_size
        return range(-(-key.start // size), key.end // size)

    def hashes_in_range(self, key: CacheKey) -> list[bytes]:
        """Hashes of those chunks.

        Raises:
            Refused: The range ends beyond the tokens.
        """
        if key.end > key.token_ids.size:
            raise Refused(f"the range ends at token {key.end} but {key.token_ids.size} token ids came")
        hashes = chunk_hashes(key.token_ids[: key.end], self.settings.chunk_size)
        chunks = self.chunks_in_range(key)
        return hashes[chunks.start : chunks.stop]

    # Engines

    def registration(self, instance_id: int) -> Registration:
        """The engine of an id, its lease renewed. KeyError: there is none."""
        return self.registrations.get(instance_id, self.clock())

    def enter(self, registration: Registration) -> None:
        """Enter an engine in place of the one that had its id."""
        previous = self.registrations.add(registration)
        if previous is not None:
            self.retire(previous, lambda: None)

    def retire(self, registration: Registration, then: Callable[[], None]) -> None:
        """Take the lent slots back, and close the context once no copy runs on it."""
        self.expire_slots(registration, float("inf"))

        def close() -> None:
            context, registration.context = registration.context, None
            if context is None:
                then()
            else:
                self.close_context(context, then)

        registration.when_idle(close)

    def close_context(self, context: CPUCacheContext, then: Callable[[], None]) -> None:
        """Unmap an engine's cache. In another thread: unmapping gigabytes takes longer than a ping may."""
        holder = [context]

        def work() -> None:
            holder.pop().close()

        self.run(work, lambda result, reason: then())

    def reap(self, registration: Registration) -> None:
        """Drop an engine that fell silent.

        It may be stopped in the middle of writing and go on one day. So slots that it was lent are another's only once
        its process is known to be dead, or their time is over.
        """
        self.registrations.remove(registration.instance_id)
        self.counters.reaped += 1
        if registration.prepared and not self._is_dead(registration):
            self.quarantine.extend(registration.prepared.values())
            registration.prepared.clear()
        self.retire(registration, lambda: None)

    def _is_dead(self, registration: Registration) -> bool:
        name = registration.life_sign
        return is_posix_name(name) and not is_in_use(name)

    def end_quarantine(self, now: float) -> None:
        """Take back the slots of silent engines whose time is over."""
        late = [prepared for prepared in self.quarantine if prepared.deadline < now]
        self.quarantine = [prepared for prepared in self.quarantine if prepared.deadline >= now]
        for prepared in late:
            self._take_back(prepared)

    def _take_back(self, prepared: PreparedStore) -> None:
        self.objects.abort(prepared.reservation)
        self.counters.expired_slots += len(prepared.reservation.new)

    def expire_slots(self, registration: Registration, now: float) -> None:
        """Take back the slots that have been lent for too long."""
        for identity, prepared in list(registration.prepared.items()):
            if prepared.deadline < now:
                del registration.prepared[identity]
                self._take_back(prepared)
        for identity, reads in list(registration.reading.items()):
            for read in [read for read in reads if read.deadline < now]:
                reads.remove(read)
                self.objects.release(read.entries)
            if not reads:
                del registration.reading[identity]

    # Objects

    def bytes_of(self, entry: Entry) -> NDArray[np.uint8]:
        """An object's bytes in the pool."""
        return self.pool.bytes[entry.offset : entry.offset + entry.nbytes]

    def longest_hit(self, key: CacheKey, layout: ChunkLayout, hashes: list[bytes]) -> tuple[int, list[Found]]:
        """The longest prefix in chunks that all workers and object groups have, and the objects it needs."""
        limit = len(hashes)
        rows: list[tuple[int, int, list[Entry | None]]] = []  # worker, object group, entry per chunk
        windowed: list[tuple[int, list[int]]] = []
        for worker_id in range(key.world_size):
            for group in layout.served_groups:
                if not limit:
                    return 0, []
                row = self._row(key, worker_id, layout, group, hashes[:limit])
                rows.append((worker_id, group, row))
                window = layout.group_windows[group]
                if window < 0:
                    limit = row.index(None) if None in row else len(row)
                else:
                    windowed.append((window, _run_lengths(row)))
                    limit = _within(windowed[-1:], limit)
        limit = _within(windowed, limit)
        found = []
        for worker_id, group, row in rows:
            needed = layout.needed_chunks(group, limit)
            entries = [entry for entry in row[needed.start : needed.stop] if entry is not None]
            found.append(Found(worker_id, needed.start, entries))
        return limit, found

    def cached(
        self, key: CacheKey, worker_id: int, layout: ChunkLayout, hashes: list[bytes]
    ) -> dict[int, list[Entry | None]]:
        """Per served object group the objects of these chunks; None where the window does not reach.

        Raises:
            Refused: One is missing.
        """
        found: dict[int, list[Entry | None]] = {}
        for group in layout.served_groups:
            needed = layout.needed_chunks(group, len(hashes))
            row = self._row(key, worker_id, layout, group, hashes[needed.start :])
            if None in row:
                raise Refused(f"{row.count(None)} of {len(row)} chunks are not cached in object group {group}")
            found[group] = [*[None] * needed.start, *row]
        return found

    def _row(
        self, key: CacheKey, worker_id: int, layout: ChunkLayout, object_group_idx: int, hashes: list[bytes]
    ) -> list[Entry | None]:
        """The visible objects of these chunks."""
        nbytes = layout.group_nbytes[object_group_idx]
        names = object_keys(key, worker_id, layout, object_group_idx, hashes)
        row = [self.objects.get(name) for name in names]
        for index, entry in enumerate(row):
            if entry is not None and entry.nbytes != nbytes:
                row[index] = None
                self.record(f"a cached chunk has {entry.nbytes} bytes, this layout's have {nbytes}: taken as missing")
        return row

    # Records

    def record(self, reason: str) -> str:
        """Remember what went wrong last; gives it back."""
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


def _within(windowed: list[tuple[int, list[int]]], limit: int) -> int:
    """The longest prefix of at most ``limit`` chunks whose windows are there in all these groups."""
    while limit and any(runs[limit - 1] < min(window, limit) for window, runs in windowed):
        limit -= 1
    return limit


def _run_lengths(row: list[Entry | None]) -> list[int]:
    """Per chunk, how many present ones end with it."""
    runs, length = [], 0
    for entry in row:
        length = 0 if entry is None else length + 1
        runs.append(length)
    return runs
