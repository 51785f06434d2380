// Operations whose data passes through shared memory in bulk copies (TMA), on the GPU: one thread of a lane issues them all.
// Assumes lane.cuh, sm_90, and Plan's dynamic shared memory. What is not aligned moves as in `bulk`.
//
// A lane has kStages stages. Its n-th fill takes stage n % kStages and ends phase n / kStages of that stage's mbarrier; every
// fill is stored by one bulk group. So when the load of fill n is issued, the groups up to n - kStages must have left shared
// memory; loads run kAhead fills ahead of the groups, which leaves kStages - kAhead groups that may still be reading.
#pragma once

#include "commdsl/ring.cuh"

namespace commdsl {

// The lane's part of the block's shared memory.
template <class Plan>
struct Stages : Ring<Plan::kStages, Plan::kStageBytes, Plan::kMarksBytes> {
  static constexpr u32 kAhead = Plan::kStages / 2;
  static_assert((Plan::kStages & (Plan::kStages - 1)) == 0, "fills are numbered modulo 2^32");
  COMMDSL_FN Stages() : Ring<Plan::kStages, Plan::kStageBytes, Plan::kMarksBytes>(lane_of_block()) {}
  COMMDSL_FN static void make_room() { await_reads<Plan::kStages - kAhead>(); }
};

// One fill to all its destinations.
template <u32 most>
COMMDSL_FN void store_all(const Targets<most>& targets, u64 at, u32 stage, u32 bytes) {
#pragma unroll
  for (u32 d = 0; d < most; ++d) {
    if (targets.to[d] != nullptr) bulk_store(targets.to[d] + at, stage, bytes);
  }
  commit_group();
}

// By the issuing thread alone: in once, out once per destination.
template <class Plan, u32 most>
COMMDSL_CALL void copy_bulk(const Targets<most> targets, const char* source, u32 bytes, u32 fill) {
  using S = Stages<Plan>;
  const S stages;
  const auto load = [&](u32 at, u32 into) {
    const u32 length = least(bytes - at, S::kBytes);
    expect(stages.mark(into), length);
    bulk_load(stages.stage(into), source + at, length, stages.mark(into));
  };
  constexpr u32 ahead = S::kAhead * S::kBytes;
  fence_proxies_of_global();
  S::make_room();
  for (u32 at = 0, into = fill; at < bytes && at < ahead; at += S::kBytes, ++into) load(at, into);
  for (u32 at = 0; at < bytes; at += S::kBytes, ++fill) {
    stages.await_fill(fill);
    store_all(targets, at, stages.stage(fill), least(bytes - at, S::kBytes));
    if (bytes - at <= ahead) continue;
    S::make_room();
    load(at + ahead, fill + S::kAhead);
  }
}

// One word of every source of a stage, combined in order. The other warps' words hide the latency, as shared memory's is short.
template <class Plan>
COMMDSL_FN void combine_word(const Operands<Plan>& operands, const Shares<Plan>& shares, u32 at, u32 sources, u32 piece) {
  constexpr u32 ahead = Plan::kMostSources < 4 ? Plan::kMostSources : 4;
  Lanes<typename Plan::Element, Vector16> total;
  for (u32 first = 0; first < sources; first += ahead) {
    Vector16 word[ahead];
#pragma unroll
    for (u32 s = 0; s < ahead; ++s) {
      if (first + s < sources) load_shared(word[s], at + (first + s) * piece);
    }
#pragma unroll
    for (u32 s = 0; s < ahead; ++s) {
      if (first + s >= sources) break;
      total.take(word[s], first + s == 0, typename Plan::Operation{}, shares.of(operands, static_cast<i32>(first + s)));
    }
  }
  total.settle(shares);
  store_shared(at, total.narrow());
}

// By all threads of the lane: they combine what one of them has brought in, and it sends what they have combined. `piece` bytes
// of every source lie in a stage, one after another; the result takes the place of the first.
template <class Plan, u32 most>
COMMDSL_CALL void reduce_bulk(const Targets<most> targets, const Operands<Plan> operands, u32 piece, u32 bytes, u32 fill) {
  using S = Stages<Plan>;
  const S stages;
  const u32 sources = static_cast<u32>(operands.op().num_sources), ahead = S::kAhead * piece;
  const Shares<Plan> shares(operands);
  const char* from[Plan::kMostSources];
  const auto load = [&](u32 at, u32 into) {
    const u32 length = least(bytes - at, piece);
    expect(stages.mark(into), sources * length);
    for (u32 s = 0; s < sources; ++s) bulk_load(stages.stage(into) + s * piece, from[s] + at, length, stages.mark(into));
  };
  if (thread() == 0) {
    for (u32 s = 0; s < sources; ++s) from[s] = operands.source(static_cast<i32>(s));
    fence_proxies_of_global();
    S::make_room();
    for (u32 at = 0, into = fill; at < bytes && at < ahead; at += piece, ++into) load(at, into);
  }
  __syncwarp();
  for (u32 at = 0; at < bytes; at += piece, ++fill) {
    const u32 length = least(bytes - at, piece), stage = stages.stage(fill);
    stages.await_fill(fill);
    for (u32 word = thread() * 16; word < length; word += num_threads() * 16) {
      combine_word(operands, shares, stage + word, sources, piece);
    }
    fence_proxies_of_shared();
    block_barrier();
    if (thread() == 0) {
      store_all(targets, at, stage, length);
      if (bytes - at > ahead) {
        S::make_room();
        load(at + ahead, fill + S::kAhead);
      }
    }
    __syncwarp();  // or the others of its warp would poll for the next fill in between
  }
}

// For the kernels whose flags travel behind the data. `fills` counts alike in all threads of a lane.
template <class Plan>
struct Mover<Plan, Tma> {
  static constexpr u32 kLeastPiece = 512;  // with more sources than leave that, their loads would be too small
  u32 fills = 0;

