// The host vocabulary: the same words as device.cuh for g++ or clang++. A lane is one thread, so a block barrier is nothing.
// Assumes POSIX threads and the __atomic builtins. Uses no fences: ThreadSanitizer does not know them.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define COMMDSL_FN inline
#define COMMDSL_CALL inline
#define COMMDSL_TABLE static const
#define COMMDSL_CONSTANT static const
#define COMMDSL_KERNEL(name, plan)                                                                             \
  extern "C" void name(const plan::Args* args, commdsl::i32 lane) {     \
    plan::run(*args, lane);                                                                                     \
    commdsl::leave(*args);                                                                                      \
  }                                                                                                            \
  extern "C" commdsl::i32 commdsl_launch(const plan::Args* args,        \
                                         commdsl::i32 count, commdsl::i32 calls, const commdsl::u64* delays) { \
    return commdsl::launch<plan>(args, count, calls, delays, name, 1);                                         \
  }

#define COMMDSL_LANES(name, plan) COMMDSL_KERNEL(name, plan)

// A lane's thread, and one for its tiles, which is a block of the role that computes if there are so many.
#define COMMDSL_ROLES(name, plan)                                                                              \
  extern "C" void name(const plan::Args* args, commdsl::i32 thread) {                                          \
    const commdsl::i32 lanes = args->active_lanes;                                                             \
    const commdsl::i32 blocks = lanes < plan::kTileBlocks ? lanes : plan::kTileBlocks;                         \
    if (thread < lanes) {                                                                                      \
      plan::run(*args, thread);                                                                                \
    } else if (thread < lanes + blocks) {                                                                      \
      plan::compute(*args, thread - lanes, blocks);                                                            \
    }                                                                                                          \
  }                                                                                                            \
  extern "C" commdsl::i32 commdsl_launch(const plan::Args* args,                                               \
                                         commdsl::i32 count, commdsl::i32 calls, const commdsl::u64* delays) { \
    return commdsl::launch<plan>(args, count, calls, delays, name, 2);                                         \
  }

// There is no copy engine here, so the entry runs the tables; the flags alone stand beside it.
#define COMMDSL_FLAGS(name, plan)                                                                            \
  COMMDSL_KERNEL(name, plan)                                                                                 \
  extern "C" void name##_flags(const plan::Args* args,                \
                               const commdsl::Turn* turn) {                                                  \
    commdsl::run_flags<plan>(*args, *turn);                                                                  \
  }

// Items that know nothing of each other, one after another.
#define COMMDSL_ITEMS(name, plan)                                                                            \
  extern "C" commdsl::i32 commdsl_launch(const plan::Args* args,                                             \
                                         commdsl::i32, commdsl::i32, const commdsl::u64*) {                  \
    for (commdsl::u32 item = 0; item < args->items; ++item) plan::run(*args, item);                          \
    return 0;                                                                                                \
  }

#define COMMDSL_SHARED

namespace commdsl {

constexpr u64 kMeetsBack = 0;  // calls: see agree.cuh

template <class Plan>
COMMDSL_FN bool may_begin(const typename Plan::Args& args);
template <class Plan>
struct Operands;
template <class Plan>
struct Shares;

COMMDSL_FN u32 thread() { return 0; }
COMMDSL_FN u32 num_threads() { return 1; }
COMMDSL_FN u32 warp() { return 0; }
COMMDSL_FN constexpr u32 num_warps() { return 1; }
COMMDSL_FN u32 thread_of_warp() { return 0; }
constexpr u32 kWarp = 1;
COMMDSL_FN void warp_barrier() {}

struct Equals {
  u32 before, count;
};
COMMDSL_FN Equals among_equals(u32) { return {0, 1}; }
COMMDSL_FN u32 largest_among(u32 value, u32) { return value; }
COMMDSL_FN u32 of_first_thread(u32 value) { return value; }
COMMDSL_FN void block_barrier() {}
COMMDSL_FN bool block_any(bool value) { return value; }
COMMDSL_FN u32 thread_of_block() { return 0; }
COMMDSL_FN u32 threads_of_block() { return 1; }
COMMDSL_FN void whole_block_barrier() {}

#if defined(__SANITIZE_THREAD__)
#define COMMDSL_SANITIZED
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define COMMDSL_SANITIZED
#endif
#endif

#ifdef COMMDSL_SANITIZED
// A lane that polls late sees a flag that is past what it waits for, and with it acquires more than the Plan promises: races
// would hide behind luck. So ThreadSanitizer is told what was waited for. A word stands for each signal, another one for as many
// as a peer may be ahead, which tiles are by a whole call; the flag itself orders nothing.
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);

