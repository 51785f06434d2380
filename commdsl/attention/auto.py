"""Turns a machine and the sizes of a call into the schedule to run, its parameters and its way to travel, and why.

Assumes that all ranks ask for the same, so that they choose the same: nothing else goes into a choice. The model is
`cost.visits`: transfers and visits on two clocks. A visit takes the time of the query and key pairs that the mask
admits of what is handed over, on the rank that has most of them. Does not load or run anything, and needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl import compiler
from commdsl.attention.machines import Machine, Tune, Way, of_device, on_topology
from commdsl.attention.masks import Mask, pairs
from commdsl.attention.placement import Placement, placed
from commdsl.cost.visits import Launched, Timed, UnlinkedError, Visited, beside, phases
from commdsl.ir import resolve
from commdsl.ir.held import held
from commdsl.ir.schedules import Schedule, Yield
from commdsl.language.diagnostics import CommError
from commdsl.language.kinds import BufferKind
from commdsl.language.syntax import ScheduleDecl
from commdsl.machine import devices, resources
from commdsl.machine.dtypes import BY_NAME
from commdsl.machine.errors import ArgumentError

Params: TypeAlias = tuple[tuple[str, int], ...]
Floats: TypeAlias = NDArray[np.float64]

VISIT_SECONDS = 5e-6
"""What a visit takes beside its pairs: a call or two of a kernel, and its part of the merge."""

BACKWARD_FLOPS = 2.5
"""Of a backward pass, for each of the forward pass: five products of matrices, not two."""

MOST_TOKENS = (1 << 31) - 1
"""Of a sequence: pairs of them are counted in 64 bits."""

NEAR_TIE = 0.02
"""A schedule that comes later in `candidates` has to be faster by more than this share."""

FOR_HEADS = 0.25
"""One that exchanges heads for rows by more than this, as what it copies and keeps for the way back is not counted."""


@dataclass(frozen=True)
class Sizes:
    """What a call computes: documents of these lengths over all ranks, and a token's heads."""

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    batch: int = 1
    itemsize: int = 2  # bytes of an element
    mask: Mask = field(default_factory=Mask)
    placement: str | Placement = "zigzag"
    backward: bool = False  # whether gradients are computed, too
    by_heads: bool = True  # whether heads may be exchanged for rows

    @property
    def row(self) -> float:
        """Bytes of one head of a token in all batches."""
        return float(self.batch * self.head_dim * self.itemsize)

    @property
    def pair_flops(self) -> float:
        """Of one query and one key."""
        return 4.0 * self.batch * self.heads * self.head_dim


@dataclass(frozen=True)
class Estimate:
    """A schedule, and how long it would take: one Timed for each pass, and the way that it travels in it; `params` as
    `commdsl.load` has them.
    """

    schedule: str
    params: Params
    times: tuple[Timed, ...]
    ways: tuple[Way, ...]

    @property
    def seconds(self) -> float:
        return sum(time.seconds for time in self.times)

    @property
    def by_heads(self) -> bool:
        """Whether heads are exchanged for rows."""
        return "_ulysses" in self.schedule

    def __str__(self) -> str:
        return " ".join((self.schedule, *(f"{key}={value}" for key, value in self.params)))


@dataclass(frozen=True)
class Choice:
    """What runs. `tune`: of the schedule, `tune_backward`: of that of its gradients, where they are counted.
    `estimates`: all schedules that were looked at, the chosen one first, then the fastest.
    """

    schedule: str
    params: Params
    tune: Tune
    tune_backward: Tune
    reason: str
    estimates: tuple[Estimate, ...]

    def __str__(self) -> str:
        return f"{' '.join((self.schedule, *(f'{k}={v}' for k, v in (*self.params, *self.tune))))}: {self.reason}"


