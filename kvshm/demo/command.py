"""``kvshm demo``: two engines, one cache server, one prompt, the same answer."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import resources
from pathlib import Path
from typing import TextIO

from kvshm.demo.channel import Message
from kvshm.demo.paged_cache import BLOCK_SIZE

__all__ = ["add_arguments", "run"]

_MAX_PROMPT = 32_768  # tokens; the attention's work grows with the square: this many take some twenty times the default
_BAR_WIDTH = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvshm demo``."""
    parser.add_argument(
        "--prompt",
        metavar="FILE",
        type=Path,
        help="a text file; each of its bytes is a token (default: a text about memory)",
    )
    parser.add_argument("--tokens", type=_positive, default=64, metavar="N", help="tokens to generate (default: 64)")
    cache = parser.add_mutually_exclusive_group()  # a server has its own chunk size
    cache.add_argument(
        "--chunk-size", type=_positive, default=256, metavar="N", help="tokens in a chunk (default: 256)"
    )
    cache.add_argument(
        "--server",
        default="",
        metavar="URL",
        help="use this cache server, kvshm's or LMCache's, instead of starting one",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def run(args: argparse.Namespace) -> int:
    """Run the demo: 0 if both engines wrote the same and nothing is left, else 1; 2 if it was called wrongly."""
    # Here, since this needs pyzmq, and --help does not.
    from kvshm.demo.model import ModelConfig  # noqa: PLC0415
    from kvshm.demo.report import describe, kernel_group, make_report, problems  # noqa: PLC0415
    from kvshm.demo.run import DemoError, Interrupted, Plan, run_engines, segments_left  # noqa: PLC0415

    try:
        name, prompt = _read_prompt(args.prompt)
        if args.chunk_size % BLOCK_SIZE:
            raise ValueError(f"--chunk-size {args.chunk_size} is no multiple of the {BLOCK_SIZE} tokens of a block")
    except (OSError, ValueError) as error:
        print(f"kvshm demo: {error}", file=sys.stderr)
        return 2
    try:
        chunk_size = _server_chunk_size(args.server) if args.server else args.chunk_size
    except (OSError, ValueError, RuntimeError) as error:
        print(f"kvshm demo: {error}", file=sys.stderr)
        return 1
    layout = kernel_group(ModelConfig(), 1, chunk_size)
    plan = Plan(prompt, args.tokens, chunk_size, token_nbytes=layout.region_nbytes(1), server=args.server)
    bar = _Bar(_terminal(args.json))
    try:
        outcomes = run_engines(plan, bar.follow)
    except DemoError as error:
        bar.clear()
        print(f"kvshm demo: {error}", file=sys.stderr)
        return 1
    except Interrupted as interrupted:
        bar.clear()
        print(f"kvshm demo: {interrupted}; nothing is left", file=sys.stderr)
        return 128 + interrupted.signum
    bar.clear()
    report = make_report(
        outcomes,
        prompt_name=name,
        num_prompt=len(prompt),
        chunk_size=chunk_size,
        group=kernel_group(ModelConfig(), plan.num_blocks, chunk_size),
        left=segments_left(plan),
    )
    print(json.dumps(report, indent=2) if args.json else describe(report))
    failures = problems(report)
    for failure in failures:
        print(f"kvshm demo: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _read_prompt(path: Path | None) -> tuple[str, bytes]:
    """The name and the bytes of the prompt.

    Raises:
        OSError: It cannot be read.
        ValueError: It has no bytes, or too many.
    """
    if path is None:
        name, prompt = "prompt.txt (built in)", resources.files("kvshm.demo").joinpath("prompt.txt").read_bytes()
    else:
        name, prompt = str(path), path.read_bytes()
    if not 1 <= len(prompt) <= _MAX_PROMPT:
        raise ValueError(f"{name} has {len(prompt)} bytes; a prompt has 1 to {_MAX_PROMPT}, each is a token")
    return name, prompt


def _server_chunk_size(url: str) -> int:
    """Tokens of a server's chunks.

    Raises:
        OSError, RuntimeError: The server is not there, or does not tell.
        ValueError: The url is none, or blocks do not fit into the chunks.
    """
    from kvshm.demo.engine import connect  # noqa: PLC0415

    with connect(url) as client:
        chunk_size = client.get_chunk_size()
    if chunk_size % BLOCK_SIZE:
        raise ValueError(f"{url} has chunks of {chunk_size} tokens, no multiple of the {BLOCK_SIZE} tokens of a block")
    return chunk_size


def _terminal(as_json: bool) -> TextIO | None:
    """Where a progress bar can be drawn: not where the report goes, if that is read by a program."""
    streams = [sys.stderr] if as_json else [sys.stderr, sys.stdout]
    return next((stream for stream in streams if stream.isatty()), None)


class _Bar:
    """One line of a terminal that shows how far the engines are."""

    def __init__(self, terminal: TextIO | None) -> None:
        self._terminal = terminal

    def follow(self, number: int, message: Message) -> None:
        """Draw the bar anew after a step of engine ``number``."""
        if self._terminal is None or "total" not in message:
            return
        done, total = message["done"], message["total"]
        filled = _BAR_WIDTH * done // total
        text = f"engine {number + 1} {message['step']:<8} [{'#' * filled:<{_BAR_WIDTH}}] {done:,}/{total:,} tokens"
        self._draw(text)

    def clear(self) -> None:
        """Leave the line empty."""
        if self._terminal is not None:
            self._draw("")

    def _draw(self, text: str) -> None:
        assert self._terminal is not None
        self._terminal.write(f"\r\x1b[K{text}")  # back to the line's begin, and the rest of the line cleared
        self._terminal.flush()
