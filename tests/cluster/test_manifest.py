from __future__ import annotations

import ipaddress
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from agentrl.cli.sandboxes import sandbox_app
from agentrl.cluster import plan_parts
from agentrl.cluster.manifest import RAY_VERSION, ManifestOptions, build_objects, object_name
from agentrl.cluster.network_policies import network_policies
from agentrl.cluster.yaml_text import to_yaml
from agentrl.config import Recipe, build
from agentrl.errors import UserError
from agentrl.experience.redis_server import find_program
from agentrl.experience.redis_transport import RedisTransport
from tests.strategies import examples

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((Path(__file__).parent / "rayjob.schema.json").read_text())
AGENT_SANDBOX = json.loads((ROOT / "tests/sandbox/agent_sandbox.schema.json").read_text())
KUBERNETES = "1.37"
RECIPE = {"name": "Tables_1", "policy": {"model": "m"}, "tasks": {"family": "f:F"}, "device": "cpu", "cluster": {"address": "auto"}}
LARGE = {
    "device": "cuda",
    "serving": {"replicas": 3},
    "learner": {"ranks": 4},
    "rollout": {"workers": 5},
    "store": "redis",
    "gate": {"suite": "s", "server": "own"},
    "judge_servers": {"Small_1": {"model": "m"}},
    "cluster": {
        "address": "auto",
        "resources": {"learner": {"nodes": 2}, "server": {"cpus": 6, "disk": 1, "pool": "h100", "ray.io/x": "y"}},
    },
}


def build_and_parse(recipe: Recipe, /, **options: Any) -> list[dict[str, Any]]:
    """The objects of the recipe as a parser reads them from the stream."""
    manifest_options = ManifestOptions(**({"recipe": "recipes/mine.py", "image": "registry.example:5000/agentrl:1"} | options))
    objects = build_objects(recipe, plan_parts(recipe, on_gpus=recipe.device == "cuda"), manifest_options)
    return list(yaml.safe_load_all(to_yaml(objects)))


def by_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [item for item in objects if item["kind"] == kind]


def templates(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    groups = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"], **groups}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, LARGE], ids=["small", "large"])
def test_every_object_is_valid(changes: dict[str, Any]) -> None:
    objects = build_and_parse(build({**RECIPE, **changes}), egress=("203.0.113.0/24",))
    (job,) = by_kind(objects, "RayJob")
    jsonschema.validate(job, SCHEMA)
    for item in objects:
        if item is not job:
            kubernetes_validate.validate(item, KUBERNETES, strict=True)
    for name, template in templates(job).items():
        check_pod(name, template)
    assert len({(item["kind"], item["metadata"]["name"]) for item in objects}) == len(objects)
    assert {item["metadata"]["namespace"] for item in objects} == {"default"}


def check_pod(name: str, template: dict[str, Any]) -> None:
    kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": name}}, KUBERNETES, strict=True)


CLAIMED = {"sandbox": {"backend": {"ref": "agent-sandbox", "options": {"slots": 8}}}}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, CLAIMED], ids=["cells", "claims"])
def test_only_cells_run_programs_and_have_their_key(changes: dict[str, Any]) -> None:
    recipe = build({**RECIPE, **LARGE, **changes})
    objects = build_and_parse(recipe, cells=3, cell_memory="4Gi")
    (job,), name = by_kind(objects, "RayJob"), object_name("Tables_1") + "-sandbox"
    custom = [item for item in objects if item["apiVersion"].startswith("extensions.agents")]
    for item in objects:
        if item in custom:
            jsonschema.validate(item, AGENT_SANDBOX[f"{item['kind'].lower()}s"])
        elif item is not job:
            kubernetes_validate.validate(item, KUBERNETES, strict=True)
    cells = custom[0]["spec"]["podTemplate"] if custom else by_kind(objects, "Deployment")[0]["spec"]["template"]
    check_pod("cell", cells)
    assert [item["kind"] for item in custom] == (["SandboxTemplate", "SandboxWarmPool"] if changes else [])
    assert changes or by_kind(objects, "Service")[-1]["metadata"]["name"] == name
    assert cells["metadata"]["labels"]["agentrl-part"] == "sandbox" and cells["spec"]["automountServiceAccountToken"] is False
    assert {volume["name"] for volume in cells["spec"]["volumes"]} == {"tmp"} and cells["spec"]["hostUsers"] is False
    assert cells["spec"]["containers"][0]["resources"]["limits"] == {"cpu": "2000m", "memory": "4096Mi"}
    pods = {**templates(job), "cell": cells}
    for part, template in pods.items():
        pod, container = template["spec"], template["spec"]["containers"][0]
        opens = part in ("head", "worker")
        assert (
            (pod["securityContext"]["seccompProfile"]["type"] == "Unconfined")
            == (part == "cell")
            == ("procMount" in container["securityContext"])
        )
        assert ("AGENTRL_CELL_KEY" in {variable["name"] for variable in container["env"]}) == (opens or part == "cell")
        assert pod["automountServiceAccountToken"] is (opens and bool(changes)) and pod.get("serviceAccountName") == (
            name if opens and changes else None
        )
        assert pod["securityContext"]["runAsNonRoot"] is True and container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    (config,) = by_kind(objects, "ConfigMap")
    override = next(word for word in shlex.split(config["data"]["start.sh"]) if word.startswith("sandbox.backend="))
    backend = recipe.but(override).sandbox.backend
    where = {"pool": name, "slots": 8} if changes else {"addresses": [f"{name}:7423"]}
    assert backend.options == {"key": "env:AGENTRL_CELL_KEY", **where} and backend.ref == ("agent-sandbox" if changes else "cell")
    if changes:
        (role,) = by_kind(objects, "Role")
        assert role["rules"][0]["resources"] == ["sandboxclaims"] and len(role["rules"]) == 1
        with pytest.raises(UserError, match="--cells"):
            build_and_parse(recipe)


