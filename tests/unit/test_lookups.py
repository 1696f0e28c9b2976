"""Lookups: whose they are, what uses them up, and that nothing stays pinned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from kvshm.layout import ObjectLayout
from kvshm.server.hits import Hit, Need, longest_hit
from kvshm.server.lookups import EngineLookups, PlainLookups, Scope
from kvshm.store.chunk_store import ChunkStore, Entry
from kvshm.store.pins import Found

NBYTES = 4096
TWO: Scope = ("model", 2, "")
ONE: Scope = ("model", 1, "")


def name(worker_id: int, chunk: bytes) -> bytes:
    return b"%d %s" % (worker_id, chunk)


class Cache:
    """A store of the chunks a, b and c of two workers."""

    def __init__(self) -> None:
        self.store = ChunkStore(7 * NBYTES)
        names = [name(worker_id, chunk) for worker_id in (0, 1) for chunk in (b"a", b"b", b"c")]
        reservation = self.store.reserve([(each, NBYTES) for each in names])
        assert reservation
        self.store.commit(reservation)
        self.searched: list[list[int]] = []

    def hit(self, workers: Iterable[int], hashes: Sequence[bytes]) -> Hit[Entry]:
        needs = [Need(worker_id, ObjectLayout(b"", NBYTES)) for worker_id in workers]
        return longest_hit(
            needs,
            len(hashes),
            lambda need, count: [self.store.get(name(need.worker_id, chunk)) for chunk in hashes[:count]],
        )

    @property
    def held(self) -> list[int]:
        """Pinned chunks of each worker."""
        return [
            sum(entry is not None and entry.ref_count > 0 for entry in map(self.store.get, names))
            for names in ([name(worker_id, chunk) for chunk in (b"a", b"b", b"c")] for worker_id in (0, 1))
        ]


@pytest.fixture
def cache() -> Cache:
    return Cache()


class Engines:
    """Engines by number; engine n is worker n % 2."""

    def __init__(self, cache: Cache, scope: Scope = TWO) -> None:
        self.cache, self.scope = cache, scope
        self.lookups = EngineLookups(cache.store, ttl_s=7.0)

    def worker(self, engine: int) -> int:
        return engine % self.scope[1]

    def look_up(self, engine: int, chunks: str, request: str | None, now: float = 0.0) -> int:
        hashes = [chunk.encode() for chunk in chunks]
        return self.lookups.look_up(
            self.scope,
            request,
            engine,
            self.worker(engine),
            hashes,
            lambda workers, count: self.cache.hit(workers, hashes[:count]),
            now,
        )

    def retrieve(self, engine: int, chunks: str, request: str | None) -> None:
        hashes = [chunk.encode() for chunk in chunks]
        named = [self.cache.store.get(name(self.worker(engine), each)) for each in hashes]
        entries = [entry for entry in named if entry]
        self.lookups.use_up(self.scope, request, engine, self.worker(engine), hashes, entries)


@pytest.fixture
def engines(cache: Cache) -> Engines:
    return Engines(cache)


def test_without_a_request_an_engine_pins_its_own(cache: Cache, engines: Engines) -> None:
    assert engines.look_up(0, "abx", None) == 2
    assert cache.held == [2, 0]
    assert engines.look_up(1, "ab", None) == 2
    assert (cache.held, len(engines.lookups), engines.lookups.num_pins) == ([2, 2], 2, 4)
    engines.retrieve(0, "ab", None)
    assert cache.held == [0, 2]
    engines.retrieve(1, "a", None)
    assert cache.held == [0, 0], "also what it did not retrieve"


def test_each_retrieve_uses_up_one_lookup(cache: Cache, engines: Engines) -> None:
    engines.look_up(0, "ab", None)
    engines.look_up(0, "abc", None)
    engines.retrieve(0, "abc", None)
    assert cache.held == [2, 0]
    engines.retrieve(0, "abc", None)
    assert cache.held == [2, 0], "that one found too little"
    engines.retrieve(0, "ab", None)
    engines.retrieve(0, "ab", None)
    assert cache.held == [0, 0]


def test_a_request_pins_for_all_workers(cache: Cache, engines: Engines) -> None:
    assert engines.look_up(0, "abc", "r") == 3
    assert cache.held == [3, 3]
    engines.retrieve(1, "abc", "r")
    assert cache.held == [3, 0]
    engines.retrieve(1, "abc", "r")
    assert cache.held == [3, 0], "a worker uses up its own"
    engines.retrieve(0, "abc", "r")
    assert (cache.held, len(engines.lookups)) == ([0, 0], 0)


def test_workers_of_one_request_get_one_answer(cache: Cache, engines: Engines) -> None:
    assert engines.look_up(0, "ab", "r") == 2
    assert engines.look_up(1, "abc", "r") == 2, "more than its first lookup found is not pinned for both"
    assert engines.lookups.num_pins == 4
    engines.retrieve(0, "ab", "r")
    engines.retrieve(1, "ab", "r")
    assert (cache.held, len(engines.lookups)) == ([0, 0], 0)


def test_a_second_lookup_replaces_the_first(cache: Cache, engines: Engines) -> None:
    for chunks in ("a", "ab", "abc", "ab"):
        assert engines.look_up(0, chunks, "r") == len(chunks)
    assert (cache.held, engines.lookups.num_pins) == ([2, 2], 4)
    assert engines.look_up(0, "x", "r") == 0
    assert cache.held == [0, 0]


def test_a_worker_that_has_retrieved_is_not_pinned_for_again(cache: Cache, engines: Engines) -> None:
    """A preempted request looks up again while another worker's retrieve is done already."""
    engines.look_up(0, "ab", "r")
    engines.retrieve(1, "ab", "r")
    assert engines.look_up(0, "ab", "r") == 2
    assert cache.held == [2, 0]
    engines.retrieve(0, "ab", "r")
    assert cache.held == [0, 0]


