"""The engine process of the demo: it computes a prompt and writes on, with its K and V in shared pages.

Every engine does the same: it registers its pages with the cache server, asks for the longest beginning of the prompt
that is cached, has it written into its own blocks, computes the rest, and stores what was not cached. The first finds
nothing; the second finds what the first has left.

Run as ``python -m kvshm.demo.engine``, with a socket for stdin, it receives one :class:`Job` from the process at the
other end, tells it of each step, and ends with the :class:`Outcome`.
"""

from __future__ import annotations

import hashlib
import logging
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import numpy as np

import kvshm
from kvshm.client.cache_client import CacheClient
from kvshm.demo.channel import Channel, Message
from kvshm.demo.model import Model, ModelConfig
from kvshm.demo.paged_cache import BLOCK_SIZE, LAYOUT_HINTS, PagedCache, draw_block_ids, layer_shape

__all__ = ["Job", "Outcome", "connect", "main", "run_job"]

_NUM_REPEATS = 7  # of what is measured more than once; odd
_TIMEOUT_S = 30.0  # of a request to the server; the longest takes a fraction of a second

# Of the 256 tokens only these are chosen, so that what the model writes can be printed.
_LETTERS = np.frombuffer(b" ,.abcdefghijklmnopqrstuvwxyz", dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Job:
    """What an engine is asked to do."""

    prompt: bytes
    num_generate: int
    num_blocks: int
    block_seed: int  # of the shuffled free list that the request's blocks come from
    token_nbytes: int  # of K and V in all layers
    segment_name: str  # of the segment that shall hold the pages
    model_name: str
    server: str  # URL


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an engine has done. Times in seconds, as this process saw them, each until the server's answer."""

    output: bytes
    logits_digest: str  # of the logits of every generated token
    segments: list[str]  # names of what held the pages
    num_descriptors: int
    shared_nbytes: int
    block_ids: list[int]  # of the prompt, in its order
    num_retrieved: int  # tokens that the server had and wrote
    num_prefilled: int
    num_stored: int  # tokens that were cached once this engine had stored; 0: there was nothing to store
    map_s: float
    lookup_s: float
    retrieve_s: float
    retrieve_again_s: float  # the same again, its pages no longer new to the server; 0.0: there was nothing to retrieve
    prefill_s: float
    store_s: float
    generate_s: float
    copied_nbytes: int  # by the retrieve or the store
    memcpy_s: float  # of as many bytes between two arrays of this process


class _Clock:
    """Seconds since it was last read."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        last, self._last = self._last, time.perf_counter()
        return self._last - last


def connect(url: str) -> CacheClient:
    """A client of a cache server, which raises what goes wrong.

    Raises:
        ValueError: The url is none.
    """
    return CacheClient(url, _TIMEOUT_S, raises=True)


def run_job(job: Job, client: CacheClient, tell: Callable[[Message], None]) -> Outcome:
    """Compute one prompt with the help of a cache server.

    Args:
        tell: Called at each step, with a map that has the key ``step``.
    """
    config = ModelConfig()
    prompt = list(job.prompt)
    chunk_size = client.get_chunk_size()
    model = Model(config, max_positions=len(prompt) + job.num_generate)
    shape = layer_shape(config, job.num_blocks)
    dtypes = ["bfloat16"] * config.num_layers
    layers = kvshm.empty_many([shape] * config.num_layers, dtypes, name=job.segment_name)
    for layer in layers:
        layer.fill(0)  # an engine's pages have been in use before a request comes
    wrappers = [kvshm.wrap(layer) for layer in layers]
    block_ids = draw_block_ids(model.max_positions, job.num_blocks, job.block_seed)
    pages = PagedCache(layers, block_ids)
    tell({"step": "pages"})

    clock = _Clock()
    engine = client.register(layers, job.model_name, layout_hints=LAYOUT_HINTS)
    map_s = clock.lap()
    tell({"step": "registered"})

    # Nobody keeps logits, so the last token is always computed. What is computed begins between chunks and goes on
    # chunk by chunk, whatever was found: the same steps give the same result to the last bit.
    clock.lap()
    num_found = engine.lookup(prompt[:-1])
    lookup_s = clock.lap()
    num_retrieved = engine.retrieve(prompt[:num_found], block_ids[: num_found // BLOCK_SIZE]) if num_found else 0
    retrieve_s = clock.lap()
    if num_retrieved != num_found:
        raise RuntimeError(f"the server found {num_found} tokens, but then it wrote {num_retrieved}")
    tell({"step": "retrieved"})

    clock.lap()
    tokens = np.array(prompt)
    for first in range(num_found, len(prompt), chunk_size):
        logits = model.step(tokens[first : first + chunk_size], first, pages)
        tell({"step": "prefill", "done": min(first + chunk_size, len(prompt)), "total": len(prompt)})
    prefill_s = clock.lap()

    num_full = len(prompt) // chunk_size * chunk_size
    is_new = num_found < num_full
    num_stored = engine.store(prompt[:num_full], block_ids[: num_full // BLOCK_SIZE]) if is_new else 0
    store_s = clock.lap()
    tell({"step": "stored"})

    digest = hashlib.blake2b(digest_size=16)
    output: list[int] = []
    clock.lap()
    for position in range(len(prompt), model.max_positions):
        digest.update(logits.tobytes())
        output.append(int(_LETTERS[np.argmax(logits[_LETTERS])]))
        tell({"step": "generate", "done": len(output), "total": job.num_generate})
        if len(output) < job.num_generate:
            logits = model.step(np.array(output[-1:]), position, pages)
    generate_s = clock.lap()

    again = []
    for _ in range(_NUM_REPEATS if num_found else 0):
        engine.lookup(prompt[:-1])
        clock.lap()
        engine.retrieve(prompt[:num_found], block_ids[: num_found // BLOCK_SIZE])
        again.append(clock.lap())
    engine.unregister()

    copied_nbytes = (num_retrieved or num_stored) * job.token_nbytes
    return Outcome(
        output=bytes(output),
        logits_digest=digest.hexdigest(),
        segments=sorted({wrapper.shm_name for wrapper in wrappers}),
        num_descriptors=len(wrappers),
        shared_nbytes=sum(layer.nbytes for layer in layers),
        block_ids=block_ids[: -(-len(prompt) // BLOCK_SIZE)],
        num_retrieved=num_retrieved,
        num_prefilled=len(prompt) - num_found,
        num_stored=num_stored,
        map_s=map_s,
        lookup_s=lookup_s,
        retrieve_s=retrieve_s,
        retrieve_again_s=statistics.median(again) if again else 0.0,
        prefill_s=prefill_s,
        store_s=store_s,
        generate_s=generate_s,
        copied_nbytes=copied_nbytes,
        memcpy_s=_time_memcpy(copied_nbytes),
    )


def _time_memcpy(nbytes: int) -> float:
    """Seconds that a plain copy of so many bytes takes here, between arrays that are in memory already."""
    source, target = np.full(nbytes, 1, dtype=np.uint8), np.full(nbytes, 0, dtype=np.uint8)
    clock = _Clock()
    laps = []
    for _ in range(_NUM_REPEATS):
        clock.lap()
        np.copyto(target, source)
        laps.append(clock.lap())
    return statistics.median(laps)


def _terminate(signum: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + signum)


def main() -> int:
    """Do the one job that comes over stdin."""
    # The terminal's Ctrl-C is for the process that started this one: when that ends, telling it of the next step
    # fails, and this process ends with its pages. SIGTERM is for the case that no next step comes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _terminate)
    # What the client would warn of it raises too, and then the starter is told.
    logging.getLogger("kvshm").addHandler(logging.NullHandler())
    starter = Channel.inherited(sys.stdin.fileno())

    def tell(message: Message) -> None:
        try:
            starter.send(message)
        except ConnectionError:
            raise SystemExit(1) from None

    try:
        job = Job(**starter.receive())
    except ConnectionError:
        return 1
    try:
        with connect(job.server) as client:
            outcome = run_job(job, client, tell)
    except (OSError, ValueError, RuntimeError) as error:
        tell({"step": "failed", "error": f"{type(error).__name__}: {error}"})
        return 1
    tell({"step": "done", "outcome": asdict(outcome)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
