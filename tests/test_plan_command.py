"""`commdsl plan` and `commdsl show` of plans: what they read, what they write where, tables, pictures, JSON.

Assumes a checkout. The laws of the plans themselves are `test_planner.py`'s.
"""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from commdsl import compiler
from commdsl.commands.arguments import UsageError
from commdsl.commands.cli import run_command
from commdsl.commands.lengths import read
from commdsl.commands.plan import parse_tolerance, parse_widths
from commdsl.planner.balance import Widths

Capture = pytest.CaptureFixture[str]
LENGTHS = ["16384", "8192", "8192", "4096", "4096", "4096", "4096", *["2048"] * 8]

PLAN = """plan spread for 4 ranks {
  causal
  send once per rank
  rank 0 { doc 16384 as 8 shards -> 0 1 2 3 3 2 1 0 }
  rank 1 { doc story 8192 -> 1 }
  rank 3 { doc story 100 -> none }
}
"""


@pytest.fixture
def spread(tmp_path: Path) -> str:
    path = tmp_path / "spread.comm"
    path.write_text(PLAN)
    return str(path)


# --- lengths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "lengths", "ranks"),
    [
        ("a.txt", "# tokens\n10 20,30\n\n40  # the last\n", [10, 20, 30, 40], None),
        ("a.csv", "5\n6\n", [5, 6], None),
        ("a.csv", "name,length\nx,5\ny,6\n", [5, 6], None),
        ("a.csv", "rank, length\n1,5\n0,6\n", [5, 6], [1, 0]),
        ("a.json", "[7, 8]", [7, 8], None),
        ("a.json", "[[7], [], [8, 9]]", [7, 8, 9], [0, 2, 2]),
    ],
)
def test_read(name: str, text: str, lengths: list[int], ranks: list[int] | None, tmp_path: Path) -> None:
    """Lengths are read from text, CSV and JSON, with ranks where the file has them."""
    path = tmp_path / name
    path.write_text(text)
    found = read([str(path)])

    assert found.length.tolist() == lengths
    assert (None if found.rank is None else found.rank.tolist()) == ranks


def test_read_words(tmp_path: Path) -> None:
    """Numbers and files add up in the order given."""
    path = tmp_path / "more.txt"
    path.write_text("3 4")

    assert read(["1", str(path), "2"]).length.tolist() == [1, 3, 4, 2]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.txt", "10 ten", "`ten` is no length"),
        ("a.txt", "", "no documents"),
        ("a.txt", "99999999999999999999", "is no length"),
        ("a.csv", "1,2\n", "2 columns without a heading"),
        ("a.csv", "name,tokens\nx,5\n", "expected a column `length`"),
        ("a.csv", "name,length\nx\n", "row 2 has 1 of 2 columns"),
        ("a.json", "{}", "expected a list of lengths"),
        ("a.json", "[1,", "expected a list of lengths"),
        ("a.json", "[1, 2.5]", "2.5 is no length"),
        ("a.json", "[1, true]", "True is no length"),
        ("a.json", "[[1], 2]", r"\[1\] is no length"),
    ],
)
def test_read_refuses(name: str, text: str, expected: str, tmp_path: Path) -> None:
    """What is no length is named, with what is expected."""
    path = tmp_path / name
    path.write_text(text)

    with pytest.raises(UsageError, match=expected):
        read([str(path)])


def test_read_refuses_a_mixture(tmp_path: Path) -> None:
    """Some documents with a rank and some without are refused."""
    path = tmp_path / "a.json"
    path.write_text("[[1], [2]]")

    with pytest.raises(UsageError, match="some documents have a rank"):
        read(["5", str(path)])


@pytest.mark.parametrize(("text", "share"), [("2%", 0.02), ("0.05", 0.05), (" 10 % ", 0.1)])
def test_tolerance(text: str, share: float) -> None:
    """A tolerance is a share, with or without the sign of percent."""
    assert parse_tolerance(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "two", "0", "-1%", "0.0001", "nan", "inf"])
def test_wrong_tolerance(text: str) -> None:
    """Nothing, and what cannot be met, is a usage error."""
    with pytest.raises(UsageError):
        parse_tolerance(text)


def test_widths() -> None:
    """Three numbers of bytes, 2 at least."""
    assert parse_widths("512, 64,2") == Widths(512, 64, 2)
    for wrong in ("512", "512,64", "512,64,1", "a,b,c"):
        with pytest.raises(UsageError):
            parse_widths(wrong)


# --- commdsl plan -----------------------------------------------------------------------------------------------------


