"""Every registrable cache, moved by kvshm and one element at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshm import copying, transfer
from kvshm.context import CPUCacheContext
from kvshm.strategies import REGISTRABLE_FORMATS, Registration, block_id_lists, buffers, kv_formats, registrations
from kvshm.transfer import gather_chunks, object_group_nbytes, scatter_chunks
from tests.support.transfer_oracle import slow_gather, slow_scatter

NULL_BLOCK = 0


@dataclass
class Case:
    """A cache with bytes in it, and what to move."""

    registration: Registration
    memory: np.ndarray[Any, np.dtype[np.uint8]]
    block_ids: list[list[int]]
    num_chunks: int
    object_group: int
    num_threads: int

    def context(self) -> CPUCacheContext:
        return CPUCacheContext(**self.registration.arguments(self.registration.cache.arrays(self.memory)))

    @property
    def oracle(self) -> tuple[Any, Any, Any]:
        return self.registration.cache.normalised, self.registration.manager(), self.block_ids


@st.composite
def cases(draw: st.DrawFn, *, unique: bool) -> Case:
    registration = draw(registrations(draw(st.none() | kv_formats(REGISTRABLE_FORMATS).map(st.just)), max_side=4))
    manager = registration.manager()
    block_ids = draw(block_id_lists(manager, unique=unique))
    return Case(
        registration=registration,
        memory=draw(buffers(registration.cache.nbytes)),
        block_ids=block_ids,
        num_chunks=len(block_ids[0]) // manager.blocks_per_chunk(0),
        object_group=draw(st.integers(0, len(manager.object_groups) - 1)),
        num_threads=draw(st.integers(1, 3)),
    )


@contextmanager
def limits(drawn: list[int]) -> Iterator[None]:
    """Every way to move blocks, with caches so small that one way would do for all."""
    names = [
        (copying, "CALL_ROWS"),
        (copying, "LONG_ROW_NBYTES"),
        (copying, "LONG_RUN_NBYTES"),
        (copying, "LOCKED_INDEX_LENGTH"),
        (transfer, "BATCH_ROWS"),
        (transfer, "MIN_JOB_NBYTES"),
    ]
    copying._row_order.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), value in zip(names, drawn, strict=True):
            patch.setattr(module, name, value)
        yield
    copying._row_order.cache_clear()


SMALL = st.lists(st.sampled_from([1, 2, 7, 40, 10**6]), min_size=6, max_size=6)


@settings(deadline=None)
@given(st.data(), cases(unique=False), SMALL)
def test_gather_is_bit_exact(data: st.DataObject, case: Case, small: list[int]) -> None:
    there = data.draw(st.lists(st.booleans(), min_size=case.num_chunks, max_size=case.num_chunks))
    context = case.context()
    before = case.memory.tobytes()
    nbytes = object_group_nbytes(context, case.object_group)
    chunks = [np.full(nbytes, 0xA5, dtype=np.uint8) if is_there else None for is_there in there]
    with limits(small):
        gather_chunks(context, case.block_ids, chunks, case.object_group, num_threads=case.num_threads)
    for index, chunk in enumerate(chunks):
        if chunk is not None:
            assert chunk.tobytes() == slow_gather(before, *case.oracle, index, case.object_group)
    assert case.memory.tobytes() == before


@settings(deadline=None)
@given(st.data(), cases(unique=True), SMALL)
def test_scatter_is_bit_exact_and_spares_protected_tokens(data: st.DataObject, case: Case, small: list[int]) -> None:
    context = case.context()
    manager = context.kv_layer_groups_manager
    num_tokens = case.num_chunks * manager.lmcache_tokens_per_chunk
    skip = data.draw(st.integers(0, num_tokens + 2))
    null_block_id = _with_null_blocks(data, case) if data.draw(st.booleans()) else None
    before = case.memory.tobytes()
    nbytes = object_group_nbytes(context, case.object_group)
    chunks: list[bytes | None] = [data.draw(buffers(nbytes)).tobytes() for _ in range(case.num_chunks)]
    for index in range(min(case.num_chunks, skip // manager.lmcache_tokens_per_chunk)):
        if data.draw(st.booleans()):
            chunks[index] = None  # all its tokens are protected
    expected = slow_scatter(before, *case.oracle, chunks, case.object_group, skip)
    with limits(small):
        scatter_chunks(
            context, case.block_ids, chunks, case.object_group, skip, null_block_id, num_threads=case.num_threads
        )
    assert case.memory.tobytes() == expected


def _with_null_blocks(data: st.DataObject, case: Case) -> int:
    """Let several blocks of a request be the null block."""
    for ids in case.block_ids:
        for index, block in enumerate(ids):
            if block != NULL_BLOCK and data.draw(st.integers(0, 3)) == 0:
                ids[index] = NULL_BLOCK
    return NULL_BLOCK


@settings(deadline=None)
@given(cases(unique=True))
def test_a_cache_comes_back_as_it_was(case: Case) -> None:
    context = case.context()
    before = case.memory.tobytes()
    chunks = [bytearray(object_group_nbytes(context, case.object_group)) for _ in range(case.num_chunks)]
    gather_chunks(context, case.block_ids, chunks, case.object_group)
    after_gather = slow_scatter(bytes(len(before)), *case.oracle, [bytes(c) for c in chunks], case.object_group)
    case.memory[...] = 0
    scatter_chunks(context, case.block_ids, chunks, case.object_group)
    assert case.memory.tobytes() == after_gather


@settings(deadline=None)
@given(st.data(), cases(unique=True))
def test_ids_that_move_nothing_may_be_anything(data: st.DataObject, case: Case) -> None:
    context = case.context()
    manager = context.kv_layer_groups_manager
    nonsense = st.sampled_from([-1, 10**30, 2**63, None, "x", 1.5])
    used = manager.object_groups[case.object_group].kernel_group_indices
    skip = data.draw(st.integers(0, case.num_chunks * manager.lmcache_tokens_per_chunk))
    ids: list[Any] = []
    for index, group in enumerate(manager.kernel_groups):
        per_chunk, kept = manager.blocks_per_chunk(index), manager.blocks_per_chunk_in_sw(index)
        moved = [
            number % per_chunk >= per_chunk - kept and (number + 1) * group.tokens_per_block > skip
            for number in range(len(case.block_ids[index]))
        ]
        mixed = [
            block if moves else data.draw(nonsense) for block, moves in zip(case.block_ids[index], moved, strict=True)
        ]
        ids.append(mixed if index in used else data.draw(st.none() | st.just([]) | st.just(mixed)))
    before = case.memory.tobytes()
    nbytes = object_group_nbytes(context, case.object_group)
    chunks = [bytes([index + 1]) * nbytes for index in range(case.num_chunks)]
    expected = slow_scatter(before, *case.oracle, chunks, case.object_group, skip)
    scatter_chunks(context, ids, chunks, case.object_group, skip)
    assert case.memory.tobytes() == expected
