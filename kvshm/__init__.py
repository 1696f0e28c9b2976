"""Paged KV caches of LLM engines, shared between processes over POSIX shared memory, without PyTorch."""

from kvshm._version import __version__

__all__ = ["__version__"]
