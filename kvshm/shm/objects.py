"""Named objects of shared memory and the locks on them: create, open, unlink, list and sweep.

A name lives as long as a process that uses it: whoever maps an object holds a shared advisory lock on it, which the
kernel drops however that process ends. What a killed process leaves is removed by :func:`sweep`, which asks the lock
and never a process id. An object is made under the exclusive lock and finished by changing to the shared one, so that
nobody attaches to half of it. Maps nothing and remembers nothing; :mod:`kvshm.shm` does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import sys
from dataclasses import dataclass

import posix_ipc

from kvshm.shm.capacity import reserve as reserve_pages

__all__ = [
    "SHM_DIR",
    "SHM_NAME_PREFIX",
    "Key",
    "SegmentInfo",
    "create_object",
    "is_in_use",
    "is_posix_name",
    "key_of",
    "leads_to",
    "list_segments",
    "not_a_segment",
    "not_found_error",
    "object_path",
    "open_object",
    "permission_error",
    "posix_name",
    "sweep",
    "unlink_object",
]

SHM_DIR = "/dev/shm"  # where shm_open keeps names on Linux
SHM_NAME_PREFIX = "/kvshm_"

_RANDOM_BYTES = 11  # 22 digits and the prefix: 29 characters, within the 31 that some systems allow

_logger = logging.getLogger("kvshm")

Key = tuple[int, int]  # st_dev, st_ino: what an object is known by; a name may lead elsewhere tomorrow


def is_posix_name(name: str) -> bool:
    """Whether ``name`` is one POSIX component: a slash and 1 to 254 bytes without slash or NUL, not . or .. ."""
    component = name[1:]
    if name[:1] != "/" or component in (".", "..") or "/" in component or "\0" in component:
        return False
    try:
        return 1 <= len(component if component.isascii() else component.encode()) <= 254
    except UnicodeEncodeError:
        return False


def posix_name(name: str) -> str:
    """``name`` with its leading slash.

    Raises:
        TypeError, ValueError: It is no name for a segment.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a segment must be a string, not {name!r}")
    full = name if name.startswith("/") else f"/{name}"
    if not is_posix_name(full):
        raise ValueError(
            f"{name!r} cannot name a segment: after an optional leading slash, give 1 to 254 bytes without slash or "
            f"NUL, and not '.' or '..'"
        )
    return full


def object_path(name: str) -> str:
    return SHM_DIR + name


def key_of(status: os.stat_result) -> Key:
    return status.st_dev, status.st_ino


def _owner(name: str) -> str:
    with contextlib.suppress(OSError):
        status = os.lstat(object_path(name))
        return f"it belongs to uid {status.st_uid} gid {status.st_gid}, mode {stat.S_IMODE(status.st_mode):04o}"
    with contextlib.suppress(OSError):
        status = os.stat(SHM_DIR)
        return f"{SHM_DIR} belongs to uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}"
    return f"{SHM_DIR} cannot be looked at"


def permission_error(name: str) -> PermissionError:
    return PermissionError(
        errno.EACCES,
        f"not allowed to open segment {name!r}: {_owner(name)}; this process runs as uid {os.geteuid()} gid "
        f"{os.getegid()}. Run both under one user, or create it with a wider mode such as 0o660",
    )


def not_found_error(name: str) -> FileNotFoundError:
    return FileNotFoundError(
        errno.ENOENT,
        f"there is no segment {name!r}: its creator has unlinked it or exited; or this process sees another "
        f"{SHM_DIR} (containers must share it: docker run --ipc=..., one emptyDir for all on Kubernetes); or a "
        f"login manager removed it at logout (RemoveIPC= in logind.conf)",
    )


def open_object(name: str, *, readonly: bool = False) -> int:
    """Open an existing segment and return its descriptor. Never creates, never resizes.

    Raises:
        FileNotFoundError, PermissionError, OSError: As their text says.
    """
    try:
        # No size: posix_ipc would truncate the live segment to it.
        return int(posix_ipc.SharedMemory(name, flags=0, read_only=readonly).fd)
    except posix_ipc.ExistentialError:
        raise not_found_error(name) from None
    except posix_ipc.PermissionsError:
        raise permission_error(name) from None
    except (ValueError, OSError):
        if os.path.lexists(object_path(name)) and not os.path.isfile(object_path(name)):
            raise ValueError(not_a_segment(name)) from None
        raise


def not_a_segment(name: str) -> str:
    """What to say of a name that leads to a directory, a pipe or the like."""
    return f"{object_path(name)} is no segment of shared memory but another kind of file; take another name"


def leads_to(name: str, key: Key) -> bool:
    """Whether a name still leads to that object."""
    try:
        return key_of(os.lstat(object_path(name))) == key
    except OSError:
        return False


def unlink_object(name: str, key: Key | None) -> None:
    """Remove a name if it still leads to that object; gone already is as good."""
    if key is None or leads_to(name, key):
        with contextlib.suppress(OSError, posix_ipc.Error):
            posix_ipc.unlink_shared_memory(name)


