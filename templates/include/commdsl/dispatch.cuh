// A dispatch: rows go to the ranks and places that a table names, straight to the output there, or to a waiting room from which
// the rank that owns it copies or sums them.
// Assumes `Plan` with the constants the template prints, a table that passed commdsl's laws (with COMMDSL_CHECK the kernel looks
// itself), and all lanes of a rank resident at once. Decides nothing: where rows go is in the table.
//
// One call, on every rank:
//   1. the first lane tells every peer that the rank has entered, where its outputs are, and how many lanes it has;
//   2. lanes wait until all peers have entered, and push;
//   3. a lane that is through tells every peer;
//   4. the first lane waits for all lanes of all ranks, tells the other lanes, counts the call; all finish what waits.
// A rank enters when the kernels before are over on its stream, so nobody overwrites rows that are still read; it leaves when all
// rows are there. Every rank tells every peer in every call, also when it sends no row: so calls need no barrier in between.
#pragma once

#include "commdsl/types.cuh"
#ifdef __CUDACC__
#include "commdsl/device.cuh"
#else
#include "commdsl/host.hpp"
#endif
#include "commdsl/elements.cuh"
#include "commdsl/waiting.cuh"
#ifdef __CUDACC__
#include "commdsl/runs.cuh"
#else
#include "commdsl/host_runs.hpp"
#endif

namespace commdsl {

template <class Plan>
using DispatchArgsOf = DispatchArgs<Plan::kNumRanks, Plan::kNumTensors>;

// What a peer says when it enters a call: words of a number, the call's, and a value.
template <i32 num_tensors>
struct alignas(64) Greeting {
  u64 lanes[2];
  u64 outputs[num_tensors][2];  // offsets in the peer's heap
  u64 rows[num_tensors][2];     // room there
};

// What lies at the front of a rank's heap. No two ranks write to one cache line.
template <class Plan>
struct Board {
  static constexpr u64 kDoneBytes = static_cast<u64>(Plan::kMostLanes) * kFlagStride;

  Greeting<Plan::kNumTensors> greeting[Plan::kNumRanks];
  // By rank and lane: the calls it is through with; and the rows it sent here in this one, where the kernel checks.
  alignas(64) char done[Plan::kNumRanks][kDoneBytes];
  alignas(64) u64 rows[Plan::kNumRanks][Plan::kMostLanes];
  // The rank's own, written by its first lane when a call is over.
  alignas(64) u64 calls;
  alignas(64) u64 complete;  // the calls of which all rows have come

  COMMDSL_FN u64* done_by(i32 rank, i32 from) { return reinterpret_cast<u64*>(done[rank] + from * kDoneStride); }
};

// One call of one lane.
template <class Plan>
struct Dispatch {
  const DispatchArgsOf<Plan>& args;
  i32 lane;
  Board<Plan>* board;  // the rank's own
  u64 call;            // from 1
  const TableHead* table;

