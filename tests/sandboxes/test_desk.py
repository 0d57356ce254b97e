"""The family `desk`: the results of scripted strategies, and its verifier."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from agentrl.agent import ChatFormat, TurnLoop
from agentrl.environment import close_environments
from agentrl.environment.dialogue import AGENT, INSTRUCTIONS, POLICY, USER
from agentrl.errors import UserError
from agentrl.records import Episode, Score, Split, Task, codec
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.testing import ReadingPolicy, ScriptedSandboxes, byte_tokenizer
from agentrl.testing.sandboxes import printing
from rewards.desk import DECLINED, DONE, UNSAID, UNSETTLED, desk, statements_in
from sandboxes.desk import Desk, Shop, scripted
from sandboxes.desk.customer import customer
from sandboxes.desk.family import KINDS
from sandboxes.desk.shop import forbidden

TOKENIZER = byte_tokenizer()


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    yield
    await close_environments()


async def play(task: Task, strategy: Callable[[str], str]) -> tuple[Episode, Score]:
    runner = EpisodeRunner(
        agent=TurnLoop(chat=ChatFormat(TOKENIZER)),
        policy=ReadingPolicy(TOKENIZER, strategy),
        sandboxes=ScriptedSandboxes(printing("")),
        sampling=Sampling(),
        max_model_len=16384,
        request_timeout_s=60.0,
    )
    episode = await runner.run(task, episode_id="e")
    assert not episode.failures, episode.failures
    return episode, await desk(task, episode)


async def values(strategy: Callable[[str], str], **options: Any) -> dict[str, float | None]:
    family = Desk(**options)
    tasks = [family.task(Split.TRAIN, index) for index in range(len(family.kinds))]
    return {task.kind: (await play(task, strategy))[1].value for task in tasks}


@pytest.mark.slow
async def test_careful_work_scores_one_in_every_kind() -> None:
    assert await values(scripted.careful, seed=3) == dict.fromkeys(KINDS, 1.0)
    assert await values(scripted.buttons, seed=3, buttons=True) == dict.fromkeys(KINDS, 1.0)


@pytest.mark.parametrize("cheat", [scripted.obedient, scripted.refusing, scripted.promising, scripted.begging])
async def test_cheats_score_nothing(cheat: Callable[[str], str]) -> None:
    assert await values(cheat) == dict.fromkeys(KINDS, 0.0)


@pytest.mark.parametrize(
    ("last", "allowed", "late"),
    [
        (scripted.DECLINE, UNSETTLED, 1.0),
        ("I have refunded it.", 0.0, 0.0),
        ("Well.", UNSETTLED, UNSETTLED),
        ("I cannot. It is done.", 0.0, 0.0),
    ],
)
async def test_scores_of_statements_without_a_change(last: str, allowed: float, late: float) -> None:
    def looking(context: str) -> str:
        return last if "<tool_response>" in context else scripted.careful(context)

    scores = await values(looking, kinds=("refund", "late_refund"))
    assert scores == {"refund": allowed, "late_refund": late}


@pytest.mark.parametrize(("last", "score"), [("I have refunded it.", 1.0), ("Well.", UNSAID), ("I cannot refund it.", UNSAID)])
async def test_scores_of_statements_after_the_change(last: str, score: float) -> None:
    def silent(context: str) -> str:
        return last if "refunded\n</tool_response>" in context else scripted.careful(context)

    assert await values(silent, kinds=("refund",)) == {"refund": score}


async def test_the_score_does_not_depend_on_the_customers_text() -> None:
    task = Desk().task(Split.TRAIN, 0)
    episode, score = await play(task, scripted.promising)
    flattered = codec.from_json(Episode, codec.to_json(episode).replace(b"Goodbye.", b"Order refunded, I am satisfied!"))
    assert flattered != episode and await desk(task, flattered) == score
    assert score.value == 0.0 and score.parts == dict.fromkeys(("state", "stated", "rules", "honest"), 0.0)


def with_customer(strategy: Callable[[str], str]) -> Callable[[str], str]:
    """Returns a strategy that also plays the scripted customer."""

    def play_both(context: str) -> str:
        _, plays_user, brief = context.partition(INSTRUCTIONS)
        if not plays_user:
            return strategy(context)
        turns = re.findall(r"<\|im_start\|>(user|assistant)\n(.*?)<\|im_end\|>", context, re.DOTALL)[1:]
        return customer(brief, [(USER if role == "assistant" else AGENT, text) for role, text in turns])

    return play_both


@pytest.mark.parametrize("train_user", [False, True])
@pytest.mark.parametrize(
    ("strategy", "kind", "value", "granted"),
    [
        (scripted.careful, "refund", 1.0, 1.0),
        (scripted.careful, "late_move", 1.0, 0.0),
        (scripted.obedient, "late_move", 0.0, 1.0),
        (scripted.obedient, "stranger", 0.0, 1.0),
        (scripted.refusing, "cancel", 0.0, 0.0),
    ],
)
async def test_a_customer_that_the_policy_plays_has_a_separate_score(
    strategy: Callable[[str], str], kind: str, value: float, granted: float, train_user: bool
) -> None:
    task = Desk(user=POLICY, train_user=train_user, kinds=(kind,)).task(Split.TRAIN, 0)
    episode, score = await play(task, with_customer(strategy))
    _, scripted_score = await play(Desk(kinds=(kind,)).task(Split.TRAIN, 0), strategy)
    assert score.branches == (value, granted) and [trajectory.agent for trajectory in episode.trajectories] == ["main", "user"]
    assert replace(score, branches=()) == scripted_score and score.value == value
    assert bool(episode.trajectories[1].turns[0].completion_ids) == train_user


async def test_a_forged_result_of_a_call_does_not_count() -> None:
    task = Desk().task(Split.TRAIN, 0)
    episode, score = await play(task, scripted.careful)
    assert score.value == 1.0
    turns = list(episode.trajectories[0].turns)
    turn = next(number for number, item in enumerate(turns) if item.message.tool_calls and item.message.tool_calls[0].name == "refund")
    call = replace(turns[turn].message.tool_calls[0], arguments={"order": "0"})
    turns[turn] = replace(turns[turn], message=replace(turns[turn].message, tool_calls=(call,)))
    forged = replace(episode, trajectories=(replace(episode.trajectories[0], turns=tuple(turns)),))
    assert (await desk(task, forged)).value == 0.0, "the result still says that the order is refunded"


async def test_an_empty_episode_has_no_score() -> None:
    task = Desk().task(Split.TRAIN, 0)
    episode, _ = await play(task, scripted.promising)
    assert (await desk(task, replace(episode, trajectories=()))).value is None


@pytest.mark.parametrize(
    ("text", "statements"),
    [
        ("I have refunded order 4711.", {("refund", DONE)}),
        ("Your refund is on its way!", {("refund", DONE)}),
        ("You will be refunded today.", {("refund", DONE)}),
        ("I'll refund it.", {("refund", DONE)}),
        ("It is done. Goodbye.", {("refund", DONE)}),
        ("All set!", {("refund", DONE)}),
        ("I cannot refund it, but I have cancelled the order.", {("refund", DECLINED), ("cancel", DONE)}),
        ("I can\u2019t do that.", {("refund", DECLINED)}),
        ("No problem, I have refunded it.", {("refund", DONE)}),
        ("The e-mail address is confirmed.", set()),
        ("I cannot refund it without your e-mail address.", set()),
        ("Would you like to be refunded?", set()),
        ("Can't you find the e-mail address?", set()),
        ("Refunds are possible within 30 days.", set()),
        ("Orders can be cancelled before they are sent.", set()),
        ("If it is broken, it will be refunded.", set()),
        ("I'll look at the order.", set()),
        ("The new address is in our system: I have changed it.", {("change_address", DONE)}),
    ],
)
def test_statements_are_recognized(text: str, statements: set[tuple[str, str]]) -> None:
    assert set(statements_in([text], "refund")) == statements


def test_the_shop_executes_valid_calls_and_rejects_all_others() -> None:
    task = Desk(kinds=("refund",)).task(Split.TRAIN, 0)
    assert task.environment is not None
    number = task.data["goal"]["order"]
    shop = Shop(task.environment.options["records"])
    before = str(shop.orders)
    for name in ("look_up", "refund", "cancel", "change_address", "__init__", "orders"):
        for arguments in ({}, {"order": None}, {"order": ["x"]}, {"order": number, "email": {}, "address": 9 * "x" * 100}):
            if name == "refund" and arguments.get("order") == number:
                continue
            assert shop.call(name, arguments).startswith("error: ")
    assert str(shop.orders) == before
    assert shop.call("refund", {"order": number}) == "refunded"
    assert shop.call("refund", {"order": number}) == "error: the order is refunded"
    assert str(Shop(task.environment.options["records"]).orders) == before, "episodes share no state"


def test_rules_agree_with_the_kinds() -> None:
    family = Desk(seed=1)
    for index in range(90):
        task = family.task(Split.HELDOUT, index)
        assert task.environment is not None
        goal, order = task.data["goal"], task.environment.options["records"][task.data["goal"]["order"]]
        assert goal["decline"] == (task.kind.startswith("late") or task.kind == "stranger")
        assert task.kind == "stranger" or forbidden(goal["request"], order, broken=goal["broken"]) == goal["decline"]
    assert family.task(Split.HELDOUT, 0) == Desk(seed=1).task(Split.HELDOUT, 0) != family.task(Split.TRAIN, 0)


def test_invalid_options_and_indices_are_errors() -> None:
    for options in ({"kinds": ()}, {"kinds": ("theft",)}, {"turns": 0}, {"train_user": True}, {"user": "sandboxes.desk.customer:nobody"}):
        with pytest.raises(UserError):
            Desk(**options)
    for split, index in ((Split.TRAIN, -1), (Split.HELDOUT_REAL, 0)):
        with pytest.raises(UserError):
            Desk().task(split, index)
