"""TRT-LLM's cache: one pool for all layers."""

from __future__ import annotations

from kvshm.contiguity import ArrayTree
from kvshm.formats.hints import LayoutHints, positive_hint
from kvshm.formats.leaves import is_leaf, split_axis, unknown_layout
from kvshm.formats.names import EngineKVFormat as Format

__all__ = ["name_whole"]


def name_whole(kv_caches: ArrayTree, hints: LayoutHints) -> tuple[Format, ArrayTree]:
    pool = kv_caches if is_leaf(kv_caches) else kv_caches[0] if len(kv_caches) == 1 else None
    if pool is None or not is_leaf(pool) or len(pool.shape) not in (4, 6):
        raise unknown_layout("TRT-LLM", kv_caches, "one pool [NB, NL, 2, NH * BS * HS] or [NB, NL, 2, NH, BS, HS]")
    if len(pool.shape) == 4:
        sizes = tuple(positive_hint(hints, key) for key in ("num_kv_heads", "tokens_per_block", "head_dim"))
        if pool.shape[3] != sizes[0] * sizes[1] * sizes[2]:
            raise ValueError(
                f"a pool {list(pool.shape)} holds {pool.shape[3]} elements a plane, but the layout hints num_kv_heads, "
                f"tokens_per_block and head_dim {list(sizes)} make {sizes[0] * sizes[1] * sizes[2]}"
            )
        pool = split_axis(pool, 3, sizes)
    return Format.NB_NL_TWO_NH_BS_HS, pool
