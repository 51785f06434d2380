"""Experts whose calls are two launches, on tensors of torch: what one launch leaves, whoever makes two; refusals."""

from __future__ import annotations

import gc
import pickle
import time
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from captured import launches_only  # noqa: E402 - after the check for torch
from fake_gpu import FakeGpu  # noqa: E402 - after the check for torch
from test_ep import KEYS, LIMITS, Case  # noqa: E402 - after the check for torch
from thread_ranks import in_group, outcomes  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - after the check for torch
from commdsl import ep  # noqa: E402 - after the check for torch
from commdsl.program.timeouts import CommTimeout  # noqa: E402 - after the check for torch
from commdsl.runtime.errors import DispatchError, TensorError  # noqa: E402 - after the check for torch


def given(case: Case, rank: int) -> tuple[tuple[Any, Any], Any]:
    return (case.x[rank], case.scale[rank]), torch.from_numpy(case.keys[rank])


def there_and_back(experts: ep.Experts, case: Case, rank: int, two: bool, late: float = 0.0) -> None:
    """By two launches with a pause between, or by one."""
    mine = case.received[rank]
    total = len(mine.origins)
    if two:
        pending = experts.dispatch_send(*given(case, rank))
        time.sleep(late)
        there = pending.receive()
    else:
        there = experts.dispatch(*given(case, rank))
    assert there.counts.tolist() == mine.counts.tolist()
    assert there.handle.places.tolist() == mine.places.tolist()
    assert torch.equal(there.rows[0][:total].float(), torch.from_numpy(mine.rows[0]))
    made, weights = there.rows[0] * 2 - 1, torch.from_numpy(case.weights[rank])
    if two:
        summing = experts.combine_send(made, there.handle, weights)
        time.sleep(late)
        found = summing.receive()
    else:
        found = experts.combine(made, there.handle, weights)
    changed = [torch.from_numpy(one.rows[0]).to(made.dtype) * 2 - 1 for one in case.received]
    assert torch.equal(found, case.back(changed, rank))


