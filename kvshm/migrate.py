"""Where an array's memory lies, and moving memory into a segment under the same addresses.

An array cannot be re-pointed at other memory, but other memory can be mapped where it points: the segment goes over the
array's pages, so the array, its views and every raw pointer to it see shared pages from then on. The whole memory of an
owner is moved at once, as far as it is whole pages, so that all arrays in it share one segment.

What was moved must not be freed while it is shared: whoever gets those addresses next would share its memory with
strangers. No callback comes in time for that (those of arrays and mmaps may run after the memory has gone), so the
owner of the memory is held here, and dropped at the first collection that finds nobody else holding it: private pages
first, then the reference.

An array lies in a segment if its addresses do, whoever made it: a runtime hands back arrays of its own over memory that
it was given. Owners differ then, and those that were described are held as well. Addresses are used again, so what was
moved is known by its owner, or by what the kernel says is mapped there now.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import mmap
import os
import sys
import weakref
from collections.abc import Iterator
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


class _Owner:
    """An object that keeps moved memory alive."""

    __slots__ = ("export", "owner")

    def __init__(self, owner: object) -> None:
        self.owner = owner
        # A bytearray and its like move their memory when they grow, unless it is exported. An mmap may be closed by
        # its user, which takes the pages with it and leaves nothing to give back.
        self.export = None if isinstance(owner, np.ndarray | mmap.mmap) else _export(owner)


class _Moved:
    """Memory that was moved into a segment, and the owner that it must be given back to."""

    __slots__ = ("address", "guests", "is_given_back", "key", "lent", "name", "nbytes", "owner")

    def __init__(self, name: str, key: Key, address: int, nbytes: int, owner: object) -> None:
        self.name = name
        self.key = key
        self.address = address
        self.nbytes = nbytes
        self.owner = _Owner(owner)
        # Owners of other arrays over the same memory, which hold it in ways of their own.
        self.guests: list[_Owner] = []
        self.lent: weakref.ref[mappings.Mapping] | None = None
        self.is_given_back = False

    @property
    def end(self) -> int:
        """The address past the last byte."""
        return self.address + self.nbytes

    def owners(self) -> Iterator[_Owner]:
        """All that are held."""
        yield self.owner
        yield from self.guests

    def is_owned_by(self, root: object) -> bool:
        """Whether this object keeps the memory, as far as is known here."""
        return any(holder.owner is root for holder in self.owners())

    def is_mapped_at(self, start: int, end: int) -> bool:
        """Whether the segment is what is mapped at these addresses now."""
        at = start
        for part in pages.extents(start, end):
            if part.start > at or (part.device, part.inode) != self.key:
                return False
            at = part.end
        return at >= end

    def lend(self) -> mappings.Mapping | None:
        """A mapping for arrays of this process that are made from the descriptor; it holds the owner."""
        owner = self.owner.owner  # held before looking: a collection may give the pages back at any call
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
        # By what is mapped, not by what was: the user may have closed the mmap, and others may have its addresses.
        for part in pages.extents(self.address, self.end):
            if (part.device, part.inode) != self.key:
                continue
            low, high = max(part.start, self.address), min(part.end, self.end)
            if keep_bytes:
                copy = pages.map_private(high - low)
                ctypes.memmove(copy, low, high - low)
                pages.move(copy, high - low, low)
            else:
                pages.map_private(high - low, address=low)


_moved: list[_Moved] = []


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


def _is_unused(holder: _Owner) -> bool:
    """Whether nobody but these records holds an owner."""
    known = sum(other.owner is holder.owner for record in _moved for other in record.owners())
    return _num_references(holder) <= _ALONE + known - 1 + _num_exports(holder.owner)


def _num_exports(owner: object) -> int:
    return sum(other.owner is owner and other.export is not None for record in _moved for other in record.owners())


def _on_collection(phase: str, info: dict[str, int]) -> None:
    """Drop the memory whose owner nobody else holds."""
    if phase != "stop" or not _moved:
        return
    lock = mappings.table_lock()
    # Not waiting for the lock: the thread that has it may be waiting for one that the code around this one holds.
    if lock.acquire(blocking=False):
        try:
            for record in list(_moved):
                # Guests first: as a rule they hold the owner. One that is dropped may free nothing, since that is held.
                record.guests = [guest for guest in record.guests if not _is_unused(guest)]
                if not record.guests and _is_unused(record.owner):
                    _give_back(record)
        finally:
            lock.release()


def _give_back(record: _Moved) -> None:
    owner = record.owner.owner
    dies = isinstance(owner, mmap.mmap) or (isinstance(owner, np.ndarray) and owner.flags.owndata)
    try:
        record.give_back(keep_bytes=not dies)
    except OSError:
        # No memory for private pages now. The owner must not go before they are there: the next collection tries.
        return
    mappings.end_lending(record.key)
    mappings.unlink_owned(record.key)
    _moved.remove(record)


@atexit.register
def _keep_for_ever() -> None:
    """Never free what is shared: the interpreter would use that memory again while it shuts down."""
    if _on_collection in gc.callbacks:
        gc.callbacks.remove(_on_collection)
    for record in _moved:
        for holder in record.owners():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(holder.owner))


def _chain_of(array: object) -> tuple[object, Array | None]:
    """The object at the end of an array's base chain, which owns its memory, and the array nearest to it."""
    root, outermost = array, None
    while True:
        if isinstance(root, np.ndarray):
            outermost = root
            if root.base is None:
                return root, outermost
            root = root.base
        elif isinstance(root, memoryview):
            root = root.obj
        else:
            return root, outermost


