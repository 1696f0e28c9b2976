"""Fixtures of the tests against a real LMCache: its environment, its servers, and engines on either side."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.processes import SHM, LMCache, LMCachePeer, Server, kvshm_server

VERSION = "0.5.6"
collect_ignore = ["lmcache_peer.py"]  # runs in the other Python only


@pytest.fixture(scope="session")
def lmcache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCache]:
    """LMCache's environment, which ``KVSHM_INTEROP_PYTHON`` names; nothing of it may be left in /dev/shm."""
    python = os.environ.get("KVSHM_INTEROP_PYTHON", "")
    if not python:
        pytest.skip("KVSHM_INTEROP_PYTHON names no Python with LMCache; make interop installs one and runs these tests")
    command = [python, "-c", "from importlib.metadata import version; print(version('lmcache'))"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.stdout.strip() == VERSION, f"{python} has no LMCache {VERSION}: {found.stdout}{found.stderr}"
    before = _lmcache_segments()
    yield LMCache(python, tmp_path_factory.mktemp("lmcache"))
    assert _lmcache_segments() <= before, "LMCache's segments are left"


@pytest.fixture(scope="session")
def real_server(lmcache: LMCache) -> Iterator[Server]:
    """A real LMCache server that offers its pool in shared memory."""
    with lmcache.server(pool_name=f"kvshm_interop_{os.getpid()}") as server:
        yield server


@pytest.fixture(scope="session")
def our_server(lmcache: LMCache) -> Iterator[Server]:
    """``kvshm serve``."""
    with kvshm_server(lmcache.log("kvshm-serve"), "--capacity", "256MiB") as server:
        yield server


@pytest.fixture(scope="session")
def peer(lmcache: LMCache) -> Iterator[LMCachePeer]:
    """A process that does with LMCache's Python classes what a test tells it."""
    with lmcache.peer() as peer:
        yield peer


@pytest.fixture
def model_name(request: pytest.FixtureRequest) -> str:
    """A name of the test's own: servers are shared, and what one test caches no other finds."""
    return f"interop/{request.node.name}"


@pytest.fixture(scope="session")
def redis() -> str:
    """The redis-server to run."""
    found = shutil.which(os.environ.get("KVSHM_INTEROP_REDIS", "redis-server"))
    if found is None:
        pytest.skip("no redis-server: install it (apt-get install redis-server), or name one in KVSHM_INTEROP_REDIS")
    return found


def _lmcache_segments() -> set[Path]:
    # Other LMCache processes on this machine may come and go; ours have names that tell.
    return set(SHM.glob(f"lmcache_l1_pool_kvshm_interop_{os.getpid()}*"))
