from __future__ import annotations

from typing import Any

import pytest

from agentrl.cluster import plan_parts
from agentrl.cluster.plan import GIB
from agentrl.config import Recipe, build
from agentrl.errors import RecipeError

RECIPE = {"name": "x", "policy": {"model": "m"}, "tasks": {"family": "f:F"}}
ALL = {
    "cluster": {"address": "auto"},
    "serving": {"replicas": 2, "kv_cache_gb": 1.5, "threads": 3},
    "rollout": {"workers": 3, "concurrency": 48},
    "learner": {"ranks": 4},
    "judge_servers": {"small": {"model": "m"}},
    "gate": {"suite": "s", "server": "own"},
    "store": "redis",
}


def recipe_with(**changes: Any) -> Recipe:
    return build({**RECIPE, **ALL, **changes})


def test_a_plan_has_every_part_that_a_recipe_starts() -> None:
    plan = plan_parts(recipe_with())
    names = [bundle.name for bundle in plan.bundles()]
    assert names == ["server-0", "server-1", "learner", "worker-0", "worker-1", "worker-2", "gate", "judge-small"]
    assert [part.name for part in plan.parts if part.with_driver] == ["driver", "redis"], "they need no reservation"
    server, worker = plan.part("server"), plan.part("worker")
    assert server is not None and server.bundle.amounts() == {"CPU": 3, "memory": 3.5 * GIB}
    assert worker is not None and worker.bundle.memory == 1.5 * GIB, "for 16 episodes each"
    assert [bundle.name for bundle in plan_parts(build(RECIPE)).bundles()] == ["server", "learner"]


def test_an_evaluation_plans_servers_only() -> None:
    assert [part.name for part in plan_parts(recipe_with(), training=False).parts] == ["driver", "server", "judge-small"]


def test_an_external_redis_server_is_not_a_part() -> None:
    assert plan_parts(recipe_with(store={"ref": "redis", "options": {"url": "redis://h:1/0"}})).part("redis") is None


def test_on_gpus_each_rank_and_server_gets_one() -> None:
    plan = plan_parts(
        recipe_with(cluster={"address": "auto", "resources": {"learner": {"nodes": 2}, "judge-small": {"gpus": 0.5}}}), on_gpus=True
    )
    gpus = {bundle.name: bundle.gpus for bundle in plan.bundles()}
    assert gpus["learner-0"] == gpus["learner-1"] == 2 and gpus["server-0"] == gpus["gate"] == 1
    assert gpus["judge-small"] == 0.5 and gpus["worker-0"] == 0
    assert plan.devices == {}, "the cluster assigns them"


def test_settings_replace_defaults_and_name_custom_resources_and_labels() -> None:
    resources = {"server": {"cpus": 6, "memory_gib": 0.5, "fast-disk": 1, "ray.io/accelerator-type": "H100"}}
    server = plan_parts(recipe_with(cluster={"address": "auto", "resources": resources})).part("server")
    assert server is not None and server.bundle.labels == {"ray.io/accelerator-type": "H100"}
    assert server.bundle.amounts() == {"CPU": 6, "memory": GIB / 2, "fast-disk": 1}


@pytest.mark.parametrize("address", ["local", "auto", "head:6379", "10.0.0.7:6379", "ray://head.cluster.local:10001", "[fd00::1]:6379"])
def test_addresses(address: str) -> None:
    assert recipe_with(cluster={"address": address}).cluster.address == address


@pytest.mark.parametrize(
    "address", ["", "head", "http://head:1", "ray://head", "h:0", "h:65536", "h:6379 --x", "-h:1", "ray://u:p@h:1", "a" * 999]
)
def test_other_addresses_are_errors(address: str) -> None:
    with pytest.raises(RecipeError, match=r"cluster\.address: .*set local, auto"):
        recipe_with(cluster={"address": address})


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"servers": {"cpus": 1}}, r"resources\.servers does nothing: this recipe starts only server, learner"),
        ({"redis": {"cpus": 1}}, None),
        ({"server": {}}, "is empty"),
        ({"server": {"CPU": 1}}, r"server\.CPU: unknown; write cpus"),
        ({"server": {"memory": 1}}, "write memory_gib"),
        ({"server": {"cpus": 0}}, "above 0"),
        ({"server": {"cpus": "two"}}, "must be a number"),
        ({"server": {"gpus": 2}}, r"for several servers set serving\.replicas"),
        ({"learner": {"gpus": 1}}, r"one GPU per rank: set learner\.ranks"),
        ({"worker": {"gpus": 1}}, "uses no GPU"),
        ({"worker": {"nodes": 2}}, "only the learner"),
        ({"learner": {"nodes": 3}}, r"learner\.ranks=4 must be a multiple"),
        ({"learner": {"nodes": 1.5}}, "must be an integer"),
        ({"learner": {"nodes": "two"}}, r"learner\.nodes: it must be a number"),
        ({"learner": {"nodes": 0}}, r"learner\.nodes: it must be above 0"),
        ({"learner": {"nodes": 0.5}}, r"learner\.nodes: it must be an integer"),
        ({"server": {"zone": "a b"}}, "a label value may contain"),
        ({"server": {"a\nb": 1}}, "letters, digits"),
        ({"server": {"cpus": True}}, r"cluster\.resources"),
    ],
)
def test_wrong_resources_are_errors_with_a_fix(resources: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert recipe_with(cluster={"address": "auto", "resources": resources})
        return
    with pytest.raises(RecipeError, match=message):
        recipe_with(cluster={"address": "auto", "resources": resources})


def test_resources_without_a_cluster_are_an_error() -> None:
    with pytest.raises(RecipeError, match=r"cluster\.resources=.* does nothing without a cluster: set cluster\.address"):
        recipe_with(cluster={"resources": {"server": {"cpus": 1}}})
