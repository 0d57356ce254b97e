"""Creates cases that start in the middle of an episode, at the turn at which the episode failed.

The start state of a case is created once, when the failure is promoted. The recorded episode is replayed in a live sandbox, token by token,
up to the failing turn. The tools must return the recorded results. Then the state of the sandbox is captured. An evaluation of the case
starts from this state, and the evaluated policy samples the failing turn and all later turns.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.agent import ChatFormat, delegation, load_tools
from agentrl.agent.contexts import with_instructions
from agentrl.agent.run_tools import declared_tools, pin_tools, with_sub_agent_tools
from agentrl.base.error_text import one_line_error, reason_text
from agentrl.base.media import MediaFolder
from agentrl.config.recipe import DelegationConfig, Recipe, RolloutConfig, load
from agentrl.errors import ServingError, UserError
from agentrl.evaluation.policies import NamedPolicy, PolicySource, load_policy_plugin
from agentrl.failure.case import Case, Suite
from agentrl.failure.trace import Trace, deciding_tag
from agentrl.memory.run_memory import ReplayedMemory
from agentrl.plugins.references import add_project_root, project_root
from agentrl.protocols import Agent, SandboxBackend, ToolSource
from agentrl.records import Blame, Completion, EpisodeState, SamplingParams, Task, Turn
from agentrl.records.sampling import Sampling
from agentrl.rollout import CaptureState, EmptyMemory, EpisodeRunner
from agentrl.sandbox import open_sandboxes
from agentrl.session.builders import build_agent
from agentrl.session.ending import close_after
from agentrl.session.preflight import open_chat

_FROM_START = "promote it without --from-turn, so that it starts with its task"
_TIMEOUT_S = 60.0
_SESSION = "python_session"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySetup:
    """The components that replay a run's episodes."""

    agent: Agent
    sandboxes: SandboxBackend
    max_model_len: int
    tools: ToolSource  # tools that the run's recipe configures, with the tool lists of its servers


class _Enough(ServingError):
    """Raised to stop the replay at the turn before which the state is captured. This exception does not report a fault."""


class _Apart(ServingError):
    """Raised to stop a replay that differs from the recorded episode."""


@dataclass(slots=True)
class _Player:
    """A `Policy` that returns recorded completions as long as the prompts equal the recorded prompts."""

    turns: Sequence[Turn]  # up to and including the turn at which the case starts
    context: list[int] = field(default_factory=list)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        number = int(request_id.rpartition("-")[2].partition(".")[0])
        if list(prompt_ids) != [*self.context, *self.turns[number].prompt_ids]:
            raise _Apart(f"turn {number + 1} starts with different tokens than recorded")
        turn = self.turns[number]
        self.context = [*prompt_ids, *turn.completion_ids]
        return Completion(
            token_ids=turn.completion_ids,
            logprobs=turn.logprobs,
            versions=turn.versions,
            finish_reason=turn.finish_reason,
            supports=turn.supports,
            forced=turn.forced,
        )


def start_turn(trace: Trace, wanted: str) -> int:
    """Returns the turn, counted from 0, at which the case promoted from a trace will start.

    `wanted` is a number counted from 1, or `failing`, which means the turn in the trace's tag. Raises `UserError` if there is no such turn,
    or if the trace has several trajectories or no exact tokens.
    """
    if trace.episode is None or trace.task is None:
        raise UserError(f"trace {trace.id} ({trace.source}) has no exact tokens to start from", fix="promote an episode of a run")
    if len(trace.episode.trajectories) != 1:
        raise UserError(f"trace {trace.id} has several trajectories, so there is no single turn to start at", fix=_FROM_START)
    turns = trace.episode.trajectories[0].turns
    if not all(turn.prompt_ids and turn.completion_ids for turn in turns):
        raise UserError(f"trace {trace.id}: its exact tokens are unknown; endpoints do not return them", fix=_FROM_START)
    tag = deciding_tag(trace.tags)
    number = tag.turn if wanted == "failing" and tag is not None else int(wanted) - 1 if wanted.isdecimal() and len(wanted) < 7 else None
    if number is None:
        why = f"tag {tag.name if tag else '-'} has no turn" if wanted == "failing" else f"{wanted!r} is not a turn"
        raise UserError(f"trace {trace.id}: {why}", fix=f"use a number from 1 to {len(turns)}")
    if not 0 <= number < len(turns):
        raise UserError(f"trace {trace.id} has no turn {number + 1}", fix=f"use a number from 1 to {len(turns)}")
    return number


