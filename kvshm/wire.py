"""Descriptors and messages as MessagePack.

Data, never code: a closed set of types, checked where they come in. Inside a message a
:class:`~kvshm.wrapper.ShmArrayWrapper` is extension type 1, and there is no other extension.
"""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np

from kvshm.wrapper import ShmArrayWrapper, WireError

__all__ = ["WRAPPER_EXT_CODE", "WireError", "pack", "unpack"]

WRAPPER_EXT_CODE = 1

# MessagePack reads timestamps, extension -1 of 4, 8 or 12 bytes, without asking. Each way to write one begins so.
_TIMESTAMP_HEADERS = (
    b"\xd6\xff",
    b"\xd7\xff",
    *(b"\xc7%c\xff" % length for length in (4, 8, 12)),
    *(b"\xc8\0%c\xff" % length for length in (4, 8, 12)),
    *(b"\xc9\0\0\0%c\xff" % length for length in (4, 8, 12)),
)


def _pack_other(value: Any) -> Any:
    if isinstance(value, ShmArrayWrapper):
        return msgpack.ExtType(WRAPPER_EXT_CODE, value.to_bytes())
    if isinstance(value, np.integer):
        return int(value)  # of 64 bits at most
    if isinstance(value, int):
        raise WireError(f"integer {value} is beyond 64 bits")
    raise TypeError(
        f"cannot send {type(value).__name__}: a message holds None, bool, int, float, str, bytes, lists, "
        f"maps and ShmArrayWrapper"
    )


def _unpack_extension(code: int, data: bytes) -> ShmArrayWrapper:
    if code != WRAPPER_EXT_CODE:
        raise WireError(f"unknown extension type {code}; only {WRAPPER_EXT_CODE}, a descriptor, is known")
    return ShmArrayWrapper.from_bytes(data)


def pack(obj: Any) -> bytes:
    """One value as MessagePack; wrappers in it become extension type 1.

    Raises:
        WireError: An integer beyond 64 bits, or text that is not Unicode.
        TypeError: A type that a message cannot hold.
    """
    try:
        return bytes(msgpack.packb(obj, default=_pack_other))
    except UnicodeEncodeError as error:
        raise WireError(f"text is not Unicode: {error}") from error


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """Read one value, its descriptors checked and nothing opened or mapped.

    Raises:
        WireError: The bytes are not exactly one valid value. No other exception comes from bytes.
    """
    try:
        _check_complete(data)
        value = msgpack.unpackb(data, ext_hook=_unpack_extension)
    except WireError:
        raise
    except Exception as error:
        raise WireError(f"not one MessagePack value: {error or type(error).__name__}") from error
    # Only now and then do bytes look like a timestamp: walking through every value would cost more than reading it.
    raw = bytes(data) if isinstance(data, memoryview) else data
    if any(header in raw for header in _TIMESTAMP_HEADERS):
        _refuse_timestamps(value)
    return value


def _check_complete(data: bytes | bytearray | memoryview) -> None:
    """Walk the bytes once without making anything of them.

    A list's header may announce more than there is, and lists lie in lists, so that a few bytes could ask for much
    memory. What is complete holds a byte for every element.
    """
    walker = msgpack.Unpacker(max_buffer_size=max(len(data), 1), read_size=max(len(data), 1))
    walker.feed(data)
    walker.skip()
    if walker.tell() != len(data):
        raise WireError(f"{len(data) - walker.tell()} bytes follow the value")


def _refuse_timestamps(value: Any) -> None:
    left = [value]  # a stack of our own: the bytes say how deep it gets
    while left:
        item = left.pop()
        if isinstance(item, msgpack.Timestamp):
            raise WireError("unknown extension type -1 (timestamp)")
        if isinstance(item, dict):
            left += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            left += item
