"""Whole caches: every KV format as an engine exposes it, with what kvshm must make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from math import lcm, prod
from typing import Literal, NamedTuple

import numpy as np
from hypothesis import strategies as st

from kvshm.contiguity import ArrayTree
from kvshm.dtypes import DType
from kvshm.formats import EngineKVFormat, EngineType
from kvshm.spec import ArraySpec
from kvshm.strategies.arrays import Bytes, buffers, dtypes
from kvshm.strategies.forms import DENSE, FORMS, Axes, Form, Hints, Sizes, kv_formats

__all__ = ["LayerKind", "PagedCache", "draw_cache", "draw_layer_kind", "kv_caches"]

F = EngineKVFormat
Placement = Literal["apart", "padded", "interleaved"]
PLACEMENTS: tuple[Placement, ...] = ("apart", "padded", "interleaved")

INDEX_PAGE_WIDTH = 132


@dataclass(frozen=True)
class PagedCache:
    """A cache as specs in one buffer of ``nbytes`` bytes. No two of its arrays share a byte."""

    kv_caches: ArrayTree  # as the engine exposes it
    engine_type: EngineType | None  # None: of a format that no engine exposes any more
    layout_hints: Hints
    normalised: ArrayTree  # what kvshm makes of it, up to the strides of axes of size 1
    formats: tuple[EngineKVFormat | None, ...]  # one per layer; None: a layer that belongs in no engine group
    nbytes: int

    @property
    def format(self) -> EngineKVFormat:
        """The one format of a cache whose layers are alike. ValueError if they are not."""
        (format,) = {format for format in self.formats if format is not None}
        return format

    @property
    def num_layers(self) -> int:
        """Layers, those in no engine group included."""
        return len(self.formats)

    def arrays(self, buffer: Bytes) -> ArrayTree:
        """``kv_caches`` as views of a buffer of ``nbytes`` bytes."""
        return _views(self.kv_caches, buffer)

    def buffers(self) -> st.SearchStrategy[Bytes]:
        """Buffers for :meth:`arrays`, of any content."""
        return buffers(self.nbytes)


def _views(tree: ArrayTree, buffer: Bytes) -> ArrayTree:
    return tree.view(buffer) if isinstance(tree, ArraySpec) else [_views(item, buffer) for item in tree]


class LayerKind(NamedTuple):
    """Layers that are alike."""

    format: EngineKVFormat
    sizes: Sizes
    planes: tuple[tuple[int, DType], ...]  # innermost length and dtype of each array of a layer; of one of K and V

    def leaves(self, memory: tuple[str, ...], may_be_apart: bool, folded: bool) -> list[Leaf]:
        """The arrays of one layer, axes as in memory; the one array of a cross-layer format."""
        lead = tuple(self.sizes.of(axis) for axis in memory[:-1])
        planes = self.planes * (2 if "TWO" in self.format.lists else 1)
        return [
            Leaf(ArraySpec.dense((*lead, width), dtype), self, plane, may_be_apart, folded)
            for plane, (width, dtype) in enumerate(planes)
        ]


class Leaf(NamedTuple):
    """One array that needs a place."""

    spec: ArraySpec
    kind: LayerKind | None
    plane: int
    may_be_apart: bool  # there may be room between its blocks
    folded: bool  # blocks and slots are one axis, so that such room is between slots


# Layers

_ANY = dtypes()


def draw_layer_kind(
    draw: st.DrawFn,
    format: EngineKVFormat,
    *,
    dtype: st.SearchStrategy[DType] | None = None,
    max_side: int = 5,
    block_size: st.SearchStrategy[int] | None = None,
) -> LayerKind:
    """Sizes and dtypes of layers that could not be read as another format."""
    sides = st.integers(1, max_side)
    slots = sides if block_size is None else block_size
    sizes = Sizes(draw(sides), draw(_num_blocks(format, sides)), draw(slots), draw(sides), draw(sides))
    of_kv = _ANY if dtype is None else dtype
    if format is F.NL_X_NB_BSV_BSS:
        return LayerKind(format, sizes._replace(hs=INDEX_PAGE_WIDTH), ((INDEX_PAGE_WIDTH, np.dtype(np.uint8)),))
    if format is F.NL_X_NP_X_NB_BS_ONE_HS:
        return LayerKind(format, sizes, _planes(draw, of_kv, sides))
    first = draw(of_kv)
    if first == np.uint8 and sizes.hs == INDEX_PAGE_WIDTH:
        sizes = sizes._replace(hs=INDEX_PAGE_WIDTH + 1)  # else it may be an index page
    return LayerKind(format, sizes, ((sizes.hs, first),))


def _num_blocks(format: EngineKVFormat, numbers: st.SearchStrategy[int]) -> st.SearchStrategy[int]:
    """Without 2 where that would be taken for a K/V axis, which is looked for in front first."""
    return numbers.filter(lambda number: number != 2) if format.axes[:2] == ("NB", "TWO") else numbers


def _planes(
    draw: st.DrawFn, dtype: st.SearchStrategy[DType], widths: st.SearchStrategy[int]
) -> tuple[tuple[int, DType], ...]:
    """Planes of a layer. Two of one width are K and V, four of one width are nothing known."""
    planes = draw(st.lists(st.tuples(widths, dtype), min_size=1, max_size=4))
    if len(planes) in (2, 4) and len({width for width, _ in planes}) == 1:
        planes[-1] = (planes[-1][0] + 1, planes[-1][1])
    # A row of all planes is counted in elements of the first one.
    return tuple(sorted(planes, key=lambda plane: plane[1].itemsize))


@st.composite
def kv_caches(
    draw: st.DrawFn,
    formats: st.SearchStrategy[EngineKVFormat] | EngineKVFormat | None = None,
    *,
    dtype: st.SearchStrategy[DType] | None = None,
    max_side: int = 5,
    permuted: bool = True,
    padded: bool = True,
) -> PagedCache:
    """Caches whose layers are alike, in any format or the given ones, in one buffer.

    Args:
        formats: One, or a strategy of them; else all, those that no engine exposes any more included.
        dtype: dtypes of the arrays; else any of :func:`dtypes`. Index pages are uint8.
        max_side: Largest number of layers, blocks, slots, heads, and elements of a head.
        permuted: The engine may expose the axes in another order than that in memory.
        padded: Where the format allows it, blocks may lie apart, also with those of other layers in between.
    """
    chosen = kv_formats() if formats is None else formats
    format = chosen if isinstance(chosen, EngineKVFormat) else draw(chosen)
    kind = draw_layer_kind(draw, format, dtype=dtype, max_side=max_side)
    return draw_cache(draw, [kind] * kind.sizes.nl, permuted=permuted, padded=padded)


def draw_cache(
    draw: st.DrawFn,
    layers: Sequence[LayerKind | ArraySpec],
    *,
    permuted: bool = True,
    padded: bool = True,
) -> PagedCache:
    """A cache with these layers; if they are not alike, those of one engine that has a list of layers.

    A bare spec is a layer in no engine group: it gets a place and has no format.
    """
    kinds = list(dict.fromkeys(layer for layer in layers if isinstance(layer, LayerKind)))
    first = draw(st.sampled_from(_forms_of_all(kinds)))
    hints = first.hints(kinds[0].sizes)
    forms = {kinds[0]: first} | {
        kind: draw(st.sampled_from([form for form in _forms(kind) if _tells(form, kind, first.engine, hints)]))
        for kind in kinds[1:]
    }
    memory = {kind: forms[kind].memory or kind.format.axes for kind in kinds}
    axes = {kind: forms[kind].axes or tuple((axis,) for axis in memory[kind]) for kind in kinds}
    order_of = {kind: draw(st.sampled_from(_exposures(axes[kind], kind, permuted))) for kind in kinds}

    leaves: list[Leaf] = []
    counts: list[int] = []
    for layer in layers[:1] if kinds[0].format.is_cross_layer else layers:
        if isinstance(layer, LayerKind):
            folded = axes[layer][0] == ("NB", "BS")
            may_fold = folded and layer.sizes.nb * layer.sizes.bs > 1
            of_layer = layer.leaves(memory[layer], layer.format.has_block_axis, may_fold)
        else:
            of_layer = [Leaf(layer, None, 0, False, False)]
        leaves += of_layer
        counts.append(len(of_layer))
    may_be_apart = padded and any(leaf.may_be_apart for leaf in leaves)
    placement = draw(st.sampled_from(PLACEMENTS if may_be_apart else PLACEMENTS[:1]))
    specs, nbytes = _placed(draw, leaves, placement)
    exposed = [
        spec if leaf.kind is None else _exposed(spec, memory[leaf.kind], axes[leaf.kind], order_of[leaf.kind])
        for leaf, spec in zip(leaves, specs, strict=True)
    ]
    normal = [
        spec if leaf.kind is None else _named(_tight(spec), memory[leaf.kind], leaf.kind.format.axes)
        for leaf, spec in zip(leaves, specs, strict=True)
    ]
    return PagedCache(
        kv_caches=_structure(exposed, layers, counts, first.lists),
        engine_type=first.engine if kinds[0].format in FORMS else None,
        layout_hints=hints,
        normalised=_structure(normal, layers, counts, None),
        formats=tuple(layer.format if isinstance(layer, LayerKind) else None for layer in layers),
        nbytes=nbytes,
    )


def _forms(kind: LayerKind) -> Sequence[Form]:
    return FORMS.get(kind.format, (DENSE,))


def _tells(form: Form, kind: LayerKind, engine: EngineType, hints: Hints) -> bool:
    return form.engine is engine and form.hints(kind.sizes) == hints


def _forms_of_all(kinds: Sequence[LayerKind]) -> list[Form]:
    """Forms of the first kind whose engine and hints all other kinds can have too."""
    return [
        form
        for form in _forms(kinds[0])
        if all(
            any(_tells(other, kind, form.engine, form.hints(kinds[0].sizes)) for other in _forms(kind))
            for kind in kinds[1:]
        )
    ]


# Places in one buffer

_GAPS = st.integers(0, 3)


def _placed(draw: st.DrawFn, leaves: Sequence[Leaf], placement: Placement) -> tuple[list[ArraySpec], int]:
    """The specs at places of their own, and the bytes of the buffer they are in."""
    rows = [leaf for leaf in leaves if leaf.may_be_apart and not leaf.folded] if placement == "interleaved" else []
    unit = lcm(*(leaf.spec.dtype.itemsize for leaf in rows))
    row_nbytes = 0
    in_row: list[int] = []
    for leaf in rows:
        itemsize = leaf.spec.dtype.itemsize
        in_row.append(-(-row_nbytes // itemsize) * itemsize + draw(_GAPS) * itemsize)
        row_nbytes = in_row[-1] + leaf.spec.stride[0] * itemsize
    row_nbytes = -(-row_nbytes // unit) * unit

    pads: dict[tuple[LayerKind | None, int], int] = {}
    placed: list[ArraySpec] = []
    end = max((leaf.spec.shape[0] for leaf in rows), default=0) * row_nbytes
    starts = iter(in_row)
    for leaf in leaves:
        spec = leaf.spec
        itemsize = spec.dtype.itemsize
        if placement == "interleaved" and leaf.may_be_apart and not leaf.folded:
            start, spec = next(starts) // itemsize, _with_row(spec, row_nbytes // itemsize)
        else:
            if placement == "padded" and leaf.may_be_apart:
                key = (leaf.kind, leaf.plane)  # layers of one kernel group have one stride
                pads[key] = pads[key] if key in pads else draw(_GAPS)
                if leaf.folded:
                    slot = spec.stride[1] + pads[key]
                    spec = ArraySpec(spec.shape, (spec.shape[1] * slot, slot, *spec.stride[2:]), 0, spec.dtype)
                else:
                    spec = _with_row(spec, spec.stride[0] + pads[key])
            start = -(-end // itemsize) + draw(_GAPS)
        placed.append(ArraySpec(spec.shape, spec.stride, start, spec.dtype))
        end = max(end, placed[-1].byte_span)
    return placed, end


def _with_row(spec: ArraySpec, step: int) -> ArraySpec:
    return ArraySpec(spec.shape, (step, *spec.stride[1:]), spec.storage_offset, spec.dtype)


def _tight(spec: ArraySpec) -> ArraySpec:
    """An axis of one block steps by the block: nothing is there to be apart from."""
    return _with_row(spec, spec.shape[1] * spec.stride[1]) if spec.shape[0] == 1 else spec


def _exposures(axes: Axes, kind: LayerKind, permuted: bool) -> list[tuple[int, ...]]:
    """Orders in which an engine may show these axes: its blocks outermost, but for K and V.

    Two blocks could be taken for K and V, so those stand in front then.
    """
    if not permuted:
        return [tuple(range(len(axes)))]
    names = [axis[0].replace("NBBS", "NB") if axis else "" for axis in axes]
    if kind.format.is_cross_layer or "TWO" not in names[:2]:
        fronts = [["NB"]]
    else:
        fronts = [["TWO", "NB"], ["NB", "TWO"]] if kind.sizes.nb != 2 else [["TWO", "NB"]]
    return [
        order
        for order in permutations(range(len(axes)))
        if any([names[axis] for axis in order[: len(front)]] == front for front in fronts)
    ]


def _named(spec: ArraySpec, memory: tuple[str, ...], axes: tuple[str, ...]) -> ArraySpec:
    """A stored array with its axes in the order of the format's name."""
    return spec if memory == axes else spec.transpose(tuple(memory.index(axis) for axis in axes))


