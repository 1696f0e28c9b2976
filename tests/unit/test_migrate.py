"""Moving memory into a segment under the same addresses, and giving it back."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvshm
from kvshm import migrate, migrate_to_shm_and_wrap
from kvshm.dtypes import DTYPES
from kvshm.shm import pages
from tests.support.memory import PAGE, created, exists, fill, num_descriptors, num_mappings, private_pages


@pytest.fixture(autouse=True)
def _nothing_stays_moved() -> Iterator[None]:
    yield
    gc.collect()
    assert not migrate._moved


def aligned(owner: np.ndarray[Any, Any], num_pages: int) -> np.ndarray[Any, Any]:
    """The first whole pages inside a larger uint8 array."""
    start = -owner.ctypes.data % PAGE
    return owner[start : start + num_pages * PAGE]


def is_shared_page(address: int) -> bool:
    [part] = pages.extents(address, address + 1)
    return part.permissions[3] == "s"


def test_the_array_its_views_and_raw_pointers_see_shared_pages() -> None:
    flat = private_pages(3)
    array = flat.view("float32").reshape(3, 2, PAGE // 8)
    content = fill(array)
    view, address = array[1, 1], array.ctypes.data
    wrapper = migrate_to_shm_and_wrap(array)
    assert (wrapper.nbytes, wrapper.storage_offset, wrapper.shape) == (3 * PAGE, 0, array.shape)
    assert exists(wrapper.shm_name)
    assert array.ctypes.data == address
    assert array.tobytes() == content
    fd = os.open(f"/dev/shm{wrapper.shm_name}", os.O_RDWR)
    try:
        assert os.pread(fd, 3 * PAGE, 0) == content
        view[:] = 7
        assert os.pread(fd, 4, PAGE + PAGE // 2) == np.float32(7).tobytes()
        os.pwrite(fd, b"\x11" * 4, 0)
    finally:
        os.close(fd)
    assert ctypes.string_at(address, 4) == b"\x11" * 4 == array.tobytes()[:4]


@pytest.mark.parametrize("name", list(DTYPES))
def test_every_dtype(name: str) -> None:
    array = private_pages(1).view(DTYPES[name])
    content = fill(array)
    wrapper = migrate_to_shm_and_wrap(array)
    assert wrapper.dtype is DTYPES[name]
    assert array.tobytes() == content == wrapper.to_array().tobytes()


def test_what_is_mapped_here_already_is_not_mapped_again() -> None:
    array = private_pages(2)
    wrapper = migrate_to_shm_and_wrap(array)
    mapped = wrapper.to_array()
    assert mapped.ctypes.data == array.ctypes.data
    assert kvshm.Segment.attach(wrapper.shm_name).address == array.ctypes.data
    assert num_mappings(wrapper.shm_name) == 1
    reader = kvshm.Segment.attach(wrapper.shm_name, readonly=True)
    array[5] = 9
    assert reader.array((6,), "uint8")[5] == 9


def test_again_and_on_views_creates_nothing() -> None:
    array = private_pages(4).reshape(4, 2, PAGE // 4, 2)
    first = migrate_to_shm_and_wrap(array)
    before = created()
    assert migrate_to_shm_and_wrap(array) == first
    assert kvshm.wrap(array.view("int8").reshape(-1)).shm_name == first.shm_name
    part = migrate_to_shm_and_wrap(array[1:3])
    assert (part.shm_name, part.nbytes, part.storage_offset) == (first.shm_name, 4 * PAGE, PAGE)
    planes = migrate_to_shm_and_wrap(array[:, 1])
    assert (planes.shape, planes.stride, planes.storage_offset) == ((4, PAGE // 4, 2), (PAGE, 2, 1), PAGE // 2)
    small = migrate_to_shm_and_wrap(array.reshape(-1)[3:10])
    assert (small.shm_name, small.storage_offset) == (first.shm_name, 3)
    assert kvshm.share(array) is array
    assert kvshm.is_shared(array[2])
    assert created() == before


def test_contiguous_after_a_permute() -> None:
    stored = private_pages(6).reshape(6, PAGE // 4, 4)
    exposed = stored.transpose(1, 0, 2)
    content = fill(stored)
    wrapper = migrate_to_shm_and_wrap(exposed)
    assert wrapper.shape == stored.shape
    assert wrapper.to_array().tobytes() == content


OWNERS: dict[str, Callable[[int], Any]] = {
    "mmap": lambda size: mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
    "array": lambda size: np.zeros(size, np.uint8),
    "bytearray": bytearray,
    "ctypes": lambda size: (ctypes.c_uint8 * size)(),
}


@pytest.mark.parametrize("owner", list(OWNERS))
def test_parts_of_one_memory_share_one_segment(owner: str) -> None:
    """Wherever they begin and end, and whichever comes first."""
    memory = OWNERS[owner](9 * PAGE)
    flat = memory if isinstance(memory, np.ndarray) else np.frombuffer(memory, np.uint8)
    content = fill(flat)
    first = -flat.ctypes.data % PAGE  # the first whole page
    end = first + (9 * PAGE - first) // PAGE * PAGE
    parts = [
        flat[first + 3 * PAGE + 10 : first + 5 * PAGE + 7],
        flat[first + 1 : first + 2],
        flat[first : first + PAGE],
        flat[first + PAGE // 2 : first + 4 * PAGE],
        flat[first : first + 6 * PAGE].reshape(6, 4, -1)[:, 1:2],
        flat[first:end],
    ]
    before = created()
    for part in parts:
        assert not kvshm.is_shared(part)
    wrappers = [kvshm.wrap(part) for part in parts]
    assert len(created() - before) == 1
    for wrapper, part in zip(wrappers, parts, strict=True):
        assert wrapper.nbytes == end - first
        assert wrapper.storage_offset == part.ctypes.data - flat.ctypes.data - first
        assert np.array_equal(wrapper.to_array(), part)
        assert kvshm.is_shared(part)
        part.reshape(-1)[0] ^= 255
        assert wrapper.to_array().reshape(-1)[0] == part.reshape(-1)[0]
        part.reshape(-1)[0] ^= 255
    assert flat.tobytes() == content


def test_a_whole_mmap_has_its_last_page_too() -> None:
    memory = mmap.mmap(-1, 2 * PAGE + 100, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = np.frombuffer(memory, np.uint8)
    content = fill(flat)
    wrapper = kvshm.wrap(flat[2 * PAGE + 5 :])
    assert (wrapper.nbytes, wrapper.storage_offset, wrapper.shape) == (3 * PAGE, 2 * PAGE + 5, (95,))
    assert kvshm.wrap(flat).shm_name == wrapper.shm_name
    assert flat.tobytes() == content


def test_what_is_not_whole_pages_of_its_owner_stays() -> None:
    """Its neighbours on that page are strangers."""
    flat = np.zeros(9 * PAGE, np.uint8)
    first = -flat.ctypes.data % PAGE
    assert first, "an allocator keeps its own data before the array"
    for part in (flat, flat[: first + 1], flat[first - 1 :], flat[-1:]):
        with pytest.raises(ValueError, match=r"only whole pages of \d+ bytes can be moved.*kvshm\.share"):
            kvshm.wrap(part)
        assert not kvshm.is_shared(part)
    kvshm.wrap(flat[first : first + 1])
    for part in (flat, flat[first - 1 : first + 1]):
        with pytest.raises(ValueError, match=r"were moved into segment .* before, the rest was not"):
            kvshm.wrap(part)
        assert not kvshm.is_shared(part)
        assert np.array_equal(kvshm.share(part), part)


def test_owners_of_parts_of_the_same_memory() -> None:
    """A runtime's arrays each have an owner of their own, which knows no more than that array."""
    address = pages.map_private(9 * PAGE)

    def part(start: int, stop: int) -> np.ndarray[Any, Any]:
        size = (stop - start) * PAGE
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address + start * PAGE))

    middle = part(3, 5)
    content = fill(middle)
    name = kvshm.wrap(middle).shm_name
    again = part(3, 4)
    assert kvshm.wrap(again).shm_name == name
    with pytest.raises(ValueError, match="were moved into segment"):
        kvshm.wrap(part(2, 5))
    whole = part(0, 9)
    left, right = whole[: 3 * PAGE], whole[6 * PAGE :]
    assert (kvshm.wrap(left).nbytes, kvshm.wrap(right).nbytes) == (3 * PAGE, 4 * PAGE)
    with pytest.raises(ValueError, match="were moved into segment"):
        kvshm.wrap(whole)
    assert middle.tobytes() == content
    del middle, whole, left, right
    gc.collect()
    assert exists(name), "the other array of these pages was described too"
    assert kvshm.is_shared(again)
    del again
    gc.collect()
    assert not exists(name)
    assert ctypes.string_at(address + 3 * PAGE, 2 * PAGE) == content
    pages.unmap(address, 9 * PAGE)


