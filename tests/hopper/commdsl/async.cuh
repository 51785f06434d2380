// What the async proxy does, as machine.cpp makes it: some time between the moment when it is asked and the one when it is awaited.
#pragma once

namespace commdsl {

constexpr u8* shared_bytes = nullptr;
u32 __cvta_generic_to_shared(const void*);

void fence_proxies();
void fence_proxies_of_shared();
COMMDSL_FN void fence_proxies_of_global() {}

void await_reads(u32 groups);
template <u32 groups>
COMMDSL_FN void await_reads() {
  await_reads(groups);
}
void await_writes();
void commit_group();

void expect(u32 mark, u32 bytes);
void await_phase(u32 mark, u32 parity);
void load_shared(Vector16& v, u32 at);
void store_shared(u32 at, const Vector16& v);

COMMDSL_FN u32 least(u32 a, u32 b) { return a < b ? a : b; }

}  // namespace commdsl
