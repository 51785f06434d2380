"""Buffers that no move joins have types and lengths of their own, in the text, the oracle, the Plan and every call."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commdsl import compiler
from commdsl.checks import check_plan
from commdsl.commands import cubins
from commdsl.commands.arguments import UsageError
from commdsl.commands.dump_plans import plan_text
from commdsl.commands.dumps import ir_text
from commdsl.commands.report import cost_lines
from commdsl.commands.trial import Settings, trial
from commdsl.ir.classes import Unit, units
from commdsl.ir.interpret import run
from commdsl.language.diagnostics import InternalError
from commdsl.machine.dtypes import BY_NAME
from commdsl.machine.resources import data_dir
from commdsl.program.launches import Launch
from commdsl.program.memory import Kept
from commdsl.program.verify import verify

CARRY = """schedule carry for P ranks where P >= 2 {
  inout kv[2]
  inout acc[3] float32
  ensure rotation(kv)

  yield attend(kv, acc -> acc)
  for s in 1 ..< P {
    each r {
      put kv -> kv @ (r + 1) % P
      put acc -> acc @ (r + 1) % P
    }
    yield attend(kv, acc -> acc)
  }
  each r { put acc -> acc @ (r + 1) % P }
}
"""
"""What is summed up travels in float32 beside keys of any type, and need not be as long."""

HEADS = """schedule heads for P ranks where P >= 2 {
  input q[P blocks]
  input kv[P blocks]
  output o[P blocks] like q
  output lse[P blocks] float32 like q
  scratch qh[P blocks]
  scratch kvh[P blocks]
  scratch oh[P blocks]
  ensure alltoall(oh -> o)

  each r, d in 0 ..< P {
    put q[d] -> qh[r] @ d
    put kv[d] -> kvh[r] @ d
  }
  yield attend(qh, kvh -> oh, lse)
  each r, p in 0 ..< P { put oh[p] -> o[r] @ p }
}
"""
"""Rows of all heads become heads of all rows and come back; there are fewer heads of keys than of queries."""

BEHIND = """schedule behind for P ranks where P >= 2 {
  inout kv
  inout acc float32
  scratch part
  ensure rotation(kv)

  yield grad(kv -> part)
  for s in 1 ..< P {
    each r {
      put kv -> kv @ (r + 1) % P
      reduce part -> acc
    }
    each r { put acc -> acc @ (r + 1) % P }
    yield grad(kv -> part)
  }
  each r { reduce part -> acc }
  each r { put acc -> acc @ (r + 1) % P }
  yield finish(acc -> acc)
}
"""
"""Sums in float32, of what a function makes of keys of another type."""


HALVES = """schedule halves for P ranks where P >= 2 {
  input k
  input v like k
  output dk float32 like k
  output dv float32 like v
  scratch kc
  scratch vc
  scratch pk float16 like k
  scratch pv like v
  scratch ak
  scratch av
  ensure rotation(k -> kc, v -> vc) back dk, dv

  yield attend(k, v -> dk, dv)
  for s in 1 ..< P {
    each r {
      put k -> kc @ (r + s) % P
      put v -> vc @ (r + s) % P
    }
    yield attend(kc, vc -> pk, pv)
    each r {
      get pk @ (r + s) % P -> ak
      get pv @ (r + s) % P -> av
    }
    each r {
      reduce ak -> dk
      reduce av -> dv
    }
  }
}
"""
"""Parts of two types are added to sums in float32: that is two launches."""

ALONE = """schedule alone for P ranks where P >= 2 {
  inout kv
  output first
  ensure rotation(kv)
  ensure each r where r == 0 { first == kv @ 1 }

  each r where r == 1 { put kv -> first @ 0 }
  yield attend(kv)
  for s in 1 ..< P {
    each r { put kv -> kv @ (r + 1) % P }
    yield attend(kv)
  }
}
"""
"""One rank alone has a result: what the others return of it is free."""


def compiled(text: str, ranks: int) -> compiler.CompiledSchedule:
    made = compiler.compile(compiler.read_text(text, "classes.comm", Path()), ranks=ranks)
    assert isinstance(made, compiler.CompiledSchedule)
    return made


# --- what is meant ----------------------------------------------------------------------------------------------------


def test_units() -> None:
    """A block is as long as what is given to the class, or as what it is `like`; so is its type, unless one is
    declared for one of the class."""
    assert units(compiled(CARRY, 3).schedule) == {
        "kv": Unit("kv", None, "kv"),
        "acc": Unit("acc", "float32", "acc"),
    }
    found = units(compiled(HEADS, 3).schedule)
    assert found["qh"] == found["q"] == Unit("q", None, "q")
    assert found["kvh"] == Unit("kv", None, "kv")
    assert found["oh"] == found["o"] == Unit("q", None, "q")
    assert found["lse"] == Unit("q", "float32", "")
    assert units(compiled(BEHIND, 3).schedule)["part"] == Unit("acc", "float32", "acc")


def test_all_as_the_first() -> None:
    """Where no function is called, everything is as the first tensor."""
    schedule = compiler.check(data_dir("schedules") / "attention" / "rotation_direct.comm", ranks=3).schedule
    assert {*units(schedule).values()} == {Unit("kv", None, "kv")}


@pytest.mark.parametrize("text", [CARRY, HEADS, BEHIND], ids=["carry", "heads", "behind"])
def test_a_launch_is_of_one_class(text: str) -> None:
    """Copies of another type or length in one launch are no legal Plan."""
    plan = compiled(text, 3).visits
    assert plan is not None
    verify(plan)
    other = Unit("kv", "float64", "kv")
    for phase in plan.phases:
        if not isinstance(phase, Launch):
            continue
        wrong = replace(phase, reads=tuple(replace(kept, unit=other) for kept in phase.reads))
        roles = tuple(
            replace(role, phases=tuple(wrong if one is phase else one for one in role.phases)) for role in plan.roles
        )
        with pytest.raises(InternalError, match="types or lengths"):
            verify(replace(plan, roles=roles))


def test_a_type_by_mistake() -> None:
    """What only functions touch is in no launch; of another type in the Plan than in the text it is refused all the
    same."""
    made = compiled(HEADS, 3)
    plan = made.visits
    assert plan is not None

    def wrong(kept: Kept) -> Kept:
        return replace(kept, unit=Unit("q", None, "q")) if kept.name == "lse" else kept

    def changed(phase: Any) -> Any:
        names = [name for name in ("reads", "writes", "frees") if hasattr(phase, name)]
        return replace(phase, **{name: tuple(map(wrong, getattr(phase, name))) for name in names})

    roles = tuple(replace(role, phases=tuple(map(changed, role.phases))) for role in plan.roles)
    mutant = replace(plan, roles=roles)
    verify(mutant)
    (found,) = check_plan(made.schedule, mutant)
    assert (found.code, "`lse` is of another type" in found.headline) == ("C210", True)


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_shown() -> None:
    """Dumps say what a buffer is made of; costs count the traffic of each class by itself."""
    made = compiled(HEADS, 3)
    assert made.visits is not None
    assert "output lse: 3 blocks cut into 1, of float32, like q" in ir_text(made.schedule)
    lines = plan_text(made.visits).splitlines()
    assert "lse: blocks as long as those of q, float32" in lines
    assert "kvh: blocks as long as those of kv, of the type of kv" in lines
    assert [(one.buffers, one.element, one.blocks) for one in made.report.classes] == [
        (("q", "qh"), None, 6.0),
        (("kv", "kvh"), None, 6.0),
        (("o", "oh"), None, 6.0),
    ]
    assert sum(one.blocks for one in made.report.classes) == made.report.blocks
    (line,) = [line for line in cost_lines(compiled(CARRY, 3).report) if "counted as equally long" in line]
    assert "6 n of `kv`, 9 n of `acc` (float32)" in line
    one = compiler.check(data_dir("schedules") / "attention" / "rotation_ring.comm", ranks=3).report
    assert not any("counted as" in line for line in cost_lines(one))


def test_kernels_ahead_of_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is reduced in a type that is declared is built for it, whatever types are asked for."""
    (tmp_path / "cubin").write_bytes(b"")
    monkeypatch.setattr(cubins.nvrtc, "build", lambda *_: tmp_path / "cubin")
    monkeypatch.setattr(cubins.nvrtc, "key_ahead", lambda *_: "key")
    made = cubins.build("behind", compiled(BEHIND, 2), cubins.Variants(("sm_90",), ("bfloat16", "int32"), ("sum",)))
    found = sorted(one.file for one in made)
    assert any("float32" in name for name in found)
    assert not any("bfloat16" in name or "int32" in name for name in found)


