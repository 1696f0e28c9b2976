"""The order of axes in memory: which views come back, and which are refused."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest

from kvshm.contiguity import attempt_permute_to_contiguous_view, check_first_axis_padding, storage_order
from kvshm.dtypes import DTYPES
from kvshm.spec import ArraySpec

F2 = np.dtype("float16")


def spec(shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> ArraySpec:
    return ArraySpec(shape, stride, offset, F2)


def permuted(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    found = attempt_permute_to_contiguous_view(spec(shape, stride))
    return found.shape, found.stride


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_any_order_of_axes_is_undone(order: tuple[int, ...]) -> None:
    stored = ArraySpec.dense((7, 5, 3, 2), F2, 11)
    assert attempt_permute_to_contiguous_view(stored.transpose(order)) == stored


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_padding_of_the_outermost_axis_stays(order: tuple[int, ...]) -> None:
    stored = spec((7, 5, 3), (17, 3, 1))
    assert attempt_permute_to_contiguous_view(stored.transpose(order)) == stored


@pytest.mark.parametrize(
    ("shape", "stride", "message"),
    [
        ((7, 5), (6, 1), r"has gaps, and rank 2 allows none"),
        ((7,), (2,), r"has gaps, and rank 1 allows none"),
        ((7, 5, 3), (30, 6, 2), r"steps by 2 along its innermost axis, not by 1"),
        ((7, 5, 3), (20, 4, 1), r"steps by 4 along axis 1 where its rows take 3"),
        ((7, 5, 3), (14, 3, 1), r"items of the first axis take 15 elements and overlap"),
        ((7, 5, 3, 2), (40, 8, 2, 1), r"steps by 8 along axis 1 where its rows take 6; only the first axis may be"),
        ((7, 5, 3), (0, 3, 1), r"overlap|steps by"),
    ],
)
def test_gaps_elsewhere_are_refused(shape: tuple[int, ...], stride: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attempt_permute_to_contiguous_view(spec(shape, stride))


def test_rank_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 0 is no paged cache"):
        attempt_permute_to_contiguous_view(spec((), ()))
    with pytest.raises(ValueError, match="rank 0 is no paged cache"):
        attempt_permute_to_contiguous_view(np.zeros(()))


@pytest.mark.parametrize(("shape", "stride"), [((3, 0), (1, 1)), ((0, 8, 3), (29, 3, 1)), ((2, 0, 4), (0, 0, 0))])
def test_arrays_without_elements_stay_as_they_are(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    assert permuted(shape, stride) == (shape, stride)
    array = spec(shape, stride).view(np.zeros(0, np.uint8))
    assert attempt_permute_to_contiguous_view(array).shape == shape


class TestAxesOfSize1:
    """Their stride orders them if it is the tight one; else it means nothing, and they keep their place."""

    def test_one_head_is_told_by_its_stride(self) -> None:
        assert permuted((7, 5, 1, 2), (10, 2, 2, 1)) == ((7, 5, 1, 2), (10, 2, 2, 1))
        assert permuted((7, 5, 1, 2), (10, 2, 10, 1)) == ((7, 1, 5, 2), (10, 10, 2, 1))

    def test_one_slot_is_told_by_its_stride(self) -> None:
        assert permuted((7, 1, 3, 2), (6, 2, 2, 1)) == ((7, 3, 1, 2), (6, 2, 2, 1))
        assert permuted((7, 1, 3, 2), (6, 6, 2, 1)) == ((7, 1, 3, 2), (6, 6, 2, 1))

    def test_of_equal_stride_they_lie_inside(self) -> None:
        assert permuted((1, 7, 2), (2, 2, 1)) == ((7, 1, 2), (2, 2, 1))
        assert permuted((1, 1, 7), (1, 1, 1)) == ((7, 1, 1), (1, 1, 1))

    @pytest.mark.parametrize("odd", [0, 3, 5, 99])
    def test_any_other_stride_means_nothing(self, odd: int) -> None:
        assert permuted((7, 1, 5, 2), (10, odd, 2, 1)) == ((7, 1, 5, 2), (10, 10, 2, 1))

    def test_the_other_axes_are_ordered_around_them(self) -> None:
        assert permuted((5, 1, 7, 2), (2, 99, 10, 1)) == ((7, 1, 5, 2), (10, 10, 2, 1))

    def test_one_odd_stride_makes_all_of_them_mean_nothing(self) -> None:
        assert permuted((7, 5, 1, 2, 1), (10, 2, 10, 1, 1)) == ((7, 1, 5, 2, 1), (10, 10, 2, 1, 1))
        assert permuted((7, 5, 1, 2, 1), (10, 2, 10, 1, 99)) == ((7, 5, 1, 2, 1), (10, 2, 2, 1, 1))

    def test_a_single_padded_block_comes_back_tight(self) -> None:
        assert permuted((1, 5, 3), (99, 3, 1)) == ((1, 5, 3), (15, 3, 1))

    def test_inside_a_padded_block_tight_means_without_the_padding(self) -> None:
        assert permuted((7, 5, 1, 2), (16, 2, 10, 1)) == ((7, 1, 5, 2), (16, 10, 2, 1))
        assert permuted((7, 5, 1, 2), (16, 2, 16, 1)) == ((7, 5, 1, 2), (16, 2, 2, 1))

    def test_all_sizes_1(self) -> None:
        assert permuted((1, 1, 1), (7, 0, 3)) == ((1, 1, 1), (1, 1, 1))


def test_storage_order_names_axes_outermost_first() -> None:
    assert storage_order((7, 5, 3), (3, 21, 1)) == (1, 0, 2)


def test_padding_is_looked_for_in_the_given_order_of_axes() -> None:
    for fitting in (spec((7, 5, 3), (15, 3, 1)), spec((7, 5, 3), (17, 3, 1)), spec((7, 5), (5, 1))):
        check_first_axis_padding(fitting.shape, fitting.stride)
    with pytest.raises(ValueError, match="steps by 35 along its innermost axis"):
        check_first_axis_padding((7, 5, 3), (5, 1, 35))


@pytest.mark.parametrize("name", DTYPES)
def test_arrays_come_back_as_views_of_the_same_bytes(name: str) -> None:
    dtype = DTYPES[name]
    buffer = np.zeros(7 * 5 * 3 * dtype.itemsize, np.uint8)
    stored = ArraySpec.dense((7, 5, 3), dtype).view(buffer)
    found = attempt_permute_to_contiguous_view(stored.transpose(2, 0, 1))
    assert (found.shape, found.strides, found.dtype) == (stored.shape, stored.strides, dtype)
    found.view(np.uint8)[...] = 7
    assert buffer.tolist() == [7] * len(buffer)


@pytest.mark.parametrize("name", DTYPES)
def test_strides_of_size_1_are_mended_in_arrays_too(name: str) -> None:
    dtype = DTYPES[name]
    size = dtype.itemsize
    buffer = np.zeros(7 * 5 * size, np.uint8)
    odd = np.ndarray((7, 1, 5), dtype, buffer=buffer, strides=(5 * size, 99 * size, size))
    found = attempt_permute_to_contiguous_view(odd)
    assert (found.shape, found.strides, found.dtype) == ((7, 1, 5), (5 * size, 5 * size, size), dtype)
    assert np.shares_memory(found, buffer)


def test_a_contiguous_array_comes_back_itself() -> None:
    array = np.zeros((7, 5, 3))
    assert attempt_permute_to_contiguous_view(array) is array


def test_lists_keep_their_structure_and_kind() -> None:
    stored = ArraySpec.dense((7, 5, 3), F2)
    exposed = stored.transpose((1, 0, 2))
    assert attempt_permute_to_contiguous_view([[exposed, stored], (exposed,), []]) == [[stored, stored], [stored], []]
    arrays = attempt_permute_to_contiguous_view([np.zeros((5, 7)).T])
    assert isinstance(arrays[0], np.ndarray)


@pytest.mark.parametrize("x", ["array", b"", 3, None, {"a": 1}, [[1]]])
def test_anything_else_is_refused(x: Any) -> None:
    with pytest.raises(ValueError, match="expected an array, an ArraySpec or nested lists of them, not"):
        attempt_permute_to_contiguous_view(x)
