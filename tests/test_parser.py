"""The parser gives what was written with its place, and every text either parses or has one syntax fault."""

from __future__ import annotations

import gc
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lark import Token, Tree, UnexpectedInput

from commdsl.language import parser, syntax
from commdsl.language.diagnostics import CommError, Diagnostic
from commdsl.language.kinds import LinkScope, MoveKind
from commdsl.language.parser import build_syntax, tables
from commdsl.language.source import Source, Span

ROOT = Path(__file__).parent.parent
SHIPPED = sorted((ROOT / "schedules").rglob("*.comm"))
EVERYTHING = (Path(__file__).parent / "everything.comm").read_text(encoding="utf-8")


def parse(text: str) -> syntax.File:
    return parser.parse(Source("test.comm", text))


def fault(text: str) -> Diagnostic:
    with pytest.raises(CommError) as caught:
        parse(text)
    (diagnostic,) = caught.value.diagnostics
    return diagnostic


def faults(text: str) -> tuple[Diagnostic, ...]:
    try:
        parse(text)
    except CommError as error:
        return error.diagnostics
    return ()


def expression(text: str) -> syntax.Expr:
    schedule = parse(f"schedule s for P ranks {{ let a = {text} }}").items[0]
    assert isinstance(schedule, syntax.ScheduleDecl)
    let = schedule.body[0]
    assert isinstance(let, syntax.Let)
    return let.value


def shape(node: syntax.Expr) -> str:
    """An expression with every operation in parentheses."""
    match node:
        case syntax.Int(value):
            return str(value)
        case syntax.Name(text):
            return text
        case syntax.Unary(operator, operand):
            return f"({operator} {shape(operand)})"
        case syntax.Binary(operator, left, right):
            return f"({shape(left)} {operator} {shape(right)})"
        case syntax.Call(function, arguments):
            return f"{function.text}({', '.join(map(shape, arguments))})"
        case syntax.Method(owner, method, arguments):
            return f"{shape(owner)}.{method}({', '.join(map(shape, arguments))})"
        case syntax.Table(entries):
            return f"[{', '.join(map(shape, entries))}]"
        case syntax.Index(of, index):
            return f"{shape(of)}[{shape(index)}]"
        case syntax.Choice(then, condition, otherwise):
            return f"({shape(then)} if {shape(condition)} else {shape(otherwise)})"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped(path: Path) -> None:
    """Every shipped file is of the language."""
    assert parse(path.read_text(encoding="utf-8")).items


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a or b and not c == d", "(a or (b and (not (c == d))))"),
        ("a | b ^ c & d << e + f * g", "(a | (b ^ (c & (d << (e + (f * g))))))"),
        ("a - b - c", "((a - b) - c)"),
        ("a ** b ** c", "(a ** (b ** c))"),
        ("-a ** -b", "(- (a ** (- b)))"),
        ("a - -b", "(a - (- b))"),
        ("(a + b) * c % d / e", "((((a + b) * c) % d) / e)"),
        ("a < b + 1 and b >= c", "((a < (b + 1)) and (b >= c))"),
        ("c.next(r) + C[i].at(1, 2)", "(c.next(r) + C[i].at(1, 2))"),
        ("min(a, abs(b))", "min(a, abs(b))"),
        ("nodes * gpus", "(nodes * gpus)"),
        ("not not a", "(not (not a))"),
    ],
)
def test_precedence(text: str, expected: str) -> None:
    """Operators bind as in Python."""
    assert shape(expression(text)) == expected


def test_spans() -> None:
    """A node's span is its text; parentheses around it belong to what is around it."""
    node = expression("(a + b) * (c)")

    assert isinstance(node, syntax.Binary)
    assert node.span.text == "(a + b) * (c)"
    assert node.left.span.text == "a + b"
    assert node.right.span.text == "c"


def test_everything() -> None:
    """Each construct of the language gives its own node."""
    text = repr(parse(EVERYTHING))
    # Quantity and Comment included; Node itself and the types of lark are not.
    names = [name for name, kind in vars(syntax).items() if isinstance(kind, type) and issubclass(kind, syntax.Node)]

    assert [name for name in names if name != "Node" and f"{name}(" not in text] == []


def test_moves() -> None:
    """A list is kept as a list, and the place of a reference ends where the statement goes on."""
    text = "schedule s for P ranks { each r { reduce x[r] @ (q + 1) % P for q in 0 ..< P if q != r -> y } }"
    schedule = parse(text).items[0]
    assert isinstance(schedule, syntax.ScheduleDecl)
    each = schedule.body[0]
    assert isinstance(each, syntax.Each)
    move = each.body[0]
    assert isinstance(move, syntax.Move)

    assert move.kind is MoveKind.REDUCE
    assert move.source.ref.span.text == "x[r] @ (q + 1) % P"
    assert move.source.binder is not None
    assert move.source.binder.span.text == "q in 0 ..< P"
    assert move.source.condition is not None
    assert move.source.condition.span.text == "q != r"


