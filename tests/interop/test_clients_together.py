"""Engines of both kinds on one server of either kind: what LMCache's client stores, kvshm's finds, and the reverse."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvshm.client.cache_client import CacheClient
from kvshm.layout import EngineGroupInfo
from tests.interop.engines import (
    BLOCKS_FIRST,
    CHUNK,
    HND,
    HND_PERMUTED,
    MIXED,
    MLA,
    MODES,
    NHD,
    Layer,
    Layout,
    contents,
    prompt,
    register,
    wait_until_published,
    wipe,
)
from tests.interop.processes import LMCachePeer, Server

NUM_TOKENS = 2 * CHUNK

# LMCache's engine-driven client takes one group of layers alike only. Its server-driven one turns a permuted tensor,
# in the engine's hands, into one whose axes stand as they lie in memory, which is the HND of the line before.
CASES = [
    pytest.param(mode, layout, id=f"{layout.name}-{mode}")
    for mode in MODES
    for layout in (NHD, HND, HND_PERMUTED, BLOCKS_FIRST, MLA, MIXED)
    if (mode, layout) not in (("engine_driven", MIXED), ("lmcache_driven", HND_PERMUTED))
]


@pytest.fixture(params=["kvshm", "lmcache"])
def server(request: pytest.FixtureRequest) -> Server:
    """A server of either kind."""
    name = {"kvshm": "our_server", "lmcache": "real_server"}[request.param]
    server: Server = request.getfixturevalue(name)
    return server


class TheirEngine:
    """An engine of LMCache's, in its process, with tensors of LMCache's own making."""

    def __init__(self, peer: LMCachePeer, url: str, layout: Layout, model_name: str, mode: str) -> None:
        self.peer = peer
        self.tensors = [
            peer.call("make", dtype=layer.dtype, shape=list(layer.shape), axes=layer.axes) for layer in layout.layers
        ]
        self.number = peer.call(
            "register",
            url=url,
            mode=mode,
            model_name=model_name,
            tensors=self.tensors,
            kv_layout=layout.kv_layout,
            groups=[
                {
                    "engine_group_id": group.engine_group_id,
                    "layer_indices": list(group.layer_indices),
                    "tokens_per_block": group.tokens_per_block,
                }
                for group in layout.group_infos
            ],
            blocks_in_chunk=CHUNK // layout.group_infos[0].tokens_per_block,
            instance_id=int.from_bytes(os.urandom(4), "big"),
        )

    def ask(self, method: str, tokens: list[int], *block_ids: Any, request_id: str) -> Any:
        """Store, lookup, retrieve."""
        more = {"block_ids": block_ids[0]} if block_ids else {}
        return self.peer.call(method, engine=self.number, tokens=tokens, request_id=request_id, **more)

    @property
    def contents(self) -> list[bytes]:
        """The bytes of all layers, in the order of their axes."""
        return [bytes.fromhex(self.peer.call("read", tensor=tensor)) for tensor in self.tensors]

    @contents.setter
    def contents(self, layers: list[bytes]) -> None:
        for tensor, data in zip(self.tensors, layers, strict=True):
            self.peer.call("write", tensor=tensor, data=data.hex())

    def close(self) -> None:
        """Unregister, and give the memory back."""
        self.peer.call("unregister", engine=self.number)
        self.peer.call("drop", tensors=self.tensors)


@contextmanager
def their_engine(peer: LMCachePeer, url: str, layout: Layout, model_name: str, mode: str) -> Iterator[TheirEngine]:
    """An engine of LMCache's while the context lasts."""
    engine = TheirEngine(peer, url, layout, model_name, mode)
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize(("mode", "layout"), CASES)
def test_each_finds_what_the_other_stored(
    server: Server, peer: LMCachePeer, model_name: str, mode: str, layout: Layout
) -> None:
    _exchange(server, peer, model_name, layout, mode, mode)


@pytest.mark.parametrize("modes", [MODES, MODES[::-1]], ids="-and-".join)
@pytest.mark.parametrize("layout", [NHD, HND, BLOCKS_FIRST, MLA], ids=lambda layout: layout.name)
def test_each_finds_what_the_other_stored_in_the_other_mode(
    server: Server, peer: LMCachePeer, model_name: str, modes: tuple[str, str], layout: Layout
) -> None:
    if layout is MLA and "storage_manager" in server.status():
        pytest.skip("LMCache's server keeps a single plane in another shape in each mode, and its client refuses that")
    _exchange(server, peer, model_name, layout, *modes)


