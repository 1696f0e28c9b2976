"""A cache server in a process of its own, and this process as its engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from kvshm.bench.results import Amount

__all__ = ["is_there", "measure_server"]


def is_there() -> bool:
    """Whether pyzmq is installed, which the server needs."""
    return importlib.util.find_spec("zmq") is not None


def measure_server(*, quick: bool) -> Iterator[Amount]:
    """Round trips, lookups, stores and retrieves."""
    from kvshm.bench.server_process import Geometry, measure  # noqa: PLC0415  # needs the extra "server"

    small = Geometry(num_layers=2, num_blocks=32)
    yield from measure(small, rounds=1, token_counts=(256,)) if quick else measure()
