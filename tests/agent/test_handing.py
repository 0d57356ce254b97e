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
from tests.agent.trees import asked, call, delegate, make_runner, outputs, shown, tree_task
from tests.rollout.test_every_await import Awaits, driven, pause

Reads = Callable[[str], Any]


class SubAgents(ScriptedSandbox):
    """A sandbox with the programs `put PATH TEXT` and `ls`, and the listing of outputs."""

    async def python(self, code: str, **options: Any) -> ExecResult:
        await pause()
        done = await super().python(code, **options)
        word, *rest = code.split(" ", 2)
        if word == "put":
            self.files[rest[0]] = rest[1].encode()
        said = json.dumps(sorted(self.files)) if code.startswith("\nimport os") else " ".join(sorted(self.files))
        return replace(done, stdout=said)

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


class Desks(ScriptedSandboxes):
    """A backend of such sandboxes, which records how many were open concurrently. Sandbox number `fails` does not open."""

    def __init__(self, *, fails: int = -1) -> None:
        super().__init__(lambda code: ExecResult(exit_code=0, stdout="", stderr="", wall_s=0.0))
        self.peak, self.fails, self.specs = 0, fails, list[SandboxSpec]()

    async def open(self, spec: SandboxSpec, *, files: Any = None, snapshot: Any = None, timeout_s: float = 60.0) -> Any:
        await pause()
        if len(self.opened) == self.fails:
            raise SandboxError("the daemon is gone")
        plain = await super().open(spec, files=files, snapshot=snapshot, timeout_s=timeout_s)
        desk = self.opened[-1] = SubAgents(plain.id, self._answer, plain.files)
        self.specs.append(spec)
        self.peak = max(self.peak, sum(not one.closed for one in self.opened))
        return desk


@pytest.fixture
def tree(task: Task) -> Task:
    return replace(tree_task(task), outputs=("**",))


@pytest.fixture
def runs(tokenizer: Any) -> Callable[..., EpisodeRunner]:
    def make(reads: Reads, desks: Any, **settings: Any) -> EpisodeRunner:
        return make_runner(tokenizer, reads, desks, delegation=DelegationConfig(sandbox="own", **settings))

    return make


def program(*programs: str) -> str:
    return "".join(call("python", code=one) for one in programs)


def scripted(*main: str, **workers: list[str]) -> Reads:
    """The completions of the main agent, whose answer repeats its results, and those of each sub-agent by its task."""

    def reads(context: str) -> str:
        seen, turns = shown(context), list(main) if asked(context) == "How many?" else workers[asked(context)]
        done = context.count("<|im_start|>assistant") - 1
        return turns[done] if done < len(turns) else " | ".join(seen)

    return reads


async def test_each_sub_agent_starts_with_a_copy_and_hands_back_the_requested_files(tree: Task, runs: Any) -> None:
    desks = Desks()
    reads = scripted(
        program("put mine x") + delegate("a", "b"),
        program("ls"),
        a=[program("put out/one 1", "put left y", "ls"), "found one"],
        b=[program("ls", "put out/two 2"), "found two"],
    )
    episode = await runs(reads, desks, returns=["out/*"]).run(tree, episode_id="e")
    main, first, second = episode.trajectories
    assert outputs(first)[-1] == "a.csv left mine out/one" and outputs(second)[0] == "a.csv mine", "copies, and no sight of one another"
    assert outputs(main)[1:3] == ["found one\nfiles: helper-1/out/one", "found two\nfiles: helper-2/out/two"]
    assert (
        episode.outputs == {"a.csv": b"x\n1\n", "mine": b"x", "helper-1/out/one": b"1", "helper-2/out/two": b"2"} and not episode.failures
    )
    assert len(desks.opened) == 3 == desks.peak and all(one.closed for one in desks.opened) and set(desks.specs) == {tree.sandbox}


async def test_a_caller_without_a_sandbox_passes_the_tasks_files_and_unused_sandboxes_are_not_opened(tree: Task, runs: Any) -> None:
    desks = Desks()
    reads = scripted(delegate("deep", "says"), deep=[delegate("leaf")], says=["7"], leaf=[program("ls", "put out/it 1"), "done"])
    episode = await runs(reads, desks, returns=["out/**"], depth=2).run(tree, episode_id="e")
    assert episode.answer == "done\nfiles: helper-3/out/it | 7", "handed on to who called, and not what that was handed itself"
    assert outputs(episode.trajectories[3])[0] == "a.csv"
    assert [sorted(one.files) for one in desks.opened] == [["a.csv", "out/it"], ["a.csv", "helper-3/out/it"]]
    assert set(episode.outputs) == {"a.csv"} and all(one.closed for one in desks.opened)


