"""A running episode: its trajectories, its sandbox, the time and tokens spent, and its state between turns."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from agentrl.base.activity import ACTIVITY, SANDBOXES
from agentrl.errors import PolicyFault, RequestRefused, ServingError, TaskError
from agentrl.protocols import Environment, EpisodeMemory, Sandbox
from agentrl.records import Cancelled, Completion, EpisodeState, Failure, Message, Parent, SamplingParams, Task, ToolResult, Turn
from agentrl.records.episode import Memo
from agentrl.records.images import MAX_IN_PROMPT, count_images
from agentrl.records.limits import Thinking
from agentrl.records.trajectory import Trajectory, check_parent
from agentrl.rollout.episode_sandbox import EpisodeEnvironment, EpisodeSandbox
from agentrl.rollout.hooks import TurnListener
from agentrl.rollout.pace import OutOfTime, SamplingTime
from agentrl.rollout.repeats import SANDBOX, SampledTurns
from agentrl.rollout.requests import WALL_LIMIT, EpisodeRequests, TimedExternalRequest, loop_time, sample_turn, thinking_bound
from agentrl.rollout.sub_episode import SubEpisode, open_sub_episode

if TYPE_CHECKING:
    from agentrl.rollout.episode import EpisodeRunner

log = logging.getLogger(__name__)

MAX_TOOL_FAILURES = 16  # maximum number of tool failures that an episode records; later failures are dropped

AgentState = Callable[[], Awaitable[Mapping[str, Any]]]


class ActiveTrajectory:
    """A `LiveTrajectory`: the turns so far, and the tokens with which the next turn starts."""

    def __init__(self, episode: ActiveEpisode, index: int, begun: Trajectory, prompt_ids: tuple[int, ...] = ()) -> None:
        self.index, self.parent, self.prompt_ids = index, begun.parent, prompt_ids
        self.turns, self.stop_reason = list(begun.turns), begun.stop_reason
        self.sampling = False  # whether a turn has started but is not recorded yet
        self._episode, self._begun = episode, begun
        self._context = [token for turn in begun.turns for token in (*turn.prompt_ids, *turn.completion_ids)]
        self._generate_s, self._computed = 0.0, 0  # `_computed`: tokens that the server has already computed for this trajectory

    @property
    def tokens(self) -> int:
        """The number of tokens in the context so far."""
        return len(self._context) + len(self.prompt_ids)

    @property
    def agent(self) -> str:
        """The agent's name."""
        return self._begun.agent

    def describe(self, agent: str, prompt: Sequence[Message] | None = None) -> None:
        """Sets the agent's name and the prompt for the record."""
        self._begun = replace(self._begun, agent=agent, prompt=self._begun.prompt if prompt is None else tuple(prompt))

    def limit(self) -> str:
        """Returns the stop reason for the limit that prevents a further turn; empty if no limit does."""
        if self._episode.turns_begun >= self._episode.task.limits.turns:
            return "turn_limit"
        if self._episode.out_of_time:
            return WALL_LIMIT
        return "" if self._budget() > 0 else "token_limit"

    def _budget(self) -> int:
        """Returns the maximum number of tokens in the next completion; 0 or less if no token fits."""
        task, room = self._episode.task, self._episode.room
        limits = task.limits
        left = room - self.tokens
        if limits.all_tokens is not None:  # concurrent turns are counted when they are recorded
            room, left = min(room, limits.all_tokens), min(left, limits.all_tokens - self._episode.tokens)
        images = count_images((*self._context, *self.prompt_ids))
        budget = min(limits.turn_tokens, left) if images <= MAX_IN_PROMPT else 0
        if budget <= 0 and not self._episode.turns_begun:
            if images > MAX_IN_PROMPT:
                raise TaskError(f"task {task.id!r}: its prompt has {images} images; the maximum is {MAX_IN_PROMPT}", fix="use fewer images")
            raise TaskError(
                f"task {task.id!r}: its prompt has {len(self.prompt_ids)} tokens, but the limit for prompt and answer is {room}",
                fix="shorten the prompt, or raise the lowest of policy.max_model_len, limits.episode_tokens and limits.all_tokens",
            )
        return budget

    def add_prompt(self, token_ids: Sequence[int]) -> None:
        """Appends tokens to the prompt of the next turn."""
        self.prompt_ids = (*self.prompt_ids, *token_ids)

    async def sample(
        self,
        *,
        stop_token_ids: Sequence[int],
        max_tokens: int | None = None,
        thinking: Thinking | None = None,
        stop: Sequence[str] = (),
        constraint: str = "",
    ) -> Completion:
        """Samples the next turn within all limits."""
        forbids = "a turn is being sampled" if self.sampling else self.stop_reason or self.limit()
        if forbids == WALL_LIMIT and not self.stop_reason:
            raise OutOfTime("the episode's time has ended")
        if forbids:
            raise RuntimeError(f"trajectory {self.index} cannot have another turn: {forbids}")
        budget, number, started = self._budget(), self._episode.turns_begun, loop_time()
        if max_tokens is not None:
            if max_tokens < 1:
                raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
            budget = min(budget, max_tokens)
        self.sampling = True
        try:
            reads = max(0, self.tokens - self._computed)
            ask = partial(
                self._episode.generate, stop_token_ids=stop_token_ids, stop=stop, constraint=constraint, number=number, reads=reads
            )
            context = [*self._context, *self.prompt_ids]
            sample = partial(sample_turn, context, budget, ask, thinking_bound(self._episode.task, thinking))
            completion = await self._episode.sampled.complete(context, sample, most=budget)
        except RequestRefused as error:
            self.sampling = False
            if not self._episode.turn_count:  # the context contains no output from the policy yet
                raise
            raise PolicyFault(f"the server rejects a context that contains the policy's text: {error}") from error
        except BaseException:
            self.sampling = False
            raise
        self._generate_s = loop_time() - started
        self._computed = self.tokens + len(completion.token_ids)
        return completion

    def add_turn(self, completion: Completion, message: Message) -> None:
        """Records the sampled turn. If the turn is not trained, its tokens become context at the end of the turn's prompt."""
        if self._begun.policy:
            self.add_prompt(completion.token_ids)
            completion = Completion(token_ids=(), logprobs=(), versions=(), finish_reason=completion.finish_reason)
        turn = Turn(
            prompt_ids=self.prompt_ids,
            completion_ids=completion.token_ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            message=message,
            finish_reason=completion.finish_reason,
            generate_s=self._generate_s,
            supports=completion.supports,
            forced=completion.forced,
            ended_at=time.time(),
        )
        self.turns.append(turn)
        self._episode.turn_count += 1
        self._context += (*turn.prompt_ids, *turn.completion_ids)
        self.prompt_ids, self.sampling, self._generate_s = (), False, 0.0
        self._episode.listener.turn_ended(self._episode.id, self.index, len(self.turns) - 1, self.agent, turn)

    def add_results(self, results: Sequence[ToolResult], *, wall_s: float) -> None:
        """Adds the tool results of the last turn."""
        self.turns[-1] = replace(self.turns[-1], tool_results=tuple(results), tool_s=wall_s)
        self._episode.listener.tools_ended(self._episode.id, self.index, len(self.turns) - 1, self.turns[-1])

    def add_last_state(self, token_ids: Sequence[int]) -> None:
        """Records the context in which the next turn of a truncated episode would have started."""
        self._begun = replace(self._begun, last_state=tuple(token_ids))

    def end(self, stop_reason: str) -> None:
        """Ends the trajectory. Raises `ValueError` if the stop reason is empty."""
        self.stop_reason, self.prompt_ids = _checked(stop_reason), ()  # a prompt that no turn reads is not counted

    def record(self, stop_reason: str = "") -> Trajectory:
        """Returns the current record of the trajectory. `stop_reason` is used if the trajectory is still open."""
        return replace(self._begun, turns=tuple(self.turns), stop_reason=self.stop_reason or stop_reason)


