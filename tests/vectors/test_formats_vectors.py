"""Facts of the formats, and sizes read through them, as LMCache 0.5.6 has them."""

from __future__ import annotations

from typing import Any

import pytest

from kvshm.dtypes import dtype_name
from kvshm.formats import EngineKVFormat, geometry
from tests.support.vectors import Storages, attempt, each, is_error, load, same, specs_of

CASES = load("formats")
FACTS = [case for case in CASES if case["kind"] == "facts"]
NAMED = [case for case in FACTS if not is_error(case["output"])]
GEOMETRIES = [case for case in CASES if case["kind"] == "geometry"]

# LMCache writes no numbers for the first two, and the slots twice for the third; kvshm writes the shape.
OTHER_SHAPE_TEXT = {"NL_X_NB_NH_BS_CS", "NL_X_NB_BS_NH_CS", "NL_X_NB_BSV_BSS"}


def test_all_formats_are_recorded() -> None:
    assert {case["output"]["name"]: case["output"]["value"] for case in NAMED} == dict(EngineKVFormat.__members__)


@each(NAMED)
def test_facts(case: dict[str, Any]) -> None:
    recorded = case["output"]
    format = EngineKVFormat[recorded["name"]]
    assert {fact: getattr(format, fact) for fact in recorded["facts"]} == recorded["facts"]
    assert format.describe() == recorded["symbolic_shape"]
    assert format.has_block_axis == recorded["block_axis"]
    assert format.attention_backend == recorded["attention_backend"]


@each(NAMED)
def test_shape_of_a_layer_as_engines_allocate_it(case: dict[str, Any]) -> None:
    format = EngineKVFormat[case["output"]["name"]]
    for sizes in case["output"]["paged_layer_shape"]:
        found = attempt(format.paged_layer_shape, *(sizes[size] for size in ("nb", "bs", "nh", "hs")))
        assert same(list(found) if isinstance(found, tuple) else found, sizes["result"])


@each(NAMED)
def test_shape_in_numbers(case: dict[str, Any]) -> None:
    recorded = case["output"]["concrete_from_shape_desc"]
    found = EngineKVFormat[case["output"]["name"]].concrete_shape(*case["input"]["shape_desc"])
    if case["output"]["name"] in OTHER_SHAPE_TEXT:
        assert recorded.startswith("Unknown")
        assert found.startswith(f"{case['input']['shape_desc'][0]} x [")
    else:
        assert found == recorded


@each([case for case in FACTS if is_error(case["output"])])
def test_unknown_values(case: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"unknown KV format -?\d+; known are 0 to 18: NB_NL_TWO_BS_NH_HS, "):
        EngineKVFormat(case["input"]["value"])


@each(GEOMETRIES)
def test_geometry(case: dict[str, Any]) -> None:
    check_geometry(case, specs_of(case["input"]["caches"]))
    check_geometry(case, Storages(case["input"]["caches"]).arrays)


def check_geometry(case: dict[str, Any], caches: Any) -> None:
    format = EngineKVFormat[case["input"]["format"]]
    found = geometry(caches, format)
    whole = case["output"]["whole"]
    for size in ("num_layers", "num_blocks", "kv_size"):
        assert same(attempt(getattr, found, size), whole[size]), size
    if format.name not in OTHER_SHAPE_TEXT or not format.is_mla:
        assert same(attempt(found.concrete_shape), whole["concrete_shape"])
    for layer, recorded in enumerate(case["output"]["layers"]):
        for size in ("block_size", "num_heads", "head_size", "hidden_dim"):
            assert same(attempt(getattr(found, size), layer), recorded[size]), (layer, size)
        assert dtype_name(found.dtype(layer)) == recorded["dtype"]


@each(GEOMETRIES)
def test_addresses_of_arrays(case: dict[str, Any]) -> None:
    format = EngineKVFormat[case["input"]["format"]]
    storages = Storages(case["input"]["caches"])
    found: Any = geometry(storages.arrays, format)
    layers = case["input"]["pointer_layers"]
    if format.is_cross_layer:
        arrays = list(found.leaves(0))
    elif format.is_kv_list:
        arrays = [found.leaves(layer)[plane] for plane in range(2) for layer in layers]
    else:
        arrays = [array for layer in layers for array in found.leaves(layer)]
    places = [storages.place(array.ctypes.data) for array in arrays]
    assert [place and list(place) for place in places] == case["output"]["pointers"]
