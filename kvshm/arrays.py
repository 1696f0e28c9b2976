"""Arrays in shared memory: made there, or copied there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from kvshm.dtypes import DTypeLike, as_dtype
from kvshm.migrate import home_of
from kvshm.shm import segments as shm
from kvshm.shm.pages import round_to_pages
from kvshm.shm.segments import Shape, as_shape
from kvshm.spec import ArraySpec
from kvshm.wrapper import describe

__all__ = ["empty", "empty_many", "is_shared", "share", "zeros"]

Array = np.ndarray[Any, Any]


def is_shared(array: Array) -> bool:
    """Whether an array lies in a kvshm segment: then other processes can see it, and writing to it."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"expected a NumPy array, not {type(array).__name__}")
    try:
        return array.size > 0 and home_of(array) is not None
    except ValueError:  # some of it does
        return False


def share(array: Array | np.generic) -> Array:
    """``array`` itself if it lies in a segment and :func:`wrap` takes it; else a copy that does.

    A NumPy scalar is copied to an array of rank 0.

    Raises:
        ValueError: Its dtype has no name on the wire.
        OSError: No room for the copy.
    """
    if isinstance(array, np.generic):
        array = np.asarray(array)
    try:
        if describe(array, migrate=False) is not None:
            return array
    except ValueError:
        pass  # NumPy can copy more than a descriptor can say
    copy = empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def empty(shape: Shape, dtype: DTypeLike, *, name: str | None = None) -> Array:
    """A C-contiguous array in a segment of its own, page-aligned and zeroed.

    The segment's name goes when this process drops the last array on it, and when it exits.

    Args:
        dtype: A NumPy dtype or a wire name such as ``"bfloat16"``.
        name: The segment's; None makes a random one. Arrays without elements have no segment.

    Raises:
        FileExistsError: The name is taken.
        ShmFullError: There is no room (an OSError with errno ENOSPC).
        ValueError: The shape or dtype cannot be.
    """
    return empty_many([shape], [dtype], name=name)[0]


def zeros(shape: Shape, dtype: DTypeLike, *, name: str | None = None) -> Array:
    """Like :func:`empty`, whose fresh pages hold zeros as it is."""
    return empty(shape, dtype, name=name)


def empty_many(
    shapes: Iterable[Shape], dtypes: DTypeLike, *, name: str | None = None, hugepages: shm.HugePages = None
) -> list[Array]:
    """Arrays in one segment, in order, each at the start of a page: all layers of a cache.

    Args:
        dtypes: One dtype for all, or one for each shape.
        hugepages: As for :meth:`kvshm.Segment.create`.

    Raises:
        FileExistsError, ShmFullError, ValueError: As for :func:`empty`; also if the counts differ.
    """
    forms = [as_shape(shape) for shape in shapes]
    kinds = [as_dtype(kind) for kind in (dtypes if isinstance(dtypes, (list, tuple)) else [dtypes] * len(forms))]
    if len(forms) != len(kinds):
        raise ValueError(f"{len(forms)} shapes but {len(kinds)} dtypes; give one dtype for each, or one for all")
    starts, end = [], 0
    for form, kind in zip(forms, kinds, strict=True):
        starts.append(round_to_pages(end))
        end = starts[-1] + ArraySpec.dense(form, kind).nbytes
    segment = shm.Segment.create(end, name, hugepages=hugepages) if end else None
    return [
        np.empty(form, kind)
        if segment is None or 0 in form
        else segment.array(form, kind, offset=start // kind.itemsize)
        for form, kind, start in zip(forms, kinds, starts, strict=True)
    ]
