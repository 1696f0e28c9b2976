"""Whether a layout is told or follows from the shapes, so that nothing about it is guessed.

A wrong layout shows only as wrong tokens. Detection follows LMCache, which reads every array in some way; whoever
stores what it reads asks here first. A shape must admit one reading only, or come with the hint that says which it is;
and the order of the axes in memory must not contradict the shape that was given.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from kvshm.contiguity import ArrayTree, axes_in_memory
from kvshm.formats.detect import EngineType, block_axis_of
from kvshm.formats.hints import LayoutHints, is_heads_first
from kvshm.formats.leaves import is_leaf, leaves_of
from kvshm.formats.names import EngineKVFormat as Format
from kvshm.spec import ArraySpec

__all__ = ["check_is_told", "check_layout_is_hinted"]

_HINT = 'pass layout_hints={"kv_layout": "NHD"} (slots before heads) or {"kv_layout": "HND"} (heads before slots)'


def check_is_told(
    kv_caches: ArrayTree, formats: Sequence[Format | None], engine_type: EngineType, layout_hints: LayoutHints
) -> None:
    """Check that a structure is what its formats say, and not only may be.

    Args:
        kv_caches: Specs as the engine holds the arrays.
        formats: Per layer what was recognised; None for a layer that is not looked at.

    Raises:
        ValueError: More than one reading is possible, or a hint contradicts the engine's layout.
    """
    _check_hints(engine_type, layout_hints)
    first = next((format for format in formats if format is not None), None)
    if first is None:
        return
    if first.is_layer_list:
        for layer, (entry, format) in enumerate(zip(kv_caches, formats, strict=True)):
            if format is not None:
                _check_entry(f"layer {layer}", entry, format, engine_type, layout_hints)
    else:
        _check_entry("the cache", kv_caches, first, engine_type, layout_hints)


def check_layout_is_hinted(
    kv_caches: ArrayTree, layers: Container[int], engine_type: EngineType, layout_hints: LayoutHints
) -> None:
    """Check that a vLLM engine says which of slots and heads come first, where its shapes do not.

    For before the formats are known: detection would take HND, and say so.

    Args:
        kv_caches: As the engine holds them.
        layers: Those that are looked at.

    Raises:
        ValueError: It does not say.
    """
    if engine_type is not EngineType.VLLM or is_leaf(kv_caches) or is_heads_first(layout_hints) is not None:
        return
    for layer, entry in enumerate(kv_caches):
        for leaf in leaves_of(entry) if layer in layers else ():
            if len(leaf.shape) in (4, 5):
                raise _untold(f"layer {layer}", leaf)


def _untold(where: str, leaf: ArraySpec) -> ValueError:
    return ValueError(f"{where}: the shape {list(leaf.shape)} does not tell slots from heads; {_HINT}")


def _check_hints(engine_type: EngineType, hints: LayoutHints) -> None:
    heads_first = is_heads_first(hints)
    slots_first_engines = (EngineType.SGLANG, EngineType.ATOM)
    if (heads_first and engine_type in slots_first_engines) or (
        heads_first is False and engine_type is EngineType.TRTLLM
    ):
        order = "heads before slots" if engine_type is EngineType.TRTLLM else "slots before heads"
        raise ValueError(
            f"layout hint 'kv_layout' is {hints['kv_layout']!r}, but a {engine_type.value} cache has its {order}; "
            f"leave the hint out, or name the engine whose layout this is"
        )


def _check_entry(
    where: str, entry: ArrayTree, format: Format, engine_type: EngineType, layout_hints: LayoutHints
) -> None:
    heads_first = is_heads_first(layout_hints)
    for leaf in leaves_of(entry):
        if engine_type is EngineType.VLLM:
            rank = len(leaf.shape)
            if heads_first is None and (rank in (4, 5) or format.is_cross_layer):
                raise _untold(where, leaf)
            if format.is_cross_layer and heads_first:
                raise ValueError(
                    f"{where}: an array for all layers {list(leaf.shape)} is read slots before heads, but the layout "
                    f"hint is {layout_hints['kv_layout']!r}; register an array per layer"
                )
            if rank == 5 and leaf.shape[:2] == (2, 2):
                raise ValueError(
                    f"{where}: the shape {list(leaf.shape)} does not tell two blocks from K and V; give at least three "
                    f"blocks, or a list [K, V] for each layer"
                )
        _check_order(where, leaf, format)


def _check_order(where: str, leaf: ArraySpec, format: Format) -> None:
    """In memory the axes keep their meaning: blocks outermost (but for K and V or layers), elements innermost."""
    order = axes_in_memory(leaf)
    if 0 in leaf.shape or order == tuple(range(len(order))):
        return
    block, apart = block_axis_of(format, leaf.shape, order)
    moving = [axis for axis in order if leaf.shape[axis] > 1 or axis == block]
    outside = [axis for axis in moving[: moving.index(block)] if axis not in apart or format.is_cross_layer]
    elements = len(leaf.shape) - 1
    if outside or (leaf.shape[elements] > 1 and moving[-1] != elements):
        raise ValueError(
            f"{where}: the axes of an array {list(leaf.shape)} lie in memory in the order {list(order)}, in which they "
            f"would be taken for others than those of the shape; copy it to a contiguous array, or give its axes as "
            f"they lie in memory"
        )
