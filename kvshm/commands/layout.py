"""``kvshm layout``: what a cache of a given shape takes, computed from the shape alone."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from math import lcm
from typing import Any

from kvshm.dtypes import dtype_name
from kvshm.formats import EngineKVFormat
from kvshm.layout import KernelGroupInfo, PageBufferShapeDesc, format_kvcache_shape_spec, parse_kvcache_shape_spec
from kvshm.units import format_nbytes, parse_nbytes

__all__ = ["add_arguments", "describe", "plan", "run"]

# Planes of several widths, and index pages: five sizes do not describe them.
_OTHER_ROWS = (EngineKVFormat.NL_X_NP_X_NB_BS_ONE_HS, EngineKVFormat.NL_X_NB_BSV_BSS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvshm layout``."""
    parser.add_argument(
        "shape",
        help="the cache's layers, as (kv_size,NB,BS,NH,HS):dtype:layers; several groups are separated by semicolons. "
        "kv_size is 2 for K and V, 1 where they are one (MLA, packed). Example: '(2,1024,16,8,128):bfloat16:32'",
    )
    parser.add_argument("--chunk-size", type=int, default=256, metavar="N", help="tokens in a chunk (default: 256)")
    parser.add_argument(
        "--format", metavar="NAME", help="how the arrays are laid out; without it all formats of that shape are listed"
    )
    parser.add_argument("--budget", metavar="BYTES", help="also say how many tokens fit in so much memory, e.g. 16GiB")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the sizes: 0, or 2 if the shape or an option is wrong."""
    try:
        name = None if args.format is None else _format_named(args.format)
        budget = None if args.budget is None else parse_nbytes(args.budget)
        result = plan(parse_kvcache_shape_spec(args.shape), args.chunk_size, name, budget)
    except ValueError as error:
        print(f"kvshm layout: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result, indent=2) if args.json else describe(result))
    return 0


def _format_named(name: str) -> EngineKVFormat:
    try:
        return EngineKVFormat[name.upper()]
    except KeyError:
        raise ValueError(f"unknown format {name!r}; known are {', '.join(EngineKVFormat.__members__)}") from None


def plan(
    groups: Sequence[KernelGroupInfo],
    chunk_size: int,
    format: EngineKVFormat | None = None,
    budget: int | None = None,
) -> dict[str, Any]:
    """The sizes of a cache in bytes, per group and together.

    Args:
        groups: As parsed: one block id covers one block of each group, one slot is one token.
        format: Only this format's arrays; None: those of all formats that fit.
        budget: Bytes; how many tokens they hold is told too.

    Raises:
        ValueError: The chunk size is no whole number of every group's blocks, or the format does not fit a group.
    """
    step = lcm(*(group.slots_per_block for group in groups))
    if chunk_size < 1 or chunk_size % step:
        sizes = ", ".join(str(group.slots_per_block) for group in groups)
        raise ValueError(
            f"a chunk of {chunk_size} tokens is no whole number of blocks of {sizes} tokens; use a multiple of {step}"
        )
    token_nbytes = sum(group.region_nbytes(1) for group in groups)
    result: dict[str, Any] = {
        "shape": format_kvcache_shape_spec(groups),
        "tokens_per_chunk": chunk_size,
        "nbytes_per_token": token_nbytes,
        "nbytes_per_chunk": token_nbytes * chunk_size,
        "nbytes": sum(_total_nbytes(group) for group in groups),
        # All groups hold every token, so the smallest is full first.
        "num_tokens": min(group.shape_desc.nb * group.slots_per_block for group in groups),
        "groups": [_plan_group(index, group, chunk_size, format) for index, group in enumerate(groups)],
    }
    if budget is not None:
        num_chunks = budget // (token_nbytes * chunk_size)
        result["budget"] = {
            "nbytes": budget,
            "num_tokens": budget // token_nbytes,
            "num_chunks": num_chunks,
            "num_tokens_in_chunks": num_chunks * chunk_size,
        }
    return result


def _total_nbytes(group: KernelGroupInfo) -> int:
    return group.region_nbytes(group.shape_desc.nb * group.slots_per_block)


def _plan_group(index: int, group: KernelGroupInfo, chunk_size: int, format: EngineKVFormat | None) -> dict[str, Any]:
    desc = group.shape_desc
    formats = [name for name in EngineKVFormat if _fits(name, desc)]
    if format is not None:
        if format not in formats:
            fitting = ", ".join(name.name for name in formats)
            raise ValueError(
                f"group {index} has kv_size {desc.kv_size} and {desc.nh} heads, which {format.name} "
                f"({format.describe()}) cannot have; formats that can: {fitting}"
            )
        formats = [format]
    return {
        "layers": [group.layer_indices[0], group.layer_indices[-1]],
        "num_layers": group.num_layers,
        "kv_size": desc.kv_size,
        "num_blocks": desc.nb,
        "tokens_per_block": group.slots_per_block,
        "num_heads": desc.nh,
        "head_size": desc.hs,
        "dtype": dtype_name(group.dtype),
        "nbytes_per_token": group.region_nbytes(1),
        "nbytes_per_block": group.region_nbytes(group.slots_per_block),
        "nbytes_per_chunk": group.region_nbytes(chunk_size),
        "nbytes": _total_nbytes(group),
        "formats": {
            name.name: name.concrete_shape(nl=desc.nl, nb=desc.nb, bs=desc.bs, nh=desc.nh, hs=desc.hs)
            for name in formats
        },
    }


def _fits(format: EngineKVFormat, desc: PageBufferShapeDesc) -> bool:
    """Whether a cache of these sizes may be laid out so; formats whose rows hold more than heads are left out."""
    return (
        format.kv_size == desc.kv_size
        and (desc.nh == 1 or not format.is_mla)
        and format not in _OTHER_ROWS
        and not (format.is_fused_packed and "TWO" in format.axes)
    )


def describe(result: dict[str, Any]) -> str:
    """The sizes as text."""
    lines = []
    for index, group in enumerate(result["groups"]):
        first, last = group["layers"]
        lines.append(
            f"group {index}: layers {first} to {last}, {group['num_blocks']:,} blocks of {group['tokens_per_block']} "
            f"tokens, {'K and V' if group['kv_size'] == 2 else 'one plane'}, {group['num_heads']} x "
            f"{group['head_size']} {group['dtype']}"
        )
        lines.append(
            f"  {_amount(group['nbytes_per_token'])} a token, {_amount(group['nbytes_per_block'])} a block, "
            f"{_amount(group['nbytes'])} together"
        )
        if len(group["formats"]) == 1:
            lines += [f"  arrays {shape} ({name})" for name, shape in group["formats"].items()]
        else:
            lines.append(f"  formats (--format shows the arrays): {', '.join(group['formats'])}")
    lines += [
        f"a token     {_amount(result['nbytes_per_token'])}",
        f"a chunk     {_amount(result['nbytes_per_chunk'])} for {result['tokens_per_chunk']} tokens",
        f"all         {_amount(result['nbytes'])} for {result['num_tokens']:,} tokens",
    ]
    if "budget" in result:
        budget = result["budget"]
        lines.append(
            f"the budget  {_amount(budget['nbytes'])} holds {budget['num_tokens']:,} tokens; "
            f"{budget['num_tokens_in_chunks']:,} in {budget['num_chunks']:,} whole chunks"
        )
    return "\n".join(lines)


def _amount(nbytes: int) -> str:
    return f"{nbytes:,} bytes ({format_nbytes(nbytes)})" if nbytes >= 1024 else format_nbytes(nbytes)
