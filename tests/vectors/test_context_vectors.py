"""Registrations as LMCache 0.5.6 lays them out.

``output`` is what its CPU context exposes. Where that context cannot take a structure, or lays chunk objects out
otherwise than its accelerators' contexts do, ``device_layout`` is what is owed.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvshm.context import CPUCacheContext
from kvshm.dtypes import dtype_name
from kvshm.layout import EngineGroupInfo, KernelGroupInfo
from tests.support.vectors import Storages, attempt, each, is_error, load, same

CASES = load("context")


class Mended(NamedTuple):
    """What kvshm does on purpose where LMCache does otherwise; see docs/differences.md."""

    number: int  # of the difference
    error: str | None = None  # what the error says; None: kvshm takes what LMCache cannot, or lays it out otherwise


_ALIKE = "layers of one group share block ids and strides"
_WINDOW = "give -1 for full attention, else a positive number"

MENDED = {
    "context-0036": Mended(17),
    "context-0037": Mended(17),
    "context-0038": Mended(17),
    "context-0043": Mended(17),
    "context-0044": Mended(17),
    "context-0045": Mended(17),
    "context-0052": Mended(17),
    "context-0053": Mended(17),
    "context-0054": Mended(17),
    "context-0055": Mended(17),
    "context-0063": Mended(4),
    "context-0067": Mended(6, _ALIKE),
    "context-0068": Mended(6, _ALIKE),
    "context-0069": Mended(6, _ALIKE),
    "context-0075": Mended(9),
    "context-0100": Mended(15, _WINDOW),
    "context-0101": Mended(15, _WINDOW),
    "context-0102": Mended(7),
    "context-0104": Mended(8),
    "context-0116": Mended(7),
    "context-0118": Mended(8),
    "context-0119": Mended(8),
    "context-0120": Mended(8),
    "context-0139": Mended(15, "lmcache_tokens_per_chunk is 0; a chunk has at least one token"),
    "context-0143": Mended(8),
    "context-0146": Mended(8),
    "context-0153": Mended(7),
    "context-0157": Mended(8),
}

NO_SHAPE_TEXT = ("NL_X_NB_NH_BS_CS", "NL_X_NB_BS_NH_CS", "NL_X_NB_BSV_BSS")
DESC = ("kv_size", "nl", "nb", "bs", "nh", "hs", "element_size", "block_stride_elems")
OF_GROUP = (
    "tokens_per_block",
    "slots_per_block",
    "engine_group_idx",
    "sw_size_tokens",
    "extra_object_group_tag",
    "recurrent_state",
    "hidden_dim_size",
)


class Registered:
    """A case's storages and the context of them, or the error."""

    def __init__(self, case: dict[str, Any]) -> None:
        given = case["input"]
        self.storages = Storages(given["caches"])
        self.found: CPUCacheContext | dict[str, str] = attempt(
            lambda: CPUCacheContext(
                self.storages.arrays,
                given["lmcache_tokens_per_chunk"],
                given["hints"],
                [EngineGroupInfo(**info) for info in given["engine_group_infos"]],
                given["engine"],
                given["separate_object_groups"],
                given["full_sw_kv"],
            )
        )

    @property
    def context(self) -> CPUCacheContext:
        assert isinstance(self.found, CPUCacheContext), self.found
        return self.found

    def offsets(self, pointers: Any) -> list[int | None]:
        """Byte offsets in their storages of addresses."""
        places = [self.storages.place(int(pointer)) for pointer in pointers]
        return [place and place[1] for place in places]

    def staged(self, view: np.ndarray[Any, Any]) -> dict[str, Any]:
        """A view of the staging buffer in the notation of the vectors."""
        start = self.context.get_tmp_gpu_buffer_flat(0).ctypes.data
        return {
            "offset": view.ctypes.data - start,
            "nbytes": view.nbytes,
            "shape": list(view.shape),
            "dtype": dtype_name(view.dtype),
        }

    def kernel_group(self, index: int, group: KernelGroupInfo) -> dict[str, Any]:
        assert group.format is not None
        return {
            "layer_indices": list(group.layer_indices),
            "shape_desc": {size: getattr(group.shape_desc, size) for size in DESC},
            "dtype": dtype_name(group.dtype),
            "format": group.format.name,
            **{size: getattr(group, size) for size in OF_GROUP},
            "slots_per_chunk_in_sw": self.context.get_slots_per_chunk_in_sw(index),
            "subchunk_sw_size_tokens": self.context.kv_layer_groups_manager.get_subchunk_sw_size_tokens(index),
            "kv_pointers": self.offsets(self.context.get_group_kv_pointers(index)),
        }


