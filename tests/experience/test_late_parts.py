"""Scores that arrive late: which ones the store accepts, from any process and at any clock, and the resulting group."""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ScoreRejected, StoreError
from agentrl.experience import SqliteStore, new_entry
from agentrl.experience.late_parts import Clock
from agentrl.protocols import ExperienceStore
from agentrl.records import Episode, Group, GroupUse, LateScore, PendingPart, Score, ScoredEpisode, ScoreReceipt
from tests.driving import make_recipe
from tests.forking import FORKS
from tests.strategies import examples
from tests.thirdparty.fieldkit.store import FolderStore

HOUR = 3600.0
NOW = 1_800_000_000.0


def pending(name: str = "human", **fields: Any) -> PendingPart:
    return PendingPart(name=name, **fields)


def group(index: int, *scores: Score) -> Group:
    episodes = tuple(
        ScoredEpisode(episode=Episode(id=f"g{index}-{n}", task_id=f"t{index}", task_key="k", trajectories=()), score=score)
        for n, score in enumerate(scores)
    )
    return Group(index=index, task_id=f"t{index}", task_key="k", episodes=episodes)


def waiting(*parts: PendingPart, partial: float = 0.0) -> Score:
    return Score(value=None, pending=parts or (pending(),), partial=partial)


def late(episode: str, value: float, *, part: str = "human", key: str = "", by: str = "ann", replace: bool = False) -> LateScore:
    return LateScore(episode_id=episode, part=part, value=value, scored_by=by, key=key or f"{episode}/{part}", replace=replace)


@pytest.fixture(params=[SqliteStore, FolderStore])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ExperienceStore]:
    opened: ExperienceStore = (
        FolderStore(tmp_path, make_recipe()) if request.param is FolderStore else SqliteStore(tmp_path / "experience.sqlite")
    )
    yield opened
    opened.close()


def test_a_parked_group_becomes_ready_with_the_last_part(store: ExperienceStore) -> None:
    partly_scored = waiting(pending(weight=0.5), partial=0.25)
    store.put(group(0, partly_scored, Score(value=1.0), waiting(pending("style"), pending("human", low=-1.0))))
    store.put(group(1, Score(value=1.0), Score(value=0.0)))
    parked, ready = store.entries()
    assert (parked.state, parked.pending, parked.late_parts, parked.counted, parked.has_spread) == ("parked", 3, 3, 1, False)
    assert (ready.state, ready.late_parts, store.parked()) == ("ready", 0, (0,))
    for step, take in enumerate((store.assign, lambda step, indices: store.commit(step, dict.fromkeys(indices, GroupUse()), "c"))):
        with pytest.raises(StoreError):
            take(step, [0])
    assert store.add_score(late("g0-0", 0.5), now=NOW) == ScoreReceipt(group=0, attempt=0, remaining=2, repeated=False)
    assert store.add_score(late("g0-2", -1.0), now=NOW).remaining == 1
    (partly,) = store.groups([0])
    assert [one.score.value for one in partly.episodes] == [0.5, 1.0, None] and [part.name for _, _, part in partly.pending] == ["style"]
    assert store.entries()[0].state == "parked"
    assert store.add_score(late("g0-2", 1.0, part="style"), now=NOW) == ScoreReceipt(group=0, attempt=2, remaining=0, repeated=False)
    (complete,) = store.groups([0])
    assert [scored.score.value for scored in complete.episodes] == [0.5, 1.0, 0.0]
    assert complete.episodes[2].score == Score(value=0.0, parts={"human": -1.0, "style": 1.0})
    assert store.entries()[0] == replace(new_entry(complete), late_parts=3) and store.parked() == ()
    assert store.entries()[0].has_spread and store.entries(first=1) == (store.entries()[0], ready), "late groups are always returned"
    store.commit(0, {0: GroupUse()}, "c")
    assert store.entries(first=1) == (ready,)


CASES: list[tuple[LateScore, float, str]] = [
    (late("g9-0", 1.0), NOW, "unknown"),
    (late("g0-1", 1.0), NOW, "unknown"),  # its score is complete
    (late("g0-0", 1.0, part="style"), NOW, "unknown"),
    (late("g0-0", 1.1), NOW, "out_of_range"),
    (late("g0-0", -0.1), NOW, "out_of_range"),
    (late("g0-0", 1.0), NOW + HOUR, "expired"),
    (late("g0-2", 0.0), NOW, "contradictory"),
    (late("g0-2", 0.0, key="other"), NOW + 2 * HOUR, "contradictory"),
    (late("g0-2", 1.0, by="bob"), NOW, "contradictory"),  # the key of another message
    (late("g0-0", 1.0, key="g0-2/human"), NOW, "contradictory"),
    (late("g1-0", 0.0), NOW, "finished"),
]


