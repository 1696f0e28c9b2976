"""The one-line notation of a cache's shape: ``(2,1024,16,8,128):float16:32;...``.

Each group is ``(kv_size,NB,BS,NH,HS):dtype:layers``; groups stand one after the other, and their layers are counted
through. It describes a cache whose arrays are not at hand: for planning and for benchmarks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvshm.dtypes import dtype_from_name, dtype_name
from kvshm.layout.groups import KernelGroupInfo, PageBufferShapeDesc

__all__ = ["format_kvcache_shape_spec", "parse_kvcache_shape_spec"]

DTYPE_NAMES = ("float16", "float32", "bfloat16", "uint8", "int8")
LARGEST_SIZE = 2**31 - 1  # sizes are C ints on the other side
MOST_LAYERS = 1_000_000  # a count makes that many layer indices

_GROUP = re.compile(r"\((?P<sizes>[^()]*)\):(?P<dtype>[^:()]*):(?P<count>[^:()]*)")
_NUMBER = re.compile(r"[0-9]+", re.ASCII)


def parse_kvcache_shape_spec(text: str) -> list[KernelGroupInfo]:
    """Kernel groups of a shape in one-line notation, of no known format.

    White space around groups and fields, empty groups and the case of dtypes do not matter.

    >>> [group] = parse_kvcache_shape_spec("(2,1024,16,8,128):bfloat16:32")
    >>> group.num_layers, group.hidden_dim_size
    (32, 1024)

    Raises:
        ValueError: It is not of that form; a number is not positive; no such dtype.
    """
    groups: list[KernelGroupInfo] = []
    num_layers = 0
    for part in filter(None, (part.strip() for part in text.split(";"))):
        match = _GROUP.fullmatch(part)
        if match is None:
            raise ValueError(f"group {part!r} is not of the form (kv_size,NB,BS,NH,HS):dtype:layers")
        name = match["dtype"].strip().lower()
        if name not in DTYPE_NAMES:
            raise ValueError(
                f"group {part!r} has dtype {match['dtype'].strip()!r}; it must be one of {', '.join(DTYPE_NAMES)}"
            )
        sizes = [_positive(size, part, LARGEST_SIZE) for size in match["sizes"].split(",")]
        if len(sizes) != 5:
            raise ValueError(f"group {part!r} has {len(sizes)} sizes; it takes five: kv_size,NB,BS,NH,HS")
        count = _positive(match["count"], part, MOST_LAYERS - num_layers)
        dtype = dtype_from_name(name)
        kv_size, nb, bs, nh, hs = sizes
        groups.append(
            KernelGroupInfo(
                layer_indices=tuple(range(num_layers, num_layers + count)),
                shape_desc=PageBufferShapeDesc(kv_size, count, nb, bs, nh, hs, dtype.itemsize, 0, dtype),
                dtype=dtype,
            )
        )
        num_layers += count
    if not groups:
        raise ValueError(f"shape {text!r} has no groups; give at least one (kv_size,NB,BS,NH,HS):dtype:layers")
    return groups


def format_kvcache_shape_spec(groups: Sequence[KernelGroupInfo]) -> str:
    """Kernel groups in one-line notation.

    Raises:
        ValueError: No groups, or a dtype that the notation does not have.
    """
    if not groups:
        raise ValueError("no groups to write; give at least one kernel group")
    parts = []
    for group in groups:
        name, desc = dtype_name(group.dtype), group.shape_desc
        if name not in DTYPE_NAMES:
            raise ValueError(f"dtype {name} has no place in a shape spec; it must be one of {', '.join(DTYPE_NAMES)}")
        parts.append(f"({desc.kv_size},{desc.nb},{desc.bs},{desc.nh},{desc.hs}):{name}:{desc.nl}")
    return ";".join(parts)


def _positive(text: str, part: str, largest: int) -> int:
    text = text.strip()
    if _NUMBER.fullmatch(text) is None or len(text) > 19 or not 1 <= int(text) <= largest:
        raise ValueError(f"group {part!r} has {text!r} where a positive number up to {largest} belongs")
    return int(text)
