"""Rollout workers over HTTP: the driver's interface, real groups in place of those of another process, and hostile requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from agentrl.base import activity
from agentrl.base.activity import ACTIVITY, ATTEMPTS, REQUESTS
from agentrl.errors import RequestRefused, ServerDied, ServingError, UserError
from agentrl.observe.events import EpisodeScored, Event, TurnEnded, encode
from agentrl.protocols import CacheUse
from agentrl.records import Blame, Completion, Failure, Group, SamplingParams, VersionSpan, codec
from agentrl.rollout import excluded_group, task_fault
from agentrl.rollout import leases as leases_module
from agentrl.rollout.leases import GroupLeases
from agentrl.run import worker as worker_module
from agentrl.run import worker_api
from agentrl.run.worker import DriverConnection, Worker
from agentrl.run.worker_access import DriverCheckpoints, read_address
from agentrl.run.worker_api import ADDRESS_FILE, WorkerApi
from agentrl.session import opening
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.driving import Family, Journaled, make_recipe, make_task, opened


class Served(Journaled):
    """A server with a scripted policy. It records which episodes are routed, and can withhold answers or fail."""

    version, sha256, token_s = 0, "0" * 64, 0.01
    cache_use = CacheUse(reading=3, shares=(0.25,))

    def __init__(self, journal: Path) -> None:
        super().__init__(journal)
        self.routed = set[str]()
        self.every = set[str]()
        self.requested = set[str]()
        self.active = set[str]()
        self.cancelled = asyncio.Event()
        self.fails: BaseException | None = None
        self.holds = False
        self.refuses = False  # rejects each request after the first turn

    @contextlib.contextmanager
    def episode(self, episode_id: str, task_key: str) -> Any:
        assert task_key == make_task(int(episode_id[1:7])).key
        self.routed.add(episode_id)
        self.every.add(episode_id)
        yield
        self.routed.remove(episode_id)

    async def generate(self, prompt_ids: Any, params: Any, *, request_id: str, timeout_s: float) -> Completion:
        self.requested.add(request_id)
        assert request_id not in self.active, "two requests with one id"
        self.active.add(request_id)
        try:
            return await self._answer(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)
        finally:
            self.active.remove(request_id)

    async def _answer(self, prompt_ids: Any, params: Any, *, request_id: str, timeout_s: float) -> Completion:
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        if self.refuses and not request_id.endswith("-0"):
            raise RequestRefused("the server rejected the request")
        if self.holds:
            try:
                await asyncio.sleep(3600)
            finally:
                self.cancelled.set()
        return await super().generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)


class Drive:
    """A driver's interface and its records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.served = Served(folder / "journal.jsonl")
        self.attempts: list[Failure | None] = []
        self.leases = GroupLeases(group_size=3, concurrency=4, on_attempt=self.attempts.append)
        self.alerts: list[str] = []
        self.events: list[Event] = []
        self.api = WorkerApi(
            folder=folder,
            spec={"concurrency": 4},
            leases=self.leases,
            served=self.served,  # type: ignore[arg-type]
            on_attempt=self.attempts.append,
            alert=self.alerts.append,
            checkpoints=opening.FolderCheckpoints(folder / "running"),
            record_event=self.events.append,
        )

    def connect(self, worker: str) -> DriverConnection:
        url, key = read_address(self.folder)
        return DriverConnection(url, key, worker=worker)


@asynccontextmanager
async def driving(folder: Path) -> AsyncIterator[Drive]:
    drive = Drive(folder)
    async with drive.api.serving():
        yield drive
    assert not drive.served.routed, "no episode stays routed"


@asynccontextmanager
async def working(drive: Drive, name: str, *, remote: bool = False) -> AsyncIterator[Worker]:
    """Runs a worker with real groups, sandboxes that print, and a policy behind HTTP. `remote`: it has no run folder."""
    connection = drive.connect(name)
    worker = Worker(connection, 2)
    recipe = make_recipe()
    sandboxes, record = ScriptedSandboxes(printing("3")), worker.record_event
    async with opened(drive.folder / name, worker, sandboxes, recipe, Family(), record=record) as run:
        shared = opening.FolderCheckpoints(drive.folder / "running")
        checkpoints = DriverCheckpoints(connection, worker.lease_of) if remote else shared
        running = asyncio.create_task(worker.run(replace(run.groups, checkpoints=checkpoints, on_attempt=worker.record_attempt)))
        try:
            yield worker
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            connection.close()