@pytest.mark.parametrize("wraps", [False, True])
def test_arrays_that_a_runtime_hands_back_keep_what_was_moved(wraps: bool) -> None:
    """Their owners are objects of the runtime, which hold the memory."""
    array = private_pages(3).view("float32")
    content = fill(array)
    name = kvshm.wrap(array).shm_name
    back = np.from_dlpack(array[5:])
    assert kvshm.is_shared(back)
    if wraps:
        wrapper = kvshm.wrap(back)
        assert (wrapper.shm_name, wrapper.storage_offset) == (name, 5)
    del array
    gc.collect()
    assert kvshm.is_shared(back)
    assert back.tobytes() == content[20:]
    view = back[3:]
    del back
    gc.collect()
    assert kvshm.wrap(view).storage_offset == 8
    del view
    gc.collect()
    gc.collect()
    assert not exists(name)


@pytest.mark.parametrize("owner", ["mmap", "array", "bytearray", "ctypes"])
def test_given_back_private_at_the_first_collection_after_the_last_user(owner: str) -> None:
    keep = OWNERS[owner](9 * PAGE)
    array = aligned(np.frombuffer(keep, np.uint8) if owner != "array" else keep, 8)
    wrapper = migrate_to_shm_and_wrap(array)
    del keep
    gc.collect()
    array[:] = 3
    view, mapped, address = array[5:], wrapper.to_array(), array.ctypes.data
    del array
    gc.collect()
    assert num_mappings(wrapper.shm_name) == 1
    del view
    gc.collect()
    assert num_mappings(wrapper.shm_name) == 1
    assert mapped[0] == 3
    assert is_shared_page(address)
    del mapped
    gc.collect(0)
    assert num_mappings(wrapper.shm_name) == 0
    assert not exists(wrapper.shm_name)


