"""Experts on tensors of torch: ranks are threads of this process beside the simulation; refusals; the README."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from fake_gpu import FakeGpu  # noqa: E402 - after the check for torch
from forked import launched  # noqa: E402 - after the check for torch
from host_keys import back_of, declared  # noqa: E402 - after the check for torch
from thread_ranks import in_group, outcomes  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - after the check for torch
from commdsl import ep  # noqa: E402 - after the check for torch
from commdsl.ep import simulate  # noqa: E402 - after the check for torch
from commdsl.program.memory import Transport  # noqa: E402 - after the check for torch
from commdsl.runtime.errors import (  # noqa: E402 - after the check for torch
    AgreementError,
    CaptureError,
    DispatchError,
    GradientError,
    TensorError,
)

KEYS = 12
LIMITS = ep.Limits(rows=40, keys=8, received=400, widths=(40, 6), width_back=40)


@dataclass(frozen=True, eq=False)
class Case:
    """What all ranks have in a call, and what each must hold after it."""

    keys: list[np.ndarray]
    x: list[Any]
    scale: list[Any]
    weights: list[np.ndarray]
    received: list[simulate.Received]

    @staticmethod
    def drawn(ranks: int, seed: int, dtype: Any) -> Case:
        dice = np.random.default_rng(seed)
        a_row = int(dice.integers(1, 5))
        rows = [int(dice.integers(0, 33 // ranks)) for _ in range(ranks)]
        high = KEYS + 1 if seed % 3 else 1  # all to one rank
        keys = [dice.integers(0, high, (count, a_row)).astype(np.int32) for count in rows]
        x = [torch.from_numpy(dice.standard_normal((count, 2, 5))).to(dtype) for count in rows]
        scale = [torch.from_numpy(dice.integers(0, 256, (count, 6), dtype=np.uint8)) for count in rows]
        weights = [dice.standard_normal(one.shape).astype(np.float32) for one in keys]
        plain = [[one.float().numpy() for one in x], [one.numpy() for one in scale]]
        share = KEYS // ranks
        return Case(keys, x, scale, weights, simulate.dispatch(keys, plain, [key // share for key in range(KEYS)]))

    def back(self, rows: list[Any], rank: int) -> Any:
        """What comes back to a rank if `rows` are what every rank sends."""
        plain = [one.float().numpy() for one in rows]
        found = simulate.combine(plain, self.received, self.keys, self.weights)[rank]
        return torch.from_numpy(found).to(rows[0].dtype)


def there_and_back(experts: Any, case: Case, rank: int) -> None:
    mine = case.received[rank]
    there = experts.dispatch((case.x[rank], case.scale[rank]), torch.from_numpy(case.keys[rank]))
    (x, scale), handle = there.rows, there.handle
    total = len(mine.origins)
    assert there.counts.tolist() == mine.counts.tolist()
    assert there.offsets.tolist() == mine.offsets.tolist()
    assert handle.places.tolist() == mine.places.tolist()
    assert (there.values, there.index) == (None, None)
    assert torch.equal(x[:total].float(), torch.from_numpy(mine.rows[0]))
    assert torch.equal(scale[:total], torch.from_numpy(mine.rows[1]))
    changed = [torch.from_numpy(one.rows[0]).to(x.dtype) * 2 - 1 for one in case.received]
    for rows in (x * 2 - 1, x[:total] * 2 - 1):  # what lies behind what came does not count
        home = experts.combine(rows, handle, torch.from_numpy(case.weights[rank]))
        assert torch.equal(home, case.back(changed, rank))
    numbers = [one.rows[0][:, 0, 0].astype(np.float32) for one in case.received]
    values = experts.combine_values(x[:, 0, 0].float().contiguous(), handle)
    assert torch.equal(values, torch.from_numpy(simulate.combine_values(numbers, case.received, case.keys)[rank]))


# --- right ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "nodes"), [(1, ""), (2, ""), (3, ""), (3, "0,1,2"), (3, "0,1,1")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_there_and_back(ranks: int, nodes: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, call after call without a join, all ranks' numbers of rows and keys changing."""
    monkeypatch.setenv("COMMDSL_NODES", nodes)
    cases = [Case.drawn(ranks, seed, dtype) for seed in range(8)]

    def work(rank: int, group: str) -> None:
        experts = ep.Experts(LIMITS, group, "cpu", check=True, params={"E": KEYS})
        for case in cases:
            there_and_back(experts, case, rank)
        experts.synchronize()
        experts.release()

    in_group(ranks, work)


