"""What ranks are about to set up: they agree before anything is made, or both sides are shown on every rank at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from thread_ranks import outcomes  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - as above
from commdsl.runtime import groups  # noqa: E402 - as above
from commdsl.runtime.errors import AgreementError  # noqa: E402 - as above

ROOT = Path(__file__).parents[1]
RING = (ROOT / "schedules" / "collectives" / "allreduce_ring.comm").read_text(encoding="utf-8")


def on_ranks(names: tuple[str, ...], work: Callable[[int], Any]) -> list[Any]:
    """What `work` returns or raises on each rank of a group, well before a time-out."""
    return outcomes(len(names), work, seconds=15)


def summed(op: Any, names: tuple[str, ...]) -> bool:
    """Whether all ranks can call an op and get the sum."""
    found = on_ranks(names, lambda rank: op(torch.arange(20.0) + rank, group=names[rank]))
    return all(torch.equal(one, 3 * torch.arange(20.0) + 3) for one in found)


def test_another_schedule() -> None:
    """Ranks whose first calls are of different schedules learn at once what the others set up, and can go on."""
    names = commdsl.threads(3)
    ops = [commdsl.load(name, ranks=3) for name in ("allreduce_ring", "allreduce_ring", "allreduce_oneshot")]
    found = on_ranks(names, lambda rank: ops[rank](torch.zeros(20), group=names[rank]))

    assert all(isinstance(error, AgreementError) for error in found)
    assert "rank 2 of group" in str(found[0])
    assert "sets up `allreduce_oneshot` where rank 0 sets up `allreduce_ring`" in str(found[0])
    assert "sets up `allreduce_ring` where rank 2 sets up `allreduce_oneshot`" in str(found[2])
    assert summed(ops[0], names)


def test_one_text_under_two_paths(tmp_path: Path) -> None:
    """The same text is the same schedule, wherever it lies; comments and blank lines do not count."""
    for rank, text in enumerate((RING, RING, f"# moved\n\n{RING}")):
        (tmp_path / f"of_rank_{rank}.comm").write_text(text, encoding="utf-8")
    ops = [commdsl.load(tmp_path / f"of_rank_{rank}.comm", ranks=3) for rank in range(3)]
    names = commdsl.threads(3)
    found = on_ranks(names, lambda rank: ops[rank](torch.arange(20.0) + rank, group=names[rank]))

    assert all(torch.equal(one, 3 * torch.arange(20.0) + 3) for one in found)
    assert summed(ops[0], names)  # and to a rank that has both texts they are one


def test_two_texts(tmp_path: Path) -> None:
    """Where texts differ, every rank sees where: the first line that does, with the name of the file, from both."""
    ring = f"# {tmp_path.name}\n{RING}"  # not what this process knows under another name
    changed = ring.replace("reduce x[(r - s) % P] -> x[(r - s) % P]", "reduce x[(r - s + 1) % P] -> x[(r - s + 1) % P]")
    changed = changed.replace(
        "put x[(r + 1 - s) % P] -> x[(r + 1 - s) % P]", "put x[(r + 2 - s) % P] -> x[(r + 2 - s) % P]"
    )
    for name, text in (("a", ring), ("b", changed)):
        (tmp_path / f"{name}.comm").write_text(text, encoding="utf-8")
    ops = [commdsl.load(tmp_path / f"{name}.comm", ranks=2) for name in ("a", "b")]
    names = commdsl.threads(2)
    found = on_ranks(names, lambda rank: ops[rank](torch.zeros(20), group=names[rank]))

    line = 1 + next(number for number, line in enumerate(ring.splitlines()) if "reduce x" in line)
    for error in found:
        assert isinstance(error, AgreementError)
        assert "ranks 1 and 0" in str(error) or "ranks 0 and 1" in str(error)
        for name, text in (("a", ring), ("b", changed)):
            assert f"{name}.comm:{line} on rank" in str(error)
            assert text.splitlines()[line - 1].strip() in str(error)


@pytest.mark.parametrize("is_set_up", [False, True])
def test_two_texts_of_one_name(is_set_up: bool, tmp_path: Path) -> None:
    """Where the calls of two ranks have the same words and their schedules differ, both files and digests are shown:
    in a first call as in one of two ops that both ranks have set up.
    """
    files, ops = [tmp_path / f"{name}.comm" for name in "ab"], []
    for shift, file in enumerate(files):
        text = RING.replace("(r - s)", f"(r - s + {shift})").replace("(r + 1 - s)", f"(r + 1 - s + {shift})")
        file.write_text(f"# {tmp_path.name}\n{text}", encoding="utf-8")
        ops.append(commdsl.load(file, ranks=2))
    names = commdsl.threads(2)
    if is_set_up:
        for op in ops:
            on_ranks(names, lambda rank, op=op: op(torch.zeros(20), group=names[rank]))
    found = on_ranks(names, lambda rank: ops[rank](torch.zeros(20), group=names[rank]))

    digests = [op.program(2).emitted.identity[:8] for op in ops]
    assert digests[0] != digests[1]
    for error in found:
        assert isinstance(error, AgreementError)
        for file, digest in zip(files, digests, strict=True):
            assert f"{file}, digest {digest}" in str(error)
        assert is_set_up == ("calls `allreduce_ring` on 80 bytes of float32, sum" in str(error))


def test_another_tuning() -> None:
    """A schedule that ranks tune or parametrise differently is not the same: what differs is said, not a digest."""
    names = commdsl.threads(2)
    tuned = [commdsl.load("allreduce_ring", ranks=2, tune={"lanes": lanes}) for lanes in (2, 3)]
    found = on_ranks(names, lambda rank: tuned[rank](torch.zeros(20), group=names[rank]))
    assert "lanes: 3 on rank 1, 2 on rank 0" in str(found[0])
    rooted = [commdsl.load("broadcast_tree", ranks=2, params={"root": root}) for root in (0, 1)]
    found = on_ranks(names, lambda rank: rooted[rank](torch.zeros(20), group=names[rank]))
    assert "parameters: root=1, K=1 on rank 1, root=0, K=1 on rank 0" in str(found[0])
    assert "kernel" not in str(found[0])


def test_less_time_is_for_one_set_up() -> None:
    """Where ranks that gave a set-up less time do not agree, what they meet for next has the group's time again."""
    names, less = commdsl.threads(2), 0.5
    known = commdsl.load("allreduce_ring", ranks=2).program(2)
    comms = on_ranks(names, lambda rank: groups.of(names[rank], torch.device("cpu")))
    found = on_ranks(
        names,
        lambda rank: comms[rank].workspace(known.plan, known.emitted, "own", terms={"rows": rank}, seconds=less),
    )
    assert [type(error) for error in found] == [AgreementError] * 2

    def late(rank: int) -> Any:
        time.sleep(2 * less * rank)
        return comms[rank].exchange("next", b"come", "meet")

    assert on_ranks(names, late) == [(b"come", b"come")] * 2


