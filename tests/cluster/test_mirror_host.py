"""Parts on a host with its own disk: what they need is there before they start, and later when the driver requests it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.cluster.mirror_host import MirrorHost
from agentrl.cluster.part_group import PartGroup
from agentrl.cluster.process_host import LocalLauncher
from agentrl.errors import LaunchError
from agentrl.protocols.cluster import PYTHON, RUN, PartCommand
from tests.cluster.launchers import LOOPBACK
from tests.cluster.serving import Driver, driving

LIST = (
    "import pathlib, sys, time; print(sorted(p.name for p in pathlib.Path(sys.argv[1], 'versions').iterdir()), flush=True); time.sleep(60)"
)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    for number in range(3):
        folder = tmp_path / "run" / "versions" / f"{number:06d}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(f"weights {number}")
    with driving(tmp_path / "run") as driver_service:
        yield driver_service


async def test_a_part_starts_with_what_it_needs_and_gets_more_when_the_driver_requests_it(tmp_path: Path, driver: Driver) -> None:
    host = await MirrorHost.open(tmp_path / "disk", driver.link(), root=None, host=LOOPBACK)
    try:
        command = PartCommand(name="server", argv=(PYTHON, "-c", LIST, RUN), log="logs/server.log", needs=("versions/000000",))
        process = await host.start(command)
        assert process.folder == str(tmp_path / "disk")
        async with asyncio.timeout(20):
            while "['000000']" not in (tmp_path / "disk" / "logs" / "server.log").read_text():
                await asyncio.sleep(0.05)
        await process.fetch("versions/000002")
        versions = tmp_path / "disk" / "versions"
        assert sorted(path.name for path in versions.iterdir()) == ["000000", "000002"]
        assert (versions / "000002" / "model.safetensors").read_text() == "weights 2"
        (driver.folder / "versions" / "000000" / "model.safetensors").unlink()
        await process.fetch("versions/000001")
        assert sorted(path.name for path in versions.iterdir()) == ["000001", "000002"], "the driver has deleted version 0"
        with pytest.raises(LaunchError, match=r"versions/000009 cannot be fetched to 127\.0\.0\.1: versions/000009 does not exist"):
            await process.fetch("versions/000009")
        with pytest.raises(LaunchError, match="cannot be fetched"):
            await host.start(PartCommand(name="gate", argv=(PYTHON,), log="logs/gate.log", needs=("versions/000009",)))
    finally:
        await host.close()
    assert process.returncode is not None


async def test_a_server_leaves_what_a_learner_of_its_host_is_about_to_send(tmp_path: Path, driver: Driver) -> None:
    versions = tmp_path / "disk" / "versions"
    for name in ("000003", ".000004.part", ".000001.part", ".newest.part"):  # two of the learner, one of an interrupted transfer
        (versions / name).mkdir(parents=True)
        (versions / name / "model.safetensors").write_text("weights 3")
    (driver.folder / "versions" / "000001" / "model.safetensors").unlink()
    (driver.folder / "recipe.json").write_text("{}")
    host = await MirrorHost.open(tmp_path / "disk", driver.link(), root=None, host=LOOPBACK)
    try:
        await host.fetch("versions/000002", "recipe.json")
    finally:
        await host.close()
    assert sorted(path.name for path in versions.iterdir()) == [".000004.part", ".newest.part", "000002", "000003"]


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((0, 3), 3)])
async def test_a_part_on_several_hosts_ends_with_its_members(tmp_path: Path, codes: tuple[int, ...], expected: int) -> None:
    launcher = LocalLauncher(tmp_path)
    members = [
        await launcher.start(PartCommand(name=f"learner-{code}", argv=(sys.executable, "-c", f"raise SystemExit({code})"), log="log"))
        for code in codes
    ]
    assert await PartGroup(members).wait() == expected


async def test_a_failed_member_ends_the_others_which_would_wait_for_it(tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path)
    waits = await launcher.start(PartCommand(name="learner-0", argv=(sys.executable, "-c", "import time; time.sleep(60)"), log="log"))
    fails = await launcher.start(PartCommand(name="learner-1", argv=(sys.executable, "-c", "raise SystemExit(1)"), log="log"))
    group = PartGroup([waits, fails])
    assert group.returncode is None and waits.pid in group.processes()
    async with asyncio.timeout(20):
        assert await group.wait() == 1, "not the code of one that was killed for it"
    assert waits.returncode == -9 and group.processes() == {}
