from __future__ import annotations

import asyncio
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import PluginError, SandboxError, TaskError
from agentrl.records import Blame, Episode, Message, Score, ScoredEpisode, Task, Trajectory, Turn
from agentrl.reward import TaskScorer
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.reward.scoring import EPISODE, InSandboxes, scored, task_of
from tests.reward.scoring import broken as broken
from tests.reward.scoring import full as full

task = partial(task_of, __file__)


async def half(task: Task, episode: Episode) -> Score:
    return Score(value=0.5, parts={"style": 0.2}, evidence="ok")


async def by_turn(task: Task, episode: Episode) -> Score:
    return Score(value=1.0, turn_rewards=((1.0, 0.0),))


not_callable = 3


async def test_scores_are_averaged_and_their_parts_kept() -> None:
    score = await TaskScorer()(task("half", "full"), EPISODE)
    assert score.value == 0.75 and score.evidence == "ok"
    assert {name.rsplit(":")[-1]: part for name, part in score.parts.items()} == {"half": 0.5, "full": 1.0, "half/style": 0.2}


async def test_turn_rewards_are_averaged_and_must_match_the_turns() -> None:
    turn = Turn(
        prompt_ids=(1,), completion_ids=(), logprobs=(), versions=(), message=Message(role="assistant", content=""), finish_reason="stop"
    )
    two_turns = replace(EPISODE, trajectories=(Trajectory(agent="main", turns=(turn, turn)),))
    assert (await TaskScorer()(task("full", "by_turn"), two_turns)).turn_rewards == ((0.5, 0.0),)
    assert (await TaskScorer()(task("full"), two_turns)).turn_rewards == ()
    misfit = await TaskScorer()(task("by_turn"), EPISODE)
    assert misfit.value is None and "do not match" in misfit.reason
    with pytest.raises(ValueError, match="turn rewards"):
        ScoredEpisode(episode=EPISODE, score=Score(value=1.0, turn_rewards=((1.0,),)))


@pytest.mark.parametrize(("faults", "value"), [(0, 1.0), (2, 1.0), (3, None)])
async def test_sandbox_fault_is_retried_and_then_unscored(faults: int, value: float | None) -> None:
    sandboxes = ScriptedSandboxes(printing(""))
    verifier = InSandboxes(faults, SandboxError("the daemon is gone"))
    scorer = TaskScorer(sandboxes=sandboxes, _verifiers={"v": verifier})
    score = await scorer(replace(task(), verifiers=("v",)), EPISODE)
    assert score.value == value and verifier.seen == [sandboxes] * min(faults + 1, 3)
    if value is None:
        assert score.blame is Blame.INFRASTRUCTURE and "daemon is gone" in score.reason


OUTAGES = [ConnectionRefusedError(111, "Connection refused"), TimeoutError("late"), ExceptionGroup("g", [RuntimeError("HTTP 503")])]


@pytest.mark.parametrize(("faults", "value"), [(2, 1.0), (3, None)])
@pytest.mark.parametrize("error", OUTAGES)
async def test_unreachable_server_is_retried_and_then_an_infrastructure_fault(error: Exception, faults: int, value: float | None) -> None:
    verifier = InSandboxes(faults, error)
    scorer = TaskScorer(sandboxes=ScriptedSandboxes(printing("")), _verifiers={"v": verifier})
    score = await scorer(replace(task(), verifiers=("v",)), EPISODE)
    assert score.value == value and len(verifier.seen) == 3
    if value is None:
        assert score.blame is Blame.INFRASTRUCTURE and "reported an outage" in score.reason


async def test_task_fault_is_unscored_without_retries() -> None:
    verifier = InSandboxes(9, TaskError("the tests do not load"))
    scorer = TaskScorer(sandboxes=ScriptedSandboxes(printing("")), _verifiers={"v": verifier})
    score = await scorer(replace(task(), verifiers=("v",)), EPISODE)
    assert score.value is None and score.blame is Blame.TASK and "do not load" in score.reason and len(verifier.seen) == 1


async def test_verifier_that_needs_sandboxes_raises_without_a_backend() -> None:
    with pytest.raises(PluginError, match="sandboxes"):
        await TaskScorer(_verifiers={"v": InSandboxes(0, KeyError())})(replace(task(), verifiers=("v",)), EPISODE)


def test_only_scores_without_a_value_have_blame() -> None:
    with pytest.raises(ValueError, match="blame"):
        Score(value=0.0, blame=Blame.TASK)


async def test_task_without_verifiers_is_unscored() -> None:
    assert (await TaskScorer()(task(), EPISODE)).value is None


@pytest.mark.parametrize("name", ["not_callable", "absent"])
async def test_unresolvable_references_raise(name: str) -> None:
    with pytest.raises(PluginError):
        TaskScorer().load(task(name).verifiers)