def is_refused(case: dict[str, Any]) -> bool:
    """kvshm owes an error."""
    mended = MENDED.get(case["id"])
    return is_error(case["output"]) if mended is None else mended.error is not None


def laid_out(case: dict[str, Any]) -> dict[str, Any]:
    """What is recorded of the groups; where the CPU context fails, by the device layout."""
    recorded = (case["output"], case.get("device_layout", {"error": ""}), case.get("device_layout_shimmed"))
    return next(layout for layout in recorded if layout is not None and not is_error(layout))


# Of a K/V list whose layers differ in dtype, and of a single padded block, LMCache records nothing but its error.
NOT_LAID_OUT = {"context-0038", "context-0063"}


def check_refused(case: dict[str, Any], of_case: Registered) -> None:
    found = of_case.found
    assert is_error(found), case["why"]
    mended = MENDED.get(case["id"])
    if mended is None:
        return
    assert not is_error(case["output"]), "no difference any more"
    assert isinstance(found, dict)
    assert mended.error is not None
    assert re.search(mended.error, found["message"])


def check_taken_where_the_original_cannot(case: dict[str, Any], of_case: Registered) -> None:
    assert MENDED[case["id"]].number in (4, 17)
    context = of_case.context
    for index, group in enumerate(context.kv_layer_groups_manager.kernel_groups):
        per_layer = 2 if group.shape_desc.kv_size == 2 else len(context.kernel_group_planes(index)) // group.num_layers
        assert len(context.kernel_group_planes(index)) == group.num_layers * per_layer


def check_groups(case: dict[str, Any], of_case: Registered) -> None:
    recorded = laid_out(case)
    manager = of_case.context.kv_layer_groups_manager
    for index, (group, wanted) in enumerate(zip(manager.kernel_groups, recorded["kernel_groups"], strict=True)):
        pointers = [pointer and pointer[1] for pointer in wanted["kv_pointers"]]
        assert of_case.kernel_group(index, group) == wanted | {"kv_pointers": pointers}
    found = [
        {
            "kernel_group_indices": list(group.kernel_group_indices),
            "sw_size_chunks": group.sw_size_chunks,
            "aux": group.aux,
            "recurrent": group.recurrent,
        }
        for group in manager.object_groups
    ]
    assert found == recorded["object_groups"]
    windows = manager.get_attn_desc()
    assert {
        "num_chunks_in_sw": list(windows.num_chunks_in_sw),
        "group_kinds": list(windows.group_kinds),
        "world_size": windows.world_size,
    } == recorded["attn_desc"]


def check_sizes(case: dict[str, Any], of_case: Registered) -> None:
    recorded = case["output"]
    context = of_case.context
    for size in ("num_layers", "num_blocks", "block_size", "group_slots_per_blocks", "hidden_dim_sizes"):
        assert getattr(context, size) == recorded[size], size
    assert context.max_batch_size == recorded["max_batch_size"]
    assert same(attempt(context.cache_size_per_token), recorded["cache_size_per_token"])
    formats = [format and format.name for format in context.engine_kv_format_per_layer()]
    assert formats == recorded["formats_per_layer"]
    pointers = [pointer and pointer[1] for pointer in recorded["kv_pointers"]]
    assert of_case.offsets(context.kv_pointers) == pointers


def check_report(case: dict[str, Any], of_case: Registered) -> None:
    found, recorded = of_case.context.report_status(), case["output"]["report_status"]
    for group, wanted in zip(found["kernel_groups"], recorded["kernel_groups"], strict=True):
        assert wanted["dtype"] == f"torch.{group['dtype']}"
        wanted["dtype"] = group["dtype"]
        if group["engine_kv_format"] in NO_SHAPE_TEXT:
            assert wanted["engine_kv_concrete_shape"].startswith("Unknown")
            wanted["engine_kv_concrete_shape"] = group["engine_kv_concrete_shape"]
    assert found == recorded


