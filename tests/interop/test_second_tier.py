"""Two real LMCache servers over one second tier: an engine on one finds what an engine on the other stored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshm.client.cache_client import CacheClient
from tests.interop.engines import (
    CHUNK,
    MIXED,
    NHD,
    Layout,
    contents,
    nothing_left_held,
    prompt,
    register,
    wait_until,
    wipe,
)
from tests.interop.processes import LMCache, Server, redis_server

NUM_TOKENS = 3 * CHUNK

Pair = tuple[Server, Server]


@pytest.fixture(scope="module")
def over_files(lmcache: LMCache, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two servers over a directory."""
    path: Path = tmp_path_factory.mktemp("tier")
    adapter = json.dumps({"type": "fs", "base_path": str(path)})
    with lmcache.two_servers("--l2-adapter", adapter) as pair:
        yield pair
    assert list(path.iterdir()), "nothing was written to the second tier"


@pytest.fixture(scope="module")
def over_redis(lmcache: LMCache, redis: str) -> Iterator[Pair]:
    """Two servers over a Redis."""
    with redis_server(redis, lmcache.log("redis")) as port:
        adapter = json.dumps({"type": "resp", "host": "127.0.0.1", "port": port, "num_workers": 2})
        with lmcache.two_servers("--l2-adapter", adapter) as pair:
            yield pair


@pytest.fixture(params=["files", "redis"])
def servers(request: pytest.FixtureRequest) -> Pair:
    """Both servers."""
    pair: Pair = request.getfixturevalue(f"over_{request.param}")
    return pair


@pytest.mark.parametrize("layout", [NHD, MIXED], ids=lambda layout: layout.name)
def test_an_engine_on_one_finds_what_an_engine_on_the_other_stored(
    servers: Pair, model_name: str, layout: Layout
) -> None:
    arrays, others = layout.arrays(shared=True, seed=1), layout.arrays(shared=True)
    tokens, source, target = prompt(NUM_TOKENS), layout.block_ids(NUM_TOKENS, 2), layout.block_ids(NUM_TOKENS, 3)
    with (
        nothing_left_held(servers[0]),
        nothing_left_held(servers[1]),
        CacheClient(servers[0].url, timeout_s=20, raises=True) as client,
        CacheClient(servers[1].url, timeout_s=20, raises=True) as other_client,
        register(client, layout, arrays, model_name, "lmcache_driven") as engine,
        register(other_client, layout, others, model_name, "lmcache_driven") as other,
    ):
        assert other.lookup(tokens) == 0
        assert engine.store(tokens, source) == NUM_TOKENS
        # The first writes to the second tier after it has answered; nothing tells when.
        wait_until(lambda: other.retrieve(tokens, target) == NUM_TOKENS, "finding it on the other server")
        assert contents(others) == layout.moved(arrays, source, target)

        # And the other way round.
        tokens, expected = prompt(NUM_TOKENS, seed=7), layout.moved(others, target, source)
        assert other.store(tokens, target) == NUM_TOKENS
        wipe(arrays)
        wait_until(lambda: engine.retrieve(tokens, source) == NUM_TOKENS, "finding it on the first server")
        assert contents(arrays) == expected
