"""A family of task folders, as users of Harbor and terminal-bench know them.

    FAMILY/
        image.toml              the image of tasks that have none of their own
        TASK/
            task.toml           limits, outputs, mode of grading (agentrl.task.description)
            instruction.md      what the agent is told
            environment/        image.toml or Dockerfile; files/ is copied to the working directory
            tests/              hidden: test_*.py with runs.toml, or test.sh (in Harbor's way: one that leaves a reward)
            solution/           hidden: solve.sh or solve.py, the gold solution

Everything is read and checked when the family is opened; every mistake in it is told at once, with task, file, field and fix.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from agentrl.errors import TaskError, UserError
from agentrl.fields import text
from agentrl.grading import KEY, Grading, Mode, Run, pack
from agentrl.outputs import WHOLE, is_exact, plain_path
from agentrl.records import Message, Split, Task
from agentrl.task import harbor
from agentrl.task.description import Description, M, Runs, parse

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
    """Something wrong with one file of a task."""

    def __init__(self, where: str, what: str, fix: str) -> None:
        super().__init__(what)
        self.where, self.what, self.fix = where, what, fix


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTask:
    """One task as its folder says it; its split is still to be drawn where the folder does not name one."""

    name: str
    description: Description
    image: Path
    instruction: str
    files: Mapping[str, bytes]
    grading: Grading
    context: str
    """Hash of what a Dockerfile may take into the image; empty where there is none."""

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.description.outputs or (WHOLE,)

    @property
    def tools(self) -> tuple[str, ...]:
        said = "tools" in self.description.model_fields_set or self.grading.mode != "harbor"
        return self.description.tools if said else HARBOR_TOOLS


class TaskFolders:
    """The family in a folder; see `agentrl.protocols.TaskFamily`. Train and held-out tasks are different folders.

    `root` is what images are named relative to. `heldout` is the share of the tasks without a `split` of their own that the
    seed holds out, of two or more at least one and never all. Raises `TaskError` that lists every mistake.
    """

    def __init__(self, folder: Path, *, root: Path, seed: int = 0, heldout: float = 0.25) -> None:
        if not 0 <= heldout < 1:
            raise UserError(f"heldout must be at least 0 and below 1, got {heldout}", fix="set tasks.options.heldout=0.25")
        self.folder = folder.resolve()
        self.name = self.folder.name
        self._root = root.resolve()
        tasks = _load_all(self.folder)
        self._splits = _draw(tasks, seed=seed, heldout=heldout)

    def size(self, split: Split) -> int | None:
        return len(self._splits[split])

    def task(self, split: Split, index: int) -> Task:
        """Raises `UserError` for an index outside the split."""
        if not 0 <= index < len(self._splits[split]):
            raise UserError(f"{self.name} has {len(self._splits[split])} tasks in split {split}, so none has number {index}")
        one = self._splits[split][index]
        texts, binaries = _texts(one.files)
        return Task(
            id=f"{self.name}/{one.name}",
            family=self.name,
            prompt=(Message(role="user", content=one.instruction),),
            tools=one.tools,
            sandbox=one.description.sandbox(self._image(one.image)),
            verifiers=(VERIFIER,),
            data={
                "kind": str(one.description.metadata.get("category", self.name)),
                "build_timeout_s": one.description.environment.build_timeout_sec,
                KEY: one.grading.model_dump(mode="json"),
                **({"build_context": one.context} if one.context else {}),
            },
            split=split,
            files=texts,
            binary_files=binaries,
            outputs=one.outputs,
            limits=one.description.limits(),
        )

    def gold(self, task: Task) -> str:
        """Python source that does what solution/ does; it leaves the right outputs in the working directory."""
        return str(task.data[KEY]["gold"])

    def _image(self, folder: Path) -> str:
        return str(folder.relative_to(self._root)) if folder.is_relative_to(self._root) else str(folder)


def _draw(tasks: list[FolderTask], *, seed: int, heldout: float) -> dict[Split, list[FolderTask]]:
    """Tasks of each split, by name. Those without a split are ordered by a seeded hash and the first of them held out."""
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
        raise UserError(f"no folder {folder}", fix="give the folder of a task family, such as sandboxes/chores")
    found = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "_")))
    if not found:
        raise TaskError(
            f"{folder} holds no task folders",
            fix="write NAME/task.toml, NAME/instruction.md and NAME/tests/ for each task",
        )
    tasks, mistakes = [], []
    for path in found:
        try:
            tasks.append(_load(path))
        except _Mistake as error:
            mistakes.append((text(path.name), error))
    if mistakes:
        lines = [f"task {name}: {error.where}: {error.what}\n  fix: {error.fix}" for name, error in mistakes]
        raise TaskError("\n".join([f"{folder.name}: {len(mistakes)} of {len(found)} tasks cannot be read", *lines]))
    return tasks


def _load(folder: Path) -> FolderTask:
    if not plain_path(folder.name):
        raise _Mistake(repr(folder.name), "is a name that is not UTF-8 and cannot be written down", "rename the folder")
    for path in sorted(folder.iterdir()):
        if path.name not in _PARTS and not path.name.startswith((".", "LICENSE")) and path.suffix != ".md":
            raise _Mistake(path.name, "is no part of a task", f"a task folder holds {', '.join(sorted(_PARTS))}")
    description = _parsed(Description, folder, "task.toml", 'write it, with a line such as outputs = ["answer.txt"]')
    instruction = _text(folder, "instruction.md", "write what the agent is to do").strip()
    if not instruction:
        raise _Mistake("instruction.md", "is empty", "write what the agent is to do")
    image = _image(folder, description)
    grading = _grading(folder, description)
    from_dockerfile = image == folder / "environment" and not (image / "image.toml").is_file()
    if grading.mode == "harbor":
        _fits_harbor(folder, description, grading, from_dockerfile)
    elif description.outputs is None:
        raise _Mistake("task.toml", "outputs: is missing", 'write a line such as outputs = ["answer.txt"]')
    return FolderTask(
        name=folder.name,
        description=description,
        image=image,
        instruction=instruction,
        files=_given(folder) if grading.mode != "harbor" else {},
        grading=grading,
        context=_digest(image) if from_dockerfile else "",
    )


def _given(folder: Path) -> dict[str, bytes]:
    return _tree(folder, "environment/files") if (folder / "environment" / "files").exists() else {}


def _digest(folder: Path) -> str:
    """Says when what an image is built from changes: its files are a part of what the task is."""
    digest = hashlib.sha256()
    for path in _walk(folder):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode("utf-8", "surrogateescape"))
        digest.update(hashlib.sha256(os.readlink(path).encode() if path.is_symlink() else path.read_bytes()).digest())
    return digest.hexdigest()


def _fits_harbor(folder: Path, description: Description, grading: Grading, from_dockerfile: bool) -> None:
    """Says what keeps the scripts of a Harbor folder from working in a sandbox."""
    if not from_dockerfile:
        fix = "write environment/Dockerfile, such as FROM python:3.11-slim and WORKDIR /app"
        raise _Mistake("tests/test.sh", "leaves a reward in /logs/verifier, a place that only images from a Dockerfile have", fix)
    solution = _tree(folder, "solution")
    for where, script in (("tests/test.sh", grading.files()["test.sh"]), ("solution/solve.sh", solution.get("solve.sh", b""))):
        if wrong := harbor.fetches(script.decode("utf-8", "replace"), network=bool(description.environment.network)):
            fix = "install what it needs in environment/Dockerfile"
            hosts = ', or name hosts in task.toml: environment.network = ["pypi.org:443"]' if "downloads" in wrong else ""
            raise _Mistake(where, wrong, fix + hosts)


def _image(folder: Path, description: Description) -> Path:
    """The folder that holds the image's recipe: the task's own or the family's."""
    environment = folder / "environment"
    own = [name for name in _IMAGES if (environment / name).is_file()]
    if len(own) == 2:
        raise _Mistake("environment", "holds an image.toml and a Dockerfile", "keep one of them")
    if (environment / "docker-compose.yaml").is_file():
        raise _Mistake("environment/docker-compose.yaml", "asks for several containers, and a sandbox is one", "leave the task out")
    if not own and (name := description.environment.docker_image):
        raise _Mistake("task.toml", f"environment.docker_image = {name!r} has no Dockerfile", f"write environment/Dockerfile: FROM {name}")
    if environment.is_dir() and "Dockerfile" not in own:
        known = {"image.toml", "files"}
        for path in sorted(environment.iterdir()):
            if path.name not in known:
                raise _Mistake(f"environment/{path.name}", "is not used", "files for the working directory lie in environment/files")
    if own:
        return environment
    if (folder.parent / "image.toml").is_file():  # no Dockerfile here: its context would hold every task's tests
        return folder.parent
    raise _Mistake(
        "environment", "has no image", f"write environment/image.toml, environment/Dockerfile, or one image.toml in {folder.parent.name}/"
    )


