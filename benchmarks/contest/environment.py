"""Adapts agentrl's tasks, tools, sandboxes and verifiers to GRPOTrainer: an environment class, and rewards.

TRL calls an environment's methods as tools, from one thread. The methods call agentrl's code on a separate event loop: the same tool
objects, warm pool of sandboxes, and verifiers with the same retries as in a run of agentrl.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from agentrl.agent import ChatFormat, Tool, Toolbox, TurnLoop, call_tool, load_tools
from agentrl.base import user_code
from agentrl.config import Recipe
from agentrl.errors import InfrastructureError, UserError
from agentrl.protocols import Sandbox, SandboxBackend, TaskFamily
from agentrl.records import Completion, Episode, SamplingParams, Task, Trajectory, VersionSpan
from agentrl.records.sampling import Sampling
from agentrl.reward import TaskScorer
from agentrl.rollout import EpisodeRunner, GroupRunner
from agentrl.sandbox.select import open_sandboxes
from agentrl.task import GroupSchedule, sandbox_specs

T = TypeVar("T")

_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool}


class Host:
    """The components that both sides use, on an event loop in a separate thread. Close it; otherwise its sandboxes stay open."""

    def __init__(self, recipe: Recipe, family: TaskFamily, chat: ChatFormat, sandboxes: SandboxBackend | None = None) -> None:
        self.recipe, self.family, self.chat = recipe, family, chat
        self.tool_s = 0.0  # seconds in tool calls, which TRL runs one after the other
        self.faults = 0  # infrastructure faults
        self._schedule = GroupSchedule(family, recipe.seed)
        self._tasks: dict[int, Task] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sandboxes", daemon=True)
        self._thread.start()
        self.sandboxes: SandboxBackend | None = sandboxes
        self.scorer = TaskScorer(sandboxes=sandboxes)

    def open(self, root: Path, run_label: str) -> None:
        """Opens the recipe's sandbox backend and builds its image, so that no step waits for it."""

        async def open_backend() -> SandboxBackend:
            sandboxes = await open_sandboxes(self.recipe.sandbox, run_label=run_label, root=root)
            for spec in sandbox_specs(self.family):
                await sandboxes.prepare(spec)
            return sandboxes

        self.sandboxes = self.run(open_backend())
        self.scorer = TaskScorer(sandboxes=self.sandboxes)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and waits for its result."""
        return self.submit(work).result()

    def gather(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Runs coroutines on the loop, at most as many at a time as a run of agentrl has episodes."""

        async def limited(slots: asyncio.Semaphore, item: Coroutine[Any, Any, T]) -> T:
            async with slots:
                return await item

        async def run_all() -> list[T]:
            slots = asyncio.Semaphore(self.recipe.rollout.concurrency)
            return await asyncio.gather(*(limited(slots, item) for item in work))

        return self.run(run_all())

    def task(self, group: int) -> Task:
        """Returns the task of a group: the same as in agentrl's run with this seed."""
        if group not in self._tasks:
            self._tasks[group] = self._schedule.task(group)
        return self._tasks[group]

    async def score(self, task: Task, episode: Episode) -> float | None:
        """Returns the reward; None if the episode could not be scored. TRL excludes such a reward from its group's mean."""
        value = (await self.scorer(task, episode)).value
        self.faults += value is None
        return value

    def score_completion(self, group: int, token_ids: Sequence[int]) -> Coroutine[Any, Any, float | None]:
        """Returns the score of a one-turn episode with this completion, run and scored as in agentrl."""
        runner = EpisodeRunner(
            agent=TurnLoop(chat=self.chat),
            policy=_FixedPolicy(tuple(token_ids), self.chat.stop_token_ids),
            sandboxes=self.opened,
            sampling=Sampling(temperature=self.recipe.rollout.sampling.temperature),
            max_model_len=self.recipe.policy.max_model_len,
            request_timeout_s=60.0,
        )
        groups = GroupRunner(runner=runner, scorer=self.scorer, slots=asyncio.Semaphore(1), group_size=1)
        return self._scored(groups, group)

    async def _scored(self, groups: GroupRunner, group: int) -> float | None:
        value = (await groups.run_episode(self.task(group), name=f"g{group:06d}")).score.value
        self.faults += value is None
        return value

    def close(self) -> None:
        if self.sandboxes is not None:
            self.run(self.sandboxes.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)

    @property
    def opened(self) -> SandboxBackend:
        assert self.sandboxes is not None, "opened before the first episode"
        return self.sandboxes


class _FixedPolicy:
    """A policy with one fixed completion."""

    def __init__(self, token_ids: tuple[int, ...], stop: tuple[int, ...]) -> None:
        self._ids = token_ids
        self._ended = bool(token_ids) and token_ids[-1] in stop

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        spans = (VersionSpan(version=0, start=0, end=len(self._ids)),) if self._ids else ()
        reason = "stop" if self._ended else "length"
        return Completion(token_ids=self._ids, logprobs=(0.0,) * len(self._ids), versions=spans, finish_reason=reason)


