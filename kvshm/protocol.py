"""The cache server's protocol: operations, frames, keys, and the strict reading of what the other side sent.

A request is ``[uid, operation, payload...]``, its reply ``[uid, operation, result]``, or ``[uid, operation]`` where the
operation returns nothing. Every frame is one MessagePack value. A reply to what failed carries the operation's failure
value in the place of the result and, as one more frame, a string that says why.

LMCache's operations have a number. What kvshm's client and server say to each other has operations of its own, which
have only a name (``kvshm_...``) and which LMCache's servers never see; in them token and block ids travel as bytes
(little-endian int64), and what failed has one more frame, a :class:`FailureCode`. Sockets are the business of others.
"""

from __future__ import annotations

import reprlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvshm import wire
from kvshm.integers import Ints, checked_int, int64_array
from kvshm.layout import EngineGroupInfo, ObjectLayout
from kvshm.wrapper import ShmArrayWrapper

__all__ = [
    "MAX_BLOCK_IDS",
    "MAX_TOKENS",
    "NO_RESULT",
    "OPERATIONS",
    "PROTOCOL_VERSION",
    "CacheKey",
    "EngineDrivenSpec",
    "EngineIdentity",
    "FailureCode",
    "Operation",
    "ProtocolError",
    "checked_text",
    "client_of",
    "connection_id",
    "encode_block_ids",
    "encode_key",
    "is_uid_frame",
    "new_client_id",
    "operation_of",
    "parse_payload",
]

MAX_TOKENS = 1_000_000
MAX_BLOCK_IDS = 1_000_000
_MAX_TEXT = 4096
PROTOCOL_VERSION = 3  # of what kvshm adds
_MAX_ID = 2**63 - 1
_MAX_SALT = 128
_MAX_NESTING = 4
_MAX_OBJECT_GROUPS = 1024
_DIGEST_NBYTES = 16
_MAX_WORKERS = 1024  # and readers of a chunk: each costs the loop time in a lookup
_SALT_FORBIDDEN = frozenset("@/\\\0")
_CLIENT_ID_PREFIX = b"kvshm:"
_CLIENT_ID_NBYTES = len(_CLIENT_ID_PREFIX) + 16

NO_RESULT = object()
"""What an operation without a result returns: its reply has no third frame."""


class FailureCode(str, Enum):
    """The kind of a failure, for programs; the text beside it is for people."""

    REFUSED = "refused"  # the server could not do it
    MALFORMED = "malformed"  # the request is not what the protocol says
    NOT_REGISTERED = "not_registered"  # the server does not know the engine: register (again)
    INTERNAL = "internal"  # a fault of the server's own


class ProtocolError(ValueError):
    """A message is not what the protocol says. It changed nothing."""


def checked_text(name: str, value: object, most: int = _MAX_TEXT) -> str:
    """A string that can travel.

    Raises:
        ValueError: No string, too long, or with lone surrogates, which no encoding has.
    """
    if not isinstance(value, str) or len(value) > most:
        raise ValueError(f"{name} is {reprlib.repr(value)}; give a string of at most {most} characters")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"{name} {reprlib.repr(value)} has lone surrogates, which no encoding has; give valid Unicode")
    return value


def new_client_id() -> bytes:
    """An id that no other client has. The routing ids of all connections of a client of kvshm begin with it."""
    return _CLIENT_ID_PREFIX + secrets.token_bytes(_CLIENT_ID_NBYTES - len(_CLIENT_ID_PREFIX))


def connection_id(client_id: bytes, number: int) -> bytes:
    """The routing id of a client's connection."""
    return client_id + number.to_bytes(8, "little")


def client_of(routing_id: bytes) -> bytes:
    """Whose requests come under a routing id: a client's of kvshm, whatever the connection, else that connection's."""
    return routing_id[:_CLIENT_ID_NBYTES] if routing_id.startswith(_CLIENT_ID_PREFIX) else routing_id


