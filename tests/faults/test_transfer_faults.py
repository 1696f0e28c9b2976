"""What happens around a transfer while it runs: errors, several callers, a context that is closed, a collector."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import kvshm
from kvshm import transfer
from kvshm.context import CPUCacheContext
from kvshm.transfer import gather_chunks, object_group_nbytes, scatter_chunks

NB = 32


def shared_cache() -> list[np.ndarray[Any, Any]]:
    layers = kvshm.empty_many([(2, NB, 16, 2, 64)] * 4, ["uint8"] * 4)
    for number, layer in enumerate(layers):
        layer[...] = np.random.default_rng(number).integers(0, 256, layer.shape, dtype=np.uint8)
    return layers


def expected(cache: list[np.ndarray[Any, Any]], ids: list[int]) -> bytes:
    return b"".join(layer[kv, ids].tobytes() for kv in range(2) for layer in cache)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_error_in_the_middle_comes_out_and_the_next_transfer_works(
    monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    cache = shared_cache()
    context = CPUCacheContext(cache, 256, {"kv_layout": "NHD"})
    chunks = [bytearray(object_group_nbytes(context, 0)) for _ in range(2)]
    ids = np.random.default_rng(9).permutation(NB).tolist()
    monkeypatch.setattr(transfer, "MIN_JOB_NBYTES", 1)
    copies: list[int] = []

    def failing(*arguments: Any) -> None:
        copies.append(1)
        if len(copies) == min(2, num_threads):  # one thread has one job
            raise MemoryError("no memory for an index")

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "gather", failing)
        with pytest.raises(MemoryError, match="no memory for an index"):
            gather_chunks(context, [ids], chunks, num_threads=num_threads)
    gather_chunks(context, [ids], chunks, num_threads=num_threads)
    assert [bytes(chunk) for chunk in chunks] == [expected(cache, ids[:16]), expected(cache, ids[16:])]


def test_many_callers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = shared_cache()
    monkeypatch.setattr(transfer, "MIN_JOB_NBYTES", 1)
    context = CPUCacheContext(cache, 256, {"kv_layout": "NHD"})
    nbytes = object_group_nbytes(context, 0)
    before = [layer.copy() for layer in cache]

    def there_and_back(seed: int) -> bool:
        # Every caller has blocks of its own and leaves them as they were.
        ids = [block for block in range(NB) if block % 2 == seed % 2]
        chunk = bytearray(nbytes)
        for _ in range(20):
            gather_chunks(context, [ids], [chunk], num_threads=3)
            assert bytes(chunk) == expected(before, ids)
            scatter_chunks(context, [ids], [bytes(chunk)], num_threads=3)
        return True

    with ThreadPoolExecutor(6) as callers:
        assert all(callers.map(there_and_back, range(6)))
    assert all(map(np.array_equal, cache, before))


def test_a_context_may_be_closed_while_it_is_used() -> None:
    cache = shared_cache()
    wrappers = [kvshm.wrap(layer) for layer in cache]
    ids = list(range(16))
    for _ in range(30):
        context = CPUCacheContext(wrappers, 256, {"kv_layout": "NHD"})
        chunk = np.zeros(object_group_nbytes(context, 0), np.uint8)
        with ThreadPoolExecutor(1) as caller:
            copy = caller.submit(gather_chunks, context, [ids], [chunk], num_threads=2)
            context.close()
            del context
            gc.collect()
            error = copy.exception()
            if error is None:
                assert chunk.tobytes() == expected(cache, ids)
            else:
                assert isinstance(error, ValueError)
                assert "closed" in str(error)
                assert not chunk.any()
