"""Turns what a runner does on this rank into its end: the table and the verdict last, an exit code, and no hang.

Assumes torchrun, with this folder, tests/ and the checkout on the path. Does not know what is called, nor what is
right.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from transports import TRANSPORT_HELP, TRANSPORTS, choose_transport

from benchmarks.report import grid


@dataclass
class Run:
    """What all that a rank does needs to know."""

    rank: int
    ranks: int
    device: torch.device
    control: Any  # gloo: what ranks tell each other
    options: argparse.Namespace
    place: str = field(default="set-up", kw_only=True)  # what is under way
    is_hung: bool = field(default=False, kw_only=True)  # the GPU is not asked any more

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def where(self) -> str:
        device = torch.cuda.get_device_name() if self.on_gpu else "processors"
        return f"{self.ranks} x {device}, torch {torch.__version__}, seed {self.options.seed}"

    def everyone(self, value: object) -> list[Any]:
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value, group=self.control)
        return found

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


R = TypeVar("R", bound=Run)


def parser_of(doc: str | None, calls: int, of: str, seconds: float) -> argparse.ArgumentParser:
    """What every runner is told."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=calls, help=of)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--time-budget", type=float, default=seconds, help="seconds")
    return parser


def joined(
    options: argparse.Namespace, *, on_gpu: bool = True, backend: str = "gloo"
) -> tuple[int, int, torch.device, Any, argparse.Namespace]:
    """What a Run begins with, once this rank has met the others."""
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())  # ranks may share one
        torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device if "nccl" in backend else None)
    return dist.get_rank(), dist.get_world_size(), device, dist.new_group(backend="gloo"), options


def end_of(
    make: Callable[[], R],
    work: Callable[[R], tuple[bool, str]],
    table: Callable[[R], str],
    seconds: float,
    grace: float,
) -> NoReturn:
    """Ends this process, after so many seconds at the latest. `work` says whether all was right, and in words what was
    done; rank 0 prints them behind the table.
    """
    if "RANK" not in os.environ:
        sys.exit("start it with torchrun: one process per GPU")
    runs: list[R] = []

    def end(code: int, why: str) -> NoReturn:
        if runs and runs[0].rank == 0:
            print(f"\n{table(runs[0])}\n{why}", flush=True)
        elif code:
            time.sleep(5)  # torchrun ends all when one has failed: rank 0 prints first
        sys.stdout.flush()
        os._exit(code)  # NVSHMEM's own end is collective: it must not wait for a rank that failed

    def give_up() -> None:
        faulthandler.dump_traceback()
        place = runs[0].place if runs else "set-up"
        for run in runs:
            run.is_hung = True
            print(f"rank {run.rank}: {place}", file=sys.stderr, flush=True)
        end(1, f"not over after {seconds:.0f} s, in: {place}")

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + grace, exit=True)
    try:
        runs.append(make())
        is_right, why = work(runs[0])
    except PartFailedError as error:
        end(1, f"FAILED on {runs[0].where}\n{error}")
    except BaseException:
        traceback.print_exc()
        end(1, f"an exception ended the run, in: {runs[0].place if runs else 'set-up'}")
    end(int(not is_right), why)


# --- runs of parts ----------------------------------------------------------------------------------------------------


LATE = "no time left"


class PartFailedError(Exception):
    """Ranks may stand at different calls: what follows would say nothing."""


@dataclass
class Part:
    """A line of the table."""

    name: str
    what: str
    calls: int = 0
    wrong: int = 0  # on any rank
    seconds: float = 0.0
    problem: str = ""
    differs: str = ""  # what was wrong first, on a rank


@dataclass(frozen=True, eq=False)
class Compared:
    """Of two tensors whether they differ, and what stands where they do first: on the device, no host has waited."""

    what: str
    shape: torch.Size
    differs: Any
    at: Any
    first: dict[str, Any]

    def __str__(self) -> str:
        at = tuple(int(one) for one in torch.unravel_index(self.at, self.shape))
        return f"{self.what} {list(at)}: " + ", ".join(f"{name} {_shown(one)}" for name, one in self.first.items())


def _shown(number: Any) -> str:
    """With the bits of what is no integer."""
    if not number.is_floating_point():
        return str(number.item())
    size = number.element_size()
    bits = number.view((torch.uint8, torch.int16, torch.int32, torch.int64)[size.bit_length() - 1])
    return f"{number.item():.9g} (0x{bits.item() & (1 << 8 * size) - 1:0{2 * size}x})"


