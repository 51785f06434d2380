"""The command line as a newcomer meets it: names in place of files, what is listed, and one line for every mistake.

Assumes a checkout. Runs commands in this process, but for what only a process shows.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
import tracemalloc
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

import commdsl
from commdsl import compiler
from commdsl.commands import budget
from commdsl.commands.arguments import Target
from commdsl.commands.cli import app, run_command
from commdsl.ir import resolve
from commdsl.ir.resolve.budget import moves_of
from commdsl.language.diagnostics import CommError, InternalError
from commdsl.language.syntax import ScheduleDecl, TopologyDecl
from commdsl.machine import config, memory, resources
from commdsl.machine.topology import switch

ROOT = Path(__file__).parent.parent
BOX = "topology {} {{ nodes 1   gpus {} per node   sms 4   link wire in node 10 GB/s per gpu 1 us }}\n"

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder far from the checkout, with two files of its own."""
    monkeypatch.chdir(tmp_path)
    ring = resources.shipped_file("allreduce_ring")
    assert ring is not None
    (tmp_path / "mine.comm").write_text(ring.read_text().replace("allreduce_ring", "mine"))
    (tmp_path / "box.comm").write_text(BOX.format("small", 2))
    (tmp_path / "boxes.comm").write_text(BOX.format("small", 2) + BOX.format("large", 6))
    return tmp_path


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["check", "allreduce_ring", "rotation_ring", "mine.comm"],
        ["show", "allreduce_ring", "--stage", "plan", "--ranks", "3"],
        ["run", "allreduce_ring", "--ranks", "2", "--bytes", "1000"],
        ["compile", "allreduce_ring", "--out", "made"],
        ["show", "balanced_16k"],
        ["run", "qkv", "--plan", "spanning", "--json"],
        ["check", "mine.comm:mine"],
        ["check", "allreduce_ring.comm"],
    ],
)
def test_shipped_names(words: list[str], capsys: Capture) -> None:
    """A shipped file goes by its name wherever a file does, from any folder."""
    assert run_command(words) == 0, capsys.readouterr().err


def test_own_files_come_first(capsys: Capture) -> None:
    """A file here is meant before a shipped one of its name."""
    Path("allreduce_ring").write_text(Path("mine.comm").read_text())
    assert run_command(["check", "allreduce_ring"]) == 0
    assert "mine: proved" in capsys.readouterr().out


def test_shipped_files_are_shown_by_a_short_name(capsys: Capture) -> None:
    """What is said of a shipped file names it as a checkout does, wherever it is installed."""
    assert run_command(["check", "rotation_hamilton", "--ranks", "4"]) == 1
    assert " --> schedules/attention/rotation_hamilton.comm:" in capsys.readouterr().err


def test_one_declaration_of_a_file(capsys: Capture) -> None:
    """FILE.comm:NAME is one declaration, and no two are asked for at once."""
    Path("both.comm").write_text(Path("mine.comm").read_text() + Path("mine.comm").read_text().replace("mine", "other"))
    assert run_command(["check", "both.comm:other"]) == 0
    assert capsys.readouterr().out.count("proved") == 1
    assert run_command(["check", "both.comm:other", "--schedule", "mine"]) == 2
    assert run_command(["check", "both.comm:other", "mine.comm"]) == 2
    assert run_command(["check", "both.comm:nobody"]) == 1


def test_on_a_topology_of_ones_own(capsys: Capture) -> None:
    """--on takes a .comm file with one topology, or FILE.comm:NAME; its ranks are those of the proof."""
    assert run_command(["check", "mine.comm", "--on", "box.comm"]) == 0
    assert "proved for 2 ranks on small" in capsys.readouterr().out
    assert run_command(["check", "allreduce_ring", "--on", "boxes.comm:large"]) == 0
    assert "proved for 6 ranks on large" in capsys.readouterr().out
    assert run_command(["run", "mine.comm", "--on", "box.comm", "--bytes", "1000"]) == 0
    assert run_command(["plan", "100", "200", "--on", "boxes.comm:small"]) == 0
    capsys.readouterr()
    assert run_command(["check", "mine.comm", "--on", "boxes.comm"]) == 2
    assert "--on boxes.comm: expected one topology in `boxes.comm`, it has 2" in capsys.readouterr().err
    assert run_command(["check", "mine.comm", "--on", "boxes.comm:huge"]) == 2
    assert "--on boxes.comm:huge: no topology named `huge`" in capsys.readouterr().err
    assert run_command(["check", "mine.comm", "--on", "mine.comm"]) == 2
    assert "--on mine.comm: expected one topology in `mine.comm`, it has none" in capsys.readouterr().err


