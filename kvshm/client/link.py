"""One client's link to its server: whether it is up, what it is, and the heartbeat that keeps registrations alive.

While the server is away nothing is sent: engines miss at once, and the heartbeat alone looks for it. When it comes
back, or turns out to be another process than before, the heartbeat registers every engine again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import random
import threading
import time
from dataclasses import dataclass
from typing import Protocol

from kvshm import wire
from kvshm.client.connections import CacheServerError, Connections
from kvshm.client.operations import KvshmServer, LMCacheServer, PlainOperations, ServerInfo, probe
from kvshm.units import checked_seconds

__all__ = ["Member", "Pace", "ServerLink"]

_FAREWELL_S = 0.5

_logger = logging.getLogger("kvshm")


class Member(Protocol):
    """What the link keeps registered."""

    @property
    def instance_id(self) -> int:
        """What the server knows it by."""

    @property
    def server(self) -> ServerInfo | None:
        """The server that it was registered with last."""

    def register_with(self, info: ServerInfo) -> None:
        """Register with a server that does not know this member (any more), and add it to the link.

        Raises:
            CacheServerError, WireError: The server does not take it.
            ServerTimeoutError, ServerUnreachableError: The server is not there.
        """

    def settle(self) -> None:
        """Catch up on what could not be said before. Raises what requests raise."""

    def say_farewell(self, timeout_s: float) -> None:
        """Unregister, if that can be done in this time."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a link speaks to its server. Times in seconds.

    Raises:
        ValueError: One of them is not finite and positive.
    """

    heartbeat_s: float = 5.0  # from one renewal of the leases to the next
    probe_timeout_s: float = 0.5  # that the server may take to answer the heartbeat
    retry_s: float = 0.1  # from one search for a server that is away to the next; each takes twice as long as the last

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "probe_timeout_s", "retry_s"):
            object.__setattr__(self, name, checked_seconds(name, getattr(self, name)))

    def retry_after(self, num_failed: int) -> float:
        """How long to wait before the server is looked for again; no two clients keep step.

        >>> pace = Pace(heartbeat_s=1.0, retry_s=0.1)
        >>> all(0.3 <= pace.retry_after(2) <= 0.4 for _ in range(100))
        True
        >>> all(0.75 <= pace.retry_after(1000) <= 1.0 for _ in range(100))
        True
        """
        wait_s = min(self.retry_s * 2.0 ** min(num_failed, 30), self.heartbeat_s)
        return wait_s * random.uniform(0.75, 1.0)


class ServerLink(PlainOperations):
    """The connections to a server, and the knowledge whether it is there."""

    def __init__(self, url: str, timeout_s: float, connect_timeout_s: float, pace: Pace) -> None:
        self._connections = Connections(url, timeout_s, connect_timeout_s)
        self._pace = pace
        self._num_failed = 0  # searches for the server since it was there
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._members: dict[int, Member] = {}
        # What the heartbeat is woken for: members to leave, or None to look at the server. The collector may call its
        # put(), in whatever a thread is doing.
        self._events: queue.SimpleQueue[Member | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._info: ServerInfo | None = None
        self.is_up = False
        self.last_error: str | None = None

    @property
    def connections(self) -> Connections:
        """For requests whose replies are waited for in a special way."""
        return self._connections

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a forked child of the one that made the link."""
        return os.getpid() != self._pid

    def info(self, *, again: bool = False) -> ServerInfo:
        """What the server is; asked once, after it was away, and (``again``) now.

        Raises:
            ServerTimeoutError, ServerUnreachableError, CacheServerError: As their text says.
        """
        info = self._info
        if again or info is None or not self.is_up:
            info = self._info = probe(self._connections, self._connections.timeout_s)
            self.is_up = True
        return info

    def mark_down(self, error: Exception) -> None:
        """The server did not answer: send nothing until the heartbeat has found it."""
        self.last_error = str(error)
        if self.is_up:
            self.is_up = False
            # The text and not the error: a handler that keeps records would keep its frames, and the engine's caches.
            _logger.warning("kvshm: going on without the cache server: %s", self.last_error)
            self._events.put(None)

    def add(self, member: Member) -> None:
        """Keep a registered member alive."""
        with self._lock:
            self._members[member.instance_id] = member
            if self._thread is None:
                self._thread = threading.Thread(target=self._beat, name="kvshm-heartbeat", daemon=True)
                self._thread.start()

    def remove(self, member: Member) -> bool:
        """Stop keeping it; returns whether it was kept."""
        with self._lock:
            return self._members.pop(member.instance_id, None) is not None

    def leave(self, member: Member) -> None:
        """Unregister a member whose engine was dropped, soon and in another thread."""
        if not self._closing.is_set():
            self._events.put(member)

    def register_again(self, member: Member, info: ServerInfo) -> None:
        """Register a member with a server that came back. One that is refused is dropped; the others stay.

        Raises:
            CacheServerError, WireError: The server does not take it. That has been logged.
            ServerTimeoutError, ServerUnreachableError: The server is not there.
        """
        try:
            member.register_with(info)
        except (CacheServerError, wire.WireError) as error:
            self.last_error = str(error)
            if self.remove(member):
                _logger.error("kvshm: instance %d goes on without cache: %s", member.instance_id, self.last_error)
            raise

    def close(self) -> None:
        """Unregister what is registered, within half a second, and close; idempotent."""
        if self.is_inherited:
            self._connections.close()  # its own, if it has made some
            return
        if self._closing.is_set():
            return
        self._closing.set()
        self._events.put(None)
        deadline = time.monotonic() + _FAREWELL_S
        for member in self._snapshot():
            self.remove(member)
            member.say_farewell(deadline - time.monotonic() if self.is_up else 0.0)
        self._connections.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self._pace.probe_timeout_s)
        while not self._events.empty():  # a member that is in there would be kept with its caches
            self._events.get()

    def _snapshot(self) -> list[Member]:
        with self._lock:
            return list(self._members.values())

    def _beat(self) -> None:
        while True:
            leaving = self._wait()
            if self._closing.is_set():
                return
            try:
                if leaving is None:
                    self._check()
                elif self.remove(leaving):
                    leaving.say_farewell(_FAREWELL_S if self.is_up else 0.0)
            except (OSError, CacheServerError, wire.WireError) as error:
                self._num_failed += 1
                self.mark_down(error)
            except Exception as error:  # the heartbeat must not end while its client lives
                if self._closing.is_set():
                    return  # the connections were closed meanwhile
                _logger.exception("kvshm: the heartbeat failed")
                self.mark_down(error)

    def _wait(self) -> Member | None:
        """Until the next heartbeat, or until a member leaves or the server is to be looked at."""
        try:
            pace = self._pace
            wait_s = pace.heartbeat_s if self.is_up else pace.retry_after(self._num_failed)
            return self._events.get(timeout=wait_s)
        except queue.Empty:
            return None

    def _check(self) -> None:
        """See whether the server is there and still the same; renew the leases."""
        before, was_up = self._info, self.is_up
        if was_up and isinstance(before, LMCacheServer):
            # A real LMCache server logs an error for a question that it does not know: it is asked that once.
            info: ServerInfo = LMCacheServer(self.get_chunk_size(timeout_s=self._pace.probe_timeout_s))
        else:
            info = probe(self._connections, self._pace.probe_timeout_s)
        # A real LMCache server has no epoch; once it was away it may be another.
        is_doubtful = not was_up and isinstance(info, LMCacheServer)
        for member in self._snapshot():
            if is_doubtful or not _is_same(member.server, info):
                with contextlib.suppress(CacheServerError, wire.WireError):  # one that is refused; it has been logged
                    self.register_again(member, info)
        self._info = info
        for member in self._snapshot():
            self.ping(member.instance_id, timeout_s=self._pace.probe_timeout_s)
            with contextlib.suppress(CacheServerError, wire.WireError):  # the next time, then
                member.settle()
        if not was_up:
            _logger.warning("kvshm: the cache server at %s is back", self._connections.url)
        self._num_failed = 0
        self.is_up = True


def _is_same(known: ServerInfo | None, info: ServerInfo) -> bool:
    # Of the member, not of the link: an engine that met the new server first has updated the link, not the others.
    if isinstance(known, KvshmServer) and isinstance(info, KvshmServer):
        return known.epoch == info.epoch
    return type(known) is type(info)
