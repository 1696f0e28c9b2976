"""What an operator may choose of a server, and the defaults, which stand here alone."""

from __future__ import annotations

from dataclasses import dataclass

from kvshm.units import checked_seconds

__all__ = ["DEFAULTS", "Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What an operator may choose. Times in seconds.

    Raises:
        ValueError: A number that makes no sense.
    """

    capacity: int = 1 << 30  # bytes of chunk objects
    chunk_size: int = 256  # tokens
    null_block_id: int | None = 0  # None: there is none
    reap_after_s: float = 30.0  # silence of an engine that ever pinged
    grace_s: float = 3600.0  # silence of one that never did
    pin_ttl_s: float = 300.0  # of what a lookup found
    prepare_ttl_s: float = 600.0  # of slots lent to an engine without a liveness segment
    verify: bool = False  # gather twice and compare, to find engines that write to blocks while they are stored

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"capacity is {self.capacity} bytes; a cache needs at least 1")
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size is {self.chunk_size} tokens; it must be at least 1")
        for name in ("reap_after_s", "grace_s", "pin_ttl_s", "prepare_ttl_s"):
            checked_seconds(name, getattr(self, name))


DEFAULTS = Settings()
