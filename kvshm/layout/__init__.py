"""How a cache is cut into chunk objects: which layers move together, in what order, and how many bytes each takes.

``engine_groups`` is what an engine says of its layers, ``groups`` makes kernel groups and object groups of it,
``moves`` says which blocks a store reads and a retrieve writes, ``block_ids`` works on plain lists of block ids,
``chunk`` says what the bytes of a chunk object mean, ``shape_spec`` is the one-line notation of a cache's shape.
Nothing here touches memory: arrays and specs give the same layout.
"""

from kvshm.layout.block_ids import (
    all_null_chunk_masks,
    downsample_block_ids,
    recalculate_blocks_to_skip,
    slice_block_ids_per_group,
)
from kvshm.layout.chunk import ObjectLayout, object_layouts
from kvshm.layout.engine_groups import (
    EngineGroupInfo,
    engine_group_layer_indices,
    expand_engine_block_ids,
    get_engine_group_indices,
    num_engine_group_infos,
    num_engine_groups,
)
from kvshm.layout.groups import (
    AttentionWindows,
    KernelGroupInfo,
    KVLayerGroupsManager,
    ObjectGroupInfo,
    PageBufferShapeDesc,
)
from kvshm.layout.moves import BlockIds, Move
from kvshm.layout.shape_spec import format_kvcache_shape_spec, parse_kvcache_shape_spec

__all__ = [
    "AttentionWindows",
    "BlockIds",
    "EngineGroupInfo",
    "KVLayerGroupsManager",
    "KernelGroupInfo",
    "Move",
    "ObjectGroupInfo",
    "ObjectLayout",
    "PageBufferShapeDesc",
    "all_null_chunk_masks",
    "downsample_block_ids",
    "engine_group_layer_indices",
    "expand_engine_block_ids",
    "format_kvcache_shape_spec",
    "get_engine_group_indices",
    "num_engine_group_infos",
    "num_engine_groups",
    "object_layouts",
    "parse_kvcache_shape_spec",
    "recalculate_blocks_to_skip",
    "slice_block_ids_per_group",
]
