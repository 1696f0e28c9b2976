"""Worker threads for copies, and how their results come back to the server's loop.

Work runs in a thread; what is to be done with its result runs in the loop, which is woken for it. So the state is kept
by one thread and need no lock.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

__all__ = ["JobPool"]

_logger = logging.getLogger("kvshm")

Done = Callable[[Any, str | None], None]
"""Takes the result and None, or None and the reason of the failure."""


@dataclass(slots=True)
class _Job:
    work: Callable[[], Any]
    done: Done


class JobPool:
    """Daemon threads.

    Args:
        wake: Makes the loop call :meth:`finish` soon; any thread calls it.
    """

    def __init__(self, num_threads: int, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._results: deque[Callable[[], None]] = deque()
        self._threads = [
            threading.Thread(target=self._run, name=f"kvshm-worker-{index}", daemon=True)
            for index in range(num_threads)
        ]
        self.num_unfinished = 0
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], Any], done: Done) -> None:
        """Run ``work`` in a thread, then ``done`` in the loop. Called by the loop."""
        self.num_unfinished += 1
        self._jobs.put(_Job(work, done))

    def call(self, callback: Callable[[], None]) -> None:
        """Run something in the loop. Any thread may call it."""
        self._results.append(callback)
        self._wake()

    def finish(self) -> None:
        """Run what waits for the loop. Called by the loop."""
        while self._results:
            callback = self._results.popleft()
            try:
                callback()
            except Exception:  # the loop serves others too
                _logger.exception("kvshm server: finishing a job failed")

    def close(self) -> None:
        """Wait for running work and end the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            result, reason = None, None
            try:
                result = job.work()
            except Exception as error:  # becomes the reply
                # The text, not the exception: its traceback would keep the mapped arrays of this job alive.
                reason = f"{error.args[-1] if error.args else type(error).__name__}"
                if not isinstance(error, OSError | ValueError | LookupError):
                    _logger.exception("kvshm server: a job failed")
            self.call(partial(self._complete, job.done, result, reason))
            del job, result

    def _complete(self, done: Done, result: Any, reason: str | None) -> None:
        self.num_unfinished -= 1
        done(result, reason)
