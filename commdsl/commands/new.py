"""Turns the name of a collective into a commented `.comm` file to start from.

Assumes the starters beside this module, one per collective, whose schedule is called `NAME`. Does not overwrite a file.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from commdsl.commands import output
from commdsl.commands.arguments import UsageError
from commdsl.commands.output import Exit

STARTERS = Path(__file__).with_name("starters")


def collectives() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in STARTERS.glob("*.comm")))


def starter(collective: str, name: str) -> str:
    """The text of a new file whose schedule is called `name`."""
    return re.sub(r"\bNAME\b", name, (STARTERS / f"{collective}.comm").read_text(encoding="utf-8"))


def new(collective: str, path: Path | None, *, as_json: bool) -> Exit:
    """Writes the starter of a collective to `path`, or to my_COLLECTIVE.comm here."""
    known = collectives()
    wanted = collective.replace("-", "_")
    if wanted not in known:
        close = get_close_matches(wanted, known, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"there is {', '.join(known)}"
        raise UsageError(f"no starter for `{collective}`: {hint}")
    target = path or Path(f"my_{wanted}.comm")
    name = target.stem.replace("-", "_")
    if not name.isidentifier():
        raise UsageError(f"the file's name names the schedule, and `{target.stem}` is not a name")
    if target.exists():
        raise UsageError(f"{target} is there already")
    target.write_text(starter(wanted, name), encoding="utf-8")
    if as_json:
        output.say_json({"file": str(target), "schedule": name})
    else:
        output.say(f"wrote {target}; next: commdsl run {target} --ranks 4")
    return Exit.FINE
