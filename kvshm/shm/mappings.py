"""What this process has mapped and created: the one table of it, and the lifetimes.

A mapping lives as long as its arrays: every array made from a segment keeps the process's one :class:`Mapping` of it
alive through its base chain, and there is no way to close memory under a reader. The process that created a segment
unlinks its name when its last array or handle goes, and when it exits; a forked child inherits nothing to clean up.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import stat
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvshm.shm import pages
from kvshm.shm.capacity import ShmFullError
from kvshm.shm.objects import (
    SHM_DIR,
    Key,
    create_object,
    key_of,
    not_a_segment,
    open_object,
    sweep,
    unlink_object,
)

__all__ = [
    "HUGE_PAGE_SIZE",
    "READY_TIMEOUT_S",
    "Mapping",
    "attach_mapping",
    "create_mapping",
    "create_owned",
    "current_process",
    "end_lending",
    "lend",
    "mapping_at",
    "table_lock",
    "unlink_owned",
]

READY_TIMEOUT_S = 1.0
HUGE_PAGE_SIZE = pages.huge_page_size()


class Mapping:
    """The pages of one segment in this process. Arrays hold it; nobody closes it.

    NumPy takes ``__array_interface__`` and makes this object the base of the array, so the pages go when the last
    array and the last handle have gone, and never before.
    """

    __slots__ = ("__array_interface__", "__weakref__", "address", "key", "name", "nbytes", "owner", "readonly")

    def __init__(
        self, name: str, key: Key, *, address: int, nbytes: int, readonly: bool = False, owner: object = None
    ) -> None:
        self.name = name
        self.key = key
        self.address = address
        self.nbytes = nbytes
        self.readonly = readonly
        self.owner = owner  # of the memory, where that is not this object: it lives as long as the arrays here
        self.__array_interface__ = {"data": (address, readonly), "shape": (nbytes,), "typestr": "|u1", "version": 3}

    def bytes(self) -> np.ndarray[Any, Any]:
        """All bytes as a one-dimensional uint8 array, the base of every other array."""
        return np.asarray(self)


class _Table:
    """What this process has mapped and created. There is one, and no other state.

    The lock is held while a segment is looked up and mapped. It is re-entrant because the collector may run any
    code in between. Mappings that die leave a note in ``buried`` instead of taking it: they may die anywhere.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pid = os.getpid()
        self.process = object()  # stands for this process: a forked child has another
        # As a rule one for each segment; a read-only one and one of a segment that grew are others.
        self.mappings: dict[Key, tuple[weakref.ref[Mapping], ...]] = {}
        self.buried: deque[tuple[Key, weakref.ref[Mapping]]] = deque()
        self.lenders: dict[Key, Callable[[], Mapping | None]] = {}
        self.owned: dict[Key, str] = {}
        self.swept = False
        self.has_finalizer = False
        self.is_finalizing = sys.is_finalizing

    def after_fork_in_child(self) -> None:
        """The child keeps its copies of the mappings but owns no name, and its lock is free."""
        self.lock = threading.RLock()
        self.pid = os.getpid()
        self.process = object()
        self.owned = {}
        self.swept = False
        self.has_finalizer = False

    def find(self, key: Key, nbytes: int, readonly: bool) -> Mapping | None:
        """A live mapping of at least ``nbytes`` of a segment, if there is one. Call with the lock held."""
        lender = None if readonly else self.lenders.get(key)
        lent = None if lender is None else lender()
        if lent is not None:
            return lent
        for reference in self.mappings.get(key, ()):
            mapping = reference()
            if mapping is not None and mapping.readonly == readonly and mapping.nbytes >= nbytes:
                return mapping
        return None

    def at(self, start: int, end: int) -> Mapping | None:
        """A live mapping that has all these addresses."""
        for references in list(self.mappings.values()):
            for reference in references:
                mapping = reference()
                if mapping is not None and mapping.address <= start and end <= mapping.address + mapping.nbytes:
                    return mapping
        return None

    def is_mapped(self, key: Key) -> bool:
        """Whether something here still looks at the segment."""
        return key in self.lenders or any(reference() is not None for reference in self.mappings.get(key, ()))

    def enter(self, key: Key, reference: weakref.ref[Mapping]) -> None:
        """Remember a mapping. Call with the lock held."""
        while self.buried:
            dead_key, dead = self.buried.popleft()
            rest = tuple(other for other in self.mappings.get(dead_key, ()) if other is not dead)
            if rest:
                self.mappings[dead_key] = rest
            else:
                self.mappings.pop(dead_key, None)
        self.mappings[key] = (*self.mappings.get(key, ()), reference)

    def bury(self, key: Key, address: int, nbytes: int, reference: weakref.ref[Mapping]) -> None:
        """Unmap the pages of a mapping that died, in whatever thread."""
        # A weak reference is dead before its callback runs, so no thread can be given these pages any more. With
        # __del__ instead, a look-up between the last use and the unmapping would return a mapping about to go.
        self.buried.append((key, reference))
        if self.is_finalizing():
            return  # the kernel cleans up; modules that this needs may be gone
        if not self.is_mapped(key):
            unlink_owned(key)
        with contextlib.suppress(OSError):  # the kernel cannot split a mapping any more: the pages stay until exit
            pages.unmap(address, nbytes)


