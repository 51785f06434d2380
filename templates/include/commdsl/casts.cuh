// Operations whose operands travel in another element type: one text for the GPU and for the host.
// Assumes kernel.cuh up to Operands, and slices that begin where stretches of a chunk do. Decides nothing: in which form an operand
// is stands in the tables.
#pragma once

#include "commdsl/float8.cuh"
#include "commdsl/vectors.cuh"

namespace commdsl {

// Float8, a scale for every `stretch` values: in a cell the values, and behind as many as a tile has their scales.
template <u32 stretch>
struct Float8By {
  static constexpr u32 kThreads = kThreadsAStretch<stretch>, kEach = stretch / kThreads;
  u32 word[kEach / 4];
  float scale;

  COMMDSL_FN void encode(const float (&value)[kEach]) { scale = quantise<kEach>(word, value, kThreads); }
  COMMDSL_FN void decode(float (&value)[kEach]) const {
#pragma unroll
    for (u32 at = 0; at < kEach; at += 2) {
      widen_two_float8(value[at], value[at + 1], word[at / 4] >> (at % 4 * 8));
      value[at] = value[at] * scale;
      value[at + 1] = value[at + 1] * scale;
    }
  }
  COMMDSL_FN void fetch(const char* cell, u64 begin, u64 most) {
#pragma unroll
    for (u32 at = 0; at < kEach; at += 16) {
      Vector16 found;
      load(found, cell + begin + at);
      word[at / 4] = found.x, word[at / 4 + 1] = found.y, word[at / 4 + 2] = found.z, word[at / 4 + 3] = found.w;
    }
    u32 bits;
    load(bits, cell + most + begin / stretch * sizeof(u32));
    scale = float_of_bits(bits);
  }
  COMMDSL_FN void put(char* cell, u64 begin, u64 most) const {
#pragma unroll
    for (u32 at = 0; at < kEach; at += 16) {
      store(cell + begin + at, Vector16{word[at / 4], word[at / 4 + 1], word[at / 4 + 2], word[at / 4 + 3]});
    }
    if (begin % stretch == 0) store(cell + most + begin / stretch * sizeof(u32), bits_of_float(scale));
  }
};

// Another type of 16 bits, without scales.
template <class To>
struct Plainly {
  static constexpr u32 kEach = 16;
  u32 word[kEach / 2];

  COMMDSL_FN void encode(const float (&value)[kEach]) {
#pragma unroll
    for (u32 at = 0; at < kEach; at += 2) word[at / 2] = To::narrow_pair(value[at], value[at + 1]);
  }
  COMMDSL_FN void decode(float (&value)[kEach]) const {
#pragma unroll
    for (u32 at = 0; at < kEach; ++at) value[at] = To::widen(static_cast<u16>(word[at / 2] >> (at % 2 * 16)));
  }
  COMMDSL_FN void fetch(const char* cell, u64 begin, u64) {
#pragma unroll
    for (u32 at = 0; at < kEach; at += 8) {
      Vector16 found;
      load(found, cell + (begin + at) * 2);
      word[at / 2] = found.x, word[at / 2 + 1] = found.y, word[at / 2 + 2] = found.z, word[at / 2 + 3] = found.w;
    }
  }
  COMMDSL_FN void put(char* cell, u64 begin, u64) const {
#pragma unroll
    for (u32 at = 0; at < kEach; at += 8) {
      store(cell + (begin + at) * 2, Vector16{word[at / 2], word[at / 2 + 1], word[at / 2 + 2], word[at / 2 + 3]});
    }
  }
};

// What a thread has at once of a chunk: neighbours, and the same as they travel.
template <class Plan>
struct Run {
  using Code = typename Plan::Code;
  using Element = typename Plan::Element;
  static constexpr u32 kEach = Code::kEach;
  static constexpr u64 kMost = Plan::kTileBytes / sizeof(typename Element::Storage);  // elements of a tile
  float value[kEach];
  Code code;
};

// Whether a thread's values are all there, at an address that vectors have.
template <u32 each>
COMMDSL_FN bool is_whole(const char* at, u64 begin, u64 elements) {
  return begin + each <= elements && (reinterpret_cast<u64>(at) & 15) == 0;
}

// Values of a tensor, as far as there are elements, zeros behind them. What is not whole is out of line, by way of memory: there is
// little of it, and it is long.
template <class Element, u32 each>
COMMDSL_CALL void load_part(float (&value)[each], const char* source, u64 begin, u64 elements) {
  load_values<Element>(value, source, begin, elements);
}

template <class Element, u32 each>
COMMDSL_FN void load_some(float (&value)[each], const char* source, u64 begin, u64 elements) {
  const char* from = source + begin * sizeof(typename Element::Storage);
  if (is_whole<each>(from, begin, elements)) return load_whole<Element>(value, from);
  float part[each];
  load_part<Element>(part, source, begin, elements);
#pragma unroll
  for (u32 e = 0; e < each; ++e) value[e] = part[e];
}

template <class Element, u32 each>
COMMDSL_CALL void store_part(char* dest, u64 begin, u64 elements, const float (&value)[each]) {
  using Storage = typename Element::Storage;
  for (u32 e = 0; e < each && begin + e < elements; ++e) {
    const Storage one = Element::narrow(value[e]);
    typename WordOf<sizeof(Storage)>::Type bits;
    memcpy(&bits, &one, sizeof(bits));
    store(dest + (begin + e) * sizeof(Storage), bits);
  }
}

template <class Element, u32 each>
COMMDSL_FN void store_some(char* dest, u64 begin, u64 elements, const float (&value)[each]) {
  using Words = Lanes<Element, Vector16>;
  char* to = dest + begin * sizeof(typename Element::Storage);
  if (!is_whole<each>(to, begin, elements)) {
    float part[each];
#pragma unroll
    for (u32 e = 0; e < each; ++e) part[e] = value[e];
    return store_part<Element>(dest, begin, elements, part);
  }
#pragma unroll
  for (u32 at = 0; at < each; at += Words::kCount) {
    Words words;
#pragma unroll
    for (u32 e = 0; e < Words::kCount; ++e) words.value[e] = value[at + e];
    store(to + at * sizeof(typename Element::Storage), words.narrow());
  }
}

// What a thread has of a source in this form. All threads of the warp ask, also those behind the last element.
template <class Plan>
COMMDSL_FN void take(Run<Plan>& run, const char* source, i32 form, u64 begin, u64 elements) {
  if (form == kCast) {
    if (begin < elements) run.code.fetch(source, begin, Run<Plan>::kMost);
    return run.code.decode(run.value);
  }
  load_some<typename Plan::Element>(run.value, source, begin, elements);
  if (form != kRounded) return;
  run.code.encode(run.value);
  run.code.decode(run.value);
}

// Where an operation stores, and in which forms.
template <class Plan>
struct Dests {
  static constexpr u32 kMost = static_cast<u32>(Plan::kMostDests);
  char* to[kMost];
  i32 form[kMost];
  bool rounds = false, keeps_rounded = false;

