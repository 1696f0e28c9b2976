"""The one-line notation of a cache's shape, as LMCache 0.5.6 reads and writes it."""

from __future__ import annotations

from typing import Any

from kvshm.dtypes import dtype_from_name, dtype_name
from kvshm.layout import KernelGroupInfo, PageBufferShapeDesc, format_kvcache_shape_spec, parse_kvcache_shape_spec
from tests.support.vectors import attempt, each, is_error, load

CASES = load("shape_spec")

# Numbers that Python reads and that are no positive ASCII decimals: difference 16 of docs/differences.md.
MENDED = {f"shape_spec-{case:04}" for case in (38, 39, 41, 42, 50, 51, 52, 53, 66)}

OF_GROUP = (
    "tokens_per_block",
    "engine_group_idx",
    "sw_size_tokens",
    "num_layers",
    "hidden_dim_size",
    "slots_per_block",
)


def parsed(text: str) -> dict[str, Any]:
    groups = parse_kvcache_shape_spec(text)
    sizes = ("kv_size", "nl", "nb", "bs", "nh", "hs", "element_size", "block_stride_elems")
    return {
        "groups": [
            {
                "layer_indices": list(group.layer_indices),
                "shape_desc": {size: getattr(group.shape_desc, size) for size in sizes},
                "dtype": dtype_name(group.dtype),
                "format": group.format,
                **{name: getattr(group, name) for name in OF_GROUP},
            }
            for group in groups
        ],
        "formatted": format_kvcache_shape_spec(groups),
    }


def kernel_group(given: dict[str, Any]) -> KernelGroupInfo:
    dtype = dtype_from_name(given["dtype"])
    kv_size, nl, nb, bs, nh, hs = given["sizes"]
    desc = PageBufferShapeDesc(kv_size, nl, nb, bs, nh, hs, dtype.itemsize, 0, dtype)
    return KernelGroupInfo(tuple(given["layer_indices"]), desc, dtype)


@each(CASES)
def test_case(case: dict[str, Any]) -> None:
    found: Any
    if case["fn"] == "parse":
        found = attempt(parsed, case["input"]["spec"])
    else:
        found = attempt(format_kvcache_shape_spec, [kernel_group(group) for group in case["input"]["groups"]])
    if case["id"] in MENDED:
        assert not is_error(case["output"]), "no difference any more"
        assert is_error(found)
        assert "where a positive number up to" in found["message"]
    elif is_error(case["output"]):
        assert is_error(found), case["why"]
    else:
        assert found == case["output"], case["why"]


def test_every_mended_case_exists() -> None:
    assert {case["id"] for case in CASES} >= MENDED
