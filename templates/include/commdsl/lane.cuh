// Where one lane of one rank stands in a call: which bytes of a block it moves in a round, where an operation reads and writes them, for
// which flags it waits, who is told where it waits in vain, and which flags it raises. Assumes `Plan` with the constants the template prints. Moves nothing.
#pragma once

#include "commdsl/types.cuh"
#ifdef __CUDACC__
#include "commdsl/device.cuh"
#else
#include "commdsl/host.hpp"
#endif
#include "commdsl/elements.cuh"
#include "commdsl/transport.cuh"
#include "commdsl/waiting.cuh"
#include "commdsl/agree.cuh"
#include "commdsl/stamps.cuh"

namespace commdsl {

// How data and flag travel: bytes of data, and what they take in a cell.
struct Bulk {
  static constexpr bool kCarriesFlags = false;
};
struct Tma {
  static constexpr bool kCarriesFlags = false;
};
struct Packet {
  static constexpr bool kCarriesFlags = true;
  static constexpr u32 kData = 8, kBytes = 16;
};
struct Line {
  static constexpr bool kCarriesFlags = true;
  static constexpr u32 kData = 120, kBytes = 128;
};

template <class Plan>
using ArgsOf = typename Plan::Args;

// The rank of this kernel: a constant where it was built for one, so that the tables fold into the code.
template <class Plan>
COMMDSL_FN i32 rank_of(const ArgsOf<Plan>& args) {
  return Plan::kRank >= 0 ? Plan::kRank : args.rank;
}

// Where one lane stands: what the addresses and flag values of an operation depend on.
template <class Plan>
struct Position {
  const ArgsOf<Plan>& args;
  i32 lane;
  u64 round;         // counted through all calls
  u64 round_offset;  // bytes of the lane's slice that earlier rounds of this call moved
  u64 tile_bytes;    // the most that this round moves of any slice: the same for this lane on all ranks
  u64 cells;         // offset of the lane's part of the first cell in this round's copy of the cells
};

// The part of a chunk that the lane moves in this round: bytes [first, first + bytes) of its block.
struct Slice {
  u64 first, bytes;
};

COMMDSL_FN u64 smaller(u64 a, u64 b) { return a < b ? a : b; }

// How long the block is that an operation moves.
template <class Plan>
COMMDSL_FN u64 block_of(const ArgsOf<Plan>& args, i32 index) {
  if constexpr (Plan::kHasLengths) {
    return args.lengths[Plan::length(index)];
  } else {
    return args.block_bytes;
  }
}

// Where a block of a tensor begins, from the tensor's first byte on.
template <class Plan>
COMMDSL_FN u64 begin_of(const ArgsOf<Plan>& args, i32 space, i32 block) {
  if constexpr (Plan::kHasLengths) {
    return args.begins[Plan::first_block(space) + block];
  } else {
    return static_cast<u64>(block) * args.block_bytes;
  }
}

// The most a lane owns of a chunk: where blocks have lengths of their own, an equal share of each.
template <class Plan>
COMMDSL_FN u64 share_of(const ArgsOf<Plan>& args, u64 block, i32 cut) {
  if constexpr (Plan::kHasLengths) {
    const u32 units = static_cast<u32>((block + 15) / 16), of = static_cast<u32>(cut);
    const u32 most = units / of + (units % of != 0), lanes = static_cast<u32>(args.active_lanes);
    return 16 * static_cast<u64>(most / lanes + (most % lanes != 0));
  } else {
    return args.share_bytes;
  }
}

template <class Plan>
COMMDSL_FN Slice slice_of(const Position<Plan>& here, i32 index) {
  const i32 cut = Plan::op(index).cut, piece = Plan::op(index).piece;
  const u64 block = block_of<Plan>(here.args, index);
  u64 first = 0, last = block;
  if (cut > 1) {
    // units * piece / cut without 64-bit divisions; the runtime refuses blocks of 2^32 units.
    const u32 units = static_cast<u32>((block + 15) / 16), of = static_cast<u32>(cut), at = static_cast<u32>(piece);
    const u32 whole = units / of, rest = units % of;
    first = smaller(16 * (static_cast<u64>(whole) * at + rest * at / of), block);
    last = smaller(16 * (static_cast<u64>(whole) * (at + 1) + rest * (at + 1) / of), block);
  }
  const u64 share = share_of<Plan>(here.args, block, cut);
  const u64 own = static_cast<u64>(here.lane) * share;
  const u64 begin = smaller(own + smaller(here.round_offset, share), last - first);
  const u64 end = smaller(own + share, last - first);
  return {first + begin, smaller(end - begin, here.tile_bytes)};
}

// Whether a tensor has float32 where what is moved has another type, so that its bytes are more, or fewer.
template <class Plan>
COMMDSL_FN bool is_sum(i32 space) {
  return space != kCell && (Plan::kSums >> space & 1) != 0;
}

template <class Plan>
COMMDSL_FN u64 bytes_of_sum(u64 bytes) {
  return bytes / sizeof(typename Plan::Element::Storage) * sizeof(float);
}

template <class Plan>
COMMDSL_FN Place place_of(const Position<Plan>& here, i32 space, i32 rank, i32 index, const Slice& slice) {
  if (space == kCell) {
    const u64 cell = here.cells + static_cast<u64>(index) * (Plan::kLanes * Plan::kSlotBytes);
    return {true, rank, cell + (Plan::kHasHeads ? kHeadBytes : 0)};
  }
  const u64 behind = begin_of<Plan>(here.args, space, index) + slice.first;
  const u64 at = here.args.tensors[space] + (is_sum<Plan>(space) ? bytes_of_sum<Plan>(behind) : behind);
  if constexpr (Plan::kLands) {
    // A peer's tensor lies as far behind landing[rank] as one's own; a place is counted from heap[rank], modulo 2^64.
    const u64* begin = here.args.landing;
    const i32 own = rank_of<Plan>(here.args);
    if (rank != own) return {true, rank, at - begin[own] + (begin[rank] & ~kFar) - (here.args.heap[rank] & ~kFar)};
  }
  return {false, rank, at};
}

// Where one operation reads and writes in this round.
template <class Plan>
struct Operands {
  Position<Plan> here;
  i32 index;
  Slice slice;

