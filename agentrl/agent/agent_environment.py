"""The main agent's view of an episode's environment: the first observation, actions, their recorded results, and resumption.

An action is a string or a call to one of the environment's functions. The result of a text action is recorded as a user message after the
turn. The result of a call is recorded as a tool result. Each result carries the reward of its step.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, cast

from agentrl.agent.arguments import argument_errors
from agentrl.agent.chat import ChatFormat
from agentrl.agent.contexts import refer_observation, with_instructions
from agentrl.agent.policy_roles import PolicyUser, user_prompt
from agentrl.agent.tools import NO_BOUNDS, ToolOutcome
from agentrl.base.user_code import clip
from agentrl.environment import NEWEST_NOTE, NOTES, is_resumable, open_environment
from agentrl.environment.dialogue import TRAINED
from agentrl.errors import EnvironmentFault, PluginError, PolicyFault, UserError
from agentrl.gateway.constraint import choice_constraint
from agentrl.protocols import Environment, LiveEpisode, LiveTrajectory, ResumableEnvironment, Sandbox
from agentrl.records import EnvironmentSpec, Limits, Message, Observation, Task, ToolCall, ToolResult
from agentrl.records.chat import USER
from agentrl.records.episode import NO_NOTES
from agentrl.records.failure import NO_ACTION
from agentrl.records.images import MARK, REFERENCE
from agentrl.records.trajectory import CONTINUED, TRUNCATED

STATE = "environment"
"""Key of the environment's state in the agent's state."""
_USED_UP = "this episode's output is used up"  # part of each output that `LiveEpisode.clip_output` cut
_NO_DEADLINE_S = 86_400.0  # environments enforce their own deadlines


class AgentEnvironment:
    """The environment of one episode, with its recorded actions.

    `first` is the first observation, and `now` the latest one. `ended` is empty until the last step, and then contains `terminated`,
    `truncated` or the name of the limit that stopped the user.

    A forbidden action costs as much as the most expensive step of the episode so far, and so does an empty turn: a turn without an action
    or a successful call. Without this cost, forbidden actions and empty turns would score better than steps with a negative reward.
    `unpaid` counts the forbidden actions and empty turns before the first step; the first step is charged for them.
    """

    def __init__(self, environment: Environment, episode: LiveEpisode, chat: ChatFormat, instructions: str | None = None) -> None:
        assert episode.task.environment is not None, "the task has no environment"
        self.spec: EnvironmentSpec = episode.task.environment
        self.first = self.now = self.ended = ""
        actions = environment.actions
        self.choices = tuple(action for action in actions or () if isinstance(action, str))
        self.schemas = tuple(action for action in actions or () if not isinstance(action, str))
        self.unpaid = 0
        self._lowest: float | None = None  # smallest step reward so far, at most 0; None before the first step
        self._environment, self._episode, self._chat, self._instructions = environment, episode, chat, instructions
        self._notes: list[str] = []  # notes saved in this episode, newest first
        self._user: PolicyUser | None = None

    @classmethod
    async def open(cls, episode: LiveEpisode, chat: ChatFormat, instructions: str | None = None) -> AgentEnvironment:
        """Returns the environment of an episode, either at its start or in the state from which the episode resumes.

        `instructions` replaces the task's system messages and the environment's instructions; None keeps both. Raises `PluginError` if the
        environment has roles, and `EnvironmentFault` if it fails or a repeated action gives a different result.
        """
        environment = await episode.environment()
        check_roles(environment, "turns")
        opened = cls(environment, episode, chat, instructions)
        if played := getattr(opened._environment, "policy_user", ""):
            opened._user = PolicyUser(chat, episode, trained=played == TRAINED)
            cast(Any, opened._environment).play_user(opened._user)
        saved = episode.agent_state.get(STATE)
        if isinstance(saved, Mapping) and "snapshot" in saved:
            episode.stage = "environment"
            restored = await cast(ResumableEnvironment, opened._environment).restore(base64.b64decode(saved["snapshot"]))
            opened._notes = [str(note) for note in saved["notes"]]
            opened.first, opened.now = str(saved["first"]), await opened._shown(restored)
            opened.unpaid, opened._lowest = saved["unpaid"], saved["lowest"]
            return opened
        episode.stage = "environment"
        opened.first = opened.now = await opened._shown(await opened._environment.reset())
        for action, result in recorded_actions(episode, chat):
            await opened._repeat(action, result)
        return opened

    @property
    def takes_text(self) -> bool:
        """Whether an answer without a tool call counts as an action."""
        return not self.schemas or getattr(self._environment, "takes_text", False)

    def prompt(self, observation: str) -> tuple[Message, ...]:
        """Returns the first messages of a context that starts with an observation, which is cut to the limit on a tool's output."""
        task, text = self._episode.task, clip(observation, self._chars)
        if self._instructions is not None:
            return environment_prompt(with_instructions(task.prompt, self._instructions), "", text)
        return environment_prompt(task.prompt, self._environment.instructions, text)

    def start_of(self, trajectory: LiveTrajectory) -> tuple[Message, ...]:
        """Returns the prompt of a trajectory, and records it if the trajectory has no tokens yet."""
        trajectories, observation = self._episode.trajectories, self.first
        start = trajectory
        while (parent := start.parent) is not None:
            start = trajectories[parent.trajectory]
            if start.stop_reason == CONTINUED:
                observation = start.turns[parent.turn].tool_results[-1].output
                break
        prompt = self.prompt(observation)
        if not trajectory.tokens:
            trajectory.describe(trajectory.agent, prompt)
        return prompt

    def context_is_full(self, trajectory: LiveTrajectory) -> bool:
        """Whether the next turn starts a new context."""
        return self.spec.context_turns is not None and len(trajectory.turns) >= self.spec.context_turns

    def constraint(self, chat: ChatFormat) -> str:
        """Returns the constraint that limits an answer to the listed actions; empty if any answer may be sampled."""
        return choice_constraint(self.choices, chat)

    def tools(self) -> tuple[ActionTool, ...]:
        """Returns the environment's functions as tools."""
        return tuple(ActionTool(self, schema) for schema in self.schemas)

    async def say(self, text: str) -> ToolResult:
        """Applies a text action and returns its result."""
        started = time.monotonic()
        outcome = await self.act(text)
        output = self._episode.clip_output(clip(outcome.output, self._chars))
        wall_s = time.monotonic() - started
        return ToolResult(name=USER, output=output, ok=outcome.ok, wall_s=wall_s, reward=outcome.reward, parts=outcome.parts)

    async def act(self, action: str | ToolCall) -> ToolOutcome:
        """Applies an action. If the rules forbid the action, the outcome is an error with the action's cost. After the last step, the
        outcome is an error without a reward."""
        if self.ended:
            return ToolOutcome(output="error: the episode has ended", ok=False)
        if isinstance(action, str) and self.choices and action not in self.choices:
            return self._forbidden(f"the action must be one of {', '.join(self.choices)}")
        if isinstance(action, ToolCall) and (wrong := self._wrong_arguments(action)):
            return self._forbidden(wrong)
        self._episode.stage = "environment"
        try:
            step = await self._environment.step(action)
        except PolicyFault as error:
            return self._forbidden(str(error))
        saved = await self._save(step.note)
        self.now = await self._shown(step.observation) + saved
        limit = "" if self._user is None else self._user.limit
        self.ended = limit or ("terminated" if step.terminated else TRUNCATED if step.truncated else "")
        self._lowest = min(self._lowest or 0.0, step.reward)
        unpaid, self.unpaid = self.unpaid * self._lowest, 0
        return ToolOutcome(output=self.now, ok=True, reward=step.reward + unpaid, parts=step.parts)

    def _wrong_arguments(self, call: ToolCall) -> str:
        schema = next((schema for schema in self.schemas if schema["function"]["name"] == call.name), None)
        return "" if schema is None else argument_errors(schema, call.arguments)

    def charge(self, results: Sequence[ToolResult]) -> tuple[ToolResult, ...]:
        """Returns the results of a turn's calls. If no call of the turn is an action or succeeds, the last result carries the cost of the
        turn."""
        if any(result.ok or result.reward is not None for result in results):
            return tuple(results)
        cost = self._forbidden("").reward or 0.0
        return (*results[:-1], replace(results[-1], reward=cost, parts={NO_ACTION: cost}))

    def _forbidden(self, why: str) -> ToolOutcome:
        self.unpaid += self._lowest is None
        return ToolOutcome(output=f"error: {why}", ok=False, reward=self._lowest or 0.0)

    async def state(self) -> dict[str, Any]:
        """Returns the state of the environment as JSON data; empty if a resumed episode repeats the recorded actions instead. Raises
        `ValueError` if the state cannot be captured."""
        if self.spec.resume == "replay":
            return {}
        if self.spec.resume == "restart" or not is_resumable(self._environment):
            raise ValueError("the state of its environment cannot be captured")
        self._episode.stage = "environment"
        state = await cast(ResumableEnvironment, self._environment).snapshot()
        costs = {"unpaid": self.unpaid, "lowest": self._lowest}
        return {STATE: {"first": self.first, "notes": self._notes, "snapshot": base64.b64encode(state).decode(), **costs}}

    async def _save(self, note: str) -> str:
        """Saves a note from the environment if the episode has a memory. Returns the error text for the agent; empty if there is no
        error."""
        memory = self._episode.memory
        if not note or memory is None:
            return ""
        saved, reply = await asyncio.to_thread(memory.note, note)
        if saved:
            self._notes = [note, *(other for other in self._notes if other != note)]
        return "" if saved else f"\nerror: note: {reply}"

    async def _shown(self, observation: Observation) -> str:
        """Returns the text of an observation. Stores the observation's images. Replaces the marker `NOTES` in the text with the notes from
        this and earlier episodes, or the marker `NEWEST_NOTE` with the newest note."""
        text = (await refer_observation(self._chat, self._episode, observation)).text
        memory, marker = self._episode.memory, NOTES if NOTES in text else NEWEST_NOTE
        if marker not in text:
            return text
        most = None if marker == NOTES else 1
        notes = NO_NOTES if memory is None else (await asyncio.to_thread(memory.recall, "", self._notes, most))[1]
        return text.replace(marker, notes, 1)

    async def _repeat(self, action: str | ToolCall | None, recorded: ToolResult) -> None:
        """Applies a recorded action again. Raises `EnvironmentFault` if the result differs from the recorded result."""
        outcome = self._forbidden("") if action is None else await self.act(action)
        same = action is None or clip(outcome.output, self._chars) == recorded.output or _USED_UP in recorded.output
        if outcome.reward != recorded.reward or not same:
            raise EnvironmentFault(
                f"{self.spec.ref} is not deterministic: repeating an action gave a different result\n"
                "  fix: set tasks.family.options.resume=restart, or resume=snapshot if the environment supports it"
            )

    @property
    def _chars(self) -> int:
        return self._episode.task.limits.tool_output_chars


