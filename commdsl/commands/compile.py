"""Turns files into a folder of kernels: NAME.cu, the text that runs, and NAME.py, importable: a torch op of a schedule,
Dispatchers of a dispatch, Metadata of a plan (which has no kernel).

Assumes nothing of the files. With no file: the shipped ones into `generated/`, for 8 ranks or the nearest number that
each admits. Does not build kernels: `--check` compares, and writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from commdsl import compiler
from commdsl.commands import dispatch_jobs, output, products
from commdsl.commands.arguments import Target, UsageError
from commdsl.commands.dispatch_jobs import DispatchJob, Proof
from commdsl.commands.jobs import Job, Outcome, jobs_of, merge, prove, prove_all
from commdsl.commands.output import Exit
from commdsl.commands.products import Product
from commdsl.commands.show import fail
from commdsl.language import diagnostics
from commdsl.language.diagnostics import CommError
from commdsl.language.syntax import File
from commdsl.machine import resources

MOST_RANKS = 16


@dataclass(frozen=True, eq=False)
class Found:
    """What came of all files: schedules, then dispatches and plans."""

    outcomes: tuple[Outcome, ...]
    proofs: tuple[Proof, ...]

    @property
    def has_failed(self) -> bool:
        return None in [*(one.checked for one in self.outcomes), *(one.checked for one in self.proofs)]

    @property
    def diagnostics(self) -> tuple[diagnostics.Diagnostic, ...]:
        return merge((*self.outcomes, *self.proofs))

    def products(self, folder: Path, target: Target) -> list[Product]:
        found = [
            product for one in self.outcomes for product in products.of_schedule(one, source_of(one), folder, target)
        ]
        found += [product for one in self.proofs for product in products.of_proof(one, source_of(one), folder, target)]
        products.refuse_twins(found)
        return found


def compile(
    paths: tuple[Path, ...], target: Target, name: str | None, out: Path | None, *, check: bool, as_json: bool
) -> Exit:
    """Writes, or with `check` compares, the files of every declaration, or of the one that is named."""
    try:
        found = given(paths, target, name) if paths else shipped_all(target)
    except CommError as error:
        return fail(error.diagnostics, as_json=as_json)
    if found.has_failed:
        return fail(found.diagnostics, as_json=as_json)
    folder = out or (generated_folder() if not paths else Path())
    made = found.products(folder, target)
    stale = [product for product in made if not product.is_current]
    extra = sorted(set(folder.glob("*.cu")) | set(folder.glob("*.py"))) if not paths else []
    left_over = [path for path in extra if path not in {product.path for product in made}]
    if not check:
        folder.mkdir(parents=True, exist_ok=True)
        for product in stale:
            product.path.write_text(product.text, encoding="utf-8")
        for path in left_over:
            path.unlink()
    changed = [str(product.path) for product in stale] + [str(path) for path in left_over]
    if as_json:
        listed = [diagnostics.to_json(d) for d in found.diagnostics]
        output.say_json({"files": [str(one.path) for one in made], "changed": changed, "diagnostics": listed})
    else:
        for name_of_file in changed:
            output.say(f"{'differs' if check else 'wrote'} {name_of_file}")
        output.say(f"{output.count(len(made), 'file')} {'compared' if check else 'up to date'} in {folder}")
        output.show_diagnostics(found.diagnostics)
    return Exit.DIAGNOSTICS if check and changed else Exit.FINE


def given(paths: tuple[Path, ...], target: Target, name: str | None) -> Found:
    """Every declaration of the files, or the one of that name."""
    if target.is_sweep:
        raise UsageError("compile writes one kernel per declaration: give --ranks one number")
    jobs: list[Job] = []
    further: list[dispatch_jobs.AnyJob] = []
    for path in paths:
        files = compiler.read(path)
        others = dispatch_jobs.jobs_of(path, files, target, name)
        further += others
        jobs += [] if name is not None and others else jobs_of(path, files, target, name)
    refuse_idle(target, bool(jobs), any(isinstance(job, DispatchJob) for job in further))
    if not jobs and not further:
        raise UsageError("nothing to compile: the files declare no schedule, dispatch or plan")
    outcomes, proofs = [], []
    with output.progress("compiling", len(jobs) + len(further)) as advance:
        for outcome in prove_all(jobs, target, emit=True):
            outcomes.append(outcome)
            advance(f"compiling {outcome.job.schedule}")
        for job in further:
            proofs.append(dispatch_jobs.prove(job, target, emit=True))
            advance(f"compiling {job.name}")
    return Found(tuple(outcomes), tuple(proofs))


def refuse_idle(target: Target, has_schedules: bool, has_dispatches: bool) -> None:
    """Raises UsageError for words that nothing listens to."""
    if has_schedules or has_dispatches:
        return
    if target.params or target.tune:
        raise UsageError("parameters and --tune are for schedules and dispatches, and none is compiled")
    if target.ranks or target.on:
        raise UsageError("a plan says itself for how many ranks it is: leave --ranks and --on out")


def shipped_all(target: Target) -> Found:
    """Every shipped declaration that is built; a schedule for 8 ranks or the nearest number it admits, the smaller of
    two.
    """
    if target != Target(None, None, ()):
        raise UsageError(
            "generated/ holds the shipped files as they are: no --ranks, --on, --tune or parameters without a file"
        )
    wanted = [(shown, path) for shown, path in shipped()]
    outcomes: list[Outcome] = []
    proofs: list[Proof] = []
    with output.progress("compiling", len(wanted)) as advance:
        for shown, path in wanted:
            files = compiler.read_text(path.read_text(encoding="utf-8"), shown, path.parent)
            for decl in compiler.schedules(files):
                outcomes.append(nearest(Path(shown), files, decl.name.text, target))
            for job in dispatch_jobs.jobs_of(Path(shown), files, target):
                proofs.append(dispatch_jobs.prove(job, target, emit=True))
            advance(f"compiling {path.stem}")
    return Found(tuple(filter(is_built, outcomes)), tuple(filter(is_built, proofs)))


def is_built(found: Outcome | Proof) -> bool:
    """Whether it is more than a declaration whose kernel is still to come (C590)."""
    return found.checked is not None or {one.code for one in found.diagnostics} != {"C590"}


def shipped() -> tuple[tuple[str, Path], ...]:
    """The shipped files by the name they have in a checkout; topologies come along and declare nothing to compile."""
    folder = resources.data_dir("schedules")
    return tuple((f"schedules/{path.relative_to(folder).as_posix()}", path) for path in sorted(folder.rglob("*.comm")))


def nearest(path: Path, files: tuple[File, ...], name: str, target: Target) -> Outcome:
    default = compiler.DEFAULT_RANKS
    for ranks in sorted(range(2, MOST_RANKS + 1), key=lambda ranks: (abs(ranks - default), ranks)):
        outcome = prove(Job(path, files, name, ranks), target, emit=True)
        if not outcome.is_left_out:
            return outcome
    return outcome


def generated_folder() -> Path:
    folder = resources.data_dir("schedules").parent / "generated"
    if not (folder.parent / "pyproject.toml").is_file():
        raise UsageError("generated/ belongs to a checkout of commdsl: name the files to compile")
    return folder


def source_of(found: Outcome | Proof) -> Path:
    """Where the file of an outcome lies; shipped ones go by the name they have in a checkout."""
    return dict(shipped()).get(found.job.path.as_posix(), found.job.path).resolve()
