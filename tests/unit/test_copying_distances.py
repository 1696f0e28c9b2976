"""Rows of pages are copied right over every distance between a cache and a chunk, also those that take short rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvshm import CPUCacheContext, copying
from kvshm.transfer import gather_chunks, object_group_nbytes, scatter_chunks

PAGE = copying.PAGE_NBYTES


def at_phase(nbytes: int, phase: int) -> np.ndarray[Any, Any]:
    """So many bytes that begin ``phase`` bytes past a page."""
    room = np.zeros(nbytes + 2 * PAGE, np.uint8)
    start = -room.__array_interface__["data"][0] % PAGE + phase
    return room[start : start + nbytes]


@pytest.mark.parametrize("phase", [0, 1, 16, 31, 32, 2064, 4064, 4065, 4080, 4095])
@pytest.mark.parametrize("hidden", [512, 576])  # rows of a whole number of pages, and of half pages more
def test_every_distance(hidden: int, phase: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, num_layers = (11, 16, hidden), 3
    nbytes = int(np.prod(shape))
    cache = [at_phase(nbytes, 0).reshape(shape) for _ in range(num_layers)]
    rng = np.random.default_rng(phase)
    for layer in cache:
        layer[...] = rng.integers(0, 256, shape)
    before = [layer.copy() for layer in cache]
    context = CPUCacheContext(cache, 64)
    chunk = at_phase(object_group_nbytes(context, 0), phase)
    ids = [7, 2, 10, 0]

    short_rows = copying._short_rows
    cuts = []

    def counting(*args: Any) -> Any:
        cuts.append(args)
        return short_rows(*args)

    monkeypatch.setattr(copying, "_short_rows", counting)
    gather_chunks(context, [ids], [chunk], num_threads=1)
    assert chunk.tobytes() == b"".join(layer[ids].tobytes() for layer in before)
    assert bool(cuts) == (phase % (4096 if hidden == 512 else 1024) in range(1, 32))

    cuts.clear()
    for layer in cache:
        layer[...] = 0
    scatter_chunks(context, [ids], [chunk], num_threads=1)
    for layer, old in zip(cache, before, strict=True):
        assert np.array_equal(layer[ids], old[ids])
        others = [block for block in range(shape[0]) if block not in ids]
        assert not layer[others].any()
    assert bool(cuts) == (-phase % (4096 if hidden == 512 else 1024) in range(1, 32))
