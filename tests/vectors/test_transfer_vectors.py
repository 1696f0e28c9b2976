"""Transfers byte for byte as a real LMCache makes them.

Each case is one line of ``transfer.jsonl.gz``. Cases *via context* go through a registered cache; the others are single
calls of LMCache's copy operation with one format, and go through the copy kernels. Storages hold a formula's bytes, and
so do the chunks of a scatter.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvshm.context import CPUCacheContext
from kvshm.copying import Piece, Stack, choose_way, gather, plane_of, scatter, stacks_of
from kvshm.dtypes import as_dtype
from kvshm.formats import EngineKVFormat, geometry
from kvshm.layout import EngineGroupInfo
from kvshm.spec import ArraySpec
from kvshm.transfer import gather_chunks, object_group_nbytes, scatter_chunks
from tests.support.transfer_oracle import slow_gather, slow_scatter

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

with gzip.open(Path(__file__).with_name("transfer.jsonl.gz"), "rt", encoding="utf-8") as _lines:
    CASES = [json.loads(line) for line in _lines]

# LMCache has no such transfer; kvshm has, see the tests of what comes back.
NOT_IMPLEMENTED = {"padded blocks cannot be given by pointer", "dtype without a scatter kernel"}
# What LMCache's batches allow and forbid; kvshm has no batches.
BATCHES = {"batch of no objects", "batch index out of range"}
# Its buffer of an object spans the groups between the object's own, so that no object fits.
SPANNED = {"object of two groups with another between"}
# LMCache goes on with the ids that came.
COUNTS = {"fewer block ids than chunks", "no objects at all"}


def via(way: str, direction: str) -> pytest.MarkDecorator:
    chosen = [
        case
        for case in CASES
        if (case["input"]["via"] == "context") == (way == "context") and case["input"]["direction"] == direction
    ]
    assert chosen
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case["id"])


def formula(nbytes: int, number: int) -> Bytes:
    """The bytes of storage (or chunk) ``number``."""
    at = np.arange(nbytes, dtype=np.int64)
    return (((at * 2654435761 + number * 40503) >> 7) & 0xFF).astype(np.uint8)


def digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


class Storages:
    """The storages of a case one after the other in one buffer, and its arrays as specs there."""

    def __init__(self, tree: Any) -> None:
        nbytes: dict[int, int] = {}
        for leaf in leaves(tree):
            size = leaf["storage_elems"] * as_dtype(leaf["dtype"]).itemsize
            nbytes[leaf["storage"]] = max(size, nbytes.get(leaf["storage"], 0))
        self.ranges: dict[int, slice] = {}
        end = 0
        for number, size in nbytes.items():
            start = -(-end // 16) * 16
            self.ranges[number] = slice(start, end := start + size)
        self.buffer: Bytes = np.zeros(end, dtype=np.uint8)
        for number, where in self.ranges.items():
            self.buffer[where] = formula(nbytes[number], number)

    def specs(self, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return [self.specs(item) for item in tree]
        dtype = as_dtype(tree["dtype"])
        start = self.ranges[tree["storage"]].start // dtype.itemsize
        return ArraySpec(tuple(tree["shape"]), tuple(tree["stride"]), tree["offset"] + start, dtype)

    def arrays(self, tree: Any) -> Any:
        specs = self.specs(tree)
        return views(specs, self.buffer)

    def digests(self, memory: Any) -> dict[str, str]:
        return {str(number): digest(memory[where]) for number, where in self.ranges.items()}


def leaves(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield tree
    else:
        for item in tree:
            yield from leaves(item)


def views(specs: Any, buffer: Bytes) -> Any:
    return specs.view(buffer) if isinstance(specs, ArraySpec) else [views(item, buffer) for item in specs]


# Through a registered cache


def register(case: dict[str, Any]) -> tuple[CPUCacheContext, Storages]:
    given = case["input"]
    storages = Storages(given["caches"])
    infos = [
        EngineGroupInfo(**{**info, "layer_indices": tuple(info["layer_indices"])})
        for info in given["engine_group_infos"]
    ]
    context = CPUCacheContext(
        storages.arrays(given["caches"]),
        given["lmcache_tokens_per_chunk"],
        given["hints"],
        infos,
        given["engine"],
        given["separate_object_groups"],
        given["full_sw_kv"],
    )
    return context, storages


def refuses(case: dict[str, Any]) -> bool:
    """Whether kvshm has to refuse this."""
    error = case["output"].get("message") if "error" in case["output"] else None
    if case["why"] in COUNTS:
        return True
    if case["why"] in {"object too large", "object too small"}:
        return False  # of LMCache's making: a case here cannot say what size its objects have
    return error is not None and error not in NOT_IMPLEMENTED | BATCHES and case["why"] not in SPANNED


def normalised_specs(context: CPUCacheContext, buffer: Bytes) -> Any:
    """The arrays of a context as specs in the buffer that they are in."""
    start = buffer.__array_interface__["data"][0]

    def spec(node: Any) -> Any:
        if not isinstance(node, np.ndarray):
            return [spec(item) for item in node]
        found = ArraySpec.of(node)
        offset = (node.__array_interface__["data"][0] - start) // node.dtype.itemsize
        return ArraySpec(found.shape, found.stride, offset, found.dtype)

    return spec(context.kv_tensors)


def transferred(case: dict[str, Any], data: Bytes) -> bytes:
    """Of an object as LMCache lays it out, the bytes that are transferred: kvshm's objects are those alone."""
    return b"".join(
        data[region["offset"] : region["offset"] + region["transferred"]].tobytes()
        for region in case["output"]["regions"]
    )


