"""The plan of a run: which parts start, how many processes each has, and which resources each part reserves.

This module does not import Ray. Only `plan_here` depends on this machine; all other functions depend only on their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.cluster.device import serves_on_gpu
from agentrl.cluster.local_gpus import check_shared_memory, has_own_gpus, share_gpus, visible_gpus
from agentrl.config.recipe import Recipe
from agentrl.protocols.cluster import PartCommand

GIB = 1 << 30
_NUMBERED = ("worker",)  # parts that have a number in their name even if there is only one
_SANDBOX_GIB = 0.0625  # memory of a small sandbox
_REDIS_GIB = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The resources that one process group of a part reserves on one node."""

    name: str  # as in its `PartCommand`: "server", or "server-0" if there are several, "learner", "worker-3", "judge-small"
    cpus: float
    gpus: float = 0.0
    memory: int = 0  # bytes
    custom: Mapping[str, float] = field(default_factory=dict)  # amounts of the cluster's custom resources
    labels: Mapping[str, str] = field(default_factory=dict)  # labels that the node must have

    def amounts(self) -> dict[str, float]:
        """Returns the reserved amounts by Ray's resource names: CPU, GPU, memory (bytes) and custom resources. Excludes amounts of 0."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(self.memory), **self.custom}
        return {name: amount for name, amount in amounts.items() if amount}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPart:
    """A part of the run: `count` equal bundles."""

    name: str  # as in `cluster.resources`: "server", "learner", "worker", "gate", "redis", "judge-NAME", or "driver"
    count: int
    bundle: Bundle  # resources of each process group; its name is the part's name
    with_driver: bool = False  # whether it runs on the driver's machine, without a reservation

    def bundles(self) -> Iterator[Bundle]:
        """Yields the bundles, each with its own name."""
        for number in range(self.count):
            name = f"{self.name}-{number}" if self.count > 1 or self.name in _NUMBERED else self.name
            yield replace(self.bundle, name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """All parts of a run."""

    parts: tuple[PlannedPart, ...]
    address: str = "local"
    devices: Mapping[str, str] = field(default_factory=dict)
    """Bundle name -> CUDA_VISIBLE_DEVICES, for bundles that start on this machine. Bundles that are missing inherit the driver's value."""
    wrap: Callable[[PartCommand], PartCommand] | None = None
    """Function that changes the command of each part on this machine, for profilers."""

    @property
    def is_local(self) -> bool:
        """Whether all parts start on this machine."""
        return self.address == "local"

    def part(self, name: str) -> PlannedPart | None:
        """Returns the part with this name; None if the run does not start it."""
        return next((part for part in self.parts if part.name == name), None)

    def bundles(self) -> list[Bundle]:
        """Returns the bundles that a cluster must reserve, part by part. Excludes parts that run on the driver's machine."""
        return [bundle for part in self.parts if not part.with_driver for bundle in part.bundles()]

    def as_data(self) -> dict[str, Any]:
        """Returns the plan as JSON data."""
        rows = [
            {"part": part.name, "count": part.count, "with_driver": part.with_driver, "cpus": part.bundle.cpus, "gpus": part.bundle.gpus}
            | {"memory": part.bundle.memory, "custom": dict(part.bundle.custom), "labels": dict(part.bundle.labels)}
            for part in self.parts
        ]
        return {"address": self.address, "parts": rows, "devices": dict(self.devices)}


