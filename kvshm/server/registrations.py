"""Registered engines: whose cache a request is about, how its chunks are laid out, and when its lease ends.

A registration is *server-driven* (the server maps the engine's cache and copies) or *engine-driven* (the engine copies
into slots of the server's pool). Its lease starts with the registration and is renewed by every request that names
it. While a copy runs on its memory it cannot go; what waits for that is called back. Not thread-safe: all of this
belongs to the server's loop.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from math import prod

from kvshm.context import CPUCacheContext
from kvshm.dtypes import dtype_from_name
from kvshm.layout import layout_fingerprint
from kvshm.prefix import CHUNK_HASH_NBYTES
from kvshm.protocol import NOT_REGISTERED, CacheKey, EngineDrivenSpec
from kvshm.store.chunk_store import Entry, Reservation

__all__ = [
    "ChunkLayout",
    "PreparedRead",
    "PreparedStore",
    "Registration",
    "Registrations",
    "context_layout",
    "engine_driven_layout",
    "object_keys",
]

_FINGERPRINT_NBYTES = 16


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """How the chunks of an engine are cut into objects, and a fingerprint of everything their bytes depend on."""

    fingerprint: bytes
    group_nbytes: tuple[int, ...]  # bytes of one chunk object, per object group
    group_windows: tuple[int, ...]  # last chunks that a hit needs, per object group; -1: all
    served_groups: tuple[int, ...]  # object groups that lookups and retrieves are about
    slot_shape: tuple[int, ...] = ()  # engine-driven: shape of a chunk's slot
    slot_dtype: str = ""

    def needed_chunks(self, object_group_idx: int, num_chunks: int) -> range:
        """Which of the first ``num_chunks`` chunks a hit of all of them needs in this group."""
        window = self.group_windows[object_group_idx]
        return range(0 if window < 0 else max(0, num_chunks - window), num_chunks)


def context_layout(context: CPUCacheContext) -> ChunkLayout:
    """The layout of a server-driven engine. The number of blocks and their padding are not part of it."""
    manager = context.kv_layer_groups_manager
    windows = manager.get_attn_desc()
    return ChunkLayout(
        layout_fingerprint(manager),
        tuple(manager.object_nbytes(index) for index in range(len(manager.object_groups))),
        windows.num_chunks_in_sw,
        tuple(index for index, kind in enumerate(windows.group_kinds) if kind != "aux"),
    )


def engine_driven_layout(spec: EngineDrivenSpec, chunk_size: int) -> ChunkLayout:
    """The layout of an engine that copies by itself: one object group, slots of [kv, layer, slot, hidden].

    Raises:
        ValueError: An unknown dtype, or chunks that no whole number of blocks makes.
    """
    dtype = dtype_from_name(spec.dtype_str)
    if chunk_size % spec.block_size:
        raise ValueError(
            f"chunks of {chunk_size} tokens are no whole number of blocks of {spec.block_size}; start the server with "
            f"a chunk size that is a multiple of {spec.block_size}"
        )
    slots = chunk_size if spec.num_physical_slots is None else spec.num_physical_slots
    shape: tuple[int, ...] = (spec.num_layers, slots, spec.hidden_dim_size)
    if not spec.use_mla:
        shape = (2, *shape)
    fingerprint = _fingerprint(
        chunk_size, "engine-driven", shape, spec.block_size, spec.dtype_str, spec.layout_fingerprint.hex()
    )
    return ChunkLayout(fingerprint, (prod(shape) * dtype.itemsize,), (-1,), (0,), shape, spec.dtype_str)


def _fingerprint(*facts: object) -> bytes:
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=_FINGERPRINT_NBYTES).digest()


def object_keys(
    key: CacheKey, worker_id: int, layout: ChunkLayout, object_group_idx: int, hashes: list[bytes]
) -> list[bytes]:
    """Under which keys the store has the chunks of these hashes, for one worker and object group."""
    identity = [key.model_name, key.world_size, worker_id, object_group_idx, key.cache_salt, layout.fingerprint.hex()]
    scope = hashlib.blake2b(json.dumps(identity).encode(), digest_size=CHUNK_HASH_NBYTES).digest()
    return [chunk_hash + scope for chunk_hash in hashes]


@dataclass(slots=True, eq=False)
class PreparedStore:
    """Slots that an engine was lent to write into; not visible until it commits."""

    reservation: Reservation
    result: dict[str, object]
    deadline: float


@dataclass(slots=True, eq=False)
class PreparedRead:
    """Slots that an engine reads from; held until it says that it is done."""

    entries: list[Entry]
    deadline: float


@dataclass(slots=True, eq=False)
class Registration:
    """One engine."""

    instance_id: int
    model_name: str
    world_size: int
    layout: ChunkLayout
    context: CPUCacheContext | None  # None: engine-driven
    registered_at: float
    last_seen: float
    life_sign: str = ""  # a segment that is in use as long as the engine's process lives
    has_pinged: bool = False
    num_running: int = 0  # copies on its memory
    prepared: dict[Hashable, PreparedStore] = field(default_factory=dict)
    reading: dict[Hashable, list[PreparedRead]] = field(default_factory=dict)
    on_idle: list[Callable[[], None]] = field(default_factory=list)

    def begin_copy(self) -> None:
        """A copy on this engine's memory starts."""
        self.num_running += 1

    def end_copy(self) -> None:
        """A copy on this engine's memory is over."""
        self.num_running -= 1
        if not self.num_running:
            waiting, self.on_idle = self.on_idle, []
            for callback in waiting:
                callback()

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Call back once no copy runs, now if none does."""
        if self.num_running:
            self.on_idle.append(callback)
        else:
            callback()


class Registrations:
    """All engines by instance id.

    Args:
        reap_after_s: How long an engine that ever pinged may be silent.
        grace_s: How long one that never pinged may be.
    """

    def __init__(self, reap_after_s: float, grace_s: float) -> None:
        self.reap_after_s = reap_after_s
        self.grace_s = grace_s
        self._by_id: dict[int, Registration] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Registration]:
        return iter(self._by_id.values())

    def add(self, registration: Registration) -> Registration | None:
        """Enter an engine; gives the one that had its id."""
        previous = self._by_id.pop(registration.instance_id, None)
        self._by_id[registration.instance_id] = registration
        return previous

    def remove(self, instance_id: int) -> Registration | None:
        """Take an engine out, if it is there."""
        return self._by_id.pop(instance_id, None)

    def get(self, instance_id: int, now: float) -> Registration:
        """The engine of an id, its lease renewed.

        Raises:
            KeyError: There is none.
        """
        registration = self._by_id.get(instance_id)
        if registration is None:
            raise KeyError(f"instance {instance_id} {NOT_REGISTERED}; register it (again)")
        registration.last_seen = now
        return registration

    def ping(self, instance_id: int, now: float) -> None:
        """Renew a lease; from now on silence is judged by the shorter limit."""
        registration = self._by_id.get(instance_id)
        if registration is not None:
            registration.last_seen = now
            registration.has_pinged = True

    def silent(self, now: float) -> list[Registration]:
        """Engines whose lease is over."""
        return [
            registration
            for registration in self._by_id.values()
            if now - registration.last_seen > (self.reap_after_s if registration.has_pinged else self.grace_s)
        ]

    def layouts(self, model_name: str, world_size: int) -> list[ChunkLayout]:
        """The different layouts of a model's engines, the latest registered first."""
        layouts = (
            registration.layout
            for registration in reversed(self._by_id.values())
            if (registration.model_name, registration.world_size) == (model_name, world_size)
        )
        return list(dict.fromkeys(layouts))
