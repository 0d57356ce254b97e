"""`own_scorer`: only the truth scores 1; a scorer that fails leaves an answer unscored, and the next one is scored."""

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
def made(name: str, number: int = 0) -> Problem:
    return problems.problem(Source(name=name), seed=0, heldout=False, number=number)


def task(one: Problem, **changed: Any) -> Task:
    return Task(
        id="t",
        family="reasoning",
        prompt=(Message(role="user", content=one.question),),
        tools=(),
        sandbox=SandboxSpec(image="sandboxes/tables"),
        verifiers=("rewards.reasoning:own_scorer",),
        data={"kind": one.source.name, "answer": one.answer, "origin": one.origin() | changed},
        split=Split.TRAIN,
    )


async def score(one: Problem, answer: str | None) -> Score:
    return await own_scorer(task(one), Episode(id="e", task_id="t", task_key="k", trajectories=(), answer=answer))


@pytest.fixture(scope="module")
def quick() -> Iterator[Scorers]:
    scorers = Scorers(deadline_s=1.0)
    yield scorers
    scorers.close()


def everything() -> list[str]:
    from sandboxes.reasoning import package

    return [name for name in package.names() if name not in catalogue.LEFT_OUT]


@pytest.mark.models
async def test_truth_scores_1_and_nothing_0_for_every_dataset() -> None:
    """The long version, with more of everything, is docs/generate_reasoning_table.py."""
    for name in everything():
        one = made(name)
        right = await score(one, one.answer)
        assert (right.value, right.parts["exact"]) == (1.0, 1.0), f"{name}: {right}"
        for answer in (*NOTHING, one.question):
            wrong = await score(one, answer)
            assert wrong.value == 0.0, f"{name} on {answer[:40]!r}: {wrong}"


@pytest.mark.models
async def test_partial_marks_are_kept_as_a_part() -> None:
    one = made("sentence_reordering")
    words = one.answer.split()
    swapped = " ".join([words[1], words[0], *words[2:]])
    given = await score(one, swapped)
    assert given.value == 0.0 and 0 < given.parts["partial"] < 1 and given.parts["exact"] == 0.0
    assert (await score(one, f"\n {one.answer}\n")).value == 1.0, "white space plays no part"
    assert len((await score(one, "\U0001f600" * 900)).evidence) < 1000


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("chain_sum", None, "no answer"),
        ("chain_sum", " \n", "no answer"),
        ("chain_sum", "9" * (LONGEST + 1), "more than 1000"),
        ("countdown", "__import__('os').system('true')", "form of countdown"),
        ("countdown", "9**9**9**9", "form of countdown"),
    ],
)
async def test_some_answers_are_wrong_without_calling_the_scorer(name: str, answer: str | None, said: str) -> None:
    one = Problem(source=Source(name=name), seed=0, index=0, question="?", answer="24")
    given = await score(one, answer)
    assert given.value == 0.0 and said in given.evidence


@pytest.mark.models
async def test_answer_on_which_a_sound_scorer_raises_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out, it would be an agent's way to have only its good answers count."""
    monkeypatch.delitem(catalogue.LANGUAGES, "prime_factorization")  # type: ignore[arg-type]
    given = await score(made("prime_factorization"), "two times three")
    assert given.value == 0.0 and "the scorer raised ValueError" in given.evidence
    assert (await score(made("prime_factorization"), made("prime_factorization").answer)).value == 1.0


@pytest.mark.models
def test_hanging_scorer_is_killed_and_the_next_answer_scored(quick: Scorers) -> None:
    """By a scorer that is left out, which evaluates the answer: this one computes for hours in C, where no Python code interrupts it."""
    bomb, plain = made("simple_integration"), made("chain_sum")
    assert quick.mark(plain.origin(), plain.answer, plain.answer) == 1.0
    with pytest.raises(CallTimeout, match="within 1 s"):
        quick.mark(bomb.origin(), bomb.answer, "factorial(10**8)")
    assert quick.mark(plain.origin(), plain.answer, plain.answer) == 1.0


@pytest.mark.models
async def test_problem_that_is_no_longer_generated_is_a_task_fault() -> None:
    one = made("chain_sum")
    other = task(one, index=one.index + 1)
    episode = Episode(id="e", task_id="t", task_key="k", trajectories=(), answer=one.answer)
    with pytest.raises(TaskError, match="no longer generates this problem"):
        await own_scorer(other, episode)
    assert (await TaskScorer()(other, episode)).blame is Blame.TASK


@pytest.mark.parametrize("mark", [float("nan"), 1.5, -1.0])
async def test_scorer_that_fails_on_the_truth_gives_no_score(mark: float, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Scorers):
        def mark(self, *args: Any) -> float:
            return mark

    monkeypatch.setattr(reasoning, "_scorers", Odd())
    one = Problem(source=Source(name="chain_sum"), seed=0, index=0, question="?", answer="24")
    given = await score(one, "3")
    assert given.value is None and "not from 0 to 1" in given.reason


