"""Layouts of drawn registrations: groups part the layers, the chunk and the memory, whatever the engine tells."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshm.context import CPUCacheContext
from kvshm.dtypes import dtype_name
from kvshm.formats import EngineKVFormat, geometry, normalize_and_discover_per_layer_formats
from kvshm.formats.geometry import Geometry
from kvshm.layout import (
    EngineGroupInfo,
    KernelGroupInfo,
    KVLayerGroupsManager,
    all_null_chunk_masks,
    downsample_block_ids,
    engine_group_layer_indices,
    expand_engine_block_ids,
    format_kvcache_shape_spec,
    get_engine_group_indices,
    num_engine_group_infos,
    num_engine_groups,
    parse_kvcache_shape_spec,
    recalculate_blocks_to_skip,
    slice_block_ids_per_group,
)
from kvshm.spec import ArraySpec
from kvshm.strategies import REGISTRABLE_FORMATS, Registration, block_id_lists, kv_caches, kv_formats, registrations
from tests.support.addresses import Addresses, addresses, leaves_of, loose


def context_of(registration: Registration) -> CPUCacheContext:
    cache = registration.cache
    return CPUCacheContext(**registration.arguments(cache.arrays(np.zeros(cache.nbytes, np.uint8))))


def of_group(registration: Registration, group: KernelGroupInfo) -> Addresses:
    """Byte addresses of a kernel group's planes."""
    assert group.format is not None
    planes: Any = Geometry(registration.cache.normalised, group.format)
    return np.concatenate([addresses(plane) for layer in group.layer_indices for plane in planes.planes(layer)])


def kernel_groups_part_the_layers(registration: Registration) -> None:
    groups = registration.manager().kernel_groups
    layers = [layer for group in groups for layer in group.layer_indices]
    assert sorted(layers) == [layer for layer, format in enumerate(registration.cache.formats) if format is not None]
    assert [group.layer_indices[0] for group in groups] == sorted(group.layer_indices[0] for group in groups)
    for group in groups:
        assert list(group.layer_indices) == sorted(group.layer_indices)
        assert {registration.cache.formats[layer] for layer in group.layer_indices} == {group.format}


def groups_share_no_byte_and_stay_inside_the_buffer(registration: Registration) -> None:
    taken = np.concatenate([of_group(registration, group) for group in registration.manager().kernel_groups])
    assert len(np.unique(taken)) == len(taken)
    assert 0 <= taken.min() <= taken.max() < registration.cache.nbytes


def groups_name_every_byte_of_their_layers(registration: Registration) -> None:
    cache = registration.cache
    for group in registration.manager().kernel_groups:
        desc, taken = group.shape_desc, of_group(registration, group)
        assert len(taken) == desc.kv_size * desc.nl * desc.nb * desc.bs * group.hidden_dim_size * desc.element_size
    layers = [layer for layer, format in enumerate(cache.formats) if format is not None]
    format = cache.formats[layers[0]]
    assert format is not None
    if format.is_layer_list:
        wanted = np.concatenate([addresses(leaf) for layer in layers for leaf in leaves_of(cache.normalised[layer])])
        found = np.concatenate([of_group(registration, group) for group in registration.manager().kernel_groups])
        assert np.array_equal(np.sort(found), np.sort(wanted))


def object_groups_part_the_kernel_groups_and_regions_the_objects(registration: Registration) -> None:
    manager = registration.manager()
    indices = [index for group in manager.object_groups for index in group.kernel_group_indices]
    assert sorted(indices) == list(range(len(manager.kernel_groups)))
    for object_group, group in enumerate(manager.object_groups):
        assert list(group.kernel_group_indices) == sorted(group.kernel_group_indices)
        end = 0
        for index in group.kernel_group_indices:
            assert manager.offset_in_object(object_group, index) == end
            end += manager.kernel_groups[index].region_nbytes(manager.get_slots_per_chunk_in_sw(index))
        assert manager.object_nbytes(object_group) == end


