// C = A x B on Hopper's tensor cores, with what is done to a sum before it is rounded: bias, activation, residual.
// Assumes sm_90a, COMMDSL_THREADS 384, and a Plan with `multiply` (wgmma.cu.j2). Decides nothing: in which order tiles are made, and
// which of them several blocks share, is in the table of pieces.
//
// A block has three warpgroups. One thread of the first loads (TMA): a stage holds kRows of A and kColumns of B, a line of 128 bytes
// deep: 64 elements of 16 bits, 128 of float8. The others multiply half of the rows each, 64 at a time, and store. The n-th fill takes
// stage n % kStages and ends phase n / kStages of its mark `full`; the multipliers of all blocks that it went to end the same phase of
// its mark `empty`. In a cluster of two blocks, which lie one below the other, each loads half of what both need of B and sends it to
// both. What is added to a tile comes behind its last stage, a line of 64 rows of each multiplier a fill, so it is there when the
// products are. Of the widest tiles a multiplier keeps what it has made, rounded, and stores it while it multiplies for the next.
//
// What is made may be several products by blocks of one factor, *turns*: rows from here or there, to here or there, that may have to wait for
// what moves beside, and that others may wait for. A turn's words say so: a launch beside is over, so many tiles of a turn are stored. Or a
// turn is a sum of products, *sources*: the depth of its tiles is that of one behind that of the other, and each is waited for by itself.
//
// Who has a tile of the first column may copy its rows, too, from the stages in which they are: each multiplier its own, by TMA, and it
// releases a stage when that has been read.
//
// Or a cluster makes a tile together: each of its kSplit blocks has a share of the depth, leaves its sums in the others' stages when
// all have multiplied, and stores the columns that are its own.
//
// The tensor cores add products of float8 in fewer bits than float32 has: sums of a stage, which are exact to 13 bits or so, are added up
// in float32. Both factors are deep, and what comes of them is multiplied with the two numbers that their elements stand for (scales).
//
// A piece is a run of the depth of one tile. Of a tile that is cut, the blocks with the later parts leave their sums in memory and
// raise a flag; the block with the first adds them up in the order of the depth: the same bits whoever comes when.
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
#include "commdsl/stamps.cuh"

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

// Matrix `rows_at` of those at `rows`, times matrix `factor_at`. The word to wait for before rows are read; -1: none.
struct alignas(8) MatmulSource {
  u16 rows, rows_at, factor_at;
  i16 there;
};

// Those from `source` on, to matrix `result_at` of those at `result`; `count` matrices from `first` on are added. The words to wait for
// before anything is added, and to count stored tiles in, and the matrix that the rows are copied to; -1: none.
struct alignas(16) MatmulTurn {
  u16 source, result, result_at, first, count;
  i16 sums_there, stored, copied_at;
};

struct alignas(64) MatmulArgs {
  TensorMap a[2], b, c[2], sums;
  u64 pieces, claims;    // a table of what is taken, and how much of it is: zero between launches
  u64 turns, sources, words;
  u64 bias, partials, flags;
  u64 scales[2];         // of A and of B, a float32 each
  u64 timeout_ns;
  u32 rows, columns;     // of C, in one turn
  u32 entries;           // of the table
  u32 steps;             // stages of the depth of a source
#ifdef COMMDSL_STAMPS
  u64 stamps;            // intervals
#endif
  TensorMap copied;      // what rows are copied to
};

