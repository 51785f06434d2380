// Operations whose operands travel in another element type: one text for the GPU and for the host.
// Assumes lane.cuh, and slices that begin where stretches of a chunk do. Decides nothing: in which form an operand
// is stands in the tables.
#pragma once

#include "commdsl/float8.cuh"
#include "commdsl/vectors.cuh"

namespace commdsl {

// Float8, a scale for every `stretch` values: in a cell the values, and behind as many as a tile has their scales.
template <u32 stretch>
struct Float8By {
  static constexpr u32 kThreads = kThreadsAStretch<stretch>, kEach = stretch / kThreads, kBytes = 1;
  u32 word[kEach / 4];
  float scale;

  COMMDSL_FN void encode(const float (&value)[kEach]) { scale = quantise<PowerOfTwo>(word, value, kThreads).scale; }
  COMMDSL_FN void decode(float (&value)[kEach]) const {
#pragma unroll
    for (u32 at = 0; at < kEach; at += 2) {
      widen_two_float8(value[at], value[at + 1], word[at / 4] >> (at % 4 * 8));
      value[at] = value[at] * scale;
      value[at + 1] = value[at + 1] * scale;
    }
  }
  COMMDSL_FN void fetch_scale(const char* scales, u64 first) {
    u32 bits;
    load(bits, scales + first / stretch * sizeof(u32));
    scale = float_of_bits(bits);
  }
  COMMDSL_FN void put_scale(char* scales, u64 first) const { store(scales + first / stretch * sizeof(u32), bits_of_float(scale)); }
};

// Another type of 16 bits, without scales: each thread by itself.
template <class To>
struct Plainly {
  static constexpr u32 kThreads = 1, kEach = 8, kBytes = 2;
  u32 word[kEach / 2];

  COMMDSL_FN void encode(const float (&value)[kEach]) {
#pragma unroll
    for (u32 at = 0; at < kEach; at += 2) word[at / 2] = To::narrow_pair(value[at], value[at + 1]);
  }
  COMMDSL_FN void decode(float (&value)[kEach]) const {
#pragma unroll
    for (u32 at = 0; at < kEach; at += 2) To::widen_pair(word[at / 2], value[at], value[at + 1]);
  }
  COMMDSL_FN void fetch_scale(const char*, u64) {}
  COMMDSL_FN void put_scale(char*, u64) const {}
};

COMMDSL_FN bool is_aligned(const char* tensor) { return (reinterpret_cast<u64>(tensor) & 15) == 0; }

// Where a thread has elements of a chunk: a part of a stretch, in words of 16 bytes that it has in turn with the threads beside it, so
// that a warp's loads and stores are whole lines. In a cell it has its own words in turn, too: values lie there in another order,
// which is the same for all that store and load there. `all`: it is known that all of it is there, at addresses that vectors have.
template <class Plan, bool all>
struct Spot {
  using Code = typename Plan::Code;
  using Storage = typename Plan::Element::Storage;
  static constexpr u32 kInWord = 16 / sizeof(Storage), kStretch = Code::kThreads * Code::kEach;
  static constexpr u64 kMost = Plan::kTileBytes / sizeof(Storage);  // elements of a tile
  u64 first, elements;  // of the stretch, of the slice

