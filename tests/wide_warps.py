"""Turns the text of a way back from keys into a library whose warps have 32 threads, as on the GPU, on the processor.

What differs from the host build: threads of warps and blocks take turns, from barrier to barrier and in another order
each run, runs of bytes are moved by the GPU's headers, and words of them only where they are aligned. So what only a
GPU runs, who asks whom in a warp and which words of a row a thread has, is run here. Assumes a Plan of what comes back.
Nothing waits for another rank: one body of a phase is run, rank after rank.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from commdsl.build import host
from commdsl.build.emit import emit
from commdsl.build.headers import include_dir
from commdsl.machine.config import from_environment
from commdsl.program.plan import Plan

THREADS = 64  # two warps

NARROW = (
    "COMMDSL_FN u32 thread() { return 0; }\n",
    "COMMDSL_FN u32 num_threads() { return 1; }\n",
    "COMMDSL_FN u32 warp() { return 0; }\n",
    "COMMDSL_FN constexpr u32 num_warps() { return 1; }\n",
    "COMMDSL_FN u32 thread_of_warp() { return 0; }\n",
    "constexpr u32 kWarp = 1;\n",
    "COMMDSL_FN void warp_barrier() {}\n",
    "struct Equals {\n  u32 before, count;\n};\n",
    "COMMDSL_FN Equals among_equals(u32) { return {0, 1}; }\n",
    "COMMDSL_FN u32 largest_among(u32 value, u32) { return value; }\n",
    "COMMDSL_FN u32 of_first_thread(u32 value) { return value; }\n",
    "COMMDSL_FN void block_barrier() {}\n",
)
"""What the host's vocabulary says of a warp."""

WIDE = """
struct WideBarrier {
  u32 come;
  u64 round;
};
struct WideThread {
  ucontext_t context;
  bool done;
  char stack[1 << 17];
};
inline u32 own_thread = 0, wide_count = 0, wide_stride = 1;
inline WideThread wide_threads[COMMDSL_THREADS];
inline ucontext_t wide_caller;
inline void (*wide_body)(const void*);
inline const void* wide_given;
inline void wide_next() {
  ucontext_t& own = wide_threads[own_thread].context;
  do {
    own_thread = (own_thread + wide_stride) % wide_count;
  } while (wide_threads[own_thread].done);
  swapcontext(&own, &wide_threads[own_thread].context);
}
inline void wide_wait(WideBarrier& barrier, u32 threads) {
  if (++barrier.come == threads) {
    barrier.come = 0;
    ++barrier.round;
    return;
  }
  for (const u64 round = barrier.round; barrier.round == round;) wide_next();
}
inline void wide_enter() {
  wide_body(wide_given);
  wide_threads[own_thread].done = true;
}
// Runs a body on so many threads, as many as a power of two: an odd stride comes to all of them.
inline void wide_all(u32 threads, void (*body)(const void*), const void* given) {
  wide_count = threads, wide_body = body, wide_given = given, wide_stride += 2;
  for (u32 at = 0; at < threads; ++at) {
    WideThread& one = wide_threads[at];
    getcontext(&one.context);
    one.done = false;
    one.context.uc_stack.ss_sp = one.stack;
    one.context.uc_stack.ss_size = sizeof one.stack;
    one.context.uc_link = &wide_caller;  // where it goes when it is done
    makecontext(&one.context, wide_enter, 0);
  }
  for (u32 at = 0; at < threads; ++at) {
    while (!wide_threads[at].done) {  // it comes back whenever any of them is done
      own_thread = at;
      swapcontext(&wide_caller, &wide_threads[at].context);
    }
  }
}
COMMDSL_FN u32 thread() { return own_thread; }
COMMDSL_FN constexpr u32 num_threads() { return COMMDSL_THREADS; }
COMMDSL_FN u32 warp() { return own_thread / 32; }
COMMDSL_FN constexpr u32 num_warps() { return COMMDSL_THREADS / 32; }
COMMDSL_FN u32 thread_of_warp() { return own_thread % 32; }
constexpr u32 kWarp = 32;
struct WideWarp {
  WideBarrier barrier;
  u32 value[32];
};
inline WideWarp wide_warps[COMMDSL_THREADS / 32];
inline WideBarrier wide_block;
COMMDSL_FN void warp_barrier() { wide_wait(wide_warps[warp()].barrier, 32); }
struct Equals {
  u32 before, count;
};
COMMDSL_FN Equals among_equals(u32 value) {
  WideWarp& own = wide_warps[warp()];
  own.value[thread_of_warp()] = value;
  warp_barrier();
  Equals found{0, 0};
  for (u32 other = 0; other < 32; ++other) {
    if (own.value[other] != value) continue;
    ++found.count;
    if (other < thread_of_warp()) ++found.before;
  }
  warp_barrier();
  return found;
}
COMMDSL_FN u32 largest_among(u32 value, u32 threads) {
  WideWarp& own = wide_warps[warp()];
  own.value[thread_of_warp()] = value;
  warp_barrier();
  u32 largest = 0;
  for (u32 i = 0, first = thread_of_warp() / threads * threads; i < threads; ++i) {
    if (own.value[first + i] > largest) largest = own.value[first + i];
  }
  warp_barrier();
  return largest;
}
COMMDSL_FN u32 of_first_thread(u32 value) {
  WideWarp& own = wide_warps[warp()];
  if (thread_of_warp() == 0) own.value[0] = value;
  warp_barrier();
  const u32 found = own.value[0];
  warp_barrier();
  return found;
}
COMMDSL_FN void block_barrier() { wide_wait(wide_block, COMMDSL_THREADS); }
COMMDSL_FN u32 __funnelshift_r(u32 low, u32 high, u32 bits) {
  return static_cast<u32>((static_cast<u64>(high) << 32 | low) >> (bits & 31));
}
COMMDSL_FN bool block_any(bool value)"""

