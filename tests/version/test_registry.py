"""The registry: transitions, crashes, and several processes."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.base.files import folder_manifest, sha256_file
from agentrl.errors import StoreError
from agentrl.protocols import VersionRegistry
from agentrl.records import ADAPTER, WHOLE_MODEL, PolicyVersion, VersionState
from agentrl.version import FolderRegistry, rollback
from tests.forking import FORKS
from tests.off_loop import PACKAGE, BlockingCalls
from tests.strategies import examples

CANDIDATE, SERVING, SERVED = VersionState.CANDIDATE, VersionState.SERVING, VersionState.SERVED
PROMOTED, ROLLED_BACK = VersionState.PROMOTED, VersionState.ROLLED_BACK


@pytest.fixture
def registry(tmp_path: Path) -> FolderRegistry:
    return FolderRegistry(tmp_path / "versions")


def publish(registry: FolderRegistry, number: int, weights: bytes = b"weights") -> PolicyVersion:
    """Writes a version's folder as the learner does, and registers it."""
    folder = registry.folder / f"{number:06d}"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text("{}")
    version = PolicyVersion(
        number=number, parent=number - 1 if number else None, folder=f"versions/{number:06d}", sha256=hashlib.sha256(weights).hexdigest()
    )
    registry.add(version)
    return version


def states(registry: FolderRegistry) -> dict[int, VersionState]:
    return {version.number: version.state for version in registry.versions()}


def test_versions_are_returned_and_latest_is_by_number(registry: FolderRegistry) -> None:
    protocol: VersionRegistry = registry
    assert protocol.latest() is None and protocol.get(0) is None
    for number in (0, 2, 10):
        assert publish(registry, number) == protocol.get(number)
    assert protocol.latest().number == 10
    protocol.set_state(2, SERVING)
    assert protocol.latest(SERVING, PROMOTED).number == 2
    assert protocol.latest(ROLLED_BACK) is None
    protocol.set_evals(2, {"heldout": 0.5})
    protocol.set_evals(2, {"heldout_real": 0.25})
    assert protocol.get(2).evals == {"heldout": 0.5, "heldout_real": 0.25}
    assert FolderRegistry(registry.folder).versions() == registry.versions()


def test_adding_the_same_weights_again_changes_nothing_and_other_weights_raise(registry: FolderRegistry) -> None:
    version = publish(registry, 1)
    registry.set_state(1, SERVING)
    registry.add(version)
    assert states(registry) == {1: SERVING}
    with pytest.raises(StoreError, match="already registered with different weights"):
        publish(registry, 1, b"others")


def test_a_version_published_again_is_not_confused_with_the_old_one(registry: FolderRegistry) -> None:
    publish(registry, 0)
    first = publish(registry, 1, b"first")
    registry.set_state(1, SERVING, sha256=first.sha256)
    registry.reconcile(0)
    publish(registry, 1, b"second")
    with pytest.raises(StoreError, match="version 1 was published again"):
        registry.set_state(1, SERVING, sha256=first.sha256)
    assert states(registry)[1] is CANDIDATE


def test_one_version_serves_at_a_time_and_a_rollback_restores_the_last_good_one(registry: FolderRegistry) -> None:
    for number in range(5):
        publish(registry, number)
    registry.set_state(0, SERVING)
    registry.set_state(0, PROMOTED)
    registry.set_state(1, SERVING)
    registry.set_state(2, SERVING)  # replaced version 1 before the gate decided
    assert states(registry) == {0: PROMOTED, 1: SERVED, 2: SERVING, 3: CANDIDATE, 4: CANDIDATE}
    registry.set_state(2, PROMOTED)
    registry.set_state(3, SERVING)
    assert registry.latest(SERVING, PROMOTED).number == 3
    registry.set_state(3, ROLLED_BACK)
    assert registry.latest(SERVING, PROMOTED).number == 2
    registry.set_state(2, SERVING)  # a promoted version serves without losing its promotion
    assert registry.get(2).state is PROMOTED
    with pytest.raises(StoreError, match="newer version 2 is promoted"):
        registry.set_state(1, SERVING)
    registry.set_state(2, ROLLED_BACK)
    registry.set_state(1, SERVING)
    assert registry.latest(SERVING, PROMOTED).number == 1


