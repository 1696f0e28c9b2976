"""What a transfer needs to know of a layout, worked out once per object group: where the rows are, and how many move.

A plan holds views of the cache's arrays, so whoever owns the arrays owns the plans (:mod:`kvshm.cache`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvshm.copying import RowOrder, Stack, plane_of, stacks_of
from kvshm.layout.groups import KVLayerGroupsManager
from kvshm.planes import PagedPlane

__all__ = ["KernelGroupPlan", "ObjectGroupPlan", "make_plan"]


@dataclass(frozen=True, slots=True)
class KernelGroupPlan:
    """What a transfer needs to know of one kernel group."""

    kernel_group_idx: int
    stacks: tuple[Stack, ...]
    num_blocks: int
    blocks_per_chunk: int
    kept_blocks: int  # of a chunk, the last ones
    slots_per_block: int
    is_writable: bool

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block in all planes."""
        return sum(len(stack.planes) * stack.block_nbytes for stack in self.stacks)

    @property
    def orders(self) -> list[RowOrder | None]:
        """The different row orders of the planes: one, as a rule."""
        return list(dict.fromkeys(stack.order for stack in self.stacks))


@dataclass(frozen=True, slots=True)
class ObjectGroupPlan:
    """What a transfer needs to know of one object group."""

    nbytes: int
    groups: tuple[KernelGroupPlan, ...]
    num_kernel_groups: int
    tokens_per_chunk: int
    num_chunks_in_sw: int  # -1: all


def make_plan(
    layout: KVLayerGroupsManager, planes_of: Callable[[int], Sequence[PagedPlane]], object_group_idx: int
) -> ObjectGroupPlan:
    """The plan of an object group.

    Args:
        planes_of: The planes of a kernel group.

    Raises:
        IndexError: No such object group.
    """
    return ObjectGroupPlan(
        nbytes=layout.object_nbytes(object_group_idx),
        groups=tuple(
            _plan_group(layout, planes_of(index), object_group_idx, index)
            for index in layout.object_group(object_group_idx).kernel_group_indices
        ),
        num_kernel_groups=len(layout.kernel_groups),
        tokens_per_chunk=layout.lmcache_tokens_per_chunk,
        num_chunks_in_sw=layout.get_attn_desc().num_chunks_in_sw[object_group_idx],
    )


def _plan_group(
    layout: KVLayerGroupsManager, paged_planes: Sequence[PagedPlane], object_group_idx: int, kernel_group_idx: int
) -> KernelGroupPlan:
    group = layout.kernel_group(kernel_group_idx)
    start = layout.offset_in_object(object_group_idx, kernel_group_idx)
    kept_blocks = layout.blocks_per_chunk_in_sw(kernel_group_idx)
    planes = [plane_of(plane.paged, start + plane.chunk_offset, plane.chunk_slot_nbytes) for plane in paged_planes]
    return KernelGroupPlan(
        kernel_group_idx=kernel_group_idx,
        stacks=tuple(stacks_of(planes, kept_blocks)),
        num_blocks=group.shape_desc.nb,
        blocks_per_chunk=layout.blocks_per_chunk(kernel_group_idx),
        kept_blocks=kept_blocks,
        slots_per_block=group.slots_per_block,
        is_writable=all(plane.paged.flags.writeable for plane in paged_planes),
    )
