"""Determines the reasons why episodes are excluded from all means, and why a run, step or evaluation has no result."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentrl.base.numbers import plural
from agentrl.records import Blame, ScoredEpisode

LONGEST = 240
"""Maximum number of characters in one reason."""
MOST = 20
"""Maximum number of reasons that are counted separately. If there are more, the rarest are counted together."""
OTHERS = "other reasons"
REACHABLE = " (policy-reachable)"
"""Suffix of a reason that the policy may have provoked (`Failure.policy_reachable`)."""

# The parts of a reason that differ between episodes: addresses, hashes, and names such as g000012-3-a0 or agentrl-1f3c.
_NAMES = re.compile(r"0x[0-9a-f]+|\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b|\b(?=\w{0,63}-)(?=[\w-]{0,63}\d)[\w-]{6,64}\b")

# Metric in which the learner counts groups without a sample (`agentrl.objective.samples.assemble`) -> the reason.
_NO_SAMPLE = {
    "groups_all_equal": "all attempts have equal scores, so there is no learning signal",
    "groups_too_few": "fewer than two attempts were scored",
    "groups_broken_task": "the task is broken (quarantine.jsonl)",
    "groups_no_sampled_token": "no attempt sampled a token",
    "groups_too_long": "an attempt is longer than policy.max_model_len",
    "groups_no_prompt": "an attempt has no prompt",
    "groups_non_finite_score": "a score is not finite",
    "groups_non_finite_logprob": "a logprob is not finite",
    "groups_non_finite_advantage": "an advantage is not finite",
}


def printable_text(text: str) -> str:
    """Returns the string with U+FFFD in place of each unprintable character other than a newline, such as the escape character."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def exclusion_reason(scored: ScoredEpisode) -> str:
    """Returns the reason why an episode is excluded, as one normalized line; empty if the episode is not excluded.

    The reason ends with `REACHABLE` if the policy may have provoked the exclusion.
    """
    failure = next((failure for failure in reversed(scored.episode.failures) if failure.blame is not Blame.POLICY), None)
    if failure is not None:
        text = f"{failure.blame}: {failure.kind}: {failure.message}"
        return _reachable(text) if failure.policy_reachable else normalize_reason(text)
    if scored.score.pending:
        return "waits for late scores"
    return "" if scored.score.value is not None else _reachable(scored.score.reason)


def _reachable(text: str) -> str:
    return normalize_reason(text, most=LONGEST - len(REACHABLE)) + REACHABLE


def normalize_reason(text: str, *, most: int = LONGEST) -> str:
    """Normalizes a reason for counting: one printable line of at most `most` characters, with `*` in place of episode and sandbox names."""
    line = _NAMES.sub("*", printable_text(" ".join(text[: 4 * LONGEST].split())))
    return line if len(line) <= most else f"{line[: most - 3]}..."


def count_exclusions(episodes: Iterable[ScoredEpisode]) -> dict[str, int]:
    """Returns a mapping reason -> number of excluded episodes, reduced and ordered as by `most_frequent`."""
    return most_frequent(Counter(reason for scored in episodes if (reason := exclusion_reason(scored))))


def most_frequent(counts: Mapping[str, int]) -> dict[str, int]:
    """Returns the counts of the `MOST` most frequent reasons, the most frequent first.

    The other reasons are counted together as `OTHERS`.
    """
    ordered = sorted((item for item in counts.items() if item[0] != OTHERS), key=lambda item: (-item[1], item[0]))
    rest = sum(count for _, count in ordered[MOST:]) + counts.get(OTHERS, 0)
    return dict(ordered[:MOST]) | ({OTHERS: rest} if rest else {})


def merge_counts(*several: Mapping[str, int]) -> dict[str, int]:
    """Returns the sum of several mappings reason -> count, reduced to the `MOST` most frequent reasons."""
    total: Counter[str] = Counter()
    for counts in several:
        total.update(counts)
    return most_frequent(total)


def format_counts(counts: Mapping[str, int], *, first: int = 3) -> str:
    """Returns the `first` most frequent reasons with their counts, in one line."""
    shown = list(most_frequent(counts).items())
    text = "; ".join(f"{count} x {reason}" for reason, count in shown[:first])
    return f"{text}; and {sum(count for _, count in shown[first:])} for other reasons" if len(shown) > first else text


def run_problems(lines: Sequence[Mapping[str, Any]], left_out: Mapping[str, int], phases: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the reasons why a run has no result, one sentence each; empty if the run has a result.

    Args:
        lines: the lines of `metrics.jsonl`, one for each finished step.
        left_out: reason -> number of episodes excluded in those steps.
        phases: the content of `evaluations.json`.
    """
    problems = [problem] if (problem := why_nothing_learned(lines, left_out)) else []
    delivered, captured = _sum(lines, "tokens_delivered"), _sum(lines, "tokens_captured")
    if delivered != captured:
        problems.append(f"the learner received {delivered:,} of {captured:,} sampled tokens; each must be trained exactly once")
    for phase, splits in phases.items():
        for name, split in splits.items():
            if "value" not in split:
                why = format_counts(split.get("left_out_reasons", {}))
                problems.append(f"evaluation {phase}: none of {split['left_out']} episodes on {name} tasks was scored ({why})")
    return tuple(problems)


def why_nothing_learned(lines: Sequence[Mapping[str, Any]], left_out: Mapping[str, int]) -> str:
    """Returns the reason why no step changed the weights; empty if a step changed them or if there are no steps."""
    if not lines or any(line.get("weights_changed") for line in lines):
        return ""
    steps = plural(len(lines), "step")
    episodes, excluded = _sum(lines, "episodes"), _sum(lines, "episodes_left_out")
    if episodes and excluded == episodes:
        why = format_counts(left_out)
        return f"nothing was scored: all {episodes} episodes of {steps} were excluded{f' ({why})' if why else ''}"
    if not _sum(lines, "tokens_trained"):
        why = "; ".join(f"{plural(count, 'group')}: {reason}" for key, reason in _NO_SAMPLE.items() if (count := _sum(lines, key)))
        rewards = [line["reward_mean"] for line in lines if isinstance(line.get("reward_mean"), int | float)]
        mean = f"; mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
        return f"nothing was learned: no token was trained in {steps} ({why or 'no group produced a sample'}{mean})"
    if skipped := _sum(lines, "updates_left_out"):
        return f"nothing was learned: all {skipped} updates of {steps} were skipped; failures/updates.jsonl lists the reasons"
    return f"nothing was learned: {steps} did not update the policy"


def _sum(lines: Sequence[Mapping[str, Any]], key: str) -> int:
    return int(sum(line.get(key) or 0 for line in lines))
