// Rows on their way to places that a table names: straight to the output there, or to where they wait for the rank that owns them
// to copy or sum them.
// Assumes a table that passed commdsl's laws (with COMMDSL_CHECK the kernel looks itself). Decides nothing: where rows go is in the
// table, and what comes before and after is printed from the Plan. Nothing here waits for another rank or lane, or tells it.
#pragma once

#include "commdsl/calls.cuh"
#include "commdsl/elements.cuh"
#ifdef __CUDACC__
#include "commdsl/runs.cuh"
#else
#include "commdsl/host_runs.hpp"
#endif

namespace commdsl {

// --- what a warp moves ---------------------------------------------------------------------------------------------------

// Rows that a warp moves at once. There may be none: a send has fewer tiles than others.
struct Tile {
  u32 source_row, dest_row, rows;
  i32 to, tensor;
  bool waits;
};

// What a warp does at once of a run of rows: how many of them, from the one that is told.
COMMDSL_FN u32 cut(u32& first, u32 rows, u32 tile_rows, u32 tile) {
  first = tile * tile_rows;
  if (first >= rows) return 0;
  return rows - first < tile_rows ? rows - first : tile_rows;
}

// The tiles of sends are numbered as if all had as many.
template <class Plan>
COMMDSL_FN Tile tile_of(const Call<Plan>& here, u32 at) {
  const TableHead& head = *here.table;
  const Send& send = here.sends()[at / head.send_tiles];
  Tile tile = {send.source_row, send.dest_row, send.rows, static_cast<i32>(send.where & 0xffffu),
               static_cast<i32>(send.where >> 16 & 0xffu), (send.where >> 24) != 0};
  const u32 width = tile.tensor < Plan::kNumRows ? static_cast<u32>(here.args.row_bytes[tile.tensor]) : 0;
  if (width == 0) return tile;  // of no tensor that there is
  u32 skip;
  tile.rows = cut(skip, send.rows, width < head.tile_bytes ? head.tile_bytes / width : 1, at % head.send_tiles);
  tile.source_row += skip;
  tile.dest_row += skip;
  return tile;
}

template <class Plan>
COMMDSL_FN const char* source_of(const Call<Plan>& here, const Tile& tile) {
  return reinterpret_cast<const char*>(here.args.inputs[tile.tensor] + tile.source_row * here.args.row_bytes[tile.tensor]);
}

// Those who move a tile together, a warp or a part of one, and which tiles they have.
struct Team {
  u32 thread, threads;
  u32 first, step;

  template <class Plan>
  COMMDSL_FN explicit Team(const Call<Plan>& here) {
    const bool is_warp = kHasFar || here.table->threads > kWarp;  // a put is a warp's
    threads = is_warp ? kWarp : here.table->threads;
    thread = thread_of_warp() % threads;
    const u32 of_warp = kWarp / threads, number = static_cast<u32>(here.lane) * num_warps() + warp();
    first = number * of_warp + thread_of_warp() / threads;
    step = static_cast<u32>(here.args.active_lanes) * num_warps() * of_warp;
  }
  // Its first from that one on.
  COMMDSL_FN u32 from(u32 tile) const { return tile <= first ? first : first + (tile - first + step - 1) / step * step; }
  COMMDSL_FN u32 count(u32 begin, u32 end) const { return begin < end ? (end - begin + step - 1) / step : 0; }
};

// What a team moves first, read while peers still say where to.
template <class Plan>
struct Ahead {
  Team team;
  u32 waiting, tiles;  // those that lead to where rows wait, and all
  Tile tile{};
  Beginning beginning;

