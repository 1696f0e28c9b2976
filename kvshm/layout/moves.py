"""Block ids as one value, and what follows from them: which blocks a store reads, and which a retrieve writes.

Engines, the wire and transfers make the value; whoever copies asks it. Which blocks move depends on the layout (of a
sliding window below a chunk only the last blocks do) and on what is done, so ranges are checked with the moves: ids
that do not move may be anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvshm.integers import Ints, int64_array
from kvshm.layout.groups import KVLayerGroupsManager

__all__ = ["BlockIds", "Move"]

_NO_BLOCK = np.iinfo(np.int64).min  # in the place of what is no integer of 64 bits


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Blocks of one chunk and kernel group that move."""

    chunk: int
    block_ids: NDArray[np.int64]
    first_block: int = 0  # of the blocks that are kept of the chunk: the first of these
    first_slot: int = 0  # of that block: slots before it do not move


@dataclass(frozen=True, slots=True, eq=False)
class BlockIds:
    """Block ids of whole chunks in a layout, per kernel group: as many as the chunks take."""

    layout: KVLayerGroupsManager
    num_chunks: int
    groups: tuple[NDArray[np.int64] | None, ...]  # per kernel group [chunk, block of the chunk]; None: not looked at
    _given: Mapping[int, NDArray[Any]] = field(default_factory=dict)  # the same of groups with something that is no id

    @classmethod
    def of_kernel_groups(
        cls, layout: KVLayerGroupsManager, block_ids: Sequence[NDArray[np.int64]], num_chunks: int
    ) -> BlockIds:
        """From one list per kernel group that holds just the ids of the chunks.

        Raises:
            ValueError: Too few or too many ids, or lists.
        """
        per_chunk = [layout.blocks_per_chunk(index) for index in range(len(layout.kernel_groups))]
        wanted, given = [count * num_chunks for count in per_chunk], [len(ids) for ids in block_ids]
        if given != wanted:
            raise ValueError(
                f"{num_chunks} chunks take {wanted} block ids per kernel group, but {given} came; "
                f"give blocks_per_chunk * chunks ids for every group"
            )
        groups = tuple(ids.reshape(num_chunks, count) for ids, count in zip(block_ids, per_chunk, strict=True))
        return cls(layout, num_chunks, groups)

    @classmethod
    def of_engine_groups(
        cls, layout: KVLayerGroupsManager, block_ids: Sequence[Ints] | Ints, num_chunks: int
    ) -> BlockIds:
        """From what an engine passes: one list per engine group, or one flat list where there is one group.

        Ids beyond those of the chunks are not looked at.

        Raises:
            ValueError: No such lists, too few ids, or something is no integer.
        """
        num_groups = 1 + max(group.engine_group_idx for group in layout.kernel_groups)
        lists = _lists(block_ids, num_groups)
        groups: list[NDArray[np.int64]] = []
        for index, group in enumerate(layout.kernel_groups):
            array = int64_array(lists[group.engine_group_idx], f"block_ids of kernel group {index}")
            count = layout.blocks_per_chunk(index)
            if array.size < count * num_chunks:
                raise ValueError(
                    f"{num_chunks} chunks of {layout.lmcache_tokens_per_chunk} tokens take {count * num_chunks} "
                    f"blocks of kernel group {index}, but {array.size} block ids came"
                )
            # A copy: the caller may use its array for other ids while the blocks of these are still being read.
            groups.append(array[: count * num_chunks].copy().reshape(num_chunks, count))
        return cls(layout, num_chunks, tuple(groups))

    @classmethod
    def of_object_group(
        cls, layout: KVLayerGroupsManager, block_ids: Sequence[Any], object_group_idx: int, num_chunks: int
    ) -> BlockIds:
        """From one list per kernel group, of which those of one object group are looked at.

        Raises:
            ValueError: Not one list per kernel group, one that is not flat, or too few or too many ids.
            IndexError: No such object group.
        """
        num_groups = len(layout.kernel_groups)
        if len(block_ids) != num_groups:
            raise ValueError(
                f"block_ids holds {len(block_ids)} lists, but there are {num_groups} kernel groups; give one list of "
                f"ids for each"
            )
        groups: list[NDArray[np.int64] | None] = [None] * num_groups
        odd: dict[int, NDArray[Any]] = {}
        for index in layout.object_group(object_group_idx).kernel_group_indices:
            per_chunk = layout.blocks_per_chunk(index)
            given = _as_array(block_ids[index])
            if given.ndim != 1:
                raise ValueError(
                    f"block_ids[{index}] is no flat list of ints; give the ids of all chunks one after the other"
                )
            if len(given) != per_chunk * num_chunks:
                raise ValueError(
                    f"block_ids[{index}] holds {len(given)} ids, but {num_chunks} chunks of {per_chunk} blocks take "
                    f"{per_chunk * num_chunks}"
                )
            given = given.reshape(num_chunks, per_chunk)
            if given.dtype == object:
                odd[index] = given
                given = np.array([[_id_of(each) for each in row] for row in given], np.int64).reshape(given.shape)
            groups[index] = given.astype(np.int64, copy=False)
        return cls(layout, num_chunks, tuple(groups), odd)

    def blocks(self, kernel_group_idx: int) -> NDArray[np.int64]:
        """The ids of a kernel group, axes [chunk, block of the chunk]."""
        ids = self.groups[kernel_group_idx]
        assert ids is not None, "of another object group"
        return ids

    def first_chunks(self, num_chunks: int) -> BlockIds:
        """Those of the first chunks."""
        groups = tuple(None if ids is None else ids[:num_chunks] for ids in self.groups)
        return BlockIds(
            self.layout, num_chunks, groups, {index: ids[:num_chunks] for index, ids in self._given.items()}
        )

    def flat(self) -> list[NDArray[np.int64]]:
        """One list per kernel group."""
        return [np.empty(0, np.int64) if ids is None else ids.reshape(-1) for ids in self.groups]

    def has_data(self, object_group_idx: int, null_block_id: int | None) -> NDArray[np.bool_]:
        """Per chunk, whether no block that an object group keeps of it is the null block: else there is nothing to
        store. Blocks outside a window are not kept, so they may be null."""
        found = np.ones(self.num_chunks, np.bool_)
        if null_block_id is not None:
            for index in self.layout.object_group(object_group_idx).kernel_group_indices:
                found &= (self._kept(index) != null_block_id).all(axis=1)
        return found

    def check_to_store(self, null_block_id: int | None) -> None:
        """Check that all blocks that are kept exist, or are the null block.

        Raises:
            ValueError: One does not.
        """
        for _, index in self._served():
            kept = self._kept(index)
            self._check_range(index, kept[kept != null_block_id] if null_block_id is not None else kept)

    def check_to_retrieve(self, skip_first_n_tokens: int, null_block_id: int | None) -> None:
        """Check that all blocks that would be written exist, and that none would be written twice.

        The null block may be there more than once.

        Raises:
            ValueError: One does not, or would be.
        """
        windows = self.layout.get_attn_desc().num_chunks_in_sw
        for object_group, index in self._served():
            moves = self.moves_out(index, windows[object_group], skip_first_n_tokens)
            self.has_null_twice(index, moves, null_block_id)

    def moves_in(self, kernel_group_idx: int, chunks: Iterable[int]) -> list[Move]:
        """What is read of a kernel group to store these chunks.

        Raises:
            ValueError: A block does not exist.
        """
        kept = self._kept(kernel_group_idx)
        moves = [Move(chunk, kept[chunk]) for chunk in chunks]
        if len(moves) == self.num_chunks:
            self._check_range(kernel_group_idx, kept)
        else:
            self._check_moves(kernel_group_idx, moves)
        return moves

    def moves_out(self, kernel_group_idx: int, num_chunks_in_sw: int, skip_first_n_tokens: int) -> list[Move]:
        """What is written of a kernel group to retrieve the chunks.

        Args:
            num_chunks_in_sw: Chunks that the window reaches over; -1: all.
            skip_first_n_tokens: Leading tokens whose slots stay as they are.

        Raises:
            ValueError: A block does not exist.
        """
        layout, kept = self.layout, self._kept(kernel_group_idx)
        start = skip_first_n_tokens // layout.lmcache_tokens_per_chunk  # the chunk that the skipped tokens end in
        if num_chunks_in_sw >= 0:
            start = max(start, self.num_chunks - num_chunks_in_sw)
        if start >= self.num_chunks:
            return []
        protected = skip_first_n_tokens - start * layout.lmcache_tokens_per_chunk
        first = layout.first_kept_slot(kernel_group_idx, protected)
        first_block, first_slot = divmod(first, layout.kernel_group(kernel_group_idx).slots_per_block)
        moves = [Move(chunk, kept[chunk]) for chunk in range(start + 1, self.num_chunks)]
        if first_block < kept.shape[1]:
            moves.insert(0, Move(start, kept[start, first_block:], first_block, first_slot))
        self._check_moves(kernel_group_idx, moves)
        return moves

    def has_null_twice(self, kernel_group_idx: int, moves: Sequence[Move], null_block_id: int | None) -> bool:
        """Whether the null block is written more than once.

        Raises:
            ValueError: Another block would be.
        """
        if not moves:
            return False
        ids = np.sort(np.concatenate([move.block_ids for move in moves]))
        again = ids[1:][ids[1:] == ids[:-1]]
        wrong = again if null_block_id is None else again[again != null_block_id]
        if wrong.size:
            raise ValueError(
                f"block_ids of kernel group {kernel_group_idx} hold block {wrong[0]} more than once, which would be "
                f"written twice; give each block once (only the null block, here {null_block_id}, may appear again)"
            )
        return bool(again.size)

    def _kept(self, kernel_group_idx: int) -> NDArray[np.int64]:
        """The blocks that a kernel group keeps of each chunk: the last ones."""
        return self.blocks(kernel_group_idx)[:, self._cut(kernel_group_idx) :]

    def _cut(self, kernel_group_idx: int) -> int:
        layout = self.layout
        return layout.blocks_per_chunk(kernel_group_idx) - layout.blocks_per_chunk_in_sw(kernel_group_idx)

    def _served(self) -> Iterator[tuple[int, int]]:
        """Object and kernel groups that are stored."""
        for object_group, group in enumerate(self.layout.object_groups):
            if not group.aux:
                for index in group.kernel_group_indices:
                    yield object_group, index

    def _check_moves(self, kernel_group_idx: int, moves: Sequence[Move]) -> None:
        if moves:
            self._check_range(kernel_group_idx, np.concatenate([move.block_ids for move in moves]), moves)

    def _check_range(self, kernel_group_idx: int, ids: NDArray[np.int64], moves: Sequence[Move] = ()) -> None:
        num_blocks = self.layout.kernel_group(kernel_group_idx).shape_desc.nb
        if not ids.size or (ids.min() >= 0 and ids.max() < num_blocks):
            return
        wrong: Any = int(ids[(ids < 0) | (ids >= num_blocks)].flat[0])
        if wrong == _NO_BLOCK and kernel_group_idx in self._given:
            given, cut = self._given[kernel_group_idx], self._cut(kernel_group_idx)
            rows = [(move.chunk, cut + move.first_block) for move in moves] or [(n, cut) for n in range(len(given))]
            wrong = next(each for row, start in rows for each in given[row, start:] if _id_of(each) == _NO_BLOCK)
        raise ValueError(
            f"block_ids of kernel group {kernel_group_idx} hold {wrong!r}, but its cache has blocks [0, {num_blocks})"
        )


