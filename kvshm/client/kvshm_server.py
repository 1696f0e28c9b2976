"""Sessions with a kvshm server: copied by the server, or by this process into slots that the server lends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvshm import wire
from kvshm.client.connections import CacheServerError, Connections, ServerGoneError
from kvshm.client.operations import KvshmServer
from kvshm.client.replies import chunks_and_offsets, count, decoded, fields, flag
from kvshm.client.requests import Requests
from kvshm.client.sessions import Copies, EngineCache, Tokens, new_id
from kvshm.layout import BlockIds, KVLayerGroupsManager, object_layouts
from kvshm.protocol import EngineIdentity
from kvshm.shm import Segment
from kvshm.shm.liveness import LivenessProbe
from kvshm.transfer import gather_chunks, scatter_chunks

__all__ = ["EngineDriven", "ServerDriven"]

_GIVE_BACK_TIMEOUT_S = 1.0


class _Session:
    """What both ways to copy share: lookups."""

    manager: KVLayerGroupsManager

    def __init__(
        self,
        connections: Connections,
        requests: Requests,
        info: KvshmServer,
        cache: EngineCache,
        identity: EngineIdentity,
        null_block_id: int | None,
        copies: Copies,
    ) -> None:
        self.info = info
        self.null_block_id = null_block_id
        self._connections = connections
        self._requests = requests
        self._cache = cache
        self._identity = identity
        self._copies = copies
        self._instance_id = requests.instance_id
        try:
            self._server: LivenessProbe | None = LivenessProbe(info.liveness_name)
        except (OSError, ValueError) as error:
            kind = ServerGoneError if isinstance(error, FileNotFoundError) else CacheServerError
            raise kind(f"the server's liveness segment cannot be opened: {error}") from error

    def count(self, tokens: Tokens) -> int:
        """Chunks that a lookup would find now. Pins nothing."""
        return self._chunks("kvshm_count", self._ask("kvshm_count", tokens.tobytes()), tokens)

    def lookup(self, tokens: Tokens, request_id: str | None) -> int:
        """Chunks found, pinned for one retrieve, or for that of every worker of the request."""
        return self._chunks("kvshm_lookup", self._ask("kvshm_lookup", request_id, tokens.tobytes()), tokens)

    def release(self, tokens: Tokens | None, request_id: str | None) -> None:
        """Give up what lookups pinned: of a request, else the latest of these tokens, else all."""
        self._ask("kvshm_release", request_id, None if tokens is None else tokens.tobytes())

    def settle(self) -> None:
        """Ask of late requests whose connection broke whether they are over."""
        payload = [wire.pack(self._instance_id)]
        self._requests.ask_whether_settled("kvshm_settle", payload)

    def _unregister(self, timeout_s: float | None) -> bool:
        self._ask("kvshm_unregister", timeout_s=timeout_s)
        return True

    def _ask(self, operation: str, *payload: Any, **how: Any) -> Any:
        return self._requests.ask(operation, self._instance_id, *payload, **how)

    def _chunks(self, operation: str, result: Any, tokens: Tokens) -> int:
        """A number of chunks of a prompt."""
        found = decoded(operation, count, result)
        if found * self.info.chunk_size > tokens.size:
            raise CacheServerError(
                f"{operation}: the server found {found} chunks of {self.info.chunk_size} in {tokens.size} tokens"
            )
        return found


class ServerDriven(_Session):
    """The server maps the engine's caches, which lie in shared memory, and copies."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.manager = self._cache.layout(self.info.chunk_size)

    def register(self) -> None:
        """Register the engine."""
        self._ask(
            "kvshm_register_server_driven",
            asdict(self._identity),
            self._cache.wrappers,
            self._cache.engine_type.value,
            self._cache.layout_hints,
            [asdict(info) for info in self._cache.engine_group_infos],
            self.null_block_id,
        )

    def unregister(self, timeout_s: float | None = None) -> bool:
        """Unregister the engine; done once the server touches nothing of it any more."""
        return self._unregister(timeout_s)

    def close(self) -> None:
        """There is nothing of the server's here."""

    def store(self, tokens: Tokens, ids: BlockIds) -> int:
        """Store the chunks that there is data of; returns how many a lookup finds then."""
        result = self._ask(
            "kvshm_store",
            tokens.tobytes(),
            _as_bytes(ids),
            self._deadline_ns(),
            block_ids=ids,
            server=self._server,
        )
        return self._chunks("kvshm_store", result, tokens)

    def retrieve(self, tokens: Tokens, ids: BlockIds, skip_first_n_tokens: int, request_id: str | None) -> bool:
        """Write all chunks or (False) none."""
        result = self._ask(
            "kvshm_retrieve",
            request_id,
            tokens.tobytes(),
            _as_bytes(ids),
            skip_first_n_tokens,
            self._deadline_ns(),
            block_ids=ids,
            server=self._server,
        )
        return decoded("kvshm_retrieve", flag, result)

    def _deadline_ns(self) -> int:
        """When this client gives up, on the server's clock. Past it the server publishes nothing and copies nothing."""
        return time.monotonic_ns() + int(self._connections.timeout_s * 1e9) + self.info.clock_offset_ns


