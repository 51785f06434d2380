// Operations on the GPU whose flags travel apart from the data: a block copies and reduces, to every destination at once.
// Assumes lane.cuh. Decides nothing.
#pragma once

#include "commdsl/vectors.cuh"

namespace commdsl {

// Where an operation stores; null where there is nothing to do.
template <u32 most>
struct Targets {
  char* to[most];

  template <class Word>
  COMMDSL_FN void put(u64 at, const Word& word) const {
#pragma unroll
    for (u32 d = 0; d < most; ++d) {
      if (to[d] != nullptr) store(to[d] + at, word);
    }
  }
};

template <class Operands, u32 most>
COMMDSL_FN u64 find(const Operands& operands, Targets<most>& targets) {
  u64 bits = 0;
#pragma unroll
  for (u32 d = 0; d < most; ++d) {
    targets.to[d] = nullptr;
    if (static_cast<i32>(d) >= operands.op().num_dests) continue;
    targets.to[d] = operands.reachable(static_cast<i32>(d));
    bits |= reinterpret_cast<u64>(targets.to[d]);
  }
  return bits;
}

// `unroll` loads are in flight before the first store: one thread alone would wait a whole link latency for each.
template <class Word, u32 unroll, u32 most>
COMMDSL_FN void copy_words(const Targets<most>& targets, const char* source, u64 bytes) {
  const u64 words = bytes / sizeof(Word);
  const u64 stride = num_threads();
  u64 i = thread();
  for (; i + (unroll - 1) * stride < words; i += unroll * stride) {
    Word value[unroll];
#pragma unroll
    for (u32 j = 0; j < unroll; ++j) load(value[j], source + (i + j * stride) * sizeof(Word));
#pragma unroll
    for (u32 j = 0; j < unroll; ++j) targets.put((i + j * stride) * sizeof(Word), value[j]);
  }
  for (; i < words; i += stride) {
    Word value;
    load(value, source + i * sizeof(Word));
    targets.put(i * sizeof(Word), value);
  }
  for (u64 at = words * sizeof(Word) + thread(); at < bytes; at += stride) {
    u8 value;
    load(value, source + at);
    targets.put(at, value);
  }
}

template <u32 most>
COMMDSL_CALL void copy(const Targets<most> targets, const char* source, u64 bytes, u64 bits) {
  switch (common_alignment(bits | reinterpret_cast<u64>(source))) {
    case 16: return copy_words<Vector16, 8>(targets, source, bytes);
    case 8: return copy_words<u64, 4>(targets, source, bytes);
    case 4: return copy_words<u32, 4>(targets, source, bytes);
    case 2: return copy_words<u16, 4>(targets, source, bytes);
    default: return copy_words<u8, 4>(targets, source, bytes);
  }
}

// The shares of as many sources as the code knows; nothing, and no room, where nothing is weighed.
template <class Plan, u32 count, bool averages>
struct HeldShares {
  COMMDSL_FN explicit HeldShares(const Operands<Plan>&) {}
  COMMDSL_FN AsItIs share(u32) const { return {}; }
  template <class T>
  COMMDSL_FN T mean(T total) const { return total; }
};

template <class Plan, u32 count>
struct HeldShares<Plan, count, true> {
  Shares<Plan> shares;
  typename Shares<Plan>::Share each[count];

