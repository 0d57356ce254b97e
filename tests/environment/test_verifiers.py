"""Packages for verifiers 0.4 and 0.3, played by the real verifiers in their environments (`agentrl env sync`)."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agentrl.environment import host, hosted, venvs
from agentrl.environment.hosted import HostedAgent, host_of
from agentrl.environment.verifiers_tasks import VerifiersFamily
from agentrl.errors import PluginError, UserError
from agentrl.gateway.rewards import posted_reward
from agentrl.plugins import references
from agentrl.protocols import SandboxBackend
from agentrl.records import Blame, Episode, Limits, Score, Split, Task
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.sandbox import BubblewrapBackend
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes, byte_tokenizer
from agentrl.testing.sandboxes import printing
from tests.chats import chat_of

pytestmark = [pytest.mark.environments, pytest.mark.slow]
together = pytest.mark.asyncio(loop_scope="module")  # the tests share hosts, which belong to an event loop
ROOT = Path(__file__).parents[2]
OLD = "verifiers-0.3"
LIMITS = Limits(turns=6, turn_tokens=400, episode_tokens=20000, wall_s=120.0)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the packages as modules and the environments of this repository."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(Path(__file__).parent / "verifiers_packages", folder, dirs_exist_ok=True)
    for name in (venvs.LOCKS, venvs.BUILT):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture
def project(packages: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project, as the current directory."""
    monkeypatch.chdir(packages)
    monkeypatch.setattr(references, "_added", [])
    return packages


Script = Callable[[int, str], str]
Play = Callable[..., Awaitable[list[tuple[Episode, Score]]]]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def hosts() -> AsyncIterator[None]:
    """Ends the hosts. The tests share them because a host takes seconds to start."""
    yield
    for running_host in hosted._hosts.pop(asyncio.get_running_loop(), {}).values():
        await running_host.close()


@pytest.fixture
def play(project: Path, hosts: None) -> Play:
    """Plays tasks concurrently. `script` returns the policy's n-th answer in the named episode."""
    tokenizer = byte_tokenizer()

    async def play_tasks(
        tasks: Mapping[str, Task], script: Script, *, limits: Limits = LIMITS, sandboxes: SandboxBackend | None = None
    ) -> list[tuple[Episode, Score]]:
        runner = EpisodeRunner(
            agent=HostedAgent(chat=chat_of(tokenizer)),
            policy=ScriptedPolicy(tokenizer, script),
            sandboxes=sandboxes or ScriptedSandboxes(printing("")),
            sampling=Sampling(),
            max_model_len=20000,
            request_timeout_s=60.0,
        )
        episodes = await asyncio.gather(*(runner.run(replace(task, limits=limits), episode_id=name) for name, task in tasks.items()))
        return [(episode, await posted_reward(task, episode)) for task, episode in zip(tasks.values(), episodes, strict=True)]

    return play_tasks


def texts(episode: Episode) -> list[list[str]]:
    """Returns the sampled texts of each trajectory."""
    tokenizer = byte_tokenizer()
    return [[tokenizer.decode(turn.completion_ids).removesuffix("<|im_end|>") for turn in each.turns] for each in episode.trajectories]


@together
async def test_a_taskset_is_played_with_exact_tokens_and_its_rewards_are_the_score(play: Play) -> None:
    family = VerifiersFamily("verifiers:toy_sums", seed=1, args={"count": 5}, heldout=0.2)
    assert (family.size(Split.TRAIN), family.size(Split.HELDOUT)) == (4, 1)
    assert {json.loads(family.task(Split.TRAIN, index).data["task"])["answer"] for index in range(4)} < {"0", "2", "4", "6", "8"}
    tasks = {str(index): family.task(Split.TRAIN, index) for index in range(4)}
    right = {name: json.loads(task.data["task"])["answer"] for name, task in tasks.items()}
    results = await play(tasks, lambda turn, name: right[name] if name != "0" else "I do not know")
    for (episode, score), name in zip(results, tasks, strict=True):
        answer = right[name] if name != "0" else "I do not know"
        assert episode.stop_reason == "answered" and episode.failures == () and episode.answer == answer
        assert texts(episode) == [[answer]], "one trajectory with one turn"
        assert score.value == (1.0 if name != "0" else 0.0) and score.parts["length"] == len(answer), score
        prompt = byte_tokenizer().decode(episode.trajectories[0].turns[0].prompt_ids)
        assert prompt.startswith("<|im_start|>system\nAnswer with a number.<|im_end|>\n<|im_start|>user\n")
    assert results[1][1].parts["exact"] == 0.8 and results[0][1].parts["exact"] == 0.0


