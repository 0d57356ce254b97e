"""What must be said of a run, a step or an evaluation in which nothing was scored, or nothing could be learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.observe.exclusions import format_counts

Line = Mapping[str, Any]  # of metrics.jsonl

# The learner's counts of groups that gave no sample (`agentrl.objective.samples.assemble`), in words.
_NO_SAMPLE = {
    "groups_all_equal": "all attempts scored alike, so there was nothing to prefer",
    "groups_too_few": "fewer than rollout.min_group_size attempts were scored",
    "groups_broken_task": "the task is broken (quarantine.jsonl)",
    "groups_no_sampled_token": "no attempt sampled a token",
    "groups_too_long": "an attempt is longer than policy.max_model_len",
    "groups_no_prompt": "an attempt has no prompt",
    "groups_non_finite_score": "a score is not finite",
    "groups_non_finite_logprob": "a logprob is not finite",
    "groups_non_finite_advantage": "an advantage is not finite",
}


def run_problems(lines: Sequence[Line], left_out: Mapping[str, int], phases: Mapping[str, Any]) -> tuple[str, ...]:
    """What makes the outcome of a run worthless, a sentence each; empty when it scored and learned something.

    Args:
        lines: one of each finished step, as in `metrics.jsonl`.
        left_out: reason -> episodes, of those steps.
        phases: what `evaluations.json` holds.
    """
    found = [problem] if (problem := why_nothing_learned(lines, left_out)) else []
    delivered, captured = _sum(lines, "tokens_delivered"), _sum(lines, "tokens_captured")
    if delivered != captured:
        found.append(f"the learner got {delivered:,} of {captured:,} sampled tokens, and every one is to be trained once")
    for phase, splits in phases.items():
        for name, split in splits.items():
            if "value" not in split:
                why = format_counts(split.get("left_out_reasons", {}))
                found.append(f"evaluation {phase}: none of {split['left_out']} episodes on {name} tasks was scored ({why})")
    return tuple(found)


def why_nothing_learned(lines: Sequence[Line], left_out: Mapping[str, int]) -> str:
    """Why some steps changed nothing; empty when one of them did, or there was none."""
    if not lines or any(line.get("weights_changed") for line in lines):
        return ""
    steps = "1 step" if len(lines) == 1 else f"{len(lines)} steps"
    episodes, unscored = _sum(lines, "episodes"), _sum(lines, "episodes_left_out")
    if episodes and unscored == episodes:
        why = format_counts(left_out)
        return f"nothing was scored: all {episodes} episodes of {steps} were left out{f' ({why})' if why else ''}"
    if not _sum(lines, "tokens_trained"):
        why = "; ".join(f"{count} groups: {words}" for key, words in _NO_SAMPLE.items() if (count := _sum(lines, key)))
        rewards = [line["reward_mean"] for line in lines if isinstance(line.get("reward_mean"), int | float)]
        mean = f"; mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
        return f"nothing was learned: no token was trained in {steps} ({why or 'no group gave a sample'}{mean})"
    if aside := _sum(lines, "updates_left_out"):
        return f"nothing was learned: all {aside} updates of {steps} were left out, and failures/updates.jsonl says why"
    return f"nothing was learned: no update of the policy was made in {steps}"


def _sum(lines: Sequence[Line], key: str) -> int:
    return int(sum(line.get(key) or 0 for line in lines))
