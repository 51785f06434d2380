// Merges results of attention over parts of the keys, or sums gradients. Which elements, how many a thread makes, and whether they
// are weighed, are the build's: -DCOMMDSL_DTYPE= of the parts, -DCOMMDSL_RESULT= of the whole, -DCOMMDSL_ELEMENTS=, -DCOMMDSL_WEIGHS=.
#define COMMDSL_THREADS 128
#define COMMDSL_LANES_PER_BLOCK 1
#include "commdsl/merge.cuh"

namespace {

struct Merge {
  using Args = commdsl::MergeArgs;
  using Element = commdsl::COMMDSL_DTYPE;
  using Result = commdsl::COMMDSL_RESULT;
  static constexpr commdsl::u32 kElements = COMMDSL_ELEMENTS;
  static constexpr bool kWeighs = COMMDSL_WEIGHS;
  static COMMDSL_FN void run(const Args& args, commdsl::u32 item) { commdsl::merge<Merge>(args, item); }
};

}  // namespace

COMMDSL_ITEMS(commdsl_merge, Merge)
