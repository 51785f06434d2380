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
// A launch makes several *tasks*: matrices from here or there, of sizes of their own, to here or there. What a task waits for is in its
// table: words of the call, each with a number that it has to come to. Launches beside raise such words, and tasks do, by the tiles that
// they have stored. A task may be a sum of products, *sources*: the depth of its tiles is that of one behind that of the other, and each
// is waited for by itself.
//
// What a task makes may go to peers, too, or to them alone: it is stored there by TMA as it is here, and counted when all of it has come.
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
// `matmul_worker.cuh` has what a launch is told and what a block shares, `matmul_load.cuh` the thread that loads, `matmul_sums.cuh` and
// `matmul_store.cuh` what becomes of the sums that are made here.
#pragma once

#include "commdsl/matmul_load.cuh"
#include "commdsl/matmul_store.cuh"

namespace commdsl {

// Operands as wgmma finds them: 8 lines of 128 bytes are a unit; the next 8 lie 1024 bytes on. Where a line is not deep, the next 64
// rows lie a panel on.
template <bool deep>
COMMDSL_FN u64 operand(u32 at) {
  constexpr u64 swizzled = u64{1} << 62, next_lines = u64{1024 / 16} << 32, next_panel = u64{deep ? 1 : kPanelBytes / 16} << 16;
  return swizzled | next_lines | next_panel | (at & 0x3ffff) / 16;
}
template <bool deep>
constexpr u64 kNextPart = deep ? kPart / 16 : 2 * 1024 / 16;  // from what one instruction multiplies to the next

// Where a tile's rows are copied to, kNowhere for none, and where in that matrix.
template <bool copies>
struct Copied {};
template <>
struct Copied<true> {
  MatmulPlace copied_to = {kNowhere, 0};
  u32 copied_row, copied_depth;
};

template <class Shape>
struct Multiplier : Storer<Shape>, Copied<Shape::kCopies> {
  using Base = Storer<Shape>;
  using Base::number, Base::thread, Base::sum, Base::release, Base::unstored, Base::store_next;

  using Base::Base;

  COMMDSL_FN void run() {
    await_launch_before();
    if constexpr (Shape::kFloat8) this->read_scales();
    u16 turn = 0;
    for (u32 n = 0;; ++n) {
      const Taken taken = this->taken(n);
      if (n > 0 && taken.piece[0].turn != turn) this->tell(turn);
      if (taken.is_end()) break;
      turn = taken.piece[0].turn;
      this->ends = !this->is_awaited() && blockIdx.x / Shape::kBlocks + (n + 1) * this->workers() >= this->args.entries;
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
    const MatmulTask task = this->task(piece.turn);  // read before the product, not behind it
    Stamps stamps(this->args, interval, 0, threadIdx.x == kWarpgroup);  // of one of two that work side by side
    stamps.begin();
    if constexpr (Shape::kCopies) {
      this->copied_to = thread == copier() && piece.column == 0 ? task.copy : MatmulPlace{kNowhere, 0};
      this->copied_row = this->row(piece) + number * Shape::kHigh * 64, this->copied_depth = this->first(piece) * Shape::kDepth;
    }
    multiply(this->last(piece) - this->first(piece), stamps);
    if constexpr (Shape::kSplit > 1) this->gather(pieces++ % 2);
    if (piece.parts < 0) {
      this->leave(piece.slot);
    } else {
      for (i32 part = 0; part < piece.parts; ++part) this->add(piece.slot + part);
      stamps.end();
      stamps.begin();
      this->store(task, this->row(piece) + number * Shape::kHigh * 64, this->stored_column(piece), stamps);
    }
    stamps.end();
  }

  // The first of two of a piece: its product, with what is left to store of the one before, and what is added and rounded, or stored.
  COMMDSL_FN static u64 interval(const Taken& taken, u32 at) {
    return ((u64{taken.entry()} * kTaken + at) * Shape::kBlocks + block_of_cluster()) * 2;
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
      this->drop_held();
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
    if (this->copied_to.map == kNowhere) return;
#pragma unroll
    for (u32 high = 0; high < Shape::kHigh; ++high) {
      const u32 from = stage + (number * Shape::kHigh + high) * kPanelBytes;
      tensor_store(this->args.maps[this->copied_to.map], this->copied_depth, this->copied_row + high * 64, this->copied_to.at, from);
    }
    commit_group();
    this->copied_depth += Shape::kDepth;
  }

  // Those of all stages that were begun, but so many.
  template <u32 left>
  COMMDSL_FN void await_copies() const {
    if (this->copied_to.map != kNowhere) await_reads<left>();
  }
};

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
