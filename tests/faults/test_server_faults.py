"""The server under faults: copies that fail at any point, memory that runs out, slow work, and hostile messages."""

from __future__ import annotations

import importlib
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

import kvshm
from kvshm.client.cache_client import CacheClient
from kvshm.layout import EngineGroupInfo
from kvshm.server.cache_server import CacheServer
from kvshm.store.pool_memory import PoolMemory
from tests.support.cache_server import (
    BLOCK,
    CHUNK,
    NHD,
    RawClient,
    blocks_of,
    key_map,
    layers,
    running_server,
    wipe,
)
from tests.support.memory import num_mappings

NUM_MESSAGES = int(os.environ.get("KVSHM_FUZZ_MESSAGES", "4000"))
TOKENS = list(range(100, 100 + 3 * CHUNK))
BLOCKS = [4, 9, 2, 17, 30, 11]


@pytest.fixture
def server() -> Iterator[CacheServer]:
    with running_server() as server:
        yield server


@pytest.fixture
def copies() -> Any:
    return importlib.import_module("kvshm.server.server_driven")


class Gate:
    """Lets a patched function begin, and end when the test says so."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.real = real
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, *args: Any) -> Any:
        self.begun.set()
        assert self.go_on.wait(30)
        return self.real(*args)


# Stores that fail


@pytest.mark.parametrize("failing", range(3))
def test_a_store_that_fails_in_any_group_is_a_miss(
    server: CacheServer, monkeypatch: pytest.MonkeyPatch, copies: Any, failing: int
) -> None:
    arrays = [array for seed in range(3) for array in layers(seed)]
    infos = tuple(
        EngineGroupInfo(group, (2 * group, 2 * group + 1), BLOCK, sw_size_tokens=window)
        for group, window in enumerate((-1, CHUNK, 2 * CHUNK))
    )
    calls: list[int] = []
    real = copies.gather_chunks

    def gather(context: Any, block_ids: Any, chunks: Any, group: int) -> None:
        calls.append(group)
        if group == failing:
            raise OSError(5, "the page could not be read")
        real(context, block_ids, chunks, group)

    with CacheClient(server.endpoint) as client:
        engine = client.register(arrays, "model", layout_hints=NHD, engine_group_infos=infos)
        monkeypatch.setattr(copies, "gather_chunks", gather)
        assert engine.store(TOKENS, [BLOCKS] * 3) == 0
        assert calls == list(range(failing + 1))
        assert "the page could not be read" in (client.last_error or "")
        assert engine.lookup(TOKENS) == 0
        status = client.status()
        assert (status["pool"]["used_nbytes"], status["objects"]["aborted"]) == (0, 9)
        assert "could not be read" in status["last_error"]
        monkeypatch.undo()
        assert engine.store(TOKENS, [BLOCKS] * 3) == engine.lookup(TOKENS) == 3 * CHUNK


def test_a_program_error_in_a_copy_is_a_miss_too(
    server: CacheServer, monkeypatch: pytest.MonkeyPatch, copies: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with CacheClient(server.endpoint) as client:
        engine = client.register(layers(), "model", layout_hints=NHD)
        monkeypatch.setattr(copies, "gather_chunks", lambda *args: 1 / 0)
        assert engine.store(TOKENS, BLOCKS) == 0
        assert "a job failed" in caplog.text
        assert client.status()["pool"]["used_nbytes"] == 0


def test_a_pool_that_cannot_be_reserved(server: CacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else has filled the shared memory since the start."""

    def ensure(offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(server._pool, "ensure", ensure)
    with CacheClient(server.endpoint) as client:
        engine = client.register(layers(), "model", layout_hints=NHD)
        other = client.register(
            [array.copy() for array in layers()], "model", layout_hints=NHD, transfer_mode="engine_driven"
        )
        for each in (engine, other):
            assert each.store(TOKENS, BLOCKS) == 0
            assert "No space left" in (client.last_error or "")
        assert client.status()["pool"]["used_nbytes"] == 0
        monkeypatch.undo()
        assert engine.store(TOKENS, BLOCKS) == other.store(TOKENS, BLOCKS) == 3 * CHUNK


def test_reserving_stops_where_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    pool_memory = importlib.import_module("kvshm.store.pool_memory")
    real = os.posix_fallocate

    def fallocate(fd: int, offset: int, nbytes: int) -> None:
        if offset >= 8 << 20:
            raise OSError(28, "No space left on device")
        real(fd, offset, nbytes)

    pool = pool_memory.PoolMemory(20 << 20)
    try:
        monkeypatch.setattr(os, "posix_fallocate", fallocate)
        pool.reserve_all(threading.Event())
        assert pool.reserved_nbytes == 8 << 20
        assert "only 8388608 of 20971520 bytes could be reserved" in pool.error
        pool.ensure(0, 8 << 20)
        with pytest.raises(OSError, match="No space left"):
            pool.ensure(8 << 20, 1)
    finally:
        pool.close()


def test_reserving_can_be_stopped() -> None:
    pool_memory = importlib.import_module("kvshm.store.pool_memory")
    pool = pool_memory.PoolMemory(64 << 20)
    stop = threading.Event()
    stop.set()
    pool.reserve_all(stop)
    assert pool.reserved_nbytes == 0
    pool.ensure(32 << 20, 4096)
    assert os.stat(f"/dev/shm{pool.name}").st_blocks * 512 == 4096, "a part waits for no other"
    pool.close()
    pool.close()


# Slow work


def test_unregister_waits_for_the_copies(server: CacheServer, monkeypatch: pytest.MonkeyPatch, copies: Any) -> None:
    gate = Gate(copies.gather_chunks)
    with RawClient(server.endpoint) as raw:
        arrays = layers()
        name = kvshm.wrap(arrays[0]).shm_name
        raw.register(arrays)
        monkeypatch.setattr(copies, "gather_chunks", gate)
        store = raw.send(6, key_map(TOKENS), 1, [BLOCKS], b"h")
        assert gate.begun.wait(30)
        del arrays
        unregister = raw.send(2, 1)
        again = raw.send(6, key_map(TOKENS), 1, [BLOCKS], b"h")
        ping = raw.send(22, 1)
        first, second = raw.reply(), raw.reply()
        assert (first[0], first[2]) == (again, [b"", False]), "it is gone for new requests at once"
        assert second == [ping, 22, True], "and nobody waits"
        assert num_mappings(name) == 1
        gate.go_on.set()
        assert [raw.reply()[0], raw.reply()[0]] == [store, unregister]
        assert num_mappings(name) == 0


def test_pings_are_answered_while_memory_is_unmapped(server: CacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    context = importlib.import_module("kvshm.cache")
    gate = Gate(context.MappedCache.close)
    with RawClient(server.endpoint) as raw:
        raw.register(layers())
        monkeypatch.setattr(context.MappedCache, "close", lambda self: gate(self))  # noqa: PLW0108  a method
        unregister = raw.send(2, 1)
        assert gate.begun.wait(30)
        for _ in range(10):
            assert raw.ask(22, None) == [True]
        gate.go_on.set()
        assert raw.reply() == [unregister, 2]


def test_an_engine_that_unregisters_while_it_registers(
    server: CacheServer, monkeypatch: pytest.MonkeyPatch, copies: Any
) -> None:
    gate = Gate(copies.MappedCache)
    monkeypatch.setattr(copies, "MappedCache", gate)
    with RawClient(server.endpoint) as raw:
        arrays = layers()
        frames = [msgpack.ExtType(1, kvshm.wrap(array).to_bytes()) for array in arrays]
        register = raw.send(1, 1, frames, "model", 1, "vllm", NHD, [])
        assert gate.begun.wait(30)
        assert raw.ask(2, 1) == []
        gate.go_on.set()
        uid, _, value, reason = raw.reply()
        assert (uid, value) == (register, None)
        assert "was unregistered meanwhile" in reason
        assert server.call(server.status)["instances"] == []


def test_closing_waits_for_the_copies(monkeypatch: pytest.MonkeyPatch, copies: Any) -> None:
    gate = Gate(copies.gather_chunks)
    with running_server() as server, RawClient(server.endpoint) as raw:
        raw.register(layers())
        monkeypatch.setattr(copies, "gather_chunks", gate)
        uid = raw.send(6, key_map(TOKENS), 1, [BLOCKS], b"h")
        assert gate.begun.wait(30)
        closing = threading.Thread(target=server.close)
        closing.start()
        gate.go_on.set()
        assert raw.reply() == [uid, 6, [b"h", True]], "what was begun is answered"
        closing.join(30)
        assert not closing.is_alive()


def test_requests_while_the_server_closes_are_refused(monkeypatch: pytest.MonkeyPatch, copies: Any) -> None:
    gate = Gate(copies.gather_chunks)
    with running_server() as server, RawClient(server.endpoint) as raw:
        raw.register(layers())
        monkeypatch.setattr(copies, "gather_chunks", gate)
        uid = raw.send(6, key_map(TOKENS), 1, [BLOCKS], b"h")
        assert gate.begun.wait(30)
        closing = threading.Thread(target=server.close)
        closing.start()
        assert server._stop.wait(30)
        assert raw.ask(6, key_map(TOKENS), 1, [BLOCKS], b"h") == [
            [b"", False],
            "the server is closing; it serves nothing new",
        ]
        gate.go_on.set()
        assert raw.reply() == [uid, 6, [b"h", True]]
        closing.join(30)
        assert not closing.is_alive()


@pytest.mark.parametrize("operation", ["store", "retrieve"])
def test_answers_that_fail_leave_no_copy_running(
    server: CacheServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, operation: str
) -> None:
    """Else its engine's unregister would wait for ever."""
    calls: Any = importlib.import_module("kvshm.server.cache_server")._Call
    real = calls.answer

    def answer(self: Any, result: Any) -> None:
        if self.operation.name == operation:
            raise RuntimeError("this answer cannot be sent")
        real(self, result)

    with RawClient(server.endpoint) as raw:
        raw.register(layers())
        if operation == "retrieve":
            raw.ask(6, key_map(TOKENS), 1, [BLOCKS], b"h")
        monkeypatch.setattr(calls, "answer", answer)
        raw.send(operation, key_map(TOKENS), 1, [BLOCKS], b"h")
        while "this answer cannot be sent" not in caplog.text:
            raw.ask(24)
        assert raw.ask(2, 1) == []


@pytest.mark.parametrize("unregisters", [True, False])
def test_slots_that_were_taken_back_are_not_lent(
    server: CacheServer, monkeypatch: pytest.MonkeyPatch, unregisters: bool
) -> None:
    """An engine that goes, or slots whose time is over, while their pages are still being reserved."""
    spec = {
        "instance_id": 1,
        "model_name": "model",
        "world_size": 1,
        "block_size": 3,
        "num_layers": 2,
        "hidden_dim_size": 35,
        "dtype_str": "float16",
        "use_mla": False,
    }
    gate = Gate(PoolMemory.ensure)
    with RawClient(server.endpoint) as raw:
        raw.ask(14, spec)
        monkeypatch.setattr(PoolMemory, "ensure", lambda self, *args: gate(self, *args))  # noqa: PLW0108  a method
        prepare = raw.send(16, key_map(TOKENS), 1)
        assert gate.begun.wait(30)
        if unregisters:
            assert raw.ask(15, 1) == []
        else:
            server.call(lambda: server._state.loans.expire(float("inf")))
        gate.go_on.set()
        uid, _, value, reason = raw.reply()
        assert (uid, value) == (prepare, {"context": {}})
        assert "taken back before they were lent" in reason


def test_registering_and_storing_from_many_threads(server: CacheServer) -> None:
    shared = [layers()]
    name = kvshm.wrap(shared[0][0]).shm_name
    failures: list[str] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        with CacheClient(server.endpoint, heartbeat_s=0.02) as client:
            for _ in range(12):
                with client.register(shared[0], "model", layout_hints=NHD) as engine:
                    for _ in range(rng.randrange(4)):
                        tokens = [rng.randrange(5)] * 3 * CHUNK
                        engine.store(tokens, BLOCKS)
                        engine.lookup(tokens)
                if client.last_error and "no room" not in client.last_error:
                    failures.append(client.last_error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    shared.clear()
    assert num_mappings(name) == 0


# Messages


def mutations(rng: random.Random) -> Iterator[list[bytes]]:
    """Well-formed requests, damaged in any way, and noise."""
    key = key_map(TOKENS)
    lookup = key_map(TOKENS, worker_id=None)
    wrapper = msgpack.ExtType(1, kvshm.wrap(layers()[0]).to_bytes())
    spec = {"instance_id": 9, "model_name": "m", "world_size": 1, "block_size": 3, "num_layers": 1}
    spec |= {"hidden_dim_size": 4, "dtype_str": "uint8", "use_mla": True}
    requests: list[list[Any]] = [
        [1, 1, [wrapper], "model", 1, "vllm", NHD, [{"engine_group_id": 0, "layer_indices": [0]}]],
        [6, key, 1, [BLOCKS], b"h"],
        [7, key, 1, [BLOCKS], b"h", 0],
        [8, lookup, 1],
        [9, "request"],
        [10, "request", 0.1],
        [12, lookup, 1],
        [13, "request"],
        [14, spec],
        [16, key, 9],
        [17, key, 9, b""],
        [18, key, 9],
        [19, key, 9],
        [20, True],
        [22, 1],
        [23, 1, "m", []],
        ["kvshm_lookup", lookup, 1, None, b"12345678" * 6],
        ["kvshm_status"],
    ]
    values: list[Any] = [
        None,
        True,
        -1,
        0,
        2**63,
        2**64 - 1,
        1.5,
        "",
        "x" * 300,
        b"",
        b"\xff" * 9,
        [],
        [[]],
        {},
        {"a": 1},
        lookup,
    ]
    while True:
        request = [rng.randrange(1 << 30), *rng.choice(requests)]
        for _ in range(rng.randrange(3)):
            request[rng.randrange(len(request))] = rng.choice(values)
        frames = [bytes(msgpack.packb(part)) for part in request]
        damage = rng.randrange(6)
        if damage == 0:
            frames = [rng.randbytes(rng.randrange(40)) for _ in range(rng.randrange(1, 8))]
        elif damage == 1:
            victim = rng.randrange(len(frames))
            cut = bytearray(frames[victim])
            for _ in range(rng.randrange(1, 4)):
                if cut:
                    cut[rng.randrange(len(cut))] = rng.randrange(256)
            frames[victim] = bytes(cut)
        elif damage == 2:
            victim = rng.randrange(len(frames))
            frames[victim] = frames[victim][: rng.randrange(len(frames[victim]) + 1)]
        elif damage == 3:
            frames.insert(rng.randrange(len(frames)), rng.choice(frames))
        elif damage == 4:
            del frames[rng.randrange(len(frames))]
        yield frames or [b""]


def private_nbytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


def test_hostile_messages(server: CacheServer, caplog: pytest.LogCaptureFixture) -> None:
    """It still answers, keeps its memory, and has registered and cached nothing that was not asked for properly."""
    rng = random.Random(1)
    arrays = layers()
    with RawClient(server.endpoint) as raw, RawClient(server.endpoint) as hostile:
        before = 0
        for number, frames in zip(range(NUM_MESSAGES), mutations(rng), strict=False):
            hostile.socket.send_multipart(frames)
            if number % 200 == 0:
                assert raw.ask(24) == ["OK"]
                while hostile.socket.poll(0):
                    hostile.socket.recv_multipart(zmq.NOBLOCK)
            if number == NUM_MESSAGES // 4:
                before = private_nbytes()
        assert raw.ask(24) == ["OK"]
        while hostile.socket.poll(0):
            hostile.socket.recv_multipart(zmq.NOBLOCK)
        assert private_nbytes() - before < 32 << 20
        # It still serves.
        raw.ask(20, True)
        assert raw.register(arrays, 5) == []
        expected = blocks_of(arrays, BLOCKS)
        assert raw.ask(6, key_map(TOKENS), 5, [BLOCKS], b"") == [[b"", True]]
        wipe(arrays)
        assert raw.ask(7, key_map(TOKENS), 5, [BLOCKS], b"", 0) == [[b"", True]]
        assert blocks_of(arrays, BLOCKS) == expected
    assert server.call(server.status)["messages"]["malformed"] > NUM_MESSAGES // 10
    unexpected = [record for record in caplog.records if record.levelname == "ERROR"]
    assert not unexpected, unexpected[0]


def test_a_message_cut_at_every_byte(server: CacheServer) -> None:
    """A store's key, cut: each is refused with a reason, none is stored."""
    with RawClient(server.endpoint) as raw:
        raw.register(layers())
        frames = [bytes(msgpack.packb(part)) for part in (3, 6, key_map(TOKENS), 1, [BLOCKS], b"h")]
        for length in range(len(frames[2])):
            raw.socket.send_multipart([*frames[:2], frames[2][:length], *frames[3:]])
            uid, operation, value, reason = raw.reply()
            assert (uid, operation, value) == (3, 6, [b"", False])
            assert "MessagePack" in reason
        assert server.call(server.status)["objects"]["cached"] == 0


def test_a_frame_too_large_ends_its_connection_only(server: CacheServer) -> None:
    with RawClient(server.endpoint) as raw, RawClient(server.endpoint) as huge:
        huge.socket.send_multipart([b"\x01", b"\x18", bytes(65 << 20)])
        for _ in range(10):
            assert raw.ask(24) == ["OK"]
        assert huge.ask(24) == ["OK"], "it connects again"


def test_a_peer_that_does_not_read_stops_nobody(server: CacheServer) -> None:
    with RawClient(server.endpoint) as raw, RawClient(server.endpoint) as deaf:
        deaf.socket.setsockopt(zmq.RCVHWM, 1)
        for _ in range(3000):
            deaf.send("kvshm_status")
            assert raw.ask(24) == ["OK"]


def test_nothing_in_the_package_unpickles() -> None:
    package = Path(kvshm.__file__).parent
    for path in package.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"\bpickle\.loads?\b|recv_pyobj|marshal\.loads|\bshelve\b|\beval\(|\bexec\(", text), path


def test_numpy_is_told_the_truth(server: CacheServer) -> None:
    """The pool's bytes belong to one array; an entry's bytes are a view of it."""
    assert server._pool.bytes.dtype == np.uint8
    assert server._pool.bytes.nbytes == server._pool.nbytes
