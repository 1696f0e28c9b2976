"""The cache client: a link to a cache server, kvshm's own or a real LMCache server, and the engines behind it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import numpy as np

from kvshm.client.connections import CacheServerError, ServerTimeoutError, ServerUnreachableError
from kvshm.client.engine import Engine
from kvshm.client.link import ServerLink
from kvshm.client.operations import PlainOperations, ServerInfo
from kvshm.client.transfers import EngineDrivenTransfers, Registered, ServerDrivenTransfers, Transfers
from kvshm.context import CPUCacheContext
from kvshm.formats import EngineType
from kvshm.layout import EngineGroupInfo
from kvshm.wrapper import ShmArrayWrapper, wrap

__all__ = ["CacheClient", "CacheServerError", "ServerTimeoutError", "ServerUnreachableError"]

TransferMode = Literal["lmcache_driven", "engine_driven"]


class CacheClient(PlainOperations):
    """A client of a cache server on this host; connects when it is first needed.

    Safe for threads. In a forked child the plain operations connect anew; engines are their parent's.

    Args:
        url: ``tcp://localhost:5555`` or ``ipc://PATH``, of ``kvshm serve`` or of a real LMCache server.
        timeout_s: How long a request may take.
        connect_timeout_s: How much of that may go into finding the server.
        heartbeat_s: How often a registered engine gives a sign of life.
        raises: Engines raise what goes wrong with the server instead of missing.

    Raises:
        ValueError: The url is none, or a time is not positive.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float = 10.0,
        *,
        connect_timeout_s: float = 1.0,
        heartbeat_s: float = 5.0,
        raises: bool = False,
    ) -> None:
        if not isinstance(url, str) or not url.startswith(("tcp://", "ipc://")):
            raise ValueError(f"url {url!r} is none; give tcp://HOST:PORT or ipc://PATH")
        for name, value in (
            ("timeout_s", timeout_s),
            ("connect_timeout_s", connect_timeout_s),
            ("heartbeat_s", heartbeat_s),
        ):
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be positive")
        self._raises = raises
        self._link = ServerLink(url, timeout_s, connect_timeout_s, heartbeat_s)
        self._connections = self._link.connections
        # Also at interpreter exit. The heartbeat holds the link and not the client, so a dropped client is closed.
        self._closing = weakref.finalize(self, self._link.close)

    @property
    def url(self) -> str:
        """The server's address."""
        return self._connections.url

    @property
    def is_up(self) -> bool:
        """Whether the server answered when it was last asked."""
        return self._link.is_up

    @property
    def last_error(self) -> str | None:
        """What went wrong last."""
        return self._link.last_error

    def server_info(self) -> ServerInfo:
        """What the server is.

        Raises:
            ServerTimeoutError, ServerUnreachableError, CacheServerError: As their text says.
        """
        return self._link.info()

    def register(
        self,
        kv_caches: Any,
        model_name: str,
        *,
        layout_hints: Mapping[str, Any] | None = None,
        engine_type: EngineType | str = EngineType.VLLM,
        engine_group_infos: Sequence[EngineGroupInfo] = (),
        world_size: int = 1,
        worker_id: int = 0,
        transfer_mode: TransferMode = "lmcache_driven",
        cache_salt: str = "",
        null_block_id: int = 0,
    ) -> Engine:
        """Register an engine's paged cache.

        Args:
            kv_caches: Arrays or their descriptors, in a list, nested or one bare, as the format is. The server maps
                them, so arrays must lie in shared memory or be fit to move there (:func:`kvshm.wrap`);
                with ``transfer_mode="engine_driven"`` this process copies, and any arrays will do.
            layout_hints: What the engine knows of its layout, such as ``{"kv_layout": "NHD"}``.
            engine_group_infos: One per kernel group, for hybrid models.
            world_size, worker_id: Workers that share a prompt's KV; this one among them.
            cache_salt: Engines with different salts do not share.
            null_block_id: Of ``engine_driven``: the block that stands for no data. Else the server knows it.

        Raises:
            ValueError: The layout is not known, does not fit the server's chunks, or is not in shared memory.
            CacheServerError: The server refuses it, and says why.
            ServerTimeoutError, ServerUnreachableError: The server is not there.
        """
        if transfer_mode not in ("lmcache_driven", "engine_driven"):
            raise ValueError(f"transfer_mode is {transfer_mode!r}; give 'lmcache_driven' or 'engine_driven'")
        if not 0 <= worker_id < world_size:
            raise ValueError(f"worker_id {worker_id} is not in [0, world_size {world_size})")
        if self._link.is_inherited:
            raise RuntimeError(
                "this client was made by the parent of this process, and its heartbeat did not come along; make a "
                "client here and register with it"
            )
        info = self._link.info()
        engine_type = EngineType(engine_type)
        is_engine_driven = transfer_mode == "engine_driven"
        wrappers = None if is_engine_driven else _wrapped(kv_caches)
        context = CPUCacheContext(
            kv_caches if wrappers is None else wrappers,
            info.chunk_size,
            dict(layout_hints or {}) or None,
            engine_group_infos,
            engine_type,
            # An engine that copies by itself has one object a chunk, whole.
            separate_object_groups=not is_engine_driven,
            full_sw_kv=is_engine_driven,
        )
        transfers: Transfers
        if wrappers is None:
            transfers = EngineDrivenTransfers(self._link, context, model_name, world_size, null_block_id)
        else:
            registered = Registered(
                wrappers,
                kv_caches,
                model_name,
                world_size,
                engine_type.value,
                dict(layout_hints or {}),
                tuple(engine_group_infos),
                tuple(group.shape_desc.nb for group in context.kv_layer_groups_manager.kernel_groups),
            )
            transfers = ServerDrivenTransfers(self._link, registered)
            context.close()
        engine = Engine(
            self._link,
            transfers,
            context.kv_layer_groups_manager,
            model_name,
            world_size,
            worker_id,
            cache_salt,
            self._raises,
        )
        engine.register_with(info)
        return engine

    def close(self) -> None:
        """Unregister what is registered, within half a second, and close; idempotent."""
        self._closing()

    def __enter__(self) -> CacheClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _wrapped(kv_caches: Any) -> Any:
    """Descriptors in place of arrays, in the same nesting."""
    if isinstance(kv_caches, ShmArrayWrapper):
        return kv_caches
    if isinstance(kv_caches, np.ndarray):
        return wrap(kv_caches)
    if isinstance(kv_caches, list | tuple):
        return [_wrapped(item) for item in kv_caches]
    raise ValueError(f"kv_caches holds {type(kv_caches).__name__}; give arrays or ShmArrayWrapper, or lists of them")
