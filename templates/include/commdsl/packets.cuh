// Operations whose data carries its flag, on the GPU: every thread fetches, combines and sends words of its own, in order.
// Assumes lane.cuh. Knows no operation but COPY and REDUCE, and decides nothing.
//
// A word is 8 bytes of data and twice the round's number, stored as two 8-byte halves of data and number: PTX promises that each
// half arrives whole. A line is 120 bytes of data and the round's number, stored by eight neighbouring threads at once: seven
// bring a 16-byte vector each, the last 8 bytes and the number. That it arrives whole is what NVLink does with a warp's store
// to one 128-byte line (NCCL's LL128 rests on the same), not what PTX promises. Two lines are fifteen vectors, the eighth of
// them cut in two, so that every vector is aligned as its tensor is. All threads of a lane move the words of the same places in
// every operation.
#pragma once

namespace commdsl {

// Two 8-byte halves of a word, or a vector of a line.
struct Raw {
  u64 low, high;
};

COMMDSL_FN void load_raw(Raw& raw, const char* at) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(raw.low), "=l"(raw.high) : "l"(at) : "memory");
}

COMMDSL_FN void store_raw(char* at, const Raw& raw) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(raw.low), "l"(raw.high) : "memory");
}

// Words of a tensor that are not whole, or not aligned.
template <class Word>
COMMDSL_CALL Word load_part(const char* at, u64 bytes) {
  u8 part[sizeof(Word)];
  for (u32 i = 0; i < sizeof(Word); ++i) {
    part[i] = 0;
    if (i < bytes) load(part[i], at + i);
  }
  Word word;
  memcpy(&word, part, sizeof(Word));
  return word;
}

template <class Word>
COMMDSL_CALL void store_part(char* at, Word word, u64 bytes) {
  u8 part[sizeof(Word)];
  memcpy(part, &word, sizeof(Word));
  for (u32 i = 0; i < sizeof(Word); ++i) {
    if (i < bytes) store(at + i, part[i]);
  }
}

template <class Word>
COMMDSL_FN bool is_whole(u64 address, u64 at, u64 bytes) {
  return at + sizeof(Word) <= bytes && (address & (sizeof(Word) - 1)) == 0;
}

// The thread's word of `tensor`, of which `bytes` bytes are the lane's; nothing past them is touched.
template <class Word>
COMMDSL_FN Word load_word(const char* tensor, u64 at, u64 bytes) {
  if (is_whole<Word>(reinterpret_cast<u64>(tensor), at, bytes)) {
    Word word;
    load(word, tensor + at);
    return word;
  }
  return load_part<Word>(tensor + at, at < bytes ? bytes - at : 0);
}

template <class Word>
COMMDSL_FN void store_word(char* tensor, u64 at, u64 bytes, const Word& word) {
  if (is_whole<Word>(reinterpret_cast<u64>(tensor), at, bytes)) return store(tensor + at, word);
  if (at < bytes) store_part<Word>(tensor + at, word, bytes - at);
}

// What a wire says of one thread: which places of a cell are its own, what they hold, whether it has arrived.
template <class Wire>
struct Way;

