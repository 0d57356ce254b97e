"""A real learner with a mirror instead of the driver's disk gives the same versions, also after kills between its writes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from agentrl.base.files import folder_manifest
from agentrl.cluster.chunks import ChunkIndex
from agentrl.cluster.run_service import HOST
from agentrl.errors import LearnerError
from agentrl.experience import SqliteStore
from agentrl.experience.audit import verify
from agentrl.experience.step_uses import CONSUMED_FILE, read_steps
from agentrl.experience.token_records import read_records
from agentrl.learner import LearnerProcess
from agentrl.records import VersionState
from agentrl.version import FolderRegistry
from tests.cluster.hosts import hosts
from tests.cluster.launchers import OwnDisks
from tests.cluster.serving import Driver, driving
from tests.learner import preloaded
from tests.learner.building import build_recipe, random_group, write_run
from tests.ledgers import consumed
from tests.waiting import until

pytestmark = pytest.mark.deepspeed
STEPS = 3
POINTS = [
    ("before-record_uses", "a"),
    ("before-checkpoint_written", "a"),
    ("chunk-1", "b"),
    ("after-checkpoint_written", "a"),  # step 1 counts
    ("before-version_written", "b"),
    ("after-version_written", "b"),
    ("after-add", "a"),
    ("before-commit", "a"),  # of step 2
    ("before-add", "b"),
    ("after-prune", "b"),
    ("after-commit", "a"),  # of step 3
]
"""Kill points in order, each with the mirror of the killed learner: one of two hosts."""


def contents(folder: Path) -> dict[str, str]:
    """Checksums by path; empty for files that contain durations."""
    timed = ("update.json", "meta.json", "manifest.json")
    return {path: "" if path.endswith(timed) else sha256 for path, sha256 in folder_manifest(folder).items()}


def run_learner(host: Path, mirror: Path, driver: Driver, point: str = "") -> subprocess.CompletedProcess[str]:
    module = ("tests.learner.crash", point) if point else ("agentrl.learner.main",)
    command = preloaded.command(host, 1, *module, "--run-dir", str(mirror), "--driver", driver.url)
    environment = {**os.environ, "AGENTRL_DRIVER_KEY": driver.start_learner()}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)


def test_a_learner_on_another_host_gives_the_same_versions_after_kills_between_its_writes(tmp_path: Path, host: Path) -> None:
    recipe = build_recipe(learner={"keep_checkpoints": 1, "keep_versions": 2}).but("order=replay").but(f"steps={STEPS}")
    groups = [random_group(index, scores=[1.0] * 4 if index == 1 else None) for index in range(3 * STEPS)]
    direct, run = tmp_path / "direct", tmp_path / "run"
    for folder in (direct, run):
        write_run(folder, recipe, groups)
    command = preloaded.command(host, 1, "agentrl.learner.main", "--run-dir", str(direct))
    subprocess.run(command, check=True, timeout=600)

    with driving(run) as driver:
        for point, name in POINTS:
            result = run_learner(host, tmp_path / name, driver, point)
            assert result.returncode != 0 and "Traceback" not in result.stderr, (point, result.stderr)
        final = run_learner(host, tmp_path / "b", driver)
        assert final.returncode == 0, final.stderr

    ours, theirs = FolderRegistry(run / "versions"), FolderRegistry(direct / "versions")
    assert ours.versions() == theirs.versions() and len(ours.versions()) == STEPS + 1
    for kind in ("versions", "checkpoints"):
        assert contents(run / kind) == contents(direct / kind), "also after retention"
    names = [path.name for kind in ("versions", "checkpoints") for path in (run / kind).iterdir()]
    assert not [name for name in names if name.endswith((".part", ".old", ".gone"))]
    store = SqliteStore(run / "experience.sqlite")
    assert consumed(store) == {index: index // 3 for index in range(3 * STEPS)}
    assert list(verify(run, store)) == []
    store.close()
    assert (run / "checkpoints" / CONSUMED_FILE).read_bytes() == (direct / "checkpoints" / CONSUMED_FILE).read_bytes()
    assert len(read_steps(run / "checkpoints", 9)) == STEPS
    latest = ours.latest(VersionState.CANDIDATE)
    assert latest is not None and latest.number == STEPS
    chunks = ChunkIndex().list_folder(tmp_path / "b" / "versions" / f"{STEPS:06d}")
    assert chunks == ChunkIndex().list_folder(run / "versions" / f"{STEPS:06d}")


def test_a_learner_resumes_from_the_checkpoint_before_a_damaged_one_at_the_driver(tmp_path: Path, host: Path) -> None:
    recipe = build_recipe(learner={"keep_checkpoints": 2}).but("steps=2")
    groups = [random_group(index) for index in range(6)]
    run = tmp_path / "run"
    write_run(run, recipe, groups)
    with driving(run) as driver:
        assert run_learner(host, tmp_path / "a", driver).returncode == 0
        assert [len(read_records(run, step, group)) for step, group in ((1, 0), (2, 3))] == [4, 4], "the tokens of each step are recorded"
        version = (run / "versions" / "000002" / "model.safetensors").read_bytes()
        state = run / "checkpoints" / "000002" / "state" / "mp_rank_00_model_states.pt"
        data = bytearray(state.read_bytes())
        data[len(data) // 2] ^= 1
        state.write_bytes(data)
        resumed = run_learner(host, tmp_path / "b", driver)
        assert resumed.returncode == 0 and "resumed after step 1 from" in resumed.stderr, resumed.stderr
        assert (run / "versions" / "000002" / "model.safetensors").read_bytes() == version


@pytest.mark.slow
def test_a_learner_on_two_hosts_saves_one_checkpoint_that_one_host_resumes(tmp_path: Path, host: Path) -> None:
    """Each host has the shards of its rank on its own disk; the driver has all of them. One rank on one host continues from them."""
    recipe = build_recipe(learner={"ranks": 2, "zero_stage": 2, "keep_checkpoints": 2}).but("steps=2")
    groups = [random_group(index) for index in range(6)]
    direct, run = tmp_path / "direct", tmp_path / "run"
    for folder in (direct, run):
        write_run(folder, recipe, groups)
    subprocess.run(preloaded.command(host, 2, "agentrl.learner.main", "--run-dir", str(direct)), check=True, timeout=600)
    with hosts(3, delay_ms=1.0) as network, ExitStack() as stack:
        first, *others = network
        driver = stack.enter_context(driving(run, host=first.address, within=first.enter))
        environment = {**os.environ, "AGENTRL_DRIVER_KEY": driver.start_learner(), "OMP_NUM_THREADS": "1"}
        for number, remote in enumerate(others):
            placement = f"1/{number}/2@{others[0].address}:29500"
            worker = ("agentrl.learner.main", "--run-dir", str(tmp_path / f"host{number}"), "--driver", driver.url)
            launch = ("-m", "agentrl.learner.launch", str(os.getpid()), placement, *worker)
            remote.python(*launch, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for remote in others:
            output, _ = remote.processes[0].communicate(timeout=600)
            assert remote.processes[0].returncode == 0, output[-3000:]
        names = ("checkpoints/000001", "checkpoints/000002", "versions/000001", "versions/000002")
        for name in names:
            assert contents(run / name) == contents(direct / name), "equal to two ranks on the driver's disk"
        shards = [{path.name for path in (tmp_path / f"host{number}" / names[1]).rglob("*optim_states.pt")} for number in (0, 1)]
        assert [len(files) for files in shards] == [1, 1] and shards[0] != shards[1]

        single_rank = build_recipe(learner={"ranks": 1, "zero_stage": 2}).but("steps=3")
        (run / "recipe.json").write_text(single_rank.model_dump_json())
        store = SqliteStore(run / "experience.sqlite")
        for index in range(6, 9):
            store.put(random_group(index))
        store.close()
    with driving(run) as driver:
        last = run_learner(host, tmp_path / "third", driver)
        assert last.returncode == 0 and "resumed after step 2 from" in last.stderr, last.stderr
    assert (run / "versions" / "000003" / "model.safetensors").exists()


class Sessions:
    """`LearnerSessions` for a driver that runs in another thread."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self.url = driver, driver.url

    async def start(self) -> str:
        return await asyncio.to_thread(self._driver.start_learner)


