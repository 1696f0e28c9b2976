"""Handles on segments of shared memory: create, attach, make arrays, unlink.

:mod:`kvshm.shm.mappings` keeps what this process has mapped, :mod:`kvshm.shm.objects` the names. Knows nothing of
what arrays mean.
"""

from __future__ import annotations

import errno
import operator
from collections.abc import Sequence
from types import TracebackType
from typing import Any, ClassVar, Literal

import numpy as np

from kvshm.dtypes import DTypeLike, as_dtype
from kvshm.shm import pages
from kvshm.shm.mappings import (
    HUGE_PAGE_SIZE,
    READY_TIMEOUT_S,
    Mapping,
    attach_mapping,
    create_mapping,
    current_process,
    unlink_owned,
)
from kvshm.shm.objects import SHM_NAME_PREFIX, SegmentInfo, list_segments, posix_name, sweep
from kvshm.spec import ArraySpec, dense_strides
from kvshm.units import checked_seconds

__all__ = ["SHM_NAME_PREFIX", "HugePages", "Segment", "SegmentInfo", "Shape", "as_shape", "list_segments", "sweep"]

HugePages = Literal["try", "require"] | None
Shape = int | Sequence[int]


def as_shape(shape: Shape) -> tuple[int, ...]:
    """A shape as NumPy takes it, one number or several, as a tuple of ints."""
    return (operator.index(shape),) if isinstance(shape, (int, np.integer)) else tuple(map(operator.index, shape))


class Segment:
    """A handle on one named segment.

    :meth:`create` and :meth:`attach` make it. The pages stay mapped while this handle or any array made from them
    lives. As a context manager, leaving it unlinks the name; arrays live on.
    """

    SHM_NAME_PREFIX: ClassVar[str] = SHM_NAME_PREFIX
    __slots__ = ("_creator", "_mapping", "_nbytes")

    def __init__(self, mapping: Mapping, nbytes: int, creator: object = None) -> None:
        self._mapping = mapping
        self._nbytes = nbytes
        self._creator = creator

    @classmethod
    def create(
        cls,
        nbytes: int,
        name: str | None = None,
        mode: int = 0o600,
        reserve: bool = True,
        *,
        hugepages: HugePages = None,
    ) -> Segment:
        """Create a segment of ``nbytes`` bytes of zeros, all of its pages reserved.

        Args:
            name: With or without the leading slash; None makes a random one of at most 30 characters. Names that do
                not begin with ``SHM_NAME_PREFIX`` are not seen by :func:`list_segments` and :func:`sweep`.
            mode: Permissions, whatever the umask.
            reserve: False leaves pages to be found when first written, which kills the writer (SIGBUS) if there
                are none left.
            hugepages: "try" asks the kernel for transparent huge pages, and :attr:`huge_nbytes` says how many
                it gave; "require" makes it an error if any whole one is missing.

        Raises:
            FileExistsError: The name is taken.
            ShmFullError: There is no room for it (an OSError with errno ENOSPC).
            ValueError, PermissionError, OSError: As their text says. Nothing is left of the attempt.
        """
        nbytes = operator.index(nbytes)
        segment = cls(create_mapping(nbytes, name, mode, reserve=reserve), nbytes, current_process())
        if hugepages is not None:
            try:
                segment._make_huge(is_required=hugepages == "require")
            except BaseException:
                segment.unlink()
                raise
        return segment

    @classmethod
    def attach(
        cls, name: str, nbytes: int | None = None, *, readonly: bool = False, timeout_s: float = READY_TIMEOUT_S
    ) -> Segment:
        """Attach to an existing segment.

        Args:
            name: With or without the leading slash.
            nbytes: How many bytes of it are meant (there may be more); None means all.
            readonly: Map without the right to write; arrays are not writeable.
            timeout_s: How long to wait for a segment that is still being made; 0 does not wait.

        Raises:
            FileNotFoundError: No such segment.
            PermissionError, TimeoutError, OSError: As their text says.
            ValueError, TypeError: It is smaller than ``nbytes``, the name is invalid, or the time is no time.
        """
        timeout_s = checked_seconds("timeout_s", timeout_s, is_zero_allowed=True)
        nbytes = None if nbytes is None else operator.index(nbytes)
        if nbytes is not None and nbytes < 1:
            raise ValueError(f"nbytes must be at least 1 or None, not {nbytes}")
        mapping = attach_mapping(posix_name(name), nbytes, readonly=readonly, timeout_s=timeout_s)
        return cls(mapping, mapping.nbytes if nbytes is None else nbytes)

    @property
    def name(self) -> str:
        """The name, with its slash."""
        return self._mapping.name

    @property
    def nbytes(self) -> int:
        """The length in bytes."""
        return self._nbytes

    @property
    def address(self) -> int:
        """Where its first byte lies in this process."""
        return self._mapping.address

    @property
    def huge_nbytes(self) -> int:
        """How many bytes of it this process reaches by huge pages now."""
        return pages.num_huge_bytes(self.address, self.address + self._mapping.nbytes)

    def _make_huge(self, *, is_required: bool) -> None:
        wanted = self.nbytes // HUGE_PAGE_SIZE * HUGE_PAGE_SIZE if HUGE_PAGE_SIZE else self.nbytes
        cause = None
        if HUGE_PAGE_SIZE and wanted:
            try:
                pages.make_huge(self.address, wanted)
            except OSError as error:
                cause = error
        if is_required and self.huge_nbytes < wanted:
            raise OSError(
                errno.EOPNOTSUPP,
                f"huge pages were required for {wanted} bytes but the kernel gave them for {self.huge_nbytes}; take "
                f"hugepages='try', or make them possible: Linux 6.1 or newer, memory that is not fragmented, and "
                f"/sys/kernel/mm/transparent_hugepage/shmem_enabled not on 'deny'",
            ) from cause

    @property
    def is_owner(self) -> bool:
        """Whether this handle created the segment, in this process: then, and only then, :meth:`unlink` does."""
        return self._creator is current_process()

    def array(
        self, shape: Shape, dtype: DTypeLike, stride: Sequence[int] | None = None, offset: int = 0
    ) -> np.ndarray[Any, Any]:
        """An array over these bytes, which keeps them mapped.

        Args:
            stride: Elements per step along each axis; None means C-contiguous.
            offset: Elements before index (0, ..., 0).

        Raises:
            ValueError: It does not fit in the segment.
        """
        sizes = as_shape(shape)
        steps = dense_strides(sizes) if stride is None else as_shape(stride)
        spec = ArraySpec(sizes, steps, operator.index(offset), as_dtype(dtype))
        if spec.byte_span > self._nbytes:
            raise ValueError(
                f"array of shape {spec.shape} and stride {spec.stride} ({spec.dtype}) needs bytes "
                f"[0, {spec.byte_span}) but segment {self.name!r} has {self._nbytes}; create it with nbytes >= "
                f"{spec.byte_span}"
            )
        return spec.view(self._mapping.bytes()[: self._nbytes])

    def unlink(self) -> None:
        """Remove the name, once. Nothing happens in a process or by a handle that did not create the segment."""
        if self.is_owner:
            unlink_owned(self._mapping.key)

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.unlink()

    def __repr__(self) -> str:
        return f"Segment(name={self.name!r}, nbytes={self.nbytes}, is_owner={self.is_owner})"
