"""Descriptors byte for byte as a real LMCache writes and reads them.

Each case is one line of ``wire.jsonl.gz``: encode and encode_list (fields to bytes), decode and decode_list (bytes to
fields, or an error), wrap (arrays to fields). The cases in ``MENDED`` show what kvshm does otherwise on purpose.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvshm
from kvshm import ShmArrayWrapper, WireError, wire
from kvshm.dtypes import DTYPES, dtype_from_name, dtype_name
from kvshm.spec import ArraySpec

with gzip.open(Path(__file__).with_name("wire.jsonl.gz"), "rt", encoding="utf-8") as _lines:
    CASES = [json.loads(line) for line in _lines]

# Dtypes that neither NumPy nor ml_dtypes has; a name that no segment can have; the first of two "type" keys wrong.
MENDED = {
    "empty name with bytes",
    "name of 256 bytes",
    "name with a null character",
    "empty name",
    "tag twice, first unknown",
}

FIELDS = ("shm_name", "nbytes", "dtype", "shape", "stride", "storage_offset", "device_uuid")


def cases(function: str) -> pytest.MarkDecorator:
    chosen = [case for case in CASES if case["fn"] == function]
    assert chosen
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case["id"] + " " + case["why"])


def build(fields: dict[str, Any]) -> ShmArrayWrapper:
    return ShmArrayWrapper(**{key: fields[key] for key in FIELDS})


def fields_of(wrapper: ShmArrayWrapper) -> dict[str, Any]:
    assert type(wrapper) is ShmArrayWrapper
    assert type(wrapper.shape) is type(wrapper.stride) is tuple
    return {
        "dtype": dtype_name(wrapper.dtype),
        "shape": list(wrapper.shape),
        "stride": list(wrapper.stride),
        "storage_offset": wrapper.storage_offset,
        "device_uuid": wrapper.device_uuid,
        "shm_name": wrapper.shm_name,
        "nbytes": wrapper.nbytes,
    }


def is_known(fields: dict[str, Any]) -> bool:
    return fields["dtype"] in DTYPES


def expected(output: dict[str, Any]) -> dict[str, Any]:
    return {key: output[key] for key in fields_of(ShmArrayWrapper("", 0, dtype_from_name("bool"), (0,), (1,), 0))}


@cases("encode")
def test_encode(case: dict[str, Any]) -> None:
    if "error" in case["output"] or case["why"] in MENDED or not is_known(case["input"]):
        with pytest.raises(WireError):
            build(case["input"])
        return
    wrapper = build(case["input"])
    assert wrapper.to_bytes().hex() == case["output"]["hex"]
    assert wire.pack([wrapper]).hex() == case["output"]["list_hex"]
    assert wrapper.dtype.itemsize == case["output"]["itemsize"]
    assert ShmArrayWrapper.from_bytes(bytes.fromhex(case["output"]["hex"])) == wrapper


@cases("encode_list")
def test_encode_list(case: dict[str, Any]) -> None:
    wrappers = [build(fields) for fields in case["input"]]
    assert wire.pack(wrappers).hex() == case["output"]["hex"]
    assert wire.unpack(bytes.fromhex(case["output"]["hex"])) == wrappers


@cases("decode")
def test_decode(case: dict[str, Any]) -> None:
    data, output = bytes.fromhex(case["input"]["hex"]), case["output"]
    is_other_device = output.get("wrapper", "CpuShmTensorWrapper") != "CpuShmTensorWrapper"
    if case["why"] == "tag twice, first unknown":  # mended: the last of repeated keys counts for every key
        assert ShmArrayWrapper.from_bytes(data).nbytes == 28
    elif "error" in output or is_other_device or case["why"] in MENDED or not is_known(output):
        with pytest.raises(WireError):
            ShmArrayWrapper.from_bytes(data)
    else:
        assert fields_of(ShmArrayWrapper.from_bytes(data)) == expected(output)


@cases("decode_list")
def test_decode_list(case: dict[str, Any]) -> None:
    data, output = bytes.fromhex(case["input"]["hex"]), case["output"]
    if isinstance(output, list):
        assert [fields_of(wrapper) for wrapper in wire.unpack(data)] == [expected(fields) for fields in output]
    elif output["message"] in ("not a list", "entry is not an extension") and "timestamp" not in case["why"]:
        # These are values that another message may hold; who wants wrappers sees that they are none.
        value = wire.unpack(data)
        assert not isinstance(value, list) or not all(isinstance(entry, ShmArrayWrapper) for entry in value)
    else:
        with pytest.raises(WireError):
            wire.unpack(data)


def storages(caches: list[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    """Number and bytes of each storage, as the largest of its leaves has it."""
    sizes: dict[int, int] = {}
    for leaf in caches:
        nbytes = leaf["storage_elems"] * dtype_from_name(leaf["dtype"]).itemsize
        sizes[leaf["storage"]] = max(sizes.get(leaf["storage"], 0), nbytes)
    return iter(sizes.items())


@cases("wrap")
def test_wrap(case: dict[str, Any]) -> None:
    caches = case["input"]["caches"]
    segments = {number: kvshm.empty(nbytes, "uint8") for number, nbytes in storages(caches)}
    names: dict[str, str] = {}
    for leaf, output in zip(caches, case["output"], strict=True):
        spec = ArraySpec(tuple(leaf["shape"]), tuple(leaf["stride"]), leaf["offset"], dtype_from_name(leaf["dtype"]))
        array = spec.view(segments[leaf["storage"]])
        if "padded rows" in case["why"]:
            with pytest.raises(ValueError, match=r"only the first axis may be padded.*kvshm\.share"):
                kvshm.wrap(array)
            continue
        wrapper = kvshm.wrap(array)
        if "error" in output:  # mended: blocks may be padded along the first axis
            assert np.shares_memory(wrapper.to_array(), array)
            assert wrapper.to_array().shape == array.shape
            continue
        found = fields_of(wrapper)
        names.setdefault(found["shm_name"], f"segment {len(names)}" if found["shm_name"] else "")
        assert {**found, "shm_name": names[found["shm_name"]]} == expected(output)
        assert np.shares_memory(wrapper.to_array(), array) == bool(array.size)
