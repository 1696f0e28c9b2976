"""Registered engines: whose chunks a request is about, how they are laid out, and when an engine's lease ends.

A registration is *server-driven* (the server maps the engine's cache and copies) or *engine-driven* (the engine copies
into slots of the server's pool). Its lease starts with the registration and is renewed by every request that names
it. While a copy runs on its memory it cannot go; what waits for that is called back. Not thread-safe: all of this
belongs to the server's loop.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod

from kvshm.cache import MappedCache
from kvshm.dtypes import dtype_from_name
from kvshm.formats.geometry import LATENT, PAGE, SPLIT
from kvshm.formats.vllm import INDEX_PAGE_WIDTH
from kvshm.layout import ObjectLayout
from kvshm.layout.chunk import KernelGroupMeaning, object_meaning
from kvshm.prefix import CHUNK_HASH_NBYTES
from kvshm.protocol import EngineDrivenSpec, EngineIdentity
from kvshm.server.hits import Need
from kvshm.server.loans import Holder
from kvshm.server.lookups import Scope

__all__ = [
    "EngineDriven",
    "LMCacheIdentity",
    "NotRegisteredError",
    "Registration",
    "Registrations",
    "ServerDriven",
    "SlotForm",
    "object_keys",
    "plain_object_layout",
    "scope_of_engine",
]

_MAX_STORED = 1000  # workers remembered after their engine has gone, and layouts of each; past this the first goes


class NotRegisteredError(LookupError):
    """There is no engine of an instance id (any more)."""


@dataclass(frozen=True, slots=True)
class SlotForm:
    """How LMCache's engines see a slot: an array of this shape and dtype."""

    shape: tuple[int, ...]
    dtype: str


def plain_object_layout(spec: EngineDrivenSpec, chunk_size: int) -> tuple[ObjectLayout, SlotForm]:
    """The chunks of an engine of LMCache's that copies by itself: one object each, [kv, layer, slot, hidden].

    One plane is a latent, since the protocol's word for it is MLA; rows of an index page are known by their width.

    Raises:
        ValueError: An unknown dtype, or chunks that no whole number of blocks or slots makes.
    """
    dtype = dtype_from_name(spec.dtype_str)
    if chunk_size % spec.block_size:
        raise ValueError(
            f"chunks of {chunk_size} tokens are no whole number of blocks of {spec.block_size}; start the server with "
            f"a chunk size that is a multiple of {spec.block_size}"
        )
    slots = chunk_size if spec.num_physical_slots is None else spec.num_physical_slots
    if chunk_size % slots:
        raise ValueError(f"chunks of {chunk_size} tokens cannot have {slots} slots; give a number that divides it")
    shape: tuple[int, ...] = (spec.num_layers, slots, spec.hidden_dim_size)
    if not spec.use_mla:
        shape = (2, *shape)
    is_page = spec.use_mla and (spec.dtype_str, spec.hidden_dim_size) == ("uint8", INDEX_PAGE_WIDTH)
    meaning = KernelGroupMeaning(
        kv_size=1 if spec.use_mla else 2,
        layers=tuple(range(spec.num_layers)),
        hidden_size=spec.hidden_dim_size,
        packing=(PAGE if is_page else LATENT if spec.use_mla else SPLIT,),
        dtype=spec.dtype_str,
        num_slots=slots,
        tokens_per_slot=chunk_size // slots,
        slots_per_block=spec.block_size if is_page else 0,
    )
    layout = ObjectLayout(object_meaning(chunk_size, (meaning,)), prod(shape) * dtype.itemsize)
    return layout, SlotForm(shape, spec.dtype_str)


def object_keys(scope: Scope, worker_id: int, layout: ObjectLayout, hashes: Iterable[bytes]) -> list[bytes]:
    """Under which keys the store has the chunks of these hashes: equal for engines that may share them.

    The size is part of it: a peer's word for what its chunks mean is not checked against it.
    """
    model_name, world_size, cache_salt = scope
    identity = [model_name, world_size, worker_id, cache_salt, layout.meaning.hex(), layout.nbytes]
    digest = hashlib.blake2b(json.dumps(identity).encode(), digest_size=CHUNK_HASH_NBYTES).digest()
    return [chunk_hash + digest for chunk_hash in hashes]


@dataclass(frozen=True, slots=True, eq=False)
class ServerDriven:
    """The server copies: it has the engine's cache mapped."""

    cache: MappedCache
    null_block_id: int | None  # None: there is none


@dataclass(frozen=True, slots=True, eq=False)
class EngineDriven:
    """The engine copies, into and out of slots of the pool that it is lent."""

    holder: Holder
    slot_form: SlotForm | None = None  # how an engine of LMCache's sees a slot; None: one of kvshm's


@dataclass(frozen=True, slots=True, eq=False)
class LMCacheIdentity:
    """What LMCache's client says of an engine. Which worker it is shows when it stores or retrieves."""

    model_name: str
    world_size: int
    workers: set[int]  # that it has been

    @classmethod
    def of(cls, model_name: str, world_size: int) -> LMCacheIdentity:
        """Of an engine that has just registered."""
        return cls(model_name, world_size, {0} if world_size == 1 else set())


