"""Where the slots of a cache are, and where they go in a chunk object.

This is all that a transfer knows of a layout: per layer and K/V plane one strided view of the paged cache, and the
place of its rows in a chunk. In a chunk a kernel group is [kv, layer, slot, hidden], slot-major also where the paged
cache has its heads first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from kvshm.contiguity import ArrayTree
from kvshm.formats.geometry import Geometry
from kvshm.layout.groups import KernelGroupInfo

__all__ = ["PagedPlane", "group_leaves", "group_planes"]

Array: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(frozen=True, slots=True, eq=False)
class PagedPlane:
    """One plane of one layer: where its slots are in the paged cache, and where they go in a chunk object."""

    paged: Array  # view (block, slot, head, element) of the paged cache
    chunk_offset: int  # bytes from the start of the kernel group's region in a chunk object to slot 0
    chunk_slot_nbytes: int  # bytes from one slot to the next there: more than the plane's own where planes share a row


def group_leaves(normalised: ArrayTree, group: KernelGroupInfo) -> Iterator[Array]:
    """The arrays of a kernel group: per layer its planes; of K and V lists all K first; of a cross-layer array that
    one."""
    assert group.format is not None
    geometry: Any = Geometry(normalised, group.format)
    layers = [geometry.leaves(layer) for layer in group.layer_indices]
    if group.format.is_cross_layer:
        layers = layers[:1]
    elif group.format.is_kv_list:
        layers = list(zip(*layers, strict=True))
    for leaves in layers:
        yield from leaves


def group_planes(normalised: ArrayTree, group: KernelGroupInfo, num_slots: int) -> Iterator[PagedPlane]:
    """Planes in chunk order: all layers of K, then of V; planes that share a slot's row side by side within it.

    Args:
        num_slots: Slots that a chunk object keeps of this group.
    """
    assert group.format is not None
    geometry: Any = Geometry(normalised, group.format)
    row_nbytes = group.hidden_dim_size * group.dtype.itemsize
    layers = [geometry.planes(layer) for layer in group.layer_indices]
    for kv in range(group.shape_desc.kv_size):
        for index, planes in enumerate(layers):
            offset = (kv * group.num_layers + index) * num_slots * row_nbytes
            for plane in planes[kv : kv + 1] if group.shape_desc.kv_size == 2 else planes:
                yield PagedPlane(plane, offset, row_nbytes)
                offset += plane.shape[2] * plane.shape[3] * plane.dtype.itemsize
