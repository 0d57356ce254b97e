"""Knowledge across tasks: what notes of earlier episodes are worth, and what a trained policy does in other environments. See
`environments.py`.

Runs are in `runs/knowledge`. A finished one is read and not repeated, so an interrupted benchmark continues.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.observe.stats import Rate

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs" / "knowledge"
BASE = ROOT / "recipes" / "models" / "tables-base"
SEEDS = (0, 1, 2)

SHUFFLED, ALONE = "tasks.family.options.shuffled=true", "memory=null"
TRAINED: Mapping[str, Sequence[str]] = {"notes": (), "shuffled notes": (SHUFFLED,), "no notes": (ALONE,)}
"""How a policy is trained -> overrides of `recipes/doors.py`."""

SLIPPERY, CHANNELS = "tasks.family.options.is_slippery=true", 'tasks.family.options={"channels": %d, "budget": %d}'
MIRRORED = 'tasks.family.options.desc=["SFFF", "FHFF", "HFFH", "FFHG"]'
SAMPLED, NETWORKS = 'evaluation.sampling={"temperature": 1.0}', ("evaluation.heldout=128", 'evaluation.sampling={"temperature": 1.0}')
SOURCES: Mapping[str, tuple[str, Sequence[str]]] = {
    "lake": ("frozen_lake", ()),
    "networks of 4": ("discovery", (CHANNELS % (4, 8), "steps=20")),
    "doors": ("doors", ()),
}
"""Environment that a policy is trained on -> its recipe and overrides."""
TARGETS: Mapping[str, tuple[str, Sequence[str]]] = {
    "lake": ("frozen_lake", ("evaluation.heldout=128", SAMPLED)),
    "lake, other map": ("frozen_lake", ("evaluation.heldout=128", SAMPLED, MIRRORED)),
    "slippery lake": ("frozen_lake", ("evaluation.heldout=128", SAMPLED, SLIPPERY)),
    "networks of 4": ("discovery", (*NETWORKS, CHANNELS % (4, 8))),
    "networks of 6": ("discovery", (*NETWORKS, CHANNELS % (6, 18))),
    "doors": ("doors", (SAMPLED,)),
}
"""Environment that policies are evaluated on -> its recipe and overrides."""


def run(verb: str, name: str, recipe: str, overrides: Sequence[str]) -> Path:
    """Returns the folder of a run of `agentrl train` or `agentrl eval`, after running it to its end unless it is finished."""
    folder = RUNS / name.replace(",", "").replace(" ", "-")
    finished = folder / "finished.json"  # the command, so that a run with other settings is not read by mistake
    command = [verb, f"recipes/{recipe}.py", *overrides]
    if finished.exists():
        if json.loads(finished.read_text()) != command:
            sys.exit(f"error: {folder} is a run with other settings\nfix: delete it")
        return folder
    resume = ["--resume"] if verb == "train" and (folder / "run.json").exists() else []
    subprocess.run([sys.executable, "-m", "agentrl", *command, "--run-dir", str(folder), *resume], cwd=ROOT, check=True)
    finished.write_text(json.dumps(command))
    return folder


def attempts(folder: Path, phase: str) -> list[dict[str, Any]]:
    """Returns the transcripts of an evaluation. Raises `SystemExit` if an attempt has no score."""
    lines = [json.loads(line) for line in (folder / "episodes" / f"{phase}.jsonl").read_text().splitlines()]
    if not lines or any(line["score"] is None for line in lines):
        sys.exit(f"error: attempts of {folder} have no score\nfix: read their reasons in its episodes, and delete it")
    return lines


def first_tries(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns for each later visit to a house whether the first door had the gold."""
    return [float(line["score"] == 1.0) for line in lines if line["kind"] != "visit 1"]


def cell(by_seed: Sequence[Sequence[float]]) -> str:
    """Returns the mean over all attempts with its 95% interval, and the means of the seeds."""
    rate = Rate.from_scores([score for scores in by_seed for score in scores])
    seeds = ", ".join(f"{statistics.fmean(scores):.2f}" for scores in by_seed)
    return f"{rate.value:.2f} [{rate.ci_low:.2f}, {rate.ci_high:.2f}] ({seeds})"


def memory() -> list[str]:
    """Gold on the first try, in later visits to held-out houses, by how the policy was trained and what notes it is shown."""
    rows = ["| policy trained with | its notes | notes of other houses | no notes |", "| --- | --- | --- | --- |"]
    shown: dict[tuple[str, str], list[list[float]]] = {}
    for seed in SEEDS:
        for way, overrides in TRAINED.items():
            trained = run("train", f"doors {way} {seed}", "doors", [f"seed={seed}", *overrides])
            policies = {"not trained": BASE, way: trained / "model"} if way == "notes" else {way: trained / "model"}
            for policy, model in policies.items():
                for notes, how in TRAINED.items():
                    words = [f"seed={seed}", f"policy.model={model}", *how]
                    folder = run("eval", f"doors {policy} {seed} with {notes}", "doors", words)
                    shown.setdefault((policy, notes), []).append(first_tries(attempts(folder, "eval")))
    rows += [f"| {policy} | {' | '.join(cell(shown[policy, notes]) for notes in TRAINED)} |" for policy in ("not trained", *TRAINED)]
    return rows


def transfer() -> list[str]:
    """Mean score of policies that were trained on one environment, in others; sampled at temperature 1."""
    rows = [f"| trained on | {' | '.join(TARGETS)} |", f"| ---{' | ---' * len(TARGETS)} |"]
    models = {"nothing": BASE}
    for source, (recipe, overrides) in SOURCES.items():
        models[source] = run("train", "doors notes 0" if source == "doors" else source, recipe, ["seed=0", *overrides]) / "model"
    for source, model in models.items():
        cells = []
        for target, (recipe, overrides) in TARGETS.items():
            folder = run("eval", f"{source} to {target}", recipe, ["seed=0", f"policy.model={model}", *overrides])
            rate = Rate.from_scores([float(line["score"]) for line in attempts(folder, "eval")])
            cells.append(f"{rate.value:.2f} [{rate.ci_low:.2f}, {rate.ci_high:.2f}]")
        rows.append(f"| {source} | {' | '.join(cells)} |")
    return rows
