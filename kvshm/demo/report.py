"""What the demo prints: the facts of a run as data, and the same as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvshm.demo.engine import Outcome
from kvshm.demo.model import ModelConfig
from kvshm.demo.paged_cache import LAYOUT_HINTS, layer_shape
from kvshm.dtypes import dtype_from_name, dtype_name
from kvshm.formats import EngineType, detect_format
from kvshm.layout import KernelGroupInfo, KVLayerGroupsManager
from kvshm.spec import ArraySpec
from kvshm.units import format_seconds

__all__ = ["describe", "kernel_group", "make_report", "problems"]

_MEASURED = "by the engine, request to answer, once, on pages new to the server; again and memcpy: median of 7"


def kernel_group(config: ModelConfig, num_blocks: int, chunk_size: int) -> KernelGroupInfo:
    """The layout of an engine's cache: its one kernel group, from the shapes alone."""
    spec = ArraySpec.dense(layer_shape(config, num_blocks), dtype_from_name("bfloat16"))
    name, normalised = detect_format([spec] * config.num_layers, EngineType.VLLM, LAYOUT_HINTS)
    formats = [name] * config.num_layers
    [group] = KVLayerGroupsManager(normalised, formats, lmcache_tokens_per_chunk=chunk_size).kernel_groups
    return group


def make_report(
    outcomes: Sequence[Outcome],
    *,
    prompt_name: str,
    num_prompt: int,
    chunk_size: int,
    group: KernelGroupInfo,
    left: Sequence[str],
) -> dict[str, Any]:
    """All facts of a run.

    Args:
        outcomes: Of the engine that stored, and of the one that retrieved.
        num_prompt: Tokens of the prompt.
        left: Segments of the run that still exist.
    """
    first, second = outcomes
    desc = group.shape_desc
    assert group.format is not None  # detected, not parsed
    # The last token is always computed: nobody keeps its logits.
    reusable = (num_prompt - 1) // chunk_size * chunk_size
    same = {
        "tokens": first.output == second.output,
        "logits": first.logits_digest == second.logits_digest,
    }
    return {
        "identical": all(same.values()),
        "same": same,
        "prompt": {"file": prompt_name, "num_tokens": num_prompt, "num_reusable": reusable},
        "geometry": {
            "format": group.format.name,
            "shape": group.format.concrete_shape(desc.nl, desc.nb, desc.bs, desc.nh, desc.hs),
            "dtype": dtype_name(group.dtype),
            "num_layers": desc.nl,
            "num_blocks": desc.nb,
            "tokens_per_block": group.tokens_per_block,
            "tokens_per_chunk": chunk_size,
            "num_kv_heads": desc.nh,
            "head_size": desc.hs,
            "nbytes_per_token": group.region_nbytes(1),
            "nbytes_per_block": group.region_nbytes(desc.bs),
            "nbytes_per_chunk": group.region_nbytes(group.calculate_slots(chunk_size)),
        },
        "shared": {
            "nbytes": first.shared_nbytes,
            "num_segments": len(first.segments),
            "num_descriptors": first.num_descriptors,
            "map_s": first.map_s,
            "copied_nbytes": 0,
        },
        "store": _copy(first.num_stored, first.store_s, first),
        "retrieve": _copy(second.num_retrieved, second.retrieve_s, second)
        | {"again_s": second.retrieve_again_s or None, "again_gb_per_s": _gb_per_s(second, second.retrieve_again_s)},
        "engines": [
            {
                "first_block_ids": outcome.block_ids[:6],
                "num_retrieved": outcome.num_retrieved,
                "num_prefilled": outcome.num_prefilled,
                "map_s": outcome.map_s,
                "lookup_s": outcome.lookup_s,
                "prefill_s": outcome.prefill_s,
                "generate_s": outcome.generate_s,
                "num_generated": len(outcome.output),
                "output": outcome.output.decode("latin-1"),
                "output_hex": outcome.output.hex(),
                "logits_digest": outcome.logits_digest,
            }
            for outcome in outcomes
        ],
        "prefill_saved_s": first.prefill_s - second.prefill_s - second.lookup_s - second.retrieve_s,
        "measured": _MEASURED,
        "segments_left": list(left),
    }


