"""Paged KV caches of LLM engines, shared between processes over POSIX shared memory, without PyTorch.

Public are the names in ``__all__`` here and in the modules that it names, ``kvshm.strategies`` and the command line;
``docs/api.md`` lists them. Everything else is private and may change.

The cache server and its client need the extra ``kvshm[server]``, without which their names are not there; they and the
transfers, with their threads, are loaded when first asked for.
"""

from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING, Any

from kvshm import formats, layout, posix_shm, wire
from kvshm._version import __version__
from kvshm.arrays import empty, empty_many, is_shared, share, zeros
from kvshm.context import CPUCacheContext
from kvshm.formats import EngineKVFormat, EngineType
from kvshm.layout import EngineGroupInfo
from kvshm.registry import register_wrapper, resolve_wrapper_factory
from kvshm.shm import Segment, SegmentInfo, list_segments, sweep
from kvshm.shm.capacity import ShmFullError
from kvshm.spec import ArraySpec
from kvshm.stream import HostEvent, HostStream
from kvshm.wrapper import ShmArrayWrapper, WireError, migrate_to_shm_and_wrap, wrap

if TYPE_CHECKING:
    from kvshm import transfer as transfer
    from kvshm.client.cache_client import CacheClient as CacheClient
    from kvshm.client.connections import CacheServerError as CacheServerError
    from kvshm.client.connections import ServerTimeoutError as ServerTimeoutError
    from kvshm.client.connections import ServerUnreachableError as ServerUnreachableError
    from kvshm.client.engine import Engine as Engine
    from kvshm.server.cache_server import CacheServer as CacheServer

__all__ = [
    "ArraySpec",
    "CPUCacheContext",
    "EngineGroupInfo",
    "EngineKVFormat",
    "EngineType",
    "HostEvent",
    "HostStream",
    "Segment",
    "SegmentInfo",
    "ShmArrayWrapper",
    "ShmFullError",
    "WireError",
    "__version__",
    "empty",
    "empty_many",
    "formats",
    "is_shared",
    "layout",
    "list_segments",
    "migrate_to_shm_and_wrap",
    "posix_shm",
    "register_wrapper",
    "resolve_wrapper_factory",
    "share",
    "sweep",
    "transfer",
    "wire",
    "wrap",
    "zeros",
]

if _find_spec("zmq"):
    __all__ += [
        "CacheClient",
        "CacheServer",
        "CacheServerError",
        "Engine",
        "ServerTimeoutError",
        "ServerUnreachableError",
    ]

# Where to find what is loaded on demand: a module, or a name in one.
_ON_DEMAND = {
    "CacheClient": "kvshm.client.cache_client",
    "CacheServer": "kvshm.server.cache_server",
    "CacheServerError": "kvshm.client.connections",
    "Engine": "kvshm.client.engine",
    "ServerTimeoutError": "kvshm.client.connections",
    "ServerUnreachableError": "kvshm.client.connections",
    "transfer": "kvshm.transfer",
}


def __getattr__(name: str) -> Any:
    """The names that are loaded on demand."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415  as late as what it imports

    try:
        module = import_module(_ON_DEMAND[name])
    except ModuleNotFoundError as error:
        if error.name != "zmq":
            raise
        raise ImportError(f"kvshm.{name} needs pyzmq: pip install 'kvshm[server]'") from None
    return getattr(module, name, module)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
