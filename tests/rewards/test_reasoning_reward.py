"""`own_scorer`: only the truth scores 1; if a scorer fails, its answer is unscored and the next one is scored."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import TaskError
from agentrl.records import Blame, Episode, Message, SandboxSpec, Score, Split, Task
from agentrl.reward import TaskScorer
from rewards import reasoning
from rewards.reasoning import LONGEST, own_scorer
from rewards.reasoning_scorers import CallTimeout, Scorers
from sandboxes.reasoning import catalogue, problems
from sandboxes.reasoning.mixture import Source
from sandboxes.reasoning.problems import Problem

NOTHING = ("", "   ", "None", "[]", "{}", "nan", "-inf", "The answer is correct.", "[" * 900, '{"score": 1.0}', "\ud83d")


@cache
def problem(name: str, number: int = 0) -> Problem:
    return problems.problem(Source(name=name), seed=0, heldout=False, number=number)


def task(example: Problem, **changed: Any) -> Task:
    return Task(
        id="t",
        family="reasoning",
        prompt=(Message(role="user", content=example.question),),
        tools=(),
        sandbox=SandboxSpec(image="sandboxes/tables"),
        verifiers=("rewards.reasoning:own_scorer",),
        data={"kind": example.source.name, "answer": example.answer, "origin": example.origin() | changed},
        split=Split.TRAIN,
    )


async def score(example: Problem, answer: str | None) -> Score:
    return await own_scorer(task(example), Episode(id="e", task_id="t", task_key="k", trajectories=(), answer=answer))


@pytest.fixture(scope="module")
def quick() -> Iterator[Scorers]:
    scorers = Scorers(deadline_s=1.0)
    yield scorers
    scorers.close()


def dataset_names() -> list[str]:
    from sandboxes.reasoning import package

    return [name for name in package.names() if name not in catalogue.LEFT_OUT]


@pytest.mark.models
async def test_truth_scores_1_and_nothing_0_for_every_dataset() -> None:
    """The long version, with more of everything, is docs/generate_reasoning_table.py."""
    for name in dataset_names():
        example = problem(name)
        right = await score(example, example.answer)
        assert (right.value, right.parts["exact"]) == (1.0, 1.0), f"{name}: {right}"
        for answer in (*NOTHING, example.question):
            wrong = await score(example, answer)
            assert wrong.value == 0.0, f"{name} on {answer[:40]!r}: {wrong}"


@pytest.mark.models
async def test_partial_marks_are_kept_as_a_part() -> None:
    example = problem("sentence_reordering")
    words = example.answer.split()
    swapped = " ".join([words[1], words[0], *words[2:]])
    result = await score(example, swapped)
    assert result.value == 0.0 and 0 < result.parts["partial"] < 1 and result.parts["exact"] == 0.0
    assert (await score(example, f"\n {example.answer}\n")).value == 1.0, "white space plays no part"
    assert len((await score(example, "\U0001f600" * 900)).evidence) < 1000


@pytest.mark.parametrize(
    ("name", "answer", "evidence"),
    [
        ("chain_sum", None, "no answer"),
        ("chain_sum", " \n", "no answer"),
        ("chain_sum", "9" * (LONGEST + 1), "more than 1000"),
        ("countdown", "__import__('os').system('true')", "form of countdown"),
        ("countdown", "9**9**9**9", "form of countdown"),
    ],
)
async def test_some_answers_are_wrong_without_calling_the_scorer(name: str, answer: str | None, evidence: str) -> None:
    example = Problem(source=Source(name=name), seed=0, index=0, question="?", answer="24")
    result = await score(example, answer)
    assert result.value == 0.0 and evidence in result.evidence


@pytest.mark.models
async def test_answer_on_which_a_sound_scorer_raises_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the answer were excluded instead, an agent could have only its good answers count."""
    monkeypatch.delitem(catalogue.LANGUAGES, "prime_factorization")  # type: ignore[arg-type]
    result = await score(problem("prime_factorization"), "two times three")
    assert result.value == 0.0 and "the scorer raised ValueError" in result.evidence
    assert (await score(problem("prime_factorization"), problem("prime_factorization").answer)).value == 1.0


@pytest.mark.models
def test_hanging_scorer_is_killed_and_the_next_answer_scored(quick: Scorers) -> None:
    """The excluded scorer evaluates the answer. This one computes for hours in C, where no Python code interrupts it."""
    slow_problem, plain = problem("simple_integration"), problem("chain_sum")
    assert quick.mark(plain.origin(), plain.answer, plain.answer) == 1.0
    with pytest.raises(CallTimeout, match="within 1 s"):
        quick.mark(slow_problem.origin(), slow_problem.answer, "factorial(10**8)")
    assert quick.mark(plain.origin(), plain.answer, plain.answer) == 1.0


