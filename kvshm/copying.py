"""Copies blocks between paged planes and a chunk, straight: NumPy reads and writes both in place.

A plane comes as a strided view (block, slot, head, element); in a chunk its slots follow one another. Which rows are
contiguous on both sides follows from the strides alone: a whole block, or one head of one slot. So this module knows no
format. Two ways to move blocks:

* **rows**: the planes as an array [row, byte], and the index of every row in the order of the chunk. One NumPy call
  moves all blocks of a chunk, whatever their ids, of all planes that lie in one piece of memory.
* **runs**: one call per plane and run of consecutive ids, for the strides of any two sides. For long runs of small
  blocks, and for planes whose rows are no regular grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import gcd, prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Piece", "Plane", "RowOrder", "Stack", "Way", "choose_way", "gather", "plane_of", "scatter", "stacks_of"]

Array: TypeAlias = "np.ndarray[Any, Any]"
Bytes: TypeAlias = "npt.NDArray[np.uint8]"
Ints: TypeAlias = "npt.NDArray[np.int64]"

# Rows of this length cost no more per byte than longer ones.
LONG_ROW_NBYTES = 4096
# From this mean length on, runs of blocks that are shorter rows are worth a call each.
LONG_RUN_NBYTES = 64 * 1024
# Rows that one call moves at most: its index has 32 KiB.
CALL_ROWS = 4096
# The C library copies rows of a page and more several times slower if the destination begins 1 to 31 bytes past the
# source, modulo a page: there the processor's string copy stumbles over its own stores. Shorter rows are copied
# otherwise. It is no rare case: large arrays of NumPy begin 16 bytes past a page, segments on one.
PAGE_NBYTES = 4096
STUMBLE_NBYTES = 32
SHORT_ROW_NBYTES = 512
SHORT_ITEM = np.dtype((np.void, SHORT_ROW_NBYTES))
# NumPy keeps the interpreter's lock during assignments through an index of one axis that is not longer than this.
LOCKED_INDEX_LENGTH = 500


@dataclass(frozen=True, slots=True, eq=False)
class RowOrder:
    """Where the rows of a block are, in the order in which a chunk has them. Counts rows, from the block's start."""

    nbytes: int  # of one row, contiguous on both sides
    step: int  # from one block to the next
    offsets: Ints  # of the rows of one block
    reach: int  # past the last row of a block
    block_is_contiguous: bool  # on both sides alike, so that consecutive blocks may be too

    def index(self, block_ids: Ints) -> Ints:
        """The rows of these blocks."""
        return (block_ids[:, None] * self.step + self.offsets).ravel()


@dataclass(frozen=True, slots=True, eq=False)
class Plane:
    """The bytes of a paged plane, and its place in a chunk."""

    blocks: Bytes  # [block, slot, head, byte]
    chunk_offset: int  # bytes to slot 0 in a chunk
    chunk_slot_nbytes: int  # bytes from slot to slot in a chunk
    order: RowOrder | None  # None: the rows are no regular grid
    address: int  # of block 0
    memory: Bytes  # one axis; contiguous bytes that the plane is in
    memory_address: int
    owner: object  # what the memory belongs to

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block."""
        return prod(self.blocks.shape[1:])

    @property
    def end_address(self) -> int:
        """Past the last row, where there are rows."""
        assert self.order is not None
        num_rows = (len(self.blocks) - 1) * self.order.step + self.order.reach
        return self.address + num_rows * self.order.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """Planes in one piece of memory, which follow one another in a chunk. Every view of them is made once."""

    planes: tuple[Plane, ...]
    rows: Bytes  # [row, byte], none without an order
    items: Array  # the same rows as one item each
    starts: Ints  # [plane, 1]: row at which each plane starts
    block_nbytes: int  # of one block of one plane
    chunk_nbytes: int  # of one plane in a chunk

    @property
    def order(self) -> RowOrder | None:
        """The row order that all planes have."""
        return self.planes[0].order


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Blocks of one chunk that move: ``block_ids[i]`` from or to block ``first_block + i`` of the chunk."""

    chunk: Bytes  # one axis
    block_ids: Ints
    first_block: int = 0
    first_slot: int = 0  # of the first of these blocks: slots before it do not move

    @property
    def whole_blocks(self) -> Piece:
        """What remains without a first block that moves in part."""
        return Piece(self.chunk, self.block_ids[1:], self.first_block + 1) if self.first_slot else self


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """How the whole blocks of a piece are moved."""

    index: Ints | None  # the rows of one plane; None: by runs
    runs: Sequence[tuple[int, int]] = ()  # positions in block_ids between which ids are consecutive


