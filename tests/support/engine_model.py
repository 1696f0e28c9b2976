"""A slow model of engines that share a cache: which bytes of which token are cached, and what every call must return.

Layouts, groups, windows, null blocks, workers and ways to copy are drawn; the model knows tokens and bytes, and nothing
of chunks' layout, copies or protocols. What it takes over from kvshm is which kernel groups make one object, and how
many chunks a window needs: the laws of those stand in ``tests/property/test_layout_laws.py``.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvshm
from kvshm.client.cache_client import CacheClient
from kvshm.layout import EngineGroupInfo

__all__ = ["Cached", "EngineSpec", "Group", "ModelEngine", "World", "engine_specs", "prompts", "worlds"]

NUM_BLOCKS = 83
GARBAGE = 10**6  # an id of no block, for blocks that do not move

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Group:
    """A kernel group of the model."""

    num_heads: int
    head_size: int
    dtype: str
    window: int  # tokens; -1: full attention
    state_block: int  # tokens of a block of recurrent state; 0: attention
    tokens_per_slot: int


@dataclass(frozen=True)
class World:
    """The model that all engines serve."""

    chunk: int  # tokens
    groups: tuple[Group, ...]
    layers: tuple[tuple[int, ...], ...]  # per worker and group, how many


@dataclass(frozen=True)
class EngineSpec:
    """How one engine keeps its cache."""

    worker: int
    mode: str
    blocks: tuple[int, ...]  # per group, tokens of a block
    kv_layout: str
    is_blocks_first: bool
    null_block_id: int | None


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


@st.composite
def worlds(draw: st.DrawFn, chunk: int = 4, max_workers: int = 3, *, is_plain: bool = False) -> World:
    """Models of one to three kernel groups, often of one shape. Plain ones have attention of one token a slot."""
    groups: list[Group] = []
    for _ in range(draw(st.integers(1, 3))):
        state_block = 0 if is_plain else draw(st.sampled_from([0, 0, *_divisors(chunk)]))
        tokens_per_slot = 1 if is_plain or state_block else draw(st.sampled_from([1, 1, 2]))
        windows = [-1, chunk, 2 * chunk, 2 * chunk + 1]
        windows += [state_block] if state_block else [each for each in _divisors(chunk) if each % tokens_per_slot == 0]
        shape = draw(st.sampled_from([(1, 1, "uint8"), (1, 1, "uint8"), (2, 3, "float16"), (3, 2, "float32")]))
        groups.append(Group(*shape, draw(st.sampled_from(windows)), state_block, tokens_per_slot))
    num_workers = draw(st.integers(1, max_workers))
    layers = tuple(tuple(draw(st.integers(1, 2)) for _ in groups) for _ in range(num_workers))
    return World(chunk, tuple(groups), layers)


@st.composite
def engine_specs(draw: st.DrawFn, world: World, worker: int | None = None) -> EngineSpec:
    """Engines of a model."""
    blocks = []
    for group in world.groups:
        kept = world.chunk if group.window < 0 else min(group.window, world.chunk)
        fitting = [each for each in _divisors(world.chunk) if kept % each == 0 and each % group.tokens_per_slot == 0]
        blocks.append(group.state_block or draw(st.sampled_from(fitting)))
    return EngineSpec(
        draw(st.integers(0, len(world.layers) - 1)) if worker is None else worker,
        draw(st.sampled_from(["lmcache_driven", "engine_driven"])),
        tuple(blocks),
        draw(st.sampled_from(["NHD", "HND"])),
        draw(st.booleans()),
        draw(st.sampled_from([0, 0, 5, None])),
    )


@st.composite
def prompts(draw: st.DrawFn, chunk: int = 4) -> list[int]:
    """Prompts that often begin alike: their chunks are of two kinds, and some tokens follow."""
    kinds = draw(st.lists(st.integers(0, 1), max_size=4))
    tail = draw(st.integers(0, chunk - 1))
    return [100 * kind + token for kind in kinds for token in range(chunk)] + [7] * tail


@dataclass(frozen=True)
class _Object:
    """What chunks of one object group are, in the model's words."""

    meaning: Any
    groups: tuple[int, ...]
    window: int  # chunks; -1: all


@dataclass
class Cached:
    """What is cached: objects by worker, prefix and meaning."""

    objects: set[tuple[int, tuple[int, ...], Any]] = field(default_factory=set)

    def is_found(self, worker: int, objects: Sequence[_Object], chunks: list[tuple[int, ...]]) -> bool:
        """Whether a worker can retrieve exactly this prefix."""
        return all(
            (worker, chunks[index], each.meaning) in self.objects
            for each in objects
            for index in needed(each.window, len(chunks))
        )


