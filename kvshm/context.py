"""CPUCacheContext: a mapped cache with the face of LMCache's CPU cache context.

Everything that kvshm itself needs is in :class:`kvshm.cache.MappedCache`. Here stand the other names of the original:
sizes under its names, addresses, a staging buffer for a few chunks and a buffer for block ids, which are made when they
are first asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvshm.cache import MappedCache
from kvshm.contiguity import ArrayTree
from kvshm.dtypes import DType, dtype_name
from kvshm.formats.detect import EngineType, LayoutHints
from kvshm.formats.leaves import leaves_of
from kvshm.formats.names import EngineKVFormat
from kvshm.layout.engine_groups import EngineGroupInfo
from kvshm.layout.groups import KVLayerGroupsManager, PageBufferShapeDesc
from kvshm.planes import PagedPlane, group_leaves
from kvshm.staging import MAX_BATCH_SIZE, StagingBuffer
from kvshm.stream import HostStream

__all__ = ["CPUCacheContext", "PagedPlane"]

Array: TypeAlias = "np.ndarray[Any, Any]"

MAX_BLOCK_IDS = 1_000_000


class CPUCacheContext(MappedCache):
    """A registered paged KV cache in host memory.

    Args:
        kv_caches: Descriptors (:class:`kvshm.ShmArrayWrapper`), which are mapped, or arrays; in a list, nested, or one
            bare, as the format is.
        lmcache_tokens_per_chunk: Tokens of a chunk.
        layout_hints: What the engine knows of its layout, see :data:`kvshm.formats.LayoutHints`.
        engine_group_infos: One per kernel group, for hybrid models.
        separate_object_groups: One chunk object per sliding window and kind of group; else one for all.
        full_sw_kv: Keep whole chunks also of groups whose sliding window is below a chunk.

    Raises:
        ValueError: Nothing registered, a layout that is not known, or groups that do not fit. Mappings made for it
            are gone again.
        OSError: A descriptor's segment cannot be mapped.
    """

    device_type = "cpu"

    def __init__(
        self,
        kv_caches: ArrayTree,
        lmcache_tokens_per_chunk: int = 256,
        layout_hints: LayoutHints | None = None,
        engine_group_infos: Sequence[EngineGroupInfo] = (),
        engine_type: EngineType | str = EngineType.VLLM,
        separate_object_groups: bool = True,
        full_sw_kv: bool = False,
    ) -> None:
        super().__init__(
            kv_caches,
            lmcache_tokens_per_chunk,
            layout_hints,
            engine_group_infos,
            engine_type,
            separate_object_groups,
            full_sw_kv,
        )
        # Readable also when the context is closed.
        leaves = list(leaves_of(self.arrays))
        addresses = {id(leaf): leaf.__array_interface__["data"][0] if leaf.nbytes else 0 for leaf in leaves}
        self._pointers = np.array([addresses[id(leaf)] for leaf in leaves], dtype=np.int64)
        self._group_pointers = [
            np.array([addresses[id(leaf)] for leaf in group_leaves(self.arrays, group)], dtype=np.int64)
            for group in self._layout.kernel_groups
        ]
        self._stream = HostStream()
        self._high_priority_stream = HostStream(priority=-1)

    def close(self) -> None:
        """Drop the cache and all buffers; idempotent. Sizes stay readable.

        A mapping goes with the last view of it, also those handed out before.
        """
        super().close()
        self.__dict__.pop("_staging", None)
        self.__dict__.pop("_block_ids", None)

    @cached_property
    def _staging(self) -> StagingBuffer:
        assert self.arrays is not None  # or it is closed, which raises
        return StagingBuffer(self._layout)

    @cached_property
    def _block_ids(self) -> npt.NDArray[np.int64]:
        assert self.arrays is not None
        return np.empty(MAX_BLOCK_IDS, dtype=np.int64)

    @property
    def device(self) -> str:
        """Where the cache lives: ``"cpu"``."""
        return self.device_type

    @property
    def kv_tensors(self) -> ArrayTree:
        """The normalised arrays, views of the registered ones: a list, nested lists, or one bare.

        Raises:
            ValueError: The context is closed.
        """
        return self.arrays

    @property
    def kv_pointers(self) -> npt.NDArray[np.int64]:
        """Addresses of all registered arrays, depth first; 0 for one without bytes."""
        return self._pointers

    @property
    def num_blocks(self) -> int:
        """Blocks of the first kernel group."""
        return self._layout.num_blocks

    @property
    def block_size(self) -> int:
        """Slots of a block of the first kernel group."""
        return self._layout.kernel_groups[0].slots_per_block

    @property
    def group_slots_per_blocks(self) -> list[int]:
        """Slots of a block, per kernel group."""
        return [group.slots_per_block for group in self._layout.kernel_groups]

    @property
    def hidden_dim_sizes(self) -> list[int]:
        """Elements of one slot in one plane, per kernel group."""
        return [group.hidden_dim_size for group in self._layout.kernel_groups]

    @property
    def kv_layer_groups_manager(self) -> KVLayerGroupsManager:
        """Kernel groups and object groups."""
        return self._layout

    @property
    def lmcache_tokens_per_chunk(self) -> int:
        """Tokens of a chunk."""
        return self._layout.lmcache_tokens_per_chunk

    @property
    def max_batch_size(self) -> int:
        """Chunks that the staging buffer holds."""
        return MAX_BATCH_SIZE

    @property
    def stream(self) -> HostStream:
        """The stream of transfers."""
        return self._stream

    @property
    def cupy_stream(self) -> HostStream:
        """The same stream; kept for callers that ask for it by this name."""
        return self._stream

    @property
    def high_priority_stream(self) -> HostStream:
        """A second stream, of higher priority in name."""
        return self._high_priority_stream

    @property
    def high_priority_cupy_stream(self) -> HostStream:
        """The same second stream."""
        return self._high_priority_stream

    def blocks_for_tokens(self, num_logical_tokens: int, group_idx: int) -> int:
        """Whole blocks of a kernel group in that many tokens. IndexError: no such group."""
        return self._layout.calculate_num_blocks(group_idx, num_logical_tokens)

    def calculate_num_blocks(self, num_tokens: int, kernel_group_idx: int) -> int:
        """The same by another name, arguments in LMCache's order. IndexError: no such group."""
        return self._layout.calculate_num_blocks(kernel_group_idx, num_tokens)

    def get_shape_desc(self, group_idx: int) -> PageBufferShapeDesc:
        """Sizes of a kernel group. IndexError: no such group."""
        return self._layout.get_shape_desc(group_idx)

    def get_engine_kv_format(self, kernel_group_idx: int) -> EngineKVFormat:
        """Format of a kernel group. IndexError: no such group."""
        format = self._layout.kernel_group(kernel_group_idx).format
        assert format is not None  # only groups parsed from a shape spec have none
        return format

    def engine_kv_formats(self) -> list[EngineKVFormat]:
        """Format of each kernel group."""
        return [self.get_engine_kv_format(index) for index in range(len(self._layout.kernel_groups))]

    def engine_kv_format_per_layer(self) -> list[EngineKVFormat | None]:
        """Format of each layer; None for a layer in no group."""
        return self.format_per_layer()

    def get_slots_per_chunk_in_sw(self, kernel_group_idx: int) -> int:
        """Slots of a chunk that a kernel group keeps. IndexError: no such group."""
        return self._layout.get_slots_per_chunk_in_sw(kernel_group_idx)

    def get_kernel_group_offset_in_object(self, object_group_idx: int, kernel_group_idx: int) -> int:
        """Byte offset of a kernel group in a chunk object.

        Raises:
            IndexError: No such group.
            ValueError: The kernel group is in another object group.
        """
        return self._layout.offset_in_object(object_group_idx, kernel_group_idx)

    def get_kv_buffer_shape(self, logical_num_tokens: int, group_idx: int = 0) -> tuple[int, int, int, int]:
        """Shape [kv, layer, slot, hidden] of that many tokens of a kernel group.

        Raises:
            IndexError: No such group.
            ValueError: Negative, or no whole number of slots of a compressed group.
        """
        group = self._layout.kernel_group(group_idx)
        tokens_per_slot = group.tokens_per_block // group.slots_per_block
        if logical_num_tokens < 0 or logical_num_tokens % tokens_per_slot:
            raise ValueError(
                f"{logical_num_tokens} tokens are no whole number of slots of kernel group {group_idx}, which has "
                f"{tokens_per_slot} tokens a slot; give a multiple of {tokens_per_slot}"
            )
        desc = group.shape_desc
        return (desc.kv_size, group.num_layers, logical_num_tokens // tokens_per_slot, group.hidden_dim_size)

    def get_kernel_group_shape_dtype(
        self, num_tokens: int, kernel_group_idx: int
    ) -> tuple[tuple[int, int, int, int], DType]:
        """Shape as :meth:`get_kv_buffer_shape`, and the dtype. Raises the same."""
        shape = self.get_kv_buffer_shape(num_tokens, kernel_group_idx)
        return shape, self._layout.kernel_group(kernel_group_idx).dtype

    def cache_size_per_token(self) -> int:
        """Bytes that one token takes in all kernel groups together, per group rounded down where it shares a slot."""
        return sum(
            group.region_nbytes(1) // (group.tokens_per_block // group.slots_per_block)
            for group in self._layout.kernel_groups
        )

    def get_group_kv_pointers(self, group_idx: int) -> npt.NDArray[np.int64]:
        """Addresses of a kernel group's arrays: per layer its planes; of K and V lists all K first; of a cross-layer
        array that one. IndexError: no such group."""
        self._layout.kernel_group(group_idx)
        return self._group_pointers[group_idx]

    def get_kernel_group_kv_pointers(self, kernel_group_idx: int) -> npt.NDArray[np.int64]:
        """The same by LMCache's other name."""
        return self.get_group_kv_pointers(kernel_group_idx)

    def kernel_group_planes(self, kernel_group_idx: int) -> tuple[PagedPlane, ...]:
        """The strided views of a kernel group's layers and planes, in the order of a chunk; made once.

        Raises:
            IndexError: No such group.
            ValueError: The context is closed.
        """
        return self.planes(kernel_group_idx)

    def stage_block_ids(self, block_ids_per_group: Sequence[Sequence[int]]) -> list[npt.NDArray[np.int64]]:
        """Write block ids into one buffer; a view per group, good until the next call.

        Raises:
            ValueError: More ids than the buffer holds (1,000,000), or one that is no 64-bit integer.
        """
        staging = self._block_ids
        counts = [len(ids) for ids in block_ids_per_group]
        total = sum(counts)
        if total > len(staging):
            raise ValueError(f"{total} block ids came, but the staging buffer holds {len(staging)}; stage fewer chunks")
        views = []
        end = 0
        for index, (ids, count) in enumerate(zip(block_ids_per_group, counts, strict=True)):
            view = staging[end : end + count]
            if count:
                given = np.asarray(ids)
                fits = np.can_cast(given.dtype, np.int64) or (given.dtype.kind == "u" and given.max() < 2**63)
                if given.ndim != 1 or not fits:
                    raise ValueError(
                        f"block ids of group {index} are {given.dtype}; give a flat list of 64-bit integers"
                    )
                view[...] = given
            views.append(view)
            end += count
        return views

    def get_tmp_gpu_buffer_flat(self, chunk_idx: int) -> npt.NDArray[np.uint8]:
        """Bytes of one chunk slot. ValueError: no such slot."""
        return self._staging.chunk(chunk_idx)

    def get_temp_kernel_group_buffer(self, batch_idx: int, kernel_group_idx: int) -> Array:
        """Typed view [kv, layer, slot, hidden] of a kernel group in one chunk slot: a whole chunk of slots.

        Raises:
            ValueError: No such chunk slot.
            IndexError: No such kernel group.
        """
        return self._staging.kernel_group(batch_idx, kernel_group_idx)

    def get_temp_object_group_buffer(self, batch_idx: int, object_group_idx: int) -> npt.NDArray[np.uint8]:
        """Bytes of an object group in one chunk slot: a whole chunk of slots.

        Raises:
            ValueError: No such chunk slot.
            IndexError: No such object group.
        """
        return self._staging.object_group(batch_idx, object_group_idx)

    def get_tmp_chunk_gpu_buffer(self, group_idx: int = 0) -> Array:
        """Typed view of a kernel group in the first chunk slot. IndexError: no such group."""
        return self.get_temp_kernel_group_buffer(0, group_idx)

    def get_tmp_chunk_gpu_buffer_batched(self, batch_size: int, group_idx: int = 0) -> list[Array]:
        """Typed views of a kernel group in the first chunk slots.

        Raises:
            ValueError: More chunk slots than there are, or a negative number of them.
            IndexError: No such group.
        """
        if not 0 <= batch_size <= MAX_BATCH_SIZE:
            raise ValueError(f"batch_size is {batch_size}, but the staging buffer has {MAX_BATCH_SIZE} chunk slots")
        self._layout.kernel_group(group_idx)
        return [self.get_temp_kernel_group_buffer(batch, group_idx) for batch in range(batch_size)]

    def report_status(self) -> dict[str, Any]:
        """What is registered, as plain data."""
        object_group_of = {
            kernel_group: index
            for index, group in enumerate(self._layout.object_groups)
            for kernel_group in group.kernel_group_indices
        }
        return {
            "num_layers": self.num_layers,
            "num_blocks": self.num_blocks,
            "cache_size_per_token": self.cache_size_per_token(),
            "kernel_groups": [
                {
                    "kernel_group_idx": index,
                    "engine_group_idx": group.engine_group_idx,
                    "object_group_idx": object_group_of[index],
                    "num_layers": group.num_layers,
                    "layer_indices": list(group.layer_indices),
                    "tokens_per_block": group.tokens_per_block,
                    "slots_per_block": group.slots_per_block,
                    "dtype": dtype_name(group.dtype),
                    **_format_report(self.get_engine_kv_format(index), group.shape_desc),
                }
                for index, group in enumerate(self._layout.kernel_groups)
            ],
        }


def _format_report(format: EngineKVFormat, desc: PageBufferShapeDesc) -> dict[str, Any]:
    return {
        "engine_kv_concrete_shape": format.concrete_shape(desc.nl, desc.nb, desc.bs, desc.nh, desc.hs),
        "is_mla": format.is_mla,
        "engine_kv_format": format.name,
        "engine_kv_shape": format.describe(),
        "attention_backend": format.attention_backend,
    }