def test_freed_memory_is_never_shared() -> None:
    fd = None
    for _ in range(5):
        owner = np.zeros(33 * PAGE, np.uint8)
        array = aligned(owner, 32)
        wrapper = migrate_to_shm_and_wrap(array)
        fd = os.open(f"/dev/shm{wrapper.shm_name}", os.O_RDWR)
        del owner, array
        gc.collect()
        others = [np.zeros(33 * PAGE, np.uint8) for _ in range(4)] + [np.zeros(100, np.uint8) for _ in range(400)]
        os.pwrite(fd, b"\xff" * 32 * PAGE, 0)
        assert not any(other.any() for other in others)
        os.close(fd)


def test_memory_of_an_owner_that_lives_on_keeps_its_bytes() -> None:
    memory = pages.map_private(PAGE)
    array = np.ctypeslib.as_array((ctypes.c_uint8 * PAGE).from_address(memory))
    content = fill(array)
    name = migrate_to_shm_and_wrap(array).shm_name
    del array
    gc.collect()
    assert not exists(name)
    assert not is_shared_page(memory)
    assert ctypes.string_at(memory, PAGE) == content
    pages.unmap(memory, PAGE)


def test_an_mmap_that_was_closed_is_not_touched() -> None:
    memory = mmap.mmap(-1, 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array: np.ndarray[Any, Any] = np.ndarray((2 * PAGE,), np.uint8, memory)
    address, name = array.ctypes.data, migrate_to_shm_and_wrap(array).shm_name
    del array
    memory.close()
    taken = pages.map_private(2 * PAGE, address=address)
    ctypes.memset(taken, 5, 2 * PAGE)
    del memory
    gc.collect()
    assert not exists(name)
    assert ctypes.string_at(address, 2 * PAGE) == b"\5" * 2 * PAGE
    pages.unmap(address, 2 * PAGE)


def test_addresses_are_used_again() -> None:
    address = pages.map_private(PAGE)
    names = set()
    for _ in range(3):
        array = np.ctypeslib.as_array((ctypes.c_uint8 * PAGE).from_address(address))
        names.add(migrate_to_shm_and_wrap(array).shm_name)
        gc.collect()
        other = np.ctypeslib.as_array((ctypes.c_uint8 * 100).from_address(address + 5))
        assert kvshm.is_shared(other)
        del array
        gc.collect()
        assert not kvshm.is_shared(other), "it was never described, and nobody else holds the pages"
    assert len(names) == 3
    pages.unmap(address, PAGE)


def test_what_the_kernel_says_counts() -> None:
    """Memory that was moved, and then unmapped behind everybody's back: those addresses are somebody else's."""
    address = pages.map_private(2 * PAGE)
    array = np.ctypeslib.as_array((ctypes.c_uint8 * (2 * PAGE)).from_address(address))
    name = migrate_to_shm_and_wrap(array).shm_name
    pages.map_private(PAGE, address=address)
    first, second = (
        np.ctypeslib.as_array((ctypes.c_uint8 * PAGE).from_address(address + start)) for start in (0, PAGE)
    )
    assert not kvshm.is_shared(first)
    assert kvshm.is_shared(second)
    assert kvshm.wrap(second).storage_offset == PAGE
    assert kvshm.wrap(first).shm_name != name
    assert kvshm.is_shared(first)
    del array, first, second
    gc.collect()
    assert not exists(name)
    pages.unmap(address, 2 * PAGE)


def test_a_bytearray_cannot_grow_away_while_it_is_shared() -> None:
    memory = bytearray(9 * PAGE)
    name = migrate_to_shm_and_wrap(aligned(np.frombuffer(memory, np.uint8), 8)).shm_name
    gc.collect()
    with pytest.raises(BufferError):
        memory.extend(bytes(100))
    assert exists(name)
    del memory
    gc.collect()
    assert not exists(name)


def refusals(tmp_path: Path) -> Iterator[tuple[np.ndarray[Any, Any], str]]:
    # Heap memory that begins with a page, as one in 256 does, may move.
    heap = [np.zeros(3 * PAGE, np.uint8) for _ in range(20)]
    yield next(array for array in heap if array.ctypes.data % PAGE), "only whole pages"
    yield private_pages(1).reshape(16, -1)[:, ::2], "only the first axis|allows none"
    readonly = private_pages(1)
    readonly.flags.writeable = False
    yield readonly, "it is read-only"
    path = tmp_path / "file"
    path.write_bytes(b"f" * PAGE)
    yield np.memmap(path, mode="r+", dtype=np.uint8), f"view of {path}"
    yield np.memmap(path, mode="c", dtype=np.uint8), f"view of {path}"
    yield np.frombuffer(mmap.mmap(-1, PAGE), np.uint8), "shared memory of another kind"
    fd = os.memfd_create("kvshm-test")
    os.ftruncate(fd, PAGE)
    yield np.frombuffer(mmap.mmap(fd, PAGE), np.uint8), "shared memory of another kind .*memfd"
    os.close(fd)
    unreadable = pages.map_private(2 * PAGE)
    pages.unmap(unreadable + PAGE, PAGE)
    hole = np.ctypeslib.as_array((ctypes.c_uint8 * (2 * PAGE)).from_address(unreadable))
    yield hole, "not mapped from end to end|shared|pages are|view of"
    yield (
        np.frombuffer(mmap.mmap(-1, PAGE, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), "u1"),
        ("read-only"),
    )


def test_what_cannot_be_moved_is_refused_and_unchanged(tmp_path: Path) -> None:
    before = created()
    for array, text in refusals(tmp_path):
        for refused in (migrate_to_shm_and_wrap, kvshm.wrap):
            with pytest.raises(ValueError, match=text):
                refused(array)
    assert created() == before
    assert (tmp_path / "file").read_bytes() == b"f" * PAGE


def test_other_shared_memory_is_refused() -> None:
    block = shared_memory.SharedMemory(create=True, size=PAGE)
    try:
        assert block.buf is not None
        array = np.frombuffer(block.buf, np.uint8)
        with pytest.raises(ValueError, match=f"view of /dev/shm/{block.name}"):
            migrate_to_shm_and_wrap(array)
        del array
    finally:
        block.close()
        block.unlink()


def test_a_failure_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    array = private_pages(3)
    content = fill(array)

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    descriptors = num_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(kvshm.ShmFullError, match=f"no room in shared memory for {3 * PAGE} bytes"):
            migrate_to_shm_and_wrap(array)
    map_shared = pages.map_shared
    for is_mapped in (False, True):
        with monkeypatch.context() as patch:

            def fail(*arguments: Any, is_mapped: bool = is_mapped, **keywords: Any) -> None:
                if is_mapped:
                    map_shared(*arguments, **keywords)
                raise KeyboardInterrupt

            patch.setattr(pages, "map_shared", fail)
            with pytest.raises(KeyboardInterrupt):
                migrate_to_shm_and_wrap(array)
        assert not migrate._moved
        assert not kvshm.is_shared(array)
        assert not is_shared_page(array.ctypes.data)
        assert array.tobytes() == content
    assert num_descriptors() == descriptors
    migrate_to_shm_and_wrap(array)
    assert array.tobytes() == content


def test_no_memory_for_private_pages_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    array = private_pages(1)
    name = migrate_to_shm_and_wrap(array).shm_name
    del array

    def refuse(*_: int, **__: int) -> int:
        raise OSError(errno.ENOMEM, "no memory")

    with monkeypatch.context() as patch:
        patch.setattr(pages, "map_private", refuse)
        gc.collect()
        assert num_mappings(name) == 1
    gc.collect()
    assert num_mappings(name) == 0
    assert not exists(name)


def test_threads_that_move_the_same_memory_agree() -> None:
    array = private_pages(64)
    content = fill(array)
    start, wrappers = threading.Barrier(6), []

    def move() -> None:
        start.wait()
        wrappers.append(migrate_to_shm_and_wrap(array))

    threads = [threading.Thread(target=move) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrappers) == 6
    assert len(set(wrappers)) == 1
    assert array.tobytes() == content
    assert created() == {wrappers[0].shm_name}


def test_collections_and_look_ups_at_once() -> None:
    """A thread drops what was moved while another maps it from its descriptor: the mapping works, or is refused."""
    errors: list[Exception] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def look_up(wrapper: kvshm.ShmArrayWrapper) -> None:
        try:
            for _ in range(20):
                mapped = wrapper.to_array()
                mapped[0] += 1
                del mapped
        except FileNotFoundError:
            pass
        except Exception as error:
            errors.append(error)

    try:
        for _ in range(40):
            array = private_pages(1, 5)
            wrapper = migrate_to_shm_and_wrap(array)
            thread = threading.Thread(target=look_up, args=(wrapper,))
            thread.start()
            del array
            gc.collect(0)
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
