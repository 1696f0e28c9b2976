"""Kernel groups and object groups: which layers are moved together, and which of those share a chunk object.

A kernel group holds the layers that are alike in everything a transfer depends on. An object group holds the kernel
groups whose chunks are cached and found together; groups with other windows, recurrent state or a tag stand apart.
In a chunk object the kernel groups of an object group follow one another, each as [kv, layer, slot, hidden].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import Any, Literal, NamedTuple

from kvshm.contiguity import ArrayTree
from kvshm.dtypes import DType, dtype_name
from kvshm.formats.geometry import Geometry
from kvshm.formats.names import EngineKVFormat
from kvshm.layout.engine_groups import (
    EXCLUDED_ENGINE_GROUP,
    EngineGroupInfo,
    checked_infos,
    get_engine_group_indices,
)
from kvshm.spec import ArraySpec

__all__ = [
    "AttentionWindows",
    "KVLayerGroupsManager",
    "KernelGroupInfo",
    "ObjectGroupInfo",
    "PageBufferShapeDesc",
]

GroupKind = Literal["attention", "recurrent", "aux"]


@dataclass(frozen=True, slots=True)
class PageBufferShapeDesc:
    """Sizes that all layers of a kernel group share. Strides and sizes count elements of ``dtype``."""

    kv_size: int
    nl: int
    nb: int
    bs: int
    nh: int
    hs: int
    element_size: int
    block_stride_elems: int  # from one block to the next where blocks may lie apart; else 0
    dtype: DType


@dataclass(frozen=True, slots=True)
class KernelGroupInfo:
    """Layers alike in everything a transfer depends on, and what their blocks mean."""

    layer_indices: tuple[int, ...]
    shape_desc: PageBufferShapeDesc
    dtype: DType
    format: EngineKVFormat | None = None
    tokens_per_block: int = 0
    engine_group_idx: int = 0
    sw_size_tokens: int = -1
    extra_object_group_tag: int = 0
    recurrent_state: bool = False

    @property
    def engine_kv_format(self) -> EngineKVFormat | None:
        """LMCache's name for ``format``."""
        return self.format

    @property
    def num_layers(self) -> int:
        """Layers of the group."""
        return len(self.layer_indices)

    @property
    def hidden_dim_size(self) -> int:
        """Elements of one slot in one K/V plane of a layer."""
        return self.shape_desc.nh * self.shape_desc.hs

    @property
    def slots_per_block(self) -> int:
        """Slots that one block has in memory; fewer than its tokens in a compressed group."""
        return self.shape_desc.bs

    def calculate_slots(self, num_tokens: int) -> int:
        """Slots of a whole number of blocks' tokens (rounded down otherwise)."""
        return num_tokens * self.slots_per_block // self.tokens_per_block

    def region_nbytes(self, num_slots: int) -> int:
        """Bytes of ``num_slots`` slots of all layers and planes."""
        desc = self.shape_desc
        return desc.kv_size * self.num_layers * num_slots * self.hidden_dim_size * desc.element_size


@dataclass(frozen=True, slots=True)
class ObjectGroupInfo:
    """Kernel groups whose chunks are one cached object, in the order in which they lie in it."""

    kernel_group_indices: tuple[int, ...]
    sw_size_chunks: int = -1  # chunks that a sliding window reaches over; -1: full attention
    aux: bool = False
    recurrent: bool = False


@dataclass(frozen=True, slots=True)
class AttentionWindows:
    """Per object group, how many of the last chunks a hit needs (-1: all), and what kind of group it is."""

    num_chunks_in_sw: tuple[int, ...]
    group_kinds: tuple[GroupKind, ...]
    world_size: int = 1


class _Identity(NamedTuple):
    """Layers with equal identity are one kernel group."""

    kv_size: int
    num_heads: int
    head_size: int
    block_size: int
    engine_group_idx: int
    dtype: DType
    format: EngineKVFormat


class _LayerLayout(NamedTuple):
    """What a kernel group needs to know of one layer."""

    kv_size: int
    num_heads: int
    head_size: int
    block_size: int
    dtype: DType
    num_blocks: int
    strides: tuple[int, ...]  # elements from block to block, per array of the layer
    block_stride: int  # the first of them where blocks may lie apart, else 0
    packing: str  # of a slot's elements in a chunk


