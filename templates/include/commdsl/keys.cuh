// Rows on their way to the ranks of their keys: each key of a row, an entry, is a row more on the rank that has the key.
// Assumes that their places are found. What comes before and after is printed from the Plan. Nothing here waits for another rank or
// lane, or tells it.
#pragma once

#include "commdsl/keyed.cuh"

namespace commdsl {

// A number beside the rows of a rank, of which the results of this name have one or more for each place.
template <class Plan, class Word>
COMMDSL_FN void leave(const Call<Plan>& here, const Keyed<Plan>& keyed, u32 to, i32 result, u64 index, Word value) {
  const auto& args = here.args;
  const i32 rank = static_cast<i32>(to);
  if constexpr (kHasFar) {
    if (!is_near(args, rank)) {
      const u64 at = keyed.output[to][result] - args.heap[rank] + index * sizeof(Word);
      if constexpr (sizeof(Word) == sizeof(u64)) {
        put_word(args, rank, at, value);
      } else {
        put_half(args, rank, at, static_cast<u32>(value));
      }
      return;
    }
  }
  reinterpret_cast<Word*>(keyed.output[to][result])[index] = value;
}

// Whose rows they are, and their values, if there are any.
struct Sender {
  i32 rank;
  const u32* values;
};

// Beside the rows of an entry where it comes from, its value, and which place has its row.
template <class Plan>
COMMDSL_FN void leave_entry(const Call<Plan>& here, const Keyed<Plan>& keyed, const Sender& sender, u64 entry, u32 at) {
  const Entries& entries = keyed.entries;
  const u32 to = rank_at<Plan>(entries.position[at]), place = entries.place[at];
  const u64 from = static_cast<u64>(sender.rank) << 32 | static_cast<u64>(entries.slot[at]) << 48;
  leave(here, keyed, to, Plan::kTensors, place, (entries.first[at] ? kFirst : 0) | from | entry);
  if constexpr (Plan::kValueAt >= 0) {
    leave(here, keyed, to, Plan::kValueAt, place, sender.values[entry]);
  }
  if constexpr (Plan::kIndexAt >= 0) {
    u32 first = at - at % static_cast<u32>(here.args.keys_a_row);
    while (!entries.first[first] || rank_at<Plan>(entries.position[first]) != to) ++first;
    leave(here, keyed, to, Plan::kIndexAt, place, static_cast<i32>(entries.place[first]));
  }
}

// What arrives beside the rows of the entries from `first` on, those of one row, on the ranks of this node, by a warp.
template <class Plan>
COMMDSL_FN void leave_beside(const Call<Plan>& here, const Keyed<Plan>& keyed, const Sender& sender, u64 entry, u32 first) {
  const Entries& entries = keyed.entries;
  const u32 keys = static_cast<u32>(here.args.keys_a_row);
  for (u32 k = thread_of_warp(); k < keys; k += kWarp) {
    const u32 to = rank_at<Plan>(entries.position[first + k]);
    if (to == kNowhere || !is_own_node(here, to) || entries.place[first + k] >= keyed.room[to]) continue;
    leave_entry(here, keyed, sender, entry + k, first + k);
  }
}

// On each rank of this node, for `count` entries from `first` on of the rank `source`, the place that an entry has there; -1 where its
// key is elsewhere. Whole rows, so that what stands side by side is stored side by side.
template <class Plan>
COMMDSL_FN void leave_mates(const Call<Plan>& here, const Keyed<Plan>& keyed, i32 source, u64 first, u32 count) {
  if constexpr (Plan::kMatesAt >= 0) {
    const u64 room = here.args.most_rows * here.args.keys_a_row;
    if (first + count > room) return;  // a call of more rows than there may be
    const u32 node = static_cast<u32>(here.args.rank / Plan::kNode * Plan::kNode);
    for (u32 at = thread(); at < static_cast<u32>(Plan::kNode) * count; at += num_threads()) {
      const u32 to = node + at / count, which = at % count;
      const bool is_there = rank_at<Plan>(keyed.entries.position[which]) == to;
      const i32 mate = is_there ? static_cast<i32>(keyed.entries.place[which]) : -1;
      leave(here, keyed, to, Plan::kMatesAt, static_cast<u64>(source) * room + first + which, mate);
    }
  }
}

// The rank's own places between what has come to a key and where the next begins.
template <class Plan>
COMMDSL_FN void pad(const Call<Plan>& here, const Keyed<Plan>& keyed) {
  if constexpr (Plan::kAligned > 1) {
    const u64 workers = num_workers(here), own = worker(here);
    const u32 rank = static_cast<u32>(here.args.rank);
    u64 before = 0;
    for (u32 local = 0; local < kKeysARank<Plan>; ++local) {
      const u64 from = keyed.filled[local], end = keyed.ends[local] < here.args.room ? keyed.ends[local] : here.args.room;
      for (u64 place = from + (own + workers - before % workers) % workers; place < end; place += workers) {
        clear_row(here, keyed, place);
        if (thread_of_warp() != 0) continue;
        leave(here, keyed, rank, Plan::kTensors, place, kPadding);
        if constexpr (Plan::kValueAt >= 0) leave(here, keyed, rank, Plan::kValueAt, place, u32{0});
        if constexpr (Plan::kIndexAt >= 0) leave(here, keyed, rank, Plan::kIndexAt, place, i32{-1});
      }
      before += keyed.ends[local] - from;
    }
  }
}

template <class Plan>
COMMDSL_FN void push_by_key(const Call<Plan>& here, Keyed<Plan>& keyed) {
  place(here, keyed);
  pad(here, keyed);
  Sender own{here.args.rank, nullptr};
  if constexpr (Plan::kValueAt >= 0) own.values = reinterpret_cast<const u32*>(here.args.values);
  over_rows(
      here, here.args.num_rows,
      [&](u64 first, u32 count) {
        find_places(here, keyed, first, count);
        leave_mates(here, keyed, here.args.rank, first, count);
        if constexpr (kNodes<Plan> > 1) send_entries(here, first, count);
      },
      [&](u64 row, u32 first, u32 piece, u32 pieces) {
        push_row(here, keyed, row, first, piece, pieces);
        if (piece == 0) leave_beside(here, keyed, own, row * here.args.keys_a_row, first);
      });
}

// What came for this node, and what is beside it: places, mates and slots are of ranks of the node, so all of them are known here.
template <class Plan>
COMMDSL_FN void forward(const Call<Plan>& here, Keyed<Plan>& keyed) {
  forward_rows(
      here, keyed, [&](i32 nodes, u64 first, u32 count) { leave_mates(here, keyed, rail_after(here, nodes), first, count); },
      [&](i32 nodes, u64 row, u32 first) {
        const u64 keys = here.args.keys_a_row;
        Sender sender{rail_after(here, nodes), nullptr};
        if constexpr (Plan::kValueAt >= 0) {
          const u64 at = crossing_at(here, Plan::kTensors + 2, nodes, 0, keys * sizeof(u32));
          sender.values = reinterpret_cast<const u32*>(here.args.heap[here.args.rank] + at);
        }
        leave_beside(here, keyed, sender, row * keys, first);
      });
}

// When all is done: a key that there is not, and on all ranks alike a rank that has no room for what comes. A report ends the waits
// of its rank, so before that a peer would wait in vain for a lane that another one's report has ended.
template <class Plan>
COMMDSL_FN void end(const Call<Plan>& here, Keyed<Plan>& keyed) {
  if (here.lane != 0 || thread() != 0) return;
  if (keyed.bad > 0) {
    const u64 entry = keyed.bad - 1, row = entry / here.args.keys_a_row, which = entry % here.args.keys_a_row;
    give_up(here, kBadKey, static_cast<i32>(row), static_cast<i32>(which), Plan::kKeys, static_cast<u32>(key_of(here, entry)));
  }
  for (i32 to = 0; to < Plan::kNumRanks; ++to) {
    if (keyed.comes[to] > keyed.room[to]) give_up(here, kNoRoom, 0, to, keyed.room[to], keyed.comes[to]);
  }
}

}  // namespace commdsl
