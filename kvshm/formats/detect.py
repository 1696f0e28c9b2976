"""Which format a cache has: from the engine, the hints it gives, and the shapes.

Each engine has one function that names a single entry of its layer list, after the axes were put in memory order.
A structure has one format when all its entries get the same name; layers of a hybrid model may each have their own.
What a name promises of the arrays (rank, axes of 1 and 2, dtype of an index page, K and V alike) is checked here,
once, for whatever named it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from kvshm.contiguity import ArrayTree, attempt_permute_to_contiguous_view, axes_in_memory
from kvshm.formats.hints import LayoutHints, checked_hints, is_heads_first, positive_hint
from kvshm.formats.names import EngineKVFormat as Format
from kvshm.spec import ArraySpec, restride

__all__ = [
    "EngineType",
    "LayoutHints",
    "block_axis_of",
    "count_layers",
    "detect_format",
    "normalize_and_discover_per_layer_formats",
]

log = logging.getLogger("kvshm")

Leaf: TypeAlias = "ArraySpec | np.ndarray[Any, Any]"
Entry: TypeAlias = "Leaf | list[Leaf]"

INDEX_PAGE_WIDTH = 132  # bytes of a slot of an index page: 128 values and one float32 scale


class EngineType(Enum):
    """Engines whose caches kvshm knows; every ``engine_type=`` takes the member or its value."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRTLLM = "trtllm"
    ATOM = "atom"
    MOCK = "mock"

    @classmethod
    def _missing_(cls, value: object) -> EngineType:
        raise ValueError(f"unknown engine {value!r}; known are {', '.join(engine.value for engine in cls)}")


def detect_format(
    kv_caches: ArrayTree, engine_type: EngineType | str, layout_hints: LayoutHints | None = None
) -> tuple[Format, ArrayTree]:
    """The one format of a whole structure, and the structure in its normal form.

    Args:
        kv_caches: Arrays or specs, bare or in (nested) lists, as the engine holds them.
        layout_hints: See :data:`LayoutHints`. An explicit hint is obeyed; without one vLLM means HND, as LMCache on
            a CPU host, and a warning names the hint.

    Returns:
        ``(format, normalised)``: views of the same bytes, of the same kind as given: axes in memory order, folded
        block axes split, K and V lists paired.

    Raises:
        ValueError: No format fits every array, or a hint is missing or wrong.
    """
    engine, hints = EngineType(engine_type), checked_hints(layout_hints)
    _check_structure(kv_caches)
    if not _is_layer_list(kv_caches, engine, hints):
        return _name_whole(kv_caches, engine, hints)
    named = [_name_layer(entry, engine, hints) for entry in kv_caches]
    first = named[0][0]
    for layer, (name, _) in enumerate(named):
        if name != first:
            raise ValueError(
                f"layer 0 is {first.name} but layer {layer} is {name.name}; a structure has one format, register "
                f"layers of different formats through normalize_and_discover_per_layer_formats"
            )
    return first, [normalised for _, normalised in named]


def normalize_and_discover_per_layer_formats(
    kv_caches: ArrayTree,
    layer_index_groups: Sequence[Sequence[int]],
    engine_type: EngineType | str,
    layout_hints: LayoutHints | None = None,
) -> tuple[ArrayTree, list[Format]]:
    """The structure in its normal form, and one format per layer.

    Args:
        layer_index_groups: Layers of each engine group; empty: all layers. A layer in no group is not looked at: it
            comes back as it is and takes the format of the first layer that has one.

    Raises:
        ValueError: As :func:`detect_format`; no layer in any group; a layer index out of range.
    """
    engine, hints = EngineType(engine_type), checked_hints(layout_hints)
    _check_list(kv_caches)
    if not _is_layer_list(kv_caches, engine, hints):
        _check_structure(kv_caches)
        name, normalised = _name_whole(kv_caches, engine, hints)
        num_layers = normalised.shape[1] if name.is_cross_layer else len(normalised[0])
        return normalised, [name] * num_layers
    wanted = [layer for group in layer_index_groups for layer in group] if layer_index_groups else range(len(kv_caches))
    if not wanted:
        raise ValueError("no layer is in any group; name the layers of at least one engine group")
    named: dict[int, tuple[Format, Entry]] = {}
    for layer in wanted:
        if not 0 <= layer < len(kv_caches):
            raise ValueError(f"a group names layer {layer}, but the layers are 0 to {len(kv_caches) - 1}")
        if layer not in named:
            _check_structure(kv_caches[layer])
            named[layer] = _name_layer(kv_caches[layer], engine, hints)
    fallback = named[wanted[0]][0]
    layers = range(len(kv_caches))
    return (
        [named[layer][1] if layer in named else kv_caches[layer] for layer in layers],
        [named[layer][0] if layer in named else fallback for layer in layers],
    )


