"""Chunks in and out of a registered cache: what is checked, what moves, and what does not."""

from __future__ import annotations

import array
import gc
import mmap
import resource
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvshm
from kvshm import copying, threads, transfer
from kvshm.context import CPUCacheContext
from kvshm.layout import EngineGroupInfo
from kvshm.transfer import gather_chunks, object_group_nbytes, scatter_chunks

NB, BS, NH, HS = 23, 3, 5, 7
TOKENS = 6  # of a chunk: two blocks
SLOT_NBYTES = NH * HS * 2
CHUNK_NBYTES = 2 * 2 * TOKENS * SLOT_NBYTES  # 1680: two layers, K and V
IDS = [11, 2, 0, 19, 7, 22]


def layers(count: int = 2) -> list[np.ndarray[Any, Any]]:
    bits = np.random.default_rng(5).integers(0, 2**16, (count, 2, NB, BS, NH, HS), dtype=np.uint16)
    return list(bits.view(ml_dtypes.bfloat16))


@pytest.fixture
def cache() -> list[np.ndarray[Any, Any]]:
    return layers()


@pytest.fixture
def context(cache: list[np.ndarray[Any, Any]]) -> CPUCacheContext:
    return CPUCacheContext(cache, TOKENS, {"kv_layout": "NHD"})


def expected_chunk(cache: Sequence[np.ndarray[Any, Any]], ids: Sequence[int]) -> bytes:
    return b"".join(layer[kv, ids].tobytes() for kv in range(2) for layer in cache)


def content(cache: Sequence[np.ndarray[Any, Any]]) -> bytes:
    return b"".join(layer.tobytes() for layer in cache)


def windowed(cache: Sequence[np.ndarray[Any, Any]], window: int, *, separate: bool = True) -> CPUCacheContext:
    """A first layer with full attention, a second one with a sliding window of so many tokens."""
    infos = [EngineGroupInfo(0, (0,), BS), EngineGroupInfo(1, (1,), BS, window)]
    return CPUCacheContext(list(cache), TOKENS, {"kv_layout": "NHD"}, infos, separate_object_groups=separate)


# What moves


def test_there_and_back(context: CPUCacheContext, cache: list[np.ndarray[Any, Any]]) -> None:
    assert object_group_nbytes(context, 0) == CHUNK_NBYTES
    chunks = [bytearray(CHUNK_NBYTES) for _ in range(3)]
    gather_chunks(context, [IDS], chunks)
    for index, chunk in enumerate(chunks):
        assert bytes(chunk) == expected_chunk(cache, IDS[2 * index : 2 * index + 2])
    before = content(cache)
    others = [block for block in range(NB) if block not in IDS]
    for layer in cache:
        layer.view(np.uint16)[:, IDS] = 0
    scatter_chunks(context, [IDS], chunks)
    assert content(cache) == before
    scatter_chunks(context, [others[:2]], chunks[:1])
    assert expected_chunk(cache, others[:2]) == bytes(chunks[0])


def test_no_chunks_move_nothing(context: CPUCacheContext, cache: list[np.ndarray[Any, Any]]) -> None:
    before = content(cache)
    gather_chunks(context, [[]], [])
    scatter_chunks(context, [[]], [])
    assert content(cache) == before


@pytest.mark.parametrize(
    "ids",
    [np.array(IDS), np.array(IDS, np.uint8), np.array(IDS, np.uint64), np.array(IDS)[::-1][::-1], tuple(IDS)],
    ids=["int64", "uint8", "uint64", "strided", "tuple"],
)
def test_ids_come_as_lists_or_arrays_of_ints(context: CPUCacheContext, cache: Any, ids: Any) -> None:
    chunks = [bytearray(CHUNK_NBYTES) for _ in range(3)]
    gather_chunks(context, [ids], chunks)
    assert bytes(chunks[2]) == expected_chunk(cache, IDS[4:])


