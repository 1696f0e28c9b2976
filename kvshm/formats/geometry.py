"""Sizes and strided planes of a cache whose format is known.

Every format comes down to the same four axes: for each layer and each K/V plane one view (block, slot, head, element)
of the paged cache. What moves chunks needs nothing else, and so knows no format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kvshm.contiguity import ArrayTree
from kvshm.dtypes import DType
from kvshm.formats.leaves import Leaf, is_leaf
from kvshm.formats.names import EngineKVFormat
from kvshm.spec import ArraySpec, restride

__all__ = ["LATENT", "PAGE", "SPLIT", "Geometry", "geometry"]

SPLIT, LATENT, PAGE = "K and V apart", "latent", "page"
"""Packings of a slot's elements that need no numbers, see :meth:`Geometry.packing`."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """A normalised cache read through its format. Sizes come from the arrays, positions of axes from the name.

    ``normalised`` is what :func:`kvshm.formats.detect_format` returns: an array, a list of them, or lists in a list.
    Of a list whose layers have several formats it reads those of this one.
    """

    normalised: ArrayTree
    format: EngineKVFormat

    @property
    def num_layers(self) -> int:
        """Layers of the whole structure."""
        if self.format.is_cross_layer:
            return int(self.normalised.shape[self.format.axes.index("NL")])
        return len(self.normalised[0] if self.format.is_kv_list else self.normalised)

    @property
    def first_layer(self) -> int:
        """The first layer that has this format. ValueError: there is none."""
        if not self.format.is_layer_list:
            return 0
        for layer, entry in enumerate(self.normalised):
            if self._fits(entry):
                return layer
        raise ValueError(f"no layer is {self.format.name}, which is {self.format.describe()}")

    @property
    def num_blocks(self) -> int:
        """Blocks of the first layer of this format. ValueError where blocks and slots share one axis."""
        return self.num_blocks_of(self.first_layer)

    def num_blocks_of(self, layer: int) -> int:
        """Blocks of one layer. ValueError where blocks and slots share one axis."""
        return self._size(layer, "NB")

    @property
    def kv_size(self) -> int:
        """Planes of a chunk: 2 for K and V apart, else 1."""
        return self.format.kv_size

    def leaves(self, layer: int) -> tuple[Leaf, ...]:
        """The arrays that hold a layer: one, or K and V, or all its planes. The cross-layer array for every layer.

        Raises:
            ValueError: No such layer, or it has another format.
        """
        self._check_layer(layer)
        if self.format.is_cross_layer:
            return (self.normalised,)
        if self.format.is_kv_list:
            return tuple(layers[layer] for layers in self.normalised)
        entry = self.normalised[layer]
        if not self._fits(entry):
            raise ValueError(
                f"layer {layer} is not {self.format.name}: {_shape_of(entry)}, not {self.format.describe()}"
            )
        return tuple(entry) if self.format.is_kv_second_tuple else (entry,)

    def _fits(self, entry: ArrayTree) -> bool:
        """Whether an entry of a list of layers can be a layer of this format."""
        if not self.format.is_kv_second_tuple:
            return is_leaf(entry) and self.format.fits(entry.shape)
        is_list = isinstance(entry, Sequence) and len(entry) > 0
        return is_list and all(is_leaf(plane) and self.format.fits(plane.shape) for plane in entry)

    def block_size(self, layer: int) -> int:
        """Slots of one block. ValueError where blocks and slots share one axis."""
        return self._size(layer, "BS")

    def num_heads(self, layer: int) -> int:
        """Heads of one slot; 1 for MLA."""
        self._check_layer(layer)
        return 1 if self.format.is_mla else self._size(layer, "NH")

    def head_size(self, layer: int) -> int:
        """Elements of one head's row; K and V together where they are packed, all planes together where there are
        several (in elements of the first plane)."""
        if self.format.is_kv_second_tuple and self.format.is_mla:
            planes = self.leaves(layer)
            row_nbytes = sum(plane.shape[-1] * plane.dtype.itemsize for plane in planes)
            head_size, rest = divmod(row_nbytes, planes[0].dtype.itemsize)
            if rest:
                raise ValueError(
                    f"layer {layer}: the planes of a slot take {row_nbytes} bytes, no whole number of elements of the "
                    f"first plane ({planes[0].dtype}); put the plane of the smallest item size first"
                )
            return head_size
        packed = 2 if self.format.axes[-2:] == ("TWO", "HS") else 1
        return packed * self._size(layer, self.format.axes[-1])

    def hidden_dim(self, layer: int) -> int:
        """Elements of one slot in one plane of a chunk. The deprecated ``TWO_HS`` formats count K alone."""
        if self.format.axes[-2:] == ("TWO", "HS"):
            return self.num_heads(layer) * self._size(layer, "HS")
        return self.num_heads(layer) * self.head_size(layer)

    def dtype(self, layer: int) -> DType:
        """dtype of a layer's first array."""
        return cast(DType, self.leaves(layer)[0].dtype)

    def packing(self, layer: int) -> str:
        """How the elements of a slot are packed in a chunk: rows of one length may mean different things.

        K and V in planes of their own, [K|V] of each head, several planes side by side, one latent, K or V alone, or a
        page that is no row of tokens.
        """
        if self.kv_size == 2:
            return SPLIT
        if self.format is EngineKVFormat.NL_X_NB_BSV_BSS:
            return PAGE
        if self.format.is_kv_second_tuple:
            planes = (f"{leaf.shape[-1]} {leaf.dtype.name}" for leaf in self.leaves(layer))
            return f"planes of {', '.join(planes)}"
        if self.format.is_fused_packed:
            return f"[K|V] of {self.num_heads(layer)} heads"
        return LATENT if self.format.is_mla else "K or V"

    def concrete_shape(self) -> str:
        """The shape in numbers, layers as the first one of this format.

        >>> import numpy as np
        >>> layers = [ArraySpec.dense((2, 7, 4, 3, 8), np.dtype("float16"))] * 5
        >>> geometry(layers, EngineKVFormat.NL_X_TWO_NB_BS_NH_HS).concrete_shape()
        '5 x [2, 7, 4, 3, 8]'
        """
        first = self.first_layer
        shape = list(self.leaves(first)[0].shape)
        if self.format.is_kv_second_tuple and self.format.is_mla:
            shape[-1] = self.head_size(first)
        levels = {"NL": str(self.num_layers), "TWO": "2"}
        return " x ".join([*(levels.get(level, level) for level in self.format.lists), str(shape)])

    def planes(self, layer: int) -> tuple[Leaf, ...]:
        """One view a plane of a layer, axes (block, slot, head, element), of the same kind as the arrays.

        Planes are K and V; or one, where they are packed or there is but one; or all planes of a layer that has
        several.

        Raises:
            ValueError: No such layer, or blocks and slots share one axis.
        """
        if self.format.is_pbs_fused:
            raise ValueError(self._folded(layer))
        return tuple(view for leaf in self.leaves(layer) for view in self._leaf_planes(leaf, layer))

    def _leaf_planes(self, leaf: Leaf, layer: int) -> Iterator[Leaf]:
        axes = self.format.axes
        if axes[-2:] == ("TWO", "HS"):
            leaf, axes = _merge_last_axes(leaf), (*axes[:-2], "HS")
        fixed = {"NL": layer} if self.format.is_mla else {"NL": layer, "ONE": 0}
        for plane in range(2 if "TWO" in axes else 1):
            fixed["TWO"] = plane
            view: Any = leaf[tuple(fixed.get(axis, slice(None)) for axis in axes)]
            left = [axis for axis in axes if axis not in fixed]
            if len(left) == 3:  # NB, BS, HS: no head axis yet
                view = view[:, :, None, :]
            elif left[1] == "NH":
                view = view.transpose((0, 2, 1, 3))
            yield view

    def _size(self, layer: int, axis: str) -> int:
        if axis not in self.format.axes:
            raise ValueError(self._folded(layer))
        return int(self.leaves(layer)[0].shape[self.format.axes.index(axis)])

    def _folded(self, layer: int) -> str:
        return (
            f"layer {layer}: {self.format.name} folds blocks and slots into one axis "
            f"{list(self.leaves(layer)[0].shape)}, so the block size is unknown; pass it as the layout hint "
            f"'tokens_per_block'"
        )

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer {layer} is outside [0, {self.num_layers})")


