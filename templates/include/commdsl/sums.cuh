// Sums of ranks on their way home once per node: a rank of each node, the rail of the row's own, adds up what its node's ranks have of
// it, in their order, and sends that. It is told by the row's own rank how many there are; each has a place of its own (nodes.cuh).
// Assumes back.cuh. What a node has of a row is added up wherever the row comes from, so that its bits are the same. Nothing here
// waits for another rank or lane, or tells it.
#pragma once

#include "commdsl/back.cuh"

namespace commdsl {

// What a node has of a row: how many of its ranks have keys of it, and how many lesser nodes have some. In 16 bits.
struct Sums {
  u32 count, slot;
  COMMDSL_FN u32 word() const { return slot << 8 | count; }
  COMMDSL_FN static Sums of(u32 word) { return {word & 0xff, word >> 8 & 0xff}; }
};

// The same of a row of this rank, by its keys, for the node of a rank.
template <class Plan>
COMMDSL_FN Sums sums_of(const Call<Plan>& here, u64 row, i32 of) {
  const u32 node = static_cast<u32>(of / Plan::kNode);
  Sums sums{0, 0};
  for (u64 which = 0; which < here.args.keys_a_row; ++which) {
    const u32 rank = rank_of(here, row, which);
    if (rank == kNowhere || rank / Plan::kNode > node) continue;
    bool is_first_of_rank = true, is_first_of_node = true;
    for (u64 before = 0; before < which; ++before) {
      const u32 other = rank_of(here, row, before);
      is_first_of_rank = is_first_of_rank && other != rank;
      is_first_of_node = is_first_of_node && (other == kNowhere || other / Plan::kNode != rank / Plan::kNode);
    }
    if (rank / Plan::kNode == node) {
      sums.count += is_first_of_rank;
    } else {
      sums.slot += is_first_of_node;
    }
  }
  return sums;
}

// How many rows of this rank the node so many on has sums of; each crosses as one.
template <class Plan>
COMMDSL_FN u64 rows_with_sums(const Call<Plan>& here, i32 nodes) {
  u64 found = 0;
  for (u64 row = 0; row < here.args.num_rows; ++row) found += sums_of(here, row, rail_after(here, nodes)).count > 0;
  return found;
}

// To this rank's rail in every other node, what that node has of each row.
template <class Plan>
COMMDSL_FN void send_sums(const Call<Plan>& here) {
  const auto& args = here.args;
  const u64 step = static_cast<u64>(args.active_lanes) * num_threads(), items = args.num_rows * (kNodes<Plan> - 1);
  for (u64 item = static_cast<u64>(here.lane) * num_threads() + thread(); item < items; item += step) {
    const u64 row = item / (kNodes<Plan> - 1);
    const i32 nodes = 1 + static_cast<i32>(item % (kNodes<Plan> - 1)), rail = rail_after(here, nodes);
    if (row >= args.crossing_rows) continue;
    const u64 at = crossed_at(here, 1, nodes, row, sizeof(u32));
    const u32 word = sums_of(here, row, rail).word();
    if (is_near(args, rail)) {
      *reinterpret_cast<u32*>(args.heap[rail] + at) = word;
    } else {
      put_half(args, rail, at, word);
    }
  }
}

// What this node's ranks have of the rows of the rank so many nodes on: of each the sum to its place there. A word that says what
// cannot be is not followed.
template <class Plan>
COMMDSL_FN void add_up_of(const Call<Plan>& here, Returning<Plan>& known, i32 nodes) {
  const auto& args = here.args;
  const i32 source = rail_after(here, nodes);
  const u64 sent = nodes == 0 ? args.num_rows : known.rows[source], slots = slots_a_row(here);
  const u64 rows = sent < args.crossing_rows ? sent : args.crossing_rows, pieces = pieces_for_all(rows, num_workers(here));
  const u32* told = reinterpret_cast<const u32*>(here.word(args.rank, crossing_at(here, 1, nodes, 0, sizeof(u32))));
  const char* summed = reinterpret_cast<const char*>(args.heap[args.rank] + args.crossing[0]);
  u64 item = worker(here);
  const auto next = [&](Parts& parts) -> Sum {
    for (; item < rows * pieces; item += num_workers(here)) {
      const u64 row = item / pieces, first = crossing_row(here, nodes, row) * slots;
      const Sums sums = nodes == 0 ? sums_of(here, row, args.rank) : Sums::of(told[row]);
      const u64 place = row * nodes_a_row(here) + sums.slot;
      if (sums.count == 0 || sums.count > slots || sums.slot >= nodes_a_row(here) || place >= args.waiting_rows) continue;
      for (u32 slot = thread_of_warp(); slot < sums.count; slot += kWarp) parts.at[slot] = static_cast<u32>(first + slot);
      warp_barrier();
      const Part part = part_of(args.row_bytes, static_cast<u32>(item % pieces), static_cast<u32>(pieces));
      if (item % pieces == 0 && thread_of_warp() == 0) count_across(here, known, source, args.row_bytes);
      item += num_workers(here);
      return sum_for(here, {source, args.waiting + place * args.row_bytes}, summed, part, sums.count);
    }
    return {};
  };
  Carrier<Plan> carrier;
  carrier.template add_each<typename Plan::Element, false>(alignment_bits(here, args.crossing[0]), args.row_bytes,
                                                           known.parts[warp()], next, [&](const Sum& sum) { send_far(here, sum); });
  carrier.finish();
}

// For its own rows a rank is its own rail.
template <class Plan>
COMMDSL_FN void add_up(const Call<Plan>& here, Returning<Plan>& known) {
  for (i32 nodes = 0; nodes < kNodes<Plan>; ++nodes) add_up_of(here, known, nodes);
}

}  // namespace commdsl
