"""ArraySpec against NumPy arrays of the same shape and strides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvshm.dtypes import DTYPES
from kvshm.spec import ArraySpec, dense_strides, restride

F2 = np.dtype("float16")
U1 = np.dtype("uint8")


def numbered(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.arange(nbytes, dtype=np.uint8)


def test_dense_strides_count_elements_and_take_empty_axes_for_one() -> None:
    assert dense_strides((5, 3, 2)) == (6, 2, 1)
    assert dense_strides((5, 0, 2)) == (2, 2, 1)
    assert dense_strides(()) == ()


def test_bytes_of_elements_and_span() -> None:
    spec = ArraySpec((3, 5), (7, 1), 11, F2)
    assert spec.size == 15
    assert spec.nbytes == 30
    assert spec.byte_span == (11 + 2 * 7 + 4 + 1) * 2


def test_without_elements_nothing_is_spanned() -> None:
    assert ArraySpec((3, 0), (1, 1), 1_000, F2).byte_span == 0


def test_of_rank_zero_one_element_is_spanned() -> None:
    assert ArraySpec((), (), 3, F2).byte_span == 8


@pytest.mark.parametrize(
    ("shape", "stride", "contiguous"),
    [
        ((3, 5), (5, 1), True),
        ((3, 5), (7, 1), False),
        ((3, 5), (1, 3), False),
        ((1, 5), (99, 1), True),
        ((5, 1), (1, 99), True),
        ((3, 1, 5), (5, 0, 1), True),
        ((3, 0, 5), (1, 2, 3), True),
        ((), (), True),
        ((1, 1), (0, 7), True),
        ((2, 2), (0, 0), False),
    ],
)
def test_axes_of_size_1_do_not_count_for_contiguity(
    shape: tuple[int, ...], stride: tuple[int, ...], contiguous: bool
) -> None:
    assert ArraySpec(shape, stride, 0, U1).is_contiguous is contiguous


def test_of_an_array_starts_at_its_first_element() -> None:
    array = np.zeros((7, 5, 3), F2)[2:, 1:, ::2]
    assert ArraySpec.of(array) == ArraySpec((5, 4, 2), (15, 3, 2), 0, F2)


def test_of_replaces_strides_that_move_nothing_and_cannot_be_counted() -> None:
    odd = np.ndarray((1, 3), F2, buffer=bytearray(6), strides=(7, 2))
    assert ArraySpec.of(odd).stride == (3, 1)
    backwards = np.zeros((5, 1), F2)[:, ::-1]
    assert ArraySpec.of(backwards).stride == (1, 1)
    empty = np.ndarray((0, 3), F2, buffer=bytearray(6), strides=(-6, 2))
    assert ArraySpec.of(empty).stride == (3, 1)


@pytest.mark.parametrize("strides", [(3, 2), (-2, 2)])
def test_of_refuses_strides_that_specs_cannot_hold(strides: tuple[int, int]) -> None:
    array = np.ndarray((2, 2), F2, buffer=bytearray(32), offset=8, strides=strides)
    with pytest.raises(ValueError, match=r"must be multiples of the item size 2 of float16, and not negative; copy"):
        ArraySpec.of(array)


@pytest.mark.parametrize(
    ("shape", "stride", "offset"), [((-1,), (1,), 0), ((1,), (-1,), 0), ((1,), (1,), -1), ((), (), -1)]
)
def test_negative_numbers_are_refused(shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> None:
    with pytest.raises(ValueError, match="must hold no negative number"):
        ArraySpec(shape, stride, offset, U1)


def test_ranks_must_agree() -> None:
    with pytest.raises(
        ValueError, match=r"shape \(2, 3\) has rank 2 but stride \(1,\) has rank 1; give one stride per"
    ):
        ArraySpec((2, 3), (1,), 0, U1)


def test_dense_takes_any_sequence_and_an_offset() -> None:
    assert ArraySpec.dense((2, 3), U1, 7) == ArraySpec((2, 3), (3, 1), 7, U1)


def test_transpose_moves_shape_and_stride_together() -> None:
    spec = ArraySpec.dense((2, 3, 5), F2, 1)
    assert spec.transpose((2, 0, 1)) == ArraySpec((5, 2, 3), (1, 15, 5), 1, F2)


@pytest.mark.parametrize(
    "index", [(1,), (1, 2), (slice(None), 2), (slice(None), None, 1), (0, slice(None), None), (None,), (1, 2, 4, None)]
)
def test_indexing_is_numpys(index: tuple[Any, ...]) -> None:
    spec = ArraySpec.dense((2, 3, 5), U1, 1)
    buffer = numbered(64)
    assert np.array_equal(spec[index].view(buffer), spec.view(buffer)[index])


def test_a_new_axis_has_the_tight_stride() -> None:
    spec = ArraySpec.dense((2, 3, 5), U1)
    assert spec[:, None].stride == (15, 15, 5, 1)
    assert spec[0, 1, 2, None] == ArraySpec((1,), (1,), 7, U1)


def test_indices_outside_and_other_slices_are_refused() -> None:
    spec = ArraySpec.dense((2, 3), U1)
    with pytest.raises(IndexError, match=r"index 3 is outside axis 1 of shape \(2, 3\)"):
        spec[0, 3]
    with pytest.raises(IndexError, match=r"index -1 is outside axis 0"):
        spec[-1,]
    with pytest.raises(IndexError, match=r"whole-axis slices only, not slice\(1, None, None\)"):
        spec[slice(1, None),]


def test_a_view_is_writable_memory_of_the_buffer() -> None:
    buffer = numbered(64)
    view = ArraySpec((3, 2), (4, 2), 5, F2).view(buffer)
    view[...] = 1
    ones = np.flatnonzero(buffer != numbered(64))
    assert set(ones // 2) <= {5, 7, 9, 11, 13, 15}
    assert view.base is not None


def test_a_view_beyond_the_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs bytes \[0, 10\) but the buffer has 9"):
        ArraySpec.dense((5,), F2).view(numbered(9))


def test_an_empty_view_needs_no_room() -> None:
    assert ArraySpec((0, 3), (3, 1), 1_000, F2).view(numbered(0)).shape == (0, 3)


@pytest.mark.parametrize("name", DTYPES)
def test_views_and_restriding_take_every_dtype(name: str) -> None:
    dtype = DTYPES[name]
    buffer = np.zeros(12 * dtype.itemsize, np.uint8)
    dense = ArraySpec.dense((3, 4), dtype).view(buffer)
    other = restride(dense, (2, 2, 3), tuple(step * dtype.itemsize for step in (6, 3, 1)))
    assert other.dtype == dense.dtype == dtype
    assert np.shares_memory(other, buffer)
    other.view(np.uint8)[-1, -1, -1] = 1
    assert buffer[-1] == 1


def test_restriding_takes_arrays_of_any_strides() -> None:
    array = numbered(60).reshape(3, 4, 5).transpose(1, 0, 2)
    assert np.array_equal(restride(array, (2, 5), (40, 1)), [[0, 1, 2, 3, 4], [40, 41, 42, 43, 44]])


def test_specs_are_values() -> None:
    spec = ArraySpec.dense((2, 3), U1)
    assert spec == ArraySpec.dense((2, 3), U1)
    assert len({spec, ArraySpec.dense((2, 3), U1), ArraySpec.dense((3, 2), U1)}) == 2
    with pytest.raises(AttributeError):
        spec.shape = (3, 2)  # type: ignore[misc]


def test_sizes_are_integers_and_the_dtype_may_be_a_name() -> None:
    with pytest.raises(ValueError, match=r"must be integers"):
        ArraySpec((2.5,), (1,), 0, np.dtype("uint8"))  # type: ignore[arg-type]
    spec = ArraySpec([np.int64(2), 3], [3, 1], 0, "bfloat16")  # type: ignore[arg-type]
    assert (spec.shape, spec.stride, spec.nbytes) == ((2, 3), (3, 1), 12)
    assert hash(spec) == hash(ArraySpec.dense((2, 3), spec.dtype))
