"""The demo's channel: messages arrive whole and in order, and a process that has gone is noticed on either side."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from kvshm.demo.channel import Channel, Message

Ends = tuple[Channel, Channel, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Both ends of a conversation, and the socket of the second."""
    ours, theirs = socket.socketpair()
    pair = Channel(ours), Channel(theirs)
    yield *pair, theirs
    for channel in pair:
        channel.close()


def test_messages_arrive_whole_and_in_order(ends: Ends) -> None:
    one, other, _ = ends
    messages: list[Message] = [
        {"step": "a", "data": bytes(7_919)},
        {},
        {"tokens": list(range(1_009)), "s": 0.25, "none": None},
    ]
    for message in messages:
        one.send(message)
    assert [other.receive() for _ in messages] == messages
    other.send({"thanks": True})
    assert one.receive() == {"thanks": True}


def test_what_was_sent_before_the_end_still_arrives(ends: Ends) -> None:
    one, other, _ = ends
    one.send({"step": "last"})
    one.close()
    one.close()
    assert other.receive() == {"step": "last"}
    with pytest.raises(ConnectionError, match="the other end of the channel has gone"):
        other.receive()
    with pytest.raises(ConnectionError):
        other.send({"anybody": "there"})


@pytest.mark.parametrize("cut", [1, 7, 8, 9, 13])
def test_a_message_that_breaks_off_is_the_end(ends: Ends, cut: int) -> None:
    one, _, raw = ends
    body = b"\x81\xa4step\xa3now"
    raw.sendall((struct.pack("<Q", len(body)) + body)[:cut])
    raw.close()
    with pytest.raises(ConnectionError, match="the other end of the channel has gone"):
        one.receive()


def test_what_is_no_message_is_refused(ends: Ends) -> None:
    one, _, raw = ends
    raw.sendall(struct.pack("<Q", 1 << 40))
    with pytest.raises(
        ValueError, match="a message of 1099511627776 bytes is announced; the demo sends at most 67108864"
    ):
        one.receive()
    raw.sendall(struct.pack("<Q", 1) + b"\x07")
    with pytest.raises(ValueError, match="a message is a map, not int"):
        one.receive()