def _checked_salt(cache_salt: str) -> None:
    checked_text("cache_salt", cache_salt)
    bad = _SALT_FORBIDDEN & set(cache_salt)
    if bad or len(cache_salt) > _MAX_SALT:
        raise ValueError(
            f"cache_salt {cache_salt[:_MAX_SALT]!r} must have at most {_MAX_SALT} characters (it has "
            f"{len(cache_salt)}) and none of @ / \\ and NUL"
        )


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Whose chunks an engine shares: those of the same model, world, worker and salt.

    Raises:
        ValueError: A name or a salt that cannot travel, or numbers that are no worker of a world.
    """

    model_name: str
    world_size: int = 1
    worker_id: int = 0
    cache_salt: str = ""

    def __post_init__(self) -> None:
        checked_text("model_name", self.model_name)
        _checked_salt(self.cache_salt)
        for name in ("world_size", "worker_id"):
            object.__setattr__(self, name, checked_int(getattr(self, name), name))
        if not 1 <= self.world_size <= _MAX_WORKERS:
            raise ValueError(f"world_size is {self.world_size}; give 1 to {_MAX_WORKERS}")
        if not 0 <= self.worker_id < self.world_size:
            raise ValueError(f"worker_id {self.worker_id} is not in [0, world_size {self.world_size})")


@dataclass(frozen=True, slots=True, eq=False)
class CacheKey:
    """Which tokens of which model a request is about.

    ``request_id``, ``request_configs`` and ``num_kv_readers`` are not part of what is cached.

    Raises:
        ValueError: A salt with a forbidden character or too long, or an invalid range.
    """

    model_name: str
    world_size: int
    worker_id: int | None  # None in lookups, which are about all workers
    token_ids: NDArray[np.int64]
    start: int
    end: int
    request_id: str
    cache_salt: str = ""
    request_configs: Mapping[str, Any] | None = None
    num_kv_readers: int = 0

    def __post_init__(self) -> None:
        checked_text("model_name", self.model_name)
        checked_text("request_id", self.request_id)
        _checked_salt(self.cache_salt)
        if not 0 <= self.start <= self.end:
            raise ValueError(f"invalid token range [{self.start}, {self.end}): expected 0 <= start <= end")


@dataclass(frozen=True, slots=True)
class EngineDrivenSpec:
    """What an engine of LMCache's that copies by itself says of its chunks."""

    instance_id: int
    model_name: str
    world_size: int
    block_size: int
    num_layers: int
    hidden_dim_size: int
    dtype_str: str
    use_mla: bool
    num_physical_slots: int | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: how its payload is read and what it answers when it fails."""

    name: str
    id: int | None
    payload: tuple[Callable[[Any, str], Any], ...]
    failure: Any  # NO_RESULT: nil
    num_optional: int = 0


# Reading. Each reader takes a decoded value and what to call it, and returns the value or raises ProtocolError.

Reader = Callable[[Any, str], Any]


def _refuse(value: Any, name: str, wanted: str) -> ProtocolError:
    # reprlib: what a peer sent may be huge or nested a thousand deep.
    return ProtocolError(f"{name} is {reprlib.repr(value)}, not {wanted}")


def _integer(low: int, high: int = _MAX_ID) -> Reader:
    def read(value: Any, name: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise _refuse(value, name, f"an integer in [{low}, {high}]")
        return value

    return read


def _text(value: Any, name: str) -> str:
    if type(value) is not str or len(value) > _MAX_TEXT:
        raise _refuse(value, name, f"a string of at most {_MAX_TEXT} characters")
    return value


def _boolean(value: Any, name: str) -> bool:
    if type(value) is not bool:
        raise _refuse(value, name, "a boolean")
    return value


def _binary(value: Any, name: str) -> bytes:
    if type(value) is not bytes:
        raise _refuse(value, name, "bytes")
    return value


def _seconds(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not 0 <= value <= 1e6:
        raise _refuse(value, name, "a number of seconds from 0 to 1e6")
    return float(value)


def _optional(read: Reader) -> Reader:
    return lambda value, name: None if value is None else read(value, name)


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if type(value) is not dict:
        raise _refuse(value, name, "a map")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if type(value) is not list:
        raise _refuse(value, name, "an array")
    return value


def _anything(value: Any, name: str) -> Any:
    return value


def _record(readers: Mapping[str, Reader], cls: type[Any], optional: frozenset[str]) -> Reader:
    def read(value: Any, name: str) -> Any:
        given = _mapping(value, name)
        unknown = given.keys() - readers.keys()
        missing = readers.keys() - given.keys() - optional
        if unknown or missing:
            names = ", ".join(sorted(map(reprlib.repr, unknown)))  # which may be of any kind
            raise ProtocolError(f"{name} has unknown keys [{names}] and lacks {sorted(missing)}")
        values = {key: readers[key](item, f"{name}.{key}") for key, item in given.items()}
        try:
            return cls(**values)
        except ValueError as error:
            raise ProtocolError(f"{name}: {error}") from None

    return read


def _int64s(most: int) -> Reader:
    def read(value: Any, name: str) -> NDArray[np.int64]:
        if type(value) is bytes:
            if len(value) % 8:
                raise ProtocolError(f"{name} has {len(value)} bytes, which is no whole number of 64-bit integers")
            array = np.frombuffer(value, dtype="<i8")
        else:
            try:
                array = int64_array(_list(value, name), name)
            except ProtocolError:
                raise
            except ValueError as error:
                raise ProtocolError(str(error)) from None
        if array.size > most:
            raise ProtocolError(f"{name} has {array.size} entries; at most {most} are allowed")
        return array

    return read


def _block_ids(value: Any, name: str) -> list[NDArray[np.int64]]:
    read = _int64s(MAX_BLOCK_IDS)
    groups = [read(ids, f"{name}[{index}]") for index, ids in enumerate(_list(value, name))]
    if sum(ids.size for ids in groups) > MAX_BLOCK_IDS:
        raise ProtocolError(f"{name} has more than {MAX_BLOCK_IDS} ids")
    return groups


def _wrappers(value: Any, name: str, depth: int = 0) -> Any:
    """A descriptor, or nested arrays of them as the engine's cache is built."""
    if isinstance(value, ShmArrayWrapper):
        return value
    if depth == _MAX_NESTING:
        raise _refuse(value, name, f"a descriptor, {_MAX_NESTING} arrays deep")
    return [_wrappers(item, f"{name}[{index}]", depth + 1) for index, item in enumerate(_list(value, name))]


