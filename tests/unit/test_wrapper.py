"""Making shared arrays and describing them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvshm
from kvshm import ShmArrayWrapper, WireError
from kvshm.dtypes import DTYPES
from kvshm.shm import pages
from tests.support.memory import PAGE, created, exists, fill, num_mappings

FIELDS: dict[str, Any] = {
    "shm_name": "/kvshm_x",
    "nbytes": 420,
    "dtype": "float16",
    "shape": (2, 3, 5, 7),
    "stride": (105, 35, 7, 1),
    "storage_offset": 0,
}


@pytest.mark.parametrize("name", list(DTYPES))
def test_what_is_described_is_what_is_mapped(name: str) -> None:
    array = kvshm.empty((2, 3, 5), name)
    content = fill(array)
    wrapper = kvshm.wrap(array)
    assert wrapper == ShmArrayWrapper(
        shm_name=wrapper.shm_name,
        nbytes=30 * DTYPES[name].itemsize,
        dtype=name,  # type: ignore[arg-type]
        shape=(2, 3, 5),
        stride=(15, 5, 1),
        storage_offset=0,
    )
    mapped = ShmArrayWrapper.from_bytes(wrapper.to_bytes()).to_array()
    assert type(mapped) is np.ndarray
    assert (mapped.dtype, mapped.shape, mapped.strides) == (array.dtype, array.shape, array.strides)
    assert mapped.ctypes.data == array.ctypes.data
    assert mapped.tobytes() == content


def test_fresh_arrays() -> None:
    array = kvshm.zeros((7, 11), "bfloat16")
    assert type(array) is np.ndarray
    assert array.flags.c_contiguous
    assert array.ctypes.data % 64 == 0
    assert not array.view(np.uint16).any()
    assert kvshm.empty(13, np.int8).shape == (13,)
    assert kvshm.empty(np.int64(13), np.dtype("int8")).shape == (13,)
    assert kvshm.empty([2, 3], int).dtype == np.int64


def test_a_name_of_ones_own(segment_name: str) -> None:
    array = kvshm.empty((3,), "uint8", name=segment_name)
    assert kvshm.wrap(array).shm_name == segment_name
    with pytest.raises(FileExistsError, match="exists already"):
        kvshm.zeros((3,), "uint8", name=segment_name)


def test_the_name_goes_with_the_last_array() -> None:
    array = kvshm.empty((2, 3), "float32")
    name = kvshm.wrap(array).shm_name
    view = array[1]
    del array
    assert exists(name)
    assert num_mappings(name) == 1
    del view
    assert not exists(name)
    assert num_mappings(name) == 0


def test_many_arrays_in_one_segment() -> None:
    layers = kvshm.empty_many([(2, 5, 7), (3, 0), (PAGE + 1,), 3], ["float16", "int8", "uint8", "complex128"])
    wrappers = [kvshm.wrap(layer) for layer in layers]
    assert [layer.shape for layer in layers] == [(2, 5, 7), (3, 0), (PAGE + 1,), (3,)]
    name = wrappers[0].shm_name
    assert [wrapper.shm_name for wrapper in wrappers] == [name, "", name, name]
    assert [wrapper.storage_offset * wrapper.dtype.itemsize for wrapper in wrappers] == [0, 0, PAGE, 3 * PAGE]
    assert {wrapper.nbytes for wrapper in wrappers} == {3 * PAGE + 48, 0}
    assert [layer.ctypes.data % PAGE for layer in layers if layer.size] == [0, 0, 0]
    for seed, layer in enumerate(layers):
        fill(layer, seed)
    for seed, wrapper in enumerate(wrappers):
        mapped = wrapper.to_array()
        assert mapped.tobytes() == fill(np.empty_like(mapped), seed)
    assert num_mappings(name) == 1
    last = layers[-1]
    del layers
    assert exists(name)
    del last, layer, mapped
    assert not exists(name)


def test_many_arrays_of_one_dtype_and_of_none() -> None:
    assert [layer.dtype for layer in kvshm.empty_many([(2,), (3,)], "bfloat16")] == [DTYPES["bfloat16"]] * 2
    assert kvshm.empty_many([], "uint8") == []
    with pytest.raises(ValueError, match="2 shapes but 1 dtypes"):
        kvshm.empty_many([(2,), (3,)], ["uint8"])


@pytest.mark.parametrize("bad", ["float128", "V2", "float8", "bf16"])
def test_unknown_dtypes_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="unknown dtype"):
        kvshm.empty((1,), bad)


def test_negative_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        kvshm.empty((3, -1), "uint8")


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3), (0, 5)])
def test_arrays_without_elements_have_no_segment(shape: tuple[int, ...]) -> None:
    before = created()
    array = kvshm.empty(shape, "float16")
    wrapper = kvshm.wrap(array)
    assert (wrapper.shm_name, wrapper.nbytes, wrapper.shape) == ("", 0, shape)
    assert ShmArrayWrapper.from_bytes(wrapper.to_bytes()).to_array().shape == shape
    assert kvshm.share(array) is array
    assert kvshm.wrap(np.empty(shape, "float16")) == wrapper
    assert created() == before


def test_views_travel_with_offset_and_strides() -> None:
    pool = kvshm.empty((7, 2, 5, 3), "int32")
    fill(pool)
    name = kvshm.wrap(pool).shm_name
    for view, shape, stride, offset in (
        (pool[3:5], (2, 2, 5, 3), (30, 15, 3, 1), 90),
        (pool[:, 1], (7, 5, 3), (30, 3, 1), 15),
        (pool[2:, 0], (5, 5, 3), (30, 3, 1), 60),
        (pool.transpose(0, 2, 1, 3), (7, 2, 5, 3), (30, 15, 3, 1), 0),
        (pool[1:].T, (6, 2, 5, 3), (30, 15, 3, 1), 30),
    ):
        wrapper = kvshm.wrap(view)
        assert (wrapper.shm_name, wrapper.nbytes) == (name, pool.nbytes)
        assert (wrapper.shape, wrapper.stride, wrapper.storage_offset) == (shape, stride, offset)
        mapped = wrapper.to_array()
        assert mapped.ctypes.data == view.ctypes.data
        assert sorted(mapped.reshape(-1).tolist()) == sorted(view.reshape(-1).tolist())


def test_views_that_cannot_travel() -> None:
    pool = kvshm.empty((7, 5, 3), "int32")
    for view, text in (
        (pool[::-1], "negative"),
        (pool[:, ::2], "only the first axis may be padded"),
        (pool[:, :, 0], "rank 2 allows none"),
        (np.broadcast_to(pool[0, 0], (4, 3)), "overlap|gaps"),
        (pool[:, 0, 0], "rank 1 allows none"),
    ):
        with pytest.raises(ValueError, match=rf"({text}).*kvshm\.share\(array\)"):
            kvshm.wrap(view)
        assert np.array_equal(kvshm.wrap(kvshm.share(view)).to_array(), view)
    odd = pool.reshape(-1).view(np.uint8)[1:9].view(np.int32)
    with pytest.raises(ValueError, match=r"begins 1 bytes into .* no whole number of items of int32"):
        kvshm.wrap(odd)
    assert np.array_equal(kvshm.share(odd), odd)


def test_other_dtypes_over_the_same_bytes() -> None:
    pool = kvshm.empty((4, 6), "float16")
    assert kvshm.wrap(pool.view("uint8")[1:]).storage_offset == 12
    structured = pool.view([("a", "f2"), ("b", "f2")])
    with pytest.raises(ValueError, match="has no name on the wire"):
        kvshm.wrap(structured)
    with pytest.raises(ValueError, match="has no name on the wire"):
        kvshm.share(structured)
    with pytest.raises(ValueError, match="has no name on the wire"):
        kvshm.wrap(pool.view(">f2"))


def test_share_copies_only_what_is_not_shared() -> None:
    plain = np.arange(30, dtype=np.float32).reshape(5, 6)
    shared = kvshm.share(plain[:, ::-2])
    assert type(shared) is np.ndarray
    assert np.array_equal(shared, plain[:, ::-2])
    assert kvshm.share(shared) is shared
    view = shared[1:4]
    assert kvshm.share(view) is view
    gappy = shared[:, ::2]
    assert kvshm.share(gappy) is not gappy
    assert np.array_equal(kvshm.share(gappy), gappy)
    assert type(kvshm.share(np.ma.masked_array(plain))) is np.ndarray


def test_a_scalar_is_an_array() -> None:
    shared = [kvshm.share(np.array(3.0)), kvshm.share(np.float64(3)), kvshm.empty((), "float64")]
    for scalar in (*shared, kvshm.empty((7, 5), "float64")[2, 3, ...]):
        assert kvshm.is_shared(scalar)
        assert kvshm.share(scalar) is scalar
        scalar[()] = 5.5
        wrapper = kvshm.ShmArrayWrapper.from_bytes(kvshm.wrap(scalar).to_bytes())
        assert (wrapper.shape, wrapper.stride) == ((), ())
        mapped = wrapper.to_array()
        assert (mapped.shape, float(mapped)) == ((), 5.5)
        mapped[()] = 6
        assert scalar == 6
    assert kvshm.wrap(kvshm.empty((7, 5), "float64")[2, 3, ...]).storage_offset == 13


class Runtime:
    """Hands arrays out over memory that it was given, as runtimes do, and keeps that memory in a way of its own."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.given = array
        self.__array_interface__ = array.__array_interface__