def plane_of(paged: Array, chunk_offset: int, chunk_slot_nbytes: int) -> Plane:
    """The plane behind a strided view of a paged cache.

    Args:
        paged: View (block, slot, head, element) of any dtype and strides, each element next to the one before.
        chunk_offset: Bytes from the start of a chunk to slot 0.
        chunk_slot_nbytes: Bytes from slot to slot there.
    """
    shape = (*paged.shape[:3], paged.shape[3] * paged.dtype.itemsize)
    strides = (*paged.strides[:3], 1)
    parent, owner = _memory_of(paged)
    address = _address(paged)
    if parent.flags.c_contiguous:
        memory: Bytes = np.asarray(parent).reshape(-1).view(np.uint8)  # of no subclass, which take() may be slow with
        memory_address = _address(parent)
    else:
        # As bytes first, and of one element: view() takes that whatever its strides, and as_strided knows no float8.
        reach = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) if paged.size else 0
        memory = np.lib.stride_tricks.as_strided(paged[:1, :1, :1, :1].view(np.uint8), (reach,), (1,))
        memory_address, owner = address, memory
    blocks: Bytes = np.ndarray(shape, np.uint8, memory, address - memory_address if paged.size else 0, strides)
    order = _row_order(shape, strides, chunk_slot_nbytes) if paged.size else None
    return Plane(blocks, chunk_offset, chunk_slot_nbytes, order, address, memory, memory_address, owner)


