// Waiting for what a peer tells, when a wait ends in vain, and the record that a rank leaves then.
// Assumes transport.cuh, and arguments with the members `rank`, `timeout_ns`, `error`, `desk` and `notice`. Does not know what is
// waited for.
#pragma once

namespace commdsl {

// Flags only grow and may pass 2^64: they are compared by their distance.
COMMDSL_FN bool reached(u64 flag, u64 expected) { return static_cast<i64>(flag - expected) >= 0; }

// Who gave up, for whom it waited, why (a code of ErrorRecord), in which call.
COMMDSL_FN u64 stop_of(i32 rank, i32 peer, u64 code, u64 number) {
  return static_cast<u64>(rank + 1) | (static_cast<u64>(peer) & 0xffffu) << 16 | code << 32 | (number & 0xffffffu) << 40;
}

// A report of rows comes when the rank has done its part of the call: it is the next one that it does not make.
COMMDSL_FN bool has_done_its_part(u64 stop) {
  const u64 code = stop >> 32 & 0xffu;
  return code >= kBadTile && code <= kBadOrigin;
}

// The desks of a group where a transport expects the heaps of a Plan.
struct Desks {
  const u64* heap;
  const u64* pe;
  i32 rank;
};

template <class Arguments>
COMMDSL_FN Desks desks_of(const Arguments& args) {
  if constexpr (kHasFar) {
    return {args.desk, args.pe, args.rank};
  } else {
    return {args.desk, nullptr, args.rank};
  }
}

// How many ranks the group has: a desk each.
template <class Arguments>
COMMDSL_FN constexpr i32 ranks_of(const Arguments&) {
  return static_cast<i32>(sizeof(Arguments::desk) / sizeof(u64));
}

// The word on a desk in which a rank tells of a call.
COMMDSL_FN u64 told_at(i32 rank, u64 number) {
  return kDeskTold + (static_cast<u64>(rank) * kDeskSlots + number % kDeskSlots) * sizeof(u64);
}

COMMDSL_FN bool is_of(u64 told, u64 number) { return told >> 32 == (number & 0xffffffffu); }

template <class Arguments>
COMMDSL_FN const u64* own_desk(const Arguments& args, u64 at) {
  return reinterpret_cast<const u64*>(args.desk[args.rank] + at);
}

// What a peer tells of a call, and what the rank itself does.
template <class Arguments>
COMMDSL_FN u64 told(const Arguments& args, i32 rank, u64 number) {
  return load_relaxed(own_desk(args, told_at(rank, number)));
}

// Whether what a peer tells of the rank's own call, if it does already, is another call.
template <class Arguments>
COMMDSL_FN bool disagrees(const Arguments& args, i32 peer, u64 number) {
  if (number == 0 || peer >= ranks_of(args)) return false;
  const u64 theirs = told(args, peer, number), mine = told(args, args.rank, number);
  return is_of(theirs, number) && is_of(mine, number) && theirs != mine;
}

// The first lane of a rank that has something to say writes the record; the others keep silent. All peers are told, so that none
// waits for what does not come any more; but not that a peer stopped, as that one has told all.
template <class Arguments>
COMMDSL_CALL void publish(const Arguments& args, ErrorRecord found) {
  const u64 number = load_relaxed(own_desk(args, kDeskNumber));
  if (found.code == kStopped) {
    found.expected = told(args, args.rank, number) & 0xffffffffu;
    found.seen = load_relaxed(own_desk(args, kDeskStopped));
  }
  if (found.code == kDisagrees) {
    if (found.lane != kNoLane) found.round = number;
    found.expected = told(args, args.rank, found.round) & 0xffffffffu;
    found.seen = told(args, found.peer, found.round) & 0xffffffffu;
  }
  ErrorRecord* record = reinterpret_cast<ErrorRecord*>(args.error);
  if (!claim(&record->claim)) return;
  store_relaxed(&record->claim, args.timeout_ns | 1);
  record->rank = found.rank;
  record->lane = found.lane;
  record->op = found.op;
  record->peer = found.peer;
  record->expected = found.expected;
  record->seen = found.seen;
  record->round = found.round;
  record->missing = found.missing;
  store_release(&record->code, found.code);
  if (found.code == kStopped) return;
  const u64 stop = stop_of(args.rank, found.peer, found.code, number);
  for (i32 peer = 0; peer < ranks_of(args); ++peer) {
    if (peer != args.rank) post(desks_of(args), peer, kDeskStopped, stop);
  }
}

// Why a wait for `peer`, begun at `since`, is in vain; 0: it is not known to be. Whoever gets an answer looks once more at what it
// waits for before it believes it: the last that a rank did comes before its end is noticed.
template <class Arguments>
COMMDSL_CALL u64 in_vain(const Arguments& args, i32 peer, u64 since) {
  const u64* notice = reinterpret_cast<const u64*>(args.notice);
  const u64 gone = load_relaxed(notice + 1 + peer / 64), interrupted = load_relaxed(notice);
  const u64 stop = load_relaxed(own_desk(args, kDeskStopped)), waited = now_ns() - since;
  if (disagrees(args, peer, load_relaxed(own_desk(args, kDeskNumber)))) return kDisagrees;
  if ((gone >> peer % 64 & 1) != 0) return kGone;
  if (interrupted != 0 && waited > kInterruptNs) return kInterrupted;
  if (waited >= args.timeout_ns) return kTimedOut;
  return stop != 0 && !has_done_its_part(stop) ? kStopped : 0;
}

// True when `look` sees what is expected of `peer`, false when the rank gives up: another lane of it did, or the wait is in vain and
// `report` is told why and what was seen last.
template <class Arguments, class Look, class Report>
COMMDSL_FN bool watch(const Arguments& args, i32 peer, Look look, u64 expected, Report report) {
  const u64 since = now_ns();
  const ErrorRecord* record = reinterpret_cast<const ErrorRecord*>(args.error);
  u64 why = 0;
  for (u32 polls = 1;; ++polls) {
    const u64 seen = look();
    if (reached(seen, expected)) return true;
    relax(polls);
    if (polls % kPollsPerCheck != 0) continue;
    if (load_relaxed(&record->code) != 0) return false;
    const u64 before = why;
    why = in_vain(args, peer, since);
    if (why == 0 || before == 0) continue;
    report(why, seen);
    return false;
  }
}

// A flag of `peer`, and what was stored before it was raised. Relaxed until it is there: an acquire empties the cache that the other
// lanes of the SM work with.
template <class Arguments, class Report>
COMMDSL_FN bool poll(const Arguments& args, i32 peer, const u64* flag, u64 expected, Report report) {
  if (!watch(args, peer, [&] { return load_relaxed(flag); }, expected, report)) return false;
  load_acquire(flag);
  return acquired(flag, expected);
}

}  // namespace commdsl
