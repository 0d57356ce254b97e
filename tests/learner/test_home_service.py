"""The calls of a learner to its driver, with a network that loses answers: each has the effect of one call on the driver's disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.cluster.link import Link
from agentrl.cluster.mirror import Mirror
from agentrl.errors import StoreError
from agentrl.experience import SqliteStore, step_uses
from agentrl.learner.driver_reports import FILE
from agentrl.learner.home import FolderHome, RunHome
from agentrl.learner.remote_home import DriverHome
from agentrl.learner.update_guard import UpdateFailure
from agentrl.records import GroupUse, PolicyVersion, VersionState
from agentrl.testing.store_contract import make_group
from agentrl.version import FolderRegistry
from agentrl.version.rollback import RollbackRequest, request_rollback
from tests.cluster.serving import driving


def use_everything(home: RunHome, run: Path) -> list[object]:
    """Every call of a learner, in an order that a learner could make; returns the answers."""
    setback = UpdateFailure(step=0, action="skip", what="policy", reasons=("why",), groups=(1,), episodes=(), metrics={"loss": None})
    uses = [{0: GroupUse(tokens_trained=4), 1: GroupUse(reason="all_equal")}, {2: GroupUse(tokens_trained=2)}]
    home.reconcile(0, step_uses.NO_STEPS)
    answers: list[object] = [home.registry.get(0), home.registry.get(1), home.pending_rollback()]
    for step, used in enumerate(uses):
        home.store.assign(step, tuple(used))
        answers += [home.store.entries(step=step), home.store.groups(used)]
        home.record_setbacks((setback,) if step == 0 else ())
        home.record_uses(used)
        home.store.commit(step, used, f"{step + 1:06d}")
        weights = run / "versions" / f"{step + 1:06d}"
        weights.mkdir(exist_ok=True)
        (weights / "model.safetensors").write_bytes(bytes([step]))
        home.registry.add(PolicyVersion(number=step + 1, parent=step, folder=f"versions/{step + 1:06d}", sha256=f"{step:064d}"))
    home.registry.set_state(2, VersionState.SERVING)
    request_rollback(
        run / "versions", RollbackRequest(version=2, sha256=f"{1:064d}", to=1, to_sha256=f"{0:064d}", reason="worse", by_user=True)
    )
    answers += [home.pending_rollback(), home.registry.latest(VersionState.SERVING), home.registry.pinned(), home.registry.prune(1)]
    home.forget_setbacks(1)
    answers.append(home.store.entries())
    hashed = step_uses.extend_hash(step_uses.NO_STEPS, uses[0])
    home.reconcile(1, hashed)
    answers += [home.registry.reconcile(1), home.store.entries(first=0)]
    with pytest.raises(StoreError, match="belongs to step 0"):
        home.store.assign(5, (0,))
    with pytest.raises(StoreError, match="both differ from the steps of checkpoint 1"):
        home.reconcile(1, "0" * 64)
    version = home.registry.get(1)
    assert version is not None
    with pytest.raises(StoreError):
        home.registry.verify(version)
    return answers


def lossy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is lost the first time."""
    request, sent = Link.request, set[tuple[str, bytes]]()

    def lose_first(self: Link, method: str, path: str, body: bytes = b"", **more: float) -> tuple[int, bytes]:
        answer = request(self, method, path, body, **more)
        if (path, body) not in sent:
            sent.add((path, body))
            raise ConnectionResetError("the answer is lost")
        return answer

    monkeypatch.setattr(Link, "request", lose_first)


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
            answers = use_everything(FolderHome(run, store, registry), run)
        else:
            store.close()
            with driving(run) as driver:
                lossy(monkeypatch)
                home = DriverHome(Mirror(tmp_path / "mirror", Link(driver.url, driver.start_learner())))
                answers = use_everything(home, run)
                home.close()
            store = SqliteStore(run / "experience.sqlite")
        records = [(run / file).read_bytes() for file in (FILE, f"checkpoints/{step_uses.CONSUMED_FILE}")]
        ends.append((answers, records, store.entries(), registry.versions()))
        store.close()
    assert ends[0] == ends[1]