@dataclass
class Parts(Run):
    """A run of one part after another."""

    parts: list[Part] = field(default_factory=list, kw_only=True)
    compared: list[Compared] = field(default_factory=list, kw_only=True)  # in the part under way

    def same(self, what: str, found: Any, wanted: Any, near: Any = None, **beside: Any) -> Any:
        """Whether a tensor is as wanted, to the bit or as `near`, and no NaN: a bool on the device, which the host does
        not wait for. Where it is not, the part's line says what differs first, and what of `beside`, of the same
        shape, stands there.
        """
        wanted = wanted if isinstance(wanted, torch.Tensor) else torch.full_like(found, wanted)
        assert found.shape == wanted.shape, f"{what}: {tuple(found.shape)}, and {tuple(wanted.shape)} is wanted"
        if not found.numel():
            return torch.ones((), dtype=torch.bool, device=found.device)
        differs = found != wanted if near is None else ~((found.double() - wanted.double()).abs() <= near)
        at = differs.flatten().byte().argmax()
        first = {"is": found, "must be": wanted, **beside}
        first = {name: one.flatten().take(at) for name, one in first.items()}
        self.compared.append(Compared(what, found.shape, differs.any(), at, first))
        return ~self.compared[-1].differs

    def first_difference(self) -> str:
        """What was compared since the part began and differs: of each kind the first. Waits for the device."""
        found: dict[str, Compared] = {}
        for one in self.compared:
            if one.what not in found and one.differs.item():
                found[one.what] = one
        return "; ".join(map(str, found.values()))

    def attempt(self, part: Part, work: Callable[[], int]) -> None:
        """Does a part on all ranks; `work` returns how many calls were wrong here."""
        self.place, started, problem, wrong = f"{part.name} {part.what}", time.monotonic(), "", 0
        differs = ""
        self.compared.clear()
        try:
            wrong = work()
            self.wait()
            differs = self.first_difference() if wrong else ""
        except Exception:
            problem = traceback.format_exc(limit=-5)
        found = self.everyone((wrong, problem, differs))
        part.wrong = max(count for count, _, _ in found)
        part.problem = next((f"rank {rank}: {text}" for rank, (_, text, _) in enumerate(found) if text), "")
        part.differs = next((f"rank {rank}: {text}" for rank, (_, _, text) in enumerate(found) if text), "")
        part.seconds = time.monotonic() - started
        self.parts.append(part)
        if self.rank == 0:
            bad = part.problem or (f"{part.wrong} WRONG, {part.differs}" if part.wrong else "ok")
            print(f"{part.name}: {part.what}: {bad}, {part.seconds:.1f} s", flush=True)
        if part.problem:
            raise PartFailedError(part.problem)

    def attempt_in_time(self, part: Part, work: Callable[[], int]) -> None:
        """As `attempt`, unless time is up on some rank, which the verdict says."""
        if any(self.everyone(time.monotonic() > self.options.deadline)):
            part.problem = LATE
            self.parts.append(part)
            return
        self.attempt(part, work)


P = TypeVar("P", bound=Parts)


def part_parser_of(doc: str | None, calls: int, seconds: float, parts: Sequence[str]) -> argparse.ArgumentParser:
    parser = parser_of(doc, calls, "of the storm", seconds)
    parser.add_argument("--replays", type=int, default=60)
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--transport", choices=list(TRANSPORTS), default="peer", help=TRANSPORT_HELP)
    return parser


def end_of_parts(
    kind: type[P],
    options: argparse.Namespace,
    parts: Mapping[str, Callable[[P], None]],
    grace: float,
    *,
    on_gpu: bool,
) -> NoReturn:
    """Does the parts that the options name, each in its share of the time that is left, on GPUs with NCCL beside gloo,
    which ranks that share a GPU cannot have.
    """
    end = time.monotonic() + options.time_budget - grace

    def make() -> P:
        ranks = int(os.environ["WORLD_SIZE"])
        choose_transport(options.transport, ranks)
        with_nccl = on_gpu and ranks <= torch.cuda.device_count()
        return kind(*joined(options, on_gpu=on_gpu, backend="cpu:gloo,cuda:nccl" if with_nccl else "gloo"))

    def work(run: P) -> tuple[bool, str]:
        for number, name in enumerate(options.only):
            now = time.monotonic()
            options.deadline = now + (end - now) / (len(options.only) - number)
            parts[name](run)
        calls = sum(part.calls for part in run.parts if part.problem != LATE)
        wrong = sum(part.wrong for part in run.parts)
        late = sum(part.problem == LATE for part in run.parts)
        said = f"{calls} calls, {wrong} wrong on {run.where}, transport {options.transport}"
        return not wrong and not late, said + (f"; {LATE} for {late} of {len(run.parts)} parts" if late else "")

    end_of(make, work, _table, options.time_budget, grace)


def run_parts(
    kind: type[P],
    parts: Mapping[str, Callable[[P], None]],
    doc: str | None,
    *,
    calls: int,
    seconds: float,
    grace: float,
) -> NoReturn:
    """All of a runner that is told nothing of its own. `calls`: of the storm."""
    parser = part_parser_of(doc, calls, seconds, list(parts))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    end_of_parts(kind, options, parts, grace, on_gpu=options.device == "cuda")


def _table(run: Parts) -> str:
    lines = []
    for part in run.parts:
        end = LATE if part.problem == LATE else "failed" if part.problem else ""
        lines.append([part.name, part.what, str(part.calls), str(part.wrong), f"{part.seconds:.1f}", end])
    return grid(["part", "what", "calls", "wrong", "s", ""], lines)
