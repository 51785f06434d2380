// What a launch of products is told, how a block of it lays out its shared memory, and what each of its threads knows of the pieces that
// its worker takes. Assumes a Plan with `multiply` (wgmma.cu.j2); `matmul.cuh` says what happens in a block. Loads, multiplies and stores
// nothing.
//
// A worker, a cluster of blocks, takes pieces in the order of the table. What a piece waits for comes before it there, or is made of
// what comes before it on another rank: so all are made however few workers there are, as where a kernel of somebody else, which waits
// for this one on another rank, has the SMs of the rest. The next are taken late, when the last is nearly loaded: who comes first is not
// to have those that others would begin with.
#pragma once

#include "commdsl/types.cuh"
#include "commdsl/device.cuh"
#include "commdsl/elements.cuh"
#include "commdsl/vectors.cuh"
#include "commdsl/async.cuh"
#include "commdsl/tensor.cuh"
#include "commdsl/warpgroup.cuh"

namespace commdsl {

constexpr u32 kMultipliers = 2;
constexpr u32 kClaims = 4;                 // entries of the table that a worker knows of at once
constexpr u32 kLine = 128;                 // bytes that lie side by side in shared memory, swizzled
constexpr u32 kPanelBytes = 64 * kLine;    // 64 lines
constexpr u32 kPart = 32;                  // bytes of a line that one instruction multiplies
constexpr u32 kMarks = 256;                // bytes of all marks

// It is only multiplied.
struct float8_e4m3fn {
  using Storage = u8;
};

// `slot`: where sums lie that one block leaves for another. `parts` 0: a whole tile; more: the first part, to which so many are
// added; less: a later part.
struct alignas(16) Piece {
  u16 row, column, first, last;
  i32 slot;
  i16 parts;
  u16 turn;
};

// What is taken at once: a piece, and none or one more, whose `last` is 0. The one behind all others is of no turn.
constexpr u32 kTaken = 2;
struct alignas(16) Taken {
  Piece piece[kTaken];
#ifdef COMMDSL_STAMPS
  u32 number, unused[3];  // in the table
  COMMDSL_FN u32 entry() const { return number; }
#else
  COMMDSL_FN u32 entry() const { return 0; }
#endif
  COMMDSL_FN bool is_end() const { return piece[0].turn == 0xffff; }
};

// Matrix `at` of those that a map describes.
constexpr u16 kNowhere = 0xffff;
struct MatmulPlace {
  u16 map, at;
};

// The word of the call that is awaited, and the number that it has to come to.
struct alignas(8) MatmulWait {
  u32 word, level;
};

// Rows times a factor, once `waits` words from `wait` on have come.
struct alignas(16) MatmulSource {
  MatmulPlace rows, factor;
  u16 wait, waits, unused[2];
};

// The sum of products of the sources from `source` on, of `steps` stages each, to `result`. `count` matrices from place `added` on are
// added, once `waits` words from `wait` on have come. Stored tiles are counted in the word `stored`; -1: nobody waits for them. They
// also go to the `pushes` places from `push` on, which are peers', when the word `ready` says so; -1: they may. The rows of its first
// source are copied to `copy`. `bias`: which of the launch's; then the row of it. kNowhere: none.
struct alignas(16) MatmulTask {
  u32 columns;
  u16 source, steps;
  MatmulPlace result, copy;
  u16 added, count, wait, waits, push, pushes;
  i16 stored, ready;
  u16 bias, bias_row, activation, unused;
};
constexpr u16 kGelu = 1, kSwiglu = 2;  // activations

struct alignas(64) MatmulArgs {
  TensorMap maps[COMMDSL_MAPS];
  u64 pieces, claims;    // a table of what is taken, and how much of it is: zero between launches
  u64 tasks, sources, places, waits, words;
  u64 partials, flags;
  u64 scales[2];         // of A and of B, a float32 each
  u64 timeout_ns;
  u64 stamps;            // intervals
  u32 entries, unused;   // of the table
  u64 bias[COMMDSL_BIASES];
};

template <class Plan>
struct MatmulShape : Plan {
  static constexpr u32 kDepth = kLine / sizeof(typename Plan::Element::Storage);  // of a stage
  static constexpr bool kFloat8 = sizeof(typename Plan::Element::Storage) == 1;
  static constexpr u32 kHalf = Plan::kColumns / 2;  // the columns of B that one load, or one block of a cluster, brings
  static constexpr bool kWholeFactor = Plan::kBDeep && Plan::kCluster == 1 && !Plan::kGated && !Plan::kMixed;  // in one load
  static constexpr u32 kOutColumns = Plan::kGated ? kHalf : Plan::kColumns;
  static constexpr u32 kHigh = Plan::kRows / (64 * kMultipliers);  // how often 64 rows a multiplier has
  static constexpr u32 kSums = Plan::kColumns / 2;                 // of a thread, in 64 rows
  static constexpr u32 kABytes = Plan::kRows * kLine, kStageBytes = kABytes + Plan::kColumns * kLine;
  static constexpr u32 kBlocks = Plan::kCluster * Plan::kSplit;  // of a cluster
  static constexpr u32 kStored = kOutColumns / Plan::kSplit, kShare = kSums / Plan::kSplit;  // by a block of its cluster
  static constexpr u32 kOutBytes = sizeof(typename Plan::Result::Storage);
  static constexpr u32 kOutLine = kStored * kOutBytes >= 128 ? 128 : kStored * kOutBytes >= 64 ? 64 : 32;  // of a panel of C, in bytes
  static constexpr u32 kOutElements = kOutLine / kOutBytes;
  static constexpr u32 kMade = (kStored + kOutElements - 1) / kOutElements * kHigh;  // panels that a multiplier makes of a tile
  static constexpr u32 kWords = kOutLine / 8;                                        // of a thread, in a panel
  // Of the widest tiles, which are made by the dozen: a thread has registers for what is made of one and for sums of the next.
  static constexpr bool kStoresLate = !kFloat8 && kHigh == 1 && kSums == 128 && kMade * kWords <= 64;
  static constexpr u32 kHeld = kStoresLate ? kMade : 1;
  static_assert(!Plan::kMixed || (!Plan::kGated && Plan::kSplit == 1 && kHalf % kOutElements == 0), "a gated tile has half of the panels");
  static_assert(!(Plan::kAdds || Plan::kBias) || kOutBytes == 2, "what is added is of 16 bits, as the result is");
  static_assert(!kFloat8 || (Plan::kADeep && Plan::kBDeep && kHigh == 1), "float8 is multiplied where it is deep, in sums that are held twice");
  static_assert(kHalf % 8 == 0 && kStored >= 16, "eight lines are swizzled together, and one panel is stored");
  static_assert(Plan::kSplit == 1 || (Plan::kCluster == 1 && kHigh == 1 && !Plan::kGated), "blocks share a tile in one way");
  static_assert(kStored % 8 == 0, "a thread stores pairs of columns");
  static_assert(!Plan::kCopies || (Plan::kADeep && !Plan::kAdds), "rows are copied as they lie, and with nothing else in the stages");
  static_assert(Plan::kBDeep || kHalf % 64 == 0, "a panel has 64 rows of B side by side");

