"""Divides the GPUs of one machine among the learner, servers, gate and judges. Lists the GPUs with nvidia-smi, so that this process does
not initialize CUDA."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from agentrl.config.recipe import Recipe
from agentrl.errors import UserError

_QUERY_S = 30.0


def _has_separate_gpus(recipe: Recipe, on_gpus: bool) -> bool:
    """Whether the policy's servers and the learner use different GPUs. NCCL allows only one member of a group per GPU, and several servers
    on one GPU would compete for it."""
    return recipe.serving.weight_transfer.ref == "nccl" or (recipe.serving.replicas > 1 and on_gpus)


def has_own_gpus(recipe: Recipe, *, training: bool, on_gpus: bool) -> bool:
    """Whether some part is assigned separate GPUs. If no part is, all parts inherit the GPUs that the driver sees."""
    return _has_separate_gpus(recipe, on_gpus) or (training and recipe.gate_has_server and on_gpus)


def share_gpus(recipe: Recipe, visible: Sequence[str], *, training: bool, on_gpus: bool) -> dict[str, str]:
    """Returns CUDA_VISIBLE_DEVICES by part: "learner", "server" or "server-0", "gate", "judge-NAME". Parts that are missing inherit the
    driver's value.

    With `serving.weight_transfer=nccl` or several `serving.replicas`, the learner's ranks receive the first GPUs, and each server of the
    policy receives one of the next GPUs. Otherwise, the policy's server shares the first GPU with the learner. With `gate.server=own`, the
    gate's server receives the next GPU. The remaining GPUs are assigned to the judges' servers in turn. If no GPU is left, the judges'
    servers share the GPUs of the policy's servers. If `training` is False, the learner and the gate's server do not start and are not
    counted.

    Raises `UserError` if `visible` contains too few GPUs.
    """
    serving, separate = recipe.serving, _has_separate_gpus(recipe, on_gpus)
    with_gate = training and recipe.gate_has_server and on_gpus
    ranks = recipe.learner.ranks if training else 0
    policy = ranks + serving.replicas if separate else ranks  # GPUs of the learner and the policy
    if len(visible) < policy + with_gate:
        raise _too_few(recipe, needed=policy + with_gate, visible=len(visible), ranks=ranks, with_gate=with_gate)
    servers, left = visible[ranks:policy] if separate else visible[:1], visible[policy + with_gate :]
    devices = {"learner": ",".join(visible[:ranks])} if ranks else {}
    devices |= {f"server-{number}" if serving.replicas > 1 else "server": gpu for number, gpu in enumerate(servers)}
    if with_gate:
        devices["gate"] = visible[policy]
    shared = left or servers
    return devices | {f"judge-{name}": shared[number % len(shared)] for number, name in enumerate(recipe.judge_servers)}


def check_shared_memory(recipe: Recipe, devices: Mapping[str, str]) -> None:
    """Raises `UserError` if servers that share a GPU together need more than its memory.

    Args:
        devices: the result of `share_gpus`. If it is empty, all servers use the same GPU.
    """
    policy = recipe.serving.gpu_memory_utilization
    names = [name for name in devices if name == "gate" or name.startswith("server")] or ["server"]
    needs = {name: policy for name in names} | {
        f"judge-{name}": judge.gpu_memory_utilization for name, judge in recipe.judge_servers.items()
    }
    by_gpu: dict[str, list[str]] = {}
    for name in needs:
        by_gpu.setdefault(devices.get(name, ""), []).append(name)
    for sharing in by_gpu.values():
        if (total := sum(needs[name] for name in sharing)) > 1 + 1e-9:
            raise UserError(
                f"the servers {', '.join(sharing)} share a GPU and together need {total:g} times its memory",
                fix="lower serving.gpu_memory_utilization or judge_servers.NAME.gpu_memory_utilization",
            )


def _too_few(recipe: Recipe, *, needed: int, visible: int, ranks: int, with_gate: bool) -> UserError:
    serving, keys = recipe.serving, []
    fix = "set serving.weight_transfer=file, so that learner and server share a GPU"
    if serving.weight_transfer.ref == "nccl":
        keys.append("serving.weight_transfer=nccl")
    if serving.replicas > 1:
        keys.append(f"serving.replicas={serving.replicas}")
        fix = "lower serving.replicas" + ("; with 1, learner and server share a GPU" if ranks else "")
    if with_gate:
        keys.append("gate.server=own")
        fix = "set gate.server=shared, so that the policy's servers also run the gate's attempts"
    learner = f" with learner.ranks={ranks}" if ranks else ""
    verb = "is" if visible == 1 else "are"
    return UserError(f"{' and '.join(keys)}{learner} needs {needed} GPUs, but only {visible} {verb} visible here", fix=fix)


def visible_gpus() -> list[str]:
    """Returns the indices or ids of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES; empty if there is none or nvidia-smi
    fails."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() and name.strip() != "-1"]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_QUERY_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(number) for number in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]
