"""Sub-agents in their own sandboxes: initial files, isolation, returned files, and cleanup."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from agentrl.agent.tools import ToolOutcome
from agentrl.config import PolicyConfig, Recipe, TasksConfig
from agentrl.config.rollout import DelegationConfig
from agentrl.errors import RecipeError, SandboxError
from agentrl.protocols import LiveEpisode
from agentrl.records import EpisodeState, ExecResult, SandboxSpec, Task, codec
from agentrl.rollout import CaptureState, EpisodeRunner
from agentrl.sandbox import WarmPool, select_backend
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import ScriptedSandbox
from tests.agent.trees import call, delegate, make_runner, outputs, tool_responses, tree_task, user_prompt
from tests.rollout.test_every_await import Awaits, driven, pause

Reads = Callable[[str], Any]


class SubAgents(ScriptedSandbox):
    """A sandbox with the programs `put PATH TEXT` and `ls`, and the listing of outputs."""

    async def python(self, code: str, **options: Any) -> ExecResult:
        await pause()
        result = await super().python(code, **options)
        word, *operands = code.split(" ", 2)
        if word == "put":
            self.files[operands[0]] = operands[1].encode()
        stdout = json.dumps(sorted(self.files)) if code.startswith("\nimport os") else " ".join(sorted(self.files))
        return replace(result, stdout=stdout)

    async def write(self, path: str, data: bytes) -> None:
        if len(data) > 40 and path.startswith("helper-"):
            raise ValueError("no room for it\x1b[2J")
        await super().write(path, data)

    async def snapshot(self) -> bytes:
        if "huge" in self.files:
            raise ValueError("the working directory is larger than a snapshot may be")
        return await super().snapshot()

    async def close(self) -> None:
        await super().close()
        await pause()


class PeakBackend(ScriptedSandboxes):
    """A backend of such sandboxes, which records how many were open at the same time. Sandbox number `fails` does not open."""

    def __init__(self, *, fails: int = -1) -> None:
        super().__init__(lambda code: ExecResult(exit_code=0, stdout="", stderr="", wall_s=0.0))
        self.peak, self.fails, self.specs = 0, fails, list[SandboxSpec]()

    async def open(self, spec: SandboxSpec, *, files: Any = None, snapshot: Any = None, timeout_s: float = 60.0) -> Any:
        await pause()
        if len(self.opened) == self.fails:
            raise SandboxError("the daemon is gone")
        plain = await super().open(spec, files=files, snapshot=snapshot, timeout_s=timeout_s)
        sandbox = self.opened[-1] = SubAgents(plain.id, self._answer, plain.files)
        self.specs.append(spec)
        self.peak = max(self.peak, sum(not opened.closed for opened in self.opened))
        return sandbox


@pytest.fixture
def tree(task: Task) -> Task:
    return replace(tree_task(task), outputs=("**",))


@pytest.fixture
def runs(tokenizer: Any) -> Callable[..., EpisodeRunner]:
    def make(reads: Reads, backend: Any, **settings: Any) -> EpisodeRunner:
        return make_runner(tokenizer, reads, backend, delegation=DelegationConfig(sandbox="own", **settings))

    return make


def program(*programs: str) -> str:
    return "".join(call("python", code=code) for code in programs)


def scripted(*main: str, **workers: list[str]) -> Reads:
    """The completions of the main agent, whose answer repeats its results, and those of each sub-agent by its task."""

    def reads(context: str) -> str:
        tool_outputs, turns = tool_responses(context), list(main) if user_prompt(context) == "How many?" else workers[user_prompt(context)]
        turn_index = context.count("<|im_start|>assistant") - 1
        return turns[turn_index] if turn_index < len(turns) else " | ".join(tool_outputs)

    return reads


async def test_each_sub_agent_starts_with_a_copy_and_returns_the_requested_files(tree: Task, runs: Any) -> None:
    backend = PeakBackend()
    reads = scripted(
        program("put mine x") + delegate("a", "b"),
        program("ls"),
        a=[program("put out/one 1", "put left y", "ls"), "found one"],
        b=[program("ls", "put out/two 2"), "found two"],
    )
    episode = await runs(reads, backend, returns=["out/*"]).run(tree, episode_id="e")
    main, first, second = episode.trajectories
    assert outputs(first)[-1] == "a.csv left mine out/one" and outputs(second)[0] == "a.csv mine", "sub-agents see only their copies"
    assert outputs(main)[1:3] == ["found one\nfiles: helper-1/out/one", "found two\nfiles: helper-2/out/two"]
    assert (
        episode.outputs == {"a.csv": b"x\n1\n", "mine": b"x", "helper-1/out/one": b"1", "helper-2/out/two": b"2"} and not episode.failures
    )
    assert len(backend.opened) == 3 == backend.peak and all(box.closed for box in backend.opened) and set(backend.specs) == {tree.sandbox}


async def test_a_caller_without_a_sandbox_passes_the_tasks_files_and_unused_sandboxes_are_not_opened(tree: Task, runs: Any) -> None:
    backend = PeakBackend()
    reads = scripted(delegate("deep", "says"), deep=[delegate("leaf")], says=["7"], leaf=[program("ls", "put out/it 1"), "done"])
    episode = await runs(reads, backend, returns=["out/**"], depth=2).run(tree, episode_id="e")
    assert episode.answer == "done\nfiles: helper-3/out/it | 7", "files go to the caller, not on to its caller"
    assert outputs(episode.trajectories[3])[0] == "a.csv"
    assert [sorted(box.files) for box in backend.opened] == [["a.csv", "out/it"], ["a.csv", "helper-3/out/it"]]
    assert set(episode.outputs) == {"a.csv"} and all(box.closed for box in backend.opened)


async def test_rejected_files_are_listed_and_are_a_policy_failure(tree: Task, runs: Any) -> None:
    turns = [program("put ok 1", "put big " + "x" * 50, "put line\nbreak 1", "put ../up 1", "put odd\x1b 1")]
    backend = PeakBackend()
    episode = await runs(scripted(delegate("a"), a=turns), backend, returns=["**"]).run(tree, episode_id="e")
    answer = episode.answer or ""
    assert (
        "files: helper-1/a.csv, helper-1/line\N{REPLACEMENT CHARACTER}break, helper-1/odd\N{REPLACEMENT CHARACTER}, helper-1/ok" in answer
    )
    assert (
        "not handed back: big: no room for it\N{REPLACEMENT CHARACTER}[2J" in answer
        and "not handed back: ../up: not a valid path" in answer
    )
    assert [(failure.kind, failure.stage) for failure in episode.failures][:1] == [("returns_refused", "collect")] and not episode.left_out
    huge = await runs(scripted(program("put huge 1") + delegate("a", 7), a=["A"]), PeakBackend()).run(tree, episode_id="e")
    assert len(huge.trajectories) == 1 and "cannot be copied: the working directory is larger" in (huge.answer or "") and not huge.left_out


class _Breaks:
    """Closes its sandbox."""

    name, needs_sandbox = "breaks", True
    schema: ClassVar = {"type": "function", "function": {"name": "breaks", "parameters": {}}}

    async def __call__(self, arguments: Any, sandbox: Any, limits: Any) -> ToolOutcome:
        await sandbox.close()
        return ToolOutcome(output="done", ok=True)


breaks = _Breaks()


async def test_a_closed_sandbox_ends_only_its_sub_agent_but_an_opening_error_the_episode(tree: Task, runs: Any) -> None:
    tools = replace(tree, tools=("python", "tests.agent.test_handing:breaks"))
    reads = scripted(delegate("a", "b"), program("ls"), a=[call("breaks")], b=[program("put x 1"), "fine"])
    episode = await runs(reads, PeakBackend(), returns=["x"]).run(tools, episode_id="e")
    assert episode.answer == "error: the helper ended without an answer (tool_timeout) | fine\nfiles: helper-2/x | a.csv helper-2/x"
    assert [trajectory.stop_reason for trajectory in episode.trajectories] == ["answered", "tool_timeout", "answered"]
    assert [failure.kind for failure in episode.failures] == ["sandbox_abandoned"] and not episode.left_out
    backend = PeakBackend(fails=1)
    episode = await runs(reads, backend).run(tree, episode_id="e")
    assert episode.left_out and episode.failures[-1].stage == "sandbox" and all(sandbox.closed for sandbox in backend.opened)


async def test_the_deadline_of_the_episode_and_a_cancellation_at_any_await_close_all_sandboxes(tree: Task, runs: Any) -> None:
    async def hangs(context: str) -> str:
        if tool_responses(context) and user_prompt(context) != "How many?":
            await asyncio.sleep(30.0)
        return scripted(delegate("a", "b"), a=[program("ls")], b=[program("ls")])(context)

    backend = PeakBackend()
    short = replace(tree, limits=replace(tree.limits, wall_s=0.3))
    episode = await asyncio.wait_for(runs(hangs, backend).run(short, episode_id="e"), 5.0)
    assert [trajectory.stop_reason for trajectory in episode.trajectories] == ["wall_limit"] * 3
    assert len(backend.opened) == 2 and all(sandbox.closed for sandbox in backend.opened)

    reads = scripted(program("ls") + delegate("a", "b"), a=[program("put o 1"), "A"], b=["B"])
    async with driven(awaits := Awaits(), runs(reads, PeakBackend(), returns=["*"]).run(tree, episode_id="e")) as main:
        assert (await main).answer
    for await_index in range(awaits.count):
        backend = PeakBackend()
        with pytest.raises(asyncio.CancelledError):
            async with driven(Awaits(await_index), runs(reads, backend, returns=["*"]).run(tree, episode_id="e")) as main:
                await main
        assert all(sandbox.closed for sandbox in backend.opened), await_index


@pytest.mark.parametrize(("width", "depth", "total"), [(3, 1, 3), (2, 2, 4), (1, 3, 3)])
async def test_the_required_number_of_sandboxes_is_sufficient_and_necessary(
    tree: Task, runs: Any, width: int, depth: int, total: int
) -> None:
    config = DelegationConfig(sandbox="own", depth=depth, total=total)
    count, needed = 3, 3 * (1 + total)

    async def all_open() -> None:
        while backend.peak < needed:
            await asyncio.sleep(0)

    async def reads(context: str) -> str:
        level = 1 if user_prompt(context) == "How many?" else 1 + len(user_prompt(context))
        if not tool_responses(context):
            return program("ls")
        if len(tool_responses(context)) == 1 and level <= depth:
            return delegate(*["x" * level] * width)
        await asyncio.wait_for(all_open(), 5.0)  # no agent ends before all possible sandboxes are open
        return "done"

    backend = PeakBackend()
    pool = WarmPool(backend, warm=0, max_open=needed)
    roomy = replace(tree, limits=replace(tree.limits, turns=40))
    runner = replace(runs(reads, pool, depth=depth, total=total), open_timeout_s=0.5)
    episodes = await asyncio.gather(*(runner.run(roomy, episode_id=f"e{number}") for number in range(count)))
    assert not any(episode.failures for episode in episodes) and backend.peak == needed
    base = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"))
    settings = {"rollout.agent": "delegating", "rollout.delegation": config, "rollout.concurrency": count}
    base.but({**settings, "sandbox.max_open": needed})
    with pytest.raises(RecipeError, match=rf"set sandbox\.max_open={needed}, or rollout\.concurrency={count - 1}, or"):
        base.but({**settings, "sandbox.max_open": needed - 1})
    settings |= {"gate.suite": "evals/x", "gate.server": "own"}
    base.but({**settings, "sandbox.max_open": 2 * needed})
    with pytest.raises(
        RecipeError,
        match=rf"gate\.server=own, could deadlock .* set sandbox\.max_open={2 * needed}, or rollout\.concurrency={count - 1}, or",
    ):
        base.but({**settings, "sandbox.max_open": 2 * needed - 1})


async def test_a_state_after_sub_agents_resumes_to_the_same_end_and_none_is_captured_while_they_run(tree: Task, runs: Any) -> None:
    reads = scripted(delegate("a"), program("put mid 1") + delegate("b"), a=[program("put o 1"), "A"], b=[program("ls"), "B"])
    states: list[EpisodeState] = []

    async def on_turn(turns: int, capture: CaptureState) -> None:
        state = await capture()
        assert state is not None
        states.append(codec.from_json(EpisodeState, codec.to_json(state)))

    full = await runs(reads, PeakBackend(), returns=["o"]).run(tree, episode_id="e", on_turn=on_turn)
    assert [state.turn_count for state in states] == [3, 6] and outputs(full.trajectories[2])[0] == "a.csv helper-1/o mid"
    for state in states:
        for name in ("e", "branch"):
            resumed = await runs(reads, PeakBackend(), returns=["o"]).run(tree, episode_id=name, start=state)
            assert [outputs(trajectory) for trajectory in resumed.trajectories] == [outputs(trajectory) for trajectory in full.trajectories]
            assert resumed.outputs == full.outputs

    class AgentWithSubEpisodes:
        async def act(self, episode: LiveEpisode) -> str:
            async def nothing() -> Mapping[str, Any]:
                return {}

            async with episode.sub_episode(await episode.working_copy()) as sub_episode:
                await sub_episode.sandbox()
                await sub_episode.boundary(nothing)
                sub_episodes.append(sub_episode)
            with pytest.raises(SandboxError, match="has ended"):
                async with episode.sub_episode(None) as other:
                    sub_episodes.append(other)
                await other.sandbox()
            return "answered"

    captured, sub_episodes = list[EpisodeState | None](), list[LiveEpisode]()

    async def capture_at_turn(turns: int, capture: CaptureState) -> None:
        captured.append(await capture())

    episode = await replace(runs(reads, PeakBackend()), agent=AgentWithSubEpisodes()).run(tree, episode_id="e", on_turn=capture_at_turn)
    assert captured == [None] and not episode.failures and len(sub_episodes) == 2


@pytest.mark.bubblewrap
async def test_sub_agents_get_copies_in_real_sandboxes(tree: Task, tokenizer: Any, tmp_path: Any) -> None:
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "image.toml").write_text('suite = "bookworm"\npackages = ["python3"]\n')
    backend = select_backend("bubblewrap", run_label="test", root=tmp_path)
    pool = WarmPool(backend, warm=0, max_open=3)
    prepare = "import os; open('/tmp/mark', 'w'); os.symlink('/etc/passwd', 'link'); open('note', 'w').write('main')"
    inspect = "import os; print(sorted(os.listdir('.')), os.path.exists('/tmp/mark'), len([p for p in os.listdir('/proc') if p.isdigit()]))"
    produce = "import os; os.mkdir('out'); open('out/%s', 'w').write('%s'); os.symlink('/etc/passwd', 'out/link'); open('/tmp/mark', 'w')"
    reads = scripted(
        program(prepare) + delegate("a", "b"),
        program("import os; print(open('helper-1/out/a').read(), open('helper-2/out/b').read(), sorted(os.listdir('helper-1/out')))"),
        a=[program(inspect, produce % ("a", "A")) + call("python_session", code="1 + 2"), "A"],
        b=[program(inspect, produce % ("b", "B")), "B"],
    )
    task = replace(tree, sandbox=SandboxSpec(image="image"), outputs=("note",), tools=("python", "python_session"))
    try:
        runner = make_runner(tokenizer, reads, pool, delegation=DelegationConfig(sandbox="own", returns=("out/**",)))  # type: ignore[arg-type]
        episode = await runner.run(task, episode_id="e")
    finally:
        await pool.close()
    assert [outputs(trajectory)[0] for trajectory in episode.trajectories[1:]] == ["['a.csv', 'link', 'note'] False 2"] * 2
    assert outputs(episode.trajectories[1])[2] == "3", "without the note about an ended session"
    assert (episode.answer or "").endswith("A B ['a']") and episode.outputs == {"note": b"main"}
    assert "not handed back: out/link" in outputs(episode.trajectories[0])[1] and not episode.left_out
