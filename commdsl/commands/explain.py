"""Turns the code of a diagnostic into its page: the law, a wrong example, a right one.

Assumes one page per code in `commdsl/language/explain`. Does not check anything.
"""

from __future__ import annotations

import sys

from commdsl.commands import output
from commdsl.commands.arguments import UsageError
from commdsl.commands.output import Exit
from commdsl.ir.resolve.faults import nearest
from commdsl.language import codes


def explain(code: str | None, *, as_json: bool) -> Exit:
    """Prints the page of a code, or with no code the title of each."""
    known = codes.all_codes()
    if code is None:
        if as_json:
            output.say_json({known_code: codes.title(known_code) for known_code in known})
        for known_code in () if as_json else known:
            output.say(f"{output.style(known_code, 'accent')}  {codes.title(known_code)}", styled=True)
        return Exit.FINE
    wanted = code.upper()
    if wanted not in known:
        near = nearest(wanted, known)
        raise UsageError(
            f"no diagnostic has the code `{code}`" + (f": {near}" if near else "; `commdsl explain` lists all")
        )
    text = codes.page(wanted)
    if as_json:
        output.say_json({"code": wanted, "title": codes.title(wanted), "page": text})
    elif output.has_colour(sys.stdout):
        # 90 ms that a page into a pipe does not need
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(
            Markdown(text.replace("```comm wrong", "Wrong:\n\n```text").replace("```comm right", "Right:\n\n```text"))
        )
    else:
        output.say(text.rstrip("\n"))
    return Exit.FINE
