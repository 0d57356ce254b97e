"""The memory of a run: which version each group reads, what evaluations read, and who was shown an answer to the very task at hand.

Version `v` of the memory is what the episodes wrote from which version `v` of the policy was made: those of all steps before step `v`.
A group of step `s` may start when version `s - max_staleness` serves, and reads the notes of that version. All of them are in the
experience store by then, so that version, and with it what every attempt finds, depends on the group's index alone: it is the same
for all attempts of a group, and for those of a run that was resumed.
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
from agentrl.experience import StepGroups
from agentrl.memory import NoteStore, StoreView, WrittenNotes, notes_to_commit
from agentrl.protocols import EpisodeMemory, ExperienceStore
from agentrl.records import Group, ScoredEpisode, Task, Turn
from agentrl.records.memo import Memo
from agentrl.rollout import EmptyMemory
from agentrl.task.leaks import find_leaks, hidden_truths

NOTES_FILE = "notes.sqlite"
ANSWERS_FILE = "memory_answers.jsonl"
"""Of a run folder: the episodes that were shown a note with an answer to their own task."""


class RunMemory:
    """The notes of a run's training episodes, in its folder."""

    def __init__(self, config: MemoryConfig, folder: Path, experience: ExperienceStore, steps: StepGroups, *, max_staleness: int) -> None:
        self.config = config
        self._path = folder / NOTES_FILE
        self._experience = experience
        self._steps = steps
        self._behind = max_staleness
        self._nothing = NoteStore(None, config)
        self._store: NoteStore | None = None  # opened when a step begins: an evaluation has none
        self._version = 0  # of it
        self._reaching = asyncio.Lock()

    def version_of(self, step: int) -> int:
        """The version that the groups of a step read."""
        return max(0, step - self._behind)

    async def prepare_step(self, step: int) -> None:
        """Brings in the notes that the groups of a step read. Called once the step may begin, when they are in the experience store."""
        async with self._reaching:
            wanted = self.version_of(step)
            if self._store is None:
                self._store = await asyncio.to_thread(NoteStore, self._path, self.config, behind=self._behind)
                self._version = self._store.version
            while self._version < wanted:
                await asyncio.to_thread(self._store.commit, self._version, self._written(self._version))
                self._version += 1

    def view(self, task: Task, group: int | None) -> StoreView:
        """What the attempts of a group read. Raises `TaskError` for a task without a scope; outside of groups none is needed: nothing is
        found there, and nothing kept."""
        if group is None:
            return StoreView(store=self._nothing, scope="none", version=0, task_key=task.key)
        version = self.version_of(self._steps.step_of(group))
        if self._store is None or version > self._version:
            raise StoreError(f"group {group} would read version {version} of the memory, which is not there yet")
        return StoreView.of(self._store, task, version)

    def close(self) -> None:
        self._nothing.close()
        if self._store is not None:
            self._store.close()

    def _written(self, step: int) -> list[WrittenNotes]:
        """What the episodes of a step wrote that count. The experience store is asked on this thread, as ever: it may be anybody's."""
        indices = self._steps.consumed_indices(step, self._experience)
        if indices is None:
            raise StoreError(f"the notes of step {step} are not there: some of its groups are not in the experience store")
        episodes = [one for group in self._experience.groups(indices) for one in group.episodes]
        return notes_to_commit(episodes, min_score=self.config.min_score)