def object_groups_are_alike_in_window_kind_and_tag(registration: Registration) -> None:
    manager, chunk = registration.manager(), registration.lmcache_tokens_per_chunk
    windows = manager.get_attn_desc()
    assert len(windows.num_chunks_in_sw) == len(windows.group_kinds) == len(manager.object_groups)
    if not registration.separate_object_groups:
        assert (windows.num_chunks_in_sw, windows.group_kinds) == ((-1,), ("attention",))
        return
    seen: set[tuple[int, bool, int]] = set()
    for object_group, kind, in_window in zip(
        manager.object_groups, windows.group_kinds, windows.num_chunks_in_sw, strict=True
    ):
        alike = {
            (
                group.extra_object_group_tag,
                group.recurrent_state,
                -1 if group.sw_size_tokens == -1 else (group.sw_size_tokens + chunk - 1) // chunk,
            )
            for group in (manager.kernel_groups[index] for index in object_group.kernel_group_indices)
        }
        [(tag, recurrent, chunks)] = alike
        assert alike.isdisjoint(seen)
        seen |= alike
        assert (object_group.aux, object_group.recurrent, object_group.sw_size_chunks) == (tag != 0, recurrent, chunks)
        assert kind == ("aux" if tag else "recurrent" if recurrent else "attention")
        assert in_window == (-1 if registration.full_sw_kv and not recurrent else chunks)
    regular = [not group.aux for group in manager.object_groups]
    assert regular == sorted(regular, reverse=True)


def kept_slots_are_whole_blocks_of_a_chunk(registration: Registration, num_tokens: int) -> None:
    manager, chunk = registration.manager(), registration.lmcache_tokens_per_chunk
    for index, group in enumerate(manager.kernel_groups):
        kept = manager.get_subchunk_sw_size_tokens(index)
        whole = registration.full_sw_kv or group.sw_size_tokens == -1 or group.sw_size_tokens >= chunk
        assert kept == (chunk if whole else group.sw_size_tokens)
        assert manager.blocks_per_chunk_in_sw(index) * group.tokens_per_block == kept
        assert manager.blocks_per_chunk_in_sw(index) * group.slots_per_block == manager.get_slots_per_chunk_in_sw(index)
        assert manager.blocks_per_chunk(index) * group.tokens_per_block == chunk
        assert manager.calculate_num_blocks(index, num_tokens) == num_tokens // group.tokens_per_block


def arrays_and_specs_are_laid_out_alike(registration: Registration) -> None:
    cache = registration.cache
    context = context_of(registration)
    of_specs, of_arrays = registration.manager(), context.kv_layer_groups_manager
    assert of_arrays.kernel_groups == of_specs.kernel_groups
    assert of_arrays.object_groups == of_specs.object_groups
    assert context.engine_kv_format_per_layer() == list(cache.formats)
    tokens = registration.lmcache_tokens_per_chunk
    assert [context.blocks_for_tokens(tokens, index) for index in range(len(of_specs.kernel_groups))] == [
        of_specs.blocks_per_chunk(index) for index in range(len(of_specs.kernel_groups))
    ]


def planes_part_the_region_of_their_group_in_a_chunk(registration: Registration) -> None:
    cache = registration.cache
    buffer = np.zeros(cache.nbytes, np.uint8)
    context = CPUCacheContext(**registration.arguments(cache.arrays(buffer)))
    for index, group in enumerate(context.kv_layer_groups_manager.kernel_groups):
        num_slots = context.get_slots_per_chunk_in_sw(index)
        taken = np.zeros(group.region_nbytes(num_slots), np.int64)
        in_memory = []
        for plane in context.kernel_group_planes(index):
            row = plane.paged.shape[2] * plane.paged.shape[3] * plane.paged.dtype.itemsize
            for slot in range(num_slots):
                start = plane.chunk_offset + slot * plane.chunk_slot_nbytes
                taken[start : start + row] += 1
            here = (plane.paged.ctypes.data - buffer.ctypes.data) // plane.paged.dtype.itemsize
            of_plane = ArraySpec.of(plane.paged)
            in_memory.append(addresses(ArraySpec(of_plane.shape, of_plane.stride, here, of_plane.dtype)))
        assert (taken == 1).all()
        assert np.array_equal(np.sort(np.concatenate(in_memory)), np.sort(of_group(registration, group)))


def the_staging_buffer_is_parted_by_groups(registration: Registration) -> None:
    context = context_of(registration)
    manager = context.kv_layer_groups_manager
    start = context.get_tmp_gpu_buffer_flat(0).ctypes.data
    end = 0
    for batch in range(context.max_batch_size):
        assert context.get_tmp_gpu_buffer_flat(batch).ctypes.data - start == end
        for object_group, group in enumerate(manager.object_groups):
            whole = context.get_temp_object_group_buffer(batch, object_group)
            assert whole.ctypes.data - start == end
            for index in group.kernel_group_indices:
                view = context.get_temp_kernel_group_buffer(batch, index)
                shape, dtype = context.get_kernel_group_shape_dtype(registration.lmcache_tokens_per_chunk, index)
                assert (view.shape, view.dtype, view.ctypes.data - start) == (shape, dtype, end)
                end += view.nbytes
            assert whole.ctypes.data - start + whole.nbytes == end


