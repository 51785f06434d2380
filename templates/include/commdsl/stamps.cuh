// Time stamps: when each interval of a role's work began, when what it waited for was there, and when it ended.
// Assumes a text that says COMMDSL_STAMPS and arguments with a member `stamps`; for every other text nothing here is any code. Does
// not know what an interval is: the host does, by its place.
#pragma once

namespace commdsl {

// Nanoseconds of a clock that all SMs share, and who worked: on a GPU the SM. All zero: it never began.
struct Interval {
  u64 begin, ready, end, sm;
};

#ifdef COMMDSL_STAMPS

// The intervals of one actor, one behind another from a place on. One thread of it writes them.
struct Stamps {
  COMMDSL_FN static constexpr bool are_written() { return true; }
  Interval* next;
  bool writes, waits = false;
  u64 sm;

  template <class Arguments>
  COMMDSL_FN Stamps(const Arguments& args, u64 first, i32 actor, bool writes)
      : next(reinterpret_cast<Interval*>(args.stamps) + first), writes(writes), sm(sm_of(actor)) {}

  COMMDSL_FN void begin() {
    if (!writes) return;
    next->begin = next->ready = now_ns();
    waits = true;
  }
  // The first time since it began.
  COMMDSL_FN void ready() {
    if (!writes || !waits) return;
    next->ready = now_ns();
    waits = false;
  }
  COMMDSL_FN void end() {
    if (!writes) return;
    next->end = now_ns();
    next->sm = sm;
    ++next;
  }
};

#else

struct Stamps {
  COMMDSL_FN static constexpr bool are_written() { return false; }
  template <class Arguments>
  COMMDSL_FN Stamps(const Arguments&, u64, i32, bool) {}
  COMMDSL_FN void begin() {}
  COMMDSL_FN void ready() {}
  COMMDSL_FN void end() {}
};

#endif

}  // namespace commdsl