def _exposed(spec: ArraySpec, memory: tuple[str, ...], axes: Axes, order: tuple[int, ...]) -> ArraySpec:
    """A stored array with axes folded as ``axes`` says, then in the order of ``order``."""
    if order != tuple(range(len(order))):
        spec = _tight(spec)  # the place of the only block is then told by its stride alone
    at = {axis: index for index, axis in enumerate(memory)}
    shape: list[int] = []
    stride: list[int] = []
    for names in reversed(axes):
        shape.append(prod(spec.shape[at[name]] for name in names))
        stride.append(spec.stride[at[names[-1]]] if names else shape[-2] * stride[-1])
    folded = ArraySpec(tuple(reversed(shape)), tuple(reversed(stride)), spec.storage_offset, spec.dtype)
    return folded.transpose(order)


def _structure(
    specs: Sequence[ArraySpec],
    layers: Sequence[LayerKind | ArraySpec],
    counts: Sequence[int],
    lists: Literal["flat", "boxed"] | None,
) -> ArrayTree:
    """The lists around the arrays, which come layer by layer, ``counts`` for each."""
    format = next(layer.format for layer in layers if isinstance(layer, LayerKind))
    if format.is_cross_layer:
        return [specs[0]] if lists == "boxed" else specs[0]
    if format.is_kv_list:
        k, v = list(specs[::2]), list(specs[1::2])
        return k + v if lists == "flat" else [k, v]
    entries: list[ArrayTree] = []
    rest = list(specs)
    for layer, count in zip(layers, counts, strict=True):
        of_layer, rest = rest[:count], rest[count:]
        in_list = isinstance(layer, LayerKind) and layer.format.is_kv_second_tuple
        entries.append(of_layer if in_list else of_layer[0])
    return entries
