"""All operations of the cache server, by name. State only: copies run elsewhere, and sockets are not known here.

One thread, the server's loop, calls everything in this module. An operation returns its result, or
:data:`~kvshm.server.state.DEFERRED` and answers its :class:`~kvshm.server.state.Call` later. What it raises becomes
the reply's failure.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvshm._version import __version__
from kvshm.protocol import NO_RESULT, OPERATIONS, PROTOCOL_VERSION, CacheKey
from kvshm.server.engine_driven import EngineDrivenOperations
from kvshm.server.registrations import scope_of_engine
from kvshm.server.server_driven import ServerDrivenOperations
from kvshm.server.state import DEFERRED, Call, Refused, ServerState, scope_of
from kvshm.shm.liveness import Liveness

__all__ = ["CacheService"]

_logger = logging.getLogger("kvshm")


class CacheService:
    """The operations on a server's state.

    Args:
        report: Returns the server's status.
        liveness: A segment that is in use as long as the server's process lives.
    """

    def __init__(self, state: ServerState, report: Callable[[], dict[str, Any]], liveness: Liveness) -> None:
        self.state = state
        self._liveness = liveness
        self.epoch = secrets.token_hex(8)
        self._report = report
        self._server_driven = ServerDrivenOperations(state)
        copies, lending = self._server_driven, EngineDrivenOperations(state)
        self.operations: dict[str, Callable[..., Any]] = {
            "register_kv_cache": copies.register_kv_cache,
            "unregister_kv_cache": copies.unregister_kv_cache,
            "store": copies.store,
            "retrieve": copies.retrieve,
            "lookup": self.lookup,
            "query_prefetch_status": self.query_prefetch_status,
            "wait_prefetch_status": self.wait_prefetch_status,
            "free_lookup_locks": self.free_lookup_locks,
            "end_session": self.end_session,
            "register_kv_cache_engine_driven_context": lending.register_kv_cache_engine_driven_context,
            "unregister_kv_cache_engine_driven_context": copies.unregister_kv_cache,
            "prepare_store": lending.prepare_store,
            "commit_store": lending.commit_store,
            "prepare_retrieve": lending.prepare_retrieve,
            "commit_retrieve": lending.commit_retrieve,
            "clear": self.clear,
            "get_chunk_size": self.get_chunk_size,
            "ping": self.ping,
            "report_block_allocation": self.report_block_allocation,
            "noop": self.noop,
            "get_experimental": self.get_experimental,
            "kvshm_hello": self.hello,
            "kvshm_register_server_driven": copies.kvshm_register_server_driven,
            "kvshm_register_engine_driven": lending.kvshm_register_engine_driven,
            "kvshm_unregister": copies.unregister_kv_cache,
            "kvshm_lookup": self.kvshm_lookup,
            "kvshm_count": self.kvshm_count,
            "kvshm_release": self.kvshm_release,
            "kvshm_store": copies.kvshm_store,
            "kvshm_retrieve": copies.kvshm_retrieve,
            "kvshm_settle": self.kvshm_settle,
            "kvshm_prepare_store": lending.kvshm_prepare_store,
            "kvshm_commit_store": lending.kvshm_commit_store,
            "kvshm_prepare_retrieve": lending.kvshm_prepare_retrieve,
            "kvshm_commit_retrieve": lending.kvshm_commit_retrieve,
            "kvshm_give_back": lending.kvshm_give_back,
            "kvshm_status": self.kvshm_status,
        }
        assert self.operations.keys() == {operation.name for operation in OPERATIONS}

    def ping(self, call: Call, instance_id: int | None) -> bool:
        """Renew an engine's lease."""
        if instance_id is not None:
            self.state.registrations.ping(instance_id, self.state.clock())
        return True

    # Lookups

    def lookup(self, call: Call, key: CacheKey, tp_size: int) -> object:
        """Find and pin the longest cached prefix; the result is asked for by request id."""
        if key.num_kv_readers < 1:
            raise Refused(f"num_kv_readers is {key.num_kv_readers}; a lookup needs at least 1 reader")
        state, scope = self.state, scope_of(key)
        hashes = state.hashes_of(key.token_ids[: key.end])
        workers = range(key.world_size) if key.worker_id is None else (key.worker_id,)
        needs = state.registrations.needs_of_all(key.model_name, key.world_size, workers)
        hit = state.longest_hit(scope, needs, hashes)
        self._count(len(hashes), hit.num_chunks)
        state.plain_lookups.look_up(call.client, scope, key.request_id, hashes, hit, key.num_kv_readers, state.clock())
        return NO_RESULT

    def kvshm_lookup(self, call: Call, instance_id: int, request_id: str | None, tokens: NDArray[np.int64]) -> int:
        """The same for an engine of kvshm's client, in one round trip; pins for all workers of a request, or (without
        one) for a retrieve by this one."""
        state = self.state
        registration, identity = state.kvshm_engine(instance_id)
        hashes = state.hashes_of(tokens)
        num_chunks = state.lookups.look_up(
            scope_of_engine(identity),
            request_id,
            instance_id,
            identity.worker_id,
            hashes,
            lambda workers, num_chunks: state.hit_of(registration, workers, hashes[:num_chunks]),
            state.clock(),
        )
        self._count(len(hashes), num_chunks)
        return num_chunks

    def kvshm_release(
        self, call: Call, instance_id: int, request_id: str | None, tokens: NDArray[np.int64] | None
    ) -> object:
        """Give up what lookups pinned and no retrieve used up: of a request, or the latest of these tokens, or all."""
        (_, identity), lookups = self.state.kvshm_engine(instance_id), self.state.lookups
        if request_id is not None:
            lookups.release(scope_of_engine(identity), request_id, instance_id, identity.worker_id)
        elif tokens is not None:
            lookups.release_latest(instance_id, self.state.hashes_of(tokens))
        else:
            lookups.end_of(instance_id)
        return NO_RESULT

    def kvshm_count(self, call: Call, instance_id: int, tokens: NDArray[np.int64]) -> int:
        """Chunks that a lookup would find now. Pins nothing."""
        return self.state.num_found(self.state.kvshm_engine(instance_id)[0], self.state.hashes_of(tokens))

    def kvshm_settle(self, call: Call, instance_id: int) -> object:
        """Answered once no copy runs on an engine's memory."""
        self.state.when_idle(instance_id, lambda: call.answer(NO_RESULT))
        return DEFERRED

    def _count(self, num_chunks: int, num_found: int) -> None:
        counters, size = self.state.counters, self.state.settings.chunk_size
        counters.lookups += 1
        counters.lookup_tokens += num_chunks * size
        counters.hit_tokens += num_found * size

    def query_prefetch_status(self, call: Call, request_id: str) -> int:
        """Chunks that a lookup of this client found, handed out once."""
        return self.state.plain_lookups.result(call.client, request_id)

    def wait_prefetch_status(self, call: Call, request_id: str, timeout_s: float) -> int:
        """The same: lookups are done when they are answered."""
        return self.state.plain_lookups.result(call.client, request_id)

    def free_lookup_locks(self, call: Call, key: CacheKey, tp_size: int) -> object:
        """Unpin what is left of a lookup in the key's range."""
        state, size = self.state, self.state.settings.chunk_size
        hashes = state.hashes_of(key.token_ids[: -(-key.end // size) * size])
        chunks = range(-(-key.start // size), -(-key.end // size))
        state.plain_lookups.release_all(call.client, scope_of(key), key.request_id, hashes, key.worker_id, chunks)
        return NO_RESULT

    def end_session(self, call: Call, request_id: str) -> object:
        """A request is over: nothing of it is kept."""
        models = self.state.registrations.models_of(call.client)
        self.state.plain_lookups.end(call.client, request_id, models)
        return NO_RESULT

    # The rest

    def clear(self, call: Call, force: bool = False) -> object:
        """Forget what is cached: what is not pinned, or (``force``) all of it."""
        if force:
            self.state.plain_lookups.end_all()
            self.state.lookups.end_all()
            self.state.objects.hide()
        else:
            self.state.objects.clear()
        return NO_RESULT

    def get_chunk_size(self, call: Call) -> int:
        """Tokens of a chunk."""
        return self.state.settings.chunk_size

    def report_block_allocation(self, call: Call, instance_id: int, model_name: str, records: list[Any]) -> object:
        """Accepted and ignored."""
        return NO_RESULT

    def noop(self, call: Call) -> str:
        """A round trip."""
        return "OK"

    def get_experimental(self, call: Call) -> list[str]:
        """Capabilities beyond LMCache's: none by this way."""
        return []

    def hello(self, call: Call, client_version: str) -> dict[str, Any]:
        """Who this server is. A new epoch means that earlier registrations are gone."""
        return {
            "version": __version__,
            "protocol": PROTOCOL_VERSION,
            "epoch": self.epoch,
            "chunk_size": self.state.settings.chunk_size,
            "clock_ns": time.monotonic_ns(),
            "null_block_id": self.state.settings.null_block_id,
            "liveness": self._liveness.name,
        }

    def kvshm_status(self, call: Call) -> dict[str, Any]:
        """How the server is."""
        return self._report()

    # Time

    def tick(self) -> None:
        """End what is over: lookups' pins, lent slots, leases."""
        state, now = self.state, self.state.clock()
        state.counters.expired_lookups += state.lookups.expire(now) + state.plain_lookups.expire(now)
        state.count_expired(state.loans.expire(now))
        for registration in state.registrations.silent(now):
            _logger.warning(
                "kvshm server: instance %d (%s) %s and is dropped",
                registration.instance_id,
                registration.model[0],
                "has ended" if registration.is_dead else f"has been silent for {now - registration.last_seen:.1f} s",
            )
            state.reap(registration)

    def close(self) -> None:
        """Unpin, unregister and take back everything."""
        state = self.state
        self._server_driven.forget_attempts()
        state.lookups.end_all()
        state.plain_lookups.end_all()
        for registration in state.registrations:
            state.registrations.remove(registration.instance_id)
            state.retire(registration, lambda: None)
        state.count_expired(state.loans.end_all())
