// Runs of bytes on the GPU, each moved by one warp: copied whatever the addresses are, summed, zeroed.
// Assumes the vocabulary and vectors.cuh; addresses and lengths are even. Reads no 16-byte word that has no byte of the source.
#pragma once

#include "commdsl/vectors.cuh"

namespace commdsl {

// From byte `at`, a thread's own offset in, while `unroll` words a warp apart are left to it; returns where it stopped. So many
// words are in flight before the first is stored: with one alone a thread would wait a whole latency for each.
template <u32 unroll>
COMMDSL_FN u64 copy_words(char* dest, const char* source, u64 at, u64 bytes) {
  constexpr u64 kStep = kWarp * 16;
  for (; at + (unroll - 1) * kStep < bytes; at += unroll * kStep) {
    Vector16 value[unroll];
#pragma unroll
    for (u32 j = 0; j < unroll; ++j) load(value[j], source + at + j * kStep);
#pragma unroll
    for (u32 j = 0; j < unroll; ++j) store(dest + at + j * kStep, value[j]);
  }
  return at;
}

// Addresses and lengths are multiples of 16.
COMMDSL_FN void copy_aligned(char* dest, const char* source, u64 bytes) {
  u64 at = thread_of_warp() * 16;
  if (bytes > kWarp * 16) {  // more than a word for each thread
    at = copy_words<8>(dest, source, at, bytes);
    at = copy_words<4>(dest, source, at, bytes);
    at = copy_words<2>(dest, source, at, bytes);
  }
  copy_words<1>(dest, source, at, bytes);
}

// 16 bytes from `shift` bytes into two neighbouring words.
COMMDSL_FN Vector16 spliced(const Vector16& low, const Vector16& high, u32 shift) {
  const u32 word[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  u32 picked[5];
#pragma unroll
  for (u32 i = 0; i < 5; ++i) {  // no index that the code does not know: registers have no addresses
    picked[i] = shift & 8 ? (shift & 4 ? word[i + 3] : word[i + 2]) : (shift & 4 ? word[i + 1] : word[i]);
  }
  const u32 bits = (shift & 3) * 8;
  return {__funnelshift_r(picked[0], picked[1], bits), __funnelshift_r(picked[1], picked[2], bits),
          __funnelshift_r(picked[2], picked[3], bits), __funnelshift_r(picked[3], picked[4], bits)};
}

// As above, from a source that is `shift` bytes past a word.
template <u32 unroll>
COMMDSL_FN u64 copy_spliced(char* dest, const char* words, u64 at, u64 bytes, u32 shift) {
  constexpr u64 kStep = kWarp * 16;
  for (; at + (unroll - 1) * kStep < bytes; at += unroll * kStep) {
    Vector16 low[unroll], high[unroll];
#pragma unroll
    for (u32 j = 0; j < unroll; ++j) {
      load(low[j], words + at + j * kStep);
      load(high[j], words + at + j * kStep + 16);
    }
#pragma unroll
    for (u32 j = 0; j < unroll; ++j) store(dest + at + j * kStep, spliced(low[j], high[j], shift));
  }
  return at;
}

// The destination is a multiple of 16, so is `bytes`; the source is `shift` bytes past one. Out of line, so that what every run
// takes stays short.
COMMDSL_CALL void copy_shifted(char* dest, const char* source, u64 bytes, u32 shift) {
  u64 at = thread_of_warp() * 16;
  if (bytes > kWarp * 16) at = copy_spliced<4>(dest, source - shift, at, bytes, shift);
  copy_spliced<1>(dest, source - shift, at, bytes, shift);
}

COMMDSL_FN void copy_halves(char* dest, const char* source, u64 bytes) {
  for (u64 at = thread_of_warp() * 2; at < bytes; at += kWarp * 2) {
    u16 value;
    load(value, source + at);
    store(dest + at, value);
  }
}

// Bytes in front of the first whole word of a destination.
COMMDSL_FN u64 head_of(const char* dest, u64 bytes) {
  const u64 head = -reinterpret_cast<u64>(dest) & 15;
  return head < bytes ? head : bytes;
}

COMMDSL_FN void copy_run(char* dest, const char* source, u64 bytes) {
  const u64 head = head_of(dest, bytes);
  if (head > 0) copy_halves(dest, source, head);
  const u64 whole = (bytes - head) & ~u64{15};
  const u32 shift = static_cast<u32>(reinterpret_cast<u64>(source + head)) & 15;
  if (shift == 0) {
    copy_aligned(dest + head, source + head, whole);
  } else if (whole > 0) {
    copy_shifted(dest + head, source + head, whole, shift);
  }
  if (head + whole < bytes) copy_halves(dest + head + whole, source + head + whole, bytes - head - whole);
}

// The words of one of so many threads, neighbours next to each other.
template <class Word>
COMMDSL_FN void copy_few(char* dest, const char* source, u64 bytes, u32 thread, u32 threads) {
  for (u64 at = thread * sizeof(Word); at < bytes; at += threads * sizeof(Word)) {
    Word value;
    load(value, source + at);
    store(dest + at, value);
  }
}

// A run that is so short that a few threads of a warp move it, and the others another one.
COMMDSL_FN void copy_short(char* dest, const char* source, u64 bytes, u32 thread, u32 threads) {
  const u32 alignment = common_alignment(reinterpret_cast<u64>(dest) | reinterpret_cast<u64>(source) | bytes);
  if (alignment == 16) return copy_few<Vector16>(dest, source, bytes, thread, threads);
  if (alignment >= 4) return copy_few<u32>(dest, source, bytes, thread, threads);
  copy_few<u16>(dest, source, bytes, thread, threads);
}

// The beginning of a run, which a warp reads before it knows where the run goes. Of one that is short, or not aligned, nothing.
struct Beginning {
  static constexpr u32 kWords = 4;
  static constexpr u64 kBytes = kWords * kWarp * 16;
  Vector16 word[kWords];
  bool is_read = false;

  COMMDSL_FN void read(const char* source, u64 bytes) {
    is_read = bytes >= kBytes && common_alignment(reinterpret_cast<u64>(source)) == 16;
    if (!is_read) return;
#pragma unroll
    for (u32 i = 0; i < kWords; ++i) load(word[i], source + (i * kWarp + thread_of_warp()) * 16);
  }
  // How many bytes of the run are there.
  COMMDSL_FN u64 write(char* dest) const {
    if (!is_read || common_alignment(reinterpret_cast<u64>(dest)) < 16) return 0;
#pragma unroll
    for (u32 i = 0; i < kWords; ++i) store(dest + (i * kWarp + thread_of_warp()) * 16, word[i]);
    return kBytes;
  }
};

// As `copy_words`, to `count` places, of which those that are 0 are none.
template <u32 unroll>
COMMDSL_FN u64 spread_words(const u64* to, u32 count, const char* source, u64 at, u64 bytes) {
  constexpr u64 kStep = kWarp * 16;
  for (; at + (unroll - 1) * kStep < bytes; at += unroll * kStep) {
    Vector16 value[unroll];
#pragma unroll
    for (u32 j = 0; j < unroll; ++j) load(value[j], source + at + j * kStep);
    for (u32 i = 0; i < count; ++i) {
      if (to[i] == 0) continue;
      char* dest = reinterpret_cast<char*>(to[i]) + at;
#pragma unroll
      for (u32 j = 0; j < unroll; ++j) store(dest + j * kStep, value[j]);
    }
  }
  return at;
}

// A run to all of `count` places but those that are 0: read once where all of them are multiples of 16. Out of line: what it takes
// is memory, and it is long.
COMMDSL_CALL void spread_run(const u64* to, u32 count, const char* source, u64 bytes) {
  u64 bits = 0;
  for (u32 i = 0; i < count; ++i) bits |= to[i];
  if (bits == 0) return;
  if (common_alignment(bits | reinterpret_cast<u64>(source) | bytes) == 16) {
    u64 at = thread_of_warp() * 16;
    if (bytes > kWarp * 16) {
      at = spread_words<8>(to, count, source, at, bytes);
      at = spread_words<4>(to, count, source, at, bytes);
      at = spread_words<2>(to, count, source, at, bytes);
    }
    spread_words<1>(to, count, source, at, bytes);
    return;
  }
  for (u32 i = 0; i < count; ++i) {
    if (to[i] != 0) copy_run(reinterpret_cast<char*>(to[i]), source, bytes);
  }
}

COMMDSL_FN void zero_run(char* dest, u64 bytes) {
  const u64 head = head_of(dest, bytes);
  const u64 whole = (bytes - head) & ~u64{15};
  for (u64 at = thread_of_warp() * 2; at < head; at += kWarp * 2) store(dest + at, u16{0});
  for (u64 at = thread_of_warp() * 16; at < whole; at += kWarp * 16) store(dest + head + at, Vector16{0, 0, 0, 0});
  for (u64 at = head + whole + thread_of_warp() * 2; at < bytes; at += kWarp * 2) store(dest + at, u16{0});
}

// From byte `at`, a thread's own offset in, while `unroll` words a warp apart are left to it; returns where it stopped.
template <class Element, class Word, u32 unroll>
COMMDSL_FN u64 sum_words(char* dest, const char* source, u64 at, u64 bytes, u64 stride, u32 count) {
  constexpr u64 kStep = kWarp * sizeof(Word);
  for (; at + (unroll - 1) * kStep + sizeof(Word) <= bytes; at += unroll * kStep) {
    Lanes<Element, Word> total[unroll];
    for (u32 i = 0; i < count; ++i) {
      Word word[unroll];
#pragma unroll
      for (u32 j = 0; j < unroll; ++j) load(word[j], source + i * stride + at + j * kStep);
#pragma unroll
      for (u32 j = 0; j < unroll; ++j) total[j].take(word[j], i == 0, sum{});
    }
#pragma unroll
    for (u32 j = 0; j < unroll; ++j) store(dest + at + j * kStep, total[j].narrow());
  }
  return at;
}

// `count` runs, `stride` bytes apart, added in order in the accumulator's type, rounded once.
template <class Element>
COMMDSL_FN void sum_run(char* dest, const char* source, u64 bytes, u64 stride, u32 count) {
  using Storage = typename Element::Storage;
  if (common_alignment(reinterpret_cast<u64>(dest) | reinterpret_cast<u64>(source) | bytes | stride) == 16) {
    const u64 at = sum_words<Element, Vector16, 4>(dest, source, thread_of_warp() * 16, bytes, stride, count);
    sum_words<Element, Vector16, 1>(dest, source, at, bytes, stride, count);
  } else {
    using Word = typename WordOf<sizeof(Storage)>::Type;
    sum_words<Element, Word, 1>(dest, source, thread_of_warp() * sizeof(Word), bytes, stride, count);
  }
}

// A sum of nothing, which leaves what is added first as it is: also a zero of either sign.
template <class Element, class Word, u32 count>
COMMDSL_FN void start_sums(Lanes<Element, Word> (&total)[count]) {
#pragma unroll
  for (u32 j = 0; j < count; ++j) {
#pragma unroll
    for (auto& value : total[j].value) value = -0.0f;
  }
}

// A word more in a sum.
template <bool weighs, class Element, class Word>
COMMDSL_FN void add_weighed(Lanes<Element, Word>& total, const Word& word, float weight) {
  Lanes<Element, Word> next;
  next.widen(word);
#pragma unroll
  for (u32 e = 0; e < Lanes<Element, Word>::kCount; ++e) {
    total.value[e] = add(total.value[e], weighs ? multiply(next.value[e], weight) : next.value[e]);
  }
}

// From byte `at`, a thread's own offset in, while `unroll` words a warp apart are left to it; returns where it stopped. Of so many
// words of so many runs all are loaded before the first is added. `whole`: there are so many runs, and no more.
template <class Element, class Word, bool weighs, u32 ahead, u32 unroll, bool whole, class Parts>
COMMDSL_FN u64 add_words(char* dest, const char* source, u64 at, u64 bytes, u64 stride, const Parts& parts, u32 some) {
  constexpr u64 kStep = kWarp * sizeof(Word);
  using Values = Lanes<Element, Word>;
  const u32 count = whole ? ahead : some;
  for (; at + (unroll - 1) * kStep + sizeof(Word) <= bytes; at += unroll * kStep) {
    Values total[unroll];
    start_sums(total);
    for (u32 from = 0; from < count; from += ahead) {
      Word word[ahead][unroll];
#pragma unroll
      for (u32 i = 0; i < ahead; ++i) {
        if (from + i >= count) continue;
        const char* run = source + parts.at[from + i] * stride + at;
#pragma unroll
        for (u32 j = 0; j < unroll; ++j) load(word[i][j], run + j * kStep);
      }
#pragma unroll
      for (u32 i = 0; i < ahead; ++i) {
        if (from + i >= count) continue;
        const float weight = weighs ? parts.weight[from + i] : 1.0f;
#pragma unroll
        for (u32 j = 0; j < unroll; ++j) add_weighed<weighs>(total[j], word[i][j], weight);
      }
    }
#pragma unroll
    for (u32 j = 0; j < unroll; ++j) store(dest + at + j * kStep, total[j].narrow());
  }
  return at;
}

// Four words in flight whether there are few runs or many: of more there would not be registers for sums of 16-bit elements. Not out of
// line: where code is linked a function by itself takes registers that its kernel does not have.
template <class Element, bool weighs, class Parts>
COMMDSL_FN void add_vectors(char* dest, const char* source, u64 bytes, u64 stride, const Parts& parts, u32 count) {
  u64 at = thread_of_warp() * 16;
  if (count == 1) at = add_words<Element, Vector16, weighs, 1, 4, true>(dest, source, at, bytes, stride, parts, count);
  if (count == 2) at = add_words<Element, Vector16, weighs, 2, 2, true>(dest, source, at, bytes, stride, parts, count);
  add_words<Element, Vector16, weighs, 4, 1, false>(dest, source, at, bytes, stride, parts, count);
}

// The sum of `count` runs of `bytes`, each so many strides behind `source` as its part says, each times its weight where it `weighs`: in
// their order, in float32, rounded once; zero of none.
template <class Element, bool weighs, class Parts>
COMMDSL_FN void add_run(char* dest, const char* source, u64 bytes, u64 stride, const Parts& parts, u32 count) {
  if (count == 0) return zero_run(dest, bytes);
  if (!weighs && count == 1) return copy_run(dest, source + parts.at[0] * stride, bytes);
  const u32 alignment = common_alignment(reinterpret_cast<u64>(dest) | reinterpret_cast<u64>(source) | bytes | stride);
  if (alignment == 16) return add_vectors<Element, weighs>(dest, source, bytes, stride, parts, count);
  using Storage = typename Element::Storage;
  if (sizeof(Storage) < 4 && alignment >= 4) {
    add_words<Element, u32, weighs, 4, 1, false>(dest, source, thread_of_warp() * 4, bytes, stride, parts, count);
  } else {
    using Word = typename WordOf<sizeof(Storage)>::Type;
    add_words<Element, Word, weighs, 4, 1, false>(dest, source, thread_of_warp() * sizeof(Word), bytes, stride, parts, count);
  }
}

}  // namespace commdsl
