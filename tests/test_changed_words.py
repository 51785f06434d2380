"""Files with words changed are refused with a code, or proved and right: nothing else happens, and soon.

`pytest tests/test_changed_words.py --sweep=all` changes 100,000 files, shipped ones and others of many constructs. What
is accepted the oracle runs, beside what is promised, and the kernel of one text in RUN_ONE_IN beside the oracle.
"""

from __future__ import annotations

import hashlib
import random
import re
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from collectives import SCHEDULES
from strategies import OPERATIONS
from test_calls import ALLGATHER, ALLTOALL, TORUS, USES
from test_operations import CALLED, NAMED, ROUNDED
from test_tiles import CHAIN as TILES
from test_visits import BEHIND
from test_waves import CHAIN

from commdsl import compiler
from commdsl.commands.arguments import UsageError
from commdsl.commands.trial import Settings, trial
from commdsl.ir import interpret
from commdsl.ir.contracts import ChunkTerm, Contract, FinishedTerm, SumTerm, Term
from commdsl.ir.lengths import block_lengths, num_entries
from commdsl.ir.schedules import Schedule, Step, Yield
from commdsl.language.diagnostics import CommError, render_full
from commdsl.language.format import format_file
from commdsl.language.kinds import GIVEN
from commdsl.language.parser import parse
from commdsl.language.source import Source
from commdsl.machine.dtypes import FLOAT32, INT64

MANY = """use "collectives/reduce_tree.comm"
fn side(n) = floor_log2(n) + [0, 1][n % 2]
topology grid {
  nodes 2   gpus side(4) * 2 per node   sms 132
  link hop pairs (i, (i + 1) % gpus) for i in 0 ..< gpus   50 GB/s per pair   1 us
  link net across nodes   10 GB/s per gpu   3 us
  missing (i, i + 4) for i in 0 ..< 4
  degraded (i, i + 5) for i in 0 ..< 3   5 GB/s
}
schedule through(K = 2) for P ranks where P >= 2 {
  cycles C = open (i for i in 0 ..< P)
  inout x[K]
  ensure reduce(x, 0)
  group half = ranks in runs of P / 2
  group pair = ranks by stride P / 2
  pipeline i in 0 ..< K {
    do reduce_tree(x[i]) over half
    if i == 0 { each r do reduce_tree(x[(0 if r < 2 else C[0].at(0))]) over pair } else { do last(x[i]) over pair }
  }
}
schedule last for Q ranks where Q == 2 {
  inout y
  scratch t
  ensure reduce(y, 0)
  each r where r == 1 { put y -> t @ 0 }
  each r where r == 0 { reduce t -> y }
}
"""

MACHINE = """topology hosts {
  nodes 2   gpus 4 per node   sms 80
  link round arcs (i, (i + 1) % gpus) for i in 0 ..< gpus   100 GB/s per pair   1 us
  link pcie in node   25 GB/s per 2 gpus   2 us
  link nic across nodes   25 GB/s per node   4 us
}
schedule mirror for P ranks where P == nodes * gpus {
  input x[2]
  output y[2]
  ensure permutation(x -> y) r -> (r + gpus) % P
  tune { lanes 4   threads 64   tile 4 KB   protocol packet   sms 2 }
  each r { put x -> y @ (r + gpus) % P }
}
"""

ADDED = """schedule added for P ranks where P >= 2 {
  input x[2 blocks]
  input t
  output y
  ensure each r { y == sum(x[0] @ (r - 1) % P, t, x[1]) }
  each r { copy t -> y }
  each r { reduce x[0] -> y @ (r + 1) % P }
  each r { reduce x[1] -> y }
}
"""

UNEVEN = """schedule there_and_back for P ranks where P >= 2 {
  input x[P blocks, 2] of n[block]
  output y[P blocks, 2] of n[block]
  scratch t[2]
  ensure allreduce(x -> y)
  each r, i in 0 ..< 2 { reduce x[r, i] @ all -> t[i] }
  each r, i in 0 ..< 2, q { put t[i] -> y[r, i] @ q }
}
"""


@dataclass(frozen=True)
class Text:
    """A right file, on so many ranks of a machine."""

    text: str
    ranks: int
    on: str | None = None


def machines() -> Iterator[Text]:
    """Every shipped machine, and a schedule on it."""
    gather = (SCHEDULES / "collectives" / "allgather_direct.comm").read_text(encoding="utf-8")
    for path in sorted(SCHEDULES.glob("topologies/*.comm")):
        yield Text(path.read_text(encoding="utf-8") + gather, 8, path.stem)


def shipped() -> Iterator[Text]:
    for path in sorted(SCHEDULES.glob("*/*.comm")):
        if path.parent.name != "topologies":
            on = "h200_2x8" if path.stem == "experts_nodes" else None
            yield Text(
                path.read_text(encoding="utf-8"), {"hamilton": 5}.get(path.stem.split("_")[-1], 16 if on else 4), on
            )


