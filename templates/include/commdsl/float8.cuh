// Values on their way into float8 (e4m3fn), each stretch with a scale of its own: of rows, whose scales are seen, the largest of its
// finite values / 448 in float32. A warp reads a row once and keeps it in registers until it is stored.
// Assumes the vocabulary and elements.cuh. A value is divided by its scale in float32, and that is rounded to the nearest, of two as
// near to the even one; no value becomes larger than 448. An infinity and a NaN become a NaN and count for no scale.
#pragma once

#include "commdsl/elements.cuh"

namespace commdsl {

constexpr u32 kInfinity = 0x7f800000;      // of float32, as the numbers below
constexpr u32 kSmallestNormal = 0x800000;  // no scale is less: a smaller one would have lost digits, and its quotients were too large
constexpr u32 kOne = 0x3f800000;
constexpr float kLargestFloat8 = 448.0f;
constexpr u32 kNanFloat8 = 0x7f;

// By what rows are divided: their largest becomes the largest that float8 has.
struct Quotient {
  float scale;
  COMMDSL_FN explicit Quotient(u32 largest) {
    const float exact = float_of_bits(largest) / kLargestFloat8;
    scale = float_of_bits(largest == 0 ? kOne : bits_of_float(exact) < kSmallestNormal ? kSmallestNormal : bits_of_float(exact));
  }
  COMMDSL_FN float operator()(float value) const { return value / scale; }
};

// By what is divided that only travels: the least power of two that leaves nothing larger than 448. Both ways it is an exact
// multiplication; divisions took a quarter of an all-reduce's time.
struct PowerOfTwo {
  float scale, inverse;
  COMMDSL_FN explicit PowerOfTwo(u32 largest) {
    const u32 exponent = (largest + 0x1fffff) >> 23;  // one more where its digits are more than those of 448
    const u32 found = exponent > 9 ? exponent - 8 : 1;
    scale = float_of_bits(found << 23);
    inverse = float_of_bits((254 - found) << 23);
  }
  COMMDSL_FN float operator()(float value) const { return value * inverse; }
};

// The bits of the float8 that is nearest, without an instruction for it.
COMMDSL_FN u32 nearest_float8(float value) {
  const u32 bits = bits_of_float(value), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
  if (magnitude > kInfinity) return kNanFloat8;
  if (magnitude >= 0x43e00000) return sign | 0x7e;  // 448
  if (magnitude < 0x3c800000) {                     // 2 ** -6: below it float8 is a multiple of 2 ** -9, which is the last digit of 2 ** 14
    return sign | (bits_of_float(float_of_bits(magnitude) + 16384.0f) - bits_of_float(16384.0f));
  }
  return sign | ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
}

// Two that follow each other in memory.
COMMDSL_FN u32 two_float8(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  u16 both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
  return both;
#else
  return nearest_float8(first) | nearest_float8(second) << 8;
#endif
}

// The value of a float8, without an instruction for it: its digits as those of a float32 that is 2 ** 120 times less.
COMMDSL_FN float value_of_float8(u32 bits) {
  const u32 magnitude = bits & 0x7f;
  const u32 wide = magnitude == kNanFloat8 ? 0x7fffffff : bits_of_float(float_of_bits(magnitude << 20) * float_of_bits(0x7b800000));
  return float_of_bits(wide | (bits & 0x80) << 24);
}

// Two that follow each other in memory.
COMMDSL_FN void widen_two_float8(float& first, float& second, u32 both) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<u16>(both)));
  first = half_to_float(static_cast<u16>(halves));
  second = half_to_float(static_cast<u16>(halves >> 16));
#else
  first = value_of_float8(both & 0xff);
  second = value_of_float8(both >> 8 & 0xff);
#endif
}

// The bits of the largest finite magnitude. An infinity, which counts for none, becomes a NaN.
template <u32 each>
COMMDSL_FN u32 largest_finite(float (&value)[each]) {
  float all = 0;
#pragma unroll
  for (u32 at = 0; at < each; ++at) all = larger_magnitude(all, value[at]);
  if (bits_of_float(all) < kInfinity) return bits_of_float(all);
  u32 largest = 0;
#pragma unroll
  for (u32 at = 0; at < each; ++at) {
    const u32 magnitude = bits_of_float(value[at]) & 0x7fffffff;
    if (magnitude >= kInfinity) value[at] = float_of_bits(0x7fffffff);
    if (magnitude < kInfinity && magnitude > largest) largest = magnitude;
  }
  return largest;
}

