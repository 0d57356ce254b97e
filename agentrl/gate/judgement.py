"""The gate of a run: at the recipe's pace the served version is tried on a suite and compared with the last promoted one.

    the version serves -> its attempts at every case -> further attempts at cases that look worse -> verdict, durable -> what follows

The verdict is the moment at which a version was judged. What follows from it (promotion, or a request to the learner to go back) can
be done again and is, when the driver died in between. A version without a verdict on its very weights is judged again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from agentrl.base.files import read_json_lines
from agentrl.config.gate import GATE, GateConfig
from agentrl.errors import StoreError
from agentrl.evaluation import results
from agentrl.evaluation.comparison import Scores, pair_scores
from agentrl.evaluation.results import SuiteResults
from agentrl.evaluation.suites import (
    SuiteAttempt,
    case_repeats,
    case_thresholds,
    evaluation_info,
    evaluation_runner,
    prepare_images,
    run_cases,
    transcripts_of,
    utc_now,
)
from agentrl.failure.case import Suite
from agentrl.gate.rule import GateRule, RuleResult, apply_rule, attempt_passes, cases_to_retry
from agentrl.gate.verdict import FILE, CaseRegression, GateOutcome, GateVerdict, evaluation_folder, read_verdict, read_verdicts
from agentrl.observe import Rate
from agentrl.records import PolicyVersion, VersionState, codec
from agentrl.rollout import Admission, GroupRunner, Pace
from agentrl.serving.supervisor import version_to_serve
from agentrl.session import measure
from agentrl.session.opening import Run
from agentrl.version import rollback

_SHOWN = 3  # cases named where only the suite as a whole fell


async def gate_version(run: Run, version: PolicyVersion) -> None:
    """Judges a version that is due, unless it has been, and does what follows; also what a driver that died has left undone."""
    gate, suite = run.recipe.gate, run.suite
    assert gate is not None and suite is not None, "the checks before the start have opened it"
    verdict = verdict_for(run, version)
    if verdict is None:
        if is_refused(run, version):
            return
        verdict = await _judged(run, gate, suite, version)
    if verdict is not None:
        _follow(run, version, verdict)


def is_refused(run: Run, version: PolicyVersion) -> bool:
    """Whether a version is undone already, or about to be, so that nothing is left to judge. The last one is judged all the same."""
    last = version.number == run.recipe.steps
    return version.state is VersionState.ROLLED_BACK or (
        not last and rollback.pending_request(run.folder / "versions", run.registry) is not None
    )


def due_serving_version(run: Run) -> PolicyVersion | None:
    """The served version, where the recipe has it judged and it was not retracted."""
    return _due_at(run, run.served.version)


def due_versions(run: Run) -> list[PolicyVersion]:
    """The versions up to the served one that the recipe has judged, the oldest first, from the newest on that has a verdict."""
    found: list[PolicyVersion] = []
    for number in reversed(range(run.served.version + 1)):
        if (version := _due_at(run, number)) is not None:
            found.append(version)
            if verdict_for(run, version) is not None:
                break
    return found[::-1]


def is_concluded(run: Run) -> bool:
    """Whether the last version of a run with a gate has been judged, so that nothing is left to be trained."""
    last = None if run.recipe.gate is None else run.registry.get(run.recipe.steps)
    return last is not None and verdict_for(run, last) is not None


def first_version_to_serve(run: Run) -> PolicyVersion:
    """The version that a run goes on with: the serving one, else the newest that was not refused.

    With a gate a promoted version may be older than that: the newest was blocked, and training went on from it; or it was rolled back,
    and its successor has not served yet.
    """
    newest = version_to_serve(run.registry)
    if run.recipe.gate is not None and not is_concluded(run):
        states = [state for state in VersionState if state is not VersionState.ROLLED_BACK]
        newest = run.registry.latest(VersionState.SERVING) or run.registry.latest(*states)
    assert newest is not None, "version 0 was registered"
    return newest


def result_version(run: Run) -> PolicyVersion | None:
    """The version that is the run's result: with a gate the last promoted one, unless it is version 0 again; else the serving one.

    A way back to version 0 has its hash; or with adapters one of its own, and adds nothing to it.
    """
    if run.recipe.gate is None:
        return run.registry.get(run.served.version)
    promoted, base = run.registry.latest(VersionState.PROMOTED), run.registry.get(0)
    if promoted is None or base is None or promoted.sha256 == base.sha256 or measure.is_zero_version(run.folder, promoted.number):
        return None
    return promoted


async def serve_result(run: Run) -> None:
    """Serves what the run has come to: the last promoted version, where the newest one was not promoted."""
    promoted = run.registry.latest(VersionState.PROMOTED)
    if promoted is not None and promoted.number != run.served.version:
        run.tracker.alert(f"version {run.served.version} is not promoted; the result of the run is version {promoted.number}")
        await run.served.fall_back(promoted)


def gate_rule(gate: GateConfig, suite: Suite) -> GateRule:
    """The rule that a recipe's section sets, with the thresholds of the suite's cases."""
    return GateRule(
        repeats=gate.repeats,
        confirm=gate.confirm,
        alpha=gate.alpha,
        margin=gate.margin,
        threshold=gate.threshold,
        thresholds=case_thresholds(suite),
    )


def _due_at(run: Run, number: int) -> PolicyVersion | None:
    gate, version = run.recipe.gate, run.registry.get(number)
    assert gate is not None, "only a run with a gate judges versions"
    if version is None or (number == run.served.version and version.sha256 != run.served.sha256):
        return None
    return version if number % gate.every == 0 or number == run.recipe.steps else None


def verdict_for(run: Run, version: PolicyVersion) -> GateVerdict | None:
    """What the gate said of exactly these weights."""
    found = read_verdict(run.folder, version.number)
    return found if found is not None and found.sha256 == version.sha256 else None


async def _judged(run: Run, gate: GateConfig, suite: Suite, version: PolicyVersion) -> GateVerdict | None:
    """The verdict, written down with its evaluation; None where the learner took the version back meanwhile."""
    began, rule = time.monotonic(), gate_rule(gate, suite)
    total = sum(case_repeats(case, gate.repeats) for case in suite.cases)
    if run.gate_server is None:
        run.tracker.stage("gate", f"version {version.number}: {len(suite.cases)} cases, {total} attempts")
    broken = await prepare_images([suite], run.sandboxes)
    for (image, _), why in broken.items():
        run.tracker.alert(f"gate: the cases of image {image} cannot be tried: {why}")
    runner, phase = _runner(run), f"gate{version.number:06d}"
    run.capture.reset_phase("gate", step=version.number, place=phase)
    attempt = partial(
        run_cases,
        runner,
        phase=phase,
        version=version.number,
        broken=broken,
        on_done=run.tracker.evaluating if run.gate_server is None else lambda done, total: None,  # beside others: its stage is theirs
        on_scored=partial(run.capture.capture_episode, phase="gate", step=version.number, place=phase),
    )
    tried = await attempt(suite.cases, lambda case: range(case_repeats(case, gate.repeats)))
    reference = _reference(run, suite, version)
    judgement = None
    if reference is not None:
        before, first = reference.scores(), _scores(tried)
        named = cases_to_retry(rule, before, first)
        chosen = [case for case in suite.cases if case.id in named]
        again = await attempt(chosen, lambda case: range(made := case_repeats(case, gate.repeats), made + gate.confirm), again=True)
        tried += again
        judgement = apply_rule(rule, before, first, _scores(again))
    current = run.registry.get(version.number)
    if current is None or current.sha256 != version.sha256 or current.state is VersionState.ROLLED_BACK:
        return None
    origin = evaluation_info(run.recipe, suite, version, repeats=gate.repeats, threshold=gate.threshold, began=began)
    found = SuiteResults(about=origin, attempts=tuple(one.attempt for one in tried))
    verdict = _verdict(run, gate, version, reference, found, judgement, tried)
    results.save_results(
        evaluation_folder(run.folder, version.number), found, transcripts_of(tried), more={FILE: codec.to_json(verdict) + b"\n"}
    )
    _tell(run, verdict, found)
    return verdict


def _verdict(
    run: Run,
    gate: GateConfig,
    version: PolicyVersion,
    reference: SuiteResults | None,
    found: SuiteResults,
    judgement: RuleResult | None,
    tried: Sequence[SuiteAttempt],
) -> GateVerdict:
    outcome, reason = GateOutcome.REFERENCE, "there is no promoted version to compare it with"
    shown: tuple[CaseRegression, ...] = ()
    if judgement is not None:
        assert reference is not None, "a judgement compares with it"
        outcome, reason = _outcome(run, gate, judgement)
        if judgement.blocked:
            shown = _regressions(run, reference, found, judgement, tried)
    elif found.figures().pass_at_1 is None:
        outcome, reason = GateOutcome.UNJUDGED, "not one attempt was scored"
    return GateVerdict(
        version=version.number,
        sha256=version.sha256,
        outcome=outcome,
        reason=reason,
        at=utc_now(),
        reference=None if reference is None else reference.about.version,
        judgement=judgement,
        figures=found.figures(),
        regressions=shown,
    )


def _outcome(run: Run, gate: GateConfig, judgement: RuleResult) -> tuple[GateOutcome, str]:
    if not judgement.enough:
        return GateOutcome.UNJUDGED, judgement.reason
    if not judgement.blocked:
        return (
            GateOutcome.PROMOTED,
            f"no worse: {100 * judgement.effect:+.1f} points on {judgement.cases} cases (p = {judgement.p_value:.2g})",
        )
    if not gate.rolls_back or run.registry.get(run.recipe.steps) is not None:  # the learner has ended: nobody would go back
        return GateOutcome.BLOCKED, judgement.reason
    made = sum(one.outcome is GateOutcome.ROLLED_BACK for one in read_verdicts(run.folder))
    if made >= gate.max_rollbacks:
        return GateOutcome.BLOCKED, f"{judgement.reason}; {made} rollbacks are made, gate.max_rollbacks allows no more"
    return GateOutcome.ROLLED_BACK, judgement.reason


def _follow(run: Run, version: PolicyVersion, verdict: GateVerdict) -> None:
    """What follows from a verdict. Doing it again changes nothing."""
    if verdict.promoted and not _promoted(run, version):
        return
    if verdict.outcome is GateOutcome.ROLLED_BACK and verdict.reference is not None and version.state is not VersionState.ROLLED_BACK:
        to = run.registry.get(verdict.reference)
        if to is None or to.state is not VersionState.PROMOTED:
            path = evaluation_folder(run.folder, version.number) / FILE
            raise StoreError(f"{path} sends the run back to version {verdict.reference}, which was not promoted")
        request = rollback.RollbackRequest(
            version=version.number, sha256=version.sha256, to=to.number, to_sha256=to.sha256, reason=verdict.reason
        )
        rollback.request_rollback(run.folder / "versions", request)
    figure = verdict.figures.pass_at_1 if verdict.figures is not None else None
    if figure is not None:  # after the promotion: until then the learner keeps the version's checkpoint
        run.registry.set_evals(version.number, {GATE: figure})


def _promoted(run: Run, version: PolicyVersion) -> bool:
    """Promotes a version; False where the learner, a process of its own, retracted it at the same moment."""
    try:
        run.registry.set_state(version.number, VersionState.PROMOTED, sha256=version.sha256)
    except StoreError:
        current = run.registry.get(version.number)
        if current is not None and current.sha256 == version.sha256 and current.state is not VersionState.ROLLED_BACK:
            raise
        run.tracker.alert(f"version {version.number} passed the gate and is not promoted: the learner retracted it meanwhile")
        return False
    return True


def _runner(run: Run) -> GroupRunner:
    """What plays the attempts: as evaluations do, and on the gate's own server with a count of its own of episodes at once."""
    runner = evaluation_runner(run)
    if run.gate_server is None:
        return runner
    policy, rollout = run.gate_server.policy, run.recipe.rollout
    slots = Admission(rollout.concurrency, use=lambda: policy.cache_use, full=rollout.max_cache_use)
    return replace(runner, runner=replace(runner.runner, policy=policy, router=policy.episode, pace=Pace()), slots=slots)


