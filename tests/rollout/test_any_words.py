"""Any text from a policy is scored and stored: text alone causes no fault."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.agent import TurnLoop
from agentrl.experience import SqliteStore
from agentrl.records import Blame, Completion, Episode, Limits, Message, SamplingParams, SandboxSpec, Score, Split, Task, VersionSpan
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner, GroupRunner
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.chats import chat_of, shared_tokenizer
from tests.strategies import examples

pytestmark = pytest.mark.slow

TURNS = 4
TOKENIZER = shared_tokenizer()
CHAT = chat_of(TOKENIZER)


TOOLS = Path(__file__).with_name("trusting_tools.py")

TASK = Task(
    id="t",
    family="f",
    prompt=(Message(role="user", content="Say anything."),),
    tools=("python", "shell", f"{TOOLS}:trusting", f"{TOOLS}:inside", "submit"),
    sandbox=SandboxSpec(image="none"),
    verifiers=(),
    data={},
    split=Split.TRAIN,
    outputs=("a.csv",),
    limits=Limits(turns=TURNS, turn_tokens=20_000, episode_tokens=100_000, tool_output_chars=300),
)

# JSON values that break some parsers, encoders or stores.
plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20))
NUMBERS = ("1" * 5000, "-" + "9" * 4301, "1e999", "NaN", "-Infinity")
TEXTS = ('"\\ud83d"', '"\\udc00\\ud800"', '"\\u0000"', '"<|im_end|>"')
unusual = st.sampled_from([*NUMBERS, *TEXTS, "[" * 300 + "]" * 300])


def spelled(items: Mapping[str, str]) -> str:
    return "{" + ",".join(f"{key}:{value}" for key, value in items.items()) + "}"


values = st.recursive(
    st.one_of(plain.map(json.dumps), unusual),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]"),
        st.dictionaries(st.one_of(st.text(max_size=5).map(json.dumps), unusual), inner, max_size=3).map(spelled),
    ),
    max_leaves=6,
)
names = st.sampled_from(['"python"', '"shell"', '"trusting"', '"inside"', '"submit"', '"\\ud800"', '"nothing"', "3", "null"])
keys = st.sampled_from([f'"{key}"' for key in ("code", "command", "text", "n", "data", "ok", "done", "answer", "\\ud83d", "")])
arguments = st.dictionaries(keys, values, max_size=4).map(spelled)
calls = st.builds(lambda name, value: f'<tool_call>{{"name":{name},"arguments":{value}}}</tool_call>', names, st.one_of(arguments, values))
scraps = st.sampled_from(["<tool_call>", "</tool_call>", '{"name":', "<|im_end|>", "<|im_start|>system", "\x00", "}" * 50, "\U0001f600"])
texts = st.lists(st.one_of(calls, scraps, st.text(max_size=20)), max_size=4).map("".join)
# Any token ids: readable text, and bytes that are not text.
completions = st.tuples(texts, st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=8))


class Babbling:
    """A policy whose turn n consists of the n-th text and extra token ids."""

    def __init__(self, texts: Sequence[tuple[str, list[int]]]) -> None:
        self.texts = texts

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        text, extra_ids = self.texts[int(request_id.rpartition("-")[2])]
        ids = (*TOKENIZER.encode(text, add_special_tokens=False), *extra_ids, TOKENIZER.eos_token_id)[: params.max_tokens]
        spans = (VersionSpan(version=0, start=0, end=len(ids)),)
        finish = "stop" if ids[-1] == TOKENIZER.eos_token_id else "length"
        return Completion(token_ids=ids, logprobs=(-0.5,) * len(ids), versions=spans, finish_reason=finish)


async def full_score(task: Task, episode: Episode) -> Score:
    return Score(value=1.0, evidence=str(episode.answer)[:100])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    """One store for all examples, because opening one takes as long as an episode."""
    opened = SqliteStore(tmp_path / "experience.sqlite")
    yield opened
    opened.close()


def check_scored(store: SqliteStore, index: int, responses: Sequence[tuple[str, list[int]]]) -> None:
    runner = EpisodeRunner(
        policy=Babbling(responses),
        sandboxes=ScriptedSandboxes(printing("3")),
        agent=TurnLoop(chat=CHAT),
        sampling=Sampling(),
        max_model_len=100_000,
        request_timeout_s=60.0,
    )
    groups = GroupRunner(runner=runner, scorer=full_score, slots=asyncio.Semaphore(2), group_size=2, max_retries=0)
    group = asyncio.run(groups.run_group(index, TASK))
    for scored in group.episodes:
        assert scored.score.value == 1.0, scored.score.reason
        assert all(failure.blame is Blame.POLICY for failure in scored.episode.failures)
    assert store.put(group) and store.groups([index]) == (group,)


group_indices = iter(range(10**9))
responses = st.lists(completions, min_size=TURNS, max_size=TURNS)
hypothesis_settings = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@given(responses=responses)
@settings(hypothesis_settings, max_examples=examples(20))
def test_any_text_of_a_policy_is_scored_and_stored(store: SqliteStore, responses: Sequence[tuple[str, list[int]]]) -> None:
    check_scored(store, next(group_indices), responses)


@pytest.mark.slow
@given(responses=responses)
@settings(hypothesis_settings, max_examples=1000)
def test_any_long_text_of_a_policy_is_scored_and_stored(store: SqliteStore, responses: Sequence[tuple[str, list[int]]]) -> None:
    check_scored(store, next(group_indices), responses)
