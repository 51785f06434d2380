"""What tests share: golden files, tallies, and the markers of tests that need GPUs and of sweeps."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import sweeps
from hypothesis import settings

GOLDEN = Path(__file__).parent / "golden"
MOST_WORKERS = 16
MOST_SECONDS = 3600
"""That a test takes where all of its cases run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew")
    parser.addoption("--sweep", choices=("sample", "all"), default="sample", help="which cases of a sweep run")


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout looks
def pytest_configure(config: pytest.Config) -> None:
    profile = config.getoption("--sweep")
    settings.register_profile(profile, deadline=None)  # a machine that others load is slow, not wrong
    settings.load_profile(profile)
    if profile == sweeps.ALL:
        config.option.timeout = MOST_SECONDS
    if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores, and so do the processes that they start
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: a worker a core and one more, as tests wait a sixth of their time: for a time-out, or for other ranks.
    But a few: the ranks of a test wait busily, and each worker imports torch.
    """
    return min(len(os.sched_getaffinity(0)) + 1, MOST_WORKERS)


@pytest.hookimpl(trylast=True)  # after -k: what was asked for by name is a family of its own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _skip_without_gpus(items)
    if config.getoption("--sweep") == "sample":
        _sample_sweeps(config, items)


def _sample_sweeps(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests marked `sweep` the sample runs; pytest counts the others as deselected."""
    marked = [item for item in items if isinstance(item, pytest.Function) and item.get_closest_marker("sweep")]
    cases = [sweeps.Case(item.nodeid, item.callspec.indices) for item in marked]
    left_out = {case.name for case in cases} - sweeps.sample(cases)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


def _skip_without_gpus(items: list[pytest.Item]) -> None:
    """A test marked gpu(n) is skipped where n GPUs are not, and says so."""
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is not None:
            have = _num_gpus()
            if have < marker.args[0]:
                item.add_marker(pytest.mark.skip(reason=f"needs {marker.args[0]} GPUs, this machine has {have}"))


def _num_gpus() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay: a collection of garbage, of which some tests ask for many, looks at the rest


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("C203.txt", text)`: the text is what the file of that name under tests/golden says."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        if not path.is_file():
            pytest.fail(f"there is no tests/golden/{name}: run this test with --update-golden, then read the file")
        expected = path.read_text(encoding="utf-8")

        assert text == expected, f"tests/golden/{name} says something else; --update-golden accepts the new text"

    return compare


@pytest.fixture
def turns(request: pytest.FixtureRequest) -> Callable[..., int]:
    """`turns(10_000)`: how many of so many random cases of one test run; all of them with --sweep=all."""

    def of(count: int, one_in: int = sweeps.ONE_IN) -> int:
        return count if request.config.getoption("--sweep") == "all" else -(-count // one_in)

    return of


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Callable[[str, Mapping[str, int]], None]:
    """`tally("mutants", {"refused": 3})`: what tests counted is added up at the end, over all workers."""

    def add(name: str, counts: Mapping[str, int]) -> None:
        record_property("tally", (name, dict(counts)))

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    totals: dict[str, Counter[str]] = {}
    for report in terminalreporter.getreports("passed"):
        for key, value in report.user_properties:
            if key == "tally":
                totals.setdefault(value[0], Counter()).update(value[1])
    for name, counts in sorted(totals.items()):
        parts = ", ".join(f"{number} {what}" for what, number in counts.items())
        terminalreporter.write_line(f"{name}: {counts.total()}, {parts}")


@pytest.fixture
def unswept() -> Iterator[None]:
    """Nothing looks for garbage: what other tests left would count as time of this one."""
    gc.disable()
    yield
    gc.enable()
