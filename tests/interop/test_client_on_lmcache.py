"""kvshm's client on a real LMCache server: what it stores, it finds and gets back bit for bit, and no lock is left."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvshm.client.cache_client import CacheClient
from kvshm.client.connections import CacheServerError
from kvshm.client.operations import LMCacheServer
from kvshm.layout import EngineGroupInfo
from tests.interop.engines import (
    CHUNK,
    FP8,
    LAYOUTS,
    MODES,
    NHD,
    ONE_GROUP,
    Held,
    Layer,
    Layout,
    contents,
    nothing_left_held,
    prompt,
    register,
    wait_until,
    wait_until_published,
    wipe,
)
from tests.interop.processes import LMCache, Server

NUM_CHUNKS = 3
NUM_TOKENS = NUM_CHUNKS * CHUNK

every_mode = pytest.mark.parametrize("mode", MODES)

# The copies of LMCache's server-driven mode are torch's, which has none for float8: engines register it as uint8.
CANNOT_COPY = ("lmcache_driven", FP8)


@pytest.fixture
def server(real_server: Server) -> Iterator[Server]:
    """The real server; a test leaves nothing locked and no request open."""
    with nothing_left_held(real_server):
        yield real_server


@pytest.fixture
def client(server: Server) -> Iterator[CacheClient]:
    """A client that raises what goes wrong."""
    with CacheClient(server.url, timeout_s=20, raises=True) as client:
        yield client


def test_plain_operations(client: CacheClient) -> None:
    info = client.server_info()
    assert info == LMCacheServer(CHUNK)
    assert client.noop() == "OK"
    assert client.ping() is True
    assert client.ping(4711) is True
    assert client.get_chunk_size() == CHUNK
    assert client.get_experimental() == []
    assert client.query_prefetch_status("of nobody") == 0
    assert client.wait_prefetch_status("of nobody", 0.1) == 0
    client.end_session("of nobody")
    client.report_block_allocation(4711, "interop", [])
    client.unregister_kv_cache(4711)


@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        pytest.param(mode, layout, id=f"{layout.name}-{mode}")
        for mode in MODES
        for layout in LAYOUTS
        if (mode, layout) != CANNOT_COPY
    ],
)
def test_what_is_stored_comes_back_bit_for_bit(
    server: Server, client: CacheClient, model_name: str, mode: str, layout: Layout
) -> None:
    arrays = layout.arrays(shared=mode == "lmcache_driven", seed=1)
    tokens, source, target = prompt(NUM_TOKENS + 17), layout.block_ids(NUM_TOKENS, 2), layout.block_ids(NUM_TOKENS, 3)
    expected = layout.moved(arrays, source, target)
    with register(client, layout, arrays, model_name, mode) as engine:
        assert engine.lookup(tokens) == 0
        assert engine.store(tokens, source) == NUM_TOKENS
        wait_until_published(server)
        wipe(arrays)
        assert engine.lookup(tokens) == NUM_TOKENS
        assert engine.retrieve(tokens, target) == NUM_TOKENS
    assert contents(arrays) == expected


@pytest.mark.parametrize("layout", [layout for layout in ONE_GROUP if layout != FP8], ids=lambda layout: layout.name)
@pytest.mark.parametrize("modes", [MODES, MODES[::-1]], ids="-to-".join)
def test_engines_of_both_modes_share_what_they_store(
    server: Server, client: CacheClient, model_name: str, modes: tuple[str, str], layout: Layout
) -> None:
    tokens, source, target = prompt(NUM_TOKENS), layout.block_ids(NUM_TOKENS, 2), layout.block_ids(NUM_TOKENS, 3)
    theirs = layout.arrays(shared=modes[0] == "lmcache_driven", seed=1)
    ours = layout.arrays(shared=modes[1] == "lmcache_driven")
    with (
        register(client, layout, theirs, model_name, modes[0]) as storing,
        register(client, layout, ours, model_name, modes[1]) as retrieving,
    ):
        assert storing.store(tokens, source) == NUM_TOKENS
        wait_until_published(server)
        assert retrieving.lookup(tokens) == NUM_TOKENS
        assert retrieving.retrieve(tokens, target) == NUM_TOKENS
    assert contents(ours) == layout.moved(theirs, source, target)


@every_mode
def test_a_prompt_is_found_up_to_where_it_differs(
    server: Server, client: CacheClient, model_name: str, mode: str
) -> None:
    arrays = NHD.arrays(shared=mode == "lmcache_driven", seed=1)
    tokens, source, target = prompt(NUM_TOKENS), NHD.block_ids(NUM_TOKENS, 2), NHD.block_ids(NUM_TOKENS, 3)
    longer = [*tokens[: 2 * CHUNK], *prompt(2 * CHUNK, seed=7)]
    expected = NHD.moved(arrays, [source[0][:32]], [target[0][:32]])
    with register(client, NHD, arrays, model_name, mode) as engine:
        assert engine.store(tokens, source) == NUM_TOKENS
        wait_until_published(server)
        wipe(arrays)
        assert engine.lookup(longer) == 2 * CHUNK
        assert engine.retrieve(longer[: 2 * CHUNK], target) == 2 * CHUNK
        assert contents(arrays) == expected
        # Storing the longer one adds what is missing.
        assert engine.store(longer, NHD.block_ids(4 * CHUNK, 5)) == 4 * CHUNK
        wait_until_published(server)
        assert engine.lookup(longer) == 4 * CHUNK
        assert engine.retrieve(longer, NHD.block_ids(4 * CHUNK, 5)) == 4 * CHUNK


@every_mode
def test_skipped_tokens_are_left_alone(server: Server, client: CacheClient, model_name: str, mode: str) -> None:
    arrays = NHD.arrays(shared=mode == "lmcache_driven", seed=1)
    tokens, source, target = prompt(NUM_TOKENS), NHD.block_ids(NUM_TOKENS, 2), NHD.block_ids(NUM_TOKENS, 3)
    num_skipped = CHUNK + 5 * 16  # into the second chunk
    expected = NHD.moved(arrays, source, target, num_skipped)
    with register(client, NHD, arrays, model_name, mode) as engine:
        assert engine.store(tokens, source) == NUM_TOKENS
        wait_until_published(server)
        wipe(arrays)
        assert engine.lookup(tokens) == NUM_TOKENS
        assert engine.retrieve(tokens, target, num_skipped) == NUM_TOKENS
    assert contents(arrays) == expected


@every_mode
def test_a_retrieve_needs_no_lookup_and_less_may_be_retrieved_than_found(
    server: Server, client: CacheClient, model_name: str, mode: str
) -> None:
    arrays = NHD.arrays(shared=mode == "lmcache_driven", seed=1)
    tokens, ids = prompt(NUM_TOKENS), NHD.block_ids(NUM_TOKENS, 2)
    with register(client, NHD, arrays, model_name, mode) as engine:
        assert engine.store(tokens, ids) == NUM_TOKENS
        wait_until_published(server)
        with nothing_left_held(server):
            assert engine.retrieve(tokens, ids) == NUM_TOKENS
        with nothing_left_held(server):
            assert engine.retrieve([*tokens, *prompt(CHUNK, seed=7)], NHD.block_ids(4 * CHUNK, 2)) == 0
        with nothing_left_held(server):
            assert engine.lookup(tokens) == NUM_TOKENS
            assert engine.retrieve(tokens[: 2 * CHUNK], ids) == 2 * CHUNK
        # And one that is looked up but never retrieved.
        assert engine.lookup(tokens) == NUM_TOKENS
        assert Held.by(server).read_locked >= NUM_CHUNKS


@every_mode
def test_workers_of_one_model_find_what_all_of_them_stored(
    server: Server, client: CacheClient, model_name: str, mode: str
) -> None:
    num_workers = 2
    caches = [NHD.arrays(shared=mode == "lmcache_driven", seed=worker) for worker in range(num_workers)]
    tokens, source, target = prompt(NUM_TOKENS), NHD.block_ids(NUM_TOKENS, 2), NHD.block_ids(NUM_TOKENS, 3)
    expected = [NHD.moved(arrays, source, target) for arrays in caches]
    engines = [
        register(client, NHD, arrays, model_name, mode, world_size=num_workers, worker_id=worker)
        for worker, arrays in enumerate(caches)
    ]
    assert engines[0].store(tokens, source) == 0, "one worker's chunks alone are no hit"
    wait_until_published(server)
    assert [engine.lookup(tokens) for engine in engines] == [0, 0]
    assert engines[1].store(tokens, source) == NUM_TOKENS
    wait_until_published(server)
    for arrays in caches:
        wipe(arrays)
    assert [engine.lookup(tokens) for engine in engines] == [NUM_TOKENS] * num_workers
    assert [engine.retrieve(tokens, target) for engine in engines] == [NUM_TOKENS] * num_workers
    assert [contents(arrays) for arrays in caches] == expected
    for engine in engines:
        engine.unregister()


@every_mode
def test_what_was_cleared_is_gone(server: Server, client: CacheClient, model_name: str, mode: str) -> None:
    arrays = NHD.arrays(shared=mode == "lmcache_driven", seed=1)
    tokens, ids = prompt(NUM_TOKENS), NHD.block_ids(NUM_TOKENS, 2)
    with register(client, NHD, arrays, model_name, mode) as engine:
        assert engine.store(tokens, ids) == NUM_TOKENS
        wait_until_published(server)
        client.clear()
        assert engine.lookup(tokens) == 0


@every_mode
def test_a_salt_keeps_engines_apart(server: Server, client: CacheClient, model_name: str, mode: str) -> None:
    arrays = NHD.arrays(shared=mode == "lmcache_driven", seed=1)
    tokens, ids = prompt(NUM_TOKENS), NHD.block_ids(NUM_TOKENS, 2)
    with (
        register(client, NHD, arrays, model_name, mode, cache_salt="pepper") as salted,
        register(client, NHD, arrays, model_name, mode) as plain,
    ):
        assert salted.store(tokens, ids) == NUM_TOKENS
        wait_until_published(server)
        assert plain.lookup(tokens) == 0
        assert salted.retrieve(tokens, ids) == NUM_TOKENS


def test_a_copy_that_lmcache_cannot_do_is_a_miss(server: Server, client: CacheClient, model_name: str) -> None:
    mode, layout = CANNOT_COPY
    arrays = layout.arrays(shared=True, seed=1)
    tokens, ids = prompt(NUM_TOKENS), layout.block_ids(NUM_TOKENS, 2)
    with register(client, layout, arrays, model_name, mode) as engine:
        assert engine.store(tokens, ids) == NUM_TOKENS
        wait_until_published(server)
        assert engine.lookup(tokens) == NUM_TOKENS
        assert engine.retrieve(tokens, ids) == 0


def test_ids_beyond_the_cache_are_refused_before_they_are_sent(
    server: Server, client: CacheClient, model_name: str
) -> None:
    # A real server would keep the chunks locked for ten minutes, and answer further stores without storing.
    arrays = NHD.arrays(shared=True, seed=1)
    tokens, ids = prompt(NUM_TOKENS), NHD.block_ids(NUM_TOKENS, 2)
    with register(client, NHD, arrays, model_name, "lmcache_driven") as engine:
        with pytest.raises(ValueError, match=r"has blocks \[0, 97\)"):
            engine.store(tokens, [[*ids[0][:-1], 97]])
        assert engine.store(tokens, ids) == NUM_TOKENS


@pytest.fixture(scope="module")
def other_server(lmcache: LMCache) -> Iterator[Server]:
    """A real server of other settings: no pool in shared memory, an object of its own for each kind of layer."""
    with lmcache.server("--separate-object-groups") as server:
        yield server


def test_without_a_pool_an_engine_that_copies_is_told_what_to_do(other_server: Server, model_name: str) -> None:
    with (
        CacheClient(other_server.url, timeout_s=20) as client,
        pytest.raises(CacheServerError, match="start the LMCache server with --shm-name"),
    ):
        register(client, NHD, NHD.arrays(shared=False), model_name, "engine_driven")


def test_windows_of_separate_object_groups(other_server: Server, model_name: str) -> None:
    full, windowed = Layer((2, 97, 16, 5, 7), "bfloat16", 1), Layer((2, 89, 16, 3, 11), "float16", 1)
    layout = Layout(
        "windowed",
        (full, windowed, full, windowed),
        groups=(
            EngineGroupInfo(0, (0, 2), 16),
            EngineGroupInfo(1, (1,), 16, sw_size_tokens=64),
            EngineGroupInfo(2, (3,), 16, sw_size_tokens=300),
        ),
    )
    arrays = layout.arrays(shared=True, seed=1)
    tokens, source, target = prompt(NUM_TOKENS), layout.block_ids(NUM_TOKENS, 2), layout.block_ids(NUM_TOKENS, 3)
    # Of a windowed group comes back what the window reaches: a part of the last chunk, or whole chunks.
    expected = layout.moved(arrays, source, target, [0, NUM_TOKENS - 64, NUM_TOKENS - 2 * CHUNK])
    with (
        nothing_left_held(other_server),
        CacheClient(other_server.url, timeout_s=20, raises=True) as client,
        register(client, layout, arrays, model_name, "lmcache_driven") as engine,
    ):
        assert engine.store(tokens, source) == NUM_TOKENS
        wait_until_published(other_server)
        wipe(arrays)
        assert engine.lookup(tokens) == NUM_TOKENS
        assert engine.retrieve(tokens, target) == NUM_TOKENS
    assert contents(arrays) == expected


def test_engines_outlive_their_server(lmcache: LMCache, model_name: str) -> None:
    tokens, ids, target = prompt(NUM_TOKENS), NHD.block_ids(NUM_TOKENS, 2), NHD.block_ids(NUM_TOKENS, 3)
    caches = {mode: NHD.arrays(shared=mode == "lmcache_driven", seed=1) for mode in MODES}
    expected = NHD.moved(caches[MODES[0]], ids, target)
    pool_name = f"kvshm_interop_{os.getpid()}_again"
    with lmcache.server(pool_name=pool_name) as server:
        client = CacheClient(server.url, timeout_s=5)
        engines = {mode: register(client, NHD, arrays, f"{model_name}/{mode}", mode) for mode, arrays in caches.items()}
        for engine in engines.values():
            assert engine.store(tokens, ids) == NUM_TOKENS
        server.kill()
        for engine in engines.values():
            assert engine.lookup(tokens) == 0
            assert engine.store(tokens, ids) == 0
    with lmcache.server(pool_name=pool_name, ports=server.ports) as server, nothing_left_held(server), client:
        wait_until(lambda: all(engine.is_registered for engine in engines.values()), "registering again")
        for mode, engine in engines.items():
            assert engine.lookup(tokens) == 0
            assert engine.store(tokens, ids) == NUM_TOKENS
            wait_until_published(server)
            wipe(caches[mode])
            assert engine.lookup(tokens) == NUM_TOKENS
            assert engine.retrieve(tokens, target) == NUM_TOKENS
            assert contents(caches[mode]) == expected
