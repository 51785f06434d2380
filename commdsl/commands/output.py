"""Turns results into what a person or a script reads: text, colour on terminals, JSON, progress, exit codes.

Assumes standard output is for results and standard error for diagnostics and progress. Does not decide what is wrong.
No control character of a file's name or text reaches a terminal: colours are allowed in lines that are `styled`, whose
makers have escaped all that comes from outside.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from commdsl.language import diagnostics
from commdsl.language.diagnostics import Diagnostic
from commdsl.machine.config import allows_colour
from commdsl.machine.printable import printable

if TYPE_CHECKING:
    from rich.progress import Progress

QUIET_SECONDS = 2.0
"""How long a command may work before it shows that it does."""

STYLES = {"good": "32", "bad": "31", "strong": "1", "faint": "2", "accent": "36"}


class Exit(IntEnum):
    FINE = 0
    DIAGNOSTICS = 1
    USAGE = 2
    WRONG_RESULT = 3  # or a wait that timed out
    INTERNAL = 4
    RESOURCES = 5  # more memory, or more threads, than this machine gives
    INTERRUPTED = 130


def has_colour(stream: Any) -> bool:
    """Whether to colour: a terminal that has not said no."""
    return bool(stream.isatty()) and allows_colour()


def style(text: str, name: str) -> str:
    """The text in one of STYLES, on a terminal; elsewhere as it is."""
    return f"\x1b[{STYLES[name]}m{text}\x1b[0m" if has_colour(sys.stdout) else text


def say(text: str = "", *, styled: bool = False) -> None:
    """Print a line of a result; `styled`: parts of it come from `style`."""
    print(_shown(text, styled))


def say_text(text: str, *, styled: bool = False) -> None:
    """Print a result that other programs read, byte for byte; a terminal gets it as `say` prints it."""
    if sys.stdout.isatty():
        print(_shown(text, styled), end="")
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))


def _shown(text: str, styled: bool) -> str:
    if not styled:
        return printable(text)
    parts = _COLOURS.split(text)  # text and colours take turns
    return "".join(part if index % 2 else printable(part) for index, part in enumerate(parts))


_COLOURS = re.compile(r"(\x1b\[(?:0|1|2|3[1-6]|1;3[1-6])m)")
"""What `style` and diagnostics write."""


def close_stdout() -> None:
    """What is still to be written goes nowhere, and Python does not complain of it at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def tell(text: str, *, styled: bool = False) -> None:
    """Print a remark on standard error; `styled` as of `say`."""
    print(_shown(text, styled), file=sys.stderr)


def say_json(value: Any) -> None:
    """Strict JSON, which has no infinity: `finite` turns numbers that may be none into null."""
    print(json.dumps(value, indent=2, allow_nan=False))


def finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def show_diagnostics(found: Iterable[Diagnostic]) -> None:
    """All diagnostics in full on standard error, with a last line that counts them."""
    found = tuple(found)
    colour = has_colour(sys.stderr)
    for diagnostic in found:
        tell(diagnostics.render_full(diagnostic, color=colour).rstrip("\n") + "\n", styled=True)
    errors = sum(d.severity is diagnostics.Severity.ERROR for d in found)
    counts = [count(errors, "error"), count(len(found) - errors, "warning")]
    if found:
        tell(", ".join(text for text in counts if not text.startswith("0 ")))


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


class Bar:
    """What a long piece of work reports to; it shows after `QUIET_SECONDS`, on a terminal only."""

    def __init__(self, label: str, total: int | None) -> None:
        self.label = label
        self.total = total
        self.done = 0
        self._shown: Progress | None = None
        self._lock = threading.Lock()
        self._closed = False

    def advance(self, label: str) -> None:
        """One piece is done; `label` says what comes next."""
        with self._lock:
            self.label = label
            self.done += 1
            if self._shown:
                self._shown.update(self._shown.task_ids[0], completed=self.done, description=label)

    def show(self) -> None:
        # 50 ms of work that takes two seconds, and most takes less
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        shown = Progress(*columns, console=Console(stderr=True), transient=True)
        with self._lock:
            if not self._closed:
                shown.add_task(self.label, total=self.total, completed=self.done)
                shown.start()
                self._shown = shown

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._shown:
                self._shown.stop()


@contextmanager
def progress(label: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """Yields `advance(next label)`. A bar appears on a terminal once the work has taken two seconds."""
    bar = Bar(label, total)
    if not sys.stderr.isatty():
        yield bar.advance
        return
    timer = threading.Timer(QUIET_SECONDS, bar.show)
    timer.daemon = True
    timer.start()
    try:
        yield bar.advance
    finally:
        timer.cancel()
        bar.close()


def seconds(start: float) -> str:
    """The time since `start` (of `time.perf_counter`), in words."""
    passed = time.perf_counter() - start
    return f"{passed * 1e3:.0f} ms" if passed < 1 else f"{passed:.1f} s"


def bytes_text(size: float) -> str:
    """A size in the units of `--bytes`: 1048576 -> `1 MB`."""
    for unit, scale in (("TB", 1 << 40), ("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"
