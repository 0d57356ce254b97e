"""Demonstrations have mixed quality, are short, and use the token format of rollouts."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest

from agentrl.records import Split
from sandboxes.tables import Tables
from sandboxes.tables.demonstrations import CAREFUL, GUESS, Act, call, demonstrate
from sandboxes.tables.kinds import BY_NAME

FAMILY = Tables(seed=0)
COUNT = 600


def demonstration(index: int) -> list[Act]:
    return demonstrate(FAMILY.task(Split.TRAIN, index), Random(index))


def arguments(act: Act) -> dict[str, str]:
    body = json.loads(act.completion.removeprefix("<tool_call>\n").removesuffix("\n</tool_call><|im_end|>"))
    return {"tool": body["name"], **body["arguments"]}


def test_a_call_is_written_as_one_json_object_between_the_markers() -> None:
    act = Act(completion=call("python", code="print('é')\n"), observation="é")
    assert act.completion == '<tool_call>\n{"name": "python", "arguments": {"code": "print(\'é\')\\n"}}\n</tool_call><|im_end|>'
    assert arguments(act) == {"tool": "python", "code": "print('é')\n"}


@pytest.mark.slow
def test_demonstrations_end_by_submitting_the_printed_output() -> None:
    for index in range(COUNT):
        acts = demonstration(index)
        assert 1 <= len(acts) <= 3 and acts[-1].observation is None and arguments(acts[-1])["tool"] == "submit"
        if len(acts) > 1:
            assert arguments(acts[-1])["answer"] == acts[-2].observation
            assert "Traceback" not in str(acts[-2].observation)


@pytest.mark.slow
def test_about_half_of_the_programs_are_right_and_every_mistake_occurs() -> None:
    counts: Counter[str] = Counter()
    for index in range(COUNT):
        task, acts = FAMILY.task(Split.TRAIN, index), demonstration(index)
        kind, names = BY_NAME[task.data["kind"]], task.data["names"]
        if len(acts) == 1:
            counts["guess"] += 1
            continue
        code = arguments(acts[-2])["code"]
        programs = [FAMILY.gold(task), *(kind.program(names, body) for body in kind.sloppy)]
        counts[("right", "common", "rare")[programs.index(code)]] += 1
    assert abs(counts["guess"] / COUNT - GUESS) < 0.04
    assert abs(counts["right"] / COUNT - CAREFUL * (1 - GUESS)) < 0.08
    assert counts["common"] > counts["rare"] > 20


def test_misspelt_program_is_not_trained_on_and_is_rewritten() -> None:
    task = FAMILY.task(Split.TRAIN, 0)
    first, second, last = demonstrate(task, Random(0), careful=1.0, guess=0.0, misspelt=1.0)
    assert not first.learn and "Error" in str(first.observation)
    assert second.learn and last.learn and arguments(second)["code"] == FAMILY.gold(task)