def test_a_request_id_that_is_used_again_is_another_request(cache: Cache, engines: Engines) -> None:
    engines.look_up(0, "ab", "r")
    engines.retrieve(0, "ab", "r")
    assert cache.held == [0, 2]
    assert engines.look_up(0, "bc", "r") == 2, "another prompt"
    assert (cache.held, len(engines.lookups)) == ([2, 2], 1)
    engines.retrieve(0, "bc", "r")
    engines.retrieve(1, "bc", "r")
    assert cache.held == [0, 0]
    engines.look_up(0, "ab", "r")
    engines.retrieve(0, "ab", "r")
    engines.retrieve(1, "ab", "r")
    assert engines.look_up(0, "ab", "r") == 2, "the same prompt"
    assert cache.held == [2, 2]


def test_replicas_do_not_share_a_request(cache: Cache, engines: Engines) -> None:
    """Engine 2 is worker 0 of another replica, which counts its requests for itself."""
    engines.look_up(0, "ab", "0")
    engines.look_up(2, "ab", "0")
    assert engines.lookups.num_pins == 8
    engines.retrieve(0, "ab", "0")
    engines.retrieve(2, "ab", "0")
    assert cache.held == [0, 2]


def test_requests_of_other_models_are_other_requests(cache: Cache) -> None:
    lookups = EngineLookups(cache.store, 7.0)
    hashes = [b"a"]

    def search(workers: Iterable[int], count: int) -> Hit[Entry]:
        return cache.hit(workers, hashes[:count])

    for scope in (TWO, ("model", 2, "salt"), ("other", 2, "")):
        assert lookups.look_up(scope, "r", 0, 0, hashes, search, 0.0) == 1
    (entry,) = cache.hit([1], hashes).found[0].entries
    lookups.use_up(TWO, "r", 1, 1, hashes, [entry])
    assert lookups.num_pins == 5


