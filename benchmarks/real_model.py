"""Measures the recipes of a pretrained model on several seeds: success by kind with and without the tool, time by activity, memory.

    python benchmarks/real_model.py                                          # recipes/smollm2.py, seeds 0 1 2
    python benchmarks/real_model.py --recipe recipes/smollm2_lora.py --seeds 0
    python benchmarks/real_model.py --page docs/a-real-model.md              # writes table and picture from stored results; runs nothing

Each seed is one run in a separate folder under `--runs`, then an evaluation of its model without the tool. Its result is stored as a JSON
file in `--out`. A seed with a stored result is not repeated, and an interrupted run continues. Memory is the largest sum of the
proportional set sizes of all processes of the run, sampled every two seconds, without the Docker daemon. The exit status is 1 if a target
is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agentrl.base.files import write_atomically  # noqa: E402
from benchmarks import stored  # noqa: E402
from benchmarks.contest.ours import parts  # noqa: E402
from benchmarks.quickstart import timed  # noqa: E402

RECIPES = ("recipes/smollm2.py", "recipes/smollm2_lora.py")
NO_TOOL = "evals/smollm2_no_tool.py"
BEGIN, END = "<!-- made by benchmarks/real_model.py --page: begin -->", "<!-- made by benchmarks/real_model.py --page: end -->"
MINUTES, GIB, AFTER, KIND_AFTER, KIND_BEFORE = 45.0, 12.0, 0.90, 0.85, 0.02
SUMMARY = ("steps", "tokens_trained", "swap_probe_max_abs_diff", "versions", "sandbox_backend")
PARTS = {"rollout": "rollouts", "update": "update", "sync": "checkpoint, publishing, swap"}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One finished run: its summary, its evaluations by split and kind, the figures of its steps, and its model without the tool."""

    recipe: str
    seed: int
    wall_s: float
    peak_gib: float
    note: str
    origin: dict[str, Any]  # of `benchmarks.stored.origin`
    parts: dict[str, float]
    summary: dict[str, Any]
    phases: dict[str, Any]
    steps: list[dict[str, Any]]
    no_tool: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{Path(self.recipe).stem}, seed {self.seed}"

    def rate(self, phase: str, split: str) -> dict[str, float]:
        return self.phases[phase][split]  # type: ignore[no-any-return]

    def missed(self) -> list[str]:
        """Describes the targets that this run missed."""
        misses = []
        if self.wall_s > MINUTES * 60:
            misses.append(f"{self.wall_s / 60:.1f} minutes")
        if self.peak_gib > GIB:
            misses.append(f"{self.peak_gib:.1f} GiB")
        if self.rate("after", "heldout")["value"] < AFTER:
            misses.append(f"held-out {self.rate('after', 'heldout')['value']:.2f}")
        kinds = self.phases["before"]["heldout"]["by_kind"], self.phases["after"]["heldout"]["by_kind"]
        for kind, before in kinds[0].items():
            if before["value"] > KIND_BEFORE and kinds[1][kind]["value"] < KIND_AFTER:
                misses.append(f"{kind} {kinds[1][kind]['value']:.2f}")
        if self.rate("after", "heldout_real")["ci_high"] < self.rate("before", "heldout_real")["value"]:
            misses.append("worse on kinds never trained")
        return misses


