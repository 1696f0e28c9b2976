"""Fixtures of all tests, and the check that the suite leaves no segment behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support, however the tests are started

import kvshm
from kvshm.shm import mappings
from tests.support.memory import exists

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so do its children

hypothesis.settings.register_profile("kvshm", deadline=None)  # shared machines pause at any time
hypothesis.settings.load_profile("kvshm")


def pytest_collection_finish() -> None:
    """Keep what all tests share out of the many collections that tests ask for: most of their time goes there."""
    gc.collect()
    gc.freeze()


def _orphans() -> set[str]:
    return {segment.name for segment in kvshm.list_segments() if not segment.in_use}


@pytest.fixture(scope="session", autouse=True)
def _no_segment_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test leaves a segment: not one of this process, and not one that nobody uses any more.

    Segments that other processes hold are theirs: something else on this machine may use kvshm meanwhile, and a
    killed creator's segment may wait for its own test, in another run, to sweep it.
    """
    before = _orphans()
    yield
    if request.session.testsfailed:
        return  # tracebacks hold arrays
    gc.collect()
    assert not mappings._table.owned, f"segments of this process are left: {sorted(mappings._table.owned.values())}"
    deadline = time.monotonic() + 5
    while left := _orphans() - before:
        assert time.monotonic() < deadline, f"segments that no process uses are left: {sorted(left)}"
        time.sleep(0.1)


@pytest.fixture
def segment_name() -> Iterator[str]:
    """A name that no segment has, and that none has afterwards."""
    name = f"/kvshm_test_{os.urandom(6).hex()}"
    yield name
    gc.collect()
    assert not exists(name), f"the test left segment {name}"


@pytest.fixture(scope="session")
def unshare() -> tuple[str, ...]:
    """The command that runs another in new mount and PID namespaces, as root in there."""
    command = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    for attempt in (command, (*command, "--user", "--map-root-user")):
        try:
            if subprocess.run([*attempt, "true"], capture_output=True, timeout=30, check=False).returncode == 0:
                return attempt
        except FileNotFoundError:
            break
    pytest.skip("this machine does not let this user make namespaces")
