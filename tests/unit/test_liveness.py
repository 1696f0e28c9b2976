"""Liveness segments: a lock tells whether a process lives, whatever becomes of its name."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kvshm.shm.liveness import Liveness, LivenessProbe
from tests.support.processes import Peer


def test_a_probe_asks_for_the_lock() -> None:
    liveness = Liveness()
    probe, other = LivenessProbe(liveness.name), LivenessProbe(liveness.name)
    assert (probe.is_free(), other.is_free()) == (False, False)
    assert os.stat(f"/dev/shm{liveness.name}").st_size == 1
    liveness.close()
    assert (probe.is_free(), other.is_free(), probe.is_free()) == (True, True, True)
    liveness.close()
    with pytest.raises(ValueError, match="is closed"):
        _ = liveness.name
    probe.close()
    probe.close()


def test_a_dropped_one_is_closed() -> None:
    liveness = Liveness()
    name = liveness.name
    probe = LivenessProbe(name)
    del liveness
    assert probe.is_free()
    assert not os.path.exists(f"/dev/shm{name}")


def test_a_name_that_was_removed() -> None:
    liveness = Liveness()
    first = liveness.name
    probe = LivenessProbe(first)
    os.unlink(f"/dev/shm{first}")
    assert not probe.is_free(), "that proves nothing"
    second = liveness.name
    assert (second != first, liveness.name) == (True, second)
    another = LivenessProbe(second)
    assert (probe.is_free(), another.is_free()) == (False, False)
    liveness.close()
    assert (probe.is_free(), another.is_free()) == (True, True)


def test_a_name_that_is_somebody_elses_by_now() -> None:
    liveness = Liveness()
    name = liveness.name
    path = Path(f"/dev/shm{name}")
    path.unlink()
    path.write_bytes(b"x")
    assert liveness.name != name
    liveness.close()
    assert path.read_bytes() == b"x"
    path.unlink()


def test_a_stopped_process_lives_and_a_killed_one_does_not() -> None:
    with Peer() as peer:
        peer.run("from kvshm.shm.liveness import Liveness; liveness = Liveness()")
        name = peer.get("liveness.name")
        probe = LivenessProbe(name)
        os.kill(peer.pid, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(peer.pid, os.WUNTRACED)[1])
        assert not probe.is_free()
        peer.kill()
        assert probe.is_free()
    os.unlink(f"/dev/shm{name}")


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("/kvshm_nobody", FileNotFoundError, "there is no segment '/kvshm_nobody'"),
        ("", ValueError, "name"),
        ("/a/b", ValueError, "name"),
        ("/..", ValueError, "name"),
    ],
)
def test_names_that_lead_nowhere(name: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        LivenessProbe(name)


@pytest.mark.parametrize("kind", ["fifo", "directory", "link"])
def test_names_that_lead_to_something_else(kind: str) -> None:
    path = Path(f"/dev/shm/kvshm_odd_{os.getpid()}")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/etc/hostname")
    try:
        with pytest.raises((ValueError, OSError)):
            LivenessProbe(f"/{path.name}")
    finally:
        path.rmdir() if kind == "directory" else path.unlink()
