"""Turns a Plan into the text of its kernel: constants, operation tables with their origin, one entry.

Assumes a verified Plan. Does not choose anything, and does not know the element type or the reduction: those are
compiler flags, so one text serves all. The only module that uses jinja2.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING

import numpy as np

from commdsl.build.built import Built
from commdsl.build.calls import AgreeText, Line, agree_text, calls, tile_calls
from commdsl.build.constants import routed_constants, static_constants
from commdsl.build.headers import headers_digest
from commdsl.ir.schedules import Ints
from commdsl.machine.resources import data_dir
from commdsl.machine.shortage import explained
from commdsl.program.actors import printed
from commdsl.program.arguments import arguments
from commdsl.program.memory import Transport
from commdsl.program.moves import CELL, Casts, Moves, OpKind, Ops, Origin
from commdsl.program.phases import Push
from commdsl.program.plan import Plan
from commdsl.program.sizes import first_blocks, known_lengths

if TYPE_CHECKING:
    import jinja2

KIND_NAMES = {kind: f"k{kind.name.capitalize()}" for kind in OpKind}

CONSTANT_BYTES = 48 * 1024
"""Tables up to this size lie in the GPU's constant memory, which has 64 KB and a cache beside every SM."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """A kernel's text. `name` is its entry; `digest` covers the text and, through its head, the headers. `identity`
    says whether two ranks run the same: it covers them but for comments, which name the file. What NVSHMEM does for it
    is linked."""

    name: str
    text: str
    digest: str
    identity: str
    transport: Transport = Transport.PEER
    kernels: tuple[Built, ...] = ()  # built ahead of time, of this text or of others


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of the operation table that come from one statement, under the comment that says which."""

    origin: str
    rows: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankRows:
    title: str
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class CastsText:
    """What the template prints of `Casts`."""

    code: str
    dests: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MovesText:
    """What the template prints of `Moves`; everything is text or a number."""

    in_constant_memory: bool
    wire: str
    has_reduction: bool
    operation: str  # of what no kind names: what the call asks for, or where it does not, one that is named
    reduces_remotely: bool
    ranks: tuple[RankRows, ...]
    rank_begin: str
    signals_per_round: tuple[str, ...]
    dests: tuple[str, ...]
    sources: tuple[str, ...]
    waits: tuple[str, ...]
    signals: tuple[str, ...]
    casts: CastsText | None
    lengths: tuple[str, ...]  # none where all blocks are as long
    first_blocks: str  # of each tensor, among the blocks of all


@dataclass(frozen=True, slots=True)
class Kernel:
    """What the template prints of a Plan."""

    entry: str
    source: str
    plan_digest: str
    headers_digest: str
    headers: tuple[str, ...]
    constants: tuple[tuple[str, str, int], ...]  # type, name, value
    arguments: tuple[tuple[str, str, str], ...]  # type, name, extent
    threads: int
    lanes_per_block: int
    has_far: bool  # peers that only NVSHMEM reaches
    is_stamped: bool
    form: str  # of the entry: a kernel that runs the phases, or one for the flags between copies that others make
    moves: MovesText | None
    has_keys: bool  # by which rows go, or come back
    positions: tuple[str, ...]  # lines of a table, by key; none where keys stand in their order
    agree: AgreeText | None  # None: the lanes tell of the call
    has_table: bool  # of rows, which comes with a call
    phases: tuple[Line, ...]
    is_cut: bool  # a call may be two launches
    tiles: tuple[Line, ...]  # what the blocks of a second role do; nothing: there is none


@explained("write the text of a kernel")
def emit(plan: Plan) -> Emitted:
    """The text for every rank of a Plan, the same on any machine and hash seed."""
    text = environment().get_template("kernel.cu.j2").render(kernel=_kernel(plan))
    return _emitted(plan.name, text, plan.transport)


def joined(name: str, texts: tuple[Emitted, ...]) -> Emitted:
    """The texts of all launches, to be read as one; each is built by itself."""
    text = "\n".join(one.text for one in texts)
    return _emitted(name, text, Transport.PEER)


