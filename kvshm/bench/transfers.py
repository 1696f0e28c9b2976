"""Gather and scatter beside plain copies of the same bytes, per layout, and how they grow."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import numpy as np
import numpy.typing as npt

import kvshm
from kvshm.bench.results import Cost, Transfer, interleaved
from kvshm.context import CPUCacheContext
from kvshm.layout import EngineGroupInfo
from kvshm.threads import run_jobs
from kvshm.transfer import gather_chunks, object_group_nbytes, scatter_chunks

__all__ = ["LAYOUTS", "Layout", "Workload", "measure_growth", "measure_layouts"]

TOKENS_PER_CHUNK = 256
MAX_CHUNKS = 32  # 8192 tokens
COPYTO, GATHER, SCATTER = "copyto", "gather", "scatter"


@dataclass(frozen=True, slots=True)
class Layout:
    """One layer of a cache by the shape of its array, -1 for blocks; for cross-layer, -2 for layers too."""

    name: str
    shape: tuple[int, ...]
    kv_layout: str
    num_layers: int
    block_size: int = 16
    one_segment: bool = True
    sw_size_tokens: int = -1

    def sized(self, num_blocks: int) -> tuple[int, ...]:
        """The shape with blocks and layers filled in."""
        return tuple({-1: num_blocks, -2: self.num_layers}.get(side, side) for side in self.shape)

    @property
    def is_cross_layer(self) -> bool:
        """One array holds all layers."""
        return -2 in self.shape

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token in all layers."""
        elements = prod(self.sized(1)) // self.block_size
        return 2 * elements * (1 if self.is_cross_layer else self.num_layers)

    def describe(self) -> str:
        """The shape in symbols."""
        return f"[{', '.join(str({-1: 'NB', -2: 'NL'}.get(side, side)) for side in self.shape)}]"


LAYOUTS = (
    Layout("NHD", (2, -1, 16, 8, 128), "NHD", 32),
    Layout("NHD, a segment a layer", (2, -1, 16, 8, 128), "NHD", 32, one_segment=False),
    Layout("HND", (2, -1, 8, 16, 128), "HND", 32),
    Layout("fused K/V", (-1, 16, 8, 256), "NHD", 32),
    Layout("cross-layer", (-1, -2, 2, 16, 8, 128), "NHD", 32),
    Layout("MLA", (-1, 16, 576), "NHD", 61),
    Layout("blocks of 1 token", (2, -1, 1, 8, 128), "NHD", 32, block_size=1),
    Layout("window of 64 tokens", (2, -1, 16, 8, 128), "NHD", 32, sw_size_tokens=64),
)


