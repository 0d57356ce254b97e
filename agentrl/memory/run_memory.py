"""The memory of a run: which version each group reads, the notes of evaluations, and leaked answers.

Version `v` of the memory contains the notes from all steps before step `v`, the steps that trained version `v` of the policy. A group reads
the notes in the version that its block starts from (`agentrl.experience.BlockStarts`). All of these notes are stored before the block
starts. Therefore, the notes that an attempt finds depend only on the group's index: they are the same for all attempts in a group and in a
resumed run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from agentrl.agent.memory import NOTE, RECALL
from agentrl.base import user_code
from agentrl.base.error_text import one_line_error
from agentrl.base.files import append_lines, json_line
from agentrl.config.recipe import Recipe
from agentrl.config.tools import MemoryConfig
from agentrl.errors import StoreError
from agentrl.experience import BlockStarts, DriverStore, GroupOrder
from agentrl.memory import NoteStore, StoreView, WrittenNotes, notes_to_commit
from agentrl.memory.store import NoteMatch
from agentrl.protocols import EpisodeMemory
from agentrl.records import Group, ScoredEpisode, Task, Turn
from agentrl.records.episode import Memo
from agentrl.rollout import EmptyMemory
from agentrl.task.leaks import find_leaks, hidden_truths

NOTES_FILE = "notes.sqlite"
ANSWERS_FILE = "memory_answers.jsonl"
"""File in a run folder: the episodes that were shown a note with the answer to their own task."""


class RunMemory:
    """The notes of a run's training episodes, stored in the run folder."""

    def __init__(self, config: MemoryConfig, folder: Path, experience: DriverStore, order: GroupOrder, starts: BlockStarts) -> None:
        self.config = config
        self._path = folder / NOTES_FILE
        self._experience = experience
        self._order = order
        self._starts = starts
        self._nothing = NoteStore(None, config)
        self._store: NoteStore | None = None  # opened by the first step; evaluations do not use it
        self._version = 0  # version of the store
        self._open_block = 0  # first block with groups that are not stored yet
        self._reaching = asyncio.Lock()

    async def prepare_block(self, block: int) -> None:
        """Commits the notes that the groups of a block read. Call this method when the block may start, because the experience store then
        contains the episodes that wrote the notes. Raises `StoreError` if it contains no groups of a step."""
        async with self._reaching:
            wanted = self._starts.version_of(block)
            if self._store is None:
                opened, self._version = await asyncio.to_thread(self._opened)
                self._store = opened
            store = self._store
            while self._version < wanted:
                written, oldest = await self._written(self._version), await self._oldest_read()
                await asyncio.to_thread(store.commit, self._version, written, oldest_read=oldest)
                self._version += 1

    def _opened(self) -> tuple[NoteStore, int]:
        store = NoteStore(self._path, self.config)
        return store, store.version

    def version_of(self, group: int) -> int:
        """Returns the memory version that a group reads."""
        return self._starts.version_of(self._order.block_of(group))

    def view(self, task: Task, group: int | None) -> StoreView:
        """Returns the memory for a group's attempts. If `group` is None, the memory is empty and its notes are not stored. Raises
        `TaskError` if the task has no scope, and `StoreError` if the group's version does not exist yet."""
        if group is None:
            return StoreView(store=self._nothing, scope="none", version=0, task_key=task.key)
        version = self.version_of(group)
        if self._store is None or version > self._version:
            raise StoreError(f"group {group} would read version {version} of the memory, which does not exist yet")
        return StoreView.of(self._store, task, version)

    def search(self, query: str, *, scope: str, version: int, task_key: str) -> tuple[NoteMatch, ...]:
        """Returns matching notes for a rollout worker on a different host. Raises `StoreError` if the version does not exist yet."""
        if self._store is None or version > self._version:
            raise StoreError(f"version {version} of the memory does not exist yet")
        return self._store.search(query, scope=scope, version=version, task_key=task_key)

    def close(self) -> None:
        """Closes the stores."""
        self._nothing.close()
        if self._store is not None:
            self._store.close()

    async def _written(self, step: int) -> list[WrittenNotes]:
        """Returns the notes to commit from a step's episodes: those of episodes that are scored and not excluded."""
        entries = [entry for entry in await self._experience.entries(step=step) if not entry.is_residual]
        if not entries:
            raise StoreError(f"the notes of step {step} are missing: the ledger has no groups of this step")
        groups = await self._experience.groups(entry.index for entry in entries)
        episodes = [episode for group in groups for episode in group.episodes]
        return notes_to_commit(episodes)

    async def _oldest_read(self) -> int:
        """Returns the oldest version that a group may still read. A late group reads an older version than the groups of the next block."""
        entries = await self._experience.entries(first=self._order.block(self._open_block).start)
        self._open_block = self._order.first_incomplete_block(entries, start=self._open_block)
        return self._starts.oldest_version(self._open_block)


