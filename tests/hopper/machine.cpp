// A Hopper GPU that is made up: runs the blocks of one launch in one thread of the processor, coroutine by coroutine.
//
// What is to be found by it is an order that the kernel leaves open. Threads go on from where they wait in an order that is drawn, and
// warpgroups sleep now and then. What the async proxy does (boxes, words that are sent, products of warpgroups) is done at any time
// from when it is asked for until it is awaited. Assumes a kernel that waits only by the words of the vocabulary. Does not know weak
// orders of memory: what is written generically is there at once, but TMA has it only behind a fence.
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <array>
#include <functional>
#include <list>
#include <map>
#include <set>
#include <vector>

#include "commdsl/types.cuh"
#include "commdsl/device.cuh"
#include "commdsl/async.cuh"
#include "commdsl/tensor.cuh"
#include "commdsl/warpgroup.cuh"

extern "C" void hopper_kernel(const void* arguments);

Index threadIdx, blockIdx, gridDim;

namespace commdsl {
namespace {

constexpr u32 kBase = 1024 + 128;   // where a block's own bytes begin: not where eight swizzled lines do
constexpr u32 kBlocks = 1 << 24;    // apart: addresses of blocks of a cluster
constexpr size_t kStack = 1 << 16;
constexpr u32 kPatience = 400;      // rounds in which nothing happens

struct Mark {
  u32 arrivals, pending, phase;
  i64 bytes;
};

struct Barrier {
  u32 come = 0;
  u64 round = 0;
};

struct Cluster;
struct Thread;
struct Block {
  Cluster* cluster;
  u32 number, rank, running;
  bool is_over = false;
  std::vector<u8> bytes, unfenced;
  std::map<u32, Mark> marks;
  std::vector<Thread*> threads;
  Barrier all, warpgroups[4], warps[32];
  u32 pointed[32][32];         // by the threads of a warp
  std::vector<u32> foreign;    // words that other blocks have stored here
};

struct Cluster {
  std::list<Block> blocks;
  Barrier all;
};

struct Product {
  const Form* form;
  float* sum;
  u64 a, b;
  bool adds;
};

struct Thread {
  Block* block;
  u32 number;
  ucontext_t context;
  std::function<bool()> may_go_on;
  bool polls = false, is_over = false;
  std::vector<Product> products;         // not made yet
  std::vector<size_t> committed;         // how many of all that were begun end each group of them
  size_t begun = 0, made = 0;            // products
  u32 groups = 0;                        // of stores
  std::vector<u32> written;              // words, not fenced
};

// A box or words on their way to a block.
struct Arrival {
  Block* block;
  u32 to, mark;
  TensorMap map;
  i32 at[3];
  std::vector<u8> sent;  // empty: a box
};

// A box on its way to memory.
struct Departure {
  Thread* thread;
  Block* block;
  u32 group, from;
  TensorMap map;
  i32 at[3];
  bool is_read;
  std::vector<u8> bytes;
};

// Whether tasks may store where others have stored: then a box is stored more than once.
extern "C" unsigned hopper_stores_again;
unsigned hopper_stores_again = 0;

// What moves beside: when `word` is at least `least`, bytes are copied, and then `raised` is 1. Those that raise do it in their order.
struct Move {
  u64 word, least, from, to, bytes, raised;
};

std::list<Cluster> clusters;
std::list<Thread> threads;
std::list<Arrival> arrivals;
std::list<Departure> departures;
std::set<std::array<u64, 4>> stored;  // boxes: of which tensor, and where in it
Thread* own;
ucontext_t scheduler;
const void* arguments;
u32 shared_size, threads_a_block;
u64 drawn, rounds;
bool happened;
char failure[400];
std::vector<char*> stacks;

u32 draw(u32 below) {
  drawn ^= drawn << 13, drawn ^= drawn >> 7, drawn ^= drawn << 17;
  return static_cast<u32>(drawn >> 20) % below;
}

void fail(const char* format, ...) {
  if (!failure[0]) {
    va_list values;
    va_start(values, format);
    int length = own ? snprintf(failure, sizeof failure, "block %u thread %u: ", own->block->number, own->number) : 0;
    vsnprintf(failure + length, sizeof failure - length, format, values);
    va_end(values);
  }
  if (own) setcontext(&scheduler);
}

void wait(std::function<bool()> may_go_on, bool polls = false) {
  own->may_go_on = std::move(may_go_on), own->polls = polls;
  swapcontext(&own->context, &scheduler);
}

// The others' turn, perhaps.
void pause() {
  if (draw(4) == 0) wait([] { return true; });
}

void meet(Barrier& barrier, u32 count) {
  if (++barrier.come == count) {
    barrier.come = 0, ++barrier.round;
    return;
  }
  const u64 round = barrier.round;
  wait([&barrier, round] { return barrier.round != round; });
}

Block& block_at(Block& here, u32 at) {
  if (at < kBlocks) return here;
  for (Block& block : here.cluster->blocks) {
    if (block.rank != at / kBlocks - 1) continue;
    if (block.is_over) fail("block %u has ended, and something goes there", block.number);
    return block;
  }
  fail("no block %u in the cluster", at / kBlocks - 1);
  return here;
}

u8* bytes_at(Block& block, u32 at, u32 count, u32 aligned) {
  at %= kBlocks;
  if (at < kBase || at + count > kBase + shared_size || at % aligned != 0) {
    fail("%u bytes at %u of shared memory, which begins at %u and has %u, aligned to %u", count, at, kBase, shared_size, aligned);
    at = kBase;
  }
  return block.bytes.data() + at - kBase;
}

Mark& mark_at(Block& block, u32 at) {
  const auto found = block.marks.find(at % kBlocks);
  if (found == block.marks.end()) fail("no mark was started at %u", at % kBlocks);
  return found->second;
}

void settle_phase(Mark& mark) {
  if (mark.pending > 0 || mark.bytes != 0) return;
  mark.pending = mark.arrivals, ++mark.phase;
}

void arrive_at(Block& block, u32 at, u32 bytes) {
  Mark& mark = mark_at(block, at);
  mark.bytes += bytes;
  if (mark.pending == 0) fail("more arrive at %u than are expected", at % kBlocks);
  --mark.pending;
  settle_phase(mark);
  pause();
}

void write(u32 at, const void* from, u32 count) {
  Block& block = block_at(*own->block, at);
  u8* to = bytes_at(block, at, count, count);
  memcpy(to, from, count);
  for (u32 word = 0; word < count; word += 4) {
    const u32 place = static_cast<u32>(to - block.bytes.data()) + word;
    block.unfenced[place / 4] = 1;
    (&block == own->block ? own->written : block.foreign).push_back(place / 4);
  }
}

// --- TMA ---------------------------------------------------------------------------------------------------------------------

u32 swizzled(u32 at, u32 line) { return at ^ (at >> 7 & (line / 16 - 1)) << 4; }

// Every 16 bytes of a box: where they lie in memory, how many of them are inside of the tensor, and their place in shared memory.
template <class Body>
void each_of(const TensorMap& map, const i32 (&at)[3], u32 shared, Body body) {
  const i64 line = static_cast<i64>(map.swizzle);
  if (map.box[0] * map.element != map.swizzle || map.box[2] != 1 || shared % 128 != 0) fail("a box of lines of %lld bytes at %u", line, shared);
  for (u32 i = 0; i < 3; ++i) {
    if (at[i] < 0) fail("a box begins at %d of dimension %u", at[i], i);
  }
  for (u32 outer = 0; outer < map.box[1]; ++outer) {
    const u64 row = at[1] + outer, first = at[0] * map.element;
    const bool is_inside = row < map.size[1] && static_cast<u64>(at[2]) < map.size[2];
    const i64 rest = is_inside ? static_cast<i64>(map.size[0] * map.element) - static_cast<i64>(first) : 0;
    char* const memory = reinterpret_cast<char*>(map.address + at[2] * map.step[1] + row * map.step[0] + first);
    for (i64 inner = 0; inner < line; inner += 16) {
      const i64 count = rest - inner < 0 ? 0 : rest - inner < 16 ? rest - inner : 16;
      body(memory + inner, static_cast<size_t>(count), swizzled(static_cast<u32>(shared + outer * line + inner), static_cast<u32>(line)));
    }
  }
}

// 16 bytes as TMA finds them.
u8* fenced_at(Block& block, u32 at) {
  u8* const found = bytes_at(block, at, 16, 16);
  const u8* unfenced = block.unfenced.data() + (found - block.bytes.data()) / 4;
  if (unfenced[0] || unfenced[1] || unfenced[2] || unfenced[3]) fail("TMA comes to %u, where a write is not fenced", at);
  return found;
}

void land(const Arrival& one) {
  if (one.block->is_over) return fail("block %u has ended before what it asked for came", one.block->number);
  i64 count = static_cast<i64>(one.sent.size());
  if (count > 0) {
    memcpy(bytes_at(*one.block, one.to, count, 16), one.sent.data(), count);
  } else {
    each_of(one.map, one.at, one.to, [&](const char* memory, size_t inside, u32 at) {
      u8* const to = fenced_at(*one.block, at);
      memset(to, 0, 16);
      memcpy(to, memory, inside);
      count += 16;
    });
  }
  Mark& mark = mark_at(*one.block, one.mark);
  mark.bytes -= count;
  settle_phase(mark);
}

void leave_shared(Departure& one) {
  one.is_read = true;
  each_of(one.map, one.at, one.from, [&](const char*, size_t, u32 at) {
    const u8* const from = fenced_at(*one.block, at);
    one.bytes.insert(one.bytes.end(), from, from + 16);
  });
}

void reach_memory(const Departure& one) {
  const u8* from = one.bytes.data();
  each_of(one.map, one.at, one.from, [&](char* memory, size_t inside, u32) {
    memcpy(memory, from, inside);
    from += 16;
  });
}

void work() {
  const u32 share = 1 + draw(6);
  for (auto one = arrivals.begin(); one != arrivals.end();) {
    if (draw(share) != 0) {
      ++one;
      continue;
    }
    land(*one);
    one = arrivals.erase(one), happened = true;
  }
  for (auto one = departures.begin(); one != departures.end();) {
    const bool works = draw(share + 3) == 0;
    if (works) happened = true;
    if (works && one->is_read) {
      reach_memory(*one);
      one = departures.erase(one);
    } else {
      if (works) leave_shared(*one);
      ++one;
    }
  }
}

// --- products ------------------------------------------------------------------------------------------------------------------

// Bits of a matrix descriptor, of 128 bytes swizzled (PTX ISA, "Matrix Descriptor").
struct Operand {
  u32 start, leading, stride;
  explicit Operand(u64 bits)
      : start((bits & 0x3fff) << 4), leading((bits >> 16 & 0x3fff) << 4), stride((bits >> 32 & 0x3fff) << 4) {
    if (bits >> 49 != u64{1} << 13) fail("not swizzled by 128 bytes: %llx", bits);
  }
  u32 at(u32 row, u32 depth, u32 element, bool deep) const {
    const u32 line = 128 / element;
    const u32 place = deep ? row / 8 * stride + row % 8 * 128 + depth * element
                           : row / line * leading + row % line * element + depth / 8 * stride + depth % 8 * 128;
    return swizzled(start + place, 128);
  }
};

void run(Thread& thread, const Product& one) {
  const Form& form = *one.form;
  const Operand a(one.a), b(one.b);
  const u32 t = thread.number % kWarpgroup, element = 32 / form.depth;
  const u32 columns = form.columns / 4;
  float left[2][32], right[32][64], row[32], total[2][64];
  const auto read = [&](const Operand& from, u32 line, bool deep, float* to) {
    const u32 together = deep ? 16 / element : 1;  // that lie side by side
    for (u32 k = 0; k < form.depth; k += together) {
      form.widen(bytes_at(*thread.block, from.at(line, k, element, deep), together * element, together * element), together, to + k);
    }
  };
  for (u32 i = 0; i < 2; ++i) read(a, t / 32 * 16 + t % 32 / 4 + i * 8, form.a_deep, left[i]);
  for (u32 c = 0; c < columns; ++c) {
    read(b, c / 2 * 8 + t % 4 * 2 + c % 2, form.b_deep, row);
    for (u32 k = 0; k < form.depth; ++k) right[k][c] = row[k];
  }
  const auto at = [](u32 i, u32 c) { return c / 2 * 4 + i * 2 + c % 2; };
  for (u32 i = 0; i < 2; ++i) {
    for (u32 c = 0; c < columns; ++c) total[i][c] = one.adds ? one.sum[at(i, c)] : 0;
    for (u32 k = 0; k < form.depth; ++k) {
      for (u32 c = 0; c < columns; ++c) total[i][c] += left[i][k] * right[k][c];
    }
    for (u32 c = 0; c < columns; ++c) one.sum[at(i, c)] = total[i][c];
  }
}

// Whether all four warps have committed so many groups: together they make one product.
bool have_committed(const Thread& thread, size_t groups) {
  for (u32 i = 0; i < kWarpgroup; ++i) {
    if (thread.block->threads[thread.number / kWarpgroup * kWarpgroup + i]->committed.size() < groups) return false;
  }
  return true;
}

void make(const Thread& one, size_t groups) {
  for (u32 i = 0; i < kWarpgroup && groups > 0; ++i) {
    Thread& thread = *one.block->threads[one.number / kWarpgroup * kWarpgroup + i];
    const size_t last = thread.committed[groups - 1];
    if (last <= thread.made) continue;
    const auto first = thread.products.begin(), end = first + static_cast<i64>(last - thread.made);
    for (auto product = first; product != end; ++product) run(thread, *product);
    thread.products.erase(first, end), thread.made = last;
  }
}

// --- threads -------------------------------------------------------------------------------------------------------------------

void enter() {
  hopper_kernel(arguments);
  own->is_over = true;
  Block& block = *own->block;
  if (!own->products.empty()) fail("products are not awaited");
  if (--block.running == 0) {
    own = nullptr;
    for (const Departure& one : departures) {
      if (one.block == &block && !one.is_read) fail("block %u has ended before what it stores was read", block.number);
    }
    for (const Arrival& one : arrivals) {
      if (one.block == &block) fail("block %u has ended before what it asked for came", block.number);
    }
    block.is_over = true;
  }
  setcontext(&scheduler);
}

void start(u32 first, u32 cluster) {
  clusters.emplace_back();
  for (u32 rank = 0; rank < cluster; ++rank) {
    Block& block = clusters.back().blocks.emplace_back();
    block.cluster = &clusters.back(), block.number = first + rank, block.rank = rank, block.running = threads_a_block;
    block.bytes.assign(shared_size, 0xff), block.unfenced.assign(shared_size / 4 + 1, 0);
    for (u32 number = 0; number < threads_a_block; ++number) {
      Thread& thread = threads.emplace_back();
      block.threads.push_back(&thread);
      thread.block = &block, thread.number = number, thread.may_go_on = [] { return true; };
      if (stacks.size() < threads.size()) {
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        stacks.push_back(static_cast<char*>(mmap(nullptr, kStack, PROT_READ | PROT_WRITE, flags, -1, 0)));
      }
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = stacks[threads.size() - 1];
      thread.context.uc_stack.ss_size = kStack;
      makecontext(&thread.context, enter, 0);
    }
  }
}

// One after another, all that may go on, but warps that sleep.
void go_on(u64 sleeping) {
  for (Thread& thread : threads) {
    if (thread.is_over || (sleeping >> (thread.block->number * 12 + thread.number / 32) % 61 & 1) || !thread.may_go_on()) continue;
    if (!thread.polls) happened = true;
    own = &thread;
    threadIdx.x = thread.number, blockIdx.x = thread.block->number;
    swapcontext(&scheduler, &thread.context);
    own = nullptr;
    if (failure[0]) return;
  }
}

void move(std::vector<Move>& moves) {
  bool is_first = true;
  for (auto one = moves.begin(); one != moves.end();) {
    const bool may = one->word == 0 || load_acquire(reinterpret_cast<u64*>(one->word)) >= one->least;
    if (may && (is_first || !one->raised) && draw(12) == 0) {
      memcpy(reinterpret_cast<void*>(one->to), reinterpret_cast<void*>(one->from), one->bytes);
      if (one->raised) store_release(reinterpret_cast<u64*>(one->raised), 1);
      one = moves.erase(one), happened = true;
    } else {
      if (may) happened = true;
      if (one->raised) is_first = false;
      ++one;
    }
  }
}

}  // namespace

// --- the vocabulary --------------------------------------------------------------------------------------------------------------

u64 now_ns() {
  wait([] { return true; }, true);
  return rounds + 1;
}

u32 __cvta_generic_to_shared(const void*) { return kBase; }

void fence_proxies() {
  for (u32 word : own->written) own->block->unfenced[word] = 0;
  for (u32 word : own->block->foreign) own->block->unfenced[word] = 0;
  own->written.clear(), own->block->foreign.clear();
}
void fence_proxies_of_shared() { fence_proxies(); }

void await_reads(u32 groups) {
  for (Departure& one : departures) {
    if (one.thread == own && one.group + groups < own->groups && !one.is_read) leave_shared(one);
  }
}
void await_writes() {
  await_reads(0);
  for (auto one = departures.begin(); one != departures.end();) {
    const bool awaited = one->thread == own && one->group < own->groups;
    if (awaited) reach_memory(*one);
    one = awaited ? departures.erase(one) : std::next(one);
  }
}
void commit_group() {
  ++own->groups;
  pause();
}

void expect(u32 mark, u32 bytes) { arrive_at(*own->block, mark, bytes); }
void await_phase(u32 mark, u32 parity) {
  if (mark >= kBlocks) fail("waits at another block's mark");
  const Mark& one = mark_at(*own->block, mark);
  if (one.phase % 2 == parity) wait([&one, parity] { return one.phase % 2 != parity; });
}
void load_shared(Vector16& v, u32 at) { memcpy(&v, bytes_at(*own->block, at, 16, 16), 16); }
void store_shared(u32 at, const Vector16& v) { write(at, &v, 16); }
void store_shared(u32 at, float first, float second) {
  const float both[2] = {first, second};
  write(at, both, 8);
}

u32 block_of_cluster() { return own->block->rank; }
void cluster_barrier(u32 cluster) {
  meet(cluster == 1 ? own->block->all : own->block->cluster->all, threads_a_block * cluster);
}
void start_mark(u32 mark, u32 arrivals) {
  bytes_at(*own->block, mark, 8, 8);
  if (!own->block->marks.emplace(mark, Mark{arrivals, arrivals, 0, 0}).second) fail("a mark is started twice at %u", mark);
}
u32 of_block(u32 at, u32 block) { return (block + 1) * kBlocks + at; }
void arrive_at_cluster(u32 mark, u32 block) { arrive_at(block_at(*own->block, of_block(mark, block)), mark, 0); }
void arrive_here(u32 mark) { arrive_at(*own->block, mark, 0); }
void store_to_cluster(u32 at, const float* four) { write(at, four, 16); }

void send(u32 at, const void* bytes, u32 count, u32 mark, u32 block) {
  const u8* first = static_cast<const u8*>(bytes);
  arrivals.push_back({&block_at(*own->block, of_block(at, block)), at, mark, {}, {}, {first, first + count}});
}
void tensor_load(u32 to, const TensorMap& map, u32 inner, u32 outer, u32 matrix, u32 mark, u32 cluster) {
  const i32 at[3] = {static_cast<i32>(inner), static_cast<i32>(outer), static_cast<i32>(matrix)};
  for (u32 block = 0; block < cluster; ++block) {
    Block& there = cluster == 1 ? *own->block : block_at(*own->block, of_block(to, block));
    arrivals.push_back({&there, to, mark, map, {at[0], at[1], at[2]}, {}});
  }
}
void tensor_store(const TensorMap& map, u32 inner, u32 outer, u32 matrix, u32 from) {
  const i32 at[3] = {static_cast<i32>(inner), static_cast<i32>(outer), static_cast<i32>(matrix)};
  if (!stored.insert({map.address, inner, outer, matrix}).second && !hopper_stores_again) fail("a box is stored twice, at %u %u of matrix %u", inner, outer, matrix);
  departures.push_back({own, own->block, own->groups, from, map, {at[0], at[1], at[2]}, false, {}});
}

// All threads of a warp have pointed at lines; the words of thread t lie in line t / 4 of each matrix.
template <class Body>
void each_matrix(u32 at, Body body) {
  const u32 warp = own->number / 32, t = own->number % 32;
  own->block->pointed[warp][t] = at;
  meet(own->block->warps[warp], 32);
  for (u32 matrix = 0; matrix < 4; ++matrix) body(matrix, own->block->pointed[warp][matrix * 8 + t / 4] + t % 4 * 4);
  meet(own->block->warps[warp], 32);
}
void store_matrices(u32 at, const u32 (&word)[4]) {
  each_matrix(at, [&](u32 matrix, u32 place) { write(place, &word[matrix], 4); });
}
void load_matrices(u32 (&word)[4], u32 at) {
  each_matrix(at, [&](u32 matrix, u32 place) { memcpy(&word[matrix], bytes_at(*own->block, place, 4, 4), 4); });
}

void begin_product(const Form& form, float* sum, u64 a, u64 b, bool adds) {
  own->products.push_back({&form, sum, a, b, adds});
  ++own->begun;
}
void commit_products() {
  own->committed.push_back(own->begun);
  if (have_committed(*own, own->committed.size()) && draw(2) == 0) make(*own, own->committed.size());
}
void await_products(u32 left) {
  if (own->committed.size() <= left) return;
  Thread& thread = *own;
  const size_t groups = thread.committed.size() - left;
  if (!have_committed(thread, groups)) wait([&thread, groups] { return have_committed(thread, groups); });
  make(thread, groups);
}
void warpgroup_barrier(u32 number) { meet(own->block->warpgroups[number], kWarpgroup); }

}  // namespace commdsl

