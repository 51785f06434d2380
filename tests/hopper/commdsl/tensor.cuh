// Boxes of tensors, and blocks of a cluster, as machine.cpp makes them.
#pragma once

namespace commdsl {

// As the driver that is made up writes it: what `cuTensorMapEncodeTiled` was told.
struct alignas(64) TensorMap {
  u64 address, size[3], step[2], box[3], element, swizzle, unused[5];
};

COMMDSL_FN void await_launch_before() {}
COMMDSL_FN void allow_launch_behind() {}
u32 block_of_cluster();
void cluster_barrier(u32 cluster);
template <u32 cluster>
COMMDSL_FN void cluster_barrier() {
  cluster_barrier(cluster);
}

void start_mark(u32 mark, u32 arrivals);
COMMDSL_FN void marks_started() {}
u32 of_block(u32 at, u32 block);
void arrive_at_cluster(u32 mark, u32 block);
void arrive_here(u32 mark);
template <u32 cluster>
COMMDSL_FN void arrive(u32 mark, u32 block) {
  if constexpr (cluster == 1) {
    arrive_here(mark);
  } else {
    arrive_at_cluster(mark, block);
  }
}
COMMDSL_FN void await_phase_of_cluster(u32 mark, u32 parity) { await_phase(mark, parity); }
void store_to_cluster(u32 at, const float* four);

void send(u32 at, const void* bytes, u32 count, u32 mark, u32 block);
template <class Value>
COMMDSL_FN void send_to_cluster(u32 at, const Value& value, u32 mark, u32 block) {
  static_assert(sizeof value % 16 == 0, "whole words are sent");
  send(at, &value, sizeof value, mark, block);
}

void tensor_load(u32 to, const TensorMap& map, u32 inner, u32 outer, u32 matrix, u32 mark, u32 cluster);
template <u32 cluster>
COMMDSL_FN void tensor_load(u32 to, const TensorMap& map, u32 inner, u32 outer, u32 matrix, u32 mark) {
  tensor_load(to, map, inner, outer, matrix, mark, cluster);
}
void tensor_store(const TensorMap& map, u32 inner, u32 outer, u32 matrix, u32 from);
void store_matrices(u32 at, const u32 (&word)[4]);
void load_matrices(u32 (&word)[4], u32 at);
void store_shared(u32 at, float first, float second);

}  // namespace commdsl
