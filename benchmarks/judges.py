"""Measures a small chat model and a trained reward model as judges, on answers whose labels are known.

    python benchmarks/judges.py --out runs/judges             # labels, trains, serves, calibrates, prints the table of docs/judges.md
    python benchmarks/judges.py --out runs/judges --markdown  # prints the table of the stored results

The labelled answers are episodes of the `tables` family: a demonstrator's correct or careless program, its output, and the submitted
answer. The family's verifier labels them. The reward model starts from the quickstart's base policy and is trained on training tasks.
`agentrl judge calibrate` measures all judges on held-out tasks. Only the judge `reference` is shown the truth. The chat model is
SmolLM2-135M-Instruct (`make smollm2`, or `agentrl model import`).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agentrl.records import Episode, Split, Task  # noqa: E402
from rewards.tables import exact_answer  # noqa: E402
from sandboxes.tables import Tables  # noqa: E402
from sandboxes.tables.demonstrations import Act, demonstrate  # noqa: E402

SHOWS = "question,transcript,answer"
JUDGES = {"reference": "SmolLM2-135M-Instruct, shown the truth", "alone": "SmolLM2-135M-Instruct", "trained": "reward model"}
COLUMNS = {"agreement": "agreement", "sensitivity": "sensitivity", "specificity": "specificity", "informedness": "informedness"}

REWARDS = '''"""The judges that are measured."""
from agentrl.judge import Criterion, Endpoint, Form, Judge, RewardModel, ScoreEndpoint, served
from agentrl.judge.scoring import CORRECT

SMALL = Endpoint(url=served("small"), model="small", max_tokens=160, timeout_s=600)
RIGHT = Form(
    instructions="You check the work of an agent that answers questions about files with short Python programs.",
    criteria=(Criterion(name="correct", asks="1 if the answer is right, else 0."),),
    shows=("question", "transcript", "answer"),
)
reference = Judge(endpoint=SMALL, form=CORRECT, name="reference")
alone = Judge(endpoint=SMALL, form=RIGHT, name="alone")
trained = RewardModel(endpoint=ScoreEndpoint(url=served("reward"), model="reward"), name="trained")
'''
RECIPE = '''"""Starts the servers of the judges that are measured."""
from agentrl import Recipe

recipe = Recipe(
    name="judges",
    policy={{"model": "unused"}},
    tasks={{"family": "unused:unused"}},
    judge_servers={judges},
)
'''


def acts_of(task: Task, number: int, *, careful: bool) -> list[Act]:
    """Returns a demonstration from the family's templates, whose programs are trusted."""
    return demonstrate(task, Random(f"{task.id}:{number}:{careful}"), careful=float(careful), guess=0.02)


def messages_of(acts: list[Act]) -> Iterator[dict[str, Any]]:
    for act in acts:
        call = json.loads(act.completion.split("<tool_call>")[1].split("</tool_call>")[0])
        yield {"role": "assistant", "content": "", "tool_calls": [call]}
        if act.observation is not None:
            yield {"role": "tool", "content": act.observation}


def labels(split: Split, count: int) -> Iterator[dict[str, Any]]:
    """Returns two labelled episodes of each task, one of a careful and one of a careless demonstrator."""
    family = Tables(seed=7)
    for index in range(count):
        task = family.task(split, index)
        for careful in (True, False):
            acts = acts_of(task, index, careful=careful)
            messages = list(messages_of(acts))
            answer = str(messages[-1]["tool_calls"][0]["arguments"]["answer"])
            episode = Episode(id=task.id, task_id=task.id, task_key=task.key, trajectories=(), answer=answer)
            right = asyncio.run(exact_answer(task, episode)).value == 1.0
            yield {
                "id": f"{task.id}-{int(careful)}",
                "task_id": task.id,
                "question": task.prompt[-1].content,
                "answer": answer,
                "reference": str(task.data["answer"]),
                "messages": messages,
                "label": "right" if right else "wrong",
                "by": "exact_answer",
            }


