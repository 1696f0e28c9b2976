"""Descriptors as they arrive on the wire: well-formed, wrong in one way, and mangled bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgpack
from hypothesis import strategies as st

from kvshm.dtypes import dtype_name
from kvshm.spec import ArraySpec
from kvshm.strategies.arrays import array_specs

__all__ = ["descriptor_bytes", "descriptors", "mangled_descriptor_bytes", "refused_descriptor_bytes"]

Fields: TypeAlias = "dict[str, Any]"

_NAME_CHARACTERS = st.characters(exclude_characters="/\0", exclude_categories=["Cs"])
_HUGE = 2**63 - 1


def _is_component(text: str) -> bool:
    return text not in (".", "..") and 1 <= len(text.encode()) <= 254


@st.composite
def descriptors(draw: st.DrawFn, specs: st.SearchStrategy[ArraySpec] | None = None) -> Fields:
    """Fields of well-formed descriptors, in the order in which they are written. No segment need exist for them."""
    spec = draw(array_specs() if specs is None else specs)
    name = draw(st.text(_NAME_CHARACTERS, min_size=1, max_size=40).filter(_is_component))
    spare = draw(st.integers(0, 4096))
    nbytes = spec.byte_span + spare
    return {
        "type": "cpu_shm",
        "shm_name": f"/{name}" if nbytes or draw(st.booleans()) else "",
        "nbytes": nbytes,
        "version": 1,
        "metadata": {
            "dtype": dtype_name(spec.dtype),
            "shape": list(spec.shape),
            "stride": list(spec.stride),
            "storage_offset": spec.storage_offset,
            "device_uuid": draw(st.just("cpu") | st.text(max_size=10)),
        },
    }


@st.composite
def descriptor_bytes(draw: st.DrawFn, specs: st.SearchStrategy[ArraySpec] | None = None) -> bytes:
    """Well-formed descriptors as bytes, the keys of both maps in any order."""
    fields = draw(descriptors(specs))
    fields["metadata"] = _shuffled(draw, fields["metadata"])
    return bytes(msgpack.packb(_shuffled(draw, fields)))


def _shuffled(draw: st.DrawFn, fields: Fields) -> Fields:
    return {key: fields[key] for key in draw(st.permutations(list(fields)))}


def _set(key: str, *values: Any) -> list[Callable[[Fields], object]]:
    return [lambda fields, value=value: fields.update({key: value}) for value in values]  # type: ignore[misc]


def _set_metadata(key: str, *values: Any) -> list[Callable[[Fields], object]]:
    return [lambda fields, value=value: fields["metadata"].update({key: value}) for value in values]  # type: ignore[misc]


def _drop(fields: Fields, key: str) -> object:
    return fields.pop(key)


_SPOILERS: list[Callable[[Fields], object]] = [
    *(lambda fields, key=key: _drop(fields, key) for key in ("type", "shm_name", "nbytes", "version", "metadata")),
    *(
        lambda fields, key=key: _drop(fields["metadata"], key)
        for key in ("dtype", "shape", "stride", "storage_offset", "device_uuid")
    ),
    *_set("extra", 0),
    *_set_metadata("extra", None),
    *_set("type", "cuda_ipc", "CPU_SHM", b"cpu_shm", 1, None),
    *_set("version", 0, 2, -1, True, "1", 1.0, None),
    *_set("shm_name", "no-slash", "/", "//", "/a/b", "/a\0b", "/.", "/..", "/" + "a" * 255, b"/a", 7, None),
    *_set("nbytes", -1, True, 1.5, "64", None, [64]),
    *_set("metadata", None, [], "metadata", {}),
    *_set_metadata("dtype", "float128", "", "torch.float16", "<f2", "V2", "FLOAT16", b"float16", 5, None),
    *_set_metadata("shape", None, "12", 3, [-1], [True], [2.0], ["2"], [[2]], [None], {}),
    *_set_metadata("stride", None, "12", 3, [-1], [True], [2.0], ["2"], [[2]], [None], {}),
    *_set_metadata("storage_offset", -1, True, 1.5, "0", None, []),
    *_set_metadata("device_uuid", None, 0, b"cpu", []),
    lambda fields: fields["metadata"].update(shape=[*fields["metadata"]["shape"], 1]),  # ranks differ
    lambda fields: fields["metadata"].update(shape=[2], stride=[_HUGE]),  # beyond the bytes
    lambda fields: fields["metadata"].update(shape=[1], stride=[1], storage_offset=_HUGE),
    lambda fields: fields["metadata"].update(shape=[_HUGE] * 8, stride=[_HUGE] * 8),
    lambda fields: (fields.update(shm_name="", nbytes=64), fields["metadata"].update(shape=[1], stride=[1])),
]


@st.composite
def refused_descriptor_bytes(draw: st.DrawFn) -> bytes:
    """Descriptors that are MessagePack and yet wrong in one way, so that every reader must refuse them."""
    fields = draw(descriptors())
    draw(st.sampled_from(_SPOILERS))(fields)
    return bytes(msgpack.packb(fields))


@st.composite
def mangled_descriptor_bytes(draw: st.DrawFn) -> bytes:
    """Any bytes, and descriptors cut short, with bytes changed, doubled or put in; some are still well-formed."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=200))
    data = bytearray(draw(descriptor_bytes()))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        how = draw(st.sampled_from(["cut", "change", "insert", "double"]))
        if how == "cut":
            del data[at:]
        elif how == "change" and at < len(data):
            data[at] = draw(st.integers(0, 255))
        elif how == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=9))
        else:
            data += data[at:]
    return bytes(data)
