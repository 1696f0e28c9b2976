"""Names, locks, listing and sweeping, by hand."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator

import pytest

from kvshm.shm import objects
from kvshm.shm.objects import create_object, is_in_use, is_posix_name, list_segments, open_object, posix_name, sweep
from tests.support.memory import exists


@contextlib.contextmanager
def opened(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.mark.parametrize("name", ["/a", "/" + "n" * 254, "/with space", "/ключ", "/.hidden", "/..."])
def test_posix_names(name: str) -> None:
    assert is_posix_name(name)
    assert posix_name(name) == posix_name(name[1:]) == name


@pytest.mark.parametrize(
    "name",
    ["", "/", "a/b", "/a/b", "//a", "/.", "/..", ".", "..", "/a\0", "/" + "n" * 255, "/" + "ключ" * 32, "/\udc80"],
)
def test_no_posix_names(name: str) -> None:
    assert not is_posix_name(name)
    with pytest.raises(ValueError, match="cannot name a segment"):
        posix_name(name)


def test_names_need_their_slash_on_the_wire() -> None:
    assert not is_posix_name("kvshm_a")


def test_random_names_are_short_prefixed_and_distinct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    names = []
    for _ in range(50):
        fd, name, key = create_object(1)
        os.close(fd)
        objects.unlink_object(name, key)
        names.append(name)
    assert len(set(names)) == 50
    for name in names:
        assert name.startswith(objects.SHM_NAME_PREFIX)
        assert len(name) <= 30
        assert len(name) - len(objects.SHM_NAME_PREFIX) >= 16  # 64 random bits


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_mode_is_exact_whatever_the_umask(segment_name: str, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        fd, name, key = create_object(7, segment_name, mode)
    finally:
        os.umask(before)
    with opened(fd):
        assert stat.S_IMODE(os.fstat(fd).st_mode) == mode
        objects.unlink_object(name, key)


def test_every_page_is_reserved(segment_name: str) -> None:
    fd, name, key = create_object(3 * 4096 + 5, segment_name)
    with opened(fd):
        status = os.fstat(fd)
        assert status.st_size == 3 * 4096 + 5
        assert status.st_blocks * 512 >= status.st_size
        objects.unlink_object(name, key)


def test_without_reservation_no_page_is(segment_name: str) -> None:
    fd, name, key = create_object(1 << 40, segment_name, reserve=False)
    with opened(fd):
        assert os.fstat(fd).st_blocks == 0
        objects.unlink_object(name, key)


def test_creation_is_exclusive(segment_name: str) -> None:
    fd, name, key = create_object(7, segment_name)
    with opened(fd):
        with pytest.raises(FileExistsError, match=f"segment '{segment_name}' exists already; choose another name"):
            create_object(7, segment_name)
        assert os.fstat(fd).st_size == 7
        objects.unlink_object(name, key)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_segment_has_bytes(nbytes: int, segment_name: str) -> None:
    with pytest.raises(ValueError, match=f"at least 1 byte, not {nbytes}"):
        create_object(nbytes, segment_name)


def test_opening_what_is_not_there_explains_itself_and_creates_nothing(segment_name: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"containers must share it.*RemoveIPC"):
        open_object(segment_name)
    assert not exists(segment_name)


def test_what_is_locked_is_in_use_and_not_swept(segment_name: str) -> None:
    fd, name, key = create_object(11, segment_name)
    with opened(fd):
        assert objects.SegmentInfo(name, 11, in_use=True) in list_segments()
        assert is_in_use(name)
        assert is_in_use(name[1:])
        assert name not in sweep()
        assert exists(name)
    assert objects.SegmentInfo(name, 11, in_use=True) not in list_segments()
    assert not is_in_use(name)
    sweep()
    assert not exists(name)
    objects.unlink_object(name, key)  # gone already is as good


def test_an_empty_leftover_is_swept(segment_name: str) -> None:
    os.close(os.open(f"/dev/shm{segment_name}", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    sweep()
    assert not exists(segment_name)


def test_other_names_are_never_swept() -> None:
    name = f"/lmcache_kv_{os.urandom(6).hex()}"
    fd, _, key = create_object(5, name)
    os.close(fd)  # unlocked, as such segments are
    assert name not in sweep()
    assert name not in {segment.name for segment in list_segments()}
    assert exists(name)
    objects.unlink_object(name, key)


def test_only_regular_files_are_looked_at(segment_name: str) -> None:
    os.mkfifo(f"/dev/shm{segment_name}")
    try:
        assert segment_name not in sweep()
        assert {segment.in_use for segment in list_segments() if segment.name == segment_name} == {True}
    finally:
        os.unlink(f"/dev/shm{segment_name}")


def test_a_name_that_leads_elsewhere_by_now_is_not_unlinked(segment_name: str) -> None:
    fd, name, key = create_object(5, segment_name)
    with opened(fd):
        os.unlink(f"/dev/shm{name}")
        other, _, other_key = create_object(5, segment_name)
        with opened(other):
            objects.unlink_object(name, key)
            assert exists(name)
            objects.unlink_object(name, other_key)
            assert not exists(name)


def test_a_sweeper_that_comes_before_the_lock_makes_the_creator_start_again(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    swept: list[str] = []

    def sweep_first(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and not swept:
            swept.extend(sweep())
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    fd, name, key = create_object(5, segment_name)
    with opened(fd):
        assert segment_name in swept
        assert os.fstat(fd).st_nlink == 1
        assert os.stat(f"/dev/shm{name}").st_ino == key[1]
        objects.unlink_object(name, key)


def test_a_sweeper_that_comes_between_the_locks_makes_the_creator_start_again(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    swept: list[str] = []

    def sweep_between(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_SH and not swept:
            flock(fd, fcntl.LOCK_UN)
            swept.extend(sweep())
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_between)
    fd, name, key = create_object(5, segment_name)
    with opened(fd):
        assert segment_name in swept
        assert os.fstat(fd).st_nlink == 1
        objects.unlink_object(name, key)


def test_a_sweeper_spares_a_younger_segment_of_the_same_name(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.close(create_object(5, segment_name)[0])
    young = []
    lock_if_unused = objects._lock_if_unused

    def replace_after_locking(name: str) -> int | None:
        fd = lock_if_unused(name)
        if name == segment_name:
            os.unlink(f"/dev/shm{name}")
            young.append(create_object(7, name))
        return fd

    monkeypatch.setattr(objects, "_lock_if_unused", replace_after_locking)
    assert segment_name not in sweep()
    [(fd, name, key)] = young
    with opened(fd):
        assert os.fstat(fd).st_nlink == 1
        objects.unlink_object(name, key)


def test_permission_errors_name_the_owner(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import posix_ipc

    fd, name, key = create_object(5, segment_name, 0o640)

    def refuse(*_: object, **__: object) -> None:
        raise posix_ipc.PermissionsError("No permission to open this segment")

    with opened(fd):
        monkeypatch.setattr(posix_ipc, "SharedMemory", refuse)
        with pytest.raises(
            PermissionError,
            match=rf"'{name}'.*belongs to uid {os.getuid()} gid {os.getgid()}, mode 0640.*runs as uid {os.geteuid()}",
        ):
            open_object(name)
        objects.unlink_object(name, key)
    with pytest.raises(PermissionError, match="/dev/shm belongs to uid 0, mode 1777"):
        create_object(5, segment_name)