async def test_refused_files_are_listed_and_blamed_on_the_policy(tree: Task, runs: Any) -> None:
    turns = [program("put ok 1", "put big " + "x" * 50, "put line\nbreak 1", "put ../up 1", "put odd\x1b 1")]
    desks = Desks()
    episode = await runs(scripted(delegate("a"), a=turns), desks, returns=["**"]).run(tree, episode_id="e")
    answer = episode.answer or ""
    assert (
        "files: helper-1/a.csv, helper-1/line\N{REPLACEMENT CHARACTER}break, helper-1/odd\N{REPLACEMENT CHARACTER}, helper-1/ok" in answer
    )
    assert (
        "not handed back: big: no room for it\N{REPLACEMENT CHARACTER}[2J" in answer
        and "not handed back: ../up: not a valid path" in answer
    )
    assert [(one.kind, one.stage) for one in episode.failures][:1] == [("returns_refused", "collect")] and not episode.left_out
    told = await runs(scripted(program("put huge 1") + delegate("a", 7), a=["A"]), Desks()).run(tree, episode_id="e")
    assert len(told.trajectories) == 1 and "cannot be copied: the working directory is larger" in (told.answer or "") and not told.left_out


class _Breaks:
    """Ends its sandbox."""

    name, needs_sandbox = "breaks", True
    schema: ClassVar = {"type": "function", "function": {"name": "breaks", "parameters": {}}}

    async def __call__(self, arguments: Any, sandbox: Any, limits: Any) -> ToolOutcome:
        await sandbox.close()
        return ToolOutcome(output="done", ok=True)


breaks = _Breaks()


async def test_a_broken_sandbox_affects_only_its_sub_agent_and_a_fault_the_episode(tree: Task, runs: Any) -> None:
    tools = replace(tree, tools=("python", "tests.agent.test_handing:breaks"))
    reads = scripted(delegate("a", "b"), program("ls"), a=[call("breaks")], b=[program("put x 1"), "fine"])
    episode = await runs(reads, Desks(), returns=["x"]).run(tools, episode_id="e")
    assert episode.answer == "error: the helper ended without an answer (tool_timeout) | fine\nfiles: helper-2/x | a.csv helper-2/x"
    assert [one.stop_reason for one in episode.trajectories] == ["answered", "tool_timeout", "answered"]
    assert [one.kind for one in episode.failures] == ["sandbox_abandoned"] and not episode.left_out
    desks = Desks(fails=1)
    episode = await runs(reads, desks).run(tree, episode_id="e")
    assert episode.left_out and episode.failures[-1].stage == "sandbox" and all(one.closed for one in desks.opened)


async def test_the_deadline_of_the_episode_and_a_cancellation_at_any_await_leave_nothing(tree: Task, runs: Any) -> None:
    async def hangs(context: str) -> str:
        if shown(context) and asked(context) != "How many?":
            await asyncio.sleep(30.0)
        return scripted(delegate("a", "b"), a=[program("ls")], b=[program("ls")])(context)

    desks = Desks()
    short = replace(tree, limits=replace(tree.limits, wall_s=0.3))
    episode = await asyncio.wait_for(runs(hangs, desks).run(short, episode_id="e"), 5.0)
    assert [one.stop_reason for one in episode.trajectories] == ["wall_limit"] * 3
    assert len(desks.opened) == 2 and all(one.closed for one in desks.opened)

    reads = scripted(program("ls") + delegate("a", "b"), a=[program("put o 1"), "A"], b=["B"])
    async with driven(awaits := Awaits(), runs(reads, Desks(), returns=["*"]).run(tree, episode_id="e")) as main:
        assert (await main).answer
    for at in range(awaits.count):
        desks = Desks()
        with pytest.raises(asyncio.CancelledError):
            async with driven(Awaits(at), runs(reads, desks, returns=["*"]).run(tree, episode_id="e")) as main:
                await main
        assert all(one.closed for one in desks.opened), at


@pytest.mark.parametrize(("width", "depth", "total"), [(3, 1, 3), (2, 2, 4), (1, 3, 3)])
async def test_the_required_number_of_sandboxes_is_sufficient_and_necessary(
    tree: Task, runs: Any, width: int, depth: int, total: int
) -> None:
    config = DelegationConfig(sandbox="own", depth=depth, total=total)
    crowd, most = 3, 3 * (1 + total)

    async def full() -> None:
        while desks.peak < most:
            await asyncio.sleep(0)

    async def reads(context: str) -> str:
        level = 1 if asked(context) == "How many?" else 1 + len(asked(context))
        if not shown(context):
            return program("ls")
        if len(shown(context)) == 1 and level <= depth:
            return delegate(*["x" * level] * width)
        await asyncio.wait_for(full(), 5.0)  # nobody ends before all the sandboxes that there may be are open
        return "done"

    desks = Desks()
    pool = WarmPool(desks, warm=0, max_open=most)
    roomy = replace(tree, limits=replace(tree.limits, turns=40))
    runner = replace(runs(reads, pool, depth=depth, total=total), open_timeout_s=0.5)
    episodes = await asyncio.gather(*(runner.run(roomy, episode_id=f"e{number}") for number in range(crowd)))
    assert not any(one.failures for one in episodes) and desks.peak == most
    base = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"))
    wanted = {"rollout.agent": "delegating", "rollout.delegation": config, "rollout.concurrency": crowd}
    base.but({**wanted, "sandbox.max_open": most})
    with pytest.raises(RecipeError, match=rf"set sandbox\.max_open={most}, or rollout\.concurrency={crowd - 1}, or"):
        base.but({**wanted, "sandbox.max_open": most - 1})
    wanted |= {"gate.suite": "evals/x", "gate.server": "own"}
    base.but({**wanted, "sandbox.max_open": 2 * most})
    with pytest.raises(
        RecipeError, match=rf"gate\.server=own beside them, .* set sandbox\.max_open={2 * most}, or rollout\.concurrency={crowd - 1}, or"
    ):
        base.but({**wanted, "sandbox.max_open": 2 * most - 1})


