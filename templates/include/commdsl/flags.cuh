// Flags alone, where the copies between two kernels are the copy engine's: what a rank tells its peers before them, and waits for behind.
// Assumes one lane of one block, and tables of which a kernel is given a stretch (`Turn`). Moves nothing.
#pragma once

#include "commdsl/lane.cuh"

namespace commdsl {

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
// state says so until the heap is zeroed. Who waits for the turn on this rank is told that it was in vain: the host hears of the failure,
// and nothing is put to peers that have not said that it may be.
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
  if (turn.told && thread() == 0) store_release_own(reinterpret_cast<u64*>(turn.told), goes_on ? kThere : kInVain);
  if (goes_on && turn.advances) goes_on = !block_any(thread() < kWarp && !Plan::agree(args, load_relaxed(own_desk(args, kDeskTelling))));
  if (thread() == 0 && !goes_on) store_relaxed(&state[2], 1);
  if (!goes_on || !turn.advances) return;
  if (thread() == 0) store_relaxed(&state[0], before + static_cast<u64>(args.rounds));
  stamps.end();
}

}  // namespace commdsl