@pytest.mark.parametrize(("score", "now", "cause"), CASES, ids=[f"{n}-{case[2]}" for n, case in enumerate(CASES)])
def test_a_score_that_does_not_fit_is_rejected_and_changes_nothing(
    store: ExperienceStore, score: LateScore, now: float, cause: str
) -> None:
    store.put(group(0, waiting(pending(expires_at=NOW + HOUR)), Score(value=1.0), waiting()))
    store.put(group(1, waiting()))
    for episode in ("g0-2", "g1-0"):
        store.add_score(late(episode, 1.0), now=NOW)
    store.commit(0, {1: GroupUse()}, "c")
    before = store.entries(), store.groups([0, 1]), store.pending_scores(limit=9)
    with pytest.raises(ScoreRejected) as error:
        store.add_score(score, now=now)
    assert error.value.cause == cause and repr(score.key if "key" in error.value.message else score.episode_id) in error.value.message
    assert (store.entries(), store.groups([0, 1]), store.pending_scores(limit=9)) == before
    # A repeated message, and another one with the same value, count once.
    for repeated in (late("g0-2", 1.0), late("g0-2", 1.0, key="other"), late("g1-0", 1.0)):
        assert store.add_score(repeated, now=now + 9 * HOUR).repeated


def test_a_score_is_replaced_only_on_request_and_while_its_group_waits(store: ExperienceStore) -> None:
    store.put(group(0, waiting(pending(expires_at=NOW + HOUR)), waiting()))
    store.add_score(late("g0-0", 1.0, key="a"), now=NOW)
    with pytest.raises(ScoreRejected, match="send each score with its own key"):
        store.add_score(late("g0-0", 0.25, key="a", replace=True), now=NOW)
    change = late("g0-0", 0.25, key="b", by="bob", replace=True)
    assert store.add_score(change, now=NOW) == ScoreReceipt(group=0, attempt=0, remaining=1, repeated=False, replaced=1.0)
    assert store.add_score(change, now=NOW + 9 * HOUR).repeated and store.groups([0])[0].episodes[0].score.value == 0.25
    rejected: list[tuple[LateScore, float, str]] = [
        (late("g0-0", 1.0, key="a"), NOW, "contradictory"),  # a delayed copy of the replaced message
        (late("g0-0", 1.0, key="a", replace=True), NOW, "contradictory"),
        (late("g0-1", 1.0, key="a"), NOW, "contradictory"),
        (late("g0-0", 0.5, key="c"), NOW, "contradictory"),
        (late("g0-0", 1.5, key="c", replace=True), NOW, "out_of_range"),
        (late("g0-0", 0.5, key="c", replace=True), NOW + HOUR, "expired"),
    ]
    for score, now, cause in rejected:
        with pytest.raises(ScoreRejected) as error:
            store.add_score(score, now=now)
        assert error.value.cause == cause
    assert store.add_score(late("g0-1", 1.0, key="d", replace=True), now=NOW).replaced is None, "an open part has nothing to replace"
    before = store.groups([0])
    for step, end in enumerate(("waits for no other score", "has been trained")):
        if step:
            store.commit(0, {0: GroupUse()}, "c")
        with pytest.raises(ScoreRejected, match=end) as error:
            store.add_score(late("g0-1", 0.5, key="e", replace=True), now=NOW)
        assert error.value.cause == "finished" and store.groups([0]) == before


def test_an_expired_part_leaves_its_episode_unscored_and_is_final(store: ExperienceStore) -> None:
    both = waiting(pending(expires_at=NOW + HOUR), pending("style"), partial=0.5)
    store.put(group(3, both, waiting(pending(expires_at=NOW + 2 * HOUR)), Score(value=1.0)))
    store.add_score(late("g3-1", 0.5), now=NOW)
    assert store.expire_scores(now=NOW + HOUR - 1) == () and store.parked() == (3,)
    assert store.expire_scores(now=NOW + HOUR) == (3,) and store.expire_scores(now=NOW + HOUR) == ()
    (expired,) = store.groups([3])
    assert expired.episodes[0].score == Score(value=None, reason="late score expired: human"), "never 0, and not the known part"
    assert [scored.score.value for scored in expired.scored] == [0.5, 1.0]
    (entry,) = store.entries()
    assert (entry.state, entry.counted, entry.has_spread) == ("ready", 2, True)
    for part in ("human", "style"):
        with pytest.raises(ScoreRejected, match="has expired"):
            store.add_score(late("g3-0", 1.0, part=part), now=NOW - 1000 * HOUR)  # the clock was set back


def test_pending_scores_are_read_in_pages_of_complete_episodes(store: ExperienceStore) -> None:
    for index in range(3):
        store.put(group(index, waiting(pending("b", high=5.0), pending("a", expires_at=NOW)), waiting(pending("c"))))
    store.add_score(late("g1-0", 1.0, part="a"), now=NOW - 1)
    pages, after = [], ""
    while page := store.pending_scores(limit=2, after=after):
        pages.append([(part.episode_id, part.part) for part in page])
        after = page[-1].episode_id
    assert pages == [
        [("g0-0", "a"), ("g0-0", "b"), ("g0-1", "c")],
        [("g1-0", "b"), ("g1-1", "c")],
        [("g2-0", "a"), ("g2-0", "b"), ("g2-1", "c")],
    ]
    first, second = store.pending_scores(limit=1)
    assert (first.group, first.attempt, first.task_id, first.expires_at, second.high) == (0, 0, "t0", NOW, 5.0)


