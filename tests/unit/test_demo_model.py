"""The demo's transformer: its arithmetic against a plain one, and the same bits however a prompt was cut."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvshm.demo.model import Model, ModelConfig
from kvshm.demo.paged_cache import BLOCK_SIZE, PagedCache, draw_block_ids, layer_shape

Array = np.ndarray[Any, Any]

CONFIG = ModelConfig(num_layers=3, num_heads=6, num_kv_heads=2, head_size=10, hidden_size=29, ffn_size=37)
STEP = 3 * BLOCK_SIZE


def _pages(num_blocks: int) -> list[Array]:
    # Not zeros: what was never written must not matter.
    return [np.full(layer_shape(CONFIG, num_blocks), np.nan, ml_dtypes.bfloat16) for _ in range(CONFIG.num_layers)]


def _prompt(num_tokens: int) -> Array:
    return np.random.Generator(np.random.PCG64(5)).integers(0, 256, num_tokens)


def _prefill(model: Model, tokens: Array, cache: PagedCache, start: int = 0) -> list[Array]:
    return [model.step(tokens[at : at + STEP], at, cache) for at in range(start, len(tokens), STEP)]


def _naive_logits(model: Model, tokens: Array) -> Array:
    """The same network over all tokens at once: no cache but its rounding, one token and one head after the other."""
    c = model.config

    def norm(x: Array) -> Array:
        normed: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        return normed

    def rotate(row: Array, position: int) -> Array:
        half = c.head_size // 2
        angle = position * c.rope_base ** (-np.arange(half) / half)
        pair = (row[:half] + 1j * row[half:]) * np.exp(1j * angle)
        return np.concatenate((pair.real, pair.imag))

    def rounded(row: Array) -> Array:
        return row.astype(ml_dtypes.bfloat16).astype(np.float64)

    x = model._embedding[tokens].astype(np.float64)
    for layer in model._layers:
        qkv = (norm(x) @ layer.qkv).reshape(len(x), -1, c.head_size)
        heads = np.empty((len(x), c.num_heads, c.head_size))
        for head in range(c.num_heads):
            kv_head = c.num_heads + head // (c.num_heads // c.num_kv_heads)
            keys = np.array([rounded(rotate(norm(row), at)) for at, row in enumerate(qkv[:, kv_head])])
            values = rounded(qkv[:, kv_head + c.num_kv_heads])
            for at, row in enumerate(qkv[:, head]):
                scores = keys[: at + 1] @ rotate(norm(row), at) * c.sharpness / c.head_size**0.5
                weights = np.exp(scores - scores.max())
                heads[at, head] = weights @ values[: at + 1] / weights.sum()
        x = x + heads.reshape(len(x), -1) @ layer.out
        gate, up = np.split(norm(x) @ layer.gate_up, 2, axis=1)
        x = x + gate / (1 + np.exp(-gate)) * up @ layer.down
    logits: Array = norm(x[-1]) @ model._head
    return logits


def test_logits_agree_with_the_plain_network() -> None:
    tokens = _prompt(STEP + 13)
    model = Model(CONFIG, max_positions=len(tokens))
    cache = PagedCache(_pages(7), draw_block_ids(len(tokens), 7, seed=1))
    logits = _prefill(model, tokens, cache)[-1]
    # K and V that fall near the middle of two bfloat16 values may be rounded to either.
    np.testing.assert_allclose(logits, _naive_logits(model, tokens), atol=0.05)


def test_attention_over_several_tiles_agrees_with_the_plain_network() -> None:
    tokens = _prompt(256 + 31)
    model = Model(CONFIG, max_positions=len(tokens))
    cache = PagedCache(_pages(23), draw_block_ids(len(tokens), 23, seed=1))
    whole = model.step(tokens, 0, cache)
    np.testing.assert_allclose(whole, _naive_logits(model, tokens), atol=0.05)


@pytest.mark.parametrize("num_copied_steps", [1, 2, 3])
def test_resuming_from_copied_pages_gives_the_same_bits(num_copied_steps: int) -> None:
    tokens = _prompt(3 * STEP + 11)
    model = Model(CONFIG, max_positions=len(tokens) + 5)
    first_ids, second_ids = (draw_block_ids(model.max_positions, 17, seed) for seed in (1, 2))
    assert first_ids != second_ids
    first_pages, second_pages = _pages(17), _pages(17)
    first, second = PagedCache(first_pages, first_ids), PagedCache(second_pages, second_ids)
    expected = _prefill(model, tokens, first)[num_copied_steps:]

    num_blocks = num_copied_steps * STEP // BLOCK_SIZE
    for source, target in zip(first_pages, second_pages, strict=True):
        target[:, second_ids[:num_blocks]] = source[:, first_ids[:num_blocks]]
    resumed = _prefill(Model(CONFIG, model.max_positions), tokens, second, start=num_copied_steps * STEP)
    assert [logits.tobytes() for logits in resumed] == [logits.tobytes() for logits in expected]

    for position in range(len(tokens), model.max_positions):
        token = np.array([position % 256])
        assert model.step(token, position, first).tobytes() == model.step(token, position, second).tobytes()


def test_one_flipped_bit_in_a_page_changes_the_logits() -> None:
    tokens = _prompt(2 * STEP)
    model = Model(CONFIG, max_positions=len(tokens))
    block_ids = draw_block_ids(len(tokens), 11, seed=1)
    pages = _pages(11)
    cache = PagedCache(pages, block_ids)
    expected = _prefill(model, tokens, cache)[1]
    bits = pages[0].view(np.uint16)
    bits[1, block_ids[0], 3, 0, 7] ^= 1 << 6
    assert model.step(tokens[STEP:], STEP, cache).tobytes() != expected.tobytes()


def test_later_tokens_do_not_change_what_earlier_ones_keep() -> None:
    tokens = _prompt(STEP)
    model = Model(CONFIG, max_positions=STEP)
    kept = []
    for last in (1, 2):
        pages = _pages(5)
        cache = PagedCache(pages, draw_block_ids(STEP, 5, seed=1))
        model.step(np.append(tokens[:-1], last), 0, cache)
        kept.append([cache.read(layer, 0, STEP) for layer in range(CONFIG.num_layers)])
    for one, other in zip(*kept, strict=True):
        for plane in range(2):
            np.testing.assert_array_equal(one[plane][:-1], other[plane][:-1])
            assert (one[plane][-1] != other[plane][-1]).any()


@pytest.mark.parametrize(("start", "count"), [(0, 0), (-1, 1), (5, 3), (8, 1)])
def test_positions_outside_the_model_are_refused(start: int, count: int) -> None:
    model = Model(CONFIG, max_positions=7)
    with pytest.raises(ValueError, match=r"are not one or more of \[0, 7\)"):
        model.step(np.zeros(count, dtype=int), start, PagedCache(_pages(3), [1]))


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="num_heads 5 must be a multiple of num_kv_heads 2"):
        ModelConfig(num_heads=5, num_kv_heads=2)
    with pytest.raises(ValueError, match="head_size 7 must be even"):
        ModelConfig(head_size=7)