@pytest.mark.parametrize(("before", "after"), list(itertools.product(VersionState, VersionState)))
def test_every_transition_is_allowed_or_raises_as_documented(registry: FolderRegistry, before: VersionState, after: VersionState) -> None:
    publish(registry, 1)
    for state in (SERVING, SERVED) if before is SERVED else (before,):
        registry.set_state(1, state)
    legal = {
        (CANDIDATE, SERVING), (CANDIDATE, PROMOTED), (CANDIDATE, ROLLED_BACK),
        (SERVING, SERVED), (SERVING, PROMOTED), (SERVING, ROLLED_BACK),
        (SERVED, SERVING), (SERVED, PROMOTED), (SERVED, ROLLED_BACK),
        (PROMOTED, ROLLED_BACK),
    }  # fmt: skip
    if before is after or (before, after) in legal:
        registry.set_state(1, after)
        assert registry.get(1).state is after
    elif (before, after) == (PROMOTED, SERVING):
        registry.set_state(1, after)
        assert registry.get(1).state is PROMOTED
    else:
        with pytest.raises(StoreError, match="version 1"):
            registry.set_state(1, after)
        assert registry.get(1).state is before


def test_a_half_written_folder_is_not_a_version(registry: FolderRegistry) -> None:
    publish(registry, 0)
    half = registry.folder / "000001"
    half.mkdir()
    (half / ".version.json.part").write_text('{"number": 1')
    (registry.folder / "000002.part").mkdir()
    assert registry.get(1) is None
    assert states(registry) == {0: CANDIDATE}
    with pytest.raises(StoreError, match="version 1 is not registered"):
        registry.set_state(1, SERVING)
    publish(registry, 1)
    assert states(registry) == {0: CANDIDATE, 1: CANDIDATE}


def test_a_damaged_record_is_an_error_not_an_absent_version(registry: FolderRegistry) -> None:
    publish(registry, 0)
    record = registry.folder / "000000" / "version.json"
    complete_text = record.read_text()
    record.write_text(complete_text[:-5])
    with pytest.raises(StoreError, match="not a policy version"):
        registry.latest()
    record.write_text(complete_text.replace('"number":0', '"number":7'))
    with pytest.raises(StoreError, match="is the record of version 7"):
        registry.get(0)


@pytest.mark.parametrize("folder", ["../../elsewhere", "/tmp", "versions/../../elsewhere/000000", "versions/000001", ""])
def test_a_record_with_a_folder_other_than_the_versions_is_an_error(registry: FolderRegistry, folder: str) -> None:
    version = publish(registry, 0)
    with pytest.raises(StoreError, match="its folder must be"):
        registry.add(replace(version, number=7, folder=folder))
    assert registry.get(7) is None
    record = registry.folder / "000000" / "version.json"
    record.write_text(record.read_text().replace('"versions/000000"', json.dumps(folder)))
    for read in (lambda: registry.get(0), registry.versions, registry.latest, lambda: registry.prune(keep=1)):
        with pytest.raises(StoreError, match="its folder must be"):
            read()


def test_a_link_in_place_of_a_version_is_removed_but_not_its_target(registry: FolderRegistry, tmp_path: Path) -> None:
    publish(registry, 0)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "version.json").write_text("{}")
    (registry.folder / "000001").symlink_to(tmp_path / "other")
    assert registry.reconcile(0) == (1,)
    assert (tmp_path / "other" / "version.json").exists() and not (registry.folder / "000001").exists()


def test_versions_can_be_on_a_different_disk(registry: FolderRegistry, tmp_path: Path) -> None:
    version = publish(registry, 0)
    registry.folder.rename(tmp_path / "disk")
    registry.folder.symlink_to(tmp_path / "disk")
    registry.verify(version)
    assert publish(registry, 1) == registry.latest()


def test_verify_compares_the_hash_of_the_weights(registry: FolderRegistry) -> None:
    version = publish(registry, 3)
    registry.verify(version)
    weights = registry.path(version) / "model.safetensors"
    weights.write_bytes(b"Weights")
    with pytest.raises(StoreError, match="differs from the registered file"):
        registry.verify(version)
    weights.unlink()
    with pytest.raises(StoreError, match="No such file"):
        registry.verify(version)


