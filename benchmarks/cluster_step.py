"""What a Ray cluster adds to a learner step: the same recipe with all parts on this machine, without Ray and on one Ray node, in turn.

    python benchmarks/cluster_step.py                    # 3 rounds of 6 steps
    python benchmarks/cluster_step.py --rounds 5 --steps 12

Both runs of a round have the same seed, and alternate in which comes first, because the speed of a shared machine changes. The first step
of a run is not counted: servers and learner warm up. Prints Markdown: seconds per step, their ratio, and the seconds until the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from ray.cluster_utils import Cluster

ROOT = Path(__file__).resolve().parents[1]
GIVEN = ("rollout.groups_per_step=8", "rollout.workers=1", "evaluation.heldout=0", "evaluation.heldout_real=0")


def time_steps(folder: Path, *options: str, steps: int, seed: int) -> tuple[list[float], float]:
    """Runs the recipe. Returns the seconds of each step except the first, and those until the end of the first."""
    command = [sys.executable, "-m", "agentrl", "train", "recipes/quickstart.py", f"steps={steps}", f"seed={seed}", *GIVEN]
    done = subprocess.run([*command, "--run-dir", str(folder), *options], cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 1: it learned too little, which says nothing about time
        raise SystemExit(done.stderr[-4000:])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [float(line["step_s"]) for line in lines if "step_s" in line]
    return seconds[1:], seconds[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--steps", type=int, default=6, help="steps per run (default: 6)")
    given = parser.parse_args()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "include_dashboard": False})
    ways = {"this machine": (), "one Ray node": ("--cluster", cluster.address)}
    steps, first = {name: list[float]() for name in ways}, {name: list[float]() for name in ways}
    ratios, loads = list[float](), list[float]()
    try:
        with tempfile.TemporaryDirectory(prefix="agentrl-cluster-") as folder:
            for number in range(given.rounds):
                medians = dict[str, float]()
                for name in list(ways)[:: 1 if number % 2 else -1]:
                    loads.append(os.getloadavg()[0])
                    run = Path(folder) / f"{name}-{number}"
                    seconds, start = time_steps(run, *ways[name], steps=given.steps, seed=number)
                    steps[name] += seconds
                    first[name].append(start)
                    medians[name] = statistics.median(seconds)
                ratios.append(medians["one Ray node"] / medians["this machine"])
    finally:
        cluster.shutdown()
    print(f"{given.rounds} rounds of {given.steps} steps; load {min(loads):.1f} to {max(loads):.1f}\n")
    print("| parts on | step, median s | first step, median s |\n|---|---|---|")
    for name in ways:
        print(f"| {name} | {statistics.median(steps[name]):.2f} | {statistics.median(first[name]):.1f} |")
    print(f"\nratio per round: {', '.join(f'{ratio:.3f}' for ratio in ratios)}; median {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