@pytest.mark.slow
async def test_workers_sample_groups_with_the_exact_tokens_of_the_server(tmp_path: Path) -> None:
    async with driving(tmp_path) as drive, working(drive, "a"), working(drive, "b"):
        groups = await asyncio.gather(*(drive.leases.run_group(index, make_task(index)) for index in range(6)))
        assert [group.index for group in groups] == list(range(6))
        sampled = {line["request"]: line for line in map(json.loads, drive.served.journal.read_text().splitlines())}
        turns = [turn for group in groups for scored in group.episodes for turn in scored.episode.trajectories[0].turns]
        assert len(turns) == len(sampled) == 6 * 3 * 4
        assert {turn.completion_ids for turn in turns} == {tuple(line["ids"]) for line in sampled.values()}
        assert {turn.logprobs for turn in turns} == {tuple(line["logprobs"]) for line in sampled.values()}
        async with asyncio.timeout(10):
            while len(drive.attempts) < 18:
                await asyncio.sleep(0.05)
        assert drive.attempts == [None] * 18, "the driver counts the attempts of its workers"
        assert drive.served.every == {f"g{index:06d}-{member}-a0" for index in range(6) for member in range(3)}


@pytest.mark.parametrize(("first_remote", "second_remote"), [(False, False), (True, True), (True, False)], ids=["shared", "remote", "both"])
async def test_another_worker_continues_a_group_from_its_saved_turns(tmp_path: Path, first_remote: bool, second_remote: bool) -> None:
    """Workers that share the run folder, and workers on other hosts, continue each other's episodes."""
    async with driving(tmp_path) as drive:
        waiting = asyncio.create_task(drive.leases.run_group(0, make_task(0)))
        drive.served.stall = 2  # turn 2 is never answered
        async with working(drive, "first", remote=first_remote):
            async with asyncio.timeout(20):
                while sum(name.endswith("-2") for name in drive.served.requested) < 3:  # so turns 0 and 1 are saved
                    await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
        drive.served.stall = -1
        assert await drive.leases.lose("first") == 1  # as if its process had ended or was silent
        async with working(drive, "second", remote=second_remote):
            group = await waiting
        requests = [json.loads(line)["request"] for line in drive.served.journal.read_text().splitlines()]
        assert sorted(requests) == sorted(f"g000000-{member}-a0-{turn}" for member in range(3) for turn in range(4)), "no turn twice"
        assert [len(scored.episode.trajectories[0].turns) for scored in group.episodes] == [4, 4, 4]


async def test_a_worker_that_gets_its_own_lost_group_again_samples_it_once(tmp_path: Path) -> None:
    """A worker that was stopped until it lost its lease may take that group again before a renewal ends the lost lease."""
    async with driving(tmp_path) as drive:
        waiting = asyncio.create_task(drive.leases.run_group(0, make_task(0)))
        drive.served.stall = 2
        async with working(drive, "a") as worker, asyncio.timeout(20):
            while sum(name.endswith("-2") for name in drive.served.requested) < 3:
                await asyncio.sleep(0.02)
            (lost,) = worker._work.values()
            drive.served.stall = -1
            await drive.leases.lose("a")  # its idle lane takes the group again at once
            group = await waiting
            assert lost.sampling is not None and lost.sampling.done()
        requests = [json.loads(line)["request"] for line in drive.served.journal.read_text().splitlines()]
        assert sorted(requests) == sorted(f"g000000-{member}-a0-{turn}" for member in range(3) for turn in range(4)), "no turn twice"
        assert all(scored.score.value == 1.0 for scored in group.episodes)


async def test_a_fault_of_the_server_is_the_same_fault_in_a_worker(tmp_path: Path) -> None:
    async with driving(tmp_path) as drive, working(drive, "a"):
        drive.served.fails = ServerDied("the inference server died")
        group = await drive.leases.run_group(0, make_task(0))
        assert all(scored.score.value == 1.0 for scored in group.episodes), "it was retried"
        async with asyncio.timeout(10):
            while not any(drive.attempts):
                await asyncio.sleep(0.05)
        assert [failure.kind for failure in drive.attempts if failure is not None] == ["ServerDied"]


async def test_a_context_that_the_server_rejects_is_blamed_on_the_policy_in_a_worker_too(tmp_path: Path) -> None:
    """The policy wrote that context. As a server fault it would be excluded, which would reward the policy."""
    async with driving(tmp_path) as drive, working(drive, "a"):
        drive.served.refuses = True
        group = await drive.leases.run_group(0, make_task(0))
    for scored in group.episodes:
        assert {failure.blame for failure in scored.episode.failures} == {Blame.POLICY}, scored.episode.failures
        assert not scored.episode.left_out and scored.score.value is not None


