"""Second processes for tests: real ones, which meet on pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]

_LOOP = """
import json, sys
scope = {"__name__": "peer"}
for line in sys.stdin:
    kind, code = json.loads(line)
    try:
        reply = ["value", eval(code, scope) if kind == "eval" else exec(code, scope)]
    except Exception as error:
        reply = ["error", type(error).__name__, str(error)]
    print(json.dumps(reply), flush=True)
"""


def python_command(code: str, *arguments: str) -> list[str]:
    """The command that runs ``code`` in this interpreter with warnings as errors."""
    return [sys.executable, "-W", "error", "-c", code, *arguments]


def environment(**changes: str) -> dict[str, str]:
    """The environment in which a child finds the package under test."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **changes}


def run_python(code: str, *arguments: str, returncode: int = 0, prefix: tuple[str, ...] = ()) -> str:
    """Run ``code`` to its end and give what it printed; it must not complain and must end as expected."""
    done = subprocess.run(
        [*prefix, *python_command(code, *arguments)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (returncode, ""), done
    return done.stdout


def run_script(script: Path, *arguments: str) -> str:
    """Run a file, which spawned children can import again, and give what it printed; it must not complain."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), *arguments],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


class PeerError(Exception):
    """What a peer raised: ``kind`` is the exception's class name."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Peer:
    """A Python process that does what it is told, one thing at a time, until its context is left.

    Leaving it ends the process normally, which must succeed and print nothing.
    """

    def __init__(self, *prefix: str) -> None:
        self.process = subprocess.Popen(
            [*prefix, *python_command(_LOOP)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self, kind: str, code: str) -> None:
        """Tell it to "eval" or "exec" something, and do not wait for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([kind, code]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Wait for the answer to what was started."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            _, stderr = self.process.communicate(timeout=60)
            raise AssertionError(f"peer ended with {self.process.returncode}: {stderr}")
        kind, *rest = json.loads(line)
        if kind == "error":
            raise PeerError(*rest)
        return rest[0]

    def run(self, code: str) -> None:
        """Execute statements over there."""
        self.start("exec", code)
        self.answer()

    def get(self, expression: str) -> Any:
        """The value of an expression over there, by way of JSON."""
        self.start("eval", expression)
        return self.answer()

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.process.kill()
        self.process.communicate(timeout=60)

    def close(self) -> None:
        """End it normally; it must not complain."""
        if self.process.returncode is None:
            _, stderr = self.process.communicate(timeout=60)
            returncode: int | None = self.process.returncode
            assert (returncode, stderr) == (0, "")

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()
