"""Copies files of a sub-agent from its own sandbox into a folder of its caller, by patterns of the recipe.

They leave the sandbox as a task's outputs do (`agentrl.task.outputs`): regular files below the working directory, within the same
bounds. CallError files are listed for the caller and recorded as the policy's failure.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.base.user_code import printable
from agentrl.protocols import LiveEpisode
from agentrl.records import Blame, Failure
from agentrl.task.outputs import collect_outputs

FOLDER = "helper-{number}"
"""The folder for a sub-agent's files. `number` is the index of its trajectory."""
MAX_LISTED = 32
"""Files that the caller sees by name."""


async def hand_back(patterns: Sequence[str], *, number: int, worker: LiveEpisode, caller: LiveEpisode) -> str:
    """Copies the files that match `patterns`. Returns the list for the caller; empty if there are none. Raises `SandboxError`.

    Args:
        number: the index of the sub-agent's trajectory.
        worker: the sub-agent's view of the episode, with its own sandbox.
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
