"""Dispatches by keys to be run on host ranks, and their kernels.

Assumes legal numbers. Does not run anything: `commdsl.build.host_keys` does.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from commdsl import compiler
from commdsl.build.emit import emit
from commdsl.build.host_ranks import Kernel, built
from commdsl.compiler import CheckedDispatch
from commdsl.program.lower.by_key import lower_back
from commdsl.program.memory import Transport
from commdsl.program.plan import Plan


def declared(
    ranks: int,
    keys: int,
    lanes: int = 3,
    tensors: int = 2,
    rank: str = "expert / (E / P)",
    transport: Transport = Transport.PEER,
) -> CheckedDispatch:
    names = [f"x{number}" for number in range(tensors)]
    text = f"""dispatch experts(E = {keys}) for P ranks {{
      {"   ".join(f"rows {name}[T]" for name in names)}
      key expert[T, K] of E
      route {", ".join(names)} by {rank}
      place by (expert, source rank, row)
      back y by sum(weight[T, K])
      tune {{ sms {lanes}   threads 32 }}
    }}"""
    return compiler.check(compiler.read_text(text, "by_hand.comm", Path()), ranks=ranks, transport=transport)


FORMS = ("keys", "keys weighed", "ranks", "ranks weighed")
"""What comes back: a row of each key, or a sum of each rank."""


def back_of(of: CheckedDispatch, form: str, transport: Transport = Transport.PEER) -> Plan:
    """The way back of a dispatch in one of the forms."""
    weight = "weight" if "weighed" in form else None
    assert of.dispatch.back is not None
    return lower_back(of.dispatch, replace(of.dispatch.back, weight=weight, once="ranks" in form), transport)


def kernel(plan: Plan, dtype: str = "", *, sanitize: bool = False, checks: bool = True) -> Kernel:
    macros = (*((f"COMMDSL_DTYPE={dtype}",) if dtype else ()), *(("COMMDSL_CHECK=1",) if checks else ()))
    return built(plan, emit(plan), macros, sanitize=sanitize)


def going(
    ranks: int,
    keys: int,
    often: str = "once per rank",
    aligned: int = 1,
    *,
    value: bool = True,
    tensors: int = 2,
    rank: str = "expert / (E / P)",
    lanes: int = 3,
    transport: Transport = Transport.PEER,
    node: int = 0,
    cast: str = "",
    back: str = "",
) -> CheckedDispatch:
    """One way there, in words of the language; on nodes of so many ranks, or on one. `cast`: of the first tensor;
    `back`: the way back.
    """
    names = [f"x{number}" for number in range(tensors)]
    text = f"""{nodes_of(ranks, node) if node else ""}dispatch experts(E = {keys}) for P ranks {{
      rows x0[T] {cast}   {"   ".join(f"rows {name}[T]" for name in names[1:])}
      key expert[T, K] of E
      {"value gate[T, K]" if value else ""}
      route {", ".join([*names, *(["gate"] if value else [])])} by {rank} {often}
      place by (expert, source rank, row) aligned {aligned}
      {back}
      tune {{ sms {lanes}   threads 32 }}
    }}"""
    files, on = compiler.read_text(text, "by_hand.comm", Path()), "nodes" if node else None
    return compiler.check(files, ranks=ranks, on=on, transport=transport)


def nodes_of(ranks: int, node: int) -> str:
    """A topology of nodes of so many ranks."""
    return f"""topology nodes {{
      nodes {ranks // node}   gpus {node} per node   sms 132
      link nvlink in node   450 GB/s per gpu   0.7 us
      link rail   across nodes same gpu   50 GB/s per gpu   4 us
    }}
    """