def test_release(cache: Cache, engines: Engines) -> None:
    engines.look_up(0, "abc", "r")
    engines.lookups.release(TWO, "r", 1, 1)
    assert cache.held == [0, 0], "of another worker's lookup too"
    engines.look_up(0, "ab", None)
    engines.look_up(0, "abc", None)
    engines.lookups.release_latest(0, [b"x"])
    assert engines.lookups.num_pins == 5
    engines.lookups.release_latest(0, [b"a", b"b"])
    assert engines.lookups.num_pins == 2, "the latest that is about these"
    engines.look_up(0, "abc", "r")
    engines.lookups.end_of(0)
    assert (cache.held, len(engines.lookups)) == ([0, 0], 0)


def test_an_engine_that_never_retrieves_does_not_fill_the_books(cache: Cache, engines: Engines) -> None:
    for number in range(1000):
        engines.look_up(0, "abc", None if number % 2 else str(number))
    assert len(engines.lookups) == 256
    engines.look_up(1, "a", None)
    assert len(engines.lookups) == 257, "each engine for itself"


def test_pins_end_by_themselves(cache: Cache, engines: Engines) -> None:
    for number in range(100):
        engines.look_up(0, "ab", str(number), now=float(number))
    assert engines.lookups.expire(6.0) == 0
    assert engines.lookups.expire(57.0) == 51
    assert cache.held == [2, 2]
    assert engines.lookups.expire(106.0) == 49
    assert cache.held == [0, 0]
    engines.look_up(0, "ab", "r")
    engines.lookups.end_all()
    assert (cache.held, len(engines.lookups)) == ([0, 0], 0)


def test_the_oldest_of_many_is_looked_up_again(cache: Cache, engines: Engines) -> None:
    for number in range(256):
        engines.look_up(0, "abc", str(number))
    assert engines.look_up(0, "ab", "0") == 2
    assert len(engines.lookups) == 256
    for number in range(256):
        engines.lookups.release(TWO, str(number), 0, 0)
    assert (cache.held, engines.lookups.num_pins) == ([0, 0], 0)


def test_nobody_is_promised_more_than_another_has_retrieved(cache: Cache, engines: Engines) -> None:
    """What is stored between two lookups of a request is not found by the second, once a worker has used the first."""
    assert engines.look_up(0, "ab", "r") == 2
    engines.retrieve(1, "ab", "r")
    assert engines.look_up(0, "abc", "r") == 2
    engines.retrieve(0, "ab", "r")
    assert (cache.held, len(engines.lookups)) == ([0, 0], 0)


def test_what_another_worker_was_promised_is_not_replaced(cache: Cache, engines: Engines) -> None:
    assert engines.look_up(0, "ab", "r") == 2
    assert engines.look_up(1, "ab", "r") == 2
    assert engines.look_up(0, "abc", "r") == 2
    assert engines.look_up(0, "a", "r") == 1
    assert cache.held == [2, 2]
    engines.lookups.end_of(0)
    assert cache.held == [0, 2], "the engine that asked first has gone"
    engines.retrieve(1, "ab", "r")
    assert (cache.held, len(engines.lookups)) == ([0, 0], 0)


def test_a_lookup_that_does_not_serve_a_worker_is_not_joined(cache: Cache, engines: Engines) -> None:
    """The layout of engine 1 has objects of its own, of which only the first chunk is cached."""
    reservation = cache.store.reserve([(b"other layout a", NBYTES)])
    assert reservation
    cache.store.commit(reservation)
    assert engines.look_up(0, "abc", "r") == 3

    def search(workers: Iterable[int], count: int) -> Hit[Entry]:
        names = {0: "0 %s", 1: "other layout %s"}
        needs = [Need(worker_id, ObjectLayout(b"", NBYTES)) for worker_id in workers]
        return longest_hit(
            needs,
            count,
            lambda need, count: [cache.store.get((names[need.worker_id] % each).encode()) for each in "abc"[:count]],
        )

    assert engines.lookups.look_up(TWO, "r", 1, 1, [b"a", b"b", b"c"], search, 0.0) == 1
    engines.lookups.use_up(TWO, "r", 3, 1, [b"a"], search([1], 1).found[0].entries)
    assert engines.lookups.num_pins == 8, "that is another replica's"
    engines.retrieve(1, "a", "r")
    assert cache.held == [3, 3], "the first is as it was"


