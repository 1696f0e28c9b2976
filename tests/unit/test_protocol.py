"""The protocol: the table of operations, strict reading, and what a failure looks like."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from kvshm import wire
from kvshm.prefix import token_array
from kvshm.protocol import (
    NO_RESULT,
    OPERATIONS,
    CacheKey,
    ProtocolError,
    encode_block_ids,
    encode_key,
    is_uid_frame,
    operation_of,
    parse_payload,
)
from tests.support.cache_server import key_map

BY_NAME = {operation.name: operation for operation in OPERATIONS}
KEY = key_map(list(range(13)))
IDENTITY = {"model_name": "m", "world_size": 1, "worker_id": 0, "cache_salt": ""}
OBJECT = {"meaning": b"m" * 16, "nbytes": 64, "num_chunks_in_sw": -1, "kind": "attention"}


def parse(name: str, *payload: Any) -> list[Any]:
    return parse_payload(BY_NAME[name], [wire.pack(value) for value in payload])


def test_the_ids_are_lmcaches() -> None:
    assert {operation.id: operation.name for operation in OPERATIONS if operation.id is not None} == {
        1: "register_kv_cache",
        2: "unregister_kv_cache",
        6: "store",
        7: "retrieve",
        8: "lookup",
        9: "query_prefetch_status",
        10: "wait_prefetch_status",
        12: "free_lookup_locks",
        13: "end_session",
        14: "register_kv_cache_engine_driven_context",
        15: "unregister_kv_cache_engine_driven_context",
        16: "prepare_store",
        17: "commit_store",
        18: "prepare_retrieve",
        19: "commit_retrieve",
        20: "clear",
        21: "get_chunk_size",
        22: "ping",
        23: "report_block_allocation",
        24: "noop",
        32: "get_experimental",
    }
    assert all(operation.name.startswith("kvshm_") for operation in OPERATIONS if operation.id is None)


def test_failure_values_are_what_lmcaches_client_can_read() -> None:
    failures = {operation.name: operation.failure for operation in OPERATIONS}
    assert failures["store"] == failures["retrieve"] == [b"", False]
    assert failures["query_prefetch_status"] == failures["wait_prefetch_status"] == 0
    assert failures["commit_store"] is failures["commit_retrieve"] is failures["ping"] is False
    assert failures["prepare_store"] == {"context": {}}
    assert failures["prepare_retrieve"] == {"success": False, "data": b"", "context": {}}
    assert failures["lookup"] is failures["register_kv_cache"] is failures["clear"] is NO_RESULT


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_an_operation_goes_by_id_and_by_name(operation: Any) -> None:
    assert operation_of(wire.pack(operation.name)) is operation
    if operation.id is not None:
        assert operation_of(wire.pack(operation.id)) is operation
        assert operation_of(b"\xd3" + operation.id.to_bytes(8, "big")) is operation  # a longer way to write it


@pytest.mark.parametrize("frame", [wire.pack(3), wire.pack("nope"), wire.pack(None), wire.pack([1]), wire.pack(1.0)])
def test_an_unknown_operation_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="not one that this server knows"):
        operation_of(frame)


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x01\x01", b"\x92\x01", b"\xd9\x05ab"])
def test_bytes_that_are_no_message_are_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="no MessagePack value"):
        operation_of(frame)


@pytest.mark.parametrize("value", [0, 1, 127, 128, 255, 256, 65535, 65536, 2**32, 2**64 - 1, -1, -32, -33, -(2**63)])
def test_every_integer_is_a_uid(value: int) -> None:
    assert is_uid_frame(msgpack.packb(value))


@pytest.mark.parametrize("value", [None, True, "1", b"1", 1.0, [1], {}, "x" * 8])
def test_nothing_else_is_a_uid(value: Any) -> None:
    assert not is_uid_frame(msgpack.packb(value))


@pytest.mark.parametrize("frame", [b"", b"\xcc", b"\xcd\x01", b"\x01\x01", b"\xd3" + b"\0" * 7, b"\xcf" + b"\0" * 9])
def test_a_cut_integer_is_no_uid(frame: bytes) -> None:
    assert not is_uid_frame(frame)


def test_a_key_is_read() -> None:
    key, instance_id, block_ids, handle = parse("store", KEY, 5, [[1, 2], [3]], b"h")
    assert isinstance(key, CacheKey)
    assert (key.model_name, key.world_size, key.worker_id, key.start, key.end) == ("model", 1, 0, 0, 12)
    assert key.token_ids.tolist() == list(range(13))
    assert (instance_id, handle) == (5, b"h")
    assert [ids.tolist() for ids in block_ids] == [[1, 2], [3]]


def test_ids_of_all_groups_together_are_bounded() -> None:
    half = bytes(8 * 600_000)
    with pytest.raises(ProtocolError, match="more than 1000000 ids"):
        parse("store", KEY, 5, [half, half], b"h")


def test_what_a_key_may_lack() -> None:
    fields = {
        name: value for name, value in KEY.items() if name not in ("cache_salt", "request_configs", "num_kv_readers")
    }
    key, _ = parse("lookup", fields, 1)
    assert (key.cache_salt, key.request_configs, key.num_kv_readers) == ("", None, 0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"world_size": 0}, "world_size is 0, not an integer in"),
        ({"world_size": True}, "world_size is True"),
        ({"worker_id": -1}, "worker_id is -1"),
        ({"worker_id": "0"}, "worker_id is '0'"),
        ({"start": 7, "end": 6}, r"\[7, 6\): expected 0 <= start"),
        ({"start": 1.0}, "start is 1.0"),
        ({"token_ids": [1, 2.5]}, "sequence of integers"),
        ({"token_ids": [1, True]}, r"token_ids\[1\] is True, a boolean"),
        ({"token_ids": [2**63]}, "64 signed bits"),
        ({"token_ids": "abc"}, "token_ids is 'abc', not an array"),
        ({"token_ids": b"1234567"}, "no whole number of 64-bit integers"),
        ({"token_ids": list(range(1_000_001))}, "at most 1000000 are allowed"),
        ({"cache_salt": "a@b"}, "none of @"),
        ({"cache_salt": "a\0"}, "none of @"),
        ({"cache_salt": "a" * 129}, "at most 128 characters"),
        ({"cache_salt": None}, "cache_salt is None, not a string"),
        ({"model_name": "m" * 4097}, "not a string of at most 4096"),
        ({"request_configs": [1]}, "not a map"),
        ({"num_kv_readers": -1}, "num_kv_readers is -1"),
        ({"extra": 1}, r"unknown keys \['extra'\]"),
        ({"extra": 1, b"x": 1}, r"unknown keys \['extra', b'x'\]"),
    ],
)
def test_a_key_with_a_wrong_field_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        parse("lookup", KEY | changes, 1)


@pytest.mark.parametrize("name", ["model_name", "world_size", "worker_id", "token_ids", "start", "end", "request_id"])
def test_a_key_without_a_field_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError, match=rf"lacks \['{name}'\]"):
        parse("lookup", {field: value for field, value in KEY.items() if field != name}, 1)


def test_the_longest_salt_is_taken() -> None:
    key, _ = parse("lookup", KEY | {"cache_salt": "s" * 128}, 1)
    assert key.cache_salt == "s" * 128


@pytest.mark.parametrize(
    ("name", "payload", "text"),
    [
        ("noop", (1,), "takes 0 to 0 payload frames; 1 came"),
        ("store", (KEY, 1, [[1]]), "takes 4 to 4 payload frames; 3 came"),
        ("store", (KEY, 1, [1], b""), r"block_ids?.*|not an array"),
        ("store", (KEY, 1, [[1.5]], b""), "sequence of integers"),
        ("store", (KEY, 1, [[1]], "handle"), "not bytes"),
        ("store", (KEY, None, [[1]], b""), "payload 1 of store is None"),
        ("retrieve", (KEY, 1, [[1]], b"", -1), "payload 4 of retrieve is -1"),
        ("wait_prefetch_status", ("r", "1"), "not a number of seconds"),
        ("wait_prefetch_status", ("r", float("nan")), "not a number of seconds"),
        ("wait_prefetch_status", ("r", True), "not a number of seconds"),
        ("register_kv_cache", (1, [5], "m", 1, "vllm", {}, []), r"payload 1 of register_kv_cache\[0\] is 5"),
        ("register_kv_cache", (1, [[[[[[]]]]]], "m", 1, "vllm", {}, []), "a descriptor, 4 arrays deep"),
        ("register_kv_cache", (1, [], "m", 1, "vllm", {}, [{}]), r"lacks \['engine_group_id'\]"),
        ("register_kv_cache", (1, [], "m", 1, "vllm", {}, [{"engine_group_id": -1}]), "engine_group_id is -1"),
        ("clear", (1,), "not a boolean"),
        ("ping", ("x",), "payload 0 of ping is 'x'"),
        ("kvshm_lookup", (1, 5, b""), "payload 1 of kvshm_lookup is 5, not a string"),
        ("kvshm_lookup", (1, None, b"1234567"), "no whole number of 64-bit integers"),
        ("kvshm_count", (1, [1.5]), "sequence of integers"),
        ("kvshm_register_engine_driven", (1, IDENTITY, [], "/x"), "has 0 object groups; 1 to"),
        ("kvshm_register_engine_driven", (1, IDENTITY | {"worker_id": 1}, [OBJECT], "/x"), "worker_id 1 is not in"),
        ("kvshm_register_engine_driven", (1, {}, [OBJECT], "/x"), "lacks"),
        ("kvshm_register_engine_driven", (1, IDENTITY, [OBJECT | {"meaning": b"x"}], "/x"), "not 16 bytes"),
        ("kvshm_register_engine_driven", (1, IDENTITY, [OBJECT | {"kind": "other"}], "/x"), "'attention', 'recurrent'"),
        ("kvshm_register_engine_driven", (1, IDENTITY, [OBJECT | {"nbytes": -1}], "/x"), "nbytes is -1"),
        ("kvshm_register_server_driven", (1, IDENTITY, [], "vllm", {}, [], "0"), "payload 6 .* is '0'"),
        ("kvshm_prepare_store", (1, "loan", b"", [[1, 1]]), "rising chunk numbers"),
        ("kvshm_prepare_store", (1, "loan", b"", [[-1]]), "rising chunk numbers"),
        ("kvshm_store", (1, b"", [b""], -1), "payload 3 of kvshm_store is -1"),
        ("kvshm_retrieve", (1, None, b"", [b""], -1, 0), "payload 4 of kvshm_retrieve is -1"),
    ],
)
def test_a_wrong_payload_is_refused(name: str, payload: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        parse(name, *payload)


def test_optional_frames_may_be_left_out() -> None:
    assert parse("clear") == []
    assert parse("clear", True) == [True]
    assert len(parse("retrieve", KEY, 1, [[1]], b"")) == 4
    assert parse("retrieve", KEY, 1, [[1]], b"", 7)[-1] == 7


def test_a_deeply_nested_value_does_not_break_the_reader() -> None:
    nested: Any = 1
    for _ in range(500):
        nested = [nested]
    with pytest.raises(ProtocolError):
        parse("register_kv_cache", 1, nested, "m", 1, "vllm", {}, [])


def test_ids_travel_as_bytes_or_as_arrays() -> None:
    key = CacheKey("m", 3, 2, token_array([5, 6, 7]), 0, 3, "r", "salt", {"a": 1}, 2)
    for as_bytes in (False, True):
        (back, _, ids, _) = parse(
            "store",
            encode_key(key, as_bytes=as_bytes),
            1,
            encode_block_ids([[1, 2], [2**40]], as_bytes=as_bytes),
            b"",
        )
        assert back.token_ids.tolist() == [5, 6, 7]
        assert [part.tolist() for part in ids] == [[1, 2], [2**40]]
        for field in ("model_name", "world_size", "worker_id", "start", "end", "request_id", "cache_salt"):
            assert getattr(back, field) == getattr(key, field)
        assert (back.request_configs, back.num_kv_readers) == ({"a": 1}, 2)


def test_a_key_is_written_in_lmcaches_order() -> None:
    key = CacheKey("m", 1, None, token_array([1]), 0, 0, "r")
    assert list(encode_key(key, as_bytes=False)) == list(KEY)
    assert encode_key(key, as_bytes=False)["token_ids"] == [1]
