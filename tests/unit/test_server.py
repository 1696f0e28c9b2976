"""The server, spoken to in frames: what each operation does, and that it always answers."""

from __future__ import annotations

import importlib
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

import kvshm
from kvshm import Segment
from kvshm.prefix import token_array
from kvshm.server.cache_server import CacheServer
from kvshm.shm.liveness import Liveness
from tests.support.cache_server import (
    BLOCK,
    BLOCKS_PER_CHUNK,
    CHUNK,
    CHUNK_NBYTES,
    NHD,
    NUM_LAYERS,
    RawClient,
    blocks_of,
    key_map,
    layers,
    let_pass,
    running_server,
    wipe,
)
from tests.support.memory import num_mappings

TOKENS = list(range(100, 100 + 3 * CHUNK + 1))  # three chunks and a token
BLOCKS = [4, 9, 2, 17, 30, 11]
OTHER_BLOCKS = [21, 5, 13, 8, 1, 26]


@pytest.fixture
def server() -> Iterator[CacheServer]:
    with running_server() as server:
        yield server


@pytest.fixture
def raw(server: CacheServer) -> Iterator[RawClient]:
    with RawClient(server.endpoint) as raw:
        yield raw


def status(server: CacheServer) -> dict[str, Any]:
    return server.call(server.status)


# The small ones


def test_the_small_operations(raw: RawClient) -> None:
    assert raw.ask(24) == ["OK"]
    assert raw.ask("noop") == ["OK"]
    assert raw.ask(21) == [CHUNK]
    assert raw.ask(22, None) == [True]
    assert raw.ask(22, 12345) == [True]
    assert raw.ask(23, 1, "model", [{"req_id": "r", "new_block_ids": [1], "new_token_ids": []}]) == []
    assert raw.ask(32) == [[]]
    assert raw.ask(20) == []
    assert raw.ask(20, True) == []
    assert raw.ask(13, "nobody") == []
    assert raw.ask(9, "nobody") == [0]
    assert raw.ask(10, "nobody", 0.5) == [0]
    assert raw.ask(2, 99) == []
    assert raw.ask(15, 99) == []


def test_a_client_takes_its_routing_id_along(server: CacheServer) -> None:
    """One that connects anew under it is answered, and nobody takes the place of the server's own waker."""
    context = zmq.Context()
    sockets = []
    for routing_id in (b"kvshm:one", b"kvshm:one", b"\0kvshm"):
        sock = context.socket(zmq.DEALER)
        sockets.append(sock)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVTIMEO, 20_000)
        sock.setsockopt(zmq.ROUTING_ID, routing_id)
        sock.connect(server.endpoint)
        sock.send_multipart([msgpack.packb(1), msgpack.packb(24)])
        assert sock.recv_multipart()[2] == msgpack.packb("OK")
        with RawClient(server.endpoint) as raw:  # what a worker thread has done is noticed
            assert raw.register(layers()) == []
            assert raw.ask(2, 1) == []
    for sock in sockets:
        sock.close()
    context.term()


def test_the_reply_repeats_uid_and_operation_byte_by_byte(raw: RawClient) -> None:
    long_uid, long_operation = b"\xcf" + (5).to_bytes(8, "big"), b"\xd1\x00\x18"
    raw.socket.send_multipart([long_uid, long_operation])
    assert raw.socket.recv_multipart() == [long_uid, long_operation, b"\xa2OK"]


def test_replies_come_in_order_for_quick_operations(raw: RawClient) -> None:
    uids = [raw.send(24) for _ in range(500)]
    assert [raw.reply()[0] for _ in uids] == uids


@pytest.mark.parametrize(
    ("operation", "payload", "failure", "reason"),
    [
        (99, (), None, "not one that this server knows"),
        ("pickle", (), None, "not one that this server knows"),
        (24, (1,), "", "takes 0 to 0 payload frames"),
        (6, (), [b"", False], "takes 4 to 4"),
        (6, (key_map(TOKENS), 1, [BLOCKS], b""), [b"", False], "instance 1 is not registered"),
        (7, (key_map(TOKENS), 1, [BLOCKS], b"", 0), [b"", False], "instance 1 is not registered"),
        (6, (key_map(TOKENS, cache_salt="a/b"), 1, [BLOCKS], b""), [b"", False], "cache_salt"),
        (8, (key_map(TOKENS, worker_id=None, num_kv_readers=0), 1), None, "needs at least 1 reader"),
        (9, (5,), 0, "payload 0 of query_prefetch_status is 5"),
        (16, (key_map(TOKENS), 1), {"context": {}}, "instance 1 is not registered"),
        (17, (key_map(TOKENS), 1, b""), False, "instance 1 is not registered"),
        (18, (key_map(TOKENS), 1), {"success": False, "data": b"", "context": {}}, "is not registered"),
        (19, (key_map(TOKENS), 1), False, "instance 1 is not registered"),
        (22, ("x",), False, "payload 0 of ping"),
        (1, (1, [], "model", 1, "vllm", NHD, []), None, "give at least one layer"),
        (1, (1, [], "model", 1, "nothing", NHD, []), None, "unknown engine"),
        (14, ({},), {"shm_name": "", "pool_size": 0}, "lacks"),
    ],
)
def test_a_failure_is_answered_with_its_value_and_why(
    raw: RawClient, operation: int | str, payload: tuple[Any, ...], failure: Any, reason: str
) -> None:
    value, text = raw.ask(operation, *payload)
    assert value == failure
    assert reason in text


@pytest.mark.parametrize(
    "frames", [[b"\x01"], [b""], [b"abc", b"\x18"], [b"\xc0", b"\x18"], [b"\xa11", b"\x18"], [b"", b"", b""]]
)
def test_a_request_without_uid_is_counted_and_dropped(server: CacheServer, raw: RawClient, frames: list[bytes]) -> None:
    raw.socket.send_multipart(frames)
    assert raw.ask(24) == ["OK"]
    assert status(server)["messages"]["malformed"] == 1


