"""Connections to a cache server: one request at a time each, every wait with a deadline.

A thread takes an idle connection, exchanges one request for its reply, and returns the connection, so threads share
nothing but the list of idle ones. A connection whose reply did not come in time is never used again: a late reply
cannot be taken for another's. Nothing is sent while the server is not connected, so no request lies in a queue and is
served long after its caller gave up.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import zmq

from kvshm import wire
from kvshm.protocol import connection_id, new_client_id
from kvshm.units import checked_seconds

__all__ = [
    "CacheServerError",
    "ClientClosedError",
    "Connection",
    "Connections",
    "ServerGoneError",
    "ServerTimeoutError",
    "ServerUnreachableError",
    "checked_url",
]

# How often a waiting client looks whether the server is still connected: more often than ZeroMQ's 100 ms until it
# reconnects, so that a server that restarts is noticed.
_SLICE_S = 0.05
_FIRST_SLICE_MS = 10
_MAX_IDLE = 64
_TCP = re.compile(r"tcp://(?:\[[0-9A-Za-z:.%_-]+\]|[0-9A-Za-z._-]+):([0-9]{1,5})", re.ASCII)
_MAX_PATH_NBYTES = 107  # of a Unix socket's address
# A connection has a few requests under way at most, so uids of one byte, used over and over, tell them apart.
_UIDS = [wire.pack(uid) for uid in range(128)]
_PLAIN_REPLIES = {wire.pack(value): value for value in (None, True, False, "OK")}


class CacheServerError(RuntimeError):
    """The server answered that it could not do what was asked; the text is its reason."""


class ServerTimeoutError(TimeoutError):
    """The server is connected but did not answer in time."""


class ServerUnreachableError(ConnectionError):
    """No connection to the server, or it broke before the reply."""


class ServerGoneError(CacheServerError):
    """What is known of the server is of a process that has ended, or that shares no memory with this one."""


class ClientClosedError(ValueError):
    """The client was closed; it asks nothing any more."""


class Reply(NamedTuple):
    """What came back: a result (None where the operation has none), or why there is none."""

    result: Any
    reason: str | None
    code: str | None = None  # a FailureCode, from a kvshm server


def checked_url(url: object) -> str:
    """An address that a client can connect to.

    Raises:
        ValueError: It is none: a scheme, a host, a port or a path that cannot be.
    """
    if isinstance(url, str) and url.isprintable():
        if url.startswith("ipc://") and 0 < len(os.fsencode(url.removeprefix("ipc://"))) <= _MAX_PATH_NBYTES:
            return url
        match = _TCP.fullmatch(url)
        if match is not None and 0 < int(match[1]) < 1 << 16:
            return url
    raise ValueError(
        f"invalid url {url!r}: expected tcp://HOST:PORT or ipc://PATH, a port from 1 to 65535 and a path of at most "
        f"{_MAX_PATH_NBYTES} bytes"
    )


class Connection:
    """One DEALER socket. Used by one thread at a time."""

    __slots__ = ("_connect_timeout_s", "_monitor", "_next_uid", "_url", "socket", "uid")

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], url: str, connect_timeout_s: float, routing_id: bytes
    ) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        try:
            self.socket.setsockopt(zmq.ROUTING_ID, routing_id)
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.setsockopt(zmq.IMMEDIATE, 1)  # queue nothing for a server that is not there
            self.socket.setsockopt(zmq.RCVTIMEO, _FIRST_SLICE_MS)
            self.socket.setsockopt(zmq.SNDTIMEO, 0)
            if "[" in url:
                self.socket.setsockopt(zmq.IPV6, 1)
            self.socket.connect(url)
        except BaseException as error:
            self.socket.close(0)  # an open socket would keep its context from ending
            if isinstance(error, zmq.ZMQError):
                raise ServerUnreachableError(f"cannot connect to {url}: {error.strerror}") from None
            raise
        self._url = url
        self._connect_timeout_s = connect_timeout_s
        self._next_uid = itertools.cycle(range(len(_UIDS)))
        self._monitor: zmq.Socket[bytes] | None = None
        self.uid = -1  # of the request sent last

    def watch(self) -> None:
        """Notice from now on when the connection breaks: ZeroMQ would connect again without a word."""
        if self._monitor is None:
            self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    @property
    def was_disconnected(self) -> bool:
        """Whether the connection broke since :meth:`watch`, or is not there now."""
        return not self.is_connected or (self._monitor is not None and bool(self._monitor.poll(0)))

    @property
    def is_connected(self) -> bool:
        """Whether the server is there now."""
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    def send(self, operation: bytes, payload: Sequence[bytes], deadline: float) -> int:
        """Send a request and return its uid.

        Raises:
            ServerUnreachableError: The server is not there.
        """
        uid = self.uid = next(self._next_uid)
        frames = [_UIDS[uid], operation, *payload]
        try:
            self.socket.send_multipart(frames)
        except zmq.Again:
            wait_s = min(self._connect_timeout_s, deadline - time.monotonic())
            if wait_s <= 0 or not self.socket.poll(_milliseconds(wait_s), zmq.POLLOUT):
                raise ServerUnreachableError(
                    f"no cache server answers at {self._url} (waited {max(wait_s, 0):.2f} s); start one with kvshm "
                    f"serve"
                ) from None
            try:
                self.socket.send_multipart(frames)
            except zmq.Again:
                raise ServerUnreachableError(f"the cache server at {self._url} went away") from None
        return uid

    def receive(self, uid: int, deadline: float, what: str) -> Reply:
        """Wait for the reply to a request; others are dropped.

        Raises:
            ServerTimeoutError, ServerUnreachableError: As their text says.
        """
        return self.receive_any((uid,), deadline, what)[1]

    def receive_any(self, uids: Sequence[int], deadline: float, what: str) -> tuple[int, Reply]:
        """Wait for the first reply to one of several requests; returns its uid too. Raises as :meth:`receive`."""
        while True:
            try:
                frames = self.socket.recv_multipart()
            except zmq.Again:
                self._wait(deadline, what)
                continue
            for uid in uids:
                reply = _read_reply(frames, uid)
                if reply is not None:
                    return uid, reply

    def _wait(self, deadline: float, what: str) -> None:
        while not self.socket.poll(_milliseconds(min(_SLICE_S, deadline - time.monotonic()))):
            if not self.is_connected:
                raise ServerUnreachableError(f"the cache server at {self._url} went away before it answered {what}")
            if time.monotonic() >= deadline:
                raise ServerTimeoutError(
                    f"the cache server at {self._url} did not answer {what} in time; it may be stopped or "
                    f"overloaded, or (a real LMCache server) its handler failed"
                )

    def poll(self, uid: int) -> bool:
        """Whether the reply to a request has come, without waiting. Drops it."""
        while self.socket.poll(0):
            frames = self.socket.recv_multipart()
            if len(frames) > 1 and frames[0] == _UIDS[uid]:
                return True
        return False

    def close(self) -> None:
        """Close at once; what was not sent is dropped."""
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor.close(0)
            self._monitor = None
        self.socket.close(0)


def _milliseconds(seconds: float) -> int:
    """For a poll, which takes 31 bits: a month at most."""
    return min(max(1, int(1e3 * seconds)), 2**31 - 1)


def _read_reply(frames: list[bytes], uid: int) -> Reply | None:
    if len(frames) < 2 or frames[0] != _UIDS[uid]:
        return None
    if len(frames) == 2:
        return Reply(None, None)
    frame = frames[2]
    result = _PLAIN_REPLIES[frame] if frame in _PLAIN_REPLIES else wire.unpack(frame)
    if len(frames) == 3:
        return Reply(result, None)
    return Reply(result, str(wire.unpack(frames[3])), str(wire.unpack(frames[4])) if len(frames) > 4 else None)


class Connections:
    """The connections of one client to one server. Safe for threads; a forked child makes its own.

    Args:
        timeout_s: How long a request may take, unless it says otherwise.
        connect_timeout_s: How much of that may go into finding the server.
    """

    def __init__(self, url: str, timeout_s: float, connect_timeout_s: float) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self.connect_timeout_s = connect_timeout_s
        self._start()

    def _start(self) -> None:
        # Re-entrant: a client that the collector drops is closed in whatever this thread is doing.
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        # A kvshm server knows LMCache's lookups by the client that made them.
        self._client_id = new_client_id()
        self._numbers = itertools.count()
        self._is_closed = False

    def take(self) -> Connection:
        """A connection for the calling thread alone, until :meth:`give` or :meth:`discard`.

        Raises:
            ClientClosedError: The client is closed.
        """
        if self._pid != os.getpid():
            # Sockets do not survive a fork, and a lock may be held by a thread that did not. The parent's are left
            # untouched, and are the parent's to close.
            self._inherited = (self._context, self._idle, self._busy)
            self._start()
        with self._lock:
            if self._is_closed:
                raise ClientClosedError("the cache client is closed; make a new one")
            if self._idle:
                connection = self._idle.pop()
            else:
                routing_id = connection_id(self._client_id, next(self._numbers))
                connection = Connection(self._context, self.url, self.connect_timeout_s, routing_id)
            self._busy.add(connection)
            return connection

    def give(self, connection: Connection) -> None:
        """Give back a connection that awaits no reply."""
        with self._lock:
            if connection in self._busy and not self._is_closed and len(self._idle) < _MAX_IDLE:
                self._busy.remove(connection)
                self._idle.append(connection)
                return
        self.discard(connection)

    def discard(self, connection: Connection) -> None:
        """Close a connection."""
        connection.close()
        with self._lock:
            self._busy.discard(connection)
            is_last = self._is_closed and not self._busy
        if is_last:
            self._context.term()

    def exchange(self, operation: bytes, payload: Sequence[bytes], timeout_s: float | None, what: str) -> Reply:
        """One request and its reply.

        Raises:
            ServerTimeoutError, ServerUnreachableError: As their text says.
            ValueError: No time that can be waited for, or the client is closed.
        """
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else checked_seconds("timeout_s", timeout_s))
        connection = self.take()
        try:
            reply = connection.receive(connection.send(operation, payload, deadline), deadline, what)
        except BaseException:
            self.discard(connection)
            raise
        self.give(connection)
        return reply

    def close(self) -> None:
        """Close all connections that no thread uses; the others when their thread is done. Idempotent."""
        with self._lock:
            if self._is_closed or self._pid != os.getpid():
                return
            self._is_closed = True
            idle, self._idle = self._idle, []
            is_used = bool(self._busy)
        for connection in idle:
            connection.close()
        if not is_used:
            self._context.term()
