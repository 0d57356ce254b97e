"""The behaviour that every experience store must have, as tests that a test module inherits.

    from agentrl.testing.store_contract import StoreContract

    class TestMyStore(StoreContract):
        store = "mypackage.store:MyStore"

Some tests run this file as a program in a process that they kill.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier, Thread
from typing import Any, ClassVar

from agentrl.config import build
from agentrl.errors import StoreError
from agentrl.plugins import parts
from agentrl.protocols import ExperienceStore, GroupCommit
from agentrl.records import Episode, Group, GroupUse, Message, Score, ScoredEpisode, Trajectory, Turn, VersionSpan

_TIMEOUT_S = 120.0


class StoreContract:
    """Tests of the experience store with the name or plug-in reference `store`. All tests use the store as the driver and the learner
    do."""

    store: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}

    def open(self, folder: Path) -> ExperienceStore:
        """Opens the store of a run folder."""
        recipe = build({"name": "contract", "policy": {"model": "m"}, "tasks": {"family": "a:b"}})
        opened: ExperienceStore = parts.make_part(parts.STORE, parts.Part(self.store, options=dict(self.options)), folder, recipe)
        return opened

    @contextmanager
    def opened(self, folder: Path, groups: int = 0) -> Iterator[ExperienceStore]:
        """Yields the open store of a run folder, which contains `groups` groups."""
        store = self.open(folder)
        try:
            for index in range(groups):
                assert store.put(make_group(index))
            yield store
        finally:
            store.close()

    def test_groups_are_returned_equal_and_in_the_requested_order(self, tmp_path: Path) -> None:
        """The returned groups equal the stored groups, even after the store has been closed and reopened."""
        with self.opened(tmp_path) as store:
            assert [store.put(make_group(index)) for index in (2, 0, 1)] == [True] * 3
        with self.opened(tmp_path) as store:
            assert store.has(1) and not store.has(7)
            assert store.groups([2, 0]) == (make_group(2), make_group(0))
            _rejects(lambda: store.groups([0, 9]), "9")

    def test_an_index_is_stored_once(self, tmp_path: Path) -> None:
        """If a second group with the same index is stored, the first group is kept. If threads store the same groups at the same moment,
        each group is stored once."""
        stored: list[int] = []
        with self.opened(tmp_path, 1) as store, self.opened(tmp_path) as other:
            assert not store.put(make_group(0, "another")) and store.groups([0]) == (make_group(0),)
            start = Barrier(2)

            def write(mine: ExperienceStore) -> None:
                start.wait(_TIMEOUT_S)
                stored.extend(index for index in range(1, 9) if mine.put(make_group(index)))

            threads = [Thread(target=write, args=(mine,)) for mine in (store, other)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(_TIMEOUT_S)
            assert sorted(stored) == list(range(1, 9))
            assert [entry.index for entry in store.entries()] == list(range(9))

    def test_groups_of_one_commit_are_stored_like_others(self, tmp_path: Path) -> None:
        """This test applies only to stores that implement `GroupCommit`."""
        with self.opened(tmp_path, 1) as store:
            if isinstance(store, GroupCommit):
                assert store.put_all([make_group(1), make_group(0, "another"), make_group(2), make_group(2)]) == (True, False, True, False)
                assert store.groups([0, 1, 2]) == tuple(map(make_group, range(3)))

    def test_a_group_is_ready_then_assigned_then_consumed(self, tmp_path: Path) -> None:
        """The ledger's token counts change with the state of a group."""
        with self.opened(tmp_path, 4) as store:
            assert [entry.state for entry in store.entries()] == ["ready"] * 4
            store.assign(0, [2, 3])
            assert [(entry.index, entry.step, entry.state) for entry in store.entries(first=2)] == [(2, 0, "assigned"), (3, 0, "assigned")]
            store.assign(0, [1, 2])  # an interrupted attempt at the step chooses again
            assert [entry.state for entry in store.entries()] == ["ready", "assigned", "assigned", "ready"]
            store.commit(0, {1: GroupUse(tokens_trained=2), 2: GroupUse(reason="all_equal")}, "checkpoints/000001")
            assert [entry.index for entry in store.entries(step=0)] == [1, 2] and store.entries(step=1) == ()
            figures = [(entry.state, entry.tokens_sampled, entry.tokens_open, entry.tokens_excluded) for entry in store.entries(first=1)]
            assert figures == [("trained", 2, 0, 0), ("excluded", 2, 0, 2), ("ready", 2, 2, 0)]

    def test_a_group_belongs_to_one_step(self, tmp_path: Path) -> None:
        """A rejected call changes nothing in the ledger."""
        with self.opened(tmp_path, 4) as store:
            store.commit(0, _used(0, 1), "checkpoints/000001")
            before = store.entries()
            for take in (lambda indices: store.assign(1, indices), lambda indices: store.commit(1, _used(*indices), "checkpoints/000002")):
                _rejects(lambda take=take: take((2, 1)), "step 1 cannot")  # type: ignore[misc]
                _rejects(lambda take=take: take((3, 9)), "9")  # type: ignore[misc]
            assert store.entries() == before

    def test_reconcile_sets_the_ledger_to_a_checkpoint(self, tmp_path: Path) -> None:
        """Steps after the checkpoint keep their groups, so that each step is repeated with the same groups."""
        with self.opened(tmp_path, 6) as store:
            for step in range(3):
                store.commit(step, _used(2 * step, 2 * step + 1), f"checkpoints/{step + 1:06d}")
            store.reconcile({0: _used(0, 1)})
            assert _consumed(store) == {0: 0, 1: 0}
            assert [(entry.index, entry.state) for entry in store.entries(step=1)] == [(2, "assigned"), (3, "assigned")]
            store.reconcile({0: _used(0), 1: _used(1, 4)})  # a checkpoint whose commits did not happen
            assert _consumed(store) == {0: 0, 1: 1, 4: 1}
            assert {entry.index for entry in store.entries() if entry.state == "ready"} == {2, 3}

    def test_of_two_learners_that_commit_the_same_groups_one_wins(self, tmp_path: Path) -> None:
        """Two learners in separate processes commit the same groups, and only one of them succeeds."""
        with self.opened(tmp_path, 3) as store:
            learners = [self._process(tmp_path, "commit", str(step)) for step in (5, 6)]
            won = [learner.communicate("go\n", timeout=_TIMEOUT_S)[0].split() for learner in learners]
            assert sorted(won) == [["lost"], ["won"]]
            assert _consumed(store) == dict.fromkeys(range(3), 5 if won[0] == ["won"] else 6)

    def test_kill_9_loses_nothing_that_was_acknowledged(self, tmp_path: Path) -> None:
        """A process is killed while it stores, assigns and commits groups. An interrupted call has taken effect either completely or not at
        all."""
        for acknowledged in (5, 30):
            folder = tmp_path / str(acknowledged)
            writer = self._process(folder, "write")
            assert writer.stdout is not None
            done = [writer.stdout.readline().split() for _ in range(acknowledged)]
            os.kill(writer.pid, signal.SIGKILL)
            done += [line.split() for line in writer.communicate(timeout=_TIMEOUT_S)[0].splitlines()]
            stored, assigned, committed = (sum(line[0] == name for line in done if len(line) == 2) for name in ("put", "assign", "commit"))
            with self.opened(folder) as store:
                entries = store.entries()
                assert len(entries) in (stored, stored + 1) and [entry.index for entry in entries] == list(range(len(entries)))
                assert store.groups(range(len(entries))) == tuple(map(make_group, range(len(entries))))
                steps = [tuple(entry.state for entry in store.entries(step=step)) for step in range(assigned + 1)]
                assert steps[:committed] == [("trained", "trained")] * committed
                assert all(step in (("assigned",) * 2, ("trained",) * 2) for step in steps[committed:assigned])
                assert steps[assigned] in ((), ("assigned",) * 2)
                assert store.put(make_group(len(entries))), "the store still works"

    def _process(self, folder: Path, *what: str) -> subprocess.Popen[str]:
        """Returns a process that has opened the store of a run folder and is using it."""
        command = [sys.executable, "-m", __name__, type(self).__module__, type(self).__qualname__, str(folder), *what]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        return process