async def replay_state(trace: Trace, turn: int, stage: ReplaySetup) -> EpisodeState | None:
    """Returns the state of a trace's episode before a turn, counted from 0; None if the turn is the first.

    Raises `UserError` if the replay fails or differs from the recorded episode, for example in a tool result or because of a different
    tokenizer, if the sandbox or the tools' state is too large to capture, or if an earlier turn calls the tool `python_session`.
    """
    task, episode = trace.task, trace.episode
    assert task is not None and episode is not None, "start_turn checks this"
    if turn == 0:
        return None
    if any(call.name == _SESSION for earlier in episode.trajectories[0].turns[:turn] for call in earlier.message.tool_calls):
        raise _refused(trace, turn, f"tool {_SESSION} stores variables in a running program, which snapshots do not contain")
    recorded = episode.trajectories[0].turns
    player, states = _Player(recorded[: turn + 1]), list[EpisodeState | None]()

    async def on_turn(turns: int, capture: CaptureState) -> None:
        if turns == turn:
            states.append(await capture())
            raise _Enough("the turn is reached")

    runner = EpisodeRunner(
        agent=stage.agent,
        tools=stage.tools,
        policy=player,
        sandboxes=stage.sandboxes,
        sampling=Sampling(),
        max_model_len=stage.max_model_len,
        request_timeout_s=_TIMEOUT_S,
    )
    if task.sandbox is not None:
        await stage.sandboxes.prepare(task.sandbox)
    memory = None if episode.memory is None else ReplayedMemory(episode.memory, recorded[:turn])
    played = await runner.run(task, episode_id=trace.id, on_turn=on_turn, memory=memory)
    if not states:
        faults = [failure.message for failure in played.failures if failure.blame is not Blame.POLICY]
        raise _refused(trace, turn, faults[-1] if faults else f"it ended before turn {turn + 1}")
    if states[0] is None:
        raise _refused(trace, turn, "its working directory or its tools' state is too large")
    if why := _differs(states[0], recorded, turn):
        raise _refused(trace, turn, why)
    return states[0]


def _differs(state: EpisodeState, recorded: Sequence[Turn], turn: int) -> str:
    """Returns how a replayed state differs from the recorded episode before a turn; empty if it does not differ."""
    for number, (mine, theirs) in enumerate(zip(state.trajectories[0].turns, recorded, strict=False)):
        if mine.message != theirs.message:
            return f"turn {number + 1} is parsed as a different message"
        if [(tool_result.name, tool_result.output) for tool_result in mine.tool_results] != [
            (tool_result.name, tool_result.output) for tool_result in theirs.tool_results
        ]:
            return f"the tools of turn {number + 1} return different results than recorded"
    return "" if state.prompt_ids == (recorded[turn].prompt_ids,) else f"turn {turn + 1} starts with different tokens than recorded"


def _refused(trace: Trace, turn: int, why: str) -> UserError:
    return UserError(f"trace {trace.id} cannot be replayed up to turn {turn + 1}: {why}", fix=_FROM_START)


@asynccontextmanager
async def open_replay(run: Path, tasks: Iterable[Task]) -> AsyncIterator[ReplaySetup]:
    """Opens the agent, tokenizer, tools and sandboxes for replaying the episodes of a run, as its recipe configures them.

    Args:
        tasks: the tasks of the episodes. The tool servers that these tasks use are started.

    Raises `UserError` if the folder contains no run or no model, or if a tool server does not start or has changed.
    """
    try:
        recipe = load(run / "recipe.json")
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read {run / 'recipe.json'}, which configures the replay: {reason_text(error)}"[:2000], fix=_FROM_START
        ) from None
    root = project_root(run)
    add_project_root(root)
    chat = _chat(run, recipe)
    agent = build_agent(recipe, chat)
    sandboxes = await open_sandboxes(recipe.sandbox, warm=0, run_label="promote", root=root)
    async with close_after(sandboxes.close):
        users = with_sub_agent_tools(tasks, recipe.rollout.delegation)
        tools = await pin_tools(
            declared_tools(recipe.mcp, recipe.tools, root), users, sandboxes, folder=run, every=False, idle_words=True, chat=chat
        )
        yield ReplaySetup(agent=agent, sandboxes=sandboxes, max_model_len=recipe.policy.max_model_len, tools=tools)


