"""Turns the words of a command line into one call of a command, and what comes of it into an exit code.

Assumes the commands in `commands`, which are imported only when called. Does not do their work.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from commdsl.commands import arguments
from commdsl.commands.arguments import UsageError, split_words, target
from commdsl.commands.output import Exit, show_diagnostics, tell
from commdsl.diagnostics import CommError

app = typer.Typer(
    name="commdsl",
    help="Prove, run and compile GPU communication schedules written in .comm files.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Files = Annotated[list[str], typer.Argument(metavar="FILE|NAME=VALUE", help="files, and parameter values")]
OptionalFiles = Annotated[
    list[str] | None, typer.Argument(metavar="FILE|NAME=VALUE", help="files, and parameter values")
]
Ranks = Annotated[
    str | None,
    typer.Option("--ranks", metavar="N", help="a number, a list `2,4,8`, a range `2..16`; 8 unless --on says"),
]
On = Annotated[
    str | None,
    typer.Option("--on", metavar="TOPOLOGY", help="a topology of the file, of one it uses, or a shipped one"),
]
Schedule = Annotated[
    str | None, typer.Option("--schedule", metavar="NAME", help="one schedule of the file; all unless said")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", metavar="FOLDER", help="where to; here unless said")]
OnlyCheck = Annotated[bool, typer.Option("--check", help="write nothing; fail where a file would change")]
Size = Annotated[str, typer.Option("--bytes", metavar="SIZE", help="the largest buffer of a rank: 4096, 64KB, 1MB")]
Svg = Annotated[
    Path | None, typer.Option("--svg", metavar="FILE", help="draw the topology, its busiest links and the steps")
]
Collective = Annotated[str, typer.Argument(metavar="COLLECTIVE", help="allreduce, allgather, alltoall, rotation, ...")]
Json = Annotated[bool, typer.Option("--json", help="one JSON value on standard output")]


@app.command()
def check(
    words: Files,
    ranks: Ranks = None,
    on: On = None,
    schedule: Schedule = None,
    concise: Annotated[bool, typer.Option("--concise", help="one line per diagnostic")] = False,
    as_json: Json = False,
) -> None:
    """Prove every schedule of the files, or show every fault in them."""
    from commdsl.commands.check import check

    files, params = files_and_params(words)
    leave(check(files, target(ranks, on, params), schedule, as_json=as_json, concise=concise))


@app.command()
def show(
    words: Files,
    stage: Annotated[str, typer.Option("--stage", metavar="STAGE", help="syntax, ir, plan, cuda or host")] = "ir",
    ranks: Ranks = None,
    on: On = None,
    schedule: Schedule = None,
    as_json: Json = False,
) -> None:
    """Print one stage of a file: syntax, ir, plan, cuda or host."""
    from commdsl.commands.show import Stage, show

    stages = [known.value for known in Stage]
    if stage not in stages:
        raise UsageError(f"--stage expects one of {', '.join(stages)}, got `{stage}`")
    file, params = file_and_params(words)
    leave(show(file, target(ranks, on, params), schedule, Stage(stage), as_json=as_json))


@app.command()
def compile(
    words: OptionalFiles = None,
    out: Out = None,
    only_check: OnlyCheck = False,
    ranks: Ranks = None,
    on: On = None,
    schedule: Schedule = None,
    as_json: Json = False,
) -> None:
    """Write NAME.cu and an importable NAME.py per schedule; with no file, the shipped ones into generated/."""
    from commdsl.commands.compile import compile

    files, params = split_words(words or [])
    leave(compile(files, target(ranks, on, params), schedule, out, check=only_check, as_json=as_json))


@app.command()
def run(
    words: Files,
    ranks: Ranks = None,
    on: On = None,
    schedule: Schedule = None,
    size: Size = "1MB",
    dtype: Annotated[str, typer.Option("--dtype", metavar="DTYPE", help="float32, bfloat16, int32, ...")] = "float32",
    op: Annotated[str, typer.Option("--op", metavar="OP", help="sum, max, min, prod or avg")] = "sum",
    sanitize: Annotated[bool, typer.Option("--sanitize", help="under ThreadSanitizer")] = False,
    processes: Annotated[bool, typer.Option("--processes", help="one process per rank instead of threads")] = False,
    svg: Svg = None,
    as_json: Json = False,
) -> None:
    """Prove a file, run its emitted kernel on host ranks beside the oracle, and print cost and timeline."""
    from commdsl.commands.run import run
    from commdsl.commands.trial import Settings

    file, params = file_and_params(words)
    if sanitize and processes:
        raise UsageError("ThreadSanitizer sees one process only: --sanitize or --processes, not both")
    settings = Settings(arguments.parse_bytes(size), dtype, op, sanitize, processes)
    leave(run(file, target(ranks, on, params), schedule, settings, svg=svg, as_json=as_json))


@app.command()
def fmt(
    words: Annotated[list[str], typer.Argument(metavar="FILE", help="files or folders; `-` for standard input")],
    only_check: OnlyCheck = False,
    as_json: Json = False,
) -> None:
    """Format files in place, in the one canonical way."""
    from commdsl.commands.fmt import fmt

    for word in words:
        if word != "-" and not Path(word).exists():
            raise UsageError(f"no such file: {word}")
    leave(fmt(tuple(map(Path, words)), check=only_check, as_json=as_json))


@app.command()
def explain(
    code: Annotated[str | None, typer.Argument(metavar="[CODE]", help="such as C203; without it, all codes")] = None,
    as_json: Json = False,
) -> None:
    """Print the law behind a diagnostic's code, with a wrong and a right example."""
    from commdsl.commands.explain import explain

    leave(explain(code, as_json=as_json))


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what this machine can do, and what to install for the rest."""
    from commdsl.commands.doctor import doctor

    leave(doctor(as_json=as_json))


@app.command()
def new(
    collective: Collective,
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="my_COLLECTIVE.comm unless said")] = None,
    as_json: Json = False,
) -> None:
    """Write a commented .comm file to start from."""
    from commdsl.commands.new import new

    leave(new(collective, file, as_json=as_json))


def files_and_params(words: list[str]) -> tuple[tuple[Path, ...], tuple[tuple[str, int], ...]]:
    files, params = split_words(words)
    if not files:
        raise UsageError("no file given")
    return files, params


def file_and_params(words: list[str]) -> tuple[Path, tuple[tuple[str, int], ...]]:
    files, params = files_and_params(words)
    if len(files) > 1:
        raise UsageError(f"one file at a time, got {', '.join(map(str, files))}")
    return files[0], params


def leave(code: Exit) -> None:
    raise typer.Exit(int(code))


def run_command(words: Sequence[str]) -> int:
    """The exit code of a command line; nothing escapes."""
    try:
        app(list(words), standalone_mode=True)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(Exit.USAGE)
    except UsageError as error:
        tell(f"usage: {error}")
        return int(Exit.USAGE)
    except CommError as error:
        show_diagnostics(error.diagnostics)
        return int(Exit.DIAGNOSTICS)
    except (FileNotFoundError, IsADirectoryError, PermissionError, UnicodeDecodeError) as error:
        tell(f"usage: {error}")
        return int(Exit.USAGE)
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone, and Python would complain about it at exit
        return int(Exit.FINE)
    except Exception:
        tell(traceback.format_exc())
        tell("commdsl failed, and the file is not to blame: this is a bug in commdsl")
        return int(Exit.INTERNAL)
    return int(Exit.FINE)
