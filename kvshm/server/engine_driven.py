"""Engine-driven engines: they copy by themselves, into and out of slots of the pool that the server lends them.

A slot that was lent for writing becomes visible with the commit. When it comes back without one: see
:mod:`kvshm.server.loans`.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

from numpy.typing import NDArray

from kvshm.layout import ObjectLayout
from kvshm.protocol import NO_RESULT, CacheKey, EngineDrivenSpec, EngineIdentity
from kvshm.server.loans import Holder, Loan
from kvshm.server.registrations import (
    EngineDriven,
    LMCacheIdentity,
    NotRegisteredError,
    Registration,
    SlotForm,
    object_keys,
    plain_object_layout,
    scope_of_engine,
)
from kvshm.server.state import DEFERRED, Call, Refused, ServerState, scope_of, worker_of
from kvshm.shm.liveness import LivenessProbe
from kvshm.store.chunk_store import Entry

__all__ = ["EngineDrivenOperations"]


class EngineDrivenOperations:
    """The operations on lent slots, named as in the protocol."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    # LMCache's engines: one object a chunk, loans by key

    def register_kv_cache_engine_driven_context(self, call: Call, spec: EngineDrivenSpec) -> dict[str, Any]:
        """Enter an engine that copies by itself, and say where the pool is."""
        layout, form = plain_object_layout(spec, self._state.settings.chunk_size)
        known = self._known(spec, layout)
        if known is not None:
            known.client = call.client
        else:
            self._state.enter(
                Registration(
                    spec.instance_id,
                    call.client,
                    LMCacheIdentity.of(spec.model_name, spec.world_size),
                    EngineDriven(Holder(spec.instance_id, None), form),
                    (layout,),
                    self._state.clock(),
                )
            )
        return self._where()

    def prepare_store(self, call: Call, key: CacheKey, instance_id: int) -> object:
        """Lend slots for the chunks that are not cached. Asked again before the commit, the same slots."""
        registration, way, form = self._plain(instance_id)
        layout = registration.objects[0]
        hashes = self._state.hashes_in_range(key)
        worker_id = worker_of(key)
        registration.acts_as(worker_id)
        loan_id = _loan_id(key, hashes)
        loan = self._state.loans.to_write(instance_id, loan_id)
        if loan is None:
            names = object_keys(scope_of(key), worker_id, layout, hashes)
            reservation = self._state.objects.reserve([(name, layout.nbytes) for name in names])
            if reservation is None:
                raise self._state.no_room()
            new = reservation.new
            reply = {
                "context": {
                    "slots": [_slot(form, new[name]) for name in names if name in new],
                    "chunk_indices": [index for index, name in enumerate(names) if name in new],
                }
            }
            if not new:
                self._state.objects.commit(reservation)
                return reply
            loan = self._state.loans.lend_to_write(way.holder, loan_id, reservation, self._state.clock(), reply)
        self._state.loans.renew(loan, self._state.clock())
        return self._lend(call, instance_id, loan_id, loan)

    def commit_store(self, call: Call, key: CacheKey, instance_id: int, data: bytes) -> bool:
        """Make what an engine wrote into its slots visible."""
        registration, *_ = self._plain(instance_id)
        if data:
            raise Refused("commit_store takes no data here: chunks are written into the pool's slots")
        worker_id = worker_of(key)
        self._commit(registration, worker_id, _loan_id(key, self._state.hashes_in_range(key)))
        return True

    def prepare_retrieve(self, call: Call, key: CacheKey, instance_id: int) -> dict[str, Any]:
        """Slots of all chunks of the range, kept until the commit."""
        registration, way, form = self._plain(instance_id)
        hashes = self._state.hashes_in_range(key)
        worker_id = worker_of(key)
        registration.acts_as(worker_id)
        try:
            (row,) = self._state.cached(scope_of(key), worker_id, registration, hashes).values()
        except Refused:
            self._unlock(call, key)
            self._state.counters.failed_retrieves += 1
            raise
        entries = [entry for entry in row if entry is not None]
        self._state.loans.lend_to_read(way.holder, _loan_id(key, hashes), entries, self._state.clock())
        return {"success": True, "data": b"", "context": {"slots": [_slot(form, entry) for entry in entries]}}

    def commit_retrieve(self, call: Call, key: CacheKey, instance_id: int) -> bool:
        """An engine has read its slots. Refused if it took too long: what it read may be another chunk by now."""
        self._plain(instance_id)
        self._unlock(call, key)
        self._end_read(instance_id, _loan_id(key, self._state.hashes_in_range(key)))
        return True

    def _unlock(self, call: Call, key: CacheKey) -> None:
        self._state.plain_lookups.release_one(
            call.client,
            scope_of(key),
            key.request_id,
            self._state.hashes_up_to(key),
            worker_of(key),
            self._state.chunks_in_range(key),
        )

    def _plain(self, instance_id: int) -> tuple[Registration, EngineDriven, SlotForm]:
        registration = self._state.registration(instance_id)
        way = _engine_driven(registration)
        if way.slot_form is None:
            raise Refused(
                f"instance {instance_id} was registered by kvshm's client; use kvshm_prepare_store and its kin"
            )
        return registration, way, way.slot_form

    def _known(self, spec: EngineDrivenSpec, layout: ObjectLayout) -> Registration | None:
        """The engine, where it is registered like this already."""
        try:
            known = self._state.registration(spec.instance_id)
        except NotRegisteredError:
            return None
        is_plain = isinstance(known.way, EngineDriven) and known.way.slot_form is not None
        is_same = (known.model, known.objects) == ((spec.model_name, spec.world_size), (layout,))
        return known if is_plain and is_same else None

    # kvshm's engines: the objects of their layout, loans by an id of the engine's

    def kvshm_register_engine_driven(
        self,
        call: Call,
        instance_id: int,
        identity: EngineIdentity,
        objects: tuple[ObjectLayout, ...],
        liveness_name: str,
    ) -> dict[str, Any]:
        """Enter an engine that copies by itself, and say where the pool is.

        Its liveness segment is opened now: whatever becomes of the name, its lock shows whether the engine lives.
        """
        self._state.enter(
            Registration(
                instance_id,
                call.client,
                identity,
                EngineDriven(Holder(instance_id, LivenessProbe(liveness_name))),
                objects,
                self._state.clock(),
            )
        )
        return self._where()

    def kvshm_prepare_store(
        self,
        call: Call,
        instance_id: int,
        loan_id: str,
        tokens: NDArray[Any],
        wanted: tuple[tuple[int, ...], ...],
    ) -> object:
        """Lend slots for those of the wanted chunks that are not cached.

        Returns ``slots``, per object group [chunk, offset in the pool], and ``found``: where nothing is to be written,
        the chunks that a lookup finds now.
        """
        (registration, identity, way), state = self._kvshm(instance_id), self._state
        hashes = state.hashes_of(tokens)
        if len(wanted) != len(registration.objects) or max(map(max, filter(None, wanted)), default=-1) >= len(hashes):
            raise Refused(
                f"slots were asked for chunks of {len(wanted)} object groups, but there are "
                f"{len(registration.objects)} with {len(hashes)} chunks"
            )
        self._check_loan_id(instance_id, loan_id)
        scope = scope_of_engine(identity)
        names: list[dict[int, bytes]] = []
        sizes: list[tuple[bytes, int]] = []
        for layout, chunks in zip(registration.objects, wanted, strict=True):
            stored = chunks if layout.is_served else ()
            keys = object_keys(scope, identity.worker_id, layout, (hashes[chunk] for chunk in stored))
            names.append(dict(zip(stored, keys, strict=True)))
            sizes += [(name, layout.nbytes) for name in keys]
        reservation = state.objects.reserve(sizes)
        if reservation is None:
            raise state.no_room()
        new = reservation.new
        slots = [[[chunk, new[name].offset] for chunk, name in of_group.items() if name in new] for of_group in names]
        if not new:
            state.objects.commit(reservation)
            return {"slots": slots, "found": state.num_found(registration, hashes)}
        loan = state.loans.lend_to_write(
            way.holder, loan_id, reservation, state.clock(), {"slots": slots, "found": 0}, hashes
        )
        return self._lend(call, instance_id, loan_id, loan)

    def kvshm_commit_store(self, call: Call, instance_id: int, loan_id: str) -> int:
        """Make what an engine wrote into its slots visible; returns the chunks that a lookup finds then."""
        registration, identity, _ = self._kvshm(instance_id)
        loan = self._commit(registration, identity.worker_id, loan_id)
        return self._state.num_found(registration, loan.hashes)

    def kvshm_prepare_retrieve(
        self, call: Call, instance_id: int, request_id: str | None, loan_id: str, tokens: NDArray[Any]
    ) -> list[list[list[int]]]:
        """Per object group [chunk, offset in the pool] of all chunks that a retrieve reads, kept until the commit.

        What lookups of this request pinned for this engine is used up.
        """
        (registration, identity, way), state = self._kvshm(instance_id), self._state
        self._check_loan_id(instance_id, loan_id)
        hashes = state.hashes_of(tokens)
        try:
            found = state.cached(scope_of_engine(identity), identity.worker_id, registration, hashes)
        except Refused:
            state.use_up(registration, request_id, hashes, [])
            state.counters.failed_retrieves += 1
            raise
        entries = [entry for row in found.values() for entry in row if entry is not None]
        state.loans.lend_to_read(way.holder, loan_id, entries, state.clock())
        state.use_up(registration, request_id, hashes, entries)
        return [
            [[chunk, entry.offset] for chunk, entry in enumerate(found.get(group, ())) if entry is not None]
            for group in range(len(registration.objects))
        ]

    def kvshm_commit_retrieve(self, call: Call, instance_id: int, loan_id: str) -> bool:
        """An engine has read its slots."""
        self._kvshm(instance_id)
        self._end_read(instance_id, loan_id)
        return True

    def kvshm_give_back(self, call: Call, instance_id: int, loan_id: str) -> object:
        """An engine does not use, or no longer, what it was lent. It need not be registered any more."""
        self._state.count_expired(self._state.loans.give_back(instance_id, loan_id))
        self._state.loans.refuse(instance_id, loan_id)
        return NO_RESULT

    def _check_loan_id(self, instance_id: int, loan_id: str) -> None:
        if self._state.loans.is_refused(instance_id, loan_id):
            raise Refused(f"what the id {loan_id!r} was lent is given back, or in use; give each transfer its own id")

    def _kvshm(self, instance_id: int) -> tuple[Registration, EngineIdentity, EngineDriven]:
        registration, identity = self._state.kvshm_engine(instance_id)
        return registration, identity, _engine_driven(registration)

    # Of both

    def _where(self) -> dict[str, Any]:
        return {"shm_name": self._state.pool.name.lstrip("/"), "pool_size": self._state.pool.nbytes}

    def _lend(self, call: Call, instance_id: int, loan_id: Hashable, loan: Loan) -> object:
        """Reserve the pages of a store's slots, in a worker thread, and answer where they are."""
        self._state.run(partial(self._reserve, loan), partial(self._lent, call, instance_id, loan_id, loan))
        return DEFERRED

    def _reserve(self, loan: Loan) -> None:
        """In a worker thread: no page of a lent slot may be missing."""
        assert loan.reservation is not None
        for entry in loan.reservation.new.values():
            self._state.pool.ensure(entry.offset, entry.nbytes)

    def _lent(self, call: Call, instance_id: int, loan_id: Hashable, loan: Loan, _: object, reason: str | None) -> None:
        if self._state.loans.to_write(instance_id, loan_id) is not loan:
            call.fail(self._state.record(reason or "the slots were taken back before they were lent"))
        elif reason is None:
            call.answer(loan.reply)
        else:
            self._state.loans.give_back(instance_id, loan_id)
            call.fail(self._state.record(reason))

    def _commit(self, registration: Registration, worker_id: int, loan_id: Hashable) -> Loan:
        state = self._state
        loan = state.loans.end_write(registration.instance_id, loan_id)
        if loan is None or loan.reservation is None:
            raise Refused("there is no prepared store of this key; its time limit may have passed")
        state.objects.commit(loan.reservation)
        state.registrations.has_stored(registration, worker_id)
        state.counters.stores += 1
        state.counters.stored_bytes += sum(entry.nbytes for entry in loan.reservation.new.values())
        return loan

    def _end_read(self, instance_id: int, loan_id: Hashable) -> None:
        state = self._state
        loan = state.loans.end_read(instance_id, loan_id)
        if loan is None:
            raise Refused("there is no prepared retrieve of this key; its time limit may have passed")
        state.counters.retrieves += 1
        state.counters.retrieved_bytes += sum(entry.nbytes for entry in loan.entries)


def _engine_driven(registration: Registration) -> EngineDriven:
    if not isinstance(registration.way, EngineDriven):
        raise Refused(f"instance {registration.instance_id} is registered as server-driven; use store and retrieve")
    return registration.way


def _loan_id(key: CacheKey, hashes: list[bytes]) -> Hashable:
    """What a prepared transfer of LMCache's and its commit have in common, beside the instance."""
    last = hashes[-1] if hashes else b""
    return (key.request_id, key.model_name, key.world_size, key.worker_id, key.cache_salt, key.start, key.end, last)


def _slot(form: SlotForm, entry: Entry) -> dict[str, Any]:
    return {"offset": entry.offset, "length": entry.nbytes, "shape": list(form.shape), "dtype": form.dtype}
