"""A server that dies is replaced, and waiting swaps and requests continue.

The server and its channel are scripted, so that it always dies at the worst moment; tests/e2e kills real servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentrl.base.files import sha256_file
from agentrl.base.liveness import Restarts
from agentrl.config import PolicyConfig, Recipe, ServingConfig, TasksConfig
from agentrl.errors import RequestRefused, ServerDied, ServingError, SwapError
from agentrl.records import PolicyVersion, Probe, SamplingParams, SwapReport, codec
from agentrl.rollout import failure_from_error
from agentrl.serving import UnsentError, supervisor
from agentrl.version import FolderRegistry
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("scripted")


class ScriptedServer:
    url = "http://127.0.0.1:1"
    started: ClassVar[list[ScriptedServer]] = []
    probed: ClassVar[list[int]] = []
    difference: ClassVar[float] = 0.0

    def __init__(self, *, version: int, **_: object) -> None:
        self.version, self.dead, self.control, self.end_reason = version, False, self, "it died"
        self.killed = asyncio.Event()
        self.started.append(self)

    async def differs(self, number: int, probe: Probe) -> float:
        """Replaces `agentrl.serving.probe.max_logprob_difference`."""
        self.probed.append(number)
        return self.difference

    async def metrics(self) -> dict[str, float]:
        return {}

    async def start(self) -> None:
        await asyncio.sleep(0)

    async def was_killed(self) -> bool:
        return False

    async def alive(self) -> bool:
        return not self.dead

    def kill(self) -> None:
        self.killed.set()

    async def stop(self) -> None:
        self.dead = True


class ScriptedChannel:
    """Swaps, unless the server dies during the swap (`deaths`) or the probe disagrees (`refusals`)."""

    deaths: ClassVar[int] = 0
    refusals: ClassVar[int] = 0

    def __init__(self, config: ServingConfig, server: ScriptedServer, **_: object) -> None:
        self.server = server

    async def swap(self, version: PolicyVersion, folder: Path, probe: Probe, *, max_abs_diff: float, timeout_s: float) -> SwapReport:
        if type(self).deaths:
            type(self).deaths -= 1
            self.server.dead = True
        if self.server.dead:
            raise SwapError("cannot reach the inference server")
        if type(self).refusals:
            type(self).refusals -= 1
            raise SwapError("the probe disagrees")
        return SwapReport(version=version.number, stall_ms=1.0, total_ms=1.0, probe_max_abs_diff=0.0)

    async def close(self) -> None:
        pass


class ScriptedClient:
    """Answers while its server lives. A request to a dead server or of a closed client is never sent."""

    def __init__(self, server: ScriptedServer) -> None:
        self.server = server
        self.closed = False

    @classmethod
    def for_server(cls, server: ScriptedServer) -> ScriptedClient:
        return cls(server)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> str:
        await asyncio.sleep(0)
        if self.server.dead or self.closed:
            raise UnsentError("cannot reach the inference server")
        return f"{request_id} of server {ScriptedServer.started.index(self.server)}"

    async def close(self) -> None:
        self.closed = True
        await asyncio.sleep(0.02)  # requests continue meanwhile


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, double in (("VLLMServer", ScriptedServer), ("open_channel", ScriptedChannel), ("TokenClient", ScriptedClient)):
        monkeypatch.setattr(supervisor, name, double)
    monkeypatch.setattr(supervisor, "max_logprob_difference", ScriptedServer.differs)
    monkeypatch.setattr(supervisor, "_WATCH_S", 0.01)
    for name, value in (("started", []), ("probed", []), ("difference", 0.0)):
        monkeypatch.setattr(ScriptedServer, name, value)
    monkeypatch.setattr(ScriptedChannel, "deaths", 0)
    monkeypatch.setattr(ScriptedChannel, "refusals", 0)


def open_registry(run: Path) -> FolderRegistry:
    """A registry with versions 0 and 1, as a learner publishes them."""
    for number in (0, 1):
        folder = run / f"versions/{number:06d}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes([number]))
        (folder / "probe.json").write_bytes(codec.to_json(Probe(token_ids=((1, 2),), logprobs=((-1.0,),))))
    registry = FolderRegistry(run / "versions")
    for number in (0, 1):
        folder = f"versions/{number:06d}"
        sha256 = sha256_file(run / folder / "model.safetensors")
        registry.add(PolicyVersion(number=number, parent=number - 1 if number else None, folder=folder, sha256=sha256))
    registry.set_state(0, supervisor.VersionState.SERVING)
    return registry


async def swap_once(run: Path, *, startup_timeout_s: float = 60.0) -> tuple[supervisor.SupervisedServer, SwapReport]:
    """Starts with version 0, swaps version 1 in under a watcher, and closes."""
    registry = open_registry(run)
    recipe = Recipe(
        name="served",
        policy=PolicyConfig(model="unused"),
        tasks=TasksConfig(family="unused:unused"),
        serving=ServingConfig(startup_timeout_s=startup_timeout_s),
    )
    policy = supervisor.SupervisedServer(recipe, run, registry)
    base, first = registry.get(0), registry.get(1)
    assert base is not None and first is not None
    await policy.start(base)
    watcher = asyncio.create_task(policy.watch(on_loss=policy.close))
    try:
        return policy, await policy.swap(first)
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        await policy.close()
        registry.close()


@pytest.mark.parametrize("deaths", [1, 4])
async def test_a_death_during_a_swap_is_retried_on_the_successor(tmp_path: Path, deaths: int) -> None:
    ScriptedChannel.deaths = deaths
    policy, report = await swap_once(tmp_path)
    assert report.version == policy.version == 1
    assert policy.restarts == deaths
    assert [server.version for server in ScriptedServer.started] == [0] * (deaths + 1), "each started with the served version"


async def test_a_swap_that_waits_for_a_silent_server_ends_when_the_server_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap = ScriptedChannel.swap

    async def wait(channel: ScriptedChannel, version: PolicyVersion, *arguments: Any, **options: Any) -> SwapReport:
        if channel.server is ScriptedServer.started[0]:
            channel.server.dead = True  # stopped: its connections stay open until it is killed
            await channel.server.killed.wait()
            raise SwapError("the connection was closed")
        return await swap(channel, version, *arguments, **options)

    monkeypatch.setattr(ScriptedChannel, "swap", wait)
    async with asyncio.timeout(20):
        policy, report = await swap_once(tmp_path)
    assert report.version == policy.version == 1 and policy.restarts == 1


async def test_a_version_rejected_three_times_raises(tmp_path: Path) -> None:
    ScriptedChannel.refusals = 2
    policy, _ = await swap_once(tmp_path / "twice")
    assert policy.version == 1
    ScriptedChannel.refusals = 3
    with pytest.raises(SwapError, match="the probe disagrees"):
        await swap_once(tmp_path / "thrice")


async def test_waiting_for_a_successor_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_watch(*_: object, **__: object) -> None:
        pass

    monkeypatch.setattr(supervisor.SupervisedServer, "watch", no_watch)
    ScriptedChannel.deaths = 1
    with pytest.raises(ServingError, match="not replaced"):
        await swap_once(tmp_path, startup_timeout_s=0.2)


async def test_unsent_requests_wait_for_the_successor(tmp_path: Path) -> None:
    """None of them fails, however late the death is detected: a failure would cost an attempt."""
    registry = open_registry(tmp_path)
    recipe = Recipe(name="served", policy=PolicyConfig(model="unused"), tasks=TasksConfig(family="unused:unused"))
    policy = supervisor.SupervisedServer(recipe, tmp_path, registry)
    base = registry.get(0)
    assert base is not None
    await policy.start(base)
    watcher = asyncio.create_task(policy.watch(on_loss=policy.close))

    async def ask(number: int) -> object:
        await asyncio.sleep(number / 1000)
        return await policy.generate((1,), SamplingParams(max_tokens=4), request_id=f"r{number}", timeout_s=5.0)

    try:
        ScriptedServer.started[0].dead = True
        answers = await asyncio.gather(*map(ask, range(60)))
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        await policy.close()
        registry.close()
    assert answers == [f"r{number} of server 1" for number in range(60)] and policy.restarts == 1


@pytest.mark.parametrize(
    ("error", "dies", "raised"),
    [
        (ServingError("connection lost"), True, ServerDied),
        (ServingError("status 500"), False, ServingError),
        (RequestRefused("status 400"), True, RequestRefused),
    ],
)
async def test_a_failed_request_reports_whether_the_server_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: ServingError, dies: bool, raised: type[ServingError]
) -> None:
    """A death costs each episode in flight an attempt; the policy cannot have provoked it."""
    registry = open_registry(tmp_path)
    recipe = Recipe(name="served", policy=PolicyConfig(model="unused"), tasks=TasksConfig(family="unused:unused"))
    policy = supervisor.SupervisedServer(recipe, tmp_path, registry)
    base = registry.get(0)
    assert base is not None
    await policy.start(base)

    async def generate(self: ScriptedClient, *arguments: object, **options: object) -> str:
        self.server.dead = dies
        raise error

    monkeypatch.setattr(ScriptedClient, "generate", generate)
    with pytest.raises(ServingError) as caught:
        await policy.generate((1,), SamplingParams(max_tokens=4), request_id="r", timeout_s=5.0)
    assert type(caught.value) is raised and failure_from_error(caught.value, stage="generate", turn=3).kind == raised.__name__
    await policy.close()
    registry.close()


@pytest.mark.parametrize("killed", [True, False])
async def test_a_successor_that_is_killed_while_it_starts_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """A successor that cannot start ends the run, because a retry would not help."""

    async def start(server: ScriptedServer) -> None:
        if len(ScriptedServer.started) in (2, 3):
            raise ServingError("ended while starting")

    async def was_killed(server: ScriptedServer) -> bool:
        return killed

    monkeypatch.setattr(ScriptedServer, "start", start)
    monkeypatch.setattr(ScriptedServer, "was_killed", was_killed)
    registry = open_registry(tmp_path)
    recipe = Recipe(name="served", policy=PolicyConfig(model="unused"), tasks=TasksConfig(family="unused:unused"))
    alerts: list[str] = []
    policy = supervisor.SupervisedServer(recipe, tmp_path, registry, alert=alerts.append)
    base = registry.get(0)
    assert base is not None
    await policy.start(base)
    watcher = asyncio.create_task(policy.watch(on_loss=policy.close))
    ScriptedServer.started[0].dead = True
    if killed:
        await until(lambda: policy.restarts == 3 and policy.accepts_requests)
        assert [alert.partition(": ")[2].partition(";")[0] for alert in alerts] == ["it died", *["it was killed while it started"] * 2]
    else:
        with pytest.raises(ServingError, match="ended while starting"):
            await watcher
        assert policy.restarts == 1
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)
    await policy.close()
    registry.close()


@pytest.mark.parametrize("sound_s", [0.0, 600.0])
async def test_consecutive_restarts_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sound_s: float) -> None:
    monkeypatch.setattr(supervisor, "_RESTARTS", 2)
    registry = open_registry(tmp_path)
    recipe = Recipe(name="served", policy=PolicyConfig(model="unused"), tasks=TasksConfig(family="unused:unused"))
    policy = supervisor.SupervisedServer(recipe, tmp_path, registry)
    policy._restarts = Restarts(sound_s=sound_s)
    base = registry.get(0)
    assert base is not None
    await policy.start(base)
    watcher = asyncio.create_task(policy.watch(on_loss=policy.close))
    for death in range(1, 6):
        await asyncio.sleep(0.05)  # the watcher sees it alive
        ScriptedServer.started[-1].dead = True
        await until(lambda: watcher.done() or len(ScriptedServer.started) > death)  # noqa: B023
    if sound_s:
        with pytest.raises(ServingError, match="died 3 times in a row"):
            await watcher
    assert policy.restarts == (3 if sound_s else 5)
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)
    await policy.close()
    registry.close()


async def test_a_restart_for_another_version_is_not_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = open_registry(tmp_path)
    (tmp_path / "versions/000000/probe.json").unlink()  # so that a server is started with it
    recipe = Recipe(name="served", policy=PolicyConfig(model="unused"), tasks=TasksConfig(family="unused:unused"))
    policy = supervisor.SupervisedServer(recipe, tmp_path, registry)
    base = registry.get(0)
    assert base is not None
    await policy.start(base)

    async def slow_stop(server: ScriptedServer) -> None:
        server.dead = True
        await asyncio.sleep(0.05)  # as the process ends

    monkeypatch.setattr(ScriptedServer, "stop", slow_stop)
    watcher = asyncio.create_task(policy.watch(on_loss=policy.close))
    try:
        await policy.fall_back(base)
        for number in range(10):
            await asyncio.sleep(0.01)
            answer = await policy.generate((1,), SamplingParams(max_tokens=4), request_id=f"r{number}", timeout_s=5.0)
            assert answer == f"r{number} of server 1"  # type: ignore[comparison-overlap]  # of the scripted client
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        await policy.close()
        registry.close()
    assert policy.restarts == 0 and len(ScriptedServer.started) == 2
