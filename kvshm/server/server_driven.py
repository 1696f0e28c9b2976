"""Server-driven engines: the server maps their caches and copies between them and the pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvshm.cache import MappedCache
from kvshm.layout import (
    BlockIds,
    EngineGroupInfo,
    all_null_chunk_masks,
    object_layouts,
)
from kvshm.protocol import NO_RESULT, CacheKey, EngineIdentity
from kvshm.server.lookups import Scope
from kvshm.server.registrations import (
    LMCacheIdentity,
    NotRegisteredError,
    Registration,
    ServerDriven,
    object_keys,
    scope_of_engine,
)
from kvshm.server.state import DEFERRED, Call, Refused, ServerState, scope_of, worker_of
from kvshm.store.chunk_store import Entry
from kvshm.transfer import gather_chunks, scatter_chunks

__all__ = ["ServerDrivenOperations"]


class ServerDrivenOperations:
    """The operations on mapped caches, named as in the protocol."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._registering: dict[int, object] = {}  # the latest attempt per instance

    # Registering

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

        identity = LMCacheIdentity.of(model_name, world_size)
        null_block_id = self._state.settings.null_block_id
        return self._register(
            call, instance_id, identity, kv_caches, engine_type, layout_hints, engine_group_infos, null_block_id
        )

    def kvshm_register_server_driven(
        self,
        call: Call,
        instance_id: int,
        identity: EngineIdentity,
        kv_caches: Any,
        engine_type: str,
        layout_hints: dict[str, Any],
        engine_group_infos: tuple[EngineGroupInfo, ...],
        null_block_id: int | None,
    ) -> object:
        """The same for an engine of kvshm's client, which says which worker it is."""
        return self._register(
            call, instance_id, identity, kv_caches, engine_type, layout_hints, engine_group_infos, null_block_id
        )

    def _register(
        self,
        call: Call,
        instance_id: int,
        identity: EngineIdentity | LMCacheIdentity,
        kv_caches: Any,
        engine_type: str,
        layout_hints: dict[str, Any],
        engine_group_infos: tuple[EngineGroupInfo, ...],
        null_block_id: int | None,
    ) -> object:
        attempt = self._registering[instance_id] = object()

        def work() -> MappedCache:
            return MappedCache(
                kv_caches,
                self._state.settings.chunk_size,
                layout_hints or None,
                engine_group_infos,
                engine_type,
            )

        def done(cache: MappedCache | None, reason: str | None) -> None:
            is_latest = self._registering.get(instance_id) is attempt
            if is_latest:
                del self._registering[instance_id]
            if cache is None:
                call.fail(reason or "")
            elif not is_latest:
                self._state.close_cache(cache, lambda: call.fail(f"instance {instance_id} was unregistered meanwhile"))
            else:
                way, objects = ServerDriven(cache, null_block_id), object_layouts(cache.layout)
                now = self._state.clock()
                self._state.enter(Registration(instance_id, call.client, identity, way, objects, now))
                call.answer(NO_RESULT)

        self._state.run(work, done)
        return DEFERRED

    def unregister_kv_cache(self, call: Call, instance_id: int) -> object:
        """Unregister an engine; answered once no copy runs on its memory and its mappings are gone."""
        self._registering.pop(instance_id, None)
        self._state.unregister(instance_id, lambda: call.answer(NO_RESULT))
        return DEFERRED

    def forget_attempts(self) -> None:
        """Let no registration that is still under way succeed."""
        self._registering.clear()

    # Store

    def store(
        self, call: Call, key: CacheKey, instance_id: int, block_ids: list[NDArray[np.int64]], event_handle: bytes
    ) -> object:
        """Gather chunks from the engine's cache; visible before the answer, all of them or none."""
        registration = self._state.registration(instance_id)
        way = _server_driven(registration)
        worker_id = worker_of(key)
        hashes = self._state.hashes_in_range(key)
        ids = BlockIds.of_kernel_groups(way.cache.layout, block_ids, len(hashes))
        registration.acts_as(worker_id)
        return self._store(
            call,
            registration,
            way,
            scope_of(key),
            worker_id,
            hashes,
            ids,
            None,
            lambda: [event_handle, True],
        )

    def kvshm_store(
        self,
        call: Call,
        instance_id: int,
        tokens: NDArray[np.int64],
        block_ids: list[NDArray[np.int64]],
        deadline_ns: int,
    ) -> object:
        """The same for an engine of kvshm's client; returns the chunks that a lookup finds then.

        Past ``deadline_ns`` the client may have given the blocks to others: what was gathered by then is dropped.
        """
        registration, identity = self._state.kvshm_engine(instance_id)
        way = _server_driven(registration)
        hashes = self._state.hashes_of(tokens)
        ids = BlockIds.of_kernel_groups(way.cache.layout, block_ids, len(hashes))
        return self._store(
            call,
            registration,
            way,
            scope_of_engine(identity),
            identity.worker_id,
            hashes,
            ids,
            deadline_ns,
            lambda: self._state.num_found(registration, hashes),
        )

    def _store(
        self,
        call: Call,
        registration: Registration,
        way: ServerDriven,
        scope: Scope,
        worker_id: int,
        hashes: list[bytes],
        ids: BlockIds,
        deadline_ns: int | None,
        result: Callable[[], Any],
    ) -> object:
        state = self._state
        keys: dict[int, list[bytes | None]] = {}
        sizes: list[tuple[bytes, int]] = []
        for group, layout in enumerate(registration.objects):
            if layout.is_served:
                has_data = _chunks_to_store(registration, way, ids, group)
                names = object_keys(scope, worker_id, layout, hashes)
                keys[group] = [name if data else None for name, data in zip(names, has_data, strict=True)]
                sizes += [(name, layout.nbytes) for name in keys[group] if name is not None]
        reservation = state.objects.reserve(sizes)
        if reservation is None:
            raise state.no_room()
        if not reservation.new:
            state.objects.commit(reservation)
            if sizes:
                state.registrations.has_stored(registration, worker_id)
            return result()
        new = reservation.new
        registration.begin_copy()

        def work() -> int:
            for entry in new.values():
                state.pool.ensure(entry.offset, entry.nbytes)
            for group, names in keys.items():
                chunks = [state.bytes_of(new[name]) if name in new else None for name in names]
                if any(chunk is not None for chunk in chunks):
                    gather_chunks(way.cache, ids, chunks, group)
                    if state.settings.verify:
                        _check_unchanged(way.cache, ids, chunks, group)
            return time.monotonic_ns()

        def done(finished_ns: int | None, reason: str | None) -> None:
            try:
                if finished_ns is not None and (deadline_ns is None or finished_ns < deadline_ns):
                    state.objects.commit(reservation)
                    state.registrations.has_stored(registration, worker_id)
                    state.counters.stores += 1
                    state.counters.stored_bytes += sum(entry.nbytes for entry in new.values())
                    call.answer(result())
                else:
                    state.objects.abort(reservation)
                    state.counters.failed_stores += 1
                    state.counters.late_stores += reason is None
                    call.fail(state.record(reason or "the store ended after its client's time limit and was dropped"))
            finally:  # else an unregister would wait for ever
                registration.end_copy()

        state.run(work, done)
        return DEFERRED

    # Retrieve

    def retrieve(
        self,
        call: Call,
        key: CacheKey,
        instance_id: int,
        block_ids: list[NDArray[np.int64]],
        event_handle: bytes,
        skip_first_n_tokens: int = 0,
    ) -> object:
        """Scatter cached chunks into the engine's cache, and release one pin of this request on each."""
        state = self._state
        prefix = state.hashes_up_to(key)
        chunks = state.chunks_in_range(key)
        hashes = prefix[chunks.start : chunks.stop]
        worker_id = worker_of(key)
        scope = scope_of(key)

        def unlock(entries: list[Entry]) -> None:
            state.plain_lookups.release_one(call.client, scope, key.request_id, prefix, worker_id, chunks)

        try:
            registration = state.registration(instance_id)
            way = _server_driven(registration)
            ids = BlockIds.of_kernel_groups(way.cache.layout, block_ids, len(hashes))
            found = state.cached(scope, worker_id, registration, hashes)
        except (ValueError, NotRegisteredError):
            unlock([])
            state.counters.failed_retrieves += 1
            raise
        registration.acts_as(worker_id)
        return self._retrieve(
            call, registration, way, found, ids, skip_first_n_tokens, None, unlock, [event_handle, True]
        )

    def kvshm_retrieve(
        self,
        call: Call,
        instance_id: int,
        request_id: str | None,
        tokens: NDArray[np.int64],
        block_ids: list[NDArray[np.int64]],
        skip_first_n_tokens: int,
        deadline_ns: int,
    ) -> object:
        """The same for an engine of kvshm's client; what lookups of this request pinned for it is used up."""
        state = self._state
        registration, identity = state.kvshm_engine(instance_id)
        way = _server_driven(registration)
        hashes = state.hashes_of(tokens)

        def unlock(entries: list[Entry]) -> None:
            state.use_up(registration, request_id, hashes, entries)

        try:
            ids = BlockIds.of_kernel_groups(way.cache.layout, block_ids, len(hashes))
            found = state.cached(scope_of_engine(identity), identity.worker_id, registration, hashes)
        except ValueError:
            unlock([])
            state.counters.failed_retrieves += 1
            raise
        return self._retrieve(call, registration, way, found, ids, skip_first_n_tokens, deadline_ns, unlock, True)

    def _retrieve(
        self,
        call: Call,
        registration: Registration,
        way: ServerDriven,
        found: dict[int, list[Entry | None]],
        ids: BlockIds,
        skip_first_n_tokens: int,
        deadline_ns: int | None,
        unlock: Callable[[list[Entry]], None],
        result: Any,
    ) -> object:
        state = self._state
        entries = [entry for group in found.values() for entry in group if entry is not None]
        state.objects.pin(entries)
        unlock(entries)
        registration.begin_copy()

        def work() -> int:
            if deadline_ns is not None and time.monotonic_ns() >= deadline_ns:
                raise Refused("the client's time limit passed before the copy began")
            for group, group_entries in found.items():
                buffers = [None if entry is None else state.bytes_of(entry) for entry in group_entries]
                scatter_chunks(way.cache, ids, buffers, group, skip_first_n_tokens, way.null_block_id)
            return 0

        def done(_: int | None, reason: str | None) -> None:
            try:
                state.objects.unpin(entries)
                if reason is None:
                    state.counters.retrieves += 1
                    state.counters.retrieved_bytes += sum(entry.nbytes for entry in entries)
                    call.answer(result)
                else:
                    state.counters.failed_retrieves += 1
                    call.fail(state.record(reason))
            finally:
                registration.end_copy()

        state.run(work, done)
        return DEFERRED


