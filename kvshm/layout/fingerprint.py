"""What tells layouts apart: a chunk written in one must never be read in another."""

from __future__ import annotations

import hashlib
import json

from kvshm.dtypes import dtype_name
from kvshm.layout.groups import KVLayerGroupsManager

__all__ = ["FINGERPRINT_NBYTES", "layout_fingerprint"]

FINGERPRINT_NBYTES = 16


def layout_fingerprint(manager: KVLayerGroupsManager) -> bytes:
    """A hash of all that the bytes of chunk objects depend on: layers, formats, dtypes, sizes, windows and groups.

    The number of blocks and the padding between them are no part of it. The same in every process.
    """
    kernel_groups = [
        (
            group.layer_indices,
            group.format.name if group.format is not None else "",
            dtype_name(group.dtype),
            [group.shape_desc.kv_size, group.shape_desc.bs, group.shape_desc.nh, group.shape_desc.hs],
            [group.tokens_per_block, group.engine_group_idx, group.sw_size_tokens, group.extra_object_group_tag],
            group.recurrent_state,
            manager.get_slots_per_chunk_in_sw(index),
        )
        for index, group in enumerate(manager.kernel_groups)
    ]
    object_groups = [group.kernel_group_indices for group in manager.object_groups]
    windows = manager.get_attn_desc().num_chunks_in_sw
    facts = [manager.lmcache_tokens_per_chunk, kernel_groups, object_groups, windows]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=FINGERPRINT_NBYTES).digest()
