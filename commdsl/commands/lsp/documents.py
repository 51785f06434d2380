"""Turns a text into what is known of it without a proof: what its names mean, where they are declared, its outline.

Assumes that it parses; of a text that does not, nothing is known until it does. Does not speak the protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from commdsl import compiler
from commdsl.commands.arguments import Target
from commdsl.commands.jobs import rank_counts
from commdsl.ir import resolve
from commdsl.language import parser, syntax
from commdsl.language.diagnostics import CommError
from commdsl.language.format import format_file
from commdsl.language.records import dataclass
from commdsl.language.source import Source, Span
from commdsl.language.syntax import File

WHAT = {
    syntax.ScheduleDecl: "schedule",
    syntax.DispatchDecl: "dispatch",
    syntax.PlanDecl: "plan",
    syntax.TopologyDecl: "topology",
    syntax.RolesDecl: "roles",
    syntax.FnDecl: "fn",
    syntax.Param: "parameter",
    syntax.BufferDecl: "buffer",
    syntax.CyclesDecl: "cycles",
    syntax.GroupDecl: "group",
    syntax.Let: "let",
    syntax.LinkDecl: "link",
    syntax.RoleDecl: "role",
    syntax.RowsDecl: "rows",
    syntax.KeyDecl: "key",
    syntax.ValueDecl: "value",
}
"""What an outline lists, and what it is called."""

INSIDE = ("params", "body", "entries", "roles")
"""Where they list what stands inside them."""


@dataclass(frozen=True)
class Entry:
    """Of an outline: what is declared, and what is declared inside it."""

    what: str
    name: str
    place: Span  # of all of it
    named: Span
    inside: tuple[Entry, ...]


class Document:
    """A text of a folder, and what is asked of it, found when it is first asked for."""

    def __init__(self, source: Source, folder: Path, target: Target) -> None:
        self.source = source
        self.folder = folder
        self.asked = target

    @cached_property
    def files(self) -> tuple[File, ...]:
        """The file and those that it uses, as far as they can be read; () for a text that does not parse."""
        try:
            file = parser.parse(self.source)
        except CommError:
            return ()
        with suppress(CommError, OSError):
            return compiler.with_used(file, self.folder)
        return (file,)

    @cached_property
    def target(self) -> Target:
        """As asked; where a schedule is for no number of ranks of a sweep, as `check` has it unless said."""
        with suppress(CommError, OSError):
            if self.asked.is_sweep and not all(map(self._is_asked, self._schedules)):
                return replace(self.asked, ranks=None)
        return self.asked

    def _is_asked(self, decl: syntax.ScheduleDecl) -> bool:
        return any(self._admits(decl, ranks) for ranks in self.asked.ranks or ())

    def _admits(self, decl: syntax.ScheduleDecl, ranks: int) -> bool:
        return resolve.admits(self.files, decl, ranks, compiler.find_topology(self.files, self.asked.on, ranks))

    @property
    def _schedules(self) -> Iterator[syntax.ScheduleDecl]:
        return (item for item in self.items if isinstance(item, syntax.ScheduleDecl))

    @property
    def items(self) -> tuple[syntax.Item, ...]:
        return self.files[0].items if self.files else ()

    @property
    def formatted(self) -> str | None:
        return format_file(self.files[0]) if self.files else None

    @cached_property
    def _declared(self) -> Mapping[Span, Span]:
        return resolve.declared(self.files) if self.files else {}

    @cached_property
    def _names(self) -> tuple[syntax.Name, ...]:
        return tuple(node for node in syntax.nodes(self.items) if isinstance(node, syntax.Name))

    def name_at(self, offset: int) -> syntax.Name | None:
        return next((name for name in self._names if name.span.start <= offset <= name.span.end), None)

    def definition(self, offset: int) -> Path | Span | None:
        """Where the name at an offset is declared; the file that a `use` brings in."""
        name = self.name_at(offset)
        if name is not None:
            return self._declared.get(name.span)
        return next((path for use, path in self.uses if use.start <= offset <= use.end), None)

    @cached_property
    def uses(self) -> tuple[tuple[Span, Path], ...]:
        """Every `use`, and the file that it brings in."""
        found = list[tuple[Span, Path]]()
        for item in self.items:
            if isinstance(item, syntax.Use):
                with suppress(CommError):
                    found.append((item.span, compiler.find_used(item, self.folder)))
        return tuple(found)

    def meaning(self, offset: int) -> str | None:
        """The line that declares the name at an offset, and its value where it has one; as Markdown."""
        name = self.name_at(offset)
        if name is None:
            return None
        declared = self._declared.get(name.span)
        place = declared or name.span
        line = place.source.line(place.position[0]).strip()
        value = self._value(place)
        if declared is None and value is None:
            return None
        words = [f"```comm\n{line}\n```"]
        if place.source.name != self.source.name:
            words.append(f"in `{Path(place.source.name).name}`")
        return "\n\n".join([*words, *([value] if value else [])])

    def _value(self, place: Span) -> str | None:
        decl = next((decl for decl in self._schedules if place.is_in(decl.span)), None)
        if decl is None:
            return None
        with suppress(CommError, OSError):
            for ranks in reversed(rank_counts(self.files, decl, self.target)):
                if self._admits(decl, ranks):
                    topology = compiler.find_topology(self.files, self.target.on, ranks)
                    value = resolve.values(self.files, decl, ranks, topology).get(place)
                    return f"{value}, for {ranks} ranks" if value else None
        return None

    @property
    def outline(self) -> tuple[Entry, ...]:
        return tuple(_entries(self.items))


def _entries(nodes: object) -> Iterator[Entry]:
    """Of a tuple of nodes, those that declare a name that is of use outside of one statement."""
    for node in nodes if isinstance(nodes, tuple) else ():
        what = WHAT.get(type(node))
        if what is not None:
            inside = (one for part in INSIDE for one in _entries(getattr(node, part, ())))
            yield Entry(what, node.name.text, node.span, node.name.span, tuple(inside))
