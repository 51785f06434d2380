// The table interpreter: one lane of one rank runs its operations in order, round after round.
// Assumes `Plan` with the constants the template prints, and tables that passed commdsl's proofs. Decides nothing: which
// operation, operand, flag or class comes when is in the tables.
#pragma once

#include "commdsl/types.cuh"
#ifdef __CUDACC__
#include "commdsl/device.cuh"
#else
#include "commdsl/host.hpp"
#endif
#include "commdsl/elements.cuh"

namespace commdsl {

// Memory of this rank (`at` is an address) or of a rank's heap (`at` is an offset there).
struct Place {
  bool symmetric;
  i32 rank;
  u64 at;
};

}  // namespace commdsl

#include "commdsl/transport.cuh"

namespace commdsl {

template <class Plan>
using ArgsOf = Args<Plan::kNumRanks, Plan::kNumTensors>;

// Where one lane stands: what the addresses and flag values of an operation depend on.
template <class Plan>
struct Position {
  const ArgsOf<Plan>& args;
  const Tables& tables;
  i32 lane;
  u64 round;         // counted through all calls
  u64 round_offset;  // bytes of the lane's slice that earlier rounds of this call moved
  u64 cells;         // offset of the lane's part of the first cell in this round's copy of the cells
};

// The part of a chunk that the lane moves in this round: bytes [first, first + bytes) of its block.
struct Slice {
  u64 first, bytes;
};

COMMDSL_FN u64 smaller(u64 a, u64 b) { return a < b ? a : b; }

template <class Plan>
COMMDSL_CALL Slice slice_of(const Position<Plan>& here, i32 cut, i32 piece) {
  const u64 block = here.args.block_bytes;
  const u64 units = (block + 15) / 16;
  const u64 first = smaller(16 * (units * static_cast<u64>(piece) / static_cast<u64>(cut)), block);
  const u64 last = smaller(16 * (units * static_cast<u64>(piece + 1) / static_cast<u64>(cut)), block);
  const u64 chunk = last - first;
  const u64 lanes = static_cast<u64>(here.args.active_lanes);
  const u64 share = 16 * (((chunk + 15) / 16 + lanes - 1) / lanes);
  const u64 begin = smaller(static_cast<u64>(here.lane) * share + here.round_offset, chunk);
  const u64 end = smaller((static_cast<u64>(here.lane) + 1) * share, chunk);
  const u64 left = end > begin ? end - begin : 0;
  return {first + begin, smaller(left, Plan::kTileBytes)};
}

template <class Plan>
COMMDSL_FN Place place_of(const Position<Plan>& here, const Location& location, i32 cut, const Slice& slice) {
  if (location.space == kCell) {
    const u64 index = static_cast<u64>(location.index);
    return {true, location.rank, here.cells + index * (Plan::kLanes * Plan::kTileBytes)};
  }
  const u64 block = static_cast<u64>(location.index / cut);
  return {false, location.rank, here.args.tensors[location.space] + block * here.args.block_bytes + slice.first};
}

template <class Plan>
COMMDSL_FN u64 flag_offset(i32 lane, i32 from) {
  return (static_cast<u64>(lane) * Plan::kNumRanks + static_cast<u64>(from)) * kFlagStride;
}

template <class Plan>
COMMDSL_FN u64 state_offset(i32 lane) {
  return Plan::kFlagsBytes + static_cast<u64>(lane) * kFlagStride;
}

// Flags only grow and may pass 2^64: they are compared by their distance.
COMMDSL_FN bool reached(u64 flag, u64 expected) { return static_cast<i64>(flag - expected) >= 0; }

template <class Plan>
COMMDSL_FN u64 cells_offset(i32 lane, u64 round) {
  const u64 slots = round % Plan::kRotation * Plan::kNumCells * Plan::kLanes;
  return Plan::kCellsOffset + (slots + static_cast<u64>(lane)) * Plan::kTileBytes;
}

// The record of the first lane to give up; the ranks that have not entered the round are looked up for it.
template <class Plan>
COMMDSL_CALL void report(const Position<Plan>& here, i32 op, i32 peer, u64 expected, u64 seen) {
  ErrorRecord* record = reinterpret_cast<ErrorRecord*>(here.args.error);
  if (!claim(&record->claim)) return;
  u64 missing = 0;
  for (i32 rank = 0; rank < Plan::kNumRanks && rank < 64; ++rank) {
    const u64 entered = peek(here.args, rank, state_offset<Plan>(here.lane) + sizeof(u64));
    if (!reached(entered, here.round + 1)) missing |= u64{1} << rank;
  }
  record->rank = here.args.rank;
  record->lane = here.lane;
  record->op = op;
  record->peer = peer;
  record->expected = expected;
  record->seen = seen;
  record->round = here.round;
  record->missing = missing;
  store_release(&record->code, kTimedOut);
}

// True when the wait is over, false when the rank gives up: this lane timed out, or another one of the rank did.
template <class Plan>
COMMDSL_FN bool await(const Position<Plan>& here, i32 op, const Wait& wait) {
  const i32 rank = here.args.rank;
  const u64 per_round = static_cast<u64>(here.tables.signals_per_round[wait.peer * Plan::kNumRanks + rank]);
  const u64 expected = (here.round - static_cast<u64>(wait.rounds_back)) * per_round + static_cast<u64>(wait.ordinal);
  const u64* flag = reinterpret_cast<const u64*>(here.args.heap[rank] + flag_offset<Plan>(here.lane, wait.peer));
  u64 seen = load_acquire(flag);
  if (reached(seen, expected)) return acquired(flag, expected);
  const u64 start = now_ns();
  const ErrorRecord* record = reinterpret_cast<const ErrorRecord*>(here.args.error);
  for (u32 polls = 1;; ++polls) {
    relax(polls);
    seen = load_acquire(flag);
    if (reached(seen, expected)) return acquired(flag, expected);
    if (polls % kPollsPerCheck != 0) continue;
    if (load_relaxed(&record->code) != 0) return false;
    if (now_ns() - start < here.args.timeout_ns) continue;
    report(here, op, wait.peer, expected, seen);
    return false;
  }
}

// The waits of one operation are polled by different threads at once.
template <class Plan>
COMMDSL_FN bool await_all(const Position<Plan>& here, i32 index, const Op& op) {
  bool gave_up = false;
  for (u32 i = thread(); i < static_cast<u32>(op.num_waits) && !gave_up; i += num_threads()) {
    gave_up = !await(here, index, here.tables.waits[op.first_wait + static_cast<i32>(i)]);
  }
  return !block_any(gave_up);
}

template <class Plan>
struct SourcesOf {
  const Position<Plan>& here;
  const Op& op;
  const Slice& slice;
  i32 count;

