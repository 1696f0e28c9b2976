"""Names of dtypes and the dtypes behind them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvshm.dtypes import DTYPES, as_dtype, dtype_from_name, dtype_name
from tests.support.processes import environment

NAMES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]


def test_all_names_of_the_wire_are_known() -> None:
    assert sorted(DTYPES) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_and_its_dtype_lead_to_one_another(name: str) -> None:
    dtype = dtype_from_name(name)
    assert isinstance(dtype, np.dtype)
    assert dtype_name(dtype) == name
    assert as_dtype(name) == as_dtype(dtype) == as_dtype(dtype.type) == dtype


def test_no_two_names_share_a_dtype() -> None:
    assert len({DTYPES[name] for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize(
    ("name", "itemsize"), [("bfloat16", 2), ("float8_e4m3fn", 1), ("float8_e5m2", 1), ("bool", 1), ("complex128", 16)]
)
def test_item_sizes(name: str, itemsize: int) -> None:
    assert dtype_from_name(name).itemsize == itemsize


def test_names_are_torchs_not_numpys_codes() -> None:
    assert dtype_name(np.dtype(ml_dtypes.bfloat16)) == "bfloat16"
    assert dtype_name(np.dtype("<f2")) == "float16"


@pytest.mark.parametrize("name", ["V2", "<f2", "torch.float16", "FLOAT16", "half", "", "float128", "str", b"uint8", 2])
def test_other_names_are_refused_with_the_known_ones(name: Any) -> None:
    with pytest.raises(ValueError, match=r"unknown dtype .*; known are bool, uint8, .*float8_e8m0fnu"):
        dtype_from_name(name)


def test_names_that_cannot_be_looked_up_are_refused_too() -> None:
    with pytest.raises(ValueError, match=r"unknown dtype \[\]"):
        dtype_from_name([])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["V2", ">f4", "U3", "O", [("a", "f2")], "M8[s]", "f2,i4"])
def test_dtypes_without_a_name_are_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match="has no name on the wire; use one of bool"):
        dtype_name(np.dtype(dtype))


def test_other_byte_orders_are_refused() -> None:
    swapped = np.dtype("float32").newbyteorder()
    with pytest.raises(ValueError, match="has no name on the wire"):
        as_dtype(swapped)


@pytest.mark.parametrize("value", ["float17", "f4"])
def test_as_dtype_takes_strings_as_names_only(value: str) -> None:
    with pytest.raises(ValueError, match=f"unknown dtype '{value}'"):
        as_dtype(value)


def test_as_dtype_refuses_what_is_no_dtype() -> None:
    with pytest.raises(ValueError, match=r"is no dtype; use one of bool"):
        as_dtype(object())


def test_names_resolve_in_an_interpreter_that_imported_nothing_else() -> None:
    code = "from kvshm.dtypes import dtype_from_name; print(dtype_from_name('bfloat16').itemsize)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True, env=environment()
    )
    assert (done.stdout, done.stderr) == ("2\n", "")


def test_numpy_knows_the_names_once_kvshm_is_imported() -> None:
    code = "import kvshm, numpy as np; assert np.dtype('bfloat16').itemsize == 2"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env=environment())
