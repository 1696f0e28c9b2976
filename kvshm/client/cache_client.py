"""The cache client: a link to a cache server, kvshm's own or a real LMCache server, and the engines behind it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import numpy as np

from kvshm.client.connections import (
    CacheServerError,
    ServerGoneError,
    ServerTimeoutError,
    ServerUnreachableError,
    checked_url,
)
from kvshm.client.engine import Engine
from kvshm.client.link import Pace, ServerLink
from kvshm.client.operations import PlainOperations, ServerInfo
from kvshm.client.registration import Registration, TransferMode
from kvshm.client.sessions import EngineCache
from kvshm.formats import EngineType, normalize_and_discover_per_layer_formats
from kvshm.formats.detect import count_layers
from kvshm.formats.hints import checked_hints
from kvshm.formats.proof import check_is_told, check_layout_is_hinted
from kvshm.integers import checked_int
from kvshm.layout import EngineGroupInfo, engine_group_layer_indices
from kvshm.layout.engine_groups import checked_infos
from kvshm.protocol import EngineIdentity
from kvshm.spec import ArraySpec
from kvshm.units import checked_seconds
from kvshm.wrapper import ShmArrayWrapper, wrap

__all__ = ["CacheClient", "CacheServerError", "ServerTimeoutError", "ServerUnreachableError"]


class CacheClient(PlainOperations):
    """A client of a cache server on this host; connects when it is first needed.

    Safe for threads. In a forked child the plain operations connect anew; engines are their parent's.

    Args:
        url: ``tcp://localhost:5555`` or ``ipc://PATH``, of ``kvshm serve`` or of a real LMCache server.
        timeout_s: How long a request may take.
        connect_timeout_s: How much of that may go into finding the server.
        heartbeat_s: How often the leases of registered engines are renewed.
        probe_timeout_s: How long the server may take to answer the heartbeat before it counts as away.
        retry_s: When a server that is away is looked for again; the wait doubles each time, up to ``heartbeat_s``.
        raises: Engines raise what goes wrong with the server instead of missing.

    Raises:
        ValueError: The url is invalid, or a time is not finite and positive.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float = 10.0,
        *,
        connect_timeout_s: float = 1.0,
        heartbeat_s: float = 5.0,
        probe_timeout_s: float = 0.5,
        retry_s: float = 0.1,
        raises: bool = False,
    ) -> None:
        url = checked_url(url)
        timeout_s = checked_seconds("timeout_s", timeout_s)
        connect_timeout_s = checked_seconds("connect_timeout_s", connect_timeout_s)
        pace = Pace(heartbeat_s, probe_timeout_s, retry_s)
        self._raises = raises
        self._link = ServerLink(url, timeout_s, connect_timeout_s, pace)
        self._connections = self._link.connections
        # Also at interpreter exit. The heartbeat holds the link and not the client, so a dropped client is closed.
        self._closing = weakref.finalize(self, self._link.close)

    def __repr__(self) -> str:
        return f"CacheClient({self.url!r}, {'up' if self.is_up else 'not connected'})"

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
        null_block_id: int | Literal["server"] | None = "server",
        excluded_layers: Iterable[int] = (),
    ) -> Engine:
        """Register an engine's paged cache.

        Args:
            kv_caches: Arrays or their descriptors, in a list, nested or one bare, as the format is. The server maps
                them, so arrays must lie in shared memory or be fit to move there (:func:`kvshm.wrap`);
                with ``transfer_mode="engine_driven"`` this process copies, and any arrays will do.
            layout_hints: What the engine knows of its layout, such as ``{"kv_layout": "NHD"}``. What the shapes do not
                tell must be said: a layout is never guessed.
            engine_group_infos: One per kernel group, for hybrid models.
            world_size, worker_id: Workers that share a prompt's KV; this one among them.
            cache_salt: Engines with different salts do not share.
            null_block_id: The block that stands for no data; None: there is none. Else the server says which it is.
            excluded_layers: Layers that are in no engine group, and are neither stored nor retrieved.

        Raises:
            ValueError: The layout is not known or not told, does not fit the server's chunks, or is not in shared
                memory; a layer is in no group and not excluded; an argument of another kind.
            CacheServerError: The server refuses it, and says why.
            ServerTimeoutError, ServerUnreachableError: The server is not there.
        """
        if self._link.is_inherited:
            raise RuntimeError(
                "this client was made by the parent of this process, and its heartbeat did not come along; make a "
                "client here and register with it"
            )
        if transfer_mode not in ("lmcache_driven", "engine_driven"):
            raise ValueError(f"transfer_mode is {transfer_mode!r}; give 'lmcache_driven' or 'engine_driven'")
        identity = EngineIdentity(model_name, world_size, worker_id, cache_salt)
        null_block = _checked_null_block(null_block_id)
        engine, hints = EngineType(engine_type), checked_hints(layout_hints, is_strict=True)
        specs = _specs(kv_caches)
        num_layers = count_layers(specs, engine, hints)
        infos = _checked_groups(num_layers, engine_group_infos, excluded_layers)
        in_groups = engine_group_layer_indices(infos)
        looked_at = {layer for group in in_groups for layer in group} if infos else set(range(num_layers))
        check_layout_is_hinted(specs, looked_at, engine, hints)
        normalised, formats = normalize_and_discover_per_layer_formats(specs, in_groups, engine, hints)
        told = [format if layer in looked_at else None for layer, format in enumerate(formats)]
        check_is_told(specs, told, engine, hints)
        info = self._link.info()
        wrappers = None if transfer_mode == "engine_driven" else _wrapped(kv_caches)
        registration = Registration(
            self._link,
            EngineCache(kv_caches, wrappers, normalised, tuple(formats), hints, infos, engine),
            identity,
            transfer_mode,
            null_block,
            self._raises,
        )
        try:
            registration.register_with(info)
        except ServerGoneError:  # a restart that nobody has noticed yet
            registration.register_with(self._link.info(again=True))
        return Engine(registration, self, self._link.leave)

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
    return [_wrapped(item) for item in kv_caches]


