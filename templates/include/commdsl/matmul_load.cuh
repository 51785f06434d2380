// The thread of a block that loads: it takes pieces for the worker, waits for what their rows come from, and fills stages by TMA.
// Assumes that the multipliers of all blocks that a stage goes to say when it is empty. Decides no order: the table has it.
#pragma once

#include "commdsl/matmul_worker.cuh"

namespace commdsl {

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
  u32 known = 0;  // by where they begin, the waits that are over

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
    const MatmulTask& task = this->task(piece.turn);
    const u32 first = this->first(piece), last = this->last(piece), late = last - least(Shape::kStages, last - first), steps = task.steps;
    u32 number = task.source + first / steps, depth = first % steps;
    MatmulSource source = this->source(number);
    await(source.wait, source.waits);
    for (u32 step = first; step < last; ++step, ++depth) {
      if (is_last && step == late) take();
      if (depth == steps) {
        depth = 0;
        source = this->source(++number);
        await(source.wait, source.waits);
      }
      load(piece, source, depth * Shape::kDepth, task.columns);
    }
    if (is_last) look();
    if constexpr (Shape::kSplit > 1) await_phase(this->shared.taken(), pieces++ % 2);
    if (Shape::kAdds && piece.parts >= 0 && task.count > 0) load_sums(piece, task);
  }

  // The words of a source, or of what is added: what they tell of is read by TMA. They come once a call, so the first ones of the table
  // are not asked for again.
  COMMDSL_FN void await(u32 first, u32 count) {
    if (count == 0 || (first < 32 && (known >> first & 1) != 0)) return;
    for (u32 at = first; at < first + count; ++at) {
      const MatmulWait wait = reinterpret_cast<const MatmulWait*>(this->args.waits)[at];
      await_word(this->word(wait.word), wait.level, this->args.timeout_ns);
    }
    fence_proxies_of_global();
    if (first < 32) known |= 1u << first;
  }

  // The next stage, when it is empty.
  COMMDSL_FN u32 begin_fill(u32 bytes) {
    await_phase(this->shared.empty(this->stage), this->parity ^ 1);
    expect(this->shared.full(this->stage), bytes);
    return this->next_stage();
  }

  COMMDSL_FN void load_sums(const Piece& piece, const MatmulTask& task) {
    await(task.wait, task.waits);
    const u32 stored = Shape::kMixed && this->is_gated(piece.turn) ? Shape::kHalf : Shape::kStored;
    for (u32 column = 0; column < stored; column += Shape::kOutElements) {
      for (u32 high = 0; high < Shape::kHigh; ++high) {
        for (u32 at = task.added; at < u32{task.added} + task.count; ++at) {
          const MatmulPlace place = this->place(at);
          load_sum(this->args.maps[place.map], this->stored_column(piece) + Shape::panel_column(column), this->row(piece) + high * 64, place.at);
        }
      }
    }
  }

  COMMDSL_FN void load_sum(const TensorMap& map, u32 column, u32 row, u32 matrix) {
    const u32 stage = begin_fill(kMultipliers * 64 * Shape::kOutLine);
    for (u32 i = 0; i < kMultipliers; ++i) {
      const u32 to = this->shared.stage(stage) + i * kPanelBytes;
      tensor_load<1>(to, map, column, row + i * Shape::kHigh * 64, matrix, this->shared.full(stage));
    }
  }

  COMMDSL_FN void load(const Piece& piece, const MatmulSource& source, u32 depth, u32 columns) {
    const u32 number = begin_fill(Shape::kStageBytes), stage = this->shared.stage(number), mark = this->shared.full(number);
    load_panels<Shape::kADeep, Shape::kRows, 1>(stage, this->template map<Shape::kRowsMap>(source.rows.map), this->row(piece), depth, source.rows.at, mark);
    if constexpr (Shape::kWholeFactor) {
      const TensorMap& factor = this->template map<Shape::kFactorMap>(source.factor.map);
      tensor_load<1>(stage + Shape::kABytes, factor, depth, this->column(piece), source.factor.at, mark);
    } else if constexpr (Shape::kCluster == 1) {
      load_half(piece, source, 0, stage, depth, mark, columns);
      load_half(piece, source, 1, stage, depth, mark, columns);
    } else {
      load_half(piece, source, block_of_cluster(), stage, depth, mark, columns);
    }
  }

  // Gated, the second half has the columns that are multiplied with what the activation makes of the first.
  COMMDSL_FN void load_half(const Piece& piece, const MatmulSource& source, u32 half, u32 stage, u32 depth, u32 mark, u32 columns) {
    const u32 column = this->column(piece) + half * (this->is_gated(piece.turn) ? columns : Shape::kHalf);
    const u32 to = stage + Shape::kABytes + half * Shape::kHalf * kLine;
    load_panels<Shape::kBDeep, Shape::kHalf, Shape::kCluster>(to, this->template map<Shape::kFactorMap>(source.factor.map), column, depth, source.factor.at, mark);
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

}  // namespace commdsl