@dataclass(slots=True, eq=False)
class Registration:
    """One engine: whose it is, who copies, and what its chunks are like."""

    instance_id: int
    client: bytes  # that registered it
    identity: EngineIdentity | LMCacheIdentity
    way: ServerDriven | EngineDriven
    objects: tuple[ObjectLayout, ...]
    last_seen: float
    has_pinged: bool = False
    num_running: int = 0  # copies on its memory
    on_idle: list[Callable[[], None]] = field(default_factory=list)

    @property
    def model(self) -> tuple[str, int]:
        """Model and world size."""
        return self.identity.model_name, self.identity.world_size

    @property
    def workers(self) -> set[int]:
        """Which workers it is known to be."""
        return {self.identity.worker_id} if isinstance(self.identity, EngineIdentity) else self.identity.workers

    def acts_as(self, worker_id: int) -> None:
        """An engine of LMCache's stores or retrieves as this worker."""
        if isinstance(self.identity, LMCacheIdentity):
            self.identity.workers.add(worker_id)

    @property
    def is_dead(self) -> bool:
        """Whether its process is known to be dead."""
        return isinstance(self.way, EngineDriven) and self.way.holder.is_dead

    @property
    def served(self) -> tuple[ObjectLayout, ...]:
        """What lookups and retrieves are about."""
        return tuple(layout for layout in self.objects if layout.is_served)

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


def scope_of_engine(identity: EngineIdentity) -> Scope:
    """Whose chunks an engine of kvshm's client stores and finds."""
    return identity.model_name, identity.world_size, identity.cache_salt


Layouts = tuple[ObjectLayout, ...]


class Registrations:
    """All engines by instance id, and what is known of the workers of a model.

    Args:
        reap_after_s: How long an engine that ever pinged may be silent.
        grace_s: How long one that never pinged may be.
    """

    def __init__(self, reap_after_s: float, grace_s: float) -> None:
        self.reap_after_s = reap_after_s
        self.grace_s = grace_s
        self._by_id: dict[int, Registration] = {}
        # In which layouts the workers of a model and world have stored. An engine of LMCache's does not say which
        # worker it is; one that comes back after a restart is recognised by this.
        self._stored: dict[tuple[str, int, int], dict[Layouts, None]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Registration]:
        return iter(list(self._by_id.values()))

    def add(self, registration: Registration) -> Registration | None:
        """Enter an engine; returns the one that had its id."""
        previous = self._by_id.pop(registration.instance_id, None)
        self._by_id[registration.instance_id] = registration
        return previous

    def remove(self, instance_id: int) -> Registration | None:
        """Take an engine out, if it is there."""
        return self._by_id.pop(instance_id, None)

    def get(self, instance_id: int, now: float) -> Registration:
        """The engine of an id, its lease renewed.

        Raises:
            NotRegisteredError: There is none.
        """
        registration = self._by_id.get(instance_id)
        if registration is None:
            raise NotRegisteredError(f"instance {instance_id} is not registered with this server; register it (again)")
        registration.last_seen = now
        return registration

    def ping(self, instance_id: int, now: float) -> None:
        """Renew a lease; from now on silence is judged by the shorter limit."""
        registration = self._by_id.get(instance_id)
        if registration is not None:
            registration.last_seen = now
            registration.has_pinged = True

    def silent(self, now: float) -> list[Registration]:
        """Engines whose lease is over, and those whose process is known to be dead."""
        return [
            registration
            for registration in self._by_id.values()
            if now - registration.last_seen > (self.reap_after_s if registration.has_pinged else self.grace_s)
            or registration.is_dead
        ]

    def models_of(self, client: bytes) -> set[tuple[str, int]]:
        """Model and world size of the engines that a client registered."""
        return {each.model for each in self._by_id.values() if each.client == client}

    def has_stored(self, registration: Registration, worker_id: int) -> None:
        """An engine has stored as this worker."""
        if isinstance(registration.identity, EngineIdentity):
            return  # it says which worker it is
        worker = (*registration.model, worker_id)
        of_worker = self._stored.setdefault(worker, {})
        of_worker[registration.served] = None
        if len(of_worker) > _MAX_STORED:
            del of_worker[next(iter(of_worker))]
        if len(self._stored) > _MAX_STORED:
            del self._stored[next(iter(self._stored))]

    def needs_of(self, registration: Registration, workers: Iterable[int]) -> list[Need]:
        """What a hit of an engine needs: its own objects, and those of each other worker.

        Another worker is asked for in the asking engine's layout, if an engine of that worker has it or none is
        known: then the others there are replicas of another kind. A pipeline stage has other layers; it is asked for in
        all layouts that its engines have, since nothing says which of them belongs to the asking one.
        """
        needs: list[Need] = []
        for worker_id in workers:
            layouts: list[Layouts] = []
            if worker_id not in registration.workers:
                layouts = self._layouts(*registration.model, worker_id)
            if not layouts or registration.served in layouts:
                layouts = [registration.served]
            needs += [Need(worker_id, layout) for objects in layouts for layout in objects]
        return needs

    def needs_of_all(self, model_name: str, world_size: int, workers: Iterable[int]) -> list[Need]:
        """What a hit needs that any engine registered as one of these workers can retrieve.

        Empty: one of them has no engine.
        """
        needs: list[Need] = []
        for worker_id in workers:
            layouts = self._layouts(model_name, world_size, worker_id)
            if not layouts:
                return []
            needs += [Need(worker_id, layout) for objects in layouts for layout in objects]
        return needs

    def _layouts(self, model_name: str, world_size: int, worker_id: int) -> list[Layouts]:
        """The different layouts of the engines that are this worker, or that may be."""
        of_model = [each for each in self._by_id.values() if each.model == (model_name, world_size)]
        known = dict.fromkeys(each.served for each in of_model if worker_id in each.workers)
        if known:
            return list(known)
        stored = self._stored.get((model_name, world_size, worker_id), {})
        return list(dict.fromkeys(each.served for each in of_model if not each.workers and each.served in stored))
