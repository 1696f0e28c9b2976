"""The demo's cache: which chunks it keeps, and that they come back whole, in other blocks."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvshm.context import CPUCacheContext
from kvshm.demo.cache import ChunkCache
from kvshm.transfer import object_group_nbytes

Array = np.ndarray[Any, Any]

BLOCK, CHUNK = 3, 6
SHAPE = (2, 23, BLOCK, 5, 7)
TOKENS = list(range(100, 100 + 3 * CHUNK + 2))


def _layers(seed: int) -> list[Array]:
    bits = np.random.Generator(np.random.PCG64(seed)).integers(0, 1 << 16, (2, *SHAPE), dtype=np.uint16)
    return [layer.view(ml_dtypes.bfloat16) for layer in bits]


def _context(layers: list[Array]) -> CPUCacheContext:
    return CPUCacheContext(layers, CHUNK, {"kv_layout": "NHD"})


def test_stored_chunks_come_back_in_other_blocks() -> None:
    source, target = _layers(1), _layers(2)
    ids, other_ids = [4, 9, 1, 17, 22, 3], [20, 2, 5, 11, 8, 13]
    cache = ChunkCache(CHUNK, capacity=1 << 16)
    assert cache.store(_context(source), "model", TOKENS, ids) == 3 * CHUNK
    assert cache.retrieve(_context(target), "model", TOKENS, other_ids, skip=0) == 3 * CHUNK
    for one, other in zip(source, target, strict=True):
        np.testing.assert_array_equal(one[:, ids].view(np.uint16), other[:, other_ids].view(np.uint16))


@pytest.mark.parametrize(
    ("model", "tokens", "found"),
    [
        ("model", TOKENS, 3 * CHUNK),
        ("model", TOKENS[:-3], 2 * CHUNK),
        ("model", [*TOKENS[:8], 7, *TOKENS[9:]], CHUNK),
        ("model", [7, *TOKENS[1:]], 0),
        ("model", TOKENS[CHUNK:], 0),
        ("other", TOKENS, 0),
        ("model", [], 0),
    ],
)
def test_only_the_same_beginning_of_the_same_model_is_found(model: str, tokens: list[int], found: int) -> None:
    cache = ChunkCache(CHUNK, capacity=1 << 16)
    cache.store(_context(_layers(1)), "model", TOKENS, [4, 9, 1, 17, 22, 3])
    assert cache.lookup(model, tokens) == found


def test_what_is_kept_is_not_copied_again() -> None:
    layers = _layers(1)
    context = _context(layers)
    nbytes = object_group_nbytes(context, 0)
    cache = ChunkCache(CHUNK, capacity=3 * nbytes)
    assert cache.store(context, "model", TOKENS[:CHUNK], [4, 9]) == CHUNK
    kept = layers[0][:, [4, 9]].copy()
    layers[0][:, [4, 9]] = 0
    assert cache.store(context, "model", TOKENS, [4, 9, 1, 17, 22, 3]) == 3 * CHUNK
    assert cache.retrieve(context, "model", TOKENS[:CHUNK], [4, 9], skip=0) == CHUNK
    np.testing.assert_array_equal(layers[0][:, [4, 9]].view(np.uint16), kept.view(np.uint16))


def test_a_full_pool_keeps_the_beginning() -> None:
    context = _context(_layers(1))
    cache = ChunkCache(CHUNK, capacity=3 * object_group_nbytes(context, 0) - 1)
    assert cache.store(context, "model", TOKENS, [4, 9, 1, 17, 22, 3]) == 2 * CHUNK
    assert cache.lookup("model", TOKENS) == 2 * CHUNK


def test_a_refused_store_keeps_nothing() -> None:
    context = _context(_layers(1))
    cache = ChunkCache(CHUNK, capacity=3 * object_group_nbytes(context, 0))
    with pytest.raises(ValueError, match="23"):
        cache.store(context, "model", TOKENS, [4, 9, 1, 17, 23, 3])
    assert cache.lookup("model", TOKENS) == 0
    assert cache.store(context, "model", TOKENS, [4, 9, 1, 17, 22, 3]) == 3 * CHUNK
