"""Formatting keeps the meaning and the comments, is canonical, and changes nothing the second time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commdsl.language.diagnostics import CommError
from commdsl.language.format import format_file
from commdsl.language.parser import parse
from commdsl.language.source import Source

ROOT = Path(__file__).parent.parent
SHIPPED = sorted((ROOT / "schedules").rglob("*.comm"))
EVERYTHING = (Path(__file__).parent / "everything.comm").read_text(encoding="utf-8")


def formatted(text: str) -> str:
    return format_file(parse(Source("test.comm", text)))


def body(text: str) -> str:
    """The formatted inside of a schedule."""
    lines = formatted(f"schedule s for P ranks {{\n{text}\n}}\n").split("\n")
    assert lines[0] == "schedule s for P ranks {"
    assert lines[-2:] == ["}", ""]
    return "\n".join(line.removeprefix("  ") for line in lines[1:-2])


def check_laws(text: str) -> None:
    file = parse(Source("test.comm", text))
    canonical = format_file(file)
    again = parse(Source("test.comm", canonical))

    assert again == file, canonical
    assert format_file(again) == canonical


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped(path: Path) -> None:
    """Shipped files are canonical."""
    text = path.read_text(encoding="utf-8")

    assert formatted(text) == text


def test_everything() -> None:
    """The file with every construct is canonical."""
    assert formatted(EVERYTHING) == EVERYTHING


def test_empty() -> None:
    """Nothing stays nothing, and a remark alone stays alone."""
    assert formatted(" \n\n") == ""
    assert formatted("\n\n  # remark  \n\n") == "# remark\n"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("input   x[ P  blocks ]output y", "input x[P blocks]\noutput y"),
        ("each r{put x->y@(r+1)%P}", "each r { put x -> y @ (r + 1) % P }"),
        ("each r{\nput x->y}", "each r {\n  put x -> y\n}"),
        ("for s in 0..<P{each r{copy x->y}}", "for s in 0 ..< P {\n  each r { copy x -> y }\n}"),
        ("each r{let a=r copy x->y[a]}", "each r { let a = r   copy x -> y[a] }"),
        ("if a{yield x}else if b{yield y}else{yield z}", "if a { yield x } else if b { yield y } else { yield z }"),
        ("if a{\nyield x}else{if b{yield y}}", "if a {\n  yield x\n} else {\n  if b { yield y }\n}"),
        ("if a{\nyield x}else if b{yield y}", "if a {\n  yield x\n} else if b {\n  yield y\n}"),
        ("each r{}", "each r {}"),
        ("each r{\n}", "each r {\n}"),
        ("tune{lanes 16 tile 64 KB}", "tune { lanes 16   tile 64 KB }"),
        (
            "ensure each r,i in 0..<P{y[i]==x@i z==sum(x@all)}",
            "ensure each r, i in 0 ..< P { y[i] == x @ i   z == sum(x @ all) }",
        ),
        ("cycles C=(0 1)(1 0)", "cycles C = (0 1) (1 0)"),
    ],
)
def test_layout(written: str, expected: str) -> None:
    """One statement a line, blocks on one line only where they were written so."""
    assert body(written) == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("((a))", "a"),
        ("(a*b)+c", "(a * b) + c"),
        ("a*(b+c)", "a * (b + c)"),
        ("((a+b))*c", "(a + b) * c"),
        ("-(a+b)", "-(a + b)"),
        ("(-a)**2", "(-a) ** 2"),
        ("-a**-2", "-a ** -2"),
        ("(a==b)==c", "(a == b) == c"),
        ("not(a and b)", "not (a and b)"),
        ("min(( a+b ),c . next( r ))", "min(a + b, c.next(r))"),
    ],
)
def test_parentheses(written: str, expected: str) -> None:
    """Parentheses that group an operand stay, others go."""
    assert body(f"let x = {written}") == f"let x = {expected}"


def test_place() -> None:
    """A rank in parentheses keeps them, and one that is a comparison needs them."""
    assert body("each r { put x -> y @ ((r ^ 1))   put x -> y @ (r==1)   put x -> y @ (r) }") == (
        "each r { put x -> y @ (r ^ 1)   put x -> y @ (r == 1)   put x -> y @ r }"
    )


def test_long_block() -> None:
    """A block that does not fit in 120 columns on one line gets one statement a line."""
    move = "put x[(r + 1) % P, (r + 2) % P] -> y[(r + 1) % P, (r + 2) % P] @ (r + 1) % P"

    assert body(f"each r {{ {move} {move} }}") == f"each r {{\n  {move}\n  {move}\n}}"


def test_long_cycles() -> None:
    """Literal cycles that do not fit on one line stand one a line."""
    cycle = f"({' '.join(str(rank) for rank in range(16))})"
    text = body(f"cycles C = {' '.join([cycle] * 4)}")

    assert text == "\n".join(["cycles C =", *[f"    {cycle}"] * 4])
    check_laws(f"schedule s for P ranks {{\n{text}\n}}\n")


def test_blank_lines() -> None:
    """Single blank lines stay, more become one, and a block neither starts nor ends with one."""
    assert body("\n\ninput x\n\n\n\noutput y\n# remark\n\n\n# another\n\nyield y\n\n") == (
        "input x\n\noutput y\n# remark\n\n# another\n\nyield y"
    )


def test_blank_lines_between_items() -> None:
    """Items that take several lines stand apart; one-line items as they were written."""
    text = 'use "a"\nuse "b"\nroles r { a sms 0 ..< 1 }\nroles q { a sms 0 ..< 1 }\n'
    machine = "topology t {\n  nodes 1\n}\n"

    assert formatted(text) == text
    assert formatted(f"{text}# of t\n{machine}{machine}") == f"{text}\n# of t\n{machine}\n{machine}"


def test_comments_behind_code() -> None:
    """Remarks behind code stand in one column, or two blanks behind code that is longer."""
    assert body("input x # short\nlet a = 1111111111 + 1111111111 + 1111111111 + 1111111111 # long").split("\n") == [
        f"{'input x':<45}# short",
        "let a = 1111111111 + 1111111111 + 1111111111 + 1111111111  # long",
    ]


def test_comment_in_a_statement() -> None:
    """A statement with a comment in its midst keeps its lines."""
    assert body(
        "each r {\nput x ->   # where to\n  # there\ny\n}\nif a # why\n{\nyield y # now\n} # done\nelse # or\n{\n}"
    ) == (
        "each r {\n  put x ->   # where to\n      # there\n      y\n}\n"
        f"if a # why\n    {{\n  {'yield y':<43}# now\n{'}':<45}# done\nelse # or\n    {{\n}}"
    )


def test_comment_behind_else() -> None:
    """What follows a remark starts a line of its own, and no brace is lost."""
    assert body("if a {\nyield x\n} else # or\nif b {\nyield y\n} # done\nelse {\nyield z\n}") == (
        f"if a {{\n  yield x\n}}\nelse # or\n    if b {{\n  yield y\n{'}':<45}# done\nelse {{\n  yield z\n}}"
    )


def test_links_are_aligned() -> None:
    """Counts that were written on one line stay there; the names of links have one width."""
    links = "link ab in node 1 GB/s per gpu 1 us link c across nodes 1 B/s per pair 1 s"

    assert formatted(f"topology t {{ nodes 1 gpus 2 per node\nsms 4\n{links} }}") == (
        "topology t {\n  nodes 1   gpus 2 per node\n  sms 4\n"
        "  link ab in node   1 GB/s per gpu   1 us\n  link c  across nodes   1 B/s per pair   1 s\n}\n"
    )


SIGNS = re.findall(r'#[^\n]*\n|"[^"]*"|\d+(?:\.\d+)?|[GM]B/s|\w+|\.\.<|->|[=!<>]=|\*\*|<<|\n|[ ]+|[^\w\s]', EVERYTHING)


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(SIGNS) - 1),
            st.sampled_from(["\n", "\n\n\n", " # remark\n", "\n  # alone\n", "\n\n# apart\n\n", "\t", "\r\n"]),
        ),
        max_size=8,
    ),
    st.booleans(),
)
def test_any_layout(edits: list[tuple[int, str]], joined: bool) -> None:
    """Wherever lines break and remarks stand, meaning and remarks are kept, and the second time nothing changes."""
    signs = [" " if joined and sign == "\n" else sign for sign in SIGNS]
    for at, blank in edits:
        signs[at] += blank
    check_laws("".join(signs))


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, len(SIGNS) - 1), st.integers(0, len(SIGNS) - 1)), min_size=1, max_size=3))
def test_any_text(edits: list[tuple[int, int]]) -> None:
    """The same holds of every damaged text that still parses."""
    signs = list(SIGNS)
    for at, other in edits:
        signs[at] = signs[other]
    text = "".join(signs)
    try:
        parse(Source("test.comm", text))
    except CommError:
        return
    check_laws(text)


def _expressions() -> st.SearchStrategy[str]:
    atoms = st.sampled_from(["a", "3", "C[i]", "len(C)", "c.next(r)"])
    operators = ["or", "and", "==", "<", "|", "^", "&", "<<", "+", "-", "*", "%", "**"]
    return st.recursive(
        atoms,
        lambda inner: st.one_of(
            st.tuples(inner, st.sampled_from(operators), inner).map(lambda parts: f"({' '.join(parts)})"),
            inner.map(lambda operand: f"(-{operand})"),
            inner.map(lambda operand: f"(not {operand})"),
        ),
        max_leaves=8,
    )


@settings(max_examples=150)
@given(_expressions())
def test_expressions(text: str) -> None:
    """Expressions keep their meaning, however they are nested."""
    check_laws(f"schedule s for P ranks {{ let a = {text}  each r {{ put x -> y @ {text} }} }}")
