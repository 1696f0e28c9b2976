"""``kvshm bench``: how fast this machine moves blocks, and what everything else costs and how that grows.

``transfers`` measures gather and scatter beside a plain copy of the same bytes, ``costs`` all that is paid per segment,
layer, view or call, ``served`` a cache server and its client. ``results`` says what a measurement is, ``table`` prints
two runs side by side, ``plot`` draws one. This module knows the options.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from kvshm.bench import costs, served, transfers
from kvshm.bench.results import Run, load_run, machine
from kvshm.bench.table import describe
from kvshm.threads import default_num_threads
from kvshm.units import parse_nbytes

__all__ = ["add_arguments", "run"]

SECTIONS = ("transfers", "growth", "costs", "memory", "server")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvshm bench``."""
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="PART", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument(
        "--threads", nargs="+", type=_count, metavar="N", help="copy threads (default: 1 and as many as CPUs)"
    )
    parser.add_argument("--size", type=_size, metavar="BYTES", help="bytes that a transfer moves (default: 128MiB)")
    parser.add_argument("--repeat", type=_count, metavar="N", help="times that each is measured (default: 9)")
    parser.add_argument("--quick", action="store_true", help="small sizes, once: to see that it works, not how fast")
    parser.add_argument("--json", action="store_true", help="print the run as JSON")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="print an earlier run, as JSON, beside this one")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the run into an SVG file (kvshm[plot])")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _size(text: str) -> int:
    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Measure and print: 0, or 2 if a file or an optional package that was asked for is not there."""
    try:
        before = None if args.compare is None else load_run(args.compare)
    except (OSError, ValueError) as error:
        print(f"kvshm bench: --compare {args.compare}: {error}", file=sys.stderr)
        return 2
    if args.plot is not None:
        # Before minutes of measuring, not after.
        try:
            from kvshm.bench.plot import check_plot_file, draw  # noqa: PLC0415

            check_plot_file(args.plot)
        except ModuleNotFoundError as error:
            print(f"kvshm bench --plot needs {error.name}: pip install 'kvshm[plot]'", file=sys.stderr)
            return 2
        except (OSError, ValueError) as error:
            print(f"kvshm bench: --plot {args.plot}: {error}", file=sys.stderr)
            return 2
    parts = list(args.only or SECTIONS)
    if "server" in parts and not served.is_there():
        if args.only:
            print("kvshm bench --only server needs zmq: pip install 'kvshm[server]'", file=sys.stderr)
            return 2
        print("kvshm bench: server is skipped: pyzmq is not installed (kvshm[server])", file=sys.stderr)
        parts.remove("server")
    result = _measure(args, parts)
    print(json.dumps(result.to_json(), indent=2) if args.json else describe(result, before))
    if args.plot is not None:
        draw(result, args.plot)
    return 0


def _measure(args: argparse.Namespace, names: list[str]) -> Run:
    repeat = args.repeat or (1 if args.quick else 9)
    nbytes = args.size or (2**20 if args.quick else 128 * 2**20)
    threads = args.threads or sorted({1, default_num_threads(sys.maxsize)})
    parts: dict[str, Callable[[], Iterator[object]]] = {
        "transfers": lambda: transfers.measure_layouts(nbytes, threads, repeat),
        "growth": lambda: transfers.measure_growth(nbytes, max(threads), repeat),
        "costs": lambda: costs.measure_costs(quick=args.quick, repeat=repeat),
        "memory": lambda: costs.measure_memory(nbytes),
        "server": lambda: served.measure_server(quick=args.quick),
    }
    result = Run(machine=machine(), settings={"nbytes": nbytes, "threads": threads, "repeat": repeat})
    for name in names:
        if sys.stderr.isatty():
            print(f"measuring {name} ...", file=sys.stderr)
        for measurement in parts[name]():
            result.add(measurement)
    result.machine["load"] = [round(load, 2) for load in os.getloadavg()]
    return result
