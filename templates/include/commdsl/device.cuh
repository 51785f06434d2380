// The GPU vocabulary: threads and barriers of a lane, flags, clocks, block-wide copy, reduce and scale.
// Assumes sm_80 or newer and NVRTC or nvcc; needs no header but ours. A lane is one thread block.
//
// Data is moved by weak ld.global and st.global, never ld.global.nc: a peer may have written it, and the acquire of its flag
// followed by a block barrier is what makes it visible. The "memory" clobbers keep the compiler to that order.
#pragma once

#define COMMDSL_FN __device__ __forceinline__
#define COMMDSL_CALL __device__ __noinline__  // compiled once however often it is called: NVRTC's time is in unrolled loops
#define COMMDSL_TABLE static __device__ const
#define COMMDSL_KERNEL(name, plan)                                                                            \
  extern "C" __global__ void __launch_bounds__(plan::kThreads, 1)                                             \
      name(const __grid_constant__ commdsl::Args<plan::kNumRanks, plan::kNumTensors> args) {                  \
    commdsl::run_lane<plan>(args, static_cast<commdsl::i32>(blockIdx.x), plan::tables());                     \
  }

namespace commdsl {

COMMDSL_FN u32 thread() { return threadIdx.x; }
COMMDSL_FN u32 num_threads() { return blockDim.x; }
COMMDSL_FN void block_barrier() { __syncthreads(); }
COMMDSL_FN bool block_any(bool value) { return __syncthreads_or(value) != 0; }

COMMDSL_FN u64 load_acquire(const u64* flag) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

COMMDSL_FN void store_release(u64* flag, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

COMMDSL_FN bool acquired(const u64*, u64) { return true; }

COMMDSL_FN u64 load_relaxed(const u64* word) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

COMMDSL_FN void store_relaxed(u64* word, u64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// True for the one caller that finds the word zero; all callers are lanes of one GPU.
COMMDSL_FN bool claim(u64* word) { return atomicCAS(word, 0ull, 1ull) == 0; }

COMMDSL_FN u64 now_ns() {
  u64 time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// The clock and the error record (host memory) are looked at so seldom that polling keeps its speed.
constexpr u32 kPollsPerCheck = 1024;
COMMDSL_FN void relax(u32) {}

COMMDSL_FN float half_to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

COMMDSL_FN u16 float_to_half(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

COMMDSL_FN float bfloat_to_float(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }

COMMDSL_FN u16 float_to_bfloat(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

struct alignas(16) Vector16 {
  u32 x, y, z, w;
};

COMMDSL_FN void load(Vector16& v, const void* p) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
}
COMMDSL_FN void load(u64& v, const void* p) { asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); }
COMMDSL_FN void load(u32& v, const void* p) { asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); }
COMMDSL_FN void load(u16& v, const void* p) { asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory"); }
COMMDSL_FN void load(u8& v, const void* p) {
  u32 wide;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(wide) : "l"(p) : "memory");
  v = static_cast<u8>(wide);
}

COMMDSL_FN void store(void* p, const Vector16& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
COMMDSL_FN void store(void* p, u64 v) { asm volatile("st.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
COMMDSL_FN void store(void* p, u32 v) { asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
COMMDSL_FN void store(void* p, u16 v) { asm volatile("st.global.u16 [%0], %1;" ::"l"(p), "h"(v) : "memory"); }
COMMDSL_FN void store(void* p, u8 v) {
  asm volatile("st.global.u8 [%0], %1;" ::"l"(p), "r"(static_cast<u32>(v)) : "memory");
}

// The largest power of two up to 16 that divides every address or-ed into `bits`.
COMMDSL_FN u32 common_alignment(u64 bits) {
  u32 low = static_cast<u32>(bits) | 16u;
  return low & (~low + 1u);
}

// `unroll` loads are in flight before the first store: one thread alone would wait a whole link latency for each.
template <class Word, u32 unroll>
COMMDSL_FN void copy_words(char* dest, const char* source, u64 bytes) {
  const u64 words = bytes / sizeof(Word);
  const u64 stride = num_threads();
  u64 i = thread();
  for (; i + (unroll - 1) * stride < words; i += unroll * stride) {
    Word value[unroll];
#pragma unroll
    for (u32 j = 0; j < unroll; ++j) load(value[j], source + (i + j * stride) * sizeof(Word));
#pragma unroll
    for (u32 j = 0; j < unroll; ++j) store(dest + (i + j * stride) * sizeof(Word), value[j]);
  }
  for (; i < words; i += stride) {
    Word value;
    load(value, source + i * sizeof(Word));
    store(dest + i * sizeof(Word), value);
  }
  for (u64 at = words * sizeof(Word) + thread(); at < bytes; at += stride) {
    u8 value;
    load(value, source + at);
    store(dest + at, value);
  }
}

COMMDSL_CALL void copy(char* dest, const char* source, u64 bytes) {
  switch (common_alignment(reinterpret_cast<u64>(dest) | reinterpret_cast<u64>(source))) {
    case 16: return copy_words<Vector16, 8>(dest, source, bytes);
    case 8: return copy_words<u64, 8>(dest, source, bytes);
    case 4: return copy_words<u32, 8>(dest, source, bytes);
    case 2: return copy_words<u16, 4>(dest, source, bytes);
    default: return copy_words<u8, 4>(dest, source, bytes);
  }
}

// The bits of one element as a word that `load` knows.
template <u32 size>
struct WordOf;
template <>
struct WordOf<2> {
  using Type = u16;
};
template <>
struct WordOf<4> {
  using Type = u32;
};
template <>
struct WordOf<8> {
  using Type = u64;
};

template <class Element, class Word>
struct Lanes {
  using Storage = typename Element::Storage;
  static constexpr u32 kCount = sizeof(Word) / sizeof(Storage);
  typename Element::Accumulator value[kCount];

  COMMDSL_FN void widen(const Word& word) {
    Storage element[kCount];
    memcpy(element, &word, sizeof(Word));
#pragma unroll
    for (u32 e = 0; e < kCount; ++e) value[e] = Element::widen(element[e]);
  }
  COMMDSL_FN Word narrow() const {
    Storage element[kCount];
#pragma unroll
    for (u32 e = 0; e < kCount; ++e) element[e] = Element::narrow(value[e]);
    Word word;
    memcpy(&word, element, sizeof(Word));
    return word;
  }
};

// One word of the result, or `unroll` words a stride apart. Up to `ahead` sources are loaded before the first is combined.
template <class Element, class Operation, class Word, u32 unroll, u32 ahead, class Sources>
COMMDSL_FN void reduce_words_at(char* dest, const Sources& sources, u64 at, u64 step) {
  Lanes<Element, Word> total[unroll];
  for (i32 first = 0; first < sources.count; first += ahead) {
    Word word[ahead][unroll];
#pragma unroll
    for (u32 s = 0; s < ahead; ++s) {
      if (first + static_cast<i32>(s) >= sources.count) break;
      const char* source = sources.address(first + s);
#pragma unroll
      for (u32 j = 0; j < unroll; ++j) load(word[s][j], source + at + j * step);
    }
#pragma unroll
    for (u32 s = 0; s < ahead; ++s) {
      if (first + static_cast<i32>(s) >= sources.count) break;
#pragma unroll
      for (u32 j = 0; j < unroll; ++j) {
        Lanes<Element, Word> next;
        next.widen(word[s][j]);
#pragma unroll
        for (u32 e = 0; e < Lanes<Element, Word>::kCount; ++e) {
          total[j].value[e] = first + s == 0 ? next.value[e] : Operation::apply(total[j].value[e], next.value[e]);
        }
      }
    }
  }
#pragma unroll
  for (u32 j = 0; j < unroll; ++j) store(dest + at + j * step, total[j].narrow());
}

// From byte `at`, a thread's own offset in, while `unroll` words are left to it; returns where it stopped.
template <class Element, class Operation, class Word, u32 unroll, u32 ahead, class Sources>
COMMDSL_CALL u64 reduce_words(char* dest, const Sources& sources, u64 at, u64 bytes) {
  const u64 step = num_threads() * sizeof(Word);
  for (; at + (unroll - 1) * step + sizeof(Word) <= bytes; at += unroll * step) {
    reduce_words_at<Element, Operation, Word, unroll, ahead>(dest, sources, at, step);
  }
  return at;
}

// Eight loads in flight a thread either way: of two sources for the bulk, of eight sources for what is left. What lies past
// the last whole vector, and operands that are not aligned alike, are combined element by element.
template <class Element, class Operation, class Sources>
COMMDSL_FN void reduce(char* dest, const Sources& sources, u64 bytes) {
  using Storage = typename Element::Storage;
  using Word = typename WordOf<sizeof(Storage)>::Type;
  u64 bits = reinterpret_cast<u64>(dest);
  for (i32 s = 0; s < sources.count; ++s) bits |= reinterpret_cast<u64>(sources.address(s));
  u64 done = 0;
  if (common_alignment(bits) == 16) {
    const u64 at = reduce_words<Element, Operation, Vector16, 4, 2>(dest, sources, thread() * 16, bytes);
    reduce_words<Element, Operation, Vector16, 1, 8>(dest, sources, at, bytes);
    done = bytes / 16 * 16;
  }
  reduce_words<Element, Operation, Word, 1, 8>(dest, sources, done + thread() * sizeof(Storage), bytes);
}

template <class Element, class Word>
COMMDSL_FN void scale_words(char* dest, const char* source, u64 begin, u64 end, i32 divisor) {
  for (u64 at = begin + thread() * sizeof(Word); at + sizeof(Word) <= end; at += num_threads() * sizeof(Word)) {
    Word word;
    load(word, source + at);
    Lanes<Element, Word> lanes;
    lanes.widen(word);
#pragma unroll
    for (u32 e = 0; e < Lanes<Element, Word>::kCount; ++e) {
      lanes.value[e] = lanes.value[e] / static_cast<typename Element::Accumulator>(divisor);
    }
    store(dest + at, lanes.narrow());
  }
}

// `dest` may be `source`: a thread reads a word before it writes it.
template <class Element>
COMMDSL_FN void scale(char* dest, const char* source, u64 bytes, i32 divisor) {
  using Word = typename WordOf<sizeof(typename Element::Storage)>::Type;
  u64 done = 0;
  if (common_alignment(reinterpret_cast<u64>(dest) | reinterpret_cast<u64>(source)) == 16) {
    done = bytes / 16 * 16;
    scale_words<Element, Vector16>(dest, source, 0, done, divisor);
  }
  scale_words<Element, Word>(dest, source, done, bytes, divisor);
}

// The rank's own rows, brought into shared memory where they fit: a row is then a few cycles away instead of a trip to L2.
template <class Row>
COMMDSL_FN const Row* stage_rows(char* shared, const Row* rows, i32 first, i32 count) {
  const i32* from = reinterpret_cast<const i32*>(rows + first);
  i32* to = reinterpret_cast<i32*>(shared);
  const u32 words = static_cast<u32>(count) * (sizeof(Row) / sizeof(i32));
  for (u32 i = thread(); i < words; i += num_threads()) to[i] = from[i];
  return reinterpret_cast<const Row*>(shared) - first;
}

template <class Plan>
COMMDSL_FN Tables stage(const Tables& tables, i32 rank) {
  constexpr u32 kOpsBytes = Plan::kMaxOps * sizeof(Op);
  constexpr u32 kSourcesBytes = Plan::kMaxSources * sizeof(Location);
  constexpr u32 kWaitsBytes = Plan::kMaxWaits * sizeof(Wait);
  constexpr u32 kBytes = kOpsBytes + kSourcesBytes + kWaitsBytes + Plan::kMaxSignals * sizeof(Signal);
  if constexpr (kBytes > 40 * 1024) {
    return tables;
  } else {
    __shared__ alignas(16) char shared[kBytes + 16];
    const i32 first = tables.rank_begin[rank];
    const i32 count = tables.rank_begin[rank + 1] - first;
    if (count == 0) return tables;
    const Op begin = tables.ops[first];
    const Op last = tables.ops[first + count - 1];
    Tables staged = tables;
    staged.ops = stage_rows(shared, tables.ops, first, count);
    staged.sources = stage_rows(shared + kOpsBytes, tables.sources, begin.first_source,
                                last.first_source + last.num_sources - begin.first_source);
    staged.waits = stage_rows(shared + kOpsBytes + kSourcesBytes, tables.waits, begin.first_wait,
                              last.first_wait + last.num_waits - begin.first_wait);
    staged.signals = stage_rows(shared + kOpsBytes + kSourcesBytes + kWaitsBytes, tables.signals, begin.first_signal,
                                last.first_signal + last.num_signals - begin.first_signal);
    block_barrier();
    return staged;
  }
}

}  // namespace commdsl
