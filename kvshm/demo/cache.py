"""The cache process of the demo: it maps the engines' pages and keeps chunks of tokens; and the client of it.

:class:`PipeClient` has the shape of :class:`kvshm.CacheClient`, so an engine can talk to either.

Run as ``python -m kvshm.demo.cache CHUNK_SIZE CAPACITY FD ...`` it serves one conversation after the other, in the
order of the descriptors, each until the engine at the other end has gone.
"""

from __future__ import annotations

import mmap
import signal
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

import numpy as np

import kvshm
from kvshm.context import CPUCacheContext
from kvshm.demo.channel import Channel, Message
from kvshm.prefix import chunk_hashes, token_array
from kvshm.transfer import gather_chunks, object_group_nbytes, scatter_chunks

__all__ = ["CacheClientLike", "ChunkCache", "PipeClient", "PipeEngine", "RegisteredEngine", "connect", "main", "serve"]

ByteArray = np.ndarray[Any, np.dtype[np.uint8]]
_CACHE_LINE = 64  # bytes
_Key = tuple[str, bytes]  # model, hash of all tokens up to the chunk's end


class RegisteredEngine(Protocol):
    """What a cache offers to an engine whose pages it has mapped. Counts are of tokens, whole chunks only."""

    def store(self, token_ids: Sequence[int], block_ids: Sequence[int]) -> int:
        """Keep the tokens' K and V; gives how many are kept."""

    def lookup(self, token_ids: Sequence[int]) -> int:
        """How many tokens from the beginning on are kept."""

    def retrieve(self, token_ids: Sequence[int], block_ids: Sequence[int], skip_first_n_tokens: int = 0) -> int:
        """Write kept K and V into the engine's blocks; gives of how many tokens."""

    def unregister(self) -> None:
        """Let go of the engine's pages."""


class CacheClientLike(Protocol):
    """Where an engine registers: a PipeClient or a CacheClient."""

    def get_chunk_size(self) -> int:
        """Tokens in a chunk."""

    def register(
        self, kv_caches: Sequence[np.ndarray[Any, Any]], model_name: str, *, layout_hints: dict[str, str]
    ) -> RegisteredEngine:
        """Have the pages mapped."""

    def close(self) -> None:
        """End the conversation."""


class ChunkCache:
    """Chunks of tokens in one pool, by model and the hash of all tokens up to their end.

    Args:
        chunk_size: Tokens in a chunk.
        capacity: Bytes of the pool. What does not fit is not kept.
    """

    def __init__(self, chunk_size: int, capacity: int) -> None:
        self.chunk_size = chunk_size
        # Written once now: a pool whose pages the kernel has yet to hand out would be timed with the first copy. On
        # cache lines: some processors copy blocks ten times slower to where large arrays begin by default, 16 bytes
        # past one.
        raw: ByteArray = np.full(capacity + _CACHE_LINE, 0xFF, dtype=np.uint8)
        start = -raw.ctypes.data % _CACHE_LINE
        self._pool = raw[start : start + capacity]
        self._used = 0
        self._chunks: dict[_Key, ByteArray] = {}
        self.copy_s = 0.0  # seconds that the last gather or scatter took

    def store(self, context: CPUCacheContext, model: str, token_ids: Sequence[int], block_ids: list[int]) -> int:
        """Gather the tokens' full chunks out of the engine's blocks, those not kept already; gives the tokens kept."""
        keys = self._keys(model, token_ids)
        nbytes = object_group_nbytes(context, 0)
        new: dict[_Key, ByteArray] = {}
        used = self._used
        for count, key in enumerate(keys):
            if key in self._chunks:
                continue
            if used + nbytes > len(self._pool):
                keys = keys[:count]
                break
            new[key] = self._pool[used : used + nbytes]
            used += nbytes
        needed = context.calculate_num_blocks(len(keys) * self.chunk_size, 0)
        began = time.perf_counter()
        gather_chunks(context, [block_ids[:needed]], [new.get(key) for key in keys])
        self.copy_s = time.perf_counter() - began
        # Only now: a gather that is refused leaves the cache as it was.
        self._chunks |= new
        self._used = used
        return len(keys) * self.chunk_size

    def lookup(self, model: str, token_ids: Sequence[int]) -> int:
        """Tokens of the longest beginning that is kept."""
        return len(self._prefix(model, token_ids)) * self.chunk_size

    def retrieve(
        self, context: CPUCacheContext, model: str, token_ids: Sequence[int], block_ids: list[int], skip: int
    ) -> int:
        """Scatter the longest kept beginning into the engine's blocks, past ``skip`` tokens; gives its tokens."""
        chunks = self._prefix(model, token_ids)
        needed = context.calculate_num_blocks(len(chunks) * self.chunk_size, 0)
        began = time.perf_counter()
        scatter_chunks(context, [block_ids[:needed]], chunks, skip_first_n_tokens=skip)
        self.copy_s = time.perf_counter() - began
        return len(chunks) * self.chunk_size

    def _prefix(self, model: str, token_ids: Sequence[int]) -> list[ByteArray]:
        found = []
        for key in self._keys(model, token_ids):
            if key not in self._chunks:
                break
            found.append(self._chunks[key])
        return found

    def _keys(self, model: str, token_ids: Sequence[int]) -> list[_Key]:
        return [(model, digest) for digest in chunk_hashes(token_array(token_ids), self.chunk_size)]