  // Of a thread where all threads together have reached element `from`.
  COMMDSL_FN Spot(u64 from, u64 elements) : first(from + thread() / Code::kThreads * kStretch), elements(elements) {}
  static COMMDSL_FN u32 place() { return thread() % Code::kThreads; }
  COMMDSL_FN bool is_there() const { return all || first < elements; }
  COMMDSL_FN bool is_whole(const char* tensor) const { return all || (first + kStretch <= elements && is_aligned(tensor)); }
  COMMDSL_FN u64 at(u32 word) const { return first + (word * Code::kThreads + place()) * kInWord; }
  COMMDSL_FN u64 in_cell(u32 word) const { return first * Code::kBytes + (word * Code::kThreads + place()) * 16; }
  static COMMDSL_FN u64 scales_in_cell() { return kMost * Code::kBytes; }
};

// The elements that there are of a word, zeros behind them. Out of line: there is little of it, and it is long.
template <class Storage>
COMMDSL_CALL Vector16 load_part(const char* source, u64 begin, u64 elements) {
  typename WordOf<sizeof(Storage)>::Type part[16 / sizeof(Storage)];
#pragma unroll
  for (u32 e = 0; e < 16 / sizeof(Storage); ++e) {
    part[e] = 0;
    if (begin + e < elements) load(part[e], source + (begin + e) * sizeof(Storage));
  }
  Vector16 word;
  memcpy(&word, part, sizeof(word));
  return word;
}

template <class Storage>
COMMDSL_CALL void store_part(char* dest, u64 begin, u64 elements, const Vector16 word) {
  typename WordOf<sizeof(Storage)>::Type part[16 / sizeof(Storage)];
  memcpy(part, &word, sizeof(word));
#pragma unroll
  for (u32 e = 0; e < 16 / sizeof(Storage); ++e) {
    if (begin + e < elements) store(dest + (begin + e) * sizeof(Storage), part[e]);
  }
}

// A thread's elements, and the same as they travel.
template <class Plan>
struct Run {
  using Code = typename Plan::Code;
  using Words = Lanes<typename Plan::Element, Vector16>;
  static constexpr u32 kEach = Code::kEach, kWords = kEach / Words::kCount;
  float value[kEach];
  Code code;

  COMMDSL_FN void widen(u32 at, const Vector16& word) {
    Words words;
    words.widen(word);
#pragma unroll
    for (u32 e = 0; e < Words::kCount; ++e) value[at * Words::kCount + e] = words.value[e];
  }
  COMMDSL_FN Vector16 narrow(u32 at) const {
    Words words;
#pragma unroll
    for (u32 e = 0; e < Words::kCount; ++e) words.value[e] = value[at * Words::kCount + e];
    return words.narrow();
  }
  // Combines one more operand.
  template <class Operation, class Share>
  COMMDSL_FN void take(const Run& operand, bool is_first, Operation, const Share& share) {
#pragma unroll
    for (u32 e = 0; e < kEach; ++e) {
      const float part = share(operand.value[e]);
      value[e] = is_first ? part : Operation::apply(value[e], part);
    }
  }
  // After the last operand: what is left in the caller's type.
  template <class Shares>
  COMMDSL_FN void settle(const Shares& shares) {
#pragma unroll
    for (u32 e = 0; e < kEach; ++e) value[e] = shares.mean(value[e]);
#pragma unroll
    for (u32 at = 0; at < kWords; ++at) widen(at, narrow(at));
  }
};

// What a thread has loaded of a source, as it lies there: nothing has waited for it.
template <class Plan>
struct Found {
  using Code = typename Plan::Code;
  static constexpr u32 kCodes = sizeof(Code::word) / 16, kWords = Run<Plan>::kWords;
  Vector16 word[kCodes > kWords ? kCodes : kWords];
  Code code;  // of which only the scale is from here

