"""Programs of several products: the fused kernel is refused wherever its waits leave an order open."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from itertools import product as pairs
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from fake_hopper import FakeHopper  # noqa: E402 - after the check for torch
from test_epilogues import CASES as ENDED  # noqa: E402
from test_epilogues import Held  # noqa: E402
from test_products import CASES, FOLDER  # noqa: E402

import commdsl  # noqa: E402
from commdsl import compiler  # noqa: E402
from commdsl.build.headers import include_dir  # noqa: E402
from commdsl.ir import resolve  # noqa: E402
from commdsl.ir.products import stopping  # noqa: E402
from commdsl.language.diagnostics import CommError  # noqa: E402
from commdsl.language.syntax import ScheduleDecl  # noqa: E402
from commdsl.program.lower.visits import lower_visits  # noqa: E402
from commdsl.program.plan import Plan  # noqa: E402
from commdsl.program.visited import launches  # noqa: E402
from commdsl.runtime import fused  # noqa: E402
from commdsl.runtime.products import Cut  # noqa: E402
from commdsl.runtime.turns import Places, given_to, have_turns, products_of, summed, turns_of, unordered  # noqa: E402

EARLIER = Path(__file__).parent / "earlier_product.comm"

DRAWN = """schedule drawn for P ranks where P >= 2 {{
  input x[3 blocks]  input w  scratch c[2 blocks]  scratch s[2 blocks]  output y[2 blocks]
  ensure each r {{ y[0] == x[0] @ r }}
  tune {{ protocol engine   landing place }}
{steps}
}}
"""


def drawn(seed: int) -> str:
    """Return a schedule of random puts, products and sums over few buffers, each read only where it is defined."""
    dice, rows, made = random.Random(seed), [f"x[{i}]" for i in range(3)], list[str]()
    steps = list[str]()
    for _ in range(dice.randint(2, 9)):
        match dice.choice(("put", "matmul", "matmul", "matmul", "sum")):
            case "put":
                dest = f"s[{dice.randrange(2)}]"
                steps.append(f"put {dice.choice(rows)} -> {dest} @ (r + 1) % P")
                rows.append(dest)
            case "matmul":
                dest = dice.choice(("c[0]", "c[1]", "y[0]", "y[1]"))
                steps.append(f"compute matmul({dice.choice(rows)}, w -> {dest})")
                made.append(dest)
                if len(made) > 1 and dice.random() < 0.4:
                    steps.append(f"reduce {dice.choice(made[:-1])} -> {dest}")
            case "sum" if made:
                dest = f"y[{dice.randrange(2)}]"
                steps.append(f"put {dice.choice(made)} -> {dest} @ (r + 1) % P")
                made.append(dest)
    steps = steps if made else [*steps, "compute matmul(x[0], w -> c[0])"]
    return DRAWN.format(steps="\n".join(f"  each r {{ {step} }}" for step in steps))


def lowered(text: str, folder: Path) -> tuple[Plan, Places]:
    """Return the Plan of a schedule whose contract nobody checks, and by part where rank 0 has it."""
    files = compiler.read_text(text, "drawn.comm", folder)
    decl = compiler.choose_kind(files, None, ScheduleDecl)
    stopped = stopping(resolve.resolve(files, decl, 2, compiler.find_topology(files, None, 2), {}))
    numbers = dict[str, int]()
    places = dict[str, tuple[str, int]]()
    for part in stopped.parts:
        places[part.name] = part.of, numbers.setdefault(part.of, 0)
        numbers[part.of] += 1
    return lower_visits(stopped.schedule), places


def open_orders(plan: Plan, places: Places) -> Iterator[tuple[int, int]]:
    """Yield turns that may start, or write, before an earlier one is over that has to come first.

    The second opinion on `unordered`: that turn is held back for ever, and everything else goes as far as it can.
    """
    turns, groups = [*turns_of(plan, places)], summed(products_of(plan))
    ends = [sum(map(len, groups[: number + 1])) for number in range(len(groups))]
    for held, (group, end) in enumerate(zip(groups, ends, strict=True)):
        over = 0
        for launch in launches(plan):
            if launch.after > end - len(group):
                break
            over += 1
        for number in range(held + 1, len(groups)):
            reads = {kept for one in groups[number] for kept in one.reads[:2]}
            all_reads = {kept for one in groups[number] for kept in one.reads}
            writes = {kept for one in groups[number] for kept in one.writes}
            made, read = {k for one in group for k in one.writes}, {k for one in group for k in one.reads}
            words = [source.there for source in turns[number].sources]
            starts = any(
                word < over and {*one.reads[:2]} & made for word, one in zip(words, groups[number], strict=True)
            )
            ends_early = max(*words, turns[number].sums_there) < over
            if starts or (ends_early and ((all_reads - reads) - writes & made or writes & (made | read))):
                yield number, held


def test_open_orders_are_found(tmp_path: Path) -> None:
    """Exactly those random programs are refused in which a product may come before one it depends on."""
    found = {True: 0, False: 0}
    for seed in range(600):
        try:
            plan, places = lowered(drawn(seed), tmp_path)
        except CommError:  # no kernel runs these products
            continue
        if not products_of(plan) or not have_turns(plan):
            continue
        wrong = [*open_orders(plan, places)]
        refused = unordered(plan, places)
        touched = {kept for one in products_of(plan) for kept in one.writes}
        touched |= {kept for launch in launches(plan) for kept in launch.writes}
        assert not any(kept in touched for one in products_of(plan) for kept in (one.reads[1], *given_to(one)))
        assert (refused is not None) == bool(wrong), f"seed {seed}: {wrong}, {refused}"
        found[refused is not None] += 1
    assert min(found.values()) > 30, found


@pytest.mark.parametrize(("name", "ranks", "pieces"), CASES)
def test_shipped_schedules_are_fused(name: str, ranks: int, pieces: int) -> None:
    """All products of every shipped schedule have an order."""
    ended = [params for other, params in ENDED if other == name]
    for params, rank in pairs([{}, *ended], range(ranks)):
        program = commdsl.load(FOLDER / f"{name}.comm", params={"C": pieces, **params}, ranks=ranks).program(ranks)
        assert program.visits is not None
        cut = Cut(program.signature, program.visits, rank)
        assert have_turns(program.visits.plan)
        assert unordered(program.visits.plan, cut.places) is None


@pytest.fixture
def hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHopper:
    made = FakeHopper(tmp_path, include_dir())
    made.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=12), raising=False
    )
    return made


def test_a_sum_of_an_earlier_product(
    hopper: FakeHopper, caplog: pytest.LogCaptureFixture, turns: Callable[..., int]
) -> None:
    """The kernel would compute wrong numbers of this program, so it is not taken, and the log says why."""
    program = commdsl.load(EARLIER, ranks=2).program(2)
    assert program.visits is not None
    with caplog.at_level(logging.WARNING, "commdsl"):
        assert not fused.is_ordered(program.visits.plan, Cut(program.signature, program.visits, 0).places)
    assert "`earlier_product`: torch multiplies" in caplog.text
    assert "that `y.0` depends on" in caplog.text

    wrong = 0
    for seed in range(turns(16)):
        hopper.seed = seed
        draw = torch.Generator().manual_seed(seed)
        sizes = ((1024, 64), (96, 64))
        inputs = [torch.randint(-2, 3, size, generator=draw).to(torch.bfloat16) for size in sizes]
        held = Held(program, 0, inputs)
        for one in held.products:
            held.tensors[one.writes[0]].fill_(torch.nan)
        due = held.by_torch()
        wrong += not all(map(torch.equal, held.by_the_kernel(), due))
    assert wrong > 0, "the kernel orders it after all"
