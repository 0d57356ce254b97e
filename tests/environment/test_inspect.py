"""Tasks of the real inspect_ai, in its environment (`agentrl env sync inspect-ai`), with a scripted policy behind the real gateway."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import PolicyConfig, Recipe, TasksConfig
from agentrl.config.recipe import HOSTED_AGENT
from agentrl.environment.host import INSIDE
from agentrl.environment.hosted import HostedAgent, host_of
from agentrl.environment.inspect_tasks import InspectFamily
from agentrl.environment.venvs import environment_python
from agentrl.errors import PluginError, UserError
from agentrl.objective import counted_samples
from agentrl.plugins import references
from agentrl.protocols import SandboxBackend
from agentrl.records import Blame, EnvironmentSpec, Episode, Group, SandboxSpec, Score, ScoredEpisode, Split, Task
from agentrl.records.sampling import Sampling
from agentrl.reward import TaskScorer
from agentrl.rollout import EpisodeRunner
from agentrl.sandbox import BubblewrapBackend, DockerBackend
from agentrl.session.builders import build_agent
from agentrl.task import open_family
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.chats import chat_of, shared_tokenizer

ROOT = Path(__file__).resolve().parents[2]
KINDS = "tests/environment/inspect_tasks/kinds.py"
TASKS = f"inspect:{KINDS}"
LIMITS = {"turns": 4, "turn_tokens": 200, "episode_tokens": 8000, "wall_s": 60.0}
SANDBOX: dict[str, Any] = {"image": "sandboxes/tables", "sandbox": {"memory_mb": 256}}
Script = Callable[[int, str], str]

pytestmark = [
    pytest.mark.environments,
]


@pytest.fixture(autouse=True)
def in_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(references, "_added", [])


@dataclass(frozen=True)
class Played:
    episode: Episode
    score: Score | None  # None if the episode is excluded

    @property
    def fault(self) -> str:
        """Blame and message of the failure that excludes the episode."""
        return "".join(f"{failure.blame}: {failure.message}" for failure in self.episode.failures if failure.blame is not Blame.POLICY)


@asynccontextmanager
async def opened(kind: type[BubblewrapBackend | DockerBackend] = BubblewrapBackend) -> AsyncIterator[SandboxBackend]:
    backend = kind(root=ROOT, run_label="inspect")
    await backend.prepare(SandboxSpec(image="sandboxes/tables"))
    try:
        yield backend
    finally:
        await backend.close()


async def play(
    ref: str,
    script: Script = lambda turn, episode: "it is right",
    *,
    sandboxes: SandboxBackend | None = None,
    agent: Any = None,
    only: tuple[str, ...] = (),
    **options: Any,
) -> dict[str, Played]:
    """Plays all samples once, concurrently, and scores them as a run does. Returns the results by sample id."""
    family = InspectFamily(ref, **{"heldout": 0, "limits": LIMITS, **options})
    chat, backend = chat_of(shared_tokenizer()), sandboxes or ScriptedSandboxes(printing(""))
    policy = ScriptedPolicy(shared_tokenizer(), script)
    runner = EpisodeRunner(
        agent=agent or HostedAgent(chat=chat),
        policy=policy,
        sandboxes=backend,
        sampling=Sampling(),
        max_model_len=8000,
        request_timeout_s=60.0,
    )
    scorer = TaskScorer(sandboxes=backend, max_retries=0)

    async def play_task(task: Task) -> tuple[str, Played]:
        name = str(task.data["sample"])
        episode = await runner.run(task, episode_id=name)
        return name, Played(episode, None if episode.left_out else await scorer(task, episode))

    tasks = [family.task(Split.TRAIN, index) for index in range(family.size(Split.TRAIN))]
    spec = tasks[0].environment or EnvironmentSpec(**tasks[0].data["inspect"])
    await host_of(spec).call("ping", {}, timeout_s=120)  # the start of the host does not count as time of an episode
    played = await asyncio.gather(*(play_task(task) for task in tasks if not only or task.data["sample"] in only))
    await host_of(spec).close()
    return dict(played)


async def test_every_kind_of_score() -> None:
    played = await play(f"{TASKS}@values", values={"A+": 0.9})
    scores = {name: result.score for name, result in played.items() if result.score is not None}
    values = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "text number": 0.25, "true": 1.0, "float": -1.5, "dict": 0.5, "list": 0.5}
    assert {name: score.value for name, score in scores.items() if score.value is not None} == values | {"known word": 0.9}
    parts = {name.removeprefix("agentrl.gateway:posted_reward/"): value for name, value in scores["dict"].parts.items()}
    assert (parts["value_of_sample"], parts["value_of_sample/a"], parts["value_of_sample/b"]) == (0.5, 1.0, 0.0)
    assert "because C" in scores["C"].evidence and played["C"].episode.answer == "it is right"
    reasons = {name: score.reason for name, score in scores.items() if score.value is None}
    assert set(reasons) == {"unscored", "word", "nothing", "infinite", "part unscored"}
    assert "unscored" in reasons["unscored"] and "'grade A', which is not a number" in reasons["word"]


async def test_several_scorers_count_equally_or_one_is_chosen() -> None:
    both = await play(f"{TASKS}@two_scorers")
    assert {name: result.score and result.score.value for name, result in both.items()} == {"C": 1.0, "float": -0.25}
    chosen = await play(f"{TASKS}@two_scorers", score="includes", only=("float",))
    assert chosen["float"].score is not None and chosen["float"].score.value == 1.0
    missing = await play(f"{TASKS}@two_scorers", score="another", only=("C",))
    assert missing["C"].score is not None and "no score 'another'" in missing["C"].score.reason


async def test_faults_of_a_task_are_excluded_and_limits_are_scored() -> None:
    def script(turn: int, episode: str) -> str:
        return "it is right"

    played = await play(f"{TASKS}@faults", script, limits={**LIMITS, "wall_s": 10.0})
    faults = {name: result.fault for name, result in played.items() if result.fault}
    expected = {
        "raises": "infrastructure: .*broken solver",
        "raises late": "infrastructure: .*broken solver",
        "hangs": "infrastructure: .*task's code took most of",
        "no sandbox": "infrastructure: .*sandbox",
        "too long": "task: .*shorten the prompt",
        "scorer raises": "infrastructure: .*no grade",
        "scorer hangs": "infrastructure: ",
        "scorer asks the policy": "task: .*grades with the policy itself.*model_roles",
    }
    assert set(faults) == set(expected), faults
    for name, text in expected.items():
        assert re.search(text, faults[name], re.DOTALL), (name, faults[name])
        assert played[name].score is None
    scored = {name: (each.score.value, each.episode.stop_reason) for name, each in played.items() if each.score is not None}
    assert scored == {
        "fine": (1.0, "answered"),
        "loops": (1.0, "turn_limit"),
        "scorer is silent": (None, "answered"),
    }
    assert len(played["loops"].episode.trajectories[0].turns) == LIMITS["turns"]


async def test_a_killed_host_costs_only_its_episodes() -> None:
    family = InspectFamily(f"{TASKS}@faults", heldout=0, limits=LIMITS)
    tasks = {str(task.data["sample"]): task for task in (family.task(Split.TRAIN, n) for n in range(family.size(Split.TRAIN)))}
    policy = ScriptedPolicy(shared_tokenizer(), lambda turn, episode: "it is right")
    agent = HostedAgent(chat=chat_of(shared_tokenizer()))
    runner = EpisodeRunner(
        agent=agent,
        policy=policy,
        sandboxes=ScriptedSandboxes(printing("")),
        sampling=Sampling(),
        max_model_len=8000,
        request_timeout_s=60.0,
    )
    spec = tasks["fine"].environment
    assert spec is not None
    host, scorer = host_of(spec), TaskScorer(max_retries=0)
    assert (await scorer(tasks["fine"], await runner.run(tasks["fine"], episode_id="a"))).value == 1.0
    hanging = [asyncio.create_task(runner.run(tasks["hangs"], episode_id=f"h{number}")) for number in range(3)]
    await asyncio.sleep(1.0)
    assert host._process is not None
    os.kill(host._process._process.pid, signal.SIGKILL)
    for episode in await asyncio.gather(*hanging):
        assert [(failure.blame, failure.kind) for failure in episode.failures] == [(Blame.INFRASTRUCTURE, "HostDied")]
    assert (await scorer(tasks["fine"], await runner.run(tasks["fine"], episode_id="b"))).value == 1.0
    await host.close()


@pytest.mark.bubblewrap
async def test_tools_run_in_the_sandbox_and_every_token_is_trained_once() -> None:
    calls = {
        "reads": '<tool_call>\n{"name": "look", "arguments": {"path": "in.txt"}}\n</tool_call>',
        "misses": '<tool_call>\n{"name": "look", "arguments": {"path": "absent.txt"}}\n</tool_call>',
        "breaks": '<tool_call>\n{"name": "look", "arguments": {"path": "/broken"}}\n</tool_call>',
    }
    async with opened() as sandboxes:
        played = await play(f"{TASKS}@with_tool", lambda turn, name: calls[name] if turn == 0 else "seven", sandboxes=sandboxes, **SANDBOX)
    assert played["breaks"].score is None and "a bug of the tool" in played["breaks"].fault
    for name, output in (("reads", "seven"), ("misses", "was not found")):
        episode, score = played[name].episode, played[name].score
        assert score is not None and score.value == 1.0
        [trajectory] = episode.trajectories
        assert len(trajectory.turns) == 2 and output in trajectory.turns[0].tool_results[0].output
        group = Group(index=0, task_id="t", task_key="k", episodes=(ScoredEpisode(episode=episode, score=score),))
        trained = sum(sum(sample.loss_mask) for sample in counted_samples([group]))
        assert trained == sum(len(turn.completion_ids) for turn in trajectory.turns)


@pytest.mark.bubblewrap
async def test_the_turn_loop_plays_and_the_tasks_scorer_reads_messages_and_files() -> None:
    copies = (
        '<tool_call>\n{"name": "python", "arguments": {"code": "open(\'answer.txt\', \'w\').write(open(\'in.txt\').read())"}}\n</tool_call>'
    )
    submits = '<tool_call>\n{"name": "submit", "arguments": {"answer": "done"}}\n</tool_call>'
    options: dict[str, Any] = {"solver": "agentrl", "tools": ["python", "submit"], "outputs": ["answer.txt"], **SANDBOX}
    recipe = Recipe(name="r", policy=PolicyConfig(model="m"), tasks=TasksConfig(family={"ref": f"{TASKS}@with_files", "options": options}))
    assert recipe.agent.ref == "turns"
    async with opened() as sandboxes:
        played = await play(
            f"{TASKS}@with_files",
            lambda turn, name: (copies, submits)[turn],
            sandboxes=sandboxes,
            agent=build_agent(recipe, chat_of(shared_tokenizer())),
            **options,
        )
    score = played["one"].score
    assert score is not None and score.value == 1.0, played
    assert score.evidence == "file_says: ['system', 'user', 'assistant', 'tool', 'assistant', 'tool'] ['python', 'submit']"


@pytest.mark.parametrize(
    "kind", [pytest.param(BubblewrapBackend, marks=pytest.mark.bubblewrap), pytest.param(DockerBackend, marks=pytest.mark.docker)]
)
async def test_inspects_checks_of_a_sandbox_pass(kind: type[BubblewrapBackend | DockerBackend]) -> None:
    """All checks but one pass, because a sandbox of agentrl has one user."""
    async with opened(kind) as sandboxes:
        played = await play(
            "inspect:tests/environment/inspect_tasks/checks.py@checks",
            sandboxes=sandboxes,
            image="sandboxes/tables",
            sandbox={"memory_mb": 700, "disk_mb": 200},
            limits={"wall_s": 300.0},
        )
    failed = {name: result.fault for name, result in played.items() if result.score is None or result.score.value != 1.0}
    assert len(played) >= 44 and set(failed) == {"test_exec_as_user"}, failed


BROKEN = {
    "tests/nowhere.py@task": "tests/nowhere.py: no such file",
    f"{KINDS}@nothing": "has no task 'nothing'; its tasks are: .*values",
    f"{KINDS}@not_registered": "returned a str, not an inspect_ai.Task",
    "no_such_module@task": "no_such_module cannot be imported",
    "tests/environment/inspect_tasks/missing.py@task": "agentrl env add inspect-ai.* a_package_that_no_environment_has --name inspect-ai",
    f"{KINDS}@missing_import": "agentrl env add inspect-ai.* a_package_that_no_environment_has --name inspect-ai",
    f"{KINDS}@unreachable_hub": "if it loads data from a hub, the hub cannot be reached",
    "task": "write module@task or path/file.py@task",
    "inspect_evals/gsm8k": "for example inspect_evals.gsm8k@gsm8k",
    f"{KINDS}@no_scorer": "has no scorer",
    f"{KINDS}@no_samples": "no samples",
    f"{KINDS}@same_ids": "two samples have the id 'a'",
    f"{KINDS}@broken": "KeyError",
    f"{KINDS}@quits": "SystemExit",
}
DESCRIBING = f"""
import json, sys
sys.path[:0] = [{str(INSIDE)!r}]
from inspect_samples import describe
for ref in sys.argv[1:]:
    config = {{"task": ref, "args": {{}}, "solver": "", "path": ["."]}}
    try:
        print(json.dumps(describe(config)))
    except BaseException as error:
        print(json.dumps(str(error)))