template <class Plan>
struct MatmulShape : Plan {
  static constexpr u32 kDepth = kLine / sizeof(typename Plan::Element::Storage);  // of a stage
  static constexpr bool kFloat8 = sizeof(typename Plan::Element::Storage) == 1;
  static constexpr u32 kHalf = Plan::kColumns / 2;  // the columns of B that one load, or one block of a cluster, brings
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
COMMDSL_FN void await_word(const u64* word, u64 least, u64 timeout_ns) {
  const u64 since = now_ns();
  while (load_acquire(word) < least) {
    if (now_ns() - since > timeout_ns) __trap();
  }
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
  COMMDSL_FN MatmulTurn turn(u32 number) const { return reinterpret_cast<const MatmulTurn*>(args.turns)[number]; }
  COMMDSL_FN MatmulSource source(u32 number) const { return reinterpret_cast<const MatmulSource*>(args.sources)[number]; }
  COMMDSL_FN u64* word(i32 number) const { return reinterpret_cast<u64*>(args.words) + number; }
  COMMDSL_FN static u32 row(const Piece& piece) {
    return (Shape::kCluster == 1 ? piece.row : piece.row * Shape::kCluster + block_of_cluster()) * Shape::kRows;
  }
  COMMDSL_FN static u32 column(const Piece& piece) { return piece.column * Shape::kOutColumns; }
  COMMDSL_FN static u32 stored_column(const Piece& piece) { return column(piece) + share() * Shape::kStored; }
  COMMDSL_FN static u32 share() { return Shape::kSplit > 1 ? block_of_cluster() : 0; }
  COMMDSL_FN static u32 first(const Piece& piece) { return piece.first + (piece.last - piece.first) * share() / Shape::kSplit; }
  COMMDSL_FN static u32 last(const Piece& piece) { return piece.first + (piece.last - piece.first) * (share() + 1) / Shape::kSplit; }
};

// --- loading ---------------------------------------------------------------------------------------------------------------

template <class Shape>
struct Loader : Worker<Shape> {
  using Worker<Shape>::Worker;

  // While the block starts.
  COMMDSL_FN void begin() {
    number = this->is_awaited() ? 0 : blockIdx.x / Shape::kBlocks - this->workers();
    take();
    look();
  }

  COMMDSL_FN void run() {
    await_launch_before();
    for (u32 n = 0;; ++n) {
      say(n);
      const Taken taken = this->taken(n);
      this->heard(n);
      if (taken.is_end()) break;
      const bool are_two = taken.piece[1].last > 0;
      load(taken.piece[0], !are_two);
      if (are_two) load(taken.piece[1], true);
    }
    const u32 takes = this->args.entries + this->workers();                                // each finds the end
    if (this->is_awaited() && leads() && number + 1 == takes) store_relaxed(claims(), 0);  // for the next launch
  }

 private:
  u32 number = 0;   // that was taken last
  Taken next;       // and what it is
  u32 pieces = 0;
  i32 known = -1;   // launches are over in their order

  // One block of a worker takes for all of them.
  COMMDSL_FN static bool leads() { return Shape::kBlocks == 1 || block_of_cluster() == 0; }
  COMMDSL_FN u64* claims() const { return reinterpret_cast<u64*>(this->args.claims); }
  COMMDSL_FN void take() {
    if (!leads()) return;
    number = this->is_awaited() ? static_cast<u32>(atomicAdd(claims(), 1ull)) : number + this->workers();
  }
  COMMDSL_FN void look() {
    if (!leads()) return;
    const u32 entry = least(number, this->args.entries);
#pragma unroll
    for (u32 i = 0; i < kTaken; ++i) next.piece[i] = reinterpret_cast<const Piece*>(this->args.pieces)[entry * kTaken + i];
#ifdef COMMDSL_STAMPS
    next.number = entry;
#endif
  }
  COMMDSL_FN void say(u32 n) const {
    const u32 entry = this->shared.entry(n), said = this->shared.said(n);
    if (leads()) await_phase(this->shared.heard(n), this->shared.turn(n) ^ 1);
    if constexpr (Shape::kBlocks == 1) {
      Vector16 word[sizeof(Taken) / 16];
      memcpy(word, &next, sizeof word);
      for (u32 i = 0; i < sizeof(Taken) / 16; ++i) store_shared(entry + i * 16, word[i]);
      arrive<1>(said, 0);
    } else {
      expect(said, sizeof(Taken));
      for (u32 block = 0; leads() && block < Shape::kBlocks; ++block) send_to_cluster(entry, next, said, block);
    }
  }

