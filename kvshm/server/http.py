"""The server's HTTP side: status, Prometheus metrics, and checksums of an engine's blocks.

Each request has a thread, which reads state in the server's loop and computes in its worker threads.
``POST /cache/checksums`` is what LMCache's bench client asks for.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvshm.cache import MappedCache
from kvshm.server.registrations import Registrations, ServerDriven

__all__ = ["HttpFrontend", "block_checksums", "block_id_ranges", "metrics_text"]

_CALL_TIMEOUT_S = 30.0
_HOST = "127.0.0.1"
_MAX_BODY_NBYTES = 16 << 20

_logger = logging.getLogger("kvshm")


class Server(Protocol):
    """What the HTTP side needs of the cache server."""

    def call(self, function: Callable[[], Any], timeout_s: float = ...) -> Any:
        """Run something in the loop."""

    def status(self) -> dict[str, Any]:
        """The status, in the loop."""

    @property
    def registrations(self) -> Registrations:
        """The engines, in the loop."""

    def submit(self, work: Callable[[], Any], done: Callable[[Any, str | None], None]) -> None:
        """Run work in a worker thread, from the loop."""


class HttpFrontend:
    """Serves HTTP on ``127.0.0.1:port`` (0: any free port).

    Raises:
        OSError: The port is taken.
    """

    def __init__(self, server: Server, port: int) -> None:
        self._http = _Listener((_HOST, port), partial(_Handler, server))
        self._thread = threading.Thread(target=self._http.serve_forever, name="kvshm-http", daemon=True)

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://{_HOST}:{self._http.server_address[1]}"

    def start(self) -> None:
        """Serve."""
        self._thread.start()

    def close(self) -> None:
        """Stop; idempotent."""
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
        self._http.server_close()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer went away in the middle of a request or an answer."""
        _logger.info("kvshm server: an HTTP connection broke: %s", sys.exc_info()[1])


