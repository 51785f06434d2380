"""The package as a product: what the wheel holds, and that an installed one works away from the checkout.

Assumes git and pip. The wheel is installed into a fresh environment that borrows the dependencies of this one, so that
no network is needed; `.ci/run` does the same with pip's own resolution.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DATA = ("grammar", "templates", "schedules")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(ROOT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    found = folder / "bin" / "python"
    subprocess.run([found, "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True)
    purelib = subprocess.run(
        [found, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    # A path line comes after the environment's own packages, and its .pth files (an editable commdsl) are not followed.
    Path(purelib.stdout.strip(), "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return found


def listed(*folders: str) -> set[str]:
    command = ["git", "ls-files", "-z", *folders]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in text.split("\0") if name and (ROOT / name).is_file()}


def test_wheel_data(wheel: Path) -> None:
    """The wheel's `_data` is what git tracks under grammar, templates and schedules: no more, no less."""
    names = zipfile.ZipFile(wheel).namelist()
    data = {name.removeprefix("commdsl/_data/") for name in names if name.startswith("commdsl/_data/")}

    assert data == listed(*DATA)


def test_wheel_package(wheel: Path) -> None:
    """The wheel's package is what git tracks under commdsl, and nothing of tests or generated comes along."""
    names = zipfile.ZipFile(wheel).namelist()
    package = {name for name in names if name.startswith("commdsl/") and not name.startswith("commdsl/_data/")}

    assert package == listed("commdsl")
    assert {name.split("/")[0] for name in names} == {
        "commdsl",
        next(n for n in names if "dist-info" in n).split("/")[0],
    }


def test_installed(python: Path, tmp_path: Path) -> None:
    """An installed commdsl finds its data, and compiles and runs a schedule away from the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    away = {"cwd": tmp_path, "capture_output": True, "text": True, "check": False, "env": environment}
    where = subprocess.run([python, "-c", "import commdsl; print(commdsl.__file__)"], **away)
    assert Path(where.stdout.strip()).is_relative_to(python.parent.parent), where.stderr
    made = subprocess.run([python, "-m", "commdsl", "new", "allreduce", "sum.comm"], **away)
    assert made.returncode == 0, made.stderr
    compiled = subprocess.run([python, "-m", "commdsl", "compile", "sum.comm", "--on", "h200_1x8"], **away)
    assert compiled.returncode == 0, compiled.stderr
    ran = subprocess.run([python, "-m", "commdsl", "run", "sum.comm", "--ranks", "3", "--bytes", "1000"], **away)

    assert ran.returncode == 0, ran.stderr
    assert "equal to the oracle, bit for bit" in ran.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sum.comm", "sum.cu", "sum.py"]


def test_core_is_small() -> None:
    """The core needs no torch, no CUDA and no compiler: those are extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {requirement.split(">")[0] for requirement in project["dependencies"]}

    assert core == {"click", "jinja2", "lark", "numpy", "platformdirs", "rich"}
    assert {"torch", "cuda", "cxx", "bounds", "lsp", "test"} == project["optional-dependencies"].keys()


def test_script() -> None:
    """The console script `commdsl` is the module's main."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]

    assert scripts == {"commdsl": "commdsl.__main__:main"}
