"""The process that runs the demo: it starts the others, follows them, and sees to it that none is left.

Every child holds one end of a conversation that this process began, and ends when that ends, so whatever ends this
process ends them. Between two waits nothing interrupts it: SIGINT and SIGTERM take effect only where it waits, so no
child is started without being known and no clean-up is cut short.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from types import FrameType
from typing import Any

import kvshm
from kvshm.demo.channel import Channel, Message
from kvshm.demo.engine import Job, Outcome
from kvshm.demo.paged_cache import BLOCK_SIZE

__all__ = ["DemoError", "Follow", "Interrupted", "Plan", "run_engines"]

Follow = Callable[[int, Message], None]  # called with the engine's number, from 0, and each step that it tells

_NUM_ENGINES = 2
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
    chunk_size: int  # tokens; of the cache process, a server has its own
    token_nbytes: int  # of K and V in all layers
    server: str = ""  # URL of a cache server to use in the place of a cache process
    cache_module: str = "kvshm.demo.cache"  # what runs as cache process

    @property
    def num_blocks(self) -> int:
        """Blocks of an engine: what the request needs, a quarter more to be scattered among, and the null block."""
        needed = -(-(len(self.prompt) + self.num_generate) // BLOCK_SIZE)
        return needed + needed // 4 + 2


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
    """A process that this one started. Owns it: leaving the context waits for its end, and ends it if need be."""

    def __init__(self, module: str, arguments: Sequence[object], ends: Sequence[socket.socket]) -> None:
        environment = dict(os.environ)
        # The child imports what this process would, from wherever that was found.
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        # One thread: a product's last bits may depend on how many share it, and where other processes keep the
        # cores busy, BLAS threads that wait for one another are slower than one.
        environment |= dict.fromkeys(_BLAS_THREADS, "1")
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments), *(str(end.fileno()) for end in ends)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[end.fileno() for end in ends],
            env=environment,
            start_new_session=True,  # the terminal's Ctrl-C reaches this process only
        )
        for end in ends:
            end.close()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        for stop in (self.process.terminate, self.process.kill):
            try:
                self.process.wait(_GRACE_S)
                return
            except subprocess.TimeoutExpired:
                stop()
        self.process.wait()
        kvshm.sweep()  # a killed process leaves its segment


def run_engines(plan: Plan, follow: Follow) -> list[Outcome]:
    """Run the two engines, one after the other, with one cache between them; gives what each has done.

    Raises:
        DemoError: A process failed; the text says which, and why.
        Interrupted: SIGINT or SIGTERM came. As in every other case, no process and no segment is left.
    """
    run_id = secrets.token_hex(8)
    outcomes = []
    with _Signals() as signals, ExitStack() as stack:
        cache_ends: list[socket.socket] = []
        if not plan.server:
            ours, theirs = zip(*(socket.socketpair() for _ in range(_NUM_ENGINES)), strict=True)
            capacity = len(plan.prompt) // plan.chunk_size * plan.chunk_size * plan.token_nbytes
            cache = stack.enter_context(_Child(plan.cache_module, (plan.chunk_size, capacity), theirs))
            # Entered after the child, so closed before its end is waited for.
            cache_ends = [stack.enter_context(end) for end in ours]
        for number in range(_NUM_ENGINES):
            job = Job(
                prompt=plan.prompt,
                num_generate=plan.num_generate,
                num_blocks=plan.num_blocks,
                block_seed=number + 1,
                token_nbytes=plan.token_nbytes,
                segment_name=f"{kvshm.Segment.SHM_NAME_PREFIX}demo_{run_id}_{number + 1}",
                # A name of this run's: the second engine shall find what the first one stored, and nothing older.
                model_name=f"kvshm-demo-{run_id}",
                server=plan.server,
            )
            ends = cache_ends[number : number + 1]
            try:
                outcomes.append(_run_engine(job, ends, signals, partial(follow, number)))
            except DemoError as error:
                raise DemoError(f"engine {number + 1} {error}") from None
    if not plan.server and cache.process.returncode:
        raise DemoError(f"the cache process ended with exit status {cache.process.returncode}")
    return outcomes


def _run_engine(
    job: Job, cache_ends: Sequence[socket.socket], signals: _Signals, follow: Callable[[Message], None]
) -> Outcome:
    ours, theirs = socket.socketpair()
    outcome: Outcome | None = None
    with (
        _Child("kvshm.demo.engine", (), (theirs, *cache_ends)) as child,
        closing(Channel(ours)) as channel,
        suppress(ConnectionError),  # of a process that ends early, the exit status tells more
    ):
        with signals.heard():
            channel.send(asdict(job))
        while outcome is None:
            with signals.heard():
                message = channel.receive()
            if message["step"] == "failed":
                raise DemoError(f"gave up: {message['error']}")
            if message["step"] == "done":
                outcome = Outcome(**message["outcome"])
            follow(message)
    if outcome is None or child.process.returncode:
        raise DemoError(f"ended with exit status {child.process.returncode}")
    return outcome
