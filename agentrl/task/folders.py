"""A task family that consists of folders in the format of Harbor and terminal-bench.

    FAMILY/
        image.toml              the image for tasks that have none
        TASK/
            task.toml           limits, outputs, mode of grading (agentrl.task.description)
            instruction.md      the agent's prompt
            environment/        image.toml or Dockerfile; files/ is copied to the working directory
            tests/              hidden: test_*.py with runs.toml, or test.sh, which may write a reward as in Harbor
            solution/           hidden: solve.sh or solve.py, the gold solution

All folders are read and checked when the family is opened. If any folders contain mistakes, the error lists every mistake with its task,
file, field and fix.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from pydantic import ValidationError

from agentrl.errors import TaskError, UserError
from agentrl.records import Message, Split, Task
from agentrl.records.fields import text
from agentrl.records.paths import is_plain_path
from agentrl.task import harbor
from agentrl.task.description import M, RunsFile, TaskDescription, parse_toml
from agentrl.task.grading import GRADING_KEY, Grading, GradingRun, Mode, encode_files
from agentrl.task.outputs import WHOLE_DIRECTORY, is_exact

P = ParamSpec("P")
T = TypeVar("T")

VERIFIER = "agentrl.reward.cleanroom:grade"
MAX_BYTES = 8 << 20
MAX_FILES = 2000
HARBOR_TOOLS = ("shell", "python", "submit")
_IMAGES = ("image.toml", "Dockerfile")
_PARTS = {"task.toml", "instruction.md", "environment", "tests", "solution", "README.md"}

_GOLD = """import os, subprocess, sys
from base64 import b64decode
for path, text in {files!r}.items():
    path = os.path.join("/tmp/solution", path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    open(path, "wb").write(b64decode(text))
sys.exit(subprocess.call({argv!r}))
"""


class _Mistake(Exception):
    """A mistake in one file of a task."""

    def __init__(self, where: str, what: str, fix: str) -> None:
        super().__init__(what)
        self.where, self.fix = where, fix


class _Checks:
    """Checks the parts of a task one by one and continues after a mistake."""

    def __init__(self) -> None:
        self.mistakes: list[_Mistake] = []

    def __call__(self, at: Callable[P, T], /, *args: P.args, **more: P.kwargs) -> T | None:
        try:
            return at(*args, **more)
        except _Mistake as error:
            self.mistakes.append(error)
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTask:
    """One task, read from its folder. If the folder does not set a split, the split is drawn later."""

    name: str
    description: TaskDescription
    image: Path
    instruction: str
    files: Mapping[str, bytes]
    grading: Grading
    context: str  # hash of the Dockerfile's build context; empty if there is no Dockerfile

    @property
    def outputs(self) -> tuple[str, ...]:
        """Patterns of the graded files."""
        return self.description.outputs or (WHOLE_DIRECTORY,)

    @property
    def tools(self) -> tuple[str, ...]:
        """The agent's tools."""
        named = "tools" in self.description.model_fields_set or self.grading.mode != "harbor"
        return self.description.tools if named else HARBOR_TOOLS


class TaskFolders:
    """The task family in a folder (`agentrl.protocols.TaskFamily`). Training and held-out tasks come from different folders.

    Image paths are relative to `root`. A fraction `heldout` of the tasks without a `split` is held out; the seed determines which. If
    `heldout` is not 0 and two or more tasks have no `split`, at least one of them is held out, but never all. Raises `TaskError` with all
    mistakes if a folder is invalid, and `UserError` if `folder` does not exist or `heldout` is not at least 0 and below 1.
    """

    def __init__(self, folder: Path, *, root: Path, seed: int = 0, heldout: float = 0.25) -> None:
        if not 0 <= heldout < 1:
            raise UserError(f"heldout must be at least 0 and below 1, got {heldout}", fix="set tasks.family.options.heldout=0.25")
        self.folder = folder.resolve()
        self.name = self.folder.name
        self._root = root.resolve()
        tasks = _load_all(self.folder)
        self._splits = _draw(tasks, seed=seed, heldout=heldout)

    def size(self, split: Split) -> int | None:
        """Returns the number of tasks in the split."""
        return len(self._splits[split])

    def task(self, split: Split, index: int) -> Task:
        """Returns the task at an index of the split. Raises `UserError` if the index is outside the split."""
        if not 0 <= index < len(self._splits[split]):
            raise UserError(f"{self.name} has {len(self._splits[split])} tasks in split {split}; index {index} is out of range")
        folder_task = self._splits[split][index]
        texts, binaries = _split_texts(folder_task.files)
        return Task(
            id=f"{self.name}/{folder_task.name}",
            family=self.name,
            prompt=(Message(role="user", content=folder_task.instruction),),
            tools=folder_task.tools,
            sandbox=folder_task.description.sandbox(self._image(folder_task.image)),
            verifiers=(VERIFIER,),
            data={
                "kind": str(folder_task.description.metadata.get("category", self.name)),
                "build_timeout_s": folder_task.description.environment.build_timeout_sec,
                GRADING_KEY: folder_task.grading.model_dump(mode="json"),
                **({"build_context": folder_task.context} if folder_task.context else {}),
            },
            split=split,
            files=texts,
            binary_files=binaries,
            outputs=folder_task.outputs,
            limits=folder_task.description.limits(),
        )

    def gold(self, task: Task) -> str:
        """Returns Python source that runs the program in solution/, which writes the correct outputs to the working directory."""
        return str(task.data[GRADING_KEY]["gold"])

    def _image(self, folder: Path) -> str:
        return str(folder.relative_to(self._root)) if folder.is_relative_to(self._root) else str(folder)


def _draw(tasks: list[FolderTask], *, seed: int, heldout: float) -> dict[Split, list[FolderTask]]:
    """Returns the tasks of each split. Tasks without a split are ordered by a seeded hash, and the first of them are held out."""
    free = [task for task in tasks if task.description.split is None]
    free.sort(key=lambda task: hashlib.sha256(f"{seed}:{task.name}".encode()).digest())
    count = min(max(1, round(heldout * len(free))), len(free) - 1) if heldout and len(free) > 1 else 0
    chosen = {task.name for task in free[:count]}
    splits: dict[Split, list[FolderTask]] = {split: [] for split in Split}
    for task in tasks:
        splits[task.description.split or (Split.HELDOUT if task.name in chosen else Split.TRAIN)].append(task)
    return splits


def _load_all(folder: Path) -> list[FolderTask]:
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", fix="use the folder of a task family, such as sandboxes/chores")
    folders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "_")))
    if not folders:
        raise TaskError(
            f"{folder} has no task folders",
            fix="write NAME/task.toml, NAME/instruction.md and NAME/tests/ for each task",
        )
    tasks: list[FolderTask] = []
    lines: list[str] = []
    for path in folders:
        loaded = _load(path)
        if isinstance(loaded, FolderTask):
            tasks.append(loaded)
        else:
            lines += [f"task {text(path.name)}: {mistake.where}: {mistake}\n  fix: {mistake.fix}" for mistake in loaded]
    if lines:
        raise TaskError("\n".join([f"{folder.name}: {len(folders) - len(tasks)} of {len(folders)} tasks are invalid", *lines]))
    return tasks