def longer_chunks_are_longer_objects(registration: Registration, factor: int) -> None:
    infos = tuple(replace(info, sw_size_tokens=-1) for info in registration.engine_group_infos)
    full = replace(registration, engine_group_infos=infos)
    longer = replace(full, lmcache_tokens_per_chunk=factor * full.lmcache_tokens_per_chunk)
    for index in range(len(full.manager().object_groups)):
        assert longer.manager().object_nbytes(index) == factor * full.manager().object_nbytes(index)


def without_compression_bytes_of_a_token_add_up_to_the_chunk(registration: Registration) -> None:
    plain = replace(
        registration,
        full_sw_kv=True,
        engine_group_infos=tuple(
            replace(info, tokens_per_block=0, sw_size_tokens=-1) for info in registration.engine_group_infos
        ),
    )
    context = context_of(plain)
    chunk_nbytes = context.get_tmp_gpu_buffer_flat(0).nbytes
    assert context.cache_size_per_token() * plain.lmcache_tokens_per_chunk == chunk_nbytes


def detection_by_groups_gives_the_layout_of_the_normal_form(registration: Registration) -> None:
    cache = registration.cache
    assert cache.engine_type is not None
    normalised, formats = normalize_and_discover_per_layer_formats(
        cache.kv_caches,
        engine_group_layer_indices(registration.engine_group_infos),
        cache.engine_type,
        cache.layout_hints,
    )
    assert [format for format, wanted in zip(formats, cache.formats, strict=True) if wanted is not None] == [
        format for format in cache.formats if format is not None
    ]
    assert [loose(leaf) for leaf in leaves_of(normalised)] == [loose(leaf) for leaf in leaves_of(cache.normalised)]


@settings(max_examples=120)
@given(registration=registrations(), num_tokens=st.integers(0, 200), factor=st.integers(2, 5))
def test_groups_part_layers_and_chunks(registration: Registration, num_tokens: int, factor: int) -> None:
    kernel_groups_part_the_layers(registration)
    object_groups_part_the_kernel_groups_and_regions_the_objects(registration)
    object_groups_are_alike_in_window_kind_and_tag(registration)
    kept_slots_are_whole_blocks_of_a_chunk(registration, num_tokens)
    longer_chunks_are_longer_objects(registration, factor)


@pytest.mark.parametrize("format", [None, *REGISTRABLE_FORMATS])
@settings(max_examples=8)
@given(data=st.data())
def test_groups_part_the_memory(format: EngineKVFormat | None, data: st.DataObject) -> None:
    registration = data.draw(registrations(format))
    groups_share_no_byte_and_stay_inside_the_buffer(registration)
    groups_name_every_byte_of_their_layers(registration)
    planes_part_the_region_of_their_group_in_a_chunk(registration)


@settings(max_examples=70)
@given(registration=registrations())
def test_contexts_are_laid_out_as_their_specs(registration: Registration) -> None:
    arrays_and_specs_are_laid_out_alike(registration)
    detection_by_groups_gives_the_layout_of_the_normal_form(registration)
    the_staging_buffer_is_parted_by_groups(registration)
    without_compression_bytes_of_a_token_add_up_to_the_chunk(registration)


@settings(max_examples=40)
@given(registration=registrations(), data=st.data())
def test_how_engine_groups_are_numbered_does_not_matter(registration: Registration, data: st.DataObject) -> None:
    infos = registration.engine_group_infos
    ids = sorted({info.engine_group_id for info in infos})
    others = dict(zip(ids, data.draw(st.permutations([*ids, len(ids), len(ids) + 1])), strict=False))
    renumbered = replace(
        registration,
        engine_group_infos=tuple(replace(info, engine_group_id=others[info.engine_group_id]) for info in infos),
    )
    before, after = registration.manager(), renumbered.manager()
    assert after.object_groups == before.object_groups
    assert [replace(group, engine_group_idx=0) for group in after.kernel_groups] == [
        replace(group, engine_group_idx=0) for group in before.kernel_groups
    ]


@settings(max_examples=40)
@given(registration=registrations(), data=st.data())
def test_ids_that_move_are_the_last_of_each_chunk(registration: Registration, data: st.DataObject) -> None:
    manager = registration.manager()
    ids = data.draw(block_id_lists(manager))
    for index, (full, kept) in enumerate(zip(ids, downsample_block_ids(manager, ids), strict=True)):
        whole, window = manager.blocks_per_chunk(index), manager.blocks_per_chunk_in_sw(index)
        assert kept == [block for at, block in enumerate(full) if at % whole >= whole - window]
        for skip in range(len(full) + 1):
            before = sum(at % whole >= whole - window for at in range(skip))
            assert recalculate_blocks_to_skip(whole, window, skip) == before


