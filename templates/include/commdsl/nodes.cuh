// Rows that cross to another node once: to the rank there that has their source's number in its node, its rail, which forwards them.
// Assumes a Plan's `kNode` ranks to a node, all of them where rows go straight; nodes are full. Where what crosses lies, by tensor and
// behind them keys, places and values, `args.crossing` says: a segment for each of the other nodes, in it a place for every row that
// its rank may have. So nothing that crosses waits for room, and a rank that sends on waits for none that does: it has what all sent.
#pragma once

#include "commdsl/calls.cuh"

namespace commdsl {

template <class Plan>
constexpr i32 kNodes = Plan::kNumRanks / Plan::kNode;

// What a lane knows of rows that cross, by rank: how many rows it has, and the bytes that this lane has sent across to it.
template <class Plan, bool has_nodes = (kNodes<Plan> > 1)>
struct Rails {};

template <class Plan>
struct Rails<Plan, true> {
  u64 rows[Plan::kNumRanks];
  u64 across[Plan::kNumRanks];
};

// Whether what goes to a rank goes straight.
template <class Plan>
COMMDSL_FN bool is_own_node(const Call<Plan>& here, u32 rank) {
  return kNodes<Plan> == 1 || rank / Plan::kNode == static_cast<u32>(here.args.rank) / Plan::kNode;
}

// The rank with the number of this one in its node, so many nodes further on.
template <class Plan>
COMMDSL_FN i32 rail_after(const Call<Plan>& here, i32 nodes) {
  return (here.args.rank + nodes * Plan::kNode) % Plan::kNumRanks;
}

// How many nodes on the node of a rank is.
template <class Plan>
COMMDSL_FN i32 nodes_to(const Call<Plan>& here, u32 rank) {
  return (static_cast<i32>(rank) / Plan::kNode - here.args.rank / Plan::kNode + kNodes<Plan>) % kNodes<Plan>;
}

// Which row of all segments it is, of a rank so many nodes on; those of the rank's own, on the way back, are the last.
template <class Plan>
COMMDSL_FN u64 crossing_row(const Call<Plan>& here, i32 nodes, u64 row) {
  return static_cast<u64>((nodes + kNodes<Plan> - 1) % kNodes<Plan>) * here.args.crossing_rows + row;
}

// Where it lies in the heap of the rank that sends it on: `width` bytes of what has the number `part` in `args.crossing`.
template <class Plan>
COMMDSL_FN u64 crossing_at(const Call<Plan>& here, i32 part, i32 nodes, u64 row, u64 width) {
  return here.args.crossing[part] + crossing_row(here, nodes, row) * width;
}

// The same of a row of this rank on its rail so many nodes on, from where this rank is as many nodes on as are left.
template <class Plan>
COMMDSL_FN u64 crossed_at(const Call<Plan>& here, i32 part, i32 nodes, u64 row, u64 width) {
  return crossing_at(here, part, kNodes<Plan> - nodes, row, width);
}

// --- crossed: a lane of a rank has sent what crosses; arrived: the first lane knows that all have --------------------------------

template <Ranks to, class Plan>
COMMDSL_FN void tell_crossed(const Call<Plan>& here) {
  tell_lanes<to, Plan::kCrossedAt>(here);
}

template <i32 phase, Ranks of, i32 calls_back, class Plan, class Known>
COMMDSL_FN bool meet_crossed(const Call<Plan>& here, const Known& known) {
  return meet_lanes<phase, of, calls_back, Plan::kCrossedAt>(here, known);
}

template <Ranks to, class Plan>
COMMDSL_FN void tell_arrived(const Call<Plan>& here) {
  static_assert(to == Ranks::kOwn, "a number of the rank's own");
  if (thread() == 0) store_release(here.word(here.args.rank, Plan::kArrivedAt), here.number);
}

template <i32 phase, Ranks of, i32 calls_back, class Plan, class Known>
COMMDSL_FN bool meet_arrived(const Call<Plan>& here, const Known&) {
  return meet_own<phase, of, calls_back, Plan::kArrivedAt>(here);
}

// --- across: the bytes of rows that a lane sent to another node, by the rank there, where the kernel checks ------------------------

template <class Plan, class Known>
COMMDSL_FN void count_across(const Call<Plan>& here, Known& known, i32 rank, u64 bytes) {
  if constexpr (Plan::kChecks && kNodes<Plan> > 1) {
    if (!is_own_node(here, static_cast<u32>(rank))) add_shared(&known.rails.across[rank], bytes);
  }
}

template <Ranks to, class Plan, class Known>
COMMDSL_FN void tell_across(const Call<Plan>& here, const Known& known) {
  if constexpr (Plan::kChecks) {
    block_barrier();
    for (u32 at = thread(); at < static_cast<u32>(Plan::kNumRanks); at += num_threads()) {
      const i32 peer = static_cast<i32>(at);
      if (!is_among<to>(peer, here.args.rank)) continue;
      send_value(here.args, peer, lane_word_at<Plan, Plan::kAcrossAt>(here.args.rank, here.lane), known.rails.across[at]);
    }
  }
}

// What came, against one row for each that had to: `rows_across` says how many, of the rank so many nodes on.
template <class Plan, class Known>
COMMDSL_FN void read_across(const Call<Plan>& here, const Known& known) {
  if constexpr (Plan::kChecks) {
    for (i32 nodes = 1 + static_cast<i32>(thread()); nodes < kNodes<Plan>; nodes += static_cast<i32>(num_threads())) {
      const i32 peer = rail_after(here, nodes);
      u64 came = 0;
      for (i32 from = 0; from < known.lanes[peer]; ++from) {
        came += load_relaxed(here.word(here.args.rank, lane_word_at<Plan, Plan::kAcrossAt>(peer, from)));
      }
      const u64 expected = known.rows_across(here, nodes) * known.row_across(here);
      if (came != expected) give_up(here, kBadCount, 1, peer, expected, came);
    }
  }
}

}  // namespace commdsl