def needed(window: int, num_chunks: int) -> range:
    """Chunks that a retrieve of ``num_chunks`` reads."""
    return range(0 if window < 0 else max(0, num_chunks - window), num_chunks)


class ModelEngine:
    """One engine, really registered, and a copy of its cache's bytes."""

    def __init__(self, client: CacheClient, world: World, spec: EngineSpec, name: str, seed: int) -> None:
        self.world, self.spec = world, spec
        self.random = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        shapes: list[tuple[int, ...]] = []
        dtypes: list[str] = []
        infos: list[EngineGroupInfo] = []
        for index, group in enumerate(world.groups):
            first = len(shapes)
            for _ in range(world.layers[spec.worker][index]):
                inner = [spec.blocks[index] // group.tokens_per_slot, group.num_heads, group.head_size]
                inner = inner if spec.kv_layout == "NHD" else [inner[1], inner[0], inner[2]]
                outer = [NUM_BLOCKS, 2] if spec.is_blocks_first else [2, NUM_BLOCKS]
                shapes.append((*outer, *inner))
                dtypes.append(group.dtype)
            infos.append(
                EngineGroupInfo(
                    index,
                    tuple(range(first, len(shapes))),
                    spec.blocks[index],
                    group.window,
                    recurrent_state=bool(group.state_block),
                )
            )
        self.layer_groups = [index for index, info in enumerate(infos) for _ in info.layer_indices]
        self.arrays = kvshm.empty_many(shapes, dtypes)
        if spec.mode == "engine_driven":
            self.arrays = [array.copy() for array in self.arrays]
        self.views = [self._view(array) for array in self.arrays]
        self.engine = client.register(
            self.arrays,
            name,
            layout_hints={"kv_layout": spec.kv_layout},
            engine_group_infos=infos,
            world_size=len(world.layers),
            worker_id=spec.worker,
            transfer_mode=spec.mode,  # type: ignore[arg-type]  # drawn
            null_block_id=spec.null_block_id,
        )
        manager = self.engine._registration.session.manager
        windows = manager.get_attn_desc().num_chunks_in_sw
        self.objects = [
            _Object(
                tuple(self._meaning(index) for index in each.kernel_group_indices),
                each.kernel_group_indices,
                windows[number],
            )
            for number, each in enumerate(manager.object_groups)
        ]
        self.expected = [view.copy() for view in self.views]

    def _view(self, array: NDArray[Any]) -> Bytes:
        """[kv, block, slot, head, byte], whatever the array looks like."""
        raw = array.view(np.uint8)
        raw = raw.swapaxes(0, 1) if self.spec.is_blocks_first else raw
        return raw if self.spec.kv_layout == "NHD" else raw.swapaxes(2, 3)

    def kept(self, group: int) -> int:
        """Tokens of a chunk that a group keeps."""
        window = self.world.groups[group].window
        return self.world.chunk if window < 0 else min(window, self.world.chunk)

    def _meaning(self, group: int) -> Any:
        each = self.world.groups[group]
        layers = tuple(layer for layer, of in enumerate(self.layer_groups) if of == group)
        hidden = each.num_heads * each.head_size
        return layers, hidden, each.dtype, self.kept(group), each.state_block, each.tokens_per_slot

    def chunks(self, prompt: list[int]) -> list[tuple[int, ...]]:
        """Prefixes that end with a whole chunk."""
        size = self.world.chunk
        return [tuple(prompt[: (index + 1) * size]) for index in range(len(prompt) // size)]

    def draw_blocks(self, prompt: list[int], null_chance: float) -> list[list[int]]:
        """Blocks for a prompt: none twice but the null block, which may be anywhere."""
        null, lists = self.spec.null_block_id, []
        for size in self.spec.blocks:
            count = -(-len(prompt) // size)
            usable = [block for block in range(NUM_BLOCKS) if block != null]
            blocks = self.random.sample(usable, count)
            lists.append([null if null is not None and self.random.random() < null_chance else each for each in blocks])
        return lists

    def scribble(self) -> None:
        """Other bytes everywhere."""
        for view, expected in zip(self.views, self.expected, strict=True):
            expected[...] = self.rng.integers(0, 256, view.shape, dtype=np.uint8)
            view[...] = expected

    def compute(self, prompt: list[int], lists: list[list[int]]) -> None:
        """Write the KV of a prompt into its blocks. What goes to the null block is nobody's."""
        for layer, group in enumerate(self.layer_groups):
            for token in range(len(prompt) // self.world.chunk * self.world.chunk):
                ((block, slot),) = self.tokens(group, lists[group], [token])
                self.views[layer][:, block, slot] = self.kv_of(prompt, layer, token)
                self.expected[layer][:, block, slot] = self.views[layer][:, block, slot]

    def kv_of(self, prompt: list[int], layer: int, token: int) -> Bytes:
        """[kv, head, byte] of a token: the same in every engine of this worker that has this prefix."""
        group = self.world.groups[self.layer_groups[layer]]
        # A block of state stands for the prefix up to its end, and so does a slot of several tokens.
        size = group.state_block or group.tokens_per_slot
        prefix = prompt[: (token // size + 1) * size]
        facts = repr((self.spec.worker, layer, prefix, token % group.state_block if group.state_block else 0))
        shape = (2, group.num_heads, group.head_size * np.dtype(group.dtype).itemsize)
        digest = hashlib.shake_128(facts.encode()).digest(int(np.prod(shape)))
        return np.frombuffer(digest, np.uint8).reshape(shape)

    def tokens(self, group: int, blocks: list[int], tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Block and slot of tokens."""
        size, per_slot = self.spec.blocks[group], self.world.groups[group].tokens_per_slot
        return [(blocks[token // size], token % size // per_slot) for token in tokens]

    def kept_tokens(self, group: int, chunk: int) -> range:
        """The tokens of a chunk that a group keeps: its last ones."""
        end = (chunk + 1) * self.world.chunk
        return range(end - self.kept(group), end)

    def garble(self, lists: list[list[int]], moves: Any) -> list[list[int]]:
        """The same blocks, with an id of no block where nothing moves."""
        garbled = [list(blocks) for blocks in lists]
        for group, blocks in enumerate(garbled):
            moving = {token // self.spec.blocks[group] for token in moves(group)}
            for index in range(len(blocks)):
                if index not in moving and self.random.random() < 0.3:
                    blocks[index] = GARBAGE
        return garbled

    def has_data(self, each: _Object, lists: list[list[int]], chunk: int) -> bool:
        """Whether no block that an object keeps of a chunk is the null block."""
        null = self.spec.null_block_id
        return null is None or all(
            block != null
            for group in each.groups
            for block, _ in self.tokens(group, lists[group], self.kept_tokens(group, chunk))
        )

    def expect_store(self, cached: Cached, prompt: list[int], lists: list[list[int]], num_chunks: int) -> None:
        """Enter into the model what a store adds."""
        for chunk, prefix in enumerate(self.chunks(prompt)[:num_chunks]):
            for each in self.objects:
                if self.has_data(each, lists, chunk):
                    cached.objects.add((self.spec.worker, prefix, each.meaning))

    def written_tokens(self, each: _Object, group: int, num_chunks: int, skip: int) -> list[int]:
        """Tokens that a retrieve writes of a group."""
        state, per_slot = self.world.groups[group].state_block, self.world.groups[group].tokens_per_slot
        written = []
        for chunk in needed(each.window, num_chunks):
            for token in self.kept_tokens(group, chunk):
                # A block of state is written if one of its tokens is, a slot of several tokens if all are.
                decides = (token // state + 1) * state - 1 if state else token // per_slot * per_slot
                if decides >= skip:
                    written.append(token)
        return written

    def expect_retrieve(self, prompt: list[int], lists: list[list[int]], skip: int) -> None:
        """Write into the copy what a retrieve writes."""
        num_chunks = len(self.chunks(prompt))
        for each in self.objects:
            for group in each.groups:
                for token in self.written_tokens(each, group, num_chunks, skip):
                    ((block, slot),) = self.tokens(group, lists[group], [token])
                    for layer, of in enumerate(self.layer_groups):
                        if of == group:
                            self.expected[layer][:, block, slot] = self.kv_of(prompt, layer, token)

    def moves_of_retrieve(self, num_chunks: int, skip: int) -> Any:
        """Per group, tokens whose blocks a retrieve writes."""

        def moves(group: int) -> list[int]:
            (each,) = [each for each in self.objects if group in each.groups]
            return self.written_tokens(each, group, num_chunks, skip)

        return moves

    def moves_of_store(self, num_chunks: int) -> Any:
        """Per group, tokens whose blocks a store reads."""
        return lambda group: [token for chunk in range(num_chunks) for token in self.kept_tokens(group, chunk)]

    def check(self) -> None:
        """All bytes are as in the copy, but for the null block, whose contents are undefined."""
        null = self.spec.null_block_id
        for view, expected in zip(self.views, self.expected, strict=True):
            if null is not None:
                expected[:, null] = view[:, null]
            assert np.array_equal(view, expected)
