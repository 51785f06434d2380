"""Turns the words of a command line into one call of a command, and what comes of it into an exit code.

Assumes the commands in `commands`, which are imported only when called. Does not do their work.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import click

from commdsl.commands import arguments
from commdsl.commands.arguments import UsageError, split_words, target
from commdsl.commands.output import Exit, show_diagnostics, tell
from commdsl.language.diagnostics import CommError
from commdsl.machine.errors import Error

Words: TypeAlias = tuple[str, ...]
Text: TypeAlias = str | None
Command = TypeVar("Command", bound=Callable[..., Any])


def together(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, in the order of the help text."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


words = click.argument("words", nargs=-1, required=True, metavar="FILE... [NAME=VALUE]...")
as_json = click.option("--json", "as_json", is_flag=True, help="One JSON value on standard output.")
only_check = click.option("--check", "only_check", is_flag=True, help="Write nothing; fail where a file would change.")
where = together(
    click.option("--ranks", metavar="N", help="A number, a list `2,4,8`, a range `2..16`; 8 unless --on says."),
    click.option("--on", metavar="TOPOLOGY", help="A topology of the file, of one it uses, or a shipped one."),
    click.option("--schedule", metavar="NAME", help="One schedule, dispatch or plan of the file; all unless said."),
    click.option(
        "--tune", multiple=True, metavar="KEY=VALUE", help="In place of what the file tunes: lanes=16, tile=4KB, ..."
    ),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def app() -> None:
    """Prove, run and compile GPU communication schedules written in .comm files."""


@app.command()
@words
@where
@click.option("--concise", is_flag=True, help="One line per diagnostic.")
@as_json
def check(words: Words, ranks: Text, on: Text, schedule: Text, tune: Words, concise: bool, as_json: bool) -> None:
    """Prove every schedule, plan and dispatch of the files, or show every fault in them."""
    from commdsl.commands.check import check

    files, params = files_and_params(words)
    leave(check(files, target(ranks, on, params, tune), schedule, as_json=as_json, concise=concise))


@app.command()
@words
@click.option(
    "--stage",
    type=click.Choice(["syntax", "ir", "plan", "cuda", "host"]),
    default="ir",
    show_default=True,
    help="Which.",
)
@where
@click.option("--svg", type=click.Path(path_type=Path), metavar="FILE", help="Draw who sends what to whom, of plans.")
@as_json
def show(words: Words, stage: str, svg: Path | None, as_json: bool, **chosen: Any) -> None:
    """Print one stage of a file; of dispatch plans who sends what to whom, and how even the loads are."""
    from commdsl.commands.show import Stage, show

    file, params = file_and_params(words)
    wanted = target(chosen["ranks"], chosen["on"], params, chosen["tune"])
    leave(show(file, wanted, chosen["schedule"], Stage(stage), svg=svg, as_json=as_json))


@app.command()
@click.argument("words", nargs=-1, required=True, metavar="LENGTHS...")
@click.option(
    "--ranks", type=click.IntRange(1), metavar="N", help="How many; those of the machine or plan unless said."
)
@click.option(
    "--on", metavar="TOPOLOGY", help="A shipped topology, or a .comm file with one; a flat switch unless said."
)
@click.option("--out", "-o", type=click.Path(path_type=Path), metavar="FILE", help="Where to; printed unless said.")
@click.option("--name", metavar="NAME", help="Of the plan.")
@click.option("--mask", type=click.Choice(["causal", "full"]), help="What queries attend to; causal unless said.")
@click.option(
    "--tolerance", default="2%", show_default=True, metavar="SHARE", help="A rank's attention above the mean."
)
@click.option(
    "--shortest", default=128, show_default=True, type=click.IntRange(1), metavar="TOKENS", help="Of a shard."
)
@click.option("--queries", type=click.IntRange(1), metavar="ROWS", help="The most that a rank may receive.")
@click.option("--keys", type=click.IntRange(1), metavar="ROWS", help="The most that a rank may receive.")
@click.option("--widths", default="8192,2048,2048", show_default=True, metavar="Q,K,V", help="Bytes of a row.")
@click.option("--relay", is_flag=True, help="Ranks without a link may send to each other: the machine passes it on.")
@click.option("--svg", type=click.Path(path_type=Path), metavar="FILE", help="Draw the plan.")
@as_json
def plan(words: Words, out: Path | None, svg: Path | None, as_json: bool, **chosen: Any) -> None:
    """Balance attention: from document LENGTHS (numbers; files as text, CSV, JSON; or a plan) to a dispatch plan."""
    from commdsl.commands.plan import parse, plan

    leave(plan(words, parse(**chosen), out, svg, as_json=as_json))


@app.command()
@click.argument("words", nargs=-1, metavar="[FILE]... [NAME=VALUE]...")
@click.option("--out", "-o", type=click.Path(path_type=Path), metavar="FOLDER", help="Where to; here unless said.")
@only_check
@where
@as_json
def compile(words: Words, out: Path | None, only_check: bool, as_json: bool, **chosen: Any) -> None:
    """Write NAME.cu and an importable NAME.py per declaration; with no file, the shipped ones into generated/."""
    from commdsl.commands.compile import compile

    files, params = split_words(words)
    wanted = target(chosen["ranks"], chosen["on"], params, chosen["tune"])
    leave(compile(files, wanted, chosen["schedule"], out, check=only_check, as_json=as_json))


@app.command()
@words
@where
@click.option("--bytes", "size", metavar="SIZE", help="The largest buffer of a rank (1MB unless said), or a row (64).")
@click.option("--dtype", default="float32", show_default=True, help="float32, bfloat16, int32, ...")
@click.option("--op", help="sum (unless said), max, min, prod or avg; a dispatch adds up.")
@click.option("--sanitize", is_flag=True, help="Under ThreadSanitizer.")
@click.option("--processes", is_flag=True, help="One process per rank instead of threads.")
@click.option(
    "--plan", "plan_file", type=click.Path(path_type=Path), metavar="FILE", help="Where the rows of a dispatch go."
)
@click.option(
    "--svg", type=click.Path(path_type=Path), metavar="FILE", help="Draw the machine, its busiest links and the steps."
)
@as_json
def run(words: Words, svg: Path | None, plan_file: Path | None, as_json: bool, **chosen: Any) -> None:
    """Prove a file, run its emitted kernels on host ranks beside the oracle, and print cost and timeline."""
    from commdsl.commands.run import run
    from commdsl.commands.trial import Settings

    file, params = file_and_params(words)
    if chosen["sanitize"] and chosen["processes"]:
        raise UsageError("ThreadSanitizer sees one process only: --sanitize or --processes, not both")
    size = None if chosen["size"] is None else arguments.parse_bytes(chosen["size"])
    settings = Settings(size, chosen["dtype"], chosen["op"], chosen["sanitize"], chosen["processes"])
    wanted = target(chosen["ranks"], chosen["on"], params, chosen["tune"])
    leave(run(file, wanted, chosen["schedule"], settings, plan=plan_file, svg=svg, as_json=as_json))


@app.command()
@click.argument("words", nargs=-1, required=True, metavar="FILE...")
@only_check
@as_json
def fmt(words: Words, only_check: bool, as_json: bool) -> None:
    """Format files, or those below folders, in the one canonical way; `-` is standard input."""
    from commdsl.commands.fmt import fmt

    for word in words:
        if word != "-" and not Path(word).exists():
            raise UsageError(f"no such file: {word}")
    leave(fmt(tuple(map(Path, words)), check=only_check, as_json=as_json))


@app.command()
@click.option("--collectives", default="all", show_default=True, metavar="A,B", help="all_reduce, all_gather, ...")
@click.option("--sizes", default="1KB..1GB", show_default=True, metavar="FROM..TO", help="Bytes of the larger side.")
@click.option("--factor", default=4, show_default=True, metavar="N", help="From one size to the next.")
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), metavar="FILE", help="Named after the machine unless said."
)
@click.option("--time-budget", default=480.0, show_default=True, metavar="SECONDS", help="For all collectives.")
@click.option(
    "--memory", default="256MB", show_default=True, metavar="SIZE", help="Symmetric memory of an op, at most."
)
@click.option("--dtype", default="bfloat16", show_default=True, help="float32, bfloat16, int32, ...")
def tune(collectives: str, sizes: str, factor: int, output: Path | None, **limits: Any) -> None:
    """Measure schedules and tunings on this machine, under torchrun, and write the table of the fastest."""
    from commdsl.commands.tune import parse, tune

    memory = arguments.parse_bytes(limits["memory"], "--memory")
    wanted = parse(collectives, sizes, factor, output, limits["time_budget"], memory, limits["dtype"])
    leave(tune(wanted))


@app.command()
@click.argument("collective")
@click.argument("size")
@click.option("--ranks", type=int, required=True, metavar="N", help="The size of the group.")
@click.option("--device", metavar="NAME", help="As torch names the GPU; this machine's unless said.")
@as_json
def choice(collective: str, size: str, ranks: int, device: Text, as_json: bool) -> None:
    """Say which schedule `commdsl.COLLECTIVE` runs for SIZE bytes on the larger side of a rank, and why."""
    from commdsl.commands.choice import choice

    leave(choice(collective, arguments.parse_bytes(size, "SIZE"), ranks, device, as_json=as_json))


@app.command()
@click.argument("code", required=False)
@as_json
def explain(code: Text, as_json: bool) -> None:
    """Print the law behind a diagnostic's CODE, with a wrong and a right example; without it, all codes."""
    from commdsl.commands.explain import explain

    leave(explain(code, as_json=as_json))