async def test_a_request_outlasts_the_restart_of_a_lost_server() -> None:
    """The driver waits for the server in addition to the request's deadline. With a shorter wait each attempt would fail again."""
    deadlines: list[float] = []
    completion = Completion(token_ids=(1,), logprobs=(-1.0,), versions=(VersionSpan(version=0, start=0, end=1),), finish_reason="stop")

    async def call(path: str, data: Any, *, timeout_s: float) -> bytes:
        deadlines.append(timeout_s)
        return codec.to_json(completion)

    worker = Worker(SimpleNamespace(call=call), 1, server_wait_s=300.0)  # type: ignore[arg-type]
    worker._work[7] = worker_module._Work("lease", make_task(7), None)
    await worker.generate([1], SamplingParams(max_tokens=1), request_id="g000007-0-a0-0", timeout_s=15.0)
    assert deadlines == [315.0 + worker_module._MARGIN_S]


async def test_a_request_of_an_ended_worker_is_cancelled_at_the_server(tmp_path: Path) -> None:
    async with driving(tmp_path) as drive:
        drive.served.holds = True
        waiting = asyncio.create_task(drive.leases.run_group(0, make_task(0)))
        async with working(drive, "a"), asyncio.timeout(10):
            while not drive.served.every:
                await asyncio.sleep(0.02)
        async with asyncio.timeout(5):
            await drive.served.cancelled.wait()
        waiting.cancel()


def renewal(**data: Any) -> dict[str, Any]:
    return {"leases": [], "attempts": [], "alerts": [], "events": [], "activity": {}, "report": 1} | data


def request(lease: str) -> dict[str, Any]:
    """Returns a request for the first turn of group 0."""
    names = {"lease": lease, "task_key": make_task(0).key, "request_id": "g000000-0-a0-0"}
    return names | {"prompt_ids": [1], "params": {"max_tokens": 4}, "timeout_s": 5.0}


@pytest.mark.parametrize("stubborn", [False, True])
async def test_a_lost_lease_ends_its_requests_and_gets_no_tokens(tmp_path: Path, stubborn: bool) -> None:
    """The worker was stopped, so its connection stays open. The next worker sends requests with the same ids."""
    async with driving(tmp_path) as drive:
        waiting = asyncio.create_task(drive.leases.run_group(0, make_task(0)))
        first, second = drive.connect("first"), drive.connect("second")
        lease = json.loads(await first.call("/lease", {}))["id"]
        drive.served.holds = True
        if stubborn:  # a server that answers a request that is being cancelled
            hold = drive.served._answer

            async def answer(*arguments: Any, **options: Any) -> Completion:
                with contextlib.suppress(asyncio.CancelledError):
                    return await hold(*arguments, **options)
                drive.served.holds = False
                return await hold(*arguments, **options)

            drive.served._answer = answer  # type: ignore[method-assign]
        silent = asyncio.create_task(first.call("/generate", request(lease)))
        async with asyncio.timeout(10):
            while not drive.served.active:
                await asyncio.sleep(0.01)
            await drive.leases.lose("first")
            drive.served.holds = False
            other = json.loads(await second.call("/lease", {}))["id"]
            codec.from_json(Completion, await second.call("/generate", request(other)))
            with pytest.raises(ServingError, match="lease is lost"):
                await silent
            assert drive.served.cancelled.is_set() and not drive.served.active
            with pytest.raises(ServingError, match="the lease is lost"):
                await first.call("/generate", request(lease))
            group = excluded_group(0, make_task(0).id, make_task(0).key, task_fault(ValueError("x")), size=3)
            answers = [await peer.call(f"/groups/{id}", content=codec.to_json(group)) for peer, id in ((first, lease), (second, other)) * 2]
            assert [json.loads(answer)["delivered"] for answer in answers] == [False, True, False, False], "by its newest lease, once"
            assert await waiting == group
        first.close()
        second.close()