ON = [
    ("nosuch", "--on nosuch: no topology named `nosuch`; known here: a100_1x8, "),
    ("h200_2x9", "--on h200_2x9: no topology named `h200_2x9`; did you mean `h200_2x8`?"),
    ("nope.comm", "--on nope.comm: no such file: nope.comm; shipped topologies: a100_1x8, "),
    ("bax.comm", "--on bax.comm: no such file: bax.comm; did you mean box.comm?"),
    ("dgx.comm", "--on dgx.comm: no such file: dgx.comm; did you mean dgx1?"),
    ("no/boxes.comm:small", "--on no/boxes.comm:small: no such file: no/boxes.comm; shipped topologies: "),
    ("folder.comm", "--on folder.comm: folder.comm is a folder"),
    ("", "--on expects the name of a topology"),
    ("../topologies/dgx1", "--on ../topologies/dgx1: no topology named"),
]


@pytest.mark.parametrize(
    "words",
    [
        ["check", "mine.comm"],
        ["run", "mine.comm"],
        ["show", "mine.comm"],
        ["show", "mine.comm", "--stage", "syntax"],
        ["show", "matmul_allreduce", "--stage", "timeline", "--shape", "8x8x8"],
        ["show", "balanced_16k"],
        ["compile", "mine.comm"],
        ["plan", "100"],
        ["synth", "allgather"],
        ["choice", "attention", "8K", "--ranks", "4"],
        ["choice", "all_gather_matmul", "8x8x8", "--ranks", "4"],
    ],
    ids="_".join,
)
@pytest.mark.parametrize(("on", "said"), ON)
def test_on_no_topology(words: list[str], on: str, said: str, capsys: Capture) -> None:
    """A name that is no topology's is a mistake of the option in every command, with near topologies and no caret."""
    Path("folder.comm").mkdir()
    assert run_command([*words, "--on", on]) == 2
    out, err = capsys.readouterr()

    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"usage: {said}")


# --- topologies, pictures and settings --------------------------------------------------------------------------------


