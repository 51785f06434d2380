"""What `commdsl compile` writes runs where it is moved to: texts in the module, kernels beside it, and nothing else.

Assumes a checkout that the moved modules import commdsl from, and no GPU: that a cubin is what a GPU would load is held
by keys and digests, and with a GPU made of the host build.
"""

from __future__ import annotations

import ast
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu
from hypothesis import given
from hypothesis import strategies as st
from thread_ranks import in_group

import commdsl
from commdsl import ep
from commdsl.build import built, nvrtc
from commdsl.build.built import Built
from commdsl.build.emit import Emitted, defines
from commdsl.commands import products
from commdsl.commands.cli import run_command
from commdsl.machine.config import Config, from_environment
from commdsl.program.memory import Transport
from commdsl.runtime.load import definition
from commdsl.runtime.program import program, routed_program

ROOT = Path(__file__).parent.parent
USER = '''use "parts/box.comm"
# A text with \\ and """ and é in it.
schedule mine(K = 1) for P ranks {{
  input x  output y
  ensure allreduce(x -> y)
  each r {{ reduce x @ all -> y }}
}}
'''.replace("{{", "{").replace("}}", "}")
BOX = "topology box { nodes 1   gpus 2 per node   sms 132\n  link nvlink in node 450 GB/s per gpu 0.7 us }\n"

Capture = pytest.CaptureFixture[str]


@given(st.text(st.characters(codec="utf-8")))
def test_literals(text: str) -> None:
    """Any text stands in a module as it is."""
    assert ast.literal_eval(products.literal(text)) == text
    assert ast.literal_eval(products.literal(text + '"')) == text + '"'


RANKS = """
import importlib, json, os, sys, threading
sys.path.insert(0, sys.argv[1])
found = getattr(importlib.import_module(sys.argv[2]), sys.argv[2])
import torch, commdsl
names, sums = commdsl.threads(2), [None, None]
def call(r): sums[r] = found(torch.full((5,), r + 1.0), group=names[r])
ranks = [threading.Thread(target=call, args=(r,)) for r in range(2)]
[rank.start() for rank in ranks]; [rank.join() for rank in ranks]
print([one.tolist() for one in sums])
"""


def elsewhere(code: str, *words: str, cwd: Path) -> str:
    """What a process prints that knows commdsl and nothing of where its module was made."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_moved(tmp_path: Path) -> None:
    """A user's file, with what it uses and parameters, compiled, moved, and its sources gone: the op is right."""
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "parts").mkdir(parents=True)
    (here / "mine.comm").write_text(USER)
    (here / "parts" / "box.comm").write_text(BOX)
    words = ["compile", str(here / "mine.comm"), "K=3", "--on", "box", "--tune", "lanes=2", "--out", str(here / "made")]
    assert run_command(words) == 0
    shutil.move(here / "made", there)
    shutil.rmtree(here)
    (tmp_path / "cwd").mkdir()

    for path in there.iterdir():
        assert str(tmp_path) not in path.read_text()
    assert elsewhere(RANKS, str(there), "mine", cwd=tmp_path / "cwd") == f"{[[3.0] * 5] * 2}\n"


