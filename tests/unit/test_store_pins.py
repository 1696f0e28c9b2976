"""Lookup pins: counted per reader, bound to their request, limited in time."""

from __future__ import annotations

import pytest

from kvshm.store.chunk_store import ChunkStore
from kvshm.store.pins import Found, LookupPins

NBYTES = 4096


class Cache:
    """A full store of four chunks, and pins over it."""

    def __init__(self) -> None:
        self.store = ChunkStore(4 * NBYTES)
        reservation = self.store.reserve([(name, NBYTES) for name in (b"a", b"b", b"c", b"d")])
        assert reservation
        self.store.commit(reservation)
        self.pins = LookupPins(self.store, ttl_s=7.0)

    def found(self, names: str, worker_id: int = 0) -> list[Found]:
        entries = [entry for name in names if (entry := self.store.get(name.encode()))]
        assert len(entries) == len(names)
        return [Found(worker_id, 0, entries)]

    @property
    def num_evictable(self) -> int:
        return len(self.store) - self.store.num_held


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_one_reader(cache: Cache) -> None:
    cache.pins.pin("r", 2, cache.found("ab"), 1, now=0.0)
    assert cache.num_evictable == 2
    cache.pins.release_one("r", 0, range(2))
    assert cache.num_evictable == 4
    cache.pins.release_one("r", 0, range(2))
    assert cache.num_evictable == 4


def test_every_reader_releases_one(cache: Cache) -> None:
    cache.pins.pin("r", 2, cache.found("ab"), 3, now=0.0)
    for left in (6, 4, 2):
        assert cache.pins.num_pins == left
        assert cache.num_evictable == 2
        cache.pins.release_one("r", 0, range(2))
    assert cache.num_evictable == 4


def test_a_worker_releases_its_own(cache: Cache) -> None:
    cache.pins.pin("r", 1, cache.found("a", 0) + cache.found("b", 1), 1, now=0.0)
    cache.pins.release_one("r", 1, range(1))
    cache.pins.release_one("r", 1, range(1))
    assert cache.num_evictable == 3
    cache.pins.release_all("r", None, range(1))
    assert cache.num_evictable == 4


def test_only_the_range_is_released(cache: Cache) -> None:
    cache.pins.pin("r", 3, cache.found("abc"), 2, now=0.0)
    cache.pins.release_all("r", None, range(1, 2))
    assert cache.num_evictable == 2
    cache.pins.release_one("r", 0, range(1))
    assert cache.num_evictable == 2
    cache.pins.release_all("r", 0, range(3))
    assert cache.num_evictable == 4


def test_another_request_cannot_use_them_up(cache: Cache) -> None:
    cache.pins.pin("r", 2, cache.found("ab"), 1, now=0.0)
    cache.pins.release_one("s", 0, range(2))
    cache.pins.release_all("s", None, range(2))
    cache.pins.end("s")
    assert cache.num_evictable == 2


def test_a_result_is_handed_out_once(cache: Cache) -> None:
    cache.pins.pin("r", 2, cache.found("ab"), 1, now=0.0)
    assert [cache.pins.result("r"), cache.pins.result("r"), cache.pins.result("s")] == [2, 0, 0]
    cache.pins.release_one("r", 0, range(2))
    assert len(cache.pins) == 0


def test_the_result_outlives_the_pins(cache: Cache) -> None:
    cache.pins.pin("r", 2, cache.found("ab"), 1, now=0.0)
    cache.pins.release_one("r", 0, range(2))
    assert cache.pins.result("r") == 2
    assert len(cache.pins) == 0


def test_a_new_lookup_of_a_request_replaces_the_old(cache: Cache) -> None:
    cache.pins.pin("r", 2, cache.found("ab"), 5, now=0.0)
    cache.pins.pin("r", 1, cache.found("a"), 1, now=1.0)
    assert cache.num_evictable == 3
    assert cache.pins.result("r") == 1


def test_pins_expire(cache: Cache) -> None:
    for number in range(100):
        cache.pins.pin(f"r{number}", 2, cache.found("ab"), 1, now=float(number))
    assert cache.pins.expire(now=6.0) == 0
    assert cache.pins.expire(now=57.0) == 51
    assert cache.num_evictable == 2
    assert cache.pins.expire(now=106.0) == 49
    assert cache.num_evictable == 4
    assert len(cache.pins) == 0


def test_end_all(cache: Cache) -> None:
    cache.pins.pin("r", 2, cache.found("ab"), 2, now=0.0)
    cache.pins.pin("s", 2, cache.found("cd"), 1, now=0.0)
    cache.pins.end_all()
    assert cache.num_evictable == 4
