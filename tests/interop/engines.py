"""What the tests store: paged caches of several layouts, full of random bits, and where their blocks must end up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvshm
from kvshm.client.cache_client import CacheClient
from kvshm.client.engine import Engine
from kvshm.dtypes import dtype_from_name
from kvshm.layout import EngineGroupInfo
from tests.interop.processes import ProcessError, Server

CHUNK = 256
MODES = ("lmcache_driven", "engine_driven")
TIMEOUT_S = 15.0

Arrays = list[NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's array: its shape in memory, how its axes are permuted when it is registered, which counts blocks."""

    shape: tuple[int, ...]
    dtype: str
    block_axis: int
    axes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """The caches of an engine. Without groups all layers are one."""

    name: str
    layers: tuple[Layer, ...]
    kv_layout: str = "NHD"
    groups: tuple[EngineGroupInfo, ...] = ()

    @property
    def group_infos(self) -> tuple[EngineGroupInfo, ...]:
        """The groups, also where there is one."""
        return self.groups or (EngineGroupInfo(0, tuple(range(len(self.layers))), 16),)

    def arrays(self, *, shared: bool, seed: int | None = None) -> Arrays:
        """One array a layer, zeros or random bits, in shared or private memory."""
        rng = np.random.default_rng(seed)
        arrays = []
        for layer in self.layers:
            dtype = dtype_from_name(layer.dtype)
            array = kvshm.zeros(layer.shape, dtype) if shared else np.zeros(layer.shape, dtype)
            if seed is not None:
                flat = array.reshape(-1).view(np.uint8)
                flat[...] = rng.integers(0, 256, flat.size, dtype=np.uint8)
            arrays.append(array if layer.axes is None else array.transpose(layer.axes))
        return arrays

    def block_ids(self, num_tokens: int, seed: int) -> list[list[int]]:
        """Per group, random blocks for so many tokens; never block 0, the null block."""
        rng = np.random.default_rng(seed)
        ids = []
        for group in self.group_infos:
            first = self.layers[group.layer_indices[0]]
            num_blocks = first.shape[first.block_axis]
            ids.append((1 + rng.permutation(num_blocks - 1)[: num_tokens // group.tokens_per_block]).tolist())
        return ids

    def moved(
        self,
        source: Arrays,
        source_ids: Sequence[Sequence[int]],
        target_ids: Sequence[Sequence[int]],
        skip_first_n_tokens: int | Sequence[int] = 0,
    ) -> list[bytes]:
        """The bytes of all layers, zeros but for the target blocks, which hold what the source blocks hold.

        Args:
            skip_first_n_tokens: In all groups, or one number for each, which tokens did not move.
        """
        if isinstance(skip_first_n_tokens, int):
            skip_first_n_tokens = [skip_first_n_tokens] * len(source_ids)
        expected = [np.zeros(array.shape, _unsigned(array).dtype) for array in source]
        moves = zip(self.group_infos, source_ids, target_ids, skip_first_n_tokens, strict=True)
        for group, from_ids, to_ids, skip in moves:
            num_skipped = skip // group.tokens_per_block
            for index in group.layer_indices:
                # A block's axis is the same in memory and as registered: no layout here permutes it.
                axis = self.layers[index].block_axis
                into, taken = np.moveaxis(expected[index], axis, 0), np.moveaxis(_unsigned(source[index]), axis, 0)
                into[list(to_ids)[num_skipped:]] = taken[list(from_ids)[num_skipped:]]
        return [array.tobytes() for array in expected]


def _unsigned(array: NDArray[Any]) -> NDArray[Any]:
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def contents(arrays: Arrays) -> list[bytes]:
    """The bytes of all layers, in the order of their axes."""
    return [array.tobytes() for array in arrays]


def wipe(arrays: Arrays) -> None:
    """Zero all layers."""
    for array in arrays:
        _unsigned(array)[...] = 0


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids, up to the largest that LMCache takes."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, 2**32, num_tokens)]


def register(
    client: CacheClient, layout: Layout, arrays: Arrays, model_name: str, mode: str, **settings: Any
) -> Engine:
    """Register a cache with kvshm's client."""
    return client.register(
        arrays,
        model_name,
        layout_hints={"kv_layout": layout.kv_layout},
        engine_group_infos=layout.group_infos,
        transfer_mode=mode,  # type: ignore[arg-type]  # one of MODES
        **settings,
    )


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    """Ask a process that tells nobody when it is done, until a deadline."""
    deadline = time.monotonic() + TIMEOUT_S
    while not is_true():
        if time.monotonic() > deadline:
            raise ProcessError(f"{what} did not happen within {TIMEOUT_S} s")
        time.sleep(0.02)


@dataclass(frozen=True, slots=True)
class Held:
    """What a real LMCache server holds for its clients: objects that are locked, and requests that are not over."""

    read_locked: int
    write_locked: int
    sessions: int

    @classmethod
    def by(cls, server: Server) -> Held:
        """What this one holds now."""
        status = server.status()
        memory = status["storage_manager"]["l1_manager"]
        return cls(memory["read_locked_count"], memory["write_locked_count"], status["active_sessions"])


def wait_until_published(server: Server) -> None:
    """A real LMCache server answers a store before its chunks can be found."""
    wait_until(lambda: Held.by(server).write_locked == 0, "publishing a store")


@contextmanager
def nothing_left_held(server: Server) -> Iterator[None]:
    """In the end a real LMCache server holds nothing that it did not hold before."""
    before = Held.by(server)
    yield
    wait_until_held(server, before)


def wait_until_held(server: Server, expected: Held) -> None:
    """Some locks go a moment after the answer."""
    wait_until(lambda: Held.by(server) == expected, f"holding {expected} (now {Held.by(server)})")


NHD = Layout("NHD", (Layer((2, 97, 16, 5, 7), "bfloat16", 1),) * 3)
HND = Layout("HND", (Layer((2, 97, 5, 16, 7), "float16", 1),) * 3, "HND")
# As vLLM has it: heads first in memory, while the axes that it names are NHD's.
HND_PERMUTED = Layout("HND-permuted", (Layer((2, 97, 5, 16, 7), "bfloat16", 1, (0, 1, 3, 2, 4)),) * 3, "HND")
BLOCKS_FIRST = Layout("blocks-first", (Layer((97, 2, 16, 5, 7), "bfloat16", 0),) * 3)
MLA = Layout("MLA", (Layer((97, 16, 13), "bfloat16", 0),) * 5)
FP8 = Layout("FP8", (Layer((2, 97, 16, 5, 7), "float8_e4m3fn", 1),) * 2)
MIXED = Layout(
    "mixed",
    (
        Layer((2, 97, 16, 5, 7), "bfloat16", 1),
        Layer((53, 64, 13), "uint8", 0),
        Layer((2, 97, 16, 5, 7), "bfloat16", 1),
        Layer((53, 64, 13), "uint8", 0),
        Layer((53, 64, 13), "uint8", 0),
    ),
    groups=(EngineGroupInfo(0, (0, 2), 16), EngineGroupInfo(1, (1, 3, 4), 64)),
)
ONE_GROUP = (NHD, HND, HND_PERMUTED, BLOCKS_FIRST, MLA, FP8)
LAYOUTS = (*ONE_GROUP, MIXED)
