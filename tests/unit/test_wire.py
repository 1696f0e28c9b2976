"""Messages, and what is refused."""

from __future__ import annotations

import enum
from typing import Any

import msgpack
import numpy as np
import pytest

import kvshm
from kvshm import ShmArrayWrapper, WireError, wire

WRAPPER = ShmArrayWrapper("/kvshm_x", 30, np.dtype("uint8"), (5, 6), (6, 1), 0)


def test_wire_error_is_a_value_error() -> None:
    assert issubclass(WireError, ValueError)
    assert wire.WireError is kvshm.WireError


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**63),
        2**64 - 1,
        1.5,
        "ключ",
        b"\x00\xff",
        [],
        [1, [2, [3]]],
        {"a": {"b": [None]}},
        WRAPPER,
        [WRAPPER, WRAPPER],
        {"layers": [WRAPPER]},
        list(range(100_000)),
        b"\xd6\xff" * 9,
        ["\x7f" * 300],
    ],
    ids=lambda value: type(value).__name__,
)
def test_round_trips(value: Any) -> None:
    data = wire.pack(value)
    for kind in (bytes, bytearray, memoryview):
        assert wire.unpack(kind(data)) == value


def test_other_integers_and_tuples() -> None:
    class Operation(enum.IntEnum):
        STORE = 6

    assert wire.unpack(wire.pack([np.int64(5), np.uint8(7), Operation.STORE, (1, 2)])) == [5, 7, 6, [1, 2]]


def test_what_cannot_be_sent() -> None:
    for value in ({1, 2}, object(), np.zeros(3), np.float32(1)):
        with pytest.raises(TypeError, match=f"cannot send {type(value).__name__}: a message holds"):
            wire.pack(value)
    for number in (2**64, -(2**63) - 1):
        with pytest.raises(WireError, match=f"integer {number} is beyond 64 bits"):
            wire.pack(number)
    with pytest.raises(WireError, match="text is not Unicode"):
        wire.pack("\udc80")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "not one MessagePack value"),
        (b"\xc1", "not one MessagePack value"),
        (b"\x01\x02", "1 bytes follow the value"),
        (b"\x92\x01", "not one MessagePack value"),
        (b"\x81\x01\x02", "not one MessagePack value"),  # a key that is no string
        (b"\xa1\xff", "not one MessagePack value"),  # no Unicode
        (b"\xd4\x02\x00", "unknown extension type 2"),
        (b"\xd4\x80\x00", "unknown extension type -128"),
        (b"\xd6\xff\x00\x00\x00\x00", "unknown extension type -1"),
        (b"\x92\x01\xd7\xff" + b"\0" * 8, "unknown extension type -1"),
        (b"\x81\xa1a\xc7\x0c\xff" + b"\0" * 12, "unknown extension type -1"),
        (b"\xd4\x01\xc0", "descriptor must be a map, not NoneType"),
        (b"\x80\x04\x95.", "3 bytes follow"),  # how a pickle begins
    ],
)
def test_bytes_that_are_no_message(data: bytes, text: str) -> None:
    with pytest.raises(WireError, match=text):
        wire.unpack(data)


@pytest.mark.parametrize(
    "bomb",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\xdd\x00\xff\xff\xff" * 500 + b"\0" * 20_000_000,
        b"\x91" * 1_000_000,
        b"\x91" * 100_000 + b"\xc0",
    ],
    ids=["array", "map", "string", "extension", "arrays in arrays", "endless nesting", "deep nesting"],
)
def test_a_few_bytes_cannot_ask_for_much(bomb: bytes) -> None:
    # Reading lists of lists of announced lengths without looking ahead takes minutes, or the memory.
    for read in (wire.unpack, ShmArrayWrapper.from_bytes):
        with pytest.raises(WireError, match=r"not one MessagePack value|bytes follow the value"):
            read(bomb)
    with pytest.raises(WireError, match="not one MessagePack value"):
        wire.unpack(b"\xc9" + len(bomb).to_bytes(4, "big") + b"\x01" + bomb)


def descriptor(**changes: Any) -> bytes:
    fields = msgpack.unpackb(WRAPPER.to_bytes())
    metadata = fields["metadata"]
    for key, value in changes.items():
        target = metadata if key in metadata else fields
        if value is ...:
            del target[key]
        else:
            target[key] = value
    return bytes(msgpack.packb(fields))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"type": "cuda"}, "descriptor of type 'cuda'; only 'cpu_shm' can be mapped here"),
        ({"type": 5}, "descriptor of type 5"),
        ({"type": ["cpu_shm"]}, "descriptor of type"),
        ({"version": 2}, "version 2; only 1 is known"),
        ({"version": True}, "version True"),
        ({"version": 1.0}, "version 1.0"),
        ({"version": ...}, r"lacks the keys \['version'\]"),
        ({"extra": None}, r"unknown ones \[\"'extra'\"\]"),
        ({"metadata": None}, "metadata must be a map, not NoneType"),
        ({"dtype": ...}, r"metadata lacks the keys \['dtype'\]"),
        ({"dtype": b"uint8"}, "dtype must be a name"),
        ({"dtype": "V2"}, "unknown dtype 'V2'"),
        ({"dtype": "torch.uint8"}, "unknown dtype 'torch.uint8'"),
        ({"shape": "ab"}, "shape must be a sequence"),
        ({"stride": [6, 1.0]}, "stride must be an integer, not 1.0"),
        ({"nbytes": 29}, r"need bytes \[0, 30\)"),
        ({"shm_name": None}, "must be a slash"),
    ],
)
def test_descriptors_that_are_refused(changes: dict[str, Any], text: str) -> None:
    data = descriptor(**changes)
    with pytest.raises(WireError, match=text):
        ShmArrayWrapper.from_bytes(data)
    with pytest.raises(WireError, match=text):
        wire.unpack(msgpack.packb([msgpack.ExtType(1, data)]))


def test_the_last_of_repeated_keys_counts() -> None:
    assert ShmArrayWrapper.from_bytes(b"\x86\xa4type\xa1x" + descriptor()[1:]) == WRAPPER


def test_any_device_identity_is_read() -> None:
    assert ShmArrayWrapper.from_bytes(descriptor(device_uuid="GPU-7" * 100)).device_uuid == "GPU-7" * 100


@pytest.mark.parametrize(
    "data", ["d6ff00000000", "c704ff00000000", "c708ff" + "00" * 8, "c8000cff" + "00" * 12, "c90000000cff" + "00" * 12]
)
def test_a_timestamp_is_refused_however_it_is_written(data: str) -> None:
    with pytest.raises(WireError, match=r"timestamp|not one MessagePack value"):
        wire.unpack(bytes.fromhex(data))
    with pytest.raises(WireError, match=r"timestamp|not one MessagePack value"):
        wire.unpack(b"\x92\x01" + bytes.fromhex(data))


def test_nesting_that_looks_like_a_timestamp_is_an_error_of_the_wire_or_none() -> None:
    data = b"\x91" * 1000 + b"\xc4\x02\xd6\xff"
    try:
        value = wire.unpack(data)
    except WireError:
        return
    for _ in range(1000):
        [value] = value
    assert value == b"\xd6\xff"