  COMMDSL_FN void load(const Piece& piece, bool is_last) {
    const MatmulTurn turn = this->turn(piece.turn);
    const u32 first = this->first(piece), last = this->last(piece), late = last - least(Shape::kStages, last - first);
    u32 number = turn.source + first / this->args.steps, depth = first % this->args.steps;
    MatmulSource source = this->source(number);
    await_launch(source.there);
    for (u32 step = first; step < last; ++step, ++depth) {
      if (is_last && step == late) take();
      if (depth == this->args.steps) {
        depth = 0;
        source = this->source(++number);
        await_launch(source.there);
      }
      load(piece, source, depth * Shape::kDepth);
    }
    if (is_last) look();
    if constexpr (Shape::kSplit > 1) await_phase(this->shared.taken(), pieces++ % 2);
    if (Shape::kAdds && piece.parts >= 0 && turn.count > 0) load_sums(piece, turn);
  }

  COMMDSL_FN void await_launch(i32 launch) {
    if (launch <= known) return;
    await_word(this->word(launch), 1, this->args.timeout_ns);
    fence_proxies_of_global();  // what it brought is read by TMA
    known = launch;
  }

  // The next stage, when it is empty.
  COMMDSL_FN u32 begin_fill(u32 bytes) {
    await_phase(this->shared.empty(this->stage), this->parity ^ 1);
    expect(this->shared.full(this->stage), bytes);
    return this->next_stage();
  }

  COMMDSL_FN void load_sums(const Piece& piece, const MatmulTurn& turn) {
    await_launch(turn.sums_there);
    for (u32 column = 0; column < Shape::kStored; column += Shape::kOutElements) {
      for (u32 high = 0; high < Shape::kHigh; ++high) {
        for (u32 at = turn.first; at < turn.first + turn.count; ++at) {
          load_sums(this->stored_column(piece) + Shape::panel_column(column), this->row(piece) + high * 64, at);
        }
      }
    }
  }

  COMMDSL_FN void load_sums(u32 column, u32 row, u32 matrix) {
    const u32 stage = begin_fill(kMultipliers * 64 * Shape::kOutLine);
    for (u32 i = 0; i < kMultipliers; ++i) {
      const u32 to = this->shared.stage(stage) + i * kPanelBytes;
      tensor_load<1>(to, this->args.sums, column, row + i * Shape::kHigh * 64, matrix, this->shared.full(stage));
    }
  }

  COMMDSL_FN void load(const Piece& piece, const MatmulSource& source, u32 depth) {
    const u32 number = begin_fill(Shape::kStageBytes), stage = this->shared.stage(number), mark = this->shared.full(number);
    load_panels<Shape::kADeep, Shape::kRows, 1>(stage, this->args.a[source.rows], this->row(piece), depth, source.rows_at, mark);
    if constexpr (Shape::kCluster == 1) {
      load_half(piece, source, 0, stage, depth, mark);
      load_half(piece, source, 1, stage, depth, mark);
    } else {
      load_half(piece, source, block_of_cluster(), stage, depth, mark);
    }
  }

  // Gated, the second half has the columns that are multiplied with what the activation makes of the first.
  COMMDSL_FN void load_half(const Piece& piece, const MatmulSource& source, u32 half, u32 stage, u32 depth, u32 mark) {
    const u32 column = this->column(piece) + half * (Shape::kGated ? this->args.columns : Shape::kHalf);
    const u32 to = stage + Shape::kABytes + half * Shape::kHalf * kLine;
    load_panels<Shape::kBDeep, Shape::kHalf, Shape::kCluster>(to, this->args.b, column, depth, source.factor_at, mark);
  }

