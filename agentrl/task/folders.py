"""A family of task folders, like those of Harbor and terminal-bench.

    FAMILY/
        image.toml              the image of tasks without their own
        TASK/
            task.toml           limits, outputs, mode of grading (agentrl.task.description)
            instruction.md      what the agent is told
            environment/        image.toml or Dockerfile; files/ is copied to the working directory
            tests/              hidden: test_*.py with runs.toml, or test.sh (as in Harbor: one that writes a reward)
            solution/           hidden: solve.sh or solve.py, the gold solution

Everything is read and checked when the family is opened; all mistakes are reported at once, with task, file, field and fix.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Something wrong with one file of a task."""

    def __init__(self, where: str, what: str, fix: str) -> None:
        super().__init__(what)
        self.where, self.what, self.fix = where, what, fix


class _Mistakes(Exception):
    """All that is wrong with a task."""

    def __init__(self, several: Sequence[_Mistake]) -> None:
        super().__init__("; ".join(map(str, several)))
        self.several = tuple(several)


class _Look:
    """Looks at the parts of a task one by one, and goes on after a mistake; of what needs a part that has one, nothing is said."""

    def __init__(self) -> None:
        self.mistakes: list[_Mistake] = []

    def __call__(self, at: Callable[P, T], /, *args: P.args, **more: P.kwargs) -> T | None:
        try:
            return at(*args, **more)
        except _Mistake as error:
            self.mistakes.append(error)
            return None

    def end(self) -> None:
        if self.mistakes:
            raise _Mistakes(self.mistakes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTask:
    """One task from its folder; its split is drawn later if the folder does not name one."""

    name: str
    description: TaskDescription
    image: Path
    instruction: str
    files: Mapping[str, bytes]
    grading: Grading
    context: str
    """Hash of the Dockerfile's build context; empty without a Dockerfile."""

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.description.outputs or (WHOLE_DIRECTORY,)

    @property
    def tools(self) -> tuple[str, ...]:
        named = "tools" in self.description.model_fields_set or self.grading.mode != "harbor"
        return self.description.tools if named else HARBOR_TOOLS


class TaskFolders:
    """The family in a folder; see `agentrl.protocols.TaskFamily`. Train and held-out tasks are different folders.

    Images are named relative to `root`. `heldout` is the share of the tasks without a `split` that the seed holds out: of two or
    more tasks at least one and never all. Raises `TaskError` that lists every mistake.
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
                GRADING_KEY: one.grading.model_dump(mode="json"),
                **({"build_context": one.context} if one.context else {}),
            },
            split=split,
            files=texts,
            binary_files=binaries,
            outputs=one.outputs,
            limits=one.description.limits(),
        )

    def gold(self, task: Task) -> str:
        """Python source that runs solution/; it leaves the right outputs in the working directory."""
        return str(task.data[GRADING_KEY]["gold"])

    def _image(self, folder: Path) -> str:
        return str(folder.relative_to(self._root)) if folder.is_relative_to(self._root) else str(folder)


def _draw(tasks: list[FolderTask], *, seed: int, heldout: float) -> dict[Split, list[FolderTask]]:
    """Tasks of each split, by name. Those without a split are ordered by a seeded hash, and the first ones are held out."""
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
    folders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "_")))
    if not folders:
        raise TaskError(
            f"{folder} holds no task folders",
            fix="write NAME/task.toml, NAME/instruction.md and NAME/tests/ for each task",
        )
    tasks: list[FolderTask] = []
    lines: list[str] = []
    for path in folders:
        try:
            tasks.append(_load(path))
        except _Mistakes as error:
            lines += [f"task {text(path.name)}: {one.where}: {one.what}\n  fix: {one.fix}" for one in error.several]
    if lines:
        raise TaskError("\n".join([f"{folder.name}: {len(folders) - len(tasks)} of {len(folders)} tasks cannot be read", *lines]))
    return tasks


def _load(folder: Path) -> FolderTask:
    """Raises `_Mistakes`."""
    look = _Look()
    look(_named, folder)
    description = look(_parsed, TaskDescription, folder, "task.toml", 'write it, with a line such as outputs = ["answer.txt"]')
    instruction = look(_instruction, folder)
    tests, gold = look(_tree, folder, "tests"), look(_gold, folder)
    runs = look(_runs, folder, tests) if tests is not None else None
    files = look(_given, folder)
    image = look(_image, folder, description) if description is not None else None
    mode = (description.verifier.mode or _mode(tests)) if description is not None and tests is not None else None
    if description is not None and mode is not None and mode != "harbor":
        look(_outputs, description)
    grading = None
    if description is not None and tests is not None and runs is not None:
        grading = look(_grading, description, mode or _mode(tests), tests, runs, gold or "")
    if description is not None and grading is not None and image is not None and gold is not None and mode == "harbor":
        look(_fits_harbor, folder, description, grading, _from_dockerfile(folder, image))
    look.end()
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


def _named(folder: Path) -> None:
    """The names in it, its own included."""
    if not is_plain_path(folder.name):
        raise _Mistake(repr(folder.name), "is a name that is not UTF-8 and cannot be written down", "rename the folder")
    odd = [
        p.name for p in sorted(folder.iterdir()) if p.name not in _PARTS and not p.name.startswith((".", "LICENSE")) and p.suffix != ".md"
    ]
    if odd:
        what = "is no part of a task" if len(odd) == 1 else "are no parts of a task"
        raise _Mistake(", ".join(odd), what, f"a task folder holds {', '.join(sorted(_PARTS))}")


def _instruction(folder: Path) -> str:
    found = _text(folder, "instruction.md", "write what the agent is to do").strip()
    if not found:
        raise _Mistake("instruction.md", "is empty", "write what the agent is to do")
    return found


def _outputs(description: TaskDescription) -> None:
    if description.outputs is None:
        raise _Mistake("task.toml", "outputs: is missing", 'write a line such as outputs = ["answer.txt"]')


def _from_dockerfile(folder: Path, image: Path) -> bool:
    return image == folder / "environment" and not (image / "image.toml").is_file()


def _given(folder: Path) -> dict[str, bytes]:
    return _tree(folder, "environment/files") if (folder / "environment" / "files").exists() else {}


def _digest(folder: Path) -> str:
    """Hash of the files that an image is built from; they are part of the task's identity."""
    digest = hashlib.sha256()
    for path in _walk(folder):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode("utf-8", "surrogateescape"))
        digest.update(hashlib.sha256(os.readlink(path).encode() if path.is_symlink() else path.read_bytes()).digest())
    return digest.hexdigest()