def test_show_a_topology(capsys: Capture) -> None:
    """A topology is shown as it is written and as what it means; it has no later stage, and nothing else to say."""
    assert run_command(["show", "h200_2x8"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("topology h200_2x8: 2 × 8 GPUs of 132 SMs\n  link nvlink in node: 450 GB/s per gpu")
    assert "ranks 16: rank = node * 8 + gpu" in out
    assert run_command(["show", "boxes.comm", "--json"]) == 0
    assert [one["topology"] for one in json.loads(capsys.readouterr().out)] == ["small", "large"]
    assert run_command(["show", "boxes.comm:large"]) == 0
    assert capsys.readouterr().out.startswith("topology large: 1 × 6 GPUs")
    assert run_command(["show", "boxes.comm:large", "--stage", "syntax"]) == 0
    assert "large" in (out := capsys.readouterr().out)
    assert "small" not in out
    assert run_command(["show", "dgx1_dead_link"]) == 0
    out = capsys.readouterr().out
    assert "double joins GPUs of a node: 0->3 0->4 1->2" in out
    assert "missing: rank 0 -> 4" in out


REFUSED = [
    (["show", "h200_2x8", "--stage", "plan"], "a topology has the stages syntax and ir, not plan"),
    (["show", "h200_2x8", "--ranks", "4"], "a topology is shown: leave out --ranks"),
    (["show", "h200_2x8", "--on", "dgx1"], "a topology is shown: leave out --on"),
    (["show", "h200_2x8", "K=3"], "a topology is shown: leave out K=3"),
    (["show", "h200_2x8", "--svg", "a.svg"], "a topology is shown: leave out --svg"),
    (["show", "balanced_16k", "--stage", "syntax", "--svg", "a.svg"], "--svg draws what a dispatch plan means"),
    (["show", "mine.comm", "--svg", "a.svg"], "--svg draws dispatch plans, and none is shown"),
    (["show", "balanced_16k", "--svg", "a.png"], "--svg a.png: expected a name that ends in .svg"),
    (["show", "mine.comm", "--device", "H200"], "--device is for --stage timeline, not for ir"),
    (["show", "mine.comm", "--shape", "8x8x8"], "--shape is for --stage timeline, not for ir"),
    (["run", "mine.comm", "--svg", "a.png"], "--svg a.png: expected a name that ends in .svg"),
    (["run", "mine.comm", "--svg", "a"], "--svg a: expected a name that ends in .svg"),
    (["run", "qkv", "--svg", "a.svg"], "--svg draws schedules, and none is run"),
    (["plan", "100", "--ranks", "2", "--svg", "a.jpg"], "--svg a.jpg: expected a name that ends in .svg"),
    (["plan", "100", "--ranks", "2", "--out", "a.svg"], "--out a.svg: expected a name that ends in .comm"),
    (["synth", "allgather", "--on", "dgx1", "-o", "a.txt"], "--out a.txt: expected a name that ends in .comm"),
    (["check", "mine.comm", "--concise", "--json"], "one of the two"),
    (["check", "spanning", "K=3"], "nothing else has parameters or is tuned: K=3"),
    (["show", "spanning", "--tune", "lanes=4"], "nothing else has parameters or is tuned: --tune lanes=4"),
    (["check", "spanning", "--ranks", "8"], "`spanning` is for 4 ranks: leave --ranks out"),
    (["compile", "--schedule", "mine"], "--schedule names a declaration of a FILE"),
    (["show", "mine.comm", "--schedule", ""], "--schedule names a declaration of a FILE"),
    (["run", "alltoall_direct", "--op", "max", "--bytes", "1KB"], "combines nothing: leave out --op max"),
    (["choice", "all_reduce", "64KB", "--ranks", "4", "--heads", ""], "--heads is for `attention`"),
    (["choice", "all_reduce", "64KB", "--ranks", "4", "--on", "dgx1"], "--on is for `attention`"),
    (["choice", "attention", "8K", "--ranks", "4", "--heads", ""], "--heads is a number"),
    (["choice", "attention", "8K", "--ranks", "4", "--placement", ""], "`placement` is one of"),
    (["new", "allreduce", "a.txt"], "FILE a.txt: expected a name that ends in .comm"),
]


@pytest.mark.parametrize(
    ("words", "said"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_no_option_is_ignored(words: list[str], said: str, capsys: Capture) -> None:
    """An option that would change nothing, or a file named after what is not written to it, is refused by name."""
    before = sorted(Path().iterdir())
    assert run_command(words) == 2
    out, err = capsys.readouterr()

    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    assert sorted(Path().iterdir()) == before


def test_unknown_settings(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """A variable that begins like a setting and is none is named once, with the nearest; the command goes on."""
    monkeypatch.setenv("COMMDSL_TIMEOT", "3")
    monkeypatch.setenv("COMMDSL_XYZ", "1")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert run_command(["check", "mine.comm"]) == 0
    assert not seen
    first, second = capsys.readouterr().err.splitlines()
    assert first == "warning: COMMDSL_TIMEOT is not a setting and changes nothing; did you mean COMMDSL_TIMEOUT?"
    assert second.startswith("warning: COMMDSL_XYZ is not a setting and changes nothing; there are COMMDSL_CACHE_DIR, ")


def test_unknown_settings_of_programs() -> None:
    """A program that uses the library is warned once, however often settings are read and filters change."""
    program = (
        "import warnings; from commdsl.machine.config import from_environment; from_environment();"
        "warnings.simplefilter('default'); from_environment(); import commdsl; commdsl.load('allreduce_ring', ranks=2)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COMMDSL_TIMEOT": "3"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.count("SettingWarning: COMMDSL_TIMEOT is not a setting and changes nothing; did you mean") == 1


def test_settings_are_listed() -> None:
    """The variables that are read are those that the README lists, and those that the module asks for."""
    text = (ROOT / "commdsl" / "machine" / "config.py").read_text()
    asked = set(re.findall(r"variables\.get\(\"(COMMDSL_\w+)", text))
    listed = re.findall(r"^\| `(COMMDSL_\w+)`", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert asked == set(config.VARIABLES) == set(listed)


def test_compiled_for_a_topology_of_ones_own(elsewhere: Path, capsys: Capture) -> None:
    """What is compiled for it is proved for it again when it is loaded, from any folder, and when the file is gone."""
    box = elsewhere / "box.comm"
    box.write_text(BOX.format("eight", 8))
    assert run_command(["compile", "mine.comm", "--on", "box.comm", "--out", "made"]) == 0
    box.unlink()
    made = runpy.run_path(str(elsewhere / "made" / "mine.py"))
    (elsewhere / "other").mkdir()
    os.chdir("other")
    assert made["__getattr__"]("mine").name == "mine_on_eight"
    with pytest.raises(commdsl.CommError):
        commdsl.load({**made["SOURCE"], "box.comm": BOX.format("other", 8)}, on="eight")


# --- list and --version -----------------------------------------------------------------------------------------------


def test_list(capsys: Capture) -> None:
    """`list` has one line for each shipped file, with the sentence it opens with."""
    assert run_command(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()

    for path in resources.shipped_files():
        (line,) = [line for line in lines if line.startswith(f"  {path.stem} ")]
        opening = path.read_text().split("\n")[0].removeprefix("# ")
        assert opening.split(". ")[0].rstrip(".")[:60] in line


def test_list_json(capsys: Capture) -> None:
    """With --json it says of each where it lies, its kind and its parameters; the name is what the file declares."""
    assert run_command(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert [Path(one["file"]).stem for one in found] == [one["name"] for one in found]
    assert all((ROOT / one["file"]).is_file() for one in found)
    by_name = {one["name"]: one for one in found}
    assert by_name["broadcast_chain"]["parameters"] == ["root = 0", "K = 8"]
    assert by_name["torus_4x4"]["kind"] == "topology"
    assert by_name["h200_2x8"]["ranks"] == "2 x 8"
    assert by_name["spanning"]["ranks"] == "4"
    assert by_name["experts"]["ranks"] == "up to 32"


def test_list_says_for_which_ranks(capsys: Capture) -> None:
    """It agrees with the tables of the schedules' README."""
    text = (ROOT / "schedules" / "README.md").read_text()
    tables = re.findall(r"^\| schedule \| P \|.*?\n\n", text, re.MULTILINE | re.DOTALL)
    table = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", "".join(tables), re.MULTILINE)
    words = {"multiples of G": "whole nodes", "any but 4 and 6": "any but 4, 6"}
    words["several nodes"] = "4, 6, 8, 10, 12, 14, ..."
    words["several nodes, m even"] = "4, 8, 12, 16, 20, 24, ..."
    assert run_command(["list", "--json"]) == 0
    schedules = [one for one in json.loads(capsys.readouterr().out) if one["group"] in ("collectives", "attention")]
    said = {one["name"]: one["ranks"] for one in schedules}
    stated = {name: words.get(ranks, ranks) for name, ranks in table if name in said}

    assert len(stated) >= 32
    assert {name: said[name] for name in stated} == stated


def test_every_shipped_file_is_known_by_its_name() -> None:
    """What a shipped file declares has the file's name: that is how it is found."""
    for path in resources.shipped_files():
        files = compiler.read(path)
        declared = [decl.name.text for decl in (*compiler.declarations(files), *files[0].items)
                    if isinstance(decl, TopologyDecl) or decl in compiler.declarations(files)]  # fmt: skip
        assert declared[0] == path.stem
        assert resources.shipped_file(path.stem) == path


def test_version(capsys: Capture) -> None:
    """--version is that of the project file."""
    assert run_command(["--version"]) == 0
    stated = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert stated is not None
    assert capsys.readouterr().out == f"commdsl {stated[1]}\n"


# --- mistakes ---------------------------------------------------------------------------------------------------------

MISTAKES = [
    (["chek", "mine.comm"], "no command chek; did you mean check?"),
    (["mine.comm"], "did you mean run mine.comm?"),
    (["allreduce_ring"], "did you mean run allreduce_ring?"),
    (["frobnicate"], "commdsl --help lists them"),
    (["run", "mine.comm", "--rank", "4"], "no such option --rank, did you mean --ranks?"),
    (["run", "--ranks"], "--ranks"),
    (["run"], "missing argument"),
    (["run", "allreduce_rin"], "did you mean allreduce_ring?"),
    (["run", "mien.comm"], "no such file: mien.comm; did you mean mine.comm?"),
    (["run", "allreduce_rings.comm"], "did you mean allreduce_ring, which is shipped?"),
    (["run", "nothing/of/this.comm"], "no such file: nothing/of/this.comm"),
    (["run", "qwertz"], "`commdsl list` says what is shipped"),
    (["run", "mine.comm", "8"], "ranks are given as --ranks 8"),
    (["run", ""], "is a folder"),
    (["show", "."], "is a folder: name files in it"),
    (["check", "notes.md"], "notes.md is no .comm file"),
    (["check", "mine.comm", "--ranks", "0"], "there is 1 rank at least"),
    (["check", "mine.comm", "--ranks", "x"], "expects a number"),
    (["check", "mine.comm", "--ranks", ""], "expects a number"),
    (["check", "mine.comm", "--ranks", "-3"], "expects a number"),
    (["check", "mine.comm", "--ranks", "4.5"], "expects a number"),
    (["check", "mine.comm", "--on", "no.comm"], "no such file: no.comm"),
    (["check", "mine.comm", "--tune", "lanes"], "KEY=VALUE"),
    (["check", "mine.comm", "K=x"], "a whole number"),
    (["check", "empty.comm"], "declares nothing"),
    (["run", "empty.comm"], "nothing to run"),
    (["show", "mine.comm", "--stage", "ptx"], "is not one of"),
    (["run", "mine.comm", "--svg", "no/such/folder.svg"], "there is no folder no/such"),
    (["run", "mine.comm", "--svg", "."], "is a folder, expected a file to write"),
    (["compile", "mine.comm", "--out", "notes.md"], "File exists"),
    (["fmt", "notes.md"], "is no .comm file"),
    (["fmt", "nowhere.comm"], "no such file"),
    (["explain", "C203", "C204"], "unexpected extra argument"),
    (["explain", "ring"], "no diagnostic has the code"),
    (["new", "allreduce", "no/such/place.comm"], "there is no folder no/such"),
    (["choice", "all_reduce", "64KB"], "missing option '--ranks'"),
    (["choice", "all_reduce", "64KB", "--ranks", "0"], "--ranks"),
    (["choice", "allreduce", "64KB", "--ranks", "4"], "expected one of all_reduce"),
    (["plan", "--ranks", "4"], "missing argument"),
    (["plan", "99999999999999999999", "--ranks", "2"], "is no length"),
    (["plan", "100", "--ranks", "100000"], "--ranks 8192 would fit"),
    (["check", "loop.comm"], "is a link to nothing"),
    (["plan", "many", "--ranks", "4"], "neither a number nor a file"),
    (["plan", "100", "--ranks", "4", "--on", "no.comm"], "no such file: no.comm"),
    (["plan", "100", "--ranks", "4", "-o", "no/such/plan.comm"], "there is no folder no/such"),
    (["plan", "9999999999", "--ranks", "2"], "a rank has at most 2,147,483,647 tokens"),
    (["plan", "4294967290", "--ranks", "2"], "a rank has at most 2147483647 tokens: plan for more ranks"),
    (["plan", "999999999999999999", "--ranks", "2"], "a rank has at most 2,147,483,647 tokens"),
    (["plan", "100", "200", "--ranks", "2", "--widths", f"{10**26},8,8"], "--widths expects"),
    (["plan", "100", "200", "--ranks", "2", "--shortest", f"{10**26}"], "not in the range"),
    (["plan", "100", "200", "--ranks", "2", "--keys", f"{10**26}"], "not in the range"),
    (["choice", "attention", f"{10**20}M", "--ranks", "4"], "of 0 to 2,147,483,647 tokens"),
    (["choice", "attention", "8K", "--ranks", "4", "--window", f"{10**23},0"], "of 0 to 2,147,483,647 tokens"),
    (["choice", "attention", "8K", "--ranks", "1"], "needs 2 or more of them, not 1"),
    (
        ["show", "matmul_allreduce", "--stage", "timeline", "--shape", "8x0x8"],
        "a product is of rows, depth and columns",
    ),
    (["new", "allreduce", "for.comm"], "`for` is not a name"),
    (["fmt", ""], "is a folder"),
    (["tune", "--time-budget", "nan"], "--time-budget is a number of seconds"),
    (["tune", "--memory", "0"], "--memory is a size of 1 byte or more"),
]


@pytest.mark.parametrize(
    ("words", "said"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_mistakes(words: list[str], said: str, capsys: Capture) -> None:
    """A wrong word is one line on standard error that says what to do, and exit code 2."""
    Path("notes.md").write_text("# Notes\n")
    Path("empty.comm").write_text("")
    Path("loop.comm").symlink_to("loop.comm")
    assert run_command(words) == 2
    err = capsys.readouterr().err

    assert err.startswith("usage: ")
    assert err.count("\n") == 1
    assert said in err


def test_nothing_at_all(capsys: Capture) -> None:
    """Without a command it shows the help, and that something was missing."""
    assert run_command([]) == 2
    assert "Commands:" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["check", "run", "show", "compile", "fmt"])
@pytest.mark.parametrize("text", [b"\xff\xfes\x00c\x00", b"\x7fELF\x02\x01\x01\x00\x90\x90", b"# caf\xe9\n"])
def test_other_encodings(command: str, text: bytes, capsys: Capture) -> None:
    """What is not UTF-8 is a diagnostic with its byte."""
    Path("odd.comm").write_bytes(text)
    assert run_command([command, "odd.comm"]) == 1
    assert re.search(r"error\[C0(15|01)\]", capsys.readouterr().err)


@pytest.mark.parametrize("command", ["check", "fmt"])
def test_a_text_without_end(command: str, capsys: Capture) -> None:
    """Of a file that is too long no more is read than shows that it is."""
    Path("long.comm").symlink_to("/dev/zero")
    assert run_command([command, "long.comm"]) == 1
    assert "`long.comm` has more than 4,000,000 bytes" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["\ufeff{}", "{}\r\n"])
def test_texts_of_other_systems(text: str, capsys: Capture) -> None:
    """A byte-order mark and other ends of lines are read over, and `fmt` takes them out."""
    plain = Path("mine.comm").read_text()
    Path("mine.comm").write_bytes(text.format(plain).replace("\n", "\r\n" if "\r" in text else "\n").encode())
    assert run_command(["check", "mine.comm"]) == 0
    assert run_command(["fmt", "--check", "mine.comm"]) == 1
    assert run_command(["fmt", "mine.comm"]) == 0
    assert run_command(["fmt", "--check", "mine.comm"]) == 0
    assert Path("mine.comm").read_bytes() == plain.encode()


def test_missing_permission(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """A file that may not be read is named, with the reason."""
    real = Path.open

    def opened(path: Path, *how: str, **options: Any) -> Any:
        if path.name == "mine.comm":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *how, **options)

    monkeypatch.setattr(Path, "open", opened)
    assert run_command(["check", "mine.comm"]) == 2
    assert capsys.readouterr().err == "usage: mine.comm: Permission denied\n"


# --- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["allreduce_ring", "allreduce_hamilton", "rotation_direct", "broadcast_chain", "mine.comm"]
)
@pytest.mark.parametrize("ranks", [100_000, 1_000_000])
def test_too_many_ranks(name: str, ranks: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that no proof could be made for are refused before a proof, with how many may be; these are not."""
    real, tried = resolve.resolve, list[int]()

    def resolved(files: Any, decl: Any, count: int, *rest: Any, **options: Any) -> Any:
        tried.append(count)
        return real(files, decl, count, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(resolve, "resolve", resolved)
        patch.setattr(compiler, "check_declared", lambda *_: pytest.fail("it is proved"))
        assert run_command(["check", name, "--ranks", str(ranks)]) == 2
    assert max(tried, default=0) < 200  # what the estimate is made from
    err = capsys.readouterr().err
    assert f"--ranks {ranks}" in err
    (fit,) = re.findall(r"--ranks (\d+) would fit", err)
    path = resources.shipped_file(name) or Path(name)
    files = compiler.read(path)
    decl = compiler.choose_kind(files, None, ScheduleDecl)
    budget.refuse_many(files, decl, [int(fit)], Target(None, None, ()))
    if name == "rotation_direct":  # of which that is seen soon
        assert resolve.resolve(files, decl, int(fit), switch(int(fit)), {}).num_ranks == int(fit)


def test_shipped_schedules_have_room_on_64_ranks() -> None:
    """No budget stands between a shipped schedule and eight nodes of eight."""
    machine = replace(switch(64), num_nodes=8, gpus_per_node=8)
    codes: set[str] = set()
    for path in resources.shipped_files():
        files = compiler.read(path)
        for decl in compiler.declared(files, ScheduleDecl):
            try:
                resolve.resolve(files, decl, 64, machine, {})
            except CommError as error:
                codes |= {found.code for found in error.diagnostics}
    assert "C511" not in codes


@pytest.mark.parametrize("words", [["qkv"], ["experts"], ["rows", "--plan", "copies"]])
def test_too_many_ranks_of_rows(words: list[str], capsys: Capture) -> None:
    """So are those of a dispatch, in every command."""
    for command in ("check", "show", "compile"):
        assert run_command([command, words[0], "--ranks", "1000000"]) == 2
        assert "--ranks 8192 would fit" in capsys.readouterr().err
    assert run_command(["run", *words, "--ranks", "1000000"]) == 2


def test_too_many_proofs(capsys: Capture) -> None:
    """A sweep has an end, too."""
    assert run_command(["check", "mine.comm", "--ranks", "1..1000000000000"]) == 2
    assert "more than 1,000 numbers" in capsys.readouterr().err
    assert run_command(["check", "allreduce_ring", "--ranks", "2..1000"]) == 2
    err = capsys.readouterr().err
    assert "for 999 numbers of ranks, more than the 160,000,000 of one sweep" in err
    assert int(re.findall(r"up to --ranks (\d+) would fit", err)[0]) in range(400, 500)


@pytest.mark.parametrize("name", ["allreduce_ring", "allgather_hamilton", "rotation_ring", "broadcast_tree"])
def test_moves_are_estimated(name: str) -> None:
    """The estimate of a schedule's moves is near what they are."""
    path = resources.shipped_file(name)
    assert path is not None
    files = compiler.read(path)
    decl = compiler.choose_kind(files, None, ScheduleDecl)
    growth = budget.estimate(files, decl, Target(None, None, ()))
    assert growth is not None
    moves, turns = moves_of(resolve.resolve(files, decl, 61, switch(61), {}))
    assert 0.8 < growth.moves.at(61) / moves < 1.25
    assert 0.7 < growth.turns.at(61) / turns < 1.4


@pytest.mark.parametrize("words", [["allreduce_ring"], ["rotation_ring"], ["qkv"], ["experts"], ["spanning"]])
def test_too_many_bytes(words: list[str], capsys: Capture) -> None:
    """A run that has no room is refused before it takes any, with what it takes, what there is, and what would fit."""
    tracemalloc.start()
    assert run_command(["run", *words, "--bytes", "100GB"]) == 2
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000_000
    said = r"usage: --bytes 100 GB: \d ranks take about [\d.,e+]+ .B of memory here, and [\d.]+ .B can be had; "
    assert re.fullmatch(said + r"--bytes \d+.?B? would fit\n", capsys.readouterr().err)


def test_what_would_fit_fits(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """The size that is named runs in the memory that there is."""
    monkeypatch.setattr(memory, "room", lambda: 50_000_000)
    assert run_command(["run", "allreduce_ring", "--ranks", "2", "--bytes", "1GB"]) == 2
    (fit,) = re.findall(r"--bytes (\w+) would fit", capsys.readouterr().err)
    tracemalloc.start()
    assert run_command(["run", "allreduce_ring", "--ranks", "2", "--bytes", fit]) == 0
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50_000_000


# --- how a process ends -----------------------------------------------------------------------------------------------


def started(words: str, **options: Any) -> subprocess.Popen[str]:
    """`commdsl WORDS` in a shell, so that streams can be closed and joined."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f"exec {shlex.quote(sys.executable)} -m commdsl {words}"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A shell that started the tests in the background has left SIGINT ignored, which children would inherit.
    streams |= {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    return subprocess.Popen(["bash", "-c", command], env=environment, **{**streams, **options})


@pytest.mark.parametrize("seconds", [0.01, 0.05, 0.1, 1.5])
def test_interrupted(seconds: float) -> None:
    """Ctrl-C at any point ends it before it has said anything, without a traceback."""
    code = (
        "import signal, sys; sys.argv[1:] = ['check', 'allreduce_ring', '--ranks', '2..400']\n"
        "signal.signal(signal.SIGALRM, signal.default_int_handler)\n"
        "from commdsl.__main__ import main\n"
        f"signal.setitimer(signal.ITIMER_REAL, {seconds})\n"
        "main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)

    assert done.stdout == ""
    # Python itself ends by the signal where it was interrupted in `exec`: a shell has 130 for both.
    assert done.returncode in (130, -signal.SIGINT)
    assert done.stderr in ("", "\ninterrupted\n")


def test_interrupted_processes() -> None:
    """So do the processes of a run, which a terminal interrupts with it: none of its ranks outlives it."""
    process = started("run mine.comm --ranks 3 --bytes 100MB --processes", start_new_session=True)
    while len(ranks := running(process.pid)) < 3:
        assert process.poll() is None
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate()

    assert (process.returncode, out, err) == (130, "", "\ninterrupted\n")
    while any(map(is_alive, ranks)):  # those that it was about to note end by the signal alone, in their own time
        time.sleep(0.01)


def is_alive(pid: str) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def running(pid: int) -> list[str]:
    """The host ranks that a process has started and not yet waited for."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            found += [child] if Path(f"/proc/{child}/comm").read_text() == "runner\n" else []
    return found


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("list --json | head -c 1 > first; exit ${PIPESTATUS[0]}", 0, ""),
        ("--help | true; exit ${PIPESTATUS[0]}", 0, ""),
        ("list > /dev/full", 2, "usage: No space left on device\n"),
        ("check mine.comm >&-", 0, ""),
        ("fmt - <&-", 0, ""),
    ],
)
def test_streams(words: str, code: int, said: str) -> None:
    """A reader that has gone is no fault, a full disk is one in a line, and what is closed goes nowhere."""
    process = started(words)
    _, err = process.communicate()

    assert (process.returncode, err) == (code, said)


RUN = "run mine.comm --ranks 2 --bytes 1000"


@pytest.mark.parametrize(
    ("limit", "compiler", "said"),
    [
        ("ulimit -n 12;", "", "error[C972]: the host compiler had too few file descriptors"),
        ("", "echo 'cc1plus: No space left on device' >&2; exit 1", "error[C970]: the host compiler had no room"),
        ("", "echo 'Cannot create temporary file in /x/' >&2; exit 1", "error[C970]: the host compiler had no room"),
    ],
)
def test_no_room_for_the_compiler(limit: str, compiler: str, said: str, tmp_path: Path) -> None:
    """A full folder for temporary files, or too few descriptors, is no bug: a line with a code says what to change."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COMMDSL_CACHE_DIR": str(tmp_path / "own")}
    if compiler:
        fake = tmp_path / "c++"
        fake.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "c++ 1.0" && exit 0\n{compiler}\n')
        fake.chmod(0o755)
        environment["CXX"] = str(fake)
    command = f"{limit} exec {shlex.quote(sys.executable)} -m commdsl {RUN}"
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert done.stderr.startswith(f"usage: {said}")
    assert done.stderr.count("\n") == 1


def test_plain_terminals() -> None:
    """Without UTF-8, width or colour the same is said."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "0", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "commdsl", "run", "mine.comm", "--ranks", "2", "--bytes", "100"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)

    assert "\\u2713 every contribution arrives exactly once" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_bug_says_what_to_send(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Only what nobody expected is called a bug, with the command line and the versions to send."""

    def broken(*said: object) -> None:
        raise InternalError("a law of ours is broken")

    monkeypatch.setattr(compiler, "check_declared", broken)
    assert run_command(["check", "mine.comm", "--ranks", "2"]) == 4
    err = capsys.readouterr().err
    assert "this is a bug in commdsl" in err
    assert "commdsl check mine.comm --ranks 2" in err
    assert re.search(r"commdsl \d[\d.]*, Python 3", err)


# --- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(app.commands))
def test_examples_run(name: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The help of every command ends with a command line that runs as it stands."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))  # where an editor ends at once
    assert run_command([name, "--help"]) == 0
    (example,) = re.findall(r"Example:\n +(.*)\n$", capsys.readouterr().out)
    assert run_command(["new", "allreduce", "my_ring.comm"]) == 0
    words = shlex.split(example.partition("commdsl ")[2])
    assert words[0] == name
    code = run_command(words)
    if example.startswith("torchrun"):  # here it is run without
        assert "one process a rank is needed" in capsys.readouterr().err
    else:
        assert code == 0 or words == ["doctor"], capsys.readouterr().err  # which finds what this machine has


@pytest.mark.parametrize("name", sorted(app.commands))
def test_every_option_says_what_it_does(name: str) -> None:
    """Each option has a text; one with a default shows it."""
    for param in app.commands[name].params:
        if isinstance(param, click.Option):
            assert param.help, param.name
            has_default = not param.is_flag and not param.multiple and param.default is not None
            assert not has_default or param.show_default or "UNSET" in repr(param.default).upper(), param.name


def test_readme_names_every_command(capsys: Capture) -> None:
    """The README's table has a row for every command, and no other; so has the help."""
    text = (ROOT / "README.md").read_text()
    table = re.findall(r"^\| `commdsl (\w+)", text, re.MULTILINE)
    assert sorted(table) == sorted(app.commands)
    assert run_command(["--help"]) == 0
    shown = capsys.readouterr().out.partition("Commands:")[2]
    assert re.findall(r"^  (\w+) ", shown, re.MULTILINE) == list(app.commands)
    assert "..." not in shown.replace("rotation, ...", "")
