"""What `tune` says, and what stands in its place: an override obeys the laws of the text, under the same codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from commdsl import compiler
from commdsl.commands.arguments import UsageError, parse_tune
from commdsl.ir.resolve import resolve
from commdsl.ir.schedules import Tuning
from commdsl.language.diagnostics import CommError, render_full
from commdsl.language.parsed import parse
from commdsl.language.source import Source
from commdsl.machine.carriers import BULK, ENGINE, LINE, PACKET
from commdsl.machine.topology import switch

TEXT = """roles overlap { compute sms 0 ..< 116   comm sms 116 ..< 132 }

schedule plain for P ranks {
  input x
  output y
  ensure permutation(x -> y) r -> (r + 1) % P
  each r { put x -> y @ (r + 1) % P }
}

schedule tuned for P ranks {
  input x
  output y
  ensure permutation(x -> y) r -> (r + 1) % P
  tune { lanes 16   sms 8   protocol packet }
  each r { put x -> y @ (r + 1) % P }
}

schedule sharing for P ranks {
  input x
  output y
  on comm
  ensure permutation(x -> y) r -> (r + 1) % P
  tune { lanes 32 }
  each r { put x -> y @ (r + 1) % P }
}
"""


def tuning(schedule: str, **tune: int | str) -> Tuning:
    files = (parse(Source("tuned.comm", TEXT)),)
    return resolve(files, compiler.choose(files, schedule), 4, switch(4), {}, tune).tuning


def fault(schedule: str, **tune: int | str) -> tuple[str, str]:
    """Code and headline of the one fault there is."""
    with pytest.raises(CommError) as caught:
        tuning(schedule, **tune)
    (found,) = caught.value.diagnostics
    assert "override of tune:1:" in render_full(found)
    return found.code, found.headline


def test_text() -> None:
    """Every key has its place, and what is not tuned is left open."""
    assert tuning("plain") == Tuning()
    assert tuning("tuned") == Tuning(lanes=16, carrier=PACKET, sms=8)
    assert tuning("sharing") == Tuning(lanes=32)


def test_override() -> None:
    """An override stands in place of entries of its name; the others stay."""
    whole = {"lanes": 8, "threads": 512, "tile": 4096, "protocol": "line", "sms": 4}

    assert tuning("plain", **whole) == Tuning(8, 512, 4096, LINE, 4)
    assert tuning("plain", protocol="engine", tile=1 << 20) == Tuning(tile_bytes=1 << 20, carrier=ENGINE)
    assert tuning("tuned", lanes=24, protocol="bulk") == Tuning(lanes=24, carrier=BULK, sms=8)


@pytest.mark.parametrize(
    ("schedule", "tune", "code", "headline"),
    [
        ("plain", {"lanes": 1057}, "C505", "`lanes` is 1 to 1056: 8 on each of 132 SMs"),
        ("plain", {"sms": 133}, "C505", "`sms` is 1 to 132: `switch` has 132 SMs"),
        ("plain", {"threads": 48}, "C505", "`threads` is 32 to 1024, a multiple of 32"),
        ("plain", {"tile": 40}, "C505", "`tile` is 16 to 67108864, a multiple of 16"),
        ("plain", {"protocol": "dma"}, "C505", "expected a protocol"),
        ("plain", {"protocol": 128}, "C505", "expected a protocol"),
        ("plain", {"tile": "4 KB"}, "C109", "`tile` takes a number of bytes"),
        ("plain", {"lanes": "many"}, "C109", "`lanes` takes a plain number"),
        ("plain", {"blocks": 8}, "C506", "nothing is tuned by `blocks`"),
        ("tuned", {"lanes": 20}, "C505", "every SM runs equally many lanes"),
        ("tuned", {"lanes": 72}, "C505", "an SM runs at most 8 lanes"),
        ("sharing", {"lanes": 24}, "C505", "every SM runs equally many lanes"),
        ("sharing", {"sms": 16}, "C506", "the SMs are those of role `comm`"),
    ],
)
def test_illegal_override(schedule: str, tune: dict[str, int | str], code: str, headline: str) -> None:
    """An override is refused where the text would be, and the message shows the override."""
    assert fault(schedule, **tune) == (code, headline)


def test_line_stays_in_a_node() -> None:
    """The protocol that counts on NVLink is for the ranks of one node."""
    path = Path("schedules/collectives/allreduce_two_level.comm")
    root = Path(__file__).parent.parent
    with pytest.raises(CommError) as caught:
        compiler.check(root / path, ranks=16, on="h200_2x8", tune={"protocol": "line"})

    assert [found.code for found in caught.value.diagnostics] == ["C505"]


def test_an_override_does_not_hide_a_fault() -> None:
    """A value that the hardware does not have is a fault of the text, whatever stands in its place."""
    files = (parse(Source("tuned.comm", TEXT.replace("sms 8", "sms 800"))),)
    with pytest.raises(CommError, match="sms"):
        resolve(files, compiler.choose(files, "tuned"), 4, switch(4), {}, {"sms": 8})


def test_words() -> None:
    """On the command line a tile has a unit, and what is no number is a name."""
    assert parse_tune(("lanes=8", "tile=4KB", "protocol=bulk")) == (("lanes", 8), ("tile", 4096), ("protocol", "bulk"))
    for words in (("lanes",), ("lanes=",), ("=8",), ("lanes=8", "lanes=9"), ("tile=4XB",)):
        with pytest.raises(UsageError, match="--tune"):
            parse_tune(words)