@together
async def test_tools_of_a_taskset_are_called_in_one_trajectory(play: Play) -> None:
    task = VerifiersFamily("verifiers:toy_tools").task(Split.TRAIN, 0)
    calls = ('<tool_call>\n{"name": "book_lookup", "arguments": {"name": "anna"}}\n</tool_call>', "17")
    wrong = ('<tool_call>\n{"name": "absent", "arguments": {}}\n</tool_call>', "18")
    results = await play({"good": task, "wrong": task}, lambda turn, name: (calls if name == "good" else wrong)[turn])
    (good, score), (bad, zero) = results
    assert texts(good) == [list(calls)] and score.value == 1.0
    assert "no tool 'absent'" in byte_tokenizer().decode(bad.trajectories[0].turns[1].prompt_ids) and zero.value == 0.0
    assert [result.output for turn in good.trajectories[0].turns for result in turn.tool_results] == ["17"]


@together
async def test_an_episode_at_its_limit_is_scored(play: Play) -> None:
    task = VerifiersFamily("verifiers:toy_tools").task(Split.TRAIN, 0)
    call = '<tool_call>\n{"name": "book_lookup", "arguments": {"name": "ben"}}\n</tool_call>'
    limits = replace(LIMITS, turns=2)
    ((episode, score),) = await play({"e": task}, lambda turn, _: call, limits=limits)
    assert episode.stop_reason == "turn_limit" and len(episode.trajectories[0].turns) == 2 and score.value == 0.0, (episode.failures, score)
    first = episode.trajectories[0].turns[0]
    narrow = replace(LIMITS, episode_tokens=len(first.prompt_ids) + len(first.completion_ids) + 5)
    ((episode, score),) = await play({"e": task}, lambda turn, _: call, limits=narrow)
    assert episode.stop_reason == "token_limit" and score.value == 0.0, (episode.failures, score)
    assert [fault.blame for fault in episode.failures] == [Blame.POLICY], "the gateway refused its last request"


@together
async def test_a_fault_of_a_taskset_is_never_a_score(play: Play) -> None:
    family = VerifiersFamily("verifiers:toy_faults", heldout=0)
    tasks = {family.task(Split.TRAIN, index).prompt[0].content: family.task(Split.TRAIN, index) for index in range(8)}
    limits = replace(LIMITS, wall_s=60.0)
    results = dict(zip(tasks, await play(tasks, lambda turn, name: "x", limits=limits), strict=True))
    blamed = {name: [(fault.blame, fault.message) for fault in episode.failures] for name, (episode, _) in results.items()}
    assert results["good"][1].value == 1.0 and blamed["good"] == []
    assert results["large"][1].value == 1.0 and results["large"][1].parts == {"exact": 1.0}, "the state stays in the host"
    assert results["nan"][1].value is None and "the reward is not finite: [nan]" in results["nan"][1].reason
    assert results["nan"][1].blame is Blame.TASK
    assert results["hangs"][1].value is None and "not computed in time" in results["hangs"][1].reason
    for name, text in (("raises", "the answer key is missing"), ("setup", "no seat free"), ("text", "could not convert")):
        ((blame, message),) = blamed[name]
        assert blame is Blame.TASK and text in message, message