def test_one_tensor(tmp_path: Path) -> None:
    """A dispatch of one tensor takes a tensor and gives one; without a way back it has none."""
    path = tmp_path / "one.comm"
    path.write_text("""dispatch one(E = 4) for P ranks {
      rows x[T]   key expert[T, K] of E   route x by expert % P   place by (expert, source rank, row)
    }""")

    def work(rank: int, group: str) -> list[float]:
        experts = ep.Experts(ep.Limits(4, 2, 8, (4,)), group, "cpu", source=path)
        x = torch.tensor([[1.0], [2.0]]) + 10 * rank
        there = experts.dispatch(x, torch.tensor([[0, 1], [3, 4]], dtype=torch.int32))
        with pytest.raises(DispatchError, match="no way back"):
            experts.combine(there.rows, there.handle, torch.ones(2, 2))
        return there.rows[: int(there.counts.sum())].flatten().tolist()

    assert in_group(2, work) == [[1.0, 11.0], [1.0, 11.0, 2.0, 12.0]]


def test_without_weights(tmp_path: Path) -> None:
    """What comes back by a plain sum takes no weights."""
    path = tmp_path / "plain.comm"
    path.write_text("""dispatch plain(E = 4) for P ranks {
      rows x[T]   key expert[T, K] of E   route x by expert % P   place by (expert, source rank, row)   back y by sum
    }""")

    def work(rank: int, group: str) -> list[float]:
        experts = ep.Experts(ep.Limits(4, 2, 8, (4,), 4), group, "cpu", source=path)
        x = torch.tensor([[1.0], [2.0], [4.0]]) + 10 * rank
        keys = torch.tensor([[0, 1], [3, 4], [4, 4]], dtype=torch.int32)
        there = experts.dispatch(x, keys)
        rows, handle = there.rows, there.handle
        with pytest.raises(TensorError, match="takes no weights"):
            experts.combine(rows, handle, torch.ones(3, 2))
        for wrong in (torch.zeros(9), torch.zeros(2, 2), torch.zeros(3, dtype=torch.float64)):
            with pytest.raises(TensorError, match="values"):
                experts.combine_values(wrong, handle)
        return experts.combine(rows + 100 * rank, handle).flatten().tolist()

    assert in_group(2, work) == [[1 + 101.0, 102.0, 0.0], [11 + 111.0, 112.0, 0.0]]


@pytest.mark.parametrize(("once", "ranks", "keys"), [(False, 4, 8), (True, 4, 8), (True, 4, 2), (True, 8, 32)])
def test_memory_that_waits(once: bool, ranks: int, keys: int) -> None:
    """As the README has it: a row for each key of a row, or for each rank that has any; eight bytes for a number."""
    limits, of = ep.Limits(100, keys, 1000, (64,), 48), declared(ranks, 8 * ranks)
    back = back_of(of, "ranks" if once else "keys")

    assert limits.waiting_bytes(back) == 100 * (min(ranks, keys) if once else keys) * 48
    assert limits.waiting_bytes(of.values) == 100 * keys * 8
    assert limits.staging_bytes(back) == 0
    far = back_of(of, "ranks" if once else "keys", Transport.NVSHMEM)
    assert limits.staging_bytes(far) == (3 * 1 * 48 if once else 0)  # three lanes of 32 threads


