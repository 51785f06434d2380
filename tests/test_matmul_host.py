"""The kernel of products on a Hopper GPU that is made up: all its forms, in orders that are drawn, beside float64."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from fake_hopper import FakeHopper, Move  # noqa: E402 - after the check for torch

from commdsl.build.headers import include_dir  # noqa: E402
from commdsl.build.matmul import FLOAT8, Product, Tiling, cut_tiles, stores  # noqa: E402
from commdsl.build.task_table import Place, SourceRow, TaskRow, WordWait  # noqa: E402
from commdsl.runtime.matmul import Addresses, Matmul, Matrices, Side  # noqa: E402

P = Product
FORMS = {
    "sums of products": (P(0, 0, 0, bias=True, turns=2, sources=3), Tiling(64, 1, 4)),
    "clusters of rows": (P(0, 0, 0, bias=True, gelu=True, adds=True, turns=2), Tiling(80, 2, 4)),
    "stored late": (P(0, 0, 0, adds=True, turns=2), Tiling(256, 2, 4)),
    "clusters of the depth": (P(0, 0, 0, adds=True, turns=2, sources=2), Tiling(96, 1, split=3)),
    "float8": (P(0, 0, 0, FLOAT8, adds=True, turns=2, sources=2), Tiling(96, 1, 2)),
    "256 rows": (P(0, 0, 0, adds=True), Tiling(80, 1, 2, rows=256)),
    "gated, with time stamps": (P(0, 0, 0, bias=True, gated=True), Tiling(128, 2)),
    "by columns, to float32": (P(0, 0, 0, "float16", "float32", a_deep=False, b_deep=False), Tiling(128, 1, 2)),
    "pushed, stored late": (P(0, 0, 0, adds=True, pushes=True, turns=3), Tiling(256, 2, 4)),
    "pushed, clusters of the depth": (P(0, 0, 0, adds=True, pushes=True, turns=3), Tiling(96, 1, split=4)),
    "pushed, 256 rows": (P(0, 0, 0, bias=True, adds=True, pushes=True, turns=2), Tiling(160, 1, 2, rows=256)),
    "copies, stored late": (P(0, 0, 0, copies=True, turns=3), Tiling(256, 2, 4)),
    "copies, clusters of the depth": (P(0, 0, 0, b_deep=False, copies=True, turns=2), Tiling(128, 1, split=2)),
}
"""Of any size. With several turns it is beside what moves, else alone on its GPU."""

COPIES = {
    "copies, clusters of rows": (P(0, 0, 0, copies=True, turns=3), Tiling(80, 2, 4)),
    "copies, one block": (P(0, 0, 0, copies=True, turns=4), Tiling(64, 1, 4)),
    "copies, clusters, by columns": (
        P(0, 0, 0, "float16", "float16", b_deep=False, copies=True, turns=2),
        Tiling(128, 2, 4),
    ),
    "copies, four share the depth": (P(0, 0, 0, copies=True, turns=2), Tiling(96, 1, split=4)),
    "copies, 256 rows": (P(0, 0, 0, copies=True, turns=2), Tiling(160, 1, 2, rows=256)),
    "copies, float8": (P(0, 0, 0, FLOAT8, copies=True, turns=2), Tiling(96, 2, 2)),
    "copies, to float32": (P(0, 0, 0, "float16", "float32", copies=True, turns=2), Tiling(192, 1)),
    "copies, with time stamps": (P(0, 0, 0, bias=True, gated=True, copies=True, turns=2), Tiling(128, 2, 2)),
}
"""More ways to keep the rows."""

ROWS, FACTOR, MADE, ADDED, RESIDUAL, KEPT, PUSHED = 0, 2, 3, 5, 6, 7, 8
"""Maps of a launch, two of rows and of results."""

PLACES = 3
"""Peers that are pushed to."""

WORKERS = range(1, 6)
FACTORS = 2
BIASES = 3
IN_VAIN = 2
"""A word, where a peer did not come in time."""
SCALES = (4.0, 0.125)


@dataclass(frozen=True)
class Source:
    """Rows, one of two tensors' matrices, that are multiplied by one of the factors. `there`: a word; -1: none."""

    rows: tuple[int, int]
    factor: int
    there: int


