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
        self.store = ChunkStore(6 * NBYTES)
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
            sum(entry is not None and entry.num_holds > 0 for entry in map(self.store.get, names))
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
            lambda workers: self.cache.hit(workers, hashes),
            now,
        )

    def retrieve(self, engine: int, chunks: str, request: str | None) -> None:
        hashes = [chunk.encode() for chunk in chunks]
        self.lookups.use_up(self.scope, request, engine, self.worker(engine), hashes)


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
    for scope in (TWO, ("model", 2, "salt"), ("other", 2, "")):
        assert lookups.look_up(scope, "r", 0, 0, hashes, lambda workers: cache.hit(workers, hashes), 0.0) == 1
    lookups.use_up(TWO, "r", 1, 1, hashes)
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