"""


def test_a_task_that_cannot_be_loaded_is_an_error_with_the_reason() -> None:
    python = environment_python(ROOT, "inspect-ai")
    process = subprocess.run([python, "-c", DESCRIBING, *BROKEN], capture_output=True, text=True, timeout=120, check=True)
    results = dict(zip(BROKEN, map(json.loads, process.stdout.splitlines()), strict=True))
    assert not {ref: results[ref] for ref, text in BROKEN.items() if not re.search(text, str(results[ref]), re.DOTALL)}


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        (f"{TASKS}@broken", "KeyError"),
        (f"{TASKS}@with_tool", "use a sandbox,"),
        (f"{TASKS}@with_files", "use a sandbox .with compose.yaml"),
    ],
)
def test_a_task_that_cannot_be_used_is_an_error_before_the_run(ref: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        InspectFamily(ref)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"argument": {}}, "argument: unknown option"),
        ({"limits": {"turn": 1}}, "turn"),
        ({"limits": {"turns": -1}}, "turns must be positive"),
        ({"sandbox": {"memory": 1}}, "memory"),
        ({"tools": ["python"]}, "tools and outputs require solver=agentrl"),
        ({"args": {"unknown": 1}}, "unknown"),
        ({"solver": f"{KINDS}@absent"}, "absent"),
        ({"environment": "absent"}, "no environment 'absent'"),
    ],
)
def test_invalid_options_are_errors(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises((UserError, PluginError), match=message):
        InspectFamily(f"{TASKS}@values", **options)


def test_a_family_is_the_same_in_every_process_and_its_splits_are_disjoint() -> None:
    recipe = TasksConfig(family={"ref": f"{TASKS}@values", "options": {"heldout": 0.5}})
    first, second = (open_family(recipe, seed=3) for _ in range(2))
    tasks = {split: [first.task(split, index) for index in range(first.size(split) or 0)] for split in Split}
    assert [task.key for task in tasks[Split.TRAIN]] == [second.task(Split.TRAIN, at).key for at in range(len(tasks[Split.TRAIN]))]
    names = [{task.id for task in tasks[split]} for split in (Split.TRAIN, Split.HELDOUT)]
    assert not names[0] & names[1] and len(names[0] | names[1]) == 16 and len(names[1]) == 8


def test_a_recipe_uses_the_hosted_agent_unless_it_chooses_another() -> None:
    recipe = Recipe(name="r", policy=PolicyConfig(model="m"), tasks=TasksConfig(family=f"{TASKS}@values"))
    assert recipe.agent.ref == HOSTED_AGENT
    assert recipe.but({"rollout.agent": "mine:Agent"}).agent.ref == "mine:Agent"
    assert recipe.but({"tasks.family": "sandboxes.tables:Tables"}).agent.ref == "turns"
