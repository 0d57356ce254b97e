"""Suites evaluated without a recipe: statuses by threshold, details of a failure, JUnit and JSON, the exit code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree as xml

import pytest
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.config import Part, load
from agentrl.errors import PluginError, UserError
from agentrl.evaluation import open_policy, results, suites
from agentrl.evaluation.outcomes import CaseStatus, case_status, xml_text
from agentrl.evaluation.policies import NamedPolicy, PolicySource, find_policy, load_policy_plugin, project_of, recipe_for, recipe_policy
from agentrl.experience.episode_index import EpisodeIndex
from agentrl.experience.episode_query import EpisodeQuery
from agentrl.failure.case import Baseline, load_suite, save_case
from agentrl.records import EpisodeState
from agentrl.reward import TaskScorer
from agentrl.session.folder import RunStart
from agentrl.session.preflight import PreflightResult
from agentrl.testing import ScriptedPolicy, byte_tokenizer
from tests.evaluation.suite_parts import HERE, OVERRIDES, make_case, make_suite
from tests.failure.traces import python, scored, turn
from tests.gate import gated_run

POLICY = f"{HERE}:policy"
scripted = gated_run.scripted


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_eval(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["eval", *map(str, arguments), *OVERRIDES, "--policy", POLICY])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


def test_every_case_has_a_status_that_decides_the_exit_code(project: Path) -> None:
    pinned = Baseline(model="m", version=3, scores=(0.0, None))
    first = make_suite(
        project / "evals" / "one",
        make_case("good"),
        make_case("bad", baseline=pinned),
        make_case("flaky", threshold=0.5, repeats=4),
        make_case("flaky_strict", threshold=0.75, repeats=4),
    )
    second = make_suite(project / "evals" / "two", make_case("broken"), make_case("good"))
    code, output = run_eval(project / "evals", "--junit", project / "out.xml", "--run-dir", project / "r", "--json")
    report = json.loads(output.splitlines()[-1])
    assert code == 1 and not report["passed"]
    verdicts = {(case["suite"], case["case"]): (case["verdict"], case["scores"], case["threshold"]) for case in report["cases"]}
    assert verdicts == {
        ("one", "bad"): ("failed", [0.0], 1.0),
        ("one", "flaky_strict"): ("failed", [1.0, 0.0, 1.0, 0.0], 0.75),
        ("one", "flaky"): ("passed", [1.0, 0.0, 1.0, 0.0], 0.5),
        ("one", "good"): ("passed", [1.0], 1.0),
        ("two", "broken"): ("unscored", [None], 1.0),
        ("two", "good"): ("passed", [1.0], 1.0),
    }
    assert [case["case"] for case in report["cases"]][:3] == ["bad", "flaky_strict", "broken"], "failed first, then unscored"
    bad = report["cases"][0]
    assert (bad["shown"]["tag"], bad["shown"]["turn"]) == ("wrong_answer", None), bad["shown"]
    assert report["suites"][0]["figures"]["pass_at_1"] == 0.5, "an attempt passes at its case's threshold"
    assert bad["shown"]["answer"].startswith("fail") and "wanted pass" in bad["shown"]["evidence"] and bad["baseline"]["version"] == 3

    document = xml.fromstring((project / "out.xml").read_bytes())
    counts = [{key: suite.get(key) for key in ("name", "tests", "failures", "errors")} for suite in document]
    assert counts == [
        {"name": "one", "tests": "4", "failures": "2", "errors": "0"},
        {"name": "two", "tests": "2", "failures": "0", "errors": "1"},
    ]
    texts = "".join(document.itertext())
    assert "agentrl failures show" in texts and "What is case bad?" in texts and "no judge" in texts
    assert not any(c in texts for c in "\x1b\x00\u202e\ufffe")

    stored = results.load_results(project / "r" / "suites" / "one")
    assert len(stored.attempts) == 10 and stored.scores()["flaky"] == [1.0, 0.0, 1.0, 0.0]
    assert results.load_results(project / "r" / "suites" / "two").scores() == {"broken": [None], "good": [1.0]}
    assert load(project / "r" / "recipe.json").policy.model == POLICY, "the run folder records its command"
    attempts = project / "r" / "suites" / "one" / "attempts.jsonl"
    complete = attempts.read_bytes()
    attempts.write_bytes(complete.rstrip(b"\n"))
    assert results.load_results(attempts.parent) == stored, "a last record without a line break is complete"
    attempts.write_bytes(complete[:-9])
    with pytest.raises(UserError, match="is not an evaluation of a suite"):
        results.load_results(attempts.parent)
    assert load_suite(first.folder) == first and load_suite(second.folder) == second, "cases are unchanged"

    details = CliRunner().invoke(app, ["failures", "show", str(project / "r"), bad["shown"]["episode"]])
    assert details.exit_code == 0 and "What is case bad?" in details.stdout


def test_episodes_of_different_suites_have_different_ids(project: Path) -> None:
    make_suite(project / "evals" / "math", make_case("hard-good"))
    make_suite(project / "evals" / "math-hard", make_case("good"))
    run_eval(project / "evals", "--run-dir", project / "r")
    attempts = [*_attempts(project / "r" / "suites" / "math"), *_attempts(project / "r" / "suites" / "math-hard")]
    assert [attempt.episode for attempt in attempts] == ["math:hard-good-r0-a0", "math-hard:good-r0-a0"]


def test_a_passing_policy_exits_with_0_and_can_be_pinned(project: Path) -> None:
    suite = make_suite(project / "s", make_case("good"), make_case("flaky", threshold=0.5))
    code, output = run_eval(suite.folder, "--repeats", "2", "--pin", "--run-dir", project / "r")
    assert code == 0 and "s: 2 of 2 cases passed, 0 failed" in output and "pass@1  0.750" in output
    baselines = {case.id: case.baseline for case in load_suite(suite.folder).cases}
    assert [baseline is not None and baseline.scores for baseline in baselines.values()] == [(1.0, 0.0), (1.0, 1.0)]
    assert (project / "r" / "suite" / "about.json").is_file(), "agentrl compare reads this path"


def test_a_failed_case_is_printed_readably_without_escape_sequences(project: Path) -> None:
    suite = make_suite(project / "s", make_case("bad"), make_case("good"))
    code, output = run_eval(suite.folder, "--run-dir", project / "r")
    assert code == 1 and "\x1b" not in output and "\u202e" not in output
    lines = [text.strip() for text in output.splitlines()]
    at = next(number for number, text in enumerate(lines) if text.startswith("failed"))
    assert lines[at] == "failed    bad  0.00 of 1 in 1 attempt" and lines[at + 1] == "question  What is case bad?"
    assert lines[at + 2].startswith("answer    fail") and lines[at + 3].startswith("evidence  wanted pass")
    assert any(text.startswith("note      seen twice (anna)") for text in lines) and any("failures show" in text for text in lines)


def test_a_case_without_its_image_is_unscored_and_the_others_run(project: Path) -> None:
    suite = make_suite(project / "s", make_case("good"), make_case("good_too", image="gone"))
    code, output = run_eval(suite.folder, "--run-dir", project / "r", "--junit", project / "out.xml")
    assert code == 1 and "s: 1 of 2 cases passed, 0 failed, 1 unscored" in output and "no sandbox image at gone" in output, output
    assert "\x1b" not in output and 'errors="1"' in (project / "out.xml").read_text()


def test_code_that_raises_system_exit_costs_only_its_case(project: Path) -> None:
    names = ("good", "good_leaves", "leaves", "exits")
    suite = make_suite(project / "s", *map(make_case, names))
    code, output = run_eval(suite.folder, "--run-dir", project / "r")
    assert code == 1 and "s: 1 of 4 cases passed, 0 failed, 3 unscored" in output, output
    reasons = {name: attempt.reason for name, attempt in zip(sorted(names), _attempts(project / "r" / "suite"), strict=True)}
    assert "verifier raised RuntimeError: verifier" in reasons["good_leaves"] and "suite_parts.py:" in reasons["good_leaves"], reasons
    assert "the agent raised KeyboardInterrupt" in reasons["leaves"] and "suite_parts.py:" in reasons["leaves"], reasons
    assert "SystemExit: 0" in reasons["exits"], reasons


def _attempts(evaluation: Path) -> list[results.CaseAttempt]:
    return sorted(results.load_results(evaluation).attempts, key=lambda attempt: attempt.case)


def test_unusable_suites_are_reported_before_anything_runs(project: Path) -> None:
    suite = make_suite(project / "s", make_case("good"))
    for more, messages in ((["--threshold", "nan"], "--threshold nan"), (["--policy", f"{HERE}:make_case"], "'make_case|policy")):
        run = CliRunner().invoke(app, ["eval", str(suite.folder), *OVERRIDES, "--policy", POLICY, *more, "--run-dir", str(project / "r")])
        assert isinstance(run.exception, UserError), run.output
        assert any(message in str(run.exception) for message in messages.split("|")), run.exception
        assert not (project / "r" / "recipe.json").exists(), "the folder contains no run"


def test_pinning_keeps_cases_changed_in_the_meantime(project: Path) -> None:
    suite = make_suite(project / "s", make_case("good"), make_case("flaky"), make_case("bad"))
    evaluation = cast(
        Any, SimpleNamespace(suite=suite, results=SimpleNamespace(about=SimpleNamespace(model="m", version=1, sha256="", at="now")))
    )
    evaluation.outcomes = [SimpleNamespace(case=case, mean=1.0, scores=(1.0,)) for case in suite.cases]
    good, other = load_suite(suite.folder).cases[2], make_case("flaky")
    save_case(suite.folder, replace(good, note="edited"))
    save_case(suite.folder, replace(other, task=replace(other.task, data={"answer": "x"})))
    (suite.folder / "cases" / "bad.json").unlink()
    assert suites.pin_baselines([evaluation]) == 1
    current = {case.id: case for case in load_suite(suite.folder).cases}
    assert sorted(current) == ["flaky", "good"] and current["good"].note == "edited"
    assert current["good"].baseline is not None and current["flaky"].baseline is None


def test_a_case_that_starts_elsewhere_is_not_pinned(project: Path) -> None:
    suite = make_suite(project / "s", make_case("good"))
    (case,) = suite.cases
    episode = scored(turn(python("print(97)", "97")), answer="97").episode
    start = EpisodeState(
        episode_id="e",
        task_key=case.task.key,
        attempt=0,
        trajectories=(replace(episode.trajectories[0], stop_reason=""),),
        prompt_ids=((1,),),
    )
    evaluation = cast(
        Any, SimpleNamespace(suite=suite, results=SimpleNamespace(about=SimpleNamespace(model="m", version=1, sha256="", at="now")))
    )
    evaluation.outcomes = [SimpleNamespace(case=case, mean=1.0, scores=(1.0,))]
    save_case(suite.folder, replace(case, start=start))
    assert suites.pin_baselines([evaluation]) == 0 and load_suite(suite.folder).cases[0].baseline is None
    evaluation.outcomes[0].case = replace(case, start=start)
    assert suites.pin_baselines([evaluation]) == 1


@pytest.mark.parametrize(
    ("scores", "threshold", "verdict"),
    [
        ((1.0, 1.0), 1.0, CaseStatus.PASSED),
        ((0.1,) * 10, 0.1, CaseStatus.PASSED),  # rounding of the mean must not fail a case
        ((1.0, None), 1.0, CaseStatus.UNSCORED),  # a missing score may be a failure
        ((0.0, None), 1.0, CaseStatus.FAILED),
        ((None,), 0.0, CaseStatus.UNSCORED),
        ((), 0.0, CaseStatus.UNSCORED),
    ],
)
def test_a_fault_is_never_a_score(scores: tuple[float | None, ...], threshold: float, verdict: CaseStatus) -> None:
    assert case_status(scores, threshold) is verdict


def test_only_text_that_xml_cannot_contain_is_replaced() -> None:
    characters = "".join(chr(code) for code in range(0x3000)) + "\ud800\udfff\ufffe\uffff\U0001f600"
    element = xml.Element("a", b=xml_text(characters))
    element.text = xml_text(characters)
    parsed = xml.fromstring(xml.tostring(element))
    assert parsed.text == xml_text(characters)
    assert xml_text("a\tb\nc é 漢 😀 <&>") == "a\tb\nc é 漢 😀 <&>"


@pytest.mark.usefixtures("scripted")
async def test_a_model_folder_is_served_and_only_its_version_counts(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is scripted; `agentrl eval` opens the other parts of a run."""
    run = await gated_run.open_run(project / "r")
    run.learner, tokenizer = SimpleNamespace(kill=None), byte_tokenizer()
    script = load_policy_plugin(find_policy(POLICY)).script
    watched: list[str] = []

    @asynccontextmanager
    async def open_scripted_run(*_: object, **__: object) -> AsyncIterator[Any]:
        yield run

    async def watch(*, on_loss: object) -> None:
        watched.append("begun")
        await asyncio.Event().wait()

    monkeypatch.setattr(open_policy, "open_run", open_scripted_run)
    monkeypatch.setattr(run.served, "watch", watch)
    evaluations: list[suites.SuiteEvaluation] = []
    for version in (0, 1):
        policy = ScriptedPolicy(tokenizer, script, version=version)
        run.groups = replace(run.groups, runner=replace(run.groups.runner, policy=policy))
        prepared = open_policy.PreparedEvaluation(
            policy=NamedPolicy(source=PolicySource.VERSION, name="runs/x@12", model="/home/me/runs/x/versions/000012"),
            suites=(make_suite(project / f"s{version}", make_case("good"), make_case("bad")),),
            recipe=gated_run.RECIPE,
            root=project,
            start=RunStart(recipe=Path("s"), folder=project / "r", overrides=()),
            repeats=None,
            threshold=1.0,
            checked=cast(PreflightResult, object()),
            scorer=TaskScorer(),
        )
        evaluations += await suites.evaluate_suites(prepared, console=False)
        with EpisodeIndex(run.folder) as index:
            rows = index.search(EpisodeQuery(phase="eval")).rows
        assert {row.task_id for row in rows} == {case.task.id for case in prepared.suites[0].cases}, "no row of an earlier evaluation"
    same_version, other_version = ({outcome.case.id: outcome for outcome in evaluation.outcomes} for evaluation in evaluations)
    assert (same_version["good"].status, same_version["bad"].status) == ("passed", "failed") and watched == ["begun", "begun"]
    about = evaluations[0].results.about
    assert (about.sha256, about.model, about.version) == (run.registry.get(0).sha256, "runs/x@12", 12)
    assert suites.pin_baselines(evaluations[:1]) == 2
    pinned = load_suite(evaluations[0].suite.folder).cases[0].baseline
    assert pinned is not None and (pinned.model, pinned.version) == ("runs/x@12", 12), "not a local folder"
    assert {outcome.status for outcome in other_version.values()} == {"unscored"}, "tokens of another version do not count"
    await gated_run.plain.close(run)


