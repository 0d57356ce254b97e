"""A policy gains nothing by provoking its exclusion: provoked faults are scored like honest failures.

The last tests train a policy on these outcomes with each built-in estimator and loss.

Policies have three arms: they solve the task, fail honestly, or provoke a fault. Their groups are run, scored and turned into
advantages by the real parts. The gain of an arm is the mean advantage of the attempts in which it was drawn; an excluded attempt
gains 0, which exceeds an honest failure in a group with a success.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch

from agentrl.agent import ToolOutcome, TurnLoop
from agentrl.agent.mcp import RunTools, Server
from agentrl.agent.mcp.transports import Transport, Unanswered
from agentrl.agent.tools import function_schema
from agentrl.base.tool_list import usable_tools
from agentrl.config import MCPConfig, ObjectiveConfig, build
from agentrl.errors import RequestRefused, SandboxError, SandboxTimeout
from agentrl.objective.advantages import batch_advantages
from agentrl.objective.policy_loss import TrainedTokens, policy_loss
from agentrl.objective.samples import assemble
from agentrl.protocols import Sandbox
from agentrl.records import (
    CUT,
    Blame,
    Completion,
    Episode,
    ExecResult,
    Failure,
    Group,
    Limits,
    Message,
    SamplingParams,
    Score,
    ScoredEpisode,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
)
from agentrl.records.sampling import Sampling
from agentrl.reward import TaskScorer
from agentrl.rollout import EpisodeRunner, GroupRunner
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.clock import run_virtually
from agentrl.testing.sandboxes import printing, sample_task
from tests.chats import chat_of, shared_tokenizer

pytestmark = pytest.mark.slow

TOKENIZER = shared_tokenizer()
GROUPS, SIZE = 12, 8
ARMS = ("solve", "fail", "provoke")
PYTHON = '<tool_call>{"name": "python", "arguments": {"code": "print(3)"}}</tool_call>'
BOOM = "BOOM"
TOOLS = {
    "fails a tool": f"{__file__}:look_up",
    "fails a tool that is not called again": f"{__file__}:look_up_once",
    "fails an MCP server": "mcp:library",
    "kills an MCP server": "mcp:library",
}
"""Ways in which an agent can make one of its calls report an outage, and the tool of each."""
RARE = ("breaks the sandbox", "loses the sandbox")
"""Ways that are blamed on the policy while few episodes use them (`agentrl.rollout.repeats`). Above a tenth, an alert reports them."""
WAYS = (
    *("babbles", "is refused by the server", "cannot be read", "cannot be shown", "breaks the judge", "stalls the judge", "says nonsense"),
    *TOOLS,
    *RARE,
)


def submit(answer: str) -> str:
    return f'<tool_call>{{"name": "submit", "arguments": {{"answer": "{answer}"}}}}</tool_call>'


def look_for(text: str) -> str:
    return f'<tool_call>{{"name": "look_up", "arguments": {{"text": "{text}"}}}}</tool_call>'


class LookUp:
    """A tool whose backend fails for one key, like a service with a bug."""

    name, needs_sandbox = "look_up", False
    schema = function_schema("look_up", "Looks a key up.", "text", "the key")

    def __init__(self, *, repeats: bool = True) -> None:
        self.repeats = repeats

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        await asyncio.sleep(0.1)
        if arguments["text"] == "bad":
            raise ConnectionResetError(104, "Connection reset by peer")
        return ToolOutcome(output="found", ok=True)


look_up, look_up_once = LookUp(), LookUp(repeats=False)


class Scripted(Transport):
    """An MCP server with a tool like `LookUp`."""

    def __init__(self, way: str) -> None:
        self.way = way

    async def request(self, messages: Sequence[str], until: int | None, *, begin: bool, sandbox: Sandbox | None, timeout_s: float) -> bytes:
        await asyncio.sleep(0.1)
        message = json.loads(messages[-1])
        answers: dict[str, dict[str, Any]] = {
            "initialize": {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}},
            "tools/list": {"tools": [OFFER]},
            "tools/call": {"content": [{"type": "text", "text": "found"}]},
        }
        answer: dict[str, Any] = {"result": answers[message["method"]]}
        if message["method"] == "tools/call" and message["params"]["arguments"]["text"] == "bad":
            if self.way == "kills an MCP server":
                raise Unanswered("ended", "it has ended (exit code 3)")
            answer = {"error": {"code": -32603, "message": "Internal error"}}
        return json.dumps({"jsonrpc": "2.0", "id": until, **answer}).encode()

    async def close(self) -> None: ...


parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
OFFER = {"name": "look_up", "description": "Looks a key up.", "inputSchema": parameters}


class ScriptedServer(Server):
    def transport(self) -> Transport:
        return Scripted(self.name)


def run_tools(way: str) -> RunTools:
    config = MCPConfig(url="http://127.0.0.1:9/mcp")
    server = ScriptedServer(name=way, config=config, root=Path(), offers=usable_tools([OFFER], ()))
    return RunTools(servers={"library": server}, bounds={})


class Bandit(ScriptedPolicy):
    """Draws an arm for each attempt, and plays it."""

    def __init__(self, way: str, seed: int) -> None:
        super().__init__(TOKENIZER, self._turn)
        self.way, self.draw = way, random.Random(seed)
        self.arms: dict[str, str] = {}

    def arm(self, episode: str) -> str:
        if self.way not in RARE:
            return self.arms.setdefault(episode, self.draw.choice(ARMS))
        first = f"{episode.rpartition('-a')[0]}-a0"  # a retry has the arm of the attempt that it repeats
        drawn = self.arms.get(first) or self.draw.choices(ARMS, (12, 12, 1))[0]
        self.arms[first] = self.arms[episode] = drawn
        return drawn

    def _turn(self, turn: int, episode: str) -> str:
        arm = self.arm(episode)
        if self.way in TOOLS and turn == 0:
            return look_for("bad" if arm == "provoke" else "good")
        if self.way in RARE and turn == 0 and arm != "provoke":
            return PYTHON
        if arm != "provoke" or self.way in TOOLS:
            return submit("3" if arm == "solve" else "4")
        responses = {
            "breaks the sandbox": f'<tool_call>{{"name": "python", "arguments": {{"code": "{BOOM}"}}}}</tool_call>',
            "loses the sandbox": f'<tool_call>{{"name": "python", "arguments": {{"code": "{BOOM}{BOOM}"}}}}</tool_call>',
            "is refused by the server": PYTHON,
            "cannot be read": BOOM,
            "cannot be shown": f"{BOOM}{PYTHON}",
            "breaks the judge": submit("boom"),
            "stalls the judge": submit("9**9**9"),
            "says nonsense": '<tool_call>{"name": 3, "arguments": "\\ud800"}</tool_call>' * 3,
        }
        return responses[self.way]

    async def generate(self, prompt_ids: Any, params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        episode, _, turn = request_id.partition(".")[0].rpartition("-")
        if self.arm(episode) == "provoke" and self.way == "babbles":
            await asyncio.sleep(timeout_s)
            count = max(1, min(params.max_tokens, int(20 * timeout_s)))
            spans = (VersionSpan(version=0, start=0, end=count),)
            return Completion(token_ids=(5,) * count, logprobs=(-0.5,) * count, versions=spans, finish_reason=CUT)
        if self.arm(episode) == "provoke" and self.way == "is refused by the server" and turn != "0":
            raise RequestRefused("status 400: token out of range")
        await asyncio.sleep(self.draw.uniform(0.2, 2.0) if self.way in TOOLS else 0.5)
        return await super().generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)


def failing_chat(way: str) -> Any:
    base: Any = type(chat_of(TOKENIZER))

    class Chat(base):  # type: ignore[misc]
        def parse(self, ids: Any, *arguments: Any) -> Any:
            if way == "cannot be read" and BOOM in TOKENIZER.decode(list(ids)):
                raise OverflowError("an id that is no character")
            return super().parse(ids, *arguments)

        def tool_delta(self, outputs: Any, after: Any = None) -> Any:
            if way == "cannot be shown" and after is not None and BOOM in after.message.content:
                raise UnicodeError("no such character")
            return super().tool_delta(outputs, after)

    return Chat(TOKENIZER)


def run_program(code: str) -> ExecResult:
    """A sandbox layer with bugs: one program ends the exec server, and another one is never answered."""
    if code == BOOM:
        raise SandboxError("the exec server ended")
    if code == BOOM * 2:
        raise SandboxTimeout("no answer within 30 s")
    return printing("3")(code)


async def judge(task: Task, episode: Episode) -> Score:
    if episode.answer == "boom":
        raise RecursionError("too deep")
    if episode.answer == "9**9**9":
        await asyncio.sleep(10**6)
    return Score(value=float(episode.answer == "3"))


async def strict_judge(task: Task, episode: Episode) -> Score:
    """Scores a wrong answer below no answer."""
    return Score(value={"3": 1.0, None: 0.0}.get(episode.answer, -1.0))


TASK = replace(
    sample_task(),
    tools=("python", "submit"),
    verifiers=(f"{__file__}:judge",),
    limits=Limits(turns=3, turn_tokens=100_000, episode_tokens=200_000, wall_s=60.0),
)


async def played(way: str, seed: int, verifier: str = "judge") -> tuple[list[Group], Bandit]:
    policy = Bandit(way, seed)
    runner = EpisodeRunner(
        policy=policy,
        sandboxes=ScriptedSandboxes(run_program),
        agent=TurnLoop(chat=failing_chat(way)),
        sampling=Sampling(),
        max_model_len=10**6,
        request_timeout_s=120.0,
        tools=run_tools(way),
    )
    slots = asyncio.Semaphore(8 if way in RARE else 64)
    groups = GroupRunner(runner=runner, scorer=TaskScorer(timeout_s=10.0), slots=slots, group_size=SIZE, max_retries=2)
    count = 2 * GROUPS if way in RARE else GROUPS
    task = replace(TASK, tools=(TOOLS.get(way, "python"), "submit"), verifiers=(f"{__file__}:{verifier}",))
    tasks = [replace(task, id=f"task {index}") for index in range(count)]
    if way not in RARE:
        return [await groups.run_group(index, task) for index, task in enumerate(tasks)], policy
    concurrent = await asyncio.gather(*(groups.run_group(index, task) for index, task in enumerate(tasks)))
    counted = concurrent[:GROUPS]  # the groups that run later show that the sandboxes work
    policy.arms = {one.episode.id: policy.arm(one.episode.id) for group in counted for one in group.episodes}  # repetitions count once
    return counted, policy


def gains(groups: list[Group], arms: dict[str, str]) -> dict[str, float]:
    """Returns the mean advantage of all attempts of each arm, including retried and excluded ones."""
    advantages_by_arm = defaultdict[str, list[float]](list)
    trained: set[str] = set()
    for group, advantages in zip(groups, batch_advantages(groups, ObjectiveConfig(), min_group_size=2), strict=True):
        for scored, value in zip(group.episodes, advantages.values, strict=True):
            advantages_by_arm[arms[scored.episode.id]].append(value or 0.0)
            trained.add(scored.episode.id)
    for episode, arm in arms.items():
        if episode not in trained:
            advantages_by_arm[arm].append(0.0)
    return {arm: fmean(values) for arm, values in advantages_by_arm.items()}


@cache
def results(way: str) -> tuple[list[Group], Bandit]:
    return run_virtually(played(way, seed=WAYS.index(way)))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("way", WAYS)
def test_provoking_an_exclusion_scores_no_higher_than_failing(way: str) -> None:
    groups, policy = results(way)
    excluded = [scored for group in groups for scored in group.episodes if scored.score.value is None]
    assert not excluded, f"{excluded[0].episode.failures} {excluded[0].score}"
    assert {failure.blame for group in groups for scored in group.episodes for failure in scored.episode.failures} <= {Blame.POLICY}
    retried = sum(scored.episode.attempt for group in groups for scored in group.episodes)
    # A real outage is rarely seen by only one call; an outage that most calls see is real (`agentrl.agent.outage_blame`).
    provoking = sum(arm == "provoke" for arm in policy.arms.values())
    allowed = 2 * provoking if way in RARE else provoking // 4 if way in TOOLS else 1  # two repetitions show that the actions matter
    assert retried <= allowed, f"{retried} attempts were retried"
    gained = gains(groups, policy.arms)
    assert gained["solve"] > 0 > gained["fail"]
    # Arms are drawn at random, so even equal arms differ a little; 0, the gain of exclusion, is far away.
    assert gained["provoke"] < 0.5 * gained["fail"], gained


def test_the_measure_detects_a_provoked_exclusion() -> None:
    """If provoked faults excluded episodes, provoking would gain more than failing, and the test above would fail."""

    class Excluding(Bandit):
        async def generate(self, prompt_ids: Any, params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
            if self.arm(request_id.partition(".")[0].rpartition("-")[0]) == "provoke":
                raise ConnectionResetError("an undetected fault that the policy can cause")
            return await super().generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)

    async def play() -> tuple[list[Group], Bandit]:
        policy = Excluding("says nonsense", 1)
        runner = EpisodeRunner(
            policy=policy,
            sandboxes=ScriptedSandboxes(printing("3")),
            agent=TurnLoop(chat=chat_of(TOKENIZER)),
            sampling=Sampling(),
            max_model_len=4096,
            request_timeout_s=120.0,
        )
        groups = GroupRunner(runner=runner, scorer=TaskScorer(), slots=asyncio.Semaphore(64), group_size=SIZE, max_retries=2)
        task = replace(TASK, limits=Limits(turns=3, turn_tokens=400, episode_tokens=4000))
        return [await groups.run_group(index, task) for index in range(GROUPS)], policy

    groups, policy = run_virtually(play())
    gained = gains(groups, policy.arms)
    assert gained["provoke"] == 0.0 > gained["fail"]


START = (0.2, 0.4, 0.4)
"""Failing and provoking start with equal probabilities: a softmax moves unequal ones apart even if both gain the same."""
MUCH = 1.5
"""Ratio of probabilities that is not reached by chance."""
OBJECTIVES = (
    *({"advantage": name} for name in ("grpo", "rloo", "reinforce++", "reinforce++-baseline")),
    *({"loss": name} for name in ("gspo", "cispo")),
    {"advantage": "gae"},
)


def outcomes_by_arm(groups: Sequence[Group], arms: Mapping[str, str]) -> dict[str, list[ScoredEpisode]]:
    """Returns the episodes that the real parts ran and scored, by arm."""
    by_arm = defaultdict[str, list[ScoredEpisode]](list)
    for scored in (scored for group in groups for scored in group.episodes):
        by_arm[arms[scored.episode.id]].append(scored)
    return by_arm


def one_token(outcome: ScoredEpisode, name: str, arm: int, logprob: float) -> ScoredEpisode:
    """Returns an outcome whose episode sampled one token: its arm."""
    message = Message(role="assistant", content="")
    spans = (VersionSpan(version=0, start=0, end=1),)
    turn = Turn(prompt_ids=(9,), completion_ids=(arm,), logprobs=(logprob,), versions=spans, message=message, finish_reason="stop")
    trajectory = Trajectory(agent="main", turns=(turn,), stop_reason="submitted")
    episode = Episode(id=name, task_id="t", task_key="k", trajectories=(trajectory,), failures=outcome.episode.failures)
    return ScoredEpisode(episode=episode, score=Score(value=outcome.score.value, reason=outcome.score.reason))


def trained(outcomes: Mapping[str, Sequence[ScoredEpisode]], changes: Mapping[str, Any], *, steps: int = 8) -> dict[str, float]:
    """Returns the arm probabilities after training on these outcomes with the product's groups, advantages, samples and loss."""
    critic: dict[str, Any] = {"critic": {}} if changes.get("advantage") == "gae" else {}
    recipe = build({"name": "t", "policy": {"model": "m"}, "tasks": {"family": "a:b"}, "objective": changes, **critic})
    draw, logits = random.Random(0), torch.tensor(START, dtype=torch.float64).log().requires_grad_()
    for step in range(steps):
        before = logits.log_softmax(0).tolist()
        groups = []
        for index in range(GROUPS):
            arms = draw.choices(range(3), [math.exp(value) for value in before], k=SIZE)
            episodes = [one_token(draw.choice(outcomes[ARMS[arm]]), f"{index}-{n}", arm, before[arm]) for n, arm in enumerate(arms)]
            groups.append(Group(index=index, task_id="t", task_key="k", episodes=tuple(episodes)))
        if not (samples := assemble(step, groups, recipe).batch.samples):
            break  # only one arm remains
        advantages = [value for sample in samples for value in (sample.advantages or sample.rewards)[1:]]
        if critic:  # the advantages of a critic that knows the mean return, whitened
            advantages = [(value - fmean(advantages)) / (pstdev(advantages) or 1.0) for value in advantages]
        tokens = TrainedTokens(
            logprobs=logits.log_softmax(0)[[sample.token_ids[1] for sample in samples]],
            behaviour=torch.tensor([sample.logprobs[1] for sample in samples], dtype=torch.float64),
            advantages=torch.tensor(advantages, dtype=torch.float64),
            sequence=torch.arange(len(samples)),
        )
        (gradient,) = torch.autograd.grad(policy_loss(tokens, recipe.objective, denominator=float(len(samples))).loss, (logits,))
        logits = (logits - 0.5 * gradient).detach().requires_grad_()
    return dict(zip(ARMS, logits.softmax(0).tolist(), strict=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_trained_policy_does_not_learn_to_be_excluded(way: str) -> None:
    groups, policy = results(way)
    outcomes = outcomes_by_arm(groups, policy.arms)
    for changes in OBJECTIVES if way in ("cannot be read", "breaks the sandbox") else OBJECTIVES[:1]:
        end = trained(outcomes, changes)
        assert end["solve"] > START[0] and end["provoke"] < START[2], (changes, end)
        assert end["provoke"] < MUCH * end["fail"], (changes, end)


@pytest.mark.parametrize("way", ["cannot be shown", "breaks the sandbox"])
def test_a_provoked_end_without_an_answer_is_no_better_than_a_negative_score(way: str) -> None:
    groups, policy = run_virtually(played(way, WAYS.index(way), "strict_judge"))
    outcomes = outcomes_by_arm(groups, policy.arms)
    failed, provoked = ([scored.score.value or 0.0 for scored in outcomes[arm]] for arm in ("fail", "provoke"))
    assert set(failed) == {-1.0} and fmean(provoked) < -0.8, "it is 0 only in a group in which no attempt fails"
    end = trained(outcomes, OBJECTIVES[0])
    assert end["provoke"] < START[2] and end["provoke"] < MUCH * end["fail"]


@pytest.mark.parametrize("changes", OBJECTIVES, ids=str)
def test_the_training_detects_an_exclusion_that_pays(changes: Mapping[str, Any]) -> None:
    """If provoking excluded the episode, its probability would grow above that of failing, which starts equal."""
    score = {"solve": 1.0, "fail": 0.0}
    fault = Failure(stage="sandbox", blame=Blame.INFRASTRUCTURE, kind="SandboxError", message="", turn=1)
    episode = Episode(id="e", task_id="t", task_key="k", trajectories=())
    outcomes = {arm: [ScoredEpisode(episode=episode, score=Score(value=value))] for arm, value in score.items()}
    outcomes["provoke"] = [ScoredEpisode(episode=replace(episode, failures=(fault,)), score=Score(value=None, reason="excluded"))]
    end = trained(outcomes, changes)
    assert end["provoke"] > MUCH * end["fail"]