async def test_infrastructure_error_in_an_exception_group_counts() -> None:
    verifier = InSandboxes(1, ExceptionGroup("several", [SandboxError("gone")]))
    scorer = TaskScorer(sandboxes=ScriptedSandboxes(printing("")), _verifiers={"v": verifier})
    assert (await scorer(replace(task(), verifiers=("v",)), EPISODE)).value == 1.0 and len(verifier.seen) == 2


async def chokes(task: Task, episode: Episode) -> Score:
    return Score(value=1.0 / len(str(episode.answer).encode("ascii")))


async def reads_a_number(task: Task, episode: Episode) -> Score:
    return Score(value=float(float(str(episode.answer) if episode.answer is not None else episode.answer) == 1))  # type: ignore[arg-type]


async def hangs_at(task: Task, episode: Episode) -> Score:
    await asyncio.sleep(60 if episode.answer == "9**9**9" else 0)
    return Score(value=1.0)


async def gives_nan(task: Task, episode: Episode) -> Score:
    return Score(value=float(episode.answer or 0))


class Bounded:
    bounds = (-1.0, 1.0)

    async def __call__(self, task: Task, episode: Episode) -> Score:
        if episode.answer == "boom":
            raise RecursionError
        return Score(value=0.5)


@pytest.mark.parametrize(
    ("name", "answer", "value"),
    [("chokes", "\u00e9", 0.0), ("reads_a_number", "many", 0.0), ("hangs_at", "9**9**9", 0.0), ("gives_nan", "nan", 0.0)],
)
async def test_provoked_failure_gets_the_lowest_value(name: str, answer: str, value: float) -> None:
    score = await TaskScorer(timeout_s=0.3)(task(name), replace(EPISODE, answer=answer))
    assert score.value == value and "because of this episode's text" in score.evidence


async def test_lowest_value_is_the_lower_bound_of_the_verifier() -> None:
    score = await TaskScorer(_verifiers={"v": Bounded()})(replace(task(), verifiers=("v",)), replace(EPISODE, answer="boom"))
    assert score.value == -1.0, "failing the verifier is not better than a wrong answer"


async def test_verifier_that_fails_once_is_retried() -> None:
    failed: list[str] = []

    async def flaky(task: Task, episode: Episode) -> Score:
        if not failed:
            failed.append(episode.id)
            raise KeyError("cache")
        return Score(value=1.0)

    score = await TaskScorer(_verifiers={"v": flaky})(replace(task(), verifiers=("v",)), EPISODE)
    assert score.value == 1.0 and failed == ["e"]


class ParseError(Exception):
    pass


class ReadTimeout(Exception):
    pass


async def repeats_what_it_cannot_read(task: Task, episode: Episode) -> Score:
    if episode.answer in (None, "", "0"):
        return Score(value=0.0)
    raise ParseError(f"invalid expression near {episode.answer!r}")


@pytest.mark.parametrize("answer", ["connection refused", "HTTP 503", "the server is down", "no space left on device"])
async def test_outage_text_from_the_answer_is_not_an_outage(answer: str) -> None:
    score = await TaskScorer()(task("repeats_what_it_cannot_read"), replace(EPISODE, answer=answer))
    assert score.value == 0.0, score.reason


async def pays_less_for_wrong_answers(task: Task, episode: Episode) -> Score:
    if episode.answer == "boom":
        raise RecursionError
    return Score(value=0.0 if episode.answer is None else {"3": 1.0, "long": -3.0}.get(episode.answer, -1.0))


async def test_failing_the_verifier_pays_no_more_than_the_worst_answer_so_far() -> None:
    scorer, judged = TaskScorer(), task("pays_less_for_wrong_answers")
    assert (await scorer(judged, replace(EPISODE, answer="boom"))).value == -1.0, "the value of the harmless answer that pays least"
    assert (await scorer(judged, replace(EPISODE, answer="long"))).value == -3.0
    assert (await scorer(judged, replace(EPISODE, answer="boom"))).value == -3.0


class Computes:
    """A verifier with limits and a server."""

    def __init__(self, error: Exception) -> None:
        self.error, self.down = error, False

    async def __call__(self, task: Task, episode: Episode) -> Score:
        if self.down or episode.answer == "9**9**9":
            raise self.error
        return Score(value=float(episode.answer == "3"))


