// Rows on their way to the ranks of their keys, and back: each key of a row, an entry, is a row more on the rank that has the key.
// Assumes keys on the device, as many as there are rows times keys a row. Decides where rows go by the law of the routing: places of
// a rank are sorted by key, then source rank, then entry; so a source's rows with one key are a segment of their own, which begins
// behind what all ranks have of lesser keys of that rank and what lesser ranks have of this key. Segments of sums of counts are
// disjoint, and together without a gap. What comes before and after is printed from the Plan. Nothing here waits for another rank or
// lane, or tells it. Every lane counts all keys of its rank for itself: that takes less time than lanes to tell each other.
#pragma once

#include "commdsl/calls.cuh"
#include "commdsl/elements.cuh"
#ifdef __CUDACC__
#include "commdsl/runs.cuh"
#else
#include "commdsl/host_runs.hpp"
#endif
#include "commdsl/float8.cuh"
#include "commdsl/entries.cuh"

namespace commdsl {

constexpr u32 kKeysAhead = 8;  // loaded before the first is counted: with one alone a thread would wait a latency for each

// --- there ---------------------------------------------------------------------------------------------------------------

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
    return own[word - 2 - Plan::kNumRows];
  }
  COMMDSL_FN void learn(const Call<Plan>& here, i32 peer, i32 word, u64 value) {
    if (word == 0) {
      lanes[peer] = static_cast<i32>(value);
    } else if (word == 1) {
      room[peer] = value;
    } else if (word < 2 + Plan::kNumRows) {
      output[peer][word - 2] = here.args.heap[peer] + value;
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

template <class Plan>
COMMDSL_FN bool begin(const Call<Plan>&) {
  return true;
}

// What the rank knows of itself, but for its counts.
template <class Plan>
COMMDSL_FN void prepare(const Call<Plan>& here, Keyed<Plan>& keyed) {
  const i32 rank = here.args.rank;
  for (u32 at = thread(); at < static_cast<u32>(Plan::kNumRanks); at += num_threads()) keyed.sent[at] = 0;
  for (u32 at = thread(); at < static_cast<u32>(Plan::kNumRows); at += num_threads()) {
    keyed.output[rank][at] = here.args.outputs[at];
  }
  if (thread() == 0) {
    keyed.room[rank] = here.args.room;
    keyed.lanes[rank] = here.args.active_lanes;
  }
  block_barrier();
}

// One key of each thread of a warp. `earlier`: it is a lane's before.
template <class Plan>
COMMDSL_FN void count_one(const Call<Plan>& here, Keyed<Plan>& keyed, u64 entry, i32 key, bool earlier) {
  const u32 position = position_of<Plan>(key);
  const Equals equals = among_equals(position == kNowhere ? kNowhere : 2 * position + (earlier ? 1 : 0));
  if (position != kNowhere && equals.before == 0) {
    add_shared(&keyed.own[position], equals.count);
    if (earlier) add_shared(&keyed.next[position], equals.count);
  }
  if (position == kNowhere && key != Plan::kKeys) keyed.bad = entry + 1;
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

// The places of `count` entries from `first` on, found by one warp: entries with one key stand in their order.
template <class Plan>
COMMDSL_FN void find_places(const Call<Plan>& here, Keyed<Plan>& keyed, u64 first, u32 count) {
  Entries& entries = keyed.entries;
  for (u32 at = thread(); at < count; at += num_threads()) entries.position[at] = position_of<Plan>(key_of(here, first + at));
  block_barrier();
  for (u32 from = 0; warp() == 0 && from < count; from += kWarp) {
    const u32 at = from + thread_of_warp();
    const u32 position = at < count ? entries.position[at] : kNowhere;
    const Equals equals = among_equals(position);
    const u32 place = position == kNowhere ? 0 : keyed.next[position] + equals.before;
    warp_barrier();
    if (position != kNowhere && equals.before + 1 == equals.count) keyed.next[position] = place + 1;
    warp_barrier();
    if (at < count) entries.place[at] = place;
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

// Beside the rows of an entry where it comes from, its value, and which place has its row.
template <class Plan>
COMMDSL_FN void leave_entry(const Call<Plan>& here, const Keyed<Plan>& keyed, u64 entry, u32 at) {
  const Entries& entries = keyed.entries;
  const u32 to = rank_at<Plan>(entries.position[at]), place = entries.place[at];
  const u64 from = static_cast<u64>(here.args.rank) << 32 | static_cast<u64>(entries.slot[at]) << 48;
  leave(here, keyed, to, Plan::kTensors, place, (entries.first[at] ? kFirst : 0) | from | entry);
  if constexpr (Plan::kValueAt >= 0) {
    leave(here, keyed, to, Plan::kValueAt, place, reinterpret_cast<const u32*>(here.args.values)[entry]);
  }
  if constexpr (Plan::kIndexAt >= 0) {
    u32 first = at - at % static_cast<u32>(here.args.keys_a_row);
    while (!entries.first[first] || rank_at<Plan>(entries.position[first]) != to) ++first;
    leave(here, keyed, to, Plan::kIndexAt, place, static_cast<i32>(entries.place[first]));
  }
}

// What arrives beside the rows of the entries from `first` on, those of one row, by a warp.
template <class Plan>
COMMDSL_FN void leave_beside(const Call<Plan>& here, const Keyed<Plan>& keyed, u64 entry, u32 first) {
  const Entries& entries = keyed.entries;
  const u32 keys = static_cast<u32>(here.args.keys_a_row);
  for (u32 k = thread_of_warp(); k < keys; k += kWarp) {
    const u32 to = rank_at<Plan>(entries.position[first + k]);
    if (to != kNowhere && entries.place[first + k] < keyed.room[to]) leave_entry(here, keyed, entry + k, first + k);
  }
  if constexpr (Plan::kMatesAt >= 0) {
    for (u32 pair = thread_of_warp(); pair < keys * keys; pair += kWarp) {
      const u32 at = first + pair / keys, k = pair % keys, to = rank_at<Plan>(entries.position[at]);
      if (!entries.first[at] || entries.place[at] >= keyed.room[to]) continue;
      const bool is_mate = rank_at<Plan>(entries.position[first + k]) == to;
      const i32 mate = is_mate ? static_cast<i32>(entries.place[first + k]) : -1;
      leave(here, keyed, to, Plan::kMatesAt, static_cast<u64>(entries.place[at]) * keys + k, mate);
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
  push_rows(here, keyed, [&](u64 first, u32 count) { find_places(here, keyed, first, count); },
            [&](u64 entry, u32 first) { leave_beside(here, keyed, entry, first); });
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

// --- back ----------------------------------------------------------------------------------------------------------------


// Where a row that was received comes from: the entry, its rank, and how many lesser ranks have keys of the row.
struct Origin {
  u64 source, entry, slot;
  COMMDSL_FN explicit Origin(u64 word) : source(word >> 32 & 0xffff), entry(word & 0xffffffffu), slot(word >> 48 & 0x7fff) {}
};

// What is added up: runs of one width behind one address, in order, and what each is multiplied with. Of a warp.
struct Parts {
  u32 at[kMostKeysARow];
  float weight[kMostKeysARow];

  // Each thread of the warp has one, or none; of those that have they follow each other. How many there are now.
  COMMDSL_FN u32 append(u32 count, bool has, u32 run, float times) {
    const Equals equals = among_equals(has ? 1 : 0);
    if (has) {
      at[count + equals.before] = run;
      weight[count + equals.before] = times;
    }
    return count + (has ? equals.count : kWarp - equals.count);
  }
};

// What a lane knows on the way back. Shared by its threads.
template <class Plan>
struct Returning {
  i32 lanes[Plan::kNumRanks];
  u64 sent[Plan::kNumRanks];  // rows, sums or words, by this lane
  u64 total;                  // places that the rank's keys have, with those that are empty
  u64 bad;                    // a place that came from nowhere, counted from 1
  u64 apart;                  // one whose row has a place that there is not, counted from 1
  Parts parts[num_warps()];

  COMMDSL_FN u64 told(const Call<Plan>& here, i32) const { return static_cast<u64>(here.args.active_lanes); }
  COMMDSL_FN void learn(const Call<Plan>&, i32 peer, i32, u64 value) { lanes[peer] = static_cast<i32>(value); }
  COMMDSL_FN u64 expected(const Call<Plan>& here, i32 peer) const {
    u64 found = 0;
    for (u64 row = 0; row < here.args.num_rows; ++row) {
      u64 there = 0;
      for (u32 which = 0; which < here.args.keys_a_row; ++which) there += rank_of(here, row, which) == static_cast<u32>(peer);
      found += Plan::kAddsHere ? there > 0 : there;
    }
    return found;
  }

  // What is kept for the second of two launches: the lanes of every rank, and places that are wrong.
  COMMDSL_FN u64 kept(const Call<Plan>&, i32 word) const {
    return word < Plan::kNumRanks ? static_cast<u64>(lanes[word]) : word == Plan::kNumRanks ? bad : apart;
  }
  COMMDSL_FN void recall(const Call<Plan>&, i32 word, u64 value) {
    if (word < Plan::kNumRanks) {
      lanes[word] = static_cast<i32>(value);
    } else if (word == Plan::kNumRanks) {
      bad = value;
    } else {
      apart = value;
    }
  }
};

// The rank of a key of a row; kNowhere if there is none.
template <class Plan>
COMMDSL_FN u32 rank_of(const Call<Plan>& here, u64 row, u64 which) {
  const u64 keys = here.args.keys_a_row;
  const u32 position = which < keys ? position_of<Plan>(key_of(here, row * keys + which)) : kNowhere;
  return position == kNowhere ? kNowhere : position / kKeysARank<Plan>;
}

template <class Plan>
COMMDSL_FN void prepare(const Call<Plan>& here, Returning<Plan>& known) {
  for (u32 at = thread(); at < static_cast<u32>(Plan::kNumRanks); at += num_threads()) known.sent[at] = 0;
  if (thread() == 0) {
    const i32 last = reinterpret_cast<const i32*>(here.args.offsets)[kKeysARank<Plan> - 1];
    known.total = last > 0 ? static_cast<u64>(last) : 0;
    known.bad = known.apart = 0;
    known.lanes[here.args.rank] = here.args.active_lanes;
  }
  block_barrier();
}

template <class Plan>
COMMDSL_FN u64 num_places(const Call<Plan>& here, const Returning<Plan>& known) {
  return known.total < here.args.given_rows ? known.total : here.args.given_rows;
}

template <class Plan>
COMMDSL_FN u64 origin_at(const Call<Plan>& here, u64 at) {
  return reinterpret_cast<const u64*>(here.args.origins)[at];
}

// How many ranks may have a row, and so how many places wait for it, where ranks add up.
template <class Plan>
COMMDSL_FN u64 slots_a_row(const Call<Plan>& here) {
  const u64 ranks = static_cast<u64>(Plan::kNumRanks);
  return here.args.keys_a_row < ranks ? here.args.keys_a_row : ranks;
}

// The place on its source that waits for what comes from `origin`; past all of them where the slot there is not.
template <class Plan>
COMMDSL_FN u64 place_of(const Call<Plan>& here, const Origin& origin) {
  if constexpr (Plan::kAddsHere) {
    const u64 slots = slots_a_row(here);
    const u64 place = origin.entry / here.args.keys_a_row * slots + origin.slot;
    return origin.slot < slots ? place : here.args.waiting_rows + origin.slot;
  } else {
    return origin.entry;
  }
}

// Whether there is such a place; if not, it is reported when all is done.
template <class Plan>
COMMDSL_FN bool is_there(const Call<Plan>& here, Returning<Plan>& known, u64 at, const Origin& origin, u64 place) {
  if (origin.source < static_cast<u64>(Plan::kNumRanks) && place < here.args.waiting_rows) return true;
  known.bad = at + 1;
  return false;
}

template <class Plan>
COMMDSL_FN void count_sent(Returning<Plan>& known, u64 source) {
  if constexpr (Plan::kChecks) add_shared(&known.sent[source], u64{1});
}

// Each row that was received, or what became of it, to the place on its source that waits for it.
template <class Plan>
COMMDSL_FN void push_rows(const Call<Plan>& here, Returning<Plan>& known) {
  const auto& args = here.args;
  const u64 rows = num_places(here, known), width = args.row_bytes, last = begin_of(here, rows, here.lane + 1);
  for (u64 at = begin_of(here, rows, here.lane) + warp(); at < last; at += num_warps()) {
    const u64 word = origin_at(here, at);
    if (word == kPadding) continue;
    const Origin origin(word);
    const u64 place = place_of(here, origin);
    if (!is_there(here, known, at, origin, place)) continue;
    if (thread_of_warp() == 0) count_sent(known, origin.source);
    const char* row = reinterpret_cast<const char*>(args.given + at * width);
    if constexpr (kHasFar) {
      if (!is_near(args, static_cast<i32>(origin.source))) {
        put_run(args, static_cast<i32>(origin.source), args.waiting + place * width, row, width);
        continue;
      }
    }
    copy_run(reinterpret_cast<char*>(args.heap[origin.source] + args.waiting + place * width), row, width);
  }
}

// Into how many pieces rows are cut, of a warp each, where there are fewer rows than warps.
template <class Plan>
COMMDSL_FN u64 pieces_of(const Call<Plan>& here, u64 rows) {
  const u64 workers = num_workers(here);
  return rows * 2 > workers ? 1 : rows * 16 > workers ? workers / rows : 16;
}

// The places on this rank of the row whose first is `at`, in the order of its keys; 0 if one of them there is not.
template <class Plan>
COMMDSL_FN u32 find_mates(const Call<Plan>& here, u64 at, u64 rows, Parts& parts) {
  const auto& args = here.args;
  u32 count = 0, wrong = 0;
  for (u64 from = 0; from < args.keys_a_row; from += kWarp) {
    const u64 which = from + thread_of_warp();
    const i32 mate = which < args.keys_a_row ? reinterpret_cast<const i32*>(args.mates)[at * args.keys_a_row + which] : -1;
    const bool has = mate != -1, is_held = has && static_cast<u32>(mate) < rows;
    float times = 1;
    if constexpr (Plan::kWeighsHere) times = is_held ? reinterpret_cast<const float*>(args.weights)[mate] : 0;
    const u32 before = count;
    count = parts.append(count, is_held, static_cast<u32>(mate), times);
    const Equals equals = among_equals(has ? 1 : 0);
    wrong += (has ? equals.count : kWarp - equals.count) - (count - before);
  }
  warp_barrier();
  return wrong > 0 ? 0 : count;
}

// For each row that was received, however often, the sum of what became of it to the place on its source that waits for this rank's.
// To a rank that is far it goes by way of a row of the rank's own heap: a put takes what lies in memory.
template <class Plan>
COMMDSL_FN void push_sums(const Call<Plan>& here, Returning<Plan>& known) {
  const auto& args = here.args;
  using Element = typename Plan::Element;
  const u64 rows = num_places(here, known), width = args.row_bytes, pieces = pieces_of(here, rows);
  const u64 last = begin_of(here, rows * pieces, here.lane + 1);
  const char* given = reinterpret_cast<const char*>(args.given);
  Parts& parts = known.parts[warp()];
  u64 item = begin_of(here, rows * pieces, here.lane) + warp(), next = item < last ? origin_at(here, item / pieces) : kPadding;
  for (; item < last; item += num_warps()) {
    const u64 at = item / pieces, after = item + num_warps(), word = next;
    next = after < last ? origin_at(here, after / pieces) : kPadding;  // loaded while this one is added up
    if (word == kPadding || (word & kFirst) == 0) continue;
    const Origin origin(word);
    const u64 place = place_of(here, origin);
    if (!is_there(here, known, at, origin, place)) continue;
    const u32 count = find_mates(here, at, rows, parts);
    if (count == 0) {
      known.apart = at + 1;
      continue;
    }
    const Part part = part_of(width, static_cast<u32>(item % pieces), static_cast<u32>(pieces));
    if (item % pieces == 0 && thread_of_warp() == 0) count_sent(known, origin.source);
    if constexpr (kHasFar) {
      if (!is_near(args, static_cast<i32>(origin.source))) {
        if (item % pieces > 0) continue;
        char* staged = reinterpret_cast<char*>(args.heap[args.rank] + args.staging + worker(here) * width);
        add_run<Element, Plan::kWeighsHere>(staged, given, width, width, parts, count);
        stored();
        put_run(args, static_cast<i32>(origin.source), args.waiting + place * width, staged, width);
        warp_barrier();
        continue;
      }
    }
    char* to = reinterpret_cast<char*>(args.heap[origin.source] + args.waiting + place * width);
    add_run<Element, Plan::kWeighsHere>(to + part.begin, given + part.begin, part.bytes, width, parts, count);
    warp_barrier();  // the next row's parts are written over these
  }
}

// A word of every place, by a thread each, to where it is waited for.
template <class Plan>
COMMDSL_FN void push_words(const Call<Plan>& here, Returning<Plan>& known) {
  const auto& args = here.args;
  const u64 rows = num_places(here, known), last = begin_of(here, rows, here.lane + 1);
  for (u64 at = begin_of(here, rows, here.lane) + thread(); at < last; at += num_threads()) {
    const u64 word = origin_at(here, at);
    if (word == kPadding) continue;
    const Origin origin(word);
    const u64 place = place_of(here, origin);
    if (!is_there(here, known, at, origin, place)) continue;
    count_sent(known, origin.source);
    const i32 source = static_cast<i32>(origin.source);
    const u64 value = reinterpret_cast<const u32*>(args.given)[at], to = args.waiting + place * sizeof(u64);
    if (is_near(args, source)) {
      *here.word(source, to) = value;
    } else {
      put_word(args, source, to, value);
    }
  }
}

// When all is done, as there: fewer rows than came, a row that came from nowhere, or one that has a place that there is not.
template <class Plan>
COMMDSL_FN void end(const Call<Plan>& here, Returning<Plan>& known) {
  if (thread() != 0) return;
  if (here.lane == 0 && known.total > here.args.given_rows) {
    give_up(here, kNoRoom, 1, here.args.rank, here.args.given_rows, known.total);
  }
  if (known.bad > 0) {
    const u64 at = known.bad - 1;
    const Origin origin(origin_at(here, at));
    give_up(here, kBadOrigin, static_cast<i32>(at), static_cast<i32>(origin.source), here.args.waiting_rows, place_of(here, origin));
  }
  if (known.apart > 0) give_up(here, kBadMate, static_cast<i32>(known.apart - 1), here.args.rank, num_places(here, known), 0);
}

// For each row what came back from its keys, times the weights if there are, added up in their order, rounded once.
template <class Plan>
COMMDSL_FN void finish_rows(const Call<Plan>& here, Returning<Plan>& known) {
  const auto& args = here.args;
  const u64 width = args.row_bytes, keys = args.keys_a_row, pieces = pieces_of(here, args.num_rows);
  const char* waiting = reinterpret_cast<const char*>(args.heap[args.rank] + args.waiting);
  Parts& parts = known.parts[warp()];
  for (u64 item = worker(here); item < args.num_rows * pieces; item += num_workers(here)) {
    const u64 row = item / pieces;
    u32 count = 0;
    for (u64 from = 0; from < keys; from += kWarp) {
      const u64 which = from + thread_of_warp();
      const bool has = rank_of(here, row, which) != kNowhere;
      float times = 1;
      if constexpr (Plan::kWeighs) times = has ? reinterpret_cast<const float*>(args.weights)[row * keys + which] : 0;
      count = parts.append(count, has, static_cast<u32>(row * keys + which), times);
    }
    warp_barrier();
    const Part part = part_of(width, static_cast<u32>(item % pieces), static_cast<u32>(pieces));
    char* to = reinterpret_cast<char*>(args.output + row * width + part.begin);
    add_run<typename Plan::Element, Plan::kWeighs>(to, waiting + part.begin, part.bytes, width, parts, count);
    warp_barrier();
  }
}

// How many ranks have keys of a row. All threads of a warp ask.
template <class Plan>
COMMDSL_FN u32 num_ranks_of(const Call<Plan>& here, u64 row) {
  u32 count = 0;
  if constexpr (kWarp >= kMostKeysARow) {
    const u32 rank = rank_of(here, row, thread_of_warp());
    const Equals same = among_equals(rank);  // every thread asks, also one without a rank
    const bool is_first = rank != kNowhere && same.before == 0;
    const Equals equals = among_equals(is_first ? 1 : 0);
    count = is_first ? equals.count : kWarp - equals.count;
  } else {
    for (u64 which = 0; which < here.args.keys_a_row; ++which) {
      const u32 rank = rank_of(here, row, which);
      bool is_first = rank != kNowhere;
      for (u64 before = 0; before < which; ++before) is_first = is_first && rank_of(here, row, before) != rank;
      count += is_first;
    }
  }
  return count;
}

// For each row the sums that came back from ranks, added up in their order, rounded once.
template <class Plan>
COMMDSL_FN void finish_sums(const Call<Plan>& here, Returning<Plan>& known) {
  const auto& args = here.args;
  const u64 width = args.row_bytes, slots = slots_a_row(here), pieces = pieces_of(here, args.num_rows);
  const char* waiting = reinterpret_cast<const char*>(args.heap[args.rank] + args.waiting);
  Parts& parts = known.parts[warp()];
  for (u64 item = worker(here); item < args.num_rows * pieces; item += num_workers(here)) {
    const u64 row = item / pieces;
    const u32 count = num_ranks_of(here, row);
    for (u32 slot = thread_of_warp(); slot < count; slot += kWarp) parts.at[slot] = static_cast<u32>(row * slots + slot);
    warp_barrier();
    const Part part = part_of(width, static_cast<u32>(item % pieces), static_cast<u32>(pieces));
    char* to = reinterpret_cast<char*>(args.output + row * width + part.begin);
    add_run<typename Plan::Element, false>(to, waiting + part.begin, part.bytes, width, parts, count);
    warp_barrier();
  }
}

// For each key of each row the word that came back, by a thread each; zero for a key that there is not.
template <class Plan>
COMMDSL_FN void finish_words(const Call<Plan>& here, const Returning<Plan>&) {
  const auto& args = here.args;
  const u64 entries = num_entries(here), step = static_cast<u64>(args.active_lanes) * num_threads();
  for (u64 at = static_cast<u64>(here.lane) * num_threads() + thread(); at < entries; at += step) {
    const u64 word = is_kept<Plan>(key_of(here, at)) ? *here.word(args.rank, args.waiting + at * sizeof(u64)) : 0;
    reinterpret_cast<u32*>(args.output)[at] = static_cast<u32>(word);
  }
}

}  // namespace commdsl