def serve(channel: Channel, cache: ChunkCache) -> None:
    """Answer one engine until it has gone."""
    context: CPUCacheContext | None = None
    model = ""

    def answer(request: Message) -> Any:
        nonlocal context, model
        operation, tokens = request["operation"], request.get("token_ids", [])
        if operation == "get_chunk_size":
            return cache.chunk_size
        if operation == "register":
            context = CPUCacheContext(request["kv_caches"], cache.chunk_size, request["layout_hints"])
            _touch(context)
            model = request["model_name"]
            return True
        if operation == "lookup":
            return cache.lookup(model, tokens)
        if context is None:
            raise ValueError(f"{operation!r} needs a registered engine; register first")
        if operation == "store":
            return cache.store(context, model, tokens, request["block_ids"])
        if operation == "retrieve":
            return cache.retrieve(context, model, tokens, request["block_ids"], request["skip_first_n_tokens"])
        if operation == "unregister":
            context.close()
            context = None
            return True
        raise ValueError(f"unknown operation {operation!r}")

    try:
        while True:
            request = channel.receive()
            try:
                reply = {"result": answer(request), "copy_s": cache.copy_s}
            except (ValueError, LookupError, OSError) as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
            channel.send(reply)
    except ConnectionError:
        return
    finally:
        if context is not None:
            context.close()


def _touch(context: CPUCacheContext) -> None:
    """Read a byte of every page, so that what the kernel does at the first look belongs to mapping, not to copying."""
    for layer in context.kv_tensors:
        layer.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE].max()


class PipeClient:
    """Talks to the cache process over a channel; shaped as :class:`kvshm.CacheClient`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.copy_s = 0.0  # seconds that the cache process spent in its last gather or scatter

    def call(self, operation: str, **arguments: Any) -> Any:
        """Ask for one operation and wait for its result.

        Raises:
            ConnectionError: The cache process has gone.
            RuntimeError: It refused; the text says why.
        """
        self._channel.send({"operation": operation, **arguments})
        reply = self._channel.receive()
        if "error" in reply:
            raise RuntimeError(f"the cache process refused {operation!r}: {reply['error']}")
        self.copy_s = float(reply["copy_s"])
        return reply["result"]

    def get_chunk_size(self) -> int:
        """Tokens in a chunk."""
        return int(self.call("get_chunk_size"))

    def register(
        self, kv_caches: Sequence[np.ndarray[Any, Any]], model_name: str, *, layout_hints: dict[str, str]
    ) -> PipeEngine:
        """Send the descriptors of an engine's layers, so that the cache process maps them."""
        wrappers = [kvshm.wrap(array) for array in kv_caches]
        self.call("register", kv_caches=wrappers, model_name=model_name, layout_hints=layout_hints)
        return PipeEngine(self)

    def close(self) -> None:
        """End the conversation."""
        self._channel.close()


class PipeEngine:
    """An engine that a cache process knows; shaped as what :meth:`kvshm.CacheClient.register` gives."""

    def __init__(self, client: PipeClient) -> None:
        self._client = client

    def __enter__(self) -> PipeEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.unregister()

    def store(self, token_ids: Sequence[int], block_ids: Sequence[int]) -> int:
        """Keep the full chunks of the tokens; gives how many tokens are kept."""
        return int(self._client.call("store", token_ids=list(token_ids), block_ids=list(block_ids)))

    def lookup(self, token_ids: Sequence[int]) -> int:
        """How many tokens from the beginning on are kept."""
        return int(self._client.call("lookup", token_ids=list(token_ids)))

    def retrieve(self, token_ids: Sequence[int], block_ids: Sequence[int], skip_first_n_tokens: int = 0) -> int:
        """Have the longest kept beginning written into these blocks; gives its tokens."""
        arguments = {"token_ids": list(token_ids), "block_ids": list(block_ids)}
        return int(self._client.call("retrieve", **arguments, skip_first_n_tokens=skip_first_n_tokens))

    def unregister(self) -> None:
        """Have the cache process let go of the pages. Of one that has gone there is nothing to ask."""
        try:
            self._client.call("unregister")
        except ConnectionError:
            return


def connect(url: str) -> CacheClientLike:
    """A client of a cache server, which raises what goes wrong.

    Raises:
        ModuleNotFoundError: pyzmq is not installed.
        ValueError: The url is none.
    """
    from kvshm.client.cache_client import CacheClient  # noqa: PLC0415  the only thing here that needs an optional package

    return CacheClient(url, raises=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the conversations whose descriptors are given."""
    # The terminal's Ctrl-C is for the process that started this one; its end ends the conversations.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    chunk_size, capacity, *fds = (int(text) for text in (sys.argv[1:] if argv is None else argv))
    cache = ChunkCache(chunk_size, capacity)
    for channel in [Channel.inherited(fd) for fd in fds]:
        serve(channel, cache)
        channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
