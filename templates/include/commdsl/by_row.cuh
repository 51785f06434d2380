// Row-wise functions of what a lane has moved: it has its rows whole, and all its rounds are over.
// Assumes kernel.cuh, and a launch whose shares are whole rows. Waits for nobody, and decides nothing: which tensor is which stands in the
// call.
#pragma once

#include "commdsl/kernel.cuh"

namespace commdsl {

// Where one row lies, and what is made of it.
struct Row {
  const char *rows, *residual, *weight;
  char *added, *normed;
  float eps;
};

#ifdef __CUDACC__

COMMDSL_FN float inverse_root(float value) { return rsqrtf(value); }
COMMDSL_FN double inverse_root(double value) { return rsqrt(value); }

// The sum over a lane's threads, the same bits for each of them.
template <class Real>
COMMDSL_FN Real sum_of_lane(Real value) {
  COMMDSL_SHARED Real of_warps[COMMDSL_LANES_PER_BLOCK][num_warps()];
  Real* parts = of_warps[lane_of_block()];
#pragma unroll
  for (u32 apart = kWarp / 2; apart > 0; apart /= 2) value += __shfl_xor_sync(0xffffffffu, value, apart);
  block_barrier();  // every thread has read the sum before
  if (thread_of_warp() == 0) parts[warp()] = value;
  block_barrier();
  Real total = 0;
#pragma unroll
  for (u32 at = 0; at < num_warps(); ++at) total += parts[at];
  return total;
}

// A word of x + residual, stored; its squares are added to `squares`.
template <class Element, class Word>
COMMDSL_FN Word add_word(const Row& row, u64 at, typename Element::Accumulator& squares) {
  Word x, residual;
  load(x, row.rows + at);
  load(residual, row.residual + at);
  Lanes<Element, Word> made;
  made.take(x, true, sum{});
  made.take(residual, false, sum{});
  const Word added = made.narrow();
  store(row.added + at, added);
  made.widen(added);
#pragma unroll
  for (u32 e = 0; e < made.kCount; ++e) squares += made.value[e] * made.value[e];
  return added;
}

template <class Element, class Word>
COMMDSL_FN void norm_word(const Row& row, u64 at, const Word& added, typename Element::Accumulator scale) {
  Word weight;
  load(weight, row.weight + at);
  Lanes<Element, Word> made, by;
  made.widen(added);
  by.widen(weight);
#pragma unroll
  for (u32 e = 0; e < made.kCount; ++e) made.value[e] = made.value[e] * scale * by.value[e];
  store(row.normed + at, made.narrow());
}

// Words that a thread keeps of a row between its two passes; of longer rows it reads again what it stored.
constexpr u32 kKept = 4;

template <class Element, class Word>
COMMDSL_FN void norm_words(const Row& row, u64 row_bytes, u64 columns) {
  const u64 first = thread() * sizeof(Word), step = num_threads() * sizeof(Word), behind = first + kKept * step;
  Word kept[kKept];
  using Real = typename Element::Accumulator;
  Real squares = 0;
#pragma unroll
  for (u32 u = 0; u < kKept; ++u) {
    if (first + u * step < row_bytes) kept[u] = add_word<Element, Word>(row, first + u * step, squares);
  }
  for (u64 at = behind; at < row_bytes; at += step) add_word<Element, Word>(row, at, squares);
  const Real scale = inverse_root(sum_of_lane(squares) / static_cast<Real>(columns) + row.eps);
#pragma unroll
  for (u32 u = 0; u < kKept; ++u) {
    if (first + u * step < row_bytes) norm_word<Element, Word>(row, first + u * step, kept[u], scale);
  }
  for (u64 at = behind; at < row_bytes; at += step) {
    Word added;
    load(added, row.added + at);
    norm_word<Element, Word>(row, at, added, scale);
  }
}

template <class Element>
COMMDSL_FN void norm_row(const Row& row, u64 row_bytes) {
  using Storage = typename Element::Storage;
  const u64 columns = row_bytes / sizeof(Storage);
  const u64 bits = reinterpret_cast<u64>(row.rows) | reinterpret_cast<u64>(row.residual) | reinterpret_cast<u64>(row.weight) |
                   reinterpret_cast<u64>(row.added) | reinterpret_cast<u64>(row.normed) | row_bytes;
  if (common_alignment(bits) == 16) {
    norm_words<Element, Vector16>(row, row_bytes, columns);
  } else {
    norm_words<Element, typename WordOf<sizeof(Storage)>::Type>(row, row_bytes, columns);
  }
}

#else

template <class Element>
COMMDSL_FN void norm_row(const Row& row, u64 row_bytes) {
  using Storage = typename Element::Storage;
  const u64 columns = row_bytes / sizeof(Storage);
  double squares = 0;
  for (u64 at = 0; at < row_bytes; at += sizeof(Storage)) {
    Storage x, residual;
    load(x, row.rows + at);
    load(residual, row.residual + at);
    const Storage added = Element::narrow(add(Element::widen(x), Element::widen(residual)));
    store(row.added + at, added);
    squares += static_cast<double>(Element::widen(added)) * static_cast<double>(Element::widen(added));
  }
  const double scale = 1 / __builtin_sqrt(squares / static_cast<double>(columns) + static_cast<double>(row.eps));
  for (u64 at = 0; at < row_bytes; at += sizeof(Storage)) {
    Storage added, weight;
    load(added, row.added + at);
    load(weight, row.weight + at);
    const double made = static_cast<double>(Element::widen(added)) * scale * static_cast<double>(Element::widen(weight));
    store(row.normed + at, Element::narrow(static_cast<typename Element::Accumulator>(made)));
  }
}

#endif

// y = x + residual, rounded; z = y / sqrt(mean(y * y) + eps) * weight, of every row by itself.
template <class Plan, i32 rows, i32 residual, i32 weight, i32 eps, i32 added, i32 normed>
COMMDSL_FN void add_rms_norm(const ArgsOf<Plan>& args, i32 lane) {
  static_assert(static_cast<typename Plan::Element::Accumulator>(0.5f) != 0, "rows of floating numbers");
  const u64* tensors = args.tensors;
  const u64 first = smaller(static_cast<u64>(lane) * args.share_bytes, args.block_bytes);
  const u64 last = smaller(first + args.share_bytes, args.block_bytes);
  u32 bits;
  load(bits, reinterpret_cast<const char*>(tensors[eps]));
  for (u64 at = first; at < last; at += args.row_bytes) {
    const Row row = {reinterpret_cast<const char*>(tensors[rows] + at), reinterpret_cast<const char*>(tensors[residual] + at),
                     reinterpret_cast<const char*>(tensors[weight]),    reinterpret_cast<char*>(tensors[added] + at),
                     reinterpret_cast<char*>(tensors[normed] + at),     float_of_bits(bits)};
    norm_row<typename Plan::Element>(row, args.row_bytes);
  }
}

}  // namespace commdsl
