// What the async proxy does with a block's shared memory: bulk copies, the groups and mbarriers that tell of them, fences.
// Assumes device.cuh, vectors of 16 bytes and sm_90. Knows no stage and no order of copies.
//
// Bulk copies are of the async proxy, everything else here is of the generic proxy. Orders between them, by the PTX ISA:
// - Generic, then async (a peer's store or read that a flag told of; this block's own): the flag's acquire and the barrier make
//   it happen before, then `fence.proxy.async` in the thread that issues the copy. A thread that has written generically
//   executes the fence too, in front of the barrier.
// - Async, then generic, here or on a peer: "the completion of a cp.async.bulk operation is followed by an implicit
//   generic-async proxy fence": whoever has seen a load's mbarrier phase end, or has waited for a group (not `.read`: for its
//   writes), has its effects in the generic proxy. That thread then meets the barrier in front of the signals, and their
//   release at system scope is cumulative: it covers what the barrier has ordered before it.
#pragma once

namespace commdsl {

extern __shared__ __align__(128) u8 shared_bytes[];

COMMDSL_FN void fence_proxies() { asm volatile("fence.proxy.async;" ::: "memory"); }
COMMDSL_FN void fence_proxies_of_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
COMMDSL_FN void fence_proxies_of_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Up to so many of the thread's newest groups may still read shared memory.
template <u32 groups>
COMMDSL_FN void await_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(groups) : "memory");
}

// All groups of the thread are over, their writes done.
COMMDSL_FN void await_writes() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

COMMDSL_FN void commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

COMMDSL_FN void bulk_load(u32 stage, const char* from, u32 bytes, u32 mark) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(stage), "l"(from),
               "r"(bytes), "r"(mark)
               : "memory");
}

COMMDSL_FN void bulk_store(char* to, u32 stage, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(stage), "r"(bytes) : "memory");
}

COMMDSL_FN void expect(u32 mark, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mark), "r"(bytes) : "memory");
}

COMMDSL_FN void await_phase(u32 mark, u32 parity) {
  u32 done = 0;
  while (!done) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(mark), "r"(parity)
                 : "memory");
  }
}

COMMDSL_FN void load_shared(Vector16& v, u32 at) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
}

COMMDSL_FN void store_shared(u32 at, const Vector16& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

COMMDSL_FN u32 least(u32 a, u32 b) { return a < b ? a : b; }

}  // namespace commdsl
