"""Excluded episodes, and steps and runs without an effect. A missing score is not zero."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from agentrl.cli.train import describe
from agentrl.observe import RunTracker, Summary, write_report
from agentrl.observe.exclusions import (
    LONGEST,
    MOST,
    OTHERS,
    count_exclusions,
    exclusion_reason,
    format_counts,
    merge_counts,
    most_frequent,
    normalize_reason,
    run_problems,
    why_nothing_learned,
)
from agentrl.observe.terminal import TerminalTracker
from agentrl.observe.tracker import TensorBoard
from agentrl.records import Blame, Episode, Failure, Group, Score, ScoredEpisode

from .conftest import make_summary

EPISODE = Episode(id="g000001-0-a0", task_id="t", task_key="k", trajectories=())
TEXT = "rewards.bad:verdict: verifier returned str, not a Score"


def unscored(reason: str) -> ScoredEpisode:
    return ScoredEpisode(episode=EPISODE, score=Score(value=None, reason=reason))


def failed(blame: Blame, kind: str, message: str) -> ScoredEpisode:
    failure = Failure(stage="sandbox", blame=blame, kind=kind, message=message)
    score = Score(value=None, reason="left out") if blame is not Blame.POLICY else Score(value=0.0)
    return ScoredEpisode(episode=replace(EPISODE, failures=(failure,)), score=score)


def test_reasons_that_differ_only_in_names_are_equal() -> None:
    episodes = [
        failed(Blame.INFRASTRUCTURE, "SandboxTimeout", f"sandbox agentrl-run-{number:x}f3a: outputs were not collected in 90 s")
        for number in range(4)
    ]
    episodes += [
        unscored(TEXT),
        unscored(f"{TEXT}\n"),
        failed(Blame.POLICY, "outputs_refused", "x"),
        unscored("at 0x7f12ab in g000012-3-a0"),
    ]
    assert count_exclusions(episodes) == {
        "infrastructure: SandboxTimeout: sandbox *: outputs were not collected in 90 s": 4,
        f"{TEXT} (policy-reachable)": 2,
        "at * in * (policy-reachable)": 1,
    }
    assert format_counts(count_exclusions(episodes), first=1).startswith(
        "4 x infrastructure: SandboxTimeout"
    ) and "; and 3 for other" in format_counts(count_exclusions(episodes), first=1)


@given(st.text(max_size=2000), st.text(max_size=300))
def test_a_reason_is_one_bounded_printable_line(text: str, kind: str) -> None:
    for reason in (normalize_reason(text), exclusion_reason(failed(Blame.TASK, kind, text)), exclusion_reason(unscored(text or "x"))):
        assert len(reason) <= LONGEST and reason.isprintable() and "\n" not in reason


@given(st.lists(st.dictionaries(st.text(max_size=3), st.integers(1, 50), max_size=60), max_size=4))
def test_no_episode_is_lost_in_counting(batches: list[dict[str, int]]) -> None:
    total = merge_counts(*batches)
    assert sum(total.values()) == sum(sum(counts.values()) for counts in batches)
    assert len(total) <= MOST + 1 and most_frequent(total) == total
    values = [count for reason, count in total.items() if reason != OTHERS]
    assert values == sorted(values, reverse=True)


STEP = {"step": 1, "episodes": 8, "episodes_left_out": 0, "tokens_trained": 0.0, "weights_changed": 0.0, "updates_left_out": 0.0}


@pytest.mark.parametrize(
    ("changes", "left_out", "message"),
    [
        (
            {"episodes_left_out": 8, "groups_too_few": 2.0},
            {TEXT: 8},
            f"nothing was scored: all 8 episodes of 1 step were excluded (8 x {TEXT})",
        ),
        (
            {"groups_all_equal": 2.0, "reward_mean": 0.0},
            {},
            "nothing was learned: no token was trained in 1 step (2 groups: all attempts have equal scores, so there is no learning signal;"
            " mean reward 0.000)",
        ),
        ({"episodes_left_out": 5, "groups_too_few": 2.0}, {TEXT: 5}, "(2 groups: fewer than two attempts were scored)"),
        (
            {"tokens_trained": 90.0, "updates_left_out": 1.0},
            {},
            "all 1 updates of 1 step were skipped; failures/updates.jsonl lists the reasons",
        ),
        ({"tokens_trained": 90.0}, {}, "1 step did not update the policy"),
        ({"tokens_trained": 90.0, "weights_changed": 1.0}, {}, ""),
    ],
)
def test_why_a_step_changed_nothing(changes: dict[str, Any], left_out: dict[str, int], message: str) -> None:
    assert message in why_nothing_learned([{**STEP, **changes}], left_out) and bool(message) == bool(
        why_nothing_learned([{**STEP, **changes}], left_out)
    )


def test_lost_tokens_are_a_problem() -> None:
    lines = [{**STEP, "weights_changed": 1.0, "tokens_delivered": 900.0, "tokens_captured": captured} for captured in (900.0, 1000.0)]
    assert run_problems(lines[:1], {}, {}) == ()
    assert run_problems(lines, {}, {}) == ("the learner received 1,800 of 1,900 sampled tokens; each must be trained exactly once",)


def test_a_run_has_a_result_if_one_step_has() -> None:
    assert run_problems([STEP, {**STEP, "weights_changed": 1.0}], {}, {}) == () == run_problems([], {}, {})
    phases = {"after": {"heldout": {"left_out": 16, "left_out_reasons": {TEXT: 16}}, "heldout_real": {"value": 0.0, "left_out": 0}}}
    expected = (f"evaluation after: none of 16 episodes on heldout tasks was scored (16 x {TEXT})",)
    assert run_problems([{**STEP, "weights_changed": 1.0}], {}, phases) == expected


def test_a_step_without_a_score_has_no_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the terminal, metrics.jsonl and TensorBoard. Exclusions are reported once and early."""
    tracker = RunTracker(tmp_path, [TerminalTracker("run", steps=3), TensorBoard(tmp_path)], steps=3)
    tracker.stage("train")
    hostile = unscored("verifier raised \x1b[31mValueError")
    for step in (1, 2):
        tracker.progress(step, Group(index=step, task_id="t", task_key="k", episodes=(unscored(TEXT), hostile)))
        tracker.log(step, {**STEP, "episodes_left_out": 8.0})
    tracker.close()
    out = capsys.readouterr().out
    assert "step 1/3  reward -  weights unchanged  excluded 8" in out and "\x1b" not in out
    assert out.count(f"alert: episodes are excluded: {TEXT}") == 1
    assert out.count("alert: step 1: nothing was scored: all 8 episodes of 1 step were excluded") == 1 and "alert: step 2" not in out
    assert "reward_mean" not in (tmp_path / "metrics.jsonl").read_text()
    events = EventAccumulator(str(tmp_path / "logs" / "tensorboard"))
    events.Reload()
    assert "train/episodes" in events.Tags()["tensors"] and "train/reward_mean" not in events.Tags()["tensors"]


