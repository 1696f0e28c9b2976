"""Shared memory by address: four primitives for callers that keep their own books.

Each call maps anew, so that unmapping takes nothing from anybody else, and nothing is unlinked that
:func:`shm_unlink` is not asked to. The pages do not know who looks at them: an address must not be used after
:func:`shm_munmap`. Everybody else wants :class:`kvshm.Segment`.
"""

from __future__ import annotations

import fcntl
import os

import posix_ipc

from kvshm.shm import pages
from kvshm.shm.objects import create_object, open_object, posix_name, unlink_object

__all__ = ["shm_create_readwrite", "shm_map_readwrite", "shm_munmap", "shm_unlink"]

_lengths: dict[int, int] = {}  # by address: what these functions mapped and may unmap


def _map(fd: int, nbytes: int) -> int:
    address = pages.map_shared(fd, nbytes)
    _lengths[address] = nbytes
    return address


def shm_create_readwrite(name: str, nbytes: int) -> int:
    """Create a segment, its pages reserved, map it, and give the address.

    Raises:
        FileExistsError: The name is taken.
        ShmFullError, PermissionError, OSError, ValueError: As their text says. Nothing is left of the attempt.
    """
    fd, full_name, key = create_object(nbytes, posix_name(name))
    try:
        return _map(fd, nbytes)
    except BaseException:
        unlink_object(full_name, key)
        raise
    finally:
        os.close(fd)


def shm_map_readwrite(name: str, nbytes: int) -> int:
    """Map the first ``nbytes`` bytes of an existing segment and give the address.

    Raises:
        FileNotFoundError, PermissionError, OSError: As their text says.
        ValueError: The segment is smaller.
    """
    if nbytes < 1:
        raise ValueError(f"nbytes must be at least 1, not {nbytes}")
    fd = open_object(posix_name(name))
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        actual = os.fstat(fd).st_size
        if nbytes > actual:
            raise ValueError(f"segment {name!r} has {actual} bytes but {nbytes} were to be mapped")
        return _map(fd, nbytes)
    finally:
        os.close(fd)


def shm_munmap(addr: int, nbytes: int = 0) -> None:
    """Unmap what one of the functions above mapped at ``addr``, all of it; anything else is left alone.

    Args:
        nbytes: Its length, if the caller cares to say; 0 means whatever was mapped.

    Raises:
        ValueError: ``nbytes`` is not the length that was mapped; nothing was unmapped.
    """
    length = _lengths.get(addr, 0)
    if nbytes not in (0, length) and length:
        raise ValueError(f"{length} bytes are mapped at {addr:#x}, not {nbytes}; give that number, or 0 for all")
    # Forgotten first: once unmapped, the address may be another mapping's before this thread goes on. Of two threads
    # that unmap the same one finds it.
    if _lengths.pop(addr, None) is not None:
        pages.unmap(addr, length)


def shm_unlink(name: str) -> None:
    """Remove a name; nothing happens if it has gone already.

    Raises:
        PermissionError: It is another user's.
    """
    try:
        posix_ipc.unlink_shared_memory(posix_name(name))
    except posix_ipc.ExistentialError:
        return
    except posix_ipc.PermissionsError:
        raise PermissionError(f"not allowed to unlink segment {name!r}") from None
