"""Finds moves that act on the wrong rank: what a put, get, copy or reduce may read and write from the acting rank.

Assumes the names in sight are in `rules`. Does not evaluate indices or ranks.
"""

from __future__ import annotations

from commdsl.ir.resolve.casts import OF_MOVES, check_cast
from commdsl.ir.resolve.epilogues import check_epilogue
from commdsl.ir.resolve.expressions import ExpressionRules
from commdsl.ir.resolve.faults import nearest
from commdsl.language import syntax as syn
from commdsl.language.kinds import MoveKind
from commdsl.language.source import Span
from commdsl.machine.dtypes import NAMED_OPS, OPS


def check_move(rules: ExpressionRules, move: syn.Move, acting: str) -> None:
    """Reports what is wrong with one move of an `each` whose acting rank is called `acting`."""
    rules.source(move.source)
    rules.ref(move.dest)
    if move.factor is not None:
        rules.ref(move.factor)
        check_epilogue(rules, move.epilogue)
    check_operation(rules, move.operation)
    if move.cast is not None:
        check_cast(rules, move.cast, OF_MOVES, "moves")
    if isinstance(move.dest.place, syn.All):
        help = "let a binder range over the ranks: `each r, q { ... @ q }`"
        span = move.dest.place.span
        rules.faults.report("C115", "a move writes to one rank", span, "`all` lists the sources of a reduce", help=help)
        return
    is_list = move.source.binder is not None or isinstance(move.source.ref.place, syn.All)
    kind = MoveKind.MATMUL if move.factor is not None else move.kind
    if is_list and kind is not MoveKind.REDUCE:
        rules.faults.report("C115", f"a {kind.value} has one source", move.source.span, "a list of sources",
                            help="only `reduce` combines several; let a binder of `each` range over them")  # fmt: skip
        return
    if move.source.binder is not None and isinstance(move.source.ref.place, syn.All):
        rules.faults.report("C115", "two lists of sources in one reduce", move.source.span, "`@ all` and `for`",
                            help="name the rank: `reduce x @ q for q in 0 ..< P -> y`")  # fmt: skip
        return
    _check_places(rules, move, kind, acting, is_list)


def check_operation(rules: ExpressionRules, operation: syn.Name | None) -> None:
    """C129: nothing is combined so, or only where a call asks for it."""
    if operation is None or operation.text in NAMED_OPS:
        return
    help = nearest(operation.text, NAMED_OPS)
    if operation.text in OPS:
        help = "leave `by` out, and let the call ask for it: what is left unsaid is then averaged"
    what = f"a file does not combine by `{operation.text}`"
    rules.faults.report("C129", what, operation.span, "not known", help=help)


def _check_places(rules: ExpressionRules, move: syn.Move, kind: MoveKind, acting: str, is_list: bool) -> None:
    source, dest = _place(move.source.ref), _place(move.dest)
    match kind:
        case MoveKind.PUT if source:
            help = f"write `get` to read from another rank, or leave out `@`: the source is rank `{acting}`'s"
            rules.faults.report("C111", "the source of a put is the acting rank's", source, "another rank's", help=help)
        case MoveKind.GET if dest:
            help = f"write `put` to write to another rank, or leave out `@`: the destination is rank `{acting}`'s"
            rules.faults.report(
                "C112", "the destination of a get is the acting rank's", dest, "another rank's", help=help
            )
        case MoveKind.COPY | MoveKind.MATMUL if far := source or dest or (move.factor and _place(move.factor)):
            help = "write `put` to write to another rank, `get` to read from one"
            what = "a product" if kind is MoveKind.MATMUL else "a copy"
            rules.faults.report("C113", f"{what} stays on the acting rank", far, "another rank's", help=help)
        case MoveKind.REDUCE if dest and (source or is_list):
            what = (
                "a list of sources is combined on the acting rank"
                if is_list
                else "a reduce has one side on the acting rank"
            )
            help = f"leave out `@` here: the destination is rank `{acting}`'s"
            rules.faults.report("C114", what, dest, "another rank's", help=help)
        case _:
            pass


def _place(ref: syn.Ref) -> Span | None:
    return None if ref.place is None else ref.place.span