class _Environment:
    """One rollout of TRL's. `reset` starts an episode at the task of a dataset row's group; the tools' methods are added by `environment`.

    TRL ends an episode only if the model calls no tool, or if a tool's answer exceeds the context; it then removes the answer and stops
    sampling. So `submit`, and the last turn that the task allows, answer with `ending`, which always exceeds the context.
    """

    host: Host
    ending: str

    def __init__(self) -> None:
        self._task: Task | None = None
        self._tools = Toolbox({}, {}, {})
        self._sandbox: Sandbox | None = None
        self._answer: str | None = None
        self._calls = 0
        self._over = False
        self._fault: BaseException | None = None

    def reset(self, group: int, **_: Any) -> None:
        self.host.run(self._closed())
        self._task = self.host.task(group)
        self._tools = load_tools(self._task.tools)
        self._answer, self._calls, self._over, self._fault = None, 0, False, None

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        """Runs a tool call. Returns the text for the model."""
        assert self._task is not None, "reset comes first"
        if self._over or self._fault is not None:
            return self.ending
        started = time.monotonic()
        try:
            output = self.host.run(self._called(self._task, self._tools[name], arguments))
        except InfrastructureError as error:  # otherwise TRL would show it to the model and score the episode
            user_code.log_unexpected(f"tool {name}", error)
            self._fault = error
            return self.ending
        finally:
            self.host.tool_s += time.monotonic() - started
        self._over = self._over or self._answer is not None or self._calls >= self._task.limits.turns
        return self.ending if self._over else output

    async def _called(self, task: Task, tool: Tool, arguments: dict[str, Any]) -> str:
        self._calls += 1
        if tool.needs_sandbox and self._sandbox is None:
            self._sandbox = await self.host.opened.open(task.sandbox, files=task.contents())
        sandbox = self._sandbox if tool.needs_sandbox else None
        called = await call_tool(tool, arguments, sandbox, task.limits, turn=self._calls)
        self._answer = called.outcome.answer
        self._over = self._over or called.sandbox_lost
        if self._answer is not None or self._over:
            await self._closed()
        return self.host.chat.escape_text(called.outcome.output)

    async def _score(self, last_text: str | None) -> float | None:
        """Returns the score of the episode that has ended. `last_text`: the text of its last turn, the answer if there is no `submit`."""
        task = self._task
        assert task is not None, "reset comes first"
        await self._closed()
        if self._fault is not None:
            self.host.faults += 1
            return None
        answer = self._answer if "submit" in self._tools or self._over else last_text
        reason = "submitted" if self._answer is not None else "answered"
        trajectory = Trajectory(agent="main", turns=(), stop_reason=reason)
        return await self.host.score(task, Episode(id="trl", task_id=task.id, task_key=task.key, trajectories=(trajectory,), answer=answer))

    async def _closed(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()


def environment(host: Host, tools: Sequence[Tool], ending: str) -> type[_Environment]:
    """Returns the environment class of a family: a method for each tool, from which TRL renders the same schema as agentrl.

    Raises `UserError` for a tool whose schema no method can have, because the prompts of the two sides would differ.
    """
    return type("SandboxEnvironment", (_Environment,), {"host": host, "ending": ending, **{tool.name: _method(tool) for tool in tools}})


def final_text(messages: list[dict[str, Any]]) -> str | None:
    """Returns the answer of an episode without `submit`: its last message, if that calls no tool."""
    last = messages[-1] if messages else {}
    return str(last.get("content") or "").strip() if last.get("role") == "assistant" and not last.get("tool_calls") else None


def messages_of(task: Task, group: int) -> list[dict[str, Any]]:
    """Returns the task's prompt in the format of chat templates. `group`, which no template renders, identifies the task."""
    messages: list[dict[str, Any]] = []
    for message in task.prompt:
        calls = [{"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}} for call in message.tool_calls]
        messages.append({"role": message.role, "content": message.content, "group": group} | ({"tool_calls": calls} if calls else {}))
    return messages


def _method(tool: Tool) -> Any:
    function = tool.schema["function"]
    properties: dict[str, Any] = function["parameters"].get("properties", {})
    if set(function["parameters"].get("required", [])) != set(properties) or any(
        set(argument) != {"type", "description"} or argument["type"] not in _TYPES for argument in properties.values()
    ):
        raise UserError(
            f"TRL cannot derive the schema of the tool {tool.name!r} from a Python method",
            fix="use tools whose arguments are all required and of simple types",
        )

    def method(self: _Environment, **arguments: Any) -> str:
        return self._call(tool.name, arguments)

    kinds = {name: _TYPES[argument["type"]] for name, argument in properties.items()}
    keyword = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind) for name, kind in kinds.items()]
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__name__ = method.__qualname__ = tool.name
    argument_lines = [f"    {name}: {argument['description']}" for name, argument in properties.items()]
    method.__doc__ = "\n".join([function["description"], "", "Args:", *argument_lines])
    method.__annotations__ = kinds  # without a return annotation, which TRL would add to the schema
    method.__signature__ = inspect.Signature([self_parameter, *keyword])  # type: ignore[attr-defined]
    return method
