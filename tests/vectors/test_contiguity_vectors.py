"""The order of axes in memory, as LMCache 0.5.6 finds it."""

from __future__ import annotations

from typing import Any

import pytest

from kvshm.contiguity import attempt_permute_to_contiguous_view
from kvshm.spec import ArraySpec
from tests.support.vectors import Storages, attempt, each, is_error, load, spec_of

CASES = load("contiguity")

# What kvshm mends, see docs/differences.md: case, number of the difference, the shape and strides that come back.
MENDED: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
    "contiguity-0030": (4, (1, 8, 8), (64, 8, 1)),
    "contiguity-0032": (4, (1, 8, 7), (56, 7, 1)),
    "contiguity-0034": (4, (6, 1, 7), (7, 7, 1)),
    "contiguity-0036": (4, (6, 3, 1), (3, 1, 1)),
    "contiguity-0037": (4, (3, 3, 1), (3, 1, 1)),
    "contiguity-0038": (4, (1, 3), (3, 1)),
    "contiguity-0039": (4, (1,), (1,)),
    "contiguity-0040": (4, (1,), (1,)),
    "contiguity-0044": (4, (6, 1, 8, 7), (64, 56, 7, 1)),
    "contiguity-0055": (4, (1, 4, 5), (20, 5, 1)),
    "contiguity-0056": (4, (1, 3, 2, 5), (30, 10, 5, 1)),
    "contiguity-0058": (4, (1, 4, 5), (20, 5, 1)),
    "contiguity-0073": (5, (3, 0), (1, 1)),
    "contiguity-0074": (5, (6, 0, 6), (6, 6, 1)),
    "contiguity-0075": (5, (0, 0), (1, 1)),
    "contiguity-0077": (5, (2, 0, 2, 2, 5), (20, 20, 10, 5, 1)),
    "contiguity-0078": (5, (0, 4), (0, 0)),
    "contiguity-0079": (5, (0, 8, 3), (29, 3, 1)),
    "contiguity-0080": (5, (2, 0, 4, 4, 6), (96, 96, 6, 24, 1)),
    "contiguity-0089": (4, (8, 8, 1), (8, 1, 1)),
    "contiguity-0105": (5, (0, 3, 2), (6, 0, 3)),
}


def permuted(case: dict[str, Any]) -> Any:
    def go() -> dict[str, Any]:
        spec = attempt_permute_to_contiguous_view(spec_of(case["input"]))
        return {
            "shape": list(spec.shape),
            "stride": list(spec.stride),
            "offset": spec.storage_offset,
            "is_contiguous": spec.is_contiguous,
        }

    return attempt(go)


@each(CASES)
def test_case(case: dict[str, Any]) -> None:
    found, recorded = permuted(case), case["output"]
    if case["id"] in MENDED:
        check_mended(case, found)
    else:
        assert is_error(found) if is_error(recorded) else found == recorded, case["why"]
    check_arrays(case, found)


def check_mended(case: dict[str, Any], found: Any) -> None:
    number, shape, stride = MENDED[case["id"]]
    assert found != case["output"], "no difference any more"
    assert (found["shape"], found["stride"], found["offset"]) == (list(shape), list(stride), case["input"]["offset"])
    assert (number == 5) == (0 in shape)
    assert 1 in shape or 0 in shape


def check_arrays(case: dict[str, Any], expected: Any) -> None:
    """Arrays give what specs give, without a copy."""
    storages = Storages({"storage": 0, **case["input"]})
    found = attempt(attempt_permute_to_contiguous_view, storages.arrays)
    if is_error(expected):
        assert isinstance(found, dict)
        assert found["error"] == expected["error"]
        return
    assert not isinstance(found, dict)
    assert list(found.shape) == expected["shape"]
    if found.size:
        assert list(ArraySpec.of(found).stride) == expected["stride"]
        assert found.ctypes.data == storages.arrays.ctypes.data


def test_every_mended_case_exists() -> None:
    assert set(MENDED) <= {case["id"] for case in CASES}


@pytest.mark.parametrize("number", [4, 5])
def test_both_differences_are_shown(number: int) -> None:
    assert number in {found for found, _, _ in MENDED.values()}
