"""Lists of block ids per group: cut to a range of tokens or a window, searched for null blocks. LMCache's functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvshm.layout.groups import KVLayerGroupsManager, ObjectGroupInfo

__all__ = [
    "all_null_chunk_masks",
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
