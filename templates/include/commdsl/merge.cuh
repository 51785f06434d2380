// Results of attention over parts of the keys become one: each part has an output, and the logarithm of the sum of its
// exponentials (`lse`), which says how much of the whole it is.
// Assumes that nothing which is written is read, but for an `out` that is the running part's own. The order, the same bits on
// every GPU and on the processor, in float32 throughout:
//   top = the largest lse;   w = exp(lse - top);   total = the sum of w;   w = w * (1 / total);   out = the sum of w * output,
//   each sum from zero, the running part first, then the parts as given; rounded once;   lse = top + log(total)
// Gradients are summed in the same order, each as it is.
#pragma once

#include "commdsl/types.cuh"
#ifdef __CUDACC__
#include "commdsl/device.cuh"
#else
#include "commdsl/host.hpp"
#endif
#include "commdsl/elements.cuh"
#include "commdsl/vectors.cuh"

namespace commdsl {

constexpr u32 kParts = 9;  // the running part, which is float32, and eight others
constexpr float kLargest = 3.402823466e38f;
constexpr u32 kMinusInfinity = 0xff800000u;

// Rows [first, last) of the whole; steps count elements.
struct MergedRows {
  u64 out, lse;
  u32 first, last;
  u64 row, batch, head, lse_row, lse_batch, lse_head;

  COMMDSL_FN bool covers(u32 at) const { return first <= at && at < last; }
};

// One row of one head.
struct MergedPlace {
  u32 row, batch, head;

  template <u32 size>
  COMMDSL_FN char* out(const MergedRows& rows) const {
    return reinterpret_cast<char*>(rows.out + size * ((row - rows.first) * rows.row + batch * rows.batch + head * rows.head));
  }
  COMMDSL_FN float* lse(const MergedRows& rows) const {
    return reinterpret_cast<float*>(rows.lse) + ((row - rows.first) * rows.lse_row + batch * rows.lse_batch + head * rows.lse_head);
  }
};

// `threads` make a row of a head, each of them a vector in every one of `turns`.
struct MergeArgs {
  MergedRows part[kParts];
  MergedRows whole;
  u32 batch, heads, threads, turns;
  u64 items;
};

// So many elements that lie side by side, as they are loaded.
template <class Element, u32 count>
struct Stretch {
  static constexpr u32 kBytes = count * sizeof(typename Element::Storage);
  static constexpr u32 kWord = kBytes < 16 ? kBytes : 16;
  using Word = typename WordOf<kWord>::Type;
  using Values = Lanes<Element, Word>;
  Word word[kBytes / kWord];

