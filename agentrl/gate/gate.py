"""The gate of a run.

At intervals that the recipe sets, the gate evaluates the served version on a suite and compares it with the last promoted version.

    the version serves -> attempts at every case -> more attempts at suspicious cases -> durable verdict -> its consequences

The consequences of a verdict (promotion, or a rollback request to the learner) are idempotent. If the driver dies before it has applied all
of them, the next driver applies them again. A version is evaluated again unless there is a verdict on exactly its weights.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.base.numbers import plural
from agentrl.config.gate import GATE, GateConfig
from agentrl.config.recipe import Recipe
from agentrl.errors import StoreError
from agentrl.evaluation import results
from agentrl.evaluation.engine import (
    StoredEpisodes,
    SuiteAttempt,
    case_repeats,
    case_thresholds,
    evaluation_info,
    evaluation_runner,
    prepare_images,
    run_cases,
    scores_by_case,
    utc_now,
)
from agentrl.evaluation.results import SuiteResults
from agentrl.failure import Capture
from agentrl.failure.case import Suite
from agentrl.gate.rule import GateRule, RuleResult, apply_rule, cases_to_retry
from agentrl.gate.verdict import (
    FILE,
    CaseRegression,
    GateOutcome,
    GateVerdict,
    case_regressions,
    evaluation_folder,
    read_verdict,
)
from agentrl.observe import Rate
from agentrl.protocols import PolicyServer, SandboxBackend, Tracker, VersionRegistry
from agentrl.protocols.serving import MAX_CACHE_USE
from agentrl.records import PolicyVersion, ScoredEpisode, Task, VersionState, codec
from agentrl.rollout import Admission, GroupRunner, Pace
from agentrl.serving.supervisor import version_to_serve
from agentrl.session import measure
from agentrl.version import rollback

if TYPE_CHECKING:
    from agentrl.gate.schedule import VersionServer
    from agentrl.session.opening import Progress, Run

MAX_ROLLBACKS = 2
"""Maximum number of rollbacks by the gate within `rollback.BUDGET_STEPS` versions. If the policy gets worse a third time, the settings must
be changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Decides which versions of a run are promoted. The synchronous methods read the registry and files, so call them in threads."""

    config: GateConfig
    suite: Suite
    recipe: Recipe
    folder: Path
    registry: VersionRegistry
    served: PolicyServer
    runner: GroupRunner  # runs the attempts of evaluations
    sandboxes: SandboxBackend
    capture: Capture
    stored: StoredEpisodes
    tracker: Tracker
    server: VersionServer | None  # present if gate.server=own
    progress: Progress

    @classmethod
    def of(cls, run: Run) -> Gate | None:
        """Returns the gate of an open run; None if the recipe has no gate."""
        if run.recipe.gate is None:
            return None
        assert run.suite is not None, "the preflight checks opened the suite"
        return cls(
            config=run.recipe.gate,
            suite=run.suite,
            recipe=run.recipe,
            folder=run.folder,
            registry=run.registry,
            served=run.served,
            runner=evaluation_runner(run.groups, run.recipe.evaluation.distribution),
            sandboxes=run.sandboxes,
            capture=run.capture,
            stored=StoredEpisodes(run.store),
            tracker=run.tracker,
            server=run.gate_server,
            progress=run.progress,
        )

    async def decide(self, version: PolicyVersion) -> None:
        """Evaluates a due version, unless it has a verdict, and applies the consequences of the verdict.

        If the version already has a verdict, only the consequences are applied again, because an earlier driver may have died before that.
        A version without a verdict is skipped if it is rejected (`is_rejected`).
        """
        verdict = await asyncio.to_thread(self.verdict_for, version)
        if verdict is None:
            if await asyncio.to_thread(self.is_rejected, version):
                return
            verdict = await self._evaluate(version)
        if verdict is not None:
            promoted = await asyncio.to_thread(self._apply, version, verdict)
            if verdict.promoted and not promoted:
                self.tracker.alert(f"version {version.number} passed the gate but is not promoted, because the learner retracted it")

    def is_rejected(self, version: PolicyVersion) -> bool:
        """Whether a version need not be evaluated because it was rolled back or a rollback is pending.

        A pending rollback does not apply to the last version of a run.
        """
        if version.state is VersionState.ROLLED_BACK:
            return True
        return version.number != self._end and rollback.pending_request(self.folder / "versions", self.registry) is not None

    def verdict_for(self, version: PolicyVersion) -> GateVerdict | None:
        """Returns the verdict on exactly the weights of `version`; None if there is no such verdict."""
        verdict = read_verdict(self.folder, version.number)
        return verdict if verdict is not None and verdict.sha256 == version.sha256 else None

    def due(self, number: int) -> PolicyVersion | None:
        """Returns the version with this number; None if the gate need not evaluate this version, or if the version was retracted."""
        version = self.registry.get(number)
        if version is None or (number == self.served.version and version.sha256 != self.served.sha256):
            return None
        return version if number % self.config.every == 0 or number == self._end else None

    def due_versions(self) -> list[PolicyVersion]:
        """Returns the versions that the gate must evaluate, up to the served version, the oldest first.

        If any version has a verdict, the list starts with the newest version that has one. After a crash, the list may contain several
        versions without a verdict, because their evaluations did not finish.
        """
        versions: list[PolicyVersion] = []
        for number in reversed(range(self.served.version + 1)):
            if (version := self.due(number)) is not None:
                versions.append(version)
                if self.verdict_for(version) is not None:
                    break
        return versions[::-1]

    def is_concluded(self) -> bool:
        """Whether training is finished and the gate has promoted or rejected the final version of the run."""
        last = self._last_version()
        return last is not None and self.verdict_for(last) is not None

    @property
    def _end(self) -> float:
        return self.progress.end if self.recipe.steps is None else self.recipe.steps

    def _last_version(self) -> PolicyVersion | None:
        end = self._end
        return self.registry.get(int(end)) if math.isfinite(end) else None

    async def _evaluate(self, version: PolicyVersion) -> GateVerdict | None:
        """Evaluates a version and stores the verdict. Returns None if the learner retracted the version in the meantime."""
        config, began = self.config, time.monotonic()
        rule = gate_rule(config, self.suite)
        attempt, counts = await self._attempts(version), {case.id: case_repeats(case, config.repeats) for case in self.suite.cases}
        first = await attempt([(case, number) for case in self.suite.cases for number in range(counts[case.id])])
        baseline, result = await asyncio.to_thread(self._baseline, version), None
        retries: tuple[SuiteAttempt, ...] = ()
        if baseline is not None:
            before, scores = baseline.scores(), scores_by_case(first)
            names = cases_to_retry(rule, before, scores)
            suspicious = [case for case in self.suite.cases if case.id in names]
            retries = await attempt([(case, counts[case.id] + n) for case in suspicious for n in range(rule.confirm)], again=True)
            result = apply_rule(rule, before, scores, scores_by_case(retries))
        current = await asyncio.to_thread(self.registry.get, version.number)
        if current is None or current.sha256 != version.sha256 or current.state is VersionState.ROLLED_BACK:
            return None
        info = evaluation_info(self.recipe, self.suite, version, repeats=config.repeats, threshold=rule.threshold, began=began)
        attempts = (*first, *retries)
        evaluation = SuiteResults(about=info, attempts=tuple(attempt.attempt for attempt in attempts))
        verdict = await asyncio.to_thread(self._verdict, version, baseline, evaluation, result, attempts)
        record = {FILE: codec.to_json(verdict) + b"\n"}
        folder, transcripts = evaluation_folder(self.folder, version.number), [attempt.transcript for attempt in attempts]
        await asyncio.to_thread(results.save_results, folder, evaluation, transcripts, more=record)
        self._report(verdict, evaluation)
        return verdict

    async def _attempts(self, version: PolicyVersion) -> Callable[..., Awaitable[tuple[SuiteAttempt, ...]]]:
        """Prepares the evaluation of a version. Returns `run_cases` with all arguments set except the attempts and `again`."""
        if self.server is None:
            total = sum(case_repeats(case, self.config.repeats) for case in self.suite.cases)
            self.tracker.stage("gate", f"version {version.number}: {plural(len(self.suite.cases), 'case')}, {plural(total, 'attempt')}")
        broken = await prepare_images([self.suite], self.sandboxes)
        for (image, _), why in broken.items():
            self.tracker.alert(f"gate: the cases of image {image} cannot be run: {why}")
        phase = f"gate{version.number:06d}"
        await asyncio.to_thread(self.capture.reset_phase, "gate", step=version.number, place=phase)
        await self.stored.begin(phase)

        async def capture(task: Task, scored: ScoredEpisode) -> None:
            await asyncio.to_thread(self.capture.capture_episode, task, scored, phase="gate", step=version.number, place=phase)
            await self.stored.add(phase, version.number, task, scored)

        return partial(
            run_cases,
            self._attempt_runner(),
            phase=phase,
            version=version.number,
            broken=broken,
            on_done=self.tracker.evaluating if self.server is None else lambda done, total: None,  # training shows its own progress
            on_scored=capture,
        )

    def _attempt_runner(self) -> GroupRunner:
        """Returns the runner with which the gate runs attempts.

        If the gate has its own server, the runner uses that server and has a separate limit on concurrent episodes.
        """
        if self.server is None:
            return self.runner
        policy, rollout = self.server.policy, self.recipe.rollout
        slots = Admission(rollout.concurrency, use=lambda: policy.cache_use, full=MAX_CACHE_USE)
        return replace(self.runner, runner=replace(self.runner.runner, policy=policy, router=policy, pace=Pace()), slots=slots)

    def _baseline(self, candidate: PolicyVersion) -> SuiteResults | None:
        """Returns the evaluation of the newest promoted version that has attempts at unchanged cases; None if there is none.

        The evaluation contains only the attempts at unchanged cases.
        """
        keys = {case.id: case.key for case in self.suite.cases}
        for number in reversed(range(candidate.number)):
            version = self.registry.get(number)
            if version is not None and version.state is VersionState.PROMOTED and self.verdict_for(version) is not None:
                evaluation = results.load_results(evaluation_folder(self.folder, version.number))
                if unchanged := tuple(attempt for attempt in evaluation.attempts if keys.get(attempt.case) == attempt.task_key):
                    return replace(evaluation, attempts=unchanged)
        return None

    def _verdict(
        self,
        version: PolicyVersion,
        baseline: SuiteResults | None,
        evaluation: SuiteResults,
        result: RuleResult | None,
        attempts: Sequence[SuiteAttempt],
    ) -> GateVerdict:
        outcome, reason = GateOutcome.REFERENCE, "there is no promoted version to compare with"
        regressions: tuple[CaseRegression, ...] = ()
        if baseline is not None and result is not None:
            outcome, reason = self._outcome(result, version.number)
            if result.blocked:
                regressions = case_regressions(self.folder, baseline, evaluation, result, attempts)
        elif evaluation.figures().pass_at_1 is None:
            outcome, reason = GateOutcome.UNJUDGED, "no attempt was scored"
        return GateVerdict(
            version=version.number,
            sha256=version.sha256,
            outcome=outcome,
            reason=reason,
            at=utc_now(),
            reference=None if baseline is None else baseline.about.version,
            judgement=result,
            figures=evaluation.figures(),
            regressions=regressions,
        )

    def _outcome(self, result: RuleResult, number: int) -> tuple[GateOutcome, str]:
        if not result.enough:
            return GateOutcome.UNJUDGED, result.reason
        if not result.blocked:
            effect = f"{100 * result.effect:+.1f} points on {plural(result.cases, 'case')}"
            return GateOutcome.PROMOTED, f"no worse: {effect} (p = {result.p_value:.2g})"
        if not self.config.rolls_back or self._last_version() is not None:  # the learner has exited and cannot roll back
            return GateOutcome.BLOCKED, result.reason
        verdicts = (read_verdict(self.folder, earlier) for earlier in range(max(0, number - rollback.BUDGET_STEPS + 1), number))
        rollbacks = sum(verdict is not None and verdict.outcome is GateOutcome.ROLLED_BACK for verdict in verdicts)
        if rollbacks >= MAX_ROLLBACKS:
            within = f"after {rollbacks} rollbacks within {rollback.BUDGET_STEPS} versions the gate only blocks"
            return GateOutcome.BLOCKED, f"{result.reason}; {within}"
        return GateOutcome.ROLLED_BACK, result.reason

    def _apply(self, version: PolicyVersion, verdict: GateVerdict) -> bool:
        """Applies the consequences of a verdict. Returns whether the version is promoted. Idempotent."""
        if verdict.promoted and not self._promote(version):
            return False
        if verdict.outcome is GateOutcome.ROLLED_BACK and verdict.reference is not None and version.state is not VersionState.ROLLED_BACK:
            target = self.registry.get(verdict.reference)
            if target is None or target.state is not VersionState.PROMOTED:
                path = evaluation_folder(self.folder, version.number) / FILE
                raise StoreError(f"{path} rolls the run back to version {verdict.reference}, which was not promoted")
            request = rollback.RollbackRequest(
                version=version.number, sha256=version.sha256, to=target.number, to_sha256=target.sha256, reason=verdict.reason
            )
            pending = rollback.pending_request(self.folder / "versions", self.registry)
            if pending is None or not pending.by_user:
                rollback.request_rollback(self.folder / "versions", request)  # the learner polls for it (`agentrl.learner.worker`)
        figure = verdict.figures.pass_at_1 if verdict.figures is not None else None
        if figure is not None:  # after the promotion, because the learner keeps the checkpoint until then
            self.registry.set_evals(version.number, {GATE: figure})
        return verdict.promoted

    def _promote(self, version: PolicyVersion) -> bool:
        """Promotes a version. Returns False if the learner retracted the version at the same time."""
        try:
            self.registry.set_state(version.number, VersionState.PROMOTED, sha256=version.sha256)
        except StoreError:
            current = self.registry.get(version.number)
            if current is not None and current.sha256 == version.sha256 and current.state is not VersionState.ROLLED_BACK:
                raise
            return False
        return True

    def _report(self, verdict: GateVerdict, evaluation: SuiteResults) -> None:
        figures = evaluation.figures()
        if figures.pass_at_1 is not None:
            assert figures.low is not None and figures.high is not None, "a rate has its interval"
            rate = Rate(value=figures.pass_at_1, ci_low=figures.low, ci_high=figures.high, n=figures.attempts - figures.unscored)
            self.tracker.evaluated(f"gate {verdict.version}", {evaluation.about.suite: rate})
        self.tracker.judged(verdict.version, str(verdict.outcome), verdict.reason)
        if not verdict.promoted:
            turns = "".join(
                f"; case {regression.case} differs from version {verdict.reference} at turn {regression.turn}"
                for regression in verdict.regressions
            )
            self.tracker.alert(f"version {verdict.version} is {verdict.outcome}: {verdict.reason}{turns}")


def gate_rule(gate: GateConfig, suite: Suite) -> GateRule:
    """Returns the gate's rule with the settings of the recipe and the thresholds that cases of the suite set."""
    return GateRule(
        repeats=gate.repeats,
        margin=gate.margin,
        thresholds=case_thresholds(suite),
    )