def _integers(value: Any, name: str) -> tuple[int, ...]:
    read = _integer(0)
    return tuple(read(item, f"{name}[{index}]") for index, item in enumerate(_list(value, name)))


_key = _record(
    {
        "model_name": _text,
        "world_size": _integer(1, _MAX_WORKERS),
        "worker_id": _optional(_integer(0, _MAX_WORKERS)),
        "token_ids": _int64s(MAX_TOKENS),
        "start": _integer(0),
        "end": _integer(0),
        "request_id": _text,
        "cache_salt": _text,
        "request_configs": _optional(_mapping),
        "num_kv_readers": _integer(0, _MAX_WORKERS),
    },
    CacheKey,
    frozenset({"cache_salt", "request_configs", "num_kv_readers"}),
)
_engine_group = _record(
    {
        "engine_group_id": _integer(0, 2**20),
        "layer_indices": _integers,
        "tokens_per_block": _integer(-(2**31), 2**31),
        "sw_size_tokens": _integer(-1),
        "extra_object_group_tag": _integer(-(2**31), 2**31),
        "recurrent_state": _boolean,
    },
    EngineGroupInfo,
    frozenset(field.name for field in fields(EngineGroupInfo)) - {"engine_group_id"},
)
_engine_driven = _record(
    {
        "instance_id": _integer(-_MAX_ID),
        "model_name": _text,
        "world_size": _integer(1, _MAX_WORKERS),
        "block_size": _integer(1, 2**31),
        "num_layers": _integer(1, 2**20),
        "hidden_dim_size": _integer(1, 2**40),
        "dtype_str": _text,
        "use_mla": _boolean,
        "num_physical_slots": _optional(_integer(1, 2**31)),
    },
    EngineDrivenSpec,
    frozenset({"num_physical_slots"}),
)
_identity = _record(
    {
        "model_name": _text,
        "world_size": _integer(1, _MAX_WORKERS),
        "worker_id": _integer(0, _MAX_WORKERS),
        "cache_salt": _text,
    },
    EngineIdentity,
    frozenset(),
)


def _digest(value: Any, name: str) -> bytes:
    if type(value) is not bytes or len(value) != _DIGEST_NBYTES:
        raise _refuse(value, name, f"{_DIGEST_NBYTES} bytes")
    return value


def _kind(value: Any, name: str) -> str:
    if value not in ("attention", "recurrent", "aux"):
        raise _refuse(value, name, "'attention', 'recurrent' or 'aux'")
    return str(value)


_object_layout = _record(
    {
        "meaning": _digest,
        "nbytes": _integer(0, 2**40),
        "num_chunks_in_sw": _integer(-1),
        "kind": _kind,
    },
    ObjectLayout,
    frozenset(),
)


