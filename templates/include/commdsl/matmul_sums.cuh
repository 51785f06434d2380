// The sums that a multiplier has of a tile, in registers, and what several blocks do that share a tile: they add up what each has made
// of the depth. Assumes that all of them take the same piece. Decides nothing: who shares what is in the table.
#pragma once

#include "commdsl/matmul_worker.cuh"

namespace commdsl {

template <class Shape>
struct TileSums : Worker<Shape> {
  const u32 number = threadIdx.x / kWarpgroup - 1, thread = threadIdx.x % kWarpgroup;
  float sum[Shape::kHigh][Shape::kSums];

  using Worker<Shape>::Worker;

  COMMDSL_FN void meet() const { warpgroup_barrier(number + 1); }

  COMMDSL_FN void release(u32 stage) const {
    if (thread < Shape::kCluster) arrive<Shape::kCluster>(this->shared.empty(stage), thread);
  }

  // Of the blocks of a cluster, in the order of the depth: each has the columns that are its own.
  COMMDSL_FN void gather(u32 parity) {
    tell_cluster(this->shared.multiplied());
    await_phase_of_cluster(this->shared.multiplied(), parity);
#pragma unroll
    for (u32 to = 0; to < Shape::kSplit; ++to) {
      const u32 there = of_block(this->shared.sums(this->share(), number), to) + thread * 16;
#pragma unroll
      for (u32 i = 0; i < Shape::kShare; i += 4) store_to_cluster(there + i / 4 * kWarpgroup * 16, sum[0] + to * Shape::kShare + i);
    }
    tell_cluster(this->shared.gathered(number));
    await_phase_of_cluster(this->shared.gathered(number), parity);
#pragma unroll
    for (u32 from = 0; from < Shape::kSplit; ++from) {
      const u32 here = this->shared.sums(from, number) + thread * 16;
#pragma unroll
      for (u32 i = 0; i < Shape::kShare; i += 4) {
        Vector16 word;
        load_shared(word, here + i / 4 * kWarpgroup * 16);
        float more[4];
        memcpy(more, &word, sizeof word);
#pragma unroll
        for (u32 e = 0; e < 4; ++e) sum[0][i + e] = from == 0 ? more[e] : sum[0][i + e] + more[e];
      }
    }
    fence_proxies_of_shared();  // what is loaded next is written by TMA
    meet();
    if (thread == 0) arrive<1>(this->shared.taken(), 0);
  }

  // Of a tile that is cut, for the block with its first part.
  COMMDSL_FN void leave(i32 slot) {
    char* to = partial(slot);
#pragma unroll
    for (u32 i = 0; i < Shape::kHigh * Shape::kSums; i += 4) {
      Vector16 word;
      memcpy(&word, sum[i / Shape::kSums] + i % Shape::kSums, sizeof word);
      commdsl::store(to + i / 4 * kWarpgroup * 16, word);
    }
    meet();
    if (thread == 0) store_release_own(flag(slot), 1);
  }

  COMMDSL_FN void add(i32 slot) {
    if (thread == 0) {
      await_word(flag(slot), 1, this->args.timeout_ns);
      store_relaxed(flag(slot), 0);  // for the next call
    }
    meet();
    const char* from = partial(slot);
#pragma unroll
    for (u32 i = 0; i < Shape::kHigh * Shape::kSums; i += 4) {
      Vector16 word;
      commdsl::load(word, from + i / 4 * kWarpgroup * 16);
      float more[4];
      memcpy(more, &word, sizeof word);
#pragma unroll
      for (u32 e = 0; e < 4; ++e) sum[i / Shape::kSums][i % Shape::kSums + e] += more[e];
    }
  }

 private:
  // What the multiplier has read and written comes before.
  COMMDSL_FN void tell_cluster(u32 mark) const {
    meet();
    if (thread < Shape::kSplit) arrive_at_cluster(mark, thread);
  }

  COMMDSL_FN u32 left(i32 slot) const {
    return (static_cast<u32>(slot) * Shape::kCluster + block_of_cluster()) * kMultipliers + number;
  }
  COMMDSL_FN char* partial(i32 slot) const {
    return reinterpret_cast<char*>(this->args.partials) + (u64{left(slot)} * Shape::kHigh * Shape::kSums / 4 * kWarpgroup + thread) * 16;
  }
  COMMDSL_FN u64* flag(i32 slot) const { return reinterpret_cast<u64*>(this->args.flags) + left(slot); }
};

}  // namespace commdsl