@app.command()
@as_json
def doctor(as_json: bool) -> None:
    """Say what this machine can do, and what to install for the rest."""
    from commdsl.commands.doctor import doctor

    leave(doctor(as_json=as_json))


@app.command()
@click.argument("kind")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@as_json
def new(kind: str, file: Path | None, as_json: bool) -> None:
    """Write a commented .comm file to start from: of a collective (allreduce, rotation, ...), a plan or a dispatch."""
    from commdsl.commands.new import new

    leave(new(kind, file, as_json=as_json))


def files_and_params(words: Words) -> tuple[tuple[Path, ...], tuple[tuple[str, int], ...]]:
    files, params = split_words(words)
    if not files:
        raise UsageError("no file given")
    return files, params


def file_and_params(words: Words) -> tuple[Path, tuple[tuple[str, int], ...]]:
    files, params = files_and_params(words)
    if len(files) > 1:
        raise UsageError(f"one file at a time, got {', '.join(map(str, files))}")
    return files[0], params


def leave(code: Exit) -> None:
    sys.exit(int(code))


def run_command(words: Sequence[str]) -> int:
    """The exit code of a command line; nothing escapes."""
    try:
        app(list(words), prog_name="commdsl")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(Exit.USAGE)
    except UsageError as error:
        tell(f"usage: {error}")
        return int(Exit.USAGE)
    except CommError as error:
        show_diagnostics(error.diagnostics)
        return int(Exit.DIAGNOSTICS)
    except (Error, FileNotFoundError, IsADirectoryError, PermissionError, UnicodeDecodeError) as error:
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
