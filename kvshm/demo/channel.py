"""Messages between two processes of the demo: MessagePack maps, each after its length, over a socket pair.

A process ends when its conversation ends. Whoever sends to a process that is gone, or waits for one, gets a
ConnectionError, so no process has to be watched or told to stop.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

from kvshm import wire

__all__ = ["Channel", "Message"]

Message = dict[str, Any]

_LENGTH = struct.Struct("<Q")
_MAX_NBYTES = 1 << 26  # far above any message here; a peer that announces more is broken


class Channel:
    """One end of a conversation. Owns the socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @classmethod
    def inherited(cls, fd: int) -> Channel:
        """The end that a parent process left open for this one."""
        return cls(socket.socket(fileno=fd))

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            ConnectionError: Nobody holds the other end any more.
            TimeoutError: The socket has a timeout, and it passed.
        """
        data = wire.pack(message)
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Message:
        """Wait for one message.

        Raises:
            ConnectionError: Nobody holds the other end any more.
            TimeoutError: The socket has a timeout, and nothing came for so long.
            ValueError: What came is no message.
        """
        (nbytes,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if nbytes > _MAX_NBYTES:
            raise ValueError(f"a message of {nbytes} bytes is announced; the demo sends at most {_MAX_NBYTES}")
        message = wire.unpack(self._read(nbytes))
        if not isinstance(message, dict):
            raise ValueError(f"a message is a map, not {type(message).__name__}")
        return message

    def _read(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        rest = memoryview(data)
        while rest:
            count = self._socket.recv_into(rest)
            if count == 0:
                raise ConnectionResetError("the process at the other end of the channel has gone")
            rest = rest[count:]
        return data

    def close(self) -> None:
        """Leave the conversation. Idempotent."""
        self._socket.close()
