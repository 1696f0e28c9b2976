"""Registrations: caches of one kind of layer or of hybrid models, with groups, windows, chunk sizes and block ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import Any

from hypothesis import strategies as st

from kvshm.dtypes import DType
from kvshm.formats import EngineKVFormat
from kvshm.layout import EngineGroupInfo, KVLayerGroupsManager
from kvshm.spec import ArraySpec
from kvshm.strategies.arrays import array_specs, orders
from kvshm.strategies.caches import LayerKind, PagedCache, draw_cache, draw_layer_kind
from kvshm.strategies.forms import REGISTRABLE_FORMATS, kv_formats

__all__ = ["Registration", "block_id_lists", "chunk_sizes", "engine_groups", "registrations"]

F = EngineKVFormat

# Formats whose layers may stand beside one another: one engine and one set of hints names them all.
_OF_EITHER = (
    F.NL_X_NB_BS_HS,
    F.NL_X_NB_BSV_BSS,
    F.NL_X_TWO_NB_NH_ONE_BS_HS,
    F.NL_X_TWO_X_NB_BS_NH_HS,
    F.NL_X_NP_X_NB_BS_ONE_HS,
)
HYBRIDS: tuple[tuple[EngineKVFormat, ...], ...] = (
    (F.NL_X_TWO_NB_BS_NH_HS, F.NL_X_NB_TWO_BS_NH_HS, F.NL_X_NB_BS_NH_CS, *_OF_EITHER),
    (F.NL_X_TWO_NB_NH_BS_HS, F.NL_X_NB_TWO_NH_BS_HS, F.NL_X_NB_NH_BS_CS, *_OF_EITHER),
    (F.NL_X_NB_BS_HS, F.NL_X_NB_BS_NH_HS),
)
RATIOS = (1, 2, 4)  # tokens of a slot
_SLOTS = st.sampled_from([1, 2, 3, 4])
_OUTSIDE = array_specs(max_side=3, max_offset=0)
_TAGS = st.sampled_from([0, 0, 0, 1, 2])
_RARELY = st.sampled_from([False, False, False, True])
_CHOICES = st.sampled_from(HYBRIDS)


@dataclass(frozen=True)
class Registration:
    """What an engine registers, and what the server is set to; arrays as specs."""

    cache: PagedCache
    engine_group_infos: tuple[EngineGroupInfo, ...]
    lmcache_tokens_per_chunk: int
    separate_object_groups: bool
    full_sw_kv: bool

    def manager(self) -> KVLayerGroupsManager:
        """The kernel groups and object groups, laid out on the specs of the normalised cache."""
        formats = [format or self.cache.formats[self._first] for format in self.cache.formats]
        manager = KVLayerGroupsManager(
            self.cache.normalised,
            [format for format in formats if format is not None],
            self.engine_group_infos,
            self.lmcache_tokens_per_chunk,
            self.separate_object_groups,
        )
        if self.full_sw_kv:
            manager.enable_full_sw_kv()
        return manager

    @property
    def _first(self) -> int:
        return next(layer for layer, format in enumerate(self.cache.formats) if format is not None)

    def arguments(self, kv_caches: Any) -> dict[str, Any]:
        """The arguments of :class:`kvshm.CPUCacheContext` for these arrays, see :meth:`PagedCache.arrays`."""
        assert self.cache.engine_type is not None
        return {
            "kv_caches": kv_caches,
            "lmcache_tokens_per_chunk": self.lmcache_tokens_per_chunk,
            "layout_hints": self.cache.layout_hints,
            "engine_group_infos": self.engine_group_infos,
            "engine_type": self.cache.engine_type,
            "separate_object_groups": self.separate_object_groups,
            "full_sw_kv": self.full_sw_kv,
        }


def chunk_sizes(slots_per_block: Sequence[int], max_blocks: int = 4) -> st.SearchStrategy[int]:
    """Tokens of a chunk that holds whole blocks of all groups, up to ``max_blocks`` of the largest common ones."""
    step = lcm(*slots_per_block)
    return st.integers(1, max_blocks).map(lambda blocks: blocks * step)


@st.composite
def engine_groups(
    draw: st.DrawFn,
    kernel_groups: Sequence[Sequence[int]],
    slots_per_block: Sequence[int],
    lmcache_tokens_per_chunk: int,
    *,
    engine_group_ids: Sequence[int] | None = None,
) -> tuple[EngineGroupInfo, ...]:
    """Infos that fit these kernel groups: full and sliding attention, recurrent and tagged groups, compressed blocks.

    Args:
        kernel_groups: Layers of each kernel group, in the order of their first layers.
        slots_per_block: Per kernel group, slots that a block has in memory.
        lmcache_tokens_per_chunk: A multiple of all of these.
        engine_group_ids: Per kernel group; those of one id share the tokens of a block. Else one id for each, in
            any order.
    """
    if engine_group_ids is None:
        engine_group_ids = draw(st.permutations(range(len(kernel_groups))))
    return _draw_infos(draw, kernel_groups, slots_per_block, lmcache_tokens_per_chunk, engine_group_ids)


def _draw_infos(
    draw: st.DrawFn,
    kernel_groups: Sequence[Sequence[int]],
    slots_per_block: Sequence[int],
    lmcache_tokens_per_chunk: int,
    engine_group_ids: Sequence[int],
) -> tuple[EngineGroupInfo, ...]:
    told: dict[int, int] = {}
    infos = []
    for layers, slots, group_id in zip(kernel_groups, slots_per_block, engine_group_ids, strict=True):
        if group_id not in told:
            fitting = [slots * ratio for ratio in RATIOS if lmcache_tokens_per_chunk % (slots * ratio) == 0]
            told[group_id] = draw(st.sampled_from(fitting))
        tokens = told[group_id]
        infos.append(
            EngineGroupInfo(
                engine_group_id=group_id,
                layer_indices=tuple(layers),
                tokens_per_block=0 if tokens == slots and draw(st.booleans()) else tokens,
                sw_size_tokens=draw(_windows(tokens, lmcache_tokens_per_chunk)),
                extra_object_group_tag=draw(_TAGS),
                recurrent_state=draw(_RARELY),
            )
        )
    return tuple(infos)


@lru_cache
def _windows(tokens_per_block: int, tokens_per_chunk: int) -> st.SearchStrategy[int]:
    """None, whole blocks below a chunk, or anything from a chunk on."""
    blocks = tokens_per_chunk // tokens_per_block
    below = st.integers(1, blocks - 1).map(lambda count: count * tokens_per_block) if blocks > 1 else st.nothing()
    return st.just(-1) | below | st.integers(tokens_per_chunk, 3 * tokens_per_chunk)


@st.composite
def registrations(
    draw: st.DrawFn,
    formats: st.SearchStrategy[EngineKVFormat] | EngineKVFormat | None = None,
    *,
    dtype: st.SearchStrategy[DType] | None = None,
    max_side: int = 5,
    max_chunks: int = 3,
    hybrid: bool = True,
) -> Registration:
    """Registrations that a context takes. The caches have room for one chunk at least, and for up to ``max_chunks``.

    Args:
        formats: The format of all layers, or a strategy of it; else any of :data:`REGISTRABLE_FORMATS`, and
            unless ``hybrid`` is false also layers of several formats and shapes in one cache.
        dtype: dtypes of the arrays; else any of :func:`dtypes`.
        max_side: Largest number of layers, slots, heads, and elements of a head.
    """
    if formats is None and hybrid and draw(st.booleans()):
        return _hybrid(draw, dtype, max_side, max_chunks)
    chosen = kv_formats(REGISTRABLE_FORMATS) if formats is None else formats
    format = chosen if isinstance(chosen, EngineKVFormat) else draw(chosen)
    kind = draw_layer_kind(draw, format, dtype=dtype, max_side=max_side)
    layers = range(kind.sizes.nl)
    slots = kind.sizes.bs
    chunk = draw(chunk_sizes([slots]))
    infos: tuple[EngineGroupInfo, ...] = ()
    if draw(st.booleans()):
        group_of = [draw(st.integers(0, 2)) for _ in layers]
        groups = [[layer for layer in layers if group_of[layer] == group] for group in dict.fromkeys(group_of)]
        ids = draw(orders(len(groups)))
        infos = _draw_infos(draw, groups, [slots] * len(groups), chunk, ids)
    needed = max([chunk // (info.tokens_per_block or slots) for info in infos], default=chunk // slots)
    kind = kind._replace(sizes=kind.sizes._replace(nb=_room(draw, format, needed, max_chunks)))
    return Registration(draw_cache(draw, [kind] * len(layers)), infos, chunk, draw(st.booleans()), draw(st.booleans()))


def _hybrid(draw: st.DrawFn, dtype: st.SearchStrategy[DType] | None, max_side: int, max_chunks: int) -> Registration:
    choices = draw(_CHOICES)
    slots = st.just(draw(_SLOTS)) if draw(st.booleans()) else _SLOTS
    drawn = [
        draw_layer_kind(draw, format, dtype=dtype, max_side=max_side, block_size=slots)
        for format in draw(st.lists(st.sampled_from(choices), min_size=1, max_size=4))
    ]
    which = draw(st.lists(st.sampled_from([*range(len(drawn)), None]), min_size=1, max_size=6).filter(_any_group))
    used = [index for index in dict.fromkeys(which) if index is not None]
    groups = [[layer for layer, index in enumerate(which) if index == group] for group in used]
    kinds = [drawn[index] for index in used]
    chunk = draw(chunk_sizes([kind.sizes.bs for kind in kinds]))
    ids = _engine_group_ids(draw, kinds)
    infos = _draw_infos(draw, groups, [kind.sizes.bs for kind in kinds], chunk, ids)
    num_blocks: dict[int, int] = {}
    for info, kind in zip(infos, kinds, strict=True):
        if info.engine_group_id not in num_blocks:
            tokens = info.tokens_per_block or kind.sizes.bs
            num_blocks[info.engine_group_id] = _room(draw, kind.format, chunk // tokens, max_chunks)
    kinds = [
        # The number of layers, which says nothing here, tells kinds apart that are otherwise alike.
        kind._replace(sizes=kind.sizes._replace(nl=group, nb=num_blocks[info.engine_group_id]))
        for group, (kind, info) in enumerate(zip(kinds, infos, strict=True))
    ]
    layers: list[LayerKind | ArraySpec] = [
        draw(_OUTSIDE) if index is None else kinds[used.index(index)] for index in which
    ]
    return Registration(draw_cache(draw, layers), infos, chunk, draw(st.booleans()), draw(st.booleans()))


def _any_group(which: Sequence[int | None]) -> bool:
    return any(index is not None for index in which)


def _engine_group_ids(draw: st.DrawFn, kinds: Sequence[LayerKind]) -> list[int]:
    """One id for each kind, or one for several with blocks of one size that no kernel group could hold together."""
    ids = list(draw(orders(len(kinds))))
    together = [kinds[0]]
    for index, kind in enumerate(kinds[1:], 1):
        alike = any(_is_alike(kind, other) for other in together)
        shares_blocks = kind.sizes.bs == kinds[0].sizes.bs and "TWO" not in (
            kind.format.axes[1],
            kinds[0].format.axes[1],
        )
        if shares_blocks and not alike and draw(st.booleans()):
            ids[index] = ids[0]
            together.append(kind)
    return [sorted(set(ids)).index(group_id) for group_id in ids]


def _is_alike(kind: LayerKind, other: LayerKind) -> bool:
    """Whether layers of the two may be one kernel group. Rows of several planes are alike where they are as long."""
    heads = "NH" not in kind.format.axes or kind.sizes.nh == other.sizes.nh
    planes = (kind.format.is_kv_second_tuple and kind.format.is_mla) or kind.planes == other.planes
    return kind.format is other.format and heads and planes


def _room(draw: st.DrawFn, format: EngineKVFormat, blocks_per_chunk: int, max_chunks: int) -> int:
    """Blocks for one chunk at least; not 2 where that would be taken for a K/V axis."""
    number = draw(st.integers(blocks_per_chunk, max_chunks * blocks_per_chunk + 1))
    return 3 if number == 2 and format.axes[:2] == ("NB", "TWO") else number


@st.composite
def block_id_lists(
    draw: st.DrawFn,
    manager: KVLayerGroupsManager,
    *,
    num_chunks: int | None = None,
    max_chunks: int = 3,
    unique: bool = True,
) -> list[list[int]]:
    """Per kernel group the block ids of whole chunks, before any window cut: what gather and scatter take.

    Args:
        num_chunks: Else as many as the blocks allow, up to ``max_chunks``, and none where they do not.
        unique: No id twice in a group, as scatter needs it.

    Raises:
        ValueError: More chunks than unique ids allow.
    """
    per_chunk = [manager.blocks_per_chunk(index) for index in range(len(manager.kernel_groups))]
    num_blocks = [group.shape_desc.nb for group in manager.kernel_groups]
    room = min(blocks // wanted for blocks, wanted in zip(num_blocks, per_chunk, strict=True))
    if num_chunks is None:
        num_chunks = draw(st.integers(min(1, room), min(room, max_chunks)))
    elif unique and num_chunks > room:
        raise ValueError(f"{num_chunks} chunks of {per_chunk} blocks need more than the {num_blocks} blocks there are")
    return [
        draw(
            st.permutations(range(blocks)).map(lambda ids, count=count: list(ids[:count]))  # type: ignore[misc]
            if unique
            else st.lists(st.integers(0, blocks - 1), min_size=count, max_size=count)
        )
        for blocks, count in zip(num_blocks, [num_chunks * wanted for wanted in per_chunk], strict=True)
    ]
