"""The setting of both sides: the recipe with all overrides, from which the runs of agentrl and the peer are configured."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl.cli.running import load_recipe
from agentrl.config import Recipe
from agentrl.errors import UserError
from agentrl.records import Split
from agentrl.task import open_family

ROOT = Path(__file__).resolve().parents[2]
MODES = ("single", "multi")
PROGRAMS = "python"  # the tool that submits a program in a one-turn episode


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of the comparison, without seeds. `wait`: seconds (from, to) that every program in a sandbox sleeps; (0, 0): none."""

    recipe: str
    mode: str
    model: str = ""  # folder; empty: the recipe's
    wait: tuple[float, float] = (0.0, 0.0)
    target: float = 0.9  # held-out success at which a side stops
    every: int = 4  # steps between evaluations
    heldout: int = 160  # tasks in each
    minutes: float = 40.0  # maximum minutes of training from the command on; evaluations are not counted (docs/peers.md)
    backend: str = "auto"
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"mode {self.mode!r} is unknown", fix=f"use {' or '.join(MODES)}")
        if not 0.0 < self.target <= 1.0:
            raise UserError(f"target {self.target:g} is not a success rate", fix="use a number above 0 and at most 1")
        if self.minutes <= 0 or self.every < 1 or self.heldout < 1:
            raise UserError("minutes, every and heldout must be above 0", fix="see --help")
        if self.mode == "single" and self.wait[1]:
            raise UserError("a single turn makes no tool calls, so --wait has no effect", fix="omit --wait, or choose --mode multi")

    @property
    def name(self) -> str:
        """Name of its results, from the options that distinguish it from other settings."""
        model = Path(self.model).name if self.model else Path(self.recipe).stem
        low, high = self.wait
        return f"{model}-{self.mode}" + (f"-wait-{low:g}-{high:g}" if high else "")

    def record(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        record: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return record

    def arguments(self, seed: int) -> list[str]:
        """Overrides of the recipe that this setting needs, as on the command line of `agentrl train`."""
        _, written = load_recipe(ROOT / self.recipe, list(self.overrides))
        arguments = [
            f"seed={seed}",
            *self.overrides,
            f"evaluation.every={self.every}",
            f"evaluation.heldout={self.heldout}",
            "evaluation.heldout_real=0",
            "evaluation.sampling.temperature=0.0",
        ]
        if self.model:
            arguments.append(f"policy.model={json.dumps(self.model)}")
        if self.mode == "single" and self._hands_programs_in(written):
            options = {"of": written.tasks.family.ref, **written.tasks.family.options}
            arguments += ["tasks.family=benchmarks.contest.single:SingleTurn", f"tasks.family.options={json.dumps(options)}"]
        if self.wait[1]:
            options = {"low": self.wait[0], "high": self.wait[1], "backend": self.backend}
            arguments += ["sandbox.backend=benchmarks.contest.slow:SlowBackend", f"sandbox.backend.options={json.dumps(options)}"]
        else:
            arguments.append(f"sandbox.backend={self.backend}")
        return arguments

    def build_recipe(self, seed: int) -> Recipe:
        """Returns the recipe of one run. Raises `UserError` if it uses a feature that the peer lacks."""
        recipe = load_recipe(ROOT / self.recipe, self.arguments(seed))[1]
        check_shared(recipe)
        return recipe

    def command(self, *more: str) -> str:
        """The command that measures this setting, as a user types it."""
        argv = ["python", "benchmarks/peers.py", "--recipe", self.recipe, "--mode", self.mode]
        argv += ["--model", self.model] if self.model else []
        argv += ["--wait", f"{self.wait[0]:g}..{self.wait[1]:g}"] if self.wait[1] else []
        argv += ["--target", f"{self.target:g}", "--every", str(self.every), "--heldout", str(self.heldout)]
        argv += ["--minutes", f"{self.minutes:g}"]
        argv += ["--backend", self.backend] if self.backend != "auto" else []
        argv += [word for override in self.overrides for word in ("--set", override)]
        return shlex.join([*argv, *more])

    def _hands_programs_in(self, recipe: Recipe) -> bool:
        """Whether the tasks have the tool `PROGRAMS`. Tasks without tools already have one turn."""
        task = open_family(recipe.tasks, seed=0, root=ROOT).task(Split.TRAIN, 0)
        if PROGRAMS in task.tools or not task.tools:
            return bool(task.tools)
        raise UserError(
            f"the tasks of {recipe.tasks.family} have tools ({', '.join(task.tools)}) but not {PROGRAMS!r}, which a single turn needs",
            fix="choose --mode multi, or a family whose tasks have python or no tools",
        )


def check_shared(recipe: Recipe) -> None:
    """Raises `UserError` for settings without an equivalent in GRPOTrainer, because the two sides would train differently."""
    objective, learner = recipe.objective, recipe.learner
    wrong = {
        f"objective.advantage={objective.advantage}": objective.advantage.ref != "grpo",
        f"objective.loss={objective.loss}": objective.loss.ref != "clip",
        f"objective.aggregation={objective.aggregation}": objective.aggregation != "token_mean",
        f"objective.kl={objective.kl}": objective.kl != "none",
        f"learner.minibatches={learner.minibatches}": learner.minibatches != 1,
        "learner.lora": learner.lora is not None,
        "rollout.group.branches": recipe.rollout.group.branches > 1,
        "critic": recipe.critic is not None,
        f"rollout.agent={recipe.rollout.agent}": recipe.rollout.agent.ref != "turns",
    }
    if unsupported := [name for name, is_wrong in wrong.items() if is_wrong]:
        raise UserError(f"the peer has no equivalent of {', '.join(unsupported)}", fix="remove it from the recipe")
