"""The tool that starts sub-agents: its schema, its limits, and its result.

A sub-agent is the same policy in a separate trajectory, whose prompt contains only the sub-agent's task. The answer of the sub-agent is the
output of the call. The files of a sub-agent that has a separate sandbox may be copied to its caller, within the limits on a task's outputs
(`agentrl.task.outputs`). Rejected files are listed for the caller and recorded as a failure of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.agent.tools import ToolOutcome, function_schema
from agentrl.base.user_code import printable
from agentrl.config.rollout import DelegationConfig
from agentrl.errors import TaskError
from agentrl.protocols import LiveEpisode, LiveTrajectory
from agentrl.records import Blame, Failure, Message, Parent, Task, ToolCall
from agentrl.task.outputs import collect_outputs

NAME = "delegate"
WORKER = "worker"
"""The value of `Trajectory.agent` for every sub-agent."""

MAX_TASK_CHARS = 20_000
FOLDER = "helper-{number}"
"""The folder for a sub-agent's files. `number` is the index of its trajectory."""
MAX_LISTED = 32
"""Maximum number of copied files, and of rejected files, that the caller sees by name."""

_DESCRIPTION = "Give a task to a helper, who sees only this text and returns an answer. Helpers called together work concurrently."
_COPIES = " Each works on a copy of your files as they are now; yours do not change."
_RETURNS = " Files that it leaves as {patterns} are copied to you, into a folder that its answer names."


def delegate_schema(config: DelegationConfig) -> Mapping[str, Any]:
    """Returns the OpenAI function schema of the tool."""
    description = _DESCRIPTION
    if config.sandbox == "own":
        description += _COPIES + (_RETURNS.format(patterns=" or ".join(config.returns)) if config.returns else "")
    return function_schema(NAME, description, "task", "all that the helper needs to know")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A sub-agent that has a trajectory but has not run yet."""

    trajectory: LiveTrajectory
    prompt: Sequence[Message]


class SubAgents:
    """Opens the sub-agents of one turn, within the limits that `DelegationConfig` sets for the episode.

    Args:
        escape_text: escapes control tokens in text from one agent that becomes part of another agent's prompt (`ChatFormat.escape_text`).
    """

    def __init__(self, episode: LiveEpisode, config: DelegationConfig, *, escape_text: Callable[[str], str]) -> None:
        self._episode = episode
        self._config = config
        self._escape_text = escape_text

    def open(self, call: ToolCall, number: int, *, trajectory: LiveTrajectory, turn: int) -> Opened | str:
        """Returns the sub-agent that a call starts, or an error for the model.

        Args:
            number: the index of the call in its turn.
            trajectory: trajectory of the calling agent.
            turn: index of the calling turn.
        """
        if error := self.call_error(call):
            return error
        task = Message(role="user", content=self._escape_text(call.arguments["task"]))
        rules = (Message(role="system", content=self._config.instruction),) if self._config.instruction else ()
        parent = Parent(trajectory=trajectory.index, turn=turn, call=number)
        return Opened(trajectory=self._episode.open(WORKER, parent=parent, prompt=(*rules, task)), prompt=(*rules, task))

    def call_error(self, call: ToolCall) -> str:
        """Returns the error for a call that may not start a sub-agent; empty if it may."""
        task = call.arguments.get("task")
        if not isinstance(task, str) or not task.strip():
            return f'error: {NAME} needs {{"task": "..."}}'
        if len(task) > MAX_TASK_CHARS:
            return f"error: a task may have {MAX_TASK_CHARS} characters, not {len(task)}"
        started = sum(trajectory.parent is not None and trajectory.parent.call is not None for trajectory in self._episode.trajectories)
        if started >= self._config.total:
            return f"error: {self._config.total} helpers were started, and no more are allowed"
        return ""


def sub_agent_outcome(answer: str | None, reason: str, files: str = "") -> ToolOutcome:
    """Returns the result that the caller of a sub-agent receives: `answer`, or an error with `reason` if `answer` is None. `files` is the
    result of `hand_back`."""
    text = f"error: the helper ended without an answer ({reason})" if answer is None else answer
    return ToolOutcome(output=f"{text}\n{files}" if files else text, ok=answer is not None)


def check_name(task: Task, tools: Mapping[str, object]) -> None:
    """Raises `TaskError` if a tool of the task is named `delegate`."""
    if NAME in tools:
        message = f"task {task.id!r} has a tool called {NAME!r}, but rollout.agent=delegating adds a tool with the same name"
        raise TaskError(message, fix="rename the task's tool")


async def hand_back(patterns: Sequence[str], *, number: int, worker: LiveEpisode, caller: LiveEpisode) -> str:
    """Copies the files that match `patterns` from a sub-agent to its caller. Returns a list of the copied and the rejected files as text
    for the caller; empty if there are none, or if the sub-agent's sandbox was not opened or is lost. Records rejected files as a failure of
    the policy. Raises `SandboxError` if a sandbox fails.

    Args:
        number: the index of the sub-agent's trajectory.
        worker: the sub-agent's view of the episode, which has a separate sandbox.
        caller: the calling agent's view of the episode.
    """
    if not patterns or not worker.sandbox_opened or worker.sandbox_lost:
        return ""
    sandbox = await worker.sandbox()
    with worker.running(sandbox):
        collected = await collect_outputs(sandbox, patterns)
    refused, copied = dict(collected.refused), []
    if collected.files:
        folder, sandbox = FOLDER.format(number=number), await caller.sandbox()
        with caller.running(sandbox):
            for path, data in collected.files.items():
                try:
                    await sandbox.write(f"{folder}/{path}", data)
                except ValueError as error:  # there is no room, or another file has this path
                    refused[path] = str(error)[:200]
                else:
                    copied.append(f"{folder}/{path}")
    if refused:
        message = "; ".join(f"{path}: {reason}" for path, reason in refused.items())
        failure = Failure(stage="collect", blame=Blame.POLICY, kind="returns_refused", message=message[:2000], turn=worker.turn_count)
        caller.add_failure(failure)
    more = f", and {len(copied) - MAX_LISTED} more" if len(copied) > MAX_LISTED else ""
    lines = [f"files: {', '.join(map(_printable, copied[:MAX_LISTED]))}{more}"] if copied else []
    lines += [f"not handed back: {_printable(path)}: {_printable(reason)}" for path, reason in list(refused.items())[:MAX_LISTED]]
    return "\n".join(lines)


def _printable(text: str) -> str:
    return printable(text, 600).replace("\n", "\ufffd")
