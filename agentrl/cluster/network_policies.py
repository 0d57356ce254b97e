"""The network policies for a run on Kubernetes.

Policies are cumulative: a connection is allowed if any policy that selects its pod allows it. Exactly one of the policies `inside`, `redis`
and `sandbox` selects each pod of the run.

    inside     driver, servers, learner, workers: to and from each other, and to Redis, the cells and the name server
    redis      from the pods of `inside`; to nothing
    sandbox    the cells: from driver and workers; to nothing
    operator   the KubeRay operator to the dashboard of the head, from which it reads the state of the job
    outside    driver and workers to the given address ranges, except the link-local range, where clouds serve a node's credentials
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.errors import UserError
from agentrl.sandbox.cell import wire

NAME_LABEL, PART_LABEL = "app.kubernetes.io/instance", "agentrl-part"
"""Labels of pods: the name of the run's objects, and the part."""
_APART = ["redis", "sandbox"]
DASHBOARD_PORT, REDIS_PORT = 8265, 6379
_LINK_LOCAL = {4: ipaddress.ip_network("169.254.0.0/16"), 6: ipaddress.ip_network("fe80::/10")}


def network_policies(name: str, egress: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name and the `spec` of each policy.

    Args:
        name: name of the run's objects.
        egress: address ranges that the driver and the workers may reach, such as 203.0.113.0/24.

    Raises `UserError` if a range is invalid.
    """
    inside = {**_of(name), "matchExpressions": [{"key": PART_LABEL, "operator": "NotIn", "values": _APART}]}
    redis, sandbox = _of(name, "redis"), _of(name, "sandbox")
    names = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}
    dns = {"to": [names], "ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}
    to_redis = {"to": [{"podSelector": redis}], "ports": [_port(REDIS_PORT)]}
    to_cells = {"to": [{"podSelector": sandbox}], "ports": [_port(wire.PORT)]}
    yield (
        f"{name}-inside",
        _policy(inside, ingress=[{"from": [{"podSelector": inside}]}], egress=[{"to": [{"podSelector": inside}]}, to_redis, to_cells, dns]),
    )
    yield f"{name}-redis", _policy(redis, ingress=[{"from": [{"podSelector": inside}], "ports": [_port(REDIS_PORT)]}], egress=[])
    yield f"{name}-sandbox", _policy(sandbox, ingress=[from_drivers(name)], egress=[])
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}
    yield f"{name}-operator", _policy(_of(name, "driver"), ingress=[{"from": [operator], "ports": [_port(DASHBOARD_PORT)]}])
    if egress:
        outside = _drivers(name)
        blocks = [{"ipBlock": _block(block)} for block in egress]
        yield f"{name}-outside", _policy(outside, egress=[{"to": blocks}])


def from_drivers(name: str) -> dict[str, Any]:
    """Returns the rule that allows connections from the driver and the workers to a cell."""
    return {"from": [{"podSelector": _drivers(name)}], "ports": [_port(wire.PORT)]}


def _drivers(name: str) -> dict[str, Any]:
    return {**_of(name), "matchExpressions": [{"key": PART_LABEL, "operator": "In", "values": ["driver", "worker"]}]}


def _of(name: str, part: str = "") -> dict[str, Any]:
    return {"matchLabels": {NAME_LABEL: name, **({PART_LABEL: part} if part else {})}}


def _port(number: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": number}


def _policy(pods: Mapping[str, Any], **rules: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a policy that allows the connections in these rules, and no others in the rules' directions."""
    types = [{"ingress": "Ingress", "egress": "Egress"}[direction] for direction in rules]
    return {"podSelector": dict(pods), "policyTypes": types, **rules}


def _block(block: str) -> dict[str, Any]:
    """Returns the peer object for an address range. Raises `UserError` if the range is invalid or link-local."""
    try:
        network = ipaddress.ip_network(block)
    except ValueError:
        raise UserError(f"--egress {block[:60]!r} is not an address range", fix="give one such as 203.0.113.0/24 or 0.0.0.0/0") from None
    link_local: Any = _LINK_LOCAL[network.version]
    if network.subnet_of(link_local):
        raise UserError(f"--egress {block[:60]!r} is link-local: clouds serve the credentials of a node there", fix="remove it")
    return {"cidr": str(network)} | ({"except": [str(link_local)]} if network.supernet_of(link_local) else {})