def _chat(run: Path, recipe: Recipe) -> ChatFormat:
    base, model = run / "versions" / "000000", recipe.policy.model
    if base.is_dir():
        return open_chat(base, policy=recipe.policy, media=MediaFolder(run))
    if ":" in model and "://" not in model:
        loaded, policy = load_policy_plugin(NamedPolicy(source=PolicySource.PLUGIN, name=model, model=model)), recipe.policy
        return ChatFormat(loaded.tokenizer, tool_format=policy.tool_format, rewritten=policy.rewritten_context)
    raise UserError(f"{run} has no model with the tokenizer of its traces", fix=_FROM_START)


def starts_mid_episode(suites: Iterable[Suite]) -> bool:
    """Whether any case starts in the middle of an episode."""
    return any(case.start is not None for suite in suites for case in suite.cases)


def check_start_tokens(suites: Iterable[Suite], chat: ChatFormat, tools: ToolSource | None, rollout: RolloutConfig) -> None:
    """Raises `UserError` if this tokenizer and template would not produce the start tokens of a case.

    Args:
        tools: the recipe's tools, with the tool lists of its servers. The tools' schemas are part of the prompts.
        rollout: the recipe's rollout settings. Only `instructions` and `delegation` are used.
    """
    delegate = delegation.delegate_schema(rollout.delegation or DelegationConfig())
    for suite in suites:
        for case in suite.cases:
            if case.start is not None and (why := _foreign(case, case.start, chat, tools, delegate, rollout.instructions)):
                raise UserError(
                    f"case {case.id} starts at turn {case.start.turn_count + 1}, with tokens from a different tokenizer, template or"
                    f" wording than the policy's: {why}",
                    fix="evaluate a policy with the tokenizer that the case was captured with, or promote the failure from its start",
                )


def _foreign(
    case: Case,
    start: EpisodeState,
    chat: ChatFormat,
    tools: ToolSource | None,
    delegate: Mapping[str, Any],
    instructions: str | None,
) -> str:
    if len(start.trajectories) != 1:
        return "it has several trajectories"
    turns, prompts = start.trajectories[0].turns, [turn.prompt_ids for turn in start.trajectories[0].turns] + [start.prompt_ids[0]]
    try:
        memory = None if start.memory is None else EmptyMemory(start.memory)
        schemas = [tool.schema for tool in load_tools(case.task.tools, None, tools, memory=memory).values()]
        prompt = with_instructions(case.task.prompt, instructions)
        if prompts[0] not in [chat.opening(prompt, candidate) for candidate in (schemas, [*schemas, delegate])]:
            return "its prompt has different tokens"
        for number, turn in enumerate(turns):
            if turn.completion_ids[-1:] not in [(token,) for token in chat.stop_token_ids]:
                return f"turn {number + 1} does not end with the end-of-turn token"
            parsed = chat.parse(turn.completion_ids, schemas)
            if parsed.message != turn.message:
                return f"turn {number + 1} is parsed as a different message"
            if chat.answer_delta(turn.tool_results, parsed) != prompts[number + 1]:
                return f"the tool results of turn {number + 1} have different tokens"
    except UserError as error:
        return error.message
    except Exception as error:  # tokenizers raise arbitrary errors for unknown ids
        return one_line_error(error)
    return ""


async def replay_starts(run: Path, traces: Sequence[Trace], wanted: str) -> dict[str, EpisodeState | None]:
    """Returns a mapping trace id -> state from which the case promoted from it starts; None if the case starts at the first turn.

    Args:
        run: the run folder that contains the traces.
        wanted: see `start_turn`.

    Raises the same errors as `start_turn`, `open_replay` and `replay_state`.
    """
    turns = {trace.id: start_turn(trace, wanted) for trace in traces}
    if not any(turns.values()):
        return dict.fromkeys(turns)
    async with open_replay(run, [trace.task for trace in traces if trace.task is not None]) as stage:
        return {trace.id: await replay_state(trace, turns[trace.id], stage) for trace in traces}