_table = _Table()
os.register_at_fork(after_in_child=_table.after_fork_in_child)


@atexit.register
def _unlink_all_owned() -> None:
    """Remove the names that this process still owns; what is mapped stays readable."""
    for key in list(_table.owned):
        unlink_owned(key)


def _sweep_if_possible() -> list[str]:
    """Sweep on the way to something else, which must not fail because names cannot be listed."""
    try:
        return sweep()
    except OSError:
        return []


def create_owned(
    nbytes: int, name: str | None = None, mode: int = 0o600, *, reserve: bool = True
) -> tuple[int, str, Key]:
    """:func:`kvshm.shm.objects.create_object`, after a sweep if it is the first or finds no room. The name goes at
    exit."""
    with _table.lock:
        is_first, _table.swept = not _table.swept, True
    if is_first:
        _sweep_if_possible()
    try:
        fd, full_name, key = create_object(nbytes, name, mode, reserve=reserve)
    except ShmFullError:
        if not _sweep_if_possible():  # what processes left that died meanwhile
            raise
        fd, full_name, key = create_object(nbytes, name, mode, reserve=reserve)
    _table.owned[key] = full_name
    multiprocessing = sys.modules.get("multiprocessing.process")
    if not _table.has_finalizer and multiprocessing is not None and multiprocessing.parent_process() is not None:
        # Children of multiprocessing leave by os._exit after running these, and skip atexit.
        from multiprocessing.util import Finalize  # noqa: PLC0415  only such a child needs it, and it has it already

        Finalize(None, _unlink_all_owned, exitpriority=-100)
        _table.has_finalizer = True
    return fd, full_name, key


def unlink_owned(key: Key) -> None:
    """Remove the name of a segment that this process created, once; nothing for any other."""
    name = _table.owned.pop(key, None)
    if name is not None and os.getpid() == _table.pid:
        unlink_object(name, key)


def table_lock() -> threading.RLock:
    """The lock that is held while segments are looked up and mapped."""
    return _table.lock


def create_mapping(nbytes: int, name: str | None, mode: int, *, reserve: bool) -> Mapping:
    """Create a segment and map it; its name goes with this mapping and everything made from it.

    Raises:
        As :func:`kvshm.shm.objects.create_object`. Nothing is left of the attempt.
    """
    fd, full_name, key = create_owned(nbytes, name, mode, reserve=reserve)
    try:
        with _table.lock:
            return _map(fd, full_name, key, nbytes)
    except BaseException:
        unlink_owned(key)
        raise
    finally:
        os.close(fd)


