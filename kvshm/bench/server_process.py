"""Measures a cache server from outside: a server in a process of its own, and this process as its engine.

Every rate is told as a ratio to the same work done barely (a memory copy, a ZeroMQ round trip), measured in turns with
it, and as a median: absolute numbers say more about the machine and its other users.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from kvshm import wire
from kvshm.arrays import empty_many
from kvshm.bench.results import Amount
from kvshm.client.cache_client import CacheClient

__all__ = ["Geometry", "measure"]

_ECHO = """
import zmq
with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
    sock.bind("tcp://127.0.0.1:0")
    print(sock.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
    while True:
        frames = sock.recv_multipart()
        if len(frames) == 2:
            break
        sock.send_multipart(frames)
"""


@dataclass(frozen=True, slots=True)
class Geometry:
    """A vLLM-like cache: layers of [2, blocks, 16, heads, head size] in bfloat16."""

    num_layers: int = 32
    num_blocks: int = 512
    num_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    chunk_size: int = 256

    @property
    def nbytes_per_token(self) -> int:
        """Bytes of all layers."""
        return self.num_layers * 2 * self.num_heads * self.head_size * 2

    @property
    def num_tokens(self) -> int:
        """Tokens that the cache holds."""
        return self.num_blocks * self.block_size


def measure(
    geometry: Geometry | None = None, *, rounds: int = 15, token_counts: Sequence[int] = (256, 1024, 4096)
) -> list[Amount]:
    """Run all measurements; takes about half a minute and three times the geometry's bytes."""
    geometry = geometry or Geometry()
    cache_nbytes = geometry.num_tokens * geometry.nbytes_per_token
    results = [_start_time()]
    with _server(2 * cache_nbytes, geometry.chunk_size) as (url, pid), CacheClient(url, timeout_s=60.0) as client:
        results += _round_trips(url, client)
        _wait_until_reserved(client)
        shape = (2, geometry.num_blocks, geometry.block_size, geometry.num_heads, geometry.head_size)
        arrays = empty_many([shape] * geometry.num_layers, ["bfloat16"] * geometry.num_layers)
        for array in arrays:
            array.view(np.uint16)[...] = 1  # touches every page
        with client.register(arrays, "bench", layout_hints={"kv_layout": "NHD"}, null_block_id=None) as engine:
            for num_tokens in token_counts:
                if num_tokens <= geometry.num_tokens:
                    results += _copies(engine, geometry, num_tokens, rounds)
            results.append(_lookup(engine, geometry))
            results.append(_pings(url, engine, geometry))
        results.append(Amount("server: memory beside the pool", _private_mib(pid), "MiB"))
    return results


# Parts


def _copies(engine: Any, geometry: Geometry, num_tokens: int, rounds: int) -> Iterator[Amount]:
    nbytes = num_tokens * geometry.nbytes_per_token
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    rng = np.random.default_rng(1)
    num_blocks = num_tokens // geometry.block_size
    serial = iter(range(1 << 40))
    times: dict[str, list[float]] = {"copy": [], "store": [], "retrieve": []}
    for _ in range(rounds + 2):
        tokens = np.full(num_tokens, num_tokens * 1000, np.int64)
        tokens[0] = next(serial)
        blocks = rng.permutation(geometry.num_blocks)[:num_blocks]
        times["copy"].append(_seconds(lambda: np.copyto(target, source)))
        times["store"].append(_seconds(lambda: _expect(engine.store(tokens, blocks), num_tokens)))  # noqa: B023
        engine.lookup(tokens)
        times["retrieve"].append(_seconds(lambda: _expect(engine.retrieve(tokens, blocks), num_tokens)))  # noqa: B023
    for name in ("store", "retrieve"):
        ratios = [copy / took for copy, took in zip(times["copy"][2:], times[name][2:], strict=True)]
        yield Amount(f"server: {name} {num_tokens} tokens", statistics.median(ratios), "of one-thread memcpy")
        rate = nbytes / statistics.median(times[name][2:]) / 1e9
        yield Amount(f"server: {name} {num_tokens} tokens, rate", rate, "GB/s")


def _round_trips(url: str, client: CacheClient, rounds: int = 15, calls: int = 400) -> Iterator[Amount]:
    with subprocess.Popen([sys.executable, "-c", _ECHO], stdout=subprocess.PIPE, text=True) as echo:
        assert echo.stdout is not None
        with zmq.Context() as context, context.socket(zmq.DEALER) as bare:
            bare.connect(echo.stdout.readline().strip())

            def bare_round_trips() -> None:
                for _ in range(calls):
                    bare.send_multipart([b"\x01", b"\x18"])
                    bare.recv_multipart()

            def noops() -> None:
                for _ in range(calls):
                    client.noop()

            bare_round_trips()
            noops()
            pairs = [(_seconds(bare_round_trips), _seconds(noops)) for _ in range(rounds)]
            bare.send(b"end")
    ratio = statistics.median(ours / theirs for theirs, ours in pairs)
    yield Amount("server: noop, one after the other", ratio, "times a bare ZeroMQ round trip")
    latency = statistics.median(ours for _, ours in pairs) / calls
    yield Amount("server: noop, one after the other, latency", latency * 1e6, "us")
    yield Amount("server: noop, 64 in flight", statistics.median(_in_flight(url) for _ in range(5)), "per second")


def _in_flight(url: str, window: int = 64, total: int = 20_000) -> float:
    """Requests per second with ``window`` of them under way."""
    request = [b"\x01", wire.pack(24)]
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.connect(url)
        sock.send_multipart(request)
        sock.recv_multipart()
        started = time.perf_counter()
        for _ in range(window):
            sock.send_multipart(request)
        for sent in range(window, total + window):
            sock.recv_multipart()
            if sent < total:
                sock.send_multipart(request)
        return total / (time.perf_counter() - started)


def _lookup(engine: Any, geometry: Geometry, rounds: int = 50) -> Amount:
    """From asking until the chunks are locked for the retrieve."""
    num_tokens = min(8192, geometry.num_tokens)
    tokens = list(range(num_tokens))
    _expect(engine.store(tokens, list(range(geometry.num_blocks))), num_tokens)
    times = [_seconds(lambda: _expect(engine.lookup(tokens), num_tokens)) for _ in range(rounds)]
    return Amount(f"server: lookup of {num_tokens} tokens, all cached", statistics.median(times) * 1e3, "ms")


def _pings(url: str, engine: Any, geometry: Geometry, rounds: int = 6) -> Amount:
    """How long pings wait while the whole cache is stored again and again; the 99th percentile."""
    stop = threading.Event()
    waits: list[float] = []

    def ping() -> None:
        with CacheClient(url) as client:
            while not stop.is_set():
                waits.append(_seconds(client.ping))
                time.sleep(0.001)

    thread = threading.Thread(target=ping)
    thread.start()
    for number in range(rounds):
        tokens = np.full(geometry.num_tokens, 5, np.int64)
        tokens[0] = -1 - number
        engine.store(tokens, np.arange(geometry.num_blocks))
    stop.set()
    thread.join()
    return Amount(
        f"server: ping while {geometry.num_tokens * geometry.nbytes_per_token / 2**30:.2f} GiB are copied, 99 %",
        float(np.percentile(waits, 99)) * 1e3,
        "ms",
    )


def _start_time(rounds: int = 5) -> Amount:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        with _server(1 << 30, 256) as (url, _), CacheClient(url) as client:
            client.noop()
            times.append(time.perf_counter() - started)
    return Amount("server: start until ready", statistics.median(times), "s")


# Helpers


@contextmanager
def _server(capacity: int, chunk_size: int) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "kvshm", "serve", "--json", "--port", "0"]
    command += ["--capacity", str(capacity), "--chunk-size", str(chunk_size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("kvshm serve did not start; see its message above")
        try:
            yield json.loads(line)["endpoint"], process.pid
        finally:
            process.terminate()


def _wait_until_reserved(client: CacheClient) -> None:
    while (pool := client.status()["pool"])["reserved_nbytes"] < pool["nbytes"] and not pool["error"]:
        time.sleep(0.05)


def _private_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = dict(line.split(":", 1) for line in lines)
    return sum(int(sizes[name].split()[0]) for name in ("RssAnon", "RssFile")) / 1024


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _expect(got: int, wanted: int) -> None:
    if got != wanted:
        raise RuntimeError(f"the server did {got} of {wanted} tokens")