def count_layers(kv_caches: ArrayTree, engine_type: EngineType | str, layout_hints: LayoutHints | None = None) -> int:
    """Layers of a structure. What they are is not looked at where each has an entry of its own.

    Raises:
        ValueError: As :func:`detect_format`.
    """
    engine, hints = EngineType(engine_type), checked_hints(layout_hints)
    _check_list(kv_caches)
    if _is_layer_list(kv_caches, engine, hints):
        return len(kv_caches)
    return len(normalize_and_discover_per_layer_formats(kv_caches, [], engine, hints)[1])


def _is_leaf(x: object) -> TypeGuard[Leaf]:
    return isinstance(x, (np.ndarray, ArraySpec))


def _check_list(kv_caches: ArrayTree) -> None:
    if _is_leaf(kv_caches):
        return
    if not isinstance(kv_caches, Sequence) or isinstance(kv_caches, (str, bytes)):
        raise ValueError(f"expected arrays or ArraySpecs in lists, not {type(kv_caches).__name__}")
    if not kv_caches:
        raise ValueError("the list of KV caches is empty; give at least one layer")


def _check_structure(kv_caches: ArrayTree) -> None:
    _check_list(kv_caches)
    if not _is_leaf(kv_caches):
        for item in kv_caches:
            _check_structure(item)


def _is_layer_list(kv_caches: ArrayTree, engine: EngineType, hints: LayoutHints) -> bool:
    """Each entry of the list is a layer, and can be named alone."""
    if _is_leaf(kv_caches) or engine is EngineType.TRTLLM:
        return False
    if engine is EngineType.SGLANG and hints.get("kv_list_layout") != "unified":
        return hints.get("kv_list_layout") != "k_v" and all(map(_is_leaf, kv_caches))
    return True


def _name_layer(entry: ArrayTree, engine: EngineType, hints: LayoutHints) -> tuple[Format, Entry]:
    normalised = attempt_permute_to_contiguous_view(entry)
    name, normalised = _LAYER_NAMERS[engine](normalised, hints)
    _check_fits(name, normalised)
    _check_block_axis(name, entry)
    return name, normalised


def _name_whole(kv_caches: ArrayTree, engine: EngineType, hints: LayoutHints) -> tuple[Format, ArrayTree]:
    name, normalised = _WHOLE_NAMERS[engine](attempt_permute_to_contiguous_view(kv_caches), hints)
    if name.is_kv_list:
        for k, v in zip(*normalised, strict=True):
            _check_fits(name, [k, v])
    else:
        _check_fits(name, normalised)
    _check_block_axis(name, kv_caches)
    return name, normalised


@lru_cache(maxsize=4096)  # as the layers of a cache are alike
def _fits(name: Format, shape: tuple[int, ...]) -> bool:
    return name.fits(shape)


def _check_fits(name: Format, entry: Entry) -> None:
    """Every array of an entry has the axes that the name gives it."""
    leaves = entry if isinstance(entry, list) else [entry]
    for leaf in leaves:
        if not _fits(name, leaf.shape):
            raise ValueError(f"{name.name} is {name.describe()}, which does not fit an array {list(leaf.shape)}")
    first = leaves[0]
    for leaf in leaves[1:]:
        if name.kv_size == 2 and (leaf.shape != first.shape or leaf.dtype != first.dtype):
            raise ValueError(
                f"K {list(first.shape)} of {first.dtype} and V {list(leaf.shape)} of {leaf.dtype} of one layer differ; "
                f"{name.name} takes K and V of one shape and dtype"
            )
        if leaf.shape[:2] != first.shape[:2]:
            raise ValueError(
                f"planes {list(first.shape)} and {list(leaf.shape)} of one layer differ in blocks or slots; all planes "
                f"of a layer share the block ids"
            )


def _leaves(tree: ArrayTree) -> Iterator[Leaf]:
    if _is_leaf(tree):
        yield tree
    else:
        for item in tree:
            yield from _leaves(item)


