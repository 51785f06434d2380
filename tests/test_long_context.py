"""A small Llama with a long context, trained on four host ranks that share the sequence, beside one that has it whole.

Assumes a C++ compiler. On GPUs `torchrun --nproc-per-node 4 examples/long_context_llama.py` is run by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from forked import launched  # noqa: E402 - after the check for torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import long_context_llama as example  # noqa: E402 - after the check for torch


def test_losses_beside_one_rank() -> None:
    """Of 150 tokens, which four ranks cannot share equally, the losses of some steps are one rank's, to 1e-5."""
    script = str(ROOT / "examples" / "long_context_llama.py")
    done = launched(4, script, "--tokens", "150", "--steps", "4", "--layers", "1")

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
        (LEARNED, LEARNED, ""),
        (NEAR, LEARNED, ""),
        (FAR, LEARNED, "1.0e-03 apart, more than 1.0e-05"),
        (FAR, FAR, ""),
        ([4.0, 4.0, 3.9], LEARNED, "nothing was learned"),
        ([4.0, float("nan"), 1.0], LEARNED, "apart, more than"),
        ([4.0, 2.0, float("nan")], LEARNED, "nothing was learned"),
    ],
)
def test_what_is_a_fault(spread: list[float], nudged: list[float], fault: str) -> None:
    """Losses agree to 1e-5, or within what a rounding of the start makes, and something is learned."""
    found = example.Comparison(spread, LEARNED, nudged, 1e-5).fault

    assert fault in found
    assert bool(fault) == bool(found)


def test_turning_is_relative() -> None:
    """The rotary embedding: products of queries and keys depend on how far apart they are, not on where."""
    torch.manual_seed(3)
    q, k = torch.randn(2, 1, 1, 1, example.HEAD_DIM, dtype=torch.float32)

    def product(query: int, key: int) -> float:
        turned = (example.rotated(x, example.turns(torch.tensor([at]))) for x, at in ((q, query), (k, key)))
        return float(torch.mul(*turned).sum())

    assert product(17, 5) == pytest.approx(product(112, 100), abs=1e-4)
    assert product(17, 5) != pytest.approx(product(17, 9), abs=1e-2)
