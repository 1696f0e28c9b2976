"""What the cache server does for each operation. Books only: copies run elsewhere, and sockets are not known here.

One thread, the server's loop, calls everything in this module. An operation returns its result, or :data:`DEFERRED` and
answers its :class:`Call` later. What it raises becomes the reply's failure.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvshm._version import __version__
from kvshm.context import CPUCacheContext
from kvshm.jobs import Done
from kvshm.layout import EngineGroupInfo, all_null_chunk_masks
from kvshm.pins import LookupPins, PinKey
from kvshm.pool_memory import PoolMemory
from kvshm.prefix import chunk_hashes
from kvshm.protocol import NO_RESULT, PROTOCOL_VERSION, CacheKey, EngineDrivenSpec
from kvshm.registrations import (
    ChunkLayout,
    PreparedRead,
    PreparedStore,
    Registration,
    Registrations,
    context_layout,
    engine_driven_layout,
    object_keys,
)
from kvshm.store import ChunkStore, Entry
from kvshm.transfer import gather_chunks, scatter_chunks

__all__ = ["DEFERRED", "CacheService", "Call", "Refused", "Settings"]

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

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size is {self.chunk_size} tokens; it must be at least 1")
        for name in ("reap_after_s", "grace_s", "pin_ttl_s", "prepare_ttl_s"):
            if getattr(self, name) <= 0:
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
class CacheService:
    """The state of a server and its operations, named as in the protocol.

    Args:
        run: Takes work for another thread, and what the loop does with its result.
        report: Gives the server's status.
    """

    settings: Settings
    objects: ChunkStore
    pool: PoolMemory
    run: Callable[[Callable[[], Any], Done], None]
    report: Callable[[], dict[str, Any]]
    clock: Callable[[], float] = time.monotonic
    counters: Counters = field(default_factory=Counters)
    boot_token: str = field(default_factory=lambda: secrets.token_hex(8))
    last_error: str = ""
    registrations: Registrations = field(init=False)
    pins: LookupPins = field(init=False)
    _registering: dict[int, object] = field(init=False, default_factory=dict)  # the latest attempt per instance

    def __post_init__(self) -> None:
        self.registrations = Registrations(self.settings.reap_after_s, self.settings.grace_s)
        self.pins = LookupPins(self.objects, self.settings.pin_ttl_s)

    # Engines

    def register_kv_cache(
        self,
        call: Call,
        instance_id: int,
        kv_caches: Any,
        model_name: str,
        world_size: int,
        engine_type: str,
        layout_hints: dict[str, Any],
        engine_group_infos: tuple[EngineGroupInfo, ...],
    ) -> object:
        """Map an engine's cache. A second registration of an id replaces the first."""
        attempt = self._registering[instance_id] = object()

        def work() -> CPUCacheContext:
            return CPUCacheContext(
                kv_caches,
                self.settings.chunk_size,
                layout_hints or None,
                engine_group_infos,
                engine_type,
            )

        def done(context: CPUCacheContext | None, reason: str | None) -> None:
            is_latest = self._registering.get(instance_id) is attempt
            if is_latest:
                del self._registering[instance_id]
            if context is None:
                call.fail(reason or "")
            elif not is_latest:
                self._close(context, lambda: call.fail(f"instance {instance_id} was unregistered meanwhile"))
            else:
                self._enter(instance_id, model_name, world_size, context_layout(context), context)
                call.answer(NO_RESULT)

        self.run(work, done)
        return DEFERRED

    def unregister_kv_cache(self, call: Call, instance_id: int) -> object:
        """Let go of an engine; answered once no copy runs on its memory and its mappings are gone."""
        self._registering.pop(instance_id, None)
        registration = self.registrations.remove(instance_id)
        if registration is None:
            return NO_RESULT
        self._retire(registration, lambda: call.answer(NO_RESULT))
        return DEFERRED

    def register_kv_cache_engine_driven_context(self, call: Call, spec: EngineDrivenSpec) -> dict[str, Any]:
        """Enter an engine that copies by itself, and tell it where the pool is."""
        layout = engine_driven_layout(spec, self.settings.chunk_size)
        self._registering.pop(spec.instance_id, None)
        if not self._is_same(spec, layout):
            self._enter(spec.instance_id, spec.model_name, spec.world_size, layout, None)
        return {"shm_name": self.pool.name.lstrip("/"), "pool_size": self.pool.nbytes}

    def unregister_kv_cache_engine_driven_context(self, call: Call, instance_id: int) -> object:
        """As the other unregister."""
        return self.unregister_kv_cache(call, instance_id)

    def ping(self, call: Call, instance_id: int | None) -> bool:
        """A sign of life."""
        if instance_id is not None:
            self.registrations.ping(instance_id, self.clock())
        return True

    # Server-driven copies

    def store(
        self,
        call: Call,
        key: CacheKey,
        instance_id: int,
        block_ids: list[NDArray[np.int64]],
        event_handle: bytes,
        deadline_ns: int | None = None,
    ) -> object:
        """Gather chunks from the engine's cache; visible before the answer, all of them or none.

        Past ``deadline_ns`` the client may have given the blocks to others: what was gathered by then is dropped.
        """
        registration, context = self._server_driven(instance_id)
        worker_id = _worker(key)
        hashes = self._hashes_in_range(key)
        self._check_block_counts(context, block_ids, len(hashes))
        manager, layout = context.kv_layer_groups_manager, registration.layout
        masks = all_null_chunk_masks(
            [ids.tolist() for ids in block_ids],
            manager.object_groups,
            [manager.blocks_per_chunk(index) for index in range(len(manager.kernel_groups))],
            len(hashes),
            self.settings.null_block_id,
        )
        keys = {
            group: [
                None if is_null else object_key
                for object_key, is_null in zip(
                    object_keys(key, worker_id, layout, group, hashes), masks[group], strict=True
                )
            ]
            for group in layout.served_groups
        }
        reservation = self.objects.reserve(
            [(name, layout.group_nbytes[group]) for group, names in keys.items() for name in names if name is not None]
        )
        if reservation is None:
            self.counters.failed_stores += 1
            raise Refused(self._no_room())
        if not reservation.new:
            self.objects.commit(reservation)
            return [event_handle, True]
        new = reservation.new
        registration.begin_copy()

        def work() -> int:
            for entry in new.values():
                self.pool.ensure(entry.offset, entry.nbytes)
            for group, names in keys.items():
                chunks = [self._bytes(new[name]) if name in new else None for name in names]
                if any(chunk is not None for chunk in chunks):
                    gather_chunks(context, block_ids, chunks, group)
            return time.monotonic_ns()

        def done(finished_ns: int | None, reason: str | None) -> None:
            if finished_ns is not None and (deadline_ns is None or finished_ns < deadline_ns):
                self.objects.commit(reservation)
                self.counters.stores += 1
                self.counters.stored_bytes += sum(entry.nbytes for entry in new.values())
                call.answer([event_handle, True])
            else:
                self.objects.abort(reservation)
                self.counters.failed_stores += 1
                self.counters.late_stores += reason is None
                call.fail(self._record(reason or "the store ended after its client's time limit and was dropped"))
            registration.end_copy()

        self.run(work, done)
        return DEFERRED

    def retrieve(
        self,
        call: Call,
        key: CacheKey,
        instance_id: int,
        block_ids: list[NDArray[np.int64]],
        event_handle: bytes,
        skip_first_n_tokens: int = 0,
        deadline_ns: int | None = None,
    ) -> object:
        """Scatter cached chunks into the engine's cache, and release one read lock of this request on each."""
        hashes = self._hashes_in_range(key)
        chunks = self._chunks_in_range(key)
        worker_id = _worker(key)
        try:
            registration, context = self._server_driven(instance_id)
            self._check_block_counts(context, block_ids, len(hashes))
            found = self._cached(key, worker_id, registration.layout, hashes)
        except (ValueError, LookupError):
            self.pins.release_one(key.request_id, worker_id, chunks)
            self.counters.failed_retrieves += 1
            raise
        entries = [entry for group in found.values() for entry in group if entry is not None]
        self.objects.hold(entries)
        self.pins.release_one(key.request_id, worker_id, chunks)
        registration.begin_copy()

        def work() -> int:
            if deadline_ns is not None and time.monotonic_ns() >= deadline_ns:
                raise Refused("the client's time limit passed before the copy began")
            for group, group_entries in found.items():
                buffers = [None if entry is None else self._bytes(entry) for entry in group_entries]
                scatter_chunks(
                    context,
                    block_ids,
                    buffers,
                    group,
                    skip_first_n_tokens,
                    self.settings.null_block_id,
                )
            return 0

        def done(result: int | None, reason: str | None) -> None:
            self.objects.release(entries)
            if reason is None:
                self.counters.retrieves += 1
                self.counters.retrieved_bytes += sum(entry.nbytes for entry in entries)
                call.answer([event_handle, True])
            else:
                self.counters.failed_retrieves += 1
                call.fail(self._record(reason))
            registration.end_copy()

        self.run(work, done)
        return DEFERRED

    # Lookups

    def lookup(self, call: Call, key: CacheKey, tp_size: int) -> object:
        """Find and pin the longest cached prefix; the result is asked for by request id."""
        if key.num_kv_readers < 1:
            raise Refused(f"num_kv_readers is {key.num_kv_readers}; a lookup needs at least 1 reader")
        self._look_up(key, self.registrations.layouts(key.model_name, key.world_size))
        return NO_RESULT

    def kvshm_lookup(self, call: Call, key: CacheKey, instance_id: int, pin_worker_id: int | None) -> int:
        """The same for a registered engine, in one round trip; pins only this worker's objects, or (None) all."""
        registration = self.registrations.get(instance_id, self.clock())
        if key.num_kv_readers < 1:
            raise Refused(f"num_kv_readers is {key.num_kv_readers}; a lookup needs at least 1 reader")
        self._look_up(key, [registration.layout], pin_worker_id)
        return self.pins.result(key.request_id)

    def query_prefetch_status(self, call: Call, request_id: str) -> int:
        """Chunks that a lookup found, told once."""
        return self.pins.result(request_id)

    def wait_prefetch_status(self, call: Call, request_id: str, timeout_s: float) -> int:
        """The same: lookups are done when they are answered."""
        return self.pins.result(request_id)

    def free_lookup_locks(self, call: Call, key: CacheKey, tp_size: int) -> object:
        """Release what is left of a lookup's read locks in the key's range."""
        size = self.settings.chunk_size
        self.pins.release_all(key.request_id, key.worker_id, range(-(-key.start // size), -(-key.end // size)))
        return NO_RESULT

    def end_session(self, call: Call, request_id: str) -> object:
        """A request is over: nothing of it is kept."""
        self.pins.end(request_id)
        return NO_RESULT

    # Engine-driven copies

    def prepare_store(self, call: Call, key: CacheKey, instance_id: int) -> object:
        """Lend slots for the chunks that are not cached. Asked again before the commit, the same slots."""
        registration = self._engine_driven(instance_id)
        layout = registration.layout
        hashes = self._hashes_in_range(key)
        identity = _identity(key, hashes)
        prepared = registration.prepared.get(identity)
        if prepared is not None:
            prepared.deadline = self.clock() + self.settings.prepare_ttl_s
            return prepared.result
        names = object_keys(key, _worker(key), layout, 0, hashes)
        reservation = self.objects.reserve([(name, layout.group_nbytes[0]) for name in names])
        if reservation is None:
            self.counters.failed_stores += 1
            raise Refused(self._no_room())
        new = reservation.new
        result: dict[str, object] = {
            "context": {
                "slots": [_slot(layout, new[name]) for name in names if name in new],
                "chunk_indices": [index for index, name in enumerate(names) if name in new],
            }
        }
        if not new:
            self.objects.commit(reservation)
            return result
        registration.prepared[identity] = PreparedStore(reservation, result, self.clock() + self.settings.prepare_ttl_s)

        def work() -> None:
            for entry in new.values():
                self.pool.ensure(entry.offset, entry.nbytes)

        def done(_: object, reason: str | None) -> None:
            if reason is None:
                call.answer(result)
                return
            if registration.prepared.pop(identity, None) is not None:
                self.objects.abort(reservation)
            call.fail(self._record(reason))

        self.run(work, done)
        return DEFERRED

    def commit_store(self, call: Call, key: CacheKey, instance_id: int, data: bytes) -> bool:
        """Make what an engine wrote into its slots visible."""
        registration = self._engine_driven(instance_id)
        if data:
            raise Refused("commit_store takes no data here: chunks are written into the pool's slots")
        prepared = registration.prepared.pop(_identity(key, self._hashes_in_range(key)), None)
        if prepared is None:
            raise Refused("there is no prepared store of this key; its time limit may have passed")
        self.objects.commit(prepared.reservation)
        self.counters.stores += 1
        self.counters.stored_bytes += sum(entry.nbytes for entry in prepared.reservation.new.values())
        return True

    def prepare_retrieve(self, call: Call, key: CacheKey, instance_id: int) -> dict[str, Any]:
        """Slots of all chunks of the range, held until the commit."""
        registration = self._engine_driven(instance_id)
        hashes = self._hashes_in_range(key)
        worker_id = _worker(key)
        try:
            (entries,) = self._cached(key, worker_id, registration.layout, hashes).values()
        except Refused:
            self.pins.release_one(key.request_id, worker_id, self._chunks_in_range(key))
            self.counters.failed_retrieves += 1
            raise
        held = [entry for entry in entries if entry is not None]
        self.objects.hold(held)
        read = PreparedRead(held, self.clock() + self.settings.prepare_ttl_s)
        registration.reading.setdefault(_identity(key, hashes), []).append(read)
        slots = [_slot(registration.layout, entry) for entry in held]
        return {"success": True, "data": b"", "context": {"slots": slots}}

    def commit_retrieve(self, call: Call, key: CacheKey, instance_id: int) -> bool:
        """An engine has read its slots. False: it took too long, and what it read may be another chunk by now."""
        registration = self._engine_driven(instance_id)
        hashes = self._hashes_in_range(key)
        self.pins.release_one(key.request_id, _worker(key), self._chunks_in_range(key))
        identity = _identity(key, hashes)
        reads = registration.reading.get(identity)
        if not reads:
            raise Refused("there is no prepared retrieve of this key; its time limit may have passed")
        read = reads.pop()
        if not reads:
            del registration.reading[identity]
        self.objects.release(read.entries)
        self.counters.retrieves += 1
        self.counters.retrieved_bytes += sum(entry.nbytes for entry in read.entries)
        return True

    # The rest

    def clear(self, call: Call, force: bool = False) -> object:
        """Forget what is cached: what nobody holds, or all of it."""
        if force:
            self.pins.end_all()
            self.objects.hide()
        else:
            self.objects.clear()
        return NO_RESULT

    def get_chunk_size(self, call: Call) -> int:
        """Tokens of a chunk."""
        return self.settings.chunk_size

    def report_block_allocation(self, call: Call, instance_id: int, model_name: str, records: list[Any]) -> object:
        """Accepted and ignored."""
        return NO_RESULT

    def noop(self, call: Call) -> str:
        """A round trip."""
        return "OK"

    def get_experimental(self, call: Call) -> list[str]:
        """Capabilities beyond LMCache's: none by this way."""
        return []

    def kvshm_hello(self, call: Call, client_version: str) -> dict[str, Any]:
        """Who this server is. A boot token that changes tells a client that its registrations are gone."""
        return {
            "version": __version__,
            "protocol": PROTOCOL_VERSION,
            "boot_token": self.boot_token,
            "chunk_size": self.settings.chunk_size,
            "clock_ns": time.monotonic_ns(),
            "prepare_ttl_s": self.settings.prepare_ttl_s,
        }

    def kvshm_status(self, call: Call) -> dict[str, Any]:
        """How the server is."""
        return self.report()

    # Time

    def tick(self) -> None:
        """End what is over: lookups' read locks, lent slots, leases."""
        now = self.clock()
        self.counters.expired_lookups += self.pins.expire(now)
        for registration in self.registrations:
            self._expire_slots(registration, now)
        for registration in self.registrations.silent(now):
            silence = now - registration.last_seen
            _logger.warning(
                "kvshm server: instance %d (%s) has been silent for %.1f s and is dropped",
                registration.instance_id,
                registration.model_name,
                silence,
            )
            self.registrations.remove(registration.instance_id)
            self.counters.reaped += 1
            self._retire(registration, lambda: None)

    def close(self) -> None:
        """Let go of everything."""
        self._registering.clear()
        self.pins.end_all()
        for registration in list(self.registrations):
            self.registrations.remove(registration.instance_id)
            self._retire(registration, lambda: None)

    # Helpers

    def _enter(
        self,
        instance_id: int,
        model_name: str,
        world_size: int,
        layout: ChunkLayout,
        context: CPUCacheContext | None,
    ) -> None:
        now = self.clock()
        previous = self.registrations.add(
            Registration(instance_id, model_name, world_size, layout, context, registered_at=now, last_seen=now)
        )
        if previous is not None:
            self._retire(previous, lambda: None)

    def _is_same(self, spec: EngineDrivenSpec, layout: ChunkLayout) -> bool:
        """Whether the engine is registered like this already; then it may keep the slots that it was lent."""
        try:
            known = self.registrations.get(spec.instance_id, self.clock())
        except LookupError:
            return False
        return known.context is None and (known.model_name, known.world_size, known.layout) == (
            spec.model_name,
            spec.world_size,
            layout,
        )

    def _retire(self, registration: Registration, then: Callable[[], None]) -> None:
        """Take the lent slots back and close the context once no copy runs on it."""
        self._expire_slots(registration, float("inf"))

        def close() -> None:
            context, registration.context = registration.context, None
            if context is None:
                then()
            else:
                self._close(context, then)

        registration.when_idle(close)

    def _close(self, context: CPUCacheContext, then: Callable[[], None]) -> None:
        # In another thread: unmapping gigabytes takes longer than a ping may.
        holder = [context]

        def work() -> None:
            holder.pop().close()

        self.run(work, lambda result, reason: then())

    def _expire_slots(self, registration: Registration, now: float) -> None:
        for identity, prepared in list(registration.prepared.items()):
            if prepared.deadline < now:
                del registration.prepared[identity]
                self.objects.abort(prepared.reservation)
                self.counters.expired_slots += len(prepared.reservation.new)
        for identity, reads in list(registration.reading.items()):
            for read in [read for read in reads if read.deadline < now]:
                reads.remove(read)
                self.objects.release(read.entries)
            if not reads:
                del registration.reading[identity]

    def _server_driven(self, instance_id: int) -> tuple[Registration, CPUCacheContext]:
        registration = self.registrations.get(instance_id, self.clock())
        if registration.context is None:
            raise Refused(f"instance {instance_id} is registered as engine-driven; use prepare_store and its kin")
        return registration, registration.context

    def _engine_driven(self, instance_id: int) -> Registration:
        registration = self.registrations.get(instance_id, self.clock())
        if registration.context is not None:
            raise Refused(f"instance {instance_id} is registered as server-driven; use store and retrieve")
        return registration

    def _chunks_in_range(self, key: CacheKey) -> range:
        """Full chunks of the key's range, counted from the first token."""
        size = self.settings.chunk_size
        return range(-(-key.start // size), key.end // size)

    def _hashes_in_range(self, key: CacheKey) -> list[bytes]:
        if key.end > key.token_ids.size:
            raise Refused(f"the range ends at token {key.end} but {key.token_ids.size} token ids came")
        hashes = chunk_hashes(key.token_ids[: key.end], self.settings.chunk_size)
        chunks = self._chunks_in_range(key)
        return hashes[chunks.start : chunks.stop]

    def _check_block_counts(self, context: CPUCacheContext, block_ids: Sequence[Any], num_chunks: int) -> None:
        manager = context.kv_layer_groups_manager
        wanted = [manager.blocks_per_chunk(index) * num_chunks for index in range(len(manager.kernel_groups))]
        given = [len(ids) for ids in block_ids]
        if given != wanted:
            raise Refused(
                f"{num_chunks} chunks take {wanted} block ids per kernel group, but {given} came; "
                f"give blocks_per_chunk * chunks ids for every group"
            )

    def _look_up(self, key: CacheKey, layouts: list[ChunkLayout], pin_worker_id: int | None = None) -> None:
        self.counters.lookups += 1
        tokens = key.token_ids[: key.end]
        hashes = chunk_hashes(tokens, self.settings.chunk_size) if layouts else []
        num_chunks = 0
        found: dict[PinKey, Entry] = {}
        for layout in layouts:
            candidate = self._longest_hit(key, layout, hashes)
            if candidate[0] > num_chunks:
                num_chunks, found = candidate
        self.counters.lookup_tokens += len(tokens) // self.settings.chunk_size * self.settings.chunk_size
        self.counters.hit_tokens += num_chunks * self.settings.chunk_size
        if pin_worker_id is not None:
            found = {pin: entry for pin, entry in found.items() if pin.worker_id == pin_worker_id}
        # Nothing found is also what an unknown request id stands for; there is nothing to keep.
        if num_chunks:
            self.pins.pin(key.request_id, num_chunks, found, key.num_kv_readers, self.clock())
        else:
            self.pins.end(key.request_id)

    def _longest_hit(self, key: CacheKey, layout: ChunkLayout, hashes: list[bytes]) -> tuple[int, dict[PinKey, Entry]]:
        """The longest prefix that all workers and object groups have, and the objects it needs."""
        limit = len(hashes)
        rows: dict[tuple[int, int], list[Entry | None]] = {}
        windowed: list[tuple[int, list[int]]] = []
        for worker_id in range(key.world_size):
            for group in layout.served_groups:
                if not limit:
                    return 0, {}
                names = object_keys(key, worker_id, layout, group, hashes[:limit])
                row = rows[worker_id, group] = [self.objects.get(name) for name in names]
                window = layout.group_windows[group]
                if window < 0:
                    limit = next((index for index, entry in enumerate(row) if entry is None), len(row))
                else:
                    windowed.append((window, _run_lengths(row)))
        while limit and any(runs[limit - 1] < min(window, limit) for window, runs in windowed):
            limit -= 1
        found = {
            PinKey(worker_id, group, index): entry
            for (worker_id, group), row in rows.items()
            for index in layout.needed_chunks(group, limit)
            if (entry := row[index]) is not None
        }
        return limit, found

    def _cached(
        self, key: CacheKey, worker_id: int, layout: ChunkLayout, hashes: list[bytes]
    ) -> dict[int, list[Entry | None]]:
        """Per served object group the objects of these chunks; None where the window does not reach.

        Raises:
            Refused: One is missing.
        """
        found = {}
        for group in layout.served_groups:
            names = object_keys(key, worker_id, layout, group, hashes)
            needed = layout.needed_chunks(group, len(names))
            entries = [self.objects.get(name) if index in needed else None for index, name in enumerate(names)]
            missing = [index for index in needed if entries[index] is None]
            if missing:
                raise Refused(f"{len(missing)} of {len(names)} chunks are not cached in object group {group}")
            wrong = [entry for entry in entries if entry is not None and entry.nbytes != layout.group_nbytes[group]]
            if wrong:
                raise Refused(
                    self._record(
                        f"a cached chunk has {wrong[0].nbytes} bytes, this layout's have {layout.group_nbytes[group]}"
                    )
                )
            found[group] = entries
        return found

    def _bytes(self, entry: Entry) -> NDArray[np.uint8]:
        return self.pool.bytes[entry.offset : entry.offset + entry.nbytes]

    def _no_room(self) -> str:
        allocator = self.objects.allocator
        return self._record(
            f"no room: {allocator.busy_nbytes} of {allocator.nbytes} bytes are pinned or being written; "
            f"raise the capacity or store less at once"
        )

    def _record(self, reason: str) -> str:
        self.last_error = reason
        _logger.info("kvshm server: %s", reason)
        return reason


def _worker(key: CacheKey) -> int:
    if key.worker_id is None:
        raise Refused("worker_id is nil; only lookups are about all workers")
    return key.worker_id


def _identity(key: CacheKey, hashes: list[bytes]) -> Hashable:
    """What a prepared transfer and its commit have in common, beside the instance."""
    last = hashes[-1] if hashes else b""
    return (key.request_id, key.model_name, key.world_size, key.worker_id, key.cache_salt, key.start, key.end, last)


def _run_lengths(row: list[Entry | None]) -> list[int]:
    """Per chunk, how many present ones end with it."""
    runs, length = [], 0
    for entry in row:
        length = 0 if entry is None else length + 1
        runs.append(length)
    return runs


def _slot(layout: ChunkLayout, entry: Entry) -> dict[str, Any]:
    return {
        "offset": entry.offset,
        "length": entry.nbytes,
        "shape": list(layout.slot_shape),
        "dtype": layout.slot_dtype,
    }