@pytest.mark.slow
async def test_a_learner_process_on_two_hosts_fails_if_either_does_and_resumes(tmp_path: Path) -> None:
    run, cluster = tmp_path / "run", {"address": "auto", "resources": {"learner": {"nodes": 2}}}
    recipe = build_recipe(learner={"ranks": 2, "zero_stage": 2}, cluster=cluster).but("steps=2")
    write_run(run, recipe, [random_group(index) for index in range(3)])
    with driving(run) as driver:
        launcher = OwnDisks(run, root=tmp_path, disks=tmp_path / "disks")
        await launcher.use_driver(driver.url, driver.service.new_key(HOST))
        learner = LearnerProcess(run, recipe, launcher=launcher, sessions=Sessions(driver))  # type: ignore[arg-type]
        try:
            await learner.start()
            await until(lambda: (run / "checkpoints" / "000001" / "manifest.json").exists(), 600.0)
            second = next(
                int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if _runs_in(path, tmp_path / "disks" / "learner-1")
            )
            os.kill(second, signal.SIGKILL)
            with pytest.raises(LearnerError, match=r"the learner"):
                await learner.wait(timeout_s=300)
            await learner.kill()
            store = SqliteStore(run / "experience.sqlite")
            for index in range(3, 6):
                store.put(random_group(index))
            store.close()
            await learner.start()
            await learner.wait(timeout_s=600)
        finally:
            await learner.kill()
            await launcher.close()
    assert "resumed after step 1 from" in learner.log_tail() and (run / "logs" / "learner-1.log").exists()
    registry = FolderRegistry(run / "versions")
    assert [version.number for version in registry.versions()] == [0, 1, 2]
    assert {path.name for path in (run / "checkpoints" / "000002").rglob("rng_*.pt")} == {"rng_00.pt", "rng_01.pt"}


def _runs_in(command_line: Path, folder: Path) -> bool:
    try:
        arguments = command_line.read_bytes().split(b"\0")
    except OSError:
        return False
    return b"agentrl.learner.main" in arguments and str(folder).encode() in arguments and b"agentrl.learner.launch" not in arguments


def test_a_replaced_learner_ends(tmp_path: Path, host: Path) -> None:
    recipe = build_recipe()
    run = tmp_path / "run"
    write_run(run, recipe, [])
    with driving(run) as driver:
        command = preloaded.command(host, 1, "agentrl.learner.main", "--run-dir", str(tmp_path / "a"), "--driver", driver.url)
        environment = {**os.environ, "AGENTRL_DRIVER_KEY": driver.start_learner()}
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as stale:
            assert stale.stderr is not None
            for line in stale.stderr:
                if "is ready" in line:
                    break
            driver.start_learner()
            rest = stale.stderr.read()
    assert stale.returncode == 1 and "SessionEnded: the driver has replaced this process" in rest, rest
