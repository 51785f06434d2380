"""Names of files, and texts, that are written to do harm: in generated modules and kernels, on terminals, in pictures.

Assumes that a file name is any bytes but `/` and NUL, which Python decodes with surrogates where they are not UTF-8.
Does not look at who may write which folder; test_cache.py and test_shortage.py do.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

import commdsl
from commdsl import compiler
from commdsl.build.emit import file_name
from commdsl.commands import products
from commdsl.commands.arguments import Target
from commdsl.commands.cli import run_command
from commdsl.commands.jobs import jobs_of, prove
from commdsl.language import diagnostics, parser
from commdsl.language.diagnostics import CommError
from commdsl.language.source import Source
from commdsl.machine.printable import printable

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "commdsl"
SCHEDULE = """# One shot.
schedule mine for P ranks where P >= 2 {
  inout x
  ensure allreduce(x)
  each r { reduce x @ all -> x }
}
"""
TARGET = Target((2,), None, ())
Capture = pytest.CaptureFixture[str]

NAMES = {
    "code": '\'"""+str(__import__("os").system("echo X")) or """.comm',
    "quotes": '"""".comm',
    "a quote at the end": 'x"',
    "backslash": "x\\",
    "backslash and quote": 'x\\"""\nimport os\n"""\\.comm',
    "newline": 'a\nimport os\nos.abort()\n"""\n.comm',
    "carriage return": "a\r.comm",
    "comment": "*/ } // /* #define x \\\n??/\n.comm",
    "braces": "{name} {0} %s ${x} {{.comm",
    "not UTF-8": os.fsdecode(b"caf\xe9 \xff\x80.comm"),
    "escapes": "\x1b]0;title\x07\x1b[32m\x1b[2Jx\x9b31m\x7f.comm",
    "directions": "\u202ecomm.x\u2066\u200f.comm",
    "lines of Unicode": "a\u2028b\u2029c\x85d\x0be\x0c.comm",
    "markup": "</text><script>alert(1)</script>&amp;[red]x[/red].comm",
}
PIECES = (
    *(
        '"',
        "'",
        '"""',
        "'''",
        "\\",
        "\n",
        "\r",
        "\t",
        "\x1b[31m",
        "\x07",
        "\x00",
        "{",
        "}",
        "%s",
        "??/",
        "*/",
        "/*",
        "#",
    ),
    *(
        "\u202e",
        "\u2028",
        "\x85",
        "\ud800",
        "\udcff",
        "\U0001f600",
        "é",
        " ",
        "a",
        "import os",
        "()",
        "__import__",
        "0",
    ),
)


def random_name(draw: random.Random) -> str:
    """A name of some pieces, characters and bytes, as Python decodes it."""
    pieces = draw.choices((*PIECES, "any", "byte"), k=draw.randrange(1, 12))
    drawn = {"any": lambda: chr(draw.randrange(0x110000)), "byte": lambda: os.fsdecode(bytes([draw.randrange(256)]))}
    text = "".join(drawn[piece]() if piece in drawn else piece for piece in pieces)
    return os.fsdecode(re.sub("[/\0\ud800-\udc7f\udd00-\udfff]", "", text).encode("utf-8", "surrogateescape"))


def made(name: str, text: str = SCHEDULE) -> tuple[str, str]:
    """The module and the kernel that are written of a file of that name."""
    files = compiler.read_text(text, name, Path())
    (job,) = jobs_of(Path("mine.comm"), files, TARGET)
    written = {one.path.name: one.content for one in products.of(prove(job, TARGET, emit=True), Path(), TARGET)}
    return written["mine.py"].decode(), written["mine.cu"].decode()


def shape(module: str) -> str:
    """The module as Python reads it, its docstring and the names of its texts left out."""
    tree = ast.parse(module)
    (document, *rest) = tree.body
    assert isinstance(document, ast.Expr)
    assert isinstance(document.value, ast.Constant)
    assert isinstance(document.value.value, str)
    source = next(node for node in rest if isinstance(node, ast.Assign))
    assert isinstance(source.value, ast.Dict)
    source.value.keys = [ast.Constant("name") for _ in source.value.keys]
    return ast.dump(ast.Module(rest, []))


def code_of(kernel: str) -> str:
    return re.sub(r"//[^\n]*", "", kernel)


