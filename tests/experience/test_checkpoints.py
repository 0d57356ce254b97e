"""Checkpoints of running episodes: the newest one counts, damaged files are renamed, and files are removed with their group."""

from __future__ import annotations

import asyncio
import logging
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard

from agentrl.base.media import MediaFolder
from agentrl.experience import FolderCheckpoints, SqliteStore, checkpoints, drop_unused_images
from agentrl.protocols import EpisodeCheckpoints
from agentrl.records import (
    MAX_SNAPSHOT_BYTES,
    Episode,
    EpisodeState,
    Group,
    Message,
    Score,
    ScoredEpisode,
    Trajectory,
    Turn,
    VersionSpan,
    codec,
)
from agentrl.records.images import image_ids
from tests.descriptors import descriptors_left

TURN = Turn(
    prompt_ids=(1, 2),
    completion_ids=(3, 4),
    logprobs=(-0.1, -1e-9),
    versions=(VersionSpan(version=3, start=0, end=1), VersionSpan(version=2, start=1, end=2)),
    message=Message(role="assistant", content="ünïcode \ud800".encode("utf-8", "replace").decode()),
    finish_reason="stop",
)
STATE = EpisodeState(
    episode_id="e",
    task_key="k",
    attempt=1,
    trajectories=(Trajectory(agent="main", turns=(TURN,), inherited=("d",), stop_reason=""),),
    prompt_ids=((5,),),
    snapshot=bytes(range(256)),
    wall_s=1.5,
)
EPISODE = Episode(id="e", task_id="t", task_key="k", trajectories=(Trajectory(agent="main", turns=(TURN,), inherited=("d",)),))
SCORED = ScoredEpisode(episode=EPISODE, score=Score(value=0.5))


@pytest.fixture
def keeper(tmp_path: Path) -> FolderCheckpoints:
    return FolderCheckpoints(tmp_path / "running")


async def test_the_newest_state_is_read_back_unchanged_and_the_outcome_replaces_it(keeper: FolderCheckpoints, tmp_path: Path) -> None:
    interface: EpisodeCheckpoints = keeper
    assert await interface.load(0, 0) is None and keeper.groups() == ()
    await interface.save_state(0, 0, STATE)
    later = replace(STATE, trajectories=(replace(STATE.trajectories[0], turns=(TURN, TURN)),), prompt_ids=((7,),))
    await interface.save_state(0, 0, later)
    await interface.save_state(0, 1, STATE)
    reopened = FolderCheckpoints(tmp_path / "running")
    assert (await reopened.load(0, 0), await reopened.load(0, 1), await reopened.load(1, 0)) == (later, STATE, None)
    await interface.save_scored(0, 0, SCORED)
    assert await reopened.load(0, 0) == SCORED
    assert sorted(path.name for path in (tmp_path / "running" / "000000").iterdir()) == ["0.scored", "1.state"]
    assert STATE.oldest_version == 2