@via("context", "gather")
def test_gather_through_a_context(case: dict[str, Any]) -> None:
    given, output = case["input"], case["output"]
    if refuses(case):
        with pytest.raises((ValueError, IndexError), match=r"."):
            run_gather(case)
        return
    context, storages, chunks = run_gather(case)
    before = storages.buffer.tobytes()
    specs, manager = normalised_specs(context, storages.buffer), context.kv_layer_groups_manager
    for index, chunk in enumerate(chunks):
        if chunk is None:
            continue
        assert chunk.tobytes() == slow_gather(before, specs, manager, given["block_ids"], index, given["object_group"])
        expected = output.get("objects", [None] * len(chunks))[index]
        if expected is None or "one object missing" in case["why"] or given["skip_first_n_tokens"]:
            continue  # LMCache drops the whole batch of a missing object, and can skip tokens here too
        if "transferred_sha256" in expected:
            digests = [digest(part) for part in regions(case, chunk)]
            assert digests == expected["transferred_sha256"]
        else:
            assert digest(chunk) == expected["sha256"]


def regions(case: dict[str, Any], chunk: Bytes) -> Iterator[Bytes]:
    start = 0
    for region in case["output"]["regions"]:
        yield chunk[start : start + region["transferred"]]
        start += region["transferred"]


def run_gather(case: dict[str, Any]) -> tuple[CPUCacheContext, Storages, list[Bytes | None]]:
    given = case["input"]
    context, storages = register(case)
    nbytes = object_group_nbytes(context, given["object_group"])
    chunks: list[Bytes | None] = [np.zeros(nbytes, dtype=np.uint8) if there else None for there in given["objects"]]
    gather_chunks(context, given["block_ids"], chunks, given["object_group"])
    return context, storages, chunks


@via("context", "scatter")
def test_scatter_through_a_context(case: dict[str, Any]) -> None:
    given, output = case["input"], case["output"]
    if refuses(case):
        with pytest.raises((ValueError, IndexError), match=r"."):
            run_scatter(case)
        return
    before, context, storages, chunks = run_scatter(case)
    specs, manager = normalised_specs(context, storages.buffer), context.kv_layer_groups_manager
    arguments = (before, specs, manager, given["block_ids"], chunks, given["object_group"])
    skip = given["skip_first_n_tokens"]
    assert storages.buffer.tobytes() == slow_scatter(*arguments, skip)
    if "storages" in output and "missing" not in case["why"]:
        # LMCache protects whole blocks only, which is where kvshm differs.
        as_lmcache = slow_scatter(*arguments, skip, rounded=True)
        expected = {number: storage["sha256"] for number, storage in output["storages"].items()}
        assert storages.digests(as_lmcache) == expected


def run_scatter(case: dict[str, Any]) -> tuple[bytes, CPUCacheContext, Storages, list[bytes | None]]:
    given = case["input"]
    context, storages = register(case)
    before = storages.buffer.tobytes()
    nbytes = case["output"].get("object_nbytes") or object_group_nbytes(context, given["object_group"])
    chunks: list[bytes | None] = []
    for index, there in enumerate(given["objects"]):
        data = formula(nbytes, 1000 + index)
        whole = transferred(case, data) if "regions" in case["output"] else data.tobytes()
        chunks.append(whole if there else None)
    scatter_chunks(context, given["block_ids"], chunks, given["object_group"], given["skip_first_n_tokens"])
    return before, context, storages, chunks