  COMMDSL_FN const Op& op() const { return Plan::op(index); }
  COMMDSL_FN const Source& source_row(i32 source) const { return Plan::source(op().first_source + source); }
  COMMDSL_FN const Location& dest_row(i32 dest) const { return Plan::dest(op().first_dest + dest); }
  COMMDSL_FN Place source_place(i32 source) const {
    const Source row = source_row(source);
    // Data that carries its flag is read where it arrives; its row names the rank that sends it.
    const i32 rank = Plan::Wire::kCarriesFlags ? rank_of<Plan>(here.args) : row.rank;
    return place_of(here, row.space, rank, row.index, slice);
  }
  COMMDSL_FN Place dest_place(i32 dest) const {
    const Location row = dest_row(dest);
    return place_of(here, row.space, row.rank, row.index, slice);
  }
  COMMDSL_FN const char* source(i32 at) const { return reach(here.args, source_place(at)); }
  COMMDSL_FN char* dest(i32 at) const { return reach(here.args, dest_place(at)); }
  // What plain stores cannot reach is null: the transport has put it there.
  COMMDSL_FN char* reachable(i32 at) const {
    const Place place = dest_place(at);
    return !place.symmetric || is_near(here.args, place.rank) ? reach(here.args, place) : nullptr;
  }
};

// The Plan with an operation in place of the call's.
template <class Plan, class Function>
struct Applied : Plan {
  using Operation = Function;
  static constexpr i32 kNamed = 0;
};

template <class Function, class Plan>
COMMDSL_FN Operands<Applied<Plan, Function>> known(const Operands<Plan>& operands) {
  const Position<Plan>& here = operands.here;
  return {{here.args, here.lane, here.round, here.round_offset, here.tile_bytes, here.cells}, operands.index, operands.slice};
}

// `body` with operands of a Plan whose operation is that of the row.
template <class Plan, class Body>
COMMDSL_FN auto by_operation(const Operands<Plan>& operands, const Body& body) {
  const i32 kind = operands.op().kind;
  if constexpr ((Plan::kNamed >> kAdd & 1) != 0) {
    if (kind == kAdd) return body(known<sum>(operands));
  }
  if constexpr ((Plan::kNamed >> kMultiply & 1) != 0) {
    if (kind == kMultiply) return body(known<prod>(operands));
  }
  if constexpr ((Plan::kNamed >> kMax & 1) != 0) {
    if (kind == kMax) return body(known<max>(operands));
  }
  if constexpr ((Plan::kNamed >> kMin & 1) != 0) {
    if (kind == kMin) return body(known<min>(operands));
  }
  return body(operands);
}

template <class Plan>
COMMDSL_FN u64 flag_offset(i32 lane, i32 from) {
  return (static_cast<u64>(lane) * Plan::kFlagsPerLane + static_cast<u64>(from)) * kFlagStride;
}

template <class Plan>
COMMDSL_FN u64 state_offset(i32 lane) {
  return Plan::kFlagsBytes + static_cast<u64>(lane) * kFlagStride;
}

template <class Plan>
COMMDSL_FN u64 cells_offset(i32 lane, u64 round) {
  const u64 slots = round % Plan::kRotation * Plan::kNumCells * Plan::kLanes;
  return Plan::kCellsOffset + (slots + static_cast<u64>(lane)) * Plan::kSlotBytes;
}

// What data of a round carries: never 0, which is what memory holds at first.
COMMDSL_FN u64 mark_of(u64 round) { return 2 * round + 1; }

// The first word of lane 0 carries the digest of the call beside the number, of which fewer bits are left. It is sent and awaited in
// every operation of every round, also where there is no data: so what its place held before is zero, or exactly `kRotation`
// rounds old, and few bits tell that apart.
template <class Plan>
COMMDSL_FN bool carries_call(const Position<Plan>& here, u32 word) {
  static_assert(!Plan::kLanesTell || Plan::kRotation < (1 << 15), "16 bits tell the rounds of a place apart");
  return Plan::kLanesTell && here.lane == 0 && word == 0;
}

template <class Plan>
COMMDSL_FN u32 words_of(const Position<Plan>& here) {
  constexpr u32 data = Plan::Wire::kData;
  const u32 words = (static_cast<u32>(here.tile_bytes) + data - 1) / data;
  return Plan::kLanesTell && words == 0 && here.lane == 0 ? 1 : words;
}

// Of one operation: as many, so that a thread that awaits its words knows what its peer did before. Where blocks have lengths of
// their own, a word for each thread tells it as much, and what is not there is not sent. `threads`: that have words.
template <class Plan>
COMMDSL_FN u32 words_of(const Operands<Plan>& operands, u32 threads) {
  constexpr u32 data = Plan::Wire::kData;
  const u32 most = words_of(operands.here);
  if constexpr (!Plan::kHasLengths) return most;
  const u32 own = (static_cast<u32>(operands.slice.bytes) + data - 1) / data, least = most < threads ? most : threads;
  return own > least ? own : least;
}

// Where a word has the number of the round, and the digest of another call.
template <class Plan>
COMMDSL_CALL void report_other(const ArgsOf<Plan>& args, i32 lane, u64 round, i32 op, i32 peer, u32 digest) {
  publish(args, {kDisagrees, args.rank, lane, op, peer, args.call(), digest, round, 0, 0}, true);
}

// The record of the first lane to give up; the ranks that have not entered the round are looked up for it.
template <class Plan>
COMMDSL_CALL void report(const ArgsOf<Plan>& args, u64 why, i32 lane, u64 round, i32 op, i32 peer, u64 expected, u64 seen) {
  u64 missing = 0;
  for (i32 rank = 0; rank < Plan::kNumRanks && rank < 64; ++rank) {
    const u64 entered = peek(args, rank, state_offset<Plan>(lane) + sizeof(u64));
    if (!reached(entered, round + 1)) missing |= u64{1} << rank;
  }
  publish(args, {why, args.rank, lane, op, peer, expected, seen, round, missing, 0});
}

// True when the wait is over, false when the rank gives up: this lane waits in vain, or another one of the rank did.
template <class Plan>
COMMDSL_FN bool await(const Position<Plan>& here, i32 op, const Wait& wait) {
  const i32 rank = rank_of<Plan>(here.args);
  const u64 per_round = static_cast<u64>(Plan::signals_per_round(wait.peer, rank));
  const u64 expected = (here.round - static_cast<u64>(wait.rounds_back)) * per_round + static_cast<u64>(wait.ordinal);
  const u64* flag = reinterpret_cast<const u64*>(here.args.heap[rank] + flag_offset<Plan>(here.lane, wait.peer));
  return poll(here.args, wait.peer, flag, expected, [&](u64 why, u64 seen) {
    report<Plan>(here.args, why, here.lane, here.round, op, wait.peer, expected, seen);
  });
}

// The waits of one operation are polled by different threads at once.
template <class Plan>
COMMDSL_FN bool await_all(const Position<Plan>& here, i32 index, const Op& op, bool gave_up) {
  for (u32 i = thread(); i < static_cast<u32>(op.num_waits) && !gave_up; i += num_threads()) {
    gave_up = !await(here, index, Plan::wait(op.first_wait + static_cast<i32>(i)));
  }
  return !block_any(gave_up);
}

// Only this lane of this rank writes the flag, so its value follows from the round: no read, no atomic addition.
template <class Plan>
COMMDSL_FN void raise_signal(const Position<Plan>& here, const Signal signal) {
  const i32 rank = rank_of<Plan>(here.args);
  const u64 per_round = static_cast<u64>(Plan::signals_per_round(rank, signal.peer));
  const u64 value = here.round * per_round + static_cast<u64>(signal.ordinal);
  raise_flag(here.args, signal.peer, flag_offset<Plan>(here.lane, rank), value);
}

// Who moves a lane's data where flags travel behind it: its threads; for Tma, on a GPU, an engine that may run on behind them
// until `finish`.
template <class Plan, class Wire = typename Plan::Wire>
struct Mover {
  COMMDSL_FN void start() {}
  COMMDSL_FN void finish() {}
  COMMDSL_FN void run(const Operands<Plan>& operands) { combine(operands); }
};

}  // namespace commdsl
