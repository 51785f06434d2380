// The table interpreter: one lane of one rank runs its operations in order, round after round.
// Assumes tables that passed commdsl's proofs. Decides nothing: which operation, operand, flag or class comes when is in the tables.
#pragma once

#include "commdsl/lane.cuh"
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

}  // namespace commdsl
