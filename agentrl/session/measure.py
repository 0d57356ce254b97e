"""The metrics of each step of a run, computed from its groups, and of the entire run, computed from its files."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentrl.base.files import append_lines, json_line, read_json_lines, tail_bytes, write_atomically
from agentrl.base.installation import package_versions
from agentrl.base.numbers import all_equal, plural
from agentrl.base.user_code import printable
from agentrl.config.learner import Limit
from agentrl.config.recipe import EvalConfig, Recipe
from agentrl.errors import StoreError
from agentrl.evaluation.splits import SplitEvaluation
from agentrl.experience.audit import LedgerCounts
from agentrl.failure import faults, overlap
from agentrl.failure.digest import failures_by_tag
from agentrl.gate.verdict import read_verdicts
from agentrl.judge.ledger import usage_in
from agentrl.learner.driver_reports import UpdateFailureLog
from agentrl.observe import Rate, Summary
from agentrl.observe.drift import DISAGREEMENT, HISTORY, drift_alerts, limit_alerts
from agentrl.observe.exclusions import count_exclusions, exclusion_reason, format_counts, merge_counts, run_problems
from agentrl.observe.summary import read_sessions as read_sessions
from agentrl.observe.timeline import loop_latency
from agentrl.records import ADAPTER, Group, ScoredEpisode, Split, SwapReport
from agentrl.reward.scorer import AUDIT_PART

log = logging.getLogger(__name__)

EVALUATIONS_FILE = "evaluations.json"
EXCLUDED_FILE = "failures/left_out.jsonl"
MAX_PARTS = 24
"""Maximum number of score parts with metrics per step. Verifiers name the parts, so the number of parts is not bounded."""
_PART_NAME = 120  # maximum number of characters in a part's name
_ALERT_BYTES = 1 << 18  # number of bytes at the end of metrics.jsonl from which the alerts of a step are computed
_OF_ROLLOUTS = frozenset({"step_s", "tokens_per_s"})
_OF_A_RATE = ("value", "ci_low", "ci_high", "n")


def step_metrics(
    groups: Sequence[Group], version_folder: Path, report: SwapReport | None, *, step: int, wall_s: float | None
) -> dict[str, float]:
    """Returns the metrics of one learner step, including those that the learner computed.

    Metrics without data are absent: `reward_mean` if there are no scores, staleness if there are no sampled tokens.

    Args:
        version_folder: folder of the version that the step produced, with the learner's metrics in `update.json`.
        report: report of the swap; None if the version was never served.
        step: the learner's version before the update.
        wall_s: duration of the step; None if an earlier driver finished the step.
    """
    episodes = [scored for group in groups for scored in group.episodes]
    counted = [scored for group in groups for scored in group.scored]
    scores = [value for scored in counted if (value := scored.score.value) is not None and math.isfinite(value)]
    oldest = [scored.episode.oldest_version for scored in counted]
    ages = [step - number for number in oldest if number is not None]
    sampled = sum(scored.episode.completion_tokens for scored in episodes)
    metrics: dict[str, float] = {
        "episodes": len(episodes),
        "episodes_left_out": len(episodes) - len(counted),
        "episode_retries": sum(scored.episode.attempt for scored in episodes),
        "tool_failures": sum(1 for scored in episodes for failure in scored.episode.failures if failure.stage == "tool"),
        "groups_quarantined": sum(group.fault is not None for group in groups),
        "groups_without_signal": sum(all_equal(e.score.value or 0.0 for e in group.scored) for group in groups),
        "tokens_sampled": sampled,
        "sandbox_s_per_episode": statistics.fmean([e.episode.sandbox_s for e in episodes]) if episodes else 0.0,
    }
    if wall_s is not None:
        metrics |= {"step_s": wall_s, "tokens_per_s": sampled / wall_s if wall_s > 0 else 0.0}
        if report is not None:
            metrics |= loop_latency(counted, time.time())
    if scores:
        metrics["reward_mean"] = statistics.fmean(scores)
    if episodes:
        metrics["completion_tokens_mean"] = sampled / len(episodes)
    metrics |= score_part_means(counted)
    if ages:
        metrics |= {"staleness_mean": statistics.fmean(ages), "staleness_max": max(ages)}
    trajectories = [trajectory for scored in episodes for trajectory in scored.episode.trajectories]
    if ended := sum(bool(turn.forced) for trajectory in trajectories for turn in trajectory.own_turns):
        metrics["thoughts_ended"] = ended
    metrics |= cancelled_metrics(groups)
    if report is not None:
        metrics["swap_stall_ms"] = report.stall_ms
        metrics["swap_total_ms"] = report.total_ms
        metrics["swap_probe_max_abs_diff"] = report.probe_max_abs_diff
    learner = version_folder / "update.json"  # missing if the version was pruned before its step was recorded
    update = json.loads(learner.read_text()) if learner.exists() else {}
    if wall_s and isinstance(update.get("optimizer_steps"), int | float):
        metrics["updates_per_h"] = 3600 * update["optimizer_steps"] / wall_s
    # Metrics that the rollouts define are never taken from the learner, even if absent here. The learner's values stay in update.json.
    return {key: value for key, value in update.items() if isinstance(value, int | float) and key not in _OF_ROLLOUTS} | metrics


def cancelled_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Returns counts and mean lengths of cancelled attempts, and the mean duration of scored attempts; empty if no attempt was cancelled.

    The lengths are measured at the cancellation. Without the cancellation, the attempts would have been longer.
    """
    cancelled = [attempt for group in groups for attempt in group.cancelled]
    if not cancelled:
        return {}
    begun = [attempt for attempt in cancelled if attempt.begun]
    metrics = {
        "attempts_cancelled": float(len(begun)),
        "attempts_not_begun": float(len(cancelled) - len(begun)),
        "tokens_cancelled": float(sum(attempt.tokens for attempt in begun)),
        "groups_stopped": float(sum(any(attempt.reason == "equal" for attempt in group.cancelled) for group in groups)),
    }
    if begun:
        metrics["cancelled_tokens_mean"] = metrics["tokens_cancelled"] / len(begun)
        metrics["cancelled_wall_s_mean"] = statistics.fmean(attempt.wall_s for attempt in begun)
    if counted := [attempt.episode.wall_s for group in groups for attempt in group.scored]:
        metrics["counted_wall_s_mean"] = statistics.fmean(counted)
    return metrics


