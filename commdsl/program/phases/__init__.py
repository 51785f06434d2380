"""What a role does, one after another: phases that are proved by region, as a closed union.

common         who acts, and the defaults of a phase
signals        words and counters, and what the caller does around a call
rows_by_table  rows that go where a table says
rows_by_key    rows that go to the ranks of their keys
rows_back      what rows became, back to their sources

A phase says all of itself: name, description, memory accesses, kernel arguments and constants, the call of its body.

Assumes nothing of a routing: which rows go where is data, which memory a lane may touch is not. Does not order
anything: `lower` puts phases in order, `proof` judges it, and the kernel's text is printed from it. `Moves`, the phase
that is proved by operation, has a module of its own.

Who acts is a rank's first lane, all its lanes, or its caller on a stream. A phase waits, touches memory, then tells.
Words and counters that tell are what others wait for: nothing else orders two ranks.
"""

from __future__ import annotations

from typing import TypeAlias

from commdsl.program.phases.common import Actor, Field, Held, Ways
from commdsl.program.phases.rows_back import AddUp, Each, FinishBack, PushBack
from commdsl.program.phases.rows_by_key import Count, FillByKey, Forward, PushAgain, PushByKey
from commdsl.program.phases.rows_by_table import Finish, Push, PushStraight
from commdsl.program.phases.signals import Host, Meet, Read, Tell
from commdsl.program.touches import Ranks

Routed: TypeAlias = (
    Host
    | Tell
    | Meet
    | Read
    | Push
    | PushStraight
    | Finish
    | Count
    | PushByKey
    | PushAgain
    | Forward
    | FillByKey
    | PushBack
    | AddUp
    | FinishBack
)

Pushing: TypeAlias = PushByKey | PushAgain | PushBack
"""Phases whose rows may cross once per node."""

__all__ = [
    "Actor",
    "AddUp",
    "Count",
    "Each",
    "Field",
    "FillByKey",
    "Finish",
    "FinishBack",
    "Forward",
    "Held",
    "Host",
    "Meet",
    "Push",
    "PushAgain",
    "PushBack",
    "PushByKey",
    "PushStraight",
    "Pushing",
    "Ranks",
    "Read",
    "Routed",
    "Tell",
    "Ways",
]
