"""Every wait of the kernel of products is printed from its Plan: rows, their tables, and the headers that read them."""

from __future__ import annotations

import ast
import re
import shutil
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from task_programs import drawn  # noqa: E402 - after the check for torch
from test_product_order import EARLIER, squares  # noqa: E402
from test_products import with_task, without_waits  # noqa: E402
from test_task_programs import CHAIN, OVERLAP  # noqa: E402

from commdsl import compiler  # noqa: E402
from commdsl.build.headers import include_dir  # noqa: E402
from commdsl.build.task_table import Sizes, TaskRow, WordWait, packed_tasks  # noqa: E402
from commdsl.machine.resources import data_dir  # noqa: E402
from commdsl.program.plan import Plan  # noqa: E402
from commdsl.program.pushed import pushing  # noqa: E402
from commdsl.program.tasks import Counter, Over, Ready, Stored  # noqa: E402
from commdsl.program.visited import kept_by, launches, tasks  # noqa: E402
from commdsl.runtime import fused  # noqa: E402

WRITTEN = (EARLIER, CHAIN, OVERLAP / "mlp.comm", OVERLAP / "summa.comm", OVERLAP / "allgather_matmul.comm")
PUSHED = (OVERLAP / "matmul_alltoall.comm", OVERLAP / "matmul_reducescatter.comm")
SEEDS = 24


def plans(folder: Path) -> Iterator[Plan]:
    """Yield Plans of shipped and of drawn schedules, those whose tasks push among them."""
    for path in (*WRITTEN, *PUSHED):
        found = compiler.check(path, ranks=3).visits
        assert found is not None
        yield from dict.fromkeys((found, pushing(found)))
    for seed in range(SEEDS):
        found = compiler.check(compiler.read_text(drawn(seed).text, "drawn.comm", folder), ranks=3).visits
        assert found is not None
        yield from dict.fromkeys((found, pushing(found)))


