"""A paged cache whose arrays are mapped here: what a transfer reads and writes, and how it is laid out in chunks."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from kvshm.contiguity import ArrayTree
from kvshm.formats.detect import EngineType, LayoutHints, normalize_and_discover_per_layer_formats
from kvshm.formats.leaves import leaves_of
from kvshm.formats.names import EngineKVFormat
from kvshm.layout.engine_groups import EngineGroupInfo, engine_group_layer_indices
from kvshm.layout.groups import KVLayerGroupsManager
from kvshm.planes import PagedPlane, group_planes
from kvshm.plans import ObjectGroupPlan, make_plan
from kvshm.shm.objects import SHM_DIR
from kvshm.wrapper import ShmArrayWrapper

__all__ = ["MappedCache"]

Array: TypeAlias = "np.ndarray[Any, Any]"

log = logging.getLogger("kvshm")


class MappedCache:
    """A paged KV cache in this process's memory, laid out in chunks.

    Arguments and errors are those of :class:`kvshm.CPUCacheContext`, of which this is the core; ``chunk_size`` counts
    tokens.
    """

    def __init__(
        self,
        kv_caches: ArrayTree,
        chunk_size: int,
        layout_hints: LayoutHints | None = None,
        engine_group_infos: Sequence[EngineGroupInfo] = (),
        engine_type: EngineType | str = EngineType.VLLM,
        separate_object_groups: bool = True,
        full_sw_kv: bool = False,
    ) -> None:
        normalised, formats = normalize_and_discover_per_layer_formats(
            _mapped(kv_caches), engine_group_layer_indices(engine_group_infos), engine_type, layout_hints
        )
        layout = KVLayerGroupsManager(normalised, formats, engine_group_infos, chunk_size, separate_object_groups)
        if full_sw_kv:
            layout.enable_full_sw_kv()
        layout.freeze()  # plans hold offsets
        self._arrays: ArrayTree = normalised
        self._num_layers = len(formats)
        self._layout = layout
        self._planes: dict[int, tuple[PagedPlane, ...]] = {}
        self._plans: dict[int, ObjectGroupPlan] = {}
        _check_shm_capacity(sum(leaf.nbytes for leaf in leaves_of(normalised)))

    @property
    def layout(self) -> KVLayerGroupsManager:
        """Kernel groups and object groups. Readable also when the cache is closed."""
        return self._layout

    @property
    def num_layers(self) -> int:
        """Layers registered, those in no group included."""
        return self._num_layers

    @property
    def arrays(self) -> ArrayTree:
        """The normalised arrays, views of the registered ones: a list, nested lists, or one bare.

        Raises:
            ValueError: It is closed.
        """
        if self._arrays is None:
            raise ValueError("the cache context is closed; register the cache again")
        return self._arrays

    def format_per_layer(self) -> list[EngineKVFormat | None]:
        """Format of each layer; None for a layer in no group."""
        formats: list[EngineKVFormat | None] = [None] * self._num_layers
        for group in self._layout.kernel_groups:
            for layer in group.layer_indices:
                formats[layer] = group.format
        return formats

    def planes(self, kernel_group_idx: int) -> tuple[PagedPlane, ...]:
        """The strided views of a kernel group's layers and planes, in the order of a chunk; made once.

        Raises:
            IndexError: No such group.
            ValueError: It is closed.
        """
        planes = self._planes.get(kernel_group_idx)
        if planes is None:
            group = self._layout.kernel_group(kernel_group_idx)
            num_slots = self._layout.get_slots_per_chunk_in_sw(kernel_group_idx)
            planes = self._planes[kernel_group_idx] = tuple(group_planes(self.arrays, group, num_slots))
        return planes

    def plan(self, object_group_idx: int) -> ObjectGroupPlan:
        """What transfers of an object group need to know; worked out once. Raises as :meth:`planes`."""
        plan = self._plans.get(object_group_idx)
        if plan is None:
            plan = self._plans[object_group_idx] = make_plan(self._layout, self.planes, object_group_idx)
        return plan

    def forget_plans(self) -> None:
        """Work plans out anew the next time, as :mod:`kvshm.bench` does to measure it."""
        self._plans = {}

    def __repr__(self) -> str:
        groups = self._layout.kernel_groups
        formats = dict.fromkeys(group.format.name for group in groups if group.format is not None)
        return (
            f"{type(self).__name__}({self._num_layers} layers of {', '.join(formats)}, "
            f"{self._layout.num_blocks} blocks, chunks of {self._layout.lmcache_tokens_per_chunk} tokens"
            f"{', closed' if self._arrays is None else ''})"
        )

    def close(self) -> None:
        """Drop the arrays; idempotent. Sizes stay readable.

        A mapping goes with the last view of it, also those handed out before.
        """
        self._arrays = None
        self._planes = {}
        self._plans = {}


def _mapped(kv_caches: ArrayTree) -> ArrayTree:
    """The same structure with descriptors mapped."""
    if isinstance(kv_caches, ShmArrayWrapper):
        return kv_caches.to_array()
    if isinstance(kv_caches, np.ndarray):
        return kv_caches
    if isinstance(kv_caches, Sequence) and not isinstance(kv_caches, (str, bytes)):
        return [_mapped(item) for item in kv_caches]
    raise ValueError(
        f"expected ShmArrayWrappers or arrays in lists, not {type(kv_caches).__name__}; wrap an array with kvshm.wrap"
    )


def _check_shm_capacity(kv_nbytes: int) -> None:
    try:
        status = os.statvfs(SHM_DIR)
    except OSError:
        return  # no such mount, so nothing to be short of
    if kv_nbytes > status.f_bavail * status.f_frsize:
        _warn_of_small_shm(kv_nbytes, status.f_blocks * status.f_frsize)


@lru_cache(maxsize=256)
def _warn_of_small_shm(kv_nbytes: int, total_nbytes: int) -> None:
    """Cached, so that each distinct warning is logged once."""
    log.warning(
        "a KV cache of %d bytes is registered, and less than that is free in %s (%d bytes in total): an engine that "
        "restarts before this one ends will not fit. Enlarge it: mount -o remount,size=<N>G %s, docker run "
        "--shm-size=<N>g, or an emptyDir of medium Memory in Kubernetes",
        kv_nbytes,
        SHM_DIR,
        total_nbytes,
        SHM_DIR,
    )
