"""The command line: which commands there are. Each command's code is imported when it is called, not before.

A command is a module with ``add_arguments(parser)`` and ``run(args)``, which returns the exit code: 0 when what was
asked for was done, 1 when it was not, 2 when it was asked wrongly or an optional part is not installed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvshm._version import __version__

__all__ = ["main"]


@dataclass(frozen=True, slots=True)
class _Command:
    """Where a command's code is."""

    name: str
    help: str
    module: str
    add_arguments: str = "add_arguments"
    run: str = "run"

    def function(self, name: str) -> Callable[[Any], Any]:
        """One of the command's functions."""
        function: Callable[[Any], Any] = getattr(import_module(self.module), name)
        return function


_EXTRAS = {"zmq": "server", "matplotlib": "plot"}  # package -> the extra that brings it

_COMMANDS = (
    _Command("demo", "two engines share one prompt's KV cache through a third process", "kvshm.demo.command"),
    _Command("bench", "measure moving blocks, mapping segments and the server", "kvshm.bench"),
    _Command("serve", "run the cache server", "kvshm.commands.server", "add_serve_arguments", "run_serve"),
    _Command(
        "status", "ask a running cache server how it is", "kvshm.commands.server", "add_status_arguments", "run_status"
    ),
    _Command("layout", "the sizes of a cache of a given shape, without allocating it", "kvshm.commands.layout"),
    _Command("ls", "list the shared segments", "kvshm.commands.segments", "add_ls_arguments", "run_ls"),
    _Command(
        "sweep", "remove segments that no process uses", "kvshm.commands.segments", "add_sweep_arguments", "run_sweep"
    ),
    _Command("doctor", "check whether this machine is fit for shared caches", "kvshm.commands.doctor"),
)


class _CommandParser(argparse.ArgumentParser):
    """Learns a command's options when that command is parsed."""

    command: _Command | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Import the command's code and parse."""
        if self.command is not None:
            command, self.command = self.command, None
            command.function(command.add_arguments)(self)
            self.set_defaults(command=command)
        return super().parse_known_args(args, namespace)


def _parser() -> argparse.ArgumentParser:
    parser = _CommandParser(prog="kvshm", description="Paged KV caches of LLM engines, shared between processes.")
    parser.add_argument("--version", action="version", version=f"kvshm {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        commands.add_parser(command.name, help=command.help, description=_sentence(command.help)).command = command
    return parser


def _sentence(help_text: str) -> str:
    return f"{help_text[0].upper()}{help_text[1:]}."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        args = _parser().parse_args(argv)
        command: _Command = args.command
        code = int(command.function(command.run)(args))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(error.name or "")
        if extra is None:
            raise
        print(f"kvshm: {error.name} is not installed, which this needs: pip install 'kvshm[{extra}]'", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read the output has what it wanted (kvshm ls | head). Nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