def test_quantities() -> None:
    """Rates count in powers of 1000, sizes in powers of 1024, and 0.7 us is the float nearest to it."""
    text = """
    topology t { link a in node 450 GB/s per gpu 0.7 us  link b across nodes same gpu 1.5 MB/s per pair 2 ns }
    schedule s for P ranks { tune { tile 64 KB } }
    """
    machine, schedule = parse(text).items
    assert isinstance(machine, syntax.TopologyDecl)
    first, second = machine.entries
    assert isinstance(first, syntax.LinkDecl)
    assert isinstance(second, syntax.LinkDecl)
    assert isinstance(schedule, syntax.ScheduleDecl)
    (tune,) = schedule.body
    assert isinstance(tune, syntax.Tune)
    tile = tune.entries[0].value
    assert isinstance(tile, syntax.Quantity)

    assert (first.scope, first.per, first.bandwidth.value, first.latency.value) == (
        LinkScope.IN_NODE,
        "gpu",
        450e9,
        0.7e-6,
    )
    assert (second.scope, second.per) == (LinkScope.ACROSS_SAME_GPU, "pair")
    assert (second.bandwidth.value, second.bandwidth.written, second.latency.value) == (1.5e6, "1.5", 2e-9)
    assert (tile.value, tile.unit) == (65536.0, "KB")


def test_soft_keywords() -> None:
    """Words that are keywords in one place only can be names elsewhere."""
    parse(
        "schedule sum(nodes, gpus = gpus) for ranks ranks { input node  output pair  let same = ranks - node  on gpu }"
    )


def test_comments() -> None:
    """Comments are kept in order, and know whether code stands before them; one in a path is none."""
    file = parse('# first\nuse "a#b.comm"  # second\n  # third\n')

    assert [(comment.text, comment.own_line) for comment in file.comments] == [
        ("# first", True),
        ("# second", False),
        ("# third", True),
    ]


def test_line_ends() -> None:
    """Carriage returns and tabs are blanks."""
    assert parse(EVERYTHING.replace("\n", "\r\n").replace("  ", "\t")).items == parse(EVERYTHING).items


def test_nothing() -> None:
    """An empty file has no items and is no fault."""
    assert parse("").items == ()
    assert parse(" \n# only a remark").items == ()


def test_collector() -> None:
    """The garbage collector rests while a tree is built, and is on again afterwards, also after a fault."""
    parse(EVERYTHING)
    assert gc.isenabled()
    fault("schedule")
    assert gc.isenabled()


def test_depth() -> None:
    """Nesting that would exhaust later passes is refused, and no depth exhausts the parser."""
    assert shape(expression("(" * 90 + "a + 1" + ")" * 90)) == "(a + 1)"
    for text in ("(" * 20000 + "1" + ")" * 20000, "-" * 20000 + "1", "1" + " + 1" * 20000, "2 **" * 20000 + "1"):
        assert fault(f"schedule s for P ranks {{ let a = {text} }}").code == "C011"
    assert fault("schedule s for P ranks {" + "if a {" * 5000 + "}" * 5001).code == "C011"


def test_first_fault_only() -> None:
    """What follows a syntax fault is guesswork, so it is not reported."""
    diagnostic = fault("schedule s for P ranks {\n  putt x -> y\n  gett x -> y\n}")

    assert diagnostic.primary.span.position == (2, 3)


@pytest.mark.parametrize(
    ("text", "help"),
    [
        ("cycles C = (0, 1)", "the ranks of a cycle stand side by side, `(0 1 2)`"),
        ("each r { put x for q in 0 ..< P -> y }", "only `reduce` takes a list of sources"),
        ("let a = 1.5", "numbers are integers"),
        ("let a = min(1 2)", ""),
    ],
)
def test_help(text: str, help: str) -> None:
    """A mistake that many will make gets a word on what to write."""
    assert fault(f"schedule s for P ranks {{ {text} }}").help == help


def test_caret_behind_the_previous_word() -> None:
    """What is missing is shown where it is missing, not lines below at the word that is too early."""
    diagnostic = fault("schedule s for P ranks {\n  let a =\n\n\n  input x\n}")

    assert diagnostic.primary.span.position == (2, 10)


def test_picklable() -> None:
    """A syntax fault crosses process boundaries."""
    with pytest.raises(CommError) as caught:
        parse("schedule s for P ranks {")
    copy = pickle.loads(pickle.dumps(caught.value))

    assert copy.diagnostics == caught.value.diagnostics
    assert str(copy) == "test.comm:1:25: error[C003]: missing `}`: expected `}` here"