def first_version_to_serve(registry: VersionRegistry, gate: Gate | None) -> PolicyVersion:
    """Returns the version that a run serves first: `version_to_serve` if there is no gate or the gate is concluded.

    Otherwise, returns the serving version or, if there is none, the newest version that was not rolled back. The last promoted version may
    be older, because training continues from a blocked version, and because the successor of a version that was rolled back may not have
    served yet.
    """
    newest = version_to_serve(registry)
    if gate is not None and not gate.is_concluded():
        states = [state for state in VersionState if state is not VersionState.ROLLED_BACK]
        newest = registry.latest(VersionState.SERVING) or registry.latest(*states)
    assert newest is not None, "version 0 was registered"
    return newest


def promoted_result(registry: VersionRegistry, folder: Path) -> PolicyVersion | None:
    """Returns the result of a run with a gate (the last promoted version); None if there is none or its weights are those of version 0.

    A version that results from a rollback to version 0 has the hash of version 0. If adapters are trained, such a version has a different
    hash, but its adapter does not change the base policy.
    """
    promoted, base = registry.latest(VersionState.PROMOTED), registry.get(0)
    if promoted is None or base is None or promoted.sha256 == base.sha256 or measure.is_zero_version(folder, promoted.number):
        return None
    return promoted


async def serve_result(registry: VersionRegistry, served: PolicyServer, alert: Callable[[str], None]) -> None:
    """Serves the result of a run with a gate, that is, the last promoted version, if there is one and another version is served."""
    promoted = await asyncio.to_thread(registry.latest, VersionState.PROMOTED)
    if promoted is not None and promoted.number != served.version:
        alert(f"version {served.version} is not promoted; the result of the run is version {promoted.number}")
        await served.fall_back(promoted)
