"""Dispatch by device type."""

from __future__ import annotations

from typing import Any

import pytest

import kvshm
from kvshm import registry


def test_the_host_registers_itself() -> None:
    factory = kvshm.resolve_wrapper_factory("cpu")
    assert factory == kvshm.ShmArrayWrapper.wrap
    array = kvshm.zeros((3,), "uint8")
    assert factory(array) == kvshm.wrap(array)


def test_unknown_devices_are_an_error_that_lists_the_known() -> None:
    with pytest.raises(LookupError, match=r"'npu'; known are 'cpu'. kvshm.register_wrapper"):
        kvshm.resolve_wrapper_factory("npu")


def test_others_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        @classmethod
        def wrap(cls, array: Any, /) -> str:
            return f"other {array}"

    monkeypatch.setattr(registry, "_wrappers", dict(registry._wrappers))
    kvshm.register_wrapper("npu", Other)
    assert kvshm.resolve_wrapper_factory("npu")(7) == "other 7"
    with pytest.raises(LookupError, match="'cpu', 'npu'"):
        kvshm.resolve_wrapper_factory("gpu")
