"""The pool: one segment that holds all chunk objects, reserved in the background while the server already serves.

Reserving takes about a quarter of a second per GiB, so it does not stand between start and readiness. Whoever is about
to write into a part asks for that part first and waits for no other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import Any

import numpy as np

from kvshm.shm import SHM_NAME_PREFIX, Segment, pages, sweep
from kvshm.shm.capacity import ShmFullError, rooms_of
from kvshm.shm.objects import SHM_DIR, open_object, posix_name

__all__ = ["PoolMemory"]

_STEP = 4 << 20  # bytes reserved between two looks at the stop flag
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it

_logger = logging.getLogger("kvshm")


class PoolMemory:
    """A segment of ``nbytes`` bytes. Leaves nothing behind once closed.

    Args:
        name: The name that engine-driven clients attach. It begins with ``SHM_NAME_PREFIX``, so that what a killed
            server left is swept and its successor may have the name again.

    Raises:
        ShmFullError: The shared memory has no room for it now.
        ValueError: Another kind of name.
    """

    def __init__(self, nbytes: int, name: str | None = None) -> None:
        if name is not None and not posix_name(name).startswith(SHM_NAME_PREFIX):
            raise ValueError(
                f"the pool's name {name!r} must begin with {SHM_NAME_PREFIX[1:]!r}, or what a killed server left could "
                f"not be distinguished from other programs' segments and would stay"
            )
        sweep()  # a killed server's pool is in the way of its successor's
        _check_room(nbytes)
        self._segment = Segment.create(nbytes, name, reserve=False)
        try:
            self._fd = open_object(self._segment.name)
        except BaseException:
            self._segment.unlink()
            raise
        self.bytes: np.ndarray[Any, Any] = self._segment.array((nbytes,), "uint8")
        self.reserved_nbytes = 0  # all before this is reserved; parts behind it may be too
        self.error: str | None = None

    @property
    def name(self) -> str:
        """The segment's name, with its slash."""
        return self._segment.name

    @property
    def nbytes(self) -> int:
        """The segment's length."""
        return self._segment.nbytes

    def ensure(self, offset: int, nbytes: int) -> None:
        """Reserve a part that is about to be written. Any thread may call it.

        Raises:
            OSError: The shared memory is full.
        """
        end = min(offset + nbytes, self.nbytes)
        if end <= self.reserved_nbytes:
            return
        os.posix_fallocate(self._fd, offset, end - offset)

    def reserve_all(self, stop: threading.Event) -> None:
        """Reserve and touch the whole pool step by step, until done or stopped."""
        while self.reserved_nbytes < self.nbytes and not stop.is_set():
            start = self.reserved_nbytes
            step = min(_STEP, self.nbytes - start)
            try:
                os.posix_fallocate(self._fd, start, step)
            except OSError as error:
                self.error = f"only {start} of {self.nbytes} bytes could be reserved: {error}"
                _logger.error("kvshm pool %s: %s", self.name, self.error)
                return
            # Touching spares the first copies a page fault for every 4 KiB. Old kernels cannot; then they have them.
            with contextlib.suppress(OSError):
                pages.advise(self._segment.address + start, step, _MADV_POPULATE_WRITE)
            self.reserved_nbytes = start + step

    def close(self) -> None:
        """Remove the name. The memory goes with the last mapping of it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._segment.unlink()


def _check_room(nbytes: int) -> None:
    fd = os.open(SHM_DIR, os.O_RDONLY | os.O_DIRECTORY)
    try:
        rooms = rooms_of(fd)
    finally:
        os.close(fd)
    if min(room.free for room in rooms) < nbytes:
        raise ShmFullError(nbytes, rooms)
