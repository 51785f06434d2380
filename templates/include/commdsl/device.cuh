// The GPU vocabulary: threads and barriers of a lane, flags, clocks, a pass over the tiles of a lane.
// Assumes sm_80 or newer and NVRTC or nvcc; needs no header but ours. A lane is COMMDSL_THREADS threads of a block, which has
// COMMDSL_LANES_PER_BLOCK of them; each has a barrier of its own, so that lanes of one SM wait at different times.
//
// Data is moved by weak ld.global and st.global, never ld.global.nc: a peer may have written it, and the acquire of its flag
// followed by a block barrier is what makes it visible. The "memory" clobbers keep the compiler to that order.
#pragma once

#define COMMDSL_FN __device__ __forceinline__
#define COMMDSL_CALL __device__ __noinline__  // compiled once however often it is called: NVRTC's time is in unrolled loops
#define COMMDSL_TABLE static __device__ const
#define COMMDSL_CONSTANT static __constant__ const
// The lanes alone: what they send tells of the call.
#define COMMDSL_LANES(name, plan)                                                                             \
  extern "C" __global__ void __launch_bounds__(COMMDSL_THREADS * COMMDSL_LANES_PER_BLOCK, 1)                  \
      name(const __grid_constant__ plan::Args args) {                                                         \
    const commdsl::i32 lane = commdsl::this_lane(gridDim.x);                                                  \
    if (lane < args.active_lanes) plan::run(args, lane);                                                      \
  }

// The last block agrees, beside the lanes: those have the SMs first.
#define COMMDSL_KERNEL(name, plan)                                                                            \
  extern "C" __global__ void __launch_bounds__(COMMDSL_THREADS * COMMDSL_LANES_PER_BLOCK, 1)                  \
      name(const __grid_constant__ plan::Args args) {                  \
    const commdsl::i32 lane = commdsl::this_lane(gridDim.x - 1);                                              \
    if (commdsl::is_last_block()) {                                                                           \
      if (commdsl::is_first_warp() && plan::tells(args)) plan::agree(args, plan::enter(args));                \
    } else if (lane < args.active_lanes) {                                                                    \
      plan::run(args, lane);                                                                                  \
    }                                                                                                         \
  }

// Roles in one launch: the first blocks move, the others compute, and the last agrees.
#define COMMDSL_ROLES(name, plan)                                                                                \
  extern "C" __global__ void __launch_bounds__(COMMDSL_THREADS * COMMDSL_LANES_PER_BLOCK, 1)                     \
      name(const __grid_constant__ plan::Args args) {                                                            \
    const commdsl::u32 moving = commdsl::blocks_of(args.active_lanes, plan::kMoveBlocks);                        \
    if (blockIdx.x < moving) {                                                                                   \
      const commdsl::i32 lane = static_cast<commdsl::i32>(blockIdx.x + commdsl::lane_of_block() * moving);       \
      if (lane < args.active_lanes) plan::run(args, lane);                                                       \
    } else if (!commdsl::is_last_block()) {                                                                      \
      const commdsl::u32 computing = gridDim.x - 1 - moving;                                                     \
      plan::compute(args, static_cast<commdsl::i32>(blockIdx.x - moving), static_cast<commdsl::i32>(computing)); \
    } else if (commdsl::is_first_warp()) {                                                                       \
      plan::agree(args, plan::enter(args));                                                                      \
    }                                                                                                            \
  }

// The copy engine moves, so the kernel has the flags alone: one block.
#define COMMDSL_FLAGS(name, plan)                                                                            \
  extern "C" __global__ void __launch_bounds__(COMMDSL_THREADS, 1)                                           \
      name##_flags(const __grid_constant__ plan::Args args,           \
                   const __grid_constant__ commdsl::Turn turn) {                                             \
    commdsl::run_flags<plan>(args, turn);                                                                    \
  }

// Items that know nothing of each other: a thread each.
#define COMMDSL_ITEMS(name, plan)                                                                            \
  extern "C" __global__ void __launch_bounds__(COMMDSL_THREADS)                                              \
      name(const __grid_constant__ plan::Args args) {                                                        \
    const commdsl::u32 item = blockIdx.x * COMMDSL_THREADS + threadIdx.x;                                    \
    if (item < args.items) plan::run(args, item);                                                            \
  }

#define COMMDSL_SHARED __shared__

namespace commdsl {

constexpr u64 kMeetsBack = 1;  // calls: see agree.cuh
constexpr bool kSharesBlock = COMMDSL_LANES_PER_BLOCK > 1;
COMMDSL_FN u32 lane_of_block() { return kSharesBlock ? threadIdx.x / COMMDSL_THREADS : 0; }
COMMDSL_FN u32 blocks_of(i32 lanes, i32 most) { return static_cast<u32>(lanes < most ? lanes : most); }
COMMDSL_FN i32 this_lane(u32 blocks) { return static_cast<i32>(blockIdx.x + lane_of_block() * blocks); }
COMMDSL_FN bool is_last_block() { return blockIdx.x + 1 == gridDim.x; }
COMMDSL_FN bool is_first_warp() { return threadIdx.x < 32; }
COMMDSL_FN u32 thread() { return kSharesBlock ? threadIdx.x % COMMDSL_THREADS : threadIdx.x; }
COMMDSL_FN constexpr u32 num_threads() { return COMMDSL_THREADS; }

// The threads that move one run of bytes together: a warp.
COMMDSL_FN u32 warp() { return threadIdx.x / 32; }
COMMDSL_FN constexpr u32 num_warps() { return COMMDSL_THREADS / 32; }
COMMDSL_FN u32 thread_of_warp() { return threadIdx.x % 32; }
constexpr u32 kWarp = 32;
COMMDSL_FN void warp_barrier() { __syncwarp(); }

// How many threads of the warp have an equal value, and how many of those come before this one. All of them ask.
struct Equals {
  u32 before, count;
};
COMMDSL_FN Equals among_equals(u32 value) {
  const u32 equal = __match_any_sync(0xffffffffu, value);
  u32 below;
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(below));
  return {static_cast<u32>(__popc(equal & below)), static_cast<u32>(__popc(equal))};
}

