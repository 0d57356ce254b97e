"""Data for supervised training: the token sequences of scored episodes, exactly as they were sampled.

Nothing is rendered or tokenized again. Tokens that the policy did not write (prompts, tool output) are never a target.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from agentrl.base.numbers import is_above, is_at_least
from agentrl.objective import counted_samples
from agentrl.records import Group, Sample
from agentrl.records.environment import PASS_THRESHOLD

IGNORED = -100  # the label that losses skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two attempts at one task with different scores."""

    task_key: str
    prompt_ids: tuple[int, ...]  # the shared prompt
    chosen_ids: tuple[int, ...]  # the tokens after the prompt, including tool output
    chosen_mask: tuple[bool, ...]  # True for tokens that the policy wrote
    rejected_ids: tuple[int, ...]
    rejected_mask: tuple[bool, ...]
    margin: float  # difference between the scores, above 0


def select_demonstrations(groups: Iterable[Group], *, min_score: float | None = None, per_task: int = 1) -> list[dict[str, list[int]]]:
    """Returns rows of `input_ids` and `labels` from the best episodes that score at least `min_score`, at most `per_task` per task.

    If `min_score` is None, the task's threshold is used, or 1 if the task has none.

    Among episodes with equal scores, the shortest come first. Duplicate attempts count once. Each trajectory of an episode is a separate
    row.
    """
    by_task: dict[str, list[tuple[float, int, list[Sample]]]] = defaultdict(list)
    for group in groups:
        threshold = PASS_THRESHOLD if group.pass_threshold is None else group.pass_threshold
        for score, samples in _episodes(group):
            if is_at_least(score, threshold if min_score is None else min_score):
                by_task[group.task_key].append((-score, sum(len(sample.token_ids) for sample in samples), samples))
    rows: list[dict[str, list[int]]] = []
    for attempts in by_task.values():
        attempts.sort(key=lambda attempt: attempt[:2])
        different: dict[tuple[tuple[int, ...], ...], list[Sample]] = {}
        for *_, samples in attempts:
            different.setdefault(tuple(sample.token_ids for sample in samples), samples)
        rows += [_row(sample) for samples in list(different.values())[:per_task] for sample in samples]
    return rows


def select_preferences(groups: Iterable[Group], *, margin: float = 0.5, per_task: int = 4) -> list[Preference]:
    """Returns pairs of attempts at one task whose scores differ by at least `margin`, at most `per_task` pairs per task.

    The best attempt is paired with the worst, the second best with the second worst, and so on. Only attempts with the same prompt tokens
    are paired, and only episodes with one trajectory, because it is unknown which part of a tree earned a score.
    """
    attempts: dict[tuple[str, tuple[int, ...]], list[tuple[float, Sample]]] = defaultdict(list)
    for group in groups:
        for score, samples in _episodes(group):
            if len(samples) == 1:
                prompt = samples[0].token_ids[: samples[0].loss_mask.index(True)]
                attempts[group.task_key, prompt].append((score, samples[0]))
    pairs: dict[str, list[Preference]] = defaultdict(list)
    for (key, prompt), scored in attempts.items():
        scored.sort(key=lambda attempt: -attempt[0])
        for rank in range(len(scored) // 2):
            (high, chosen), (low, rejected) = scored[rank], scored[-1 - rank]
            if is_above(high, low) and is_at_least(high - low, margin) and chosen.token_ids != rejected.token_ids:
                pairs[key].append(_pair(key, prompt, chosen, rejected, high - low))
    return [pair for of_task in pairs.values() for pair in of_task[:per_task]]


def _episodes(group: Group) -> list[tuple[float, list[Sample]]]:
    """Returns a (score, samples) pair for each counted episode."""
    samples: dict[str, list[Sample]] = defaultdict(list)
    for sample in counted_samples([group]):
        samples[sample.episode_id].append(sample)
    scores = {scored.episode.id: scored.score.value for scored in group.episodes}
    return [(score, samples[name]) for name, score in scores.items() if score is not None and name in samples]


def _row(sample: Sample) -> dict[str, list[int]]:
    labels = [token if written else IGNORED for token, written in zip(sample.token_ids, sample.loss_mask, strict=True)]
    return {"input_ids": list(sample.token_ids), "labels": labels}


def _pair(key: str, prompt: tuple[int, ...], chosen: Sample, rejected: Sample, margin: float) -> Preference:
    start = len(prompt)
    return Preference(
        task_key=key,
        prompt_ids=prompt,
        chosen_ids=chosen.token_ids[start:],
        chosen_mask=chosen.loss_mask[start:],
        rejected_ids=rejected.token_ids[start:],
        rejected_mask=rejected.loss_mask[start:],
        margin=margin,
    )