class EngineDriven(_Session):
    """This process copies, between caches in any memory and slots of the server's pool."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._context = self._cache.context(self.info.chunk_size)
        self.manager = self._context.layout
        self._objects = object_layouts(self.manager)
        self._pool: NDArray[np.uint8] | None = None

    def register(self) -> None:
        """Register the engine and map the server's pool."""
        objects = [asdict(layout) for layout in self._objects]
        reply = decoded(
            "kvshm_register_engine_driven",
            fields,
            self._ask("kvshm_register_engine_driven", asdict(self._identity), objects, self._copies.liveness.name),
        )
        self._pool = mapped_pool(reply)

    def unregister(self, timeout_s: float | None = None) -> bool:
        """Unregister the engine, once no copy of this process runs; one that takes too long is left to the server."""
        left_s = self._copies.end(self._connections.timeout_s if timeout_s is None else timeout_s)
        if left_s is None:
            return False
        self._unregister(None if timeout_s is None else left_s)
        self._copies.owed.clear()
        return True

    def close(self) -> None:
        """Drop the pool. A copy that runs keeps it."""
        self._pool = None

    def settle(self) -> None:
        """Give back what could not be given back when it should have been."""
        super().settle()
        for loan_id in list(self._copies.owed):
            self._give_back(loan_id)

    def store(self, tokens: Tokens, ids: BlockIds) -> int:
        """Store the chunks that there is data of; returns how many a lookup finds then."""
        wanted = [
            np.flatnonzero(ids.has_data(group, self.null_block_id)).tolist() if layout.is_served else []
            for group, layout in enumerate(self._objects)
        ]
        with self._borrowing() as (loan_id, pool):
            reply = decoded(
                "kvshm_prepare_store", fields, self._ask("kvshm_prepare_store", loan_id, tokens.tobytes(), wanted)
            )
            slots = self._slots("kvshm_prepare_store", reply.get("slots"), ids.num_chunks)
            for group, (of_group, chunks) in enumerate(zip(slots, wanted, strict=True)):
                if not set(of_group) <= set(chunks):
                    raise CacheServerError(
                        f"kvshm_prepare_store: the server lent slots for chunks {sorted(of_group)} of object group "
                        f"{group}, but was asked for {chunks}"
                    )
            if not any(slots):
                return self._chunks("kvshm_prepare_store", reply.get("found"), tokens)
            for group, of_group in enumerate(slots):
                if of_group:
                    buffers = self._chunk_buffers(pool, group, of_group, ids.num_chunks)
                    gather_chunks(self._context, ids, buffers, group)
            return self._chunks("kvshm_commit_store", self._ask("kvshm_commit_store", loan_id), tokens)

    def retrieve(self, tokens: Tokens, ids: BlockIds, skip_first_n_tokens: int, request_id: str | None) -> bool:
        """Write all chunks or (False) none."""
        with self._borrowing() as (loan_id, pool):
            reply = self._ask("kvshm_prepare_retrieve", request_id, loan_id, tokens.tobytes())
            slots = self._slots("kvshm_prepare_retrieve", reply, ids.num_chunks)
            for group, (layout, of_group) in enumerate(zip(self._objects, slots, strict=True)):
                if layout.is_served:
                    needed = layout.needed_chunks(ids.num_chunks)
                    if set(of_group) != set(needed):
                        raise CacheServerError(
                            f"kvshm_prepare_retrieve: the server lent slots for chunks {sorted(of_group)} of object "
                            f"group {group}, but a retrieve needs {list(needed)}"
                        )
            for group, of_group in enumerate(slots):
                if of_group:
                    chunks = self._chunk_buffers(pool, group, of_group, ids.num_chunks)
                    scatter_chunks(self._context, ids, chunks, group, skip_first_n_tokens, self.null_block_id)
            return decoded("kvshm_commit_retrieve", flag, self._ask("kvshm_commit_retrieve", loan_id))

    @contextmanager
    def _borrowing(self) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """An id for slots to be lent, and the pool that they are in. Whatever ends this returns what was lent."""
        loan_id = new_id()
        with self._copies.running():
            pool = self._pool
            if pool is None:
                raise CacheServerError(f"instance {self._instance_id} has no pool; register it again")
            try:
                yield loan_id, pool
            except BaseException:  # also Ctrl-C: else the slots would be lent as long as this process lives
                self._copies.owed.add(loan_id)
                self._give_back(loan_id)
                raise

    def _give_back(self, loan_id: str) -> None:
        timeout_s = min(_GIVE_BACK_TIMEOUT_S, self._connections.timeout_s)
        with contextlib.suppress(CacheServerError, OSError, wire.WireError):  # then the heartbeat does it later
            self._ask("kvshm_give_back", loan_id, timeout_s=timeout_s)
            self._copies.owed.discard(loan_id)

    def _slots(self, operation: str, result: Any, num_chunks: int) -> Sequence[Mapping[int, int]]:
        """Per object group, chunk and offset of what was lent."""
        slots = decoded(operation, chunks_and_offsets, result)
        if len(slots) != len(self._objects) or any(chunk >= num_chunks for of_group in slots for chunk in of_group):
            raise CacheServerError(
                f"{operation}: the server lent slots for {len(slots)} object groups and chunks "
                f"{sorted({chunk for of_group in slots for chunk in of_group})}, but there are {len(self._objects)} "
                f"with {num_chunks} chunks"
            )
        return slots

    def _chunk_buffers(
        self, pool: NDArray[np.uint8], group: int, slots: Mapping[int, int], num_chunks: int
    ) -> Sequence[NDArray[np.uint8] | None]:
        nbytes = self._objects[group].nbytes
        chunks: list[NDArray[np.uint8] | None] = [None] * num_chunks
        for chunk, offset in slots.items():
            chunks[chunk] = slot_of(pool, offset, nbytes)
        return chunks