@dataclass(frozen=True)
class Push:
    """To matrix `at` of so many places from `first` on, when a word is there."""

    first: int = 0
    count: int = 0
    at: int = 0
    there: int = -1


@dataclass(frozen=True)
class Turn:
    """A task: a sum of products, to one of two tensors' matrices or to none here, with what is added."""

    sources: tuple[Source, ...]
    result: tuple[int, int] | None
    first: int
    count: int
    sums_there: int
    stored: int
    copied: int
    push: Push
    bias: int
    residual: bool

    def row(self, activation: str) -> TaskRow:
        """As the kernel has it."""
        sources = tuple(
            SourceRow(Place(ROWS + one.rows[0], one.rows[1]), Place(FACTOR, one.factor), waits(one.there))
            for one in self.sources
        )
        added = [Place(ADDED, at) for at in range(self.first, self.first + self.count)]
        added += [Place(RESIDUAL, self.push.at)] if self.residual else []
        return TaskRow(
            sources,
            None if self.result is None else Place(MADE + self.result[0], self.result[1]),
            tuple(added),
            waits(self.sums_there),
            self.stored if self.stored >= 0 else None,
            tuple(
                Place(PUSHED + place, self.push.at)
                for place in range(self.push.first, self.push.first + self.push.count)
            ),
            self.push.there if self.push.there >= 0 else None,
            Place(KEPT, self.copied) if self.copied >= 0 else None,
            (0, self.bias) if self.bias >= 0 else None,
            activation or None,
        )


def waits(word: int) -> tuple[WordWait, ...]:
    return (WordWait(word),) if word >= 0 else ()


