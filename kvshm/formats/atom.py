"""ATOM's caches: an array of latents per layer."""

from __future__ import annotations

from kvshm.contiguity import ArrayTree
from kvshm.formats.hints import LayoutHints
from kvshm.formats.leaves import Entry, unknown_layout
from kvshm.formats.names import EngineKVFormat as Format

__all__ = ["name_layer", "name_whole"]


def name_layer(entry: Entry, hints: LayoutHints) -> tuple[Format, Entry]:
    if isinstance(entry, list) or len(entry.shape) != 3:
        raise unknown_layout("ATOM", entry, "a flat list of arrays [NB, BS, HS]")
    return Format.NL_X_NB_BS_HS, entry


def name_whole(kv_caches: ArrayTree, hints: LayoutHints) -> tuple[Format, ArrayTree]:
    raise unknown_layout("ATOM", kv_caches, "a flat list of arrays [NB, BS, HS]")
