"""Sharded parameters in training: checkpoints on other numbers of ranks, clipping, sums of gradients, refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import gloo_ranks  # noqa: E402 - after the check for torch
from forked import launched  # noqa: E402 - as above

ROOT = Path(__file__).parent.parent
MODEL = str(Path(__file__).parent / "sharded_model.py")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_training(ranks: int) -> None:
    """Five clipped steps of a transformer, whose rows lie on all ranks, are those of one rank of torch alone."""
    done = launched(ranks, MODEL, "train")

    assert done.returncode == 0, done.stderr


def test_checkpoints(tmp_path: Path) -> None:
    """What two ranks save is loaded bit for bit on one, two and four, states of Adam included."""
    for ranks, what in ((2, "save"), (1, "load"), (2, "load"), (4, "load")):
        done = launched(ranks, MODEL, what, str(tmp_path / "checkpoint"))
        assert done.returncode == 0, f"{what} on {ranks}: {done.stderr}"


def programs() -> list[str]:
    """Of the page of the layers."""
    page = (ROOT / "commdsl" / "overlap" / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", programs())
def test_page(text: str, tmp_path: Path) -> None:
    """A program of the page runs on two ranks."""
    (tmp_path / "program.py").write_text(text)
    done = launched(2, str(tmp_path / "program.py"))

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("line", "instead", "fails"),
    [
        ("", "", False),
        ("overlap.sync_replicated(model)", "", True),
        ("overlap.clip_grad_norm_", "torch.nn.utils.clip_grad_norm_", True),
    ],
)
def test_page_with_a_mistake(
    line: str, instead: str, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With COMMDSL_DEBUG=1 the program runs as it is; without its sums, or with torch's clipping, its first step fails
    on all ranks.
    """
    monkeypatch.setenv("COMMDSL_DEBUG", "1")
    (tmp_path / "program.py").write_text(programs()[0].replace(line, instead) if line else programs()[0])
    done = launched(2, str(tmp_path / "program.py"))

    assert bool(done.returncode) == fails, done.stderr
    assert ("error[C976]: different gradients of `norm.weight` on ranks 0 and 1" in done.stderr) == fails


CASES = [
    "subgroups",
    "placements",
    "loads",
    "declarations",
    "refused_loads",
    "full_states",
    "optimizers",
    "clipping",
    "clipping_some",
    "sums",
    "refused_sums",
    "groups_across",
    "debugged",
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Connection]]:
    yield from gloo_ranks.started("sharded_cases", tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize("name", CASES)
def test_on_four_processes(ranks: list[Connection], name: str) -> None:
    """Each states what holds on every rank."""
    gloo_ranks.holds(ranks, name)