def check_counts_of_tokens(case: dict[str, Any], of_case: Registered) -> None:
    context = of_case.context
    for recorded in case["output"]["token_counts"]:
        tokens = recorded["num_tokens"]
        for group, blocks in enumerate(recorded["blocks_for_tokens"]):
            assert same(attempt(context.blocks_for_tokens, tokens, group), blocks)
        for group, blocks in enumerate(recorded["calculate_num_blocks"]):
            assert same(attempt(context.calculate_num_blocks, tokens, group), blocks)
        for group, shape in enumerate(recorded["kv_buffer_shape"]):
            found: Any = attempt(context.get_kv_buffer_shape, tokens, group)
            assert same(found if is_error(found) else list(found), shape)
        for group, wanted in enumerate(recorded["kernel_group_shape_dtype"]):
            found = attempt(context.get_kernel_group_shape_dtype, tokens, group)
            if not is_error(found):
                found = {"shape": list(found[0]), "dtype": dtype_name(found[1])}
            assert same(found, wanted)


def check_staging_buffer(case: dict[str, Any], of_case: Registered) -> None:
    """The views lie in the order of the object groups; where that is 0, 1, 2 ..., they are LMCache's own."""
    recorded = case["output"]["temp"]
    context = of_case.context
    number = MENDED[case["id"]].number if case["id"] in MENDED else None
    order = [index for group in case["output"]["object_groups"] for index in group["kernel_group_indices"]]
    assert (number == 8) == (order != sorted(order))
    mended = 0
    for row, batch in enumerate(recorded["batch_indices"]):
        views = [
            *(
                (context.get_temp_kernel_group_buffer, group, view)
                for group, view in enumerate(recorded["kernel_group"][row])
            ),
            *(
                (context.get_temp_object_group_buffer, group, view)
                for group, view in enumerate(recorded["object_group"][row])
            ),
        ]
        for function, group, wanted in views:
            found: Any = attempt(function, batch, group)
            if not is_error(found):
                found = of_case.staged(found)
            if batch < 0:  # sliced from the end there
                assert is_error(found)
            elif number == 8:
                mended += found != wanted
                assert is_error(found) == is_error(wanted)
            elif number == 9 and is_error(wanted) and not is_error(found):
                mended += 1
            else:
                assert same(found, wanted)
        flat: Any = attempt(context.get_tmp_gpu_buffer_flat, batch)
        wanted = recorded["chunk_flat"][row]
        assert is_error(flat) if batch < 0 else same(flat if is_error(flat) else of_case.staged(flat), wanted)
    assert (mended > 0) == (number in (8, 9)), "no difference any more"
    for group, wanted in enumerate(recorded["chunk_typed"]):
        assert of_case.staged(context.get_tmp_chunk_gpu_buffer(group)) == of_case.staged(
            context.get_temp_kernel_group_buffer(0, group)
        )
        if number is None:
            assert of_case.staged(context.get_tmp_chunk_gpu_buffer(group)) == wanted


def check_object_groups_are_ranges_of_the_staging_buffer(case: dict[str, Any], of_case: Registered) -> None:
    """An independent sum: whole chunks of the kernel groups, one after the other in the order of the object groups."""
    recorded = case["output"]
    context = of_case.context
    chunk = case["input"]["lmcache_tokens_per_chunk"]
    end = 0
    for index, object_group in enumerate(recorded["object_groups"]):
        start = end
        for group in object_group["kernel_group_indices"]:
            of_group = recorded["kernel_groups"][group]
            slots = chunk * of_group["slots_per_block"] // of_group["tokens_per_block"]
            desc = of_group["shape_desc"]
            nbytes = desc["kv_size"] * desc["nl"] * slots * of_group["hidden_dim_size"] * desc["element_size"]
            if nbytes:
                view = of_case.staged(context.get_temp_kernel_group_buffer(1, group))
                assert (view["offset"] - recorded["tmp_chunk_bytes"], view["nbytes"]) == (end, nbytes)
            end += nbytes
        if end > start:
            view = of_case.staged(context.get_temp_object_group_buffer(1, index))
            assert (view["offset"] - recorded["tmp_chunk_bytes"], view["nbytes"]) == (start, end - start)
    assert context.get_tmp_gpu_buffer_flat(0).nbytes == end == recorded["tmp_chunk_bytes"]