def test_a_version_uses_its_runs_settings_and_a_folder_the_defaults(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    suite = make_suite(project / "s", make_case("good"))
    run = project / "runs" / "x"
    model = run / "versions" / "000012"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"max_position_embeddings": 512}')
    folder_recipe = recipe_for(find_policy(str(model)), [suite], ["rollout.concurrency=3"])
    assert (folder_recipe.policy.model, folder_recipe.policy.max_model_len, folder_recipe.rollout.concurrency) == (str(model), 512, 3)
    settings = folder_recipe.model_dump(mode="json")
    settings["policy"] |= {"max_model_len": 333, "chat_template": "chatml"}
    settings["evaluation"] |= {"sampling": {"temperature": 0.5}, "heldout": 7, "attempts": 4, "every": 2, "thinking_tokens": [64]}
    settings["gate"], settings["name"] = {"suite": "s"}, "theirs"
    (run / "recipe.json").write_text(json.dumps(settings))
    policy = find_policy("runs/x@12")
    assert (policy.source, policy.model, policy.served, policy.version) == (PolicySource.VERSION, str(model.resolve()), True, 12)
    recipe = recipe_for(policy, [suite])
    assert find_policy(str(model)).version == 0 and recipe_policy(recipe).version == 12
    assert (recipe.policy.max_model_len, recipe.policy.chat_template, recipe.evaluation.sampling.temperature) == (333, None, 0.5)
    assert (recipe.gate, recipe.evaluation.heldout, recipe.name, recipe.trackers) == (None, 0, "s", (Part("terminal"),))
    assert project_of([suite]) == project


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["s", "--policy", "nowhere"], "no such folder or version"),
        (["s", "--policy", "runs/x@9"], "has no complete model of version 9"),
        (["s"], "its suite.toml sets no policy"),
        (["nothing", "--policy", "a:b"], "no folder nothing"),
        (["s", "--policy", "a:b", "--suite", "s"], "--policy and --suite cannot be combined"),
        (["s", "--policy", "a:b", "--junit", "no/such/folder.xml"], "its folder does not exist"),
        (["s", "--policy", "a:b", "--repeats", "0"], "--repeats 0"),
        (["s", "same/s", "--policy", "a:b"], "two suites have the name 's'"),
        (["s", "--policy", "a:b", "rollout.size=3"], "rollout.size: unknown key"),
        (["s", "--policy", "http://127.0.0.1/v1"], "an endpoint needs the name of its model"),
        (["s", "--policy", "http://u:secret@127.0.0.1/v1", "--model", "m"], "without a user, a password"),
        (["s", "--policy", "http://[::1/v1", "--model", "m"], "must be http(s)://HOST/PATH"),
        (["s", "--policy", "http://127.0.0.1:port/v1", "--model", "m"], "must be http(s)://HOST/PATH"),
        (["s", "--policy", "a:b", "--key-env", "KEY"], "require an endpoint"),
        (["s", "--policy", "http://127.0.0.1/v1", "--model", "m", "evaluation.sampling.top_k=3"], "chat completions do not support top_k"),
        (["recipes/x.py", "--junit", "x.xml"], "need --policy"),
    ],
)
def test_misuse_is_reported_with_a_fix(project: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    monkeypatch.chdir(project)
    make_suite(project / "s", make_case("good"))
    make_suite(project / "same" / "s", make_case("good"))
    (project / "runs" / "x" / "versions").mkdir(parents=True)
    result = CliRunner().invoke(app, ["eval", *arguments])
    assert isinstance(result.exception, UserError) and message in str(result.exception), result.exception
    assert any(word in str(result.exception) for word in ("fix:", "known here:")), "the error has a fix"


def test_a_plugin_that_returns_no_policy_is_reported() -> None:
    with pytest.raises(PluginError, match="generate"):
        load_policy_plugin(find_policy(f"{HERE}:no_policy"))