WRITTEN = (
    *(Text(USES + text, ranks) for text, ranks in ((TORUS, 8), (ALLTOALL, 4), (ALLGATHER, 6))),
    *(Text(text, ranks) for text, ranks in ((CHAIN, 5), (MANY, 4), (UNEVEN, 3), (ADDED, 3))),
    *(Text(text, 3) for text in (NAMED, CALLED, ROUNDED, TILES, BEHIND)),
    Text(MACHINE, 8, "hosts"),
)

WORD = re.compile(r"[A-Za-z_]\w*|\d+|==|!=|[-+*/%<]")
TOKEN = re.compile(r'"[^"\n]*"|[A-Za-z_]\w*|\d+|\.\.<|->|==|!=|<=|>=|<<|>>|\*\*|[^\w\s]')
NUMBERS = ("0", "1", "2", "3", "5", "P", "-1", "100000", "999999999999")
OTHERS = tuple(TOKEN.findall((Path(__file__).parent / "everything.comm").read_text(encoding="utf-8")))
"""Every word of the language, as often as it stands in a file of all that there is."""

SHARDS, EACH = 100, 1000
RUN_ONE_IN = 4


def word_changed(text: str, chance: random.Random) -> str:
    """One word in place of another: a number, a name that stands elsewhere, or an operator."""
    words = list(WORD.finditer(text))
    word = chance.choice(words)
    if word[0].isdigit():
        other = chance.choice(NUMBERS)
    elif word[0][0].isalpha():
        other = chance.choice([one[0] for one in words if one[0][0].isalpha()] + ["0", "2"])
    else:
        other = chance.choice(["+", "-", "*", "/", "%", "==", "<", "!=", "<<"])
    return text[: word.start()] + other + text[word.end() :]


def token_changed(text: str, chance: random.Random) -> str:
    """One token left out, doubled, exchanged with another, or any other in its place or before it."""
    tokens = list(TOKEN.finditer(text))
    first, last = sorted(chance.sample(tokens, 2), key=lambda token: token.start())
    other = chance.choice([chance.choice(OTHERS), chance.choice(NUMBERS), last[0]])
    middle = text[first.end() : last.start()]
    return text[: first.start()] + chance.choice(
        [
            text[first.end() :],
            f"{first[0]} {first[0]}{text[first.end() :]}",
            f"{last[0]}{middle}{first[0]}{text[last.end() :]}",
            f"{other}{text[first.end() :]}",
            f"{other} {first[0]}{text[first.end() :]}",
        ]
    )


