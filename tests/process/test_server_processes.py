"""The server as a process of its own: how it ends, what it holds, who may share it, and what a fork does to clients."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvshm
from kvshm.client.cache_client import CacheClient
from kvshm.shm import mappings
from tests.support.cache_server import CHUNK, NHD, blocks_of, layers, running_server, wipe
from tests.support.processes import ROOT, Peer, environment, run_python
from tests.support.serving import ServeProcess

SMALL = ("--capacity", "4MiB", "--chunk-size", str(CHUNK))
TOKENS = list(range(100, 100 + 3 * CHUNK))
BLOCKS = [4, 9, 2, 17, 30, 11]

ENGINE = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from kvshm.client.cache_client import CacheClient
from tests.support.cache_server import layers, NHD, blocks_of, wipe, CHUNK
TOKENS = {TOKENS}
BLOCKS = {BLOCKS}
def register(url, seed=0, **more):
    global client, engine, arrays
    client = CacheClient(url, heartbeat_s=0.1)
    arrays = layers(seed)
    engine = client.register(arrays, "model", layout_hints=NHD, **more)
"""


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(number: int) -> None:
    with ServeProcess(*SMALL) as server, CacheClient(server.url) as client:
        client.register(layers(), "model", layout_hints=NHD)
        pool = client.status()["pool"]["name"]
        assert os.path.exists(f"/dev/shm{pool}")
        assert server.stop(number) == ""
        assert not os.path.exists(f"/dev/shm{pool}")


