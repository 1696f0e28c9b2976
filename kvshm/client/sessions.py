"""A session: one engine's registration with one server, of one kind, with one way to copy.

Two kinds of servers (kvshm's and LMCache's) and two ways to copy (by the server, or by this process) make four classes,
in :mod:`kvshm.client.kvshm_server` and :mod:`kvshm.client.lmcache_server`. An engine has one session at a time; it is
made anew whenever the engine is registered, so nothing of one server is ever taken for something of another.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from kvshm.cache import MappedCache
from kvshm.client.operations import ServerInfo
from kvshm.client.requests import NotRegisteredError
from kvshm.formats import EngineKVFormat, EngineType
from kvshm.layout import BlockIds, EngineGroupInfo, KVLayerGroupsManager
from kvshm.shm.liveness import Liveness

__all__ = ["Copies", "EngineCache", "Session", "Tokens", "new_id"]

Tokens = NDArray[Any]
"""Token ids, little-endian int64, of whole chunks."""

_logger = logging.getLogger("kvshm")


class Session(Protocol):
    """What an engine needs of its server. All raise what :mod:`kvshm.client.requests` raises."""

    @property
    def info(self) -> ServerInfo:
        """The server."""

    @property
    def manager(self) -> KVLayerGroupsManager:
        """How the engine's chunks are laid out for this server."""

    @property
    def null_block_id(self) -> int | None:
        """The block that stands for no data; None: there is none."""

    def register(self) -> None:
        """Register the engine."""

    def unregister(self, timeout_s: float | None = None) -> bool:
        """Unregister the engine; returns whether the server touches nothing of it any more."""

    def close(self) -> None:
        """Unmap what is the server's, unless a copy runs."""

    def store(self, tokens: Tokens, ids: BlockIds) -> int:
        """Store the chunks that there is data of; returns how many a lookup finds then."""

    def count(self, tokens: Tokens) -> int:
        """Chunks that a lookup would find now. Pins nothing."""

    def lookup(self, tokens: Tokens, request_id: str | None) -> int:
        """Chunks found, pinned for one retrieve, or for that of every worker of the request."""

    def retrieve(self, tokens: Tokens, ids: BlockIds, skip_first_n_tokens: int, request_id: str | None) -> bool:
        """Write all chunks or (False) none."""

    def release(self, tokens: Tokens | None, request_id: str | None) -> None:
        """Give up what lookups pinned: of a request, else the latest of these tokens, else all."""

    def settle(self) -> None:
        """Catch up on what could not be said before; called now and then."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineCache:
    """What an engine registers: its arrays, alive as long as it is registered, and what it knows of them."""

    kv_caches: Any  # arrays or descriptors, nested as the engine's cache is
    wrappers: Any  # descriptors of the same; None: this process copies
    normalised: Any  # specs of the same, axes in memory order
    formats: tuple[EngineKVFormat, ...]  # per layer
    layout_hints: dict[str, Any]
    engine_group_infos: tuple[EngineGroupInfo, ...]
    engine_type: EngineType

    def layout(self, chunk_size: int) -> KVLayerGroupsManager:
        """The layout for chunks of this size. Maps nothing.

        Raises:
            ValueError: The cache does not fit the chunks.
        """
        return KVLayerGroupsManager(self.normalised, self.formats, self.engine_group_infos, chunk_size)

    def context(self, chunk_size: int, *, whole: bool = False) -> MappedCache:
        """The cache laid out for chunks of this size, to be copied from and to.

        Args:
            whole: One object a chunk, whole, whatever the windows.

        Raises:
            ValueError: The cache does not fit the chunks.
        """
        return MappedCache(
            self.kv_caches,
            chunk_size,
            self.layout_hints or None,
            self.engine_group_infos,
            self.engine_type,
            separate_object_groups=not whole,
            full_sw_kv=whole,
        )


class Copies:
    """Copies of this process between an engine's cache and slots that servers lent it. Outlives the engine's sessions.

    While this process lives, servers lend those slots to nobody else: :attr:`liveness` shows them that it does.
    """

    def __init__(self, instance_id: int) -> None:
        self._instance_id = instance_id
        self._changed = threading.Condition()
        self._num_running = 0  # that hold slots, or are about to
        self._is_over = False
        self._liveness: Liveness | None = None
        self.owed: set[str] = set()  # ids of what was lent and could not be given back yet

    @property
    def liveness(self) -> Liveness:
        """The engine's liveness segment; made when it is first needed."""
        if self._liveness is None:
            self._liveness = Liveness()
        return self._liveness

    @contextmanager
    def running(self) -> Iterator[None]:
        """From before slots are lent until they are given back: meanwhile the engine is not unregistered.

        Raises:
            NotRegisteredError: It is, for good.
        """
        with self._changed:
            if self._is_over:
                raise NotRegisteredError(f"instance {self._instance_id} was unregistered")
            self._num_running += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    def end(self, timeout_s: float) -> float | None:
        """Begin no more copies and wait until none runs; returns the time that is left, None if one still runs.

        The server lends the slots of an engine that unregisters to others at once.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._is_over = True
            if self._changed.wait_for(lambda: not self._num_running, timeout_s):
                return max(deadline - time.monotonic(), 0.0)
        _logger.warning(
            "kvshm: instance %d still copies, so it is not unregistered; the server takes its slots back when this "
            "process ends",
            self._instance_id,
        )
        return None

    def close(self) -> None:
        """Say that no slot is used any more, unless a copy runs: then the end of this process says it."""
        with self._changed:
            if not self._num_running and self._liveness is not None:
                self._liveness.close()


def new_id() -> str:
    """An id that nobody else will use."""
    return secrets.token_hex(16)
