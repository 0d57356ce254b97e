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
from tests.gate import test_gate

scripted = test_gate.scripted
NAMES = ("easy", "flaky", "broken")


async def judged(task: Task, episode: Episode) -> Score:
    if task.id == "broken":
        raise RuntimeError("no \x1b[31mjudge")
    number = int(episode.id.split("-r")[1].split("-")[0])
    return Score(value=1.0 if task.id == "easy" or number % 2 else 0.0)


def make_suite(folder: Path) -> Suite:

    task = test_gate.make_suite().cases[0].task
    for name in NAMES:
        save_case(folder, Case(id=name, task=replace(task, id=name, verifiers=("tests.evaluation.test_engine:judged",))))
    return load_suite(folder)


async def evaluated(folder: Path, suite: Suite, monkeypatch: pytest.MonkeyPatch, *, repeats: int) -> results.SuiteResults:
    run = await test_gate.opened(folder)
    run.learner, run.groups = SimpleNamespace(kill=None), run.groups

    @asynccontextmanager
    async def opened(*_: object, **__: object) -> AsyncIterator[Any]:
        yield run
        await test_gate.plain.close(run)

    monkeypatch.setattr(open_policy, "open_run", opened)
    checked = cast(PreflightResult, SimpleNamespace(scorer=TaskScorer()))
    start = RunStart(recipe=Path("r.py"), folder=folder, overrides=())
    return await suites.evaluate_suite(test_gate.RECIPE, start, checked, suite, repeats=repeats, threshold=1.0, root=folder)


@pytest.mark.usefixtures("scripted")
async def test_every_attempt_is_stored_with_its_cost_and_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = make_suite(tmp_path / "suite-of-mine")
    found = await evaluated(tmp_path / "run", suite, monkeypatch, repeats=4)
    assert results.load_results(tmp_path / "run" / suites.SUITE_FOLDER) == found
    figures = found.figures()
    assert (figures.attempts, figures.unscored, figures.k) == (12, 4, 4)
    assert figures.pass_at_1 == 0.75 and figures.pass_at_k == 1.0 and found.figures(2).pass_at_k == pytest.approx((1 + 5 / 6) / 2)
    assert figures.turns == 1.0 and figures.tokens == sum(one.tokens for one in found.attempts) > 0
    assert found.about.suite == "suite-of-mine" and found.about.sha256 and found.about.recipe == "back"
    assert all(one.score is None and "RuntimeError" in one.reason for one in found.attempts if one.case == "broken")
    episodes = [json.loads(line) for line in (tmp_path / "run/suite/episodes.jsonl").read_text().splitlines()]
    assert [(one["case"], one["attempt"]) for one in episodes] == [(case.id, n) for case in suite.cases for n in range(4)]
    captured = json.loads((tmp_path / "run/failures/failures.json").read_text())
    assert (captured["episodes"], captured["why"]) == (12, {"failed": 2, "fault": 4}), "for the flaky and the broken case"
    shown = table(found, where=Path("x"))
    assert "pass@1  0.750" in shown and "flaky: 2 of 4 passed" in shown and "broken: 0 of 0 passed, 4 unscored" in shown


@pytest.mark.usefixtures("scripted")
async def test_two_evaluations_are_compared_on_unchanged_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = make_suite(tmp_path / "s")
    first = await evaluated(tmp_path / "a", suite, monkeypatch, repeats=4)
    found = first.attempts
    fewer = [one for one in found if one.case != "broken"]
    about = first.about

    second = results.SuiteResults(about=about, attempts=tuple(replace(one, score=0.0) for one in fewer if one.case == "easy"))
    results.save_results(tmp_path / "b", second, [])
    edited = tuple(replace(one, task_key="another") if one.case == "easy" else one for one in fewer)
    results.save_results(tmp_path / "c", results.SuiteResults(about=about, attempts=edited), [])
    told = json.loads(CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]).output)
    assert (told["cases"], told["lost"], told["unpaired"], told["verdict"]) == (1, ["easy"], ["broken", "flaky"], "not enough data")
    shown = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "c")]).output
    assert "changed: easy" in shown and "a difference of 10 points" in shown


