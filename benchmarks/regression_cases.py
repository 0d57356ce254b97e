"""Measures how long 200 regression cases take, from the command to its exit code. The target is under 3 minutes on two cores.

    python benchmarks/regression_cases.py
    python benchmarks/regression_cases.py --backend bubblewrap --times 3 --out docs/results.md

The cases are held-out questions of the quickstart's family. Each takes one or two turns of Python in a sandbox. The policy is the
quickstart's base policy, which answers some questions wrong. `agentrl eval SUITE --policy FOLDER` evaluates it in a separate process,
including the server start. Run it on an idle machine. The exit status is 1 if it took longer or an attempt has no score.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agentrl.failure.case import Case, save_case  # noqa: E402
from agentrl.records import Split  # noqa: E402
from benchmarks import stored  # noqa: E402
from sandboxes.tables import Tables  # noqa: E402

MODEL = ROOT / "recipes" / "models" / "tables-base"
TARGET_S = 180.0
SEED = 4_001  # of the tables: neither those of the policy's training nor those of the quickstart


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One evaluation of the suite."""

    command_s: float  # from the command to its exit code
    cases_s: float  # the part of it from the first question to the last score
    passed: int
    unscored: int
    attempts: int

    @property
    def ok(self) -> bool:
        return self.command_s < TARGET_S and not self.unscored


def make_suite(folder: Path, count: int) -> None:
    """Creates a suite of `count` held-out questions with one attempt each."""
    family = Tables(seed=SEED)
    for number in range(count):
        save_case(folder, Case(id=f"case-{number:04d}", task=family.task(Split.HELDOUT, number)))


def timed(suite: Path, run: Path, overrides: list[str]) -> Timed:
    """Evaluates the suite once. Raises `SystemExit` if the command failed."""
    command = [sys.executable, "-m", "agentrl", "eval", str(suite), *overrides, "--policy", str(MODEL), "--run-dir", str(run), "--json"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    began = time.monotonic()
    ended = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=False)
    command_s = time.monotonic() - began
    if ended.returncode not in (0, 1) or not ended.stdout.strip():
        raise SystemExit(f"{' '.join(command)} ended with exit code {ended.returncode}\n{ended.stdout[-2000:]}")
    (suite_result,) = json.loads(ended.stdout.splitlines()[-1])["suites"]
    figures, verdicts = suite_result["figures"], suite_result["verdicts"]
    return Timed(
        command_s=command_s,
        cases_s=figures["wall_s"],
        passed=verdicts["passed"],
        unscored=figures["unscored"],
        attempts=figures["attempts"],
    )


def table(runs: list[Timed], count: int, backend: str) -> str:
    """Markdown: a row for each evaluation."""
    rows = [
        f"| {number} | {run.command_s:.0f} | {run.cases_s:.0f} | {run.attempts / run.cases_s:.1f} | {run.passed} | {run.unscored} |"
        for number, run in enumerate(runs, 1)
    ]
    median_s = statistics.median(run.command_s for run in runs)
    return "\n".join(
        [
            f"{count} cases on the quickstart's base policy, sandboxes: {backend}, {os.cpu_count()} cores."
            f" Median {median_s:.0f} s; target: under {TARGET_S:.0f} s.",
            "",
            "| evaluation | command, s | cases, s | cases a second | passed | unscored |",
            "| --- | --- | --- | --- | --- | --- |",
            *rows,
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--times", type=int, default=1, help="number of evaluations, one after the other")
    parser.add_argument("--backend", default="auto", help="sandbox backend: auto, docker or bubblewrap")
    parser.add_argument("--out", type=Path, help="also write the table to its section of this page")
    parser.add_argument("overrides", nargs="*", help="additional overrides, such as rollout.concurrency=32")
    args = parser.parse_args()
    (ROOT / "runs").mkdir(exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="regression-cases-", dir=ROOT / "runs"))  # in the project, whose images and verifiers they name
    try:
        make_suite(work / "suite", args.cases)
        overrides = [f"sandbox.backend={args.backend}", "evaluation.sampling.temperature=0", *args.overrides]
        runs = [timed(work / "suite", work / f"run{number}", overrides) for number in range(args.times)]
    finally:
        shutil.rmtree(work, ignore_errors=True)
    text = table(runs, args.cases, args.backend)
    print(text)
    if args.out:
        stored.put(args.out, "regression_cases", text)
    return int(not all(run.ok for run in runs))


if __name__ == "__main__":
    sys.exit(main())