class ActionTool:
    """Exposes a function of the environment as a tool."""

    needs_sandbox = False
    bounds, together, repeats = NO_BOUNDS, False, False
    opening_s = _NO_DEADLINE_S

    def __init__(self, environment: AgentEnvironment, schema: Mapping[str, Any]) -> None:
        self.name, self.schema = str(schema["function"]["name"]), schema
        self._environment = environment

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        """Applies a call as an action."""
        return await self._environment.act(ToolCall(name=self.name, arguments=arguments))


def check_roles(environment: object, agent: str) -> None:
    """Raises `PluginError` if the environment has roles and `agent` is not `players`, or if the environment has no roles and `agent` is
    `players`."""
    has_roles = bool(getattr(environment, "roles", ()))
    if (agent == "players") != has_roles:
        kind, needed = ("with", "players") if has_roles else ("without", "turns")
        raise PluginError(f"rollout.agent={agent} cannot play an environment {kind} roles", fix=f"set rollout.agent={needed}")


async def check_environment(task: Task, chat: ChatFormat, agent: str = "turns") -> None:
    """Checks that an agent can play the environment of a task, by opening the environment once.

    Raises `UserError` if the environment does not start, `agent` cannot play it, the policy cannot write one of the environment's actions
    as an answer, or the model or the chat template does not accept the environment's observations.
    """
    if task.environment is None:
        return
    try:
        environment = await open_environment(task.environment)
    except EnvironmentFault as error:
        raise _start_error(task.environment, error) from error
    try:
        check_roles(environment, agent)
        try:
            first = await environment.reset()
        except EnvironmentFault as error:
            raise _start_error(task.environment, error) from error
        observations = [*first.values()] if isinstance(first, Mapping) else [first]  # a game returns role -> observation
        for choice in chain(environment.actions or (), *(observation.actions for observation in observations)):
            if isinstance(choice, str) and (problem := chat.choice_problem(choice, task.limits.turn_tokens)):
                raise UserError(
                    f"{task.environment.ref}: the policy cannot answer with the action {choice[:80]!a}: {problem}",
                    fix="change the text of the action, or raise limits.turn_tokens if it is too long",
                )
        functions = [action for action in environment.actions or () if not isinstance(action, str)]
        if played := getattr(environment, "policy_user", ""):
            chat.opening(user_prompt(chat, "-", "-", "-"), ())
        if played or (not functions and task.environment.context_turns != 1):
            chat.check_user_turns()
        observation = observations[0]
        if MARK in observation.text and not chat.reads_images and REFERENCE.search(observation.text):
            message = f"{task.environment.ref}: its observations contain images, but the model reads only text"
            raise UserError(message, fix="use a vision-language model as policy.model")
        chat.opening(environment_prompt(task.prompt, environment.instructions, observation.text), functions)
    finally:
        await environment.close()


