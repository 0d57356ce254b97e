"""Settings for a run on several machines (`cluster`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, StrictFloat, StrictInt, StrictStr

from agentrl.config.section import Needs, Section, resumable

LOCAL, AUTO = "local", "auto"
AMOUNTS = ("cpus", "gpus", "memory_gib", "nodes")
"""Entries for a part that have a fixed meaning. Any other entry is the amount of a custom resource if it is a number, or the value of a
label if it is a string."""
_ADDRESS = re.compile(r"(ray://)?([A-Za-z0-9](?:[A-Za-z0-9.-]{0,253})|\[[0-9A-Fa-f:.]{2,45}\]):(\d{1,5})")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_./-]{0,126}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_OF_RAY = {"CPU": "cpus", "cpu": "cpus", "GPU": "gpus", "gpu": "gpus", "memory": "memory_gib", "memory_gb": "memory_gib"}
_USES_GPUS = ("server", "gate", "judge-")
_MOST = 1_000_000.0

Amounts = dict[str, StrictInt | StrictFloat | StrictStr]


def _checked_address(address: str) -> str:
    """Returns the address. Raises `ValueError` if the address is not `local`, `auto`, `HOST:PORT` or `ray://HOST:PORT`."""
    matched = _ADDRESS.fullmatch(address)
    if address in (LOCAL, AUTO) or (matched is not None and 0 < int(matched[3]) < 65536):
        return address
    raise ValueError(
        "set local, auto (the Ray cluster of this machine), HOST:PORT of a Ray head, or ray://HOST:PORT of a Ray client server"
    )


class ClusterConfig(Section):
    """The machines on which the parts of a run start. `serving.replicas`, `learner.ranks` and `rollout.workers` set the numbers of servers,
    learner ranks and rollout workers. See docs/cluster.md."""

    address: Annotated[str, AfterValidator(_checked_address)] = resumable(LOCAL)
    """local: this machine. auto: the Ray cluster to which this machine belongs. HOST:PORT or ray://HOST:PORT: a Ray cluster."""
    resources: Annotated[
        dict[str, Amounts],
        Needs("a cluster: set cluster.address to auto or HOST:PORT", lambda recipe, own: own.address != LOCAL),
    ] = resumable({}, max_length=64)
    """Resources that each server, learner, worker, gate, redis or judge-NAME reserves, such as {"server": {"cpus": 8, "gpus": 1,
    "memory_gib": 64}}. A string is a label that the node must have. "nodes" (learner): machines over which its ranks are divided."""

    @property
    def is_local(self) -> bool:
        """Whether all parts start on this machine."""
        return self.address == LOCAL

    @property
    def learner_nodes(self) -> int:
        """Number of machines over which the learner's ranks are divided; 1 if the setting is invalid (see `resource_errors`)."""
        nodes = self.resources.get("learner", {}).get("nodes", 1)
        return nodes if isinstance(nodes, int) and nodes >= 1 else 1


def resource_errors(resources: dict[str, Amounts], parts: list[str], *, ranks: int) -> Iterator[str]:
    """Yields messages about errors in `cluster.resources`.

    Args:
        parts: names of the parts that the recipe starts.
        ranks: number of learner processes.
    """
    for part, amounts in resources.items():
        where = f"cluster.resources.{part}"
        if part not in parts:
            yield f"{where} does nothing: this recipe starts only {', '.join(parts)}"
            continue
        if not amounts:
            yield f"{where} is empty: remove it, or set {', '.join(AMOUNTS[:3])}, a custom resource or a label"
        for name, amount in amounts.items():
            if problem := _amount_error(part, name, amount):
                yield f"{where}.{name}: {problem}"
    nodes = resources.get("learner", {}).get("nodes", 1)
    if isinstance(nodes, int) and nodes >= 1 and ranks % nodes:
        yield f"learner.ranks={ranks} must be a multiple of cluster.resources.learner.nodes={nodes}: change one of them"


def _amount_error(part: str, name: str, amount: float | str) -> str:
    """Returns the error in the entry `name` of `cluster.resources.PART`; empty if the entry is valid."""
    if name in _OF_RAY:
        return f"unknown; write {_OF_RAY[name]}"
    if not _NAME.fullmatch(name):
        return "the name of a resource or label may contain only letters, digits and _ . / -, at most 128 characters"
    if isinstance(amount, str):
        if name in AMOUNTS:
            return "it must be a number"
        return "" if _LABEL_VALUE.fullmatch(amount) else "a label value may contain only letters, digits and _ . -, at most 63 characters"
    if not 0 <= amount <= _MOST or (name != "gpus" and amount == 0):
        return f"it must be above 0 and at most {_MOST:g}"
    if name == "nodes":
        if part != "learner":
            return "only the learner can use several nodes; for more servers or workers set serving.replicas or rollout.workers"
        return "" if isinstance(amount, int) else "it must be an integer"
    if name == "gpus":
        if not part.startswith(_USES_GPUS):
            return "the learner uses one GPU per rank: set learner.ranks" if part == "learner" else "this part uses no GPU"
        return "" if amount <= 1 else "a server uses at most one GPU; for several servers set serving.replicas"
    return ""


def store_problem(url: object) -> str:
    """Returns the reason why a value cannot be the URL of an object store; empty if the URL is valid."""
    if not isinstance(url, str) or "://" not in url or not url.partition("://")[2].strip("/"):
        return "must be a URL with a folder, such as s3://bucket/folder"
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query:
        return "must not contain credentials or parameters: set them in the environment of the driver and of every node"
    return ""
