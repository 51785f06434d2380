"""How long a schedule takes by what waits for what, not by its steps: by hand, beside the bounds, and beside what two
and four H200s took.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from collectives import main_case, shipped

from commdsl import compiler
from commdsl.cost.report import Report, report
from commdsl.ir.resolve import resolve
from commdsl.language.parser import parse
from commdsl.language.source import Source
from commdsl.machine.resources import data_dir
from commdsl.machine.topology import Topology, switch

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import record, scaling_model
from benchmarks import report as measured
from benchmarks.cases import parse_candidates


def hops(text: str, ranks: int, topology: Topology | None = None) -> tuple[float, float]:
    """Latencies in a row, and blocks through a port in a row, of a schedule with these declarations and steps."""
    files = (parse(Source("waits.comm", f"schedule s for P ranks {{\n{text}\n}}\n")),)
    found = report(resolve(files, compiler.choose(files, None), ranks, topology or switch(ranks), {}))
    return in_hops(found)


def in_hops(found: Report) -> tuple[float, float]:
    return found.latency / 0.7e-6, found.seconds_per_byte * 450e9


def test_what_waits_for_nothing_of_another_goes_at_once() -> None:
    """Two broadcasts around a ring of 8, from opposite ranks: 14 steps in the file, 7 hops."""
    text = """inout a
      inout b
      ensure broadcast(a, 0)
      ensure broadcast(b, 4)
      for s in 0 ..< 7 { each r where r == s { put a -> a @ r + 1 } }
      for s in 4 ..< 11 { each r where r == s % P { put b -> b @ (r + 1) % P } }"""
    latency, blocks = hops(text, 8)
    assert (latency, blocks) == pytest.approx((7, 12))  # rank 4 has a and then b in its file: b leaves it at 5


def test_moves_share_their_ports() -> None:
    """Two tensors on one way of two hops: the second leaves behind the first, and waits for it at no other hop."""
    text = """inout a
      inout b
      ensure broadcast(a, 0)
      ensure broadcast(b, 0)
      for s in 0 ..< 2 { each r where r == s { put a -> a @ r + 1 } }
      for s in 0 ..< 2 { each r where r == s { put b -> b @ r + 1 } }"""
    assert hops(text, 3) == pytest.approx((2, 3))


def test_one_step_shares_its_ports() -> None:
    """What one rank sends to three in a step goes out together; from two ranks into one it comes in together."""
    assert hops("inout a\nensure broadcast(a, 0)\neach r where r > 0 { get a @ 0 -> a }", 4) == pytest.approx((1, 3))
    gathered = "input x\noutput y[P blocks]\nensure gather(x -> y, 0)\neach r { put x -> y[r] @ 0 }"
    assert hops(gathered, 4) == pytest.approx((1, 3))


@pytest.mark.parametrize(("slots", "latency", "blocks"), [(2, 2, 1.5), (1, 4, 2)])
def test_what_is_overwritten_has_been_read(slots: int, latency: float, blocks: float) -> None:
    """Two halves by way of rank 1: through one slot the second waits until the first has left it."""
    text = f"""input x[2]
      output y[2]
      scratch t[2]
      ensure each r, i in 0 ..< 2 where r == 2 {{ y[i] == x[i] @ 0 }}
      for s in 0 ..< 2 {{
        each r where r == 0 {{ put x[s] -> t[s % {slots}] @ 1 }}
        each r where r == 1 {{ put t[s % {slots}] -> y[s] @ 2 }}
      }}"""
    assert hops(text, 3) == pytest.approx((latency, blocks))


def test_pairs_with_a_cap_are_shared() -> None:
    """What goes over one capped pair goes one behind the other, whatever else its ports could take."""
    capped = replace(switch(2).links[0], port_bandwidth=np.inf, pair_bandwidth=45e9)
    slow = Topology("slow", 1, 2, 132, (capped,))
    text = """input a
      input b
      output y
      output z
      ensure each r where r == 1 { y == a @ 0  z == b @ 0 }
      each r where r == 0 { put a -> y @ 1 }
      each r where r == 0 { put b -> z @ 1 }"""
    assert hops(text, 2, slow) == pytest.approx((1, 20))


def test_a_pipeline_takes_its_hops_once() -> None:
    """K pieces along a chain: the links' time of K + P - 2 pieces, the latency of P - 1 hops."""
    path = data_dir("schedules") / "collectives" / "broadcast_chain.comm"
    files = compiler.read(path)
    found = report(resolve(files, compiler.choose(files, None), 8, switch(8), {"K": 8}))
    assert (found.num_steps, *in_hops(found)) == pytest.approx((14, 7, 14 / 8))


