"""What an engine says of its layers: groups that share one space of block ids.

Several infos may bear one engine group id: one info stands for one kernel group, and layers of one engine group that
differ in shape or dtype make several kernel groups over the same block ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvshm.integers import checked_int

__all__ = [
    "EXCLUDED_ENGINE_GROUP",
    "EngineGroupInfo",
    "checked_infos",
    "engine_group_layer_indices",
    "expand_engine_block_ids",
    "get_engine_group_indices",
    "num_engine_group_infos",
    "num_engine_groups",
]

EXCLUDED_ENGINE_GROUP = -1
"""In a list of group ids per layer: this layer is in no group, its blocks are another layer's."""


@dataclass(frozen=True, slots=True)
class EngineGroupInfo:
    """Layers whose KV is addressed by the same block ids, and what those blocks mean.

    Raises:
        ValueError: A field that is no integer (or no boolean), a negative id or layer, or a window that is neither -1
            nor positive.
    """

    engine_group_id: int
    layer_indices: tuple[int, ...] = ()
    tokens_per_block: int = 0  # tokens that one block id covers; 0 (or less): not reported, one token a slot
    sw_size_tokens: int = -1  # sliding window; -1: full attention
    extra_object_group_tag: int = 0  # not 0: not served with the regular groups, one object per tag and window
    recurrent_state: bool = False  # blocks hold snapshots of a recurrent state, not KV of tokens

    def __post_init__(self) -> None:
        for name in _INTEGERS:
            object.__setattr__(self, name, checked_int(getattr(self, name), f"{name} of an engine group"))
        try:
            layers = tuple(self.layer_indices)
        except TypeError:
            raise ValueError(
                f"invalid layer_indices of engine group {self.engine_group_id}: expected a sequence of integers, got "
                f"{self.layer_indices!r}"
            ) from None
        name = f"layer_indices of engine group {self.engine_group_id}"
        object.__setattr__(self, "layer_indices", tuple([checked_int(layer, name) for layer in layers]))
        if self.recurrent_state not in (False, True):
            raise ValueError(f"recurrent_state is {self.recurrent_state!r}; give True or False")
        object.__setattr__(self, "recurrent_state", bool(self.recurrent_state))
        if self.engine_group_id < 0:
            raise ValueError(f"engine_group_id {self.engine_group_id} is negative; count groups from 0")
        negative = [layer for layer in self.layer_indices if layer < 0]
        if negative:
            raise ValueError(f"engine group {self.engine_group_id} names layers {negative}; count layers from 0")
        if self.sw_size_tokens != -1 and self.sw_size_tokens < 1:
            raise ValueError(
                f"engine group {self.engine_group_id} has a sliding window of {self.sw_size_tokens} tokens; give -1 "
                f"for full attention, else a positive number"
            )


_INTEGERS = ("engine_group_id", "tokens_per_block", "sw_size_tokens", "extra_object_group_tag")


def checked_infos(groups: Sequence[EngineGroupInfo]) -> tuple[EngineGroupInfo, ...]:
    """The infos as a tuple.

    Raises:
        ValueError: It is no sequence of :class:`EngineGroupInfo`.
    """
    if isinstance(groups, Sequence) and all(isinstance(group, EngineGroupInfo) for group in groups):
        return tuple(groups)
    found = (
        next(type(group).__name__ for group in groups if not isinstance(group, EngineGroupInfo))
        if isinstance(groups, Sequence)
        else type(groups).__name__
    )
    raise ValueError(
        f"engine_group_infos holds {found}; give a list of kvshm.layout.EngineGroupInfo(engine_group_id, "
        f"layer_indices, ...), one per kernel group"
    )


def num_engine_groups(groups: Sequence[EngineGroupInfo]) -> int:
    """Spaces of block ids: one more than the highest group id, and 1 where none are given."""
    return max((group.engine_group_id + 1 for group in groups), default=1)


def num_engine_group_infos(groups: Sequence[EngineGroupInfo]) -> int:
    """Infos, and so kernel groups: 1 where none are given."""
    return len(groups) or 1


def engine_group_layer_indices(groups: Sequence[EngineGroupInfo]) -> list[list[int]]:
    """Per engine group id, its layers in rising order; empty where none are given.

    Raises:
        ValueError: Something in it is no :class:`EngineGroupInfo`.
    """
    groups = checked_infos(groups)
    if not groups:
        return []
    layers: list[list[int]] = [[] for _ in range(num_engine_groups(groups))]
    for group in groups:
        layers[group.engine_group_id].extend(group.layer_indices)
    return [sorted(group) for group in layers]


def get_engine_group_indices(groups: Sequence[EngineGroupInfo], num_registered_layers: int) -> list[int] | None:
    """Per layer its engine group id, or :data:`EXCLUDED_ENGINE_GROUP`. None where no groups or no layers are given.

    Raises:
        ValueError: A group names a layer that is not registered.
    """
    if num_registered_layers < 0:
        raise ValueError(f"num_registered_layers is {num_registered_layers}; it cannot be negative")
    if not groups or not num_registered_layers:
        return None
    indices = [EXCLUDED_ENGINE_GROUP] * num_registered_layers
    for group in groups:
        for layer in group.layer_indices:
            if layer >= num_registered_layers:
                raise ValueError(
                    f"engine group {group.engine_group_id} names layer {layer}, but {num_registered_layers} layers are "
                    f"registered (0 to {num_registered_layers - 1})"
                )
            indices[layer] = group.engine_group_id
    return indices


def expand_engine_block_ids(
    groups: Sequence[EngineGroupInfo], engine_side_block_ids: Sequence[Sequence[int]] | Sequence[int]
) -> list[list[int]]:
    """Block ids per engine group, or one flat list for the only group, as one list per kernel group.

    Raises:
        IndexError: An engine group has no list.
    """
    per_engine_group: list[list[int]]
    if len(engine_side_block_ids) and hasattr(engine_side_block_ids[0], "__len__"):
        per_engine_group = [list(ids) for ids in engine_side_block_ids]  # type: ignore[arg-type]
    else:
        per_engine_group = [list(engine_side_block_ids)]  # type: ignore[arg-type]
    wanted = [group.engine_group_id for group in groups] or [0]
    if max(wanted) >= len(per_engine_group):
        raise IndexError(
            f"engine group {max(wanted)} has no block ids: lists were given for {len(per_engine_group)} engine groups"
        )
    return [list(per_engine_group[engine_group]) for engine_group in wanted]
