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
  return code >= kBadTile && code <= kBadMate;
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

// The call that a rank is in or was in last; number 0: none. Not known where it changed while it was read.
struct Made {
  bool is_known;
  u64 number;
  u32 digest;
};

template <class Arguments>
COMMDSL_FN u64 look_at(const Arguments& args, i32 rank, u64 at) {
  const Desks desks = desks_of(args);
  if (!is_near(desks, rank)) return peek(desks, rank, at);
  return load_acquire(reinterpret_cast<const u64*>(desks.heap[rank] + at));  // in order, one after another
}

template <class Arguments>
COMMDSL_FN Made made_by(const Arguments& args, i32 rank) {
  const u64 before = look_at(args, rank, kDeskNumber), call = look_at(args, rank, kDeskCall);
  const bool is_known = look_at(args, rank, kDeskNumber) == before;
  return {is_known, call == 0 ? 0 : before + ((call & kUncounted) != 0 ? 1 : 0), static_cast<u32>(call)};
}

// Whether a peer, whose part in the rank's call is not there, makes another call: of the same number another one, or a later one. A
// lane may look before the rank's own desk says its call: then it is the next one. Where that cannot be seen, as the call before
// was the same, a peer that is in such a call, too, and one ahead may just be in this one.
template <class Arguments>
COMMDSL_FN bool disagrees(const Arguments& args, i32 peer) {
  if (peer >= ranks_of(args) || peer == args.rank) return false;
  const Made own = made_by(args, args.rank), theirs = made_by(args, peer);
  if (!own.is_known || !theirs.is_known || theirs.number == 0) return false;
  const u32 digest = args.call();
  const u64 number = own.number + (own.number == 0 || own.digest != digest ? 1 : 0);
  if (theirs.number <= number) return theirs.number == number && theirs.digest != digest;
  return theirs.digest != digest || theirs.number > number + 1;
}

// The first lane of a rank that has something to say writes the record; the others keep silent. All peers are told, so that none
// waits for what does not come any more; but not that a peer stopped, as that one has told all. `has_both`: of a disagreement the
// record has both digests; otherwise the desks have.
template <class Arguments>
COMMDSL_CALL void publish(const Arguments& args, ErrorRecord found, bool has_both = false) {
  const u64 number = made_by(args, args.rank).number;
  if (found.code == kStopped) {
    found.expected = args.call();
    found.seen = load_relaxed(own_desk(args, kDeskStopped));
  }
  if (found.code == kDisagrees && !has_both) {
    found.round = number;
    found.expected = args.call();
    found.seen = made_by(args, found.peer).digest;
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
  const bool is_stopped = stop != 0 && !has_done_its_part(stop);
  if (!is_stopped && disagrees(args, peer)) return kDisagrees;
  if ((gone >> peer % 64 & 1) != 0) return kGone;
  if (interrupted != 0 && waited > kInterruptNs) return kInterrupted;
  if (waited >= args.timeout_ns) return kTimedOut;
  return is_stopped ? kStopped : 0;
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
