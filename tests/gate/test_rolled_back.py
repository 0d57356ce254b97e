"""Retracted versions: the loop never serves them, and never refers to a deleted one.

Server and channel are scripted; registry, store, tracker and the loop's own code are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import AsyncMock

import pytest

from agentrl.base.files import sha256_file
from agentrl.config import PolicyConfig, Recipe, TasksConfig
from agentrl.errors import DiskFull, LearnerError, LearnerHalted, SwapError, UserError
from agentrl.experience import DriverStore, GroupOrder, SqliteStore
from agentrl.failure import Capture, FaultRate
from agentrl.learner.driver_reports import UpdateFailureLog
from agentrl.learner.update_guard import UpdateFailure
from agentrl.observe import RunTracker, write_report
from agentrl.records import Episode, Group, GroupUse, PolicyVersion, Probe, Score, ScoredEpisode, SwapReport, VersionState, codec
from agentrl.rollout import Pace
from agentrl.run import loop, supervise
from agentrl.serving import supervisor
from agentrl.session import measure
from agentrl.session.judge_servers import JudgeServers
from agentrl.session.opening import Progress
from agentrl.version import FolderRegistry
from tests.serving.test_loss_of_a_server import ScriptedChannel, ScriptedClient, ScriptedServer
from tests.waiting import until

RECIPE = Recipe(name="back", steps=4, policy=PolicyConfig(model="m"), tasks=TasksConfig(family="a:b"))
RECIPE = RECIPE.model_copy(update={"rollout": RECIPE.rollout.model_copy(update={"groups_per_step": 1})})


class RecordingChannel(ScriptedChannel):
    """Records its swaps; `during` is called in the middle of one."""

    swapped: ClassVar[list[tuple[int, str]]] = []
    during: ClassVar[Any] = None

    async def swap(self, version: PolicyVersion, folder: Path, probe: Probe, **settings: Any) -> SwapReport:
        if not (folder / "model.safetensors").exists():
            raise SwapError(f"{folder} is gone")
        self.swapped.append((version.number, version.sha256[:4]))
        if RecordingChannel.during:
            RecordingChannel.during(version)
        return await super().swap(version, folder, probe, **settings)


class Alerts(RunTracker):
    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.alerts: list[str] = []

    def alert(self, text: str) -> None:
        self.alerts.append(text)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, double in (("VLLMServer", ScriptedServer), ("open_channel", RecordingChannel), ("TokenClient", ScriptedClient)):
        monkeypatch.setattr(supervisor, name, double)
    monkeypatch.setattr(supervisor, "max_logprob_difference", ScriptedServer.differs)
    monkeypatch.setattr(ScriptedServer, "started", [])
    monkeypatch.setattr(RecordingChannel, "swapped", [])
    monkeypatch.setattr(RecordingChannel, "during", None)


def publish(registry: FolderRegistry, number: int, parent: int | None, weights: bytes) -> PolicyVersion:
    folder = registry.folder / f"{number:06d}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "update.json").write_text(json.dumps({"loss": 0.5}))
    if number:
        (folder / "probe.json").write_bytes(codec.to_json(Probe(token_ids=((1, 2),), logprobs=((-1.0,),))))
    version = PolicyVersion(number=number, parent=parent, folder=f"versions/{number:06d}", sha256=sha256_file(folder / "model.safetensors"))
    registry.add(version)
    return version


async def open_run(run_dir: Path) -> Any:
    registry, store = FolderRegistry(run_dir / "versions"), SqliteStore(run_dir / "experience.sqlite")
    for index in range(6):
        episode = Episode(id=f"e{index}", task_id="t", task_key="k", trajectories=())
        store.put(Group(index=index, task_id="t", task_key="k", episodes=(ScoredEpisode(episode=episode, score=Score(value=1.0)),)))
    for step in range(6):
        store.commit(step, {step: GroupUse()}, "checkpoint")
    base = publish(registry, 0, None, b"base")
    policy = supervisor.SupervisedServer(RECIPE, run_dir, registry)
    await policy.start(base)
    registry.set_state(0, VersionState.SERVING)
    return SimpleNamespace(
        **{
            "recipe": RECIPE,
            "folder": run_dir,
            "tracker": Alerts(run_dir),
            "store": DriverStore(lambda: store),
            "registry": registry,
            "served": policy,
        },
        **{"fault_rate": FaultRate(0.5, concurrency=16), "suite": None, "gate_server": None, "family": None, "workers": None},
        progress=Progress(stop_at=4),
        base_version=AsyncMock(return_value=base),
        capture=Capture(run_dir, RECIPE.capture, origin={}),
        order=GroupOrder.from_recipe(RECIPE),
        groups=SimpleNamespace(runner=SimpleNamespace(pace=Pace())),
        judges=JudgeServers(RECIPE, {}, folder=run_dir),
    )


async def close(run: Any) -> None:
    await run.served.close()
    run.tracker.close()
    run.capture.close()
    await run.store.close()


@pytest.mark.usefixtures("scripted")
async def test_a_rolled_back_version_is_skipped_and_its_step_recorded(tmp_path: Path) -> None:
    run = await open_run(tmp_path)
    publish(run.registry, 1, 0, b"good")
    publish(run.registry, 2, 1, b"bad")
    publish(run.registry, 3, 1, b"good")
    run.registry.set_state(2, VersionState.ROLLED_BACK)
    publish(run.registry, 4, 3, b"better")
    limit = "kl_behaviour 3 is above its limit 1 (learner.limits)"
    failure = UpdateFailure(step=2, action="rollback", what="policy", reasons=(limit,), groups=(2,), episodes=("e2",), metrics={})
    UpdateFailureLog(tmp_path).append((failure,))
    async with asyncio.timeout(120):
        await loop._swap_versions(run)
    assert [number for number, _ in RecordingChannel.swapped] == [1, 3, 4]
    assert run.registry.get(2).state is VersionState.ROLLED_BACK
    assert run.tracker.alerts == [f"step 3: rolled back, and excluded groups 2 (1 episode): {limit}"]
    await close(run)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4], "the update and groups of step 2 still count"
    assert "swap_stall_ms" not in lines[1] and "swap_stall_ms" in lines[2]
    (tmp_path / "recipe.json").write_text(RECIPE.model_dump_json())
    summary = measure.summarize(tmp_path, RECIPE, {}, backend="docker", interrupted=False)
    assert (summary.updates_left_out, summary.rollbacks, summary.groups_left_out, summary.weight_swaps) == (1, 1, 0, 3)
    summary.write(tmp_path)
    assert limit in write_report(tmp_path).read_text()


@pytest.mark.usefixtures("scripted")
async def test_serving_advances_from_a_version_rolled_back_while_serving(tmp_path: Path) -> None:
    run = await open_run(tmp_path)
    for number, weights in ((1, b"good"), (2, b"bad")):
        publish(run.registry, number, number - 1, weights)

    def roll_back_mid_swap(version: PolicyVersion) -> None:
        if version.number == 2:  # in the middle of its swap, as soon as its successor exists
            publish(run.registry, 3, 1, b"good")
            run.registry.set_state(2, VersionState.ROLLED_BACK)

    RecordingChannel.during = roll_back_mid_swap
    run.progress.stop_at = 3
    async with asyncio.timeout(120):
        await loop._swap_versions(run)
    assert (run.served.version, run.registry.get(2).state) == (3, VersionState.ROLLED_BACK)
    assert supervisor.version_to_serve(run.registry).number == 3
    run.registry.set_state(3, VersionState.ROLLED_BACK)
    publish(run.registry, 4, 1, b"good")
    assert supervisor.version_to_serve(run.registry).number == 4, "the version that a restarted server would load"
    await close(run)


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("back_to", [1, 0])
async def test_serving_falls_back_with_a_learner_whose_newest_checkpoint_was_damaged(tmp_path: Path, back_to: int) -> None:
    run = await open_run(tmp_path)
    for number in (1, 2):
        publish(run.registry, number, number - 1, b"lost %d" % number)
    swapping = asyncio.create_task(loop._swap_versions(run))
    await until(lambda: run.served.version == 2)
    run.registry.reconcile(back_to)
    await until(lambda: run.served.version == back_to)
    serving = run.registry.latest(VersionState.SERVING)
    assert serving.number == back_to and run.served.sha256 == serving.sha256
    for number in range(back_to + 1, 5):
        publish(run.registry, number, number - 1, b"again %d" % number)
    async with asyncio.timeout(120):
        await swapping
    assert [number for number, _ in RecordingChannel.swapped] == [1, 2, *([1] if back_to else []), *range(back_to + 1, 5)]
    assert [server.version for server in ScriptedServer.started] == ([0] if back_to else [0, 0]), "version 0 has no probe to swap with"
    assert run.served.sha256 == run.registry.get(4).sha256
    assert run.tracker.alerts == [f"version 2 was retracted by the learner; serving version {back_to}"]
    await close(run)


@pytest.mark.usefixtures("scripted")
async def test_a_version_that_cannot_be_loaded_and_was_not_retracted_still_ends_the_run(tmp_path: Path) -> None:
    run = await open_run(tmp_path)
    version = publish(run.registry, 1, 0, b"good")
    (run.registry.path(version) / "model.safetensors").unlink()
    with pytest.raises(SwapError, match="is gone"):
        await loop._swap_versions(run)
    await close(run)


HALTED = "step 3: entropy 0.01 is below its limit 0.1 (learner.limits)"


@pytest.mark.parametrize(
    ("error", "starts", "alerts"),
    [
        (LearnerHalted(HALTED), 1, [f"halted: {HALTED}"]),
        (UserError("this kind of model cannot be trained", fix="take another"), 1, []),
        (DiskFull("no room"), 1, []),
        (
            LearnerError("rank 0 was killed"),
            4,
            [f"rank 0 was killed\n  restart {number} of at most 3 without a new version" for number in (1, 2, 3)],
        ),
    ],
)
async def test_a_learner_is_restarted_only_if_that_may_help(error: Exception, starts: int, alerts: list[str], tmp_path: Path) -> None:
    class Learner:
        starts = 0

        async def wait(self) -> None:
            raise error

        async def start(self) -> None:
            self.starts += 1

    run = SimpleNamespace(learner=Learner(), tracker=Alerts(tmp_path), registry=SimpleNamespace(latest=lambda: None))
    with pytest.raises(type(error), match=re.escape(str(error).splitlines()[0])):
        await supervise.watch_learner(run.learner, run.registry, run.tracker.alert)  # type: ignore[arg-type]
    assert (run.learner.starts, run.tracker.alerts) == (starts, alerts)
    run.tracker.close()


def test_every_kind_of_update_failure_has_an_alert(tmp_path: Path) -> None:
    skip = UpdateFailure(step=0, action="skip", what="group", reasons=("non_finite_score",), groups=(3,), episodes=("a", "b"), metrics={})
    UpdateFailureLog(tmp_path).append((skip, replace(skip, action="halt", what="critic", reasons=("x", "y"), groups=(1, 2))))
    assert measure.step_alerts(tmp_path, 0) == [
        "step 1: excluded groups 3 (2 episodes): non_finite_score",
        "step 1: halted at groups 1, 2 (2 episodes): x; y",
    ]
    assert measure.step_alerts(tmp_path, 1) == []
