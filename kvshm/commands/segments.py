"""``kvshm ls`` and ``kvshm sweep``: the segments that exist, and the removal of those that no process uses."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import kvshm
from kvshm.shm.objects import object_path
from kvshm.units import format_nbytes

__all__ = ["add_ls_arguments", "add_sweep_arguments", "run_ls", "run_sweep"]


def add_ls_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvshm ls``."""
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run_ls(args: argparse.Namespace) -> int:
    """Print the segments. Always 0: that there are none is an answer."""
    rows = _segments()
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    print(f"{'NAME':<32} {'SIZE':>10} {'UID':>6} {'AGE':>8}  STATE")
    for row in rows:
        state = "in use" if row["in_use"] else "orphaned"
        print(f"{row['name']:<32} {format_nbytes(row['nbytes']):>10} {row['uid']:>6} {_age(row['age_s']):>8}  {state}")
    orphaned = [row for row in rows if not row["in_use"]]
    summary = f"{len(rows)} segments, {format_nbytes(sum(row['nbytes'] for row in rows))}"
    if orphaned:
        summary += f"; {len(orphaned)} orphaned, which kvshm sweep removes"
    print(summary)
    return 0


def _segments() -> list[dict[str, Any]]:
    rows = []
    for info in kvshm.list_segments():
        try:
            status = os.lstat(object_path(info.name))
        except FileNotFoundError:  # gone since it was listed
            continue
        rows.append(
            {
                "name": info.name,
                "nbytes": info.nbytes,
                "uid": status.st_uid,
                # Its size changes once, when it is made.
                "age_s": round(max(time.time() - status.st_mtime, 0.0), 1),
                "in_use": info.in_use,
            }
        )
    return rows


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvshm sweep``."""
    parser.add_argument("--json", action="store_true", help="print the names as JSON")


def run_sweep(args: argparse.Namespace) -> int:
    """Remove the orphans and print them: 0, or 1 if some could not be removed (they are another user's)."""
    removed = kvshm.sweep()
    left = [row for row in _segments() if not row["in_use"]]
    if args.json:
        print(json.dumps({"removed": removed, "left": [row["name"] for row in left]}, indent=2))
    else:
        for name in removed:
            print(f"removed {name}")
        for row in left:
            print(f"could not remove {row['name']}: it belongs to uid {row['uid']}; sweep as that user")
        print(f"{len(removed)} orphaned segments removed")
    return 1 if left else 0
