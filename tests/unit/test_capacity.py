"""How much room there is, read from made-up files, and reserving it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshm.shm import capacity
from kvshm.shm.capacity import Room, ShmFullError, reserve, rooms_of

GIB = 1 << 30
GROUP = "/pods/pod7"


@pytest.fixture
def fd() -> Iterator[int]:
    opened = os.memfd_create("kvshm-test")
    yield opened
    os.close(opened)


def write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def test_the_error_has_the_numbers_and_the_remedies() -> None:
    error = ShmFullError(70, [Room("/dev/shm", 50, 64)])
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOSPC
    assert (error.requested, error.free, error.total) == (70, 50, 64)
    for part in ("70 bytes", "50 bytes are free of 64 in /dev/shm", "--shm-size", "Kubernetes", "medium: Memory"):
        assert part in str(error)
    assert "kills" not in str(error)


def test_the_error_names_a_scarcer_place() -> None:
    error = ShmFullError(70, [Room("/dev/shm", 90, 100), Room("the machine's memory", 11, 200)])
    assert (error.free, error.total) == (90, 100)
    assert "90 bytes are free of 100 in /dev/shm; the machine's memory leaves 11 bytes of 200" in str(error)


def test_the_machine(tmp_path: Path) -> None:
    proc = write(
        tmp_path,
        {"meminfo": "MemTotal: 100 kB\nMemAvailable: 40 kB\nSwapTotal: 7 kB\nSwapFree: 3 kB\nHugePages_Free: 5\n"},
    )
    assert list(capacity._machine_rooms(proc)) == [Room("the machine's memory", 43 << 10, 107 << 10)]
    assert list(capacity._machine_rooms(str(tmp_path / "absent"))) == []


def test_control_groups_of_version_2_up_to_the_root(tmp_path: Path) -> None:
    proc = write(tmp_path / "proc", {"meminfo": "SwapFree: 0 kB\n", "self/cgroup": f"1:cpu:/elsewhere\n0::{GROUP}\n"})
    root = write(
        tmp_path / "cgroup",
        {
            "pods/pod7/memory.max": "max\n",
            "pods/pod7/memory.current": "5\n",
            "pods/memory.max": "1000\n",
            "pods/memory.current": "900\n",
            "pods/memory.stat": "anon 1\nfile 300\nshmem 60\nslab_reclaimable 7\n",
        },
    )
    assert list(capacity._cgroup_rooms(proc, root)) == [Room("the memory limit of a control group", 347, 1000)]


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    proc = write(
        tmp_path / "proc", {"meminfo": "SwapFree: 2 kB\n", "self/cgroup": f"4:cpu,memory:{GROUP}\n3:cpuset:/\n"}
    )
    root = write(
        tmp_path / "cgroup",
        {
            "memory/pods/pod7/memory.limit_in_bytes": "1000\n",
            "memory/pods/pod7/memory.usage_in_bytes": "1200\n",
            "memory/memory.limit_in_bytes": "5000\n",
            "memory/memory.usage_in_bytes": "1000\n",
            "memory/memory.stat": "cache 1\ntotal_cache 100\ntotal_shmem 40\n",
        },
    )
    rooms = list(capacity._cgroup_rooms(proc, root))
    assert [(room.free, room.total) for room in rooms] == [(2048, 1000), (4000 + 60 + 2048, 5000)]


def test_no_control_groups(tmp_path: Path) -> None:
    assert list(capacity._cgroup_rooms(str(tmp_path), str(tmp_path))) == []


def test_the_file_system_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.open("/dev/shm", os.O_RDONLY)
    try:
        monkeypatch.setattr(capacity, "_machine_rooms", lambda: iter([Room("machine", 1, 2)]))
        monkeypatch.setattr(capacity, "_cgroup_rooms", lambda: iter([Room("group", 3, 4)]))
        status = os.fstatvfs(fd)
        assert rooms_of(fd) == [
            Room("/dev/shm", status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize),
            Room("machine", 1, 2),
            Room("group", 3, 4),
        ]
    finally:
        os.close(fd)


def test_a_scarcer_limit_refuses_before_a_page_is_taken(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "rooms_of", lambda _: [Room("/dev/shm", GIB, GIB), Room("group", 3 << 20, GIB)])
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("a page was taken"))
    with pytest.raises(ShmFullError, match=f"group leaves {3 << 20} bytes of {GIB}"):
        reserve(fd, 64 << 20, "/dev/shm")
    assert os.fstat(fd).st_size == 0


def test_exactly_what_is_free_is_not_refused(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = 16 << 20
    monkeypatch.setattr(capacity, "rooms_of", lambda _: [Room("/dev/shm", nbytes, GIB)])
    reserve(fd, nbytes, "/dev/shm")
    assert os.fstat(fd).st_blocks * 512 == nbytes
    with pytest.raises(ShmFullError, match=f"for {nbytes + 1} bytes: {nbytes} bytes are free of {GIB}"):
        reserve(fd, nbytes + 1, "/dev/shm")


def test_steps_are_short_and_cover_the_length(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda _, start, length: steps.append((start, length)))
    reserve(fd, 1_000_003, "/dev/shm")
    assert max(length for _, length in steps) <= 256 << 10
    assert [start for start, _ in steps] == [sum(length for _, length in steps[:index]) for index in range(len(steps))]
    assert sum(length for _, length in steps) == 1_000_003


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM, errno.EFBIG])
def test_no_room_half_way_gives_back_and_tries_once_more(fd: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fallocate, num_calls = os.posix_fallocate, 0

    def fail_at_third(fd: int, start: int, length: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 3 == 0:
            raise OSError(code, os.strerror(code))
        fallocate(fd, start, length)

    monkeypatch.setattr(os, "posix_fallocate", fail_at_third)
    with pytest.raises(ShmFullError, match="for 1000003 bytes"):
        reserve(fd, 1_000_003, "/dev/shm")
    assert num_calls == 6
    assert os.fstat(fd).st_size == os.fstat(fd).st_blocks == 0


def test_other_errors_are_told_as_they_are(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="broken"):
        reserve(fd, 1, "/dev/shm")
    assert os.fstat(fd).st_size == 0
