"""Turns the cache into a line: where it is, how many entries it has, how many bytes; or into an empty one.

Assumes what `machine.cache` knows of entries. Does not look into them: what is damaged heals when it is used.
"""

from __future__ import annotations

from commdsl.commands import output
from commdsl.commands.output import Exit
from commdsl.machine import cache as kept
from commdsl.machine.config import from_environment


def cache(*, clear: bool, as_json: bool) -> Exit:
    """Says what there is; with `clear` what was there, after it is gone. Raises CacheError where others have a say."""
    place = from_environment().cache_dir
    wrong = kept.trouble(place)
    number, size = (0, 0) if place is None else (len(kept.entries(place)), kept.num_bytes(place))
    if clear and place is not None:
        kept.clear(place)
    if as_json:
        found = {"folder": None if place is None else str(place), "entries": number, "bytes": size}
        output.say_json({**found, "cleared": clear, "trouble": wrong})
        return Exit.FINE
    done = " removed" if clear else ""
    output.say(
        f"{place or 'no folder'}: {number:,} {'entry' if number == 1 else 'entries'}, {output.bytes_text(size)}{done}"
    )
    if wrong:
        output.tell(wrong)
    return Exit.FINE
