"""Ctrl-C, SIGTERM and SIGKILL at each step of ``kvshm demo``: no process and no segment is left."""

from __future__ import annotations

import contextlib
import os
import pty
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvshm

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0

# The demo, which signals itself at a chosen moment: before or after the start of its n-th child, at the n-th step
# that it is told of, or when the n-th child is waited for.
DRIVER = """
import os, secrets, signal, subprocess, sys
from kvshm import cli
from kvshm.demo import command, run

moment, count, signum, target, run_id = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:6]
secrets.token_hex = lambda nbytes: run_id
seen = {}

def pass_by(name):
    seen[name] = seen.get(name, -1) + 1
    if (name, seen[name]) == (moment, count):
        if target == "group":
            os.killpg(0, signum)
        else:
            os.kill(os.getpid(), signum)

class Popen(subprocess.Popen):
    def __init__(self, *args, **options):
        pass_by("start")
        super().__init__(*args, **options)
        pass_by("started")

    def wait(self, timeout=None):
        pass_by("wait")
        return super().wait(timeout)

subprocess.Popen = Popen

class Bar(command._Bar):
    def follow(self, number, message):
        pass_by("step")
        super().follow(number, message)
        if message["step"] == "generate" and moment == "twice":
            os.kill(os.getpid(), signum)
            os.kill(os.getpid(), signum)

command._Bar = Bar
sys.exit(cli.main(sys.argv[6:]))
"""


def _run(tmp_path: Path, moment: str, count: int, signum: int, target: str) -> tuple[int, str, str, bool]:
    """Exit status, stdout, stderr, and whether a child was left when the demo had ended.

    When this returns the last child has ended too, and its segment has gone.
    """
    run_id = secrets.token_hex(4)
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes(bytes(range(150)))
    driver = [sys.executable, "-c", DRIVER, moment, str(count), str(int(signum)), target, run_id]
    demo = ["demo", "--prompt", str(prompt), "--tokens", "3", "--chunk-size", "32"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [*driver, *demo],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # the group that is signalled is its own
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.wait(TIMEOUT_S)
        # Every child holds this pipe too, so its end is reached when the last of them has ended.
        os.set_blocking(process.stderr.fileno(), False)
        errors, left = b"", False
        try:
            while piece := os.read(process.stderr.fileno(), 65536):
                errors += piece
        except BlockingIOError:
            left = True
        os.set_blocking(process.stderr.fileno(), True)
        errors += process.stderr.read()
        names = [segment.name for segment in kvshm.list_segments() if run_id in segment.name]
        assert names == []
        return process.returncode, process.stdout.read().decode(), errors.decode(), left


# Before anything runs, with the server up, while one engine computes, while the other does, and twice in a row.
MOMENTS = [("start", 0), ("started", 1), ("step", 0), ("step", 10), ("twice", 0)]


@pytest.mark.parametrize(("moment", "count"), MOMENTS)
def test_interrupt_of_the_group_leaves_nothing(tmp_path: Path, moment: str, count: int) -> None:
    code, out, errors, left = _run(tmp_path, moment, count, signal.SIGINT, "group")
    assert (code, out, errors) == (130, "", "kvshm demo: SIGINT; nothing is left\n")
    assert not left


@pytest.mark.parametrize(
    ("moment", "count", "signum"),
    [
        ("start", 0, signal.SIGTERM),
        ("step", 3, signal.SIGINT),
        ("started", 2, signal.SIGTERM),
    ],
)
def test_signal_to_the_parent_alone_leaves_nothing(
    tmp_path: Path, moment: str, count: int, signum: signal.Signals
) -> None:
    code, out, errors, left = _run(tmp_path, moment, count, signum, "parent")
    assert (code, out, errors) == (128 + signum, "", f"kvshm demo: {signum.name}; nothing is left\n")
    assert not left


@pytest.mark.parametrize(
    ("moment", "count", "target"),
    [("started", 0, "parent"), ("step", 16, "parent")],
)
def test_children_of_a_killed_demo_end_by_themselves(tmp_path: Path, moment: str, count: int, target: str) -> None:
    code, out, errors, _ = _run(tmp_path, moment, count, signal.SIGKILL, target)
    assert (code, out, errors) == (-signal.SIGKILL, "", "")


# Makes the terminal at stdin the one that signals this process, and becomes the demo.
AT_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "kvshm", *sys.argv[1:]])
"""


def test_ctrl_c_at_a_terminal(tmp_path: Path) -> None:
    """The key itself, typed once the progress bar is there: the terminal signals its foreground group."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes(bytes(range(150)))
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", AT_TERMINAL, "demo", "--prompt", str(prompt), "--chunk-size", "16"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    ) as process:
        os.close(theirs)
        shown = b""
        while b"engine 1 prefill" not in shown:
            shown += os.read(ours, 4096)
        os.write(ours, b"\x03")
        with contextlib.suppress(OSError):  # how Linux tells that the last one has left the terminal
            while piece := os.read(ours, 4096):
                shown += piece
        os.close(ours)
    assert process.returncode == 130, shown.decode()
    assert shown.endswith(b"kvshm demo: SIGINT; nothing is left\r\n")
    assert b"Traceback" not in shown
