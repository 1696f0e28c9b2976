"""Descriptors: LMCache maps what kvshm describes, kvshm what LMCache describes, and both see the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kvshm
from kvshm.dtypes import DTYPES
from tests.interop.processes import LMCachePeer

SHAPE = (3, 5, 7)

every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def _random_bytes(shape: tuple[int, ...], dtype: str, seed: int) -> bytes:
    size = int(np.prod(shape)) * DTYPES[dtype].itemsize
    # A bool has two values; others any bits, NaNs of all kinds among them.
    return np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, size, dtype=np.uint8).tobytes()


def _fill(array: NDArray[Any], seed: int) -> bytes:
    data = _random_bytes(array.shape, kvshm.wrap(array).dtype.name, seed)
    array[...] = np.frombuffer(data, array.dtype).reshape(array.shape)
    return data


def _check_both_see_all(peer: LMCachePeer, tensor: int, array: NDArray[Any], dtype: str) -> None:
    """What one side writes the other reads."""
    for seed in (1, 2):
        data = _random_bytes(array.shape, dtype, seed)
        array[...] = np.frombuffer(data, array.dtype).reshape(array.shape)
        assert peer.call("read", tensor=tensor) == data.hex()
        data = _random_bytes(array.shape, dtype, -seed % 97)
        peer.call("write", tensor=tensor, data=data.hex())
        assert array.tobytes() == data


@every_dtype
def test_lmcache_maps_what_kvshm_describes(peer: LMCachePeer, dtype: str) -> None:
    array = kvshm.zeros(SHAPE, dtype)
    descriptor = kvshm.wrap(array).to_bytes()
    mapped = peer.call("map", descriptor=descriptor.hex())
    tensor = mapped.pop("tensor")
    assert mapped == {
        "dtype": dtype,
        "shape": list(SHAPE),
        "stride": [35, 7, 1],
        "storage_offset": 0,
        "again": descriptor.hex(),
    }
    _check_both_see_all(peer, tensor, array, dtype)
    peer.call("drop", tensors=[tensor])


@every_dtype
def test_kvshm_maps_what_lmcache_describes(peer: LMCachePeer, dtype: str) -> None:
    tensor = peer.call("make", dtype=dtype, shape=list(SHAPE))
    descriptor = bytes.fromhex(peer.call("share", tensor=tensor))
    wrapper = kvshm.ShmArrayWrapper.from_bytes(descriptor)
    assert (wrapper.dtype, wrapper.shape, wrapper.stride) == (DTYPES[dtype], SHAPE, (35, 7, 1))
    assert wrapper.to_bytes() == descriptor
    _check_both_see_all(peer, tensor, wrapper.to_array(), dtype)
    peer.call("drop", tensors=[tensor])


def test_lmcache_maps_views_of_a_shared_segment(peer: LMCachePeer) -> None:
    # One segment for all layers, and blocks that are padded or start inside it.
    pool = kvshm.zeros((11, 64), "float16")
    views = {
        "padded": pool[:, :35].reshape(11, 5, 7),
        "from the third block on": pool[3:, 7:42].reshape(8, 5, 7),
    }
    for name, view in views.items():
        wrapper = kvshm.wrap(view)
        mapped = peer.call("map", descriptor=wrapper.to_bytes().hex())
        tensor = mapped["tensor"]
        assert (mapped["stride"], mapped["storage_offset"]) == (list(wrapper.stride), wrapper.storage_offset), name
        _check_both_see_all(peer, tensor, view, "float16")
        peer.call("drop", tensors=[tensor])


def test_heads_first_memory_travels_as_it_lies(peer: LMCachePeer) -> None:
    shape, axes = [2, 5, 3, 4, 7], [0, 1, 3, 2, 4]
    permuted = kvshm.zeros(shape, "bfloat16").transpose(axes)
    ours = peer.call("map", descriptor=kvshm.wrap(permuted).to_bytes().hex())
    tensor = peer.call("make", dtype="bfloat16", shape=shape, axes=axes)
    theirs = kvshm.ShmArrayWrapper.from_bytes(bytes.fromhex(peer.call("share", tensor=tensor)))
    assert list(theirs.shape) == ours["shape"] == shape
    assert list(theirs.stride) == ours["stride"]
    peer.call("drop", tensors=[tensor, ours["tensor"]])


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16"])
def test_arrays_without_bytes_travel(peer: LMCachePeer, dtype: str) -> None:
    wrapper = kvshm.wrap(kvshm.zeros((0, 5), dtype))
    mapped = peer.call("map", descriptor=wrapper.to_bytes().hex())
    assert (mapped["shape"], mapped["again"]) == ([0, 5], wrapper.to_bytes().hex())
    tensor = peer.call("make", dtype=dtype, shape=[0, 5])
    theirs = kvshm.ShmArrayWrapper.from_bytes(bytes.fromhex(peer.call("share", tensor=tensor)))
    assert theirs == wrapper
    assert theirs.to_array().shape == (0, 5)
    peer.call("drop", tensors=[tensor, mapped["tensor"]])


def test_a_list_of_descriptors_is_one_frame(peer: LMCachePeer) -> None:
    arrays = kvshm.empty_many([SHAPE, (2, 13)], ["bfloat16", "uint8"])
    frame = kvshm.wire.pack([kvshm.wrap(array) for array in arrays])
    mapped = peer.call("map_frame", frame=frame.hex())
    assert mapped["again"] == frame.hex()
    for array, tensor, dtype in zip(arrays, mapped["tensors"], ("bfloat16", "uint8"), strict=True):
        _check_both_see_all(peer, tensor, array, dtype)
    peer.call("drop", tensors=mapped["tensors"])

    tensors = [peer.call("make", dtype="float32", shape=list(SHAPE)) for _ in range(3)]
    theirs = bytes.fromhex(peer.call("frame", tensors=tensors))
    wrappers = kvshm.wire.unpack(theirs)
    assert kvshm.wire.pack(wrappers) == theirs
    for tensor, wrapper in zip(tensors, wrappers, strict=True):
        _check_both_see_all(peer, tensor, wrapper.to_array(), "float32")
    peer.call("drop", tensors=tensors)


def test_memory_lives_as_long_as_somebody_maps_it(peer: LMCachePeer) -> None:
    # The name goes with its creator's array; the pages stay for the other side.
    array = kvshm.zeros(SHAPE, "float32")
    mapped = peer.call("map", descriptor=kvshm.wrap(array).to_bytes().hex())
    data = _fill(array, 3)
    del array
    assert peer.call("read", tensor=mapped["tensor"]) == data.hex()

    tensor = peer.call("make", dtype="float32", shape=list(SHAPE))
    wrapper = kvshm.ShmArrayWrapper.from_bytes(bytes.fromhex(peer.call("share", tensor=tensor)))
    theirs = wrapper.to_array()
    peer.call("write", tensor=tensor, data=data.hex())
    peer.call("drop", tensors=[tensor, mapped["tensor"]])
    assert theirs.tobytes() == data
    with pytest.raises(FileNotFoundError, match="lmcache_kv_"):
        kvshm.ShmArrayWrapper.from_bytes(wrapper.to_bytes().replace(b"_", b"_", 1)).to_array()
