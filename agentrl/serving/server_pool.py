"""One policy on several servers: an episode stays with the one that has its context cached, unless that one is gone.

Two numbers keep staleness bounded. `version` is what every server that answers has reached, and what rollouts wait for; a server that has
less (it was being started when the others took a version in) gets no request until it has caught up. So whatever is sampled after
`version` was n was sampled with n or newer weights, on whichever server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentrl.config.recipe import Recipe
from agentrl.errors import ServerDied, ServingError, SwapError
from agentrl.protocols import CacheUse, VersionRegistry
from agentrl.records import Completion, PolicyVersion, SamplingParams, SwapReport
from agentrl.serving.routing import EpisodeRouter
from agentrl.serving.supervisor import ServerLost, SupervisedServer, mark_serving, version_to_serve

log = logging.getLogger(__name__)

POLL_S = 0.1
"""How often requests look for a server where there is none, and a server that came back is looked for."""

_Take = Callable[[SupervisedServer, PolicyVersion], Awaitable[SwapReport | None]]


class ServerPool:
    """A `PolicyServer` on `serving.replicas` supervised vLLM servers with the same weights, each with a cache of its own.

    A request that a dying server never received goes to another one, with the exact tokens so far; those in flight on it fail, as they do
    with a single server. A server that died too often is given up, and `watch` raises once none is left.
    """

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        registry: VersionRegistry,
        *,
        gpus: Sequence[str] = (),
        alert: Callable[[str], None] = log.warning,
    ) -> None:
        """`gpus`: CUDA_VISIBLE_DEVICES of each server; empty: as in the driver. `alert`: as for `SupervisedServer`."""
        count = recipe.serving.replicas
        self.version = -1
        self.sha256 = ""
        self._recipe, self._registry, self._alert = recipe, registry, alert
        self._replicas = [
            SupervisedServer(
                recipe, run_dir, registry, gpus=gpus[number] if gpus else None, name=str(number), newest=self._newest, alert=alert
            )
            for number in range(count)
        ]
        self._routing = EpisodeRouter(count, apart=max_load_lead(recipe))
        self._sampled = [0] * count  # tokens, since the figures were last told
        self._floor = -1  # a server with less gets no request: `version`, or less on the way back to an older one
        self._moving = asyncio.Lock()  # one version at a time is taken in
        self._looking = asyncio.Lock()  # one of those that wait for a server looks, and the others wait for it
        self._changed = asyncio.Condition()

    @property
    def restarts(self) -> int:
        return sum(replica.restarts for replica in self._replicas)

    @property
    def token_s(self) -> float:
        return max(replica.token_s for replica in self._replicas)

    @property
    def cache_use(self) -> CacheUse | None:
        """Of the servers that answer; it counts as another reading once all of them have been read again."""
        found = [replica.cache_use for replica in self._replicas if replica.accepts_requests and replica.cache_use is not None]
        if not found:
            return None
        return CacheUse(reading=min(use.reading for use in found), shares=tuple(share for use in found for share in use.shares))

    async def start(self, version: PolicyVersion, *, await_probe: bool = False) -> None:
        """Starts all servers side by side. Raises what `SupervisedServer.start` does when one of them cannot be started."""
        async with asyncio.TaskGroup() as starting:
            for replica in self._replicas:
                starting.create_task(replica.start(version, await_probe=await_probe))
        await self._tell(version)

    @contextmanager
    def episode(self, episode_id: str, task_key: str) -> Iterator[None]:
        self._routing.begin(episode_id, task_key)
        try:
            yield
        finally:
            self._routing.end(episode_id)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        episode_id = request_id.rpartition("-")[0]
        while True:
            able = self._able() or await self._some_able()
            number = self._routing.choose(episode_id, len(prompt_ids), able=able, full=self._full())
            completion = await self._replicas[number].try_generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)
            if completion is not None:
                self._routing.record_context(episode_id, len(prompt_ids) + len(completion.token_ids))
                self._sampled[number] += len(completion.token_ids)
                return completion

    async def swap(self, version: PolicyVersion) -> SwapReport:
        """Takes a published version into every server: into one, and when its probe agrees into the others side by side.

        A server that dies meanwhile is left out, and catches up when it is back. One that refuses what another has taken in is replaced.
        Returns the longest stall and the largest difference. Raises `SwapError` when the first refuses it three times; then all serve
        what they did before.
        """
        async with self._moving:
            began, former = time.perf_counter(), self._registry.get(self.version)
            try:
                reports = await self._move(version, SupervisedServer.load_version)
            except SwapError:
                await self._return(former)
                raise
            mark_serving(self._registry, version)
            await self._tell(version)
        return SwapReport(
            version=version.number,
            stall_ms=max(report.stall_ms for report in reports),
            total_ms=1000 * (time.perf_counter() - began),
            probe_max_abs_diff=max(report.probe_max_abs_diff for report in reports),
        )

    async def fall_back(self, version: PolicyVersion) -> None:
        """Serves `version`, published earlier, instead of one that the learner has retracted."""
        async with self._moving:
            self._floor = min(self._floor, version.number)
            await self._move(version, SupervisedServer.load_or_restart)
            mark_serving(self._registry, version)
            await self._tell(version)

    async def wait_version(self, number: int) -> None:
        """Returns once every server that answers serves version `number` or a newer one."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= number)

    async def watch(self, *, on_loss: Callable[[], Awaitable[None]]) -> None:
        """Restarts servers that die, with the version that the others serve; ends only by cancellation or `ServingError`."""
        async with asyncio.TaskGroup() as watching:
            given_up: list[int] = []
            for number in range(len(self._replicas)):
                watching.create_task(self._keep(number, given_up, on_loss))
            watching.create_task(self._catch_up())

    def figures(self) -> dict[str, float]:
        sampled, self._sampled = self._sampled, [0] * len(self._replicas)
        figures: dict[str, float] = {"replicas_able": len(self._able()), "episodes_moved": self._routing.moved}
        for number, replica in enumerate(self._replicas):
            figures[f"replica{number}_tokens"] = sampled[number]
            figures[f"replica{number}_load"] = self._routing.loads[number]
            figures[f"replica{number}_restarts"] = replica.restarts
            if replica.cache_use is not None:
                figures[f"replica{number}_cache_use"] = max(replica.cache_use.shares)
        return figures

    async def close(self) -> None:
        await asyncio.gather(*(replica.close() for replica in self._replicas))

    def _able(self) -> list[int]:
        """Servers that may be asked now."""
        return [number for number, replica in enumerate(self._replicas) if replica.accepts_requests and replica.version >= self._floor]

    def _full(self) -> list[int]:
        """Servers whose caches are to take no further episode, by the newest readings."""
        most, uses = self._recipe.rollout.max_cache_use, [replica.cache_use for replica in self._replicas]
        return [number for number, use in enumerate(uses) if use is not None and max(use.shares) >= most]

    async def _some_able(self) -> list[int]:
        """`_able`, once there is one. Raises `ServingError`."""
        try:
            async with asyncio.timeout(self._recipe.serving.startup_timeout_s), self._looking:
                while not (able := self._able()):
                    await asyncio.sleep(POLL_S)
                return able
        except TimeoutError:
            raise ServerDied("none of the inference servers came back") from None

    async def _move(self, version: PolicyVersion, take: _Take) -> list[SwapReport]:
        """Brings every server to a version. Raises `SwapError`, with which some may have it and others not."""
        reports = [await self._first(version, take)]
        while late := self._late(version):
            done = await asyncio.gather(*(self._follow(replica, version, take) for replica in late), return_exceptions=True)
            if (failed := next((one for one in done if isinstance(one, BaseException)), None)) is not None:
                raise failed
            reports += [one for one in done if not isinstance(one, BaseException)]
        return [report for report in reports if report is not None]

    async def _first(self, version: PolicyVersion, take: _Take) -> SwapReport | None:
        """Brings one server to a version, or another one if it dies meanwhile."""
        try:
            async with asyncio.timeout(self._recipe.serving.startup_timeout_s) as deadline:
                while True:
                    found = next((replica for replica in self._replicas if replica.accepts_requests), None)
                    if found is None:
                        await asyncio.sleep(POLL_S)
                        continue
                    deadline.reschedule(None)  # the swap has deadlines of its own
                    try:
                        return await take(found, version)
                    except ServerLost as error:
                        log.warning("swap to version %d goes on with another server: %s", version.number, error)
                        deadline.reschedule(asyncio.get_running_loop().time() + self._recipe.serving.startup_timeout_s)
        except TimeoutError:
            raise ServerDied("none of the inference servers came back") from None

    async def _follow(self, replica: SupervisedServer, version: PolicyVersion, take: _Take) -> SwapReport | None:
        """Brings a server to a version that another one serves. Raises `SwapError` where the version was taken back meanwhile."""
        try:
            return await take(replica, version)
        except ServerLost:
            return None  # it catches up when it is back
        except SwapError as error:
            if self._registry.get(version.number) != version:
                raise
            log.warning("%s is replaced, because it refuses version %d, which another one serves: %s", replica.title, version.number, error)
            replica.request_replacement(f"it refuses version {version.number}")
            return None

    async def _return(self, former: PolicyVersion | None) -> None:
        """Brings those that have taken a refused version in back to what the others serve."""
        if former is None or former.sha256 != self.sha256:
            return  # that was taken back, too, and the run falls back to another one
        for replica in self._late(former):
            try:
                await replica.load_or_restart(former)
            except SwapError as error:
                replica.request_replacement(f"it cannot go back to version {former.number}: {error}")

    def _late(self, version: PolicyVersion) -> list[SupervisedServer]:
        """Servers that answer, and with another version."""
        wanted = (version.number, version.sha256)
        return [replica for replica in self._replicas if replica.accepts_requests and (replica.version, replica.sha256) != wanted]

    async def _catch_up(self) -> None:
        """Brings servers that were away while the others took a version in to what the others serve."""
        while True:
            await asyncio.sleep(POLL_S)
            if self._moving.locked():
                continue
            async with self._moving:
                version = self._registry.get(self.version)
                if version is None or version.sha256 != self.sha256:
                    continue  # it was retracted, and the run falls back to another one
                for replica in self._late(version):
                    try:
                        await self._follow(replica, version, SupervisedServer.load_or_restart)
                    except SwapError as error:
                        log.warning("%s stays behind version %d: %s", replica.title, version.number, error)

    async def _keep(self, number: int, given_up: list[int], on_loss: Callable[[], Awaitable[None]]) -> None:
        """Watches one server, until it is given up. Raises `ServingError` when it was the last one."""
        replica = self._replicas[number]
        try:
            await replica.watch(on_loss=on_loss)
        except ServingError as error:
            await replica.close()
            given_up.append(number)
            if len(given_up) == len(self._replicas):
                raise
            self._alert(f"{replica.title} is given up, and the run continues without it: {error}")

    def _newest(self) -> PolicyVersion | None:
        """The version that a restarted server begins with: the one that the others serve; where none does, what one server would."""
        current = self._registry.get(self.version)
        if any(replica.accepts_requests for replica in self._replicas) and current is not None and current.sha256 == self.sha256:
            return current
        found = version_to_serve(self._registry)
        if found is not None and found.number < self.version and not any(replica.accepts_requests for replica in self._replicas):
            self.version, self.sha256, self._floor = found.number, found.sha256, found.number
        return found

    async def _tell(self, version: PolicyVersion) -> None:
        """The run serves `version` from now on."""
        self.version, self.sha256, self._floor = version.number, version.sha256, version.number
        async with self._changed:
            self._changed.notify_all()


def max_load_lead(recipe: Recipe) -> int:
    """How many contexts a server may be ahead and still get an episode of a task that it has: a whole group, so that groups stay
    together, but no more than its fair share of the episodes in flight, so that a few large groups are divided."""
    rollout, servers = recipe.rollout, recipe.serving.replicas
    in_flight = min(rollout.concurrency, rollout.group_size * rollout.groups_per_step)
    return max(1, min(rollout.group_size, in_flight // servers))