  // Columns of C go through shared memory in panels of a line. The last one ends where the tile does: where tiles are not so many
  // panels wide, it has columns of the one before it once more.
  COMMDSL_FN static constexpr u32 panel_column(u32 column) {
    return column + kOutElements > kStored ? kStored - kOutElements : column;
  }
};

// The block's shared memory: stages, one or two panels of C for each multiplier, marks.
template <class Shape>
struct MatmulShared {
  u32 base;

  COMMDSL_FN MatmulShared() : base((static_cast<u32>(__cvta_generic_to_shared(shared_bytes)) + 1023) / 1024 * 1024) {}
  COMMDSL_FN u32 stage(u32 number) const { return base + number * Shape::kStageBytes; }
  COMMDSL_FN u32 panel(u32 multiplier, u32 store) const {
    return base + Shape::kStages * Shape::kStageBytes + (Shape::kPanels * multiplier + store % Shape::kPanels) * kPanelBytes;
  }
  COMMDSL_FN u32 full(u32 stage) const { return panel(kMultipliers, 0) + stage * 8; }
  COMMDSL_FN u32 empty(u32 stage) const { return full(stage) + Shape::kStages * 8; }
  // Of a tile that a cluster makes: its blocks have multiplied; a multiplier has the others' sums; the stages are empty again.
  COMMDSL_FN u32 multiplied() const { return full(0) + 2 * Shape::kStages * 8; }
  COMMDSL_FN u32 gathered(u32 multiplier) const { return multiplied() + 8 + multiplier * 8; }
  COMMDSL_FN u32 taken() const { return gathered(kMultipliers); }
  // What the worker takes at its n-th time: where it lies; it is there; all have read it.
  COMMDSL_FN u32 entry(u32 n) const { return panel(kMultipliers, 0) + kMarks + n % kClaims * sizeof(Taken); }
  COMMDSL_FN u32 said(u32 n) const { return taken() + 8 + n % kClaims * 8; }
  COMMDSL_FN u32 heard(u32 n) const { return said(n) + kClaims * 8; }
  COMMDSL_FN static u32 turn(u32 n) { return n / kClaims % 2; }
  // What a block leaves for a multiplier.
  COMMDSL_FN u32 sums(u32 block, u32 multiplier) const {
    return base + (block * kMultipliers + multiplier) * Shape::kShare * kWarpgroup * 4;
  }

