// Stages of a block's shared memory that bulk copies fill in turn, one issuer each.
// Assumes vectors.cuh. The orders between its copies and everything else are those of async.cuh.
#pragma once

#include "commdsl/async.cuh"

namespace commdsl {

// Stages of shared memory that one issuer fills in turn: a mark for each in front, then the stages. Its n-th fill takes stage
// n % count, and ends phase n / count of that stage's mark.
template <u32 count, u32 bytes, u32 marks>
struct Ring {
  static constexpr u32 kCount = count, kBytes = bytes, kMarks = marks;
  static_assert(count >= 2, "one is filled while another is used");
  static_assert(count * sizeof(u64) <= marks && marks % 128 == 0 && bytes % 128 == 0, "marks in front, stages aligned");

  u32 base;

  // Of the `which`-th issuer of a block.
  COMMDSL_FN explicit Ring(u32 which) : base(static_cast<u32>(__cvta_generic_to_shared(shared_bytes))) {
    base += which * (marks + count * bytes);
  }
  COMMDSL_FN u32 mark(u32 fill) const { return base + fill % count * sizeof(u64); }
  COMMDSL_FN u32 stage(u32 fill) const { return base + marks + fill % count * bytes; }

  // Every copy to a mark is announced before it is issued; the one arrival and all announced bytes end the phase.
  COMMDSL_FN void start() const {
    for (u32 i = 0; i < count; ++i) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(mark(i)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_proxies();
  }
  // When nothing is on its way: the marks are memory again.
  COMMDSL_FN void stop() const {
    for (u32 i = 0; i < count; ++i) asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(mark(i)) : "memory");
  }
  COMMDSL_FN void load(u32 fill, const char* from, u32 length) const {
    expect(mark(fill), length);
    bulk_load(stage(fill), from, length, mark(fill));
  }
  COMMDSL_FN void await_fill(u32 fill) const { await_phase(mark(fill), fill / count % 2); }
};

}  // namespace commdsl