  // A line has 64 elements of one row, `deep`, or of 64 rows at one depth, and then a panel has 64 depths of them.
  template <bool deep, u32 rows, u32 cluster>
  COMMDSL_FN static void load_panels(u32 to, const TensorMap& map, u32 row, u32 depth, u32 matrix, u32 mark) {
    if constexpr (deep) {
      tensor_load<cluster>(to, map, depth, row, matrix, mark);
    } else {
#pragma unroll
      for (u32 at = 0; at < rows; at += 64) tensor_load<cluster>(to + at * kLine, map, row + at, depth, matrix, mark);
    }
  }
};

// --- multiplying -----------------------------------------------------------------------------------------------------------

// Operands as wgmma finds them: 8 lines of 128 bytes are a unit; the next 8 lie 1024 bytes on. Where a line is not deep, the next 64
// rows lie a panel on.
template <bool deep>
COMMDSL_FN u64 operand(u32 at) {
  constexpr u64 swizzled = u64{1} << 62, next_lines = u64{1024 / 16} << 32, next_panel = u64{deep ? 1 : kPanelBytes / 16} << 16;
  return swizzled | next_lines | next_panel | (at & 0x3ffff) / 16;
}
template <bool deep>
constexpr u64 kNextPart = deep ? kPart / 16 : 2 * 1024 / 16;  // from what one instruction multiplies to the next

// The matrix that a tile's rows are copied to, -1 for none, and where in it.
template <bool copies>
struct Copied {};
template <>
struct Copied<true> {
  i32 copied_at = -1;
  u32 copied_row, copied_depth;
};

template <class Shape>
struct Multiplier : Worker<Shape>, Copied<Shape::kCopies> {
  using Result = typename Shape::Result;
  const u32 number = threadIdx.x / kWarpgroup - 1, thread = threadIdx.x % kWarpgroup;
  u32 stores = 0, tiles = 0;  // `tiles`: made, and not told of
  float scale = 1;
  float sum[Shape::kHigh][Shape::kSums];
  // What is made of a tile, of which so many panels are not stored yet, and where it goes. `ends`: nothing comes behind, so it is stored
  // at once.
  u32 held[Shape::kHeld][Shape::kWords], unstored = 0, to_row, to_column;
  u16 to, to_matrix;
  bool ends = false;

  using Worker<Shape>::Worker;

  COMMDSL_FN void run() {
    await_launch_before();
    if constexpr (Shape::kFloat8) scale = of_matrix(0) * of_matrix(1);
    u16 turn = 0;
    for (u32 n = 0;; ++n) {
      const Taken taken = this->taken(n);
      if (n > 0 && taken.piece[0].turn != turn) tell(turn);
      if (taken.is_end()) break;
      turn = taken.piece[0].turn;
      ends = !this->is_awaited() && blockIdx.x / Shape::kBlocks + (n + 1) * this->workers() >= this->args.entries;
      const u32 count = taken.piece[1].last > 0 ? 2 : 1;
#pragma unroll 1
      for (u32 at = 0; at < count; ++at) make(this->piece(n, at), interval(taken, at));
      if (thread == 0) this->heard(n);  // the others have met it since
    }
    if (thread == 0) await_reads<0>();  // the stores read this block's shared memory
  }

 private:
  u32 pieces = 0;

  COMMDSL_FN void make(const Piece& piece, u64 interval) {
    const MatmulTurn turn = this->turn(piece.turn);
    Stamps stamps(this->args, interval, 0, threadIdx.x == kWarpgroup);  // of one of two that work side by side
    stamps.begin();
    if constexpr (Shape::kCopies) {
      this->copied_at = thread == copier() && piece.column == 0 ? turn.copied_at : -1;
      this->copied_row = this->row(piece) + number * Shape::kHigh * 64, this->copied_depth = this->first(piece) * Shape::kDepth;
    }
    multiply(this->last(piece) - this->first(piece), stamps);
    if constexpr (Shape::kSplit > 1) gather(pieces++ % 2);
    if (piece.parts < 0) {
      leave(piece.slot);
    } else {
      for (i32 part = 0; part < piece.parts; ++part) add(piece.slot + part);
      stamps.end();
      stamps.begin();
      store(turn, this->row(piece) + number * Shape::kHigh * 64, this->stored_column(piece), stamps);
      ++tiles;
    }
    stamps.end();
  }