// A thread's values in float8, and the scale of their stretch, of which `threads` neighbours have a part each. All threads of
// the warp ask.
template <class Scale, u32 each>
COMMDSL_FN Scale quantise(u32 (&word)[each / 4], const float (&given)[each], u32 threads) {
  float value[each];
#pragma unroll
  for (u32 at = 0; at < each; ++at) value[at] = given[at];
  const Scale over(largest_among(largest_finite(value), threads));
#pragma unroll
  for (u32 at = 0; at < each; at += 4) {
    word[at / 4] = two_float8(over(value[at]), over(value[at + 1])) | two_float8(over(value[at + 2]), over(value[at + 3])) << 16;
  }
  return over;
}

// How the threads of a warp share out a stretch: 16 values each, which are one store, or all where a warp is one thread.
template <u32 stretch>
constexpr u32 kThreadsAStretch = stretch / 16 < kWarp ? stretch / 16 : kWarp;

// Values that are there, at a multiple of 16.
template <class Element, u32 each>
COMMDSL_FN void load_whole(float (&value)[each], const char* source) {
  using Storage = typename Element::Storage;
  constexpr u32 kInWord = 16 / sizeof(Storage);
#pragma unroll
  for (u32 at = 0; at < each; at += kInWord) {
    Vector16 word;
    load(word, source + at * sizeof(Storage));
    const u32 half[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
    for (u32 i = 0; i < kInWord; ++i) {
      if constexpr (sizeof(Storage) == 4) {
        value[at + i] = float_of_bits(half[i]);
      } else {
        value[at + i] = Element::widen(static_cast<Storage>(half[i / 2] >> (i % 2 * 16)));
      }
    }
  }
}

// Values from `begin` on of a row of `columns`; zeros behind it.
template <class Element, u32 each>
COMMDSL_FN void load_values(float (&value)[each], const char* row, u64 begin, u64 columns) {
  using Storage = typename Element::Storage;
  const char* source = row + begin * sizeof(Storage);
  if (begin + each <= columns && (reinterpret_cast<u64>(source) & 15) == 0) {
    load_whole<Element>(value, source);
    return;
  }
#pragma unroll
  for (u32 at = 0; at < each; ++at) {
    value[at] = 0;
    if (begin + at >= columns) continue;
    if constexpr (sizeof(Storage) == 4) {
      u32 word;
      load(word, source + at * sizeof(Storage));
      value[at] = float_of_bits(word);
    } else {
      u16 word;
      load(word, source + at * sizeof(Storage));
      value[at] = Element::widen(word);
    }
  }
}

// 16 bytes to a row of `columns`, as far as it goes; an even number of them, at an even address.
COMMDSL_FN void store_values(char* row, u64 begin, u64 columns, const Vector16& value) {
  char* dest = row + begin;
  if (begin + 16 <= columns && (reinterpret_cast<u64>(dest) & 15) == 0) return store(dest, value);
  const u32 word[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
  for (u32 at = 0; at < 16; at += 2) {
    if (begin + at < columns) store(dest + at, static_cast<u16>(word[at / 4] >> (at % 4 * 8)));
  }
}

// The columns from `first` to `last` of a row of float32, float16 or bfloat16 in float8, to each of `count` places in `to` but those
// that are 0; and their scales, to where `scales` says for each place. `first` is where a stretch begins, and `last` one or the end.
template <class Element, u32 stretch, class Scales>
COMMDSL_FN void quantise_run(const u64* to, u32 count, const Scales& scales, const char* row, u64 first, u64 last) {
  constexpr u32 kThreads = kThreadsAStretch<stretch>, kEach = stretch / kThreads, kStep = kWarp / kThreads * stretch;
  float ahead[kEach];  // loaded while what is before it is stored
  load_values<Element>(ahead, row, first + thread_of_warp() * kEach, last);
  for (u64 from = first; from < last; from += kStep) {
    const u64 begin = from + thread_of_warp() * kEach;
    float value[kEach];
#pragma unroll
    for (u32 at = 0; at < kEach; ++at) value[at] = ahead[at];
    if (from + kStep < last) load_values<Element>(ahead, row, begin + kStep, last);
    u32 word[kEach / 4];
    const float scale = quantise<Quotient>(word, value, kThreads).scale;
    if (begin >= last) continue;
    for (u32 i = 0; i < count; ++i) {
      if (to[i] == 0) continue;
#pragma unroll
      for (u32 at = 0; at < kEach; at += 16) {
        const Vector16 stored{word[at / 4], word[at / 4 + 1], word[at / 4 + 2], word[at / 4 + 3]};
        if (begin + at < last) store_values(reinterpret_cast<char*>(to[i]), begin + at, last, stored);
      }
      if (begin % stretch == 0) store(scales(i) + begin / stretch * sizeof(u32), bits_of_float(scale));
    }
  }
}

}  // namespace commdsl