def _grading(folder: Path, description: Description) -> Grading:
    tests = _tree(folder, "tests")
    runs: tuple[Run, ...] = ()
    if "runs.toml" in tests:
        runs = _parsed(Runs, folder, "tests/runs.toml", "write [[run]] with name, and argv or call").run
        del tests["runs.toml"]
    mode: Mode = description.verifier.mode or _mode(tests)
    if mode == "shell" and _leaves_a_reward(tests):
        raise _Mistake("tests", "leave their verdict in /logs/verifier, which mode shell does not read", 'write verifier.mode = "harbor"')
    if mode == "judge":
        _runs_name_outputs(runs, description)
    try:
        return Grading(mode=mode, tests=pack(tests), runs=runs, timeout_s=description.verifier.timeout_sec, gold=_gold(folder))
    except ValidationError as error:
        problem = "; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())
        fix = "judge and pytest need tests/test_*.py with functions test_*, shell and harbor tests/test.sh; only judge has runs.toml"
        raise _Mistake("tests", problem, fix) from None


def _mode(tests: Mapping[str, bytes]) -> Mode:
    if "test.sh" not in tests:
        return "judge"
    return "harbor" if _leaves_a_reward(tests) else "shell"


def _leaves_a_reward(tests: Mapping[str, bytes]) -> bool:
    return any(harbor.VERDICT in data for data in tests.values())


