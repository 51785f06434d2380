"""Turns what a benchmark does on this rank into its end: what there is to tell last, an exit code, and no hang.

Assumes torchrun. Does not know what is measured.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn

PATIENCE = 5.0
"""Seconds that a rank which failed leaves to rank 0: torchrun ends all when one has ended."""


def end_of(work: Callable[[], tuple[int, str]], tell: Callable[[str], None], seconds: float, grace: float) -> NoReturn:
    """Does the work and ends this process, after `seconds + grace` seconds at the latest. `work` returns the exit code
    and last words, which are given to `tell`, on rank 0 and once; as is why a run did not come to its end.
    """
    if "RANK" not in os.environ:
        sys.exit("start it with torchrun: one process per GPU")
    rank, telling = int(os.environ["RANK"]), threading.Lock()

    def end(code: int, why: str) -> NoReturn:
        telling.acquire()  # never released: whoever comes second, the timer or the run, ends with the process
        if rank == 0:
            tell(why)
        elif code:
            time.sleep(PATIENCE)
        sys.stdout.flush()
        os._exit(code)  # an end that is collective must not wait for a rank that failed

    def give_up() -> None:
        faulthandler.dump_traceback()
        end(1, "the run hung and was ended")

    timer = threading.Timer(seconds + grace, give_up)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + 2 * grace, exit=True)
    try:
        code, why = work()
    except BaseException:
        traceback.print_exc()
        end(1, "an exception ended the run")
    end(code, why)


class Ending(ABC):
    """What rank 0 has to say at the end, even where the run hangs."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows: list[Any] = []
        self.notes: list[str] = []
        self.title = "nothing was measured"
        self.is_whole = False  # the run came to its end

    @abstractmethod
    def say(self) -> None:
        """Prints everything, and saves it where that is asked for."""

    def end(self, work: Callable[[], int], grace: float) -> NoReturn:
        """Does the work, whose exit code it ends with, and says this: `grace` seconds after `--time-budget` at last."""

        def tell(why: str) -> None:
            self.notes += [why] if why else []
            self.say()

        end_of(lambda: (work(), ""), tell, self.options.time_budget, grace)