def score_part_means(counted: Sequence[ScoredEpisode]) -> dict[str, float]:
    """Returns the mean of each score part over the episodes that have it, as `part/NAME`, for the `MAX_PARTS` most frequent parts.

    The mean of the audit is reported as `audit_mean`, and the mean disagreement over all judge ensembles as `judge_disagreement`.
    """
    values: dict[str, list[float]] = {}
    for name, value in (item for scored in counted for item in scored.score.parts.items() if math.isfinite(item[1])):
        values.setdefault(name, []).append(value)
    metrics: dict[str, float] = {}
    if audit := values.pop(AUDIT_PART, []):
        metrics["audit_mean"] = statistics.fmean(audit)
    if apart := [value for name, scores in values.items() if name.rpartition("/")[2] == "disagreement" for value in scores]:
        metrics[DISAGREEMENT] = statistics.fmean(apart)
    names = sorted(values, key=lambda name: (-len(values[name]), name))[:MAX_PARTS]
    return metrics | {f"part/{printable(name, _PART_NAME)}": statistics.fmean(values[name]) for name in sorted(names)}


def step_alerts(folder: Path, step: int, limits: Sequence[Limit] = ()) -> list[str]:
    """Returns the alerts for a learner step, counted from 0: drift, violated `limits`, and excluded or rolled-back groups with reasons."""
    tail = tail_bytes(folder / "metrics.jsonl", most=_ALERT_BYTES).splitlines()
    lines = (json.loads(line) for line in tail if line[:1] + line[-1:] == "{}")
    steps = sorted((line for line in _last_lines(lines) if line["step"] <= step + 1), key=lambda line: line["step"])[-HISTORY:]
    recorded = bool(steps) and steps[-1]["step"] == step + 1
    alerts = [f"step {step + 1}: {text}" for text in (*drift_alerts(steps), *limit_alerts(steps, limits))] if recorded else []
    for setback in UpdateFailureLog(folder).read(step):
        groups = ", ".join(map(str, setback.groups))
        did = {"skip": "excluded", "rollback": "rolled back, and excluded", "halt": "halted at"}[setback.action]
        alerts.append(f"step {step + 1}: {did} groups {groups} ({plural(len(setback.episodes), 'episode')}): {'; '.join(setback.reasons)}")
    return alerts


