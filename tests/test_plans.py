"""Plans: what is written is what goes where, a drawn plan is proved, and a damaged one is refused or right."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from strategies import DrawnPlan, DrawnShard, plans

from commdsl import compiler
from commdsl.compiler import CheckedPlan
from commdsl.ir.plans import DispatchPlan
from commdsl.ir.routes import NOWHERE, Mask, Routes, Sharing
from commdsl.language.diagnostics import CommError
from commdsl.language.format import format_file
from commdsl.language.parser import parse
from commdsl.language.source import Source
from commdsl.language.syntax import DispatchDecl, PlanDecl
from commdsl.machine import resources

SHIPPED = sorted((resources.data_dir("schedules") / "dispatch").glob("*.comm"))
CORRUPTIONS = 10_000

relaxed = settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])


def proved(text: str, name: str | None = None) -> CheckedPlan:
    files = (parse(Source("plan.comm", text)),)
    return compiler.check(files, name)


def plan_of(body: str, ranks: int = 4) -> DispatchPlan:
    return proved(f"plan p for {ranks} ranks {{ {body} }}").plan


def codes_of(body: str, ranks: int = 4) -> list[str]:
    with pytest.raises(CommError) as caught:
        plan_of(body, ranks)
    return [diagnostic.code for diagnostic in caught.value.diagnostics]


# --- what is written --------------------------------------------------------------------------------------------------


def test_equal_shards() -> None:
    """Shards are equal to within one token, the longer first, and empty where there are more of them than tokens."""
    assert plan_of("rank 0 { doc 11 as 4 shards -> 0 }").shards.length.tolist() == [3, 3, 3, 2]
    assert plan_of("rank 0 { doc 2 as 4 shards -> 0 }").shards.length.tolist() == [1, 1, 0, 0]


def test_global_order() -> None:
    """Shards come by rank, then in the order written, however many blocks a rank has."""
    plan = plan_of("rank 2 { doc 1 -> 0 } rank 0 { doc 2 -> 0 } rank 2 { doc 3 -> 0 } rank 0 { doc 4 -> 0 }")

    assert plan.shards.rank.tolist() == [0, 0, 2, 2]
    assert plan.shards.length.tolist() == [2, 4, 1, 3]
    assert [piece.span.text for piece in plan.pieces] == ["doc 2 -> 0", "doc 4 -> 0", "doc 1 -> 0", "doc 3 -> 0"]


def test_spanning_document() -> None:
    """A named document goes on in the order written, not in that of ranks."""
    plan = plan_of("rank 1 { doc story 10 as 4 6 -> 0 } rank 0 { doc 5 -> 0   doc story 7 -> 0 }")

    assert plan.shards.length.tolist() == [5, 7, 4, 6]
    assert plan.document.tolist() == [0, 1, 1, 1]
    assert plan.position.tolist() == [0, 2, 0, 1]
    assert plan.context.tolist() == [0, 10, 0, 4]


def test_loops() -> None:
    """A loop's variable has its value in lengths, ranks and destinations, and `repeat` repeats."""
    plan = plan_of("let n = 10 for r in 1 ..< 3 { rank r { doc (n + r) -> (r - 1)   repeat 2 { doc r -> none } } }")

    assert plan.shards.rank.tolist() == [1, 1, 1, 2, 2, 2]
    assert plan.shards.length.tolist() == [11, 1, 1, 12, 2, 2]
    assert plan.dest[:, 0].tolist() == [0, NOWHERE, NOWHERE, 1, NOWHERE, NOWHERE]
    assert len(set(plan.document.tolist())) == 6


def test_settings() -> None:
    """Settings may stand anywhere, and use what `let` names."""
    plan = plan_of(
        "rank 0 { doc 5 -> 0 } let n = 4 full send once per rank copies n capacity 50 keys capacity (2 * n) queries"
    )

    assert (plan.mask, plan.sharing) == (Mask.FULL, Sharing.RANK)
    assert (plan.copies, plan.query_capacity, plan.key_capacity) == (4, 8, 50)


def test_nothing() -> None:
    """A plan without documents moves nothing, with and without a mask."""
    for mask in ("", "causal", "full send once per rank"):
        checked = proved(f"plan p for 3 ranks {{ {mask} }}")
        assert checked.plan.shards.num == checked.routing.queries.num == 0