def address_of(array: Array) -> int:
    """Where an array's first element lies."""
    return int(array.__array_interface__["data"][0])


def home_of(array: Array, *, keep: bool = False) -> Home | None:
    """The segment that an array's memory lies in; None if it lies in none.

    Args:
        keep: What was moved is not moved back while this array's owner lives.

    Raises:
        ValueError: A part of it was moved into a segment and the rest was not.
    """
    root, _ = _chain_of(array)
    if isinstance(root, mappings.Mapping):
        return Home(root.name, root.address, root.nbytes)
    if not array.size:
        return None
    start, end = _byte_bounds(array)
    mapping = mappings.mapping_at(start, end)
    if mapping is not None:
        return Home(mapping.name, mapping.address, mapping.nbytes)
    if not _moved:
        return None
    with mappings.table_lock():
        for record in _moved:
            low, high = max(start, record.address), min(end, record.end)
            if low >= high or not (record.is_owned_by(root) or record.is_mapped_at(low, high)):
                continue
            if (low, high) != (start, end):
                raise ValueError(
                    f"bytes [{low - start}, {high - start}) of this array were moved into segment {record.name!r} "
                    f"before, the rest was not; wrap the larger array first, or copy it with kvshm.share"
                )
            if keep and not record.is_owned_by(root):
                record.guests.append(_Owner(root))
            return Home(record.name, record.address, record.nbytes)
    return None


def _byte_bounds(array: Array) -> tuple[int, int]:
    start = end = address_of(array)
    for size, step in zip(array.shape, array.strides, strict=True):
        reach = (size - 1) * step
        start, end = (start + min(reach, 0), end + max(reach, 0))
    return start, end + array.itemsize


def move_to_segment(array: Array) -> Home:
    """Move the memory that an array lies in into a new segment, under the same addresses: all whole pages of its owner.

    Nobody may write to it meanwhile. Whoever registered these pages with a device (pinned memory, RDMA) must do so
    again: they are other pages now.

    Raises:
        ValueError: The memory cannot be moved; the text says why. Nothing has changed.
        OSError: No room for the segment.
    """
    owner, outermost = _chain_of(array)
    with mappings.table_lock():
        home = home_of(array, keep=True)
        if home is not None:  # another thread was faster, as it may be again below
            return home
        start, nbytes = _movable_range(array, owner, outermost)
    fd, name, key = mappings.create_owned(nbytes)
    try:
        memory = memoryview((ctypes.c_ubyte * nbytes).from_address(start))
        done = 0
        while done < nbytes:  # one write ends at 2 GiB
            done += os.pwrite(fd, memory[done:], done)
        del memory
        with mappings.table_lock():
            home = home_of(array, keep=True)
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
    _moved.append(record)
    mappings.lend(record.key, record.lend)
    try:
        pages.map_shared(fd, record.nbytes, address=record.address)
    except BaseException:
        record.give_back(keep_bytes=True)
        mappings.end_lending(record.key)
        _moved.remove(record)
        raise


def _movable_range(array: Array, owner: object, outermost: Array | None) -> tuple[int, int]:
    """Address and bytes of the whole pages that belong to the owner of an array's memory and lie around that array."""

    def refused(why: str) -> ValueError:
        return ValueError(
            f"array of shape {array.shape} ({array.dtype}, {array.nbytes} bytes at {address_of(array):#x}) cannot be "
            f"moved into shared memory in place: {why}. kvshm.share(array) copies it; kvshm.empty makes arrays that "
            f"are shared already"
        )

    if not array.flags.writeable:
        raise refused("it is read-only")
    low, high = _bounds_of_owner(owner, array if outermost is None else outermost)
    low, high = pages.round_to_pages(low), high // pages.PAGE_SIZE * pages.PAGE_SIZE
    start, end = _byte_bounds(array)
    if start < low or end > high:
        raise refused(
            f"only whole pages of {pages.PAGE_SIZE} bytes can be moved, and its memory begins or ends inside one"
        )
    for record in _moved:  # of another owner of the same memory
        if record.is_mapped_at(record.address, record.end):
            low = max(low, record.end) if record.end <= start else low
            high = min(high, record.address) if record.address >= end else high
    at = low
    for part in pages.extents(low, high):
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
    if at < high:
        raise refused("it is not mapped from end to end")
    return low, high - low


def _bounds_of_owner(owner: object, outermost: Array) -> tuple[int, int]:
    """The addresses that belong to an owner for certain: of its buffer, or of the largest array that is known of it."""
    if owner is not outermost:
        try:
            whole = np.frombuffer(owner, np.uint8)  # type: ignore[call-overload]  # whatever it is: it is asked
        except (TypeError, ValueError, BufferError, AttributeError):
            return _byte_bounds(outermost)  # it does not say
        low, high = _byte_bounds(whole)
        # The kernel maps whole pages for an mmap.
        return low, pages.round_to_pages(high) if isinstance(owner, mmap.mmap) else high
    return _byte_bounds(outermost)
