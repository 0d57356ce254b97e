"""Files that a sub-agent hands back: from its own sandbox into a folder of its caller's, by patterns of the recipe.

They leave the sandbox as a task's outputs do (`agentrl.task.outputs`): regular files below the working directory, within the same
bounds. What cannot be taken, or does not go into the caller's directory, is told to the caller and recorded as the policy's failure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl.base.user_code import printable
from agentrl.protocols import LiveEpisode, Sandbox
from agentrl.records import Blame, Failure
from agentrl.task.outputs import collect_outputs

FOLDER = "helper-{number}"
"""Where a sub-agent's files come to; `number` is that of its trajectory."""
MOST_NAMED = 32
"""Files that the caller is told by name."""


async def hand_back(patterns: Sequence[str], *, number: int, worker: LiveEpisode, caller: LiveEpisode) -> str:
    """Copies the files that match `patterns`, and says what the caller is told of it; empty: there are none.

    Args:
        number: of the sub-agent's trajectory.
        worker: the episode as the sub-agent has it, with a sandbox of its own that is still sound.
        caller: the episode as the agent has it that called.

    Raises `SandboxError` when either sandbox fails.
    """
    if not patterns or not worker.sandbox_opened or worker.sandbox_lost:
        return ""
    sandbox = await worker.sandbox()
    with worker.running(sandbox):
        collected = await collect_outputs(sandbox, patterns)
    refused = dict(collected.refused)
    taken: list[str] = []
    if collected.files:
        sandbox = await caller.sandbox()
        with caller.running(sandbox):
            taken = await _write(sandbox, FOLDER.format(number=number), collected.files, refused)
    if refused:
        message = "; ".join(f"{path}: {reason}" for path, reason in refused.items())
        failure = Failure(stage="collect", blame=Blame.POLICY, kind="returns_refused", message=message[:2000], turn=worker.turn_count)
        caller.add_failure(failure)
    return _told(taken, refused)


async def _write(sandbox: Sandbox, folder: str, files: Mapping[str, bytes], refused: dict[str, str]) -> list[str]:
    """The paths that were written; what was not is added to `refused`."""
    taken = []
    for path, data in files.items():
        try:
            await sandbox.write(f"{folder}/{path}", data)
        except ValueError as error:  # no room, or something stands in its way
            refused[path] = str(error)[:200]
        else:
            taken.append(f"{folder}/{path}")
    return taken


def _told(taken: Sequence[str], refused: Mapping[str, str]) -> str:
    lines = []
    if taken:
        more = f", and {len(taken) - MOST_NAMED} more" if len(taken) > MOST_NAMED else ""
        lines.append(f"files: {', '.join(map(_shown, taken[:MOST_NAMED]))}{more}")
    lines += [f"not handed back: {_shown(path)}: {_shown(reason)}" for path, reason in list(refused.items())[:MOST_NAMED]]
    return "\n".join(lines)


def _shown(text: str) -> str:
    """A name, or a reason, as a part of a line."""
    return printable(text, 600).replace("\n", "\ufffd")