def _reference(run: Run, suite: Suite, candidate: PolicyVersion) -> SuiteResults | None:
    """The evaluation of the last promoted version that has attempts at unchanged cases, reduced to these attempts."""
    keys = {case.id: case.key for case in suite.cases}
    for number in reversed(range(candidate.number)):
        version = run.registry.get(number)
        if version is not None and version.state is VersionState.PROMOTED and verdict_for(run, version) is not None:
            found = results.load_results(evaluation_folder(run.folder, version.number))
            if same := tuple(one for one in found.attempts if keys.get(one.case) == one.task_key):
                return replace(found, attempts=same)
    return None


def _regressions(
    run: Run, reference: SuiteResults, found: SuiteResults, judgement: RuleResult, tried: Sequence[SuiteAttempt]
) -> tuple[CaseRegression, ...]:
    before = {one["episode"]: one for one in read_json_lines(evaluation_folder(run.folder, reference.about.version) / results.EPISODES)}
    now_said = {one.attempt.episode: one.transcript for one in tried}
    named = [one.case for one in judgement.regressed] or _fell(reference.scores(), found.scores())[:_SHOWN]
    shown = []
    for case in named:
        good = _episode(reference, case, passed=True)
        bad = _episode(found, case, passed=False)
        if good is not None and bad is not None:
            turn = first_different_turn(before.get(good, {}), now_said[bad])
            shown.append(CaseRegression(case=case, turn=turn, before_episode=good, episode=bad))
    return tuple(shown)