def test_ids_of_a_small_dtype_do_not_wrap_around() -> None:
    cache = np.random.default_rng(4).integers(0, 256, (200, 3, 2, BS, NH, HS), dtype=np.uint8)
    context = CPUCacheContext(cache, TOKENS, {"kv_layout": "NHD"})  # rows of one plane: 6 from block to block
    chunk = bytearray(object_group_nbytes(context, 0))
    gather_chunks(context, [np.array([199, 150], np.uint8)], [chunk])
    planes = [plane.paged for plane in context.kernel_group_planes(0)]
    assert bytes(chunk) == b"".join(plane[[199, 150]].tobytes() for plane in planes)


@pytest.mark.parametrize(
    "make",
    [
        bytearray,
        lambda n: memoryview(bytearray(n)),
        lambda n: mmap.mmap(-1, n),
        lambda n: array.array("B", bytes(n)),
        lambda n: np.zeros(n, np.uint8),
        lambda n: np.zeros((2, 2, TOKENS, NH * HS), ml_dtypes.bfloat16),
        lambda n: np.zeros(n // 4, ml_dtypes.float8_e5m2).repeat(4),
        lambda n: kvshm.zeros((n,), "uint8"),
    ],
    ids=["bytearray", "memoryview", "mmap", "array", "uint8", "bfloat16", "float8", "shared"],
)
def test_chunks_may_be_any_buffer(context: CPUCacheContext, cache: Any, make: Callable[[int], Any]) -> None:
    chunk = make(CHUNK_NBYTES)
    gather_chunks(context, [IDS[:2]], [chunk])
    data = chunk.tobytes() if isinstance(chunk, np.ndarray) else bytes(memoryview(chunk).cast("B"))
    assert data == expected_chunk(cache, IDS[:2])
    scatter_chunks(context, [[4, 5]], [chunk])
    assert expected_chunk(cache, [4, 5]) == data


def test_scatter_reads_what_cannot_be_written(context: CPUCacheContext, cache: Any) -> None:
    data = bytes(range(256)) * (CHUNK_NBYTES // 256 + 1)
    scatter_chunks(context, [[4, 5]], [data[:CHUNK_NBYTES]])
    assert expected_chunk(cache, [4, 5]) == data[:CHUNK_NBYTES]


def test_a_missing_chunk_is_skipped_alone(context: CPUCacheContext, cache: Any) -> None:
    first, last = bytearray(CHUNK_NBYTES), bytearray(CHUNK_NBYTES)
    gather_chunks(context, [[*IDS[:2], -1, 10**30, *IDS[4:]]], [first, None, last])
    assert (bytes(first), bytes(last)) == (expected_chunk(cache, IDS[:2]), expected_chunk(cache, IDS[4:]))


@pytest.mark.parametrize("skip", range(5))
def test_difference_24_index_pages_are_written_whole_or_not_at_all(skip: int) -> None:
    # A page of two tokens: all values, then all scales. Rows of 132 bytes are not tokens.
    pages = np.arange(3 * 2 * 132, dtype=np.uint8).reshape(3, 2, 132)
    before = pages.copy()
    context = CPUCacheContext([pages], 4, {"kv_layout": "NHD"})
    chunk = np.full(object_group_nbytes(context, 0), 0xA5, np.uint8)
    scatter_chunks(context, [[2, 1]], [chunk], skip_first_n_tokens=skip)
    for page, end in ((0, 0), (2, 2), (1, 4)):
        assert np.array_equal(pages[page], np.full((2, 132), 0xA5) if skip < end else before[page])


@pytest.mark.parametrize("skip", range(6))
def test_difference_24_recurrent_state_is_written_if_one_of_its_tokens_is(skip: int) -> None:
    attention = np.zeros((5, 1, 3), np.uint8)
    state = np.zeros((5, 1, 7), np.uint8)
    infos = [EngineGroupInfo(0, (0,), 1), EngineGroupInfo(1, (1,), 2, recurrent_state=True)]
    context = CPUCacheContext([attention, state], 4, {"kv_layout": "NHD"}, infos)
    for group in range(2):
        chunk = np.ones(object_group_nbytes(context, group), np.uint8)
        scatter_chunks(context, [[1, 2, 3, 4], [4, 2]], [chunk], group, skip)
    assert attention[:, 0, 0].tolist() == [0, *(int(skip <= token) for token in range(4))]
    assert state[:, 0, 0].tolist() == [0, 0, int(skip < 4), 0, int(skip < 2)]


def test_a_layout_never_changes_after_it_was_registered() -> None:
    context = windowed(layers(), BS)
    nbytes = object_group_nbytes(context, 1)
    with pytest.raises(ValueError, match=r"this layout is that of a context, .* with full_sw_kv=True instead"):
        context.kv_layer_groups_manager.enable_full_sw_kv()
    assert object_group_nbytes(context, 1) == nbytes
    gather_chunks(context, [IDS[:2], IDS[2:4]], [bytearray(nbytes)], 1)


@pytest.mark.parametrize("skip", range(3 * TOKENS + 2))
def test_protected_tokens_are_spared_exactly(context: CPUCacheContext, cache: Any, skip: int) -> None:
    before = [layer.copy() for layer in cache]
    chunks = [bytes([index + 1]) * CHUNK_NBYTES for index in range(3)]
    scatter_chunks(context, [IDS], chunks, 0, skip)
    for layer, old in zip(cache, before, strict=True):
        for token in range(3 * TOKENS):
            block, slot = IDS[token // BS], token % BS
            written = layer[:, block, slot].view(np.uint8)
            if token < skip:
                assert written.tobytes() == old[:, block, slot].tobytes()
            else:
                assert set(written.ravel().tolist()) == {token // TOKENS + 1}


def test_a_slot_with_one_protected_token_is_spared(cache: list[np.ndarray[Any, Any]]) -> None:
    infos = [EngineGroupInfo(0, (0, 1), 2 * BS)]  # two tokens a slot, a block a chunk
    context = CPUCacheContext(cache, TOKENS, {"kv_layout": "NHD"}, infos)
    for layer in cache:
        layer.view(np.uint16)[...] = 0
    nbytes = object_group_nbytes(context, 0)
    assert nbytes == CHUNK_NBYTES // 2
    scatter_chunks(context, [[9]], [b"\1" * nbytes], 0, 3)
    assert [slot.view(np.uint8).any() for slot in cache[0][0, 9]] == [False, False, True]


def test_a_window_below_a_chunk_keeps_its_last_blocks(cache: list[np.ndarray[Any, Any]]) -> None:
    context = windowed(cache, BS, separate=False)
    per_layer = CHUNK_NBYTES // 2
    assert object_group_nbytes(context, 0) == per_layer + per_layer // 2
    chunk = bytearray(object_group_nbytes(context, 0))
    gather_chunks(context, [IDS[:2], [-5, 8]], [chunk])
    assert bytes(chunk) == expected_chunk(cache[:1], IDS[:2]) + expected_chunk(cache[1:], [8])
    before = cache[1].copy()
    scatter_chunks(context, [[1, 3], [-5, 6]], [chunk], 0, BS + 1)
    assert cache[0][:, 3, 1:].tobytes() == slots_of(chunk[:per_layer], 1, 1)
    assert cache[1][:, 6, :1].tobytes() == before[:, 6, :1].tobytes()
    assert cache[1][:, 6, 1:].tobytes() == slots_of(chunk[per_layer:], 0, 1)


def slots_of(region: bytearray, block: int, first: int) -> bytes:
    """Slots of one block in the region of one layer, [kv, block, slot, byte]."""
    return np.frombuffer(region, np.uint8).reshape(2, -1, BS, SLOT_NBYTES)[:, block, first:].tobytes()


def test_only_the_chunks_in_the_window_are_written(cache: list[np.ndarray[Any, Any]]) -> None:
    context = windowed(cache, TOKENS + 1)  # two chunks
    before = content(cache)
    data = [None, *(bytes([index]) * object_group_nbytes(context, 1) for index in (1, 2))]
    scatter_chunks(context, [None, [-1, -1, *IDS[2:]]], data, 1)
    assert set(cache[1][:, IDS[2:4]].view(np.uint8).ravel().tolist()) == {1}
    assert set(cache[1][:, IDS[4:]].view(np.uint8).ravel().tolist()) == {2}
    others = [block for block in range(NB) if block not in IDS[2:]]
    old = np.frombuffer(before, np.uint8).reshape(2, 2, NB, -1)[1]
    assert cache[1][:, others].tobytes() == old[:, others].tobytes()


def test_the_last_of_several_writes_to_the_null_block_stays(cache: list[np.ndarray[Any, Any]]) -> None:
    for num_threads in (1, 2, 3):
        context = CPUCacheContext(cache, TOKENS, {"kv_layout": "NHD"})
        chunks = [bytes([index + 1]) * CHUNK_NBYTES for index in range(3)]
        scatter_chunks(context, [[0, 1, 0, 2, 0, 0]], chunks, 0, 0, 0, num_threads=num_threads)
        for layer in cache:
            assert set(layer[:, 0].view(np.uint8).ravel().tolist()) == {3}


def test_what_has_to_stay_in_order_is_one_job(context: CPUCacheContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BATCH_ROWS", 1)
    monkeypatch.setattr(transfer, "MIN_JOB_NBYTES", 1)
    jobs: list[int] = []
    original = transfer._jobs

    def counted(*arguments: Any) -> Any:
        for job in original(*arguments):
            jobs.append(1)
            yield job

    monkeypatch.setattr(transfer, "_jobs", counted)
    chunks = [bytes(CHUNK_NBYTES)] * 3
    num_stacks = len(context.plan(0).groups[0].stacks)
    scatter_chunks(context, [[0, 1, 0, 2, 0, 3]], chunks, 0, 0, 0, num_threads=2)
    assert len(jobs) == num_stacks
    scatter_chunks(context, [IDS], chunks, 0, 0, 0, num_threads=2)
    assert len(jobs) > 2 * num_stacks


# What is checked: a refused call changes nothing

GATHER, SCATTER = "gather", "scatter"
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("both", {"block_ids": [IDS[:-1]]}, ValueError, r"block_ids\[0\] holds 5 ids, but 3 chunks of 2 blocks take 6"),
    ("both", {"block_ids": [[*IDS, 1]]}, ValueError, r"holds 7 ids"),
    ("both", {"block_ids": []}, ValueError, r"block_ids holds 0 lists, but there are 1 kernel groups"),
    ("both", {"block_ids": [IDS, IDS]}, ValueError, r"block_ids holds 2 lists"),
    ("both", {"block_ids": [[IDS]]}, ValueError, r"no flat list of ints"),
    ("both", {"block_ids": [None]}, ValueError, r"no flat list of ints"),
    ("both", {"block_ids": [[*IDS[:5], NB]]}, ValueError, r"hold 23, but its cache has blocks \[0, 23\)"),
    ("both", {"block_ids": [[*IDS[:5], -1]]}, ValueError, r"hold -1"),
    ("both", {"block_ids": [[*IDS[:5], 10**30]]}, ValueError, r"hold 10{30}"),
    ("both", {"block_ids": [np.array([*IDS[:5], 2**64 - 1], np.uint64)]}, ValueError, r"hold 18446744073709551615"),
    ("both", {"block_ids": [[*IDS[:5], 1.0]]}, ValueError, r"hold 1.0, but its cache"),
    ("both", {"block_ids": [[*IDS[:5], None]]}, ValueError, r"hold None, but its cache"),
    ("both", {"block_ids": [[*IDS[:5], [3]]]}, ValueError, r"hold \[3\], but its cache"),
    ("both", {"object_group_idx": 1}, IndexError, r"object group 1 is outside \[0, 1\)"),
    ("both", {"object_group_idx": -1}, IndexError, r"object group -1"),
    ("both", {"chunk": bytearray(CHUNK_NBYTES - 1)}, ValueError, r"chunk 2 has 1679 bytes, but objects .* have 1680"),
    ("both", {"chunk": bytearray(CHUNK_NBYTES + 1)}, ValueError, r"chunk 2 has 1681 bytes"),
    ("both", {"chunk": "x" * CHUNK_NBYTES}, ValueError, r"chunk 2: str is no contiguous buffer"),
    ("both", {"chunk": 7}, ValueError, r"chunk 2: int is no contiguous buffer"),
    ("both", {"chunk": np.zeros((CHUNK_NBYTES, 2), np.uint8)[:, 0]}, ValueError, r"chunk 2: .* not contiguous"),
    ("both", {"chunk": memoryview(bytearray(2 * CHUNK_NBYTES))[::2]}, ValueError, r"chunk 2: memoryview is no"),
    ("both", {"num_threads": 0}, ValueError, r"num_threads is 0"),
    (GATHER, {"chunk": bytes(CHUNK_NBYTES)}, ValueError, r"chunk 2: bytes is read-only; give a writable buffer"),
    (SCATTER, {"chunk": None}, ValueError, r"chunk 2 is None, but tokens of it are to be written"),
    (SCATTER, {"block_ids": [[*IDS[:5], IDS[0]]]}, ValueError, r"hold block 11 more than once"),
    (SCATTER, {"block_ids": [[*IDS[:5], IDS[0]]], "null_block_id": 2}, ValueError, r"only the null block, here 2, may"),
    (SCATTER, {"skip_first_n_tokens": -1}, ValueError, r"skip_first_n_tokens is -1"),
    (SCATTER, {"block_ids": [[-1, -1, *IDS[2:]]], "skip_first_n_tokens": TOKENS - 1}, ValueError, r"hold -1"),
]


@pytest.mark.parametrize("direction", [GATHER, SCATTER])
@pytest.mark.parametrize(("which", "changes", "error", "text"), REFUSED, ids=lambda value: None)
def test_a_refused_call_changes_nothing(
    context: CPUCacheContext,
    cache: list[np.ndarray[Any, Any]],
    direction: str,
    which: str,
    changes: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    if which not in ("both", direction):
        pytest.skip("only the other direction refuses this")
    chunks: list[Any] = [bytearray(b"\xee" * CHUNK_NBYTES) for _ in range(3)]
    arguments: dict[str, Any] = {"block_ids": [IDS], "chunks": chunks, **changes}
    if "chunk" in arguments:
        chunks[2] = arguments.pop("chunk")
    before = content(cache)
    with pytest.raises(error, match=text):
        (gather_chunks if direction == GATHER else scatter_chunks)(context, **arguments)
    assert content(cache) == before
    assert all(bytes(chunk) == b"\xee" * CHUNK_NBYTES for chunk in chunks[:2])


def test_the_later_kernel_group_is_checked_before_the_first_one_moves(cache: list[np.ndarray[Any, Any]]) -> None:
    context = windowed(cache, BS, separate=False)
    before = content(cache)
    chunk = bytearray(object_group_nbytes(context, 0))
    for ids, text in (([0, NB], "hold 23"), ([0], "holds 1 ids")):
        with pytest.raises(ValueError, match=text):
            scatter_chunks(context, [[1, 3], ids], [chunk])
        with pytest.raises(ValueError, match=text):
            gather_chunks(context, [[1, 3], ids], [chunk])
    assert content(cache) == before
    assert not any(chunk)


def test_a_wrong_setting_changes_nothing(
    context: CPUCacheContext, cache: list[np.ndarray[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSHM_THREADS_MIN_NBYTES", "1")
    monkeypatch.setenv("KVSHM_THREADS", "many")
    before = content(cache)
    with pytest.raises(ValueError, match="KVSHM_THREADS is 'many'"):
        scatter_chunks(context, [IDS[:2]], [bytes(CHUNK_NBYTES)])
    assert content(cache) == before


def test_a_read_only_cache_can_be_gathered_from_but_not_scattered_to() -> None:
    cache = layers()
    for layer in cache:
        layer.flags.writeable = False
    context = CPUCacheContext(cache, TOKENS, {"kv_layout": "NHD"})
    chunk = bytearray(CHUNK_NBYTES)
    gather_chunks(context, [IDS[:2]], [chunk])
    assert bytes(chunk) == expected_chunk(cache, IDS[:2])
    with pytest.raises(ValueError, match="arrays of kernel group 0 are read-only"):
        scatter_chunks(context, [IDS[:2]], [chunk])


def test_a_closed_context_moves_nothing_more(context: CPUCacheContext) -> None:
    chunk = bytearray(CHUNK_NBYTES)
    gather_chunks(context, [IDS[:2]], [chunk])
    context.close()
    with pytest.raises(ValueError, match="closed"):
        gather_chunks(context, [IDS[:2]], [chunk])


# What it costs


def test_the_plan_is_made_once_and_goes_with_the_context() -> None:
    cache = kvshm.empty_many([(2, NB, BS, NH, HS)] * 2, ["bfloat16"] * 2)
    context = CPUCacheContext(cache, TOKENS, {"kv_layout": "NHD"})
    gather_chunks(context, [IDS[:2]], [bytearray(CHUNK_NBYTES)])
    plan = context._plans[0]
    gather_chunks(context, [IDS[:2]], [bytearray(CHUNK_NBYTES)])
    assert context.plan(0) is context._plans[0] is plan
    gone = weakref.ref(plan.groups[0].stacks[0].rows)
    del plan
    context.close()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_large_transfers_need_no_memory_and_no_new_pages(layout: str, num_threads: int) -> None:
    shape = (2, 256, 16, 8, 128) if layout == "NHD" else (2, 256, 8, 16, 128)
    cache = kvshm.empty_many([shape] * 2, ["bfloat16"] * 2)
    context = CPUCacheContext(cache, 256, {"kv_layout": layout})
    chunks = list(kvshm.zeros((8, object_group_nbytes(context, 0)), "uint8"))
    ids = [np.random.default_rng(0).permutation(256)[: 8 * 16].tolist()]
    for layer in cache:
        layer.view(np.uint8)[...] = 1

    def move() -> None:
        gather_chunks(context, ids, chunks, num_threads=num_threads)
        scatter_chunks(context, ids, chunks, num_threads=num_threads)

    move()  # 16 MiB each way
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        move()
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < 2**20
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    move()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 64, "of 8192 pages that are moved"


def test_calls_are_as_few_as_the_layout_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = np.zeros((4, 2, 64, 16, 2, 64), np.uint8)
    context = CPUCacheContext(list(pool), 256, {"kv_layout": "NHD"})
    chunk = np.zeros(object_group_nbytes(context, 0), np.uint8)
    calls: list[Any] = []

    def counted(*arguments: Any) -> Any:
        calls.extend(original(*arguments))
        return calls

    original = copying._calls
    monkeypatch.setattr(copying, "_calls", counted)
    gather_chunks(context, [np.random.default_rng(0).permutation(64)[:16]], [chunk])
    assert len(calls) == 1, "all layers, K and V of a chunk"


def test_subclasses_of_arrays_are_moved_as_arrays(tmp_path: Path) -> None:
    cache = [np.memmap(tmp_path / f"{layer}", np.float16, "w+", shape=(2, NB, BS, NH, HS)) for layer in range(2)]
    cache[0][...] = 1
    context = CPUCacheContext(cache, TOKENS, {"kv_layout": "NHD"})
    chunk = np.memmap(tmp_path / "chunk", np.uint8, "w+", shape=(CHUNK_NBYTES,))
    gather_chunks(context, [IDS[:2]], [chunk])
    assert chunk.tobytes() == expected_chunk(cache, IDS[:2])
    stacks = context.plan(0).groups[0].stacks
    assert {type(stack.rows) for stack in stacks} == {type(stack.items) for stack in stacks} == {np.ndarray}


def test_small_transfers_start_no_thread(context: CPUCacheContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_pool", None)
    monkeypatch.setenv("KVSHM_THREADS", "4")
    gather_chunks(context, [IDS[:2]], [bytearray(CHUNK_NBYTES)])


def test_threads_without_a_job_are_not_started() -> None:
    context = CPUCacheContext([np.zeros((7, 4, 3), np.uint8)], 8, {"kv_layout": "NHD"})
    chunk = np.zeros(object_group_nbytes(context, 0), np.uint8)
    before = threading.active_count()
    gather_chunks(context, [[3, 1]], [chunk], num_threads=2**70)
    scatter_chunks(context, [[3, 1]], [chunk], num_threads=2**70)
    assert threading.active_count() == before


def test_references_are_no_bytes() -> None:
    context = CPUCacheContext([np.zeros((7, 4, 3), np.uint8)], 8, {"kv_layout": "NHD"})
    chunk: Any = np.zeros(object_group_nbytes(context, 0) // 8, object)
    for move in (gather_chunks, scatter_chunks):
        with pytest.raises(ValueError, match="holds references"):
            move(context, [[3, 1]], [chunk])
