"""TRL's trainer on our tasks: a step of each kind of rollout, and the weights that it writes."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl.cli.running import load_recipe
from agentrl.session.preflight import open_chat
from agentrl.task import open_family
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from benchmarks.contest import trl
from benchmarks.contest.environment import Host
from benchmarks.contest.setting import ROOT, Setting

pytestmark = pytest.mark.slow

SMALL = ("steps=1", "rollout.groups_per_step=2", "rollout.group.size=4")
BASE = ROOT / "recipes/models/tables-base"


def run_step(mode: str, options: dict[str, Any], work: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The worker's event of one step, with programs that never print the answer."""
    from benchmarks.contest import trl_worker

    setting = Setting(recipe="recipes/quickstart.py", mode=mode, backend="bubblewrap", overrides=SMALL)
    _, recipe = load_recipe(ROOT / setting.recipe, [*setting.arguments(seed=0), "evaluation.every=0"])
    family = open_family(recipe.tasks, seed=0, root=ROOT)
    host = Host(recipe, family, open_chat(BASE), ScriptedSandboxes(printing("7\n")))
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\n"))
    try:
        trl_worker.train(host, recipe, {**trl.OPTIONS, "micro_batch": 0, **options}, BASE, work, every=1)
    finally:
        host.close()
    begun, step = (json.loads(line) for line in (work / "events.jsonl").read_text().splitlines())
    assert begun["event"] == "begun"
    step_event: dict[str, Any] = step
    return step_event


@pytest.mark.parametrize(
    ("mode", "options"), [("single", {}), ("multi", {}), ("multi", {"rollouts": "together"})], ids=["single", "multi", "together"]
)
def test_a_step_of_the_peer_writes_its_weights(mode: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = run_step(mode, options, tmp_path, monkeypatch)
    assert (step["step"], step["episodes"], step["faults"], step["asks"]) == (1, 8, 0, True)
    assert step["sampled"] >= step["trained"] >= 0 and step["sampled"] > 8
    assert step["parts"]["rollout"] > 0 and abs(sum(step["parts"].values()) - step["clock_s"]) < 0.5, "the parts add up to the whole time"
    files = {file.name for file in (tmp_path / "weights").iterdir()}
    assert files == {file.name for file in BASE.iterdir()} - {"SHA256SUMS"}
    assert (tmp_path / "weights/config.json").read_text() == (BASE / "config.json").read_text()
    before, after = load_file(BASE / "model.safetensors"), load_file(tmp_path / "weights/model.safetensors")
    assert before.keys() == after.keys()
    changed = any(not torch.equal(before[name], after[name]) for name in before)
    assert changed == (step["trained"] > 0)
