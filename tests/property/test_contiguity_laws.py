"""Specs and the order of their axes, against NumPy and against all orders there are."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshm.contiguity import attempt_permute_to_contiguous_view
from kvshm.spec import ArraySpec
from kvshm.strategies import array_specs, arrays
from tests.support.addresses import addresses


@settings(max_examples=60)
@given(spec=array_specs(max_side=5))
def test_byte_span_ends_just_past_the_last_element(spec: ArraySpec) -> None:
    found = addresses(spec)
    assert spec.byte_span == (int(found.max()) + 1 if found.size else 0)
    assert spec.nbytes == found.size


@settings(max_examples=60)
@given(spec=array_specs(min_dims=0, max_side=5))
def test_contiguity_is_numpys(spec: ArraySpec) -> None:
    assert spec.is_contiguous == spec.view(np.zeros(spec.byte_span, np.uint8)).flags.c_contiguous


@settings(max_examples=60)
@given(spec=array_specs(), data=st.data())
def test_views_and_specs_index_alike(spec: ArraySpec, data: st.DataObject) -> None:
    index = tuple(
        data.draw(st.one_of(st.just(slice(None)), st.integers(0, size - 1) if size else st.just(slice(None))))
        for size in spec.shape[: data.draw(st.integers(0, len(spec.shape)))]
    )
    if not index:
        return
    raw = ArraySpec(spec.shape, spec.stride, spec.storage_offset, np.dtype(f"V{spec.dtype.itemsize}"))
    buffer = np.arange(spec.byte_span, dtype=np.uint8)
    assert np.array_equal(raw[index].view(buffer), raw.view(buffer)[index])


@settings(max_examples=60)
@given(array=arrays(array_specs(max_offset=0)))
def test_the_spec_of_an_array_leads_back_to_it(array: np.ndarray[Any, Any]) -> None:
    spec = ArraySpec.of(array)
    assert spec.nbytes == array.nbytes
    if array.size:
        base = array.base
        assert isinstance(base, np.ndarray)
        again = spec.view(base)
        assert again.tobytes() == array.tobytes()


def fits(spec: ArraySpec) -> bool:
    """Contiguous, or from rank 3 on padded behind the items of the first axis."""
    if spec.is_contiguous:
        return True
    inner = ArraySpec(spec.shape[1:], spec.stride[1:], 0, spec.dtype)
    return len(spec.shape) >= 3 and inner.is_contiguous and spec.stride[0] >= inner.size


def permuted(spec: ArraySpec) -> ArraySpec | None:
    try:
        found: ArraySpec = attempt_permute_to_contiguous_view(spec)
    except ValueError:
        return None
    return found


def what_comes_back_is_the_same_bytes_in_order(spec: ArraySpec) -> None:
    found = permuted(spec)
    if found is None:
        return
    assert sorted(found.shape) == sorted(spec.shape)
    assert np.array_equal(np.sort(addresses(found)), np.sort(addresses(spec)))
    assert fits(found)
    assert (np.diff(addresses(found)) > 0).all()


@given(spec=array_specs(max_dims=5, min_side=1))
def test_it_is_refused_only_if_no_order_fits(spec: ArraySpec) -> None:
    found = permuted(spec)
    orders = [spec.transpose(order) for order in permutations(range(len(spec.shape)))]
    # An axis of size 1 keeps its place where its stride means nothing, so only axes that move count in the search.
    moving = [tuple(size for size in order.shape if size != 1) for order in orders if fits(order)]
    if found is None:
        squeezed = ArraySpec(
            tuple(size for size in spec.shape if size != 1),
            tuple(step for size, step in zip(spec.shape, spec.stride, strict=True) if size != 1),
            spec.storage_offset,
            spec.dtype,
        )
        assert not squeezed.transpose(_by_stride(squeezed)).is_contiguous
    else:
        assert tuple(size for size in found.shape if size != 1) in moving


def _by_stride(spec: ArraySpec) -> tuple[int, ...]:
    return tuple(sorted(range(len(spec.shape)), key=lambda axis: -spec.stride[axis]))


def doing_it_again_changes_nothing(spec: ArraySpec) -> None:
    found = permuted(spec)
    if found is not None:
        assert permuted(found) == found


@settings(max_examples=60)
@given(spec=array_specs(max_dims=5, min_side=1, memory=["dense", "permuted"], loose_ones=False), data=st.data())
def test_how_a_dense_array_is_exposed_does_not_matter(spec: ArraySpec, data: st.DataObject) -> None:
    order = tuple(data.draw(st.permutations(range(len(spec.shape)))))
    assert permuted(spec.transpose(order)) == permuted(spec)


def arrays_and_specs_go_the_same_way(spec: ArraySpec) -> None:
    buffer = np.zeros(spec.byte_span, np.uint8)
    array = spec.view(buffer)
    found = permuted(ArraySpec.of(array))
    if found is None:
        return
    of_array = attempt_permute_to_contiguous_view(array)
    assert (of_array.shape, of_array.dtype) == (found.shape, found.dtype)
    if array.size:
        assert of_array.ctypes.data == array.ctypes.data
        assert tuple(step // array.dtype.itemsize for step in of_array.strides) == found.stride


@settings(max_examples=200)
@given(spec=array_specs())
def test_what_comes_back_is_the_same_bytes_in_order(spec: ArraySpec) -> None:
    what_comes_back_is_the_same_bytes_in_order(spec)
    doing_it_again_changes_nothing(spec)
    arrays_and_specs_go_the_same_way(spec)
