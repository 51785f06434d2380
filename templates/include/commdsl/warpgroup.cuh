// What four warps of Hopper do together: products of what lies in shared memory, barriers, registers that they give each other.
// Assumes device.cuh and sm_90a. Knows no stage, and not which products: instructions that multiply are printed (wgmma.cu.j2).
#pragma once

namespace commdsl {

constexpr u32 kWarpgroup = 128;

// What was written to sums before is there.
COMMDSL_FN void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
COMMDSL_FN void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// All that were committed, but so many of the newest.
template <u32 left>
COMMDSL_FN void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}

// The compiler is not to move sums while products are on their way.
template <u32 high, u32 sums>
COMMDSL_FN void settle(float (&sum)[high][sums]) {
#pragma unroll
  for (u32 i = 0; i < high * sums; ++i) asm volatile("" : "+f"(sum[i / sums][i % sums])::"memory");
}

COMMDSL_FN void warpgroup_barrier(u32 number) { asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(kWarpgroup) : "memory"); }

// So many are left, or there are.
template <u32 registers>
COMMDSL_FN void drop_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <u32 registers>
COMMDSL_FN void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace commdsl
