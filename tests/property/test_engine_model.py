"""Engines of any layout, in both modes, against a slow model: bytes and counts are the model's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvshm.client.cache_client import CacheClient
from kvshm.server.cache_server import CacheServer
from tests.support.cache_server import running_server
from tests.support.engine_model import Cached, ModelEngine, World, engine_specs, prompts, worlds

pytestmark = pytest.mark.slow

MAX_ENGINES = 4


class EngineMachine(RuleBasedStateMachine):
    """One server; engines come, store, look up, retrieve and go."""

    capacity = 1 << 20

    def __init__(self) -> None:
        super().__init__()
        self.cached = Cached()
        self.engines: list[ModelEngine] = []
        self.world: World
        self._running: Any = running_server(chunk_size=4, capacity=self.capacity)
        self.server: CacheServer = self._running.__enter__()
        self.client = CacheClient(self.server.endpoint)

    def teardown(self) -> None:
        for each in self.engines:
            each.engine.unregister()
        self.client.close()
        self._running.__exit__(None, None, None)

    @initialize(world=worlds(), data=st.data(), seed=st.integers(0, 2**32 - 1))
    def begin(self, world: World, data: st.DataObject, seed: int) -> None:
        self.world = world
        self.known: list[list[int]] = [[]]  # prompts that were stored
        for worker in range(len(world.layers)):
            spec = data.draw(engine_specs(world, worker))
            self.engines.append(ModelEngine(self.client, world, spec, "model", seed))

    @precondition(lambda self: len(self.engines) < MAX_ENGINES)
    @rule(data=st.data(), seed=st.integers(0, 2**32 - 1))
    def register(self, data: st.DataObject, seed: int) -> None:
        spec = data.draw(engine_specs(self.world))
        self.engines.append(ModelEngine(self.client, self.world, spec, "model", seed))

    def known_prompt(self, data: st.DataObject) -> list[int]:
        """One that was stored as a rule, or a beginning of it."""
        if data.draw(st.integers(0, 4)) == 0:
            return data.draw(prompts())
        prompt = data.draw(st.sampled_from(self.known))
        return prompt[: data.draw(st.sampled_from([len(prompt), len(prompt), 4, 8]))]

    def choose(self, data: st.DataObject) -> ModelEngine:
        return data.draw(st.sampled_from(self.engines))

    def num_found(self, asking: ModelEngine, prompt: list[int]) -> int:
        """Chunks that a lookup by this engine finds: served by its own layout, and by those of the other workers."""
        chunks = asking.chunks(prompt)
        layouts = [(asking.spec.worker, asking.objects)]
        for worker in range(len(self.world.layers)):
            if worker == asking.spec.worker:
                continue
            others = [each.objects for each in self.engines if each.spec.worker == worker]
            if not others or asking.objects in others:
                others = [asking.objects]
            layouts += [(worker, objects) for objects in others]
        for length in range(len(chunks), 0, -1):
            if all(self.cached.is_found(worker, objects, chunks[:length]) for worker, objects in layouts):
                return length
        return 0

    @rule(data=st.data(), prompt=prompts(), nulls=st.sampled_from([0.0, 0.0, 0.1, 0.5]))
    def store(self, data: st.DataObject, prompt: list[int], nulls: float) -> None:
        self.store_by(self.choose(data), prompt, nulls)

    @rule(prompt=prompts(), nulls=st.sampled_from([0.0, 0.1]))
    def store_by_all(self, prompt: list[int], nulls: float) -> None:
        for each in self.engines:
            self.store_by(each, prompt, nulls)

    def store_by(self, each: ModelEngine, prompt: list[int], nulls: float) -> None:
        each.scribble()
        self.known.append(prompt)
        lists = each.draw_blocks(prompt, nulls)
        each.compute(prompt, lists)
        num_chunks = len(each.chunks(prompt))
        given = each.garble(lists, each.moves_of_store(num_chunks))
        stored = each.engine.store(prompt, given)
        each.expect_store(self.cached, prompt, lists, num_chunks)
        self.check_count(stored, self.num_found(each, prompt))

    @rule(data=st.data(), request=st.sampled_from([None, "a", "b"]))
    def look_up(self, data: st.DataObject, request: str | None) -> None:
        each, prompt = self.choose(data), self.known_prompt(data)
        for other in self.engines:  # else this one joins a lookup of another worker, and gets its answer
            other.engine.release(request_id=request)
        self.check_count(each.engine.lookup(prompt, request), self.num_found(each, prompt))
        if data.draw(st.booleans()):
            each.engine.release(prompt, request)

    @rule(
        data=st.data(),
        nulls=st.sampled_from([0.0, 0.2]),
        skip=st.integers(0, 20),
        request=st.sampled_from([None, "a", "b"]),
    )
    def retrieve(self, data: st.DataObject, nulls: float, skip: int, request: str | None) -> None:
        self.retrieve_by(self.choose(data), self.known_prompt(data), nulls, skip, request)

    @rule(data=st.data(), prompt=prompts(), skip=st.integers(0, 9), nulls=st.sampled_from([0.0, 0.2]))
    def store_and_retrieve(self, data: st.DataObject, prompt: list[int], skip: int, nulls: float) -> None:
        """What is there as a rule is retrieved by everybody."""
        self.store_by_all(prompt, 0.0)
        end = data.draw(st.sampled_from([len(prompt), len(prompt), 4, 8]))
        for each in self.engines:
            self.retrieve_by(each, prompt[:end], nulls, skip, None)

    def retrieve_by(self, each: ModelEngine, prompt: list[int], nulls: float, skip: int, request: str | None) -> None:
        each.scribble()
        chunks = each.chunks(prompt)
        lists = each.draw_blocks(prompt, nulls)
        given = each.garble(lists, each.moves_of_retrieve(len(chunks), skip))
        got = each.engine.retrieve(prompt, given, skip_first_n_tokens=skip, request_id=request)
        is_found = bool(chunks) and self.cached.is_found(each.spec.worker, each.objects, chunks)
        self.check_count(got, len(chunks) if is_found else 0, is_all_or_nothing=True)
        event(f"retrieved {got}")
        if got:
            each.expect_retrieve(prompt, lists, skip)
        each.check()

    @precondition(lambda self: len(self.engines) > 1)
    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        each = self.choose(data)
        self.engines.remove(each)
        each.engine.unregister()
        assert each.engine.unsettled_block_ids() == [set() for _ in self.world.groups]

    def check_count(self, tokens: int, chunks: int, *, is_all_or_nothing: bool = False) -> None:
        """A count is the model's."""
        assert tokens == chunks * self.world.chunk

    @invariant()
    def nothing_is_written_that_was_not_asked_for(self) -> None:
        for each in self.engines:
            each.check()


