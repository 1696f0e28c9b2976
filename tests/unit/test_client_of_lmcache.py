"""What kvshm's client sends to a real LMCache server, which here is a socket that answers as one does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

import kvshm
from kvshm import wire
from kvshm.client import lmcache_server
from kvshm.client.cache_client import CacheClient, CacheServerError
from tests.support.cache_server import CHUNK, CHUNK_NBYTES, NHD, blocks_of, layers

NAMES = {
    16: "prepare_store",
    17: "commit_store",
    18: "prepare_retrieve",
    19: "commit_retrieve",
    6: "store",
    7: "retrieve",
    8: "lookup",
    10: "wait",
    12: "free_lookup_locks",
    13: "end_session",
    1: "register",
}
TOKENS = list(range(100, 100 + 3 * CHUNK))
BLOCKS = [5, 3, 11, 2, 7, 13]


class Standing:
    """A server that stands for LMCache: it answers, and remembers what it was asked."""

    def __init__(self) -> None:
        self.knows = True  # the engine
        self.is_mute = False  # to stores
        self.must_restart = False
        self.is_away = False  # while it restarts
        self.found = 0  # chunks that the next lookups find
        self.stores = 0  # chunks that they find once a store came
        self.asked: list[tuple[str, list[Any]]] = []
        self.url = ""
        self.pool = ""  # a segment that engine-driven engines are lent slots of
        self.slots: list[dict[str, int]] = []

    def answer(self, operation: int | str, payload: list[Any]) -> list[Any] | None:
        """The frames after uid and operation; None: no reply at all, as for what it does not know."""
        if isinstance(operation, str) or (operation == 6 and self.is_mute):
            return None
        if operation in NAMES:
            self.asked.append((NAMES[operation], payload))
            if operation in (6, 17) and self.stores:
                self.found = self.stores
        replies: dict[int, list[Any]] = {
            6: [[b"e", True] if self.knows else [b"", False]],
            7: [[b"e", True] if self.knows else [b"", False]],
            10: [self.found],
            14: [{"shm_name": self.pool.lstrip("/"), "pool_size": 4 * CHUNK_NBYTES}],
            16: [{"context": {"slots": self.slots, "chunk_indices": list(range(len(self.slots)))}}],
            17: [True],
            18: [{"success": True, "data": b"", "context": {"slots": self.slots}}],
            19: [True],
            21: [CHUNK],
            22: [True],
        }
        return replies.get(operation, [])

    def take_asked(self) -> list[tuple[str, list[Any]]]:
        """What was asked since the last time."""
        asked, self.asked = self.asked, []
        return asked


@pytest.fixture
def server() -> Iterator[Standing]:
    """One that listens."""
    context = zmq.Context()
    standing = Standing()
    stopping = threading.Event()

    def listen(url: str) -> Any:
        sock = context.socket(zmq.ROUTER)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVTIMEO, 20)
        for _ in range(1000):  # a closed socket leaves its port a moment later
            try:
                sock.bind(url)
                break
            except zmq.ZMQError:
                stopping.wait(0.01)
        standing.url = sock.getsockopt_string(zmq.LAST_ENDPOINT)
        return sock

    sock = listen("tcp://127.0.0.1:*")

    def run() -> None:
        nonlocal sock
        while not stopping.is_set():
            if standing.must_restart:
                sock.close()
                while standing.is_away and not stopping.is_set():
                    stopping.wait(0.01)
                sock = listen(standing.url)
                standing.must_restart = False
            try:
                address, uid, operation, *payload = sock.recv_multipart()
            except zmq.Again:
                continue
            frames = standing.answer(wire.unpack(operation), [wire.unpack(frame) for frame in payload])
            if frames is not None:
                sock.send_multipart([address, uid, operation, *map(wire.pack, frames)])

    thread = threading.Thread(target=run)
    thread.start()
    yield standing
    stopping.set()
    thread.join()
    sock.close()
    context.term()


@contextmanager
def engine_of(server: Standing, arrays: Any = None, **settings: Any) -> Iterator[Any]:
    """An engine that is registered with it."""
    with CacheClient(server.url, heartbeat_s=1000.0, raises=True) as client:
        engine = client.register(arrays or layers(), "model", layout_hints=NHD, **settings)
        server.take_asked()
        yield engine


def names(asked: list[tuple[str, list[Any]]]) -> list[str]:
    """The operations alone."""
    return [name for name, _ in asked]


def test_requests_are_ended(server: Standing) -> None:
    # It remembers for ten minutes those that are not.
    with engine_of(server) as engine:
        server.stores = 3
        assert engine.store(TOKENS, BLOCKS) == 3 * CHUNK
        asked = server.take_asked()
        assert names(asked) == ["store", "end_session", "lookup", "wait", "free_lookup_locks", "end_session"]
        assert asked[1][1] == [asked[0][1][0]["request_id"]]
        assert asked[5][1] == [asked[2][1][0]["request_id"]]

        server.found = 0
        assert engine.lookup(TOKENS) == 0
        assert names(server.take_asked()) == ["lookup", "wait", "end_session"]

        server.found = 3
        assert engine.lookup(TOKENS) == 3 * CHUNK
        assert engine.retrieve(TOKENS, BLOCKS) == 3 * CHUNK
        asked = server.take_asked()
        assert names(asked) == ["lookup", "wait", "retrieve", "end_session"]
        assert {asked[0][1][0]["request_id"], asked[2][1][0]["request_id"]} == {asked[3][1][0]}


def test_found_chunks_that_are_not_retrieved_are_unlocked(server: Standing) -> None:
    # Ending the request unlocks nothing.
    server.found = 3
    with engine_of(server) as engine:
        assert engine.lookup(TOKENS) == 3 * CHUNK
        assert engine.retrieve(TOKENS[:CHUNK], BLOCKS) == CHUNK
        asked = server.take_asked()
        assert names(asked) == ["lookup", "wait", "retrieve", "free_lookup_locks", "end_session"]
        unread = asked[3][1][0]
        assert (unread["start"], unread["end"], unread["token_ids"]) == (CHUNK, 3 * CHUNK, TOKENS)
        assert unread["request_id"] == asked[0][1][0]["request_id"]

        assert engine.lookup(TOKENS) == 3 * CHUNK
        server.take_asked()
        engine.unregister()
        asked = server.take_asked()
        assert names(asked) == ["free_lookup_locks", "end_session"]
        assert (asked[0][1][0]["start"], asked[0][1][0]["end"]) == (0, 3 * CHUNK)


def test_the_locks_of_other_workers_are_given_back(server: Standing) -> None:
    # A lookup locks the chunks of all workers, and each of them looks up by itself.
    server.found = 3
    with engine_of(server, world_size=3, worker_id=1) as engine:
        assert engine.lookup(TOKENS) == 3 * CHUNK
        asked = server.take_asked()
        assert names(asked) == ["lookup", "wait", "free_lookup_locks", "free_lookup_locks"]
        assert [payload[0]["worker_id"] for name, payload in asked if name != "wait"] == [None, 0, 2]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_share_is_given_up_once(server: Standing, world_size: int) -> None:
    # Locks there are counts without an owner: giving them up twice takes another request's.
    server.found = 3
    with engine_of(server, world_size=world_size) as engine:
        engine.lookup(TOKENS, "r")
        engine.retrieve(TOKENS, BLOCKS, request_id="r")
        assert names(server.take_asked()) == ["lookup", "wait", "retrieve", "end_session"][: 5 - world_size]
        engine.release(TOKENS, "r")
        assert server.take_asked() == []
        assert engine.retrieve(TOKENS, BLOCKS, request_id="r") == 3 * CHUNK
        asked = server.take_asked()
        assert names(asked) == ["lookup", "wait", "retrieve", "end_session"]
        assert asked[0][1][0]["request_id"] != "r"

        engine.lookup(TOKENS, "r")
        server.take_asked()
        engine.release(request_id="r")
        assert names(server.take_asked()) == ["free_lookup_locks", "end_session"][: 3 - world_size]
        engine.release(TOKENS, "r")
        assert server.take_asked() == []

        engine.release(TOKENS, "of another worker")
        asked = server.take_asked()
        assert names(asked) == ["free_lookup_locks"] * (world_size - 1)


@pytest.mark.parametrize(("bound", "most"), [("_MAX_LOOKUPS", 2), ("_MAX_LOOKUP_TOKENS", 2 * 3 * CHUNK)])
def test_lookups_that_nothing_follows_are_given_up(
    server: Standing, monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    # The oldest goes when there are too many, or too many tokens of them.
    monkeypatch.setattr(lmcache_server, bound, most)
    server.found = 3
    with engine_of(server) as engine:
        for first in (1, 2):
            engine.lookup([first, *TOKENS[1:]])
        assert names(server.take_asked()) == ["lookup", "wait"] * 2
        engine.lookup(TOKENS)
        asked = server.take_asked()
        assert names(asked) == ["lookup", "wait", "free_lookup_locks", "end_session"]
        assert asked[2][1][0]["token_ids"] == [1, *TOKENS[1:]]
        assert engine.retrieve([2, *TOKENS[1:]], BLOCKS) == 3 * CHUNK
        assert names(server.take_asked()) == ["retrieve", "end_session"], "that one is remembered"


def test_lookups_do_not_outlive_a_registration(server: Standing) -> None:
    # A server that has forgotten the engine is another one, as far as is known: it has pinned nothing.
    server.found = 3
    with engine_of(server) as engine:
        engine.lookup(TOKENS)
        server.knows = False
        with pytest.raises(CacheServerError, match="refused instance"):
            engine.store([7] * CHUNK, BLOCKS)
        server.knows = True
        server.take_asked()
        assert engine.retrieve(TOKENS, BLOCKS) == 3 * CHUNK
        assert names(server.take_asked()) == ["lookup", "wait", "retrieve", "end_session"]


def test_slots_past_half_their_loan_are_not_used(
    server: Standing, monkeypatch: pytest.MonkeyPatch, segment_name: str
) -> None:
    # It lends them to others when their time is over, and says nothing.
    with kvshm.Segment.create(4 * CHUNK_NBYTES, segment_name) as segment:
        pool = segment.array((4 * CHUNK_NBYTES,), "uint8")
        server.pool, server.stores = segment_name, 3
        server.slots = [{"offset": index * CHUNK_NBYTES, "length": CHUNK_NBYTES} for index in range(3)]
        arrays = [array.copy() for array in layers()]
        with engine_of(server, arrays, transfer_mode="engine_driven") as engine:
            assert engine.store(TOKENS, BLOCKS) == 3 * CHUNK
            assert engine.retrieve(TOKENS, BLOCKS) == 3 * CHUNK
            wanted = blocks_of(arrays, BLOCKS)
            pool[:] = 0
            monkeypatch.setattr(lmcache_server, "_LOAN_S", 0.0)
            server.take_asked()
            with pytest.raises(CacheServerError, match="lent too long ago"):
                engine.store(TOKENS, BLOCKS)
            assert "commit_store" not in names(server.take_asked())
            assert not pool.any()
            with pytest.raises(CacheServerError, match="lent too long ago"):
                engine.retrieve(TOKENS, BLOCKS)
            assert "commit_retrieve" in names(server.take_asked())
            assert blocks_of(arrays, BLOCKS) == wanted
        del pool


def test_a_late_request_is_over_when_its_connection_broke(server: Standing) -> None:
    # Also where ZeroMQ has connected again meanwhile, without a word: the server that copied is taken for gone.
    with CacheClient(server.url, timeout_s=0.2, heartbeat_s=1000.0) as client:
        engine = client.register(layers(), "model", layout_hints=NHD)
        server.is_mute = True
        assert engine.store(TOKENS, BLOCKS) == 0
        assert engine.unsettled_block_ids() == [set(BLOCKS)]
        (late,) = engine._registration._requests._late
        connection: Any = late.connection
        server.must_restart = True
        assert connection._monitor.poll(20_000), "it broke"
        assert connection.socket.poll(20_000, zmq.POLLOUT), "and is there again"
        assert engine.unsettled_block_ids() == [set()]


def test_a_skip_inside_a_block_is_a_miss(server: Standing) -> None:
    # It would round it down, and write protected tokens.
    server.found = 3
    with engine_of(server) as engine:
        for skip in (1, 2, 4):
            assert engine.retrieve(TOKENS, BLOCKS, skip_first_n_tokens=skip) == 0
        assert server.take_asked() == []
        assert engine.retrieve(TOKENS, BLOCKS, skip_first_n_tokens=3) == 3 * CHUNK
        (retrieve,) = [payload for name, payload in server.take_asked() if name == "retrieve"]
        assert retrieve[-1] == 3


def test_a_server_that_was_away_is_taken_for_another(server: Standing) -> None:
    # It has no epoch that would tell, and if it is another process it knows no engine.
    with CacheClient(server.url, heartbeat_s=0.05, connect_timeout_s=0.1) as client:
        engine: Any = client.register(layers(), "model", layout_hints=NHD)
        link: Any = client
        assert names(server.take_asked()) == ["register"]
        server.is_away = server.must_restart = True
        while link.is_up:
            engine.lookup(TOKENS)
        server.take_asked()
        server.is_away = False
        while not link.is_up:
            assert engine.lookup(TOKENS) == 0
        assert "register" in names(server.take_asked())
        assert engine.is_registered


@pytest.mark.parametrize("wrong", [-1, 31])
def test_ids_of_no_block_are_not_sent(server: Standing, wrong: int) -> None:
    # It would count -1 from the end, and keep the chunks of 31 locked for ten minutes.
    server.found = 3
    with engine_of(server) as engine:
        assert engine.lookup(TOKENS) == 3 * CHUNK
        server.take_asked()
        for move in (engine.store, engine.retrieve):
            with pytest.raises(ValueError, match=r"kernel group 0 hold .* has blocks \[0, 31\)"):
                move(TOKENS, [*BLOCKS[:-1], wrong])
        assert server.take_asked() == []
        assert engine.retrieve(TOKENS, BLOCKS) == 3 * CHUNK, "the lookup was not used up"


def test_logged_errors_keep_no_caches(caplog: pytest.LogCaptureFixture) -> None:
    # Handlers keep records; an error's traceback holds the frames of the engine.
    caplog.set_level(logging.INFO, "kvshm")
    with CacheClient("tcp://127.0.0.1:1", connect_timeout_s=0.05) as client:
        client._link.is_up = True
        client._link.mark_down(ConnectionError("nobody is there"))
    (record,) = caplog.records
    assert record.getMessage() == "kvshm: going on without the cache server: nobody is there"
    assert record.args == ("nobody is there",)
