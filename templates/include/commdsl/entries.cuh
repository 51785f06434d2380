// Rows on their way to the places of their keys: each key of a row, an entry, has a place of its own on the rank that has the key.
// A warp reads a row, or where rows are few a piece of one, once, and stores it to every place that needs it from here.
// Assumes the vocabulary and runs; at most 32 keys a row. Does not know how places are found: keys.cuh counts, again.cuh is told.
#pragma once

#include "commdsl/nodes.cuh"
#include "commdsl/elements.cuh"
#ifdef __CUDACC__
#include "commdsl/runs.cuh"
#else
#include "commdsl/host_runs.hpp"
#endif
#include "commdsl/float8.cuh"

namespace commdsl {

constexpr u32 kChunk = 512;            // entries whose places are found before their rows are moved
constexpr u32 kMostKeysARow = 32;      // a chunk has whole rows, at least as many as a warp may move at once
constexpr u32 kNowhere = 0xffffffffu;  // the position of an entry that is dropped
constexpr u64 kPadding = ~u64{0};      // the origin of a place that has no row
constexpr u64 kFirst = u64{1} << 63;   // in an origin: of the entries of its row on the rank the first

// How often a row travels to one rank: for each of its keys there; once, and the other places are filled there; once, and they are not.
constexpr i32 kEach = 0;
constexpr i32 kOnce = 1;

template <class Plan>
constexpr u32 kKeysARank = static_cast<u32>(Plan::kKeys / Plan::kNumRanks);

template <class Plan>
COMMDSL_FN bool begin(const Call<Plan>&) {
  return true;
}

// Whether there is such a key; the one behind the last drops a row, and is none.
template <class Plan>
COMMDSL_FN bool is_kept(i32 key) {
  return static_cast<u32>(key) < static_cast<u32>(Plan::kKeys);
}

// kNowhere if a row of this key is dropped.
template <class Plan>
COMMDSL_FN u32 position_of(i32 key) {
  return is_kept<Plan>(key) ? Plan::position(static_cast<u32>(key)) : kNowhere;
}

// The rank of a position; of kNowhere one that there is not.
template <class Plan>
COMMDSL_FN u32 rank_at(u32 position) {
  return position == kNowhere ? kNowhere : position / kKeysARank<Plan>;
}

// Where the stretch of a lane begins, of `count` that all lanes share.
template <class Plan>
COMMDSL_FN u64 begin_of(const Call<Plan>& here, u64 count, i32 lane) {
  return count * static_cast<u64>(lane) / static_cast<u64>(here.args.active_lanes);
}

template <class Plan>
COMMDSL_FN u64 num_entries(const Call<Plan>& here) {
  return here.args.num_rows * here.args.keys_a_row;
}

template <class Plan>
COMMDSL_FN i32 key_of(const Call<Plan>& here, u64 entry) {
  return reinterpret_cast<const i32*>(here.args.keys)[entry];
}

// This warp among those of all lanes.
template <class Plan>
COMMDSL_FN u64 worker(const Call<Plan>& here) {
  return static_cast<u64>(here.lane) * num_warps() + warp();
}

template <class Plan>
COMMDSL_FN u64 num_workers(const Call<Plan>& here) {
  return static_cast<u64>(here.args.active_lanes) * num_warps();
}

// The entries of some rows of a lane. Shared by its threads.
struct Entries {
  u32 position[kChunk], place[kChunk];
  u8 first[kChunk];  // whether it is the first of its row on its rank
  u8 slot[kChunk];   // how many ranks with a key of the row are lower than its own, of its own node
  u64 to[num_warps()][kMostKeysARow];  // where the row goes that a warp has in hand; 0: not there
};

// A part of a row: long enough for whole lines, so that a row is shared out where there are fewer rows than warps.
struct Part {
  u64 begin, bytes;
};

COMMDSL_FN Part part_of(u64 width, u32 piece, u32 pieces) {
  const u64 step = pieces == 1 ? width : ((width + pieces - 1) / pieces + 127) & ~u64{127};
  const u64 begin = step * piece < width ? step * piece : width;
  return {begin, width - begin < step ? width - begin : step};
}

// The same of a row that goes in float8, in columns: whole stretches, so that each scale is found by one warp.
COMMDSL_FN Part part_of_stretches(u64 columns, u32 stretch, u32 piece, u32 pieces) {
  const u64 stretches = (columns + stretch - 1) / stretch, share = (stretches + pieces - 1) / pieces * stretch;
  const u64 begin = share * piece < columns ? share * piece : columns;
  return {begin, columns - begin < share ? columns - begin : share};
}

template <class Plan>
COMMDSL_FN void find_slots(Entries& entries, u32 count, u32 keys) {
  for (u32 at = thread(); at < count; at += num_threads()) {
    const u32 rank = rank_at<Plan>(entries.position[at]);
    bool is_first = rank != kNowhere;
    for (u32 other = at - at % keys; other < at; ++other) {
      if (rank_at<Plan>(entries.position[other]) == rank) is_first = false;
    }
    entries.first[at] = is_first;
  }
  block_barrier();
  for (u32 at = thread(); at < count; at += num_threads()) {
    const u32 rank = rank_at<Plan>(entries.position[at]), row = at - at % keys;
    u32 lower = 0;
    for (u32 other = row; other < row + keys; ++other) {
      const u32 before = rank_at<Plan>(entries.position[other]);
      if (entries.first[other] && before < rank && before / Plan::kNode == rank / Plan::kNode) ++lower;
    }
    entries.slot[at] = static_cast<u8>(lower);
  }
}

// Whether the row of an entry is stored from here to the entry's place. One without room is reported when all is done.
template <class Plan, class Known>
COMMDSL_FN bool goes(const Call<Plan>& here, const Known& known, u32 at) {
  const u32 rank = rank_at<Plan>(known.entries.position[at]);
  if (rank == kNowhere || known.entries.place[at] >= known.room[rank]) return false;
  if (Plan::kOften == kEach || known.entries.first[at]) return true;
  return Plan::kOften == kOnce && rank == static_cast<u32>(here.args.rank);
}

// Whether an entry is the first of its row, from `first` on, of those whose keys are on its node.
template <class Plan>
COMMDSL_FN bool is_first_of_node(const Entries& entries, u32 first, u32 at) {
  const u32 node = rank_at<Plan>(entries.position[at]) / Plan::kNode;
  for (u32 other = first; other < at; ++other) {
    const u32 rank = rank_at<Plan>(entries.position[other]);
    if (rank != kNowhere && rank / Plan::kNode == node) return false;
  }
  return true;
}

// Where a row goes from here for one of its entries: an address in what `rank` is reached by; 0: nowhere.
struct Way {
  i32 rank;
  u64 to;
};

// `first`: the first entry of the row in its chunk. To the ranks of another node it goes for the first that has a key there.
template <class Plan, class Known>
COMMDSL_FN Way way_of(const Call<Plan>& here, const Known& known, u64 row, u32 first, u32 at, i32 tensor) {
  const auto& args = here.args;
  const u32 rank = rank_at<Plan>(known.entries.position[at]);
  const u64 width = args.row_bytes[tensor];
  if constexpr (kNodes<Plan> > 1) {
    if (rank != kNowhere && !is_own_node(here, rank)) {
      const i32 nodes = nodes_to(here, rank), rail = rail_after(here, nodes);
      const bool crosses = row < args.crossing_rows && is_first_of_node<Plan>(known.entries, first, at);
      return {rail, crosses ? args.heap[rail] + crossed_at(here, tensor, nodes, row, width) : 0};
    }
  }
  if (!goes(here, known, at)) return {0, 0};
  return {static_cast<i32>(rank), known.output[rank][tensor] + known.entries.place[at] * width};
}

// Into how long stretches of float8 the rows of a tensor are cut on their way; 0: they go as they are.
template <class Plan>
COMMDSL_FN constexpr u32 stretch_of(i32 tensor) {
  return static_cast<u32>(tensor == 0 ? Plan::kStretch0 : tensor == 1 ? Plan::kStretch1 : Plan::kStretch2);
}

// Which result has a tensor's scales: they follow the rows of all.
template <class Plan>
COMMDSL_FN constexpr i32 scales_of(i32 tensor) {
  i32 at = Plan::kGiven;
  for (i32 before = 0; before < tensor; ++before) at += stretch_of<Plan>(before) > 0 ? 1 : 0;
  return at;
}

// The columns from `first` to `last` of a row, whose elements are known only here: 0 is float32, 1 float16, 2 bfloat16.
template <u32 stretch, class Scales>
COMMDSL_FN void quantise(u64 element, const u64* to, u32 count, const Scales& scales, const char* row, u64 first, u64 last) {
  if (element == 0) return quantise_run<float32, stretch>(to, count, scales, row, first, last);
  if (element == 1) return quantise_run<float16, stretch>(to, count, scales, row, first, last);
  quantise_run<bfloat16, stretch>(to, count, scales, row, first, last);
}

// As `push_row`, of one tensor that goes in float8.
template <i32 tensor, class Plan, class Known>
COMMDSL_FN void push_float8(const Call<Plan>& here, Known& known, u64 row, u32 first, u32 piece, u32 pieces) {
  constexpr u32 stretch = stretch_of<Plan>(tensor);
  constexpr i32 beside = scales_of<Plan>(tensor);
  const auto& args = here.args;
  const u32 keys = static_cast<u32>(args.keys_a_row);
  const u64 width = args.row_bytes[tensor], scales_width = args.row_bytes[beside], element = args.elements[tensor];
  const char* source = reinterpret_cast<const char*>(args.inputs[tensor] + row * width * (element == 0 ? 4 : 2));
  const Part part = part_of_stretches(width, stretch, piece, pieces);
  u64* to = known.entries.to[warp()];
  for (u32 k = thread_of_warp(); k < keys; k += kWarp) {
    const Way way = way_of(here, known, row, first, first + k, tensor);
    to[k] = is_near(args, way.rank) ? way.to : 0;
    if (piece == 0 && way.to != 0) count_across(here, known, way.rank, width + scales_width);
  }
  warp_barrier();
  const auto scales = [&](u32 k) { return reinterpret_cast<char*>(way_of(here, known, row, first, first + k, beside).to); };
  quantise<stretch>(element, to, keys, scales, source, part.begin, part.begin + part.bytes);
  warp_barrier();
  if constexpr (kHasFar) {
    char* staged = reinterpret_cast<char*>(args.heap[args.rank] + args.staging + worker(here) * args.staged_bytes);
    char* staged_scales = staged + (width + 15) / 16 * 16;
    bool is_staged = false;
    for (u32 at = first; piece == 0 && at < first + keys; ++at) {
      const Way way = way_of(here, known, row, first, at, tensor), way_of_scales = way_of(here, known, row, first, at, beside);
      if (way.to == 0 || is_near(args, way.rank)) continue;
      if (!is_staged) {
        const u64 own = reinterpret_cast<u64>(staged);
        quantise<stretch>(element, &own, 1, [&](u32) { return staged_scales; }, source, 0, width);
        stored();
        is_staged = true;
      }
      const u64 heap = args.heap[way.rank];
      put_run(args, way.rank, way.to - heap, staged, width);
      put_run(args, way.rank, way_of_scales.to - heap, staged_scales, scales_width);
    }
    warp_barrier();  // the next row is written over this one
  }
}

// Those of a row's tensors that go in float8.
template <i32 tensor, class Plan, class Known>
COMMDSL_FN void push_in_float8(const Call<Plan>& here, Known& known, u64 row, u32 first, u32 piece, u32 pieces) {
  if constexpr (tensor < Plan::kGiven) {
    if constexpr (stretch_of<Plan>(tensor) > 0) push_float8<tensor>(here, known, row, first, piece, pieces);
    push_in_float8<tensor + 1>(here, known, row, first, piece, pieces);
  }
}

// A piece of a row, all tensors of it; `first` is the row's first entry in the chunk.
template <class Plan, class Known>
COMMDSL_FN void push_row(const Call<Plan>& here, Known& known, u64 row, u32 first, u32 piece, u32 pieces) {
  const auto& args = here.args;
  const u32 keys = static_cast<u32>(args.keys_a_row);
  u64* to = known.entries.to[warp()];
  push_in_float8<0>(here, known, row, first, piece, pieces);
  for (i32 tensor = 0; tensor < Plan::kGiven; ++tensor) {
    if (stretch_of<Plan>(tensor) > 0) continue;
    const u64 width = args.row_bytes[tensor];
    const char* source = reinterpret_cast<const char*>(args.inputs[tensor] + row * width);
    const Part part = part_of(width, piece, pieces);
    for (u32 k = thread_of_warp(); k < keys; k += kWarp) {
      const Way way = way_of(here, known, row, first, first + k, tensor);
      to[k] = way.to != 0 && is_near(args, way.rank) ? way.to + part.begin : 0;
      if (piece == 0 && way.to != 0) count_across(here, known, way.rank, width);
    }
    warp_barrier();
    spread_run(to, keys, source + part.begin, part.bytes);
    warp_barrier();
    if constexpr (kHasFar) {
      for (u32 at = first; piece == 0 && at < first + keys; ++at) {
        const Way way = way_of(here, known, row, first, at, tensor);
        if (way.to == 0 || is_near(args, way.rank)) continue;
        // What the peer told, the place of its results in its heap, is what is left of their address.
        put_run(args, way.rank, way.to - args.heap[way.rank], source, width);
      }
    }
  }
}

// A lane's share of so many rows, chunk by chunk. `find`: what finds the places of a chunk, for all threads; `move`: what moves a piece
// of a row, for a warp.
template <class Plan, class Find, class Move>
COMMDSL_FN void over_rows(const Call<Plan>& here, u64 num_rows, const Find& find, const Move& move) {
  const u32 keys = static_cast<u32>(here.args.keys_a_row), rows_a_chunk = kChunk / keys;
  const u64 last = begin_of(here, num_rows, here.lane + 1);
  for (u64 row = begin_of(here, num_rows, here.lane); row < last; row += rows_a_chunk) {
    const u32 rows = static_cast<u32>(last - row < rows_a_chunk ? last - row : rows_a_chunk);
    find(row * keys, rows * keys);
    const u32 pieces = rows < num_warps() ? num_warps() / rows : 1;
    for (u32 item = warp(); item < rows * pieces; item += num_warps()) {
      move(row + item / pieces, item / pieces * keys, item % pieces, pieces);
    }
    block_barrier();
  }
}

// A place of the rank's own that has no row.
template <class Plan, class Known>
COMMDSL_FN void clear_row(const Call<Plan>& here, const Known& known, u64 place) {
  for (i32 tensor = 0; tensor < Plan::kTensors; ++tensor) {
    const u64 width = here.args.row_bytes[tensor];
    zero_run(reinterpret_cast<char*>(known.output[here.args.rank][tensor] + place * width), width);
  }
}

// Rows that came once, to their first places, from there to the other places that they have on the rank: read once. The rank's own
// stored theirs as they pushed them. Mates are another rank's word: none is followed out of the room.
template <class Plan, class Known>
COMMDSL_FN void fill(const Call<Plan>& here, Known& known) {
  const auto& args = here.args;
  const u32 keys = static_cast<u32>(args.keys_a_row);
  const u64 *origins = known.origins(here), room = args.room;
  const i32* mates = known.mates(here);
  const u64 ranks = static_cast<u64>(Plan::kNumRanks);
  const u64 places = known.num_places < room ? known.num_places : room, workers = num_workers(here);
  const u32 pieces = places * 2 > workers ? 1 : places * 16 > workers ? static_cast<u32>(workers / places) : 16;
  u64* to = known.entries.to[warp()];
  for (u64 item = worker(here); item < places * pieces; item += workers) {
    const u64 at = item / pieces, origin = origins[at];
    const u64 source = origin >> 32 & 0xffff, row = (origin & 0xffffffffu) / keys;
    if (origin == kPadding || (origin & kFirst) == 0 || source == static_cast<u64>(args.rank)) continue;
    if (source >= ranks || row >= args.most_rows) continue;
    for (i32 tensor = 0; tensor < Plan::kTensors; ++tensor) {
      const u64 width = args.row_bytes[tensor], output = known.output[args.rank][tensor];
      const Part part = part_of(width, static_cast<u32>(item % pieces), pieces);
      for (u32 k = thread_of_warp(); k < keys; k += kWarp) {
        const i64 mate = mates[(source * args.most_rows + row) * keys + k];
        const bool is_other = mate >= 0 && static_cast<u64>(mate) < room && static_cast<u64>(mate) != at;
        to[k] = is_other ? output + static_cast<u64>(mate) * width + part.begin : 0;
      }
      warp_barrier();
      spread_run(to, keys, reinterpret_cast<const char*>(output + at * width + part.begin), part.bytes);
      warp_barrier();
    }
  }
}

}  // namespace commdsl
