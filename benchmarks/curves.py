"""Compares learning curves of several settings, to separate the effect of a setting from the noise between seeds.

    python benchmarks/quickstart.py --seeds 0 1 2 --runs runs/one
    python benchmarks/quickstart.py --seeds 0 1 2 --runs runs/two learner.minibatches=2
    python benchmarks/curves.py one=runs/one two=runs/two

Each argument is a name and a folder of finished run folders, one per seed. Prints a Markdown table: the reward of training episodes
in blocks of steps and held-out success at the end, as mean over seeds with range, and the difference to the first setting with its
confidence interval (Welch's t over seeds). The intervals hold simultaneously with 95% (Bonferroni). The exit status is 1 if an interval
excludes 0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import ttest_ind

HELD_OUT = {"held-out after": "heldout_after", "real after": "heldout_real_after"}


@dataclass(frozen=True, kw_only=True)
class Contender:
    """The finished runs of one setting. `figures` maps the name of a compared figure to one number per run."""

    name: str
    figures: dict[str, list[float]]


def read(argument: str, block: int) -> Contender:
    """Reads `NAME=FOLDER`. Exits if the folder has fewer than two finished runs, because the noise would be unknown."""
    name, _, folder = argument.partition("=")
    runs = sorted(path.parent for path in Path(folder).glob("*/summary.json")) if folder else []
    if len(runs) < 2:
        sys.exit(f"error: {argument!r} is not NAME=FOLDER with at least two finished runs in FOLDER\nfix: run benchmarks/quickstart.py")
    figures: dict[str, list[float]] = {}
    for run in runs:
        for label, value in curve(run, block).items():
            figures.setdefault(label, []).append(value)
    uneven = [label for label, values in figures.items() if len(values) != len(runs)]
    if uneven:
        sys.exit(f"error: the runs in {folder} differ in length: {', '.join(uneven)}\nfix: put runs of each length into a separate folder")
    return Contender(name=name, figures=figures)


def curve(run: Path, block: int) -> dict[str, float]:
    """Returns the compared figures of a run: mean reward of each block of steps, then held-out success."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if nothing := [line["step"] for line in lines if "reward_mean" not in line]:
        sys.exit(f"error: steps {nothing} of {run} have no scored episode\nfix: read left_out_reasons in its summary.json")
    rewards = [line["reward_mean"] for line in lines]
    starts = range(0, len(rewards), block)
    blocks = {f"reward, steps {at + 1} to {min(at + block, len(rewards))}": rewards[at : at + block] for at in starts}
    summary = json.loads((run / "summary.json").read_text())
    held_out = {label: summary[key]["value"] for label, key in HELD_OUT.items() if summary.get(key)}
    return {label: statistics.fmean(values) for label, values in blocks.items()} | held_out


def table(contenders: list[Contender]) -> tuple[str, bool]:
    """Returns the table as Markdown, and whether every interval of a difference contains 0."""
    first, *others = contenders
    head = ["", f"{first.name}, mean (range) of {len(next(iter(first.figures.values())))} runs"]
    for other in others:
        head += [f"{other.name}, {len(next(iter(other.figures.values())))} runs", f"{other.name} - {first.name} [interval]"]
    rows, within = [], True
    for label, base in first.figures.items():
        row = [label, spread(base)]
        for other in others:
            values = other.figures[label]
            low, high = interval(values, base, 1 - 0.05 / (len(first.figures) * len(others)))
            within = within and low <= 0.0 <= high
            row += [spread(values), f"{statistics.fmean(values) - statistics.fmean(base):+.3f} [{low:+.3f}, {high:+.3f}]"]
        rows.append(row)
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]), within


def spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def interval(values: list[float], base: list[float], confidence: float) -> tuple[float, float]:
    """Returns the confidence interval of the difference of two means. Its width is 0 if neither side varies."""
    if len(set(values)) == len(set(base)) == 1:
        return (values[0] - base[0],) * 2
    with warnings.catch_warnings():  # scipy warns if all runs of one side are equal, which happens at success rates near 1
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)
        bounds = ttest_ind(values, base, equal_var=False).confidence_interval(confidence)
    return float(bounds.low), float(bounds.high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--block", type=int, default=4, help="steps averaged into one row (default 4)")
    args = parser.parse_args()
    contenders = [read(argument, args.block) for argument in args.contenders]
    if len({tuple(contender.figures) for contender in contenders}) > 1:
        sys.exit(
            "error: the contenders' runs have different lengths or evaluations\nfix: create them with the same steps and evaluation keys"
        )
    text, within = table(contenders)
    print(text)
    sys.exit(0 if within else 1)


if __name__ == "__main__":
    main()