  // The first of two of a piece: its product, with what is left to store of the one before, and what is added and rounded, or stored.
  COMMDSL_FN static u64 interval(const Taken& taken, u32 at) {
    return ((u64{taken.entry()} * kTaken + at) * Shape::kBlocks + block_of_cluster()) * 2;
  }

  COMMDSL_FN void meet() const { warpgroup_barrier(number + 1); }

  COMMDSL_FN float of_matrix(u32 factor) const {
    u32 bits;
    load(bits, reinterpret_cast<const char*>(this->args.scales[factor]));
    return float_of_bits(bits);
  }

  COMMDSL_FN void multiply(u32 steps, Stamps& stamps) {
    if constexpr (Stamps::are_written()) {  // not in the loops, which are to stay as they are
      await_phase(this->shared.full(this->stage), this->parity);
      stamps.ready();
    }
    if constexpr (Shape::kFloat8) {
      multiply_by_stage(steps);
    } else {
      multiply_through(steps);
    }
  }

  // Stores what is left of the tile before in between; loops of their own, as the one without has less to do.
  COMMDSL_FN void multiply_through(u32 steps) {
    settle(sum);
    u32 before = 0, step = 0;
    if constexpr (Shape::kStoresLate) {
      for (; step < steps && unstored > 0; store_next()) before = go_on(step++, before);
      while (unstored > 0) store_next();
      drop_held();
    }
    for (; step < steps; ++step) before = go_on(step, before);
    await_products<0>();
    if constexpr (Shape::kCopies) await_copies<0>();
    release(before);
    settle(sum);
  }

  // The products of one stage run while those of the next are begun.
  COMMDSL_FN u32 go_on(u32 step, u32 before) {
    const u32 stage = begin_stage(sum, step > 0);
    await_products<1>();
    if (step > 0) {
      if constexpr (Shape::kCopies) await_copies<1>();
      release(before);
    }
    return stage;
  }

  // While one multiplier adds the sums of a stage up, the other's products run.
  COMMDSL_FN void multiply_by_stage(u32 steps) {
    float some[Shape::kHigh][Shape::kSums] = {};
#pragma unroll
    for (u32 i = 0; i < Shape::kSums; ++i) sum[0][i] = 0;
    for (u32 step = 0; step < steps; ++step) {
      settle(some);
      const u32 stage = begin_stage(some, false);
      await_products<0>();
      settle(some);
      if constexpr (Shape::kCopies) await_copies<0>();
      release(stage);
#pragma unroll
      for (u32 i = 0; i < Shape::kSums; ++i) sum[0][i] += some[0][i];
    }
  }

  // `adds`: to what is there.
  COMMDSL_FN u32 begin_stage(float (&to)[Shape::kHigh][Shape::kSums], bool adds) {
    await_phase(this->shared.full(this->stage), this->parity);
    const u32 stage = this->shared.stage(this->stage);
    u64 a = operand<Shape::kADeep>(stage + number * Shape::kHigh * kPanelBytes), b = operand<Shape::kBDeep>(stage + Shape::kABytes);
    begin_products();
#pragma unroll
    for (u32 part = 0; part < kLine / kPart; ++part) {
#pragma unroll
      for (u32 high = 0; high < Shape::kHigh; ++high) {
        Shape::multiply(typename Shape::Element{}, to[high], a + high * kPanelBytes / 16, b, adds || part > 0);
      }
      a += kNextPart<Shape::kADeep>, b += kNextPart<Shape::kBDeep>;
    }
    commit_products();
    if constexpr (Shape::kCopies) copy(stage);
    return this->next_stage();
  }

  // Who tells the loader of its own block that a stage is empty.
  COMMDSL_FN static u32 copier() { return Shape::kCluster == 1 ? 0 : block_of_cluster(); }

  // Of the thread's own bulk stores these are the last.
  COMMDSL_FN void copy(u32 stage) {
    if (this->copied_at < 0) return;
#pragma unroll
    for (u32 high = 0; high < Shape::kHigh; ++high) {
      const u32 from = stage + (number * Shape::kHigh + high) * kPanelBytes;
      tensor_store(this->args.copied, this->copied_depth, this->copied_row + high * 64, this->copied_at, from);
    }
    commit_group();
    this->copied_depth += Shape::kDepth;
  }