  COMMDSL_CALL const char* address(i32 index) const {
    return reach(here.args, place_of(here, here.tables.sources[op.first_source + index], op.cut, slice));
  }
};

template <class Plan>
COMMDSL_FN void run_body(const Position<Plan>& here, const Op& op) {
  const Slice slice = slice_of(here, op.cut, op.piece);
  if (slice.bytes == 0) return;
  const Place dest = place_of(here, op.dest, op.cut, slice);
  const Place source = place_of(here, here.tables.sources[op.first_source], op.cut, slice);
  if (op.kind == kCopy) {
    transfer(here.args, dest, source, slice.bytes);
    return;
  }
  if constexpr (Plan::kHasReduction) {
    static_assert(kReachesPeers || !Plan::kReducesRemotely, "this transport reduces local operands only");
    if (op.kind == kReduce) {
      const SourcesOf<Plan> sources{here, op, slice, op.num_sources};
      reduce<typename Plan::Element, typename Plan::Operation>(reach(here.args, dest), sources, slice.bytes);
    } else if (here.args.flags & kFlagAverage) {
      scale<typename Plan::Element>(reach(here.args, dest), reach(here.args, source), slice.bytes, Plan::kNumRanks);
    } else if (reach(here.args, dest) != reach(here.args, source)) {
      copy(reach(here.args, dest), reach(here.args, source), slice.bytes);
    }
  }
}

// Only this lane of this rank writes the flag, so its value follows from the round: no read, no atomic addition.
template <class Plan>
COMMDSL_FN void signal_all(const Position<Plan>& here, const Op& op) {
  for (u32 i = thread(); i < static_cast<u32>(op.num_signals); i += num_threads()) {
    const Signal signal = here.tables.signals[op.first_signal + static_cast<i32>(i)];
    const i32 rank = here.args.rank;
    const u64 per_round = static_cast<u64>(here.tables.signals_per_round[rank * Plan::kNumRanks + signal.peer]);
    const u64 value = here.round * per_round + static_cast<u64>(signal.ordinal);
    raise_flag(here.args, signal.peer, flag_offset<Plan>(here.lane, rank), value);
  }
}

template <class Plan>
COMMDSL_FN bool run_op(const Position<Plan>& here, i32 index) {
  const Op op = here.tables.ops[index];
  if (op.num_waits > 0) {
    if (!await_all(here, index, op)) return false;
  } else if (op.barrier) {
    block_barrier();
  }
  run_body(here, op);
  if (op.num_signals > 0) {
    complete(here.args);
    block_barrier();
    signal_all(here, op);
  }
  return true;
}

// A lane that gave up leaves the round counter as it was; the heap is then unfit for another call until it is zeroed.
template <class Plan>
COMMDSL_FN void run_lane(const ArgsOf<Plan>& args, i32 lane, const Tables& all) {
  const Tables tables = stage<Plan>(all, args.rank);
  u64* state = reinterpret_cast<u64*>(args.heap[args.rank] + state_offset<Plan>(lane));
  const u64 before = load_relaxed(&state[0]);
  const i32 first = tables.rank_begin[args.rank];
  const i32 last = tables.rank_begin[args.rank + 1];
  for (i32 round = 0; round < args.rounds; ++round) {
    const u64 number = before + static_cast<u64>(round);
    const Position<Plan> here{args,   tables, lane, number, static_cast<u64>(round) * Plan::kTileBytes,
                              cells_offset<Plan>(lane, number)};
    if (thread() == 0) store_relaxed(&state[1], here.round + 1);
    for (i32 index = first; index < last; ++index) {
      if (!run_op(here, index)) return;
    }
  }
  block_barrier();  // every thread has read the counter
  if (thread() == 0) store_relaxed(&state[0], before + static_cast<u64>(args.rounds));
}

}  // namespace commdsl