class KVLayerGroupsManager:
    """The kernel groups and object groups of a normalised cache.

    Args:
        kv_caches: Normalised arrays or specs, see :func:`kvshm.formats.normalize_and_discover_per_layer_formats`.
        engine_kv_formats: One format per layer.
        engine_group_infos: One per kernel group, in the order of their first layers; empty: one engine group.
        lmcache_tokens_per_chunk: Tokens of a chunk; a multiple of every group's tokens per block.
        separate_object_groups: One object group per window, kind and tag; else one for all kernel groups.

    Raises:
        ValueError: Infos do not fit the kernel groups; layers of a group differ in blocks or padding; the chunk size
            or a window below it is no whole number of blocks.
    """

    def __init__(
        self,
        kv_caches: ArrayTree,
        engine_kv_formats: Sequence[EngineKVFormat],
        engine_group_infos: Sequence[EngineGroupInfo] = (),
        lmcache_tokens_per_chunk: int = 256,
        separate_object_groups: bool = True,
    ) -> None:
        if lmcache_tokens_per_chunk < 1:
            raise ValueError(f"lmcache_tokens_per_chunk is {lmcache_tokens_per_chunk}; a chunk has at least one token")
        self._tokens_per_chunk = lmcache_tokens_per_chunk
        self._full_sw_kv = False
        self._is_frozen = False
        self._kernel_groups, self._packings = _kernel_groups(
            kv_caches, engine_kv_formats, checked_infos(engine_group_infos)
        )
        _check_chunk_size(self._kernel_groups, lmcache_tokens_per_chunk)
        self._object_groups = (
            _separate(self._kernel_groups, lmcache_tokens_per_chunk)
            if separate_object_groups
            else (ObjectGroupInfo(tuple(range(len(self._kernel_groups)))),)
        )

    @property
    def kernel_groups(self) -> tuple[KernelGroupInfo, ...]:
        """Kernel groups in the order of their first layers."""
        return self._kernel_groups

    @property
    def kv_layer_groups(self) -> tuple[KernelGroupInfo, ...]:
        """LMCache's name for :attr:`kernel_groups`."""
        return self._kernel_groups

    @property
    def object_groups(self) -> tuple[ObjectGroupInfo, ...]:
        """Object groups in the order of their first kernel groups, tagged ones last."""
        return self._object_groups

    @property
    def num_blocks(self) -> int:
        """Blocks of the first kernel group."""
        return self._kernel_groups[0].shape_desc.nb

    @property
    def lmcache_tokens_per_chunk(self) -> int:
        """Tokens of a chunk."""
        return self._tokens_per_chunk

    def kernel_group(self, kernel_group_idx: int) -> KernelGroupInfo:
        """One kernel group. IndexError if there is none of that index."""
        if not 0 <= kernel_group_idx < len(self._kernel_groups):
            raise IndexError(f"kernel group {kernel_group_idx} is outside [0, {len(self._kernel_groups)})")
        return self._kernel_groups[kernel_group_idx]

    def object_group(self, object_group_idx: int) -> ObjectGroupInfo:
        """One object group. IndexError if there is none of that index."""
        if not 0 <= object_group_idx < len(self._object_groups):
            raise IndexError(f"object group {object_group_idx} is outside [0, {len(self._object_groups)})")
        return self._object_groups[object_group_idx]

    def packings(self, kernel_group_idx: int) -> tuple[str, ...]:
        """Per layer of a kernel group, how the elements of a slot are packed in a chunk. IndexError as above."""
        self.kernel_group(kernel_group_idx)
        return self._packings[kernel_group_idx]

    def moves_whole_blocks(self, kernel_group_idx: int) -> bool:
        """Whether a block is no row of tokens, so that it moves whole: recurrent state, and index pages, which hold all
        values and then all scales. IndexError as above."""
        group = self.kernel_group(kernel_group_idx)
        return group.recurrent_state or group.format is EngineKVFormat.NL_X_NB_BSV_BSS

    def first_kept_slot(self, kernel_group_idx: int, num_protected_tokens: int) -> int:
        """The first kept slot of a chunk that may be written where its first tokens must not be.

        No slot with a protected token is written. Blocks that move whole are, if one of their tokens is not protected.
        At least :meth:`get_slots_per_chunk_in_sw` where nothing may be written. IndexError as above.
        """
        group = self.kernel_group(kernel_group_idx)
        protected = max(0, num_protected_tokens)
        if self.moves_whole_blocks(kernel_group_idx):
            slots = protected // group.tokens_per_block * group.slots_per_block
        else:
            slots = -(-protected // (group.tokens_per_block // group.slots_per_block))
        cut = self.blocks_per_chunk(kernel_group_idx) - self.blocks_per_chunk_in_sw(kernel_group_idx)
        return max(0, slots - cut * group.slots_per_block)

    def get_shape_desc(self, kernel_group_idx: int) -> PageBufferShapeDesc:
        """Sizes of a kernel group. IndexError if there is none of that index."""
        return self.kernel_group(kernel_group_idx).shape_desc

    def enable_full_sw_kv(self) -> None:
        """Keep whole chunks of groups with a sliding window too, so that a chunk is good at any position.

        Raises:
            ValueError: The layout is that of a registered cache.
        """
        if self._is_frozen and not self._full_sw_kv:
            raise ValueError(
                "this layout is that of a context, whose chunks have their size already; make a CPUCacheContext with "
                "full_sw_kv=True instead"
            )
        self._full_sw_kv = True

    def freeze(self) -> None:
        """Let the layout change no more: a cache is registered with it."""
        self._is_frozen = True

    def get_subchunk_sw_size_tokens(self, kernel_group_idx: int) -> int:
        """Tokens of a chunk that a kernel group keeps: its window, or the whole chunk. IndexError as above."""
        window = self.kernel_group(kernel_group_idx).sw_size_tokens
        if self._full_sw_kv or window == -1:
            return self._tokens_per_chunk
        return min(window, self._tokens_per_chunk)

    def get_slots_per_chunk_in_sw(self, kernel_group_idx: int) -> int:
        """Slots of a chunk that a kernel group keeps. IndexError as above."""
        group = self.kernel_group(kernel_group_idx)
        return group.calculate_slots(self.get_subchunk_sw_size_tokens(kernel_group_idx))

    def blocks_per_chunk(self, kernel_group_idx: int) -> int:
        """Blocks of a whole chunk. IndexError as above."""
        return self._tokens_per_chunk // self.kernel_group(kernel_group_idx).tokens_per_block

    def blocks_per_chunk_in_sw(self, kernel_group_idx: int) -> int:
        """Blocks of a chunk that a kernel group keeps: the last ones. IndexError as above."""
        tokens_per_block = self.kernel_group(kernel_group_idx).tokens_per_block
        return self.get_subchunk_sw_size_tokens(kernel_group_idx) // tokens_per_block

    def calculate_num_blocks(self, kernel_group_idx: int, num_tokens: int) -> int:
        """Whole blocks in ``num_tokens`` tokens. IndexError as above."""
        if num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens}; it cannot be negative")
        group = self.kernel_group(kernel_group_idx)
        return group.calculate_slots(num_tokens) // group.slots_per_block

    def get_attn_desc(self) -> AttentionWindows:
        """Windows and kinds of all object groups. Whole chunks kept (``full_sw_kv``) lift the window of attention
        groups, but not of recurrent ones, whose snapshots are bound to their position."""
        return AttentionWindows(
            tuple(
                -1 if self._full_sw_kv and not group.recurrent else group.sw_size_chunks
                for group in self._object_groups
            ),
            tuple(
                "aux" if group.aux else "recurrent" if group.recurrent else "attention" for group in self._object_groups
            ),
        )

    def object_nbytes(self, object_group_idx: int) -> int:
        """Bytes of one chunk object. IndexError as above."""
        return sum(map(self._kept_nbytes, self.object_group(object_group_idx).kernel_group_indices))

    def offset_in_object(self, object_group_idx: int, kernel_group_idx: int) -> int:
        """Byte offset of a kernel group in the chunk object of its object group.

        Raises:
            IndexError: No such group.
            ValueError: The kernel group is in another object group.
        """
        self.kernel_group(kernel_group_idx)
        indices = self.object_group(object_group_idx).kernel_group_indices
        if kernel_group_idx not in indices:
            raise ValueError(
                f"kernel group {kernel_group_idx} is not in object group {object_group_idx}, which has {list(indices)}"
            )
        return sum(map(self._kept_nbytes, indices[: indices.index(kernel_group_idx)]))

    def _kept_nbytes(self, kernel_group_idx: int) -> int:
        group = self.kernel_group(kernel_group_idx)
        return group.region_nbytes(self.get_slots_per_chunk_in_sw(kernel_group_idx))


