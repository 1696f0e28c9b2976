"""Sizes and planes read off a cache. Sizes are primes: 13 layers, 7 blocks of 11 slots, 5 heads of 3 elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvshm.dtypes import DTYPES
from kvshm.formats import EngineKVFormat as F
from kvshm.formats import geometry
from kvshm.spec import ArraySpec

F2 = np.dtype("float16")
U1 = np.dtype("uint8")

NL, NB, BS, NH, HS = 13, 7, 11, 5, 3
SIZES = {"NL": NL, "NB": NB, "BS": BS, "NH": NH, "HS": HS, "CS": HS, "NBBS": NB * BS, "TWO": 2, "ONE": 1}


def stack(format: F, dtype: Any = F2) -> Any:
    """A dense cache of a format as specs."""
    array = ArraySpec.dense(tuple(SIZES[axis] for axis in format.axes), np.dtype(dtype))
    if format.is_cross_layer:
        return array
    if format.is_kv_list:
        return [[array] * NL] * 2
    return [[array] * 2] * NL if format.is_kv_second_tuple else [array] * NL


def numbered(format: F) -> tuple[Any, Any]:
    """One array of a format holding 0, 1, 2 ... (int32), as stored and as the cache it stands in."""
    shape = tuple(SIZES[axis] for axis in format.axes)
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    return array, array if format.is_cross_layer else [array] * NL


@pytest.mark.parametrize("format", F)
def test_sizes(format: F) -> None:
    found = geometry(stack(format), format)
    assert found.num_layers == NL
    assert found.kv_size == format.kv_size
    assert found.num_heads(12) == (1 if format.is_mla else NH)
    # 2 x 3 where K and V are packed in two axes, or two planes of 3 elements lie in one row.
    wide = format in (F.NL_X_NB_NH_BS_TWO_HS, F.NL_X_NB_BS_NH_TWO_HS, F.NL_X_NP_X_NB_BS_ONE_HS)
    assert found.head_size(12) == (2 * HS if wide else HS)
    assert found.hidden_dim(12) == (NH * HS if not format.is_mla else 2 * HS if wide else HS)
    assert found.dtype(12) == F2


@pytest.mark.parametrize("format", [format for format in F if not format.is_pbs_fused])
def test_blocks_and_slots(format: F) -> None:
    found = geometry(stack(format), format)
    assert (found.num_blocks, found.num_blocks_of(12), found.block_size(12)) == (NB, NB, BS)


@pytest.mark.parametrize("format", [F.TWO_X_NL_X_NBBS_NH_HS, F.NL_X_NBBS_ONE_HS])
def test_folded_blocks_and_slots_are_refused(format: F) -> None:
    found = geometry(stack(format), format)
    for size in (found.block_size, found.num_blocks_of, found.planes):
        with pytest.raises(
            ValueError, match=rf"{format.name} folds blocks and slots into one axis \[77, .*'tokens_per_b"
        ):
            size(12)
    with pytest.raises(ValueError, match="folds blocks and slots"):
        found.num_blocks  # noqa: B018


@pytest.mark.parametrize("format", F)
@pytest.mark.parametrize("layer", [-1, 13])
def test_layers_that_are_not_there_are_refused(format: F, layer: int) -> None:
    found = geometry(stack(format), format)
    for size in (found.leaves, found.num_heads, found.head_size, found.hidden_dim, found.dtype):
        with pytest.raises(ValueError, match=rf"layer {layer} is outside \[0, 13\)"):
            size(layer)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (F.NB_NL_TWO_NH_BS_HS, "[7, 13, 2, 5, 11, 3]"),
        (F.NL_X_TWO_NB_BS_NH_HS, "13 x [2, 7, 11, 5, 3]"),
        (F.TWO_X_NL_X_NBBS_NH_HS, "2 x 13 x [77, 5, 3]"),
        (F.NL_X_TWO_X_NB_BS_NH_HS, "13 x 2 x [7, 11, 5, 3]"),
        (F.NL_X_NP_X_NB_BS_ONE_HS, "13 x NP x [7, 11, 1, 6]"),
        (F.NL_X_NB_BSV_BSS, "13 x [7, 11, 3]"),
    ],
)
def test_shape_in_numbers(format: F, text: str) -> None:
    assert geometry(stack(format), format).concrete_shape() == text


def test_planes_of_several_dtypes_are_counted_in_elements_of_the_first() -> None:
    planes = [ArraySpec.dense((NB, BS, 1, 5), F2), ArraySpec.dense((NB, BS, 1, 6), U1)]
    found = geometry([planes], F.NL_X_NP_X_NB_BS_ONE_HS)
    assert (found.head_size(0), found.hidden_dim(0), found.dtype(0)) == (8, 8, F2)
    assert [plane.dtype for plane in found.planes(0)] == [F2, U1]


def test_planes_that_are_no_whole_elements_of_the_first_are_refused() -> None:
    planes = [ArraySpec.dense((NB, BS, 1, 5), F2), ArraySpec.dense((NB, BS, 1, 3), U1)]
    found = geometry([planes], F.NL_X_NP_X_NB_BS_ONE_HS)
    with pytest.raises(
        ValueError, match=r"planes of a slot take 13 bytes, no whole number .* \(float16\); put the plane"
    ):
        found.head_size(0)


# What element (block 6, slot 4, head 2, element 1) of layer 3 is in an array, per K/V plane, written by hand.
PLACES: dict[F, list[tuple[int, ...]]] = {
    F.NB_NL_TWO_BS_NH_HS: [(6, 3, 0, 4, 2, 1), (6, 3, 1, 4, 2, 1)],
    F.NL_X_TWO_NB_BS_NH_HS: [(0, 6, 4, 2, 1), (1, 6, 4, 2, 1)],
    F.NL_X_NB_TWO_BS_NH_HS: [(6, 0, 4, 2, 1), (6, 1, 4, 2, 1)],
    F.NL_X_NB_BS_HS: [(6, 4, 1)],
    F.NL_X_TWO_NB_NH_BS_HS: [(0, 6, 2, 4, 1), (1, 6, 2, 4, 1)],
    F.NL_X_NB_TWO_NH_BS_HS: [(6, 0, 2, 4, 1), (6, 1, 2, 4, 1)],
    F.NB_NL_TWO_NH_BS_HS: [(6, 3, 0, 2, 4, 1), (6, 3, 1, 2, 4, 1)],
    F.NL_X_NB_NH_BS_TWO_HS: [(6, 2, 4, 0, 1)],
    F.NL_X_NB_BS_NH_TWO_HS: [(6, 4, 2, 0, 1)],
    F.NL_X_NB_NH_BS_CS: [(6, 2, 4, 1)],
    F.NL_X_NB_BS_NH_CS: [(6, 4, 2, 1)],
    F.NL_X_NB_BSV_BSS: [(6, 4, 1)],
    F.NL_X_TWO_NB_NH_ONE_BS_HS: [(0, 6, 2, 0, 4, 1), (1, 6, 2, 0, 4, 1)],
    F.NL_X_NB_BS_NH_HS: [(6, 4, 2, 1)],
}


@pytest.mark.parametrize("format", PLACES)
def test_planes_lead_to_the_elements_that_the_name_says(format: F) -> None:
    array, caches = numbered(format)
    planes = geometry(caches, format).planes(3)
    head = 0 if format.is_mla else 2
    assert [plane[6, 4, head, 1] for plane in planes] == [array[place] for place in PLACES[format]]
    heads = 1 if format.is_mla else NH
    wide = 2 * HS if format.axes[-2:] == ("TWO", "HS") else HS
    assert {plane.shape for plane in planes} == {(NB, BS, heads, wide)}


@pytest.mark.parametrize("format", [F.TWO_X_NL_X_NB_BS_NH_HS, F.NL_X_TWO_X_NB_BS_NH_HS, F.NL_X_NP_X_NB_BS_ONE_HS])
def test_planes_of_lists_are_the_arrays_of_the_layer(format: F) -> None:
    shape = tuple(SIZES[axis] for axis in format.axes)
    arrays = [[np.full(shape, 100 * plane + layer) for layer in range(NL)] for plane in range(2)]
    caches = arrays if format.is_kv_list else [list(pair) for pair in zip(*arrays, strict=True)]
    planes = geometry(caches, format).planes(3)
    assert [plane.shape for plane in planes] == [shape, shape]
    assert [plane[0, 0, 0, 0] for plane in planes] == [3, 103]


def views(tree: Any, buffer: np.ndarray[Any, Any]) -> Any:
    return [views(item, buffer) for item in tree] if isinstance(tree, list) else tree.view(buffer)


@pytest.mark.parametrize("format", [format for format in F if not format.is_pbs_fused])
def test_planes_of_specs_and_of_arrays_are_the_same(format: F) -> None:
    for dtype in DTYPES.values():
        of_specs: Any = geometry(stack(format, dtype), format)
        buffer = np.zeros(max(leaf.byte_span for leaf in of_specs.leaves(3)), np.uint8)
        of_arrays: Any = geometry(views(of_specs.normalised, buffer), format)
        for spec, plane in zip(of_specs.planes(3), of_arrays.planes(3), strict=True):
            assert isinstance(spec, ArraySpec)
            same = spec.view(buffer)
            assert (plane.dtype, plane.shape) == (same.dtype, same.shape)
            assert plane.ctypes.data == same.ctypes.data
            steps = zip(plane.shape, plane.strides, same.strides, strict=True)
            assert all(found == wanted for size, found, wanted in steps if size > 1)


@pytest.mark.parametrize(
    ("caches", "format", "message"),
    [
        (
            ArraySpec.dense((7, 11, 3), F2),
            F.NL_X_NB_BS_HS,
            r"is NL x \[NB, BS, HS\], but at depth 0 there is ArraySpec",
        ),
        ([], F.NL_X_NB_BS_HS, "but at depth 0 there is list"),
        ([[]], F.TWO_X_NL_X_NB_BS_NH_HS, "but at depth 1 there is list"),
        ([ArraySpec.dense((7, 3), F2)], F.NL_X_NB_BS_HS, r"no layer is NL_X_NB_BS_HS, which is NL x \[NB, BS, HS\]"),
        ([[ArraySpec.dense((7, 11, 3), F2)]], F.NL_X_NB_BS_HS, "no layer is NL_X_NB_BS_HS"),
        ([[[ArraySpec.dense((7, 11, 3), F2)]]] * 2, F.TWO_X_NL_X_NB_BS_NH_HS, "but the first array is list"),
    ],
)
def test_structures_of_other_formats_are_refused(caches: Any, format: F, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        geometry(caches, format)


def test_the_format_may_come_as_its_number() -> None:
    assert geometry(stack(F.NL_X_NB_BS_HS), 3).format is F.NL_X_NB_BS_HS  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown KV format 19"):
        geometry(stack(F.NL_X_NB_BS_HS), 19)  # type: ignore[arg-type]


def test_layers_of_one_format_among_others() -> None:
    mla, pair = ArraySpec.dense((7, 11, 3), F2), ArraySpec.dense((2, 13, 17, 5, 3), F2)
    mixed: list[Any] = [mla, pair, [mla], pair]
    found = geometry(mixed, F.NL_X_TWO_NB_BS_NH_HS)
    assert (found.num_layers, found.num_blocks, found.kv_size) == (4, 13, 2)
    assert (found.block_size(1), found.num_heads(3), found.hidden_dim(1), found.dtype(3)) == (17, 5, 15, F2)
    assert found.concrete_shape() == "4 x [2, 13, 17, 5, 3]"
    for layer, shape in ((0, r"\[7, 11, 3\]"), (2, "list")):
        with pytest.raises(ValueError, match=f"layer {layer} is not NL_X_TWO_NB_BS_NH_HS: {shape}, not NL x"):
            found.block_size(layer)
    of_first = geometry(mixed, F.NL_X_NB_BS_HS)
    assert (of_first.num_blocks, of_first.block_size(0)) == (7, 11)
    with pytest.raises(ValueError, match=r"no layer is NL_X_NB_BS_NH_HS"):
        geometry(mixed, F.NL_X_NB_BS_NH_HS)
