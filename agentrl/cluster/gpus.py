"""Which GPUs the learner and the server get when they must not share one. Asks the driver's tool, so that nothing starts CUDA."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

from agentrl.errors import UserError
from agentrl.recipe import Recipe

_QUERY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Values of CUDA_VISIBLE_DEVICES for the two sides; None leaves a process what it inherits."""

    learner: str | None = None
    server: str | None = None


def place(recipe: Recipe) -> Placement:
    """With `serving.weight_transfer=nccl` the learner's ranks get the first GPUs and the server the one after them.

    NCCL refuses two members of a group on one GPU. Raises `UserError` when there are too few. Otherwise everything is shared.
    """
    if recipe.serving.weight_transfer != "nccl":
        return Placement()
    gpus, ranks = visible(), recipe.learner.ranks
    if len(gpus) <= ranks:
        raise UserError(
            f"serving.weight_transfer=nccl with learner.ranks={ranks} needs {ranks + 1} GPUs, {len(gpus)} are visible here",
            fix="set serving.weight_transfer=file: learner and server then share a GPU",
        )
    return Placement(learner=",".join(gpus[:ranks]), server=gpus[ranks])


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
