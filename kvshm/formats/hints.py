"""Layout hints: what an engine knows of its cache that shapes do not tell.

A hint that nobody reads is a mistake that shows only as wrong tokens, so unknown keys are refused.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, TypeAlias

__all__ = ["KNOWN_HINTS", "KV_LIST_LAYOUTS", "LayoutHints", "checked_hints", "is_heads_first", "positive_hint"]

LayoutHints: TypeAlias = Mapping[str, Any]
"""What an engine knows of its layout: ``kv_layout`` (vLLM), ``kv_list_layout`` and ``tokens_per_block`` (SGLang),
``num_kv_heads``, ``tokens_per_block`` and ``head_dim`` (TRT-LLM). Hints of other engines are not looked at."""

KNOWN_HINTS = ("kv_layout", "kv_list_layout", "tokens_per_block", "num_kv_heads", "head_dim")
_COUNTS = ("tokens_per_block", "num_kv_heads", "head_dim")
KV_LIST_LAYOUTS = ("k_v", "unified")
_HEADS_FIRST = {"NHD": False, "HND": True, "BLNHC": False, "BLHNC": True}


def checked_hints(layout_hints: LayoutHints | None, *, is_strict: bool = False) -> dict[str, Any]:
    """The hints as a dict; empty for None.

    Args:
        is_strict: Check also the values that this engine's layout does not depend on, and leave out those of None.

    Raises:
        ValueError: Not a mapping, a key that no engine knows, or a value of no meaning.
    """
    if layout_hints is None:
        return {}
    if not isinstance(layout_hints, Mapping):
        raise ValueError(
            f"layout_hints is {type(layout_hints).__name__}; give a mapping such as {{'kv_layout': 'NHD'}}, or None"
        )
    unknown = [key for key in layout_hints if key not in KNOWN_HINTS]
    if unknown:
        raise ValueError(
            f"unknown layout hints {', '.join(map(repr, unknown))}; known are {', '.join(map(repr, KNOWN_HINTS))}"
        )
    hints = dict(layout_hints)
    if is_strict:
        hints = {key: value for key, value in hints.items() if value is not None}
        is_heads_first(hints)
        list_layout = hints.get("kv_list_layout", KV_LIST_LAYOUTS[0])
        if not isinstance(list_layout, str) or list_layout not in KV_LIST_LAYOUTS:
            raise ValueError(
                f"layout hint 'kv_list_layout' is {list_layout!r}; it must be one of {', '.join(KV_LIST_LAYOUTS)}"
            )
        hints |= {key: positive_hint(hints, key) for key in _COUNTS if key in hints}
    return hints


def is_heads_first(hints: LayoutHints) -> bool | None:
    """Whether ``kv_layout`` says that a block has its heads outside its slots; None where it says nothing.

    Raises:
        ValueError: A layout of no known name.
    """
    hint = hints.get("kv_layout")
    if hint is None:
        return None
    if not isinstance(hint, str) or hint not in _HEADS_FIRST:
        raise ValueError(f"layout hint 'kv_layout' is {hint!r}; it must be one of {', '.join(_HEADS_FIRST)}")
    return _HEADS_FIRST[hint]


def positive_hint(hints: LayoutHints, key: str) -> int:
    """A hint that counts something.

    Raises:
        ValueError: It is missing, or no positive integer.
    """
    if key not in hints:
        raise ValueError(f"the shape alone does not tell the layout; pass the layout hint {key!r}")
    try:
        value = operator.index(hints[key])  # True counts as 1, as in LMCache
    except TypeError:
        value = 0
    if not 1 <= value < 2**63:
        raise ValueError(f"invalid layout hint {key!r}: expected a positive integer, got {hints[key]!r}")
    return value
