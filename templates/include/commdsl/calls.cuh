// What ranks and lanes of a role tell each other in a call, and how they wait for it: words that carry the number of the call, and
// counters that hold it. Which of it comes when is printed from the Plan.
// Assumes `Plan` with the constants the template prints, and all lanes of a rank resident at once. Bodies that move rows are in
// rows.cuh: nothing there waits or tells.
#pragma once

#include "commdsl/types.cuh"
#ifdef __CUDACC__
#include "commdsl/device.cuh"
#else
#include "commdsl/host.hpp"
#endif
#include "commdsl/transport.cuh"
#include "commdsl/waiting.cuh"
#include "commdsl/agree.cuh"

namespace commdsl {

// One call of one lane.
template <class Plan>
struct Call {
  const typename Plan::Args& args;
  i32 lane;
  u64 number;  // from 1
  const TableHead* table;

  COMMDSL_FN u64* word(i32 rank, u64 at) const { return reinterpret_cast<u64*>(args.heap[rank] + at); }
  COMMDSL_FN const Send* sends() const { return reinterpret_cast<const Send*>(table + 1); }
  COMMDSL_FN const Finish* finishes() const {
    return reinterpret_cast<const Finish*>(reinterpret_cast<const char*>(table) + table->finishes_at);
  }
  // Behind the finishes: the rows that come from each rank.
  COMMDSL_FN const u64* rows_expected() const { return reinterpret_cast<const u64*>(finishes() + table->finishes); }
  // Whether the lane has rows to finish.
  COMMDSL_FN bool is_busy() const { return static_cast<u32>(lane) * num_warps() < table->finishes * table->finish_tiles; }
};

// What a lane knows of its peers. Shared by the threads of a lane.
template <class Plan>
struct Peers {
  u64 output[Plan::kNumRanks][Plan::kNumRows], waiting[Plan::kNumRanks][Plan::kNumRows];  // addresses
  u64 rows[Plan::kNumRanks][Plan::kNumRows];
  i32 lanes[Plan::kNumRanks];
  u64 sent[Plan::kNumRanks];  // rows, by this lane
  u64 sum;                    // of the words of the table

