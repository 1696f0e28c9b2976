"""Engines that stop, die or are interrupted while they copy: nobody gets a wrong byte, and nothing stays lent."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvshm.client.cache_client import CacheClient
from kvshm.client.connections import Connection
from kvshm.server.cache_server import CacheServer
from tests.support.cache_server import CHUNK, NHD, blocks_of, layers, let_pass, running_server, wipe
from tests.support.processes import Peer

TOKENS = list(range(100, 100 + 3 * CHUNK))
BLOCKS = [4, 9, 2, 17, 30, 11]
OTHER_BLOCKS = [21, 5, 13, 8, 1, 26]

ENGINE = f"""
import os, signal
from kvshm.client import kvshm_server
from kvshm.client.cache_client import CacheClient
from tests.support.cache_server import CHUNK, NHD, blocks_of, layers, let_pass, wipe

TOKENS, BLOCKS, OTHER_BLOCKS = {TOKENS}, {BLOCKS}, {OTHER_BLOCKS}

def register(url):
    global client, engine, arrays
    client = CacheClient(url, heartbeat_s=0.05)
    arrays = [array.copy() for array in layers(seed=3)]
    engine = client.register(arrays, "model", layout_hints=NHD, transfer_mode="engine_driven")

def stop_in(name):
    real = getattr(kvshm_server, name)
    def stopped(*args):
        setattr(kvshm_server, name, real)
        os.kill(os.getpid(), signal.SIGSTOP)
        real(*args)
    setattr(kvshm_server, name, stopped)
"""


@pytest.fixture(params=[False, True], ids=["the names are there", "the names are gone"])
def are_names_gone(request: pytest.FixtureRequest) -> bool:
    """A login manager removes the names of its user's objects when that user logs out."""
    return bool(request.param)


@pytest.fixture
def server() -> Iterator[CacheServer]:
    """A server that lends slots for less time than engines may be silent."""
    with running_server(prepare_ttl_s=10) as server:
        yield server


@contextmanager
def stopped_engine(server: CacheServer, are_names_gone: bool, copy: str, call: str) -> Iterator[Peer]:
    """An engine that stops in the middle of a copy until its lease is over."""
    with Peer() as peer:
        peer.run(ENGINE)
        peer.run(f"register({server.endpoint!r})")
        if copy == "scatter_chunks":
            peer.run("engine.store(TOKENS, BLOCKS)")
        peer.run(f"stop_in({copy!r})")
        name = peer.get("engine._registration._copies.liveness.name")
        peer.start("eval", call)
        assert os.WIFSTOPPED(os.waitpid(peer.pid, os.WUNTRACED)[1])
        if are_names_gone:
            os.unlink(f"/dev/shm{name}")
            os.unlink(f"/dev/shm{server.call(lambda: server._service._liveness.name)}")
        for _ in range(2):
            let_pass(server, 31)
        assert server.call(server.status)["counters"]["reaped"] == 1
        yield peer


def fill(server: CacheServer) -> None:
    """Store until every chunk that nobody holds is another's, and check that all is served right."""
    with CacheClient(server.endpoint) as client:
        arrays = layers(seed=7)
        with client.register(arrays, "other", layout_hints=NHD) as engine:
            expected = blocks_of(arrays, BLOCKS)
            for number in range(30):
                assert engine.store([number, *TOKENS[1:]], BLOCKS) == 3 * CHUNK
            for number in range(18, 30):
                wipe(arrays)
                assert engine.retrieve([number, *TOKENS[1:]], BLOCKS) == 3 * CHUNK
                assert blocks_of(arrays, BLOCKS) == expected