KILLED = (TimeoutError(), subprocess.TimeoutExpired("check", 5), subprocess.CalledProcessError(-11, "check"), ReadTimeout("no answer"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("error", KILLED, ids=lambda error: type(error).__name__)
async def test_answer_that_blocks_the_server_gets_the_lowest_value(error: Exception) -> None:
    computes = Computes(error)
    scorer, judged = TaskScorer(_verifiers={"v": computes}), replace(task(), verifiers=("v",))
    assert (await scorer(judged, replace(EPISODE, answer="9**9**9"))).blame is Blame.INFRASTRUCTURE, "nothing has been scored yet"
    assert (await scorer(judged, replace(EPISODE, answer="3"))).value == 1.0
    assert (await scorer(judged, replace(EPISODE, answer="9**9**9"))).value == 0.0
    computes.down = True
    assert (await scorer(judged, replace(EPISODE, answer="3"))).blame is Blame.INFRASTRUCTURE


@pytest.mark.parametrize("fails", ["hangs", "raises"])
async def test_failure_on_all_real_answers_is_an_infrastructure_fault(fails: str) -> None:
    down = False

    async def asks_a_backend(task: Task, episode: Episode) -> Score:
        if not episode.answer or episode.answer == "0":
            return Score(value=0.0)
        if down and fails == "hangs":
            await asyncio.sleep(60)
        if down:
            raise KeyError("an error of a client that tells nothing")
        if episode.answer == "boom":
            raise RecursionError
        return Score(value=float(episode.answer == "3"))

    scorer, judged = TaskScorer(timeout_s=0.3, _verifiers={"v": asks_a_backend}), replace(task(), verifiers=("v",))
    assert (await scorer(judged, replace(EPISODE, answer="3"))).value == 1.0
    assert (await scorer(judged, replace(EPISODE, answer="boom"))).value == 0.0
    down = True
    score = await scorer(judged, replace(EPISODE, id="later", answer="3"))
    assert score.value is None and score.blame is Blame.INFRASTRUCTURE


def test_repr_of_a_scorer_omits_its_state() -> None:
    assert not any(name in repr(TaskScorer()) for name in ("_verifiers", "_lowest", "_best"))


class Prepared:
    """A verifier that is prepared once."""

    def __init__(self) -> None:
        self.prepared: list[tuple[Path, Path | None]] = []

    def prepare(self, *, root: Path, folder: Path | None) -> None:
        self.prepared.append((root, folder))

    async def __call__(self, task: Task, episode: Episode) -> Score:
        return Score(value=1.0)


prepared = Prepared()


def test_verifiers_are_prepared_once(tmp_path: Path) -> None:
    scorer = TaskScorer(root=tmp_path, folder=tmp_path / "run")
    first, second = task("full", "prepared").verifiers
    scorer.load([first])
    scorer.load([first, second, second])
    assert scorer._verifiers.keys() == {first, second}
    (ready,) = scorer._verifiers[second].prepared  # type: ignore[union-attr]
    assert ready == (tmp_path, tmp_path / "run")


async def test_auditing_a_score_loads_the_audit_verifiers() -> None:
    reference = task("half").verifiers
    score = await TaskScorer(audit=reference).audit_score(task(), EPISODE, Score(value=1.0))
    assert score.value == 1.0 and 0.5 in score.parts.values()


async def test_an_episode_without_a_value_is_not_audited() -> None:
    calls: list[str] = []

    async def counts(task: Task, episode: Episode) -> Score:
        calls.append(episode.id)
        return Score(value=1.0)

    scorer = TaskScorer(audit=("counts",), _verifiers={"counts": counts, "broken": broken})
    assert (await scorer(replace(task(), verifiers=("broken",)), EPISODE)).value is None and calls == []
    unscored = Score(value=None, reason="x")
    assert await scorer.audit_score(task(), EPISODE, unscored) is unscored and calls == []
    unaudited = Score(value=1.0)
    assert await TaskScorer().audit_score(task(), EPISODE, unaudited) is unaudited


async def by_branch(task: Task, episode: Episode) -> Score:
    return Score(value=1.0, branches=(0.5,))


async def test_scores_of_trajectories_are_averaged() -> None:
    episode = replace(EPISODE, trajectories=(Trajectory(agent="main", turns=(), stop_reason="answered"),))
    score = await TaskScorer()(task("half", "by_branch"), episode)
    assert (score.value, score.branches) == (0.75, (0.5,))


@pytest.mark.parametrize("errors", [(TimeoutError(), SandboxError("gone")), (SandboxError("gone"), TimeoutError())])
def test_outage_without_repeated_timeouts_is_not_blamed_on_the_episode(errors: tuple[Exception, ...]) -> None:
    """The scorer does not judge another episode to check this."""
    seen: list[str | None] = []

    async def fails(task: Task, episode: Episode) -> Score:
        seen.append(episode.answer)
        if episode.answer == "3":
            return Score(value=1.0)
        raise errors[(len(seen) - 2) % 2]

    scorer, judged = TaskScorer(max_retries=1, _verifiers={"v": fails}), replace(task(), verifiers=("v",))
    assert scored(scorer, judged, replace(EPISODE, answer="3"))[0].value == 1.0
    assert scored(scorer, judged, replace(EPISODE, answer="x"))[0].blame is Blame.INFRASTRUCTURE
    assert seen == ["3", "x", "x"]


class Changing:
    """A verifier that returns or raises the next planned result for the answer of the episode. The last one repeats."""

    def __init__(self, **planned: list[float | Exception]) -> None:
        self.planned, self.seen = planned, list[str | None]()

    async def __call__(self, task: Task, episode: Episode) -> Score:
        self.seen.append(episode.answer)
        results = self.planned.get(str(episode.answer) or "empty", [0.0])
        result = results.pop(0) if len(results) > 1 else results[0]
        if isinstance(result, Exception):
            raise result
        return Score(value=result)


def judged_by(verifier: Changing, *answers: str, **options: Any) -> list[Score]:
    scorer = TaskScorer(_verifiers={"v": verifier}, **options)
    return [scored(scorer, replace(task(), verifiers=("v",)), replace(EPISODE, id=answer, answer=answer))[0] for answer in answers]


def test_timeouts_are_blamed_on_the_episode_only_if_the_best_episode_is_scored() -> None:
    late = TimeoutError()
    _, score = judged_by(Changing(best=[1.0], x=[late]), "best", "x")
    assert score.value == 0.0 and "because of this episode's text" in score.evidence
    _, score = judged_by(Changing(best=[1.0, KeyError("k")], x=[late]), "best", "x")
    assert score.blame is Blame.INFRASTRUCTURE, "the best episode is no longer scored"
    _, score = judged_by(Changing(best=[1.0], x=[late, late, late, 1.0]), "best", "x")
    assert score.blame is Blame.INFRASTRUCTURE, "the last retry came in time"
    _, score = judged_by(Changing(best=[1.0], x=[late, late, late, SandboxError("gone")]), "best", "x")
    assert score.blame is Blame.INFRASTRUCTURE
    verifier = Changing(best=[1.0], x=[late])
    _, score = judged_by(verifier, "best", "x", controls=False)
    assert score.blame is Blame.INFRASTRUCTURE and verifier.seen == ["best", "x", "x", "x"]


def test_the_score_of_a_verifier_that_recovers_is_used() -> None:
    fault = KeyError("k")
    (score,) = judged_by(Changing(x=[fault, fault, 1.0]), "x")
    assert score.value == 1.0, "the verifier recovered before the control episodes"
    (score,) = judged_by(Changing(x=[fault, fault, fault, 1.0]), "x")
    assert score.value == 0.0 and "because of this episode's text" in score.evidence


def test_lowest_value_is_remembered() -> None:
    *_, score = judged_by(Changing(low=[-3.0], high=[1.0], boom=[KeyError("k")]), "low", "high", "boom")
    assert score.value == -3.0


def test_messages_of_a_failing_verifier_are_truncated() -> None:
    long = KeyError("x" * 5000)
    (score,) = judged_by(Changing(boom=[long]), "boom")
    assert score.value == 0.0 and len(score.evidence) == 2000
    _, score = judged_by(Changing(best=[1.0, long], boom=[long]), "best", "boom")
    assert score.blame is Blame.INFRASTRUCTURE and len(score.reason) == len("v: ") + 2000


async def test_evidence_names_the_control_answer() -> None:
    score = await TaskScorer()(task("reads_a_number"), replace(EPISODE, answer="many"))
    assert score.evidence.endswith("it scores an episode that submits '0'")


def test_fastest_of_the_best_episodes_is_kept() -> None:
    def best_of(*scores: tuple[float, float]) -> int:
        scorer = TaskScorer()
        for number, (value, seconds) in enumerate(scores):
            scorer._remember("v", task(), replace(EPISODE, id=str(number)), value, seconds)
        return int(scorer._best["v"].episode.id)

    assert best_of((0.5, 1.0), (1.0, 9.0)) == 1 and best_of((1.0, 9.0), (0.5, 1.0)) == 0
    assert best_of((1.0, 2.0), (1.0, 1.0)) == 1 and best_of((1.0, 1.0), (1.0, 2.0)) == 0
    assert best_of((1.0, 1.0), (1.0, 1.0)) == 0


async def test_the_time_of_scoring_is_measured() -> None:
    async def sleeps(task: Task, episode: Episode) -> Score:
        await asyncio.sleep(0.1)
        return Score(value=1.0)

    scorer = TaskScorer(_verifiers={"v": sleeps})
    await scorer(replace(task(), verifiers=("v",)), EPISODE)
    assert 0.09 <= scorer._best["v"].seconds < 60
