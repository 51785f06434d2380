// Rows that went to the ranks of their keys on their way back: one for each key, or what a rank adds up of a row, and the sum at home;
// or a number for each key.
// Assumes mates as the call there left them, and trusts none of them where it leads out of the room. What comes before and after is
// printed from the Plan. Nothing here waits for another rank or lane, or tells it.
#pragma once

#include "commdsl/returning.cuh"
#include "commdsl/carrier.cuh"

namespace commdsl {

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
COMMDSL_FN u64 pieces_for_all(u64 rows, u64 workers) {
  return rows * 2 > workers ? 1 : rows * 16 > workers ? workers / rows : 16;
}

// The places on this rank of a row of the rank `source`, in the order of its keys. False if one of them there is not.
template <class Plan>
COMMDSL_FN bool find_mates(const Call<Plan>& here, i32 source, u64 row, u64 places, Parts& parts, u32& count) {
  const auto& args = here.args;
  const i32* mates = reinterpret_cast<const i32*>(args.mates) + (static_cast<u64>(source) * args.most_rows + row) * args.keys_a_row;
  u32 wrong = 0;
  count = 0;
  for (u64 from = 0; from < args.keys_a_row; from += kWarp) {
    const u64 which = from + thread_of_warp();
    const i32 mate = which < args.keys_a_row ? mates[which] : -1;
    const bool has = mate != -1, is_held = has && static_cast<u32>(mate) < places;
    float times = 1;
    if constexpr (Plan::kWeighsHere) times = is_held ? reinterpret_cast<const float*>(args.weights)[mate] : 0;
    const u64 origin = is_held ? origin_at(here, static_cast<u64>(mate)) : 0;
    const Equals held = among_equals(is_held ? 1 : 0), equals = among_equals(has ? 1 : 0);
    if (is_held && count + held.before == 0) parts.origin = origin;
    const u32 before = count;
    count = parts.append(count, is_held, static_cast<u32>(mate), times);
    wrong += (has ? equals.count : kWarp - equals.count) - (count - before);
  }
  warp_barrier();
  return wrong == 0;
}

// Where what this rank adds up goes, as an offset in a heap: that of the row's own rank, or of its rail in this node.
template <class Plan>
COMMDSL_FN Way way_home(const Call<Plan>& here, const Origin& origin, u64 place) {
  const i32 source = static_cast<i32>(origin.source);
  if constexpr (kNodes<Plan> > 1) {
    const i32 rail = here.args.rank / Plan::kNode * Plan::kNode + source % Plan::kNode;
    const u64 before = crossing_row(here, nodes_to(here, static_cast<u32>(source)), 0) * slots_a_row(here);
    return {rail, here.args.crossing[0] + (before + place) * here.args.row_bytes};
  } else {
    return {source, here.args.waiting + place * here.args.row_bytes};
  }
}

// A piece of a sum of rows that goes there. To a rank that is far it goes whole, by way of a row of the rank's own heap: a put takes
// what lies in memory.
template <class Plan>
COMMDSL_FN Sum sum_for(const Call<Plan>& here, const Way& way, const char* rows, const Part& part, u32 count) {
  const auto& args = here.args;
  if constexpr (kHasFar) {
    if (!is_near(args, way.rank)) {
      char* staged = reinterpret_cast<char*>(args.heap[args.rank] + args.staging + worker(here) * args.row_bytes);
      return {staged, rows, part.begin == 0 ? static_cast<u32>(args.row_bytes) : 0, count, way.rank, way.to};
    }
  }
  char* to = reinterpret_cast<char*>(args.heap[way.rank] + way.to);
  return {to + part.begin, rows + part.begin, static_cast<u32>(part.bytes), count, way.rank, way.to};
}

// When it is stored.
template <class Plan>
COMMDSL_FN void send_far(const Call<Plan>& here, const Sum& sum) {
  if constexpr (kHasFar) {
    if (is_near(here.args, sum.rank) || sum.bytes == 0) return;
    stored();
    put_run(here.args, sum.rank, sum.place, sum.to, sum.bytes);
    warp_barrier();  // the next sum is written over this one
  }
}

// Into how many pieces the rows of a lane are cut, of a warp each, where there are fewer rows than warps: of many two for each warp, as
// they take unequal times, of few one, as each costs some.
COMMDSL_FN u32 pieces_for(u64 rows) {
  const u64 wanted = rows * 2 <= num_warps() ? num_warps() : 2 * num_warps();
  return rows == 0 || rows >= wanted ? 1 : rows * 16 > wanted ? static_cast<u32>((wanted + rows - 1) / rows) : 16;
}

// Whose low bits say how rows are aligned wherever they lie, here and on other ranks: heaps are.
template <class Plan>
COMMDSL_FN u64 alignment_bits(const Call<Plan>& here, u64 tensor) {
  return here.args.row_bytes | here.args.waiting | tensor;
}

// The sums of a wave that are a lane's: their numbers among those of all lanes. None of one that sends none.
struct Share {
  u64 first, count;
};

COMMDSL_FN Share share_of(u64 sums, i32 lane, i32 lanes) {
  if (lane >= lanes) return {0, 0};
  const u64 first = sums * static_cast<u64>(lane) / static_cast<u64>(lanes);
  return {first, sums * static_cast<u64>(lane + 1) / static_cast<u64>(lanes) - first};
}

// The sum that one of the lane's warps takes, or a piece of it; none if all are taken. Of each row the ranks take turns, so that at any
// time rows go to all of them.
template <class Plan>
COMMDSL_FN Sum next_sum(const Call<Plan>& here, Returning<Plan>& known, const Wave& wave, const Share& share, u32 pieces, u32& taken,
                        Parts& parts) {
  const auto& args = here.args;
  const u64 places = num_places(here, known), ranks = static_cast<u64>(Plan::kNumRanks);
  for (;;) {
    const u32 item = of_first_thread(thread_of_warp() == 0 ? take_shared(&taken) : 0), piece = item % pieces;
    if (item / pieces >= share.count) return {};
    const u64 number = share.first + item / pieces, row = wave.first + number / ranks;
    const i32 source = static_cast<i32>((number + row) % ranks);
    if (row >= known.rows[source] || row >= args.most_rows) continue;
    u32 count;
    if (!find_mates(here, source, row, places, parts, count)) {
      known.apart = static_cast<u64>(source) * args.most_rows + row + 1;
      continue;
    }
    if (count == 0) continue;  // its keys are elsewhere
    const Origin origin(parts.origin);
    const u64 place = place_of(here, origin);
    const bool is_its = origin.source == static_cast<u64>(source) && origin.entry / args.keys_a_row == row;
    if (!is_there(here, known, parts.at[0], origin, place) || !is_its) {
      known.bad = parts.at[0] + 1;
      continue;
    }
    if (piece == 0 && thread_of_warp() == 0) count_sent(known, origin.source);
    const char* given = reinterpret_cast<const char*>(args.given);
    return sum_for(here, way_home(here, origin, place), given, part_of(args.row_bytes, piece, pieces), count);
  }
}

// For each row of a wave that was received, however often, the sum of what became of it to the place on its source that waits for this
// rank's.
template <class Plan>
COMMDSL_FN void push_sums(const Call<Plan>& here, Returning<Plan>& known, i32 number = 0) {
  if constexpr (kNodes<Plan> > 1) send_sums(here);
  const Wave wave = wave_of(known, number);
  const Share share = share_of(wave.rows * static_cast<u64>(Plan::kNumRanks), here.lane, num_senders(here, known));
  const u32 pieces = pieces_for(share.count);
  Carrier<Plan> carrier;
  carrier.template add_each<typename Plan::Element, Plan::kWeighsHere>(
      alignment_bits(here, here.args.given), here.args.row_bytes, known.parts[warp()],
      [&](Parts& parts) { return next_sum(here, known, wave, share, pieces, known.taken[number], parts); },
      [&](const Sum& sum) { send_far(here, sum); });
  carrier.finish();
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
    give_up(here, kBadOrigin, static_cast<i32>(at), static_cast<i32>(origin.source), places_there(here), place_of(here, origin));
  }
  if constexpr (Plan::kAddsHere) {
    if (known.apart > 0) {
      const u64 row = (known.apart - 1) % here.args.most_rows, source = (known.apart - 1) / here.args.most_rows;
      give_up(here, kBadMate, static_cast<i32>(row), static_cast<i32>(source), num_places(here, known), 0);
    }
  }
}

