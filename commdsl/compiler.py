"""The whole story on one page: text -> Syntax -> IR -> checks -> Plan -> CUDA C++ text; plans of a dispatch -> routes.

Assumes a path to a `.comm` file, or text in hand. Does not build, load or run anything; `build` and `runtime` do.
Every caller that needs two stages in a row goes through here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar, assert_never, overload

from commdsl import checks
from commdsl.checks.built import tasks_without_kernel, unbuilt_casts, unbuilt_lengths, unbuilt_schedule
from commdsl.cost.report import Report, far_from_bound, report
from commdsl.ir import resolve
from commdsl.ir.dispatches import ByKey, Dispatch
from commdsl.ir.plans import DispatchPlan, Routing, routing
from commdsl.ir.resolve.faults import nearest
from commdsl.ir.schedules import Schedule
from commdsl.language import parsed
from commdsl.language.diagnostics import CommError, Diagnostic, Label, Severity
from commdsl.language.records import dataclass
from commdsl.language.source import Source, Span, Texts
from commdsl.language.syntax import DispatchDecl, File, PlanDecl, ScheduleDecl, Use
from commdsl.language.text import text_of
from commdsl.machine import resources
from commdsl.machine.topology import Topology, switch
from commdsl.program.lower import lower
from commdsl.program.lower.by_key import lower_again, lower_back, lower_by_key, lower_values
from commdsl.program.lower.routed import lower_dispatch
from commdsl.program.lower.visits import lower_visits
from commdsl.program.memory import Transport
from commdsl.program.plan import Plan
from commdsl.program.pushed import pushing
from commdsl.program.verify import verify
from commdsl.program.visited import plan_of, segments

if TYPE_CHECKING:
    from commdsl.build.emit import Emitted

DEFAULT_RANKS = 8

Declaration: TypeAlias = ScheduleDecl | DispatchDecl | PlanDecl
"""What a file declares to be proved, each by the laws of its kind."""

Decl = TypeVar("Decl", ScheduleDecl, DispatchDecl, PlanDecl)
Named = TypeVar("Named", bound=Declaration)

KINDS = {ScheduleDecl: "schedule", DispatchDecl: "dispatch", PlanDecl: "plan"}

LOADERS = {
    ScheduleDecl: "`{}` is a schedule: `commdsl.load` loads it",
    DispatchDecl: "`{}` is a dispatch: `commdsl.dispatch.Dispatcher`, or by keys `commdsl.ep.Experts`, loads it",
    PlanDecl: "`{}` is a plan: `commdsl.dispatch.load_plan` loads it",
}
"""What to do with a declaration where another kind was expected."""


@dataclass(frozen=True)
class Given:
    """What a declaration is proved for, as far as it does not say itself."""

    ranks: int | None = None  # None: DEFAULT_RANKS
    on: str | None = None  # a topology; None: a flat switch
    params: Mapping[str, int] | None = None
    transport: Transport = Transport.PEER
    tune: Mapping[str, int | str] | None = None

    @property
    def num_ranks(self) -> int:
        return DEFAULT_RANKS if self.ranks is None else self.ranks


@dataclass(frozen=True, eq=False)
class CheckedSchedule:
    """A schedule that was proved for its rank count and topology, and the Plan that was proved with it.

    `visits` is the Plan that stops at each yield, None without yields; where one has a body, there is no other.
    `pushing`: with `matmul push`, the Plan whose tasks store results on peers, for sizes where they can.
    """

    schedule: Schedule
    plan: Plan
    visits: Plan | None
    pushing: Plan | None
    report: Report
    warnings: tuple[Diagnostic, ...]


@dataclass(frozen=True, eq=False)
class CheckedDispatch:
    """A dispatch that was held to every law that needs no table and no keys, and the Plan that was proved with it.

    `back`: by keys, the Plan of the way back; by tables there is none, as the same Plan runs both ways. `values`: where
    there is a way back from keys, the Plan that brings a number for each of them. `again`: by keys, the Plan of the way
    there to places that are known.
    """

    dispatch: Dispatch
    plan: Plan
    back: Plan | None
    values: Plan | None
    again: Plan | None
    warnings: tuple[Diagnostic, ...]


@dataclass(frozen=True, eq=False)
class CheckedPlan:
    """A dispatch plan that was proved, and the routes that were proved with it. It is data: it has no kernel."""

    plan: DispatchPlan
    routing: Routing
    warnings: tuple[Diagnostic, ...]


Checked: TypeAlias = CheckedSchedule | CheckedDispatch | CheckedPlan
"""What came of a declaration that has no fault."""


@dataclass(frozen=True, eq=False)
class CompiledSchedule(CheckedSchedule):
    """A proved schedule and the text of its kernel; for the Plan that stops at yields, those of its launches."""

    emitted: Emitted
    launched: tuple[Emitted, ...]


@dataclass(frozen=True, eq=False)
class CompiledDispatch(CheckedDispatch):
    """A proved dispatch, what is launched for it, and the text of its kernel, or kernels."""

    emitted: Emitted
    emitted_back: Emitted | None
    emitted_values: Emitted | None
    emitted_again: Emitted | None

    @property
    def ways(self) -> tuple[tuple[Plan, Emitted], ...]:
        """Each launch with its text: there, and where it goes by keys, back, back for numbers, and there again."""
        plans = self.plan, self.back, self.values, self.again
        texts = self.emitted, self.emitted_back, self.emitted_values, self.emitted_again
        both = zip(plans, texts, strict=True)
        return tuple((plan, text) for plan, text in both if plan is not None and text is not None)


Compiled: TypeAlias = CompiledSchedule | CompiledDispatch | CheckedPlan


def read(path: Path | str | Texts) -> tuple[File, ...]:
    """The syntax of a file and of those it uses, itself first, each once; of texts in hand, of these.

    Raises CommError for a syntax fault, what is not UTF-8 or a used file that is not there, OSError if the file itself
    cannot be read.
    """
    if isinstance(path, tuple):
        return tuple(map(parsed.parse, path))
    main = Path(path)
    return read_text(text_of(main), str(path), main.parent)


def read_text(text: str, name: str, folder: Path) -> tuple[File, ...]:
    """As `read`, for text in hand; what it uses is looked for in `folder`, then among the shipped schedules."""
    return with_used(parsed.parse(Source(name, text)), folder)


def with_used(file: File, folder: Path) -> tuple[File, ...]:
    """As `read_text`, for a file that was parsed."""
    files = [file]
    seen = {(folder / file.source.name).resolve()}
    pending = [(use, folder) for use in _uses(file)]
    while pending:
        use, base = pending.pop(0)
        path = find_used(use, base)
        if path.resolve() not in seen:
            seen.add(path.resolve())
            files.append(parsed.parse(Source(str(path), text_of(path, use.span))))
            pending += [(further, path.parent) for further in _uses(files[-1])]
    return tuple(files)


def _uses(file: File) -> list[Use]:
    return [item for item in file.items if isinstance(item, Use)]


def find_used(use: Use, folder: Path) -> Path:
    """The file that a `use` names: of the folder, or shipped. Raises CommError where there is none."""
    if not use.path.endswith(resources.SUFFIX):
        label = Label(use.span, f"`use` reads {resources.SUFFIX} files alone")
        raise CommError((Diagnostic("C190", f"`{use.path}` is no {resources.SUFFIX} file", label),))
    for base in (folder, resources.data_dir("schedules")):
        if (base / use.path).is_file():
            return base / use.path
    is_folder = (folder / use.path).is_dir()
    found = "this is a folder" if is_folder else "no such file beside this one, nor among the shipped schedules"
    label = Label(use.span, found)
    raise CommError((Diagnostic("C190", f"cannot find `{use.path}`", label),))


def declarations(files: tuple[File, ...]) -> tuple[Declaration, ...]:
    """What a file declares itself, in the order written."""
    return tuple(item for item in files[0].items if isinstance(item, Declaration))


def declared(files: tuple[File, ...], kind: type[Decl]) -> tuple[Decl, ...]:
    """Those of one kind."""
    return tuple(item for item in files[0].items if isinstance(item, kind))


def choose(files: tuple[File, ...], name: str | None) -> Declaration:
    """The declaration of that name, or the only one."""
    return _named(declarations(files), name, "schedule, dispatch or plan", files)


def choose_kind(files: tuple[File, ...], name: str | None, kind: type[Decl]) -> Decl:
    """As `choose`, of one kind."""
    return _named(declared(files, kind), name, KINDS[kind], files)


def _named(found: tuple[Named, ...], name: str | None, what: str, files: tuple[File, ...]) -> Named:
    named = [decl for decl in found if name in (None, decl.name.text)]
    if len(named) == 1 or (named and name):  # that two have one name is for `resolve` to say
        return named[0]
    whole = Span(files[0].source, 0, 0)
    have = ", ".join(f"`{decl.name.text}`" for decl in found) or "none"
    wanted = f"expected a {what} named `{name}`" if name else f"expected one {what}, or the name of one"
    help = "" if found else "; ".join(LOADERS[type(decl)].format(decl.name.text) for decl in declarations(files))
    raise CommError((Diagnostic("C191", wanted, Label(whole, f"this file has {have}"), help=help),))


def find_topology(files: tuple[File, ...], name: str | None, ranks: int) -> Topology:
    """The topology of that name in the files or among the shipped ones; `box.comm`, or `box.comm:name` where it has
    several, is one of a file of its own; without a name one flat switch.

    Raises CommError where there is none, OSError if the file cannot be read.
    """
    if name is None:
        return switch(ranks)
    file, wanted = resources.split_place(name)
    if file.endswith(resources.SUFFIX):
        own = read(file)
        found = resolve.topologies(own)
        if wanted is None and len(found) == 1:
            return next(iter(found.values()))
        return _topology(found, wanted, own, sorted(found))
    found = resolve.topologies(files)
    shipped = {
        path.stem: path for path in (resources.data_dir("schedules") / "topologies").glob(f"*{resources.SUFFIX}")
    }
    if name not in found and name in shipped:
        found = resolve.topologies(read(shipped[name]))
    return _topology(found, name, files, sorted({*found, *shipped}))


def _topology(found: dict[str, Topology], name: str | None, files: tuple[File, ...], known: list[str]) -> Topology:
    if name in found:
        return found[name]
    label = Label(Span(files[0].source, 0, 0), f"known here: {', '.join(known) or 'none'}")
    if name is None:
        what = f"expected one topology in `{files[0].source.name}`, it has {len(known) or 'none'}"
        help = f"say which: `{files[0].source.name}:{known[0]}`" if known else "declare one: `topology NAME { ... }`"
        raise CommError((Diagnostic("C192", what, label, help=help),))
    raise CommError((Diagnostic("C192", f"no topology named `{name}`", label, help=nearest(name, known)),))


def check(
    path: Path | str | tuple[File, ...],
    name: str | None = None,
    ranks: int | None = None,
    on: str | None = None,
    params: Mapping[str, int] | None = None,
    transport: Transport = Transport.PEER,
    tune: Mapping[str, int | str] | None = None,
) -> Checked:
    """Proves one declaration of a file, that of the name or the only one, for one rank count (8 unless said) on one
    topology, with values for its parameters, and `tune` in place of what its text tunes. A plan says itself for how
    many ranks it is, and has no parameters.

    Raises CommError with every fault found.
    """
    files = path if isinstance(path, tuple) else read(path)
    return check_declared(files, choose(files, name), Given(ranks, on, params, transport, tune))


def check_declared(files: tuple[File, ...], decl: Declaration, given: Given) -> Checked:
    """`check` of a declaration in hand."""
    match decl:
        case ScheduleDecl():
            return check_schedule(files, decl, given)
        case DispatchDecl():
            return check_dispatch(files, decl, given)
        case PlanDecl():
            return check_plan(files, decl)
        case _:
            assert_never(decl)


def check_schedule(files: tuple[File, ...], decl: ScheduleDecl, given: Given) -> CheckedSchedule:
    """A schedule, and that its Plan orders every hazard and computes what it says."""
    topology = find_topology(files, given.on, given.num_ranks)
    ranks, params = given.num_ranks, given.params or {}
    meant = checks.resolved(decl, lambda one: resolve.resolve(files, one, ranks, topology, params, given.tune))
    _raise_errors(checks.check_called(meant))
    found = _raise_errors((*checks.check_files(files), *checks.check_schedule(meant)))
    warnings = (*resolve.warnings(files, decl), *found)
    unbuilt = (*unbuilt_schedule(meant), *unbuilt_lengths(meant), *unbuilt_casts(meant, given.transport))
    _raise_errors((*unbuilt, *tasks_without_kernel(meant, given.transport)))
    stopped = checks.stopped(meant)
    visits = lower_visits(stopped, given.transport) if meant.stops else None
    plan = visits if visits is not None and meant.has_bodies else lower(meant, given.transport)
    pushed = pushing(visits) if visits is not None and meant.tuning.matmul == "push" else None
    for one in dict.fromkeys(one for one in (plan, visits, pushed) if one is not None):
        verify(one)
        warnings += _raise_errors(checks.check_plan(stopped, one))
    warnings += (*far_from_bound(meant, costs := report(meant)),)
    return CheckedSchedule(meant, plan, visits, pushed, costs, warnings)


def check_dispatch(files: tuple[File, ...], decl: DispatchDecl, given: Given) -> CheckedDispatch:
    """A dispatch, and that its Plan orders every hazard whatever the tables of a call say."""
    topology = find_topology(files, given.on, given.num_ranks)
    meant = resolve.dispatch(files, decl, given.num_ranks, topology, given.params, given.tune)
    warnings = resolve.dispatch_warnings(files, decl, given.num_ranks, topology, given.params or {})
    found = _raise_errors((*checks.check_files(files), *checks.check_dispatch(meant)))
    ways = _lowered(meant, given.transport)
    for one in ways:
        if one is not None:
            verify(one)
            found += _raise_errors((*checks.check_routed(one), *checks.check_carried(meant, one)))
    return CheckedDispatch(meant, *ways, (*warnings, *found))


def _lowered(meant: Dispatch, transport: Transport) -> tuple[Plan, Plan | None, Plan | None, Plan | None]:
    """The ways there, back, back for numbers, and there again."""
    if not any(isinstance(route, ByKey) for route in meant.routes):
        return lower_dispatch(meant, transport), None, None, None
    there, again = lower_by_key(meant, transport), lower_again(meant, transport)
    if meant.back is None:
        return there, None, None, again
    return there, lower_back(meant, meant.back, transport), lower_values(meant, transport), again


def check_plan(files: tuple[File, ...], decl: PlanDecl) -> CheckedPlan:
    """A plan of documents, and that its routes send every row there and back."""
    one = prove_plan(resolve.dispatch_plan(files, decl))
    return CheckedPlan(one.plan, one.routing, (*resolve.plan_warnings(files, decl), *one.warnings))


def prove_plan(plan: DispatchPlan) -> CheckedPlan:
    """As `check_plan`, for a plan that no text declares. Raises CommError."""
    warnings = _raise_errors(checks.check_dispatch_plan(plan))
    routes = routing(plan)
    return CheckedPlan(plan, routes, (*warnings, *_raise_errors(checks.check_routing(plan, routes))))


def compile(
    path: Path | str | tuple[File, ...],
    name: str | None = None,
    ranks: int | None = None,
    on: str | None = None,
    params: Mapping[str, int] | None = None,
    transport: Transport = Transport.PEER,
    tune: Mapping[str, int | str] | None = None,
) -> Compiled:
    """`check`, then the kernel's text; a plan has none."""
    return printed(check(path, name, ranks, on, params, transport, tune))


