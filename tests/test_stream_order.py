"""Calls on several streams: each comes after the one before it, with no event where all stay on one stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_gpu import Event, FakeGpu, Launch, Stream  # noqa: E402 - after the check for torch
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from commdsl.runtime import device  # noqa: E402
from commdsl.runtime.binding import Gpu, capture_id  # noqa: E402
from commdsl.runtime.errors import CaptureError  # noqa: E402
from commdsl.runtime.gate import Gate  # noqa: E402
from commdsl.runtime.stream_order import MARKED_CALLS, StreamOrder  # noqa: E402


class Calls:
    """Calls of one workspace on a fake GPU, started as the device runtime starts them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.gpu = FakeGpu(1)
        self.gpu.install(patch)
        self.gpu.here.rank = 0
        self.records = 0
        patch.setattr(Event, "record", self._record(Event.record))
        self.order, filling = (StreamOrder(torch, capture_id) for _ in range(2))
        self.ended = list[BaseException]()
        workspace: Any = SimpleNamespace()
        kernel: Any = SimpleNamespace(launch=lambda _, stream: self.gpu.note(stream))
        prepared: Any = SimpleNamespace(point=lambda *_: None)
        gate = Gate(Gpu(0), self.order, filling, self.ended.append)
        self._start = device.DeviceStart(gate, workspace, kernel, prepared)

    def _record(self, original: Any) -> Any:
        def record(event: Event, stream: Stream) -> None:
            self.records += 1
            original(event, stream)

        return record

    def on(self, stream: Stream, times: int = 1) -> Launch:
        with self.gpu.on(stream):
            for _ in range(times):
                self._start(())
        return self.gpu.launches[-1]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def test_one_stream_needs_no_event(calls: Calls) -> None:
    """From the first call on, calls that stay on a stream of torch's leave no event."""
    calls.on(calls.gpu.default, 10)
    assert calls.records == 0


def test_late_mark(calls: Calls) -> None:
    """The first call on another stream waits for the last call, marked only now; nothing else ever has to."""
    other = calls.gpu.stream()
    first = calls.on(calls.gpu.default, 5)
    assert first.number in calls.on(other).before
    assert calls.records == 2  # the late mark and the new call's


def test_streams_that_take_turns(calls: Calls) -> None:
    """Two streams that alternate wait for each other's calls only, not for what else lies on the streams."""
    streams = [calls.gpu.default, calls.gpu.stream()]
    calls.on(streams[0])
    calls.on(streams[1])
    for turn in range(10):
        last = calls.gpu.launches[-1]
        with calls.gpu.on(streams[(turn + 1) % 2]):
            compute = calls.gpu.note(calls.gpu.current.cuda_stream).number
        found = calls.on(streams[turn % 2])
        assert last.number in found.before
        assert compute not in found.before


def test_quiet_again(calls: Calls) -> None:
    """After a warm-up on a side stream, a stream that is kept becomes quiet again."""
    calls.on(calls.gpu.stream(), 3)
    calls.on(calls.gpu.default, MARKED_CALLS + 1)
    records = calls.records
    calls.on(calls.gpu.default, 10)
    assert calls.records == records
    assert calls.order.quiet == calls.gpu.default.cuda_stream


def test_streams_that_go(calls: Calls) -> None:
    """A stream that is not torch's may be destroyed after a call: the next call still waits, with no look at it."""
    for _ in range(3):
        stream = calls.gpu.stream(external=True)
        last = calls.on(stream, MARKED_CALLS + 2)
        stream.is_gone = True
        assert last.number in calls.on(calls.gpu.default).before


def test_another_stream_at_the_same_address(calls: Calls) -> None:
    """A new stream that got the handle of one that is gone is not mistaken for it."""
    stream = calls.gpu.stream(external=True)
    last = calls.on(stream)
    stream.is_gone = True
    assert last.number in calls.on(Stream(stream.cuda_stream, stream.stream_id)).before


def test_calls_in_a_capture(calls: Calls) -> None:
    """In a capture, calls are joined by its own events, across its streams; what ran outside plays no part."""
    main, side = calls.gpu.stream(), calls.gpu.stream()
    outside = calls.on(main, 3)
    with calls.gpu.on(main), calls.gpu.capturing(7):
        side.capture = 7  # forked before the call
        first = calls.on(main)
        second = calls.on(side)
        third = calls.on(main)
    assert first.number in second.before
    assert second.number in third.before
    main.before = {outside.number}  # what was captured did not run
    after = calls.on(calls.gpu.default)
    assert outside.number in after.before
    assert not {first.number, second.number, third.number} & after.before


def test_capture_of_the_last_stream(calls: Calls) -> None:
    """A call outside a capture that would have to wait for the stream being captured is refused; a marked one waits."""
    main, side = calls.gpu.stream(), calls.gpu.stream()
    last = calls.on(main)
    with calls.gpu.on(main), calls.gpu.capturing(), pytest.raises(CaptureError, match="is being captured now"):
        calls.on(side)
    assert last.number in calls.on(side).before
    last = calls.on(main)
    with calls.gpu.on(main), calls.gpu.capturing():
        assert last.number in calls.on(side).before


STREAMS = st.integers(0, 5)  # the default one, two of torch's, two of others, one that goes after its call


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(STREAMS, st.sampled_from([1, 2, MARKED_CALLS + 1]), st.booleans()), max_size=12))
def test_any_order(monkeypatch: pytest.MonkeyPatch, script: list[tuple[int, int, bool]]) -> None:
    """Whatever streams calls come on, captured or not, each comes after the last one of its capture or outside."""
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        gpu = calls.gpu
        streams = [gpu.default, gpu.stream(), gpu.stream(), gpu.stream(external=True), gpu.stream(external=True)]
        for capture, (index, times, captured) in enumerate(script, 1):
            stream = streams[index] if index < 5 else gpu.stream(external=True)
            if captured and index < 5:
                before = set(stream.before)
                with gpu.on(stream), gpu.capturing(capture):
                    forked = gpu.stream()
                    forked.capture = capture
                    calls.on(stream, times)
                    calls.on(forked)
                    calls.on(stream)
                stream.before = before
            else:
                calls.on(stream, times)
                stream.is_gone = index == 5
    last: dict[int | None, int] = {}
    for launch in gpu.launches:
        assert last.get(launch.capture, launch.number) in {*launch.before, launch.number}
        last[launch.capture] = launch.number