  COMMDSL_FN void start() const {
    for (u32 i = 0; i < Shape::kStages; ++i) {
      start_mark(full(i), 1);
      start_mark(empty(i), kMultipliers * Shape::kCluster);
    }
    start_mark(multiplied(), kMultipliers * Shape::kSplit);
    for (u32 i = 0; i < kMultipliers; ++i) start_mark(gathered(i), Shape::kSplit);
    start_mark(taken(), kMultipliers);
    for (u32 i = 0; i < kClaims; ++i) {
      start_mark(said(i), 1);
      start_mark(heard(i), (1 + kMultipliers) * Shape::kBlocks);
    }
    marks_started();
  }
};

// What moves beside ends in time or says so: what has not come a while after that is a fault of ours, and the launch fails rather than
// hang or go on without it.
COMMDSL_FN u64 await_word(const u64* word, u64 least, u64 timeout_ns) {
  const u64 since = now_ns();
  u64 found;
  while ((found = load_acquire(word)) < least) {
    if (now_ns() - since > timeout_ns) __trap();
  }
  return found;
}

template <class Shape>
struct Worker {
  const MatmulArgs& args;
  MatmulShared<Shape> shared;
  u32 stage = 0, parity = 0;  // of the next fill

  COMMDSL_FN explicit Worker(const MatmulArgs& args) : args(args) {}
  COMMDSL_FN Taken taken(u32 n) const {
    await_phase(shared.said(n), shared.turn(n));
    Taken found;
    for (u32 i = 0; i < sizeof found / 16; ++i) read(reinterpret_cast<char*>(&found) + i * 16, n, i);
    return found;
  }
  // Once more, as long as it lies there: a thread need not hold it.
  COMMDSL_FN Piece piece(u32 n, u32 at) const {
    Piece found;
    read(&found, n, at);
    return found;
  }
  COMMDSL_FN void read(void* found, u32 n, u32 i) const {
    Vector16 word;
    load_shared(word, shared.entry(n) + i * 16);
    memcpy(found, &word, sizeof word);
  }
  // Not by division: whoever multiplies narrow tiles has no time for it.
  COMMDSL_FN u32 next_stage() {
    const u32 next = stage + 1 == Shape::kStages ? 0 : stage + 1, found = stage;
    parity ^= next == 0 ? 1 : 0, stage = next;
    return found;
  }
  // It may lie no longer.
  COMMDSL_FN void heard(u32 n) const { arrive<Shape::kBlocks>(shared.heard(n), 0); }
  COMMDSL_FN static u32 workers() { return gridDim.x / Shape::kBlocks; }
  // Where nobody waits for this launch, workers have all SMs in the end, and need not ask who is next.
  COMMDSL_FN bool is_awaited() const { return args.words != 0; }
  COMMDSL_FN const MatmulTask& task(u32 number) const { return reinterpret_cast<const MatmulTask*>(args.tasks)[number]; }
  // Where all tasks have one map the text says which: the address of a map that is looked up takes a load a while.
  template <i32 always>
  COMMDSL_FN const TensorMap& map(u32 number) const {
    if constexpr (always >= 0) return args.maps[always];
    return args.maps[number];
  }
  COMMDSL_FN MatmulPlace place(u32 number) const { return reinterpret_cast<const MatmulPlace*>(args.places)[number]; }
  COMMDSL_FN MatmulSource source(u32 number) const { return reinterpret_cast<const MatmulSource*>(args.sources)[number]; }
  COMMDSL_FN u64* word(i32 number) const { return reinterpret_cast<u64*>(args.words) + number; }
  COMMDSL_FN static u32 row(const Piece& piece) {
    return (Shape::kCluster == 1 ? piece.row : piece.row * Shape::kCluster + block_of_cluster()) * Shape::kRows;
  }
  // Of a gated product half of the columns are left.
  COMMDSL_FN bool is_gated(u32 task_number) const {
    if constexpr (Shape::kMixed) return task(task_number).activation == kSwiglu;
    return Shape::kGated;
  }
  COMMDSL_FN u32 column(const Piece& piece) const {
    return piece.column * (Shape::kMixed && is_gated(piece.turn) ? Shape::kHalf : Shape::kOutColumns);
  }
  COMMDSL_FN u32 stored_column(const Piece& piece) const { return column(piece) + share() * Shape::kStored; }
  COMMDSL_FN static u32 share() { return Shape::kSplit > 1 ? block_of_cluster() : 0; }
  COMMDSL_FN static u32 first(const Piece& piece) { return piece.first + (piece.last - piece.first) * share() / Shape::kSplit; }
  COMMDSL_FN static u32 last(const Piece& piece) { return piece.first + (piece.last - piece.first) * (share() + 1) / Shape::kSplit; }
};

}  // namespace commdsl
