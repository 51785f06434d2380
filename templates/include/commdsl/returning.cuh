// What a lane knows of rows on their way back: which rank and place each came from, where it waits there, and in which waves sums are
// sent and finished, by which lanes. Assumes keys and origins as the call there left them, and trusts none of them where it leads out of
// the room. Moves nothing.
#pragma once

#include "commdsl/entries.cuh"

namespace commdsl {

// Where a row that was received comes from: the entry, its rank, and how many lesser ranks have keys of the row.
struct Origin {
  u64 source, entry, slot;
  COMMDSL_FN explicit Origin(u64 word) : source(word >> 32 & 0xffff), entry(word & 0xffffffffu), slot(word >> 48 & 0x7fff) {}
};

// What is added up: runs of one width behind one address, in order, and what each is multiplied with. Of a warp.
struct Parts {
  u32 at[kMostKeysARow];
  float weight[kMostKeysARow];
  u64 origin;  // of the first, where rows that were received are added up

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

// Of every rank as many of its rows, from `first` on.
struct Wave {
  u64 first, rows;
};

// What a lane knows on the way back. Shared by its threads.
template <class Plan>
struct Returning {
  i32 lanes[Plan::kNumRanks];
  u64 sent[Plan::kNumRanks];  // rows, sums or words, by this lane
  u64 total;                  // places that the rank's keys have, with those that are empty
  u64 bad;                    // a place that came from nowhere, counted from 1
  u64 apart;                  // a row that has a place that there is not: a number among those of all ranks, counted from 1
  u64 rows[Plan::kNumRanks];  // that a rank has, where ranks add up
  u32 taken[Plan::kWaves];    // sums of a wave, or pieces of them, that warps of the lane have taken
  Rails<Plan> rails;
  Parts parts[num_warps()][2];  // of the sum in hand, and of the next

  COMMDSL_FN u64 told(const Call<Plan>& here, i32 word) const {
    return word == 0 ? static_cast<u64>(here.args.active_lanes) : here.args.num_rows;
  }
  COMMDSL_FN void learn(const Call<Plan>&, i32 peer, i32 word, u64 value) {
    if (word == 0) {
      lanes[peer] = static_cast<i32>(value);
    } else {
      rows[peer] = value;
    }
  }
  COMMDSL_FN u64 expected(const Call<Plan>& here, i32 peer) const {
    u64 found = 0;
    for (u64 row = 0; row < here.args.num_rows; ++row) {
      u64 there = 0;
      for (u32 which = 0; which < here.args.keys_a_row; ++which) there += rank_of(here, row, which) == static_cast<u32>(peer);
      found += Plan::kAddsHere ? there > 0 : there;
    }
    return found;
  }

  COMMDSL_FN u64 rows_across(const Call<Plan>& here, i32 nodes) const { return rows_with_sums(here, nodes); }
  COMMDSL_FN u64 row_across(const Call<Plan>& here) const { return here.args.row_bytes; }

