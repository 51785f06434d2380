"""Builds ahead what a GPU machine would compile: Programs and sm_90 cubins of all that is shipped, in one folder.

Needs no GPU. The folder is good for exactly these sources and this NVRTC; there, COMMDSL_CACHE_DIR names it.

    python tests/gpu/prebuild.py --cache .gpu-cache --ranks 2,4,8
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import run_attention
from collectives import KEY_FORMS, by_keys, dispatches, main_case, shipped

from benchmarks.experts_calls import two_nodes
from commdsl import compiler
from commdsl.build import nvrtc
from commdsl.build.emit import defines
from commdsl.build.merge import emitted
from commdsl.machine.config import Config, from_environment
from commdsl.program.memory import Transport
from commdsl.runtime.load import definition
from commdsl.runtime.program import Definition, program

DTYPES = ("float32", "float16", "bfloat16", "int32", "int64")
SUMMED = ("float32", "float16", "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path(".gpu-cache"))
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument(
        "--transports", default="peer,nvshmem", help="programs of both; cubins of peer kernels, and the shim"
    )
    options = parser.parse_args()
    config = replace(from_environment(), cache_dir=options.cache.resolve())
    transports = [Transport(name) for name in options.transports.split(",")]
    started = time.monotonic()
    num_programs = num_cubins = 0
    for ranks in map(int, options.ranks.split(",")):
        for path in shipped():
            case = main_case(path, ranks)
            if case is None:
                continue
            definition = Definition(path, None, tuple(sorted(case.params)), None)
            for transport in transports:
                known = program(definition, ranks, transport, config)
                num_programs += 1
                if transport is Transport.NVSHMEM:
                    continue  # linked in milliseconds there, and each carries a third of a megabyte of NVSHMEM
                for dtype in DTYPES if known.plan.moves.has_reduction else ("bytes",):
                    for op in ("sum", "avg") if "float" in dtype else ("sum",):
                        nvrtc.build(known.emitted, defines(known.plan, dtype, op), config)
                        num_cubins += 1
        if Transport.PEER in transports:
            num_cubins += dispatch_cubins(ranks, config) + attention_cubins(ranks, config)
        print(
            f"{ranks} ranks: {num_programs} programs, {num_cubins} cubins, {time.monotonic() - started:.0f} s",
            flush=True,
        )
    if Transport.NVSHMEM in transports:
        nvrtc.shim(config)
        print(f"the NVSHMEM shim, {time.monotonic() - started:.0f} s", flush=True)


def attention_cubins(ranks: int, config: Config) -> int:
    """Of each launch of what tests/gpu/run_attention.py calls, for each rank; and of what merges: how many."""
    built = set()
    for way, backward in product(run_attention.every_way(ranks), (False, True)):
        name, params, tune = way.asked(backward)
        known = program(definition(name, None, params, None, tune), ranks, Transport.PEER, config)
        for launched, rank in product(known.visits.launched if known.visits else (), range(ranks)):
            macros = defines(launched.plan, "float32", "sum", rank)  # gradients are
            built.add(nvrtc.build(launched.emitted, macros, config))
    for dtype, result, weighs in product(DTYPES[:3], DTYPES[:3], (0, 1)):
        said = {"DTYPE": dtype, "RESULT": result, "ELEMENTS": 4 if dtype == "float32" else 8, "WEIGHS": weighs}
        built.add(nvrtc.build(emitted(), tuple(f"COMMDSL_{key}={value}" for key, value in said.items()), config))
    return len(built)


def dispatch_cubins(ranks: int, config: Config) -> int:
    """Of each dispatch those that move and those that sum, with and without checks: how many."""
    variants = [() if dtype is None else (f"COMMDSL_DTYPE={dtype}",) for dtype in (None, *SUMMED)]
    built = 0
    for (path, name), put in product(dispatches(), ("rows", "packed")):
        emitted = compiler.compile(path, name, ranks, tune={"put": put}).emitted
        for macros in variants:
            for checks in ((), ("COMMDSL_CHECK=1",)):
                nvrtc.build(emitted, (*macros, *checks), config)
                built += 1
    plain = [{"E": keys} for keys in sorted({8 * ranks, 16 * ranks, 32 * ranks, 64, 256, 1024})]
    others = [{"E": a_rank * ranks, "A": aligned} for _, a_rank, aligned in KEY_FORMS]
    for path, name, params in (
        (*one, params) for one in by_keys() for params in (plain if one[1] == "experts" else others)
    ):
        made = compiler.compile(path, name, ranks, params=params)
        for checks in ((), ("COMMDSL_CHECK=1",)):
            nvrtc.build(made.emitted, checks, config)
            nvrtc.build(made.emitted_values, checks, config)
            nvrtc.build(made.emitted_again, checks, config)
            for macros in variants[1:]:
                nvrtc.build(made.emitted_back, (*macros, *checks), config)
            built += len(variants) + 2
    return built + (node_cubins(ranks, config) if ranks % 2 == 0 else 0)


def node_cubins(ranks: int, config: Config) -> int:
    """Of what goes once per node between halves of the ranks, as `run_keys_nodes.py` has it: how many."""
    of = two_nodes(ranks)
    ((name, text),) = of["source"].items()
    files, built = compiler.read_text(text, name, Path()), 0
    for a_rank, aligned, checks in ((8, 1, True), (8, 128, True), (8, 16, True), (16, 8, True), (32, 128, False)):
        made = compiler.compile(files, of["name"], ranks, of["on"], {"E": a_rank * ranks, "A": aligned})
        macros = ("COMMDSL_CHECK=1",) if checks else ()
        sums = [(f"COMMDSL_DTYPE={dtype}",) for dtype in (SUMMED if a_rank == 8 else ("bfloat16",))]
        nvrtc.build(made.emitted, macros, config)
        nvrtc.build(made.emitted_values, macros, config)
        for dtype in sums:
            nvrtc.build(made.emitted_back, (*dtype, *macros), config)
        built += 2 + len(sums)
    return built


if __name__ == "__main__":
    main()
