"""A slow, obvious transfer: one element at a time, from the axes that a format's name spells out.

It works on the specs of a normalised cache within one buffer and on plain integers; no view of kvshm's is involved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvshm.formats import EngineKVFormat
from kvshm.layout import KernelGroupInfo, KVLayerGroupsManager
from kvshm.spec import ArraySpec


class Element(NamedTuple):
    """Some bytes of a cache: where they are in the buffer, and which of the chunk's kept slots they belong to."""

    address: int
    nbytes: int
    slot: int


def elements(normalised: Any, group: KernelGroupInfo, block_ids: Sequence[int]) -> Iterator[Element]:
    """What a chunk of these blocks holds of a kernel group, in the order of the chunk: [kv, layer, slot, hidden]."""
    assert group.format is not None
    for kv in range(group.shape_desc.kv_size):
        for layer in group.layer_indices:
            for position, block in enumerate(block_ids):
                for slot in range(group.slots_per_block):
                    for leaf in _leaves(normalised, group.format, layer, kv):
                        at = position * group.slots_per_block + slot
                        yield from _row(leaf, group.format, layer, kv, block, slot, at)


def _leaves(normalised: Any, format: EngineKVFormat, layer: int, kv: int) -> list[ArraySpec]:
    nodes = [normalised]
    for level in format.lists:
        if level == "NP":
            nodes = [plane for node in nodes for plane in node]
        else:
            nodes = [node[layer if level == "NL" else kv] for node in nodes]
    return nodes


def _row(
    leaf: ArraySpec, format: EngineKVFormat, layer: int, kv: int, block: int, slot: int, at: int
) -> Iterator[Element]:
    size = dict(zip(format.axes, leaf.shape, strict=True))
    # In the formats that end in TWO, HS one head's row holds K and V one after the other.
    packed = range(2) if format.axes[-2:] == ("TWO", "HS") else range(kv, kv + 1)
    for head in range(size.get("NH", 1)):
        for two in packed:
            for element in range(size[format.axes[-1]]):
                index = {"NL": layer, "NB": block, "BS": slot, "NH": head, "TWO": two, "ONE": 0}
                index[format.axes[-1]] = element
                steps = (index[axis] * step for axis, step in zip(format.axes, leaf.stride, strict=True))
                itemsize = leaf.dtype.itemsize
                yield Element((leaf.storage_offset + sum(steps)) * itemsize, itemsize, at)


def kept_block_ids(
    manager: KVLayerGroupsManager, kernel_group_idx: int, block_ids: Sequence[int], chunk: int
) -> Sequence[int]:
    """The blocks of a chunk that its window reaches."""
    tokens_per_block = manager.kernel_groups[kernel_group_idx].tokens_per_block
    per_chunk = manager.lmcache_tokens_per_chunk // tokens_per_block
    kept = manager.get_subchunk_sw_size_tokens(kernel_group_idx) // tokens_per_block
    return block_ids[(chunk + 1) * per_chunk - kept : (chunk + 1) * per_chunk]


def slow_gather(
    memory: bytes, normalised: Any, manager: KVLayerGroupsManager, block_ids: Sequence[Any], chunk: int, group: int
) -> bytes:
    """One chunk object."""
    found = bytearray()
    for index in manager.object_groups[group].kernel_group_indices:
        kept = kept_block_ids(manager, index, block_ids[index], chunk)
        for element in elements(normalised, manager.kernel_groups[index], kept):
            found += memory[element.address : element.address + element.nbytes]
    return bytes(found)


def slow_scatter(
    memory: bytes,
    normalised: Any,
    manager: KVLayerGroupsManager,
    block_ids: Sequence[Any],
    chunks: Sequence[bytes | None],
    group: int,
    skip_first_n_tokens: int = 0,
    *,
    rounded: bool = False,
) -> bytes:
    """The memory of the cache afterwards; chunks in order, so that of two writes the later stays.

    Args:
        rounded: Protect whole blocks only, as LMCache does.
    """
    after = bytearray(memory)
    window = manager.get_attn_desc().num_chunks_in_sw[group]
    for chunk, data in enumerate(chunks):
        if data is None or 0 <= window <= len(chunks) - 1 - chunk:
            continue
        at = 0
        for index in manager.object_groups[group].kernel_group_indices:
            kernel_group = manager.kernel_groups[index]
            protected = skip_first_n_tokens
            is_page = kernel_group.recurrent_state or kernel_group.format is EngineKVFormat.NL_X_NB_BSV_BSS
            if rounded or is_page:  # pages that are no rows of tokens are written whole or not at all
                protected -= protected % kernel_group.tokens_per_block
            kept_tokens = manager.get_subchunk_sw_size_tokens(index)
            first_token = (chunk + 1) * manager.lmcache_tokens_per_chunk - kept_tokens
            tokens_per_slot = kernel_group.tokens_per_block // kernel_group.slots_per_block
            kept = kept_block_ids(manager, index, block_ids[index], chunk)
            for element in elements(normalised, kernel_group, _anything(kept)):
                if first_token + element.slot * tokens_per_slot >= protected:
                    after[element.address : element.address + element.nbytes] = data[at : at + element.nbytes]
                at += element.nbytes
    return bytes(after)


def _anything(block_ids: Sequence[Any]) -> list[int]:
    """Ids that move nothing may be anything; their elements are counted and not used."""
    return [block if isinstance(block, int) else 0 for block in block_ids]
