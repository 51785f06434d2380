// Runs of bytes on the processor: the same words as runs.cuh.
// Assumes the vocabulary and elements.cuh. A run is one thread's.
#pragma once

namespace commdsl {

COMMDSL_FN void copy_run(char* dest, const char* source, u64 bytes) { memcpy(dest, source, bytes); }
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

// The runs of `count` keys, one behind the other, times their weights, in order; those whose key is not below `keys` are left out.
template <class Element>
COMMDSL_FN void weigh_run(char* dest, const char* source, u64 bytes, const float* weights, const i32* key, u32 count, u32 keys) {
  using Storage = typename Element::Storage;
  for (u64 at = 0; at < bytes; at += sizeof(Storage)) {
    Storage element;
    float total = 0;
    bool is_first = true;
    for (u32 i = 0; i < count; ++i) {
      if (static_cast<u32>(key[i]) >= keys) continue;
      memcpy(&element, source + i * bytes + at, sizeof(Storage));
      const float value = multiply(Element::widen(element), weights[i]);
      total = is_first ? value : add(total, value);
      is_first = false;
    }
    element = Element::narrow(total);
    memcpy(dest + at, &element, sizeof(Storage));
  }
}

}  // namespace commdsl