ENTRY = """
#undef COMMDSL_KERNEL
#define COMMDSL_KERNEL(name, plan)                                                                         \\
  static commdsl::Returning<plan> wide_known;                                                              \\
  struct WideJob {                                                                                         \\
    const plan::Args* args;                                                                                \\
    int phase;                                                                                             \\
    const unsigned long long* rows;                                                                        \\
  };                                                                                                       \\
  static void wide_thread(const void* given) {                                                             \\
    const WideJob& own = *static_cast<const WideJob*>(given);                                              \\
    for (commdsl::i32 lane = 0; lane < own.args->active_lanes; ++lane) {                                   \\
      const commdsl::Call<plan> here{*own.args, lane, 1, nullptr};                                         \\
      commdsl::prepare(here, wide_known);                                                                  \\
      for (int peer = 0; peer < plan::kNumRanks; ++peer) wide_known.learn(here, peer, 1, own.rows[peer]);  \\
      commdsl::block_barrier();                                                                            \\
      for (commdsl::i32 wave = 0; wave < WAVES; ++wave) {                                                  \\
        if (own.phase == 0) commdsl::push_WAY(here, wide_known GIVEN);                                     \\
        if (own.phase == 1) commdsl::finish_WAY(here, wide_known GIVEN);                                   \\
      }                                                                                                    \\
      if (own.phase == 2) { BETWEEN }                                                                      \\
      commdsl::block_barrier();                                                                            \\
    }                                                                                                      \\
  }                                                                                                        \\
  extern "C" int wide_run(const plan::Args* args, int phase, const unsigned long long* rows) {             \\
    const WideJob job{args, phase, rows};                                                                  \\
    commdsl::wide_all(COMMDSL_THREADS, wide_thread, &job);                                                 \\
    return wide_known.bad == 0 && wide_known.apart == 0;                                                   \\
  }
"""

ADD_UP = "commdsl::add_up(here, wide_known);"
"""Where sums are added up on their way."""


