"""Which format a cache has, its normal form and its sizes, as LMCache 0.5.6 finds them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from kvshm.dtypes import dtype_name
from kvshm.formats import EngineKVFormat, Geometry, detect_format, normalize_and_discover_per_layer_formats
from tests.support.vectors import Storages, attempt, described, each, is_error, load, same, specs_of

CASES = load("detect")
BY_ID = {case["id"]: case for case in CASES}


class Mended(NamedTuple):
    """What kvshm does on purpose where LMCache does otherwise; see docs/differences.md."""

    number: int  # of the difference
    expected: str  # format of all layers, or what the error says


def _mended() -> Iterator[tuple[tuple[str, str], Mended]]:
    k_v = "kv_list_layout 'k_v' pairs arrays? .* pair"
    one_format = "a structure has one format"
    of_kv = "of one layer differ; .* takes K and V of one shape and dtype"
    fits = "which does not fit an array"
    for number, expected, detect, normalize in (
        (1, k_v, "190 191 192 193 194 198 199 203 237 238 239 240 241 245 246 250 365",
                 "190 191 192 194 197 198 199 203 237 238 239 241 244 245 246 250 365"),
        (1, "pass the layout hint 'tokens_per_block'", "195 242", "195 242"),
        (2, "NB_NL_TWO_NH_BS_HS is .* " + fits, "286 287 310 311", "286 287 310 311"),
        (2, "no known TRT-LLM layout is", "", "303 327"),
        (3, of_kv, "71 134 217 264", "71 134 217 264"),
        (3, "no known vLLM layout is .* known are one array for all layers", "81 82 144 145 363 366 371",
                                                                             "81 82 144 145 363 366 371"),
        (3, one_format, "89 90 101 102 152 153 164 165 180 227", ""),
        (3, fits, "208 210 211 214 255 257 258 261", "208 210 211 214 255 257 258 261"),
        (3, "K/V lists must be two of one length", "215 216 262 263", "215 216 262 263"),
        (4, "NL_X_NB_BS_HS", "63 126", "63 126"),
        (5, "NL_X_TWO_NB_BS_NH_HS", "54", "54"),
        (5, "NL_X_TWO_NB_NH_BS_HS", "117", "117"),
        (12, "a group names layer -1, but the layers are 0 to 1", "", "97 160"),
        (25, "unknown layout hints 'spam'", "176", "176"),
    ):  # fmt: skip
        for function, ids in (("detect", detect), ("normalize", normalize)):
            for case in ids.split():
                yield (f"detect-{int(case):04}", function), Mended(number, expected)


MENDED = dict(_mended())
HEADS_FIRST_PAIRS = ("detect-0132", "detect-0133")  # 21: read with the heads first, as the hint says


def found_by(function: str, case: dict[str, Any], caches: Any) -> Any:
    """Normalised cache and formats, or an error."""
    given = case["input"]
    if function == "detect":
        found: Any = attempt(detect_format, caches, given["engine"], given["hints"])
        return found if is_error(found) else (found[1], [found[0]])
    return attempt(
        normalize_and_discover_per_layer_formats,
        caches,
        given["layer_index_groups"],
        given["engine"],
        given["hints"],
    )


def check_geometry(case: dict[str, Any], normalised: Any, formats: list[EngineKVFormat], recorded: Any) -> None:
    groups = case["input"]["layer_index_groups"]
    in_groups = {layer for group in groups for layer in group} or set(range(len(recorded["layers"])))
    if recorded["whole"] is not None:
        whole = Geometry(normalised, formats[0])
        for size in ("num_layers", "num_blocks", "kv_size"):
            assert same(attempt(getattr, whole, size), recorded["whole"][size]), size
        if formats[0] is EngineKVFormat.NL_X_NB_BSV_BSS:  # LMCache writes the slots twice
            assert whole.concrete_shape() == f"{len(normalised)} x {list(normalised[0].shape)}"
        elif 0 in in_groups:
            assert same(attempt(whole.concrete_shape), recorded["whole"]["concrete_shape"])
    for layer, sizes in enumerate(recorded["layers"]):
        if layer not in in_groups:
            continue
        of_layer = Geometry(normalised, formats[layer if len(formats) > 1 else 0])
        assert of_layer.format.name == sizes["format"]
        for size in ("block_size", "num_heads", "head_size", "hidden_dim"):
            assert same(attempt(getattr(of_layer, size), layer), sizes[size]), (layer, size)
        assert dtype_name(of_layer.dtype(layer)) == sizes["dtype"]


@each(CASES)
def test_case(case: dict[str, Any]) -> None:
    for function in ("detect", "normalize"):
        check_found(case, function, None)
        check_found(case, function, Storages(case["input"]["caches"]))


def check_found(case: dict[str, Any], function: str, storages: Storages | None) -> None:
    found = found_by(function, case, specs_of(case["input"]["caches"]) if storages is None else storages.arrays)
    recorded = case["output"][function]
    mended = MENDED.get((case["id"], function))
    if mended is not None:
        if is_error(found):
            assert not is_error(recorded), "no difference any more"
            assert re.search(mended.expected, found["message"])
        else:
            assert is_error(recorded), "no difference any more"
            assert {format.name for format in found[1]} == {mended.expected}
        return
    if is_error(found) or is_error(recorded):
        assert is_error(found), f"{case['why']}: found {found}, recorded {recorded}"
        assert is_error(recorded), f"{case['why']}: found {found}, recorded {recorded}"
        return
    normalised, formats = found
    if case["id"] in HEADS_FIRST_PAIRS:
        assert not same_caches(described(normalised, storages), recorded["caches"]), "no difference any more"
        slots_first = [[plane.transpose((0, 2, 1, 3)) for plane in pair] for pair in normalised]
        assert same_caches(described(slots_first, storages), recorded["caches"])
        return
    names = [format.name for format in formats]
    assert names == (recorded["formats"] if "formats" in recorded else [recorded["format"]])
    assert same_caches(described(normalised, storages), recorded["caches"])
    check_geometry(case, normalised, formats, recorded["geometry"])


def same_caches(found: Any, recorded: Any) -> bool:
    """Equal in all that was found: specs have no storage, arrays without bytes no place."""
    if isinstance(recorded, list):
        return isinstance(found, list) and len(found) == len(recorded) and all(map(same_caches, found, recorded))
    return isinstance(found, dict) and found.items() <= recorded.items()


def test_every_mended_case_exists() -> None:
    assert {id for id, _ in MENDED} <= set(BY_ID)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 12, 25])
def test_these_differences_are_shown(number: int) -> None:
    assert number in {mended.number for mended in MENDED.values()}
