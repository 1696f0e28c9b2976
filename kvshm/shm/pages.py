"""Pages by address: map, unmap, replace, and read the process's own map.

The thin layer over the system calls that :mod:`mmap` does not offer: mapping over given addresses, and mapping
without keeping a descriptor open (a mapping holds the open file, and with it the lock, by itself). Owns nothing;
whoever gets an address from here unmaps it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from dataclasses import dataclass

if sys.platform != "linux":
    raise ImportError(f"kvshm shares memory the way Linux does and cannot on {sys.platform}")

__all__ = [
    "PAGE_SIZE",
    "Extent",
    "advise",
    "extents",
    "huge_page_size",
    "make_huge",
    "map_private",
    "map_shared",
    "move",
    "num_huge_bytes",
    "round_to_pages",
    "unmap",
]

PAGE_SIZE = mmap.PAGESIZE

_MAP_FIXED = 0x10  # the same number on every Linux architecture; the mmap module does not name it
_MREMAP_MAYMOVE_FIXED = 3
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap = _libc.munmap
_munmap.restype = ctypes.c_int
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_mremap = _libc.mremap
_mremap.restype = ctypes.c_void_p
_mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_madvise = _libc.madvise
_madvise.restype = ctypes.c_int
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def round_to_pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE_SIZE) * PAGE_SIZE


def _error(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")


def map_shared(fd: int, nbytes: int, *, address: int = 0, readonly: bool = False, alignment: int = 0) -> int:
    """Map the first ``nbytes`` bytes of an open file, shared; the descriptor may be closed afterwards.

    Args:
        address: 0 lets the kernel choose; else whatever lies at these (page-aligned) addresses is replaced.
        alignment: Of the address that the kernel chooses, if pages are not enough.

    Raises:
        OSError: The kernel refused.
    """
    if alignment:
        length = round_to_pages(nbytes)
        area = map_private(length + alignment)
        start = -(-area // alignment) * alignment
        try:
            map_shared(fd, nbytes, address=start, readonly=readonly)
        except BaseException:
            unmap(area, length + alignment)
            raise
        for low, high in ((area, start), (start + length, area + length + alignment)):
            if high > low:
                unmap(low, high - low)
        return start
    protection = mmap.PROT_READ if readonly else mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_SHARED | (_MAP_FIXED if address else 0)
    mapped = _mmap(address, nbytes, protection, flags, fd, 0)
    if mapped == _FAILED:
        raise _error(f"mapping {nbytes} bytes of shared memory failed")
    return int(mapped)


def map_private(nbytes: int, *, address: int = 0) -> int:
    """Map fresh private pages of zeros, in place of what lies at ``address`` unless that is 0.

    Raises:
        OSError: The kernel refused.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_FIXED if address else 0)
    mapped = _mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if mapped == _FAILED:
        raise _error(f"mapping {nbytes} bytes of private memory failed")
    return int(mapped)


def move(source: int, nbytes: int, target: int) -> None:
    """Move the pages at ``source`` to ``target``, in place of what lies there.

    Raises:
        OSError: The kernel refused.
    """
    if _mremap(source, nbytes, nbytes, _MREMAP_MAYMOVE_FIXED, target) == _FAILED:
        raise _error(f"moving {nbytes} bytes of memory failed")


def unmap(address: int, nbytes: int) -> None:
    """Unmap the pages at ``address``.

    Raises:
        OSError: The kernel refused.
    """
    if _munmap(address, nbytes):
        raise _error(f"unmapping {nbytes} bytes at {address:#x} failed")


def advise(address: int, nbytes: int, advice: int) -> None:
    """Give the kernel advice about pages (``mmap.MADV_*``).

    Raises:
        OSError: The kernel refused.
    """
    if _madvise(address, nbytes, advice):
        raise _error(f"madvise({advice}) on {nbytes} bytes failed")


def huge_page_size() -> int:
    """Bytes of a transparent huge page; 0 where the kernel has none."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", encoding="ascii") as size:
            return int(size.read())
    except OSError:
        return 0


def make_huge(address: int, nbytes: int) -> None:
    """Ask the kernel to put these pages, which exist, together to huge ones.

    Raises:
        OSError: It did not, or not with all of them.
    """
    advise(address, nbytes, mmap.MADV_HUGEPAGE)
    advise(address, nbytes, _MADV_POPULATE_WRITE)
    advise(address, nbytes, _MADV_COLLAPSE)


def num_huge_bytes(start: int, end: int) -> int:
    """How many bytes of the shared mappings between two addresses this process reaches by huge pages."""
    total, is_inside = 0, False
    with open("/proc/self/smaps", "rb") as lines:
        for line in lines:
            name, *numbers = line.split()
            if not name.endswith(b":"):
                low, high = (int(part, 16) for part in name.split(b"-"))
                is_inside = low < end and high > start
            elif is_inside and name in (b"ShmemPmdMapped:", b"FilePmdMapped:"):
                total += int(numbers[0]) << 10
    return total


@dataclass(frozen=True, slots=True)
class Extent:
    """One line of the process's map: the bytes [start, end) and what backs them."""

    start: int
    end: int
    permissions: str  # "rw-p" is private and writable, "rw-s" shared
    device: int  # as in st_dev; 0 where no file is behind
    inode: int  # 0 where no file is behind
    path: str  # of the file; "" or "[heap]" and the like where none is


def extents(start: int, end: int) -> list[Extent]:
    """What is mapped between two addresses of this process, in order."""
    found = []
    with open("/proc/self/maps", "rb") as lines:
        for line in lines:
            span, permissions, _, device, inode, *path = line.rstrip(b"\n").split(maxsplit=5)
            low, high = (int(part, 16) for part in span.split(b"-"))
            if low >= end:
                break
            if high > start:
                major, minor = (int(part, 16) for part in device.split(b":"))
                found.append(
                    Extent(
                        low,
                        high,
                        permissions.decode(),
                        os.makedev(major, minor),
                        int(inode),
                        os.fsdecode(path[0]) if path else "",
                    )
                )
    return found
