"""``kvshm serve`` as a second process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from tests.support.processes import environment


class ServeProcess:
    """Runs ``kvshm serve`` until its context is left, which must end it cleanly and silently."""

    def __init__(self, *arguments: str, endpoint: str = "tcp://127.0.0.1:0") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "kvshm", "serve", "--json", "--endpoint", endpoint, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"kvshm serve did not start: {self.process.communicate()[1]}")
        where = json.loads(line)
        self.url: str = where["endpoint"]
        self.http_url: str | None = where["http_url"]

    @property
    def pid(self) -> int:
        return self.process.pid

    def segments(self) -> list[str]:
        """The segments of shared memory that the process has mapped; unlinked ones too."""
        lines = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
        return sorted(line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line)

    def private_nbytes(self) -> int:
        """Memory of the process beside shared memory."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        sizes = dict(line.split(":", 1) for line in lines)
        return sum(int(sizes[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.process.kill()
        self.process.communicate()

    def stop(self, number: int = signal.SIGTERM) -> str:
        """End it by a signal; it must end well. Gives what it wrote to stderr."""
        os.kill(self.pid, number)
        _, stderr = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, (self.process.returncode, stderr)
        return str(stderr)

    def __enter__(self) -> ServeProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.returncode is not None:
            return
        if kind is not None:
            self.kill()
        else:
            assert self.stop() == ""
