"""Experts whose rows go once per rank, aligned, with values, and again, on tensors of torch beside the simulation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from host_keys import going, nodes_of  # noqa: E402 - after the check for torch
from test_keys_there import FORMS, call_of  # noqa: E402 - after the check for torch
from thread_ranks import in_group  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - after the check for torch
from commdsl import ep  # noqa: E402 - after the check for torch
from commdsl.build.host_keys import KeysCall  # noqa: E402 - after the check for torch
from commdsl.ep import simulate  # noqa: E402 - after the check for torch
from commdsl.runtime.errors import DispatchError, TensorError  # noqa: E402 - after the check for torch

KEYS, ALIGNED = 12, 4
LIMITS = ep.Limits(rows=40, keys=8, received=1000, widths=(10, 16), width_again=24)


def written(folder: Path, often: str, value: bool = True, topology: str = "") -> Path:
    path = folder / "going.comm"
    path.write_text(f"""{topology}dispatch going(E = {KEYS}, A = {ALIGNED}) for P ranks {{
      rows x[T]   rows scale[T]
      key expert[T, K] of E
      {"value gate[T, K]" if value else ""}
      route x, scale{", gate" if value else ""} by expert / (E / P) {often}
      place by (expert, source rank, row) aligned A
    }}""")
    return path


@dataclass(frozen=True, eq=False)
class Case:
    """A call on all ranks, and other rows of the same routing; what each must hold after both."""

    call: KeysCall
    more: list[np.ndarray]
    received: list[simulate.Received]

    @staticmethod
    def drawn(kind: str, ranks: int, seed: int, node: int | None = None) -> Case:
        call = call_of(kind, ranks, KEYS, 1 + seed % 6, seed, ALIGNED)
        dice = np.random.default_rng(seed)
        more = [dice.standard_normal((len(keys), 3)).astype(np.float64) for keys in call.keys]
        rank_of = [key * ranks // KEYS for key in range(KEYS)]
        tensors = (*call.tensors, more)
        return Case(call, more, simulate.dispatch(call.keys, tensors, rank_of, call.values, ALIGNED, node))


def judge(experts: ep.Experts, case: Case, rank: int, often: str) -> None:
    """There, and again."""
    call, mine = case.call, case.received[rank]
    x, scale, keys, values = (
        torch.from_numpy(one)
        for one in (*(tensor[rank] for tensor in call.tensors), call.keys[rank], call.values[rank])
    )
    there = experts.dispatch((x, scale), keys, values)
    handle, total = there.handle, len(mine.origins)
    assert there.counts.tolist() == mine.counts.tolist()
    assert there.offsets.tolist() == mine.offsets.tolist()
    assert handle.places.tolist() == mine.places.tolist()
    assert handle.origins[:total].numpy().astype(np.uint64).tolist() == mine.origins.tolist()
    assert torch.equal(there.values[:total], torch.from_numpy(mine.values))
    assert handle.values is there.values
    at = slice(0, total)
    if often == FORMS[2]:
        assert there.index[:total].tolist() == mine.index.tolist()
        at = np.flatnonzero((mine.index == np.arange(total)) | (mine.index < 0))
    found = (*there.rows, experts.dispatch_again(torch.from_numpy(case.more[rank]), handle))
    for one, other in zip(found, mine.rows, strict=True):
        assert torch.equal(one[:total][at], torch.from_numpy(other)[at])


@pytest.mark.parametrize(("ranks", "nodes"), [(1, ""), (3, ""), (3, "0,1,1")])
@pytest.mark.parametrize("often", FORMS, ids=lambda often: often[-8:] or "each")
def test_there_and_again(ranks: int, nodes: str, often: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, call after call without a join, whatever the keys are."""
    monkeypatch.setenv("COMMDSL_NODES", nodes)
    kinds = ("random", "some have none", "all to one key", "nobody has rows", "twice", "most are dropped")
    cases = [Case.drawn(kind, ranks, seed) for seed, kind in enumerate(kinds)]

    def work(rank: int, group: str) -> None:
        experts = ep.Experts(LIMITS, group, "cpu", check=True, source=written(tmp_path, often))
        for case in cases:
            judge(experts, case, rank, often)
        experts.synchronize()
        experts.release()

    in_group(ranks, work)