def test_adapter_weights_are_verified_and_a_record_without_the_field_means_a_full_model(registry: FolderRegistry) -> None:
    version = replace(publish(registry, 3), number=4, folder="versions/000004", weights=ADAPTER)
    folder = registry.folder / "000004"
    folder.mkdir()
    (folder / ADAPTER).write_bytes(b"weights")
    (folder / WHOLE_MODEL).write_bytes(b"other")
    registry.add(version)
    registry.verify(version)
    assert registry.get(4) == version
    record = registry.folder / "000003" / "version.json"
    record.write_text(json.dumps({key: value for key, value in json.loads(record.read_text()).items() if key != "weights"}))
    old = registry.get(3)
    assert old is not None and old.weights == WHOLE_MODEL
    record.write_text(json.dumps({**json.loads(record.read_text()), "weights": "../../secret"}))
    with pytest.raises(StoreError, match="not a policy version"):
        registry.get(3)


def test_prune_keeps_the_newest_the_base_the_serving_and_the_promoted(registry: FolderRegistry) -> None:
    for number in range(8):
        publish(registry, number)
    (registry.folder / "000001" / "extra").mkdir()
    registry.set_state(2, PROMOTED)
    registry.set_state(4, SERVING)
    assert registry.prune(keep=2) == (1, 3, 5)
    remaining = [number for number in range(8) if (registry.folder / f"{number:06d}" / "model.safetensors").exists()]
    assert remaining == [0, 2, 4, 6, 7]
    assert [path.name for path in (registry.folder / "000001").iterdir()] == ["version.json"]
    assert len(registry.versions()) == 8, "the records remain"
    assert registry.prune(keep=2) == ()
    assert registry.prune(keep=100) == ()


def test_prune_deletes_old_promoted_versions(registry: FolderRegistry) -> None:
    for number in range(8):
        publish(registry, number)
        registry.set_state(number, PROMOTED)
    newest = registry.get(7)
    rollback.request_rollback(
        registry.folder, rollback.RollbackRequest(version=7, sha256=newest.sha256, to=3, to_sha256=registry.get(3).sha256, reason="worse")
    )
    assert registry.prune(keep=2) == (1, 2, 4, 5), "the two newest and the target of a rollback request are kept"
    registry.verify(registry.get(3))


def test_prune_keeps_the_held_version_in_any_process(registry: FolderRegistry) -> None:
    for number in range(6):
        publish(registry, number)
    registry.hold(2)
    assert FolderRegistry(registry.folder).prune(keep=1) == (1, 3, 4)
    registry.verify(registry.get(2))
    registry.hold(5)
    assert registry.prune(keep=1) == (2,)
    (registry.folder / "held").write_text("two")
    with pytest.raises(StoreError, match="held cannot be read"):
        registry.prune(keep=1)


def test_a_pinned_version_is_kept_until_it_is_unpinned(registry: FolderRegistry) -> None:
    for number in range(6):
        publish(registry, number)
    registry.pin(1)
    registry.pin(3)
    registry.pin(3)
    assert FolderRegistry(registry.folder).pinned() == {1, 3}
    assert FolderRegistry(registry.folder).prune(keep=1) == (2, 4)
    registry.verify(registry.get(1))
    registry.pin(1, pinned=False)
    registry.pin(2, pinned=False)
    assert registry.pinned() == {3} and registry.prune(keep=1) == (1,)
    with pytest.raises(StoreError, match="version 9 is not registered"):
        registry.pin(9)
    registry.reconcile(2)
    assert registry.pinned() == set(), "other weights get the number of a deleted version"
    (registry.folder / "pinned").write_text("two")
    with pytest.raises(StoreError, match="pinned cannot be read"):
        registry.prune(keep=1)


def test_a_rollback_request_by_a_user_remains_after_a_later_promotion(registry: FolderRegistry) -> None:
    versions = [publish(registry, number, f"weights {number}".encode()) for number in range(4)]
    for by_user in (False, True):
        request = rollback.RollbackRequest(
            version=2, sha256=versions[2].sha256, to=1, to_sha256=versions[1].sha256, reason="worse", by_user=by_user
        )
        rollback.request_rollback(registry.folder, request)
        assert rollback.pending_request(registry.folder, registry) == request
        registry.set_state(3, PROMOTED)
        assert rollback.pending_request(registry.folder, registry) == (request if by_user else None)
    registry.set_state(2, ROLLED_BACK)
    assert rollback.pending_request(registry.folder, registry) is None, "the request was performed"


