"""The client: engines that store, look up and retrieve; plain operations; deadlines; a server that is not there."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import zmq

import kvshm
from kvshm import wire
from kvshm.client.cache_client import CacheClient, CacheServerError, ServerTimeoutError, ServerUnreachableError
from kvshm.client.operations import KvshmServer, LMCacheServer
from kvshm.client.registration import Registration
from kvshm.client.requests import NotRegisteredError, Requests
from kvshm.client.sessions import Copies
from kvshm.layout import EngineGroupInfo
from kvshm.prefix import token_array
from kvshm.protocol import PROTOCOL_VERSION, CacheKey, EngineIdentity
from kvshm.server.cache_server import CacheServer
from kvshm.shm.liveness import Liveness
from tests.support.cache_server import (
    BLOCK,
    CHUNK,
    CHUNK_NBYTES,
    NHD,
    bits,
    blocks_of,
    key_map,
    layers,
    running_server,
    wipe,
)

TOKENS = list(range(100, 100 + 3 * CHUNK + 1))
BLOCKS = [4, 9, 2, 17, 30, 11, 22]  # with one for the last token
OTHER_BLOCKS = [21, 5, 13, 8, 1, 26]
MODES = ["lmcache_driven", "engine_driven"]


@pytest.fixture
def server() -> Iterator[CacheServer]:
    with running_server() as server:
        yield server


@pytest.fixture
def client(server: CacheServer) -> Iterator[CacheClient]:
    with CacheClient(server.endpoint) as client:
        yield client


def caches(mode: str, seed: int = 0, **changes: Any) -> list[Any]:
    arrays = layers(seed, **changes)
    return arrays if mode == "lmcache_driven" else [array.copy() for array in arrays]


@pytest.mark.parametrize("mode", MODES)
def test_store_lookup_retrieve(client: CacheClient, mode: Any) -> None:
    arrays = caches(mode)
    with client.register(arrays, "model", layout_hints=NHD, transfer_mode=mode) as engine:
        assert engine.lookup(TOKENS) == 0
        assert engine.store(TOKENS, BLOCKS) == 3 * CHUNK
        assert engine.lookup(TOKENS) == 3 * CHUNK
        assert engine.lookup(TOKENS[: 2 * CHUNK + 1]) == 2 * CHUNK
        assert engine.lookup([1, *TOKENS]) == 0
        expected = blocks_of(arrays, BLOCKS[:6])
        wipe(arrays)
        assert engine.retrieve(TOKENS, OTHER_BLOCKS) == 3 * CHUNK
        assert blocks_of(arrays, OTHER_BLOCKS) == expected
        assert engine.retrieve([1, *TOKENS], OTHER_BLOCKS) == 0
        assert engine.unsettled_block_ids() == [set()]


@pytest.mark.parametrize("mode", MODES)
def test_tokens_and_blocks_of_any_kind(client: CacheClient, mode: Any) -> None:
    arrays = caches(mode)
    with client.register(arrays, "model", layout_hints=NHD, transfer_mode=mode) as engine:
        assert engine.store(tuple(TOKENS), tuple(BLOCKS)) == 3 * CHUNK
        assert engine.store(np.array(TOKENS, np.int32), np.array(BLOCKS)) == 3 * CHUNK
        assert engine.store(TOKENS, [BLOCKS]) == 3 * CHUNK
        assert engine.store(TOKENS, [np.array(BLOCKS)]) == 3 * CHUNK
        assert engine.lookup(np.array(TOKENS, np.uint64)) == 3 * CHUNK
        assert engine.retrieve(TOKENS[:CHUNK], OTHER_BLOCKS[:2]) == CHUNK


@pytest.mark.parametrize("mode", MODES)
def test_less_than_a_chunk(client: CacheClient, mode: Any) -> None:
    with client.register(caches(mode), "model", layout_hints=NHD, transfer_mode=mode) as engine:
        assert engine.store(TOKENS[: CHUNK - 1], []) == 0
        assert engine.lookup(TOKENS[: CHUNK - 1]) == 0
        assert engine.lookup([]) == 0
        assert engine.retrieve(TOKENS[: CHUNK - 1], []) == 0


@pytest.mark.parametrize("mode", MODES)
def test_skip_first_n_tokens(client: CacheClient, mode: Any) -> None:
    arrays = caches(mode)
    with client.register(arrays, "model", layout_hints=NHD, transfer_mode=mode) as engine:
        engine.store(TOKENS, BLOCKS)
        expected = [array[:, BLOCKS[:6]].reshape(2, -1, 5, 7).view(np.uint16) for array in arrays]
        wipe(arrays)
        assert engine.retrieve(TOKENS, OTHER_BLOCKS, skip_first_n_tokens=CHUNK + 2) == 3 * CHUNK
        for array, want in zip(arrays, expected, strict=True):
            got = array[:, OTHER_BLOCKS].reshape(2, -1, 5, 7).view(np.uint16)
            assert not got[:, : CHUNK + 2].any()
            assert np.array_equal(got[:, CHUNK + 2 :], want[:, CHUNK + 2 :])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("tokens", "blocks", "text"),
    [
        (TOKENS, BLOCKS[:5], "3 chunks of 6 tokens take 6 blocks of kernel group 0, but 5 block ids came"),
        (TOKENS, [], "but 0 block ids came"),
        ([1.5] * CHUNK, BLOCKS, "token_ids must be a sequence of integers"),
        ([True] * CHUNK, BLOCKS, "a boolean"),
        (TOKENS, [1.5] * 6, "block_ids of kernel group 0 must be a sequence of integers"),
    ],
)
def test_what_the_caller_gets_wrong_raises(client: CacheClient, mode: Any, tokens: Any, blocks: Any, text: str) -> None:
    with client.register(caches(mode), "model", layout_hints=NHD, transfer_mode=mode) as engine:
        with pytest.raises(ValueError, match=text):
            engine.store(tokens, blocks)
        with pytest.raises(ValueError, match=text):
            engine.retrieve(tokens, blocks)
        with pytest.raises(ValueError, match="cannot be negative"):
            engine.retrieve(TOKENS, BLOCKS, skip_first_n_tokens=-1)
    status = client.status()
    assert status["objects"]["unfinished"] == status["objects"]["cached"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_engines_share(client: CacheClient, mode: Any) -> None:
    source, target = caches(mode, 1), caches(mode, 2)
    with (
        client.register(source, "model", layout_hints=NHD, transfer_mode=mode) as one,
        client.register(target, "model", layout_hints=NHD, transfer_mode=mode) as two,
        client.register(caches(mode), "model", layout_hints=NHD, transfer_mode=mode, cache_salt="x") as three,
        client.register(caches(mode), "else", layout_hints=NHD, transfer_mode=mode) as four,
    ):
        one.store(TOKENS, BLOCKS)
        assert two.lookup(TOKENS) == 3 * CHUNK
        assert two.retrieve(TOKENS, OTHER_BLOCKS) == 3 * CHUNK
        assert blocks_of(target, OTHER_BLOCKS) == blocks_of(source, BLOCKS[:6])
        assert (three.lookup(TOKENS), four.lookup(TOKENS)) == (0, 0)


def test_workers_of_one_model(client: CacheClient) -> None:
    def register(worker: int) -> Any:
        return client.register(layers(worker), "model", layout_hints=NHD, world_size=2, worker_id=worker)

    with register(0) as zero, register(1) as one:
        zero.store(TOKENS, BLOCKS)
        assert (zero.lookup(TOKENS), one.lookup(TOKENS)) == (0, 0), "one worker is not all"
        one.store(TOKENS[: 2 * CHUNK], BLOCKS)
        assert (zero.lookup(TOKENS), one.lookup(TOKENS)) == (2 * CHUNK, 2 * CHUNK)
        assert client.status()["lookups"]["pins"] == 4, "each locks its own"
        zero.retrieve(TOKENS[: 2 * CHUNK], OTHER_BLOCKS)
        one.retrieve(TOKENS[: 2 * CHUNK], OTHER_BLOCKS)
        assert client.status()["lookups"] == {"open": 0, "pins": 0}


def test_a_partial_retrieve_releases_all_its_locks(client: CacheClient) -> None:
    with client.register(layers(), "model", layout_hints=NHD) as engine:
        engine.store(TOKENS, BLOCKS)
        engine.lookup(TOKENS)
        assert engine.retrieve(TOKENS[:CHUNK], OTHER_BLOCKS) == CHUNK
        assert client.status()["lookups"] == {"open": 0, "pins": 0}


@pytest.mark.parametrize("mode", MODES)
def test_hybrid_models(client: CacheClient, mode: Any) -> None:
    """Full attention and a sliding window of one chunk: the window's older blocks are null by then."""
    arrays = [*caches(mode, 1), *caches(mode, 2)]
    infos = (
        EngineGroupInfo(0, (0, 1), BLOCK),
        EngineGroupInfo(1, (2, 3), BLOCK, sw_size_tokens=CHUNK),
    )
    with client.register(arrays, "model", layout_hints=NHD, engine_group_infos=infos, transfer_mode=mode) as engine:
        for array in arrays:
            array[:, 0] = 0
        full, window = BLOCKS[:6], [0, 0, 0, 0, 12, 15]
        assert engine.store(TOKENS, [full, window]) == 3 * CHUNK
        assert engine.lookup(TOKENS) == 3 * CHUNK
        assert engine.lookup(TOKENS[: 2 * CHUNK]) == 0, "the window of a shorter prefix is not there"
        expected = (blocks_of(arrays[:2], full), blocks_of(arrays[2:], window[4:]))
        wipe(arrays)
        target = [0, 0, 0, 0, 7, 3]
        assert engine.retrieve(TOKENS, [OTHER_BLOCKS, target]) == 3 * CHUNK
        assert (blocks_of(arrays[:2], OTHER_BLOCKS), blocks_of(arrays[2:], target[4:])) == expected
        assert not any(array[:, 0].any() for array in arrays)
        with pytest.raises(ValueError, match="engine group 1 has no block ids"):
            engine.store(TOKENS, full)


