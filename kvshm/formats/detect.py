"""Which format a cache has: from the engine, the hints it gives, and the shapes.

Each engine has a file with a function that names a single entry of its layer list, or a whole structure, after the axes
were put in memory order.
A structure has one format when all its entries get the same name; layers of a hybrid model may each have their own.
What a name promises of the arrays (rank, axes of 1 and 2, dtype of an index page, K and V alike) is checked here,
once, for whatever named it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any

from kvshm.contiguity import ArrayTree, attempt_permute_to_contiguous_view, axes_in_memory
from kvshm.formats import atom, sglang, trtllm, vllm
from kvshm.formats.hints import LayoutHints, checked_hints
from kvshm.formats.leaves import Entry, is_leaf, leaves_of
from kvshm.formats.names import EngineKVFormat as Format

__all__ = [
    "EngineType",
    "LayoutHints",
    "block_axis_of",
    "count_layers",
    "detect_format",
    "normalize_and_discover_per_layer_formats",
]


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


def _check_list(kv_caches: ArrayTree) -> None:
    if is_leaf(kv_caches):
        return
    if not isinstance(kv_caches, Sequence) or isinstance(kv_caches, (str, bytes)):
        raise ValueError(f"expected arrays or ArraySpecs in lists, not {type(kv_caches).__name__}")
    if not kv_caches:
        raise ValueError("the list of KV caches is empty; give at least one layer")


def _check_structure(kv_caches: ArrayTree) -> None:
    _check_list(kv_caches)
    if not is_leaf(kv_caches):
        for item in kv_caches:
            _check_structure(item)


def _is_layer_list(kv_caches: ArrayTree, engine: EngineType, hints: LayoutHints) -> bool:
    """Each entry of the list is a layer, and can be named alone."""
    if is_leaf(kv_caches) or engine is EngineType.TRTLLM:
        return False
    if engine is EngineType.SGLANG and hints.get("kv_list_layout") != "unified":
        return hints.get("kv_list_layout") != "k_v" and all(map(is_leaf, kv_caches))
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


def _check_block_axis(name: Format, given: ArrayTree) -> None:
    """In memory no slots, heads or elements lie outside the blocks of the shape that was given.

    Axes are named by their order in memory. An array whose heads lie outside its blocks would be read with its heads
    as blocks, and every block id would lead to other tokens.
    """
    for leaf in leaves_of(given):
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


def _mock(kv_caches: ArrayTree, hints: LayoutHints) -> tuple[Format, ArrayTree]:
    raise ValueError("the mock engine has no KV cache whose format could be detected; name the engine it stands for")


_LAYER_NAMERS: dict[EngineType, Callable[[Any, LayoutHints], tuple[Format, Any]]] = {
    EngineType.VLLM: vllm.name_layer,
    EngineType.SGLANG: sglang.name_layer,
    EngineType.ATOM: atom.name_layer,
    EngineType.MOCK: _mock,
}
_WHOLE_NAMERS: dict[EngineType, Callable[[Any, LayoutHints], tuple[Format, Any]]] = {
    EngineType.VLLM: vllm.name_whole,
    EngineType.SGLANG: sglang.name_whole,
    EngineType.TRTLLM: trtllm.name_whole,
    EngineType.ATOM: atom.name_whole,
    EngineType.MOCK: _mock,
}
