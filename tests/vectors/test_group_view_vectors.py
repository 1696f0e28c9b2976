"""Engine groups and lists of block ids, as LMCache 0.5.6 computes on them."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvshm import layout
from kvshm.formats import EngineKVFormat
from kvshm.layout import EngineGroupInfo, KVLayerGroupsManager, ObjectGroupInfo, downsample_block_ids
from kvshm.spec import ArraySpec
from tests.support.vectors import attempt, each, is_error, load, same

# An iteration in batches, which kvshm does not have.
CASES = [case for case in load("group_view") if case["fn"] != "batched_iteration_with_skip"]


class Mended(NamedTuple):
    """An error where LMCache gives a value; see docs/differences.md."""

    number: int  # of the difference
    error: str


_MENDED_IDS = (
    (12, r"engine_group_id -\d is negative", (110, 111, *range(113, 127), 130, 131, *range(133, 137))),
    (12, r"token range \[-128, 128\) must not be negative", (156,)),
    (12, "engine group 0 has blocks of -64 tokens", (157,)),
    (12, "blocks_to_skip -3 must not be negative", (211,)),
    (12, "num_chunks -1 and .* must not be negative", (232,)),
    (11, "block ids came for 2 kernel groups, but there are 1", (176,)),
    (15, "give -1 for full attention, else a positive number", (178, 179, 180)),
    (14, r"has \d block ids; \d chunks of \d blocks take \d", (225, 226, 234, 235, 236)),
)
MENDED = {f"group_view-{case:04}": Mended(number, error) for number, error, cases in _MENDED_IDS for case in cases}


def downsampled(given: dict[str, Any]) -> list[list[int]]:
    groups = given["groups"]
    # Layers of different widths, so that each is a kernel group.
    layers = [
        ArraySpec.dense((7, group["slots_per_block"], 5 + index), np.dtype("uint8"))
        for index, group in enumerate(groups)
    ]
    infos = [
        EngineGroupInfo(index, (index,), group["tokens_per_block"], group["sw_size_tokens"])
        for index, group in enumerate(groups)
    ]
    formats = [EngineKVFormat.NL_X_NB_BS_HS] * len(groups)
    manager = KVLayerGroupsManager(layers, formats, infos, given["lmcache_tokens_per_chunk"])
    if given["full_sw_kv"]:
        manager.enable_full_sw_kv()
    given_ids = [list(ids) for ids in given["block_ids"]]
    found = downsample_block_ids(manager, given["block_ids"])
    assert given["block_ids"] == given_ids, "the lists that came are left alone"
    return found


def computed(function: str, given: dict[str, Any]) -> Any:
    if function == "downsample_and_stage_block_ids":
        return downsampled(given)
    arguments = dict(given)
    if "groups" in arguments:
        arguments["groups"] = [EngineGroupInfo(**group) for group in arguments["groups"]]
    if "object_groups" in arguments:
        arguments["object_groups"] = [ObjectGroupInfo(tuple(group)) for group in arguments["object_groups"]]
    if "allocated_block_ids" in arguments:
        arguments["allocated_block_ids"] = {group: ids for group, ids in arguments["allocated_block_ids"]}  # noqa: C416
    return getattr(layout, function)(**arguments)


@each(CASES)
def test_case(case: dict[str, Any]) -> None:
    found, recorded = attempt(computed, case["fn"], case["input"]), case["output"]
    mended = MENDED.get(case["id"])
    if mended is not None:
        assert not is_error(recorded), "no difference any more"
        assert is_error(found), case["why"]
        assert re.search(mended.error, found["message"])
    elif case["fn"] == "downsample_and_stage_block_ids" and not is_error(recorded):
        assert found == recorded["block_ids"] == recorded["staged"], case["why"]
    else:
        assert same(found, recorded), (case["why"], found)


def test_every_mended_case_exists() -> None:
    assert set(MENDED) <= {case["id"] for case in CASES}


@pytest.mark.parametrize("number", [11, 12, 14, 15])
def test_these_differences_are_shown(number: int) -> None:
    assert number in {mended.number for mended in MENDED.values()}
