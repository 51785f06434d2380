"""A transformer that is trained through commdsl, tensor parallel and data parallel, beside gloo, on four host ranks.

Assumes a C++ compiler. GPUs have `gpu/run_training.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from forked import launched  # noqa: E402 - after the check for torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import tensor_parallel_ddp as example  # noqa: E402 - after the check for torch

STEPS = 100


def test_losses_beside_gloo() -> None:
    """On a mesh of 2 x 2, where each sum is of two numbers, the losses of 100 steps and the weights are gloo's bits."""
    script = str(ROOT / "examples" / "tensor_parallel_ddp.py")
    done = launched(4, script, "--mesh", "2x2", "--steps", str(STEPS), "--layers", "1")

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{STEPS} of {STEPS} losses the same bit for bit" in done.stdout
    assert "weights the same bit for bit: yes" in done.stdout


LEARNED = [4.0, 2.0, 1.0]
NEAR = [4.0, 2.0, 1.0 + 1e-6]
FAR = [4.0, 2.0, 1.0 + 1e-3]


@pytest.mark.parametrize(
    ("ours", "nudged", "same_weights", "fault"),
    [
        (LEARNED, [], True, ""),
        (NEAR, [], True, "no order"),
        (LEARNED, [], False, "no order"),
        (NEAR, NEAR, False, ""),
        (FAR, NEAR, False, "a rounding makes"),
        ([4.0, 2.0, float("nan")], NEAR, False, "nothing was learned"),
        ([4.0, float("nan"), 1.0], NEAR, False, "a rounding makes"),
        ([4.0, 4.0, 3.9], [], True, "nothing was learned"),
    ],
)
def test_what_is_a_fault(ours: list[float], nudged: list[float], same_weights: bool, fault: str) -> None:
    """Bits agree where sums have no order, losses within a few roundings elsewhere, and something is learned."""
    found = example.Comparison(ours, LEARNED, nudged, same_weights).fault

    assert fault in found
    assert bool(fault) == bool(found)