def test_only_the_first_reasons_are_reported_immediately(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = RunTracker(tmp_path, [TerminalTracker("run")])
    for index in range(40):
        tracker.progress(index, Group(index=index, task_id="t", task_key="k", episodes=(unscored("because of " + "x" * (index + 1)),)))
    tracker.close()
    assert capsys.readouterr().out.count("alert: episodes are excluded: because of") == 5


def test_a_run_without_a_result_reports_that(tmp_path: Path) -> None:
    problem = f"nothing was scored: all 64 episodes of 4 steps were left out (64 x {TEXT})"
    summary = make_summary().model_copy(update={"left_out_reasons": {TEXT: 64, "<b>\x1b[31m": 1}, "problems": (problem,)})
    summary.write(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**STEP, "episodes_left_out": 8}) + "\n")
    evaluations = {"before": {"heldout": {"left_out": 7, "left_out_reasons": {"infrastructure: died": 7}}}}
    (tmp_path / "evaluations.json").write_text(json.dumps(evaluations))
    assert Summary.read(tmp_path) == summary
    page = write_report(tmp_path).read_text()
    assert f"<p>{problem}</p>" in page and "finished without a result" in page and "<b>\x1b" not in page
    assert f'<td>training</td><td class="num">64</td><td>{TEXT}</td>' in page
    assert '<td>before, heldout</td><td class="num">7</td><td>infrastructure: died</td>' in page
    text = describe(summary, tmp_path)
    assert text.splitlines()[-1] == f"no result: {problem}"
    assert f"      64 excluded  {TEXT}" in text and "model  none: the weights did not change" in text
    (tmp_path / "model").mkdir()
    assert f"model  {tmp_path / 'model'}" in describe(make_summary(), tmp_path) and "no result" not in describe(make_summary(), tmp_path)
