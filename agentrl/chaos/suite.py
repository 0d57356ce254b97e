"""Injects cases one after another into one or two runs, then checks each run."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl.base.numbers import plural
from agentrl.chaos.cases import Case
from agentrl.chaos.checks import orphaned_sandboxes, problems
from agentrl.chaos.driver import small_disk
from agentrl.chaos.parts import Injected
from agentrl.chaos.subject import SMALL, ChaosError, Subject
from agentrl.chaos.workers import WORKERS

STEPS_PER_CASE = 4
_CASE_S = 60.0  # expected duration of a case, before the first one is measured
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one case, or of the verification after all cases of a run."""

    case: str
    witness: str = ""
    recovered_s: float | None = None
    bound_s: float | None = None
    problem: str = ""
    skipped: str = ""  # why the fault was not injected

    @property
    def ok(self) -> bool:
        """Whether the run survived the fault and recovered within the bound. True for a skipped case."""
        return not self.problem

    def as_data(self) -> dict[str, Any]:
        """Returns the fields and the property `ok` as JSON data."""
        return asdict(self) | {"ok": self.ok}


def run_cases(
    cases: Sequence[Case],
    *,
    work: Path,
    backend: str,
    slack: float = 1.0,
    report: Report = print,
    overrides: Sequence[str] = SMALL,
    examine: Callable[[Subject], None] = lambda run: None,
) -> list[Result]:
    """Injects cases into a run in the folder `work`, and cases that need rollout workers into a second run. Returns a result for each case,
    and one for the verification of each run after its cases.

    Args:
        slack: factor for every bound, for a machine that also does other work.
        report: function that is called with text about each case.
        overrides: changes to the quickstart's recipe.
        examine: function that is called with each run after the verification.
    """
    with ExitStack() as stack:
        disk = work / "disk"
        mounted = stack.enter_context(small_disk(disk)) if any(case.needs_small_disk for case in cases) else False
        disk.mkdir(parents=True, exist_ok=True)
        if mounted:
            stack.callback(shutil.copytree, disk, work / "kept", ignore=shutil.ignore_patterns("filler"))
        results = list[Result]()
        for name, extra in (("run", ()), ("workers", WORKERS)):
            if chosen := [case for case in cases if case.needs_workers == bool(extra)]:
                steps, log = STEPS_PER_CASE * len(chosen) + 2, work / f"{name}.log"
                with closing(Subject(disk / name, steps=steps, backend=backend, log=log, overrides=(*overrides, *extra))) as run:
                    orphans = orphaned_sandboxes()
                    results += _inject_all(chosen, run, backend, mounted, slack, report)
                    report("waiting for the run to finish, then verifying its ledger")
                    results.append(_after(run, orphans))
                    examine(run)
        return results


def _inject_all(cases: Sequence[Case], run: Subject, backend: str, mounted: bool, slack: float, report: Report) -> list[Result]:
    """Starts a run and injects cases, one after another."""
    run.start()
    results, began = list[Result](), time.monotonic()
    for number, case in enumerate(cases):
        mean_s = (time.monotonic() - began) / number if number else _CASE_S
        report(f"{number + 1}/{len(cases)} {case.title}: {case.injects} About {mean_s * (len(cases) - number) / 60:.0f} min left.")
        results.append(skipped if (skipped := _skip(case, backend, mounted)) else _run_case(case, run, slack))
        report(_line(results[-1]))
    return results


def _skip(case: Case, backend: str, mounted: bool) -> Result | None:
    reason = ""
    if case.needs_small_disk and not mounted:
        reason = "mounting a small file system needs root"
    if case.needs_bubblewrap and backend != "bubblewrap":
        reason = "requires --sandbox bubblewrap"
    return Result(case=case.title, skipped=reason) if reason else None


def _run_case(case: Case, run: Subject, slack: float) -> Result:
    bound_s = None if case.bound_s is None else case.bound_s * slack
    try:
        injected = _inject(case, run)
    except (ChaosError, OSError) as error:
        return Result(case=case.title, bound_s=bound_s, problem=str(error) or repr(error))
    late = bound_s is not None and injected.recovered_s is not None and injected.recovered_s > bound_s
    return Result(
        case=case.title,
        witness=injected.witness,
        recovered_s=injected.recovered_s,
        bound_s=bound_s,
        problem=f"took {injected.recovered_s:.1f} s, more than the bound of {bound_s:.0f} s" if late else "",
    )


def _inject(case: Case, run: Subject) -> Injected:
    """Injects a case. If the run finishes before a case can be injected, adds steps and retries the case."""
    for last in (False, True):
        if run.exit_code == 0:
            run.extend(STEPS_PER_CASE)
        if run.exit_code is not None:
            run.start()
        try:
            return case.inject(run)
        except ChaosError:
            if run.exit_code != 0 or last:
                raise
    raise AssertionError("unreachable")


def _after(run: Subject, orphans: frozenset[str]) -> Result:
    """Verifies the run after all cases."""
    try:
        run.wait_for_end()
        wrong = list(problems(run, orphans=orphans))
    except ChaosError as error:
        wrong = [str(error)]
    entries = run.entries()
    episodes = sum(entry.attempts for entry in entries)
    return Result(
        case="   afterwards",
        witness=f"{plural(run.steps_done(), 'step')}, {plural(len(entries), 'group')} and {plural(episodes, 'score')} verified; "
        f"{plural(run.resumes, 'resume')}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
        problem="; ".join(wrong),
    )


def _line(result: Result) -> str:
    if result.skipped:
        return f"  skipped: {result.skipped}"
    took = "" if result.recovered_s is None else f", {result.recovered_s:.1f} s"
    return f"  FAILED: {result.problem}" if result.problem else f"  ok{took}: {result.witness}"
