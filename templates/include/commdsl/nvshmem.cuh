// Ranks that are far, reached by puts, signals and reads of NVSHMEM's device library. See transport.cuh for what each is for.
// Assumes symmetric memory laid out alike on all ranks: NVSHMEM names a peer's memory by the address of one's own. Ranks of the plan
// are NVSHMEM's own numbers (PEs). Lanes are blocks: a tile is put by one. What is put may lie in the caller's memory: that serves
// within a machine, which is all that groups span; a network card takes memory that NVSHMEM was told of.
#pragma once

extern "C" {
__device__ void commdsl_nvshmem_put_block(void* dest, const void* source, unsigned long bytes, int peer);
__device__ void commdsl_nvshmem_put_warp(void* dest, const void* source, unsigned long bytes, int peer);
__device__ void commdsl_nvshmem_put_word(unsigned long* word, unsigned long value, int peer);
__device__ void commdsl_nvshmem_fence();
__device__ void commdsl_nvshmem_quiet();
__device__ void commdsl_nvshmem_signal(unsigned long* flag, unsigned long value, int peer);
__device__ unsigned long commdsl_nvshmem_read(const unsigned long* word, int peer);
}

namespace commdsl {

template <class Arguments>
COMMDSL_FN char* symmetric(const Arguments& args, u64 at) {
  return reinterpret_cast<char*>(args.heap[args.rank] + at);
}

template <class Arguments>
COMMDSL_FN unsigned long* symmetric_word(const Arguments& args, u64 at) {
  return reinterpret_cast<unsigned long*>(symmetric(args, at));
}

template <class Arguments>
COMMDSL_FN void far_put_tile(const Arguments& args, i32 peer, u64 at, const char* source, u64 bytes) {
  commdsl_nvshmem_put_block(symmetric(args, at), source, bytes, peer);
}

template <class Arguments>
COMMDSL_FN void far_put_run(const Arguments& args, i32 peer, u64 at, const char* source, u64 bytes) {
  commdsl_nvshmem_put_warp(symmetric(args, at), source, bytes, peer);
}

template <class Arguments>
COMMDSL_FN void far_put_word(const Arguments& args, i32 peer, u64 at, u64 value) {
  commdsl_nvshmem_put_word(symmetric_word(args, at), value, peer);
}

template <class Arguments>
COMMDSL_FN void far_fence(const Arguments&) {
  commdsl_nvshmem_fence();
}

template <class Arguments>
COMMDSL_FN void far_quiet(const Arguments&) {
  commdsl_nvshmem_quiet();
}

// What the threads of the block stored to ranks that are near comes before the signal, too: the barrier handed it to this thread.
template <class Arguments>
COMMDSL_FN void far_signal(const Arguments& args, i32 peer, u64 at, u64 value) {
  __threadfence_system();
  commdsl_nvshmem_signal(symmetric_word(args, at), value, peer);
}

template <class Arguments>
COMMDSL_FN void far_mark(const Arguments& args, i32 peer, u64 at, u64 mark) {
  far_signal(args, peer, at, mark);
}

template <class Arguments>
COMMDSL_FN u64 far_see_marked(const Arguments&, const u64* word, u64& value) {
  const u64 mark = load_acquire(word);
  value = load_relaxed(word + 1);
  return mark;
}

template <class Arguments>
COMMDSL_FN u64 far_peek(const Arguments& args, i32 peer, u64 at) {
  return commdsl_nvshmem_read(symmetric_word(args, at), peer);
}

}  // namespace commdsl
