"""vLLM's caches: an array per layer, K and V as a pair, planes of sparse attention, or one array for all layers."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import numpy as np

from kvshm.contiguity import ArrayTree
from kvshm.formats.hints import LayoutHints, is_heads_first
from kvshm.formats.leaves import Entry, Leaf, is_leaf, unknown_layout
from kvshm.formats.names import EngineKVFormat as Format

__all__ = ["INDEX_PAGE_WIDTH", "name_layer", "name_whole"]

INDEX_PAGE_WIDTH = 132  # bytes of a slot of an index page: 128 values and one float32 scale

log = logging.getLogger("kvshm")


def name_layer(entry: Entry, hints: LayoutHints) -> tuple[Format, Entry]:
    if isinstance(entry, list):
        heads_first = is_heads_first(hints)  # a wrong hint is refused even where none is needed
        name = _vllm_planes(entry)
        if name is Format.NL_X_TWO_X_NB_BS_NH_HS and heads_first:
            pair: list[Any] = entry
            return name, [plane.transpose((0, 2, 1, 3)) for plane in pair]  # stored [NB, NH, BS, HS]
        return name, entry
    shape, rank = entry.shape, len(entry.shape)
    is_index_page = entry.dtype == np.uint8 and shape[-1] == INDEX_PAGE_WIDTH
    heads_first = _heads_first(hints, shape if rank in (4, 5) else None)
    if rank == 3:
        return (Format.NL_X_NB_BSV_BSS if is_index_page else Format.NL_X_NB_BS_HS), entry
    if rank == 4:
        if is_index_page and shape[1 if heads_first else 2] == 1:
            page: Any = entry
            return Format.NL_X_NB_BSV_BSS, page[:, 0] if heads_first else page[:, :, 0]
        return (Format.NL_X_NB_NH_BS_CS if heads_first else Format.NL_X_NB_BS_NH_CS), entry
    if rank == 5 and shape[0] == 2:
        return (Format.NL_X_TWO_NB_NH_BS_HS if heads_first else Format.NL_X_TWO_NB_BS_NH_HS), entry
    if rank == 5 and shape[1] == 2:
        return (Format.NL_X_NB_TWO_NH_BS_HS if heads_first else Format.NL_X_NB_TWO_BS_NH_HS), entry
    if rank == 6 and shape[0] == 2 and shape[3] == 1:
        return Format.NL_X_TWO_NB_NH_ONE_BS_HS, entry
    raise unknown_layout("vLLM", entry, "rank 3, 4, 5 with a K/V axis of 2 first or second, or [2, NB, NH, 1, BS, HS]")


def _vllm_planes(planes: list[Leaf]) -> Format:
    if all(is_leaf(plane) and len(plane.shape) == 4 for plane in planes):
        one_head = all(plane.shape[2] == 1 for plane in planes)
        if one_head and (len(planes) in (1, 3) or len({plane.shape[-1] for plane in planes}) > 1):
            return Format.NL_X_NP_X_NB_BS_ONE_HS
        if len(planes) == 2:
            return Format.NL_X_TWO_X_NB_BS_NH_HS
    raise unknown_layout("vLLM", planes, "K and V of rank 4, or planes [NB, BS, 1, width]")


def _heads_first(hints: LayoutHints, ambiguous_shape: tuple[int, ...] | None) -> bool:
    hint = is_heads_first(hints)
    if hint is None and ambiguous_shape is not None:
        _warn_of_default_layout()
    return hint is not False


@lru_cache(maxsize=1)
def _warn_of_default_layout() -> None:
    log.warning(
        "no layout hint: the shape of a vLLM cache cannot tell HND from NHD, and HND is taken; pass "
        'layout_hints={"kv_layout": "NHD"} or {"kv_layout": "HND"} to say which it is'
    )


def name_whole(kv_caches: ArrayTree, hints: LayoutHints) -> tuple[Format, ArrayTree]:
    _heads_first(hints, None)  # as above
    if len(kv_caches.shape) == 6 and kv_caches.shape[2] == 2:
        return Format.NB_NL_TWO_BS_NH_HS, kv_caches
    raise unknown_layout("vLLM", kv_caches, "one array for all layers [NB, NL, 2, BS, NH, HS]")