class _Refused(Exception):
    """A request that cannot be served."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = _CALL_TIMEOUT_S  # for a peer that sends or reads nothing
    wbufsize = -1  # head and body in one piece

    def __init__(self, server: Server, *arguments: Any) -> None:
        self._server = server
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Serve one of the pages."""
        self._answer({"/healthcheck": self._healthcheck, "/status": self._status, "/metrics": self._metrics})

    def do_POST(self) -> None:
        """Serve checksums."""
        self._answer({"/cache/checksums": self._checksums})

    def _answer(self, routes: Mapping[str, Callable[[], Any]]) -> None:
        code, kind = 200, "application/json"
        try:
            route = routes.get(self.path.partition("?")[0])
            if route is None:
                raise _Refused(404, f"there is no {self.command} {self.path}")
            result = route()
        except _Refused as error:
            code, result = error.code, {"detail": str(error)}
        except Exception as error:  # always an answer
            _logger.exception("kvshm server: %s %s failed", self.command, self.path)
            code, result = 500, {"detail": repr(error)}
        if isinstance(result, str):
            kind = "text/plain; version=0.0.4; charset=utf-8"
        body = (result if isinstance(result, str) else json.dumps(result)).encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if code != 200:  # the request's body may not have been read
            self.close_connection = True
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are not logged."""

    def _healthcheck(self) -> Any:
        self._server.call(lambda: None)
        return {"status": "healthy"}

    def _status(self) -> Any:
        return self._server.call(self._server.status)

    def _metrics(self) -> str:
        return metrics_text(self._server.call(self._server.status))

    def _checksums(self) -> Any:
        try:
            nbytes = int(self.headers.get("Content-Length", ""))
            if not 0 <= nbytes <= _MAX_BODY_NBYTES:
                raise ValueError(f"a body of {nbytes} bytes; at most {_MAX_BODY_NBYTES} are read")
            instance_id, block_ids, chunk_size, layerwise = _read_checksum_request(json.loads(self.rfile.read(nbytes)))
        except ValueError as error:
            raise _Refused(422, str(error)) from None
        if not block_ids:
            raise _Refused(400, "block_ids is required")
        if chunk_size < 1:
            raise _Refused(400, "chunk_size must be positive")
        answer: Future[Any] = Future()

        def begin() -> None:
            known = {each.instance_id: each for each in self._server.registrations}
            registration = known.get(instance_id)
            if registration is None or not isinstance(registration.way, ServerDriven):
                raise _Refused(404, f"instance_id {instance_id} not registered")
            cache = registration.way.cache
            registration.begin_copy()

            def work() -> Any:
                try:
                    return _checksum_answer(cache, block_ids, chunk_size, layerwise)
                except _Refused as error:
                    return error

            def done(result: Any, reason: str | None) -> None:
                registration.end_copy()
                failure = result if reason is None else _Refused(500, reason)
                if isinstance(failure, _Refused):
                    answer.set_exception(failure)
                else:
                    answer.set_result(result)

            self._server.submit(work, done)

        self._server.call(begin)
        return answer.result(_CALL_TIMEOUT_S)


def _read_checksum_request(body: Any) -> tuple[int, list[int], int, bool]:
    if not isinstance(body, dict):
        raise ValueError(f"the body must be an object, not {type(body).__name__}")
    instance_id, block_ids = body.get("instance_id"), body.get("block_ids")
    chunk_size, layerwise = body.get("chunk_size", 1), body.get("layerwise", False)
    if type(instance_id) is not int or type(chunk_size) is not int or type(layerwise) is not bool:
        raise ValueError("instance_id and chunk_size must be integers and layerwise a boolean")
    if not isinstance(block_ids, list) or any(type(block) is not int for block in block_ids):
        raise ValueError("block_ids must be a list of integers")
    return instance_id, block_ids, chunk_size, layerwise


def _checksum_answer(cache: MappedCache, block_ids: list[int], chunk_size: int, layerwise: bool) -> Any:
    """In a worker thread."""
    axes = []
    for layer, format in enumerate(cache.format_per_layer()):
        # A list of layers with an axis of blocks.
        if format is None or format.lists != ("NL",) or "NB" not in format.axes:
            name = "a layer in no group" if format is None else f"KV format {format.name}"
            raise _Refused(501, f"checksum not supported for {name} (layer {layer})")
        axes.append(format.axes.index("NB"))
    layers = cache.arrays
    assert isinstance(layers, list)  # these formats are lists of layers
    if any(not 0 <= block < layer.shape[axis] for layer, axis in zip(layers, axes, strict=True) for block in block_ids):
        raise _Refused(400, "block_ids are out of range")
    checksums = block_checksums(layers, axes, block_ids, chunk_size, layerwise)
    return {
        "status": "success",
        "chunk_size": chunk_size,
        "num_chunks": -(-len(block_ids) // chunk_size),
        "chunk_checksums": checksums,
        "layerwise": layerwise,
        "block_id_ranges": block_id_ranges(block_ids),
    }


def block_checksums(
    layers: Sequence[NDArray[Any]],
    axes: Sequence[int],
    block_ids: Sequence[int],
    chunk_size: int,
    layerwise: bool,
) -> list[str] | dict[str, list[str]]:
    """MD5 over blocks, ``chunk_size`` of them at a time; bfloat16 counts as float32, as LMCache has it.

    Args:
        axes: Per layer, the axis of its array that counts blocks.
        layerwise: One list per layer; else one over all layers.
    """
    chunks = [block_ids[start : start + chunk_size] for start in range(0, len(block_ids), chunk_size)]

    def blocks(layer: int, ids: Sequence[int]) -> bytes:
        taken = np.take(_raw(layers[layer]), np.asarray(ids), axis=axes[layer])
        if layers[layer].dtype == ml_dtypes.bfloat16:
            taken = taken.view(ml_dtypes.bfloat16).astype(np.float32)
        return bytes(taken.tobytes())

    def digest(parts: Iterator[bytes]) -> str:
        md5 = hashlib.md5(usedforsecurity=False)
        for part in parts:
            md5.update(part)
        return md5.hexdigest()

    if layerwise:
        return {
            f"layer_{layer}": [digest(iter([blocks(layer, ids)])) for ids in chunks] for layer in range(len(layers))
        }
    return [digest(blocks(layer, ids) for layer in range(len(layers))) for ids in chunks]


def _raw(array: NDArray[Any]) -> NDArray[Any]:
    """The same elements as unsigned integers, which NumPy takes without a detour."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}")) if array.dtype.itemsize in (1, 2, 4, 8) else array


def block_id_ranges(block_ids: Sequence[int]) -> list[list[int]]:
    """Runs of rising ids as [first, last].

    >>> block_id_ranges([3, 4, 5, 9])
    [[3, 5], [9, 9]]
    """
    ranges: list[list[int]] = []
    for block in block_ids:
        if ranges and block == ranges[-1][1] + 1:
            ranges[-1][1] = block
        else:
            ranges.append([block, block])
    return ranges


def metrics_text(status: Mapping[str, Any]) -> str:
    """A status in Prometheus's text format."""
    pool, objects, lookups = status["pool"], status["objects"], status["lookups"]
    gauges = {
        "uptime_seconds": status["uptime_s"],
        "pool_bytes": pool["nbytes"],
        "pool_reserved_bytes": pool["reserved_nbytes"],
        "pool_used_bytes": pool["used_nbytes"],
        "pool_busy_bytes": pool["busy_nbytes"],
        "objects_cached": objects["cached"],
        "objects_pinned": objects["pinned"],
        "objects_unfinished": objects["unfinished"],
        "lookups_open": lookups["open"],
        "pins": lookups["pins"],
        "jobs_running": status["jobs"],
        "instances": len(status["instances"]),
    }
    counters = {
        **{
            f"objects_{name}_total": objects[name] for name in ("stored", "duplicates", "evicted", "refused", "aborted")
        },
        **{f"{name}_total": value for name, value in status["counters"].items()},
        **{f"messages_{name}_total": value for name, value in status["messages"].items()},
    }
    lines = []
    for kind, values in (("gauge", gauges), ("counter", counters)):
        for name, value in values.items():
            lines.append(f"# TYPE kvshm_{name} {kind}")
            lines.append(f"kvshm_{name} {value}")
    return "\n".join(lines) + "\n"
