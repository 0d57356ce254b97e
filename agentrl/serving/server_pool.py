"""One policy on several servers. An episode stays with the server that has its context cached, unless that server is lost.

Staleness stays bounded, because rollouts wait until `version`, which all responding servers have reached, is recent enough. A server with
an older version, because it started while the other servers loaded a new one, receives no requests until it has caught up. Therefore, once
`version` is n, every token is sampled with version n or a newer version.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.recipe import Recipe
from agentrl.errors import ServingError, SwapError
from agentrl.protocols import CacheUse, Launcher, VersionRegistry
from agentrl.protocols.serving import MAX_CACHE_USE
from agentrl.records import Completion, PolicyVersion, SamplingParams, SwapReport
from agentrl.serving.supervisor import ServerLost, SupervisedServer, in_time, mark_serving, version_to_serve

log = logging.getLogger(__name__)

POLL_S = 0.1
"""Seconds between two checks for servers that have come back."""

_Take = Callable[[SupervisedServer, PolicyVersion], Awaitable[SwapReport | None]]


@dataclass(slots=True)
class _Placed:
    """A running episode."""

    task_key: str
    replica: int | None = None  # None before its first request
    tokens: int = 0  # tokens of its longest context so far


class EpisodeRouter:
    """Tracks which episode is on which replica. This class does no I/O, so the choice of a replica and the record of that choice are
    atomic.

    An episode stays on its replica while the replica can serve. Any other episode goes to a replica that has an episode of the same task,
    because the prompt is cached there. If the load of that replica exceeds the smallest load by more than `apart` contexts of the length of
    this request, the episode goes to the least loaded replica. A replica's load is the sum of the longest context, in tokens, of each of
    its episodes, including episodes that wait for tools.
    """

    def __init__(self, replicas: int, *, apart: int) -> None:
        self.moved = 0  # how often an episode had to leave a replica
        self.loads = [0] * replicas
        self._apart = apart
        self._episodes: dict[str, _Placed] = {}
        self._tasks: dict[str, Counter[int]] = {}  # task -> replica -> number of its episodes there

    def begin(self, episode_id: str, task_key: str) -> None:
        """Registers an episode. The first request of the episode assigns it to a replica. Replaces an earlier episode with the same id."""
        self.end(episode_id)
        self._episodes[episode_id] = _Placed(task_key)

    def end(self, episode_id: str) -> None:
        """Removes an episode. Idempotent."""
        if (placed := self._episodes.pop(episode_id, None)) is not None:
            self._leave(placed)

    def replica(self, episode_id: str) -> int | None:
        """Returns the replica of an episode, or None before its first request and for an unknown episode."""
        placed = self._episodes.get(episode_id)
        return None if placed is None else placed.replica

    def choose(self, episode_id: str, tokens: int, *, able: Sequence[int], full: Collection[int] = ()) -> int:
        """Returns the replica for a request of `tokens` tokens, which is the least loaded replica if the episode is unknown.

        `able`: replicas that may receive the request, at least one. `full`: replicas that have no room for an additional episode; ignored
        if all are full.
        """
        placed = self._episodes.get(episode_id)
        if placed is None:
            return self._least(able)
        if placed.replica not in able:
            chosen = self._place(placed.task_key, tokens, [number for number in able if number not in full] or able)
            if placed.replica is not None:
                self.moved += 1
                self._leave(placed)
            placed.replica = chosen
            self.loads[chosen] += placed.tokens
            self._tasks.setdefault(placed.task_key, Counter())[chosen] += 1
        self.record_context(episode_id, tokens)
        assert placed.replica is not None, "it was placed"
        return placed.replica

    def record_context(self, episode_id: str, tokens: int) -> None:
        """Records the length of an episode's context. Only the longest length counts. Does nothing before the first `choose`."""
        placed = self._episodes.get(episode_id)
        if placed is not None and placed.replica is not None and tokens > placed.tokens:
            self.loads[placed.replica] += tokens - placed.tokens
            placed.tokens = tokens

    def _place(self, task_key: str, tokens: int, able: Sequence[int]) -> int:
        least = self._least(able)
        there = self._tasks.get(task_key, Counter())
        alike = [number for number in able if there[number]]
        nearest = self._least(alike) if alike else least
        return nearest if self.loads[nearest] - self.loads[least] <= self._apart * tokens else least

    def _least(self, able: Sequence[int]) -> int:
        return min(able, key=lambda number: (self.loads[number], number))

    def _leave(self, placed: _Placed) -> None:
        if placed.replica is None:
            return
        self.loads[placed.replica] -= placed.tokens
        there = self._tasks[placed.task_key]
        there[placed.replica] -= 1
        if not there.total():
            del self._tasks[placed.task_key]


