"""The JSON for one episode (the tree of its trajectories, with turns, tool calls, files and evidence) and for the tokens of a turn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agentrl.base.numbers import finite
from agentrl.experience.episode_rows import outcome
from agentrl.experience.token_records import TokenRecord
from agentrl.records import Episode, Group, Message, Sample, ScoredEpisode, Trajectory, Turn
from agentrl.view.group_data import Data, failures_data, question_of, score_data
from agentrl.view.source import Missing, RunSource
from agentrl.view.training import GroupTraining, explain, recorded_tokens, sample_of, train_group
from agentrl.view.vocabulary import Vocabulary

MAX_TURNS = 200
"""Maximum number of turns in one response, over all trajectories."""
MAX_TOKENS = 2000
"""Maximum number of tokens in one response."""
_TEXT = 40_000  # maximum number of characters in one string
_ALL_TEXT = 2_000_000  # maximum number of characters in one response
_FILES = 64
_FILE_CHARS = 8000
_PROMPT_TOKENS = 4000  # maximum number of tokens of a prompt that are decoded


def episode_data(source: RunSource, index: int, attempt: int, *, offset: int = 0) -> Data:
    """Returns an episode with at most `MAX_TURNS` turns, starting at number `offset`. Raises `Missing` if the run, the group or the attempt
    does not exist, and `StoreError` if the store cannot be read."""
    notes = source.refresh()
    group, scored = _scored(source, index, attempt)
    entry = source.store().entry(index)
    assert entry is not None, "the group was read"
    training = train_group(source, entry, group)
    vocabulary, why = source.vocabulary()
    episode, budget = scored.episode, Budget(_ALL_TEXT)
    samples = [sample_of(training, episode.id, trajectory, episode.trajectories) for trajectory in episode.trajectories]
    reason = entry.use.reason if entry.use is not None else training.reason
    return {
        "run": source.id,
        "group": index,
        "attempt": attempt,
        "attempts": len(group.episodes),
        "step": None if entry.step is None else entry.step + 1,
        "state": entry.state,
        "reason": explain(reason)[:400] if reason else "",
        "task": group.task_id[:400],
        "kind": source.tasks.kind(max(index, -1 - index)),
        "group_scores": [finite(episode.score.value) for episode in group.episodes],
        "advantage": finite(training.advantages[attempt]),
        "trajectories": episode_tree(episode, budget, vocabulary, samples=samples, offset=offset),
        "turns": sum(len(trajectory.turns) for trajectory in episode.trajectories),
        "offset": offset,
        **_facts(group, scored, budget),
        "notes": [*notes, *training.notes, *([why] if vocabulary is None else [])],
    }


def evaluated_data(source: RunSource, episode_id: str) -> Data:
    """Returns an episode from an evaluation, with its first `MAX_TURNS` turns. Such an episode is never used for training. Raises `Missing`
    if the run or the episode does not exist, `UserError` if the run has no index, and `StoreError` if the store cannot be read."""
    notes = source.refresh()
    record = source.index().episode(episode_id)
    if record is None:
        raise Missing("there is no such episode, or a later evaluation replaced it", fix="return to the list of episodes")
    scored, budget = record.scored, Budget(_ALL_TEXT)
    vocabulary, _ = source.vocabulary()
    return {
        "run": source.id,
        "step": record.row.step,
        "phase": record.row.phase,
        "question": question_of(source, record.group)[:_TEXT],
        "task": record.group.task_id[:400],
        "kind": record.row.kind,
        "reason": f"This episode belongs to the evaluation {record.row.phase}, so it is not trained on.",
        "advantage": None,
        "trajectories": episode_tree(scored.episode, budget, vocabulary),
        "turns": sum(len(trajectory.turns) for trajectory in scored.episode.trajectories),
        "offset": 0,
        **_facts(record.group, scored, budget),
        "notes": notes,
    }


def episode_tree(
    episode: Episode, budget: Budget, vocabulary: Vocabulary | None, *, samples: Sequence[Sample | None] = (), offset: int = 0
) -> list[Data]:
    """Returns the trajectories of an episode, with at most `MAX_TURNS` turns in total, starting at number `offset`.

    Args:
        budget: limits the characters of the result.
        samples: the sample of each trajectory, or None for one that was not trained; empty if the episode is not from training.
    """
    first, trajectories = 0, []
    for number, trajectory in enumerate(episode.trajectories):
        start, end = max(0, offset - first), max(0, offset + MAX_TURNS - first)
        sample = samples[number] if samples else None
        turns = [
            _turn(turn, trajectory.turns[turn], _trained(sample, trajectory, turn), budget, vocabulary, first=turn == 0)
            for turn in range(len(trajectory.turns))[start:end]
        ]
        trajectories.append(_trajectory(number, trajectory, turns, budget))
        first += len(trajectory.turns)
    return trajectories


def tokens_data(source: RunSource, index: int, attempt: int, trajectory: int, turn: int, *, offset: int = 0) -> Data:
    """Returns the sampled and trained values of the tokens in a turn as columns: at most `MAX_TOKENS` tokens, starting at number `offset`.

    Raises `Missing` if the run, the group, the attempt or the turn does not exist, and `StoreError` if the store cannot be read.
    """
    notes = source.refresh()
    group, scored = _scored(source, index, attempt)
    if not 0 <= trajectory < len(scored.episode.trajectories) or not 0 <= turn < len(scored.episode.trajectories[trajectory].turns):
        raise Missing(f"attempt {attempt} of group {index} has no turn {trajectory}.{turn}", fix="return to the episode")
    entry = source.store().entry(index)
    assert entry is not None, "the group was read"
    line = scored.episode.trajectories[trajectory]
    shown = line.turns[turn]
    training = train_group(source, entry, group)
    sample = sample_of(training, scored.episode.id, line, scored.episode.trajectories)
    vocabulary, why = source.vocabulary()
    end = min(len(shown.completion_ids), offset + MAX_TOKENS)
    ids = shown.completion_ids[offset:end]
    trained = entry.use is not None and entry.use.tokens_trained > 0
    step = entry.step + 1 if entry.step is not None and trained else None
    record, unknown = recorded_tokens(source, step, training, sample)
    return {
        "run": source.id,
        "group": index,
        "attempt": attempt,
        "trajectory": trajectory,
        "turn": turn,
        "agent": line.agent[:100],
        "turns": len(line.turns),
        "step": None if entry.step is None else entry.step + 1,
        "state": entry.state,
        "trained": trained and sample is not None,
        "why_not": _why_not(training, sample, entry.use.reason if entry.use is not None else "", consumed=entry.use is not None),
        "offset": offset,
        "total": len(shown.completion_ids),
        "ids": list(ids),
        "texts": None if vocabulary is None else vocabulary.texts(ids),
        "special": [] if vocabulary is None else [position for position, token in enumerate(ids) if token in vocabulary.special],
        "logprobs": [finite(value) for value in shown.logprobs[offset:end]],
        "versions": _versions(shown, offset, end),
        "supports": None if shown.supports is None else [len(row) for row in shown.supports.rows[offset:end]],
        "forced": [number - offset for number in shown.forced if offset <= number < end],
        **_columns(sample, line, turn, offset, end),
        **_learned(record, sample, line, turn, offset, end),
        "prompt": _prompt(shown, vocabulary),
        "finish": shown.finish_reason,
        "notes": [*notes, *training.notes, *([unknown] if unknown else []), *([why] if vocabulary is None else [])],
    }


class Budget:
    """The number of characters that may still be added to one response."""

    def __init__(self, left: int) -> None:
        self.left = left

    def cut(self, text: str) -> Data:
        """Returns the start of a string, at most 40,000 characters, and the number of characters that were cut off. Reduces the budget."""
        shown = text[: max(0, min(_TEXT, self.left))]
        self.left -= len(shown)
        return {"text": shown, "cut": len(text) - len(shown)}


def _scored(source: RunSource, index: int, attempt: int) -> tuple[Group, ScoredEpisode]:
    group = source.group(index)
    if not 0 <= attempt < len(group.episodes):
        raise Missing(f"group {index} has no attempt {attempt}: it has {len(group.episodes)} attempts", fix="return to the group")
    return group, group.episodes[attempt]


def _facts(group: Group, scored: ScoredEpisode, budget: Budget) -> Data:
    """Returns the outcome of an episode: score, failures, answer, files, notes and timings."""
    episode = scored.episode
    return {
        "episode": episode.id[:200],
        "score": score_data(scored, chars=_TEXT),
        "outcome": outcome(scored, group.pass_threshold),
        "excluded": episode.left_out,
        "failures": failures_data(scored, chars=4000),
        "stop": episode.stop_reason,
        "answer": None if episode.answer is None else budget.cut(episode.answer),
        "wall_s": finite(episode.wall_s),
        "sandbox_s": finite(episode.sandbox_s),
        "tokens": episode.completion_tokens,
        "retries": episode.attempt,
        "files": _files(episode, budget),
        "more_files": max(0, len(episode.outputs) - _FILES),
        "removed": [path[:300] for path in episode.removed[:200]],
        "memory": _memory(episode, budget),
    }


def _trajectory(number: int, trajectory: Trajectory, turns: list[Data], budget: Budget) -> Data:
    parent = trajectory.parent
    return {
        "trajectory": number,
        "agent": trajectory.agent[:100],
        "parent": None if parent is None else {"trajectory": parent.trajectory, "turn": parent.turn, "call": parent.call},
        "stop": trajectory.stop_reason[:60],
        "inherited": len(trajectory.inherited),
        "prompt": [_message(message, budget) for message in trajectory.prompt[:50]],
        "turns": turns,
        "count": len(trajectory.turns),
    }


def _message(message: Message, budget: Budget) -> Data:
    return {"role": message.role[:40], "content": budget.cut(message.content)}


def _turn(number: int, turn: Turn, trained: Data, budget: Budget, vocabulary: Vocabulary | None, *, first: bool) -> Data:
    calls = [{"name": call.name[:200], "arguments": _arguments(call.arguments, budget)} for call in turn.message.tool_calls[:64]]
    results = [
        {"name": result.name[:200], "output": budget.cut(result.output), "ok": result.ok, "wall_s": finite(result.wall_s)}
        | {"reward": None if result.reward is None else finite(result.reward)}
        for result in turn.tool_results[:64]
    ]
    rewards = [result.reward for result in turn.tool_results if result.reward is not None]
    prompt = budget.cut(vocabulary.decode(turn.prompt_ids[:_PROMPT_TOKENS])) if vocabulary is not None and first else None
    return {
        "turn": number,
        "content": budget.cut(turn.message.content),
        "calls": calls,
        "results": results,
        "reward": finite(sum(rewards)) if rewards else None,
        "prompt": prompt,
        "prompt_tokens": len(turn.prompt_ids),
        "tokens": len(turn.completion_ids),
        "forced": len(turn.forced),
        "finish": turn.finish_reason[:40],
        "versions": [{"version": span.version, "start": span.start, "end": span.end} for span in turn.versions[:100]],
        "generate_s": finite(turn.generate_s),
        "tool_s": finite(turn.tool_s),
        "ended_at": finite(turn.ended_at) or None,
        "logprob_mean": finite(sum(turn.logprobs) / len(turn.logprobs)) if turn.logprobs else None,
        **trained,
    }


def _arguments(arguments: Any, budget: Budget) -> list[Data]:
    """Returns the arguments of a call in order. Strings are unchanged, and other values are formatted as JSON."""
    rows = []
    for name, value in list(arguments.items())[:64]:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        rows.append({"name": str(name)[:200], "value": budget.cut(text), "is_text": isinstance(value, str)})
    return rows


def _trained(sample: Sample | None, trajectory: Trajectory, turn: int) -> Data:
    """Returns the number of trained tokens in a turn, and the advantage of the first of them (None if there is none)."""
    if sample is None:
        return {"trained_tokens": None, "advantage": None}
    start, end = _bounds(trajectory, turn)
    mask = sample.loss_mask[start:end]
    values = [value for value, on in zip(sample.advantages[start:end], mask, strict=True) if on] if sample.advantages else []
    return {"trained_tokens": sum(mask), "advantage": finite(values[0]) if values else None}


def _bounds(trajectory: Trajectory, turn: int) -> tuple[int, int]:
    """Returns the start and end of a turn's completion as indices into the tokens of its trajectory."""
    start = sum(len(earlier.prompt_ids) + len(earlier.completion_ids) for earlier in trajectory.turns[:turn]) + len(
        trajectory.turns[turn].prompt_ids
    )
    return start, start + len(trajectory.turns[turn].completion_ids)


