"""The one-line notation of a cache's shape."""

from __future__ import annotations

import numpy as np
import pytest

from kvshm.dtypes import DTYPES
from kvshm.layout import KernelGroupInfo, PageBufferShapeDesc, format_kvcache_shape_spec, parse_kvcache_shape_spec


def group(name: str = "float16", num_layers: int = 3, first: int = 0) -> KernelGroupInfo:
    dtype = DTYPES[name]
    desc = PageBufferShapeDesc(2, num_layers, 7, 11, 5, 13, dtype.itemsize, 0, dtype)
    return KernelGroupInfo(tuple(range(first, first + num_layers)), desc, dtype)


def test_groups_are_read_and_their_layers_counted_through() -> None:
    found = parse_kvcache_shape_spec("(2,7,11,5,13):float16:3;(2,7,11,5,13):uint8:2")
    assert found == [group(), group("uint8", 2, first=3)]
    assert [(info.num_layers, info.hidden_dim_size, info.slots_per_block) for info in found] == [
        (3, 65, 11),
        (2, 65, 11),
    ]
    assert found[0].format is None


def test_writing_is_the_reverse() -> None:
    text = "(2,7,11,5,13):float16:3;(2,7,11,5,13):uint8:2"
    assert format_kvcache_shape_spec(parse_kvcache_shape_spec(text)) == text


def test_white_space_empty_groups_and_case_do_not_matter() -> None:
    text = " ; ( 2 ,7,\t11,5,13 ) : BFloat16 : 3 ;;\n"
    with pytest.raises(ValueError, match="is not of the form"):
        parse_kvcache_shape_spec(text)
    assert parse_kvcache_shape_spec(" ; ( 2 ,7,\t11,5,13 ): BFloat16 : 3 ;;\n") == [group("bfloat16")]


@pytest.mark.parametrize("name", ["float16", "float32", "bfloat16", "uint8", "int8"])
def test_dtypes(name: str) -> None:
    assert parse_kvcache_shape_spec(f"(2,7,11,5,13):{name.upper()}:3") == [group(name)]
    assert format_kvcache_shape_spec([group(name)]) == f"(2,7,11,5,13):{name}:3"


@pytest.mark.parametrize("name", ["float64", "float8_e4m3fn", "fp16", "torch.float16", ""])
def test_other_dtypes_are_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"has dtype '{name}'; it must be one of float16, float32, bfloat16, uint8, int8"
    ):
        parse_kvcache_shape_spec(f"(2,7,11,5,13):{name}:3")


def test_other_dtypes_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="dtype float64 has no place in a shape spec; it must be one of float16"):
        format_kvcache_shape_spec([group("float64")])


@pytest.mark.parametrize(
    "text",
    ["2,7,11,5,13:float16:3", "(2,7,11,5,13)float16:3", "(2,7,11,5,13):float16", "x(2,7,11,5,13):float16:3",
     "(2,7,11,5,13):float16:3:4", "((2,7,11,5,13)):float16:3"],
)  # fmt: skip
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not of the form \(kv_size,NB,BS,NH,HS\):dtype:layers"):
        parse_kvcache_shape_spec(text)


@pytest.mark.parametrize(("sizes", "count"), [("2,7,11,5", 4), ("2,7,11,5,13,1", 6)])
def test_five_sizes_are_wanted(sizes: str, count: int) -> None:
    with pytest.raises(ValueError, match=f"has {count} sizes; it takes five: kv_size,NB,BS,NH,HS"):
        parse_kvcache_shape_spec(f"({sizes}):float16:3")


@pytest.mark.parametrize("text", ["", " ", ";", " ; ;"])
def test_no_groups_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="has no groups; give at least one"):
        parse_kvcache_shape_spec(text)
    with pytest.raises(ValueError, match="no groups to write"):
        format_kvcache_shape_spec([])


def test_sizes_are_c_ints_and_layers_are_countable() -> None:
    assert parse_kvcache_shape_spec("(2,2147483647,11,5,13):float16:3")[0].shape_desc.nb == 2**31 - 1
    with pytest.raises(ValueError, match="'2147483648' where a positive number up to 2147483647 belongs"):
        parse_kvcache_shape_spec("(2,2147483648,11,5,13):float16:3")
    with pytest.raises(ValueError, match="'1000001' where a positive number up to 1000000 belongs"):
        parse_kvcache_shape_spec("(2,7,11,5,13):float16:1000001")
    with pytest.raises(ValueError, match="where a positive number up to 999999 belongs"):
        parse_kvcache_shape_spec("(2,7,11,5,13):float16:1;(2,7,11,5,13):float16:1000000")
    with pytest.raises(ValueError, match="where a positive number"):
        parse_kvcache_shape_spec(f"(2,{'9' * 5_000},11,5,13):float16:3")


@pytest.mark.parametrize("number", ["0", "-4", "+2", "1_024", "\u0664", "\u00b2", "2.0", "0x4", "1e3", "4 4", ""])
def test_difference_16_numbers_are_positive_ascii_decimals(number: str) -> None:
    for text in (f"(2,{number},11,5,13):float16:3", f"(2,7,11,5,13):float16:{number}"):
        with pytest.raises(ValueError, match="where a positive number up to"):
            parse_kvcache_shape_spec(text)


def test_leading_zeros_are_decimals() -> None:
    assert parse_kvcache_shape_spec("(2,007,11,5,13):float16:3") == [group()]


def test_the_dtype_is_numpys() -> None:
    assert parse_kvcache_shape_spec("(2,7,11,5,13):float32:3")[0].dtype == np.dtype("float32")
