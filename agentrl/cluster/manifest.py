"""The Kubernetes objects for a run: a KubeRay RayJob with its cluster, Redis, network policies, and the volume for the run folder.

Every part of the plan is a separate worker group. The pods of a group offer a custom resource `agentrl-PART-pod`, which the recipe inside
the cluster reserves, so each part starts in pods of its own group. The head pod contains the driver and the run folder, and offers no CPUs
for parts.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.cluster import cells
from agentrl.cluster.network_policies import DASHBOARD_PORT, NAME_LABEL, PART_LABEL, REDIS_PORT, from_drivers, network_policies
from agentrl.cluster.plan import GIB, ClusterPlan, PlannedPart
from agentrl.config.recipe import Recipe
from agentrl.errors import UserError

RAY_VERSION = "2.60.0"
_LONGEST_NAME = 40  # KubeRay extends the name of a RayJob and allows 47 characters
_RAY_BYTES = GIB  # memory of Ray's processes in a pod
_PRE_RUNNING_S = 1800
_RETRIES = 4  # number of new clusters after the loss of the head; each continues the run
_KEEP_S = 600  # seconds for which the pods of a finished job are kept, for their logs
_USER = 1000
_PASSWORD = "AGENTRL_REDIS_PASSWORD"  # KubeRay forbids REDIS_PASSWORD in the head
_OBJECT_STORE = str(100 << 20)  # bytes; parts exchange nothing through Ray
_IMAGE = re.compile(r"[a-z0-9][a-z0-9._:/-]{0,200}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_QUANTITY = re.compile(r"[1-9][0-9]{0,8}(Mi|Gi|Ti)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestOptions:
    """The options of a manifest that are not in the recipe. Raises `UserError` if Kubernetes would reject a value."""

    recipe: str  # path of the recipe file in the project folder of the image
    overrides: tuple[str, ...] = ()
    image: str
    namespace: str = "default"
    storage: str = "100Gi"  # size of the volume with the run folder
    egress: tuple[str, ...] = ()  # address ranges outside the cluster that the driver and the workers may reach
    cells: int = 0  # number of pods for sandboxes; 0 means that sandboxes open in the pods of the driver and the workers
    cell_memory: str = "8Gi"

    def __post_init__(self) -> None:
        checks = (
            ("--image", self.image, _IMAGE, "a name such as registry.example/agentrl:0.1.0"),
            ("--namespace", self.namespace, _LABEL, "lower-case letters, digits and dashes, at most 63"),
            ("--storage", self.storage, _QUANTITY, "an amount such as 100Gi"),
            ("--cell-memory", self.cell_memory, _QUANTITY, "an amount such as 8Gi"),
        )
        for option, value, pattern, wanted in checks:
            if not pattern.fullmatch(value):
                raise UserError(f"{option} {value[:100]!r} is not valid in Kubernetes", fix=f"give {wanted}")


def object_name(name: str) -> str:
    """Converts the name of a recipe to a name for Kubernetes objects (RFC 1035 label). Different names result in different labels."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not label[:1].isalpha():
        label = f"run-{label}".rstrip("-")
    if label == name and len(label) <= _LONGEST_NAME:
        return label
    return f"{label[: _LONGEST_NAME - 9].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def build_objects(recipe: Recipe, plan: ClusterPlan, options: ManifestOptions) -> list[dict[str, Any]]:
    """Returns the objects in the order in which they must be created. Raises `UserError` if the recipe cannot run in pods, or if an address
    range in `options.egress` is invalid."""
    if recipe.sandbox.backend.ref == "docker":
        raise UserError(
            "sandbox.backend=docker: a pod has no Docker daemon", fix="set sandbox.backend=bubblewrap, whose sandboxes run inside the pods"
        )
    if recipe.sandbox.backend.ref == cells.CLAIMS and not options.cells:
        raise UserError(f"sandbox.backend={cells.CLAIMS} needs a warm pool", fix="add --cells with the number of cells to keep ready")
    if wrong := sorted({name for part in plan.parts for name in part.bundle.custom if name.lower().endswith("gpu")}):
        raise UserError(f"cluster.resources: KubeRay treats {', '.join(wrong)} as GPUs", fix="choose a name that does not end in gpu")
    name = object_name(recipe.name)
    builder = _Builder(name=name, options=options, claims=recipe.sandbox.backend.ref == cells.CLAIMS)
    script = _start_script(recipe, plan, options, name)
    return [
        builder.named("v1", "ConfigMap", f"{name}-start", data={"start.sh": script}),
        builder.claim(f"{name}-runs", options.storage),
        *builder.redis(),
        *(builder.named("networking.k8s.io/v1", "NetworkPolicy", own, spec=spec) for own, spec in network_policies(name, options.egress)),
        *builder.cell_objects(recipe),
        builder.job(plan),
    ]


