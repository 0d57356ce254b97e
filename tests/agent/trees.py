"""Helpers for tests of agents with several contexts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from agentrl.agent import TurnLoop
from agentrl.records import Episode, Limits, Task, Trajectory
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.testing import ReadingPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.chats import chat_of


def tree_task(task: Task) -> Task:
    return replace(task, tools=("python",), limits=Limits(turns=12, turn_tokens=600, episode_tokens=4000))


def make_runner(tokenizer: Any, reads: Any, sandboxes: ScriptedSandboxes | None = None, **agent: Any) -> EpisodeRunner:
    return EpisodeRunner(
        agent=TurnLoop(chat=chat_of(tokenizer), **agent),
        policy=ReadingPolicy(tokenizer, reads),
        sandboxes=sandboxes or ScriptedSandboxes(printing("3")),
        sampling=Sampling(),
        max_model_len=4096,
        request_timeout_s=60.0,
    )


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


PRINT = call("python", code="1")


def delegate(*tasks: Any) -> str:
    return "".join(call("delegate", task=task) for task in tasks)


def user_prompt(context: str) -> str:
    """The prompt of this context."""
    return str(re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", context, re.DOTALL)[0])


def tool_responses(context: str) -> list[str]:
    return re.findall(r"<tool_response>\n(.*?)\n</tool_response>", context, re.DOTALL)


def outputs(trajectory: Trajectory) -> list[str]:
    return [result.output for turn in trajectory.turns for result in turn.tool_results]


def turn_texts(trajectory: Trajectory) -> list[str]:
    return [turn.message.content or "calls" for turn in trajectory.turns]


def contexts(episode: Episode) -> list[tuple[int, ...]]:
    """The tokens before each turn according to its trajectory, sorted, because concurrent agents have no fixed order."""
    token_sequences = []
    for trajectory in episode.trajectories:
        context: tuple[int, ...] = ()
        for turn in trajectory.turns:
            context += turn.prompt_ids
            token_sequences.append(context)
            context += turn.completion_ids
    return sorted(token_sequences)