async def test_a_repeated_report_and_one_of_a_lost_worker_count_no_attempt_twice(tmp_path: Path) -> None:
    async with driving(tmp_path) as drive:
        waiting = [asyncio.create_task(drive.leases.run_group(index, make_task(index))) for index in range(2)]
        connection = drive.connect("a")
        leases = [json.loads(await connection.call("/lease", {}))["id"] for _ in range(2)]
        for report in (7, 7, 6, 7):  # the first answer was lost
            await connection.call("/renew", renewal(leases=leases, attempts=[None] * 2, alerts=["slow"], report=report))
        assert drive.attempts == [None] * 2 and len(drive.alerts) == 1
        await drive.leases.lose("a")
        assert [failure and failure.kind for failure in drive.attempts[2:]] == ["worker_lost"] * 4, "as many as one worker has in flight"
        answer = json.loads(await connection.call("/renew", renewal(leases=leases, attempts=[None] * 2, alerts=["slow"], report=8)))
        assert answer["abandon"] == leases and len(drive.attempts) == 6 and len(drive.alerts) == 2
        await connection.call("/renew", renewal(attempts=[None], report=9))
        assert drive.attempts[6:] == [None], "a worker that returns counts again"
        for group in waiting:
            group.cancel()
        connection.close()


async def test_tokens_reach_only_the_holder_of_a_lease(tmp_path: Path) -> None:
    async with driving(tmp_path) as drive, working(drive, "a") as worker:
        await drive.leases.run_group(0, make_task(0))
        url, key = read_address(tmp_path)
        async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}) as client:
            answer = await client.post("/generate", json={"worker": "a"} | request("0" * 32))
        assert answer.status_code == 503 and "lease" in answer.json()["error"]
        assert worker.cache_use == drive.served.cache_use, "a worker limits its episodes by the driver's reading"


async def test_events_of_episodes_in_workers_reach_the_driver_once(tmp_path: Path) -> None:
    async with driving(tmp_path) as drive, working(drive, "a"), asyncio.timeout(30):
        group = await drive.leases.run_group(0, make_task(0))
        while sum(isinstance(event, EpisodeScored) for event in drive.events) < 3:
            await asyncio.sleep(0.05)
        turns = [event for event in drive.events if isinstance(event, TurnEnded)]
        expected = {(scored.episode.id, number) for scored in group.episodes for number in range(4)}
        assert {(event.episode, event.turn) for event in turns} == expected and len(turns) == len(expected)


async def test_events_that_no_worker_sends_are_ignored(tmp_path: Path) -> None:
    async with driving(tmp_path) as drive:
        connection, scored = drive.connect("a"), EpisodeScored(episode="e", score=1.0)
        lines = ["", "{", '{"event": "alert", "text": "x"}', '{"event": "new"}', "[" * 50_000, 5, encode(scored).decode()]
        for _ in range(2):  # repeated after a lost answer
            await connection.call("/renew", renewal(events=lines, report=1))
        assert drive.events == [scored] and not drive.alerts
        connection.close()


async def test_an_invalid_request_gets_an_error_and_changes_nothing(tmp_path: Path) -> None:
    bodies = [b"", b"null", b"[]", b"{}", b'{"worker": 5}', b'{"worker": "%s"}' % (b"x" * 200), b"{" * 100_000]
    halves = [b'{"worker": "a", "leases": 3}', b'{"worker": "a", "leases": [], "attempts": [{"stage": 1}], "alerts": []}']
    requests = [(path, body) for path in ("/lease", "/renew", "/generate", "/leave") for body in bodies]
    requests += [(path, body) for path in ("/renew", "/generate") for body in halves]
    async with driving(tmp_path) as drive:
        url, key = read_address(tmp_path)
        async with httpx.AsyncClient(base_url=url) as client:
            for path, body in requests:
                unauthorized = await client.post(path, content=body)
                assert unauthorized.status_code == 401 and ADDRESS_FILE in unauthorized.json()["error"]
                answer = await client.post(path, content=body, headers={"authorization": f"Bearer {key}"})
                assert answer.status_code == 400 and answer.json()["error"], (path, body[:50])
        assert not drive.attempts and not drive.alerts and not drive.leases.workers


async def test_a_group_beyond_the_largest_size_is_excluded_and_costs_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (worker_api, worker_module):
        monkeypatch.setattr(module, "MAX_GROUP_BYTES", 10_000, raising=False)
    async with driving(tmp_path) as drive, working(drive, "a"), asyncio.timeout(20):
        group = await drive.leases.run_group(0, make_task(0))
        assert {scored.episode.failures[0].stage for scored in group.episodes} == {"store"} and len(group.episodes) == 3
        assert "a rollout worker can deliver at most" in group.episodes[0].episode.failures[0].message
        await asyncio.sleep(0)
        assert drive.leases.workers == 1


