"""Engines of both kinds on one server of either kind: what LMCache's client stores, kvshm's finds, and the reverse."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvshm.client.cache_client import CacheClient
from tests.interop.engines import (
    BLOCKS_FIRST,
    CHUNK,
    HND,
    HND_PERMUTED,
    MIXED,
    MLA,
    MODES,
    NHD,
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
    first, second = prompt(NUM_TOKENS, seed=1), prompt(NUM_TOKENS, seed=2)
    source, target = layout.block_ids(NUM_TOKENS, 3), layout.block_ids(NUM_TOKENS, 4)
    arrays = layout.arrays(shared=mode == "lmcache_driven", seed=5)
    original = contents(arrays)
    expected = layout.moved(arrays, source, target)
    with (
        CacheClient(server.url, timeout_s=20, raises=True) as client,
        register(client, layout, arrays, model_name, mode) as ours,
        their_engine(peer, server.url, layout, model_name, mode) as theirs,
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


def _wait_until_published(server: Server) -> None:
    if "storage_manager" in server.status():  # a real one; kvshm's has published what it has answered
        wait_until_published(server)
