"""Calibration of a judge end to end: a real endpoint, the command, and the file that a recipe requires."""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from agentrl.errors import UserError
from agentrl.judge import Comparison
from agentrl.judge.calibrate import calibrate as measure
from agentrl.judge.labels import AnswerItem, LabelledAnswer, preference_pairs, read_labels
from agentrl.judge.query import JudgeAnswer
from agentrl.judge.reward_model import save_record
from agentrl.reward import TaskScorer
from agentrl.testing import ChatServer, ScriptedAnswer
from tests.commands import agentrl

N = 64
JUDGE = """
from agentrl.judge import Endpoint, Ensemble, Judge, Listwise, Pairwise, Prices, RewardModel, ScoreEndpoint
from agentrl.judge.scoring import CORRECT, HELPFUL

one = Endpoint(url="{url}", model="scripted", prices=Prices(prompt=1.0, completion=2.0), patience_s=5.0)
judge = Judge(endpoint=one, form=CORRECT)
strict = Judge(endpoint=one, form=CORRECT, calibration="c.json", min_agreement=0.7)
talkative = Judge(endpoint=one, form=CORRECT, calibration="c.json", min_coverage=0.8)
stricter = Judge(endpoint=one, form=CORRECT, calibration="c.json", min_agreement=0.95)
changed = Judge(endpoint=one, form=HELPFUL, calibration="c.json")
both = Ensemble(judges={{"strict": strict, "again": Judge(endpoint=Endpoint(url="{url}", model="scripted", seed=1), form=CORRECT)}})
pairs = Pairwise(endpoint=one)
numbers = ScoreEndpoint(url="{url}", model="scripted")
trained = RewardModel(endpoint=numbers, folder=".")
trusted = RewardModel(endpoint=numbers, folder=".", calibration="c.json", min_agreement=0.8)


async def by_key(task, episode):
    from agentrl.records import Score
    return Score(value=float(task.data["solution"] in episode.answer))


class Keyed:
    reference = "solution"
    __call__ = staticmethod(by_key)


panel = Ensemble(judges={{"one": Keyed(), "other": Keyed()}})


async def plain(task, episode):
    from agentrl.records import Score
    return Score(value=float("Paris" in episode.answer))


async def breaks(task, episode):
    raise ValueError("a bug")
"""


