"""Kernel groups, object groups, and where they lie in a chunk object."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvshm.dtypes import DTYPES
from kvshm.formats import EngineKVFormat as F
from kvshm.layout import AttentionWindows, EngineGroupInfo, KVLayerGroupsManager, ObjectGroupInfo, PageBufferShapeDesc
from kvshm.spec import ArraySpec

F2 = np.dtype("float16")
U1 = np.dtype("uint8")
F4 = np.dtype("float32")


def latents(num_blocks: int, block_size: int, width: int, dtype: Any = F2, pad: int = 0) -> ArraySpec:
    """A layer of latents [NB, BS, HS], blocks ``pad`` elements apart."""
    block = block_size * width
    return ArraySpec((num_blocks, block_size, width), (block + pad, width, 1), 0, np.dtype(dtype))


def manage(
    layers: Sequence[ArraySpec], infos: Sequence[EngineGroupInfo] = (), chunk: int = 48, separate: bool = True
) -> KVLayerGroupsManager:
    return KVLayerGroupsManager(list(layers), [F.NL_X_NB_BS_HS] * len(layers), infos, chunk, separate)


def info(group: int, *layers: int, **told: Any) -> EngineGroupInfo:
    return EngineGroupInfo(group, layers, **told)


def heads(*shape: int, dtype: Any = F2) -> ArraySpec:
    return ArraySpec.dense(shape, np.dtype(dtype))


class TestKernelGroups:
    def test_layers_alike_are_one_group(self) -> None:
        manager = KVLayerGroupsManager([heads(2, 7, 11, 5, 3)] * 13, [F.NL_X_TWO_NB_BS_NH_HS] * 13, (), 33)
        [group] = manager.kernel_groups
        assert group.layer_indices == tuple(range(13))
        assert group.shape_desc == PageBufferShapeDesc(2, 13, 7, 11, 5, 3, 2, 0, F2)
        assert (group.dtype, group.format, group.engine_kv_format) == (F2, F.NL_X_TWO_NB_BS_NH_HS, group.format)
        assert (group.num_layers, group.hidden_dim_size, group.slots_per_block) == (13, 15, 11)
        assert (group.tokens_per_block, group.engine_group_idx, group.sw_size_tokens) == (11, 0, -1)
        assert (group.extra_object_group_tag, group.recurrent_state) == (0, False)
        assert manager.kv_layer_groups is manager.kernel_groups
        assert manager.num_blocks == 7
        assert manager.get_shape_desc(0) is group.shape_desc
        assert manager.lmcache_tokens_per_chunk == 33

    def test_groups_come_in_the_order_of_their_first_layers(self) -> None:
        wide, narrow = latents(7, 3, 5), latents(7, 3, 2)
        manager = manage([narrow, wide, narrow, wide, wide])
        assert [group.layer_indices for group in manager.kernel_groups] == [(0, 2), (1, 3, 4)]

    # What a transfer depends on: changed alone, each makes two groups of two layers.
    @pytest.mark.parametrize(
        ("format", "layer", "other_format", "other"),
        [
            (F.NL_X_NB_BS_HS, latents(7, 12, 5), F.NL_X_NB_BS_HS, latents(7, 12, 3)),  # width
            (F.NL_X_NB_BS_HS, latents(7, 12, 5), F.NL_X_NB_BS_HS, latents(7, 4, 5)),  # block size
            (F.NL_X_NB_BS_HS, latents(7, 12, 5), F.NL_X_NB_BS_HS, latents(7, 12, 5, "bfloat16")),  # dtype
            (F.NL_X_NB_BS_HS, latents(7, 12, 132, U1), F.NL_X_NB_BSV_BSS, latents(7, 12, 132, U1)),  # format
            (F.NL_X_NB_BS_NH_CS, heads(7, 12, 5, 6), F.NL_X_NB_BS_NH_CS, heads(7, 12, 6, 5)),  # heads
            (F.NL_X_NB_BS_NH_CS, heads(7, 12, 3, 4), F.NL_X_NB_NH_BS_CS, heads(7, 3, 12, 4)),  # order of axes
            (F.NL_X_NB_TWO_BS_NH_HS, heads(7, 2, 12, 3, 4), F.NL_X_NB_BS_NH_CS, heads(7, 12, 3, 4)),  # K and V apart
        ],
    )
    def test_layers_that_differ_in_one_thing_are_two_groups(
        self, format: F, layer: ArraySpec, other_format: F, other: ArraySpec
    ) -> None:
        manager = KVLayerGroupsManager([layer, other], [format, other_format], (), 12)
        assert [group.layer_indices for group in manager.kernel_groups] == [(0,), (1,)]
        assert [group.format for group in manager.kernel_groups] == [format, other_format]

    def test_one_shape_of_two_formats_is_read_twice(self) -> None:
        formats = [F.NL_X_NB_BS_NH_CS, F.NL_X_NB_NH_BS_CS]
        manager = KVLayerGroupsManager([heads(7, 12, 3, 5)] * 2, formats, (), 12)
        assert [(group.shape_desc.bs, group.shape_desc.nh) for group in manager.kernel_groups] == [(12, 3), (3, 12)]

    def test_engine_groups_part_layers_that_are_alike(self) -> None:
        manager = manage([latents(7, 3, 5)] * 3, [info(1, 0, 2), info(0, 1)])
        assert [(group.layer_indices, group.engine_group_idx) for group in manager.kernel_groups] == [
            ((0, 2), 1),
            ((1,), 0),
        ]

    def test_one_engine_group_may_have_several_kernel_groups(self) -> None:
        manager = manage([latents(7, 3, 5), latents(7, 3, 2)], [info(0, 0), info(0, 1)])
        assert [group.engine_group_idx for group in manager.kernel_groups] == [0, 0]

    def test_layers_in_no_group_are_left_out(self) -> None:
        anything = ArraySpec((3,), (9,), 0, F4)
        manager = manage([anything, latents(7, 3, 5), anything], [info(0, 1)])
        assert [group.layer_indices for group in manager.kernel_groups] == [(1,)]

    def test_padding_between_blocks_shows_in_the_block_stride(self) -> None:
        assert manage([latents(7, 3, 5, pad=4)] * 2).get_shape_desc(0).block_stride_elems == 19
        assert manage([latents(7, 3, 5)] * 2).get_shape_desc(0).block_stride_elems == 15
        assert manage([latents(1, 3, 5, pad=4)] * 2).get_shape_desc(0).block_stride_elems == 15

    def test_padding_between_slots_that_were_one_axis_with_the_blocks(self) -> None:
        for num_blocks in (7, 1):
            layers = [ArraySpec((num_blocks, 3, 5), (3 * 7, 7, 1), 0, F2)]
            assert manage(layers * 2).get_shape_desc(0).block_stride_elems == 21

    @pytest.mark.parametrize(
        ("format", "spec", "where"),
        [
            (F.NL_X_TWO_NB_BS_NH_HS, ArraySpec((2, 7, 3, 5, 2), (211, 30, 10, 2, 1), 0, F2), "in NL_X_TWO_NB_BS_NH_HS"),
            (F.NL_X_NB_TWO_BS_NH_HS, ArraySpec((7, 2, 3, 5, 2), (61, 30, 10, 2, 1), 0, F2), "in NL_X_NB_TWO_BS_NH_HS"),
            (F.NL_X_NB_BS_HS, ArraySpec((7, 3, 5), (24, 7, 1), 0, F2), "inside a block"),
            (F.NL_X_NB_BS_HS, ArraySpec((7, 3, 5), (12, 4, 1), 0, F2), "inside a block"),
        ],
    )
    def test_padding_elsewhere_is_refused(self, format: F, spec: ArraySpec, where: str) -> None:
        dense = ArraySpec.dense(spec.shape, F2)
        with pytest.raises(ValueError, match=f"layer 1: array of shape .* has padding {where}, which no transfer can"):
            KVLayerGroupsManager([dense, spec], [format] * 2, (), 48)

    def test_one_array_of_all_layers(self) -> None:
        pool = heads(7, 13, 2, 3, 5, 2)
        infos = [info(0, *range(0, 13, 2)), info(1, *range(1, 13, 2))]
        manager = KVLayerGroupsManager(pool, [F.NB_NL_TWO_BS_NH_HS] * 13, infos, 48)
        assert [group.num_layers for group in manager.kernel_groups] == [7, 6]
        assert [group.shape_desc.nb for group in manager.kernel_groups] == [7, 7]

    def test_k_and_v_lists(self) -> None:
        lists = [[heads(7, 3, 5, 2), heads(7, 3, 5, 2, dtype=U1)]] * 2
        manager = KVLayerGroupsManager(lists, [F.TWO_X_NL_X_NB_BS_NH_HS] * 2, (), 48)
        assert [(group.layer_indices, group.dtype) for group in manager.kernel_groups] == [((0,), F2), ((1,), U1)]


class TestInfos:
    layers = (latents(7, 3, 5), latents(7, 3, 2), latents(7, 3, 5))

    def test_each_is_told_of_one_kernel_group(self) -> None:
        told = {"tokens_per_block": 6, "sw_size_tokens": 12, "extra_object_group_tag": 4, "recurrent_state": True}
        group = manage(self.layers, [info(0, 0, 2), info(1, 1, **told)]).kernel_groups[1]
        assert {name: getattr(group, name) for name in told} == told

    @pytest.mark.parametrize("tokens", [0, -1, 3])
    def test_tokens_of_a_block_not_told_are_its_slots(self, tokens: int) -> None:
        assert manage(self.layers[:1], [info(0, 0, tokens_per_block=tokens)]).kernel_groups[0].tokens_per_block == 3

    @pytest.mark.parametrize("tokens", [1, 2, 4, 5])
    def test_tokens_of_a_block_are_a_multiple_of_its_slots(self, tokens: int) -> None:
        with pytest.raises(ValueError, match=f"kernel group 0: a block of {tokens} tokens cannot have 3 slots"):
            manage(self.layers[:1], [info(0, 0, tokens_per_block=tokens)])

    @pytest.mark.parametrize("infos", [[info(0, 0, 1, 2)], [info(0, 0), info(1, 1), info(2, 2), info(3)]])
    def test_as_many_as_there_are_kernel_groups(self, infos: list[EngineGroupInfo]) -> None:
        with pytest.raises(ValueError, match=rf"{len(infos)} engine group infos came for \d kernel groups with layers"):
            manage(self.layers, infos)

    @pytest.mark.parametrize("infos", [[info(1, 1), info(0, 0, 2)], [info(0, 2, 0), info(1, 1)]])
    def test_they_follow_the_order_of_the_layers(self, infos: list[EngineGroupInfo]) -> None:
        with pytest.raises(ValueError, match=r"kernel group 0 has layers \[0, 2\], but its engine group info names"):
            manage(self.layers, infos)

    def test_layers_that_are_not_registered_are_refused(self) -> None:
        with pytest.raises(ValueError, match="engine group 0 names layer 3, but 3 layers are registered"):
            manage(self.layers, [info(0, 3)])


class TestChunkSize:
    def test_of_no_whole_number_of_blocks_is_refused_with_the_valid_ones(self) -> None:
        layers = [latents(7, 16, 5), latents(7, 34, 5)]
        with pytest.raises(
            ValueError, match="kernel group 1 has blocks of 34 tokens, of which a chunk of 256 tokens is"
        ):
            manage(layers, chunk=256)
        with pytest.raises(ValueError, match=r"multiples of 272: 272, 544, 816 \.\.\."):
            manage(layers, chunk=256)
        assert manage(layers, chunk=544).blocks_per_chunk(1) == 16

    @pytest.mark.parametrize("sizes", [(16, 32), (256, 64, 8, 4)])
    def test_block_sizes_above_and_below_one_another(self, sizes: tuple[int, ...]) -> None:
        manager = manage([latents(7, size, 5) for size in sizes], chunk=256)
        assert [manager.blocks_per_chunk(index) for index in range(len(sizes))] == [256 // size for size in sizes]

    def test_a_window_below_it_is_a_whole_number_of_blocks(self) -> None:
        with pytest.raises(
            ValueError,
            match="has a sliding window of 7 tokens, below the chunk of 48 and no whole number of its blocks of 3 "
            "tokens; use a chunk of at most 7 tokens, a multiple of 3, or report the window in whole blocks",
        ):
            manage([latents(7, 3, 5)], [info(0, 0, sw_size_tokens=7)])
        with pytest.raises(ValueError, match="no whole number of its blocks of 16 tokens; report the window in whole"):
            manage([latents(7, 16, 5)], [info(0, 0, sw_size_tokens=7)])
        assert manage([latents(7, 3, 5)], [info(0, 0, sw_size_tokens=49)]).get_slots_per_chunk_in_sw(0) == 48


class TestWindowsAndCompression:
    """A chunk of 48 tokens: group 0 whole, 1 with a window of 12, 2 with 4 tokens a slot, 3 with both."""

    @pytest.fixture
    def manager(self) -> KVLayerGroupsManager:
        return manage(
            [latents(7, 3, 5), latents(7, 3, 2), latents(7, 3, 11, U1), latents(7, 3, 13, F4)],
            [
                info(0, 0),
                info(1, 1, sw_size_tokens=12),
                info(2, 2, tokens_per_block=12),
                info(3, 3, tokens_per_block=12, sw_size_tokens=24),
            ],
        )

    def test_kept_tokens_slots_and_blocks(self, manager: KVLayerGroupsManager) -> None:
        groups = range(4)
        assert [manager.get_subchunk_sw_size_tokens(index) for index in groups] == [48, 12, 48, 24]
        assert [manager.get_slots_per_chunk_in_sw(index) for index in groups] == [48, 12, 12, 6]
        assert [manager.blocks_per_chunk(index) for index in groups] == [16, 16, 4, 4]
        assert [manager.blocks_per_chunk_in_sw(index) for index in groups] == [16, 4, 4, 2]

    def test_whole_chunks_may_be_kept(self, manager: KVLayerGroupsManager) -> None:
        manager.enable_full_sw_kv()
        groups = range(4)
        assert [manager.get_subchunk_sw_size_tokens(index) for index in groups] == [48] * 4
        assert [manager.get_slots_per_chunk_in_sw(index) for index in groups] == [48, 48, 12, 12]
        assert [manager.blocks_per_chunk_in_sw(index) for index in groups] == [16, 16, 4, 4]

    def test_blocks_of_tokens_are_rounded_down(self, manager: KVLayerGroupsManager) -> None:
        assert [manager.calculate_num_blocks(0, tokens) for tokens in (0, 2, 3, 48, 50)] == [0, 0, 1, 16, 16]
        assert [manager.calculate_num_blocks(2, tokens) for tokens in (0, 11, 12, 47, 48)] == [0, 0, 1, 3, 4]

    def test_slots_of_tokens(self, manager: KVLayerGroupsManager) -> None:
        assert [manager.kernel_groups[2].calculate_slots(tokens) for tokens in (0, 3, 4, 48)] == [0, 0, 1, 12]

    def test_groups_share_an_object_by_window_in_chunks(self, manager: KVLayerGroupsManager) -> None:
        assert manager.object_groups == (ObjectGroupInfo((0, 2)), ObjectGroupInfo((1, 3), 1))
        assert manager.get_attn_desc() == AttentionWindows((-1, 1), ("attention", "attention"))

    def test_difference_07_objects_hold_the_window_only(self, manager: KVLayerGroupsManager) -> None:
        # 48 slots of 5 float16, 12 slots of 11 uint8; 12 slots of 2 float16, 6 slots of 13 float32.
        assert [manager.object_nbytes(index) for index in range(2)] == [480 + 132, 48 + 312]
        assert [manager.offset_in_object(0, 0), manager.offset_in_object(0, 2)] == [0, 480]
        assert [manager.offset_in_object(1, 1), manager.offset_in_object(1, 3)] == [0, 48]
        manager.enable_full_sw_kv()
        assert [manager.object_nbytes(index) for index in range(2)] == [480 + 132, 192 + 624]
        assert manager.offset_in_object(1, 3) == 192

    def test_indices_that_are_not_there(self, manager: KVLayerGroupsManager) -> None:
        for function in (manager.kernel_group, manager.get_shape_desc, manager.get_slots_per_chunk_in_sw,
                         manager.get_subchunk_sw_size_tokens, manager.blocks_per_chunk,
                         manager.blocks_per_chunk_in_sw):  # fmt: skip
            for index in (-1, 4):
                with pytest.raises(IndexError, match=rf"kernel group {index} is outside \[0, 4\)"):
                    function(index)
        for index in (-1, 2):
            for of_object in (manager.object_group, manager.object_nbytes):
                with pytest.raises(IndexError, match=rf"object group {index} is outside \[0, 2\)"):
                    of_object(index)
            with pytest.raises(IndexError, match=rf"object group {index} is outside"):
                manager.offset_in_object(index, 0)
        for index in (-1, 4):
            with pytest.raises(IndexError, match=rf"kernel group {index} is outside"):
                manager.calculate_num_blocks(index, 3)
            with pytest.raises(IndexError, match=rf"kernel group {index} is outside"):
                manager.offset_in_object(0, index)

    def test_a_group_of_another_object_has_no_offset(self, manager: KVLayerGroupsManager) -> None:
        with pytest.raises(ValueError, match=r"kernel group 1 is not in object group 0, which has \[0, 2\]"):
            manager.offset_in_object(0, 1)


class TestObjectGroups:
    def group(self, infos: Sequence[EngineGroupInfo], separate: bool = True) -> KVLayerGroupsManager:
        return manage([latents(7, 3, 5)] * len(infos), infos, separate=separate)

    @pytest.mark.parametrize(("window", "chunks"), [(-1, -1), (3, 1), (48, 1), (49, 2), (96, 2), (97, 3)])
    def test_windows_are_counted_in_chunks_rounded_up(self, window: int, chunks: int) -> None:
        assert self.group([info(0, 0, sw_size_tokens=window)]).object_groups == (ObjectGroupInfo((0,), chunks),)

    def test_windows_of_as_many_chunks_share_an_object(self) -> None:
        infos = [info(0, 0, sw_size_tokens=50), info(1, 1), info(2, 2, sw_size_tokens=96)]
        assert self.group(infos).object_groups == (ObjectGroupInfo((0, 2), 2), ObjectGroupInfo((1,)))

    def test_recurrent_groups_stand_apart(self) -> None:
        infos = [info(0, 0), info(1, 1, recurrent_state=True), info(2, 2), info(3, 3, recurrent_state=True)]
        manager = self.group(infos)
        assert manager.object_groups == (ObjectGroupInfo((0, 2)), ObjectGroupInfo((1, 3), recurrent=True))
        assert manager.get_attn_desc().group_kinds == ("attention", "recurrent")

    def test_tagged_groups_stand_apart_and_last(self) -> None:
        tags = (7, 0, 5, 7, 0)
        infos = [info(index, index, extra_object_group_tag=tag) for index, tag in enumerate(tags)]
        manager = self.group(infos)
        assert manager.object_groups == (
            ObjectGroupInfo((1, 4)),
            ObjectGroupInfo((0, 3), aux=True),
            ObjectGroupInfo((2,), aux=True),
        )
        assert manager.get_attn_desc().group_kinds == ("attention", "aux", "aux")

    def test_one_tag_with_two_windows_is_two_objects(self) -> None:
        infos = [info(0, 0, extra_object_group_tag=7), info(1, 1, extra_object_group_tag=7, sw_size_tokens=48)]
        assert self.group(infos).object_groups == (ObjectGroupInfo((0,), aux=True), ObjectGroupInfo((1,), 1, aux=True))

    def test_negative_tags_are_tags(self) -> None:
        infos = [info(0, 0, extra_object_group_tag=-1), info(1, 1)]
        assert self.group(infos).object_groups == (ObjectGroupInfo((1,)), ObjectGroupInfo((0,), aux=True))

    def test_one_object_for_all_has_no_window(self) -> None:
        infos = [info(0, 0, sw_size_tokens=48), info(1, 1, recurrent_state=True), info(2, 2, extra_object_group_tag=1)]
        manager = self.group(infos, separate=False)
        assert manager.object_groups == (ObjectGroupInfo((0, 1, 2)),)
        assert manager.get_attn_desc() == AttentionWindows((-1,), ("attention",))

    def test_whole_chunks_lift_the_windows_but_not_of_recurrent_groups(self) -> None:
        told = {"sw_size_tokens": 96}
        infos = [info(0, 0, **told), info(1, 1, recurrent_state=True, **told)]
        manager = self.group(infos)
        assert manager.get_attn_desc().num_chunks_in_sw == (2, 2)
        manager.enable_full_sw_kv()
        assert manager.get_attn_desc().num_chunks_in_sw == (-1, 2)


def test_two_head_shapes_in_48_layers_by_hand() -> None:
    sliding, full = heads(2, 101, 16, 4, 256, dtype="bfloat16"), heads(2, 101, 16, 2, 512, dtype="bfloat16")
    layers = [full if layer % 6 == 5 else sliding for layer in range(48)]
    infos = [
        info(0, *(layer for layer in range(48) if layer % 6 != 5), sw_size_tokens=1024),
        info(1, *range(5, 48, 6)),
    ]
    manager = KVLayerGroupsManager(layers, [F.NL_X_TWO_NB_BS_NH_HS] * 48, infos, 256)
    assert [group.num_layers for group in manager.kernel_groups] == [40, 8]
    assert manager.object_groups == (ObjectGroupInfo((0,), 4), ObjectGroupInfo((1,)))
    assert manager.object_nbytes(0) == 2 * 40 * 256 * 1024 * 2
    assert manager.object_nbytes(1) == 2 * 8 * 256 * 1024 * 2


def test_a_cache_of_4_tb_is_laid_out_without_memory() -> None:
    layers = [ArraySpec.dense((2, 1_000_000, 16, 8, 128), DTYPES["bfloat16"]) for _ in range(64)]
    assert sum(layer.nbytes for layer in layers) > 4 * 10**12
    tracemalloc.start()
    try:
        manager = KVLayerGroupsManager(layers, [F.NL_X_TWO_NB_BS_NH_HS] * 64, (), 256)
        assert manager.object_nbytes(0) == 2 * 64 * 256 * 1024 * 2
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200_000


def test_group_infos_are_values() -> None:
    [group] = manage([latents(7, 3, 5)]).kernel_groups
    assert group == replace(group)
    assert len({group, replace(group), replace(group, sw_size_tokens=3)}) == 2
    assert len({ObjectGroupInfo((0,)), ObjectGroupInfo((0,))}) == 1


class TestDifferences:
    """What LMCache takes for something else; see docs/differences.md."""

    def test_06_layers_of_a_group_that_differ_in_blocks_or_padding(self) -> None:
        with pytest.raises(ValueError, match=r"layer 0 has 7 blocks \[15\] elements apart, but layer 1 has 13 blocks"):
            manage([latents(7, 3, 5), latents(13, 3, 5)])
        with pytest.raises(
            ValueError, match=r"layer 0 has 7 blocks \[15\] .* but layer 1 has 7 blocks \[17\] elements"
        ):
            manage([latents(7, 3, 5), latents(7, 3, 5, pad=2)])
        assert len(manage([latents(7, 3, 5), latents(13, 3, 5, pad=2)], [info(0, 0), info(1, 1)]).kernel_groups) == 2

    def test_12_negative_numbers_of_tokens(self) -> None:
        with pytest.raises(ValueError, match="num_tokens is -1; it cannot be negative"):
            manage([latents(7, 3, 5)]).calculate_num_blocks(0, -1)

    def test_13_no_layers(self) -> None:
        with pytest.raises(ValueError, match="there are no layers; register at least one"):
            manage([])
        with pytest.raises(ValueError, match="no layer is in any engine group"):
            manage([latents(7, 3, 5)], [info(0)])

    @pytest.mark.parametrize("chunk", [0, -1, -48])
    def test_15_chunks_of_no_tokens(self, chunk: int) -> None:
        with pytest.raises(ValueError, match=f"lmcache_tokens_per_chunk is {chunk}; a chunk has at least one token"):
            manage([latents(7, 3, 5)], chunk=chunk)

    def test_blocks_of_no_slots(self) -> None:
        with pytest.raises(ValueError, match="kernel group 0: a block of 0 tokens cannot have 0 slots"):
            manage([latents(7, 0, 5)])
