"""What an engine gets back is what it put in, or a miss, or an error; and what calls return is true."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kvshm
from kvshm import wire
from kvshm.client.cache_client import CacheClient, CacheServerError
from kvshm.formats import vllm
from kvshm.layout import EngineGroupInfo
from kvshm.server.cache_server import CacheServer
from tests.support.cache_server import NHD, RawClient, running_server

MODES = ["lmcache_driven", "engine_driven"]
Make = Callable[..., Any]


@pytest.fixture
def server() -> Iterator[CacheServer]:
    with running_server(chunk_size=2, capacity=2**16) as server:
        yield server


@pytest.fixture
def client(server: CacheServer) -> Iterator[CacheClient]:
    with CacheClient(server.endpoint, raises=True) as client:
        yield client


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Any:
    """Who copies."""
    return request.param


def numbered(*shapes: tuple[int, ...], dtype: Any = np.uint8) -> list[NDArray[Any]]:
    """Arrays in shared memory whose elements all differ, as far as the dtype goes."""
    arrays = kvshm.empty_many(shapes, [np.dtype(dtype).name] * len(shapes))
    first = 1
    for array in arrays:
        array[...] = (np.arange(first, first + array.size) % 251).reshape(array.shape)
        first += array.size
    return arrays


def wipe(arrays: list[NDArray[Any]], value: int = 255) -> None:
    for array in arrays:
        array[...] = value


def groups(*of_layers: dict[str, Any]) -> tuple[EngineGroupInfo, ...]:
    return tuple(EngineGroupInfo(layer, (layer,), **facts) for layer, facts in enumerate(of_layers))


def _miss(engine: Any, tokens: list[int], blocks: list[int], **more: Any) -> int:
    """A retrieve of what is not there, which raises since these clients do."""
    with pytest.raises(CacheServerError, match="not cached"):
        engine.retrieve(tokens, blocks, **more)
    return 0


class TestNullBlocks:
    """A block that stands for no data is never stored as data."""

    SHAPE = (2, 9, 1, 1, 1)

    @pytest.mark.parametrize("blocks", [[1, 0], [0, 1], [0, 0]])
    def test_a_chunk_with_a_null_block_is_not_stored(self, client: CacheClient, mode: Any, blocks: list[int]) -> None:
        with client.register(numbered((2, 4, 1, 1, 1)), "m", layout_hints=NHD, transfer_mode=mode) as engine:
            assert engine.store([1, 2], blocks) == 0
            assert engine.lookup([1, 2]) == 0
            assert _miss(engine, [1, 2], [2, 3]) == 0

    @pytest.mark.parametrize(
        ("blocks", "expected"),
        [
            ([1, 2, 3, 4, 5, 0], 4),
            ([1, 2, 3, 4, 0, 0], 4),
            ([1, 2, 0, 4, 5, 6], 2),
            ([0] * 6, 0),
            ([1, 2, 3, 4, 5, 6], 6),
        ],
    )
    def test_a_store_returns_what_a_lookup_finds(
        self, client: CacheClient, mode: Any, blocks: list[int], expected: int
    ) -> None:
        tokens = [5, 6, 7, 8, 9, 10]
        with client.register(numbered(self.SHAPE), "m", layout_hints=NHD, transfer_mode=mode) as engine:
            assert engine.store(tokens, blocks) == expected
            assert engine.lookup(tokens) == expected
            engine.release(tokens)

    def test_what_was_stored_before_counts(self, client: CacheClient, mode: Any) -> None:
        """Also where the second store has no data of it."""
        with client.register(numbered(self.SHAPE), "m", layout_hints=NHD, transfer_mode=mode) as engine:
            assert engine.store([5, 6, 7, 8], [1, 2, 3, 4]) == 4
            assert engine.store([5, 6, 7, 8, 9, 9], [0, 0, 3, 4, 0, 0]) == 4
            assert engine.store([5, 6, 7, 8, 9, 9], [0, 0, 0, 0, 5, 6]) == 6

    def test_an_engine_says_which_block_it_is(self, client: CacheClient, mode: Any) -> None:
        arrays = numbered(self.SHAPE)
        common: dict[str, Any] = {"layout_hints": NHD, "transfer_mode": mode}
        with client.register(arrays, "none", null_block_id=None, **common) as engine:
            assert engine.store([1, 2], [1, 0]) == 2
            wanted = arrays[0][:, [1, 0]].copy()
            wipe(arrays)
            assert engine.retrieve([1, 2], [0, 3]) == 2
            assert np.array_equal(arrays[0][:, [0, 3]], wanted)
        with client.register(arrays, "other", null_block_id=7, **common) as engine:
            assert engine.store([1, 2], [7, 1]) == 0
            arrays[0][:, [0, 1]] = 7
            assert engine.store([1, 2], [0, 1]) == 2
            assert engine.retrieve([1, 2], [3, 4]) == 2
            assert (arrays[0][:, [3, 4]] == 7).all()
        for odd in (1.5, "no", [0], True):
            with pytest.raises(ValueError, match="invalid null_block_id"):
                client.register(arrays, "odd", null_block_id=odd, **common)  # type: ignore[arg-type]

    def test_a_server_may_have_another(self, mode: Any) -> None:
        for null_block_id, expected in ((None, 2), (3, 0)):
            with (
                running_server(chunk_size=2, null_block_id=null_block_id) as server,
                CacheClient(server.endpoint, raises=True) as client,
                client.register(numbered(self.SHAPE), "m", layout_hints=NHD, transfer_mode=mode) as engine,
            ):
                assert engine.store([1, 2], [0, 3]) == expected

    def test_a_kept_block_of_a_window(self, client: CacheClient, mode: Any) -> None:
        shape = (2, 9, 1, 1, 1)
        infos = groups({}, {"sw_size_tokens": 2})
        with client.register(
            numbered(shape, shape), "m", layout_hints=NHD, engine_group_infos=infos, transfer_mode=mode
        ) as engine:
            assert engine.store([1, 2, 3], [[1, 2, 3], [0, 2, 3]]) == 0
            assert engine.lookup([1, 2, 9]) == 0
            assert engine.store([1, 2, 3, 4], [[1, 2, 3, 4], [0, 0, 5, 6]]) == 4, "outside the window it may be null"
            assert engine.lookup([1, 2, 3, 4]) == 4
            assert engine.lookup([1, 2, 9]) == 0
            engine.release()

    def test_less_than_a_chunk_of_a_window(self, client: CacheClient, mode: Any) -> None:
        """Of each chunk only the last token is kept, so only its block counts."""
        shape = (2, 9, 1, 1, 1)
        infos = groups({}, {"sw_size_tokens": 1})
        arrays = numbered(shape, shape)
        with client.register(arrays, "m", layout_hints=NHD, engine_group_infos=infos, transfer_mode=mode) as engine:
            assert engine.store([1, 2], [[1, 2], [3, 0]]) == 0
            assert engine.store([1, 2], [[1, 2], [0, 3]]) == 2
            wanted = arrays[1][:, 3].copy()
            wipe(arrays)
            assert engine.retrieve([1, 2], [[1, 2], [0, 4]]) == 2
            assert np.array_equal(arrays[1][:, 4], wanted)

    def test_a_retrieve_may_have_the_null_block_twice(self, client: CacheClient, mode: Any) -> None:
        arrays = numbered(self.SHAPE)
        with client.register(arrays, "m", layout_hints=NHD, transfer_mode=mode) as engine:
            assert engine.store([1, 2, 3, 4], [1, 2, 3, 4]) == 4
            wanted = arrays[0][:, [2, 3]].copy()
            wipe(arrays)
            assert engine.retrieve([1, 2, 3, 4], [0, 5, 6, 0]) == 4
            assert np.array_equal(arrays[0][:, [5, 6]], wanted)
            assert (arrays[0][:, [1, 2, 3, 4, 7, 8]] == 255).all()


class TestPagesThatAreNoRows:
    """Recurrent state and index pages move block for block."""

    def test_state_behind_a_skip_inside_its_block(self, client: CacheClient, mode: Any) -> None:
        arrays = [*numbered((2, 5, 1, 1, 1)), *numbered((2, 5, 2, 1, 1))]
        infos = groups({}, {"recurrent_state": True})
        with client.register(arrays, "m", layout_hints=NHD, engine_group_infos=infos, transfer_mode=mode) as engine:
            assert engine.store([1, 2], [[1, 2], [1]]) == 2
            attention, state = arrays[0][:, 2].copy(), arrays[1][:, 1].copy()
            wipe(arrays)
            assert engine.retrieve([1, 2], [[3, 4], [2]], skip_first_n_tokens=1) == 2
            assert np.array_equal(arrays[1][:, 2], state), "it belongs to the last token"
            assert np.array_equal(arrays[0][:, 4], attention)
            assert (arrays[0][:, 3] == 255).all()

    @pytest.mark.parametrize(("skip", "is_written"), [(0, True), (1, True), (2, False)])
    def test_index_pages_are_whole_or_untouched(
        self, client: CacheClient, mode: Any, skip: int, is_written: bool
    ) -> None:
        """A page is all values, then all scales."""
        arrays = numbered((3, 2, 132))
        with client.register(arrays, "m", transfer_mode=mode) as engine:
            assert engine.store([1, 2], [1]) == 2
            wanted = arrays[0][1].copy()
            wipe(arrays)
            assert engine.retrieve([1, 2], [2], skip_first_n_tokens=skip) == 2
            assert np.array_equal(arrays[0][2], wanted if is_written else np.full_like(wanted, 255))


class TestWorkers:
    """Each worker of a world has its own chunks; pipeline stages have other layers."""

    @staticmethod
    def pipeline(client: CacheClient, mode: Any) -> list[tuple[Any, list[NDArray[Any]]]]:
        found = []
        for worker_id, num_layers in ((0, 2), (1, 1)):
            arrays = numbered(*[(2, 9, 1, 1, 1)] * num_layers)
            engine = client.register(
                arrays, "m", layout_hints=NHD, transfer_mode=mode, world_size=2, worker_id=worker_id
            )
            found.append((engine, arrays))
        return found

    def test_stages_of_a_pipeline(self, client: CacheClient, mode: Any) -> None:
        engines = self.pipeline(client, mode)
        assert [engine.store([1, 2], [1, 2]) for engine, _ in engines] == [0, 2], "one stage alone is no hit"
        wanted = [[array[:, [1, 2]].copy() for array in arrays] for _, arrays in engines]
        assert [engine.lookup([1, 2]) for engine, _ in engines] == [2, 2]
        for (engine, arrays), of_worker in zip(engines, wanted, strict=True):
            wipe(arrays)
            assert engine.retrieve([1, 2], [3, 4]) == 2
            assert all(np.array_equal(array[:, [3, 4]], want) for array, want in zip(arrays, of_worker, strict=True))

    def test_a_stage_that_is_registered_later(self, client: CacheClient, mode: Any) -> None:
        """Until then nobody knows what its chunks are like."""
        (first, _), (second, _) = self.pipeline(client, mode)
        second.unregister()
        assert (first.store([1, 2], [1, 2]), first.lookup([1, 2])) == (0, 0)
        arrays = numbered((2, 9, 1, 1, 1))
        with client.register(arrays, "m", layout_hints=NHD, transfer_mode=mode, world_size=2, worker_id=1) as again:
            assert again.store([1, 2], [1, 2]) == 2
            assert first.lookup([1, 2]) == 2

    def test_a_request_pins_for_all_workers(self, mode: Any) -> None:
        """Two workers, one looks up, others fill the pool, both retrieve."""
        arrays = [numbered((2, 65, 1, 1, 64)) for _ in range(2)]
        with (
            running_server(chunk_size=2, capacity=2**16) as server,
            CacheClient(server.endpoint) as client,
        ):
            workers = [
                client.register(each, "m", layout_hints=NHD, transfer_mode=mode, world_size=2, worker_id=worker_id)
                for worker_id, each in enumerate(arrays)
            ]
            other = client.register(numbered((2, 65, 1, 1, 64)), "other", layout_hints=NHD, transfer_mode=mode)
            tokens = list(range(8))
            assert [worker.store(tokens, list(range(1, 9))) for worker in workers] == [0, 8]
            wanted = [each[0][:, 1:9].copy() for each in arrays]
            for each in arrays:
                wipe(each)
            assert workers[0].lookup(tokens, request_id="request 1") == 8
            for number in range(40):
                other.store([number] * 64, list(range(1, 65)))
            assert client.status()["objects"]["evicted"] > 100
            assert [worker.retrieve(tokens, list(range(11, 19)), request_id="request 1") for worker in workers] == [
                8,
                8,
            ]
            assert all(np.array_equal(each[0][:, 11:19], want) for each, want in zip(arrays, wanted, strict=True))
            assert client.status()["lookups"] == {"open": 0, "pins": 0}
            for number in range(40):
                other.store([number] * 64, list(range(1, 65)))
            assert workers[0].lookup(tokens) == 0, "nothing is pinned any more"

    def test_both_workers_may_look_up(self, client: CacheClient, mode: Any) -> None:
        engines = self.pipeline(client, mode)
        for engine, _ in engines:
            engine.store([1, 2, 3, 4], [1, 2, 3, 4])
        assert [engine.lookup([1, 2, 3, 4], "r") for engine, _ in engines] == [4, 4]
        assert [engine.retrieve([1, 2, 3, 4], [5, 6, 7, 8], request_id="r") for engine, _ in engines] == [4, 4]
        assert client.status()["lookups"] == {"open": 0, "pins": 0}

    def test_a_request_in_another_layout_is_not_joined(self, client: CacheClient, mode: Any) -> None:
        """The second worker has an engine that stored in the first one's layout, and one whose layout is another."""
        layouts = [(0, 2), (1, 2), (1, 1)]
        engines = [
            client.register(
                numbered(*[(2, 9, 1, 1, 1)] * num_layers),
                "m",
                layout_hints=NHD,
                transfer_mode=mode,
                world_size=2,
                worker_id=worker_id,
            )
            for worker_id, num_layers in layouts
        ]
        assert [engine.store([1, 2], [1, 2]) for engine in engines[:2]] == [0, 2]
        assert engines[0].lookup([1, 2], "r") == 2
        assert engines[2].lookup([1, 2], "r") == 0
        with pytest.raises(CacheServerError, match="1 of 1 chunks are not cached"):
            engines[2].retrieve([1, 2], [3, 4], request_id="r")
        assert engines[1].lookup([1, 2], "r") == 2
        assert [engine.retrieve([1, 2], [3, 4], request_id="r") for engine in engines[:2]] == [2, 2]
        assert client.status()["lookups"] == {"open": 0, "pins": 0}

    def test_what_a_worker_was_promised_outlives_the_engine_that_asked_first(
        self, client: CacheClient, mode: Any
    ) -> None:
        (first, _), (second, _) = self.pipeline(client, mode)
        for engine in (first, second):
            engine.store([1, 2], [1, 2])
        assert (first.lookup([1, 2], "r"), second.lookup([1, 2], "r")) == (2, 2)
        first.unregister()
        assert client.status()["lookups"] == {"open": 1, "pins": 1}
        assert second.retrieve([1, 2], [3, 4], request_id="r") == 2
        assert client.status()["lookups"] == {"open": 0, "pins": 0}