def changed(text: str, chance: random.Random) -> str:
    """One, two or three changes, mostly of words: what is no program at all says least."""
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        text = chance.choice([word_changed, word_changed, word_changed, token_changed])(text, chance)
    return text


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """AssertionError if it takes longer, and TimeoutError at once if it takes very long."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError

    before, start = signal.signal(signal.SIGALRM, stop), time.thread_time()
    signal.alarm(30 * round(seconds))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert time.thread_time() - start < seconds


def outcome(text: Text, chosen: Callable[[str], bool], counts: Counter[str]) -> list[str]:
    """What is shown of each fault; nothing where all is proved. What is proved is run."""
    try:
        with within(10):
            files = compiler.with_used(parse(Source("mutant.comm", text.text)), Path())
            written = format_file(files[0])
            assert format_file(parse(Source("mutant.comm", written))) == written
            proved = [
                compiler.check_declared(files, decl, compiler.Given(text.ranks, text.on))
                for decl in compiler.declarations(files)
            ]
    except CommError as error:
        counts["refused"] += 1
        return [render_full(found) for found in error.diagnostics]
    for one in proved:
        if isinstance(one, compiler.CheckedSchedule):
            run(one, chosen, counts)
    counts["proved"] += 1
    return []


def run(checked: compiler.CheckedSchedule, chosen: Callable[[str], bool], counts: Counter[str]) -> None:
    """The oracle keeps what is promised, and the kernel does what the oracle does."""
    if is_plain(checked.schedule):
        counts["kept"] += 1
        kept(checked.schedule)
    made = compiler.printed(checked)
    assert isinstance(made, compiler.CompiledSchedule)
    texts = (made.emitted, *made.launched)
    if chosen("".join(text.text for text in texts)):
        counts["run"] += 1
        dtype = "int32" if is_plain(checked.schedule) and checked.schedule.cast is None else "float32"
        try:
            found = trial(made, Settings(16384, dtype, None, sanitize=False, processes=False))
        except UsageError as error:
            counts[f"not run: {str(error)[:40]}"] += 1
            return
        assert found.is_right, found.fault


def is_plain(schedule: Schedule) -> bool:
    """Whether all that happens to chunks is what moves do to them."""
    moves = all(isinstance(step, Step) or (isinstance(step, Yield) and step.name is None) for step in schedule.steps)
    return moves and not schedule.rowwise and not schedule.has_products


def kept(schedule: Schedule) -> None:
    """Each chunk of a contract is what it says, of small numbers that no cast rounds."""
    dtype = INT64 if schedule.cast is None else FLOAT32
    dice, ranks, unit, table = np.random.default_rng(7), schedule.num_ranks, 16 // dtype.size, 5 * 16 // dtype.size + 1
    lengths: list[int] | int = table
    inputs = {}
    if schedule.lengths is not None:
        lengths = dice.integers(0, table, num_entries(ranks, len(schedule.lengths.axes))).tolist()
        inputs[schedule.lengths.table] = [np.array(lengths)]
    sizes = [block_lengths(one.lengths, ranks, one.blocks, lengths) for one in schedule.buffers]
    for buffer, of_ranks in zip(schedule.buffers, sizes, strict=True):
        if buffer.kind in GIVEN:
            inputs[buffer.name] = [dice.integers(-1, 2, sum(own)).astype(dtype.storage) for own in of_ranks]
    outputs = interpret.run(schedule, inputs, dtype, "sum").outputs

    def chunk(arrays: dict[str, list[np.ndarray]], buffer: int, rank: int, number: int) -> np.ndarray:
        one, blocks = schedule.buffers[buffer], sizes[buffer][rank]
        block, piece = divmod(number, one.cut)
        units, start = -(-blocks[block] // unit), sum(blocks[:block])
        first, last = (min(unit * (units * at // one.cut), blocks[block]) for at in (piece, piece + 1))
        return arrays[one.name][rank][start + first : start + last]

    for contract in schedule.contracts:
        if (
            schedule.buffers[contract.source_buffer].kind in GIVEN
            and schedule.buffers[contract.dest_buffer].name in outputs
        ):
            for rank, number, value in zip(contract.dest_rank, contract.dest_chunk, contract.value, strict=True):
                where = sources(contract, int(value)) if contract.term is None else added(contract.term, int(value))
                parts = [chunk(inputs, *at) for at in where]
                want = reduce(OPERATIONS[contract.operation or "sum"], parts)
                assert np.array_equal(chunk(outputs, contract.dest_buffer, int(rank), int(number)), want)


def sources(contract: Contract, value: int) -> list[tuple[int, int, int]]:
    """The buffer, the ranks and the chunks that a value combines."""
    valid = slice(None) if contract.source_valid is None else contract.source_valid[value]
    pairs = zip(contract.source_rank[value][valid].tolist(), contract.source_chunk[value][valid].tolist(), strict=True)
    return [(contract.source_buffer, *pair) for pair in pairs]


def added(term: Term, row: int) -> list[tuple[int, int, int]]:
    """As `sources`, of a term: moves alone make sums of chunks, and no functions."""
    match term:
        case ChunkTerm(buffer, rank, chunk):
            return [(buffer, int(rank[row]), int(chunk[row]))]
        case SumTerm(_, parts, rows):
            every = zip(parts, rows, strict=True)
            return [one for part, at in every for inner in np.flatnonzero(at == row) for one in added(part, int(inner))]
        case FinishedTerm(of, None, None, ChunkTerm() as residual):
            return added(of, row) + added(residual, row)
        case _:
            raise AssertionError(f"moves do not make {term}")


@pytest.fixture(scope="session")
def chosen() -> Callable[[str], bool]:
    """One text in RUN_ONE_IN, once."""
    seen = set[bytes]()

    def of(text: str) -> bool:
        digest = hashlib.sha256(text.encode()).digest()
        is_new = digest not in seen
        seen.add(digest)
        return is_new and digest[0] % RUN_ONE_IN == 0

    return of


@pytest.mark.sweep
@pytest.mark.parametrize("shard", range(SHARDS))
def test_words_changed(
    shard: int, chosen: Callable[[str], bool], turns: Callable[..., int], tally: Callable[..., None]
) -> None:
    """There is a diagnostic that can be shown, or a proof of what is right, within ten seconds."""
    texts, counts = [*WRITTEN, *WRITTEN, *WRITTEN, *shipped(), *machines()], Counter[str]()
    chance, wrong = random.Random(f"words {shard}"), list[str]()
    for _ in range(turns(EACH, one_in=250)):
        text = chance.choice(texts)
        mutant = Text(changed(text.text, chance), text.ranks, text.on)
        try:
            assert all(shown.startswith(("error[C", "warning[C")) for shown in outcome(mutant, chosen, counts))
        except Exception:  # whatever it is, the others are of interest as well
            wrong.append(f"{traceback.format_exc(-3)}{mutant.ranks} ranks on {mutant.on}\n{mutant.text}")
    assert not wrong, "\n---\n".join(wrong)
    tally("files with words changed", counts)