  template <class At>
  COMMDSL_FN void fetch(const char* source, i32 form, const At& spot) {
    using Storage = typename Plan::Element::Storage;
    if (form == kCast) {
      if (!spot.is_there()) return;
#pragma unroll
      for (u32 at = 0; at < kCodes; ++at) load(word[at], source + spot.in_cell(at));
      code.fetch_scale(source + spot.scales_in_cell(), spot.first);
    } else if (spot.is_whole(source)) {
#pragma unroll
      for (u32 at = 0; at < kWords; ++at) load(word[at], source + spot.at(at) * sizeof(Storage));
    } else {
#pragma unroll
      for (u32 at = 0; at < kWords; ++at) word[at] = load_part<Storage>(source, spot.at(at), spot.elements);
    }
  }
  // All threads of the warp ask, also those behind the last element.
  COMMDSL_FN void give(Run<Plan>& run, i32 form) const {
    if (form == kCast) {
      run.code = code;
      memcpy(run.code.word, word, sizeof(run.code.word));
      return run.code.decode(run.value);
    }
#pragma unroll
    for (u32 at = 0; at < kWords; ++at) run.widen(at, word[at]);
    if (form != kRounded) return;
    run.code.encode(run.value);
    run.code.decode(run.value);
  }
};

// Where an operation stores, and in which forms.
template <class Plan>
struct Dests {
  static constexpr u32 kMost = static_cast<u32>(Plan::kMostDests);
  char* to[kMost];
  i32 form[kMost];
  bool rounds = false, keeps_rounded = false, is_aligned = true;