def _server_driven(registration: Registration) -> ServerDriven:
    if not isinstance(registration.way, ServerDriven):
        raise Refused(
            f"instance {registration.instance_id} is registered as engine-driven; use prepare_store and its kin"
        )
    return registration.way


def _chunks_to_store(
    registration: Registration, way: ServerDriven, ids: BlockIds, object_group_idx: int
) -> Sequence[bool]:
    """Per chunk, whether an object group has data of it.

    A chunk of which a kept block is the null block has none. LMCache's clients may have data in that block where all
    tokens are kept (its bench has): there only a chunk of nothing but null blocks is left out.
    """
    layout, null_block_id = registration.objects[object_group_idx], way.null_block_id
    if null_block_id is None:
        return [True] * ids.num_chunks
    is_kvshm = isinstance(registration.identity, EngineIdentity)
    if is_kvshm or layout.num_chunks_in_sw >= 0 or layout.kind == "recurrent":
        found: list[bool] = ids.has_data(object_group_idx, null_block_id).tolist()
        return found
    manager = ids.layout
    per_chunk = [manager.blocks_per_chunk(index) for index in range(len(manager.kernel_groups))]
    lists = [group.tolist() for group in ids.flat()]
    groups = [manager.object_group(object_group_idx)]
    (is_null,) = all_null_chunk_masks(lists, groups, per_chunk, ids.num_chunks, null_block_id)
    return [not null for null in is_null]


def _check_unchanged(
    cache: MappedCache,
    ids: BlockIds,
    chunks: Sequence[NDArray[np.uint8] | None],
    object_group_idx: int,
) -> None:
    """Gather once more, chunk by chunk, and compare.

    Raises:
        Refused: Somebody writes to the blocks.
    """
    for index, chunk in enumerate(chunks):
        if chunk is not None:
            again = np.empty_like(chunk)
            only_this = [again if other == index else None for other in range(len(chunks))]
            gather_chunks(cache, ids, only_this, object_group_idx)
            if not np.array_equal(chunk, again):
                raise Refused(
                    f"blocks of chunk {index} changed while they were being stored; an engine must leave them alone "
                    f"until its store is answered"
                )