@together
@pytest.mark.bubblewrap
async def test_programs_run_only_in_the_sandbox_of_the_episode(play: Play) -> None:
    options = {"heldout": 0, "image": "sandboxes/tables"}
    family = VerifiersFamily("verifiers:toy_programs", **options)
    programs = ("print(6 * 7)", "print(1)", f"import os; print(os.listdir({str(ROOT)!r}))")
    tasks = {name: family.task(Split.TRAIN, 0) for name in programs}
    backend = BubblewrapBackend(run_label="test", root=ROOT)
    results = await play(tasks, lambda turn, name: name, sandboxes=backend)
    assert [score.value for _, score in results] == [1.0, 0.0, 0.0], results

    family = VerifiersFamily("verifiers:toy_programs", heldout=0)
    results = await play({str(index): family.task(Split.TRAIN, index) for index in range(2)}, lambda turn, name: "x")
    (fault,) = results[0][0].failures
    assert fault.blame is Blame.TASK and "option image" in fault.message and results[1][1].value == 1.0


@together
async def test_a_killed_host_fails_its_episodes_and_is_restarted(play: Play) -> None:
    task = VerifiersFamily("verifiers:toy_sums", args={"count": 5}).task(Split.TRAIN, 0)
    spec = task.environment
    assert spec is not None
    killed = asyncio.Event()

    def script(turn: int, name: str) -> str:
        if not killed.is_set():
            killed.set()
            process = host_of(spec)._process
            assert process is not None
            process._process.kill()
        return "4"

    ((episode, score),) = await play({"first": task}, script)
    assert [fault.blame for fault in episode.failures] == [Blame.INFRASTRUCTURE] and score.value is None
    assert "the host process ended" in episode.failures[0].message
    ((episode, score),) = await play({"second": task}, script)
    assert episode.failures == () and score.value is not None


@together
async def test_an_environment_for_verifiers_0_3_is_played(play: Play) -> None:
    family = VerifiersFamily("verifiers:toy_v0", environment=OLD, args={"count": 2})
    assert (family.size(Split.TRAIN), family.size(Split.HELDOUT)) == (5, 1), "its evaluation set is held out"
    tasks = {family.task(Split.TRAIN, index).data["task"]: family.task(Split.TRAIN, index) for index in range(5)}
    tasks = {json.loads(data)["answer"]: task for data, task in tasks.items()}
    results = dict(zip(tasks, await play(tasks, lambda turn, name: ("1", "2")[turn % 2]), strict=True))
    good, score = results["2"]
    assert texts(good) == [["1", "2"]] and score.value == 1.0 and good.stop_reason == "answered", "two turns, one trajectory"
    bad, score = results["0"]
    assert bad.stop_reason == "turn_limit" and score.value == 0.0 and bad.failures == ()
    for name, blame, text in (("raises", Blame.TASK, "the answer key is missing"), ("breaks", Blame.INFRASTRUCTURE, "InfraError")):
        (fault,) = results[name][0].failures
        assert fault.blame is blame and text in fault.message, fault
    assert results["nan"][1].value is None and results["nan"][1].blame is Blame.TASK


LOAD = """
import json, sys
sys.path[:0] = sys.argv[1:3]
import toy_broken, verifiers_host
from host_channel import Fault
results = {}
for kind in toy_broken.EXPORTS:
    config = {"package": f"toy_broken_{kind}", "args": {}, "env": {}, "runtime": "subprocess", "sandboxed": False, "size": 10}
    try:
        results[kind] = len(verifiers_host.load(config).describe())
    except Fault as fault:
        results[kind] = f"{fault.blame}: {fault}"
for kind, env in (
    ("bash", {"agent": {"harness": {"id": "bash"}}}),
    ("prime", {"agent": {"runtime": {"type": "prime"}}}),
    ("field", {"x": 1}),
):
    try:
        results[kind] = verifiers_host.load({**config, "env": env}).describe()
    except Fault as fault:
        results[kind] = f"{fault.blame}: {fault}"
print(json.dumps(results))
"""