def geometry(normalised: ArrayTree, format: EngineKVFormat) -> Geometry:
    """Sizes and planes of a normalised cache (arrays or specs) of the given format.

    Raises:
        ValueError: The structure is not that of the format: lists, or rank of the arrays.
    """
    format = EngineKVFormat(format)
    node = normalised
    for depth in range(len(format.lists)):
        if not isinstance(node, Sequence) or not node:
            raise ValueError(
                f"{format.name} is {format.describe()}, but at depth {depth} there is {type(node).__name__}"
                f"{'' if isinstance(node, Sequence) else ', not a list'}"
            )
        if depth == 0 and format.is_layer_list:
            node = normalised[Geometry(normalised, format).first_layer]
        else:
            node = node[0]
    if not is_leaf(node) or len(node.shape) != len(format.axes):
        raise ValueError(f"{format.name} is {format.describe()}, but the first array is {_shape_of(node)}")
    return Geometry(normalised, format)


def _shape_of(node: Any) -> str:
    return str(list(node.shape)) if is_leaf(node) else type(node).__name__


def _spec(leaf: Leaf) -> ArraySpec:
    return leaf if isinstance(leaf, ArraySpec) else ArraySpec.of(leaf)


def _merge_last_axes(leaf: Leaf) -> Leaf:
    """The two innermost axes, which lie tightly one in the other, as one."""
    spec = _spec(leaf)
    shape = (*spec.shape[:-2], spec.shape[-2] * spec.shape[-1])
    if isinstance(leaf, ArraySpec):
        return ArraySpec(shape, (*spec.stride[:-2], spec.stride[-1]), spec.storage_offset, spec.dtype)
    return restride(leaf, shape, (*leaf.strides[:-2], leaf.strides[-1]))
