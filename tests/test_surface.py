"""What a program sees of the package: its names, its errors, its version, its log, and what the first call costs.

Assumes a checkout. Runs a process of its own where it matters what is imported. Does not look at results.
"""

from __future__ import annotations

import ast
import logging
import pickle
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import commdsl
from commdsl.machine import resources

ROOT = Path(__file__).parent.parent

CALLS = """
import sys, threading, torch, commdsl
names = commdsl.threads(2)
shift = commdsl.load("permutation_shift", params={"K": 1}, ranks=2)
def rank(name):
    commdsl.all_reduce(torch.ones(8), group=name)
    commdsl.all_reduce(torch.ones(8), group=name, async_op=True).wait()
    commdsl.all_reduce(torch.ones(8, requires_grad=True), group=name).sum().backward()
    shift(torch.ones(8), group=name)
    done.append(name)
done = []
threads = [threading.Thread(target=rank, args=(name,)) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(done), [name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""


def test_the_first_call_is_quick() -> None:
    """Calls, also with gradients, and loaded ops do not import torch's compiler, which takes a second."""
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True, check=True, cwd=ROOT)

    assert done.stdout.strip() == "2 []"


def python(code: str) -> str:
    """What a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip()


def test_names() -> None:
    """`dir` lists the public names, each is there, and type checkers see the same ones."""
    pytest.importorskip("torch")
    tree = ast.parse((ROOT / "commdsl" / "__init__.py").read_text(encoding="utf-8"))
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}

    assert dir(commdsl) == sorted(commdsl.__all__)
    assert seen | {"__version__"} == set(commdsl.__all__)
    assert all(getattr(commdsl, name) is not None for name in commdsl.__all__)


def test_names_come_late() -> None:
    """Neither `import commdsl` nor `dir` nor the version imports anything; a name that is none is close to one."""
    said = python(
        "import sys, commdsl; dir(commdsl); commdsl.__version__; print('torch' in sys.modules, commdsl.load_)"
    )

    assert said.endswith("Did you mean: 'load'?")
    assert python("import sys, commdsl; dir(commdsl); commdsl.__version__; print('torch' in sys.modules)") == "False"


WITHOUT_TORCH = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import commdsl, commdsl.attention, commdsl.dispatch, commdsl.ep, commdsl.overlap
try:
    from %s import %s
except commdsl.Error as error:
    print(isinstance(error, ModuleNotFoundError), error.name, error)
"""


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("commdsl", "all_reduce"),
        ("commdsl.attention", "attention"),
        ("commdsl.dispatch", "plan"),
        ("commdsl.ep", "Exchange"),
        ("commdsl.overlap", "all_gather_matmul"),
    ],
)
def test_without_torch(module: str, name: str) -> None:
    """What needs torch says so where there is none, and how to get it; modules can be imported."""
    said = f"{module}.{name} needs torch, which is not installed: pip install 'commdsl[torch]'"

    assert python(WITHOUT_TORCH % (module, name)) == f"True torch error[C968]: {said}"


def test_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The version has one source: pyproject.toml of a checkout, and of an installation what was made of it."""
    assert commdsl.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    monkeypatch.setattr(resources, "__file__", str(tmp_path / "commdsl" / "machine" / "resources.py"))
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\nversion = "7"\n')
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name} as installed")
    assert resources.version() == "commdsl as installed"


def test_errors_travel() -> None:
    """Ranks pass errors on: pickled and loaded again, one says the same and keeps what it carries."""
    where = commdsl.MetadataError("all are sent", field="rows", rank=3, expected=4, got=5)
    for error in (
        commdsl.TensorError("no"),
        commdsl.ConfigError("no"),
        commdsl.WorkTimeoutError("no"),
        commdsl.TableError(Path("t"), "", "no"),
        where,
    ):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))
        assert str(again).count("error[") == 1
        assert vars(again) == vars(error)
    assert isinstance(where, ValueError)
    assert isinstance(commdsl.GroupError("no"), RuntimeError)


def test_logging(caplog: pytest.LogCaptureFixture) -> None:
    """Under the name `commdsl`: a debug line says what a collective runs for a size, and where that is said."""
    torch = pytest.importorskip("torch")
    from commdsl.runtime.menu import menu

    menu.cache_clear()
    with caplog.at_level(logging.DEBUG, "commdsl"):
        menu("all_gather", 2, torch.device("cpu"), 0, False).op(4096)

    (said,) = (record for record in caplog.records if record.name.startswith("commdsl"))
    assert said.levelno == logging.DEBUG
    assert "all_gather of up to" in said.getMessage()
    assert "the stated default" in said.getMessage()
