"""How engines expose the formats: axes folded or not, lists, and the hints that go with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from hypothesis import strategies as st

from kvshm.formats import EngineKVFormat, EngineType

__all__ = [
    "DENSE",
    "DETECTABLE_FORMATS",
    "FORMS",
    "REGISTRABLE_FORMATS",
    "Axes",
    "Form",
    "Hints",
    "Sizes",
    "kv_formats",
    "layout_hints",
]

F = EngineKVFormat
Hints: TypeAlias = Mapping[str, Any]
Axes: TypeAlias = "tuple[tuple[str, ...], ...]"


class Sizes(NamedTuple):
    """Layers, blocks, slots of a block, heads, elements of a head's row."""

    nl: int
    nb: int
    bs: int
    nh: int
    hs: int

    def of(self, axis: str) -> int:
        """Length of an axis by its name in the formats."""
        if axis in ("TWO", "ONE"):
            return 2 if axis == "TWO" else 1
        if axis == "NBBS":
            return self.nb * self.bs
        return int(getattr(self, "hs" if axis == "CS" else axis.lower()))


class Form(NamedTuple):
    """One way in which an engine exposes a format: the axes of its arrays, and which hints it passes.

    Each axis is written as the named axes that it folds into one, outermost first; ``()`` is an axis of size 1.
    """

    engine: EngineType
    hints: Callable[[Sizes], Hints]
    axes: Axes | None = None  # None: those of the format
    lists: Literal["flat", "boxed"] | None = None  # flat: K and V layers in one list; boxed: one array in a list
    memory: tuple[str, ...] | None = None  # the axes as they lie in memory, where that is not their order in the name


def _told(**hints: Any) -> Callable[[Sizes], Hints]:
    return lambda sizes: hints


def _block_size(sizes: Sizes) -> Hints:
    return {"tokens_per_block": sizes.bs}


def _k_v(sizes: Sizes) -> Hints:
    return {"kv_list_layout": "k_v", "tokens_per_block": sizes.bs}


def _pool(sizes: Sizes) -> Hints:
    return {"num_kv_heads": sizes.nh, "tokens_per_block": sizes.bs, "head_dim": sizes.hs}


_VLLM, _SGLANG, _TRTLLM, _ATOM = EngineType.VLLM, EngineType.SGLANG, EngineType.TRTLLM, EngineType.ATOM
_HND = tuple(Form(_VLLM, hints) for hints in (_told(kv_layout="HND"), _told(), _told(kv_layout="BLHNC")))
_NHD = tuple(Form(_VLLM, hints) for hints in (_told(kv_layout="NHD"), _told(kv_layout="BLNHC")))
_POOL_AXES: Axes = (("NB",), ("NL",), ("TWO",), ("NH", "BS", "HS"))
DENSE = Form(_VLLM, _told())
# Pairs of arrays with their heads first have no name of their own: they are read as slots first, by strides.
_HND_PAIRS = tuple(Form(_VLLM, _told(kv_layout=hint), memory=("NB", "NH", "BS", "HS")) for hint in ("HND", "BLHNC"))

FORMS: dict[EngineKVFormat, tuple[Form, ...]] = {
    F.NB_NL_TWO_BS_NH_HS: _NHD + _HND,
    F.NL_X_TWO_NB_BS_NH_HS: _NHD,
    F.NL_X_NB_TWO_BS_NH_HS: _NHD,
    F.NL_X_NB_BS_HS: (
        *_NHD,
        *_HND,
        Form(_ATOM, _told()),
        Form(_SGLANG, _told(kv_list_layout="unified")),
        Form(_SGLANG, _block_size),
        Form(_SGLANG, _block_size, (("NB", "BS"), (), ("HS",))),
    ),
    F.TWO_X_NL_X_NBBS_NH_HS: (Form(_SGLANG, _told()),),
    F.NL_X_NBBS_ONE_HS: (Form(_SGLANG, _told()),),
    F.NL_X_TWO_NB_NH_BS_HS: _HND,
    F.NL_X_NB_TWO_NH_BS_HS: _HND,
    F.NB_NL_TWO_NH_BS_HS: (
        Form(_TRTLLM, _told()),
        Form(_TRTLLM, _told(), None, "boxed"),
        Form(_TRTLLM, _pool, _POOL_AXES),
        Form(_TRTLLM, _pool, _POOL_AXES, "boxed"),
    ),
    F.TWO_X_NL_X_NB_BS_NH_HS: (
        Form(_SGLANG, _told()),
        Form(_SGLANG, _k_v, (("NB", "BS"), ("NH",), ("HS",)), "flat"),
    ),
    F.NL_X_NB_NH_BS_CS: _HND,
    F.NL_X_NB_BS_NH_CS: _NHD,
    F.NL_X_NB_BSV_BSS: (
        *_NHD,
        *_HND,
        *(form._replace(axes=(("NB",), ("BS",), (), ("HS",))) for form in _NHD),
        *(form._replace(axes=(("NB",), (), ("BS",), ("HS",))) for form in _HND),
    ),
    F.NL_X_TWO_NB_NH_ONE_BS_HS: _NHD + _HND,
    F.NL_X_TWO_X_NB_BS_NH_HS: (*_NHD, Form(_VLLM, _told()), *_HND_PAIRS),
    F.NL_X_NP_X_NB_BS_ONE_HS: _NHD + _HND,
    F.NL_X_NB_BS_NH_HS: (Form(_SGLANG, _told(kv_list_layout="unified")),),
}
DETECTABLE_FORMATS: tuple[EngineKVFormat, ...] = tuple(FORMS)
"""Formats that some engine exposes."""
REGISTRABLE_FORMATS: tuple[EngineKVFormat, ...] = tuple(format for format in FORMS if not format.is_pbs_fused)
"""Formats of which kernel groups can be made: those that engines expose and whose arrays tell the block size."""


def kv_formats(formats: Sequence[EngineKVFormat] = tuple(F)) -> st.SearchStrategy[EngineKVFormat]:
    """KV formats, out of these."""
    return st.sampled_from(list(formats))


@st.composite
def layout_hints(draw: st.DrawFn, format: EngineKVFormat) -> Hints:
    """Which hints an engine may pass for a cache of this format; sizes among it are any, as no cache goes with it.

    Raises:
        ValueError: No engine exposes the format.
    """
    if format not in FORMS:
        raise ValueError(f"no engine exposes {format.name}; choose one of DETECTABLE_FORMATS")
    sizes = Sizes(*(draw(st.integers(1, 5)) for _ in Sizes._fields))
    return draw(st.sampled_from(FORMS[format])).hints(sizes)
