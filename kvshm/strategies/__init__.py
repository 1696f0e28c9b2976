"""Hypothesis strategies for paged KV caches: for tests of an engine's layout, and kvshm's own.

``arrays`` draws dtypes, specs and arrays of raw bits; ``caches`` the caches of every KV format, as an engine exposes
them (``forms``) and in their normal form; ``registrations`` whole registrations of hybrid models, chunk sizes and
block ids; ``descriptors`` what arrives on the wire, well-formed and not. Nothing here needs shared memory, and nothing
else in kvshm needs hypothesis (extra ``kvshm[hypothesis]``).

Sizes shrink to 1, and 1 is among the sizes of every axis: one layer, block, slot, head or element. Contents are drawn
as bits, so bfloat16, float8 and NaNs with payloads come as they may lie in a cache; compare bytes, not values.
"""

from kvshm.strategies.arrays import array_specs, arrays, buffers, dtypes
from kvshm.strategies.caches import PagedCache, kv_caches
from kvshm.strategies.descriptors import (
    descriptor_bytes,
    descriptors,
    mangled_descriptor_bytes,
    refused_descriptor_bytes,
)
from kvshm.strategies.forms import DETECTABLE_FORMATS, REGISTRABLE_FORMATS, kv_formats, layout_hints
from kvshm.strategies.registrations import (
    Registration,
    block_id_lists,
    chunk_sizes,
    engine_groups,
    registrations,
)

__all__ = [
    "DETECTABLE_FORMATS",
    "REGISTRABLE_FORMATS",
    "PagedCache",
    "Registration",
    "array_specs",
    "arrays",
    "block_id_lists",
    "buffers",
    "chunk_sizes",
    "descriptor_bytes",
    "descriptors",
    "dtypes",
    "engine_groups",
    "kv_caches",
    "kv_formats",
    "layout_hints",
    "mangled_descriptor_bytes",
    "refused_descriptor_bytes",
    "registrations",
]