@pytest.mark.parametrize("nodes", ["", "0,0,1,1"], ids=["near", "far"])
@pytest.mark.parametrize("often", FORMS[1:], ids=["filled", "by index"])
def test_once_per_node(often: str, nodes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, on two nodes of the topology that the Experts are held to."""
    monkeypatch.setenv("COMMDSL_NODES", nodes)
    kinds = ("random", "some have none", "all to one key", "twice")
    cases = [Case.drawn(kind, 4, seed, 2) for seed, kind in enumerate(kinds)]
    source = written(tmp_path, often.replace("rank", "node"), topology=nodes_of(4, 2))

    def work(rank: int, group: str) -> None:
        experts = ep.Experts(LIMITS, group, "cpu", check=True, source=source, on="nodes")
        assert experts.plan.push_by_key.node == 2
        for case in cases:
            judge(experts, case, rank, often)
        experts.synchronize()
        experts.release()

    in_group(4, work)


def test_memory_of_what_crosses() -> None:
    """As the README has it: for each other node the rows of a rank, and 4 bytes for each key, place and value."""
    of = going(6, KEYS, "once per node", node=2)
    widths = 10, 16, *(4 * 8,) * 3
    push, again = of.plan.push_by_key, of.again.push_again
    assert LIMITS.crossing(push, 6).size == sum(-(-2 * 40 * width // 256) * 256 for width in widths)
    assert LIMITS.crossing(again, 6).size == sum(-(-2 * 40 * width // 256) * 256 for width in (24, 32, 32))
    assert LIMITS.crossing(going(6, KEYS).plan.push_by_key, 6).size == 0


@pytest.mark.parametrize("often", FORMS, ids=lambda often: often[-8:] or "each")
@pytest.mark.parametrize("value", [False, True])
def test_memory_of_results(often: str, value: bool) -> None:
    """As the README has it: of each place the rows, eight bytes of origin, four of a value and of an index; and where
    rows go once per rank four for each key of every rank's rows; each in lines of its own.
    """
    push = going(2, KEYS, often, value=value).plan.push_by_key
    sizes = [1000 * size for size in (10, 16, 8, *([4] if value else []), *([4] if often == FORMS[2] else []))]
    sizes += [2 * 40 * 32] if often else []
    assert LIMITS.result_bytes(push, 2) == sum(-(-size // 256) * 256 for size in sizes)


def test_refused(tmp_path: Path) -> None:
    """Values that are not there, or not as they must be, and rows that nobody has memory for, are refused."""
    (name,) = commdsl.threads(1)
    experts = ep.Experts(LIMITS, name, "cpu", source=written(tmp_path, FORMS[1]))
    rows = torch.zeros(3, 10, dtype=torch.uint8), torch.zeros(3, 16, dtype=torch.uint8)
    keys, values = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2)
    for wrong, message in (
        (None, "routes a value of each key"),
        (values.double(), "weights are torch.float64"),
        (values[:, :1].contiguous(), "a weight for each key"),
    ):
        with pytest.raises(TensorError, match=message):
            experts.dispatch(rows, keys, wrong)
    there = experts.dispatch(rows, keys, values)
    with pytest.raises(TensorError, match="expected 3 rows"):
        experts.dispatch_again(torch.zeros(4, 2), there.handle)
    with pytest.raises(DispatchError, match="28 bytes, and the Limits are for 24"):
        experts.dispatch_again(torch.zeros(3, 7), there.handle)
    with pytest.raises(DispatchError, match="even number"):
        ep.Experts(replace(LIMITS, width_again=3), name, "cpu", source=written(tmp_path, FORMS[1]))
    other = ep.Experts(replace(LIMITS, width_again=0), name, "cpu", source=written(tmp_path, FORMS[1]))
    with pytest.raises(DispatchError, match="width_again"):
        other.dispatch_again(torch.zeros(3, 2), there.handle)


def test_mates_lead_nowhere_else(tmp_path: Path) -> None:
    """Places and mates that were written over lead no row out of the memory that there is for it."""
    case = Case.drawn("random", 2, 3)

    def work(rank: int, group: str) -> Any:
        experts = ep.Experts(LIMITS, group, "cpu", source=written(tmp_path, FORMS[1]))
        x, scale = (torch.from_numpy(tensor[rank]) for tensor in case.call.tensors)
        keys, values = torch.from_numpy(case.call.keys[rank]), torch.from_numpy(case.call.values[rank])
        handle = experts.dispatch((x, scale), keys, values).handle
        more = torch.from_numpy(case.more[rank])
        held = experts.dispatch_again(more, handle)  # lies behind what the next call writes
        before = held.clone()
        wild = replace(handle, mates=torch.full_like(handle.mates, 2**31 - 1))
        wild.mates[:, ::2] = -7
        places = torch.where(handle.places < 0, -1, 2**31 - 1).int()
        experts.dispatch_again(more, replace(wild, places=places))
        experts.synchronize()
        return torch.equal(held, before)

    assert in_group(2, work) == [True, True]