def check_batched_views(case: dict[str, Any], of_case: Registered) -> None:
    number = MENDED[case["id"]].number if case["id"] in MENDED else None
    for recorded in case["output"]["temp"]["batched"]:
        for group, wanted in enumerate(recorded["views"]):
            found: Any = attempt(of_case.context.get_tmp_chunk_gpu_buffer_batched, recorded["batch_size"], group)
            if number in (8, 9):
                assert is_error(found) or len(found) == recorded["batch_size"]
                continue
            if not is_error(found):
                views = [of_case.staged(view) for view in found]
                found = [[view["offset"], view["nbytes"]] for view in views]
            assert same(found, wanted)


def check_chunk_objects(case: dict[str, Any], of_case: Registered) -> None:
    """An object holds the window only: offsets and sizes are those of the device layout."""
    context = of_case.context
    manager = context.kv_layer_groups_manager
    recorded = case.get("device_layout_shimmed") or case.get("device_layout") or {"error": ""}
    differs = False
    if not is_error(case["output"]):
        for object_group, offsets in enumerate(case["output"]["offset_in_object"]):
            for group, offset in enumerate(offsets):
                differs |= not same(attempt(context.get_kernel_group_offset_in_object, object_group, group), offset)
        assert differs == (MENDED.get(case["id"], Mended(0)).number == 7), "a difference that is not listed, or none"
    if is_error(recorded):
        assert not differs
        return
    views = recorded["temp"]
    for index, object_group in enumerate(recorded["object_groups"]):
        whole = views["object_group"][0][index]
        assert manager.object_nbytes(index) == whole["nbytes"]
        for group in object_group["kernel_group_indices"]:
            view = views["kernel_group"][0][group]
            if not is_error(view):
                found = context.get_kernel_group_offset_in_object(index, group)
                assert found == view["offset"] - whole["offset"]


def check_block_ids_are_staged(case: dict[str, Any], of_case: Registered) -> None:
    context = of_case.context
    for row in case.get("stage_block_ids", ()):
        ids = [[item["id"]] * item["count"] if isinstance(item, dict) else item for item in row["input"]]
        found: Any = attempt(context.stage_block_ids, ids)
        assert is_error(found) == is_error(row["output"])
        if is_error(found):
            continue
        assert all(view.dtype == np.int64 for view in found)
        counts = row["output"] if isinstance(row["output"], list) else [count for _, count in row["output"]["ranges"]]
        assert [len(view) for view in found] == counts
        if isinstance(row["output"], dict):
            assert [view.tolist() for view in found] == row["output"]["values"]


@each(CASES)
def test_case(case: dict[str, Any]) -> None:
    of_case = Registered(case)
    if is_refused(case):
        check_refused(case, of_case)
        return
    if case["id"] not in NOT_LAID_OUT:
        check_groups(case, of_case)
        check_chunk_objects(case, of_case)
        check_block_ids_are_staged(case, of_case)
    if is_error(case["output"]):
        check_taken_where_the_original_cannot(case, of_case)
        return
    check_sizes(case, of_case)
    check_report(case, of_case)
    check_counts_of_tokens(case, of_case)
    check_staging_buffer(case, of_case)
    check_object_groups_are_ranges_of_the_staging_buffer(case, of_case)
    check_batched_views(case, of_case)


def test_every_mended_case_exists() -> None:
    assert set(MENDED) <= {case["id"] for case in CASES}


@pytest.mark.parametrize("number", [4, 6, 7, 8, 9, 15, 17])
def test_these_differences_are_shown(number: int) -> None:
    assert number in {mended.number for mended in MENDED.values()}