SIGNS = re.findall(r"#[^\n]*\n|\w+|\.\.<|->|==|\n|[ ]+|[^\w\s]", EVERYTHING)
INSERTED = [
    *sorted({sign for sign in SIGNS if sign.strip()}),
    "&&",
    '"',
    "é",
    "\x00",
    "0x1",
    "1.5",
    "§",
    "'",
    "\\",
    ";",
]


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["drop", "insert", "double", "swap"]),
            st.integers(0, len(SIGNS) - 2),
            st.sampled_from(INSERTED),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_damaged_text(edits: list[tuple[str, int, str]]) -> None:
    """A text with words dropped, inserted, doubled or swapped parses or has one syntax fault; lark never shows."""
    signs = list(SIGNS)
    for kind, at, word in edits:
        match kind:
            case "drop":
                signs[at] = ""
            case "insert":
                signs[at] = f"{word} {signs[at]}"
            case "double":
                signs[at] *= 2
            case _:
                signs[at], signs[at + 1] = signs[at + 1], signs[at]
    text = "".join(signs)
    for diagnostic in faults(text):
        span = diagnostic.primary.span
        assert re.fullmatch(r"C0\d\d", diagnostic.code)
        assert len(diagnostic.headline) <= 70, diagnostic.headline
        assert 0 <= span.start <= span.end <= len(text)
        assert "_" not in re.sub(r"`[^`]*`", "", diagnostic.headline + diagnostic.primary.text)


@settings(max_examples=100)
@given(st.text(alphabet=st.sampled_from(sorted(set(EVERYTHING)) + list('"&;é\t\x00')), max_size=60))
def test_any_text(text: str) -> None:
    """No text at all makes the parser raise anything but CommError."""
    assert len(faults(text)) <= 1


def test_cut_short() -> None:
    """A file cut off anywhere parses or has one syntax fault on a line that exists."""
    for end in range(0, len(EVERYTHING), 7):
        for diagnostic in faults(EVERYTHING[:end]):
            line, _ = diagnostic.primary.span.position
            assert 1 <= line <= EVERYTHING[:end].count("\n") + 1


def by_tree(text: str) -> tuple[syntax.Item, ...]:
    """As lark has it: from its tree."""
    source = Source("test.comm", text)

    def made(part: Tree[Token] | Token | None) -> Any:
        if part is None:
            return None
        if isinstance(part, Token):
            build = build_syntax.TOKENS.get(part.type)
            assert part.start_pos is not None
            assert part.end_pos is not None
            return str(part) if build is None else build(Span(source, part.start_pos, part.end_pos), str(part))
        start, end = (0, 0) if part.meta.empty else (part.meta.start_pos, part.meta.end_pos)
        return build_syntax.RULES[part.data](Span(source, start, end), [made(child) for child in part.children])

    return tuple(made(child) for child in tables.parser().parse(text).children)


@pytest.mark.parametrize("text", [EVERYTHING, *(path.read_text(encoding="utf-8") for path in SHIPPED[::6])])
def test_as_lark_reads(text: str) -> None:
    """What is read by lark's tables is what lark reads, places included, and what is refused is refused by lark."""
    found, wanted = parse(text).items, by_tree(text)

    assert found == wanted
    places = zip(syntax.nodes(found), syntax.nodes(wanted), strict=True)
    assert all((one.span.start, one.span.end) == (other.span.start, other.span.end) for one, other in places)
    signs = [*re.finditer(r"\w+|[^\w\s]+", text)]
    for gone in signs[:: len(signs) // 9]:
        damaged = text[: gone.start()] + text[gone.end() :]
        try:
            wanted = by_tree(damaged)
        except UnexpectedInput:
            assert len(faults(damaged)) == 1
        else:
            assert parse(damaged).items == wanted


def test_blanks() -> None:
    """Any number of blanks and comments may stand before a sign, also a wrong one; no sign is in a comment."""
    assert fault(" " * 10_000 + "$").primary.span.position == (1, 10_001)
    assert parse("# roles\n" * 5_000 + '# use "a"').items == ()


def test_tables_are_cached(tmp_path: Path) -> None:
    """The tables are written once, and a damaged or unwritable cache costs time only."""
    script = (
        "from commdsl.language import parser, source; print(len(parser.parse(source.Source('t', 'use \"a\"')).items))"
    )

    def run() -> str:
        environment = {"COMMDSL_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert run() == "1\n"
    (kept,) = tmp_path.glob("??/*/object.pickle")
    written = kept.stat().st_mtime_ns
    assert run() == "1\n"
    assert kept.stat().st_mtime_ns == written
    whole = kept.read_bytes()
    for damaged in (whole[:1000], b""):
        kept.write_bytes(damaged)
        assert run() == "1\n"
        assert kept.stat().st_size > 1000
    shutil.rmtree(kept.parents[1])
    kept.parents[1].write_text("a file where the folder should be")
    assert run() == "1\n"