  COMMDSL_FN explicit Dests(const Operands<Plan>& operands) {
    const Op& op = operands.op();
#pragma unroll
    for (u32 d = 0; d < kMost; ++d) {
      const bool is_there = static_cast<i32>(d) < op.num_dests;
      to[d] = is_there ? operands.dest(static_cast<i32>(d)) : nullptr;
      form[d] = is_there ? Plan::dest_form(op.first_dest + static_cast<i32>(d)) : kAsItIs;
      rounds |= form[d] != kAsItIs;
      keeps_rounded |= form[d] == kRounded;
      is_aligned = is_aligned && commdsl::is_aligned(to[d]);
    }
  }
  template <class At>
  COMMDSL_FN void keep(const Run<Plan>& run, i32 as, const At& spot) const {
    using Storage = typename Plan::Element::Storage;
#pragma unroll
    for (u32 d = 0; d < kMost; ++d) {
      if (to[d] == nullptr || form[d] != as) continue;
      const bool is_whole = spot.is_whole(to[d]);
#pragma unroll
      for (u32 at = 0; at < Run<Plan>::kWords; ++at) {
        if (is_whole) {
          store(to[d] + spot.at(at) * sizeof(Storage), run.narrow(at));
        } else {
          store_part<Storage>(to[d], spot.at(at), spot.elements, run.narrow(at));
        }
      }
    }
  }
  template <class At>
  COMMDSL_FN void send(const typename Plan::Code& code, const At& spot) const {
    Vector16 word[Found<Plan>::kCodes];
    memcpy(word, code.word, sizeof(word));
#pragma unroll
    for (u32 d = 0; d < kMost; ++d) {
      if (form[d] != kCast) continue;
#pragma unroll
      for (u32 at = 0; at < Found<Plan>::kCodes; ++at) store(to[d] + spot.in_cell(at), word[at]);
      if (spot.place() == 0) code.put_scale(to[d] + spot.scales_in_cell(), spot.first);
    }
  }
  // `is_code`: it came as it travels, and goes on so. All threads of the warp ask, also those that have no elements.
  template <class At>
  COMMDSL_FN void put(Run<Plan>& run, bool is_code, const At& spot) const {
    if (rounds && !is_code) run.code.encode(run.value);
    if (!spot.is_there()) return;
    send(run.code, spot);
    keep(run, kAsItIs, spot);
    if (!keeps_rounded) return;
    run.code.decode(run.value);
    keep(run, kRounded, spot);
  }
};

// From element `from` on, while all threads have `runs` each if `all`, or to the end; returns where it stopped. All runs are loaded
// before the first is looked at.
template <class Plan, i32 form, u32 runs, bool all>
COMMDSL_CALL u64 copy_runs(const Dests<Plan> dests, const char* source, u64 from, u64 elements) {
  using At = Spot<Plan, all>;
  const u64 step = num_threads() * Plan::Code::kEach;
  for (; from + (all ? runs * step - 1 : 0) < elements; from += runs * step) {
    Found<Plan> found[runs];
#pragma unroll
    for (u32 j = 0; j < runs; ++j) found[j].fetch(source, form, At(from + j * step, elements));
#pragma unroll
    for (u32 j = 0; j < runs; ++j) {
      Run<Plan> run;
      found[j].give(run, form);
      dests.put(run, form == kCast, At(from + j * step, elements));
    }
  }
  return from;
}

template <class Plan, i32 form>
COMMDSL_FN void copy_cast(const Dests<Plan>& dests, const char* source, u64 elements) {
  const bool all = dests.is_aligned && is_aligned(source);
  const u64 done = all ? copy_runs<Plan, form, 4, true>(dests, source, 0, elements) : 0;
  copy_runs<Plan, form, 1, false>(dests, source, done, elements);
}

constexpr i32 kSourcesAhead = 4;

// As `copy_runs`, a run at a time: the sum in float32, rounded to the caller's type; that is what is stored, or rounded once more. A few
// sources are loaded before the first is looked at. What lies behind the last element is zeros in all of them.
template <bool all, class Same, class Plan>
COMMDSL_CALL u64 reduce_runs(const Operands<Same> operands, const Dests<Plan> dests, u64 from, u64 elements) {
  constexpr i32 kAhead = Plan::kMostSources < kSourcesAhead ? Plan::kMostSources : kSourcesAhead;
  const Op& op = operands.op();
  const Shares<Same> shares(operands);
  const u64 step = num_threads() * Plan::Code::kEach;
  for (; from + (all ? step - 1 : 0) < elements; from += step) {
    const Spot<Plan, all> spot(from, elements);
    Run<Plan> total;
    for (i32 first = 0; first < op.num_sources; first += kAhead) {
      Found<Plan> found[kAhead];
#pragma unroll
      for (i32 k = 0; k < kAhead; ++k) {
        const i32 s = first + k;
        if (s < op.num_sources) found[k].fetch(operands.source(s), Plan::source_form(op.first_source + s), spot);
      }
#pragma unroll
      for (i32 k = 0; k < kAhead; ++k) {
        const i32 s = first + k;
        if (s >= op.num_sources) continue;
        Run<Plan> run;
        found[k].give(run, Plan::source_form(op.first_source + s));
        total.take(run, s == 0, typename Same::Operation{}, shares.of(operands, s));
      }
    }
    total.settle(shares);
    dests.put(total, false, spot);
  }
  return from;
}

template <class Same, class Plan>
COMMDSL_FN void reduce_cast(const Operands<Same>& operands, const Dests<Plan>& dests, u64 elements) {
  bool all = dests.is_aligned;
  for (i32 s = 0; s < operands.op().num_sources; ++s) all = all && is_aligned(operands.source(s));
  const u64 done = all ? reduce_runs<true>(operands, dests, 0, elements) : 0;
  reduce_runs<false>(operands, dests, done, elements);
}

// One operation in one round. What is neither rounded nor was is moved as everywhere.
template <class Plan>
COMMDSL_FN bool move_cast(const Operands<Plan>& operands) {
  const Op& op = operands.op();
  const Dests<Plan> dests(operands);
  bool has_forms = dests.rounds;
  for (i32 s = 0; s < op.num_sources; ++s) has_forms |= Plan::source_form(op.first_source + s) != kAsItIs;
  if (!has_forms) return false;
  const u64 elements = operands.slice.bytes / sizeof(typename Plan::Element::Storage);
  if (op.kind == kCopy) {
    const bool is_code = Plan::source_form(op.first_source) == kCast;
    (is_code ? copy_cast<Plan, kCast> : copy_cast<Plan, kAsItIs>)(dests, operands.source(0), elements);
  } else if constexpr (Plan::kHasReduction) {
    by_operation(operands, [&](const auto& same) { reduce_cast(same, dests, elements); });
  }
  return true;
}

}  // namespace commdsl
