// Operations whose data carries its flag, on the host: word after word, the data in plain memory, its flag released behind it.
// Assumes lane.cuh. A cell has the size it has on the GPU, but another layout: data, then flag.
//
// The data is not atomic, so ThreadSanitizer sees a cell that is written again before it was read. A flag is awaited by its one
// value: what it acquires is what the Plan promises.
#pragma once

namespace commdsl {

#ifdef COMMDSL_SANITIZED
COMMDSL_FN void release_word(u64* flag, u64 number) {
  __tsan_release(flag);
  __atomic_store_n(flag, number, __ATOMIC_RELAXED);
}
COMMDSL_FN void acquire_word(const u64* flag) { __tsan_acquire(const_cast<u64*>(flag)); }
#else
COMMDSL_FN void release_word(u64* flag, u64 number) { __atomic_store_n(flag, number, __ATOMIC_RELEASE); }
COMMDSL_FN void acquire_word(const u64*) {}
#endif

template <class Wire>
COMMDSL_FN u64* flag_of(char* word) {
  return reinterpret_cast<u64*>(word + Wire::kData);
}

// What stands behind a word: the number of the round; with the digest, its lower half alone.
template <class Plan>
COMMDSL_FN u64 flag_value(const Position<Plan>& here, u64 word) {
  const u64 number = mark_of(here.round);
  if (!carries_call(here, static_cast<u32>(word))) return number;
  return (number & 0xffffffffu) | static_cast<u64>(here.args.call()) << 32;
}

template <class Plan>
COMMDSL_FN bool arrived(const Operands<Plan>& operands, i32 source, u64 word, u64* flag) {
  const u64 expected = flag_value(operands.here, word), number = mark_of(operands.here.round);
  const Position<Plan>& here = operands.here;
  const bool is_first = carries_call(here, static_cast<u32>(word));
  u64 since = 0, why = 0;
  for (u32 polls = 1; load_acquire(flag) != expected; ++polls) {
    relax(polls);
    if (polls % kPollsPerCheck != 0) continue;
    if (since == 0) since = now_ns();
    if (load_relaxed(&reinterpret_cast<const ErrorRecord*>(here.args.error)->code) != 0) return false;
    const i32 peer = operands.source_row(source).rank;
    const u64 found = load_relaxed(flag);
    if (is_first && found != expected && static_cast<u32>(found) == static_cast<u32>(number)) {
      report_other<Plan>(here.args, here.lane, here.round, operands.index, peer, static_cast<u32>(found >> 32));
      return false;
    }
    const u64 before = why;
    why = in_vain(here.args, peer, since);
    if (why == 0 || before == 0) continue;
    report<Plan>(here.args, why, here.lane, here.round, operands.index, peer, number, is_first ? static_cast<u32>(found) : found);
    return false;
  }
  acquire_word(flag);
  return true;
}

// The sources of one word, read and combined as the operation says, into `value`.
template <class Plan>
COMMDSL_FN bool gather(const Operands<Plan>& operands, u64 word, u64 bytes, char* value) {
  using Wire = typename Plan::Wire;
  using Storage = typename Plan::Element::Storage;
  constexpr u64 kCount = Wire::kData / sizeof(Storage);
  typename Plan::Element::Accumulator total[kCount];
  for (i32 s = 0; s < operands.op().num_sources; ++s) {
    if (operands.source_row(s).space == kCell) {
      char* from = const_cast<char*>(operands.source(s)) + word * Wire::kBytes;
      if (!arrived(operands, s, word, flag_of<Wire>(from))) return false;
      memcpy(value, from, bytes);
    } else {
      memcpy(value, operands.source(s) + word * Wire::kData, bytes);
    }
    if constexpr (Plan::kHasReduction) {
      if (operands.op().kind == kCopy) continue;
      const Shares<Plan> shares(operands);
      const auto share = shares.of(operands, s);
      Storage element[kCount] = {};
      memcpy(element, value, bytes);
      for (u64 i = 0; i < kCount; ++i) {
        const auto next = Plan::Element::widen(element[i]);
        total[i] = s == 0 ? share(next) : Plan::Operation::apply(total[i], share(next));
        if (s + 1 == operands.op().num_sources) element[i] = Plan::Element::narrow(shares.mean(total[i]));
      }
      memcpy(value, element, bytes);
    }
  }
  return true;
}

template <class Plan>
COMMDSL_FN void scatter(const Operands<Plan>& operands, u64 word, u64 bytes, const char* value) {
  using Wire = typename Plan::Wire;
  for (i32 d = 0; d < operands.op().num_dests; ++d) {
    if (operands.dest_row(d).space != kCell) {
      if (bytes > 0) memmove(operands.dest(d) + word * Wire::kData, value, bytes);
      continue;
    }
    char* to = operands.dest(d) + word * Wire::kBytes;
    memcpy(to, value, bytes);
    release_word(flag_of<Wire>(to), flag_value(operands.here, word));
  }
}

template <class Plan>
COMMDSL_FN bool exchange(const Operands<Plan>& operands) {
  constexpr u64 data = Plan::Wire::kData;
  const u64 words = words_of(operands, 1);
  for (u64 word = 0; word < words; ++word) {
    const u64 at = word * data;
    const u64 bytes = at < operands.slice.bytes ? smaller(operands.slice.bytes - at, data) : 0;
    char value[data] = {};
    if (!by_operation(operands, [&](const auto& same) { return gather(same, word, bytes, value); })) return false;
    scatter(operands, word, bytes, value);
  }
  return true;
}

}  // namespace commdsl
