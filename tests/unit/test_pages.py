"""Mapping by address."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

import pytest

from kvshm.shm import pages
from kvshm.shm.pages import PAGE_SIZE


def read(address: int, nbytes: int = 1) -> bytes:
    return ctypes.string_at(address, nbytes)


def test_rounding() -> None:
    assert [pages.round_to_pages(n) for n in (0, 1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1)] == [
        0,
        PAGE_SIZE,
        PAGE_SIZE,
        PAGE_SIZE,
        2 * PAGE_SIZE,
    ]


def test_shared_pages_over_given_addresses_and_back() -> None:
    fd = os.memfd_create("kvshm-test")
    address = pages.map_private(3 * PAGE_SIZE)
    try:
        os.pwrite(fd, b"x" * PAGE_SIZE, 0)
        assert pages.map_shared(fd, PAGE_SIZE, address=address + PAGE_SIZE) == address + PAGE_SIZE
        assert read(address, 3 * PAGE_SIZE) == b"\0" * PAGE_SIZE + b"x" * PAGE_SIZE + b"\0" * PAGE_SIZE
        status = os.fstat(fd)
        [middle] = [part for part in pages.extents(address, address + 3 * PAGE_SIZE) if part.inode]
        assert (middle.start, middle.end) == (address + PAGE_SIZE, address + 2 * PAGE_SIZE)
        assert (middle.device, middle.inode, middle.permissions) == (status.st_dev, status.st_ino, "rw-s")
        assert "kvshm-test" in middle.path
        ctypes.memset(address + PAGE_SIZE, ord("y"), 1)
        assert os.pread(fd, 2, 0) == b"yx"
        pages.map_private(PAGE_SIZE, address=address + PAGE_SIZE)
        assert read(address + PAGE_SIZE) == b"\0"
        assert os.pread(fd, 2, 0) == b"yx"
    finally:
        pages.unmap(address, 3 * PAGE_SIZE)
        os.close(fd)
    assert not any(part.start == address for part in pages.extents(address, address + 1))


def test_moving_pages() -> None:
    source, target = pages.map_private(PAGE_SIZE), pages.map_private(PAGE_SIZE)
    ctypes.memset(source, 7, PAGE_SIZE)
    pages.move(source, PAGE_SIZE, target)
    assert read(target, PAGE_SIZE) == b"\7" * PAGE_SIZE
    pages.unmap(target, PAGE_SIZE)


def test_readonly_pages() -> None:
    fd = os.memfd_create("kvshm-test")
    os.ftruncate(fd, 1)
    address = pages.map_shared(fd, 1, readonly=True)
    os.close(fd)
    assert [part.permissions for part in pages.extents(address, address + 1)] == ["r--s"]
    pages.unmap(address, 1)


def test_an_alignment_beyond_pages() -> None:
    fd = os.memfd_create("kvshm-test")
    os.ftruncate(fd, 3 * PAGE_SIZE + 1)
    alignment = 16 * PAGE_SIZE
    address = pages.map_shared(fd, 3 * PAGE_SIZE + 1, alignment=alignment)
    os.close(fd)
    assert address % alignment == 0
    [part] = [part for part in pages.extents(address - alignment, address + alignment) if "kvshm-test" in part.path]
    assert (part.start, part.end) == (address, address + 4 * PAGE_SIZE)
    pages.unmap(address, 4 * PAGE_SIZE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        pages.map_shared(-1, PAGE_SIZE, alignment=alignment)


def test_the_kernels_refusals_are_errors() -> None:
    with pytest.raises(OSError, match="mapping 4096 bytes of shared memory failed: Bad file descriptor") as caught:
        pages.map_shared(-1, 4096)
    assert caught.value.errno == errno.EBADF
    with pytest.raises(OSError, match="unmapping 1 bytes at 0x1 failed: Invalid argument"):
        pages.unmap(1, 1)
    with pytest.raises(OSError, match="mapping 0 bytes of private memory failed"):
        pages.map_private(0)
    with pytest.raises(OSError, match="moving 1 bytes of memory failed"):
        pages.move(1, 1, PAGE_SIZE)
    with pytest.raises(OSError, match=r"madvise\(9999\) on 4096 bytes failed"):
        pages.advise(PAGE_SIZE, 4096, 9999)


def test_advice() -> None:
    address = pages.map_private(PAGE_SIZE)
    ctypes.memset(address, 7, 1)
    pages.advise(address, PAGE_SIZE, mmap.MADV_DONTNEED)
    assert read(address) == b"\0"
    pages.unmap(address, PAGE_SIZE)
