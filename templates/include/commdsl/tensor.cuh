// Boxes of tensors between memory and shared memory, as the driver's maps describe them; what blocks of a cluster do for each other.
// Assumes async.cuh and sm_90. What lies outside of a tensor is read as zero, and not written.
#pragma once

namespace commdsl {

struct alignas(64) TensorMap {
  u64 words[16];
};

// Where a launch may begin before the one in front of it on the stream has ended: what that one wrote is there.
COMMDSL_FN void await_launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
COMMDSL_FN void allow_launch_behind() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

COMMDSL_FN u32 block_of_cluster() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of the blocks of a cluster, however their warps have parted.
template <u32 cluster>
COMMDSL_FN void cluster_barrier() {
  if constexpr (cluster == 1) {
    __syncthreads();
  } else {
    asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
  }
}

// The same in two parts, between which a thread does other things: nothing that it stores before is promised to the others.
COMMDSL_FN void arrive_at_cluster_barrier() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
COMMDSL_FN void await_cluster_barrier() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

COMMDSL_FN void start_mark(u32 mark, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mark), "r"(arrivals) : "memory");
}

COMMDSL_FN void marks_started() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  fence_proxies();
}

// At the mark in the same place of another block of the cluster.
template <u32 cluster>
COMMDSL_FN void arrive(u32 mark, u32 block) {
  if constexpr (cluster == 1) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mark) : "memory");
  } else {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(
            mark),
        "r"(block)
        : "memory");
  }
}

COMMDSL_FN u32 of_block(u32 at, u32 block) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
  return there;
}

// The same place of the shared memory of another block.
template <class Value>
COMMDSL_FN Value* of_block(Value* at, u32 block) {
  Value* there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(at), "r"(block));
  return there;
}

// What this thread knows of is there for whoever waits for the phase.
COMMDSL_FN void arrive_at_cluster(u32 mark, u32 block) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(of_block(mark, block)) : "memory");
}

COMMDSL_FN void await_phase_of_cluster(u32 mark, u32 parity) {
  u32 done = 0;
  while (!done) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(mark), "r"(parity)
                 : "memory");
  }
}

COMMDSL_FN void store_to_cluster(u32 at, const float* four) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3])
               : "memory");
}

// Of whole 16 bytes, which are there with the phase of a mark of that block, which expects them.
template <class Value>
COMMDSL_FN void send_to_cluster(u32 at, const Value& value, u32 mark, u32 block) {
  u32 word[sizeof value / 4];
  memcpy(word, &value, sizeof value);
#pragma unroll
  for (u32 i = 0; i < sizeof value / 4; i += 4) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     of_block(at + i * 4, block)),
                 "r"(word[i]), "r"(word[i + 1]), "r"(word[i + 2]), "r"(word[i + 3]), "r"(of_block(mark, block))
                 : "memory");
  }
}

// To `to` in every block of the cluster, each of whose marks is told.
template <u32 cluster>
COMMDSL_FN void tensor_load(u32 to, const TensorMap& map, u32 inner, u32 outer, u32 matrix, u32 mark) {
  if constexpr (cluster == 1) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
                 "l"(&map), "r"(inner), "r"(outer), "r"(matrix), "r"(mark)
                 : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], "
        "%6;" ::"r"(to),
        "l"(&map), "r"(inner), "r"(outer), "r"(matrix), "r"(mark), "h"(static_cast<u16>((1 << cluster) - 1))
        : "memory");
  }
}

COMMDSL_FN void tensor_store(const TensorMap& map, u32 inner, u32 outer, u32 matrix, u32 from) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map), "r"(inner), "r"(outer),
               "r"(matrix), "r"(from)
               : "memory");
}

// Four matrices of 8 x 8 elements of 16 bits, of which a thread has a word each; thread t gives the address of line t % 8 of matrix t / 8.
COMMDSL_FN void store_matrices(u32 at, const u32 (&word)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(word[0]), "r"(word[1]), "r"(word[2]),
               "r"(word[3])
               : "memory");
}

// The same the other way.
COMMDSL_FN void load_matrices(u32 (&word)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(at)
               : "memory");
}

COMMDSL_FN void store_shared(u32 at, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(first), "f"(second) : "memory");
}

}  // namespace commdsl