def plan_parts(recipe: Recipe, *, training: bool = True, on_gpus: bool = False, visible: Sequence[str] = ()) -> ClusterPlan:
    """Returns the plan of a recipe.

    On one machine, the servers and the learner share GPUs as `agentrl.cluster.local_gpus.share_gpus` assigns them. On a cluster, each rank
    of the learner and each server receives one GPU, or the amount that `cluster.resources` sets.

    Args:
        training: whether the learner, the gate and the workers start. An evaluation starts only servers.
        on_gpus: whether the servers and the learner compute on GPUs.
        visible: with `cluster.address=local`, the GPUs of this machine, as in CUDA_VISIBLE_DEVICES.

    Raises `UserError` if this machine has too few GPUs.
    """
    counts = (
        recipe.part_counts if training else {name: n for name, n in recipe.part_counts.items() if name.startswith(("server", "judge-"))}
    )
    driver = Bundle(name="driver", cpus=1, memory=2 * GIB)
    parts = [PlannedPart(name="driver", count=1, bundle=driver, with_driver=True)]
    for name, count in counts.items():
        bundle = _with_settings(_default_bundle(recipe, name, on_gpus), recipe.cluster.resources.get(name, {}))
        parts.append(PlannedPart(name=name, count=count, bundle=bundle, with_driver=name == "redis"))
    local = recipe.cluster.is_local and has_own_gpus(recipe, training=training, on_gpus=on_gpus)
    devices = share_gpus(recipe, visible, training=training, on_gpus=on_gpus) if local else {}
    return ClusterPlan(parts=tuple(parts), address=recipe.cluster.address, devices=devices)


def plan_here(recipe: Recipe, *, training: bool = True) -> ClusterPlan:
    """Returns the plan for a recipe, using the GPUs of this machine. On a cluster, `device=auto` means the device of the vLLM build that is
    installed on this machine.

    Raises `UserError` if this machine has too few GPUs, or if servers that share a GPU need more than its memory.
    """
    on_gpus = recipe.device == "cuda" if recipe.device != "auto" and not recipe.cluster.is_local else serves_on_gpu(recipe)
    visible: Sequence[str] = ()
    if recipe.cluster.is_local:
        visible = visible_gpus() if has_own_gpus(recipe, training=training, on_gpus=on_gpus) else ()
    plan = plan_parts(recipe, training=training, on_gpus=on_gpus, visible=visible)
    if recipe.cluster.is_local and (on_gpus or recipe.device == "cuda"):
        check_shared_memory(recipe, plan.devices)
    return plan


def _default_bundle(recipe: Recipe, name: str, on_gpus: bool) -> Bundle:
    """Returns the resources that a part reserves by default, which `cluster.resources` can change.

    The memory for models is an estimate, because no file is read here.
    """
    if name == "redis":
        return Bundle(name=name, cpus=0.5, memory=int(_REDIS_GIB * GIB))
    if name == "worker":
        episodes = -(-recipe.rollout.concurrency // max(1, recipe.rollout.workers))
        return Bundle(name=name, cpus=1, memory=int((0.5 + episodes * _SANDBOX_GIB) * GIB))
    if name == "learner":
        ranks, threads = recipe.learner.ranks // recipe.cluster.learner_nodes, max(1, recipe.learner.threads)
        if on_gpus:
            return Bundle(name=name, cpus=2 * ranks, gpus=ranks, memory=16 * GIB * ranks)
        return Bundle(name=name, cpus=threads * ranks, memory=3 * GIB * ranks)
    server = recipe.judge_servers[name.removeprefix("judge-")] if name.startswith("judge-") else recipe.serving
    if on_gpus:
        return Bundle(name=name, cpus=2, gpus=1, memory=8 * GIB)
    return Bundle(name=name, cpus=max(1, server.threads), memory=int((2 + server.kv_cache_gb) * GIB))


def _with_settings(default: Bundle, settings: Mapping[str, float | str]) -> Bundle:
    """Returns the bundle with the recipe's entries instead of the defaults."""
    numbers = {name: amount for name, amount in settings.items() if not isinstance(amount, str)}
    fixed = {name: numbers.pop(name) for name in ("cpus", "gpus", "memory_gib", "nodes") if name in numbers}
    return Bundle(
        name=default.name,
        cpus=fixed.get("cpus", default.cpus),
        gpus=fixed.get("gpus", default.gpus),
        memory=int(fixed["memory_gib"] * GIB) if "memory_gib" in fixed else default.memory,
        custom=numbers,
        labels={name: text for name, text in settings.items() if isinstance(text, str)},
    )
