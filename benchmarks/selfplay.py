"""Computes the exact exploitability of versions of recipes/kuhn_poker.py, from the policy's choices at the 12 information sets.

    python benchmarks/selfplay.py RUN...                             the versions of existing runs
    python benchmarks/selfplay.py --train runs/kuhn --seeds 0 1 2    trains with and without a league first

The average of versions is what fictitious play converges to: it draws a version for each game. Two averages are computed: that of the
versions of the second half of the run, and that of all versions, each weighted by its number as in CFR+ (Tammelin 2014, arXiv:1407.5042).
At an information set, a version also has the weight of the probability that it plays to that set.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl.agent.chat import ChatFormat, load_chat
from agentrl.base.files import numbered_folders
from agentrl.records import Message
from sandboxes.games.exploitability import Policy, exploitability, views
from sandboxes.games.rules import Kuhn, State

VIEWS = [state.view for state in views(Kuhn())]
PLAIN = 'rollout.agent="players"'
Table = dict[str, float]
"""Information set -> probability of a bet."""


def main() -> None:
    """Prints a table for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--train", type=Path, help="folder for new runs")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--every", type=int, default=10, help="versions between two rows")
    parser.add_argument("overrides", nargs="*", default=[])
    args, overrides = parser.parse_known_args()
    runs = list(args.runs)
    for seed in args.seeds if args.train else ():
        for name, more in (("league", []), ("plain", [PLAIN])):
            run = args.train / f"{name}-{seed}"
            runs.append(run)
            if not (run / "summary.json").exists():
                command = ["train", "recipes/kuhn_poker.py", "--run-dir", str(run), f"seed={seed}", "learner.keep_versions=10000", *more]
                subprocess.run([sys.executable, "-m", "agentrl", *command, *overrides], check=True)
    for run in runs:
        report(run, every=args.every)


def report(run: Path, *, every: int) -> None:
    """Prints and saves the exploitability of the versions of a run."""
    folders = [folder for folder in numbered_folders(run / "versions") if (folder / "model.safetensors").exists()]
    chat = load_chat(str(folders[0]))
    tables = [bets(folder, chat) for folder in folders]
    rows = []
    for index, folder in enumerate(folders):
        if index % every == 0 or index == len(folders) - 1:
            current = exploitability(Kuhn(), _policy(tables[index]))
            newer = exploitability(Kuhn(), _policy(average(tables[index // 2 : index + 1])))
            linear = exploitability(Kuhn(), _policy(average(tables[: index + 1], [int(older.name) + 1 for older in folders[: index + 1]])))
            rows.append({"version": int(folder.name), "exploitability": current, "of_average": newer, "of_linear_average": linear})
            averages = f"of the average of the newer half {newer:.3f}, of the linear average {linear:.3f}"
            print(f"{run.name} version {int(folder.name):4d}: exploitability {current:.3f}, {averages}", flush=True)
    (run / "exploitability.json").write_text(json.dumps({"rows": rows, "tables": tables}, indent=1))


def bets(folder: Path, chat: ChatFormat) -> Table:
    """Returns the probability of a bet at each information set, from the logits of the two actions, which are one token each."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (passing,), (betting,) = (chat._renderer.ids(action) for action in ("p", "b"))
    table = {}
    for view in VIEWS:
        messages = [Message(role="user", content=view)]
        if view.endswith("pb"):  # the first player has passed before
            before = Message(role="user", content=view.replace("pb", "-"))
            messages = [before, Message(role="assistant", content="p"), *messages]
        with torch.inference_mode():
            logits = model(torch.tensor([chat.opening(messages, ())])).logits[0, -1]
        table[view] = 1 / (1 + math.exp(float(logits[passing] - logits[betting])))
    return table


def average(tables: Sequence[Table], weights: Sequence[float] | None = None) -> Table:
    """Returns the behaviour of a policy that draws one of the tables for each game, with probabilities in proportion to `weights`. None
    means equal probabilities."""
    mixed = {}
    for view in VIEWS:
        reach = [1 - table[view.replace("pb", "-")] if view.endswith("pb") else 1.0 for table in tables]
        if weights is not None:
            reach = [weight * probability for weight, probability in zip(weights, reach, strict=True)]
        mixed[view] = math.fsum(weight * table[view] for weight, table in zip(reach, tables, strict=True)) / max(math.fsum(reach), 1e-12)
    return mixed


def _policy(table: Table) -> Policy:
    def policy(state: State) -> dict[str, float]:
        return {"b": table[state.view], "p": 1 - table[state.view]}

    return policy


if __name__ == "__main__":
    main()
