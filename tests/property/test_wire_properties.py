"""Descriptors and messages: round trips, and bytes that somebody made up."""

from __future__ import annotations

import os
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvshm
from kvshm import ShmArrayWrapper, WireError, wire
from kvshm.dtypes import DTYPES
from kvshm.shm.objects import is_posix_name, posix_name
from kvshm.spec import ArraySpec
from tests.support.memory import num_descriptors

NUMBERS = st.one_of(st.integers(0, 9), st.integers(0, 2**64 - 1), st.sampled_from([2**31, 2**32, 2**63 - 1, 2**63]))
NAMES = st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1, max_size=60).filter(
    lambda text: text not in (".", "..")
)


@st.composite
def wrappers(draw: st.DrawFn) -> ShmArrayWrapper:
    shape = draw(st.lists(st.integers(0, 7), max_size=6))
    stride = draw(st.lists(st.integers(0, 2**20), min_size=len(shape), max_size=len(shape)))
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    spec = ArraySpec(tuple(shape), tuple(stride), draw(st.integers(0, 2**20)), dtype)
    nbytes = spec.byte_span + draw(st.one_of(st.just(0), st.integers(0, 2**40)))
    name = "" if nbytes == 0 and draw(st.booleans()) else "/" + draw(NAMES)
    return ShmArrayWrapper(name, nbytes, dtype, spec.shape, spec.stride, spec.storage_offset, draw(st.text(max_size=9)))


@given(wrapper=wrappers())
def test_descriptors_survive_the_wire(wrapper: ShmArrayWrapper) -> None:
    data = wrapper.to_bytes()
    again = ShmArrayWrapper.from_bytes(data)
    assert again == wrapper
    assert hash(again) == hash(wrapper)
    assert again.to_bytes() == data
    assert wire.unpack(wire.pack({"layers": [wrapper]})) == {"layers": [wrapper]}
    assert list(msgpack.unpackb(data)) == ["type", "shm_name", "nbytes", "version", "metadata"]


PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)),
)


@given(value=st.one_of(PLAIN, st.binary()))
def test_messages_survive_the_wire(value: Any) -> None:
    assert wire.unpack(wire.pack(value)) == value


def read(data: bytes) -> None:
    """Read bytes in every way: they are fine or a WireError, and nothing was opened for them."""
    before = num_descriptors()
    for reader in (ShmArrayWrapper.from_bytes, wire.unpack):
        try:
            reader(data)
        except WireError:
            continue
    assert num_descriptors() == before


@given(data=st.binary(max_size=200))
def test_made_up_bytes(data: bytes) -> None:
    read(data)


@given(wrapper=wrappers(), data=st.data())
def test_mutated_descriptors(wrapper: ShmArrayWrapper, data: st.DataObject) -> None:
    raw = bytearray(wrapper.to_bytes() if data.draw(st.booleans()) else wire.pack([wrapper]))
    for _ in range(data.draw(st.integers(1, 4))):
        index = data.draw(st.integers(0, len(raw) - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert", "remove"])):
            case "set":
                raw[index] = data.draw(st.integers(0, 255))
            case "cut":
                del raw[max(index, 1) :]
            case "insert":
                raw[index:index] = data.draw(st.binary(min_size=1, max_size=9))
            case "remove" if len(raw) > 1:
                del raw[index]
    read(bytes(raw))


FIELD_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary(), st.lists(NUMBERS)
)


@given(changes=st.dictionaries(st.sampled_from(["type", "shm_name", "nbytes", "version", "metadata", "more"]), PLAIN))
def test_fields_of_any_type(changes: dict[str, Any]) -> None:
    fields = msgpack.unpackb(ShmArrayWrapper("/x", 9, np.dtype("uint8"), (9,), (1,), 0).to_bytes()) | changes
    read(msgpack.packb(fields))


@given(changes=st.dictionaries(st.sampled_from(["dtype", "shape", "stride", "storage_offset", "more"]), FIELD_VALUES))
def test_metadata_of_any_type(changes: dict[str, Any]) -> None:
    fields = msgpack.unpackb(ShmArrayWrapper("/x", 9, np.dtype("uint8"), (9,), (1,), 0).to_bytes())
    fields["metadata"] |= changes
    read(msgpack.packb(fields))


@settings(deadline=None)
@given(shape=st.lists(NUMBERS, max_size=5), strides=st.data(), offset=NUMBERS, nbytes=st.integers(0, 300))
def test_what_is_accepted_lies_within_the_segment(
    shape: list[int], strides: st.DataObject, offset: int, nbytes: int
) -> None:
    """Whatever numbers a descriptor has, the array is inside the bytes it names, or there is none."""
    stride = strides.draw(st.lists(NUMBERS, min_size=len(shape), max_size=len(shape)))
    segment = kvshm.empty((200,), "uint8")
    start = segment.ctypes.data
    fields = {"dtype": "uint16", "shape": shape, "stride": stride, "storage_offset": offset, "device_uuid": "cpu"}
    name = kvshm.wrap(segment).shm_name
    raw = msgpack.packb({"type": "cpu_shm", "shm_name": name, "nbytes": nbytes, "version": 1, "metadata": fields})
    try:
        array = ShmArrayWrapper.from_bytes(raw).to_array()
    except WireError:
        return
    assert array.shape == tuple(shape)
    if array.size:
        last = sum((size - 1) * step for size, step in zip(array.shape, array.strides, strict=True))
        assert start <= array.ctypes.data
        assert array.ctypes.data + last + array.itemsize <= start + min(nbytes, 200)


@given(name=st.text(max_size=300))
def test_names(name: str) -> None:
    if is_posix_name(name):
        assert posix_name(name) == name
        assert "/" not in name[1:]
        assert os.fsencode(name).count(b"\0") == 0
        assert 2 <= len(name.encode()) <= 255
    else:
        with pytest.raises(WireError):
            ShmArrayWrapper(name, 1, np.dtype("uint8"), (1,), (1,), 0)
