"""Experts whose rows travel in float8, on tensors of torch beside the contract; and what is refused of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from thread_ranks import in_group  # noqa: E402 - after the check for torch

from commdsl import ep  # noqa: E402 - after the check for torch
from commdsl.ep import simulate  # noqa: E402 - after the check for torch
from commdsl.runtime.errors import DispatchError, TensorError  # noqa: E402 - after the check for torch

ROOT = Path(__file__).parent.parent
KEYS, ROWS, COLUMNS, STRETCH, ALIGNED = 12, 20, 200, 64, 8
LIMITS = ep.Limits(rows=ROWS, keys=3, received=300, widths=(COLUMNS,), width_back=4 * COLUMNS)
PARAMS = {"E": KEYS, "A": ALIGNED, "B": STRETCH}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("nodes", ["", "0,1,1"])
def test_rows_and_scales(nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank receives is the contract's, padding is zero, and what is made of it comes back; one
    rank makes two launches of a call.
    """
    monkeypatch.setenv("COMMDSL_NODES", nodes)
    dice = np.random.default_rng(1)
    keys = [dice.integers(0, KEYS + 1, (ROWS - rank, 3)).astype(np.int32) for rank in range(3)]
    weights = [dice.random(one.shape, np.float32) for one in keys]
    wide = [torch.from_numpy(dice.standard_normal((len(one), COLUMNS)).astype(np.float32)) for one in keys]

    def work(rank: int, group: str) -> None:
        experts = ep.Experts(LIMITS, group, "cpu", check=True, source="experts_float8", params=PARAMS)
        for dtype in DTYPES:
            x = [one.to(dtype) for one in wide]
            pairs = [simulate.quantised(one.float().numpy(), STRETCH) for one in x]
            tensors = [[codes for codes, _ in pairs], [scales for _, scales in pairs]]
            law = simulate.dispatch(keys, tensors, [key // 4 for key in range(KEYS)], weights, ALIGNED)[rank]
            given = x[rank], torch.from_numpy(keys[rank]), torch.from_numpy(weights[rank])
            found = experts.dispatch_send(*given).receive() if rank == 1 else experts.dispatch(*given)
            assert isinstance(found.rows, ep.Quantised)
            rows, scales = found.rows
            total = len(law.origins)
            assert (rows.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
            assert rows[:total].view(torch.uint8).numpy().tobytes() == law.rows[0].tobytes()
            assert scales[:total].numpy().tobytes() == law.rows[1].tobytes()
            assert found.offsets.tolist() == law.offsets.tolist()
            made = rows.float() * scales.repeat_interleave(STRETCH, 1)[:, :COLUMNS]
            back = experts.combine(made, found.handle)
            kept = torch.from_numpy(np.where(keys[rank] < KEYS, weights[rank], 0)).sum(1, keepdim=True)
            torch.testing.assert_close(back, kept * x[rank].float(), rtol=0.07, atol=0.01)
        experts.synchronize()
        experts.release()

    in_group(3, work)


def test_refused() -> None:
    """Rows of another type, an odd number of elements, more than the Limits have."""

    def work(rank: int, group: str) -> None:
        experts = ep.Experts(LIMITS, group, "cpu", source="experts_float8", params={**PARAMS, "E": 4})
        keys, weights = torch.zeros((2, 1), dtype=torch.int32), torch.ones((2, 1))
        with pytest.raises(TensorError, match="given as float32, float16, bfloat16, not as"):
            experts.dispatch(torch.zeros((2, COLUMNS), dtype=torch.float64), keys, weights)
        with pytest.raises(DispatchError, match="an even number of bytes, 2 or more, not 33"):
            experts.dispatch(torch.zeros((2, 33)), keys, weights)
        with pytest.raises(DispatchError, match="takes 202 bytes, and the Limits are for 200"):
            experts.dispatch(torch.zeros((2, 202)), keys, weights)
        experts.release()

    in_group(1, work)


def test_readme() -> None:
    """The lines of the README run, and give what they say."""
    section = (ROOT / "commdsl" / "ep" / "README.md").read_text("utf-8").partition("\n## In float8\n")[2]
    lines, gradients, *_ = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)

    def work(rank: int, group: str) -> None:
        names: dict[str, Any] = {"torch": torch, "ep": ep, "ranks": 2, "group": group}
        names["x"], scores = torch.randn(64, 512).bfloat16(), torch.randn(64, 8)
        names["weights"], names["chosen"] = scores.softmax(1).topk(2)
        exec(lines, names)
        assert (names["rows"].shape, names["scales"].shape) == ((256, 512), (256, 4))
        names["experts"].synchronize()
        names["experts"].release()
        names["x"].requires_grad_()
        exec(gradients, names)
        names["rows"][: int(names["there"].offsets[-1])].float().sum().backward()
        assert torch.equal(names["x"].grad, torch.full((64, 512), 2.0).bfloat16())
        names["exchange"].release()

    in_group(2, work)


def test_memory() -> None:
    """As the README has it: a byte for each element, four for each stretch of them, and what is beside rows."""

    def work(rank: int, group: str) -> None:
        experts = ep.Experts(LIMITS, group, "cpu", source="experts_float8", params={**PARAMS, "E": 4})
        push = experts.plan.push_by_key
        lines = [300 * line for line in (COLUMNS, 4 * 4, 8, 4)]  # rows, scales, origins, a value
        lines.append(2 * LIMITS.rows * 4 * LIMITS.keys)  # mates
        assert LIMITS.result_bytes(push, 2) == sum(-(-line // 256) * 256 for line in lines)
        experts.release()

    in_group(1, work)
