"""Sessions with a real LMCache server: copied by the server, or by this process into slots that the server lends.

Lookups there are asynchronous, pin the chunks of all workers, and are needed by every retrieve. What the server would
do wrong, the client does not ask for:

- It stores a chunk unless all of its blocks are the null block, and does not say whether it keeps windows apart. So a
  store ends before the first chunk that has a null block.
- It answers a store before the chunks can be found, and says that it stored also where nothing was. So the chunks are
  looked up until they are there, for a while.
- It rounds skipped tokens down to whole blocks. So a retrieve whose skip ends inside a block of tokens is a miss.
- Token ids are 32 bits there. So other prompts are misses.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvshm.client.connections import CacheServerError, Connections, ServerTimeoutError
from kvshm.client.kvshm_server import mapped_pool, slot_of
from kvshm.client.link import ServerLink
from kvshm.client.operations import LMCacheServer
from kvshm.client.replies import Slot, copied, decoded, fields, lent_to_retrieve, lent_to_store
from kvshm.client.requests import NotRegisteredError, Requests
from kvshm.client.sessions import Copies, EngineCache, Tokens, new_id
from kvshm.dtypes import dtype_name
from kvshm.formats import EngineKVFormat
from kvshm.formats.hints import is_heads_first
from kvshm.layout import BlockIds, KVLayerGroupsManager
from kvshm.prefix import chunk_hashes, is_about
from kvshm.protocol import CacheKey, EngineDrivenSpec, EngineIdentity, encode_block_ids, encode_key
from kvshm.transfer import gather_chunks, scatter_chunks

__all__ = ["EngineDriven", "ServerDriven"]

_EVENT = b"kvshm"
_WAIT_SLICE_S = 0.05
_PUBLISH_S = 0.5  # how long a stored chunk may take until it can be found
_PUBLISH_STEP_S = 0.002
_LOAN_S = 300.0  # half of the time that the server lends slots for
_MAX_LOOKUPS = 256  # that wait for their retrieve; past this, or past the next, the oldest is given up
_MAX_LOOKUP_TOKENS = 8_000_000  # of all of them together
_MAX_USED_IDS = 4096
_TOKENS_END = 2**32

_logger = logging.getLogger("kvshm")


@dataclass(frozen=True, slots=True, eq=False)
class _Lookup:
    """A lookup whose pins wait for the retrieve."""

    request_id: str
    hashes: Sequence[bytes]  # of the chunks that it found
    tokens: NDArray[np.uint32]  # of these chunks: the server knows chunks by nothing else
    is_shared: bool  # the other workers' pins wait for their retrieves


class _Session:
    """What both ways to copy share: lookups, and what is made of their pins."""

    manager: KVLayerGroupsManager

    def __init__(
        self,
        link: ServerLink,
        requests: Requests,
        info: LMCacheServer,
        cache: EngineCache,
        identity: EngineIdentity,
        null_block_id: int | None,
        copies: Copies,
    ) -> None:
        self.info = info
        self.null_block_id = null_block_id
        self._link = link
        self._connections: Connections = link.connections
        self._requests = requests
        self._cache = cache
        self._identity = identity
        self._copies = copies
        self._instance_id = requests.instance_id
        self._lock = threading.Lock()
        self._lookups: OrderedDict[str, _Lookup] = OrderedDict()  # by request id
        self._used: OrderedDict[str, None] = OrderedDict()  # requests whose pins for this worker are used up

    def count(self, tokens: Tokens) -> int:
        """Chunks that a lookup would find now. Leaves nothing pinned."""
        return self._count(tokens, None) if self._has_names(tokens) else 0

    def lookup(self, tokens: Tokens, request_id: str | None) -> int:
        """Chunks found, pinned for one retrieve, or for that of every worker of the request."""
        if not self._has_names(tokens):
            return 0
        hashes = self._hashes(tokens)
        if request_id is not None:
            with self._lock:
                known = self._lookups.get(request_id)
            if known is not None and is_about(known.hashes, hashes):
                return min(len(known.hashes), len(hashes))  # pinned already: asking again would pin it twice
            if known is not None:
                self._forget(known)
        key = self._key(tokens, new_id() if request_id is None else request_id, None)
        found = self._find(key)
        if not found:
            self._link.end_session(key.request_id)
            return 0
        with self._lock:
            self._used.pop(key.request_id, None)  # what it has pinned for this worker now is not used up
        is_shared = request_id is not None
        if not is_shared:
            self._free_others(key)
        end = found * self.info.chunk_size
        self._remember(_Lookup(key.request_id, hashes[:found], tokens[:end].astype(np.uint32), is_shared))
        return found

    def retrieve(self, tokens: Tokens, ids: BlockIds, skip_first_n_tokens: int, request_id: str | None) -> bool:
        """Write all chunks or (False) none."""
        if not self._has_names(tokens) or self._cannot_skip(skip_first_n_tokens):
            return False
        lookup = self._take(request_id, self._hashes(tokens))
        is_found_by_other = lookup is None and request_id is not None
        if lookup is None:
            key = self._key(tokens, new_id(), self._identity.worker_id)
            found = self._find(key)
            if found < ids.num_chunks:
                self._free(key, found)
                return False
        else:
            key = self._key(lookup.tokens, lookup.request_id, self._identity.worker_id)
            found = len(lookup.hashes)
        is_done = self._copy_out(self._cut(key, 0, ids.num_chunks), ids, skip_first_n_tokens)
        if found > ids.num_chunks:
            self._link.free_lookup_locks(self._cut(key, ids.num_chunks, found, whole=True))
        if lookup is None or self._is_alone_in(lookup):
            self._link.end_session(key.request_id)
        if is_found_by_other and request_id is not None:
            self._use_share(tokens, request_id)
        return is_done

    def release(self, tokens: Tokens | None, request_id: str | None) -> None:
        """Give up what lookups pinned for this worker: of a request, else the latest of these tokens, else all."""
        with self._lock:
            lookups = list(self._lookups.values())
        if request_id is not None:
            lookups = [lookup for lookup in lookups if lookup.request_id == request_id]
            if not lookups and tokens is not None:
                self._use_share(tokens, request_id)
        elif tokens is not None:
            hashes = self._hashes(tokens)
            lookups = [lookup for lookup in lookups if not lookup.is_shared and is_about(lookup.hashes, hashes)][-1:]
        for lookup in lookups:
            self._forget(lookup)

    def settle(self) -> None:
        """There is nothing to catch up on."""

    def store(self, tokens: Tokens, ids: BlockIds) -> int:
        """Store the chunks before the first that has a null block; returns how many a lookup finds then."""
        if not self._has_names(tokens):
            return 0
        num_chunks, worker_id = self._num_storable(ids), self._identity.worker_id
        if num_chunks:
            key = self._key(tokens[: num_chunks * self.info.chunk_size], new_id(), worker_id)
            if not self._copy_in(key, ids.first_chunks(num_chunks)):
                num_chunks = 0
            self._link.end_session(key.request_id)
        deadline = time.monotonic() + _PUBLISH_S
        while (found := self._count(tokens, worker_id)) < num_chunks and time.monotonic() < deadline:
            time.sleep(_PUBLISH_STEP_S)
        return found if self._identity.world_size == 1 else self.count(tokens)

    def _count(self, tokens: Tokens, worker_id: int | None) -> int:
        """Chunks cached for a worker, or for all. Leaves nothing pinned."""
        key = self._key(tokens, new_id(), worker_id)
        found = self._find(key)
        self._free(key, found)
        return found

    def _free(self, key: CacheKey, found: int) -> None:
        """Give up what a lookup found, and end its request."""
        if found:
            self._link.free_lookup_locks(self._cut(key, 0, found))
        self._link.end_session(key.request_id)

    def _copy_in(self, key: CacheKey, ids: BlockIds) -> bool:
        """Store all chunks of a key."""
        raise NotImplementedError

    def _copy_out(self, key: CacheKey, ids: BlockIds, skip_first_n_tokens: int) -> bool:
        """Retrieve all chunks of a key, which are pinned."""
        raise NotImplementedError

    def _cannot_skip(self, skip_first_n_tokens: int) -> bool:
        """Whether this number of tokens cannot be skipped exactly."""
        raise NotImplementedError

    def _num_storable(self, ids: BlockIds) -> int:
        """Chunks before the first that has a null block in a group."""
        if self.null_block_id is None:
            return ids.num_chunks
        has_null = np.zeros(ids.num_chunks, np.bool_)
        for object_group in self.manager.object_groups:
            for index in object_group.kernel_group_indices if not object_group.aux else ():
                has_null |= (ids.blocks(index) == self.null_block_id).any(axis=1)
        return int(np.argmax(has_null)) if has_null.any() else ids.num_chunks

    def _has_names(self, tokens: Tokens) -> bool:
        """Whether chunks of these tokens have a name there."""
        if not tokens.size or 0 <= tokens.min() <= tokens.max() < _TOKENS_END:
            return True
        _logger.info("kvshm: a miss: token ids outside [0, 2**32) have no name on an LMCache server")
        return False

    def _hashes(self, tokens: Tokens) -> list[bytes]:
        return chunk_hashes(tokens, self.info.chunk_size)

    def _key(self, tokens: Tokens, request_id: str, worker_id: int | None) -> CacheKey:
        who = self._identity
        return CacheKey(
            who.model_name,
            who.world_size,
            worker_id,
            tokens,
            0,
            tokens.size,
            request_id,
            who.cache_salt,
            num_kv_readers=1,
        )

    def _cut(self, key: CacheKey, start: int, end: int, *, whole: bool = False) -> CacheKey:
        """A key's chunks ``[start, end)``; ``whole`` keeps the tokens behind them."""
        size = self.info.chunk_size
        tokens = key.token_ids if whole else key.token_ids[: end * size]
        return replace(key, token_ids=tokens, start=start * size, end=end * size)

    def _find(self, key: CacheKey) -> int:
        """Look up and wait for the result: chunks found, pinned for every worker."""
        self._link.lookup(key)
        deadline = time.monotonic() + self._connections.timeout_s
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            # In slices: a real server has one thread for the requests of all its clients, which this occupies.
            wait_s = min(left_s, _WAIT_SLICE_S)
            found = self._link.wait_prefetch_status(key.request_id, wait_s, timeout_s=left_s + 1.0)
            if found is not None:
                break
            if not left_s:
                raise ServerTimeoutError(f"the lookup {key.request_id} did not end in time")
        if found * self.info.chunk_size > key.end:
            raise CacheServerError(f"the server found {found} chunks of {self.info.chunk_size} in {key.end} tokens")
        return found

    def _free_others(self, key: CacheKey) -> None:
        """A lookup pinned the chunks of all workers. The others look up and retrieve by themselves."""
        for other in range(key.world_size):
            if other != self._identity.worker_id:
                self._link.free_lookup_locks(replace(key, worker_id=other))

    def _use_share(self, tokens: Tokens, request_id: str) -> None:
        """Another worker's lookup of this request pinned chunks for this one too: release them, once.

        Pins there are anonymous counts: giving them up twice would take another request's.
        """
        if self._identity.world_size == 1:
            return  # there is no other worker
        with self._lock:
            if request_id in self._used:
                return
            self._mark_used(request_id)
        self._link.free_lookup_locks(self._key(tokens, request_id, self._identity.worker_id))

    def _use_up(self, lookup: _Lookup) -> None:
        """This worker needs its pins of a lookup no more. Called with the lock."""
        del self._lookups[lookup.request_id]
        if lookup.is_shared:
            self._mark_used(lookup.request_id)

    def _mark_used(self, request_id: str) -> None:
        self._used[request_id] = None
        self._used.move_to_end(request_id)
        if len(self._used) > _MAX_USED_IDS:
            self._used.popitem(last=False)

    def _remember(self, lookup: _Lookup) -> None:
        with self._lock:
            self._lookups[lookup.request_id] = lookup
            num_tokens = sum(each.tokens.size for each in self._lookups.values())
            given_up: list[_Lookup] = []
            for each in list(self._lookups.values())[:-1]:
                if len(self._lookups) - len(given_up) <= _MAX_LOOKUPS and num_tokens <= _MAX_LOOKUP_TOKENS:
                    break
                given_up.append(each)
                num_tokens -= each.tokens.size
        for each in given_up:
            self._forget(each)

    def _take(self, request_id: str | None, hashes: Sequence[bytes]) -> _Lookup | None:
        """The latest lookup (of a request) that found at least these chunks, which is used up by that."""
        with self._lock:
            for lookup in reversed(self._lookups.values()):
                is_meant = not lookup.is_shared if request_id is None else lookup.request_id == request_id
                if is_meant and len(lookup.hashes) >= len(hashes) and is_about(lookup.hashes, hashes):
                    self._use_up(lookup)
                    return lookup
        return None

    def _forget(self, lookup: _Lookup) -> None:
        """Give up this worker's pins of a lookup that no retrieve will use."""
        with self._lock:
            if lookup.request_id not in self._lookups:
                return
            self._use_up(lookup)
        self._link.free_lookup_locks(self._key(lookup.tokens, lookup.request_id, self._identity.worker_id))
        if self._is_alone_in(lookup):
            self._link.end_session(lookup.request_id)

    def _is_alone_in(self, lookup: _Lookup) -> bool:
        """Whether no other worker needs the server's record of the request. Else the server drops it in time."""
        return not lookup.is_shared or self._identity.world_size == 1