template <>
struct Way<Packet> {
  using Word = u64;
  static constexpr u32 kStride = COMMDSL_THREADS;
  static COMMDSL_FN u32 first() { return thread(); }
  static COMMDSL_FN bool goes_on(u32 base, u32 count) { return base < count; }
  static COMMDSL_FN u64 in_cell(u32 word) { return static_cast<u64>(word) * Packet::kBytes; }
  static COMMDSL_FN u64 in_tensor(u32 word) { return static_cast<u64>(word) * Packet::kData; }
  static COMMDSL_FN bool is_half() { return false; }
  // What the two halves bring beside data. With the digest each has half of it above 16 bits of the number.
  static COMMDSL_FN u64 flags(u64 number, u32 digest, bool carries) {
    const u64 few = number & 0xffffu, all = number & 0xffffffffu;
    return carries ? (few | few << 32) | static_cast<u64>(digest & 0xffffu) << 16 | static_cast<u64>(digest >> 16) << 48
                   : all | all << 32;
  }
  static COMMDSL_FN Raw wrap(u64 data, u64 flags) {
    return {(data & 0xffffffffull) | flags << 32, (data >> 32) | (flags & 0xffffffff00000000ull)};
  }
  static COMMDSL_FN u64 unwrap(const Raw& raw) { return (raw.low & 0xffffffffull) | (raw.high << 32); }
  static COMMDSL_FN u64 found(const Raw& raw) { return raw.low >> 32 | (raw.high & 0xffffffff00000000ull); }
  static COMMDSL_FN bool arrived(const Raw& raw, u64 flags, bool wanted) { return !wanted || found(raw) == flags; }
  // Of flags the number, as far as they have it, and the digest.
  static COMMDSL_FN u64 number(u64 flags, bool carries) { return flags & (carries ? 0xffffu : 0xffffffffu); }
  static COMMDSL_FN u32 digest(u64 flags) {
    return static_cast<u32>(flags >> 16 & 0xffffu) | static_cast<u32>(flags >> 48) << 16;
  }
  // Both halves have come, of another call.
  static COMMDSL_FN bool is_other(u64 found, u64 flags) {
    return found != flags && ((found ^ flags) & 0x0000ffff0000ffffull) == 0;
  }
  static COMMDSL_FN bool agree(bool gives_up) { return gives_up; }
};

template <>
struct Way<Line> {
  using Word = Vector16;
  static constexpr u32 kStride = COMMDSL_THREADS / 8;
  static COMMDSL_FN u32 first() { return thread() / 8; }
  // A warp goes on while any of its lines is left: its threads poll together.
  static COMMDSL_FN bool goes_on(u32 base, u32 count) { return (base & ~3u) < count; }
  static COMMDSL_FN u64 in_cell(u32 line) { return static_cast<u64>(line) * Line::kBytes + thread() % 8 * 16; }
  static COMMDSL_FN u64 in_tensor(u32 line) {
    const u64 pair = static_cast<u64>(line / 2) * (2 * Line::kData);
    const u32 second = line % 2, vector = thread() % 8;
    return pair + (is_half() ? 112 + second * 8 : second * 128 + vector * 16);
  }
  static COMMDSL_FN bool is_half() { return thread() % 8 == 7; }
  // With the digest above 32 bits of the number.
  static COMMDSL_FN u64 flags(u64 number, u32 digest, bool carries) {
    return carries ? (number & 0xffffffffull) | static_cast<u64>(digest) << 32 : number;
  }
  static COMMDSL_FN Raw wrap(const Vector16& data, u64 flags) {
    Raw raw;
    memcpy(&raw, &data, sizeof(raw));
    if (is_half()) raw.high = flags;
    return raw;
  }
  static COMMDSL_FN Vector16 unwrap(const Raw& raw) {
    Vector16 data;
    memcpy(&data, &raw, sizeof(data));
    return data;
  }
  static COMMDSL_FN u64 found(const Raw& raw) { return __shfl_sync(0xffffffffu, raw.high, 7, 8); }
  static COMMDSL_FN bool arrived(const Raw& raw, u64 flags, bool wanted) {
    return !__any_sync(0xffffffffu, wanted && is_half() && raw.high != flags);
  }
  static COMMDSL_FN u64 number(u64 flags, bool carries) { return carries ? flags & 0xffffffffull : flags; }
  static COMMDSL_FN u32 digest(u64 flags) { return static_cast<u32>(flags >> 32); }
  static COMMDSL_FN bool is_other(u64 found, u64 flags) {
    return found != flags && ((found ^ flags) & 0xffffffffull) == 0;
  }
  static COMMDSL_FN bool agree(bool gives_up) { return __any_sync(0xffffffffu, gives_up); }
};

constexpr u64 kGivesUp = ~u64{0};

constexpr u64 kLooksAgain = u64{1} << 63;  // beside the time since when a thread waits

