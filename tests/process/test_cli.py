"""The command line as programs and people call it: exit codes, what is imported, ls, sweep and doctor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvshm

TIMEOUT_S = 120.0
COMMANDS = ["demo", "bench", "serve", "status", "layout", "ls", "sweep", "doctor"]


def _kvshm(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return _python("-m", "kvshm", *arguments, **options)


def _python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False, **options
    )


def _orphan(nbytes: int) -> str:
    """The name of a segment whose creator was killed."""
    code = f"import kvshm, os; print(kvshm.Segment.create({nbytes}).name, flush=True); os.kill(os.getpid(), 9)"
    done = _python("-c", code)
    assert done.returncode == -signal.SIGKILL
    return done.stdout.strip()


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_everything_has_help(command: list[str]) -> None:
    done = _kvshm(*command, "--help")
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.startswith(" ".join(["usage: kvshm", *command]))
    if not command:
        assert all(f"    {name} " in done.stdout for name in COMMANDS)


def test_version() -> None:
    done = _kvshm("--version")
    assert (done.returncode, done.stdout) == (0, f"kvshm {kvshm.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["ls", "--colour"], "unrecognized arguments: --colour"),
        (["layout"], "the following arguments are required: shape"),
    ],
)
def test_wrong_calls_are_told_apart(arguments: list[str], message: str) -> None:
    done = _kvshm(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_a_command_imports_only_what_it_needs() -> None:
    code = """
import sys
from kvshm.cli import main
main(["layout", "(2,7,3,5,11):bfloat16:2"])
unwanted = {"zmq", "aiohttp", "matplotlib", "hypothesis", "torch"}
print(sorted(unwanted & set(sys.modules)), [name for name in sys.modules if name.startswith("kvshm.demo")])
"""
    done = _python("-c", code)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "[] []"


@pytest.mark.parametrize("arguments", [["serve"], ["status"], ["demo", "--server", "tcp://127.0.0.1:1"]])
def test_a_missing_extra_is_named(arguments: list[str]) -> None:
    code = f"import sys; sys.modules['zmq'] = None; from kvshm.cli import main; sys.exit(main({arguments!r}))"
    done = _python("-c", code)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvshm: zmq is not installed, which this needs: pip install 'kvshm[server]'\n"


def test_a_reader_that_leaves_is_no_error_on_stderr() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        [sys.executable, "-m", "kvshm", "ls"], stdout=theirs, stderr=subprocess.PIPE, timeout=TIMEOUT_S, check=False
    )
    os.close(theirs)
    assert (done.returncode, done.stderr) == (1, b"")


def test_ls_lists_segments_in_use() -> None:
    with kvshm.Segment.create(5 * 4096) as segment:
        done = _kvshm("ls", "--json")
        assert done.returncode == 0
        rows = {row["name"]: row for row in json.loads(done.stdout)}
        age_s = rows[segment.name].pop("age_s")
        assert rows[segment.name] == {
            "name": segment.name,
            "nbytes": 5 * 4096,
            "uid": os.geteuid(),
            "in_use": True,
        }
        assert 0 <= age_s < TIMEOUT_S


def test_sweep_removes_what_a_killed_process_left_and_nothing_else() -> None:
    with kvshm.Segment.create(1) as segment:
        orphan = _orphan(1)
        done = _kvshm("sweep", "--json")
        assert done.returncode == 0
        names = {info.name for info in kvshm.list_segments()}
        assert orphan not in names
        assert segment.name in names
        assert segment.name not in json.loads(done.stdout)["removed"]


def test_doctor_finds_this_machine_fit() -> None:
    done = _kvshm("doctor", "--json")
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""
    findings = {finding["what"]: finding for finding in json.loads(done.stdout)}
    for what in ("python", "numpy", "ml_dtypes", "msgpack", "posix_ipc", "/dev/shm", "locks", "sharing"):
        assert findings[what]["state"] == "ok"
    assert findings["sharing"]["found"] == "another process read and wrote the same pages"
    assert {"room in /dev/shm", "segments", "open files", "huge pages"} <= set(findings)

    lines = _kvshm("doctor").stdout.splitlines()
    assert all(line[:6] in ("ok    ", "warn  ", "      ") for line in lines[:-1])
    assert lines[-1].endswith(", 0 fail")


def test_doctor_fails_where_something_does_not_work(tmp_path: Path) -> None:
    """An old package, a directory that is no tmpfs and a file system without locks, each with what to do."""
    code = """
import fcntl, importlib.metadata, sys
from kvshm.shm import mappings
from kvshm.commands import doctor
mappings.sweep = list  # without locks it would remove the segments of everybody on this machine
importlib.metadata.version = lambda name: "0.0.3"
doctor._file_system = lambda path: "ext4"
fcntl.flock = lambda fd, how: None
from kvshm.cli import main
sys.exit(main(["doctor"]))
"""
    done = _python("-c", code, cwd=tmp_path)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    for text, remedy in (
        ("fail  numpy: 0.0.3, older than", "      -> pip install -U 'numpy>="),
        ("fail  /dev/shm: of type ext4", "      -> mount -t tmpfs"),
        ("fail  locks: a segment in use is not seen to be in use", "      -> kvshm sweep"),
    ):
        [at] = [at for at, line in enumerate(lines) if line.startswith(text)]
        assert lines[at + 1].startswith(remedy)