async def test_a_write_that_ends_after_its_group_was_removed_leaves_nothing(
    keeper: FolderCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For example the write of a cancelled attempt, whose thread continues."""
    write = checkpoints.files.write_atomically

    def late(path: Path, body: bytes, *, tag: str) -> None:
        write(path, body, tag=tag)
        keeper.remove_group(3)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, body, tag=tag)

    monkeypatch.setattr(checkpoints.files, "write_atomically", late)
    await keeper.save_state(3, 0, STATE)
    assert keeper.groups() == () and not caplog.records
    monkeypatch.setattr(checkpoints.files, "write_atomically", write)
    await keeper.save_state(4, 0, STATE)
    assert keeper.groups() == (4,)


async def test_a_removed_group_leaves_no_files(keeper: FolderCheckpoints, tmp_path: Path) -> None:
    for group in (0, 1_000_000):
        await keeper.save_state(group, 0, STATE)
    assert keeper.groups() == (0, 1_000_000)
    for group in (0, 0, 1_000_000, 7):
        keeper.remove_group(group)
    assert list((tmp_path / "running").iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda body: body[: len(body) // 2],
        lambda body: body[:60] + bytes([body[60] ^ 1]) + body[61:],
        lambda body: b"",
        lambda body: zstandard.ZstdCompressor().compress(codec.to_json(SCORED)),
    ],
    ids=["torn", "one bit", "empty", "another record"],
)
async def test_a_damaged_file_is_renamed_with_a_warning(
    keeper: FolderCheckpoints, tmp_path: Path, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    await keeper.save_state(3, 2, STATE)
    path = tmp_path / "running" / "000003" / "2.state"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert await keeper.load(3, 2) is None
    assert "damaged" in caplog.text and not path.exists()
    assert (tmp_path / "running" / "damaged-000003-2.state").exists()
    await keeper.save_state(3, 2, STATE)
    assert await keeper.load(3, 2) == STATE
    keeper.remove_group(3)
    assert [entry.name for entry in (tmp_path / "running").iterdir()] == ["damaged-000003-2.state"], "it stays for inspection"


async def test_a_file_that_cannot_be_read_or_renamed_stops_nothing(
    keeper: FolderCheckpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await keeper.save_state(3, 2, STATE)
    with descriptors_left(0):
        assert await keeper.load(3, 2) is None and "cannot be read" in caplog.text
    assert await keeper.load(3, 2) == STATE, "the file is intact"
    (tmp_path / "running" / "000003" / "2.state").write_bytes(b"damaged")
    (tmp_path / "running" / "damaged-000003-2.state").mkdir()
    assert await keeper.load(3, 2) is None


async def test_a_scored_episode_that_cannot_be_written_leaves_the_state(keeper: FolderCheckpoints) -> None:
    await keeper.save_state(3, 2, STATE)
    with descriptors_left(0):
        await keeper.save_scored(3, 2, SCORED)
    assert await keeper.load(3, 2) == STATE


async def test_any_changed_byte_is_detected(keeper: FolderCheckpoints, tmp_path: Path) -> None:
    """They include letters of a text, which would decode to another text."""
    await keeper.save_state(0, 0, STATE)
    path = tmp_path / "running" / "000000" / "0.state"
    body = path.read_bytes()
    for position in range(0, len(body), 3):
        path.write_bytes(body[:position] + bytes([body[position] ^ 1]) + body[position + 1 :])
        assert await keeper.load(0, 0) in (None, STATE), f"byte {position} of {len(body)}"
    assert zstandard.get_frame_parameters(body).has_checksum


async def test_a_file_of_more_than_two_snapshots_is_not_decompressed(
    keeper: FolderCheckpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "running" / "000003" / "2.state"
    path.parent.mkdir(parents=True)
    path.write_bytes(zstandard.ZstdCompressor().compress(bytes(2 * MAX_SNAPSHOT_BYTES + 1)))
    assert await keeper.load(3, 2) is None
    assert "it decompresses to more than" in caplog.text and not path.exists()


async def test_the_bound_on_a_file_holds_for_writing_and_reading(
    keeper: FolderCheckpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    size = len(codec.to_json(STATE))
    monkeypatch.setattr(checkpoints, "MAX_BYTES", size)
    await keeper.save_state(0, 0, STATE)
    assert await keeper.load(0, 0) == STATE and not caplog.records, "exactly at the limit"
    await keeper.save_state(0, 1, replace(STATE, episode_id="e2"))
    assert await keeper.load(0, 1) is None and "MiB; the limit is" in caplog.text, "a byte beyond the limit"
    monkeypatch.setattr(checkpoints, "MAX_BYTES", size - 1)
    assert await keeper.load(0, 0) is None and "decompresses to more than" in caplog.text


async def test_only_folders_of_groups_count_as_groups(keeper: FolderCheckpoints, tmp_path: Path) -> None:
    await keeper.save_state(12, 0, STATE)
    (tmp_path / "running" / "000013").write_text("a file")
    (tmp_path / "running" / "notes").mkdir()
    assert keeper.groups() == (12,)


async def test_an_attempt_without_a_stored_state_can_finish(keeper: FolderCheckpoints) -> None:
    """The attempt ended in its first turn, or its states could not be stored."""
    await keeper.save_scored(5, 0, SCORED)
    assert await keeper.load(5, 0) == SCORED


async def test_a_state_that_cannot_be_written_is_logged_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "running").write_text("a file where the folder should be")
    await FolderCheckpoints(tmp_path / "running").save_state(0, 0, STATE)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] and "could not be written" in caplog.text


async def test_many_concurrent_writes_are_read_back_unchanged(keeper: FolderCheckpoints) -> None:
    await asyncio.gather(*(keeper.save_state(group, member, replace(STATE, attempt=member)) for group in range(3) for member in range(20)))
    loaded = await asyncio.gather(*(keeper.load(group, member) for group in range(3) for member in range(20)))
    assert loaded == [replace(STATE, attempt=member) for _ in range(3) for member in range(20)]


async def test_images_that_no_episode_shows_are_deleted(keeper: FolderCheckpoints, tmp_path: Path) -> None:
    """Images of stored groups and of episodes in progress stay, in their turns and before the next turn."""
    with closing(SqliteStore(tmp_path / "experience.sqlite")) as store:
        assert drop_unused_images(tmp_path, store, keeper) == 0
        media = MediaFolder(tmp_path)
        hashes = [media.put(bytes([number])) for number in range(5)]
        ids = [image_ids((7, 8), sha256) for sha256 in hashes]
        trajectory = Trajectory(agent="main", turns=(replace(TURN, prompt_ids=(1, *ids[0], 2)),))
        stored = ScoredEpisode(episode=replace(EPISODE, trajectories=(trajectory,)), score=Score(value=0.5))
        store.put(Group(index=0, task_id="t", task_key="k", episodes=(stored,)))
        await keeper.save_state(
            1, 0, replace(STATE, trajectories=(replace(trajectory, turns=(replace(TURN, prompt_ids=ids[1]),)),), prompt_ids=(ids[2],))
        )
        await keeper.save_scored(1, 1, replace(stored, episode=replace(EPISODE, trajectories=(replace(trajectory, last_state=ids[3]),))))
        shutil.copytree(tmp_path / "running" / "000001", tmp_path / "running" / "000001.bak")
        (tmp_path / "running" / "000001" / "0.state.bak").write_bytes(b"a user's copy")
        with descriptors_left(1):  # enough to list a folder
            assert drop_unused_images(tmp_path, store, keeper) == 0, "an unreadable episode may contain the images"
        assert drop_unused_images(tmp_path, store, keeper) == 1
    assert {path.stem for path in media.folder.iterdir()} == {sha256[:10] for sha256 in hashes[:4]}
