"""What was written: one frozen class per grammar rule, each with its span.

Assumes nothing beyond the grammar. Does not know what names mean; `resolve` does.

    expressions   the base of every node; expressions, ranges, quantities
    machines      topologies and roles
    schedules     schedules, statements, references
    dispatches    plans and dispatches
"""

from __future__ import annotations

from dataclasses import field
from typing import TypeAlias

from commdsl.language.records import dataclass
from commdsl.language.source import Source
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
from commdsl.language.syntax.schedules import (
    All,
    AnyContract,
    Arm,
    Binder,
    BufferDecl,
    Cast,
    Clause,
    Compute,
    Condition,
    CycleGenerator,
    CycleLiteral,
    CyclesDecl,
    Dim,
    Do,
    Each,
    Ending,
    Ensure,
    For,
    GeneralContract,
    GroupDecl,
    If,
    Lengths,
    Let,
    ListedCycle,
    Move,
    NamedContract,
    On,
    Param,
    Part,
    Passing,
    Pipeline,
    Ref,
    Rotating,
    RotationContract,
    Rounding,
    ScheduleDecl,
    Setting,
    Source_,
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
