"""The tool that starts sub-agents: what the model is told of it, how many may be started, and what comes back.

A sub-agent is the same policy in a trajectory of its own, told nothing but its task. Its answer is the output of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.agent.tools import ToolOutcome, function_schema
from agentrl.config.rollout import DelegationConfig
from agentrl.errors import TaskError
from agentrl.protocols import LiveEpisode, LiveTrajectory
from agentrl.records import Message, Parent, Task, ToolCall

NAME = "delegate"
WORKER = "worker"
"""`Trajectory.agent` of every sub-agent."""

MAX_TASK_CHARS = 20_000
"""Characters of what a sub-agent may be told."""

_TOLD = "Give a task to a helper, who sees only what you write here and returns an answer. Helpers called together work at the same time."
_COPIES = " Each works on a copy of your files, as they are now, and changes none of yours."
_RETURNS = " Files that it leaves as {patterns} come back to you, in a folder that its answer names."


def delegate_schema(config: DelegationConfig) -> Mapping[str, Any]:
    """What an agent is told of the tool, as an OpenAI function schema."""
    told = _TOLD
    if config.sandbox == "own":
        told += _COPIES + (_RETURNS.format(patterns=" or ".join(config.returns)) if config.returns else "")
    return function_schema(NAME, told, "task", "all that the helper needs to know")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A sub-agent that has a trajectory, and has not spoken yet."""

    line: LiveTrajectory
    prompt: Sequence[Message]


class SubAgents:
    """Opens the sub-agents of one turn, within what `DelegationConfig` allows in the whole episode.

    Args:
        defang: breaks up control tokens in the words of one model that another's prompt will hold (`ChatFormat.defang`).
    """

    def __init__(self, episode: LiveEpisode, config: DelegationConfig, *, defang: Callable[[str], str]) -> None:
        self._episode = episode
        self._config = config
        self._defang = defang

    def open(self, call: ToolCall, number: int, *, line: LiveTrajectory, turn: int, place: int) -> Opened | str:
        """The sub-agent that a call starts, or what the model is told where it starts none.

        Args:
            number: of the call in its turn.
            line: the trajectory of the agent that calls, and `turn` the number of its turn.
            place: how many sub-agents are called beside it before.
        """
        if refused := self.refused(call, place):
            return refused
        told = Message(role="user", content=self._defang(call.arguments["task"]))
        rules = (Message(role="system", content=self._config.instruction),) if self._config.instruction else ()
        opened = self._episode.open(WORKER, parent=Parent(trajectory=line.index, turn=turn, call=number), prompt=(*rules, told))
        return Opened(line=opened, prompt=(*rules, told))

    def refused(self, call: ToolCall, place: int) -> str:
        """What the model is told of a call that starts none; empty: it may."""
        task = call.arguments.get("task")
        if not isinstance(task, str) or not task.strip():
            return f'error: {NAME} needs {{"task": "..."}}'
        if len(task) > MAX_TASK_CHARS:
            return f"error: a task may have {MAX_TASK_CHARS} characters, not {len(task)}"
        if place >= self._config.width:
            return f"error: at most {self._config.width} helpers work at the same time; this one was not started"
        if self._begun() >= self._config.total:
            return f"error: {self._config.total} helpers were started, and no more may be"
        return ""

    def _begun(self) -> int:
        """Sub-agents that the episode has had, in earlier runs of it too."""
        return sum(one.parent is not None and one.parent.call is not None for one in self._episode.trajectories)


def reported(answer: str | None, reason: str, files: str = "") -> ToolOutcome:
    """What the caller is shown of a sub-agent that has ended. `files`: what came back from its sandbox, and what did not."""
    shown = f"error: the helper ended without an answer ({reason})" if answer is None else answer
    return ToolOutcome(output=f"{shown}\n{files}" if files else shown, ok=answer is not None)


def check_name(task: Task, tools: Mapping[str, object]) -> None:
    """Raises `TaskError` where a tool of the task has the name of ours."""
    if NAME in tools:
        raise TaskError(f"task {task.id!r} has a tool called {NAME!r}, as has rollout.agent=delegating", fix="give the task's another name")
