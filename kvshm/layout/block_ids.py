"""Block ids per group: checked against a layout, cut to a range of tokens or a window, searched for null blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvshm.integers import Ints, int64_array
from kvshm.layout.groups import KVLayerGroupsManager, ObjectGroupInfo

__all__ = [
    "BlockIds",
    "all_null_chunk_masks",
    "check_to_retrieve",
    "check_to_store",
    "chunks_with_data",
    "downsample_block_ids",
    "recalculate_blocks_to_skip",
    "slice_block_ids_per_group",
]


def slice_block_ids_per_group(
    allocated_block_ids: Mapping[int, Sequence[int]],
    group_tokens_per_block: Sequence[int],
    start_token_idx: int,
    end_token_idx: int,
) -> list[list[int]]:
    """Per engine group, the block ids of the tokens ``[start, end)``.

    Args:
        allocated_block_ids: Per engine group id, its block ids from token 0 on; a group may be missing.
        group_tokens_per_block: Per engine group, tokens that one block id covers; 0: a scratch group, which gets none.

    Raises:
        ValueError: The range is negative or does not begin and end between blocks.
    """
    if start_token_idx < 0 or end_token_idx < 0:
        raise ValueError(f"token range [{start_token_idx}, {end_token_idx}) must not be negative")
    sliced: list[list[int]] = []
    for engine_group, tokens in enumerate(group_tokens_per_block):
        if tokens < 0:
            raise ValueError(f"engine group {engine_group} has blocks of {tokens} tokens; give 0 for a scratch group")
        if tokens and (start_token_idx % tokens or end_token_idx % tokens):
            raise ValueError(
                f"token range [{start_token_idx}, {end_token_idx}) cuts through blocks of {tokens} tokens of engine "
                f"group {engine_group}; use multiples of {tokens}"
            )
        blocks = slice(start_token_idx // tokens, end_token_idx // tokens) if tokens else slice(0)
        sliced.append(list(allocated_block_ids.get(engine_group, ())[blocks]))
    return sliced


def downsample_block_ids(manager: KVLayerGroupsManager, block_ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Per kernel group, the block ids that move: of each chunk the last ones, as many as its window takes.

    Args:
        block_ids: Per kernel group, the block ids of whole chunks in order.

    Raises:
        ValueError: Not one list per kernel group, or a list that is no whole number of chunks.
    """
    groups = manager.kernel_groups
    if len(block_ids) != len(groups):
        raise ValueError(f"block ids came for {len(block_ids)} kernel groups, but there are {len(groups)}")
    return [
        _last_of_each(list(ids), index, manager.blocks_per_chunk(index), manager.blocks_per_chunk_in_sw(index))
        for index, ids in enumerate(block_ids)
    ]


def _last_of_each(ids: list[int], index: int, per_chunk: int, per_window: int) -> list[int]:
    if len(ids) % per_chunk:
        raise ValueError(
            f"kernel group {index} has {len(ids)} block ids, which is no multiple of its {per_chunk} blocks a chunk"
        )
    if per_window == per_chunk:
        return ids
    skipped = per_chunk - per_window
    return [block for start in range(0, len(ids), per_chunk) for block in ids[start + skipped : start + per_chunk]]


def recalculate_blocks_to_skip(blocks_per_chunk: int, blocks_per_window: int, blocks_to_skip: int) -> int:
    """Blocks to skip once only the last ``blocks_per_window`` of every ``blocks_per_chunk`` blocks are left.

    Raises:
        ValueError: A negative number, or chunks of no blocks with a window.
    """
    if min(blocks_per_chunk, blocks_per_window, blocks_to_skip) < 0:
        raise ValueError(
            f"blocks_per_chunk {blocks_per_chunk}, blocks_per_window {blocks_per_window} and blocks_to_skip "
            f"{blocks_to_skip} must not be negative"
        )
    if blocks_per_chunk == blocks_per_window:
        return blocks_to_skip
    if not blocks_per_chunk:
        raise ValueError(f"chunks of no blocks cannot have a window of {blocks_per_window} blocks")
    chunks, rest = divmod(blocks_to_skip, blocks_per_chunk)
    return chunks * blocks_per_window + max(0, rest - (blocks_per_chunk - blocks_per_window))