@settings(max_examples=40)
@given(registration=registrations(), data=st.data(), null=st.integers(0, 3))
def test_a_chunk_is_null_where_all_its_ids_are(registration: Registration, data: st.DataObject, null: int) -> None:
    manager = registration.manager()
    per_chunk = [manager.blocks_per_chunk(index) for index in range(len(manager.kernel_groups))]
    num_chunks = data.draw(st.integers(0, 3))
    ids = [
        data.draw(
            st.lists(st.sampled_from([null, null, null, 5]), min_size=num_chunks * n, max_size=num_chunks * n + 2)
        )
        for n in per_chunk
    ]
    masks = all_null_chunk_masks(ids, manager.object_groups, per_chunk, num_chunks, null)
    for group, mask in zip(manager.object_groups, masks, strict=True):
        for chunk in range(num_chunks):
            of_chunk = [ids[index][at] for index in group.kernel_group_indices
                        for at in range(chunk * per_chunk[index], (chunk + 1) * per_chunk[index])]  # fmt: skip
            assert mask[chunk] == all(block == null for block in of_chunk)


INFOS = st.lists(
    st.builds(EngineGroupInfo, st.integers(0, 4), st.lists(st.integers(0, 7), max_size=4).map(tuple)), max_size=4
)


@given(infos=INFOS, num_layers=st.integers(8, 10))
def test_engine_groups_by_layer_and_by_group_agree(infos: list[EngineGroupInfo], num_layers: int) -> None:
    by_group = engine_group_layer_indices(infos)
    by_layer = get_engine_group_indices(infos, num_layers)
    if not infos:
        assert (by_group, by_layer) == ([], None)
        return
    assert by_layer is not None
    assert len(by_group) == num_engine_groups(infos) == max(info.engine_group_id for info in infos) + 1
    assert num_engine_group_infos(infos) == len(infos)
    for layer, group in enumerate(by_layer):
        assert layer in by_group[group] if group >= 0 else all(layer not in layers for layers in by_group)
    assert sum(map(len, by_group)) == sum(len(info.layer_indices) for info in infos)


@given(infos=INFOS, data=st.data())
def test_each_kernel_group_gets_the_ids_of_its_engine_group(infos: list[EngineGroupInfo], data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=num_engine_groups(infos), max_size=7))
    assert expand_engine_block_ids(infos, ids) == [ids[info.engine_group_id] for info in infos or [EngineGroupInfo(0)]]


@given(
    tokens=st.lists(st.sampled_from([0, 2, 4, 8]), max_size=3),
    cuts=st.lists(st.integers(0, 6).map(lambda cut: 8 * cut), min_size=3, max_size=3).map(sorted),
    num_ids=st.integers(0, 30),
)
def test_slices_of_ranges_that_meet_make_the_whole(tokens: list[int], cuts: list[int], num_ids: int) -> None:
    allocated = {group: list(range(100 * group, 100 * group + num_ids)) for group in range(len(tokens))}
    start, middle, end = cuts
    whole = slice_block_ids_per_group(allocated, tokens, start, end)
    first = slice_block_ids_per_group(allocated, tokens, start, middle)
    second = slice_block_ids_per_group(allocated, tokens, middle, end)
    assert whole == [one + other for one, other in zip(first, second, strict=True)]
    everything = [allocated[group] if size else [] for group, size in enumerate(tokens)]
    assert slice_block_ids_per_group(allocated, tokens, 0, 8 * 30) == everything


@settings(max_examples=50)
@given(caches=st.lists(kv_caches(kv_formats(REGISTRABLE_FORMATS), permuted=False), min_size=1, max_size=3))
def test_the_one_line_notation_comes_back(caches: list[Any]) -> None:
    groups = []
    for cache in caches:
        manager = KVLayerGroupsManager(
            cache.normalised, cache.formats, (), geometry(cache.normalised, cache.format).block_size(0)
        )
        groups += [group for group in manager.kernel_groups
                   if dtype_name(group.dtype) in ("float16", "float32", "bfloat16", "uint8", "int8")]  # fmt: skip
    if not groups:
        return
    text = format_kvcache_shape_spec(groups)
    again = parse_kvcache_shape_spec(text)
    assert format_kvcache_shape_spec(again) == text
    for group, found in zip(groups, again, strict=True):
        assert found.shape_desc == replace(group.shape_desc, block_stride_elems=0)
    layers = [layer for group in again for layer in group.layer_indices]
    assert layers == list(range(len(layers)))