class Case:
    """A product of a size and with turns that are drawn. What words tell of comes while the kernel runs."""

    def __init__(self, form: str, seed: int) -> None:
        self.dice = random.Random(f"{form} {seed}")
        shape, self.tiling = (FORMS | COPIES)[form]
        high, wide = self.tiling.rows * self.tiling.cluster, self.tiling.columns // (2 if shape.gated else 1)
        self.product = replace(
            shape,
            rows=high * self.dice.randrange(2) + 8 * self.dice.randrange(1, high // 8),
            columns=wide * self.dice.randrange(3) + 8 * self.dice.randrange(1, wide // 8),
            depth=shape.sources * 16 * self.dice.randrange(32 // shape.sources, 48 // shape.sources),
        )
        self.is_alone = shape.turns == 1
        self.words = shape.turns  # the first ones count what is stored
        self.turns = tuple(self._turn(number) for number in range(shape.turns))

    def _turn(self, number: int) -> Turn:
        """Rows that come are of one tensor, those that are there of another."""
        sources = tuple(self._source(number * self.product.sources + at) for at in range(self.product.sources))
        count = self.dice.randrange(3) if self.product.adds else 0
        copied = self.dice.choice((-1, self.product.turns - 1 - number)) if self.product.copies else -1
        push = self._push(number) if self.product.pushes else Push(at=number)
        result = None if push.count and self.dice.randrange(2) else (self.dice.randrange(2), number)
        bias = self.dice.randrange(-1, BIASES) if self.product.bias else -1
        residual = self.product.adds and self.dice.randrange(2) > 0
        stored = -1 if self.is_alone else number
        return Turn(sources, result, 2 * number, count, self._word(), stored, copied, push, bias, residual)

    def _push(self, turn: int) -> Push:
        """To as many places as are drawn, in each to a matrix of the turn's own."""
        first = self.dice.randrange(PLACES)
        count = self.dice.randrange(PLACES - first + 1)
        return Push(first, count, turn, self._word()) if count else Push(at=turn)

    def _source(self, matrix: int) -> Source:
        there = self._word()
        return Source((int(there >= 0), matrix), self.dice.randrange(FACTORS), there)

    def _word(self) -> int:
        """Words come in the order in which they are waited for."""
        if self.is_alone or self.dice.randrange(2):
            return -1
        self.words += 1
        return self.words - 1

    def run(self, hopper: FakeHopper) -> None:
        """Two calls of one kernel. Workers are so many that tiles are cut, where they can be; of them as many are there
        at once as is drawn.
        """
        kernel = self.kernel()
        for _ in range(2):
            hopper.seed, hopper.resident = self.dice.randrange(1 << 60), self.dice.choice((1, 2, 8))
            Tensors(self).call(hopper, kernel)

    def kernel(self) -> Matmul:
        products = [self.product] * self.product.turns
        cutting = [workers for workers in WORKERS if any(cut_tiles(products, self.tiling, workers))]
        sms = self.tiling.blocks * self.dice.choice(cutting or WORKERS)
        rows = [turn.row(self.product.activation) for turn in self.turns]
        return Matmul(products, self.tiling, sms, 0, rows, is_alone=self.is_alone, is_stamped=self.product.gated)


class Tensors:
    """Of one call: whole numbers, whose sums are exact."""

    def __init__(self, case: Case) -> None:
        product, self.case = case.product, case
        self._numbers = torch.Generator().manual_seed(case.dice.randrange(1 << 30))
        dtype, self.result = getattr(torch, product.dtype), getattr(torch, product.result)
        depth, columns = product.depth // product.sources, product.columns * (2 if product.gated else 1)
        self.x = self._whole(product.turns * product.sources, product.rows, depth, dtype, deep=product.a_deep)
        self.w = self._whole(FACTORS, columns, depth, dtype, deep=product.b_deep)
        self.sums = self._whole(2 * product.turns, product.rows, product.columns, self.result)
        self.bias = self._whole(1, BIASES, columns, self.result)[0]
        self.residual = self._whole(product.turns, product.rows, product.columns, self.result)
        self.scales = [torch.tensor(one) for one in SCALES]
        self.words = torch.zeros(case.words, dtype=torch.int64)
        self.rows, self.added = [nothing(self.x), nothing(self.x)], nothing(self.sums)
        self.made = [nothing(self.sums[: product.turns]) for _ in range(2)]
        self.kept = nothing(self.x)
        self.sent = nothing(self.made[0])  # what goes on as soon as a turn's tiles are counted
        self.pushed = [nothing(self.made[0]) for _ in range(PLACES)]
        self.found = nothing(self.made[0])  # what was where a turn is pushed to when peers were ready

    def _whole(self, count: int, rows: int, columns: int, dtype: torch.dtype, *, deep: bool = True) -> torch.Tensor:
        """Matrices, by rows where they are `deep`, else by columns."""
        drawn = torch.randint(-2, 3, (count, rows, columns), generator=self._numbers).to(dtype)
        return drawn if deep else drawn.transpose(1, 2).contiguous().transpose(1, 2)

    def launch(self, hopper: FakeHopper, kernel: Matmul, *, in_vain: bool = False) -> torch.Tensor:
        """The stamps, where it writes any. `in_vain`: peers that are pushed to do not come in time."""
        there = [turn.push.there for turn in self.case.turns if in_vain and turn.push.there >= 0]
        self.words[there] = IN_VAIN
        moves = [one for one in (*self._coming(), *self._going()) if one.raised not in map(self._word, there)]
        for one in moves:
            if not one.word and not one.raised:  # no word tells of it: it is there
                one.dest.copy_(one.source)
        hopper.beside = [one for one in moves if one.word or one.raised]
        stamps = torch.zeros(len(kernel.intervals), 4, dtype=torch.int64)
        biases = (self.bias.data_ptr(),) if any(turn.bias >= 0 for turn in self.case.turns) else ()
        words = 0 if self.case.is_alone else self.words.data_ptr()
        scales = tuple(one.data_ptr() for one in self.scales)
        of = {Side.ROWS: self.rows, Side.FACTOR: [self.w], Side.RESULT: [*self.made, self.added, self.residual]}
        of |= {Side.COPY: [self.kept]}
        maps = [(Matrices.of(one), side) for side, some in of.items() for one in some]
        maps += [(Matrices.of(one), Side.RESULT) for one in self.pushed]
        kernel(kernel.prepare(maps[: kernel.maps], Addresses(biases, words, stamps.data_ptr(), scales)))
        return stamps

    def call(self, hopper: FakeHopper, kernel: Matmul) -> None:
        product, turns, stamps = self.case.product, self.case.turns, self.launch(hopper, kernel)
        kept_now = nothing(self.x)
        for number, turn in enumerate(turns):
            for one in self.made_of(turn):
                torch.testing.assert_close(one, self.wanted(turn), **self._tolerance())
            if turn.copied >= 0:
                kept_now[turn.copied] = self.x[turn.sources[0].rows[1]]
            if turn.stored >= 0:
                assert torch.equal(self.sent[number], next(self.made_of(turn)))
        places = sum(len([*self.made_of(turn)]) for turn in turns)
        written = [one for one in (*self.made, *self.pushed) for one in one if not one.isnan().all()]
        assert len(written) == places, "nothing is stored anywhere else"
        assert self.found.isnan().all(), "what is pushed waits until peers are ready"
        if product.copies:
            assert torch.equal(self.kept.view(torch.uint8), kept_now.view(torch.uint8)), "rows that are kept"
        begin, ready, end, _ = stamps.t()
        assert bool(((begin <= ready) & (ready <= end)).all())
        assert int((end > begin).sum()) >= (stores(product, self.case.tiling) // 2 if product.gated else 0)

    def _coming(self) -> Iterator[Move]:
        """In the order of words."""
        for turn in self.case.turns:
            for one in turn.sources:
                tensor, matrix = one.rows
                yield Move(self.x[matrix], self.rows[tensor][matrix], raised=self._word(one.there))
            span = slice(turn.first, turn.first + turn.count)
            yield Move(self.sums[span], self.added[span], raised=self._word(turn.sums_there))
            if turn.push.there >= 0:
                before = self.pushed[turn.push.first][turn.push.at]
                yield Move(before, self.found[turn.push.at], raised=self._word(turn.push.there))

    def made_of(self, turn: Turn) -> Iterator[torch.Tensor]:
        """Wherever a turn's result goes: here, and where it is pushed to."""
        if turn.result is not None:
            tensor, matrix = turn.result
            yield self.made[tensor][matrix]
        for place in range(turn.push.first, turn.push.first + turn.push.count):
            yield self.pushed[place][turn.push.at]

    def _going(self) -> Iterator[Move]:
        """As soon as all tiles of a turn are counted."""
        least = stores(self.case.product, self.case.tiling)
        for number, turn in enumerate(self.case.turns):
            if turn.stored >= 0:
                yield Move([*self.made_of(turn)][-1], self.sent[number], self._word(turn.stored), least)

    def _word(self, number: int) -> int:
        return self.words.data_ptr() + 8 * number if number >= 0 else 0

    def wanted(self, turn: Turn) -> torch.Tensor:
        product = self.case.product
        products = [self.x[one.rows[1]].double() @ self.w[one.factor].double().t() for one in turn.sources]
        total = torch.stack(products).sum(0) * (SCALES[0] * SCALES[1] if product.dtype == FLOAT8 else 1)
        total = total + (self.bias[turn.bias].double() if turn.bias >= 0 else 0)
        if product.gated:
            gate, up = total.chunk(2, dim=1)
            total = torch.nn.functional.silu(gate) * up
        if product.gelu:
            total = torch.nn.functional.gelu(total)
        total = total + self.sums[turn.first : turn.first + turn.count].double().sum(0)
        return (total + (self.residual[turn.push.at].double() if turn.residual else 0)).to(self.result)

    def _tolerance(self) -> dict[str, float]:
        """To the bit, but where an activation is computed: to its last bit."""
        is_exact = not (self.case.product.gated or self.case.product.gelu)
        return {"rtol": 0, "atol": 0} if is_exact else {"rtol": 2**-7, "atol": 2**-7}


def nothing(like: torch.Tensor) -> torch.Tensor:
    """Of the same shape and strides, no number."""
    return torch.full_like(like, torch.nan)


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHopper]:
    """One thread computes what is wanted: others would wait for it where the tests beside this one work."""
    made, threads = FakeHopper(tmp_path_factory.mktemp("hopper"), include_dir()), torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        made.install(patch)
        yield made
    torch.set_num_threads(threads)


@pytest.mark.parametrize("form", FORMS)
def test_products_are_those_of_float64(hopper: FakeHopper, form: str, turns: Callable[..., int]) -> None:
    """Whatever comes when, in whatever order warps go on, and however few clusters there are at once."""
    run_cases(hopper, form, turns(24))


@pytest.mark.parametrize("form", [form for form, (product, _) in FORMS.items() if product.pushes])
def test_nothing_is_pushed_to_peers_that_were_waited_for_in_vain(hopper: FakeHopper, form: str) -> None:
    """They may be reading there what came before; what a rank has for itself is made, and counted, all the same."""
    cases = (Case(form, seed) for seed in itertools.count())
    case = next(case for case in cases if any(turn.push.there >= 0 for turn in case.turns))
    tensors = Tensors(case)
    tensors.launch(hopper, case.kernel(), in_vain=True)
    for turn in case.turns:
        own, pushed = int(turn.result is not None), [*tensors.made_of(turn)]
        assert all(torch.equal(one, tensors.wanted(turn)) for one in pushed[:own])
        assert turn.push.there < 0 or all(one.isnan().all() for one in pushed[own:])


@pytest.mark.sweep
@pytest.mark.parametrize("form", COPIES)
def test_rows_are_copied_once(hopper: FakeHopper, form: str, turns: Callable[..., int]) -> None:
    """The machine stores no box twice, and rows of no turn stay as they were."""
    run_cases(hopper, form, turns(24))


def run_cases(hopper: FakeHopper, form: str, count: int) -> None:
    for seed in range(count):
        Case(form, seed).run(hopper)


FAULTS = {
    "rows of a source are not awaited": (
        "source = this->source(++number);\n        await(source.wait, source.waits);",
        "source = this->source(++number);",
        "sums of products",
        "not equal",
    ),
    "a stage is given back while it is multiplied": (
        "release(before);\n    }\n    return stage;",
        "release(stage);\n    }\n    return stage;",
        "sums of products",
        "nothing goes on|not equal",
    ),
    "what is stored is not fenced": (
        "put(from, word);\n    fence_proxies_of_shared();",
        "put(from, word);",
        "256 rows",
        "a write is not fenced",
    ),
    "sums of other blocks are not awaited": (
        "await_phase_of_cluster(this->shared.gathered(number), parity);",
        "",
        "clusters of the depth",
        "not equal|is not fenced",
    ),
    "a stage is given back while it is copied": (
        "if constexpr (Shape::kCopies) await_copies<1>();",
        "",
        "copies, clusters of rows",
        "rows that are kept",
    ),
    "rows are copied of every tile": (
        "thread == copier() && piece.column == 0",
        "thread == copier()",
        "copies, clusters of rows",
        "a box is stored twice",
    ),
    "who copies tells another block that a stage is empty": (
        "return Shape::kCluster == 1 ? 0 : block_of_cluster();",
        "return 0;",
        "copies, clusters of rows",
        "rows that are kept",
    ),
    "a turn is told of before it is stored": (
        "while (unstored > 0) store_next();\n    const",
        "const",
        "stored late",
        "not equal",
    ),
    "peers are pushed to before they are ready": (
        "await_word(this->word(this->pushes_when), kThere, this->args.timeout_ns);",
        "kThere;",
        "pushed, 256 rows",
        "waits until peers are ready",
    ),
    "a block ends before the others of its cluster": (
        "if (Shape::kBlocks > 1) cluster_barrier<Shape::kBlocks>();  // what",
        "// what",
        "clusters of rows",
        "has ended",
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_kernel_is_found(hopper: FakeHopper, fault: str, tmp_path: Path) -> None:
    """The GPU that is made up does as bad as a GPU may."""
    right, wrong, form, found = FAULTS[fault]
    shutil.copytree(include_dir(), tmp_path / "include")
    texts = {path: path.read_text("utf-8") for path in (tmp_path / "include" / "commdsl").glob("matmul*.cuh")}
    (header,) = (path for path, text in texts.items() if right in text)
    assert texts[header].count(right) == 1
    header.write_text(texts[header].replace(right, wrong), "utf-8")
    with hopper.of(tmp_path / "include"), pytest.raises(AssertionError, match=found):
        run_cases(hopper, form, 8)
