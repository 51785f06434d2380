"""Our product of matrices beside cuBLAS (torch.mm) on one GPU, in the same run:

    python benchmarks/matmul.py check          every form of the kernel against float32 products of torch, exactly
    python benchmarks/matmul.py time [--time-budget 40 --rows 128 ... --shapes 8192x3584 ... --ways 4 --dtype bfloat16
                                      --a-not-deep --b-not-deep]

A row of `time` is a product C [M, N] = A [M, K] x B [N, K]: medians in microseconds of CUDA graphs that take turns,
for cuBLAS (of float8 torch._scaled_mm), for the way to cut the product that `build.tilings` chooses, and for the best
of as many as are asked for; `of cuBLAS` is the fraction of its speed that the chosen one reaches, `116` the same on
116 SMs beside cuBLAS on 132, scaled. Inputs are random. The table comes last, also when time is up; in the log, every
way has its time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
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
from commdsl.build.emit import Emitted
from commdsl.build.matmul import ARCH, FLOAT8, Product, Tiling, alone, emitted, form_of
from commdsl.build.tilings import WAYS, ranked
from commdsl.machine.config import from_environment
from commdsl.runtime.matmul import Addresses, Launch, Mapped, Matmul, Matrices, Side

SMS, FEWER = 132, 116
SHAPES = ((8192, 3584), (8192, 1280), (5120, 3456), (3584, 8192), (1024, 8192), (3456, 5120))
"""K and N: Llama-70B's and Qwen-32B's of an 8-way split."""
ROWS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SEVERAL = (Tiling(256, 2), Tiling(128, 1, 4), Tiling(160, 1, rows=256), Tiling(96, 1, split=4))
"""One of each kind."""
TURNS = 7
TARGET = 2000.0  # microseconds of a graph
FORMS: tuple[tuple[str, dict[str, object]], ...] = (
    ("plain", {}),
    ("B not deep", {"b_deep": False}),
    ("float8", {"dtype": FLOAT8}),
    ("float16", {"dtype": "float16", "result": "float16"}),
    ("to float32", {"result": "float32"}),
    ("float8 to float32", {"dtype": FLOAT8, "result": "float32"}),
    ("float8 to float16", {"dtype": FLOAT8, "result": "float16", "bias": True, "adds": True}),
    ("A not deep", {"a_deep": False}),
    ("neither deep", {"a_deep": False, "b_deep": False}),
    ("bias", {"bias": True}),
    ("residual", {"adds": True}),
    ("bias, GELU", {"bias": True, "gelu": True}),
    ("gated", {"gated": True}),
    ("gated, bias", {"gated": True, "bias": True, "adds": True}),
)
SIZES = ((128, 128, 64), (256, 256, 256), (384, 512, 1024), (1000, 1048, 520), (8, 8, 8), (130, 2056, 72), (2048,) * 3)


class Case:
    """The tensors of one product."""

    def __init__(self, product: Product, whole: bool) -> None:
        """`whole`: small whole numbers, whose sums are exact in any order."""
        self.product, self.dtype, self.result = product, getattr(torch, product.dtype), getattr(torch, product.result)
        wide = product.columns * (2 if product.gated else 1)
        deep = self._matrix(product.rows, product.depth, product.a_deep, whole)
        self.a, self.b = deep, self._matrix(wide, product.depth, product.b_deep, whole)
        self.bias = self._matrix(1, wide, True, whole)[0].to(self.result) if product.bias else None
        self.residual = None
        if product.adds:
            self.residual = self._matrix(product.rows, product.columns, True, whole).to(self.result)
        self.c = torch.full((product.rows, product.columns), -77.0, dtype=self.result, device="cuda")
        scales = (4.0, 0.125) if product.dtype == FLOAT8 else (1.0, 1.0)
        self.scales = tuple(torch.tensor(scale, device="cuda") for scale in scales)

    def _matrix(self, rows: int, depth: int, deep: bool, whole: bool) -> torch.Tensor:
        shape = (rows, depth) if deep else (depth, rows)
        if whole:
            return torch.randint(-2, 3, shape, device="cuda").to(self.dtype)
        return torch.randn(shape, device="cuda").to(self.dtype)

    def by_torch(self, *, fast: bool = False) -> None:
        """`fast`: float8 is added up as the tensor cores do, all along the depth."""
        a = self.a if self.product.a_deep else self.a.t()
        b = self.b.t() if self.product.b_deep else self.b
        if self.product.dtype == FLOAT8:
            of_a, of_b = self.scales
            torch._scaled_mm(a, b, of_a, of_b, out_dtype=self.result, use_fast_accum=fast, out=self.c)
        else:
            torch.mm(a, b, out=self.c)

    def wanted(self) -> torch.Tensor:
        """By torch, in float32 up to the one rounding."""
        product = self.product
        a = self.a if product.a_deep else self.a.t()
        b = self.b.t() if product.b_deep else self.b
        found = a.float() @ b.float() * self.scales[0] * self.scales[1]
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


def check(deadline: float) -> int:
    """Prints a line for every form and tiling; returns how many products are wrong."""
    torch.backends.cuda.matmul.allow_tf32 = False
    wrong = done = 0
    for name, fields, tiling in kernels():
        faults, started = [], time.monotonic()
        for rows, columns, depth in SIZES:
            if time.monotonic() > deadline:
                faults.append("time is up")
                break
            if not fields.get("a_deep", True):
                rows = -(-rows // 8) * 8  # they lie side by side: TMA takes lines of whole 16 bytes
            if fields.get("dtype") == FLOAT8:
                depth = -(-depth // 16) * 16
            product = replace(Product(rows, columns, depth), **fields)  # type: ignore[arg-type]
            if tiling.fits(product):
                faults += [f"{rows}x{columns}x{depth}: {fault}" for fault in faults_of(product, tiling)]
                done += 2
        wrong += len(faults)
        took = time.monotonic() - started
        print(f"{name:<14}{name_of(tiling):<16}{len(faults):>4} wrong, {took:.1f} s", *faults, sep="\n    ", flush=True)
    for tiling in WAYS:
        faults = [fault for fault in faults_of_chain(tiling) if fault]
        wrong, done = wrong + len(faults), done + 2
        print(f"{'chain':<14}{name_of(tiling):<16}{len(faults):>4} wrong", *faults, sep="\n    ", flush=True)
    faults = faults_of_rounding()
    wrong, done = wrong + len(faults), done + 1
    print(f"checked {done} products: {'all right' if not wrong else f'{wrong} WRONG'}", flush=True)
    return wrong


def kernels() -> list[tuple[str, dict[str, object], Tiling]]:
    """What is checked: every tiling of what a pass there and back takes, and of float8, and every form of several."""
    wanted = [*pairs(FORMS[:3], WAYS), *pairs(FORMS[3:], SEVERAL)]
    return [
        (*form, tiling)
        for form, tiling in wanted
        if tiling.fits(replace(Product(8, 8, 1024), **form[1]))  # type: ignore[arg-type]
    ]


def faults_of(product: Product, tiling: Tiling) -> list[str]:
    """Of two calls: the second one finds the flags as the first has left them."""
    case, ours, found = Case(product, whole=True), kernel_of(product, tiling, SMS), []
    launch = prepared(ours, case)
    for _ in range(2):
        case.c.fill_(-77)
        ours(launch)
        torch.cuda.synchronize()
        found.append(case.fault())
    return [fault for fault in found if fault]


def faults_of_rounding() -> list[str]:
    """Of float8, whose sums the tensor cores keep in few bits: against float64, beside torch's ways."""
    case = Case(Product(1024, 1024, 8192, FLOAT8, "float32"), whole=False)
    wanted = case.a.double() @ case.b.double().t() * case.scales[0] * case.scales[1]

    def error(call: Callable[[], object]) -> float:
        call()
        return float((case.c.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())

    ours = kernel_of(case.product, ranked(case.product, SMS)[0], SMS)
    launch = prepared(ours, case)
    own, torchs, fast = (
        error(call) for call in (lambda: ours(launch), case.by_torch, lambda: case.by_torch(fast=True))
    )
    print(f"float8, 8192 deep: error {own:.2e}, torch's {torchs:.2e}, with its fast sums {fast:.2e}", flush=True)
    return ["rounding"] if own > 1.5 * torchs else []


def faults_of_chain(tiling: Tiling) -> Iterator[str]:
    """Of products that each take the result of the one before, to and fro between two matrices: every product moves all
    columns on by one, so a launch that begins too early leaves what is not exact. On a stream, and in a graph.
    """
    side, length = 1024, 32
    first = torch.randint(-99, 99, (side, side), device="cuda").to(torch.bfloat16)
    here, there = first.clone(), torch.empty_like(first)
    ours = kernel_of(Product(side, side, side), tiling, SMS)
    moves = torch.eye(side, dtype=torch.bfloat16, device="cuda").roll(1, 0)
    launches = [ours.prepare(mapped(x, moves, y)) for x, y in ((here, there), (there, here))]

    def run() -> None:
        here.copy_(first)
        for number in range(length):
            ours(launches[number % 2])

    graph = captured(run, 1, before=1)
    for name, call in (("stream", run), ("graph", graph.replay)):
        call()
        torch.cuda.synchronize()
        count = int((here != first.roll(length, 1)).sum())
        yield f"on a {name}: {count} of {here.numel()} wrong" if count else ""


def kernel_of(product: Product, tiling: Tiling, sms: int) -> Matmul:
    """The kernel of a launch of one task, with a residual where that adds something."""
    return Matmul([product], tiling, sms, 0, [alone(product, int(product.adds))], is_alone=True)


def mapped(a: torch.Tensor, b: torch.Tensor, *results: torch.Tensor) -> list[Mapped]:
    """The maps of such a launch: rows, the factor, and what is made and added."""
    others = ((Matrices.of(one), Side.RESULT) for one in results)
    return [(Matrices.of(a), Side.ROWS), (Matrices.of(b), Side.FACTOR), *others]


def prepared(ours: Matmul, case: Case) -> Launch:
    biases = () if case.bias is None else (case.bias.data_ptr(),)
    results = [case.c] if case.residual is None else [case.c, case.residual]
    scales = tuple(scale.data_ptr() for scale in case.scales)
    return ours.prepare(mapped(case.a, case.b, *results), Addresses(biases, scales=scales))


def build_ahead(wanted: Iterable[tuple[Product, Tiling]]) -> None:
    """All kernels, on idle cores; says what one takes alone."""
    config = from_environment()

    def build(product: Product, tiling: Tiling) -> None:
        nvrtc.build(text_of(product, tiling), product.defines(), config, ARCH)

    several = {
        text_of(product, tiling).digest + product.dtype + product.result: (product, tiling)
        for product, tiling in wanted
    }
    first, *others = several.values()
    started = time.monotonic()
    build(*first)
    alone = time.monotonic() - started
    with ThreadPoolExecutor(12) as pool:
        for done in [pool.submit(build, *one) for one in others]:
            done.result()
    took = time.monotonic() - started
    print(f"NVRTC {nvrtc.version()}: one kernel {alone:.2f} s, all {len(several)} {took:.1f} s", flush=True)


def text_of(product: Product, tiling: Tiling) -> Emitted:
    return emitted(form_of([product], [alone(product, int(product.adds))]), tiling)


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


def row_of(product: Product, count: int) -> list[str]:
    case = Case(product, whole=False)
    calls: dict[str, Callable[[], object]] = {"cuBLAS": case.by_torch}

    def add(tiling: Tiling, sms: int) -> None:
        ours = kernel_of(product, tiling, sms)
        launch = prepared(ours, case)
        calls[f"{name_of(tiling)} on {sms}"] = lambda: ours(launch)

    for sms, tiling in ways_of(product, count):
        add(tiling, sms)
    flops = 2.0 * product.rows * product.columns * product.depth
    found = times_of(calls, flops)
    cublas = found.pop("cuBLAS")
    print(f"    {product.rows}x{product.depth}x{product.columns}", *(f"{name}: {us:.1f}" for name, us in found.items()))
    (chosen, us), *_ = found.items()
    best, least = min((one for one in found.items() if one[0].endswith(f" {SMS}")), key=lambda one: one[1])
    fewer = min(us for name, us in found.items() if name.endswith(f" {FEWER}"))
    return [
        f"{product.rows}x{product.depth}x{product.columns}",
        f"{cublas:.1f}",
        f"{flops / cublas / 1e6:.0f}",
        chosen.split()[0],
        f"{us:.1f}",
        f"{cublas / us:.3f}",
        best.split()[0],
        f"{us / least:.3f}",
        f"{cublas * SMS / FEWER / fewer:.3f}",
    ]


def ways_of(product: Product, count: int) -> list[tuple[int, Tiling]]:
    """What is timed: as many as are asked for on all SMs, what is chosen first; and what is chosen on fewer."""
    return [*((SMS, tiling) for tiling in ranked(product, SMS)[:count]), (FEWER, ranked(product, FEWER)[0])]


def name_of(tiling: Tiling) -> str:
    return f"{tiling.rows}x{tiling.columns}/{tiling.cluster}/{tiling.parts}/{tiling.split}"


def shape_of(text: str) -> tuple[int, int]:
    k, n = map(int, text.split("x"))
    return k, n


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "time"))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", FLOAT8))
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=SHAPES, metavar="KxN")
    parser.add_argument("--a-not-deep", action="store_true", help="A as rows lie for gradients of weights: [K, M]")
    parser.add_argument("--b-not-deep", action="store_true", help="B as weights lie on the way back: [K, N]")
    parser.add_argument("--ways", type=int, default=4, help="ways to cut each product, the most promising ones")
    parser.add_argument("--time-budget", type=float, default=40.0, help="seconds after which nothing is begun")
    return parser.parse_args()


def main() -> int:
    options = options_of()
    deadline = time.monotonic() + options.time_budget
    if options.what == "check":
        fields = [(replace(Product(8, 8, 8), **form), tiling) for _, form, tiling in kernels()]  # type: ignore[arg-type]
        build_ahead(fields)
        return int(check(deadline) > 0)
    sizes = [(8192, 8192, 8192), *((rows, n, k) for rows in options.rows for k, n in options.shapes)]
    result = "bfloat16" if options.dtype == FLOAT8 else options.dtype
    deep = not options.a_not_deep, not options.b_not_deep
    products = [Product(*size, options.dtype, result, *deep) for size in sizes]
    build_ahead((product, tiling) for product in products for _, tiling in ways_of(product, options.ways))
    lines: list[list[str]] = []
    for product in products:
        if time.monotonic() > deadline:
            print(f"time was up before M = {product.rows}, K = {product.depth}, N = {product.columns}")
            break
        lines.append(row_of(product, options.ways))
        print("  ".join(lines[-1]), flush=True)
    ours = ["chosen", "us", "of cuBLAS", "best", "of best", str(FEWER)]
    print(grid(["M x K x N", "cuBLAS us", "TFLOP/s", *ours], lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
