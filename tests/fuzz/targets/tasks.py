"""A task folder with one file replaced: the family opens, or every mistake is reported as a `UserError`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from agentrl.errors import UserError
from agentrl.records import Split
from agentrl.sandbox.builds import dockerfile_steps
from agentrl.sandbox.images import load_image
from agentrl.task import TaskFolders
from agentrl.task.description import RunsFile, TaskDescription, parse_toml
from agentrl.task.grading import Grading, encode_files, grading_of
from agentrl.task.harbor import script_problem
from tests.fuzz import mutators
from tests.fuzz.mutators import join, split
from tests.fuzz.target import Check, Target, must, one_in

_TEST = """def test_sum(outputs, runs):
    assert outputs.text("sum.txt") == "4" and runs["small"].stdout == "4"
"""
_RUNS = """[[run]]
name = "small"
argv = ["python3", "sum.py", "--top"]
stdin = "1 3"
timeout_sec = 5.0
reads = ["out.txt"]
files = { "in.txt" = "data.txt" }

[[run]]
name = "call"
call = "sum.py:add"
args = [1, [2, 3]]
kwargs = { top = 3 }
fresh = true
"""
_JUDGED = """version = "1.0"
outputs = ["sum.txt", "src/**"]
tools = ["python", "submit"]
split = "train"
[metadata]
category = "arithmetic"
[agent]
timeout_sec = 60.0
turns = 4
[environment]
memory_mb = 128
storage_mb = 16
network = ["pypi.org:443"]
cpus = 0.5
[verifier]
mode = "judge"
timeout_sec = 30.0
"""
_HARBOR = """schema_version = "1.1"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 900.0
[environment]
build_timeout_sec = 600.0
memory = "2G"
storage = "512MiB"
cpus = 1
allow_internet = false
[verifier]
timeout_sec = 900.0
[verifier.env]
[solution.env]
"""
_DOCKERFILE = """# escape=\\
FROM debian:bookworm AS base
RUN apt-get update && \\
    apt-get install -y python3
# a comment
COPY . /app
WORKDIR /app
ENV A=1 B="two words"
"""
FAMILIES: Mapping[str, Mapping[str, str]] = {
    "judged": {
        "image.toml": 'suite = "bookworm"\npackages = ["python3", "jq"]\npull = "python:3.11-slim"\n',
        "one/task.toml": _JUDGED,
        "one/instruction.md": "Add the numbers.\n",
        "one/environment/files/numbers.txt": "1 3\n",
        "one/tests/runs.toml": _RUNS,
        "one/tests/test_sum.py": _TEST,
        "one/tests/data.txt": "1 3\n",
        "one/solution/solve.py": "open('sum.txt', 'w').write('4')\n",
    },
    "harbor": {
        "one/task.toml": _HARBOR,
        "one/instruction.md": "Add the numbers.\n",
        "one/environment/Dockerfile": _DOCKERFILE,
        "one/environment/.dockerignore": "*.log\n!keep.log\n**/x\n# comment\n[a-z]?\n",
        "one/tests/test.sh": "#!/bin/bash\npython3 -m pytest /tests && echo 1 > /logs/verifier/reward.txt\n",
        "one/solution/solve.sh": "#!/bin/bash\necho 4 > sum.txt\n",
    },
}
"""Family -> path -> text. An input's first line is the family and the path, the rest is the file's new content."""

WHOLE_EVERY = 8
"""One of this many inputs is also read as part of its folder."""
KINDS: Mapping[str, type[BaseModel]] = {"task.toml": TaskDescription, "runs.toml": RunsFile}
_MUTATORS = {
    f"{family}/{path}": mutators.toml if path.endswith(".toml") else mutators.lines for family, files in FAMILIES.items() for path in files
}


def prepare(scratch: Path) -> Check:
    for family, files in FAMILIES.items():
        for path, text in files.items():
            (scratch / family / path).parent.mkdir(parents=True, exist_ok=True)
            (scratch / family / path).write_text(text)

    def check(data: bytes) -> None:
        label, body = split(data)
        family, _, path = label.partition("/")
        text = FAMILIES.get(family, {}).get(path)
        if text is None:
            return
        _alone(path.rpartition("/")[2], body.decode("utf-8", "replace"))
        if not one_in(WHOLE_EVERY, body) and not path.endswith("image.toml"):
            return
        (scratch / label).write_bytes(body)
        try:
            _open(scratch / family, scratch)
        except UserError as error:
            must(bool(error.message.strip()), "an error without a message")
        finally:
            (scratch / label).write_text(text)

    return check


def _alone(name: str, text: str) -> None:
    """The reader of a file of this name; reading the whole folder takes ten times as long."""
    try:
        if name in KINDS:
            parse_toml(KINDS[name], text)
        elif name == "Dockerfile":
            steps = dockerfile_steps(text)
            must([number for number, _ in steps] == sorted({number for number, _ in steps}), "steps of a Dockerfile out of order")
        elif name.endswith(".py"):
            Grading(mode="judge", tests=encode_files({"test_a.py": text.encode()}))
        elif name.endswith(".sh"):
            must(len(script_problem(text, network=False)) < 300, "a message that is too long")
    except ValueError as error:
        must(bool(str(error)), "an error without a message")


def _open(family: Path, root: Path) -> None:
    folders = TaskFolders(family, root=root)
    tasks = [folders.task(split, index) for split in Split for index in range(folders.size(split) or 0)]
    must(len(tasks) == 1, "a task is missing")
    for task in tasks:
        must(len(task.key) == 64 and bool(grading_of(task).test_names()), "a task without tests")
        must(bool(folders.gold(task)) and task.contents() is not None, "a task without a solution")
        image = load_image(root / task.sandbox.image, cache=root / "cache")
        must(image.tag.isascii(), "an image tag that is not ASCII")


def seeds() -> Sequence[bytes]:
    return [join(f"{family}/{path}", text.encode()) for family, files in FAMILIES.items() for path, text in files.items()]


target = Target(
    name="tasks",
    about="a task folder: task.toml, runs.toml, image.toml, Dockerfile, tests",
    prepare=prepare,
    seeds=seeds,
    brief=5_000,
    mutate=mutators.labelled(_MUTATORS),
    words=(
        *(
            b"[[run]]",
            b"outputs = ",
            b"[environment]",
            b"[verifier]",
            b'mode = "harbor"',
            b'mode = "pytest"',
            b"memory = ",
            b"storage_mb = ",
            b"network = ",
        ),
        *(
            b"call = ",
            b"argv = ",
            b"args = ",
            b"stdin_file = ",
            b"def test_",
            b"class Test",
            b"/logs/verifier",
            b'"""',
            b"FROM ",
            b"\\\n",
            b"\\u0000",
            b"nan",
            b"inf",
        ),
    ),
)