def _memory_of(array: Array) -> tuple[Array, object]:
    """The outermost array that a view was made from, and what holds its memory."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array, array if array.base is None else array.base


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


@lru_cache(maxsize=1024)  # the planes of a cache are alike
def _row_order(
    shape: tuple[int, int, int, int], strides: tuple[int, int, int, int], chunk_slot_nbytes: int
) -> RowOrder | None:
    """The longest rows that are contiguous in the plane and in a chunk, if all of them lie on one grid."""
    num_blocks, num_slots, num_heads, row_nbytes = shape
    block_step, slot_step, head_step, _ = strides
    slot_nbytes = num_heads * row_nbytes
    if chunk_slot_nbytes != slot_nbytes:
        return None  # the chunk has slots of other planes in between
    slot_is_contiguous = num_heads == 1 or head_step == row_nbytes
    block_is_contiguous = slot_is_contiguous and (num_slots == 1 or slot_step == slot_nbytes)
    starts = np.zeros(1, dtype=np.int64)
    longest = num_slots * slot_nbytes
    if not block_is_contiguous:
        longest = slot_nbytes if slot_is_contiguous else row_nbytes
        heads = np.arange(num_heads if longest == row_nbytes else 1) * head_step
        starts = (np.arange(num_slots)[:, None] * slot_step + heads).ravel()
    steps = [block_step] if num_blocks > 1 else []
    grid = gcd(longest, *steps, *starts.tolist())
    if min([*steps, *starts.tolist()]) < 0 or (grid != longest and grid < LONG_ROW_NBYTES):
        return None
    offsets = (starts[:, None] + np.arange(0, longest, grid)).ravel() // grid
    return RowOrder(grid, block_step // grid if steps else 1, offsets, int(offsets.max()) + 1, block_is_contiguous)


def stacks_of(planes: Iterable[Plane], kept_blocks: int) -> list[Stack]:
    """The planes in their order, as few stacks as can be.

    Args:
        kept_blocks: Blocks that a chunk has of each plane.
    """
    stacks: list[list[Plane]] = []
    for plane in planes:
        if stacks and _follows(plane, stacks[-1][-1], kept_blocks) and _shares_rows(plane, stacks[-1][0]):
            stacks[-1].append(plane)
        else:
            stacks.append([plane])
    return [_stack(stack, kept_blocks) for stack in stacks]


def _follows(plane: Plane, other: Plane, kept_blocks: int) -> bool:
    return plane.chunk_offset == other.chunk_offset + kept_blocks * other.block_nbytes


def _shares_rows(plane: Plane, first: Plane) -> bool:
    """Whether both planes are on one grid of rows in the memory of the first."""
    return (
        plane.order is not None
        and plane.order is first.order
        and plane.order.block_is_contiguous
        and plane.owner is first.owner
        and (plane.address - first.address) % plane.order.nbytes == 0
        and plane.address >= first.memory_address
        and plane.end_address <= first.memory_address + first.memory.nbytes
    )


def _stack(planes: list[Plane], kept_blocks: int) -> Stack:
    first = planes[0]
    row_nbytes = 1 if first.order is None else first.order.nbytes
    begin = min(plane.address for plane in planes)
    end = begin if first.order is None else max(plane.end_address for plane in planes)
    rows = first.memory[begin - first.memory_address : end - first.memory_address].reshape(-1, row_nbytes)
    return Stack(
        planes=tuple(planes),
        rows=rows,
        items=rows.view(np.dtype((np.void, row_nbytes)))[:, 0],
        starts=np.array([[(plane.address - begin) // row_nbytes] for plane in planes]),
        block_nbytes=first.block_nbytes,
        chunk_nbytes=kept_blocks * first.block_nbytes,
    )


def choose_way(order: RowOrder | None, block_ids: Ints) -> Way:
    """How to move these blocks of planes of this order."""
    if order is None or not len(block_ids):
        return Way(None, _runs(block_ids))
    if order.block_is_contiguous and order.nbytes < LONG_ROW_NBYTES and len(block_ids) > 1:
        num_runs = 1 + int(np.count_nonzero(np.diff(block_ids) != 1))
        if num_runs < len(block_ids) and len(block_ids) * order.nbytes >= num_runs * LONG_RUN_NBYTES:
            return Way(None, _runs(block_ids))
    return Way(order.index(block_ids))


def _runs(block_ids: Ints) -> list[tuple[int, int]]:
    """Where consecutive ids begin and end.

    >>> _runs(np.array([4, 5, 6, 2, 9, 10]))
    [(0, 3), (3, 4), (4, 6)]
    """
    cuts = [0, *(np.flatnonzero(np.diff(block_ids) != 1) + 1).tolist(), len(block_ids)]
    return list(pairwise(cuts)) if len(block_ids) else []


def gather(stack: Stack, which: range, pieces: Sequence[Piece], ways: Sequence[Way]) -> None:
    """Copy the blocks of pieces, whole ones only, from some planes of a stack into their chunks."""
    calls: list[tuple[Ints, Bytes]] = []
    stumbling: list[tuple[Ints, Bytes]] = []
    for piece, way in zip(pieces, ways, strict=True):
        if way.index is None:
            for plane in stack.planes[which.start : which.stop]:
                for in_chunk, in_plane in _runs_of(plane, piece, way):
                    in_chunk[...] = in_plane
            continue
        for index, out in _calls(stack, which, piece, way.index):
            stumbles = _stumbles(stack.rows.shape[1], _address(out) - _address(stack.rows))
            (stumbling if stumbles else calls).append((index, out))
    take = stack.rows.take
    # A loop of nothing but copies: each leaves caches that hold nothing of the interpreter.
    for index, out in calls:
        # clip: the ids have been checked, and NumPy copies through a buffer where an index might still be wrong.
        take(index, 0, out, "clip")
    for index, out in stumbling:
        for rows, short_index, short_out in _short_rows(stack.rows, index, out):
            rows.take(short_index, 0, short_out, "clip")


def scatter(stack: Stack, which: range, pieces: Sequence[Piece], ways: Sequence[Way], *, shared: bool) -> None:
    """Copy the blocks of pieces from their chunks into some planes of a stack.

    Args:
        pieces: Of the first block of each, slots before ``first_slot`` are not written.
        ways: For the whole blocks of the pieces.
        shared: Other threads copy at the same time, and want the interpreter's lock meanwhile.
    """
    items = stack.items
    calls: list[tuple[Array | None, Any, Array]] = []  # without a target: in short rows
    for cut, way in zip(pieces, ways, strict=True):
        if cut.first_slot:
            for plane in stack.planes[which.start : which.stop]:
                first = plane.blocks[int(cut.block_ids[0])]
                calls.append((first[cut.first_slot :], ..., _chunk_slots(plane, cut)[0, cut.first_slot :]))
        piece = cut.whole_blocks
        if way.index is None:
            for plane in stack.planes[which.start : which.stop]:
                calls += [(in_plane, ..., in_chunk) for in_chunk, in_plane in _runs_of(plane, piece, way)]
            continue
        for index, values in _calls(stack, which, piece, way.index):
            if _stumbles(stack.rows.shape[1], _address(stack.rows) - _address(values)):
                calls.append((None, index, values))
            elif shared and index.size <= LOCKED_INDEX_LENGTH:
                calls.append((stack.rows, index, values))
            else:
                calls.append((items, index.reshape(-1), values.reshape(-1).view(items.dtype)))
    # In the order of the pieces: of what is written to one block twice, the last stays.
    for target, index, values in calls:
        if target is not None:
            target[index] = values
            continue
        for rows, short_index, short_values in _short_rows(stack.rows, index, values):
            rows.view(SHORT_ITEM)[short_index] = short_values.view(SHORT_ITEM)


def _calls(stack: Stack, which: range, piece: Piece, rows: Ints) -> Iterator[tuple[Ints, Bytes]]:
    """The calls that move a piece: index [plane, row] of rows of the stack, and where these are in the chunk."""
    in_chunk = _chunk_rows(stack, which, piece)
    is_one_range = len(piece.block_ids) * stack.block_nbytes == stack.chunk_nbytes
    step = max(1, CALL_ROWS // len(rows)) if is_one_range else 1
    starts = stack.starts[which.start : which.stop]
    for start in range(0, len(which), step):
        some = slice(start, start + step)
        yield (starts[some] + rows if len(stack.planes) > 1 else rows[None]), in_chunk[some]


def _stumbles(row_nbytes: int, distance: int) -> bool:
    """Whether some rows are copied slowly over this distance, from source to destination."""
    return (
        row_nbytes >= PAGE_NBYTES
        and row_nbytes % SHORT_ROW_NBYTES == 0
        and 0 < distance % gcd(row_nbytes, PAGE_NBYTES) < STUMBLE_NBYTES
    )


def _short_rows(rows: Bytes, index: Ints, in_chunk: Bytes) -> Iterator[tuple[Bytes, Ints, Bytes]]:
    """The same move in short rows: [row, byte] of the stack, their index, and [row, byte] of the chunk."""
    short_rows = rows.reshape(-1, SHORT_ROW_NBYTES)
    parts = np.arange(rows.shape[1] // SHORT_ROW_NBYTES)
    step = max(1, CALL_ROWS // len(parts))
    for rows_of_plane, chunk_of_plane in zip(index, in_chunk, strict=True):
        for start in range(0, len(rows_of_plane), step):
            some = slice(start, start + step)
            short_index = (rows_of_plane[some, None] * len(parts) + parts).reshape(-1)
            yield short_rows, short_index, chunk_of_plane[some].reshape(-1, SHORT_ROW_NBYTES)


def _chunk_rows(stack: Stack, which: range, piece: Piece) -> Bytes:
    """The rows of some planes of a piece in its chunk: [plane, row, byte]."""
    begin = stack.planes[which.start].chunk_offset
    row_nbytes = stack.rows.shape[1]
    rows = piece.chunk[begin : begin + len(which) * stack.chunk_nbytes].reshape(len(which), -1, row_nbytes)
    rows_per_block = stack.block_nbytes // row_nbytes
    return rows[:, piece.first_block * rows_per_block :][:, : len(piece.block_ids) * rows_per_block]


def _runs_of(plane: Plane, piece: Piece, way: Way) -> Iterator[tuple[Bytes, Bytes]]:
    """Views of the runs of a piece: in the chunk, and in the plane."""
    if not way.runs:
        return
    slots = _chunk_slots(plane, piece)
    for start, end in way.runs:
        block = int(piece.block_ids[start])
        yield slots[start:end], plane.blocks[block : block + end - start]


def _chunk_slots(plane: Plane, piece: Piece) -> Bytes:
    """The slots of a piece in its chunk, axes as ``Plane.blocks``."""
    _, num_slots, num_heads, row_nbytes = plane.blocks.shape
    block_step = num_slots * plane.chunk_slot_nbytes
    slots: Bytes = np.ndarray(
        (len(piece.block_ids), num_slots, num_heads, row_nbytes),
        np.uint8,
        buffer=piece.chunk,
        offset=plane.chunk_offset + piece.first_block * block_step,
        strides=(block_step, plane.chunk_slot_nbytes, row_nbytes, 1),
    )
    return slots