def test_the_first_version_of_a_block_stays(store: ExperienceStore) -> None:
    store.start_block(3, 1)
    store.start_block(3, 2)
    store.start_block(4, 2)
    assert store.block_versions() == {3: 1, 4: 2}


BAD: list[Callable[[], object]] = [
    lambda: late("e", math.nan),
    lambda: late("e", math.inf),
    lambda: late("", 1.0),
    lambda: late("e" * 201, 1.0),
    lambda: late("e", 1.0, key="k" * 201),
    lambda: pending("p" * 201),
    lambda: pending(low=1.0),
    lambda: pending(high=math.inf),
    lambda: pending(weight=0.0),
    lambda: pending(expires_at=math.inf),
    lambda: waiting(pending(), pending()),
    lambda: waiting(*(pending(str(n)) for n in range(17))),
    lambda: Score(value=1.0, pending=(pending(),)),
    lambda: waiting(partial=math.inf),
]


@pytest.mark.parametrize("build", BAD)
def test_numbers_and_names_are_bounded(build: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"Score|PendingPart"):
        build()


def test_a_sum_that_is_not_finite_gives_no_score() -> None:
    part = pending(high=1e308, weight=1e10)
    assert waiting(part).with_part("human", 1e308) == Score(
        value=None, parts={"human": 1e308}, reason="the sum of the score's parts is not finite"
    )


@given(data=st.data())
@settings(max_examples=examples(25), deadline=None)
def test_the_ledger_always_has_the_counts_of_the_group(data: st.DataObject) -> None:
    """Scores arrive or expire in any order, some of them twice."""
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "experience.sqlite")
        store._connection.execute("PRAGMA synchronous = OFF")
        expiries = [data.draw(st.sampled_from([None, NOW, NOW + HOUR])) for _ in range(6)]
        scores = [waiting(pending("a", expires_at=expiries[n]), pending("b", expires_at=expiries[n + 3])) for n in range(3)]
        store.put(group(0, *scores))
        for _ in range(data.draw(st.integers(1, 9))):
            if data.draw(st.integers(0, 4)):
                episode, part = f"g0-{data.draw(st.integers(0, 2))}", data.draw(st.sampled_from("ab"))
                with suppress(ScoreRejected):
                    value, key = data.draw(st.sampled_from([0.0, 1.0])), data.draw(st.sampled_from("xyz"))
                    score = late(episode, value, part=part, key=f"{episode}{part}{key}", replace=data.draw(st.booleans()))
                    store.add_score(score, now=NOW - 1)
            else:
                store.expire_scores(now=data.draw(st.sampled_from([NOW - 1, NOW, NOW + HOUR])))
            (entry,), (stored,) = store.entries(), store.groups([0])
            assert entry.pending == len([*stored.pending]) == len(store.pending_scores(limit=9)) and entry.late_parts == 6
            assert entry.pending or entry == replace(new_entry(stored), late_parts=6)
            assert all(s.is_absent or s.pending or 0 <= (s.value or 0.0) <= 2 for s in (scored.score for scored in stored.episodes))
        store.close()


def _send(path: str, sender: int, episodes: list[str], barrier: Any, results: Any) -> None:
    store, accepted = SqliteStore(path), 0
    random.Random(sender).shuffle(episodes)
    barrier.wait(300)
    for episode in episodes:
        try:
            accepted += not store.add_score(late(episode, sender / 4, key=f"{episode}-{sender}", by=str(sender)), now=NOW).repeated
        except ScoreRejected as error:
            assert error.cause == "contradictory"
    store.close()
    results.put(accepted)


def test_of_several_processes_that_score_the_same_episodes_one_wins_each(tmp_path: Path) -> None:
    path, groups, attempts = tmp_path / "experience.sqlite", 4, 6
    store = SqliteStore(path)
    for index in range(groups):
        store.put(group(index, *(waiting() for _ in range(attempts))))
    episodes = [f"g{index}-{n}" for index in range(groups) for n in range(attempts)]
    barrier, results = FORKS.Barrier(3), FORKS.Queue()
    senders = [FORKS.Process(target=_send, args=(str(path), n, list(episodes), barrier, results)) for n in range(3)]
    for sender in senders:
        sender.start()
    assert sum(results.get(timeout=300) for _ in senders) == len(episodes)
    for sender in senders:
        sender.join(300)
    for entry, stored in zip(store.entries(), store.groups(range(groups)), strict=True):
        assert entry == replace(new_entry(stored), late_parts=attempts) and entry.counted == attempts
    store.close()


def test_the_clock_of_a_process_ignores_jumps_of_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, start = Clock(), time.time()
    monkeypatch.setattr(time, "time", lambda: start + 1e6)
    assert abs(clock.now() - start) < 10.0