@pytest.mark.parametrize(("times", "value"), [(1, 1.0), (2, 0.0)])
async def test_slow_scorer_is_retried_once(times: int, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    stops = iter([True] * times)

    class Slow(Scorers):
        def mark(self, origin: Any, truth: str, answer: str) -> float:
            if answer != truth and next(stops, False):
                raise CallTimeout("returned no mark within 5 s")
            return 1.0

    monkeypatch.setattr(reasoning, "_scorers", Slow())
    one = Problem(source=Source(name="chain_sum"), seed=0, index=0, question="?", answer="24")
    given = await score(one, "3")
    assert given.value == value and ("answer '3': the scorer returned no mark" in given.evidence) == (value == 0.0)


@pytest.mark.models
def test_terminal_interrupt_does_not_reach_the_scorers(quick: Scorers) -> None:
    plain = made("chain_sum")
    assert quick.mark(plain.origin(), plain.answer, plain.answer) == 1.0
    process = quick._worker._children[0]._process
    assert process is not None and os.getpgid(process.pid) != os.getpgid(0)


async def test_cancelled_answers_are_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Slow(Scorers):
        def mark(self, origin: Any, truth: str, answer: str) -> float:
            asked.append(answer)
            time.sleep(0.3)
            return 1.0

    monkeypatch.setattr(reasoning, "_scorers", Slow())
    one = Problem(source=Source(name="chain_sum"), seed=0, index=0, question="?", answer="24")
    waiting = [asyncio.create_task(score(one, str(number))) for number in range(40)]
    await asyncio.sleep(0.1)
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "done"), 0.15) == "done", "nothing else waits with them"
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (await asyncio.wait_for(score(one, "the next"), 5.0)).value == 1.0
    assert asked == ["0", "the next"]


@pytest.mark.models
async def test_many_answers_at_once() -> None:
    ones = [made(name, number) for number in range(8) for name in ("chain_sum", "lcm", "spell_backward", "number_sorting")]
    scores = await asyncio.gather(*(score(one, one.answer if place % 2 else "7 of 9") for place, one in enumerate(ones)))
    assert [given.value for given in scores] == [float(place % 2) for place in range(len(ones))]


def derived(truth: str, question: str, other: str) -> dict[str, str]:
    """Answers that hold the truth, or are near it, and are wrong."""
    added = {
        f"followed by {more!r}": truth + more
        for more in (
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
    ahead = {
        f"after {more!r}": more + truth for more in ("-", "not ", "~", "1/", "7 ", "The answer is ", "more ", f"{other}\n", "x\n", "x = ")
    }
    numbers = {
        "every number is one more": re.sub(r"[0-9]+", lambda found: str(int(found[0]) + 1), truth),
        "the last number is one more": re.sub(r"[0-9]+(?![^0-9]*[0-9])", lambda found: str(int(found[0]) + 1), truth),
        "digits of another script": "".join(chr(0x660 + int(one)) if one in "0123456789" else one for one in truth),
        "digits apart by _": re.sub(r"([0-9])([0-9])", r"\1_\2", truth),
    }
    words = truth.split()
    order = {"the last word is missing": " ".join(words[:-1]), "the last word is there twice": " ".join([*words, words[-1]])}
    whole = {
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
    return added | ahead | numbers | order | whole


MAY_BE_RIGHT = ("one more", "another's", "followed by '\\n", "half", "reversed")
"""Of datasets with several right answers: moves after the last one, too."""


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.parametrize("part", range(4))
async def test_no_dataset_rewards_more_than_the_truth(part: int) -> None:
    """Of every dataset that is in: the answers are derived from its truths. gsm_symbolic paid for the negated truth, for instance."""
    paid = []
    for name in everything()[part::4]:
        for number in range(2):
            one, other = made(name, number), made(name, number + 2).answer
            for what, answer in derived(one.answer, one.question, other).items():
                if answer.strip() == one.answer.strip() or (name in catalogue.SEVERAL and any(some in what for some in MAY_BE_RIGHT)):
                    continue
                if (await score(one, answer)).value != 0.0:
                    paid.append(f"{name}: {one.answer[:60]!r} {what}: {answer[:60]!r}")
            assert (await score(one, f" {one.answer}\n")).value == 1.0, f"{name}: {one.answer!r}"
    assert paid == []


@pytest.mark.parametrize(
    ("name", "truth", "answer", "due"),
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
def test_only_the_truth_in_any_notation_is_right(name: str, truth: str, answer: str, due: bool) -> None:
    assert catalogue.exact(name, answer, truth) is due


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
    for one in (made(name, number) for number in range(6)):
        result = await score(one, answer(one.answer))
        assert result.value == 0.0, f"{one.answer!r}: {result}"
        assert (await score(one, one.answer)).value == 1.0