// For each row of a wave the sum of what waits for it, rounded once; `find` finds its parts, and says how many they are.
template <bool weighs, class Plan, class Find>
COMMDSL_FN void finish_each(const Call<Plan>& here, Returning<Plan>& known, const Wave& wave, const Finishers& by, const Find& find) {
  const auto& args = here.args;
  const u64 workers = static_cast<u64>(by.count) * num_warps(), width = args.row_bytes, pieces = pieces_for_all(wave.rows, workers);
  const char* waiting = reinterpret_cast<const char*>(args.heap[args.rank] + args.waiting);
  u64 item = static_cast<u64>(here.lane - by.first) * num_warps() + warp();
  const auto next = [&](Parts& parts) -> Sum {
    const u64 row = wave.first + item / pieces;
    if (item >= wave.rows * pieces || row >= args.num_rows) return {};
    const Part part = part_of(width, static_cast<u32>(item % pieces), static_cast<u32>(pieces));
    item += workers;
    const u32 count = find(row, parts);
    warp_barrier();
    char* to = reinterpret_cast<char*>(args.output + row * width + part.begin);
    return {to, waiting + part.begin, static_cast<u32>(part.bytes), count, args.rank, 0};
  };
  Carrier<Plan> carrier;
  carrier.template add_each<typename Plan::Element, weighs>(alignment_bits(here, args.output), width, known.parts[warp()], next,
                                                            [](const Sum&) {});
  carrier.finish();
}

