"""A run as a drawing: ratios to a plain copy, and how costs grow. Needs the extra ``kvshm[plot]``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from kvshm.bench.results import Run

__all__ = ["check_plot_file", "draw"]


def check_plot_file(path: Path) -> None:
    """Make sure that a drawing can be written there.

    Raises:
        OSError: It cannot.
        ValueError: The name does not end in ``.svg``.
    """
    if path.suffix.lower() != ".svg":
        raise ValueError("drawings are SVG files; let the name end in .svg")
    with path.open("a", encoding="utf-8"):
        pass


def draw(run: Run, path: Path) -> None:
    """Write the drawing."""
    with mpl.rc_context({"svg.hashsalt": "kvshm", "font.size": 9}):
        figure = Figure(figsize=(11, 8), layout="constrained")
        top, bottom = figure.subplots(2)
        _draw_ratios(top, run)
        _draw_growth(bottom, run)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _draw_ratios(axes: Any, run: Run) -> None:
    names = list(dict.fromkeys(row.layout for row in run.transfers))
    series = list(dict.fromkeys((row.direction, row.num_threads) for row in run.transfers))
    width = 0.8 / max(1, len(series))
    for index, (direction, num_threads) in enumerate(series):
        rows = [row for row in run.transfers if (row.direction, row.num_threads) == (direction, num_threads)]
        axes.bar(
            [names.index(row.layout) + (index - (len(series) - 1) / 2) * width for row in rows],
            [row.ratio for row in rows],
            width,
            yerr=[
                [max(0.0, row.ratio - row.spread[0]) for row in rows],
                [max(0.0, row.spread[1] - row.ratio) for row in rows],
            ],
            label=f"{direction}, {num_threads} thread{'s' if num_threads > 1 else ''}",
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("speed beside np.copyto of the same bytes")
    if series:
        axes.legend(ncols=len(series), fontsize="small")


def _draw_growth(axes: Any, run: Run) -> None:
    for costs in run.series():
        if len({cost.size for cost in costs}) > 1:
            label = f"{costs[0].name} ({costs[0].unit})" if costs[0].unit else costs[0].name
            axes.plot([cost.size for cost in costs], [cost.seconds for cost in costs], marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("size")
    axes.set_ylabel("seconds")
    axes.grid(visible=True, which="major", linewidth=0.3)
    if axes.lines:
        axes.legend(fontsize="x-small", ncols=2)