def test_reconcile_deletes_versions_newer_than_the_checkpoint(registry: FolderRegistry) -> None:
    for number in range(4):
        publish(registry, number)
    registry.set_state(3, SERVING)
    (registry.folder / "000004").mkdir()  # half written when the learner died
    assert registry.reconcile(2) == (3, 4)
    assert sorted(states(registry)) == [0, 1, 2]
    assert not (registry.folder / "000003").exists()
    publish(registry, 3, b"made again")
    assert registry.get(3).state is CANDIDATE


def test_a_closed_registry_raises(registry: FolderRegistry) -> None:
    registry.close()
    registry.close()
    with pytest.raises(StoreError, match="closed"):
        registry.latest()


def _serve_all(folder: str, numbers: list[int], barrier) -> None:
    registry = FolderRegistry(Path(folder))
    barrier.wait(300)
    for number in numbers:
        registry.set_state(number, SERVING)
        registry.set_evals(number, {f"by_{os.getpid()}": 1.0})
        assert len([version for version in registry.versions() if version.state is SERVING]) == 1


def test_several_processes_never_see_two_serving_and_lose_no_eval(registry: FolderRegistry) -> None:
    for number in range(6):
        publish(registry, number)
    orders = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [3, 0, 5, 1, 4, 2]]
    barrier = FORKS.Barrier(len(orders))
    processes = [FORKS.Process(target=_serve_all, args=(str(registry.folder), order, barrier)) for order in orders]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * len(orders)
    assert [len(version.evals) for version in registry.versions()] == [len(orders)] * 6


