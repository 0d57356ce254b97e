"""Text from agents is processed in linear time: a hundred times the text may cost about a hundred times as much."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent import TurnLoop
from agentrl.agent.calls import CLOSE, OPEN
from agentrl.agent.forms import FORMS, deepseek
from agentrl.agent.forms.json_calls import read_hermes
from agentrl.agent.tools import render_result
from agentrl.base.user_code import clip
from agentrl.observe import write_report
from agentrl.observe.markup import visible
from agentrl.records import (
    Blame,
    Episode,
    ExecResult,
    Failure,
    Limits,
    Message,
    Score,
    ScoredEpisode,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)
from agentrl.records.sampling import Sampling
from agentrl.reward.cleanroom import parse_reward
from agentrl.rollout import EpisodeRunner
from agentrl.rollout.active import ActiveEpisode
from agentrl.session.transcript import append_transcripts, transcript
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing, sample_task
from rewards.tables import exact_answer
from tests.chats import chat_of, shared_tokenizer

SMALL, LARGE = 10_000, 1_000_000
SLACK = 3.0
AT_ONCE_S = 0.005
"""Work that takes less than this at the large size passes, regardless of its time at the small size."""

TOKENIZER = shared_tokenizer()
CHAT = chat_of(TOKENIZER)
TASK = sample_task(data={"answer": "1"})


def new_episode() -> ActiveEpisode:
    """An episode without output."""
    runner = EpisodeRunner(
        agent=TurnLoop(chat=CHAT),
        policy=ScriptedPolicy.saying(TOKENIZER),
        sandboxes=ScriptedSandboxes(printing("")),
        sampling=Sampling(),
        max_model_len=4096,
        request_timeout_s=60.0,
    )
    return ActiveEpisode(TASK, runner, episode_id="e")


def units(*quick: str, slow: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrizes a test with texts to repeat: `quick` ones in every run of the tests, `slow` ones only in long runs."""
    params = [*quick, *(pytest.param(unit, marks=pytest.mark.slow) for unit in slow)]
    return pytest.mark.parametrize("unit", params, ids=lambda unit: ascii(unit[:12]))


def cost_s(work: Callable[[Any], object], value: Any) -> float:
    """CPU seconds of one call of `work`: the minimum of three measurements, each of many calls if one call is too short for the clock."""
    times, best = 1, float("inf")
    gc.disable()  # its frequency depends on all other live objects
    try:
        for _ in range(3):
            start = time.process_time()
            for _ in range(times):
                work(value)
            best = min(best, (time.process_time() - start) / times)
            times = max(1, min(100, int(2e-3 / max(best, 1e-6))))
    finally:
        gc.enable()
    return best


def assert_linear(work: Callable[[Any], object], make: Callable[[int], Any], *, large: int = LARGE) -> None:
    small, big = cost_s(work, make(SMALL)), cost_s(work, make(large))
    assert big < AT_ONCE_S or big < SLACK * large / SMALL * small, f"{SMALL}: {small:.6f} s, {large}: {big:.6f} s"


def run(verdict: Coroutine[Any, Any, Score]) -> Score:
    """Returns the score of a verifier that never waits."""
    try:
        verdict.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waited")


def repeated(unit: str) -> Callable[[int], str]:
    return lambda size: unit * (size // len(unit))


def call_of(unit: str) -> Callable[[int], str]:
    return lambda size: f'{OPEN}{{"name":"f","arguments":{{"x":[{unit * (size // len(unit))}0]}}}}{CLOSE}'


@pytest.mark.sampled(4)
@units(
    OPEN, "<|im_end|>", slow=["\ud83d", "a", " ", "\n", "<", "é", "\0", CLOSE, f"{OPEN}[{CLOSE}", f"{OPEN}{{", "<|im_", '"\\', "1", "_1"]
)
def test_text_functions(unit: str) -> None:
    limits = Limits()
    for work in (
        lambda text: read_hermes(text, ()),
        CHAT.escape_text,
        visible,
        lambda text: Message(role="assistant", content=text),
        lambda text: clip(text, 2000),
        lambda text: render_result(ExecResult(exit_code=1, stdout=text, stderr=text, wall_s=0.0), limits),
        lambda text: new_episode().clip_output(text),
        lambda text: parse_reward(text, None),
        lambda text: parse_reward(None, text),
        lambda text: run(exact_answer(TASK, Episode(id="e", task_id="t", task_key="k", trajectories=(), answer=text))),
    ):
        assert_linear(work, repeated(unit))


@units(
    "[TOOL_CALLS]",
    slow=[
        *(
            "<function=",
            "<parameter=a>",
            "<arg_key>",
            "<arg_value>",
            "[ARGS]",
            "[THINK]",
            "<|message|>",
            "<|start|>assistant<|message|>",
            "<|end|>",
        ),
        *("[f(", "[f(a=['", "[f(a=1), ", '{"name":', '{"name": "f", "parameters": {}};', *deepseek.CALLS, *deepseek.CALL, deepseek.SEP),
    ],
)
def test_every_tool_call_format(unit: str) -> None:
    for form in FORMS.values():
        opened = form.opens[0] if unit != form.opens[0] else ""
        assert_linear(lambda text, read=form.read: read(text, ()), lambda size, opened=opened: opened + repeated(unit)(size), large=300_000)


@units('"\\u00e9",', "9" * 3999 + ",", slow=["1,", "1e5,", '{"a":1},', "[],", '[{"b":[0]}],'])
def test_tool_calls(unit: str) -> None:
    assert_linear(lambda text: read_hermes(text, ()), call_of(unit))


@units(OPEN, slow=[f"{OPEN}{{}}{CLOSE}", "a b "])
def test_completions(unit: str) -> None:
    assert_linear(CHAT.parse, lambda size: TOKENIZER.encode(repeated(unit)(size)), large=300_000)


@pytest.mark.slow
@units("<", slow=["a", "\0", "\ud83d", "\n", "\u2028"])
def test_transcripts_and_the_report(unit: str, tmp_path: Path) -> None:
    def write(scored: ScoredEpisode) -> None:
        for phase in ("before", "after"):
            path = tmp_path / "episodes" / f"{phase}.jsonl"
            path.unlink(missing_ok=True)
            append_transcripts(path, [transcript(TASK, scored, phase=phase, step=0)])
        write_report(tmp_path)

    assert_linear(write, lambda size: episode_with_text(repeated(unit)(size)))


def episode_with_text(text: str) -> ScoredEpisode:
    """An episode with the text in every field that an agent can write."""
    code = text.encode("utf-8", "replace").decode()
    turn = Turn(
        prompt_ids=(),
        completion_ids=(),
        logprobs=(),
        versions=(),
        message=Message(role="assistant", content=text, tool_calls=(ToolCall(name=code, arguments={code: [code]}),)),
        finish_reason="stop",
        tool_results=(ToolResult(name="f", output=text, ok=True),),
    )
    failure = Failure(stage="collect", blame=Blame.POLICY, kind="k", message=text)
    trajectory = Trajectory(agent="main", turns=(turn,))
    episode = Episode(id="e", task_id="t", task_key="k", trajectories=(trajectory,), answer=text, failures=(failure,))
    return ScoredEpisode(episode=episode, score=Score(value=0.0, evidence=text))