  // What the rank tells, word by word, and what it makes of a peer's.
  COMMDSL_FN u64 told(const Call<Plan>& here, i32 word) const {
    const auto& args = here.args;
    const i32 tensor = (word - 1) % Plan::kNumRows;
    return word == 0               ? static_cast<u64>(args.active_lanes)
           : word <= Plan::kNumRows ? args.outputs[tensor] - args.heap[args.rank]
                                    : args.output_rows[tensor];
  }
  COMMDSL_FN void learn(const Call<Plan>& here, i32 peer, i32 word, u64 value) {
    const i32 tensor = (word - 1) % Plan::kNumRows;
    if (word == 0) {
      lanes[peer] = static_cast<i32>(value);
    } else if (word <= Plan::kNumRows) {
      output[peer][tensor] = here.args.heap[peer] + value;
    } else {
      rows[peer][tensor] = value;
    }
  }
  // Rows that come from a rank.
  COMMDSL_FN u64 expected(const Call<Plan>& here, i32 peer) const { return here.rows_expected()[peer]; }
};

// Words of `words` values each, a slot for every rank that writes: the number of the call, and the value.
COMMDSL_FN constexpr u64 slot_bytes(i32 words) { return (16 * static_cast<u64>(words) + 63) / 64 * 64; }

// Where a lane of a rank counts its calls on another: lanes of a rank side by side, so that many are looked at at once. `begin`: of
// the counters, of all lanes.
template <class Plan, u64 begin>
COMMDSL_FN u64 lane_at(i32 rank, i32 lane) {
  return begin + static_cast<u64>(rank) * (Plan::kLanes * kFlagStride) + static_cast<u64>(lane) * kDoneStride;
}

// Where a lane of a rank has a word on another.
template <class Plan, u64 begin>
COMMDSL_FN u64 lane_word_at(i32 rank, i32 lane) {
  return begin + static_cast<u64>(rank) * slot_bytes(static_cast<i32>(Plan::kLanes)) + 16 * static_cast<u64>(lane);
}

template <class Plan>
COMMDSL_FN u64 sent_at(i32 rank, i32 lane) {
  return lane_word_at<Plan, Plan::kSentAt>(rank, lane);
}

template <class Plan>
COMMDSL_FN u64 addresses_at(i32 rank) {
  return Plan::kAddressesAt + static_cast<u64>(rank) * slot_bytes(Plan::kAddressWords);
}

// The record of the first lane to give up; `phase` is the place in the Plan, or what a table has wrong.
template <class Plan>
COMMDSL_CALL void give_up(const Call<Plan>& here, u64 code, i32 phase, i32 peer, u64 expected, u64 seen) {
  u64 missing = 0;
  for (i32 rank = 0; rank < Plan::kNumRanks && rank < 64; ++rank) {
    if (!reached(load_relaxed(here.word(here.args.rank, addresses_at<Plan>(rank))), here.number)) missing |= u64{1} << rank;
  }
  publish(here.args, {code, here.args.rank, here.lane, phase, peer, expected, seen, here.number, missing, 0});
}

// Which launch of a call it is (`half`): the one, or one of two.
constexpr i32 kWhole = 0;
constexpr i32 kSends = 1;
constexpr i32 kReceives = 2;

// What a lane keeps from the first of two launches for itself in the second.
template <class Plan>
COMMDSL_FN u64* kept_word(const typename Plan::Args& args, i32 lane, i32 word) {
  const u64 slot = (static_cast<u64>(lane) * Plan::kKeptWords + word) * 16;
  return reinterpret_cast<u64*>(args.heap[args.rank] + Plan::kKeptAt + slot);
}

// Every lane reads the number of the call; the first advances it when every lane of the rank has. In the second of two launches it
// may have been advanced before a lane begins: there it is what the lane kept.
template <class Plan>
COMMDSL_FN Call<Plan> read_calls(const typename Plan::Args& args, i32 lane) {
  if constexpr (Plan::kIsCut) {
    u64 first;
    if (args.half == kReceives) return {args, lane, load_marked(kept_word<Plan>(args, lane, 0), first), nullptr};
  }
  const u64* calls = reinterpret_cast<const u64*>(args.heap[args.rank] + Plan::kCallsAt);
  const TableHead* table = nullptr;
  if constexpr (Plan::kKeys == 0) table = reinterpret_cast<const TableHead*>(args.table);
  return {args, lane, load_relaxed(calls) + 1, table};
}

template <class Plan>
COMMDSL_FN void tell_calls(const Call<Plan>& here) {
  if (thread() == 0) store_relaxed(here.word(here.args.rank, Plan::kCallsAt), here.number);
}

// --- kept: what a lane knows of a call that is two launches ----------------------------------------------------------------------

template <class Plan, class Known>
COMMDSL_FN void tell_kept(const Call<Plan>& here, const Known& known) {
  block_barrier();  // what one thread learned another keeps
  for (u32 at = thread(); at < static_cast<u32>(Plan::kKeptWords); at += num_threads()) {
    const i32 word = static_cast<i32>(at);
    store_marked(kept_word<Plan>(here.args, here.lane, word), here.number, known.kept(here, word));
  }
}

template <class Plan, class Known>
COMMDSL_FN void read_kept(const Call<Plan>& here, Known& known) {
  prepare(here, known);
  for (u32 at = thread(); at < static_cast<u32>(Plan::kKeptWords); at += num_threads()) {
    const i32 word = static_cast<i32>(at);
    u64 value;
    load_marked(kept_word<Plan>(here.args, here.lane, word), value);
    known.recall(here, word, value);
  }
  block_barrier();
}

// --- addresses: how many lanes a rank has in this call, and what else its peers have to know before rows go to it ----------------

template <Ranks to, class Plan, class Known>
COMMDSL_FN void tell_addresses(const Call<Plan>& here, const Known& known) {
  for (u32 at = thread(); at < static_cast<u32>(Plan::kNumRanks * Plan::kAddressWords); at += num_threads()) {
    const i32 peer = static_cast<i32>(at) / Plan::kAddressWords, word = static_cast<i32>(at) % Plan::kAddressWords;
    if (!is_among<to>(peer, here.args.rank)) continue;
    const u64 at_peer = addresses_at<Plan>(here.args.rank) + 16 * static_cast<u64>(word);
    send_marked(here.args, peer, at_peer, here.number, known.told(here, word));
  }
}

// False when the rank gives up.
template <i32 phase, Ranks of, i32 calls_back, class Plan, class Known>
COMMDSL_FN bool meet_addresses(const Call<Plan>& here, Known& known) {
  bool gave_up = false;
  const u64 expected = here.number - calls_back;
  for (u32 at = thread(); at < static_cast<u32>(Plan::kNumRanks * Plan::kAddressWords) && !gave_up; at += num_threads()) {
    const i32 peer = static_cast<i32>(at) / Plan::kAddressWords, word = static_cast<i32>(at) % Plan::kAddressWords;
    if (!is_among<of>(peer, here.args.rank)) continue;
    const u64* from = here.word(here.args.rank, addresses_at<Plan>(peer)) + 2 * word;
    u64 value = 0;
    gave_up = !watch(here.args, peer, [&] { return see_marked(here.args, peer, from, value); }, expected,
                     [&](u64 why, u64 seen) { give_up(here, why, phase, peer, expected, seen); });
    known.learn(here, peer, word, value);
  }
  return !block_any(gave_up);
}

// --- done: a lane of a rank is through with its rows -----------------------------------------------------------------------------

// Where a wave's counters are, behind those of the first.
template <class Plan>
COMMDSL_FN u64 wave_at(i32 wave) {
  return static_cast<u64>(wave) * (Plan::kNumRanks * Plan::kLanes * kFlagStride);
}

template <Ranks to, u64 begin, class Plan>
COMMDSL_FN void tell_lanes(const Call<Plan>& here, i32 wave = 0, i32 waves = 1) {
  complete(here.args);
  block_barrier();
  const i32 rank = here.args.rank;
  for (u32 at = thread(); at < static_cast<u32>(Plan::kNumRanks * waves); at += num_threads()) {
    const i32 peer = static_cast<i32>(at) / waves;
    const u64 counter = lane_at<Plan, begin>(rank, here.lane) + wave_at<Plan>(wave + static_cast<i32>(at) % waves);
    if (is_among<to>(peer, rank)) raise_flag(here.args, peer, counter, here.number);
  }
}

template <Ranks to, class Plan>
COMMDSL_FN void tell_done(const Call<Plan>& here) {
  tell_lanes<to, Plan::kDoneAt>(here);
}

// With a wave of its rows. Behind the last of a call there is none: what those that there may be are told by is told at once.
template <Ranks to, class Plan, class Known>
COMMDSL_FN void tell_done(const Call<Plan>& here, const Known& known, i32 wave) {
  tell_lanes<to, Plan::kDoneAt>(here, wave, wave + 1 == num_waves(known) ? Plan::kWaves - wave : 1);
}

// All lanes of these ranks are through. False when the rank gives up.
template <i32 phase, Ranks of, i32 calls_back, u64 begin, class Plan, class Known>
COMMDSL_FN bool meet_lanes(const Call<Plan>& here, const Known& peers, i32 wave = 0) {
  bool gave_up = false;
  const u64 expected = here.number - calls_back;
  for (u32 at = thread(); !gave_up; at += num_threads()) {
    i32 peer = 0, from = static_cast<i32>(at);
    while (peer < Plan::kNumRanks && from >= peers.lanes[peer]) from -= peers.lanes[peer++];
    if (peer == Plan::kNumRanks) break;
    if (!is_among<of>(peer, here.args.rank)) continue;
    gave_up = !poll(here.args, peer, here.word(here.args.rank, lane_at<Plan, begin>(peer, from) + wave_at<Plan>(wave)), expected,
                    [&](u64 why, u64 seen) { give_up(here, why, phase, peer, expected, seen); });
  }
  return !block_any(gave_up);
}

template <i32 phase, Ranks of, i32 calls_back, class Plan, class Known>
COMMDSL_FN bool meet_done(const Call<Plan>& here, const Known& peers, i32 wave = 0) {
  return meet_lanes<phase, of, calls_back, Plan::kDoneAt>(here, peers, wave);
}

// --- came: what a lane sent of the rows that wait is there. Nobody asks where no rank has any -----------------------------------

template <Ranks to, class Plan>
COMMDSL_FN void tell_came(const Call<Plan>& here) {
  if (here.table->waits != 0) tell_lanes<to, Plan::kCameAt>(here);
}

template <i32 phase, Ranks of, i32 calls_back, class Plan, class Known>
COMMDSL_FN bool meet_came(const Call<Plan>& here, const Known& peers) {
  return here.table->waits == 0 || meet_lanes<phase, of, calls_back, Plan::kCameAt>(here, peers);
}

// --- complete: the first lane knows that all rows have come ---------------------------------------------------------------------

template <Ranks to, class Plan>
COMMDSL_FN void tell_complete(const Call<Plan>& here) {
  static_assert(to == Ranks::kOwn, "a number of the rank's own");
  if constexpr (Plan::kKeys == 0) {
    if (here.table->finishes == 0) return;
  }
  if (thread() == 0) store_release(here.word(here.args.rank, Plan::kCompleteAt), here.number);
}

// False when the rank gives up.
template <i32 phase, Ranks of, i32 calls_back, u64 at, class Plan>
COMMDSL_FN bool meet_own(const Call<Plan>& here) {
  static_assert(of == Ranks::kOwn, "a number of the rank's own");
  bool gave_up = false;
  const u64 expected = here.number - calls_back;
  if (thread() == 0) {
    gave_up = !poll(here.args, here.args.rank, here.word(here.args.rank, at), expected,
                    [&](u64 why, u64 seen) { give_up(here, why, phase, here.args.rank, expected, seen); });
  }
  return !block_any(gave_up);
}

template <i32 phase, Ranks of, i32 calls_back, class Plan, class Known>
COMMDSL_FN bool meet_complete(const Call<Plan>& here, const Known&) {
  return meet_own<phase, of, calls_back, Plan::kCompleteAt>(here);
}

// --- sent: the rows that a lane sent to each rank, where the kernel checks --------------------------------------------------------

template <Ranks to, class Plan, class Known>
COMMDSL_FN void tell_sent(const Call<Plan>& here, const Known& peers) {
  if constexpr (Plan::kChecks) {
    block_barrier();
    for (u32 at = thread(); at < static_cast<u32>(Plan::kNumRanks); at += num_threads()) {
      const i32 peer = static_cast<i32>(at);
      if (!is_among<to>(peer, here.args.rank)) continue;
      send_value(here.args, peer, sent_at<Plan>(here.args.rank, here.lane), peers.sent[at]);
    }
  }
}

// Rows that came from each rank against those that were to come.
template <class Plan, class Known>
COMMDSL_FN void read_sent(const Call<Plan>& here, const Known& peers) {
  if constexpr (Plan::kChecks) {
    for (u32 at = thread(); at < static_cast<u32>(Plan::kNumRanks); at += num_threads()) {
      const i32 peer = static_cast<i32>(at);
      u64 came = 0;
      for (i32 from = 0; from < peers.lanes[peer]; ++from) {
        came += load_relaxed(here.word(here.args.rank, sent_at<Plan>(peer, from)));
      }
      const u64 expected = peers.expected(here, peer);
      if (came != expected) give_up(here, kBadCount, 0, peer, expected, came);
    }
  }
}

}  // namespace commdsl
