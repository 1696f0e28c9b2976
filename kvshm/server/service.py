"""All operations of the cache server, by name. Books only: copies run elsewhere, and sockets are not known here.

One thread, the server's loop, calls everything in this module. An operation returns its result, or
:data:`~kvshm.server.state.DEFERRED` and answers its :class:`~kvshm.server.state.Call` later. What it raises becomes
the reply's failure.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvshm._version import __version__
from kvshm.prefix import chunk_hashes
from kvshm.protocol import NO_RESULT, OPERATIONS, PROTOCOL_VERSION, CacheKey
from kvshm.server.copies import ServerDrivenOperations
from kvshm.server.lending import EngineDrivenOperations
from kvshm.server.registrations import ChunkLayout
from kvshm.server.state import Call, Refused, ServerState
from kvshm.store.pins import Found

__all__ = ["CacheService"]

_logger = logging.getLogger("kvshm")


class CacheService:
    """The operations on a server's state.

    Args:
        report: Gives the server's status.
    """

    def __init__(self, state: ServerState, report: Callable[[], dict[str, Any]]) -> None:
        self.state = state
        self.boot_token = secrets.token_hex(8)
        self._report = report
        self._server_driven = ServerDrivenOperations(state)
        owners = (self, self._server_driven, EngineDrivenOperations(state))
        self.operations: dict[str, Callable[..., Any]] = {
            operation.name: next(getattr(owner, operation.name) for owner in owners if hasattr(owner, operation.name))
            for operation in OPERATIONS
        }

    # Engines of either kind

    def unregister_kv_cache_engine_driven_context(self, call: Call, instance_id: int) -> object:
        """As :meth:`~kvshm.server.copies.ServerDrivenOperations.unregister_kv_cache`."""
        return self._server_driven.unregister_kv_cache(call, instance_id)

    def ping(self, call: Call, instance_id: int | None) -> bool:
        """A sign of life."""
        if instance_id is not None:
            self.state.registrations.ping(instance_id, self.state.clock())
        return True

    # Lookups

    def lookup(self, call: Call, key: CacheKey, tp_size: int) -> object:
        """Find and pin the longest cached prefix; the result is asked for by request id."""
        if key.num_kv_readers < 1:
            raise Refused(f"num_kv_readers is {key.num_kv_readers}; a lookup needs at least 1 reader")
        self._look_up(key, self.state.registrations.layouts(key.model_name, key.world_size))
        return NO_RESULT

    def kvshm_lookup(
        self, call: Call, key: CacheKey, instance_id: int, pin_worker_id: int | None, token_ids: NDArray[np.int64]
    ) -> int:
        """The same for a registered engine, in one round trip; pins only this worker's objects, or (None) all."""
        key = replace(key, token_ids=token_ids)
        registration = self.state.registration(instance_id)
        if key.num_kv_readers < 1:
            raise Refused(f"num_kv_readers is {key.num_kv_readers}; a lookup needs at least 1 reader")
        self._look_up(key, [registration.layout], pin_worker_id)
        return self.state.pins.result(key.request_id)

    def query_prefetch_status(self, call: Call, request_id: str) -> int:
        """Chunks that a lookup found, told once."""
        return self.state.pins.result(request_id)

    def wait_prefetch_status(self, call: Call, request_id: str, timeout_s: float) -> int:
        """The same: lookups are done when they are answered."""
        return self.state.pins.result(request_id)

    def free_lookup_locks(self, call: Call, key: CacheKey, tp_size: int) -> object:
        """Release what is left of a lookup's read locks in the key's range."""
        size = self.state.settings.chunk_size
        self.state.pins.release_all(key.request_id, key.worker_id, range(-(-key.start // size), -(-key.end // size)))
        return NO_RESULT

    def end_session(self, call: Call, request_id: str) -> object:
        """A request is over: nothing of it is kept."""
        self.state.pins.end(request_id)
        return NO_RESULT

    # The rest

    def clear(self, call: Call, force: bool = False) -> object:
        """Forget what is cached: what nobody holds, or all of it."""
        if force:
            self.state.pins.end_all()
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

    def kvshm_hello(self, call: Call, client_version: str) -> dict[str, Any]:
        """Who this server is. A boot token that changes tells a client that its registrations are gone."""
        return {
            "version": __version__,
            "protocol": PROTOCOL_VERSION,
            "boot_token": self.boot_token,
            "chunk_size": self.state.settings.chunk_size,
            "clock_ns": time.monotonic_ns(),
            "prepare_ttl_s": self.state.settings.prepare_ttl_s,
        }

    def kvshm_status(self, call: Call) -> dict[str, Any]:
        """How the server is."""
        return self._report()

    # Time

    def tick(self) -> None:
        """End what is over: lookups' read locks, lent slots, leases."""
        state, now = self.state, self.state.clock()
        state.counters.expired_lookups += state.pins.expire(now)
        for registration in state.registrations:
            state.expire_slots(registration, now)
        for registration in state.registrations.silent(now):
            _logger.warning(
                "kvshm server: instance %d (%s) has been silent for %.1f s and is dropped",
                registration.instance_id,
                registration.model_name,
                now - registration.last_seen,
            )
            state.reap(registration)
        state.end_quarantine(now)

    def close(self) -> None:
        """Let go of everything."""
        state = self.state
        self._server_driven.forget_attempts()
        state.pins.end_all()
        for registration in list(state.registrations):
            state.registrations.remove(registration.instance_id)
            state.retire(registration, lambda: None)
        state.end_quarantine(float("inf"))

    def _look_up(self, key: CacheKey, layouts: list[ChunkLayout], pin_worker_id: int | None = None) -> None:
        counters = self.state.counters
        counters.lookups += 1
        tokens = key.token_ids[: key.end]
        hashes = chunk_hashes(tokens, self.state.settings.chunk_size) if layouts else []
        num_chunks = 0
        found: list[Found] = []
        for layout in layouts:
            candidate = self.state.longest_hit(key, layout, hashes)
            if candidate[0] > num_chunks:
                num_chunks, found = candidate
        counters.lookup_tokens += len(tokens) // self.state.settings.chunk_size * self.state.settings.chunk_size
        counters.hit_tokens += num_chunks * self.state.settings.chunk_size
        if pin_worker_id is not None:
            found = [part for part in found if part.worker_id == pin_worker_id]
        # Nothing found is also what an unknown request id stands for; there is nothing to keep.
        if num_chunks:
            self.state.pins.pin(key.request_id, num_chunks, found, key.num_kv_readers, self.state.clock())
        else:
            self.state.pins.end(key.request_id)