def _copy(num_tokens: int, seconds: float, outcome: Outcome) -> dict[str, Any]:
    """One copy between pages and chunks, beside a plain copy of the same bytes."""
    return {
        "num_tokens": num_tokens,
        "nbytes": outcome.copied_nbytes,
        "s": seconds,
        "gb_per_s": _gb_per_s(outcome, seconds),
        "memcpy_s": outcome.memcpy_s,
        "memcpy_gb_per_s": _gb_per_s(outcome, outcome.memcpy_s),
    }


def _gb_per_s(outcome: Outcome, seconds: float) -> float | None:
    return outcome.copied_nbytes / seconds / 1e9 if outcome.copied_nbytes and seconds else None


def problems(report: dict[str, Any]) -> list[str]:
    """What a run owes; nothing if it did all that the demo promises."""
    found = []
    if not report["identical"]:
        differing = [what for what, is_same in report["same"].items() if not is_same]
        found.append(f"the engines' {' and '.join(differing)} differ")
    reusable, reused = report["prompt"]["num_reusable"], report["retrieve"]["num_tokens"]
    if reused != reusable:
        found.append(f"engine 2 got {reused} tokens from the cache instead of {reusable}")
    if report["segments_left"]:
        found.append(f"segments are left: {', '.join(report['segments_left'])}")
    return found


def describe(report: dict[str, Any]) -> str:
    """The report as text, some twenty lines."""
    geometry, shared = report["geometry"], report["shared"]
    first, second = report["engines"]
    saved, whole = max(report["prefill_saved_s"], 0.0), first["prefill_s"]
    sizes = (
        f"{geometry['nbytes_per_token']:,} bytes a token, {geometry['nbytes_per_block']:,} a block of "
        f"{geometry['tokens_per_block']}, {geometry['nbytes_per_chunk']:,} a chunk of {geometry['tokens_per_chunk']}"
    )
    mapped = (
        f"{shared['nbytes']:,} bytes in {shared['num_segments']} segment, registered by {shared['num_descriptors']} "
        f"descriptors in {format_seconds(shared['map_s'])}, 0 bytes copied"
    )
    rows = [
        ("prompt", f"{report['prompt']['file']}, {report['prompt']['num_tokens']:,} tokens (its bytes)"),
        ("cache", f"{geometry['shape']} of {geometry['dtype']} ({geometry['format']})"),
        ("", sizes),
        ("shared", mapped),
        ("store", _describe_copy(report["store"])),
        ("retrieve", _describe_copy(report["retrieve"])),
        ("measured", report["measured"]),
        ("engine 1", _describe_engine(first)),
        ("engine 2", _describe_engine(second)),
        ("saved", f"{format_seconds(saved)} of {format_seconds(whole)} prefill ({saved / whole:.0%})"),
        ("output 1", repr(first["output"])),
        ("output 2", repr(second["output"])),
        ("logits", f"{first['logits_digest']} (1), {second['logits_digest']} (2)"),
        ("left", ", ".join(report["segments_left"]) or "no process, no segment, no file"),
        ("identical", "yes" if report["identical"] else "NO"),
    ]
    return "\n".join(f"{label + ':' if label else '':<11}{text}" for label, text in rows)


def _describe_copy(copy: dict[str, Any]) -> str:
    if not copy["num_tokens"]:
        return "0 tokens: the prompt has no full chunk before its last token"
    again = copy.get("again_s")
    more = f"; again {format_seconds(again)}, {copy['again_gb_per_s']:.3g} GB/s" if again else ""
    return (
        f"{copy['num_tokens']:,} tokens, {copy['nbytes']:,} bytes in {format_seconds(copy['s'])}, "
        f"{copy['gb_per_s']:.3g} GB/s{more} (memcpy {copy['memcpy_gb_per_s']:.3g} GB/s)"
    )


def _describe_engine(engine: dict[str, Any]) -> str:
    blocks = " ".join(map(str, engine["first_block_ids"]))
    return (
        f"blocks {blocks} ...; {engine['num_retrieved']:,} tokens from the cache, {engine['num_prefilled']:,} "
        f"computed in {format_seconds(engine['prefill_s'])}"
    )