def test_packages_that_cannot_be_used_are_an_error_before_a_run(project: Path) -> None:
    python = venvs.environment_python(ROOT, "verifiers")
    command = [str(python), "-c", LOAD, str(project), str(host.INSIDE)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    results = json.loads(process.stdout.splitlines()[-1])
    assert results.pop("good") == 8, process.stderr
    for kind, part in (
        ("all", "no `__all__`"),
        ("none", "exports no Taskset"),
        ("two", "exports 2 Taskset"),
        ("empty", 0),
        ("raises", "loading its tasks failed: KeyError"),
        ("hub", "if it loads data from a hub, the hub cannot be reached"),
        ("large", "the maximum is 1048576"),
        ("container", "needs a container: set the option image"),
        ("hosted", "requires the hosted runtime 'modal'"),
        ("judged", "no key for openai/gpt-6-luna at https://api.pinference.ai"),
        ("far", "its tool servers need a hosted runtime"),
        ("bash", "the harness of agent needs a container"),
        ("prime", "requires the hosted runtime 'prime'"),
        ("field", "Extra inputs are not permitted"),
    ):
        message = results.pop(kind)
        assert message == part if isinstance(part, int) else message.startswith("task: ") and part in message, (kind, message)
    assert results == {}


@pytest.mark.parametrize(
    ("content", "environment", "message"),
    [
        ("raise ValueError('no licence')", "verifiers", "cannot be imported: ValueError: no licence"),
        ("raise SystemExit(3)", "verifiers", "cannot be imported: SystemExit: 3"),
        ("import absent_package", "verifiers", "agentrl env add verifiers==0.4.0 absent_package --name verifiers"),
        ("import absent_package.part", OLD, "agentrl env add verifiers==0.3.1 absent_package --name verifiers-0.3"),
        ("import verifiers.absent", "verifiers", "no verifiers.absent: .* run agentrl env add verifiers==VERSION --name"),
        ("import os; os._exit(7)", "verifiers", "status 7 and did not describe the tasks"),
        ("import time; time.sleep(600)", "verifiers", "loading the tasks took more than 3 s"),
        ("def load_environment(): pass", "verifiers", "needs verifiers 0.3, because .*, but .environments/verifiers has 0.4.0"),
        (
            "def load_environment(): pass\n__all__ = ['load_environment']",
            "verifiers",
            "needs verifiers 0.3, because it has load_environment",
        ),
        ("def load_environment(): import absent_package\n__all__ = ['load_environment']", OLD, "absent_package --name verifiers-0.3"),
        (
            "import verifiers.v1 as vf\nclass Mine(vf.Taskset): pass\n__all__ = ['Mine']",
            OLD,
            "needs verifiers 0.4, because .*, but .environments/verifiers-0.3 has 0.3.1",
        ),
    ],
)
def test_an_unusable_module_is_an_error(project: Path, content: str, environment: str, message: str, monkeypatch: Any) -> None:
    (project / "toy_new.py").write_text(content)
    monkeypatch.setattr(host, "DESCRIBE_S", 3.0 if "sleep" in content else host.DESCRIBE_S)
    with pytest.raises(UserError, match=message):
        VerifiersFamily("verifiers:toy_new", environment=environment)


def test_rewards_that_compare_attempts_are_an_error(project: Path) -> None:
    with pytest.raises(UserError, match="compare the attempts at a task"):
        VerifiersFamily("verifiers:toy_v0", environment=OLD, args={"kind": "group"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runtime": "prime"}, "hosted runtime"),
        ({"runtime": "sandbox"}, "is unknown"),
        ({"size": 0}, "number of tasks"),
        ({"heldout": 1.5}, "below 1"),
        ({"limit": {}}, "unknown option"),
        ({"limits": {"turn": 1}}, "limits"),
        ({"environment": "absent"}, "agentrl env add absent"),
    ],
)
def test_wrong_options_are_errors(project: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((PluginError, UserError), match=message):
        VerifiersFamily("verifiers:toy_sums", **options)