def test_memory_of_results() -> None:
    """Rows of so many calls may be held as `results` says; what nobody holds is used again."""

    def work(rank: int, group: str) -> None:
        experts, case = ep.Experts(LIMITS, group, "cpu", params={"E": KEYS}), Case.drawn(2, 1, torch.float32)
        mine = (case.x[rank], case.scale[rank]), torch.from_numpy(case.keys[rank])
        held = [experts.dispatch(*mine) for _ in range(2)]
        with pytest.raises(DispatchError, match="no memory left"):
            experts.dispatch(*mine)
        address = held.pop().rows[0].data_ptr()
        assert experts.dispatch(*mine).rows[0].data_ptr() == address

    in_group(2, work)


def test_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime of GPUs launches both kernels, in a capture too once they are prepared."""
    gpu = FakeGpu(2)
    gpu.install(monkeypatch)
    cases = [Case.drawn(2, seed, torch.float32) for seed in range(4)]

    def work(rank: int, group: str) -> None:
        gpu.here.rank = rank
        experts = ep.Experts(LIMITS, group, "cpu", params={"E": KEYS}, tune={"sms": 3, "threads": 32})
        with gpu.capturing(), pytest.raises(CaptureError):
            experts.dispatch((cases[0].x[rank], cases[0].scale[rank]), torch.from_numpy(cases[0].keys[rank]))
        experts.prepare(torch.float32)
        for case in cases:
            with gpu.capturing():
                there_and_back(experts, case, rank)
            there_and_back(experts, case, rank)
        experts.release()

    in_group(2, work)
    assert len(gpu.launches) == 2 * 2 * 4 * len(cases)


# --- reported ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [False, True])
def test_no_room(check: bool) -> None:
    """More rows than there is room for are an error on every rank."""
    case = Case.drawn(2, 0, torch.float32)
    total = sum(keys.size for keys in case.keys)
    tight = replace(LIMITS, received=total - 1)

    names = commdsl.threads(2)

    def work(rank: int) -> None:
        experts = ep.Experts(tight, names[rank], "cpu", check=check, params={"E": KEYS})
        experts.dispatch((case.x[rank], case.scale[rank]), torch.from_numpy(case.keys[rank]))
        experts.synchronize()

    for error in outcomes(2, work):
        assert isinstance(error, ep.KeysError)
        assert str(error) == f"error[C963]: {total} rows go to rank 0, which has room for {total - 1}"


def test_no_such_key() -> None:
    """A key that there is not is an error on the rank that has it; the group is whole again after a reset."""
    case = Case.drawn(2, 1, torch.float32)

    def work(rank: int, group: str) -> str:
        experts = ep.Experts(LIMITS, group, "cpu", params={"E": KEYS})
        keys = torch.from_numpy(case.keys[rank].copy())
        if rank == 1:
            keys[0, 0] = -7
        else:
            time.sleep(0.3)  # the other waits long, with what it will report in hand
        try:
            experts.dispatch((case.x[rank], case.scale[rank]), keys)
            experts.synchronize()
            said = ""
        except ep.KeysError as error:
            said = str(error)
        commdsl.reset(group)
        there_and_back(experts, case, rank)
        return said

    quiet, said = in_group(2, work)
    assert quiet == ""
    assert said == "error[C963]: key 0 of row 0 of rank 1 is -7, and keys are 0 ..< 12, or 12 for none"


def test_too_few_go_back() -> None:
    """Who gives back fewer rows than came to it is told so."""
    case = Case.drawn(2, 1, torch.float32)

    def work(rank: int, group: str) -> str:
        experts = ep.Experts(LIMITS, group, "cpu", params={"E": KEYS})
        there = experts.dispatch((case.x[rank], case.scale[rank]), torch.from_numpy(case.keys[rank]))
        short = there.rows[0][: int(there.counts.sum()) - (rank == 1)]
        try:
            experts.combine(short, there.handle, torch.from_numpy(case.weights[rank]))
            experts.synchronize()
        except ep.KeysError as error:
            return str(error)
        return ""

    total = len(case.received[1].origins)
    assert in_group(2, work)[1] == (
        f"error[C963]: {total} rows came to rank 1, and {total - 1} of them are given to go back"
    )


X, SCALE, LIST = torch.zeros(3, 10), torch.zeros(3, 6, dtype=torch.uint8), torch.zeros(3, 2, dtype=torch.int32)

WRONG = {
    "one tensor": ((X, LIST), TensorError, "expected 2 tensors"),
    "long keys": (((X, SCALE), LIST.long()), TensorError, "keys are torch.int64"),
    "keys of one dimension": (((X, SCALE), LIST[:, 0].contiguous()), TensorError, "keys are \\(rows"),
    "fewer keys than rows": (((X, SCALE), LIST[:2]), TensorError, "expected 2 rows"),
    "columns of keys": (((X, SCALE), LIST.t().contiguous().t()), TensorError, "not contiguous"),
    "rows too wide": (((X.double(), SCALE), LIST), DispatchError, "80 bytes"),
    "an odd row": (((X, SCALE[:, :5].contiguous()), LIST), DispatchError, "even number"),
    "too many rows": (((X, SCALE), torch.zeros(41, 2, dtype=torch.int32)), DispatchError, "41 rows"),
    "too many keys": (((X, SCALE), torch.zeros(3, 9, dtype=torch.int32)), DispatchError, "9 keys each"),
    "values that nobody routes": (((X, SCALE), LIST, LIST.float()), TensorError, "takes no values"),
    "a gradient": (((X.clone().requires_grad_(), SCALE), LIST), GradientError, "no gradient"),
}


def test_refused() -> None:
    """What a call cannot take is refused before anything is sent."""
    (name,) = commdsl.threads(1)
    experts = ep.Experts(LIMITS, name, "cpu", params={"E": KEYS})
    for arguments, kind, message in WRONG.values():
        with pytest.raises(kind, match=message):
            experts.dispatch(*arguments)
    there = experts.dispatch((X, SCALE), LIST)
    rows, handle = there.rows, there.handle
    for arguments, message in (
        ((rows[0].double(), handle, LIST.float()), "not in torch.float64"),
        ((rows[0], handle), "multiplies rows with weights"),
        ((torch.zeros(401, 10), handle, LIST.float()), "expected up to 400 rows"),
        ((rows[0], handle, LIST.double()), "weights are torch.float64"),
        ((rows[0], handle, torch.zeros(3, 1)), "a weight for each key"),
    ):
        with pytest.raises(TensorError, match=message):
            experts.combine(*arguments)
    experts.release()
    with pytest.raises(DispatchError, match="was released"):
        experts.dispatch((X, SCALE), LIST)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": -1}, "0 <= rows"),
        ({"keys": 0}, "1 <= keys"),
        ({"keys": 33}, "at most 32 keys"),
        ({"rows": 2**28}, "2 \\*\\* 31 or more"),
        ({"widths": (8,)}, "widths of 2 tensors"),
        ({"widths": (8, 3)}, "even number"),
        ({"width_back": 0}, "even number"),
    ],
)
def test_senseless_limits(change: dict[str, Any], message: str) -> None:
    """Limits that no kernel can have are refused when Experts are made."""
    (name,) = commdsl.threads(1)
    with pytest.raises(DispatchError, match=message):
        ep.Experts(replace(LIMITS, **change), name, "cpu", params={"E": KEYS})


def test_other_files() -> None:
    """A dispatch by tables is no Experts', and all ranks have to make the same."""
    (name,) = commdsl.threads(1)
    with pytest.raises(DispatchError, match="goes by tables"):
        ep.Experts(LIMITS, name, "cpu", source="qkv")

    names = commdsl.threads(2)

    def work(rank: int) -> None:
        ep.Experts(replace(LIMITS, rows=40 + rank), names[rank], "cpu", params={"E": KEYS})

    assert all(isinstance(error, AgreementError) for error in outcomes(2, work))


def test_example(tmp_path: Path) -> None:
    """The program of the README runs on two processes."""
    text = (ROOT / "commdsl" / "ep" / "README.md").read_text(encoding="utf-8")
    script = tmp_path / "program.py"
    script.write_text(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[0])
    done = launched(2, str(script))

    assert done.returncode == 0, done.stderr
    assert "rank 1 computed" in done.stdout