  COMMDSL_FN Board<Plan>* board_of(i32 rank) const { return reinterpret_cast<Board<Plan>*>(args.heap[rank]); }
  COMMDSL_FN const Send* sends() const { return reinterpret_cast<const Send*>(table + 1); }
  COMMDSL_FN const Finish* finishes() const {
    return reinterpret_cast<const Finish*>(reinterpret_cast<const char*>(table) + table->finishes_at);
  }
  // Behind the finishes: the rows that come from each rank.
  COMMDSL_FN const u64* rows_expected() const {
    return reinterpret_cast<const u64*>(finishes() + table->finishes);
  }
};

// What a lane knows of its peers. Shared by the threads of a lane.
template <class Plan>
struct Peers {
  u64 output[Plan::kNumRanks][Plan::kNumTensors], waiting[Plan::kNumRanks][Plan::kNumTensors];  // addresses
  u64 rows[Plan::kNumRanks][Plan::kNumTensors];
  i32 lanes[Plan::kNumRanks];
  u64 sent[Plan::kNumRanks];  // rows, by this lane
  u64 sum;                    // of the words of the table
};

template <class Plan>
COMMDSL_CALL void give_up(const Dispatch<Plan>& here, u64 code, i32 what, i32 peer, u64 expected, u64 seen) {
  u64 missing = 0;
  for (i32 rank = 0; rank < Plan::kNumRanks && rank < 64; ++rank) {
    if (!reached(load_relaxed(here.board->greeting[rank].lanes), here.call)) missing |= u64{1} << rank;
  }
  publish(here.args.error, {code, here.args.rank, here.lane, what, peer, expected, seen, here.call, missing, 0});
}

// --- entering ------------------------------------------------------------------------------------------------------------

// The words of a greeting by number: the lanes, then an output and the room there for each tensor.
template <class Plan>
constexpr i32 kGreetingWords = 1 + 2 * Plan::kNumTensors;

template <class Plan>
COMMDSL_FN u64* greeting_word(Greeting<Plan::kNumTensors>& greeting, i32 word) {
  return greeting.lanes + 2 * word;
}

template <class Plan>
COMMDSL_FN void announce(const Dispatch<Plan>& here) {
  const auto& args = here.args;
  for (u32 at = thread(); at < static_cast<u32>(Plan::kNumRanks * kGreetingWords<Plan>); at += num_threads()) {
    const i32 peer = static_cast<i32>(at) / kGreetingWords<Plan>, word = static_cast<i32>(at) % kGreetingWords<Plan>;
    const i32 tensor = (word - 1) % Plan::kNumTensors;
    const u64 value = word == 0                     ? static_cast<u64>(args.active_lanes)
                      : word <= Plan::kNumTensors ? args.outputs[tensor] - args.heap[args.rank]
                                                    : args.output_rows[tensor];
    store_marked(greeting_word<Plan>(here.board_of(peer)->greeting[args.rank], word), here.call, value);
  }
}

// False when the rank gives up.
template <class Plan>
COMMDSL_FN bool meet(const Dispatch<Plan>& here, Peers<Plan>& peers) {
  bool gave_up = false;
  for (u32 at = thread(); at < static_cast<u32>(Plan::kNumRanks * kGreetingWords<Plan>) && !gave_up; at += num_threads()) {
    const i32 peer = static_cast<i32>(at) / kGreetingWords<Plan>, word = static_cast<i32>(at) % kGreetingWords<Plan>;
    const i32 tensor = (word - 1) % Plan::kNumTensors;
    if (peer == here.args.rank) continue;
    const u64* from = greeting_word<Plan>(here.board->greeting[peer], word);
    u64 value = 0;
    gave_up = !watch(here.args, [&] { return load_marked(from, value); }, here.call,
                     [&](u64 seen) { give_up(here, kTimedOut, 0, peer, here.call, seen); });
    if (word == 0) {
      peers.lanes[peer] = static_cast<i32>(value);
    } else if (word <= Plan::kNumTensors) {
      peers.output[peer][tensor] = here.args.heap[peer] + value;
    } else {
      peers.rows[peer][tensor] = value;
    }
  }
  return !block_any(gave_up);
}

// What needs no meeting: the rank itself, and where rows wait.
template <class Plan>
COMMDSL_FN void prepare(const Dispatch<Plan>& here, Peers<Plan>& peers) {
  const i32 rank = here.args.rank;
  if (thread() == 0) peers.sum = 0;
  for (u32 at = thread(); at < static_cast<u32>(Plan::kNumRanks * Plan::kNumTensors); at += num_threads()) {
    const i32 peer = static_cast<i32>(at) / Plan::kNumTensors, tensor = static_cast<i32>(at) % Plan::kNumTensors;
    peers.waiting[peer][tensor] = here.args.heap[peer] + here.args.staging[tensor];
    if (tensor == 0) peers.sent[peer] = 0;
    if (peer != rank) continue;
    peers.output[rank][tensor] = here.args.outputs[tensor];
    peers.rows[rank][tensor] = here.args.output_rows[tensor];
    peers.lanes[rank] = here.args.active_lanes;
  }
  block_barrier();
}

// --- moving --------------------------------------------------------------------------------------------------------------

struct Tile {
  u32 source_row, dest_row, rows;
  i32 to, tensor;
  bool waits;
};

COMMDSL_FN Tile tile_of(const Send& send) {
  return {send.source_row, send.dest_row, send.rows, static_cast<i32>(send.where & 0xffffu),
          static_cast<i32>(send.where >> 16 & 0xffu), (send.where >> 24) != 0};
}

// Whether a tile stays within its tensors; what does not is not moved, and the rank reports it.
template <class Plan>
COMMDSL_FN bool is_legal(const Dispatch<Plan>& here, const Peers<Plan>& peers, const Tile& tile, u32 index) {
  const bool known = tile.to < Plan::kNumRanks && tile.tensor < Plan::kNumTensors;
  const u64 source_end = u64{tile.source_row} + tile.rows, dest_end = u64{tile.dest_row} + tile.rows;
  const u64 source_room = known ? here.args.input_rows[tile.tensor] : 0;
  const u64 dest_room = !known ? 0 : tile.waits ? here.args.staging_rows[tile.tensor] : peers.rows[tile.to][tile.tensor];
  if (known && source_end <= source_room && dest_end <= dest_room) return true;
  const bool source = source_end > source_room;
  give_up(here, kBadTile, static_cast<i32>(index), tile.to, source ? source_room : dest_room, source ? source_end : dest_end);
  return false;
}

template <class Plan>
COMMDSL_FN void move(const Dispatch<Plan>& here, const Peers<Plan>& peers, const Tile& tile) {
  const u64 width = here.args.row_bytes[tile.tensor];
  const u64 base = (tile.waits ? peers.waiting : peers.output)[tile.to][tile.tensor];
  copy_run(reinterpret_cast<char*>(base + tile.dest_row * width),
           reinterpret_cast<const char*>(here.args.inputs[tile.tensor] + tile.source_row * width), tile.rows * width);
}

template <class Plan>
COMMDSL_FN void push(const Dispatch<Plan>& here, Peers<Plan>& peers) {
  const u32 step = static_cast<u32>(here.args.active_lanes) * num_warps();
  for (u32 at = static_cast<u32>(here.lane) * num_warps() + warp(); at < here.table->sends; at += step) {
    const Tile tile = tile_of(here.sends()[at]);
    if constexpr (Plan::kChecks) {
      if (!is_legal(here, peers, tile, at)) continue;
      if (thread_of_warp() == 0) add_shared(&peers.sent[tile.to], tile.rows);
    }
    move(here, peers, tile);
  }
}

// Every peer learns that this lane is through.
template <class Plan>
COMMDSL_FN void tell(const Dispatch<Plan>& here, const Peers<Plan>& peers) {
  block_barrier();
  const i32 rank = here.args.rank;
  for (u32 at = thread(); at < static_cast<u32>(Plan::kNumRanks); at += num_threads()) {
    Board<Plan>* board = here.board_of(static_cast<i32>(at));
    if constexpr (Plan::kChecks) store_relaxed(&board->rows[rank][here.lane], peers.sent[at]);
    store_release(board->done_by(rank, here.lane), here.call);
  }
}

// All lanes of all ranks are through. False when the rank gives up.
template <class Plan>
COMMDSL_FN bool await_all_lanes(const Dispatch<Plan>& here, const Peers<Plan>& peers) {
  bool gave_up = false;
  for (u32 at = thread(); !gave_up; at += num_threads()) {
    i32 peer = 0, from = static_cast<i32>(at);
    while (peer < Plan::kNumRanks && from >= peers.lanes[peer]) from -= peers.lanes[peer++];
    if (peer == Plan::kNumRanks) break;
    gave_up = !poll(here.args, here.board->done_by(peer, from), here.call,
                    [&](u64 seen) { give_up(here, kTimedOut, 1, peer, here.call, seen); });
  }
  return !block_any(gave_up);
}

// --- finishing -----------------------------------------------------------------------------------------------------------

// As for a tile.
template <class Plan>
COMMDSL_FN bool is_legal(const Dispatch<Plan>& here, const Finish& tile, u32 index) {
  const bool sums = tile.kind == kFinishSum;
  const bool known = tile.tensor < Plan::kNumTensors && tile.kind <= kFinishZero && (!sums || (Plan::kSums && tile.count > 0));
  const u64 before = sums ? (u64{tile.count} - 1) * tile.stride : 0;
  const u64 source_end = tile.kind == kFinishZero ? 0 : tile.source_row + before + tile.rows;
  const u64 dest_end = u64{tile.dest_row} + tile.rows;
  const u64 source_room = known ? here.args.staging_rows[tile.tensor] : 0;
  const u64 dest_room = known ? here.args.output_rows[tile.tensor] : 0;
  if (known && source_end <= source_room && dest_end <= dest_room) return true;
  const bool source = source_end > source_room;
  give_up(here, kBadFinish, static_cast<i32>(index), here.args.rank, source ? source_room : dest_room,
          source ? source_end : dest_end);
  return false;
}

template <class Plan>
COMMDSL_FN void finish_tile(const Dispatch<Plan>& here, const Finish& tile) {
  const u64 width = here.args.row_bytes[tile.tensor], bytes = tile.rows * width;
  char* dest = reinterpret_cast<char*>(here.args.outputs[tile.tensor] + tile.dest_row * width);
  const char* source = reinterpret_cast<const char*>(here.args.heap[here.args.rank] + here.args.staging[tile.tensor] +
                                                     tile.source_row * width);
  if (tile.kind == kFinishCopy) {
    copy_run(dest, source, bytes);
  } else if (tile.kind == kFinishZero) {
    zero_run(dest, bytes);
  } else if constexpr (Plan::kSums) {
    sum_run<typename Plan::Element>(dest, source, bytes, tile.stride * width, tile.count);
  }
}

template <class Plan>
COMMDSL_FN void finish(const Dispatch<Plan>& here) {
  const u32 step = static_cast<u32>(here.args.active_lanes) * num_warps();
  for (u32 at = static_cast<u32>(here.lane) * num_warps() + warp(); at < here.table->finishes; at += step) {
    const Finish& tile = here.finishes()[at];
    if constexpr (Plan::kChecks) {
      if (!is_legal(here, tile, at)) continue;
    }
    finish_tile(here, tile);
  }
}

// --- leaving -------------------------------------------------------------------------------------------------------------

// Rows that came from each rank against those of the table.
template <class Plan>
COMMDSL_FN void count_rows(const Dispatch<Plan>& here, const Peers<Plan>& peers) {
  for (u32 at = thread(); at < static_cast<u32>(Plan::kNumRanks); at += num_threads()) {
    const i32 peer = static_cast<i32>(at);
    u64 came = 0;
    for (i32 from = 0; from < peers.lanes[peer]; ++from) came += load_relaxed(&here.board->rows[peer][from]);
    const u64 expected = here.rows_expected()[peer];
    if (came != expected) give_up(here, kBadCount, 0, peer, expected, came);
  }
}

// --- the table itself ----------------------------------------------------------------------------------------------------

// Whether its head is what the host wrote: with another one a lane would read beyond the table.
template <class Plan>
COMMDSL_FN bool is_whole(const Dispatch<Plan>& here) {
  const TableHead& head = *here.table;
  const u32 found = ~(head.sends ^ head.finishes ^ head.finishes_at);
  if (head.check != found) give_up(here, kBadTable, 0, here.args.rank, head.check, found);
  return head.check == found;
}

// Whether the rest is. One lane looks, when rows that lead out of their tensors have been reported.
template <class Plan>
COMMDSL_FN void check_words(const Dispatch<Plan>& here, Peers<Plan>& peers) {
  const u32* words = reinterpret_cast<const u32*>(here.table + 1);
  const u64 count = static_cast<u64>(reinterpret_cast<const u32*>(here.rows_expected() + Plan::kNumRanks) - words);
  u64 sum = 0;
  for (u64 at = thread(); at < count; at += num_threads()) sum += words[at];
  add_shared(&peers.sum, sum);
  block_barrier();
  const u32 found = static_cast<u32>(peers.sum);
  if (thread() == 0 && found != here.table->sum) give_up(here, kBadTable, 1, here.args.rank, here.table->sum, found);
}

// By the first lane, when all lanes of all ranks are through: every one of the rank has read the number of the call.
template <class Plan>
COMMDSL_FN void leave(const Dispatch<Plan>& here, Peers<Plan>& peers) {
  if constexpr (Plan::kChecks) count_rows(here, peers);
  if (thread() != 0) return;
  store_relaxed(&here.board->calls, here.call);
  if (here.table->finishes > 0) store_release(&here.board->complete, here.call);
}

// The other lanes learn it from the first: if all looked at every lane's flag, the memory would be busy with that. False when the
// rank gives up.
template <class Plan>
COMMDSL_FN bool await_first_lane(const Dispatch<Plan>& here) {
  bool gave_up = false;
  if (thread() == 0) {
    gave_up = !poll(here.args, &here.board->complete, here.call,
                    [&](u64 seen) { give_up(here, kTimedOut, 1, here.args.rank, here.call, seen); });
  }
  return !block_any(gave_up);
}

// A lane that gave up tells nobody anything more; the heap is then unfit for another call until it is zeroed.
template <class Plan>
COMMDSL_FN void run_dispatch(const DispatchArgsOf<Plan>& args, i32 lane) {
  auto* board = reinterpret_cast<Board<Plan>*>(args.heap[args.rank]);
  const Dispatch<Plan> here{args, lane, board, load_relaxed(&board->calls) + 1,
                            reinterpret_cast<const TableHead*>(args.table)};
  COMMDSL_SHARED Peers<Plan> peers;
  if constexpr (Plan::kChecks) {
    if (!is_whole(here)) return;
  }
  if (lane == 0) announce(here);
  prepare(here, peers);
  if (!meet(here, peers)) return;
  push(here, peers);
  tell(here, peers);
  const bool finishes = static_cast<u32>(lane) * num_warps() < here.table->finishes;
  if (lane == 0 && !await_all_lanes(here, peers)) return;
  if (lane == 0) leave(here, peers);
  if (lane != 0 && finishes && !await_first_lane(here)) return;
  if (finishes) finish(here);
  if constexpr (Plan::kChecks) {
    if (lane == 0) check_words(here, peers);
  }
}

}  // namespace commdsl
