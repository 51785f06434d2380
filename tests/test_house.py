"""The house rules: who may import what, how long a module may be, what every code has, what no file says.

Assumes a checkout with git. Does not run any stage.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import commdsl
from commdsl.language import codes

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "commdsl"
MODULES = sorted(PACKAGE.rglob("*.py"))
NAMES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in MODULES}

WALLS = {
    "lark": {"language/parser/"},
    "jinja2": {"build/emit.py"},
    "click": {"commands/cli.py", "commands/options.py"},
    "rich": {"commands/"},
    "scipy": {"cost/flows.py"},
    "pygments": {"language/pygments_lexer.py"},
    "pygls": {"commands/lsp/"},
    "lsprotocol": {"commands/lsp/"},
    "torch": {"runtime/", "dispatch/", "ep/", "attention/", "overlap/"},
    "cupy": {"runtime/"},
    "nvshmem": {"runtime/"},
    "cuda": {"runtime/"},
}
"""The only modules, or folders, that import a package."""

ENVIRONMENT_READERS = {
    "machine/config.py": "its purpose",
    "__main__.py": "sets one variable before numpy is imported",
}

MAX_LINES = 400
LONG_MODULES: dict[str, str] = {}
"""A longer module and why it is one."""

LATE = {
    "commands/cli.py": "a command loads what it needs when it is called: 30 ms to 2 s that the others do not wait for",
}
"""Modules all of whose late imports have one reason."""

CALLS = ("C95", "C96", "C97")
"""Codes of exceptions: a call or a machine is at fault, no `.comm` text."""

STAGES = (
    (
        *("machine/printable", "machine/errors", "machine/config", "machine/resources", "machine/shortage"),
        *("machine/private", "machine/unfinished", "machine/cache"),
    ),
    ("language",),
    ("machine",),
    ("ir",),
    ("checks", "program", "cost", "planner"),
    ("build/emit", "build/constants", "build/headers", "build/calls", "build/built"),
    ("compiler",),
    ("build",),
    ("runtime", "dispatch", "ep", "attention", "overlap"),
    ("commands",),
)
"""What may be imported lies in the same row or above."""


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> tuple[str, ...]:
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    """Every module a file imports, wherever in the file."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            if node.module == "commdsl":
                yield from (f"commdsl.{alias.name}" for alias in node.names)


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("package", sorted(WALLS))
def test_walls(package: str) -> None:
    """Only the modules named in WALLS import a package."""
    found = {name_of(path) for path in MODULES for name in imports(path) if name.split(".")[0] == package}
    allowed = WALLS[package]

    assert {name for name in found if not any(name == one or name.startswith(one) for one in allowed)} == set()


def test_import_is_light() -> None:
    """`import commdsl` brings in neither numpy nor any package behind a wall."""
    heavy = sorted({*WALLS, "numpy"} - {"cuda"})
    code = f"import sys, commdsl; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)

    assert done.stdout.strip() == "[]"


def test_checking_needs_no_template_and_no_torch() -> None:
    """The path of `commdsl check` imports neither jinja2, rich, torch nor a builder."""
    heavy = ["jinja2", "rich", "torch", "commdsl.build.emit", "commdsl.build"]
    code = f"import sys, commdsl.commands.check; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)

    assert done.stdout.strip() == "[]"


def stage_of(name: str) -> int | None:
    """The row of a module, given by its path below the package; None for what belongs to no stage."""
    rows = {stage: row for row, stages in enumerate(STAGES) for stage in stages}
    parts = name.removesuffix(".py").split("/")
    return next((rows["/".join(parts[:n])] for n in range(len(parts), 0, -1) if "/".join(parts[:n]) in rows), None)


def test_stages_look_left() -> None:
    """A stage imports only stages above it."""
    wrong = []
    for path in MODULES:
        here = stage_of(name_of(path))
        for imported in imports(path):
            row = stage_of(imported.removeprefix("commdsl.").replace(".", "/"))
            if imported.startswith("commdsl.") and here is not None and row is not None and here < row:
                wrong.append(f"{name_of(path)} imports {imported}")

    assert wrong == []