@pytest.fixture(autouse=True)
def _without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are made, and no kernel is built."""
    monkeypatch.setattr(fused.Fused, "_kernel", lambda *_: None)


def rows_of(plan: Plan) -> tuple[TaskRow, ...]:
    """Return the rows that the runtime makes of the tasks of a Plan."""
    shape = squares(plan)
    held = {kept: torch.empty(shape(kept), dtype=torch.bfloat16, device="meta") for kept in kept_by(plan)}
    places = {kept.name: (kept.name, 0) for kept in held}
    return fused.Fused(plan, (), places, 0, held.__getitem__, torch.device("cpu"))._rows


def counter_of(word: int, plan: Plan) -> Counter:
    """Return the counter of a word: ends of launches come first, then tasks, then openings."""
    every = [*map(Over, range(len(launches(plan)))), *map(Stored, range(len(tasks(plan))))]
    return [*every, *map(Ready, range(len(launches(plan))))][word]


def counters_of(waits: tuple[WordWait, ...], plan: Plan) -> tuple[Counter, ...]:
    """Return the counters of the words of a row. The level is that of the counter: all tiles of a task, or 1."""
    found = tuple(counter_of(one.word, plan) for one in waits)
    assert [one.stored_by for one in waits] == [one.task if isinstance(one, Stored) else None for one in found]
    return found


# --- rows -------------------------------------------------------------------------------------------------------------


def test_a_row_waits_for_the_counters_of_its_task(tmp_path: Path) -> None:
    """One to one, product by product; and what is waited for is counted."""
    found = 0
    for plan in plans(tmp_path):
        awaited = {one for task in tasks(plan) for one in task.counters}
        awaited |= {Stored(task) for launch in launches(plan) for task in range(launch.after)}
        for number, (task, row) in enumerate(zip(tasks(plan), rows_of(plan), strict=True)):
            read = [counters_of(source.waits, plan) for source in row.sources]
            assert read == [product.waits for product in task.products]
            assert counters_of(row.waits, plan) == task.waits
            ready = () if row.ready is None else (counter_of(row.ready, plan),)
            assert ready == (() if task.push is None else (Ready(task.push),))
            assert (*(one for waits in read for one in waits), *task.waits, *ready) == task.counters
            stored = () if row.stored is None else (counter_of(row.stored, plan),)
            assert stored == ((Stored(number),) if Stored(number) in awaited else ())
            found += len(task.counters)
    assert found > 100


def changes(before: tuple[TaskRow, ...], after: tuple[TaskRow, ...]) -> list[int]:
    """Return the numbers of the rows that differ in a wait. Whether a task counts its tiles follows from the waits."""
    pairs = zip(before, after, strict=True)
    return [at for at, (one, other) in enumerate(pairs) if replace(one, stored=None) != replace(other, stored=None)]


def test_a_counter_that_is_dropped_or_added_changes_its_row_alone(tmp_path: Path) -> None:
    dropped = added = 0
    for plan in plans(tmp_path):
        rows = rows_of(plan)
        for number, task in enumerate(tasks(plan)):
            for words, mutant in without_waits(task):
                changed = rows_of(with_task(plan, task, mutant))
                assert changes(rows, changed) == [number], words
                assert waits_in(changed[number]) == waits_in(rows[number]) - 1, words
                dropped += 1
            for counter in (*map(Stored, range(number)), *map(Over, range(len(launches(plan))))):
                if counter not in task.waits:
                    changed = rows_of(with_task(plan, task, replace(task, waits=(*task.waits, counter))))
                    assert changes(rows, changed) == [number]
                    assert counters_of(changed[number].waits, plan) == (*task.waits, counter)
                    added += 1
    assert dropped > 50
    assert added > 50


def waits_in(row: TaskRow) -> int:
    return len(row.waits) + sum(len(source.waits) for source in row.sources)


def test_the_tables_have_the_waits_of_the_rows(tmp_path: Path) -> None:
    """Decoded as the structures of matmul_worker.cuh: words and levels of each source, and of each task."""
    for plan in plans(tmp_path):
        rows = rows_of(plan)
        sizes = [Sizes(64, 1, 100 + number) for number in range(len(rows))]
        tables = packed_tasks(rows, sizes)
        waits = [*struct.iter_unpack("<2I", tables.waits)]

        def due(of: tuple[WordWait, ...], sizes: list[Sizes] = sizes) -> list[tuple[int, int]]:
            return [(one.word, 1 if one.stored_by is None else sizes[one.stored_by].tiles) for one in of]

        sources = [*struct.iter_unpack("<4H2H4x", tables.sources)]
        assert len(sources) == sum(len(row.sources) for row in rows)
        for row, (_, source, *others) in zip(rows, struct.iter_unpack("<I2H4H6H2h3H10x", tables.tasks), strict=True):
            first, count = others[7:9]
            assert waits[first : first + count] == due(row.waits)
            assert others[11:13] == [-1 if one is None else one for one in (row.stored, row.ready)]
            for at, one in enumerate(row.sources):
                first, count = sources[source + at][4:]
                assert waits[first : first + count] == due(one.waits)


def test_waits_are_made_of_counters_alone() -> None:
    """The package makes a wait for a word at one place, of counters; and rows at one place, of tasks."""
    made: dict[str, list[str]] = {"WordWait": [], "SourceRow": [], "TaskRow": []}
    for path in sorted(Path(compiler.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            calls = (one.func for one in ast.walk(node) if isinstance(one, ast.Call))
            for name in {one.id for one in calls if isinstance(one, ast.Name) and one.id in made}:
                made[name].append(f"{path.stem}.{node.name}")
    assert made == {
        "WordWait": ["fused._waits"],
        "SourceRow": ["matmul.alone", "fused._row"],  # `alone`: one product by itself, which waits for nothing
        "TaskRow": ["matmul.alone", "fused._row"],
    }


# --- launches beside --------------------------------------------------------------------------------------------------


class Kernel:
    """Records the waits that go on the stream beside the tasks."""

    awaiting = "awaiting"

    def waiting(self, word: int, least: int) -> tuple[int, int]:
        return word, least

    def stores(self, task: int) -> int:
        return 100 + task


def test_a_launch_waits_for_the_tasks_before_it() -> None:
    """Each task of those that the Plan has before a launch once, by its word and all of its tiles."""
    launched: list[Any] = []
    streams: Any = type("Streams", (), {"launch": lambda _, kernel, launch, beside: launched.append((launch, beside))})
    words = fused._Words(streams(), Kernel(), 8000, fused.Numbers(5, {}))  # type: ignore[arg-type]
    words.wait(("visit", 1), beside=True)
    words.wait(("visit", 0), beside=True)
    words.wait(("visit", 3), beside=True)
    words.wait(("launch", 4), beside=False)  # the tasks themselves wait for launches
    assert launched == [((8000 + 8 * (5 + task), 100 + task), True) for task in range(4)]


# --- headers ----------------------------------------------------------------------------------------------------------

WORDS = re.compile(
    r"\bawait\(|\bawait_word\b|\bload_acquire\b|\bload_relaxed\b|\bacquired\b|\bclaim\(|\batomic|\basm\b|\bvolatile\b|"
    r"\bwhile\b|\bgoto\b|\bword\(|\bwords\b|\bargs\.waits\b|\bflags?\b|\bfetch|\bpushes_when\b"
)
"""Reads of words, and loops that go on until something holds."""

WAITS: dict[str, dict[str, list[str]]] = {
    "matmul_load.cuh": {
        "load(const Piece& piece, bool is_last)": [
            "MatmulSource source = this->source(number)",
            "await(source.wait, source.waits)",
            "source = this->source(++number)",
            "await(source.wait, source.waits)",
            "load(piece, source, depth * Shape::kDepth, task.columns)",
            "if (Shape::kAdds && piece.parts >= 0 && task.count > 0) load_sums(piece, task)",
        ],
        "await(u32 first, u32 count)": [
            "if (count == 0 || (first < 32 && (known >> first & 1) != 0)) return",
            "const MatmulWait wait = reinterpret_cast<const MatmulWait*>(this->args.waits)[at]",
            "await_word(this->word(wait.word), wait.level, this->args.timeout_ns)",
            "if (first < 32) known |= 1u << first",
        ],
        "load_sums(const Piece& piece, const MatmulTask& task)": [
            "await(task.wait, task.waits)",
            "const u32 stored = Shape::kMixed && this->is_gated(piece.turn) ? Shape::kHalf : Shape::kStored",
            "for (u32 column = 0; column < stored; column += Shape::kOutElements)",
            "load_sum(this->args.maps[place.map], this->stored_column(piece) + Shape::panel_column(column), "
            "this->row(piece) + high * 64, place.at)",
        ],
    },
    "matmul_store.cuh": {
        "tell(u32 number)": [
            "const i32 stored = this->task(number).stored",
            "if (thread == 0 && tiles > 0 && stored >= 0)",
            "add_release(this->word(stored), tiles)",
        ],
        "store(const MatmulTask& task, u32 row, u32 column, Stamps& stamps)": [
            "if constexpr (Shape::kPushes) this->push = task.push, this->pushes = task.pushes, "
            "this->pushes_when = task.ready",
        ],
        "store_to_peers(u32 column, u32 row, u32 from)": [
            "if (this->pushes_when >= 0 && this->pushes_when != this->ready && this->ready != this->kNever)",
            "const u64 found = await_word(this->word(this->pushes_when), kThere, this->args.timeout_ns)",
            "this->ready = found == kInVain ? this->kNever : this->pushes_when",
        ],
    },
    "matmul_sums.cuh": {  # of a tile that is cut: the flag of the block that has a later part of the same tile
        "leave(i32 slot)": ["if (thread == 0) store_release_own(flag(slot), 1)"],
        "add(i32 slot)": ["await_word(flag(slot), 1, this->args.timeout_ns)", "store_relaxed(flag(slot), 0)"],
    },
    "matmul_worker.cuh": {
        "await_word(const u64* word, u64 least, u64 timeout_ns)": ["while ((found = load_acquire(word)) < least)"],
    },
}
"""By header and function, in order: all that waits for a word, and where the word comes from."""

INCLUDED = {
    *(f"commdsl/matmul_{name}.cuh" for name in ("load", "store", "sums", "worker")),
    *(f"commdsl/{name}.cuh" for name in ("types", "device", "elements", "vectors", "async", "tensor", "warpgroup")),
    "commdsl/stamps.cuh",
}
"""Without the headers in which lanes wait for flags."""


def functions(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the functions of a header, each with its statements in order, then what stands outside of functions."""
    code, outside, since = re.sub(r"//[^\n]*", "", text), "", 0
    for head in re.finditer(r"COMMDSL_FN\s+[^;{}]*?(\w+\((?:[^(){}]|\([^()]*\))*\))[^;{}()]*\{", code):
        depth, at = 1, head.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(code[at], 0)
            at += 1
        outside, since = f"{outside}{code[since : head.start()]};", at
        yield " ".join(head[1].split()), [*statements(code[head.end() : at - 1])]
    yield "", [*statements(re.sub(r"#(?:include|pragma|ifdef|else|endif).*", "", outside + code[since:]))]


