"""Turns the words of a command line into one call of a command, and what comes of it into an exit code.

Assumes the commands in `commands`, which are imported only when called. Does not do their work.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import click

from commdsl.commands import arguments
from commdsl.commands.arguments import (
    Params,
    UsageError,
    file_and_params,
    files_and_params,
    in_folders,
    named,
    split_words,
    target,
)
from commdsl.commands.failures import of_system, short_of_memory, unexpected
from commdsl.commands.options import (
    HOW,
    TORCHRUN,
    WHAT,
    App,
    Grouped,
    ReaderGoneError,
    as_json,
    of_attention,
    only_check,
    option,
    text_to_write,
    to_draw,
    to_write,
    usage_text,
    where,
    words,
)
from commdsl.commands.output import Exit, close_stdout, show_diagnostics, tell
from commdsl.language.diagnostics import CommError
from commdsl.machine import resources
from commdsl.machine.config import SettingWarning, unread
from commdsl.machine.errors import Error

Words: TypeAlias = tuple[str, ...]
Text: TypeAlias = str | None

FILES = "FILE... [NAME=VALUE]..."
ROWS = click.IntRange(1, (1 << 31) - 1)
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def say_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"commdsl {resources.version()}")
        ctx.exit()


@click.group(cls=App, context_settings=SETTINGS)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=say_version, help="Say which.")
def app() -> None:
    """Prove, run and compile GPU communication schedules written in .comm files.

    FILE is a .comm file or the name of a shipped one (commdsl list); FILE.comm:NAME is one of its declarations.
    """


@app.command("list", cls=Grouped, example="list")
@as_json
def list_(as_json: bool) -> Exit:
    """List what is shipped: schedules, dispatches, plans and topologies, for how many ranks, and what each does."""
    from commdsl.commands.listing import list_shipped

    return list_shipped(as_json=as_json)


@app.command(cls=Grouped, example="check allreduce_ring rotation_ring --ranks 2..8")
@words(FILES)
@where
@option("--concise", is_flag=True, help="One line per diagnostic.")
@as_json
def check(words: Words, concise: bool, as_json: bool, **chosen: Any) -> Exit:
    """Prove all that the files, or all .comm files below a folder, declare, or show every fault in them."""
    from commdsl.commands.check import check

    if concise and as_json:
        raise UsageError("--concise is one line a diagnostic, --json has all of each: one of the two")
    files, params, name = files_and_params(in_folders(words), chosen["schedule"])
    return check(files, aim(chosen, params), name, as_json=as_json, concise=concise)


@app.command(cls=Grouped, example="show allreduce_ring --stage plan --ranks 4")
@words("FILE [NAME=VALUE]...")
@option(
    "--stage",
    section=WHAT,
    type=click.Choice(["syntax", "ir", "plan", "cuda", "host", "timeline"]),
    default="ir",
    show_default=True,
    help="Which; `syntax` is the text as written, for any --ranks, --on, --tune and parameters.",
)
@where
@option("--shape", section=WHAT, metavar="MxKxN", help="Of a timeline: rows of all ranks, depth, columns.")
@option("--device", section=WHAT, metavar="NAME", help="Of a timeline: the GPU; default: --on's or this one.")
@option("--svg", type=to_draw, metavar="FILE", help="Draw who sends what to whom, of plans.")
@as_json
def show(words: Words, stage: str, svg: Path | None, as_json: bool, shape: Text, device: Text, **chosen: Any) -> Exit:
    """Print one stage of a file; of dispatch plans who sends what to whom, and how even the loads are; of products
    beside what travels, `--stage timeline`, when each begins and ends by the model.
    """
    from commdsl.commands.show import Stage, show
    from commdsl.commands.timeline import timeline

    file, params, name = file_and_params(words, chosen["schedule"])
    if stage == "timeline":
        if shape is None or svg is not None:
            raise UsageError(f"--stage timeline {'has no --svg' if svg else 'has a --shape as in 8192x4096x1024'}")
        return timeline(file, aim(chosen, params), name, shape, device, as_json=as_json)
    if shape is not None or device is not None:
        raise UsageError(f"--{'device' if shape is None else 'shape'} is for --stage timeline, not for {stage}")
    return show(file, aim(chosen, params), name, Stage(stage), svg=svg, as_json=as_json)


@app.command(cls=Grouped, example="plan 16384 8192 8192 4096 4096 --ranks 4")
@words("LENGTHS...")
@option(
    "--ranks",
    section=WHAT,
    type=click.IntRange(1),
    metavar="N",
    help="How many; those of the machine or plan unless said.",
)
@option(
    "--on",
    section=WHAT,
    metavar="TOPOLOGY",
    help="A shipped topology, or a .comm file with one; a flat switch unless said.",
)
@option("--name", section=WHAT, metavar="NAME", help="Of the plan; balanced unless said.")
@option("--mask", section=WHAT, type=click.Choice(["causal", "full"]), help="What queries see; causal unless said.")
@option("--widths", section=WHAT, default="8192,2048,2048", show_default=True, metavar="Q,K,V", help="Bytes of a row.")
@option("--tolerance", section=HOW, default="2%", show_default=True, metavar="SHARE", help="Attention above the mean.")
@option(
    "--shortest",
    section=HOW,
    default=128,
    show_default=True,
    type=ROWS,
    metavar="TOKENS",
    help="Of a shard.",
)
@option("--queries", section=HOW, type=ROWS, metavar="ROWS", help="The most that a rank may receive.")
@option("--keys", section=HOW, type=ROWS, metavar="ROWS", help="The most that a rank may receive.")
@option("--relay", section=HOW, is_flag=True, help="Ranks without a link may send to each other, through others.")
@option("--out", "-o", type=text_to_write, metavar="FILE", help="Where to; printed unless said.")
@option("--svg", type=to_draw, metavar="FILE", help="Draw the plan.")
@as_json
def plan(words: Words, out: Path | None, svg: Path | None, as_json: bool, **chosen: Any) -> Exit:
    """Balance attention: from document LENGTHS (numbers; files as text, CSV, JSON; or a plan) to a dispatch plan."""
    from commdsl.commands.plan import parse, plan

    return plan(words, parse(**chosen), out, svg, as_json=as_json)


@app.command(cls=Grouped, example="synth allgather --on dgx1 --out allgather_dgx1.comm")
@click.argument("collective")
@option("--on", section=WHAT, metavar="TOPOLOGY", help="A shipped topology, or a .comm file with one; needed.")
@option("--root", section=WHAT, type=click.IntRange(0), metavar="RANK", help="Of a broadcast or reduce; 0 unless said.")
@option("--name", section=WHAT, metavar="NAME", help="Of the schedule; COLLECTIVE_TOPOLOGY unless said.")
@option("--out", "-o", type=text_to_write, metavar="FILE", help="Where to; printed unless said.")
@as_json
def synth(collective: str, out: Path | None, as_json: bool, **chosen: Any) -> Exit:
    """Write a schedule for a machine that no shipped one fits: allgather, reduce_scatter, allreduce, broadcast, reduce.

    Spanning trees are packed to what the machine's cuts leave, and the file is proved before it is written.
    """
    from commdsl.commands.synth import parse, synth

    return synth(parse(collective, **chosen), out, as_json=as_json)


@app.command(cls=Grouped, example="compile allreduce_ring --ranks 4 --out kernels")
@click.argument("words", nargs=-1, metavar="[FILE]... [NAME=VALUE]...")
@where
@option("--out", "-o", type=click.Path(path_type=Path), metavar="FOLDER", help="Where to; here unless said.")
@option("--arch", section=HOW, metavar="A,B", help="Build kernels ahead of time: sm_90, sm_100, ...; none unless said.")
@option("--dtype", section=HOW, metavar="A,B", help="With --arch: float32,float16,bfloat16 unless said.")
@option("--op", section=HOW, metavar="A,B", help="With --arch: sum,avg unless said.")
@only_check
@as_json
def compile(words: Words, out: Path | None, only_check: bool, as_json: bool, **chosen: Any) -> Exit:
    """Write NAME.cu and an importable NAME.py per declaration; with no file, the shipped ones into generated/.

    NAME.py has the text in it, so both may be moved; with --arch they need no compiler where they run.
    """
    from commdsl.commands import cubins
    from commdsl.commands.compile import compile

    files, params, name = named(*split_words(words), chosen["schedule"])
    variants = cubins.parse(chosen["arch"], chosen["dtype"], chosen["op"])
    return compile(files, aim(chosen, params), name, out, variants, check=only_check, as_json=as_json)


@app.command(cls=Grouped, example="run rotation_ring --ranks 4 --bytes 64KB --dtype bfloat16")
@words("FILE [NAME=VALUE]...")
@where
@option("--bytes", "size", section=HOW, metavar="SIZE", help="The largest buffer of a rank (1MB), or a row (64).")
@option("--dtype", section=HOW, default="float32", show_default=True, help="float32, bfloat16, int32, ...")
@option("--op", section=HOW, help="sum (unless said), max, min, prod or avg; a dispatch adds up.")
@option("--plan", "plan_file", section=HOW, metavar="FILE", help="Where the rows of a dispatch go.")
@option("--sanitize", section=HOW, is_flag=True, help="Under ThreadSanitizer.")
@option("--processes", section=HOW, is_flag=True, help="One process per rank instead of threads.")
@option("--profile", section=HOW, is_flag=True, help="When each rank worked, waited and sent, by time stamps.")
@option(
    "--svg",
    type=to_draw,
    metavar="FILE",
    help="Draw the machine with its busiest links and the steps, or the cycles of a rotation.",
)
@as_json
def run(words: Words, svg: Path | None, plan_file: Text, as_json: bool, **chosen: Any) -> Exit:
    """Prove a file, run its emitted kernels on host ranks beside the oracle, and print cost and timeline."""
    from commdsl.commands.run import run
    from commdsl.commands.trial import Settings

    file, params, name = file_and_params(words, chosen["schedule"])
    if chosen["sanitize"] and chosen["processes"]:
        raise UsageError("ThreadSanitizer sees one process only: --sanitize or --processes, not both")
    size = None if chosen["size"] is None else arguments.parse_bytes(chosen["size"])
    how = (chosen[one] for one in ("dtype", "op", "sanitize", "processes", "profile"))
    settings = Settings(size, *how)
    plan = None if plan_file is None else arguments.place_of(plan_file)
    return run(file, aim(chosen, params), name, settings, plan=plan, svg=svg, as_json=as_json)


@app.command(cls=Grouped, example="fmt my_ring.comm")
@words("FILE...")
@only_check
@as_json
def fmt(words: Words, only_check: bool, as_json: bool) -> Exit:
    """Format files, or those below folders, in the one canonical way; - is standard input."""
    from commdsl.commands.fmt import fmt

    for word in words:
        if not word or (word != "-" and not Path(word).is_dir()):
            arguments.place_of(word)
    return fmt(tuple(map(Path, words)), check=only_check, as_json=as_json)


@app.command(cls=Grouped, example="tune my_ring.comm --sizes 1KB..64MB", launcher=TORCHRUN)
@click.argument("words", nargs=-1, metavar="[FILE]... [NAME=VALUE]...")
@option("--collectives", section=WHAT, default="all", show_default=True, metavar="A,B", help="all_reduce, ...")
@option("--sizes", section=WHAT, default="1KB..1GB", show_default=True, metavar="FROM..TO", help="Of the larger side.")
@option("--factor", section=WHAT, default=4, show_default=True, metavar="N", help="From one size to the next.")
@option("--dtype", section=WHAT, default="bfloat16", show_default=True, help="float32, bfloat16, int32, ...")
@option("--shapes", section=WHAT, metavar="KxN,...", help="Of products beside what travels.")
@option("--time-budget", section=HOW, default=480.0, show_default=True, metavar="SECONDS", help="For all collectives.")
@option("--memory", section=HOW, default="256MB", show_default=True, metavar="SIZE", help="Symmetric, of an op.")
@option("--output", "-o", type=to_write, metavar="FILE", help="Named after the machine unless said.")
def tune(words: Words, collectives: str, sizes: str, factor: int, output: Path | None, **limits: Any) -> Exit:
    """Measure schedules and tunings on this machine, under torchrun, and write the table of the fastest; the FILES'
    schedules beside the shipped ones.
    """
    from commdsl.commands.candidates import families_of
    from commdsl.commands.tune import parse, tune

    own, memory = families_of(*split_words(words)), arguments.parse_bytes(limits["memory"], "--memory")
    seconds, dtype, shapes = limits["time_budget"], limits["dtype"], limits["shapes"] or ""
    return tune(parse(collectives, sizes, factor, output, seconds, memory, dtype, own, shapes))


@app.command(cls=Grouped, example="choice all_reduce 64KB --ranks 4")
@click.argument("collective")
@click.argument("size")
@option(
    "--ranks", section=WHAT, type=click.IntRange(1), required=True, metavar="N", help="The size of the group; needed."
)
@option("--device", section=WHAT, metavar="NAME", help="The GPU: H200, NVIDIA H200; default: this machine's.")
@option("--float8", section=WHAT, is_flag=True, help="Of a product: factors with a scale each.")
@of_attention
@as_json
def choice(collective: str, size: str, ranks: int, device: Text, float8: bool, as_json: bool, **sizes: Any) -> Exit:
    """Say which schedule `commdsl.COLLECTIVE` runs for SIZE bytes on the larger side of a rank, and why; or for
    `attention`, of SIZE tokens over all ranks.

    For `all_gather_matmul` and its like SIZE is the rows of all ranks, and the depth and columns of a rank's weights,
    as in 4096x8192x3584.
    """
    from commdsl.commands.choice import attention, choice, product
    from commdsl.planner.tuning.selection import COLLECTIVES, PRODUCTS

    if float8 and collective not in PRODUCTS:
        raise UsageError(f"--float8 is for a product, not for {collective}")
    if collective == "attention":
        return attention(size, ranks, device, as_json=as_json, **sizes)
    if collective not in (*COLLECTIVES, *PRODUCTS):
        raise UsageError(f"expected one of {', '.join((*COLLECTIVES, *PRODUCTS))} or attention, got `{collective}`")
    on = sizes.pop("on") if collective in PRODUCTS else None
    if given := [name for name, value in sizes.items() if value not in (None, False)]:
        raise UsageError(f"--{given[0].replace('_', '-')} is for `attention`, not for {collective}")
    if collective in PRODUCTS:
        return product(collective, size, ranks, device, is_float8=float8, on=on, as_json=as_json)
    return choice(collective, arguments.parse_bytes(size, "SIZE"), ranks, device, as_json=as_json)


@app.command(cls=Grouped, example="explain C302")
@click.argument("code", required=False)
@as_json
def explain(code: Text, as_json: bool) -> Exit:
    """Print the law behind a diagnostic's CODE, with a wrong and a right example; without it, all codes."""
    from commdsl.commands.explain import explain

    return explain(code, as_json=as_json)


