"""The oracle of dispatches walks over shards; the routes that kernels follow say the same in arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from commdsl import compiler
from commdsl.ir import simulate
from commdsl.ir.plans import DispatchPlan, routing
from commdsl.ir.routes import NOWHERE, Mask, Routes, Sharing
from commdsl.ir.simulate import Copy
from commdsl.machine.resources import data_dir
from commdsl.planner.chance import random_plan, varied

Where = list[tuple[int, int, int, int, int]]
SHIPPED = ("balanced_16k", "copies", "spanning")


def plans() -> Iterator[DispatchPlan]:
    """Random ones of every kind, on 1 to 5 ranks; and those that are shipped."""
    for ranks in range(1, 6):
        for number, draw in enumerate(varied(ranks, 60, 16)):
            yield random_plan(draw, number)
    for name in SHIPPED:
        yield shipped(name)


def shipped(name: str) -> DispatchPlan:
    checked = compiler.check(data_dir("schedules") / "dispatch" / f"{name}.comm")
    assert isinstance(checked, compiler.CheckedPlan)
    return checked.plan


def by_shard(copies: list[Copy]) -> Where:
    """Copies of one shard in their order."""
    each = [(copy.shard, copy.rank, copy.row, copy.dest, copy.dest_row) for copy in copies if copy.length]
    return sorted(each, key=lambda one: one[0])


def of_routes(routes: Routes) -> Where:
    columns = (routes.shard, routes.source, routes.source_row, routes.dest, routes.dest_row)
    rows = np.stack(columns, axis=1)[np.lexsort((routes.copy, routes.shard))]
    lengths = routes.length[np.lexsort((routes.copy, routes.shard))]
    return [tuple(row) for row in rows[lengths > 0].tolist()]


def test_routes_say_the_same() -> None:
    """Every row goes from where to where, and the copies of a row are in the same order."""
    sharings = set()
    for plan in plans():
        made = routing(plan)
        assert by_shard(simulate.by_source(plan)) == of_routes(made.queries)
        if made.keys is not None:
            assert by_shard(simulate.by_query(plan)) == of_routes(made.keys)
            sharings.add((plan.mask, plan.sharing))

    assert sharings == {(mask, sharing) for mask in Mask for sharing in Sharing}


def test_copies_of_rows() -> None:
    """So it is where a shard goes to several ranks, to one twice, or nowhere."""
    dice = np.random.default_rng(4)
    for ranks in range(1, 5):
        for number, draw in enumerate(varied(ranks, 40, 8)):
            plan = random_plan(draw, number)
            dest = dice.integers(NOWHERE, ranks, (plan.shards.num, 4))
            several = replace(plan, mask=None, dest=dest)
            assert by_shard(simulate.by_source(several)) == of_routes(routing(several).queries)


def test_there() -> None:
    """What arrives lies in the order of the ranks that sent it, without gaps."""
    plan = shipped("copies")
    given = [np.full((int(rows), 2), rank, np.uint8) for rank, rows in enumerate(plan.shards.rows)]
    found = simulate.there(simulate.by_source(plan), given)

    assert [len(rows) for rows in found] == routing(plan).queries.counts.sum(axis=1).tolist()
    assert all((np.diff(rows[:, 0].astype(int)) >= 0).all() for rows in found)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_back(count: int) -> None:
    """A row comes back as the sum of its copies, the first taken as it is; zero where there is none."""
    copies = [Copy(0, 0, 1, 0, number, 1) for number in range(count)]
    given = [np.array([[-0.0], [1e8], [-1e8]], np.float32).view(np.uint8)]
    widen, narrow = (lambda rows: rows.copy().view(np.float32)), (lambda rows: rows.view(np.uint8))
    (found,) = simulate.back(copies, given, [2], widen, narrow)
    wanted = np.array([[0.0], [{0: 0.0, 1: -0.0, 3: np.float32(0.0)}[count]]], np.float32)

    assert np.array_equal(found, wanted.view(np.uint8))


def test_back_without_copies() -> None:
    """What has one copy comes back as its bytes."""
    given = [np.array([[1], [2]], np.uint8)]

    assert simulate.back([Copy(0, 0, 2, 0, 1, 1)], given, [3], None, None)[0].tolist() == [[0], [0], [2]]
