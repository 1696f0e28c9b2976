"""Whether a process lives, shown by a lock.

A process that others must not mistake for dead makes a liveness segment: an object of one byte whose shared lock it
holds. The kernel drops the lock with the process, however that ends, and only then; a process that is stopped keeps it.
A probe opens the object once and asks for the lock from then on, whatever becomes of the name: one that is gone (a
login manager removes a user's names at logout) proves nothing.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from collections.abc import Callable

from kvshm.shm.mappings import create_owned, unlink_owned
from kvshm.shm.objects import leads_to, not_a_segment, not_found_error, object_path, permission_error, posix_name

__all__ = ["Liveness", "LivenessProbe"]


class Liveness:
    """The liveness segment of this process. Its lock is held until :meth:`close`, or until this object is dropped.

    A forked child that inherited it holds the lock too.

    Raises:
        ShmFullError, OSError: There is no room for it.
    """

    __slots__ = ("_segments",)

    def __init__(self) -> None:
        self._segments: list[tuple[int, str, tuple[int, int]]] = []
        self._segments.append(create_owned(1))

    @property
    def name(self) -> str:
        """Where a probe finds it. If the name was removed, another segment is made beside the first.

        Raises:
            ShmFullError, OSError: There is no room for another.
            ValueError: It is closed.
        """
        if not self._segments:
            raise ValueError("the liveness segment is closed")
        _, name, key = self._segments[-1]
        if not leads_to(name, key):
            self._segments.append(create_owned(1))
        return self._segments[-1][1]

    def close(self) -> None:
        """Say that this process is done: the lock and the name go. Idempotent."""
        while self._segments:
            fd, _, key = self._segments.pop()
            unlink_owned(key)
            os.close(fd)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # then the kernel closes
            self.close()


class LivenessProbe:
    """Asks whether a process still holds a liveness segment. Holds no lock itself.

    Raises:
        FileNotFoundError, PermissionError, OSError: The segment cannot be opened.
        ValueError: The name is invalid, or leads to something else.
    """

    __slots__ = ("_fd",)

    def __init__(self, name: str) -> None:
        self._fd = -1
        full = posix_name(name)
        try:
            self._fd = os.open(object_path(full), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise not_found_error(full) from None
        except PermissionError:
            raise permission_error(full) from None
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            self.close()
            raise ValueError(not_a_segment(full))

    def is_free(self) -> bool:
        """Whether no process holds the segment any more."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        # Nobody is left who could hold it; and this open file is nobody else's.
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        """Close the descriptor, as dropping the probe does; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # then the kernel closes
            self.close()
