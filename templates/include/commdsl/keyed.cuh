// What a lane knows of keys on the device, as many as there are rows times keys a row, and where that leads each of them.
// Decides it by the law of the routing: places of a rank are sorted by key, then source rank, then entry; so a source's rows with one key
// are a segment of their own, which begins behind what all ranks have of lesser keys of that rank and what lesser ranks have of this key.
// Segments of sums of counts are disjoint, and together without a gap. Assumes that ranks tell each other what they have counted, as is
// printed from the Plan. Every lane counts all keys of its rank for itself: that takes less time than lanes to tell each other.
#pragma once

#include "commdsl/rails.cuh"

namespace commdsl {

constexpr u32 kKeysAhead = 16;  // loaded before the first is counted: with one alone a thread would wait a latency for each

// The rows that come from a rank, by the counts that the caller has of them.
template <class Plan>
COMMDSL_FN u64 counted(const Call<Plan>& here, i32 peer) {
  u64 rows = 0;
  for (u32 local = 0; local < kKeysARank<Plan>; ++local) {
    rows += static_cast<u64>(reinterpret_cast<const i32*>(here.args.counts)[local * Plan::kNumRanks + peer]);
  }
  return rows;
}

// What a lane knows of keys and peers. Keys are numbered by their position: all of rank 0, then all of rank 1, and so on. Shared by
// the threads of a lane.
template <class Plan>
struct Keyed {
  u64 output[Plan::kNumRanks][Plan::kNumRows];  // addresses of results
  u64 room[Plan::kNumRanks];
  i32 lanes[Plan::kNumRanks];
  u64 sent[Plan::kNumRanks];  // rows, by this lane
  u32 own[Plan::kKeys];       // entries of this rank
  u32 next[Plan::kKeys];      // entries of the lanes before; then the place of this lane's next row
  u32 total[Plan::kKeys];     // entries of all ranks
  u32 summed[Plan::kKeys];
  u32 end[Plan::kKeys];       // where this rank's segment ends
  u32 arrives[Plan::kKeys];   // of the rank's own keys: by key, then source rank
  u32 filled[kKeysARank<Plan>], ends[kKeysARank<Plan>];  // where what comes to the rank's own keys ends, and where they do
  Entries entries;
  Rails<Plan> rails;
  u64 comes[Plan::kNumRanks];  // places, of every rank
  u64 num_places;              // of this rank
  u64 bad;                     // an entry whose key there is not, counted from 1

  COMMDSL_FN const u64* origins(const Call<Plan>& here) const {
    return reinterpret_cast<const u64*>(here.args.outputs[Plan::kTensors]);
  }
  COMMDSL_FN const i32* mates(const Call<Plan>& here) const {
    return reinterpret_cast<const i32*>(here.args.outputs[Plan::kMatesAt]);
  }

  COMMDSL_FN u64 told(const Call<Plan>& here, i32 word) const {
    const auto& args = here.args;
    if (word == 0) return static_cast<u64>(args.active_lanes);
    if (word == 1) return args.room;
    if (word < 2 + Plan::kNumRows) return args.outputs[word - 2] - args.heap[args.rank];
    if constexpr (kNodes<Plan> > 1) {
      if (word == Plan::kAddressWords - 1) return args.num_rows;
    }
    return own[word - 2 - Plan::kNumRows];
  }
  COMMDSL_FN void learn(const Call<Plan>& here, i32 peer, i32 word, u64 value) {
    if (word == 0) {
      lanes[peer] = static_cast<i32>(value);
    } else if (word == 1) {
      room[peer] = value;
    } else if (word < 2 + Plan::kNumRows) {
      output[peer][word - 2] = here.args.heap[peer] + value;
    } else if (kNodes<Plan> > 1 && word == Plan::kAddressWords - 1) {
      if constexpr (kNodes<Plan> > 1) rails.rows[peer] = value;
    } else {
      count(here, peer, static_cast<u32>(word - 2 - Plan::kNumRows), static_cast<u32>(value));
    }
  }
  COMMDSL_FN void count(const Call<Plan>& here, i32 peer, u32 at, u32 entries) {
    const i32 rank = here.args.rank;
    add_shared(&total[at], entries);
    if (peer < rank) {
      add_shared(&next[at], entries);
      add_shared(&end[at], entries);
    }
    const u32 local = at - static_cast<u32>(rank) * kKeysARank<Plan>;
    if (local < kKeysARank<Plan>) arrives[local * Plan::kNumRanks + peer] = entries;
  }
  COMMDSL_FN u64 expected(const Call<Plan>& here, i32 peer) const { return counted(here, peer); }
  COMMDSL_FN u64 rows_across(const Call<Plan>& here, i32 nodes) const { return rows_for_node(here, rails, nodes); }
  COMMDSL_FN u64 row_across(const Call<Plan>& here) const { return bytes_a_row(here); }