def _start_script(recipe: Recipe, plan: ClusterPlan, options: ManifestOptions, name: str) -> str:
    """Returns the shell script of the driver, which starts the run or, in the cluster of a retry, resumes it."""
    overrides = [*options.overrides, "cluster.address=auto", f"cluster.resources={json.dumps(_reservations(plan))}"]
    if plan.part("redis") is not None:
        own = {"ref": "redis", "options": {"url": f"redis://{name}-redis:{REDIS_PORT}/1", "password": f"env:{_PASSWORD}"}}
        overrides.append(f"store={json.dumps(own)}")
    if options.cells:
        overrides.append(f"sandbox.backend={json.dumps(cells.backend_override(recipe, name))}")
    run = f"/runs/{recipe.name}"
    start = ["agentrl", "train", options.recipe, *overrides, "--run-dir", run]
    resume = ["agentrl", "train", options.recipe, "--run-dir", run, "--resume"]
    return (
        "set -eu\ncd /project\n"
        f"if [ -e {shlex.quote(f'{run}/recipe.json')} ]; then\n  exec {shlex.join(resume)}\nfi\nexec {shlex.join(start)}\n"
    )


def _reservations(plan: ClusterPlan) -> dict[str, dict[str, float | str]]:
    """Returns `cluster.resources` for the run in the cluster: the planned amounts and, for each part, the custom resource that its group's
    pods offer."""
    reserved: dict[str, dict[str, float | str]] = {}
    for part in plan.parts:
        if part.with_driver:
            continue
        one = part.bundle
        entry: dict[str, float | str] = {"cpus": one.cpus, "memory_gib": one.memory / GIB, **one.custom, **one.labels, _resource(part): 1}
        if one.gpus and part.name != "learner":
            entry["gpus"] = one.gpus
        reserved[part.name] = entry | ({"nodes": part.count} if part.name == "learner" and part.count > 1 else {})
    return reserved


