"""The staging buffer: room for a few chunks, with typed and flat views of the same bytes."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvshm.layout.groups import KernelGroupInfo, KVLayerGroupsManager

__all__ = ["MAX_BATCH_SIZE", "StagingBuffer"]

Array: TypeAlias = "np.ndarray[Any, Any]"

MAX_BATCH_SIZE = 4  # chunk slots


class StagingBuffer:
    """Owns ``MAX_BATCH_SIZE`` chunk slots; every view of them is made once, here.

    Kernel groups lie in a chunk slot in the order of the object groups, so that each object group is one range. Each
    takes a whole chunk of slots, also where only a window of it is kept.
    """

    def __init__(self, manager: KVLayerGroupsManager) -> None:
        groups = manager.kernel_groups
        num_slots = [group.calculate_slots(manager.lmcache_tokens_per_chunk) for group in groups]
        nbytes = [group.region_nbytes(slots) for group, slots in zip(groups, num_slots, strict=True)]
        starts = [0] * len(groups)
        end = 0
        for object_group in manager.object_groups:
            for index in object_group.kernel_group_indices:
                starts[index] = end
                end += nbytes[index]
        ranges = [
            (
                starts[object_group.kernel_group_indices[0]],
                sum(nbytes[index] for index in object_group.kernel_group_indices),
            )
            for object_group in manager.object_groups
        ]
        self._chunks: list[npt.NDArray[np.uint8]] = list(
            np.empty(MAX_BATCH_SIZE * end, dtype=np.uint8).reshape(MAX_BATCH_SIZE, end)
        )
        self._kernel_groups = [
            [
                _typed(chunk[starts[index] : starts[index] + nbytes[index]], group, num_slots[index])
                for index, group in enumerate(groups)
            ]
            for chunk in self._chunks
        ]
        self._object_groups: list[list[npt.NDArray[np.uint8]]] = [
            [chunk[start : start + size] for start, size in ranges] for chunk in self._chunks
        ]

    def chunk(self, chunk_idx: int) -> npt.NDArray[np.uint8]:
        """Bytes of one chunk slot. ValueError: no such slot."""
        if not 0 <= chunk_idx < MAX_BATCH_SIZE:
            raise _no_chunk_slot(chunk_idx)
        return self._chunks[chunk_idx]

    def kernel_group(self, batch_idx: int, kernel_group_idx: int) -> Array:
        """View [kv, layer, slot, hidden] of a kernel group. ValueError: no such slot; IndexError: no such group."""
        if not 0 <= batch_idx < MAX_BATCH_SIZE:
            raise _no_chunk_slot(batch_idx)
        views = self._kernel_groups[batch_idx]
        if not 0 <= kernel_group_idx < len(views):
            raise IndexError(f"kernel group {kernel_group_idx} is outside [0, {len(views)})")
        return views[kernel_group_idx]

    def object_group(self, batch_idx: int, object_group_idx: int) -> npt.NDArray[np.uint8]:
        """Bytes of an object group. ValueError: no such slot; IndexError: no such group."""
        if not 0 <= batch_idx < MAX_BATCH_SIZE:
            raise _no_chunk_slot(batch_idx)
        views = self._object_groups[batch_idx]
        if not 0 <= object_group_idx < len(views):
            raise IndexError(f"object group {object_group_idx} is outside [0, {len(views)})")
        return views[object_group_idx]


def _no_chunk_slot(index: int) -> ValueError:
    return ValueError(f"chunk slot {index} is outside [0, {MAX_BATCH_SIZE})")


def _typed(region: npt.NDArray[np.uint8], group: KernelGroupInfo, num_slots: int) -> Array:
    # ndarray(buffer=...), not view(): a group behind one of odd size is not aligned for its dtype.
    shape = (group.shape_desc.kv_size, group.num_layers, num_slots, group.hidden_dim_size)
    view: Array = np.ndarray(shape, group.dtype, buffer=region)
    return view
