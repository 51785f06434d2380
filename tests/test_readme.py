"""Every code block of the READMEs that no other test covers runs: schedules are proved, commands run, Python works.

Assumes the environment that the README's second command sets up. Blocks 1 and 2 of README.md are `.ci/run`'s: they make
environments; here they are only held to what `.ci/run` takes from them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked import launched

from commdsl import compiler

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_all_blocks_are_known() -> None:
    """The README has only blocks of kinds that are tested here, and one diagram."""
    assert set(re.findall(r"^```(\w+)$", README, re.MULTILINE)) == {"comm", "sh", "python"}
    assert len(blocks("")) == 1 or README.count("```\n.comm text") == 1


@pytest.mark.parametrize("text", [text for text in blocks("comm") if "schedule " in text])
def test_schedules(text: str) -> None:
    """A schedule in the README is proved for 2 to 8 ranks, and is the shipped one."""
    for ranks in range(2, 9):
        assert not compiler.check(compiler.read_text(text, "README.md", ROOT), ranks=ranks).warnings
    shipped = compiler.check(ROOT / "schedules/collectives/allreduce_ring.comm").plan
    written = compiler.check(compiler.read_text(text, "README.md", ROOT)).plan

    assert (written.name, written.moves.ops.num_ops) == (shipped.name, shipped.moves.ops.num_ops)


@pytest.mark.parametrize("text", [text for text in blocks("comm") if "schedule " not in text])
def test_plans(text: str) -> None:
    """A plan in the README is proved, and is the shipped one."""
    written = compiler.check(compiler.read_text(text, "README.md", ROOT))
    shipped = compiler.check(ROOT / "schedules/dispatch" / f"{written.plan.name}.comm").plan

    assert written.warnings == ()
    assert (written.plan.dest == shipped.dest).all()
    assert (written.plan.shards.length == shipped.shards.length).all()
    assert (written.plan.mask, written.plan.sharing) == (shipped.mask, shipped.sharing)


def test_set_up_blocks() -> None:
    """The first command makes an environment without extras and runs 8 host ranks; the second ends with the tests."""
    first, second, *_ = blocks("sh")

    assert "pip install -q -e .\n" in first
    assert first.rstrip().endswith("commdsl run schedules/collectives/allreduce_ring.comm --ranks 8")
    assert second.splitlines()[-1].startswith("pytest ")
    assert ".[test]" in second


@pytest.mark.parametrize("line", [line for block in blocks("sh")[2:] for line in block.splitlines()])
def test_commands(line: str, tmp_path: Path) -> None:
    """A command in the README works as written, and draws the picture that is shown."""
    shutil.copytree(ROOT / "schedules", tmp_path / "schedules")
    command = line.replace("commdsl", f"{sys.executable} -m commdsl", 1)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    for drawn in re.findall(r"--svg (\S+)", line):
        for shown in re.findall(rf"^!\[.*\]\((.*/{re.escape(drawn)})\)$", README, re.MULTILINE):
            assert (tmp_path / drawn).read_text() == (ROOT / shown).read_text(), f"draw {shown} anew: {line}"


def test_pictures() -> None:
    """Every picture of the README is drawn by a command in it."""
    pictures = re.findall(r"^!\[.*\]\(.*?([^/]+)\)$", README, re.MULTILINE)

    assert pictures
    assert set(pictures) <= set(re.findall(r"--svg (\S+)$", "".join(blocks("sh")), re.MULTILINE))


@pytest.mark.parametrize("text", blocks("python"))
def test_python(text: str, tmp_path: Path) -> None:
    """A program in the README runs, on two ranks unless it says on how many."""
    script = tmp_path / "program.py"
    script.write_text(text)
    said = re.search(r"--nproc-per-node (\d+)", text)
    ranks = said[1] if said else "2"
    done = launched(int(ranks), str(script))

    assert done.returncode == 0, done.stderr


def test_command_table() -> None:
    """The README's table names every command there is, and no other."""
    from commdsl.commands.cli import app

    assert set(re.findall(r"^\| `commdsl (\w+)", README, re.MULTILINE)) == set(app.commands)


def test_links() -> None:
    """Every link of every README leads to a file."""
    for page in ROOT.glob("**/README.md"):
        if ".venv" not in page.parts:
            for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} -> {target}"