class TestPlainWorkers:
    """The same in LMCache's own frames, which say who they are only when they store."""

    @staticmethod
    def key(tokens: list[int], **changes: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "model_name": "m",
            "world_size": 2,
            "worker_id": 0,
            "token_ids": tokens,
            "start": 0,
            "end": len(tokens),
            "request_id": "r",
            "num_kv_readers": 1,
        }
        return fields | changes

    def test_stages_of_a_pipeline(self, server: CacheServer) -> None:
        with (
            RawClient(server.endpoint) as scheduler,
            RawClient(server.endpoint) as zero,
            RawClient(server.endpoint) as one,
        ):
            workers = [zero, one]
            arrays = [numbered(*[(2, 9, 1, 1, 1)] * num_layers) for num_layers in (2, 1)]
            for worker_id, worker in enumerate(workers):
                assert worker.register(arrays[worker_id], 1 + worker_id, model_name="m", world_size=2) == []
                done = worker.ask(6, self.key([1, 2], worker_id=worker_id), 1 + worker_id, [[1, 2]], b"")
                assert done == [[b"", True]]
            assert scheduler.ask(8, self.key([1, 2], worker_id=None), 1) == []
            assert scheduler.ask(9, "r") == [1]
            for worker_id, worker in enumerate(workers):
                wanted = [array[:, [1, 2]].copy() for array in arrays[worker_id]]
                key = self.key([1, 2], worker_id=worker_id)
                assert worker.ask(7, key, 1 + worker_id, [[3, 4]], b"", 0) == [[b"", True]]
                assert all(
                    np.array_equal(array[:, [3, 4]], want)
                    for array, want in zip(arrays[worker_id], wanted, strict=True)
                )
            assert server.call(server.status)["lookups"] == {"open": 0, "pins": 0}

    def test_stages_come_back_after_a_restart_of_the_engine(self, server: CacheServer) -> None:
        """Nobody says which worker an engine is; the chunks that were stored in its layout do."""
        arrays = [numbered(*[(2, 9, 1, 1, 1)] * num_layers) for num_layers in (2, 1)]
        with RawClient(server.endpoint) as raw:
            for worker_id in range(2):
                raw.register(arrays[worker_id], worker_id, model_name="m", world_size=2)
                raw.ask(6, self.key([1, 2], worker_id=worker_id), worker_id, [[1, 2]], b"")
            for worker_id in range(2):
                raw.ask(2, worker_id)
            for worker_id in range(2):
                raw.register(arrays[worker_id], 5 + worker_id, model_name="m", world_size=2)
            raw.ask(8, self.key([1, 2], worker_id=None), 1)
            assert raw.ask(9, "r") == [1]
            raw.ask(13, "r")

    def test_one_worker_alone(self, server: CacheServer) -> None:
        arrays = numbered((2, 9, 1, 1, 1))
        with RawClient(server.endpoint) as raw:
            raw.register(arrays, 1, model_name="m", world_size=2)
            raw.ask(6, self.key([1, 2]), 1, [[1, 2]], b"")
            for worker_id, expected in ((None, 0), (0, 1), (1, 0)):
                raw.ask(8, self.key([1, 2], worker_id=worker_id), 1)
                assert raw.ask(9, "r") == [expected]
            raw.ask(13, "r")

    def test_each_connection_has_its_own_lookups(self, server: CacheServer) -> None:
        arrays = numbered((2, 9, 1, 1, 1))
        with RawClient(server.endpoint) as one, RawClient(server.endpoint) as two:
            for number, raw in enumerate((one, two)):
                raw.register(arrays, number, model_name="m", world_size=1)
            one.ask(6, self.key([1, 2, 3, 4], world_size=1), 0, [[1, 2, 3, 4]], b"")
            one.ask(8, self.key([1, 2, 3, 4], world_size=1, worker_id=None), 1)
            two.ask(8, self.key([1, 2, 9, 9], world_size=1, worker_id=None), 1)
            assert (one.ask(10, "r", 1.0), two.ask(9, "r")) == ([2], [1])
            two.ask(13, "r")
            assert server.call(server.status)["lookups"] == {"open": 1, "pins": 2}
            one.ask(13, "r")


