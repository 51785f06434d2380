"""Experts whose rows come back once per rank, on tensors of torch beside the simulation; no two places have one row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fake_gpu import FakeGpu  # noqa: E402 - after the check for torch
from host_keys import going, nodes_of  # noqa: E402 - after the check for torch
from test_keys_there import call_of  # noqa: E402 - after the check for torch
from thread_ranks import in_group  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - after the check for torch
from commdsl import ep  # noqa: E402 - after the check for torch
from commdsl.build.host_keys import KeysCall  # noqa: E402 - after the check for torch
from commdsl.ep import simulate  # noqa: E402 - after the check for torch
from commdsl.runtime.errors import DispatchError, KeysError, TensorError  # noqa: E402 - after the check for torch

KEYS, ALIGNED, COLUMNS = 12, 4, 6
LIMITS = ep.Limits(rows=40, keys=8, received=1000, widths=(10, 16), width_back=4 * COLUMNS)
KINDS = ("random", "some have none", "all to one key", "nobody has rows", "twice", "most are dropped")


def written(folder: Path, *, by_index: bool = False, weight: bool = True, per: str = "rank") -> Path:
    path = folder / "returning.comm"
    path.write_text(f"""{nodes_of(4, 2)} dispatch returning(E = {KEYS}, A = {ALIGNED}) for P ranks {{
      rows x[T]   rows scale[T]
      key expert[T, K] of E
      value weight[T, K]
      route x, scale, weight by expert / (E / P)   once per {per}{" by index" if by_index else ""}
      place by (expert, source rank, row)   aligned A
      back y by sum{"(weight[T, K])" if weight else ""}   once per {per}
    }}""")
    return path


@dataclass(frozen=True, eq=False)
class Case:
    """A call on all ranks, and what experts make of its rows; padding is no number, and adds nothing."""

    call: KeysCall
    received: list[simulate.Received]
    made: list[Any]  # by rank (R, COLUMNS)
    node: int | None

    @staticmethod
    def drawn(kind: str, ranks: int, seed: int, dtype: Any, node: int | None = None) -> Case:
        call = call_of(kind, ranks, KEYS, 1 + seed % 6, seed, ALIGNED)
        rank_of = [key * ranks // KEYS for key in range(KEYS)]
        received = simulate.dispatch(call.keys, call.tensors, rank_of, call.values, ALIGNED, node)
        dice = torch.Generator().manual_seed(seed)
        made = [torch.randn(len(one.origins), COLUMNS, generator=dice).to(dtype) for one in received]
        for held, rows in zip(received, made, strict=True):
            rows[torch.from_numpy(held.origins == simulate.PADDING)] = float("nan")
        return Case(call, received, made, node)

    def home(self, rank: int, dtype: Any, *, weighed: bool = True) -> Any:
        """What comes back to a rank."""
        found = simulate.combine(
            [one.float().numpy() for one in self.made],
            self.received,
            self.call.keys,
            self.call.values if weighed else None,
            once=True,
            node=self.node,
            rounded=lambda row: torch.from_numpy(row).to(dtype).float().numpy(),
        )
        return torch.from_numpy(found[rank]).to(dtype)


def there(experts: ep.Experts, case: Case, rank: int) -> ep.Handle:
    call = case.call
    x, scale = (torch.from_numpy(tensor[rank]) for tensor in call.tensors)
    return experts.dispatch((x, scale), *(torch.from_numpy(one[rank]) for one in (call.keys, call.values))).handle


def judge(experts: ep.Experts, case: Case, rank: int, dtype: Any, *, weighed: bool = True) -> None:
    """Sums, from as many rows as came and from more; of other weights; and a number for each key."""
    handle, mine = there(experts, case, rank), case.made[rank]
    more = torch.full((LIMITS.received, COLUMNS), float("nan"), dtype=dtype)
    more[: len(mine)] = mine
    home = case.home(rank, dtype, weighed=weighed)
    assert torch.equal(experts.combine(mine, handle), home)
    assert torch.equal(experts.combine(more, handle), home)
    if weighed:
        ones = torch.ones(LIMITS.received)
        assert torch.equal(experts.combine(more, handle, ones), case.home(rank, dtype, weighed=False))
    numbers = [np.arange(len(one), dtype=np.float32) + 1000 * at for at, one in enumerate(case.made)]
    values = experts.combine_values(torch.from_numpy(numbers[rank]), handle)
    law = simulate.combine_values(numbers, case.received, case.call.keys)
    assert torch.equal(values, torch.from_numpy(law[rank]))


@pytest.mark.parametrize(
    ("ranks", "nodes", "dtype"),
    [(1, "", torch.float16), (4, "", torch.bfloat16), (3, "0,1,1", torch.float32), (3, "0,1,2", torch.bfloat16)],
)
def test_there_and_back(ranks: int, nodes: str, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, call after call without a join, whatever the keys are."""
    monkeypatch.setenv("COMMDSL_NODES", nodes)
    cases = [Case.drawn(kind, ranks, seed, dtype) for seed, kind in enumerate(KINDS)]

    def work(rank: int, group: str) -> None:
        experts = ep.Experts(LIMITS, group, "cpu", check=True, source=written(tmp_path))
        for case in cases:
            judge(experts, case, rank, dtype)
        experts.synchronize()
        experts.release()

    in_group(ranks, work)