class ServerDriven(_Session):
    """The server maps the engine's caches, which lie in shared memory, and copies."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.manager = self._cache.layout(self.info.chunk_size)

    def register(self) -> None:
        """Register the engine.

        Raises:
            ValueError: The server would read the cache in another way.
        """
        if EngineKVFormat.NL_X_TWO_X_NB_BS_NH_HS in self._cache.formats and is_heads_first(self._cache.layout_hints):
            raise ValueError(
                "an LMCache server reads pairs [K, V] slots before heads, whatever the layout hint says; register them "
                "with transfer_mode='engine_driven', or with a kvshm server"
            )
        self._link.register_kv_cache(
            self._instance_id,
            self._cache.wrappers,
            self._identity.model_name,
            self._identity.world_size,
            self._cache.engine_type.value,
            self._cache.layout_hints,
            self._cache.engine_group_infos,
        )

    def unregister(self, timeout_s: float | None = None) -> bool:
        """Unregister the engine. A copy may still run when the server answers."""
        self.release(None, None)
        self._link.unregister_kv_cache(self._instance_id, timeout_s=timeout_s)
        return False

    def close(self) -> None:
        """There is nothing of the server's here."""

    def _cannot_skip(self, skip_first_n_tokens: int) -> bool:
        for index, group in enumerate(self.manager.kernel_groups):
            is_row = not (group.extra_object_group_tag or self.manager.moves_whole_blocks(index))
            if is_row and skip_first_n_tokens % group.tokens_per_block:
                _logger.info(
                    "kvshm: a miss: skip_first_n_tokens %d ends inside a block of %d tokens, of which an LMCache "
                    "server would write the skipped ones too",
                    skip_first_n_tokens,
                    group.tokens_per_block,
                )
                return True
        return False

    def _copy_in(self, key: CacheKey, ids: BlockIds) -> bool:
        return self._copy("store", key, ids)

    def _copy_out(self, key: CacheKey, ids: BlockIds, skip_first_n_tokens: int) -> bool:
        return self._copy("retrieve", key, ids, skip_first_n_tokens)

    def _copy(self, operation: str, key: CacheKey, ids: BlockIds, *more: Any) -> bool:
        handle, is_done = decoded(
            operation,
            copied,
            self._requests.ask(
                operation,
                encode_key(key, as_bytes=False),
                self._instance_id,
                encode_block_ids(ids.flat(), as_bytes=False),
                _EVENT,
                *more,
                block_ids=ids,
            ),
        )
        if not is_done and not handle:
            # How a real LMCache server answers an engine that it does not know.
            raise NotRegisteredError(f"{operation}: the server refused instance {self._instance_id}")
        return is_done