def test_an_engine_that_has_retrieved_begins_anew_whoever_still_waits(cache: Cache, engines: Engines) -> None:
    engines.look_up(0, "ab", "r")
    engines.look_up(1, "ab", "r")
    engines.retrieve(0, "ab", "r")
    assert engines.look_up(0, "abc", "r") == 3, "another request of the same id"
    assert cache.held == [3, 3]
    engines.retrieve(1, "ab", "r")
    assert engines.look_up(1, "abc", "r") == 3
    engines.retrieve(0, "abc", "r")
    engines.retrieve(1, "abc", "r")
    assert (cache.held, len(engines.lookups)) == ([0, 0], 0)


def test_a_worker_that_is_done_is_not_pinned_for_by_a_shorter_lookup(cache: Cache, engines: Engines) -> None:
    """A window of one chunk: the shorter prefix needs another one than is pinned."""

    def search(workers: Iterable[int], count: int) -> Hit[Entry]:
        needs = [Need(worker_id, ObjectLayout(b"", NBYTES, 1)) for worker_id in workers]
        return longest_hit(
            needs,
            count,
            lambda need, count: [cache.store.get(name(need.worker_id, each.encode())) for each in "abc"[:count]],
        )

    def look_up(chunks: str) -> int:
        return engines.lookups.look_up(TWO, "r", 0, 0, [each.encode() for each in chunks], search, 0.0)

    assert look_up("abc") == 3
    assert cache.held == [1, 1]
    engines.retrieve(1, "abc", "r")
    assert look_up("ab") == 2
    assert cache.held == [1, 0]
    assert look_up("a") == 1
    assert (cache.held, engines.lookups.num_pins) == ([1, 0], 1)


def test_replicas_do_not_use_up_each_others(cache: Cache, engines: Engines) -> None:
    """Engines 0 and 1 are one replica, 2 and 3 another; both count their requests from 0."""
    engines.look_up(0, "ab", "0")
    engines.look_up(2, "ab", "0")
    engines.lookups.release(TWO, "0", 1, 1)
    assert engines.lookups.num_pins == 8, "it is not told which is meant"
    engines.retrieve(1, "ab", "0")
    assert engines.lookups.num_pins == 6, "of one of them"
    engines.lookups.release(TWO, "0", 1, 1)
    assert engines.lookups.num_pins == 4, "of the same one"
    engines.lookups.release(TWO, "0", 0, 0)
    assert engines.lookups.num_pins == 4, "it is not told whose the other is"
    engines.retrieve(3, "ab", "0")
    engines.retrieve(2, "ab", "0")
    assert (cache.held, len(engines.lookups)) == ([0, 0], 0)


def test_a_share_that_was_promised_is_nobody_elses(cache: Cache, engines: Engines) -> None:
    engines.look_up(0, "ab", "r")
    assert engines.look_up(1, "ab", "r") == 2
    engines.retrieve(3, "ab", "r")
    assert cache.held == [2, 2]
    assert engines.look_up(3, "abc", "r") == 3, "a lookup of its own"
    engines.retrieve(1, "ab", "r")
    engines.retrieve(0, "ab", "r")
    assert cache.held == [3, 3]


def test_joining_lets_pins_last_longer(cache: Cache, engines: Engines) -> None:
    engines.look_up(0, "ab", "r", now=0.0)
    engines.look_up(0, "a", "s", now=5.0)
    engines.look_up(1, "ab", "r", now=6.0)
    assert engines.lookups.expire(12.5) == 1
    assert cache.held == [2, 2]
    assert engines.lookups.expire(13.0) == 1


# LMCache's frames, of which only the connection is known


class Plain:
    """Looks up as a connection."""

    def __init__(self, cache: Cache, scope: Scope = ONE) -> None:
        self.cache, self.scope = cache, scope
        self.lookups = PlainLookups(cache.store, ttl_s=7.0)

    def look_up(self, connection: bytes, chunks: str, request: str = "r", readers: int = 1, now: float = 0.0) -> None:
        hashes = [chunk.encode() for chunk in chunks]
        hit = self.cache.hit(range(self.scope[1]), hashes)
        self.lookups.look_up(connection, self.scope, request, hashes, hit, readers, now)

    def retrieve(self, connection: bytes, chunks: str, worker_id: int = 0, request: str = "r") -> None:
        hashes = [chunk.encode() for chunk in chunks]
        self.lookups.release_one(connection, self.scope, request, hashes, worker_id, range(len(hashes)))