def test_same_bytes(tmp_path: Path) -> None:
    """The same input gives the same files, kernels too, whatever the folder, the hash seed and the cache."""
    made = []
    for seed in "12":
        (tmp_path / seed).mkdir()
        shutil.copy(ROOT / "schedules/collectives/allreduce_oneshot.comm", tmp_path / seed / "mine.comm")
        words = ["compile", "mine.comm", "--ranks", "2", "--out", "out", "--arch", "sm_90", "--dtype", "float32"]
        environment = {"PYTHONHASHSEED": seed, "COMMDSL_CACHE_DIR": str(tmp_path / f"cache{seed}")}
        subprocess.run(
            [sys.executable, "-m", "commdsl", *words],
            cwd=tmp_path / seed,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            check=True,
            capture_output=True,
        )
        made.append({path.name: path.read_bytes() for path in (tmp_path / seed / "out").iterdir()})

    assert made[0] == made[1]
    assert any(name.endswith(".cubin") for name in made[0])
    assert not any(str(tmp_path).encode() in content or str(ROOT).encode() in content for content in made[0].values())


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All-reduce for two ranks of an sm_90, moved from where it was built."""
    made = tmp_path_factory.mktemp("made")
    words = [
        "compile",
        "allreduce_oneshot",
        "--ranks",
        "2",
        "--arch",
        "sm_90",
        "--dtype",
        "float32",
        "--op",
        "sum,max,avg",
    ]
    assert run_command([*words, "--out", str(made)]) == 0
    assert run_command([*words, "--out", str(made), "--check"]) == 0
    moved = tmp_path_factory.mktemp("moved") / "kernels"
    shutil.move(made, moved)
    return moved


def loaded(folder: Path) -> dict[str, Any]:
    return runpy.run_path(str(folder / "allreduce_oneshot.py"))


def took(build: Callable[..., Path], emitted: Emitted, macros: tuple[str, ...], config: Config, arch: str) -> bool:
    """Whether a build is what was built ahead, to the byte."""
    content = built.find(emitted.kernels, nvrtc.key_ahead(emitted, macros, config, arch))
    return content is not None and build(emitted, macros, config, arch).read_bytes() == content


def no_nvrtc(patch: pytest.MonkeyPatch) -> None:
    def missing(library: nvrtc.Library) -> None:
        raise AssertionError(f"{library.stem} was asked for")

    patch.setattr(nvrtc, "load", missing)
    patch.setattr(nvrtc, "_library_path", lambda library: None)


@pytest.mark.parametrize("op", ["sum", "max", "avg"])
def test_no_compiler_needed(op: str, ahead: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank's kernel is what the file beside the module has, and NVRTC is not asked for."""
    no_nvrtc(monkeypatch)
    module = loaded(ahead)
    config = replace(from_environment(), cache_dir=tmp_path / "cache")
    asked = definition(module["SOURCE"], None, None, None, None, module["KERNELS"])
    made = program(asked, 2, Transport.PEER, config)

    for rank in range(2):
        path = nvrtc.build(made.emitted, defines(made.plan, "float32", op, rank), config, "sm_90")
        (own,) = ahead.glob(f"*.float32.{op}.rank{rank}.cubin")
        assert path.read_bytes() == own.read_bytes()
        assert path.read_bytes().startswith(b"\x7fELF")
        assert path.is_relative_to(tmp_path / "cache")  # where nobody else writes


