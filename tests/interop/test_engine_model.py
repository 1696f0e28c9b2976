"""kvshm's engines on a real LMCache server against the slow model: what it serves is right, the rest is a miss."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvshm.client.cache_client import CacheClient
from tests.interop.engines import Held, wait_until_held
from tests.interop.processes import LMCache, Server
from tests.support.engine_model import Cached, ModelEngine, World, engine_specs, prompts, worlds

CHUNK = 16
_numbers = itertools.count()


@pytest.fixture(scope="module")
def small_chunks(lmcache: LMCache) -> Iterator[Server]:
    """A real server with chunks of few tokens."""
    pool_name = f"kvshm_interop_{os.getpid()}_model"
    with lmcache.server("--chunk-size", str(CHUNK), pool_name=pool_name) as server:
        yield server


class LMCacheMachine(RuleBasedStateMachine):
    """Engines of one model: full attention, the same layers in every worker, in both modes."""

    server: Server

    def __init__(self) -> None:
        super().__init__()
        self.cached = Cached()
        self.engines: list[ModelEngine] = []
        self.known: list[list[int]] = [[]]
        self.world: World
        self.before = Held.by(self.server)
        self.num_records = 0  # of requests that several workers share: the server drops them in time
        self.client = CacheClient(self.server.url, timeout_s=20, raises=True)

    def teardown(self) -> None:
        for each in self.engines:
            each.engine.release()
            each.engine.unregister()
        self.client.close()
        wait_until_held(self.server, replace(self.before, sessions=self.before.sessions + self.num_records))

    @initialize(world=worlds(CHUNK, max_workers=2, is_plain=True), data=st.data(), seed=st.integers(0, 2**32 - 1))
    def begin(self, world: World, data: st.DataObject, seed: int) -> None:
        groups = tuple(replace(group, window=-1) for group in world.groups)
        self.world = replace(world, groups=groups, layers=(world.layers[0],) * len(world.layers))
        name = f"interop/model {next(_numbers)}"
        for worker in range(len(self.world.layers)):
            spec = replace(data.draw(engine_specs(self.world, worker)), null_block_id=0)  # the server's
            self.engines.append(ModelEngine(self.client, self.world, spec, name, seed))

    def num_found(self, prompt: list[int]) -> int:
        """Chunks that all workers have."""
        chunks = self.engines[0].chunks(prompt)
        for length in range(len(chunks), 0, -1):
            if all(
                self.cached.is_found(worker, self.engines[worker].objects, chunks[:length])
                for worker in range(len(self.world.layers))
            ):
                return length
        return 0

    @rule(prompt=prompts(CHUNK), nulls=st.sampled_from([0.0, 0.0, 0.05]))
    def store(self, prompt: list[int], nulls: float) -> None:
        self.known.append(prompt)
        for each in self.engines:
            each.scribble()
            lists = each.draw_blocks(prompt, nulls)
            each.compute(prompt, lists)
            # Up to the first chunk with a null block: the server would store it.
            has_data = [
                all(each.has_data(part, lists, chunk) for part in each.objects)
                for chunk in range(len(each.chunks(prompt)))
            ]
            num_chunks = [*has_data, False].index(False)
            stored = each.engine.store(prompt, lists)
            each.expect_store(self.cached, prompt, lists, num_chunks)
            assert stored == self.num_found(prompt) * CHUNK

    @rule(data=st.data())
    def look_up(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(self.engines))
        prompt = data.draw(st.sampled_from(self.known))
        assert each.engine.lookup(prompt) == self.num_found(prompt) * CHUNK
        if data.draw(st.booleans()):
            each.engine.release(prompt)

    @rule(data=st.data(), nulls=st.sampled_from([0.0, 0.1]), skip=st.integers(0, 3 * CHUNK))
    def retrieve(self, data: st.DataObject, nulls: float, skip: int) -> None:
        prompt = data.draw(st.sampled_from(self.known))
        for each in self.engines:
            each.scribble()
            chunks = each.chunks(prompt)
            lists = each.draw_blocks(prompt, nulls)
            protected = min(skip, len(chunks) * CHUNK)
            got = each.engine.retrieve(prompt, lists, skip_first_n_tokens=skip)
            is_found = bool(chunks) and self.cached.is_found(each.spec.worker, each.objects, chunks)
            # The server would round a skip inside a block down.
            is_served = each.spec.mode == "engine_driven" or not any(protected % size for size in each.spec.blocks)
            assert got == (len(chunks) * CHUNK if is_found and is_served else 0)
            if got:
                each.expect_retrieve(prompt, lists, skip)
            each.check()

    @rule(data=st.data())
    def serve_a_request(self, data: st.DataObject) -> None:
        """One worker looks up, all retrieve."""
        prompt = data.draw(st.sampled_from(self.known))
        request = f"request {next(_numbers)}"
        found = self.engines[0].engine.lookup(prompt, request)
        assert found == self.num_found(prompt) * CHUNK
        self.num_records += bool(found) and len(self.engines) > 1
        for each in self.engines if found else ():
            each.scribble()
            lists = each.draw_blocks(prompt[:found], 0.0)
            assert each.engine.retrieve(prompt[:found], lists, request_id=request) == found
            each.expect_retrieve(prompt[:found], lists, 0)
            each.check()

    @invariant()
    def nothing_is_written_that_was_not_asked_for(self) -> None:
        for each in self.engines:
            each.check()


def test_engines_on_a_real_server(small_chunks: Server) -> None:
    class Machine(LMCacheMachine):
        server = small_chunks

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=12,
            stateful_step_count=12,
            deadline=None,
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
