"""Block ids per group: lists of them, and checked against a layout."""

from __future__ import annotations

import array
from typing import Any, ClassVar

import numpy as np
import pytest

from kvshm.formats import EngineKVFormat
from kvshm.layout import (
    BlockIds,
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


def one_group(**facts: Any) -> KVLayerGroupsManager:
    """Blocks of 3 tokens, 29 of them, chunks of 12."""
    infos = [EngineGroupInfo(0, (0,), 3, **facts)]
    return KVLayerGroupsManager([ArraySpec.dense((29, 3, 5), U1)], [EngineKVFormat.NL_X_NB_BS_HS], infos, 12)


def two_groups(**facts: Any) -> KVLayerGroupsManager:
    """As above, and a group with blocks of 2 tokens, 31 of them, of which the window keeps the last 3 of 6."""
    layers = [ArraySpec.dense((29, 3, 5), U1), ArraySpec.dense((31, 2, 7), U1)]
    infos = [EngineGroupInfo(0, (0,)), EngineGroupInfo(1, (1,), sw_size_tokens=6, **facts)]
    return KVLayerGroupsManager(layers, [EngineKVFormat.NL_X_NB_BS_HS] * 2, infos, 12)


class Foreign:
    """An array of another library."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.values


class TestBlockIds:
    @pytest.mark.parametrize(
        "given",
        [
            [5, 6, 7, 8],
            (5, 6, 7, 8),
            range(5, 9),
            [np.int32(5), 6, 7, 8],
            np.arange(5, 9),
            np.arange(5, 9, dtype=np.uint8),
            array.array("i", [5, 6, 7, 8]),
            memoryview(array.array("q", [5, 6, 7, 8])),
            Foreign([5, 6, 7, 8]),
            [[5, 6, 7, 8]],
            ([5, 6, 7, 8],),
            [np.arange(5, 9)],
            np.arange(5, 9)[None],
            [5, 6, 7, 8, -1, 99],
        ],
        ids=str,
    )
    def test_lists_and_arrays_of_one_group(self, given: Any) -> None:
        ids = BlockIds.of_engine_groups(one_group(), given, 1)
        assert [ids.blocks(group).tolist() for group in range(len(ids.groups))] == [[[5, 6, 7, 8]]]
        assert [group.tolist() for group in ids.flat()] == [[5, 6, 7, 8]]

    def test_one_list_per_engine_group(self) -> None:
        ids = BlockIds.of_engine_groups(two_groups(), [np.arange(8), np.arange(12)], 2)
        assert [ids.blocks(group).tolist() for group in range(len(ids.groups))] == [
            [[0, 1, 2, 3], [4, 5, 6, 7]],
            [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]],
        ]
        assert [ids.first_chunks(1).blocks(group).tolist() for group in range(2)] == [
            [[0, 1, 2, 3]],
            [[0, 1, 2, 3, 4, 5]],
        ]
        assert ids.first_chunks(1).num_chunks == 1

    def test_kernel_groups_of_one_engine_group_share_its_list(self) -> None:
        layers = [ArraySpec.dense((29, 3, 5), U1), ArraySpec.dense((29, 3, 7), U1)]
        manager = KVLayerGroupsManager(layers, [EngineKVFormat.NL_X_NB_BS_HS] * 2, (), 3)
        ids = BlockIds.of_engine_groups(manager, [4], 1)
        assert [ids.blocks(group).tolist() for group in range(2)] == [[[4]], [[4]]]

    def test_the_ids_are_copies(self) -> None:
        given = np.arange(4)
        ids = BlockIds.of_engine_groups(one_group(), given, 1)
        given[:] = 0
        assert ids.flat()[0].tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            (None, "block_ids is of type NoneType; give a sequence of integers, such as a list, or a one-dim"),
            (7, "block_ids is of type int"),
            ({5, 6, 7, 8}, "block_ids is of type set"),
            ({5: 1}, "block_ids is of type dict"),
            ((block for block in range(4)), "block_ids is of type generator"),
            ("5678", "block_ids is of type str"),
            ([None], "block_ids of kernel group 0 must be a sequence of integers"),
            ([{5, 6, 7, 8}], "block_ids of kernel group 0 must be a sequence of integers"),
            ([1.0, 2, 3, 4], "block_ids of kernel group 0 must be a sequence of integers"),
            ([2**63, 2, 3, 4], "64 signed bits"),
            ([True, 2, 3, 4], r"block_ids of kernel group 0\[0\] is True, a boolean"),
            ([[1, 2, 3, [4]]], "must be a sequence of integers"),
            (np.arange(4.0), "dtype float64; give a one-dimensional array of integers"),
            (np.array(5), r"shape \(\)"),
            (np.zeros((2, 4), int), "block_ids holds 2 lists, but there is one engine group; .* one flat list"),
            ([[5, 6], [7, 8]], "block_ids holds 2 lists, but there is one engine group"),
            ([5, 6, 7], "1 chunks of 12 tokens take 4 blocks of kernel group 0, but 3 block ids came"),
            ([], "but 0 block ids came"),
            ([[]], "but 0 block ids came"),
        ],
    )
    def test_what_is_none_of_these_is_refused(self, given: Any, text: str) -> None:
        with pytest.raises(ValueError, match=text):
            BlockIds.of_engine_groups(one_group(), given, 1)

    @pytest.mark.parametrize("given", [[1, 2], np.arange(9), [[1, 2, 3, 4]], None])
    def test_a_group_without_a_list_is_refused(self, given: Any) -> None:
        with pytest.raises(ValueError, match=r"block_ids is of type|engine group 1 has no block ids: .* 2 of them"):
            BlockIds.of_engine_groups(two_groups(), given, 1)

    @pytest.mark.parametrize("counts", [(8,), (8, 11), (8, 13), (7, 12), (8, 12, 0), ()])
    def test_of_kernel_groups_the_counts_are_exact(self, counts: tuple[int, ...]) -> None:
        given = [np.zeros(count, np.int64) for count in counts]
        with pytest.raises(ValueError, match=r"2 chunks take \[8, 12\] block ids per kernel group, but \["):
            BlockIds.of_kernel_groups(two_groups(), given, 2)

    def test_of_kernel_groups(self) -> None:
        ids = BlockIds.of_kernel_groups(two_groups(), [np.arange(4), np.arange(6)], 1)
        assert [group.tolist() for group in ids.flat()] == [list(range(4)), list(range(6))]


class TestData:
    """Two chunks; of the second group the last three of six blocks are kept."""

    full: ClassVar = [1, 2, 3, 4, 5, 6, 7, 8]
    window: ClassVar = [0, 0, 0, 4, 5, 6, 0, 0, 0, 10, 11, 12]

    def masks(self, manager: KVLayerGroupsManager, full: Any, window: Any, null: int | None = 0) -> list[list[bool]]:
        ids = BlockIds.of_engine_groups(manager, [full, window], 2)
        return [ids.has_data(group, null).tolist() for group in range(2)]

    def test_null_blocks_outside_a_window_do_not_matter(self) -> None:
        assert self.masks(two_groups(), self.full, self.window) == [[True, True], [True, True]]

    @pytest.mark.parametrize("place", range(12))
    def test_any_null_block_that_is_kept_counts(self, place: int) -> None:
        window = [*range(1, 13)]
        window[place] = 0
        expected = [True, True]
        if place % 6 >= 3:
            expected[place // 6] = False
        assert self.masks(two_groups(), self.full, window) == [[True, True], expected]

    def test_any_null_block_of_full_attention_counts(self) -> None:
        assert self.masks(two_groups(), [1, 2, 3, 4, 5, 0, 7, 8], self.window)[0] == [True, False]
        assert self.masks(two_groups(), [0] * 8, self.window)[0] == [False, False]

    def test_another_null_block_and_none(self) -> None:
        assert self.masks(two_groups(), self.full, self.window, 5) == [[True, False], [False, True]]
        assert self.masks(two_groups(), [0] * 8, [0] * 12, None) == [[True, True]] * 2
        assert self.masks(two_groups(), [0] * 8, [0] * 12, -1) == [[True, True]] * 2

    def test_groups_of_one_object_go_together(self) -> None:
        layers = [ArraySpec.dense((29, 3, 5), U1)] * 2
        infos = [EngineGroupInfo(0, (0,)), EngineGroupInfo(1, (1,))]
        manager = KVLayerGroupsManager(layers, [EngineKVFormat.NL_X_NB_BS_HS] * 2, infos, 3)
        ids = BlockIds.of_engine_groups(manager, [[1, 0, 3], [1, 2, 0]], 3)
        assert ids.has_data(0, 0).tolist() == [True, False, False]


class TestChecks:
    def store(self, manager: KVLayerGroupsManager, *lists: Any, null: int | None = 0, chunks: int = 2) -> None:
        BlockIds.of_engine_groups(manager, list(lists), chunks).check_to_store(null)

    def retrieve(
        self, manager: KVLayerGroupsManager, *lists: Any, skip: int = 0, null: int | None = 0, chunks: int = 2
    ) -> None:
        BlockIds.of_engine_groups(manager, list(lists), chunks).check_to_retrieve(skip, null)

    @pytest.mark.parametrize("wrong", [29, -1, 2**62])
    def test_blocks_that_do_not_exist(self, wrong: int) -> None:
        for check in (self.store, self.retrieve):
            with pytest.raises(ValueError, match=rf"kernel group 0 hold {wrong}, but its cache has blocks \[0, 29\)"):
                check(one_group(), [1, 2, 3, 4, 5, 6, wrong, 8])

    def test_blocks_that_do_not_move_may_be_anything(self) -> None:
        window = [99, -1, 7, 4, 5, 6, 99, 99, 99, 10, 11, 12]
        self.store(two_groups(), range(8), window)
        self.retrieve(two_groups(), range(8), [*[99] * 9, 10, 11, 12])
        with pytest.raises(ValueError, match=r"kernel group 1 hold 99, but its cache has blocks \[0, 31\)"):
            self.store(two_groups(), range(8), [*[99] * 9, 10, 11, 12])
        with pytest.raises(ValueError, match=r"kernel group 1 hold 31, but"):
            self.retrieve(two_groups(), range(8), [*[99] * 9, 10, 31, 12])

    def test_the_null_block_may_be_no_block(self) -> None:
        self.store(one_group(), [1, 2, -5, 4, 5, 6, 7, 8], null=-5)
        with pytest.raises(ValueError, match="kernel group 0 hold -5"):
            self.retrieve(one_group(), [1, 2, -5, 4, 5, 6, 7, 8], null=-5)

    def test_tagged_groups_are_not_looked_at(self) -> None:
        for check in (self.store, self.retrieve):
            check(two_groups(extra_object_group_tag=2), range(8), [99] * 12)

    def test_a_block_twice(self) -> None:
        self.store(one_group(), [3] * 8)
        with pytest.raises(
            ValueError, match="kernel group 0 hold block 3 more than once, which would be written twice"
        ):
            self.retrieve(one_group(), [1, 2, 3, 4, 5, 6, 3, 8])
        self.retrieve(one_group(), [1, 0, 3, 4, 5, 0, 0, 8])
        with pytest.raises(ValueError, match="hold block 0 more than once"):
            self.retrieve(one_group(), [1, 0, 3, 4, 5, 0, 7, 8], null=None)

    @pytest.mark.parametrize("skip", range(26))
    def test_blocks_of_skipped_tokens_are_not_looked_at(self, skip: int) -> None:
        for wrong in (99, 8):  # no block, and one that is there twice
            for place in range(8):
                ids = [1, 2, 3, 4, 5, 6, 7, 8, 9]
                ids[place] = wrong
                twice = place != 7 and wrong == 8 and skip < 24
                if skip < (place + 1) * 3 and (wrong == 99 or twice):
                    with pytest.raises(ValueError, match="kernel group 0 hold"):
                        self.retrieve(one_group(), ids, skip=skip)
                else:
                    self.retrieve(one_group(), ids, skip=skip)

    @pytest.mark.parametrize(("skip", "looked_at"), [(0, True), (3, True), (11, True), (12, False)])
    def test_blocks_of_recurrent_state_are_written_whole(self, skip: int, looked_at: bool) -> None:
        infos = [EngineGroupInfo(0, (0,), 12, recurrent_state=True)]
        manager = KVLayerGroupsManager([ArraySpec.dense((29, 1, 5), U1)], [EngineKVFormat.NL_X_NB_BS_HS], infos, 12)
        if looked_at:
            with pytest.raises(ValueError, match="kernel group 0 hold 99"):
                self.retrieve(manager, [99], skip=skip, chunks=1)
        else:
            self.retrieve(manager, [99], skip=skip, chunks=1)