def _columns(sample: Sample | None, trajectory: Trajectory, turn: int, offset: int, end: int) -> Data:
    if sample is None:
        return {"mask": None, "advantages": None, "rewards": None}
    start, _ = _bounds(trajectory, turn)
    cut = slice(start + offset, start + end)
    return {
        "mask": [int(on) for on in sample.loss_mask[cut]],
        "advantages": [finite(value) for value in sample.advantages[cut]] if sample.advantages else None,
        "rewards": [finite(value) for value in sample.rewards[cut]] if sample.rewards else None,
    }


def _learned(record: TokenRecord | None, sample: Sample | None, trajectory: Trajectory, turn: int, offset: int, end: int) -> Data:
    """Returns the values that the learner computed for the tokens. The value of a masked token is None. A column is None if its values were
    not recorded."""
    names = {"new_logprobs": "logprobs", "entropies": "entropies", "weights": "weights", "clipped": "clipped"}
    if record is None or sample is None:
        return dict.fromkeys(names)
    start, _ = _bounds(trajectory, turn)
    first = sum(sample.loss_mask[: start + offset])
    columns: Data = {}
    for name, field in names.items():
        values = iter(getattr(record, field)[first:])
        columns[name] = [_number(next(values)) if on else None for on in sample.loss_mask[start + offset : start + end]]
    return columns


