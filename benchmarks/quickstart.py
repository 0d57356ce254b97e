"""Measures the quickstart on several seeds: success before and after, wall time, memory, swaps. Prints a Markdown table.

    python benchmarks/quickstart.py --seeds 0 1 2 3 4 --out docs/results.md

Each seed is one run of `recipes/quickstart.py`, or of another recipe of its family (`--recipe`), in a separate folder under `--runs`. A
finished run is read and not repeated, so an interrupted benchmark continues. Memory is the largest sum of the proportional set sizes of all
processes of the run, sampled every two seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import stored  # noqa: E402

TARGETS = (
    "Targets: held-out rises by >= 0.30 and ends >= 0.90 on every seed; real tables end >= 0.75; "
    "<= 6 minutes; < 8 GiB; stall <= 250 ms; probe <= 1e-3."
)

MEANING = (
    "The base policy saw a correct program in one demonstration of three. It samples correct programs now and then, but its most "
    "likely program is wrong. Training makes the correct one most likely; it teaches no program that the policy never saw."
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One finished run."""

    seed: int
    wall_s: float
    peak_gib: float
    summary: dict[str, Any]
    rewards: tuple[float, ...]  # mean reward of each step's training episodes


def run_seed(seed: int, recipe: Path, runs: Path, overrides: list[str]) -> Outcome:
    """Runs one seed to its end, or reads its finished run."""
    folder = runs / f"seed{seed}"
    outcome = folder / "benchmark.json"
    if not outcome.exists():
        resume = ["--resume"] if (folder / "recipe.json").exists() else []
        command = [sys.executable, str(recipe), f"seed={seed}", *overrides, "--run-dir", str(folder), *resume]
        wall_s, peak = timed(command)
        outcome.write_text(json.dumps({"wall_s": wall_s, "peak_gib": peak, "resumed": bool(resume)}))
    measured = json.loads(outcome.read_text())
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if nothing := [line["step"] for line in lines if "reward_mean" not in line]:
        sys.exit(f"error: steps {nothing} of {folder} have no scored episode\nfix: read left_out_reasons in its summary.json")
    rewards = tuple(line["reward_mean"] for line in lines)
    return Outcome(seed=seed, wall_s=measured["wall_s"], peak_gib=measured["peak_gib"], summary=summary, rewards=rewards)


def timed(command: list[str]) -> tuple[float, float]:
    """Wall seconds and peak memory (GiB) of a command and everything it starts."""
    started, peak = time.monotonic(), 0
    with subprocess.Popen(command, cwd=ROOT) as process:
        while process.poll() is None:
            peak = max(peak, tree_bytes(process.pid))
            time.sleep(2.0)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")
    return time.monotonic() - started, peak / 2**30


def tree_bytes(pid: int) -> int:
    """Proportional set size of a process and its descendants; shared pages count once."""
    total = 0
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for member in family:
        try:
            total += member.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def figures(outcome: Outcome) -> dict[str, Any]:
    """Returns the stored figures of a run."""
    rates = {key: outcome.summary[key] for key in ("heldout_before", "heldout_after", "heldout_real_before", "heldout_real_after")}
    return {"seed": outcome.seed, "minutes": outcome.wall_s / 60, "peak_gib": outcome.peak_gib, **rates}


def spread(values: Sequence[float], form: str) -> str:
    """Returns median and range."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def table(outcomes: list[Outcome]) -> str:
    """Returns a Markdown table of medians and ranges over the seeds."""
    summaries = [outcome.summary for outcome in outcomes]
    measured = {
        name: [summary[key]["value"] for summary in summaries if summary[key] is not None]  # None: evaluation.heldout_real=0
        for name, key in (
            ("held-out before", "heldout_before"),
            ("held-out after", "heldout_after"),
            ("real before", "heldout_real_before"),
            ("real after", "heldout_real_after"),
        )
    }
    measured["reward, first 3 steps"] = [statistics.fmean(outcome.rewards[:3]) for outcome in outcomes]
    measured["reward, last 3 steps"] = [statistics.fmean(outcome.rewards[-3:]) for outcome in outcomes]
    measured["minutes"] = [outcome.wall_s / 60 for outcome in outcomes]
    measured["peak GiB"] = [outcome.peak_gib for outcome in outcomes]
    rows = [[name, spread(values, ".2f")] for name, values in measured.items() if values]
    rows.append(["stall of a swap, ms, p50", spread([summary["swap_stall_ms_p50"] for summary in summaries], ".0f")])
    rows.append(["largest difference of a probe", f"{max(summary['swap_probe_max_abs_diff'] for summary in summaries):.1e}"])
    left_out, episodes = (sum(summary[key] for summary in summaries) for key in ("episodes_left_out", "episodes"))
    rows.append(["excluded episodes", f"{left_out} of {episodes}"])
    head = [["figure", f"median (range) of {len(outcomes)} seeds"], ["---", "---"]]
    return "\n".join("| " + " | ".join(row) + " |" for row in [*head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.py")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "benchmark", help="parent folder of the run folders")
    parser.add_argument("--out", type=Path, help="also write the table to its section of this page, and the figures to docs/results")
    parser.add_argument("overrides", nargs="*", help="recipe overrides, such as sandbox.backend=bubblewrap")
    args = parser.parse_args()
    command = f"python benchmarks/quickstart.py --seeds {' '.join(map(str, args.seeds))} {' '.join(args.overrides)}".strip()
    origin = stored.origin(command, [*stored.LOOP, "recipes/quickstart.py", "sandboxes/tables"], args.seeds)
    outcomes = [run_seed(seed, args.recipe.resolve(), args.runs, args.overrides) for seed in args.seeds]
    versions = ", ".join(f"{name} {number}" for name, number in outcomes[0].summary["versions"].items())
    memory = psutil.virtual_memory().total / 2**30
    python = platform.python_version()
    machine = f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.machine()}, Python {python}"
    backend = outcomes[0].summary["sandbox_backend"]
    text = "\n\n".join(
        [
            f"Command: `{command}`. Machine: {machine}; sandbox: {backend}. {versions}.",
            "Before and after are success rates on held-out tasks, one greedy attempt a task. Rewards are "
            "means over training episodes, sampled at temperature 1.",
            table(outcomes),
            TARGETS,
            MEANING,
        ]
    )
    print(text)
    if args.out:
        stored.put(args.out, "quickstart", text)
        stored.keep("quickstart", origin, runs=[figures(outcome) for outcome in outcomes])


if __name__ == "__main__":
    main()
