"""An evaluation of a suite: all attempts are stored, reported, read back and compared. The server is scripted."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.cli.suites import table
from agentrl.errors import PluginError, UserError
from agentrl.evaluation import open_policy, results, suites
from agentrl.failure.case import Case, Suite, load_suite, save_case
from agentrl.records import Episode, Score, Task
from agentrl.reward import TaskScorer
from agentrl.session.folder import RunStart
from agentrl.session.preflight import PreflightResult
from tests.gate import gated_run

scripted = gated_run.scripted
NAMES = ("easy", "flaky", "broken")


async def score_attempt(task: Task, episode: Episode) -> Score:
    if task.id == "broken":
        raise RuntimeError("no \x1b[31mjudge")
    number = int(episode.id.split("-r")[1].split("-")[0])
    return Score(value=1.0 if task.id == "easy" or number % 2 else 0.0)


def make_suite(folder: Path) -> Suite:

    task = gated_run.make_suite().cases[0].task
    for name in NAMES:
        save_case(folder, Case(id=name, task=replace(task, id=name, verifiers=("tests.evaluation.test_engine:score_attempt",))))
    return load_suite(folder)


async def evaluate(folder: Path, suite: Suite, monkeypatch: pytest.MonkeyPatch, *, repeats: int) -> results.SuiteResults:
    run = await gated_run.open_run(folder)
    run.learner, run.groups = SimpleNamespace(kill=None), run.groups

    @asynccontextmanager
    async def open_scripted_run(*_: object, **__: object) -> AsyncIterator[Any]:
        yield run
        await gated_run.plain.close(run)

    monkeypatch.setattr(open_policy, "open_run", open_scripted_run)
    checked = cast(PreflightResult, SimpleNamespace(scorer=TaskScorer()))
    start = RunStart(recipe=Path("r.py"), folder=folder, overrides=())
    return await suites.evaluate_suite(gated_run.RECIPE, start, checked, suite, repeats=repeats, threshold=1.0, root=folder)


@pytest.mark.usefixtures("scripted")
async def test_every_attempt_is_stored_with_its_cost_and_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = make_suite(tmp_path / "suite-of-mine")
    evaluation = await evaluate(tmp_path / "run", suite, monkeypatch, repeats=4)
    assert results.load_results(tmp_path / "run" / suites.SUITE_FOLDER) == evaluation
    figures = evaluation.figures()
    assert (figures.attempts, figures.unscored, figures.k) == (12, 4, 4)
    assert figures.pass_at_1 == 0.75 and figures.pass_at_k == 1.0 and evaluation.figures(2).pass_at_k == pytest.approx((1 + 5 / 6) / 2)
    assert figures.turns == 1.0 and figures.tokens == sum(attempt.tokens for attempt in evaluation.attempts) > 0
    assert evaluation.about.suite == "suite-of-mine" and evaluation.about.sha256 and evaluation.about.recipe == "back"
    assert all(attempt.score is None and "RuntimeError" in attempt.reason for attempt in evaluation.attempts if attempt.case == "broken")
    episodes = [json.loads(line) for line in (tmp_path / "run/suite/episodes.jsonl").read_text().splitlines()]
    assert [(episode["case"], episode["attempt"]) for episode in episodes] == [(case.id, n) for case in suite.cases for n in range(4)]
    captured = json.loads((tmp_path / "run/failures/failures.json").read_text())
    assert (captured["episodes"], captured["why"]) == (12, {"failed": 2, "fault": 4}), "for the flaky and the broken case"
    text = table(evaluation, where=Path("x"))
    assert "pass@1  0.750" in text and "flaky: 2 of 4 passed" in text and "broken: 0 of 0 passed, 4 unscored" in text


@pytest.mark.usefixtures("scripted")
async def test_two_evaluations_are_compared_on_unchanged_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = make_suite(tmp_path / "s")
    first = await evaluate(tmp_path / "a", suite, monkeypatch, repeats=4)
    attempts = first.attempts
    fewer = [attempt for attempt in attempts if attempt.case != "broken"]
    about = first.about

    second = results.SuiteResults(about=about, attempts=tuple(replace(attempt, score=0.0) for attempt in fewer if attempt.case == "easy"))
    results.save_results(tmp_path / "b", second, [])
    edited = tuple(replace(attempt, task_key="another") if attempt.case == "easy" else attempt for attempt in fewer)
    results.save_results(tmp_path / "c", results.SuiteResults(about=about, attempts=edited), [])
    report = json.loads(CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]).output)
    assert (report["cases"], report["lost"], report["unpaired"], report["verdict"]) == (1, ["easy"], ["broken", "flaky"], "not enough data")
    text = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "c")]).output
    assert "changed: easy" in text and "a difference of 10 points" in text


@pytest.mark.usefixtures("scripted")
async def test_a_comparison_can_be_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await evaluate(tmp_path / "a", make_suite(tmp_path / "s"), monkeypatch, repeats=4)

    def compare(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["compare", *arguments])
        assert result.exception is None, result.exception
        return result.output

    plan = json.loads(compare(str(tmp_path / "a"), "--difference", "0.2", "--json"))
    assert plan["noise"] == pytest.approx((0.0 + 2 / 3) / 2) and plan["suite_cases"] == 2, "easy and flaky; unscored attempts do not count"
    assert plan["cases"]["1"] > plan["cases"]["4"] > plan["cases"]["8"] > 20 and plan["here"]["8"] is None
    assert "the 2 cases of this suite detect no difference" in compare(str(tmp_path / "a"))
    text = compare("--rate", "0.95")
    assert "a difference of 10 points is detected with 80% probability" in text and "154 cases, each tried once by both" in text
    assert "1,000,000 or more cases" in compare("--rate", "0.95", "--difference", "1e-300")
    for option, value in (("difference", "-0.1"), ("difference", "0"), ("difference", "nan"), ("margin", "1"), ("alpha", "0.5")):
        result = CliRunner().invoke(app, ["compare", "--rate", "0.95", f"--{option}={value}"])
        assert isinstance(result.exception, UserError) and f"--{option} {value} is out of range\n  fix: use" in str(result.exception)
    assert "14,3" in compare("--rate", "1", "--alpha", "1e-300")
    unbounded = replace(results.load_results(tmp_path / "a" / suites.SUITE_FOLDER).attempts[0], case="x", score=math.inf)
    stored = results.load_results(tmp_path / "a" / suites.SUITE_FOLDER)
    results.save_results(tmp_path / "b", replace(stored, attempts=(*stored.attempts, unbounded)), [])
    assert compare(str(tmp_path / "b")) == compare(str(tmp_path / "a")), "non-finite scores are excluded from comparisons and plans"
    for arguments in ((), (str(tmp_path / "a"), "--rate", "0.5"), (str(tmp_path / "a"), str(tmp_path / "a"), "--rate", "0.5")):
        result = CliRunner().invoke(app, ["compare", *arguments])
        assert isinstance(result.exception, UserError) and "give two evaluations to compare" in str(result.exception)


def test_an_invalid_evaluation_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"about\.json is missing"):
        results.load_results(tmp_path)
    (tmp_path / "about.json").write_text('{"suite": 3}')
    (tmp_path / "attempts.jsonl").write_text("")
    with pytest.raises(UserError, match="is not an evaluation"):
        results.load_results(tmp_path)
    about = results.EvaluationInfo(
        suite="s", suite_sha256="", cases=1, repeats=1, model="m", version=0, sha256="", recipe="r", recipe_sha256="", sampling={}, seed=0,
        threshold=1.0, agentrl="0", at="",
    )  # fmt: skip
    attempt = results.CaseAttempt(case="c", task_key="k", number=0, episode="e", score=1.0)
    for attempts in (
        (attempt, attempt),
        (dataclasses.replace(attempt, number=-1),),
        (dataclasses.replace(attempt, score=1.7e308),),
        *[
            (dataclasses.replace(attempt, **fields),)
            for fields in ({"tokens": 1 << 62}, {"tokens": -1}, {"turns": 1 << 62}, {"wall_s": math.inf})
        ],
    ):
        results.save_results(tmp_path, results.SuiteResults(about=about, attempts=attempts), [])
        with pytest.raises(UserError, match="is not an evaluation"):
            results.load_results(tmp_path)
    for arguments in (["compare", "a", "b", "--alpha", "0.9"], ["eval", "recipes/quickstart.py", "--repeats", "3"]):
        result = CliRunner().invoke(app, arguments)
        assert isinstance(result.exception, UserError), result.output
    result = CliRunner().invoke(app, ["eval", "recipes/quickstart.py", "--suite", str(tmp_path)])
    assert isinstance(result.exception, UserError) and "is not a suite" in str(result.exception)


async def test_a_missing_verifier_is_reported_before_anything_starts(tmp_path: Path) -> None:

    task = replace(gated_run.make_suite().cases[0].task, verifiers=("rewards.gone:nothing",))
    save_case(tmp_path, Case(id="a", task=task))
    checked = cast(PreflightResult, SimpleNamespace(scorer=TaskScorer()))
    start = RunStart(recipe=Path("r.py"), folder=tmp_path, overrides=())
    with pytest.raises(PluginError, match=r"rewards\.gone"):
        await suites.evaluate_suite(gated_run.RECIPE, start, checked, load_suite(tmp_path), repeats=1, threshold=1.0, root=tmp_path)


def test_suites_are_reported_over_versions_with_a_plot(tmp_path: Path) -> None:
    about = results.EvaluationInfo(
        suite="s", suite_sha256="a", cases=2, repeats=1, model="m", version=0, sha256="0123456789abcdef", recipe="r", recipe_sha256="",
        sampling={}, seed=0, threshold=1.0, agentrl="0", at="2026-11-23T00:00:00+00:00", wall_s=3.0,
    )  # fmt: skip

    def save_evaluation(folder: str, version: int, *scores: float | None, **more: Any) -> None:
        attempts = [
            results.CaseAttempt(case=f"c{n % 2}", task_key="k", number=n // 2, episode="e", score=score, tokens=10, turns=2, wall_s=1.5)
            for n, score in enumerate(scores)
        ]
        results.save_results(
            tmp_path / folder, results.SuiteResults(about=replace(about, version=version, **more), attempts=tuple(attempts)), []
        )

    save_evaluation("run/gate/000000", 0, 0.0, 0.0, 1.0, 0.0)
    save_evaluation("run/gate/000004", 4, 1.0, 1.0, 1.0, 0.0)
    save_evaluation("later/suite", 8, 1.0, None, 1.0, 1.0, suite_sha256="b", suite="s")
    save_evaluation("other/suites/a", 0, 1.0, 1.0, suite="a\x1b[31m")
    for unfinished in ("run/gate/.000008.part", "other/suites/.b.part"):
        save_evaluation(unfinished, 0, 1.0)
        (tmp_path / unfinished / results.ATTEMPTS).unlink()
    command = ["history", *(str(tmp_path / name) for name in ("run", "later", "other"))]
    page = tmp_path / "h.html"
    result = CliRunner().invoke(app, [*command, "--out", str(page)])
    assert result.exception is None, result.exception
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    assert rows["run@4"][1:] == [
        "0.750",
        *rows["run@4"][2:4],
        "1.000",
        "(k=2)",
        "10",
        "2.0",
        "1.5",
        "4",
        "0",
        "0123456789ab",
        about.at,
        "-",
    ]
    assert rows["run@0"][1] == "0.250" and rows["later"][-1] == "suite" and rows["later"][-4] == "1", "one attempt is unscored"
    assert "\x1b" not in result.stdout and "pass@k" in page.read_text() and page.read_text().count("data-chart=") == 2
    first, other = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert [row["version"] for row in first["rows"]] == [0, 4, 8] and len(other["rows"]) == 1
    save_evaluation("hostile", 1, 1.0, at="\x1b]0;mine\x07\nnow", sha256="\x1b[2J\x07")
    output = CliRunner().invoke(app, ["history", str(tmp_path / "hostile")]).stdout
    assert "mine" in output and len(output.splitlines()) == 3
    output += CliRunner().invoke(app, ["compare", *[str(tmp_path / "hostile")] * 2]).stdout
    assert "verdict" in output and not {"\x1b", "\x07"} & set(output)
    missing = CliRunner().invoke(app, ["history", str(tmp_path / "nothing")])
    assert isinstance(missing.exception, UserError) and "no folder" in str(missing.exception)
    assert isinstance(CliRunner().invoke(app, [*command, "--out", str(tmp_path)]).exception, UserError)
