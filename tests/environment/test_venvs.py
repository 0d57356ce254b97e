from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.environment import building, venvs, verifiers_tasks
from agentrl.errors import InfrastructureError, UserError
from tests.environment.wheels import wheel

SHA = "0" * 64
LOCK = venvs.Lock(
    name="worlds",
    requires=("worlds==1.0", "./mine"),
    python="3.11",
    platform="linux-x86_64",
    pins=(f"six==1.16.0 --hash=sha256:{SHA}", f"./dist/worlds-1.0-py3-none-any.whl --hash=sha256:{SHA}"),
    folders=(("./mine", SHA),),
)


def project(root: Path, *locks: venvs.Lock) -> Path:
    (root / venvs.LOCKS).mkdir(parents=True)
    for lock in locks:
        (root / venvs.LOCKS / f"{lock.name}.lock").write_text(lock.to_text())
    return root


def test_a_lock_is_read_back_from_its_file_unchanged(tmp_path: Path) -> None:
    locks = venvs.read_locks(project(tmp_path, LOCK))
    assert locks == {"worlds": LOCK} and LOCK.versions == {"six": "1.16.0"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        LOCK.to_text() + "requests\n",
        LOCK.to_text() + "requests==2.0\n",
        LOCK.to_text() + "--index-url http://elsewhere\n",
        LOCK.to_text().replace("# python: 3.11\n", ""),
        LOCK.to_text() + f"x==1 --hash=sha256:{SHA} -r /etc/passwd\n",
    ],
)
def test_a_file_with_an_unpinned_requirement_is_not_a_lock(tmp_path: Path, text: str) -> None:
    (project(tmp_path) / venvs.LOCKS / "worlds.lock").write_text(text)
    with pytest.raises(UserError, match="is not a valid environment lock"):
        venvs.read_locks(tmp_path)


def test_an_environment_is_chosen_by_its_name_or_by_a_package_that_only_it_contains(tmp_path: Path) -> None:
    other = venvs.Lock(name="other", requires=("other",), python="3.11", platform="x", pins=(f"six==1.16.0 --hash=sha256:{SHA}",))
    third = venvs.Lock(name="six", requires=("six",), python="3.11", platform="x", pins=(f"Tom_Li==1 --hash=sha256:{SHA}",))
    root = project(tmp_path, LOCK, other, third)
    assert venvs.environment_of(root, "Worlds") == "worlds"
    assert venvs.environment_of(root, "six") == "six", "a name has priority over environments that contain the package"
    assert venvs.environment_of(root, "tom-li") == "six"
    (root / venvs.LOCKS / "six.lock").unlink()
    with pytest.raises(UserError, match="in the environments other, worlds"):
        venvs.environment_of(root, "six")
    verifiers = venvs.Lock(name="verifiers", requires=("verifiers",), python="3.11", platform="x", pins=())
    (root / venvs.LOCKS / "verifiers.lock").write_text(verifiers.to_text())
    assert verifiers_tasks._environment(root, "included") == "verifiers"
    with pytest.raises(UserError, match="in the environments other, worlds"):
        verifiers_tasks._environment(root, "six")
    with pytest.raises(UserError, match="agentrl env add absent"):
        venvs.environment_of(root, "absent")
    with pytest.raises(UserError, match="agentrl env sync worlds"):
        venvs.environment_python(root, "worlds")
    with pytest.raises(UserError, match="agentrl env add absent"):
        venvs.environment_python(root, "absent")


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("ERROR: No matching distribution found for worlds==99\n", "the index has no package worlds==99"),
        (
            "ERROR: Ignored the following versions that require a different python version: 0.7.0 Requires-Python >=3.13\n"
            "ERROR: No matching distribution found for nemo-gym==0.7.0\n",
            "a different Python version: >=3.13",
        ),
        ("ERROR: Package 'worlds' requires a different Python: 3.11.7 not in '>=3.12'\n", "a different Python version: >=3.12"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "files that differ from the lock"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n", "the disk is full"),
        ("The conflict is caused by:\n    a 1 depends on b<2\n    c 1 depends on b>2\n", "a 1 depends on b<2"),
        ("ERROR: Failed to build 'worlds' when getting requirements to build wheel\n", "worlds cannot be built"),
        ("something else\nRuntimeError: strange\n", "RuntimeError: strange"),
    ],
)
def test_an_error_reports_the_cause_of_a_failure_of_pip(log: str, message: str) -> None:
    error = building._failure(log)
    assert isinstance(error, UserError) and message in str(error), str(error)


def test_a_lost_connection_is_an_infrastructure_error() -> None:
    log = (
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...)'\n"
        "ERROR: Could not find a version that satisfies the requirement worlds (from versions: none)\n"
        "ERROR: No matching distribution found for worlds\n"
    )
    error = building._failure(log)
    assert isinstance(error, InfrastructureError) and "no connection" in str(error)


@pytest.mark.parametrize(
    "requirement",
    ["-r x.txt", "--index-url=http://x", "git+https://x/y", "a @ https://user:pw@host/x.whl", "a b", "a\nb", "", "./absent", "x#y"],
)
def test_an_invalid_requirement_is_an_error(tmp_path: Path, requirement: str) -> None:
    with pytest.raises(UserError):
        building.add_environment(tmp_path, [requirement])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "x" * 200])
def test_names_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="is not a valid environment name"):
        building.add_environment(tmp_path, ["worlds"], name=name)
    assert not building.remove_environment(tmp_path, name)