class TestLayoutsByGuess:
    """What the shape does not tell must be said."""

    @pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
    def test_heads_or_slots(self, client: CacheClient, mode: Any, kv_layout: str) -> None:
        arrays = numbered((2, 5, 1, 2, 1))
        with pytest.raises(ValueError, match=r"does not tell slots from heads; pass layout_hints="):
            client.register(arrays, "m", transfer_mode=mode)
        assert client.status()["instances"] == []
        if kv_layout == "HND":
            with client.register(arrays, "m", layout_hints={"kv_layout": "HND"}, transfer_mode=mode) as engine:
                assert engine.store([1, 2], [1]) == 2, "blocks of 2 tokens"
        else:
            with client.register(arrays, "m", layout_hints=NHD, transfer_mode=mode) as engine:
                assert engine.store([1, 2], [1, 2]) == 2
                wanted = arrays[0][:, [1, 2]].copy()
                assert engine.retrieve([1, 2], [3, 4]) == 2
                assert np.array_equal(arrays[0][:, [3, 4]], wanted)

    def test_a_refused_layout_is_not_warned_of(
        self, client: CacheClient, mode: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        """That HND is taken is said where it is taken."""
        vllm._warn_of_default_layout.cache_clear()
        for array in numbered((2, 5, 1, 2, 1), (5, 2, 2, 3)):
            with pytest.raises(ValueError, match=r"layer 0: the shape .* does not tell slots from heads"):
                client.register([array], "m", transfer_mode=mode)
        assert "HND is taken" not in caplog.text

    def test_hints_that_are_none(self, client: CacheClient, mode: Any) -> None:
        arrays = numbered((2, 5, 1, 2, 1))
        for hints in ({"kvlayout": "NHD"}, {"kv_layout": "NHD", "x": 1}):
            with pytest.raises(ValueError, match=r"unknown layout hints? .*known are .*kv_layout"):
                client.register(arrays, "m", layout_hints=hints, transfer_mode=mode)

    def test_hints_of_other_engines(self, client: CacheClient, mode: Any) -> None:
        """They are checked, sent along, and not looked at."""
        hints = {"kv_layout": "NHD", "head_dim": np.int32(7), "tokens_per_block": None, "kv_list_layout": "k_v"}
        with client.register(numbered((2, 9, 1, 1, 1)), "m", layout_hints=hints, transfer_mode=mode) as engine:
            assert engine.store([1, 2], [1, 2]) == 2

    def test_a_contiguous_sequence_is_no_paged_cache(self, client: CacheClient, mode: Any) -> None:
        """A view [2, NB, NH, BS, HS] of [2, NH, S, HS], with as many heads as blocks."""
        (contiguous,) = numbered((2, 8, 16, 3))
        view = contiguous.reshape(2, 8, 8, 2, 3).transpose(0, 2, 1, 3, 4)
        with pytest.raises(ValueError, match="outside the axis of its blocks"):
            client.register([view], "m", layout_hints={"kv_layout": "HND"}, transfer_mode=mode)

    def test_layers_in_no_group(self, client: CacheClient, mode: Any) -> None:
        arrays = numbered(*[(2, 5, 1, 1, 1)] * 3)
        infos = (EngineGroupInfo(0, (0, 2)),)
        common: dict[str, Any] = {"layout_hints": NHD, "transfer_mode": mode, "engine_group_infos": infos}
        with pytest.raises(ValueError, match=r"layers \[1\] are in no engine group.*excluded_layers"):
            client.register(arrays, "m", **common)
        for excluded, text in (([0], r"layers \[0\] are in an engine group and in"), ([3], r"layers are 0 to 2")):
            with pytest.raises(ValueError, match=text):
                client.register(arrays, "m", excluded_layers=[1, *excluded], **common)
        assert client.status()["instances"] == []
        with client.register(arrays, "m", excluded_layers=[1], **common) as engine:
            assert engine.store([1, 2], [1, 2]) == 2
            wanted = [array[:, [1, 2]].copy() for array in arrays]
            wipe(arrays)
            assert engine.retrieve([1, 2], [3, 4]) == 2
            assert [np.array_equal(array[:, [3, 4]], want) for array, want in zip(arrays, wanted, strict=True)] == [
                True,
                False,
                True,
            ]

    def test_excluded_layers_without_groups(self, client: CacheClient, mode: Any) -> None:
        arrays = numbered(*[(2, 5, 1, 1, 1)] * 2)
        with client.register(arrays, "m", layout_hints=NHD, transfer_mode=mode, excluded_layers=(0,)) as engine:
            assert engine.store([1, 2], [1, 2]) == 2
        with client.register(numbered((2, 5, 1, 1, 1)), "m", layout_hints=NHD, transfer_mode=mode) as engine:
            assert engine.lookup([1, 2]) == 0, "layer 1 of that model is not layer 0 of this"
        for wrong in ("x", ["0"], 5, [True]):
            with pytest.raises(ValueError, match="invalid excluded_layers"):
                client.register(arrays, "m", layout_hints=NHD, excluded_layers=wrong)  # type: ignore[arg-type]


class TestLookups:
    """Pins do not outlive their request."""

    def test_a_request_that_looks_up_while_it_waits(self, client: CacheClient, mode: Any) -> None:
        with client.register(numbered((2, 9, 1, 1, 1)), "m", layout_hints=NHD, transfer_mode=mode) as engine:
            engine.store([1, 2, 3, 4], [1, 2, 3, 4])
            assert [engine.lookup([1, 2, 3, 4], "r") for _ in range(3)] == [4, 4, 4]
            assert client.status()["lookups"]["pins"] == 2
            assert engine.retrieve([1, 2, 3, 4], [5, 6, 7, 8], request_id="r") == 4
            assert client.status()["lookups"] == {"open": 0, "pins": 0}

    def test_release(self, client: CacheClient, mode: Any) -> None:
        with client.register(numbered((2, 9, 1, 1, 1)), "m", layout_hints=NHD, transfer_mode=mode) as engine:
            engine.store([1, 2, 3, 4], [1, 2, 3, 4])

            def pins() -> int:
                return int(client.status()["lookups"]["pins"])

            engine.lookup([1, 2, 3, 4], "r")
            engine.lookup([1, 2, 3, 4], "s")
            engine.lookup([1, 2])
            engine.lookup([1, 2, 3, 4])
            assert pins() == 7
            engine.release(request_id="unknown")
            engine.release([9, 9])
            assert pins() == 7
            engine.release(request_id="s")
            assert pins() == 5
            engine.release([1, 2, 3, 4])
            assert pins() == 3
            engine.release()
            assert pins() == 0
            engine.release()
            wrong: Any
            for wrong in ([1.5], "ab"):
                with pytest.raises(ValueError, match="token_ids"):
                    engine.release(wrong)

    def test_a_retrieve_that_misses_uses_its_lookup_up(self, client: CacheClient, mode: Any) -> None:
        with client.register(numbered((2, 9, 1, 1, 1)), "m", layout_hints=NHD, transfer_mode=mode) as engine:
            engine.store([1, 2], [1, 2])
            assert engine.lookup([1, 2, 3, 4], "r") == 2
            assert _miss(engine, [1, 2, 3, 4], [5, 6, 7, 8], request_id="r") == 0
            assert client.status()["lookups"]["pins"] == 0


class TestLife:
    """Engines keep what they need, and nothing longer than they live."""

    def test_an_engine_keeps_its_client(self, server: CacheServer, mode: Any) -> None:
        engine = kvshm.CacheClient(server.endpoint, raises=True).register(
            numbered((2, 9, 1, 1, 1)), "m", layout_hints=NHD, transfer_mode=mode
        )
        gc.collect()
        assert engine.store([1, 2], [1, 2]) == 2
        assert engine.lookup([1, 2]) == 2
        engine.unregister()

    def test_a_dropped_engine_is_unregistered(self, client: CacheClient, mode: Any) -> None:
        arrays = numbered((2, 9, 1, 1, 1))
        engine = client.register(arrays, "m", layout_hints=NHD, transfer_mode=mode)
        engine.store([1, 2], [1, 2])
        engine.lookup([1, 2])
        del engine
        while client.status()["instances"]:
            client.noop()
        assert client.status()["lookups"] == {"open": 0, "pins": 0}

    def test_a_dropped_engine_with_its_client(self, server: CacheServer, mode: Any) -> None:
        arrays = numbered((2, 9, 1, 1, 1))
        seen = weakref.ref(arrays[0])
        client = CacheClient(server.endpoint)
        engine = client.register(arrays, "m", layout_hints=NHD, transfer_mode=mode)
        engine.store([1, 2], [1, 2])
        del engine, client, arrays
        gc.collect()
        with CacheClient(server.endpoint) as other:
            while other.status()["instances"]:
                other.noop()
        gc.collect()
        assert seen() is None

    @pytest.mark.parametrize("name", ["timeout_s", "connect_timeout_s", "heartbeat_s", "probe_timeout_s", "retry_s"])
    @pytest.mark.parametrize("value", [float("inf"), 1e10, float("nan"), -1, 0, "1", None, True])
    def test_times_that_no_clock_can_wait_for(self, name: str, value: Any) -> None:
        with pytest.raises(ValueError, match=f"{name} is"):
            CacheClient("tcp://127.0.0.1:1", **{name: value})

    def test_the_longest_times(self, server: CacheServer, mode: Any) -> None:
        with (
            CacheClient(server.endpoint, 1e8, connect_timeout_s=1e8, heartbeat_s=1e8, raises=True) as client,
            client.register(numbered((2, 9, 1, 1, 1)), "m", layout_hints=NHD, transfer_mode=mode) as engine,
        ):
            assert engine.store([1, 2], [1, 2]) == 2
            assert engine.retrieve([1, 2], [3, 4]) == 2
            assert client.noop(timeout_s=1e8) == "OK"
            for value in (float("inf"), float("nan"), 0):
                with pytest.raises(ValueError, match="timeout_s is"):
                    client.noop(timeout_s=value)


class TestInput:
    """What the caller gets wrong is said at once, and nothing is sent."""

    @pytest.fixture
    def engine(self, client: CacheClient, mode: Any) -> Iterator[Any]:
        with client.register(numbered((2, 9, 1, 1, 1)), "m", layout_hints=NHD, transfer_mode=mode) as engine:
            engine.store([1, 2], [1, 2])
            yield engine

    @pytest.fixture
    def silence(self, client: CacheClient, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def take(*_: Any, **__: Any) -> None:
            raise AssertionError("something was sent")

        monkeypatch.setattr(client._link.connections, "take", take)

    @pytest.mark.usefixtures("silence")
    @pytest.mark.parametrize(
        "tokens",
        [None, 5, "ab", b"ab", {1, 2}, {1: 2}, iter([1, 2]), (token for token in (1, 2)), [1, None], [True, 1]],
    )
    def test_tokens(self, engine: Any, tokens: Any) -> None:
        calls: list[Callable[[], Any]] = [
            lambda: engine.store(tokens, [1, 2]),
            lambda: engine.lookup(tokens),
            lambda: engine.retrieve(tokens, [1, 2]),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=r"token_ids"):
                call()

    @pytest.mark.usefixtures("silence")
    @pytest.mark.parametrize(
        "ids", [None, 5, "ab", {1, 2}, {1: 2}, iter([1, 2]), [1.5, 2], [None, 1], [9, 1], [-1, 1], [2**70, 1], [1], []]
    )
    def test_block_ids(self, engine: Any, ids: Any) -> None:
        calls: list[Callable[[], Any]] = [lambda: engine.store([1, 2], ids), lambda: engine.retrieve([1, 2], ids)]
        for call in calls:
            with pytest.raises(ValueError, match=r"block.ids|blocks"):
                call()

    @pytest.mark.usefixtures("silence")
    def test_a_block_twice(self, engine: Any) -> None:
        with pytest.raises(ValueError, match=r"twice"):
            engine.retrieve([1, 2], [3, 3])

    @pytest.mark.usefixtures("silence")
    @pytest.mark.parametrize("request_id", [5, b"r", "\ud800", ["r"]])
    def test_request_ids(self, engine: Any, request_id: Any) -> None:
        calls: list[Callable[[], Any]] = [
            lambda: engine.lookup([1, 2], request_id),
            lambda: engine.retrieve([1, 2], [1, 2], request_id=request_id),
            lambda: engine.release(request_id=request_id),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="request_id"):
                call()

    def test_blocks_of_a_window(self, client: CacheClient, mode: Any) -> None:
        shape = (2, 9, 1, 1, 1)
        infos = groups({}, {"sw_size_tokens": 2})
        with client.register(
            numbered(shape, shape), "m", layout_hints=NHD, engine_group_infos=infos, transfer_mode=mode
        ) as engine:
            for wrong in (9, -1):
                with pytest.raises(ValueError, match=r"kernel group 1 .*has blocks \[0, 9\)"):
                    engine.store([1, 2, 3, 4], [[1, 2, 3, 4], [1, 2, wrong, 4]])
                with pytest.raises(ValueError, match=r"kernel group 1 .*has blocks \[0, 9\)"):
                    engine.retrieve([1, 2, 3, 4], [[1, 2, 3, 4], [1, 2, 3, wrong]])

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"engine_group_infos": [{"engine_group_id": 0}]}, "EngineGroupInfo"),
            ({"engine_group_infos": {"engine_group_id": 0}}, "EngineGroupInfo"),
            ({"cache_salt": "\ud800"}, "cache_salt"),
            ({"cache_salt": None}, "cache_salt"),
            ({"model_name": "\ud800"}, "model_name"),
            ({"model_name": 5}, "model_name"),
            ({"world_size": 1.5}, "world_size"),
            ({"world_size": 0}, "world_size"),
            ({"worker_id": "0"}, "worker_id"),
            ({"layout_hints": [("kv_layout", "NHD")]}, "layout_hints"),
            ({"layout_hints": NHD | {"head_dim": object()}}, "'head_dim': expected a positive integer"),
            ({"layout_hints": NHD | {"num_kv_heads": 2**70}}, "'num_kv_heads': expected a positive integer"),
            ({"layout_hints": NHD | {"kv_list_layout": 5}}, "'kv_list_layout' is 5"),
            ({"excluded_layers": [0]}, "excluded_layers names all layers"),
        ],
    )
    def test_registrations(self, client: CacheClient, mode: Any, changes: dict[str, Any], text: str) -> None:
        given: dict[str, Any] = {
            "kv_caches": numbered((2, 9, 1, 1, 1)),
            "model_name": "m",
            "layout_hints": NHD,
            "transfer_mode": mode,
        }
        with pytest.raises(ValueError, match=text):
            client.register(**given | changes)
        assert client.status()["instances"] == []

    def test_names_of_any_alphabet(self, client: CacheClient, mode: Any) -> None:
        arrays = numbered((2, 9, 1, 1, 1))
        with client.register(arrays, "модель", layout_hints=NHD, transfer_mode=mode, cache_salt="☂") as engine:
            assert engine.store([1, 2], [1, 2]) == 2
            assert engine.lookup([1, 2], "запрос 😀") == 2
            engine.release(request_id="запрос 😀")


