"""The processes that the tests bring together: LMCache servers, ``kvshm serve``, a peer in LMCache's Python, Redis.

Every one listens on loopback only, is waited for with a deadline, is ended by its process id, and writes what it says
to a log whose end a failure shows.
"""

from __future__ import annotations

import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.support.processes import environment

START_TIMEOUT_S = 120.0  # the first start compiles what it imports
END_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 60.0
SHM = Path("/dev/shm")
POOL_NBYTES_GB = 0.25

# What the tests start ends with them, also where they are ended by a signal and clean up nothing.
_PR_SET_PDEATHSIG = 1
_DIE_WITH_PARENT = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGTERM)})
os.execvp(sys.argv[1], sys.argv[1:])
"""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_LMCACHE_ENVIRONMENT = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    # What it runs besides itself, such as transformers, must not look for a network.
    "HF_HUB_OFFLINE": "1",
}


class ProcessError(AssertionError):
    """A process did not start, ended early, or did not answer in time; the text ends with its log."""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on, below those that the system gives to connections.

    A server takes seconds until it binds the port that it was told, and meanwhile a port from the system's own range
    can become some connection's.
    """
    while True:
        port = random.randrange(15_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def log_tail(log: Path) -> str:
    """The last lines of a log, without colours."""
    return "\n".join(_ANSI.sub("", log.read_text(errors="replace")).splitlines()[-40:])


def read_line(stream: IO[bytes], timeout_s: float) -> bytes:
    """The next line of a process that writes one at a time; empty where it has ended or the time is over."""
    return stream.readline() if select.select([stream], [], [], timeout_s)[0] else b""


def end(process: subprocess.Popen[bytes]) -> int:
    """End a process that was started here, and its children if it does not end by itself."""
    if process.poll() is None:
        process.terminate()
    try:
        return process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # not waited for yet, so the group is still its own
        return process.wait(END_TIMEOUT_S)


def remove_segments(*patterns: str) -> list[str]:
    """Unlink what ended processes of LMCache have left; the names."""
    left = [path for pattern in patterns for path in SHM.glob(pattern)]
    for path in left:
        path.unlink(missing_ok=True)
    return [path.name for path in left]


@contextmanager
def running(
    command: Sequence[str], log: Path, env: dict[str, str], *, pipes: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, ended when the context is left. ``pipes``: standard input and output are."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", _DIE_WITH_PARENT, *command],
            stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipes else out,
            stderr=out,
            env=env,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.stdin is not None:
            process.stdin.close()
        end(process)
        if process.stdout is not None:
            process.stdout.close()


@dataclass(frozen=True, slots=True)
class Server:
    """A server of either kind."""

    url: str
    http_url: str
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def ports(self) -> tuple[int, int]:
        """Of the protocol and of HTTP."""
        return int(self.url.rpartition(":")[2]), int(self.http_url.rpartition(":")[2])

    def kill(self) -> None:
        """End it and its children by SIGKILL."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(END_TIMEOUT_S)

    def status(self) -> dict[str, Any]:
        """What it tells at /status."""
        with urllib.request.urlopen(f"{self.http_url}/status", timeout=10) as response:
            return dict(json.load(response))


@dataclass(frozen=True, slots=True)
class LMCache:
    """An environment with a real LMCache, and where its processes may write."""

    python: str
    scratch: Path

    def command(self, *arguments: str) -> list[str]:
        """The command that runs ``lmcache``, whatever the name of its script."""
        code = "import sys; from lmcache.cli.main import main; sys.argv[0] = 'lmcache'; sys.exit(main())"
        return [self.python, "-c", code, *arguments]

    @property
    def env(self) -> dict[str, str]:
        """The environment of its processes: without kvshm in their path, or settings of LMCache from elsewhere."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("LMCACHE_", "PYTHON"))}
        return kept | _LMCACHE_ENVIRONMENT

    def log(self, name: str) -> Path:
        """A new log."""
        return self.scratch / f"{name}-{os.urandom(4).hex()}.log"

    @contextmanager
    def server(
        self, *flags: str, pool_name: str | None = None, ports: tuple[int, int] | None = None
    ) -> Iterator[Server]:
        """A real server; with ``pool_name`` its engine-driven mode uses shared memory, else pickle."""
        with self._starting_server(*flags, pool_name=pool_name, ports=ports) as server:
            _wait_until_healthy(server)
            yield server

    @contextmanager
    def two_servers(self, *flags: str) -> Iterator[tuple[Server, Server]]:
        """Two real servers that start side by side: most of the time goes into their imports."""
        with self._starting_server(*flags) as one, self._starting_server(*flags) as other:
            _wait_until_healthy(one)
            _wait_until_healthy(other)
            yield one, other

    @contextmanager
    def _starting_server(
        self, *flags: str, pool_name: str | None = None, ports: tuple[int, int] | None = None
    ) -> Iterator[Server]:
        port, http_port = ports or (free_port(), free_port())
        arguments = [
            *("server", "--host", "127.0.0.1", "--port", str(port)),
            *("--http-host", "127.0.0.1", "--http-port", str(http_port)),
            *("--l1-size-gb", str(POOL_NBYTES_GB), "--eviction-policy", "LRU", "--max-workers", "1"),
            *("--supported-transfer-mode", "auto", "--chunk-size", "256", "--disable-observability"),
            *(() if pool_name is None else ("--shm-name", pool_name)),
            *flags,
        ]
        log = self.log("lmcache-server")
        try:
            with running(self.command(*arguments), log, self.env) as process:
                yield Server(f"tcp://127.0.0.1:{port}", f"http://127.0.0.1:{http_port}", log, process)
        finally:
            if pool_name is not None:
                remove_segments(f"lmcache_l1_pool_{pool_name}")

    def bench(self, server: Server, mode: str, *flags: str, num_sequences: int, interval_s: float = 0.0) -> BenchResult:
        """``lmcache bench server --mode cpu``: store, look up and retrieve sequences, and compare checksums."""
        report, log = self.log("bench").with_suffix(".json"), self.log("bench")
        arguments = [
            *("bench", "server", "--mode", "cpu", "--transfer-mode", mode),
            *("--rpc-url", server.url, "--url", server.http_url),
            *("--start", "0", "--end", str(num_sequences), "--interval", str(interval_s)),
            *("--format", "json", "--output", str(report)),
            *flags,
        ]
        with running(self.command(*arguments), log, self.env) as process:
            try:
                returncode = process.wait(CALL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise ProcessError(f"the bench did not end within {CALL_TIMEOUT_S} s\n{log_tail(log)}") from None
        left = remove_segments(f"lmcache_kv_{process.pid}_*")
        text = _ANSI.sub("", log.read_text(errors="replace"))
        metrics = json.loads(report.read_text())["metrics"] if report.exists() else {}
        return BenchResult(returncode, metrics, text, left)

    @contextmanager
    def peer(self) -> Iterator[LMCachePeer]:
        """A process that does with LMCache's classes what it is told."""
        log = self.log("peer")
        script = str(Path(__file__).with_name("lmcache_peer.py"))
        with running([self.python, script], log, self.env, pipes=True) as process:
            try:
                yield LMCachePeer(process, log)
                assert process.stdin is not None
                process.stdin.close()
                assert process.wait(END_TIMEOUT_S) == 0, log_tail(log)
            finally:
                end(process)
                remove_segments(f"lmcache_kv_{process.pid}_*")


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What the bench said. It exits with 0 also where checks have failed, so nobody should go by that alone."""

    returncode: int
    metrics: dict[str, Any]
    text: str
    segments_left: list[str] = field(default_factory=list)


class LMCachePeer:
    """Calls methods of :class:`tests.interop.lmcache_peer.Peer` in its process."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    def call(self, method: str, **arguments: Any) -> Any:
        """What the method returns.

        Raises:
            ProcessError: It raised, or did not answer.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([method, arguments]).encode() + b"\n")
        self.process.stdin.flush()
        line = read_line(self.process.stdout, CALL_TIMEOUT_S)
        if not line:
            raise ProcessError(f"{method}: no answer (return code {self.process.poll()})\n{log_tail(self.log)}")
        kind, *rest = json.loads(line)
        if kind == "error":
            raise ProcessError(f"{method}: {': '.join(rest)}\n{log_tail(self.log)}")
        return rest[0]


@contextmanager
def kvshm_server(log: Path, *flags: str) -> Iterator[Server]:
    """``kvshm serve`` in this Python, told to end by SIGTERM, which it must do well."""
    command = [sys.executable, "-m", "kvshm", "serve", "--port", "0", "--http-port", "0", "--json", "--verbose", *flags]
    with running(command, log, environment(), pipes=True) as process:
        assert process.stdout is not None
        line = read_line(process.stdout, START_TIMEOUT_S)
        if not line:
            raise ProcessError(f"kvshm serve: no answer (return code {process.poll()})\n{log_tail(log)}")
        where = json.loads(line)
        yield Server(where["endpoint"], where["http_url"], log, process)
        assert end(process) == 0, log_tail(log)


@contextmanager
def redis_server(executable: str, log: Path) -> Iterator[int]:
    """A Redis that keeps everything in memory; its port."""
    port = free_port()
    command = [executable, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    with running(command, log, dict(os.environ)) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                if connection.recv(16).startswith(b"+PONG"):
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise ProcessError(f"redis-server did not start\n{log_tail(log)}")
            time.sleep(0.05)
        yield port


def _wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with suppress(OSError), urllib.request.urlopen(f"{server.http_url}/healthcheck", timeout=5):
            return
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise ProcessError(f"the LMCache server did not start\n{log_tail(server.log)}")
        time.sleep(0.1)