def test_plan_prints_the_text(capsys: Capture) -> None:
    """Without -o the plan is on standard output, and the report beside it; what is printed is a proved plan."""
    assert run_command(["plan", *LENGTHS, "--ranks", "4"]) == 0
    shown = capsys.readouterr()
    plan = compiler.check(compiler.read_text(shown.out, "printed.comm", Path())).plan

    assert plan.num_ranks == 4
    assert np.bincount(plan.document, plan.shards.length).tolist() == [int(length) for length in LENGTHS]
    assert "attention, token pairs" in shown.err
    assert "+113.3 %" in shown.err


def test_plan_writes_a_file(tmp_path: Path, capsys: Capture) -> None:
    """With -o the report is on standard output; the file is proved by `check` and formatted as `fmt` would."""
    path, svg = tmp_path / "made.comm", tmp_path / "made.svg"
    words = ["--name", "made", "--mask", "full", "--queries", "70000", "--keys", "99999", "--svg", str(svg)]
    assert run_command(["plan", *LENGTHS, "--on", "h200_1x8", "-o", str(path), *words]) == 0
    shown = capsys.readouterr()

    assert "over nvlink" in shown.out
    assert "plan made for 8 ranks" in path.read_text()
    assert "capacity 70000 queries" in path.read_text()
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert run_command(["check", str(path)]) == 0
    assert run_command(["fmt", "--check", str(path)]) == 0


def test_plan_json(tmp_path: Path, capsys: Capture) -> None:
    """--json is one value with the loads before and after, of every rank and link."""
    assert run_command(["plan", *LENGTHS, "--ranks", "4", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)

    assert made["after"]["imbalance"]["attention"] <= 0.02 < made["before"]["imbalance"]["attention"]
    assert len(made["after"]["ranks"]) == 4
    assert made["after"]["links"][0]["link"] == "switch"
    assert made["text"].startswith("# Balanced by")


def test_plan_of_a_plan(spread: str, capsys: Capture) -> None:
    """The documents of a plan are balanced anew, where they lie; its name and mask stay."""
    assert run_command(["plan", spread]) == 0
    plan = compiler.check(compiler.read_text(capsys.readouterr().out, "again.comm", Path())).plan

    assert plan.name == "spread"
    assert [piece.name for piece in plan.pieces] == ["", "story", "story"]
    assert plan.shards.rows.tolist() == [16384, 8192, 0, 100]


def test_plan_of_given_ranks(tmp_path: Path, capsys: Capture) -> None:
    """A file that says on which rank a document lies is believed."""
    path = tmp_path / "a.json"
    path.write_text("[[300, 200], [], [100]]")
    assert run_command(["plan", str(path), "--ranks", "3"]) == 0
    plan = compiler.check(compiler.read_text(capsys.readouterr().out, "again.comm", Path())).plan

    assert plan.shards.rows.tolist() == [500, 0, 100]


def test_plan_of_a_machine_in_a_file(tmp_path: Path, capsys: Capture) -> None:
    """--on takes a file with one topology."""
    path = tmp_path / "mine.comm"
    path.write_text("topology mine { nodes 2   gpus 2 per node   sms 8   link wire in node 1 GB/s per gpu 1 us }")
    assert run_command(["plan", "4096", "1024", "1024", "--on", str(path)]) == 0
    shown = capsys.readouterr()

    assert "4 ranks of mine" in shown.err
    assert "does not link all ranks" in shown.err
    assert run_command(["plan", "4096", "1024", "1024", "--on", str(path), "--relay"]) == 0
    assert "without a link" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["100"], "for how many ranks?"),
        (["100", "0", "--ranks", "2"], "document 1 has 0 tokens"),
        (["many", "--ranks", "2"], "`many` is neither a number nor a file"),
        (["100", "--ranks", "2", "--name", "1st"], "--name `1st`"),
        (["100", "--ranks", "2", "--widths", "3"], "--widths expects"),
        (["100", "--ranks", "2", "--tolerance", "none"], "--tolerance expects"),
        (["100", "--ranks", "2", "--on", "h200_1x8"], "`h200_1x8` has 8"),
        (["5000", "--ranks", "2", "--queries", "10"], "may receive 10"),
    ],
)
def test_plan_refuses(words: list[str], expected: str, capsys: Capture) -> None:
    """A wrong word is a usage error that says what is expected."""
    assert run_command(["plan", *words]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--ranks", "5"], "is for 4 ranks, not 5"),
        (["--on", "h200_1x8"], "is for 4 ranks, `h200_1x8` has 8"),
        (["100"], "stands alone"),
    ],
)
def test_plan_of_a_plan_refuses(words: list[str], expected: str, spread: str, capsys: Capture) -> None:
    """A plan brings its documents and its number of ranks."""
    assert run_command(["plan", spread, *words]) == 2
    assert expected in capsys.readouterr().err


