"""Rows, runs and stacks: how blocks are moved, on strides alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvshm
from kvshm import copying
from kvshm.copying import Piece, Plane, Stack, choose_way, gather, plane_of, scatter, stacks_of
from kvshm.dtypes import DTYPES

NB, BS, NH, HS = 11, 5, 3, 7
HEAD = HS * 2  # bytes
SLOT = NH * HEAD
BLOCK = BS * SLOT
IDS = np.array([7, 0, 10, 3])


def paged(layout: str) -> np.ndarray[Any, Any]:
    """A plane (block, slot, head, element) of float16 in which every element is another."""
    values: Any = np.arange(2 * NB * BS * NH * HS, dtype=np.uint16).view(np.float16)
    view: np.ndarray[Any, Any]
    if layout == "NHD":
        view = values.reshape(2, NB, BS, NH, HS)[1]
    elif layout == "HND":
        view = values.reshape(2, NB, NH, BS, HS)[1].transpose(0, 2, 1, 3)
    elif layout == "interleaved":
        view = values.reshape(NB, 2, BS, NH, HS)[:, 1]
    else:
        view = np.ndarray((NB, BS, NH, HS), np.float16, values, 2 * HS, (BLOCK + 2, SLOT, HEAD, 2))
    return view


LAYOUTS = ("NHD", "HND", "interleaved", "padded")


def one_stack(plane: Plane, kept_blocks: int = len(IDS)) -> Stack:
    (stack,) = stacks_of([plane], kept_blocks)
    return stack


def test_rows_are_as_long_as_both_sides_allow() -> None:
    whole = plane_of(paged("NHD"), 0, SLOT).order
    assert whole is not None
    assert (whole.nbytes, whole.step, whole.offsets.tolist(), whole.block_is_contiguous) == (BLOCK, 1, [0], True)
    heads = plane_of(paged("HND"), 0, SLOT).order
    assert heads is not None
    in_chunk_order = [head * BS + slot for slot in range(BS) for head in range(NH)]
    assert (heads.nbytes, heads.step, heads.offsets.tolist()) == (HEAD, BS * NH, in_chunk_order)
    assert not heads.block_is_contiguous
    between = plane_of(paged("interleaved"), 0, SLOT).order
    assert between is not None
    assert (between.nbytes, between.step) == (BLOCK, 2)


def test_rows_off_any_grid_are_moved_by_runs() -> None:
    plane = plane_of(paged("padded"), 0, SLOT)
    assert plane.order is None
    assert choose_way(plane.order, np.array([4, 5, 6, 2])).runs == [(0, 3), (3, 4)]


def test_long_rows_are_cut_to_fit_the_grid() -> None:
    slots, width, page = 6, 2048, 4096
    block = slots * width  # 3 pages, 4 pages apart
    memory = np.arange(NB * 4 * page, dtype=np.uint32).astype(np.uint8)
    plane = plane_of(np.ndarray((NB, slots, 1, width), np.uint8, memory, 0, (4 * page, width, width, 1)), 0, width)
    assert plane.order is not None
    assert (plane.order.nbytes, plane.order.step, plane.order.offsets.tolist()) == (page, 4, [0, 1, 2])
    chunk = np.zeros(len(IDS) * block, dtype=np.uint8)
    gather(one_stack(plane), range(1), [Piece(chunk, IDS)], [choose_way(plane.order, IDS)])
    assert chunk.tobytes() == plane.blocks[IDS].tobytes()


@pytest.mark.parametrize("num_slots", [1, BS])
def test_planes_that_share_the_slots_of_a_chunk_are_moved_by_runs(num_slots: int) -> None:
    plane = plane_of(np.zeros((NB, num_slots, NH, HS), np.float16), 0, SLOT + 2)
    assert plane.order is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather(layout: str) -> None:
    view = paged(layout)
    chunk = np.full(3 + len(IDS) * BLOCK + 5, 0xEE, dtype=np.uint8)
    plane = plane_of(view, 3, SLOT)
    gather(one_stack(plane), range(1), [Piece(chunk, IDS)], [choose_way(plane.order, IDS)])
    assert chunk[3:-5].tobytes() == view[IDS].tobytes()
    assert set(chunk[:3]) == set(chunk[-5:]) == {0xEE}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("first_slot", [0, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scatter_touches_nothing_but_its_blocks(layout: str, first_slot: int, shared: bool) -> None:
    view = paged(layout)
    owner = view.base
    assert isinstance(owner, np.ndarray)
    chunk = np.random.default_rng(0).integers(0, 256, len(IDS) * BLOCK, dtype=np.uint8)
    expected = owner.copy()
    copy: np.ndarray[Any, Any] = np.ndarray(
        view.shape, view.dtype, expected, view.__array_interface__["data"][0] - owner.__array_interface__["data"][0],
        view.strides,
    )  # fmt: skip
    content = chunk.view(np.float16).reshape(len(IDS), BS, NH, HS)
    copy[IDS[0], first_slot:] = content[0, first_slot:]
    copy[IDS[1:]] = content[1:]
    plane = plane_of(view, 0, SLOT)
    piece = Piece(chunk, IDS, 0, first_slot)
    ways = [choose_way(plane.order, piece.whole_blocks.block_ids)]
    scatter(one_stack(plane), range(1), [piece], ways, shared=shared)
    assert owner.tobytes() == expected.tobytes()


def test_a_piece_may_end_with_its_cut_block() -> None:
    view = np.zeros((NB, BS, NH, HS), np.float16)
    for slot_nbytes in (SLOT, SLOT + 2):
        plane = plane_of(view, 0, slot_nbytes)
        piece = Piece(np.full(len(IDS) * BS * slot_nbytes, 1, np.uint8), IDS[3:], 3, BS - 1)
        scatter(one_stack(plane), range(1), [piece], [choose_way(plane.order, IDS[:0])], shared=False)
    assert np.count_nonzero(view.view(np.uint8)) == SLOT
    assert np.count_nonzero(view[IDS[3], -1]) == NH * HS


@pytest.mark.parametrize("name", list(DTYPES))
def test_all_dtypes_are_bytes(name: str) -> None:
    dtype = DTYPES[name]
    view = np.random.default_rng(1).integers(0, 256, NB * 2 * 3 * dtype.itemsize, dtype=np.uint8).view(dtype)
    view = view.reshape(NB, 2, 1, 3)
    plane = plane_of(view, 0, 3 * dtype.itemsize)
    chunk = np.zeros(len(IDS) * plane.block_nbytes, dtype=np.uint8)
    gather(one_stack(plane), range(1), [Piece(chunk, IDS)], [choose_way(plane.order, IDS)])
    assert chunk.tobytes() == view[IDS].tobytes()


def test_runs_of_consecutive_blocks_are_merged() -> None:
    order = plane_of(np.zeros((640, 1, 1, 1024), np.uint8), 0, 1024).order
    risen = choose_way(order, np.arange(80, 400))
    assert (risen.index, list(risen.runs)) == (None, [(0, 320)])
    halves = choose_way(order, np.r_[320:480, 0:160])
    assert (halves.index, list(halves.runs)) == (None, [(0, 160), (160, 320)])


def test_runs_that_are_not_worth_a_call_each_are_moved_by_an_index() -> None:
    small = plane_of(np.zeros((640, 1, 1, 1024), np.uint8), 0, 1024).order
    pairs = choose_way(small, np.array([2, 3, 8, 9, 4, 5]))
    assert pairs.index is not None
    assert pairs.index.tolist() == [2, 3, 8, 9, 4, 5]
    large = plane_of(np.zeros((64, 16, 1, 1024), np.uint8), 0, 1024).order
    assert choose_way(large, np.arange(64)).index is not None, "a row is long enough by itself"


def test_merged_runs_are_moved_as_the_blocks_one_by_one() -> None:
    view = np.random.default_rng(2).integers(0, 256, (640, 1, 1, 1024), dtype=np.uint8)
    plane = plane_of(view, 0, 1024)
    ids = np.r_[320:480, 0:160]
    way = choose_way(plane.order, ids)
    assert way.index is None
    chunk = np.zeros(len(ids) * plane.block_nbytes, dtype=np.uint8)
    gather(one_stack(plane, len(ids)), range(1), [Piece(chunk, ids)], [way])
    assert chunk.tobytes() == view[ids].tobytes()
    view[...] = 0
    scatter(one_stack(plane, len(ids)), range(1), [Piece(chunk, ids)], [way], shared=False)
    assert view[ids].tobytes() == chunk.tobytes()
    assert not view[480:].any()
    assert not view[160:320].any()


def test_of_two_writes_to_a_block_the_last_stays_whichever_way_it_goes() -> None:
    view = np.zeros((640, 1, 1, 1024), np.uint8)
    plane = plane_of(view, 0, 1024)
    by_index, by_runs = np.array([7, 9, 7, 3] * 40), np.r_[7:87, 200:280]
    pieces = [Piece(np.full(160 * 1024, value, np.uint8), ids) for value, ids in ((1, by_index), (2, by_runs))]
    ways = [choose_way(plane.order, piece.block_ids) for piece in pieces]
    assert [way.index is None for way in ways] == [False, True]
    scatter(one_stack(plane, 160), range(1), pieces, ways, shared=False)
    assert (view[7, 0, 0, 0], view[9, 0, 0, 0], view[3, 0, 0, 0]) == (2, 2, 1)
    scatter(one_stack(plane, 160), range(1), pieces[::-1], ways[::-1], shared=False)
    assert (view[7, 0, 0, 0], view[9, 0, 0, 0], view[8, 0, 0, 0]) == (1, 1, 2)


def planes_of(arrays: list[np.ndarray[Any, Any]]) -> list[Plane]:
    return [plane_of(array, index * len(IDS) * BLOCK, SLOT) for index, array in enumerate(arrays)]


def test_planes_in_one_segment_are_one_stack() -> None:
    layers = kvshm.empty_many([(NB, BS, NH, HS)] * 3, ["float16"] * 3)
    pages = [layer.__array_interface__["data"][0] for layer in layers]
    assert len(stacks_of(planes_of(layers), len(IDS))) == 3, "rows are off the grid of pages"
    assert pages[1] - pages[0] == pages[2] - pages[1]
    pool = kvshm.zeros((3, NB, BS, NH, HS), "float16")
    (stack,) = stacks_of(planes_of(list(pool)), len(IDS))
    assert stack.starts.ravel().tolist() == [0, NB, 2 * NB]


def test_planes_apart_or_out_of_order_are_stacks_of_their_own() -> None:
    apart = [np.zeros((NB, BS, NH, HS), np.float16) for _ in range(2)]
    assert len(stacks_of(planes_of(apart), len(IDS))) == 2
    pool = np.zeros((3, NB, BS, NH, HS), np.float16)
    assert len(stacks_of(planes_of([pool[1], pool[0]]), len(IDS))) == 1
    in_chunk_apart = [plane_of(pool[0], 0, SLOT), plane_of(pool[1], len(IDS) * BLOCK + 2, SLOT)]
    assert len(stacks_of(in_chunk_apart, len(IDS))) == 2


class Owner:
    """Something that shows parts of its memory as arrays."""

    def __init__(self) -> None:
        self.memory = np.zeros(2 * NB * BLOCK, dtype=np.uint8)

    def part(self, start: int) -> np.ndarray[Any, Any]:
        address = self.memory.__array_interface__["data"][0] + start
        self.__array_interface__ = {"data": (address, False), "shape": (NB * BLOCK,), "typestr": "|u1", "version": 3}
        return np.asarray(self).view(np.float16).reshape(NB, BS, NH, HS)


def test_a_stack_does_not_reach_beyond_the_array_that_it_is_in() -> None:
    owner = Owner()
    first, second = owner.part(0), owner.part(NB * BLOCK)
    planes = planes_of([first, second])
    assert planes[0].owner is planes[1].owner is owner
    assert len(stacks_of(planes, len(IDS))) == 2


def test_a_stack_may_be_moved_in_part_and_piecewise() -> None:
    pool = np.random.default_rng(3).integers(0, 256, (4, NB, BS, NH, HEAD), dtype=np.uint8)
    (stack,) = stacks_of(planes_of(list(pool)), len(IDS))
    chunk = np.zeros(4 * len(IDS) * BLOCK, dtype=np.uint8)
    piece = Piece(chunk, IDS[1:3], 1)
    gather(stack, range(1, 3), [piece], [choose_way(stack.order, piece.block_ids)])
    assert all(out.flags.c_contiguous for _, out in copying._calls(stack, range(1, 3), piece, IDS[1:3]))
    expected = np.zeros((4, len(IDS), BS, NH, HEAD), dtype=np.uint8)
    expected[1:3, 1:3] = pool[1:3][:, IDS[1:3]]
    assert chunk.tobytes() == expected.tobytes()


def test_planes_without_bytes_move_nothing() -> None:
    plane = plane_of(np.zeros((NB, BS, 0, HS), np.float16), 0, 0)
    chunk = np.zeros(0, dtype=np.uint8)
    gather(one_stack(plane), range(1), [Piece(chunk, IDS)], [choose_way(plane.order, IDS)])
    scatter(one_stack(plane), range(1), [Piece(chunk, IDS)], [choose_way(plane.order, IDS)], shared=False)