  COMMDSL_FN explicit Dests(const Operands<Plan>& operands) {
    const Op& op = operands.op();
#pragma unroll
    for (u32 d = 0; d < kMost; ++d) {
      const bool is_there = static_cast<i32>(d) < op.num_dests;
      to[d] = is_there ? operands.dest(static_cast<i32>(d)) : nullptr;
      form[d] = is_there ? Plan::dest_form(op.first_dest + static_cast<i32>(d)) : kAsItIs;
      rounds |= form[d] != kAsItIs;
      keeps_rounded |= form[d] == kRounded;
    }
  }
  COMMDSL_FN void keep(const Run<Plan>& run, i32 as, u64 begin, u64 elements) const {
#pragma unroll
    for (u32 d = 0; d < kMost; ++d) {
      if (to[d] != nullptr && form[d] == as) store_some<typename Plan::Element>(to[d], begin, elements, run.value);
    }
  }
  // `is_code`: it came as it travels, and goes on so. All threads of the warp ask, also those that have no elements.
  COMMDSL_FN void put(Run<Plan>& run, bool is_code, u64 begin, u64 elements) const {
    if (rounds && !is_code) run.code.encode(run.value);
    if (begin >= elements) return;
    keep(run, kAsItIs, begin, elements);
    if (keeps_rounded) {
      run.code.decode(run.value);
      keep(run, kRounded, begin, elements);
    }
#pragma unroll
    for (u32 d = 0; d < kMost; ++d) {
      if (form[d] == kCast) run.code.put(to[d], begin, Run<Plan>::kMost);
    }
  }
};

template <class Plan>
COMMDSL_CALL void copy_cast(const Operands<Plan> operands, const Dests<Plan> dests, u64 elements) {
  constexpr u32 kEach = Run<Plan>::kEach;
  const i32 form = Plan::source_form(operands.op().first_source);
  const char* source = operands.source(0);
  for (u64 from = 0; from < elements; from += num_threads() * kEach) {
    const u64 begin = from + thread() * kEach;
    Run<Plan> run;
    take(run, source, form, begin, elements);
    dests.put(run, form == kCast, begin, elements);
  }
}

// The sum in float32, rounded to the caller's type; that is what is stored, or rounded once more.
template <class Plan>
COMMDSL_CALL void reduce_cast(const Operands<Plan> operands, const Dests<Plan> dests, u64 elements) {
  constexpr u32 kEach = Run<Plan>::kEach;
  using Element = typename Plan::Element;
  const Op& op = operands.op();
  const Shares<Plan> shares(operands);
  for (u64 from = 0; from < elements; from += num_threads() * kEach) {
    const u64 begin = from + thread() * kEach;
    Run<Plan> total;
    for (i32 s = 0; s < op.num_sources; ++s) {
      Run<Plan> run;
      take(run, operands.source(s), Plan::source_form(op.first_source + s), begin, elements);
      const auto share = shares.of(operands, s);
#pragma unroll
      for (u32 e = 0; e < kEach; ++e) {
        const float part = share(run.value[e]);
        total.value[e] = s == 0 ? part : Plan::Operation::apply(total.value[e], part);
      }
    }
#pragma unroll
    for (u32 e = 0; e < kEach; ++e) {
      const bool is_there = begin + e < elements;  // what lies behind counts for no scale
      total.value[e] = is_there ? Element::widen(Element::narrow(shares.mean(total.value[e]))) : 0;
    }
    dests.put(total, false, begin, elements);
  }
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
    copy_cast(operands, dests, elements);
  } else if constexpr (Plan::kHasReduction) {
    reduce_cast(operands, dests, elements);
  }
  return true;
}

}  // namespace commdsl