  // Those of all stages that were begun, but so many.
  template <u32 left>
  COMMDSL_FN void await_copies() const {
    if (this->copied_at >= 0) await_reads<left>();
  }

  COMMDSL_FN void release(u32 stage) const {
    if (thread < Shape::kCluster) arrive<Shape::kCluster>(this->shared.empty(stage), thread);
  }

  // --- sums of the blocks of a cluster, in the order of the depth

  COMMDSL_FN void gather(u32 parity) {
    tell_cluster(this->shared.multiplied());
    await_phase_of_cluster(this->shared.multiplied(), parity);
#pragma unroll
    for (u32 to = 0; to < Shape::kSplit; ++to) {
      const u32 there = of_block(this->shared.sums(this->share(), number), to) + thread * 16;
#pragma unroll
      for (u32 i = 0; i < Shape::kShare; i += 4) store_to_cluster(there + i / 4 * kWarpgroup * 16, sum[0] + to * Shape::kShare + i);
    }
    tell_cluster(this->shared.gathered(number));
    await_phase_of_cluster(this->shared.gathered(number), parity);
#pragma unroll
    for (u32 from = 0; from < Shape::kSplit; ++from) {
      const u32 here = this->shared.sums(from, number) + thread * 16;
#pragma unroll
      for (u32 i = 0; i < Shape::kShare; i += 4) {
        Vector16 word;
        load_shared(word, here + i / 4 * kWarpgroup * 16);
        float more[4];
        memcpy(more, &word, sizeof word);
#pragma unroll
        for (u32 e = 0; e < 4; ++e) sum[0][i + e] = from == 0 ? more[e] : sum[0][i + e] + more[e];
      }
    }
    fence_proxies_of_shared();  // what is loaded next is written by TMA
    meet();
    if (thread == 0) arrive<1>(this->shared.taken(), 0);
  }

  // What the multiplier has read and written comes before.
  COMMDSL_FN void tell_cluster(u32 mark) const {
    meet();
    if (thread < Shape::kSplit) arrive_at_cluster(mark, thread);
  }

  // --- sums of several blocks

  COMMDSL_FN u32 left(i32 slot) const {
    return (static_cast<u32>(slot) * Shape::kCluster + block_of_cluster()) * kMultipliers + number;
  }
  COMMDSL_FN char* partial(i32 slot) const {
    return reinterpret_cast<char*>(this->args.partials) + (u64{left(slot)} * Shape::kHigh * Shape::kSums / 4 * kWarpgroup + thread) * 16;
  }
  COMMDSL_FN u64* flag(i32 slot) const { return reinterpret_cast<u64*>(this->args.flags) + left(slot); }

  COMMDSL_FN void leave(i32 slot) {
    char* to = partial(slot);
#pragma unroll
    for (u32 i = 0; i < Shape::kHigh * Shape::kSums; i += 4) {
      Vector16 word;
      memcpy(&word, sum[i / Shape::kSums] + i % Shape::kSums, sizeof word);
      commdsl::store(to + i / 4 * kWarpgroup * 16, word);
    }
    meet();
    if (thread == 0) store_release_own(flag(slot), 1);
  }

  COMMDSL_FN void add(i32 slot) {
    if (thread == 0) {
      await_word(flag(slot), 1, this->args.timeout_ns);
      store_relaxed(flag(slot), 0);  // for the next call
    }
    meet();
    const char* from = partial(slot);
#pragma unroll
    for (u32 i = 0; i < Shape::kHigh * Shape::kSums; i += 4) {
      Vector16 word;
      commdsl::load(word, from + i / 4 * kWarpgroup * 16);
      float more[4];
      memcpy(more, &word, sizeof word);
#pragma unroll
      for (u32 e = 0; e < 4; ++e) sum[i / Shape::kSums][i % Shape::kSums + e] += more[e];
    }
  }

