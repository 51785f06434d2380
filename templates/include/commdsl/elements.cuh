// Element types and the operations that combine them; COMMDSL_DTYPE and COMMDSL_OP name one of each.
// Assumes COMMDSL_FN and the four 16-bit conversions of the vocabulary. An accumulator is float for floating types but double, 32 bits
// wide for short integers.
#pragma once

namespace commdsl {

struct float64 {
  using Storage = double;
  using Accumulator = double;
  static COMMDSL_FN double widen(double value) { return value; }
  static COMMDSL_FN double narrow(double value) { return value; }
};

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
  static COMMDSL_FN void widen_pair(u32 bits, float& low, float& high) {
    low = widen(static_cast<u16>(bits));
    high = widen(static_cast<u16>(bits >> 16));
  }
};

struct bfloat16 {
  using Storage = u16;
  using Accumulator = float;
  static COMMDSL_FN float widen(u16 bits) { return bfloat_to_float(bits); }
  static COMMDSL_FN u16 narrow(float value) { return float_to_bfloat(value); }
  static COMMDSL_FN u32 narrow_pair(float low, float high) { return floats_to_bfloats(low, high); }
  // An instruction each: by themselves the upper bits would be moved down first.
  static COMMDSL_FN void widen_pair(u32 bits, float& low, float& high) {
    low = float_of_bits(bits << 16);
    high = float_of_bits(bits & 0xffff0000u);
  }
};

template <class Integer, class Wide>
struct IntegerElement {
  using Storage = Integer;
  using Accumulator = Wide;
  static COMMDSL_FN Wide widen(Integer value) { return value; }
  static COMMDSL_FN Integer narrow(Wide value) { return static_cast<Integer>(value); }
};
struct int64 : IntegerElement<i64, i64> {};
struct int32 : IntegerElement<i32, i32> {};
struct int16 : IntegerElement<i16, i32> {};
struct int8 : IntegerElement<i8, i32> {};
struct uint8 : IntegerElement<u8, i32> {};

// Truth values, whose bytes may be any: what is combined is 0 or 1.
struct boolean {
  using Storage = u8;
  using Accumulator = bool;
  static COMMDSL_FN bool widen(u8 value) { return value != 0; }
  static COMMDSL_FN u8 narrow(bool value) { return value; }
};

// Whether elements are narrowed and widened two at a time.
template <class Element>
constexpr bool kHasPairs = false;
template <>
constexpr bool kHasPairs<float16> = true;
template <>
constexpr bool kHasPairs<bfloat16> = true;

COMMDSL_FN bool add(bool a, bool b) { return a || b; }
COMMDSL_FN bool multiply(bool a, bool b) { return a && b; }
COMMDSL_FN double add(double a, double b) { return a + b; }
COMMDSL_FN double multiply(double a, double b) { return a * b; }
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

// Of operands that `Shares` weighs.
struct avg : sum {};

template <class Operation>
constexpr bool kAverages = false;
template <>
constexpr bool kAverages<avg> = true;

struct prod {
  template <class T>
  static COMMDSL_FN T apply(T a, T b) { return multiply(a, b); }
};

// What a kernel moves that reduces nothing: it has no elements, only bytes.
struct bytes {
  using Storage = u8;
  using Accumulator = u8;
};

// The maximum and the minimum have the same bits in whichever order and grouping numbers are combined: zeros are ordered, -0 below +0,
// and where one is a NaN the result is this one, whatever its payload was. Of zeros the sum is +0 unless both are -0.
template <class T>
COMMDSL_FN T larger(T a, T b) { return a > b ? a : b; }
template <class T>
COMMDSL_FN T smaller(T a, T b) { return a < b ? a : b; }

// Of two that are equal, or of which one is a NaN; `zero` is what they are where both are zeros.
template <class T>
COMMDSL_FN T neither(T a, T b, T zero) {
  if (a == b) return a == 0 ? zero : a;
  return static_cast<T>(float_of_bits(0x7fffffffu));
}
COMMDSL_FN float larger(float a, float b) { return a > b ? a : b > a ? b : neither(a, b, a + b); }
COMMDSL_FN double larger(double a, double b) { return a > b ? a : b > a ? b : neither(a, b, a + b); }
COMMDSL_FN float smaller(float a, float b) { return a < b ? a : b < a ? b : neither(a, b, -(-a - b)); }
COMMDSL_FN double smaller(double a, double b) { return a < b ? a : b < a ? b : neither(a, b, -(-a - b)); }

struct max {
  template <class T>
  static COMMDSL_FN T apply(T a, T b) { return larger(a, b); }
};

struct min {
  template <class T>
  static COMMDSL_FN T apply(T a, T b) { return smaller(a, b); }
};

// How the operands of an operation are weighed: not at all.
struct AsItIs {
  template <class T>
  COMMDSL_FN T operator()(T value) const { return value; }
};

template <class Plan, bool averages>
struct SharesOf {
  using Share = AsItIs;
  template <class Operands>
  COMMDSL_FN explicit SharesOf(const Operands&) {}
  template <class Operands>
  COMMDSL_FN AsItIs of(const Operands&, i32) const { return {}; }
  template <class T>
  COMMDSL_FN T mean(T total) const { return total; }
};

// In an average, so that all are parts of one sum, which is scaled by a power of two that changes no bit and leaves no sum larger
// than what is given; only where the whole is none is the result divided.
template <class Plan>
struct SharesOf<Plan, true> {
  using Accumulator = typename Plan::Element::Accumulator;
  struct Share {
    Accumulator share;
    COMMDSL_FN Accumulator operator()(Accumulator value) const { return value * share; }
  };
  Accumulator unit, whole;

  template <class Operands>
  COMMDSL_FN explicit SharesOf(const Operands& operands) : unit(1), whole(static_cast<Accumulator>(operands.op().whole)) {
    for (; whole > 1; whole /= 2) unit /= 2;
  }
  template <class Operands>
  COMMDSL_FN Share of(const Operands& operands, i32 source) const {
    return {static_cast<Accumulator>(operands.source_row(source).weight) * unit};
  }
  COMMDSL_FN Accumulator mean(Accumulator total) const { return whole == 1 ? total : total / whole; }
};

template <class Plan>
struct Shares : SharesOf<Plan, kAverages<typename Plan::Operation>> {
  using SharesOf<Plan, kAverages<typename Plan::Operation>>::SharesOf;
};

}  // namespace commdsl
