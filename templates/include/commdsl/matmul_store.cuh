// What becomes of a multiplier's sums: bias, an activation, what is added to them; rounded, and stored by TMA, panel by panel. Of the
// widest tiles they are stored while it multiplies for the next: `store_next`. Assumes sums of all of the depth. Of every 8 columns a
// thread has two, in two rows 8 apart.
#pragma once

#include "commdsl/matmul_sums.cuh"
#include "commdsl/stamps.cuh"

namespace commdsl {

// What a multiplier knows of where a task's result goes besides, and which peers are ready.
template <bool pushes>
struct Pushing {};
template <>
struct Pushing<true> {
  u16 push, pushes;
  i16 pushes_when;
  i32 ready = -1;  // the word that said so last; kNever: one was waited for in vain
  static constexpr i32 kNever = 0x7fffffff;
};

// The bias of a tile's task; 0: it has none.
template <bool has>
struct Biased {};
template <>
struct Biased<true> {
  u64 bias = 0;
};

// What is made of the sums of a tile's task, where tasks differ.
template <bool is_mixed>
struct Activated {};
template <>
struct Activated<true> {
  u16 activation = 0;
};

template <class Shape>
struct Storer : TileSums<Shape>, Pushing<Shape::kPushes>, Biased<Shape::kBias>, Activated<Shape::kMixed> {
  using Result = typename Shape::Result;
  using TileSums<Shape>::number, TileSums<Shape>::thread, TileSums<Shape>::sum, TileSums<Shape>::meet, TileSums<Shape>::release;
  u32 stores = 0, tiles = 0;  // `tiles`: made, and not told of
  float scale = 1;
  // What is made of a tile, of which so many panels are not stored yet, and where it goes. `ends`: nothing comes behind, so it is stored
  // at once.
  u32 held[Shape::kHeld][Shape::kWords], unstored = 0, made = Shape::kMade, to_row, to_column, columns;
  MatmulPlace to;
  bool ends = false;

  using TileSums<Shape>::TileSums;

  COMMDSL_FN void read_scales() { scale = of_matrix(0) * of_matrix(1); }

  // What moves beside is told once a turn, as it takes a while until stores are there.
  COMMDSL_FN void tell(u32 number) {
    while (unstored > 0) store_next();
    const i32 stored = this->task(number).stored;
    if (thread == 0 && tiles > 0 && stored >= 0) {
      await_writes();
      fence_proxies_of_global();
      add_release(this->word(stored), tiles);
    }
    tiles = 0;
  }

  COMMDSL_FN void store(const MatmulTask& task, u32 row, u32 column, Stamps& stamps) {
    if constexpr (Shape::kPushes) this->push = task.push, this->pushes = task.pushes, this->pushes_when = task.ready;
    if constexpr (Shape::kBias) this->bias = bias_row(task);
    if constexpr (Shape::kMixed) {
      this->activation = task.activation;
      made = Shape::kMade / (task.activation == kSwiglu ? 2 : 1);
    }
    const u32 matrices = task.count;  // that are added
    columns = task.columns, to = task.result, to_row = row, to_column = column;
#pragma unroll
    for (u32 panel = 0; panel < Shape::kMade; ++panel) {
      if (Shape::kMixed && panel >= made) break;
      make_panel(held[panel % Shape::kHeld], panel, matrices, stamps);
      if (!Shape::kStoresLate || ends) store_panel(panel, held[panel % Shape::kHeld]);
    }
    if (Shape::kStoresLate && !ends) {
      unstored = made;
      meet();  // all have read what was taken
    }
    ++tiles;
  }

  // The next panel comes to the place of the one that is stored: registers have no index.
  COMMDSL_FN void store_next() {
    store_panel((Shape::kMixed ? made : Shape::kHeld) - unstored, held[0]);
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

 private:
  COMMDSL_FN float of_matrix(u32 factor) const {
    u32 bits;
    load(bits, reinterpret_cast<const char*>(this->args.scales[factor]));
    return float_of_bits(bits);
  }

  COMMDSL_FN u32 own_row(u32 i) const { return thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8; }
  COMMDSL_FN u32 own_column(u32 i) const { return i / 4 * 8 + thread % 4 * 2; }

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
      if (!Shape::kPushes || to.map != kNowhere) {
        tensor_store(this->template map<Shape::kResultMap>(to.map), to_column + first_of(panel), to_row + panel % Shape::kHigh * 64, to.at, from);
      }
      if constexpr (Shape::kPushes) store_to_peers(to_column + first_of(panel), to_row + panel % Shape::kHigh * 64, from);
      commit_group();
    }
  }

  // When they are ready. Nothing more where one of them did not come in time: it may be reading there what came before.
  COMMDSL_FN void store_to_peers(u32 column, u32 row, u32 from) {
    if (this->pushes_when >= 0 && this->pushes_when != this->ready && this->ready != this->kNever) {
      const u64 found = await_word(this->word(this->pushes_when), kThere, this->args.timeout_ns);
      fence_proxies_of_global();
      this->ready = found == kInVain ? this->kNever : this->pushes_when;
    }
    if (this->ready == this->kNever) return;
    for (u32 at = this->push; at < u32{this->push} + this->pushes; ++at) {
      const MatmulPlace place = this->place(at);
      tensor_store(this->args.maps[place.map], column, row, place.at, from);
    }
  }

  COMMDSL_FN bool is(u16 wanted, bool always) const {
    if constexpr (Shape::kMixed) return this->activation == wanted;
    return always;
  }

  COMMDSL_FN void activate(const float (&sum)[Shape::kSums], u32 i, u32 column, float* value) const {
    const u32 c = column + own_column(i);
    value[0] = sum[i] * scale, value[1] = sum[i + 1] * scale;
    const bool inside = c < columns;
    if constexpr (Shape::kBias) add_bias(value, c, inside);
    if ((Shape::kGated || Shape::kMixed) && i + Shape::kSums / 2 < Shape::kSums && is(kSwiglu, true)) {
      const u32 second = (i + Shape::kSums / 2) % Shape::kSums;
      float up[2] = {sum[second] * scale, sum[second + 1] * scale};
      if constexpr (Shape::kBias) add_bias(up, columns + c, inside);
      for (u32 e = 0; e < 2; ++e) value[e] = value[e] / (1.0f + expf(-value[e])) * up[e];
    }
    if ((Shape::kGelu || Shape::kMixed) && is(kGelu, true)) {
      for (u32 e = 0; e < 2; ++e) value[e] = 0.5f * value[e] * (1.0f + erff(value[e] * 0.70710678f));
    }
  }

  COMMDSL_FN void add_bias(float* value, u32 column, bool inside) const {
    if (!inside || !this->bias) return;
    u32 word;
    load(word, reinterpret_cast<const char*>(this->bias) + 2 * u64{column});
    add_pair(value, word);
  }

  COMMDSL_FN u64 bias_row(const MatmulTask& task) const {
    const bool is_gated = Shape::kMixed ? task.activation == kSwiglu : Shape::kGated;
    return task.bias == kNowhere ? 0 : this->args.bias[task.bias] + u64{task.bias_row} * task.columns * (is_gated ? 4 : 2);
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

}  // namespace commdsl