  // --- what moves beside

  // Once a turn, as it takes a while until stores are there.
  COMMDSL_FN void tell(u32 number) {
    while (unstored > 0) store_next();
    const i32 stored = this->turn(number).stored;
    if (thread == 0 && tiles > 0 && stored >= 0) {
      await_writes();
      fence_proxies_of_global();
      add_release(this->word(stored), tiles);
    }
    tiles = 0;
  }

  // --- what becomes of a sum. Of every 8 columns a thread has two, in two rows 8 apart.

  COMMDSL_FN u32 own_row(u32 i) const { return thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8; }
  COMMDSL_FN u32 own_column(u32 i) const { return i / 4 * 8 + thread % 4 * 2; }

  COMMDSL_FN void store(const MatmulTurn& turn, u32 row, u32 column, Stamps& stamps) {
    to = turn.result, to_matrix = turn.result_at, to_row = row, to_column = column;
#pragma unroll
    for (u32 panel = 0; panel < Shape::kMade; ++panel) {
      make_panel(held[panel % Shape::kHeld], panel, turn.count, stamps);
      if (!Shape::kStoresLate || ends) store_panel(panel, held[panel % Shape::kHeld]);
    }
    if (!Shape::kStoresLate || ends) return;
    unstored = Shape::kMade;
    meet();  // all have read what was taken
  }

  // The next panel comes to the place of the one that is stored: registers have no index.
  COMMDSL_FN void store_next() {
    store_panel(Shape::kHeld - unstored, held[0]);
    --unstored;
#pragma unroll
    for (u32 i = Shape::kWords; i < Shape::kHeld * Shape::kWords; ++i) {
      held[i / Shape::kWords - 1][i % Shape::kWords] = held[i / Shape::kWords][i % Shape::kWords];
    }
  }

  // Nothing is lost when all is stored, and registers are free.
  COMMDSL_FN void drop_held() {
#pragma unroll
    for (u32 i = 0; i < Shape::kHeld * Shape::kWords; ++i) held[i / Shape::kWords][i % Shape::kWords] = 0;
  }

  // Those of the same columns, one below the other, come one after the other.
  COMMDSL_FN static u32 first_of(u32 panel) { return Shape::panel_column(panel / Shape::kHigh * Shape::kOutElements); }

  COMMDSL_FN void make_panel(u32 (&word)[Shape::kWords], u32 panel, u32 matrices, Stamps& stamps) {
    constexpr u32 sums = Shape::kOutElements / 2;  // of a thread, in a panel
    float value[sums];
#pragma unroll
    for (u32 i = 0; i < sums; i += 2) activate(sum[panel % Shape::kHigh], first_of(panel) / 2 + i, to_column, value + i);
    if constexpr (Shape::kAdds) add_sums(matrices, value, stamps);
#pragma unroll
    for (u32 i = 0; i < Shape::kWords; ++i) {
      if constexpr (Shape::kOutBytes == 2) {
        word[i] = Result::narrow_pair(value[2 * i], value[2 * i + 1]);
      } else {
        word[i] = bits_of_float(value[i]);
      }
    }
  }

  COMMDSL_FN void store_panel(u32 panel, const u32 (&word)[Shape::kWords]) {
    const u32 from = this->shared.panel(number, stores++);
    if (thread == 0) await_reads<Shape::kPanels - 1>();
    meet();
    put(from, word);
    fence_proxies_of_shared();
    meet();
    if (thread == 0) {
      tensor_store(this->args.c[to], to_column + first_of(panel), to_row + panel % Shape::kHigh * 64, to_matrix, from);
      commit_group();
    }
  }