def links(path: Path) -> set[str]:
    """The modules of the package that a file imports, late or for types alone; of a package, what it takes from it."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                found.add(inside if inside in NAMES else node.module)
    return found & NAMES.keys()


def test_no_circles() -> None:
    """No module is behind itself in what it imports, late imports and those for types included."""
    waiting = {name: links(path) - {name} for name, path in NAMES.items()}
    while free := [name for name, behind in waiting.items() if not behind]:
        for name in free:
            del waiting[name]
        waiting = {name: behind - set(free) for name, behind in waiting.items()}

    assert sorted(waiting) == []  # these are in a circle, or import what is


def test_rooms() -> None:
    """The package is at most a dozen names beside what is built on it alone, each a room, the story or the door."""
    names = {name_of(path).split("/")[0] for path in MODULES} - {"__init__.py", "__main__.py"}

    assert len(names - {"ep", "attention", "overlap"}) <= 12
    assert {name.removesuffix(".py") for name in names} == {
        stage.split("/")[0] for stages in STAGES for stage in stages
    }


@pytest.mark.parametrize("room", sorted({path.parent for path in MODULES} - {PACKAGE}), ids=lambda room: room.name)
def test_rooms_list_what_is_in_them(room: Path) -> None:
    """The docstring of a folder names every part of it, so that one page tells a newcomer where to look."""
    docstring = ast.get_docstring(tree(room / "__init__.py")) or ""
    folders = {path.parent.name for path in room.glob("*/__init__.py")}
    parts = {path.stem for path in room.glob("*.py")} - {"__init__"} | folders

    assert {part for part in parts if not re.search(rf"\b{part}\b", docstring)} == set()


def late_imports(node: ast.AST, inside: bool = False) -> Iterator[ast.stmt]:
    """The imports that run when a function does; of several in a row the first."""
    before: ast.AST | None = None
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            if inside and not isinstance(before, ast.Import | ast.ImportFrom):
                yield child
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from late_imports(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))
        before = child


def test_late_imports_have_a_reason() -> None:
    """An import inside a function says beside it, or above, what is bought by it."""
    wrong = []
    for path in MODULES:
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in late_imports(tree(path)):
            above = lines[node.lineno - 2].strip()
            if name_of(path) not in LATE and "  # " not in lines[node.lineno - 1] and not above.startswith("# "):
                wrong.append(f"{name_of(path)}:{node.lineno}")

    assert wrong == []
    assert LATE.keys() <= {name_of(path) for path in MODULES if any(late_imports(tree(path)))}


def test_environment() -> None:
    """Nothing but `config` reads the environment, with the exceptions listed and their reasons."""
    reads = re.compile(r"\bos\.(environ|getenv)\b")
    found = {name_of(path) for path in MODULES if reads.search(path.read_text(encoding="utf-8"))}

    assert found <= ENVIRONMENT_READERS.keys()


def test_settings_are_listed() -> None:
    """README.md lists every variable of the environment that is read, and no other."""
    text = (PACKAGE / "machine" / "config.py").read_text(encoding="utf-8")
    read = set(re.findall(r'"((?:COMMDSL|NVSHMEM|CUDA)_[A-Z_]+|CXX|NO_COLOR|TERM)"', text))
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("### Settings")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE)

    assert len(read) >= 8
    assert {name for row in rows for name in re.findall(r"`([A-Z_]+)`", row)} == read


def test_module_size() -> None:
    """No module or template is longer than 400 lines, unless listed with a reason; and the list has no dead entry."""
    templates = [path for path in (ROOT / "templates").rglob("*") if path.is_file()]
    lines = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in (*MODULES, *templates)
    }

    assert {name for name, count in lines.items() if count > MAX_LINES} - LONG_MODULES.keys() == set()
    assert LONG_MODULES.keys() - lines.keys() == set()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_docstring(path: Path) -> None:
    """A module says what it does, what it assumes and what it does not do."""
    docstring = ast.get_docstring(tree(path))

    assert docstring is not None
    assert path.name == "__init__.py" or (
        "Assumes" in docstring and ("Does not" in docstring or "does not" in docstring)
    )


@pytest.mark.parametrize("code", codes.all_codes())
def test_code_is_complete(code: str) -> None:
    """A code has a page with a law and a right example, a golden rendering, and a fault file or a word why not."""
    page = codes.page(code)

    assert page.startswith(f"# {code}: ")
    assert len(codes.title(code)) <= 80
    if code.startswith(CALLS):
        assert "```python" in page
        return
    assert "```comm right" in page
    assert (ROOT / "tests" / "golden" / f"{code}.txt").is_file()
    if not list((ROOT / "tests" / "faults").glob(f"{code}_*.comm")):
        assert re.search(r"break (Plans|routes|protocols) instead", page)


def test_codes_in_use() -> None:
    """Every code that the source names has a page, and every page's code is named in the source."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in MODULES)
    named = set(re.findall(r"[\"'](C\d{3})[\"']", text))

    assert named == set(codes.all_codes())


def test_errors_are_public() -> None:
    """Every error that a user can mend has the one base, and is a name of `commdsl` that leads to where it is."""
    found = {"Error": "commdsl.machine.errors"}
    while True:
        more = {
            node.name: name
            for name, path in NAMES.items()
            for node in ast.walk(tree(path))
            if isinstance(node, ast.ClassDef) and any(getattr(base, "id", "") in found for base in node.bases)
        }
        if more.keys() <= found.keys():
            break
        found |= more

    assert "TensorError" in found
    for name in ("CodedError", "NoHostCompilerError"):  # the first is never raised, the second a MissingToolError
        del found[name]
    assert found.items() <= commdsl._HOME.items()


def test_no_machine_paths() -> None:
    """No committed file names a place on somebody's machine, or leaves work for later."""
    paths = re.compile(r"(?<![\w.$}])/(home(?!/somebody)|root|work|Users|tmp|opt)/\w")
    later = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    wrong = []
    for path in tracked():
        if path != Path(__file__):
            text = path.read_text(encoding="utf-8", errors="replace")
            wrong += [f"{path.relative_to(ROOT)}: {match[0]}" for match in paths.finditer(text)]
            wrong += [f"{path.relative_to(ROOT)}: {match[0]}" for match in later.finditer(text)]

    assert wrong == []


def test_top_level() -> None:
    """Nothing stands at the top but what the README names."""
    allowed = {"README.md", "pyproject.toml", "LICENSE", "CHANGELOG.md"}
    folders = {"commdsl", "grammar", "templates", "schedules", "generated", "tests", "benchmarks", "examples"}
    found = {path.relative_to(ROOT).parts[0] for path in tracked()}

    assert {name for name in found if not name.startswith(".")} <= allowed | folders


def test_every_ignore_says_why() -> None:
    """A `noqa` or `type: ignore` names its rule, and its line or the one above says why."""
    bare = re.compile(r"#\s*(noqa(?!:)|type:\s*ignore(?!\[))")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked()
        if path.suffix == ".py" and path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if bare.search(line)
    ]

    assert wrong == []
