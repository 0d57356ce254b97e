"""Unmodified Harbor folders: gold scores 1, no action and cheats score 0, and the image's files are in place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.check import cheats
from agentrl.check.access import image_files
from agentrl.check.check import check_family
from agentrl.check.purity import FamilySource
from agentrl.check.report import GOLD, IMAGE, NOTHING, CaseResult
from agentrl.config import SandboxConfig, TasksConfig
from agentrl.records import Episode, Split, Task
from agentrl.reward import TaskScorer
from agentrl.sandbox import builds, docker_client, images, select_backend
from agentrl.task import TaskFolders
from agentrl.task.leaks import find_leaks, hidden_truths
from agentrl.task.outputs import WHOLE_DIRECTORY, run_and_collect

ROOT = Path(__file__).resolve().parents[2]
BOTH = [pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=[pytest.mark.bubblewrap, pytest.mark.docker])]
CHEATS = {*cheats.TEXTS, *cheats.PROGRAMS}
ONE_OF_EACH_SORT = {"exits with 0", "fake report", "links to the tests"}

# The agent writes a program. COPY adds data, and the tests run the program with pytest on their own input.
COUNT: dict[str, str] = {
    "task.toml": """
schema_version = "1.1"
artifacts = []

[task]
name = "example/count-levels"
description = "Counts lines of a log by level."
keywords = ["log", "python"]
[[task.authors]]
name = "A. Person"
email = "person@example.org"

[metadata]
author_name = "A. Person"
difficulty = "easy"
category = "scripting"
tags = ["log"]

[verifier]
timeout_sec = 900.0

[agent]
timeout_sec = 60.0

[environment]
build_timeout_sec = 600.0
docker_image = "example/count-levels:20260101"
cpus = 1
memory = "256M"
storage_mb = 10240
gpus = 0
allow_internet = false
mcp_servers = []

[verifier.env]

[environment.env]

[solution.env]
""",
    "instruction.md": "Write /app/count.py: it prints how many lines of the log that it is given have each level of $LEVELS.\n",
    "environment/Dockerfile": """FROM {base}
ENV LEVELS="ERROR INFO" PATH=/app/bin:/opt/tools:/opt/bin:$PATH
WORKDIR /app
COPY data/ /app/data/
RUN echo draft > notes.txt && mkdir -p /logs/verifier bin && ln -s /app/bin /opt/bin && rmdir bin
""",
    "environment/data/example.txt": "ERROR 1\nINFO 2\n",
    "environment/data/app.log": "INFO a\nERROR b\nINFO c\n",
    "solution/solve.sh": """#!/bin/bash
set -e
rm /app/notes.txt
cat > /app/count.py <<'PYTHON'
import os, sys
lines = open(sys.argv[1]).read().split()
for level in os.environ["LEVELS"].split():
    print(level, lines.count(level))
PYTHON
python3 /app/count.py /app/data/app.log | diff - <(printf 'ERROR 1\\nINFO 2\\n')
""",
    "tests/test.sh": """#!/bin/bash
pytest -p no:cacheprovider /tests/test_outputs.py -rA

if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
""",
    "tests/test_outputs.py": """import subprocess
from pathlib import Path


def test_counts(tmp_path):
    log = tmp_path / "other.log"
    log.write_text("ERROR x\\nERROR y\\nINFO z\\n")
    done = subprocess.run(["python3", "/app/count.py", str(log)], capture_output=True, text=True, timeout=30)
    assert done.stdout == "ERROR 2\\nINFO 1\\n"


def test_the_data_are_as_they_were():
    assert Path("/app/data/app.log").read_text() == "INFO a\\nERROR b\\nINFO c\\n"


def test_the_notes_are_gone():
    assert not Path("notes.txt").exists()
