// The NVSHMEM transport: how a lane reaches another rank by puts, gets and signals of NVSHMEM's device library.
// Assumes `heap[rank]` is this rank's own symmetric memory, laid out alike on all ranks: an offset names the same place everywhere.
// Ranks of the plan are NVSHMEM's own numbers (PEs).
#pragma once

extern "C" {
__device__ void commdsl_nvshmem_put(void* dest, const void* source, unsigned long bytes, int peer);
__device__ void commdsl_nvshmem_fence();
__device__ void commdsl_nvshmem_signal(unsigned long* flag, unsigned long value, int peer);
__device__ unsigned long commdsl_nvshmem_read(const unsigned long* word, int peer);
}

namespace commdsl {

// Plain loads and stores are for this rank's own memory.
constexpr bool kReachesPeers = false;

// A place of this rank, or this rank's copy of a symmetric one: NVSHMEM names a peer's memory by the caller's address.
template <class Arguments>
COMMDSL_FN char* reach(const Arguments& args, const Place& place) {
  return reinterpret_cast<char*>(place.symmetric ? args.heap[args.rank] + place.at : place.at);
}

// Puts a copy's source where plain stores do not reach.
template <class Operands>
COMMDSL_FN void transfer(const Operands& operands) {
  const auto& args = operands.here.args;
  for (i32 d = 0; d < operands.op().num_dests; ++d) {
    const Place dest = operands.dest_place(d);
    if (!dest.symmetric || dest.rank == args.rank) continue;
    commdsl_nvshmem_put(reach(args, dest), operands.source(0), operands.slice.bytes, dest.rank);
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
