"""Turns the way back of a dispatch into a Back: what comes back, from where, and where it is added up.

Assumes nothing beyond the grammar. Does not look at numbers: how many of anything there are, `dispatches` says.
"""

from __future__ import annotations

from commdsl.ir.dispatches import Back
from commdsl.ir.resolve.faults import Faults, nearest
from commdsl.language import syntax as syn
from commdsl.language.diagnostics import Label


def way_back(decl: syn.DispatchDecl, faults: Faults) -> Back | None:
    """The way back of a dispatch, None where there is none."""
    backs = [item for item in decl.body if isinstance(item, syn.BackDecl)]
    for item in backs[1:]:
        faults.report("C605", "the way back is said twice", item.span, "a second time here",
                      secondary=(Label(backs[0].span, "first here"),))  # fmt: skip
    if not backs:
        return None
    back, route = backs[0], next((item for item in decl.body if isinstance(item, syn.KeyRoute)), None)
    if back.reduction.text != "sum":
        label, help = f"`{back.reduction.text}` is not known", "what comes back from several places is added up"
        faults.report("C636", "copies are combined by `sum`", back.reduction.span, label, help=help)
    if back.weight is not None and route is None:
        faults.report("C636", "a weight belongs to a key of a row", back.weight.span, "there is no key",
                      help="what goes by a table comes back `by sum`")  # fmt: skip
    for key in (item.name for item in decl.body if isinstance(item, syn.KeyDecl)):
        if back.weight is not None and back.weight.name.text == key.text:
            faults.report("C636", "a weight belongs to a key of a row", back.weight.span, f"`{key.text}` is the key",
                          help="weights have a name of their own: `sum(weight[T, K])`")  # fmt: skip
    _returning(decl, back, route is not None, faults)
    if back.once_per is not None:
        _once(back, route, faults)
    weight = None if back.weight is None else back.weight.name.text
    return Back(tuple(name.text for name in back.names), weight, back.once_per is not None, back.span)


def _once(back: syn.BackDecl, route: syn.KeyRoute | None, faults: Faults) -> None:
    """C650: what is added up on its way is there, and so is by what, and who has to add it up knows it."""
    once = f"once per {back.once_per}"
    law = f"what comes back {once} is added up where its keys are"
    if route is None:
        faults.report("C650", law, back.span, "what goes by a table has none",
                      help=f"leave `{once}` out")  # fmt: skip
        return
    weight, names = back.weight, [name.text for name in route.tensors]
    if route.once is None:
        faults.report("C650", law, back.span, "no rank knows there which of its places have one row",
                      secondary=(Label(route.span, "each key's row travels by itself"),),
                      help=f"write `{once}` behind the route, too")  # fmt: skip
    elif route.once.per != back.once_per:
        faults.report("C650", law, back.span, f"rows went once per {route.once.per}",
                      secondary=(Label(route.once.span, "there ranks are told which of its ranks a row has"),),
                      help=f"write `once per {route.once.per}`, or leave it out")  # fmt: skip
    if weight is not None and weight.name.text not in names:
        value = f"{weight.name.text}[{weight.rows.text}, {weight.per_row.text}]"
        help = f"declare `value {value}` and write `route {', '.join([*names, weight.name.text])} by ...`"
        faults.report("C650", law, weight.span, f"`{weight.name.text}` is not there",
                      secondary=(Label(route.span, "what travels"),), help=help)  # fmt: skip


def _returning(decl: syn.DispatchDecl, back: syn.BackDecl, by_key: bool, faults: Faults) -> None:
    """C635: by a table what went comes back, by keys something else."""
    sent = [item.name.text for item in decl.body if isinstance(item, syn.RowsDecl)]
    beside = [item.name.text for item in decl.body if isinstance(item, syn.KeyDecl | syn.ValueDecl)]
    beside += [] if back.weight is None else [back.weight.name.text]
    seen = set[str]()
    for name in back.names:
        if name.text in seen:
            faults.report("C635", f"`{name.text}` comes back once", name.span, "a second time here")
        elif not by_key and name.text not in sent:
            help = nearest(name.text, sent) or f"write `back {', '.join(sent)} by sum`"
            faults.report("C635", f"`{name.text}` was not sent", name.span, "does not come back", help=help)
        elif by_key and name.text in (*sent, *beside):
            faults.report("C635", f"`{name.text}` is what went", name.span, "not what comes back",
                          help="what is made of the rows where they went has a name of its own")  # fmt: skip
        seen.add(name.text)
    if by_key and len(back.names) > 1:
        faults.report("C635", "one tensor comes back from the keys", back.names[1].span, "a second one")
