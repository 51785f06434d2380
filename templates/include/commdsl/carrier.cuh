// Sums of rows that a warp makes one after another. What is added up passes through stages of shared memory, in bulk copies: one thread
// keeps many of them on their way, so few SMs are enough. What is not aligned, or on a GPU without them, is added up as in runs.cuh.
// Assumes `add_run`, of the GPU or of the processor, and Plan's dynamic shared memory. The orders between proxies are those of async.cuh.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100
#define COMMDSL_CARRIES
#include "commdsl/ring.cuh"
#endif

namespace commdsl {

// A sum that a warp makes: `count` runs of `bytes`, each some strides behind `from`. No `to`: there is none any more.
struct Sum {
  char* to;
  const char* from;
  u32 bytes, count;
  i32 rank;  // where it goes on to when it is stored, for who asked for it
  u64 place;
};

// Of one warp, all of whose threads make the same calls.
struct PlainCarrier {
  COMMDSL_FN void finish() {}

  // One sum after another, as `next` finds them and says their parts, until there is none; `then` is told of each when it is
  // stored. `bits`: of all addresses and widths.
  template <class Element, bool weighs, class Parts, class Next, class Then>
  COMMDSL_FN void add_each(u64, u64 stride, Parts (&parts)[2], const Next& next, const Then& then) {
    for (Sum sum = next(parts[0]); sum.to != nullptr; sum = next(parts[0])) {
      add_run<Element, weighs>(sum.to, sum.from, sum.bytes, stride, parts[0], sum.count);
      then(sum);
      warp_barrier();  // the next sum's parts are written over these
    }
  }
};

#ifdef COMMDSL_CARRIES
// As PlainCarrier. `finish` gives the shared memory of its marks back.
template <class Plan>
struct Carrier {
  using Stages = Ring<Plan::kStages, Plan::kStageBytes, Plan::kMarksBytes>;

  Stages stages{warp()};
  u32 fills = 0;   // that have been added up
  u32 loaded = 0;  // that have been asked for

  COMMDSL_FN Carrier() {
    if (thread_of_warp() == 0) stages.start();
    warp_barrier();
  }
  COMMDSL_FN void finish() {
    warp_barrier();
    if (thread_of_warp() == 0) stages.stop();
    warp_barrier();
  }

  // While one sum is added up the next is on its way.
  template <class Element, bool weighs, class Parts, class Next, class Then>
  COMMDSL_FN void add_each(u64 bits, u64 stride, Parts (&parts)[2], const Next& next, const Then& then) {
    if (common_alignment(bits) < 16) return PlainCarrier().add_each<Element, weighs>(bits, stride, parts, next, then);
    u32 slot = 0;
    Sum sum{};
    for (Ahead ahead;;) {
      const Sum after = next(parts[slot ^ 1]);
      Ahead behind;
      if (sum.to != nullptr) {
        add_bulk<Element, weighs>(sum, parts[slot], [&] {
          load_ahead(ahead, sum, stride, parts[slot]);
          if (ahead.at >= sum.bytes) load_ahead(behind, after, stride, parts[slot ^ 1]);
        });
        then(sum);
      }
      if (after.to == nullptr) return;
      sum = after;
      ahead = behind;
      slot ^= 1;
      load_ahead(ahead, sum, stride, parts[slot]);
    }
  }

 private:
  // Which stretch of which part of a sum is loaded next.
  struct Ahead {
    u32 at = 0, part = 0;
  };

  // As much of a sum as there are stages free.
  template <class Parts>
  COMMDSL_FN void load_ahead(Ahead& ahead, const Sum& sum, u64 stride, const Parts& parts) {
    while (loaded - fills < Stages::kCount && sum.count > 0 && ahead.at < sum.bytes) {
      const char* from = sum.from + parts.at[ahead.part] * stride + ahead.at;
      if (thread_of_warp() == 0) stages.load(loaded, from, least(sum.bytes - ahead.at, Stages::kBytes));
      ++loaded;
      if (++ahead.part < sum.count) continue;
      ahead.part = 0;
      ahead.at += Stages::kBytes;
    }
  }

  // `go_on` is told whenever a stage is free. A row that is alone, and not weighed, stays what it is, bit for bit.
  template <class Element, bool weighs, class Parts, class GoOn>
  COMMDSL_FN void add_bulk(const Sum& sum, const Parts& parts, const GoOn& go_on) {
    constexpr u32 kWords = Stages::kBytes / (kWarp * 16);
    using Values = Lanes<Element, Vector16>;
    if (sum.count == 0) return zero_run(sum.to, sum.bytes);
    const bool is_copy = !weighs && sum.count == 1;
    for (u32 begin = thread_of_warp() * 16; begin < sum.bytes + thread_of_warp() * 16; begin += Stages::kBytes) {
      Values total[kWords];
      start_sums(total);
      for (u32 i = 0; i < sum.count; ++i) {
        stages.await_fill(fills);
        const u32 stage = stages.stage(fills) + thread_of_warp() * 16;
        const float weight = weighs ? parts.weight[i] : 1.0f;
#pragma unroll
        for (u32 j = 0; j < kWords; ++j) {
          Vector16 word;
          load_shared(word, stage + j * kWarp * 16);
          const u32 at = begin + j * kWarp * 16;
          if (is_copy && at < sum.bytes) store(sum.to + at, word);
          add_weighed<weighs>(total[j], word, weight);
        }
        warp_barrier();  // all have loaded what is in the stage
        ++fills;
        go_on();
      }
#pragma unroll
      for (u32 j = 0; j < kWords; ++j) {
        const u32 at = begin + j * kWarp * 16;
        if (!is_copy && at < sum.bytes) store(sum.to + at, total[j].narrow());
      }
    }
  }
};
#else
template <class Plan>
using Carrier = PlainCarrier;
#endif

}  // namespace commdsl
