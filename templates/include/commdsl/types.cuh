// The words every build shares: integers, the rows of the operation tables, the error record. A kernel's arguments are printed from
// its Plan; pointers travel in them as 64-bit numbers, so that host and device agree on the layout.
// Assumes nothing of the compiler beyond C++17: NVRTC has no <cstdint>, so the integers are named here.
#pragma once

namespace commdsl {

using u8 = unsigned char;
using i8 = signed char;
using i16 = short;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;
static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8, "the tables assume these widths");

constexpr i32 kCell = -1;  // the space of a location in symmetric memory; 0 and up is a tensor of the rank itself
constexpr i32 kCopy = 0;
constexpr i32 kReduce = 1;
constexpr i32 kAdd = 2;            // as kReduce, by an operation of its own in place of the call's
constexpr i32 kMultiply = 3;
constexpr i32 kMax = 4;
constexpr i32 kMin = 5;
constexpr i32 kHold = 6;           // nothing: a chunk of the rank's own, between what peers put there
constexpr i32 kAsItIs = 0;         // forms of operands: in the caller's element type,
constexpr i32 kCast = 1;           // as they travel in another one,
constexpr i32 kRounded = 2;        // or as the first, but as if they had travelled
constexpr i32 kFlagStride = 64;    // a flag has a cache line of its own, so that pollers do not disturb its neighbours
constexpr i32 kStaggered = 4;      // lanes whose first rounds differ in length
constexpr u64 kTimedOut = 1;       // ErrorRecord::code
constexpr u64 kFar = u64{1} << 63; // in heap[peer]: plain loads and stores do not reach that rank

// `index` is a cell, or the block of a tensor: which piece of it is moved is the operation's.
struct Location {
  i32 space, rank, index;
};

// `weight`: what it is multiplied by when the reduction is an average.
struct Source {
  i32 space, rank, index, weight;
};

// `whole`: what the weighed sum is divided by when the reduction is an average. Runs of the other tables are (first, count).
struct Op {
  i32 kind, cut, piece, barrier, whole;
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
  i32 begins;    // 1: the first, which tells the peers of the call
  u64 told;      // a word to raise when what was waited for is there, or will not be; 0: none
};
constexpr u64 kThere = 1, kInVain = 2;  // what it is raised to

// --- rows on their way to places that a table names -----------------------------------------------------------------------

constexpr i32 kFinishCopy = 0;   // rows from where they waited to the output
constexpr i32 kFinishSum = 1;    // the sum of `count` runs of rows, `stride` rows apart, in order
constexpr i32 kFinishZero = 2;   // rows of the output that nobody sends
constexpr u64 kBadTile = 2;      // ErrorRecord::code: a tile reaches out of a tensor
constexpr u64 kBadCount = 3;     // a rank sent another number of rows than the table says
constexpr u64 kBadFinish = 4;    // a run that is to be finished reaches out of a tensor
constexpr u64 kBadTable = 5;     // a table is not what the host wrote
constexpr u64 kBadKey = 6;       // a key that there is not
constexpr u64 kNoRoom = 7;       // more rows go to a rank than it has room for
constexpr u64 kBadOrigin = 8;    // a row that goes back to where there is no place
constexpr u64 kBadMate = 9;      // a row is to be added up with one that there is not
constexpr u64 kDisagrees = 10;   // a peer makes another call
constexpr u64 kStopped = 11;     // a peer gave up and said so
constexpr u64 kInterrupted = 12; // the host asked for an end of long waits
constexpr u64 kGone = 13;        // the process of the peer has ended
constexpr u64 kBadLength = 14;   // a peer sends a block of another length than is to come
constexpr u64 kHeadBytes = 128;  // a line in front of data in a cell, where a rank knows the lengths of its pairs alone

// A run of rows of one tensor, which warps move tile by tile: `where` is the destination's rank, from bit 16 on the tensor, in bit 24 whether the rows are to
// wait there until they are finished.
struct alignas(16) Send {
  u32 source_row, dest_row, rows, where;
};

struct alignas(16) Finish {
  u32 kind, tensor, source_row, dest_row, rows, stride, count;
  u32 tile_rows;  // that a warp finishes at once
};

// In front of a table: the sends follow it, then the finishes, then the number of rows that come from each rank.
struct alignas(16) TableHead {
  u32 sends, finishes;
  u32 finishes_at;  // in bytes from the head
  u32 check;        // of the words before it and of those from `threads` on: their exclusive or, inverted
  u32 sum;          // of the words behind the head
  u32 digest;       // of what all ranks send: the same on every rank
  u32 threads;      // of a warp that move a tile: all, or a power of two where tiles are short
  u32 tile_bytes;   // a tile has as many rows as that has room for, or one
  u32 send_tiles, finish_tiles;  // of a send and of a finish, at most: powers of two
  u32 waiting_sends;  // so many sends, the first, lead to where rows wait
  u32 waits;          // whether rows wait on any rank: the same on every rank
};

// `claim` decides which lane writes the record, and says then how long its call might wait; `code` is written last.
struct ErrorRecord {
  u64 code;
  i32 rank, lane, op, peer;
  u64 expected, seen, round, missing, claim;
};
constexpr i32 kNoLane = -1;  // ErrorRecord::lane, and its op: what agrees is no lane
static_assert(sizeof(ErrorRecord) == 64, "the runtime reads this record");

// --- the desk: symmetric memory that all kernels of a group share, a piece on every rank ---------------------------------------

constexpr u64 kDeskNumber = 0;    // calls of the rank; the one that it is in is not counted yet where `kUncounted` says so
constexpr u64 kDeskCall = 8;      // the digest of the call that the rank is in or was in last, beside `kBegun`; 0: none
constexpr u64 kDeskTelling = 16;  // calls that a block of their own tells of
constexpr u64 kDeskStopped = 64;  // who gave up, as `stop_of` has it; 0: nobody
constexpr u64 kDeskTold = 128;    // by rank and slot the number of a call, in 32 bits, above a digest of it
constexpr u64 kDeskSlots = 8;     // of a rank, which such calls take in turn
constexpr u64 kBegun = u64{1} << 32, kUncounted = u64{1} << 33;

// --- the notice: memory of the host, which it writes and kernels look at where they wait long -------------------------------------

constexpr u64 kInterruptNs = 500000000;  // with the first word set, waits that last longer than this end
// The words behind it have a bit for every rank whose process has ended.

}  // namespace commdsl