def test_what_it_prints() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvshm", "serve", "--port", "0", "--capacity", "4MiB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("kvshm serve: 4 MiB at tcp://127.0.0.1:")
    process.send_signal(signal.SIGTERM)
    assert process.communicate() == ("", "")
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--endpoint", "tcp://0.0.0.0:1"), 2, "not a loopback address"),
        (("--capacity", "0"), 2, "capacity is 0 bytes"),
        (("--capacity", "much"), 2, "no amount of bytes"),
        (("--port", "1", "--endpoint", "ipc://x"), 2, "not allowed with argument"),
        (("--allow-remote", "--port", "1"), 2, "--allow-remote needs --endpoint"),
        (("--port", "0", "--capacity", "1000TiB"), 1, "no room in shared memory"),
    ],
)
def test_what_it_refuses(arguments: tuple[str, ...], code: int, text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvshm", "serve", *arguments],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert text in done.stderr


def test_a_taken_port() -> None:
    with ServeProcess(*SMALL) as server:
        done = subprocess.run(
            [sys.executable, "-m", "kvshm", "serve", "--endpoint", server.url, "--capacity", "4MiB"],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=60,
            check=False,
        )
        assert done.returncode == 1
        assert "Address already in use" in done.stderr


def test_status() -> None:
    def status(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kvshm", "status", url, *arguments],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=60,
            check=False,
        )

    with ServeProcess(*SMALL) as server, CacheClient(server.url) as client:
        with client.register(layers(), "model", layout_hints=NHD) as engine:
            engine.store(TOKENS, BLOCKS)
            text = status(server.url)
            assert (text.returncode, text.stderr) == (0, "")
            assert "3 cached" in text.stdout
            assert f"{engine.instance_id}  model  lmcache_driven" in text.stdout
        told = json.loads(status(server.url, "--json").stdout)
        assert told["objects"]["cached"] == 3
        url = server.url
    gone = status(url, "--timeout", "0.2")
    assert (gone.returncode, gone.stdout) == (1, "")
    assert "no cache server answers" in gone.stderr


def test_memory_beside_the_pool_is_small() -> None:
    with ServeProcess("--capacity", "64MiB", "--chunk-size", str(CHUNK)) as server, CacheClient(server.url) as client:
        with client.register(layers(), "model", layout_hints=NHD) as engine:
            for number in range(50):
                engine.store([number] * 3 * CHUNK, BLOCKS)
        assert server.private_nbytes() < 60 << 20


def test_a_killed_engine_leaves_no_mapping() -> None:
    """Killed right after it registered, without a store; the others go on."""
    with ServeProcess(*SMALL, "--reap-after", "0.4") as server, CacheClient(server.url, heartbeat_s=0.1) as client:
        arrays = layers(seed=5)
        engine = client.register(arrays, "model", layout_hints=NHD)
        pool = client.status()["pool"]["name"]
        with Peer() as peer:
            peer.run(ENGINE)
            peer.run(f"register({server.url!r})")
            assert len(server.segments()) == 3
            peer.kill()
        wait_for(lambda: len(server.segments()) == 2)
        expected = blocks_of(arrays, BLOCKS)
        for number in range(100):
            assert engine.store([number, *TOKENS[1:]], BLOCKS) == 3 * CHUNK
        wipe(arrays)
        assert engine.retrieve([99, *TOKENS[1:]], BLOCKS) == 3 * CHUNK
        assert blocks_of(arrays, BLOCKS) == expected
        engine.unregister()
        assert server.segments() == [f"/dev/shm{pool}"]
        assert "has been silent" in server.stop()
    kvshm.sweep()


def test_engines_in_two_processes_share() -> None:
    with ServeProcess(*SMALL) as server, Peer() as one, Peer() as two:
        for seed, peer in enumerate((one, two)):
            peer.run(ENGINE)
            peer.run(f"register({server.url!r}, {seed})")
        assert one.get("engine.store(TOKENS, BLOCKS)") == 3 * CHUNK
        assert two.get("engine.lookup(TOKENS)") == 3 * CHUNK
        assert two.get("engine.retrieve(TOKENS, BLOCKS[::-1])") == 3 * CHUNK
        first = one.get("blocks_of(arrays, BLOCKS).hex()")
        assert two.get("blocks_of(arrays, BLOCKS[::-1]).hex()") == first
        one.run("client.close()")
        two.run("client.close()")


def test_an_engine_that_exits_without_a_word() -> None:
    """The client unregisters at exit, and says nothing."""
    with ServeProcess(*SMALL) as server, CacheClient(server.url) as client:
        run_python(ENGINE + f"register({server.url!r}); engine.store(TOKENS, BLOCKS)")
        assert client.status()["instances"] == []
        assert client.status()["objects"]["cached"] == 3


def test_a_forked_child() -> None:
    """Its plain operations connect anew, the engine is its parent's, and its end disturbs nobody."""
    with ServeProcess(*SMALL) as server:
        out = run_python(
            ENGINE
            + f"""
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: that is what is tested
register({server.url!r})
engine.store(TOKENS, BLOCKS)
pid = os.fork()
if pid == 0:
    print(client.noop(), flush=True)
    try:
        engine.lookup(TOKENS)
    except RuntimeError as error:
        print(error, flush=True)
    engine.unregister()
    client.close()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
print(engine.lookup(TOKENS), client.status()["instances"][0]["instance_id"] == engine.instance_id, flush=True)
"""
        )
        lines = out.splitlines()
        assert lines[0] == "OK"
        assert "was registered by the parent of this process" in lines[1]
        assert lines[2] == f"{3 * CHUNK} True"


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_children_of_multiprocessing(method: str) -> None:
    with ServeProcess(*SMALL) as server:
        run_python(
            f"""
import multiprocessing, sys, warnings
sys.path.insert(0, {str(ROOT)!r})
from tests.support.fork_target import noop
if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)
    from kvshm.client.cache_client import CacheClient
    client = CacheClient({server.url!r})
    assert client.noop() == "OK"
    context = multiprocessing.get_context({method!r})
    process = context.Process(target=noop, args=({server.url!r},))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert client.noop() == "OK"
"""
        )


def test_a_stopped_server_holds_nobody_up() -> None:
    with ServeProcess(*SMALL) as stopped, ServeProcess(*SMALL) as other:
        one, two = CacheClient(stopped.url, timeout_s=0.3), CacheClient(other.url)
        engine = one.register(layers(), "model", layout_hints=NHD)
        os.kill(stopped.pid, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(stopped.pid, os.WUNTRACED)[1]), "a signal takes its time"
        try:
            assert engine.store(TOKENS, BLOCKS) == 0
            assert engine.store(TOKENS, BLOCKS) == 0
            assert not one.is_up
            assert two.noop() == "OK"
            one.close()  # does not wait for it
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        two.close()


def test_signal_handlers_are_left_alone() -> None:
    out = run_python(
        """
import signal
before = {number: signal.getsignal(number) for number in signal.valid_signals()}
from kvshm.server.cache_server import CacheServer
from kvshm.client.cache_client import CacheClient
with CacheServer("tcp://127.0.0.1:0", 1 << 20) as server, CacheClient(server.endpoint) as client:
    client.noop()
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
print("same")
"""
    )
    assert out == "same\n"


def test_import_brings_no_server() -> None:
    out = run_python(
        "import sys, kvshm; print([m for m in ('zmq', 'aiohttp', 'torch', 'hypothesis') if m in sys.modules])"
    )
    assert out == "[]\n"


# HTTP


@contextlib.contextmanager
def http_server() -> Iterator[tuple[str, CacheClient]]:
    with running_server(http_port=0) as server, CacheClient(server.endpoint) as client:
        assert server.http_url is not None
        yield server.http_url, client


def fetch(url: str, body: Any = None) -> tuple[int, str]:
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_http_status_and_metrics() -> None:
    with http_server() as (url, client), client.register(layers(), "model", layout_hints=NHD) as engine:
        engine.store(TOKENS, BLOCKS)
        assert json.loads(fetch(f"{url}/healthcheck")[1]) == {"status": "healthy"}
        status = json.loads(fetch(f"{url}/status")[1])
        assert status["objects"]["cached"] == 3
        code, text = fetch(f"{url}/metrics")
        assert code == 200
        values = dict(line.split() for line in text.splitlines() if not line.startswith("#"))
        assert values["kvshm_objects_cached"] == "3"
        assert values["kvshm_stores_total"] == "1"
        assert {line.split()[2] for line in text.splitlines() if line.startswith("#")} == values.keys()
        assert fetch(f"{url}/nothing")[0] == 404
        assert fetch(f"{url}/status", {})[0] == 404, "there is no such POST"
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
        for _ in range(2):  # over one connection
            connection.request("GET", "/healthcheck")
            assert connection.getresponse().read() == b'{"status": "healthy"}'
        connection.close()


def test_http_checksums() -> None:
    import hashlib

    with http_server() as (url, client):
        arrays = layers(dtype="bfloat16")
        for array in arrays:
            array[...] = np.arange(array.size).reshape(array.shape) % 251
        with client.register(arrays, "model", layout_hints=NHD) as engine:
            body = {"block_ids": BLOCKS[:5], "chunk_size": 2, "instance_id": engine.instance_id, "layerwise": False}
            code, text = fetch(f"{url}/cache/checksums", body)
            answer = json.loads(text)
            assert code == 200
            expected = []
            for start in (0, 2, 4):
                md5 = hashlib.md5()
                for array in arrays:
                    md5.update(array[:, BLOCKS[:5][start : start + 2]].astype(np.float32).tobytes())
                expected.append(md5.hexdigest())
            assert answer == {
                "status": "success",
                "chunk_size": 2,
                "num_chunks": 3,
                "chunk_checksums": expected,
                "layerwise": False,
                "block_id_ranges": [[4, 4], [9, 9], [2, 2], [17, 17], [30, 30]],
            }
            layerwise = json.loads(fetch(f"{url}/cache/checksums", body | {"layerwise": True})[1])
            assert [len(sums) for sums in layerwise["chunk_checksums"].values()] == [3, 3]
            assert list(layerwise["chunk_checksums"]) == ["layer_0", "layer_1"]
            for changes, code, detail in (
                ({"block_ids": []}, 400, "block_ids is required"),
                ({"chunk_size": 0}, 400, "chunk_size must be positive"),
                ({"instance_id": 77}, 404, "instance_id 77 not registered"),
                ({"block_ids": [31]}, 400, "out of range"),
                ({"block_ids": "x"}, 422, "list of integers"),
                ({"instance_id": None}, 422, "must be integers"),
            ):
                got, text = fetch(f"{url}/cache/checksums", body | changes)
                assert got == code
                assert detail in json.loads(text)["detail"]
            assert fetch(f"{url}/cache/checksums", [1])[0] == 422
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=30) as raw:
                raw.sendall(b"POST /cache/checksums HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n")
                assert b" 422 " in raw.recv(4096), "so much is not read"


def test_http_on_a_taken_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        before = set(mappings._table.owned.values())
        with pytest.raises(OSError, match="ddress already in use"), running_server(http_port=port):
            pass
        assert set(mappings._table.owned.values()) == before


def test_http_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvshm.server.http import HttpFrontend

    def fail(self: Any) -> Any:
        raise OverflowError("no such port")

    monkeypatch.setattr(HttpFrontend, "start", fail)
    before = set(mappings._table.owned.values())
    with pytest.raises(OverflowError, match="no such port"), running_server(http_port=0):
        pass
    assert set(mappings._table.owned.values()) == before


def test_a_bad_socket_path(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot listen on ipc://"), running_server(endpoint=f"ipc://{tmp_path}/no/such"):
        pass