def test_a_second_life() -> None:
    """After `shutdown` a group can be used again: what was said before it is not heard."""
    names = commdsl.threads(3)
    one, other = (commdsl.load(name, ranks=3) for name in ("allreduce_ring", "allreduce_oneshot"))
    assert summed(one, names)
    on_ranks(names, lambda rank: [comm.close() for comm in groups.every(names[rank])])
    groups.forget()
    assert summed(other, names)


def test_a_set_up_where_another_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank in a call, another that sets up another op: both learn at once what each does; after a reset all go on."""
    monkeypatch.setenv("COMMDSL_TIMEOUT", "60")
    names = commdsl.threads(2)
    known, new = (commdsl.load(name, ranks=2) for name in ("allreduce_ring", "allreduce_oneshot"))
    on_ranks(names, lambda rank: known(torch.zeros(20), group=names[rank]))
    found = on_ranks(names, lambda rank: (known, new)[rank](torch.zeros(20), group=names[rank]))

    sides = "sets up `allreduce_oneshot` where rank 0 calls `allreduce_ring` on 80 bytes of float32, sum"
    assert all(isinstance(error, AgreementError) and sides in str(error) for error in found), found
    on_ranks(names, lambda rank: commdsl.reset(names[rank]))
    total = on_ranks(names, lambda rank: new(torch.ones(20), group=names[rank]))
    assert all(torch.equal(one, torch.full((20,), 2.0)) for one in total)