@app.command(cls=Grouped, example="doctor")
@as_json
def doctor(as_json: bool) -> Exit:
    """Say what this machine can do, and what to install for the rest."""
    from commdsl.commands.doctor import doctor

    return doctor(as_json=as_json)


@app.command(cls=Grouped, example="lsp --on h200_2x8")
@option("--ranks", section=WHAT, metavar="N", help="As `check` takes it; 2..8 unless said, or as many as --on has.")
@option("--on", section=WHAT, metavar="TOPOLOGY", help="As `check` takes it.")
def lsp(ranks: Text, on: Text) -> Exit:
    """Be the language server of an editor, over standard input and output: what `check` says, as you type."""
    from commdsl.commands.lsp.serve import lsp

    return lsp(ranks, on)


@app.command(cls=Grouped, example="cache")
@option("--clear", is_flag=True, help="Remove what is kept; it is made again when it is needed.")
@as_json
def cache(clear: bool, as_json: bool) -> Exit:
    """Say where built kernels are kept, how many entries there are, and how many bytes."""
    from commdsl.commands.cache import cache

    return cache(clear=clear, as_json=as_json)


@app.command(cls=Grouped, example="new allreduce my_first.comm")
@click.argument("kind")
@click.argument("file", required=False, type=text_to_write)
@as_json
def new(kind: str, file: Path | None, as_json: bool) -> Exit:
    """Write a commented .comm file to start from: of a collective (allreduce, rotation, ...), a plan or a dispatch."""
    from commdsl.commands.new import new

    return new(kind, file, as_json=as_json)


