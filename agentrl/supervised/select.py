"""What supervised training learns from: token sequences of scored episodes, exactly as they were sampled.

Nothing is rendered or tokenized again, so these are the ids that were in the context; tokens that the policy did not write (prompts,
tool output) are never a target.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentrl.objective import counted_samples
from agentrl.records import Group, Sample

IGNORED = -100  # the label that losses skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two attempts at one task that got different scores."""

    task_key: str
    prompt_ids: tuple[int, ...]  # what both began with and neither wrote
    chosen_ids: tuple[int, ...]  # what followed, tool output included
    chosen_mask: tuple[bool, ...]  # True where the policy wrote it
    rejected_ids: tuple[int, ...]
    rejected_mask: tuple[bool, ...]
    margin: float  # difference of the scores, above 0


def demonstrations(groups: Iterable[Group], *, min_score: float = 1.0, per_task: int = 1) -> list[dict[str, list[int]]]:
    """Rows `input_ids`, `labels` of the best episodes that score at least `min_score`, at most `per_task` for each task.

    Of equal scores the shortest come first, and an attempt that was made twice counts once. Trajectories of one episode (sub-agents)
    are rows of their own.
    """
    found: dict[str, list[tuple[float, int, list[Sample]]]] = defaultdict(list)
    for group in groups:
        for score, samples in _episodes(group):
            if score >= min_score:
                found[group.task_key].append((-score, sum(len(sample.token_ids) for sample in samples), samples))
    rows = []
    for attempts in found.values():
        attempts.sort(key=lambda attempt: attempt[:2])
        for samples in _different([attempt[2] for attempt in attempts])[:per_task]:
            rows += [_row(sample) for sample in samples]
    return rows


def preferences(groups: Iterable[Group], *, margin: float = 0.5, per_task: int = 4) -> list[Preference]:
    """Pairs of attempts at one task whose scores differ, by at least `margin`; at most `per_task` for each task.

    Best with worst, second best with second worst, and so on, so that no attempt is in two pairs. Only attempts that were given the
    same prompt, token for token, are compared, and only episodes of one trajectory: which part of a tree a score belongs to is not
    known.
    """
    attempts: dict[tuple[str, tuple[int, ...]], list[tuple[float, Sample]]] = defaultdict(list)
    for group in groups:
        for score, samples in _episodes(group):
            if len(samples) == 1:
                prompt = samples[0].token_ids[: samples[0].loss_mask.index(True)]
                attempts[group.task_key, prompt].append((score, samples[0]))
    found: dict[str, list[Preference]] = defaultdict(list)
    for (key, prompt), scored in attempts.items():
        scored.sort(key=lambda attempt: -attempt[0])
        for place in range(len(scored) // 2):
            (high, chosen), (low, rejected) = scored[place], scored[-1 - place]
            if high > low and high - low >= margin and chosen.token_ids != rejected.token_ids:
                found[key].append(_pair(key, prompt, chosen, rejected, high - low))
    return [pair for pairs in found.values() for pair in pairs[:per_task]]


def _episodes(group: Group) -> list[tuple[float, list[Sample]]]:
    """Score and samples of the group's episodes that count."""
    samples: dict[str, list[Sample]] = defaultdict(list)
    for sample in counted_samples([group]):
        samples[sample.episode_id].append(sample)
    scores = {scored.episode.id: scored.score.value for scored in group.episodes}
    return [(score, samples[name]) for name, score in scores.items() if score is not None and name in samples]


def _different(attempts: Sequence[list[Sample]]) -> list[list[Sample]]:
    """Without the later of two attempts that are the same, token for token."""
    seen: set[tuple[tuple[int, ...], ...]] = set()
    kept = []
    for samples in attempts:
        tokens = tuple(sample.token_ids for sample in samples)
        if tokens not in seen:
            seen.add(tokens)
            kept.append(samples)
    return kept


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
