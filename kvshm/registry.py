"""Which class describes arrays of which kind of device.

Callers that move caches of any device ask here by device type; whoever adds a device registers its class. Memory of
the host is known from the start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvshm.wrapper import ShmArrayWrapper

__all__ = ["WrapperClass", "register_wrapper", "resolve_wrapper_factory"]


class WrapperClass(Protocol):
    """A descriptor class: its ``wrap`` makes the descriptor of an array."""

    def wrap(self, array: Any, /) -> Any:
        """The descriptor of ``array``."""


_wrappers: dict[str, WrapperClass] = {ShmArrayWrapper.device_type: ShmArrayWrapper}


def register_wrapper(device_type: str, cls: WrapperClass) -> None:
    """Let arrays on ``device_type`` be described by ``cls``; the last registration counts."""
    _wrappers[device_type] = cls


def resolve_wrapper_factory(device_type: str) -> Callable[[Any], Any]:
    """The function that describes an array on ``device_type``: the ``wrap`` of the registered class.

    Raises:
        LookupError: Nobody has registered that device type.
    """
    try:
        return _wrappers[device_type].wrap
    except KeyError:
        known = ", ".join(map(repr, sorted(_wrappers)))
        raise LookupError(
            f"no wrapper is registered for device type {device_type!r}; known are {known}. "
            f"kvshm.register_wrapper(device_type, cls) adds one"
        ) from None