def mapped_pool(reply: Mapping[str, Any]) -> NDArray[np.uint8]:
    """The pool that a server says it has.

    Raises:
        CacheServerError: It says none, or it cannot be mapped.
    """
    name, nbytes = reply.get("shm_name"), reply.get("pool_size")
    if not name or not nbytes:
        raise CacheServerError(
            "the server has no pool in shared memory; start the LMCache server with --shm-name NAME (its other "
            "way to take chunks, pickle, runs code that the other side sends)"
        )
    try:
        return Segment.attach(str(name), int(nbytes)).array((int(nbytes),), "uint8")
    except (OSError, ValueError, TypeError) as error:
        raise CacheServerError(f"the server's pool {name!r} of {nbytes} bytes cannot be mapped: {error}") from error


def slot_of(pool: NDArray[np.uint8], offset: int, nbytes: int) -> NDArray[np.uint8]:
    """The bytes of a slot.

    Raises:
        CacheServerError: It does not lie in the pool.
    """
    if offset > pool.nbytes - nbytes:
        raise CacheServerError(
            f"the server lent bytes [{offset}, {offset + nbytes}) of a pool of {pool.nbytes} for a chunk of {nbytes}"
        )
    return pool[offset : offset + nbytes]


def _as_bytes(ids: BlockIds) -> list[bytes]:
    return [group.tobytes() for group in ids.flat()]
