"""Where an array's memory lives, and moving it into a segment under the same addresses.

An array cannot be re-pointed at other memory, but other memory can be mapped where it points: the segment goes over the
array's pages, so the array, its views and every raw pointer to it see shared pages from then on.

What was moved must not be freed while it is shared: whoever gets those addresses next would share its memory with
strangers. No callback comes in time for that (those of arrays and mmaps may run after the memory has gone), so the
owner of the memory is held here, and let go of at the first collection that finds nobody else holding it: private
pages first, then the reference. What was moved is known by its owner, since addresses are used again.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import mmap
import os
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvshm.shm import mappings, pages
from kvshm.shm.objects import Key

__all__ = ["Home", "home_of", "move_to_segment"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Home:
    """The segment that an array's memory lies in, and where that segment is mapped."""

    name: str
    address: int
    nbytes: int


class _Moved:
    """Memory that was moved into a segment, and the owner that it must be given back to."""

    __slots__ = ("address", "export", "is_given_back", "key", "lent", "name", "nbytes", "owner")

    def __init__(self, name: str, key: Key, address: int, nbytes: int, owner: object) -> None:
        self.name = name
        self.key = key
        self.address = address
        self.nbytes = nbytes
        self.owner = owner
        # A bytearray and its like move their memory when they grow, unless it is exported. An mmap may be closed by
        # its user, which takes the pages with it and leaves nothing to give back.
        self.export = None if isinstance(owner, (np.ndarray, mmap.mmap)) else _export(owner)
        self.lent: weakref.ref[mappings.Mapping] | None = None
        self.is_given_back = False

    def lend(self) -> mappings.Mapping | None:
        """A mapping for arrays of this process that are made from the descriptor; it holds the owner."""
        owner = self.owner  # held before looking: a collection may give the pages back at any call
        if self.is_given_back:
            return None
        mapping = None if self.lent is None else self.lent()
        if mapping is None:
            mapping = mappings.Mapping(self.name, self.key, address=self.address, nbytes=self.nbytes, owner=owner)
            self.lent = weakref.ref(mapping)
        return mapping

    def give_back(self, *, keep_bytes: bool) -> None:
        """Replace what is shared still by private pages, of zeros or of the same bytes."""
        self.is_given_back = True
        end = self.address + self.nbytes
        # By what is mapped, not by what was: the user may have closed the mmap, and others may have its addresses.
        for part in pages.extents(self.address, end):
            if (part.device, part.inode) != self.key:
                continue
            low, high = max(part.start, self.address), min(part.end, end)
            if keep_bytes:
                copy = pages.map_private(high - low)
                ctypes.memmove(copy, low, high - low)
                pages.move(copy, high - low, low)
            else:
                pages.map_private(high - low, address=low)


_moved: dict[int, list[_Moved]] = {}  # by the owner's id, which the reference in there keeps from being used again


def _export(owner: object) -> memoryview | None:
    try:
        return memoryview(owner)  # type: ignore[arg-type]
    except TypeError:
        return None


class _Probe:
    __slots__ = ("owner",)

    def __init__(self) -> None:
        self.owner = object()


def _num_references(holder: Any) -> int:
    return sys.getrefcount(holder.owner)


_ALONE = _num_references(_Probe())  # what the interpreter counts where the holder has the only reference


def _is_unused(moved: list[_Moved]) -> bool:
    """Whether nobody but these records holds their owner."""
    exports = sum(record.export is not None for record in moved)
    return _num_references(moved[0]) <= _ALONE + len(moved) - 1 + exports


def _on_collection(phase: str, info: dict[str, int]) -> None:
    """Let go of the memory whose owner nobody else holds."""
    if phase != "stop" or not _moved:
        return
    lock = mappings.table_lock()
    # Not waiting for the lock: the thread that has it may be waiting for one that the code around this one holds.
    if lock.acquire(blocking=False):
        try:
            for owner_id, moved in list(_moved.items()):
                if _is_unused(moved):
                    _let_go(owner_id, moved)
        finally:
            lock.release()


def _let_go(owner_id: int, moved: list[_Moved]) -> None:
    owner = moved[0].owner
    dies = isinstance(owner, mmap.mmap) or (isinstance(owner, np.ndarray) and owner.flags.owndata)
    try:
        for record in moved:
            record.give_back(keep_bytes=not dies)
            mappings.end_lending(record.key)
            mappings.unlink_owned(record.key)
    except OSError:
        # No memory for private pages now. The owner must not go before they are there: the next collection tries.
        return
    _moved.pop(owner_id, None)


@atexit.register
def _keep_for_ever() -> None:
    """Never free what is shared: the interpreter would use that memory again while it shuts down."""
    if _on_collection in gc.callbacks:
        gc.callbacks.remove(_on_collection)
    for moved in _moved.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(moved[0].owner))