def test_rows_have_nothing_to_balance(tmp_path: Path, capsys: Capture) -> None:
    """A plan of rows only is not planned."""
    path = tmp_path / "rows.comm"
    path.write_text("plan rows for 2 ranks { rank 0 { doc 5 -> [0 1] } }")

    assert run_command(["plan", str(path)]) == 2
    assert "neither causal nor full" in capsys.readouterr().err


# --- commdsl show -----------------------------------------------------------------------------------------------------


def test_show(spread: str, tmp_path: Path, capsys: Capture) -> None:
    """A plan is shown as who sends what to whom: the documents, the pairs, the picture and the loads."""
    svg = tmp_path / "spread.svg"
    assert run_command(["show", spread, "--svg", str(svg)]) == 0
    shown = capsys.readouterr().out

    assert "rank 0  doc 16384  [0, 2048) → 0  [2048, 4096) → 1" in shown
    assert "rank 3  doc story 100  [8192, 8292) → none" not in shown  # it neither leaves nor is cut
    assert "     0     1         4,096        14,336        92,274,688  switch" in shown
    assert "bytes from (rows) to (columns)" in shown
    assert sum(line.endswith("█") for line in shown.splitlines()) >= 4
    words = [element.text for element in ElementTree.parse(svg).iter() if element.text and element.text.strip()]
    assert {"spread", "rank 0", "3"} <= set(words)


def test_show_json(spread: str, capsys: Capture) -> None:
    """--json has every shard, and the loads of every rank."""
    assert run_command(["show", spread, "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)

    assert shown["plan"] == "spread"
    assert shown["shards"][1] == {"rank": 0, "document": 0, "begin": 2048, "length": 2048, "dest": [1]}
    assert shown["shards"][-1]["dest"] == []
    assert [rank["home_rows"] for rank in shown["after"]["ranks"]] == [16384, 8192, 0, 100]


def test_show_many_ranks(tmp_path: Path, capsys: Capture) -> None:
    """Past 32 ranks neighbours share a row of a picture, and no line says so twice."""
    path, svg = tmp_path / "many.comm", tmp_path / "many.svg"
    assert run_command(["plan", *["64000", "3000"] * 20, "--ranks", "96", "-o", str(path)]) == 0
    capsys.readouterr()
    assert run_command(["show", str(path), "--svg", str(svg)]) == 0
    shown = capsys.readouterr().out

    assert "ranks, the most of one" in shown
    assert "93–95" in shown
    assert "more pairs with" in shown
    assert "ranks 93–95" in {element.text for element in ElementTree.parse(svg).iter()}


def test_show_names_one(spread: str, capsys: Capture) -> None:
    """--schedule names one plan of several declarations, too; a name that is not there is refused."""
    Path(spread).write_text(PLAN + PLAN.replace("spread", "other"))
    assert run_command(["show", spread, "--schedule", "other"]) == 0
    shown = capsys.readouterr().out

    assert "other · " in shown
    assert "spread · " not in shown
    assert run_command(["show", spread, "--schedule", "third"]) == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--stage", "cuda"], "has the stages syntax and ir"),
        (["--ranks", "8"], "is for 4 ranks: leave --ranks out"),
        (["--on", "h200_1x8"], "is for 4 ranks, `h200_1x8` has 8"),
    ],
)
def test_show_refuses(words: list[str], expected: str, spread: str, capsys: Capture) -> None:
    """A plan has no later stage, and only its own number of ranks."""
    assert run_command(["show", spread, *words]) == 2
    assert expected in capsys.readouterr().err


def test_svg_is_for_plans(capsys: Capture, tmp_path: Path) -> None:
    """--svg where no plan is shown is refused, not ignored."""
    ring = str(Path(__file__).parent.parent / "schedules/collectives/allreduce_ring.comm")

    assert run_command(["show", ring, "--svg", str(tmp_path / "ring.svg")]) == 2
    assert "commdsl run --svg" in capsys.readouterr().err


def test_a_faulty_plan_shows_its_fault(spread: str, capsys: Capture) -> None:
    """A plan with a fault is not drawn."""
    Path(spread).write_text(PLAN.replace("-> 1 }", "-> 9 }"))

    assert run_command(["show", spread]) == 1
    assert "error[C6" in capsys.readouterr().err
