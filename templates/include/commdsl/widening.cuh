// Sums in float32 of elements of another type, all in memory of the rank: one text for the GPU and for the host.
// Assumes lane.cuh, and a Plan that does nothing else: its operations add to a sum, or bring one to where it goes
// on. Decides nothing.
#pragma once

#include "commdsl/vectors.cuh"

namespace commdsl {

// Runs of `count` neighbours, in what is added and in a sum.
template <class Plan, u32 count>
struct Runs {
  using Element = typename Plan::Element;
  using Part = typename WordOf<count * sizeof(typename Element::Storage)>::Type;
  using Sum = typename WordOf<count * sizeof(float)>::Type;
  using Total = Lanes<float32, Sum>;

  // Widened, and combined with what is there unless it is the first.
  static COMMDSL_FN void take(Total& total, const Part& part, bool is_first) {
    Lanes<Element, Part> next;
    next.widen(part);
#pragma unroll
    for (u32 e = 0; e < count; ++e) {
      const float value = static_cast<float>(next.value[e]);
      total.value[e] = is_first ? value : Plan::Operation::apply(total.value[e], value);
    }
  }
};

// One part to a sum: `unroll` runs a thread, as many runs apart as there are threads, while so many are left to it; returns the first
// that is not done. All are loaded before the first is added.
template <class Plan, u32 count, u32 unroll>
COMMDSL_CALL u64 add_part(char* dest, const char* sum, const char* part, u64 run, u64 runs) {
  using Words = Runs<Plan, count>;
  const u64 step = num_threads();
  for (; run + (unroll - 1) * step < runs; run += unroll * step) {
    typename Words::Sum before[unroll];
    typename Words::Part more[unroll];
#pragma unroll
    for (u32 j = 0; j < unroll; ++j) load(before[j], sum + (run + j * step) * sizeof(typename Words::Sum));
#pragma unroll
    for (u32 j = 0; j < unroll; ++j) load(more[j], part + (run + j * step) * sizeof(typename Words::Part));
#pragma unroll
    for (u32 j = 0; j < unroll; ++j) {
      typename Words::Total total;
      total.widen(before[j]);
      Words::take(total, more[j], false);
      store(dest + (run + j * step) * sizeof(typename Words::Sum), total.narrow());
    }
  }
  return run;
}

// Any sources, element by element: several parts, or a sum that goes on.
template <class Plan>
COMMDSL_CALL void add_parts(const Operands<Plan> operands, const char* sum, u64 elements) {
  using Words = Runs<Plan, 1>;
  for (u64 at = thread(); at < elements; at += num_threads()) {
    typename Words::Total total;
    typename Words::Sum before = 0;
    if (sum != nullptr) load(before, sum + at * sizeof(before));
    total.widen(before);
    for (i32 s = sum == nullptr ? 0 : 1; s < operands.op().num_sources; ++s) {
      typename Words::Part part;
      load(part, operands.source(s) + at * sizeof(part));
      Words::take(total, part, s == 0);
    }
    store(operands.dest(0) + at * sizeof(before), total.narrow());
  }
}

// One operation in one round. Where all is aligned, eight loads of a thread are in flight.
template <class Plan>
COMMDSL_FN void add_up(const Operands<Plan>& operands) {
  using Storage = typename Plan::Element::Storage;
  constexpr u32 kRun = sizeof(Storage) <= 4 ? 4 : 2;
  const u64 elements = operands.slice.bytes / sizeof(Storage);
  const char* sum = is_sum<Plan>(operands.source_row(0).space) ? operands.source(0) : nullptr;
  char* dest = operands.dest(0);
  if (sum == nullptr || operands.op().num_sources != 2) {
    if (sum != dest) add_parts(operands, sum, elements);  // otherwise it stays where it is
    return;
  }
  const char* part = operands.source(1);
  const u64 sums = reinterpret_cast<u64>(sum) | reinterpret_cast<u64>(dest);
  u64 done = 0;
  if (sums % (kRun * sizeof(float)) == 0 && reinterpret_cast<u64>(part) % (kRun * sizeof(Storage)) == 0) {
    const u64 run = add_part<Plan, kRun, 4>(dest, sum, part, thread(), elements / kRun);
    add_part<Plan, kRun, 1>(dest, sum, part, run, elements / kRun);
    done = elements / kRun * kRun;
  }
  add_part<Plan, 1, 1>(dest, sum, part, done + thread(), elements);
}

}  // namespace commdsl
