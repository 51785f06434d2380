"""Turns what the commands have in common into click's terms: options under headings, a hint for a word nearly right.

Assumes click. Does not know what a command does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import click

from commdsl.commands.arguments import UsageError
from commdsl.machine import resources

Command = TypeVar("Command", bound=Callable[..., Any])

TORCHRUN = "torchrun --nproc-per-node 2 -m commdsl"

SENTENCE = 200
"""Letters."""

WHAT, HOW, OUTPUT = "What", "How it runs", "Output"


class ReaderGoneError(Exception):
    """Nobody reads standard output any more."""


class Option(click.Option):
    """An option under a heading of the help text."""

    def __init__(self, *names: Any, section: str = OUTPUT, **said: Any) -> None:
        super().__init__(*names, **said)
        self.section = section


class Grouped(click.Command):
    """A command whose options stand under their headings, and whose `example` is a command line that runs."""

    def __init__(self, *said: Any, example: str, launcher: str = "commdsl", **more: Any) -> None:
        super().__init__(*said, **more)
        self.example = example
        self.epilog = f"\b\nExample:\n  {launcher} {example}"

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title in (WHAT, HOW, OUTPUT):
            params = [param for param in self.get_params(ctx) if getattr(param, "section", OUTPUT) == title]
            rows = [param.get_help_record(ctx) for param in params if isinstance(param, click.Option)]
            if rows:
                with formatter.section(title):
                    formatter.write_dl([row for row in rows if row is not None])


class App(click.Group):
    """All commands, in the order in which they are met, each with its whole sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(SENTENCE)) for name, one in self.commands.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None:
            raise UsageError(f"there is no command {args[0]}; {hint(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def make_context(self, *said: Any, **more: Any) -> click.Context:
        with no_reader():
            return super().make_context(*said, **more)

    def invoke(self, ctx: click.Context) -> Any:
        with no_reader():
            return super().invoke(ctx)


@contextmanager
def no_reader() -> Iterator[None]:
    """Of a closed pipe click would make exit code 1, as if something were wrong."""
    try:
        yield
    except BrokenPipeError as error:
        raise ReaderGoneError from error


def hint(word: str, commands: list[str]) -> str:
    """What may have been meant in place of a command."""
    near = get_close_matches(word, commands, n=1)
    if near:
        return f"did you mean {near[0]}?"
    file, _ = resources.split_place(word)
    if Path(file).is_file() or resources.shipped_file(file):
        return f"did you mean run {word}?"
    return "commdsl --help lists them"


def usage_text(error: UsageError | click.UsageError) -> str:
    """In one line, with where to read on."""
    if isinstance(error, UsageError):
        return str(error)
    message = " ".join(error.format_message().split()).rstrip(".")
    if isinstance(error, click.NoSuchOption):
        near = get_close_matches(error.option_name, error.possibilities or (), n=1)
        message = f"no such option {error.option_name}" + (f", did you mean {near[0]}?" if near else "")
    command = error.ctx.command_path if error.ctx else "commdsl"
    return f"{message[:1].lower()}{message[1:]}; {command} --help says more"


def together(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, in the order of the help text."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def option(*names: str, **said: Any) -> Callable[[Command], Command]:
    return click.option(*names, cls=Option, **said)


def words(what: str) -> Callable[[Command], Command]:
    return click.argument("words", nargs=-1, required=True, metavar=what)


class Target(click.Path):
    """A file to write: in a folder that is there, so that no work is done for one that is not. `suffixes`: those that
    its name may have; any unless said.
    """

    def __init__(self, *suffixes: str) -> None:
        super().__init__(path_type=Path)
        self.suffixes = suffixes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            raise UsageError(f"{path}: there is no folder {path.parent}")
        if path.is_dir():
            raise UsageError(f"{path} is a folder, expected a file to write")
        if self.suffixes and path.suffix.lower() not in self.suffixes:
            option = param.opts[0] if isinstance(param, click.Option) else "FILE"
            raise UsageError(f"{option} {path}: expected a name that ends in {self.suffixes[0]}")
        return path


to_write = Target()
to_draw = Target(".svg")
"""Pictures are SVG, whatever their name says."""
text_to_write = Target(resources.SUFFIX, "")
as_json = option("--json", "as_json", is_flag=True, help="One JSON value on standard output.")
only_check = option("--check", "only_check", is_flag=True, help="Write nothing; fail where a file would change.")
where = together(
    option(
        "--ranks",
        section=WHAT,
        metavar="N",
        help="A number, a list 2,4,8, a range 2..16; 8 or the nearest, or as many as --on has.",
    ),
    option(
        "--on",
        section=WHAT,
        metavar="TOPOLOGY",
        help="Of the file or one it uses, shipped, or MY_BOX.comm[:NAME].",
    ),
    option(
        "--schedule", section=WHAT, metavar="NAME", help="One schedule, dispatch or plan of the file; all unless said."
    ),
    option(
        "--tune",
        section=WHAT,
        multiple=True,
        metavar="KEY=VALUE",
        help="In place of what the file tunes: lanes=16, tile=4KB, ...",
    ),
)
of_attention = together(
    option("--heads", section=WHAT, metavar="Q[:KV]", help="Of attention: query heads, and those of keys; 32:8."),
    option(
        "--head-dim", section=WHAT, type=click.IntRange(1), metavar="N", help="Elements of a head; 128 unless said."
    ),
    option("--causal", section=WHAT, is_flag=True, help="A query sees its own token and those before it."),
    option("--window", section=WHAT, metavar="L,R", help="How many tokens before and after; * for any number."),
    option("--placement", section=WHAT, metavar="NAME", help="zigzag or contiguous; zigzag unless said."),
    option("--backward", section=WHAT, is_flag=True, help="Count the gradients, too."),
    option("--on", section=WHAT, metavar="TOPOLOGY", help="Instead of a device, for attention and products."),
)
