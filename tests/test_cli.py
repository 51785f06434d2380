"""The command line: exit codes, what goes to which stream, JSON, and what each command leaves behind.

Assumes a checkout. Runs most commands in this process; a whole process only where start-up is the matter.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from commdsl import compiler
from commdsl.build import arena, host, host_keys, host_rows, host_run
from commdsl.commands import new, output, trial
from commdsl.commands.arguments import UsageError, parse_bytes, parse_param, parse_ranks
from commdsl.commands.cli import run_command
from commdsl.commands.report import ratio_text
from commdsl.cost.timeline import timeline
from commdsl.language.syntax import DispatchDecl, PlanDecl, ScheduleDecl

ROOT = Path(__file__).parent.parent
RING = "schedules/collectives/allreduce_ring.comm"
ROTATION = "schedules/attention/rotation_hamilton.comm"
TWO_LEVEL = "schedules/collectives/allreduce_two_level.comm"
QKV = "schedules/dispatch/qkv.comm"
SPANNING = "schedules/dispatch/spanning.comm"
EXPERTS = "schedules/ep/experts.comm"
FAULTY = """schedule lost for P ranks {
  inout x[P]
  ensure allreduce(x)
  each r { put x[r] -> x[r] @ (r + 1) % P }
}
"""

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def faulty(tmp_path: Path) -> str:
    path = tmp_path / "lost.comm"
    path.write_text(FAULTY)
    return str(path)


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("8", (8,)), ("2,4,8", (2, 4, 8)), ("2..5", (2, 3, 4, 5)), ("2..3, 8,3", (2, 3, 8))],
)
def test_ranks(text: str, ranks: tuple[int, ...]) -> None:
    """--ranks is a number, a list, a range with both ends, or a mixture; each number counts once."""
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "eight", "0", "8..2", "2...4", "-1"])
def test_wrong_ranks(text: str) -> None:
    """Anything else is a usage error."""
    with pytest.raises(UsageError):
        parse_ranks(text)


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("4096", 4096), ("64KB", 65536), ("1 mb", 1 << 20), ("1.5KB", 1536), ("2GB", 2 << 30)]
)
def test_bytes(text: str, size: int) -> None:
    """--bytes has binary units."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "1k", "1.5", "-1", "1TB", "1MB/s"])
def test_wrong_bytes(text: str) -> None:
    """A size that is no whole number of bytes, or has no known unit, is a usage error."""
    with pytest.raises(UsageError):
        parse_bytes(text)


def test_params() -> None:
    """A parameter is NAME=VALUE with a whole number."""
    assert parse_param("K=-4") == ("K", -4)
    for word in ("K=", "=3", "K=x", "2K=3"):
        with pytest.raises(UsageError):
            parse_param(word)


# --- check ------------------------------------------------------------------------------------------------------------


def test_check(capsys: Capture) -> None:
    """A right file exits 0, says for how many ranks it was proved, and leaves standard error empty."""
    assert run_command(["check", RING]) == 0
    out, err = capsys.readouterr()

    assert "allreduce_ring: proved for 8 ranks on switch" in out
    assert err == ""


def test_check_sweep_with_a_mistake(tmp_path: Path, capsys: Capture) -> None:
    """Numbers of ranks that a schedule is not for are left out of a sweep of a faulty one, too."""
    path = tmp_path / "halves.comm"
    path.write_text("schedule s for P ranks where P % 2 == 0 { inout x ensure allreduce(x) each r { put y -> x } }")
    assert run_command(["check", str(path), "--ranks", "2..5"]) == 1
    err = capsys.readouterr().err
    assert "C101" in err
    assert "the same for 4\n" in err
    assert "C501" not in err


def test_check_sweep(capsys: Capture) -> None:
    """In a sweep, numbers of ranks that the schedule does not admit are left out."""
    assert run_command(["check", ROTATION, "--ranks", "2..7"]) == 0

    assert "proved for 2, 3, 5, 7 ranks" in capsys.readouterr().out


def test_check_not_admitted(capsys: Capture) -> None:
    """A single number that the schedule does not admit is a diagnostic, and so is a sweep of only such numbers."""
    assert run_command(["check", ROTATION, "--ranks", "4"]) == 1
    assert "C501" in capsys.readouterr().err
    assert run_command(["check", ROTATION, "--ranks", "4,6"]) == 1
    assert "C501" in capsys.readouterr().err


def test_check_for_the_nearest(tmp_path: Path, capsys: Capture) -> None:
    """Where nobody says for how many ranks, it is 8 or the nearest that a schedule is for, with its parameters."""
    assert run_command(["check", "attention_pair"]) == 0
    assert run_command(["check", "allgather_ring", "attention_hamilton"]) == 0
    path = tmp_path / "shift.comm"
    path.write_text("""schedule shift(K = 16) for P ranks where P == K {
      input x output y ensure permutation(x -> y) r -> (r + 1) % P each r { put x -> y @ (r + 1) % P }
    }""")
    assert run_command(["check", str(path)]) == 0
    assert run_command(["check", str(path), "K=5"]) == 0
    found = re.findall(r"(\w+): proved for (\d+) ranks", capsys.readouterr().out)
    assert dict(found[:3]) == {"attention_pair": "2", "allgather_ring": "8", "attention_hamilton": "8"}
    assert found[3:] == [("shift", "16"), ("shift", "5")]


