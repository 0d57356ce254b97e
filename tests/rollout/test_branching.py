"""Episodes that start from a state, as continuations or as branches."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import pytest

from agentrl.errors import SandboxError, ServingError
from agentrl.records import MAX_SNAPSHOT_BYTES, Blame, Episode, EpisodeState, ExecResult, Limits, Score, ScoredEpisode, Task, Turn, codec
from agentrl.rollout import CaptureState, GroupRunner
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing

PYTHON = '<tool_call>\n{"name": "python", "arguments": {"code": "print(3)"}}\n</tool_call>'
SUBMIT = '<tool_call>\n{"name": "submit", "arguments": {"answer": "3"}}\n</tool_call>'


class States:
    """An `on_turn` that captures every state."""

    def __init__(self) -> None:
        self.seen: list[EpisodeState] = []

    async def __call__(self, turns: int, capture: CaptureState) -> None:
        state = await capture()
        assert state is not None and state.turn_count == turns
        self.seen.append(state)


class Store:
    """In-memory checkpoints, through their serialized form."""

    def __init__(self) -> None:
        self.states: dict[tuple[int, int], bytes] = {}
        self.scored: dict[tuple[int, int], ScoredEpisode] = {}

    async def save_state(self, group: int, member: int, state: EpisodeState) -> None:
        self.states[group, member] = codec.to_json(state)

    async def save_scored(self, group: int, member: int, scored: ScoredEpisode) -> None:
        self.scored[group, member] = scored

    async def load(self, group: int, member: int) -> EpisodeState | ScoredEpisode | None:
        state = self.states.get((group, member))
        return self.scored.get((group, member)) or (None if state is None else codec.from_json(EpisodeState, state))


async def score(task: Task, episode: Episode) -> Score:
    return Score(value=1.0)


def group_runner(runner: Any, *, size: int, retries: int = 0, keeper: Store | None = None, turn: int = 1, branches: int = 1) -> GroupRunner:
    return GroupRunner(
        runner=runner,
        scorer=score,
        slots=asyncio.Semaphore(size),
        group_size=size,
        max_retries=retries,
        branches=branches,
        branch_turn=turn,
        checkpoints=keeper,
    )


def talkative(tokenizer: Any) -> ScriptedPolicy:
    """Returns a new text for each request, so that turns can be distinguished; submits in its third turn."""
    fresh = itertools.count()
    return ScriptedPolicy(tokenizer, lambda turn, _: f"{next(fresh)} {SUBMIT if turn == 2 else PYTHON}")


async def test_an_episode_continues_exactly_where_its_state_was_captured(tokenizer: Any, task: Task, make_runner: Any) -> None:
    states, sandboxes = States(), ScriptedSandboxes(printing("3\n"))
    uninterrupted = await make_runner(talkative(tokenizer), sandboxes).run(task, episode_id="e", on_turn=states)
    state = codec.from_json(EpisodeState, codec.to_json(states.seen[1]))
    assert [seen.turn_count for seen in states.seen] == [1, 2] and state == states.seen[1]

    programs_run: list[str] = []
    sandboxes_after = ScriptedSandboxes(lambda code: programs_run.append(code) or printing("4")(code))  # type: ignore[func-returns-value]
    policy = talkative(tokenizer)
    continued = await make_runner(policy, sandboxes_after).run(task, episode_id="e", start=state)
    (before,), (after,) = uninterrupted.trajectories, continued.trajectories
    assert after.turns[:2] == before.turns[:2] and after.inherited == () and continued.answer == "3"
    assert after.turns[2].prompt_ids == before.turns[2].prompt_ids
    assert programs_run == [] and sandboxes_after.opened == [], "no call is repeated, and the last turn needs no sandbox"
    context = tuple(token for turn in before.turns[:2] for token in (*turn.prompt_ids, *turn.completion_ids))
    assert policy.prompts == [context + state.prompt_ids[0]]
    assert continued.wall_s >= state.wall_s and continued.sandbox_s >= state.sandbox_s


async def test_the_sandbox_opens_from_the_snapshot_without_the_tasks_files(tokenizer: Any, task: Task, make_runner: Any) -> None:
    def edit_files(code: str) -> ExecResult:
        (sandbox,) = sandboxes.opened
        sandbox.files = {"b.csv": b"made by the agent"}
        return printing("3")(code)

    states, sandboxes = States(), ScriptedSandboxes(edit_files)
    await make_runner(talkative(tokenizer), sandboxes).run(task, episode_id="e", on_turn=states)
    sandboxes_after = ScriptedSandboxes(printing("3"))
    await make_runner(talkative(tokenizer), sandboxes_after).run(task, episode_id="e", start=states.seen[0])
    assert [sandbox.files for sandbox in sandboxes_after.opened] == [{"b.csv": b"made by the agent"}]


async def test_time_spent_before_a_continuation_counts_toward_the_limit(tokenizer: Any, task: Task, make_runner: Any) -> None:
    states = States()
    await make_runner(talkative(tokenizer)).run(task, episode_id="e", on_turn=states)
    late = replace(states.seen[0], wall_s=task.limits.wall_s, program_s=task.limits.wall_s)
    stalling = Stalling(tokenizer, talkative(tokenizer).script)
    stalling.stall = 1
    async with asyncio.timeout(task.limits.wall_s / 2):
        episode = await make_runner(stalling).run(task, episode_id="e", start=late)
    assert (episode.trajectories[0].stop_reason, len(episode.trajectories[0].turns), episode.left_out) == ("wall_limit", 1, False)
    with pytest.raises(ValueError, match="belongs to a task other than"):
        await make_runner(talkative(tokenizer)).run(replace(task, id="other"), episode_id="e", start=late)


async def test_branches_inherit_turns_that_they_did_not_sample(tokenizer: Any, task: Task, make_runner: Any) -> None:
    states, sandboxes = States(), ScriptedSandboxes(printing("3"))
    runner = make_runner(talkative(tokenizer), sandboxes)
    await runner.run(task, episode_id="stem", on_turn=states)
    deeper = States()
    twigs = [await runner.run(task, episode_id=f"twig-{number}", start=states.seen[0]) for number in range(3)]
    await runner.run(task, episode_id="leaf-of", start=states.seen[0], on_turn=deeper)
    leaf = await runner.run(task, episode_id="leaf", start=deeper.seen[0])
    branches = [twig.trajectories[0] for twig in twigs]
    assert [branch.turns[:1] for branch in branches] == [states.seen[0].trajectories[0].turns] * 3 and len(
        {branch.turns[1].completion_ids for branch in branches}
    ) == 3
    assert {branch.inherited for branch in branches} == {("stem",)}
    assert leaf.trajectories[0].inherited == ("stem", "leaf-of")
    assert leaf.completion_tokens == len(leaf.trajectories[0].turns[2].completion_ids)
    assert len(sandboxes.opened) == 1 + 3 + 1, "each continuation has its own sandbox; the leaf submits and needs none"


async def test_a_rejected_snapshot_is_an_infrastructure_fault(tokenizer: Any, task: Task, make_runner: Any) -> None:
    class Refusing(ScriptedSandboxes):
        async def open(self, *args: Any, snapshot: bytes | None = None, **options: Any) -> Any:
            raise ValueError("not an archive")

    states = States()
    await make_runner(talkative(tokenizer)).run(task, episode_id="e", on_turn=states)
    episode = await make_runner(talkative(tokenizer), Refusing(printing(""))).run(task, episode_id="e", start=states.seen[0])
    assert [(f.stage, f.blame, f.retryable) for f in episode.failures] == [("sandbox", Blame.INFRASTRUCTURE, True)]
    assert "not an archive" in episode.failures[0].message


async def test_a_working_directory_too_large_to_capture_does_not_stop_the_episode(tokenizer: Any, task: Task, make_runner: Any) -> None:
    states = States()
    await make_runner(talkative(tokenizer)).run(task, episode_id="e", on_turn=states)
    with pytest.raises(ValueError, match="at most 64 MiB"):
        replace(states.seen[0], snapshot=bytes(MAX_SNAPSHOT_BYTES + 1))

    class Full(ScriptedSandboxes):
        async def open(self, *args: Any, **options: Any) -> Any:
            sandbox = await super().open(*args, **options)
            sandbox.snapshot = too_large
            return sandbox

    async def too_large() -> bytes:
        raise ValueError("larger than a snapshot may be")

    store = Store()
    runner = make_runner(talkative(tokenizer), Full(printing("3")))
    group = await group_runner(runner, size=2, turn=1, branches=2, keeper=store).run_group(0, task)
    assert len(group.scored) == 2 and store.states == {}
    assert all(e.episode.trajectories[0].inherited == () for e in group.episodes), "nothing to branch from, so they start from the task"


async def test_a_group_of_stems_and_branches(tokenizer: Any, task: Task, make_runner: Any) -> None:
    policy = talkative(tokenizer)
    group = await group_runner(make_runner(policy), size=6, turn=2, branches=3).run_group(7, task)
    lines = [scored.episode.trajectories[0] for scored in group.scored]
    assert [line.inherited for line in lines] == [(), *[("g000007-0-a0",) * 2] * 2, (), *[("g000007-3-a0",) * 2] * 2]
    assert lines[0].turns[:2] == lines[1].turns[:2] == lines[2].turns[:2] != lines[3].turns[:2] == lines[5].turns[:2]
    assert len({line.turns[2].completion_ids for line in lines}) == 6 and len(policy.prompts) == 2 * 3 + 4 * 1, (
        "shared turns are sampled once"
    )


async def test_branches_of_a_stem_that_ends_early_start_from_the_task(tokenizer: Any, task: Task, make_runner: Any) -> None:
    policy = ScriptedPolicy(tokenizer, lambda turn, _: SUBMIT)
    group = await group_runner(make_runner(policy), size=4, turn=1, branches=2).run_group(0, task)
    assert len(group.scored) == 4 and len(policy.prompts) == 4
    last = replace(task, limits=Limits(turns=1, turn_tokens=200, episode_tokens=2000))
    short = await group_runner(make_runner(ScriptedPolicy.saying(tokenizer, PYTHON)), size=2, turn=1, branches=2).run_group(0, last)
    assert [e.episode.trajectories[0].inherited for e in short.scored] == [(), ()], "there is no turn left to sample"


async def test_branches_survive_a_stem_that_fails_after_the_fork(tokenizer: Any, task: Task, make_runner: Any) -> None:
    def stem_dies(turn: int, episode: str) -> str:
        if turn == 1 and episode == "g000000-0-a0":
            raise ServingError("gone")
        return SUBMIT if turn == 2 else PYTHON

    group = await group_runner(make_runner(ScriptedPolicy(tokenizer, stem_dies)), size=2, retries=1, turn=1, branches=2).run_group(0, task)
    stem, branch = (e.episode for e in group.scored)
    assert (stem.id, stem.trajectories[0].inherited) == ("g000000-0-a1", ())
    assert branch.trajectories[0].inherited == ("g000000-0-a0",)


async def die_at(runner: GroupRunner, task: Task, ready: Any, *, index: int = 0) -> None:
    """Runs a group until `ready()`, then cancels it, as if the process had died."""
    running = asyncio.create_task(runner.run_group(index, task))
    while not ready():
        await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


class Stalling(ScriptedPolicy):
    """Never answers turn `stall`, unless the episode's id says otherwise."""

    stall = 2
    exempt = "-none"

    async def generate(self, prompt_ids: Any, params: Any, *, request_id: str, timeout_s: float) -> Any:
        if request_id.endswith(f"-{self.stall}") and self.exempt not in request_id:
            await asyncio.sleep(3600)
        return await super().generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)


