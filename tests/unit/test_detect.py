"""Which format a cache has. Sizes are distinct primes: 7 blocks of 11 slots, 5 heads of 3 elements."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvshm.dtypes import DTYPES
from kvshm.formats import EngineKVFormat as F
from kvshm.formats import EngineType, detect_format, geometry, normalize_and_discover_per_layer_formats
from kvshm.formats import vllm as vllm_module
from kvshm.spec import ArraySpec

F2 = np.dtype("float16")
U1 = np.dtype("uint8")

NHD = {"kv_layout": "NHD"}
HND = {"kv_layout": "HND"}
UNIFIED = {"kv_list_layout": "unified"}
K_V = {"kv_list_layout": "k_v", "tokens_per_block": 11}
POOL = {"num_kv_heads": 5, "tokens_per_block": 11, "head_dim": 3}


def spec(*shape: int, dtype: Any = F2) -> ArraySpec:
    return ArraySpec.dense(shape, np.dtype(dtype))


def detect(caches: Any, engine: str = "vllm", hints: Any = None) -> tuple[F, Any]:
    format, normalised = detect_format(caches, engine, hints)
    per_layer, formats = normalize_and_discover_per_layer_formats(caches, [], engine, hints)
    assert set(formats) == {format}
    assert per_layer == normalised
    return format, normalised


def as_arrays(caches: Any) -> Any:
    if isinstance(caches, list):
        return [as_arrays(item) for item in caches]
    return caches.view(np.zeros(caches.byte_span, np.uint8))


@pytest.mark.parametrize(
    ("shape", "nhd", "hnd"),
    [
        ((7, 11, 3), F.NL_X_NB_BS_HS, F.NL_X_NB_BS_HS),
        ((7, 11, 5, 3), F.NL_X_NB_BS_NH_CS, F.NL_X_NB_NH_BS_CS),
        ((2, 7, 11, 5, 3), F.NL_X_TWO_NB_BS_NH_HS, F.NL_X_TWO_NB_NH_BS_HS),
        ((7, 2, 11, 5, 3), F.NL_X_NB_TWO_BS_NH_HS, F.NL_X_NB_TWO_NH_BS_HS),
        ((2, 7, 5, 1, 11, 3), F.NL_X_TWO_NB_NH_ONE_BS_HS, F.NL_X_TWO_NB_NH_ONE_BS_HS),
    ],
)
class TestVllmLayers:
    def test_the_hint_is_obeyed(self, shape: tuple[int, ...], nhd: F, hnd: F) -> None:
        layers = [spec(*shape)] * 3
        for hint, format in (("NHD", nhd), ("BLNHC", nhd), ("HND", hnd), ("BLHNC", hnd)):
            assert detect(layers, "vllm", {"kv_layout": hint}) == (format, layers)

    def test_without_a_hint_heads_are_first(self, shape: tuple[int, ...], nhd: F, hnd: F) -> None:
        layers = [spec(*shape)]
        for hints in (None, {}, {"kv_layout": None}, {"tokens_per_block": 3}):
            assert detect(layers, "vllm", hints) == (hnd, layers)

    def test_any_order_of_axes_is_put_back(self, shape: tuple[int, ...], nhd: F, hnd: F) -> None:
        stored = spec(*shape)
        blocks = shape.index(7)  # which stay outside the rest
        exposed = stored.transpose((*range(blocks + 1), *reversed(range(blocks + 1, len(shape)))))
        assert detect([exposed] * 2, "vllm", NHD) == (nhd, [stored] * 2)


@pytest.mark.parametrize("shape", [(7,), (7, 11), (3, 7, 11, 5, 3), (2, 7, 5, 3, 11, 3), (3, 7, 5, 1, 11, 3), (2,) * 7])
def test_other_vllm_layers_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"no known vLLM layout is \[.*\] of float16; known are rank 3, 4, 5 with a K/V"
    ):
        detect_format([spec(*shape)], "vllm", NHD)


def test_two_blocks_of_k_and_v_are_read_k_and_v_first() -> None:
    assert detect([spec(2, 2, 11, 5, 3)], "vllm", NHD)[0] is F.NL_X_TWO_NB_BS_NH_HS


@pytest.mark.parametrize("hint", ["nhd", "hnd", "XYZ", "", "NHD ", 3, False, ["NHD"], {"a": 1}])
@pytest.mark.parametrize(
    "caches",
    [
        [spec(2, 7, 11, 5, 3)],
        [spec(7, 11, 3)],
        [[spec(7, 11, 5, 3)] * 2],
        [[spec(7, 11, 1, 3), spec(7, 11, 1, 2)]],
        spec(7, 13, 2, 11, 5, 3),
    ],
)
def test_a_wrong_hint_is_refused_even_where_none_is_needed(caches: Any, hint: Any) -> None:
    with pytest.raises(ValueError, match=r"layout hint 'kv_layout' is .*; it must be one of NHD, HND, BLNHC, BLHNC"):
        detect_format(caches, "vllm", {"kv_layout": hint})


@pytest.fixture
def forget_warnings() -> Iterator[None]:
    """Each distinct warning is given once a process."""
    vllm_module._warn_of_default_layout.cache_clear()
    yield
    vllm_module._warn_of_default_layout.cache_clear()


@pytest.mark.usefixtures("forget_warnings")
def test_the_default_layout_is_warned_of_once_where_it_matters(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvshm"):
        detect([spec(7, 11, 3)])
        detect([spec(2, 7, 11, 5, 3)], "vllm", NHD)
        assert caplog.messages == []
        detect([spec(2, 7, 11, 5, 3)])
        detect([spec(7, 11, 5, 3)])
    assert len(caplog.messages) == 1
    assert "HND is taken" in caplog.messages[0]
    assert 'layout_hints={"kv_layout": "NHD"}' in caplog.messages[0]


class TestIndexPages:
    def test_of_rank_3(self) -> None:
        page = spec(7, 11, 132, dtype=U1)
        for hints in (NHD, HND):
            assert detect([page], "vllm", hints) == (F.NL_X_NB_BSV_BSS, [page])

    def test_of_rank_4_the_axis_of_heads_is_dropped(self) -> None:
        page = spec(7, 11, 132, dtype=U1)
        assert detect([spec(7, 11, 1, 132, dtype=U1)], "vllm", NHD) == (F.NL_X_NB_BSV_BSS, [page])
        assert detect([spec(7, 1, 11, 132, dtype=U1)], "vllm", HND) == (F.NL_X_NB_BSV_BSS, [page])

    def test_with_the_other_hint_it_is_fused_k_and_v(self) -> None:
        assert detect([spec(7, 11, 1, 132, dtype=U1)], "vllm", HND)[0] is F.NL_X_NB_NH_BS_CS
        assert detect([spec(7, 1, 11, 132, dtype=U1)], "vllm", NHD)[0] is F.NL_X_NB_BS_NH_CS

    @pytest.mark.parametrize(("width", "dtype"), [(131, U1), (132, "int8"), (132, F2)])
    def test_others_are_none(self, width: int, dtype: Any) -> None:
        assert detect([spec(7, 11, width, dtype=dtype)], "vllm", NHD)[0] is F.NL_X_NB_BS_HS
        assert detect([spec(7, 11, 1, width, dtype=dtype)], "vllm", NHD)[0] is F.NL_X_NB_BS_NH_CS


class TestVllmPlanes:
    def test_two_alike_are_k_and_v(self) -> None:
        for planes in ([spec(7, 11, 5, 3)] * 2, [spec(7, 11, 1, 3)] * 2):
            assert detect([planes] * 2, "vllm", NHD) == (F.NL_X_TWO_X_NB_BS_NH_HS, [planes] * 2)

    @pytest.mark.parametrize("widths", [(3, 2), (3,), (3, 3, 3), (3, 2, 5), (3, 2, 2, 2)])
    def test_of_one_head_others_are_planes(self, widths: tuple[int, ...]) -> None:
        planes = [spec(7, 11, 1, width) for width in widths]
        assert detect([planes], "vllm", HND) == (F.NL_X_NP_X_NB_BS_ONE_HS, [planes])

    @pytest.mark.parametrize(
        "planes",
        [
            [spec(7, 11, 5, 3)],
            [spec(7, 11, 5, 3)] * 3,
            [spec(7, 11, 1, 3)] * 4,
            [],
            [spec(7, 11, 3)] * 2,
            [spec(7, 11, 1, 3), spec(7, 11, 2)],
            [[spec(7, 11, 1, 3)]],
        ],
    )
    def test_other_lists_are_refused(self, planes: Any) -> None:
        with pytest.raises(ValueError, match=r"no known vLLM layout is|the list of KV caches is empty"):
            detect_format([planes], "vllm", NHD)

    def test_tuples_are_lists(self) -> None:
        pair = (spec(7, 11, 5, 3), spec(7, 11, 5, 3))
        assert detect((pair, pair), "vllm", NHD) == (F.NL_X_TWO_X_NB_BS_NH_HS, [list(pair)] * 2)


def test_one_array_for_all_layers() -> None:
    pool = spec(7, 13, 2, 11, 5, 3)
    for hints in (NHD, HND, None):
        format, normalised = detect_format(pool, "vllm", hints)
        assert (format, normalised) == (F.NB_NL_TWO_BS_NH_HS, pool)
        assert normalize_and_discover_per_layer_formats(pool, [[0], [12]], "vllm", hints) == (pool, [format] * 13)


class TestSglang:
    def test_folded_latents_without_a_block_size(self) -> None:
        layers = [spec(77, 1, 3)] * 2
        assert detect(layers, "sglang") == (F.NL_X_NBBS_ONE_HS, layers)

    def test_folded_latents_with_a_block_size_are_split(self) -> None:
        assert detect([spec(77, 1, 3)] * 2, "sglang", {"tokens_per_block": 11}) == (
            F.NL_X_NB_BS_HS,
            [spec(7, 11, 3)] * 2,
        )

    def test_latents_that_are_split_already(self) -> None:
        layers = [spec(7, 11, 3)]
        assert detect(layers, "sglang", {"tokens_per_block": 13}) == (F.NL_X_NB_BS_HS, layers)

    def test_a_block_size_of_one_splits_off_a_tight_axis(self) -> None:
        padded = ArraySpec((7, 1, 3), (13, 3, 1), 0, F2)
        assert detect([padded], "sglang", {"tokens_per_block": 1}) == (F.NL_X_NB_BS_HS, [padded])

    def test_unified_components(self) -> None:
        for layers, format in (([spec(7, 11, 5, 3)], F.NL_X_NB_BS_NH_HS), ([spec(7, 11, 3)], F.NL_X_NB_BS_HS)):
            assert detect(layers, "sglang", UNIFIED) == (format, layers)

    @pytest.mark.parametrize("shape", [(7, 3), (2, 7, 11, 5, 3)])
    def test_unified_components_of_other_ranks_are_refused(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"no known SGLang layout is .* \(kv_list_layout 'unified'\)"):
            detect_format([spec(*shape)], "sglang", UNIFIED)

    def test_k_and_v_lists(self) -> None:
        for shape, format in (((7, 11, 5, 3), F.TWO_X_NL_X_NB_BS_NH_HS), ((77, 5, 3), F.TWO_X_NL_X_NBBS_NH_HS)):
            lists = [[spec(*shape)] * 13] * 2
            for hints in (None, {"tokens_per_block": 11}, {"kv_list_layout": "split"}):
                assert detect(lists, "sglang", hints) == (format, lists)

    def test_flat_k_then_v(self) -> None:
        layers = [spec(77, 5, 3, dtype=dtype) for dtype in (F2, U1, F2, U1)]
        split = [spec(7, 11, 5, 3), spec(7, 11, 5, 3, dtype=U1)]
        assert detect(layers, "sglang", K_V) == (F.TWO_X_NL_X_NB_BS_NH_HS, [split, split])

    def test_slots_must_be_whole_blocks(self) -> None:
        with pytest.raises(ValueError, match=r"has 78 slots, which is no multiple of .*'tokens_per_block' 11"):
            detect_format([spec(78, 5, 3)] * 2, "sglang", K_V)

    @pytest.mark.parametrize("size", [0, -11, None, "11", 11.0, [11]])
    def test_a_wrong_block_size_is_refused(self, size: Any) -> None:
        hints = {"kv_list_layout": "k_v", "tokens_per_block": size}
        with pytest.raises(
            ValueError, match=r"invalid layout hint 'tokens_per_block': expected a positive integer, got"
        ):
            detect_format([spec(77, 5, 3)] * 2, "sglang", hints)

    def test_other_structures_are_refused(self) -> None:
        for caches in (spec(77, 5, 3), [[spec(77, 5, 3)], spec(77, 5, 3)], [[[spec(77, 5, 3)]]] * 2):
            with pytest.raises(ValueError, match="no known SGLang layout is"):
                detect_format(caches, "sglang")


class TestTrtllm:
    pool = spec(7, 13, 2, 5, 11, 3)

    def test_the_pool_bare_or_in_a_list(self) -> None:
        for caches in (self.pool, [self.pool]):
            format, normalised = detect_format(caches, "trtllm")
            assert (format, normalised) == (F.NB_NL_TWO_NH_BS_HS, self.pool)
            _, formats = normalize_and_discover_per_layer_formats(caches, [], "trtllm")
            assert formats == [format] * 13

    def test_a_flat_pool_is_split_by_the_hints(self) -> None:
        flat = spec(7, 13, 2, 165)
        for caches in (flat, [flat]):
            assert detect_format(caches, "trtllm", POOL) == (F.NB_NL_TWO_NH_BS_HS, self.pool)

    @pytest.mark.parametrize("missing", POOL)
    def test_each_hint_is_needed(self, missing: str) -> None:
        hints = {hint: size for hint, size in POOL.items() if hint != missing}
        with pytest.raises(ValueError, match=f"pass the layout hint '{missing}'"):
            detect_format(spec(7, 13, 2, 165), "trtllm", hints)

    def test_hints_that_make_another_size_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"holds 166 elements a plane, but .* \[5, 11, 3\] make 165"):
            detect_format(spec(7, 13, 2, 166), "trtllm", POOL)

    @pytest.mark.parametrize("shape", [(7, 2, 165), (7, 13, 2, 5, 33), (7, 13, 2, 5, 11, 3, 1)])
    def test_other_ranks_are_refused(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="no known TRT-LLM layout is"):
            detect_format(spec(*shape), "trtllm", POOL)


def test_atom_has_latents_only() -> None:
    layers = [spec(7, 11, 3)] * 2
    assert detect(layers, "atom") == (F.NL_X_NB_BS_HS, layers)
    for caches in ([spec(7, 11, 5, 3)], [[spec(7, 11, 3)]], spec(7, 11, 3)):
        with pytest.raises(ValueError, match="no known ATOM layout is"):
            detect_format(caches, "atom")


def test_mock_has_no_cache() -> None:
    for caches in ([spec(7, 11, 3)], spec(7, 11, 3)):
        with pytest.raises(ValueError, match="the mock engine has no KV cache"):
            detect_format(caches, "mock")


def test_engines_go_by_member_or_value() -> None:
    layers = [spec(7, 11, 3)]
    for engine in (EngineType.VLLM, "vllm"):
        assert detect_format(layers, engine)[0] is F.NL_X_NB_BS_HS
    for other in ("VLLM", "", None, 3):
        with pytest.raises(ValueError, match=r"unknown engine .*; known are vllm, sglang, trtllm, atom, mock"):
            detect_format(layers, other)  # type: ignore[arg-type]


@pytest.mark.parametrize("caches", ["x", b"x", 3, None, {"a": 1}, [3], [[None]], [spec(7, 11, 3), "x"]])
def test_what_is_no_array_is_refused(caches: Any) -> None:
    with pytest.raises(ValueError, match="expected arrays or ArraySpecs in lists, not"):
        detect_format(caches, "vllm", NHD)
    with pytest.raises(ValueError, match="expected arrays or ArraySpecs in lists, not"):
        normalize_and_discover_per_layer_formats(caches, [], "vllm", NHD)


@pytest.mark.parametrize("name", DTYPES)
def test_arrays_of_every_dtype_come_back_as_views(name: str) -> None:
    dtype = DTYPES[name]
    buffer = np.zeros(77 * 15 * dtype.itemsize, np.uint8)
    array = ArraySpec.dense((77, 5, 3), dtype).view(buffer)
    _, [[k], [v]] = detect_format([array, array], "sglang", K_V)
    for found in (k, v):
        assert (found.shape, found.dtype) == ((7, 11, 5, 3), dtype)
        assert found.ctypes.data == buffer.ctypes.data


class TestGroups:
    """normalize_and_discover_per_layer_formats looks at the layers that are in a group, and at no others."""

    layers = (spec(2, 7, 11, 5, 3), spec(7, 11, 132, dtype=U1), spec(7, 11, 3), spec(7))

    def test_each_layer_has_its_format(self) -> None:
        assert normalize_and_discover_per_layer_formats(self.layers, [[0, 2], [1]], "vllm", NHD) == (
            list(self.layers),
            [F.NL_X_TWO_NB_BS_NH_HS, F.NL_X_NB_BSV_BSS, F.NL_X_NB_BS_HS, F.NL_X_TWO_NB_BS_NH_HS],
        )

    def test_a_layer_in_no_group_stays_and_takes_the_format_of_the_first_that_has_one(self) -> None:
        exposed = (self.layers[0].transpose((0, 1, 3, 2, 4)), *self.layers[1:])
        normalised, formats = normalize_and_discover_per_layer_formats(exposed, [[2]], "vllm", NHD)
        assert normalised == list(exposed)
        assert formats == [F.NL_X_NB_BS_HS] * 4

    def test_of_all_layers_each_is_looked_at(self) -> None:
        with pytest.raises(ValueError, match=r"no known vLLM layout is \[7\] of float16"):
            normalize_and_discover_per_layer_formats(self.layers, [], "vllm", NHD)

    @pytest.mark.parametrize("layer", [4, 99])
    def test_layers_that_are_not_there_are_refused(self, layer: int) -> None:
        with pytest.raises(ValueError, match=f"a group names layer {layer}, but the layers are 0 to 3"):
            normalize_and_discover_per_layer_formats(self.layers, [[0], [layer]], "vllm", NHD)


class TestDifferences:
    """What LMCache takes for something else; see docs/differences.md."""

    @pytest.mark.parametrize(
        ("layers", "message"),
        [
            ([spec(77, 5, 3)] * 3, "there are 3; the last one, .* does not pair"),
            ([spec(77, 5, 3), spec(77, 5, 3), spec(77, 5, 3), spec(77, 5, 2)], "pairs arrays 1 and 3, but K"),
            ([spec(77, 5, 3), spec(77, 5, 3, dtype=U1)], r"K \[77, 5, 3\] of float16 and V \[77, 5, 3\] of uint8"),
            ([spec(7, 11, 5, 3)] * 2, r"both must be \[NB \* BS, NH, HS\]"),
            ([spec(77, 3)] * 2, r"both must be \[NB \* BS, NH, HS\]"),
        ],
    )
    def test_01_flat_k_and_v_that_do_not_pair(self, layers: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            detect_format(layers, "sglang", K_V)

    def test_01_flat_k_and_v_without_a_block_size(self) -> None:
        with pytest.raises(ValueError, match="pass the layout hint 'tokens_per_block'"):
            detect_format([spec(77, 5, 3)] * 2, "sglang", {"kv_list_layout": "k_v"})

    @pytest.mark.parametrize("planes", [1, 3])
    def test_02_pools_of_one_or_three_planes(self, planes: int) -> None:
        for pool in (spec(7, 13, planes, 165), spec(7, 13, planes, 5, 11, 3)):
            with pytest.raises(
                ValueError, match=r"NB_NL_TWO_NH_BS_HS is \[NB, NL, 2, NH, BS, HS\], which does not fit"
            ):
                detect_format(pool, "trtllm", POOL)

    def test_02_several_pools(self) -> None:
        for other in ((7, 13, 2, 5, 11, 3), (7, 17, 2, 5, 11, 3)):
            with pytest.raises(ValueError, match="no known TRT-LLM layout is"):
                detect_format([TestTrtllm.pool, spec(*other)], "trtllm")

    @pytest.mark.parametrize("shape", [(7, 11, 3), (7, 11, 5, 3), (7, 2, 11, 5, 3), (7, 13, 3, 11, 5, 3)])
    def test_03_a_bare_array_that_is_no_stack_of_layers(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"known are one array for all layers \[NB, NL, 2, BS, NH, HS\]"):
            detect_format(spec(*shape), "vllm", NHD)

    @pytest.mark.parametrize(
        ("caches", "hints", "message"),
        [
            (
                [spec(77, 5, 3)],
                None,
                r"NL_X_NBBS_ONE_HS is NL x \[PBS, 1, HS\], which does not fit an array \[77, 5, 3\]",
            ),
            ([spec(77, 3)], None, "NL_X_NBBS_ONE_HS is .* does not fit"),
            ([spec(7, 11, 5, 3)], {"tokens_per_block": 11}, "NL_X_NB_BS_HS is .* does not fit"),
            ([[spec(7, 11, 5, 3, 1)]] * 2, None, "TWO_X_NL_X_NBBS_NH_HS is .* does not fit"),
            ([[spec(77, 5, 3), spec(7, 11, 5, 3)]] * 2, None, "TWO_X_NL_X_NBBS_NH_HS is .* does not fit"),
        ],
    )
    def test_03_every_array_fits_the_name(self, caches: Any, hints: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            detect_format(caches, "sglang", hints)

    @pytest.mark.parametrize("lengths", [(2, 2, 2), (2, 1), (2,)])
    def test_03_lists_that_are_no_k_and_v(self, lengths: tuple[int, ...]) -> None:
        lists = [[spec(77, 5, 3)] * length for length in lengths]
        with pytest.raises(ValueError, match=r"must be two of one length, not \d of lengths"):
            detect_format(lists, "sglang")

    @pytest.mark.parametrize("v", [spec(7, 11, 5, 2), spec(7, 11, 5, 3, dtype=U1), spec(7, 13, 5, 3)])
    def test_03_k_and_v_that_differ(self, v: ArraySpec) -> None:
        k = spec(7, 11, 5, 3)
        for caches, engine in (([[k, v]], "vllm"), ([[k], [v]], "sglang")):
            with pytest.raises(ValueError, match=r"of one layer differ; .* takes K and V of one shape and dtype"):
                detect_format(caches, engine)

    def test_03_planes_that_differ_in_blocks_or_slots(self) -> None:
        for other in (spec(13, 11, 1, 2), spec(7, 13, 1, 2)):
            with pytest.raises(
                ValueError, match=r"of one layer differ in blocks or slots; all planes of a layer share"
            ):
                detect_format([[spec(7, 11, 1, 3), other]], "vllm", NHD)

    def test_03_layers_of_several_formats_are_no_one_format(self) -> None:
        layers = [spec(7, 11, 3), spec(2, 7, 11, 5, 3)]
        with pytest.raises(ValueError, match="layer 0 is NL_X_NB_BS_HS but layer 1 is NL_X_TWO_NB_BS_NH_HS; a struct"):
            detect_format(layers, "vllm", NHD)

    def test_20_heads_outside_the_blocks(self) -> None:
        # Eight contiguous sequences, one a head, seen as blocks: in memory the heads lie outside the blocks.
        stored = spec(2, 8, 8 * 11, 3)
        paged = ArraySpec((2, 8, 8, 11, 3), (8 * 8 * 33, 33, 8 * 33, 3, 1), 0, F2)
        assert (stored.nbytes, stored.byte_span) == (paged.nbytes, paged.byte_span)
        text = r"axes \[2\] \(of sizes \[8\]\) outside the axis of its blocks, 1, .* the order \[0, 2, 1, 3, 4\]"
        for hints in (HND, NHD, None):
            with pytest.raises(ValueError, match=text):
                detect_format([paged], "vllm", hints)
            with pytest.raises(ValueError, match=text):
                normalize_and_discover_per_layer_formats([spec(2, 8, 8, 11, 3), paged], [], "vllm", hints)

    @pytest.mark.parametrize(
        ("stored", "order", "engine", "hints"),
        [
            (spec(11, 7, 3), (1, 0, 2), "vllm", NHD),  # slots outside
            (spec(3, 7, 11), (1, 2, 0), "vllm", NHD),  # elements
            (spec(5, 7, 11, 3), (1, 2, 0, 3), "vllm", NHD),  # heads
            (spec(5, 2, 7, 11, 3), (1, 2, 0, 3, 4), "vllm", HND),
            (spec(11, 7, 2, 5, 3), (1, 2, 0, 3, 4), "vllm", NHD),
            (spec(5, 7, 13, 2, 11, 3), (1, 2, 3, 4, 0, 5), "vllm", NHD),
            (spec(3, 77, 1), (1, 2, 0), "sglang", None),
            (spec(5, 7, 11, 3), (1, 2, 0, 3), "sglang", UNIFIED),
            (spec(5, 7, 2, 2, 11, 3), (1, 2, 3, 0, 4, 5), "trtllm", None),
            (spec(11, 7, 3), (1, 0, 2), "atom", None),
        ],
    )
    def test_20_anything_outside_the_blocks(
        self, stored: ArraySpec, order: tuple[int, ...], engine: str, hints: Any
    ) -> None:
        exposed = stored.transpose(order)
        caches: Any = exposed if len(order) == 6 or engine == "trtllm" else [exposed]
        for given in (caches, as_arrays(caches)):
            with pytest.raises(ValueError, match=r"outside the axis of its blocks|no known|does not fit"):
                detect_format(given, engine, hints)

    def test_20_k_and_v_or_layers_may_lie_outside(self) -> None:
        stored = spec(2, 7, 11, 5, 3)
        assert detect([stored.transpose((1, 0, 2, 3, 4))], "vllm", NHD) == (F.NL_X_TWO_NB_BS_NH_HS, [stored])
        assert detect([stored.transpose((1, 2, 3, 4, 0))], "vllm", NHD) == (F.NL_X_TWO_NB_BS_NH_HS, [stored])

    def test_21_pairs_with_their_heads_first(self) -> None:
        pair = [spec(7, 5, 11, 3)] * 2
        named = [plane.transpose((0, 2, 1, 3)) for plane in pair]
        hints: dict[str, str] | None
        for hints in (HND, {"kv_layout": "BLHNC"}):
            assert detect([pair] * 2, "vllm", hints) == (F.NL_X_TWO_X_NB_BS_NH_HS, [named] * 2)
        for hints in (NHD, None):
            assert detect([pair] * 2, "vllm", hints) == (F.NL_X_TWO_X_NB_BS_NH_HS, [pair] * 2)
        # Shown slots first by strides, they lie heads first all the same.
        assert detect([named] * 2, "vllm", HND) == (F.NL_X_TWO_X_NB_BS_NH_HS, [named] * 2)
        latent = [spec(7, 11, 1, 3), spec(7, 11, 1, 2)]
        assert detect([latent], "vllm", HND) == (F.NL_X_NP_X_NB_BS_ONE_HS, [latent])

    def test_21_the_heads_and_slots_are_those_of_the_hint(self) -> None:
        pair = [spec(7, 5, 11, 3)] * 2
        found = geometry(detect([pair], "vllm", HND)[1], F.NL_X_TWO_X_NB_BS_NH_HS)
        assert (found.block_size(0), found.num_heads(0), found.num_blocks) == (11, 5, 7)

    @pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "atom"])
    def test_25_unknown_hints(self, engine: str) -> None:
        text = (
            "unknown layout hints 'kvlayout'; known are 'kv_layout', 'kv_list_layout', 'tokens_per_block', "
            "'num_kv_heads', 'head_dim'"
        )
        hints = {"kvlayout": "NHD", "kv_layout": "NHD"}
        with pytest.raises(ValueError, match=text):
            detect_format([spec(7, 11, 3)], engine, hints)
        with pytest.raises(ValueError, match=text):
            normalize_and_discover_per_layer_formats([spec(7, 11, 3)], [], engine, hints)

    @pytest.mark.parametrize("hints", ["NHD", ["kv_layout"], [("kv_layout", "NHD")], 3])
    def test_25_hints_are_a_mapping(self, hints: Any) -> None:
        with pytest.raises(ValueError, match=r"layout_hints is \w+; give a mapping such as \{'kv_layout': 'NHD'\}"):
            detect_format([spec(7, 11, 3)], "vllm", hints)

    def test_05_arrays_without_elements_keep_their_shape(self) -> None:
        layers = [spec(2, 0, 11, 5, 3)]
        assert detect(layers, "vllm", NHD) == (F.NL_X_TWO_NB_BS_NH_HS, layers)

    def test_12_negative_layers(self) -> None:
        with pytest.raises(ValueError, match="a group names layer -1, but the layers are 0 to 1"):
            normalize_and_discover_per_layer_formats([spec(7, 11, 3)] * 2, [[0, -1]], "vllm", NHD)

    def test_13_no_layer_in_any_group_and_no_layer_at_all(self) -> None:
        with pytest.raises(ValueError, match="no layer is in any group"):
            normalize_and_discover_per_layer_formats([spec(7, 11, 3)], [[], []], "vllm", NHD)
        empties: list[Any] = [[], [[]], [[], []]]
        for empty in empties:
            with pytest.raises(ValueError, match="the list of KV caches is empty"):
                detect_format(empty, "vllm", NHD)
            with pytest.raises(ValueError, match="the list of KV caches is empty"):
                normalize_and_discover_per_layer_formats(empty, [], "sglang")