def fraction_of(text: str) -> float:
    """A hash of the text as a number from 0 to 1."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48


def verdict(right: bool) -> ScriptedAnswer:
    return ScriptedAnswer(json.dumps({"reasoning": "r", "scores": {"correct": int(right)}, "abstain": False}))


def answer_in(body: dict[str, object], name: str = "ANSWER") -> str:
    match = re.search(rf"<<<BEGIN {name} \w+>>>\n(.*?)\n<<<END", body["messages"][1]["content"], re.DOTALL)  # type: ignore[index]
    assert match
    return match[1]


def flipping(share: float) -> Callable[[dict[str, object], int], ScriptedAnswer]:
    """A judge that gives the opposite of the correct verdict on a share of the answers, always the same ones."""
    return lambda body, number: verdict(("Paris" in answer_in(body)) != (fraction_of(answer_in(body)) < share))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with (tmp_path / "labels.jsonl").open("w") as file:
        for number in range(N):
            right = number % 2 == 0
            answer = f"{'Paris' if right else 'Lyon'}, I say for the {number}th time"
            line = {"question": "Capital of France?", "task_id": f"t{number // 4}", "answer": answer, "reference": "Paris"}
            file.write(json.dumps({**line, "label": "right" if right else "wrong", "by": "anna"}) + "\n")
    yield tmp_path


def write_judges(project: Path, server: ChatServer) -> str:
    """Writes a file of judges that use this server. Names differ, because a module is loaded once."""
    name = f"j{server.url.rsplit(':')[-1].removesuffix('/v1')}.py"
    (project / name).write_text(JUDGE.format(url=server.url))
    return f"./{name}"


def calibrate(project: Path, server: ChatServer, judge: str = "judge", *options: str) -> tuple[int, dict[str, object], str]:
    process = agentrl("judge", "calibrate", f"{write_judges(project, server)}:{judge}", "labels.jsonl", "--json", *options)
    return process.returncode, json.loads(process.stdout) if process.stdout else {}, process.stderr


@pytest.mark.slow
def test_ten_percent_of_flipped_verdicts_are_reported_as_such(project: Path) -> None:
    with ChatServer(flipping(0.1)) as server:
        code, report, _ = calibrate(project, server, "judge", "--out", "c.json", "--cache", "a.sqlite")
        output = agentrl("judge", "calibrate", f"{write_judges(project, server)}:judge", "labels.jsonl", "--cache", "a.sqlite").stdout
        assert code == 0 and len(server.requests) == N
    agreement = report["agreement"]
    assert agreement["low"] <= 0.9 <= agreement["high"] < 1.0 and agreement["n"] == N  # type: ignore[index]
    for name in ("sensitivity", "specificity"):
        assert report[name]["low"] <= 0.9 <= report[name]["high"]  # type: ignore[index]
    assert report["kappa"]["low"] <= 0.8 <= report["kappa"]["high"] and report["tasks"] == N // 4  # type: ignore[index]
    assert report["more"]["spent"]["money"] == pytest.approx(N * (100 * 1 + 10 * 2) / 1e6)  # type: ignore[index]
    assert "Cohen's kappa" in output and "the design effect of informedness is" in output and f"0 calls, {N} cached answers" in output
    rate = json.loads(agentrl("judge", "correct", "c.json", "740", "1000", "--json").stdout)
    assert rate["judged"] == 0.74 and rate["low"] <= 0.8 <= rate["high"], "0.8 * 0.9 + 0.2 * 0.1 = 0.74"
    assert "corrected" in agentrl("judge", "correct", "c.json", "740", "1000").stdout
    picture = ElementTree.parse(project / "c.svg").getroot()
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}circle"))) >= 2 + 5


def test_copies_of_an_answer_count_once(project: Path) -> None:
    lines = (project / "labels.jsonl").read_text().splitlines()[:8]
    copies = [json.dumps({**json.loads(line), "id": f"{number}-{copy}"}) for number, line in enumerate(lines) for copy in range(50)]
    (project / "labels.jsonl").write_text("\n".join(copies) + "\n")
    with ChatServer(flipping(0.0)) as server:
        _, report, _ = calibrate(project, server)
    assert report["agreement"]["n"] == 8 and report["agreement"]["low"] < 0.7, "400 of 400 would be above 0.99"  # type: ignore[index]
    assert report["more"]["copies"] == 392  # type: ignore[index]


def test_members_of_an_ensemble_get_the_reference_under_their_keys(project: Path) -> None:
    with ChatServer([]) as server:
        code, report, error_text = calibrate(project, server, "panel")
    assert code == 0 and report["agreement"]["value"] == 1.0, error_text  # type: ignore[index]


@pytest.mark.slow
def test_reward_model_is_measured_like_any_judge(project: Path) -> None:
    (project / "model.safetensors").write_bytes(b"weights")
    save_record(project, shows=("reference", "answer"), offset=0.0, scale=1.0, max_tokens=99)

    def score(body: Mapping[str, object], number: int) -> ScriptedAnswer:
        return ScriptedAnswer(number=3.0 if "## answer\nParis" in str(body["input"]) else -3.0)

    with ChatServer(score) as server:
        code, report, error_text = calibrate(project, server, "trained", "--out", "c.json")
        TaskScorer(root=project).load([f"{write_judges(project, server)}:trusted"])
    assert code == 0 and report["agreement"]["value"] == 1.0 and report["identity"], error_text  # type: ignore[index]
    assert {request["path"] for request in server.requests} == {"/classify"} and len(server.requests) == N
    labelled = read_labels([project / "labels.jsonl"])
    pairs = preference_pairs(labelled, ("reference", "answer"), per_task=1)
    inputs = {str(request["body"]["input"]) for request in server.requests}  # in any order
    assert len(pairs) == N // 4 and all({pair.chosen, pair.rejected} <= inputs for pair in pairs)
    assert all("## answer\nLyon" in pair.rejected for pair in pairs)
    save_record(project, shows=("answer",), offset=0.0, scale=1.0, max_tokens=99)
    with ChatServer(score) as server, pytest.raises(UserError, match="belongs to a different model"):
        TaskScorer(root=project).load([f"{write_judges(project, server)}:trusted"])


@pytest.mark.slow
def test_required_calibration_must_exist_and_be_good_enough(project: Path) -> None:
    with ChatServer(flipping(0.1)) as server:
        file = write_judges(project, server)

        def load(name: str) -> None:
            TaskScorer(root=project).load([f"{file}:{name}"])

        for name in ("strict", "both"):
            with pytest.raises(UserError, match="there is no calibration"):
                load(name)
        calibrate(project, server, "strict", "--out", "c.json")  # a judge that requires a calibration can be measured without one
        for name in ("strict", "both", "judge"):
            load(name)
        with pytest.raises(UserError, match=r"its agreement is 0\.\d+ .* the lower end must be at least 0.95"):
            load("stricter")
        with pytest.raises(UserError, match="belongs to a different model, prompt or setting"):
            load("changed")
        for broken in ("{", "[]", '{"format": 9}', "\x00"):
            (project / "c.json").write_text(broken)
            with pytest.raises(UserError, match="not a calibration"):
                load("strict")


@pytest.mark.slow
def test_labels_without_a_majority_are_reported(project: Path) -> None:
    line = {"question": "q", "answer": "a"}
    for labels in ([], ["skip"], ["right", "wrong"]):
        rows = [json.dumps({**line, "label": label, "by": f"labeller {number}"}) + "\n" for number, label in enumerate(labels)]
        (project / "labels.jsonl").write_text("".join(rows))
        with ChatServer([]) as server:
            code, _, error_text = calibrate(project, server)
        assert code == 2 and "no answer has a majority for right or wrong" in error_text


@pytest.mark.slow
def test_judge_no_better_than_chance_raises(project: Path) -> None:
    with ChatServer(flipping(0.5)) as server:
        code, report, _ = calibrate(project, server, "strict", "--out", "c.json")
        assert code == 1 and report["informedness"]["low"] <= 0  # type: ignore[index]
        with pytest.raises(UserError, match="not shown to be better than chance"):
            TaskScorer(root=project).load([f"{write_judges(project, server)}:strict"])
        assert "better than chance" in agentrl("judge", "correct", "c.json", "60", "100").stderr


@pytest.mark.slow
def test_abstentions_count_in_coverage_but_not_in_agreement(project: Path) -> None:
    def script(body: dict[str, object], number: int) -> ScriptedAnswer:
        return ScriptedAnswer("I am sorry.") if fraction_of(answer_in(body)) < 0.2 else verdict("Paris" in answer_in(body))

    with ChatServer(script) as server:
        code, report, _ = calibrate(project, server, "talkative", "--out", "c.json")
        assert report["coverage"]["value"] == pytest.approx(1 - report["abstained"] / N)  # type: ignore[index,operator]
        TaskScorer(root=project).load([f"{write_judges(project, server)}:judge"])
        with pytest.raises(UserError, match=r"its coverage is 0\.\d+ .* the lower end must be at least 0.8"):
            TaskScorer(root=project).load([f"{write_judges(project, server)}:talkative"])
        older = {key: value for key, value in json.loads((project / "c.json").read_text()).items() if key != "coverage"}
        (project / "c.json").write_text(json.dumps(older))
        with pytest.raises(UserError, match="has no coverage"):
            TaskScorer(root=project).load([f"{write_judges(project, server)}:talkative"])
    expected = sum(fraction_of(json.loads(line)["answer"]) < 0.2 for line in (project / "labels.jsonl").read_text().splitlines())
    assert code == 0 and report["abstained"] == expected > 4 and report["agreement"]["value"] == 1.0  # type: ignore[index]
    assert report["more"]["reasons"] == {"judge: unreadable verdict: it is not a JSON object": expected}  # type: ignore[index]


@pytest.mark.slow
def test_pairs_reveal_position_bias(project: Path) -> None:
    def script(share: float) -> Callable[[dict[str, object], int], ScriptedAnswer]:
        def says(body: dict[str, object], number: int) -> ScriptedAnswer:
            a, b = answer_in(body, "ANSWER A"), answer_in(body, "ANSWER B")
            prefers_first = fraction_of(min(a, b) + max(a, b)) < share
            return ScriptedAnswer(json.dumps({"reasoning": "", "better": "A" if prefers_first or "Paris" in a else "B", "abstain": False}))

        return says

    with ChatServer(script(0.4)) as server:
        code, report, _ = calibrate(project, server, "pairs")
    extra = report["more"]
    assert code == 0 and extra["pairs"] and extra["position_bias"]["low"] > 0.5  # type: ignore[index]
    assert extra["inconsistent"]["low"] <= 0.4 <= extra["inconsistent"]["high"]  # type: ignore[index]
    assert report["agreement"]["value"] == 1.0 and report["abstained"] > 0  # type: ignore[index]
    with ChatServer(script(0.0)) as server:
        _, fair, _ = calibrate(project, server, "pairs")
    assert fair["more"]["position_bias"]["value"] == 0.5 and fair["abstained"] == 0  # type: ignore[index]


class PerfectComparer:
    async def compare(self, problem: str, first: str, second: str) -> Comparison:
        return Comparison(better="first" if "Paris" in first else "second", shown=("A", "B"), answer=JudgeAnswer())


async def test_few_pairs_have_both_labels_and_one_pair_is_not_enough(tmp_path: Path) -> None:
    def labelled(task: int, *answers: str) -> list[LabelledAnswer]:
        items = [AnswerItem(id=answer, question=f"Capital {task}?", answer=answer, task_id=f"t{task}") for answer in answers]
        return [LabelledAnswer(item=item, votes={"anna": "Paris" in item.answer}) for item in items]

    settings: dict[str, Any] = {"reference": "mine:judge", "labels_sha256": "", "root": tmp_path}
    for task in range(20):
        two = labelled(task, "Paris", "Lyon", "Nice")
        report = await measure(PerfectComparer(), two, **settings)
        assert report.calibration.agreement.value == 1.0 and report.calibration.right_right == report.calibration.wrong_wrong == 1
        apart = [*labelled(task, "Paris", "Lyon"), *labelled(task + 1, "Paris", "Nice")]
        assert (await measure(PerfectComparer(), apart, **settings)).calibration.wrong_wrong == 1
        with pytest.raises(UserError, match="only one pair of a correct and a wrong answer"):
            await measure(PerfectComparer(), two[:2], **settings)


@pytest.mark.slow
def test_length_bias_is_measured(project: Path) -> None:
    draw = random.Random(5)
    lines = [json.loads(line) for line in (project / "labels.jsonl").read_text().splitlines()]
    for line in lines:
        line["answer"] += " really" * draw.randrange(40)
    (project / "labels.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with ChatServer(lambda body, number: verdict("Paris" in answer_in(body) or len(answer_in(body)) > 200)) as server:
        _, report, _ = calibrate(project, server)
    assert report["more"]["length_bias"]["low"] > 0.2  # type: ignore[index]
    with ChatServer(flipping(0.2)) as server:
        _, report, _ = calibrate(project, server)
    assert report["more"]["length_bias"]["low"] <= 0 <= report["more"]["length_bias"]["high"]  # type: ignore[index]


def test_any_verifier_can_be_measured_and_failures_are_explained(project: Path) -> None:
    with ChatServer([ScriptedAnswer("")]) as server:
        code, data, text = calibrate(project, server, "plain", "--out", "c.json")
        assert code == 0 and data["identity"] == "" and data["agreement"]["value"] == 1.0 and "no identity" in text  # type: ignore[index]
        code, _, text = calibrate(project, server, "breaks")
        assert code == 2 and f"{N} times: ValueError: a bug" in text
        code, _, text = calibrate(project, server, "one")
        assert code == 2 and "not callable" in text


@pytest.mark.slow
def test_second_measurement_uses_the_cache(project: Path) -> None:
    with ChatServer(flipping(0.1)) as server:
        first = calibrate(project, server, "judge", "--cache", "a.sqlite")[1]
        second = calibrate(project, server, "judge", "--cache", "a.sqlite")[1]
        assert len(server.requests) == N
    assert first["agreement"] == second["agreement"] and second["more"]["spent"]["cached"] == N  # type: ignore[index]
    assert second["more"]["spent"]["calls"] == 0 and second["more"]["spent"]["money"] == 0  # type: ignore[index]
