// Row-wise functions of what a lane has moved: all its rounds are over, and its rows are whole; or, on a GPU, it has one part of one row,
// and the lanes that have the others are the blocks of its cluster.
// Assumes kernel.cuh, and a launch whose shares are whole rows or such parts. Waits for no other rank, and decides nothing: which tensor
// is which stands in the call.
#pragma once

#include "commdsl/kernel.cuh"
#ifdef __CUDACC__
#include "commdsl/tensor.cuh"
#endif

namespace commdsl {

// What a lane has of one row, where it lies, and what is made of it.
struct Row {
  const char *rows, *residual, *weight;
  char *added, *normed;
  u64 bytes, columns;  // of the lane; of the whole row
  float eps;
};

// Lanes that share a row.
template <class Plan>
COMMDSL_FN u32 parts_of_row(const ArgsOf<Plan>& args) {
  return args.share_bytes < args.row_bytes && args.share_bytes > 0 ? static_cast<u32>(args.row_bytes / args.share_bytes) : 1;
}

#ifdef __CUDACC__

constexpr u32 kMostParts = 8;  // blocks of a cluster, which every GPU that has clusters holds

// What the lane's first row needs beside its sums is on its way while the lane waits for those; who shares the row is told that this
// block has begun, so that its shared memory may be stored to.
template <class Plan, i32 residual, i32 weight>
COMMDSL_FN void begin_rows(const ArgsOf<Plan>& args, i32 lane) {
  constexpr u64 sector = 32;
  const u64 first = static_cast<u64>(lane) * args.share_bytes, part = smaller(args.share_bytes, args.row_bytes);
  if (parts_of_row<Plan>(args) > 1) arrive_at_cluster_barrier();
  if (first >= args.block_bytes) return;
  const char* residuals = reinterpret_cast<const char*>(args.tensors[residual] + first);
  const char* weights = reinterpret_cast<const char*>(args.tensors[weight] + first % args.row_bytes);
  for (u64 at = thread() * sector; at < part; at += num_threads() * sector) {
    prefetch(residuals + at);
    prefetch(weights + at);
  }
}

COMMDSL_FN float inverse_root(float value) { return rsqrtf(value); }
COMMDSL_FN double inverse_root(double value) { return rsqrt(value); }

// The sum over all threads that have a part of one row, the same bits for each of them. `number`: of the row, among the lane's.
template <class Real>
COMMDSL_FN Real sum_of_row(Real value, u32 parts, u64 number) {
  COMMDSL_SHARED Real of_warps[COMMDSL_LANES_PER_BLOCK][2][num_warps()];  // two: a thread may still read those of the row before
  COMMDSL_SHARED Real of_parts[kMostParts];
  Real* warps = of_warps[lane_of_block()][number % 2];
#pragma unroll
  for (u32 apart = kWarp / 2; apart > 0; apart /= 2) value += __shfl_xor_sync(0xffffffffu, value, apart);
  if (thread_of_warp() == 0) warps[thread() / kWarp] = value;
  block_barrier();
  Real total = 0;
#pragma unroll
  for (u32 at = 0; at < num_warps(); ++at) total += warps[at];
  if (parts == 1) return total;
  await_cluster_barrier();  // all its blocks have begun
  if (thread() < parts) *of_block(of_parts + block_of_cluster(), thread()) = total;
  cluster_barrier<kMostParts>();
  total = 0;
  for (u32 at = 0; at < parts; ++at) total += of_parts[at];
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
COMMDSL_FN void norm_words(const Row& row, u32 parts, u64 number) {
  const u64 first = thread() * sizeof(Word), step = num_threads() * sizeof(Word), behind = first + kKept * step;
  Word kept[kKept];
  using Real = typename Element::Accumulator;
  Real squares = 0;
#pragma unroll
  for (u32 u = 0; u < kKept; ++u) {
    if (first + u * step < row.bytes) kept[u] = add_word<Element, Word>(row, first + u * step, squares);
  }
  for (u64 at = behind; at < row.bytes; at += step) add_word<Element, Word>(row, at, squares);
  const Real scale = inverse_root(sum_of_row(squares, parts, number) / static_cast<Real>(row.columns) + row.eps);
#pragma unroll
  for (u32 u = 0; u < kKept; ++u) {
    if (first + u * step < row.bytes) norm_word<Element, Word>(row, first + u * step, kept[u], scale);
  }
  for (u64 at = behind; at < row.bytes; at += step) {
    Word added;
    load(added, row.added + at);
    norm_word<Element, Word>(row, at, added, scale);
  }
}

template <class Element>
COMMDSL_FN void norm_row(const Row& row, u32 parts, u64 number) {
  const u64 bits = reinterpret_cast<u64>(row.rows) | reinterpret_cast<u64>(row.residual) | reinterpret_cast<u64>(row.weight) |
                   reinterpret_cast<u64>(row.added) | reinterpret_cast<u64>(row.normed) | row.bytes;
  if (common_alignment(bits) == 16) {
    norm_words<Element, Vector16>(row, parts, number);
  } else {
    norm_words<Element, typename WordOf<sizeof(typename Element::Storage)>::Type>(row, parts, number);
  }
}

#else

template <class Plan, i32 residual, i32 weight>
COMMDSL_FN void begin_rows(const ArgsOf<Plan>&, i32) {}

template <class Element>
COMMDSL_FN void norm_row(const Row& row, u32, u64) {
  using Storage = typename Element::Storage;
  double squares = 0;
  for (u64 at = 0; at < row.bytes; at += sizeof(Storage)) {
    Storage x, residual;
    load(x, row.rows + at);
    load(residual, row.residual + at);
    const Storage added = Element::narrow(add(Element::widen(x), Element::widen(residual)));
    store(row.added + at, added);
    squares += static_cast<double>(Element::widen(added)) * static_cast<double>(Element::widen(added));
  }
  const double scale = 1 / __builtin_sqrt(squares / static_cast<double>(row.columns) + static_cast<double>(row.eps));
  for (u64 at = 0; at < row.bytes; at += sizeof(Storage)) {
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
  using Element = typename Plan::Element;
  static_assert(static_cast<typename Element::Accumulator>(0.5f) != 0, "rows of floating numbers");
  const u64* tensors = args.tensors;
  const u64 part = smaller(args.share_bytes, args.row_bytes), columns = args.row_bytes / sizeof(typename Element::Storage);
  const u64 first = smaller(static_cast<u64>(lane) * args.share_bytes, args.block_bytes);
  const u64 last = smaller(first + args.share_bytes, args.block_bytes);
  u32 bits;
  load(bits, reinterpret_cast<const char*>(tensors[eps]));
  // Behind those of the moves.
  Stamps stamps(args, intervals_of<Plan>(args, args.active_lanes, rank_of<Plan>(args)) + static_cast<u64>(lane), lane, thread() == 0);
  stamps.begin();
  for (u64 at = first, number = 0; at < last; at += part, ++number) {
    const Row row = {reinterpret_cast<const char*>(tensors[rows] + at),
                     reinterpret_cast<const char*>(tensors[residual] + at),
                     reinterpret_cast<const char*>(tensors[weight] + at % args.row_bytes),
                     reinterpret_cast<char*>(tensors[added] + at),
                     reinterpret_cast<char*>(tensors[normed] + at),
                     part,
                     columns,
                     float_of_bits(bits)};
    norm_row<Element>(row, parts_of_row<Plan>(args), number);
  }
  stamps.end();
}

}  // namespace commdsl
