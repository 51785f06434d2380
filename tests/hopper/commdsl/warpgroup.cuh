// What four warps do together, as machine.cpp makes it.
#pragma once

namespace commdsl {

constexpr u32 kWarpgroup = 128;

struct Form {
  u32 columns, depth;
  bool a_deep, b_deep;
  void (*widen)(const u8* from, u32 count, float* to);
};
void begin_product(const Form& form, float* sum, u64 a, u64 b, bool adds);

struct E4m3 {
  float value[256];
  E4m3() {
    for (i32 bits = 0; bits < 128; ++bits) {
      const i32 exponent = bits >> 3, fraction = bits & 7;
      value[bits] = bits == 127 ? NAN : exponent == 0 ? ldexpf(fraction, -9) : ldexpf(8 + fraction, exponent - 10);
      value[bits + 128] = -value[bits];
    }
  }
};

template <class Element>
COMMDSL_FN void widen_all(const u8* from, u32 count, float* to) {
  if constexpr (sizeof(typename Element::Storage) == 1) {
    static const E4m3 known;
    for (u32 i = 0; i < count; ++i) to[i] = known.value[from[i]];
  } else {
    for (u32 i = 0; i < count; ++i) {
      u16 bits;
      memcpy(&bits, from + 2 * i, 2);
      to[i] = Element::widen(bits);
    }
  }
}

// Stands for the printed instructions: of 64 rows and 32 bytes deep.
template <class Plan, class Element, u32 sums>
COMMDSL_FN void multiply(float (&sum)[sums], u64 a, u64 b, bool adds) {
  static_assert(sums == Plan::kColumns / 2, "a thread has half a row of every 64");
  static const Form form{Plan::kColumns, 32 / sizeof(typename Element::Storage), Plan::kADeep, Plan::kBDeep, widen_all<Element>};
  begin_product(form, sum, a, b, adds);
}

COMMDSL_FN void begin_products() {}
void commit_products();
void await_products(u32 left);
template <u32 left>
COMMDSL_FN void await_products() {
  await_products(left);
}
template <u32 high, u32 sums>
COMMDSL_FN void settle(float (&)[high][sums]) {}

void warpgroup_barrier(u32 number);
template <u32>
COMMDSL_FN void drop_registers() {}
template <u32>
COMMDSL_FN void claim_registers() {}

}  // namespace commdsl
