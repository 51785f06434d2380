"""Turns a text into what `commdsl check` says of it, word for word, in a process that a newer text stops.

Assumes the `commdsl` of this interpreter. What a text uses is read from where it lies on disk. Does not show anything.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from commdsl.commands.arguments import STDIN, Target
from commdsl.commands.output import Exit
from commdsl.language.diagnostics import DiagnosticJson
from commdsl.language.records import dataclass


@dataclass(frozen=True)
class Verdict:
    """What a check found, or the one line that says why there was none."""

    diagnostics: tuple[DiagnosticJson, ...]
    remark: str = ""


async def check(text: str, folder: Path | None, target: Target) -> Verdict:
    """The verdict on a text in a folder; cancelled, its process ends at once."""
    ranks = () if target.ranks is None else ("--ranks", ",".join(map(str, target.ranks)))
    on = () if target.on is None else ("--on", target.on)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "commdsl", "check", str(STDIN), "--json", *ranks, *on),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
    )
    try:
        out, remarks = await process.communicate(text.encode())
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode in (Exit.FINE, Exit.DIAGNOSTICS):
        return Verdict(tuple(json.loads(out)["diagnostics"]))
    return Verdict((), remarks.decode(errors="replace").strip())
