"""What tests share: golden files, and the marker of tests that need GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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