// What a thread that has waited for a while does: it goes on, it looks once more as it waits in vain, or it gives up. `found`: the
// flags that are there, where they are to carry the call or not.
template <class Plan>
COMMDSL_CALL u64 reconsider(const ArgsOf<Plan>& args, i32 lane, u64 round, i32 op, i32 peer, u64 since, u64 found, bool carries) {
  using W = Way<typename Plan::Wire>;
  const ErrorRecord* record = reinterpret_cast<const ErrorRecord*>(args.error);
  if (load_relaxed(&record->code) != 0) return kGivesUp;
  if (carries && W::is_other(found, W::flags(mark_of(round), args.call(), true))) {
    report_other<Plan>(args, lane, round, op, peer, W::digest(found));
    return kGivesUp;
  }
  const u64 why = in_vain(args, peer, since & ~kLooksAgain);
  if (why == 0) return since & ~kLooksAgain;
  if ((since & kLooksAgain) == 0) return since | kLooksAgain;
  report<Plan>(args, why, lane, round, op, peer, mark_of(round), W::number(found, carries));
  return kGivesUp;
}

template <class Plan, u32 count>
COMMDSL_FN bool settle(const Operands<Plan>& operands, i32 source, const char* cell, u32 base, u32 words,
                       Raw (&raw)[count]) {
  using W = Way<typename Plan::Wire>;
  const u64 number = mark_of(operands.here.round);
#pragma unroll
  for (u32 u = 0; u < count; ++u) {
    const u32 word = base + u * W::kStride;
    const bool carries = u == 0 && carries_call(operands.here, word);
    const u64 flags = W::flags(number, operands.here.args.call(), carries);
    u64 since = 0;
    for (u32 polls = 1; !W::arrived(raw[u], flags, word < words); ++polls) {
      if (word < words) load_raw(raw[u], cell + W::in_cell(word));
      if (polls % kPollsPerCheck != 0) continue;
      if (since == 0) since = now_ns();
      const u64 found = W::found(raw[u]);
      const Position<Plan>& here = operands.here;
      const i32 peer = operands.source_row(source).rank;
      since = reconsider<Plan>(here.args, here.lane, here.round, operands.index, peer, since, found, carries);
      if (W::agree(since == kGivesUp)) return false;
    }
  }
  return true;
}

// Values on their way from sources to destinations: copied as they are, or as accumulators.
template <class Plan, u32 unroll, bool reduces>
struct Values {
  using Word = typename Way<typename Plan::Wire>::Word;
  Word value[unroll];
  COMMDSL_FN explicit Values(const Operands<Plan>&) {}
  COMMDSL_FN AsItIs share(const Operands<Plan>&, i32) const { return {}; }
  template <class Share>
  COMMDSL_FN void take(u32 u, const Word& word, bool, Share) { value[u] = word; }
  COMMDSL_FN void settle() {}
  COMMDSL_FN Word give(u32 u) const { return value[u]; }
};

template <class Plan, u32 unroll>
struct Values<Plan, unroll, true> {
  using Word = typename Way<typename Plan::Wire>::Word;
  Shares<Plan> shares;
  Lanes<typename Plan::Element, Word> total[unroll];
  COMMDSL_FN explicit Values(const Operands<Plan>& operands) : shares(operands) {}
  COMMDSL_FN auto share(const Operands<Plan>& operands, i32 source) const { return shares.of(operands, source); }
  template <class Share>
  COMMDSL_FN void take(u32 u, const Word& word, bool is_first, Share share) {
    total[u].take(word, is_first, typename Plan::Operation{}, share);
  }
  COMMDSL_FN void settle() {
#pragma unroll
    for (u32 u = 0; u < unroll; ++u) total[u].settle(shares);
  }
  COMMDSL_FN Word give(u32 u) const { return total[u].narrow(); }
};

// Asks for the words of one source: from a cell as they are there now, from a tensor for good.
template <class Plan, u32 unroll>
COMMDSL_FN void ask(const Operands<Plan>& operands, i32 source, u32 base, u32 words, Raw (&raw)[unroll]) {
  using W = Way<typename Plan::Wire>;
  using Word = typename W::Word;
  const char* from = operands.source(source);
  const bool in_cell = operands.source_row(source).space == kCell;
#pragma unroll
  for (u32 u = 0; u < unroll; ++u) {
    const u32 word = base + u * W::kStride;
    raw[u] = {0, 0};
    if (word >= words) continue;
    if (in_cell) {
      load_raw(raw[u], from + W::in_cell(word));
    } else if (W::is_half()) {
      raw[u].low = load_word<u64>(from, W::in_tensor(word), operands.slice.bytes);
    } else {
      const Word data = load_word<Word>(from, W::in_tensor(word), operands.slice.bytes);
      memcpy(&raw[u], &data, sizeof(data));
    }
  }
}