  // What is kept for the second of two launches: the lanes of every rank, its rows, and what is wrong.
  COMMDSL_FN u64 kept(const Call<Plan>&, i32 word) const {
    const i32 rank = word % Plan::kNumRanks, what = word / Plan::kNumRanks;
    return what == 0 ? static_cast<u64>(lanes[rank]) : what == 1 ? rows[rank] : rank == 0 ? bad : apart;
  }
  COMMDSL_FN void recall(const Call<Plan>&, i32 word, u64 value) {
    const i32 rank = word % Plan::kNumRanks, what = word / Plan::kNumRanks;
    if (what == 0) {
      lanes[rank] = static_cast<i32>(value);
    } else if (what == 1) {
      rows[rank] = value;
    } else if (rank == 0) {
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
  for (u32 at = thread(); at < static_cast<u32>(Plan::kNumRanks); at += num_threads()) {
    known.sent[at] = 0;
    known.rows[at] = static_cast<i32>(at) == here.args.rank ? here.args.num_rows : 0;
    if constexpr (kNodes<Plan> > 1) known.rails.across[at] = 0;
  }
  for (u32 at = thread(); at < static_cast<u32>(Plan::kWaves); at += num_threads()) known.taken[at] = 0;
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

// How many ranks of a node, of all where there is one, may have a row, and so how many places wait for it, where ranks add up.
template <class Plan>
COMMDSL_FN u64 slots_a_row(const Call<Plan>& here) {
  const u64 ranks = static_cast<u64>(Plan::kNode);
  return here.args.keys_a_row < ranks ? here.args.keys_a_row : ranks;
}

// The same of nodes, on the row's own rank.
template <class Plan>
COMMDSL_FN u64 nodes_a_row(const Call<Plan>& here) {
  const u64 nodes = static_cast<u64>(kNodes<Plan>);
  return here.args.keys_a_row < nodes ? here.args.keys_a_row : nodes;
}

// How many places there are for what comes from `origin`.
template <class Plan>
COMMDSL_FN u64 places_there(const Call<Plan>& here) {
  if constexpr (kNodes<Plan> > 1) {
    return here.args.crossing_rows * slots_a_row(here);
  } else {
    return here.args.waiting_rows;
  }
}

// The place on its source that waits for what comes from `origin`; past all of them where the slot there is not.
template <class Plan>
COMMDSL_FN u64 place_of(const Call<Plan>& here, const Origin& origin) {
  if constexpr (Plan::kAddsHere) {
    const u64 slots = slots_a_row(here);
    const u64 place = origin.entry / here.args.keys_a_row * slots + origin.slot;
    return origin.slot < slots ? place : places_there(here) + origin.slot;
  } else {
    return origin.entry;
  }
}

// Whether there is such a place; if not, it is reported when all is done.
template <class Plan>
COMMDSL_FN bool is_there(const Call<Plan>& here, Returning<Plan>& known, u64 at, const Origin& origin, u64 place) {
  if (origin.source < static_cast<u64>(Plan::kNumRanks) && place < places_there(here)) return true;
  known.bad = at + 1;
  return false;
}

template <class Plan>
COMMDSL_FN void count_sent(Returning<Plan>& known, u64 source) {
  if constexpr (Plan::kChecks) add_shared(&known.sent[source], u64{1});
}

// How many waves there are, on all ranks alike: as many as have enough rows, of the rank with the most.
template <class Plan>
COMMDSL_FN u64 most_rows(const Returning<Plan>& known) {
  u64 most = 0;
  for (i32 rank = 0; rank < Plan::kNumRanks; ++rank) most = known.rows[rank] > most ? known.rows[rank] : most;
  return most;
}

template <class Plan>
COMMDSL_FN i32 num_waves(const Returning<Plan>& known) {
  const u64 waves = most_rows(known) / kWaveRows, most = static_cast<u64>(Plan::kWaves);
  return static_cast<i32>(waves < 1 ? 1 : waves < most ? waves : most);
}

template <class Plan>
COMMDSL_FN Wave wave_of(const Returning<Plan>& known, i32 wave) {
  const u64 rows = most_rows(known), waves = static_cast<u64>(num_waves(known));
  const u64 first = rows * static_cast<u64>(wave) / waves;
  return {first, rows * static_cast<u64>(wave + 1) / waves - first};
}

// How many lanes send. Of many the last quarter only finish, where several waves are sent and finished in one launch: so rows are on
// their way while others are finished. A quarter of what is read and written belongs to finishing: of 2 ranks 3 rows of 13, of 4 ranks
// 5 of 16, for 8 keys a row. With few lanes all are busy all the time.
template <class Plan>
COMMDSL_FN i32 num_senders(const Call<Plan>& here, const Returning<Plan>& known) {
  const i32 lanes = here.args.active_lanes;
  return here.args.half == kWhole && lanes >= kManyLanes && num_waves(known) > 1 ? lanes - (lanes + 3) / 4 : lanes;
}

// The lanes that finish a wave: those that only finish, if there are any; but all finish the last, behind which nothing is sent.
struct Finishers {
  i32 first, count;
};

template <class Plan>
COMMDSL_FN Finishers finishers_of(const Call<Plan>& here, const Returning<Plan>& known, i32 wave) {
  const i32 lanes = here.args.active_lanes, senders = num_senders(here, known);
  const i32 first = senders < lanes && wave + 1 < num_waves(known) ? senders : 0;
  return {first, lanes - first};
}

// Whether the lane has rows of a wave to finish; if not, it need not wait for them.
template <class Plan>
COMMDSL_FN bool finishes(const Call<Plan>& here, const Returning<Plan>& known, i32 wave) {
  return here.lane >= finishers_of(here, known, wave).first;
}

}  // namespace commdsl
