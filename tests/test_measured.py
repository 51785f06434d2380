"""Every figure in a README comes from a file under benchmarks/measured/, which says how it came to be.

Assumes a checkout. Does not measure anything.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import record, rounding, tables
from benchmarks.record import FACTS, MEASURED, ROOT, RecordError

READMES = sorted(tables.readmes())
FILES = sorted(MEASURED.glob("*.csv"))

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`[^`\n]+`")
VERSION = re.compile(r"\b(?:Python|torch|CUDA|NCCL|CuPy|arXiv) \d+\.\d+(?:\.\d+)?")
FIGURE = re.compile(r"\d[\d.,]*\s?(?:us|µs|ms|[KMGT]B/s|TFLOP/s|%)(?!\w)|\b\d+\.\d+\b|\d×|\bx\d")

BY_OTHERS = {
    "schedules/README.md": {
        "1.75": "bytes over the bound, by the cost report: test_gallery.py",
        **dict.fromkeys(("3.9 %", "2.6 %"), "errors beside float64: test_casts.py"),
    },
}
"""Figures that nobody measures: what says them."""


def facts(**changed: str) -> dict[str, str]:
    return dict.fromkeys(FACTS, "something") | changed


def figures(text: str) -> list[str]:
    """What looks measured outside of code and of the blocks that tables.py writes."""
    for pattern in (tables.BLOCK, rounding.BLOCK, FENCE, SPAN, VERSION):
        text = pattern.sub(" ", text)
    return [found[0] for found in FIGURE.finditer(text)]


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_are_the_files(path: Path) -> None:
    """A README's blocks say what their files say; `python benchmarks/tables.py` writes them."""
    text = path.read_text(encoding="utf-8")

    assert tables.rewritten(text) == text


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_figure_stands_alone(path: Path) -> None:
    """Outside of these blocks a README has no figure that a measurement would give."""
    known = BY_OTHERS.get(str(path.relative_to(ROOT)), {})

    found = [one for one in figures(path.read_text(encoding="utf-8")) if one not in known]
    assert not found, f"{found}: measure it (benchmarks/tables.py), or write it as code where it is a setting"


def test_a_figure_is_seen() -> None:
    """Times, rates, shares and decimals are figures; versions, code, time-outs and block contents are none."""
    seen = "It takes 3.4 us or 12 ms at 390 GB/s: 5 % less, 0.85 of it."
    block = "<!-- measured: host x -->\n| 3.4 us |\n<!-- end -->"

    assert figures(seen) == ["3.4 us", "12 ms", "390 GB/s", "5 %", "0.85"]
    assert (
        figures(f"Python 3.11, CUDA 13.0, at most 30 s, `50 GB/s`, 16 MB on 4 ranks\n{block}\n```\n3 us\n```\n") == []
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_say_how_they_came_to_be(path: Path) -> None:
    """A file has every fact and lines, and some README quotes it."""
    found = record.read(path)
    quoted = [name for readme in READMES for _, _, names, _ in blocks(readme) for name in names.split()]

    assert set(found.facts) == set(FACTS)
    assert found.lines
    assert found.name in quoted


def blocks(readme: Path) -> list[tuple[str, str, str, str]]:
    return tables.BLOCK.findall(readme.read_text(encoding="utf-8"))


def test_a_changed_figure_is_seen() -> None:
    """A digit changed in a README's table, or in its file, is a difference."""
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("| all_reduce | 1 KB"))
    changed = text.replace(line, line.replace("all_reduce | 1 KB | ", "all_reduce | 1 KB | 1"), 1)

    assert changed != text
    assert tables.rewritten(changed) == text


def test_round_trip(tmp_path: Path) -> None:
    """What is written is read, facts and lines; a file replaces an older one and leaves nothing else behind."""
    for value in ("1", "2"):
        record.write(tmp_path, "one", facts(commit="1a2b3c"), f"a,b\n{value},x # y\n")
    found = record.read(tmp_path / "one.csv")

    assert found.facts == facts(commit="1a2b3c")
    assert found.lines == ({"a": "2", "b": "x # y"},)
    assert [path.name for path in tmp_path.iterdir()] == ["one.csv"]


@pytest.mark.parametrize("lacking", sorted(FACTS))
def test_a_fact_that_is_missing(lacking: str, tmp_path: Path) -> None:
    """A file without one of the facts is neither written nor read."""
    for fact in ("", "not recorded; the fan was on"):
        with pytest.raises(RecordError, match="expected the facts"):
            record.write(tmp_path, "one", facts(**{lacking: fact}), "a\n1\n")
    path = record.write(tmp_path, "one", facts(), "a\n1\n")
    whole = path.read_text()
    for line in ("", f"# {lacking}: not recorded\n"):
        path.write_text(re.sub(f"^# {lacking}: .*\n", line, whole, flags=re.MULTILINE))
        with pytest.raises(RecordError, match=f"does not say its {lacking}"):
            record.read(path)


def test_facts_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run knows its commit, its command as it is typed, its versions; where git is not there, it has to be told."""
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "planner.py"), "--save", "x", "--commit", "abc"])
    found = record.facts_here()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert set(found) == set(FACTS)
    assert all(found.values())
    assert head.startswith(found["commit"].split()[0])
    assert found["command"] == "python benchmarks/planner.py --save x"
    assert record.facts_here("abc")["commit"] == "abc"
    monkeypatch.setattr(record, "_said", lambda *command: "")
    with pytest.raises(RecordError, match="which commit"):
        record.facts_here()


def test_command_and_environment_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun the command says on how many; of the environment what changes times is told, and no folder."""
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "collectives.py"), "--sizes", "1K"])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    variables = {"NCCL_NVLS_ENABLE": "0", "COMMDSL_CACHE_DIR": "/mine", "HOME": "/mine", "COMMDSL_TIMEOUT": "20"}

    assert record.command_line() == "torchrun --nproc-per-node 4 benchmarks/collectives.py --sizes 1K"
    assert record.environment(variables) == "COMMDSL_TIMEOUT=20 NCCL_NVLS_ENABLE=0"
    assert record.environment({}) == record.NONE


