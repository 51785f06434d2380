"""What a call with visits took: of each visit what it computes, waits for, and what travelled to it.

Assumes a clock that says what the test says; on host ranks the processor's. Does not use a GPU: its events are stood in
for by that clock.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from thread_ranks import in_group  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - as above
from commdsl.runtime import timing  # noqa: E402 - as above
from commdsl.runtime.streams import OneStream  # noqa: E402 - as above
from commdsl.runtime.timing import StepTimes, Timing  # noqa: E402 - as above


class Clock:
    """Both of what a Timing may look at: seconds that the test lets pass, and events of milliseconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        clock = self

        class Event:
            def record(self, stream: str) -> None:
                assert stream == "here"
                self.at = clock.now

            def elapsed_time(self, later: Event) -> float:
                return 1e3 * (later.at - self.at)

        return Event()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_what_each_visit_took(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A visit waits from the end of the one before; what travelled to it are the launches that it is after and the one
    before it was not.
    """
    clock, waited = Clock(), list[str]()
    monkeypatch.setattr(timing.time, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "here")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(str(device)))

    def compute(seconds: float) -> float:
        clock.now += seconds
        return seconds

    one = Timing(torch.device(kind))
    streams, functions = one.over(OneStream(), {"attend": compute}, [0, 2, 0, 3])
    for launch, visit in (([4.0, 8.0], 1.0), ([], 2.0), ([16.0], 0.5), ([], 0.25)):
        for seconds in launch:
            with streams.beside():
                clock.now += seconds
        assert functions["attend"](visit) == visit
    clock.now += 32.0
    found = one.times()

    assert found.steps == (
        StepTimes(communication=0.0, exposed=12.0, computation=1.0),
        StepTimes(communication=12.0, exposed=0.0, computation=2.0),
        StepTimes(communication=0.0, exposed=16.0, computation=0.5),
        StepTimes(communication=16.0, exposed=0.0, computation=0.25),
    )
    assert (found.communication, found.exposed, found.computation) == (28.0, 28.0, 3.75)
    assert found.total == 28.0 + 3.75 + 32.0
    assert waited == (["cuda"] if kind == "cuda" else [])


def test_streams_are_the_calls_own() -> None:
    """What waits for what is not changed by being timed."""
    said = list[Any]()

    class Streams:
        def beside(self) -> Any:
            said.append("beside")
            return contextlib.nullcontext()

        def mark(self, what: Any, *, beside: bool) -> None:
            said.append(("mark", what, beside))

        def wait(self, what: Any, *, beside: bool) -> None:
            said.append(("wait", what, beside))

        def join(self) -> None:
            said.append("join")

    streams, _ = Timing(torch.device("cpu")).over(Streams(), {}, [])
    with streams.beside():
        streams.mark(1, beside=True)
    streams.wait(2, beside=False)
    streams.join()
    assert said == ["beside", ("mark", 1, True), ("wait", 2, False), "join"]


@pytest.mark.parametrize("name", ["rotation_ring", "rotation_carry"])
def test_on_host_ranks(name: str) -> None:
    """A call is timed in all its visits, and gives what it gives untimed, also where nothing travels."""
    op = commdsl.load(name, ranks=3)

    def run(rank: int, group: str) -> None:
        def attend(visit: int, kv: Any, *acc: Any) -> Any:
            time.sleep(0.01)
            seen.append(kv.sum().item())
            return [one + kv for one in acc]

        for length in (300, 0):
            seen = list[float]()
            inputs = [torch.full((length,), rank + 1.0) for _ in op.program(3).visits.signature.inputs]
            plain = op.visit(*inputs, attend, group=group)
            one = Timing(inputs[0].device)
            timed = op.visit(*inputs, attend, group=group, timing=one)
            found = one.times()
            torch.testing.assert_close(timed, plain)
            assert seen[:3] == seen[3:]
            assert len(found.steps) == 3
            assert all(step.computation >= 0.01 for step in found.steps)
            assert all(step.communication > 0 for step in found.steps[1:]) or not length
            assert found.steps[0].communication == 0
            assert found.total >= found.exposed + found.computation

    in_group(3, run)