def choice(
    length: int | Sequence[int],
    heads: int,
    head_dim: int,
    *,
    ranks: int,
    kv_heads: int | None = None,
    batch: int = 1,
    itemsize: int = 2,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    placement: str | Placement = "zigzag",
    backward: bool = False,
    by_heads: bool = True,
    device: str = "cpu",
    nodes: Sequence[int] | None = None,
    on: str | None = None,
) -> Choice:
    """The schedule that `schedule="auto"` runs, and why: the same on every rank that asks for the same.

    `length`: tokens of the sequence over all `ranks`, or of each document of a packed one. `itemsize`: bytes of an
    element. `window`: how many tokens a query sees before and after its own, None for any number. `backward`: count the
    gradients, too. `by_heads`: look also at schedules that exchange heads for rows, which a call does but under
    torch.compile and with fake tensors, where what they keep for the way back has to be known, and where it returns the
    log-sum-exp. Lengths count as `coarse` says, unless a Placement is given. `device`: the GPU's name, by the rule of
    `commdsl.machine.devices`, or "cpu"; `nodes`: by rank the number of its node, default: all on one. `on`: a topology,
    shipped or in a file, in place of both; its GPU is the one that its name has. The reason says where the figures
    come from: measured on the GPU, or an estimate. Raises ArgumentError, CommError.
    """
    asked = (length,) if isinstance(length, int) else length
    if not isinstance(asked, list | tuple) or not all(isinstance(one, int) and one >= 0 for one in asked):
        raise ArgumentError(f"`length` is a number of tokens, or one for each document, not {length!r:.60}")
    for name, value in (("ranks", ranks), ("heads", heads), ("head_dim", head_dim)):
        if not isinstance(value, int) or value < 1:
            raise ArgumentError(f"`{name}` is a whole number from 1 on, not {value!r:.60}")
    lengths = tuple(asked)
    if min(lengths, default=0) < 0 or max((sum(lengths), *(side or 0 for side in window or ()))) > MOST_TOKENS:
        raise ArgumentError(f"a sequence, and a window, are of 0 to {MOST_TOKENS:,} tokens")
    lengths = coarse(lengths) if isinstance(placement, str) else lengths
    left, right = window if window is not None else (None, None)
    mask = Mask(left, 0 if causal else right)
    sizes = Sizes(lengths, heads, kv_heads or heads, head_dim, batch, itemsize, mask, placement, backward, by_heads)
    if nodes is not None and len(nodes) != ranks:
        raise ArgumentError(f"`nodes` says where {len(nodes)} ranks are; there are {ranks}")
    where = devices.named(device)
    machine = on_topology(on) if on is not None else of_device(where, tuple(nodes or (0,) * ranks))
    return choose(machine, ranks, sizes)


def coarse(lengths: Sequence[int]) -> tuple[int, ...]:
    """Equally long documents with about as many tokens, and about as many pairs of tokens, to within a half: where
    lengths differ in every step, a choice that was made before is found again.
    """
    total, pairs = sum(lengths), sum(length * length for length in lengths)
    if not total:
        return (0,)
    count = _rounded(total * total / pairs)
    return (_rounded(total / count),) * count


def _rounded(value: float) -> int:
    """To three bits: within an eighth."""
    unit = 1 << max(int(value).bit_length() - 3, 0)
    return max(round(value / unit), 1) * unit


@lru_cache(maxsize=256)
def choose(machine: Machine, ranks: int, sizes: Sizes) -> Choice:
    """As `choice`, of things made. Raises ArgumentError where the machine is too small or admits no schedule."""
    if machine.topology.num_ranks < 2:  # of a device, as many as were asked for
        raise ArgumentError(f"attention over ranks needs 2 or more of them, not {ranks}")
    if not 2 <= ranks <= machine.topology.num_ranks:
        raise ArgumentError(f"2 to {machine.topology.num_ranks} ranks of `{machine.topology.name}`, not {ranks}")
    found = [best for one in candidates(machine, ranks, sizes) if (best := fastest(one, machine, ranks, sizes))]
    if not found:
        raise ArgumentError(f"no shipped schedule has all its links on `{machine.topology.name}`: write one")
    first = found[0]
    for estimate in found[1:]:
        share = FOR_HEADS if estimate.by_heads and not first.by_heads else NEAR_TIE
        if estimate.seconds < first.seconds * (1 - share):
            first = estimate
    others = tuple(sorted((one for one in found if one is not first), key=lambda one: one.seconds))
    tune, tune_backward = (*(way.tune for way in first.ways), ())[:2]
    said = reason(machine, first, others)
    return Choice(first.schedule, first.params, tune, tune_backward, said, (first, *others))


def reason(machine: Machine, first: Estimate, others: Sequence[Estimate]) -> str:
    """`3.46 ms by the model: attention 3.46 ms, transfers by the copy engine 1.09 ms, all hidden; next ...`"""
    passes = [pass_words(time, way) for time, way in zip(first.times, first.ways, strict=True)]
    after = f"; next {others[0]}, {ms(others[0].seconds)}" if others else ""
    return f"{ms(first.seconds)} by the model: {'; backward '.join(passes)}{after}; {machine}"