def evaluated(folder: Path, *options: str) -> dict[str, Any]:
    """Returns the success of the model without the tool, by split. A stored evaluation is read and not repeated."""
    path = folder / "no_tool.json"
    if not path.exists():
        print(f"without the tool: {' '.join(options) or 'as published'}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "agentrl", "eval", NO_TOOL, *options, "--json", "--run-dir", str(folder / "no_tool")]
        output = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(output)
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def result_path(out: Path, recipe: str, seed: int) -> Path:
    return out / f"{Path(recipe).stem}-seed{seed}.json"


def run_seed(recipe: str, seed: int, runs: Path, out: Path, note: str, overrides: list[str]) -> None:
    """Runs one seed to its end, evaluates its model without the tool, and stores the result."""
    folder = runs / f"{Path(recipe).stem}-{seed}"
    outcome = folder / "benchmark.json"
    if not outcome.exists():
        resume = ["--resume"] if (folder / "recipe.json").exists() else []
        command = f"python benchmarks/real_model.py --recipe {recipe} --seeds {seed}"
        origin = stored.origin(command, [*stored.LOOP, recipe, "sandboxes/reasoning"], [seed])
        wall_s, peak = timed([sys.executable, recipe, f"seed={seed}", *overrides, "--run-dir", str(folder), *resume])
        measured = {"recipe": recipe, "seed": seed, "wall_s": wall_s, "peak_gib": peak, "note": note, "origin": origin}
        outcome.write_text(json.dumps({**measured, "resumed": bool(resume)}))
    evaluated(folder, "--model", str(folder / "model"))
    write_atomically(result_path(out, recipe, seed), json.dumps(asdict(read(folder)), indent=1) + "\n")


def stored_outcomes(out: Path) -> list[Outcome]:
    """Returns all stored results, in the order of recipes and seeds."""
    outcomes = [Outcome(**json.loads(path.read_text())) for recipe in RECIPES for path in out.glob(f"{Path(recipe).stem}-seed*.json")]
    return sorted(outcomes, key=lambda outcome: (RECIPES.index(outcome.recipe), outcome.seed))


def read(folder: Path) -> Outcome:
    """Returns the figures of a finished run folder that the page shows."""
    measured, summary = (json.loads((folder / name).read_text()) for name in ("benchmark.json", "summary.json"))
    phases = json.loads((folder / "evaluations.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = list({line["step"]: line for line in lines if "episodes" in line}.values())
    return Outcome(
        recipe=measured["recipe"],
        seed=measured["seed"],
        wall_s=measured["wall_s"],
        peak_gib=measured["peak_gib"],
        note=measured["note"] + ("; interrupted and resumed; the minutes are those of the last part" if measured["resumed"] else ""),
        origin=measured["origin"],
        summary={name: summary[name] for name in SUMMARY},
        phases={phase: phases[phase] for phase in ("before", "after")},
        parts=parts(folder, steps, None),
        steps=[{name: line.get(name) for name in ("step", "step_s", "reward_mean")} for line in steps],
        no_tool=json.loads((folder / "no_tool.json").read_text()),
    )


def rate_text(rate: dict[str, float]) -> str:
    return f"{rate['value']:.2f} [{rate['ci_low']:.2f}, {rate['ci_high']:.2f}]"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def success(outcomes: list[Outcome]) -> str:
    """Returns a table with a row per split or kind and a column per run. Each seed has its own problems, so also its own start."""
    splits = {"heldout": "held-out problems of the trained kinds", "heldout_real": "kinds that were never trained"}
    rows = []
    for split, label in splits.items():
        rates = [(outcome.phases["before"][split], outcome.phases["after"][split]) for outcome in outcomes]
        rows.append([f"{label} ({rates[0][0]['n']:.0f})", *(f"{rate_text(before)} → {rate_text(after)}" for before, after in rates)])
        for kind, rate in rates[0][0]["by_kind"].items():
            changes = [(before["by_kind"][kind]["value"], after["by_kind"][kind]["value"]) for before, after in rates]
            rows.append([f"`{kind}` ({rate['n']:.0f})", *(f"{before:.2f} → {after:.2f}" for before, after in changes)])
    return markdown(["before → after", *(outcome.name for outcome in outcomes)], rows)


def cost(outcomes: list[Outcome]) -> str:
    head = [
        "run",
        "minutes",
        "peak GiB",
        "steps",
        "tokens trained",
        "median seconds a step",
        *PARTS.values(),
        "probe max",
        "targets missed",
    ]
    rows = []
    for outcome in outcomes:
        rows.append(
            [
                outcome.name,
                f"{outcome.wall_s / 60:.1f}",
                f"{outcome.peak_gib:.1f}",
                str(outcome.summary["steps"]),
                f"{outcome.summary['tokens_trained']:,}",
                f"{statistics.median(line['step_s'] for line in outcome.steps):.0f}",
                *(f"{outcome.parts[name] / len(outcome.steps):.1f}" for name in PARTS),
                f"{outcome.summary['swap_probe_max_abs_diff']:.0e}",
                ", ".join(outcome.missed()) or "none",
            ]
        )
    return markdown(head, rows)


def without_tool(outcomes: list[Outcome], base: dict[str, Any]) -> str:
    rows = [["as published", *(rate_text(base[split]) for split in ("heldout", "heldout_real"))]]
    for outcome in outcomes:
        rows.append([outcome.name, *(rate_text(outcome.no_tool[split]) for split in ("heldout", "heldout_real"))])
    return markdown(["without the tool", "trained kinds", "kinds never trained"], rows)


def picture(outcomes: list[Outcome], path: Path) -> None:
    """Plots the reward of sampled episodes by step, and held-out success before and after, with one line per run."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "agentrl"
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.6), width_ratios=[2, 1], layout="constrained")
    for number, run in enumerate(outcomes):
        color = f"C{number}"
        steps = [line["step"] for line in run.steps if line.get("reward_mean") is not None]
        left.plot(steps, [line["reward_mean"] for line in run.steps if line.get("reward_mean") is not None], color=color, label=run.name)
        for split, style in (("heldout", "-"), ("heldout_real", "--")):
            rates = [run.rate(phase, split) for phase in ("before", "after")]
            values = [rate["value"] for rate in rates]
            bounds = [[rate["value"] - rate["ci_low"] for rate in rates], [rate["ci_high"] - rate["value"] for rate in rates]]
            positions = [number * 0.06, 1 + number * 0.06]
            right.errorbar(positions, values, yerr=bounds, fmt="o" + style, color=color, capsize=3, markersize=4)
    left.set(xlabel="step of 64 episodes", ylabel="mean reward, sampled", ylim=(0, 1.02))
    left.legend(frameon=False, loc="lower right")
    right.set(xticks=[0, 1], xticklabels=["before", "after"], ylabel="success, greedy", ylim=(0, 1.02), xlim=(-0.2, 1.4))
    right.set_title("trained kinds (solid), never trained (dashed)", fontsize=9)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def page(outcomes: list[Outcome], base: dict[str, Any]) -> str:
    notes = sorted({run.note for run in outcomes if run.note})
    versions = ", ".join(f"{name} {number}" for name, number in outcomes[0].summary["versions"].items())
    lines = [
        f"Made by `python benchmarks/real_model.py`. Machines: {stored.describe_machines(run.origin['machine'] for run in outcomes)}; "
        f"sandbox: {outcomes[0].summary['sandbox_backend']}. "
        f"{versions}. {' '.join(notes)}".strip(),
        "Greedy, one attempt a problem; 95% Wilson intervals for rows of several kinds. Each seed draws problems of its own.",
        success(outcomes),
        f"Targets: at most {MINUTES:.0f} minutes and {GIB:.0f} GiB, held-out {AFTER:.2f} or more, every kind that starts above "
        f"{KIND_BEFORE:.2f} at {KIND_AFTER:.2f} or more, no worse on kinds never trained. Parts are mean seconds of a step.",
        cost(outcomes),
        without_tool(outcomes, base),
        "![Reward by step, success before and after](images/real-model.svg)",
    ]
    return "\n\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, default=RECIPES[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "real-model", help="parent folder of the run folders")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "a-real-model", help="folder of the stored results")
    parser.add_argument("--note", default="", help="a sentence about the machine, stored with the result")
    parser.add_argument("--page", type=Path, default=None, help="write the stored results to this page; run nothing")
    parser.add_argument("overrides", nargs="*", help="recipe overrides, such as sandbox.backend=bubblewrap")
    args = parser.parse_args()
    for folder in (args.runs, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    base = args.out / "as-published.json"
    if args.page is None:
        if not base.exists():
            write_atomically(base, json.dumps(evaluated(args.runs), indent=1) + "\n")
        for seed in args.seeds:
            if not result_path(args.out, args.recipe, seed).exists():
                run_seed(args.recipe, seed, args.runs, args.out, args.note, args.overrides)
    outcomes = stored_outcomes(args.out)
    if not outcomes or not base.exists():
        sys.exit(f"error: no finished run in {args.out}\nfix: python benchmarks/real_model.py")
    text = page(outcomes, json.loads(base.read_text()))
    print(text)
    if args.page is not None:
        before, _, rest = args.page.read_text().partition(BEGIN)
        args.page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")
        picture(outcomes, args.page.parent / "images" / "real-model.svg")
    sys.exit(1 if any(outcome.missed() for outcome in outcomes) else 0)


if __name__ == "__main__":
    main()