def _check_block_axis(name: Format, given: ArrayTree) -> None:
    """In memory no slots, heads or elements lie outside the blocks of the shape that was given.

    Axes are named by their order in memory. An array whose heads lie outside its blocks would be read with its heads
    as blocks, and every block id would lead to other tokens.
    """
    for leaf in _leaves(given):
        order = axes_in_memory(leaf)
        if order == tuple(range(len(order))):
            continue
        block, apart = block_axis_of(name, leaf.shape, order)
        if leaf.shape[block] == 1:
            continue  # one block, or an axis of another kind: there is nothing to tell it by
        outside = [axis for axis in order[: order.index(block)] if axis not in apart and leaf.shape[axis] > 1]
        if outside:
            raise ValueError(
                f"an array {list(leaf.shape)} has its axes {outside} (of sizes "
                f"{[leaf.shape[axis] for axis in outside]}) outside the axis of its blocks, {block}, in memory: its "
                f"axes lie in the order {list(order)}, and in that order {outside[0]} would be taken for the blocks; "
                f"no layout hint says otherwise, so copy it to a contiguous array, or give the axes as they lie in "
                f"memory"
            )


def block_axis_of(name: Format, shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, set[int]]:
    """The axis that counts blocks in a shape as it was given, and the axes (K/V, layers) that may lie outside it.

    Args:
        order: The axes of that shape from outermost to innermost in memory, where ``name`` names them.
    """
    if name.is_cross_layer:
        return 0, {1, 2}
    if "TWO" not in name.axes[:2]:
        return 0, set()
    kv = next((axis for axis in (0, 1) if shape[axis] == 2), order[name.axes.index("TWO")])
    return (1 if kv == 0 else 0), {kv}


def _vllm_layer(entry: Entry, hints: LayoutHints) -> tuple[Format, Entry]:
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
    raise _unknown("vLLM", entry, "rank 3, 4, 5 with a K/V axis of 2 first or second, or [2, NB, NH, 1, BS, HS]")


def _vllm_planes(planes: list[Leaf]) -> Format:
    if all(_is_leaf(plane) and len(plane.shape) == 4 for plane in planes):
        one_head = all(plane.shape[2] == 1 for plane in planes)
        if one_head and (len(planes) in (1, 3) or len({plane.shape[-1] for plane in planes}) > 1):
            return Format.NL_X_NP_X_NB_BS_ONE_HS
        if len(planes) == 2:
            return Format.NL_X_TWO_X_NB_BS_NH_HS
    raise _unknown("vLLM", planes, "K and V of rank 4, or planes [NB, BS, 1, width]")


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


def _vllm_whole(kv_caches: ArrayTree, hints: LayoutHints) -> tuple[Format, ArrayTree]:
    _heads_first(hints, None)  # as above
    if len(kv_caches.shape) == 6 and kv_caches.shape[2] == 2:
        return Format.NB_NL_TWO_BS_NH_HS, kv_caches
    raise _unknown("vLLM", kv_caches, "one array for all layers [NB, NL, 2, BS, NH, HS]")


def _sglang_layer(entry: Entry, hints: LayoutHints) -> tuple[Format, Entry]:
    if isinstance(entry, list):
        raise _unknown("SGLang", entry, "a flat list of arrays")
    rank = len(entry.shape)
    if hints.get("kv_list_layout") == "unified":
        if rank in (3, 4):
            return (Format.NL_X_NB_BS_HS if rank == 3 else Format.NL_X_NB_BS_NH_HS), entry
        raise _unknown("SGLang", entry, "[NB, BS, HS] or [NB, BS, NH, HS] (kv_list_layout 'unified')")
    if "tokens_per_block" not in hints:
        return Format.NL_X_NBBS_ONE_HS, entry
    if rank == 3 and entry.shape[1] == 1:
        split: Any = _split_blocks(entry, hints)
        return Format.NL_X_NB_BS_HS, split[:, :, 0]
    return Format.NL_X_NB_BS_HS, entry


def _sglang_whole(kv_caches: ArrayTree, hints: LayoutHints) -> tuple[Format, ArrayTree]:
    if _is_leaf(kv_caches):
        raise _unknown("SGLang", kv_caches, "lists of arrays")
    if all(map(_is_leaf, kv_caches)):
        return Format.TWO_X_NL_X_NB_BS_NH_HS, _pair_flat_list(kv_caches, hints)
    if not all(isinstance(layers, list) and all(map(_is_leaf, layers)) for layers in kv_caches):
        raise _unknown("SGLang", kv_caches, "a list of K layers and a list of V layers")
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
    return _split_axis(leaf, 0, (num_blocks, block_size))


