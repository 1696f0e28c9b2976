"""SGLang's caches: an array per layer, or lists of K and of V layers."""

from __future__ import annotations

from typing import Any

from kvshm.contiguity import ArrayTree
from kvshm.formats.hints import LayoutHints, positive_hint
from kvshm.formats.leaves import Entry, Leaf, is_leaf, split_axis, unknown_layout
from kvshm.formats.names import EngineKVFormat as Format

__all__ = ["name_layer", "name_whole"]


def name_layer(entry: Entry, hints: LayoutHints) -> tuple[Format, Entry]:
    if isinstance(entry, list):
        raise unknown_layout("SGLang", entry, "a flat list of arrays")
    rank = len(entry.shape)
    if hints.get("kv_list_layout") == "unified":
        if rank in (3, 4):
            return (Format.NL_X_NB_BS_HS if rank == 3 else Format.NL_X_NB_BS_NH_HS), entry
        raise unknown_layout("SGLang", entry, "[NB, BS, HS] or [NB, BS, NH, HS] (kv_list_layout 'unified')")
    if "tokens_per_block" not in hints:
        return Format.NL_X_NBBS_ONE_HS, entry
    if rank == 3 and entry.shape[1] == 1:
        split: Any = _split_blocks(entry, hints)
        return Format.NL_X_NB_BS_HS, split[:, :, 0]
    return Format.NL_X_NB_BS_HS, entry


def name_whole(kv_caches: ArrayTree, hints: LayoutHints) -> tuple[Format, ArrayTree]:
    if is_leaf(kv_caches):
        raise unknown_layout("SGLang", kv_caches, "lists of arrays")
    if all(map(is_leaf, kv_caches)):
        return Format.TWO_X_NL_X_NB_BS_NH_HS, _pair_flat_list(kv_caches, hints)
    if not all(isinstance(layers, list) and all(map(is_leaf, layers)) for layers in kv_caches):
        raise unknown_layout("SGLang", kv_caches, "a list of K layers and a list of V layers")
    if len(kv_caches) != 2 or len(kv_caches[0]) != len(kv_caches[1]):
        raise ValueError(
            f"SGLang K/V lists must be two of one length, not {len(kv_caches)} of lengths "
            f"{[len(layers) for layers in kv_caches]}; give [K layers, V layers]"
        )
    name = Format.TWO_X_NL_X_NB_BS_NH_HS if len(kv_caches[0][0].shape) == 4 else Format.TWO_X_NL_X_NBBS_NH_HS
    return name, kv_caches


def _pair_flat_list(layers: list[Leaf], hints: LayoutHints) -> list[list[Leaf]]:
    """All K layers, then all V layers, each [NB * BS, NH, HS], as two lists of [NB, BS, NH, HS]."""
    half, odd = divmod(len(layers), 2)
    if odd:
        raise ValueError(
            f"kv_list_layout 'k_v' pairs array i with array i + half, but there are {len(layers)}; the last one, "
            f"{list(layers[-1].shape)}, does not pair"
        )
    for layer, (k, v) in enumerate(zip(layers[:half], layers[half:], strict=True)):
        if len(k.shape) != 3 or k.shape != v.shape or k.dtype != v.dtype:
            raise ValueError(
                f"kv_list_layout 'k_v' pairs arrays {layer} and {layer + half}, but K {list(k.shape)} of {k.dtype} and "
                f"V {list(v.shape)} of {v.dtype} do not pair; both must be [NB * BS, NH, HS] of one shape and dtype"
            )
    return [[_split_blocks(layer, hints) for layer in layers[start : start + half]] for start in (0, half)]


def _split_blocks(leaf: Leaf, hints: LayoutHints) -> Leaf:
    """[NB * BS, ...] as [NB, BS, ...]."""
    block_size = positive_hint(hints, "tokens_per_block")
    num_blocks, rest = divmod(leaf.shape[0], block_size)
    if rest:
        raise ValueError(
            f"array {list(leaf.shape)} has {leaf.shape[0]} slots, which is no multiple of the layout hint "
            f"'tokens_per_block' {block_size}"
        )
    return split_axis(leaf, 0, (num_blocks, block_size))
