// The NVSHMEM transport: how a lane reaches another rank by puts, gets and signals of NVSHMEM's device library.
// Assumes `heap[rank]` is this rank's own symmetric memory, laid out alike on all ranks: an offset names the same place everywhere.
// Ranks of the plan are NVSHMEM's own numbers (PEs). Reductions read peers through NVSHMEM's pointers, which exist within a node.
#pragma once

extern "C" {
__device__ void commdsl_nvshmem_put(void* dest, const void* source, unsigned long bytes, int peer);
__device__ void commdsl_nvshmem_get(void* dest, const void* source, unsigned long bytes, int peer);
__device__ void commdsl_nvshmem_fence();
__device__ void commdsl_nvshmem_signal(unsigned long* flag, unsigned long value, int peer);
__device__ unsigned long commdsl_nvshmem_read(const unsigned long* word, int peer);
__device__ void* commdsl_nvshmem_pointer(const void* symmetric, int peer);
}

namespace commdsl {

constexpr bool kReachesPeers = true;

// This rank's copy of what `place` names.
template <class Arguments>
COMMDSL_FN char* own_copy(const Arguments& args, const Place& place) {
  return reinterpret_cast<char*>(place.symmetric ? args.heap[args.rank] + place.at : place.at);
}

template <class Arguments>
COMMDSL_FN bool is_remote(const Arguments& args, const Place& place) {
  return place.symmetric && place.rank != args.rank;
}

template <class Arguments>
COMMDSL_FN char* reach(const Arguments& args, const Place& place) {
  char* own = own_copy(args, place);
  return is_remote(args, place) ? static_cast<char*>(commdsl_nvshmem_pointer(own, place.rank)) : own;
}

template <class Arguments>
COMMDSL_FN void transfer(const Arguments& args, const Place& dest, const Place& source, u64 bytes) {
  if (is_remote(args, dest)) {
    commdsl_nvshmem_put(own_copy(args, dest), reach(args, source), bytes, dest.rank);
  } else if (is_remote(args, source)) {
    commdsl_nvshmem_get(own_copy(args, dest), own_copy(args, source), bytes, source.rank);
  } else {
    copy(own_copy(args, dest), own_copy(args, source), bytes);
  }
}

template <class Arguments>
COMMDSL_FN void complete(const Arguments&) {
  commdsl_nvshmem_fence();
}

// The threads of the block fenced their own stores; this fence makes the barrier after them count for the flag, too.
template <class Arguments>
COMMDSL_FN void raise_flag(const Arguments& args, i32 peer, u64 at, u64 value) {
  commdsl_nvshmem_fence();
  commdsl_nvshmem_signal(reinterpret_cast<unsigned long*>(args.heap[args.rank] + at), value, peer);
}

template <class Arguments>
COMMDSL_FN u64 peek(const Arguments& args, i32 peer, u64 at) {
  return commdsl_nvshmem_read(reinterpret_cast<const unsigned long*>(args.heap[args.rank] + at), peer);
}

}  // namespace commdsl