async def test_a_killed_group_continues_with_its_turns_and_branches(tokenizer: Any, task: Task, make_runner: Any) -> None:
    store, first = Store(), Stalling(tokenizer, talkative(tokenizer).script)
    first.exempt = "g000000-3-"
    dying = group_runner(make_runner(first), size=4, keeper=store, turn=1, branches=2)
    await die_at(dying, task, lambda: len(store.scored) == 1 and all(len(stored_turns(store, m)) == 2 for m in (0, 1, 2)))
    before = {member: stored_turns(store, member) for member in (0, 1, 2)}

    policy = talkative(tokenizer)
    group = await group_runner(make_runner(policy), size=4, keeper=store, turn=1, branches=2).run_group(0, task)
    assert len(policy.prompts) == 3, "only the last turn of the three unfinished attempts"
    episodes = [scored.episode for scored in group.scored]
    assert [episode.trajectories[0].turns[:2] for episode in episodes[:3]] == [before[member] for member in (0, 1, 2)]
    assert [episode.trajectories[0].inherited for episode in episodes] == [(), ("g000000-0-a0",), (), ("g000000-2-a0",)]
    assert group.episodes[3] == store.scored[0, 3]


def stored_turns(store: Store, member: int) -> tuple[Turn, ...]:
    state = store.states.get((0, member))
    return () if state is None else codec.from_json(EpisodeState, state).trajectories[0].turns


