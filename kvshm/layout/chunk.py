"""What the bytes of a chunk object mean.

Two engines share an object exactly if its bytes mean the same to both. A chunk is [kv, layer, slot, hidden] whatever
the paged cache looked like, so the size of a block, the order of heads and slots, the format's name, the number of
blocks and who copies are no part of its meaning. What is::

    per object        tokens of a chunk, its kernel groups in order
    per kernel group  K and V apart or one plane; layers; elements of a slot and how they are packed (K apart from V,
                      one latent, [K|V] of each head, several planes side by side); dtype; slots kept of a chunk; tokens
                      of a slot; attention, recurrent state or a tag
    per page that is  the block's own size: index pages and recurrent state are moved block for block
    no row of tokens
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple, dataclass

from kvshm.dtypes import dtype_name
from kvshm.layout.groups import GroupKind, KVLayerGroupsManager

__all__ = [
    "KernelGroupMeaning",
    "ObjectLayout",
    "object_layouts",
    "object_meaning",
]

_DIGEST_NBYTES = 16


@dataclass(frozen=True, slots=True)
class KernelGroupMeaning:
    """What one kernel group's part of a chunk object means."""

    kv_size: int
    layers: tuple[int, ...]
    hidden_size: int  # elements of one slot in one plane
    packing: tuple[str, ...]  # of a slot's elements: one for all layers, or one for each
    dtype: str
    num_slots: int  # that a chunk keeps
    tokens_per_slot: int
    kind: str = "attention"
    slots_per_block: int = 0  # of pages that are no rows of tokens, else 0


@dataclass(frozen=True, slots=True)
class ObjectLayout:
    """The chunk objects of one object group: what their bytes mean, their size, and which of them a hit needs."""

    meaning: bytes  # equal for objects that engines may share
    nbytes: int
    num_chunks_in_sw: int = -1  # last chunks that a hit needs; -1: all
    kind: GroupKind = "attention"

    @property
    def is_served(self) -> bool:
        """Whether lookups and retrieves are about these objects. Those of a tag are not."""
        return self.kind != "aux"

    def needed_chunks(self, num_chunks: int) -> range:
        """Which of the first ``num_chunks`` chunks a hit of all of them needs."""
        window = self.num_chunks_in_sw
        return range(0 if window < 0 else max(0, num_chunks - window), num_chunks)


def object_layouts(manager: KVLayerGroupsManager) -> tuple[ObjectLayout, ...]:
    """The chunk objects of a layout, one per object group. The same in every process."""
    windows = manager.get_attn_desc()
    return tuple(
        ObjectLayout(
            object_meaning(
                manager.lmcache_tokens_per_chunk,
                tuple(_group_meaning(manager, kernel_group) for kernel_group in group.kernel_group_indices),
            ),
            manager.object_nbytes(index),
            windows.num_chunks_in_sw[index],
            windows.group_kinds[index],
        )
        for index, group in enumerate(manager.object_groups)
    )


def object_meaning(tokens_per_chunk: int, groups: tuple[KernelGroupMeaning, ...]) -> bytes:
    """A digest of what an object means: 16 bytes, the same in every process."""
    facts = ["kvshm chunk", 1, tokens_per_chunk, [astuple(group) for group in groups]]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=_DIGEST_NBYTES).digest()


def _group_meaning(manager: KVLayerGroupsManager, kernel_group_idx: int) -> KernelGroupMeaning:
    group = manager.kernel_group(kernel_group_idx)
    packings = manager.packings(kernel_group_idx)
    kind = "recurrent" if group.recurrent_state else "attention"
    if group.extra_object_group_tag:
        kind = f"{kind}, tag {group.extra_object_group_tag}"
    return KernelGroupMeaning(
        kv_size=group.shape_desc.kv_size,
        layers=group.layer_indices,
        hidden_size=group.hidden_dim_size,
        packing=packings[:1] if len(set(packings)) == 1 else packings,
        dtype=dtype_name(group.dtype),
        num_slots=manager.get_slots_per_chunk_in_sw(kernel_group_idx),
        tokens_per_slot=group.tokens_per_block // group.slots_per_block,
        kind=kind,
        slots_per_block=group.slots_per_block if manager.moves_whole_blocks(kernel_group_idx) else 0,
    )
