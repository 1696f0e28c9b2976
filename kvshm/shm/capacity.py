"""Room for shared memory: how much there is, and reserving it so that it cannot be missing later.

tmpfs lets a file be sized beyond what it can back and answers the write that finds no page with SIGBUS. So every page
is reserved at creation, where its absence is an error with numbers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from kvshm.shm.pages import round_to_pages

__all__ = ["Room", "ShmFullError", "reserve", "rooms_of"]

# A signal makes the kernel undo the reservation under way, so a step must be short against any interval timer:
# at 4 GiB/s these 256 KiB take 60 microseconds.
_STEP = 256 << 10
_LARGE = 16 << 20  # looking for limits takes longer than reserving less than this
_TURN_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Room:
    """How many bytes of how many are free in one of the places that shared memory must fit into."""

    place: str
    free: int
    total: int


class ShmFullError(OSError):
    """There is no room for a segment. Nothing was left behind.

    Attributes:
        requested, free, total: Bytes; free and total are those of /dev/shm.
    """

    def __init__(self, requested: int, rooms: list[Room]) -> None:
        shm, scarcest = rooms[0], min(rooms, key=lambda room: room.free)
        also = (
            ""
            if scarcest is shm
            else f"; {scarcest.place} leaves {scarcest.free} bytes of {scarcest.total}, beyond which the kernel kills"
        )
        super().__init__(
            errno.ENOSPC,
            f"no room in shared memory for {requested} bytes: {shm.free} bytes are free of {shm.total} in "
            f"{shm.place}{also}. Ask for less, remove what dead processes left (kvshm.sweep()), or raise the limit: "
            f"docker run --shm-size=...; on Kubernetes mount an emptyDir with medium: Memory and a sizeLimit at "
            f"/dev/shm within the pod's memory limit; on a host mount -o remount,size=... /dev/shm",
        )
        self.requested = requested
        self.free = shm.free
        self.total = shm.total


def _read_numbers(path: str) -> dict[str, int]:
    """``name number`` lines of a file as a dict; a bare number has the name ""; absent or "max" is left out."""
    numbers = {}
    try:
        with open(path, encoding="ascii") as lines:
            for line in lines:
                *name, value = line.removesuffix("kB\n").split() or [""]
                if value.isdigit():
                    numbers["".join(name).rstrip(":")] = int(value)
    except (OSError, UnicodeDecodeError):
        return {}
    return numbers


def _machine_rooms(proc: str = "/proc") -> Iterator[Room]:
    """What the machine's memory can still back, swap included."""
    numbers = _read_numbers(f"{proc}/meminfo")
    if "MemAvailable" in numbers:
        free = numbers["MemAvailable"] + numbers.get("SwapFree", 0)
        total = numbers.get("MemTotal", 0) + numbers.get("SwapTotal", 0)
        yield Room("the machine's memory", free << 10, total << 10)


def _cgroup_rooms(proc: str = "/proc", root: str = "/sys/fs/cgroup") -> Iterator[Room]:
    """What the memory limits above this process leave, from its own control group up to the root.

    Beyond such a limit the kernel kills instead of refusing. Caches that the kernel would drop first count as
    free.
    """
    swap_free = _read_numbers(f"{proc}/meminfo").get("SwapFree", 0) << 10
    groups: list[tuple[str, bool]] = []
    with contextlib.suppress(OSError), open(f"{proc}/self/cgroup", encoding="utf-8") as lines:
        for line in lines:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if not controllers:
                groups.append((path, False))
            elif "memory" in controllers.split(","):
                groups.append((path, True))
    for group, is_v1 in groups:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_v1 else ("memory.max", "memory.current")
        base = f"{root}/memory" if is_v1 else root
        path = group.rstrip("/")
        while True:
            folder = base + path
            limit = _read_numbers(f"{folder}/{names[0]}").get("")
            used = _read_numbers(f"{folder}/{names[1]}").get("")
            if limit is not None and used is not None:
                stat = _read_numbers(f"{folder}/memory.stat")
                pages = ("total_cache", "total_shmem") if is_v1 else ("file", "shmem")
                dropped = max(stat.get(pages[0], 0) - stat.get(pages[1], 0), 0) + stat.get("slab_reclaimable", 0)
                swap_limit = _read_numbers(f"{folder}/memory.swap.max").get("")
                swap_used = _read_numbers(f"{folder}/memory.swap.current").get("", 0)
                swap = swap_free if swap_limit is None else min(swap_free, max(swap_limit - swap_used, 0))
                yield Room("the memory limit of a control group", max(limit - used + dropped, 0) + swap, limit)
            if not path:
                break
            path = path.rpartition("/")[0]


def rooms_of(fd: int) -> list[Room]:
    """The places that an open file's pages must fit into, its file system first."""
    stat = os.fstatvfs(fd)
    limits = [*_machine_rooms(), *_cgroup_rooms()]
    if stat.f_blocks:
        return [Room("/dev/shm", stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize), *limits]
    # Mounted without a limit of its own: the first of the others speaks for it.
    return limits or [Room("/dev/shm", sys.maxsize, sys.maxsize)]


def _try_reserve(fd: int, nbytes: int) -> bool:
    """Reserve the file's first ``nbytes`` bytes, or leave it empty and return False."""
    if nbytes >= _LARGE and round_to_pages(nbytes) > min(room.free for room in rooms_of(fd)):
        return False
    try:
        for start in range(0, nbytes, _STEP):
            os.posix_fallocate(fd, start, min(_STEP, nbytes - start))
    except OSError as error:
        os.ftruncate(fd, 0)
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            return False
        raise
    return True


@contextlib.contextmanager
def _turn(folder: str) -> Iterator[None]:
    """Wait, for a while, until no other process is in here. The lock goes with its holder, however that ends."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _TURN_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.005)
        yield
    finally:
        os.close(fd)


def reserve(fd: int, nbytes: int, folder: str) -> None:
    """Give an empty file ``nbytes`` bytes, every page of them reserved.

    The reservation is the check: no look at the free space beforehand can hold until it is used. Two processes
    that together want too much may meet half-way and both fail, so whoever fails frees everything and tries
    once more when it alone does (a lock on ``folder``): then one of them gets what it asked for.

    Raises:
        ShmFullError: There is no room; the file is empty again.
        OSError: Anything else the kernel refuses; the file is empty again.
    """
    if _try_reserve(fd, nbytes):
        return
    with _turn(folder):
        if _try_reserve(fd, nbytes):
            return
        rooms = rooms_of(fd)
    raise ShmFullError(nbytes, rooms)
