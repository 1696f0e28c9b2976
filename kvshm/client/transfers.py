"""How the chunks of a registered engine move: copied by the server, or by this process into the server's pool.

Both say what they did in chunks. Both work with a kvshm server and with a real LMCache server, whose lookups are
asynchronous and whose retrieves need the read locks of a lookup.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvshm import wire
from kvshm.client.connections import CacheServerError, Connection, ServerTimeoutError, ServerUnreachableError
from kvshm.client.link import ServerLink
from kvshm.client.operations import FRAMES, ServerInfo
from kvshm.client.replies import Slot, copied, count, decoded, fields, lent_to_retrieve, lent_to_store
from kvshm.context import CPUCacheContext
from kvshm.dtypes import dtype_name
from kvshm.layout import ObjectGroupInfo, all_null_chunk_masks, layout_fingerprint
from kvshm.protocol import NOT_REGISTERED, CacheKey, EngineDrivenSpec, encode_block_ids, encode_key
from kvshm.shm import Segment
from kvshm.transfer import gather_chunks, scatter_chunks

__all__ = ["EngineDrivenTransfers", "NotRegisteredError", "Registered", "ServerDrivenTransfers", "Transfers"]

_EVENT = b"kvshm"
_logger = logging.getLogger("kvshm")
_WAIT_SLICE_S = 0.05

BlockIds = Sequence[NDArray[np.int64]]


class NotRegisteredError(CacheServerError):
    """The server does not know this engine: it is another process by now, or has dropped it."""


class Transfers(Protocol):
    """What an engine needs of its way to move chunks. All raise what :mod:`kvshm.client.connections` raises."""

    instance_id: int

    def register(self, info: ServerInfo) -> None:
        """Register with this server."""

    def unregister(self, timeout_s: float | None = None) -> None:
        """Unregister, once no copy of this process runs; if one runs for too long, leave it to the server's lease."""

    def let_go(self) -> None:
        """Hold nothing of the server's any more, also where it is not there to be told."""

    def check_block_ids(self, block_ids: BlockIds) -> None:
        """ValueError: an id is no block. Nothing has been sent."""

    def store(self, key: CacheKey, block_ids: BlockIds) -> int:
        """Chunks that are cached now."""

    def lookup(self, key: CacheKey, worker_id: int) -> int:
        """Chunks found; this worker's are locked for one retrieve."""

    def retrieve(self, key: CacheKey, block_ids: BlockIds, skip_first_n_tokens: int, *, is_locked: bool) -> int:
        """Chunks written: all or 0."""

    def end(self, request_id: str, unread: CacheKey | None = None) -> None:
        """A request is over, and these chunks that its lookup found are not retrieved."""

    def unsettled_block_ids(self, num_kernel_groups: int) -> list[set[int]]:
        """Per kernel group, blocks that the server may still be reading or writing."""

    def forget_late_replies(self) -> None:
        """Wait for none of them any more."""


@dataclass(frozen=True, slots=True)
class Registered:
    """What an engine registers as."""

    wrappers: Any  # descriptors, nested as the engine's cache is
    kv_caches: Any  # what they describe: alive as long as the engine is registered
    model_name: str
    world_size: int
    engine_type: str
    layout_hints: dict[str, Any]
    engine_group_infos: tuple[Any, ...]
    num_blocks: tuple[int, ...]  # per kernel group


@dataclass(slots=True, eq=False)
class _Unsettled:
    """A request that was sent, and whose reply did not come in time or could not be read."""

    connection: Connection
    uid: int
    block_ids: BlockIds