""",
}
# The agent fixes a script under another WORKDIR, and the verdict is JSON.
GREET: dict[str, str] = {
    "task.toml": 'version = "1.0"\n[metadata]\ncategory = "shell"\n[verifier]\ntimeout_sec = 60.0\n[agent]\ntimeout_sec = 60.0\n'
    "[environment]\nmemory_mb = 256\nstorage_mb = 64\n",
    "instruction.md": "Make /workspace/repo/greet.sh executable and let it greet whom it is told to.\n",
    "environment/Dockerfile": "FROM {base}\nWORKDIR /workspace/repo\nCOPY greet.sh .\nRUN chmod 700 greet.sh && chmod a-x greet.sh\n",
    "environment/greet.sh": "#!/bin/sh\necho hello\n",
    "solution/solve.sh": "cd /workspace/repo\nprintf '#!/bin/sh\\necho \"hello, $1\"\\n' > greet.sh\nchmod +x greet.sh\n./greet.sh you\n",
    "tests/test.sh": "cd /workspace/repo && python3 -I /tests/verify.py\n",
    "tests/verify.py": """import json, subprocess
said = [subprocess.run(["./greet.sh", name], capture_output=True, text=True).stdout for name in ("Zoe", "Max")]
right = sum(text == f"hello, {name}\\n" for text, name in zip(said, ("Zoe", "Max")))
with open("/logs/verifier/reward.json", "w") as file:
    json.dump({"reward": right / 2, "asked": 2}, file)
""",
}


@pytest.fixture(scope="module")
def base() -> str:
    """A tag that the daemon has, because no registry is available: an image with Python and pytest, as such folders expect."""
    return images.ensure_docker_image(images.load_image(ROOT / "sandboxes" / "chores"))


@pytest.fixture
def family(tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "family"
    for name, files in (("count", COUNT), ("greet", GREET)):
        write(folder / name, files, base)
    yield folder
    api = docker_client.client()
    for path in folder.iterdir():
        image = images.load_image(path / "environment")
        for tag in (image.tag, image.built_tag, f"{image.built_tag}-unchecked"):
            if builds.has_image(api, tag):
                api.remove_image(tag, force=True)


def write(folder: Path, files: dict[str, str], base: str) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text.replace("{base}", base))


def tasks(family: Path) -> dict[str, Task]:
    opened = TaskFolders(family, root=family.parent, heldout=0.0)
    opened_tasks = [opened.task(Split.TRAIN, index) for index in range(opened.size(Split.TRAIN) or 0)]
    return {task.id.rpartition("/")[2]: task for task in opened_tasks}


@pytest.mark.slow
@pytest.mark.parametrize("backend", BOTH)
async def test_unmodified_harbor_folders_pass(backend: Any, family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs every cheat on one backend, and one of each sort on the other, to check that folders have the same meaning there."""
    if backend == "bubblewrap":
        for kind in ("TEXTS", "PROGRAMS"):
            monkeypatch.setattr(cheats, kind, {name: text for name, text in getattr(cheats, kind).items() if name in ONE_OF_EACH_SORT})
    source = FamilySource(tasks=TasksConfig(family=str(family)), root=family.parent)
    results: dict[str, dict[str, CaseResult]] = {}
    report = await check_family(source, SandboxConfig(backend=backend), count=None, parallel=4, quiet=True)
    assert all(proof.ok for proof in report.proofs), report.proofs
    for result in report.cases:
        results.setdefault(result.task.rpartition("/")[2], {})[result.case] = result
    assert set(results) == {"count", "greet"}
    for name, cases in results.items():
        assert set(cases) == {GOLD, NOTHING, *(ONE_OF_EACH_SORT if backend == "bubblewrap" else CHEATS)}, (name, cases.get(IMAGE))
        assert {case: result.detail for case, result in cases.items() if not result.ok} == {}, name


@pytest.mark.parametrize("backend", BOTH)
async def test_solution_inside_the_image_is_reported(backend: Any, family: Path) -> None:
    """A Dockerfile copies too much, so the agent would find the solution in its working directory."""
    solution = (family / "count" / "solution" / "solve.sh").read_text()
    (family / "count" / "environment" / "data" / "old.sh").write_text(f"# as last year\n{solution}")
    opened_tasks = tasks(family)
    sandboxes = select_backend(backend, run_label="test", root=family.parent)
    try:
        for name, expected in (("count", {("old.sh", "solution/solve.sh", True)}), ("greet", set())):
            await sandboxes.prepare(opened_tasks[name].sandbox)
            listing = await image_files(opened_tasks[name].sandbox, sandboxes)
            certain = [leak for leak in find_leaks(listing.files, hidden_truths(opened_tasks[name])) if leak.certain]
            assert {(Path(leak.path).name, leak.truth.origin, leak.certain) for leak in certain} == expected
    finally:
        await sandboxes.close()


