// Rows to the places that others had in a call before: no keys are counted, as where each goes was handed over.
// Assumes places of keys that are where they were, and origins and mates as that call left them; none of the three is trusted where
// it leads out of the room. Like keys.cuh but for that.
#pragma once

#include "commdsl/keys.cuh"

namespace commdsl {

// What a lane knows. Shared by its threads.
template <class Plan>
struct Again {
  u64 output[Plan::kNumRanks][Plan::kNumRows];  // addresses of results
  u64 room[Plan::kNumRanks];
  i32 lanes[Plan::kNumRanks];
  u64 sent[Plan::kNumRanks];  // rows, by this lane
  Entries entries;
  Rails<Plan> rails;
  u64 num_places;  // of this rank

  COMMDSL_FN const u64* origins(const Call<Plan>& here) const { return reinterpret_cast<const u64*>(here.args.origins); }
  COMMDSL_FN const i32* mates(const Call<Plan>& here) const { return reinterpret_cast<const i32*>(here.args.mates); }

  COMMDSL_FN u64 told(const Call<Plan>& here, i32 word) const {
    const auto& args = here.args;
    return word == 0   ? static_cast<u64>(args.active_lanes)
           : word == 1 ? args.room
           : word == 2 ? args.outputs[0] - args.heap[args.rank]
                       : args.num_rows;
  }
  COMMDSL_FN void learn(const Call<Plan>& here, i32 peer, i32 word, u64 value) {
    if (word == 0) {
      lanes[peer] = static_cast<i32>(value);
    } else if (word == 1) {
      room[peer] = value;
    } else if (word == 2) {
      output[peer][0] = here.args.heap[peer] + value;
    } else if constexpr (kNodes<Plan> > 1) {
      rails.rows[peer] = value;
    }
  }
  COMMDSL_FN u64 expected(const Call<Plan>& here, i32 peer) const { return counted(here, peer); }
  COMMDSL_FN u64 rows_across(const Call<Plan>& here, i32 nodes) const { return rows_for_node(here, rails, nodes); }
  COMMDSL_FN u64 row_across(const Call<Plan>& here) const { return bytes_a_row(here); }

  // What is kept for the second of two launches: the lanes of every rank.
  COMMDSL_FN u64 kept(const Call<Plan>&, i32 word) const { return static_cast<u64>(lanes[word]); }
  COMMDSL_FN void recall(const Call<Plan>&, i32 word, u64 value) { lanes[word] = static_cast<i32>(value); }
};

template <class Plan>
COMMDSL_FN void prepare(const Call<Plan>& here, Again<Plan>& again) {
  const auto& args = here.args;
  for (u32 at = thread(); at < static_cast<u32>(Plan::kNumRanks); at += num_threads()) {
    again.sent[at] = 0;
    if constexpr (kNodes<Plan> > 1) again.rails.across[at] = 0;
  }
  if (thread() == 0) {
    for (i32 at = 0; at < Plan::kNumRows; ++at) again.output[args.rank][at] = args.outputs[at];
    again.room[args.rank] = args.room;
    again.lanes[args.rank] = args.active_lanes;
    again.num_places = static_cast<u64>(reinterpret_cast<const i32*>(args.offsets)[kKeysARank<Plan> - 1]);
  }
  block_barrier();
}

// The places of `count` entries from `first` on.
template <class Plan>
COMMDSL_FN void look_up(const Call<Plan>& here, Again<Plan>& again, u64 first, u32 count) {
  for (u32 at = thread(); at < count; at += num_threads()) {
    const i32 place = reinterpret_cast<const i32*>(here.args.places)[first + at];
    const u32 position = place < 0 ? kNowhere : position_of<Plan>(key_of(here, first + at));
    again.entries.position[at] = position;
    again.entries.place[at] = static_cast<u32>(place);
    if constexpr (Plan::kChecks) {
      if (position != kNowhere) add_shared(&again.sent[rank_at<Plan>(position)], u64{1});
    }
  }
  block_barrier();
  find_slots<Plan>(again.entries, count, static_cast<u32>(here.args.keys_a_row));
  block_barrier();
}

template <class Plan>
COMMDSL_FN void push_again(const Call<Plan>& here, Again<Plan>& again) {
  if constexpr (Plan::kAligned > 1) {
    const u64 places = again.num_places < here.args.room ? again.num_places : here.args.room;
    for (u64 place = worker(here); place < places; place += num_workers(here)) {
      if (again.origins(here)[place] == kPadding) clear_row(here, again, place);
    }
  }
  over_rows(
      here, here.args.num_rows,
      [&](u64 first, u32 count) {
        look_up(here, again, first, count);
        if constexpr (kNodes<Plan> > 1) send_entries(here, first, count);
      },
      [&](u64 row, u32 first, u32 piece, u32 pieces) { push_row(here, again, row, first, piece, pieces); });
}

template <class Plan>
COMMDSL_FN void forward(const Call<Plan>& here, Again<Plan>& again) {
  forward_rows(here, again, [](i32, u64, u32) {}, [](i32, u64, u32) {});
}

// When all is done: the rank has no room for what comes.
template <class Plan>
COMMDSL_FN void end(const Call<Plan>& here, Again<Plan>& again) {
  if (here.lane != 0 || thread() != 0 || again.num_places <= here.args.room) return;
  give_up(here, kNoRoom, 0, here.args.rank, here.args.room, again.num_places);
}

}  // namespace commdsl