class EvictingMachine(EngineMachine):
    """The same where the pool holds a few chunks: whatever is there no more is a miss, and what was pinned is there."""

    capacity = 1 << 12

    def check_count(self, tokens: int, chunks: int, *, is_all_or_nothing: bool = False) -> None:
        allowed = {0, chunks} if is_all_or_nothing else set(range(chunks + 1))
        assert tokens in {count * self.world.chunk for count in allowed}

    @rule(data=st.data(), others=st.lists(st.tuples(prompts(), st.integers(0, 1000)), max_size=8))
    def look_up_and_retrieve(self, data: st.DataObject, others: list[tuple[list[int], int]]) -> None:
        """One worker looks up; whatever others store, the retrieves of all workers are served, once."""
        asking, prompt = self.choose(data), self.known_prompt(data)
        found = asking.engine.lookup(prompt, "shared")
        hit = prompt[:found]
        event(f"pinned {found}")
        for worker in range(len(self.world.layers)):
            for other, token in others:
                each = self.choose(data)
                each.scribble()
                longer = [token + worker, 1, 2, 3, *other]
                lists = each.draw_blocks(longer, 0.0)
                each.compute(longer, lists)
                each.engine.store(longer, lists)
                each.expect_store(self.cached, longer, lists, len(each.chunks(longer)))
            of_worker = [each for each in self.engines if each.spec.worker == worker]
            if not hit or not of_worker:
                continue
            each = asking if worker == asking.spec.worker else of_worker[0]
            each.scribble()
            lists = each.draw_blocks(hit, 0.0)
            assert each.engine.retrieve(hit, lists, request_id="shared") == found
            each.expect_retrieve(hit, lists, 0)
            each.check()
        asking.engine.release(request_id="shared")
        event(f"has evicted: {self.client.status()['objects']['evicted'] > 0}")


SETTINGS = settings(
    max_examples=40,
    stateful_step_count=20,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
TestEngines = EngineMachine.TestCase
TestEngines.settings = SETTINGS
TestEvictingEngines = EvictingMachine.TestCase
TestEvictingEngines.settings = SETTINGS
