"""Engine-driven engines: they copy by themselves, into and out of slots of the pool that the server lends them.

A slot that was lent for writing becomes visible with the commit and comes back without it: when its time is over, or
when the engine unregisters or falls silent.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

from kvshm.protocol import CacheKey, EngineDrivenSpec
from kvshm.server.registrations import (
    ChunkLayout,
    PreparedRead,
    PreparedStore,
    Registration,
    engine_driven_layout,
    object_keys,
)
from kvshm.server.state import DEFERRED, Call, Refused, ServerState, worker_of
from kvshm.store.chunk_store import Entry

__all__ = ["EngineDrivenOperations"]


class EngineDrivenOperations:
    """The operations on lent slots, named as in the protocol."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def register_kv_cache_engine_driven_context(self, call: Call, spec: EngineDrivenSpec) -> dict[str, Any]:
        """Enter an engine that copies by itself, and tell it where the pool is."""
        layout = engine_driven_layout(spec, self._state.settings.chunk_size)
        if not self._is_same(spec, layout):
            now = self._state.clock()
            self._state.enter(
                Registration(spec.instance_id, spec.model_name, spec.world_size, layout, None, now, now, spec.life_sign)
            )
        return {"shm_name": self._state.pool.name.lstrip("/"), "pool_size": self._state.pool.nbytes}

    def prepare_store(self, call: Call, key: CacheKey, instance_id: int) -> object:
        """Lend slots for the chunks that are not cached. Asked again before the commit, the same slots."""
        registration = self._engine_driven(instance_id)
        layout = registration.layout
        hashes = self._state.hashes_in_range(key)
        identity = _identity(key, hashes)
        prepared = registration.prepared.get(identity)
        if prepared is None:
            names = object_keys(key, worker_of(key), layout, 0, hashes)
            reservation = self._state.objects.reserve([(name, layout.group_nbytes[0]) for name in names])
            if reservation is None:
                raise self._state.no_room()
            new = reservation.new
            context = {
                "slots": [_slot(layout, new[name]) for name in names if name in new],
                "chunk_indices": [index for index, name in enumerate(names) if name in new],
            }
            if not new:
                self._state.objects.commit(reservation)
                return {"context": context}
            prepared = registration.prepared[identity] = PreparedStore(reservation, {"context": context}, 0.0)
        prepared.deadline = self._deadline()
        self._state.run(partial(self._reserve, prepared), partial(self._lend, call, registration, identity, prepared))
        return DEFERRED

    def _reserve(self, prepared: PreparedStore) -> None:
        """In a worker thread: no page of a lent slot may be missing."""
        for entry in prepared.reservation.new.values():
            self._state.pool.ensure(entry.offset, entry.nbytes)

    def _lend(
        self,
        call: Call,
        registration: Registration,
        identity: Hashable,
        prepared: PreparedStore,
        _: object,
        reason: str | None,
    ) -> None:
        if registration.prepared.get(identity) is not prepared:
            call.fail(self._state.record(reason or "the slots were taken back before they were lent"))
        elif reason is None:
            call.answer(prepared.result)
        else:
            del registration.prepared[identity]
            self._state.objects.abort(prepared.reservation)
            call.fail(self._state.record(reason))

    def commit_store(self, call: Call, key: CacheKey, instance_id: int, data: bytes) -> bool:
        """Make what an engine wrote into its slots visible."""
        registration = self._engine_driven(instance_id)
        if data:
            raise Refused("commit_store takes no data here: chunks are written into the pool's slots")
        prepared = registration.prepared.pop(_identity(key, self._state.hashes_in_range(key)), None)
        if prepared is None:
            raise Refused("there is no prepared store of this key; its time limit may have passed")
        self._state.objects.commit(prepared.reservation)
        self._state.counters.stores += 1
        self._state.counters.stored_bytes += sum(entry.nbytes for entry in prepared.reservation.new.values())
        return True

    def prepare_retrieve(self, call: Call, key: CacheKey, instance_id: int) -> dict[str, Any]:
        """Slots of all chunks of the range, held until the commit."""
        registration = self._engine_driven(instance_id)
        hashes = self._state.hashes_in_range(key)
        worker_id = worker_of(key)
        try:
            (entries,) = self._state.cached(key, worker_id, registration.layout, hashes).values()
        except Refused:
            self._state.pins.release_one(key.request_id, worker_id, self._state.chunks_in_range(key))
            self._state.counters.failed_retrieves += 1
            raise
        held = [entry for entry in entries if entry is not None]
        self._state.objects.hold(held)
        read = PreparedRead(held, self._deadline())
        registration.reading.setdefault(_identity(key, hashes), []).append(read)
        slots = [_slot(registration.layout, entry) for entry in held]
        return {"success": True, "data": b"", "context": {"slots": slots}}

    def commit_retrieve(self, call: Call, key: CacheKey, instance_id: int) -> bool:
        """An engine has read its slots. False: it took too long, and what it read may be another chunk by now."""
        registration = self._engine_driven(instance_id)
        hashes = self._state.hashes_in_range(key)
        self._state.pins.release_one(key.request_id, worker_of(key), self._state.chunks_in_range(key))
        identity = _identity(key, hashes)
        reads = registration.reading.get(identity)
        if not reads:
            raise Refused("there is no prepared retrieve of this key; its time limit may have passed")
        read = reads.pop()
        if not reads:
            del registration.reading[identity]
        self._state.objects.release(read.entries)
        self._state.counters.retrieves += 1
        self._state.counters.retrieved_bytes += sum(entry.nbytes for entry in read.entries)
        return True

    def _engine_driven(self, instance_id: int) -> Registration:
        registration = self._state.registration(instance_id)
        if registration.context is not None:
            raise Refused(f"instance {instance_id} is registered as server-driven; use store and retrieve")
        return registration

    def _deadline(self) -> float:
        return self._state.clock() + self._state.settings.prepare_ttl_s

    def _is_same(self, spec: EngineDrivenSpec, layout: ChunkLayout) -> bool:
        """Whether the engine is registered like this already; then it may keep the slots that it was lent."""
        try:
            known = self._state.registration(spec.instance_id)
        except LookupError:
            return False
        return known.context is None and (known.model_name, known.world_size, known.layout) == (
            spec.model_name,
            spec.world_size,
            layout,
        )


def _identity(key: CacheKey, hashes: list[bytes]) -> Hashable:
    """What a prepared transfer and its commit have in common, beside the instance."""
    last = hashes[-1] if hashes else b""
    return (key.request_id, key.model_name, key.world_size, key.worker_id, key.cache_salt, key.start, key.end, last)


def _slot(layout: ChunkLayout, entry: Entry) -> dict[str, Any]:
    return {
        "offset": entry.offset,
        "length": entry.nbytes,
        "shape": list(layout.slot_shape),
        "dtype": layout.slot_dtype,
    }