def _runs_name_outputs(runs: tuple[Run, ...], description: Description) -> None:
    """A run that overwrites a declared output would judge the tests' own file."""
    for run in runs:
        for path in run.files:
            if any(is_exact(pattern) and pattern == path for pattern in description.outputs or ()):
                raise _Mistake(
                    "tests/runs.toml", f"run {run.name!r}: files.{path} overwrites a declared output", "give the input another name"
                )


def _gold(folder: Path) -> str:
    files = _tree(folder, "solution")
    entries = [name for name in ("solve.sh", "solve.py") if name in files]
    if len(entries) != 1:
        raise _Mistake(
            "solution", f"holds {len(entries)} of solve.sh and solve.py", "write one: run in the working directory, it does the task"
        )
    program = "bash" if entries[0].endswith(".sh") else "python3"
    return _GOLD.format(files=pack(files), argv=[program, f"/tmp/solution/{entries[0]}"])


def _parsed(kind: type[M], folder: Path, path: str, fix: str) -> M:
    try:
        return parse(kind, _text(folder, path, fix))
    except ValueError as error:
        raise _Mistake(path, str(error).replace("\n", f"\n    {path}: "), "change what is named above") from None


def _text(folder: Path, path: str, fix: str) -> str:
    try:
        return (folder / path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _Mistake(path, "is missing", fix) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _Mistake(path, f"cannot be read as text: {error}", fix) from None


def _tree(folder: Path, name: str) -> dict[str, bytes]:
    """Relative path -> content of every file below a part of the task. Only regular files and folders may be there."""
    top = folder / name
    if not top.is_dir():
        raise _Mistake(name, "is missing", f"make the folder {name}/")
    files: dict[str, bytes] = {}
    size = 0
    for path in _walk(top):
        where = path.relative_to(top).as_posix()
        if not stat.S_ISREG(path.lstat().st_mode):
            raise _Mistake(f"{name}/{where}", "is not a regular file", "put a copy there; links and devices are not taken")
        if not plain_path(where):
            raise _Mistake(f"{name}/{where!r}", "has a name that cannot be used in a sandbox", "rename it")
        size += path.stat().st_size
        if size > MAX_BYTES or len(files) == MAX_FILES:
            raise _Mistake(name, f"holds more than {MAX_BYTES >> 20} MiB or {MAX_FILES} files", "put large data into the image")
        files[where] = path.read_bytes()
    return files


def _walk(top: Path) -> Iterator[Path]:
    for path in sorted(top.iterdir()):
        if path.is_dir() and not path.is_symlink():
            if path.name != "__pycache__":
                yield from _walk(path)
        else:
            yield path


def _texts(files: Mapping[str, bytes]) -> tuple[dict[str, str], dict[str, str]]:
    """Files that are text, and the others as base64."""
    texts: dict[str, str] = {}
    binaries: dict[str, bytes] = {}
    for path, data in files.items():
        try:
            texts[path] = data.decode()
        except UnicodeDecodeError:
            binaries[path] = data
    return texts, pack(binaries)
