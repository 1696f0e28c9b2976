"""Streams and events of a host: nothing waits, time is real."""

from __future__ import annotations

import time

import pytest

from kvshm import HostEvent, HostStream


def test_elapsed_time_is_real() -> None:
    stream = HostStream()
    start, before = stream.record_event(), time.perf_counter()
    while time.perf_counter() - before < 0.003:
        pass
    inner_ms = (time.perf_counter() - before) * 1e3
    end = stream.record_event(HostEvent(enable_timing=True))
    outer_ms = (time.perf_counter() - before) * 1e3 + 1e3
    assert inner_ms <= start.elapsed_time(end) <= outer_ms
    assert end.elapsed_time(start) == -start.elapsed_time(end)


def test_recording_again_moves_an_event() -> None:
    stream, event = HostStream(), HostEvent()
    first = stream.record_event()
    assert stream.record_event(event) is event
    before = first.elapsed_time(event)
    event.record()
    assert first.elapsed_time(event) > before


def test_unrecorded_events_have_no_time() -> None:
    recorded = HostStream().record_event()
    for start, end in ((recorded, HostEvent()), (HostEvent(), recorded)):
        with pytest.raises(RuntimeError, match="both events must be recorded"):
            start.elapsed_time(end)


def test_work_is_done_when_the_call_returns() -> None:
    done: list[int] = []
    with HostStream(priority=-3) as stream:
        stream.launch_host_func(done.append, 7)
        assert done == [7]
        event = stream.record_event()
        stream.wait_event(event)
        stream.wait_stream(HostStream())
        event.wait(stream)
        event.synchronize()
        stream.synchronize()
        assert stream.query()
        assert event.query()
    assert (stream.priority, stream.device) == (-3, "cpu")
    assert repr(stream) == "HostStream(priority=-3)"
    assert repr(event) == "HostEvent(recorded=True)"