def _number(value: float | bool) -> float | bool | None:
    return value if isinstance(value, bool) else finite(value)


def _why_not(training: GroupTraining, sample: Sample | None, reason: str, *, consumed: bool) -> str:
    """Returns the reason why the tokens of a turn were not trained; empty if they were trained or the reason is unknown."""
    if reason:
        return explain(reason)
    if training.reason:
        return explain(training.reason)
    if not consumed:
        return "No step has trained this group yet."
    return "The attempt does not count: it is excluded or has no score." if sample is None and not training.notes else ""


def _versions(turn: Turn, offset: int, end: int) -> list[Data]:
    spans = [(span.version, max(span.start, offset), min(span.end, end)) for span in turn.versions]
    return [{"version": version, "start": start - offset, "end": stop - offset} for version, start, stop in spans if start < stop]


def _prompt(turn: Turn, vocabulary: Vocabulary | None) -> Data:
    """Describes the tokens before the completion, which the policy read but did not sample: their number, and the last of them as text."""
    ids: Sequence[int] = turn.prompt_ids[-_PROMPT_TOKENS:]
    return {"tokens": len(turn.prompt_ids), "text": None if vocabulary is None else vocabulary.decode(ids)[-_TEXT:]}


def _files(episode: Episode, budget: Budget) -> list[Data]:
    files = []
    for path, content in list(episode.outputs.items())[:_FILES]:
        is_text = b"\0" not in content[:4096]
        text = content[:_FILE_CHARS].decode("utf-8", "replace") if is_text else ""
        files.append({"path": path[:300], "bytes": len(content), "is_text": is_text, "content": budget.cut(text)})
    return files


def _memory(episode: Episode, budget: Budget) -> Data | None:
    if episode.memory is None:
        return None
    memo = episode.memory
    return {
        "scope": memo.scope[:200],
        "notes": [budget.cut(note) for note in memo.notes[:50]],
        "read": [note[:200] for note in memo.read[:100]],
    }
