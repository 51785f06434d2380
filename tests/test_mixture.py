"""A small mixture of experts, trained on four host ranks that share the experts, beside one rank that has them all.

Assumes a C++ compiler. On GPUs `torchrun --nproc-per-node 4 examples/mixture_of_experts.py` is run by hand.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import mixture_of_experts as example  # noqa: E402 - after the check for torch


def test_losses_beside_one_rank() -> None:
    """Of as many tokens as each rank happens to have, and 12 experts, the losses of some steps are one rank's."""
    script = str(ROOT / "examples" / "mixture_of_experts.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*launch, script, "--tokens", "30", "--steps", "4"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "in 4 steps" in done.stdout
    assert "1.0e-05 allowed" in done.stdout
    assert "as it must be" in done.stdout


LEARNED = [4.0, 2.0, 1.0]
NEAR = [4.0, 2.0, 1.0 + 1e-6]
FAR = [4.0, 2.0, 1.0 + 1e-3]


@pytest.mark.parametrize(
    ("spread", "nudged", "fault"),
    [
        (NEAR, LEARNED, ""),
        (FAR, LEARNED, "1.0e-03 apart, more than 1.0e-05"),
        (FAR, FAR, ""),
        ([4.0, 4.0, 3.9], LEARNED, "nothing was learned"),
        ([4.0, float("nan"), 1.0], LEARNED, "apart, more than"),
    ],
)
def test_what_is_a_fault(spread: list[float], nudged: list[float], fault: str) -> None:
    """Losses agree to 1e-5, or within what a rounding of the start makes, and something is learned."""
    found = example.Comparison(spread, LEARNED, nudged, 1e-5).fault

    assert fault in found
    assert bool(fault) == bool(found)


def test_experts_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has no grouped matmul each expert has one of its own: the same rows, and the same gradients."""
    torch.manual_seed(2)
    experts, offsets = example.Experts(3), torch.tensor([2, 2, 7], dtype=torch.int32)
    rows = torch.randn(9, example.WIDTH)
    found = []
    for group in (True, False):
        monkeypatch.setattr(example, "can_group", lambda _, group=group: group)
        given = rows.clone().requires_grad_()
        made = experts(given, offsets)[:7]
        made.square().sum().backward()
        found.append([made.detach(), given.grad[:7], *(one.grad for one in experts.parameters())])
        experts.zero_grad()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