def _load(folder: Path) -> FolderTask | list[_Mistake]:
    """Returns the task in a folder, or all mistakes in the folder."""
    check = _Checks()
    check(_check_names, folder)
    description = check(_parsed, TaskDescription, folder, "task.toml", 'write it, with a line such as outputs = ["answer.txt"]')
    instruction = check(_instruction, folder)
    tests, gold = check(_tree, folder, "tests"), check(_gold, folder)
    runs = check(_runs, folder, tests) if tests is not None else None
    files = check(_given_files, folder)
    image = check(_image, folder, description) if description is not None else None
    mode = (description.verifier.mode or _mode(tests)) if description is not None and tests is not None else None
    if description is not None and mode is not None and mode != "harbor":
        check(_outputs, description)
    grading = None
    if description is not None and tests is not None and runs is not None:
        grading = check(_grading, description, mode or _mode(tests), tests, runs, gold or "")
    if description is not None and grading is not None and image is not None and gold is not None and mode == "harbor":
        check(_fits_harbor, folder, description, grading, _from_dockerfile(folder, image))
    if check.mistakes:
        return check.mistakes
    assert description is not None and instruction is not None and files is not None and image is not None and grading is not None
    return FolderTask(
        name=folder.name,
        description=description,
        image=image,
        instruction=instruction,
        files=files if mode != "harbor" else {},
        grading=grading,
        context=_digest(image) if _from_dockerfile(folder, image) else "",
    )


