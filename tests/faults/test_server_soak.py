"""Engines and a server under load, with engines and servers killed: no wrong byte, no leak.

KVSHM_SOAK_S sets how long the load lasts (6 seconds), KVSHM_SOAK_RESTARTS how often the server is killed (4).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest

import kvshm
from kvshm.client.cache_client import CacheClient
from tests.support import soak_engine
from tests.support.processes import ROOT, environment
from tests.support.serving import ServeProcess

pytestmark = pytest.mark.slow

SOAK_S = float(os.environ.get("KVSHM_SOAK_S", "6"))
NUM_RESTARTS = int(os.environ.get("KVSHM_SOAK_RESTARTS", "4"))
MODES = ("lmcache_driven", "engine_driven")
# A third of what the engines' prompts take together.
CAPACITY = soak_engine.NUM_PROMPTS * soak_engine.MAX_CHUNKS * soak_engine.CHUNK_NBYTES // 3


class EngineProcess:
    def __init__(self, url: str, mode: str, seed: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.support.soak_engine", url, mode, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(),
        )
        self.mode = mode
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", self.process.communicate()[1]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def stop(self) -> Counter[str]:
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err
        return Counter(json.loads(out))


@contextlib.contextmanager
def killed_at_last(engines: list[EngineProcess]) -> Iterator[None]:
    try:
        yield
    finally:
        for engine in engines:
            if engine.process.returncode is None:
                engine.kill()


def serve(endpoint: str = "tcp://127.0.0.1:0") -> ServeProcess:
    return ServeProcess(
        *("--capacity", str(CAPACITY), "--chunk-size", str(soak_engine.CHUNK)),
        *("--reap-after", "1.5", "--grace", "3", "--pin-ttl", "1"),
        endpoint=endpoint,
    )


def wait_until_quiet(client: CacheClient) -> dict[str, object]:
    """Until nothing is held or lent any more: what dead engines left has a time limit."""
    deadline = time.monotonic() + 30
    while True:
        status = client.status()
        busy = (status["objects"]["pinned"], status["objects"]["unfinished"], status["jobs"], len(status["instances"]))
        if not any(busy):
            return status
        assert time.monotonic() < deadline, status
        time.sleep(0.05)


@pytest.mark.timeout(SOAK_S * 3 + 120)
def test_engines_are_killed_under_load() -> None:
    seeds = itertools.count()
    rng = random.Random(7)
    total: Counter[str] = Counter()
    with serve() as server, CacheClient(server.url) as client:
        engines = [EngineProcess(server.url, mode, next(seeds)) for mode in MODES for _ in range(2)]
        with killed_at_last(engines):
            end = time.monotonic() + SOAK_S
            while time.monotonic() < end:
                time.sleep(1.0)  # the load is the test
                victim = rng.randrange(len(engines))
                engines[victim].kill()
                engines[victim] = EngineProcess(server.url, engines[victim].mode, next(seeds))
            for engine in engines:
                total += engine.stop()
        status = wait_until_quiet(client)
        assert total["wrong"] == 0, total
        assert min(total["hits"], total["retrieves"], total["stores"]) > 20, total
        objects, pool = status["objects"], status["pool"]
        assert isinstance(objects, dict)
        assert isinstance(pool, dict)
        assert objects["evicted"] > 0
        assert pool["busy_nbytes"] == 0
        client.clear()
        assert client.status()["pool"]["used_nbytes"] == 0
        assert server.segments() == [f"/dev/shm{pool['name']}"], "mappings of dead engines are left"
        complaints = server.stop().splitlines()
        assert all("has ended" in line or "has been silent" in line for line in complaints), complaints
    kvshm.sweep()


@pytest.mark.timeout(NUM_RESTARTS * 20 + 60)
def test_the_server_is_killed_under_load() -> None:
    total: Counter[str] = Counter()
    server = serve()
    try:
        engines = [EngineProcess(server.url, mode, seed) for seed, mode in enumerate(MODES)]
        with killed_at_last(engines):
            for _ in range(NUM_RESTARTS):
                wait_for_hits(server.url, engines)
                server.kill()
                server = serve(server.url)
            wait_for_hits(server.url, engines)
            for engine in engines:
                total += engine.stop()
        assert total["wrong"] == 0, total
        with CacheClient(server.url) as client:
            wait_until_quiet(client)
        complaints = server.stop().splitlines()
        assert all("has ended" in line or "has been silent" in line for line in complaints), complaints
    finally:
        if server.process.returncode is None:
            server.kill()
    kvshm.sweep()


def wait_for_hits(url: str, engines: list[EngineProcess]) -> None:
    """Until both engines have found what they stored on this server."""
    deadline = time.monotonic() + 20
    with CacheClient(url) as client:
        while True:
            status = client.status()
            if status["counters"]["hit_tokens"] > 20 * soak_engine.CHUNK and len(status["instances"]) == len(MODES):
                return
            dead = [engine.stop() for engine in engines if engine.process.poll() is not None]
            assert not dead
            if time.monotonic() > deadline:
                pytest.fail(json.dumps(status))
            time.sleep(0.02)