@pytest.mark.parametrize(
    ("body", "codes"),
    [
        ("causal rank 0 { doc 5 -> [1 1] }", ["C607"]),
        ("copies 1 rank 0 { doc 5 -> [1 1] }", ["C608"]),
        ("rank 0 { doc 5 as 2 3 -> 0 1   doc 5 as 2 2 -> 0 1   doc 1 -> 4 }", ["C601", "C603"]),
        ("capacity 9 queries rank 0 { doc 5 -> 0 doc 5 -> 0 }", ["C609"]),
        ("causal capacity 19 keys rank 0 { doc 5 -> 0 doc 10 as 2 shards -> 0 0 }", ["C609"]),
        ("rank 0 { doc m -> 0 }", ["C101"]),
        ("rank 0 { doc (1 == 1) -> 0 }", ["C106"]),
        ("rank 0 { doc (1 / 0) -> 0 }", ["C508"]),
        ("for i in 0 ..< 10000000 { rank 0 { doc 1 -> 0 } }", ["C604"]),
        ("for i in 0 ..< 3000 { for j in 0 ..< 1048000 { rank 0 { } } }", ["C604"]),
    ],
)
def test_refused(body: str, codes: list[str]) -> None:
    """Each mistake is found once."""
    assert codes_of(body) == codes


def test_repeated_part_of_a_document() -> None:
    """A named document inside `repeat` goes on with every round."""
    plan = plan_of("causal rank 0 { repeat 3 { doc story 4 -> 1 } }")

    assert plan.context.tolist() == [0, 4, 8]
    assert plan.document.tolist() == [0, 0, 0]


# --- every plan -------------------------------------------------------------------------------------------------------


def in_global_order(drawn: DrawnPlan) -> list[tuple[DrawnShard, int, int]]:
    """Every shard with its position in its document and the tokens before it."""
    seen: dict[str | int, tuple[int, int]] = {}
    found = []
    for shard in drawn.shards:
        position, context = seen.get(shard.document, (0, 0))
        found.append((shard, position, context))
        seen[shard.document] = (position + 1, context + shard.length)
    return sorted(found, key=lambda item: item[0].rank)


@relaxed
@given(plans())
def test_means_what_was_drawn(drawn: DrawnPlan) -> None:
    """Ranks, lengths, documents and destinations come out as they were drawn."""
    plan = proved(drawn.text).plan
    expected = in_global_order(drawn)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(shard.document for shard, _, _ in expected))}

    assert plan.shards.rank.tolist() == [shard.rank for shard, _, _ in expected]
    assert plan.shards.length.tolist() == [shard.length for shard, _, _ in expected]
    assert plan.document.tolist() == [numbers[shard.document] for shard, _, _ in expected]
    assert plan.position.tolist() == [position for _, position, _ in expected]
    assert plan.context.tolist() == [context for _, _, context in expected]
    assert [tuple(row[row >= 0].tolist()) for row in plan.dest] == [shard.dests for shard, _, _ in expected]
    for number, piece in enumerate(plan.pieces):
        assert (plan.piece == number).nonzero()[0].tolist() == [
            *range(piece.first_shard, piece.first_shard + piece.num_shards)
        ]


@relaxed
@given(plans())
def test_moves_what_it_says(drawn: DrawnPlan) -> None:
    """Moved token by token, queries come back, and each finds the keys its mask lets it see, in order."""
    checked = proved(drawn.text)
    moves_right(checked)


def tokens_of(plan: DispatchPlan) -> list[list[tuple[int, int]]]:
    """Every token of every rank: its document and its place there."""
    ranks: list[list[tuple[int, int]]] = [[] for _ in range(plan.num_ranks)]
    for rank, length, document, context in zip(
        *(column.tolist() for column in (plan.shards.rank, plan.shards.length, plan.document, plan.context)),
        strict=True,
    ):
        ranks[rank] += [(document, context + i) for i in range(length)]
    return ranks


def moved(routes: Routes, ranks: list[list[tuple[int, int]]]) -> list[dict[int, tuple[int, int]]]:
    """What lies at each row of each rank afterwards."""
    found: list[dict[int, tuple[int, int]]] = [{} for _ in ranks]
    for source, row, dest, to, length in rows_of(routes):
        for i in range(length):
            assert to + i not in found[dest], "two rows at one place"
            found[dest][to + i] = ranks[source][row + i]
    return found


def rows_of(routes: Routes) -> Iterator[list[int]]:
    columns = (routes.source, routes.source_row, routes.dest, routes.dest_row, routes.length)
    yield from np.stack(columns, axis=1).tolist()


def moves_right(checked: CheckedPlan) -> None:
    plan, routing = checked.plan, checked.routing
    tokens = tokens_of(plan)
    check_there_and_back(routing.queries, routing.queries_back, tokens)
    if plan.mask is None:
        return
    assert routing.keys is not None
    assert routing.keys_back is not None
    assert routing.stretches is not None
    keys = check_there_and_back(routing.keys, routing.keys_back, tokens)
    wanted: set[tuple[int, int]] = set()
    for shard, dest in enumerate(plan.dest[:, 0].tolist()):
        if dest < 0:
            continue
        document = int(plan.document[shard])
        end = int(plan.context[shard] + plan.shards.length[shard])
        if plan.mask is Mask.FULL:
            end = int(plan.shards.length[plan.document == document].sum())
        row = int(routing.stretches.row[shard])
        assert int(routing.stretches.length[shard]) == end
        assert [keys[dest][row + i] for i in range(end)] == [(document, i) for i in range(end)]
        wanted |= {(dest, row + i) for i in range(end)}
    assert wanted == {(rank, row) for rank, rows in enumerate(keys) for row in rows}