def make_group(index: int, text: str = "") -> Group:
    """Returns a group with one scored attempt, in which the policy sampled two tokens."""
    turn = Turn(
        prompt_ids=(1, 2, 3),
        completion_ids=(4, 5),
        logprobs=(-0.1, -1e-9),
        versions=(VersionSpan(version=3, start=0, end=2),),
        message=Message(role="assistant", content=f"ünïcode {text}"),
        finish_reason="stop",
    )
    episode = Episode(id=f"e{index}", task_id=f"t{index}", task_key="k", trajectories=(Trajectory(agent="main", turns=(turn,)),))
    return Group(index=index, task_id=f"t{index}", task_key="k", episodes=(ScoredEpisode(episode=episode, score=Score(value=1.0)),))


def _used(*indices: int) -> dict[int, GroupUse]:
    return dict.fromkeys(indices, GroupUse(tokens_trained=2))


def _consumed(store: ExperienceStore) -> dict[int, int | None]:
    return {entry.index: entry.step for entry in store.entries() if entry.use is not None}


def _rejects(call: Callable[[], object], text: str) -> None:
    """Raises `AssertionError` unless a call raises a `StoreError` with this text."""
    try:
        call()
    except StoreError as error:
        assert text in str(error), f"the error does not contain {text!r}: {error}"
    else:
        raise AssertionError(f"the call raised no StoreError with {text!r}")


def _write(store: ExperienceStore) -> None:
    """Stores groups, and assigns and commits them in pairs, until the process is killed. Prints each call after it has returned."""
    for index in range(100_000):
        store.put(make_group(index))
        print("put", index, flush=True)
        if index % 2:
            step = index // 2
            store.assign(step, [index - 1, index])
            print("assign", step, flush=True)
            store.commit(step, _used(index - 1, index), f"checkpoints/{step + 1:06d}")
            print("commit", step, flush=True)


def _commit(store: ExperienceStore, step: int) -> None:
    sys.stdin.readline()
    try:
        store.commit(step, _used(0, 1, 2), f"checkpoints/{step + 1:06d}")
        print("won")
    except StoreError:
        print("lost")


def main(module: str, contract: str, folder: str, what: str, *step: str) -> None:
    """Uses the store of a run folder as the command-line arguments specify."""
    contract_class: type[StoreContract] = getattr(importlib.import_module(module), contract)
    with contract_class().opened(Path(folder)) as store:
        print("open", flush=True)
        if what == "commit":
            _commit(store, int(step[0]))
        else:
            _write(store)


if __name__ == "__main__":
    main(*sys.argv[1:])
