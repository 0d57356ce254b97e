"""The ledger adds up at any time, and differences from episodes, checkpoint or metrics are reported."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from agentrl.base.files import folder_manifest
from agentrl.cli import app
from agentrl.errors import UserError
from agentrl.experience import FolderCheckpoints, SqliteStore, new_entry
from agentrl.experience.audit import count, token_balance, verify
from agentrl.experience.step_uses import hash_steps, rewrite_steps
from agentrl.records import GroupUse, LateScore, LedgerEntry, PendingPart, Score, ScoredEpisode, codec
from agentrl.testing.store_contract import make_group
from tests.driving import make_recipe


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[Path, SqliteStore]]:
    """A run folder after two steps: group 0 is trained, 1 is excluded, 2 is assigned and 3 is ready."""
    store = SqliteStore(tmp_path / "experience.sqlite")
    (tmp_path / "recipe.json").write_text(make_recipe().model_dump_json())
    for index in range(4):
        store.put(make_group(index))
    uses = {0: {0: GroupUse(tokens_trained=2)}, 1: {1: GroupUse(reason="all_equal")}}
    for step, step_uses in uses.items():
        store.commit(step, step_uses, f"checkpoints/{step + 1:06d}")
    store.assign(2, [2])
    _write_checkpoint(tmp_path, uses)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens_trained": 2.0}\n{"step": 2, "tokens_trained": 0.0}\n')
    yield tmp_path, store
    store.close()


@given(
    st.lists(
        st.tuples(st.integers(0, 1000), st.none() | st.integers(0, 9), st.none() | st.integers(0, 1000)),
        max_size=20,
    )
)
def test_sampled_tokens_are_trained_excluded_or_open(groups: list[tuple[int, int | None, int | None]]) -> None:
    entries = []
    for index, (sampled, step, trained) in enumerate(groups):
        use = None if step is None or trained is None else GroupUse(tokens_trained=min(trained, sampled))
        entry = LedgerEntry(
            index=index, task_id="t", attempts=1, counted=1, has_spread=False, oldest_version=0, tokens_sampled=sampled, step=step, use=use
        )
        entries.append(entry)
    tokens = count(entries).tokens
    assert tokens["sampled"] == tokens["trained"] + tokens["excluded"] + tokens["open"] == sum(sampled for sampled, _, _ in groups)
    assert sum(count(entries).groups.values()) == len(groups)


def test_a_sound_ledger_has_no_problems_and_is_counted(run: tuple[Path, SqliteStore]) -> None:
    folder, store = run
    progress: list[tuple[int, int]] = []
    assert list(verify(folder, store, progress=lambda checked, total: progress.append((checked, total)))) == []
    assert progress[0] == (0, 4) and progress[-1] == (4, 4)
    counts = count(store.entries())
    assert counts.groups == {"parked": 0, "ready": 1, "assigned": 1, "trained": 1, "excluded": 1} and counts.unused == {"all_equal": 1}
    assert token_balance(counts.tokens) == "8 tokens sampled = 2 trained + 2 excluded + 4 open"


def test_deleted_episodes_are_not_compared_and_the_rest_adds_up(run: tuple[Path, SqliteStore]) -> None:
    folder, store = run
    before = count(store.entries())
    store._delete_episodes(0)
    assert list(verify(folder, store)) == [] and count(store.entries()) == before
    store._connection.execute("UPDATE taken SET tokens_trained = 9 WHERE idx = 0")
    store._connection.execute("UPDATE groups SET body = CAST('sha256:' || hex(randomblob(16)) AS BLOB) WHERE idx = 3")
    problems = "\n".join(verify(folder, store))
    assert "group 0: 9 tokens were trained, but only 2" in problems and "group 3: its episodes were deleted, but no step" in problems


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("UPDATE groups SET tokens_sampled = 3 WHERE idx = 3", "group 3: the ledger has tokens_sampled=3, but its episodes have 2"),
        ("UPDATE groups SET has_spread = 1 WHERE idx = 3", "group 3: the ledger has has_spread=True, but its episodes have False"),
        ("UPDATE groups SET body = x'00' WHERE idx = 3", "group 3 in"),
        ("UPDATE taken SET tokens_trained = 9 WHERE idx = 0", "group 0: 9 tokens were trained, but only 2 were sampled"),
        ("UPDATE taken SET step = 0 WHERE idx = 1", "group 1: the ledger and checkpoint 000002 differ in how step 1 used it"),
        (
            "DELETE FROM taken WHERE idx = 1",
            "group 1: checkpoint 000002 records that step 2 consumed it, but the ledger records it as ready",
        ),
        ("DELETE FROM groups WHERE idx = 1", "group 1: step 2 consumed it, but it is not in the store"),
        ("UPDATE taken SET tokens_trained = 1 WHERE idx = 0", "step 1: the ledger has 1 trained tokens, but metrics.jsonl has 2"),
    ],
)
def test_a_difference_is_reported(run: tuple[Path, SqliteStore], change: str, problem: str) -> None:
    folder, store = run
    store._connection.execute(change)
    assert any(reported.startswith(problem) for reported in verify(folder, store)), list(verify(folder, store))


@pytest.mark.parametrize(
    "meta",
    [
        *(b"{", b"[]", b'{"step": 2}', b'{"step": "x", "consumed_sha256": ""}', b"[" * 100_000),
        *(b'{"step": 1e999, "consumed_sha256": ""}', b'{"step": 2, "consumed_sha256": "00"}'),
    ],
)
def test_a_damaged_checkpoint_is_a_problem_and_not_a_crash(run: tuple[Path, SqliteStore], meta: bytes) -> None:
    folder, store = run
    (folder / "checkpoints" / "000002" / "meta.json").write_bytes(meta)
    assert [reported.partition(": ")[0] for reported in verify(folder, store)] == ["checkpoint 000002 cannot be read"]


def test_hostile_metrics_are_skipped_and_a_link_out_of_the_folder_is_not_followed(run: tuple[Path, SqliteStore]) -> None:
    folder, store = run
    lines = ['{"step": "1", "tokens_trained": 5}', '{"step": 1, "tokens_trained": "many"}', '{"tokens_trained": 1}', "[1]", "{", "3"]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert list(verify(folder, store)) == []
    meta = folder / "checkpoints" / "000002" / "meta.json"
    meta.unlink()
    meta.symlink_to("/etc/passwd")
    assert [reported.partition(": ")[0] for reported in verify(folder, store)] == ["checkpoint 000002 cannot be read"]


def _write_checkpoint(folder: Path, uses: dict[int, dict[int, GroupUse]]) -> None:
    steps, checkpoint = [uses[step] for step in range(len(uses))], folder / "checkpoints" / f"{len(uses):06d}"
    checkpoint.mkdir(parents=True)
    rewrite_steps(folder / "checkpoints", steps)
    (checkpoint / "meta.json").write_bytes(codec.to_json({"step": len(uses), "consumed_sha256": hash_steps(steps)}))


USES = {0: {0: GroupUse(tokens_trained=2)}, 1: {1: GroupUse(reason="all_equal")}, 2: {2: GroupUse(tokens_trained=1)}}


def test_a_checkpoint_that_is_newer_than_the_ledger_is_not_a_problem(run: tuple[Path, SqliteStore]) -> None:
    """The learner was killed between checkpoint and commit, or is about to commit."""
    folder, store = run
    _write_checkpoint(folder, USES)
    assert list(verify(folder, store)) == []
    store.reconcile({})  # the newest checkpoints are damaged, and their steps are repeated
    assert list(verify(folder, store)) == []
    store.assign(0, [3])
    assert any(problem.startswith("group 0: checkpoint") for problem in verify(folder, store))


def test_checkpoints_whose_steps_are_repeated_are_skipped_if_they_are_damaged(run: tuple[Path, SqliteStore]) -> None:
    folder, store = run
    _write_checkpoint(folder, USES)
    remaining = [USES[0], USES[1]]
    rewrite_steps(folder / "checkpoints", remaining)  # the learner has resumed from 000002
    assert list(verify(folder, store)) == []
    newest = folder / "checkpoints" / "000003"
    (newest / "manifest.json").write_text(json.dumps(folder_manifest(newest)))
    assert [problem.partition(":")[0] for problem in verify(folder, store)] == ["checkpoint 000003 cannot be read"]


def test_steps_that_complete_during_the_check_are_not_a_problem(run: tuple[Path, SqliteStore]) -> None:
    folder, store = run

    def complete_a_step(checked: int, total: int) -> None:
        if checked == 1:
            store.put(make_group(4))
            uses = USES | {3: {3: GroupUse(tokens_trained=1), 4: GroupUse(tokens_trained=1)}}
            for step in (2, 3):
                store.commit(step, uses[step], f"checkpoints/{step + 1:06d}")
            _write_checkpoint(folder, uses)

    assert list(verify(folder, store, progress=complete_a_step)) == []
    assert list(verify(folder, store)) == []


def test_scores_that_arrive_during_the_check_are_not_a_problem(run: tuple[Path, SqliteStore]) -> None:
    folder, store = run
    group = make_group(4)
    (scored,) = group.episodes
    parts = tuple(PendingPart(name=name) for name in ("first", "second"))
    store.put(replace(group, episodes=(replace(scored, score=Score(value=None, pending=parts)),)))

    def send(checked: int, total: int) -> None:
        if part := {1: "first", 4: "second"}.get(checked):
            store.add_score(LateScore(episode_id=scored.episode.id, part=part, value=1.0, scored_by="ann", key=part), now=time.time())

    assert list(verify(folder, store, progress=send)) == []
    assert list(verify(folder, store)) == [] and not store.parked()


@pytest.mark.parametrize("tokens", ["1" + "0" * 400, "Infinity", "NaN", "true", "-1" + "0" * 400])
def test_metrics_with_invalid_numbers_do_not_crash_the_check(run: tuple[Path, SqliteStore], tokens: str) -> None:
    folder, store = run
    (folder / "metrics.jsonl").write_text(f'{{"step": 1, "tokens_trained": {tokens}}}\n')
    assert all(problem.startswith("step 1: the ledger has 2") for problem in verify(folder, store))


def test_metrics_that_are_a_link_or_too_large_are_a_problem(run: tuple[Path, SqliteStore]) -> None:
    folder, store = run
    metrics = folder / "metrics.jsonl"
    with metrics.open("r+b") as file:
        file.truncate(5 << 30)  # takes no space on the disk
    assert [problem.partition(": ")[0] for problem in verify(folder, store)] == ["metrics.jsonl cannot be read"]
    metrics.unlink()
    metrics.symlink_to("/etc/passwd")
    assert [problem.partition(": ")[0] for problem in verify(folder, store)] == ["metrics.jsonl cannot be read"]


def test_the_command_prints_counts_and_verifies_the_ledger(run: tuple[Path, SqliteStore]) -> None:
    folder, store = run
    result = CliRunner().invoke(app, ["store", str(folder), "--verify"])
    assert result.exit_code == 0, result.output
    assert "0 issued, 0 running, 0 parked, 1 ready, 1 assigned, 1 trained, 1 excluded of 4 groups" in result.stdout
    assert "8 tokens sampled = 2 trained + 2 excluded + 4 open" in result.stdout
    assert "ok    the ledger agrees with groups, checkpoint and metrics" in result.stdout
    listed = json.loads(CliRunner().invoke(app, ["store", str(folder), "--state", "trained", "--json"]).stdout)
    assert [group["index"] for group in listed["groups"]] == [0] and listed["counts"]["tokens_open"] == 4
    assert listed["groups"][0] == json.loads(codec.to_json(store.entries()[0])) | {"state": "trained", "step": 1}
    store._connection.execute("DELETE FROM taken WHERE idx = 1")
    broken = CliRunner().invoke(app, ["store", str(folder), "--verify"])
    assert broken.exit_code == 1 and "FAIL  group 1: checkpoint 000002 records that step 2 consumed it" in broken.stdout
    assert new_entry(make_group(3)) == store.entries(first=3)[0]


def test_the_command_lists_parked_groups_with_their_next_expiry(run: tuple[Path, SqliteStore]) -> None:
    folder, store = run
    soon, parts = time.time() + 1e6, (PendingPart(name="human", expires_at=time.time() + 2e6), PendingPart(name="style"))
    waiting = [Score(value=None, pending=parts), Score(value=None, pending=(PendingPart(name="human", expires_at=soon),))]
    for index, score in enumerate([*waiting, Score(value=None, pending=(PendingPart(name="human", expires_at=1.0),))], start=4):
        (scored,) = make_group(index).episodes
        store.put(replace(make_group(index), episodes=(replace(scored, score=score),)))
    partly = LateScore(episode_id="e7-0", part="human", value=1.0, scored_by="ann", key="k")
    episodes = [replace(make_group(7).episodes[0].episode, id=f"e7-{attempt}") for attempt in range(2)]
    score = Score(value=None, pending=(PendingPart(name="human"),))
    store.put(replace(make_group(7), episodes=tuple(ScoredEpisode(episode=episode, score=score) for episode in episodes)))
    store.add_score(partly, now=time.time())
    result = CliRunner().invoke(app, ["store", str(folder), "--state", "parked", "--verify"])
    assert result.exit_code == 0 and "3 parked, 2 ready," in result.output, "the expired part is recorded"
    assert f"4 parts of late scores have not arrived; the next expires at {datetime.fromtimestamp(soon):%Y-%m-%d %H:%M:%S}" in result.output
    assert [line.split()[:2] for line in result.output.splitlines() if " parked " in line and line.startswith(" ")] == [
        [number, "parked"] for number in "457"
    ]
    listed = json.loads(CliRunner().invoke(app, ["store", str(folder), "--json"]).stdout)
    assert listed["counts"]["parts_pending"] == 4 and listed["next_expiry"] == soon
    assert count(store.entries()).tokens["open"] == 2 * 7, "parked groups are open"
    store._connection.execute("UPDATE late_parts SET closed_at = 1 WHERE episode_id = 'e5'")
    broken = CliRunner().invoke(app, ["store", str(folder), "--verify"])
    assert broken.exit_code == 0, "an expired part is not a problem"
    store._connection.execute("DELETE FROM late_parts WHERE episode_id = 'e4' AND part = 'style'")
    broken = CliRunner().invoke(app, ["store", str(folder), "--verify"])
    assert broken.exit_code == 1 and "FAIL  group 4: the ledger has pending=1, but its episodes have 2" in broken.output


def test_a_folder_without_a_run_is_an_error_with_the_fix(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["store", str(tmp_path)])
    assert result.exit_code != 0 and isinstance(result.exception, UserError) and "is not a run folder" in str(result.exception)
    (tmp_path / "recipe.json").write_text(make_recipe().model_dump_json())
    result = CliRunner().invoke(app, ["store", str(tmp_path)])
    assert isinstance(result.exception, UserError) and "has no stored groups yet" in str(result.exception)
    assert not (tmp_path / "experience.sqlite").exists(), "nothing is created"


async def test_groups_that_are_not_stored_are_issued_or_running(run: tuple[Path, SqliteStore]) -> None:
    folder, store = run
    per_step = make_recipe().rollout.groups_per_step
    blocks = 2 + 4 // per_step
    for block in range(blocks):
        store.start_block(block, 0)
    checkpoints = FolderCheckpoints(folder / "running")
    await checkpoints.save_scored(2, 0, store.groups([2])[0].episodes[0])  # the driver died after it stored the group
    await checkpoints.save_scored(5, 0, store.groups([2])[0].episodes[0])
    expected = {index: "running" if index == 5 else "issued" for index in range(4, max(6, blocks * per_step))}
    data = json.loads(CliRunner().invoke(app, ["store", str(folder), "--json"]).stdout)
    assert data["unstored"] == {str(index): state for index, state in sorted(expected.items())}
    assert len(data["groups"]) == 4 and sum(data["counts"]["groups"].values()) == 4, "they are not entries of the ledger"
    listed = CliRunner().invoke(app, ["store", str(folder), "--state", "running"]).stdout
    assert f"{len(expected) - 1} issued, 1 running, 0 parked, 1 ready" in listed and listed.splitlines()[-1].split() == ["5", "running"]
    assert "running" not in CliRunner().invoke(app, ["store", str(folder), "--step", "1"]).stdout.partition("\n")[2]
