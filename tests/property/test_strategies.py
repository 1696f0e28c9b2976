"""The strategies keep their promises: what they draw is valid, reaches everything, and shrinks to something small."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from kvshm import ShmArrayWrapper, WireError
from kvshm.dtypes import DTYPES
from kvshm.formats import EngineKVFormat
from kvshm.layout import KVLayerGroupsManager
from kvshm.spec import ArraySpec
from kvshm.strategies import (
    DETECTABLE_FORMATS,
    PagedCache,
    Registration,
    array_specs,
    arrays,
    block_id_lists,
    buffers,
    chunk_sizes,
    descriptor_bytes,
    descriptors,
    dtypes,
    engine_groups,
    kv_caches,
    layout_hints,
    mangled_descriptor_bytes,
    refused_descriptor_bytes,
    registrations,
)
from tests.support.addresses import addresses, all_addresses, leaves_of
from tests.support.processes import environment

# Without the phase that explains a failure: what it tries out may replace what was found.
SEARCH = settings(
    max_examples=1_000, database=None, deadline=None, derandomize=True, phases=[Phase.generate, Phase.shrink]
)


# Specs and arrays


@settings(max_examples=40)
@given(spec=array_specs())
def test_elements_of_a_spec_share_no_byte(spec: ArraySpec) -> None:
    found = addresses(spec)
    assert len(np.unique(found)) == len(found)


@settings(max_examples=40)
@given(spec=array_specs(min_dims=2, max_dims=3, min_side=1, max_side=4, max_offset=2, dtype=dtypes(["int8"])))
def test_bounds_of_specs_are_kept(spec: ArraySpec) -> None:
    assert 2 <= len(spec.shape) <= 3
    assert all(1 <= size <= 4 for size in spec.shape)
    assert spec.storage_offset <= 2
    assert spec.dtype == np.dtype("int8")


@settings(max_examples=40)
@given(spec=array_specs(memory=["dense"], loose_ones=False, max_offset=0))
def test_dense_specs_are_dense(spec: ArraySpec) -> None:
    assert spec == ArraySpec.dense(spec.shape, spec.dtype)


@pytest.mark.parametrize("kind", ["permuted", "padded", "strided"])
def test_other_specs_are_found(kind: Any) -> None:
    found = find(array_specs(memory=[kind], loose_ones=False), lambda spec: not spec.is_contiguous, settings=SEARCH)
    assert max(found.shape) <= 2, "shrunk"


def test_any_stride_of_an_axis_of_size_1_is_found() -> None:
    found = find(
        array_specs(memory=["dense"]), lambda spec: (1, 7) in zip(spec.shape, spec.stride, strict=True), settings=SEARCH
    )
    assert found.is_contiguous


@settings(max_examples=40)
@given(array=arrays(array_specs(dtype=dtypes(["bfloat16"]), min_side=1)))
def test_arrays_are_writable_views(array: np.ndarray[Any, Any]) -> None:
    assert array.dtype == DTYPES["bfloat16"]
    assert array.flags.writeable
    assert array.base is not None


def test_contents_are_bits_so_nans_with_payloads_are_found() -> None:
    def has_payload(array: np.ndarray[Any, Any]) -> bool:
        bits = array.view(np.uint16)
        return bool(((bits & 0x7F80 == 0x7F80) & (bits & 0x3F != 0)).any())

    found = find(arrays(st.just(ArraySpec.dense((9,), DTYPES["bfloat16"]))), has_payload, settings=SEARCH)
    assert np.isnan(found.astype(np.float32)).any()


@settings(max_examples=40)
@given(nbytes=st.integers(0, 200), data=st.data())
def test_buffers_are_as_long_as_asked(nbytes: int, data: st.DataObject) -> None:
    buffer = data.draw(buffers(nbytes))
    assert (buffer.shape, buffer.dtype, buffer.flags.writeable) == ((nbytes,), np.dtype("uint8"), True)


def test_no_two_rows_of_a_long_buffer_are_alike() -> None:
    buffer = find(buffers(4096), lambda buffer: True, settings=SEARCH)
    assert len({buffer[start : start + 16].tobytes() for start in range(0, 4096, 16)}) == 256


# Caches


@pytest.mark.parametrize("format", EngineKVFormat)
def test_caches_shrink_to_one_of_everything(format: EngineKVFormat) -> None:
    found = find(kv_caches(format), lambda cache: True, settings=settings(SEARCH, max_examples=20))
    assert found.num_layers == 1
    for leaf in leaves_of(found.normalised):
        assert leaf.storage_offset * leaf.dtype.itemsize + leaf.nbytes <= found.nbytes
        sizes = dict(zip(format.axes, leaf.shape, strict=True))
        assert {axis: size for axis, size in sizes.items() if axis not in ("TWO", "HS")} == {
            axis: 1 for axis in sizes if axis not in ("TWO", "HS")
        }


@pytest.mark.parametrize("format", EngineKVFormat)
@settings(max_examples=6)
@given(data=st.data())
def test_a_cache_stays_in_its_buffer_and_its_arrays_share_no_byte(format: EngineKVFormat, data: st.DataObject) -> None:
    cache = data.draw(kv_caches(format))
    taken = all_addresses(cache.kv_caches)
    assert len(np.unique(taken)) == len(taken)
    assert taken.max() < cache.nbytes
    buffer = data.draw(cache.buffers())
    assert len(buffer) == cache.nbytes
    assert all(np.shares_memory(array, buffer) for array in leaves_of(cache.arrays(buffer)))
    assert cache.format is format
    assert (cache.engine_type is None) == (format not in DETECTABLE_FORMATS)


@settings(max_examples=40)
@given(cache=kv_caches(permuted=False, padded=False, max_side=3, dtype=dtypes(["float32"])))
def test_bounds_of_caches_are_kept(cache: PagedCache) -> None:
    assert cache.num_layers <= 3
    for leaf in leaves_of(cache.kv_caches):
        assert leaf.is_contiguous
        assert leaf.dtype in (np.dtype("float32"), np.dtype("uint8"))


def test_hints_belong_to_formats_that_engines_expose() -> None:
    found = find(layout_hints(EngineKVFormat.NL_X_TWO_NB_BS_NH_HS), lambda hints: True, settings=SEARCH)
    assert found == {"kv_layout": "NHD"}
    with pytest.raises(ValueError, match="no engine exposes NL_X_NB_NH_BS_TWO_HS; choose one of DETECTABLE_FORMATS"):
        find(layout_hints(EngineKVFormat.NL_X_NB_NH_BS_TWO_HS), lambda hints: True, settings=SEARCH)


# Registrations


def features(registration: Registration) -> set[str]:
    """What is special about a registration."""
    manager, cache = registration.manager(), registration.cache
    order = [index for group in manager.object_groups for index in group.kernel_group_indices]
    formats = {format for format in cache.formats if format is not None}
    found = set()
    ids = [info.engine_group_id for info in registration.engine_group_infos]
    exposed = list(leaves_of(cache.kv_caches))
    for name, holds in {
        "several groups": len(manager.kernel_groups) > 1,
        "several formats": len(formats) > 1,
        "no groups told": not ids,
        "one engine group of several kernel groups": len(set(ids)) < len(ids),
        "engine groups out of order": ids != sorted(ids),
        "layers in no group": None in cache.formats,
        "first layer in no group": cache.formats[0] is None,
        "objects out of order": order != sorted(order),
        "objects of neighbours only": order == sorted(order) and len(manager.object_groups) > 1,
        "tagged": any(group.aux for group in manager.object_groups),
        "recurrent": any(group.recurrent_state for group in manager.kernel_groups),
        "compressed": any(group.tokens_per_block != group.slots_per_block for group in manager.kernel_groups),
        "window below a chunk": any(
            manager.get_subchunk_sw_size_tokens(index) < registration.lmcache_tokens_per_chunk
            for index in range(len(manager.kernel_groups))
        ),
        "window above a chunk": any(
            group.sw_size_tokens > registration.lmcache_tokens_per_chunk for group in manager.kernel_groups
        ),
        "whole chunks kept": registration.full_sw_kv,
        "padded blocks": any(
            group.shape_desc.block_stride_elems > group.slots_per_block * group.hidden_dim_size
            for group in manager.kernel_groups
        ),
        "axes out of order": any(not leaf.is_contiguous and leaf.stride[-1] > 1 for leaf in exposed),
        "several dtypes": len({group.dtype for group in manager.kernel_groups}) > 1,
    }.items():
        if holds:
            found.add(name)
    return found


def test_registrations_reach_every_feature() -> None:
    seen: dict[str, int] = {}

    @settings(
        max_examples=300,
        database=None,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(registration=registrations())
    def collect(registration: Registration) -> None:
        for feature in features(registration):
            seen[feature] = seen.get(feature, 0) + 1

    collect()
    wanted = {
        "several groups", "several formats", "no groups told", "one engine group of several kernel groups",
        "engine groups out of order", "layers in no group", "first layer in no group", "objects out of order",
        "objects of neighbours only", "tagged", "recurrent", "compressed", "window below a chunk",
        "window above a chunk", "whole chunks kept", "padded blocks", "axes out of order", "several dtypes",
    }  # fmt: skip
    assert {feature for feature in wanted if feature not in seen} == set()


def test_registrations_shrink_to_something_small() -> None:
    found = find(
        registrations(EngineKVFormat.NL_X_NB_BS_HS),
        lambda registration: "compressed" in features(registration),
        settings=SEARCH,
    )
    assert (found.cache.num_layers, len(found.engine_group_infos)) == (1, 1)
    assert found.lmcache_tokens_per_chunk <= 4


@settings(max_examples=40)
@given(registration=registrations(EngineKVFormat.NL_X_NB_BS_HS, dtype=dtypes(["int8"]), max_side=2))
def test_bounds_of_registrations_are_kept(registration: Registration) -> None:
    assert set(registration.cache.formats) == {EngineKVFormat.NL_X_NB_BS_HS}
    assert registration.cache.num_layers <= 2
    for group in registration.manager().kernel_groups:
        assert (group.dtype, max(group.slots_per_block, group.hidden_dim_size) <= 2) == (np.dtype("int8"), True)


@settings(max_examples=40)
@given(registration=registrations(), unique=st.booleans(), data=st.data())
def test_block_ids_are_those_of_whole_chunks(registration: Registration, unique: bool, data: st.DataObject) -> None:
    manager = registration.manager()
    ids = data.draw(block_id_lists(manager, unique=unique, max_chunks=2))
    chunks = {len(of_group) // manager.blocks_per_chunk(index) for index, of_group in enumerate(ids)}
    assert chunks <= {1, 2}
    assert len(chunks) == 1
    for index, of_group in enumerate(ids):
        assert len(of_group) % manager.blocks_per_chunk(index) == 0
        assert all(0 <= block < manager.kernel_groups[index].shape_desc.nb for block in of_group)
        if unique:
            assert len(set(of_group)) == len(of_group)


def test_more_unique_block_ids_than_blocks_are_refused() -> None:
    layers = [ArraySpec.dense((3, 2, 5), np.dtype("uint8"))]
    manager = KVLayerGroupsManager(layers, [EngineKVFormat.NL_X_NB_BS_HS], (), 4)
    with pytest.raises(ValueError, match=r"2 chunks of \[2\] blocks need more than the \[3\] blocks there are"):
        find(block_id_lists(manager, num_chunks=2), lambda ids: True, settings=SEARCH)
    assert find(block_id_lists(manager, num_chunks=2, unique=False), lambda ids: True, settings=SEARCH) == [[0] * 4]
    assert find(block_id_lists(manager), lambda ids: True, settings=SEARCH) == [[0, 1]]


@settings(max_examples=40)
@given(slots=st.lists(st.integers(1, 6), min_size=1, max_size=3), data=st.data())
def test_chunks_are_whole_blocks_and_infos_fit_them(slots: list[int], data: st.DataObject) -> None:
    chunk = data.draw(chunk_sizes(slots))
    assert all(chunk % size == 0 for size in slots)
    layers = [ArraySpec.dense((7, size, 5 + index), np.dtype("uint8")) for index, size in enumerate(slots)]
    infos = data.draw(engine_groups([[layer] for layer in range(len(slots))], slots, chunk))
    manager = KVLayerGroupsManager(layers, [EngineKVFormat.NL_X_NB_BS_HS] * len(slots), infos, chunk)
    assert [group.layer_indices for group in manager.kernel_groups] == [(layer,) for layer in range(len(slots))]


# Descriptors


@settings(max_examples=40)
@given(data=descriptor_bytes())
def test_well_formed_descriptors_are_read(data: bytes) -> None:
    wrapper = ShmArrayWrapper.from_bytes(data)
    fields = msgpack.unpackb(data)
    metadata = fields["metadata"]
    assert (wrapper.shm_name, wrapper.nbytes) == (fields["shm_name"], fields["nbytes"])
    assert (list(wrapper.shape), list(wrapper.stride)) == (metadata["shape"], metadata["stride"])
    assert (wrapper.storage_offset, wrapper.device_uuid) == (metadata["storage_offset"], metadata["device_uuid"])
    assert wrapper.dtype == DTYPES[metadata["dtype"]]


@settings(max_examples=40)
@given(fields=descriptors())
def test_fields_of_descriptors_are_in_the_order_in_which_they_are_written(fields: dict[str, Any]) -> None:
    assert msgpack.packb(fields) == ShmArrayWrapper.from_bytes(msgpack.packb(fields)).to_bytes()


@settings(max_examples=150)
@given(data=refused_descriptor_bytes())
def test_wrong_descriptors_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        ShmArrayWrapper.from_bytes(data)


def test_broken_descriptors_are_refused_or_read() -> None:
    num_read = 0

    @settings(max_examples=100, database=None, derandomize=True)
    @given(data=mangled_descriptor_bytes())
    def check(data: bytes) -> None:
        nonlocal num_read
        try:
            wrapper = ShmArrayWrapper.from_bytes(data)
        except WireError:
            return
        num_read += 1
        assert ShmArrayWrapper.from_bytes(wrapper.to_bytes()) == wrapper

    check()
    assert 0 < num_read < 75, "both are reached"


# Imports


def test_strategies_know_layouts_and_nothing_of_memory() -> None:
    allowed = {
        "arrays",
        "caches",
        "contiguity",
        "descriptors",
        "dtypes",
        "formats",
        "forms",
        "layout",
        "registrations",
        "spec",
    }
    for path in (Path(__file__).parents[2] / "kvshm" / "strategies").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvshm"):
                assert node.module.split(".")[-1] in allowed, f"{path.name} imports {node.module}"


def test_nothing_else_imports_hypothesis() -> None:
    code = "import sys, kvshm, kvshm.context, kvshm.layout, kvshm.transfer; print('hypothesis' in sys.modules)"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_wrong_arguments_are_told_by_hypothesis() -> None:
    with pytest.raises(InvalidArgument):
        find(array_specs(min_side=3, max_side=2), lambda spec: True, settings=SEARCH)