# Single calls of the copy operation


def kernel_planes(case: dict[str, Any], storages: Storages) -> list[Any]:
    """The planes of a call in chunk order, from arrays whose format is told."""
    given = case["input"]
    format = EngineKVFormat[given["format"]]
    caches = storages.arrays(given["caches"])
    desc, num_slots = given["shape_desc"], given["slots_per_chunk"]
    if format.is_pbs_fused:
        # Blocks and slots are one axis; the call says how many slots a block has.
        bs = desc["bs"]
        caches = unfolded(caches, bs, "ONE" in format.axes)
        format = EngineKVFormat.TWO_X_NL_X_NB_BS_NH_HS if desc["kv_size"] == 2 else EngineKVFormat.NL_X_NB_BS_HS
    read = geometry(caches, format)
    row_nbytes = desc["nh"] * desc["hs"] * desc["element_size"]
    planes = []
    for kv in range(desc["kv_size"]):
        for layer in range(desc["nl"]):
            offset = (kv * desc["nl"] + layer) * num_slots * row_nbytes
            found: Sequence[Any] = read.planes(layer)
            for paged in found[kv : kv + 1] if desc["kv_size"] == 2 else found:
                planes.append(plane_of(paged, offset, row_nbytes))
                offset += paged.shape[2] * paged.shape[3] * paged.dtype.itemsize
    return planes


def unfolded(tree: Any, block_size: int, has_one: bool) -> Any:
    if not isinstance(tree, np.ndarray):
        return [unfolded(item, block_size, has_one) for item in tree]
    rows = tree[:, 0] if has_one else tree
    return rows.reshape(-1, block_size, *rows.shape[1:])


@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_the_copy_operation(direction: str) -> None:
    count = 0
    for case in CASES:
        given, output = case["input"], case["output"]
        if given["via"] == "context" or given["direction"] != direction:
            continue
        if "error" in output and output["message"] not in NOT_IMPLEMENTED:
            continue  # what a call refuses, gather_chunks and scatter_chunks refuse
        bs, num_slots, num_chunks = given["shape_desc"]["bs"], given["slots_per_chunk"], given["num_chunks"]
        per_chunk = num_slots // bs
        if len(given["block_ids"]) != per_chunk * num_chunks:
            continue  # refused, too
        count += 1
        storages = Storages(given["caches"])
        stacks = stacks_of(kernel_planes(case, storages), per_chunk)
        nbytes = sum(len(stack.planes) * stack.chunk_nbytes for stack in stacks)
        chunks = [
            np.zeros(nbytes, dtype=np.uint8) if direction == "gather" else formula(nbytes, 1000 + index)
            for index in range(num_chunks)
        ]
        for index, chunk in enumerate(chunks):
            ids = np.array(given["block_ids"][index * per_chunk : (index + 1) * per_chunk])
            skipped = min(per_chunk, max(0, given["skip_prefix_n_blocks"] - index * per_chunk))
            piece = Piece(chunk, ids[skipped:], skipped)
            for stack in stacks:
                ways = [choose_way(stack.order, piece.block_ids)]
                if direction == "gather":
                    gather(stack, range(len(stack.planes)), [piece], ways)
                else:
                    scatter(stack, range(len(stack.planes)), [piece], ways, shared=False)
        if "error" in output:
            assert came_back(stacks, chunks, given["block_ids"]), case["id"]
        elif direction == "gather":
            assert [digest(chunk) for chunk in chunks] == [item["sha256"] for item in output["objects"]], case["id"]
        else:
            expected = {number: storage["sha256"] for number, storage in output["storages"].items()}
            assert storages.digests(storages.buffer) == expected, case["id"]
    assert count > 70


def came_back(stacks: list[Stack], chunks: list[Bytes], block_ids: list[int]) -> bool:
    """Whether gathering gives what was scattered."""
    per_chunk = len(block_ids) // len(chunks)
    for index, chunk in enumerate(chunks):
        again = np.zeros_like(chunk)
        piece = Piece(again, np.array(block_ids[index * per_chunk : (index + 1) * per_chunk]))
        for stack in stacks:
            gather(stack, range(len(stack.planes)), [piece], [choose_way(stack.order, piece.block_ids)])
        if again.tobytes() != chunk.tobytes():
            return False
    return True
