// Words of memory as the GPU loads them, and the elements in them.
// Assumes the vocabulary and elements.cuh. Knows no operation of a Plan and no tile of a dispatch; both are built on it.
#pragma once

namespace commdsl {

// The largest power of two up to 16 that divides every address or-ed into `bits`.
COMMDSL_FN u32 common_alignment(u64 bits) {
  u32 low = static_cast<u32>(bits) | 16u;
  return low & (~low + 1u);
}

// The bits of one element as a word that `load` knows.
template <u32 size>
struct WordOf;
template <>
struct WordOf<1> {
  using Type = u8;
};
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
template <>
struct WordOf<16> {
  using Type = Vector16;
};

template <class Element, class Word>
struct Lanes {
  using Storage = typename Element::Storage;
  static constexpr u32 kCount = sizeof(Word) / sizeof(Storage);
  typename Element::Accumulator value[kCount];

  COMMDSL_FN void widen(const Word& word) {
    if constexpr (kHasPairs<Element> && kCount > 1) {
      u32 pair[kCount / 2];
      memcpy(pair, &word, sizeof(Word));
#pragma unroll
      for (u32 e = 0; e < kCount; e += 2) Element::widen_pair(pair[e / 2], value[e], value[e + 1]);
    } else {
      Storage element[kCount];
      memcpy(element, &word, sizeof(Word));
#pragma unroll
      for (u32 e = 0; e < kCount; ++e) value[e] = Element::widen(element[e]);
    }
  }
  // Combines one more operand.
  template <class Operation, class Share = AsItIs>
  COMMDSL_FN void take(const Word& word, bool is_first, Operation, Share share = {}) {
    Lanes next;
    next.widen(word);
#pragma unroll
    for (u32 e = 0; e < kCount; ++e) {
      const auto part = share(next.value[e]);
      value[e] = is_first ? part : Operation::apply(value[e], part);
    }
  }
  // After the last operand.
  template <class Shares>
  COMMDSL_FN void settle(const Shares& shares) {
#pragma unroll
    for (u32 e = 0; e < kCount; ++e) value[e] = shares.mean(value[e]);
  }
  COMMDSL_FN Word narrow() const {
    Word word;
    if constexpr (kHasPairs<Element> && kCount > 1) {
      u32 pair[kCount / 2];
#pragma unroll
      for (u32 e = 0; e < kCount; e += 2) pair[e / 2] = Element::narrow_pair(value[e], value[e + 1]);
      memcpy(&word, pair, sizeof(Word));
    } else {
      Storage element[kCount];
#pragma unroll
      for (u32 e = 0; e < kCount; ++e) element[e] = Element::narrow(value[e]);
      memcpy(&word, element, sizeof(Word));
    }
    return word;
  }
};

}  // namespace commdsl