def record_excluded(folder: Path, step: int, groups: Sequence[Group]) -> None:
    """Appends the ids of the excluded episodes of a step, by reason, to `failures/left_out.jsonl`. `step` is counted from 1."""
    excluded: dict[str, list[str]] = {}
    for scored in (attempt for group in groups for attempt in group.episodes):
        if reason := exclusion_reason(scored):
            excluded.setdefault(reason, []).append(scored.episode.id)
    if excluded:
        append_lines(folder / EXCLUDED_FILE, [json_line({"step": step, "left_out": excluded})])


def _left_out(folder: Path, steps: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Returns the number of episodes excluded in these steps, by reason. Only the last line of a repeated step counts."""
    by_step = {line["step"]: line["left_out"] for line in read_json_lines(folder / EXCLUDED_FILE, "step", "left_out")}
    excluded = [by_step[line["step"]] for line in steps if line.get("episodes_left_out") and line["step"] in by_step]
    return merge_counts(*({reason: len(ids) for reason, ids in reasons.items()} for reasons in excluded))


def excluded_alerts(phase: str, results: Mapping[Split, SplitEvaluation]) -> list[str]:
    """Returns the alerts for an evaluation: one per split with excluded episodes, with the reasons."""
    return [
        f"evaluation {phase}: excluded {result.excluded} of {result.episodes} episodes on {split}: {format_counts(result.excluded_reasons)}"
        for split, result in results.items()
        if result.excluded
    ]


def save_evaluation(
    folder: Path,
    phase: str,
    results: Mapping[Split, SplitEvaluation],
    bounded: Mapping[Split, Mapping[int, SplitEvaluation]] | None = None,
    *,
    of: str = "",
) -> None:
    """Adds one phase to `evaluations.json`. A split without scored episodes is recorded without a value.

    Args:
        bounded: evaluations with bounded thinking: split -> bound -> evaluation.
        of: hash of the weights and settings (`evaluation_key`).
    """
    phases = _phases(folder)
    phases[phase] = {
        str(split): {
            **_rate(result.rate),
            "of": of,
            "attempts": result.attempts,
            "tokens_mean": result.tokens_mean,
            "pass_at": {str(k): value for k, value in result.pass_at.items()},
            "compute": [{"attempts": line.attempts, "points": line.points} for line in result.compute],
            "left_out": result.excluded,
            "left_out_reasons": result.excluded_reasons,
            "by_kind": {kind: asdict(rate) for kind, rate in result.by_kind.items()},
            "thinking": [_thought(most, one) for most, one in sorted((bounded or {}).get(split, {}).items())],
        }
        for split, result in results.items()
    }
    write_atomically(folder / EVALUATIONS_FILE, json.dumps(phases, indent=2) + "\n")


def rename_evaluation(folder: Path, phase: str, to: str | None, *, of: str = "") -> None:
    """Renames an outdated phase and its transcripts. Removes the phase if `to` is None or already exists, or if its hash is not `of`."""
    phases, transcripts = _phases(folder), folder / "episodes" / f"{phase}.jsonl"
    if (result := phases.pop(phase, None)) is None:
        return
    if to is not None and to not in phases and all(rate.get("of") == of for rate in result.values()):
        phases[to] = result
        if transcripts.exists():
            transcripts.replace(transcripts.with_stem(to))
    write_atomically(folder / EVALUATIONS_FILE, json.dumps(phases, indent=2) + "\n")


def _thought(most: int, result: SplitEvaluation) -> dict[str, Any]:
    return {
        "thinking_tokens": most,
        **_rate(result.rate),
        "tokens_mean": result.tokens_mean,
        "pass_at": {str(k): value for k, value in result.pass_at.items()},
        "left_out": result.excluded,
    }


def recorded_rates(folder: Path, phase: str, *, of: str, splits: Iterable[Split]) -> dict[Split, Rate] | None:
    """Returns the recorded rates of a phase; None if a rate is absent or its hash (`evaluation_key`) is not `of`."""
    recorded, rates = _phases(folder).get(phase, {}), dict[Split, Rate]()
    for split in splits:
        result = recorded.get(str(split), {})
        if result.get("of") != of or (rate := _recorded_rate(result)) is None:
            return None
        rates[split] = rate
    return rates


def evaluation_key(config: EvalConfig, sha256: str) -> str:
    """Returns the hash of the weights and the evaluation settings, except `every`, with which an evaluation is recorded."""
    return hashlib.sha256(f"{sha256} {config.model_dump_json(exclude={'every'})}".encode()).hexdigest()


def read_evaluation(folder: Path, phase: str) -> dict[str, dict[str, Any]]:
    """Returns one phase by split: value, ci_low, ci_high, n (tasks), attempts (per task), tokens_mean (per attempt), pass_at (k -> share),
    and thinking (a list with such values for each bound). Raises `KeyError` if the phase, or a split's mean score, is not recorded."""
    names = ("value", "ci_low", "ci_high", "n", "attempts", "tokens_mean", "pass_at")
    return {
        split: {name: result[name] for name in names} | {"thinking": result.get("thinking", [])}  # absent in older evaluations
        for split, result in _phases(folder)[phase].items()
    }


def summarize(
    folder: Path,
    recipe: Recipe,
    wall_s: Mapping[str, float],
    *,
    backend: str,
    interrupted: bool,
    begun: Sequence[Group] = (),
    ledger: LedgerCounts | None = None,
) -> Summary:
    """Returns the summary of a run folder, finished or not.

    Args:
        wall_s: seconds that each stage took in this session; those of earlier sessions are added.
        begun: the stored groups of unfinished steps.
        ledger: the counts from the run's ledger; None if the ledger cannot be read.
    """
    phases = _phases(folder)
    steps = _steps(folder)
    earlier = Summary.read(folder).wall_s if (folder / "summary.json").exists() else {}

    def total(name: str) -> int:
        return int(sum(line.get(name) or 0 for line in steps))

    early = [attempt for group in begun for attempt in group.episodes]
    left_out = merge_counts(_left_out(folder, steps), count_exclusions(early))
    sessions = read_sessions(folder)
    broken = tuple(f"the run ended early: {session.why}" for session in sessions[-1:] if session.ended == "failed")
    finished = (recipe.steps is None or len(steps) >= recipe.steps) and "after" in phases
    refused = gate_problems(folder, finished=finished) if recipe.gate is not None else ()
    return Summary(
        name=recipe.name,
        finished=finished,
        interrupted=interrupted or bool(broken),
        sessions=sessions,
        problems=(*broken, *run_problems(steps, left_out, phases), *refused),
        **_held_out_rates(phases),
        steps=len(steps),
        episodes=total("episodes") + len(early),
        episodes_left_out=total("episodes_left_out") + sum(exclusion_reason(attempt) != "" for attempt in early),
        attempts_failed=total("attempts_failed") + sum(session.attempts_failed for session in sessions),
        left_out_reasons=left_out,
        failures=failures_by_tag(folder),
        **{name: total(name) for name in ("attempts_cancelled", "attempts_not_begun", "groups_stopped", "tokens_trained")},
        tasks_quarantined=faults.count_quarantined(folder),
        tasks_withheld=overlap.count_withheld(folder),
        judges=judge_costs(folder),
        tokens={} if ledger is None else ledger.tokens,
        delivered_share=total("tokens_delivered") / captured if (captured := total("tokens_captured")) else None,
        **_update_failures(folder),
        **_swap_figures(steps),
        wall_s={name: earlier.get(name, 0.0) + wall_s.get(name, 0.0) for name in {**earlier, **wall_s}},
        sandbox_backend=backend,
        seed=recipe.seed,
        versions=package_versions(),
        by_kind={phase: _kinds(phases[phase]) for phase in ("before", "after") if phase in phases},
    )


def _held_out_rates(phases: Mapping[str, Any]) -> dict[str, Rate | None]:
    rates: dict[str, Rate | None] = {}
    for split in (Split.HELDOUT, Split.HELDOUT_REAL):
        for phase in ("before", "after"):
            rates[f"{split}_{phase}"] = _recorded_rate(phases.get(phase, {}).get(str(split), {}))
    return rates


def _phases(folder: Path) -> dict[str, Any]:
    """Returns the evaluations of a run by phase and split; empty if the run has no evaluation yet. Raises `StoreError` if the file is
    damaged."""
    path = folder / EVALUATIONS_FILE
    try:
        return dict(json.loads(path.read_text())) if path.exists() else {}
    except (ValueError, TypeError, RecursionError) as error:
        raise StoreError(f"{path} is damaged: {str(error)[:200]}\n  fix: restore the file from a copy") from error


def _swap_figures(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    stalls, probes = ([line[name] for line in steps if line.get(name) is not None] for name in ("swap_stall_ms", "swap_probe_max_abs_diff"))
    median = statistics.median(stalls) if stalls else None
    return {"weight_swaps": len(stalls), "swap_stall_ms_p50": median, "swap_probe_max_abs_diff": max(probes, default=None)}


def _update_failures(folder: Path) -> dict[str, int]:
    failures = UpdateFailureLog(folder).read()
    return {
        "updates_left_out": sum(failure.what in ("policy", "critic") for failure in failures),
        "groups_left_out": sum(failure.what == "group" for failure in failures),
        "rollbacks": sum(failure.action == "rollback" for failure in failures),
    }


def judge_costs(folder: Path) -> dict[str, float]:
    """Returns the usage and costs of the run's judges; empty if there are none. If the judges' ledger is unreadable, logs this and returns
    {}."""
    try:
        spent = usage_in(folder)
    except StoreError as error:
        log.warning("the costs of the judges are unknown: %s", error)
        return {}
    return {} if spent is None else asdict(spent)


def _steps(folder: Path) -> list[dict[str, Any]]:
    return _last_lines(read_json_lines(folder / "metrics.jsonl", "step"))


def _last_lines(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the last line that `metrics.jsonl` contains for each step. A step that a resumed run repeated is returned once."""
    return list({line["step"]: line for line in lines if "episodes" in line}.values())


def recorded_steps(folder: Path) -> frozenset[int]:
    """Returns the steps with a line in `metrics.jsonl`."""
    return frozenset(line["step"] for line in _steps(folder))


def gate_problems(folder: Path, *, finished: bool) -> tuple[str, ...]:
    """Returns the reason why a finished run has no result if its gate promoted at most the base policy; empty otherwise."""
    verdicts = read_verdicts(folder)
    base = {verdict.sha256 for verdict in verdicts if verdict.version == 0}
    promoted = (verdict for verdict in verdicts if verdict.promoted and verdict.sha256 not in base)
    if not finished or any(not is_zero_version(folder, verdict.version) for verdict in promoted):
        return ()
    last = verdicts[-1].reason if verdicts else "no version was evaluated"
    return (f"the gate promoted no version after the first, so the run has no model; last verdict: {last}",)


def is_zero_version(folder: Path, version: int) -> bool:
    """Whether a version is an adapter that does not change the base policy. The hash of such an adapter differs from that of the base
    version."""
    adapter = folder / "versions" / f"{version:06d}" / ADAPTER
    if not adapter.is_file():
        return False
    from agentrl.version import adapters

    return adapters.is_zero_adapter(adapter)


def weights_changed(folder: Path) -> bool:
    """Whether any step so far changed the policy's weights."""
    return any(line.get("weights_changed") for line in _steps(folder))


def _kinds(splits: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rates of the generated held-out tasks by kind. The real tasks, whose kinds may have the same names, are not included."""
    kinds: dict[str, Any] = splits.get(str(Split.HELDOUT), {}).get("by_kind", {})
    return kinds


def _rate(rate: Rate | None) -> dict[str, float]:
    return {} if rate is None else asdict(rate)


def _recorded_rate(result: Mapping[str, Any]) -> Rate | None:
    """Returns the rate in a recorded result; None if no episode was scored."""
    return Rate(**{name: result[name] for name in _OF_A_RATE}) if "value" in result else None