def root_of(array: object) -> object:
    """The object at the end of an array's base chain, which owns its memory."""
    root = array
    while True:
        if isinstance(root, np.ndarray) and root.base is not None:
            root = root.base
        elif isinstance(root, memoryview):
            root = root.obj
        else:
            return root


def address_of(array: Array) -> int:
    """Where an array's first element lies."""
    return int(array.__array_interface__["data"][0])


def home_of(array: Array) -> Home | None:
    """The segment that an array's memory lies in; None if it lies in none.

    Raises:
        ValueError: A part of it was moved into a segment and the rest was not.
    """
    root = root_of(array)
    if isinstance(root, mappings.Mapping):
        return Home(root.name, root.address, root.nbytes)
    moved = _moved.get(id(root))
    if moved is None or not array.size:
        return None
    start, end = _byte_bounds(array)
    for record in moved:
        low, high = record.address, record.address + record.nbytes
        if low <= start and end <= high:
            return Home(record.name, low, record.nbytes)
        if start < high and low < end:
            raise ValueError(
                f"bytes [{max(low, start) - start}, {min(high, end) - start}) of this array were moved into segment "
                f"{record.name!r} before, the rest was not; wrap the larger array first, or copy it with kvshm.share"
            )
    return None


def _byte_bounds(array: Array) -> tuple[int, int]:
    start = end = address_of(array)
    for size, step in zip(array.shape, array.strides, strict=True):
        reach = (size - 1) * step
        start, end = (start + min(reach, 0), end + max(reach, 0))
    return start, end + array.itemsize


def move_to_segment(array: Array) -> Home:
    """Move the memory of a contiguous array into a new segment, under the same addresses.

    Nobody may write to it meanwhile. Whoever registered these pages with a device (pinned memory, RDMA) must do so
    again: they are other pages now.

    Raises:
        ValueError: The memory cannot be moved; the text says why. Nothing has changed.
        OSError: No room for the segment.
    """
    start, nbytes, owner = address_of(array), array.nbytes, root_of(array)
    with mappings.table_lock():
        home = home_of(array)
        if home is not None:  # another thread was faster, as it may be again below
            return home
        _check_movable(array, start, nbytes)
    fd, name, key = mappings.create_owned(nbytes)
    try:
        flat = array.reshape(-1).view(np.uint8).data
        done = 0
        while done < nbytes:  # one write ends at 2 GiB
            done += os.pwrite(fd, flat[done:], done)
        del flat
        with mappings.table_lock():
            home = home_of(array)
            if home is None:
                _replace(fd, _Moved(name, key, start, nbytes, owner))
                return Home(name, start, nbytes)
        mappings.unlink_owned(key)
        return home
    except BaseException:
        mappings.unlink_owned(key)
        raise
    finally:
        os.close(fd)


def _replace(fd: int, record: _Moved) -> None:
    """Map the segment over the memory, which is on record by then. Call with the lock held."""
    if _on_collection not in gc.callbacks:
        gc.callbacks.append(_on_collection)
    moved = _moved.setdefault(id(record.owner), [])
    moved.append(record)
    mappings.lend(record.key, record.lend)
    try:
        pages.map_shared(fd, record.nbytes, address=record.address)
    except BaseException:
        record.give_back(keep_bytes=True)
        mappings.end_lending(record.key)
        moved.remove(record)
        if not moved:
            del _moved[id(record.owner)]
        raise


def _check_movable(array: Array, start: int, nbytes: int) -> None:
    def refused(why: str) -> ValueError:
        return ValueError(
            f"array of shape {array.shape} ({array.dtype}, {nbytes} bytes at {start:#x}) cannot be moved into shared "
            f"memory in place: {why}. kvshm.share(array) copies it; kvshm.empty makes arrays that are shared already"
        )

    if not array.flags.c_contiguous:
        raise refused("there are gaps between its elements")
    if start % pages.PAGE_SIZE or nbytes % pages.PAGE_SIZE:
        raise refused(
            f"only whole pages of {pages.PAGE_SIZE} bytes can be moved, and it does not begin and end with one"
        )
    if not array.flags.writeable:
        raise refused("it is read-only")
    at = start
    for part in pages.extents(start, start + nbytes):
        if part.start > at:
            break
        if part.inode and not part.path.endswith("(deleted)"):
            raise refused(f"it is a view of {part.path}, which would no longer change with it")
        if part.inode or part.permissions[3] != "p":
            raise refused(
                f"it is shared memory of another kind ({part.path}), and would no longer be shared; allocate private "
                f"memory, for example mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)"
            )
        if not part.permissions.startswith("rw") or part.path.startswith(("[stack", "[v")):
            raise refused(f"its pages are {part.permissions} {part.path}, not ordinary memory")
        at = part.end
    if at < start + nbytes:
        raise refused("it is not mapped from end to end")
