"""Our product of matrices beside cuBLAS (torch.mm) on one GPU, in the same run:

    python benchmarks/matmul.py check          every form of the kernel against float32 products of torch, exactly
    python benchmarks/matmul.py time [--time-budget 40 --rows 128 1024 ... --dtype bfloat16]

A row of `time` is a product C [M, N] = A [M, K] x B [N, K]: medians in microseconds of CUDA graphs that take turns,
for cuBLAS and for each way to cut the product; `best` is the fraction of cuBLAS's speed that the best one reaches,
`116` the same for that one on 116 SMs beside cuBLAS on 132, scaled. Inputs are random. The table comes last, also when
time is up.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product as pairs
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.measure import captured
from benchmarks.report import grid
from commdsl.build import nvrtc
from commdsl.build.matmul import ARCH, Product, Tiling, emitted
from commdsl.machine.config import from_environment
from commdsl.runtime.matmul import Launch, Matmul, Matrices

SMS, FEWER = 132, 116
SHAPES = ((8192, 3584), (8192, 1280), (5120, 3456), (3584, 8192), (1024, 8192), (3456, 5120))
"""K and N: Llama-70B's and Qwen-32B's of an 8-way split."""
ROWS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TILINGS = (
    Tiling(256, 2),
    Tiling(256, 1),
    Tiling(256, 2, 4),
    Tiling(256, 1, 4),
    Tiling(128, 2),
    Tiling(128, 1),
    Tiling(128, 2, 4),
    Tiling(128, 1, 4),
    Tiling(128, 1, 8),
)
TURNS = 7
TARGET = 2000.0  # microseconds of a graph
FORMS: tuple[tuple[str, dict[str, object]], ...] = (
    ("plain", {}),
    ("float16", {"dtype": "float16", "result": "float16"}),
    ("to float32", {"result": "float32"}),
    ("B not deep", {"b_deep": False}),
    ("A not deep", {"a_deep": False}),
    ("neither deep", {"a_deep": False, "b_deep": False}),
    ("bias", {"bias": True}),
    ("residual", {"residual": True}),
    ("bias, GELU", {"bias": True, "gelu": True}),
    ("gated", {"gated": True}),
    ("gated, bias", {"gated": True, "bias": True, "residual": True}),
)
SIZES = ((128, 128, 64), (256, 256, 256), (384, 512, 1024), (1000, 1048, 520), (8, 8, 8), (130, 2056, 72), (2048,) * 3)


class Case:
    """The tensors of one product."""

    def __init__(self, product: Product, whole: bool) -> None:
        """`whole`: small whole numbers, whose sums are exact in any order."""
        self.product, self.dtype = product, getattr(torch, product.dtype)
        wide = product.columns * (2 if product.gated else 1)
        deep = self._matrix(product.rows, product.depth, product.a_deep, whole)
        self.a, self.b = deep, self._matrix(wide, product.depth, product.b_deep, whole)
        self.bias = self._matrix(1, wide, True, whole)[0] if product.bias else None
        self.residual = self._matrix(product.rows, product.columns, True, whole) if product.residual else None
        self.c = torch.full((product.rows, product.columns), -77.0, dtype=getattr(torch, product.result), device="cuda")

    def _matrix(self, rows: int, depth: int, deep: bool, whole: bool) -> torch.Tensor:
        shape = (rows, depth) if deep else (depth, rows)
        if whole:
            return torch.randint(-2, 3, shape, device="cuda").to(self.dtype)
        return torch.randn(shape, device="cuda").to(self.dtype)

    def wanted(self) -> torch.Tensor:
        """By torch, in float32 up to the one rounding."""
        product = self.product
        a = self.a if product.a_deep else self.a.t()
        b = self.b.t() if product.b_deep else self.b
        found = a.float() @ b.float()
        if self.bias is not None:
            found += self.bias.float()
        if product.gated:
            gate, up = found.split(product.columns, 1)
            found = torch.nn.functional.silu(gate) * up
        if product.gelu:
            found = torch.nn.functional.gelu(found)
        if self.residual is not None:
            found += self.residual.float()
        return found

    def fault(self) -> str:
        """How `c` differs from what is wanted, or nothing. Where nothing is approximate, every bit counts."""
        wanted, approximate = self.wanted(), self.product.gelu or self.product.gated
        if approximate:
            wrong = (self.c.float() - wanted).abs() > 2.0**-7 * wanted.abs() + 1e-3
        else:
            wrong = self.c != wanted.to(self.c.dtype)
        count = int(wrong.sum())
        if count == 0:
            return ""
        row, column = (int(at) for at in wrong.nonzero()[0])
        rows, columns = wrong.any(1).nonzero().flatten(), wrong.any(0).nonzero().flatten()
        return (
            f"{count} of {wrong.numel()} wrong, rows {int(rows[0])}..{int(rows[-1])}, columns {int(columns[0])}.."
            f"{int(columns[-1])}; [{row}, {column}] is {float(self.c[row, column])}, not {float(wanted[row, column])}"
        )


def check(tilings: Sequence[Tiling], deadline: float) -> int:
    """Prints a line for every form and tiling; returns how many products are wrong."""
    torch.backends.cuda.matmul.allow_tf32 = False
    wrong = done = 0
    few = [tiling for tiling in tilings if tiling in (Tiling(256, 2), Tiling(128, 1, 4))]
    for (name, fields), tiling in [
        *((FORMS[0], tiling) for tiling in tilings),
        *pairs(FORMS[1:], few or tilings),
    ]:
        faults, started = [], time.monotonic()
        for rows, columns, depth in SIZES:
            if time.monotonic() > deadline:
                faults.append("time is up")
                break
            if not fields.get("a_deep", True):
                rows = -(-rows // 8) * 8  # they lie side by side: TMA takes lines of whole 16 bytes
            case = Case(replace(Product(rows, columns, depth), **fields), whole=True)  # type: ignore[arg-type]
            faults += [f"{rows}x{columns}x{depth}: {fault}" for fault in faults_of(case, tiling)]
            done += 2
        wrong += len(faults)
        took = time.monotonic() - started
        print(f"{name:<14}{name_of(tiling):<8}{len(faults):>4} wrong, {took:.1f} s", *faults, sep="\n    ", flush=True)
    print(f"checked {done} products: {'all right' if not wrong else f'{wrong} WRONG'}", flush=True)
    return wrong


def faults_of(case: Case, tiling: Tiling) -> list[str]:
    """Of two calls: the second one finds the flags as the first has left them."""
    ours = Matmul(case.product, tiling, SMS, 0)
    launch = prepared(ours, case)
    found = []
    for _ in range(2):
        case.c.fill_(-77)
        ours(launch)
        torch.cuda.synchronize()
        found.append(case.fault())
    return [fault for fault in found if fault]


def prepared(ours: Matmul, case: Case) -> Launch:
    bias = 0 if case.bias is None else case.bias.data_ptr()
    a, b, c, residual = (None if one is None else Matrices.of(one) for one in (case.a, case.b, case.c, case.residual))
    return ours.prepare([a], b, [c], bias, residual)


def build_ahead(forms: Sequence[tuple[str, dict[str, object]]], tilings: Sequence[Tiling]) -> None:
    """All kernels, on idle cores; says what one takes alone."""
    config = from_environment()

    def build(fields: dict[str, object], tiling: Tiling) -> None:
        product = replace(Product(8, 8, 8), **fields)  # type: ignore[arg-type]
        nvrtc.build(emitted(product, tiling), product.defines(), config, ARCH)

    started = time.monotonic()
    build(*forms[0][1:], tilings[0])
    alone = time.monotonic() - started
    with ThreadPoolExecutor(12) as pool:
        for done in [pool.submit(build, fields, tiling) for (_, fields), tiling in pairs(forms, tilings)]:
            done.result()
    print(f"NVRTC {nvrtc.version()}: one kernel {alone:.2f} s, all {time.monotonic() - started:.1f} s", flush=True)


def times_of(calls: dict[str, Callable[[], object]], flops: float) -> dict[str, float]:
    """Microseconds a call. They take turns, in an order that shifts, so drift hits all alike."""
    repeats = max(2, min(50, round(TARGET / (flops / 600e6))))
    graphs = {name: captured(call, repeats, before=1) for name, call in calls.items()}
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    names, times = [*graphs], {name: [] for name in graphs}  # type: tuple[list[str], dict[str, list[float]]]
    for turn, place in pairs(range(TURNS), range(len(names))):
        name = names[(place + turn) % len(names)]
        begin.record()
        graphs[name].replay()
        end.record()
        end.synchronize()
        times[name].append(1000 * begin.elapsed_time(end) / repeats)
    return {name: median(found) for name, found in times.items()}


def row_of(product: Product, tilings: Sequence[Tiling]) -> list[str]:
    case = Case(product, whole=False)
    calls: dict[str, Callable[[], object]] = {"cuBLAS": lambda: torch.mm(case.a, case.b.t(), out=case.c)}

    def add(name: str, tiling: Tiling, sms: int) -> None:
        ours = Matmul(product, tiling, sms, 0)
        launch = prepared(ours, case)
        calls[name] = lambda: ours(launch)

    for tiling in tilings:
        add(name_of(tiling), tiling, SMS)
    flops = 2.0 * product.rows * product.columns * product.depth
    found = times_of(calls, flops)
    best = min(tilings, key=lambda tiling: found[name_of(tiling)])
    calls = {"cuBLAS": calls["cuBLAS"]}
    for tiling in {best, replace(best, parts=4), replace(best, parts=1)}:
        add(name_of(tiling), tiling, FEWER)
    fewer = times_of(calls, flops)
    least = min(us for name, us in fewer.items() if name != "cuBLAS")
    ratio, scaled = found["cuBLAS"] / found[name_of(best)], fewer["cuBLAS"] * SMS / FEWER / least
    ways = [f"{found[name_of(tiling)]:.1f}" if tiling in tilings else "" for tiling in TILINGS]
    speed = f"{flops / found['cuBLAS'] / 1e6:.0f}"
    return [
        f"{product.rows}x{product.depth}x{product.columns}",
        f"{found['cuBLAS']:.1f}",
        speed,
        *ways,
        name_of(best),
        f"{ratio:.3f}",
        f"{scaled:.3f}",
    ]


def name_of(tiling: Tiling) -> str:
    return f"{tiling.columns}/{tiling.cluster}/{tiling.parts}"


def fits(tiling: Tiling, rows: int) -> bool:
    """Whether the tiling is worth its time: no large tiles of few rows, no small ones of many."""
    return tiling.columns == 256 if rows >= 4096 else rows > 128 or tiling.cluster == 1


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "time"))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument(
        "--ways", nargs="+", default=[name_of(tiling) for tiling in TILINGS], help="columns/cluster/parts"
    )
    parser.add_argument("--time-budget", type=float, default=40.0, help="seconds after which nothing is begun")
    return parser.parse_args()


def main() -> int:
    options = options_of()
    deadline = time.monotonic() + options.time_budget
    tilings = [tiling for tiling in TILINGS if name_of(tiling) in options.ways]
    if options.what == "check":
        build_ahead(FORMS[:1], tilings)
        build_ahead(FORMS, (Tiling(256, 2), Tiling(128, 1, 4)))
        return int(check(tilings, deadline) > 0)
    sizes = [(8192, 8192, 8192), *((rows, n, k) for rows in options.rows for k, n in SHAPES)]
    lines: list[list[str]] = []
    for rows, columns, depth in sizes:
        if time.monotonic() > deadline:
            print(f"time was up before M = {rows}, K = {depth}, N = {columns}")
            break
        product = Product(rows, columns, depth, options.dtype, options.dtype)
        lines.append(row_of(product, [tiling for tiling in tilings if fits(tiling, rows)] or tilings))
        print("  ".join(lines[-1]), flush=True)
    print(grid(["M x K x N", "cuBLAS us", "TFLOP/s", *map(name_of, TILINGS), "way", "best", str(FEWER)], lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
