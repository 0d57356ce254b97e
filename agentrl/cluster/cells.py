"""The Kubernetes objects for a run's cells (`agentrl.sandbox.cell`): a Deployment, or an agent-sandbox template with a warm pool.

Cells are the only pods in which agents' programs run. Cells have no service account and mount no volume of the run. The policy
`NAME-sandbox` allows connections from the driver and the workers, and no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from agentrl.config.recipe import Recipe
from agentrl.sandbox.cell import wire
from agentrl.sandbox.cell.claims import API_VERSION as CLAIMS_VERSION

KEY_VARIABLE = "AGENTRL_CELL_KEY"
CLAIMS = "agent-sandbox"
_ENDING_S = 5


class Builder(Protocol):
    """What the functions in this module need of the object builder in `agentrl.cluster.manifest`."""

    @property
    def name(self) -> str:
        """Name of the run's objects."""

    def named(self, version: str, kind: str, name: str, **content: Any) -> dict[str, Any]:
        """Returns an object."""

    def labels(self, part: str = "") -> dict[str, str]:
        """Returns the labels of the run's objects; if `part` is set, the labels of that part's pods."""


def cell_objects(build: Builder, recipe: Recipe, count: int, template: Mapping[str, Any], ingress: list[Any]) -> Iterator[dict[str, Any]]:
    """Yields the objects of `count` cells.

    Args:
        template: pod template for a cell.
        ingress: rules for the network policy of an agent-sandbox template.
    """
    name, labels = f"{build.name}-sandbox", build.labels("sandbox")
    if recipe.sandbox.backend.ref != CLAIMS:
        port = {"name": "cell", "port": wire.PORT}
        yield build.named("v1", "Service", name, spec={"clusterIP": "None", "selector": labels, "ports": [port]})
        spec = {"replicas": count, "selector": {"matchLabels": labels}, "template": template}
        yield build.named("apps/v1", "Deployment", name, spec=spec)
        return
    policy = {"networkPolicyManagement": "Managed", "networkPolicy": {"ingress": ingress, "egress": []}}
    yield build.named(CLAIMS_VERSION, "SandboxTemplate", name, spec={"podTemplate": template, **policy})
    yield build.named(CLAIMS_VERSION, "SandboxWarmPool", name, spec={"replicas": count, "sandboxTemplateRef": {"name": name}})
    rule = {"apiGroups": [CLAIMS_VERSION.partition("/")[0]], "resources": ["sandboxclaims"], "verbs": ["create", "get", "patch", "delete"]}
    yield build.named("v1", "ServiceAccount", name)
    yield build.named("rbac.authorization.k8s.io/v1", "Role", name, rules=[rule])
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    account = {"kind": "ServiceAccount", "name": name, "namespace": build.named("v1", "ServiceAccount", name)["metadata"]["namespace"]}
    yield build.named("rbac.authorization.k8s.io/v1", "RoleBinding", name, roleRef=reference, subjects=[account])


def serve_in(container: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a container that runs a cell."""
    return {
        **container,
        "command": ["agentrl", "sandbox", "serve", "--key", f"env:{KEY_VARIABLE}"],
        "ports": [{"name": "cell", "containerPort": wire.PORT}],
        "readinessProbe": {"tcpSocket": {"port": wire.PORT}, "periodSeconds": 5},
    }


def near_workers(name_label: Mapping[str, str], part_label: str) -> dict[str, Any]:
    """Returns the pod fields that make a pod prefer the workers' nodes and terminate quickly."""
    labels = {"matchLabels": {**name_label, part_label: "worker"}}
    term = {"weight": 100, "podAffinityTerm": {"labelSelector": labels, "topologyKey": "kubernetes.io/hostname"}}
    affinity = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}
    return {"affinity": affinity, "terminationGracePeriodSeconds": _ENDING_S}


def backend_override(recipe: Recipe, name: str) -> dict[str, Any]:
    """Returns the value of `sandbox.backend` for a run with cells."""
    backend, key = recipe.sandbox.backend, f"env:{KEY_VARIABLE}"
    if backend.ref == CLAIMS:
        return {"ref": CLAIMS, "options": {"key": key, **backend.options, "pool": f"{name}-sandbox"}}
    return {"ref": "cell", "options": {"addresses": [f"{name}-sandbox:{wire.PORT}"], "key": key}}
