"""Lists of block ids per group."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from kvshm.formats import EngineKVFormat
from kvshm.layout import (
    EngineGroupInfo,
    KVLayerGroupsManager,
    ObjectGroupInfo,
    all_null_chunk_masks,
    downsample_block_ids,
    recalculate_blocks_to_skip,
    slice_block_ids_per_group,
)
from kvshm.spec import ArraySpec

U1 = np.dtype("uint8")


class TestSlices:
    # Blocks of 16 tokens, a scratch group, blocks of 64 tokens.
    allocated: ClassVar = {0: list(range(100, 116)), 1: [7, 7, 7], 2: [200, 201, 202, 203]}
    tokens = (16, 0, 64)

    def test_block_ids_of_a_range_of_tokens(self) -> None:
        assert slice_block_ids_per_group(self.allocated, self.tokens, 64, 192) == [
            list(range(104, 112)),
            [],
            [201, 202],
        ]

    def test_ranges_beyond_the_ids_are_cut(self) -> None:
        assert slice_block_ids_per_group(self.allocated, self.tokens, 192, 640) == [[112, 113, 114, 115], [], [203]]

    def test_empty_ranges(self) -> None:
        assert slice_block_ids_per_group(self.allocated, self.tokens, 128, 128) == [[], [], []]
        assert slice_block_ids_per_group(self.allocated, self.tokens, 128, 64) == [[], [], []]

    def test_a_missing_group_has_no_ids(self) -> None:
        assert slice_block_ids_per_group({}, self.tokens, 0, 64) == [[], [], []]

    @pytest.mark.parametrize(("start", "end"), [(16, 64), (0, 80), (8, 64)])
    def test_ranges_that_cut_blocks_are_refused(self, start: int, end: int) -> None:
        with pytest.raises(
            ValueError, match=rf"token range \[{start}, {end}\) cuts through blocks of \d+ tokens of engine"
        ):
            slice_block_ids_per_group(self.allocated, self.tokens, start, end)

    def test_the_lists_are_copies(self) -> None:
        slice_block_ids_per_group(self.allocated, self.tokens, 0, 256)[0].append(1)
        assert len(self.allocated[0]) == 16


class TestDownsampling:
    """A chunk of 12 tokens: blocks of 3 tokens whole, blocks of 2 tokens of which the last 3 are kept."""

    @pytest.fixture
    def manager(self) -> KVLayerGroupsManager:
        layers = [ArraySpec.dense((29, 3, 5), U1), ArraySpec.dense((29, 2, 7), U1)]
        infos = [EngineGroupInfo(0, (0,)), EngineGroupInfo(1, (1,), sw_size_tokens=6)]
        return KVLayerGroupsManager(layers, [EngineKVFormat.NL_X_NB_BS_HS] * 2, infos, 12)

    def test_the_last_blocks_of_each_chunk_are_kept(self, manager: KVLayerGroupsManager) -> None:
        ids = [list(range(8)), list(range(10, 22))]
        assert downsample_block_ids(manager, ids) == [list(range(8)), [13, 14, 15, 19, 20, 21]]
        assert ids == [list(range(8)), list(range(10, 22))]

    def test_whole_chunks_kept(self, manager: KVLayerGroupsManager) -> None:
        manager.enable_full_sw_kv()
        ids = [list(range(8)), list(range(10, 22))]
        found = downsample_block_ids(manager, ids)
        assert found == ids
        assert all(new is not old for new, old in zip(found, ids, strict=True))

    def test_no_ids(self, manager: KVLayerGroupsManager) -> None:
        assert downsample_block_ids(manager, [[], []]) == [[], []]

    def test_ids_may_be_arrays(self, manager: KVLayerGroupsManager) -> None:
        ids = [np.arange(4), np.arange(6)]
        assert downsample_block_ids(manager, ids) == [[0, 1, 2, 3], [3, 4, 5]]  # type: ignore[arg-type]

    def test_parts_of_chunks_are_refused(self, manager: KVLayerGroupsManager) -> None:
        with pytest.raises(
            ValueError, match="kernel group 1 has 5 block ids, which is no multiple of its 6 blocks a chunk"
        ):
            downsample_block_ids(manager, [list(range(4)), list(range(5))])

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_difference_11_one_list_per_kernel_group(self, manager: KVLayerGroupsManager, count: int) -> None:
        with pytest.raises(ValueError, match=f"block ids came for {count} kernel groups, but there are 2"):
            downsample_block_ids(manager, [[]] * count)


@pytest.mark.parametrize(
    ("skip", "left"), [(0, 0), (1, 0), (4, 0), (5, 1), (6, 2), (7, 3), (8, 3), (11, 3), (12, 4), (14, 6), (21, 9)]
)
def test_blocks_to_skip_of_windows_of_3_in_chunks_of_7(skip: int, left: int) -> None:
    assert recalculate_blocks_to_skip(7, 3, skip) == left


def test_without_a_window_as_many_are_skipped() -> None:
    assert [recalculate_blocks_to_skip(7, 7, skip) for skip in range(30)] == list(range(30))
    assert recalculate_blocks_to_skip(0, 0, 5) == 5


def test_blocks_to_skip_are_those_that_stand_before() -> None:
    for per_chunk in range(1, 7):
        for window in range(1, per_chunk + 1):
            kept = [block for block in range(5 * per_chunk) if block % per_chunk >= per_chunk - window]
            for skip in range(5 * per_chunk):
                expected = sum(block < skip for block in kept)
                assert recalculate_blocks_to_skip(per_chunk, window, skip) == expected


def test_chunks_of_no_blocks_have_no_window() -> None:
    with pytest.raises(ValueError, match="chunks of no blocks cannot have a window of 3 blocks"):
        recalculate_blocks_to_skip(0, 3, 1)


class TestNullChunks:
    # Two chunks; kernel groups of 2, 1 and 3 blocks a chunk.
    ids = ([0, 0, 0, 5], [0, 0], [0, 0, 0, 0, 0, 0])
    per_chunk = (2, 1, 3)
    objects = (ObjectGroupInfo((0, 1)), ObjectGroupInfo((2,)))

    def test_a_chunk_whose_blocks_are_all_null(self) -> None:
        assert all_null_chunk_masks(self.ids, self.objects, self.per_chunk, 2) == [[True, False], [True, True]]

    def test_another_null_block(self) -> None:
        assert all_null_chunk_masks(([7, 7, 7, 0],), [ObjectGroupInfo((0,))], (2,), 2, null_block_id=7) == [
            [True, False]
        ]
        assert all_null_chunk_masks(self.ids, self.objects, self.per_chunk, 2, 7) == [[False, False]] * 2

    def test_more_ids_than_chunks_are_not_looked_at(self) -> None:
        assert all_null_chunk_masks(([0, 0, 5, 5],), [ObjectGroupInfo((0,))], (2,), 1) == [[True]]

    def test_of_no_groups_and_no_chunks(self) -> None:
        assert all_null_chunk_masks((), (), (), 2) == []
        assert all_null_chunk_masks((), [ObjectGroupInfo(())], (), 2) == [[True, True]]
        assert all_null_chunk_masks(self.ids, self.objects, self.per_chunk, 0) == [[], []]

    @pytest.mark.parametrize("group", [-1, 3])
    def test_a_kernel_group_without_ids(self, group: int) -> None:
        with pytest.raises(IndexError, match=f"kernel group {group} has no block ids: lists were given for 3 groups"):
            all_null_chunk_masks(self.ids, [ObjectGroupInfo((group,))], self.per_chunk, 2)


class TestDifferences:
    """What LMCache slices with; see docs/differences.md."""

    def test_12_negative_ranges_skips_counts_and_block_sizes(self) -> None:
        with pytest.raises(ValueError, match=r"token range \[-64, 64\) must not be negative"):
            slice_block_ids_per_group({0: [1]}, (64,), -64, 64)
        with pytest.raises(ValueError, match=r"token range \[0, -64\) must not be negative"):
            slice_block_ids_per_group({0: [1]}, (64,), 0, -64)
        with pytest.raises(ValueError, match="engine group 1 has blocks of -64 tokens; give 0 for a scratch group"):
            slice_block_ids_per_group({0: [1]}, (64, -64), 0, 64)
        for numbers in ((-7, 3, 1), (7, -3, 1), (7, 3, -1)):
            with pytest.raises(ValueError, match="must not be negative"):
                recalculate_blocks_to_skip(*numbers)
        with pytest.raises(ValueError, match=r"num_chunks -1 and blocks_per_chunk \[1\] must not be negative"):
            all_null_chunk_masks([[0]], [ObjectGroupInfo((0,))], (1,), -1)
        with pytest.raises(ValueError, match=r"num_chunks 1 and blocks_per_chunk \[-1\] must not be negative"):
            all_null_chunk_masks([[0]], [ObjectGroupInfo((0,))], (-1,), 1)

    @pytest.mark.parametrize("ids", [[0, 0, 0], []])
    def test_14_missing_ids_are_not_null(self, ids: list[int]) -> None:
        with pytest.raises(ValueError, match=f"kernel group 0 has {len(ids)} block ids; 2 chunks of 2 blocks take 4"):
            all_null_chunk_masks([ids], [ObjectGroupInfo((0,))], (2,), 2)
