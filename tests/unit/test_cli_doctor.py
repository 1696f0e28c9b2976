"""``kvshm doctor``: its judgement of machines that this one is not."""

from __future__ import annotations

import configparser
import importlib.metadata
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshm.commands import doctor
from kvshm.commands.doctor import NEEDS, Finding, examine
from kvshm.shm.capacity import Room

MIB, GIB = 1 << 20, 1 << 30


def _found(what: str) -> Finding:
    [finding] = [finding for finding in examine() if finding.what == what]
    return finding


def test_the_packages_are_those_of_setup_cfg() -> None:
    config = configparser.ConfigParser()
    config.read(Path(__file__).parents[2] / "setup.cfg")
    assert dict(line.split(",")[0].split(">=") for line in config["options"]["install_requires"].split()) == NEEDS


@pytest.mark.parametrize(
    ("version", "state", "found"),
    [("1.25.9", "fail", "1.25.9, older than 1.26"), ("1.26.0rc1", "ok", "1.26.0rc1"), ("10.0", "ok", "10.0")],
)
def test_versions_are_compared_as_numbers(
    monkeypatch: pytest.MonkeyPatch, version: str, state: str, found: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    finding = _found("numpy")
    assert (finding.state, finding.found) == (state, found)


def test_a_package_that_is_not_there_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert _found("posix_ipc") == Finding("fail", "posix_ipc", "not installed", "pip install 'posix_ipc>=1.1'")
    optional = _found("pyzmq")
    assert optional.state == "ok"
    assert optional.remedy == "for kvshm serve: pip install 'kvshm[server]'"


@pytest.mark.parametrize(
    ("rooms", "states"),
    [
        ([Room("/dev/shm", 64 * MIB, 64 * MIB)], ["warn"]),  # a container's default
        ([Room("/dev/shm", 7 * GIB, 8 * GIB)], ["ok"]),
        ([Room("/dev/shm", MIB, 8 * GIB)], ["warn"]),
        ([Room("/dev/shm", 7 * GIB, 8 * GIB), Room("limit", 100 * MIB, 2 * GIB)], ["ok", "warn"]),
        ([Room("/dev/shm", 7 * GIB, 8 * GIB), Room("limit", 3 * GIB, 4 * GIB)], ["ok", "ok"]),
        ([Room("/dev/shm", 7 * GIB, 8 * GIB), Room("limit", 2**63, 2**63 - 4096)], ["ok"]),
        (
            [Room("/dev/shm", 7 * GIB, 8 * GIB), Room("limit", MIB, GIB), Room("limit", 9 * GIB, 9 * GIB)],
            ["ok", "warn"],
        ),
    ],
)
def test_little_room_is_a_warning(monkeypatch: pytest.MonkeyPatch, rooms: list[Room], states: list[str]) -> None:
    monkeypatch.setattr(doctor, "rooms_of", lambda fd: rooms)
    findings = [finding for finding in examine() if finding.what in ("room in /dev/shm", "limit")]
    assert [finding.state for finding in findings] == states
    assert all(finding.remedy for finding in findings if finding.state == "warn")


@pytest.mark.parametrize(("limit", "state"), [(64, "warn"), (1024, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_few_open_files_are_a_warning(monkeypatch: pytest.MonkeyPatch, limit: int, state: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, 4096))
    finding = _found("open files")
    assert finding.state == state
    assert ("ulimit -n 1024 (hard limit: 4096)" in finding.remedy) == (state == "warn")


@pytest.mark.parametrize(
    ("path", "kind"), [("/dev/shm", "tmpfs"), ("/dev/shm/x", "tmpfs"), ("/dev", "devtmpfs"), ("/shm", "overlay")]
)
def test_the_file_system_is_that_of_the_innermost_and_latest_mount(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str, kind: str
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "21 1 0:20 / / rw shared:1 - overlay overlay rw\n"
        "22 21 0:21 / /dev rw,nosuid shared:2 - devtmpfs udev rw\n"
        "23 22 8:1 / /dev/shm rw - ext4 /dev/sda1 rw\n"
        "24 22 0:23 / /dev/shm rw - tmpfs tmpfs rw\n"
    )
    monkeypatch.setattr(doctor, "open", lambda *_, **options: mounts.open(**options), raising=False)
    assert doctor._file_system(path) == kind


def test_no_shared_memory_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SHM_DIR", "/nonexistent/shm")
    finding = _found("/nonexistent/shm")
    assert (finding.state, finding.found) == ("fail", "does not exist")
    assert finding.remedy.startswith("mount -t tmpfs")


def test_a_directory_that_may_not_be_written_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    finding = _found("/dev/shm")
    assert finding.state == "fail"
    assert finding.found == f"uid {os.geteuid()} may not write to it"


def test_a_look_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[Finding]:
        """A thing to look at."""
        yield Finding("ok", "half of the thing", "there")
        raise OSError("no such luck")

    monkeypatch.setattr(doctor, "_LOOKS", (broken, *doctor._LOOKS))
    half, first, *others = examine()
    assert half.state == "ok"
    assert first == Finding("fail", "A thing to look at", "OSError: no such luck", "see the error")
    assert "sharing" in {finding.what for finding in others}