async def test_an_alert_during_a_renewal_is_sent_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "RENEW_S", 0.02)
    async with driving(tmp_path) as drive, working(drive, "a") as worker, asyncio.timeout(20):
        renew = drive.leases.renew

        async def renewing(name: str, leases: Any) -> list[str]:
            if not drive.alerts[1:]:
                worker.alert("second")
            return await renew(name, leases)

        monkeypatch.setattr(drive.leases, "renew", renewing)
        worker.alert("first")
        while not any("second" in alert for alert in drive.alerts):
            await asyncio.sleep(0.02)
        assert "first" in drive.alerts[0]


async def test_a_group_that_the_stream_loses_is_sampled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its worker would renew the lease forever."""

    class Lossy:
        """An outbox whose server is emptied after the first group. Later groups are too large for it, so they are sent over HTTP."""

        async def run(self) -> None:
            await asyncio.Event().wait()

        async def send(self, lease: str, group: Group) -> bool:
            lost.append(lease)
            return len(lost) == 1

    lost = list[str]()
    monkeypatch.setattr(worker_module, "_SENT_S", 0.2)
    monkeypatch.setattr(worker_module, "RENEW_S", 0.05)
    monkeypatch.setattr(leases_module, "_UNHEARD_S", 0.1)
    async with driving(tmp_path) as drive, working(drive, "a") as worker, asyncio.timeout(20):
        worker.outbox = Lossy()  # type: ignore[assignment]
        group = await drive.leases.run_group(0, make_task(0))
        assert len(lost) == 2 and len(group.episodes) == 3 and drive.leases.losses == 0
        assert not any(scored.episode.left_out for scored in group.episodes)


async def test_the_driver_counts_the_activity_of_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the timeline of a run with workers shows idle rollouts and an idle server."""

    def elsewhere() -> int:
        return ACTIVITY.count(ATTEMPTS) - ACTIVITY.own().get(ATTEMPTS, 0)

    async with driving(tmp_path) as drive:
        drive.served.holds = True
        waiting = asyncio.create_task(drive.leases.run_group(0, make_task(0)))
        async with working(drive, "a"), asyncio.timeout(20):
            while elsewhere() < 3:
                await asyncio.sleep(0.02)
            assert ACTIVITY.count(REQUESTS) == 3
        monkeypatch.setattr(activity, "REPORT_S", 0.0)
        assert elsewhere() == 0, "the reports of an ended worker expire"
        monkeypatch.undo()
        waiting.cancel()
    assert elsewhere() == 0 == ACTIVITY.count(REQUESTS)


async def test_a_damaged_group_is_rejected_and_its_lease_stays_valid(tmp_path: Path) -> None:
    async with driving(tmp_path) as drive:
        waiting = asyncio.create_task(drive.leases.run_group(0, make_task(0)))
        connection = drive.connect("a")
        lease = json.loads(await connection.call("/lease", {}))["id"]
        for content in (b"", b"{}", b'{"index": 0}', b"\xff"):
            with pytest.raises(UserError, match="the driver rejected /groups"):
                await connection.call(f"/groups/{lease}", content=content)
        assert drive.leases.is_valid(lease) and not waiting.done()
        waiting.cancel()
        connection.close()


async def test_the_address_is_private_and_disappears_with_the_driver(tmp_path: Path) -> None:
    async with driving(tmp_path):
        assert stat.S_IMODE((tmp_path / ADDRESS_FILE).stat().st_mode) == 0o600
    with pytest.raises(UserError, match=r"no driver of .* accepts workers"):
        read_address(tmp_path)


async def test_tokens_of_weights_on_probation_reach_no_worker(tmp_path: Path) -> None:
    """The driver withholds them, and a rejection fails the request, so the attempt is repeated."""
    async with driving(tmp_path) as drive, working(drive, "a"):
        from agentrl.serving.weight_state import WeightState

        state, plain = WeightState(0), drive.served.generate
        state.begin_probation(1)

        async def generate(*arguments: Any, **options: Any) -> Completion:
            completion = await plain(*arguments, **options)
            span = VersionSpan(version=state.on_probation or state.number, start=0, end=len(completion.token_ids))
            await state.wait_verified([span.version])
            return replace(completion, versions=(span,))

        drive.served.generate = generate  # type: ignore[method-assign]
        waiting = asyncio.create_task(drive.leases.run_group(0, make_task(0)))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        state.refuse()
        group: Group = await waiting
        assert {scored.episode.oldest_version for scored in group.episodes} == {0}
        assert all(scored.score.value == 1.0 for scored in group.episodes)