def _emitted(name: str, text: str, transport: Transport) -> Emitted:
    code = headers_digest() + re.sub(r"//[^\n]*", "", text)
    digest, identity = (hashlib.sha256(one.encode()).hexdigest() for one in (text, code))
    return Emitted(f"commdsl_{name}", text, digest, identity, transport)


@cache
def environment() -> jinja2.Environment:
    """The templates; a field that is missing raises instead of printing nothing. They are parsed once, which takes ten
    times as long as to print one, and again when their files are newer.
    """
    import jinja2  # 20 ms that loading a compiled schedule does not need

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(data_dir("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def _kernel(plan: Plan) -> Kernel:
    moves = plan.moves if plan.is_static else None
    constants = tuple(static_constants(plan) if plan.is_static else routed_constants(plan))
    fields = tuple(
        (field.type, field.name, "" if field.count is None else f"[{field.count}]") for field in arguments(plan).fields
    )
    tables = None if moves is None else _tables(moves, printed(plan))
    phases, tiles = tuple(calls(plan)), tuple(tile_calls(plan))
    keys = plan.key_positions
    agree = agree_text(plan)
    identity = (plan.name, plan.params, plan.topology, plan.transport.value)
    told = (*identity, constants, tables, fields, keys, phases, tiles, agree)
    return Kernel(
        entry=f"commdsl_{plan.name}",
        source=file_name(plan.span.source.name),
        plan_digest=hashlib.sha256(repr(told).encode()).hexdigest(),
        headers_digest=headers_digest(),
        headers=_headers(plan),
        constants=constants,
        arguments=fields,
        threads=plan.comm.threads,
        lanes_per_block=plan.comm.lanes_per_block,
        has_far=plan.transport is Transport.NVSHMEM,
        is_stamped=plan.stamped,
        form=_form(plan),
        moves=tables,
        has_keys=bool(keys),
        positions=() if keys == tuple(range(len(keys))) else _lines(keys),
        agree=agree,
        has_table=any(isinstance(phase, Push) for phase in plan.phases),
        phases=phases,
        is_cut=plan.halves is not None,
        tiles=tiles,
    )


def _headers(plan: Plan) -> tuple[str, ...]:
    if plan.is_static:
        more = (plan.tiles, "tiles.cuh"), (plan.by_row, "by_row.cuh"), (plan.moves.casts, "casts.cuh")
        flags = ("flags.cuh",) if _has_only_flags(plan) else ()
        return ("kernel.cuh", *flags, *(name for phase, name in more if phase is not None))
    return tuple(phase.header for phase in plan.comm.routed if phase.pushes)


def _form(plan: Plan) -> str:
    if plan.tiles is not None:
        return "COMMDSL_ROLES"
    form = "COMMDSL_KERNEL" if plan.agreeing_blocks else "COMMDSL_LANES"
    return "COMMDSL_FLAGS" if _has_only_flags(plan) else form


def _has_only_flags(plan: Plan) -> bool:
    """Whether the host issues the copies, and the kernel raises and awaits the flags between them."""
    return plan.is_static and not plan.moves.carrier.runs_on_sms


def _tables(moves: Moves, ops: Ops) -> MovesText:
    """`ops`: of all who act, the tiles behind the moves."""
    places = _blocks(ops.source_space, ops.source_index, np.repeat(ops.cut, np.diff(ops.source_begin)))
    return MovesText(
        in_constant_memory=_table_bytes(moves, ops) <= CONSTANT_BYTES,
        wire=moves.carrier.wire,
        has_reduction=moves.has_reduction,
        operation=("COMMDSL_OP" if moves.asks else moves.named[0]) if moves.has_reduction else "",
        reduces_remotely=reduces_remotely(moves),
        ranks=tuple(_rank_tables(moves, ops)),
        rank_begin=_row(np.searchsorted(ops.leaders, ops.rank_begin).astype(np.int32)),
        signals_per_round=tuple(_row(line) for line in moves.signals_per_round),
        dests=_rows(ops.dest_space, ops.dest_rank, _blocks(ops.dest_space, ops.dest_index, ops.cut)),
        sources=_rows(ops.source_space, _senders(moves, ops), places, ops.source_weight),
        waits=_rows(ops.wait_peer, ops.wait_ordinal, ops.wait_rounds_back),
        signals=_rows(ops.signal_peer, signal_ordinals(ops)),
        casts=None if moves.casts is None else _casts(moves.casts),
        lengths=() if moves.lengths is None else _lines(tuple(known_lengths(moves)[ops.leaders].tolist())),
        first_blocks=_row(first_blocks(moves)),
    )


def _casts(casts: Casts) -> CastsText:
    code = f"Float8By<{casts.cast.stretch}>" if casts.cast.stretch else f"Plainly<commdsl::{casts.cast.element}>"
    return CastsText(code, _lines(tuple(casts.dest.tolist())), _lines(tuple(casts.source.tolist())))


def _blocks(space: Ints, index: Ints, cut: Ints) -> Ints:
    """Cells by their number, chunks by the block they are in: which piece of it they are is the operation's."""
    return np.where(space == CELL, index, index // cut).astype(np.int32)


def _senders(moves: Moves, ops: Ops) -> Ints:
    """For each source the rank it lies on; where data carries its flag, the one it comes from: a report names it."""
    if not moves.carrier.has_flags_in_data:
        return ops.source_rank
    writes, reads = np.flatnonzero(ops.dest_space == CELL), np.flatnonzero(ops.source_space == CELL)
    writer = np.zeros((moves.num_ranks, max(moves.num_cells, 1)), np.int32)
    writer[ops.dest_rank[writes], ops.dest_index[writes]] = ops.actor[writes]
    senders = ops.source_rank.copy()
    senders[reads] = writer[ops.source_rank[reads], ops.source_index[reads]]
    return senders


def _table_bytes(moves: Moves, ops: Ops) -> int:
    """What the tables of all ranks take in the kernel."""
    rows = 14 * len(ops.leaders) + 3 * ops.num_ops + 4 * len(ops.source_space) + 3 * len(ops.wait_peer)
    rows += 0 if moves.lengths is None else len(ops.leaders)
    return 4 * (rows + 2 * len(ops.signal_peer) + moves.signals_per_round.size + len(ops.rank_begin))


def signal_ordinals(ops: Ops) -> Ints:
    """Which signal of its round each row of the signal table is, from its rank to its peer, counted from 1."""
    programs = len(ops.rank_begin) - 1
    pair = np.repeat(ops.actor.astype(np.int64), np.diff(ops.signal_begin)) * (programs + 1) + ops.signal_peer
    order = np.argsort(pair, kind="stable")
    first = np.searchsorted(pair[order], pair[order])  # where the run of equal pairs begins
    ordinals = np.empty(len(pair), dtype=np.int32)
    ordinals[order] = np.arange(len(pair)) - first + 1
    return ordinals


def reduces_remotely(moves: Moves) -> bool:
    """Whether a reduction reads or writes a cell of another rank, which takes a transport of plain loads and stores."""
    ops = moves.ops
    rank = ops.actor
    reduces = ops.kind != OpKind.COPY
    remote_dest = (ops.dest_space == CELL) & (ops.dest_rank != rank) & reduces
    op_of_source = np.repeat(np.arange(ops.num_ops), np.diff(ops.source_begin))
    remote_source = (ops.source_space == CELL) & (ops.source_rank != rank[op_of_source]) & reduces[op_of_source]
    return bool(remote_dest.any() or remote_source.any())


def _rank_tables(moves: Moves, ops: Ops) -> Iterator[RankRows]:
    """For each who acts one group per run of rows of the same statement and kind; a row is a group of operations."""
    origins, rows = _origins(moves, ops, ops.leaders), _op_rows(ops, ops.leaders)
    for actor, (first, last) in enumerate(pairwise(np.searchsorted(ops.leaders, ops.rank_begin).tolist())):
        title = f"rank {actor}" if actor < moves.num_ranks else f"rank {actor - moves.num_ranks}, tiles"
        runs = groupby(range(first, last), key=origins.__getitem__)
        yield RankRows(title, tuple(Group(origin, tuple(rows[at] for at in run)) for origin, run in runs))


def _origins(moves: Moves, ops: Ops, which: Ints) -> list[str]:
    """Of each of these operations; each text is made once, as many operations of all ranks share it."""
    distinct, of = np.unique(ops.origin[which] * len(OpKind) + ops.kind[which], return_inverse=True)
    texts = [_origin(moves.origins[one // len(OpKind)], OpKind(one % len(OpKind))) for one in distinct.tolist()]
    return [texts[one] for one in of.tolist()]


def _op_rows(ops: Ops, first: Ints) -> list[str]:
    """For each group, by its first operation: what it does, and its rows of each table, where they begin, how many."""
    last = np.append(first[1:], ops.num_ops)
    runs = [first, last - first]
    for begin in (ops.source_begin, ops.wait_begin, ops.signal_begin):
        runs += [begin[first], begin[last] - begin[first]]
    names = [KIND_NAMES[kind] for kind in OpKind]
    numbers = _printed(ops.cut[first], ops.piece[first], ops.barrier[first], ops.whole[first], *runs)
    return [f"{names[kind]}, {row}" for kind, row in zip(ops.kind[first].tolist(), numbers, strict=True)]


def _origin(origin: Origin, kind: OpKind) -> str:
    line, _ = origin.span.position
    bindings = ", ".join(f"{name} = {value}" for name, value in origin.bindings)
    text = f"{file_name(origin.span.source.name)}:{line} {kind.name.lower()}"
    return text + (f" ({bindings})" if bindings else "") + (f" [{origin.note}]" if origin.note else "")


def file_name(name: str) -> str:
    """The last part of a path, of characters that cannot end a comment: the text is the same wherever the file lies."""
    return re.sub(r"[^\w.+-]", "_", PurePath(name).name, flags=re.ASCII)


def _row(values: Ints) -> str:
    return ", ".join(map(str, values.tolist()))


def _lines(numbers: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(", ".join(map(str, numbers[first : first + 16])) for first in range(0, len(numbers), 16))


def _rows(*columns: Ints) -> tuple[str, ...]:
    """Rows of a table, eight a line; at least one row, as C++ has no empty arrays."""
    rows = [f"{{{row}}}" for row in _printed(*columns if len(columns[0]) else np.zeros((len(columns), 1), np.int32))]
    return tuple(", ".join(rows[first : first + 8]) for first in range(0, len(rows), 8))


def _printed(*columns: Ints) -> list[str]:
    """The numbers of each row."""
    form = ", ".join(["%d"] * len(columns))  # twice as fast as to join what is printed one by one
    return [form % row for row in zip(*(column.tolist() for column in columns), strict=True)]


ELEMENTS = {"bool": "boolean"}
"""Element types that elements.cuh cannot call as others do."""

SHORT_PROGRAM = 16
"""Up to so many passes a round, a GPU's kernel is built for its rank, with every pass as code of its own."""


def defines(plan: Plan, dtype: str, op: str, rank: int | None = None) -> tuple[str, ...]:
    """The macros a build of the text takes: element type and reduction, none for a kernel that only moves bytes.

    With `rank` the build is for that rank alone if its program is short.
    """
    macros: tuple[str, ...] = (f"COMMDSL_DTYPE={ELEMENTS.get(dtype, dtype)}",) if plan.moves.has_elements else ()
    if plan.moves.asks:
        macros = (*macros, f"COMMDSL_OP={op}")
    if rank is None or not plan.moves.carrier.runs_on_sms:
        return macros
    first, last = np.searchsorted(plan.moves.ops.leaders, plan.moves.ops.rank_begin[rank : rank + 2])
    return (*macros, f"COMMDSL_RANK={rank}") if last - first <= SHORT_PROGRAM else macros