@pytest.mark.parametrize(("nodes", "dtype"), [("", torch.bfloat16), ("0,0,1,1", torch.float32)], ids=["near", "far"])
def test_once_per_node(nodes: str, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, on two nodes of the topology that the Experts are held to."""
    monkeypatch.setenv("COMMDSL_NODES", nodes)
    cases = [Case.drawn(kind, 4, seed, dtype, 2) for seed, kind in enumerate(KINDS)]

    def work(rank: int, group: str) -> None:
        experts = ep.Experts(LIMITS, group, "cpu", check=True, source=written(tmp_path, per="node"), on="nodes")
        for case in cases:
            judge(experts, case, rank, dtype)
        experts.synchronize()
        experts.release()

    in_group(4, work)


def test_halves_between_nodes(tmp_path: Path) -> None:
    """Ranks that make whole calls do not wait for the second launch of those that make two, one call within another:
    what a rank sends on for others it does in the first.
    """
    cases = [Case.drawn(kind, 4, seed, torch.float32, 2) for seed, kind in enumerate(KINDS)]

    def work(rank: int, group: str) -> None:
        experts = ep.Experts(LIMITS, group, "cpu", check=True, source=written(tmp_path, per="node"), on="nodes")
        for case in cases:
            handle, values = there(experts, case, rank), torch.ones(LIMITS.received)
            if rank % 2:
                first, second = (
                    experts.combine_send(case.made[rank], handle),
                    experts.combine_values_send(values, handle),
                )
                home, numbers = first.receive(), second.receive()
            else:
                home, numbers = experts.combine(case.made[rank], handle), experts.combine_values(values, handle)
            assert torch.equal(home, case.home(rank, torch.float32))
            assert torch.equal(numbers, (handle.keys < KEYS).float())
        experts.synchronize()
        experts.release()

    in_group(4, work)


def test_memory_of_what_crosses() -> None:
    """As the README has it: of each node's ranks a sum for each row, and a word."""
    of = going(6, KEYS, "once per node", node=2, back="back y by sum once per node")
    assert LIMITS.waiting_bytes(of.back) == 40 * 3 * 24  # three nodes
    sums, words = 3 * 40 * 2 * 24, 3 * 40 * 4
    assert LIMITS.crossing(of.back.push_back, 6).size == sum(-(-size // 256) * 256 for size in (sums, words))


def test_by_index_and_unweighed(tmp_path: Path) -> None:
    """Rows that are not filled in are made all the same; and without a weight none is taken."""
    cases = [Case.drawn(kind, 2, seed, torch.float32) for seed, kind in enumerate(KINDS)]

    def work(rank: int, group: str) -> None:
        path = written(tmp_path, by_index=True, weight=False)
        experts = ep.Experts(LIMITS, group, "cpu", source=path)
        for case in cases:
            judge(experts, case, rank, torch.float32, weighed=False)
        with pytest.raises(TensorError, match="takes no weights"):
            experts.combine(cases[0].made[rank], there(experts, cases[0], rank), torch.ones(LIMITS.received))
        experts.release()

    in_group(2, work)


def test_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime of GPUs launches all ways, in a capture too once they are prepared."""
    gpu = FakeGpu(2)
    gpu.install(monkeypatch)
    case = Case.drawn("random", 2, 3, torch.float32)

    def work(rank: int, group: str) -> None:
        gpu.here.rank = rank
        tune = {"sms": 3, "threads": 32}
        experts = ep.Experts(LIMITS, group, "cpu", source=written(tmp_path), tune=tune)
        experts.prepare(torch.float32)
        with gpu.capturing():
            judge(experts, case, rank, torch.float32)
        judge(experts, case, rank, torch.float32)
        experts.release()

    in_group(2, work)


def test_refused(tmp_path: Path) -> None:
    """Weights that are not one for each row, and a handle of a call that says nothing of mates."""
    (name,) = commdsl.threads(1)
    experts = ep.Experts(LIMITS, name, "cpu", source=written(tmp_path))
    case = Case.drawn("random", 1, 2, torch.float32)
    handle, rows = there(experts, case, 0), case.made[0]
    for wrong in (torch.ones(len(rows) - 1), torch.ones(rows.shape), torch.ones(len(rows)).double()):
        with pytest.raises(TensorError, match="values"):
            experts.combine(rows, handle, wrong)
    with pytest.raises(DispatchError, match="which are one's"):
        experts.combine(rows, replace(handle, mates=None))


def test_written_over(tmp_path: Path) -> None:
    """Mates that somebody wrote over lead to no row, and are reported."""
    (name,) = commdsl.threads(1)
    experts = ep.Experts(LIMITS, name, "cpu", source=written(tmp_path))
    case = Case.drawn("random", 1, 2, torch.float32)
    handle = there(experts, case, 0)
    handle.mates.fill_(2**31 - 1)

    def call() -> None:
        experts.combine(case.made[0], handle)
        experts.synchronize()

    with pytest.raises(KeysError, match="added up with one that is not among"):
        call()