  // What is kept for the second of two launches: the lanes of every rank, its room, what comes to it, and a bad entry.
  COMMDSL_FN u64 kept(const Call<Plan>&, i32 word) const {
    const i32 rank = word % Plan::kNumRanks, what = word / Plan::kNumRanks;
    return what == 0 ? static_cast<u64>(lanes[rank]) : what == 1 ? room[rank] : what == 2 ? comes[rank] : bad;
  }
  COMMDSL_FN void recall(const Call<Plan>& here, i32 word, u64 value) {
    const i32 rank = word % Plan::kNumRanks, what = word / Plan::kNumRanks;
    if (what == 0) {
      lanes[rank] = static_cast<i32>(value);
    } else if (what == 1) {
      room[rank] = value;
    } else if (what == 2) {
      comes[rank] = value;
      if (rank == here.args.rank) num_places = value;
    } else {
      bad = value;
    }
  }
};

// What the rank knows of itself, but for its counts.
template <class Plan>
COMMDSL_FN void prepare(const Call<Plan>& here, Keyed<Plan>& keyed) {
  const i32 rank = here.args.rank;
  for (u32 at = thread(); at < static_cast<u32>(Plan::kNumRanks); at += num_threads()) {
    keyed.sent[at] = 0;
    if constexpr (kNodes<Plan> > 1) keyed.rails.across[at] = 0;
  }
  for (u32 at = thread(); at < static_cast<u32>(Plan::kNumRows); at += num_threads()) {
    keyed.output[rank][at] = here.args.outputs[at];
  }
  if (thread() == 0) {
    keyed.room[rank] = here.args.room;
    keyed.lanes[rank] = here.args.active_lanes;
  }
  block_barrier();
}

// One key. `earlier`: it is a lane's before. Threads add in any order, and the counts are the same in each; which place an entry has
// follows from these and from its number among the lane's own, see find_places.
template <class Plan>
COMMDSL_FN void count_one(const Call<Plan>& here, Keyed<Plan>& keyed, u64 entry, i32 key, bool earlier) {
  const u32 position = position_of<Plan>(key);
  if (position != kNowhere) {
    add_shared(earlier ? &keyed.next[position] : &keyed.own[position], 1u);
  } else if (key != Plan::kKeys) {
    keyed.bad = entry + 1;
  }
}

// How many entries of the rank there are by key, and how many of them before the lane's own stretch.
template <class Plan>
COMMDSL_FN void count(const Call<Plan>& here, Keyed<Plan>& keyed) {
  for (u32 at = thread(); at < static_cast<u32>(Plan::kKeys); at += num_threads()) {
    keyed.own[at] = keyed.next[at] = keyed.total[at] = 0;
  }
  if (thread() == 0) keyed.bad = 0;
  block_barrier();
  const u64 entries = num_entries(here), step = u64{num_warps()} * kWarp;
  const u64 own = begin_of(here, here.args.num_rows, here.lane) * here.args.keys_a_row;
  for (u64 from = u64{warp()} * kWarp; from < entries; from += kKeysAhead * step) {
    i32 key[kKeysAhead];
#pragma unroll
    for (u32 j = 0; j < kKeysAhead; ++j) {
      const u64 entry = from + j * step + thread_of_warp();
      key[j] = entry < entries ? key_of(here, entry) : Plan::kKeys;
    }
#pragma unroll
    for (u32 j = 0; j < kKeysAhead; ++j) {
      const u64 entry = from + j * step + thread_of_warp();
      count_one(here, keyed, entry, key[j], entry < own);
    }
  }
  block_barrier();
  for (u32 at = thread(); at < static_cast<u32>(Plan::kKeys); at += num_threads()) {
    keyed.own[at] += keyed.next[at];
    keyed.end[at] = keyed.own[at];
    keyed.count(here, here.args.rank, at, keyed.own[at]);
  }
  block_barrier();
}

// For each position the entries of all ranks up to it, among the keys of its rank.
template <class Plan>
COMMDSL_FN const u32* sums(Keyed<Plan>& keyed) {
  u32 *from = keyed.total, *to = keyed.summed;
  for (u32 step = 1; step < kKeysARank<Plan>; step *= 2) {
    for (u32 at = thread(); at < static_cast<u32>(Plan::kKeys); at += num_threads()) {
      to[at] = from[at] + (at % kKeysARank<Plan> >= step ? from[at - step] : 0);
    }
    block_barrier();
    u32* const other = from;
    from = to;
    to = other;
  }
  return from;
}

// From counts to places: each key's begin at a multiple of kAligned. The first lane writes down what comes to its own rank.
template <class Plan>
COMMDSL_FN void place(const Call<Plan>& here, Keyed<Plan>& keyed) {
  constexpr u32 kAligned = static_cast<u32>(Plan::kAligned);
  for (u32 at = thread(); at < static_cast<u32>(Plan::kKeys); at += num_threads()) {
    keyed.total[at] = (keyed.total[at] + kAligned - 1) / kAligned * kAligned;
  }
  block_barrier();
  const u32* up_to = sums(keyed);
  for (u32 at = thread(); at < static_cast<u32>(Plan::kKeys); at += num_threads()) {
    const u32 before = at % kKeysARank<Plan> == 0 ? 0 : up_to[at - 1];
    keyed.next[at] += before;
    keyed.end[at] += before;
  }
  for (u32 at = thread(); at < static_cast<u32>(Plan::kNumRanks); at += num_threads()) {
    keyed.comes[at] = up_to[(at + 1) * kKeysARank<Plan> - 1];
  }
  const u32 own = static_cast<u32>(here.args.rank) * kKeysARank<Plan>;
  for (u32 local = thread(); local < kKeysARank<Plan>; local += num_threads()) {
    u32 rows = local == 0 ? 0 : up_to[own + local - 1];
    for (u32 peer = 0; peer < static_cast<u32>(Plan::kNumRanks); ++peer) rows += keyed.arrives[local * Plan::kNumRanks + peer];
    keyed.filled[local] = rows;
    keyed.ends[local] = up_to[own + local];
    if (here.lane == 0) reinterpret_cast<i32*>(here.args.offsets)[local] = static_cast<i32>(up_to[own + local]);
  }
  if (thread() == 0) keyed.num_places = up_to[own + kKeysARank<Plan> - 1];
  if (here.lane == 0) {
    i32* counts = reinterpret_cast<i32*>(here.args.counts);
    for (u32 at = thread(); at < static_cast<u32>(Plan::kKeys); at += num_threads()) {
      counts[at] = static_cast<i32>(keyed.arrives[at]);
    }
  }
  block_barrier();
}

// The places of `count` entries from `first` on: entries with one key stand in their order, so warps take turns. What takes long, to look
// for one's equals, they have all done by then.
template <class Plan>
COMMDSL_FN void find_places(const Call<Plan>& here, Keyed<Plan>& keyed, u64 first, u32 count) {
  Entries& entries = keyed.entries;
  for (u32 from = 0; from < count; from += num_threads()) {
    const u32 at = from + thread();
    const u32 position = at < count ? position_of<Plan>(key_of(here, first + at)) : kNowhere;
    const Equals equals = among_equals(position);
    u32 place = 0;
    for (u32 turn = 0; turn < num_warps() && from + turn * kWarp < count; ++turn) {
      if (warp() == turn) {
        if (position != kNowhere) place = keyed.next[position] + equals.before;
        warp_barrier();
        if (position != kNowhere && equals.before + 1 == equals.count) keyed.next[position] = place + 1;
      }
      block_barrier();
    }
    if (at >= count) continue;
    entries.position[at] = position;
    entries.place[at] = place;
  }
  block_barrier();
  for (u32 at = thread(); at < count; at += num_threads()) {
    const u32 position = entries.position[at];
    reinterpret_cast<i32*>(here.args.places)[first + at] = position == kNowhere ? -1 : static_cast<i32>(entries.place[at]);
    if constexpr (Plan::kChecks) {
      if (position == kNowhere) continue;
      const u32 to = rank_at<Plan>(position);
      add_shared(&keyed.sent[to], u64{1});  // also where there is no room: that has a report of its own
      if (entries.place[at] < keyed.end[position]) continue;
      give_up(here, kBadCount, 0, static_cast<i32>(to), keyed.end[position], entries.place[at]);
      entries.position[at] = kNowhere;
    }
  }
  if constexpr (Plan::kChecks) block_barrier();
  find_slots<Plan>(entries, count, static_cast<u32>(here.args.keys_a_row));
  block_barrier();
}

}  // namespace commdsl