def test_what_a_function_makes_waits_for_what_it_reads() -> None:
    """Blocks that visit wait for no function that only reads them; a rank that yields goes on when that is over."""
    text = """inout a
      inout b
      ensure rotation(a)
      yield work(a -> a)
      each r { put a -> a @ (r + 1) % P }
      yield work(a -> a)
      each r { put b -> b @ (r + 1) % P }"""
    assert hops(text, 4) == pytest.approx((2, 2))
    assert hops(text.replace("yield work(a -> a)", ""), 4) == pytest.approx((1, 2))


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_between_the_least_and_the_steps_in_turn(path: Path) -> None:
    """No schedule takes longer than its steps one behind the other, none less than any schedule could."""
    case = main_case(path, 8)
    assert case is not None
    files = compiler.read(path)
    found = report(resolve(files, compiler.choose(files, None), case.ranks, switch(case.ranks), dict(case.params)))
    little = 1 + 1e-9
    assert found.limit.latency <= found.latency * little <= sum(step.latency for step in found.steps) * little**2
    in_turn = sum(step.seconds_per_byte for step in found.steps)
    assert found.limit.seconds_per_byte <= found.seconds_per_byte * little <= in_turn * little**2


# --- beside what was measured -----------------------------------------------------------------------------------------


def test_beside_measurements() -> None:
    """Of two collectives that were measured the model says in 19 of 20 cases which is slower. It says too little:

    A kernel starts, signals and fetches its first bytes in 2 to 5 us that are not in the model, and a link carries 0.8
    of what its data sheet says. So a kernel took 3.5 to 6.6 times the model up to 64 KB, and 1 to 1.5 times from 64 MB.
    """
    ratios: dict[int, list[float]] = {}
    times: list[tuple[float, float]] = []
    for name in ("collectives_h200_x2", "collectives_h200_x4"):
        for row in measured.rows_of(record.read(record.MEASURED / f"{name}.csv").lines):
            best = next(one for one in row.results if one.name == measured.CHOSEN and one.timing)
            assert best.timing is not None
            us = modelled(row.case, best.detail)
            ratios.setdefault(row.case.nbytes, []).append(best.timing.median / us)
            times.append((best.timing.median, us))
    for nbytes, found in ratios.items():
        least, most = (3.5, 6.6) if nbytes <= 1 << 16 else (1.0, 1.5) if nbytes >= 1 << 26 else (1.0, 5.2)
        assert least <= min(found) <= max(found) <= most
    took, said = np.array(times).T
    slower, later = took[:, None] > 1.05 * took[None, :], said[:, None] > said[None, :]
    assert (slower & later).sum() / (slower & (said[:, None] != said[None, :])).sum() >= 0.95


def modelled(case: scaling_model.Case, detail: str) -> float:
    """Microseconds of the schedule that was chosen, on a switch with the ports of an H200."""
    chosen = parse_candidates([detail])[0]
    family = scaling_model.Family(chosen.collective, chosen.schedule, chosen.params, "bulk")
    schedule = scaling_model.schedule_on(family, switch(case.ranks))
    assert schedule is not None
    return report(schedule).seconds_for(scaling_model.block_bytes(case)) * 1e6
