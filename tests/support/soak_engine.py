"""An engine of the soak test: random stores, lookups and retrieves, every byte checked. Run as a program.

All engines know the same prompts, and what a chunk of a prompt holds follows from the prompt and its place, so whoever
retrieves a chunk knows every byte of it, whoever stored it. Prints one JSON line when its standard input ends.
"""

from __future__ import annotations

import argparse
import json
import random
import select
import sys
import time
from typing import Any

import numpy as np

from kvshm import empty_many
from kvshm.client.cache_client import CacheClient

CHUNK, BLOCK, HEADS, SIZE, LAYERS, MAX_CHUNKS = 8, 4, 3, 16, 3, 4
NUM_BLOCKS = 2 * MAX_CHUNKS * (CHUNK // BLOCK) + 1
CHUNK_NBYTES = LAYERS * 2 * CHUNK * HEADS * SIZE * 2
NUM_PROMPTS = 45


def expected(prompt: int, chunk: int) -> list[np.ndarray[Any, Any]]:
    """Per layer the content [2, blocks, BLOCK, HEADS, SIZE] of a chunk. Prompts share nothing."""
    rng = np.random.default_rng((prompt, chunk))
    shape = (2, CHUNK // BLOCK, BLOCK, HEADS, SIZE)
    return [rng.integers(0, 1 << 16, shape, dtype=np.uint16) for _ in range(LAYERS)]


def is_stopping(timeout_s: float = 0.0) -> bool:
    """Whether the standard input has ended."""
    return bool(select.select([sys.stdin], [], [], timeout_s)[0])


def main() -> None:
    """Work until told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("mode")
    parser.add_argument("seed", type=int)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    counts = dict.fromkeys(("stores", "lookups", "hits", "retrieves", "misses", "wrong", "registrations"), 0)
    client = CacheClient(args.url, timeout_s=5.0, heartbeat_s=0.2, connect_timeout_s=0.5)
    shape, dtype = (2, NUM_BLOCKS, BLOCK, HEADS, SIZE), "uint16"
    arrays: list[Any] = empty_many([shape] * LAYERS, [dtype] * LAYERS)
    if args.mode == "engine_driven":
        arrays = [np.empty(shape, dtype) for _ in range(LAYERS)]
    engine: Any = None
    print("ready", flush=True)
    while not is_stopping():
        if engine is None:
            try:
                engine = client.register(arrays, "soak", layout_hints={"kv_layout": "NHD"}, transfer_mode=args.mode)
            except OSError:  # the server is being restarted
                is_stopping(0.05)
                continue
            counts["registrations"] += 1
        prompt, num_chunks = rng.randrange(NUM_PROMPTS), rng.randint(1, MAX_CHUNKS)
        tokens = [prompt * 1000 + place for place in range(num_chunks * CHUNK + rng.randrange(CHUNK))]
        blocks = rng.sample(range(1, NUM_BLOCKS), num_chunks * (CHUNK // BLOCK))
        per_chunk = [blocks[start : start + CHUNK // BLOCK] for start in range(0, len(blocks), CHUNK // BLOCK)]
        hit = engine.lookup(tokens)
        counts["lookups"] += 1
        if hit:
            counts["hits"] += 1
            for array in arrays:
                array[:, blocks] = 0
            if rng.random() < 0.9:  # the others leave their read locks to the time limit
                written = engine.retrieve(tokens[:hit], blocks)
                counts["retrieves"] += bool(written)
                counts["misses"] += not written
                for chunk in range(written // CHUNK):
                    content = expected(prompt, chunk)
                    counts["wrong"] += not all(
                        np.array_equal(array[:, per_chunk[chunk]], want)
                        for array, want in zip(arrays, content, strict=True)
                    )
        if hit < num_chunks * CHUNK:
            for chunk in range(num_chunks):
                for array, content_of_layer in zip(arrays, expected(prompt, chunk), strict=True):
                    array[:, per_chunk[chunk]] = content_of_layer
            # A miss changes nothing in the blocks: the server drops what it reads after the time limit.
            counts["stores"] += bool(engine.store(tokens, blocks))
        if any(engine.unsettled_block_ids()):
            deadline = time.monotonic() + 30
            while any(engine.unsettled_block_ids()) and time.monotonic() < deadline:
                is_stopping(0.01)
        if rng.random() < 0.01:
            engine.unregister()
            engine = None
    client.close()
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
