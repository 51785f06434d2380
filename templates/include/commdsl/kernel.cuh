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

// Who moves a lane's data where flags travel behind it: its threads; for Tma, on a GPU, an engine that may run on behind them
// until `finish`.
template <class Plan, class Wire = typename Plan::Wire>
struct Mover {
  COMMDSL_FN void start() {}
  COMMDSL_FN void finish() {}
  COMMDSL_FN void run(const Operands<Plan>& operands) { combine(operands); }
};

}  // namespace commdsl

#ifdef __CUDACC__
#include "commdsl/combine.cuh"
#include "commdsl/packets.cuh"
#include "commdsl/tma.cuh"
#else
#include "commdsl/host_packets.hpp"
#endif
#include "commdsl/widening.cuh"

namespace commdsl {

// Operands in other element types: casts.cuh, which a kernel includes that has them. False where an operation has none.
template <class Plan>
COMMDSL_FN bool move_cast(const Operands<Plan>& operands);

// Puts a copy's source where plain stores do not reach.
template <class Plan>
COMMDSL_FN void transfer(const Operands<Plan>& operands) {
  for (i32 d = 0; d < operands.op().num_dests; ++d) {
    const Place dest = operands.dest_place(d);
    if (!dest.symmetric || is_near(operands.here.args, dest.rank)) continue;
    put_tile(operands.here.args, dest.rank, dest.at, operands.source(0), operands.slice.bytes);
  }
}

// A chunk that a rank opens or takes stays as it is: peers put it there, and who reads it comes behind. Under ThreadSanitizer the
// rank touches all of it, so a put that comes too early or too late is seen.
template <class Plan>
COMMDSL_FN void hold(const Operands<Plan>& operands) {
#ifdef COMMDSL_SANITIZED
  if (operands.op().num_sources == 0) return scribble(operands.dest(0), operands.slice.bytes);
  look_at(operands.dest(0), operands.slice.bytes);
#endif
}

// Where a rank knows the lengths of its pairs alone, data in a cell has a head in the first round of a call: how long its block is,
// then who sends it and how many rounds that one knows of. Every rank has data of every other one in a round, so behind it all have
// as many rounds as whoever needs most. The flags that order the data order the head.
template <class Plan>
COMMDSL_FN void send_heads(const Operands<Plan>& operands, i32 rounds) {
  const ArgsOf<Plan>& args = operands.here.args;
  const u64 who = static_cast<u64>(rank_of<Plan>(args)) << 32 | static_cast<u64>(rounds);
  for (i32 d = 0; d < operands.op().num_dests && thread() == 0; ++d) {
    if (operands.dest_row(d).space != kCell) continue;
    const Place to = operands.dest_place(d);
    send_value(args, to.rank, to.at - kHeadBytes, block_of<Plan>(args, operands.index));
    send_value(args, to.rank, to.at - kHeadBytes + sizeof(u64), who);
  }
}

// False where a block is not as long as it is to be; the same for all threads.
template <class Plan>
COMMDSL_FN bool read_heads(const Operands<Plan>& operands, i32& rounds) {
  const Position<Plan>& here = operands.here;
  const u64 expected = block_of<Plan>(here.args, operands.index);
  for (i32 s = 0; s < operands.op().num_sources; ++s) {
    if (operands.source_row(s).space != kCell) continue;
    const u64* head = reinterpret_cast<const u64*>(operands.source(s) - kHeadBytes);
    const u64 length = load_relaxed(head), who = load_relaxed(head + 1);
    const i32 theirs = static_cast<i32>(who & 0xffffffffu), peer = static_cast<i32>(who >> 32);
    rounds = theirs > rounds ? theirs : rounds;
    if (length == expected) continue;
    if (thread() == 0) {
      publish(here.args, {kBadLength, here.args.rank, here.lane, operands.index, peer, expected, length, here.round, 0, 0});
    }
    return false;
  }
  return true;
}

// False when the thread gives up waiting for data. `rounds`: of the call, as far as the lane knows.
template <class Plan>
COMMDSL_FN bool run_body(const Position<Plan>& here, Mover<Plan>& mover, i32 index, const Op& op, i32& rounds) {
  static_assert(!kHasFar || !Plan::Wire::kCarriesFlags, "tiles are put whole, not word by word");
  const Slice slice = slice_of(here, index);
  const Operands<Plan> operands{here, index, slice};
  if constexpr (Plan::Wire::kCarriesFlags) {
    return exchange(operands);
  } else {
    if constexpr (Plan::kHasHeads) {
      if (here.round_offset == 0) {
        if (!read_heads(operands, rounds)) return false;
        send_heads(operands, rounds);
      }
    }
    if (slice.bytes == 0) return true;
    if constexpr (Plan::kLands) {
      if (op.kind == kHold) {
        hold(operands);
        return true;
      }
    }
    static_assert(!kHasFar || !Plan::kReducesRemotely, "a reduction stores where plain stores reach");
    if constexpr (kHasFar) {
      if (op.kind == kCopy) transfer(operands);
    }
    if constexpr (Plan::kCasts) {
      if (move_cast(operands)) return true;
    }
    if constexpr (Plan::kSums != 0) {
      by_operation(operands, [](const auto& same) { add_up(same); });
    } else {
      mover.run(operands);
    }
    return true;
  }
}

// Only this lane of this rank writes the flag, so its value follows from the round: no read, no atomic addition.
template <class Plan>
COMMDSL_FN void raise_signal(const Position<Plan>& here, const Signal signal) {
  const i32 rank = rank_of<Plan>(here.args);
  const u64 per_round = static_cast<u64>(Plan::signals_per_round(rank, signal.peer));
  const u64 value = here.round * per_round + static_cast<u64>(signal.ordinal);
  raise_flag(here.args, signal.peer, flag_offset<Plan>(here.lane, rank), value);
}

template <class Plan>
COMMDSL_FN void signal_all(const Position<Plan>& here, const Op& op) {
  for (u32 i = thread(); i < static_cast<u32>(op.num_signals); i += num_threads()) {
    raise_signal(here, Plan::signal(op.first_signal + static_cast<i32>(i)));
  }
}

// `alive` is false for a thread that gave up in this round: it still meets the others at their barriers.
template <class Plan>
COMMDSL_FN bool run_op(const Position<Plan>& here, Mover<Plan>& mover, Stamps& stamps, i32 index, bool& alive, i32& rounds) {
  const Op& op = Plan::op(index);
  stamps.begin();
  if (op.num_waits > 0 || op.barrier) mover.finish();
  if (op.num_waits > 0) {
    if (!await_all(here, index, op, !alive)) return false;
  } else if (op.barrier) {
    block_barrier();
  }
  stamps.ready();
  if (alive) alive = run_body(here, mover, index, op, rounds);
  if constexpr (Plan::kHasHeads) {
    if (!alive) return false;  // as all threads of the lane do
  }
  if (op.num_signals > 0) {
    mover.finish();
    complete(here.args);
    if constexpr (Plan::Wire::kCarriesFlags) {
      if (block_any(!alive)) return false;
    } else {
      block_barrier();
    }
    signal_all(here, op);
  }
  stamps.end();
  return true;
}

// A kernel built for one rank whose program is short has every operation as code of its own.
template <class Plan>
COMMDSL_FN bool run_round(const Position<Plan>& here, Mover<Plan>& mover, Stamps& stamps, i32& rounds) {
  bool alive = true;
  if constexpr (Plan::kRank >= 0) {
    constexpr i32 first = Plan::first_op(Plan::kRank), last = Plan::first_op(Plan::kRank + 1);
#pragma unroll
    for (i32 index = first; index < last; ++index) {
      if (!run_op(here, mover, stamps, index, alive, rounds)) return false;
    }
  } else {
    const i32 last = Plan::begin(here.args.rank + 1);
    for (i32 index = Plan::begin(here.args.rank); index < last; ++index) {
      if (!run_op(here, mover, stamps, index, alive, rounds)) return false;
    }
  }
  // A round's words are done before the next one's begin: so a block that is seen in a round has left the one before.
  return !Plan::Wire::kCarriesFlags || !block_any(!alive);
}

// Where a lane stands in a round of the call, the `number`th of all calls: the same for what it moves and for its tiles.
template <class Plan>
COMMDSL_FN Position<Plan> position_of(const ArgsOf<Plan>& args, i32 lane, i32 round, u64 number) {
  const u64 early = static_cast<u64>(lane % kStaggered) * args.stagger_bytes;
  const u64 end = smaller(static_cast<u64>(round + 1) * Plan::kTileBytes - early, args.share_bytes);
  const u64 offset = round == 0 ? 0 : smaller(static_cast<u64>(round) * Plan::kTileBytes - early, args.share_bytes);
  return {args, lane, number, offset, end - offset, cells_offset<Plan>(lane, number)};
}

// How many intervals of work lanes before this one have, each an operation of an actor in a round.
template <class Plan>
COMMDSL_FN u64 intervals_of(const ArgsOf<Plan>& args, i32 lanes, i32 actor) {
  return static_cast<u64>(lanes) * static_cast<u64>(args.rounds) * static_cast<u64>(Plan::begin(actor + 1) - Plan::begin(actor));
}

// False when the lane gave up: it leaves the round counter as it was, and the heap is unfit for another call until it is zeroed.
template <class Plan>
COMMDSL_FN bool run_lane(const ArgsOf<Plan>& args, i32 lane) {
  u64* state = reinterpret_cast<u64*>(args.heap[rank_of<Plan>(args)] + state_offset<Plan>(lane));
  const u64 before = load_relaxed(&state[0]);
  const bool is_last = thread() + 1 == num_threads();  // of the warp that has least to do
  COMMDSL_SHARED u64 words[2];
  const Turnstile<Plan> turnstile{words};
  if (Plan::kLanesTell && is_last && lane == 0) turnstile.enter(args);
  Stamps stamps(args, intervals_of<Plan>(args, lane, rank_of<Plan>(args)), lane, thread() == 0);
  Mover<Plan> mover;
  mover.start();
  i32 rounds = args.rounds;
  for (i32 round = 0; round < rounds; ++round) {
    const Position<Plan> here = position_of<Plan>(args, lane, round, before + static_cast<u64>(round));
    if (is_last) store_relaxed(&state[1], here.round + 1);
    if (!run_round(here, mover, stamps, rounds)) return false;
  }
  mover.finish();
  block_barrier();  // every thread has read the counter
  if (thread() == 0) store_relaxed(&state[0], before + static_cast<u64>(rounds));
  if (Plan::kLanesTell && is_last && lane == 0) turnstile.leave(args);
  return true;
}

// --- flags alone: the copies between two of these kernels are the copy engine's ---------------------------------------------

// The signals of operations [first, last) of a round. Of several to one peer the last one says it all; one thread has a peer.
template <class Plan>
COMMDSL_FN void signal_range(const Position<Plan>& here, i32 first, i32 last) {
  const Op& end = Plan::op(last - 1);
  for (u32 peer = thread(); peer < static_cast<u32>(Plan::kNumRanks); peer += num_threads()) {
    for (i32 at = end.first_signal + end.num_signals; at-- > Plan::op(first).first_signal;) {
      if (Plan::signal(at).peer != static_cast<i32>(peer)) continue;
      raise_signal(here, Plan::signal(at));
      break;
    }
  }
}

// The waits of operations [first, last) of a round, which stand in a row in their table, polled by different threads at once.
template <class Plan>
COMMDSL_FN bool await_range(const Position<Plan>& here, i32 first, i32 last) {
  const Op& end = Plan::op(last - 1);
  bool gave_up = false;
  i32 index = first;
  for (i32 at = Plan::op(first).first_wait + static_cast<i32>(thread()); at < end.first_wait + end.num_waits && !gave_up;
       at += static_cast<i32>(num_threads())) {
    while (at >= Plan::op(index).first_wait + Plan::op(index).num_waits) ++index;
    gave_up = !await(here, index, Plan::wait(at));
  }
  return !block_any(gave_up);
}

// Operations of one round among positions of a call; `next` is the position behind them.
struct Stretch {
  i32 round, first, last, next;
};

template <class Plan>
COMMDSL_FN Stretch stretch_of(const ArgsOf<Plan>& args, i32 position, i32 last) {
  const i32 begin = Plan::begin(rank_of<Plan>(args)), count = Plan::begin(rank_of<Plan>(args) + 1) - begin;
  const i32 round = position / count, start = round * count;
  const i32 next = last < start + count ? last : start + count;
  return {round, begin + position - start, begin + next - start, next};
}

// Signals, then waits: whether all came in time. The first kernel of a call tells of it.
template <class Plan>
COMMDSL_FN bool pass_flags(const ArgsOf<Plan>& args, const Turn& turn, u64* state, u64 before) {
  if (turn.begins && block_any(thread() < kWarp && Plan::enter(args) == 0)) return false;
  for (i32 at = turn.first_signal; at < turn.last_signal;) {
    const Stretch part = stretch_of<Plan>(args, at, turn.last_signal);
    signal_range(Position<Plan>{args, 0, before + static_cast<u64>(part.round), 0, 0, 0}, part.first, part.last);
    at = part.next;
  }
  if (thread() == 0) store_relaxed(&state[1], before + static_cast<u64>(turn.entered));
  for (i32 at = turn.first_wait; at < turn.last_wait;) {
    const Stretch part = stretch_of<Plan>(args, at, turn.last_wait);
    if (!await_range(Position<Plan>{args, 0, before + static_cast<u64>(part.round), 0, 0, 0}, part.first, part.last)) return false;
    at = part.next;
  }
  return true;
}

// A turn; the last kernel of a call holds the peers to it. A rank that gave up raises nothing more for them: the third word of its
// state says so until the heap is zeroed. Who waits for the turn on this rank is told all the same: the host hears of the failure.
template <class Plan>
COMMDSL_FN void run_flags(const ArgsOf<Plan>& args, const Turn& turn) {
  u64* state = reinterpret_cast<u64*>(args.heap[rank_of<Plan>(args)] + state_offset<Plan>(0));
  const u64 before = load_relaxed(&state[0]);
  Stamps stamps(args, 0, 0, thread() == 0);  // from the first kernel of a call to its last: what is between is under way
  bool goes_on = load_relaxed(&state[2]) == 0;
  if (goes_on && turn.begins) stamps.begin();
  goes_on = goes_on && pass_flags<Plan>(args, turn, state, before);
  block_barrier();  // every thread has read the state
  if (goes_on && turn.begins) stamps.ready();
  if (turn.told && thread() == 0) store_release_own(reinterpret_cast<u64*>(turn.told), 1);
  if (goes_on && turn.advances) goes_on = !block_any(thread() < kWarp && !Plan::agree(args, load_relaxed(own_desk(args, kDeskTelling))));
  if (thread() == 0 && !goes_on) store_relaxed(&state[2], 1);
  if (!goes_on || !turn.advances) return;
  if (thread() == 0) store_relaxed(&state[0], before + static_cast<u64>(args.rounds));
  stamps.end();
}

}  // namespace commdsl
