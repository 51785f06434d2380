// The few NVSHMEM device calls a kernel needs, with C linkage: compiled once, because NVSHMEM's headers cost NVRTC seconds.
// Assumes NVSHMEM 3.4.5 and, in front of CCCL on the include path, `nvshmem_repair`. Kernels see nvshmem.cuh, not this.
#include <cuda/std/type_traits>

// The headers of 3.4.5 name these as members of std, where NVRTC has none.
namespace std {
using cuda::std::is_integral;
using cuda::std::is_same;
using cuda::std::is_signed;
using cuda::std::is_unsigned;
}  // namespace std

#include <nvshmem.h>
#include <nvshmemx.h>

// Whole block: bytes from this rank's memory to the peer's copy of a symmetric address. On return the source may be reused;
// the bytes are there once a quiet of the same threads is over.
extern "C" __device__ void commdsl_nvshmem_put_block(void* dest, const void* source, unsigned long bytes, int peer) {
  nvshmemx_putmem_block(dest, source, bytes, peer);
}

// The same by a whole warp.
extern "C" __device__ void commdsl_nvshmem_put_warp(void* dest, const void* source, unsigned long bytes, int peer) {
  nvshmemx_putmem_warp(dest, source, bytes, peer);
}

// By one thread.
extern "C" __device__ void commdsl_nvshmem_put_word(unsigned long* word, unsigned long value, int peer) {
  nvshmem_uint64_p(word, value, peer);
}

extern "C" __device__ void commdsl_nvshmem_put_half(unsigned int* half, unsigned int value, int peer) {
  nvshmem_uint32_p(half, value, peer);
}

// What this thread sent to a peer before arrives there before what it sends to that peer afterwards.
extern "C" __device__ void commdsl_nvshmem_fence() { nvshmem_fence(); }

// On return what this thread put is there, for every peer.
extern "C" __device__ void commdsl_nvshmem_quiet() { nvshmem_quiet(); }

extern "C" __device__ void commdsl_nvshmem_signal(unsigned long* flag, unsigned long value, int peer) {
  nvshmemx_signal_op(flag, value, NVSHMEM_SIGNAL_SET, peer);
}

extern "C" __device__ unsigned long commdsl_nvshmem_read(const unsigned long* word, int peer) {
  return nvshmem_uint64_g(word, peer);
}
