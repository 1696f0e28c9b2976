"""What an engine tells of its layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvshm.formats import EngineKVFormat
from kvshm.layout import (
    EngineGroupInfo,
    KVLayerGroupsManager,
    engine_group_layer_indices,
    expand_engine_block_ids,
    get_engine_group_indices,
    num_engine_group_infos,
    num_engine_groups,
)
from kvshm.spec import ArraySpec

# Two kernel groups over the ids of engine group 0, one over those of 2; group 1 has no layers here.
GROUPS = (EngineGroupInfo(0, (4, 1)), EngineGroupInfo(2, (0, 5)), EngineGroupInfo(0, (3,)))


def test_defaults() -> None:
    info = EngineGroupInfo(3)
    assert (info.layer_indices, info.tokens_per_block, info.sw_size_tokens) == ((), 0, -1)
    assert (info.extra_object_group_tag, info.recurrent_state) == (0, False)


def test_layers_may_come_as_a_list() -> None:
    info = EngineGroupInfo(0, [1, 2])  # type: ignore[arg-type]
    assert info == EngineGroupInfo(0, (1, 2))
    assert hash(info) == hash(EngineGroupInfo(0, (1, 2)))


def test_numbers_of_numpy_become_ints() -> None:
    info = EngineGroupInfo(np.int64(1), (np.int32(2),), np.int64(3), recurrent_state=np.True_)  # type: ignore[arg-type]
    assert info == EngineGroupInfo(1, (2,), 3, recurrent_state=True)
    assert (type(info.engine_group_id), type(info.layer_indices[0]), info.recurrent_state) == (int, int, True)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"engine_group_id": "0"}, "engine_group_id of an engine group: expected an integer, got '0'"),
        ({"engine_group_id": None}, "engine_group_id of an engine group: expected an integer, got None"),
        ({"engine_group_id": True}, "engine_group_id of an engine group: expected an integer, got True"),
        ({"engine_group_id": 0, "layer_indices": 3}, "of engine group 0: expected a sequence of integers, got 3"),
        ({"engine_group_id": 0, "layer_indices": (1.0,)}, "of engine group 0: expected an integer, got 1.0"),
        ({"engine_group_id": 0, "layer_indices": (False, 1)}, "of engine group 0: expected an integer, got False"),
        ({"engine_group_id": 0, "sw_size_tokens": None}, "sw_size_tokens .* expected an integer, got None"),
        ({"engine_group_id": 0, "recurrent_state": "no"}, "recurrent_state is 'no'; give True or False"),
    ],
)
def test_fields_of_other_types_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        EngineGroupInfo(**fields)


@pytest.mark.parametrize(
    "infos", [[{"engine_group_id": 0}], ({"engine_group_id": 0},), {0: 1}, 5, [EngineGroupInfo(0), 3]]
)
def test_infos_are_infos(infos: Any) -> None:
    text = r"engine_group_infos holds (dict|int); give a list of kvshm.layout.EngineGroupInfo"
    layers = [ArraySpec.dense((7, 2, 3), np.dtype("float16"))]
    for refuses in (
        lambda: engine_group_layer_indices(infos),
        lambda: KVLayerGroupsManager(layers, [EngineKVFormat.NL_X_NB_BS_HS], infos, 2),
    ):
        with pytest.raises(ValueError, match=text):
            refuses()


def test_counts() -> None:
    assert num_engine_groups(GROUPS) == 3
    assert num_engine_group_infos(GROUPS) == 3
    assert num_engine_groups(()) == num_engine_group_infos(()) == 1


def test_layers_of_each_engine_group_rise() -> None:
    assert engine_group_layer_indices(GROUPS) == [[1, 3, 4], [], [0, 5]]
    assert engine_group_layer_indices(()) == []


def test_engine_group_of_each_layer() -> None:
    assert get_engine_group_indices(GROUPS, 7) == [2, 0, -1, 0, 0, 2, -1]
    assert get_engine_group_indices((), 7) is None
    assert get_engine_group_indices(GROUPS, 0) is None


def test_a_layer_in_two_groups_is_in_the_last() -> None:
    assert get_engine_group_indices([EngineGroupInfo(0, (0, 1)), EngineGroupInfo(1, (1,))], 2) == [0, 1]


def test_a_layer_that_is_not_registered_is_refused() -> None:
    with pytest.raises(ValueError, match=r"engine group 2 names layer 5, but 5 layers are registered \(0 to 4\)"):
        get_engine_group_indices(GROUPS, 5)


def test_block_ids_of_engine_groups_become_those_of_kernel_groups() -> None:
    assert expand_engine_block_ids(GROUPS, [[7, 8], [], [9]]) == [[7, 8], [9], [7, 8]]


def test_the_lists_are_copies() -> None:
    given = [[7, 8], [], [9]]
    found = expand_engine_block_ids(GROUPS, given)
    found[0].append(1)
    assert given == [[7, 8], [], [9]]
    assert found[2] == [7, 8]


@pytest.mark.parametrize(("flat", "lists"), [([7, 8], [[7, 8]]), ([], [[]]), ([[7, 8]], [[7, 8]]), ([[]], [[]])])
def test_one_flat_list_is_that_of_the_only_group(flat: Any, lists: list[list[int]]) -> None:
    assert expand_engine_block_ids((), flat) == lists
    assert expand_engine_block_ids([EngineGroupInfo(0, (0,))] * 2, flat) == lists * 2


@pytest.mark.parametrize("ids", [[[7], [8]], [7, 8], []])
def test_a_group_without_a_list_is_refused(ids: Any) -> None:
    with pytest.raises(IndexError, match=r"engine group 2 has no block ids: lists were given for \d engine groups"):
        expand_engine_block_ids(GROUPS, ids)


class TestDifferences:
    """What LMCache takes; see docs/differences.md."""

    def test_12_negative_ids_layers_and_counts(self) -> None:
        with pytest.raises(ValueError, match="engine_group_id -1 is negative; count groups from 0"):
            EngineGroupInfo(-1)
        with pytest.raises(ValueError, match=r"engine group 2 names layers \[-3, -1\]; count layers from 0"):
            EngineGroupInfo(2, (-3, 0, -1))
        with pytest.raises(ValueError, match="num_registered_layers is -1; it cannot be negative"):
            get_engine_group_indices(GROUPS, -1)

    def test_12_but_negative_tokens_per_block_are_not_reported(self) -> None:
        assert EngineGroupInfo(0, tokens_per_block=-7).tokens_per_block == -7

    @pytest.mark.parametrize("window", [0, -2, -128])
    def test_15_windows_of_no_tokens(self, window: int) -> None:
        with pytest.raises(ValueError, match=f"has a sliding window of {window} tokens; give -1 for full attention"):
            EngineGroupInfo(0, sw_size_tokens=window)