def test_the_command_of_a_cell_exists() -> None:
    (deployment,) = by_kind(build_and_parse(build(RECIPE), cells=1), "Deployment")
    command = deployment["spec"]["template"]["spec"]["containers"][0]["command"]
    result = CliRunner().invoke(sandbox_app, command[2:], env={"AGENTRL_CELL_KEY": "short"})
    assert isinstance(result.exception, UserError) and "has only 5 characters" in str(result.exception)


def test_the_schemas_reject_a_misspelt_field() -> None:
    job = by_kind(build_and_parse(build(RECIPE)), "RayJob")[0]
    job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        jsonschema.validate(job, SCHEMA)


def test_the_job_keeps_the_rules_that_only_the_operator_checks() -> None:
    (job,) = by_kind(build_and_parse(build({**RECIPE, **LARGE})), "RayJob")
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    assert len(job["metadata"]["name"]) <= 47 and spec["submissionMode"] == "SidecarMode" and spec["shutdownAfterJobFinishes"] is True
    assert not {"submitterConfig", "submitterPodTemplate", "clusterSelector"} & set(spec), "SidecarMode allows none of them"
    assert "restartPolicy" not in templates(job)["head"]["spec"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0", "no part starts next to the driver"
    head = templates(job)["head"]["spec"]["containers"][0]
    assert not {"REDIS_PASSWORD", "RAY_REDIS_ADDRESS"} & {variable["name"] for variable in head["env"]}
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
        assert not {"num-cpus", "num-gpus", "memory", "resources"} & set(group["rayStartParams"])
        assert set(group["resources"]) >= {"CPU", "memory", f"agentrl-{group['groupName']}-pod"}
    pinned = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["cluster"]
    assert any(f"ray=={RAY_VERSION.rpartition('.')[0]}." in requirement for requirement in pinned)


def test_each_part_has_a_group_of_pods_that_can_hold_it() -> None:
    recipe = build({**RECIPE, **LARGE})
    plan = plan_parts(recipe, on_gpus=True)
    (job,) = by_kind(build_and_parse(recipe), "RayJob")
    groups = {group["groupName"]: group for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]}
    for part in plan.parts:
        if part.with_driver:
            continue
        group = groups.pop(object_name(part.name))
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert group["replicas"] == part.count
        assert int(limits["cpu"].removesuffix("m")) >= 1000 * part.bundle.cpus
        assert int(limits["memory"].removesuffix("Mi")) << 20 > part.bundle.memory
        assert int(limits.get("nvidia.com/gpu", 0)) >= part.bundle.gpus
        for name, amount in part.bundle.amounts().items():
            assert float(group["resources"][name]) >= amount
    assert not groups
    server = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    assert server["labels"] == {"pool": "h100"} == server["template"]["spec"]["nodeSelector"], "Ray sets labels of ray.io itself"


def test_only_the_driver_has_the_volume_of_the_run_folder_and_other_pods_have_room_for_a_mirror() -> None:
    (job,) = by_kind(build_and_parse(build({**RECIPE, **LARGE})), "RayJob")
    for name, template in templates(job).items():
        mounts = {mount["mountPath"]: mount["name"] for mount in template["spec"]["containers"][0]["volumeMounts"]}
        (volume,) = (volume for volume in template["spec"]["volumes"] if volume["name"] == mounts["/runs"])
        assert ("persistentVolumeClaim" in volume) == (name == "head") and ("emptyDir" in volume) == (name != "head")


