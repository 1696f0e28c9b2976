"""Registrations: caches of one kind of layer or of hybrid models, with groups, windows, chunk sizes and block ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from hypothesis import strategies as st

from kvshm.formats import EngineKVFormat
from kvshm.layout import EngineGroupInfo, KVLayerGroupsManager
from kvshm.spec import ArraySpec
from kvshm.strategies.arrays import array_specs
from kvshm.strategies.caches import (
    REGISTRABLE_FORMATS,
    LayerKind,
    PagedCache,
    caches_of,
    kv_formats,
    layer_kinds,
)

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
                extra_object_group_tag=draw(st.sampled_from([0, 0, 0, 1, 2])),
                recurrent_state=draw(st.sampled_from([False, False, False, True])),
            )
        )
    return tuple(infos)


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
    max_side: int = 5,
    max_chunks: int = 3,
    hybrid: bool = True,
) -> Registration:
    """Registrations that a context takes. The caches have room for one chunk at least, and for up to ``max_chunks``.

    Args:
        formats: The format of all layers, or a strategy of it; else any of :data:`REGISTRABLE_FORMATS`, and
            unless ``hybrid`` is false also layers of several formats and shapes in one cache.
    """
    if formats is None and hybrid and draw(st.booleans()):
        return draw(_hybrids(max_side, max_chunks))
    chosen = kv_formats(REGISTRABLE_FORMATS) if formats is None else formats
    format = chosen if isinstance(chosen, EngineKVFormat) else draw(chosen)
    kind = draw(layer_kinds(format, max_side=max_side))
    layers = range(kind.sizes.nl)
    slots = kind.sizes.bs
    chunk = draw(chunk_sizes([slots]))
    infos: tuple[EngineGroupInfo, ...] = ()
    if draw(st.booleans()):
        group_of = [draw(st.integers(0, 2)) for _ in layers]
        groups = [[layer for layer in layers if group_of[layer] == group] for group in dict.fromkeys(group_of)]
        infos = draw(engine_groups(groups, [slots] * len(groups), chunk))
    needed = max([chunk // (info.tokens_per_block or slots) for info in infos], default=chunk // slots)
    kind = kind._replace(sizes=kind.sizes._replace(nb=draw(_room(format, needed, max_chunks))))
    return Registration(draw(caches_of([kind] * len(layers))), infos, chunk, draw(st.booleans()), draw(st.booleans()))


@st.composite
def _hybrids(draw: st.DrawFn, max_side: int, max_chunks: int) -> Registration:
    choices = draw(st.sampled_from(HYBRIDS))
    slots = st.sampled_from([1, 2, 3, 4])
    drawn = [
        draw(layer_kinds(format, max_side=max_side, block_size=slots))
        for format in draw(st.lists(st.sampled_from(choices), min_size=1, max_size=4))
    ]
    which = draw(st.lists(st.sampled_from([*range(len(drawn)), None]), min_size=1, max_size=6).filter(_any_group))
    used = [index for index in dict.fromkeys(which) if index is not None]
    groups = [[layer for layer, index in enumerate(which) if index == group] for group in used]
    kinds = [drawn[index] for index in used]
    chunk = draw(chunk_sizes([kind.sizes.bs for kind in kinds]))
    ids = draw(_engine_group_ids(kinds))
    infos = draw(engine_groups(groups, [kind.sizes.bs for kind in kinds], chunk, engine_group_ids=ids))
    num_blocks: dict[int, int] = {}
    for info, kind in zip(infos, kinds, strict=True):
        if info.engine_group_id not in num_blocks:
            tokens = info.tokens_per_block or kind.sizes.bs
            num_blocks[info.engine_group_id] = draw(_room(kind.format, chunk // tokens, max_chunks))
    kinds = [
        # The number of layers, which says nothing here, tells kinds apart that are otherwise alike.
        kind._replace(sizes=kind.sizes._replace(nl=group, nb=num_blocks[info.engine_group_id]))
        for group, (kind, info) in enumerate(zip(kinds, infos, strict=True))
    ]
    outside = array_specs(max_side=3, max_offset=0)
    layers: list[LayerKind | ArraySpec] = [
        draw(outside) if index is None else kinds[used.index(index)] for index in which
    ]
    return Registration(draw(caches_of(layers)), infos, chunk, draw(st.booleans()), draw(st.booleans()))


def _any_group(which: Sequence[int | None]) -> bool:
    return any(index is not None for index in which)


@st.composite
def _engine_group_ids(draw: st.DrawFn, kinds: Sequence[LayerKind]) -> list[int]:
    """One id for each kind, or one for several that no kernel group could hold together."""
    ids = list(draw(st.permutations(range(len(kinds)))))
    for index, kind in enumerate(kinds[1:], 1):
        before = kinds[:index]
        apart = all(kind.format is not other.format for other in before)
        like_first = kind.sizes.bs == kinds[0].sizes.bs and "TWO" not in (kind.format.axes[1], kinds[0].format.axes[1])
        if apart and like_first and draw(st.booleans()):
            ids[index] = ids[0]
    return [sorted(set(ids)).index(group_id) for group_id in ids]


@st.composite
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