  COMMDSL_FN void activate(const float (&sum)[Shape::kSums], u32 i, u32 column, float* value) const {
    const u32 c = column + own_column(i);
    value[0] = sum[i] * scale, value[1] = sum[i + 1] * scale;
    const bool inside = c < this->args.columns;
    if (Shape::kBias && inside) add_bias(value, c);
    if constexpr (Shape::kGated) {
      float up[2] = {sum[i + Shape::kSums / 2] * scale, sum[i + Shape::kSums / 2 + 1] * scale};
      if (Shape::kBias && inside) add_bias(up, this->args.columns + c);
      for (u32 e = 0; e < 2; ++e) value[e] = value[e] / (1.0f + expf(-value[e])) * up[e];
    }
    if constexpr (Shape::kGelu) {
      for (u32 e = 0; e < 2; ++e) value[e] = 0.5f * value[e] * (1.0f + erff(value[e] * 0.70710678f));
    }
  }

  COMMDSL_FN void add_bias(float* value, u32 column) const {
    u32 word;
    load(word, reinterpret_cast<const char*>(this->args.bias) + 2 * u64{column});
    add_pair(value, word);
  }

  template <u32 sums>
  COMMDSL_FN void add_sums(u32 matrices, float (&value)[sums], Stamps& stamps) {
    for (u32 at = 0; at < matrices; ++at) {
      await_phase(this->shared.full(this->stage), this->parity);
      stamps.ready();
      const u32 lines = this->shared.stage(this->stage) + number * kPanelBytes;
#pragma unroll
      for (u32 i = 0; i < sums; i += 8) {
        u32 word[4];
        load_matrices(word, lines + own_matrices(i));
#pragma unroll
        for (u32 w = 0; w < 4; ++w) add_pair(value + i + 2 * w, word[w]);
      }
      meet();  // all have read
      release(this->next_stage());
    }
  }

  COMMDSL_FN static void add_pair(float* value, u32 word) {
    value[0] += Result::widen(static_cast<u16>(word));
    value[1] += Result::widen(static_cast<u16>(word >> 16));
  }

  // Where the 16 bytes at place p of a line of C lie: swizzled, of all lines in the same 1024 bytes each at another place.
  COMMDSL_FN static u32 swizzled(u32 line, u32 place) {
    constexpr u32 places = Shape::kOutLine / 16, lines = kLine / Shape::kOutLine;  // of a line; of 128 bytes
    return line * Shape::kOutLine + (place ^ line / lines % places) * 16;
  }

  // Of 16 bits: where a thread points at what its warp has from sum i on.
  COMMDSL_FN u32 own_matrices(u32 i) const { return swizzled(thread / 32 * 16 + thread % 16, thread % 32 / 16 + i / 4); }

  COMMDSL_FN void put(u32 panel, const u32 (&word)[Shape::kWords]) const {
    if constexpr (Shape::kOutBytes == 2) {
#pragma unroll
      for (u32 i = 0; i < Shape::kWords; i += 4) {
        store_matrices(panel + own_matrices(2 * i), {word[i], word[i + 1], word[i + 2], word[i + 3]});
      }
    } else {
#pragma unroll
      for (u32 i = 0; i < Shape::kWords; i += 2) {
        const u32 at = own_column(i) * 4;
        store_shared(panel + swizzled(own_row(i), at / 16) + at % 16, float_of_bits(word[i]), float_of_bits(word[i + 1]));
      }
    }
  }
};

// --- a block ---------------------------------------------------------------------------------------------------------------

template <class Plan>
COMMDSL_FN void matmul(const MatmulArgs& args) {
  using Shape = MatmulShape<Plan>;
  // Who comes behind takes SMs as they become free; what moves beside a launch may need those that it leaves.
  if (!args.words) allow_launch_behind();
  Loader<Shape> loader(args);
  if (threadIdx.x == 0) {
    loader.begin();
    MatmulShared<Shape>().start();
  }
  cluster_barrier<Shape::kBlocks>();
  if (threadIdx.x < kWarpgroup) {
    drop_registers<40>();
    if (threadIdx.x == 0) loader.run();
  } else {
    claim_registers<232>();
    Multiplier<Shape>(args).run();
  }
  if (Shape::kBlocks > 1) cluster_barrier<Shape::kBlocks>();  // what one block sends to another finds it there
}

}  // namespace commdsl