class EngineDriven(_Session):
    """This process copies, between caches in any memory and slots of the server's pool: one object a chunk, whole."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._context = self._cache.context(self.info.chunk_size, whole=True)
        self.manager = self._context.layout
        self._nbytes = self.manager.object_nbytes(0)
        self._pool: NDArray[np.uint8] | None = None

    def register(self) -> None:
        """Register the engine and map the server's pool."""
        self._pool = mapped_pool(self._link.register_kv_cache_engine_driven_context(self._spec()))

    def unregister(self, timeout_s: float | None = None) -> bool:
        """Unregister the engine, once no copy of this process runs; if one runs for too long, leave it to the lease."""
        left_s = self._copies.end(self._connections.timeout_s if timeout_s is None else timeout_s)
        if left_s is not None:
            self.release(None, None)
            self._link.unregister_kv_cache_engine_driven_context(
                self._instance_id, timeout_s=None if timeout_s is None else left_s
            )
        return False

    def close(self) -> None:
        """Drop the pool. A copy that runs keeps it."""
        self._pool = None

    def _cannot_skip(self, skip_first_n_tokens: int) -> bool:
        return False

    def _copy_in(self, key: CacheKey, ids: BlockIds) -> bool:
        payload = [encode_key(key, as_bytes=False), self._instance_id]
        with self._copying() as (pool, started):
            slots = decoded("prepare_store", lent_to_store, self._requests.ask("prepare_store", *payload))
            if slots is None:
                return False
            if not slots:
                return True
            if max(slots) >= ids.num_chunks:
                raise CacheServerError(f"the server lent a slot for chunk {max(slots)} of {ids.num_chunks}")
            chunks = [self._bytes_of(pool, slots[index]) if index in slots else None for index in range(ids.num_chunks)]
            self._check_loan(started)
            gather_chunks(self._context, ids, chunks)
            return bool(self._requests.ask("commit_store", *payload, b""))

    def _copy_out(self, key: CacheKey, ids: BlockIds, skip_first_n_tokens: int) -> bool:
        payload = [encode_key(key, as_bytes=False), self._instance_id]
        with self._copying() as (pool, started):
            reply = self._requests.ask("prepare_retrieve", *payload)
            if not decoded("prepare_retrieve", fields, reply).get("success"):
                return False
            try:
                slots = decoded("prepare_retrieve", lent_to_retrieve, reply)
                if len(slots) != ids.num_chunks:
                    raise CacheServerError(f"the server lent {len(slots)} slots for {ids.num_chunks} chunks")
                self._check_loan(started)
                chunks = [self._bytes_of(pool, slot) for slot in slots]
                scatter_chunks(self._context, ids, chunks, 0, skip_first_n_tokens, self.null_block_id)
            finally:
                is_good = self._requests.ask("commit_retrieve", *payload)
            # The server may have lent them to others meanwhile.
            self._check_loan(started)
            return bool(is_good)

    @contextmanager
    def _copying(self) -> Iterator[tuple[NDArray[np.uint8], float]]:
        with self._copies.running():
            pool = self._pool
            if pool is None:
                raise NotRegisteredError(f"instance {self._instance_id} has no pool; register it again")
            yield pool, time.monotonic()

    def _bytes_of(self, pool: NDArray[np.uint8], slot: Slot) -> NDArray[np.uint8]:
        if slot.nbytes != self._nbytes:
            raise CacheServerError(
                f"the server lent bytes [{slot.offset}, {slot.offset + slot.nbytes}) of a pool of {pool.nbytes} for a "
                f"chunk of {self._nbytes}"
            )
        return slot_of(pool, slot.offset, slot.nbytes)

    @staticmethod
    def _check_loan(started: float) -> None:
        """A real LMCache server lends slots for a time, which is half over."""
        if time.monotonic() - started > _LOAN_S:
            raise CacheServerError("the slots were lent too long ago; they may be another's by now")

    def _spec(self) -> EngineDrivenSpec:
        """Sizes as LMCache's engines say them, so that both find each other's chunks.

        Where several kernel groups make a chunk, it is described as plain bytes.
        """
        groups = self.manager.kernel_groups
        first = groups[0]
        is_plain = len(groups) == 1 and not first.extra_object_group_tag and not first.recurrent_state
        return EngineDrivenSpec(
            self._instance_id,
            self._identity.model_name,
            self._identity.world_size,
            first.tokens_per_block,
            *(
                (
                    first.num_layers,
                    first.hidden_dim_size,
                    dtype_name(first.dtype),
                    first.shape_desc.kv_size == 1,
                    self.manager.get_slots_per_chunk_in_sw(0),
                )
                if is_plain
                else (1, self._nbytes, "uint8", True, 1)
            ),
        )