async def test_a_state_after_sub_agents_resumes_to_the_same_end_and_none_is_captured_while_they_run(tree: Task, runs: Any) -> None:
    reads = scripted(delegate("a"), program("put mid 1") + delegate("b"), a=[program("put o 1"), "A"], b=[program("ls"), "B"])
    states: list[EpisodeState] = []

    async def on_turn(turns: int, capture: CaptureState) -> None:
        state = await capture()
        assert state is not None
        states.append(codec.from_json(EpisodeState, codec.to_json(state)))

    whole = await runs(reads, Desks(), returns=["o"]).run(tree, episode_id="e", on_turn=on_turn)
    assert [state.turn_count for state in states] == [3, 6] and outputs(whole.trajectories[2])[0] == "a.csv helper-1/o mid"
    for state in states:
        for name in ("e", "branch"):
            again = await runs(reads, Desks(), returns=["o"]).run(tree, episode_id=name, start=state)
            assert [outputs(one) for one in again.trajectories] == [outputs(one) for one in whole.trajectories]
            assert again.outputs == whole.outputs

    class Beside:
        async def act(self, episode: LiveEpisode) -> str:
            async def nothing() -> Mapping[str, Any]:
                return {}

            async with episode.sub_episode(await episode.working_copy()) as own:
                await own.sandbox()
                await own.boundary(nothing)
                kept.append(own)
            with pytest.raises(SandboxError, match="has ended"):
                async with episode.sub_episode(None) as other:
                    kept.append(other)
                await other.sandbox()
            return "answered"

    seen, kept = list[EpisodeState | None](), list[LiveEpisode]()

    async def looks(turns: int, capture: CaptureState) -> None:
        seen.append(await capture())

    episode = await replace(runs(reads, Desks()), agent=Beside()).run(tree, episode_id="e", on_turn=looks)
    assert seen == [None] and not episode.failures and len(kept) == 2


@pytest.mark.bubblewrap
async def test_copies_in_real_sandboxes(tree: Task, tokenizer: Any, tmp_path: Any) -> None:
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "image.toml").write_text('suite = "bookworm"\npackages = ["python3"]\n')
    backend = select_backend("bubblewrap", run_label="test", root=tmp_path)
    pool = WarmPool(backend, warm=0, max_open=3)
    leave = "import os; open('/tmp/mark', 'w'); os.symlink('/etc/passwd', 'link'); open('note', 'w').write('main')"
    look = "import os; print(sorted(os.listdir('.')), os.path.exists('/tmp/mark'), len([p for p in os.listdir('/proc') if p.isdigit()]))"
    work = "import os; os.mkdir('out'); open('out/%s', 'w').write('%s'); os.symlink('/etc/passwd', 'out/link'); open('/tmp/mark', 'w')"
    reads = scripted(
        program(leave) + delegate("a", "b"),
        program("import os; print(open('helper-1/out/a').read(), open('helper-2/out/b').read(), sorted(os.listdir('helper-1/out')))"),
        a=[program(look, work % ("a", "A")) + call("python_session", code="1 + 2"), "A"],
        b=[program(look, work % ("b", "B")), "B"],
    )
    task = replace(tree, sandbox=SandboxSpec(image="image"), outputs=("note",), tools=("python", "python_session"))
    try:
        runner = make_runner(tokenizer, reads, pool, delegation=DelegationConfig(sandbox="own", returns=("out/**",)))  # type: ignore[arg-type]
        episode = await runner.run(task, episode_id="e")
    finally:
        await pool.close()
    assert [outputs(one)[0] for one in episode.trajectories[1:]] == ["['a.csv', 'link', 'note'] False 2"] * 2
    assert outputs(episode.trajectories[1])[2] == "3", "and no word of a session that has ended"
    assert (episode.answer or "").endswith("A B ['a']") and episode.outputs == {"note": b"main"}
    assert "not handed back: out/link" in outputs(episode.trajectories[0])[1] and not episode.left_out
