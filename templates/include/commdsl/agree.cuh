// What a rank tells all ranks of every call, and what it holds them to. Which ranks it hears in the same call is printed from the Plan.
// Assumes waiting.cuh, arguments that say the digest of a call (`call`), and `Plan` with `hears`. Waits for no lane, and no lane for it.
//
// Where data carries flags, it carries the call as well (`carries_call`): there is nothing to tell but what the desk says. In other
// Plans a block tells beside the lanes.
//
// A word a call: its number above a digest of all that has to be the same. Slots take turns, so a word is written again kDeskSlots
// calls later. Of ranks that a rank waits for in the call anyway it meets the word of this very call where that costs nothing
// (kMeetsBack = 0: on the processor); on a GPU that of the call before, which has long come: a wait beside those of the lanes, however
// short, adds to the time of small calls (6 to 10 % at 1 KB). Lanes that wait long look at the desk of whom they wait for
// (`disagrees`), the host at the words of the last call (`settle`). Of all other ranks it meets the word of `behind` calls before, so
// that nobody is more than that ahead of who has not read.
#pragma once

namespace commdsl {

enum class Ranks { kOwn, kOthers, kAll };

// Whether `peer` is one of them for `rank`.
template <Ranks ranks>
COMMDSL_FN bool is_among(i32 peer, i32 rank) {
  return ranks == Ranks::kAll || (ranks == Ranks::kOwn) == (peer == rank);
}

template <class Plan>
COMMDSL_CALL void report_call(const typename Plan::Args& args, u64 why, i32 peer, u64 number) {
  publish(args, {why, args.rank, kNoLane, kNoLane, peer, 0, 0, number, 0, 0});
}

// Whether a stop ends a call before it begins.
COMMDSL_FN bool ends(u64 stop, u64 number) {
  if (stop == 0 || !has_done_its_part(stop)) return stop != 0;
  return ((number - (stop >> 40)) & 0xffffffu) - 1 < 0x7fffffu;  // it comes behind that one
}

// By the threads of one warp, as a call begins: its number among those that tell, which is told with its digest; 0 where a peer gave up.
// It is counted at once: that all lanes have ended is known when the next call begins.
template <class Plan, Ranks to>
COMMDSL_FN u64 tell_call(const typename Plan::Args& args) {
  const u64 stop = load_relaxed(own_desk(args, kDeskStopped));
  const u64 call = load_relaxed(own_desk(args, kDeskNumber)) + 1;
  const u64 number = load_relaxed(own_desk(args, kDeskTelling)) + 1;
  const u64 word = number << 32 | args.call();
  for (i32 peer = static_cast<i32>(thread_of_warp()); peer < Plan::kNumRanks; peer += static_cast<i32>(kWarp)) {
    if (is_among<to>(peer, args.rank)) post(desks_of(args), peer, told_at(args.rank, number), word);
  }
  warp_barrier();  // all have read the numbers
  if (thread_of_warp() == 0) {
    store_relaxed(reinterpret_cast<u64*>(args.desk[args.rank] + kDeskTelling), number);
    store_marked(reinterpret_cast<u64*>(args.desk[args.rank] + kDeskNumber), call, args.call() | kBegun);
    if (ends(stop, call)) report_call<Plan>(args, kStopped, args.rank, call);
  }
  return ends(stop, call) ? 0 : number;
}

// False for a thread that gave up.
template <class Plan>
COMMDSL_FN bool meet_call(const typename Plan::Args& args, i32 peer, u64 number) {
  u64 seen = 0;
  const auto look = [&] {
    seen = told(args, peer, number);
    return number + static_cast<u64>(static_cast<i64>(static_cast<i32>(static_cast<u32>(seen >> 32) - static_cast<u32>(number))));
  };
  if (!watch(args, peer, look, number, [&](u64 why, u64) { report_call<Plan>(args, why, peer, number); })) return false;
  const u64 mine = told(args, args.rank, number);
  if (!is_of(seen, number) || seen == mine) return true;
  publish(args, {kDisagrees, args.rank, kNoLane, kNoLane, peer, mine & 0xffffffffu, seen & 0xffffffffu, number, 0, 0}, true);
  return false;
}

// --- calls whose data tells ---------------------------------------------------------------------------------------------------

// Before such a call, on the processor: false where a peer gave up.
template <class Plan>
COMMDSL_FN bool may_begin(const typename Plan::Args& args) {
  const u64 number = load_relaxed(own_desk(args, kDeskNumber)) + 1;
  if (!ends(load_relaxed(own_desk(args, kDeskStopped)), number)) return true;
  report_call<Plan>(args, kStopped, args.rank, number);
  return false;
}

// One thread's part in such a call: the desk says the call from its begin, which waits for no load, and counts it at its end.
// What it reads for the end it fetches at the begin, into two words of the lane's: a register would be taken from all threads.
template <class Plan>
struct Turnstile {
  u64* words;

  COMMDSL_FN void enter(const typename Plan::Args& args) const {
    const u64 call = args.call();
    store_begun(reinterpret_cast<u64*>(args.desk[args.rank] + kDeskCall), call | kBegun | kUncounted);
    fetch(&words[0], own_desk(args, kDeskNumber));
    fetch(&words[1], own_desk(args, kDeskStopped));
  }
  COMMDSL_FN void leave(const typename Plan::Args& args) const {
    fetched();
    const u64 number = words[0] + 1;
    store_marked(reinterpret_cast<u64*>(args.desk[args.rank] + kDeskNumber), number, args.call() | kBegun);
    if (ends(words[1], number)) report_call<Plan>(args, kStopped, args.rank, number);
  }
};

// --- calls that a block of their own tells of ---------------------------------------------------------------------------------

// By the threads of one warp, behind `tell_call`. False where one gave up.
template <class Plan, u64 behind>
COMMDSL_FN bool meet_calls(const typename Plan::Args& args, u64 number) {
  static_assert(behind + 2 <= kDeskSlots && kMeetsBack <= behind, "a word is written again when it was read");
  bool alive = number != 0;
  for (i32 peer = static_cast<i32>(thread_of_warp()); peer < Plan::kNumRanks && alive; peer += static_cast<i32>(kWarp)) {
    const u64 back = Plan::hears(args.rank, peer) ? kMeetsBack : behind;
    if (peer != args.rank && number > back) alive = meet_call<Plan>(args, peer, number - back);
  }
  return alive;
}

}  // namespace commdsl