def _trtllm_whole(kv_caches: ArrayTree, hints: LayoutHints) -> tuple[Format, ArrayTree]:
    pool = kv_caches if _is_leaf(kv_caches) else kv_caches[0] if len(kv_caches) == 1 else None
    if pool is None or not _is_leaf(pool) or len(pool.shape) not in (4, 6):
        raise _unknown("TRT-LLM", kv_caches, "one pool [NB, NL, 2, NH * BS * HS] or [NB, NL, 2, NH, BS, HS]")
    if len(pool.shape) == 4:
        sizes = tuple(positive_hint(hints, key) for key in ("num_kv_heads", "tokens_per_block", "head_dim"))
        if pool.shape[3] != sizes[0] * sizes[1] * sizes[2]:
            raise ValueError(
                f"a pool {list(pool.shape)} holds {pool.shape[3]} elements a plane, but the layout hints num_kv_heads, "
                f"tokens_per_block and head_dim {list(sizes)} make {sizes[0] * sizes[1] * sizes[2]}"
            )
        pool = _split_axis(pool, 3, sizes)
    return Format.NB_NL_TWO_NH_BS_HS, pool


def _atom_layer(entry: Entry, hints: LayoutHints) -> tuple[Format, Entry]:
    if isinstance(entry, list) or len(entry.shape) != 3:
        raise _unknown("ATOM", entry, "a flat list of arrays [NB, BS, HS]")
    return Format.NL_X_NB_BS_HS, entry


def _atom_whole(kv_caches: ArrayTree, hints: LayoutHints) -> tuple[Format, ArrayTree]:
    raise _unknown("ATOM", kv_caches, "a flat list of arrays [NB, BS, HS]")


def _mock(kv_caches: ArrayTree, hints: LayoutHints) -> tuple[Format, ArrayTree]:
    raise ValueError("the mock engine has no KV cache whose format could be detected; name the engine it stands for")


_LAYER_NAMERS: dict[EngineType, Callable[[Any, LayoutHints], tuple[Format, Any]]] = {
    EngineType.VLLM: _vllm_layer,
    EngineType.SGLANG: _sglang_layer,
    EngineType.ATOM: _atom_layer,
    EngineType.MOCK: _mock,
}
_WHOLE_NAMERS: dict[EngineType, Callable[[Any, LayoutHints], tuple[Format, Any]]] = {
    EngineType.VLLM: _vllm_whole,
    EngineType.SGLANG: _sglang_whole,
    EngineType.TRTLLM: _trtllm_whole,
    EngineType.ATOM: _atom_whole,
    EngineType.MOCK: _mock,
}


def _split_axis(leaf: Leaf, axis: int, sizes: tuple[int, ...]) -> Leaf:
    """One axis as several, row-major: a view for any stride, where ``reshape`` might copy. Sizes of 1 are tight."""
    spec = leaf if isinstance(leaf, ArraySpec) else ArraySpec.of(leaf)
    steps: list[int] = []
    step = spec.stride[axis]
    tight = spec.shape[axis + 1] * spec.stride[axis + 1] if axis + 1 < len(spec.shape) else 1
    for size in reversed(sizes):
        steps.append(tight if size == 1 else step)
        step *= size
        tight = size * steps[-1]
    shape = (*spec.shape[:axis], *sizes, *spec.shape[axis + 1 :])
    stride = (*spec.stride[:axis], *reversed(steps), *spec.stride[axis + 1 :])
    if isinstance(leaf, ArraySpec):
        return ArraySpec(shape, stride, spec.storage_offset, spec.dtype)
    return restride(leaf, shape, tuple(step * leaf.dtype.itemsize for step in stride))


def _unknown(engine: str, found: ArrayTree, wanted: str) -> ValueError:
    return ValueError(f"no known {engine} layout is {_shapes(found)}; known are {wanted}")


def _shapes(found: ArrayTree) -> str:
    if _is_leaf(found):
        return f"{list(found.shape)} of {found.dtype}"
    return f"[{', '.join(_shapes(item) for item in found[:3])}{', ...' if len(found) > 3 else ''}]"