@pytest.mark.parametrize("mode", MODES)
def test_layers_of_different_sizes_without_groups(client: CacheClient, mode: Any) -> None:
    """Two kernel groups of one engine group: one list of block ids is for both."""
    shapes = [(2, 31, BLOCK, 5, 7)] * 2 + [(2, 31, BLOCK, 2, 11)]
    arrays: list[Any] = kvshm.empty_many(shapes, ["float16"] * 3)
    for array in arrays:
        bits(array)[...] = np.arange(array.nbytes) % 251
    if mode == "engine_driven":
        arrays = [array.copy() for array in arrays]
    with client.register(arrays, "model", layout_hints=NHD, transfer_mode=mode) as engine:
        assert engine.store(TOKENS, BLOCKS) == 3 * CHUNK
        expected = blocks_of(arrays, BLOCKS[:6])
        wipe(arrays)
        assert engine.retrieve(TOKENS, [OTHER_BLOCKS]) == 3 * CHUNK
        assert blocks_of(arrays, OTHER_BLOCKS) == expected


@pytest.mark.parametrize("mode", MODES)
def test_groups_of_different_dtypes(client: CacheClient, mode: Any) -> None:
    arrays = caches(mode, 1)
    other = np.arange(2 * 31 * BLOCK * 3 * 2, dtype=np.float32).reshape(2, 31, BLOCK, 3, 2)
    arrays.append(kvshm.share(other) if mode == "lmcache_driven" else other)
    infos = (EngineGroupInfo(0, (0, 1), BLOCK), EngineGroupInfo(1, (2,), BLOCK))
    with client.register(arrays, "model", layout_hints=NHD, engine_group_infos=infos, transfer_mode=mode) as engine:
        assert engine.store(TOKENS, [BLOCKS, [1, 2, 0, 4, 0, 6]]) == CHUNK, "a chunk with a null block has no data"
        assert engine.store(TOKENS, [BLOCKS, [1, 2, 3, 4, 5, 6]]) == 3 * CHUNK
        expected = (blocks_of(arrays[:2], BLOCKS[:6]), blocks_of(arrays[2:], [1, 2, 3, 4, 5, 6]))
        wipe(arrays)
        assert engine.retrieve(TOKENS, [OTHER_BLOCKS, [6, 5, 4, 3, 2, 1]]) == 3 * CHUNK
        assert (blocks_of(arrays[:2], OTHER_BLOCKS), blocks_of(arrays[2:], [6, 5, 4, 3, 2, 1])) == expected


@pytest.mark.parametrize("mode", MODES)
def test_block_ids_out_of_range(client: CacheClient, mode: Any) -> None:
    with client.register(caches(mode), "model", layout_hints=NHD, transfer_mode=mode) as engine:
        for ids in ([*BLOCKS[:5], 31], [*BLOCKS[:5], -1]):
            with pytest.raises(ValueError, match=r"has blocks \[0, 31\)"):
                engine.store(TOKENS, ids)
    assert client.status()["objects"]["cached"] == 0


def test_all_bits_survive(client: CacheClient) -> None:
    """NaNs with payloads too."""
    arrays = layers(dtype="bfloat16")
    for array in arrays:
        bits(array).view(np.uint16)[...] = np.arange(bits(array).size // 2, dtype=np.uint16) | 0x7F80
    with client.register(arrays, "model", layout_hints=NHD) as engine:
        engine.store(TOKENS, BLOCKS)
        expected = blocks_of(arrays, BLOCKS[:6])
        wipe(arrays)
        engine.retrieve(TOKENS, BLOCKS)
        assert blocks_of(arrays, BLOCKS[:6]) == expected


# Registering


def test_arrays_that_are_not_shared(client: CacheClient) -> None:
    with pytest.raises(ValueError, match=r"kvshm\.share"):
        client.register([np.zeros((2, 3, BLOCK, 5, 7), np.float16)], "model", layout_hints=NHD)


def test_descriptors_register_as_arrays_do(client: CacheClient) -> None:
    arrays = layers()
    wrappers = [kvshm.wrap(array) for array in arrays]
    with client.register(wrappers, "model", layout_hints=NHD) as engine:
        assert engine.store(TOKENS, BLOCKS) == 3 * CHUNK


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"transfer_mode": "magic"}, "give 'lmcache_driven' or 'engine_driven'"),
        ({"world_size": True}, "invalid world_size: expected an integer, got True"),
        ({"worker_id": False}, "invalid worker_id: expected an integer, got False"),
        ({"worker_id": 1}, r"worker_id 1 is not in \[0, world_size 1\)"),
        ({"engine_type": "nothing"}, "unknown engine 'nothing'"),
        ({"kv_caches": [3]}, "kv_caches holds int"),
        ({"kv_caches": []}, "at least one layer"),
        ({"cache_salt": "a@b"}, "none of @"),
    ],
)
def test_a_wrong_registration(client: CacheClient, changes: dict[str, Any], text: str) -> None:
    arguments = {"kv_caches": layers(), "model_name": "model", "layout_hints": NHD} | changes
    with pytest.raises(ValueError, match=text):
        client.register(**arguments)
    assert client.status()["instances"] == []