# What comes back of an array: views that NumPy makes in other ways, and those of a runtime.
COMES_BACK: dict[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    "dlpack": np.from_dlpack,
    "memoryview": lambda array: np.asarray(array.data),
    "frombuffer": lambda array: np.frombuffer(array, array.dtype).reshape(array.shape),
    "as_strided": lambda array: np.lib.stride_tricks.as_strided(array, array.shape, array.strides),
    "sliding_window_view": lambda array: np.lib.stride_tricks.sliding_window_view(
        array, (array.shape[0],), axis=0, writeable=True
    )[0].transpose(2, 0, 1),
    "interface": lambda array: np.asarray(Runtime(array)),
    "ctypes": lambda array: np.ctypeslib.as_array(
        ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_float)), array.shape
    ),
}


def test_what_comes_back_by_any_way_is_shared() -> None:
    array = kvshm.empty((7, 5, 3), "float32")
    array[...] = np.arange(105).reshape(7, 5, 3)
    for way, back in COMES_BACK.items():
        for view in (array, array[2:5], array[:, 1:3], array[1:6].transpose(1, 0, 2)):
            if not view.flags.c_contiguous and way in ("frombuffer", "sliding_window_view", "ctypes"):
                continue
            other = back(view)
            assert np.array_equal(other, view), way
            assert kvshm.is_shared(other), way
            assert kvshm.wrap(other) == kvshm.wrap(view), way
            assert kvshm.share(other) is other, way


