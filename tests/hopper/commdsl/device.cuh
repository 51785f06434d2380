// The GPU vocabulary on a GPU that is made up, see machine.cpp: threads are coroutines, and time passes when others have their turn.
#pragma once

#include <math.h>

#define now_ns host_now_ns
#include "commdsl/host.hpp"
#undef now_ns

#define __global__
#define __launch_bounds__(threads, blocks)
#define __cluster_dims__(x, y, z)
#define __grid_constant__

struct Index {
  unsigned x;
};
extern Index threadIdx, blockIdx, gridDim;
void __trap();
inline unsigned long long atomicAdd(unsigned long long* word, unsigned long long more) {
  return __atomic_fetch_add(word, more, __ATOMIC_RELAXED);
}

namespace commdsl {

u64 now_ns();
COMMDSL_FN void add_release(u64* word, u64 more) { __atomic_fetch_add(word, more, __ATOMIC_RELEASE); }

}  // namespace commdsl