def mapping_at(start: int, end: int) -> Mapping | None:
    """The live mapping of a segment that has all addresses from ``start`` to ``end``."""
    return _table.at(start, end)


def current_process() -> object:
    """What stands for this process: another object in a forked child."""
    return _table.process


def lend(key: Key, lender: Callable[[], Mapping | None]) -> None:
    """Let look-ups of this segment ask ``lender`` for a mapping, with the lock held, before they make one."""
    _table.lenders[key] = lender


def end_lending(key: Key) -> None:
    """End :func:`lend`."""
    _table.lenders.pop(key, None)


def _map(fd: int, name: str, key: Key, nbytes: int, *, readonly: bool = False) -> Mapping:
    """Map an open object and remember it. Call with the lock held."""
    # Only what begins where a huge page may begin can be reached by huge pages, here or in another process.
    alignment = HUGE_PAGE_SIZE if nbytes >= HUGE_PAGE_SIZE else 0
    address = pages.map_shared(fd, nbytes, readonly=readonly, alignment=alignment)
    try:
        mapping = Mapping(name, key, address=address, nbytes=nbytes, readonly=readonly)
        reference = weakref.ref(mapping, partial(_table.bury, key, address, nbytes))
    except BaseException:
        pages.unmap(address, nbytes)
        raise
    _table.enter(key, reference)  # whatever happens, the pages go with the mapping by now, and once
    return mapping


def _check_size(name: str, nbytes: int | None, actual: int) -> None:
    if nbytes is not None and nbytes > actual:
        raise ValueError(
            f"segment {name!r} has {actual} bytes but {nbytes} were to be mapped; the name may be of another segment "
            f"by now, or the descriptor is wrong"
        )


def _find_mapped(name: str, nbytes: int | None, readonly: bool) -> Mapping | None:
    """What is mapped already, for the price of one look at the name."""
    try:
        status = os.lstat(SHM_DIR + name)
    except OSError:
        return None
    # An object stays while it is mapped, so its number cannot be another's.
    with _table.lock:
        mapping = _table.find((status.st_dev, status.st_ino), nbytes or 0, readonly)
    if mapping is not None:
        _check_size(name, nbytes, status.st_size)
    return mapping


def _lock_finished(fd: int) -> os.stat_result | None:
    """Take the shared lock of an object and return its size; None if it is half-made, or swept meanwhile."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    status = os.fstat(fd)
    return status if status.st_nlink and status.st_size else None


def attach_mapping(
    name: str, nbytes: int | None = None, *, readonly: bool = False, timeout_s: float = READY_TIMEOUT_S
) -> Mapping:
    """The mapping of the segment that ``name`` (with its slash) leads to now, made if this process has none.

    Args:
        nbytes: The least number of bytes that must be there.
        timeout_s: How long to wait for a segment whose creator has not finished it.

    Raises:
        FileNotFoundError, PermissionError, TimeoutError, OSError, ValueError: As their text says; nothing was
            mapped and the segment is as it was.
    """
    mapping = _find_mapped(name, nbytes, readonly)
    if mapping is not None:
        return mapping
    deadline = time.monotonic() + timeout_s
    while True:
        fd = open_object(name, readonly=readonly)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ValueError(not_a_segment(name))
            status = _lock_finished(fd)
            if status is not None:
                _check_size(name, nbytes, status.st_size)
                with _table.lock:
                    mapping = _table.find(key_of(status), nbytes or 0, readonly)
                    if mapping is None:
                        mapping = _map(fd, name, key_of(status), status.st_size, readonly=readonly)
                    return mapping
        finally:
            os.close(fd)
        if time.monotonic() > deadline:
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"segment {name!r} was not finished within {timeout_s} s: its creator is still making it or died "
                f"while doing so (kvshm.sweep() removes what dead ones left)",
            )
        time.sleep(0.002)