def statements(body: str) -> Iterator[str]:
    """Yield what stands between semicolons and braces, the head of a loop as one."""
    depth, since = 0, 0
    for at, letter in enumerate(f"{body};"):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0 and letter in ";{}":
            if found := " ".join(body[since:at].split()):
                yield found
            since = at + 1


def faults(folder: Path) -> Iterator[str]:
    """Yield each place of the headers of products that waits otherwise than by the tables of its launch."""
    for path in sorted(folder.glob("matmul*.cuh")):
        text = path.read_text("utf-8")
        yield from (f"{path.name} includes {one}" for one in INCLUDES.findall(text) if one not in INCLUDED)
        found, due = dict(functions(text)), WAITS.get(path.name, {})
        yield from (f"{path.name} has no {head}" for head in due.keys() - found.keys())
        for head, body in functions(text):
            listed = due.get(head, [])
            there = [one for one in body if one in listed or (WORDS.search(one) and one not in ALLOWED)]
            if there != listed:
                yield f"{path.name}, {head}: {there}"


INCLUDES = re.compile(r'#include ["<](.*)[">]')

ALLOWED = {
    # the next piece of the table
    "number = this->is_awaited() ? static_cast<u32>(atomicAdd(claims(), 1ull)) : number + this->workers()",
    "while (unstored > 0) store_next()",  # its own registers
    "if (!args.words) allow_launch_behind()",
    "u64 tasks, sources, places, waits, words",
    "u64 partials, flags",
    "i16 pushes_when",
    "return args.words != 0",
    "return reinterpret_cast<u64*>(args.words) + number",
    "return reinterpret_cast<u64*>(this->args.flags) + left(slot)",
}