def test_a_launch_takes_them(ahead: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op of the moved module, called on GPUs, loads these files and asks nobody to build."""
    gpu = FakeGpu(2)
    build = nvrtc.build
    gpu.install(monkeypatch)
    no_nvrtc(monkeypatch)
    stand_in, taken = nvrtc.build, []

    def noted(emitted: Any, macros: Any, config: Any, arch: str) -> Path:
        taken.append(took(build, emitted, macros, config, arch))
        return stand_in(emitted, macros, config, arch)

    monkeypatch.setattr(nvrtc, "build", noted)
    op = loaded(ahead)["__getattr__"]("allreduce_oneshot")

    def call(rank: int, group: str) -> list[float]:
        gpu.here.rank = rank
        found: list[float] = op(torch.full((8,), rank + 1.0), group=group).tolist()
        op.synchronize(group)
        return found

    assert in_group(2, call) == [[3.0] * 8] * 2
    assert set(taken) == {True}


DAMAGE = {
    "gone": lambda path: path.unlink(),
    "cut short": lambda path: os.truncate(path, 1000),
    "another": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_kernels(damage: str, ahead: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that is not what was built is not loaded; the kernel is built as if there were none; the log says so."""
    folder = tmp_path / "kernels"
    shutil.copytree(ahead, folder)
    for path in folder.glob("*.cubin"):
        DAMAGE[damage](path)
    module, config = loaded(folder), from_environment()
    asked = definition(module["SOURCE"], None, None, None, None, module["KERNELS"])
    made = program(asked, 2, Transport.PEER, config)
    path = nvrtc.build(made.emitted, defines(made.plan, "float32", "sum", 0), config, "sm_90")

    assert path.read_bytes() == next(ahead.glob("*.float32.sum.rank0.cubin")).read_bytes()
    assert [record.name for record in caplog.records] == ["commdsl"]


OTHERS = [(3, "float32", "sm_90"), (2, "int32", "sm_90"), (2, "float32", "sm_100")]


@pytest.mark.parametrize(("ranks", "dtype", "arch"), OTHERS)
def test_others_are_built(ranks: int, dtype: str, arch: str, ahead: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another number of ranks, element type or architecture than was named is built as usual, without a word."""
    module, config = loaded(ahead), from_environment()
    asked = definition(module["SOURCE"], None, None, None, None, module["KERNELS"])
    made = program(asked, ranks, Transport.PEER, config)

    assert not took(nvrtc.build, made.emitted, defines(made.plan, dtype, "sum", 0), config, arch)
    assert nvrtc.build(made.emitted, defines(made.plan, dtype, "sum", 0), config, arch).is_file()
    assert caplog.records == []


@pytest.mark.parametrize("name", ["experts", "qkv", "rotation_ring"])
def test_kernels_of_all_kinds(name: str, tmp_path: Path) -> None:
    """Of a dispatch there are kernels of both ways, of a schedule with yields those of each stretch."""
    words = ["compile", name, "--ranks", "2", "--arch", "sm_90", "--dtype", "bfloat16", "--out", str(tmp_path)]
    assert run_command(words) == 0
    module, config = runpy.run_path(str(tmp_path / f"{name}.py")), from_environment()
    asked = definition(module["SOURCE"], name, None, None, None, module["KERNELS"])
    wanted: list[tuple[Any, tuple[str, ...]]]
    if name == "rotation_ring":
        made = program(asked, 2, Transport.PEER, config)
        assert made.visits is not None
        wanted = [(one.emitted, defines(one.plan, "bytes", "sum", 1)) for one in (made, *made.visits.launched)]
    else:
        routed = routed_program(asked, 2, Transport.PEER, config)
        back = routed.emitted if routed.back is None else routed.back[1]
        wanted = [(routed.emitted, ()), (back, ("COMMDSL_DTYPE=bfloat16",))]

    assert all(took(nvrtc.build, *one, config, "sm_90") for one in wanted)
    assert len(module["KERNELS"]) == len(list(tmp_path.glob("*.cubin")))


def test_a_layer_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EPAll2AllLayer with use_aot: all kernels of its calls are those that were built ahead, when it is made."""
    name = "tokens_summed"
    words = ["compile", "tokens", "--schedule", name, "--ranks", "2", "--arch", "sm_90", "--dtype", "float32"]
    assert run_command([*words, "--tune", "sms=3", "E=4", "--out", str(tmp_path)]) == 0
    module = runpy.run_path(str(tmp_path / f"{name}.py"))
    gpu = FakeGpu(2)
    build = nvrtc.build
    gpu.install(monkeypatch)
    stand_in, taken = nvrtc.build, []

    def noted(emitted: Any, macros: Any, config: Any, arch: str) -> Path:
        if emitted.name.startswith("commdsl_tokens"):
            taken.append(took(build, emitted, macros, config, arch))
        return stand_in(emitted, macros, config, arch)

    monkeypatch.setattr(nvrtc, "build", noted)

    def call(rank: int, group: str) -> None:
        gpu.here.rank = rank
        layer = ep.EPAll2AllLayer(
            group,
            max_tokens=4,
            hidden=8,
            topk=2,
            rank=rank,
            num_tot_experts=4,
            local_world_size=2,
            world_size=2,
            dtype=torch.float32,
            num_sm=3,
            enable_local_combine=True,
            use_aot=True,
            device="cpu",
            kernels=module["KERNELS"],
        )
        before = len(taken)
        rows, _, desc = layer.dispatch(torch.ones(2, 8), torch.tensor([[0, 3], [1, 2]], dtype=torch.int32))
        assert layer.combine(rows, desc).tolist() == [[2.0] * 8] * 2
        assert len(taken) == before

    in_group(2, call)
    assert len(taken) >= 4
    assert set(taken) == {True}


WRONG = [
    (["--arch", "sm_1"], "--arch expects some of sm_"),
    (["--arch", "sm_90", "--dtype", "float31"], "--dtype expects some of"),
    (["--arch", "sm_90", "--op", "add"], "--op expects some of"),
    (["--dtype", "float32"], "name an architecture"),
    (["--arch", "sm_80", "--tune", "protocol=tma"], "which sm_80 does not have"),
]


@pytest.mark.parametrize(("words", "said"), WRONG)
def test_wrong_words(words: list[str], said: str, tmp_path: Path, capsys: Capture) -> None:
    """What NVRTC or commdsl does not have is refused by name, and so are words that nothing would listen to."""
    assert run_command(["compile", "allreduce_twoshot", "--out", str(tmp_path), *words]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_texts_in_hand() -> None:
    """`load` takes a text for a file: the same op as of the file, and the faults of the text are shown by its name."""
    path = ROOT / "schedules/collectives/allreduce_oneshot.comm"

    assert commdsl.load({"allreduce_oneshot.comm": path.read_text()}) is commdsl.load(path)
    with pytest.raises(commdsl.CommError, match=r"^mine\.comm:1"):
        commdsl.load({"mine.comm": "schedule"})
    for wrong in ({}, {"mine.comm": None}, {path: path.read_text()}):
        with pytest.raises(commdsl.Error, match="texts in hand are"):
            commdsl.load(wrong)
    assert Built("key", path, "digest") in definition(path, None, None, None, None, {"key": (path, "digest")}).kernels
