"""Measures the cost of a cluster: the quickstart on this machine without Ray, on one Ray node, and on three hosts, in turn.

    python benchmarks/cluster_step.py                                          # 3 rounds of 6 steps, without Ray and on one Ray node
    python benchmarks/cluster_step.py --ways machine hosts --rounds 1 --steps 24 --complete

All have the same cores. The hosts are network namespaces with their own addresses and disks: driver and Redis; server; learner and worker.
The runs of a round have the same seed, and the order alternates, because the speed of a shared machine changes. The first step of a run is
not counted: servers and learner warm up. Prints Markdown: seconds per step and of the run, and the ratios to this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.cluster_demo import PRIORITY, RESOURCES, Cluster  # noqa: E402
from tests.cluster.hosts import hosts  # noqa: E402
from tests.cluster.ray_nodes import running  # noqa: E402

WAYS = ("machine", "node", "hosts")
SHORT = ("rollout.groups_per_step=8", "evaluation.heldout=0", "evaluation.heldout_real=0", "evaluation.sampling.temperature=1.0")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One run: seconds of its steps without the first, and of the run; its success on held-out tasks, None if it was not measured."""

    steps: list[float]
    run_s: float
    success: float | None


@contextmanager
def started(way: str, runs: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Yields the prefix of a command, and options, that make a run use a way of placing its parts."""
    if way == "machine":
        yield [], []
    elif way == "node":
        with running() as nodes:
            nodes.add(8)
            yield [], ["--cluster", nodes.address]
    else:
        with hosts(3) as (head, server, learner):
            cluster = Cluster(head, runs)
            cluster.wait_for(1)
            for number, (host, resource) in enumerate(((server, {"serves": 1}), (learner, {"trains": 2})), start=2):
                cluster.add(host, **resource)
                cluster.wait_for(number)
            yield head.command(), [f"cluster.resources={json.dumps(RESOURCES)}", "store=redis", "--cluster", cluster.address]


def time_run(way: str, runs: Path, overrides: list[str]) -> Timing:
    """Runs the quickstart."""
    runs.mkdir()
    with started(way, runs) as (prefix, options):
        command = [*prefix, sys.executable, "-m", "agentrl", "train", "recipes/quickstart.py", "rollout.workers=1", *overrides, *options]
        start = time.monotonic()
        completed = subprocess.run(
            [*command, "--run-dir", str(runs / "run"), "--sandbox", "bubblewrap"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        run_s = time.monotonic() - start
    if completed.returncode not in (0, 1):  # 1: it learned too little, which says nothing about time
        raise SystemExit(completed.stderr[-4000:] + completed.stdout[-4000:])
    lines = [json.loads(line) for line in (runs / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluations = json.loads(path.read_text()) if (path := runs / "run" / "evaluations.json").exists() else {}
    success = evaluations["after"]["heldout"]["value"] if "heldout" in evaluations.get("after", {}) else None
    return Timing(steps=[float(line["step_s"]) for line in lines if "step_s" in line][1:], run_s=run_s, success=success)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--steps", type=int, default=6, help="steps per run (default: 6)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:2])
    parser.add_argument("--complete", action="store_true", help="run the complete quickstart, with evaluations, instead of small steps")
    args = parser.parse_args()
    os.environ |= PRIORITY
    timings: dict[str, list[Timing]] = {way: [] for way in args.ways}
    loads: list[float] = []
    for number in range(args.rounds):
        for way in args.ways[:: 1 if number % 2 else -1]:
            loads.append(os.getloadavg()[0])
            overrides = [f"steps={args.steps}", f"seed={number}", *([] if args.complete else SHORT)]
            with tempfile.TemporaryDirectory(prefix="agentrl-cluster-") as folder:
                timings[way].append(time_run(way, Path(folder) / "runs", overrides))
            print(f"{way}: {timings[way][-1]}", file=sys.stderr, flush=True)
    print(f"{args.rounds} rounds of {args.steps} steps; load {min(loads):.1f} to {max(loads):.1f}\n")
    print("| parts on | step, median s | run, median s | held-out success |\n| --- | --- | --- | --- |")
    for way, runs in timings.items():
        success = ", ".join(f"{run.success:.2f}" for run in runs if run.success is not None) or "-"
        step, run_s = statistics.median(value for run in runs for value in run.steps), statistics.median(run.run_s for run in runs)
        print(f"| {way} | {step:.2f} | {run_s:.0f} | {success} |")
    for way in args.ways[1:]:
        pairs = list(zip(timings[args.ways[0]], timings[way], strict=True))
        steps = [statistics.median(run.steps) / statistics.median(base.steps) for base, run in pairs]
        wholes = [run.run_s / base.run_s for base, run in pairs]
        print(f"\n{way} / {args.ways[0]}, per round: steps {_shown(steps)}; runs {_shown(wholes)}")


def _shown(ratios: list[float]) -> str:
    return f"{', '.join(f'{ratio:.3f}' for ratio in ratios)} (median {statistics.median(ratios):.3f})"


if __name__ == "__main__":
    main()
