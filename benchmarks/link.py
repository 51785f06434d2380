"""Turns a number of bytes into the time the links need for them: pushed to peers by threads, or by the copy engine.

Assumes peer pointers into symmetric memory, and CuPy, whose NVRTC compiles the kernel that pushes 16-byte vectors.
There is no flag, no reduction and no waiting for anyone: all ranks push at once, to the next rank or to all the others;
the copy engine's is one copy to the next rank. Does not claim that nothing is faster than the best of these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from benchmarks.cases import Case
from benchmarks.measure import Bench, Contender
from benchmarks.peers import Arena
from benchmarks.report import Kind

THREADS = 512
GRIDS = (32, 64, 132, 264)
SMALL_GRIDS = (4, 16, 64)
SMALL = 256 << 10
COPY_ENGINE = "copy engine"

SOURCE = r"""
constexpr int kUnroll = 8;

// Block b serves peer b % peers. Loads are issued before their stores, so that kUnroll of them are in flight a thread.
extern "C" __global__ void __launch_bounds__(512) push(
    const uint4* source, const unsigned long long* destinations, int peers, long long vectors) {
  const int peer = blockIdx.x % peers;
  uint4* destination = reinterpret_cast<uint4*>(destinations[peer]);
  source += peer * vectors;
  const long long blocks = gridDim.x / peers;
  const long long stride = blocks * blockDim.x;
  long long at = static_cast<long long>(blockIdx.x / peers) * blockDim.x + threadIdx.x;
  for (; at + (kUnroll - 1) * stride < vectors; at += kUnroll * stride) {
    uint4 held[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) held[i] = source[at + i * stride];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) destination[at + i * stride] = held[i];
  }
  for (; at < vectors; at += stride) destination[at] = source[at];
}
"""


class Link:
    """The kernel, and where it pushes."""

    def __init__(self, bench: Bench, arena: Arena) -> None:
        import cupy

        self._cupy = cupy
        self._bench = bench
        self._arena = arena
        with cupy.cuda.Device(bench.device.index):
            self._kernel = cupy.RawModule(code=SOURCE, options=("-std=c++17",)).get_function("push").kernel
        self._source = torch.ones(arena.memory.numel(), dtype=torch.uint8, device=bench.device)

    def contenders(self, nbytes: int) -> list[Contender]:
        """The copy engine to the next rank; every grid, pushing all to the next rank, or each other rank its share."""
        grids = SMALL_GRIDS if nbytes <= SMALL else GRIDS
        counts = {1, self._bench.ranks - 1}
        return [self._copy(nbytes), *(self._push(nbytes, peers, grid) for peers in sorted(counts) for grid in grids)]

    def _copy(self, nbytes: int) -> Contender:
        rank, ranks = self._bench.rank, self._bench.ranks
        target = self._arena.handle.get_buffer((rank + 1) % ranks, (nbytes,), torch.uint8)
        source = self._source[:nbytes]

        def call(_: int) -> None:
            target.copy_(source)

        return Contender(COPY_ENGINE, Kind.LIMIT, call)

    def _push(self, nbytes: int, peers: int, grid: int) -> Contender:
        rank, ranks = self._bench.rank, self._bench.ranks
        share = -(-nbytes // peers // 16) * 16
        # A sender has its own place in everybody's part; with one peer there is one sender, whose place is the start.
        places = [(rank + step) % ranks for step in range(1, peers + 1)]
        slot = 0 if peers == 1 else share
        addresses = self._arena.addresses()
        targets = [addresses[peer] + slot * ((rank - peer) % ranks - 1) for peer in places]
        pointers = torch.tensor(targets, dtype=torch.int64, device=self._bench.device)
        blocks = max(1, grid // peers) * peers

        arguments = (
            np.uint64(self._source.data_ptr()),
            np.uint64(pointers.data_ptr()),
            np.int32(peers),
            np.int64(share // 16),
        )

        def call(_: int) -> None:
            stream = self._stream(torch.cuda.current_stream(self._bench.device).cuda_stream)
            self._kernel((blocks, 1, 1), (THREADS, 1, 1), arguments, stream=stream)

        def release() -> None:
            pointers.resize_(0)  # and keeps it until then: the kernel has its address only

        return Contender(f"push to {peers} x{blocks}", Kind.LIMIT, call, release=release)

    def _stream(self, stream: int) -> Any:
        cuda = self._cupy.cuda
        return cuda.Stream.from_external(_TorchStream(stream)) if stream else cuda.Stream.null


class _TorchStream:
    """A stream of torch's, in the words of CUDA's stream protocol."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream


def arena_bytes(cases: Iterable[Case]) -> int:
    """Enough for every case's tensor and for what a peer pushes."""
    return max((max(case.numel * case.itemsize, case.sent_bytes + 16 * case.ranks) for case in cases), default=16)
