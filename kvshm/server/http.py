"""The server's HTTP side: status, Prometheus metrics, and checksums of an engine's blocks.

Runs in a thread of its own with its own event loop; it reads
state in the server's loop and computes in its worker threads. ``POST /cache/checksums`` is what LMCache's bench client
asks for.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from kvshm.cache import MappedCache
from kvshm.server.registrations import Registrations, ServerDriven

__all__ = ["HttpFrontend", "block_checksums", "block_id_ranges", "metrics_text"]

_START_TIMEOUT_S = 10.0
_CALL_TIMEOUT_S = 30.0
_HOST = "127.0.0.1"


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
    """Serves HTTP on ``127.0.0.1:port`` (0: any free port)."""

    def __init__(self, server: Server, port: int) -> None:
        self._server = server
        self._port = port
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvshm-http", daemon=True)
        self._loop = asyncio.new_event_loop()

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://{_HOST}:{self._port}"

    def start(self) -> None:
        """Serve.

        Raises:
            OSError: The port is taken.
            TimeoutError: It does not begin to serve.
        """
        self._thread.start()
        if not self._ready.wait(_START_TIMEOUT_S):
            raise TimeoutError(f"HTTP did not begin to serve on {self.url} within {_START_TIMEOUT_S} s")
        if self._error is not None:
            self._thread.join()
            raise self._error

    def close(self) -> None:
        """Stop; idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = None
        try:
            runner = web.AppRunner(self._application(), access_log=None)
            self._loop.run_until_complete(runner.setup())
            site = web.TCPSite(runner, _HOST, self._port)
            self._loop.run_until_complete(site.start())
            self._port = runner.addresses[0][1]
        except BaseException as error:  # raised by start()
            self._error = error
        else:
            self._ready.set()
            self._loop.run_forever()
        finally:
            if runner is not None:
                self._loop.run_until_complete(runner.cleanup())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()
            self._ready.set()

    def _application(self) -> web.Application:
        application = web.Application()
        application.router.add_get("/healthcheck", self._healthcheck)
        application.router.add_get("/status", self._status)
        application.router.add_get("/metrics", self._metrics)
        application.router.add_post("/cache/checksums", self._checksums)
        return application

    async def _in_loop(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, self._server.call, function)

    async def _healthcheck(self, request: web.Request) -> web.Response:
        await self._in_loop(lambda: None)
        return web.json_response({"status": "healthy"})

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(await self._in_loop(self._server.status))

    async def _metrics(self, request: web.Request) -> web.Response:
        text = metrics_text(await self._in_loop(self._server.status))
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _checksums(self, request: web.Request) -> web.Response:
        try:
            instance_id, block_ids, chunk_size, layerwise = _read_checksum_request(await request.json())
        except ValueError as error:
            return _refusal(422, f"{error}")
        if not block_ids:
            return _refusal(400, "block_ids is required")
        if chunk_size < 1:
            return _refusal(400, "chunk_size must be positive")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def tell(result: Any, reason: str | None) -> None:
            def set_result() -> None:
                if not answer.done():
                    answer.set_result(result if reason is None else _refusal(500, reason))

            self._loop.call_soon_threadsafe(set_result)

        def begin() -> web.Response | None:
            registration = next(
                (known for known in self._server.registrations if known.instance_id == instance_id), None
            )
            if registration is None or not isinstance(registration.way, ServerDriven):
                return _refusal(404, f"instance_id {instance_id} not registered")
            cache = registration.way.cache
            registration.begin_copy()

            def done(result: Any, reason: str | None) -> None:
                registration.end_copy()
                tell(result, reason)

            self._server.submit(lambda: _checksum_answer(cache, block_ids, chunk_size, layerwise), done)
            return None

        refused: web.Response | None = await self._in_loop(begin)
        if refused is not None:
            return refused
        response: web.Response = await asyncio.wait_for(answer, _CALL_TIMEOUT_S)
        return response


def _refusal(code: int, detail: str) -> web.Response:
    return web.json_response({"detail": detail}, status=code)


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


def _checksum_answer(cache: MappedCache, block_ids: list[int], chunk_size: int, layerwise: bool) -> web.Response:
    """In a worker thread."""
    axes = []
    for layer, format in enumerate(cache.format_per_layer()):
        # A list of layers with an axis of blocks.
        if format is None or format.lists != ("NL",) or "NB" not in format.axes:
            name = "a layer in no group" if format is None else f"KV format {format.name}"
            return _refusal(501, f"checksum not supported for {name} (layer {layer})")
        axes.append(format.axes.index("NB"))
    layers = cache.arrays
    assert isinstance(layers, list)  # these formats are lists of layers
    if any(not 0 <= block < layer.shape[axis] for layer, axis in zip(layers, axes, strict=True) for block in block_ids):
        return _refusal(400, "block_ids are out of range")
    checksums = block_checksums(layers, axes, block_ids, chunk_size, layerwise)
    return web.json_response(
        {
            "status": "success",
            "chunk_size": chunk_size,
            "num_chunks": -(-len(block_ids) // chunk_size),
            "chunk_checksums": checksums,
            "layerwise": layerwise,
            "block_id_ranges": block_id_ranges(block_ids),
        }
    )


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