def test_unknown_engines_are_refused_by_name(server: CacheServer) -> None:
    """An operation of kvshm's client for an engine that LMCache's client registered, and the other way."""
    with RawClient(server.endpoint) as raw, CacheClient(server.endpoint) as client:
        raw.register(numbered((2, 9, 1, 1, 1)), 3)
        _, reason, _ = raw.ask("kvshm_lookup", 3, None, wire.pack([])[:0])
        assert "use LMCache's operations" in reason
        engine = client.register(numbered((2, 9, 1, 1, 1)), "m", layout_hints=NHD)
        assert raw.ask("kvshm_count", engine.instance_id, b"") == [0]
        engine.unregister()


@pytest.mark.parametrize("null_block_id", [True, np.array([1, 2]), 1.0, "1"])
def test_null_blocks_that_are_no_block_ids(null_block_id: Any) -> None:
    client = CacheClient("tcp://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"invalid null_block_id: expected (the|an) id of"):
        client.register([np.zeros((2, 5, 1, 2, 1), np.uint8)], "m", null_block_id=null_block_id)
    client.close()


def test_more_lists_than_engine_groups() -> None:
    infos = [EngineGroupInfo(0, (0,), 1), EngineGroupInfo(1, (1,), 1)]
    arrays = [kvshm.zeros((2, 5, 1, 2, 1), "uint8") for _ in infos]
    with (
        kvshm.CacheServer("tcp://127.0.0.1:0", capacity=1 << 20, chunk_size=2) as server,
        CacheClient(server.endpoint) as client,
    ):
        engine = client.register(arrays, "m", layout_hints={"kv_layout": "NHD"}, engine_group_infos=infos)
        with pytest.raises(ValueError, match="block_ids holds 3 lists; give one per engine group, 2 of them"):
            engine.store([1, 2], [[1, 2], [1, 2], [1, 2]])
        assert engine.lookup([1, 2]) == 0
