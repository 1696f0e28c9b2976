"""A registered engine: stores, looks up and retrieves the KV of token prefixes.

What the engine's loop calls never raises because of the server: while it is away, a store stores nothing and a lookup
finds nothing. What a caller gets wrong (too few block ids, no integers) raises at once, before anything is sent.
"""

from __future__ import annotations

import logging
import operator
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvshm import wire
from kvshm.client.connections import CacheServerError, ServerTimeoutError, ServerUnreachableError
from kvshm.client.link import ServerLink
from kvshm.client.operations import ServerInfo
from kvshm.client.transfers import NotRegisteredError, Transfers
from kvshm.layout import KVLayerGroupsManager
from kvshm.prefix import Ints, int64_array, token_array
from kvshm.protocol import CacheKey

__all__ = ["BlockIds", "Engine"]

BlockIds = Sequence[Ints] | Ints

_MAX_REMEMBERED_LOOKUPS = 256
_SERVER_ERRORS = (CacheServerError, ServerTimeoutError, ServerUnreachableError, wire.WireError)

_logger = logging.getLogger("kvshm")


@dataclass(frozen=True, slots=True)
class _Lookup:
    """A lookup whose read locks wait for the retrieve."""

    request_id: str
    tokens: bytes  # of the chunks that it found


class Engine:
    """An engine that is registered with a cache server; :meth:`kvshm.CacheClient.register` makes it.

    Safe for threads. Belongs to the process that registered it. As a context manager, leaving it unregisters.

    Args:
        transfers: How chunks move: by the server or by this process.
        raises: Raise what goes wrong with the server instead of missing.
    """

    def __init__(
        self,
        link: ServerLink,
        transfers: Transfers,
        manager: KVLayerGroupsManager,
        model_name: str,
        world_size: int,
        worker_id: int,
        cache_salt: str,
        raises: bool,
    ) -> None:
        self._link = link
        self._transfers = transfers
        self._manager = manager
        self._model_name = model_name
        self._world_size = world_size
        self._worker_id = worker_id
        self._cache_salt = cache_salt
        self._key(np.empty(0, np.int64), "", worker_id)  # refuses a wrong salt now
        self._raises = raises
        self._lock = threading.RLock()
        self._lookups: deque[_Lookup] = deque()
        self._lookups_lock = threading.Lock()  # of their own: registering anew holds the other for as long as it takes
        self._generation = 0  # registrations so far
        self._server: ServerInfo | None = None  # that it is registered with
        self._is_over = False  # unregistered for good

    @property
    def instance_id(self) -> int:
        """What the server knows this engine by."""
        return self._transfers.instance_id

    @property
    def chunk_size(self) -> int:
        """Tokens of a chunk."""
        return self._manager.lmcache_tokens_per_chunk

    @property
    def is_registered(self) -> bool:
        """Whether the server knows this engine, as far as is known here."""
        return self._server is not None and self._link.is_up

    @property
    def server(self) -> ServerInfo | None:
        """The server that this engine was registered with last; None: none takes it."""
        return self._server

    def store(self, token_ids: Ints, block_ids: BlockIds) -> int:
        """Cache the whole chunks of a prefix; gives how many tokens are cached then, 0 if that did not work.

        The blocks must stay as they are until this returns, and those of :meth:`unsettled_block_ids` longer.

        Args:
            token_ids: The prompt from its first token on.
            block_ids: Per engine group (or flat, where there is one) the blocks of these tokens in order.

        Raises:
            ValueError: Too few block ids, one that is no block, or something is no integer. Nothing was sent.
        """
        tokens, num_chunks = self._chunks(token_ids)
        ids = self._kernel_block_ids(block_ids, num_chunks)
        if not num_chunks:
            return 0
        key = self._key(tokens, _new_id(), self._worker_id)

        def work() -> int:
            stored = self._transfers.store(key, ids)
            self._transfers.end(key.request_id)
            return stored

        return self._attempt(work) * self.chunk_size

    def lookup(self, token_ids: Ints) -> int:
        """Tokens of the longest cached prefix, a multiple of the chunk size; they stay cached for the retrieve.

        Raises:
            ValueError: Something is no integer. Nothing was sent.
        """
        tokens, num_chunks = self._chunks(token_ids)
        if not num_chunks:
            return 0
        key = self._key(tokens, _new_id(), None)

        def work() -> int:
            found = self._transfers.lookup(key, self._worker_id)
            if not found:
                self._transfers.end(key.request_id)
            return found

        found = self._attempt(work) * self.chunk_size
        if found:
            self._remember(_Lookup(key.request_id, tokens[:found].tobytes()))
        return found

    def retrieve(self, token_ids: Ints, block_ids: BlockIds, skip_first_n_tokens: int = 0) -> int:
        """Write the cached chunks of a prefix into blocks; gives the tokens written, all or (a miss) 0.

        After a miss the blocks hold anything. Those of :meth:`unsettled_block_ids` may still be written to.

        Args:
            token_ids: The prefix to write: the prompt up to what :meth:`lookup` found.
            block_ids: Per engine group (or flat, where there is one) the blocks of these tokens in order.
            skip_first_n_tokens: So many tokens at the start are left as they are.

        Raises:
            ValueError: Too few block ids, one that is no block, or something is no integer. Nothing was sent.
        """
        tokens, num_chunks = self._chunks(token_ids)
        ids = self._kernel_block_ids(block_ids, num_chunks)
        try:
            skip = min(operator.index(skip_first_n_tokens), tokens.size)
        except TypeError:
            raise ValueError(f"skip_first_n_tokens is {skip_first_n_tokens!r}; it must be an integer") from None
        if skip < 0:
            raise ValueError(f"skip_first_n_tokens is {skip}; it cannot be negative")
        if not num_chunks:
            return 0
        lookup = self._take_lookup(tokens.tobytes())
        request_id = _new_id() if lookup is None else lookup.request_id
        key = self._key(tokens, request_id, self._worker_id)
        unread = None if lookup is None or len(lookup.tokens) == tokens.nbytes else self._found_by(lookup, tokens.size)

        def work() -> int:
            written = self._transfers.retrieve(key, ids, skip, is_locked=lookup is not None)
            self._transfers.end(request_id, unread)
            return written

        return self._attempt(work) * self.chunk_size

    def unsettled_block_ids(self) -> list[set[int]]:
        """Per kernel group, blocks of timed-out requests that the server may still be reading or writing.

        Give them to nobody else. They leave this list once the server's late answer is there or it has gone.
        """
        return self._transfers.unsettled_block_ids(len(self._manager.kernel_groups))

    def unregister(self) -> None:
        """Let the server forget this engine; done once it no longer touches its memory. Idempotent."""
        if self._link.is_inherited:
            return
        self._is_over = True
        with self._lock:
            self._link.remove(self)
            if self._server is not None:
                self._server = None
                with self._lookups_lock:
                    forgotten, self._lookups = self._lookups, deque()
                for lookup in forgotten:
                    self._forget(lookup, is_farewell=True)
                self._attempt(self._transfers.unregister, is_farewell=True)
            self._transfers.let_go()
        self._transfers.forget_late_replies()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.unregister()

    # For the link

    def register_with(self, info: ServerInfo) -> None:
        """Register, unless it is over, and be kept so by the link.

        Raises:
            CacheServerError: The server does not take this engine; or its chunks have another size than before.
            ServerTimeoutError, ServerUnreachableError: It is not there.
        """
        with self._lock:
            if self._is_over:
                return
            self._server = None
            if info.chunk_size != self.chunk_size:
                raise CacheServerError(
                    f"the cache server came back with chunks of {info.chunk_size} tokens, but this engine is "
                    f"registered for chunks of {self.chunk_size}; make a new client and register anew"
                )
            self._transfers.register(info)
            # From the first ping on, silence is judged by the shorter limit, also if this process dies right now.
            self._link.ping(self.instance_id)
            with self._lookups_lock:
                self._lookups.clear()
            self._generation += 1
            self._server = info
            self._link.add(self)

    def say_farewell(self, timeout_s: float) -> None:
        """Unregister, if that can be done in this time."""
        self._is_over = True
        with self._lock:
            if self._server is not None and timeout_s > 0:
                self._server = None
                try:
                    self._transfers.unregister(timeout_s)
                except _SERVER_ERRORS as error:
                    _logger.info("kvshm: instance %d was not unregistered: %s", self.instance_id, str(error))
        self._transfers.forget_late_replies()

    # Helpers

    def _attempt(self, work: Callable[[], int | None], *, is_farewell: bool = False) -> int:
        """Do something with the server; 0 where that fails. Registers again where the server has forgotten us."""
        if self._link.is_inherited:
            raise RuntimeError(
                f"engine {self.instance_id} was registered by the parent of this process; make a client and register "
                f"here"
            )
        if not self._link.is_up or (self._is_over and not is_farewell):
            return 0
        generation = self._generation
        try:
            try:
                return work() or 0
            except NotRegisteredError:
                with self._lock:
                    if self._is_over:
                        return 0
                    if self._generation == generation:  # else another thread has registered again
                        self._link.register_again(self, self._link.info(again=True))
                return work() or 0
        except OSError as error:  # it did not answer, or is not there
            self._link.mark_down(error)
            if self._raises:
                raise
        except (CacheServerError, wire.WireError) as error:
            self._link.last_error = str(error)
            _logger.info("kvshm: a miss: %s", self._link.last_error)
            if self._raises:
                raise
        except ValueError:
            if not self._is_over:  # else the client was closed meanwhile
                raise
        return 0

    def _chunks(self, token_ids: Ints) -> tuple[NDArray[np.int64], int]:
        tokens = token_array(token_ids)
        num_chunks = tokens.size // self.chunk_size
        return tokens[: num_chunks * self.chunk_size], num_chunks

    def _key(self, tokens: NDArray[np.int64], request_id: str, worker_id: int | None) -> CacheKey:
        return CacheKey(
            self._model_name,
            self._world_size,
            worker_id,
            tokens,
            0,
            tokens.size,
            request_id,
            self._cache_salt,
            num_kv_readers=1,
        )

    def _kernel_block_ids(self, block_ids: BlockIds, num_chunks: int) -> list[NDArray[np.int64]]:
        """Per kernel group the block ids of the whole chunks."""
        groups = self._manager.kernel_groups
        is_flat = len(block_ids) == 0 or np.ndim(block_ids[0]) == 0
        per_engine_group: Any = [block_ids] if is_flat else block_ids
        num_needed = 1 + max(group.engine_group_idx for group in groups)
        if len(per_engine_group) < num_needed:
            raise ValueError(
                f"engine group {num_needed - 1} has no block ids: lists were given for {len(per_engine_group)} engine "
                f"groups"
            )
        ids = []
        for index, group in enumerate(groups):
            array = int64_array(per_engine_group[group.engine_group_idx], f"block_ids of kernel group {index}")
            needed = self._manager.blocks_per_chunk(index) * num_chunks
            if array.size < needed:
                raise ValueError(
                    f"{num_chunks} chunks of {self.chunk_size} tokens take {needed} blocks of kernel group {index}, "
                    f"but {array.size} block ids came"
                )
            array = array[:needed]
            num_blocks = group.shape_desc.nb
            # Of a group with a window some ids move nothing, and may be anything.
            if group.sw_size_tokens == -1 and needed and not 0 <= array.min() <= array.max() < num_blocks:
                wrong = array[(array < 0) | (array >= num_blocks)]
                raise ValueError(
                    f"block_ids of kernel group {index} hold {wrong[0]}, but its cache has blocks [0, {num_blocks})"
                )
            ids.append(array)
        self._transfers.check_block_ids(ids)
        return ids

    def _remember(self, lookup: _Lookup) -> None:
        with self._lookups_lock:
            self._lookups.append(lookup)
            forgotten = self._lookups.popleft() if len(self._lookups) > _MAX_REMEMBERED_LOOKUPS else None
        if forgotten is not None:
            self._forget(forgotten)

    def _forget(self, lookup: _Lookup, *, is_farewell: bool = False) -> None:
        """Give up the locks of a lookup that no retrieve will use."""
        self._attempt(
            lambda: self._transfers.end(lookup.request_id, self._found_by(lookup, 0)), is_farewell=is_farewell
        )

    def _found_by(self, lookup: _Lookup, start: int) -> CacheKey:
        """What a lookup has found from this token on."""
        tokens = np.frombuffer(lookup.tokens, np.int64)
        return replace(self._key(tokens, lookup.request_id, self._worker_id), start=start)

    def _take_lookup(self, tokens: bytes) -> _Lookup | None:
        """The latest lookup that found at least these tokens, which is used up by that."""
        with self._lookups_lock:
            for lookup in reversed(self._lookups):
                if lookup.tokens.startswith(tokens):
                    self._lookups.remove(lookup)
                    return lookup
        return None


def _new_id() -> str:
    """A request id that no other engine will use."""
    return secrets.token_hex(16)
