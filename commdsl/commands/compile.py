"""Turns files into a folder of kernels: NAME.cu, the text that runs, and NAME.py, importable: a torch op of a schedule,
Dispatchers of a dispatch, Metadata of a plan (which has no kernel).

Assumes nothing of the files. With no file: the shipped ones into `generated/`. Does not build kernels, but for
the architectures that are named: `--check` compares, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from commdsl import compiler
from commdsl.commands import cubins, output, products
from commdsl.commands.arguments import Target, UsageError
from commdsl.commands.cubins import Cubin, Variants
from commdsl.commands.jobs import Job, Outcome, jobs_of, merge, prove, prove_all, read_jobs, some
from commdsl.commands.output import Exit
from commdsl.commands.show import fail
from commdsl.language import diagnostics
from commdsl.language.diagnostics import CommError
from commdsl.language.syntax import PlanDecl
from commdsl.machine import resources


def compile(
    paths: tuple[Path, ...],
    target: Target,
    name: str | None,
    out: Path | None,
    variants: Variants,
    *,
    check: bool,
    as_json: bool,
) -> Exit:
    """Writes, or with `check` compares, the files of every declaration, or of the one that is named; with `variants`
    what is built of their kernels, too.
    """
    try:
        outcomes = given(paths, target, name) if paths else shipped_all(target)
    except CommError as error:
        return fail(error.diagnostics, as_json=as_json)
    found = merge(outcomes)
    if any(outcome.checked is None for outcome in outcomes):
        return fail(found, as_json=as_json)
    folder = out or (generated_folder() if not paths else Path())
    made = [file for one, built in built_ahead(outcomes, variants) for file in products.of(one, folder, target, built)]
    products.refuse_twins(made)
    stale = [product for product in made if not product.is_current]
    extra = sorted(set(folder.glob("*.cu")) | set(folder.glob("*.py"))) if not paths else []
    left_over = [path for path in extra if path not in {product.path for product in made}]
    if not check:
        folder.mkdir(parents=True, exist_ok=True)
        for product in stale:
            product.path.write_bytes(product.content)
        for path in left_over:
            path.unlink()
    changed = [str(product.path) for product in stale] + [str(path) for path in left_over]
    if as_json:
        listed = [diagnostics.to_json(d) for d in found]
        output.say_json({"files": [str(one.path) for one in made], "changed": changed, "diagnostics": listed})
    else:
        for name_of_file in changed:
            output.say(f"{'differs' if check else 'wrote'} {name_of_file}")
        output.say(f"{output.count(len(made), 'file')} {'compared' if check else 'up to date'} in {folder}")
        output.show_diagnostics(found)
    return Exit.DIAGNOSTICS if check and changed else Exit.FINE


def built_ahead(outcomes: tuple[Outcome, ...], variants: Variants) -> Iterator[tuple[Outcome, tuple[Cubin, ...]]]:
    """Each outcome, and what is built of its kernels."""
    with output.progress("building") as advance:
        for outcome in outcomes:
            assert outcome.checked is not None
            found: list[Cubin] = []
            for cubin in cubins.build(outcome.job.name, outcome.checked, variants):
                found.append(cubin)
                advance(f"building {outcome.job.name}")
            yield outcome, tuple(found)


def given(paths: tuple[Path, ...], target: Target, name: str | None) -> tuple[Outcome, ...]:
    """Every declaration of the files, or the one of that name."""
    if target.is_sweep:
        raise UsageError("compile writes one kernel per declaration: give --ranks one number")
    jobs = read_jobs(paths, target, name)
    some(jobs, "compile")
    refuse_idle(target, jobs)
    outcomes: list[Outcome] = []
    with output.progress("compiling", len(jobs)) as advance:
        for outcome in prove_all(jobs, target, emit=True):
            outcomes.append(outcome)
            advance(f"compiling {outcome.job.name}")
    return tuple(outcomes)


def refuse_idle(target: Target, jobs: tuple[Job, ...]) -> None:
    """Raises UsageError for words that nothing listens to."""
    if any(not isinstance(job.decl, PlanDecl) for job in jobs):
        return
    if target.params or target.tune:
        raise UsageError("parameters and --tune are for schedules and dispatches, and none is compiled")
    if target.ranks or target.on:
        raise UsageError("a plan says itself for how many ranks it is: leave --ranks and --on out")


def shipped_all(target: Target) -> tuple[Outcome, ...]:
    """Every shipped declaration that is built, for as many ranks as any command takes unless said."""
    if target != Target(None, None, ()):
        raise UsageError(
            "generated/ holds the shipped files as they are: no --ranks, --on, --tune or parameters without a file"
        )
    outcomes: list[Outcome] = []
    with output.progress("compiling", len(shipped())) as advance:
        for shown, path in shipped():
            files = compiler.read_text(path.read_text(encoding="utf-8"), shown, path.parent)
            outcomes += [prove(job, target, emit=True) for job in jobs_of(Path(shown), files, target)]
            advance(f"compiling {path.stem}")
    return tuple(filter(is_built, outcomes))


def is_built(found: Outcome) -> bool:
    """Whether it is more than a declaration whose kernel is still to come (C590)."""
    return found.checked is not None or {one.code for one in found.diagnostics} != {"C590"}


def shipped() -> tuple[tuple[str, Path], ...]:
    """The shipped files by the name they have in a checkout; topologies come along and declare nothing to compile."""
    return tuple((str(resources.shipped_name(path)), path) for path in resources.shipped_files())


def generated_folder() -> Path:
    folder = resources.data_dir("schedules").parent / "generated"
    if not (folder.parent / "pyproject.toml").is_file():
        raise UsageError("generated/ belongs to a checkout of commdsl: name the files to compile")
    return folder
