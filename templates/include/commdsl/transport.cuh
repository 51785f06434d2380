// How a rank reaches another: one that is near by plain loads and stores through a pointer to its heap, one that is far by NVSHMEM.
// Which is which is known when a kernel is launched, peer by peer: `kFar` is set in heap[peer] of one that is far. A kernel whose
// peers are all near (no COMMDSL_NVSHMEM) has no branch for it.
// Assumes the vocabulary. Everything remote goes through here:
//
//   is_near       whether plain loads and stores reach a rank; a constant in a kernel without far ones
//   reach         the address of a place of this rank, or of one that is near
//   put_tile      all threads of a lane: bytes of this rank to the heap of a rank that is far
//   put_run       the same by one warp; put_word: eight bytes, by one thread; put_half: four
//   stored        all threads of a warp: what they stored in memory of this rank may be put by it
//   complete      all threads of a lane, before the barrier in front of what they tell: what they put is there
//   raise_flag    one thread: a number that is waited for
//   post          one thread: a word that says all by itself
//   send_value    one thread: a word that is read once a flag raised behind `complete` was seen
//   send_marked   one thread: a number and a value, which is there when the number is; `see_marked` is how it is looked at
//   peek          a word of any rank, as it is now
//
// The order of a Plan's phases is the same by either way, and so is its proof: what a rank tells comes behind all it moved before.
// For stores the release in `raise_flag` is enough, as the barrier hands it what the other threads stored. A put is no store: only
// the thread that made it can wait for it. So every thread does (`complete`) before the barrier, and the flag is raised after it.
// It waits until what it put is there (quiet); that what it sends to one rank arrives in order (fence) is too little: another thread
// raises the flag, and a rank that is told may tell a third one, which the proof lets read what was put.
#pragma once

#ifdef COMMDSL_NVSHMEM
#ifdef __CUDACC__
#include "commdsl/nvshmem.cuh"
#else
#include "commdsl/host_nvshmem.hpp"
#endif
#endif

namespace commdsl {

#ifdef COMMDSL_NVSHMEM
constexpr bool kHasFar = true;
#else
constexpr bool kHasFar = false;
#endif

// Memory of this rank (`at` is an address) or of a rank's heap (`at` is an offset there).
struct Place {
  bool symmetric;
  i32 rank;
  u64 at;
};

template <class Arguments>
COMMDSL_FN bool is_near(const Arguments& args, i32 rank) {
  return !kHasFar || (args.heap[rank] & kFar) == 0;
}

template <class Arguments>
COMMDSL_FN char* reach(const Arguments& args, const Place& place) {
  return reinterpret_cast<char*>(place.symmetric ? args.heap[place.rank] + place.at : place.at);
}

template <class Arguments>
COMMDSL_FN void put_tile(const Arguments& args, i32 peer, u64 at, const char* source, u64 bytes) {
  if constexpr (kHasFar) far_put_tile(args, peer, at, source, bytes);
}

template <class Arguments>
COMMDSL_FN void put_run(const Arguments& args, i32 peer, u64 at, const char* source, u64 bytes) {
  if constexpr (kHasFar) far_put_run(args, peer, at, source, bytes);
}

template <class Arguments>
COMMDSL_FN void put_word(const Arguments& args, i32 peer, u64 at, u64 value) {
  if constexpr (kHasFar) far_put_word(args, peer, at, value);
}

COMMDSL_FN void stored() {
#ifdef COMMDSL_NVSHMEM
  far_stored();
#endif
  warp_barrier();
}

template <class Arguments>
COMMDSL_FN void put_half(const Arguments& args, i32 peer, u64 at, u32 value) {
  if constexpr (kHasFar) far_put_half(args, peer, at, value);
}

template <class Arguments>
COMMDSL_FN void complete(const Arguments& args) {
  if constexpr (kHasFar) far_quiet(args);
}

#ifndef __CUDACC__
// The end of a lane on the processor, whose thread goes on: what the lane did not wait for is lost.
template <class Arguments>
COMMDSL_FN void leave(const Arguments& args) {
  if constexpr (kHasFar) far_forget(args);
}
#endif

template <class Arguments>
COMMDSL_FN void raise_flag(const Arguments& args, i32 peer, u64 at, u64 value) {
  if (is_near(args, peer)) return store_release(reinterpret_cast<u64*>(args.heap[peer] + at), value);
  if constexpr (kHasFar) far_signal(args, peer, at, value);
}

// Nothing that was stored before has to be seen with it.
template <class Arguments>
COMMDSL_FN void post(const Arguments& args, i32 peer, u64 at, u64 value) {
  if (is_near(args, peer)) return store_relaxed(reinterpret_cast<u64*>(args.heap[peer] + at), value);
  if constexpr (kHasFar) far_signal(args, peer, at, value);
}

template <class Arguments>
COMMDSL_FN void send_value(const Arguments& args, i32 peer, u64 at, u64 value) {
  if (is_near(args, peer)) return store_relaxed(reinterpret_cast<u64*>(args.heap[peer] + at), value);
  put_word(args, peer, at, value);
}

// Sixteen bytes: near, stored as one; far, where nothing promises that, the value first and the number once it is there. One thread
// sends both to one rank, so a fence is enough.
template <class Arguments>
COMMDSL_FN void send_marked(const Arguments& args, i32 peer, u64 at, u64 mark, u64 value) {
  if (is_near(args, peer)) return store_marked(reinterpret_cast<u64*>(args.heap[peer] + at), mark, value);
  if constexpr (kHasFar) {
    far_put_word(args, peer, at + sizeof(u64), value);
    far_fence(args);
    far_mark(args, peer, at, mark);
  }
}

// A word of this rank that `from` sends: the number it has, and its value.
template <class Arguments>
COMMDSL_FN u64 see_marked(const Arguments& args, i32 from, const u64* word, u64& value) {
  if constexpr (kHasFar) {
    if (!is_near(args, from)) return far_see_marked(args, word, value);
  }
  return load_marked(word, value);
}

template <class Arguments>
COMMDSL_FN u64 peek(const Arguments& args, i32 peer, u64 at) {
  if constexpr (kHasFar) {
    if (!is_near(args, peer)) return far_peek(args, peer, at);
  }
  return load_relaxed(reinterpret_cast<const u64*>(args.heap[peer] + at));
}

}  // namespace commdsl