def agentrl(*arguments: str, cwd: Path, fine: tuple[int, ...] = (0,)) -> None:
    """Runs a command of agentrl in a separate project and forwards its output."""
    began = time.monotonic()
    print("$ agentrl", *arguments, flush=True)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run([sys.executable, "-m", "agentrl", *arguments], cwd=cwd, env={**os.environ, "PYTHONPATH": paths}, check=False)
    if ended.returncode not in fine:
        raise SystemExit(f"agentrl {arguments[0]} ended with exit code {ended.returncode}")
    print(f"  {time.monotonic() - began:.0f} s", flush=True)


def table(out: Path) -> str:
    """Returns the calibrations in a folder as Markdown."""
    lines = [
        f"| judge | {' | '.join(COLUMNS.values())} | no verdict | by calibration |",
        "| --- | " + " | ".join("---" for _ in COLUMNS) + " | --- | --- |",
    ]
    for name, description in JUDGES.items():
        path = out / f"{name}.json"
        if not path.is_file():
            continue
        figures = json.loads(path.read_text())
        cells = [f"{figures[key]['value']:.2f} ({figures[key]['low']:.2f} to {figures[key]['high']:.2f})" for key in COLUMNS]
        verdicts = sum(figures[key] for key in ("right_right", "right_wrong", "wrong_right", "wrong_wrong"))
        refused = "refused" if figures["informedness"]["low"] <= 0 else "accepted"
        lines.append(f"| {description} | {' | '.join(cells)} | {figures['abstained']} of {verdicts + figures['abstained']} | {refused} |")
    return "\n".join(lines)


def main(
    out: Annotated[Path, typer.Option(help="Folder for labels, models and results.")] = Path("runs/judges"),
    small: Annotated[Path, typer.Option(help="Folder of the chat model.")] = ROOT / "recipes/models/smollm2",
    tasks: Annotated[int, typer.Option(min=8, help="Training tasks, two labels each.")] = 1000,
    held_out: Annotated[int, typer.Option(min=8, help="Held-out tasks, two labels each, for the reward model.")] = 200,
    held_out_small: Annotated[int, typer.Option(min=8, help="Held-out tasks, two labels each, for the chat model.")] = 30,
    epochs: Annotated[float, typer.Option(min=0.01, help="Passes of the reward model over its labels.")] = 3,
    only: Annotated[list[str] | None, typer.Option(help=f"Judges to measure: {', '.join(JUDGES)}.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Only print the table of the stored results.")] = False,
) -> None:
    """Generates labels with a known truth, trains a reward model on some and measures the judges on the others."""
    out = out.resolve()
    if markdown:
        print(table(out))
        return
    wanted = only or list(JUDGES)
    if set(wanted) - {"trained"} and not (small / "config.json").is_file():
        raise SystemExit(f"no model in {small}: import it with `make smollm2`, or pass --small FOLDER")
    (out / "rewards").mkdir(parents=True, exist_ok=True)
    (out / "rewards" / "mine.py").write_text(REWARDS)
    (out / "pyproject.toml").write_text("[project]\nname = 'judges'\nversion = '0'\n")
    for name, split, count in (("train", Split.TRAIN, tasks), ("heldout", Split.HELDOUT, held_out), ("few", Split.HELDOUT, held_out_small)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in labels(split, count)))
    model = out / "reward-model"
    if "trained" in wanted and not model.exists():
        base = str(ROOT / "recipes/models/tables-base")
        options = ["--shows", SHOWS, "--epochs", str(epochs), "--lr", "5e-4", "--per-task", "1"]
        agentrl("tune", "reward", "--labels", "train.jsonl", "--model", base, "--out", str(model), *options, cwd=out)
    servers = {"small": {"model": str(small), "max_model_len": 2048}, "reward": {"model": str(model), "max_model_len": 1024}}
    for name in wanted:
        server = "reward" if name == "trained" else "small"
        (out / f"recipe_{server}.py").write_text(RECIPE.format(judges={server: servers[server]}))
        file = "heldout.jsonl" if name == "trained" else "few.jsonl"
        recipe = ["--recipe", f"recipe_{server}.py", "--out", f"{name}.json"]
        agentrl("judge", "calibrate", f"rewards.mine:{name}", file, *recipe, cwd=out, fine=(0, 1))
    print(table(out))


if __name__ == "__main__":
    typer.run(main)
