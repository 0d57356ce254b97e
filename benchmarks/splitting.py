"""Measures `recipes/splitting.py` on several seeds with every credit mode: held-out success, share of split tasks, tokens, minutes.

    python benchmarks/splitting.py                                      # seeds 0 1 2, all modes: some minutes each
    python benchmarks/splitting.py --seeds 0 --credits verifier         # one mode
    python benchmarks/splitting.py --page docs/learning-to-split.md     # writes table and picture from stored results; runs nothing

All runs start from the included policy (built by `recipes/splitting_policy.py`). Each run has a separate folder under `--runs`, and its
result is stored in `--out`. A run with a stored result is not repeated, and an interrupted run continues.
Memory is the largest sum of the proportional set sizes of all processes of the run, sampled every two seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agentrl.base.files import read_json_lines, write_atomically  # noqa: E402
from agentrl.base.numbers import wilson_interval  # noqa: E402
from benchmarks import stored  # noqa: E402
from benchmarks.quickstart import timed  # noqa: E402
from rewards.pages import page_asked  # noqa: E402

RECIPE = ROOT / "recipes" / "splitting.py"
POLICY = ROOT / "recipes" / "splitting_policy.py"
CREDITS = ("episode", "branches", "roles", "verifier", "counterfactual")
BEGIN, END = "<!-- made by benchmarks/splitting.py --page: begin -->", "<!-- made by benchmarks/splitting.py --page: end -->"
SPLIT, HELPERS = "part/rewards.pages:answered/split", "part/rewards.pages:answered/helpers"
FIGURES = ("step", "reward_mean", SPLIT, HELPERS, "tokens_sampled")  # of each step, as metrics.jsonl names them
PHASES = ("before", "after")


@dataclass(frozen=True, kw_only=True)
class Share:
    """A share of `n`, with Wilson's 95% interval."""

    value: float
    n: int

    def __str__(self) -> str:
        low, high = wilson_interval(self.value, self.n)
        return f"{self.value:.2f} [{low:.2f}, {high:.2f}]"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one finished run: its origin and measurements, the figures of its steps, and the shares of solved and split tasks in
    each evaluation."""

    credit: str
    seed: int
    measured: dict[str, Any]
    sandboxes: str
    versions: dict[str, str]
    tokens_trained: int
    steps: list[dict[str, float]]
    solved: dict[str, Share]
    split: dict[str, Share]


def result_path(out: Path, credit: str, seed: int) -> Path:
    return out / f"{credit}-seed{seed}.json"


def run(credit: str, seed: int, runs: Path, out: Path, note: str, overrides: Sequence[str]) -> None:
    """Starts or continues one run and stores its result."""
    folder = runs / f"{credit}-{seed}"
    resume = ["--resume"] if (folder / "recipe.json").exists() else []
    arguments = [f"seed={seed}", f"objective.credit={credit}", *overrides]
    machine = stored.machine()
    wall_s, peak_gib = timed([sys.executable, str(RECIPE), *arguments, "--run-dir", str(folder), *resume])
    measured = {"wall_s": wall_s, "peak_gib": peak_gib, "note": note, "machine": machine, "resumed": bool(resume)}
    outcome = read(folder, credit, seed, {**measured, "overrides": list(overrides)})
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(result_path(out, credit, seed), json.dumps(asdict(outcome), indent=1) + "\n")


def read(folder: Path, credit: str, seed: int, measured: dict[str, Any]) -> Outcome:
    """Returns the result of the finished run in `folder`."""
    summary = json.loads((folder / "summary.json").read_text())
    steps = {line["step"]: line for line in read_json_lines(folder / "metrics.jsonl") if "episodes" in line}
    attempts = {phase: read_json_lines(folder / "episodes" / f"{phase}.jsonl") for phase in PHASES}
    return Outcome(
        credit=credit,
        seed=seed,
        measured=measured,
        sandboxes=summary["sandbox_backend"],
        versions=summary["versions"],
        tokens_trained=summary["tokens_trained"],
        steps=[{name: steps[number][name] for name in FIGURES if name in steps[number]} for number in sorted(steps)],
        solved={phase: solved(attempts[phase]) for phase in PHASES},
        split={phase: split(attempts[phase]) for phase in PHASES},
    )


def stored_outcomes(out: Path) -> list[Outcome]:
    """Returns all stored results, by mode and seed. Exits if they were measured with different settings, which a table must not mix."""
    records = [json.loads(path.read_text()) for path in out.glob("*-seed*.json")]
    for record in records:
        record.update({name: {phase: Share(**share) for phase, share in record[name].items()} for name in ("solved", "split")})
    outcomes = sorted((Outcome(**record) for record in records), key=lambda run: (CREDITS.index(run.credit), run.seed))
    settings = {" ".join([run.sandboxes, *run.measured["overrides"]]): result_path(out, run.credit, run.seed).name for run in outcomes}
    if len(settings) > 1:
        listed = "; ".join(f"{name} with {setting}" for setting, name in settings.items())
        sys.exit(
            f"error: results in {out} have different settings: {listed}\nfix: delete those that you do not need, or use a different --out"
        )
    return outcomes


def check_alike(out: Path, overrides: Sequence[str]) -> None:
    """Exits if a stored result was measured with other overrides than the requested ones."""
    if others := sorted({" ".join(run.measured["overrides"]) for run in stored_outcomes(out)} - {" ".join(overrides)}):
        new, old = (f"`{text}`" if text else "no overrides" for text in (" ".join(overrides), others[0]))
        sys.exit(f"error: results in {out} were measured with {old}, not with {new}\nfix: use the same overrides, or a different --out")


def solved(attempts: Sequence[dict[str, Any]]) -> Share:
    scores = [float(attempt["score"]) for attempt in attempts if attempt["score"] is not None]
    return Share(value=statistics.fmean(scores), n=len(scores))


def together(shares: Iterable[Share]) -> Share:
    """Returns a share over the attempts of all runs."""
    parts = list(shares)
    n = sum(share.n for share in parts)
    return Share(value=sum(share.value * share.n for share in parts) / n, n=n)


def split(attempts: Sequence[dict[str, Any]]) -> Share:
    """Returns the share of attempts that gave each page to a separate helper."""
    flags = [gave_every_page(attempt) for attempt in attempts if attempt["score"] is not None]
    return Share(value=statistics.fmean(flags), n=len(flags))


def gave_every_page(attempt: dict[str, Any]) -> bool:
    """Reads a request as the verifier does, because a policy may learn another wording than that of its demonstrations."""
    pages = {page_asked(line["messages"][0]["content"]) for line in attempt["trajectories"] if line["agent"] == "worker"}
    return pages >= set(range(1, len(attempt["truth"].split("\n")) + 1))


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def by_credit(outcomes: list[Outcome]) -> str:
    """Returns a table with one row per mode: the attempts of all runs together, with the range over seeds."""
    rows = []
    for credit in CREDITS:
        if not (runs := [run for run in outcomes if run.credit == credit]):
            continue
        values = [run.solved["after"].value for run in runs]
        seeds = ", ".join(str(run.seed) for run in runs)
        by_seed = f"{min(values):.2f} to {max(values):.2f}" if len(runs) > 1 else ""
        minutes = stored.span([round(run.measured["wall_s"] / 60, 1) for run in runs], ".1f")
        trained = stored.span([run.tokens_trained for run in runs], ",")
        solved_by, split_by = (
            [str(together(getattr(run, name)[phase] for run in runs)) for phase in PHASES] for name in ("solved", "split")
        )
        rows.append([f"`{credit}`", seeds, *solved_by, by_seed, *split_by, trained, minutes])
    head = ["credit", "seeds", "solved before", "solved after", "by seed", "split before", "split after", "tokens trained", "minutes"]
    return markdown(head, rows)


def picture(outcomes: list[Outcome], path: Path) -> None:
    """Plots by step the share of solved tasks, of pages given to helpers, and of helpers that were right, with one line per run."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "agentrl"
    figures = {"reward_mean": "solved", SPLIT: "pages given to a helper", HELPERS: "helpers that were right"}
    figure, panels = plt.subplots(1, len(figures), figsize=(9.6, 3.2), sharey=True, layout="constrained")
    for axes, (name, title) in zip(panels, figures.items(), strict=True):
        for run in outcomes:
            color = f"C{CREDITS.index(run.credit)}"
            steps = [(line["step"], line[name]) for line in run.steps if name in line]
            axes.plot(*zip(*steps, strict=True), color=color, label=run.credit if run.seed == outcomes[0].seed else None, linewidth=1)
        axes.set(xlabel="step", ylim=(0, 1.02))
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def page(outcomes: list[Outcome]) -> str:
    first = outcomes[0]
    seeds, credits = sorted({run.seed for run in outcomes}), [name for name in CREDITS if any(run.credit == name for run in outcomes)]
    overrides = sorted({" ".join(run.measured["overrides"]) for run in outcomes})
    notes = sorted({run.measured["note"] for run in outcomes if run.measured["note"]})
    versions = ", ".join(f"{name} {number}" for name, number in first.versions.items())
    command = f"python benchmarks/splitting.py --seeds {' '.join(map(str, seeds))} --credits {' '.join(credits)} {overrides[0]}".strip()
    return "\n\n".join(
        [
            f"Command: `{command}`. Machines: {stored.describe_machines(run.measured['machine'] for run in outcomes)}; "
            f"sandbox: {first.sandboxes}. {versions}. " + " ".join(notes),
            "Held-out tasks, one attempt each, sampled at temperature 1 as in training, with 95% Wilson intervals over the attempts; each"
            " seed has its own tasks. Split: the agent gave each page to a separate helper. `docs/learning-to-split/` has each run.",
            by_credit(outcomes),
            "![Solved, split and right helpers, by step](images/learning-to-split.svg)",
        ]
    )