def test_a_chunk_size_that_does_not_fit() -> None:
    with running_server(chunk_size=544) as server, CacheClient(server.endpoint) as client:
        arrays = kvshm.empty_many([(2, 3, 256, 1, 2)], ["float16"])
        with pytest.raises(ValueError, match="multiples of 256"):
            client.register(arrays, "model", layout_hints=NHD)


def test_unregister_is_idempotent(client: CacheClient) -> None:
    engine = client.register(layers(), "model", layout_hints=NHD)
    assert engine.is_registered
    engine.unregister()
    engine.unregister()
    assert client.status()["instances"] == []
    assert (engine.store(TOKENS, BLOCKS), engine.lookup(TOKENS)) == (0, 0)
    assert client.status()["instances"] == [], "what was unregistered does not come back by itself"


def test_closing_the_client_unregisters(server: CacheServer) -> None:
    client = CacheClient(server.endpoint)
    client.register(layers(), "model", layout_hints=NHD)
    client.close()
    client.close()
    assert server.call(server.status)["instances"] == []
    with pytest.raises(ValueError, match="the cache client is closed"):
        client.noop()


def test_a_dropped_client_is_closed(server: CacheServer) -> None:
    client = CacheClient(server.endpoint)
    client.noop()
    del client
    with CacheClient(server.endpoint) as other:
        other.noop()


# Plain operations


def test_plain_operations(client: CacheClient) -> None:
    arrays = layers()
    assert client.noop() == "OK"
    assert client.ping() is client.ping(5) is True
    assert client.get_chunk_size() == CHUNK
    assert client.get_experimental() == []
    client.report_block_allocation(1, "model", [{"req_id": "r", "new_block_ids": [], "new_token_ids": []}])
    client.register_kv_cache(5, [kvshm.wrap(array) for array in arrays], "model", 1, "vllm", NHD)
    key = key_map(TOKENS)
    assert client.store(key, 5, [BLOCKS[:6]]) == (b"kvshm", True)
    lookup_key = CacheKey("model", 1, None, token_array(TOKENS), 0, 3 * CHUNK, "request", num_kv_readers=1)
    client.lookup(lookup_key)
    assert client.wait_prefetch_status("request", 1.0) == 3
    assert client.query_prefetch_status("request") == 0
    assert client.retrieve(key, 5, [OTHER_BLOCKS], b"h", 1) == (b"h", True)
    client.free_lookup_locks(lookup_key)
    client.end_session("request")
    client.clear()
    client.clear(force=True)
    client.unregister_kv_cache(5)
    where = client.register_kv_cache_engine_driven_context(
        {
            "instance_id": 6,
            "model_name": "model",
            "world_size": 1,
            "block_size": 3,
            "num_layers": 1,
            "hidden_dim_size": 5,
            "dtype_str": "uint8",
            "use_mla": True,
        }
    )
    assert where["pool_size"] > 0
    assert client.prepare_store(key, 6)["context"]["chunk_indices"] == [0, 1, 2]
    assert client.commit_store(key, 6) is True
    assert client.prepare_retrieve(key, 6)["success"] is True
    assert client.commit_retrieve(key, 6) is True
    client.unregister_kv_cache_engine_driven_context(6)
    assert isinstance(client.server_info(), KvshmServer)


def test_many_plain_lookups_at_once(client: CacheClient) -> None:
    """A client may have several connections; its lookups are its own whatever they are made on."""
    engine = client.register(layers(), "model", layout_hints=NHD)
    engine.store(TOKENS, BLOCKS)
    with contextlib.ExitStack() as taken:
        for number in range(200):
            client.lookup(key_map(TOKENS, worker_id=None, request_id=str(number)))
            if number % 50 == 0:  # another connection from here on
                connection = client._connections.take()
                taken.callback(client._connections.give, connection)
        assert {client.query_prefetch_status(str(number)) for number in range(200)} == {3}
    for number in range(200):
        client.end_session(str(number))


def test_a_plain_operation_raises_the_servers_reason(client: CacheClient) -> None:
    with pytest.raises(CacheServerError, match="store: instance 5 is not registered"):
        client.store(key_map(TOKENS), 5, [BLOCKS])
    with pytest.raises(CacheServerError, match="needs at least 1 reader"):
        client.lookup(key_map(TOKENS, worker_id=None, num_kv_readers=0))


@pytest.mark.parametrize(
    "url",
    [
        "localhost:5555",
        "",
        "udp://127.0.0.1:1",
        "tcp://\ud800:1",
        None,
        b"tcp://127.0.0.1:1",
        "tcp://",
        "tcp://x",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:",
        "tcp://127.0.0.1:abc",
        "tcp://127.0.0.1:-1",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:99999",
        "tcp://127.0.0.1:1/x",
        "tcp://a b:1",
        "tcp://*:5",
        "tcp://\xe9:1",
        "tcp://:1",
        "tcp://::1:5",
        "tcp://[::1]",
        "ipc://",
        "ipc:///" + 107 * "x",
    ],
)
def test_no_url(url: Any) -> None:
    with pytest.raises(ValueError, match="expected tcp://HOST:PORT or ipc://PATH"):
        CacheClient(url)


@pytest.mark.parametrize(
    "url", ["tcp://127.0.0.1:1", "tcp://localhost:65535", "tcp://a-b_c.d:1", "ipc:///" + 106 * "x"]
)
def test_urls_of_nobody(url: str) -> None:
    with CacheClient(url, connect_timeout_s=0.05) as client, pytest.raises(ServerUnreachableError):
        client.server_info()