def _specs(kv_caches: Any) -> Any:
    """Specs in place of arrays and descriptors, in the same nesting."""
    if isinstance(kv_caches, ShmArrayWrapper):
        return kv_caches.spec
    if isinstance(kv_caches, np.ndarray):
        return ArraySpec.of(kv_caches)
    if isinstance(kv_caches, list | tuple):
        return [_specs(item) for item in kv_caches]
    raise ValueError(f"kv_caches holds {type(kv_caches).__name__}; give arrays or ShmArrayWrapper, or lists of them")


def _checked_groups(
    num_layers: int, engine_group_infos: Sequence[EngineGroupInfo], excluded_layers: Iterable[int]
) -> tuple[EngineGroupInfo, ...]:
    """The engine groups, which hold every layer that is not excluded.

    Raises:
        ValueError: A layer is in none, or in one and excluded.
    """
    infos = checked_infos(engine_group_infos)
    try:
        excluded = {checked_int(layer, "excluded_layers") for layer in excluded_layers}
    except TypeError:
        raise ValueError(f"invalid excluded_layers: expected the indices of layers, got {excluded_layers!r}") from None
    unknown = sorted(layer for layer in excluded if not 0 <= layer < num_layers)
    if unknown:
        raise ValueError(f"excluded_layers names layers {unknown}, but the layers are 0 to {num_layers - 1}")
    if len(excluded) == num_layers:
        raise ValueError("excluded_layers names all layers, so nothing would be stored; leave some out of it")
    if not infos:
        rest = tuple(layer for layer in range(num_layers) if layer not in excluded)
        return (EngineGroupInfo(0, rest),) if excluded else ()
    in_groups = {layer for info in infos for layer in info.layer_indices}
    both = sorted(in_groups & excluded)
    if both:
        raise ValueError(f"layers {both} are in an engine group and in excluded_layers; leave them out of one")
    missing = sorted(set(range(num_layers)) - in_groups - excluded)
    if missing:
        raise ValueError(
            f"layers {missing} are in no engine group, so they would be neither stored nor retrieved; add them to an "
            f"EngineGroupInfo, or name them in excluded_layers if that is meant"
        )
    return infos


def _checked_null_block(null_block_id: Any) -> int | Literal["server"] | None:
    if null_block_id is None:
        return None
    if isinstance(null_block_id, str) and null_block_id == "server":
        return "server"
    block = checked_int(null_block_id, "null_block_id", "the id of a block, or None where there is none")
    if not -(2**63) < block < 2**63:
        raise ValueError(f"invalid null_block_id: expected an id of 64 signed bits, got {block}")
    return block