def test_a_stopped_store_writes_into_nobody_elses_slots(server: CacheServer, are_names_gone: bool) -> None:
    with (
        stopped_engine(server, are_names_gone, "gather_chunks", "engine.store(TOKENS, BLOCKS)") as peer,
        CacheClient(server.endpoint) as client,
    ):
        assert client.status()["objects"]["unfinished"] == 3
        fill(server)
        arrays = layers(seed=3)
        expected = blocks_of(arrays, BLOCKS)
        with client.register(arrays, "model", layout_hints=NHD, transfer_mode="engine_driven") as engine:
            assert engine.store(TOKENS, BLOCKS) == 3 * CHUNK, "another engine may store the same"
            os.kill(peer.pid, signal.SIGCONT)
            assert peer.answer() in (0, 3 * CHUNK)
            wipe(arrays)
            assert engine.retrieve(TOKENS, OTHER_BLOCKS) == 3 * CHUNK
            assert blocks_of(arrays, OTHER_BLOCKS) == expected
        fill(server)
        peer.run("client.close()")
        while client.status()["objects"]["unfinished"]:
            client.noop()


def test_a_stopped_retrieve_reads_nobody_elses_slots(server: CacheServer, are_names_gone: bool) -> None:
    call = "[engine.retrieve(TOKENS, OTHER_BLOCKS), blocks_of(arrays, OTHER_BLOCKS).hex()]"
    with stopped_engine(server, are_names_gone, "scatter_chunks", call) as peer:
        fill(server)
        os.kill(peer.pid, signal.SIGCONT)
        num_tokens, got = peer.answer()
        assert (num_tokens, got) == (3 * CHUNK, blocks_of(layers(seed=3), BLOCKS).hex()) or num_tokens == 0
        peer.run("client.close()")


@pytest.mark.parametrize("copy", ["gather_chunks", "scatter_chunks"])
def test_slots_of_a_killed_engine_come_back(server: CacheServer, are_names_gone: bool, copy: str) -> None:
    call = f"engine.{'store' if copy == 'gather_chunks' else 'retrieve'}(TOKENS, BLOCKS)"
    with stopped_engine(server, are_names_gone, copy, call) as peer, CacheClient(server.endpoint) as client:
        assert client.status()["pool"]["busy_nbytes"] > 0
        peer.kill()
        while client.status()["pool"]["busy_nbytes"]:
            client.noop()


def test_slots_of_an_engine_that_is_killed_while_it_is_registered() -> None:
    """Nobody waits for its lease."""
    with running_server(reap_after_s=3600.0) as server, CacheClient(server.endpoint) as client, Peer() as peer:
        peer.run(ENGINE)
        peer.run(f"register({server.endpoint!r}); stop_in('gather_chunks')")
        peer.start("eval", "engine.store(TOKENS, BLOCKS)")
        assert os.WIFSTOPPED(os.waitpid(peer.pid, os.WUNTRACED)[1])
        peer.kill()
        while client.status()["objects"]["unfinished"] or client.status()["instances"]:
            client.noop()


def test_an_interrupted_process_gives_its_slots_back() -> None:
    """Ctrl-C, and the engine goes on."""
    with running_server() as server, CacheClient(server.endpoint) as client, Peer() as peer:
        peer.run(ENGINE)
        peer.run(f"register({server.endpoint!r})")
        peer.run(
            """
real = kvshm_server.gather_chunks
def interrupted(*args):
    kvshm_server.gather_chunks = real
    signal.raise_signal(signal.SIGINT)
    real(*args)
kvshm_server.gather_chunks = interrupted
try:
    engine.store(TOKENS, BLOCKS)
    raise AssertionError
except KeyboardInterrupt:
    pass
"""
        )
        assert client.status()["pool"]["busy_nbytes"] == 0
        assert peer.get("engine.store(TOKENS, BLOCKS)") == 3 * CHUNK
        peer.run("client.close()")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("place", ["gather_chunks", "scatter_chunks", "prepare", "commit"])