def test_what_zeromq_refuses_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its context would wait for ever for a socket that is not closed."""
    connections: Any = importlib.import_module("kvshm.client.connections")
    monkeypatch.setattr(connections, "checked_url", str)
    monkeypatch.setattr(importlib.import_module("kvshm.client.cache_client"), "checked_url", str)
    with CacheClient("tcp://127.0.0.1") as client, pytest.raises(ServerUnreachableError, match="cannot connect to tcp"):
        client.server_info()


@pytest.mark.parametrize("name", ["timeout_s", "connect_timeout_s", "heartbeat_s", "probe_timeout_s", "retry_s"])
def test_times_are_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        CacheClient("tcp://127.0.0.1:1", **{name: 0})  # type: ignore[arg-type]  # which it is is not known here


# A server that is not there, or does not answer


def free_port() -> int:
    with zmq.Context() as context, context.socket(zmq.REP) as sock:
        return int(sock.bind_to_random_port("tcp://127.0.0.1"))


def test_nobody_is_there() -> None:
    with CacheClient(f"tcp://127.0.0.1:{free_port()}", connect_timeout_s=0.05) as client:
        with pytest.raises(ServerUnreachableError, match="start one with kvshm serve"):
            client.noop()
        with pytest.raises(ServerUnreachableError, match="start one with kvshm serve"):
            client.register(layers(), "model", layout_hints=NHD)


@contextmanager
def silent_server(answers: dict[Any, list[Any]] | None = None, asked: list[Any] | None = None) -> Iterator[str]:
    """Takes requests and answers only some operations; as a stopped server, or a real LMCache's failed handler.

    ``asked`` gets the operations that were asked for.
    """
    context = zmq.Context()
    sock = context.socket(zmq.ROUTER)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.RCVTIMEO, 20)
    port = sock.bind_to_random_port("tcp://127.0.0.1")
    stopping = threading.Event()

    def run() -> None:
        while not stopping.is_set():
            try:
                address, uid, operation, *_ = sock.recv_multipart()
            except zmq.Again:
                continue
            name = wire.unpack(operation)
            if asked is not None:
                asked.append(name)
            if answers and name in answers:
                sock.send_multipart([address, uid, operation, *map(wire.pack, answers[name])])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        stopping.set()
        thread.join()
        sock.close()
        context.term()


def test_a_server_that_does_not_answer() -> None:
    with silent_server() as url, CacheClient(url, timeout_s=0.1) as client:
        with pytest.raises(ServerTimeoutError, match="did not answer noop in time"):
            client.noop()
        with pytest.raises(ServerTimeoutError, match="did not answer ping in time"):
            client.ping(timeout_s=0.05)


def test_a_late_reply_is_not_anothers() -> None:
    """The connection that a request timed out on is not used again."""
    with silent_server({24: ["OK"]}) as url, CacheClient(url, timeout_s=0.05) as client:
        for _ in range(3):
            with pytest.raises(ServerTimeoutError):
                client.get_chunk_size()
            assert client.noop(timeout_s=5.0) == "OK"


def test_a_server_without_hello_is_lmcaches() -> None:
    """LMCache drops unknown operations without a word; the question that follows tells, and nothing waits."""
    with silent_server({21: [16]}) as url, CacheClient(url, timeout_s=60.0) as client:
        info = client.server_info()
        assert info == LMCacheServer(16)


def test_another_version() -> None:
    hello = {"version": "9.9", "protocol": 99}
    with (
        silent_server({21: [16], "kvshm_hello": [hello]}) as url,
        CacheClient(url) as client,
        pytest.raises(CacheServerError, match=r"kvshm 9\.9 and speaks protocol 99.*this client is kvshm"),
    ):
        client.server_info()


def test_garbage_from_the_server() -> None:
    with (
        silent_server({21: []}) as url,
        CacheClient(url) as client,
        pytest.raises(CacheServerError, match="get_chunk_size: the server answered None, which makes no sense"),
    ):
        client.get_chunk_size()


HELLO = {
    "version": "1",
    "protocol": PROTOCOL_VERSION,
    "epoch": "x",
    "chunk_size": CHUNK,
    "clock_ns": 0,
    "null_block_id": 0,
}


@pytest.fixture
def hello() -> Iterator[dict[str, Any]]:
    """What a server says of itself."""
    liveness = Liveness()
    yield HELLO | {"liveness": liveness.name}
    liveness.close()


@pytest.mark.parametrize("odd", [None, -1, 4, 2**70, "2", 1.5, [], [b"", True], {}])
def test_odd_replies_are_misses(hello: dict[str, Any], odd: Any) -> None:
    """There are three chunks."""
    if odd == 2**70:
        odd = 2**64 - 1
    answers: dict[Any, Any] = {
        21: [CHUNK],
        "kvshm_hello": [hello],
        "kvshm_register_server_driven": [],
        "kvshm_unregister": [],
        22: [True],
        "kvshm_store": [odd],
        "kvshm_count": [odd],
        "kvshm_retrieve": [odd],
        "kvshm_lookup": [odd],
    }
    with silent_server(answers) as url, CacheClient(url) as client:
        engine = client.register(layers(), "model", layout_hints=NHD)
        assert engine.store(TOKENS, BLOCKS) == engine.lookup(TOKENS) == engine.retrieve(TOKENS, BLOCKS) == 0
        assert client.is_up
        assert client.last_error is not None


@pytest.mark.parametrize(
    "odd",
    [
        None,
        7,
        [],
        [[[0, 0]], [[0, 0]]],
        [[[0]]],
        [[0]],
        [[[0, -1], [1, 0], [2, 0]]],
        [[[0, 0], [1, 0], [3, 0]]],
        [[[0, 0], [0, 0], [1, 0]]],
        [[[0, 4000], [1, 4000], [2, 4000]]],
        {"slots": 3},
    ],
)
def test_odd_slots_are_misses(hello: dict[str, Any], odd: Any, segment_name: str) -> None:
    """Three chunks of one object group; the pool has no 4000 bytes and a chunk."""
    given_back: list[Any] = []
    with kvshm.Segment.create(4096, segment_name):
        answers: dict[Any, Any] = {
            21: [CHUNK],
            "kvshm_hello": [hello],
            "kvshm_register_engine_driven": [{"shm_name": segment_name, "pool_size": 4096}],
            "kvshm_unregister": [],
            "kvshm_prepare_store": [odd if isinstance(odd, dict) else {"slots": odd, "found": 3}],
            "kvshm_commit_store": [3],
            "kvshm_prepare_retrieve": [odd],
            "kvshm_commit_retrieve": [True],
            "kvshm_give_back": [],
            "kvshm_count": [0],
            22: [True],
        }
        with silent_server(answers, given_back) as url, CacheClient(url, timeout_s=5.0) as client:
            engine = client.register(caches("engine_driven"), "model", layout_hints=NHD, transfer_mode="engine_driven")
            assert engine.store(TOKENS, BLOCKS) == engine.retrieve(TOKENS, BLOCKS) == 0
            assert client.is_up
            engine.unregister()
    assert given_back.count("kvshm_give_back") == 2, "whatever it was that was lent"
    assert "kvshm_commit_store" not in given_back


def test_slots_that_were_not_asked_for_are_misses(hello: dict[str, Any], segment_name: str) -> None:
    """The second chunk has no data."""
    with kvshm.Segment.create(1 << 16, segment_name):
        answers: dict[Any, Any] = {
            21: [CHUNK],
            "kvshm_hello": [hello],
            "kvshm_register_engine_driven": [{"shm_name": segment_name, "pool_size": 1 << 16}],
            "kvshm_unregister": [],
            "kvshm_prepare_store": [{"slots": [[[0, 0], [1, CHUNK_NBYTES], [2, 2 * CHUNK_NBYTES]]], "found": 3}],
            "kvshm_prepare_retrieve": [[[[0, 0], [1, CHUNK_NBYTES]]]],
            "kvshm_give_back": [],
            "kvshm_count": [0],
            22: [True],
        }
        with silent_server(answers) as url, CacheClient(url, timeout_s=5.0) as client:
            engine = client.register(caches("engine_driven"), "model", layout_hints=NHD, transfer_mode="engine_driven")
            assert engine.store(TOKENS, [1, 2, 0, 4, 5, 6]) == 0
            assert "lent slots for chunks [0, 1, 2] of object group 0, but was asked for [0, 2]" in str(
                client.last_error
            )
            assert engine.retrieve(TOKENS, BLOCKS) == 0
            text = "lent slots for chunks [0, 1] of object group 0, but a retrieve needs [0, 1, 2]"
            assert text in str(client.last_error)
            engine.unregister()


@pytest.mark.parametrize(
    "changes", [{"clock_ns": None}, {"chunk_size": "6"}, {"null_block_id": "0"}, {"liveness": None}, {"epoch": 1}]
)
def test_odd_hellos(hello: dict[str, Any], changes: dict[str, Any]) -> None:
    answers: dict[Any, Any] = {21: [CHUNK], "kvshm_hello": [hello | changes]}
    with silent_server(answers) as url, CacheClient(url) as client:  # noqa: SIM117
        with pytest.raises(CacheServerError, match=r"kvshm_hello: the server answered .* makes no sense"):
            client.server_info()


@pytest.mark.parametrize("name", ["/kvshm_gone", "", "no/name"])
def test_a_server_whose_liveness_cannot_be_seen(hello: dict[str, Any], name: str) -> None:
    answers: dict[Any, Any] = {21: [CHUNK], "kvshm_hello": [hello | {"liveness": name}]}
    with silent_server(answers) as url, CacheClient(url) as client:  # noqa: SIM117
        with pytest.raises(CacheServerError, match="the server's liveness segment cannot be opened"):
            client.register(layers(), "model", layout_hints=NHD)


def test_a_pool_that_is_too_small(hello: dict[str, Any], segment_name: str) -> None:
    answers: dict[Any, Any] = {
        21: [CHUNK],
        "kvshm_hello": [hello],
        "kvshm_register_engine_driven": [{"shm_name": segment_name, "pool_size": 8192}],
    }
    with (
        kvshm.Segment.create(4096, segment_name),
        silent_server(answers) as url,
        CacheClient(url) as client,
        pytest.raises(CacheServerError, match=f"the server's pool '{segment_name}' of 8192 bytes cannot be mapped"),
    ):
        client.register(caches("engine_driven"), "model", layout_hints=NHD, transfer_mode="engine_driven")


def test_the_engine_goes_on_while_the_server_is_away(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    arrays = layers()
    caplog.set_level(logging.WARNING, "kvshm")
    with CacheClient(f"tcp://127.0.0.1:{port}", heartbeat_s=0.05) as client:
        with running_server(endpoint=f"tcp://127.0.0.1:{port}"):
            engine = client.register(arrays, "model", layout_hints=NHD)
            assert engine.store(TOKENS, BLOCKS) == 3 * CHUNK
        deadline = time.monotonic() + 20
        while client.is_up and time.monotonic() < deadline:
            engine.lookup(TOKENS)
        assert not client.is_up
        started = time.monotonic()
        for _ in range(1000):
            assert engine.store(TOKENS, BLOCKS) == engine.lookup(TOKENS) == engine.retrieve(TOKENS, BLOCKS) == 0
        assert time.monotonic() - started < 10, "nothing waits for an absent server"
        with running_server(endpoint=f"tcp://127.0.0.1:{port}"):
            while not engine.is_registered:
                assert time.monotonic() < deadline
            assert engine.lookup(TOKENS) == 0
            assert engine.store(TOKENS, BLOCKS) == 3 * CHUNK
            assert engine.lookup(TOKENS) == 3 * CHUNK
            engine.unregister()
    messages = [record.message for record in caplog.records]
    assert "going on without the cache server" in messages[0]
    assert "is back" in messages[1]
    assert len(messages) <= 3, "and once more after the second server"


def test_a_restart_that_no_heartbeat_saw() -> None:
    port = free_port()
    with CacheClient(f"tcp://127.0.0.1:{port}", heartbeat_s=1000.0) as client:
        with running_server(endpoint=f"tcp://127.0.0.1:{port}"):
            engines = [
                client.register(caches(mode), "model", layout_hints=NHD, transfer_mode=mode)  # type: ignore[arg-type]
                for mode in MODES
            ]
        with running_server(endpoint=f"tcp://127.0.0.1:{port}"):
            for engine in engines:
                assert engine.store(TOKENS, BLOCKS) == 3 * CHUNK
                assert engine.retrieve(TOKENS, OTHER_BLOCKS) == 3 * CHUNK
                engine.unregister()


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_registers_after_a_restart_that_nobody_saw(mode: Any) -> None:
    """What the client knows of the server is of one that has ended, whose segments are swept."""
    port = free_port()
    with CacheClient(f"tcp://127.0.0.1:{port}", heartbeat_s=1000.0) as client:
        with running_server(endpoint=f"tcp://127.0.0.1:{port}"):
            client.server_info()
        with running_server(endpoint=f"tcp://127.0.0.1:{port}"):
            engine = client.register(caches(mode), "model", layout_hints=NHD, transfer_mode=mode)
            assert engine.store(TOKENS, BLOCKS) == 3 * CHUNK
            engine.unregister()


def test_one_refused_engine_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with CacheClient(f"tcp://127.0.0.1:{port}", heartbeat_s=0.05) as client:
        gone = layers()
        with running_server(endpoint=f"tcp://127.0.0.1:{port}"):
            refused = client.register(gone, "model", layout_hints=NHD)
            engine = client.register(layers(), "model", layout_hints=NHD)
        for name in {kvshm.wrap(array).shm_name for array in gone}:
            os.unlink(f"/dev/shm{name}")
        with running_server(endpoint=f"tcp://127.0.0.1:{port}"):
            deadline = time.monotonic() + 20
            while len(client.status()["instances"]) != 1 if client.is_up else True:
                assert time.monotonic() < deadline
            while not engine.is_registered:
                assert time.monotonic() < deadline
            assert engine.store(TOKENS, BLOCKS) == 3 * CHUNK
            assert refused.store(TOKENS, BLOCKS) == 0
            assert not refused.is_registered
            assert client.is_up
            assert engine.lookup(TOKENS) == 3 * CHUNK
            assert engine.retrieve(TOKENS, BLOCKS) == 3 * CHUNK
    text = f"instance {refused.instance_id} goes on without cache: kvshm_register_server_driven: there is no segment"
    assert caplog.text.count(text) == 1


def test_an_engine_that_meets_a_new_server_first_hides_it_from_nobody() -> None:
    port = free_port()
    with CacheClient(f"tcp://127.0.0.1:{port}", heartbeat_s=1000.0) as client:
        with running_server(endpoint=f"tcp://127.0.0.1:{port}"):
            first, second = (client.register(layers(), "model", layout_hints=NHD) for _ in range(2))
        with running_server(endpoint=f"tcp://127.0.0.1:{port}"):
            assert first.store(TOKENS, BLOCKS) == 3 * CHUNK
            assert len(client.status()["instances"]) == 1
            client._link._events.put(None)
            deadline = time.monotonic() + 20
            while len(client.status()["instances"]) != 2:
                assert time.monotonic() < deadline
            first.unregister()
            second.unregister()


def test_slots_of_a_server_that_is_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that outlasts its server writes into nothing of the next one, which has a pool of the same name."""
    port, name = free_port(), f"/kvshm_test_{os.urandom(6).hex()}"
    settings: dict[str, Any] = {"endpoint": f"tcp://127.0.0.1:{port}", "pool_name": name}
    arrays, others = caches("engine_driven", 1), caches("engine_driven", 2)
    with CacheClient(f"tcp://127.0.0.1:{port}", heartbeat_s=1000.0) as client, contextlib.ExitStack() as copying:
        with running_server(**settings) as server:
            engine = client.register(arrays, "model", layout_hints=NHD, transfer_mode="engine_driven")
            stored, go_on = copying.enter_context(held_gather(monkeypatch, engine))
            server.call(server._state.loans.end_all)
        with running_server(**settings), CacheClient(f"tcp://127.0.0.1:{port}") as other:
            second = other.register(others, "model", layout_hints=NHD, transfer_mode="engine_driven")
            tokens = [token + 1 for token in TOKENS]
            assert second.store(tokens, BLOCKS) == 3 * CHUNK
            go_on.set()
            copying.close()
            assert stored == [3 * CHUNK], "stored anew, with the server that is there"
            wanted = [blocks_of(others, BLOCKS[:6]), blocks_of(arrays, BLOCKS[:6])]
            wipe(others)
            for prompt, expected in zip((tokens, TOKENS), wanted, strict=True):
                assert second.retrieve(prompt, OTHER_BLOCKS) == 3 * CHUNK
                assert blocks_of(others, OTHER_BLOCKS) == expected
            second.unregister()
            engine.unregister()