FLOAT8 = """
#undef COMMDSL_KERNEL
#define COMMDSL_KERNEL(name, plan)                                                                         \\
  struct WideRow {                                                                                         \\
    unsigned long long to[2], scales[2], element, columns, pieces;                                         \\
    const char* source;                                                                                    \\
  };                                                                                                       \\
  static void wide_thread(const void* given) {                                                             \\
    const WideRow& row = *static_cast<const WideRow*>(given);                                              \\
    const commdsl::u64 to[2] = {row.to[0], row.to[1]};                                                     \\
    const auto scales = [&](commdsl::u32 i) { return reinterpret_cast<char*>(row.scales[i]); };            \\
    constexpr commdsl::u32 stretch = commdsl::stretch_of<plan>(0);                                         \\
    for (unsigned piece = 0; piece < row.pieces; ++piece) {                                                \\
      const auto part = commdsl::part_of_stretches(row.columns, stretch, piece, row.pieces);               \\
      commdsl::quantise<stretch>(row.element, to, 2, scales, row.source, part.begin, part.begin + part.bytes); \\
    }                                                                                                      \\
  }                                                                                                        \\
  extern "C" void wide_row(const WideRow* row) { commdsl::wide_all(32, wide_thread, row); }
"""


def entry(way: str, between: str) -> str:
    """What runs a body; of sums all waves, one after another."""
    waves, given = ("commdsl::num_waves(wide_known)", ", wave") if way == "sums" else ("1", "")
    words = {"WAY": way, "BETWEEN": between, "WAVES": waves, "GIVEN": given}
    return re.sub("|".join(words), lambda found: words[found[0]], ENTRY)


def headers(folder: Path, way: str, between: str) -> Path:
    """A folder in which the GPU's vocabulary is the host's with wide warps."""
    root = folder / way
    shutil.copytree(include_dir(), root)
    text = (root / "commdsl" / "host.hpp").read_text("utf-8")
    for line in NARROW:
        assert line in text, line
        text = text.replace(line, "")
    assert text.count("COMMDSL_FN bool block_any(bool value)") == 1
    text = text.replace("COMMDSL_FN bool block_any(bool value)", WIDE)
    for word in ("&word, p, sizeof(Word)", "p, &word, sizeof(Word)"):  # the GPU faults where a word is not aligned
        at = f"{{ memcpy({word}); }}"
        assert at in text, at
        text = text.replace(at, f"{{ if (reinterpret_cast<u64>(p) % sizeof(Word) != 0) abort(); memcpy({word}); }}")
    (root / "commdsl" / "device.cuh").write_text(
        "#include <ucontext.h>\n" + text + (FLOAT8 if way == "float8" else entry(way, between)), "utf-8"
    )
    return root


def built(plan: Plan, dtype: str, folder: Path) -> Callable[[bytes, int, Sequence[int]], bool]:
    """The bodies of a way back, 0 and 1, and 2 between them where sums are added up on their way, of a rank whose
    arguments are given, and how many rows each rank has; whether none was refused.
    """
    between = ADD_UP if plan.push_back.crossing is not None else ""
    library = linked(plan, dtype, folder, plan.push_back.each.called, between)

    def run(arguments: bytes, phase: int, rows: Sequence[int]) -> bool:
        held = ctypes.create_string_buffer(arguments, len(arguments))
        return bool(library.wide_run(held, phase, (ctypes.c_uint64 * len(rows))(*rows)))

    return run


def quantising(plan: Plan, folder: Path) -> Callable[[bytes], None]:
    """What a warp does with one row of the Plan's first tensor: to two places, with scales elsewhere, in pieces."""
    library = linked(plan, "", folder, "float8")
    return lambda row: library.wide_row(ctypes.create_string_buffer(row, len(row)))


def linked(plan: Plan, dtype: str, folder: Path, way: str, between: str = "") -> ctypes.CDLL:
    text = re.sub(r"(#define COMMDSL_THREADS) \d+", rf"\1 {THREADS}", emit(plan).text)
    name = hashlib.sha256(f"{text} {dtype}".encode()).hexdigest()[:16]
    source, made = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(text, "utf-8")
    root = folder / way if (folder / way).exists() else headers(folder, way, between)
    macros = ["-D__CUDACC__", *([f"-DCOMMDSL_DTYPE={dtype}"] if dtype else [])]
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-ffp-contract=off", "-pthread", *macros, f"-I{root}"]
    compiler = host.find_compiler(from_environment()).command
    subprocess.run([*compiler, *flags, str(source), "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))
