"""A cache server and its client on this machine: round trips, and chunks stored and retrieved."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

import kvshm
from kvshm.bench.results import Cost, timed
from kvshm.bench.transfers import LAYOUTS, TOKENS_PER_CHUNK

__all__ = ["measure_server"]


def measure_server(nbytes: int, repeat: int) -> Iterator[Cost]:
    """Nothing where pyzmq is not installed."""
    if importlib.util.find_spec("zmq") is None:
        return
    from kvshm.client.cache_client import CacheClient  # noqa: PLC0415  # needs the extra "server"
    from kvshm.server.cache_server import CacheServer  # noqa: PLC0415

    layout = LAYOUTS[0]
    num_chunks = max(1, nbytes // (layout.token_nbytes * TOKENS_PER_CHUNK))
    num_layers = max(1, min(layout.num_layers, layout.num_layers * nbytes // (layout.token_nbytes * TOKENS_PER_CHUNK)))
    num_tokens = num_chunks * TOKENS_PER_CHUNK
    num_blocks = num_tokens // 16 + 1  # block 0 is the null block
    layers = kvshm.empty_many([(2, num_blocks, 16, 8, 128)] * num_layers, ["bfloat16"] * num_layers)
    for layer in layers:
        layer.view(np.uint8)[...] = 1
    moved = num_tokens * layout.token_nbytes // layout.num_layers * num_layers
    ids = (1 + np.random.default_rng(0).permutation(num_blocks - 1)).tolist()
    with (
        CacheServer("tcp://127.0.0.1:0", capacity=2 * moved + 2**20) as server,
        CacheClient(server.endpoint) as client,
        client.register(layers, "bench", layout_hints={"kv_layout": "NHD"}) as engine,
    ):
        yield Cost("server: round trip", 1, "", timed(client.noop, repeat))
        tokens = np.arange(num_tokens)
        mib = moved // 2**20
        stores, retrieves = [], []
        for turn in range(repeat + 1):
            client.clear(True)
            stores.append(_seconds(lambda: engine.store(tokens, ids), num_tokens))
            found = engine.lookup(tokens)
            assert found == num_tokens, f"turn {turn}: {found} tokens found of {num_tokens}"
            retrieves.append(_seconds(lambda: engine.retrieve(tokens, ids), num_tokens))
        yield Cost("server: store", mib, "MiB", statistics.median(stores[1:]))
        yield Cost("server: retrieve", mib, "MiB", statistics.median(retrieves[1:]))
        for count in sorted({min(num_tokens, size) for size in (TOKENS_PER_CHUNK, 2048, num_tokens)}):
            engine.store(tokens[:count], ids[: count // 16])
            yield Cost("server: lookup", count, "token", timed(partial(engine.lookup, tokens[:count]), repeat))


def _seconds(call: Callable[[], int], expected: int) -> float:
    start = time.perf_counter()
    done = call()
    seconds = time.perf_counter() - start
    assert done == expected, f"{done} tokens of {expected}"
    return seconds