def pass_words(time: Timed, way: Way) -> str:
    seen = f"{ms(time.exposed)} of it not hidden" if time.exposed > 0.005 * time.seconds else "all hidden"
    return f"attention {ms(time.visits)}, transfers by {way.name} {ms(time.launches)}, {seen}"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


# --- what there is to choose from -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Candidate:
    schedule: str
    params: Params = ()


def candidates(machine: Machine, ranks: int, sizes: Sizes) -> Iterator[Candidate]:
    """The shipped schedules that compute this mask of rows in this placement; of two that are as fast, the first."""
    per_node = machine.topology.gpus_per_node
    here, zigzag, in_order = (placed(one, ranks, sizes.lengths) for one in (sizes.placement, "zigzag", "contiguous"))
    # Back halves of zigzag rows are for ranks before their owner alone, if nothing after a token is seen.
    causal: Params = (("causal", 1),) if sizes.mask.right == 0 and here.runs == zigzag.runs else ()
    if here.runs == in_order.runs and sizes.mask != Mask():
        reach = (("B", here.reach(sizes.mask.left)), ("A", here.reach(sizes.mask.right)))
        yield Candidate("attention_window", reach)
    if ranks == 2:
        yield Candidate("attention_pair", causal)
    else:
        for pieces in dict.fromkeys((ranks - 1, 1) if machine.is_mesh else (1, ranks - 1)):
            yield Candidate("attention_direct", (("K", pieces), *causal))
    yield Candidate("attention_ring", causal)
    if ranks > 2 and ranks not in (4, 6):
        yield Candidate("attention_hamilton")
    if machine.has_far and ranks > per_node and ranks % per_node == 0 and per_node > 1:
        yield Candidate("attention_double_ring", (("m", per_node), *causal))
        if per_node % 2 == 0:
            yield Candidate("attention_paths", (("m", per_node),))
    groups = (group for group in range(2, ranks + 1) if sizes.by_heads and ranks % group == 0)
    for group in (group for group in groups if sizes.heads % group == 0 and sizes.kv_heads % group == 0):
        alone = group == ranks
        yield Candidate("attention_ulysses") if alone else Candidate("attention_ulysses_ring", (("U", group),))


# --- how long one takes -----------------------------------------------------------------------------------------------


def fastest(candidate: Candidate, machine: Machine, ranks: int, sizes: Sizes) -> Estimate | None:
    """Each pass by its fastest way to travel; None where the machine has no link for it, or it is for other ranks, or
    it has no way back.
    """
    passes = [candidate]
    if sizes.backward:
        passes.append(replace(candidate, schedule=candidate.schedule + "_backward"))
    if any(resources.shipped_file(one.schedule) is None for one in passes):
        return None
    try:
        models = [modelled(one, machine, ranks, sizes) for one in passes]
    except (UnlinkedError, CommError):
        return None
    times, ways = zip(*(model.fastest(machine) for model in models), strict=True)
    return Estimate(candidate.schedule, candidate.params, tuple(times), tuple(ways))


@dataclass(frozen=True, eq=False)
class Model:
    """What a schedule starts, the FLOPs of each visit on the busiest rank, and the bytes that a rank reads and writes
    in its own memory before and after all visits.
    """

    phases: tuple[Launched | Visited, ...]
    flops: tuple[float, ...]
    around: float

    @property
    def launches(self) -> tuple[Launched, ...]:
        return tuple(phase for phase in self.phases if isinstance(phase, Launched))

    def fastest(self, machine: Machine) -> tuple[Timed, Way]:
        only_combines = all(launch.combines for launch in self.launches)
        ways = [way for way in machine.ways if way.is_far or not (machine.has_far or only_combines)]
        return min(((self.timed(machine, way), way) for way in ways), key=lambda one: one[0].seconds)

    def timed(self, machine: Machine, way: Way) -> Timed:
        """Visits take longer for the SMs that they have not, as long as transfers take them."""
        ways = (way, way.combining or way)
        carriers = machine.carrier(ways[0]), machine.carrier(ways[1])
        alone = VISIT_SECONDS * len(self.flops) + sum(self.flops) / machine.kind.flops
        slower = 1.0
        for launch in self.launches:
            slower += (machine.slowed(ways[launch.combines]) - 1) * launch.time(carriers) / alone
        slower = min(slower, max(map(machine.slowed, ways)))
        each = [VISIT_SECONDS + flops / machine.kind.flops * slower for flops in self.flops]
        time, around = beside(self.phases, each, carriers), self.around / machine.kind.memory
        return Timed(time.seconds + around, time.launches, time.visits + around)