LOOK = """
import os, subprocess
print(sorted(os.listdir(".")), open("/app/data/app.log").read().split()[0], os.environ["LEVELS"], os.environ["PATH"], os.environ["HOME"])
print(os.path.realpath("/app"), sorted(os.listdir("/logs")), os.path.lexists("/tests/test.sh"))
open("/app/data/app.log", "a").write("mine"); open("new.txt", "w").write("new"); os.remove("/app/notes.txt"); os.symlink("/etc/passwd", "p")
print(subprocess.run(["sh", "-c", "echo $LEVELS; touch /opt/agentrl/start/x /usr/x"], capture_output=True, text=True))
"""


@pytest.mark.parametrize("backend", BOTH)
async def test_dockerfile_applies_and_changes_are_collected(backend: Any, family: Path) -> None:
    task = tasks(family)["count"]
    assert (task.outputs, task.files, task.tools) == ((WHOLE_DIRECTORY,), {}, ("shell", "python", "submit"))
    assert (task.sandbox.memory_mb, task.sandbox.disk_mb, task.sandbox.network) == (256, 10240, ())
    sandboxes = select_backend(backend, run_label="test", root=family.parent)
    try:
        result, collected = await run_and_collect(task, LOOK, sandboxes, timeout_s=120)
        assert result.ok, result
        first, second, third = result.stdout.splitlines()
        path = "/opt/tools:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        assert first == f"['data', 'notes.txt'] INFO ERROR INFO {path} /home/agent"
        assert second == "/home/agent ['agent', 'artifacts', 'verifier'] False"
        assert "ERROR INFO" in third and third.count("Read-only file system") == 2
        assert collected.files == {"data/app.log": b"INFO a\nERROR b\nINFO c\nmine", "new.txt": b"new"}
        assert collected.removed == ("notes.txt",) and set(collected.refused) == {"p"}

        forged = "import os\nfor name in ('reward.txt', 'reward.json'):\n    open('/logs/verifier/' + name, 'w').write('1')\n"
        _, collected = await run_and_collect(task, forged + "open('x', 'w')", sandboxes, timeout_s=120)
        score = TaskScorer(sandboxes=sandboxes)
        for outputs in (collected.files, {"count.py": forged.encode()}, {"count.py": b"exit(1)"}):
            cheat = Episode(id="e", task_id=task.id, task_key=task.key, trajectories=(), outputs=outputs)
            result = await score(task, cheat)
            assert result.value == 0.0 and "exit code 0" in result.evidence, (outputs, result)

        sandbox = await sandboxes.open(task.sandbox)
        await sandbox.exec(["rm", "notes.txt"], timeout_s=60)
        restored = await sandboxes.open(task.sandbox, snapshot=await sandbox.snapshot())
        assert (await restored.exec(["ls"], timeout_s=60)).stdout == "data\n", "a snapshot is complete: no other file is restored"

        forged_episode = Episode(
            id="e", task_id=task.id, task_key=task.key, trajectories=(), outputs={"x": b""}, removed=("../../etc/x", "data/app.log")
        )
        assert (await score(task, forged_episode)).value == 0.0
    finally:
        await sandboxes.close()


@pytest.mark.docker
async def test_unsupported_image_features_are_reported_at_build_time(family: Path, base: str) -> None:
    cases = {
        "WORKDIR /usr": "WORKDIR /usr cannot be",
        "WORKDIR /tmp/x": "WORKDIR /tmp/x cannot be",
        "COPY greet.sh /tests/greet.sh": "/tests contains files",
        "WORKDIR /data\nRUN mkfifo pipe": "/data/pipe is not a file",
    }
    for lines, message in cases.items():
        write(family / "greet", {"environment/Dockerfile": f"FROM {base}\n{lines}\n"}, base)
        image = images.load_image(family / "greet" / "environment")
        with pytest.raises(ValueError, match=message):
            images.ensure_docker_image(image)
        assert not builds.has_image(docker_client.client(), image.tag)
        docker_client.client().remove_image(f"{image.built_tag}-unchecked", force=True)