def create_object(
    nbytes: int, name: str | None = None, mode: int = 0o600, *, reserve: bool = True
) -> tuple[int, str, Key]:
    """Create a segment of exactly ``nbytes`` bytes; returns its descriptor, holding the lock, its name and its key.

    On any error nothing is left. The caller closes the descriptor and unlinks the name.

    Raises:
        FileExistsError: The name is taken.
        ShmFullError: There is no room.
        ValueError, PermissionError, OSError: As their text says.
    """
    if nbytes < 1:
        raise ValueError(f"a segment needs at least 1 byte, not {nbytes}; arrays without elements need no segment")
    if nbytes > sys.maxsize or not 0 <= mode <= 0o7777:
        raise ValueError(f"nbytes {nbytes} must be at most {sys.maxsize}, and mode {mode:#o} within 0o7777")
    wanted = None if name is None else posix_name(name)
    while True:
        chosen = wanted or SHM_NAME_PREFIX + os.urandom(_RANDOM_BYTES).hex()
        try:
            fd = int(posix_ipc.SharedMemory(chosen, posix_ipc.O_CREX, mode=0o600).fd)
        except posix_ipc.ExistentialError:
            if not os.path.isdir(SHM_DIR):  # posix_ipc has one error for "is there" and "is not there"
                raise FileNotFoundError(errno.ENOENT, f"no shared memory here: {SHM_DIR} does not exist") from None
            if wanted is None:
                continue
            raise FileExistsError(
                errno.EEXIST,
                f"segment {chosen!r} exists already; choose another name or none for a random one, or attach to it",
            ) from None
        except posix_ipc.PermissionsError:
            raise permission_error(chosen) from None
        key = None
        try:
            status = os.fstat(fd)
            key = key_of(status)
            if _finish_object(fd, nbytes, mode, reserve):
                return fd, chosen, key
        except BaseException:
            # The key guards against a name that a sweeper freed and somebody else took.
            unlink_object(chosen, key)
            os.close(fd)
            raise
        os.close(fd)


def _finish_object(fd: int, nbytes: int, mode: int, reserve: bool) -> bool:
    """Lock, size and publish a new object; False if a sweeper took it for an orphan before it was locked."""
    fcntl.flock(fd, fcntl.LOCK_EX)
    if os.fstat(fd).st_nlink == 0:
        return False
    if reserve:
        reserve_pages(fd, nbytes, SHM_DIR)
    else:
        os.ftruncate(fd, nbytes)
    os.fchmod(fd, mode)  # whatever the umask
    # The kernel releases the old lock before it takes the new one, so a sweeper may come between.
    fcntl.flock(fd, fcntl.LOCK_SH)
    return os.fstat(fd).st_nlink > 0


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """A kvshm segment that exists: its name, its length, and whether a process uses it."""

    name: str
    nbytes: int
    in_use: bool


def _names() -> list[str]:
    prefix = SHM_NAME_PREFIX[1:]
    return [f"/{entry}" for entry in sorted(os.listdir(SHM_DIR)) if entry.startswith(prefix)]


def _lock_if_unused(name: str) -> int | None:
    """A descriptor that holds the exclusive lock on a segment that nobody uses; None if somebody may."""
    try:
        # Read-only, so that a special file in the way cannot be confused by us; O_NONBLOCK, so that a pipe cannot
        # hold us up.
        fd = os.open(object_path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
    except OSError:  # in use
        pass
    os.close(fd)
    return None


def is_in_use(name: str) -> bool:
    """Whether a process uses the segment of this name, or may; a name that leads nowhere is in nobody's use.

    Raises:
        ValueError: It is no name for a segment.
    """
    full = posix_name(name)
    fd = _lock_if_unused(full)
    if fd is None:
        return os.path.lexists(object_path(full))
    os.close(fd)
    return False


def list_segments() -> list[SegmentInfo]:
    """The kvshm segments that exist, by name. One that may not be looked into counts as in use."""
    found = []
    for name in _names():
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(object_path(name))
            fd = _lock_if_unused(name)
            if fd is not None:
                os.close(fd)
            found.append(SegmentInfo(name, status.st_size, in_use=fd is None))
    return found


def sweep() -> list[str]:
    """Unlink the kvshm segments that no process uses any more, and return their names."""
    removed = []
    for name in _names():
        fd = _lock_if_unused(name)
        if fd is None:
            continue
        try:
            status = os.fstat(fd)
            # Locked, it cannot come into use; but the name may have gone, or lead to a younger segment.
            if status.st_nlink and key_of(os.lstat(object_path(name))) == key_of(status):
                posix_ipc.unlink_shared_memory(name)
                removed.append(name)
                _logger.info("removed segment %s of %d bytes, which no process used", name, status.st_size)
        except (OSError, posix_ipc.Error):
            # Another sweeper was first, or the segment is another user's.
            continue
        finally:
            os.close(fd)
    return removed