def test_links() -> None:
    """What nvidia-smi says of the links of a GPU, in few words."""
    status = "GPU 0: NVIDIA H200 (UUID: GPU-1)\n" + "".join(f"\t Link {link}: 26.562 GB/s\n" for link in range(18))

    assert record._link(status) == "18 x 26.562 GB/s NVLink"
    assert record._link("") == "no NVLink that the driver tells of"


def test_a_file_that_is_not_there() -> None:
    """A block of a file that nobody has measured yet says so; a kind that there is not is an error."""
    assert "Not measured yet" in tables.block("host", ["nothing"])
    with pytest.raises(tables.TableError, match="expected one of"):
        tables.block("weather", [FILES[0].stem])


CALLS_OF = {"collective": "all_reduce", "bytes": "1024", "ranks": "4", "kind": "ours", "status": "ok", "detail": ""}


def called(contender: str, us: str, calls: int = 24, **changed: str) -> dict[str, str]:
    """A line of collectives.py."""
    times = dict.fromkeys(("median_us", "p10_us", "p90_us"), us)
    return {**CALLS_OF, "contender": contender, "calls": str(calls), **times, **changed}


MADE = {
    "uneven": (
        [
            {"collective": "all_gather", "bytes": "65536", "ranks": "2", "contender": name, "kind": kind}
            | dict.fromkeys(("calls", "median_us", "p10_us", "p90_us"), us)
            | {"status": "ok"}
            for name, kind, us in (("NCCL", "peer", "12"), ("commdsl", "ours", "3"))
        ],
        ["| all_gather 64 KB | 12.0 | 3.0 | 0.25 |"],
    ),
    "lengths": (
        [called("NCCL", "12", 6, kind="peer"), called("commdsl", "3", 6), called("commdsl", "2.5", 24)],
        ["| all_reduce, 1 KB | 6 calls | 24 calls |", "| NCCL | 12.0 | - |", "| commdsl | 3.0 | 2.5 |"],
    ),
    "sms": (
        [called("allreduce_ring:bulk:128", "10"), called("allreduce_ring:bulk:16:::16", "12.5")],
        [
            "| all_reduce | all | 0 | 1.00 | allreduce_ring:bulk:128 |",
            "| all_reduce | 16 | 0 | 0.80 | allreduce_ring:bulk:16:::16 |",
        ],
    ),
    "host": (
        [{"call": "mine", "median_us": "11.7", "p10_us": "10.8", "p90_us": "20.6", "slowest_rank_us": "12"}],
        ["| mine | 11.7 (10.8-20.6) | 12.0 |"],
    ),
    "dispatch_host": ([{"call": "rows kv", "slowest_rank_us": "53"}], ["| rows kv | 53.0 |"]),
    "overlap": (
        [
            {"bytes": "1048576", "tasks": "2", "part": part, "way": way, "median_us": us}
            for part, way, us in (
                ("tasks", "", "9"),
                ("moves", "", "10"),
                ("sequence", "", "18"),
                ("one launch", "8 SMs", "12"),
                ("one launch", "24 SMs", "15"),
            )
        ],
        ["| 1 MB | 2 | 9.0 | 10.0 | 18.0 | 12.0 | 1.50 | 8 SMs |"],
    ),
    "routes": (
        [{"ranks": "8", "tokens": "8192", "plan_ms": "1.32", "tables_ms": "0.7", "all_ms": "2.04", "p90_ms": "2.2"}],
        ["| 8 | 8192 | 1.3 | 0.7 | 2.0 | 2.2 |"],
    ),
    "synthesis": (
        [
            {"collective": "allgather", "ratio": ratio, "seconds": seconds}
            for ratio, seconds in (("1.1", "0.25"), ("1", "0.5"), ("1.05", "2"))
        ],
        ["| allgather | 3 | 1.05 | 1.10 | 0.50 | 2.00 |"],
    ),
    "visits": (
        [
            {"compute": "sleep", "way": "engine", "alone_us": "100", "transfers_us": "50", "together_us": "102"}
            | {"problem": ""},
            {"compute": "gemm", "way": "bulk", "alone_us": "0", "transfers_us": "0", "together_us": "0"}
            | {"problem": "no time left"},
        ],
        ["| sleep | engine | 100 | 50 | 102 | 2.0 % |", "| gemm | bulk | 0 | 0 | 0 | no time left |"],
    ),
}


@pytest.mark.parametrize("kind", MADE)
def test_tables_of_each_kind(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's lines are lines of its table, and what it says of itself stands below."""
    lines, wanted = MADE[kind]
    text = "\n".join([",".join(lines[0]), *(",".join(line.values()) for line in lines)]) + "\n"
    record.write(tmp_path, "one", facts(commit="1a2b3c", cupy=record.NONE), text)
    monkeypatch.setattr(tables, "MEASURED", tmp_path)
    found = tables.block(kind, ["one"])

    assert [line for line in wanted if line not in found.splitlines()] == []
    assert "`measured/one.csv`: `something`; commit 1a2b3c" in found
    assert "cupy" not in found


def test_names_are_no_paths() -> None:
    """`--save` takes a name: a path is refused before anything is measured."""
    parser = argparse.ArgumentParser()
    record.add_options(parser)
    with pytest.raises(SystemExit):
        record.check_options(parser, parser.parse_args(["--save", "../x", "--commit", "abc"]))