// What came back from the keys of each row, in their order, times the weights if there are.
template <class Plan>
COMMDSL_FN void finish_rows(const Call<Plan>& here, Returning<Plan>& known) {
  const u64 keys = here.args.keys_a_row;
  const Finishers all{0, here.args.active_lanes};
  finish_each<Plan::kWeighs>(here, known, Wave{0, here.args.num_rows}, all, [&](u64 row, Parts& parts) {
    u32 count = 0;
    for (u64 from = 0; from < keys; from += kWarp) {
      const u64 which = from + thread_of_warp();
      const bool has = rank_of(here, row, which) != kNowhere;
      float times = 1;
      if constexpr (Plan::kWeighs) times = has ? reinterpret_cast<const float*>(here.args.weights)[row * keys + which] : 0;
      count = parts.append(count, has, static_cast<u32>(row * keys + which), times);
    }
    return count;
  });
}

// Who sends home what has this key of a row: a rank, or a node of several.
template <class Plan>
COMMDSL_FN u32 adder_of(const Call<Plan>& here, u64 row, u64 which) {
  const u32 rank = rank_of(here, row, which);
  return kNodes<Plan> == 1 || rank == kNowhere ? rank : rank / Plan::kNode;
}

// How many of them there are for a row. All threads of a warp ask.
template <class Plan>
COMMDSL_FN u32 num_adders_of(const Call<Plan>& here, u64 row) {
  u32 count = 0;
  if constexpr (kWarp >= kMostKeysARow) {
    const u32 rank = adder_of(here, row, thread_of_warp());
    const Equals same = among_equals(rank);  // every thread asks, also one without a rank
    const bool is_first = rank != kNowhere && same.before == 0;
    const Equals equals = among_equals(is_first ? 1 : 0);
    count = is_first ? equals.count : kWarp - equals.count;
  } else {
    for (u64 which = 0; which < here.args.keys_a_row; ++which) {
      const u32 rank = adder_of(here, row, which);
      bool is_first = rank != kNowhere;
      for (u64 before = 0; before < which; ++before) is_first = is_first && adder_of(here, row, before) != rank;
      count += is_first;
    }
  }
  return count;
}

// For each row of a wave the sums that came back from ranks, or from nodes, added up in their order, rounded once.
template <class Plan>
COMMDSL_FN void finish_sums(const Call<Plan>& here, Returning<Plan>& known, i32 wave = 0) {
  const u64 slots = kNodes<Plan> > 1 ? nodes_a_row(here) : slots_a_row(here);
  finish_each<false>(here, known, wave_of(known, wave), finishers_of(here, known, wave), [&](u64 row, Parts& parts) {
    const u32 count = num_adders_of(here, row);
    for (u32 slot = thread_of_warp(); slot < count; slot += kWarp) parts.at[slot] = static_cast<u32>(row * slots + slot);
    return count;
  });
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