def _kernel_groups(
    kv_caches: ArrayTree, formats: Sequence[EngineKVFormat], infos: Sequence[EngineGroupInfo]
) -> tuple[tuple[KernelGroupInfo, ...], tuple[tuple[str, ...], ...]]:
    """The kernel groups, and the packings of their layers."""
    if not formats:
        raise ValueError("there are no layers; register at least one")
    engine_groups = get_engine_group_indices(infos, len(formats))
    geometries = {format: Geometry(kv_caches, format) for format in dict.fromkeys(formats)}
    known: dict[Any, _LayerLayout] = {}  # the layers of a cache are alike: look once at each kind
    layouts: list[_LayerLayout | None] = [None] * len(formats)
    members: dict[_Identity, list[int]] = {}
    for layer, format in enumerate(formats):
        engine_group = engine_groups[layer] if engine_groups is not None else 0
        if engine_group == EXCLUDED_ENGINE_GROUP:
            continue
        leaves = geometries[format].leaves(layer)
        kind = (format, *((leaf.shape, _strides(leaf), leaf.dtype) for leaf in leaves))
        layout = known.get(kind)
        if layout is None:
            layout = known[kind] = _layer_layout(geometries[format], layer)
        layouts[layer] = layout
        kv_size, nh, hs, bs, dtype = layout[:5]
        members.setdefault(_Identity(kv_size, nh, hs, bs, engine_group, dtype, format), []).append(layer)
    if not members:
        raise ValueError("no layer is in any engine group; name the layers of at least one")
    if infos and len(infos) != len(members):
        raise ValueError(
            f"{len(infos)} engine group infos came for {len(members)} kernel groups with layers "
            f"{list(members.values())}; give one info per kernel group, in the order of their first layers"
        )
    told: Sequence[EngineGroupInfo | None] = infos or [None] * len(members)
    groups = tuple(
        _kernel_group(index, identity, {layer: layouts[layer] for layer in layers}, info)
        for index, ((identity, layers), info) in enumerate(zip(members.items(), told, strict=True))
    )
    return groups, tuple(
        tuple(layout.packing for layer in layers if (layout := layouts[layer])) for layers in members.values()
    )