def test_any_name(turns: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10,000 names each gives the module and the kernel of a harmless one, but for a docstring and for comments."""
    monkeypatch.setenv("COMMDSL_CACHE_DIR", str(tmp_path))
    draw, (module, kernel) = random.Random(28), made("mine.comm")
    module_shape, kernel_code = shape(module), code_of(kernel)
    for _ in range(turns(10_000, one_in=100)):
        name = random_name(draw)
        hostile_module, hostile_kernel = made(name)
        assert shape(hostile_module) == module_shape, repr(name)
        assert code_of(hostile_kernel) == kernel_code, repr(name)
        assert hostile_module.count("\n") == module.count("\n"), repr(name)
        assert set(hostile_kernel) <= set(kernel) | set(file_name(name)), repr(name)
        assert re.fullmatch(r"[\w.+-]*", file_name(name), re.ASCII), repr(name)
        assert hostile_module.replace("\n", "").isprintable()


@pytest.mark.parametrize("kind", NAMES)
def test_a_file_of_that_name(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Commands take it: what `compile` writes does nothing on import, and nothing raw is printed of the name."""
    monkeypatch.chdir(tmp_path)
    name = NAMES[kind].replace("/", "")
    name = name if name.endswith(".comm") else f"{name}.comm"
    Path(name).write_text(SCHEDULE)
    assert run_command(["compile", name, "--ranks", "2", "--out", "out"]) == 0
    assert shape(Path("out/mine.py").read_text()) == shape(made("mine.comm")[0])
    code = "import sys; sys.path.insert(0, 'out'); import mine; print(sorted(vars(mine)), list(mine.SOURCE.values()))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("['Any', 'SOURCE', '__annotations__'") or "'SOURCE'" in done.stdout
    assert "X\n" not in done.stdout
    for words in (["check"], ["show", "--stage", "syntax"], ["show", "--stage", "plan"], ["fmt", "--check"]):
        assert run_command([*words, name, *(["--ranks", "2"] if words[0] != "fmt" else [])]) == 0
    assert run_command(["run", name, "--ranks", "2", "--bytes", "64", "--svg", "drawn.svg"]) == 0
    said = capsys.readouterr()
    assert (said.out + said.err).replace("\n", "").isprintable()
    ElementTree.fromstring(Path("drawn.svg").read_text())


@pytest.mark.parametrize("kind", NAMES)
def test_faults_of_that_name(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Diagnostics, in full, in a line and as an exception, have the name escaped; JSON gives it back."""
    monkeypatch.chdir(tmp_path)
    name = NAMES[kind].replace("/", "")
    name = name if name.endswith(".comm") else f"{name}.comm"
    Path(name).write_text("schedule mine for P ranks {\n  inout x  \x1b[31m\x07\u202e oops\n}\n")
    for more in ([], ["--concise"]):
        assert run_command(["check", name, *more]) == 1
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.replace("\n", "").isprintable()
        assert printable(name, lines=False) in said.err
    assert run_command(["check", name, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["diagnostics"][0]["primary"]["file"] == name
    with pytest.raises(commdsl.CommError) as caught:
        commdsl.load(Path(name), ranks=2)
    assert str(caught.value).replace("\n", "").isprintable()
    with pytest.raises(commdsl.NotFoundError) as lost:
        commdsl.load(f"none{name}")
    assert str(lost.value).replace("\n", "").isprintable()
    assert run_command(["check", f"none{name}"]) == 2
    assert capsys.readouterr().err.replace("\n", "").isprintable()


def test_marks_stand_under_what_they_mean() -> None:
    """A line with characters that are escaped is as long as it is shown, and so are its marks."""
    source = Source("x.comm", "schedule mine for P ranks {\n  # \x1b[31m\n  inout \x07\x07 x\n}\n")
    with pytest.raises(CommError) as caught:
        parser.parse(source)
    (found,) = caught.value.diagnostics
    lines = diagnostics.render_full(found).splitlines()
    at = next(number for number, line in enumerate(lines) if "^" in line)
    begin = lines[at].index("^")
    assert lines[at - 1][begin:].startswith("\\x07")
    assert lines[at].count("^") >= len("\\x07")


@pytest.mark.parametrize("words", [["check"], ["show", "--stage", "syntax"], ["fmt", "--check"], ["compile", "--out"]])
def test_a_terminal(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """On a terminal there is no escape that a harmless file's output has not, colours in a name included."""

    def said(name: str) -> list[str]:
        folder = name.removesuffix(".comm")
        Path(name).write_text(SCHEDULE.replace("# One shot.", "# \x1b[32m One \x1b]0;x\x07 shot.") + "\n\n")
        run_command([*words, *([folder] if words[-1] == "--out" else []), name])
        found = capsys.readouterr()
        return re.findall(r"[^\n\t -~\u00a1-\U0010ffff]+[^m\n]*m?", found.out + found.err)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert said("\x1b[32mgreen\x1b[0m\x1b[2J.comm") == said("harmless.comm")


def test_a_result_that_programs_read(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `fmt -` and `show` print into a pipe has every character of the text."""
    monkeypatch.chdir(tmp_path)
    text = SCHEDULE.replace("One shot", "One \x1b[32m\u202eé shot")
    Path("mine.comm").write_text(text)
    assert run_command(["fmt", "mine.comm", "--check"]) == 0
    command = [sys.executable, "-P", "-m", "commdsl", "fmt", "-"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, input=text.encode(), env=environment, capture_output=True, check=True)
    assert done.stdout.decode() == text


def test_printable() -> None:
    """Text that is printable stays; the rest is escaped so that it is seen, bytes that are not UTF-8 as bytes."""
    assert printable("café 漢字 ✓\n\tx") == "café 漢字 ✓\n\tx"
    assert printable("a\nb\tc", lines=False) == "a\\nb\\tc"
    assert printable("\x1b[0m\x7f\x9b\u202e\u2028\U000e0001") == "\\x1b[0m\\x7f\\x9b\\u202e\\u2028\\U000e0001"
    assert printable(os.fsdecode(b"\xe9\xff")) == "\\xe9\\xff"
    assert printable("\ud800") == "\\ud800"


# --- names that are made of names -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["class", "None", "__init__", "__main__", "typing", "functools", "commdsl"])
def test_names_that_python_cannot_import(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A declaration whose module could not be imported, or would stand in for one that it imports, is not written."""
    monkeypatch.chdir(tmp_path)
    Path("mine.comm").write_text(SCHEDULE.replace("mine", name))
    assert run_command(["compile", "mine.comm", "--out", "out"]) == 2
    assert f"`{name}` would be {name}.py" in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.parametrize("stem", ["for", "ranks", "é", "a b", "0", "x\x1b[31m", os.fsdecode(b"\xe9")])
@pytest.mark.parametrize("kind", ["allreduce", "plan", "dispatch"])
def test_new_files(kind: str, stem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """A new file declares what its name says where that is a name of the language, and is refused elsewhere."""
    monkeypatch.chdir(tmp_path)
    path = Path(f"{stem}.comm")
    code = run_command(["new", kind, str(path)])
    said = capsys.readouterr()
    assert (said.out + said.err).replace("\n", "").isprintable()
    if code == 0:
        assert run_command(["check", str(path)]) == 0
    else:
        assert (code, path.exists()) == (2, False)
        assert "is not a name" in said.err


@pytest.mark.parametrize("stem", ["café", "a b", "x;y", "漢字"])
def test_machines_of_that_name(stem: str, tmp_path: Path) -> None:
    """The file of a machine gives an op part of its name, which torch knows in ASCII alone."""
    pytest.importorskip("torch")
    path = tmp_path / f"{stem}.comm"
    path.write_text(
        "topology box { nodes 1   gpus 2 per node   sms 132\n  link nvlink in node 450 GB/s per gpu 0.7 us }\n"
    )
    op = commdsl.load("allreduce_oneshot", ranks=2, on=str(path))
    assert str(op).isascii()


# --- what other programs are told -------------------------------------------------------------------------------------


def test_interpreters_do_not_look_here() -> None:
    """Every call of this interpreter has -P: otherwise the folder where the user stands comes first on its path."""
    calls = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Tuple | ast.List):
                words = [ast.unparse(one) for one in node.elts]
                calls += [words[at + 1] for at, word in enumerate(words[:-1]) if word == "sys.executable"]
    assert calls
    assert set(calls) == {"'-P'"}
    used = [path for path in PACKAGE.rglob("*.py") if "sys.executable" in path.read_text(encoding="utf-8")]
    assert sum(path.read_text(encoding="utf-8").count("sys.executable") for path in used) == len(calls)


def test_ziglang_of_this_folder_is_not_run(tmp_path: Path) -> None:
    """Where there is no compiler but the wheel, a folder of its name beside the user is not taken for it."""
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__init__.py").write_text("")
    (tmp_path / "ziglang" / "__main__.py").write_text("open('ran', 'w').close(); print('zig 1')\n")
    code = (
        "import sys; sys.path.insert(0, '')\n"  # as python -m commdsl has it
        "from commdsl.build import host; from commdsl.machine.config import from_environment\n"
        "print(host.find_compiler(from_environment({})))"
    )
    environment = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert not (tmp_path / "ran").exists()
