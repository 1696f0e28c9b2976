"""What tests look at from outside: the process's map, its descriptors, the names in /dev/shm."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import kvshm
from kvshm.shm import mappings

PAGE = mmap.PAGESIZE


def num_mappings(name: str, pid: int | str = "self") -> int:
    """How many mappings of the segment ``name`` a process has, unlinked ones included."""
    return sum(f"/dev/shm{name}" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


def num_descriptors() -> int:
    """How many file descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


def exists(name: str) -> bool:
    """Whether a segment has this name."""
    return os.path.lexists(f"/dev/shm{name}")


def sweep_until_gone(name: str) -> None:
    """Sweep until a dead process's segment has gone: the kernel lets go of its lock a moment after its death."""
    deadline = time.monotonic() + 30
    while exists(name):
        kvshm.sweep()
        assert time.monotonic() < deadline, f"segment {name} is never swept"
        time.sleep(0.005)


def created() -> set[str]:
    """The names of the segments that this process has created and not unlinked."""
    return set(mappings._table.owned.values())


def fill(array: np.ndarray[Any, Any], seed: int = 0) -> bytes:
    """Fill an array's memory with bytes that differ from place to place, and give them."""
    pattern = ((np.arange(array.nbytes, dtype=np.int64) * 2654435761 + seed * 40503) >> 7).astype(np.uint8)
    array.reshape(-1).view(np.uint8)[:] = pattern
    return pattern.tobytes()


def private_pages(num_pages: int, fill_byte: int = 0) -> np.ndarray[Any, Any]:
    """A uint8 array over fresh private pages that an mmap object owns."""
    flat = np.frombuffer(mmap.mmap(-1, num_pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
    flat[:] = fill_byte
    return flat
