"""What a killed server or a forked client leaves stands in nobody's way."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvshm import CacheClient, CacheServer, sweep
from kvshm.server.endpoints import bind
from kvshm.store.pool_memory import PoolMemory
from tests.support.memory import exists

SERVER = """
import os, signal, sys
from kvshm import CacheServer
server = CacheServer("tcp://127.0.0.1:0", capacity=2**20, pool_name=sys.argv[1]).start()
print(server.endpoint, flush=True)
sys.stdin.read()
"""


@contextmanager
def server_to_kill(pool_name: str) -> Iterator[str]:
    """A server's endpoint; it is killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, pool_name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def killed_server(pool_name: str) -> None:
    with server_to_kill(pool_name):
        assert exists(f"/{pool_name}")


def test_a_successor_has_the_name_again() -> None:
    name = f"kvshm_restart_{os.getpid()}"
    killed_server(name)
    with CacheServer("tcp://127.0.0.1:0", capacity=2**20, pool_name=name):
        assert exists(f"/{name}")
    assert not exists(f"/{name}")


def test_room_is_looked_at_after_the_dead_have_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"kvshm_restart_{os.getpid()}"
    killed_server(name)
    seen: list[bool] = []
    monkeypatch.setattr("kvshm.store.pool_memory._check_room", lambda nbytes: seen.append(exists(f"/{name}")))
    PoolMemory(4096).close()
    assert seen == [False]


def test_a_pool_whose_remains_could_not_be_told_is_refused() -> None:
    with pytest.raises(ValueError, match="must begin with 'kvshm_'"):
        PoolMemory(4096, "mypool")
    assert not exists("/mypool")


def test_listening_removes_no_file(tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    with pytest.raises(OSError, match="no socket"):
        bind(None, f"ipc://{precious}")  # type: ignore[arg-type]  # refused before the socket is touched
    assert precious.read_text() == "mine"


def test_an_engine_that_leaves_while_the_server_is_away_holds_nothing_of_it() -> None:
    name = f"kvshm_restart_{os.getpid()}"
    layers: list[Any] = [np.ones((2, 7, 16, 2, 6), np.float16)]
    with server_to_kill(name) as endpoint:
        client = CacheClient(endpoint, timeout_s=20, heartbeat_s=60)
        engine = client.register(layers, "model", layout_hints={"kv_layout": "NHD"}, transfer_mode="engine_driven")
        assert engine.store(list(range(256)), [1] * 16) == 256
    assert name in Path("/proc/self/maps").read_text(), "the engine holds the pool of the server that went"
    engine.unregister()
    client.close()
    gc.collect()  # the error of the farewell and its frames are a cycle
    assert name not in Path("/proc/self/maps").read_text()
    sweep()
    assert not exists(f"/{name}")


def test_a_forked_child_is_told_to_make_a_client() -> None:
    code = """
import os, sys
import numpy as np
from kvshm import CacheClient, CacheServer, sweep
with CacheServer("tcp://127.0.0.1:0", capacity=2**20) as server, CacheClient(server.endpoint) as client:
    pid = os.fork()
    if not pid:
        try:
            client.register([np.zeros((2, 7, 16, 2, 6), np.float16)], "m", transfer_mode="engine_driven")
        except RuntimeError as error:
            os._exit(0 if "client here" in str(error) else 3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], timeout=60, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
