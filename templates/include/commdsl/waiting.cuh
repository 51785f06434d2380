// Waiting for a flag, and the record a rank leaves when it waits no longer.
// Assumes the vocabulary, and arguments with the members `timeout_ns` and `error`. Does not know what a flag stands for.
#pragma once

namespace commdsl {

// Flags only grow and may pass 2^64: they are compared by their distance.
COMMDSL_FN bool reached(u64 flag, u64 expected) { return static_cast<i64>(flag - expected) >= 0; }

// The first lane of a rank that has something to say writes the record; the others keep silent.
COMMDSL_CALL void publish(u64 error, const ErrorRecord& found) {
  ErrorRecord* record = reinterpret_cast<ErrorRecord*>(error);
  if (!claim(&record->claim)) return;
  record->rank = found.rank;
  record->lane = found.lane;
  record->op = found.op;
  record->peer = found.peer;
  record->expected = found.expected;
  record->seen = found.seen;
  record->round = found.round;
  record->missing = found.missing;
  store_release(&record->code, found.code);
}

// True when `look` sees what is expected, false when the rank gives up: another lane of it did, or the time is up and `report`
// is told what was seen last.
template <class Arguments, class Look, class Report>
COMMDSL_FN bool watch(const Arguments& args, Look look, u64 expected, Report report) {
  const u64 start = now_ns();
  const ErrorRecord* record = reinterpret_cast<const ErrorRecord*>(args.error);
  for (u32 polls = 1;; ++polls) {
    const u64 seen = look();
    if (reached(seen, expected)) return true;
    relax(polls);
    if (polls % kPollsPerCheck != 0) continue;
    if (load_relaxed(&record->code) != 0) return false;
    if (now_ns() - start < args.timeout_ns) continue;
    report(seen);
    return false;
  }
}

// A flag, and what was stored before it was raised. Relaxed until it is there: an acquire empties the cache that the other lanes
// of the SM work with.
template <class Arguments, class Report>
COMMDSL_FN bool poll(const Arguments& args, const u64* flag, u64 expected, Report report) {
  if (!watch(args, [&] { return load_relaxed(flag); }, expected, report)) return false;
  load_acquire(flag);
  return acquired(flag, expected);
}

}  // namespace commdsl
