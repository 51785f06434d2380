// What a role computes beside the lanes that move: the tiles of every lane, round by round, each of which raises a flag for it.
// Assumes kernel.cuh, and tables in which the programs of tiles stand behind those of moves. Decides nothing: which function,
// tensor and flag is in the tables; a tile is what the lane moves of a chunk in the round.
#pragma once

#include "commdsl/kernel.cuh"

namespace commdsl {

#ifdef __CUDACC__

// From byte `at`, a thread's own offset in, while `unroll` words a stride apart are left to it; returns where it stopped.
template <class Element, class Function, class Word, u32 unroll>
COMMDSL_FN u64 apply_words(char* to, const char* one, const char* other, u64 at, u64 bytes) {
  const u64 step = threads_of_block() * sizeof(Word);
  for (; at + (unroll - 1) * step + sizeof(Word) <= bytes; at += unroll * step) {
    Word first[unroll], second[unroll];
#pragma unroll
    for (u32 j = 0; j < unroll; ++j) load(first[j], one + at + j * step);
#pragma unroll
    for (u32 j = 0; j < unroll; ++j) load(second[j], other + at + j * step);
#pragma unroll
    for (u32 j = 0; j < unroll; ++j) {
      Lanes<Element, Word> made;
      made.take(first[j], true, Function{});
      made.take(second[j], false, Function{});
      store(to + at + j * step, made.narrow());
    }
  }
  return at;
}

// Of two tensors to one; what is not aligned alike, or lies past the last whole vector, element by element.
template <class Plan, class Function>
COMMDSL_FN void apply(const Operands<Plan>& operands) {
  using Element = typename Plan::Element;
  using Storage = typename Element::Storage;
  using Word = typename WordOf<sizeof(Storage)>::Type;
  char* to = operands.dest(0);
  const char *one = operands.source(0), *other = operands.source(1);
  const u64 bits = reinterpret_cast<u64>(to) | reinterpret_cast<u64>(one) | reinterpret_cast<u64>(other);
  const u64 bytes = operands.slice.bytes;
  u64 done = 0;
  if (common_alignment(bits) == 16) {
    u64 at = apply_words<Element, Function, Vector16, 4>(to, one, other, thread_of_block() * 16, bytes);
    at = apply_words<Element, Function, Vector16, 2>(to, one, other, at, bytes);  // a tile is soon too small for four
    apply_words<Element, Function, Vector16, 1>(to, one, other, at, bytes);
    done = bytes / 16 * 16;
  }
  apply_words<Element, Function, Word, 1>(to, one, other, done + thread_of_block() * sizeof(Storage), bytes);
}

#else

template <class Plan, class Function>
COMMDSL_FN void apply(const Operands<Plan>& operands) {
  combine(known<Function>(operands));
}

#endif

// The flag says to the lane of this rank that the tile is there: nobody else reads it.
template <class Plan>
COMMDSL_FN void raise_own(const Position<Plan>& here, const Signal signal) {
  const i32 rank = rank_of<Plan>(here.args);
  const u64 value = here.round * static_cast<u64>(Plan::signals_per_round(signal.peer, rank)) + static_cast<u64>(signal.ordinal);
  store_release_own(reinterpret_cast<u64*>(here.args.heap[rank] + flag_offset<Plan>(here.lane, signal.peer)), value);
}

template <class Plan>
COMMDSL_FN void run_tile(const Position<Plan>& here, i32 index) {
  const Op& op = Plan::op(index);
  if (op.barrier) whole_block_barrier();
  const Operands<Plan> operands{here, index, slice_of(here, index)};
  if (operands.slice.bytes > 0) {
    if (op.kind == kAdd) {
      apply<Plan, sum>(operands);
    } else {
      apply<Plan, prod>(operands);
    }
  }
  if (op.num_signals == 0) return;
  whole_block_barrier();
  if (thread_of_block() > 0) return;
  for (i32 at = 0; at < op.num_signals; ++at) raise_own(here, Plan::signal(op.first_signal + at));
}

// The rounds of a lane whose tiles are done are counted beside those it has moved: each has one writer.
template <class Plan>
COMMDSL_FN u64* tiles_done(const ArgsOf<Plan>& args, i32 lane) {
  return reinterpret_cast<u64*>(args.heap[rank_of<Plan>(args)] + state_offset<Plan>(lane)) + 3;
}

// A block serves lanes `block`, `block` + `blocks`, ...: the first tiles of all their chunks before the second ones.
template <class Plan>
COMMDSL_FN void run_tiles(const ArgsOf<Plan>& args, i32 block, i32 blocks) {
  const i32 program = rank_of<Plan>(args) + Plan::kNumRanks;
  const i32 first = Plan::begin(program), last = Plan::begin(program + 1);
  for (i32 round = 0; round < args.rounds; ++round) {
    for (i32 lane = block; lane < args.active_lanes; lane += blocks) {
      const u64 number = load_relaxed(tiles_done<Plan>(args, lane)) + static_cast<u64>(round);
      const Position<Plan> here = position_of<Plan>(args, lane, round, number);
      // Behind those of the lanes that move.
      const u64 moved = intervals_of<Plan>(args, args.active_lanes, rank_of<Plan>(args));
      const u64 place = moved + intervals_of<Plan>(args, lane, program) + static_cast<u64>(round * (last - first));
      Stamps stamps(args, place, args.active_lanes + block, thread_of_block() == 0);
      for (i32 index = first; index < last; ++index) {
        stamps.begin();
        run_tile(here, index);
        stamps.end();
      }
    }
  }
  whole_block_barrier();  // every thread has read the counters
  if (thread_of_block() > 0) return;
  for (i32 lane = block; lane < args.active_lanes; lane += blocks) {
    u64* done = tiles_done<Plan>(args, lane);
    store_relaxed(done, load_relaxed(done) + static_cast<u64>(args.rounds));
  }
}

}  // namespace commdsl
