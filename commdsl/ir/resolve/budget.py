"""C511: what one schedule takes to be understood and proved, counted in moves, and refused before it is spent.

Assumes that a move, a chunk of a rank and a promised contribution take about as long, and as much memory, as each
other; that a turn of a rank takes as much as many moves, and a combination that a condition looks at as a part of one.
Does not measure anything: the same file is refused on every machine.
"""

from __future__ import annotations

from math import isqrt
from typing import NoReturn

import numpy as np

from commdsl.ir.resolve.evaluate import Cycles, Evaluator, Scope, free_names
from commdsl.ir.resolve.faults import Faults, Poisoned, Spent
from commdsl.ir.schedules import Buffer, Schedule, Step, Task, Yield
from commdsl.language import syntax as syn
from commdsl.language.diagnostics import too_much
from commdsl.language.source import Span

MOST_MOVES = 8_000_000
"""Some 30 seconds, and some gigabytes."""

MOST_ROWS = 2**24
"""Of combinations that are in memory at once."""

STATEMENT = 16
TURN = 256
"""What each statement that is come to costs, and each move of a rank that follows another of its own, in moves: ranks
are looked at side by side, what a rank does one after another is not.
"""

VISITED_TURN = 64
"""Where yields call functions: launches between them that are equal are proved once."""

ROWS_A_MOVE = 32
"""Of combinations, of which a condition may leave few."""

HANDED_A_MOVE = 8
"""Of chunks that a task is handed: they are looked at, and stay where they are."""

PAIRS_A_MOVE = 4
"""Of ranks, each with each: a proof has tables of what they know of each other."""

MOST_RANKS_OF_MOVES = isqrt(MOST_MOVES * PAIRS_A_MOVE)


class Budget:
    """What is left of the moves that one schedule may take."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._left = MOST_MOVES
        self.turn = TURN

    def allow(self, count: int, moves: int, what: str, span: Span) -> None:
        """Ends everything where so many, each of which costs so many moves, are more than is left."""
        cost = count * moves
        if cost > self._left:
            fit = self._left // moves
            label = f"{count:,} {what}" + (f", as much work as {rounded(cost)} moves" if moves > 1 else "")
            self._refuse(label, f"{fit:,} would fit" if fit else "not one would fit", span)

    def spend(self, count: int, moves: int, what: str, span: Span) -> None:
        self.allow(count, moves, what, span)
        self._left -= count * moves

    def ranks(self, count: int, span: Span) -> None:
        cost = count**2 // PAIRS_A_MOVE
        if cost > self._left:
            label = f"{count:,} ranks, as much work as {rounded(cost)} moves"
            self._refuse(label, f"{isqrt(self._left * PAIRS_A_MOVE):,} would fit", span)
        self._left -= cost

    def rows(self, count: int, span: Span) -> None:
        """Combinations of the values of binders, or of those with a list: held at once, then looked through."""
        if count > MOST_ROWS:
            self._refuse(f"{count:,} combinations at once", f"{MOST_ROWS:,} at once would fit", span)
        self.spend(-(-count // ROWS_A_MOVE), 1, f"times {ROWS_A_MOVE} combinations", span)

    def step(self, step: Step) -> None:
        turns = max(turns_of(step), 1)
        self.spend(turns, self.turn, "moves of a rank, one after another", step.span)
        self.spend(sum(one.source_rank.size for one in step.moves), 1, "moves", step.span)

    def loop(self, loop: syn.For | syn.Pipeline, rounds: int, scope: Scope) -> None:
        """A loop with all that is in it, as far as that can be told before its first round."""
        self.allow(rounds, _least(loop.body, scope), "rounds", loop.domain.span)

    def _refuse(self, label: str, help: str, span: Span) -> NoReturn:
        taken = MOST_MOVES - self._left
        before = f"; what stands before takes {taken:,}" if taken > MOST_MOVES // 100 else ""
        notes = (f"{MOST_MOVES:,} moves, or what is as much work, are proved at once{before}",)
        self._faults.add(too_much(span, label, help, notes))
        raise Spent


def turns_of(step: Step) -> int:
    """The moves that a rank makes one after another, of the busiest rank of each statement."""
    return sum(int(np.bincount(statement.actor).max(initial=0)) for statement in step.moves)


def handed(ranks: int) -> int:
    """What a chunk of a buffer costs that the task of every rank is handed."""
    return -(-ranks // HANDED_A_MOVE)


def copies_of(task: Yield | Task, buffers: tuple[Buffer, ...]) -> int:
    """The chunks that a yield copies out for the caller; a function is handed them where they are."""
    is_copied = isinstance(task, Yield) and task.name is None
    return sum(buffers[buffer].num_chunks for buffer in task.reads) if is_copied else 0


def moves_of(schedule: Schedule) -> tuple[int, int]:
    """The moves, or what is counted as one, and the turns of a schedule; not what its conditions left out."""
    steps = [step for step in schedule.steps if isinstance(step, Step)]
    tasks = [step for step in schedule.steps if not isinstance(step, Step)]
    given = [schedule.buffers[buffer].num_chunks for step in tasks for buffer in (*step.reads, *step.writes)]
    seen = [schedule.buffers[rotation.sources[0]].num_chunks for rotation in schedule.rotations]
    chunks = sum(buffer.num_chunks for buffer in schedule.buffers)
    turns = sum(map(turns_of, steps)) + sum(copies_of(task, schedule.buffers) for task in tasks)
    moved = sum(statement.source_rank.size for step in steps for statement in step.moves)
    promised = sum(contract.dest_rank.size + contract.source_rank.size for contract in schedule.contracts)
    ranks = schedule.num_ranks
    turns = turns * VISITED_TURN // TURN if schedule.has_bodies else turns
    return moved + promised + ranks * chunks + handed(ranks) * sum(given) + ranks**2 * sum(
        seen
    ) + ranks**2 // PAIRS_A_MOVE, turns


def rounded(number: float) -> str:
    """To two digits."""
    return f"{float(f'{number:.2g}'):,.0f}"


def _least(body: tuple[syn.Stmt, ...], scope: Scope) -> int:
    """What a round costs at least: what depends on the round, or on a condition, is left out."""
    cost = STATEMENT
    for statement in body:
        match statement:
            case syn.For() | syn.Pipeline():
                cost += STATEMENT + _rounds(statement.domain, scope) * _least(statement.body, scope)
            case syn.Each() | syn.Do() | syn.Yield() | syn.Visit():
                cost += STATEMENT + TURN
            case _:
                cost += STATEMENT
    return cost


def _rounds(domain: syn.Range | syn.Name, scope: Scope) -> int:
    """0 where it is not known yet."""
    silent = Evaluator(Faults())
    if not free_names(domain) <= scope.keys():
        return 0
    try:
        if isinstance(domain, syn.Range):
            return max(silent.constant(domain.last, scope) - silent.constant(domain.first, scope), 0)
        cycles = silent.value(domain, scope)
        return len(cycles.declared.orders) if isinstance(cycles, Cycles) else 0
    except (Poisoned, Spent):
        return 0
