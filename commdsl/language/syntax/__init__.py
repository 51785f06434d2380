"""What was written: one frozen class per grammar rule, each with its span.

Assumes nothing beyond the grammar. Does not know what names mean; `resolve` does.

    expressions   the base of every node; expressions, ranges, quantities
    machines      topologies and roles
    references    chunks, lists of them, endings of products
    contracts     contracts and their terms
    schedules     schedules and statements
    dispatches    plans and dispatches
"""

from __future__ import annotations

from dataclasses import field
from typing import TypeAlias

from commdsl.language.records import dataclass
from commdsl.language.source import Source
from commdsl.language.syntax.contracts import (
    AnyContract,
    Application,
    Clause,
    Combined,
    Condition,
    Ensure,
    Finished,
    GeneralContract,
    Listed,
    NamedContract,
    Rotating,
    RotationContract,
    Rounding,
    Term,
)
from commdsl.language.syntax.dispatches import (
    BackDecl,
    CapacityEntry,
    CopiesEntry,
    Cut,
    Destination,
    DispatchDecl,
    DispatchStmt,
    Doc,
    EqualCut,
    GivenCut,
    KeyDecl,
    KeyRoute,
    MaskEntry,
    Nowhere,
    Once,
    PlaceDecl,
    PlanDecl,
    PlanFor,
    PlanSetting,
    PlanStmt,
    RankBlock,
    Ranks,
    Repeat,
    RouteDecl,
    RowsDecl,
    SendEntry,
    SortKey,
    TableRoute,
    ValueDecl,
    Weight,
)
from commdsl.language.syntax.expressions import (
    Binary,
    Call,
    Choice,
    Expr,
    FnDecl,
    Index,
    Int,
    Method,
    Name,
    Node,
    Quantity,
    Range,
    Table,
    Unary,
    nodes,
    parts,
)
from commdsl.language.syntax.machines import (
    Along,
    AxesEntry,
    ChosenRate,
    CountEntry,
    DegradedDecl,
    LinkDecl,
    MissingDecl,
    RoleDecl,
    RolesDecl,
    TopologyDecl,
    TopologyEntry,
)
from commdsl.language.syntax.references import All, Binder, Ending, Ref, Source_
from commdsl.language.syntax.schedules import (
    Arm,
    BufferDecl,
    Cast,
    Compute,
    CycleGenerator,
    CycleLiteral,
    CyclesDecl,
    Dim,
    Do,
    Each,
    For,
    GroupDecl,
    If,
    Lengths,
    Let,
    ListedCycle,
    Move,
    On,
    Param,
    Part,
    Passing,
    Pipeline,
    ScheduleDecl,
    Setting,
    Stmt,
    Tune,
    TuneEntry,
    Visit,
    Yield,
    walk,
)

__all__ = [
    "All",
    "Along",
    "AnyContract",
    "Application",
    "Arm",
    "AxesEntry",
    "BackDecl",
    "Binary",
    "Binder",
    "BufferDecl",
    "Call",
    "CapacityEntry",
    "Cast",
    "Choice",
    "ChosenRate",
    "Clause",
    "Combined",
    "Comment",
    "Compute",
    "Condition",
    "CopiesEntry",
    "CountEntry",
    "Cut",
    "CycleGenerator",
    "CycleLiteral",
    "CyclesDecl",
    "DegradedDecl",
    "Destination",
    "Dim",
    "DispatchDecl",
    "DispatchStmt",
    "Do",
    "Doc",
    "Each",
    "Ending",
    "Ensure",
    "EqualCut",
    "Expr",
    "File",
    "Finished",
    "FnDecl",
    "For",
    "GeneralContract",
    "GivenCut",
    "GroupDecl",
    "If",
    "Index",
    "Int",
    "Item",
    "KeyDecl",
    "KeyRoute",
    "Lengths",
    "Let",
    "LinkDecl",
    "Listed",
    "ListedCycle",
    "MaskEntry",
    "Method",
    "MissingDecl",
    "Move",
    "Name",
    "NamedContract",
    "Node",
    "Nowhere",
    "On",
    "Once",
    "Param",
    "Part",
    "Passing",
    "Pipeline",
    "PlaceDecl",
    "PlanDecl",
    "PlanFor",
    "PlanSetting",
    "PlanStmt",
    "Quantity",
    "Range",
    "RankBlock",
    "Ranks",
    "Ref",
    "Repeat",
    "RoleDecl",
    "RolesDecl",
    "Rotating",
    "RotationContract",
    "Rounding",
    "RouteDecl",
    "RowsDecl",
    "ScheduleDecl",
    "SendEntry",
    "Setting",
    "SortKey",
    "Source_",
    "Stmt",
    "Table",
    "TableRoute",
    "Term",
    "TopologyDecl",
    "TopologyEntry",
    "Tune",
    "TuneEntry",
    "Unary",
    "Use",
    "ValueDecl",
    "Visit",
    "Weight",
    "Yield",
    "nodes",
    "parts",
    "walk",
]


@dataclass(frozen=True, slots=True)
class Use(Node):
    """`use "roles.comm"`: brings in what another file declares; relative to this one."""

    path: str


Item: TypeAlias = Use | FnDecl | TopologyDecl | RolesDecl | ScheduleDecl | PlanDecl | DispatchDecl


@dataclass(frozen=True, slots=True)
class Comment(Node):
    """`# text`, kept for the formatter; `own_line` when nothing but blanks stands before it."""

    text: str
    own_line: bool


@dataclass(frozen=True, slots=True)
class File(Node):
    source: Source = field(compare=False)
    items: tuple[Item, ...]
    comments: tuple[Comment, ...]
