"""Determines whether a plan fits the nodes of a cluster, and renders the plan and the nodes as tables.

`fit_plan` looks for an assignment. If it finds none, the plan may still fit the cluster, because the search is greedy. `Fit.problems` lists
only requirements that no assignment can satisfy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.base.user_code import printable
from agentrl.cluster.plan import GIB, Bundle, ClusterPlan, PlannedPart
from agentrl.errors import UserError

_SLACK = 1e-6  # tolerance for amounts, which Ray rounds to 1e-4
_ROWS_SHOWN = 40
_USUAL = ("CPU", "GPU", "memory")
_REDUCTIONS = {
    "server": "lower serving.replicas",
    "worker": "lower rollout.workers",
    "learner": "lower learner.ranks",
    "gate": "set gate.server=shared",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """A node of a cluster, with its resource amounts by Ray's names (`Bundle.amounts`)."""

    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]  # amounts that other jobs have not reserved
    labels: Mapping[str, str] = field(default_factory=dict)

    def has_labels(self, wanted: Mapping[str, str]) -> bool:
        """Whether the node has all of these labels."""
        return all(self.labels.get(name) == value for name, value in wanted.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The result of fitting a plan to nodes."""

    assignment: Mapping[str, str] | None  # bundle name -> node name; None if the search finds none
    problems: tuple[str, ...] = ()  # reasons why no assignment can exist

    @property
    def is_impossible(self) -> bool:
        """Whether it is certain that no assignment exists."""
        return bool(self.problems)


def fit_plan(plan: ClusterPlan, nodes: Sequence[ClusterNode], *, now: bool = False) -> Fit:
    """Returns an assignment of the plan's bundles to nodes, or the reasons why there is none. If the search fails although an assignment
    may exist, returns neither. `now`: whether to use only the amounts that other jobs have not reserved."""
    amounts = {node.name: dict(node.free if now else node.total) for node in nodes}
    problems = tuple(_problems(plan, nodes, amounts))
    if problems:
        return Fit(assignment=None, problems=problems)
    bundles = plan.bundles()
    for order in _orders(bundles):
        if (assignment := _first_fit(order, nodes, amounts)) is not None:
            return Fit(assignment=assignment)
    return Fit(assignment=None)


def _orders(bundles: Sequence[Bundle]) -> Iterable[list[Bundle]]:
    """Returns the orders in which to try a greedy assignment: bundles with the most labels and custom resources first, then the largest
    bundles first, by GPUs, by CPUs and by memory."""
    keys: list[Callable[[Bundle], tuple[float, ...]]] = [
        lambda one: (len(one.labels) + len(one.custom), one.gpus, one.cpus, one.memory),
        lambda one: (one.gpus, one.memory, one.cpus),
        lambda one: (one.cpus, one.memory, one.gpus),
        lambda one: (one.memory, one.cpus, one.gpus),
    ]
    return (sorted(bundles, key=key, reverse=True) for key in keys)


def _first_fit(
    bundles: Sequence[Bundle], nodes: Sequence[ClusterNode], amounts: Mapping[str, Mapping[str, float]]
) -> dict[str, str] | None:
    """Assigns each bundle to the node on which it fits and leaves the fewest GPUs, then the fewest CPUs, free. Returns None if a bundle
    fits on no node."""
    left = {name: dict(free) for name, free in amounts.items()}
    assignment: dict[str, str] = {}
    for bundle in bundles:
        wanted = bundle.amounts()
        fitting = [node.name for node in nodes if node.has_labels(bundle.labels) and _copies(wanted, left[node.name]) >= 1]
        if not fitting:
            return None
        chosen = min(fitting, key=lambda name: (left[name].get("GPU", 0.0), left[name].get("CPU", 0.0)))
        for resource, amount in wanted.items():
            left[chosen][resource] -= amount
        assignment[bundle.name] = chosen
    return assignment


def _copies(wanted: Mapping[str, float], free: Mapping[str, float]) -> int:
    """Returns how many bundles with these amounts fit into the free amounts."""
    if not wanted:
        return 1 << 30
    return min(math.floor(free.get(name, 0.0) / amount + _SLACK) for name, amount in wanted.items())


def _problems(plan: ClusterPlan, nodes: Sequence[ClusterNode], amounts: Mapping[str, Mapping[str, float]]) -> Iterable[str]:
    """Yields a message for each part that does not fit even if no other part is placed. If every part fits alone, yields a message for each
    resource of which the cluster has too little in total."""
    reserved = [part for part in plan.parts if not part.with_driver]
    short = False
    for part in reserved:
        wanted = part.bundle.amounts()
        room = sum(_copies(wanted, amounts[node.name]) for node in nodes if node.has_labels(part.bundle.labels))
        if room < part.count:
            short = True
            yield f"{part.count} x {part.name} ({_wishes(part.bundle)}): room for {room}"
    if short:
        return
    for resource in dict.fromkeys(name for part in reserved for name in part.bundle.amounts()):
        needed = sum(part.count * part.bundle.amounts().get(resource, 0.0) for part in reserved)
        there = sum(free.get(resource, 0.0) for free in amounts.values())
        if needed > there + _SLACK * max(1.0, needed):
            yield f"all parts together need {_amount(resource, needed)}; the cluster has {_amount(resource, there)}"


def no_fit_error(plan: ClusterPlan, nodes: Sequence[ClusterNode], problems: Sequence[str]) -> UserError:
    """Returns the error for a plan that does not fit. The error's message shows the plan next to the nodes, and its fix lists the recipe
    keys to change."""
    short = [part for part in plan.parts if any(f" x {part.name} (" in problem for problem in problems)]
    message = (
        f"the plan does not fit the cluster at {plan.address}: {'; '.join(problems)}\n{describe_plan(plan)}\n\n{describe_nodes(nodes)}"
    )
    shrinkable = short or [part for part in plan.parts if not part.with_driver]
    reductions = list(dict.fromkeys(_REDUCTIONS.get(part.name, "configure fewer judge_servers") for part in shrinkable))
    return UserError(message, fix=f"add nodes, {', '.join(reductions)}, or set what a part reserves in cluster.resources")


def describe_plan(plan: ClusterPlan, assignment: Mapping[str, str] | None = None) -> str:
    """Returns the plan as a table with the part, the number of processes, the reserved amounts, and where the part starts."""
    rows = [("part", "count", "CPUs", "GPUs", "memory", "where")]
    for part in plan.parts:
        one = part.bundle
        rows.append((part.name, str(part.count), f"{one.cpus:g}", _gpus(plan, part), _gib(one.memory), _where(plan, part, assignment)))
    return aligned(rows)


def _gpus(plan: ClusterPlan, part: PlannedPart) -> str:
    """Returns the GPUs of a part as text: their number or, on a single machine, their device ids."""
    devices = [plan.devices[bundle.name] for bundle in part.bundles() if bundle.name in plan.devices] if plan.is_local else []
    if plan.is_local and part.bundle.gpus:
        return f"device {', '.join(devices)}" if devices else "all, shared"
    return f"{part.bundle.gpus:g}"


def _where(plan: ClusterPlan, part: PlannedPart, assignment: Mapping[str, str] | None) -> str:
    if plan.is_local:
        return "this machine"
    if part.with_driver:
        return "with the driver" if part.name != "driver" else "where the command runs"
    if assignment is None:
        wishes = [f"{amount:g} {name}" for name, amount in part.bundle.custom.items()]
        return "a node" + "".join(f", {wish}" for wish in [*wishes, *(f"{name}={value}" for name, value in part.bundle.labels.items())])
    nodes = list(dict.fromkeys(assignment[bundle.name] for bundle in part.bundles()))
    return ", ".join(map(_name, nodes[:4])) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")


def describe_nodes(nodes: Sequence[ClusterNode]) -> str:
    """Returns the nodes of a cluster as a table: the total amounts, and in brackets the amounts that other jobs have not reserved, if they
    differ. Shows at most 40 nodes."""
    rows = [("node", "CPUs", "GPUs", "memory", "custom resources and labels")]
    for node in nodes[:_ROWS_SHOWN]:
        custom = [f"{amount:g} {name}" for name, amount in node.total.items() if name not in _USUAL and not _is_internal(name)]
        labels = [f"{name}={value}" for name, value in node.labels.items() if not name.startswith("ray.io/node-id")]
        shown = [_both(node, name) for name in _USUAL]
        rows.append((_name(node.name), shown[0], shown[1], shown[2], printable(", ".join(custom + labels) or "-", 200)))
    more = f"\nand {len(nodes) - _ROWS_SHOWN} more nodes" if len(nodes) > _ROWS_SHOWN else ""
    return aligned(rows) + more


def _is_internal(resource: str) -> bool:
    return resource.startswith("node:") or resource == "object_store_memory" or "_group_" in resource


def _both(node: ClusterNode, resource: str) -> str:
    total, free = node.total.get(resource, 0.0), node.free.get(resource, 0.0)
    shown = _gib(total) if resource == "memory" else f"{total:g}"
    return shown if free >= total - _SLACK * max(1.0, total) else f"{shown} ({_gib(free) if resource == 'memory' else f'{free:g}'} free)"


def _wishes(bundle: Bundle) -> str:
    amounts = [_amount(name, amount) for name, amount in bundle.amounts().items()]
    return ", ".join([*amounts, *(f"{name}={value}" for name, value in bundle.labels.items())]) or "nothing"


def _amount(resource: str, amount: float) -> str:
    return f"{_gib(amount)} of memory" if resource == "memory" else f"{amount:g} {resource}"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _name(node: str) -> str:
    return printable(node, 60)


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Returns rows of text as a table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def fit_as_data(fit: Fit, nodes: Sequence[ClusterNode]) -> dict[str, Any]:
    """Returns the nodes and the assignment as JSON data."""
    listed = [{"name": node.name, "total": dict(node.total), "free": dict(node.free), "labels": dict(node.labels)} for node in nodes]
    return {"nodes": listed, "assignment": None if fit.assignment is None else dict(fit.assignment), "problems": list(fit.problems)}
