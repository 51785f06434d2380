"""benchmarks/ab.py: two checkouts side by side, on host ranks.

Assumes a checkout and a C++ compiler. Does not hold any time to a bound.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import ab  # noqa: E402 - after the check for torch

SCRIPT = str(ROOT / "benchmarks" / "ab.py")


def test_both_run(tmp_path: Path) -> None:
    """Each checkout has ranks with its own package; the table has a line a size; a bound passed is exit code 1."""
    (tmp_path / "other").mkdir()
    for name in ("commdsl", "templates", "schedules", "grammar"):
        (tmp_path / "other" / name).symlink_to(ROOT / name)
    command = [sys.executable, SCRIPT, str(tmp_path / "other"), "--device", "cpu", "--sizes", "1K", "--rounds", "3"]
    done = subprocess.run([*command, "--most", "0"], capture_output=True, text=True, timeout=200, check=False)

    assert done.returncode == 1, done.stderr
    assert "3 batches of 20 calls" in done.stdout
    assert re.search(r"^1 KB( +\d+\.\d\d){2} +\d+\.\d{3} +[\d.]+-[\d.]+$", done.stdout, re.MULTILINE), done.stdout


def test_ratios_by_round() -> None:
    """A ratio is of the two batches of one round: what slows both is in neither."""
    ours = ab.Side(Path("a"), [], {1024: [10.0, 20.0, 40.0]})
    theirs = ab.Side(Path("b"), [], {1024: [10.0, 16.0, 40.0]})
    (line,) = ab.lines(ours, theirs)

    assert (line.nbytes, line.ours, line.theirs, line.ratio) == (1024, 20.0, 16.0, 1.0)
    assert (line.quantile(0.0), line.quantile(1.0)) == (1.0, 1.25)


def test_refused(tmp_path: Path) -> None:
    """A folder that is no checkout is refused before any rank starts."""
    done = subprocess.run([sys.executable, SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "is no checkout of commdsl" in done.stderr