def test_whatever_ends_a_copy_gives_its_slots_back(
    monkeypatch: pytest.MonkeyPatch, place: str, error: type[BaseException]
) -> None:
    sessions: Any = importlib.import_module("kvshm.client.kvshm_server")
    with running_server() as server, CacheClient(server.endpoint) as client:
        arrays: list[Any] = [array.copy() for array in layers()]
        engine = client.register(arrays, "model", layout_hints=NHD, transfer_mode="engine_driven")
        expected = blocks_of(arrays, BLOCKS)

        def end(*_: Any) -> None:
            raise error("enough")

        calls: list[Callable[[], int]] = []
        if place != "gather_chunks":
            calls.append(lambda: engine.retrieve(TOKENS, OTHER_BLOCKS))
            assert engine.store(TOKENS, BLOCKS) == 3 * CHUNK
        if place != "scatter_chunks":
            calls.append(lambda: engine.store([1, *TOKENS[1:]], BLOCKS))
        for call in calls:
            if place in ("gather_chunks", "scatter_chunks"):
                monkeypatch.setattr(sessions, place, end)
            else:
                real = Connection.receive
                left = [place == "commit"]  # requests whose reply comes

                def receive(self: Connection, *args: Any, real: Any = real, left: list[bool] = left) -> Any:
                    if left:
                        if left.pop():
                            return real(self, *args)
                        raise error("enough")
                    return real(self, *args)

                if place == "commit":
                    left.insert(0, False)
                monkeypatch.setattr(Connection, "receive", receive)
            with pytest.raises(error, match="enough"):
                call()
            monkeypatch.undo()
            with CacheClient(server.endpoint) as other:
                while other.status()["pool"]["busy_nbytes"]:
                    other.noop()
        assert engine.store(TOKENS, BLOCKS) == 3 * CHUNK
        wipe(arrays)
        assert engine.retrieve(TOKENS, OTHER_BLOCKS) == 3 * CHUNK
        assert blocks_of(arrays, OTHER_BLOCKS) == expected
        engine.unregister()


# Server-driven: the server still copies


@contextmanager
def late_retrieve(monkeypatch: pytest.MonkeyPatch, server: CacheServer) -> Iterator[tuple[Any, CacheClient, Any]]:
    """An engine that gave up waiting for a copy which still runs, and what lets that end."""
    copies: Any = importlib.import_module("kvshm.server.server_driven")
    real, go_on = copies.scatter_chunks, threading.Event()

    def slow(*args: Any) -> None:
        assert go_on.wait(30)
        real(*args)

    with CacheClient(server.endpoint, timeout_s=0.2, heartbeat_s=0.05) as client:
        engine = client.register(layers(), "model", layout_hints=NHD)
        while engine.store(TOKENS, BLOCKS) != 3 * CHUNK:
            pass
        monkeypatch.setattr(copies, "scatter_chunks", slow)
        assert engine.retrieve(TOKENS, OTHER_BLOCKS) == 0
        assert engine.unsettled_block_ids() == [set(OTHER_BLOCKS)]
        try:
            yield engine, client, go_on
        finally:
            go_on.set()


def test_unregister_returns_when_the_server_copies_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server() as server, late_retrieve(monkeypatch, server) as (engine, client, go_on):
        client._link.connections.timeout_s = 30.0
        leaving = threading.Thread(target=engine.unregister)
        leaving.start()
        while server.call(server.status)["instances"]:
            client.noop()
        assert leaving.is_alive(), "a copy still runs"
        assert engine.unsettled_block_ids() == [set(OTHER_BLOCKS)]
        go_on.set()
        leaving.join(30)
        assert not leaving.is_alive()
        assert engine.unsettled_block_ids() == [set()]


def test_unregister_that_cannot_wait_leaves_the_blocks_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server() as server, late_retrieve(monkeypatch, server) as (engine, _, go_on):
        engine.unregister()
        assert engine.unsettled_block_ids() == [set(OTHER_BLOCKS)]
        go_on.set()
        while engine.unsettled_block_ids() != [set()]:
            pass


def test_a_closed_client_leaves_the_blocks_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks the server any more: only its end tells."""
    with running_server() as server, late_retrieve(monkeypatch, server) as (engine, client, go_on):
        client.close()
        assert engine.unsettled_block_ids() == [set(OTHER_BLOCKS)]
        go_on.set()
        let_pass(server, 31)
        assert server.call(server.status)["instances"] == []
        assert engine.unsettled_block_ids() == [set(OTHER_BLOCKS)]
    assert engine.unsettled_block_ids() == [set()]