def test_headers_wait_by_the_tables_alone() -> None:
    """A word and its level come from the table of waits, the ready word of a task, or a part of the same tile."""
    assert not [*faults(include_dir() / "commdsl")]


def test_the_text_waits_where_a_launch_does() -> None:
    """The template adds one wait, a kernel by itself that the stream beside the tasks runs."""
    text = (data_dir("templates") / "matmul.cu.j2").read_text("utf-8")
    assert [line for line in text.splitlines() if WORDS.search(line.partition("//")[0])] == [
        'extern "C" __global__ void {{ entry }}_await(const u64* word, u64 least, u64 timeout_ns) '
        "{ commdsl::await_word(word, least, timeout_ns); }"
    ]


def mutants(text: str) -> Iterator[tuple[str, str]]:
    """Yield, with the place, a header with a wait gone, with another word or level, with one more in each function."""
    for found in re.finditer(r"(const u64 found = )?(?<!\w)await(_word)?\((?!u32|const)[^;]*;", text):
        gone, again = "const u64 found = 1;" if found[1] else ";", found[0].removeprefix("const u64 found = ")
        yield f"without {found[0]}", text[: found.start()] + gone + text[found.end() :]
        yield f"twice {found[0]}", text[: found.end()] + again + text[found.end() :]
    for right, wrong in (
        ("wait.level", "wait.level - 1"),
        ("wait.word", "wait.word + 1"),
        ("source.waits)", "source.waits - 1)"),
        ("task.waits)", "task.waits - 1)"),
        ("this->pushes_when = task.ready", "this->pushes_when = -1"),
        ("this->task(number).stored", "-1"),
        ("flag(slot), 1,", "flag(slot), 0,"),
        ("< least", "<= least"),
        ("known |= 1u << first", "known |= ~0u"),
    ):
        for found in re.finditer(re.escape(right), text):
            yield f"{wrong}, not {right}", text[: found.start()] + wrong + text[found.end() :]
    for head in re.finditer(r"COMMDSL_FN (?:static )?(?:void|u32) \w+\([^{;]*\{", text):
        for more in ("await_word(this->word(0), 1, this->args.timeout_ns);", "while (load_relaxed(claims()) == 0) {}"):
            yield f"{head[0]} {more}", f"{text[: head.end()]} {more}{text[head.end() :]}"


def test_a_wait_that_comes_of_no_plan_is_found(tmp_path: Path) -> None:
    """Also one that is left out, or waits for less."""
    folder, count = tmp_path / "commdsl", 0
    shutil.copytree(include_dir() / "commdsl", folder)
    for path in sorted(folder.glob("matmul*.cuh")):
        text = path.read_text("utf-8")
        for words, mutant in mutants(text):
            path.write_text(mutant, "utf-8")
            assert [*faults(folder)], (path.name, words)
            count += 1
        path.write_text(text, "utf-8")
    assert not [*faults(folder)]
    assert count > 60


@pytest.mark.parametrize("header", ["waiting", "flags", "calls"])
def test_headers_in_which_lanes_wait_are_not_included(header: str, tmp_path: Path) -> None:
    folder = tmp_path / "commdsl"
    shutil.copytree(include_dir() / "commdsl", folder)
    path = folder / "matmul_worker.cuh"
    path.write_text(f'#include "commdsl/{header}.cuh"\n{path.read_text("utf-8")}', "utf-8")
    assert [*faults(folder)] == [f"matmul_worker.cuh includes commdsl/{header}.cuh"]


def test_a_task_has_a_counter_of_each_kind(tmp_path: Path) -> None:
    """What is held above is about all three."""
    found = {type(one) for plan in plans(tmp_path) for task in tasks(plan) for one in task.counters}
    assert found == {Over, Stored, Ready}
