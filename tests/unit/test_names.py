"""What the name of a format says."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pytest

from kvshm.formats import EngineKVFormat as F

# Each written out by hand, so that no rule is tested by itself.
KV_SIZE_2 = {0, 1, 2, 4, 6, 7, 8, 9, 15, 16}
CROSS_LAYER = {0, 8}
KV_LISTS = {4, 9}
MLA = {3, 5, 14, 17}
HND = {6, 7, 8, 10, 12, 15}
FUSED = {10, 11, 12, 13}
TWO_MAJOR = {1, 6, 15}
FOLDED = {4, 5}
LISTS_OF_PLANES = {16, 17}
SINGLE_KV = {18}
BLOCK_AXIS = {3, 12, 13, 14, 17, 18}


@pytest.mark.parametrize("format", F)
def test_facts(format: F) -> None:
    facts: dict[str, set[int]] = {
        "is_cross_layer": CROSS_LAYER,
        "is_kv_list": KV_LISTS,
        "is_layer_list": set(range(19)) - CROSS_LAYER - KV_LISTS,
        "is_mla": MLA,
        "is_hnd": HND,
        "is_fused_packed": FUSED,
        "is_two_major": TWO_MAJOR,
        "is_pbs_fused": FOLDED,
        "is_kv_second_tuple": LISTS_OF_PLANES,
        "is_single_kv": SINGLE_KV,
        "has_block_axis": BLOCK_AXIS,
    }
    assert {fact: getattr(format, fact) for fact in facts} == {fact: format in found for fact, found in facts.items()}
    assert format.kv_size == (2 if format in KV_SIZE_2 else 1)


def test_the_numbers_are_those_on_the_wire() -> None:
    assert [format.value for format in F] == list(range(19))
    assert F(0) is F.NB_NL_TWO_BS_NH_HS
    assert F(18) is F.NL_X_NB_BS_NH_HS


@pytest.mark.parametrize("value", [-1, 19, 255, "NL_X_NB_BS_HS", None])
def test_unknown_numbers_are_refused_with_the_known_ones(value: Any) -> None:
    with pytest.raises(ValueError, match=r"unknown KV format .*; known are 0 to 18: NB_NL_TWO_BS_NH_HS, "):
        F(value)


def test_lists_and_axes() -> None:
    assert (F.NL_X_TWO_X_NB_BS_NH_HS.lists, F.NL_X_TWO_X_NB_BS_NH_HS.axes) == (("NL", "TWO"), ("NB", "BS", "NH", "HS"))
    assert (F.NB_NL_TWO_NH_BS_HS.lists, F.NB_NL_TWO_NH_BS_HS.axes) == ((), ("NB", "NL", "TWO", "NH", "BS", "HS"))
    assert F.NL_X_NB_BSV_BSS.axes == ("NB", "BS", "HS"), "pages are stored as bytes of slots"


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (F.NB_NL_TWO_NH_BS_HS, "[NB, NL, 2, NH, BS, HS]"),
        (F.NL_X_TWO_NB_BS_NH_HS, "NL x [2, NB, BS, NH, HS]"),
        (F.TWO_X_NL_X_NBBS_NH_HS, "2 x NL x [PBS, NH, HS]"),
        (F.NL_X_NBBS_ONE_HS, "NL x [PBS, 1, HS]"),
        (F.NL_X_NB_NH_BS_TWO_HS, "NL x [NB, NH, BS, 2, HS]"),
        (F.NL_X_NB_BSV_BSS, "NL x [NB, BSxVALS, BSxSCALES]"),
        (F.NL_X_NP_X_NB_BS_ONE_HS, "NL x NP x [NB, BS, 1, HS]"),
    ],
)
def test_shape_in_symbols(format: F, text: str) -> None:
    assert format.describe() == text


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (F.NB_NL_TWO_NH_BS_HS, "[7, 3, 2, 5, 11, 13]"),
        (F.NL_X_NB_TWO_BS_NH_HS, "3 x [7, 2, 11, 5, 13]"),
        (F.TWO_X_NL_X_NBBS_NH_HS, "2 x 3 x [77, 5, 13]"),
        (F.NL_X_NB_NH_BS_CS, "3 x [7, 5, 11, 13]"),
        (F.NL_X_NB_BSV_BSS, "3 x [7, 11, 13]"),
    ],
)
def test_shape_in_numbers(format: F, text: str) -> None:
    assert format.concrete_shape(nl=3, nb=7, bs=11, nh=5, hs=13) == text


@pytest.mark.parametrize(
    ("format", "shape"),
    [
        (F.NL_X_TWO_NB_BS_NH_HS, (2, 7, 11, 5, 13)),
        (F.NL_X_NB_TWO_NH_BS_HS, (7, 2, 5, 11, 13)),
        (F.NL_X_NB_BS_HS, (7, 11, 13)),
        (F.NL_X_NBBS_ONE_HS, (77, 1, 13)),
        (F.NL_X_NB_NH_BS_TWO_HS, (7, 5, 11, 13)),
        (F.NL_X_NB_BS_NH_CS, (7, 11, 5, 13)),
        (F.NL_X_TWO_NB_NH_ONE_BS_HS, (2, 7, 5, 11, 13)),
    ],
)
def test_shape_of_one_layers_array(format: F, shape: tuple[int, ...]) -> None:
    assert format.paged_layer_shape(7, 11, 5, 13) == shape


@pytest.mark.parametrize("format", [format for format in F if format in CROSS_LAYER | KV_LISTS | LISTS_OF_PLANES])
def test_without_one_array_a_layer_there_is_no_such_shape(format: F) -> None:
    with pytest.raises(ValueError, match=f"{format.name} has no single array per layer"):
        format.paged_layer_shape(7, 11, 5, 13)


@pytest.mark.parametrize("format", F)
def test_every_format_answers_every_question(format: F) -> None:
    assert format.describe()
    assert format.attention_backend
    assert "Unknown" not in format.concrete_shape(3, 7, 11, 5, 13)
    assert pickle.loads(pickle.dumps(format)) is format


def test_no_two_formats_are_described_alike_but_as_recorded() -> None:
    twice = [text for text, count in Counter(format.describe() for format in F).items() if count > 1]
    assert twice == []