# Server-driven


def test_store_lookup_retrieve(server: CacheServer, raw: RawClient) -> None:
    arrays = layers()
    assert raw.register(arrays) == []
    expected = blocks_of(arrays, BLOCKS)
    assert raw.hit(TOKENS) == 0
    assert raw.ask(6, key_map(TOKENS), 1, [BLOCKS], b"handle") == [[b"handle", True]]
    assert raw.hit(TOKENS) == 3
    wipe(arrays)
    before = [array.copy() for array in arrays]
    assert raw.ask(7, key_map(TOKENS), 1, [OTHER_BLOCKS], b"handle", 0) == [[b"handle", True]]
    assert blocks_of(arrays, OTHER_BLOCKS) == expected
    for array, empty in zip(arrays, before, strict=True):
        rest = [block for block in range(array.shape[1]) if block not in OTHER_BLOCKS]
        assert np.array_equal(array[:, rest], empty[:, rest])
    assert raw.ask(2, 1) == []
    assert status(server)["objects"]["cached"] == 3


def test_skip_first_n_tokens(raw: RawClient) -> None:
    arrays = layers()
    raw.register(arrays)
    expected = [array[:, BLOCKS].copy() for array in arrays]
    raw.ask(6, key_map(TOKENS), 1, [BLOCKS], b"")
    wipe(arrays)
    assert raw.ask(7, key_map(TOKENS), 1, [BLOCKS], b"", CHUNK + 1)[0][1] is True
    for array, old in zip(arrays, expected, strict=True):
        got = array[:, BLOCKS].reshape(2, -1, *array.shape[3:])
        want = old.reshape(2, -1, *array.shape[3:])
        assert not got[:, : CHUNK + 1].any()
        assert np.array_equal(got[:, CHUNK + 1 :].view(np.uint16), want[:, CHUNK + 1 :].view(np.uint16))


def test_a_range_in_the_middle(raw: RawClient) -> None:
    arrays = layers()
    raw.register(arrays)
    expected = blocks_of(arrays, BLOCKS)
    assert raw.ask(6, key_map(TOKENS, start=CHUNK), 1, [BLOCKS[2:]], b"")[0][1] is True
    assert raw.hit(TOKENS) == 0, "the first chunk is missing"
    assert raw.ask(6, key_map(TOKENS, end=CHUNK), 1, [BLOCKS[:2]], b"")[0][1] is True
    assert raw.hit(TOKENS) == 3
    assert raw.hit(TOKENS, end=2 * CHUNK + 1) == 2
    assert raw.hit(TOKENS, start=CHUNK) == 3, "lookups are about the whole prefix"
    wipe(arrays)
    raw.ask(7, key_map(TOKENS, start=CHUNK), 1, [BLOCKS[2:]], b"", 0)
    raw.ask(7, key_map(TOKENS, end=CHUNK), 1, [BLOCKS[:2]], b"", 0)
    assert blocks_of(arrays, BLOCKS) == expected


@pytest.mark.parametrize(
    "block_ids", [[BLOCKS[:-1]], [[*BLOCKS, 3]], [], [BLOCKS, BLOCKS], [[]], [[*BLOCKS[:-1], 31]], [[*BLOCKS[:-1], -1]]]
)
def test_a_store_with_wrong_block_ids_stores_nothing(
    server: CacheServer, raw: RawClient, block_ids: list[list[int]]
) -> None:
    raw.register(layers())
    value, reason = raw.ask(6, key_map(TOKENS), 1, block_ids, b"handle")
    assert value == [b"", False]
    assert "block" in reason
    now = status(server)
    assert now["objects"]["cached"] == now["objects"]["unfinished"] == now["pool"]["used_nbytes"] == 0


def test_a_retrieve_with_wrong_block_ids_writes_nothing(raw: RawClient) -> None:
    arrays = layers()
    raw.register(arrays)
    raw.ask(6, key_map(TOKENS), 1, [BLOCKS], b"")
    wipe(arrays)
    for ids in (BLOCKS[:-1], [*BLOCKS, 3], [*BLOCKS[:-1], 31], [*BLOCKS[:-1], BLOCKS[0]]):
        value, _ = raw.ask(7, key_map(TOKENS), 1, [ids], b"", 0)
        assert value == [b"", False]
    assert not any(array.any() for array in arrays)


def test_tokens_that_are_not_there(raw: RawClient) -> None:
    raw.register(layers())
    value, reason = raw.ask(6, key_map(TOKENS, end=4 * CHUNK), 1, [[*BLOCKS, 1, 3]], b"")
    assert (value, "the range ends at token 24 but 19 token ids came" in reason) == ([b"", False], True)
    assert raw.hit(TOKENS, end=10**9) == 0


def test_a_worker_must_be_named(raw: RawClient) -> None:
    raw.register(layers())
    value, reason = raw.ask(6, key_map(TOKENS, worker_id=None), 1, [BLOCKS], b"")
    assert (value, "worker_id is nil" in reason) == ([b"", False], True)


def test_no_whole_chunk(raw: RawClient) -> None:
    raw.register(layers())
    assert raw.ask(6, key_map(TOKENS[: CHUNK - 1]), 1, [[]], b"h") == [[b"h", True]]
    assert raw.hit(TOKENS[: CHUNK - 1]) == 0


def test_null_chunks_are_not_stored(raw: RawClient) -> None:
    raw.register(layers())
    assert raw.ask(6, key_map(TOKENS), 1, [[4, 9, 0, 0, 30, 11]], b"h") == [[b"h", True]]
    assert raw.hit(TOKENS) == 1
    assert raw.ask(6, key_map(TOKENS), 1, [[4, 9, 0, 2, 30, 11]], b"h") == [[b"h", True]]
    assert raw.hit(TOKENS) == 3, "one null block does not make a null chunk"