def all_null_chunk_masks(
    block_ids: Sequence[Sequence[int]],
    object_groups: Sequence[ObjectGroupInfo],
    blocks_per_chunk: Sequence[int],
    num_chunks: int,
    null_block_id: int = 0,
) -> list[list[bool]]:
    """Per object group and chunk, whether all its blocks are the null block, so that there is nothing to store.

    Args:
        block_ids: Per kernel group, the block ids of whole chunks in order.
        blocks_per_chunk: Per kernel group, its block ids of one chunk.

    Raises:
        ValueError: A negative number, or too few block ids.
        IndexError: An object group names a kernel group that has no block ids.
    """
    if num_chunks < 0 or min(blocks_per_chunk, default=0) < 0:
        raise ValueError(f"num_chunks {num_chunks} and blocks_per_chunk {list(blocks_per_chunk)} must not be negative")
    return [_all_null_chunks(block_ids, group, blocks_per_chunk, num_chunks, null_block_id) for group in object_groups]


def _all_null_chunks(
    block_ids: Sequence[Sequence[int]],
    object_group: ObjectGroupInfo,
    blocks_per_chunk: Sequence[int],
    num_chunks: int,
    null_block_id: int,
) -> list[bool]:
    mask = [True] * num_chunks
    for index in object_group.kernel_group_indices:
        if not 0 <= index < min(len(block_ids), len(blocks_per_chunk)):
            raise IndexError(f"kernel group {index} has no block ids: lists were given for {len(block_ids)} groups")
        ids, per_chunk = block_ids[index], blocks_per_chunk[index]
        if len(ids) < per_chunk * num_chunks:
            raise ValueError(
                f"kernel group {index} has {len(ids)} block ids; {num_chunks} chunks of {per_chunk} blocks take "
                f"{per_chunk * num_chunks}"
            )
        for chunk in range(num_chunks):
            blocks = ids[chunk * per_chunk : (chunk + 1) * per_chunk]
            mask[chunk] = mask[chunk] and all(block == null_block_id for block in blocks)
    return mask


@dataclass(frozen=True, slots=True, eq=False)
class BlockIds:
    """Block ids of whole chunks, per kernel group: as many as the chunks take, of 64 bits.

    Which of them move depends on what is done with them, so :func:`check_to_store` and :func:`check_to_retrieve` look
    at their range. Those that do not move may be anything.
    """

    groups: tuple[NDArray[np.int64], ...]  # per kernel group [chunk, block of the chunk]
    num_chunks: int

    @classmethod
    def of_kernel_groups(
        cls, manager: KVLayerGroupsManager, block_ids: Sequence[NDArray[np.int64]], num_chunks: int
    ) -> BlockIds:
        """From one list per kernel group that holds just the ids of the chunks.

        Raises:
            ValueError: Too few or too many ids, or lists.
        """
        per_chunk = [manager.blocks_per_chunk(index) for index in range(len(manager.kernel_groups))]
        wanted, given = [count * num_chunks for count in per_chunk], [len(ids) for ids in block_ids]
        if given != wanted:
            raise ValueError(
                f"{num_chunks} chunks take {wanted} block ids per kernel group, but {given} came; "
                f"give blocks_per_chunk * chunks ids for every group"
            )
        return cls(
            tuple(ids.reshape(num_chunks, count) for ids, count in zip(block_ids, per_chunk, strict=True)), num_chunks
        )

    @classmethod
    def of_engine_groups(
        cls, manager: KVLayerGroupsManager, block_ids: Sequence[Ints] | Ints, num_chunks: int
    ) -> BlockIds:
        """From what an engine gives: one list per engine group, or one flat list where there is one group.

        Ids beyond those of the chunks are not looked at.

        Raises:
            ValueError: No such lists, too few ids, or something is no integer.
        """
        groups = manager.kernel_groups
        num_groups = 1 + max(group.engine_group_idx for group in groups)
        lists = _lists(block_ids, num_groups)
        arrays: list[NDArray[np.int64]] = []
        for index, group in enumerate(groups):
            array = int64_array(lists[group.engine_group_idx], f"block_ids of kernel group {index}")
            count = manager.blocks_per_chunk(index)
            if array.size < count * num_chunks:
                raise ValueError(
                    f"{num_chunks} chunks of {manager.lmcache_tokens_per_chunk} tokens take {count * num_chunks} "
                    f"blocks of kernel group {index}, but {array.size} block ids came"
                )
            # A copy: the caller may use its array for other ids while the blocks of these are still being read.
            arrays.append(array[: count * num_chunks].copy().reshape(num_chunks, count))
        return cls(tuple(arrays), num_chunks)

    def first_chunks(self, num_chunks: int) -> BlockIds:
        """Those of the first chunks."""
        return BlockIds(tuple(ids[:num_chunks] for ids in self.groups), num_chunks)

    def flat(self) -> list[NDArray[np.int64]]:
        """One list per kernel group."""
        return [ids.reshape(-1) for ids in self.groups]


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