def aim(chosen: dict[str, Any], params: Params) -> arguments.Target:
    return target(chosen["ranks"], chosen["on"], params, chosen["tune"])


def run_command(words: Sequence[str]) -> int:
    """The exit code of a command line; nothing escapes. Variables that are no settings are named once, before it."""
    for said in unread().values():
        tell(f"warning: {said}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SettingWarning)
        return exit_code(words)


def exit_code(words: Sequence[str]) -> int:
    try:
        code = app.main(list(words) or ["--help"], prog_name="commdsl", standalone_mode=False)
        sys.stdout.flush()
        return int(code or Exit.FINE) if words else int(Exit.USAGE)
    except CommError as error:
        show_diagnostics(error.diagnostics)
        return int(Exit.DIAGNOSTICS)
    except (Error, UsageError, click.UsageError) as error:
        tell(f"usage: {error if isinstance(error, Error) else usage_text(error)}")
        return int(Exit.USAGE)
    except (KeyboardInterrupt, click.Abort):
        tell("interrupted")
        return int(Exit.INTERRUPTED)
    except (ReaderGoneError, BrokenPipeError):
        close_stdout()
        return int(Exit.FINE)
    except MemoryError as error:
        return short_of_memory(str(error))
    except OSError as error:
        return of_system(error)
    except Exception:
        return unexpected(words)
