// The words every build shares: integers, the rows of the operation tables, the arguments of a kernel, the error record.
// Assumes nothing of the compiler beyond C++17: NVRTC has no <cstdint>, so the integers are named here.
#pragma once

namespace commdsl {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;
static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8, "the tables assume these widths");

constexpr i32 kCell = -1;  // the space of a location in symmetric memory; 0 and up is a tensor of the rank itself
constexpr i32 kCopy = 0;
constexpr i32 kReduce = 1;
constexpr i32 kFlagStride = 64;    // a flag has a cache line of its own, so that pollers do not disturb its neighbours
constexpr i32 kStaggered = 4;      // lanes whose first rounds differ in length
constexpr i32 kFlagAverage = 1;    // bit 0 of Args::flags: the reduction is an average
constexpr u64 kTimedOut = 1;       // ErrorRecord::code

// `index` is a cell, or the block of a tensor: which piece of it is moved is the operation's.
struct Location {
  i32 space, rank, index;
};

// `scale`: what is stored is divided by the number of ranks when the reduction is an average.
struct Dest {
  i32 space, rank, index, scale;
};

// Runs of the other tables are (first, count).
struct Op {
  i32 kind, cut, piece, barrier;
  i32 first_dest, num_dests, first_source, num_sources, first_wait, num_waits, first_signal, num_signals;
};

struct Wait {
  i32 peer, ordinal, rounds_back;
};

struct Signal {
  i32 peer, ordinal;
};

// What a kernel does that raises and awaits flags between copies which others make. Positions count a rank's operations
// through the rounds of a call: operation i of n in round r is at r * n + i. Ranges are [first, last).
struct Turn {
  i32 first_signal, last_signal, first_wait, last_wait;
  i32 entered;   // rounds of the call that the rank has begun
  i32 advances;  // 1: the last kernel of the call, which counts its rounds
};

// Pointers travel as 64-bit numbers, so that host and device agree on the layout.
template <i32 num_ranks, i32 num_tensors>
struct Args {
  u64 heap[num_ranks];
  u64 tensors[num_tensors];
  u64 block_bytes;
  u64 share_bytes;    // the most a lane owns of a chunk
  u64 stagger_bytes;  // by how much less each of four neighbouring lanes moves in its first round than the one before
  u64 timeout_ns;
  u64 error;
  i32 rank, active_lanes, rounds, flags;
};

// `claim` decides which lane writes the record, `code` is written last.
struct ErrorRecord {
  u64 code;
  i32 rank, lane, op, peer;
  u64 expected, seen, round, missing, claim;
};
static_assert(sizeof(ErrorRecord) == 64, "the runtime reads this record");

}  // namespace commdsl
