"""Slabs and the chunk store: room, holds, visibility, eviction order."""

from __future__ import annotations

import pytest

from kvshm.store.chunk_store import ChunkStore, Reservation
from kvshm.store.slabs import SlabAllocator

KIB = 1024


def put(store: ChunkStore, *names: str, nbytes: int = 4 * KIB) -> None:
    store.commit(reserve(store, *names, nbytes=nbytes))


def reserve(store: ChunkStore, *names: str, nbytes: int = 4 * KIB) -> Reservation:
    reservation = store.reserve([(name.encode(), nbytes) for name in names])
    assert reservation is not None
    return reservation


def cached(store: ChunkStore, names: str) -> str:
    return "".join(name for name in names if store.get(name.encode()))


def test_an_object_is_visible_after_commit_only() -> None:
    store = ChunkStore(64 * KIB)
    reservation = reserve(store, "a", "b")
    assert cached(store, "ab") == ""
    assert store.num_unfinished == 2
    store.commit(reservation)
    assert cached(store, "ab") == "ab"
    assert store.num_unfinished == 0
    assert store.num_pinned == 0


def test_abort_gives_the_room_back() -> None:
    store = ChunkStore(8 * KIB)
    for _ in range(5):
        store.abort(reserve(store, "a", "b"))
    put(store, "c", "d")
    assert cached(store, "abcd") == "cd"
    assert store.stats.aborted == 10
    assert store.stats.evicted == 0


@pytest.mark.parametrize("nbytes", [1, 63, 64, 1000, 4 * KIB, 7 * 11 * 13 * 17, 1 << 20])
@pytest.mark.parametrize("count", [1, 3, 10])
def test_a_pool_made_for_n_objects_holds_n(nbytes: int, count: int) -> None:
    store = ChunkStore(nbytes * count if nbytes >= 1000 else 64 * count)
    put(store, *"abcdefghij"[:count], nbytes=nbytes)
    assert len(store) == count
    assert store.stats.evicted == 0


def test_the_least_recently_used_goes_first() -> None:
    store = ChunkStore(16 * KIB)
    for name in "abcd":
        put(store, name)
    entry = store.get(b"a")
    assert entry
    store.pin([entry])
    store.unpin([entry])  # used again
    put(store, "e")
    assert cached(store, "abcde") == "acde"
    put(store, "f")
    assert cached(store, "abcdef") == "adef"


def test_the_head_of_a_prefix_is_evicted_last() -> None:
    store = ChunkStore(16 * KIB)
    put(store, "a", "b", "c", "d")
    put(store, "x")
    assert cached(store, "abcd") == "abc"


def test_what_is_held_stays() -> None:
    store = ChunkStore(16 * KIB)
    put(store, "a", "b", "c", "d")
    held = [entry for name in "ab" if (entry := store.get(name.encode()))]
    store.pin(held)
    put(store, "x", "y")
    assert cached(store, "abcdxy") == "abxy"
    assert store.reserve([(name, 4 * KIB) for name in (b"p", b"q", b"r")]) is None
    assert cached(store, "abcdxy") == "abxy", "a hopeless store must evict nothing"
    store.unpin(held)
    put(store, "p", "q", "r")
    assert len(store) == 4


def test_all_or_nothing() -> None:
    store = ChunkStore(16 * KIB)
    put(store, "a")
    assert store.reserve([(bytes([n]), 4 * KIB) for n in range(5)]) is None
    assert cached(store, "a") == "a"
    assert store.stats.refused == 1
    assert store.num_unfinished == 0


def test_a_store_does_not_evict_its_own_prefix() -> None:
    store = ChunkStore(16 * KIB)
    put(store, "a", "b", "c", "d")
    put(store, "a", "b", "x")
    assert cached(store, "abx") == "abx"


def test_two_stores_of_one_key_both_finish() -> None:
    store = ChunkStore(16 * KIB)
    one, two = reserve(store, "a"), reserve(store, "a")
    assert one.new[b"a"].offset != two.new[b"a"].offset
    store.commit(two)
    first = store.get(b"a")
    store.commit(one)
    assert store.get(b"a") is first
    assert store.stats.duplicates == 1
    assert store.num_unfinished == 0


def test_another_size_of_a_key_is_refused() -> None:
    store = ChunkStore(16 * KIB)
    put(store, "a", nbytes=100)
    with pytest.raises(ValueError, match="cached with 100 bytes, now it has 200"):
        store.reserve([(b"a", 200)])
    with pytest.raises(ValueError, match="names one object twice"):
        store.reserve([(b"b", 200), (b"b", 200)])
    assert store.num_pinned == 0


def test_clear_spares_what_is_held_and_hide_does_not() -> None:
    store = ChunkStore(16 * KIB)
    put(store, "a", "b")
    entry = store.get(b"a")
    assert entry
    store.pin([entry])
    assert store.clear() == 1
    assert cached(store, "ab") == "a"
    assert store.hide() == 1
    assert cached(store, "ab") == ""
    assert store.num_unfinished == 1, "a reader's bytes stay"
    store.unpin([entry])
    assert store.num_unfinished == 0
    put(store, "a", "b", "c", "d")
    assert len(store) == 4


def test_the_pool_goes_over_to_another_layout() -> None:
    """A model is replaced by one with larger chunks, then with smaller ones: all room is usable each time."""
    store = ChunkStore(1 << 20)
    for nbytes in (4 * KIB, 100 * KIB, 1 << 20, 3 * KIB, 333 * KIB):
        count = (1 << 20) // (-(-nbytes // 64) * 64)
        fitting = 0
        for number in range(2 * count):
            put(store, f"{nbytes}-{number}", nbytes=nbytes)
        fitting = sum(1 for number in range(2 * count) if store.get(f"{nbytes}-{number}".encode()))
        assert fitting >= count * 0.98 - 1
        assert store.allocator.busy_nbytes == 0


def test_a_warm_neighbourhood_is_left_alone() -> None:
    store = ChunkStore(64 * KIB)
    for number in range(16):
        put(store, f"old{number}", nbytes=2 * KIB)
    for number in range(4):
        put(store, f"big{number}", nbytes=8 * KIB)
    put(store, "big4", nbytes=8 * KIB)  # the small ones are older than any big one
    assert all(store.get(f"big{number}".encode()) for number in range(5))
    survivors = sum(1 for number in range(16) if store.get(f"old{number}".encode()))
    assert survivors == 12


def test_granules_stay_few_for_any_capacity() -> None:
    for capacity in (1, 4096, 10**6, 4 << 30, 1 << 42):
        allocator = SlabAllocator(capacity)
        assert capacity <= allocator.nbytes <= capacity + max(64, capacity // 2048 + min(capacity // 16, 1 << 20))


def test_a_store_needs_capacity() -> None:
    with pytest.raises(ValueError, match="needs at least 1"):
        ChunkStore(0)


def test_what_was_used_last_counts_between_slabs() -> None:
    """Of two large objects the one that was made first was used again: the other is the coldest."""
    store = ChunkStore(10 * KIB)
    for name in ("large 1", "large 2"):
        put(store, name, nbytes=4 * KIB)
    put(store, "small 1", nbytes=2 * KIB)
    used = store.get(b"large 1")
    assert used
    store.pin([used])
    store.unpin([used])
    put(store, "small 2", nbytes=2 * KIB)
    left = [name for name in ("large 1", "large 2", "small 1", "small 2") if store.get(name.encode())]
    assert left == ["large 1", "small 1", "small 2"]