def _fits_harbor(folder: Path, description: TaskDescription, grading: Grading, from_dockerfile: bool) -> None:
    """Raises `_Mistake` for a Harbor folder whose scripts cannot work in a sandbox."""
    if not from_dockerfile:
        fix = "write environment/Dockerfile, such as FROM python:3.11-slim and WORKDIR /app"
        raise _Mistake("tests/test.sh", "writes a reward to /logs/verifier, a folder that only images from a Dockerfile have", fix)
    solution = _tree(folder, "solution")
    for where, script in (("tests/test.sh", grading.files()["test.sh"]), ("solution/solve.sh", solution.get("solve.sh", b""))):
        if wrong := harbor.script_problem(script.decode("utf-8", "replace"), network=bool(description.environment.network)):
            fix = "install what it needs in environment/Dockerfile"
            hosts = ', or name hosts in task.toml: environment.network = ["pypi.org:443"]' if "downloads" in wrong else ""
            raise _Mistake(where, wrong, fix + hosts)


def _image(folder: Path, description: TaskDescription) -> Path:
    """The folder with the image's recipe: the task's or the family's."""
    environment = folder / "environment"
    own = [name for name in _IMAGES if (environment / name).is_file()]
    if len(own) == 2:
        raise _Mistake("environment", "holds an image.toml and a Dockerfile", "keep one of them")
    if (environment / "docker-compose.yaml").is_file():
        raise _Mistake("environment/docker-compose.yaml", "asks for several containers, but a sandbox is one", "leave the task out")
    if not own and (name := description.environment.docker_image):
        raise _Mistake("task.toml", f"environment.docker_image = {name!r} has no Dockerfile", f"write environment/Dockerfile: FROM {name}")
    if environment.is_dir() and "Dockerfile" not in own:
        known = {"image.toml", "files"}
        for path in sorted(environment.iterdir()):
            if path.name not in known:
                raise _Mistake(f"environment/{path.name}", "is not used", "put files for the working directory into environment/files")
    if own:
        return environment
    if (folder.parent / "image.toml").is_file():  # no Dockerfile here: its context would hold every task's tests
        return folder.parent
    raise _Mistake(
        "environment", "has no image", f"write environment/image.toml, environment/Dockerfile, or one image.toml in {folder.parent.name}/"
    )


