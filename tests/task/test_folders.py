"""Task folders: the task of a valid folder, and the message for each mistake."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.config import Part, TasksConfig
from agentrl.errors import RecipeError, TaskError, UserError
from agentrl.records import Split, Task, codec
from agentrl.task import TaskFolders, open_family
from agentrl.task.grading import grading_of
from agentrl.task.outputs import WHOLE_DIRECTORY

ROOT = Path(__file__).resolve().parents[2]
SECRET = "the hidden truth"
TOML = """
version = "1.0"
outputs = ["answer.txt", "src/**"]
[metadata]
author_name = "A. Person"
category = "demo"
tags = ["a", "b"]
[agent]
timeout_sec = 90
turns = 5
[environment]
cpus = 2
memory_mb = 64
storage_mb = 8
build_timeout_sec = 600.0
processes = 12
[verifier]
timeout_sec = 20.0
"""
RUNS = '[[run]]\nname = "one"\nargv = ["python3", "src/a.py"]\nstdin_file = "input.txt"\n'


CALLED = '[[run]]\nname = "one"\ncall = "src/a.py:f"\n'


def write(folder: Path, files: dict[str, str | bytes]) -> None:
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.encode())


def write_task(folder: Path, name: str = "first", toml: str = TOML) -> Path:
    write(folder, {"image.toml": 'suite = "bookworm"\n'})
    write(
        folder / name,
        {
            "task.toml": toml,
            "instruction.md": "Do it.\n",
            "environment/files/data/in.txt": "text",
            "environment/files/in.bin": b"\xff\x00",
            "tests/test_it.py": f"def test_it(outputs, runs):\n    assert runs['one'].stdout == '{SECRET}'\n",
            "tests/input.txt": "input",
            "tests/runs.toml": RUNS,
            "solution/solve.sh": "true\n",
        },
    )
    return folder / name


def only_task(folder: Path, split: Split = Split.TRAIN) -> Task:
    return TaskFolders(folder, root=folder.parent).task(split, 0)


def test_a_folder_becomes_a_task(tmp_path: Path) -> None:
    write_task(tmp_path / "family")
    task = only_task(tmp_path / "family")
    assert (task.id, task.family, task.prompt[0].content) == ("family/first", "family", "Do it.")
    assert task.outputs == ("answer.txt", "src/**") and task.tools == ("python", "submit")
    assert task.contents() == {"data/in.txt": b"text", "in.bin": b"\xff\x00"}
    assert (task.sandbox.image, task.sandbox.memory_mb, task.sandbox.cpus, task.sandbox.processes) == ("family", 64, 2.0, 12)
    assert (task.limits.wall_s, task.limits.turns) == (90.0, 5)
    plan = grading_of(task)
    assert (plan.mode, plan.timeout_s, plan.test_names()) == ("judge", 20.0, ("test_it.py::test_it",))
    assert [run.stdin_file for run in plan.runs] == ["input.txt"]
    assert task.data["kind"] == "demo"
    assert codec.from_json(Task, codec.to_json(task)).key == task.key


def test_task_image_takes_precedence_over_the_familys(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "family")
    write(folder, {"environment/Dockerfile": "FROM debian\n", "environment/context.txt": "x"})
    assert only_task(tmp_path / "family").sandbox.image == "family/first/environment"


def test_agent_receives_nothing_hidden(tmp_path: Path) -> None:
    write_task(tmp_path / "family")
    task = only_task(tmp_path / "family")
    received = json.dumps([task.prompt[0].content, dict(task.files), dict(task.binary_files), task.tools])
    assert SECRET not in received and SECRET.encode() in b"".join(grading_of(task).files().values())


def test_tests_are_part_of_the_task_key(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "family")
    before = only_task(tmp_path / "family").key
    assert only_task(tmp_path / "family").key == before
    write(folder, {"tests/input.txt": "other input"})
    assert only_task(tmp_path / "family").key != before


def test_splits_are_drawn_with_the_seed_and_never_overlap(tmp_path: Path) -> None:
    for number in range(8):
        write_task(tmp_path / "family", f"t{number}")
    write_task(tmp_path / "family", "real", TOML.replace("outputs", 'split = "heldout_real"\noutputs'))

    def names(seed: int, split: Split) -> list[str]:
        family = TaskFolders(tmp_path / "family", root=tmp_path, seed=seed)
        return [family.task(split, index).id for index in range(family.size(split) or 0)]

    assert names(0, Split.HELDOUT_REAL) == ["family/real"]
    assert len(names(0, Split.HELDOUT)) == 2 and len(names(0, Split.TRAIN)) == 6
    assert not set(names(0, Split.HELDOUT)) & set(names(0, Split.TRAIN))
    assert names(0, Split.HELDOUT) == names(0, Split.HELDOUT)
    assert len({tuple(names(seed, Split.HELDOUT)) for seed in range(6)}) > 1
    for share, size in ((0.0, 0), (0.01, 1), (0.99, 7)):
        assert TaskFolders(tmp_path / "family", root=tmp_path, heldout=share).size(Split.HELDOUT) == size
    for share in (-0.1, 1.0):
        with pytest.raises(UserError, match="heldout"):
            TaskFolders(tmp_path / "family", root=tmp_path, heldout=share)


def edit(path: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / path).read_text()
        assert old in text
        (folder / path).write_text(text.replace(old, new))

    return change


def remove(path: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        target = folder / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    return change


def add(path: str, content: str | bytes = "x") -> Callable[[Path], None]:
    return lambda folder: write(folder, {path: content})


def link(path: str) -> Callable[[Path], None]:
    return lambda folder: (folder / path).symlink_to("/etc/passwd")


MISTAKES: list[tuple[Callable[[Path], None], list[str]]] = [
    (remove("task.toml"), ["task.toml: is missing", "outputs = "]),
    (remove("instruction.md"), ["instruction.md: is missing"]),
    (add("instruction.md", " \n"), ["instruction.md: is empty"]),
    (add("instruction.md", b"\xff\xfe"), ["instruction.md: cannot be read as text"]),
    (remove("tests"), ["tests: is missing"]),
    (remove("solution/solve.sh"), ["solution: contains 0 of solve.sh and solve.py"]),
    (add("solution/solve.py"), ["solution: contains 2 of"]),
    (remove("../image.toml"), ["environment: has no image", "image.toml"]),
    (add("environment/data.csv"), ["environment/data.csv: is not used", "environment/files"]),
    (add("readme.txt"), ["readme.txt: does not belong to a task"]),
    (link("environment/files/link"), ["environment/files/link: is not a regular file"]),
    (link("tests/link"), ["tests/link: is not a regular file"]),
    (edit("task.toml", "version", "= version"), ["task.toml: is not TOML"]),
    (edit("task.toml", '"1.0"', '"3"'), ["task.toml: version"]),
    (
        edit("task.toml", "memory_mb", "memry_mb"),
        ["environment.memry_mb: unknown key; known here: build_timeout_sec, cpus, docker_image, memory_mb"],
    ),
    (edit("task.toml", "memory_mb = 64", "memory_mb = -1"), ["environment.memory_mb: ", "32", "got -1"]),
    (edit("task.toml", "cpus = 2", 'cpus = "two"'), ["environment.cpus: ", "got 'two'"]),
    (edit("task.toml", "timeout_sec = 90", "timeout_sec = 0"), ["agent.timeout_sec: ", "greater than 0"]),
    (edit("task.toml", "turns = 5", "turns = true"), ["agent.turns: "]),
    (edit("task.toml", "[agent]", "[agents]"), ["agents: unknown key; known here: agent, environment"]),
    (edit("task.toml", "outputs", "output"), ["output: unknown key; known here: agent, environment"]),
    (edit("task.toml", 'outputs = ["answer.txt", "src/**"]', ""), ["task.toml: outputs: is missing"]),
    (edit("task.toml", '"src/**"', '"."'), ["outputs: '.' is the default of mode harbor"]),
    (
        edit("task.toml", "cpus = 2", "allow_internet = true"),
        ["environment.allow_internet = True: ", "to allow hosts, or [] to allow none"],
    ),
    (edit("task.toml", "cpus = 2", 'network = ["example.org"]'), ["environment.network: ", "example.org"]),
    (edit("task.toml", "cpus = 2", "gpus = 1"), ["environment.gpus = 1: a sandbox has no GPU"]),
    (edit("task.toml", "cpus = 2", 'memory = "much"'), ["environment.memory = 'much': must be a size"]),
    (edit("task.toml", "cpus = 2", 'env = { KEY = "1" }'), ["environment.env = ", "ENV lines into environment/Dockerfile"]),
    (edit("task.toml", "timeout_sec = 20.0", 'user = "root"'), ["verifier.user = 'root': programs run as the sandbox's user"]),
    (edit("task.toml", "timeout_sec = 20.0", "timeout_sec = 9999"), ["verifier.timeout_sec: ", "3600"]),
    (edit("task.toml", "[metadata]", "[solution]\nsecret = 1\n[metadata]"), ["solution: unknown key"]),
    (edit("task.toml", '"src/**"', '"../x"'), ["outputs: '../x' is not a plain path"]),
    (edit("task.toml", '["answer.txt", "src/**"]', "[]"), ["outputs: "]),
    (edit("task.toml", "outputs", 'split = "test"\noutputs'), ["split: Input should be 'train', 'heldout' or 'heldout_real'"]),
    (edit("task.toml", "[verifier]", '[verifier]\nmode = "magic"'), ["verifier.mode: "]),
    (edit("task.toml", "[verifier]", '[verifier]\nmode = "pytest"'), ["runs have no effect with verifier.mode = pytest"]),
    (edit("tests/runs.toml", "argv", "args"), ["tests/runs.toml: run.0: needs either argv"]),
    (edit("tests/runs.toml", "argv", "arg"), ["tests/runs.toml: run.0.arg: unknown key; known here: args, argv, call"]),
    (edit("tests/runs.toml", "input.txt", "gone.txt"), ["there is no file tests/gone.txt"]),
    (edit("tests/runs.toml", "stdin_file", 'files = {"../x" = "input.txt"}\nstdin_file'), ["'../x' is not a plain path"]),
    (edit("tests/runs.toml", "stdin_file", 'files = {"answer.txt" = "input.txt"}\nstdin_file'), ["overwrites a declared output"]),
    (edit("tests/runs.toml", "stdin_file", "timeout_sec = 9999\nstdin_file"), ["timeout_sec: "]),
    (edit("task.toml", "[metadata]", f"[metadata]\na = {'[' * 100_000}"), ["task.toml: is nested too deep"]),
    (edit("task.toml", "[metadata]", f"[metadata]\na = {'1' * 5000}"), ["task.toml: "]),
    (add("tests/runs.toml", CALLED + "args = [2026-11-22]\n"), ["tests/runs.toml: run.0.args: a date is not JSON"]),
    (add("tests/runs.toml", CALLED + "args = [nan]\n"), ["tests/runs.toml: run.0.args: nan is not a JSON number"]),
    (add("tests/runs.toml", CALLED + "[run.kwargs]\na = 12:30:00\n"), ["tests/runs.toml: run.0.kwargs: 'a': a time is not JSON"]),
    (add("tests/runs.toml", RUNS + RUNS), ["two runs have the name 'one'"]),
    (edit("tests/test_it.py", "def test_it(outputs", "def test_it(answers"), ["tests/test_it.py:1", "has a parameter 'answers'"]),
    (edit("tests/test_it.py", "def", "dfe"), ["tests/test_it.py", "invalid syntax"]),
    (edit("tests/test_it.py", "test_it", "it"), ["tests/ has no test"]),
]
REWARD = "echo 1 > /logs/verifier/reward.txt\n"


def swap_image(folder: Path) -> None:
    shutil.rmtree(folder / "environment")


def prebuilt(folder: Path) -> None:
    swap_image(folder)
    edit("task.toml", "cpus = 2", 'docker_image = "example/one:1"')(folder)


def test_all_mistakes_of_all_tasks_are_reported_together(tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = write_task(tmp_path / "family", name)
        edit("task.toml", "[metadata]", "[solution]\nsecret = 1\n[metadata]")(folder)
        remove("solution")(folder)
        write(folder, {"instruction.md": " ", "notes.txt": "x", "more.txt": "x", "tests/runs.toml": "x"})
    write_task(tmp_path / "family", "three")
    with pytest.raises(TaskError) as error:
        TaskFolders(tmp_path / "family", root=tmp_path)
    lines = str(error.value).splitlines()
    assert lines[0] == "family: 2 of 3 tasks are invalid"
    for name in ("one", "two"):
        assert [line.removeprefix(f"task {name}: ").split(" ")[0] for line in lines if line.startswith(f"task {name}: ")] == [
            *("more.txt,", "task.toml:", "instruction.md:", "solution:", "tests/runs.toml:"),
        ]


HARBOR_MISTAKES: list[tuple[Callable[[Path], None], list[str]]] = [
    (prebuilt, ["environment.docker_image = 'example/one:1' has no Dockerfile", "environment/Dockerfile: FROM example/one:1"]),
    (swap_image, ["writes a reward to /logs/verifier", "fix: write environment/Dockerfile"]),
    (add("environment/docker-compose.yaml"), ["needs several containers"]),
    (edit("task.toml", "[metadata]", '[[steps]]\nname = "one"\n[metadata]'), ["steps = ", "a folder for each step"]),
    (edit("task.toml", "timeout_sec = 20.0", 'mode = "shell"'), ["/logs/verifier, which mode shell ignores", 'mode = "harbor"']),
    (
        add("tests/test.sh", f"apt-get update\n{REWARD}"),
        ["tests/test.sh: line 1 (apt-get update): installs packages", "environment/Dockerfile"],
    ),
    (add("tests/test.sh", f"cd /app\nuvx -p 3.13 pytest\n{REWARD}"), ["line 2 (uvx -p 3.13 pytest): downloads", "environment.network"]),
    (add("tests/test.sh", f"curl -LsSf \\\n https://a.example/x | sh\n{REWARD}"), ["line 1 (curl", "has no network"]),
    (add("solution/solve.sh", "pip install numpy\n"), ["solution/solve.sh: line 1 (pip install numpy): downloads"]),
]


def write_harbor_task(folder: Path, name: str, toml: str = TOML) -> Path:
    """Writes a task folder of Harbor."""
    task = write_task(folder, name, toml.replace('outputs = ["answer.txt", "src/**"]', ""))
    for path in ("tests/runs.toml", "tests/test_it.py"):
        (task / path).unlink()
    script = f"curl http://localhost:80/x\nif ! command -v uvx; then\n  pip install uv\nfi\nwhich x || apt-get install x\n{REWARD}"
    write(task, {"environment/Dockerfile": "FROM x\nWORKDIR /app\n", "environment/app/a.txt": "1", "tests/test.sh": script})
    return task


@pytest.mark.parametrize(("change", "messages"), HARBOR_MISTAKES)
def test_unsupported_harbor_features_are_reported(change: Callable[[Path], None], messages: list[str], tmp_path: Path) -> None:
    folder = write_harbor_task(tmp_path / "family", "guilty")
    TaskFolders(tmp_path / "family", root=tmp_path)
    change(folder)
    with pytest.raises(TaskError) as error:
        TaskFolders(tmp_path / "family", root=tmp_path)
    for part in ("task guilty: ", "fix: ", *messages):
        assert part in str(error.value)


def test_harbor_folder_is_accepted_unmodified(tmp_path: Path) -> None:
    keys = 'allow_internet = true\nnetwork = ["pypi.org:443"]\nmemory = "1.5G"\nstorage = "64M"\ngpus = 0\nmcp_servers = []\n'
    head = '[task]\nname = "a/b"\n[solution.env]\n[verifier]\nenv = {}\nenvironment_mode = "shared"'
    toml = TOML.replace("memory_mb = 64\nstorage_mb = 8\n", keys).replace("[verifier]", head).replace("20.0", "1800.0")
    folder = write_harbor_task(tmp_path / "family", "one", toml.replace('version = "1.0"', 'schema_version = "1.4"\nartifacts = []'))
    write(folder, {"LICENSE": "x", "NOTES.md": "x", "environment/files/a.txt": "part of the build context, as any other"})
    task = only_task(tmp_path / "family")
    assert (task.outputs, task.contents(), task.tools) == ((WHOLE_DIRECTORY,), {}, ("shell", "python", "submit"))
    assert (task.sandbox.memory_mb, task.sandbox.disk_mb, task.sandbox.network) == (1536, 64, ("pypi.org:443",))
    assert (grading_of(task).mode, grading_of(task).timeout_s, grading_of(task).test_names()) == ("harbor", 1800.0, ("test.sh",))
    before = task.key
    write(folder, {"environment/app/a.txt": "2"})
    assert only_task(tmp_path / "family").key != before, "the build context is part of the task's key"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("change", "messages"), MISTAKES)
def test_mistake_reports_task_file_field_and_fix(change: Callable[[Path], None], messages: list[str], tmp_path: Path) -> None:
    write_task(tmp_path / "family", "innocent")
    write(tmp_path / "family" / "innocent", {"environment/image.toml": 'suite = "bookworm"\n'})
    folder = write_task(tmp_path / "family", "guilty")
    change(folder)
    with pytest.raises(TaskError) as error:
        TaskFolders(tmp_path / "family", root=tmp_path)
    message = str(error.value)
    assert "task guilty: " in message and "innocent" not in message and "fix: " in message
    for part in messages:
        assert part in message


def test_all_mistakes_of_a_task_are_reported_together(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_task(tmp_path / "family", name)
    (tmp_path / "family" / "a" / "task.toml").unlink()
    (tmp_path / "family" / "c" / "instruction.md").unlink()
    with pytest.raises(TaskError, match=r"2 of 3 tasks(?s:.*)task a: task\.toml(?s:.*)task c: instruction\.md"):
        TaskFolders(tmp_path / "family", root=tmp_path)


def test_recipe_refers_to_a_family_by_its_folder(tmp_path: Path) -> None:
    write_task(tmp_path / "sandboxes" / "family", "a")
    write_task(tmp_path / "sandboxes" / "family", "b")
    config = TasksConfig(family=Part("sandboxes/family", options={"heldout": 0.5}))
    family = open_family(config, seed=0, root=tmp_path)
    assert (family.name, family.size(Split.TRAIN), family.size(Split.HELDOUT)) == ("family", 1, 1)
    assert family.task(Split.TRAIN, 0).sandbox.image == "sandboxes/family"
    with pytest.raises(UserError, match="no folder"):
        open_family(TasksConfig(family="sandboxes/nothing"), seed=0, root=tmp_path)
    with pytest.raises(RecipeError, match=r"tasks\.family\.options\.held: unknown"):
        open_family(TasksConfig(family=Part("sandboxes/family", options={"held": 1})), seed=0, root=tmp_path)
    with pytest.raises(RecipeError, match="must be a number"):
        open_family(TasksConfig(family=Part("sandboxes/family", options={"heldout": "half"})), seed=0, root=tmp_path)


def test_shipped_family_is_valid() -> None:
    family = TaskFolders(ROOT / "sandboxes" / "chores", root=ROOT)
    tasks = [family.task(split, index) for split in Split for index in range(family.size(split) or 0)]
    assert len(tasks) >= 8 and family.size(Split.HELDOUT) and len({task.key for task in tasks}) == len(tasks)
    modes = [grading_of(task).mode for task in tasks]
    assert modes.count("judge") >= 8 and {"pytest", "shell"} < set(modes)


def test_folder_name_that_is_not_utf8_is_a_mistake(tmp_path: Path) -> None:
    write_task(tmp_path / "family", "na\udcffme")
    with pytest.raises(TaskError, match=r"'na\\udcffme': is not a valid name(?s:.*)rename the folder") as caught:
        TaskFolders(tmp_path / "family", root=tmp_path)
    str(caught.value).encode()