def test_a_retrieve_of_what_is_not_cached(raw: RawClient) -> None:
    raw.register(layers())
    value, reason = raw.ask(7, key_map(TOKENS), 1, [BLOCKS], b"h", 0)
    assert (value, "3 of 3 chunks are not cached" in reason) == ([b"", False], True)


@pytest.mark.parametrize(
    "changes",
    [{"model_name": "other"}, {"world_size": 2}, {"cache_salt": "s"}, {"worker_id": 1}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_a_chunk_is_known_by(raw: RawClient, changes: dict[str, Any]) -> None:
    raw.register(layers())
    raw.register(layers(), 2, model_name="other")
    raw.register(layers(), 3, world_size=2)
    raw.ask(6, key_map(TOKENS), 1, [BLOCKS], b"")
    value, _ = raw.ask(7, key_map(TOKENS, **changes), 1, [BLOCKS], b"", 0)
    assert value == [b"", False]
    if "worker_id" not in changes:
        assert raw.hit(TOKENS, **changes) == 0


def test_what_a_chunk_is_not_known_by(raw: RawClient) -> None:
    arrays = layers()
    raw.register(arrays)
    raw.ask(6, key_map(TOKENS), 1, [BLOCKS], b"")
    changes = {"request_id": "x", "request_configs": {"a": 1}, "num_kv_readers": 7}
    assert raw.ask(7, key_map(TOKENS, **changes), 1, [BLOCKS], b"", 0)[0][1] is True


def test_another_layout_is_a_miss(raw: RawClient) -> None:
    raw.register(layers())
    raw.ask(6, key_map(TOKENS), 1, [BLOCKS], b"")
    raw.ask(2, 1)
    assert raw.register(layers_hnd(), 8, layout_hints={"kv_layout": "HND"}) == []
    assert raw.hit(TOKENS) == 3, "the order of slots and heads is no part of a chunk"
    raw.ask(2, 8)
    assert raw.register(layers(dtype="bfloat16"), 9) == []
    assert raw.hit(TOKENS) == 0
    value, _ = raw.ask(7, key_map(TOKENS), 9, [BLOCKS], b"", 0)
    assert value == [b"", False]
    assert raw.register(layers(num_blocks=43), 10) == []
    assert raw.hit(TOKENS) == 0, "a lookup does not say which engine it is for, so it is for all"
    raw.ask(2, 9)
    assert raw.hit(TOKENS) == 3, "the number of blocks is no part of the layout"


def layers_hnd() -> list[Any]:
    """The same sizes, heads first: [2, NB, NH, BS, HS]."""
    import kvshm

    return kvshm.empty_many([(2, 31, 5, BLOCK, 7)] * NUM_LAYERS, ["float16"] * NUM_LAYERS)


def test_chunks_outlive_their_engine(raw: RawClient) -> None:
    arrays = layers()
    raw.register(arrays)
    expected = blocks_of(arrays, BLOCKS)
    raw.ask(6, key_map(TOKENS), 1, [BLOCKS], b"")
    raw.ask(2, 1)
    assert raw.hit(TOKENS) == 0, "no engine of this model is registered"
    others = layers(seed=1)
    raw.register(others, 2)
    assert raw.hit(TOKENS) == 3
    raw.ask(7, key_map(TOKENS), 2, [BLOCKS], b"", 0)
    assert blocks_of(others, BLOCKS) == expected


def test_all_workers_must_have_a_chunk(raw: RawClient) -> None:
    for worker in range(2):
        raw.register(layers(seed=worker), worker, world_size=2)
    raw.ask(6, key_map(TOKENS, world_size=2), 0, [BLOCKS], b"")
    assert raw.hit(TOKENS, world_size=2) == 0
    raw.ask(6, key_map(TOKENS, world_size=2, worker_id=1, end=CHUNK), 1, [BLOCKS[:2]], b"")
    assert raw.hit(TOKENS, world_size=2) == 1


# Read locks


def pinned(server: CacheServer) -> tuple[int, int]:
    now = status(server)
    return now["lookups"]["pins"], now["objects"]["pinned"]


def test_read_locks_are_counted(server: CacheServer, raw: RawClient) -> None:
    raw.register(layers())
    raw.ask(6, key_map(TOKENS), 1, [BLOCKS], b"")
    raw.ask(8, key_map(TOKENS, worker_id=None, num_kv_readers=2), 1)
    assert pinned(server) == (6, 3)
    raw.ask(7, key_map(TOKENS), 1, [BLOCKS], b"", 0)
    assert pinned(server) == (3, 3)
    raw.ask(7, key_map(TOKENS, end=CHUNK), 1, [BLOCKS[:2]], b"", 0)
    assert pinned(server) == (2, 2)
    raw.ask(12, key_map(TOKENS, worker_id=None, start=CHUNK, end=2 * CHUNK), 1)
    assert pinned(server) == (1, 1)
    raw.ask(12, key_map(TOKENS, worker_id=None), 1)
    assert pinned(server) == (0, 0)
    assert raw.ask(9, "request") == [3]


def test_a_failed_retrieve_releases_its_lock(server: CacheServer, raw: RawClient) -> None:
    raw.register(layers())
    raw.ask(6, key_map(TOKENS), 1, [BLOCKS], b"")
    raw.ask(8, key_map(TOKENS, worker_id=None), 1)
    raw.ask(7, key_map(TOKENS), 1, [BLOCKS[:2]], b"", 0)
    assert pinned(server) == (0, 0)
    raw.ask(8, key_map(TOKENS, worker_id=None), 1)
    raw.ask(7, key_map(TOKENS), 77, [BLOCKS], b"", 0)
    assert pinned(server) == (0, 0)
    assert raw.ask(13, "request") == []


def test_pinned_chunks_are_neither_evicted_nor_overwritten() -> None:
    with running_server(capacity=4 * CHUNK_NBYTES) as server, RawClient(server.endpoint) as raw:
        arrays = layers()
        raw.register(arrays)
        expected = blocks_of(arrays, BLOCKS)
        raw.ask(6, key_map(TOKENS), 1, [BLOCKS], b"")
        raw.ask(8, key_map(TOKENS, worker_id=None), 1)
        wipe(arrays)
        for number in range(5):
            other = [number] * CHUNK
            assert raw.ask(6, key_map(other), 1, [[1, 3]], b"")[0][1] is True
        value, reason = raw.ask(6, key_map([7] * 2 * CHUNK), 1, [[1, 3, 5, 6]], b"")
        assert (value, "no room" in reason) == ([b"", False], True)
        assert raw.ask(9, "request") == [3]
        raw.ask(7, key_map(TOKENS), 1, [BLOCKS], b"", 0)
        assert blocks_of(arrays, BLOCKS) == expected
        assert raw.ask(6, key_map([7] * 2 * CHUNK), 1, [[1, 3, 5, 6]], b"")[0][1] is True


def test_read_locks_expire() -> None:
    with running_server(pin_ttl_s=60) as server, RawClient(server.endpoint) as raw:
        raw.register(layers())
        raw.ask(6, key_map(TOKENS), 1, [BLOCKS], b"")
        for number in range(200):
            raw.ask(8, key_map(TOKENS, worker_id=None, request_id=f"r{number}"), 1)
        let_pass(server, 59)
        assert status(server)["counters"]["expired_lookups"] == 0
        let_pass(server, 1)
        assert pinned(server) == (0, 0)
        assert status(server)["counters"]["expired_lookups"] == 200
        assert raw.ask(20) == []
        assert status(server)["objects"]["cached"] == 0


def test_clear(server: CacheServer, raw: RawClient) -> None:
    raw.register(layers())
    raw.ask(6, key_map(TOKENS), 1, [BLOCKS], b"")
    raw.ask(8, key_map(TOKENS, worker_id=None, end=CHUNK), 1)
    raw.ask(20, False)
    assert status(server)["objects"]["cached"] == 1
    raw.ask(20, True)
    assert status(server)["objects"]["cached"] == 0
    assert pinned(server) == (0, 0)


# Engine-driven

SPEC = {
    "instance_id": 8,
    "model_name": "model",
    "world_size": 1,
    "block_size": BLOCK,
    "num_layers": NUM_LAYERS,
    "hidden_dim_size": 35,
    "dtype_str": "float16",
    "use_mla": False,
    "num_physical_slots": None,
}


def pool_of(raw: RawClient, **changes: Any) -> np.ndarray[Any, Any]:
    (where,) = raw.ask(14, SPEC | changes)
    assert not where["shm_name"].startswith("/")
    return Segment.attach(where["shm_name"], where["pool_size"]).array((where["pool_size"],), "uint8")


def test_prepare_and_commit(server: CacheServer, raw: RawClient) -> None:
    pool = pool_of(raw)
    (reply,) = raw.ask(16, key_map(TOKENS), 8)
    slots, indices = reply["context"]["slots"], reply["context"]["chunk_indices"]
    assert indices == [0, 1, 2]
    assert [slot["length"] for slot in slots] == [CHUNK_NBYTES] * 3
    assert slots[0]["shape"] == [2, NUM_LAYERS, CHUNK, 35]
    assert slots[0]["dtype"] == "float16"
    for number, slot in enumerate(slots, start=1):
        pool[slot["offset"] : slot["offset"] + slot["length"]] = number
    assert raw.hit(TOKENS) == 0, "not committed"
    assert raw.ask(17, key_map(TOKENS), 8, b"") == [True]
    assert raw.hit(TOKENS) == 3
    (reply,) = raw.ask(18, key_map(TOKENS, end=2 * CHUNK), 8)
    assert (reply["success"], reply["data"]) == (True, b"")
    for number, slot in enumerate(reply["context"]["slots"], start=1):
        assert set(pool[slot["offset"] : slot["offset"] + slot["length"]]) == {number}
    assert status(server)["objects"]["pinned"] == 2
    assert raw.ask(19, key_map(TOKENS, end=2 * CHUNK), 8) == [True]
    assert status(server)["objects"]["pinned"] == 0
    value, reason = raw.ask(19, key_map(TOKENS, end=2 * CHUNK), 8)
    assert (value, "no prepared retrieve" in reason) == (False, True)
    assert raw.ask(16, key_map(TOKENS), 8) == [{"context": {"slots": [], "chunk_indices": []}}]
    assert raw.ask(15, 8) == []


def test_only_missing_chunks_get_slots(raw: RawClient) -> None:
    pool_of(raw)
    raw.ask(16, key_map(TOKENS, end=CHUNK), 8)
    raw.ask(17, key_map(TOKENS, end=CHUNK), 8, b"")
    (reply,) = raw.ask(16, key_map(TOKENS), 8)
    assert reply["context"]["chunk_indices"] == [1, 2]
    assert raw.ask(15, 8) == []


def test_mla_slots_have_one_axis_less(raw: RawClient) -> None:
    pool_of(raw, use_mla=True, num_physical_slots=CHUNK, dtype_str="bfloat16")
    (reply,) = raw.ask(16, key_map(TOKENS), 8)
    assert reply["context"]["slots"][0] | {"offset": 0} == {
        "offset": 0,
        "length": CHUNK_NBYTES // 2,
        "shape": [NUM_LAYERS, CHUNK, 35],
        "dtype": "bfloat16",
    }
    raw.ask(15, 8)


def test_asking_again_gives_the_same_slots(server: CacheServer, raw: RawClient) -> None:
    pool_of(raw)
    assert raw.ask(16, key_map(TOKENS), 8) == raw.ask(16, key_map(TOKENS), 8)
    assert raw.ask(14, SPEC)[0]["pool_size"] > 0, "registering again changes nothing"
    assert raw.ask(17, key_map(TOKENS), 8, b"") == [True]
    value, reason = raw.ask(17, key_map(TOKENS), 8, b"")
    assert (value, "no prepared store" in reason) == (False, True)
    raw.ask(15, 8)


def test_slots_come_back(server: CacheServer, raw: RawClient) -> None:
    pool_of(raw)
    for number in range(30):
        raw.ask(16, key_map([number] * CHUNK), 8)
    assert status(server)["objects"]["unfinished"] == 30
    value, reason = raw.ask(16, key_map([99] * 20 * CHUNK), 8)
    assert (value, "no room" in reason) == ({"context": {}}, True)
    raw.ask(15, 8)
    assert status(server)["pool"]["used_nbytes"] == 0


def test_lent_slots_expire() -> None:
    with running_server(prepare_ttl_s=60) as server, RawClient(server.endpoint) as raw:
        pool_of(raw)
        raw.ask(16, key_map(TOKENS), 8)
        raw.ask(16, key_map(TOKENS, end=CHUNK, request_id="other"), 8)
        raw.ask(17, key_map(TOKENS, end=CHUNK, request_id="other"), 8, b"")
        raw.ask(18, key_map(TOKENS, end=CHUNK), 8)
        let_pass(server, 60)
        assert status(server)["objects"]["pinned"] == 0
        assert raw.hit(TOKENS) == 1
        assert raw.ask(17, key_map(TOKENS), 8, b"")[0] is False
        assert raw.ask(19, key_map(TOKENS, end=CHUNK), 8)[0] is False, "what was read may be another chunk by now"
        raw.ask(15, 8)


IDENTITY = {"model_name": "model", "world_size": 1, "worker_id": 0, "cache_salt": ""}
OBJECT = {"meaning": b"m" * 16, "nbytes": CHUNK_NBYTES, "num_chunks_in_sw": -1, "kind": "attention"}


@contextmanager
def borrower(raw: RawClient, instance_id: int = 8) -> Iterator[Liveness]:
    """An engine of kvshm's client that copies by itself, and is lent three slots."""
    liveness = Liveness()
    (where,) = raw.ask("kvshm_register_engine_driven", instance_id, IDENTITY, [OBJECT], liveness.name)
    assert where["pool_size"] > 0
    (lent,) = raw.ask("kvshm_prepare_store", instance_id, "loan", token_array(TOKENS).tobytes(), [[0, 1, 2]])
    assert ([chunk for chunk, _ in lent["slots"][0]], lent["found"]) == ([0, 1, 2], 0)
    yield liveness
    liveness.close()


def test_a_size_that_is_a_lie_is_nobody_elses(server: CacheServer, raw: RawClient) -> None:
    """What a peer says of its chunks is not checked, so it counts for those who say the same."""
    liveness = Liveness()
    lied = OBJECT | {"nbytes": 1}
    assert raw.ask("kvshm_register_engine_driven", 7, IDENTITY, [lied], liveness.name)
    raw.ask("kvshm_prepare_store", 7, "loan", token_array(TOKENS).tobytes(), [[0, 1, 2]])
    assert raw.ask("kvshm_commit_store", 7, "loan") == [3]
    with borrower(raw):
        assert raw.ask("kvshm_commit_store", 8, "loan") == [3]
    raw.ask("kvshm_unregister", 7)
    liveness.close()


def test_an_engine_that_registers_again_speaks_over_its_new_connection(server: CacheServer) -> None:
    with RawClient(server.endpoint) as first, RawClient(server.endpoint) as again, RawClient(server.endpoint) as other:
        first.ask(14, SPEC)
        again.ask(14, SPEC)
        first.ask(8, key_map(TOKENS, worker_id=None), 1)
        other.ask(8, key_map(TOKENS, worker_id=None, model_name="other"), 1)
        assert status(server)["lookups"]["open"] == 2
        again.ask(13, "request")
        assert status(server)["lookups"]["open"] == 1, "of its own model"
        other.ask(13, "request")
        first.ask(15, 8)


@pytest.mark.parametrize("is_name_gone", [False, True])
def test_slots_of_a_silent_engine_are_its_own_while_it_lives(is_name_gone: bool) -> None:
    """It may be stopped while it writes. Its clocks run out; a login manager removes names when its user logs out."""
    with running_server() as server, RawClient(server.endpoint) as raw:
        with borrower(raw) as liveness:
            if is_name_gone:
                os.unlink(f"/dev/shm{liveness.name}")
            let_pass(server, 3601)
            assert status(server)["counters"]["reaped"] == 1
            let_pass(server, 3601)
            assert status(server)["objects"]["unfinished"] == 3
            assert raw.ask("kvshm_commit_store", 8, "loan")[0] == 0, "it is to register again"
            assert raw.ask("kvshm_give_back", 8, "other") == []
            assert status(server)["objects"]["unfinished"] == 3
        let_pass(server, 0)
        assert status(server)["objects"]["unfinished"] == 0
        assert status(server)["counters"]["expired_slots"] == 3


def test_a_dead_engine_is_dropped_at_once() -> None:
    with running_server() as server, RawClient(server.endpoint) as raw:
        with borrower(raw):
            assert status(server)["objects"]["unfinished"] == 3
        while status(server)["objects"]["unfinished"] or status(server)["instances"]:
            raw.ask(24)


def test_an_engine_gives_back_what_it_does_not_use(server: CacheServer, raw: RawClient) -> None:
    with borrower(raw):
        assert raw.ask("kvshm_give_back", 8, "loan") == []
        assert status(server)["objects"]["unfinished"] == 0
        value, reason, _ = raw.ask("kvshm_commit_store", 8, "loan")
        assert (value, "no prepared store" in reason) == (0, True)
        # A request may come after the message that gives back what it asks for.
        for operation, more in (("kvshm_prepare_store", ([[0]],)), ("kvshm_prepare_retrieve", ())):
            before = ("loan",) if operation == "kvshm_prepare_store" else (None, "loan")
            _, reason, _ = raw.ask(operation, 8, *before, token_array(TOKENS).tobytes(), *more)
            assert "give each transfer its own id" in reason
        assert status(server)["objects"]["unfinished"] == 0


def test_each_transfer_has_its_own_loan(server: CacheServer, raw: RawClient) -> None:
    tokens = token_array(TOKENS).tobytes()
    with borrower(raw):
        raw.ask("kvshm_commit_store", 8, "loan")
        assert len(raw.ask("kvshm_prepare_retrieve", 8, None, "read", tokens)) == 1
        _, reason, _ = raw.ask("kvshm_prepare_retrieve", 8, None, "read", tokens)
        assert "give each transfer its own id" in reason
        assert status(server)["objects"]["pinned"] == 3
        assert raw.ask("kvshm_commit_retrieve", 8, "read") == [True]
        for number in range(1100):
            raw.ask("kvshm_give_back", 8, str(number))
        assert len(server._state.loans._given_back) == 1000, "bounded"
        assert "its own id" in raw.ask("kvshm_prepare_retrieve", 8, None, "1099", tokens)[1]


@pytest.mark.parametrize(
    ("wanted", "text"),
    [([], "of 0 object groups, but there are 1"), ([[3]], "with 3 chunks"), ([[0], [0]], "of 2 object groups")],
)
def test_slots_for_chunks_that_are_none(raw: RawClient, wanted: Any, text: str) -> None:
    with borrower(raw):
        value, reason, _ = raw.ask("kvshm_prepare_store", 8, "l", token_array(TOKENS).tobytes(), wanted)
        assert (value, text in reason) == ({}, True)


@pytest.mark.parametrize("name", ["/kvshm_nobody", "", "/a/b"])
def test_an_engine_whose_liveness_cannot_be_seen_is_refused(raw: RawClient, name: str) -> None:
    value, reason, _ = raw.ask("kvshm_register_engine_driven", 8, IDENTITY, [OBJECT], name)
    assert value == {}
    assert reason


def test_the_two_protocols_do_not_mix(raw: RawClient) -> None:
    pool_of(raw, instance_id=9)
    with borrower(raw):
        tokens = token_array(TOKENS).tobytes()
        assert "use kvshm_prepare_store" in raw.ask(16, key_map(TOKENS), 8)[1]
        assert "use LMCache's operations" in raw.ask("kvshm_prepare_store", 9, "l", tokens, [[0]])[1]
        assert "use LMCache's operations" in raw.ask("kvshm_lookup", 9, None, tokens)[1]
    raw.ask(15, 9)


def test_slots_of_a_silent_engine_come_back_in_time() -> None:
    with running_server(grace_s=100, prepare_ttl_s=300) as server, RawClient(server.endpoint) as raw:
        pool_of(raw)
        raw.ask(16, key_map(TOKENS), 8)
        let_pass(server, 101)
        counters = status(server)["counters"]
        assert (counters["reaped"], counters["expired_slots"]) == (1, 0)
        let_pass(server, 199)
        assert status(server)["counters"]["expired_slots"] == 3


def test_failures_of_kvshms_own_operations_have_a_code(
    server: CacheServer, raw: RawClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And a fault of the server's own is no fault of a peer's: it is logged with its traceback."""
    tokens = token_array(TOKENS).tobytes()
    assert raw.ask("kvshm_count", 77, tokens)[2] == "not_registered"
    assert raw.ask("kvshm_count", "x", tokens)[2] == "malformed"
    raw.register(layers(), 3)
    assert raw.ask("kvshm_count", 3, tokens)[2] == "refused"
    assert len(raw.ask(6, key_map(TOKENS), 77, [BLOCKS], b"")) == 2, "LMCache's have none"

    def broken(*_: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr(server._state.plain_lookups, "result", broken)
    value, reason = raw.ask(9, "request")
    assert (value, "the server failed: KeyError('a bug')" in reason) == (0, True)
    assert "Traceback" in caplog.text
    raw.ask(2, 3)


def test_a_retrieve_that_begins_too_late_writes_nothing(raw: RawClient) -> None:
    """Its client has given the blocks to others by then."""
    arrays = layers()
    descriptors = [msgpack.ExtType(1, kvshm.wrap(array).to_bytes()) for array in arrays]
    assert raw.ask("kvshm_register_server_driven", 5, IDENTITY, descriptors, "vllm", NHD, [], 0) == []
    tokens, ids = token_array(TOKENS).tobytes(), [token_array(BLOCKS).tobytes()]
    later = time.monotonic_ns() + 10**11
    assert raw.ask("kvshm_store", 5, tokens, ids, later) == [3]
    wipe(arrays)
    value, reason, _ = raw.ask("kvshm_retrieve", 5, None, tokens, ids, 0, 0)
    assert (value, "time limit passed before the copy began" in reason) == (False, True)
    assert not any(array.any() for array in arrays)
    assert raw.ask("kvshm_retrieve", 5, None, tokens, ids, 0, later) == [True]
    value, reason, _ = raw.ask("kvshm_store", 5, token_array([9] * CHUNK).tobytes(), [ids[0][:16]], 0)
    assert (value, "after its client's time limit" in reason) == (0, True)
    raw.ask("kvshm_unregister", 5)


def register_kvshm(raw: RawClient, instance_id: int) -> Any:
    """A server-driven engine of kvshm's client; its layers."""
    arrays = layers()
    descriptors = [msgpack.ExtType(1, kvshm.wrap(array).to_bytes()) for array in arrays]
    assert raw.ask("kvshm_register_server_driven", instance_id, IDENTITY, descriptors, "vllm", NHD, [], 0) == []
    return arrays


def test_what_a_reaped_engine_pinned_is_released() -> None:
    with running_server() as server, RawClient(server.endpoint) as raw:
        arrays = register_kvshm(raw, 5)
        tokens = token_array(TOKENS).tobytes()
        later = time.monotonic_ns() + 10**11
        assert raw.ask("kvshm_store", 5, tokens, [token_array(BLOCKS).tobytes()], later) == [3]
        for request in (None, "r"):
            assert raw.ask("kvshm_lookup", 5, request, tokens) == [3]
        raw.ask(22, 5)
        assert status(server)["lookups"] == {"open": 2, "pins": 6}
        let_pass(server, 31)
        assert status(server)["counters"]["reaped"] == 1
        assert status(server)["lookups"] == {"open": 0, "pins": 0}
        del arrays


def test_an_engine_is_settled_when_no_copy_runs(
    server: CacheServer, raw: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: Any = importlib.import_module("kvshm.server.server_driven")
    running, go_on = threading.Event(), threading.Event()

    def slow(*_: Any) -> None:
        running.set()
        assert go_on.wait(20)

    arrays = register_kvshm(raw, 5)
    monkeypatch.setattr(copies, "gather_chunks", slow)
    later = time.monotonic_ns() + 10**11
    store = raw.send("kvshm_store", 5, token_array(TOKENS).tobytes(), [token_array(BLOCKS).tobytes()], later)
    assert running.wait(20)
    settle = raw.send("kvshm_settle", 5)
    noop = raw.send(24)
    assert raw.reply()[0] == noop, "a copy runs"
    go_on.set()
    assert {raw.reply()[0], raw.reply()[0]} == {store, settle}
    assert raw.ask("kvshm_settle", 5) == []
    assert raw.ask("kvshm_settle", 77) == [], "nor on the memory of one that is not there"
    raw.ask("kvshm_unregister", 5)
    del arrays


def test_data_is_refused(raw: RawClient, tmp_path: Path) -> None:
    """What LMCache's pickle transport sends is not even looked at."""
    pool_of(raw)
    raw.ask(16, key_map(TOKENS), 8)
    harmful = b"cposix\nsystem\n(Vtouch " + str(tmp_path / "made").encode() + b"\ntR."
    value, reason = raw.ask(17, key_map(TOKENS), 8, harmful)
    assert (value, "takes no data here" in reason) == (False, True)
    raw.ask(harmful.decode(), harmful)
    assert not list(tmp_path.iterdir())
    raw.ask(15, 8)


def test_the_two_kinds_do_not_mix(raw: RawClient) -> None:
    raw.register(layers())
    pool_of(raw)
    assert "use store and retrieve" in raw.ask(16, key_map(TOKENS), 1)[1]
    assert "use prepare_store" in raw.ask(6, key_map(TOKENS), 8, [BLOCKS], b"")[1]
    raw.ask(2, 8)
    raw.ask(15, 1)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dtype_str": "nothing"}, "unknown dtype 'nothing'"),
        ({"block_size": 4}, "no whole number of blocks of 4"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"use_mla": 1}, "use_mla is 1"),
    ],
)
def test_a_wrong_engine_driven_registration(raw: RawClient, changes: dict[str, Any], text: str) -> None:
    value, reason = raw.ask(14, SPEC | changes)
    assert value == {"shm_name": "", "pool_size": 0}
    assert text in reason


# Registrations


def test_unregister_unmaps(raw: RawClient) -> None:
    """In this process the test maps it too, so count: the server adds a mapping only where there was none."""
    arrays = layers()
    name = Segment.attach(wrap_name(arrays)).name
    raw.register(arrays)
    raw.ask(6, key_map(TOKENS), 1, [BLOCKS], b"")
    del arrays
    assert num_mappings(name) == 1
    assert raw.ask(2, 1) == []
    assert num_mappings(name) == 0


def wrap_name(arrays: Any) -> str:
    import kvshm

    return kvshm.wrap(arrays[0]).shm_name


def test_registering_again_replaces(raw: RawClient) -> None:
    old, new = layers(seed=1), layers(seed=2)
    raw.register(old)
    raw.register(new)
    expected = blocks_of(new, BLOCKS)
    raw.ask(6, key_map(TOKENS), 1, [BLOCKS], b"")
    wipe(new)
    raw.ask(7, key_map(TOKENS), 1, [BLOCKS], b"", 0)
    assert blocks_of(new, BLOCKS) == expected


def test_a_segment_made_anew_under_its_old_name_is_mapped_anew(raw: RawClient, segment_name: str) -> None:
    import kvshm

    shape = (2, 31, BLOCK, 5, 7)
    old = kvshm.zeros(shape, "float16", name=segment_name)
    raw.register([old])
    os.unlink(f"/dev/shm{segment_name}")
    new = kvshm.zeros(shape, "float16", name=segment_name)
    new[...] = 1
    raw.register([new])
    raw.ask(6, key_map(TOKENS), 1, [BLOCKS], b"")
    raw.ask(7, key_map(TOKENS), 1, [OTHER_BLOCKS], b"", 0)
    assert (new[:, OTHER_BLOCKS] == 1).all()
    assert not old.any()
    raw.ask(2, 1)


def test_a_segment_that_is_not_there(raw: RawClient) -> None:
    import kvshm

    arrays = layers()
    descriptor = kvshm.wrap(arrays[0]).to_bytes()
    name = kvshm.wrap(arrays[0]).shm_name
    gone = descriptor.replace(name.encode(), name[:-3].encode() + b"xyz")
    value, reason = raw.register(arrays, kv_caches=[msgpack.ExtType(1, gone)])
    assert value is None
    assert "containers must share it" in reason


def test_a_chunk_size_that_does_not_fit() -> None:
    with running_server(chunk_size=7) as server, RawClient(server.endpoint) as raw:
        _, reason = raw.register(layers())
        assert "multiples of 3: 3, 6, 9" in reason


def test_silent_engines_are_reaped() -> None:
    with running_server() as server, RawClient(server.endpoint) as raw:
        raw.register(layers(), 1)
        raw.register(layers(), 2)
        raw.register(layers(), 3)
        raw.ask(22, 1)
        raw.ask(22, 3)
        let_pass(server, 29)
        raw.ask(22, 3)
        assert len(status(server)["instances"]) == 3
        let_pass(server, 2)
        assert [engine["instance_id"] for engine in status(server)["instances"]] == [2, 3]
        assert status(server)["counters"]["reaped"] == 1


def test_every_request_renews_the_lease_of_the_engine_that_it_names() -> None:
    with running_server() as server, RawClient(server.endpoint) as raw:
        raw.register(layers(), 1)
        raw.ask(22, 1)
        for operation in (6, 7):
            let_pass(server, 29)
            raw.ask(operation, key_map(TOKENS), 1, [BLOCKS], b"")
        let_pass(server, 29)
        assert len(status(server)["instances"]) == 1
        let_pass(server, 2)
        assert status(server)["instances"] == []


def test_engines_that_never_ping_have_the_longer_time() -> None:
    with running_server(reap_after_s=600.0, grace_s=100) as server, RawClient(server.endpoint) as raw:
        raw.register(layers(), 1)
        raw.register(layers(), 2)
        raw.ask(22, 2)
        let_pass(server, 101)
        assert [engine["instance_id"] for engine in status(server)["instances"]] == [2]


def test_an_engine_that_writes_while_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: Any = importlib.import_module("kvshm.server.server_driven")
    arrays = layers()
    real = copies.gather_chunks

    def gather(*args: Any) -> None:
        real(*args)
        arrays[0][:, 2] = 1  # a block of the second chunk

    with running_server(verify=True) as server, RawClient(server.endpoint) as raw:
        raw.register(arrays)
        assert raw.ask(6, key_map([5, *TOKENS]), 1, [BLOCKS], b"") == [[b"", True]]
        monkeypatch.setattr(copies, "gather_chunks", gather)
        value, reason = raw.ask(6, key_map(TOKENS), 1, [BLOCKS], b"")
        assert (value, "blocks of chunk 1 changed while they were being stored" in reason) == ([b"", False], True)
        assert raw.hit(TOKENS) == 0


# Sockets and life


def test_a_remote_address_needs_permission(caplog: pytest.LogCaptureFixture) -> None:
    for endpoint in ("tcp://0.0.0.0:0", "tcp://*:0", "tcp://192.0.2.1:5", "tcp://[::]:0", "tcp://example.org:1"):
        with pytest.raises(ValueError, match="not a loopback address"):
            CacheServer(endpoint)
    CacheServer("tcp://0.0.0.0:0", allow_remote=True)
    assert "may be reached from other hosts" in caplog.text


@pytest.mark.parametrize("endpoint", ["", "tcp://", "tcp://127.0.0.1", "udp://127.0.0.1:1", "tcp://127.0.0.1:99999"])
def test_no_endpoint(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"invalid endpoint .*: expected tcp://"):
        CacheServer(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "text"),
    [
        ("ipc://@kvshm", r"abstract address.*give the path of a file, such as ipc:///run/user/\d+/kvshm\.sock"),
        ("tcp://::1:0", r"needs brackets: tcp://\[::1\]:0"),
        ("tcp://[::1:0", r"needs brackets"),
    ],
)
def test_endpoints_that_cannot_be_bound(endpoint: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CacheServer(endpoint)


def test_the_default_is_loopback() -> None:
    assert CacheServer()._wanted_endpoint == "tcp://127.0.0.1:5555"
    assert CacheServer("tcp://localhost:7")._wanted_endpoint == "tcp://127.0.0.1:7"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"capacity": 0}, "capacity is 0 bytes"),
        ({"chunk_size": 0}, "chunk_size is 0 tokens"),
        ({"num_workers": 0}, "num_workers is 0"),
        ({"http_port": 70000}, "http_port is 70000"),
        ({"http_port": -1}, "http_port is -1"),
        ({"reap_after_s": 0}, "reap_after_s is 0"),
        ({"grace_s": -1.0}, "grace_s is -1"),
        ({"pin_ttl_s": float("nan")}, "pin_ttl_s is nan"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CacheServer("tcp://127.0.0.1:0", **settings)


def test_a_socket_file(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    with running_server(endpoint=f"ipc://{path}") as server:
        assert server.endpoint == f"ipc://{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with RawClient(server.endpoint) as raw:
            assert raw.ask(24) == ["OK"]
        with pytest.raises(OSError, match="another server listens on ipc://"):
            CacheServer(f"ipc://{path}").start()
    assert not path.exists()


def test_a_taken_port(server: CacheServer) -> None:
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(OSError, match=r"cannot listen on tcp://127.0.0.1:\d+: Address already in use"):
        CacheServer(server.endpoint).start()
    assert set(os.listdir("/dev/shm")) == before


def test_no_room_for_the_pool() -> None:
    with pytest.raises(OSError, match="no room in shared memory"):
        CacheServer("tcp://127.0.0.1:0", capacity=1 << 50).start()


def test_a_server_runs_once(server: CacheServer) -> None:
    with pytest.raises(RuntimeError, match="was started before"):
        server.start()
    server.close()
    server.close()
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.endpoint


def test_the_pool_goes_with_the_server() -> None:
    with running_server(pool_name="kvshm_test_pool") as server:
        assert status(server)["pool"]["name"] == "/kvshm_test_pool"
        assert os.path.exists("/dev/shm/kvshm_test_pool")
    assert not os.path.exists("/dev/shm/kvshm_test_pool")


def test_the_pool_is_reserved_in_the_background(server: CacheServer, raw: RawClient) -> None:
    while True:
        pool = status(server)["pool"]
        if pool["reserved_nbytes"] == pool["nbytes"]:
            break
        raw.ask(24)
    blocks = os.stat(f"/dev/shm{pool['name']}").st_blocks * 512
    assert blocks >= pool["nbytes"]


def test_blocks_per_chunk_is_what_these_tests_think() -> None:
    assert BLOCKS_PER_CHUNK * BLOCK == CHUNK