class _Base:
    """What both ways share: requests that know a forgotten registration, and lookups."""

    def __init__(self, link: ServerLink) -> None:
        self._link = link
        self._info: ServerInfo | None = None
        # 63 random bits: process ids repeat from container to container.
        self.instance_id = secrets.randbits(63)
        self._unsettled: list[_Unsettled] = []
        self._lock = threading.Lock()

    @property
    def _is_kvshm(self) -> bool:
        return self._info is not None and self._info.is_kvshm

    def let_go(self) -> None:
        """Nothing is held here."""

    def _request(self, operation: str, *payload: Any, block_ids: BlockIds | None = None) -> Any:
        """One request; blocks that it copies from or to are remembered if its reply does not come in time."""
        connections = self._link.connections
        deadline = time.monotonic() + connections.timeout_s
        frames = [wire.pack(value) for value in payload]
        connection = connections.take()
        try:
            reply = connection.receive(connection.send(FRAMES[operation], frames, deadline), deadline, operation)
        except ServerUnreachableError:
            connections.discard(connection)
            raise
        except BaseException:  # it is late, or no reply, or Ctrl-C came: the server may copy all the same
            if block_ids is None:
                connections.discard(connection)
            else:
                with self._lock:
                    self._drop_settled()
                    self._unsettled.append(_Unsettled(connection, connection.uid, block_ids))
            raise
        connections.give(connection)
        if reply.reason is not None:
            kind = NotRegisteredError if NOT_REGISTERED in reply.reason else CacheServerError
            raise kind(f"{operation}: {reply.reason}")
        return reply.result

    def lookup(self, key: CacheKey, worker_id: int) -> int:
        """Chunks found; this worker's are locked for one retrieve."""
        if self._is_kvshm:
            key_fields = encode_key(replace(key, token_ids=key.token_ids[:0]), as_bytes=True)
            tokens = key.token_ids.tobytes()
            result = self._request("kvshm_lookup", key_fields, self.instance_id, worker_id, tokens)
            return self._plausible(decoded("kvshm_lookup", count, result), key)
        self._link.lookup(key)
        deadline = time.monotonic() + self._link.connections.timeout_s
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            # In slices: a real server has one thread for the requests of all its clients, which this occupies.
            wait_s = min(left_s, _WAIT_SLICE_S)
            found = self._link.wait_prefetch_status(key.request_id, wait_s, timeout_s=left_s + 1.0)
            if found is not None:
                break
            if not left_s:
                raise ServerTimeoutError(f"the lookup {key.request_id} did not end in time")
        self._plausible(found, key)
        # It has locked the chunks of all workers. The others look up and retrieve by themselves.
        for other in range(key.world_size if found else 0):
            if other != worker_id:
                self._link.free_lookup_locks(replace(key, worker_id=other))
        return found

    def _plausible(self, found: int, key: CacheKey) -> int:
        assert self._info is not None
        if found * self._info.chunk_size > key.end:
            raise CacheServerError(f"the server found {found} chunks of {self._info.chunk_size} in {key.end} tokens")
        return found

    def end(self, request_id: str, unread: CacheKey | None = None) -> None:
        """A request is over, and these chunks that its lookup found are not retrieved.

        A kvshm server keeps nothing of a request but its locks. A real one remembers it for ten minutes unless it is
        told, and being told unlocks nothing there.
        """
        if unread is not None and not self._is_kvshm:
            self._link.free_lookup_locks(unread)
        if unread is not None or not self._is_kvshm:
            self._link.end_session(request_id)

    def unsettled_block_ids(self, num_kernel_groups: int) -> list[set[int]]:
        """Per kernel group, blocks that the server may still be reading or writing."""
        with self._lock:
            self._drop_settled()
            blocks: list[set[int]] = [set() for _ in range(num_kernel_groups)]
            for late in self._unsettled:
                for group, ids in zip(blocks, late.block_ids, strict=True):
                    group.update(ids.tolist())
            return blocks

    def _drop_settled(self) -> None:
        for late in list(self._unsettled):
            # Gone, or answered: either way it no longer copies.
            if not late.connection.is_connected or late.connection.poll(late.uid):
                self._unsettled.remove(late)
                self._link.connections.discard(late.connection)

    def forget_late_replies(self) -> None:
        """Wait for none of them any more."""
        with self._lock:
            for late in self._unsettled:
                self._link.connections.discard(late.connection)
            self._unsettled.clear()


