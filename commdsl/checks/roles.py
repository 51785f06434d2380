"""C410 to C414: roles are disjoint, complete, within the device, all used; and a schedule's lanes fit its role.

Assumes names were resolved. A lane is one thread block and waits for lanes of other ranks, so all of them must be on
SMs at once: one lane per SM. Does not choose the number of lanes when `tune` does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from commdsl.checks.locations import Located
from commdsl.diagnostics import Diagnostic, Label
from commdsl.ir import RoleSet, Schedule
from commdsl.source import Span
from commdsl.syntax import File, On, RolesDecl, ScheduleDecl

COMPUTE = "compute"
"""The role of the caller's own kernels: no schedule need run on it."""


def broken_roles(located: Located) -> Iterator[Diagnostic]:
    """One message per set of roles, and one when the lanes do not fit."""
    schedule = located.schedule
    sound = True
    for roles in schedule.roles:
        fault = _broken(roles, schedule.topology.num_sms, schedule.topology.name)
        if fault is not None:
            sound = False
            yield fault
    if sound:
        yield from _too_many_lanes(schedule)


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


def _too_many_lanes(schedule: Schedule) -> Iterator[Diagnostic]:
    lanes = schedule.tuning.lanes
    sizes: list[tuple[int, str, Span | None]] = [
        (last - first, f"the role `{name}` has {last - first} SMs", span)
        for roles in schedule.roles
        for (name, first, last), span in zip(roles.roles, roles.spans, strict=True)
        if name == schedule.role
    ]
    device = schedule.topology
    sizes = sizes or [(device.num_sms, f"a GPU of `{device.name}` has {device.num_sms} SMs", None)]
    num_sms, there_is, span = min(sizes, key=lambda size: size[0])
    if lanes is not None and lanes > num_sms:
        yield Diagnostic(
            "C414",
            f"{lanes} lanes do not fit on {num_sms} SMs",
            Label(schedule.span, f"`{schedule.name}` runs {lanes} lanes; {there_is}"),
            () if span is None else (Label(span, there_is),),
            ("lanes wait for lanes of other ranks, so all of them must run at once, each on an SM of its own",),
            help=f"write `tune {{ lanes {num_sms} }}` or less, or widen the role",
        )


def unused_roles(files: tuple[File, ...]) -> Iterator[Diagnostic]:
    """C413, for the main file, which may hold a library of roles without schedules: a role that no schedule runs on."""
    used = {
        statement.role.text
        for file in files
        for item in file.items
        if isinstance(item, ScheduleDecl)
        for statement in item.body
        if isinstance(statement, On)
    }
    for item in files[0].items:
        if not isinstance(item, RolesDecl) or not any(isinstance(other, ScheduleDecl) for other in files[0].items):
            continue
        for role in item.roles:
            if role.name.text != COMPUTE and role.name.text not in used:
                yield Diagnostic(
                    "C413",
                    f"the role `{role.name.text}` does no work",
                    Label(role.span, "no schedule runs on these SMs"),
                    help=f"write `on {role.name.text}` in a schedule; the caller's own SMs are named `{COMPUTE}`",
                )