def _object_layouts(value: Any, name: str) -> tuple[ObjectLayout, ...]:
    entries = _list(value, name)
    if not 1 <= len(entries) <= _MAX_OBJECT_GROUPS:
        raise ProtocolError(f"{name} has {len(entries)} object groups; 1 to {_MAX_OBJECT_GROUPS} are allowed")
    return tuple(_object_layout(item, f"{name}[{index}]") for index, item in enumerate(entries))


def _chunk_indices(value: Any, name: str) -> tuple[tuple[int, ...], ...]:
    """Per object group some chunks, in rising order."""
    read = _int64s(MAX_TOKENS)
    groups = [read(chunks, f"{name}[{index}]") for index, chunks in enumerate(_list(value, name))]
    if len(groups) > _MAX_OBJECT_GROUPS or any(
        chunks.size and (chunks[0] < 0 or (np.diff(chunks) < 1).any()) for chunks in groups
    ):
        raise ProtocolError(
            f"{name} must hold rising chunk numbers for each of up to {_MAX_OBJECT_GROUPS} object groups"
        )
    return tuple(tuple(chunks.tolist()) for chunks in groups)


def _engine_groups(value: Any, name: str) -> tuple[EngineGroupInfo, ...]:
    return tuple(_engine_group(item, f"{name}[{index}]") for index, item in enumerate(_list(value, name)))


_instance = _integer(-_MAX_ID)
_null_block = _optional(_integer(-_MAX_ID))
_tokens = _int64s(MAX_TOKENS)
_deadline = _integer(0)  # nanoseconds of the server's monotonic clock
_STORE_FAILED = [b"", False]

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "register_kv_cache",
        1,
        (_instance, _wrappers, _text, _integer(1, _MAX_WORKERS), _text, _mapping, _engine_groups),
        NO_RESULT,
    ),
    Operation("unregister_kv_cache", 2, (_instance,), NO_RESULT),
    Operation("store", 6, (_key, _instance, _block_ids, _binary), _STORE_FAILED),
    Operation("retrieve", 7, (_key, _instance, _block_ids, _binary, _integer(0)), _STORE_FAILED, num_optional=1),
    Operation("lookup", 8, (_key, _integer(0)), NO_RESULT),
    Operation("query_prefetch_status", 9, (_text,), 0),
    Operation("wait_prefetch_status", 10, (_text, _seconds), 0),
    Operation("free_lookup_locks", 12, (_key, _integer(0)), NO_RESULT),
    Operation("end_session", 13, (_text,), NO_RESULT),
    Operation("register_kv_cache_engine_driven_context", 14, (_engine_driven,), {"shm_name": "", "pool_size": 0}),
    Operation("unregister_kv_cache_engine_driven_context", 15, (_instance,), NO_RESULT),
    # A map without slots, not nil: LMCache's client cannot read nil here and would wait for its time limit.
    Operation("prepare_store", 16, (_key, _instance), {"context": {}}),
    Operation("commit_store", 17, (_key, _instance, _binary), False),
    Operation("prepare_retrieve", 18, (_key, _instance), {"success": False, "data": b"", "context": {}}),
    Operation("commit_retrieve", 19, (_key, _instance), False),
    Operation("clear", 20, (_boolean,), NO_RESULT, num_optional=1),
    Operation("get_chunk_size", 21, (), 0),
    Operation("ping", 22, (_optional(_instance),), False),
    Operation("report_block_allocation", 23, (_instance, _text, _list), NO_RESULT),
    Operation("noop", 24, (), ""),
    Operation("get_experimental", 32, (), []),
    Operation("kvshm_hello", None, (_text,), NO_RESULT),
    Operation(
        "kvshm_register_server_driven",
        None,
        (_instance, _identity, _wrappers, _text, _mapping, _engine_groups, _null_block),
        NO_RESULT,
    ),
    Operation("kvshm_register_engine_driven", None, (_instance, _identity, _object_layouts, _text), {}),
    Operation("kvshm_unregister", None, (_instance,), NO_RESULT),
    # Tokens in a frame of their own: reading them as part of a map takes longer than looking them up.
    Operation("kvshm_lookup", None, (_instance, _optional(_text), _tokens), 0),
    Operation("kvshm_count", None, (_instance, _tokens), 0),
    Operation("kvshm_release", None, (_instance, _optional(_text), _optional(_tokens)), NO_RESULT),
    Operation("kvshm_store", None, (_instance, _tokens, _block_ids, _deadline), 0),
    Operation(
        "kvshm_retrieve",
        None,
        (_instance, _optional(_text), _tokens, _block_ids, _integer(0), _deadline),
        False,
    ),
    Operation("kvshm_settle", None, (_instance,), NO_RESULT),
    Operation("kvshm_prepare_store", None, (_instance, _text, _tokens, _chunk_indices), {}),
    Operation("kvshm_commit_store", None, (_instance, _text), 0),
    Operation("kvshm_prepare_retrieve", None, (_instance, _optional(_text), _text, _tokens), []),
    Operation("kvshm_commit_retrieve", None, (_instance, _text), False),
    Operation("kvshm_give_back", None, (_instance, _text), NO_RESULT),
    Operation("kvshm_status", None, (), NO_RESULT),
)

