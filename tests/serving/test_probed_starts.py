"""Weights never serve unprobed: at the first start, on resume, after a death, in replicas, at the gate and after a fall-back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentrl.config import JudgeServerConfig, PolicyConfig, Recipe, ServingConfig, TasksConfig
from agentrl.errors import ServingError
from agentrl.gate.schedule import VersionServer
from agentrl.records import PolicyVersion, Probe, SamplingParams, codec
from agentrl.serving import judge_server
from agentrl.serving.control import ControlPlane
from agentrl.serving.judge_server import JudgeServer
from agentrl.serving.probe import judge_logprob_difference
from agentrl.serving.server_pool import ServerPool
from agentrl.serving.supervisor import SupervisedServer
from agentrl.version import FolderRegistry
from tests.serving.scripted_server import Call, scripted_server
from tests.serving.test_loss_of_a_server import ScriptedServer, open_registry, scripted
from tests.waiting import until

__all__ = ["scripted"]
pytestmark = pytest.mark.usefixtures("scripted")
RECIPE = Recipe(name="r", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="a:b"), serving=ServingConfig(startup_timeout_s=5.0))


def version(registry: FolderRegistry, number: int) -> PolicyVersion:
    registered = registry.get(number)
    assert registered is not None
    return registered


async def test_a_server_is_probed_at_its_start_on_resume_and_after_its_death(tmp_path: Path) -> None:
    registry = open_registry(tmp_path)
    policy = SupervisedServer(RECIPE, tmp_path, registry)
    await policy.start(version(registry, 0))
    assert ScriptedServer.probed == [0]
    watcher = asyncio.create_task(policy.watch(on_loss=policy.close))
    ScriptedServer.started[-1].dead = True
    await until(lambda: policy.restarts == 1 and policy.accepts_requests)
    assert ScriptedServer.probed == [0, 0]
    await policy.fall_back(version(registry, 0))
    assert ScriptedServer.probed == [0, 0], "a swap compares the probe without a restart"
    watcher.cancel()
    await policy.close()

    resumed = SupervisedServer(RECIPE, tmp_path, registry)
    await resumed.start(version(registry, 1))
    assert ScriptedServer.probed == [0, 0, 1]
    await resumed.close()
    registry.close()


@pytest.mark.parametrize("kind", ["replicas", "gate"])
async def test_every_server_of_a_run_is_probed(tmp_path: Path, kind: str) -> None:
    registry = open_registry(tmp_path)
    served = (
        ServerPool(RECIPE.but("serving.replicas=3"), tmp_path, registry)
        if kind == "replicas"
        else VersionServer(RECIPE, tmp_path, registry)
    )
    await served.start(version(registry, 1))
    assert ScriptedServer.probed == [1] * len(ScriptedServer.started) and len(ScriptedServer.started) == (3 if kind == "replicas" else 1)
    await (served.policy if isinstance(served, VersionServer) else served).close()
    registry.close()


async def test_weights_that_disagree_with_their_probe_sample_nothing(tmp_path: Path) -> None:
    registry = open_registry(tmp_path)
    policy = SupervisedServer(RECIPE.but("serving.startup_timeout_s=0.2"), tmp_path, registry)
    ScriptedServer.difference = 2.4
    with pytest.raises(
        ServingError,
        match=r"started with version 0, but its logprobs differ by 2.4 nats from .*probe.json; the limit is 0.001 .*probe_max_abs_diff",
    ):
        await policy.start(version(registry, 0))
    assert not policy.accepts_requests
    with pytest.raises(ServingError, match="did not become ready again"):
        await policy.generate([1], SamplingParams(max_tokens=1), request_id="a-0", timeout_s=1.0)
    await policy.close()
    registry.close()


async def test_a_successor_that_disagrees_ends_the_run(tmp_path: Path) -> None:
    registry = open_registry(tmp_path)
    policy = SupervisedServer(RECIPE, tmp_path, registry)
    await policy.start(version(registry, 1))
    watcher = asyncio.create_task(policy.watch(on_loss=policy.close))
    ScriptedServer.difference = float("nan")
    ScriptedServer.started[-1].dead = True
    with pytest.raises(ServingError, match="differ by nan nats"):
        await asyncio.wait_for(watcher, 60)
    assert not policy.accepts_requests
    await policy.close()
    registry.close()


async def test_version_0_waits_for_the_learners_probe(tmp_path: Path) -> None:
    registry = open_registry(tmp_path)
    path = tmp_path / "versions" / "000000" / "probe.json"
    path.unlink()
    policy = SupervisedServer(RECIPE, tmp_path, registry)
    starting = asyncio.create_task(policy.start(version(registry, 0), await_probe=True))
    await until(lambda: ScriptedServer.started)
    await asyncio.sleep(0.1)
    assert not starting.done() and not policy.accepts_requests
    path.write_bytes(codec.to_json(Probe(token_ids=((1, 2),), logprobs=((-1.0,),))))
    await asyncio.wait_for(starting, 60)
    assert ScriptedServer.probed == [0] and policy.accepts_requests
    await policy.close()

    path.unlink()
    late = SupervisedServer(RECIPE.but("serving.startup_timeout_s=0.1"), tmp_path, registry)
    with pytest.raises(ServingError, match=r"(?s)no probe.json after 0.1 s: the learner writes it .*logs/learner.log"):
        await late.start(version(registry, 0), await_probe=True)
    await late.close()

    without_learner = SupervisedServer(RECIPE, tmp_path, registry)  # the model comes from no agentrl run, and there is no learner
    await without_learner.start(version(registry, 0))
    assert without_learner.accepts_requests and ScriptedServer.probed == [0]
    await without_learner.close()
    registry.close()


async def test_an_unreadable_probe_prevents_serving(tmp_path: Path) -> None:
    registry = open_registry(tmp_path)
    (tmp_path / "versions" / "000000" / "probe.json").write_text("{")
    policy = SupervisedServer(RECIPE, tmp_path, registry)
    with pytest.raises(ServingError, match=r"probe.json cannot be read"):
        await policy.start(version(registry, 0))
    assert not policy.accepts_requests
    await policy.close()
    registry.close()


@pytest.mark.parametrize(("difference", "serves"), [(0.001, True), (0.0010001, False), (-1.0, True)])
async def test_the_recipe_sets_the_tolerance(tmp_path: Path, difference: float, serves: bool) -> None:
    registry = open_registry(tmp_path)
    policy = SupervisedServer(RECIPE, tmp_path, registry)
    ScriptedServer.difference = difference
    if serves:
        await policy.start(version(registry, 1))
    else:
        with pytest.raises(ServingError, match=r"differ by 0\.001 nats"):
            await policy.start(version(registry, 1))
    assert policy.accepts_requests is serves
    await policy.close()
    registry.close()


@pytest.mark.parametrize(
    ("dtype", "difference", "serves"),
    [
        ("float32", 0.001, True),
        ("float32", 0.0011, False),
        ("bfloat16", 1.0, True),
        ("bfloat16", 1.01, False),
        ("float32", float("inf"), False),
    ],
)
async def test_a_published_judge_model_is_compared_with_its_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, difference: float, serves: bool
) -> None:
    async def differs(*_: object, **__: object) -> float:
        return difference

    monkeypatch.setattr(judge_server, "judge_logprob_difference", differs)
    config = JudgeServerConfig.model_validate({"model": "m", "dtype": dtype})
    control = ControlPlane("http://127.0.0.1:1")
    server = JudgeServer("mine", config, model=tmp_path, reward_model=False, folder=tmp_path, device="cpu")
    await server._prepare(control)  # a model that no run published
    (tmp_path / "probe.json").write_bytes(codec.to_json(Probe(token_ids=((1, 2),), logprobs=((-1.0,),))))
    if serves:
        await server._prepare(control)
    else:
        with pytest.raises(ServingError, match="the logprobs of judge server mine differ"):
            await server._prepare(control)
    await control.close()


async def test_a_judges_logprobs_are_read_from_its_completions() -> None:
    probe = Probe(token_ids=((5, 6, 7), (8, 9)), logprobs=((-1.0, -2.0), (-3.0,)))

    def answer(call: Call) -> object:
        ids = call.body["prompt"]
        logprobs = {6: -1.0, 7: -2.25, 9: -3.0}
        return {"choices": [{"prompt_logprobs": [None, *({str(token_id): {"logprob": logprobs[token_id]}} for token_id in ids[1:])]}]}

    async with scripted_server(answer) as script:
        control = ControlPlane(script.url)
        assert await judge_logprob_difference(control, "mine", probe, max_model_len=512, timeout_s=5.0) == 0.25
        assert await judge_logprob_difference(control, "mine", probe, max_model_len=3, timeout_s=5.0) == 0.0, "tokens beyond its context"
        await control.close()
    async with scripted_server(lambda call: {"choices": [{}]}) as script:
        control = ControlPlane(script.url)
        with pytest.raises(ServingError, match="malformed response to the logprob probe of mine"):
            await judge_logprob_difference(control, "mine", probe, max_model_len=512, timeout_s=5.0)
        await control.close()