@pytest.mark.usefixtures("scripted")
async def test_a_comparison_can_be_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await evaluated(tmp_path / "a", make_suite(tmp_path / "s"), monkeypatch, repeats=4)

    def asked(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["compare", *arguments])
        assert done.exception is None, done.exception
        return done.output

    told = json.loads(asked(str(tmp_path / "a"), "--difference", "0.2", "--json"))
    assert told["noise"] == pytest.approx((0.0 + 2 / 3) / 2) and told["suite_cases"] == 2, "easy and flaky; unscored attempts do not count"
    assert told["cases"]["1"] > told["cases"]["4"] > told["cases"]["8"] > 20 and told["here"]["8"] is None
    assert "the 2 cases of this suite detect no difference" in asked(str(tmp_path / "a"))
    shown = asked("--rate", "0.95")
    assert "a difference of 10 points is detected with 80% probability" in shown and "154 cases, each tried once by both" in shown
    assert "1,000,000 cases" in asked("--rate", "0.95", "--difference", "1e-300")
    assert "14,3" in asked("--rate", "1", "--alpha", "1e-300")
    unbounded = replace(results.load_results(tmp_path / "a" / suites.SUITE_FOLDER).attempts[0], case="x", score=math.inf)
    found = results.load_results(tmp_path / "a" / suites.SUITE_FOLDER)
    results.save_results(tmp_path / "b", replace(found, attempts=(*found.attempts, unbounded)), [])
    assert asked(str(tmp_path / "b")) == asked(str(tmp_path / "a")), "a score that is not a number is excluded from comparisons and plans"
    for wrong in ((), (str(tmp_path / "a"), "--rate", "0.5"), (str(tmp_path / "a"), str(tmp_path / "a"), "--rate", "0.5")):
        done = CliRunner().invoke(app, ["compare", *wrong])
        assert isinstance(done.exception, UserError) and "give two evaluations to compare" in str(done.exception)


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
    one = results.CaseAttempt(case="c", task_key="k", number=0, episode="e", score=1.0)
    for attempts in (
        (one, one),
        (dataclasses.replace(one, number=-1),),
        (dataclasses.replace(one, score=1.7e308),),
        *[
            (dataclasses.replace(one, **figure),)
            for figure in ({"tokens": 1 << 62}, {"tokens": -1}, {"turns": 1 << 62}, {"wall_s": math.inf})
        ],
    ):
        results.save_results(tmp_path, results.SuiteResults(about=about, attempts=attempts), [])
        with pytest.raises(UserError, match="is not an evaluation"):
            results.load_results(tmp_path)
    for wrong in (["compare", "a", "b", "--alpha", "0.9"], ["eval", "recipes/quickstart.py", "--repeats", "3"]):
        done = CliRunner().invoke(app, wrong)
        assert isinstance(done.exception, UserError), done.output
    done = CliRunner().invoke(app, ["eval", "recipes/quickstart.py", "--suite", str(tmp_path)])
    assert isinstance(done.exception, UserError) and "is not a suite" in str(done.exception)


async def test_a_missing_verifier_is_reported_before_anything_starts(tmp_path: Path) -> None:

    task = replace(test_gate.make_suite().cases[0].task, verifiers=("rewards.gone:nothing",))
    save_case(tmp_path, Case(id="a", task=task))
    checked = cast(PreflightResult, SimpleNamespace(scorer=TaskScorer()))
    start = RunStart(recipe=Path("r.py"), folder=tmp_path, overrides=())
    with pytest.raises(PluginError, match=r"rewards\.gone"):
        await suites.evaluate_suite(test_gate.RECIPE, start, checked, load_suite(tmp_path), repeats=1, threshold=1.0, root=tmp_path)


def test_suites_are_reported_over_versions_with_a_plot(tmp_path: Path) -> None:
    about = results.EvaluationInfo(
        suite="s", suite_sha256="a", cases=2, repeats=1, model="m", version=0, sha256="0123456789abcdef", recipe="r", recipe_sha256="",
        sampling={}, seed=0, threshold=1.0, agentrl="0", at="2026-11-23T00:00:00+00:00", wall_s=3.0,
    )  # fmt: skip

    def evaluated(folder: str, version: int, *scores: float | None, **more: Any) -> None:
        attempts = [
            results.CaseAttempt(case=f"c{n % 2}", task_key="k", number=n // 2, episode="e", score=score, tokens=10, turns=2, wall_s=1.5)
            for n, score in enumerate(scores)
        ]
        results.save_results(
            tmp_path / folder, results.SuiteResults(about=replace(about, version=version, **more), attempts=tuple(attempts)), []
        )

    evaluated("run/gate/000000", 0, 0.0, 0.0, 1.0, 0.0)
    evaluated("run/gate/000004", 4, 1.0, 1.0, 1.0, 0.0)
    evaluated("later/suite", 8, 1.0, None, 1.0, 1.0, suite_sha256="b", suite="s")
    evaluated("other/suites/a", 0, 1.0, 1.0, suite="a\x1b[31m")
    for unfinished in ("run/gate/.000008.part", "other/suites/.b.part"):
        evaluated(unfinished, 0, 1.0)
        (tmp_path / unfinished / results.ATTEMPTS).unlink()
    asked = ["history", *(str(tmp_path / name) for name in ("run", "later", "other"))]
    page = tmp_path / "h.html"
    done = CliRunner().invoke(app, [*asked, "--out", str(page)])
    assert done.exception is None, done.exception
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.strip()}
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
    assert "\x1b" not in done.stdout and "pass@k" in page.read_text() and page.read_text().count("data-chart=") == 2
    first, other = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert [row["version"] for row in first["rows"]] == [0, 4, 8] and len(other["rows"]) == 1
    evaluated("hostile", 1, 1.0, at="\x1b]0;mine\x07\nnow", sha256="\x1b[2J\x07")
    shown = CliRunner().invoke(app, ["history", str(tmp_path / "hostile")]).stdout
    assert "mine" in shown and len(shown.splitlines()) == 3
    shown += CliRunner().invoke(app, ["compare", *[str(tmp_path / "hostile")] * 2]).stdout
    assert "verdict" in shown and not {"\x1b", "\x07"} & set(shown)
    wrong = CliRunner().invoke(app, ["history", str(tmp_path / "nothing")])
    assert isinstance(wrong.exception, UserError) and "no folder" in str(wrong.exception)
    assert isinstance(CliRunner().invoke(app, [*asked, "--out", str(tmp_path)]).exception, UserError)