def _exchange(
    server: Server, peer: LMCachePeer, model_name: str, layout: Layout, our_mode: str, their_mode: str
) -> None:
    first, second = prompt(NUM_TOKENS, seed=1), prompt(NUM_TOKENS, seed=2)
    source, target = layout.block_ids(NUM_TOKENS, 3), layout.block_ids(NUM_TOKENS, 4)
    arrays = layout.arrays(shared=our_mode == "lmcache_driven", seed=5)
    original = contents(arrays)
    expected = layout.moved(arrays, source, target)
    with (
        CacheClient(server.url, timeout_s=20, raises=True) as client,
        register(client, layout, arrays, model_name, our_mode) as ours,
        their_engine(peer, server.url, layout, model_name, their_mode) as theirs,
    ):
        assert ours.store(first, source) == NUM_TOKENS
        _wait_until_published(server)
        assert theirs.ask("lookup", first, request_id="a") == 2
        assert theirs.ask("retrieve", first, target, request_id="a") is True
        assert theirs.contents == expected

        theirs.contents = original
        assert theirs.ask("store", second, source, request_id="b") is True
        _wait_until_published(server)
        wipe(arrays)
        assert ours.lookup(second) == NUM_TOKENS
        assert ours.retrieve(second, target) == NUM_TOKENS
        assert contents(arrays) == expected

        # And LMCache's own, with other blocks than before, so that nothing is there already.
        theirs.contents = [bytes(len(data)) for data in original]
        assert theirs.ask("lookup", second, request_id="c") == 2
        assert theirs.ask("retrieve", second, target, request_id="c") is True
        assert theirs.contents == expected


# K and V of one model, kept in other orders and other blocks: [2, NB, BS, 5, 7] and [2, NB, 5, BS, 7].
BLOCKS_OF_32 = (EngineGroupInfo(0, (0, 1, 2), 32),)
NHD_32 = Layout("NHD-32", (Layer((2, 53, 32, 5, 7), "bfloat16", 1),) * 3, groups=BLOCKS_OF_32)
HND_16 = Layout("HND-16", (Layer((2, 97, 5, 16, 7), "bfloat16", 1),) * 3, "HND")
HND_32 = Layout("HND-32", (Layer((2, 53, 5, 32, 7), "bfloat16", 1),) * 3, "HND", BLOCKS_OF_32)


@pytest.mark.parametrize("their_mode", MODES)
@pytest.mark.parametrize("our_mode", MODES)
@pytest.mark.parametrize("ours_is", [NHD_32, HND_16, HND_32], ids=lambda layout: layout.name)
def test_caches_of_other_blocks_and_orders_share(
    our_server: Server, peer: LMCachePeer, model_name: str, our_mode: str, their_mode: str, ours_is: Layout
) -> None:
    """On kvshm's server: theirs is NHD in blocks of 16."""
    first, second = prompt(NUM_TOKENS, seed=1), prompt(NUM_TOKENS, seed=2)
    ids, their_ids = ours_is.block_ids(NUM_TOKENS, 3), NHD.block_ids(NUM_TOKENS, 4)
    arrays = ours_is.arrays(shared=our_mode == "lmcache_driven", seed=5)
    their_arrays = NHD.arrays(shared=False)

    def tokens_of(layers: list[Any], layout: Layout, blocks: list[int]) -> list[bytes]:
        """Per layer, K and V of the tokens in order: [2, token, head, element]."""
        ordered = [layer.transpose(0, 1, 3, 2, 4) if layout.kv_layout == "HND" else layer for layer in layers]
        return [layer[:, blocks].tobytes() for layer in ordered]

    with (
        CacheClient(our_server.url, timeout_s=20, raises=True) as client,
        register(client, ours_is, arrays, model_name, our_mode) as ours,
        their_engine(peer, our_server.url, NHD, model_name, their_mode) as theirs,
    ):

        def read_theirs() -> list[bytes]:
            for array, data in zip(their_arrays, theirs.contents, strict=True):
                array[...] = np.frombuffer(data, array.dtype).reshape(array.shape)
            return tokens_of(their_arrays, NHD, their_ids[0])

        wanted = tokens_of(arrays, ours_is, ids[0])
        assert ours.store(first, ids) == NUM_TOKENS
        assert theirs.ask("lookup", first, request_id="a") == 2
        assert theirs.ask("retrieve", first, their_ids, request_id="a") is True
        assert read_theirs() == wanted
        assert theirs.ask("store", second, their_ids, request_id="b") is True
        wipe(arrays)
        assert ours.lookup(second) == NUM_TOKENS
        assert ours.retrieve(second, ids) == NUM_TOKENS
        assert tokens_of(arrays, ours_is, ids[0]) == wanted


def _wait_until_published(server: Server) -> None:
    if "storage_manager" in server.status():  # a real one; kvshm's has published what it has answered
        wait_until_published(server)
