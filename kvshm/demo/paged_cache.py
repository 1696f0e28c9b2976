"""The paged cache of an engine: one array a layer, and the table that says which block holds which tokens.

The layout is vLLM's with tokens before heads (NHD): ``[2 (K, V), num_blocks, block_size, kv_heads, head_size]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from kvshm.demo.model import FloatArray, ModelConfig

__all__ = ["BLOCK_SIZE", "LAYOUT_HINTS", "PagedCache", "draw_block_ids", "layer_shape"]

BLOCK_SIZE = 16  # tokens in a block
LAYOUT_HINTS = {"kv_layout": "NHD"}


def layer_shape(config: ModelConfig, num_blocks: int) -> tuple[int, ...]:
    """The shape of one layer's pages."""
    return (2, num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_size)


def draw_block_ids(num_tokens: int, num_blocks: int, seed: int) -> list[int]:
    """Blocks for a request of ``num_tokens``, in the shuffled order that a busy engine's free list would have.

    Block 0 is none of them: engines keep it as scratch, so a cache server takes it for no block.

    Raises:
        ValueError: The cache has too few blocks.
    """
    needed = -(-num_tokens // BLOCK_SIZE)
    if needed > num_blocks - 1:
        raise ValueError(
            f"{num_tokens} tokens need {needed} blocks of {BLOCK_SIZE} but the cache has {num_blocks - 1} besides the "
            f"null block; give it num_blocks >= {needed + 1}"
        )
    free = np.arange(1, num_blocks)
    np.random.Generator(np.random.PCG64(seed)).shuffle(free)
    return [int(block) for block in free[:needed]]


class PagedCache:
    """Tokens' K and V in the blocks of one request.

    Args:
        layers: Per layer, an array ``[2, num_blocks, BLOCK_SIZE, kv_heads, head_size]`` of bfloat16.
        block_ids: The block of each ``BLOCK_SIZE`` tokens, in the tokens' order.
    """

    def __init__(self, layers: Sequence[np.ndarray[Any, Any]], block_ids: Sequence[int]) -> None:
        self._layers = layers
        self._block_ids = np.array(block_ids)

    def write(self, layer: int, start: int, k: FloatArray, v: FloatArray) -> None:
        """Keep K and V, [tokens, kv_heads, head_size] each, of the tokens from position ``start`` on."""
        positions = np.arange(start, start + len(k))
        blocks, slots = self._block_ids[positions // BLOCK_SIZE], positions % BLOCK_SIZE
        pages = self._layers[layer]
        pages[0, blocks, slots] = k.astype(ml_dtypes.bfloat16)
        pages[1, blocks, slots] = v.astype(ml_dtypes.bfloat16)

    def read(self, layer: int, start: int, stop: int) -> tuple[FloatArray, FloatArray]:
        """K and V, [tokens, kv_heads, head_size] each, of positions ``start`` to ``stop``."""
        first = start // BLOCK_SIZE
        blocks = self._block_ids[first : -(-stop // BLOCK_SIZE)]
        # bfloat16 is the upper half of a float32; shifting it there is several times faster than a cast.
        bits = self._layers[layer].view(np.uint16)[:, blocks].astype(np.uint32) << np.uint32(16)
        tokens = bits.view(np.float32).reshape(2, len(blocks) * BLOCK_SIZE, *bits.shape[3:])
        k, v = tokens[:, start - first * BLOCK_SIZE : stop - first * BLOCK_SIZE]
        return k, v
