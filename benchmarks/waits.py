"""Compares the two orders of groups on tasks whose tool calls wait 0.1 to 30 seconds: the time until training reaches a success rate.

    python benchmarks/waits.py --seeds 0 1 2

The quickstart's tasks and policy. The wait of a task is Pareto-distributed (tail index 0.5, cut off at 30 s) and a function of its id;
each call of `python` sleeps that long in the sandbox, which costs no CPU time. Held-out tasks do not wait. Both orders of a seed run at
the same time, so that they share the machine equally. A finished run is read and not repeated. Prints a Markdown table:

    seconds         from the start of the training until the mean reward of the last `--window` steps is at least `--success`
    steps           learner steps until then
    all steps       seconds of the complete training
    held-out        greedy success rate on held-out tasks after the last step
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agentrl.agent.tools import PYTHON  # noqa: E402
from agentrl.protocols import Sandbox  # noqa: E402
from agentrl.records import ExecResult, Split, Task  # noqa: E402
from recipes.quickstart import recipe as quickstart  # noqa: E402
from sandboxes.tables import Tables  # noqa: E402

TAIL, SHORTEST_S, LONGEST_S = 0.5, 0.1, 30.0
WAIT_FILE = "wait.txt"
ORDERS = ("in_order", "oldest_first")


async def _wait_and_run(sandbox: Sandbox, code: str, *, timeout_s: float, output_bytes: int) -> ExecResult:
    sleep = f"import time; time.sleep(float(open({WAIT_FILE!r}).read()))\n"
    return await sandbox.python(sleep + code, timeout_s=timeout_s, output_bytes=output_bytes)


python = replace(PYTHON, run=_wait_and_run)
"""The tool `python`, which first sleeps in the sandbox for the seconds in the task's `WAIT_FILE`."""


class WaitingTables(Tables):
    """The family `tables`, whose training tasks wait in each call of `python`."""

    def task(self, split: Split, index: int) -> Task:
        task = super().task(split, index)
        if split is not Split.TRAIN:
            return task
        limits = replace(task.limits, tool_timeout_s=2 * LONGEST_S, wall_s=300.0)
        files = {**task.files, WAIT_FILE: f"{wait_s(task.id):.3f}"}
        return replace(task, files=files, limits=limits, tools=("benchmarks.waits:python", "submit"))


def wait_s(task_id: str) -> float:
    """Returns the wait of each tool call of a task."""
    return min(SHORTEST_S * Random(f"wait:{task_id}").paretovariate(TAIL), LONGEST_S)


recipe = quickstart.but(
    {
        "name": "waits",
        "steps": 20,
        "max_staleness": 1,
        "tasks.family": "benchmarks.waits:WaitingTables",
        "rollout.groups_per_step": 8,
        "rollout.group.size": 4,
        "rollout.concurrency": 96,
        "evaluation.heldout_real": 0,
    }
)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The reward of each step of a finished run, and the seconds from the start of the training until its version served."""

    rewards: tuple[float, ...]
    seconds: tuple[float, ...]
    heldout: float

    @classmethod
    def of(cls, folder: Path) -> Curve:
        """Reads a finished run."""
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        start = steps[0]["time"] - steps[0]["step_s"]
        return cls(
            rewards=tuple(step["reward_mean"] for step in steps),
            seconds=tuple(step["time"] - start for step in steps),
            heldout=json.loads((folder / "summary.json").read_text())["heldout_after"]["value"],
        )

    def steps_to(self, success: float, *, window: int) -> int | None:
        """Returns the number of steps until the mean reward of the last `window` steps is at least `success`; None if it never is."""
        means = (statistics.fmean(self.rewards[end - window : end]) for end in range(window, len(self.rewards) + 1))
        return next((end for end, mean in enumerate(means, start=window) if mean >= success), None)


def run_seed(seed: int, runs: Path, overrides: list[str]) -> dict[str, Curve]:
    """Trains with both orders at the same time. Returns order -> curve."""
    running = {}
    for order in ORDERS:
        folder = runs / f"{order}-{seed}"
        summary = folder / "summary.json"
        if summary.exists() and json.loads(summary.read_text())["finished"]:
            continue
        keys = [f"seed={seed}", f"order={order}", *overrides]
        command = [sys.executable, "-m", "agentrl", "train", __file__, *keys, "--run-dir", str(folder)]
        running[order] = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr)
    if failed := [order for order, process in running.items() if process.wait()]:
        sys.exit(f"error: seed {seed}: {', '.join(failed)} failed\nfix: read the log files in {runs}")
    return {order: Curve.of(runs / f"{order}-{seed}") for order in ORDERS}


def row(seed: int, curves: dict[str, Curve], *, success: float, window: int) -> str:
    """Returns the table row of a seed."""
    cells, times = [str(seed)], []
    for order in ORDERS:
        curve = curves[order]
        steps = curve.steps_to(success, window=window)
        times.append(None if steps is None else curve.seconds[steps - 1])
        cells.append("not reached" if steps is None else f"{times[-1]:.0f} s ({steps})")
    cells.append("" if None in times else f"{times[0] / times[1]:.1f}")
    cells += [f"{curves[order].seconds[-1]:.0f} s" for order in ORDERS]
    cells += [f"{curves[order].heldout:.2f}" for order in ORDERS]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--success", type=float, default=0.7)
    parser.add_argument("--window", type=int, default=4)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "waits", help="parent folder of the run folders")
    parser.add_argument("overrides", nargs="*", help="recipe overrides, such as steps=40")
    args = parser.parse_args()
    print("| seed | `in_order`, seconds (steps) | `oldest_first` | ratio | all steps | all steps | held-out | held-out |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for seed in args.seeds:
        print(row(seed, run_seed(seed, args.runs, args.overrides), success=args.success, window=args.window), flush=True)


if __name__ == "__main__":
    main()