def test_check_folders(tmp_path: Path, capsys: Capture) -> None:
    """Of a folder every .comm file below it is checked, in the order of names, whatever is wrong with one of them."""
    ring = Path(RING).read_text(encoding="utf-8")
    for name in ("b/second.comm", "a/first.comm", "third.comm", ".hidden/no.comm", "b/notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(ring.replace("allreduce_ring", Path(name).stem), encoding="utf-8")
    assert run_command(["check", str(tmp_path), "--ranks", "2"]) == 0
    proved = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert proved == ["first:", "second:", "third:"]
    (tmp_path / "a" / "first.comm").write_text("schedule first for", encoding="utf-8")
    (tmp_path / "b" / "second.comm").write_text("schedule second {", encoding="utf-8")
    assert run_command(["check", str(tmp_path), "--ranks", "2", "--concise"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("✓ third")
    assert [Path(line.partition(":")[0]).name for line in err.splitlines()] == ["first.comm", "second.comm"]


def test_check_an_empty_folder(tmp_path: Path, capsys: Capture) -> None:
    """A folder without a .comm file is an error that says so."""
    (tmp_path / "notes.md").write_text("nothing")
    assert run_command(["check", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"usage: {tmp_path} is a folder with no .comm file in it\n"


def test_use_of_a_folder(tmp_path: Path, capsys: Capture) -> None:
    """A folder is there, but is no file."""
    (tmp_path / "box.comm").mkdir()
    path = tmp_path / "a.comm"
    path.write_text('use "box.comm"')
    assert run_command(["check", str(path)]) == 1
    assert "C190" in (said := capsys.readouterr().err)
    assert "this is a folder" in said


def test_check_fault(faulty: str, capsys: Capture) -> None:
    """A wrong file exits 1; every diagnostic goes to standard error, and nothing to standard output."""
    assert run_command(["check", faulty, "--ranks", "2,4"]) == 1
    out, err = capsys.readouterr()

    assert out == ""
    assert re.search(r"^error\[C\d{3}\]: ", err)
    assert "the same for 4" in err
    assert err.count("error[") == 1
    assert err.rstrip().endswith("1 error")


def test_check_concise(faulty: str, capsys: Capture) -> None:
    """--concise is one line per diagnostic."""
    assert run_command(["check", faulty, "--concise"]) == 1
    assert re.fullmatch(r".*lost\.comm:\d+:\d+: error\[C\d{3}\]: .*\n", capsys.readouterr().err)


def test_check_plans(capsys: Capture) -> None:
    """Plans and dispatches are proved beside schedules: a plan for its own ranks, a dispatch for those asked for."""
    files = ["schedules/dispatch/spanning.comm", "schedules/dispatch/qkv.comm"]
    assert run_command(["check", *files, "--ranks", "2,4"]) == 0
    out, err = capsys.readouterr()

    assert "spanning: proved for 4 ranks (3 documents, 15 shards" in out
    assert "qkv: proved for 2, 4 ranks on switch (3 tensors, q, k, v back" in out
    assert err == ""
    assert run_command(["check", *files, "--json"]) == 0
    proved = json.loads(capsys.readouterr().out)["proved"]
    assert [fact.get("plan") or fact.get("dispatch") for fact in proved] == ["spanning", "qkv"]


def test_check_one(capsys: Capture) -> None:
    """--schedule names one declaration of any kind."""
    assert run_command(["check", QKV, "--schedule", "qkv"]) == 0
    assert capsys.readouterr().out.count("proved") == 1
    assert run_command(["check", QKV, "--schedule", "qkv_back"]) == 1
    assert "C191" in capsys.readouterr().err


def test_check_faulty_plan(tmp_path: Path, capsys: Capture) -> None:
    """A plan that is wrong is shown with the document at fault, and nothing else is said."""
    path = tmp_path / "lost.comm"
    path.write_text("plan lost for 2 ranks { rank 0 { doc 5 -> 2 } }")
    assert run_command(["check", str(path)]) == 1
    out, err = capsys.readouterr()

    assert out == ""
    assert "C603" in err
    assert err.rstrip().endswith("1 error")


def test_check_json(faulty: str, capsys: Capture) -> None:
    """--json is one value on standard output, for the good and the bad."""
    assert run_command(["check", RING, faulty, "--json"]) == 1
    value = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    cost = value["proved"][0]["cost"]
    assert cost["seconds_per_byte"] == pytest.approx(cost["least_seconds_per_byte"])
    assert (cost["ratio"] > 1, cost["bound"]) == (True, "14 n between ranks")

    assert [(one["schedule"], one["ranks"], one["steps"]) for one in value["proved"]] == [("allreduce_ring", 8, 14)]
    assert [one["severity"] for one in value["diagnostics"]] == ["error"]


def test_check_json_of_a_detour(tmp_path: Path, capsys: Capture) -> None:
    """What nothing has to move for takes no number of times the least: null, as JSON has no infinity."""
    path = tmp_path / "detour.comm"
    steps = "each r { put x -> z @ (r + 1) % P } each r { put z -> y @ (r - 1) % P }"
    path.write_text(
        f"schedule s for P ranks {{ input x scratch z output y ensure permutation(x -> y) r -> r {steps} }}"
    )
    assert run_command(["check", str(path), "--json"]) == 0
    cost = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["proved"][0]["cost"]

    assert (cost["bound"], cost["ratio"]) == ("nothing has to move", None)
    assert ratio_text(compiler.check(path).report) == "none, as the least is nothing"


def test_check_syntax_fault(tmp_path: Path, capsys: Capture) -> None:
    """A file that does not parse is a diagnostic, too."""
    path = tmp_path / "broken.comm"
    path.write_text("schedule s for P ranks {\n  inout x[P\n}\n")
    assert run_command(["check", str(path)]) == 1
    assert "broken.comm" in capsys.readouterr().err


def test_check_machine(capsys: Capture) -> None:
    """--on alone means all ranks of that machine; a file without a schedule is read all the same."""
    assert run_command(["check", TWO_LEVEL, "--on", "h200_2x8"]) == 0
    assert "proved for 16 ranks on h200_2x8" in capsys.readouterr().out
    assert run_command(["check", "schedules/topologies/dgx1.comm"]) == 0
    assert "no schedule, dispatch or plan" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["check"],
        ["check", "nowhere.comm"],
        ["check", RING, "--ranks", "many"],
        ["check", RING, "K=x"],
        ["check", RING, "--nonsense"],
        ["run", "schedules"],
        ["nonsense"],
        ["run", RING, "--dtype", "float7"],
        ["run", RING, "--op", "xor"],
        ["run", RING, "--dtype", "float8_e5m2"],
        ["run", RING, "--bytes", "much"],
        ["run", RING, "--sanitize", "--processes"],
        ["run", RING, ROTATION],
        ["run", "schedules/topologies/dgx1.comm"],
        ["show", RING, "--stage", "ptx"],
        ["compile", RING, "--ranks", "2,4"],
        ["compile", "--ranks", "4"],
        ["explain", "C999"],
        ["new", "allreduc"],
        ["fmt", "nowhere.comm"],
    ],
)
def test_usage(words: list[str], capsys: Capture) -> None:
    """A wrong command line exits 2 and says on standard error what is expected."""
    assert run_command(words) == 2
    out, err = capsys.readouterr()

    assert out == ""
    assert err != ""


# --- show, compile, fmt, explain, new, doctor -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("syntax", ["ScheduleDecl", "Each"]),
        (
            "ir",
            ["schedule allreduce_ring for 4 ranks", "step 6 s=2", "rank 3: x[2] @ 3 -> x[2] @ 0", "ensure allreduce"],
        ),
        ("plan", ["plan allreduce_ring for 4 ranks", "rank 3", "waits for rank", "signals"]),
        ("cuda", ["@generated by commdsl", "COMMDSL_KERNEL"]),
        ("host", ["-std=c++17", "COMMDSL_KERNEL"]),
    ],
)
def test_show(stage: str, words: list[str], capsys: Capture) -> None:
    """Every stage can be printed, as text and as JSON."""
    assert run_command(["show", RING, "--stage", stage, "--ranks", "4"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in words)

    assert run_command(["show", RING, "--stage", stage, "--ranks", "4", "--json"]) == 0
    assert stage in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("syntax", ["DispatchDecl", "BackDecl"]),
        (
            "ir",
            ["dispatch qkv for 4 ranks", "route reader of k, v", "(query, shard)", "put packed", "back q, k, v"],
        ),
        ("plan", ["plan qkv for 4 ranks", "tile 8192 bytes  put packed", "tensor 2 v", "push: every lane"]),
        ("cuda", ["@generated by commdsl from qkv.comm", "COMMDSL_KERNEL(commdsl_qkv, Plan)"]),
        ("host", ["-std=c++17", "COMMDSL_KERNEL"]),
    ],
)
def test_show_dispatch(stage: str, words: list[str], capsys: Capture) -> None:
    """So can every stage of the dispatches of a file, or of one of them."""
    assert run_command(["show", QKV, "--stage", stage, "--ranks", "4", "--tune", "put=packed"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in words)

    assert run_command(["show", QKV, "--stage", stage, "--ranks", "2,4", "--schedule", "qkv", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    if stage != "syntax":
        assert [(one["dispatch"], one["ranks"], one["stage"]) for one in shown] == [
            ("qkv", ranks, stage) for ranks in (2, 4)
        ]


def test_show_keys(capsys: Capture) -> None:
    """A dispatch by keys says how often a row travels and what with it, of the file and of all that is launched."""
    words = {
        "ir": [
            "each of its keys, once per rank",
            "each expert's rows from a multiple of 8",
            "weight: a float32 beside",
        ],
        "plan": ["plan experts_once_again", "from which the others are filled", "beside it origins, weight, mates"],
        "cuda": ["commdsl_experts_once_values", "kAligned = 8;", "commdsl::fill(here, peers);"],
    }
    for stage, said in words.items():
        once = ["show", "schedules/ep/experts_once.comm", "--stage", stage, "--ranks", "2", "E=4", "A=8"]
        assert run_command(once) == 0
        text = capsys.readouterr().out
        assert all(one in text for one in said)
    for stage in ("ir", "plan"):
        assert run_command(["show", "schedules/ep/experts_float8.comm", "--stage", stage, "--ranks", "2", "B=64"]) == 0
        assert "x as float8 by 64" in capsys.readouterr().out


def test_run_in_float8(capsys: Capture) -> None:
    """What goes into float8 is compared with the simulation; other element types than it knows are refused."""
    run = ["run", "schedules/ep/experts_float8.comm", "--ranks", "2", "E=4"]
    assert run_command(run) == 0
    assert "equal to the simulation" in capsys.readouterr().out
    assert run_command([*run, "--dtype", "int32"]) == 2


def test_show_fault(faulty: str, capsys: Capture) -> None:
    """A stage that cannot be reached shows the fault instead."""
    assert run_command(["show", faulty, "--stage", "plan"]) == 1
    assert "error[" in capsys.readouterr().err


def test_compile(tmp_path: Path, capsys: Capture) -> None:
    """compile writes the kernel and a module that can be imported without torch; --check then finds them current."""
    words = ["compile", RING, "--ranks", "4", "--out", str(tmp_path)]
    assert run_command([*words, "--check"]) == 1
    assert not list(tmp_path.iterdir())
    assert run_command(words) == 0
    assert run_command([*words, "--check"]) == 0
    code = "import sys, allreduce_ring; print(list(allreduce_ring.SOURCE), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)

    assert sorted(path.name for path in tmp_path.glob("*.*")) == ["allreduce_ring.cu", "allreduce_ring.py"]
    assert "@generated" in (tmp_path / "allreduce_ring.cu").read_text()
    assert done.stdout.split() == ["['allreduce_ring.comm']", "False"]


def test_compile_dispatches_and_plans(tmp_path: Path, capsys: Capture) -> None:
    """compile writes the kernel of a dispatch and what makes its Dispatchers, and a module with a plan's Metadata."""
    words = ["compile", QKV, SPANNING, "--ranks", "2", "--tune", "put=packed", "--out", str(tmp_path)]
    assert run_command([*words, "--check"]) == 1
    assert not list(tmp_path.iterdir())
    assert run_command(words) == 0
    assert run_command([*words, "--check"]) == 0
    code = (
        "import sys, spanning, qkv\n"
        "print(*spanning.SOURCE, *qkv.SOURCE, 'torch' in sys.modules)\n"
        "import commdsl\n"
        "from commdsl import dispatch\n"
        "from spanning import spanning\n"
        "from qkv import qkv\n"
        "print(spanning.fwd_q.world_size, spanning.fwd_k.dst_rank.shape[2])\n"
        "(group,) = commdsl.threads(1)\n"
        "limits = dispatch.Limits(rows=1, queries=1, widths=(2,))\n"
        "print(qkv(limits, group=group).plan.push.packed, qkv(limits, group=group, put='rows').plan.push.packed)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )

    assert sorted(path.name for path in tmp_path.glob("*.*")) == [
        "qkv.cu",
        "qkv.py",
        "spanning.py",
    ]
    assert "kNumRanks = 2;" in (tmp_path / "qkv.cu").read_text()
    assert done.stdout.split() == ["spanning.comm", "qkv.comm", "False", "4", "8", "True", "False"], done.stderr


def test_compiled_are_all(tmp_path: Path, capsys: Capture) -> None:
    """generated/ has every shipped declaration, but what is not built yet: that is refused by name."""
    made = {path.stem for path in (ROOT / "generated").glob("*.py")}
    declared = {
        decl.name.text: path
        for path in (ROOT / "schedules").rglob("*.comm")
        for decl in compiler.read(path)[0].items
        if isinstance(decl, ScheduleDecl | DispatchDecl | PlanDecl)
    }

    assert made <= declared.keys()
    for name in declared.keys() - made:
        assert run_command(["compile", str(declared[name]), "--out", str(tmp_path)]) == 1
        assert re.findall(r"error\[(C\d+)\]", capsys.readouterr().err) == ["C590"]


def test_compile_one(tmp_path: Path, capsys: Capture) -> None:
    """--schedule names one declaration of any kind; --on stays with the dispatch; words nobody hears are refused."""
    assert run_command(["compile", QKV, "--schedule", "qkv", "--on", "h200_1x8", "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["qkv.cu", "qkv.py"]
    assert 'name="qkv", on="h200_1x8")' in (tmp_path / "qkv.py").read_text()
    few = tmp_path / "few.comm"
    few.write_text(Path(QKV).read_text().replace("qkv for", "few(N) for").replace("by sum", "by sum   tune { sms N }"))
    assert run_command(["compile", str(few), "N=4", "--tune", "tile=4KB", "--out", str(tmp_path)]) == 0
    assert "name=\"few\", params={'N': 4}, tune={'tile': 4096})" in (tmp_path / "few.py").read_text()
    assert run_command(["compile", str(few), "--out", str(tmp_path)]) == 1
    assert run_command(["compile", SPANNING, "--ranks", "4", "--out", str(tmp_path)]) == 2
    assert run_command(["compile", SPANNING, "--tune", "put=rows", "--out", str(tmp_path)]) == 2
    assert run_command(["compile", QKV, "--tune", "lanes=4", "--out", str(tmp_path)]) == 1
    assert run_command(["compile", QKV, "--schedule", "nobody", "--out", str(tmp_path)]) == 1
    assert run_command(["show", QKV, "--tune", "lanes=4"]) == 1
    assert run_command(["show", SPANNING, "--stage", "cuda"]) == 2


def test_compile_faulty_plan(tmp_path: Path, capsys: Capture) -> None:
    """A plan with a fault becomes no file."""
    path = tmp_path / "lost.comm"
    path.write_text("plan lost for 2 ranks { rank 0 { doc 5 -> 2 } }")
    assert run_command(["compile", str(path), "--out", str(tmp_path)]) == 1
    assert "C603" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["lost.comm"]


def test_tune(tmp_path: Path, capsys: Capture) -> None:
    """--tune stands in place of what the file tunes, in every command that lowers it; a wrong value is a diagnostic."""
    tune = ["--ranks", "2", "--tune", "lanes=3", "--tune", "tile=4KB"]
    assert run_command(["check", RING, *tune]) == 0
    assert run_command(["run", RING, *tune, "--bytes", "1000"]) == 0
    assert run_command(["show", RING, *tune, "--stage", "cuda"]) == 0
    tuned = capsys.readouterr().out
    assert run_command(["show", RING, *tune[:2], "--stage", "cuda"]) == 0
    assert not tuned.endswith(capsys.readouterr().out)
    assert run_command(["compile", RING, *tune, "--out", str(tmp_path)]) == 0
    assert "tune={'lanes': 3, 'tile': 4096}" in (tmp_path / "allreduce_ring.py").read_text()
    assert run_command(["check", RING, "--tune", "lanes=5000"]) == 1
    assert "error[C505]" in capsys.readouterr().err
    assert run_command(["check", RING, "--tune", "lanes"]) == 2


def test_compiled_module_gives_the_op() -> None:
    """`from generated.allreduce_ring import allreduce_ring` is the torch op, and it works on ranks of one process."""
    code = (
        "import threading, torch, commdsl\n"
        "from generated.allreduce_ring import allreduce_ring\n"
        "names, sums = commdsl.threads(2), [None, None]\n"
        "def call(r): sums[r] = allreduce_ring(torch.full((5,), r + 1.0), group=names[r])\n"
        "ranks = [threading.Thread(target=call, args=(r,)) for r in range(2)]\n"
        "[rank.start() for rank in ranks]; [rank.join() for rank in ranks]\n"
        "print([float(one[0]) for one in sums])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )

    assert done.stdout.strip() == "[3.0, 3.0]", done.stderr


def test_generated_is_current(capsys: Capture) -> None:
    """generated/ is what `commdsl compile` makes of the shipped schedules."""
    assert run_command(["compile", "--check"]) == 0, capsys.readouterr().out


def test_standard_input(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-` is the text that comes over standard input, which uses files of the folder at hand; it is held to the laws of
    files, and formatted to standard output.
    """

    def given(*words: str, text: bytes) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        code = run_command([*words, "-"])
        return code, *capsys.readouterr()

    ring = (ROOT / RING).read_bytes()
    (tmp_path / "beside.comm").write_bytes(ring)
    calls = b'use "beside.comm" schedule s for P ranks { inout x[P] ensure allreduce(x) do allreduce_ring(x) }'
    monkeypatch.chdir(tmp_path)
    assert given("check", text=calls)[1].startswith("✓ s: proved for 8 ranks")
    assert "standard input:1:1" in given("check", text=b"sched s")[2]
    assert "byte 0xff in line 2" in given("check", text=b"\n\xff")[2]
    assert given("check", text=b"")[0] == 2
    assert given("fmt", text=b"\xef\xbb\xbf" + ring.replace(b"\n", b"\r\n"))[0] == 0


def test_fmt(tmp_path: Path, capsys: Capture) -> None:
    """fmt rewrites what is not canonical, --check only names it, and a second run changes nothing."""
    path = tmp_path / "untidy.comm"
    text = (ROOT / RING).read_text()
    path.write_text(text.replace("  inout x[P]", "    inout   x[ P ]"))
    assert run_command(["fmt", "--check", str(tmp_path)]) == 1
    assert "would format" in capsys.readouterr().out
    assert run_command(["fmt", str(path)]) == 0
    assert run_command(["fmt", "--check", str(path)]) == 0

    assert path.read_text() == text


def test_shipped_files_are_canonical(capsys: Capture) -> None:
    """Every shipped file and every starter is formatted."""
    assert run_command(["fmt", "--check", "schedules", "commdsl/commands/starters"]) == 0, capsys.readouterr().out


def test_explain(capsys: Capture) -> None:
    """explain prints the page of a code, in either case; without a code, all titles."""
    assert run_command(["explain", "c302"]) == 0
    assert capsys.readouterr().out.startswith("# C302: ")
    assert run_command(["explain"]) == 0
    assert "C302  " in capsys.readouterr().out


@pytest.mark.parametrize("collective", new.collectives())
def test_new(collective: str, tmp_path: Path, capsys: Capture) -> None:
    """The starter of every collective is proved as it is, runs right, and does not overwrite."""
    path = tmp_path / f"my_{collective}.comm"
    assert run_command(["new", collective, str(path)]) == 0
    assert run_command(["check", str(path), "--ranks", "2,3,8"]) == 0
    assert capsys.readouterr().err == ""
    assert run_command(["run", str(path), "--ranks", "3", "--bytes", "1000"]) == 0
    assert run_command(["new", collective, str(path)]) == 2


@pytest.mark.parametrize(("kind", "words"), [("plan", ["show"]), ("dispatch", ["compile", "--out", "."])])
def test_new_plan_and_dispatch(
    kind: str, words: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The starters of plans and dispatches are proved as they are, too, and what is said to come next works."""
    monkeypatch.chdir(tmp_path)
    assert run_command(["new", kind]) == 0
    assert f"next: commdsl {words[0]} my_{kind}.comm" in capsys.readouterr().out
    assert run_command(["check", f"my_{kind}.comm"]) == 0
    assert f"my_{kind}: proved for {4 if kind == 'plan' else 8} ranks" in capsys.readouterr().out
    assert run_command([words[0], f"my_{kind}.comm", *words[1:]]) == 0
    assert capsys.readouterr().err == ""
    assert run_command(["new", kind, "--json", f"other-{kind}.comm"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": f"other-{kind}.comm", kind: f"other_{kind}"}


def test_doctor(capsys: Capture) -> None:
    """doctor exits 0 on any machine, and names what it looked at."""
    assert run_command(["doctor", "--json"]) == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}

    assert {
        "C++ compiler",
        "ThreadSanitizer",
        "NVRTC",
        "nvJitLink",
        "torch",
        "CuPy",
        "GPUs",
        "cache folder",
    } <= found.keys()
    assert all(one["state"] == "ok" or one["todo"] for one in found.values())


# --- run --------------------------------------------------------------------------------------------------------------


def test_run(capsys: Capture) -> None:
    """run prints what was proved, that the kernel is right, the cost and the timeline."""
    assert run_command(["run", RING, "--ranks", "4", "--bytes", "10KB"]) == 0
    text = capsys.readouterr().out

    assert "proved for 4 ranks on switch" in text
    assert "✓ every contribution arrives exactly once" in text
    assert "equal to the oracle, bit for bit" in text
    assert "1.5 n" in text
    assert "x[0] +→ 1" in text
    assert not re.search(r"C\d{3}", text)  # laws are told by what they say


@pytest.mark.parametrize("options", [["--processes"], ["--dtype", "bfloat16", "--op", "avg"], ["--bytes", "4"]])
def test_run_options(options: list[str], capsys: Capture) -> None:
    """The other ways to run are right, too."""
    assert run_command(["run", RING, "--ranks", "3", "--bytes", "10KB", "--json", *options]) == 0
    (done,) = json.loads(capsys.readouterr().out)["runs"]

    assert done["kernel"]["ran"] is True
    assert done["kernel"]["right"] is True


@pytest.mark.parametrize(
    ("words", "least"),
    [
        ([RING, "--bytes", "0"], "4 B"),
        ([RING, "--bytes", "3"], "4 B"),
        ([RING, "--bytes", "7", "--dtype", "float64"], "8 B"),
        (["alltoall_direct", "--bytes", "7"], "8 B"),
        ([ROTATION, "--bytes", "1"], "4 B"),
        (["matmul_reducescatter", "--bytes", "3"], "4 B"),
        (["allgather_uneven", "--bytes", "3"], "8 B"),
    ],
)
def test_run_of_nothing_is_refused(words: list[str], least: str, capsys: Capture) -> None:
    """Sizes at which no element would be compared are refused, with the smallest that is not."""
    ranks = "3" if words[0] == ROTATION else "2"
    assert run_command(["run", *words, "--ranks", ranks]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "nothing to move or compare" in err
    assert err.endswith(f"takes {least}\n")


def test_a_comparison_of_nothing_is_a_fault(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Whatever ran and was held to nothing is not right."""
    monkeypatch.setattr(trial, "compare", lambda *_: (0, ""))
    assert run_command(["run", RING, "--ranks", "2", "--bytes", "1KB"]) == 3
    assert "no byte was compared" in capsys.readouterr().out


LIMITED = """
import resource, sys
from commdsl.commands.cli import run_command
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
sys.exit(run_command(["run", "allreduce_ring", "--ranks", "32", "--bytes", "4KB", *sys.argv[1:]]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited by Linux alone")
def test_too_little_memory_says_what_takes_it() -> None:
    """A run that the machine has no room for says what takes how much, and how to take less; it exits 5."""
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert re.fullmatch(
        r"resources: the host ranks need 3\.\d\d GB of address space \(\d\.\d\d GB for the heap of all ranks.*\)"
        r"; [\d.]+ GB can be had, .*; fewer --ranks or --bytes take less, and so do fewer --tune lanes\n",
        done.stderr,
    )
    fewer = [sys.executable, "-c", LIMITED, "--tune", "lanes=2"]
    assert subprocess.run(fewer, capture_output=True, text=True, check=False).returncode == 0


def test_heaps_take_what_is_touched(capsys: Capture) -> None:
    """Heaps of ranks may be larger together than this machine is: pages that nobody touches take no room."""
    assert arena.Ground(size=1 << 42).made(None).size >= 1 << 42


@pytest.mark.parametrize("ends", ["residual t", "gelu, residual t", "swiglu, residual t", "bias b, residual t"])
def test_run_of_rows_that_came_with_a_residual(ends: str, tmp_path: Path, capsys: Capture) -> None:
    """The rows that are multiplied lie in a scratch buffer, which nobody gives, and a residual is added."""
    path = tmp_path / "came.comm"
    path.write_text(
        f"""schedule came for P ranks where P >= 2 {{
          input x  input w  input t  {"input b  " if "bias" in ends else ""}scratch a  output y
          ensure each r {{ y == matmul(x @ (r - 1) % P, w) with {ends} }}
          each r {{ put x -> a @ (r + 1) % P }}
          each r {{ compute matmul(a, w -> y) with {ends} }}
        }}"""
    )
    assert run_command(["run", str(path), "--ranks", "2", "--bytes", "4KB"]) == 0
    assert "equal to the oracle" in capsys.readouterr().out


def test_run_yields(capsys: Capture) -> None:
    """What a schedule hands to its caller is compared as well."""
    assert run_command(["run", ROTATION, "--ranks", "5", "--bytes", "1000", "--json"]) == 0
    (done,) = json.loads(capsys.readouterr().out)["runs"]

    assert done["kernel"]["compared_bytes"] >= 5 * 5 * 1000


def test_run_wrong_result(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """A kernel whose result differs from the oracle's exits 3 and says where."""
    real = host_run.run

    def wrong(*args: object, **options: object) -> host_run.HostResult:
        result = real(*args, **options)
        spoilt = result.outputs["x"][2].copy()
        spoilt.view("uint8")[40] ^= 1
        result.outputs["x"][2] = spoilt
        return result

    monkeypatch.setattr(host_run, "run", wrong)
    assert run_command(["run", RING, "--ranks", "3", "--bytes", "1000"]) == 3
    assert "`x` on rank 2 differs from the oracle in 1 bytes, first at byte 40" in capsys.readouterr().out


def test_run_timeout(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """A wait that times out exits 3 and names who waited, where, and who is missing."""
    real = host_run.run

    def without_one(*args: object, **options: object) -> host_run.HostResult:
        return real(*args, **options, absent={1}, timeout=0.5)

    monkeypatch.setattr(host_run, "run", without_one)
    assert run_command(["run", RING, "--ranks", "3", "--bytes", "1000"]) == 3
    assert re.search(r"✗ rank \d waited 0.5 s for rank 1 at .*rank 1 never entered the call", capsys.readouterr().out)


def test_run_fault_of_ours(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """An exception that nobody expected exits 4 and says that the file is not to blame."""

    def broken(*args: object, **options: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(host_run, "run", broken)
    assert run_command(["run", RING, "--ranks", "2"]) == 4
    assert "a bug in commdsl" in capsys.readouterr().err


PLANNED = """plan pair for 2 ranks { rank 0 { doc 5 -> [0 1] }   rank 1 { doc 3 -> 0 } }
dispatch move for P ranks {
  rows x[T]
  route home[S, C] for x
  place home by (source rank, shard)
  back x by sum
}
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([QKV, "--ranks", "3", "--json"], {"dispatch": "qkv", "ranks": 3}),
        ([QKV, "--ranks", "2", "--tune", "put=packed", "--processes"], {"dispatch": "qkv", "ranks": 2}),
        ([QKV, "--plan", SPANNING, "--dtype", "bfloat16"], {"dispatch": "qkv", "plan": "spanning", "ranks": 4}),
        ([SPANNING, "--bytes", "12"], {"plan": "spanning", "dispatch": "qkv", "ranks": 4}),
        ([EXPERTS, "--ranks", "3", "--dtype", "float16", "--bytes", "30"], {"dispatch": "experts", "ranks": 3}),
        ([EXPERTS, "--ranks", "2", "--processes"], {"dispatch": "experts", "ranks": 2}),
        (["schedules/ep/experts_once.comm", "--ranks", "3", "E=9", "A=4"], {"dispatch": "experts_once", "ranks": 3}),
        (["schedules/ep/experts_index.comm", "--ranks", "2", "E=6"], {"dispatch": "experts_index", "ranks": 2}),
        (["tests/two_nodes.comm", "--on", "pairs", "--ranks", "4"], {"dispatch": "experts_nodes", "ranks": 4}),
        (["schedules/dispatch/copies.comm"], {"plan": "copies", "dispatch": "rows", "ranks": 4}),
        (["schedules/dispatch/rows.comm", "--ranks", "1", "--dtype", "float16"], {"dispatch": "rows", "ranks": 1}),
        ([SPANNING, "--on", "h200_1x8"], {"plan": "spanning", "topology": "h200_1x8"}),
    ],
)
def test_run_rows(words: list[str], said: dict[str, object], capsys: Capture) -> None:
    """A dispatch runs there and back, by random tables or a plan; a plan by the dispatch that moves its rows."""
    assert run_command(["run", *words, *(() if "--json" in words else ("--json",))]) == 0
    (done,) = json.loads(capsys.readouterr().out)["runs"]

    assert said.items() <= done.items()
    assert done["proved"]
    assert done["kernel"]["ran"] is True
    assert done["kernel"]["right"] is True
    assert done["kernel"]["compared_bytes"] > 0
    assert done["cost"]["least_seconds"] >= 0


def test_run_rows_in_words(capsys: Capture) -> None:
    """The report of a dispatch has what that of a schedule has: what was proved, what ran, what it costs."""
    assert run_command(["run", SPANNING]) == 0
    text = capsys.readouterr().out

    assert "proved for 4 ranks on switch" in text
    assert "✓ the routes of a dispatch plan lose nothing" in text
    assert "rows of 64 B of float32, there and back by `spanning`, `qkv` with put rows" in text
    assert "bytes equal to the simulation, bit for bit" in text
    assert "B over switch, the most of any" in text


def test_run_sanitized_rows(capsys: Capture) -> None:
    """--sanitize watches rows, too."""
    assert run_command(["run", QKV, "--ranks", "2", "--sanitize"]) == 0
    assert "no race seen by ThreadSanitizer" in capsys.readouterr().out


def test_run_a_plan_and_its_dispatch(tmp_path: Path, capsys: Capture) -> None:
    """A dispatch runs by the plan of its own file, on its ranks; and a plan of it by the dispatch beside it."""
    path = tmp_path / "pair.comm"
    path.write_text(PLANNED)
    assert run_command(["run", str(path), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["plan"], run["dispatch"], run["ranks"]) for run in runs] == [("pair", "move", 2)] * 2
    assert run_command(["run", str(path), "--schedule", "move", "--ranks", "3", "--json"]) == 0
    (alone,) = json.loads(capsys.readouterr().out)["runs"]
    assert "plan" not in alone
    assert len(alone["tables"]) > 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([QKV, "--dtype", "int32"], "added up in one of float32"),
        ([QKV, "--op", "max"], "--op max is for schedules"),
        ([QKV, "--bytes", "6"], "an even number of whole elements of float32"),
        ([QKV, "--bytes", "0"], "an even number"),
        ([QKV, "--svg", "no.svg"], "--svg draws schedules"),
        ([QKV, "--plan", "schedules/dispatch/copies.comm"], "the plan sends some to several"),
        ([QKV, "--plan", SPANNING, "--ranks", "2"], "the plan is for 4 ranks, not for 2"),
        ([EXPERTS, "--plan", SPANNING], "it goes by keys, and a plan has none"),
        ([EXPERTS, "--dtype", "bfloat16"], "added up here in float32 or float16, not in bfloat16"),
        ([QKV, "--plan", "nowhere.comm"], "no such file: nowhere.comm"),
        ([RING, "--plan", SPANNING], "none is run"),
        ([SPANNING, "--ranks", "2"], "leave --ranks out"),
    ],
)
def test_run_rows_refused(words: list[str], said: str, capsys: Capture) -> None:
    """What rows have not is refused by name."""
    assert run_command(["run", *words]) == 2
    out, err = capsys.readouterr()

    assert out == ""
    assert said in err


def test_run_wrong_rows(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Rows that differ from the simulation's exit 3 and say where."""
    real = host_rows.run_calls

    def wrong(*args: object, **options: object) -> host_rows.Results:
        found = real(*args, **options)
        found[1][2][0][7, 3] ^= 1
        return found

    monkeypatch.setattr(host_rows, "run_calls", wrong)
    assert run_command(["run", SPANNING]) == 3
    said = "`v` on rank 0, back by `spanning`, differs from the simulation in 1 rows, first in row 7"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("way", ["there", "back"])
def test_run_wrong_rows_by_keys(way: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """So do rows by keys, on either way."""
    real = getattr(host_keys, way)

    def wrong(*args: object, **options: object) -> object:
        found = real(*args, **options)
        rows = found[0][1].rows[0] if way == "there" else found[0][1]
        rows[2, 3] += 1
        return found

    monkeypatch.setattr(host_keys, way, wrong)
    assert run_command(["run", EXPERTS, "--ranks", "2"]) == 3
    assert f"on rank 1, {way} by random keys, differ" in capsys.readouterr().out


def test_run_without_compiler(tmp_path: Path) -> None:
    """With no C++ compiler in PATH the interpreter runs, and one line says so; doctor says what to install."""
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "commdsl"]
    done = subprocess.run(
        [*command, "run", RING, "--ranks", "4"], env=environment, capture_output=True, text=True, cwd=ROOT, check=False
    )
    told = subprocess.run([*command, "doctor"], env=environment, capture_output=True, text=True, cwd=ROOT, check=False)
    has_wheel = "ziglang" in done.stdout

    assert done.returncode == 0, done.stderr
    assert has_wheel or sum("the interpreter alone" in line for line in done.stdout.splitlines()) == 1
    assert has_wheel or "apt install g++" in told.stdout


def test_interpreter_alone(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Where no compiler is found, run is still fine, and --sanitize is a usage error."""

    def none(config: object) -> host.HostCompiler:
        raise host.NoHostCompilerError("this machine has no C++ compiler")

    monkeypatch.setattr(host, "find_compiler", none)
    assert run_command(["run", RING, "--ranks", "3", "--bytes", "1000"]) == 0
    assert "the interpreter alone, not the emitted kernel" in capsys.readouterr().out
    assert run_command(["run", RING, "--ranks", "3", "--sanitize"]) == 2
    capsys.readouterr()
    assert run_command(["run", QKV, "--ranks", "2"]) == 0
    assert "the simulation alone, not the emitted kernel" in capsys.readouterr().out
    assert run_command(["run", QKV, "--ranks", "2", "--sanitize"]) == 2


def test_svg(tmp_path: Path) -> None:
    """--svg writes a well-formed picture, the same bytes every time, that names the ranks, steps and busiest pairs."""
    paths = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in paths:
        assert run_command(["run", TWO_LEVEL, "--on", "h200_2x8", "--bytes", "1000", "--svg", str(path)]) == 0
    texts = [element.text for element in ElementTree.parse(paths[0]).iter() if element.text]

    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert {"node 1", "rank 15", "step 4"} <= set(texts)
    assert any(text.startswith("busiest: 0 → 8") for text in texts)


@pytest.mark.parametrize(("ranks", "width"), [(2, 80), (8, 60), (8, 120), (64, 100)])
def test_timeline(ranks: int, width: int) -> None:
    """A timeline is never wider than asked, shows the first and the last step, and says what it leaves out."""
    lines = timeline(compiler.check(RING, ranks=ranks).schedule, width).split("\n")
    shown = lines[0].count("rank")

    assert max(map(len, lines)) <= width
    assert any(line.startswith("  1 s=0") for line in lines)
    assert any(line.lstrip().startswith(f"{2 * (ranks - 1)} s={ranks - 2}") for line in lines)
    assert shown == ranks or lines[-1].strip().startswith(f"… and {ranks - shown} more")


# --- the process ------------------------------------------------------------------------------------------------------


def test_progress_is_silent_off_a_terminal(capsys: Capture) -> None:
    """A bar is for terminals; scripts see nothing of it."""
    with output.progress("work", 3) as advance:
        advance("more work")

    assert capsys.readouterr() == ("", "")


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """On a terminal the bar appears once the work has taken its time, and leaves with it."""
    bar = output.Bar("proving", 2)
    monkeypatch.setenv("TERM", "xterm")
    bar.show()
    bar.advance("running")
    bar.close()

    assert bar.done == 1
    assert "✓" not in capsys.readouterr().out


def test_main_module() -> None:
    """`python -m commdsl` is the command line; a closed pipe is no fault."""
    command = f"{sys.executable} -m commdsl show {RING} --stage cuda | head -1"
    done = subprocess.run(
        command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ}
    )

    assert done.stdout.startswith("// @generated")
    assert "Traceback" not in done.stderr
