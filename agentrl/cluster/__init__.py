"""Chooses the GPUs of learner and servers. It runs nvidia-smi, so that this process does not initialize CUDA."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.cluster.device import serving_device
from agentrl.config.recipe import Recipe
from agentrl.errors import UserError

_QUERY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Values of CUDA_VISIBLE_DEVICES for the parts of a run. None leaves a process what it inherits."""

    learner: str | None = None
    server: str | None = None
    replicas: tuple[str, ...] = ()  # of the policy's servers, if there are several
    gate: str | None = None  # of the gate's server, with gate.server=own
    judges: Mapping[str, str | None] = field(default_factory=dict)  # of `judge_servers`, by name


def place_parts(recipe: Recipe, *, training: bool = True) -> Placement:
    """Assigns GPUs. With `serving.weight_transfer=nccl` or several `serving.replicas`, the learner's ranks get the first GPUs, and each
    server of the policy gets one of the next. With `gate.server=own`, the gate's server gets the next one.

    NCCL allows one member of a group per GPU, and servers on one GPU would only compete. Judges' servers use the remaining GPUs in turn, or
    share those of the policy's servers if none is left. In all other cases, and on a CPU, nothing is assigned. Without `training`, learner
    and gate server do not start and are not counted.

    Raises `UserError` if there are too few GPUs.
    """
    serving = recipe.serving
    apart = serving.weight_transfer.ref == "nccl" or (serving.replicas > 1 and _on_gpus(recipe))
    for_gate = training and recipe.gate_has_server and _on_gpus(recipe)
    shared = [serving.gpu_memory_utilization, *(one.gpu_memory_utilization for one in recipe.judge_servers.values())]
    if not apart and recipe.judge_servers and recipe.device == "cuda" and sum(shared) > 1:
        raise UserError(
            f"the servers of policy and judges share a GPU and together need {sum(shared):g} of its memory",
            fix="lower serving.gpu_memory_utilization or judge_servers.NAME.gpu_memory_utilization",
        )
    if not apart and not for_gate:
        return Placement()
    gpus, ranks = visible_gpus(), recipe.learner.ranks if training else 0
    policy = ranks + serving.replicas if apart else ranks  # GPUs of learner and policy
    if len(gpus) < policy + for_gate:
        raise _too_few(recipe, needed=policy + for_gate, found=len(gpus), ranks=ranks, beside=for_gate)
    servers, left = gpus[ranks:policy] if apart else gpus[:1], gpus[policy + for_gate :]
    judges = {name: (left or servers)[number % len(left or servers)] for number, name in enumerate(recipe.judge_servers)}
    several = tuple(servers) if serving.replicas > 1 else ()
    return Placement(
        learner=",".join(gpus[:ranks]) or None,
        server=None if several else servers[0],
        replicas=several,
        gate=gpus[policy] if for_gate else None,
        judges=judges,
    )


def _too_few(recipe: Recipe, *, needed: int, found: int, ranks: int, beside: bool) -> UserError:
    serving, keys = recipe.serving, []
    fix = "set serving.weight_transfer=file: learner and server then share a GPU"
    if serving.weight_transfer.ref == "nccl":
        keys.append("serving.weight_transfer=nccl")
    if serving.replicas > 1:
        keys.append(f"serving.replicas={serving.replicas}")
        fix = "lower serving.replicas" + ("; with 1, learner and server share a GPU" if ranks else "")
    if beside:
        keys.append("gate.server=own")
        fix = "set gate.server=shared: the policy's servers then also run the gate's attempts"
    learner = f" with learner.ranks={ranks}" if ranks else ""
    return UserError(f"{' and '.join(keys)}{learner} needs {needed} GPUs, {found} are visible here", fix=fix)


def _on_gpus(recipe: Recipe) -> bool:
    return serving_device(recipe) == "cuda"


def visible_gpus() -> list[str]:
    """Returns the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() and name.strip() != "-1"]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_QUERY_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(number) for number in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]
