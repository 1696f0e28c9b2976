"""A small decoder-only transformer in NumPy that keeps its K and V in a cache it is handed.

It owns the weights and the arithmetic. Where a token's K and V live is the business of the cache
(:class:`kvshm.demo.paged_cache.PagedCache`): the attention writes the new tokens there, rounded to the cache's dtype,
and then reads every token from there, its own step's too. So a token's result does not depend on which process
computed the K and V before it.

The weights are random, from a fixed seed: what it writes has no meaning, but every bit of it depends on every byte of
the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

__all__ = ["FloatArray", "Model", "ModelConfig", "TokenCache"]

FloatArray = np.ndarray[Any, np.dtype[np.float32]]

# Keys are read and attended to in tiles of this many tokens. Every step from the same position then makes the same
# BLAS calls on the same shapes, which is what makes its result the same to the last bit.
_TILE = 256


class TokenCache(Protocol):
    """Where K and V of every layer live, by token position."""

    def write(self, layer: int, start: int, k: FloatArray, v: FloatArray) -> None:
        """Keep K and V, [tokens, kv_heads, head_size] each, of the tokens from position ``start`` on."""

    def read(self, layer: int, start: int, stop: int) -> tuple[FloatArray, FloatArray]:
        """K and V, [tokens, kv_heads, head_size] each, of positions ``start`` to ``stop``."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes of a model; tokens are the 256 bytes."""

    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    hidden_size: int = 256
    ffn_size: int = 704
    vocab_size: int = 256
    sharpness: float = 6.0  # of the attention: scores stay within sharpness * sqrt(head_size)
    rope_base: float = 10_000.0
    seed: int = 20_240_229

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}: "
                f"each K/V head serves as many query heads as the others"
            )
        if self.head_size % 2:
            raise ValueError(f"head_size {self.head_size} must be even: rotary positions turn pairs of elements")


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: FloatArray  # [hidden, (heads + 2 * kv_heads) * head_size]
    out: FloatArray  # [heads * head_size, hidden]
    gate_up: FloatArray  # [hidden, 2 * ffn]
    down: FloatArray  # [ffn, hidden]


def _rms_norm(x: FloatArray) -> FloatArray:
    normed: FloatArray = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32) + np.float32(1e-6))
    return normed


def _silu(x: FloatArray) -> FloatArray:
    gated: FloatArray = x / (np.float32(1) + np.exp(-x))
    return gated


class Model:
    """The weights, and one step of the computation.

    Args:
        max_positions: Positions that can be computed. Two models that shall agree to the last bit need the same.
    """

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        self.config = config
        self.max_positions = max_positions
        rng = np.random.Generator(np.random.PCG64(config.seed))

        def weights(rows: int, columns: int) -> FloatArray:
            drawn: FloatArray = rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(rows**-0.5)
            return drawn

        c = config
        qkv_size = (c.num_heads + 2 * c.num_kv_heads) * c.head_size
        self._embedding = rng.standard_normal((c.vocab_size, c.hidden_size), dtype=np.float32)
        self._layers = [
            _Layer(
                qkv=weights(c.hidden_size, qkv_size),
                out=weights(c.num_heads * c.head_size, c.hidden_size),
                gate_up=weights(c.hidden_size, 2 * c.ffn_size),
                down=weights(c.ffn_size, c.hidden_size),
            )
            for _ in range(c.num_layers)
        ]
        self._head = weights(c.hidden_size, c.vocab_size)

        # One table for all positions, not one a step: how NumPy's sine rounds an element may depend on where in its
        # array the element stands.
        frequencies = c.rope_base ** (-np.arange(0, c.head_size, 2) / c.head_size)
        angles = np.outer(np.arange(max_positions), frequencies)
        self._cos = np.cos(angles).astype(np.float32)[:, None, :]  # [position, 1 (any head), head_size / 2]
        self._sin = np.sin(angles).astype(np.float32)[:, None, :]

    def step(self, token_ids: np.ndarray[Any, Any], start: int, cache: TokenCache) -> FloatArray:
        """Compute some tokens in a row and keep their K and V in the cache.

        Args:
            token_ids: The tokens at positions ``start`` on; the cache holds all before them.

        Returns:
            The logits after the last of them, [vocab_size].

        Raises:
            ValueError: No token, or one past ``max_positions``.
        """
        stop = start + len(token_ids)
        if not 0 <= start < stop <= self.max_positions:
            raise ValueError(
                f"positions [{start}, {stop}) are not one or more of [0, {self.max_positions}); "
                f"make the model with max_positions >= {stop}"
            )
        c = self.config
        x = self._embedding[token_ids]
        for index, layer in enumerate(self._layers):
            qkv = (_rms_norm(x) @ layer.qkv).reshape(len(x), -1, c.head_size)
            q, k, v = np.split(qkv, [c.num_heads, c.num_heads + c.num_kv_heads], axis=1)
            cache.write(index, start, self._rotate(_rms_norm(k), start), v)
            x = x + self._attend(self._rotate(_rms_norm(q), start), start, index, cache) @ layer.out
            gate, up = np.split(_rms_norm(x) @ layer.gate_up, 2, axis=1)
            x = x + (_silu(gate) * up) @ layer.down
        logits: FloatArray = (_rms_norm(x[-1:]) @ self._head)[0]
        return logits

    def _rotate(self, x: FloatArray, start: int) -> FloatArray:
        """Turn each pair of elements (one of each half) by its position's angles; x is [tokens, heads, head_size]."""
        cos, sin = self._cos[start : start + len(x)], self._sin[start : start + len(x)]
        first, second = np.split(x, 2, axis=-1)
        turned: FloatArray = np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
        return turned

    def _attend(self, q: FloatArray, start: int, layer: int, cache: TokenCache) -> FloatArray:
        """Causal attention of the tokens at ``start`` on over all tokens up to each; gives [tokens, heads * head_size].

        Queries and keys have length sqrt(head_size), so no score exceeds sharpness * sqrt(head_size) and the
        exponentials need no running maximum.
        """
        c = self.config
        num_tokens, group = len(q), c.num_heads // c.num_kv_heads
        # The query heads that share a K/V head stand in one matrix: [kv_heads, group * tokens, head_size].
        scaled = q * np.float32(c.sharpness * c.head_size**-0.5)
        rows = np.ascontiguousarray(scaled.transpose(1, 0, 2)).reshape(c.num_kv_heads, group * num_tokens, c.head_size)
        total = np.zeros_like(rows)
        weight = np.zeros((c.num_kv_heads, group * num_tokens, 1), dtype=np.float32)
        stop = start + num_tokens
        for first in range(0, stop, _TILE):
            last = min(first + _TILE, stop)
            k, v = cache.read(layer, first, last)
            scores = rows @ k.transpose(1, 2, 0)
            np.exp(scores, out=scores)
            if last > start + 1:  # the tile reaches past the first query's own token: hide what is later than each
                later = np.arange(first, last)[None, :] > np.arange(start, stop)[:, None]
                scores.reshape(c.num_kv_heads, group, num_tokens, last - first)[:, :, later] = 0.0
            weight += scores.sum(axis=-1, keepdims=True)
            total += scores @ v.transpose(1, 0, 2)
        heads = (total / weight).reshape(c.num_heads, num_tokens, c.head_size)
        return np.ascontiguousarray(heads.transpose(1, 0, 2)).reshape(num_tokens, c.num_heads * c.head_size)