class ActiveEpisode:
    """A `LiveEpisode`: one attempt, which starts with its first turn or from a stored state, and ends with `close`.

    For the arguments, see `EpisodeRunner.run`.
    """

    def __init__(
        self,
        task: Task,
        runner: EpisodeRunner,
        *,
        episode_id: str,
        attempt: int = 0,
        start: EpisodeState | None = None,
        on_turn: TurnListener | None = None,
        memory: EpisodeMemory | None = None,
        sampled: SampledTurns | None = None,
    ) -> None:
        self.id, self.listener = episode_id, runner.listener
        self.sampled = SampledTurns() if sampled is None else sampled
        self.task, self.tools, self.memory = task, runner.tools, memory
        self.answer: str | None = None
        self.stage, self.agent_state = "episode", {} if start is None else start.agent_state
        self.room = min(task.limits.episode_tokens, runner.max_model_len)  # maximum number of tokens in one trajectory
        self.failures: list[Failure] = []  # failures of tools that the agent called
        self.spent_s = 0.0  # seconds before this process continued the episode
        self.sandbox_s = self.program_s = 0.0  # seconds spent on opening, writing and executing; seconds in programs that the agent called
        self.sandboxes, self._attempt, self._sampling = runner.sandboxes, attempt, runner.sampling
        self.requests = EpisodeRequests(
            policy=runner.policy,
            pace=runner.pace,
            limit_s=task.limits.wall_s,
            timeout_s=runner.request_timeout_s,
            spent_s=lambda: self.wall_s,
            sampling=SamplingTime() if start is None else SamplingTime(before=(start.sampled_s, start.lost_s)),
        )
        self.open_timeout_s, self._on_turn = runner.open_timeout_s, on_turn
        self._box = EpisodeSandbox(self, None if start is None else start.snapshot)
        self._environment = EpisodeEnvironment(task.environment, alone=self.sampled.alone)
        self._sub_sandboxes: set[EpisodeSandbox] = set()  # sandboxes of sub-agents
        self._running, self._since = 0, 0.0  # number of calls in progress, and the start time of the first of these calls
        self._output_chars = 0  # characters of tool output so far
        self._trajectories = [ActiveTrajectory(self, 0, Trajectory(agent="main", turns=(), stop_reason=""))]
        if start is not None:
            self._go_on_from(start)
        self.turn_count = sum(len(trajectory.turns) for trajectory in self._trajectories)  # finished turns
        self._started = loop_time() - self.spent_s

    def _go_on_from(self, start: EpisodeState) -> None:
        """Continues the state's episode, or inherits all of its turns if this episode is a branch with a different id."""
        continued = self.id == start.episode_id
        begun = [trajectory if continued else _inherited(trajectory, start.episode_id) for trajectory in start.trajectories]
        self._trajectories = [ActiveTrajectory(self, *one) for one in zip(range(len(begun)), begun, start.prompt_ids, strict=True)]
        self._output_chars = start.output_chars
        self.spent_s, self.sandbox_s, self.program_s = start.wall_s, start.sandbox_s, start.program_s
        self.failures = list(start.failures) if continued else []  # failures in inherited turns are recorded in the stem

    @property
    def trajectories(self) -> Sequence[ActiveTrajectory]:
        """All trajectories, the main one first."""
        return tuple(self._trajectories)

    @property
    def tokens(self) -> int:
        """The number of tokens in all trajectories, including prompts of turns that have not started."""
        return sum(trajectory.tokens for trajectory in self._trajectories)

    @property
    def memo(self) -> Memo | None:
        """The notes that the episode read and wrote; None if it has no memory."""
        return None if self.memory is None else self.memory.memo

    @property
    def turns_begun(self) -> int:
        """The number of turns so far, including turns that are being sampled."""
        return self.turn_count + sum(trajectory.sampling for trajectory in self._trajectories if not trajectory.stop_reason)

    @property
    def wall_s(self) -> float:
        """Seconds spent so far, including the time in earlier processes."""
        return loop_time() - self._started

    @property
    def out_of_time(self) -> bool:
        """Whether the episode's time is used up, so that no more turns are sampled."""
        return self.requests.out_of_time

    def timeout_failure(self) -> Failure | None:
        """Returns the failure of an episode that used up its time; None if it has none. `agentrl.rollout.pace` decides the blame."""
        return self.requests.timeout_failure(program_s=self.program_s, sandbox_s=self.sandbox_s, turn=self.turn_count)

    @property
    def untouched(self) -> bool:
        """Whether the sandbox was never opened, so that its files are still the task's."""
        return self._box.untouched

    def open(self, agent: str, *, parent: Parent | None = None, prompt: Sequence[Message] = (), policy: str = "") -> ActiveTrajectory:
        """Opens an additional trajectory."""
        check_parent(len(self._trajectories), parent, self._trajectories)
        if parent is not None and parent.call is None:  # the same agent, in a new context
            policy = self._trajectories[parent.trajectory]._begun.policy
        begun = Trajectory(agent=agent, turns=(), parent=parent, prompt=tuple(prompt), stop_reason="", policy=policy)
        self._trajectories.append(ActiveTrajectory(self, len(self._trajectories), begun))
        return self._trajectories[-1]

    def record(self, stop_reason: str = "") -> tuple[Trajectory, ...]:
        """Returns the records of all trajectories. A trajectory that is still open is recorded with `stop_reason`."""
        return tuple(trajectory.record(stop_reason) for trajectory in self._trajectories)

    def cancellation_record(self, reason: str) -> Cancelled:
        """Returns the record of this attempt, which its group cancelled."""
        own = [turn.sampled for trajectory in self.record() for turn in trajectory.own_turns]
        return Cancelled(episode_id=self.id, reason=reason, turns=len(own), tokens=sum(own), wall_s=self.wall_s)

    def check_result(self, stop_reason: str) -> str:
        """Returns the agent's stop reason. Raises `ValueError` if the stop reason or the answer cannot be recorded."""
        if not isinstance(self.answer, str | None):
            kind, self.answer = type(self.answer).__name__, None
            raise ValueError(f"the agent's answer must be text, got {kind}")
        return _checked(stop_reason)

    async def generate(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        part: str = "",
        *,
        stop_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        constraint: str = "",
        number: int,
        reads: int = 0,
    ) -> Completion:
        """Samples a part of a turn.

        `part`: suffix of the request id for the part after the thinking bound. Raises the same errors as `EpisodeRequests.sample`.
        """
        sampling = self._sampling.constrained() if constraint else self._sampling
        common = {**asdict(sampling), "stop_token_ids": tuple(stop_token_ids), "stop": tuple(stop), "constraint": constraint}
        self.stage = "generate"
        name, reads = f"{self.id}-{number}{part}", 0 if part else reads
        params = partial(SamplingParams, **common)
        completion = await self.requests.sample(token_ids, lambda most: params(max_tokens=most), max_tokens, name, reads=reads)
        if sampling.supports and (completion.supports is None or not all(completion.supports.rows)):
            raise ServingError("the policy did not return the support of every token, which the learner needs to compute logprobs")
        return completion

    def external_request(self, at_most: int, *, within_s: float) -> AbstractContextManager[TimedExternalRequest]:
        """Times a request that the agent sends itself."""
        self.stage = "generate"
        return self.requests.external_request(at_most, within_s=within_s)

    async def environment(self) -> Environment:
        """Returns the environment of the task. The first call opens the environment."""
        self.stage = "environment"
        return await self._environment.environment()

    async def sandbox(self) -> Sandbox:
        """Returns the sandbox. The first call opens the sandbox with the task's files, or with the working directory from the start
        state."""
        return await self._box.sandbox()

    @property
    def sandbox_opened(self) -> bool:
        """Whether the sandbox was opened."""
        return self._box.opened

    @property
    def sandbox_lost(self) -> bool:
        """Whether a tool call in the sandbox was interrupted, so that the files are undefined."""
        return self._box.lost

    @sandbox_lost.setter
    def sandbox_lost(self, lost: bool) -> None:
        self._box.lost = lost

    async def working_copy(self) -> bytes | None:
        """See `LiveEpisode.working_copy`."""
        return await self._box.working_copy()

    def sub_episode(self, copy: bytes | None) -> AbstractAsyncContextManager[SubEpisode]:
        """Opens a sub-episode with a separate sandbox."""
        return open_sub_episode(self, copy, self._sub_sandboxes)

    @contextmanager
    def running(self, sandbox: Sandbox | None) -> Iterator[None]:
        """Measures the time of a tool call."""
        self.stage = "tool" if sandbox is None else "sandbox"
        started, self._running = loop_time(), self._running + 1
        if self._running == 1:
            self._since = started
        try:
            with nullcontext() if sandbox is None else ACTIVITY.doing(SANDBOXES):
                yield
            if sandbox is not None:
                self.sampled.used(SANDBOX)
        finally:
            self._running -= 1
            ended = loop_time()
            self.sandbox_s += 0.0 if sandbox is None else ended - started
            if self._running == 0:  # time during which several calls run concurrently counts once
                self.program_s += ended - self._since

    def clip_output(self, output: str) -> str:
        """Truncates tool output to the episode's remaining budget."""
        left = self.task.limits.all_output_chars - self._output_chars
        self._output_chars += min(len(output), left)
        if len(output) <= left:
            return output
        if left == 0:
            return f"... not shown, {len(output)} characters: this episode's output is used up ..."
        cut = f"\n... {len(output) - left} characters cut: this episode's output is used up ...\n"
        return output[: (left + 1) // 2] + cut + output[len(output) - left // 2 :]

    def add_failure(self, failure: Failure) -> None:
        """Records a tool's failure."""
        if len(self.failures) < MAX_TOOL_FAILURES:
            self.failures.append(failure)

    async def boundary(self, agent_state: AgentState) -> None:
        """Marks the boundary between two turns, at which the state can be captured."""
        if self._on_turn is not None:
            self.stage = "turn"
            await self._on_turn(self.turn_count, lambda: self._capture(agent_state))

    async def _capture(self, agent_state: AgentState) -> EpisodeState | None:
        wall_s, started = self.wall_s, loop_time()
        try:
            if self._sub_sandboxes:
                raise ValueError("a sub-agent is running in its own sandbox")
            tool_state = await agent_state()
            started = loop_time()
            return EpisodeState(
                episode_id=self.id,
                task_key=self.task.key,
                attempt=self._attempt,
                trajectories=self.record(),
                prompt_ids=tuple(trajectory.prompt_ids for trajectory in self._trajectories),
                agent_state=tool_state,
                snapshot=await self._box.snapshot(),
                output_chars=self._output_chars,
                wall_s=wall_s,
                sandbox_s=self.sandbox_s,
                program_s=self.program_s,
                sampled_s=self.requests.sampling.sampled_s,
                lost_s=self.requests.sampling.lost_s,
                failures=tuple(self.failures),
                memory=self.memo,
            )
        except ValueError as error:
            log.info("episode %s cannot be captured after turn %d: %s", self.id, self.turn_count, error)
            return None
        finally:
            self.sandbox_s += loop_time() - started

    async def close(self) -> None:
        """Closes all sandboxes of the episode. No sandbox can be opened afterwards."""
        async with AsyncExitStack() as stack:
            for box in (self._box, *self._sub_sandboxes):
                stack.push_async_callback(box.close)
            stack.push_async_callback(self._environment.close)


def _checked(stop_reason: str) -> str:
    if Trajectory(agent="main", turns=(), stop_reason=stop_reason).stop_reason:
        return stop_reason
    raise ValueError("the stop reason of an ended trajectory must not be empty")


def _inherited(begun: Trajectory, by: str) -> Trajectory:
    """Returns the trajectory with all of its turns marked as sampled by episode `by`, except turns that were already inherited."""
    return replace(begun, inherited=(*begun.inherited, *(by,) * len(begun.own_turns)))
