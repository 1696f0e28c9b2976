"""Moves chunks of tokens between the paged blocks of a registered cache and contiguous chunk objects, bit for bit.

In a chunk object the kernel groups of an object group follow one another, each as [kv, layer, slot, hidden]. Of a
group with a sliding window below a chunk, an object holds only the window: the last blocks of the chunk.

Each byte is copied once. What a call needs to know of the layout is worked out once per object group
(:mod:`kvshm.plans`) and kept with the cache. Large calls are shared among a few threads, see :mod:`kvshm.threads`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvshm.cache import MappedCache
from kvshm.copying import Piece, Stack, choose_way, gather, scatter
from kvshm.integers import checked_int
from kvshm.layout import BlockIds, Move
from kvshm.plans import KernelGroupPlan
from kvshm.threads import Job, default_num_threads, run_jobs

__all__ = ["BlockLists", "gather_chunks", "object_group_nbytes", "scatter_chunks"]

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
Ints: TypeAlias = "npt.NDArray[np.int64]"
BlockLists: TypeAlias = "BlockIds | Sequence[Sequence[int] | npt.NDArray[np.integer[Any]] | None]"
"""Per kernel group the blocks of every chunk in order, None where it is not looked at; or the same as one value."""
Chunks: TypeAlias = Sequence[Any]

# Jobs of this size are not felt, and several of them keep threads evenly busy.
MIN_JOB_NBYTES, MAX_JOB_NBYTES = 2**20, 16 * 2**20
# Rows per plane whose index is worked out at once for all planes: 512 KiB of it.
BATCH_ROWS = 64 * 1024


@dataclass(frozen=True, slots=True)
class _Moves:
    """The blocks of one kernel group that move."""

    group: KernelGroupPlan
    pieces: list[Piece]
    in_order: bool  # a block is there twice, and what is moved there last has to stay

    @property
    def nbytes(self) -> int:
        return sum(len(piece.block_ids) for piece in self.pieces) * self.group.block_nbytes


def object_group_nbytes(context: MappedCache, object_group_idx: int) -> int:
    """Bytes of one chunk object. IndexError: no such object group."""
    return context.layout.object_nbytes(object_group_idx)


def gather_chunks(
    context: MappedCache,
    block_ids: BlockLists,
    chunks: Chunks,
    object_group_idx: int = 0,
    *,
    num_threads: int | None = None,
) -> None:
    """Copy paged blocks into chunk objects, bit for bit.

    Args:
        block_ids: Per kernel group, the blocks of every chunk in order, before any window cut. Those of other object
            groups are not looked at; those that do not move may be anything.
        chunks: Per chunk, a writable contiguous buffer of :func:`object_group_nbytes` bytes; None skips it.
        num_threads: Threads to copy with; else as :mod:`kvshm.threads` says.

    Raises:
        ValueError: An id, a count or a buffer does not fit, or the cache is closed. Nothing has been written.
        IndexError: No such object group.
    """
    plan = context.plan(object_group_idx)
    buffers = [
        None if chunk is None else _buffer(chunk, index, plan.nbytes, writable=True)
        for index, chunk in enumerate(chunks)
    ]
    ids = _checked_ids(context, block_ids, object_group_idx, len(buffers))
    wanted = [index for index, chunk in enumerate(buffers) if chunk is not None]
    moves = []
    for group in plan.groups:
        pieces = [_piece(move, buffers) for move in ids.moves_in(group.kernel_group_idx, wanted)]
        moves.append(_Moves(group, pieces, in_order=False))
    _run(moves, num_threads, into_chunks=True)


def scatter_chunks(
    context: MappedCache,
    block_ids: BlockLists,
    chunks: Chunks,
    object_group_idx: int = 0,
    skip_first_n_tokens: int = 0,
    null_block_id: int | None = None,
    *,
    num_threads: int | None = None,
) -> None:
    """Copy chunk objects into paged blocks, bit for bit.

    Of an object group with a sliding window only the last chunks that it reaches over are written.

    Args:
        block_ids: As for :func:`gather_chunks`.
        chunks: Per chunk, a contiguous buffer of :func:`object_group_nbytes` bytes; None where nothing is written.
        skip_first_n_tokens: Leading tokens to leave untouched: no slot that holds one of them is written. Pages that
            are no rows of tokens (index pages, recurrent state) are written whole if one of their tokens is not among
            them, else not at all.
        null_block_id: The block that several tokens may be written to; what it holds then is the last of them.
        num_threads: As for :func:`gather_chunks`.

    Raises:
        ValueError: An id, a count, a buffer or ``skip_first_n_tokens`` does not fit, a block would be written twice,
            a chunk is missing, the cache is read-only, or the cache is closed. Nothing has been written.
        IndexError: No such object group.
    """
    plan = context.plan(object_group_idx)
    skip = checked_int(skip_first_n_tokens, "skip_first_n_tokens")
    if skip < 0:
        raise ValueError(f"skip_first_n_tokens is {skip}; it cannot be negative")
    buffers = [
        None if chunk is None else _buffer(chunk, index, plan.nbytes, writable=False)
        for index, chunk in enumerate(chunks)
    ]
    ids = _checked_ids(context, block_ids, object_group_idx, len(buffers))
    moves = []
    for group in plan.groups:
        index = group.kernel_group_idx
        moving = ids.moves_out(index, plan.num_chunks_in_sw, skip)
        for move in moving:
            if buffers[move.chunk] is None:
                raise ValueError(
                    f"chunk {move.chunk} is None, but tokens of it are to be written; give its bytes, or skip its "
                    f"tokens"
                )
        pieces = [_piece(move, buffers) for move in moving]
        if pieces and not group.is_writable:
            raise ValueError(
                f"the arrays of kernel group {group.kernel_group_idx} are read-only; register writable ones to scatter"
            )
        moves.append(_Moves(group, pieces, in_order=ids.has_null_twice(index, moving, null_block_id)))
    _run(moves, num_threads, into_chunks=False)


def _buffer(chunk: Any, index: int, nbytes: int, *, writable: bool) -> Bytes:
    """The bytes of a chunk object."""
    if isinstance(chunk, np.ndarray):
        if chunk.dtype.hasobject:
            raise ValueError(f"chunk {index} is an array of {chunk.dtype}, which holds references, not bytes")
        # Not through the buffer protocol, which bfloat16 and float8 do not have.
        if not chunk.flags.c_contiguous:
            raise ValueError(f"chunk {index}: array of shape {chunk.shape} is not contiguous; give a contiguous one")
        flat: Bytes = np.asarray(chunk).reshape(-1).view(np.uint8)
    else:
        try:
            flat = np.frombuffer(chunk, dtype=np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            raise ValueError(f"chunk {index}: {type(chunk).__name__} is no contiguous buffer: {error}") from None
    if flat.nbytes != nbytes:
        raise ValueError(
            f"chunk {index} has {flat.nbytes} bytes, but objects of this group have {nbytes}; see object_group_nbytes"
        )
    if writable and not flat.flags.writeable:
        raise ValueError(f"chunk {index}: {type(chunk).__name__} is read-only; give a writable buffer")
    return flat


def _checked_ids(context: MappedCache, block_ids: BlockLists, object_group_idx: int, num_chunks: int) -> BlockIds:
    if not isinstance(block_ids, BlockIds):
        return BlockIds.of_object_group(context.layout, block_ids, object_group_idx, num_chunks)
    if block_ids.num_chunks != num_chunks:
        raise ValueError(f"block ids of {block_ids.num_chunks} chunks came with {num_chunks} chunks")
    return block_ids


def _piece(move: Move, buffers: Sequence[Bytes | None]) -> Piece:
    chunk = buffers[move.chunk]
    assert chunk is not None
    return Piece(chunk, move.block_ids, move.first_block, move.first_slot)


def _run(moves: list[_Moves], num_threads: int | None, *, into_chunks: bool) -> None:
    nbytes = sum(move.nbytes for move in moves)
    threads = default_num_threads(nbytes) if num_threads is None else num_threads
    if threads < 1:
        raise ValueError(f"num_threads is {threads}; the calling thread counts, so it is at least 1")
    copy = gather if into_chunks else partial(scatter, shared=threads > 1)
    threads = min(threads, 1 + nbytes // MIN_JOB_NBYTES)  # more would find no job
    job_nbytes = min(MAX_JOB_NBYTES, max(MIN_JOB_NBYTES, nbytes // (4 * threads))) if threads > 1 else nbytes
    run_jobs((job for move in moves for job in _jobs(move, copy, job_nbytes)), threads)


def _jobs(moves: _Moves, copy: Callable[..., None], job_nbytes: int) -> Iterator[Job]:
    """Jobs that may run side by side, each of about so many bytes."""
    group = moves.group
    for batch in [moves.pieces] if moves.in_order else _batches(moves):
        ways = {order: [choose_way(order, piece.whole_blocks.block_ids) for piece in batch] for order in group.orders}
        for stack in group.stacks:
            for planes, some in _portions(stack, len(batch), None if moves.in_order else job_nbytes):
                yield partial(copy, stack, planes, batch[some], ways[stack.order][some])


def _portions(stack: Stack, num_pieces: int, nbytes: int | None) -> Iterator[tuple[range, slice]]:
    """Planes and pieces that make about so many bytes together; all of them without a number."""
    num_planes = len(stack.planes)
    planes = num_planes if nbytes is None else max(1, nbytes // max(1, stack.chunk_nbytes))
    pieces = num_pieces if nbytes is None else max(1, planes // num_planes)
    for start in range(0, num_pieces, pieces):
        for first in range(0, num_planes, planes):
            yield range(first, min(first + planes, num_planes)), slice(start, start + pieces)


def _batches(moves: _Moves) -> Iterator[list[Piece]]:
    """Pieces in portions whose indices together are short."""
    rows_per_block = max(len(order.offsets) if order else 1 for order in moves.group.orders)
    step = max(1, BATCH_ROWS // (rows_per_block * moves.group.kept_blocks))
    for start in range(0, len(moves.pieces), step):
        yield moves.pieces[start : start + step]