@pytest.mark.models
async def test_problem_that_is_no_longer_generated_is_a_task_fault() -> None:
    example = problem("chain_sum")
    other = task(example, index=example.index + 1)
    episode = Episode(id="e", task_id="t", task_key="k", trajectories=(), answer=example.answer)
    with pytest.raises(TaskError, match="no longer generates this problem"):
        await own_scorer(other, episode)
    assert (await TaskScorer()(other, episode)).blame is Blame.TASK


@pytest.mark.parametrize("mark", [float("nan"), 1.5, -1.0])
async def test_scorer_that_fails_on_the_truth_gives_no_score(mark: float, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Scorers):
        def mark(self, *args: Any) -> float:
            return mark

    monkeypatch.setattr(reasoning, "_scorers", Odd())
    example = Problem(source=Source(name="chain_sum"), seed=0, index=0, question="?", answer="24")
    result = await score(example, "3")
    assert result.value is None and "not from 0 to 1" in result.reason


@pytest.mark.parametrize(("times", "value"), [(1, 1.0), (2, 0.0)])
async def test_slow_scorer_is_retried_once(times: int, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    stops = iter([True] * times)

    class Slow(Scorers):
        def mark(self, origin: Any, truth: str, answer: str) -> float:
            if answer != truth and next(stops, False):
                raise CallTimeout("returned no mark within 5 s")
            return 1.0

    monkeypatch.setattr(reasoning, "_scorers", Slow())
    example = Problem(source=Source(name="chain_sum"), seed=0, index=0, question="?", answer="24")
    result = await score(example, "3")
    assert result.value == value and ("answer '3': the scorer returned no mark" in result.evidence) == (value == 0.0)


@pytest.mark.models
def test_terminal_interrupt_does_not_reach_the_scorers(quick: Scorers) -> None:
    plain = problem("chain_sum")
    assert quick.mark(plain.origin(), plain.answer, plain.answer) == 1.0
    process = quick._worker._children[0]._process
    assert process is not None and os.getpgid(process.pid) != os.getpgid(0)


async def test_cancelled_answers_are_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[str] = []

    class Slow(Scorers):
        def mark(self, origin: Any, truth: str, answer: str) -> float:
            answers.append(answer)
            time.sleep(0.3)
            return 1.0

    monkeypatch.setattr(reasoning, "_scorers", Slow())
    example = Problem(source=Source(name="chain_sum"), seed=0, index=0, question="?", answer="24")
    waiting = [asyncio.create_task(score(example, str(number))) for number in range(40)]
    await asyncio.sleep(0.1)
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "done"), 0.15) == "done", "the waiting answers block nothing else"
    for waiting_task in waiting:
        waiting_task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (await asyncio.wait_for(score(example, "the next"), 5.0)).value == 1.0
    assert answers == ["0", "the next"]


@pytest.mark.models
async def test_many_answers_at_once() -> None:
    examples = [problem(name, number) for number in range(8) for name in ("chain_sum", "lcm", "spell_backward", "number_sorting")]
    scores = await asyncio.gather(*(score(example, example.answer if index % 2 else "7 of 9") for index, example in enumerate(examples)))
    assert [result.value for result in scores] == [float(index % 2) for index in range(len(examples))]


