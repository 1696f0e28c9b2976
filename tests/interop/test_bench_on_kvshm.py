"""LMCache's own bench on ``kvshm serve``: every lookup of what was stored hits, and every checksum matches."""

from __future__ import annotations

import re

import pytest

from kvshm.client.cache_client import CacheClient
from tests.interop.processes import LMCache, Server

NUM_SEQUENCES = 3
NUM_CHUNKS = 2
KV = "(2,256,16,8,128):bfloat16:8"
MLA = "(1,256,16,1,576):bfloat16:4"
# The bench ends well whatever its checks said, so what it printed is looked through for these.
COMPLAINTS = re.compile(r"failed|timeout|timed out|mismatch|traceback|unavailable|warn", re.IGNORECASE)


@pytest.mark.parametrize(
    ("mode", "flags"),
    [
        pytest.param("lmcache_driven", ("--kvcache-shape-spec", KV), id="lmcache_driven"),
        pytest.param("engine_driven", ("--kvcache-shape-spec", KV), id="engine_driven"),
        pytest.param("engine_driven", ("--kvcache-shape-spec", MLA), id="MLA-engine_driven"),
        pytest.param("lmcache_driven", ("--kvcache-shape-spec", f"{MLA};{KV}"), id="mixed-lmcache_driven"),
        pytest.param("engine_driven", ("--kvcache-shape-spec", KV, "--tp-size", "2"), id="two-ranks-engine_driven"),
    ],
)
def test_every_check_passes(lmcache: LMCache, our_server: Server, mode: str, flags: tuple[str, ...]) -> None:
    with CacheClient(our_server.url) as client:
        client.clear()  # all modes find each other's chunks, and the bench wants to store them itself
    result = lmcache.bench(our_server, mode, *flags, num_sequences=NUM_SEQUENCES)

    assert result.returncode == 0, result.text
    results = result.metrics["results"]
    assert (results["total_requests"], results["checksum_ok"], results["checksum_fail"]) == (
        NUM_SEQUENCES,
        NUM_SEQUENCES,
        0,
    ), result.text
    hits = re.findall(r"\[seq \d+/warm\] LOOKUP: (\d+)/(\d+) chunks hit", result.text)
    assert hits == [(str(NUM_CHUNKS), str(NUM_CHUNKS))] * NUM_SEQUENCES, result.text
    for step in ("cold_store", "warm_retrieve"):
        assert result.metrics[step][f"{step}_count"] == NUM_SEQUENCES, result.text
    complaints = [line for line in result.text.splitlines() if COMPLAINTS.search(line)]
    assert complaints == [], result.text
    assert result.segments_left == []
    assert our_server.status()["instances"] == []
