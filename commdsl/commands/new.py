"""Turns the name of a collective, or the word `plan` or `dispatch`, into a commented `.comm` file to start from.

Assumes the starters beside this module, each of which declares one thing called `NAME`. Does not overwrite a file.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from commdsl.commands import output
from commdsl.commands.arguments import UsageError
from commdsl.commands.output import Exit
from commdsl.language import parser
from commdsl.language.diagnostics import CommError
from commdsl.language.source import Source

STARTERS = Path(__file__).with_name("starters")


NEXT = {"plan": "commdsl show {}", "dispatch": "commdsl compile {}"}
"""What to do with a file that declares no schedule; a schedule runs."""


def starters() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in STARTERS.glob("*.comm")))


def collectives() -> tuple[str, ...]:
    return tuple(name for name in starters() if name not in NEXT)


def starter(kind: str, name: str) -> str:
    """The text of a new file that declares `name`."""
    return re.sub(r"\bNAME\b", name, (STARTERS / f"{kind}.comm").read_text(encoding="utf-8"))


def is_name(name: str, declaration: str) -> bool:
    """Return whether a text that declares `name` parses: a word of the language is no name everywhere."""
    try:
        return name.isidentifier() and bool(parser.parse(Source("--name", declaration)))
    except CommError:
        return False


def new(kind: str, path: Path | None, *, as_json: bool) -> Exit:
    """Writes the starter of a collective, a plan or a dispatch to `path`, or to my_KIND.comm here."""
    known = starters()
    wanted = kind.replace("-", "_")
    if wanted not in known:
        close = get_close_matches(wanted, known, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"there is {', '.join(known)}"
        raise UsageError(f"no starter for `{kind}`: {hint}")
    target = path or Path(f"my_{wanted}.comm")
    name = target.stem.replace("-", "_")
    if not is_name(name, starter(wanted, name)):
        raise UsageError(f"the file's name names what it declares, and `{target.stem}` is not a name")
    if target.exists():
        raise UsageError(f"{target} is there already")
    target.write_text(starter(wanted, name), encoding="utf-8")
    if as_json:
        output.say_json({"file": str(target), wanted if wanted in NEXT else "schedule": name})
    else:
        output.say(f"wrote {target}; next: {NEXT.get(wanted, 'commdsl run {} --ranks 4').format(target)}")
    return Exit.FINE