def test_a_python_that_does_not_run(tmp_path: Path) -> None:
    (broken := tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o700)
    with pytest.raises(UserError, match="is not available on this machine"):
        building.add_environment(tmp_path, ["worlds"], python=str(broken))


BACKEND = """
import pathlib, sys
sys.path.insert(0, "{tests}")
from tests.environment.wheels import wheel

def build_wheel(folder, config_settings=None, metadata_directory=None):
    pathlib.Path("build").mkdir(exist_ok=True)
    return wheel(pathlib.Path(folder), "mine", "0.1", "deep").name
"""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index without a network: a folder of wheels."""
    folder = tmp_path / "index"
    wheel(folder, "worlds", "1.0", "deep>=1")
    wheel(folder, "deep", "1.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONSTRAINT", "")
    return folder


def version_in(root: Path, name: str, module: str) -> str:
    code = f"import {module}; print({module}.version)"
    return subprocess.run([venvs.environment_python(root, name), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_an_environment_is_built_rebuilt_and_repaired(tmp_path: Path, index: Path) -> None:
    root, messages = tmp_path / "project", list[str]()
    root.mkdir()
    lock = building.add_environment(root, ["worlds"], report=messages.append)
    assert lock.versions == {"worlds": "1.0", "deep": "1.0"} and version_in(root, "worlds", "worlds") == "1.0"
    assert venvs.read_locks(root) == {"worlds": lock}
    assert (root / venvs.BUILT / ".gitignore").read_text() == "*\n"

    wheel(index, "deep", "2.0")
    assert building.add_environment(root, ["worlds"], report=messages.append) == lock, "the lock decides, not the index"
    assert messages[-1] == "worlds is already built"

    (root / venvs.BUILT / "worlds" / venvs.COMPLETE).unlink()  # as after a kill: incomplete, so it is rebuilt from the lock
    with pytest.raises(UserError, match="agentrl env sync worlds"):
        venvs.environment_python(root, "worlds")
    assert building.sync_environment(root, "worlds") == lock and version_in(root, "worlds", "deep") == "1.0"

    wheel(index, "deep", "1.0", "worlds")  # another file with the same version
    (root / venvs.BUILT / "worlds" / venvs.COMPLETE).unlink()
    with pytest.raises(UserError, match="files that differ from the lock"):
        building.sync_environment(root, "worlds")

    newer = building.add_environment(root, ["worlds"], upgrade=True)
    assert newer.versions == {"worlds": "1.0", "deep": "2.0"} and version_in(root, "worlds", "deep") == "2.0"
    with pytest.raises(UserError, match="the index has no package worlds==9"):
        building.add_environment(root, ["worlds==9"])
    assert version_in(root, "worlds", "deep") == "2.0", "a failed change leaves the environment as it was"
    assert building.remove_environment(root, "worlds") and venvs.read_locks(root) == {}
    assert [path.name for path in (root / venvs.BUILT).iterdir() if path.is_dir()] == []


@pytest.mark.slow
def test_a_folder_is_a_package_and_its_change_is_detected(tmp_path: Path, index: Path) -> None:
    root = tmp_path / "project"
    (mine := root / "mine").mkdir(parents=True)
    (mine / "pyproject.toml").write_text(
        '[project]\nname = "Mine"\nversion = "0.1"\ndependencies = ["deep"]\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (mine / "backend.py").write_text(BACKEND.format(tests=Path(__file__).parents[2]))
    os.environ["PYTHONPATH"] = "/nowhere"  # must not affect the environment
    try:
        lock = building.add_environment(root, [str(mine)])
    finally:
        del os.environ["PYTHONPATH"]
    assert lock.name == "mine" and lock.requires == ("./mine",) and version_in(root, "mine", "mine") == "0.1"
    assert sorted(path.name for path in mine.iterdir()) == ["backend.py", "pyproject.toml"], "the build does not write to the folder"
    assert venvs.environment_of(root, "Mine") == "mine"
    (mine / "backend.py").write_text((mine / "backend.py").read_text().replace("0.1", "0.2"))
    with pytest.raises(UserError, match=r"\./mine differs"):
        building.sync_environment(root, "mine")
    building.add_environment(root, [str(mine)])
    assert version_in(root, "mine", "mine") == "0.2"


@pytest.mark.slow
def test_an_interrupted_build_restores_the_previous_environment(tmp_path: Path, index: Path) -> None:
    root = tmp_path / "project"
    root.mkdir()
    (root / "pyproject.toml").touch()
    building.add_environment(root, ["deep"], name="worlds")
    for number in (signal.SIGINT, signal.SIGKILL):
        command = [sys.executable, "-m", "agentrl", "env", "add", "worlds"]
        variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        with subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True, env=variables) as process:
            assert process.stderr is not None
            while "resolving" not in process.stderr.readline():
                pass
            time.sleep(0.2)
            process.send_signal(number)
            error_text = process.stderr.read()
        assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), error_text
        with building._building(root, "worlds", lambda text: None):
            assert version_in(root, "worlds", "deep") == "1.0"
            assert not (root / venvs.BUILT / ".worlds.old").exists()
    listing = subprocess.run(
        [sys.executable, "-m", "agentrl", "env", "list", "--json"], cwd=root, env=variables, capture_output=True, text=True, check=True
    )
    assert [(item["name"], item["requires"], item["built"]) for item in json.loads(listing.stdout)] == [("worlds", ["deep"], True)]
