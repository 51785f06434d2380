"""Turns a case into the calls that are timed: ours, all_to_all_single on sorted rows, and DeepEP where it is installed.

Assumes one process a rank. All begin with tokens and end with rows sorted by expert, and the reverse; ours and DeepEP's
full call count tokens themselves, all_to_all_single is given what it needs to know, beforehand. Does not time.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.experts_report import DEEPEP, DEEPEP_LOW, HALVES, NCCL, NODES, Case, Form, Way
from benchmarks.measure import Bench, Contender
from benchmarks.report import Kind
from benchmarks.turns import Made
from commdsl import ep
from commdsl.machine.resources import data_dir

Tensor = torch.Tensor

OURS: dict[str, dict[str, Any]] = {
    "commdsl": {},
    "16 SMs": {"tune": {"sms": 16}},
    "once": {"source": "experts_once"},
    "once, 16 SMs": {"source": "experts_once", "tune": {"sms": 16}},
    "index": {"source": "experts_index"},
    "index, 16 SMs": {"source": "experts_index", "tune": {"sms": 16}},
    HALVES: {"source": "experts_index"},
}
"""By name, what an Experts is made with; `NODES` by `two_nodes`."""

NEAR = 2.0**-7
"""How far a sum may lie from the exact one, as a share of the sum of its terms' sizes: of two roundings to bfloat16."""