# --- the oracle, and `commdsl run` ------------------------------------------------------------------------------------


def test_oracle() -> None:
    """The oracle has each buffer in its own type and length: a sum that no 8-bit type holds."""
    schedule = compiled(CARRY, 3).schedule
    kv = [np.full(5, rank + 1, np.uint8) for rank in range(3)]
    acc = [np.zeros(40, np.float32) for _ in range(3)]

    def attend(rank: int, given: Any) -> Any:
        assert (given[0].dtype, given[1].dtype) == (np.uint8, np.float32)
        return [given[1] + 1000.0 * given[0].sum(dtype=np.float32)]

    found = run(schedule, {"kv": kv, "acc": acc}, BY_NAME["uint8"], "sum", {"attend": attend})
    assert [float(one[0]) for one in found.outputs["acc"]] == [1000.0 * 3 * 5 * (rank + 1) for rank in range(3)]
    with pytest.raises(ValueError, match="one size"):
        run(schedule, {"kv": kv, "acc": [*acc[:2], acc[0][:9]]}, BY_NAME["uint8"], "sum", {"attend": attend})


@pytest.mark.parametrize("dtype", ["bfloat16", "int64", "float8_e4m3fn"])
@pytest.mark.parametrize("text", [CARRY, HEADS, BEHIND, ALONE], ids=["carry", "heads", "behind", "alone"])
def test_run(text: str, dtype: str) -> None:
    """Every launch runs on host ranks in its own type, and what is handed over is the oracle's, bit for bit."""
    found = trial(compiled(text, 3), Settings(3000, dtype, None, False, False))
    assert found.compiler
    assert found.fault == ""
    assert found.compared_bytes > 10_000


