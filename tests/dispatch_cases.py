"""What the ranks of test_dispatch_ops.py and gpu/run_dispatch.py do: each function runs in every process of a group at
once.

Assumes torch.distributed is initialised: with nccl the tensors are on GPUs. Does not draw at random but from seeds that
all ranks share, so every rank knows what every other one sent.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from dispatch_checks import Player, Rows
from dispatch_plans import Case, cases, limits

from commdsl import dispatch
from commdsl.ir.routes import Mask, Sharing
from commdsl.planner.chance import Draw, varied

PUTS = ("rows", "packed")
CHECKS = (Player.forward, Player.reverse, Player.one_tensor, Player.gradients)
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Seat:
    """What a rank needs to play one plan: its place in the group, its tables, its part in the checks."""

    case: Case
    route: Any
    player: Player


def seat(case: Case, rows: Rows, rank: int, where: torch.device) -> Seat:
    fwd_q, rev_q, fwd_k, rev_k, _ = case.metadata
    route = dispatch.Route(fwd_q, rev_q, fwd_k, rev_k, rank=rank, device=where)
    return Seat(case, route, Player(rank, case.traced.to(where), rows, where))


def sender_for(found: Sequence[Case], nbytes: tuple[int, ...], put: str, group: Any, where: torch.device) -> Any:
    return dispatch.Dispatcher(limits(found, nbytes), group=group, device=where, put=put)


def played(sender: Any, seats: Sequence[Seat], call: int) -> int:
    """Every check on every plan, one after the other, nothing in between: how many calls were wrong here."""
    for at, one in enumerate(seats):
        for check in CHECKS:
            check(one.player, sender, one.route, call + 10 * at)
    return sum(int(one.player.wrong.item()) for one in seats)


def exact(put: str, found: Sequence[Case], rows: Sequence[Rows], rank: int, group: Any, where: torch.device) -> None:
    """All checks for all plans and kinds of rows of one width."""
    sender = sender_for(found, rows[0].nbytes, put, group, where)
    for number, one in enumerate(rows):
        wrong = played(sender, [seat(case, one, rank, where) for case in found], 1000 * number)
        assert wrong == 0, f"rank {rank}, put {put}, {one}: {wrong} calls wrong"
    sender.release()


WIDTHS = ((2, 2, 2), (6, 10, 2), (16, 48, 32), (250, 38, 1002), (4096, 1024, 1024), (32768, 12, 4))


def _plans_and_widths(put: str) -> None:
    """Each width with two of the dtypes, one of them off its alignment."""
    narrow = cases(varied(dist.get_world_size(), 50, 9), seed=100)
    wide = cases(varied(dist.get_world_size(), 12, 5), seed=200)
    pairs = (((HALF, 1), (BRAIN, 0)), ((BRAIN, 1), (HALF, 0)), ((SINGLE, 0), (HALF, 1)), ((SINGLE, 1), (BRAIN, 0)))
    for at, nbytes in enumerate(WIDTHS):
        kinds = [Rows(dtype, nbytes, shift) for dtype, shift in pairs[at % len(pairs)]]
        fitting = [kind for kind in kinds if kind.fits()]
        exact(put, wide if max(nbytes) >= 4096 else narrow, fitting, dist.get_rank(), None, device())


def rows_are_exact() -> None:
    _plans_and_widths("rows")


def packed_is_exact() -> None:
    _plans_and_widths("packed")


def nothing_to_send() -> None:
    """No rows on any rank, rows that all stay at home, all rows to one rank, all rows from one."""
    ranks, rank, where = dist.get_world_size(), dist.get_rank(), device()
    all_stay = cases([Draw(ranks, 40, stays=1.0), Draw(ranks, 0)], seed=3)
    to_one = Case(_toward(Draw(ranks, 40, empty=0.0, stays=0.0), 1))
    for put in PUTS:
        exact(put, [*all_stay, to_one], [Rows(BRAIN, (16, 6, 2))], rank, None, where)


def _toward(draw: Draw, rank: int) -> Any:
    plan = cases([draw], seed=4)[0].plan
    return replace(plan, dest=torch.full(plan.dest.shape, rank).numpy())


def hold_up(dice: random.Random, where: torch.device) -> None:
    """Most calls not at all; some for a while on the GPU, a few on the host."""
    if where.type == "cuda" and dice.random() < 0.4:
        torch.cuda._sleep(1500 * dice.choice((5, 50, 300, 1000)))
    if dice.random() < 0.05:
        time.sleep(0.004 * dice.random())


@dataclass(frozen=True)
class Storm:
    """Calls of changing plans, both ways of putting, no barrier in between."""

    calls: int
    plans: int
    most_rows: int
    nbytes: tuple[int, int, int] = (64, 16, 36)
    seed: int = 1

    def run(self, group: Any, rank: int, ranks: int, where: torch.device, begun: Callable[[int], None]) -> int:
        """How many calls were wrong here. `begun` hears of every call."""
        found = cases(varied(ranks, self.most_rows, self.plans), seed=1000 * self.seed)
        senders = [sender_for(found, self.nbytes, put, group, where) for put in PUTS]
        kinds = [Rows(dtype, self.nbytes, shift) for dtype, shift in ((HALF, 0), (BRAIN, 1), (SINGLE, 0))]
        seats = [seat(case, kinds[at % len(kinds)], rank, where) for at, case in enumerate(found)]
        dice, delays = random.Random(self.seed), random.Random(f"{self.seed} {rank}")
        for call in range(self.calls):
            begun(call)
            chosen, sender, check = dice.choice(seats), dice.choice(senders), dice.choice(CHECKS)
            hold_up(delays, where)
            check(chosen.player, sender, chosen.route, call)
        wrong = sum(int(one.player.wrong.item()) for one in seats)
        for sender in senders:
            sender.release()
        return wrong


def changing_plans() -> None:
    """Calls with changing plans and delays, no barrier between them."""
    storm = Storm(calls=100, plans=12, most_rows=40)
    wrong = storm.run(None, dist.get_rank(), dist.get_world_size(), device(), lambda _: None)
    assert wrong == 0, f"{wrong} of {storm.calls} calls wrong"


def padded_outputs() -> None:
    """With `padded` an output has the limit's rows, whose first are the received; tables are overwritten in place."""
    rank, ranks, where = dist.get_rank(), dist.get_world_size(), device()
    kinds = [Draw(ranks, 50), Draw(ranks, 50, mask=Mask.FULL), Draw(ranks, 50, sharing=Sharing.RANK)]
    found = cases([Draw(ranks, 50, most_shards=12, is_full=True, is_fine=True), *kinds], seed=70)
    rows = Rows(BRAIN, (32, 16, 6))
    most = limits(found, rows.nbytes)
    seats = [seat(case, rows, rank, where) for case in found]
    for put in PUTS:
        sender = sender_for(found, rows.nbytes, put, None, where)
        changing = seat(found[0], rows, rank, where).route  # of the plan with the most runs: others' fit its tables
        for call, one in enumerate((*seats, seats[0])):
            changing.update_(one.route)
            player = one.player
            sent = [player.everyone(part, player.traced.rows, call, bits=True) for part in range(3)]
            mine = [tensors[rank] for tensors in sent]
            got = sender.dispatch_qkv(*mine, changing, padded=True)
            assert [len(tensor) for tensor in got] == [most.queries, most.keys, most.keys]
            want = [player.there(part, sent[part]) for part in range(3)]
            player.count([tensor[: len(other)] for tensor, other in zip(got, want, strict=True)], want)
        assert sum(int(one.player.wrong.item()) for one in seats) == 0
        sender.release()


CASES = (rows_are_exact, packed_is_exact, nothing_to_send, changing_plans, padded_outputs)