void __trap() { commdsl::fail("what it waits for does not come in time"); }

// Runs a launch of clusters of so many blocks, of which up to `most` are there at once. What went wrong; empty: nothing.
extern "C" const char* hopper_run(const void* given, unsigned blocks, unsigned count, unsigned cluster, unsigned bytes, unsigned most,
                                  unsigned long long seed, const void* beside, unsigned number) {
  using namespace commdsl;
  clusters.clear(), threads.clear(), arrivals.clear(), departures.clear(), stored.clear();
  own = nullptr, arguments = given, shared_size = bytes, threads_a_block = count;
  drawn = seed * 2 + 0x9e3779b97f4a7c15, rounds = 0, failure[0] = 0;
  gridDim.x = blocks;
  const Move* first = static_cast<const Move*>(beside);
  std::vector<Move> moves(first, first + number);
  u32 begun = 0, idle = 0;
  u64 sleeping = 0;
  for (bool goes_on = true; goes_on && !failure[0]; ++rounds) {
    u32 resident = 0;
    for (const Cluster& one : clusters) {
      bool is_over = true;
      for (const Block& block : one.blocks) is_over = is_over && block.is_over;
      resident += !is_over;
    }
    for (; resident < most && begun < blocks; ++resident, begun += cluster) start(begun, cluster);
    if (rounds % 8 == 0) sleeping = draw(3) == 0 ? drawn & drawn >> 21 : 0;
    happened = false;
    go_on(sleeping);
    work();
    move(moves);
    idle = happened ? 0 : idle + 1;
    if (idle > kPatience) fail("nothing goes on: %zu moves beside are left", moves.size());
    goes_on = resident > 0 || begun < blocks || !moves.empty() || !departures.empty();
  }
  return failure;
}
