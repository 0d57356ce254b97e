"""Each proof reports the one mistake of a family, verifier or tool, and nothing for sound ones."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from agentrl.agent.run_tools import declared_tools, pin_tools
from agentrl.check.access import image_files, prove_unreadable
from agentrl.check.purity import FamilySource, prove_purity, split_sizes
from agentrl.check.report import Proof
from agentrl.check.splits import prove_splits
from agentrl.check.tool_calls import prove_tools
from agentrl.check.verifiers import GoldAttempt, prove_verifiers
from agentrl.cli import app
from agentrl.config import MCPConfig, TasksConfig
from agentrl.protocols import TaskFamily
from agentrl.records import Episode, SandboxSpec, Split, Task
from agentrl.reward import TaskScorer
from agentrl.sandbox import select_backend
from agentrl.task.folders import _GOLD
from agentrl.task.grading import GRADING_KEY, Grading, encode_files
from agentrl.task.leaks import find_leaks, hidden_truths
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing, sample_task
from tests.waiting import wait_until

from . import bad_families
from .bad_families import Good

ROOT = Path(__file__).resolve().parents[2]


def source(name: str) -> FamilySource:
    return FamilySource(tasks=TasksConfig(family=f"tests.check.bad_families:{name}"), root=ROOT)


def purity_proof(name: str, count: int = 4) -> Proof:
    family = source(name)
    return prove_purity(family, split_sizes(family.open(), count))


def splits_proof(name: str, monkeypatch: pytest.MonkeyPatch) -> Proof:
    monkeypatch.setattr("agentrl.check.splits.SAMPLE", 40)
    family = source(name)
    return prove_splits(family, split_sizes(family.open(), 4))


def failures(proof: Proof) -> list[str]:
    return [finding.what for finding in proof.findings if finding.severity == "failure"]


@pytest.mark.slow
def test_sound_family_is_pure_with_disjoint_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert purity_proof("Good").findings == () and purity_proof("Good").looked_at.startswith("16 tasks, each drawn three times")
    proof = splits_proof("Good", monkeypatch)
    assert proof.findings == () and "40 tasks of train of infinitely many" in proof.unproven[0]


@pytest.mark.slow
def test_stateful_family_differs_in_both_processes() -> None:
    other_process, second_draw = failures(purity_proof("Impure"))
    assert (
        "16 tasks of 16 differ in another process with a different hash seed, in prompt; train 0: prompt was ...numbers.txt? Say it"
        in other_process
    )
    assert "16 tasks of 16 differ when drawn again in a different order, in prompt" in second_draw


@pytest.mark.slow
def test_family_that_depends_on_the_hash_seed_differs_only_in_another_process() -> None:
    (failure,) = failures(purity_proof("Hashed"))
    assert failure.startswith("16 tasks of 16 differ in another process with a different hash seed, in prompt; ")


@pytest.mark.slow
def test_tasks_that_cannot_be_created_or_stored_are_reported() -> None:
    proof = purity_proof("Unmade")
    assert "4 tasks cannot be created: KeyError: 'region'" in failures(proof)[0]
    assert proof.findings[0].tasks == ("train 2", "train 3", "heldout 2", "heldout 3")
    notes = [(finding.severity, finding.what) for finding in proof.findings[1:]]
    assert notes == [("note", "a different seed gives the same training tasks: the family does not use its seed")]
    with pytest.raises(ValueError, match=r"Task\.data: 'answer': a set is not JSON"):
        replace(Good().task(Split.TRAIN, 0), data={"answer": {1, 2}})


@pytest.mark.slow
def test_family_that_does_not_open_in_another_process_is_reported(tmp_path: Path) -> None:
    (tmp_path / "fam.py").write_text(
        "import os\nfrom tests.check.bad_families import Good\n"
        f"if os.getpid() != {os.getpid()}:\n    raise OSError('no data here')\nclass F(Good):\n    pass\n"
    )
    broken = FamilySource(tasks=TasksConfig(family=f"{tmp_path / 'fam.py'}:F"), root=ROOT)
    (failure,) = failures(prove_purity(broken, split_sizes(broken.open(), 2)))
    assert failure.startswith("the family cannot be opened in another process: ") and "no data here" in failure


SLOW_FAMILY = """
import os, time
from pathlib import Path
from tests.check.bad_families import Good