def _start_error(spec: EnvironmentSpec, error: EnvironmentFault) -> UserError:
    fix = "correct the environment, or tasks.family.options"
    return UserError(f"tasks.family: the environment {spec.ref!r} does not start: {error}", fix=fix)


def environment_prompt(prompt: Sequence[Message], instructions: str, observation: str) -> tuple[Message, ...]:
    """Returns a task's prompt with the observation as a user message, and with the instructions as the system message if the prompt has
    none.

    An observation after a user message becomes part of that message, because many chat templates reject two user messages in a row. If the
    prompt has messages, an empty observation adds nothing.
    """
    if instructions and not any(message.role == "system" for message in prompt):
        prompt = with_instructions(prompt, instructions)
    if prompt and not observation:
        return tuple(prompt)
    if prompt and prompt[-1].role == "user":
        return (*prompt[:-1], replace(prompt[-1], content=f"{prompt[-1].content}\n\n{observation}"))
    return (*prompt, Message(role="user", content=observation))


def recorded_actions(episode: LiveEpisode, chat: ChatFormat) -> Iterator[tuple[str | ToolCall | None, ToolResult]]:
    """Yields a pair (action, result) for each recorded action of the episode. The action is None for a turn without an action; its result
    carries the cost that `charge` has set."""
    for trajectory in episode.trajectories:
        for turn in trajectory.turns:
            calls: Sequence[ToolCall] = turn.message.tool_calls
            for number, result in enumerate(turn.tool_results):
                if not result.ok and NO_ACTION in result.parts:  # the result of an applied action is `ok`
                    yield None, result
                elif result.reward is not None:
                    yield calls[number] if calls else chat.parse(turn.completion_ids).answer, result