def check_there_and_back(
    there: Routes, home: Routes, tokens: list[list[tuple[int, int]]]
) -> list[dict[int, tuple[int, int]]]:
    """What arrives has no gaps, and each copy comes back to the place it had; returns what arrived."""
    arrived = moved(there, tokens)
    for rows in arrived:
        assert sorted(rows) == [*range(len(rows))]
    returned = moved(home, [[rows[i] for i in range(len(rows))] for rows in arrived])
    assert sum(map(len, returned)) == sum(map(len, arrived))
    for rank, rows in enumerate(returned):
        assert all(token == tokens[rank][row % len(tokens[rank])] for row, token in rows.items())
    return arrived


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped(path: Path) -> None:
    """Every shipped plan and dispatch is proved without a warning, and its plans move what they say."""
    files = compiler.read(path)
    for plan in compiler.declared(files, PlanDecl):
        checked = compiler.check(files, plan.name.text)
        assert checked.warnings == ()
        if checked.plan.shards.length.sum() < 20_000:
            moves_right(checked)
    for dispatch in compiler.declared(files, DispatchDecl):
        for ranks in (1, 2, 8):
            assert compiler.check(files, dispatch.name.text, ranks).warnings == ()
    assert compiler.declared(files, PlanDecl) or compiler.declared(files, DispatchDecl)


# --- damaged plans ----------------------------------------------------------------------------------------------------

TEXTS = (
    """plan damaged for 3 ranks {
  causal
  send once per rank
  copies 4
  capacity 40 queries   capacity 90 keys
  rank 0 { doc 12 as 3 shards -> 0 2 1   doc 5 -> none }
  rank 1 { doc story 8 as 2 6 -> 0 1 }
  for r in 1 ..< 3 { rank r { doc (r + 3) -> (r - 1)   repeat 2 { doc story 4 -> r } } }
}
""",
    """plan damaged for 4 ranks {
  copies 3
  capacity 60 queries
  let n = 6
  rank 3 { doc 9 as 4 shards -> 0 [1 2] none 3 }
  rank 0 { doc n as n shards -> [3 3 1]   doc 7 as 0 7 -> 1 }
  rank 2 { doc tale 10 as 2 shards -> 2   doc tale 3 -> 0 }
}
""",
)
WORDS = re.compile(r"\w+|\.\.<|->|[^\w\s]")


def corrupted(text: str, rng: random.Random) -> str:
    """The text with a number, a word or a sign changed, dropped, doubled or exchanged for its neighbour."""
    signs = list(WORDS.finditer(text))
    numbers = [sign for sign in signs if sign[0].isdigit()]
    sign = rng.choice(numbers if rng.random() < 0.6 else signs)
    other = rng.choice(signs)
    new = {
        0: lambda: str(rng.randrange(20)),
        1: lambda: str(int(sign[0]) + rng.choice((-1, 1))) if sign[0].isdigit() else other[0],
        2: lambda: "",
        3: lambda: f"{sign[0]} {sign[0]}",
        4: lambda: other[0],
        5: lambda: rng.choice(("causal", "full", "none", "[0 1]", "rank", "query", "r", "(2 - 3)", "99999999999")),
    }[rng.randrange(6)]()
    return f"{text[: sign.start()]}{new}{text[sign.end() :]}"


def test_corruptions(turns: Callable[[int], int]) -> None:
    """10,000 damaged texts, or the first of them where not all sweeps run: each is refused with a place in it, or is a
    plan that is proved, moves right and is kept by the formatter.
    """
    rng = random.Random(4)
    refused: dict[str, int] = {}
    kept: dict[str, None] = {}
    count = turns(CORRUPTIONS)
    for turn in range(count):
        text = corrupted(TEXTS[turn % 2], rng)
        try:
            file = parse(Source("damaged.comm", text))
            checks = [compiler.check((file,), plan.name.text) for plan in compiler.declared((file,), PlanDecl)]
        except CommError as error:
            for diagnostic in error.diagnostics:
                span = diagnostic.primary.span
                assert 0 <= span.start <= span.end <= len(text)
                assert diagnostic.headline
                refused[diagnostic.code] = refused.get(diagnostic.code, 0) + 1
            continue
        if text not in kept:
            kept[text] = None
            formatted = format_file(file)
            assert parse(Source("damaged.comm", formatted)) == file
            for checked in checks:
                moves_right(checked)

    assert sum(refused.values()) > count / 3
    assert len(kept) > count / 20
    assert {"C002", "C101", "C601", "C602", "C603", "C604", "C606", "C608", "C609"} <= set(refused)
