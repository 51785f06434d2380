// What a rail is told of rows that cross to it, and what it does with them: each goes to every rank of the node that has keys of it.
// Assumes entries.cuh. Keys and places are another rank's word: none is followed out of the room. Nothing here waits for another rank
// or lane, or tells it.
#pragma once

#include "commdsl/entries.cuh"

namespace commdsl {

// What is told of an entry, 4 bytes each: its key, the place, and the value where there are values. `args.crossing` has them behind
// the tensors.
template <class Plan>
constexpr i32 kTold = Plan::kCrossing - Plan::kTensors;

template <class Plan>
COMMDSL_FN const u32* told_of(const Call<Plan>& here, i32 which) {
  if constexpr (kTold<Plan> > 2) {
    if (which == 2) return reinterpret_cast<const u32*>(here.args.values);
  }
  return reinterpret_cast<const u32*>(which == 0 ? here.args.keys : here.args.places);
}

// Of `count` entries from `first` on, those of whole rows, to this rank's rail in every other node. Places have been found.
template <class Plan>
COMMDSL_FN void send_entries(const Call<Plan>& here, u64 first, u32 count) {
  const auto& args = here.args;
  const u64 keys = args.keys_a_row, row = first / keys;
  if (row + count / keys > args.crossing_rows) return;  // a call of more rows than there may be; none of them goes
  stored();
  block_barrier();
  for (i32 item = static_cast<i32>(warp()); item < (kNodes<Plan> - 1) * kTold<Plan>; item += static_cast<i32>(num_warps())) {
    const i32 nodes = 1 + item / kTold<Plan>, which = item % kTold<Plan>, rail = rail_after(here, nodes);
    const u64 at = crossed_at(here, Plan::kTensors + which, nodes, row, keys * sizeof(u32));
    const char* from = reinterpret_cast<const char*>(told_of(here, which) + first);
    if (is_near(args, rail)) {
      copy_run(reinterpret_cast<char*>(args.heap[rail] + at), from, count * sizeof(u32));
    } else {
      put_run(args, rail, at, from, count * sizeof(u32));
    }
  }
}

// The same entries where they came to, of the rank so many nodes on: those of keys of this node.
template <class Plan, class Known>
COMMDSL_FN void read_entries(const Call<Plan>& here, Known& known, i32 nodes, u64 first, u32 count) {
  const u64 keys = here.args.keys_a_row, row = first / keys, width = keys * sizeof(u32);
  const u64 *key = here.word(here.args.rank, crossing_at(here, Plan::kTensors, nodes, row, width)),
            *place = here.word(here.args.rank, crossing_at(here, Plan::kTensors + 1, nodes, row, width));
  for (u32 at = thread(); at < count; at += num_threads()) {
    const u32 position = position_of<Plan>(reinterpret_cast<const i32*>(key)[at]);
    const bool is_here = position != kNowhere && is_own_node(here, rank_at<Plan>(position));
    known.entries.position[at] = is_here ? position : kNowhere;
    known.entries.place[at] = reinterpret_cast<const u32*>(place)[at];
  }
  block_barrier();
  find_slots<Plan>(known.entries, count, static_cast<u32>(keys));
  block_barrier();
}

// How many rows of the rank so many nodes on have keys of this node.
template <class Plan>
COMMDSL_FN u64 rows_for_node(const Call<Plan>& here, const Rails<Plan>& rails, i32 nodes) {
  const u64 keys = here.args.keys_a_row, sent = rails.rows[rail_after(here, nodes)];
  const u64 at = crossing_at(here, Plan::kTensors, nodes, 0, keys * sizeof(u32));
  const i32* key = reinterpret_cast<const i32*>(here.word(here.args.rank, at));
  u64 found = 0;
  for (u64 row = 0; row < sent && row < here.args.crossing_rows; ++row) {
    bool has = false;
    for (u64 which = 0; which < keys; ++which) {
      const u32 position = position_of<Plan>(key[row * keys + which]);
      has = has || (position != kNowhere && is_own_node(here, rank_at<Plan>(position)));
    }
    found += has;
  }
  return found;
}

// What crosses of a row.
template <class Plan>
COMMDSL_FN u64 bytes_a_row(const Call<Plan>& here) {
  u64 bytes = 0;
  for (i32 tensor = 0; tensor < Plan::kTensors; ++tensor) bytes += here.args.row_bytes[tensor];
  return bytes;
}

// A piece of a row that came from the rank so many nodes on, to the first of its places on every rank.
template <class Plan, class Known>
COMMDSL_FN void forward_row(const Call<Plan>& here, Known& known, i32 nodes, u64 row, u32 first, u32 piece, u32 pieces) {
  const auto& args = here.args;
  const Entries& entries = known.entries;
  const u32 keys = static_cast<u32>(args.keys_a_row);
  u64* to = known.entries.to[warp()];
  for (i32 tensor = 0; tensor < Plan::kTensors; ++tensor) {
    const u64 width = args.row_bytes[tensor];
    const char* source = reinterpret_cast<const char*>(args.heap[args.rank] + crossing_at(here, tensor, nodes, row, width));
    const Part part = part_of(width, piece, pieces);
    const auto place = [&](u32 at) {
      const u32 rank = rank_at<Plan>(entries.position[at]);
      const bool goes = entries.first[at] && entries.place[at] < known.room[rank];
      return Way{static_cast<i32>(rank), goes ? known.output[rank][tensor] + entries.place[at] * width : 0};
    };
    for (u32 k = thread_of_warp(); k < keys; k += kWarp) {
      const Way way = place(first + k);
      to[k] = way.to != 0 && is_near(args, way.rank) ? way.to + part.begin : 0;
    }
    warp_barrier();
    spread_run(to, keys, source + part.begin, part.bytes);
    warp_barrier();
    if constexpr (kHasFar) {
      for (u32 at = first; piece == 0 && at < first + keys; ++at) {
        const Way way = place(at);
        if (way.to != 0 && !is_near(args, way.rank)) put_run(args, way.rank, way.to - args.heap[way.rank], source, width);
      }
    }
  }
}

// All rows that came from other nodes. `found`: told of a chunk's entries, for all threads; `beside`: what leaves what is beside a row,
// for a warp.
template <class Plan, class Known, class Found, class Beside>
COMMDSL_FN void forward_rows(const Call<Plan>& here, Known& known, const Found& found, const Beside& beside) {
  const u32 keys = static_cast<u32>(here.args.keys_a_row);
  for (i32 nodes = 1; nodes < kNodes<Plan>; ++nodes) {
    const i32 source = rail_after(here, nodes);
    const u64 sent = known.rails.rows[source], rows = sent < here.args.crossing_rows ? sent : here.args.crossing_rows;
    over_rows(
        here, rows,
        [&](u64 first, u32 count) {
          read_entries(here, known, nodes, first, count);
          found(nodes, first, count);
        },
        [&](u64 row, u32 first, u32 piece, u32 pieces) {
          forward_row(here, known, nodes, row, first, piece, pieces);
          if (piece == 0) beside(nodes, row, first);
        });
  }
}

}  // namespace commdsl
