// Ranks that are far, reached by puts, signals and reads of NVSHMEM's device library. See transport.cuh for what each is for.
// NVSHMEM names a peer's memory by the address of one's own at the same place of the symmetric heap. So beside `kFar` heap[peer] is
// where the peer's memory would lie if it were this rank's, which need not be where this rank's own memory of this group is; and
// pe[peer] is the peer's number in NVSHMEM, which joins more ranks than those of a group. Lanes are blocks: a tile is put by one. What
// is put may lie in the caller's memory, which serves within a machine; a network card takes memory that NVSHMEM was told of.
#pragma once

extern "C" {
__device__ void commdsl_nvshmem_put_block(void* dest, const void* source, unsigned long bytes, int peer);
__device__ void commdsl_nvshmem_put_warp(void* dest, const void* source, unsigned long bytes, int peer);
__device__ void commdsl_nvshmem_put_word(unsigned long* word, unsigned long value, int peer);
__device__ void commdsl_nvshmem_put_half(unsigned int* half, unsigned int value, int peer);
__device__ void commdsl_nvshmem_fence();
__device__ void commdsl_nvshmem_quiet();
__device__ void commdsl_nvshmem_signal(unsigned long* flag, unsigned long value, int peer);
__device__ unsigned long commdsl_nvshmem_read(const unsigned long* word, int peer);
}

namespace commdsl {

template <class Arguments>
COMMDSL_FN char* far_place(const Arguments& args, i32 peer, u64 at) {
  return reinterpret_cast<char*>((args.heap[peer] & ~kFar) + at);
}

template <class Arguments>
COMMDSL_FN unsigned long* far_word(const Arguments& args, i32 peer, u64 at) {
  return reinterpret_cast<unsigned long*>(far_place(args, peer, at));
}

template <class Arguments>
COMMDSL_FN int pe_of(const Arguments& args, i32 peer) {
  return static_cast<int>(args.pe[peer]);
}

template <class Arguments>
COMMDSL_FN void far_put_tile(const Arguments& args, i32 peer, u64 at, const char* source, u64 bytes) {
  commdsl_nvshmem_put_block(far_place(args, peer, at), source, bytes, pe_of(args, peer));
}

template <class Arguments>
COMMDSL_FN void far_put_run(const Arguments& args, i32 peer, u64 at, const char* source, u64 bytes) {
  commdsl_nvshmem_put_warp(far_place(args, peer, at), source, bytes, pe_of(args, peer));
}

template <class Arguments>
COMMDSL_FN void far_put_word(const Arguments& args, i32 peer, u64 at, u64 value) {
  commdsl_nvshmem_put_word(far_word(args, peer, at), value, pe_of(args, peer));
}

// A network card may read what is put.
COMMDSL_FN void far_stored() { __threadfence_system(); }

template <class Arguments>
COMMDSL_FN void far_put_half(const Arguments& args, i32 peer, u64 at, u32 value) {
  commdsl_nvshmem_put_half(reinterpret_cast<u32*>(far_place(args, peer, at)), value, pe_of(args, peer));
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
  commdsl_nvshmem_signal(far_word(args, peer, at), value, pe_of(args, peer));
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
  return commdsl_nvshmem_read(far_word(args, peer, at), pe_of(args, peer));
}

}  // namespace commdsl