def test_what_only_begins_in_a_segment_is_not_shared() -> None:
    """Addresses of other memory that follows."""
    array = kvshm.empty((PAGE // 4,), "float32")
    beyond = np.ctypeslib.as_array(ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_float)), (PAGE // 4 + 1,))
    assert not kvshm.is_shared(beyond)


def test_memory_of_a_segment_that_went_is_not_shared() -> None:
    array = kvshm.empty((PAGE,), "uint8")
    address = array.ctypes.data
    del array
    taken = pages.map_private(PAGE, address=address)
    other = np.ctypeslib.as_array(ctypes.cast(taken, ctypes.POINTER(ctypes.c_uint8)), (PAGE,))
    assert not kvshm.is_shared(other)
    del other
    pages.unmap(taken, PAGE)


def test_what_is_not_in_shared_memory_is_refused_with_a_way_out() -> None:
    plain = np.zeros((3, 5), np.float16)
    with pytest.raises(ValueError, match=r"only whole pages .*kvshm\.share\(array\) copies it"):
        kvshm.wrap(plain)
    with pytest.raises(TypeError, match="expected a NumPy array, not list"):
        kvshm.wrap([1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a NumPy array, not NoneType"):
        kvshm.is_shared(None)  # type: ignore[arg-type]


def test_is_shared_tells_copies_from_views() -> None:
    array = kvshm.empty((5, 7), "int16")
    assert kvshm.is_shared(array)
    assert kvshm.is_shared(array[::2, ::-1])
    assert kvshm.is_shared(kvshm.wrap(array).to_array())
    assert not kvshm.is_shared(array.copy())
    assert not kvshm.is_shared(array + 1)
    assert not kvshm.is_shared(np.zeros(3))
    assert not kvshm.is_shared(array[:0])


def test_arrays_from_a_readers_mapping_can_be_described() -> None:
    array = kvshm.empty((5, 7), "int16")
    wrapper = kvshm.wrap(array)
    reader = kvshm.Segment.attach(wrapper.shm_name, readonly=True)
    assert kvshm.wrap(reader.array((5, 7), "int16")) == wrapper


def test_wrappers_are_values() -> None:
    wrapper = ShmArrayWrapper(**FIELDS)
    same = ShmArrayWrapper(**{**FIELDS, "shape": [2, 3, np.int64(5), 7], "dtype": np.float16, "nbytes": np.uint32(420)})
    assert wrapper == same
    assert hash(wrapper) == hash(same)
    assert {type(number) for number in (*same.shape, *same.stride, same.nbytes, same.storage_offset)} == {int}
    assert same.dtype is DTYPES["float16"]
    assert (wrapper.device_uuid, wrapper.handle, wrapper.device_type) == ("cpu", None, "cpu")
    assert ShmArrayWrapper.SHM_NAME_PREFIX == "/kvshm_"
    for field, other in (
        ("shm_name", "/kvshm_y"),
        ("nbytes", 421),
        ("dtype", "bfloat16"),
        ("shape", (2, 3, 4, 7)),
        ("stride", (105, 35, 6, 1)),
        ("device_uuid", "gpu"),
    ):
        assert ShmArrayWrapper(**{**FIELDS, field: other}) != wrapper
    with pytest.raises(AttributeError):
        wrapper.nbytes = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", list(DTYPES))
def test_wrappers_pickle_by_value(name: str) -> None:
    wrapper = ShmArrayWrapper(**{**FIELDS, "dtype": name, "nbytes": 4000})
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(wrapper, protocol))
        assert copy == wrapper
        assert copy.dtype is wrapper.dtype


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"nbytes": 419}, r"need bytes \[0, 420\) of the segment but nbytes is 419"),
        ({"storage_offset": 1}, r"need bytes \[0, 422\)"),
        ({"stride": (106, 35, 7, 1)}, r"need bytes \[0, 422\)"),
        ({"nbytes": -1}, "nbytes must lie between 0"),
        ({"nbytes": 2**64}, "nbytes must lie between 0"),
        ({"nbytes": True}, "nbytes must be an integer, not True"),
        ({"nbytes": 420.0}, "nbytes must be an integer"),
        ({"nbytes": None}, "nbytes must be an integer"),
        ({"storage_offset": -1}, "storage_offset must lie between 0"),
        ({"shape": (2, 3, 5, -7)}, "shape must lie between 0"),
        ({"shape": (2, 3, 5, 2**64)}, "shape must lie between 0"),
        ({"shape": (2, 3, 5, True)}, "shape must be an integer, not True"),
        ({"shape": (2, 3, 5, np.True_)}, "shape must be an integer"),
        ({"shape": (2, 3, 5)}, "must have the same rank"),
        ({"shape": (1,) * 65, "stride": (1,) * 65}, "must have the same rank, of at most"),
        ({"shape": 7}, "shape must be a sequence of integers"),
        ({"shape": "2357"}, "shape must be a sequence of integers"),
        ({"stride": {1: 2}}, "stride must be a sequence of integers"),
        ({"dtype": "float128"}, "unknown dtype 'float128'"),
        ({"dtype": 5}, "no dtype|no name on the wire"),
        ({"dtype": np.dtype([("a", "f2")])}, "no name on the wire"),
        ({"shm_name": ""}, "may be empty only without bytes"),
        ({"shm_name": "kvshm_x"}, "must be a slash and 1 to 254 bytes"),
        ({"shm_name": "/a/b"}, "must be a slash"),
        ({"shm_name": "/.."}, "must be a slash"),
        ({"shm_name": b"/kvshm_x"}, "must be a slash"),
        ({"device_uuid": 3}, "device_uuid must be a string"),
        ({"handle": b"x"}, "handle None"),
    ],
)
def test_what_the_wire_refuses_is_refused_when_built(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(WireError, match=text):
        ShmArrayWrapper(**{**FIELDS, **changes})


def test_a_segment_smaller_than_said_is_refused() -> None:
    array = kvshm.empty((10,), "uint8")
    wrapper = kvshm.wrap(array)
    lying = ShmArrayWrapper(wrapper.shm_name, 11, array.dtype, (11,), (1,), 0)
    with pytest.raises(ValueError, match="has 10 bytes but 11 were to be mapped"):
        lying.to_array()


def test_a_missing_segment_is_refused() -> None:
    with pytest.raises(FileNotFoundError, match="there is no segment '/kvshm_x'"):
        ShmArrayWrapper(**FIELDS).to_array()


def test_numbers_that_no_array_can_have_cost_nothing() -> None:
    array = kvshm.empty((6,), "int16")
    array[:] = range(6)
    name = kvshm.wrap(array).shm_name
    huge = 2**64 - 1
    lone = ShmArrayWrapper(name, 12, array.dtype, (1, 2, 1, 3), (huge, 3, huge, 1), 0)
    assert lone.to_array().tolist() == [[[[0, 1, 2]], [[3, 4, 5]]]]
    repeated = ShmArrayWrapper(name, 12, array.dtype, (2**40,), (0,), 1).to_array()
    assert (repeated.shape, repeated[2**39]) == ((2**40,), 1)
    for wrapper in (
        ShmArrayWrapper("", 0, array.dtype, (huge, 0), (1, 1), huge),
        ShmArrayWrapper(name, 12, array.dtype, (2**63, 2), (0, 0), 0),
        ShmArrayWrapper(name, huge, array.dtype, (1,), (1,), 0),
    ):
        with pytest.raises(ValueError, match=r"can be had: (.*[Mm]aximum|.*too big|segment .* has 12 bytes but)"):
            wrapper.to_array()


def test_byte_access_to_dtypes_that_have_no_buffers() -> None:
    array = kvshm.empty((4,), "bfloat16")
    array.view(np.uint16)[:] = [0x3F80, 0x7FC1, 0xFFFF, 0x8000]  # 1, two NaNs with payload, -0
    mapped = kvshm.wrap(array).to_array()
    assert mapped.view(np.uint16).tolist() == [0x3F80, 0x7FC1, 0xFFFF, 0x8000]
    with pytest.raises((BufferError, ValueError, RuntimeError)):
        memoryview(array).cast("B")  # type: ignore[arg-type]
    with contextlib.suppress(BufferError):  # DLPack has bfloat16; whether NumPy hands it over depends on the versions
        assert np.from_dlpack(array).view(np.uint16).tolist() == [0x3F80, 0x7FC1, 0xFFFF, 0x8000]
    assert np.from_dlpack(array.view(np.uint16)).tolist() == [0x3F80, 0x7FC1, 0xFFFF, 0x8000]


def test_collections_at_any_time_take_nothing() -> None:
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        arrays = []
        for index in range(20):
            array = kvshm.empty((3, 5), "int32")
            array[:] = index
            cycle: list[Any] = [array]
            cycle.append(cycle)
            arrays.append(kvshm.wrap(array).to_array())
        del array, cycle
        assert [int(array.sum()) for array in arrays] == [15 * index for index in range(20)]
    finally:
        gc.set_threshold(*threshold)
