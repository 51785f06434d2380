// Runs of bytes on the processor: the same words as runs.cuh.
// Assumes the vocabulary and elements.cuh. A run is one thread's.
#pragma once

namespace commdsl {

COMMDSL_FN void copy_run(char* dest, const char* source, u64 bytes) { memcpy(dest, source, bytes); }
COMMDSL_FN void copy_short(char* dest, const char* source, u64 bytes, u32, u32) { memcpy(dest, source, bytes); }
// Here nothing is read ahead.
struct Beginning {
  COMMDSL_FN void read(const char*, u64) {}
  COMMDSL_FN u64 write(char*) const { return 0; }
};
// To all of `count` places but those that are 0.
COMMDSL_FN void spread_run(const u64* to, u32 count, const char* source, u64 bytes) {
  for (u32 i = 0; i < count; ++i) {
    if (to[i] != 0) memcpy(reinterpret_cast<char*>(to[i]), source, bytes);
  }
}
COMMDSL_FN void zero_run(char* dest, u64 bytes) { memset(dest, 0, bytes); }

// `count` runs, `stride` bytes apart, added in order in the accumulator's type, rounded once.
template <class Element>
COMMDSL_FN void sum_run(char* dest, const char* source, u64 bytes, u64 stride, u32 count) {
  using Storage = typename Element::Storage;
  for (u64 at = 0; at < bytes; at += sizeof(Storage)) {
    Storage element;
    memcpy(&element, source + at, sizeof(Storage));
    typename Element::Accumulator total = Element::widen(element);
    for (u32 i = 1; i < count; ++i) {
      memcpy(&element, source + i * stride + at, sizeof(Storage));
      total = sum::apply(total, Element::widen(element));
    }
    element = Element::narrow(total);
    memcpy(dest + at, &element, sizeof(Storage));
  }
}

// The sum of `count` runs of `bytes`, each so many strides behind `source` as its part says, each times its weight where it `weighs`: in
// their order, in float32, rounded once; zero of none.
template <class Element, bool weighs, class Parts>
COMMDSL_FN void add_run(char* dest, const char* source, u64 bytes, u64 stride, const Parts& parts, u32 count) {
  using Storage = typename Element::Storage;
  if (count == 0) return zero_run(dest, bytes);
  if (!weighs && count == 1) return copy_run(dest, source + parts.at[0] * stride, bytes);
  for (u64 at = 0; at < bytes; at += sizeof(Storage)) {
    Storage element;
    float total = 0;
    for (u32 i = 0; i < count; ++i) {
      memcpy(&element, source + parts.at[i] * stride + at, sizeof(Storage));
      const float value = weighs ? multiply(Element::widen(element), parts.weight[i]) : Element::widen(element);
      total = i == 0 ? value : add(total, value);
    }
    element = Element::narrow(total);
    memcpy(dest + at, &element, sizeof(Storage));
  }
}

}  // namespace commdsl