  COMMDSL_FN explicit HeldShares(const Operands<Plan>& operands) : shares(operands) {
#pragma unroll
    for (u32 s = 0; s < count; ++s) each[s] = shares.of(operands, static_cast<i32>(s));
  }
  COMMDSL_FN typename Shares<Plan>::Share share(u32 source) const { return each[source]; }
  template <class T>
  COMMDSL_FN T mean(T total) const { return shares.mean(total); }
};

// Sources whose number the code knows: their addresses and words stay in registers.
template <class Plan, u32 count>
struct Held : HeldShares<Plan, count, kAverages<typename Plan::Operation>> {
  using HeldShares<Plan, count, kAverages<typename Plan::Operation>>::HeldShares;
  const char* from[count];
};

// From byte `at`, a thread's own offset in, while `unroll` words a stride apart are left to it; returns where it stopped. All
// sources are loaded before the first is combined.
template <class Plan, class Word, u32 unroll, u32 count, u32 most>
COMMDSL_CALL u64 reduce_held(const Targets<most> targets, const Held<Plan, count> sources, u64 at, u64 bytes) {
  const u64 step = num_threads() * sizeof(Word);
  for (; at + (unroll - 1) * step + sizeof(Word) <= bytes; at += unroll * step) {
    Word word[count][unroll];
#pragma unroll
    for (u32 s = 0; s < count; ++s) {
#pragma unroll
      for (u32 j = 0; j < unroll; ++j) load(word[s][j], sources.from[s] + at + j * step);
    }
    Lanes<typename Plan::Element, Word> total[unroll];
#pragma unroll
    for (u32 s = 0; s < count; ++s) {
#pragma unroll
      for (u32 j = 0; j < unroll; ++j) total[j].take(word[s][j], s == 0, typename Plan::Operation{}, sources.share(s));
    }
#pragma unroll
    for (u32 j = 0; j < unroll; ++j) {
      total[j].settle(sources);
      targets.put(at + j * step, total[j].narrow());
    }
  }
  return at;
}

// More sources than registers hold: looked up and loaded one after the other.
template <class Plan, class Word, u32 most>
COMMDSL_CALL void reduce_many(const Targets<most> targets, const Operands<Plan> operands, u64 at, u64 bytes) {
  const Shares<Plan> shares(operands);
  for (; at + sizeof(Word) <= bytes; at += num_threads() * sizeof(Word)) {
    Lanes<typename Plan::Element, Word> total;
    for (i32 s = 0; s < operands.op().num_sources; ++s) {
      Word word;
      load(word, operands.source(s) + at);
      total.take(word, s == 0, typename Plan::Operation{}, shares.of(operands, s));
    }
    total.settle(shares);
    targets.put(at, total.narrow());
  }
}

// From byte `done` on, element by element.
template <class Plan, u32 most>
COMMDSL_FN void reduce_tail(const Targets<most>& targets, const Operands<Plan>& operands, u64 done) {
  using Storage = typename Plan::Element::Storage;
  using Word = typename WordOf<sizeof(Storage)>::Type;
  reduce_many<Plan, Word>(targets, operands, done + thread() * sizeof(Storage), operands.slice.bytes);
}

constexpr i32 kMostHeld = 8;

// Eight loads in flight a thread, or one of each source. What lies past the last whole vector, and operands that are not
// aligned alike, are combined element by element.
template <class Plan, u32 count, u32 most>
COMMDSL_FN void reduce(const Targets<most>& targets, const Operands<Plan>& operands, u64 bits) {
  using Storage = typename Plan::Element::Storage;
  using Word = typename WordOf<sizeof(Storage)>::Type;
  constexpr u32 unroll = count <= 2 ? 4 : count <= 4 ? 2 : 1;
  const u64 bytes = operands.slice.bytes;
  Held<Plan, count> sources(operands);
#pragma unroll
  for (u32 s = 0; s < count; ++s) {
    sources.from[s] = operands.source(static_cast<i32>(s));
    bits |= reinterpret_cast<u64>(sources.from[s]);
  }
  u64 done = 0;
  if (common_alignment(bits) == 16) {
    const u64 at = reduce_held<Plan, Vector16, unroll, count>(targets, sources, thread() * 16, bytes);
    if constexpr (unroll > 1) reduce_held<Plan, Vector16, 1, count>(targets, sources, at, bytes);
    done = bytes / 16 * 16;
  }
  reduce_held<Plan, Word, 1, count>(targets, sources, done + thread() * sizeof(Storage), bytes);
}

// Finds the code for the operation's number of sources.
template <u32 count, class Plan, u32 most>
COMMDSL_FN void reduce_by_count(const Targets<most>& targets, const Operands<Plan>& operands, u64 bits) {
  using Storage = typename Plan::Element::Storage;
  if (operands.op().num_sources == static_cast<i32>(count)) {
    reduce<Plan, count>(targets, operands, bits);
  } else if constexpr (static_cast<i32>(count) < Plan::kMostSources && static_cast<i32>(count) < kMostHeld) {
    reduce_by_count<count + 1>(targets, operands, bits);
  } else if constexpr (Plan::kMostSources > kMostHeld) {
    for (i32 s = 0; s < operands.op().num_sources; ++s) bits |= reinterpret_cast<u64>(operands.source(s));
    const u64 whole = common_alignment(bits) == 16 ? operands.slice.bytes / 16 * 16 : 0;
    reduce_many<Plan, Vector16>(targets, operands, thread() * 16, whole);
    reduce_many<Plan, typename WordOf<sizeof(Storage)>::Type>(targets, operands, whole + thread() * sizeof(Storage),
                                                              operands.slice.bytes);
  }
}

// In place, what stays where it is; false where nothing else is left to do.
template <u32 most>
COMMDSL_FN bool drop(Targets<most>& targets, const char* source) {
  bool any = false;
#pragma unroll
  for (u32 d = 0; d < most; ++d) {
    if (targets.to[d] == source) targets.to[d] = nullptr;
    any |= targets.to[d] != nullptr;
  }
  return any;
}

// One operation in one round: all sources read, combined in order, stored to every destination. `bits`: all addresses of
// destinations or-ed.
template <class Plan, u32 most>
COMMDSL_FN void combine(const Operands<Plan>& operands, Targets<most>& targets, u64 bits) {
  if (operands.op().kind == kCopy) {
    const char* source = operands.source(0);
    if (drop(targets, source)) copy(targets, source, operands.slice.bytes, bits);
    return;
  }
  if constexpr (Plan::kHasReduction) {
    by_operation(operands, [&](const auto& same) { reduce_by_count<1>(targets, same, bits); });
  }
}

template <class Plan>
COMMDSL_FN void combine(const Operands<Plan>& operands) {
  Targets<static_cast<u32>(Plan::kMostDests)> targets;
  const u64 bits = find(operands, targets);
  combine(operands, targets, bits);
}

}  // namespace commdsl
