"""What a run of the benchmark measured, as plain data, and how it is timed."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvshm._version import __version__

__all__ = ["Amount", "Cost", "Run", "Transfer", "interleaved", "load_run", "machine", "timed"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Gather or scatter beside plain copies of the same bytes, with as many threads. Medians; seconds."""

    layout: str
    shape: str
    direction: str
    num_threads: int
    nbytes: int
    seconds: float
    copyto_seconds: float
    ratio: float  # median of the copy's time over the transfer's, round by round
    spread: tuple[float, float]  # first and third quartile of that

    @property
    def key(self) -> tuple[object, ...]:
        """What two runs are compared by."""
        return (self.layout, self.direction, self.num_threads)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one size of something costs. Costs of one name are a series: they show how it grows."""

    name: str
    size: int
    unit: str  # what the size counts; "" where nothing is counted
    seconds: float  # median

    @property
    def key(self) -> tuple[object, ...]:
        """What two runs are compared by."""
        return (self.name, self.size)


@dataclass(frozen=True, slots=True)
class Amount:
    """A number that is no time."""

    name: str
    value: float
    unit: str

    @property
    def key(self) -> tuple[object, ...]:
        """What two runs are compared by."""
        return (self.name,)


@dataclass(slots=True)
class Run:
    """All that one call of ``kvshm bench`` measured, and where."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    transfers: list[Transfer] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    amounts: list[Amount] = field(default_factory=list)

    def add(self, measurement: object) -> None:
        """Append a measurement to those of its kind."""
        if isinstance(measurement, Transfer):
            self.transfers.append(measurement)
        elif isinstance(measurement, Cost):
            self.costs.append(measurement)
        else:
            assert isinstance(measurement, Amount)
            self.amounts.append(measurement)

    def series(self) -> list[list[Cost]]:
        """Costs of one name together."""
        named: dict[str, list[Cost]] = {}
        for cost in self.costs:
            named.setdefault(cost.name, []).append(cost)
        return list(named.values())

    def to_json(self) -> dict[str, Any]:
        """Plain data, as :func:`load_run` reads it."""
        return asdict(self)


def load_run(path: Path) -> Run:
    """A run that was printed with ``--json``.

    Raises:
        OSError: The file cannot be read.
        ValueError: It holds no run.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Run(
            machine=dict(data["machine"]),
            settings=dict(data["settings"]),
            transfers=[Transfer(**{**row, "spread": tuple(row["spread"])}) for row in data["transfers"]],
            costs=[Cost(**row) for row in data["costs"]],
            amounts=[Amount(**row) for row in data["amounts"]],
        )
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"no run of kvshm bench --json ({type(error).__name__}: {error})") from None


def machine() -> dict[str, Any]:
    """Where a run was made: versions, processor, how many CPUs may be used."""
    return {
        "kvshm": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.release()}",
        "libc": " ".join(platform.libc_ver()),
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def interleaved(calls: Mapping[str, Callable[[], object]], repeat: int) -> dict[str, list[float]]:
    """Seconds of each call, ``repeat`` times, in turns: what disturbs the machine disturbs all of them.

    The first round is not counted: it touches pages for the first time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeat + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: times[1:] for name, times in seconds.items()}


def timed(call: Callable[[], object], repeat: int, at_least_s: float = 0.002) -> float:
    """Median seconds of one call; calls that are over quickly are timed many at once."""
    number = 1
    while True:
        start = time.perf_counter()
        for _ in range(number):
            call()
        passed = time.perf_counter() - start
        if passed >= at_least_s:
            break
        number = max(2 * number, int(number * at_least_s / max(passed, 1e-9)))
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        for _ in range(number):
            call()
        times.append((time.perf_counter() - start) / number)
    return statistics.median(times)
