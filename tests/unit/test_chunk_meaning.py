"""What the bytes of a chunk mean: engines share chunks exactly if that is the same to both (design, decision 11)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import kvshm
from kvshm import CacheClient, CacheServer, formats, layout
from kvshm.layout import EngineGroupInfo, object_layouts
from kvshm.spec import ArraySpec
from tests.support.cache_server import RawClient

ALIKE = ((2, 7, 4, 1, 6), (2, 7, 4, 1, 6))
SWAPPED = ((2, 7, 4, 1, 10), (2, 7, 4, 1, 6))
NHD, HND = {"kv_layout": "NHD"}, {"kv_layout": "HND"}
MODES = ["lmcache_driven", "engine_driven"]


def groups(*of_layers: dict[str, Any]) -> tuple[EngineGroupInfo, ...]:
    return tuple(EngineGroupInfo(layer, (layer,), **facts) for layer, facts in enumerate(of_layers))


# One fact of the first differs in each of the others.
LAYOUTS: dict[str, tuple[Any, tuple[EngineGroupInfo, ...], str, dict[str, str]]] = {
    "two groups": (ALIKE, groups({}, {}), "float16", NHD),
    "a window": (ALIKE, groups({}, {"sw_size_tokens": 8}), "float16", NHD),
    "a window of half a chunk": (ALIKE, groups({}, {"sw_size_tokens": 4}), "float16", NHD),
    "recurrent": (ALIKE, groups({}, {"recurrent_state": True}), "float16", NHD),
    "a tag": (ALIKE, groups({}, {"extra_object_group_tag": 3}), "float16", NHD),
    "compressed": (ALIKE, groups({}, {"tokens_per_block": 8}), "float16", NHD),
    "another dtype": (ALIKE, groups({}, {}), "bfloat16", NHD),
    "heads first": (ALIKE, groups({}, {}), "float16", HND),
    "wider and narrower": (SWAPPED, groups({}, {}), "float16", NHD),
    "narrower and wider": (SWAPPED[::-1], groups({}, {}), "float16", NHD),
    "one group": (ALIKE, (EngineGroupInfo(0, (0, 1)),), "float16", NHD),
    "planes in one": ([(7, 4, 12)] * 2, groups({}, {}), "float16", {}),
}


def meanings(name: str, num_blocks: int = 7, chunk: int = 8) -> list[bytes]:
    """Of the objects that lookups are about."""
    shapes, infos, dtype, hints = LAYOUTS[name]
    at = [0 if len(shape) == 3 else 1 for shape in shapes]
    specs = [
        ArraySpec.dense((*shape[:axis], num_blocks, *shape[axis + 1 :]), np.dtype(dtype))
        for shape, axis in zip(shapes, at, strict=True)
    ]
    layers = layout.engine_group_layer_indices(infos)
    normalised, names = formats.normalize_and_discover_per_layer_formats(specs, layers, "vllm", hints)
    objects = object_layouts(layout.KVLayerGroupsManager(normalised, names, infos, chunk))
    return [each.meaning for each in objects if each.is_served]


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(LAYOUTS, 2)))
def test_another_layout_means_another_thing(one: str, other: str) -> None:
    """In one object at least, and a hit needs them all."""
    assert set(meanings(one)) != set(meanings(other))


def test_the_number_of_blocks_is_no_part_of_it_but_the_chunk_is() -> None:
    assert meanings("a window") == meanings("a window", num_blocks=11)
    assert not set(meanings("a window")) & set(meanings("a window", chunk=16))


def test_the_engines_numbers_for_its_groups_are_no_part_of_it() -> None:
    specs = [ArraySpec.dense(shape, np.dtype("float16")) for shape in ALIKE]
    found = []
    for ids in ((0, 1), (3, 7)):
        infos = [EngineGroupInfo(ids[layer], (layer,)) for layer in range(2)]
        normalised, names = formats.normalize_and_discover_per_layer_formats(specs, ((0,), (1,)), "vllm", NHD)
        found.append(object_layouts(layout.KVLayerGroupsManager(normalised, names, infos, 8)))
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", MODES)
def test_engines_of_another_layout_find_nothing(mode: Any) -> None:
    with (
        CacheServer("tcp://127.0.0.1:0", capacity=2**20, chunk_size=8) as server,
        CacheClient(server.endpoint) as client,
    ):

        def engine(name: str) -> Any:
            shapes, infos, dtype, hints = LAYOUTS[name]
            arrays = kvshm.empty_many(shapes, [dtype] * len(shapes))
            return client.register(
                arrays, "one model", layout_hints=hints, engine_group_infos=infos, transfer_mode=mode
            )

        tokens = list(range(8))
        storing = engine("two groups")
        assert storing.store(tokens, [[1, 2], [3, 4]]) == 8
        assert storing.lookup(tokens) == 8
        for name in list(LAYOUTS)[1:]:
            assert engine(name).lookup(tokens) == 0, name


# Layers of one model, K and V of 4 heads of 8 elements, in every order that engines keep them in. A chunk is 64 tokens.

NUM_TOKENS, HEADS, HEAD = 128, 4, 8
BLOCKS_32 = [3, 1, 4, 2]
BLOCKS_16 = [7, 2, 9, 4, 1, 8, 3, 5]
Kind = tuple[str, int]


def engine_arrays(kind: str, block: int) -> tuple[list[Any], list[Any], dict[str, Any], str]:
    """Layers of an engine, the same as views [kv, block, slot, head, element], its hints and engine type."""
    num_blocks, dims = 1 + max(BLOCKS_16), (HEADS, HEAD)
    if kind == "NHD":
        arrays = [np.zeros((2, num_blocks, block, *dims), np.float16) for _ in range(2)]
        return arrays, list(arrays), NHD, "vllm"
    if kind == "HND":
        arrays = [np.zeros((2, num_blocks, HEADS, block, HEAD), np.float16) for _ in range(2)]
        return arrays, [array.transpose(0, 1, 3, 2, 4) for array in arrays], HND, "vllm"
    if kind == "blocks first":
        arrays = [np.zeros((num_blocks, 2, block, *dims), np.float16) for _ in range(2)]
        return arrays, [array.transpose(1, 0, 2, 3, 4) for array in arrays], NHD, "vllm"
    if kind == "pairs":
        pairs: list[Any] = [[np.zeros((num_blocks, block, *dims), np.float16) for _ in "kv"] for _ in range(2)]
        return pairs, pairs, NHD, "vllm"
    assert kind == "pairs HND"
    pairs = [[np.zeros((num_blocks, HEADS, block, HEAD), np.float16) for _ in "kv"] for _ in range(2)]
    return pairs, [[part.transpose(0, 2, 1, 3) for part in pair] for pair in pairs], HND, "vllm"


def in_order(views: Any, blocks: list[int]) -> list[Any]:
    """Per layer, K and V of the tokens in those blocks."""
    return [np.stack([view[plane][blocks].reshape(-1, HEADS, HEAD) for plane in (0, 1)]) for view in views]


KINDS: list[Kind] = [
    ("NHD", 16),
    ("NHD", 32),
    ("HND", 16),
    ("HND", 32),
    ("blocks first", 32),
    ("pairs", 16),
    ("pairs HND", 32),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("other_mode", MODES)
def test_whatever_the_cache_looks_like(mode: Any, other_mode: Any) -> None:
    """Every pair of engines shares, with the right bytes at the right token and head."""
    rng = np.random.default_rng(1)
    with (
        CacheServer("tcp://127.0.0.1:0", capacity=2**22, chunk_size=64) as server,
        CacheClient(server.endpoint, raises=True) as client,
    ):
        engines: list[Any] = []
        for kind, block in KINDS:
            for one in (mode, other_mode):
                arrays, _, hints, engine_type = engine_arrays(kind, block)
                if one == "lmcache_driven":
                    arrays = [
                        [kvshm.share(part) for part in layer] if isinstance(layer, list) else kvshm.share(layer)
                        for layer in arrays
                    ]
                views = [
                    [part.transpose(0, 2, 1, 3) if "HND" in kind else part for part in layer]
                    if isinstance(layer, list)
                    else layer.transpose({"HND": (0, 1, 3, 2, 4), "NHD": (0, 1, 2, 3, 4)}.get(kind, (1, 0, 2, 3, 4)))
                    for layer in arrays
                ]
                engine = client.register(
                    arrays, "model", layout_hints=hints, engine_type=engine_type, transfer_mode=one
                )
                engines.append((engine, views, BLOCKS_32 if block == 32 else BLOCKS_16))
        for number, (engine, views, blocks) in enumerate(engines):
            tokens = [number] * NUM_TOKENS
            for view in views:
                for plane in (0, 1):
                    view[plane][...] = rng.standard_normal(view[plane].shape)
            wanted = in_order(views, blocks)
            assert engine.store(tokens, blocks) == NUM_TOKENS
            for other, other_views, other_blocks in engines:
                assert other.lookup(tokens) == NUM_TOKENS
                assert other.retrieve(tokens, other_blocks[::-1]) == NUM_TOKENS
                got = in_order(other_views, other_blocks[::-1])
                assert all(np.array_equal(one, two) for one, two in zip(wanted, got, strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("is_mla", [False, True])
def test_lmcaches_engine_driven_clients_share_with_both_modes(mode: Any, block: int, is_mla: bool) -> None:
    """Of their layout they tell so much: layers, elements of a token, dtype, one plane or two."""
    rng = np.random.default_rng(2)
    num_blocks = 1 + max(BLOCKS_16)
    shape = (num_blocks, block, HEAD) if is_mla else (2, num_blocks, block, HEADS, HEAD)
    hidden = HEAD if is_mla else HEADS * HEAD
    planes = 1 if is_mla else 2
    arrays: list[Any] = [rng.standard_normal(shape).astype(np.float16) for _ in range(2)]
    if mode == "lmcache_driven":
        arrays = [kvshm.share(array) for array in arrays]
    blocks = BLOCKS_32 if block == 32 else BLOCKS_16
    tokens = list(range(NUM_TOKENS))
    with (
        CacheServer("tcp://127.0.0.1:0", capacity=2**22, chunk_size=64) as server,
        CacheClient(server.endpoint, raises=True) as client,
        RawClient(server.endpoint) as raw,
    ):
        engine = client.register(arrays, "model", layout_hints=NHD, transfer_mode=mode)
        register = {
            "instance_id": 5,
            "model_name": "model",
            "world_size": 1,
            "block_size": 48 - block,  # theirs is another
            "num_layers": 2,
            "hidden_dim_size": hidden,
            "dtype_str": "float16",
            "use_mla": is_mla,
        }
        (where,) = raw.ask(14, register)
        pool = np.asarray(
            kvshm.Segment.attach(where["shm_name"], where["pool_size"]).array((where["pool_size"],), "uint8")
        )

        def key(prompt: list[int]) -> dict[str, Any]:
            return {
                "model_name": "model",
                "world_size": 1,
                "worker_id": 0,
                "token_ids": prompt,
                "start": 0,
                "end": len(prompt),
                "request_id": "r",
                "num_kv_readers": 1,
            }

        assert engine.store(tokens, blocks) == NUM_TOKENS
        raw.ask(8, key(tokens) | {"worker_id": None}, 1)
        assert raw.ask(9, "r") == [2]
        (reply,) = raw.ask(18, key(tokens), 5)
        assert reply["success"] is True
        chunks = [
            pool[slot["offset"] : slot["offset"] + slot["length"]].view(np.float16).reshape(planes, 2, 64, hidden)
            for slot in reply["context"]["slots"]
        ]
        for layer, array in enumerate(arrays):
            planes_of = [array] if is_mla else list(array)
            for plane, part in enumerate(planes_of):
                got = np.concatenate([chunk[plane, layer] for chunk in chunks])
                assert np.array_equal(got, part[blocks].reshape(NUM_TOKENS, hidden))
        assert raw.ask(19, key(tokens), 5) == [True]

        other = [token + 1 for token in tokens]
        (reply,) = raw.ask(16, key(other), 5)
        wanted = rng.standard_normal((2, planes, 2, 64, hidden)).astype(np.float16)
        for chunk, slot in zip(reply["context"]["chunk_indices"], reply["context"]["slots"], strict=True):
            pool[slot["offset"] : slot["offset"] + slot["length"]] = wanted[chunk].reshape(-1).view(np.uint8)
        assert raw.ask(17, key(other), 5, b"") == [True]
        assert engine.lookup(other) == NUM_TOKENS
        assert engine.retrieve(other, blocks) == NUM_TOKENS
        for layer, array in enumerate(arrays):
            for plane, part in enumerate([array] if is_mla else list(array)):
                got = part[blocks].reshape(NUM_TOKENS, hidden)
                assert np.array_equal(got, np.concatenate(list(wanted[:, plane, layer])))
        del pool