// The largest among `threads` neighbours, a power of two of them. All threads of the warp ask.
COMMDSL_FN u32 largest_among(u32 value, u32 threads) {
  for (u32 apart = threads / 2; apart > 0; apart /= 2) {
    const u32 other = __shfl_xor_sync(0xffffffffu, value, apart);
    value = other > value ? other : value;
  }
  return value;
}

// What the first thread of the warp has. All threads of the warp ask.
COMMDSL_FN u32 of_first_thread(u32 value) { return __shfl_sync(0xffffffffu, value, 0); }

COMMDSL_FN void block_barrier() {
  if constexpr (kSharesBlock) {
    asm volatile("bar.sync %0, %1;" ::"r"(lane_of_block() + 1), "n"(COMMDSL_THREADS) : "memory");
  } else {
    __syncthreads();
  }
}

COMMDSL_FN bool block_any(bool value) {
  if constexpr (kSharesBlock) {
    u32 any;
    asm volatile(
        "{ .reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, %2, %3, p; selp.u32 %0, 1, 0, q; }"
        : "=r"(any)
        : "r"(static_cast<u32>(value)), "r"(lane_of_block() + 1), "n"(COMMDSL_THREADS)
        : "memory");
    return any != 0;
  } else {
    return __syncthreads_or(value) != 0;
  }
}

// All threads of a block that has no lanes.
COMMDSL_FN u32 thread_of_block() { return threadIdx.x; }
COMMDSL_FN constexpr u32 threads_of_block() { return COMMDSL_THREADS * COMMDSL_LANES_PER_BLOCK; }
COMMDSL_FN void whole_block_barrier() { __syncthreads(); }

COMMDSL_FN u64 load_acquire(const u64* flag) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

COMMDSL_FN void store_release(u64* flag, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

// For who waits on the same GPU, which is sooner done.
COMMDSL_FN void store_release_own(u64* flag, u64 value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
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

COMMDSL_FN void add_release(u64* word, u64 more) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(word), "l"(more) : "memory");
}

// Behind what earlier calls stored: the end of a kernel orders it.
COMMDSL_FN void store_begun(u64* word, u64 value) { store_relaxed(word, value); }

// A word as it is from now on, into shared memory: there for the thread behind `fetched`, which alone may wait for it.
COMMDSL_FN void fetch(u64* to, const u64* word) {
  const u32 at = static_cast<u32>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(at), "l"(word) : "memory");
}
COMMDSL_FN void fetched() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// What lies there is wanted soon.
COMMDSL_FN void prefetch(const char* at) { asm volatile("prefetch.global.L1 [%0];" ::"l"(at)); }

// True for the one caller that finds the word zero; all callers are lanes of one GPU.
COMMDSL_FN bool claim(u64* word) { return atomicCAS(word, 0ull, 1ull) == 0; }

// Sixteen bytes that are stored and seen as one: a number, and what came with it.
COMMDSL_FN void store_marked(u64* word, u64 mark, u64 value) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(word), "l"(mark), "l"(value) : "memory");
}
COMMDSL_FN u64 load_marked(const u64* word, u64& value) {
  u64 mark;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(mark), "=l"(value) : "l"(word) : "memory");
  return mark;
}
constexpr u64 kWaveRows = 256;  // the fewest that are worth a wave
constexpr i32 kManyLanes = 64;  // fewer are busy all the time
constexpr i32 kDoneStride = 8;  // bytes from one lane's flag to the next: all are looked at together

COMMDSL_FN void add_shared(u64* word, u64 value) { atomicAdd(word, value); }
COMMDSL_FN void add_shared(u32* word, u32 value) { atomicAdd(word, value); }
COMMDSL_FN u32 take_shared(u32* word) { return atomicAdd(word, 1u); }  // each thread that asks has another number

// Who writes time stamps.
COMMDSL_FN u64 sm_of(i32) {
  u32 sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  return sm;
}

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

COMMDSL_FN u32 bits_of_float(float value) { return __float_as_uint(value); }
COMMDSL_FN float float_of_bits(u32 bits) { return __uint_as_float(bits); }

// Of a number that is no NaN, and of one that may be, which then counts for none.
COMMDSL_FN float larger_magnitude(float largest, float value) { return fmaxf(largest, fabsf(value)); }

COMMDSL_FN float bfloat_to_float(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }

COMMDSL_FN u16 float_to_bfloat(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Two at once take one fast instruction where two single ones take a slow unit each.
COMMDSL_FN u32 floats_to_halves(float low, float high) {
  u32 bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

COMMDSL_FN u32 floats_to_bfloats(float low, float high) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
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

}  // namespace commdsl
