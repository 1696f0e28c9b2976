"""A cache server under test, a client that speaks frames, and caches whose every chunk can be told from any other."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgpack
import numpy as np
import zmq
from numpy.typing import NDArray

import kvshm
from kvshm.server.cache_server import CacheServer

CHUNK = 6  # tokens
BLOCK = 3
BLOCKS_PER_CHUNK = CHUNK // BLOCK
NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, HEAD_SIZE = 2, 31, 5, 7
NHD = {"kv_layout": "NHD"}
CHUNK_NBYTES = 2 * NUM_LAYERS * CHUNK * NUM_HEADS * HEAD_SIZE * 2


@contextmanager
def running_server(**settings: Any) -> Iterator[CacheServer]:
    """A server on a free port of this process; when it closes, nothing is left held."""
    defaults: dict[str, Any] = {"endpoint": "tcp://127.0.0.1:0", "capacity": 40 * CHUNK_NBYTES, "chunk_size": CHUNK}
    server = CacheServer(**defaults | settings)
    with server:
        yield server
    status = server.status()
    assert status["jobs"] == 0
    assert status["lookups"] == {"open": 0, "pins": 0}
    assert status["objects"]["pinned"] == 0
    assert status["objects"]["unfinished"] == 0
    assert status["pool"]["busy_nbytes"] == 0
    assert status["instances"] == []
    gc.collect()


def let_pass(server: CacheServer, seconds: float) -> None:
    """Move a server's clock on, and let it end what is over. Nothing waits, and nothing is raced."""

    def work() -> None:
        clock = server._state.clock
        server._state.clock = lambda: clock() + seconds
        server._service.tick()

    server.call(work)


def layers(seed: int = 0, dtype: str = "float16", num_blocks: int = NUM_BLOCKS) -> list[NDArray[Any]]:
    """Layers [2, NB, BS, NH, HS] in shared memory, full of random bits."""
    arrays = kvshm.empty_many([(2, num_blocks, BLOCK, NUM_HEADS, HEAD_SIZE)] * NUM_LAYERS, [dtype] * NUM_LAYERS)
    rng = np.random.default_rng(seed)
    for array in arrays:
        bits(array)[...] = rng.integers(0, 256, bits(array).shape, dtype=np.uint8)
    return arrays


def bits(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of a contiguous array, for bit-exact comparison."""
    return array.reshape(-1).view(np.uint8)


def blocks_of(arrays: Sequence[NDArray[Any]], block_ids: Sequence[int]) -> bytes:
    """The bytes of some blocks of all layers."""
    return b"".join(array[:, list(block_ids)].tobytes() for array in arrays)


def wipe(arrays: Sequence[NDArray[Any]]) -> None:
    """Zero all layers."""
    for array in arrays:
        bits(array)[...] = 0


def key_map(tokens: Sequence[int], **changes: Any) -> dict[str, Any]:
    """A key as LMCache's client sends it."""
    fields: dict[str, Any] = {
        "model_name": "model",
        "world_size": 1,
        "worker_id": 0,
        "token_ids": list(tokens),
        "start": 0,
        "end": len(tokens) // CHUNK * CHUNK,
        "request_id": "request",
        "cache_salt": "",
        "request_configs": None,
        "num_kv_readers": 1,
    }
    return fields | changes


class RawClient:
    """Speaks frames, as any ZeroMQ program could. Not kvshm's client, so that both ends are not wrong alike."""

    def __init__(self, url: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self.socket.connect(url)
        self._uids = itertools.count(7)

    def send(self, operation: int | str, *payload: Any) -> int:
        """Send a request and give its uid."""
        uid = next(self._uids)
        self.socket.send_multipart([msgpack.packb(frame) for frame in (uid, operation, *payload)])
        return uid

    def reply(self) -> list[Any]:
        """The next reply, every frame decoded."""
        return [msgpack.unpackb(frame) for frame in self.socket.recv_multipart()]

    def ask(self, operation: int | str, *payload: Any) -> list[Any]:
        """The frames of the reply after uid and operation: [], [result], or [failure value, reason]."""
        uid = self.send(operation, *payload)
        got_uid, got_operation, *rest = self.reply()
        assert (got_uid, got_operation) == (uid, operation)
        return rest

    def register(self, arrays: Sequence[NDArray[Any]], instance_id: int = 1, **changes: Any) -> list[Any]:
        """Operation 1 for the layers above."""
        frames: dict[str, Any] = {
            "instance_id": instance_id,
            "kv_caches": [msgpack.ExtType(1, kvshm.wrap(array).to_bytes()) for array in arrays],
            "model_name": "model",
            "world_size": 1,
            "engine_type": "vllm",
            "layout_hints": NHD,
            "engine_group_infos": [],
        }
        return self.ask(1, *(frames | changes).values())

    def hit(self, tokens: Sequence[int], **changes: Any) -> int:
        """Chunks that a lookup finds, its read locks given up again."""
        key = key_map(tokens, worker_id=None, request_id="hit", **changes)
        assert self.ask(8, key, 1) == []
        (chunks,) = self.ask(9, "hit")
        self.ask(13, "hit")
        return int(chunks)

    def close(self) -> None:
        """Close at once."""
        self.socket.close(0)
        self.context.term()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