def _check_names(folder: Path) -> None:
    """Raises `_Mistake` if the name of the folder or of an entry is invalid."""
    if not is_plain_path(folder.name):
        raise _Mistake(repr(folder.name), "is not a valid name", "rename the folder")
    unknown = [
        p.name for p in sorted(folder.iterdir()) if p.name not in _PARTS and not p.name.startswith((".", "LICENSE")) and p.suffix != ".md"
    ]
    if unknown:
        problem = "does not belong to a task" if len(unknown) == 1 else "do not belong to a task"
        raise _Mistake(", ".join(unknown), problem, f"a task folder contains {', '.join(sorted(_PARTS))}")


def _instruction(folder: Path) -> str:
    instruction = _text(folder, "instruction.md", "write the prompt of the agent").strip()
    if not instruction:
        raise _Mistake("instruction.md", "is empty", "write the prompt of the agent")
    return instruction


def _outputs(description: TaskDescription) -> None:
    if description.outputs is None:
        raise _Mistake("task.toml", "outputs: is missing", 'write a line such as outputs = ["answer.txt"]')


def _from_dockerfile(folder: Path, image: Path) -> bool:
    return image == folder / "environment" and not (image / "image.toml").is_file()


def _given_files(folder: Path) -> dict[str, bytes]:
    return _tree(folder, "environment/files") if (folder / "environment" / "files").exists() else {}


def _digest(folder: Path) -> str:
    """Returns the hash of the image's build context. The hash is part of the task's identity."""
    digest = hashlib.sha256()
    for path in _walk(folder):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode("utf-8", "surrogateescape"))
        digest.update(hashlib.sha256(os.readlink(path).encode() if path.is_symlink() else path.read_bytes()).digest())
    return digest.hexdigest()


def _fits_harbor(folder: Path, description: TaskDescription, grading: Grading, from_dockerfile: bool) -> None:
    """Raises `_Mistake` if the scripts of a Harbor folder cannot work in a sandbox."""
    if not from_dockerfile:
        fix = "write environment/Dockerfile, such as FROM python:3.11-slim and WORKDIR /app"
        raise _Mistake("tests/test.sh", "writes a reward to /logs/verifier, which exists only in images from a Dockerfile", fix)
    solution = _tree(folder, "solution")
    for where, script in (("tests/test.sh", grading.files()["test.sh"]), ("solution/solve.sh", solution.get("solve.sh", b""))):
        if wrong := harbor.script_problem(script.decode("utf-8", "replace"), network=bool(description.environment.network)):
            fix = "install its dependencies in environment/Dockerfile"
            hosts = ', or allow hosts in task.toml: environment.network = ["pypi.org:443"]' if "downloads" in wrong else ""
            raise _Mistake(where, wrong, fix + hosts)


def _image(folder: Path, description: TaskDescription) -> Path:
    """Returns the folder that contains the image's `image.toml` or `Dockerfile`: the task's folder `environment` or, if it has neither, the
    family's folder."""
    environment = folder / "environment"
    own = [name for name in _IMAGES if (environment / name).is_file()]
    if len(own) == 2:
        raise _Mistake("environment", "contains an image.toml and a Dockerfile", "keep one of them")
    if (environment / "docker-compose.yaml").is_file():
        raise _Mistake("environment/docker-compose.yaml", "needs several containers, but a sandbox is one container", "remove the task")
    if not own and (name := description.environment.docker_image):
        raise _Mistake("task.toml", f"environment.docker_image = {name!r} has no Dockerfile", f"write environment/Dockerfile: FROM {name}")
    if environment.is_dir() and "Dockerfile" not in own:
        known = {"image.toml", "files"}
        for path in sorted(environment.iterdir()):
            if path.name not in known:
                raise _Mistake(f"environment/{path.name}", "is not used", "move files for the working directory to environment/files")
    if own:
        return environment
    if (folder.parent / "image.toml").is_file():  # a Dockerfile's build context would contain the tests of all tasks
        return folder.parent
    raise _Mistake(
        "environment", "has no image", f"write environment/image.toml, environment/Dockerfile, or one image.toml in {folder.parent.name}/"
    )


def _runs(folder: Path, tests: Mapping[str, bytes]) -> tuple[GradingRun, ...]:
    return _parsed(RunsFile, folder, "tests/runs.toml", "write [[run]] with name, and argv or call").run if "runs.toml" in tests else ()