def _fell(before: Scores, after: Scores) -> list[str]:
    """The cases whose mean fell, as the rule compares them, in order of the largest drop."""
    fell = sorted((pair.difference, pair.case) for pair in pair_scores(before, after).pairs)
    return [case for difference, case in fell if difference < 0]


def _episode(evaluation: SuiteResults, case: str, *, passed: bool) -> str | None:
    """An attempt at the case that passed, or that did not."""
    bar = evaluation.about.pass_threshold(case)
    found = (one for one in evaluation.attempts if one.case == case and one.score is not None and attempt_passes(one.score, bar) is passed)
    return next((one.episode for one in found), None)


def first_different_turn(before: dict[str, Any], after: dict[str, Any]) -> int | None:
    """The first turn, counted from 1, in which two episodes in words call different tools or give them other arguments.

    Where their calls are the same to the end, the first in which they say something else; None where they say the same.
    """
    one, other = _turns(before), _turns(after)
    for part in ("tool_calls", "content"):
        for turn in range(max(len(one), len(other))):
            if turn >= len(one) or turn >= len(other) or one[turn].get(part) != other[turn].get(part):
                return turn + 1
    return None


def _turns(words: dict[str, Any]) -> list[dict[str, Any]]:
    return [message for message in words.get("messages", ()) if message.get("role") == "assistant"]


def _tell(run: Run, verdict: GateVerdict, found: SuiteResults) -> None:
    figures = found.figures()
    if figures.pass_at_1 is not None:
        assert figures.low is not None and figures.high is not None, "a rate has its interval"
        shown = Rate(value=figures.pass_at_1, ci_low=figures.low, ci_high=figures.high, n=figures.attempts - figures.unscored)
        run.tracker.evaluated(f"gate {verdict.version}", {found.about.suite: shown})
    if not verdict.promoted:
        turns = "".join(f"; case {one.case} parts from version {verdict.reference} at turn {one.turn}" for one in verdict.regressions)
        run.tracker.alert(f"version {verdict.version} is {verdict.outcome}: {verdict.reason}{turns}")


def _scores(tried: Sequence[SuiteAttempt]) -> Scores:
    found: dict[str, list[float | None]] = {}
    for one in tried:
        found.setdefault(one.attempt.case, []).append(one.attempt.score)
    return found