def test_sandboxes_open_in_pods_with_a_user_namespace_and_no_pod_has_privileges() -> None:
    (job,) = by_kind(build_and_parse(build({**RECIPE, **LARGE})), "RayJob")
    for name, template in templates(job).items():
        pod, container = template["spec"], template["spec"]["containers"][0]
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["automountServiceAccountToken"] is False
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        nested = name in ("head", "worker")
        assert pod.get("hostUsers", True) is not nested
        assert container["securityContext"].get("procMount") == ("Unmasked" if nested else None)
        assert pod["securityContext"]["seccompProfile"]["type"] == ("Unconfined" if nested else "RuntimeDefault")


def test_a_run_accepts_the_redis_server_of_the_manifest(tmp_path: Path) -> None:
    (redis,) = by_kind(build_and_parse(build({**RECIPE, **LARGE})), "StatefulSet")
    container = redis["spec"]["template"]["spec"]["containers"][0]
    assert container["volumeMounts"][0]["mountPath"] == "/data" and redis["spec"]["volumeClaimTemplates"]
    socket_path = tmp_path / "socket"
    script = container["command"][-1].replace("dir /data", f"dir {tmp_path}\nport 0\nunixsocket {socket_path}")
    (tmp_path / "redis-server").symlink_to(find_program())  # Debian's redis-tools has it under another name
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "REDISCLI_AUTH": "a-password"}
    with subprocess.Popen(["sh", "-c", script], env=environment, stdout=subprocess.DEVNULL) as server:
        transport = RedisTransport(f"unix://{socket_path}", password="a-password")
        transport.check_server()
        transport.close()
        with pytest.raises(UserError, match="Authentication"):
            RedisTransport(f"unix://{socket_path}", password="another").check_server()
        server.terminate()


def test_the_password_of_redis_is_in_no_object() -> None:
    objects = build_and_parse(build({**RECIPE, **LARGE}))
    assert not by_kind(objects, "Secret")
    secrets = re.findall(r'"secretKeyRef": (\{.*?\})', json.dumps(objects))
    assert len(secrets) == 3 and set(secrets) == {f'{{"name": "{object_name("Tables_1")}-redis", "key": "password"}}'}


LABELS = {"app.kubernetes.io/instance": "x"}
PODS = {part: {**LABELS, "agentrl-part": part} for part in ("driver", "server", "learner", "worker", "judge-a", "redis", "sandbox")}
PODS |= {"other run": {"app.kubernetes.io/instance": "y", "agentrl-part": "worker"}, "stranger": {}}


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """The meaning of a label selector in Kubernetes."""
    for rule in selector.get("matchExpressions", ()):
        if (labels.get(rule["key"]) in rule["values"]) != (rule["operator"] == "In"):
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def allows(policies: list[dict[str, Any]], direction: str, pod: dict[str, str], peer: dict[str, str], port: int) -> bool:
    """Whether the policies let a pod accept (`ingress`) or open (`egress`) a connection: any that selects it suffices, none is needed if
    none selects it."""
    key = {"ingress": "from", "egress": "to"}[direction]
    selecting = [policy for policy in policies if direction.capitalize() in policy["policyTypes"] and selects(policy["podSelector"], pod)]
    rules = [rule for policy in selecting for rule in policy[direction]]
    return not selecting or any(
        any(
            "namespaceSelector" not in target and selects(target.get("podSelector", {"matchLabels": {"": ""}}), peer)
            for target in rule[key]
        )
        and ("ports" not in rule or any(allowed["port"] == port for allowed in rule["ports"]))
        for rule in rules
    )


def test_sandboxes_reach_nothing_and_servers_only_the_run() -> None:
    policies = [spec for _, spec in network_policies("x", ["203.0.113.0/24"])]
    inside = {"driver", "server", "learner", "worker", "judge-a"}
    for source, labels in PODS.items():
        for target, others in PODS.items():
            for port in (8000, 6379, 7423):
                open_ = allows(policies, "egress", labels, others, port) and allows(policies, "ingress", others, labels, port)
                expected = (source in inside and target in inside) or (source in inside and target == "redis" and port == 6379)
                expected |= source in ("driver", "worker") and target == "sandbox" and port == 7423
                expected |= {source, target} <= {"other run", "stranger"}
                assert open_ == expected, (source, target, port)
    reach = {
        part
        for part, labels in PODS.items()
        if any(
            "ipBlock" in to
            for spec in policies
            if selects(spec["podSelector"], labels)
            for rule in spec.get("egress", ())
            for to in rule["to"]
        )
    }
    assert reach == {"driver", "worker"}