class ServerPool:
    """A `PolicyServer` on `serving.replicas` supervised vLLM servers with the same weights and separate caches.

    A request that a dying server never received goes to a different server. Requests in flight on the dying server fail, as with a single
    server. A server that died too often is abandoned, and `watch` fails if no server is left.
    """

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        registry: VersionRegistry,
        *,
        launcher: Launcher | None = None,
        alert: Callable[[str], None] = log.warning,
    ) -> None:
        """`launcher`, `alert`: see `SupervisedServer`."""
        count = recipe.serving.replicas
        self.version = -1
        self.sha256 = ""
        self._recipe, self._registry, self._alert = recipe, registry, alert
        self._replicas = [
            SupervisedServer(recipe, run_dir, registry, name=str(number), newest=self._newest, launcher=launcher, alert=alert)
            for number in range(count)
        ]
        self._routing = EpisodeRouter(count, apart=max_load_lead(recipe))
        self._sampled = [0] * count  # tokens since the last call of `figures`
        self._floor = -1  # a server with an older version receives no requests; equals `version`, or less during a fall-back
        self._moving = asyncio.Lock()  # one version at a time is loaded
        self._looking = asyncio.Lock()  # one waiting request looks for a server on behalf of all
        self._changed = asyncio.Condition()

    @property
    def restarts(self) -> int:
        """The number of restarts of all servers together."""
        return sum(replica.restarts for replica in self._replicas)

    @property
    def token_s(self) -> float:
        """Seconds per sampled token of the slowest server."""
        return max(replica.token_s for replica in self._replicas)

    @property
    def cache_use(self) -> CacheUse | None:
        """The cache use of the servers that accept requests; None if none of them has been read. The value counts as a new reading once all
        of these servers have been read again."""
        uses = [replica.cache_use for replica in self._replicas if replica.accepts_requests and replica.cache_use is not None]
        if not uses:
            return None
        return CacheUse(
            reading=min(use.reading for use in uses),
            shares=tuple(share for use in uses for share in use.shares),
            waiting=sum(use.waiting for use in uses),
        )

    @property
    def accepts_requests(self) -> bool:
        """Whether any server accepts requests now."""
        return bool(self._ready())

    @property
    def loading(self) -> bool:
        """Whether a version is being loaded into the servers."""
        return self._moving.locked()

    async def start(self, version: PolicyVersion, *, await_probe: bool = False) -> None:
        """Starts all servers concurrently. Raises an `ExceptionGroup` with the errors of `SupervisedServer.start` if a server cannot
        start."""
        async with asyncio.TaskGroup() as starting:
            for replica in self._replicas:
                starting.create_task(replica.start(version, await_probe=await_probe))
        await self._set_version(version)

    @contextmanager
    def episode(self, episode_id: str, task_key: str) -> Iterator[None]:
        """Within the block, assigns the requests of an episode to one server."""
        self._routing.begin(episode_id, task_key)
        try:
            yield
        finally:
            self._routing.end(episode_id)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        """Samples one completion from the server of the episode, whose id is the part of `request_id` before the last hyphen. Raises the
        errors of `SupervisedServer.try_generate`, and `ServerDied` if no server becomes ready within `serving.startup_timeout_s`."""
        episode_id = request_id.rpartition("-")[0]
        while True:
            while (number := self._choose(episode_id, len(prompt_ids))) is None:
                await self._wait_ready()
            completion = await self._replicas[number].try_generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)
            if completion is not None:
                self._routing.record_context(episode_id, len(prompt_ids) + len(completion.token_ids))
                self._sampled[number] += len(completion.token_ids)
                return completion

    async def swap(self, version: PolicyVersion) -> SwapReport:
        """Loads a published version into one server and, if its probe agrees, into the other servers concurrently.

        A server that dies during the swap loads the version when it has restarted. A server that rejects a version that another server
        loaded is replaced. The report contains the longest stall and the largest difference. If the first server rejects the version three
        times, raises `SwapError`, and all servers keep the old version. Raises `ServerDied` if no server becomes ready within
        `serving.startup_timeout_s`.
        """
        async with self._moving:
            start, former = time.perf_counter(), await asyncio.to_thread(self._registry.get, self.version)
            try:
                reports = await self._move(version, SupervisedServer.load_version)
            except SwapError:
                await self._restore(former)
                raise
            await asyncio.to_thread(mark_serving, self._registry, version)
            await self._set_version(version)
        return SwapReport(
            version=version.number,
            stall_ms=max(report.stall_ms for report in reports),
            total_ms=1000 * (time.perf_counter() - start),
            probe_max_abs_diff=max(report.probe_max_abs_diff for report in reports),
        )

    async def fall_back(self, version: PolicyVersion) -> None:
        """Serves the earlier version `version` instead of a version that the learner retracted or the gate rejected. Raises the errors of
        `swap`, and those of `SupervisedServer.start` if a server must be restarted."""
        async with self._moving:
            self._floor = min(self._floor, version.number)
            await self._move(version, SupervisedServer.load_or_restart)
            await asyncio.to_thread(mark_serving, self._registry, version)
            await self._set_version(version)

    async def wait_version(self, number: int) -> None:
        """Returns when every responding server serves version `number` or a newer one."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= number)

    async def watch(self, *, on_loss: Callable[[], Awaitable[None]]) -> None:
        """Restarts servers that die, with the version that the other servers serve. Runs until it is cancelled or raises an
        `ExceptionGroup`, which contains a `ServingError` if no server is left."""
        async with asyncio.TaskGroup() as watching:
            abandoned: list[int] = []
            for number in range(len(self._replicas)):
                watching.create_task(self._keep(number, abandoned, on_loss))
            watching.create_task(self._catch_up())

    def figures(self) -> dict[str, float]:
        """Returns metrics of the servers; sampled tokens are counted since the last call."""
        sampled, self._sampled = self._sampled, [0] * len(self._replicas)
        figures: dict[str, float] = {"replicas_able": len(self._ready()), "episodes_moved": self._routing.moved}
        for number, replica in enumerate(self._replicas):
            figures[f"replica{number}_tokens"] = sampled[number]
            figures[f"replica{number}_load"] = self._routing.loads[number]
            figures[f"replica{number}_restarts"] = replica.restarts
            if replica.cache_use is not None:
                figures[f"replica{number}_cache_use"] = max(replica.cache_use.shares)
        return figures if (use := self.cache_use) is None else figures | {"requests_waiting": use.waiting}

    async def close(self) -> None:
        """Stops all servers."""
        await asyncio.gather(*(replica.close() for replica in self._replicas))

    def _choose(self, episode_id: str, tokens: int) -> int | None:
        """Returns the server for a request, or None if no server may receive it. Reads the state of all servers only to place an
        episode."""
        current = self._routing.replica(episode_id)
        if current is not None and self._is_able(current):
            return self._routing.choose(episode_id, tokens, able=(current,))
        able = self._ready()
        return self._routing.choose(episode_id, tokens, able=able, full=self._full()) if able else None

    def _ready(self) -> list[int]:
        """Returns the servers that may receive a request now."""
        return [number for number in range(len(self._replicas)) if self._is_able(number)]

    def _is_able(self, number: int) -> bool:
        """Whether a server may receive a request now."""
        replica = self._replicas[number]
        return replica.accepts_requests and replica.version >= self._floor

    def _full(self) -> list[int]:
        """Returns the servers whose caches have no room for an additional episode, by the newest readings."""
        uses = [replica.cache_use for replica in self._replicas]
        return [number for number, use in enumerate(uses) if use is not None and max(use.shares) >= MAX_CACHE_USE]

    async def _wait_ready(self) -> None:
        """Waits until `_ready` returns a server. Raises `ServingError` if no server is ready within `serving.startup_timeout_s`."""
        async with in_time(self._recipe.serving.startup_timeout_s, "no inference server became ready again"), self._looking:
            while not self._ready():
                await asyncio.sleep(POLL_S)

    async def _move(self, version: PolicyVersion, take: _Take) -> list[SwapReport]:
        """Loads a version into every server. After a `SwapError`, some servers may have loaded the version."""
        reports = [await self._first(version, take)]
        while late := self._late(version):
            done = await asyncio.gather(*(self._follow(replica, version, take) for replica in late), return_exceptions=True)
            if (failed := next((result for result in done if isinstance(result, BaseException)), None)) is not None:
                raise failed
            reports += [result for result in done if not isinstance(result, BaseException)]
        return [report for report in reports if report is not None]

    async def _first(self, version: PolicyVersion, take: _Take) -> SwapReport | None:
        """Loads a version into one server or, if that server dies meanwhile, into the next server."""
        async with in_time(self._recipe.serving.startup_timeout_s, "no inference server became ready again") as deadline:
            while True:
                replica = next((replica for replica in self._replicas if replica.accepts_requests), None)
                if replica is None:
                    await asyncio.sleep(POLL_S)
                    continue
                deadline.reschedule(None)  # the swap has separate deadlines
                try:
                    return await take(replica, version)
                except ServerLost as error:
                    log.warning("the swap to version %d continues with a different server: %s", version.number, error)
                    deadline.reschedule(asyncio.get_running_loop().time() + self._recipe.serving.startup_timeout_s)

    async def _follow(self, replica: SupervisedServer, version: PolicyVersion, take: _Take) -> SwapReport | None:
        """Loads a version that a different server already serves. Raises `SwapError` if the version has been retracted meanwhile."""
        try:
            return await take(replica, version)
        except ServerLost:
            return None  # it catches up later
        except SwapError as error:
            if await asyncio.to_thread(self._registry.get, version.number) != version:
                raise
            log.warning("%s is replaced: it rejects version %d, which another server serves: %s", replica.title, version.number, error)
            replica.request_replacement(f"it rejects version {version.number}")
            return None

    async def _restore(self, former: PolicyVersion | None) -> None:
        """Restores the served version on servers that loaded a rejected version."""
        if former is None or former.sha256 != self.sha256:
            return  # it was retracted too, and the run falls back to a different version
        for replica in self._late(former):
            try:
                await replica.load_or_restart(former)
            except SwapError as error:
                replica.request_replacement(f"it cannot restore version {former.number}: {error}")

    def _late(self, version: PolicyVersion) -> list[SupervisedServer]:
        """Returns the servers that accept requests but do not serve `version`."""
        wanted = (version.number, version.sha256)
        return [replica for replica in self._replicas if replica.accepts_requests and (replica.version, replica.sha256) != wanted]

    async def _catch_up(self) -> None:
        """Loads the served version into servers that missed its swap."""
        while True:
            await asyncio.sleep(POLL_S)
            if self._moving.locked():
                continue
            async with self._moving:
                version = await asyncio.to_thread(self._registry.get, self.version)
                if version is None or version.sha256 != self.sha256:
                    continue  # it was retracted, and the run falls back to a different version
                for replica in self._late(version):
                    try:
                        await self._follow(replica, version, SupervisedServer.load_or_restart)
                    except SwapError as error:
                        log.warning("%s does not serve version %d yet: %s", replica.title, version.number, error)

    async def _keep(self, number: int, abandoned: list[int], on_loss: Callable[[], Awaitable[None]]) -> None:
        """Watches one server until it is abandoned. Raises `ServingError` if no other server is left."""
        replica = self._replicas[number]
        try:
            await replica.watch(on_loss=on_loss)
        except ServingError as error:
            await replica.close()
            abandoned.append(number)
            if len(abandoned) == len(self._replicas):
                raise
            self._alert(f"{replica.title} is abandoned, and the run continues without it: {error}")

    async def _newest(self) -> PolicyVersion | None:
        """Returns the version for a restarted server: the one that the other servers serve.

        If no other server responds, the version that a single server would load is returned."""
        current = await asyncio.to_thread(self._registry.get, self.version)
        if any(replica.accepts_requests for replica in self._replicas) and current is not None and current.sha256 == self.sha256:
            return current
        version = await asyncio.to_thread(version_to_serve, self._registry)
        if version is not None and version.number < self.version and not any(replica.accepts_requests for replica in self._replicas):
            self.version, self.sha256, self._floor = version.number, version.sha256, version.number
        return version

    async def _set_version(self, version: PolicyVersion) -> None:
        """Records that the run serves `version` from now on."""
        self.version, self.sha256, self._floor = version.number, version.sha256, version.number
        async with self._changed:
            self._changed.notify_all()


def max_load_lead(recipe: Recipe) -> int:
    """Returns the number of contexts by which a server's load may exceed the smallest load while new episodes of a task still go to the
    server that has the task's prompt in its cache.

    The limit is one group, so that groups stay together, but at most the server's share of the episodes in flight, so that a few large
    groups are split.
    """
    rollout, servers = recipe.rollout, recipe.serving.replicas
    in_flight = min(rollout.concurrency, rollout.group.size * rollout.groups_per_step)
    return max(1, min(rollout.group.size, in_flight // servers))