def _runs(folder: Path, tests: Mapping[str, bytes]) -> tuple[GradingRun, ...]:
    return _parsed(RunsFile, folder, "tests/runs.toml", "write [[run]] with name, and argv or call").run if "runs.toml" in tests else ()


def _grading(description: TaskDescription, mode: Mode, tests: Mapping[str, bytes], runs: tuple[GradingRun, ...], gold: str) -> Grading:
    tests = {name: data for name, data in tests.items() if name != "runs.toml"}
    if mode == "shell" and _writes_a_reward(tests):
        raise _Mistake("tests", "leave their verdict in /logs/verifier, which mode shell does not read", 'write verifier.mode = "harbor"')
    if mode == "judge":
        _runs_name_outputs(runs, description)
    try:
        return Grading(mode=mode, tests=encode_files(tests), runs=runs, timeout_s=description.verifier.timeout_sec, gold=gold)
    except ValidationError as error:
        problem = "; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())
        fix = "judge and pytest need tests/test_*.py with functions test_*, shell and harbor tests/test.sh; only judge has runs.toml"
        raise _Mistake("tests", problem, fix) from None


def _mode(tests: Mapping[str, bytes]) -> Mode:
    if "test.sh" not in tests:
        return "judge"
    return "harbor" if _writes_a_reward(tests) else "shell"


def _writes_a_reward(tests: Mapping[str, bytes]) -> bool:
    return any(harbor.REWARD_FOLDER in data for data in tests.values())


def _runs_name_outputs(runs: tuple[GradingRun, ...], description: TaskDescription) -> None:
    """Refuses a run that overwrites a declared output, since the tests would judge their own file."""
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
    return _GOLD.format(files=encode_files(files), argv=[program, f"/tmp/solution/{entries[0]}"])


def _parsed(kind: type[M], folder: Path, path: str, fix: str) -> M:
    try:
        return parse_toml(kind, _text(folder, path, fix))
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
    """Relative path -> content of every file in a folder of the task, which may hold only regular files and folders."""
    top = folder / name
    if not top.is_dir():
        raise _Mistake(name, "is missing", f"make the folder {name}/")
    files: dict[str, bytes] = {}
    size = 0
    for path in _walk(top):
        where = path.relative_to(top).as_posix()
        if not stat.S_ISREG(path.lstat().st_mode):
            raise _Mistake(f"{name}/{where}", "is not a regular file", "replace it by a copy; links and devices are refused")
        if not is_plain_path(where):
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
    """The files that are text, and the others as base64."""
    texts: dict[str, str] = {}
    binaries: dict[str, bytes] = {}
    for path, data in files.items():
        try:
            texts[path] = data.decode()
        except UnicodeDecodeError:
            binaries[path] = data
    return texts, encode_files(binaries)
