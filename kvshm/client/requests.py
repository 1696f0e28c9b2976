"""Requests of one engine, and the blocks that late ones may still touch.

A request that names blocks lets the server read or write them. When its reply does not come in time the server may do
so later all the same, so such a request stays on record, and its blocks are nobody else's, until it is known to be
over: its reply came, the server said that no copy runs any more, or the server's process is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvshm import wire
from kvshm.client.connections import CacheServerError, Connection, Connections, ServerUnreachableError
from kvshm.client.operations import FRAMES
from kvshm.layout import BlockIds
from kvshm.protocol import FailureCode
from kvshm.shm.liveness import LivenessProbe

__all__ = ["NotRegisteredError", "Requests"]

_SETTLE_TIMEOUT_S = 1.0


class NotRegisteredError(CacheServerError):
    """The server does not know this engine: it is another process by now, or has dropped it."""


@dataclass(slots=True, eq=False)
class _Late:
    """A request whose reply did not come in time, or could not be read."""

    block_ids: BlockIds
    server: LivenessProbe | None  # whether the server lives; None: only its connection shows it
    connection: Connection | None  # None: it broke
    uid: int


class Requests:
    """What one engine asks of its server. Safe for threads.

    Args:
        instance_id: What the server knows the engine by.
    """

    def __init__(self, connections: Connections, instance_id: int) -> None:
        self._connections = connections
        self.instance_id = instance_id
        self._late: list[_Late] = []
        self._lock = threading.Lock()

    def ask(
        self,
        operation: str,
        *payload: Any,
        block_ids: BlockIds | None = None,
        server: LivenessProbe | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Send one request and return its result.

        Args:
            block_ids: Blocks that the server reads or writes for it.
            server: Shows whether the server lives.

        Raises:
            NotRegisteredError, CacheServerError: The server answered that it could not do it, and why.
            ServerTimeoutError, ServerUnreachableError: There was no answer.
        """
        connections = self._connections
        deadline = time.monotonic() + (connections.timeout_s if timeout_s is None else timeout_s)
        frames = [wire.pack(value) for value in payload]
        connection = connections.take()
        is_sent = False
        try:
            uid = connection.send(FRAMES[operation], frames, deadline)
            is_sent = True
            reply = connection.receive(uid, deadline, operation)
        except BaseException as error:  # it is late, or no reply, or Ctrl-C came: the server may copy all the same
            is_broken = isinstance(error, ServerUnreachableError)
            if block_ids is not None and (is_sent or not is_broken):
                self._add_late(_Late(block_ids, server, connection, connection.uid), is_broken=is_broken)
            else:
                connections.discard(connection)
            raise
        connections.give(connection)
        if reply.reason is not None:
            is_unknown = reply.code == FailureCode.NOT_REGISTERED.value
            kind = NotRegisteredError if is_unknown else CacheServerError
            raise kind(f"{operation}: {reply.reason}")
        return reply.result

    def unsettled_block_ids(self, num_kernel_groups: int) -> list[set[int]]:
        """Per kernel group, blocks that the server may still be reading or writing."""
        with self._lock:
            self._drop_settled()
            blocks: list[set[int]] = [set() for _ in range(num_kernel_groups)]
            for late in self._late:
                for group, ids in zip(blocks, late.block_ids.flat(), strict=True):
                    group.update(ids.tolist())
            return blocks

    @property
    def has_late(self) -> bool:
        """Whether there are such blocks, as far as is known."""
        return bool(self._late)

    def settle_all(self) -> None:
        """The server said that it touches nothing of this engine any more."""
        with self._lock:
            for late in self._late:
                self._disconnect(late)
            self._late.clear()

    def disconnect(self) -> None:
        """Close the connections of late requests; from now on only the server's death shows that those are over."""
        with self._lock:
            self._drop_settled()
            for late in self._late:
                self._disconnect(late)

    def ask_whether_settled(self, operation: str, payload: Sequence[bytes]) -> None:
        """Let late requests whose connection broke wait for the answer to another request.

        Args:
            operation: One that the server answers once no copy runs on the engine's memory any more.

        Raises:
            ServerUnreachableError: The server is not there.
        """
        with self._lock:
            for late in self._late:
                if late.connection is None:
                    connection = self._connections.take()
                    try:
                        late.uid = connection.send(FRAMES[operation], payload, time.monotonic() + _SETTLE_TIMEOUT_S)
                        connection.watch()
                    except BaseException:
                        self._connections.discard(connection)
                        raise
                    late.connection = connection

    def _add_late(self, late: _Late, *, is_broken: bool) -> None:
        with self._lock:
            self._drop_settled()
            if is_broken:
                self._disconnect(late)
            elif late.connection is not None:
                late.connection.watch()
            self._late.append(late)

    def _disconnect(self, late: _Late) -> None:
        if late.connection is not None:
            self._connections.discard(late.connection)
            late.connection = None

    def _drop_settled(self) -> None:
        for late in list(self._late):
            if self._is_settled(late):
                self._late.remove(late)
                self._disconnect(late)

    def _is_settled(self, late: _Late) -> bool:
        if late.connection is not None:
            if late.connection.poll(late.uid):
                return True
            if late.connection.was_disconnected:
                self._disconnect(late)
        if late.server is not None:
            return late.server.is_free()
        # A real LMCache server whose connection broke is taken for gone.
        return late.connection is None