class EvaluationNotes:
    """The notes of one evaluation on one split. A round reads the notes from earlier rounds. All notes are deleted at the end of the
    evaluation."""

    def __init__(self, config: MemoryConfig) -> None:
        self._config = config
        self._store = NoteStore(None, config)
        self._part = 0

    def rounds(self, count: int) -> list[range]:
        """Splits `count` tasks into at most `heldout_rounds` consecutive rounds."""
        parts = min(self._config.heldout_rounds, count)
        return [range(part * count // parts, (part + 1) * count // parts) for part in range(parts)]

    def view(self, task: Task, group: int | None) -> StoreView:
        """Returns the memory for a task's attempts."""
        return StoreView.of(self._store, task, self._part)

    def end_round(self, scored: Sequence[ScoredEpisode]) -> None:
        """Ends a round and commits its notes."""
        self._store.commit(self._part, notes_to_commit(scored))
        self._part += 1

    def close(self) -> None:
        """Deletes the notes."""
        self._store.close()


class ReplayedMemory:
    """The memory of a replayed episode: each call returns its recorded result, and nothing is written. Also implements `MemoryView`.

    Args:
        memo: notes of the recorded episode.
        turns: the recorded turns, whose calls are repeated.
    """

    def __init__(self, memo: Memo, turns: Sequence[Turn]) -> None:
        self.memo = memo
        pairs = (pair for turn in turns for pair in zip(turn.message.tool_calls, turn.tool_results, strict=False))
        self._left = [(call, result) for call, result in pairs if call.name in (NOTE, RECALL)]

    def begin(self, memo: Memo | None = None) -> ReplayedMemory:
        """Returns this object."""
        return self

    def note(self, text: str) -> tuple[bool, str]:
        """Returns the recorded result of adding a note."""
        return self._answer(NOTE, "text", text)

    def recall(self, query: str, own: Sequence[str] = (), most: int | None = None) -> tuple[bool, str]:
        """Returns the recorded result of a query."""
        return self._answer(RECALL, "query", query)

    def _answer(self, name: str, key: str, value: str) -> tuple[bool, str]:
        """Returns the recorded result of the first matching call that has not been replayed yet, or an error if there is no such call."""
        for number, (call, result) in enumerate(self._left):
            if call.name == name and call.arguments.get(key, "") == value:
                del self._left[number]
                return result.ok, result.output.removeprefix(f"error: {name}: ") if not result.ok else result.output
        return False, "this call was not recorded"


def open_memory(recipe: Recipe, folder: Path, experience: DriverStore, order: GroupOrder, starts: BlockStarts) -> RunMemory | None:
    """Opens and returns the memory of a run, or returns None if the recipe has no memory."""
    if recipe.memory is None:
        return None
    return RunMemory(recipe.memory, folder, experience, order, starts)


def placeholder_memory(recipe: Recipe) -> EpisodeMemory | None:
    """Returns an empty memory with the recipe's tools, for checks that have no episode; None if the recipe has no memory."""
    return None if recipe.memory is None else EmptyMemory(Memo(scope="-"))


def memory_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Returns the memory metrics of a step's counted episodes, or an empty dict if there is no memory."""
    memos = [attempt.episode.memory for group in groups for attempt in group.scored if attempt.episode.memory is not None]
    if not memos:
        return {}
    return {
        "memory_notes": sum(len(memo.notes) for memo in memos),
        "memory_readers": sum(1 for memo in memos if memo.read) / len(memos),
    }


def answer_leaks(task: Task, scored: ScoredEpisode) -> list[str]:
    """Returns how notes from other episodes showed an episode the answer to its own task, as far as text matching detects it."""
    memo = scored.episode.memory
    if memo is None or not memo.read:
        return []
    results = (tool_result for trajectory in scored.episode.trajectories for turn in trajectory.turns for tool_result in turn.tool_results)
    text = "\n".join(result.output for result in results if result.name == RECALL)
    return [f"a note {leak.how} {leak.truth.origin}" for leak in find_leaks({RECALL: text.encode()}, hidden_truths(task))]


def record_answer_leaks(folder: Path, task: Task, scored: Sequence[ScoredEpisode], *, phase: str, step: int) -> str:
    """Records which episodes were shown the answer to their task. Returns an alert if there are such episodes or the search fails;
    otherwise an empty string.
    """
    try:
        lines = [
            {"phase": phase, "step": step, "episode": attempt.episode.id, "task": task.id, "how": how}
            for attempt in scored
            if (how := answer_leaks(task, attempt))
        ]
        if lines:
            append_lines(folder / ANSWERS_FILE, map(json_line, lines))
    except Exception as error:  # the task's truth is user-supplied, and the disk may be full
        user_code.log_unexpected("searching notes for answers", error)
        return f"memory: could not check whether attempts at {task.id} were shown its answer: {one_line_error(error)}"
    if not lines:
        return ""
    return f"memory: {len(lines)} of {len(scored)} attempts at {task.id} were shown notes with its answer; see {ANSWERS_FILE}"