def chunks_with_data(
    manager: KVLayerGroupsManager,
    ids: BlockIds,
    object_group_idx: int,
    null_block_id: int | None,
) -> NDArray[np.bool_]:
    """Per chunk, whether no block that the object group keeps of it is the null block: else there is nothing to store.

    Blocks outside a window are not kept, so they may be null.
    """
    has_data = np.ones(ids.num_chunks, np.bool_)
    if null_block_id is not None:
        for index in manager.object_group(object_group_idx).kernel_group_indices:
            has_data &= (_kept(manager, ids, index) != null_block_id).all(axis=1)
    return has_data


def check_to_store(manager: KVLayerGroupsManager, ids: BlockIds, null_block_id: int | None) -> None:
    """Check that all blocks that are kept exist, or are the null block.

    Raises:
        ValueError: One does not.
    """
    for index in _served_kernel_groups(manager):
        _check_range(manager, index, _kept(manager, ids, index).reshape(-1), null_block_id)


def check_to_retrieve(
    manager: KVLayerGroupsManager, ids: BlockIds, skip_first_n_tokens: int, null_block_id: int | None
) -> None:
    """Check that all blocks that would be written exist, and that none would be written twice.

    The null block may be there more than once.

    Raises:
        ValueError: One does not, or would be.
    """
    windows = manager.get_attn_desc()
    for object_group, window in zip(manager.object_groups, windows.num_chunks_in_sw, strict=True):
        if object_group.aux:
            continue
        first_chunk = 0 if window < 0 else max(0, ids.num_chunks - window)
        for index in object_group.kernel_group_indices:
            blocks = _written(manager, index, _kept(manager, ids, index), first_chunk, skip_first_n_tokens)
            _check_range(manager, index, blocks, None)
            unique, counts = np.unique(blocks, return_counts=True)
            twice = unique[counts > 1]
            twice = twice if null_block_id is None else twice[twice != null_block_id]
            if twice.size:
                raise ValueError(
                    f"block_ids of kernel group {index} hold block {twice[0]} more than once, which would be written "
                    f"twice; give each block once"
                )


def _written(
    manager: KVLayerGroupsManager,
    kernel_group_idx: int,
    kept: NDArray[np.int64],
    first_chunk: int,
    skip_first_n_tokens: int,
) -> NDArray[np.int64]:
    """The kept blocks that a retrieve writes; of the chunk that the skipped tokens end in, the last ones."""
    chunk_size = manager.lmcache_tokens_per_chunk
    start = max(first_chunk, skip_first_n_tokens // chunk_size)
    if start >= len(kept):
        return kept[:0].reshape(-1)
    first_slot = manager.first_kept_slot(kernel_group_idx, skip_first_n_tokens - start * chunk_size)
    first_block = first_slot // manager.kernel_group(kernel_group_idx).slots_per_block
    return np.concatenate([kept[start, first_block:], kept[start + 1 :].reshape(-1)])


def _kept(manager: KVLayerGroupsManager, ids: BlockIds, kernel_group_idx: int) -> NDArray[np.int64]:
    """The blocks that a kernel group keeps of each chunk: the last ones."""
    cut = manager.blocks_per_chunk(kernel_group_idx) - manager.blocks_per_chunk_in_sw(kernel_group_idx)
    return ids.groups[kernel_group_idx][:, cut:]


def _served_kernel_groups(manager: KVLayerGroupsManager) -> Iterator[int]:
    for group in manager.object_groups:
        if not group.aux:
            yield from group.kernel_group_indices


def _check_range(
    manager: KVLayerGroupsManager, index: int, blocks: NDArray[np.int64], null_block_id: int | None
) -> None:
    num_blocks = manager.kernel_group(index).shape_desc.nb
    if not blocks.size or 0 <= blocks.min() <= blocks.max() < num_blocks:
        return
    wrong = blocks[(blocks < 0) | (blocks >= num_blocks)]
    wrong = wrong if null_block_id is None else wrong[wrong != null_block_id]
    if wrong.size:
        raise ValueError(
            f"block_ids of kernel group {index} hold {wrong[0]}, but its cache has blocks [0, {num_blocks})"
        )