template <class Plan, u32 unroll, bool reduces>
COMMDSL_FN void give(const Operands<Plan>& operands, u32 base, u32 words, const Values<Plan, unroll, reduces>& values) {
  using W = Way<typename Plan::Wire>;
  using Word = typename W::Word;
#pragma unroll
  for (i32 d = 0; d < Plan::kMostDests; ++d) {
    if (d >= operands.op().num_dests) break;
    char* to = operands.dest(d);
    const bool in_cell = operands.dest_row(d).space == kCell;
#pragma unroll
    for (u32 u = 0; u < unroll; ++u) {
      const u32 word = base + u * W::kStride;
      if (word >= words) continue;
      const Word value = values.give(u);
      if (in_cell) {
        const bool carries = u == 0 && carries_call(operands.here, word);
        store_raw(to + W::in_cell(word), W::wrap(value, W::flags(mark_of(operands.here.round), operands.here.args.call(), carries)));
      } else if (W::is_half()) {
        u64 half;
        memcpy(&half, &value, sizeof(half));
        store_word<u64>(to, W::in_tensor(word), operands.slice.bytes, half);
      } else {
        store_word<Word>(to, W::in_tensor(word), operands.slice.bytes, value);
      }
    }
  }
}

template <u32 unroll, u32 ahead, bool reduces, class Plan>
COMMDSL_FN bool pass(const Operands<Plan>& operands, u32 words) {
  using W = Way<typename Plan::Wire>;
  using Word = typename W::Word;
  const i32 count = reduces ? operands.op().num_sources : 1;
  for (u32 base = W::first(); W::goes_on(base, words); base += unroll * W::kStride) {
    Values<Plan, unroll, reduces> values(operands);
    for (i32 first = 0; first < count; first += ahead) {
      Raw raw[ahead][unroll];
#pragma unroll
      for (u32 s = 0; s < ahead; ++s) {
        if (first + static_cast<i32>(s) < count) ask(operands, first + static_cast<i32>(s), base, words, raw[s]);
      }
#pragma unroll
      for (u32 s = 0; s < ahead; ++s) {
        const i32 source = first + static_cast<i32>(s);
        if (source >= count) break;
        const bool in_cell = operands.source_row(source).space == kCell;
        if (in_cell && !settle(operands, source, operands.source(source), base, words, raw[s])) return false;
#pragma unroll
        for (u32 u = 0; u < unroll; ++u) {
          Word word;
          if (in_cell) {
            word = W::unwrap(raw[s][u]);
          } else {
            memcpy(&word, &raw[s][u], sizeof(word));
          }
          values.take(u, word, source == 0, values.share(operands, source));
        }
      }
    }
    values.settle();
    give(operands, base, words, values);
  }
  return true;
}

// One operation in one round. Every rank and lane moves the same number of words, those past its data empty: the flags in
// them are what keeps rounds apart. False when the thread gave up.
template <class Plan>
COMMDSL_FN bool exchange(const Operands<Plan>& operands) {
  using W = Way<typename Plan::Wire>;
  constexpr u32 data = Plan::Wire::kData;
  const u32 words = words_of(operands, W::kStride);
  if constexpr (Plan::kHasReduction) {
    constexpr u32 ahead = Plan::kMostSources < 8 ? Plan::kMostSources : 8;
    if (operands.op().kind != kCopy) {
      return by_operation(operands, [&](const auto& same) { return pass<1, ahead, true>(same, words); });
    }
  }
  constexpr u32 most = (Plan::kTileBytes + data - 1) / data, each = (most + W::kStride - 1) / W::kStride;
  return pass<(each < 4 ? each : 4), 1, false>(operands, words);
}

}  // namespace commdsl
