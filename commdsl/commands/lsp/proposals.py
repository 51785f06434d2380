"""Turns the beginning of a text into what may be written next: keywords, and the names in sight that fit.

Assumes that the text has no syntax fault before that place. What fits is asked of the rules that would refuse the
rest: a name that nobody has is put there, the text is ended, and the rules say what they looked for. Does not rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from commdsl.ir import functions, resolve
from commdsl.ir.resolve.epilogues import KNOWN
from commdsl.ir.resolve.evaluate import FUNCTIONS
from commdsl.ir.resolve.expressions import METHODS, Kind, Looked
from commdsl.ir.resolve.names import COLLECTIVES, GENERATORS
from commdsl.ir.resolve.tuning import KEYS
from commdsl.language import parser, syntax
from commdsl.language.parser import complete
from commdsl.language.records import dataclass
from commdsl.language.source import Source
from commdsl.language.syntax import File

NOBODY = "somebody_s_name"


@dataclass(frozen=True)
class Proposal:
    """A word, and what it is: `keyword`, or the kind of what it names."""

    word: str
    what: str


def proposals(before: str, files: tuple[File, ...]) -> tuple[Proposal, ...]:
    """What may stand behind `before`; `files` are the whole text, where it can be read, and those that it uses."""
    if _is_written_out(before):
        return ()
    keywords = (Proposal(word, "keyword") for word in sorted(complete.expected(before)) if word.isalpha())
    ended = complete.completed(f"{before} {NOBODY} ")
    names = () if ended is None else _names(parser.parse(Source("", ended)), files)
    return tuple({one.word: one for one in chain(names, keywords)}.values())


def _is_written_out(before: str) -> bool:
    """Inside a comment or a string, which are nobody's to guess."""
    line = before.rpartition("\n")[2]
    return "#" in line or line.count('"') % 2 == 1


def _names(file: File, files: tuple[File, ...]) -> Iterator[Proposal]:
    known = (file, *files)
    for item in file.items:
        if isinstance(item, syntax.ScheduleDecl | syntax.PlanDecl):
            for one in resolve.looked(known, item):
                if one.name.text == NOBODY:
                    yield from _fitting(one)
        for node in syntax.nodes(item):
            yield from (Proposal(word, what) for what, words in _listed(node, known) for word in words)


def _fitting(looked: Looked) -> Iterator[Proposal]:
    """Of the names in sight those of the right kind; an expression may call functions."""
    kinds = (*looked.kinds, *([Kind.FUNCTION] if Kind.NUMBER in looked.kinds else []))
    yield from (Proposal(name, symbol.kind.value) for name, symbol in looked.in_sight if symbol.kind in kinds)
    yield from (Proposal(name, Kind.FUNCTION.value) for name in FUNCTIONS if Kind.FUNCTION in kinds)


def _listed(node: syntax.Node, files: tuple[File, ...]) -> Iterator[tuple[str, Iterable[str]]]:
    """The words that may stand where `NOBODY` does, if not names in sight."""
    match node:
        case syntax.Do(schedule=syntax.Name(text=text)) if text == NOBODY:
            yield "a schedule", (item.name.text for item in _items(files) if isinstance(item, syntax.ScheduleDecl))
        case syntax.NamedContract(name=syntax.Name(text=text)) if text == NOBODY:
            yield "a contract", COLLECTIVES
        case syntax.Clause(term=term) if _is_nobody(term):
            yield "a function", functions.FUNCTIONS
        case syntax.Application(operands=terms) | syntax.Combined(parts=terms) if any(map(_is_nobody, terms)):
            yield "a function", functions.FUNCTIONS
        case syntax.Ending(name=syntax.Name(text=text)) if text == NOBODY:
            yield "what a product ends with", KNOWN
        case syntax.CycleGenerator(name=syntax.Name(text=text)) if text == NOBODY:
            yield "a set of cycles", GENERATORS
        case syntax.TuneEntry(key=syntax.Name(text=text)) if text == NOBODY:
            yield "what is tuned", KEYS
        case syntax.Method(method=text) if text == NOBODY:
            yield "of a cycle or a group", METHODS
        case syntax.On(role=syntax.Name(text=text)) | syntax.Compute(role=syntax.Name(text=text)) if text == NOBODY:
            roles = (item.roles for item in _items(files) if isinstance(item, syntax.RolesDecl))
            yield "a role", (role.name.text for role in chain.from_iterable(roles))
        case _:
            pass


def _is_nobody(term: syntax.Term) -> bool:
    return isinstance(term, syntax.Ref) and term.buffer.text == NOBODY


def _items(files: tuple[File, ...]) -> Iterator[syntax.Item]:
    return (item for file in files for item in file.items)
