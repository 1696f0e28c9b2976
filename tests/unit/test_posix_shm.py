"""The four primitives for callers that work with addresses."""

from __future__ import annotations

import ctypes

import pytest

import kvshm
from kvshm.posix_shm import shm_create_readwrite, shm_map_readwrite, shm_munmap, shm_unlink
from tests.support.memory import PAGE, exists, num_descriptors, num_mappings


def test_create_map_unmap_unlink(segment_name: str) -> None:
    before = num_descriptors()
    first = shm_create_readwrite(segment_name, 3 * PAGE + 7)
    second = shm_map_readwrite(segment_name, PAGE)
    assert first != second
    assert num_mappings(segment_name) == 2
    assert num_descriptors() == before
    ctypes.memset(first + 5, 0x5A, 1)
    assert ctypes.string_at(second, 7) == b"\0\0\0\0\0\x5a\0"
    shm_munmap(first)
    shm_munmap(first)
    assert ctypes.string_at(second + 5, 1) == b"\x5a"
    shm_unlink(segment_name)
    shm_unlink(segment_name)
    assert ctypes.string_at(second + 5, 1) == b"\x5a"
    shm_munmap(second, PAGE)
    shm_munmap(second, PAGE)
    assert num_mappings(segment_name) == 0


def test_names_with_and_without_the_slash(segment_name: str) -> None:
    shm_munmap(shm_create_readwrite(segment_name[1:], 5))
    shm_munmap(shm_map_readwrite(segment_name, 5))
    shm_unlink(segment_name[1:])
    assert not exists(segment_name)


def test_unmapping_takes_nothing_from_arrays() -> None:
    with kvshm.Segment.create(PAGE) as segment:
        array = segment.array((PAGE,), "uint8")
        address = shm_map_readwrite(segment.name, PAGE)
        assert address != segment.address
        shm_munmap(address)
        shm_munmap(segment.address)  # not theirs
        array[:] = 3
        assert num_mappings(segment.name) == 1


def test_refusals(segment_name: str) -> None:
    with pytest.raises(FileNotFoundError, match="there is no segment"):
        shm_map_readwrite(segment_name, 1)
    address = shm_create_readwrite(segment_name, 9)
    try:
        with pytest.raises(FileExistsError, match="exists already"):
            shm_create_readwrite(segment_name, 9)
        with pytest.raises(ValueError, match="has 9 bytes but 10 were to be mapped"):
            shm_map_readwrite(segment_name, 10)
        with pytest.raises(ValueError, match="at least 1, not 0"):
            shm_map_readwrite(segment_name, 0)
        with pytest.raises(ValueError, match=r"9 bytes are mapped .* not 5"):
            shm_munmap(address, 5)
        assert num_mappings(segment_name) == 1
    finally:
        shm_munmap(address)
        shm_unlink(segment_name)
    for call in (shm_unlink, lambda name: shm_create_readwrite(name, 1), lambda name: shm_map_readwrite(name, 1)):
        with pytest.raises(ValueError, match="cannot name a segment"):
            call("a/b")


def test_the_lock_is_held_until_the_last_unmapping(segment_name: str) -> None:
    first = shm_create_readwrite(segment_name, 5)
    second = shm_map_readwrite(segment_name, 5)
    shm_munmap(first)
    assert segment_name not in kvshm.sweep()
    shm_munmap(second)
    kvshm.sweep()
    assert not exists(segment_name)
