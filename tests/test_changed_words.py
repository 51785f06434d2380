"""Files with a word changed are refused with a code or proved: nothing else happens, and soon.

Assumes right files of many constructs. Does not run what is accepted.
"""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest
from test_calls import ALLGATHER, ALLTOALL, TORUS, USES
from test_waves import CHAIN

from commdsl import compiler
from commdsl.language.diagnostics import CommError, render_full

MANY = """use "collectives/reduce_tree.comm"
fn side(n) = floor_log2(n) + [0, 1][n % 2]
topology grid {
  nodes 2   gpus side(4) * 2 per node   sms 132
  link hop pairs (i, (i + 1) % gpus) for i in 0 ..< gpus   50 GB/s per pair   1 us
  link net across nodes   10 GB/s per gpu   3 us
  missing (i, i + 4) for i in 0 ..< 4
  degraded (i, i + 5) for i in 0 ..< 3   5 GB/s
}
schedule through(K = 2) for P ranks where P >= 2 {
  cycles C = open (i for i in 0 ..< P)
  inout x[K]
  ensure reduce(x, 0)
  group half = ranks in runs of P / 2
  group pair = ranks by stride P / 2
  pipeline i in 0 ..< K {
    do reduce_tree(x[i]) over half
    if i == 0 { each r do reduce_tree(x[(0 if r < 2 else C[0].at(0))]) over pair } else { do last(x[i]) over pair }
  }
}
schedule last for Q ranks where Q == 2 {
  inout y
  scratch t
  ensure reduce(y, 0)
  each r where r == 1 { put y -> t @ 0 }
  each r where r == 0 { reduce t -> y }
}
"""

FILES = [(USES + TORUS, 8), (USES + ALLTOALL, 4), (USES + ALLGATHER, 6), (CHAIN, 5), (MANY, 4)]
WORD = re.compile(r"[A-Za-z_]\w*|\d+|==|!=|[-+*/%<]")
NUMBERS = ("0", "1", "2", "3", "5", "P", "-1", "100000", "999999999999")


def changed(text: str, chance: random.Random) -> str:
    """One word in place of another: a number, a name that stands elsewhere, or an operator."""
    words = list(WORD.finditer(text))
    word = chance.choice(words)
    if word[0].isdigit():
        other = chance.choice(NUMBERS)
    elif word[0][0].isalpha():
        other = chance.choice([one[0] for one in words if one[0][0].isalpha()] + ["0", "2"])
    else:
        other = chance.choice(["+", "-", "*", "/", "%", "==", "<", "!=", "<<"])
    return text[: word.start()] + other + text[word.end() :]


def outcome(text: str, ranks: int) -> list[str]:
    """What is shown of each fault; nothing where all is proved."""
    try:
        files = compiler.read_text(text, "mutant.comm", Path())
        for decl in compiler.declarations(files):
            compiler.check_declared(files, decl, compiler.Given(ranks))
    except CommError as error:
        return [render_full(found) for found in error.diagnostics]
    return []


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("file", range(len(FILES)))
def test_a_word_changed(file: int, seed: int) -> None:
    """There is a diagnostic that can be shown, or a proof, within ten seconds."""
    text, ranks = FILES[file]
    mutant = changed(text, random.Random(f"{file} {seed}"))
    start = time.thread_time()

    assert all(shown.startswith(("error[C", "warning[C")) for shown in outcome(mutant, ranks))
    assert time.thread_time() - start < 10, mutant