async def test_a_stem_restored_before_or_at_its_fork_branches_again(tokenizer: Any, task: Task, make_runner: Any) -> None:
    states = States()
    await make_runner(talkative(tokenizer)).run(task, episode_id="g000000-0-a0", on_turn=states)
    first, second = states.seen
    stem = ("g000000-0-a0",)
    for state, fork, inherited in ((first, 1, stem), (second, 1, ()), (first, 2, stem * 2), (second, 2, stem * 2)):
        store = Store()
        await store.save_state(0, 0, state)
        group = await group_runner(make_runner(talkative(tokenizer)), size=2, keeper=store, turn=fork, branches=2).run_group(0, task)
        assert [e.episode.trajectories[0].inherited for e in group.scored] == [(), inherited]


async def test_states_that_are_too_old_or_of_another_task_are_not_used(tokenizer: Any, task: Task, make_runner: Any) -> None:
    """Staleness is that of the oldest version that sampled any token, including those before the crash."""
    states = States()
    old = talkative(tokenizer)
    old.version = 3
    await make_runner(old).run(task, episode_id="g000000-0-a0", on_turn=states)
    for oldest, other, turns_sampled in ((3, task, 1), (4, task, 3), (3, replace(task, data={}), 3)):
        store = Store()
        await store.save_state(0, 0, states.seen[1])
        policy = talkative(tokenizer)
        policy.version = 4
        group = await group_runner(make_runner(policy), size=1, keeper=store).run_group(0, other, oldest_version=oldest)
        assert len(policy.prompts) == turns_sampled
        assert group.scored[0].episode.oldest_version == (3 if turns_sampled == 1 else 4)


async def test_a_continued_attempt_keeps_its_number_and_its_budget_of_retries(tokenizer: Any, task: Task, make_runner: Any) -> None:
    states = States()
    await make_runner(talkative(tokenizer)).run(task, episode_id="g000000-0-a1", attempt=1, on_turn=states)
    requests: list[str] = []

    def failing(turn: int, episode: str) -> str:
        requests.append(f"{episode}/{turn}")
        raise SandboxError("gone")

    store = Store()
    await store.save_state(0, 0, states.seen[1])
    await group_runner(make_runner(ScriptedPolicy(tokenizer, failing)), size=1, retries=2, keeper=store).run_group(0, task)
    assert requests == ["g000000-0-a1/2", "g000000-0-a2/0"]