def _resource(part: PlannedPart) -> str:
    """Returns the custom resource that a part's pods offer. The suffix `-pod` is needed because KubeRay treats resources whose names end in
    gpu as GPUs."""
    return f"agentrl-{object_name(part.name)}-pod"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Builder:
    """Builds objects with the run's name, namespace and labels."""

    name: str
    options: ManifestOptions
    claims: bool  # whether the driver and the workers create agent-sandbox claims

    def labels(self, part: str = "") -> dict[str, str]:
        labels = {"app.kubernetes.io/name": "agentrl", NAME_LABEL: self.name}
        return labels | ({PART_LABEL: part} if part else {})

    def named(self, version: str, kind: str, name: str, **content: Any) -> dict[str, Any]:
        metadata = {"name": name, "namespace": self.options.namespace, "labels": self.labels()}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}

    def claim(self, name: str, storage: str) -> dict[str, Any]:
        spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": storage}}}
        return self.named("v1", "PersistentVolumeClaim", name, spec=spec)

    def job(self, plan: ClusterPlan) -> dict[str, Any]:
        cluster = {
            "rayVersion": RAY_VERSION,
            "authOptions": {"mode": "token"},
            "gcsFaultToleranceOptions": {
                "redisAddress": f"{self.name}-redis:{REDIS_PORT}",
                "redisPassword": {"valueFrom": self._password()},
            },
            "headGroupSpec": self._head(plan),
            "workerGroupSpecs": [self._group(part) for part in plan.parts if not part.with_driver],
        }
        spec = {
            "entrypoint": "bash /etc/agentrl/start.sh",
            "submissionMode": "SidecarMode",
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": _KEEP_S,
            "preRunningDeadlineSeconds": _PRE_RUNNING_S,
            "backoffLimit": _RETRIES,
            "rayClusterSpec": cluster,
        }
        return self.named("ray.io/v1", "RayJob", self.name, spec=spec)

    def _head(self, plan: ClusterPlan) -> dict[str, Any]:
        driver = plan.part("driver")
        assert driver is not None
        container = self._container(
            "ray-head", cpus=driver.bundle.cpus + 1, memory=driver.bundle.memory + 2 * _RAY_BYTES, nested=not self.options.cells
        )
        container |= {
            "ports": [{"name": "gcs-server", "containerPort": 6379}, {"name": "dashboard", "containerPort": DASHBOARD_PORT}],
            "env": [*container["env"], {"name": _PASSWORD, "valueFrom": self._password()}, *self._cell_key()],
            "volumeMounts": [
                *container["volumeMounts"],
                {"name": "runs", "mountPath": "/runs"},
                {"name": "start", "mountPath": "/etc/agentrl", "readOnly": True},
            ],
        }
        volumes = [
            {"name": "runs", "persistentVolumeClaim": {"claimName": f"{self.name}-runs"}},
            {"name": "start", "configMap": {"name": f"{self.name}-start"}},
        ]
        start = {"num-cpus": "0", "dashboard-host": "0.0.0.0", "object-store-memory": _OBJECT_STORE}
        return {"rayStartParams": start, "template": self._template("driver", container, volumes=volumes, opens=True)}

    def _group(self, part: PlannedPart) -> dict[str, Any]:
        one, opens = part.bundle, part.name == "worker"
        cpus, gpus = max(1, math.ceil(one.cpus)), math.ceil(one.gpus)
        offers = {"CPU": str(cpus), "memory": str(one.memory), _resource(part): "1"}
        offers |= {"GPU": str(gpus)} if gpus else {}
        offers |= {name: str(math.ceil(amount)) for name, amount in one.custom.items()}
        labels = {name: value for name, value in one.labels.items() if not name.startswith("ray.io/")}  # Ray sets these
        container = self._container(
            "ray-worker", cpus=cpus, memory=one.memory + _RAY_BYTES, gpus=gpus, nested=opens and not self.options.cells
        )
        container["env"] += self._cell_key() if opens else []
        container["volumeMounts"].append({"name": "runs", "mountPath": "/runs"})  # for the mirror of the run folder
        return {
            "groupName": object_name(part.name),
            "replicas": part.count,
            "minReplicas": part.count,
            "maxReplicas": part.count,
            "rayStartParams": {"object-store-memory": _OBJECT_STORE},
            "resources": offers,
            **({"labels": labels} if labels else {}),
            "template": self._template(
                object_name(part.name), container, volumes=[{"name": "runs", "emptyDir": {}}], selector=labels, opens=opens
            ),
        }

    def _container(self, name: str, *, cpus: float, memory: int, gpus: int = 0, nested: bool = False) -> dict[str, Any]:
        amounts = {"cpu": f"{math.ceil(cpus * 1000)}m", "memory": f"{math.ceil(memory / (1 << 20))}Mi"}
        amounts |= {"nvidia.com/gpu": str(gpus)} if gpus else {}
        security: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        return {
            "name": name,
            "image": self.options.image,
            "env": [{"name": "HOME", "value": "/tmp/home"}],
            "resources": {"requests": amounts, "limits": amounts},
            "securityContext": security | ({"procMount": "Unmasked"} if nested else {}),
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        }

    def _template(
        self,
        part: str,
        container: Mapping[str, Any],
        *,
        volumes: Sequence[Mapping[str, Any]] = (),
        selector: Mapping[str, str] | None = None,
        opens: bool = False,
        nested: bool = False,
    ) -> dict[str, Any]:
        """Returns a pod template. `opens`: whether the pod's processes open sandboxes. `nested`: whether sandboxes run inside the pod, as
        in a cell or, in a run without cells, in each pod whose processes open sandboxes.

        bubblewrap needs user namespaces and a mount of /proc, which the container runtime's system call filter forbids. A pod with nested
        sandboxes therefore runs in a separate user namespace, and each sandbox has its own filter (`agentrl/sandbox/seccomp.py`).
        """
        nested = nested or (opens and not self.options.cells)
        calls = opens and self.claims
        spec: dict[str, Any] = {
            "automountServiceAccountToken": calls,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "fsGroup": _USER,
                "seccompProfile": {"type": "Unconfined" if nested else "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [{"name": "tmp", "emptyDir": {}}, *volumes],
        }
        spec |= {"hostUsers": False} if nested else {}
        spec |= {"serviceAccountName": f"{self.name}-sandbox"} if calls else {}
        spec |= {"nodeSelector": dict(selector)} if selector else {}
        return {"metadata": {"labels": self.labels(part)}, "spec": spec}

    def cell_objects(self, recipe: Recipe) -> Iterator[dict[str, Any]]:
        """Yields the objects for the cells."""
        if not (count := self.options.cells):
            return
        amount, unit = int(self.options.cell_memory[:-2]), self.options.cell_memory[-2:]
        memory = amount * {"Mi": GIB // 1024, "Gi": GIB, "Ti": 1024 * GIB}[unit]
        container = self._container("cell", cpus=max(1, memory // (2 * GIB)), memory=memory, nested=True)
        container["env"] += self._cell_key()
        template = self._template("sandbox", cells.serve_in(container), nested=True)
        template["spec"] |= cells.near_workers({NAME_LABEL: self.name}, PART_LABEL)
        yield from cells.cell_objects(self, recipe, count, template, [from_drivers(self.name)])

    def _cell_key(self) -> list[dict[str, Any]]:
        reference = {"secretKeyRef": {"name": f"{self.name}-sandbox", "key": "key"}}
        return [{"name": cells.KEY_VARIABLE, "valueFrom": reference}] if self.options.cells else []

    def _password(self) -> dict[str, Any]:
        return {"secretKeyRef": {"name": f"{self.name}-redis", "key": "password"}}

    def redis(self) -> Iterator[dict[str, Any]]:
        """Yields the Service and the StatefulSet of Redis, which stores Ray's tables and the workers' groups."""
        name, labels = f"{self.name}-redis", self.labels("redis")
        port = {"name": "redis", "port": REDIS_PORT}
        yield self.named("v1", "Service", name, spec={"clusterIP": "None", "selector": labels, "ports": [port]})
        container = self._container("redis", cpus=0.5, memory=GIB)
        container["securityContext"]["readOnlyRootFilesystem"] = True
        check = {"exec": {"command": ["redis-cli", "ping"]}, "periodSeconds": 5, "timeoutSeconds": 3}
        container |= {
            "command": ["sh", "-c", _REDIS],
            "ports": [{"name": "redis", "containerPort": REDIS_PORT}],
            "env": [{"name": "REDISCLI_AUTH", "valueFrom": self._password()}],
            "readinessProbe": check,
            "livenessProbe": check | {"failureThreshold": 12},
            "volumeMounts": [{"name": "data", "mountPath": "/data"}, {"name": "tmp", "mountPath": "/tmp"}],
        }
        claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "20Gi"}}}
        template = self._template("redis", container)
        spec = {
            "serviceName": name,
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": template,
            "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": claim}],
        }
        yield self.named("apps/v1", "StatefulSet", name, spec=spec)


_REDIS = """exec redis-server - <<END
dir /data
appendonly yes
appendfsync always
maxmemory 640mb
maxmemory-policy noeviction
proto-max-bulk-len 33554432
protected-mode yes
requirepass "$REDISCLI_AUTH"
END
"""