def _strides(leaf: Any) -> tuple[int, ...]:
    """What differs between layouts: elements for a spec, bytes for an array."""
    strides: tuple[int, ...] = leaf.stride if isinstance(leaf, ArraySpec) else leaf.strides
    return strides


def _layer_layout(geometry: Geometry, layer: int) -> _LayerLayout:
    """ValueError: bytes lie between the elements where the format does not allow it, or the dtype has no name."""
    strides = []
    for leaf in geometry.leaves(layer):
        dtype_name(leaf.dtype)  # a cache of a dtype without a name could not be described to anybody
        spec = leaf if isinstance(leaf, ArraySpec) else ArraySpec.of(leaf)
        apart = geometry.format.has_block_axis and _slots_lie_apart(spec)
        block = spec[0,] if geometry.format.has_block_axis and spec.shape[0] else spec
        if not (block.is_contiguous or apart or _is_heads_first_pair(geometry.format, spec)):
            allowed = "inside a block" if geometry.format.has_block_axis else f"in {geometry.format.name}"
            raise ValueError(
                f"layer {layer}: array of shape {spec.shape} and stride {spec.stride} (elements) has padding "
                f"{allowed}, which no transfer can honour; only between blocks may it stand, in formats that begin "
                f"with NB and have no K/V axis"
            )
        strides.append(spec.stride[0] if apart or spec.shape[0] > 1 else prod(spec.shape[1:]))
    return _LayerLayout(
        kv_size=geometry.kv_size,
        num_heads=geometry.num_heads(layer),
        head_size=geometry.head_size(layer),
        block_size=geometry.block_size(layer),
        dtype=geometry.dtype(layer),
        num_blocks=geometry.num_blocks_of(layer),
        strides=tuple(strides),
        block_stride=strides[0] if geometry.format.has_block_axis else 0,
        packing=geometry.packing(layer),
    )


def _is_heads_first_pair(format: EngineKVFormat, spec: ArraySpec) -> bool:
    """K or V of a pair, read slots first and stored heads first: [NB, NH, BS, HS] without gaps."""
    return format is EngineKVFormat.NL_X_TWO_X_NB_BS_NH_HS and spec.transpose((0, 2, 1, 3)).is_contiguous


