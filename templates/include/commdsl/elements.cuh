// Element types and the operations that combine them; COMMDSL_DTYPE and COMMDSL_OP name one of each.
// Assumes COMMDSL_FN and the four 16-bit conversions of the vocabulary. An accumulator is float for every floating type.
#pragma once

namespace commdsl {

struct float32 {
  using Storage = float;
  using Accumulator = float;
  static COMMDSL_FN float widen(float value) { return value; }
  static COMMDSL_FN float narrow(float value) { return value; }
};

struct float16 {
  using Storage = u16;
  using Accumulator = float;
  static COMMDSL_FN float widen(u16 bits) { return half_to_float(bits); }
  static COMMDSL_FN u16 narrow(float value) { return float_to_half(value); }
  static COMMDSL_FN u32 narrow_pair(float low, float high) { return floats_to_halves(low, high); }
};

struct bfloat16 {
  using Storage = u16;
  using Accumulator = float;
  static COMMDSL_FN float widen(u16 bits) { return bfloat_to_float(bits); }
  static COMMDSL_FN u16 narrow(float value) { return float_to_bfloat(value); }
  static COMMDSL_FN u32 narrow_pair(float low, float high) { return floats_to_bfloats(low, high); }
};

template <class Integer>
struct IntegerElement {
  using Storage = Integer;
  using Accumulator = Integer;
  static COMMDSL_FN Integer widen(Integer value) { return value; }
  static COMMDSL_FN Integer narrow(Integer value) { return value; }
};
struct int32 : IntegerElement<i32> {};
struct int64 : IntegerElement<i64> {};

// Integers wrap: the sum and the product are taken without a sign, where overflow is defined.
COMMDSL_FN float add(float a, float b) { return a + b; }
COMMDSL_FN i32 add(i32 a, i32 b) { return static_cast<i32>(static_cast<u32>(a) + static_cast<u32>(b)); }
COMMDSL_FN i64 add(i64 a, i64 b) { return static_cast<i64>(static_cast<u64>(a) + static_cast<u64>(b)); }
COMMDSL_FN float multiply(float a, float b) { return a * b; }
COMMDSL_FN i32 multiply(i32 a, i32 b) { return static_cast<i32>(static_cast<u32>(a) * static_cast<u32>(b)); }
COMMDSL_FN i64 multiply(i64 a, i64 b) { return static_cast<i64>(static_cast<u64>(a) * static_cast<u64>(b)); }

struct sum {
  template <class T>
  static COMMDSL_FN T apply(T a, T b) { return add(a, b); }
};

struct prod {
  template <class T>
  static COMMDSL_FN T apply(T a, T b) { return multiply(a, b); }
};

// What a kernel moves that reduces nothing: it has no elements, only bytes.
struct bytes {
  using Storage = u8;
  using Accumulator = u8;
};

// A NaN on either side is the result: `a != a` keeps the left one, a false comparison the right one.
struct max {
  template <class T>
  static COMMDSL_FN T apply(T a, T b) { return a > b || a != a ? a : b; }
};

struct min {
  template <class T>
  static COMMDSL_FN T apply(T a, T b) { return a < b || a != a ? a : b; }
};

}  // namespace commdsl