@overload
def printed(checked: CheckedSchedule) -> CompiledSchedule: ...
@overload
def printed(checked: CheckedDispatch) -> CompiledDispatch: ...
@overload
def printed(checked: Checked) -> Compiled: ...
def printed(checked: Checked) -> Compiled:
    """What was proved, and the text of its kernel, or kernels."""
    from commdsl.build.emit import emit, joined  # jinja2, which a check does not need

    match checked:
        case CheckedSchedule(schedule, plan, visits, pushed, costs, warnings):
            launched = () if visits is None else tuple(emit(plan_of(visits, moves)) for moves in segments(visits))
            emitted = joined(plan.name, launched) if plan.is_visited else emit(plan)
            return CompiledSchedule(schedule, plan, visits, pushed, costs, warnings, emitted, launched)
        case CheckedDispatch(dispatch, plan, back, values, again, warnings):
            texts = [None if one is None else emit(one) for one in (back, values, again)]
            return CompiledDispatch(dispatch, plan, back, values, again, warnings, emit(plan), *texts)
        case CheckedPlan():
            return checked
        case _:
            assert_never(checked)


def _raise_errors(found: tuple[Diagnostic, ...]) -> tuple[Diagnostic, ...]:
    """Hands warnings on; raises if there is an error among them."""
    if any(diagnostic.severity is Severity.ERROR for diagnostic in found):
        raise CommError(found)
    return found