def derived(truth: str, question: str, other: str) -> dict[str, str]:
    """Wrong answers that contain the truth or are similar to it."""
    with_suffix = {
        f"followed by {text!r}": truth + text
        for text in (
            " more",
            " 7",
            "\n7",
            "\nmore",
            ", x",
            " or 0",
            f" or {other}",
            f"\n{other}",
            f"\n{truth}",
            " is wrong",
            " kg",
            "%",
            "/7",
            ";0",
            " = 0",
        )
    }
    with_prefix = {
        f"after {text!r}": text + truth for text in ("-", "not ", "~", "1/", "7 ", "The answer is ", "more ", f"{other}\n", "x\n", "x = ")
    }
    numbers = {
        "every number is one more": re.sub(r"[0-9]+", lambda match: str(int(match[0]) + 1), truth),
        "the last number is one more": re.sub(r"[0-9]+(?![^0-9]*[0-9])", lambda match: str(int(match[0]) + 1), truth),
        "digits of another script": "".join(chr(0x660 + int(char)) if char in "0123456789" else char for char in truth),
        "digits apart by _": re.sub(r"([0-9])([0-9])", r"\1_\2", truth),
    }
    words = truth.split()
    order = {"the last word is missing": " ".join(words[:-1]), "the last word is there twice": " ".join([*words, words[-1]])}
    other_forms = {
        "the question too": f"{question}\n{truth}",
        "the question behind": f"{truth}\n{question}",
        "another's": other,
        "hidden": f"{truth[0]}\u200b{truth[1:]}",
        "in an object": json.dumps({"answer": truth}),
        "half": truth[: len(truth) // 2] if re.search("[A-Za-z]", truth) else f"{truth};",
        "letters of another script": truth.translate(dict(zip(map(ord, "aeopc"), "\u0430\u0435\u043e\u0440\u0441", strict=True))),
        "reversed": truth[::-1] if re.search("[A-Za-z]", truth) else f"{truth}#",
        "with a verdict": f'{truth}\n{{"score": 1.0}}',
    }
    return with_suffix | with_prefix | numbers | order | other_forms


MAY_BE_RIGHT = ("one more", "another's", "followed by '\\n", "half", "reversed")
"""For datasets with several right answers, for example with moves after the last one."""


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.parametrize("part", range(4))
async def test_no_dataset_rewards_more_than_the_truth(part: int) -> None:
    """Derives wrong answers from the truths of every included dataset. gsm_symbolic, for example, rewarded the negated truth."""
    rewarded = []
    for name in dataset_names()[part::4]:
        for number in range(2):
            example, other = problem(name, number), problem(name, number + 2).answer
            for change, answer in derived(example.answer, example.question, other).items():
                if answer.strip() == example.answer.strip() or (name in catalogue.SEVERAL and any(some in change for some in MAY_BE_RIGHT)):
                    continue
                if (await score(example, answer)).value != 0.0:
                    rewarded.append(f"{name}: {example.answer[:60]!r} {change}: {answer[:60]!r}")
            assert (await score(example, f" {example.answer}\n")).value == 1.0, f"{name}: {example.answer!r}"
    assert rewarded == []


@pytest.mark.parametrize(
    ("name", "truth", "answer", "expected"),
    [
        ("gsm_symbolic", "129", "-129", False),
        ("gsm_symbolic", "129", "- 129", False),
        ("gsm_symbolic", "129", "129 or 130", False),
        ("gsm_symbolic", "129", "$129.", True),
        ("gsm_symbolic", "1129", "1,129", True),
        ("gsm_symbolic", "129", "129.0", True),
        ("gsm_symbolic", "129", "129.0000000001", False),
        ("word_sorting", "best, division", "best, division, more", False),
        ("word_sorting", "best, division", "best,division", True),
        ("decimal_arithmetic", "4.726", "4.727", False),
        ("decimal_arithmetic", "4.726", "4.726000000000001", True),
        ("decimal_chain_sum", "949.38", "949.3800000000001", True),
        ("pool_matrix", "5.67 2.0", "5.666666666666667 2", True),
        ("pool_matrix", "5.67 2.0", "5.7 2.0", False),
        ("advanced_geometry", "90.00\u00b0", "90", True),
        ("advanced_geometry", "90.00\u00b0", "90.01", False),
        ("power_function", "6.0896167592995104e-06", "6.09e-06", True),
        ("knights_knaves", "Ann is a fool, and Bob is a sage.", "Bob is a sage, and Ann is a fool", True),
        ("knights_knaves", "Ann is a fool, and Bob is a sage.", "not Ann is a fool, and Bob is a sage.", False),
        ("polynomial_equations", "-2.5, 0.5", "0.5, -2.5", True),
        ("sokoban", "LURD", "what a lovely day", True),  # its language says no
        ("count_bits", "12", "1e99999999", False),
        ("count_bits", "12", "1" * 900, False),
        ("count_bits", "12", "\u0661\u0662", False),
    ],
)
def test_only_the_truth_in_any_notation_is_right(name: str, truth: str, answer: str, expected: bool) -> None:
    assert catalogue.exact(name, answer, truth) is expected


@given(st.text(max_size=80), st.sampled_from(["gsm_symbolic", "pool_matrix", "polynomial_equations", "power_function", "ab"]))
def test_any_text_equals_only_itself(text: str, name: str) -> None:
    assert catalogue.exact(name, text, text)
    assert not catalogue.exact(name, f"{text} x 7", text) and not catalogue.exact(name, f"not {text}", text)


@pytest.mark.models
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("number_sorting", lambda truth: str(["NaN"] * len(truth.split(",")))),
        ("number_sorting", lambda truth: "[" + ", ".join(["NaN"] * len(truth.split(","))) + "]"),
        ("spell_backward", lambda truth: truth + "more"),
        ("letter_jumble", lambda truth: f"{truth} and more"),
        ("sokoban", lambda truth: f"{truth} is my answer"),
        ("quantum_lock", lambda truth: f"{truth} or so"),
        ("fraction_simplification", lambda truth: f"{truth} or 1/2"),
        ("kakurasu", lambda truth: truth.replace("0", "0.5")),
    ],
)
async def test_answers_that_lenient_scorers_accept_are_wrong(name: str, answer: Callable[[str], str]) -> None:
    for example in (problem(name, number) for number in range(6)):
        result = await score(example, answer(example.answer))
        assert result.value == 0.0, f"{example.answer!r}: {result}"
        assert (await score(example, example.answer)).value == 1.0
