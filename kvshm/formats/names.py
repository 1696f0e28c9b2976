"""EngineKVFormat: a format's name is its shape, and its facts are read off that name.

``NL_X_TWO_NB_BS_NH_HS`` reads: a list of NL layers, each an array [2, NB, BS, NH, HS]. Before each ``_X_`` stands one
level of lists, behind the last one the axes of an array:

====== ============================================  ====== ==========================================
token  meaning                                       token  meaning
====== ============================================  ====== ==========================================
NL     layers                                        NH     heads
NB     blocks                                        HS     elements of one head
BS     slots of a block                              CS     elements of one head, K and V side by side
NBBS   blocks and their slots folded into one axis   TWO    K and V
NP     planes of a layer, each of its own width      ONE    an axis of size 1
BSV    values of the slots of an index page          BSS    scales of the slots of an index page
====== ============================================  ====== ==========================================

An index page (``BSV_BSS``) is stored as an array [NB, BS, bytes of a slot] and moved as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from functools import cached_property

__all__ = ["EngineKVFormat"]


class EngineKVFormat(IntEnum):
    """How an engine lays out its paged KV cache. The numbers are those of LMCache, on the wire and in its records."""

    NB_NL_TWO_BS_NH_HS = 0
    NL_X_TWO_NB_BS_NH_HS = 1
    NL_X_NB_TWO_BS_NH_HS = 2
    NL_X_NB_BS_HS = 3
    TWO_X_NL_X_NBBS_NH_HS = 4
    NL_X_NBBS_ONE_HS = 5
    NL_X_TWO_NB_NH_BS_HS = 6
    NL_X_NB_TWO_NH_BS_HS = 7
    NB_NL_TWO_NH_BS_HS = 8
    TWO_X_NL_X_NB_BS_NH_HS = 9
    NL_X_NB_NH_BS_TWO_HS = 10
    NL_X_NB_BS_NH_TWO_HS = 11
    NL_X_NB_NH_BS_CS = 12
    NL_X_NB_BS_NH_CS = 13
    NL_X_NB_BSV_BSS = 14
    NL_X_TWO_NB_NH_ONE_BS_HS = 15
    NL_X_TWO_X_NB_BS_NH_HS = 16
    NL_X_NP_X_NB_BS_ONE_HS = 17
    NL_X_NB_BS_NH_HS = 18

    @classmethod
    def _missing_(cls, value: object) -> EngineKVFormat:
        raise ValueError(f"unknown KV format {value!r}; known are 0 to {max(cls)}: {', '.join(cls.__members__)}")

    @cached_property
    def lists(self) -> tuple[str, ...]:
        """Names of the levels of lists around each array, outermost first."""
        return tuple(self.name.split("_X_")[:-1])

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes of one array, as stored."""
        axes = tuple(self.name.split("_X_")[-1].split("_"))
        return ("NB", "BS", "HS") if axes == ("NB", "BSV", "BSS") else axes

    @cached_property
    def is_cross_layer(self) -> bool:
        """One array holds all layers."""
        return not self.lists

    @cached_property
    def is_kv_list(self) -> bool:
        """A list of K layers and a list of V layers."""
        return self.lists[:1] == ("TWO",)

    @cached_property
    def is_layer_list(self) -> bool:
        """A list with one entry a layer."""
        return self.lists[:1] == ("NL",)

    @cached_property
    def is_kv_second_tuple(self) -> bool:
        """Each layer is itself a list of arrays."""
        return self.is_layer_list and len(self.lists) > 1

    @cached_property
    def _fixed_sizes(self) -> tuple[tuple[int, int], ...]:
        """Axes whose size the name says, and that size."""
        sizes = {"TWO": 2, "ONE": 1}
        return tuple((axis, sizes[name]) for axis, name in enumerate(self.axes) if name in sizes)

    @property
    def is_mla(self) -> bool:
        """No heads: one latent (or index) row a slot."""
        return "NH" not in self.axes

    @property
    def is_hnd(self) -> bool:
        """Each head's slots lie together: NH stands before BS."""
        return "BS" in self.axes and "NH" in self.axes[: self.axes.index("BS")]

    @property
    def is_fused_packed(self) -> bool:
        """K and V of a head lie side by side, behind the slot and head axes."""
        return self.axes[-1] == "CS" or self.axes[-2:] == ("TWO", "HS")

    @property
    def is_two_major(self) -> bool:
        """All of K, then all of V, in each array."""
        return self.axes[0] == "TWO"

    @property
    def is_pbs_fused(self) -> bool:
        """Blocks and slots are folded into one axis, so that the block size cannot be read off the shape."""
        return "NBBS" in self.axes

    @property
    def is_single_kv(self) -> bool:
        """Arrays with heads that hold K or V alone, each counted as a layer."""
        return not (self.is_mla or self.is_fused_packed or "TWO" in self.lists + self.axes)

    @property
    def kv_size(self) -> int:
        """Planes of a chunk: 2 where K and V are apart, 1 where they are packed or there is but one."""
        return 1 if self.is_fused_packed or "TWO" not in self.lists + self.axes else 2

    @property
    def has_block_axis(self) -> bool:
        """Arrays begin with NB and have no K/V axis, so their blocks may lie apart (padding between them)."""
        return self.axes[0] == "NB" and "TWO" not in self.lists + self.axes

    @property
    def attention_backend(self) -> str:
        """Which engine and attention kernel the format belongs to, in LMCache's words."""
        return _ATTENTION_BACKENDS[self.value]

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape can be one of the format: its rank, and its axes of 1 and 2.

        >>> EngineKVFormat.NL_X_TWO_NB_BS_NH_HS.fits((2, 7, 4, 3, 8))
        True
        """
        return len(shape) == len(self.axes) and all(shape[axis] == size for axis, size in self._fixed_sizes)

    def describe(self) -> str:
        """The shape in symbols.

        >>> EngineKVFormat.TWO_X_NL_X_NBBS_NH_HS.describe()
        '2 x NL x [PBS, NH, HS]'
        """
        axes = ("NB", "BSxVALS", "BSxSCALES") if self.name.endswith("BSV_BSS") else self.axes
        symbols = {"TWO": "2", "ONE": "1", "NBBS": "PBS"}
        return self._written(symbols, axes)

    def concrete_shape(self, nl: int, nb: int, bs: int, nh: int, hs: int) -> str:
        """The shape in numbers.

        >>> EngineKVFormat.NL_X_TWO_NB_BS_NH_HS.concrete_shape(nl=3, nb=7, bs=4, nh=2, hs=8)
        '3 x [2, 7, 4, 2, 8]'
        """
        sizes = self._sizes(nb, bs, nh, hs) | {"NL": nl}
        return self._written({name: str(size) for name, size in sizes.items()}, self.axes)

    def paged_layer_shape(self, nb: int, bs: int, nh: int, hs: int) -> tuple[int, ...]:
        """Shape of one layer's array as an engine allocates it.

        ``hs`` counts the elements of a head's row, K and V together where they are packed; MLA has no use for ``nh``.

        Raises:
            ValueError: The format has no single array per layer.
        """
        if not self.is_layer_list or self.is_kv_second_tuple:
            raise ValueError(f"{self.name} has no single array per layer: {self.describe()}")
        sizes = self._sizes(nb, bs, nh, hs)
        axes = list(self.axes)
        if self.is_fused_packed and "TWO" in axes:
            axes.remove("TWO")
        if "ONE" in axes and not self.is_mla:
            axes.remove("ONE")  # the engine's attention backend adds it to its view
        return tuple(sizes[axis] for axis in axes)

    @staticmethod
    def _sizes(nb: int, bs: int, nh: int, hs: int) -> dict[str, int]:
        return {"NB": nb, "BS": bs, "NBBS": nb * bs, "NH": nh, "HS": hs, "CS": hs, "TWO": 2, "ONE": 1}

    def _written(self, symbols: Mapping[str, str], axes: tuple[str, ...]) -> str:
        array = f"[{', '.join(symbols.get(axis, axis) for axis in axes)}]"
        return " x ".join([*(symbols.get(level, level) for level in self.lists), array])


_ATTENTION_BACKENDS = (
    "vLLM CROSS_LAYER",
    "vLLM non-MLA flash attention",
    "vLLM non-MLA flash infer",
    "vLLM MLA / SGLang MLA (MP)",
    "SGLang MHA (flash attention and flash infer)",
    "SGLang MLA",
    "vLLM non-MLA flash attention (HND layout)",
    "vLLM non-MLA flash infer (HND layout)",
    "TRT-LLM cross-layer (HND layout)",
    "SGLang MHA via MP daemon (4-D inner)",
    "vLLM non-MLA blocks-first, fused K/V",
    "vLLM non-MLA blocks-first, fused K/V (NHD)",
    "vLLM non-MLA blocks-first, fused K/V (HND)",
    "vLLM non-MLA blocks-first, fused K/V (NHD)",
    "vLLM MLA",
    "vLLM-RBLN attention (HND layout)",
    "vLLM-Ascend: per-layer (K, V) tuples",
    "vLLM-Ascend MLA (latent, rope) tuples",
    "SGLang unified MP independent components",
)
