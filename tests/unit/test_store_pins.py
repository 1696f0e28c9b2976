"""Pinned chunks: counted per reader, worker and chunk."""

from __future__ import annotations

import pytest

from kvshm.store.chunk_store import ChunkStore, Entry
from kvshm.store.pins import Found, PinnedChunks

NBYTES = 4096


class Cache:
    """A full store of four chunks."""

    def __init__(self) -> None:
        self.store = ChunkStore(4 * NBYTES)
        reservation = self.store.reserve([(name, NBYTES) for name in (b"a", b"b", b"c", b"d")])
        assert reservation
        self.store.commit(reservation)

    def pinned(self, *found: Found[Entry], num_readers: int = 1) -> PinnedChunks:
        return PinnedChunks(self.store, found, num_readers)

    def found(self, names: str, worker_id: int = 0, first_chunk: int = 0) -> Found[Entry]:
        entries = [entry for name in names if (entry := self.store.get(name.encode()))]
        assert len(entries) == len(names)
        return Found(worker_id, first_chunk, entries)

    @property
    def num_evictable(self) -> int:
        return len(self.store) - self.store.num_pinned


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_part_of_a_windowed_lookup_is_released(cache: Cache) -> None:
    """Its first pinned chunk is the prompt's third."""
    pins = cache.pinned(cache.found("cd", first_chunk=2))
    pins.release_all(0, range(2))
    assert (pins.num_pins, cache.num_evictable) == (2, 2)
    pins.release_one(0, range(3))
    assert (pins.num_pins, cache.num_evictable) == (1, 3)
    assert not pins.covers([cache.found("c")])
    assert pins.covers([cache.found("d")])
    pins.release_one(0, range(3, 4))
    assert pins.num_pins == 0


def test_one_reader(cache: Cache) -> None:
    pins = cache.pinned(cache.found("ab"))
    assert (cache.num_evictable, pins.num_pins) == (2, 2)
    pins.release_one(0, range(2))
    assert (cache.num_evictable, pins.num_pins) == (4, 0)
    pins.release_one(0, range(2))
    assert cache.num_evictable == 4


def test_every_reader_releases_one(cache: Cache) -> None:
    pins = cache.pinned(cache.found("ab"), num_readers=3)
    for left in (6, 4, 2):
        assert (pins.num_pins, pins.is_pinned(0), cache.num_evictable) == (left, True, 2)
        pins.release_one(0, range(2))
    assert (pins.num_pins, pins.is_pinned(0), cache.num_evictable) == (0, False, 4)


def test_a_worker_releases_its_own(cache: Cache) -> None:
    pins = cache.pinned(cache.found("a", 0), cache.found("b", 1))
    pins.release_one(1, range(1))
    pins.release_one(1, range(1))
    assert cache.num_evictable == 3
    assert (pins.is_pinned(0), pins.is_pinned(1), pins.is_pinned(None)) == (True, False, True)
    pins.release_all()
    assert cache.num_evictable == 4


def test_only_the_range_is_released(cache: Cache) -> None:
    pins = cache.pinned(cache.found("abc"), num_readers=2)
    pins.release_all(None, range(1, 2))
    assert cache.num_evictable == 2
    pins.release_one(0, range(1))
    assert cache.num_evictable == 2
    pins.release_all(0, range(3))
    assert cache.num_evictable == 4


def test_a_window_begins_later(cache: Cache) -> None:
    pins = cache.pinned(cache.found("abc"), cache.found("d", first_chunk=2))
    pins.release_one(0, range(2))
    assert cache.num_evictable == 2
    pins.release_one(0, range(2, 3))
    assert cache.num_evictable == 4