def test_a_server_that_goes_away_is_not_waited_for() -> None:
    context = zmq.Context()
    sock = context.socket(zmq.ROUTER)
    sock.setsockopt(zmq.LINGER, 0)
    port = sock.bind_to_random_port("tcp://127.0.0.1")

    def run() -> None:
        sock.recv_multipart()
        sock.close()

    thread = threading.Thread(target=run)
    thread.start()
    with CacheClient(f"tcp://127.0.0.1:{port}") as client:  # noqa: SIM117
        with pytest.raises(ServerUnreachableError, match="went away before it answered noop"):
            client.noop(timeout_s=200.0)
    thread.join()
    context.term()


def test_no_copy_begins_after_the_end() -> None:
    copies = Copies(7)
    with copies.running():
        assert copies.end(0.0) is None, "one still runs"
    assert copies.end(5.0) is not None
    with pytest.raises(NotRegisteredError, match="instance 7 was unregistered"), copies.running():
        pass


def test_what_cannot_be_given_back_is_given_back_later(server: CacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: Any = importlib.import_module("kvshm.client.kvshm_server")
    ask = Requests.ask
    lost: list[str] = []

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    def lossy(requests: Requests, operation: str, *payload: Any, **how: Any) -> Any:
        if operation == "kvshm_give_back" and len(lost) < 2:
            lost.append(operation)
            raise ServerTimeoutError("it is slow")
        return ask(requests, operation, *payload, **how)

    with CacheClient(server.endpoint, heartbeat_s=1000.0) as client:
        arrays = caches("engine_driven")
        engine = client.register(arrays, "model", layout_hints=NHD, transfer_mode="engine_driven")
        copies = engine._registration._copies
        with monkeypatch.context() as patch:
            patch.setattr(sessions, "gather_chunks", interrupted)
            patch.setattr(Requests, "ask", lossy)
            with pytest.raises(KeyboardInterrupt):
                engine.store(TOKENS, BLOCKS)
            assert (client.status()["objects"]["unfinished"], len(copies.owed)) == (3, 1)
            engine._registration.settle()
            assert (client.status()["objects"]["unfinished"], len(copies.owed)) == (3, 1), "not this time either"
            engine._registration.settle()
        assert (client.status()["objects"]["unfinished"], len(copies.owed)) == (0, 0)
        engine.unregister()


@pytest.mark.parametrize("mode", MODES)
def test_of_a_prompt_too_long_for_a_request_the_first_chunks_are_stored(
    client: CacheClient, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    module: Any = importlib.import_module("kvshm.client.engine")
    arrays = caches(mode)
    with client.register(arrays, "model", layout_hints=NHD, transfer_mode=mode) as engine:
        for name, most in (("MAX_TOKENS", 2 * CHUNK + 1), ("MAX_BLOCK_IDS", 2 * (CHUNK // BLOCK) + 1)):
            with monkeypatch.context() as patch:
                patch.setattr(module, name, most)
                tokens = [most, *TOKENS[1:]]
                assert engine.store(tokens, BLOCKS) == 2 * CHUNK
                assert engine.lookup(tokens) == 2 * CHUNK
                engine.release()
                before = client.status()["messages"]["requests"]
                assert engine.retrieve(tokens, OTHER_BLOCKS) == 0
                assert client.status()["messages"]["requests"] == before + 1, "nothing was asked but this"
                assert engine.retrieve(tokens[: 2 * CHUNK], OTHER_BLOCKS) == 2 * CHUNK


@pytest.mark.parametrize("mode", MODES)
def test_a_session_with_a_server_that_has_gone_keeps_nothing_of_it(mode: Any) -> None:
    port = free_port()
    with CacheClient(f"tcp://127.0.0.1:{port}", heartbeat_s=1000.0) as client:
        with running_server(endpoint=f"tcp://127.0.0.1:{port}"):
            engine = client.register(caches(mode), "model", layout_hints=NHD, transfer_mode=mode)
            session: Any = engine._registration.session
        with running_server(endpoint=f"tcp://127.0.0.1:{port}"):
            assert engine.store(TOKENS, BLOCKS) == 3 * CHUNK
            assert engine._registration.session is not session
            assert getattr(session, "_pool", None) is None
            engine.unregister()


def test_errors_on_request() -> None:
    port = free_port()
    with CacheClient(f"tcp://127.0.0.1:{port}", raises=True, connect_timeout_s=0.1, heartbeat_s=1000.0) as client:
        with running_server(endpoint=f"tcp://127.0.0.1:{port}"):
            engine = client.register(layers(), "model", layout_hints=NHD)
            with pytest.raises(CacheServerError, match="3 of 3 chunks are not cached"):
                engine.retrieve(TOKENS, BLOCKS)
        for call in (engine.store, engine.retrieve, engine.store):
            with pytest.raises(ServerUnreachableError):
                call(TOKENS, BLOCKS)
        with pytest.raises(ServerUnreachableError, match=r"the cache server is away: no|the cache server is away: the"):
            engine.lookup(TOKENS)
        engine.unregister()
        assert engine.lookup(TOKENS) == 0, "that is nothing that went wrong with the server"


def test_another_chunk_size_after_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with CacheClient(f"tcp://127.0.0.1:{port}", heartbeat_s=1000.0) as client:
        with running_server(endpoint=f"tcp://127.0.0.1:{port}"):
            engine = client.register(layers(), "model", layout_hints=NHD)
        with running_server(endpoint=f"tcp://127.0.0.1:{port}", chunk_size=2 * CHUNK):
            assert engine.store(TOKENS, BLOCKS) == 0
            assert not engine.is_registered
    assert f"chunks of {2 * CHUNK} tokens, but this engine is registered for chunks of {CHUNK}" in caplog.text


@contextmanager
def held_gather(monkeypatch: pytest.MonkeyPatch, engine: Any) -> Iterator[tuple[list[int], threading.Event]]:
    """An engine that is in the middle of copying into slots of the pool; what its store gives, and what lets it go."""
    sessions: Any = importlib.import_module("kvshm.client.kvshm_server")
    copying, go_on = threading.Event(), threading.Event()
    real = sessions.gather_chunks

    def slow(*args: Any) -> None:
        if args[0] is engine._registration.session._context:
            copying.set()
            assert go_on.wait(20)
        real(*args)

    stored: list[int] = []
    monkeypatch.setattr(sessions, "gather_chunks", slow)
    thread = threading.Thread(target=lambda: stored.append(engine.store(TOKENS, BLOCKS)))
    thread.start()
    assert copying.wait(20)
    try:
        yield stored, go_on
    finally:
        go_on.set()
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("farewell", ["unregister", "close"])
def test_slots_under_a_copy_are_not_given_back(
    server: CacheServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, farewell: str
) -> None:
    """A copy that outlasts its engine's farewell writes into slots that are nobody else's."""
    arrays, others = caches("engine_driven", 1), caches("engine_driven", 2)
    with CacheClient(server.endpoint, timeout_s=0.3) as client, CacheClient(server.endpoint) as other:
        engine = client.register(arrays, "model", layout_hints=NHD, transfer_mode="engine_driven")
        second = other.register(others, "model", layout_hints=NHD, transfer_mode="engine_driven")
        with held_gather(monkeypatch, engine) as (stored, _):
            (engine if farewell == "unregister" else client).__exit__(None, None, None)
            assert "still copies, so it is not unregistered" in caplog.text
            status = other.status()
            assert (len(status["instances"]), status["objects"]["unfinished"]) == (2, 3)
            tokens = [token + 1 for token in TOKENS]
            assert second.store(tokens, BLOCKS) == 3 * CHUNK
            # The server drops it by itself.
            other.unregister_kv_cache_engine_driven_context(engine.instance_id)
        assert stored == [0]
        assert engine.store(TOKENS, BLOCKS) == 0
        assert [one["instance_id"] for one in other.status()["instances"]] == [second.instance_id], "it stays away"
        wanted = blocks_of(others, BLOCKS[:6])
        wipe(others)
        assert second.retrieve(tokens, OTHER_BLOCKS) == 3 * CHUNK
        if farewell == "unregister":
            assert blocks_of(others, OTHER_BLOCKS) != blocks_of(arrays, BLOCKS[:6])
        assert blocks_of(others, OTHER_BLOCKS) == wanted


def test_unregister_waits_for_the_copies_of_this_process(server: CacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with CacheClient(server.endpoint) as client:
        engine = client.register(caches("engine_driven"), "model", layout_hints=NHD, transfer_mode="engine_driven")
        with held_gather(monkeypatch, engine) as (stored, go_on):
            leaving = threading.Thread(target=engine.unregister)
            leaving.start()
            assert client.status()["objects"]["unfinished"] == 3
            go_on.set()
            leaving.join(20)
        assert stored == [3 * CHUNK]
        assert client.status()["instances"] == []


def test_timed_out_blocks_are_unsettled(server: CacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that its client gave up waiting for still runs; its blocks are nobody else's until it ends."""
    copies: Any = importlib.import_module("kvshm.server.server_driven")
    go_on, running = threading.Event(), threading.Event()
    real = copies.scatter_chunks

    def slow(*args: Any) -> None:
        running.set()
        assert go_on.wait(20)
        real(*args)

    with CacheClient(server.endpoint, timeout_s=0.3) as client:
        engine = client.register(layers(), "model", layout_hints=NHD)
        engine.store(TOKENS, BLOCKS)
        monkeypatch.setattr(copies, "scatter_chunks", slow)
        assert engine.retrieve(TOKENS, OTHER_BLOCKS) == 0
        assert running.is_set()
        assert engine.unsettled_block_ids() == [set(OTHER_BLOCKS)]
        (late,) = engine._registration._requests._late
        sock = late.connection.socket  # type: ignore[union-attr]
        go_on.set()
        while engine.unsettled_block_ids() != [set()]:
            client.noop(timeout_s=5.0)
        assert sock.closed, "a connection with a late reply is never used again"
        assert all(each.socket is not sock for each in client._connections._idle)
        monkeypatch.undo()
        while not engine.is_registered:
            client.noop(timeout_s=5.0)
        assert engine.retrieve(TOKENS, OTHER_BLOCKS) == 3 * CHUNK


@pytest.mark.parametrize("raises", [False, True])
def test_blocks_stay_unsettled_when_the_client_is_closed(
    server: CacheServer, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    """Nobody asks any more whether the copy has ended; the server's death would tell."""
    copies: Any = importlib.import_module("kvshm.server.server_driven")
    go_on = threading.Event()
    real = copies.scatter_chunks

    def slow(*args: Any) -> None:
        assert go_on.wait(20)
        real(*args)

    with CacheClient(server.endpoint, timeout_s=0.3, heartbeat_s=0.05, raises=raises) as client:
        engine = client.register(layers(), "model", layout_hints=NHD)
        engine.store(TOKENS, BLOCKS)
        monkeypatch.setattr(copies, "scatter_chunks", slow)
        with pytest.raises(ServerTimeoutError) if raises else contextlib.nullcontext():
            assert engine.retrieve(TOKENS, OTHER_BLOCKS) == 0
        while not client.is_up:
            client.noop(timeout_s=5.0)
        client.close()
        assert engine.unsettled_block_ids() == [set(OTHER_BLOCKS)]
        engine.unregister()
        assert engine.unsettled_block_ids() == [set(OTHER_BLOCKS)]
        assert engine.store(TOKENS, BLOCKS) == 0
        go_on.set()


def test_blocks_of_a_broken_connection_are_unsettled(server: CacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something between client and server cut it, and the server copies on."""
    connections: Any = importlib.import_module("kvshm.client.connections")
    copies: Any = importlib.import_module("kvshm.server.server_driven")
    go_on, running = threading.Event(), threading.Event()
    real, receive = copies.scatter_chunks, connections.Connection.receive

    def slow(*args: Any) -> None:
        running.set()
        assert go_on.wait(20)
        real(*args)

    def cut(connection: Any, uid: int, deadline: float, what: str) -> Any:
        if what != "kvshm_retrieve":
            return receive(connection, uid, deadline, what)
        assert running.wait(20)
        raise ServerUnreachableError("it broke")

    with CacheClient(server.endpoint, heartbeat_s=0.05) as client:
        engine = client.register(layers(), "model", layout_hints=NHD)
        engine.store(TOKENS, BLOCKS)
        monkeypatch.setattr(copies, "scatter_chunks", slow)
        monkeypatch.setattr(connections.Connection, "receive", cut)
        assert engine.retrieve(TOKENS, OTHER_BLOCKS) == 0
        for _ in range(3):
            assert engine.unsettled_block_ids() == [set(OTHER_BLOCKS)]
            client.noop(timeout_s=5.0)
        go_on.set()
        while engine.unsettled_block_ids() != [set()]:
            client.noop(timeout_s=5.0)
        engine.unregister()


@pytest.mark.parametrize("error", [KeyboardInterrupt, wire.WireError])
def test_interrupted_blocks_are_unsettled(
    server: CacheServer, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Whatever ends the wait, the request is with the server."""
    connections: Any = importlib.import_module("kvshm.client.connections")

    def receive(*args: Any) -> Any:
        raise error("no MessagePack")

    with CacheClient(server.endpoint, raises=True) as client:
        engine = client.register(layers(), "model", layout_hints=NHD)
        requests: Any = engine._registration._requests
        for _ in range(3):
            monkeypatch.setattr(connections.Connection, "receive", receive)
            with pytest.raises(error, match="no MessagePack"):
                engine.store(TOKENS, BLOCKS)
            monkeypatch.undo()
            # Those that have been answered meanwhile have gone.
            (late,) = requests._late
            assert [set(ids.tolist()) for ids in late.block_ids.flat()] == [set(BLOCKS[:6])]
            assert late.connection.socket.poll(20_000)
        assert engine.unsettled_block_ids() == [set()]


def test_a_store_that_ends_too_late_is_not_published(server: CacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client may have changed the blocks meanwhile."""
    copies: Any = importlib.import_module("kvshm.server.server_driven")
    go_on = threading.Event()
    real = copies.gather_chunks

    def slow(*args: Any) -> None:
        assert go_on.wait(20)
        real(*args)

    with CacheClient(server.endpoint, timeout_s=0.2) as client:
        arrays = layers()
        engine = client.register(arrays, "model", layout_hints=NHD)
        monkeypatch.setattr(copies, "gather_chunks", slow)
        assert engine.store(TOKENS, BLOCKS) == 0
        assert engine.unsettled_block_ids() == [set(BLOCKS[:6])]
        wipe(arrays)
        go_on.set()
        while client.status(timeout_s=5.0)["counters"]["late_stores"] != 1:
            pass
        status = client.status(timeout_s=5.0)
        assert status["objects"]["cached"] == status["objects"]["unfinished"] == 0
        engine.unregister()


def test_many_threads() -> None:
    """In a pool with room for all: what else a thread stores before its lookup is up to the scheduler."""
    num_threads, num_turns = 8, 15
    with running_server(capacity=num_threads * num_turns * 3 * 2 * CHUNK_NBYTES) as server:  # noqa: SIM117
        with CacheClient(server.endpoint) as client:
            share_an_engine(client, num_threads, num_turns)


def share_an_engine(client: CacheClient, num_threads: int, num_turns: int) -> None:
    """Threads that each store, look up and retrieve their own prompts."""
    arrays = layers(num_blocks=num_threads * 6 + 1)
    engine = client.register(arrays, "model", layout_hints=NHD)
    failures: list[str] = []

    def work(number: int) -> None:
        blocks = list(range(1 + 6 * number, 7 + 6 * number))
        for turn in range(num_turns):
            tokens = [1000 * number + turn] * (3 * CHUNK)
            for array in arrays:
                array[:, blocks] = turn
            if engine.store(tokens, blocks) != 3 * CHUNK:
                failures.append("store")
            if engine.lookup(tokens) != 3 * CHUNK:
                failures.append("lookup")
            for array in arrays:
                array[:, blocks] = -1
            if engine.retrieve(tokens, blocks) != 3 * CHUNK:
                failures.append("retrieve")
            if any((array[:, blocks] != turn).any() for array in arrays):
                failures.append("wrong bytes")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert client.status()["objects"]["evicted"] == 0
    engine.unregister()


def test_ids_do_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process ids do, from container to container."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(threading, "get_ident", lambda: 1)
    with CacheClient("tcp://127.0.0.1:1") as client:
        nothing: Any = None
        identity = EngineIdentity("model", 1, 0, "")
        ids = {
            Registration(client._link, nothing, identity, "engine_driven", None, False).instance_id for _ in range(2000)
        }
    assert len(ids) == 2000
    assert all(0 <= number < 2**63 for number in ids)


def test_a_skip_that_is_no_number_is_refused(server: CacheServer) -> None:
    with CacheClient(server.endpoint) as client:
        layers = kvshm.empty_many([(2, 7, 3, 2, 5)], ["float16"])
        engine = client.register(layers, "model", layout_hints={"kv_layout": "NHD"})
        tokens, blocks = list(range(12)), [1, 2, 3, 4]
        wrong: Any
        for wrong in (1.5, "1", None, -1, True):
            with pytest.raises(ValueError, match="skip_first_n_tokens"):
                engine.retrieve(tokens, blocks, skip_first_n_tokens=wrong)
        assert engine.store(tokens, blocks) == 12
        assert engine.lookup(tokens) == 12
        assert engine.retrieve(tokens, blocks, skip_first_n_tokens=2**70) == 12, "all of it is there already"
        engine.unregister()


def test_a_retrieve_does_not_wait_for_a_registration(server: CacheServer) -> None:
    with CacheClient(server.endpoint) as client:
        layers = kvshm.empty_many([(2, 7, 3, 2, 5)], ["float16"])
        engine = client.register(layers, "model", layout_hints={"kv_layout": "NHD"})
        tokens, blocks = list(range(12)), [1, 2, 3, 4]
        assert engine.store(tokens, blocks) == 12
        assert engine.lookup(tokens) == 12
        held, done = threading.Event(), threading.Event()

        def register_slowly() -> None:
            with engine._registration._lock:
                held.set()
                assert done.wait(60)

        slow = threading.Thread(target=register_slowly)
        slow.start()
        assert held.wait(60)
        assert engine.retrieve(tokens, blocks) == 12
        done.set()
        slow.join()
        engine.unregister()


def test_ids_that_are_no_blocks_are_refused_before_anything_is_sent(server: CacheServer) -> None:
    with CacheClient(server.endpoint) as client:
        layers = kvshm.empty_many([(2, 7, 3, 2, 5)], ["float16"])
        engine = client.register(layers, "model", layout_hints={"kv_layout": "NHD"})
        for wrong in (7, -1, 2**40):
            with pytest.raises(ValueError, match=r"has blocks \[0, 7\)"):
                engine.store(list(range(12)), [1, 2, 3, wrong])
            with pytest.raises(ValueError, match=r"has blocks \[0, 7\)"):
                engine.retrieve(list(range(12)), [1, 2, 3, wrong])
        assert engine.store(list(range(11)), [1, 2, 99, 98]) == 6, "blocks of no whole chunk are not looked at"
        engine.unregister()