class EvaluationNotes:
    """The notes of one evaluation of one split: nothing at first, then what was written in the parts before. Gone when it ends."""

    def __init__(self, config: MemoryConfig) -> None:
        self._config = config
        self._store = NoteStore(None, config)
        self._part = 0

    def rounds(self, count: int) -> list[range]:
        """So many tasks as parts that are played one after the other; there may be fewer than `heldout_rounds`, as there are tasks."""
        parts = min(self._config.heldout_rounds, count)
        return [range(part * count // parts, (part + 1) * count // parts) for part in range(parts)]

    def view(self, task: Task, group: int | None) -> StoreView:
        return StoreView.of(self._store, task, self._part)

    def end_round(self, scored: Sequence[ScoredEpisode]) -> None:
        """Ends a part."""
        self._store.commit(self._part, notes_to_commit(scored, min_score=self._config.min_score))
        self._part += 1

    def close(self) -> None:
        self._store.close()


class ReplayedMemory:
    """The memory of an episode that is played again: each call is answered as it was, and nothing is written. Its own `MemoryView`.

    Args:
        memo: of the episode that is played again.
        turns: its turns, whose calls will be made.
    """

    def __init__(self, memo: Memo, turns: Sequence[Turn]) -> None:
        self.memo = memo
        made = (pair for turn in turns for pair in zip(turn.message.tool_calls, turn.tool_results, strict=False))
        self._left = [(call, result) for call, result in made if call.name in (NOTE, RECALL)]

    def begin(self, memo: Memo | None = None) -> ReplayedMemory:
        return self

    def note(self, text: str) -> tuple[bool, str]:
        return self._answer(NOTE, "text", text)

    def recall(self, query: str) -> tuple[bool, str]:
        return self._answer(RECALL, "query", query)

    def _answer(self, name: str, key: str, value: str) -> tuple[bool, str]:
        """What the first such call was answered that was not played yet; of one that there is not, what nobody was ever told."""
        for number, (call, result) in enumerate(self._left):
            if call.name == name and call.arguments.get(key, "") == value:
                del self._left[number]
                return result.ok, result.output.removeprefix(f"error: {name}: ") if not result.ok else result.output
        return False, "this call was not made"


def open_memory(recipe: Recipe, folder: Path, experience: ExperienceStore, steps: StepGroups) -> RunMemory | None:
    """The memory of a run; None where the recipe has none."""
    if recipe.memory is None:
        return None
    return RunMemory(recipe.memory, folder, experience, steps, max_staleness=recipe.max_staleness)


def placeholder_memory(recipe: Recipe) -> EpisodeMemory | None:
    """What tells an agent of the memory's tools before there is an episode; None where the recipe has none."""
    return None if recipe.memory is None else EmptyMemory(Memo(scope="-"))


def memory_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What a step's episodes that count did with the memory; nothing where there is none."""
    memos = [one.episode.memory for group in groups for one in group.scored if one.episode.memory is not None]
    if not memos:
        return {}
    return {
        "memory_notes": sum(len(memo.notes) for memo in memos),
        "memory_readers": sum(1 for memo in memos if memo.read) / len(memos),
    }


def answer_leaks(task: Task, scored: ScoredEpisode) -> list[str]:
    """How an episode was shown an answer to its own task in other episodes' notes, as far as the words tell; empty where it was not."""
    memo = scored.episode.memory
    if memo is None or not memo.read:
        return []
    results = (one for line in scored.episode.trajectories for turn in line.turns for one in turn.tool_results)
    text = "\n".join(result.output for result in results if result.name == RECALL)
    return [f"a note {leak.how} {leak.truth.origin}" for leak in find_leaks({RECALL: text.encode()}, hidden_truths(task))]


def record_answer_leaks(folder: Path, task: Task, scored: Sequence[ScoredEpisode], *, phase: str, step: int) -> str:
    """Writes down which episodes were shown an answer to their task; what a person is told of it, empty where none was.

    What goes wrong with looking is logged and told, and costs the run nothing else.
    """
    try:
        lines = [
            {"phase": phase, "step": step, "episode": one.episode.id, "task": task.id, "how": how}
            for one in scored
            if (how := answer_leaks(task, one))
        ]
        if lines:
            append_lines(folder / ANSWERS_FILE, map(json_line, lines))
    except Exception as error:  # a task's truth is its family's, and the disk may be full
        user_code.log_unexpected("looking for answers in notes", error)
        return f"memory: whether attempts at {task.id} were shown its answer is not known: {one_line_error(error)}"
    if not lines:
        return ""
    return f"memory: {len(lines)} of {len(scored)} attempts at {task.id} were shown words with its answer; {ANSWERS_FILE} has them"
