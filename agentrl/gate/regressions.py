"""The cases that a version fails and its baseline passed, with the first turn in which their episodes differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.base.files import read_json_lines
from agentrl.evaluation import results
from agentrl.evaluation.comparison import Scores, pair_scores
from agentrl.evaluation.engine import SuiteAttempt
from agentrl.evaluation.results import SuiteResults, attempt_passes
from agentrl.gate.rule import RuleResult
from agentrl.gate.verdict import CaseRegression, evaluation_folder

_SHOWN = 3  # cases shown if only the suite as a whole got worse


def case_regressions(
    folder: Path, baseline: SuiteResults, evaluation: SuiteResults, result: RuleResult, attempts: Sequence[SuiteAttempt]
) -> tuple[CaseRegression, ...]:
    """The regressed cases of an evaluation, each with a passing episode of the baseline and a failing one.

    Args:
        folder: the run folder, which contains the baseline's episodes.
        attempts: of the evaluation, with their transcripts.
    """
    path = evaluation_folder(folder, baseline.about.version) / results.EPISODES
    before = {line["episode"]: line for line in read_json_lines(path)}
    after = {one.attempt.episode: one.transcript for one in attempts}
    names = [one.case for one in result.regressed] or _worse_cases(baseline.scores(), evaluation.scores())[:_SHOWN]
    regressions = []
    for case in names:
        passed, failed = _episode(baseline, case, passed=True), _episode(evaluation, case, passed=False)
        if passed is not None and failed is not None:
            turn = first_different_turn(before.get(passed, {}), after[failed])
            regressions.append(CaseRegression(case=case, turn=turn, before_episode=passed, episode=failed))
    return tuple(regressions)


def first_different_turn(before: dict[str, Any], after: dict[str, Any]) -> int | None:
    """The first turn, counted from 1, in which two transcripts make different calls, or else contain different text; None if equal."""
    one, other = _turns(before), _turns(after)
    for part in ("tool_calls", "content"):
        for turn in range(max(len(one), len(other))):
            if turn >= len(one) or turn >= len(other) or one[turn].get(part) != other[turn].get(part):
                return turn + 1
    return None


def _turns(transcript: dict[str, Any]) -> list[dict[str, Any]]:
    return [message for message in transcript.get("messages", ()) if message.get("role") == "assistant"]


def _worse_cases(before: Scores, after: Scores) -> list[str]:
    """The cases whose mean score fell, largest drop first."""
    drops = sorted((pair.difference, pair.case) for pair in pair_scores(before, after).pairs)
    return [case for difference, case in drops if difference < 0]


def _episode(evaluation: SuiteResults, case: str, *, passed: bool) -> str | None:
    """An attempt at the case that passed, or that did not."""
    threshold = evaluation.about.pass_threshold(case)
    scored = ((one.episode, one.score) for one in evaluation.attempts if one.case == case and one.score is not None)
    return next((episode for episode, score in scored if attempt_passes(score, threshold) is passed), None)