COMMDSL_FN void* signal_key(const u64* flag, u64 value) {
  static u64 words[1 << 16];
  return &words[(reinterpret_cast<u64>(flag) / kFlagStride * 1021 + value) % (1 << 16)];
}
COMMDSL_FN u64 load_acquire(const u64* flag) { return __atomic_load_n(flag, __ATOMIC_RELAXED); }
COMMDSL_FN bool acquired(const u64* flag, u64 expected) {
  __tsan_acquire(signal_key(flag, expected));
  return true;
}
COMMDSL_FN void store_release(u64* flag, u64 value) {
  __tsan_release(signal_key(flag, value));
  __atomic_store_n(flag, value, __ATOMIC_RELAXED);
}

// Bytes that a rank holds while peers must not put there: what they are is lost, or they stay.
COMMDSL_FN void scribble(char* bytes, u64 count) { memset(bytes, 0xEE, count); }
COMMDSL_FN void look_at(const char* bytes, u64 count) {
  for (u64 at = 0; at < count; ++at) (void)*const_cast<const volatile char*>(bytes + at);
}
#else
COMMDSL_FN u64 load_acquire(const u64* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }
COMMDSL_FN bool acquired(const u64*, u64) { return true; }
COMMDSL_FN void store_release(u64* flag, u64 value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
#endif
COMMDSL_FN void store_release_own(u64* flag, u64 value) { store_release(flag, value); }
COMMDSL_FN u64 load_relaxed(const u64* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
COMMDSL_FN void store_relaxed(u64* word, u64 value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
// Behind what earlier calls stored.
COMMDSL_FN void store_begun(u64* word, u64 value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

COMMDSL_FN void fetch(u64* to, const u64* word) { *to = load_relaxed(word); }
COMMDSL_FN void fetched() {}

COMMDSL_FN bool claim(u64* word) {
  u64 free = 0;
  return __atomic_compare_exchange_n(word, &free, u64{1}, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

// What comes with a number is released with it.
COMMDSL_FN void store_marked(u64* word, u64 mark, u64 value) {
  __atomic_store_n(word + 1, value, __ATOMIC_RELAXED);
  __atomic_store_n(word, mark, __ATOMIC_RELEASE);
}
COMMDSL_FN u64 load_marked(const u64* word, u64& value) {
  const u64 mark = __atomic_load_n(word, __ATOMIC_ACQUIRE);
  value = __atomic_load_n(word + 1, __ATOMIC_RELAXED);
  return mark;
}
constexpr u64 kWaveRows = 2;  // so that few rows are several waves, too
constexpr i32 kManyLanes = 2;  // and few lanes do what many do
constexpr i32 kDoneStride = kFlagStride;  // a line each: the sanitizer's words are found by it

COMMDSL_FN void add_shared(u64* word, u64 value) { *word += value; }
COMMDSL_FN void add_shared(u32* word, u32 value) { *word += value; }
COMMDSL_FN u32 take_shared(u32* word) { return (*word)++; }

COMMDSL_FN u64 sm_of(i32 actor) { return static_cast<u64>(actor); }

COMMDSL_FN u64 now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<u64>(time.tv_sec) * 1000000000ull + static_cast<u64>(time.tv_nsec);
}

COMMDSL_FN void sleep_ns(u64 duration) {
  timespec time;
  time.tv_sec = static_cast<time_t>(duration / 1000000000ull);
  time.tv_nsec = static_cast<long>(duration % 1000000000ull);
  nanosleep(&time, nullptr);
}

// There may be far more lanes than cores: give the core away at once, and stop asking for it after as long as a sleep takes.
constexpr u32 kPollsPerCheck = 64;
COMMDSL_FN void relax(u32 polls) {
  if (polls < 128) {
    sched_yield();
  } else {
    sleep_ns(50000);
  }
}

template <class To, class From>
COMMDSL_FN To bits_of(From value) {
  static_assert(sizeof(To) == sizeof(From), "a change of type, not of bits");
  To result;
  __builtin_memcpy(&result, &value, sizeof(To));  // a register move; a call under ThreadSanitizer otherwise
  return result;
}

struct alignas(16) Vector16 {
  u32 x, y, z, w;
};
template <class Word>
COMMDSL_FN void load(Word& word, const void* p) { memcpy(&word, p, sizeof(Word)); }
template <class Word>
COMMDSL_FN void store(void* p, const Word& word) { memcpy(p, &word, sizeof(Word)); }

// Conversions round to nearest, ties to even, and yield the GPU's NaN (0x7fff), so both builds give the same bits.
COMMDSL_FN u32 bits_of_float(float value) { return bits_of<u32>(value); }
COMMDSL_FN float larger_magnitude(float largest, float value) {
  const float magnitude = value < 0 ? -value : value;
  return magnitude > largest ? magnitude : largest;
}
COMMDSL_FN float float_of_bits(u32 bits) { return bits_of<float>(bits); }

COMMDSL_FN float bfloat_to_float(u16 bits) { return bits_of<float>(static_cast<u32>(bits) << 16); }

COMMDSL_FN u16 float_to_bfloat(float value) {
  const u32 bits = bits_of<u32>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// The exponent is moved by a multiplication with 2^112, which also makes halves below 2^-14 normal.
COMMDSL_FN float half_to_float(u16 bits) {
  const u32 sign = (bits & 0x8000u) << 16;
  const u32 magnitude = (bits & 0x7fffu) << 13;
  if ((bits & 0x7c00u) == 0x7c00u) return bits_of<float>(sign | magnitude | 0x7f800000u);
  return bits_of<float>(sign | bits_of<u32>(bits_of<float>(magnitude) * 0x1p112f));
}

COMMDSL_FN u16 float_to_half(float value) {
  const u32 bits = bits_of<u32>(value);
  const u16 sign = static_cast<u16>((bits >> 16) & 0x8000u);
  const u32 magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00;  // 65520 and more round to infinity
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 aligns the ulp of the sum with that of a subnormal half, and the addition rounds.
    return sign | static_cast<u16>(bits_of<u32>(bits_of<float>(magnitude) + 0.5f) - bits_of<u32>(0.5f));
  }
  const u32 odd = (magnitude >> 13) & 1u;
  return sign | static_cast<u16>((magnitude - 0x38000000u + 0xfffu + odd) >> 13);
}

COMMDSL_FN u32 floats_to_halves(float low, float high) {
  return float_to_half(low) | static_cast<u32>(float_to_half(high)) << 16;
}

COMMDSL_FN u32 floats_to_bfloats(float low, float high) {
  return float_to_bfloat(low) | static_cast<u32>(float_to_bfloat(high)) << 16;
}

// Blocks small enough for the accumulators to stay in the first cache; every source is read before a result is written. A
// source and a destination may be the same bytes of one inout tensor.
template <class Plan>
COMMDSL_FN void combine_known(const Operands<Plan>& operands) {
  using Element = typename Plan::Element;
  using Storage = typename Element::Storage;
  constexpr u64 kBlock = 512;
  typename Element::Accumulator total[kBlock];
  Storage element[kBlock];
  const u64 count = operands.slice.bytes / sizeof(Storage);
  for (u64 begin = 0; begin < count; begin += kBlock) {
    const u64 length = count - begin < kBlock ? count - begin : kBlock;
    const u64 at = begin * sizeof(Storage), bytes = length * sizeof(Storage);
    for (i32 s = 0; s < operands.op().num_sources; ++s) {
      memcpy(element, operands.source(s) + at, bytes);
      if constexpr (Plan::kHasReduction) {
        if (operands.op().kind == kCopy) continue;
        const auto share = Shares<Plan>(operands).of(operands, s);
        for (u64 i = 0; i < length; ++i) {
          const typename Element::Accumulator value = share(Element::widen(element[i]));
          total[i] = s == 0 ? value : Plan::Operation::apply(total[i], value);
        }
      }
    }
    if constexpr (Plan::kHasReduction) {
      if (operands.op().kind != kCopy) {
        const Shares<Plan> shares(operands);
        for (u64 i = 0; i < length; ++i) element[i] = Element::narrow(shares.mean(total[i]));
      }
    }
    for (i32 d = 0; d < operands.op().num_dests; ++d) {
      char* dest = operands.reachable(d);
      if (dest != nullptr) memcpy(dest + at, element, bytes);
    }
  }
}

template <class Plan>
COMMDSL_FN void combine(const Operands<Plan>& operands) {
  by_operation(operands, [](const auto& same) { combine_known(same); });
}

// --- launching: what the CUDA driver does for the other build ------------------------------------------------------------

constexpr size_t kStackBytes = 512 * 1024;

template <class Arguments>
using Entry = void (*)(const Arguments*, i32);

template <class Arguments>
struct LaneThread {
  const Arguments* args;
  Entry<Arguments> entry;
  i32 lane;
  pthread_t handle;

  static void* start(void* self) {
    LaneThread* lane = static_cast<LaneThread*>(self);
    lane->entry(lane->args, lane->lane);
    return nullptr;
  }
};

// All calls of one rank, one after another, as a stream would run them; the ranks are not joined in between. The rank's own thread tells
// of a call before its lanes run and holds its peers to it behind them: what a lane waits for meanwhile it gives up by itself.
template <class Plan>
struct RankThread {
  using Arguments = typename Plan::Args;
  const Arguments* args;  // calls x stride
  const u64* delays;      // nanoseconds before each call
  Entry<Arguments> entry;
  i32 roles, calls, stride, result;
  pthread_t handle;

  static void* start(void* self) {
    RankThread* rank = static_cast<RankThread*>(self);
    for (i32 call = 0; call < rank->calls && rank->result == 0; ++call) {
      if (rank->delays[call * rank->stride] > 0) sleep_ns(rank->delays[call * rank->stride]);
      rank->result = run_call(rank->args + call * rank->stride, rank->entry, rank->roles);
    }
    return nullptr;
  }

  static i32 run_call(const Arguments* args, Entry<Arguments> entry, i32 roles) {
    if (load_relaxed(&reinterpret_cast<const ErrorRecord*>(args->error)->code) != 0) return 0;
    if constexpr (Plan::kLanesTell) {
      return may_begin<Plan>(*args) ? run_lanes(args, entry, args->active_lanes * roles) : 0;
    } else if (!Plan::tells(*args)) {
      return run_lanes(args, entry, args->active_lanes * roles);
    } else {
      const u64 number = Plan::enter(*args);
      if (number == 0) return 0;
      const i32 failure = run_lanes(args, entry, args->active_lanes * roles);
      if (load_relaxed(&reinterpret_cast<const ErrorRecord*>(args->error)->code) == 0) Plan::agree(*args, number);
      return failure;
    }
  }

  static i32 run_lanes(const Arguments* args, Entry<Arguments> entry, i32 lanes) {
    if (lanes == 0) return 0;
    LaneThread<Arguments>* lane = static_cast<LaneThread<Arguments>*>(calloc(lanes, sizeof(LaneThread<Arguments>)));
    if (lane == nullptr) return -1;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, kStackBytes);
    i32 failure = 0;
    i32 started = 1;
    for (; started < lanes && failure == 0; ++started) {
      lane[started] = {args, entry, started, {}};
      failure = pthread_create(&lane[started].handle, &attributes, LaneThread<Arguments>::start, &lane[started]);
      if (failure != 0) break;
    }
    if (failure == 0) entry(args, 0);
    for (i32 i = 1; i < started; ++i) pthread_join(lane[i].handle, nullptr);
    pthread_attr_destroy(&attributes);
    free(lane);
    return failure;
  }
};

// Runs `count` ranks of this process for `calls` calls, the last rank on the caller's own thread; args and delays are
// calls x count. Every lane takes a thread for each of the `roles`. Returns 0, or what pthread said.
template <class Plan, class Arguments = typename Plan::Args>
i32 launch(const Arguments* args, i32 count, i32 calls, const u64* delays, Entry<Arguments> entry, i32 roles) {
  RankThread<Plan>* rank = static_cast<RankThread<Plan>*>(calloc(count, sizeof(RankThread<Plan>)));
  if (rank == nullptr) return -1;
  i32 failure = 0;
  i32 started = 0;
  for (i32 i = 0; i < count; ++i) rank[i] = {args + i, delays + i, entry, roles, calls, count, 0, {}};
  for (; started < count - 1; ++started) {
    failure = pthread_create(&rank[started].handle, nullptr, RankThread<Plan>::start, &rank[started]);
    if (failure != 0) break;
  }
  if (failure == 0 && count > 0) RankThread<Plan>::start(&rank[count - 1]);
  for (i32 i = 0; i < started; ++i) pthread_join(rank[i].handle, nullptr);
  for (i32 i = 0; i < count; ++i) {
    if (rank[i].result != 0) failure = rank[i].result;
  }
  free(rank);
  return failure;
}

}  // namespace commdsl