class Workload:
    """A cache, chunks in a pool of shared memory, and shuffled block ids; all pages touched."""

    def __init__(self, layout: Layout, num_tokens: int) -> None:
        # Twice the blocks that are moved, so that these are anywhere.
        num_blocks = 2 * num_tokens // layout.block_size
        shapes = [layout.sized(num_blocks)] * (1 if layout.is_cross_layer else layout.num_layers)
        dtypes = ["bfloat16"] * len(shapes)
        arrays = (
            kvshm.empty_many(shapes, dtypes)
            if layout.one_segment
            else [kvshm.empty(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        )
        for array in arrays:
            array.view(np.uint8)[...] = 1
        infos = []
        if layout.sw_size_tokens != -1:
            layers = tuple(range(layout.num_layers))
            infos.append(EngineGroupInfo(0, layers, layout.block_size, layout.sw_size_tokens))
        self.context = CPUCacheContext(
            arrays[0] if layout.is_cross_layer else arrays,
            TOKENS_PER_CHUNK,
            {"kv_layout": layout.kv_layout},
            infos,
            separate_object_groups=False,  # else only the chunks within the window would be written
        )
        shape = (num_tokens // TOKENS_PER_CHUNK, object_group_nbytes(self.context, 0))
        self.chunks, self._others = kvshm.empty_many([shape, shape], ["uint8", "uint8"])
        self.chunks[...], self._others[...] = 2, 3
        self.nbytes = self.chunks.nbytes
        ids = np.random.default_rng(0).permutation(num_blocks)[: num_tokens // layout.block_size]
        self.block_ids: list[npt.NDArray[np.int64]] = [ids]

    def calls(self, num_threads: int) -> dict[str, Callable[[], None]]:
        """Gather, scatter, and the plain copy of as many bytes: chunk by chunk, from another pool."""
        chunks = list(self.chunks)
        return {
            COPYTO: partial(self._copy, num_threads),
            GATHER: partial(gather_chunks, self.context, self.block_ids, chunks, num_threads=num_threads),
            SCATTER: partial(scatter_chunks, self.context, self.block_ids, chunks, num_threads=num_threads),
        }

    def _copy(self, num_threads: int) -> None:
        # As large as the jobs of a transfer; one copy of all would leave threads idle.
        parts = max(1, num_threads * 4 // len(self.chunks)) if num_threads > 1 else 1
        pairs = [
            (to, of)
            for chunk, other in zip(self.chunks, self._others, strict=True)
            for to, of in zip(np.array_split(chunk, parts), np.array_split(other, parts), strict=True)
        ]
        run_jobs((partial(np.copyto, to, of) for to, of in pairs), num_threads)


def measure_layouts(
    nbytes: int, threads: Sequence[int], repeat: int, layouts: Sequence[Layout] = LAYOUTS
) -> Iterator[Transfer]:
    """Every layout with each number of threads, about ``nbytes`` in each direction."""
    for layout in layouts:
        kept_tokens = TOKENS_PER_CHUNK if layout.sw_size_tokens == -1 else layout.sw_size_tokens
        chunk_nbytes = layout.token_nbytes * kept_tokens
        num_layers = max(1, min(layout.num_layers, layout.num_layers * nbytes // chunk_nbytes))
        num_chunks = max(1, min(nbytes // chunk_nbytes, MAX_CHUNKS))
        workload = Workload(replace(layout, num_layers=num_layers), num_chunks * TOKENS_PER_CHUNK)
        for num_threads in threads:
            seconds = interleaved(workload.calls(num_threads), repeat)
            for direction in (GATHER, SCATTER):
                yield _transfer(layout, workload.nbytes, direction, num_threads, seconds)


def _transfer(
    layout: Layout, nbytes: int, direction: str, num_threads: int, seconds: dict[str, list[float]]
) -> Transfer:
    ratios = [copy / own for copy, own in zip(seconds[COPYTO], seconds[direction], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Transfer(
        layout=layout.name,
        shape=layout.describe(),
        direction=direction,
        num_threads=num_threads,
        nbytes=nbytes,
        seconds=statistics.median(seconds[direction]),
        copyto_seconds=statistics.median(seconds[COPYTO]),
        ratio=statistics.median(ratios),
        spread=(quartiles[0], quartiles[2]),
    )


def measure_growth(nbytes: int, max_threads: int, repeat: int) -> Iterator[Cost]:
    """A gather and a scatter over tokens, layers, blocks of the same tokens, and threads; NHD, at most ``nbytes``."""
    base = LAYOUTS[0]
    layer_chunks = max(1, nbytes // (TOKENS_PER_CHUNK * base.token_nbytes // base.num_layers))
    few, some = max(1, layer_chunks // 16), max(1, layer_chunks // 8)

    def cost(name: str, size: int, unit: str, layout: Layout, num_chunks: int, num_threads: int = 1) -> Cost:
        calls = Workload(layout, num_chunks * TOKENS_PER_CHUNK).calls(num_threads)
        seconds = interleaved({GATHER: calls[GATHER], SCATTER: calls[SCATTER]}, repeat)
        return Cost(name, size, unit, sum(map(statistics.median, seconds.values())))

    for num_chunks in (1, 2, 4, 8):
        layout = replace(base, num_layers=some)
        yield cost("there and back: tokens", num_chunks * TOKENS_PER_CHUNK, "token", layout, num_chunks)
    for num_layers in (few, 2 * few, 4 * few, 8 * few):
        yield cost("there and back: layers", num_layers, "layer", replace(base, num_layers=num_layers), 2)
    for block_size in (64, 16, 4, 1):
        layout = replace(base, num_layers=some, block_size=block_size, shape=(2, -1, block_size, 8, 128))
        num_blocks = 8 * TOKENS_PER_CHUNK // block_size
        yield cost("there and back: blocks of the same tokens", num_blocks, "block", layout, 8)
    for num_threads in sorted({1, 2, max_threads}):
        layout = replace(base, num_layers=some)
        yield cost("there and back: threads", num_threads, "", layout, 8, num_threads)
