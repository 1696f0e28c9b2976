"""dtypes, specs and arrays: any rank, order of axes, padding and strides, and contents as raw bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import permutations
from typing import Any, Literal, TypeAlias

import numpy as np
from hypothesis import strategies as st

from kvshm.dtypes import DTYPES, DType
from kvshm.spec import ArraySpec

__all__ = ["Memory", "array_specs", "arrays", "buffers", "dtypes", "orders"]

Array: TypeAlias = "np.ndarray[Any, Any]"
Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
Memory = Literal["dense", "permuted", "padded", "strided"]
MEMORIES: tuple[Memory, ...] = ("dense", "permuted", "padded", "strided")

KV_DTYPES = ("float16", "bfloat16", "uint8", "float32", "float8_e4m3fn", "float8_e5m2", "int8")
COMMON_FIRST = (*KV_DTYPES, *(name for name in DTYPES if name not in KV_DTYPES))
SMALL_NBYTES = 64


def dtypes(names: Sequence[str] = COMMON_FIRST) -> st.SearchStrategy[DType]:
    """dtypes that the wire can name, given by these names; those that KV caches mostly have come first."""
    return st.sampled_from([DTYPES[name] for name in names])


@lru_cache
def orders(rank: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Orders of that many axes, the given one first; in one draw, which is quicker than ``st.permutations``."""
    return st.sampled_from(list(permutations(range(rank)))) if rank < 7 else st.permutations(range(rank)).map(tuple)


@st.composite
def array_specs(
    draw: st.DrawFn,
    *,
    shape: st.SearchStrategy[tuple[int, ...]] | None = None,
    dtype: st.SearchStrategy[DType] | None = None,
    min_dims: int = 1,
    max_dims: int = 6,
    min_side: int = 0,
    max_side: int = 5,
    memory: Sequence[Memory] = MEMORIES,
    loose_ones: bool = True,
    max_offset: int = 7,
) -> ArraySpec:
    """Specs whose elements share no byte.

    Args:
        shape: Else ``min_dims`` to ``max_dims`` sides of ``min_side`` to ``max_side``.
        dtype: Else any of :func:`dtypes`.
        memory: ``"dense"``: C order. ``"permuted"``: dense, the axes in any order. ``"padded"``: the same with room
            behind each item of the outermost axis. ``"strided"``: room behind the items of any axis.
        loose_ones: The stride of an axis of size 1, which moves nothing, may be any number.
        max_offset: Largest ``storage_offset``, in elements.
    """
    sides = st.integers(min_side, max_side)
    sizes = draw(st.lists(sides, min_size=min_dims, max_size=max_dims).map(tuple) if shape is None else shape)
    kind = draw(st.sampled_from(memory))
    order = tuple(range(len(sizes)))
    if kind != "dense":
        order = draw(orders(len(sizes)))
    steps = [0] * len(sizes)
    step = 1
    for depth, axis in enumerate(reversed(order)):
        outermost = depth == len(sizes) - 1
        if kind == "strided" or (kind == "padded" and outermost):
            step += draw(st.integers(0, max_side))
        steps[axis] = step
        step *= max(sizes[axis], 1)
    if loose_ones and draw(st.booleans()):
        for axis, size in enumerate(sizes):
            if size == 1:
                steps[axis] = draw(st.integers(0, 2 * step))
    offset = draw(st.integers(0, max_offset))
    return ArraySpec(sizes, tuple(steps), offset, draw(dtypes() if dtype is None else dtype))


def buffers(nbytes: int) -> st.SearchStrategy[Bytes]:
    """Writable buffers of ``nbytes`` bytes, one-dimensional uint8, of any content.

    Few bytes are drawn one by one; more come from a seed, no two stretches of them alike.
    """
    if nbytes <= SMALL_NBYTES:
        return st.binary(min_size=nbytes, max_size=nbytes).map(lambda data: np.frombuffer(bytearray(data), np.uint8))
    return st.integers(0, 2**16 - 1).map(lambda seed: _pattern(nbytes, seed))


@st.composite
def arrays(draw: st.DrawFn, specs: st.SearchStrategy[ArraySpec] | None = None) -> Array:
    """Arrays of drawn specs, each a view of a buffer of its own, with contents of any bits."""
    spec = draw(array_specs() if specs is None else specs)
    return spec.view(draw(buffers(spec.byte_span)))


def _pattern(nbytes: int, seed: int) -> Bytes:
    position = np.arange(nbytes, dtype=np.uint64)
    pattern: Bytes = ((position * np.uint64(2_654_435_761) + np.uint64(seed * 40_503)) >> np.uint64(7)).astype(np.uint8)
    return pattern