  COMMDSL_FN void read(const char* from) {
#pragma unroll
    for (u32 w = 0; w < kBytes / kWord; ++w) load(word[w], from + kWord * w);
  }
  COMMDSL_FN void write(char* to) const {
#pragma unroll
    for (u32 w = 0; w < kBytes / kWord; ++w) store(to + kWord * w, word[w]);
  }
  // Adds them, weighed, to a sum.
  COMMDSL_FN void add_to(float* sum, float weight) const {
#pragma unroll
    for (u32 w = 0; w < kBytes / kWord; ++w) {
      Values values;
      values.widen(word[w]);
#pragma unroll
      for (u32 e = 0; e < Values::kCount; ++e) sum[w * Values::kCount + e] += weight * values.value[e];
    }
  }
  COMMDSL_FN void take(const float* sum) {
#pragma unroll
    for (u32 w = 0; w < kBytes / kWord; ++w) {
      Values values;
#pragma unroll
      for (u32 e = 0; e < Values::kCount; ++e) values.value[e] = sum[w * Values::kCount + e];
      word[w] = values.narrow();
    }
  }
};

COMMDSL_FN float of_bits(u32 bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
COMMDSL_FN u32 bits_in(float value) {
  u32 bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}
COMMDSL_FN bool is_number(float value) { return value == value; }

// e to the power of x, which is not positive; what is less than a part of 2^125 is nothing. The series is Cephes', in plain steps:
// a library's differ from each other in the last bit.
COMMDSL_FN float exponential(float x) {
  if (!(x > -86.0f)) return is_number(x) ? 0.0f : x;
  const float whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // rounded to an integer
  const float r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = (y * (r * r) + r) + 1.0f;
  return y * of_bits(static_cast<u32>(static_cast<i32>(whole) + 127) << 23);
}

// The natural logarithm of x, which is at least one.
COMMDSL_FN float logarithm(float x) {
  if (!is_number(x)) return x;
  const u32 bits = bits_in(x);
  float power = static_cast<float>(static_cast<i32>(bits >> 23) - 127);
  float m = of_bits((bits & 0x7fffffu) | 0x3f800000u);  // 1 .. 2
  if (m > 1.41421356f) {
    m = m * 0.5f;
    power = power + 1.0f;
  }
  m = m - 1.0f;
  const float z = m * m;
  float y = 7.0376836292e-2f;
  y = y * m - 1.1514610310e-1f;
  y = y * m + 1.1676998740e-1f;
  y = y * m - 1.2420140846e-1f;
  y = y * m + 1.4249322787e-1f;
  y = y * m - 1.6668057665e-1f;
  y = y * m + 2.0000714765e-1f;
  y = y * m - 2.4999993993e-1f;
  y = y * m + 3.3333331174e-1f;
  y = y * m * z;
  y = y + power * -2.12194440e-4f;
  y = y - 0.5f * z;
  return (m + y) + power * 0.693359375f;
}

// How much of a row each part is. A part that says -inf has no key for it, and adds nothing. One that says inf, as kernels of
// attention do of a row without keys and of one that is not a number, weighs nothing and is added: a NaN in it stays.
struct MergeWeights {
  float weight[kParts], top, total;

  COMMDSL_FN bool adds(u32 p) const { return !(weight[p] < 0.0f); }
  COMMDSL_FN float share(u32 p) const { return weight[p]; }

  COMMDSL_FN MergeWeights(const MergeArgs& args, const MergedPlace& place) : top(of_bits(kMinusInfinity)), total(0.0f) {
    float lse[kParts];
#pragma unroll
    for (u32 p = 0; p < kParts; ++p) {
      u32 bits = kMinusInfinity;
      if (args.part[p].covers(place.row)) load(bits, place.lse(args.part[p]));
      lse[p] = of_bits(bits);
    }
#pragma unroll
    for (u32 p = 0; p < kParts; ++p) {
      if (lse[p] > top && lse[p] <= kLargest) top = lse[p];
    }
#pragma unroll
    for (u32 p = 0; p < kParts; ++p) {
      weight[p] = -1.0f;
      if (lse[p] < -kLargest) continue;
      weight[p] = lse[p] > kLargest ? 0.0f : exponential(lse[p] - top);
      total += weight[p];
    }
    const float scale = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
    for (u32 p = 0; p < kParts; ++p) weight[p] = adds(p) ? weight[p] * scale : -1.0f;
  }

  COMMDSL_FN float lse() const { return total == 0.0f ? of_bits(kMinusInfinity) : top + logarithm(total); }
};

// Of gradients: all that have the row, as they are.
struct MergeAlike {
  const MergeArgs& args;
  const MergedPlace& place;

  COMMDSL_FN MergeAlike(const MergeArgs& args, const MergedPlace& place) : args(args), place(place) {}
  COMMDSL_FN bool adds(u32 p) const { return args.part[p].covers(place.row); }
  COMMDSL_FN float share(u32) const { return 1.0f; }
};

template <bool weighs>
struct MergeShares {
  using Type = MergeWeights;
};
template <>
struct MergeShares<false> {
  using Type = MergeAlike;
};

// What one thread makes of a row of a head.
template <class Plan>
COMMDSL_FN void merge(const MergeArgs& args, u32 item) {
  using Element = typename Plan::Element;
  using Result = typename Plan::Result;
  constexpr u32 count = Plan::kElements, size = sizeof(typename Element::Storage), made_size = sizeof(typename Result::Storage);
  const u32 thread = item % args.threads;
  MergedPlace place;
  place.head = item / args.threads % args.heads;
  place.batch = item / args.threads / args.heads % args.batch;
  place.row = item / args.threads / args.heads / args.batch;

  const typename MergeShares<Plan::kWeighs>::Type shares(args, place);
  for (u32 turn = 0; turn < args.turns; ++turn) {
    const u64 at = (turn * args.threads + thread) * count;
    Stretch<float32, count> running;
    Stretch<Element, count> part[kParts - 1];
    // All are under way before the first is waited for.
    if (args.part[0].covers(place.row)) running.read(place.out<sizeof(float)>(args.part[0]) + sizeof(float) * at);
#pragma unroll
    for (u32 p = 1; p < kParts; ++p) {
      if (args.part[p].covers(place.row)) part[p - 1].read(place.out<size>(args.part[p]) + size * at);
    }
    float sum[count] = {};
    if (shares.adds(0)) running.add_to(sum, shares.share(0));
#pragma unroll
    for (u32 p = 1; p < kParts; ++p) {
      if (shares.adds(p)) part[p - 1].add_to(sum, shares.share(p));
    }
    Stretch<Result, count> made;
    made.take(sum);
    made.write(place.out<made_size>(args.whole) + made_size * at);
  }
  if constexpr (Plan::kWeighs) {
    if (thread == 0) store(place.lse(args.whole), bits_in(shares.lse()));
  }
}

}  // namespace commdsl
