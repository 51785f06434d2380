"""With its check on, a dispatch's kernel refuses every table that is not what was made, and stays within tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from dispatch_plans import Case, cases, limits
from host_dispatch import Damaged, chained, launched, program
from test_dispatch_kernel import back, drawn, same, there
from thread_ranks import at_once

import commdsl
from commdsl import dispatch
from commdsl.build.host_ranks import RowsError, Running
from commdsl.build.host_rows import run_calls
from commdsl.dispatch.route import Way
from commdsl.ir.routes import Sharing
from commdsl.planner.chance import Draw, random_plan
from commdsl.program.tiles import HEAD_WORDS, table
from commdsl.program.timeouts import CommTimeout

UNREAD = (5,)
"""The word of the head that no kernel reads by itself: what agrees does."""


def damaged_bits(dice: np.random.Generator) -> int:
    """One bit, or any."""
    return int(1 << dice.integers(32) if dice.random() < 0.5 else dice.integers(1, 1 << 32))


@pytest.mark.parametrize("packed", [False, True])
def test_every_damaged_word_is_reported(packed: bool) -> None:
    """Whatever word of a table is written over, some rank reports it, and nothing beside the tensors is touched."""
    dice = np.random.default_rng(packed)
    made = program(launched(3))
    plan = random_plan(Draw(3, 12, sharing=Sharing.QUERY, empty=0.0), 7)
    goes, returns = there(plan), back(plan)
    codes: Counter[int] = Counter()
    for flows, rows in ((goes, [plan.shards.rows] * 3), (returns, [flow.rows for flow in goes])):
        inputs = drawn(flows, rows, "float32", dice)
        for rank in range(3):
            words = len(table(flows, rank, packed=packed, tile_bytes=64).words)
            for word in {*UNREAD, *dice.integers(0, words, 60).tolist()}:
                bits = damaged_bits(dice)
                call = Damaged(flows, inputs, packed, (2, 1, 3), 64, rank=rank, word=word, bits=bits)
                try:
                    found = run_calls(made, [call], Running(timeout=0.03))
                except (RowsError, CommTimeout) as report:
                    codes[report.record.code] += 1
                else:
                    assert word in UNREAD, (rank, word, bits)
                    assert same(found, chained([call], "float32"))

    assert codes.total() > 150
    assert {2, 3, 4, 5} <= codes.keys()  # a run, a count, a finish, the words themselves


# --- as users meet it -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Ranks:
    """Threads that do the same, each as one rank of a group."""

    names: tuple[str, ...]

    def all(self, act: Callable[[int, str], Any]) -> tuple[list[Any], list[str]]:
        """What each returns, and what those say that raise: an exception itself would hold its call's results."""
        raised: list[str] = []

        def one(rank: int) -> Any:
            try:
                return act(rank, self.names[rank])
            except Exception as error:
                raised.append(f"{type(error).__name__}: {error}")

        return at_once(len(self.names), one), raised


WIDTHS = (6, 8, 8)
MESSAGES = {
    name: re.compile(words)
    for name, words in {
        "run": r"RowError: .*rank \d was to send rows up to \d+ to rank \d+, .* run \d+ .*\(shard \d+, replica \d+\)",
        "count": r"RowError: .*rank \d expected \d+ rows from rank \d, and \d+ came",
        "finish": r"RowError: .*rank \d was to finish rows up to \d+ of its own, and has room for \d+: finish \d+ of",
        "table": r"RowError: .*the table of rank \d is not what was made: its (head|words) should give \d+",
        "wait": r"CommTimeout: rank \d waited 0.1 s for rank \d|PeerError: .*rank \d gave up: error\[C962\]: ",
    }.items()
}


def tensors(case: Case, rank: int, *, returns: bool) -> list[torch.Tensor]:
    rows = [case.received(0), case.received(1), case.received(1)] if returns else [case.rows] * 3
    kinds = (torch.int16, torch.float32, torch.float32)
    return [
        torch.arange(one[rank] * width // kind.itemsize).view(one[rank], -1).to(kind)
        for one, width, kind in zip(rows, WIDTHS, kinds, strict=True)
    ]


@pytest.mark.parametrize("put", ["rows", "packed"])
def test_users_see_what_is_wrong(put: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 damaged tables: each call raises on some rank, in words that name the rank, and shard and replica where it is
    a row; after a reset the group works as before.
    """
    monkeypatch.setenv("COMMDSL_TIMEOUT", "0.1")
    (case,) = cases([Draw(3, 14, sharing=Sharing.RANK, empty=0.0, stays=0.0)], seed=5)
    ranks = Ranks(commdsl.threads(3))

    def sit(rank: int, name: str) -> Any:
        sender = dispatch.Dispatcher(limits([case], WIDTHS), group=name, device="cpu", put=put, check=True)
        fwd_q, rev_q, fwd_k, rev_k, _ = case.metadata
        return sender, dispatch.Route(fwd_q, rev_q, fwd_k, rev_k, rank=rank)

    seats, refusals = ranks.all(sit)
    assert refusals == []
    dice = np.random.default_rng(3)
    kinds: Counter[str] = Counter()
    for number in range(50):
        for returns in (False, True):
            words = seats[number % 3][0].tables(seats[number % 3][1], Way.ALL, tensors(case, number % 3, returns=False))
            kinds.update(refused(ranks, seats, case, words[returns], returns, dice))

    assert kinds.keys() == MESSAGES.keys()
    ranks.all(lambda rank, name: seats[rank][0].release())


def refused(
    ranks: Ranks, seats: list[Any], case: Case, words: torch.Tensor, returns: bool, dice: np.random.Generator
) -> set[str]:
    """Damages one word that means something, calls, resets, and calls again."""
    _, finishes, finishes_at = words[:3].tolist()
    head = [word for word in range(HEAD_WORDS) if word not in UNREAD]
    word = int(dice.choice([*head, *range(HEAD_WORDS, finishes_at // 4 + 8 * finishes + 2 * 3)]))
    kept = int(words[word])
    words[word] = np.int64(kept ^ damaged_bits(dice)).astype(np.int32).item()

    def call(rank: int, name: str) -> list[torch.Tensor]:
        sender, route = seats[rank]
        move = sender.collect_qkv if returns else sender.dispatch_qkv
        return [tensor.clone() for tensor in move(*tensors(case, rank, returns=returns), route)]

    _, raised = ranks.all(call)
    words[word] = kept
    assert raised
    assert ranks.all(lambda rank, name: commdsl.reset(name))[1] == []
    assert ranks.all(call)[1] == []
    return {name for error in raised for name, message in MESSAGES.items() if message.match(error)} | {
        error for error in raised if not any(message.match(error) for message in MESSAGES.values())
    }
