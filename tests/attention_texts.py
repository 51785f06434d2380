"""Schedules of a user's own that tests of attention run: a ring there, and a ring back.

Assumes nothing. Does not say what they cost; the shipped ones do.
"""

from __future__ import annotations

RING_FORTH = """
schedule ring for P ranks where P >= 2 {
  inout k[2 blocks]
  inout v[2 blocks]
  ensure rotation(k, v)

  yield attend(k, v)
  for s in 1 ..< P {
    each r {
      put k -> k @ (r + 1) % P
      put v -> v @ (r + 1) % P
    }
    yield attend(k, v)
  }
}
"""

RING = (
    RING_FORTH
    + """
schedule ring_backward for P ranks where P >= 2 {
  inout k[2 blocks]
  inout v[2 blocks]
  inout dk[2 blocks] float32
  inout dv[2 blocks] float32
  ensure rotation(k, v)

  yield attend(k, v, dk, dv -> dk, dv)
  for s in 1 ..< P {
    each r {
      put k -> k @ (r + 1) % P
      put v -> v @ (r + 1) % P
      put dk -> dk @ (r + 1) % P
      put dv -> dv @ (r + 1) % P
    }
    yield attend(k, v, dk, dv -> dk, dv)
  }
  each r {
    put dk -> dk @ (r + 1) % P
    put dv -> dv @ (r + 1) % P
  }
}
"""
)
