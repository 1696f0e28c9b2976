"""Paged KV caches of LLM engines, shared between processes over POSIX shared memory, without PyTorch."""

from kvshm import posix_shm, wire
from kvshm._version import __version__
from kvshm.capacity import ShmFullError
from kvshm.context import CPUCacheContext
from kvshm.registry import register_wrapper, resolve_wrapper_factory
from kvshm.shm import Segment, SegmentInfo, list_segments, sweep
from kvshm.stream import HostEvent, HostStream
from kvshm.wrapper import (
    ShmArrayWrapper,
    WireError,
    empty,
    empty_many,
    is_shared,
    migrate_to_shm_and_wrap,
    share,
    wrap,
    zeros,
)

__all__ = [
    "CPUCacheContext",
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
    "is_shared",
    "list_segments",
    "migrate_to_shm_and_wrap",
    "posix_shm",
    "register_wrapper",
    "resolve_wrapper_factory",
    "share",
    "sweep",
    "wire",
    "wrap",
    "zeros",
]
