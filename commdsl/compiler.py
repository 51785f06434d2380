"""The whole story on one page: text -> Syntax -> IR -> checks -> Plan -> CUDA C++ text; plans of a dispatch -> routes.

Assumes a path to a `.comm` file, or text in hand. Does not build, load or run anything; `build` and `runtime` do.
Every caller that needs two stages in a row goes through here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from commdsl import checks
from commdsl.checks.built import unbuilt_dispatch, unbuilt_schedule
from commdsl.cost.report import Report, far_from_bound, report
from commdsl.ir import resolve
from commdsl.ir.dispatches import ByKey, Dispatch
from commdsl.ir.plans import DispatchPlan, Routing, routing
from commdsl.ir.resolve.faults import nearest
from commdsl.ir.schedules import Schedule
from commdsl.language import parsed
from commdsl.language.diagnostics import CommError, Diagnostic, Label, Severity
from commdsl.language.records import dataclass
from commdsl.language.source import Source, Span
from commdsl.language.syntax import DispatchDecl, File, PlanDecl, ScheduleDecl, Use
from commdsl.machine import resources
from commdsl.machine.topology import Topology, switch
from commdsl.program.lower import lower
from commdsl.program.lower.routed import lower_dispatch
from commdsl.program.memory import Transport
from commdsl.program.plan import Plan
from commdsl.program.verify import verify

if TYPE_CHECKING:
    from commdsl.build.emit import Emitted

DEFAULT_RANKS = 8

Decl = TypeVar("Decl", ScheduleDecl, PlanDecl, DispatchDecl)


@dataclass(frozen=True, eq=False)
class Checked:
    """A schedule that was proved for its rank count and topology, and the Plan that was proved with it."""

    schedule: Schedule
    plan: Plan
    report: Report
    warnings: tuple[Diagnostic, ...]


@dataclass(frozen=True, eq=False)
class CheckedPlan:
    """A dispatch plan that was proved, and the routes that were proved with it."""

    plan: DispatchPlan
    routing: Routing
    warnings: tuple[Diagnostic, ...]


@dataclass(frozen=True, eq=False)
class CheckedDispatch:
    """A dispatch that was held to every law that needs no table and no keys, and the Plan that was proved with it; None
    where none is built yet.
    """

    dispatch: Dispatch
    plan: Plan | None
    warnings: tuple[Diagnostic, ...]


@dataclass(frozen=True, eq=False)
class CompiledDispatch(CheckedDispatch):
    """A proved dispatch, what is launched for it, and the text of its kernel."""

    plan: Plan
    emitted: Emitted


@dataclass(frozen=True, eq=False)
class Compiled(Checked):
    """A proved schedule and the text of its kernel."""

    emitted: Emitted


def read(path: Path | str) -> tuple[File, ...]:
    """The syntax of a file and of those it uses, itself first, each once.

    Raises CommError for a syntax fault or a used file that is not there, OSError if the file itself cannot be read.
    """
    main = Path(path)
    return read_text(main.read_text(encoding="utf-8"), str(path), main.parent)


def read_text(text: str, name: str, folder: Path) -> tuple[File, ...]:
    """As `read`, for text in hand; what it uses is looked for in `folder`, then among the shipped schedules."""
    files = [parsed.parse(Source(name, text))]
    seen = {(folder / name).resolve()}
    pending = [(use, folder) for use in _uses(files[0])]
    while pending:
        use, base = pending.pop(0)
        path = _find_used(use, base)
        if path.resolve() not in seen:
            seen.add(path.resolve())
            files.append(parsed.parse(Source(str(path), path.read_text(encoding="utf-8"))))
            pending += [(further, path.parent) for further in _uses(files[-1])]
    return tuple(files)


def _uses(file: File) -> list[Use]:
    return [item for item in file.items if isinstance(item, Use)]


def _find_used(use: Use, folder: Path) -> Path:
    for base in (folder, resources.data_dir("schedules")):
        if (base / use.path).is_file():
            return base / use.path
    label = Label(use.span, "no such file beside this one, nor among the shipped schedules")
    raise CommError((Diagnostic("C190", f"cannot find `{use.path}`", label),))


def schedules(files: tuple[File, ...]) -> tuple[ScheduleDecl, ...]:
    """The schedules a file declares itself."""
    return tuple(item for item in files[0].items if isinstance(item, ScheduleDecl))


def choose(files: tuple[File, ...], name: str | None) -> ScheduleDecl:
    """The schedule of that name, or the only one."""
    return _named(schedules(files), name, "schedule", files)


def plans(files: tuple[File, ...]) -> tuple[PlanDecl, ...]:
    """The dispatch plans a file declares itself."""
    return tuple(item for item in files[0].items if isinstance(item, PlanDecl))


def choose_plan(files: tuple[File, ...], name: str | None) -> PlanDecl:
    """The dispatch plan of that name, or the only one."""
    return _named(plans(files), name, "plan", files)


def dispatches(files: tuple[File, ...]) -> tuple[DispatchDecl, ...]:
    """The dispatches a file declares itself."""
    return tuple(item for item in files[0].items if isinstance(item, DispatchDecl))


def choose_dispatch(files: tuple[File, ...], name: str | None) -> DispatchDecl:
    """The dispatch of that name, or the only one."""
    return _named(dispatches(files), name, "dispatch", files)


def _named(found: tuple[Decl, ...], name: str | None, what: str, files: tuple[File, ...]) -> Decl:
    named = [decl for decl in found if name in (None, decl.name.text)]
    if len(named) == 1 or (named and name):  # that two have one name is for `resolve` to say
        return named[0]
    whole = Span(files[0].source, 0, 0)
    have = ", ".join(f"`{decl.name.text}`" for decl in found) or "none"
    wanted = f"expected a {what} named `{name}`" if name else f"expected one {what}, or the name of one"
    raise CommError((Diagnostic("C191", wanted, Label(whole, f"this file has {have}")),))


def find_topology(files: tuple[File, ...], name: str | None, ranks: int) -> Topology:
    """The topology of that name in the files or among the shipped ones; without a name one flat switch."""
    if name is None:
        return switch(ranks)
    found = resolve.topologies(files)
    shipped = resources.data_dir("schedules") / "topologies" / f"{name}.comm"
    if name not in found and shipped.is_file():
        found = resolve.topologies(read(shipped))
    if name in found:
        return found[name]
    names = sorted({*found, *(path.stem for path in shipped.parent.glob("*.comm"))})
    label = Label(Span(files[0].source, 0, 0), f"known here: {', '.join(names)}")
    raise CommError((Diagnostic("C192", f"no topology named `{name}`", label, help=nearest(name, names)),))


def check(
    path: Path | str | tuple[File, ...],
    schedule: str | None = None,
    ranks: int | None = None,
    on: str | None = None,
    params: Mapping[str, int] | None = None,
    transport: Transport = Transport.PEER,
    tune: Mapping[str, int | str] | None = None,
) -> Checked:
    """Proves one schedule for one rank count (8 unless said) on one topology, with values for its parameters, and
    `tune` in place of what its text tunes: lanes, threads, tile (in bytes), protocol, sms.

    Raises CommError with every fault found.
    """
    files = path if isinstance(path, tuple) else read(path)
    num_ranks = DEFAULT_RANKS if ranks is None else ranks
    topology = find_topology(files, on, num_ranks)
    decl = choose(files, schedule)
    meant = resolve.resolve(files, decl, num_ranks, topology, params or {}, tune)
    found = _raise_errors((*checks.check_files(files), *checks.check_schedule(meant)))
    warnings = (*resolve.warnings(files, decl), *found)
    _raise_errors(tuple(unbuilt_schedule(meant)))
    plan = lower(meant, transport)
    verify(plan)
    warnings += _raise_errors(checks.check_plan(meant, plan))
    costs = report(meant)
    return Checked(meant, plan, costs, (*warnings, *far_from_bound(meant, costs)))


def check_plan(path: Path | str | tuple[File, ...], name: str | None = None) -> CheckedPlan:
    """Proves one dispatch plan of a file: the one of that name, or the only one.

    Raises CommError with every fault found.
    """
    files = path if isinstance(path, tuple) else read(path)
    decl = choose_plan(files, name)
    meant = resolve.dispatch_plan(files, decl)
    warnings = (*resolve.plan_warnings(decl), *_raise_errors(checks.check_dispatch_plan(meant)))
    routes = routing(meant)
    return CheckedPlan(meant, routes, (*warnings, *_raise_errors(checks.check_routing(meant, routes))))


def check_dispatch(
    path: Path | str | tuple[File, ...],
    name: str | None = None,
    ranks: int | None = None,
    on: str | None = None,
    params: Mapping[str, int] | None = None,
    tune: Mapping[str, int | str] | None = None,
) -> CheckedDispatch:
    """Holds one dispatch of a file to its laws, for one rank count (8 unless said), with values for its parameters,
    and `tune` in place of what its text tunes: put, threads, tile (in bytes), sms.

    Raises CommError with every fault found.
    """
    files = path if isinstance(path, tuple) else read(path)
    num_ranks = DEFAULT_RANKS if ranks is None else ranks
    topology = find_topology(files, on, num_ranks)
    decl = choose_dispatch(files, name)
    meant = resolve.dispatch(files, decl, num_ranks, topology, params, tune)
    warnings = resolve.dispatch_warnings(decl, num_ranks, topology, params or {})
    found = _raise_errors((*checks.check_files(files), *checks.check_dispatch(meant)))
    if any(isinstance(route, ByKey) for route in meant.routes):
        return CheckedDispatch(meant, None, (*warnings, *found))
    plan = lower_dispatch(meant)
    verify(plan)
    return CheckedDispatch(meant, plan, (*warnings, *found, *_raise_errors(checks.check_routed(plan))))


def compile_dispatch(
    path: Path | str | tuple[File, ...],
    name: str | None = None,
    ranks: int | None = None,
    on: str | None = None,
    params: Mapping[str, int] | None = None,
    tune: Mapping[str, int | str] | None = None,
) -> CompiledDispatch:
    """`check_dispatch`, then the kernel's text. Raises CommError for a route by keys, too."""
    from commdsl.build.emit import emit  # jinja2, which a check does not need

    held = check_dispatch(path, name, ranks, on, params, tune)
    _raise_errors(tuple(unbuilt_dispatch(held.dispatch)))
    assert held.plan is not None
    return CompiledDispatch(held.dispatch, held.plan, held.warnings, emit(held.plan))


def compile(
    path: Path | str | tuple[File, ...],
    schedule: str | None = None,
    ranks: int | None = None,
    on: str | None = None,
    params: Mapping[str, int] | None = None,
    transport: Transport = Transport.PEER,
    tune: Mapping[str, int | str] | None = None,
) -> Compiled:
    """`check`, then the kernel's text."""
    from commdsl.build.emit import emit  # as above

    proved = check(path, schedule, ranks, on, params, transport, tune)
    return Compiled(proved.schedule, proved.plan, proved.report, proved.warnings, emit(proved.plan))


def _raise_errors(found: tuple[Diagnostic, ...]) -> tuple[Diagnostic, ...]:
    """Hands warnings on; raises if there is an error among them."""
    if any(diagnostic.severity is Severity.ERROR for diagnostic in found):
        raise CommError(found)
    return found
