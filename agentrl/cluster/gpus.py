"""Which GPUs the learner and the server get when they must not share one. Asks the driver's tool, so that nothing starts CUDA."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.errors import UserError
from agentrl.recipe import Recipe

_QUERY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Values of CUDA_VISIBLE_DEVICES for the parts of a run; None leaves a process what it inherits."""

    learner: str | None = None
    server: str | None = None
    judges: Mapping[str, str | None] = field(default_factory=dict)  # of the servers of `judge_servers`, by name


def place(recipe: Recipe) -> Placement:
    """With `serving.weight_transfer=nccl` the learner's ranks get the first GPUs and the server the one after them.

    NCCL refuses two members of a group on one GPU. Judges' servers get the GPUs after these in turn, and where none is left share the
    server's. Raises `UserError` when there are too few. Otherwise everything is shared.
    """
    shared = [recipe.serving.gpu_memory_utilization, *(one.gpu_memory_utilization for one in recipe.judge_servers.values())]
    if recipe.serving.weight_transfer != "nccl" and recipe.judge_servers and recipe.device == "cuda" and sum(shared) > 1:
        raise UserError(
            f"the servers of policy and judges share a GPU, and want {sum(shared):g} of its memory together",
            fix="lower serving.gpu_memory_utilization or judge_servers.NAME.gpu_memory_utilization",
        )
    if recipe.serving.weight_transfer != "nccl":
        return Placement()
    gpus, ranks = visible(), recipe.learner.ranks
    if len(gpus) <= ranks:
        raise UserError(
            f"serving.weight_transfer=nccl with learner.ranks={ranks} needs {ranks + 1} GPUs, {len(gpus)} are visible here",
            fix="set serving.weight_transfer=file: learner and server then share a GPU",
        )
    left = gpus[ranks + 1 :] or [gpus[ranks]]
    judges = {name: left[number % len(left)] for number, name in enumerate(recipe.judge_servers)}
    return Placement(learner=",".join(gpus[:ranks]), server=gpus[ranks], judges=judges)


def visible() -> list[str]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() and name.strip() != "-1"]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_QUERY_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(number) for number in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]