  COMMDSL_FN explicit Ahead(const Call<Plan>& here)
      : team(here), waiting(here.table->waiting_sends * here.table->send_tiles), tiles(here.table->sends * here.table->send_tiles) {
    if (team.first >= tiles) return;
    tile = tile_of(here, team.first);
    if constexpr (!Plan::kChecks && !kHasFar) {  // with checks it is not legal yet
      if (team.threads == kWarp) beginning.read(source_of(here, tile), tile.rows * here.args.row_bytes[tile.tensor]);
    }
  }
};

// --- what needs no meeting -----------------------------------------------------------------------------------------------

// The rank itself, and where rows wait.
template <class Plan>
COMMDSL_FN void prepare(const Call<Plan>& here, Peers<Plan>& peers) {
  const i32 rank = here.args.rank;
  if (thread() == 0) peers.sum = 0;
  for (u32 at = thread(); at < static_cast<u32>(Plan::kNumRanks * Plan::kNumRows); at += num_threads()) {
    const i32 peer = static_cast<i32>(at) / Plan::kNumRows, tensor = static_cast<i32>(at) % Plan::kNumRows;
    peers.waiting[peer][tensor] = here.args.heap[peer] + here.args.waiting[tensor];
    if (tensor == 0) peers.sent[peer] = 0;
    if (peer != rank) continue;
    peers.output[rank][tensor] = here.args.outputs[tensor];
    peers.rows[rank][tensor] = here.args.output_rows[tensor];
    peers.lanes[rank] = here.args.active_lanes;
  }
  block_barrier();
}

// --- moving --------------------------------------------------------------------------------------------------------------

// Whether a tile stays within its tensors; what does not is not moved, and the rank reports it.
template <class Plan>
COMMDSL_FN bool is_legal(const Call<Plan>& here, const Peers<Plan>& peers, const Tile& tile, u32 index) {
  // Rows for a rank that is far wait there; those that wait go first.
  const bool known = tile.to < Plan::kNumRanks && tile.tensor < Plan::kNumRows && (tile.waits || is_near(here.args, tile.to)) &&
                     tile.waits == (index < here.table->waiting_sends);
  const u64 source_end = u64{tile.source_row} + tile.rows, dest_end = u64{tile.dest_row} + tile.rows;
  const u64 source_room = known ? here.args.input_rows[tile.tensor] : 0;
  const u64 dest_room = !known ? 0 : tile.waits ? here.args.waiting_rows[tile.tensor] : peers.rows[tile.to][tile.tensor];
  if (known && source_end <= source_room && dest_end <= dest_room) return true;
  const bool source = source_end > source_room;
  give_up(here, kBadTile, static_cast<i32>(index), tile.to, source ? source_room : dest_room, source ? source_end : dest_end);
  return false;
}

// `beginning`: what has been read of it, if anything.
template <class Plan>
COMMDSL_FN void move(const Call<Plan>& here, const Peers<Plan>& peers, const Tile& tile, const Team& team, const Beginning& beginning) {
  const u64 width = here.args.row_bytes[tile.tensor], bytes = tile.rows * width;
  const char* source = source_of(here, tile);
  if constexpr (kHasFar) {
    if (!is_near(here.args, tile.to)) {
      return put_run(here.args, tile.to, here.args.waiting[tile.tensor] + tile.dest_row * width, source, bytes);
    }
  }
  const u64 base = (tile.waits ? peers.waiting : peers.output)[tile.to][tile.tensor];
  char* dest = reinterpret_cast<char*>(base + tile.dest_row * width);
  if (team.threads < kWarp) return copy_short(dest, source, bytes, team.thread, team.threads);
  const u64 done = beginning.write(dest);
  copy_run(dest + done, source + done, bytes - done);
}

// `at`: which tile it is.
template <class Plan>
COMMDSL_FN void push(const Call<Plan>& here, Peers<Plan>& peers, const Tile& tile, u32 at, const Team& team, const Beginning& beginning = {}) {
  if (tile.rows == 0) return;
  if constexpr (Plan::kChecks) {
    if (!is_legal(here, peers, tile, at / here.table->send_tiles)) return;
    if (team.thread == 0) add_shared(&peers.sent[tile.to], tile.rows);
  }
  move(here, peers, tile, team, beginning);
}

// The team's tiles from `at`, which is one, to `end`. Out of line, so that what is kept for other phases does not take its registers.
template <class Plan>
COMMDSL_CALL void push_tiles(const Call<Plan>& here, Peers<Plan>& peers, const Team team, u32 at, u32 end) {
  if (at >= end) return;
  Tile next = tile_of(here, at);
  for (; at < end; at += team.step) {
    const Tile tile = next;
    if (at + team.step < end) next = tile_of(here, at + team.step);  // comes while this one is moved
    push(here, peers, tile, at, team);
  }
}

// As above, where the first may be the one that was read ahead.
template <class Plan>
COMMDSL_FN void push_from(const Call<Plan>& here, Peers<Plan>& peers, const Ahead<Plan>& ahead, u32 at, u32 end) {
  const Team& team = ahead.team;
  const bool is_first = at == team.first && at < end;
  if (is_first) push(here, peers, ahead.tile, at, team, ahead.beginning);
  push_tiles(here, peers, team, is_first ? at + team.step : at, end);
}

template <class Plan>
COMMDSL_FN void push_waiting(const Call<Plan>& here, Peers<Plan>& peers, const Ahead<Plan>& ahead) {
  push_from(here, peers, ahead, ahead.team.first, ahead.waiting);
}

// A warp that finishes leaves some of what it pushes for then: one tile for so many that it finishes, which take memory as long as
// that one takes the link.
constexpr u32 kBeside = 4;

template <class Plan>
COMMDSL_FN u32 first_left(const Call<Plan>& here, const Ahead<Plan>& ahead) {
  const Team& team = ahead.team;
  const u32 begin = team.from(ahead.waiting), finishes = team.count(team.first, here.table->finishes * here.table->finish_tiles);
  const u32 left = here.table->waits == 0 || team.threads < kWarp ? 0 : finishes / kBeside, all = team.count(begin, ahead.tiles);
  return left == 0 ? ahead.tiles : begin + (left < all ? all - left : 0) * team.step;
}

template <class Plan>
COMMDSL_FN void push_straight(const Call<Plan>& here, Peers<Plan>& peers, const Ahead<Plan>& ahead) {
  push_from(here, peers, ahead, ahead.team.from(ahead.waiting), first_left(here, ahead));
}

// --- finishing -----------------------------------------------------------------------------------------------------------

// As for a tile.
template <class Plan>
COMMDSL_FN bool is_legal(const Call<Plan>& here, const Finish& tile, u32 index) {
  const bool sums = tile.kind == kFinishSum;
  const bool known = tile.tensor < Plan::kNumRows && tile.kind <= kFinishZero && (!sums || (Plan::kSums && tile.count > 0));
  const u64 before = sums ? (u64{tile.count} - 1) * tile.stride : 0;
  const u64 source_end = tile.kind == kFinishZero ? 0 : tile.source_row + before + tile.rows;
  const u64 dest_end = u64{tile.dest_row} + tile.rows;
  const u64 source_room = known ? here.args.waiting_rows[tile.tensor] : 0;
  const u64 dest_room = known ? here.args.output_rows[tile.tensor] : 0;
  if (known && source_end <= source_room && dest_end <= dest_room) return true;
  const bool source = source_end > source_room;
  give_up(here, kBadFinish, static_cast<i32>(index), here.args.rank, source ? source_room : dest_room,
          source ? source_end : dest_end);
  return false;
}

template <class Plan>
COMMDSL_FN void finish_tile(const Call<Plan>& here, const Finish& tile) {
  const u64 width = here.args.row_bytes[tile.tensor], bytes = tile.rows * width;
  char* dest = reinterpret_cast<char*>(here.args.outputs[tile.tensor] + tile.dest_row * width);
  const char* source = reinterpret_cast<const char*>(here.args.heap[here.args.rank] + here.args.waiting[tile.tensor] +
                                                     tile.source_row * width);
  if (tile.kind == kFinishCopy) {
    copy_run(dest, source, bytes);
  } else if (tile.kind == kFinishZero) {
    zero_run(dest, bytes);
  } else if constexpr (Plan::kSums) {
    sum_run<typename Plan::Element>(dest, source, bytes, tile.stride * width, tile.count);
  }
}

// A tile of what is finished, numbered as those of sends are.
template <class Plan>
COMMDSL_FN Finish finish_of(const Call<Plan>& here, u32 at) {
  Finish found = here.finishes()[at / here.table->finish_tiles];
  u32 skip;
  found.rows = cut(skip, found.rows, found.tile_rows, at % here.table->finish_tiles);
  found.source_row += skip;
  found.dest_row += skip;
  return found;
}

// `beside` is called before each tile.
template <class Plan, class Beside>
COMMDSL_FN void finish_all(const Call<Plan>& here, const Beside& beside) {
  const u32 step = static_cast<u32>(here.args.active_lanes) * num_warps();
  const u32 tiles = here.table->finishes * here.table->finish_tiles;
  for (u32 at = static_cast<u32>(here.lane) * num_warps() + warp(); at < tiles; at += step) {
    beside();
    const Finish tile = finish_of(here, at);
    if (tile.rows == 0) continue;
    if constexpr (Plan::kChecks) {
      if (!is_legal(here, tile, at / here.table->finish_tiles)) continue;
    }
    finish_tile(here, tile);
  }
}

template <class Plan>
COMMDSL_FN void finish(const Call<Plan>& here) {
  finish_all(here, [] {});
}

// With what the warp has left to push.
template <class Plan>
COMMDSL_FN void finish_beside(const Call<Plan>& here, Peers<Plan>& peers, const Ahead<Plan>& ahead) {
  u32 left = first_left(here, ahead), turn = 0;
  finish_all(here, [&] {
    if (++turn % kBeside != 0 || left >= ahead.tiles) return;
    push_tiles(here, peers, ahead.team, left, left + 1);
    left += ahead.team.step;
  });
}

// --- the table itself ----------------------------------------------------------------------------------------------------

// Whether its head is what the host wrote: with another one a lane would read beyond the table.
template <class Plan>
COMMDSL_FN bool is_whole(const Call<Plan>& here) {
  const TableHead& head = *here.table;
  const u32 meant = head.threads ^ head.tile_bytes ^ head.send_tiles ^ head.finish_tiles ^ head.waiting_sends ^ head.waits;
  const u32 found = ~(head.sends ^ head.finishes ^ head.finishes_at ^ meant);
  if (head.check != found) give_up(here, kBadTable, 0, here.args.rank, head.check, found);
  return head.check == found;
}

// Whether the rest is. One lane looks, when rows that lead out of their tensors have been reported.
template <class Plan>
COMMDSL_FN void check_words(const Call<Plan>& here, Peers<Plan>& peers) {
  const u32* words = reinterpret_cast<const u32*>(here.table + 1);
  const u64 count = static_cast<u64>(reinterpret_cast<const u32*>(here.rows_expected() + Plan::kNumRanks) - words);
  u64 sum = 0;
  for (u64 at = thread(); at < count; at += num_threads()) sum += words[at];
  add_shared(&peers.sum, sum);
  block_barrier();
  const u32 found = static_cast<u32>(peers.sum);
  if (thread() == 0 && found != here.table->sum) give_up(here, kBadTable, 1, here.args.rank, here.table->sum, found);
}

// Before anything is told: false for a table that would lead a lane beyond its end.
template <class Plan>
COMMDSL_FN bool begin(const Call<Plan>& here) {
  if constexpr (Plan::kChecks) {
    if (!is_whole(here)) return false;
  }
  return true;
}

// When all is done.
template <class Plan>
COMMDSL_FN void end(const Call<Plan>& here, Peers<Plan>& peers) {
  if constexpr (Plan::kChecks) {
    if (here.lane == 0) check_words(here, peers);
  }
}

}  // namespace commdsl