def test_an_endless_run_has_a_bounded_number_of_folders(registry: FolderRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.version.registry.MAX_RECORDS", 6)
    for number in range(40):
        publish(registry, number)
        if number in (9, 20):
            registry.set_state(number, PROMOTED)
            registry.pin(number, pinned=number == 9)
        registry.prune(2)
    assert list(states(registry)) == [0, 9, 20, *range(34, 40)], "version 0, the pinned one, the last promoted ones and the newest"
    assert registry.get(21) is None and registry.latest(PROMOTED).number == 20  # type: ignore[union-attr]


def test_the_newest_version_is_found_without_reading_all_of_them(registry: FolderRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        publish(registry, number)
    registry.set_state(37, PROMOTED)
    read: list[int] = []
    monkeypatch.setattr(
        FolderRegistry, "_read", lambda self, number, real=FolderRegistry._read: (read.append(number), real(self, number))[1]
    )
    newest, promoted = registry.latest(), registry.latest(PROMOTED)
    assert newest is not None and promoted is not None and (newest.number, promoted.number, read) == (39, 37, [39, 39, 38, 37])
    assert registry.latest(ROLLED_BACK) is None


_CHANGER = """
import sys
from pathlib import Path
from agentrl.version import FolderRegistry
from agentrl.records import VersionState
registry = FolderRegistry(Path(sys.argv[1]))
for turn in range(100_000):
    registry.set_state(turn % 3, VersionState.SERVING)
    print(turn, flush=True)
"""


@pytest.mark.slow
def test_kill_9_leaves_complete_records_and_a_free_lock(registry: FolderRegistry) -> None:
    for number in range(3):
        publish(registry, number)
    changer = subprocess.Popen([sys.executable, "-c", _CHANGER, str(registry.folder)], stdout=subprocess.PIPE, text=True)
    assert changer.stdout is not None
    for _ in range(7):
        changer.stdout.readline()
    os.kill(changer.pid, signal.SIGKILL)
    changer.communicate(timeout=60)
    states_by_number = states(registry)
    assert sorted(states_by_number) == [0, 1, 2] and list(states_by_number.values()).count(SERVING) <= 1
    registry.set_state(1, SERVING)
    assert registry.latest(SERVING).number == 1


def test_a_manifest_covers_every_regular_file(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"abc")
    (tmp_path / "sub" / "a.txt").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "b.txt")
    assert list(folder_manifest(tmp_path)) == ["b.txt", "sub/a.txt"]
    # FIPS 180-4 example: the hash of "abc".
    assert sha256_file(tmp_path / "b.txt") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(("served", "expected"), [(3, 2), (2, 2), (1, 1)])
def test_reconciling_leaves_a_version_that_can_serve(registry: FolderRegistry, served: int, expected: int) -> None:
    """The learner returned to checkpoint 2: versions 3 and 4 are deleted, no matter which version was serving."""
    for number in range(5):
        publish(registry, number)
    registry.set_state(served, SERVING)
    assert registry.reconcile(2) == (3, 4)
    latest = registry.latest(SERVING, PROMOTED)
    assert latest is not None and latest.number == expected
    assert registry.path(latest).is_dir()
    assert list(states(registry).values()).count(SERVING) == 1


def test_reconciling_never_restores_a_rolled_back_version(registry: FolderRegistry) -> None:
    for number in range(4):
        publish(registry, number)
    registry.set_state(2, ROLLED_BACK)
    registry.set_state(3, SERVING)
    assert registry.reconcile(2) == (3,)
    assert states(registry) == {0: CANDIDATE, 1: SERVING, 2: ROLLED_BACK}
    publish(registry, 3, b"others")
    registry.set_state(1, PROMOTED)
    registry.set_state(3, SERVING)
    registry.reconcile(2)
    assert states(registry) == {0: CANDIDATE, 1: PROMOTED, 2: ROLLED_BACK}, "a promoted version serves without losing its promotion"


OPERATIONS = st.lists(st.sampled_from(["publish", "publish", "serve", "promote", "pin", "unpin", "retract"]), min_size=4, max_size=14)


@given(operations=OPERATIONS, random=st.randoms(use_true_random=False))
@settings(max_examples=examples(20))
def test_a_process_that_reads_only_recent_versions_prunes_like_a_new_one(operations: list[str], random: Any) -> None:
    with tempfile.TemporaryDirectory() as work, pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentrl.version.registry._RECENT", 3)
        registry = FolderRegistry(Path(work) / "versions")
        publish(registry, 0)
        for operation in operations:
            numbers = [version.number for version in registry.versions()]
            number = random.choice(numbers)
            with suppress(StoreError):
                if operation == "publish":
                    publish(registry, numbers[-1] + 1)
                elif operation == "serve":
                    registry.set_state(number, SERVING)
                elif operation == "promote":
                    registry.set_state(number, PROMOTED)
                elif operation == "retract":
                    registry.reconcile(numbers[-1] - 1 if numbers[-1] else 0)
                else:
                    registry.pin(number, pinned=operation == "pin")
            assert list(states(registry).values()).count(SERVING) <= 1
            spared = {0, *registry.pinned(), *[version.number for version in registry.versions()][-2:]}
            assert not spared & {*registry.prune(keep=2)}
            assert FolderRegistry(registry.folder).prune(keep=2) == (), operation


_WAITING = """
import asyncio
async def blocks(registry):
    return registry.latest()
async def threaded(registry):
    return await asyncio.to_thread(registry.latest)
def called(registry):
    return registry.latest()
"""


async def test_a_call_that_blocks_an_event_loop_is_detected(registry: FolderRegistry) -> None:
    """`tests.off_loop`, which watches all tests of the driver, reports what a coroutine of agentrl calls, unless a thread executes it."""
    publish(registry, 0)
    functions: dict[str, Any] = {}
    exec(compile(_WAITING, f"{PACKAGE}/waiting.py", "exec"), functions)
    with pytest.MonkeyPatch.context() as patch:
        calls = BlockingCalls(patch)
        assert await functions["threaded"](registry) == functions["called"](registry) and not calls.on_loop
        await functions["blocks"](registry)
        asyncio.get_running_loop().call_soon(functions["called"], registry)
        await asyncio.sleep(0)
    assert calls.calls["version"] == calls.calls["lock"] == 4
    assert sorted(stack.partition(":")[0] for stack in calls.on_loop) == ["lock", "lock", "version", "version"], calls.on_loop
