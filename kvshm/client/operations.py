"""The protocol's operations as calls: arguments in, frames out; a reply in, a result or an error out.

Works against a kvshm server and a real LMCache server alike. An operation that fails on a kvshm server raises
:class:`~kvshm.client.connections.CacheServerError` with the server's reason; LMCache sends no reply then, and the
deadline ends the wait.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvshm import wire
from kvshm._version import __version__
from kvshm.client.connections import CacheServerError, Connections, Reply
from kvshm.client.replies import copied, count, decoded, fields, optional_count, optional_integer, text
from kvshm.integers import Ints
from kvshm.layout import EngineGroupInfo
from kvshm.prefix import token_array
from kvshm.protocol import OPERATIONS, PROTOCOL_VERSION, CacheKey, EngineDrivenSpec, encode_block_ids, encode_key

__all__ = ["FRAMES", "KvshmServer", "LMCacheServer", "PlainOperations", "ServerInfo", "probe"]

FRAMES = {
    operation.name: wire.pack(operation.name if operation.id is None else operation.id) for operation in OPERATIONS
}
_DEFAULT_EVENT = b"kvshm"

Key = CacheKey | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class KvshmServer:
    """What a kvshm server says of itself."""

    chunk_size: int  # tokens
    epoch: str  # another one: another process, which knows no engine
    version: str
    clock_offset_ns: int  # its monotonic clock minus ours, at most too low
    null_block_id: int | None  # what it takes for no data, unless an engine says otherwise
    liveness_name: str  # a segment that is in use as long as its process lives


@dataclass(frozen=True, slots=True)
class LMCacheServer:
    """What is known of a real LMCache server."""

    chunk_size: int  # tokens


ServerInfo = KvshmServer | LMCacheServer


def probe(connections: Connections, timeout_s: float) -> ServerInfo:
    """Ask a server who it is.

    LMCache drops an operation that it does not know without a reply. So the question is followed by one that every
    server answers, in order: if that answer comes alone, it is LMCache. Nothing waits for silence.

    Raises:
        ServerTimeoutError, ServerUnreachableError, CacheServerError: As their text says.
    """
    deadline = time.monotonic() + timeout_s
    connection = connections.take()
    try:
        hello = connection.send(FRAMES["kvshm_hello"], [wire.pack(__version__)], deadline)
        size = connection.send(FRAMES["get_chunk_size"], [], deadline)
        first = connection.receive_any((hello, size), deadline, "kvshm_hello")
        if first[0] == size:
            info: ServerInfo = LMCacheServer(decoded("get_chunk_size", count, first[1].result))
        else:
            now_ns = time.monotonic_ns()
            connection.receive(size, deadline, "get_chunk_size")
            info = decoded("kvshm_hello", lambda hello: _read_hello(hello, now_ns), _result(first[1]))
    except BaseException:
        connections.discard(connection)
        raise
    connections.give(connection)
    return info


def _result(reply: Reply) -> Any:
    if reply.reason is not None:
        raise CacheServerError(f"kvshm_hello: {reply.reason}")
    return reply.result


def _read_hello(hello: Any, now_ns: int) -> KvshmServer:
    if not isinstance(hello, dict) or hello.get("protocol") != PROTOCOL_VERSION:
        theirs = hello.get("protocol") if isinstance(hello, dict) else None
        version = hello.get("version") if isinstance(hello, dict) else None
        raise CacheServerError(
            f"the server is kvshm {version} and speaks protocol {theirs}; this client is kvshm {__version__} and "
            f"speaks protocol {PROTOCOL_VERSION}: install one version on both sides"
        )
    return KvshmServer(
        chunk_size=count(hello["chunk_size"]),
        epoch=text(hello["epoch"]),
        version=text(hello["version"]),
        # It read its clock before now, so this errs to the early side: a deadline comes rather too soon.
        clock_offset_ns=count(hello["clock_ns"]) - now_ns,
        null_block_id=optional_integer(hello["null_block_id"]),
        liveness_name=text(hello["liveness"]),
    )


class PlainOperations:
    """One method per operation of the protocol, by its name there. All raise as :meth:`request` does."""

    _connections: Connections

    def request(self, operation: str, *payload: Any, timeout_s: float | None = None) -> Any:
        """Send one request and return the reply's result (None where there is none).

        Raises:
            CacheServerError: The server says that it failed, and why.
            ServerTimeoutError, ServerUnreachableError: There was no reply.
        """
        frames = [wire.pack(value) for value in payload]
        reply = self._connections.exchange(FRAMES[operation], frames, timeout_s, operation)
        if reply.reason is not None:
            raise CacheServerError(f"{operation}: {reply.reason}")
        return reply.result

    def register_kv_cache(
        self,
        instance_id: int,
        kv_caches: Any,
        model_name: str,
        world_size: int,
        engine_type: str,
        layout_hints: Mapping[str, Any] | None = None,
        engine_group_infos: Sequence[EngineGroupInfo] = (),
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Let the server map the caches that these :class:`~kvshm.ShmArrayWrapper` describe."""
        self.request(
            "register_kv_cache",
            instance_id,
            kv_caches,
            model_name,
            world_size,
            engine_type,
            dict(layout_hints or {}),
            [asdict(info) for info in engine_group_infos],
            timeout_s=timeout_s,
        )

    def unregister_kv_cache(self, instance_id: int, *, timeout_s: float | None = None) -> None:
        """Unregister an engine; returns once its memory is unmapped."""
        self.request("unregister_kv_cache", instance_id, timeout_s=timeout_s)

    def store(
        self,
        key: Key,
        instance_id: int,
        block_ids: Sequence[Ints],
        event_handle: bytes = _DEFAULT_EVENT,
        *,
        timeout_s: float | None = None,
    ) -> tuple[bytes, bool]:
        """Let the server gather chunks."""
        ids = encode_block_ids(block_ids, as_bytes=False)
        result = self.request("store", _key(key), instance_id, ids, event_handle, timeout_s=timeout_s)
        return decoded("store", copied, result)

    def retrieve(
        self,
        key: Key,
        instance_id: int,
        block_ids: Sequence[Ints],
        event_handle: bytes = _DEFAULT_EVENT,
        skip_first_n_tokens: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> tuple[bytes, bool]:
        """Let the server scatter chunks."""
        ids = encode_block_ids(block_ids, as_bytes=False)
        result = self.request(
            "retrieve", _key(key), instance_id, ids, event_handle, skip_first_n_tokens, timeout_s=timeout_s
        )
        return decoded("retrieve", copied, result)

    def lookup(self, key: Key, tp_size: int = 1, *, timeout_s: float | None = None) -> None:
        """Start a lookup; :meth:`query_prefetch_status` returns its result."""
        self.request("lookup", _key(key), tp_size, timeout_s=timeout_s)

    def query_prefetch_status(self, request_id: str, *, timeout_s: float | None = None) -> int | None:
        """Chunks found, handed out once; None while the lookup runs; 0 for an unknown id."""
        result = self.request("query_prefetch_status", request_id, timeout_s=timeout_s)
        return decoded("query_prefetch_status", optional_count, result)

    def wait_prefetch_status(self, request_id: str, timeout: float, *, timeout_s: float | None = None) -> int | None:
        """The same, waiting on the server for up to ``timeout`` seconds."""
        result = self.request("wait_prefetch_status", request_id, float(timeout), timeout_s=timeout_s)
        return decoded("wait_prefetch_status", optional_count, result)

    def free_lookup_locks(self, key: Key, tp_size: int = 1, *, timeout_s: float | None = None) -> None:
        """Unpin what is left of a lookup."""
        self.request("free_lookup_locks", _key(key), tp_size, timeout_s=timeout_s)

    def end_session(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """Say that a request is over."""
        self.request("end_session", request_id, timeout_s=timeout_s)

    def register_kv_cache_engine_driven_context(
        self, spec: EngineDrivenSpec | Mapping[str, Any], *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Register an engine that copies by itself; returns ``shm_name`` and ``pool_size`` of the server's pool."""
        spec_fields = asdict(spec) if isinstance(spec, EngineDrivenSpec) else dict(spec)
        result = self.request("register_kv_cache_engine_driven_context", spec_fields, timeout_s=timeout_s)
        return decoded("register_kv_cache_engine_driven_context", fields, result)

    def unregister_kv_cache_engine_driven_context(self, instance_id: int, *, timeout_s: float | None = None) -> None:
        """Drop an engine that copies by itself."""
        self.request("unregister_kv_cache_engine_driven_context", instance_id, timeout_s=timeout_s)

    def prepare_store(self, key: Key, instance_id: int, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Borrow slots to write into."""
        return decoded(
            "prepare_store", fields, self.request("prepare_store", _key(key), instance_id, timeout_s=timeout_s)
        )

    def commit_store(self, key: Key, instance_id: int, data: bytes = b"", *, timeout_s: float | None = None) -> bool:
        """Publish what was written."""
        return bool(self.request("commit_store", _key(key), instance_id, data, timeout_s=timeout_s))

    def prepare_retrieve(self, key: Key, instance_id: int, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Borrow slots to read from."""
        result = self.request("prepare_retrieve", _key(key), instance_id, timeout_s=timeout_s)
        return decoded("prepare_retrieve", fields, result)

    def commit_retrieve(self, key: Key, instance_id: int, *, timeout_s: float | None = None) -> bool:
        """Acknowledge that the slots have been read."""
        return bool(self.request("commit_retrieve", _key(key), instance_id, timeout_s=timeout_s))

    def clear(self, force: bool = False, *, timeout_s: float | None = None) -> None:
        """Forget what is cached: what is not pinned, or (``force``) all."""
        self.request("clear", force, timeout_s=timeout_s)

    def get_chunk_size(self, *, timeout_s: float | None = None) -> int:
        """Tokens of a chunk."""
        return decoded("get_chunk_size", count, self.request("get_chunk_size", timeout_s=timeout_s))

    def ping(self, instance_id: int | None = None, *, timeout_s: float | None = None) -> bool:
        """Renew an engine's lease."""
        return bool(self.request("ping", instance_id, timeout_s=timeout_s))

    def report_block_allocation(
        self, instance_id: int, model_name: str, records: Sequence[Mapping[str, Any]], *, timeout_s: float | None = None
    ) -> None:
        """Report which blocks requests were given; kvshm's server ignores it."""
        self.request(
            "report_block_allocation",
            instance_id,
            model_name,
            [dict(record) for record in records],
            timeout_s=timeout_s,
        )

    def noop(self, *, timeout_s: float | None = None) -> str:
        """A round trip: ``"OK"``."""
        return str(self.request("noop", timeout_s=timeout_s))

    def get_experimental(self, *, timeout_s: float | None = None) -> list[str]:
        """Capabilities of the server."""
        return decoded("get_experimental", list, self.request("get_experimental", timeout_s=timeout_s))

    def status(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """How a kvshm server is; a real LMCache server does not answer this."""
        return decoded("kvshm_status", fields, self.request("kvshm_status", timeout_s=timeout_s))


def _key(key: Key) -> dict[str, Any]:
    if isinstance(key, CacheKey):
        return encode_key(key, as_bytes=False)
    given = dict(key)
    if not isinstance(given.get("token_ids"), bytes):
        given["token_ids"] = token_array(given["token_ids"]).tolist()
    return given
