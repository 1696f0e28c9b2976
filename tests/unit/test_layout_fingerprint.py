"""Another layout has another fingerprint, and engines of other layouts never find each other's chunks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from kvshm import CacheClient, CacheServer, empty_many, formats, layout
from kvshm.layout import EngineGroupInfo
from kvshm.spec import ArraySpec

ALIKE = ((2, 7, 4, 1, 6), (2, 7, 4, 1, 6))
SWAPPED = ((2, 7, 4, 1, 10), (2, 7, 4, 1, 6))
NHD = {"kv_layout": "NHD"}


def groups(*of_layers: dict[str, Any]) -> tuple[EngineGroupInfo, ...]:
    return tuple(EngineGroupInfo(layer, (layer,), **facts) for layer, facts in enumerate(of_layers))


# One fact of the first differs in each of the others.
LAYOUTS: dict[str, tuple[Any, tuple[EngineGroupInfo, ...], str, dict[str, str]]] = {
    "two groups": (ALIKE, groups({}, {}), "float16", NHD),
    "a window": (ALIKE, groups({}, {"sw_size_tokens": 8}), "float16", NHD),
    "recurrent": (ALIKE, groups({}, {"recurrent_state": True}), "float16", NHD),
    "a tag": (ALIKE, groups({}, {"extra_object_group_tag": 3}), "float16", NHD),
    "ids swapped": (ALIKE, (EngineGroupInfo(1, (0,)), EngineGroupInfo(0, (1,))), "float16", NHD),
    "compressed": (ALIKE, groups({}, {"tokens_per_block": 8}), "float16", NHD),
    "another dtype": (ALIKE, groups({}, {}), "bfloat16", NHD),
    "heads first": (ALIKE, groups({}, {}), "float16", {"kv_layout": "HND"}),
    "wider and narrower": (SWAPPED, groups({}, {}), "float16", NHD),
    "narrower and wider": (SWAPPED[::-1], groups({}, {}), "float16", NHD),
}


def manager(name: str, num_blocks: int = 7, chunk: int = 8) -> layout.KVLayerGroupsManager:
    shapes, infos, dtype, hints = LAYOUTS[name]
    specs = [ArraySpec.dense((2, num_blocks, *shape[2:]), np.dtype(dtype)) for shape in shapes]
    layers = layout.engine_group_layer_indices(infos)
    normalised, names = formats.normalize_and_discover_per_layer_formats(specs, layers, "vllm", hints)
    return layout.KVLayerGroupsManager(normalised, names, infos, chunk)


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(LAYOUTS, 2)))
def test_another_layout_has_another_fingerprint(one: str, other: str) -> None:
    assert layout.layout_fingerprint(manager(one)) != layout.layout_fingerprint(manager(other))


def test_the_number_of_blocks_is_no_part_of_it_but_the_chunk_is() -> None:
    first = layout.layout_fingerprint(manager("a window"))
    assert first == layout.layout_fingerprint(manager("a window", num_blocks=11))
    assert first != layout.layout_fingerprint(manager("a window", chunk=16))


@pytest.mark.parametrize("mode", ["engine_driven", "lmcache_driven"])
def test_engines_of_another_layout_find_nothing(mode: Any) -> None:
    with (
        CacheServer("tcp://127.0.0.1:0", capacity=2**20, chunk_size=8) as server,
        CacheClient(server.endpoint) as client,
    ):

        def engine(name: str) -> Any:
            shapes, infos, dtype, hints = LAYOUTS[name]
            layers = empty_many(shapes, [dtype] * len(shapes))
            return client.register(
                layers, "one model", layout_hints=hints, engine_group_infos=infos, transfer_mode=mode
            )

        tokens = list(range(8))
        storing = engine("two groups")
        assert storing.store(tokens, [[1, 2], [3, 4]]) == 8
        assert storing.lookup(tokens) == 8
        for name in list(LAYOUTS)[1:]:
            assert engine(name).lookup(tokens) == 0, name
