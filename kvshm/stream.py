"""Streams and events of a host without an accelerator.

Code written for accelerators orders its work with streams and events. On the host, work is done when the call returns:
waiting waits for nothing, and every query is true. What remains real is time: an event records when it was recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["HostEvent", "HostStream"]


class HostEvent:
    """A moment on a host stream."""

    __slots__ = ("_time_ns",)

    def __init__(self, enable_timing: bool = True, blocking: bool = False, interprocess: bool = False) -> None:
        """The arguments are those of accelerators' events; none makes a difference here."""
        self._time_ns: int | None = None

    def record(self, stream: HostStream | None = None) -> None:
        """Record now: what was called before is done."""
        self._time_ns = time.perf_counter_ns()

    def wait(self, stream: HostStream | None = None) -> None:
        """Make a stream wait for this event, which has happened already."""

    def query(self) -> bool:
        """Whether the recorded work is done: always."""
        return True

    def synchronize(self) -> None:
        """Wait for the recorded work, which is done already."""

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds from this event to ``end_event``.

        Raises:
            RuntimeError: One of the two was never recorded.
        """
        if self._time_ns is None or end_event._time_ns is None:
            raise RuntimeError("both events must be recorded before the time between them is known")
        return (end_event._time_ns - self._time_ns) / 1e6

    def __repr__(self) -> str:
        return f"HostEvent(recorded={self._time_ns is not None})"


class HostStream:
    """An order of work on the host: the order of the calls.

    >>> with HostStream() as stream:
    ...     event = stream.record_event()
    >>> event.query()
    True
    """

    __slots__ = ("priority",)

    device = "cpu"
    cuda_stream = 0  # the raw handles that accelerators' streams have
    ptr = 0

    def __init__(self, device: Any = "cpu", priority: int = 0) -> None:
        self.priority = priority

    def synchronize(self) -> None:
        """Wait for the work on this stream, which is done already."""

    def query(self) -> bool:
        """Whether the work on this stream is done: always."""
        return True

    def wait_event(self, event: HostEvent) -> None:
        """Make later work wait for an event, which has happened already."""

    def wait_stream(self, stream: HostStream) -> None:
        """Make later work wait for another stream, whose work is done already."""

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """Record ``event``, or a new one, and return it."""
        event = HostEvent() if event is None else event
        event.record(self)
        return event

    def launch_host_func(self, callback: Callable[[Any], Any], arg: Any) -> None:
        """Call ``callback(arg)`` after the work so far, that is, now."""
        callback(arg)

    def __enter__(self) -> HostStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave; there is no current stream to restore."""

    def __repr__(self) -> str:
        return f"HostStream(priority={self.priority})"
