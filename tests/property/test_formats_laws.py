"""Every format: what an engine exposes is named, put in its normal form and cut into planes, byte for byte the same."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshm.formats import (
    EngineKVFormat,
    EngineType,
    detect_format,
    geometry,
    normalize_and_discover_per_layer_formats,
)
from kvshm.layout import KVLayerGroupsManager, downsample_block_ids, format_kvcache_shape_spec
from kvshm.spec import ArraySpec
from kvshm.strategies import (
    DETECTABLE_FORMATS,
    REGISTRABLE_FORMATS,
    PagedCache,
    array_specs,
    dtypes,
    kv_caches,
    kv_formats,
    layout_hints,
)
from tests.support.addresses import addresses, all_addresses, leaves_of, loose

DETECTABLE = kv_formats(DETECTABLE_FORMATS)


def detected(cache: PagedCache, caches: Any) -> tuple[EngineKVFormat, Any]:
    assert cache.engine_type is not None
    return detect_format(caches, cache.engine_type, cache.layout_hints)


def structure(tree: Any) -> Any:
    """Lists and shapes, without strides."""
    return [structure(item) for item in tree] if isinstance(tree, list) else tuple(tree.shape)


def it_is_named_and_put_in_order(cache: PagedCache) -> None:
    format, normalised = detected(cache, cache.kv_caches)
    assert format is cache.format
    assert structure(normalised) == structure(cache.normalised)
    assert [loose(leaf) for leaf in leaves_of(normalised)] == [loose(leaf) for leaf in leaves_of(cache.normalised)]


def layer_by_layer_it_is_named_alike(cache: PagedCache) -> None:
    assert cache.engine_type is not None
    normalised, formats = normalize_and_discover_per_layer_formats(
        cache.kv_caches, [], cache.engine_type, cache.layout_hints
    )
    assert formats == [cache.format] * cache.num_layers
    assert normalised == detected(cache, cache.kv_caches)[1]


def the_normal_form_is_the_same_bytes(cache: PagedCache) -> None:
    found, exposed = all_addresses(detected(cache, cache.kv_caches)[1]), all_addresses(cache.kv_caches)
    assert np.array_equal(np.sort(found), np.sort(exposed))
    assert len(np.unique(found)) == len(found), "no byte is named twice"
    assert 0 <= found.min() <= found.max() < cache.nbytes


def arrays_and_specs_go_the_same_way(cache: PagedCache) -> None:
    buffer = np.zeros(cache.nbytes, np.uint8)
    format, normalised = detected(cache, cache.arrays(buffer))
    of_specs = detected(cache, cache.kv_caches)
    assert (format, structure(normalised)) == (of_specs[0], structure(of_specs[1]))
    for array, spec in zip(leaves_of(normalised), leaves_of(of_specs[1]), strict=True):
        itemsize = spec.dtype.itemsize
        assert array.dtype == spec.dtype
        assert array.ctypes.data - buffer.ctypes.data == spec.storage_offset * itemsize
        assert loose(ArraySpec.of(array))[1] == loose(spec)[1]


@settings(max_examples=200)
@given(cache=kv_caches(DETECTABLE))
def test_what_an_engine_exposes_is_named_and_put_in_order(cache: PagedCache) -> None:
    it_is_named_and_put_in_order(cache)
    layer_by_layer_it_is_named_alike(cache)
    the_normal_form_is_the_same_bytes(cache)
    arrays_and_specs_go_the_same_way(cache)


@given(cache=kv_caches(kv_formats([format for format in EngineKVFormat if not format.is_pbs_fused])))
def test_planes_are_the_bytes_of_their_layer_each_once(cache: PagedCache) -> None:
    found = geometry(cache.normalised, cache.format)
    of_all = []
    for layer in range(cache.num_layers):
        planes: Any = found.planes(layer)
        for plane in planes:
            assert plane.shape[:3] == (found.num_blocks, found.block_size(layer), found.num_heads(layer))
        row = sum(plane.shape[3] * plane.dtype.itemsize for plane in planes)
        assert row == found.kv_size * found.head_size(layer) * found.dtype(layer).itemsize
        assert all(plane.stride[3] == 1 for plane in planes if plane.shape[3] > 1)
        of_all += [addresses(plane) for plane in planes]
    assert np.array_equal(np.sort(np.concatenate(of_all)), np.sort(all_addresses(cache.normalised)))


@pytest.mark.parametrize("format", EngineKVFormat)
@settings(max_examples=5)
@given(data=st.data())
def test_every_format_answers_every_question(format: EngineKVFormat, data: st.DataObject) -> None:
    cache = data.draw(kv_caches(format))
    found = geometry(cache.normalised, format)
    sizes = found.num_layers, found.num_heads(0), found.head_size(0), found.hidden_dim(0)
    assert min(sizes) >= 1
    assert found.concrete_shape()
    assert format.describe()
    assert format.attention_backend
    if not format.is_pbs_fused:
        manager = KVLayerGroupsManager(cache.normalised, cache.formats, (), found.block_size(0))  # type: ignore[arg-type]
        [group] = manager.kernel_groups
        assert manager.object_nbytes(0) == group.region_nbytes(found.block_size(0))
        assert downsample_block_ids(manager, [[0]]) == [[0]]
        assert format.concrete_shape(3, 7, 11, 5, 13)
        if group.dtype in (np.dtype("float16"), np.dtype("uint8")):
            assert format_kvcache_shape_spec([group])


def test_formats_are_sorted_by_what_can_be_done_with_them() -> None:
    assert set(EngineKVFormat) - set(DETECTABLE_FORMATS) == {
        EngineKVFormat.NL_X_NB_NH_BS_TWO_HS,
        EngineKVFormat.NL_X_NB_BS_NH_TWO_HS,
    }
    assert set(DETECTABLE_FORMATS) - set(REGISTRABLE_FORMATS) == {
        EngineKVFormat.TWO_X_NL_X_NBBS_NH_HS,
        EngineKVFormat.NL_X_NBBS_ONE_HS,
    }


# Small ones: addresses of all elements are compared.
SHAPES = (
    st.lists(st.sampled_from([1, 1, 2, 2, 3, 132]), min_size=0, max_size=6)
    .map(tuple)
    .filter(lambda shape: prod(shape) <= 100_000)
)
TREES: st.SearchStrategy[Any] = st.recursive(
    array_specs(shape=SHAPES, dtype=dtypes(["uint8", "float16"]), max_side=2),
    lambda trees: st.lists(trees, max_size=3),
    max_leaves=8,
)
HINTS: st.SearchStrategy[Any] = st.none() | st.one_of(*(layout_hints(format) for format in DETECTABLE_FORMATS))


@settings(max_examples=200)
@given(caches=TREES, engine=st.sampled_from(EngineType), hints=HINTS)
def test_any_structure_has_a_format_that_fits_or_is_refused(caches: Any, engine: EngineType, hints: Any) -> None:
    try:
        format, normalised = detect_format(caches, engine, hints)
    except ValueError:
        return
    of_format = geometry(normalised, format)
    for layer in range(of_format.num_layers):
        for leaf in of_format.leaves(layer):
            sizes = dict(zip(format.axes, leaf.shape, strict=True))
            assert sizes.get("TWO", 2) == 2
            assert sizes.get("ONE", 1) == 1
            if format is EngineKVFormat.NL_X_NB_BSV_BSS:
                assert (leaf.dtype, leaf.shape[-1]) == (np.dtype("uint8"), 132)
        leaves = of_format.leaves(layer)
        assert len({leaf.shape[:2] for leaf in leaves}) == 1
        if format.kv_size == 2:
            assert len({(leaf.shape, leaf.dtype) for leaf in leaves}) == 1
    assert np.array_equal(np.sort(all_addresses(normalised)), np.sort(all_addresses(caches)))


@given(
    caches=st.lists(TREES, min_size=1, max_size=4),
    groups=st.lists(st.lists(st.integers(-1, 4), max_size=3), max_size=3),
    engine=st.sampled_from(EngineType),
    hints=HINTS,
)
def test_layers_in_no_group_may_be_anything(caches: Any, groups: Any, engine: EngineType, hints: Any) -> None:
    try:
        normalised, formats = normalize_and_discover_per_layer_formats(caches, groups, engine, hints)
    except ValueError:
        return
    if not formats[0].is_layer_list or not groups:
        return
    in_groups = {layer for group in groups for layer in group}
    assert [normalised[layer] for layer in range(len(caches)) if layer not in in_groups] == [
        caches[layer] for layer in range(len(caches)) if layer not in in_groups
    ]
    others = [caches[layer] if layer in in_groups else "anything" for layer in range(len(caches))]
    again = normalize_and_discover_per_layer_formats(others, groups, engine, hints)
    assert again[1] == formats