class Slow(Good):
    def __init__(self, *, seed):
        super().__init__(seed=seed)
        Path("pid").write_text(str(os.getpid()))
        time.sleep(60)
"""
DRAW = """
from pathlib import Path
from agentrl.check.purity import FamilySource, _draw_in_subprocess
from agentrl.config import TasksConfig

_draw_in_subprocess(FamilySource(tasks=TasksConfig(family="./slow.py:Slow"), root=Path.cwd()), [("train", 0)])
"""


@pytest.mark.slow
def test_the_process_that_draws_tasks_dies_with_the_check(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_FAMILY)
    pid = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", DRAW], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}) as check:
        wait_until(lambda: pid.exists() and pid.read_text() != "")
        check.kill()
    wait_until(lambda: not Path("/proc", pid.read_text()).exists(), 30.0)


def test_heldout_tasks_equal_to_training_tasks_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    (failure,) = failures(splits_proof("Overlapping", monkeypatch))
    assert failure.startswith(
        "6 of 6 tasks in heldout show the agent the same content as a training task: sums-heldout-0 is sums-train-0, "
    )


class Few(Good):
    """Only two different questions, one id for all tasks, and held-out tasks with split train."""

    def numbers(self, split: Split, index: int) -> list[int]:
        return super().numbers(split, index % 2)

    def task(self, split: Split, index: int) -> Task:
        return replace(super().task(split, index), id="sums", split=Split.TRAIN)


def test_repeats_equal_ids_and_misplaced_tasks_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_families, "Few", Few, raising=False)
    proof = splits_proof("Few", monkeypatch)
    assert failures(proof) == ["6 tasks drawn from heldout have split train"]
    findings = {finding.what for finding in proof.findings}
    assert "38 of 40 tasks in train repeat another task: the policy is trained on them more often" in findings
    assert "different tasks have the same id, which identifies them in transcripts: sums" in findings
    assert any(what.startswith("the answer '") and what.endswith("is correct in 50% of the tasks in train") for what in findings)


FILE_CASES = [
    ("answer.txt", "4\n", "4", True),
    ("out/expected-1.txt", "4", "4", True),
    ("n.txt", "4\n", "4", None),  # one digit matches by chance
    ("n.txt", "203035 \n", "203035", None),
    ("n.txt", "20303599\n", "20303599", True),
    ("notes.md", "the answer: 4.\n", "4", True),
    ("notes.md", "the answer: 42\n", "4", None),
    ("notes.md", "the answer: 4.5\n", "4", None),
    ("meta.json", '{"rows": 4, "answer": "4"}', "4", True),
    ("meta.json", '{"rows": 4, "answers": 3}', "4", None),
    ("conf.ini", "expected_total=4\n", "4", True),
    ("conf.ini", "solution => north", "north", True),
    ("table.csv", "id,answer\n1,3\n2,4\n", "4", True),
    ("table.csv", "id,amount\n1,3\n2,4\n", "4", None),
    ("table.csv", "id,amount\n1,3\n2,2024-01-03\n", "2024-01-03", False),
    ("table.csv", "id,amount\n", "", None),
    ("unexpected.txt", "4", "4", None),
    ("app.log", "0001 WARNING billing retry after ERROR\n", "7", None),
]


@pytest.mark.parametrize(("path", "text", "truth", "certain"), FILE_CASES)
def test_a_readable_answer_is_a_leak_and_a_chance_match_is_not(path: str, text: str, truth: str, certain: bool | None) -> None:
    task = replace(Good().task(Split.TRAIN, 0), data={"answer": truth})
    assert [leak.certain for leak in find_leaks({path: text.encode()}, hidden_truths(task))] == ([] if certain is None else [certain])


@given(st.binary(max_size=300), st.text(min_size=1, max_size=40), st.text(max_size=20))
def test_search_accepts_any_file_and_any_truth(data: bytes, answer: str, name: str) -> None:
    task = replace(Good().task(Split.TRAIN, 0), data={"answer": answer, "deep": {"expected": [answer, 3]}})
    assert isinstance(find_leaks({name or "x": data}, hidden_truths(task, answer)), list)


@given(
    st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cc", "Zs", "Zl", "Zp"]), min_size=8, max_size=40),
    st.text(max_size=60),
)
def test_a_long_answer_in_a_file_is_always_a_leak(answer: str, padding: str) -> None:
    task = replace(Good().task(Split.TRAIN, 0), data={"answer": answer})
    for text in (f"{padding}{answer}{padding}", f"{padding}\nanswer: {answer}\n"):
        assert answer in {leak.truth.text for leak in find_leaks({"f": text.encode("utf-8", "replace")}, hidden_truths(task))}


def test_values_that_count_as_truth() -> None:
    task = replace(
        Good().task(Split.TRAIN, 0),
        data={"kind": "sum", "level": "ERROR", "answer": 4, "meta": {"expected_rows": ["a", "north-east"]}, "flag": True},
    )
    truths = {truth.text: truth.origin for truth in hidden_truths(task, " 17 \n")}
    assert truths == {"4": "data.answer", "17": "the gold solution's output", '["a", "north-east"]': "data.meta", "north-east": "data.meta"}


def test_hidden_tests_and_solutions_are_recognised() -> None:
    tests = {
        "test_it.py": b"def test_it(runs):\n    assert runs['one'].stdout == 'zoe xaver vera'\n",
        "log.txt": b"input that is given as well" * 3,
    }
    solve = b"import sys\nprint('zoe', 'xaver', 'vera', file=sys.stdout)\n"
    gold = _GOLD.format(files=encode_files({"solve.py": solve}), argv=["python3", "/tmp/solution/solve.py"])
    grading = Grading(mode="judge", tests=encode_files(tests), runs=({"name": "one", "argv": ["true"]},), gold=gold)  # type: ignore[arg-type]
    task = replace(Good().task(Split.TRAIN, 0), data={GRADING_KEY: grading.model_dump(mode="json")}, outputs=("a.py",))
    truths = hidden_truths(task)
    files = {
        "log.txt": tests["log.txt"],
        ".old/solve.py": b"# mine\n" + solve,
        "t.py": tests["test_it.py"],
        "names": b"zoe xaver vera and more",
        "same.txt": b"zoe xaver vera\n",
        "expected.txt": b"zoe xaver vera\n",
    }
    leaks = {(leak.path, leak.truth.origin, leak.certain) for leak in find_leaks(files, truths)}
    assert leaks == {
        (".old/solve.py", "solution/solve.py", True),
        ("t.py", "tests/test_it.py", True),
        ("names", "tests/test_it.py", False),
        ("same.txt", "tests/test_it.py", False),  # the test may check that an input is unchanged
        ("expected.txt", "tests/test_it.py", True),
    } | ({("t.py", "tests/test_it.py", False)})


async def verifiers_proof(name: str) -> Proof:
    family: TaskFamily = source(name).open()
    tasks = [family.task(Split.TRAIN, index) for index in range(6)]
    scorer = TaskScorer()
    golden = {}
    for task in tasks:
        episode = Episode(id="g", task_id=task.id, task_key=task.key, trajectories=(), answer=task.data["answer"])
        golden[task.id] = GoldAttempt(episode=episode, score=await scorer(task, episode))
    return await prove_verifiers(tasks, golden, scorer, parallel=4)


async def test_verifiers_that_fail_or_are_inconsistent_are_reported() -> None:
    good = await verifiers_proof("Good")
    assert good.findings == () and good.looked_at == "1 verifier: 30 malformed answers, 6 gold episodes twice"
    brittle = failures(await verifiers_proof("Brittle"))
    assert [what.partition(";")[0] for what in brittle] == [
        "a score of 1 for incorrect work",
        "no score: tests.check.bad_families:brittle: verifier returned str, not a Score",
    ]
    assert "two megabytes for sums-train-0" in brittle[0]
    (fickle,) = failures(await verifiers_proof("Fickle"))
    assert "of 6 score differently the second time: sums-train-" in fickle


async def test_tools_that_fail_on_malformed_arguments_are_reported() -> None:
    family = source("Tooled").open()
    tasks = [
        replace(
            family.task(Split.TRAIN, 0),
            tools=tuple(f"tests.check.bad_families:{name}" for name in ("calculator", "talker", "misnamed", "untold")),
        )
    ]
    proof = await prove_tools(tasks, ScriptedSandboxes(printing("")))
    findings = {
        (finding.severity, finding.what.partition(", given")[0].removeprefix("tool tests.check.bad_families:"))
        for finding in proof.findings
    }
    assert findings >= {
        ("warning", "calculator raises TypeError"),
        ("warning", "calculator raises KeyError"),
        ("failure", "talker returns str, not a ToolOutcome"),
        ("failure", "untold: its schema has no description, so the agent does not know what it does"),
    }
    assert any(
        what.startswith("misnamed does not load: ") and "has the name 'misnamed', but 'other' in its schema" in what for _, what in findings
    )
    (missing,) = (
        await prove_tools([replace(tasks[0], tools=("tests.check.bad_families:nothing",))], ScriptedSandboxes(printing("")))
    ).findings
    assert "does not load: 'tests.check.bad_families:nothing': tests.check.bad_families has no attribute 'nothing'" in missing.what
    duplicated = [replace(tasks[0], tools=("tests.check.bad_families:calculator", "tests.check.bad_families:calculator"))]
    assert any(
        "two tools of one task have the name 'calculator'" in what
        for what in failures(await prove_tools(duplicated, ScriptedSandboxes(printing(""))))
    )


async def test_tool_state_must_be_restorable_and_per_episode() -> None:
    task = source("Tooled").open().task(Split.TRAIN, 0)

    async def faults_of(name: str) -> list[str]:
        proof = await prove_tools([replace(task, tools=(f"tests.check.bad_families:{name}",))], ScriptedSandboxes(printing("")))
        return [what.removeprefix(f"tool tests.check.bad_families:{name}: ").partition(":")[0] for what in failures(proof)]

    assert await faults_of("Notes") == []
    assert await faults_of("Gossip") == ["its state leaks into the next episode"]
    assert await faults_of("Forgetful") == ["its restored state differs from the saved one, so a resumed episode has different tools"]
    assert await faults_of("Stubborn") == ["its state cannot be restored (KeyError"]
    assert await faults_of("Opaque") == ["the state of Opaque cannot be captured"]


@pytest.mark.slow
async def test_tool_that_blocks_the_event_loop_does_not_block_the_check() -> None:
    tasks = [replace(source("Tooled").open().task(Split.TRAIN, 0), tools=("tests.check.bad_families:holder",))]
    (failure,) = failures(await prove_tools(tasks, ScriptedSandboxes(printing(""))))
    assert failure.startswith("tool tests.check.bad_families:holder blocks the event loop for more than 6 s (await slow operations")


@pytest.mark.bubblewrap
@pytest.mark.parametrize(
    ("name", "failed"),
    [
        ("Good", ""),
        ("Overlapping", "no held-out task is a training task"),
        ("Leaking", "no answer is readable in what the agent is given"),
    ],
)
def test_the_command_reports_proven_and_unproven_claims(name: str, failed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "bad.py"
    recipe.write_text(
        "from agentrl.config import PolicyConfig, Recipe, TasksConfig\n"
        f"recipe = Recipe(name='bad', policy=PolicyConfig(model='m'), tasks=TasksConfig(family='tests.check.bad_families:{name}'))\n"
    )
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, ["check", str(recipe), "--count", "2", "--backend", "bubblewrap", "--parallel", "4"])
    assert result.exit_code == (1 if failed else 0), result.output
    verdicts = {line[6:58].strip(): line[:4].strip() for line in result.stdout.split("\n\n")[0].splitlines()}
    assert [name for name, verdict in verdicts.items() if verdict != "ok"] == ([failed] if failed else [])
    assert len(verdicts) == 9 and "  - that tasks of train beyond the first 2 of infinitely many can be solved" in result.output
    if name == "Leaking":
        assert "sums-train-0: meta.json contains, next to its key, data.answer" in result.output


@pytest.mark.bubblewrap
async def test_files_of_an_image_are_searched(tmp_path: Path) -> None:
    """Files of the distribution are excluded; few others exist in a fresh sandbox."""
    sandboxes = select_backend("bubblewrap", run_label="test", root=ROOT)
    try:
        image = await image_files(SandboxSpec(image="sandboxes/tables"), sandboxes)
    finally:
        await sandboxes.close()
    assert "/etc/passwd" in image.files and image.problem == ""
    assert len(image.files) < 400 and not any(path.startswith(("/proc/", "/usr/lib/python3")) for path in image.files)


@pytest.mark.bubblewrap
async def test_tool_that_breaks_its_sandbox_is_reported_and_gets_a_fresh_one() -> None:
    task = replace(Good().task(Split.TRAIN, 0), tools=("tests.check.bad_families:breaker",))
    sandboxes = select_backend("bubblewrap", run_label="test", root=ROOT)
    try:
        proof = await prove_tools([task], sandboxes)
    finally:
        await sandboxes.close()
    prefix = "tool tests.check.bad_families:breaker makes its sandbox fail, which excludes the episode: the exec server is gone"
    assert any(what.startswith(f"{prefix}, given an empty string for every argument") for what in failures(proof))


@pytest.mark.slow
def test_family_that_exits_does_not_end_the_proofs() -> None:
    assert any("SystemExit: 0" in failure for failure in failures(purity_proof("Leaves")))


async def test_sandboxed_mcp_servers_are_checked_and_host_servers_are_never_called(tmp_path: Path) -> None:
    server = Path(__file__).parents[1] / "agent" / "hostile_mcp.py"
    config = MCPConfig(host_command=(sys.executable, "-S", "-E", str(server), "dies"))
    mcp_task = sample_task(tools=("mcp:it", "submit"))
    backend = ScriptedSandboxes(printing(""))
    tools = await pin_tools(declared_tools({"it": config}, {}, tmp_path), [mcp_task], backend)
    proof = await prove_tools([mcp_task], backend, tools)
    assert (proof.findings, proof.looked_at) == ((), "1 tool: mcp:it"), "a call would have ended it"
    (missing,) = (await prove_tools([mcp_task], backend)).findings
    assert "mcp:it does not load" in missing.what and "declare the server in the recipe" in missing.what


class Shifted(Good):
    """The first training task cannot be created, and the third has another split."""

    def task(self, split: Split, index: int) -> Task:
        if (split, index) == (Split.TRAIN, 0):
            raise KeyError("region")
        task = super().task(split, index)
        return replace(task, split=Split.HELDOUT) if (split, index) == (Split.TRAIN, 2) else task


def test_a_misplaced_task_keeps_its_index_after_a_task_that_cannot_be_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_families, "Shifted", Shifted, raising=False)
    (finding,) = [finding for finding in splits_proof("Shifted", monkeypatch).findings if "drawn from train" in finding.what]
    assert finding.tasks == ("train 2",)


def test_error_output_that_is_not_utf8_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/python")
    (tmp_path / "python").write_text("#!/bin/sh\nprintf '\\377 is not text' >&2\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    assert "\ufffd is not text" in failures(purity_proof("Good"))[0]


async def test_only_tasks_with_a_sandbox_are_counted_as_searched() -> None:
    tasks = [sample_task(), sample_task(id="without", sandbox=None)]
    proof = await prove_unreadable(tasks, {}, ScriptedSandboxes(printing("[{}, null, 0]")))
    assert proof.looked_at == "files and prompts of 1 task, and 0 files of 1 image"