  COMMDSL_FN void start() {
    if (thread() == 0) Stages<Plan>().start();
    block_barrier();
  }

  // In front of every barrier: what was moved is there for whom the barrier, or a signal behind it, tells of it.
  COMMDSL_FN void finish() {
    if (thread() == 0) await_writes();
    __syncwarp();
  }

  COMMDSL_FN void run(const Operands<Plan>& operands) {
    static_assert(!kHasFar || Plan::kNumRanks == 0, "bulk copies go through pointers");
    Targets<static_cast<u32>(Plan::kMostDests)> targets;
    const u64 bits = find(operands, targets);
    const Op& op = operands.op();
    u64 all = bits;
    for (i32 s = 0; s < op.num_sources; ++s) all |= reinterpret_cast<u64>(operands.source(s));
    const u32 whole = common_alignment(all) == 16 ? static_cast<u32>(operands.slice.bytes) / 16 * 16 : 0;
    if (whole > 0 && op.kind == kCopy) return copy_aligned(operands, targets, whole);
    if constexpr (Plan::kHasReduction) {
      const u32 piece = Stages<Plan>::kBytes / static_cast<u32>(op.num_sources) / 128 * 128;
      if (whole > 0 && op.kind != kCopy && piece >= kLeastPiece) return reduce_aligned(operands, targets, piece, whole);
    }
    combine(operands, targets, bits);
    fence_proxies();
  }

 private:
  template <u32 most>
  COMMDSL_FN void copy_aligned(const Operands<Plan>& operands, Targets<most>& targets, u32 whole) {
    const char* source = operands.source(0);
    if (!drop(targets, source)) return;
    if (thread() == 0) copy_bulk<Plan>(targets, source, whole, fills);
    __syncwarp();
    fills += (whole + Stages<Plan>::kBytes - 1) / Stages<Plan>::kBytes;
    if (whole + thread() >= operands.slice.bytes) return;
    u8 value;
    load(value, source + whole + thread());
    targets.put(whole + thread(), value);
    fence_proxies();
  }

  // A thread that came to a fill while the one before it in its stage was on the way would take that one's phase for its own;
  // so all meet here, unless the operation's own barrier has just been passed.
  template <u32 most>
  COMMDSL_FN void reduce_aligned(const Operands<Plan>& operands, const Targets<most>& targets, u32 piece, u32 whole) {
    const Op& op = operands.op();
    if (op.num_waits == 0 && !op.barrier) block_barrier();
    by_operation(operands, [&](const auto& same) { reduce_bulk(targets, same, piece, whole, fills); });
    fills += (whole + piece - 1) / piece;
    if (whole == operands.slice.bytes) return;
    by_operation(operands, [&](const auto& same) { reduce_tail(targets, same, whole); });
    fence_proxies();
  }
};

}  // namespace commdsl
