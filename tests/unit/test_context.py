"""CPUCacheContext by hand: 3 layers, 7 blocks of 4 slots, 5 heads of 3 elements; chunks of 24 tokens."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import kvshm
from kvshm import cache as cache_module
from kvshm.context import CPUCacheContext
from kvshm.dtypes import DTYPES
from kvshm.formats import EngineKVFormat as F
from kvshm.layout import EngineGroupInfo
from kvshm.spec import ArraySpec
from kvshm.stream import HostStream
from tests.support.memory import num_mappings

F2 = np.dtype("float16")
NHD = {"kv_layout": "NHD"}
CHUNK = 24


def layers(count: int = 3, *shape: int, dtype: Any = F2) -> list[np.ndarray[Any, Any]]:
    return [np.zeros(shape or (2, 7, 4, 5, 3), dtype) for _ in range(count)]


def latents(width: int, dtype: Any = F2, block_size: int = 4) -> np.ndarray[Any, Any]:
    return np.zeros((7, block_size, width), dtype)


def info(group: int, *indices: int, **told: Any) -> EngineGroupInfo:
    return EngineGroupInfo(group, indices, **told)


def register(caches: Any, infos: Any = (), **settings: Any) -> CPUCacheContext:
    return CPUCacheContext(
        caches, **({"lmcache_tokens_per_chunk": CHUNK, "layout_hints": NHD, "engine_group_infos": infos} | settings)
    )


def address(array: np.ndarray[Any, Any]) -> int:
    return array.ctypes.data


def offset_in(context: CPUCacheContext, view: np.ndarray[Any, Any]) -> int:
    return address(view) - address(context.get_tmp_gpu_buffer_flat(0))


class TestOneGroup:
    @pytest.fixture
    def arrays(self) -> list[np.ndarray[Any, Any]]:
        return layers()

    @pytest.fixture
    def context(self, arrays: Any) -> CPUCacheContext:
        return register(arrays)

    def test_sizes(self, context: CPUCacheContext) -> None:
        assert (context.num_layers, context.num_blocks, context.block_size) == (3, 7, 4)
        assert (context.group_slots_per_blocks, context.hidden_dim_sizes) == ([4], [15])
        assert (context.lmcache_tokens_per_chunk, context.max_batch_size, context.device) == (CHUNK, 4, "cpu")
        assert context.cache_size_per_token() == 2 * 3 * 15 * 2
        assert context.get_shape_desc(0).nl == 3
        assert context.get_slots_per_chunk_in_sw(0) == CHUNK
        assert context.kv_layer_groups_manager.num_blocks == 7

    def test_formats(self, context: CPUCacheContext) -> None:
        assert context.get_engine_kv_format(0) is F.NL_X_TWO_NB_BS_NH_HS
        assert context.engine_kv_formats() == [F.NL_X_TWO_NB_BS_NH_HS]
        assert context.engine_kv_format_per_layer() == [F.NL_X_TWO_NB_BS_NH_HS] * 3

    def test_arguments_in_the_order_of_the_seed(self, context: CPUCacheContext) -> None:
        assert context.blocks_for_tokens(23, 0) == context.calculate_num_blocks(23, 0) == 5
        assert context.get_kv_buffer_shape(23) == (2, 3, 23, 15)
        assert context.get_kernel_group_shape_dtype(CHUNK, 0) == ((2, 3, CHUNK, 15), F2)

    def test_negative_counts_are_refused(self, context: CPUCacheContext) -> None:
        for function in (context.blocks_for_tokens, context.get_kernel_group_shape_dtype, context.get_kv_buffer_shape):
            with pytest.raises(ValueError, match="-1"):
                function(-1, 0)

    def test_addresses(self, context: CPUCacheContext, arrays: Any) -> None:
        expected = [address(array) for array in arrays]
        assert context.kv_pointers.tolist() == expected
        assert context.get_group_kv_pointers(0).tolist() == context.get_kernel_group_kv_pointers(0).tolist() == expected

    def test_arrays_are_those_that_came(self, context: CPUCacheContext, arrays: Any) -> None:
        assert [address(array) for array in context.kv_tensors] == [address(array) for array in arrays]

    def test_planes_lead_into_them(self, context: CPUCacheContext, arrays: Any) -> None:
        planes = context.kernel_group_planes(0)
        assert context.kernel_group_planes(0) is planes
        assert [plane.paged.shape for plane in planes] == [(7, 4, 5, 3)] * 6
        plane_nbytes = CHUNK * 15 * 2
        assert [plane.chunk_offset for plane in planes] == [index * plane_nbytes for index in range(6)]
        assert {plane.chunk_slot_nbytes for plane in planes} == {30}
        planes[4].paged[6, 3, 2, 1] = 1  # all K first: V of layer 1
        assert arrays[1][1, 6, 3, 2, 1] == 1

    def test_report(self, context: CPUCacheContext) -> None:
        assert context.report_status() == {
            "num_layers": 3,
            "num_blocks": 7,
            "cache_size_per_token": 180,
            "kernel_groups": [
                {
                    "kernel_group_idx": 0,
                    "engine_group_idx": 0,
                    "object_group_idx": 0,
                    "num_layers": 3,
                    "layer_indices": [0, 1, 2],
                    "tokens_per_block": 4,
                    "slots_per_block": 4,
                    "dtype": "float16",
                    "engine_kv_concrete_shape": "3 x [2, 7, 4, 5, 3]",
                    "is_mla": False,
                    "engine_kv_format": "NL_X_TWO_NB_BS_NH_HS",
                    "engine_kv_shape": "NL x [2, NB, BS, NH, HS]",
                    "attention_backend": "vLLM non-MLA flash attention",
                }
            ],
        }

    def test_streams_do_their_work_at_once(self, context: CPUCacheContext) -> None:
        streams = (context.stream, context.cupy_stream, context.high_priority_stream, context.high_priority_cupy_stream)
        assert all(isinstance(stream, HostStream) and stream.query() for stream in streams)

    @pytest.mark.parametrize("group", [-1, 1])
    def test_groups_that_are_not_there(self, context: CPUCacheContext, group: int) -> None:
        for function in (context.get_shape_desc, context.get_engine_kv_format, context.get_slots_per_chunk_in_sw,
                         context.get_group_kv_pointers, context.get_kernel_group_kv_pointers,
                         context.get_tmp_chunk_gpu_buffer, context.kernel_group_planes):  # fmt: skip
            with pytest.raises(IndexError, match=rf"kernel group {group} is outside \[0, 1\)"):
                function(group)
        for with_tokens in (context.blocks_for_tokens, context.calculate_num_blocks, context.get_kv_buffer_shape,
                            context.get_kernel_group_shape_dtype, context.get_tmp_chunk_gpu_buffer_batched,
                            context.get_temp_kernel_group_buffer):  # fmt: skip
            with pytest.raises(IndexError, match=rf"kernel group {group} is outside \[0, 1\)"):
                with_tokens(1, group)
        with pytest.raises(IndexError, match=rf"object group {group} is outside \[0, 1\)"):
            context.get_temp_object_group_buffer(0, group)
        with pytest.raises(IndexError, match=rf"object group {group} is outside \[0, 1\)"):
            context.get_kernel_group_offset_in_object(group, 0)

    @pytest.mark.parametrize("slot", [-1, 4])
    def test_chunk_slots_that_are_not_there(self, context: CPUCacheContext, slot: int) -> None:
        with pytest.raises(ValueError, match=rf"chunk slot {slot} is outside \[0, 4\)"):
            context.get_tmp_gpu_buffer_flat(slot)
        for function in (context.get_temp_kernel_group_buffer, context.get_temp_object_group_buffer):
            with pytest.raises(ValueError, match=rf"chunk slot {slot} is outside \[0, 4\)"):
                function(slot, 0)

    @pytest.mark.parametrize("size", [-1, 5])
    def test_batches_that_do_not_fit(self, context: CPUCacheContext, size: int) -> None:
        with pytest.raises(ValueError, match=f"batch_size is {size}, but the staging buffer has 4 chunk slots"):
            context.get_tmp_chunk_gpu_buffer_batched(size)
        assert context.get_tmp_chunk_gpu_buffer_batched(0) == []
        assert len(context.get_tmp_chunk_gpu_buffer_batched(4)) == 4

    def test_after_closing_sizes_stay_and_memory_is_gone(self, context: CPUCacheContext) -> None:
        view = context.get_tmp_chunk_gpu_buffer()
        context.close()
        context.close()
        view[...] = 1
        assert context.num_layers == 3
        assert context.report_status()["num_blocks"] == 7
        for use in (
            lambda: context.kv_tensors,
            context.get_tmp_chunk_gpu_buffer,
            lambda: context.kernel_group_planes(0),
        ):
            with pytest.raises(ValueError, match="the cache context is closed; register the cache again"):
                use()


class TestBlockIds:
    @pytest.fixture
    def context(self) -> CPUCacheContext:
        return register(layers())

    def test_each_group_has_its_view(self, context: CPUCacheContext) -> None:
        given: list[Any] = [[3, 1], [], np.array([5], np.int32), range(2)]
        views = context.stage_block_ids(given)
        assert [view.tolist() for view in views] == [[3, 1], [], [5], [0, 1]]
        assert {view.dtype for view in views} == {np.dtype(np.int64)}
        assert [address(view) - address(views[0]) for view in views if len(view)] == [0, 16, 24]

    def test_the_buffer_holds_a_million(self, context: CPUCacheContext) -> None:
        ids: Any = np.arange(500_000)
        assert [len(view) for view in context.stage_block_ids([ids, ids])] == [500_000] * 2
        with pytest.raises(ValueError, match="1000001 block ids came, but the staging buffer holds 1000000"):
            context.stage_block_ids([ids, ids, [1]])

    @pytest.mark.parametrize("ids", [[1.5], ["1"], [[1]], [2**63], [None]])
    def test_ids_are_flat_lists_of_integers(self, context: CPUCacheContext, ids: Any) -> None:
        with pytest.raises(ValueError, match=r"block ids of group 1 are .*; give a flat list of 64-bit integers"):
            context.stage_block_ids([[1], ids])


class TestSeveralGroups:
    """Tagged, of 5 float32; whole, of 3 uint8; a window of 8 tokens, of 7 float16; 4 tokens a slot, of 11 uint8."""

    @pytest.fixture
    def context(self) -> CPUCacheContext:
        arrays = [latents(5, "float32"), latents(3, "uint8"), latents(7), latents(11, "uint8", 1), latents(3, "uint8")]
        infos = [
            info(0, 0, extra_object_group_tag=1),
            info(1, 1, 4),
            info(2, 2, sw_size_tokens=8),
            info(3, 3, tokens_per_block=4),
        ]
        return register(arrays, infos)

    def test_sizes(self, context: CPUCacheContext) -> None:
        assert context.hidden_dim_sizes == [5, 3, 7, 11]
        assert context.group_slots_per_blocks == [4, 4, 4, 1]
        assert context.cache_size_per_token() == 20 + 6 + 14 + 11 // 4

    def test_shapes_count_slots(self, context: CPUCacheContext) -> None:
        assert context.get_kv_buffer_shape(8, 3) == (1, 1, 2, 11)
        with pytest.raises(
            ValueError, match="9 tokens are no whole number of slots of kernel group 3, which has 4 tokens"
        ):
            context.get_kv_buffer_shape(9, 3)

    def test_object_groups(self, context: CPUCacheContext) -> None:
        groups = context.kv_layer_groups_manager.object_groups
        assert [group.kernel_group_indices for group in groups] == [(1, 3), (2,), (0,)]

    def test_difference_08_the_staging_buffer_follows_the_object_groups(self, context: CPUCacheContext) -> None:
        # Whole chunks: 2 layers x 24 slots x 3, 6 slots x 11, 24 slots x 7 x 2 bytes, 24 slots x 5 x 4 bytes.
        sizes = {1: 144, 3: 66, 2: 336, 0: 480}
        starts = {1: 0, 3: 144, 2: 210, 0: 546}
        for batch in range(4):
            for group, start in starts.items():
                view = context.get_temp_kernel_group_buffer(batch, group)
                assert offset_in(context, view) == batch * 1026 + start
                assert view.nbytes == sizes[group]
            for group, (start, nbytes) in enumerate([(0, 210), (210, 336), (546, 480)]):
                whole = context.get_temp_object_group_buffer(batch, group)
                assert (offset_in(context, whole), whole.nbytes) == (batch * 1026 + start, nbytes)
            assert context.get_tmp_gpu_buffer_flat(batch).nbytes == 1026

    def test_difference_09_a_group_behind_one_of_odd_size_can_be_used(self) -> None:
        context = register([latents(1, "uint8"), latents(5, "float32")], lmcache_tokens_per_chunk=4)
        odd = register([np.zeros((7, 3, 1), np.uint8), np.zeros((7, 3, 5), np.float32)], lmcache_tokens_per_chunk=3)
        for found, start in ((context, 4), (odd, 3)):
            view = found.get_temp_kernel_group_buffer(0, 1)
            assert offset_in(found, view) == start
            view[...] = 1.5
            assert found.get_temp_object_group_buffer(0, 0)[start:].view(np.uint8).tobytes() == view.tobytes()

    def test_difference_07_views_are_whole_chunks_but_objects_hold_the_window(self, context: CPUCacheContext) -> None:
        assert context.get_temp_kernel_group_buffer(0, 2).shape == (1, 1, CHUNK, 7)
        assert context.get_slots_per_chunk_in_sw(2) == 8
        assert context.kv_layer_groups_manager.object_nbytes(1) == 8 * 7 * 2

    def test_difference_07_offsets_in_an_object_are_those_of_the_windows(self) -> None:
        infos = [info(0, 0, sw_size_tokens=8), info(1, 1, sw_size_tokens=4)]
        context = register([latents(5), latents(7)], infos)
        assert [context.get_kernel_group_offset_in_object(0, group) for group in range(2)] == [0, 8 * 5 * 2]
        whole = register([latents(5), latents(7)], infos, full_sw_kv=True)
        assert [whole.get_kernel_group_offset_in_object(0, group) for group in range(2)] == [0, CHUNK * 5 * 2]

    def test_planes_lie_in_the_object_as_its_window_is(self) -> None:
        infos = [info(0, 0, 1, sw_size_tokens=8)]
        [first, second] = register([latents(5), latents(5)], infos).kernel_group_planes(0)
        assert (first.chunk_offset, second.chunk_offset, second.chunk_slot_nbytes) == (0, 8 * 5 * 2, 5 * 2)

    def test_a_group_of_another_object_has_no_offset(self, context: CPUCacheContext) -> None:
        assert context.get_kernel_group_offset_in_object(0, 3) == 144
        with pytest.raises(ValueError, match=r"kernel group 2 is not in object group 0, which has \[1, 3\]"):
            context.get_kernel_group_offset_in_object(0, 2)

    def test_one_object_for_all(self) -> None:
        infos = [info(0, 0, sw_size_tokens=8), info(1, 1)]
        context = register([latents(5), latents(7)], infos, separate_object_groups=False)
        assert context.kv_layer_groups_manager.get_attn_desc().num_chunks_in_sw == (-1,)
        assert context.get_kernel_group_offset_in_object(0, 1) == 8 * 5 * 2

    def test_layers_in_no_group_are_registered_but_have_no_format(self) -> None:
        arrays = [np.zeros(3), latents(5)]
        context = register(arrays, [info(0, 1)])
        assert context.num_layers == 2
        assert context.engine_kv_format_per_layer() == [None, F.NL_X_NB_BS_HS]
        assert context.kv_pointers.tolist() == [address(array) for array in arrays]
        assert context.get_group_kv_pointers(0).tolist() == [address(arrays[1])]


class Structure(NamedTuple):
    caches: Any
    engine: str
    format: F
    addresses: list[int]  # of the only kernel group
    num_planes: int


def structures() -> Iterator[Structure]:
    pool = np.zeros((7, 3, 2, 4, 5, 2), F2)
    yield Structure(pool, "vllm", F.NB_NL_TWO_BS_NH_HS, [address(pool)], 6)
    heads_first = np.zeros((7, 3, 2, 5, 4, 2), F2)
    yield Structure([heads_first], "trtllm", F.NB_NL_TWO_NH_BS_HS, [address(heads_first)], 6)
    k, v = layers(3, 7, 4, 5, 2), layers(3, 7, 4, 5, 2)
    yield Structure([k, v], "sglang", F.TWO_X_NL_X_NB_BS_NH_HS, [address(array) for array in (*k, *v)], 6)
    pairs = [(first, second) for first, second in zip(k, v, strict=True)]
    in_pairs = [address(array) for pair in pairs for array in pair]
    yield Structure(pairs, "vllm", F.NL_X_TWO_X_NB_BS_NH_HS, in_pairs, 6)
    planes = [[np.zeros((7, 4, 1, width), F2) for width in (5, 2, 3)] for _ in range(3)]
    in_planes = [address(array) for layer in planes for array in layer]
    yield Structure(planes, "vllm", F.NL_X_NP_X_NB_BS_ONE_HS, in_planes, 9)


@pytest.mark.parametrize("structure", list(structures()), ids=lambda structure: structure.format.name)
def test_difference_17_all_structures_can_be_registered(structure: Structure) -> None:
    context = register(structure.caches, engine_type=structure.engine)
    [group] = context.kv_layer_groups_manager.kernel_groups
    assert (context.num_layers, group.layer_indices, group.format) == (3, (0, 1, 2), structure.format)
    assert context.get_group_kv_pointers(0).tolist() == structure.addresses
    assert len(context.kernel_group_planes(0)) == structure.num_planes
    assert context.engine_kv_format_per_layer() == [structure.format] * 3


def test_difference_17_layers_of_a_k_v_list_may_differ_in_dtype() -> None:
    k, v = ([np.zeros((28, 5, 2), dtype) for dtype in ("float16", "uint8")] for _ in range(2))
    hints = {"kv_list_layout": "k_v", "tokens_per_block": 4}
    context = register([*k, *v], layout_hints=hints, engine_type="sglang")
    assert [group.dtype for group in context.kv_layer_groups_manager.kernel_groups] == [F2, np.dtype("uint8")]
    for group in range(2):
        assert context.get_group_kv_pointers(group).tolist() == [address(k[group]), address(v[group])]


def test_difference_13_nothing_registered() -> None:
    empties: list[Any] = [[], [[]], ()]
    for caches in empties:
        with pytest.raises(ValueError, match="the list of KV caches is empty"):
            register(caches)
    with pytest.raises(ValueError, match="no layer is in any group"):
        register(layers(), [info(0)])


@pytest.mark.parametrize("caches", ["x", None, 3, [None], [["x"]], {"a": 1}, ArraySpec.dense((7, 4, 5), F2)])
def test_what_is_no_array_is_refused(caches: Any) -> None:
    with pytest.raises(ValueError, match=r"expected ShmArrayWrappers or arrays in lists, not \w+; wrap an array with"):
        register(caches)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_can_be_registered(name: str) -> None:
    dtype = DTYPES[name]
    exposed = [np.zeros((7, 2, 5, 4, 3), dtype).transpose(0, 1, 3, 2, 4)] * 3
    context = register(exposed, layout_hints={"kv_layout": "HND"})
    assert context.get_kernel_group_shape_dtype(CHUNK, 0)[1] == dtype
    assert context.get_temp_kernel_group_buffer(3, 0).dtype == dtype
    assert context.report_status()["kernel_groups"][0]["dtype"] == name


class TestSegments:
    def test_descriptors_are_mapped_and_unmapped(self) -> None:
        arrays = kvshm.empty_many([(2, 7, 4, 5, 3)] * 3, [F2] * 3)
        wrappers = [kvshm.wrap(array) for array in arrays]
        assert len({wrapper.shm_name for wrapper in wrappers}) == 1
        context = register(wrappers)
        arrays[1][1, 6, 3, 2, 1] = 2.5
        assert context.kv_tensors[1][1, 6, 3, 2, 1] == 2.5
        assert context.kernel_group_planes(0)[4].paged[6, 3, 2, 1] == 2.5

    def test_nested_descriptors(self) -> None:
        arrays = kvshm.empty_many([(7, 4, 5, 3)] * 6, ["bfloat16"] * 6)
        wrapped = [tuple(kvshm.wrap(array) for array in arrays[layer : layer + 2]) for layer in (0, 2, 4)]
        context = register(wrapped)
        assert context.engine_kv_formats() == [F.NL_X_TWO_X_NB_BS_NH_HS]
        context.kv_tensors[2][1].view(np.uint16)[...] = 0x7FC1
        assert arrays[5].view(np.uint16).tolist() == context.kv_tensors[2][1].view(np.uint16).tolist()

    def test_a_refused_registration_leaves_no_mapping(self) -> None:
        [array] = kvshm.empty_many([(7, 4)], [F2])
        wrapper = kvshm.wrap(array)
        before = num_mappings(wrapper.shm_name)
        with pytest.raises(ValueError, match="no known vLLM layout"):
            register([wrapper])
        gc.collect()
        assert num_mappings(wrapper.shm_name) == before


def test_buffers_are_made_when_they_are_first_asked_for() -> None:
    context = register(kvshm.empty_many([(2, 7, 4, 2, 3)], [F2]))
    assert not {"_staging", "_block_ids"} & set(vars(context))
    context.get_tmp_chunk_gpu_buffer()
    context.stage_block_ids([[1]])
    assert {"_staging", "_block_ids"} <= set(vars(context))
    context.close()
    for call in (context.get_tmp_chunk_gpu_buffer, lambda: context.stage_block_ids([[1]])):
        with pytest.raises(ValueError, match="closed"):
            call()


class TestWarning:
    @pytest.fixture(autouse=True)
    def forget(self) -> Iterator[None]:
        cache_module._warn_of_small_shm.cache_clear()
        yield
        cache_module._warn_of_small_shm.cache_clear()

    def status(self, blocks: int) -> Any:
        return lambda path: type("Status", (), {"f_bavail": blocks, "f_blocks": 3, "f_frsize": 512})

    def test_a_cache_that_would_not_fit_again_is_warned_of_once(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(os, "statvfs", self.status(1))
        with caplog.at_level(logging.WARNING, "kvshm"):
            register(layers())
            register(layers())
        assert len(caplog.messages) == 1
        for part in ("5040 bytes", "1536 bytes in total", "remount,size=", "--shm-size", "Kubernetes"):
            assert part in caplog.messages[0]

    def test_one_that_would_is_not(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        monkeypatch.setattr(os, "statvfs", self.status(10))
        register(layers())
        assert caplog.messages == []

    def test_without_such_a_mount_there_is_nothing_to_warn_of(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(cache_module, "SHM_DIR", "/nonexistent")
        register(layers())
        assert caplog.messages == []


def test_a_dtype_without_a_name_is_refused() -> None:
    for dtype in (np.dtype(object), np.dtype(">i4"), np.dtype("V5")):
        with pytest.raises(ValueError, match="no name on the wire"):
            CPUCacheContext([np.zeros((7, 4, 3), dtype)], 8, {"kv_layout": "NHD"})


def test_unsigned_block_ids_are_staged() -> None:
    context = CPUCacheContext([np.zeros((7, 4, 3), np.uint8)], 8, {"kv_layout": "NHD"})
    [view] = context.stage_block_ids([np.array([5, 3], dtype=np.uint64)])  # type: ignore[list-item]
    assert view.tolist() == [5, 3]
    with pytest.raises(ValueError, match="64-bit"):
        context.stage_block_ids([np.array([2**63], dtype=np.uint64)])  # type: ignore[list-item]


def test_a_closed_context_says_so_when_ids_are_staged() -> None:
    context = CPUCacheContext([np.zeros((7, 4, 3), np.uint8)], 8, {"kv_layout": "NHD"})
    context.close()
    with pytest.raises(ValueError, match="closed"):
        context.stage_block_ids([[1]])
