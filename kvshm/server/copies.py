"""Server-driven engines: the server maps their caches and copies between them and the pool."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvshm.context import CPUCacheContext
from kvshm.layout import EngineGroupInfo, all_null_chunk_masks
from kvshm.protocol import NO_RESULT, CacheKey
from kvshm.server.registrations import Registration, context_layout, object_keys
from kvshm.server.state import DEFERRED, Call, Refused, ServerState, worker_of
from kvshm.transfer import gather_chunks, scatter_chunks

__all__ = ["ServerDrivenOperations"]


class ServerDrivenOperations:
    """The operations on mapped caches, named as in the protocol."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._registering: dict[int, object] = {}  # the latest attempt per instance

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
                self._state.settings.chunk_size,
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
                self._state.close_context(
                    context, lambda: call.fail(f"instance {instance_id} was unregistered meanwhile")
                )
            else:
                now = self._state.clock()
                self._state.enter(
                    Registration(instance_id, model_name, world_size, context_layout(context), context, now, now)
                )
                call.answer(NO_RESULT)

        self._state.run(work, done)
        return DEFERRED

    def unregister_kv_cache(self, call: Call, instance_id: int) -> object:
        """Let go of an engine; answered once no copy runs on its memory and its mappings are gone."""
        self._registering.pop(instance_id, None)
        registration = self._state.registrations.remove(instance_id)
        if registration is None:
            return NO_RESULT
        self._state.retire(registration, lambda: call.answer(NO_RESULT))
        return DEFERRED

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
        worker_id = worker_of(key)
        hashes = self._state.hashes_in_range(key)
        self._check_block_counts(context, block_ids, len(hashes))
        manager, layout = context.kv_layer_groups_manager, registration.layout
        masks = all_null_chunk_masks(
            [ids.tolist() for ids in block_ids],
            manager.object_groups,
            [manager.blocks_per_chunk(index) for index in range(len(manager.kernel_groups))],
            len(hashes),
            self._state.settings.null_block_id,
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
        reservation = self._state.objects.reserve(
            [(name, layout.group_nbytes[group]) for group, names in keys.items() for name in names if name is not None]
        )
        if reservation is None:
            raise self._state.no_room()
        if not reservation.new:
            self._state.objects.commit(reservation)
            return [event_handle, True]
        new = reservation.new
        registration.begin_copy()

        def work() -> int:
            for entry in new.values():
                self._state.pool.ensure(entry.offset, entry.nbytes)
            for group, names in keys.items():
                chunks = [self._state.bytes_of(new[name]) if name in new else None for name in names]
                if any(chunk is not None for chunk in chunks):
                    gather_chunks(context, block_ids, chunks, group)
                    if self._state.settings.verify:
                        _check_unchanged(context, block_ids, chunks, group)
            return time.monotonic_ns()

        def done(finished_ns: int | None, reason: str | None) -> None:
            try:
                if finished_ns is not None and (deadline_ns is None or finished_ns < deadline_ns):
                    self._state.objects.commit(reservation)
                    self._state.counters.stores += 1
                    self._state.counters.stored_bytes += sum(entry.nbytes for entry in new.values())
                    call.answer([event_handle, True])
                else:
                    self._state.objects.abort(reservation)
                    self._state.counters.failed_stores += 1
                    self._state.counters.late_stores += reason is None
                    call.fail(
                        self._state.record(reason or "the store ended after its client's time limit and was dropped")
                    )
            finally:  # else an unregister would wait for ever
                registration.end_copy()

        self._state.run(work, done)
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
        hashes = self._state.hashes_in_range(key)
        chunks = self._state.chunks_in_range(key)
        worker_id = worker_of(key)
        try:
            registration, context = self._server_driven(instance_id)
            self._check_block_counts(context, block_ids, len(hashes))
            found = self._state.cached(key, worker_id, registration.layout, hashes)
        except (ValueError, LookupError):
            self._state.pins.release_one(key.request_id, worker_id, chunks)
            self._state.counters.failed_retrieves += 1
            raise
        entries = [entry for group in found.values() for entry in group if entry is not None]
        self._state.objects.hold(entries)
        self._state.pins.release_one(key.request_id, worker_id, chunks)
        registration.begin_copy()

        def work() -> int:
            if deadline_ns is not None and time.monotonic_ns() >= deadline_ns:
                raise Refused("the client's time limit passed before the copy began")
            for group, group_entries in found.items():
                buffers = [None if entry is None else self._state.bytes_of(entry) for entry in group_entries]
                scatter_chunks(
                    context,
                    block_ids,
                    buffers,
                    group,
                    skip_first_n_tokens,
                    self._state.settings.null_block_id,
                )
            return 0

        def done(result: int | None, reason: str | None) -> None:
            try:
                self._state.objects.release(entries)
                if reason is None:
                    self._state.counters.retrieves += 1
                    self._state.counters.retrieved_bytes += sum(entry.nbytes for entry in entries)
                    call.answer([event_handle, True])
                else:
                    self._state.counters.failed_retrieves += 1
                    call.fail(self._state.record(reason))
            finally:
                registration.end_copy()

        self._state.run(work, done)
        return DEFERRED

    def forget_attempts(self) -> None:
        """Let no registration that is still under way succeed."""
        self._registering.clear()

    def _server_driven(self, instance_id: int) -> tuple[Registration, CPUCacheContext]:
        registration = self._state.registration(instance_id)
        if registration.context is None:
            raise Refused(f"instance {instance_id} is registered as engine-driven; use prepare_store and its kin")
        return registration, registration.context

    def _check_block_counts(self, context: CPUCacheContext, block_ids: Sequence[Any], num_chunks: int) -> None:
        manager = context.kv_layer_groups_manager
        wanted = [manager.blocks_per_chunk(index) * num_chunks for index in range(len(manager.kernel_groups))]
        given = [len(ids) for ids in block_ids]
        if given != wanted:
            raise Refused(
                f"{num_chunks} chunks take {wanted} block ids per kernel group, but {given} came; "
                f"give blocks_per_chunk * chunks ids for every group"
            )


def _check_unchanged(
    context: CPUCacheContext,
    block_ids: Sequence[NDArray[np.int64]],
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
            gather_chunks(context, block_ids, only_this, object_group_idx)
            if not np.array_equal(chunk, again):
                raise Refused(
                    f"blocks of chunk {index} changed while they were being stored; an engine must leave them alone "
                    f"until its store is answered"
                )