def test_parts_of_two_types() -> None:
    """What is added to sums in float32 is of any type that adds up; `commdsl run` refuses others."""
    made = compiled(HALVES, 3)
    assert trial(made, Settings(3000, "bfloat16", None, False, False)).fault == ""
    with pytest.raises(UsageError, match="float8_e4m3fn has no `sum`"):
        trial(made, Settings(3000, "float8_e4m3fn", None, False, False))


def test_parts_of_the_type_of_sums() -> None:
    """What is like keys that are declared float32 is of the type of the sum: it is added as anything is."""
    text = HALVES.replace("  input k\n", "  input k float32\n").replace("pk float16 like k", "pk like k")
    assert trial(compiled(text, 3), Settings(3000, "bfloat16", None, False, False)).fault == ""


def test_no_race() -> None:
    """Nor does ThreadSanitizer see a race."""
    assert trial(compiled(BEHIND, 2), Settings(600, "bfloat16", None, True, False)).fault == ""


# --- calls on host ranks ----------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")

from thread_ranks import in_group  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - as above
from commdsl.runtime.errors import AgreementError, TensorError  # noqa: E402 - as above


def loaded(text: str, ranks: int, tune: dict[str, Any] | None = None) -> Any:
    return commdsl.load({"classes.comm": text}, ranks=ranks, tune=tune)


def numbers(size: int, seed: int, dtype: Any = None) -> Any:
    found = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return found if dtype is None else found.to(dtype)


@pytest.mark.parametrize("tune", [None, {"protocol": "engine"}, {"protocol": "packet"}, {"lanes": 2, "tile": 1024}])
def test_sums_in_float32(tune: dict[str, Any] | None) -> None:
    """Keys travel in bfloat16 and what is summed of them in float32, in any lengths, call after call: the sum is that
    of float64 to 1e-6, where bfloat16 would be off by 1e-3."""
    ranks = 3
    op = loaded(CARRY, ranks, tune)

    def body(rank: int, group: str) -> None:
        for long, short in ((1000, 12), (6, 4000), (0, 3), (1000, 12)):
            kv = numbers(long, rank, torch.bfloat16)

            def attend(number: int, kv: Any, acc: Any, rank: int = rank) -> Any:
                assert (kv.dtype, acc.dtype) == (torch.bfloat16, torch.float32)
                return acc + kv.float().sum() * (rank + 1)

            given = torch.full((short,), float(rank))
            last, acc = op.visit(kv, given, attend=attend, group=group)
            assert (last.dtype, acc.dtype, acc.shape) == (torch.bfloat16, torch.float32, (short,))
            wanted = rank + kv.double().sum() * sum(range(1, ranks + 1))
            assert torch.allclose(acc.double(), wanted.expand(short), rtol=1e-6, atol=1e-5)
            assert torch.equal(given, torch.full((short,), float(rank)))

    in_group(ranks, body)


@pytest.mark.parametrize("ranks", [2, 4])
def test_fewer_heads_of_keys(ranks: int) -> None:
    """Queries of all heads and keys of fewer of them change places with rows, and results come back, each in its own
    length and type; what only a function writes comes out in the type declared."""
    op = loaded(HEADS, ranks)
    rows, wide, narrow = 3, 8, 2

    def whole(width: int, seed: int) -> Any:
        """Of all ranks: rank, head group, row and number in the group."""
        return numbers(ranks * ranks * rows * width, seed).reshape(ranks, ranks, rows, width).float()

    q, kv = whole(wide, 1), whole(narrow, 2).double()

    def body(rank: int, group: str) -> None:
        def attend(number: int, qh: Any, kvh: Any) -> Any:
            assert torch.equal(qh, q[:, rank].reshape(ranks * rows, wide))
            assert torch.equal(kvh, kv[:, rank].reshape(ranks * rows, narrow))
            return qh * kvh.sum().float(), qh * 2

        mine = q[rank].reshape(ranks * rows, wide), kv[rank].reshape(ranks * rows, narrow)
        o, lse = op.visit(*mine, attend=attend, group=group)
        wanted = torch.stack([q[rank, head] * kv[:, head].sum().float() for head in range(ranks)]).reshape(o.shape)
        assert torch.allclose(o, wanted)
        assert torch.equal(lse, q[:, rank].reshape(ranks * rows, wide) * 2)

    in_group(ranks, body)


