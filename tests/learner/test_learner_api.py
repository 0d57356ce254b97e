"""Calls of a learner to its driver over a network that loses answers: each has the effect of one call on the driver's disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.cluster.link import Link
from agentrl.cluster.mirror import Mirror
from agentrl.cluster.run_service import LEARNER
from agentrl.errors import StoreError
from agentrl.experience import SqliteStore, step_uses, token_records
from agentrl.learner.access import FolderAccess
from agentrl.learner.driver_reports import FILE
from agentrl.learner.remote_access import LearnerAccess, RemoteAccess
from agentrl.learner.update_guard import UpdateFailure
from agentrl.records import GroupUse, PolicyVersion, VersionState, codec
from agentrl.serving.access import NAME, ServerAddress
from agentrl.testing.store_contract import make_group
from agentrl.version import FolderRegistry
from agentrl.version.rollback import RollbackRequest, request_rollback
from tests.cluster.serving import driving


def use_everything(access: LearnerAccess, run: Path) -> list[object]:
    """Every call of a learner, in an order that a learner could make; returns the answers."""
    setback = UpdateFailure(step=0, action="skip", what="policy", reasons=("why",), groups=(1,), episodes=(), metrics={"loss": None})
    uses = [{0: GroupUse(tokens_trained=4), 1: GroupUse(reason="all_equal")}, {2: GroupUse(tokens_trained=2)}]
    access.reconcile(0, step_uses.NO_STEPS)
    answers: list[object] = [access.registry.get(0), access.registry.get(1), access.pending_rollback()]
    for step, used in enumerate(uses):
        access.store.assign(step, tuple(used))
        answers += [access.store.entries(step=step), access.store.groups(used)]
        access.record_setbacks((setback,) if step == 0 else ())
        access.record_uses(used)
        access.store.commit(step, used, f"{step + 1:06d}")
        weights = run / "versions" / f"{step + 1:06d}"
        weights.mkdir(exist_ok=True)
        (weights / "model.safetensors").write_bytes(bytes([step]))
        access.registry.add(PolicyVersion(number=step + 1, parent=step, folder=f"versions/{step + 1:06d}", sha256=f"{step:064d}"))
    access.registry.set_state(2, VersionState.SERVING)
    request_rollback(
        run / "versions", RollbackRequest(version=2, sha256=f"{1:064d}", to=1, to_sha256=f"{0:064d}", reason="worse", by_user=True)
    )
    answers.append(access.find_server())
    (run / NAME).write_text('{"url": "http://10.0.0.2:8000", "key": "k", "start": 7}')
    answers.append(access.find_server())
    assert answers[-2:] == [None, ServerAddress(url="http://10.0.0.2:8000", key="k", start=7)]
    answers += [access.pending_rollback(), access.registry.latest(VersionState.SERVING), access.registry.pinned(), access.registry.prune(1)]
    access.forget_setbacks(1)
    answers.append(access.store.entries())
    steps_hash = step_uses.extend_hash(step_uses.NO_STEPS, uses[0])
    access.reconcile(1, steps_hash)
    answers += [access.registry.reconcile(1), access.store.entries(first=0)]
    with pytest.raises(StoreError, match="belongs to step 0"):
        access.store.assign(5, (0,))
    with pytest.raises(StoreError, match="both differ from the steps of checkpoint 1"):
        access.reconcile(1, "0" * 64)
    version = access.registry.get(1)
    assert version is not None
    with pytest.raises(StoreError):
        access.registry.verify(version)
    return answers


def lose_first_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loses the answer to the first attempt of every call."""
    request, sent = Link.request, set[tuple[str, bytes]]()

    def lose_first(self: Link, method: str, path: str, body: bytes = b"", **more: float) -> tuple[int, bytes]:
        answer = request(self, method, path, body, **more)
        if (path, body) not in sent:
            sent.add((path, body))
            raise ConnectionResetError("the answer is lost")
        return answer

    monkeypatch.setattr(Link, "request", lose_first)