_BY_NAME: dict[int | str, Operation] = {operation.name: operation for operation in OPERATIONS}
_BY_NAME |= {operation.id: operation for operation in OPERATIONS if operation.id is not None}
_BIN32, _BIN32_HEAD = b"\xc6", 5
_BY_FRAME = {wire.pack(name): operation for name, operation in _BY_NAME.items()}


def is_uid_frame(frame: bytes) -> bool:
    """Whether a frame is one MessagePack integer, so that the reply can carry it back byte by byte."""
    if len(frame) == 1:
        return frame[0] < 0x80 or frame[0] >= 0xE0
    return 0 < len(frame) <= 9 and len(frame) == 1 + _INTEGER_NBYTES.get(frame[0], 0)


_INTEGER_NBYTES = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}


def operation_of(frame: bytes) -> Operation:
    """The operation that a frame names, by its integer or by its name.

    Raises:
        ProtocolError: It names none.
    """
    operation = _BY_FRAME.get(frame)
    if operation is not None:
        return operation
    name = _decode(frame, "the operation")
    if type(name) in (int, str) and name in _BY_NAME:
        return _BY_NAME[name]
    raise _refuse(name, "the operation", "one that this server knows")


def parse_payload(operation: Operation, frames: Sequence[bytes]) -> list[Any]:
    """The arguments of an operation; optional ones that were not sent are left out.

    Raises:
        ProtocolError: Too many or too few frames, or one that is not what the operation takes.
    """
    most = len(operation.payload)
    if not frames and not most:
        return []
    if not most - operation.num_optional <= len(frames) <= most:
        raise ProtocolError(
            f"{operation.name} takes {most - operation.num_optional} to {most} payload frames; {len(frames)} came"
        )
    return [
        read(_decode(frame, f"payload {index}"), f"payload {index} of {operation.name}")
        for index, (read, frame) in enumerate(zip(operation.payload, frames, strict=False))
    ]


def _decode(frame: bytes, name: str) -> Any:
    if frame[:1] == _BIN32 and len(frame) >= _BIN32_HEAD and int.from_bytes(frame[1:5], "big") == len(frame) - 5:
        return frame[_BIN32_HEAD:]
    try:
        return wire.unpack(frame)
    except wire.WireError as error:
        raise ProtocolError(f"{name} is no MessagePack value: {error}") from None


# Writing


def encode_key(key: CacheKey, *, as_bytes: bool) -> dict[str, Any]:
    """The map of a key; token ids as bytes for a kvshm server, as an array for LMCache's."""
    token_ids = key.token_ids.tobytes() if as_bytes else key.token_ids.tolist()
    return {
        "model_name": key.model_name,
        "world_size": key.world_size,
        "worker_id": key.worker_id,
        "token_ids": token_ids,
        "start": key.start,
        "end": key.end,
        "request_id": key.request_id,
        "cache_salt": key.cache_salt,
        "request_configs": None if key.request_configs is None else dict(key.request_configs),
        "num_kv_readers": key.num_kv_readers,
    }


def encode_block_ids(block_ids: Sequence[Ints], *, as_bytes: bool) -> list[Any]:
    """Block ids per kernel group, as above."""
    arrays = [int64_array(ids, f"block_ids[{index}]") for index, ids in enumerate(block_ids)]
    return [array.tobytes() if as_bytes else array.tolist() for array in arrays]