@pytest.fixture
def plain(cache: Cache) -> Plain:
    return Plain(cache)


def test_each_connection_gets_its_own_result_once(plain: Plain) -> None:
    plain.look_up(b"1", "ab")
    plain.look_up(b"2", "xyz")
    plain.look_up(b"3", "abc")
    results = [plain.lookups.result(connection, "r") for connection in (b"1", b"2", b"3", b"4")]
    assert results == [2, 0, 3, 0]
    assert [plain.lookups.result(connection, "r") for connection in (b"1", b"2", b"3")] == [0, 0, 0]
    assert plain.lookups.result(b"1", "s") == 0


def test_each_connection_uses_up_its_own(cache: Cache, plain: Plain) -> None:
    plain.look_up(b"1", "abc")
    plain.look_up(b"2", "abc")
    plain.retrieve(b"2", "abc")
    assert plain.lookups.num_pins == 3
    plain.retrieve(b"2", "abc")
    assert cache.held == [0, 0], "a worker of the same engine may speak over another connection"


def test_a_workers_retrieve_comes_over_another_connection(cache: Cache) -> None:
    plain = Plain(cache, TWO)
    plain.look_up(b"scheduler", "ab")
    plain.look_up(b"else", "c")
    plain.retrieve(b"worker 0", "ab", 0)
    assert cache.held == [1, 3]
    plain.retrieve(b"worker 1", "ab", 1)
    assert cache.held == [1, 1]
    plain.retrieve(b"worker 1", "ab", 1)
    assert cache.held == [1, 1], "the other's is about other chunks"


def test_a_result_outlives_the_pins(cache: Cache, plain: Plain) -> None:
    plain.look_up(b"1", "ab")
    plain.retrieve(b"1", "ab")
    assert (cache.held, len(plain.lookups)) == ([0, 0], 1)
    assert plain.lookups.result(b"1", "r") == 2
    assert len(plain.lookups) == 0


def test_a_new_lookup_replaces_the_old_one_of_its_connection(cache: Cache, plain: Plain) -> None:
    plain.look_up(b"1", "abc", readers=5)
    plain.look_up(b"1", "a")
    assert (plain.lookups.num_pins, plain.lookups.result(b"1", "r")) == (1, 1)


def test_locks_are_freed_in_a_range(cache: Cache, plain: Plain) -> None:
    plain.look_up(b"1", "abc", readers=2)
    plain.lookups.release_all(b"1", ONE, "r", [b"a", b"b"], None, range(1, 2))
    assert cache.held == [2, 0]
    plain.lookups.release_all(b"1", ONE, "s", [b"a"], None, range(1))
    plain.lookups.release_all(b"1", TWO, "r", [b"a"], None, range(1))
    assert cache.held == [2, 0], "another request, another world"
    plain.lookups.release_all(b"1", ONE, "r", [b"a", b"b", b"c"], 0, range(3))
    assert cache.held == [0, 0]


def test_the_end_of_a_session(cache: Cache, plain: Plain) -> None:
    plain.look_up(b"1", "ab")
    plain.look_up(b"2", "abc")
    plain.lookups.end(b"3", "r", ())
    assert plain.lookups.num_pins == 5, "whose session that is, is not known"
    plain.lookups.end(b"1", "r", ())
    assert plain.lookups.num_pins == 3
    plain.lookups.end(b"3", "r", [("else", 1)])
    assert plain.lookups.num_pins == 3
    plain.lookups.end(b"3", "r", [("model", 1)])
    assert cache.held == [0, 0], "there is but one that it can be"


