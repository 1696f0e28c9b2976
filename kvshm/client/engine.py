"""A registered engine: stores, looks up and retrieves the KV of token prefixes.

What the engine's loop calls never raises because of the server: while it is away, a store stores nothing and a lookup
finds nothing. What a caller gets wrong (too few block ids, no integers) raises at once, before anything is sent.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from kvshm.client.operations import ServerInfo
from kvshm.client.registration import Registration
from kvshm.client.sessions import Tokens
from kvshm.integers import Ints, checked_int
from kvshm.layout import BlockIds, KVLayerGroupsManager
from kvshm.prefix import token_array
from kvshm.protocol import MAX_BLOCK_IDS, MAX_TOKENS, checked_text

__all__ = ["Engine"]


class Engine:
    """An engine that is registered with a cache server; :meth:`kvshm.CacheClient.register` makes it.

    Safe for threads. Belongs to the process that registered it. As a context manager, leaving it unregisters, and so
    does dropping it.

    Args:
        registration: What the client's link keeps alive.
        client: Alive as long as the engine.
        leave: Called with the registration when the engine is dropped.
    """

    def __init__(self, registration: Registration, client: object, leave: Any) -> None:
        self._registration = registration
        self._client = client
        self._dropped = weakref.finalize(self, leave, registration)

    def __repr__(self) -> str:
        return f"Engine({self._registration!r})"

    @property
    def instance_id(self) -> int:
        """What the server knows this engine by."""
        return self._registration.instance_id

    @property
    def chunk_size(self) -> int:
        """Tokens of a chunk."""
        return self._manager.lmcache_tokens_per_chunk

    @property
    def is_registered(self) -> bool:
        """Whether the server knows this engine, as far as is known here."""
        return self._registration.is_registered

    @property
    def server(self) -> ServerInfo | None:
        """The server that this engine was registered with last; None: none takes it."""
        return self._registration.server

    def store(self, token_ids: Ints, block_ids: Sequence[Ints] | Ints) -> int:
        """Cache the whole chunks of a prefix; returns how many of its tokens a lookup would find now.

        A chunk of which a block is the null block has no data, and is not cached. While the server is away: 0. The
        blocks must stay as they are until this returns, and those of :meth:`unsettled_block_ids` longer.

        Args:
            token_ids: The prompt from its first token on.
            block_ids: Per engine group (or flat, where there is one) the blocks of these tokens in order.

        Raises:
            ValueError: Too few block ids, one that is no block, or something is no integer. Nothing was sent.
        """
        tokens, num_chunks = self._chunks(token_ids)
        ids = BlockIds.of_engine_groups(self._manager, block_ids, num_chunks)
        ids.check_to_store(self._registration.session.null_block_id)
        num_chunks = min(num_chunks, self._max_chunks)
        if not num_chunks:
            return 0
        tokens, ids = tokens[: num_chunks * self.chunk_size], ids.first_chunks(num_chunks)
        stored = self._registration.attempt(lambda session: session.store(tokens, ids), None)
        if stored is None:  # the server refused, or is away
            stored = self._registration.attempt(lambda session: session.count(tokens), 0)
        return stored * self.chunk_size

    def lookup(self, token_ids: Ints, request_id: str | None = None) -> int:
        """Tokens of the longest cached prefix, a multiple of the chunk size; they stay cached for the retrieve.

        Args:
            request_id: Pins the prefix for the retrieves of all workers of the world that carry the same id, which may
                be any string. A second lookup with it replaces this one, or (by another worker) joins it. Without an id
                the prefix is pinned for one retrieve of its tokens by this worker.

        Raises:
            ValueError: Something is no integer, or the id no string. Nothing was sent.
        """
        tokens, num_chunks = self._chunks(token_ids)
        _check_request_id(request_id)
        num_chunks = min(num_chunks, self._max_chunks)
        if not num_chunks:
            return 0
        tokens = tokens[: num_chunks * self.chunk_size]
        return self._registration.attempt(lambda session: session.lookup(tokens, request_id), 0) * self.chunk_size

    def retrieve(
        self,
        token_ids: Ints,
        block_ids: Sequence[Ints] | Ints,
        skip_first_n_tokens: int = 0,
        request_id: str | None = None,
    ) -> int:
        """Write the cached chunks of a prefix into blocks. Returns the tokens written: all, or 0 on a miss.

        On 0 the contents of the blocks are undefined, and those of :meth:`unsettled_block_ids` may still be written to.

        Args:
            token_ids: The prefix to write: the prompt up to what :meth:`lookup` found.
            block_ids: Per engine group (or flat, where there is one) the blocks of these tokens in order.
            skip_first_n_tokens: Number of leading tokens to leave untouched. Blocks that are no rows of tokens
                (recurrent state, index pages) are written whole if one of their tokens is not among them.
            request_id: That of the lookup.

        Raises:
            ValueError: Too few block ids, one that is no block or is there twice, something is no integer, or the
                request id no string. Nothing was sent.
        """
        tokens, num_chunks = self._chunks(token_ids)
        ids = BlockIds.of_engine_groups(self._manager, block_ids, num_chunks)
        skip = _checked_skip(skip_first_n_tokens, tokens.size)
        _check_request_id(request_id)
        ids.check_to_retrieve(skip, self._registration.session.null_block_id)
        if not num_chunks or num_chunks > self._max_chunks:
            return 0
        is_done = self._registration.attempt(lambda session: session.retrieve(tokens, ids, skip, request_id), False)
        return tokens.size if is_done else 0

    def release(self, token_ids: Ints | None = None, request_id: str | None = None) -> None:
        """Give up what lookups pinned and no retrieve will use.

        Args:
            token_ids: Without a request id: the latest lookup of these tokens; all lookups of this engine if there are
                no tokens either.
            request_id: What is left of this request, for all workers. On an LMCache server, where pins have no owner:
                what is left for this worker, and only with the tokens where another worker looked it up.

        Raises:
            ValueError: Something is no integer, or the id no string. Nothing was sent.
        """
        tokens = None if token_ids is None else self._chunks(token_ids)[0][: self._max_chunks * self.chunk_size]
        _check_request_id(request_id)

        def work(session: Any) -> None:
            session.release(tokens, request_id)

        self._registration.attempt(work, None)

    def unsettled_block_ids(self) -> list[set[int]]:
        """Per kernel group, blocks of timed-out requests that the server may still be reading or writing.

        Give them to nobody else. They leave this list once the server's late answer is there or it is gone.
        """
        return self._registration.unsettled_block_ids()

    def unregister(self) -> None:
        """Let the server forget this engine. Idempotent.

        Returns once the server touches nothing of this engine any more, or after the client's time limit; then the
        blocks in question stay in :meth:`unsettled_block_ids`.
        """
        self._dropped.detach()
        self._registration.unregister()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.unregister()

    @property
    def _manager(self) -> KVLayerGroupsManager:
        return self._registration.session.manager

    @property
    def _max_chunks(self) -> int:
        """Chunks that one request can be about: of more, only the first are stored and found."""
        manager = self._manager
        blocks = sum(manager.blocks_per_chunk(index) for index in range(len(manager.kernel_groups)))
        return min(MAX_TOKENS // self.chunk_size, MAX_BLOCK_IDS // blocks)

    def _chunks(self, token_ids: Ints) -> tuple[Tokens, int]:
        """The tokens of the whole chunks, and how many they are."""
        tokens = token_array(token_ids)
        num_chunks = tokens.size // self.chunk_size
        return tokens[: num_chunks * self.chunk_size], num_chunks


def _check_request_id(request_id: str | None) -> None:
    if request_id is not None:
        checked_text("request_id", request_id)


def _checked_skip(skip_first_n_tokens: int, num_tokens: int) -> int:
    skip = checked_int(skip_first_n_tokens, "skip_first_n_tokens")
    if skip < 0:
        raise ValueError(f"skip_first_n_tokens is {skip}; it cannot be negative")
    return min(skip, num_tokens)
