"""The process that runs the demo: it starts the others, follows them, and sees to it that none is left.

The stdin and stdout of every child are a conversation with this process. A child ends when that ends, so whatever ends
this process ends them. Between two waits nothing interrupts it: SIGINT and SIGTERM take effect only where it waits, so
no child is started without being known and no clean-up is cut short. No wait is without end.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import kvshm
from kvshm.demo.channel import Channel, Message
from kvshm.demo.engine import Job, Outcome
from kvshm.demo.paged_cache import BLOCK_SIZE

__all__ = ["DemoError", "Follow", "Interrupted", "Plan", "run_engines", "segments_left"]

Follow = Callable[[int, Message], None]  # called with the engine's number, from 0, and each step that it tells

_NUM_ENGINES = 2
_START_S = 60.0  # for the server to start, which takes a fraction of a second
_GRACE_S = 10.0  # for a child to end by itself; its steps take a fraction of a second
_BLAS_THREADS = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


class DemoError(RuntimeError):
    """A process of the demo failed."""


class Interrupted(BaseException):  # as KeyboardInterrupt, not an Exception: nobody but the command line handles it
    """SIGINT or SIGTERM came."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@dataclass(frozen=True, slots=True)
class Plan:
    """What the demo shall do."""

    prompt: bytes
    num_generate: int
    chunk_size: int  # tokens
    token_nbytes: int  # of K and V in all layers
    server: str = ""  # URL of a cache server; empty: one is started
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def num_blocks(self) -> int:
        """Blocks of an engine: what the request needs, a quarter more to be scattered among, and the null block."""
        needed = -(-(len(self.prompt) + self.num_generate) // BLOCK_SIZE)
        return needed + needed // 4 + 2

    @property
    def capacity(self) -> int:
        """Bytes that the prompt's chunks take in the cache; those of one at least, since no server has none."""
        return max(len(self.prompt) // self.chunk_size, 1) * self.chunk_size * self.token_nbytes

    @property
    def segment_prefix(self) -> str:
        """What the names of all segments of this run begin with."""
        return f"{kvshm.Segment.SHM_NAME_PREFIX}demo_{self.run_id}_"

    @property
    def silence_s(self) -> float:
        """How long an engine may be silent. A step's attention grows with the chunk and with what is before it."""
        return 60.0 + 5e-6 * len(self.prompt) * min(self.chunk_size, len(self.prompt))


class _Signals:
    """SIGINT and SIGTERM, noted when they come and raised as :class:`Interrupted` only while :meth:`heard`."""

    def __init__(self) -> None:
        self._came = 0
        self._hearing = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        if self._came and kind is None:
            raise Interrupted(self._came)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._came = signum
        if self._hearing:
            self._hearing = False  # once: what follows is clean-up
            raise Interrupted(signum)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Within, a signal that has come or comes is raised."""
        self._hearing = True
        try:
            if self._came:
                raise Interrupted(self._came)
            yield
        finally:
            self._hearing = False


class _Child:
    """A process that this one started, and the conversation with it.

    Owns both: leaving the context ends the conversation, waits for the process to end, and ends it if need be.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        environment = dict(os.environ)
        # The child imports what this process would, from wherever that was found.
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        # One thread: a product's last bits may depend on how many share it, and where other processes keep the
        # cores busy, BLAS threads that wait for one another are slower than one.
        environment |= dict.fromkeys(_BLAS_THREADS, "1")
        self.end, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                env=environment,
                start_new_session=True,  # the terminal's Ctrl-C reaches this process only
            )

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end.close()
        for stop in (self.process.terminate, self.process.kill):
            try:
                self.process.wait(_GRACE_S)
                return
            except subprocess.TimeoutExpired:
                stop()
        self.process.wait()


def run_engines(plan: Plan, follow: Follow) -> list[Outcome]:
    """Run the two engines, one after the other, with one cache server for both; gives what each has done.

    Raises:
        DemoError: A process failed; the text says which, and why.
        Interrupted: SIGINT or SIGTERM came. As in every other case, no process and no segment is left.
    """
    try:
        return _run_engines(plan, follow)
    except BaseException:
        # What a killed process has left. Not by a sweep: a server that is none of ours may have it mapped still.
        for name in segments_left(plan):
            kvshm.posix_shm.shm_unlink(name)
        raise


def segments_left(plan: Plan) -> list[str]:
    """Names of segments of this run that exist."""
    return [segment.name for segment in kvshm.list_segments() if segment.name.startswith(plan.segment_prefix)]


def _run_engines(plan: Plan, follow: Follow) -> list[Outcome]:
    outcomes = []
    url, server = plan.server, None
    with _Signals() as signals, ExitStack() as stack:
        if not url:
            server = stack.enter_context(_server(plan))
            url = _endpoint(server, signals)
        for number in range(_NUM_ENGINES):
            job = Job(
                prompt=plan.prompt,
                num_generate=plan.num_generate,
                num_blocks=plan.num_blocks,
                block_seed=number + 1,
                token_nbytes=plan.token_nbytes,
                segment_name=f"{plan.segment_prefix}{number + 1}",
                # A name of this run's: the second engine shall find what the first one stored, and nothing older.
                model_name=f"kvshm-demo-{plan.run_id}",
                server=url,
            )
            try:
                outcomes.append(_run_engine(job, plan.silence_s, signals, partial(follow, number)))
            except DemoError as error:
                raise DemoError(f"engine {number + 1} {error}") from None
    if server is not None and server.process.returncode:
        raise DemoError(f"the cache server ended with exit status {server.process.returncode}")
    return outcomes


def _server(plan: Plan) -> _Child:
    """A cache server with room for the prompt."""
    options = {
        "--port": "0",
        "--capacity": str(plan.capacity),
        "--chunk-size": str(plan.chunk_size),
        "--shm-name": f"{plan.segment_prefix}pool",
    }
    arguments = [text for option in options.items() for text in option]
    return _Child("kvshm", "serve", "--json", "--until-stdin-closes", *arguments)


def _endpoint(server: _Child, signals: _Signals) -> str:
    """Where the server listens, once it does."""
    server.end.settimeout(_START_S)
    try:
        with signals.heard(), server.end.makefile("rb") as lines:
            line = lines.readline()
    except TimeoutError:
        raise DemoError(f"the cache server did not start within {_START_S:.0f} s") from None
    if not line:
        raise DemoError("the cache server did not start")  # and said why on stderr
    return str(json.loads(line)["endpoint"])


def _run_engine(job: Job, silence_s: float, signals: _Signals, follow: Callable[[Message], None]) -> Outcome:
    outcome: Outcome | None = None
    with (
        _Child("kvshm.demo.engine") as child,
        suppress(ConnectionError),  # of a process that ends early, the exit status tells more
    ):
        child.end.settimeout(silence_s)
        channel = Channel(child.end)
        with signals.heard():
            channel.send(asdict(job))
        while outcome is None:
            try:
                with signals.heard():
                    message = channel.receive()
            except TimeoutError:
                raise DemoError(f"gave no sign of life for {silence_s:.0f} s") from None
            if message["step"] == "failed":
                raise DemoError(f"gave up: {message['error']}")
            if message["step"] == "done":
                outcome = Outcome(**message["outcome"])
            follow(message)
    if outcome is None or child.process.returncode:
        raise DemoError(f"ended with exit status {child.process.returncode}")
    return outcome