def _slots_lie_apart(spec: ArraySpec) -> bool:
    """Blocks and slots were one padded axis, as engines without a block axis have it: each slot keeps its padding."""
    if len(spec.shape) != 3 or 0 in spec.shape:
        return False
    block, slot, _ = spec.stride
    return spec[0, 0].is_contiguous and slot >= spec.shape[2] and block == spec.shape[1] * slot


def _kernel_group(
    index: int, identity: _Identity, layouts: dict[int, _LayerLayout | None], info: EngineGroupInfo | None
) -> KernelGroupInfo:
    layers = tuple(layouts)
    if info is not None and info.layer_indices != layers:
        raise ValueError(
            f"kernel group {index} has layers {list(layers)}, but its engine group info names "
            f"{list(info.layer_indices)}; infos follow the order of the kernel groups' first layers, layers rise"
        )
    first = layouts[layers[0]]
    assert first is not None
    for layer, other in layouts.items():
        assert other is not None
        if (other.num_blocks, other.strides) != (first.num_blocks, first.strides):
            raise ValueError(
                f"kernel group {index}: layer {layers[0]} has {first.num_blocks} blocks {list(first.strides)} elements "
                f"apart, but layer {layer} has {other.num_blocks} blocks {list(other.strides)} elements apart; layers "
                f"of one group share block ids and strides, put layer {layer} into an engine group of its own"
            )
    slots = identity.block_size
    tokens = info.tokens_per_block if info is not None and info.tokens_per_block > 0 else slots
    if slots < 1 or tokens % slots:
        raise ValueError(
            f"kernel group {index}: a block of {tokens} tokens cannot have {slots} slots; tokens_per_block must be a "
            f"positive multiple of the slots of a block"
        )
    return KernelGroupInfo(
        layer_indices=layers,
        shape_desc=PageBufferShapeDesc(
            kv_size=identity.kv_size,
            nl=len(layers),
            nb=first.num_blocks,
            bs=slots,
            nh=identity.num_heads,
            hs=identity.head_size,
            element_size=identity.dtype.itemsize,
            block_stride_elems=first.block_stride,
            dtype=identity.dtype,
        ),
        dtype=identity.dtype,
        format=identity.format,
        tokens_per_block=tokens,
        engine_group_idx=identity.engine_group_idx,
        sw_size_tokens=info.sw_size_tokens if info else -1,
        extra_object_group_tag=info.extra_object_group_tag if info else 0,
        recurrent_state=info.recurrent_state if info else False,
    )


def _check_chunk_size(groups: Sequence[KernelGroupInfo], tokens_per_chunk: int) -> None:
    step = lcm(*(group.tokens_per_block for group in groups))
    for index, group in enumerate(groups):
        if tokens_per_chunk % group.tokens_per_block:
            raise ValueError(
                f"kernel group {index} has blocks of {group.tokens_per_block} tokens, of which a chunk of "
                f"{tokens_per_chunk} tokens is no whole number; valid chunk sizes are multiples of {step}: {step}, "
                f"{2 * step}, {3 * step} ..."
            )
        window = group.sw_size_tokens
        if 0 < window < tokens_per_chunk and window % group.tokens_per_block:
            smaller = f"use a chunk of at most {window} tokens, a multiple of {step}, or " if step <= window else ""
            raise ValueError(
                f"kernel group {index} has a sliding window of {window} tokens, below the chunk of {tokens_per_chunk} "
                f"and no whole number of its blocks of {group.tokens_per_block} tokens; {smaller}report the window in "
                f"whole blocks"
            )


def _separate(groups: Sequence[KernelGroupInfo], tokens_per_chunk: int) -> tuple[ObjectGroupInfo, ...]:
    """One object group per tag, kind and window in chunks; tagged ones last, so that they shift no regular index."""
    buckets: dict[tuple[int, bool, int], list[int]] = {}
    for index, group in enumerate(groups):
        window = group.sw_size_tokens
        sw_size_chunks = -1 if window == -1 else -(-window // tokens_per_chunk)
        bucket = (group.extra_object_group_tag, group.recurrent_state, sw_size_chunks)
        buckets.setdefault(bucket, []).append(index)
    regular_first = sorted(buckets.items(), key=lambda item: (item[0][0] != 0, item[1][0]))
    return tuple(
        ObjectGroupInfo(tuple(indices), sw_size_chunks, aux=tag != 0, recurrent=recurrent)
        for (tag, recurrent, sw_size_chunks), indices in regular_first
    )
