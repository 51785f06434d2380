"""C410 to C414: roles are disjoint, complete, within the device and all used, and what runs side by side has its own.

Assumes names were resolved. A schedule runs one lane, a thread block, on each SM of its role, so that blocks that wait
for each other are all on the device. Does not look at lanes that `tune` asks for; `resolve` holds them to the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from commdsl.checks.locations import Located, statement_key
from commdsl.ir.dispatches import Dispatch
from commdsl.ir.schedules import RoleSet, Schedule, Task
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.syntax import (
    Compute,
    DispatchDecl,
    File,
    On,
    RolesDecl,
    ScheduleDecl,
    walk,
)
from commdsl.machine.topology import Topology

COMPUTE = "compute"
"""The role of the caller's own kernels: no schedule need run on it."""


def broken_roles(located: Located) -> Iterator[Diagnostic]:
    """One message per set of roles, then one per task."""
    schedule = located.schedule
    yield from _broken_sets(schedule.roles, schedule.topology)
    told: set[tuple[str, int, int]] = set()
    for task in located.tasks():
        if isinstance(task.step, Task) and statement_key(task.step.span) not in told:
            told.add(statement_key(task.step.span))
            yield from _shared(schedule, task.step)


def _shared(schedule: Schedule, task: Task) -> Iterator[Diagnostic]:
    """C414: a task runs beside the moves that wait for it, so on SMs of its own."""
    law = "a task and what moves run side by side, on SMs of their own"
    if task.role is None and schedule.role is None:
        return
    if task.role is None or schedule.role is None:
        where = f"`{schedule.name}` runs on `{schedule.role}`" if task.role is None else "nothing says where moves run"
        whom = "behind the task" if task.role is None else "in the schedule, for what moves"
        yield Diagnostic("C414", law, Label(task.span, where), help=f"write `on ROLE` {whom}")
        return
    ranges = {name: (first, last) for roles in schedule.roles for name, first, last in roles.roles}
    (first, last), (start, end) = ranges[task.role], ranges[schedule.role]
    if max(first, start) < min(last, end):
        both = f"SMs {max(first, start)} ..< {min(last, end)} are of `{schedule.role}` as well"
        yield Diagnostic("C414", law, Label(task.span, both), help="choose another role for one of the two")


def roles_of_dispatch(dispatch: Dispatch) -> Iterator[Diagnostic]:
    """As `broken_roles`."""
    yield from _broken_sets(dispatch.roles, dispatch.topology)


def _broken_sets(role_sets: tuple[RoleSet, ...], topology: Topology) -> Iterator[Diagnostic]:
    for roles in role_sets:
        fault = _broken(roles, topology.num_sms, topology.name)
        if fault is not None:
            yield fault


def _broken(roles: RoleSet, num_sms: int, topology: str) -> Diagnostic | None:
    ordered = sorted(zip(roles.roles, roles.spans, strict=True), key=lambda item: item[0][1:])
    for (name, first, last), span in ordered:
        if not 0 <= first < last <= num_sms:
            size = "is empty" if last <= first else f"ends at SM {last}" if last > num_sms else f"starts at SM {first}"
            return Diagnostic(
                "C411",
                f"the role `{name}` does not fit the device",
                Label(span, f"`{name}` {size}; a GPU of `{topology}` has SMs 0 ..< {num_sms}"),
                help="a role is a half-open range `first ..< last` of the SMs there are",
            )
    for ((name, _, last), span), ((next_name, next_first, _), next_span) in pairwise(ordered):
        if next_first < last:
            return Diagnostic(
                "C410",
                f"the roles `{name}` and `{next_name}` share SMs",
                Label(next_span, f"`{next_name}` starts at SM {next_first}"),
                (Label(span, f"`{name}` ends before SM {last}"),),
                help=f"start `{next_name}` at {last}",
            )
    return _gap(roles, num_sms, topology)


def _gap(roles: RoleSet, num_sms: int, topology: str) -> Diagnostic | None:
    at = 0
    for _, first, last in (*sorted(roles.roles, key=lambda role: role[1]), ("", num_sms, num_sms)):
        if at < first:
            return Diagnostic(
                "C412",
                f"the roles `{roles.name}` leave SMs without work",
                Label(roles.span, f"no role has SMs {at} ..< {first} of the {num_sms} of `{topology}`"),
                help="widen a role, or give the rest to one named `compute`",
            )
        at = last
    return None


def unused_roles(files: tuple[File, ...]) -> Iterator[Diagnostic]:
    """C413, for the main file, which may hold a library of roles alone: a role that no schedule runs on."""
    items = [item for file in files for item in file.items if isinstance(item, ScheduleDecl | DispatchDecl)]
    used = {role for item in items for role in _roles_in(item)}
    for item in files[0].items:
        runs = any(isinstance(other, ScheduleDecl | DispatchDecl) for other in files[0].items)
        if not isinstance(item, RolesDecl) or not runs:
            continue
        for role in item.roles:
            if role.name.text != COMPUTE and role.name.text not in used:
                yield Diagnostic(
                    "C413",
                    f"the role `{role.name.text}` does no work",
                    Label(role.span, "no schedule runs on these SMs"),
                    help=f"write `on {role.name.text}` in a schedule; the caller's own SMs are named `{COMPUTE}`",
                )


def _roles_in(item: ScheduleDecl | DispatchDecl) -> Iterator[str]:
    for statement in walk(item.body) if isinstance(item, ScheduleDecl) else item.body:
        match statement:
            case On(role):
                yield role.text
            case Compute(role=role) if role is not None:
                yield role.text
            case _:
                pass