def _grading(description: TaskDescription, mode: Mode, tests: Mapping[str, bytes], runs: tuple[GradingRun, ...], gold: str) -> Grading:
    tests = {name: data for name, data in tests.items() if name != "runs.toml"}
    if mode == "shell" and _writes_a_reward(tests):
        raise _Mistake("tests", "write a reward to /logs/verifier, which mode shell ignores", 'set verifier.mode = "harbor"')
    if mode == "judge":
        _runs_name_outputs(runs, description)
    try:
        return Grading(mode=mode, tests=encode_files(tests), runs=runs, timeout_s=description.verifier.timeout_sec, gold=gold)
    except ValidationError as error:
        problem = "; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())
        fix = "judge and pytest need tests/test_*.py with functions test_*; shell and harbor need tests/test.sh; only judge uses runs.toml"
        raise _Mistake("tests", problem, fix) from None


def _mode(tests: Mapping[str, bytes]) -> Mode:
    if "test.sh" not in tests:
        return "judge"
    return "harbor" if _writes_a_reward(tests) else "shell"


def _writes_a_reward(tests: Mapping[str, bytes]) -> bool:
    return any(harbor.REWARD_FOLDER in data for data in tests.values())


def _runs_name_outputs(runs: tuple[GradingRun, ...], description: TaskDescription) -> None:
    """Raises `_Mistake` if a run overwrites a declared output, because the tests would then grade their own file."""
    for run in runs:
        for path in run.files:
            if any(is_exact(pattern) and pattern == path for pattern in description.outputs or ()):
                raise _Mistake("tests/runs.toml", f"run {run.name!r}: files.{path} overwrites a declared output", "rename the input")


def _gold(folder: Path) -> str:
    files = _tree(folder, "solution")
    entries = [name for name in ("solve.sh", "solve.py") if name in files]
    if len(entries) != 1:
        raise _Mistake(
            "solution",
            f"contains {len(entries)} of solve.sh and solve.py",
            "write exactly one of them; it must solve the task when it runs in the working directory",
        )
    program = "bash" if entries[0].endswith(".sh") else "python3"
    return _GOLD.format(files=encode_files(files), argv=[program, f"/tmp/solution/{entries[0]}"])


def _parsed(kind: type[M], folder: Path, path: str, fix: str) -> M:
    try:
        return parse_toml(kind, _text(folder, path, fix))
    except ValueError as error:
        raise _Mistake(path, str(error).replace("\n", f"\n    {path}: "), "correct the keys above") from None


def _text(folder: Path, path: str, fix: str) -> str:
    try:
        return (folder / path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _Mistake(path, "is missing", fix) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _Mistake(path, f"cannot be read as text: {error}", fix) from None


def _tree(folder: Path, name: str) -> dict[str, bytes]:
    """Returns relative path -> content for every file in a folder of the task. Raises `_Mistake` if the folder is missing, is too large, or
    contains links or devices."""
    top = folder / name
    if not top.is_dir():
        raise _Mistake(name, "is missing", f"create the folder {name}/")
    files: dict[str, bytes] = {}
    size = 0
    for path in _walk(top):
        where = path.relative_to(top).as_posix()
        if not stat.S_ISREG(path.lstat().st_mode):
            raise _Mistake(f"{name}/{where}", "is not a regular file", "replace it with a copy; links and devices are not allowed")
        if not is_plain_path(where):
            raise _Mistake(f"{name}/{where!r}", "has an invalid name", "rename it")
        size += path.stat().st_size
        if size > MAX_BYTES or len(files) == MAX_FILES:
            raise _Mistake(name, f"contains more than {MAX_BYTES >> 20} MiB or {MAX_FILES} files", "put large data into the image")
        files[where] = path.read_bytes()
    return files


def _walk(top: Path) -> Iterator[Path]:
    for path in sorted(top.iterdir()):
        if path.is_dir() and not path.is_symlink():
            if path.name != "__pycache__":
                yield from _walk(path)
        else:
            yield path


def _split_texts(files: Mapping[str, bytes]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns two mappings: path -> text for the UTF-8 files, and path -> base64 for all other files."""
    texts: dict[str, str] = {}
    binaries: dict[str, bytes] = {}
    for path, data in files.items():
        try:
            texts[path] = data.decode()
        except UnicodeDecodeError:
            binaries[path] = data
    return texts, encode_files(binaries)