def test_a_session_ends_over_the_connection_that_retrieved(cache: Cache, plain: Plain) -> None:
    plain.look_up(b"1", "ab", readers=2)
    plain.look_up(b"2", "c", readers=2)
    plain.retrieve(b"3", "ab")
    plain.lookups.end(b"3", "r", ())
    assert (cache.held, plain.lookups.num_pins) == ([1, 0], 2), "the other's stays"


@pytest.mark.parametrize("told", [False, True])
def test_plain_lookups_end_by_themselves(cache: Cache, plain: Plain, told: bool) -> None:
    plain.look_up(b"1", "ab", now=1.0)
    if told:
        assert plain.lookups.result(b"1", "r") == 2
    assert plain.lookups.expire(7.9) == 0
    assert plain.lookups.expire(8.0) == 1
    assert cache.held == [0, 0]
    assert plain.lookups.result(b"1", "r") == 0
    plain.look_up(b"1", "ab", now=9.0)
    plain.lookups.end_all()
    assert (cache.held, len(plain.lookups)) == ([0, 0], 0)


def test_a_session_that_found_nothing_ends_no_others(cache: Cache, plain: Plain) -> None:
    """Two engines that count their requests from 0."""
    plain.look_up(b"1", "xy", "0")
    plain.look_up(b"2", "ab", "0")
    assert plain.lookups.result(b"1", "0") == 0
    plain.lookups.end(b"1", "0", [("model", 1)])
    assert cache.held == [2, 0]
    assert plain.lookups.result(b"2", "0") == 2


def test_a_client_that_never_asks_for_results_does_not_fill_the_books(cache: Cache, plain: Plain) -> None:
    plain.look_up(b"2", "abc", "mine")
    for number in range(20_000):
        plain.look_up(b"1", "ab", str(number))
    assert len(plain.lookups) == 10_001
    assert plain.lookups.result(b"2", "mine") == 3, "each for itself"
    assert plain.lookups.result(b"1", "0") == 0, "the oldest went"


def test_ended_plain_lookups_are_forgotten(plain: Plain) -> None:
    for number in range(30_000):
        request = str(number)
        plain.look_up(b"1", "a", request)
        plain.lookups.result(b"1", request)
        plain.retrieve(b"1", "a", request=request)
    known: Any = plain.lookups
    assert len(known) == 0
    assert len(known._lookups) <= 20_000


# The search


def found_row(row: str) -> list[str | None]:
    return [None if each == "." else each for each in row]


@pytest.mark.parametrize(
    ("rows", "windows", "expected"),
    [
        (["abc"], [-1], 3),
        (["a.c"], [-1], 1),
        (["..c"], [1], 3),
        (["..."], [1], 0),
        (["abc", "..c"], [-1, 1], 3),
        (["abc", ".b."], [-1, 1], 2),
        (["ab.", "a.c"], [-1, 1], 1),
        (["abc", ".bc", "..."], [-1, 2, 1], 0),
        (["abc", ".bc", "..c"], [-1, 2, 1], 3),
        (["abc", "a.c"], [-1, 2], 1),
        (["...", "abc"], [-1, 1], 0),
        ([".bc", "abc"], [2, -1], 3),
        (["a", "a"], [-1, 7], 1),
    ],
)
def test_longest_hit(rows: list[str], windows: list[int], expected: int) -> None:
    needs = [Need(0, ObjectLayout(bytes([group]), 1, window)) for group, window in enumerate(windows)]
    table = {need: found_row(row) for need, row in zip(needs, rows, strict=True)}
    for given in (needs, needs[::-1], [*needs, *needs]):
        hit: Hit[Any] = longest_hit(given, len(rows[0]), lambda need, count: table[need][:count])
        assert hit.num_chunks == expected
        assert len(hit.found) == (len(needs) if expected else 0)
        for part in hit.found:
            assert isinstance(part, Found)
            assert None not in part.entries
            assert part.first_chunk + len(part.entries) == expected


def test_nothing_needed_is_no_hit() -> None:
    """No engine is registered that could retrieve."""
    hit: Hit[Any] = longest_hit([], 3, lambda need, count: ["x"] * count)
    assert hit.num_chunks == 0
