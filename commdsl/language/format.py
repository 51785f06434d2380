"""Turns Syntax into canonical `.comm` text: one layout for all, with the comments where they were.

Assumes a file the parser made, with its source: the layout asks the text which lines were blank, which blocks stood on
one line, and which operands were in parentheses. Does not wrap long lines, except literal cycles, and does not reorder.
A statement with a comment in its midst keeps its lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

from commdsl.language import print_dispatches, print_machines, print_syntax, syntax
from commdsl.language.print_expressions import GAP

LINE_WIDTH = 120
COMMENT_COLUMN = 47  # where remarks behind code stand, if the code leaves room

Block: TypeAlias = print_syntax.Block | print_dispatches.Block | print_machines.Block
Line: TypeAlias = print_syntax.Line | print_dispatches.Line | print_machines.Line
Node: TypeAlias = Line | Block | syntax.Ensure | syntax.If


def format_file(file: syntax.File) -> str:
    """The canonical text; parsing it gives the file again, formatting it changes nothing."""
    layout = _Layout(file)
    layout.top_level(file.items)
    return "".join(f"{line}\n" for line in layout.lines)


_TOKEN = re.compile(r'#[^\n]*|"[^"\n]*"|[{}]')


class _Layout:
    """The lines so far, the comments still to come, and how far into the source the output has got."""

    def __init__(self, file: syntax.File) -> None:
        self.text = file.source.text
        self.comments = list(reversed(file.comments))
        self.closing = _braces(self.text)
        self.openings = sorted(self.closing)
        self.lines: list[str] = []
        self.done = 0  # offset behind what was written last
        self.first = True  # in its block: no blank line before it

    # --- items and statements

    def top_level(self, items: Sequence[syntax.Item]) -> None:
        broken = False
        for item in items:
            breaks = self.inline(item, 0) is None
            self.lead(item.span.start, 0, force=breaks or broken)
            self.node(item, 0)
            broken = breaks
        self.lead(len(self.text), 0, force=False, closing=True)

    def statements(self, nodes: Sequence[Node], indent: int, end: int) -> None:
        """The inside of a block that ends at `end`."""
        self.first = True
        width = max((len(node.name.text) for node in nodes if isinstance(node, syntax.LinkDecl)), default=0)
        last: Node | None = None
        for node in nodes:
            if isinstance(last, _JOINED) and isinstance(node, _JOINED) and self.joins(node):
                self.lines[-1] += GAP + _line(node)
                self.finish(node.span.end)
            else:
                self.lead(node.span.start, indent)
                if isinstance(node, syntax.LinkDecl) and not self.commented(node.span.start, node.span.end):
                    self.put(print_machines.link(node, width), indent)
                    self.finish(node.span.end)
                else:
                    self.node(node, indent)
            last = node
        self.lead(end, indent, closing=True)

    def joins(self, node: Joined) -> bool:
        """Whether an entry stays on the line of the one before it, as written."""
        between = self.text[self.done : node.span.end]
        fits = len(self.lines[-1]) + len(GAP) + len(_line(node)) <= LINE_WIDTH
        return "\n" not in between and "#" not in between and fits

    def node(self, node: Node, indent: int) -> None:
        start, end = node.span.start, node.span.end
        line = self.inline(node, indent)
        if line is not None:
            self.put(line, indent)
            self.finish(end)
        elif isinstance(node, syntax.Ensure) and isinstance(node.contract, syntax.GeneralContract):
            self.block(node.contract, start, indent)
        elif isinstance(node, syntax.If):
            self.branches(node, indent)
        elif isinstance(node, _BLOCKS):
            self.block(node, start, indent)
        elif isinstance(node, syntax.CyclesDecl) and not self.commented(start, end):
            self.cycles(node, indent)
        else:
            self.verbatim(start, end, indent)
            self.finish(end)

    def cycles(self, node: syntax.CyclesDecl, indent: int) -> None:
        """Literal cycles too long for a line: one a line."""
        assert isinstance(node.value, syntax.CycleLiteral)
        self.put(f"cycles {node.name.text} ={' open' if node.value.is_open else ''}", indent)
        for cycle in node.value.cycles:
            self.put(print_syntax.cycle(cycle), indent + 4)
        self.finish(node.span.end)

    # --- blocks

    def block(self, node: Block, start: int, indent: int, before: str = "") -> int:
        """A block over several lines; `start` is where its head does, `before` what precedes the head on its line.
        Where its closing brace ends.
        """
        opening = self.opening(node.span.start)
        if self.commented(start, opening):
            self.verbatim(start, opening + 1, indent)
        else:
            self.put(f"{before}{_head(node)} {{", indent)
        return self.inside(_children(node), opening, indent)

    def branches(self, node: syntax.If, indent: int) -> None:
        """An `if` with every `else` behind it."""
        closed = self.block(node.arms[0], node.span.start, indent)
        following = iter(node.arms[1:])
        while _ELSE.match(self.text, start := self.skip_comments(closed)):
            closed = self.otherwise(next(following, node.otherwise), closed, start, indent)

    def otherwise(self, arm: syntax.Arm | Sequence[Node], closed: int, start: int, indent: int) -> int:
        """What follows the block that ended at `closed`: `else` at `start`. Where it ends."""
        nested = self.skip_comments(start + len("else"))
        if self.done == closed and not self.commented(closed, self.opening(nested)):
            before = f"{self.lines.pop().strip()} else "
        else:
            self.lead(start, indent)
            before = "else "
        if isinstance(arm, syntax.Arm):
            return self.block(arm, start, indent, before)
        if self.commented(start, nested):
            self.verbatim(start, nested + 1, indent)
        else:
            self.put(f"{before}{{", indent)
        return self.inside(arm, nested, indent)

    def inside(self, nodes: Sequence[Node], opening: int, indent: int) -> int:
        """From behind the opening brace to the closing one."""
        closing = self.closing[opening]
        self.finish(opening + 1)
        self.statements(nodes, indent + 2, closing)
        self.put("}", indent)
        self.finish(closing + 1)
        self.first = False
        return closing + 1

    def opening(self, start: int) -> int:
        return next(opening for opening in self.openings if opening >= start)

    def skip_comments(self, offset: int) -> int:
        """The next sign that is no comment."""
        match = _BLANK.match(self.text, offset)
        assert match is not None
        return match.end()

    # --- what fits on one line

    def inline(self, node: Node, indent: int) -> str | None:
        """The node on one line, if it has no comment inside and either no block or a block written on one line."""
        if self.commented(node.span.start, node.span.end):
            return None
        line = self._inline(node)
        if line is None:
            return None
        is_line = not isinstance(node, _BLOCKS) and not isinstance(node, syntax.Ensure | syntax.CyclesDecl)
        return line if is_line or indent + len(line) <= LINE_WIDTH else None

    def _inline(self, node: Node) -> str | None:
        match node:
            case syntax.Ensure(contract):
                return self._inline(contract)
            case (
                syntax.ScheduleDecl()
                | syntax.TopologyDecl()
                | syntax.For()
                | syntax.Pipeline()
                | syntax.PlanDecl()
                | syntax.DispatchDecl()
            ):
                return None
            case syntax.If():
                return self._inline_if(node)
            case (
                syntax.RolesDecl() | syntax.GeneralContract() | syntax.Each() | syntax.Tune() | syntax.Arm()
                | syntax.RankBlock() | syntax.Repeat() | syntax.PlanFor()
            ):  # fmt: skip
                return None if "\n" in node.span.text else self._braced(_head(node), _children(node))
            case _:
                return _line(node)

    def _inline_if(self, node: syntax.If) -> str | None:
        if "\n" in node.span.text:
            return None
        blocks = [self._braced(_head(arm), arm.body) for arm in node.arms]
        if node.otherwise:
            blocks.append(self._braced("", node.otherwise))
        written = [block for block in blocks if block is not None]
        return " else ".join(written) if len(written) == len(blocks) else None

    def _braced(self, head: str, nodes: Sequence[Node]) -> str | None:
        inner = [self._inline(node) for node in nodes]
        parts = [line for line in inner if line is not None]
        if len(parts) < len(inner):
            return None
        before = f"{head} " if head else ""
        return f"{before}{{ {GAP.join(parts)} }}" if parts else f"{before}{{}}"

    # --- lines and comments

    def put(self, line: str, indent: int) -> None:
        self.lines.append(" " * indent + line)

    def verbatim(self, start: int, end: int, indent: int) -> None:
        """Lines as written, with the comments among them; the later ones set in by four."""
        lines = [line.strip() for line in self.text[start:end].split("\n")]
        written = [line for line in lines if line]
        self.put(written[0], indent)
        for line in written[1:]:
            self.put(line, indent + 4)
        while self.comments and self.comments[-1].span.start < end:
            self.comments.pop()

    def lead(self, start: int, indent: int, *, force: bool = False, closing: bool = False) -> None:
        """The comments before `start` on lines of their own, and a blank line where the writer left one."""
        while self.comments and self.comments[-1].span.start < start:
            comment = self.comments.pop()
            self.blank(comment.span.start, force)
            force = False
            self.put(comment.text, indent)
            self.done, self.first = comment.span.end, False
        if not closing:
            self.blank(start, force)
            self.first = False

    def blank(self, start: int, force: bool) -> None:
        if not self.first and (force or self.text.count("\n", self.done, start) > 1):
            self.lines.append("")

    def finish(self, end: int) -> None:
        """The source is written up to `end`; a comment behind it on its line goes with it."""
        self.done = end
        if self.comments and not self.comments[-1].own_line:
            comment = self.comments[-1]
            if not self.text[end : comment.span.start].strip(" \t\r"):
                self.comments.pop()
                self.lines[-1] = f"{self.lines[-1]:<{COMMENT_COLUMN - 2}}  {comment.text}"
                self.done = comment.span.end

    def commented(self, start: int, end: int) -> bool:
        return any(start <= comment.span.start < end for comment in self.comments)


_ELSE = re.compile(r"else\b")
_BLANK = re.compile(r"(?:\s|#[^\n]*)*")
_BLOCKS = (
    syntax.ScheduleDecl,
    syntax.TopologyDecl,
    syntax.RolesDecl,
    syntax.GeneralContract,
    syntax.For,
    syntax.Pipeline,
    syntax.If,
    syntax.Each,
    syntax.Tune,
    syntax.PlanDecl,
    syntax.DispatchDecl,
    syntax.RankBlock,
    syntax.Repeat,
    syntax.PlanFor,
)
Joined: TypeAlias = (
    syntax.CountEntry | syntax.AxesEntry | syntax.MaskEntry | syntax.SendEntry | syntax.CopiesEntry
    | syntax.CapacityEntry | syntax.Doc | syntax.RowsDecl | syntax.PlaceDecl
)  # fmt: skip
_JOINED = (
    syntax.CountEntry,
    syntax.AxesEntry,
    syntax.MaskEntry,
    syntax.SendEntry,
    syntax.CopiesEntry,
    syntax.CapacityEntry,
    syntax.Doc,
    syntax.RowsDecl,
    syntax.PlaceDecl,
)
"""What may share a line with another of these."""


def _line(node: Line) -> str:
    match node:
        case (
            syntax.MaskEntry() | syntax.SendEntry() | syntax.CopiesEntry() | syntax.CapacityEntry() | syntax.Doc()
            | syntax.RowsDecl() | syntax.KeyDecl() | syntax.ValueDecl() | syntax.TableRoute() | syntax.KeyRoute()
            | syntax.PlaceDecl() | syntax.BackDecl()
        ):  # fmt: skip
            return print_dispatches.line(node)
        case (
            syntax.RoleDecl() | syntax.CountEntry() | syntax.AxesEntry() | syntax.LinkDecl() | syntax.MissingDecl()
            | syntax.DegradedDecl()
        ):  # fmt: skip
            return print_machines.line(node)
        case _:
            return print_syntax.line(node)


def _head(node: Block) -> str:
    match node:
        case (
            syntax.PlanDecl() | syntax.DispatchDecl() | syntax.RankBlock() | syntax.Repeat() | syntax.PlanFor()
        ):  # fmt: skip
            return print_dispatches.head(node)
        case syntax.TopologyDecl() | syntax.RolesDecl():
            return print_machines.head(node)
        case _:
            return print_syntax.head(node)


def _children(node: Block) -> Sequence[Node]:
    match node:
        case syntax.TopologyDecl() | syntax.Tune():
            return node.entries
        case syntax.RolesDecl():
            return node.roles
        case syntax.GeneralContract():
            return node.clauses
        case _:
            return node.body


def _braces(text: str) -> dict[int, int]:
    """Where the block that opens at an offset closes."""
    closing: dict[int, int] = {}
    stack: list[int] = []
    for match in _TOKEN.finditer(text):
        if match[0] == "{":
            stack.append(match.start())
        elif match[0] == "}":
            closing[stack.pop()] = match.start()
    return closing