@lru_cache(maxsize=256)
def modelled(candidate: Candidate, machine: Machine, ranks: int, sizes: Sizes) -> Model:
    """Raises CommError where the schedule does not admit this, UnlinkedError where the machine does not."""
    path = resources.shipped_file(candidate.schedule)
    assert path is not None, candidate.schedule
    files = compiler.read(path)
    decl = compiler.choose_kind(files, None, ScheduleDecl)
    declared = {param.name.text for param in decl.params}
    params = {name: value for name, value in candidate.params if name in declared}
    schedule = resolve.resolve(files, decl, ranks, machine.topology, params)
    placement = placed(sizes.placement, ranks, sizes.lengths)
    scale = BACKWARD_FLOPS if candidate.schedule.endswith("_backward") else 1.0
    flops = visit_flops(schedule, admitted(placement, sizes.mask)) * (scale * sizes.pair_flops)
    found = phases(schedule, chunk_bytes(schedule, placement, sizes))
    return Model(found, tuple(flops.tolist()), around(schedule, placement, sizes))


def around(schedule: Schedule, placement: Placement, sizes: Sizes) -> float:
    """Bytes of the merge, which reads what each visit found, and of heads that are sorted by rank, there and back."""
    result, pair = (2 * placement.half_rows * count * sizes.row for count in (sizes.heads, 2 * sizes.kv_heads))
    visits = sum(isinstance(step, Yield) for step in schedule.steps)
    merged = (visits + 1) * result if visits > 1 else 0.0
    return merged + (2 * (2 * result + pair) if any(buffer.name == "qh" for buffer in schedule.buffers) else 0.0)


def chunk_bytes(schedule: Schedule, placement: Placement, sizes: Sizes) -> dict[str, float]:
    """Of a chunk of every buffer that the caller has: queries by their heads, keys and values by theirs."""
    rows = 2 * placement.half_rows
    found = {}
    for buffer in (buffer for buffer in schedule.buffers if buffer.kind is not BufferKind.SCRATCH):
        heads = sizes.kv_heads if set(buffer.name) & set("kv") else sizes.heads
        wide = 1.0 if buffer.element is None else BY_NAME[buffer.element].size / sizes.itemsize
        found[buffer.name] = rows * heads * sizes.row * wide / buffer.num_chunks
    return found


def visit_flops(schedule: Schedule, pairs: Floats) -> Floats:
    """The pairs of each visit on the rank that has most; where heads were spread, all visits share them equally."""
    seen = held(schedule)
    counts = np.zeros((len(seen), schedule.num_ranks))
    by_heads = any(one.reads[0] == "qh" for one in seen)
    for index, one in enumerate(seen):
        keys = next(at for at, name in enumerate(one.reads) if name.startswith("k"))
        origin = one.origin[keys]
        visitor, place = np.nonzero(origin[..., 0] >= 0)
        owner, chunk = origin[visitor, place, 0], origin[visitor, place, 1]
        if by_heads:
            weight: Floats = np.ones(len(visitor))
        else:
            pieces = origin.shape[1] // 2
            weight = pairs[visitor, owner, chunk // pieces] / pieces
        counts[index] = np.bincount(visitor, weight, minlength=schedule.num_ranks)
    if by_heads:
        counts *= float(pairs.sum()) / schedule.num_ranks / counts.sum(axis=0, keepdims=True)
    most: Floats = counts.max(axis=1)
    return most


@lru_cache(maxsize=16)
def admitted(placement: Placement, mask: Mask) -> Floats:
    """(ranks, ranks, 2): the pairs of a rank's queries and the keys in the front or back half of a rank's rows."""
    by_document: dict[int, list[tuple[int, int, int]]] = {}
    for rank, halves in enumerate(placement.runs):
        for half, runs in enumerate(halves):
            for run in runs:
                by_document.setdefault(run.document, []).append((2 * rank + half, run.begin, run.length))
    found: Floats = np.zeros((2 * placement.ranks, 2 * placement.ranks))
    for runs_of in by_document.values():
        half, begin, length = np.array(runs_of, np.int64).T
        amounts = pairs(mask, begin[:, None], length[:, None], begin[None, :], length[None, :])
        np.add.at(found, (half[:, None], half[None, :]), amounts)
    whole: Floats = found.reshape(placement.ranks, 2, placement.ranks, 2).sum(axis=1)
    return whole
