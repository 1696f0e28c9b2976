"""What an engine was promised stays pinned until it retrieves, releases or goes, whatever other engines do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvshm.layout import ObjectLayout
from kvshm.server.hits import Hit, Need, longest_hit
from kvshm.server.lookups import EngineLookups, Scope
from kvshm.store.chunk_store import ChunkStore, Entry

pytestmark = pytest.mark.slow

NBYTES = 4096
NUM_CHUNKS = 4
WORLD: Scope = ("model", 2, "")


@dataclass(frozen=True)
class Engine:
    """One engine: a worker with a layout of some object groups, each with its window in chunks (-1: all)."""

    instance_id: int
    worker_id: int
    layout: str
    windows: tuple[int, ...]

    def needs(self) -> list[Need]:
        return [
            Need(self.worker_id, ObjectLayout(f"{self.layout}{group}".encode(), NBYTES, window))
            for group, window in enumerate(self.windows)
        ]


# Two replicas of one layout, and a third whose layout has the same first group and a window.
ENGINES = (
    Engine(0, 0, "a", (-1,)),
    Engine(1, 1, "a", (-1,)),
    Engine(2, 0, "a", (-1,)),
    Engine(3, 1, "a", (-1,)),
    Engine(4, 0, "a", (-1, 1)),
    Engine(5, 1, "a", (-1, 1)),
    Engine(6, 1, "b", (2,)),
)
engines = st.sampled_from(ENGINES)
prompts = st.sampled_from(["xy", "xz"])
requests = st.sampled_from([None, "0", "0", "1"])
lengths = st.integers(1, NUM_CHUNKS)


def hashes_of(prompt: str, num_chunks: int) -> list[bytes]:
    """Of prompts that begin alike."""
    return [(prompt[0] * (index + 1) if index < 2 else prompt * index).encode() for index in range(num_chunks)]


class PromiseMachine(RuleBasedStateMachine):
    """Engines of two workers look up, retrieve, release and go; objects come and are evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.store = ChunkStore(24 * NBYTES)
        self.lookups = EngineLookups(self.store, ttl_s=1e9)
        self.promised: dict[tuple[Engine, str], tuple[str, int]] = {}
        self.now = 0.0

    def hit(self, needs: list[Need], hashes: list[bytes]) -> Hit[Entry]:
        return longest_hit(
            needs,
            len(hashes),
            lambda need, count: [self.store.get(self.key(need, each)) for each in hashes[:count]],
        )

    @staticmethod
    def key(need: Need, chunk_hash: bytes) -> bytes:
        return b"%d %s %s" % (need.worker_id, need.layout.meaning, chunk_hash)

    @rule(engine=engines, prompt=prompts, num_chunks=lengths)
    def store_chunks(self, engine: Engine, prompt: str, num_chunks: int) -> None:
        names = [self.key(need, each) for need in engine.needs() for each in hashes_of(prompt, num_chunks)]
        reservation = self.store.reserve([(name, NBYTES) for name in names])
        if reservation is not None:
            self.store.commit(reservation)

    @rule(prompt=prompts, of=st.sampled_from([ENGINES[:4], ENGINES[4:6], ENGINES]))
    def store_all(self, prompt: str, of: tuple[Engine, ...]) -> None:
        for engine in of:
            self.store_chunks(engine, prompt, NUM_CHUNKS)

    @rule(prompt=prompts, lengths_of=st.lists(lengths, min_size=2, max_size=2), of=st.sampled_from([0, 2, 4]))
    def look_up_by_both_workers(self, prompt: str, lengths_of: list[int], of: int) -> None:
        for engine, num_chunks in zip(ENGINES[of : of + 2], lengths_of, strict=True):
            self.look_up(engine, prompt, num_chunks, "0")

    @rule(engine=engines, prompt=prompts, num_chunks=lengths, request=requests)
    def look_up(self, engine: Engine, prompt: str, num_chunks: int, request: str | None) -> None:
        hashes = hashes_of(prompt, num_chunks)
        self.now += 1

        def search(workers: Iterable[int], count: int) -> Hit[Entry]:
            needs = [
                need
                for worker_id in workers
                for need in (engine.needs() if worker_id == engine.worker_id else self.other_needs(engine, worker_id))
            ]
            return self.hit(needs, hashes[:count])

        found = self.lookups.look_up(WORLD, request, engine.instance_id, engine.worker_id, hashes, search, self.now)
        can_retrieve = self.hit(engine.needs(), hashes).num_chunks
        assert found <= can_retrieve
        if request is not None:
            self.promised.pop((engine, request), None)
            if found:
                self.promised[engine, request] = (prompt, found)

    @staticmethod
    def other_needs(engine: Engine, worker_id: int) -> list[Need]:
        return [Need(worker_id, need.layout) for need in engine.needs()]

    @rule(engine=engines, prompt=prompts, num_chunks=lengths, request=requests)
    def retrieve(self, engine: Engine, prompt: str, num_chunks: int, request: str | None) -> None:
        hashes = hashes_of(prompt, num_chunks)
        hit = self.hit(engine.needs(), hashes)
        entries = [entry for part in hit.found for entry in part.entries] if hit.num_chunks == num_chunks else []
        self.lookups.use_up(WORLD, request, engine.instance_id, engine.worker_id, hashes, entries)
        if request is not None:
            self.promised.pop((engine, request), None)

    @rule(engine=engines, request=requests)
    def release(self, engine: Engine, request: str | None) -> None:
        if request is None:
            self.lookups.end_of(engine.instance_id)
            self.promised = {key: value for key, value in self.promised.items() if key[0] != engine}
        else:
            self.lookups.release(WORLD, request, engine.instance_id, engine.worker_id)
            # For all workers of the lookup, whoever joined it.
            self.promised = {key: value for key, value in self.promised.items() if key[1] != request}

    @invariant()
    def promises_are_kept(self) -> None:
        for (engine, _), (prompt, found) in self.promised.items():
            hit = self.hit(engine.needs(), hashes_of(prompt, found))
            assert hit.num_chunks == found, (engine, prompt, found)
            assert all(entry.ref_count for part in hit.found for entry in part.entries), (engine, prompt, found)

    def teardown(self) -> None:
        for engine in ENGINES:
            self.lookups.end_of(engine.instance_id)
        assert (len(self.lookups), self.lookups.num_pins, self.store.num_pinned) == (0, 0, 0)


TestPromises = PromiseMachine.TestCase
TestPromises.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
