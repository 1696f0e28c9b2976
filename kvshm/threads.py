"""A few threads that copy side by side. NumPy releases the interpreter's lock while it copies.

The threads are shared by all transfers of a process and start with the first that needs them. The calling thread
always works too, so a transfer never waits for helpers that are busy elsewhere.

Environment:
    KVSHM_THREADS: Threads of one transfer, the calling one included; the CPUs that the process may use, if not set.
    KVSHM_THREADS_MIN_NBYTES: Bytes that there must be for each of them (4 MiB): small transfers stay on the calling
        thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TypeAlias

__all__ = ["default_num_threads", "run_jobs"]

Job: TypeAlias = Callable[[], None]

MIN_NBYTES = 4 * 2**20
MOST_THREADS = 32  # of all transfers together, the calling ones aside


def default_num_threads(nbytes: int) -> int:
    """Threads for a transfer of ``nbytes`` bytes.

    Raises:
        ValueError: An environment variable is no number, or too small.
    """
    num_threads = _setting("KVSHM_THREADS") or _num_cpus()
    return max(1, min(num_threads, nbytes // (_setting("KVSHM_THREADS_MIN_NBYTES") or MIN_NBYTES)))


def _setting(name: str) -> int | None:
    text = os.environ.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ValueError(f"environment variable {name} is {text!r}; set it to a whole number from 1 on")
    return int(text)


def _num_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Source:
    """Hands out jobs, each to one thread; they may be made as they are taken."""

    def __init__(self, jobs: Iterator[Job]) -> None:
        self._jobs = jobs
        self._lock = threading.Lock()

    def take(self) -> Job | None:
        with self._lock:
            return next(self._jobs, None)

    def close(self) -> None:
        with self._lock:
            self._jobs = iter(())

    def drain(self) -> None:
        try:
            while (job := self.take()) is not None:
                job()
        except BaseException:
            self.close()  # the others end with the job they have
            raise


def run_jobs(jobs: Iterator[Job], num_threads: int) -> None:
    """Run all jobs, in order on one thread, else in any order on several; done when the last one is.

    The first exception of a job is raised here, once no job runs any more. Then not all jobs have run.
    """
    source = _Source(jobs)
    helpers = _start_helpers(source.drain, num_threads - 1)
    try:
        source.drain()
    finally:
        source.close()
        # One that has not begun would find nothing to do; it is not waited for.
        failures = [helper.exception() for helper in helpers if not helper.cancel()]
    for failure in failures:
        if failure is not None:
            raise failure


def _start_helpers(work: Callable[[], None], count: int) -> list[Future[None]]:
    if count < 1:
        return []
    helpers: list[Future[None]] = []
    pool = _pool(os.getpid())
    for _ in range(count):
        try:
            helpers.append(pool.submit(work))
        except RuntimeError:
            break  # the interpreter is shutting down and starts no thread any more
    return helpers


@cache
def _pool(pid: int) -> ThreadPoolExecutor:
    """The pool of this process, which starts a thread where none is idle. A forked child has another pid: threads do
    not survive a fork."""
    return ThreadPoolExecutor(max(MOST_THREADS, _num_cpus()), thread_name_prefix="kvshm-copy")