@dataclass
class Stage:
    """One case on this rank: what all ranks have, and where it goes."""

    bench: Bench
    case: Case

    def rows(self, tokens: Tensor, part: int, width: int) -> Tensor:
        """(n, width) bytes of the tokens of these numbers: any rank makes any other's. Finite in every dtype."""
        columns = torch.arange(width, device=self.bench.device, dtype=torch.int32) * 7919 + 104729 * part
        found = torch.empty(len(tokens), width, dtype=torch.uint8, device=self.bench.device)
        for begin in range(0, len(tokens), 8192):  # bounds the memory of what lies between
            mixed = tokens[begin : begin + 8192].to(torch.int32)[:, None] * 40503 + columns
            found[begin : begin + 8192] = ((mixed ^ (mixed >> 11)) & 0x3F).to(torch.uint8)
        return found

    @property
    def own(self) -> Tensor:
        """Numbers of this rank's tokens."""
        return torch.arange(self.case.tokens, device=self.bench.device) + self.bench.rank * self.case.tokens

    @cached_property
    def tokens(self) -> tuple[Tensor, ...]:
        """What this rank sends there: tokens, and in float8 their scales."""
        dtypes = (torch.bfloat16,) if self.case.form is Form.BF16 else (torch.float8_e4m3fn, torch.float32)
        parts = [self.rows(self.own, part, width) for part, width in enumerate(self.case.widths)]
        return tuple(rows.view(dtype) for rows, dtype in zip(parts, dtypes, strict=True))

    @cached_property
    def everyone(self) -> Tensor:
        """(ranks, tokens, topk): the experts of all tokens."""
        return torch.from_numpy(self.case.keys).to(self.bench.device)

    @property
    def keys(self) -> Tensor:
        return self.everyone[self.bench.rank].contiguous()

    @cached_property
    def weights(self) -> Tensor:
        """(tokens, topk) float32, of this rank's tokens."""
        return self.weights_of(self.own)

    def weights_of(self, tokens: Tensor) -> Tensor:
        mixed = tokens[:, None] * 31 + torch.arange(self.case.topk, device=self.bench.device) * 17
        return 0.5 + (mixed % 64).float() / 64

    @cached_property
    def coming(self) -> tuple[Tensor, Tensor]:
        """Of each row that comes, sorted by expert: the number of its token, and which of its choices it is."""
        return self.coming_to(self.bench.rank)

    def coming_to(self, rank: int) -> tuple[Tensor, Tensor]:
        share, topk = self.case.experts_a_rank, self.case.topk
        flat = self.everyone.flatten().long()
        entries = (flat // share == rank).nonzero()[:, 0]
        entries = entries[torch.argsort(flat[entries], stable=True)]
        return entries // topk, entries % topk

    @cached_property
    def made(self) -> Tensor:
        """(rows, hidden) bfloat16: what experts make of what comes; other for every row and choice."""
        return self.made_of(*self.coming)

    def made_of(self, token: Tensor, choice: Tensor) -> Tensor:
        """Between 1 and 1.5."""
        rows = self.rows(token * self.case.topk + choice, 7, self.case.width_back // 2).to(torch.int16)
        return (rows + 0x3F80).view(torch.bfloat16)

    @cached_property
    def summed(self) -> tuple[Tensor, Tensor]:
        """What must come back, in float64, and the sum of the sizes of its terms, by token."""
        total = torch.zeros(self.case.tokens, self.case.hidden, dtype=torch.float64, device=self.bench.device)
        for k in range(self.case.topk):
            term = self.made_of(self.own, torch.full_like(self.own, k)).double()
            total += self.weights[:, k, None].double() * term
        return total, total.abs()

    def wrong_there(self, parts: Sequence[Tensor]) -> Tensor:
        token = self.coming[0]
        bad = []
        for part, (rows, width) in enumerate(zip(parts, self.case.widths, strict=True)):
            bad.append((rows[: len(token)].view(torch.uint8).view(-1, width) != self.rows(token, part, width)).any())
        return torch.stack(bad).any()

    def wrong_back(self, found: Tensor, roundings: int = 2) -> Tensor:
        total, sizes = self.summed
        return ~((found.double() - total).abs() <= roundings / 2 * NEAR * sizes).all()


# --- ours -------------------------------------------------------------------------------------------------------------


def two_nodes(ranks: int) -> dict[str, Any]:
    """What Experts are made with that send once per node: of two, which are the halves of the ranks."""
    name = "experts_nodes"
    text = (data_dir("schedules") / "ep" / f"{name}.comm").read_text("utf-8")
    halves = f"topology halves {{ nodes 2   gpus {ranks // 2} per node   sms 132 }}\n"
    return {"source": {f"{name}.comm": halves + text}, "name": name, "on": "halves"}


def ours(stage: Stage, name: str) -> Made:
    """Collective."""
    case, calls = stage.case, 2 + stage.case.calls
    way_back = case.way is Way.BACK
    scale = (
        () if case.form is Form.FP8 else (torch.zeros(case.tokens, 1, dtype=torch.int16, device=stage.bench.device),)
    )
    given = (*stage.tokens, *scale)
    widths = tuple(tensor.element_size() * tensor.shape[1] for tensor in given)
    limits = ep.Limits(case.tokens, case.topk, case.received, widths, case.width_back)
    experts = ep.Experts(
        limits,
        stage.bench.group,
        stage.bench.device,
        results=2 if way_back else calls,
        params={"E": case.experts},
        **(two_nodes(stage.bench.ranks) if name == NODES else OURS[name]),
    )
    values = None if experts.plan.push_by_key.value is None else stage.weights
    weights = stage.weights if values is None else None
    kept: list[Any] = []
    if way_back:
        kept[:] = [experts.dispatch(given, stage.keys, values)]
        experts.prepare(torch.bfloat16)

    def launched(whole: Callable[..., Any], send: Callable[..., Any], *given: Any) -> Any:
        return send(*given).receive() if name == HALVES else whole(*given)

    def call(_: int) -> Tensor:
        if way_back:
            kept[1:] = [launched(experts.combine, experts.combine_send, stage.made, kept[0].handle, weights)]
            return kept[1]
        kept[:] = [launched(experts.dispatch, experts.dispatch_send, given, stage.keys, values)]
        return kept[0].rows[0]

    def release() -> None:
        kept.clear()
        experts.release()

    def is_wrong() -> Tensor:
        if way_back:
            return stage.wrong_back(kept[1], 3 if name == NODES else 2)  # on a rank, on one of its node, at home
        rows = kept[0].rows[: len(case.widths)]
        if kept[0].index is not None:  # as experts would gather them
            places = kept[0].index[: kept[0].offsets[-1]].long()
            rows = tuple(one.view(torch.uint8)[places].view(one.dtype) for one in rows)
        return stage.wrong_there(rows)

    return Contender(name, Kind.OURS, call, release=release), is_wrong


# --- all_to_all_single ------------------------------------------------------------------------------------------------


def nccl(stage: Stage) -> Made:
    """Rows sorted by destination, one for each choice, exchanged, and sorted by expert; of float8, scales likewise. How
    many go where is known beforehand, and so is every order.
    """
    case, rank, device = stage.case, stage.bench.rank, stage.bench.device
    mine = stage.everyone[rank].flatten().long()
    leaving = torch.argsort(mine, stable=True)  # by expert, and so by rank
    sent = torch.bincount(mine // case.experts_a_rank, minlength=case.ranks).tolist()
    source = stage.coming[0] // case.tokens
    order = torch.argsort(torch.argsort(source, stable=True))  # of each row the place where it arrives
    received = torch.bincount(source, minlength=case.ranks).tolist()
    back = torch.argsort(order)
    home = torch.argsort(leaving)
    kept: list[Tensor] = []

    def exchanged(rows: Tensor, out: list[int], come: list[int]) -> Tensor:
        found = torch.empty(sum(come), rows.shape[1], dtype=torch.uint8, device=device)
        dist.all_to_all_single(found, rows.view(torch.uint8), come, out, group=stage.bench.group)
        return found

    def call(_: int) -> Tensor:
        if case.way is Way.THERE:
            parts = [exchanged(one.view(torch.uint8)[leaving // case.topk], sent, received) for one in stage.tokens]
            kept[:] = [one[order] for one in parts]
        else:
            came = exchanged(stage.made.view(torch.uint8)[back], received, sent).view(torch.bfloat16)
            terms = came[home].view(case.tokens, case.topk, case.hidden)
            kept[:] = [torch.bmm(stage.weights[:, None].bfloat16(), terms)[:, 0]]
        return kept[0]

    def is_wrong() -> Tensor:
        return stage.wrong_there(kept) if case.way is Way.THERE else stage.wrong_back(kept[0])

    return Contender(NCCL, Kind.PEER, call, release=kept.clear), is_wrong


# --- DeepEP -----------------------------------------------------------------------------------------------------------


def deep_ep() -> Any:
    """The package. Its wheel wants NVSHMEM's host library loaded before it, and symbols that are bound lazily."""
    spec = find_spec("nvidia.nvshmem")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        for library in sorted(Path(folder).glob("lib/libnvshmem_host.so*")):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL)
    try:
        return import_module("deep_ep")
    finally:
        sys.setdlopenflags(flags)


def deepep(stage: Stage, name: str) -> Made:
    """The full call with its permute to rows sorted by expert; or what is left of it with a handle that is kept, and no
    permute. The reverse: rows of a token are weighed and added up where they are, and then the call; or the call alone.
    """
    package, case = deep_ep(), stage.case
    buffer = package.Buffer(stage.bench.group, int(2e9), 0)
    keys, x = stage.keys.long(), stage.tokens[0] if case.form is Form.BF16 else stage.tokens
    weights = stage.weights
    ranks, _, experts, is_there, _ = buffer.get_dispatch_layout(keys, case.experts)
    counted = {"num_tokens_per_rank": ranks, "is_token_in_rank": is_there, "num_tokens_per_expert": experts}
    came, ids, of_rows, _, handle, _ = buffer.dispatch(x, topk_idx=keys, topk_weights=weights, **counted)
    first = came[0] if isinstance(came, tuple) else came
    own, choice = (ids >= 0).nonzero(as_tuple=True)
    order = torch.argsort(ids[own, choice], stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    slots = torch.full(ids.shape, len(order), device=ids.device).masked_scatter(ids >= 0, place)
    kept: list[Any] = []

    def full_there() -> None:
        ranks, _, experts, is_there, _ = buffer.get_dispatch_layout(keys, case.experts)
        counted = {"num_tokens_per_rank": ranks, "is_token_in_rank": is_there, "num_tokens_per_expert": experts}
        came, ids, _, _, _, _ = buffer.dispatch(x, topk_idx=keys, topk_weights=weights, **counted)
        own, choice = (ids >= 0).nonzero(as_tuple=True)
        order = own[torch.argsort(ids[own, choice], stable=True)]
        kept[:] = [one[order] for one in (came if isinstance(came, tuple) else (came,))]

    def reduced() -> Tensor:
        more = torch.cat([stage.made, stage.made.new_zeros(1, case.hidden)])
        return torch.bmm(of_rows[:, None].bfloat16(), more[slots])[:, 0]

    rows = reduced() if case.way is Way.BACK else None

    def call(_: int) -> Tensor:
        if case.way is Way.BACK:
            kept[:] = [buffer.combine(reduced() if name == DEEPEP else rows, handle)[0]]
        elif name == DEEPEP:
            full_there()
        else:
            found = buffer.dispatch(x, handle=handle)[0]
            kept[:] = [*found] if isinstance(found, tuple) else [found]
        found_first: Tensor = kept[0]
        return found_first

    def is_wrong() -> Tensor:
        if case.way is Way.BACK:
            return stage.wrong_back(kept[0])
        if name == DEEPEP:
            return stage.wrong_there(kept)
        return (kept[0].view(torch.uint8) != first.view(torch.uint8)).any()

    return Contender(name, Kind.PEER, call, release=kept.clear), is_wrong


def deepep_low_latency(stage: Stage) -> Made:
    """Its rows have a place for every token of every rank: no sorting is left. It casts to float8 itself."""
    package, case = deep_ep(), stage.case
    hint = package.Buffer.get_low_latency_rdma_size_hint(case.tokens, case.hidden, case.ranks, case.experts)
    buffer = package.Buffer(
        stage.bench.group, 0, hint, low_latency_mode=True, num_qps_per_rank=max(case.experts_a_rank, 1)
    )
    keys, is_fp8 = stage.keys.long(), case.form is Form.FP8
    x = replace(stage, case=replace(case, form=Form.BF16)).tokens[0]
    came, _, handle, _, _ = buffer.low_latency_dispatch(x, keys, case.tokens, case.experts, use_fp8=is_fp8)
    own = stage.everyone.flatten().long() - stage.bench.rank * case.experts_a_rank
    counts = torch.bincount(own[(own >= 0) & (own < case.experts_a_rank)], minlength=case.experts_a_rank)
    shape = (came[0] if isinstance(came, tuple) else came).shape
    ones = torch.ones(shape, dtype=torch.bfloat16, device=x.device)
    kept: list[Any] = []

    def call(_: int) -> Tensor:
        if case.way is Way.BACK:
            kept[:] = [buffer.low_latency_combine(ones, keys, stage.weights, handle)[0]]
        else:
            found, count, *_ = buffer.low_latency_dispatch(x, keys, case.tokens, case.experts, use_fp8=is_fp8)
            kept[:] = [found[0] if isinstance(found, tuple) else found, count]
        first: Tensor = kept[0]
        return first

    def is_wrong() -> Tensor:
        if case.way is Way.BACK:
            total = stage.weights.sum(1, keepdim=True)
            return ~((kept[0].float() - total).abs() <= NEAR * total).all()
        return (kept[1] != counts).any()  # of rows, whose places are its own, how many there are

    return Contender(DEEPEP_LOW, Kind.PEER, call, release=kept.clear), is_wrong


def peer(stage: Stage, name: str) -> Made:
    """What stands beside ours; what cannot be made raises."""
    if name == NCCL:
        return nccl(stage)
    return deepep_low_latency(stage) if name == DEEPEP_LOW else deepep(stage, name)
