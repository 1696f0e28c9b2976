"""The demo's paged cache: a token is found again wherever its block is."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kvshm.demo.model import ModelConfig
from kvshm.demo.paged_cache import BLOCK_SIZE, PagedCache, draw_block_ids, layer_shape

CONFIG = ModelConfig(num_layers=2, num_heads=3, num_kv_heads=3, head_size=14)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def test_tokens_lie_in_their_slots_and_are_read_back_in_order() -> None:
    num_tokens = 2 * BLOCK_SIZE + 5
    block_ids = [4, 1, 6]
    layers = [np.zeros(layer_shape(CONFIG, 7), BFLOAT16) for _ in range(2)]
    cache = PagedCache(layers, block_ids)
    rng = np.random.Generator(np.random.PCG64(3))
    k, v = rng.standard_normal((2, num_tokens, CONFIG.num_kv_heads, CONFIG.head_size), dtype=np.float32)
    for start, stop in ((0, 7), (7, BLOCK_SIZE), (BLOCK_SIZE, num_tokens)):
        cache.write(1, start, k[start:stop], v[start:stop])

    assert not layers[0].any()
    for plane, values in enumerate((k, v)):
        for token in range(num_tokens):
            kept = layers[1][plane, block_ids[token // BLOCK_SIZE], token % BLOCK_SIZE]
            np.testing.assert_array_equal(kept, values[token].astype(BFLOAT16))
    for start, stop in ((0, num_tokens), (3, 5), (13, 33), (BLOCK_SIZE, 2 * BLOCK_SIZE)):
        read_k, read_v = cache.read(1, start, stop)
        np.testing.assert_array_equal(read_k, k[start:stop].astype(BFLOAT16).astype(np.float32))
        np.testing.assert_array_equal(read_v, v[start:stop].astype(BFLOAT16).astype(np.float32))


def test_drawn_blocks_are_distinct_scattered_and_never_the_null_block() -> None:
    drawn = draw_block_ids(num_tokens=20 * BLOCK_SIZE - 3, num_blocks=23, seed=1)
    assert len(drawn) == len(set(drawn)) == 20
    assert min(drawn) >= 1
    assert max(drawn) < 23
    assert drawn != sorted(drawn)
    assert drawn == draw_block_ids(20 * BLOCK_SIZE, 23, seed=1)
    assert drawn != draw_block_ids(20 * BLOCK_SIZE, 23, seed=2)


def test_too_few_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"33 tokens need 3 blocks of 16 but the cache has 2 .* num_blocks >= 4"):
        draw_block_ids(33, 3, seed=1)
