"""What a child of multiprocessing runs; it must be importable."""

from __future__ import annotations

from kvshm.client.cache_client import CacheClient


def noop(url: str) -> None:
    """Ask the server for a round trip."""
    with CacheClient(url) as client:
        assert client.noop() == "OK"