@pytest.mark.parametrize("nodes", ["", "0,1,1"])
@pytest.mark.parametrize("who", [{0, 1, 2}, {1}], ids=["all", "one"])
def test_as_one_launch(nodes: str, who: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, with other ranks' pauses between, whether they make two launches or one: they agree that it is one
    call, and what each made is called alike.
    """
    monkeypatch.setenv("COMMDSL_NODES", nodes)
    cases = [Case.drawn(3, seed, torch.float32) for seed in range(8)]

    def work(rank: int, group: str) -> None:
        experts = ep.Experts(LIMITS, group, "cpu", check=True, params={"E": KEYS})
        for number, case in enumerate(cases):
            there_and_back(experts, case, rank, rank in who, 0.003 * ((rank + number) % 3))
        experts.synchronize()
        experts.release()

    in_group(3, work)


def test_other_calls_in_between() -> None:
    """Another op of the group, other Experts, and the way back of a call before may begin between the halves."""
    first, second = (Case.drawn(2, seed, torch.float32) for seed in (1, 2))

    def work(rank: int, group: str) -> None:
        one, other = (ep.Experts(LIMITS, group, "cpu", params={"E": KEYS}) for _ in range(2))
        before = one.dispatch(*given(first, rank))
        pending = one.dispatch_send(*given(second, rank))
        there_and_back(other, first, rank, two=True)
        home = one.combine(before.rows[0] * 2 - 1, before.handle, torch.from_numpy(first.weights[rank]))
        there = pending.receive()
        changed = [torch.from_numpy(held.rows[0]) * 2 - 1 for held in first.received]
        assert torch.equal(home, first.back(changed, rank))
        mine = second.received[rank]
        assert torch.equal(there.rows[0][: len(mine.origins)], torch.from_numpy(mine.rows[0]))
        one.synchronize()

    in_group(2, work)


def test_refused() -> None:
    """A call between the halves of one of its kind, a second `receive`, and one of what is gone."""
    (name,) = commdsl.threads(1)
    case = Case.drawn(1, 1, torch.float32)
    experts = ep.Experts(LIMITS, name, "cpu", params={"E": KEYS})
    pending = experts.dispatch_send(*given(case, 0))
    for begin in (experts.dispatch, experts.dispatch_send):
        with pytest.raises(DispatchError, match="`experts` is between its halves: `receive` it before the next"):
            begin(*given(case, 0))
    with pytest.raises(DispatchError, match="not copied or saved"):
        pickle.dumps(pending)
    there = pending.receive()
    with pytest.raises(DispatchError, match="received before"):
        pending.receive()
    weights = torch.from_numpy(case.weights[0])
    summing = experts.combine_send(there.rows[0], there.handle, weights)
    with pytest.raises(DispatchError, match="`experts_back` is between its halves"):
        experts.combine(there.rows[0], there.handle, weights)
    commdsl.reset(name)
    with pytest.raises(DispatchError, match="is gone"):
        summing.receive()
    there_and_back(experts, case, 0, two=True)
    lost = experts.dispatch_send(*given(case, 0))
    experts.release()
    with pytest.raises(DispatchError, match="is gone"):
        lost.receive()


def test_lost() -> None:
    """What an exception kept from being received the next call of its kind finishes, and says so; that call and those
    of the other ranks are as they must be, though what was passed has changed since.
    """
    cases = [Case.drawn(3, seed, torch.float32) for seed in range(3)]

    def work(rank: int, group: str) -> None:
        experts = ep.Experts(LIMITS, group, "cpu", params={"E": KEYS}, timeout=5)
        there_and_back(experts, cases[0], rank, two=True)

        def fails() -> None:
            rows, keys = given(cases[1], rank)
            pending = experts.dispatch_send(rows, keys)
            keys.zero_()
            raise OSError(pending)

        if rank == 1:
            with pytest.raises(OSError):
                fails()
            gc.collect()  # the exception held it
        else:
            held = experts.dispatch(*given(cases[1], rank))
            mine = cases[1].received[rank]
            assert torch.equal(held.rows[0][: len(mine.origins)], torch.from_numpy(mine.rows[0]))
            del held
        there = experts.dispatch(*given(cases[2], rank))
        weights = torch.from_numpy(cases[2].weights[rank])
        begun = experts.combine_send if rank == 2 else experts.combine  # nobody takes what it returns
        begun(there.rows[0], there.handle, weights)
        home = experts.combine(there.rows[0] * 2 - 1, there.handle, weights)
        changed = [torch.from_numpy(one.rows[0]) * 2 - 1 for one in cases[2].received]
        assert torch.equal(home, cases[2].back(changed, rank))
        del there
        there_and_back(experts, cases[0], rank, two=True)
        experts.synchronize()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        in_group(3, work)
    words = [str(one.message) for one in said if one.category is RuntimeWarning]
    assert [one.partition(" was lost between its halves, ")[0] for one in words] == [
        "a call of `experts`",
        "a call of `experts_back`",
    ]


def test_lost_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph finishes a call that was lost before, and what a graph has half of is not made whole outside of it."""
    gpu = FakeGpu(1)
    gpu.install(monkeypatch)
    monkeypatch.setattr(ep.Experts, "is_capturing", property(lambda _: gpu.current.capture is not None))
    gpu.here.rank = 0
    (name,) = commdsl.threads(1)
    case = Case.drawn(1, 1, torch.float32)
    experts = ep.Experts(LIMITS, name, "cpu", params={"E": KEYS})
    experts.prepare(torch.float32)
    experts.dispatch_send(*given(case, 0))
    with gpu.capturing(), pytest.raises(DispatchError, match="the next outside of a capture finishes it"):
        experts.dispatch(*given(case, 0))
    with pytest.warns(RuntimeWarning, match="lost"):
        there_and_back(experts, case, 0, two=True)
    with gpu.capturing():
        experts.dispatch_send(*given(case, 0))
    with pytest.raises(DispatchError, match=r"`commdsl.reset\(\)` on all ranks, then capture both"):
        experts.dispatch(*given(case, 0))
    commdsl.reset(name)
    there_and_back(experts, case, 0, two=True)


def test_changed_between() -> None:
    """What was passed and is not as it was is refused, and the next call goes on."""
    (name,) = commdsl.threads(1)
    case = Case.drawn(1, 1, torch.float32)
    experts = ep.Experts(LIMITS, name, "cpu", params={"E": KEYS})
    rows, keys = given(case, 0)
    pending = experts.dispatch_send(rows, keys.clone())
    rows[1].add_(0)
    with pytest.raises(TensorError, match="`experts` was changed between its halves"):
        pending.receive()
    with torch.inference_mode():  # tensors that do not count their changes
        inferred = experts.dispatch_send((rows[0].clone(), rows[1].clone()), keys.clone()).receive()
    total = len(case.received[0].origins)
    assert torch.equal(inferred.rows[0][:total], torch.from_numpy(case.received[0].rows[0]))


def test_a_rank_that_never_sends() -> None:
    """Is named by those that do, within their time-out."""
    case = Case.drawn(3, 1, torch.float32)
    names = commdsl.threads(3)

    def work(rank: int) -> None:
        experts = ep.Experts(LIMITS, names[rank], "cpu", params={"E": KEYS}, timeout=0.5)
        if rank == 1:
            time.sleep(1.5)
            return
        experts.dispatch_send(*given(case, rank)).receive()
        experts.synchronize()

    found = outcomes(3, work)
    assert found[1] is None
    for rank in (0, 2):
        assert isinstance(found[rank], CommTimeout)
        assert found[rank].missing == (1,)


def test_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime of GPUs makes two launches of each, in a capture too; one half alone is not captured."""
    gpu = FakeGpu(2)
    gpu.install(monkeypatch)
    cases = [Case.drawn(2, seed, torch.float32) for seed in range(3)]

    def work(rank: int, group: str) -> None:
        gpu.here.rank = rank
        experts = ep.Experts(LIMITS, group, "cpu", params={"E": KEYS}, tune={"sms": 3, "threads": 32})
        experts.prepare(torch.float32)
        for case in cases:
            with gpu.capturing():
                there_and_back(experts, case, rank, two=True)
            there_and_back(experts, case, rank, two=True)
        experts.release()

    in_group(2, work)
    assert len(gpu.launches) == 2 * 2 * 4 * len(cases)


@pytest.mark.parametrize("name", ["experts_once", "experts_index", "tokens", "tokens_summed"])
def test_every_form(name: str) -> None:
    """Shipped files that send once per rank, with values beside, leave by two launches what they leave by one: there,
    there again, back, and a number of each place back. A send half launches, and nothing else.
    """
    source, tensors = name.partition("_summed")[0], 1 if name.startswith("tokens") else 2
    limits = ep.Limits(rows=20, keys=4, received=200, widths=(40,) * tensors, width_back=40, width_again=40)
    dice = torch.Generator().manual_seed(3)
    rows = [(torch.randn(7 + rank, 10, generator=dice),) * tensors for rank in range(2)]
    keys = [torch.randint(0, KEYS + 1, (7 + rank, 3), generator=dice).int() for rank in range(2)]
    values = [torch.rand(7 + rank, 3, generator=dice) for rank in range(2)]

    def work(rank: int, group: str) -> None:
        experts = ep.Experts(limits, group, "cpu", source=source, name=name, params={"E": KEYS, "A": 4}, check=True)
        one = experts.dispatch(rows[rank], keys[rank], values[rank])
        two = experts.dispatch_send(rows[rank], keys[rank], values[rank]).receive()
        total = int(one.offsets[-1])
        assert torch.equal(one.handle.origins[:total], two.handle.origins[:total])
        has = one.handle.origins[:total] != -1
        if one.index is not None:
            has &= one.index[:total] == torch.arange(total)
        weights = values[rank] if name == "tokens" else None
        home = []
        for held in (one, two):
            assert torch.equal(held.rows[0][:total][has], one.rows[0][:total][has])
            made = (held.rows[0] if held.index is None else held.rows[0][held.index.clamp(min=0, max=199)]).contiguous()
            home.append((made, held.handle, weights))
        assert torch.equal(experts.combine(*home[0]), experts.combine_send(*home[1]).receive())
        other, numbers = -rows[rank][0], torch.rand(total)
        whole = experts.dispatch_again(other, one.handle)[:total], experts.combine_values(numbers, one.handle)
        with launches_only():
            sent = experts.dispatch_again_send(other, two.handle), experts.combine_values_send(numbers, two.handle)
            again, came = (pending.receive() for pending in sent)
        assert torch.equal(again[:total][has], whole[0][has])
        assert torch.equal(came, whole[1])
        experts.synchronize()

    in_group(2, work)
