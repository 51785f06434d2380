// How a lane reaches another rank: through a pointer to its heap. The NVSHMEM transport offers the same functions, and one more.
// Assumes the vocabulary. Everything remote goes through here: the address of a peer's cell, a signal.
#pragma once

#ifdef COMMDSL_NVSHMEM
#include "commdsl/nvshmem.cuh"
#else

namespace commdsl {

// A peer's cells are addresses like any other.
constexpr bool kReachesPeers = true;

template <class Arguments>
COMMDSL_FN char* reach(const Arguments& args, const Place& place) {
  return reinterpret_cast<char*>(place.symmetric ? args.heap[place.rank] + place.at : place.at);
}

// Called by the whole block before the barrier in front of its signals. Stores through pointers are ordered by the release.
template <class Arguments>
COMMDSL_FN void complete(const Arguments&) {}

// One thread; `at` is the offset of the flag in the peer's heap.
template <class Arguments>
COMMDSL_FN void raise_flag(const Arguments& args, i32 peer, u64 at, u64 value) {
  store_release(reinterpret_cast<u64*>(args.heap[peer] + at), value);
}

// What a peer last published of its state; only for the report of a time-out.
template <class Arguments>
COMMDSL_FN u64 peek(const Arguments& args, i32 peer, u64 at) {
  return load_relaxed(reinterpret_cast<const u64*>(args.heap[peer] + at));
}

}  // namespace commdsl
#endif
