"""What is paid once, or per segment, layer, view or call; and memory.

Everything is measured where it is paid: mapping in a process that has mapped nothing yet, imports in an interpreter
that has imported nothing yet.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

import kvshm
from kvshm.bench.results import Amount, Cost, timed
from kvshm.bench.transfers import LAYOUTS, Workload
from kvshm.context import CPUCacheContext
from kvshm.formats import EngineType, normalize_and_discover_per_layer_formats
from kvshm.layout import EngineGroupInfo, KVLayerGroupsManager
from kvshm.spec import ArraySpec
from kvshm.transfer import gather_chunks, object_group_nbytes

__all__ = ["measure_costs", "measure_memory"]

NHD = {"kv_layout": "NHD"}
MIB, GIB = 2**20, 2**30


def measure_costs(*, quick: bool, repeat: int) -> Iterator[Cost]:
    """All costs, each as a series of sizes. ``quick`` leaves the large sizes out."""
    yield from _segments(quick, repeat)
    for num_layers in (4, 8) if quick else (32, 128, 512):
        yield from _registration(num_layers, repeat)
    for num_layers in (8, 16) if quick else (64, 128, 256, 512):
        yield _layout(num_layers, repeat)
    yield from _views(repeat)
    yield from _imports(1 if quick else 5)


def _segments(quick: bool, repeat: int) -> Iterator[Cost]:
    """Creating segments, every page reserved, and mapping them elsewhere. Those that are mapped have no pages."""
    for nbytes in (MIB,) if quick else (MIB, 16 * MIB, 256 * MIB):
        seconds = timed(lambda nbytes=nbytes: kvshm.Segment.create(nbytes).unlink(), repeat)  # type: ignore[misc]
        yield Cost("create a segment", nbytes // MIB, "MiB", seconds)
    room = os.statvfs("/dev/shm")
    sizes = (MIB, 4 * MIB) if quick else (MIB, 32 * MIB, GIB, 8 * GIB, 64 * GIB)
    segments = [kvshm.Segment.create(size, reserve=False) for size in sizes if size <= room.f_blocks * room.f_frsize]
    try:
        code = "import sys; from kvshm.bench.costs import attach_seconds; attach_seconds(sys.argv[1:])"
        for segment, seconds in zip(segments, _in_child(code, *(segment.name for segment in segments)), strict=True):
            yield Cost("attach a segment", segment.nbytes // MIB, "MiB", seconds)
    finally:
        for segment in segments:
            segment.unlink()


def attach_seconds(names: list[str]) -> None:
    """Print how long it takes to map each of these segments and to let go of it; for a process of its own."""
    seconds = [timed(lambda name=name: kvshm.Segment.attach(name), 5) for name in names]  # type: ignore[misc]
    print(json.dumps(seconds))


def _in_child(code: str, *arguments: str) -> Any:
    command = [sys.executable, "-c", code, *arguments]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def _registration(num_layers: int, repeat: int) -> Iterator[Cost]:
    """Descriptors, and a context made of them; and what a call costs that copies next to nothing."""
    layers = kvshm.empty_many([(2, 32, 16, 1, 2)] * num_layers, ["bfloat16"] * num_layers)
    packed = [kvshm.wrap(layer).to_bytes() for layer in layers]
    yield Cost("wrap and pack", num_layers, "layer", timed(lambda: [kvshm.wrap(a).to_bytes() for a in layers], repeat))
    decode = kvshm.ShmArrayWrapper.from_bytes
    yield Cost("unpack", num_layers, "layer", timed(lambda: [decode(data) for data in packed], repeat))
    descriptors = [decode(data) for data in packed]
    yield Cost("register", num_layers, "layer", timed(lambda: CPUCacheContext(descriptors, 256, NHD), repeat))
    context = CPUCacheContext(descriptors, 256, NHD)
    ids = [np.random.default_rng(0).permutation(32)[:16]]
    chunk = np.zeros(object_group_nbytes(context, 0), np.uint8)

    def gather() -> None:
        gather_chunks(context, ids, [chunk], num_threads=1)

    def first_gather() -> None:
        context.forget_plans()
        gather()

    yield Cost("first gather", num_layers, "layer", timed(first_gather, repeat))
    yield Cost("gather next to nothing", num_layers, "layer", timed(gather, repeat))


def _layout(num_layers: int, repeat: int) -> Cost:
    """Formats, groups and offsets of a hybrid model with eight engine groups, on shapes alone."""
    groups = np.array_split(np.arange(num_layers), 8)
    specs = [ArraySpec.dense((2, 1024, 16, 8, 128), np.dtype(np.float16)) for _ in range(num_layers)]
    infos = [EngineGroupInfo(index, tuple(map(int, layers)), 16) for index, layers in enumerate(groups)]

    def lay_out() -> None:
        normalised, formats = normalize_and_discover_per_layer_formats(
            specs, [info.layer_indices for info in infos], EngineType.VLLM, NHD
        )
        KVLayerGroupsManager(normalised, formats, infos)

    return Cost("lay out, 8 groups, no memory", num_layers, "layer", timed(lay_out, repeat))


def _views(repeat: int) -> Iterator[Cost]:
    layers = [np.zeros((2, 4, 16, 2, 8), np.float16) for _ in range(32)]
    context = CPUCacheContext(layers, 64, NHD)
    for name in ("get_temp_kernel_group_buffer", "get_temp_object_group_buffer"):
        yield Cost(name, 1, "", timed(partial(getattr(context, name), 0, 0), repeat))


def _imports(repeat: int) -> Iterator[Cost]:
    code = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
    for module in ("numpy", "kvshm", "kvshm.transfer"):
        yield Cost(f"import {module}", 1, "", statistics.median(_in_child(code.format(module)) for _ in range(repeat)))


def measure_memory(nbytes: int) -> Iterator[Amount]:
    """What importing takes, what a context holds, and what a transfer takes beside the bytes that it moves."""
    code = (
        "import {}, json; fields = [line.split() for line in open('/proc/self/status')];"
        "print(json.dumps([int(field[1]) for field in fields if field[0] == 'VmRSS:'][0]))"
    )
    for module in ("numpy", "kvshm", "kvshm.transfer"):
        yield Amount(f"memory after import {module}", _in_child(code.format(module)) / 1024, "MiB")
    layout = LAYOUTS[0]
    tokens = max(1, nbytes // (layout.token_nbytes * 256)) * 256
    workload = Workload(layout, tokens)
    for num_threads in (1, 2):
        calls = workload.calls(num_threads)
        for direction in ("gather", "scatter"):
            call = calls[direction]
            call()
            name = f"{direction} of {workload.nbytes / MIB:.0f} MiB, {num_threads} threads"
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            call()
            peak = tracemalloc.get_traced_memory()[1] - before
            tracemalloc.stop()
            yield Amount(f"{name}: memory beside it", peak / 1024, "KiB")
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            call()
            yield Amount(f"{name}: page faults", resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults, "faults")
