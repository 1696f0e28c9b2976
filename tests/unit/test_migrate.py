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


def test_parts_of_one_memory_each_have_their_segment_and_the_whole_has_none() -> None:
    flat = private_pages(5)
    first, second = migrate_to_shm_and_wrap(flat[:PAGE]), migrate_to_shm_and_wrap(flat[2 * PAGE : 4 * PAGE])
    assert first.shm_name != second.shm_name
    assert (first.nbytes, second.nbytes) == (PAGE, 2 * PAGE)
    before = flat.copy()
    for larger in (flat, flat[PAGE : 3 * PAGE], flat[10 : PAGE + 10]):
        with pytest.raises(ValueError, match=r"were moved into segment .* before, the rest was not"):
            migrate_to_shm_and_wrap(larger)
        with pytest.raises(ValueError, match="were moved into segment"):
            kvshm.wrap(larger)
        assert not kvshm.is_shared(larger)
        assert np.array_equal(kvshm.share(larger), larger)
    assert np.array_equal(flat, before)


@pytest.mark.parametrize("owner", ["mmap", "array", "bytearray", "ctypes"])
def test_given_back_private_at_the_first_collection_after_the_last_user(owner: str) -> None:
    size = 9 * PAGE
    make: dict[str, Callable[[], Any]] = {
        "mmap": lambda: mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
        "array": lambda: np.zeros(size, np.uint8),
        "bytearray": lambda: bytearray(size),
        "ctypes": ctypes.c_uint8 * size,
    }
    keep = make[owner]()
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
        assert not kvshm.is_shared(other), "known by its address alone"
        del array
        gc.collect()
    assert len(names) == 3
    pages.unmap(address, PAGE)


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
    yield private_pages(1)[:-1], "only whole pages"
    yield private_pages(2)[1 : PAGE + 1], "only whole pages"
    yield private_pages(1).reshape(16, -1)[:, ::2], "only the first axis|allows none"
    yield private_pages(2).reshape(2, 4, -1)[:, 1:2], "gaps|only whole pages"
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