class ServerDrivenTransfers(_Base):
    """The server maps the engine's caches, which lie in shared memory, and copies."""

    def __init__(self, link: ServerLink, registered: Registered) -> None:
        super().__init__(link)
        self._registered = registered

    def register(self, info: ServerInfo) -> None:
        """Register with this server."""
        self._info = info
        what = self._registered
        self._link.register_kv_cache(
            self.instance_id,
            what.wrappers,
            what.model_name,
            what.world_size,
            what.engine_type,
            what.layout_hints,
            what.engine_group_infos,
        )

    def unregister(self, timeout_s: float | None = None) -> None:
        """Unregister."""
        self._link.unregister_kv_cache(self.instance_id, timeout_s=timeout_s)

    def check_block_ids(self, block_ids: BlockIds) -> None:
        """ValueError: an id is no block. Nothing has been sent."""
        # A kvshm server looks at those that move, and refuses. A real one counts negative ids from the end, and for
        # one too large it leaves the chunks locked for ten minutes, in which it answers stores but stores nothing.
        if not self._is_kvshm:
            _check_block_ids(block_ids, self._registered.num_blocks)

    def store(self, key: CacheKey, block_ids: BlockIds) -> int:
        """Chunks that are cached now."""
        return self._copy("store", key, block_ids)

    def retrieve(self, key: CacheKey, block_ids: BlockIds, skip_first_n_tokens: int, *, is_locked: bool) -> int:
        """Chunks written: all or 0."""
        if (
            not self._is_kvshm
            and not is_locked
            and self.lookup(replace(key, worker_id=None), key.worker_id or 0)
            < (key.end // (self._info.chunk_size if self._info else 1))
        ):
            self._link.free_lookup_locks(key)
            return 0
        return self._copy("retrieve", key, block_ids, skip_first_n_tokens)

    def _copy(self, operation: str, key: CacheKey, block_ids: BlockIds, *more: Any) -> int:
        info = self._info
        assert info is not None
        payload = [
            encode_key(key, as_bytes=info.is_kvshm),
            self.instance_id,
            encode_block_ids(block_ids, as_bytes=info.is_kvshm),
            _EVENT,
            *more,
        ]
        if info.is_kvshm:
            # Past this the server publishes nothing that it gathered: the engine may have changed the blocks by then.
            payload.append(time.monotonic_ns() + int(self._link.connections.timeout_s * 1e9) + info.clock_offset_ns)
        handle, ok = decoded(operation, copied, self._request(operation, *payload, block_ids=block_ids))
        if not ok and not handle:
            # How a real LMCache server answers an engine that it does not know.
            raise NotRegisteredError(f"{operation}: the server refused instance {self.instance_id}")
        return key.end // info.chunk_size if ok else 0


def _check_block_ids(block_ids: BlockIds, num_blocks: Sequence[int]) -> None:
    for index, (ids, end) in enumerate(zip(block_ids, num_blocks, strict=True)):
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < end:
            raise ValueError(
                f"block ids of kernel group {index} reach from {ids.min()} to {ids.max()}, but there are {end} blocks"
            )


class EngineDrivenTransfers(_Base):
    """This process copies, between its caches in any memory and slots of the server's pool.

    Args:
        context: The engine's cache, with one object group of whole chunks.
        null_block_id: A chunk that has only this block in a group ends what is stored.
    """

    def __init__(
        self, link: ServerLink, context: CPUCacheContext, model_name: str, world_size: int, null_block_id: int
    ) -> None:
        super().__init__(link)
        self._context = context
        self._manager = context.kv_layer_groups_manager
        self._model_name = model_name
        self._world_size = world_size
        self._null_block_id = null_block_id
        self._pool: NDArray[np.uint8] | None = None
        self._nbytes = self._manager.object_nbytes(0)
        # While this process lives, a server that has not heard of it lends its slots to nobody else.
        self._life_sign = Segment.create(1)
        self._copies = threading.Condition()
        self._num_copies = 0  # that hold slots, or are about to
        self._is_over = False

    def register(self, info: ServerInfo) -> None:
        """Register with this server and map its pool."""
        self._info = info
        # From here on no transfer under way takes slots of the new server for slots of the old pool.
        self._pool = None
        spec = asdict(self._spec())
        if info.is_kvshm:
            spec["life_sign"] = self._life_sign.name
        else:
            del spec["layout_fingerprint"], spec["life_sign"]
        reply = self._link.register_kv_cache_engine_driven_context(spec)
        name, nbytes = reply.get("shm_name"), reply.get("pool_size")
        if not name or not nbytes:
            raise CacheServerError(
                "the server has no pool in shared memory; start the LMCache server with --shm-name NAME (its other "
                "way to take chunks, pickle, runs code that the other side sends)"
            )
        try:
            self._pool = Segment.attach(str(name), int(nbytes)).array((int(nbytes),), "uint8")
        except (OSError, ValueError, TypeError) as error:
            raise CacheServerError(f"the server's pool {name!r} of {nbytes} bytes cannot be mapped: {error}") from error

    def unregister(self, timeout_s: float | None = None) -> None:
        """Unregister and let go of the pool, once no copy runs; if one runs for too long, leave it to the lease.

        The server gives the slots of an engine that unregisters to others at once.
        """
        limit_s = self._link.connections.timeout_s if timeout_s is None else timeout_s
        started = time.monotonic()
        with self._copies:
            self._is_over = True
            if not self._copies.wait_for(lambda: not self._num_copies, limit_s):
                _logger.warning(
                    "kvshm: instance %d still copies, so it is not unregistered; the server drops it when it has been "
                    "silent for long enough",
                    self.instance_id,
                )
                return
        if timeout_s is not None:
            timeout_s = max(timeout_s - (time.monotonic() - started), 0.0)
        self._link.unregister_kv_cache_engine_driven_context(self.instance_id, timeout_s=timeout_s)
        self._pool = None
        self._life_sign.unlink()

    def let_go(self) -> None:
        """Drop the pool and the life sign, unless a copy still runs: its slots must not become another engine's."""
        with self._copies:
            self._is_over = True
            if not self._num_copies:
                self._pool = None
                self._life_sign.unlink()

    def check_block_ids(self, block_ids: BlockIds) -> None:
        """ValueError: an id is no block. Nothing has been sent."""
        _check_block_ids(block_ids, [group.shape_desc.nb for group in self._manager.kernel_groups])

    def store(self, key: CacheKey, block_ids: BlockIds) -> int:
        """Chunks that are cached now."""
        num_chunks = self._storable(block_ids, key.end // self._context.lmcache_tokens_per_chunk)
        if not num_chunks:
            return 0
        end = num_chunks * self._context.lmcache_tokens_per_chunk
        key = replace(key, token_ids=key.token_ids[:end], end=end)
        payload = [encode_key(key, as_bytes=self._is_kvshm), self.instance_id]
        with self._copying():
            pool, started = self._mapped_pool(), time.monotonic()
            slots = decoded("prepare_store", lent_to_store, self._request("prepare_store", *payload))
            if slots is None:
                return 0
            if not slots:
                return num_chunks
            if max(slots) >= num_chunks:
                raise CacheServerError(f"the server lent a slot for chunk {max(slots)} of {num_chunks}")
            chunks = [self._bytes_of(pool, slots[index]) if index in slots else None for index in range(num_chunks)]
            self._check_loan(pool, started)
            gather_chunks(self._context, self._cut(block_ids, num_chunks), chunks)
            return num_chunks if self._request("commit_store", *payload, b"") else 0

    def retrieve(self, key: CacheKey, block_ids: BlockIds, skip_first_n_tokens: int, *, is_locked: bool) -> int:
        """Chunks written: all or 0."""
        num_chunks = key.end // self._context.lmcache_tokens_per_chunk
        if (
            not self._is_kvshm
            and not is_locked
            and self.lookup(replace(key, worker_id=None), key.worker_id or 0) < num_chunks
        ):
            self._link.free_lookup_locks(key)
            return 0
        payload = [encode_key(key, as_bytes=self._is_kvshm), self.instance_id]
        with self._copying():
            pool, started = self._mapped_pool(), time.monotonic()
            reply = self._request("prepare_retrieve", *payload)
            if not decoded("prepare_retrieve", fields, reply).get("success"):
                return 0
            try:
                slots = decoded("prepare_retrieve", lent_to_retrieve, reply)
                if len(slots) != num_chunks:
                    raise CacheServerError(f"the server lent {len(slots)} slots for {num_chunks} chunks")
                self._check_loan(pool, started)
                scatter_chunks(
                    self._context,
                    self._cut(block_ids, num_chunks),
                    [self._bytes_of(pool, slot) for slot in slots],
                    0,
                    skip_first_n_tokens,
                    self._null_block_id,
                )
            finally:
                is_good = self._request("commit_retrieve", *payload)
            return num_chunks if is_good else 0

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """From before slots are lent until they are given back, no farewell is said."""
        with self._copies:
            if self._is_over:
                raise NotRegisteredError(f"instance {self.instance_id} was unregistered")
            self._num_copies += 1
        try:
            yield
        finally:
            with self._copies:
                self._num_copies -= 1
                self._copies.notify_all()

    def _spec(self) -> EngineDrivenSpec:
        """Sizes as LMCache's engines tell them, so that both find each other's chunks; where those cannot say all that
        a chunk's bytes depend on, a chunk is so many bytes of a kind of its own."""
        groups = self._manager.kernel_groups
        first = groups[0]
        is_plain = first.sw_size_tokens == -1 and not first.extra_object_group_tag and not first.recurrent_state
        if len(groups) == 1 and is_plain:
            return EngineDrivenSpec(
                self.instance_id,
                self._model_name,
                self._world_size,
                first.tokens_per_block,
                first.num_layers,
                first.hidden_dim_size,
                dtype_name(first.dtype),
                first.shape_desc.kv_size == 1,
                self._manager.get_slots_per_chunk_in_sw(0),
            )
        return EngineDrivenSpec(
            self.instance_id,
            self._model_name,
            self._world_size,
            first.tokens_per_block,
            1,
            self._nbytes,
            "uint8",
            True,
            1,
            layout_fingerprint(self._manager),
        )

    def _storable(self, block_ids: BlockIds, num_chunks: int) -> int:
        """Chunks before the first that has no data in one of the groups."""
        masks = all_null_chunk_masks(
            [ids.tolist() for ids in block_ids],
            [ObjectGroupInfo((index,)) for index in range(len(block_ids))],
            [self._manager.blocks_per_chunk(index) for index in range(len(block_ids))],
            num_chunks,
            self._null_block_id,
        )
        return next((index for index in range(num_chunks) if any(mask[index] for mask in masks)), num_chunks)

    def _cut(self, block_ids: BlockIds, num_chunks: int) -> list[NDArray[np.int64]]:
        return [ids[: self._manager.blocks_per_chunk(index) * num_chunks] for index, ids in enumerate(block_ids)]

    def _mapped_pool(self) -> NDArray[np.uint8]:
        pool = self._pool
        if pool is None:
            raise NotRegisteredError(f"instance {self.instance_id} has no pool; register it again")
        return pool

    def _bytes_of(self, pool: NDArray[np.uint8], slot: Slot) -> NDArray[np.uint8]:
        if slot.nbytes != self._nbytes or slot.offset > pool.nbytes - slot.nbytes:
            raise CacheServerError(
                f"the server lent bytes [{slot.offset}, {slot.offset + slot.nbytes}) of a pool of {pool.nbytes} for a "
                f"chunk of {self._nbytes}"
            )
        return pool[slot.offset : slot.offset + slot.nbytes]

    def _check_loan(self, pool: NDArray[np.uint8], started: float) -> None:
        """Slots are of the pool that was mapped when they were asked for, and lent for a time, which is half over."""
        assert self._info is not None
        if self._pool is not pool:
            raise CacheServerError("the server is another one by now; the slots that it lent are not used")
        if time.monotonic() - started > self._info.prepare_ttl_s / 2:
            raise CacheServerError("the server took too long to lend slots; they may be another's by now")