@pytest.mark.slow
def test_calls_whose_answers_are_lost_have_the_effect_of_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for name in ("direct", "remote"):
        run = tmp_path / name
        (run / "versions" / "000000").mkdir(parents=True)
        (run / "versions" / "000000" / "model.safetensors").write_bytes(b"base")
        (run / "recipe.json").write_text("{}")
        registry = FolderRegistry(run / "versions")
        registry.add(PolicyVersion(number=0, parent=None, folder="versions/000000", sha256="0" * 64))
        store = SqliteStore(run / "experience.sqlite")
        for index in range(3):
            store.put(make_group(index))
        if name == "direct":
            answers = use_everything(FolderAccess(run, store, registry), run)
        else:
            store.close()
            with driving(run) as driver:
                lose_first_answers(monkeypatch)
                access = RemoteAccess(Mirror(tmp_path / "mirror", Link(driver.url, driver.start_learner())))
                answers = use_everything(access, run)
                access.close()
            store = SqliteStore(run / "experience.sqlite")
        records = [(run / file).read_bytes() for file in (FILE, f"checkpoints/{step_uses.CONSUMED_FILE}")]
        ends.append((answers, records, store.entries(), registry.versions()))
        store.close()
    assert ends[0] == ends[1]


def test_a_repeated_call_is_recognised_after_any_number_of_reads(tmp_path: Path) -> None:
    """The other ranks of a large learner read while the answer to a call of the first rank is lost."""
    with driving(tmp_path / "run") as driver:
        link = driver.link(LEARNER)
        call = {"id": "uses", "uses": {"0": codec.to_data(GroupUse(tokens_trained=4))}}
        link.json("POST", "/learner/record_uses", call)
        for number in range(100):
            link.json("POST", "/learner/latest", {"id": f"read {number}", "states": ["serving"]})
        link.json("POST", "/learner/record_uses", call)
    assert len((tmp_path / "run" / "checkpoints" / step_uses.CONSUMED_FILE).read_text().splitlines()) == 1


@pytest.mark.parametrize("uses", [None, [], 3, {"0": 4}, {"x": {}}])
def test_uses_that_are_no_uses_receive_status_400(tmp_path: Path, uses: object) -> None:
    with driving(tmp_path / "run") as driver:
        link = driver.link(LEARNER)
        for method in ("commit", "record_uses"):
            call = {"id": method, "step": 0, "checkpoint": "000001", "uses": uses}
            assert link.request("POST", f"/learner/{method}", json.dumps(call).encode(), timeout_s=10)[0] == 400


def test_recorded_tokens_reach_the_driver_and_a_fault_does_not_stop_the_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, mirror = tmp_path / "run", tmp_path / "mirror"
    monkeypatch.setattr(token_records, "MAX_TOTAL_BYTES", 400)
    record = token_records.TokenRecord(group=3, episode_id="a", part=0, logprobs=[-1.5], entropies=[0.5], weights=[1.25], clipped=[True])
    with driving(run) as driver:
        key = driver.start_learner()
        access = RemoteAccess(Mirror(mirror, Link(driver.url, key)))
        access.tokens_recorded(1, 0)  # a step that recorded none
        for step in range(1, 9):
            token_records.write_records(mirror, step, 0, [record])
            token_records.write_records(mirror, step, 1, [record])
            access.tokens_recorded(step, 0)
            access.tokens_recorded(step, 1)
        assert token_records.read_records(run, 8, 3) == token_records.read_records(mirror, 8, 3) != []
        assert sum(path.stat().st_size for path in (run / "updates").iterdir()) <= 400
        for path in ("/updates/0/0", "/updates/1/-1", "/updates/1/512", "/updates/x/0", "/updates/..%2f1/0"):
            assert access._mirror.link.request("PUT", path, b"x", timeout_s=10)[0] in (400, 404), path
        (run / "updates").rename(run / "moved")
        (run / "updates").write_text("no folder")
        access.tokens_recorded(8, 0)
        access.tokens_recorded(8, 1)
        access.close()
    assert [entry.message.partition(":")[0] for entry in caplog.records if "no ratios" in entry.message] == [
        "the driver did not receive the tokens of step 8, so agentrl view shows no ratios"
    ]


def test_episodes_of_old_steps_are_deleted_for_a_learner_without_the_drivers_disk(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "run" / "experience.sqlite")
    for index in range(6):
        store.put(make_group(index))
    store.close()
    with driving(tmp_path / "run", keep_steps=2) as driver:
        access = RemoteAccess(Mirror(tmp_path / "mirror", Link(driver.url, driver.start_learner())))
        for step in range(6):
            access.store.assign(step, (step,))
            access.store.commit(step, {step: GroupUse(tokens_trained=1)}, f"{step + 1:06d}")
        with pytest.raises(StoreError, match="keep_steps"):
            access.store.groups((3,))
        assert [group.index for group in access.store.groups((4, 5))] == [4, 5] and len(access.store.entries()) == 6
        access.close()
