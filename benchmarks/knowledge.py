"""Measures knowledge across tasks: the effect of notes of earlier episodes, and the score of a trained policy in other environments. See
`environments.py`.

Runs are in `runs/knowledge`. A finished one is read and not repeated, so an interrupted benchmark continues.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.observe.stats import Rate
from recipes.doors import HOUSES

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs" / "knowledge"
BASE = ROOT / "recipes" / "models" / "tables-base"
SEEDS = (0, 1, 2)

NOTES: Mapping[str, Sequence[str]] = {
    "of the house": (),
    "none": ("memory=null",),
    "of other houses": ("tasks.family.options.shuffled=true",),
}
"""Notes that a policy is shown -> overrides of `recipes/doors.py`."""
TRAINED = {"of the house": "trained with notes", "none": "trained without notes"}
"""Notes with which policies are trained -> name of the policy."""

SAMPLED = ("evaluation.heldout=128", 'evaluation.sampling={"temperature": 1.0}')
SLIPPERY = "tasks.family.options.is_slippery=true"
TRANSPOSED = 'tasks.family.options.desc=["SFFH", "FHFF", "FFFF", "FHHG"]'
FOUR, SIX = (f'tasks.family.options={{"channels": {channels}, "budget": {budget}}}' for channels, budget in ((4, 8), (6, 18)))
SOURCES: Mapping[str, tuple[str, Sequence[str]]] = {
    "lake": ("frozen_lake", ()),
    "networks of 4": ("discovery", (FOUR, "steps=20")),
    "doors": ("doors", ()),
}
"""Environment that a policy is trained on -> its recipe and overrides."""
TARGETS: Mapping[str, tuple[str, Sequence[str]]] = {
    "lake": ("frozen_lake", SAMPLED),
    "transposed lake": ("frozen_lake", (*SAMPLED, TRANSPOSED)),
    "slippery lake": ("frozen_lake", (*SAMPLED, SLIPPERY)),
    "networks of 4": ("discovery", (*SAMPLED, FOUR)),
    "networks of 6": ("discovery", (*SAMPLED, SIX)),
    "doors": ("doors", SAMPLED[1:]),
}
"""Environment that policies are evaluated on -> its recipe and overrides."""


def run(verb: str, name: str, recipe: str, overrides: Sequence[str]) -> Path:
    """Returns the folder of a run of `agentrl train` or `agentrl eval`, after running it to its end unless it is finished."""
    folder = RUNS / name.replace(" ", "-")
    finished = folder / "finished.json"  # the command, so that a run with other settings is not read by mistake
    command = [verb, f"recipes/{recipe}.py", *overrides]
    if finished.exists():
        if json.loads(finished.read_text()) != command:
            sys.exit(f"error: {folder} is a run with different settings\nfix: delete it")
        return folder
    resume = ["--resume"] if verb == "train" and (folder / "run.json").exists() else []
    if verb == "eval":
        shutil.rmtree(folder, ignore_errors=True)  # an interrupted evaluation starts again
    subprocess.run([sys.executable, "-m", "agentrl", *command, "--run-dir", str(folder), *resume], cwd=ROOT, check=True)
    finished.write_text(json.dumps(command))
    return folder


def attempts(folder: Path, phase: str) -> list[dict[str, Any]]:
    """Returns the transcripts of an evaluation. Raises `SystemExit` if an attempt has no score."""
    lines = [json.loads(line) for line in (folder / "episodes" / f"{phase}.jsonl").read_text().splitlines()]
    if not lines or any(line["score"] is None for line in lines):
        sys.exit(f"error: attempts of {folder} have no score\nfix: read the reasons in its episodes, then delete it")
    return lines


def first_tries(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns for each house the share of its later visits in which the first door had the gold."""
    houses: dict[int, list[float]] = {}
    for line in lines:
        if line["kind"] != "visit 1":
            houses.setdefault(int(line["task_id"].rpartition("/")[2]) % HOUSES, []).append(float(line["score"] == 1.0))
    return [statistics.fmean(tries) for tries in houses.values()]


def cell(by_seed: Sequence[Sequence[float]]) -> str:
    """Returns the mean over the houses or tasks of all seeds with its 95% interval, and the mean of each seed."""
    rate = Rate.from_scores([score for scores in by_seed for score in scores])
    seeds = ", ".join(f"{statistics.fmean(scores):.2f}" for scores in by_seed)
    return f"{rate.value:.2f} [{rate.ci_low:.2f}, {rate.ci_high:.2f}] ({seeds})"


def memory() -> list[str]:
    """Gold on the first try in later visits to held-out houses, by the notes that the policy is shown."""
    tries: dict[tuple[str, str], list[list[float]]] = {}

    def add(policy: str, notes: str, folder: Path, phase: str) -> None:
        tries.setdefault((policy, notes), []).append(first_tries(attempts(folder, phase)))

    for notes, policy in TRAINED.items():
        for seed in SEEDS:
            trained = run("train", f"doors {notes} {seed}", "doors", [f"seed={seed}", *NOTES[notes]])
            add("not trained", notes, trained, "before")
            add(policy, notes, trained, "after")
    models = {"not trained": "", "trained with notes": f"{RUNS}/doors-of-the-house-%d/model"}
    for policy, model in models.items():
        for notes in (notes for notes in NOTES if (policy, notes) not in tries):
            for seed in SEEDS:
                overrides = [f"seed={seed}", *([f"policy.model={model % seed}"] if model else []), *NOTES[notes]]
                add(policy, notes, run("eval", f"{policy} {seed} with {notes}", "doors", overrides), "eval")
    rows = [f"| policy | notes {' | '.join(NOTES)} |", f"| --- |{' --- |' * len(NOTES)}"]
    for policy in dict.fromkeys(policy for policy, _ in tries):
        rows.append(f"| {policy} | {' | '.join(cell(tries[policy, notes]) if (policy, notes) in tries else '' for notes in NOTES)} |")
    return rows


def transfer() -> list[str]:
    """Mean score of policies that were trained on one environment, in others; sampled at temperature 1."""
    rows = [f"| trained on | {' | '.join(TARGETS)} |", f"| ---{' | ---' * len(TARGETS)} |"]
    models = {"nothing": BASE}
    for source, (recipe, overrides) in SOURCES.items():
        models[source] = run("train", "doors of the house 0" if source == "doors" else source, recipe, ["seed=0", *overrides]) / "model"
    for source, model in models.items():
        cells = []
        for target, (recipe, overrides) in TARGETS.items():
            folder = run("eval", f"{source} to {target}", recipe, ["seed=0", f"policy.model={model}", *overrides])
            rate = Rate.from_scores([float(line["score"]) for line in attempts(folder, "eval")])
            cells.append(f"{rate.value:.2f} [{rate.ci_low:.2f}, {rate.ci_high:.2f}]")
        rows.append(f"| {source} | {' | '.join(cells)} |")
    return rows
