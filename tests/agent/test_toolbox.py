"""Tools with state, which belongs to one episode and its continuations and is never shared with another."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentrl.agent import load_tools, tool
from agentrl.errors import InfrastructureError, PluginError, TaskError
from agentrl.records import MAX_AGENT_STATE_CHARS, Blame, EpisodeState, Limits, Task, codec
from agentrl.rollout import CaptureState
from agentrl.testing import ScriptedPolicy

LIMITS = Limits(tool_timeout_s=2.0)


@dataclass
class Memory:
    """Keeps notes of the agent."""

    notes: list[str] = field(default_factory=list)

    @tool
    async def remember(self, text: str) -> None:
        """Keep a note."""
        self.notes.append(text)

    @tool
    def recall(self) -> list[str]:
        """Return all notes."""
        return self.notes


class Till:
    """Defines its state, and records its life cycle."""

    life: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.total = 0
        Till.life.append("opened")

    @tool
    async def pay(self, amount: int) -> int:
        """Pay an amount."""
        if amount < 0:
            raise ArithmeticError("a till gives nothing")
        self.total += amount
        return self.total

    async def state(self) -> Any:
        return {"total": self.total}

    def restore(self, state: Any) -> None:
        self.total = state["total"]
        Till.life.append(f"restored {self.total}")

    async def close(self) -> None:
        Till.life.append(f"closed {self.total}")


def ref(name: str) -> str:
    return f"{__name__}:{name}"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture(autouse=True)
def cleared() -> None:
    Till.life.clear()


def task_with(task: Task, *names: str) -> Task:
    limits = replace(task.limits, turns=9, episode_tokens=4000, tool_timeout_s=2.0)
    return replace(task, tools=(*map(ref, names), "submit"), limits=limits)


class StateRecorder:
    """An `on_turn` that records every state after a round trip through the codec; None if there is no state."""

    def __init__(self) -> None:
        self.states: list[EpisodeState | None] = []

    async def __call__(self, turns: int, capture: CaptureState) -> None:
        state = await capture()
        self.states.append(None if state is None else codec.from_json(EpisodeState, codec.to_json(state)))


def outputs(episode: Any) -> list[str]:
    return [result.output for turn in episode.trajectories[0].turns for result in turn.tool_results]


async def test_a_class_is_a_set_of_tools(tokenizer: Any, task: Task, make_runner: Any) -> None:
    completions = (call("remember", text="a") + call("remember", text="b"), call("recall"), "done")
    episode = await make_runner(ScriptedPolicy.saying(tokenizer, *completions)).run(task_with(task, "Memory"), episode_id="e")
    assert outputs(episode) == ["", "", '["a","b"]'] and episode.failures == ()
    assert list(load_tools((ref("Memory"), "submit"))) == ["remember", "recall", "submit"]


async def test_attempts_do_not_share_the_state_of_a_tool(tokenizer: Any, task: Task, make_runner: Any) -> None:
    """Tests sequential attempts, concurrent attempts, and attempts after a capture: a secret stays in its attempt."""

    def script(turn: int, episode: str) -> str:
        return (call("remember", text=f"secret of {episode}"), call("recall"), "done")[turn]

    runner, tool_task = make_runner(ScriptedPolicy(tokenizer, script)), task_with(task, "Memory")
    await runner.run(tool_task, episode_id="before")
    episodes = await asyncio.gather(*(runner.run(tool_task, episode_id=f"e{number}") for number in range(5)))
    assert [outputs(episode)[1] for episode in episodes] == [f'["secret of e{number}"]' for number in range(5)]
    assert outputs(await runner.run(tool_task, episode_id="after"))[1] == '["secret of after"]'


async def test_the_state_of_a_tool_follows_its_episode_and_is_copied_to_branches(tokenizer: Any, task: Task, make_runner: Any) -> None:
    recorder, tool_task = StateRecorder(), task_with(task, "Memory", "Till")

    def script(turn: int, episode: str) -> str:
        both = call("remember", text="of the stem") + call("pay", amount=3)
        return (both, call("remember", text=episode), call("recall"), "done")[turn]

    runner = make_runner(ScriptedPolicy(tokenizer, script))
    await runner.run(tool_task, episode_id="e", on_turn=recorder)
    first = recorder.states[0]
    assert first is not None and first.agent_state == {"tools": {ref("Memory"): {"notes": ["of the stem"]}, ref("Till"): {"total": 3}}}
    resumed, *branches = await asyncio.gather(*(runner.run(tool_task, episode_id=name, start=first) for name in ("e", "b1", "b2")))
    assert [outputs(episode)[3] for episode in (resumed, *branches)] == [f'["of the stem","{name}"]' for name in ("e", "b1", "b2")]
    assert Till.life == ["opened", "closed 3"], "a tool that is not called again is not opened again"


async def test_the_state_of_a_tool_that_is_not_called_again_is_saved_again(tokenizer: Any, task: Task, make_runner: Any) -> None:
    recorder, second_recorder, tool_task = StateRecorder(), StateRecorder(), task_with(task, "Till")
    completions = (call("pay", amount=3), call("nothing"), call("pay", amount=4), "done")
    runner = make_runner(ScriptedPolicy.saying(tokenizer, *completions))
    await runner.run(tool_task, episode_id="e", on_turn=recorder)
    await runner.run(tool_task, episode_id="e", start=recorder.states[0], on_turn=second_recorder)
    assert [None if state is None else state.agent_state for state in second_recorder.states] == [
        {"tools": {ref("Till"): {"total": total}}} for total in (3, 7)
    ]
    assert Till.life == ["opened", "closed 7", "opened", "restored 3", "closed 7"]


@dataclass
class Rows:
    """Keeps nested data."""

    rows: dict[str, Any] = field(default_factory=lambda: {"all": []})

    @tool
    async def row(self, text: str) -> Any:
        """Add a row."""
        self.rows["all"].append(text)
        return self.rows["all"]


async def test_branches_of_one_state_share_nothing(tokenizer: Any, task: Task, make_runner: Any) -> None:
    states: list[EpisodeState] = []

    async def on_turn(turns: int, capture: CaptureState) -> None:
        state = await capture()
        assert state is not None
        states.append(state)  # not copied: all branches of a group get the same object

    def script(turn: int, episode: str) -> str:
        return (call("row", text="stem"), call("row", text=episode), "done")[turn]

    runner, tool_task = make_runner(ScriptedPolicy(tokenizer, script)), task_with(task, "Rows")
    await runner.run(tool_task, episode_id="e", on_turn=on_turn)
    branches = [await runner.run(tool_task, episode_id=name, start=states[0]) for name in ("b1", "b2")]
    assert [outputs(branch)[1] for branch in branches] == ['["stem","b1"]', '["stem","b2"]']


class Stalling(ScriptedPolicy):
    """Never answers its second request."""

    async def generate(self, prompt_ids: Any, params: Any, *, request_id: str, timeout_s: float) -> Any:
        if request_id.endswith("-1"):
            await asyncio.sleep(60)
        return await super().generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)


async def test_tools_are_closed_however_the_episode_ends(tokenizer: Any, task: Task, make_runner: Any) -> None:
    tool_task, completions = task_with(task, "Till"), (call("pay", amount=1), "done")
    for policy, wall_s, reason in (
        (ScriptedPolicy.saying(tokenizer, *completions), 60.0, "answered"),
        (ScriptedPolicy.saying(tokenizer, completions[0]), 60.0, "failed"),
        (Stalling.saying(tokenizer, *completions), 0.2, "wall_limit"),
    ):
        Till.life.clear()
        episode = await make_runner(policy).run(replace(tool_task, limits=replace(tool_task.limits, wall_s=wall_s)), episode_id="e")
        assert (episode.trajectories[0].stop_reason, Till.life) == (reason, ["opened", "closed 1"])
    Till.life.clear()
    running = asyncio.create_task(make_runner(Stalling.saying(tokenizer, *completions)).run(tool_task, episode_id="e"))
    while "opened" not in Till.life:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert Till.life == ["opened", "closed 1"]


async def test_a_tool_that_was_not_called_is_not_opened(tokenizer: Any, task: Task, make_runner: Any) -> None:
    await make_runner(ScriptedPolicy.saying(tokenizer, call("pay", amount="much"), "done")).run(task_with(task, "Memory"), episode_id="e")
    assert Till.life == []


@dataclass
class Hoard:
    """Keeps more data than a state may have."""

    heap: list[str] = field(default_factory=list)

    @tool
    async def pile(self, count: int) -> None:
        """Pile up."""
        self.heap.append("x" * count)


class Broken(Till):
    """A class whose state, restore and close raise or hang."""

    @tool
    async def use(self) -> str:
        """Use it."""
        return "used"

    async def state(self) -> Any:
        raise KeyError("state")

    def restore(self, state: Any) -> None:
        raise KeyError("restore")

    async def close(self) -> None:
        await asyncio.sleep(60)


class Rejecting(Till):
    """A class that accepts no state."""

    @tool
    async def use(self) -> str:
        """Use it."""
        return "used"

    def restore(self, state: Any) -> None:
        raise KeyError("restore")


class Unopened(Till):
    def __init__(self) -> None:
        raise OSError("no such database")


class Offline(Till):
    def __init__(self) -> None:
        raise InfrastructureError("the database is down")


async def test_a_state_that_cannot_be_saved_does_not_stop_the_episode(tokenizer: Any, task: Task, make_runner: Any, caplog: Any) -> None:
    recorder = StateRecorder()
    completions = (call("pile", count=9), call("pile", count=MAX_AGENT_STATE_CHARS), "done")
    await make_runner(ScriptedPolicy.saying(tokenizer, *completions)).run(task_with(task, "Hoard"), episode_id="e", on_turn=recorder)
    assert [state is None for state in recorder.states] == [False, True]
    tool_task = task_with(task, "Broken")
    tool_task = replace(tool_task, limits=replace(tool_task.limits, tool_timeout_s=0.1))
    episode = await make_runner(ScriptedPolicy.saying(tokenizer, call("use"), "done")).run(tool_task, episode_id="e", on_turn=recorder)
    assert recorder.states[2] is None and (episode.trajectories[0].stop_reason, episode.failures) == ("answered", ())
    assert "the state of Broken: KeyError: 'state'" in caplog.text and "closing Broken: CallTimeout" in caplog.text


@dataclass
class Untrue:
    """Keeps data that contradicts its annotation."""

    count: int = 0

    @tool
    async def spoil(self) -> None:
        """Spoil it."""
        self.count = "three"  # type: ignore[assignment]


async def test_a_field_of_the_wrong_type_is_not_a_valid_state(tokenizer: Any, task: Task, make_runner: Any) -> None:
    saved = StateRecorder()
    await make_runner(ScriptedPolicy.saying(tokenizer, call("spoil"), "done")).run(task_with(task, "Untrue"), episode_id="e", on_turn=saved)
    assert saved.states == [None]


async def test_a_rejected_state_is_reported_and_not_replaced(tokenizer: Any, task: Task, make_runner: Any) -> None:
    recorder, tool_task = StateRecorder(), task_with(task, "Rejecting")
    runner = make_runner(ScriptedPolicy.saying(tokenizer, "<tool_call>", call("use"), call("use"), "done"))
    await runner.run(tool_task, episode_id="e", on_turn=recorder)
    assert recorder.states[0] is not None
    start = replace(recorder.states[0], agent_state={"tools": {ref("Rejecting"): 3}})
    episode = await runner.run(tool_task, episode_id="e", start=start)
    assert outputs(episode)[1:] == ["error: use failed: KeyError: 'restore'"] * 2
    assert [(failure.blame, failure.kind) for failure in episode.failures] == [(Blame.POLICY, "KeyError")] * 2


async def test_a_tool_that_cannot_be_opened_is_an_error_for_the_agent_unless_it_raises_an_infrastructure_error(
    tokenizer: Any, task: Task, make_runner: Any
) -> None:
    policy = ScriptedPolicy.saying(tokenizer, call("pay", amount=1), "done")
    episode = await make_runner(policy).run(task_with(task, "Unopened"), episode_id="e")
    assert outputs(episode) == ["error: pay failed: OSError: no such database"] and not episode.left_out
    episode = await make_runner(policy).run(task_with(task, "Offline"), episode_id="e")
    assert episode.left_out and episode.failures[0].message == "the database is down"


@dataclass
class Opaque:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @tool
    async def use(self) -> str:
        """Use it."""
        return ""


class Stateless:
    @tool
    async def use(self) -> str:
        """Use it."""
        return ""


class Half(Stateless):
    def state(self) -> Any:
        return None


class Needy(Till):
    def __init__(self, url: str) -> None: ...


@dataclass
class Static:
    @staticmethod
    @tool
    async def use() -> str:
        """Use it."""
        return ""


memory = Memory()
recall = memory.recall


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Opaque", "have a state that JSON cannot represent"),
        ("Stateless", "the class has no state() and restore()"),
        ("Half", "the class has no restore()"),
        ("Needy", "cannot be opened: the class requires arguments"),
        ("Static", "the tool use of Static is not a plain method"),
        ("memory", "is an object of Memory, which all episodes would share: refer to the class"),
        ("recall", "is an object of Memory, which all episodes would share: refer to the class"),
    ],
)
def test_a_class_whose_state_could_be_lost_or_shared_raises(name: str, message: str) -> None:
    with pytest.raises(PluginError) as error:
        load_tools((ref(name),))
    assert message in str(error.value) and "fix: " in str(error.value)


def test_two_classes_with_the_same_tool_name_raise() -> None:
    with pytest.raises(TaskError, match="named 'pay'"):
        load_tools((ref("Till"), ref("Unopened")))


async def test_the_tools_of_the_documentation_work(tmp_path: Path, tokenizer: Any, task: Task, make_runner: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "task-families.md").read_text(encoding="utf-8")
    source = "\n\n".join(re.findall(r"```python\n(# mytools\.py.*?)```", page, re.DOTALL))
    (tmp_path / "mytools.py").write_text(source, encoding="utf-8")
    tool_task = replace(task_with(task), tools=tuple(f"{tmp_path}/mytools.py:{name}" for name in ("search", "Memory", "Till")))
    completions = (
        call("search", query="tea"),
        call("search", limit="x", query="t"),
        call("remember", text="four"),
        call("recall"),
        call("pay", amount=4),
        "4",
    )
    episode = await make_runner(ScriptedPolicy.saying(tokenizer, *completions)).run(tool_task, episode_id="e")
    assert outputs(episode) == [
        "tea is at four",
        'error: search: limit: Input should be a valid integer, unable to parse string as an integer; for example {"query": "..."}',
        "",
        '["four"]',
        "4",
    ]


async def test_the_documented_simulated_user_answers_from_the_task_and_keeps_state(
    tmp_path: Path, tokenizer: Any, task: Task, make_runner: Any
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "task-families.md").read_text(encoding="utf-8")
    (tmp_path / "users.py").write_text("\n\n".join(re.findall(r"```python\n(# mytools\.py.*?)```", page, re.DOTALL)), encoding="utf-8")
    data = {"user": {"order number": "4711", "colour": "blue"}, "answer": "4711"}
    tool_task = replace(task_with(task), tools=(f"{tmp_path}/users.py:User", "submit"), data=data)
    questions = ("Your order number?", "And the weather?", "The order number, please.")
    completions = (*(call("ask_user", question=question) for question in questions), call("submit", answer="4711"))
    for name in ("a", "b"):
        episode = await make_runner(ScriptedPolicy.saying(tokenizer, *completions)).run(tool_task, episode_id=name)
        assert outputs(episode)[:3] == ["4711", "I do not know what you mean.", "You asked that already: 4711"]