def run_all(configurations: Sequence[tuple[str, int]], runs: Path, out: Path, note: str, overrides: Sequence[str]) -> None:
    """Runs all modes and seeds without a stored result and prints progress."""
    todo = [(credit, seed) for credit, seed in configurations if not result_path(out, credit, seed).exists()]
    if todo:
        subprocess.run([sys.executable, str(POLICY)], cwd=ROOT, check=True)
    began = time.monotonic()
    for number, (credit, seed) in enumerate(todo):
        pace = (time.monotonic() - began) / 60 / number if number else None
        status = (
            f"about {pace * (len(todo) - number):.0f} min left"
            if pace is not None
            else f"{len(configurations) - len(todo)} finished before"
        )
        print(f"credit {credit}, seed {seed}: run {number + 1} of {len(todo)}, {status}", file=sys.stderr, flush=True)
        run(credit, seed, runs, out, note, overrides)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--credits", nargs="+", choices=CREDITS, default=list(CREDITS))
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "splitting", help="parent folder of the run folders")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "learning-to-split", help="folder of the stored results")
    parser.add_argument("--note", default="", help="a sentence about the machine, stored with the result")
    parser.add_argument("--page", type=Path, default=None, help="write the stored results to this page; run nothing")
    parser.add_argument("overrides", nargs="*", help="recipe overrides, such as sandbox.backend=bubblewrap")
    args = parser.parse_args()
    if args.page is None:
        check_alike(args.out, args.overrides)
        run_all([(credit, seed) for seed in args.seeds for credit in args.credits], args.runs, args.out, args.note, args.overrides)
    outcomes = stored_outcomes(args.out)
    if not outcomes:
        sys.exit(f"error: {args.out} has no stored results\nfix: python benchmarks/splitting.py")
    text = page(outcomes)
    print(text)
    if args.page is not None:
        before, _, rest = args.page.read_text().partition(BEGIN)
        args.page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")
        picture(outcomes, args.page.parent / "images" / "learning-to-split.svg")


if __name__ == "__main__":
    main()