def _as_array(ids: Any) -> NDArray[Any]:
    """Ids as they were given; of objects where one dtype of integers does not hold them all."""
    if not isinstance(ids, np.ndarray):
        try:
            array = np.asarray(ids)
        except (ValueError, OverflowError):
            return np.array(ids, dtype=object)
        if array.dtype.kind not in "iu":
            return np.array(ids, dtype=object)
        ids = array
    if ids.dtype.kind not in "iu" or (ids.dtype == np.uint64 and ids.size and int(ids.max()) >= 2**63):
        ids = ids.astype(object)
    return np.asarray(ids)


def _id_of(given: Any) -> int:
    if isinstance(given, int | np.integer) and not isinstance(given, bool) and -(2**63) < given < 2**63:
        return int(given)
    return _NO_BLOCK


def _lists(block_ids: Any, num_groups: int) -> Any:
    """Block ids as lists, one per engine group; what is in them is not looked at."""
    if isinstance(block_ids, np.ndarray):
        lists: Any = [block_ids] if block_ids.ndim <= 1 else list(block_ids)
    elif not isinstance(block_ids, Sequence) or isinstance(block_ids, str | bytes):
        foreign: Any = block_ids
        lists = [int64_array(foreign, "block_ids")]  # arrays of other libraries are flat lists of ids too
    else:
        lists = block_ids if len(block_ids) and _is_list(block_ids[0]) else [block_ids]
    if len(lists) < num_groups:
        raise ValueError(
            f"engine group {num_groups - 1} has no block ids: lists were given for {len(lists)} engine groups; give "
            f"one list of block ids per engine group, {num_groups} of them"
        )
    if num_groups == 1 and len(lists) > 1:
        raise ValueError(
            f"block_ids holds {len(lists)} lists, but there is one engine group; give its block ids as one flat list"
        )
    if len(lists) > num_groups:
        raise ValueError(f"block_ids holds {len(lists)} lists; give one per engine group, {num_groups} of them")
    return lists


def _is_list(value: Any) -> bool:
    return bool(value.ndim) if hasattr(value, "ndim") else isinstance(value, Sequence)