@pytest.mark.parametrize("everything", ["0.0.0.0/0", "::/0", "128.0.0.0/1"])
def test_a_range_of_all_addresses_excludes_the_credentials_of_a_node(everything: str) -> None:
    outside = dict(network_policies("x", [everything]))["x-outside"]
    (to,) = outside["egress"][0]["to"]
    service = ipaddress.ip_address("fe80::a9fe:a9fe" if ":" in everything else "169.254.169.254")
    assert service in ipaddress.ip_network(to["ipBlock"]["cidr"])
    assert any(service in ipaddress.ip_network(block) for block in to["ipBlock"]["except"])


def test_the_start_script_starts_the_planned_run_and_continues_it_in_a_later_cluster(tmp_path: Path) -> None:
    hostile = "rollout.instructions=$(touch hacked) 'a' \"b\"\n---\nkind: Secret `touch hacked`"
    recipe = build({**RECIPE, **LARGE}).but(hostile)
    (config,) = by_kind(build_and_parse(recipe, overrides=(hostile,), recipe="recipes/it's;touch hacked.py"), "ConfigMap")
    script = config["data"]["start.sh"].replace("/project", str(tmp_path)).replace("/runs", str(tmp_path / "runs"))
    program = tmp_path / "bin" / "agentrl"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > {shlex.quote(str(tmp_path / 'arguments'))}\n")
    program.chmod(0o755)

    def run_script() -> list[str]:
        subprocess.run(["bash", "-c", script], check=True, env={"PATH": f"{program.parent}:/usr/bin:/bin"}, cwd=tmp_path)
        return (tmp_path / "arguments").read_text().split("\0")[:-1]

    verb, path, *overrides = run_script()
    assert (verb, path, overrides[0]) == ("train", "recipes/it's;touch hacked.py", hostile)
    inside = recipe.but(*overrides[: overrides.index("--run-dir")])
    assert overrides[-1] == str(tmp_path / "runs" / "Tables_1")
    plan, original = plan_parts(inside, on_gpus=True), plan_parts(recipe, on_gpus=True)
    for bundle, planned in zip(plan.bundles(), original.bundles(), strict=True):
        assert bundle.amounts().items() >= planned.amounts().items() and bundle.labels == planned.labels
        assert len(bundle.amounts()) == len(planned.amounts()) + 1, "plus the resource of its group of pods"
    assert inside.store.options["password"] == "env:AGENTRL_REDIS_PASSWORD"
    folder = tmp_path / "runs" / "Tables_1"
    folder.mkdir(parents=True)
    (folder / "recipe.json").touch()
    assert run_script() == ["train", path, "--run-dir", str(folder), "--resume"]
    assert not (tmp_path / "hacked").exists()


@settings(max_examples=examples(100))
@given(st.text("aB1_.-", min_size=1, max_size=60), st.text("aB1_.-", min_size=1, max_size=60))
def test_names_of_objects_are_labels_and_differ_for_different_names(name: str, other_name: str) -> None:
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", object_name(name)) and len(object_name(name)) <= 40
    assume(name != other_name)
    assert object_name(name) != object_name(other_name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": "a b"}, "--image"),
        ({"image": "x\nkind: Pod"}, "--image"),
        ({"namespace": "Default"}, "--namespace"),
        ({"storage": "100"}, "--storage"),
        ({"cells": 1, "cell_memory": "8"}, "--cell-memory"),
        ({"egress": ("everything",)}, "--egress 'everything' is not an address range"),
        ({"egress": ("169.254.169.254/32",)}, "link-local"),
    ],
)
def test_values_that_kubernetes_rejects_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_and_parse(build(RECIPE), **options)


def test_a_custom_resource_that_kuberay_treats_as_gpus_is_an_error() -> None:
    with pytest.raises(UserError, match="KubeRay treats my-gpu as GPUs"):
        build_and_parse(build({**RECIPE, "cluster": {"address": "auto", "resources": {"server": {"my-gpu": 1}}}}))


def test_docker_sandboxes_are_an_error() -> None:
    with pytest.raises(UserError, match="no Docker daemon"):
        build_and_parse(build({**RECIPE, "sandbox": {"backend": "docker"}}))
