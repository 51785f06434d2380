// Merges results of attention over parts of the keys. Which elements, and how many a thread makes, are the build's:
// -DCOMMDSL_DTYPE= of the parts, -DCOMMDSL_RESULT= of the whole, -DCOMMDSL_ELEMENTS=.
#define COMMDSL_THREADS 128
#define COMMDSL_LANES_PER_BLOCK 1
#include "commdsl/merge.cuh"

namespace {

struct Merge {
  using Args = commdsl::MergeArgs;
  using Element = commdsl::COMMDSL_DTYPE;
  using Result = commdsl::COMMDSL_RESULT;
  static constexpr commdsl::u32 kElements = COMMDSL_ELEMENTS;
  static COMMDSL_FN void run(const Args& args, commdsl::u32 item) { commdsl::merge<Merge>(args, item); }
};

}  // namespace

COMMDSL_ITEMS(commdsl_merge, Merge)
