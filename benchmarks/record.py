"""Turns what a benchmark found into a file under measured/, and back: a CSV that starts with how it came to be.

Its first lines are facts, `# commit: 1a2b3c4` and so on: commit, date, command line, machine and versions. A file
without one of them is not written and not read, nor is one that says that a fact was not recorded. Does not measure and
imports torch only to ask what it is.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "benchmarks" / "measured"
NONE = "none"
UNKNOWN = "not recorded"

FACTS = {
    "commit": "the sources, `with changes` where the working tree differed",
    "date": "UTC",
    "command": "that was run, from the root of the repository",
    "environment": "the variables of NCCL, NVSHMEM, torch's symmetric memory and commdsl that were set",
    "gpus": "how many of which kind",
    "link": "between them, as the driver says",
    "cpu": "and how many of its cores",
    "driver": "of the GPUs",
    "cuda": "that torch was built for",
    "python": "",
    "torch": "",
    "nccl": "",
    "cupy": "",
}
"""What a file has to say, and what that is; `none` where a run has no such thing."""

LOUD = ("NCCL_", "NVSHMEM_", "TORCH_SYMM_MEM", "COMMDSL_", "CUDA_VISIBLE_DEVICES")
QUIET = ("_DIR", "_PATH", "_FILE")  # a folder says nothing about a time, but something about whose machine it was


class RecordError(ValueError):
    """A file of measurements that lacks a fact, or a run that cannot know one."""


@dataclass(frozen=True)
class Record:
    """One file: how it came to be, and its lines by column."""

    name: str
    facts: Mapping[str, str]
    lines: tuple[Mapping[str, str], ...]

    @property
    def text(self) -> str:
        """The lines as the CSV that they are, without the facts."""
        file = io.StringIO()
        writer = csv.DictWriter(file, list(self.lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.lines)
        return file.getvalue()


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every benchmark takes to write such a file."""
    parser.add_argument("--save", metavar="NAME", help="write measured/NAME.csv, as the READMEs quote it")
    parser.add_argument("--commit", help="the commit of these sources, where git is not there to say so")


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends a run at once whose file could not be written at its end."""
    if options.save:
        try:
            facts_here(options.commit)
        except RecordError as error:
            parser.error(str(error))
        if not re.fullmatch(r"\w+", options.save):
            parser.error(f"`--save {options.save}`: a name of letters, digits and _, not a path")


def body(text: str) -> Iterable[str]:
    """The lines of a CSV without its facts; of one that has none, all."""
    return (line for line in text.splitlines(keepends=True) if not line.startswith("# "))


def read(path: Path) -> Record:
    """A file as it was written. Raises RecordError where it lacks a fact."""
    text = path.read_text(encoding="utf-8")
    facts = {found[1]: found[2] for found in re.finditer(r"^# (\w+): (.*)$", text, re.MULTILINE)}
    lacking = [name for name in FACTS if not facts.get(name) or UNKNOWN in facts[name]]
    if lacking:
        raise RecordError(f"{path.name} does not say its {', '.join(lacking)}")
    lines = tuple(csv.DictReader(body(text)))
    if not lines:
        raise RecordError(f"{path.name} has no lines")
    return Record(path.stem, {name: facts[name] for name in FACTS}, lines)


def write(folder: Path, name: str, facts: Mapping[str, str], text: str) -> Path:
    """Facts and CSV in one file; an older one of that name is replaced at once."""
    if set(facts) != set(FACTS) or not all(fact and UNKNOWN not in fact for fact in facts.values()):
        raise RecordError(f"{name}: expected the facts {', '.join(FACTS)}")
    if not re.fullmatch(r"\w+", name):
        raise RecordError(f"`{name}` is no name of a file: letters, digits and _ only")
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.csv"
    draft = folder / f".{name}.draft"
    draft.write_text("".join(f"# {key}: {facts[key]}\n" for key in FACTS) + text, encoding="utf-8")
    draft.replace(path)
    return path


def save(options: argparse.Namespace, text: str, more: str = "") -> None:
    """What `--save` asks for: this run's CSV with this run's facts. `more`: the end of the name of a second file."""
    path = write(MEASURED, options.save + more, facts_here(options.commit), text)
    print(f"saved {path.relative_to(ROOT)}")


def save_lines(
    options: argparse.Namespace, columns: Sequence[str], lines: Iterable[Sequence[object]], more: str = ""
) -> None:
    """As `save`, of lines."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(lines)
    save(options, file.getvalue(), more)


# --- facts ------------------------------------------------------------------------------------------------------------


def facts_here(commit: str | None = None) -> dict[str, str]:
    """Of this process and its machine. Raises RecordError where nobody says which commit this is."""
    found = {
        "commit": commit or commit_here(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "command": command_line(),
        "environment": environment(os.environ),
        "cpu": f"{len(os.sched_getaffinity(0))} x {_cpu()}",
        "python": platform.python_version(),
        "cupy": _version("cupy-cuda13x"),
        "torch": _version("torch"),
    }
    return found | _of_gpus()


def commit_here() -> str:
    commit = _said("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    if not commit:
        raise RecordError("which commit is this? git does not know; --commit says it")
    changed = _said("git", "-C", str(ROOT), "status", "--porcelain", "--", ".", ":!benchmarks/measured")
    return f"{commit} with changes" if changed else commit


def command_line() -> str:
    """As it would be typed: torchrun, where it has started this."""
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    given = sys.argv[1:]
    if "--commit" in given:
        at = given.index("--commit")
        del given[at : at + 2]
    ranks = os.environ.get("LOCAL_WORLD_SIZE")
    start = ["torchrun", "--nproc-per-node", ranks] if ranks else ["python"]
    return shlex.join([*start, name, *given])


def environment(variables: Mapping[str, str]) -> str:
    told = [
        f"{name}={value}"
        for name, value in sorted(variables.items())
        if name.startswith(LOUD) and not name.endswith(QUIET)
    ]
    return " ".join(told) or NONE


def _of_gpus() -> dict[str, str]:
    nothing = dict.fromkeys(("gpus", "link", "driver", "cuda", "nccl"), NONE)
    if "torch" not in sys.modules:  # a run that has not needed it has no GPU
        return nothing
    import torch

    if not torch.cuda.is_available():
        return nothing
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    have = torch.cuda.device_count()
    return {
        "gpus": f"{count}{f' of {have}' if have > count else ''} x {torch.cuda.get_device_name()}",
        "link": _link(_said("nvidia-smi", "nvlink", "--status", "-i", "0")),
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0") or "unknown",
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _link(status: str) -> str:
    """From what nvidia-smi says of the links of one GPU."""
    rates = re.findall(r"Link \d+: ([\d.]+ GB/s)", status)
    if not rates:
        return "no NVLink that the driver tells of"
    return " and ".join(f"{rates.count(rate)} x {rate} NVLink" for rate in dict.fromkeys(rates))


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return NONE


def _said(*command: str) -> str:
    """The output of a command; nothing where there is no such command or it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