def test_sums_of_what_a_function_makes() -> None:
    """A reduction is taken in the type of its own class: keys of 8 bits have none, their sums in float32 have."""
    op = loaded(BEHIND, 2)

    def body(rank: int, group: str) -> None:
        kv = torch.full((8,), 2.0 + rank).to(torch.float8_e4m3fn)

        def grad(number: int, kv: Any) -> Any:
            return kv.float()[0].expand(500) * 1000.5

        _, acc = op.visit(kv, torch.zeros(500), grad=grad, finish=lambda number, acc: acc + 1, group=group)
        assert torch.equal(acc, torch.full((500,), (2.0 + rank) * 2 * 1000.5 + 1))
        with pytest.raises(commdsl.ReductionError, match="does not average"):
            op.visit(kv, torch.zeros(500), grad=grad, finish=grad, op="avg", group=group)

    in_group(2, body)


def test_refused() -> None:
    """A tensor of another type or length than its class is refused by name, before anything is sent."""
    carry, heads, behind = (loaded(text, 2) for text in (CARRY, HEADS, BEHIND))
    same = loaded(BEHIND.replace("acc float32", "acc like kv"), 2)
    (group, _) = commdsl.threads(2)
    x = torch.ones(4)

    def refused(words: str, op: Any, *given: Any) -> None:
        with pytest.raises(TensorError, match=words):
            op.visit(*given, lambda *_: None, group=group)

    refused("`acc` is torch.bfloat16, it is declared torch.float32", carry, x, x.bfloat16())
    refused("`kv` is 2 equal blocks along its first dimension of 5", heads, x, torch.ones(5))
    refused("takes 2 tensors, got 1", carry, x)
    refused("`acc` is torch.float64, it is declared torch.float32", behind, x, x.double())
    refused(r"equally long, got \(3,\) and \(4,\)", same, x, torch.ones(3))
    refused("reduces float32, .*, not torch.float8_e5m2", same, *2 * [x.to(torch.float8_e5m2)])


@pytest.mark.parametrize(("long", "element"), [(9, torch.float32), (8, torch.float64)])
def test_ranks_that_disagree(long: int, element: Any) -> None:
    """Ranks that bring other lengths or types of what travels are told so, on both sides; what never travels is each
    rank's own affair."""
    op = loaded(CARRY.replace(" float32", ""), 2)
    stays = re.sub(r".*put acc -> acc.*\n", "", CARRY.replace(" float32", ""))
    apart = loaded(stays, 2)

    def body(rank: int, group: str) -> None:
        def attend(number: int, kv: Any, acc: Any) -> Any:
            return acc + kv.sum()

        kv, acc = torch.ones(16), torch.zeros(long, dtype=element) if rank else torch.zeros(8)
        _, found = apart.visit(kv, acc, attend=attend, group=group)
        assert torch.equal(found, acc + 32)
        with pytest.raises(AgreementError, match="carry_segment2"):
            op.visit(kv, acc, attend=attend, group=group)
        commdsl.reset(group)
        op.visit(kv, kv, attend=attend, group=group)

    in_group(2, body)


def test_a_view_is_refused_in_every_call() -> None:
    """Also where a call of these shapes and types went before."""
    op = loaded(CARRY, 2)

    def body(rank: int, group: str) -> None:
        kv, acc = torch.ones(8, 4), torch.zeros(3)
        for _ in range(2):
            op.visit(kv, acc, lambda number, kv, acc: acc, group=group)
            with pytest.raises(TensorError, match="`kv` is not contiguous"):
                op.visit(torch.ones(4, 8).T, acc, lambda number, kv, acc: acc, group=group)

    in_group(2, body)


def test_compared_by_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """With COMMDSL_DEBUG=1 ranks compare what travels, and not what each has for itself."""
    monkeypatch.setenv("COMMDSL_DEBUG", "1")
    stays = re.sub(r".*put acc -> acc.*\n", "", CARRY)
    op = loaded(stays, 2)

    def body(rank: int, group: str) -> None:
        op.visit(torch.ones(16), torch.zeros(8 + rank), lambda number, kv, acc: acc, group=group)
        with pytest.raises(AgreementError, match=r"float32\[16\].*float32\[17\]|float32\[17\].*float32\[16\]"):
            op.visit(torch.ones(16 + rank), torch.zeros(8), lambda number, kv, acc: acc, group=group)

    in_group(2, body)
