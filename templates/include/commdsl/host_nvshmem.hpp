// Ranks that are far, on the processor: puts arrive as early or as late as NVSHMEM's may. See transport.cuh for what each is for.
// Assumes the vocabulary, and that the rest of heap[peer] beside `kFar` is where the peer's heap is: so plain accesses to a rank that
// is far fault here. Every other put is there at once, so one that is made too early shows; the others are kept until their thread
// waits for them, so a flag that is raised without that shows: data is missing, or is written behind the flag.
#pragma once

namespace commdsl {

struct PendingPut {
  PendingPut* before;
  char* dest;
  u64 bytes;
  bool is_word;  // one that may be looked at meanwhile
};

inline thread_local PendingPut* pending_puts = nullptr;
inline u64 num_puts = 0;  // of all threads

template <class Arguments>
COMMDSL_FN char* far_place(const Arguments& args, i32 peer, u64 at) {
  return reinterpret_cast<char*>((args.heap[peer] & ~kFar) + at);
}

COMMDSL_FN void deliver(char* dest, const void* source, u64 bytes, bool is_word) {
  if (is_word) return store_relaxed(reinterpret_cast<u64*>(dest), *static_cast<const u64*>(source));
  memcpy(dest, source, bytes);
}

// The source may be reused on return: where the put is kept its bytes are, too, behind the note of where they are to go.
COMMDSL_FN void far_put(char* dest, const void* source, u64 bytes, bool is_word = false) {
  if (__atomic_fetch_add(&num_puts, 1, __ATOMIC_RELAXED) % 2 == 0) return deliver(dest, source, bytes, is_word);
  PendingPut* put = static_cast<PendingPut*>(malloc(sizeof(PendingPut) + bytes));
  if (put == nullptr) abort();
  *put = {pending_puts, dest, bytes, is_word};
  memcpy(put + 1, source, bytes);
  pending_puts = put;
}

template <class Arguments>
COMMDSL_FN void far_put_tile(const Arguments& args, i32 peer, u64 at, const char* source, u64 bytes) {
  far_put(far_place(args, peer, at), source, bytes);
}

template <class Arguments>
COMMDSL_FN void far_put_run(const Arguments& args, i32 peer, u64 at, const char* source, u64 bytes) {
  far_put(far_place(args, peer, at), source, bytes);
}

template <class Arguments>
COMMDSL_FN void far_put_word(const Arguments& args, i32 peer, u64 at, u64 value) {
  far_put(far_place(args, peer, at), &value, sizeof(value), true);
}

COMMDSL_FN void far_stored() {}

template <class Arguments>
COMMDSL_FN void far_put_half(const Arguments& args, i32 peer, u64 at, u32 value) {
  far_put(far_place(args, peer, at), &value, sizeof(value));
}

COMMDSL_FN void drop_put() {
  PendingPut* put = pending_puts;
  pending_puts = put->before;
  free(put);
}

// The last put first: nothing may rely on their order.
template <class Arguments>
COMMDSL_FN void far_quiet(const Arguments&) {
  for (; pending_puts != nullptr; drop_put()) {
    deliver(pending_puts->dest, pending_puts + 1, pending_puts->bytes, pending_puts->is_word);
  }
}

// To every rank, which is more than is asked.
template <class Arguments>
COMMDSL_FN void far_fence(const Arguments& args) {
  far_quiet(args);
}

template <class Arguments>
COMMDSL_FN void far_forget(const Arguments&) {
  while (pending_puts != nullptr) drop_put();
}

template <class Arguments>
COMMDSL_FN void far_signal(const Arguments& args, i32 peer, u64 at, u64 value) {
  store_release(reinterpret_cast<u64*>(far_place(args, peer, at)), value);
}

// A number that `load_marked` looks at, which acquires what was there before it.
template <class Arguments>
COMMDSL_FN void far_mark(const Arguments& args, i32 peer, u64 at, u64 mark) {
  __atomic_store_n(reinterpret_cast<u64*>(far_place(args, peer, at)), mark, __ATOMIC_RELEASE);
}

template <class Arguments>
COMMDSL_FN u64 far_see_marked(const Arguments&, const u64* word, u64& value) {
  return load_marked(word, value);
}

template <class Arguments>
COMMDSL_FN u64 far_peek(const Arguments& args, i32 peer, u64 at) {
  return load_relaxed(reinterpret_cast<const u64*>(far_place(args, peer, at)));
}

}  // namespace commdsl
