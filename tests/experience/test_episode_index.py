"""The index of episodes agrees with the stored groups for any filter, order and page, and can be read safely during a run."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import AgentRLError, StoreError, UserError
from agentrl.experience import SqliteStore, episode_index, episode_query
from agentrl.experience.episode_index import EpisodeIndex, EpisodeRow
from agentrl.experience.episode_query import EpisodeQuery
from agentrl.experience.episode_rows import outcome
from agentrl.experience.index_copy import OlderStore, copy_episodes
from agentrl.records import (
    Blame,
    Episode,
    Failure,
    Group,
    GroupUse,
    LateScore,
    Message,
    PendingPart,
    Score,
    ScoredEpisode,
    ToolCall,
    Trajectory,
    Turn,
    VersionSpan,
)
from tests.strategies import numbered, records

WORDS = ("alpha", "beta", "gamma")


def episode(
    name: str, *, score: Score, tools: Sequence[str] = (), version: int = 0, text: str = "", tokens: int = 1, blame: Blame | None = None
) -> ScoredEpisode:
    calls = tuple(ToolCall(name=tool, arguments={}) for tool in tools)
    turn = Turn(
        prompt_ids=(1,),
        completion_ids=(2,) * tokens,
        logprobs=(-0.5,) * tokens,
        versions=(VersionSpan(version=version, start=0, end=tokens),),
        message=Message(role="assistant", content=text, tool_calls=calls),
        finish_reason="stop",
        ended_at=1000.0 + tokens,
    )
    failures = () if blame is None else (Failure(stage="tool", blame=blame, kind=f"{blame}_kind", message="broke"),)
    trajectory = Trajectory(agent="main", turns=(turn,), stop_reason="submitted" if blame is None else "failed")
    record = Episode(id=name, task_id="t", task_key="k", trajectories=(trajectory,), failures=failures, wall_s=tokens / 4)
    return ScoredEpisode(episode=record, score=score)


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    drawn = []
    for index in range(draw(st.integers(1, 6))):
        attempts = []
        for attempt in range(draw(st.integers(1, 4))):
            value = draw(st.none() | st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]))
            attempts.append(
                episode(
                    f"g{index:06d}-{attempt}-a0",
                    score=Score(value=value, reason="" if value is not None else "broken verifier"),
                    tools=draw(st.lists(st.sampled_from(["python", "submit"]), max_size=3)),
                    version=draw(st.integers(0, 2)),
                    text=" ".join(draw(st.lists(st.sampled_from(WORDS), max_size=3))),
                    tokens=draw(st.integers(1, 4)),
                    blame=draw(st.none() | st.sampled_from(list(Blame))),
                )
            )
        kind = draw(st.sampled_from(["join", "count"]))
        drawn.append(Group(index=index, task_id=f"t{index}", task_key="k", episodes=tuple(attempts), kind=kind))
    return drawn


queries = st.builds(
    EpisodeQuery,
    text=st.sampled_from(["", "", "alpha", "beta gamma", "gam*"]),
    kind=st.sampled_from(["", "", "join", "other"]),
    outcome=st.sampled_from(["", "", "solved", "failed", "excluded"]),
    tool=st.sampled_from(["", "", "python"]),
    exclusion=st.sampled_from(["", "", "task_kind"]),
    min_score=st.none() | st.sampled_from([-1.0, 0.5]),
    max_score=st.none() | st.sampled_from([0.5, 1.0]),
    version=st.none() | st.integers(0, 2),
    min_tokens=st.none() | st.integers(1, 4),
    step=st.none() | st.integers(1, 2),
    group=st.none() | st.integers(0, 3),
    sort=st.sampled_from(["newest", "score", "tokens", "turns", "seconds"]),
    descending=st.booleans(),
    limit=st.integers(1, 5),
)


def expected(stored: list[Group], query: EpisodeQuery) -> list[str]:
    """Returns the ids of the matching episodes in order, computed from the groups."""
    results = []
    for number, (group, scored) in enumerate((owner, attempt) for owner in stored for attempt in owner.episodes):
        (turn,) = scored.episode.trajectories[0].turns
        excluded = scored.episode.left_out or scored.score.value is None
        value = None if excluded else scored.score.value
        outcome = "excluded" if value is None else "solved" if value >= 1 else "failed" if value <= 0 else "partial"
        words = turn.message.content.split()
        step = 1 + group.index // 2
        failure = next((fault.kind for fault in scored.episode.failures if fault.blame is not Blame.POLICY), "")
        exclusion = failure or ("unscored" if excluded else "")
        matches = (
            all(any(word.startswith(part[:-1]) if part[-1] == "*" else word == part for word in words) for part in query.text.split())
            and query.kind in ("", group.kind)
            and query.outcome in ("", outcome)
            and (not query.tool or query.tool in [call.name for call in turn.message.tool_calls])
            and query.exclusion in ("", exclusion)
            and (query.min_score is None or (value is not None and value >= query.min_score))
            and (query.max_score is None or (value is not None and value <= query.max_score))
            and query.version in (None, turn.versions[0].version)
            and (query.min_tokens is None or len(turn.completion_ids) >= query.min_tokens)
            and query.step in (None, step)
            and query.group in (None, group.index)
        )
        if matches:
            order = {"newest": 0.0, "score": -1e308 if value is None else value, "turns": 1, "seconds": scored.episode.wall_s}
            results.append((order.get(query.sort, len(turn.completion_ids)), number, scored.episode.id))
    return [name for _, _, name in sorted(results, reverse=query.descending)]


def store_in(folder: Path, stored: list[Group]) -> SqliteStore:
    """Returns a store whose steps have two groups each."""
    store = SqliteStore(folder / "experience.sqlite")
    store.put_all(stored)
    for step in range(-(-len(stored) // 2)):
        store.assign(step, [group.index for group in stored[2 * step : 2 * step + 2]])
    return store


def pages(index: EpisodeIndex, query: EpisodeQuery) -> Iterator[episode_index.EpisodePage]:
    while True:
        page = index.search(query)
        yield page
        if not page.next:
            return
        query = replace(query, after=page.next)


@pytest.mark.slow
@given(groups(), st.lists(queries, min_size=8, max_size=8), st.sampled_from([3, 10_000]), st.sampled_from([0, 10_000]))
@settings(max_examples=15)
def test_any_query_returns_its_matches_in_pages(stored: list[Group], several: list[EpisodeQuery], max_total: int, rare: int) -> None:
    """A low `max_total` uses the order of an index, a high one the list of matches. `rare` does the same for calls of a tool."""
    with tempfile.TemporaryDirectory() as folder, closing(store_in(Path(folder), stored)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(episode_index, "MAX_TOTAL", max_total)
        patch.setattr(episode_query, "_RARE", rare)
        with EpisodeIndex(Path(folder)) as index:
            for query in several:
                results = list(pages(index, query))
                rows = [row for page in results for row in page.rows]
                names = expected(stored, query)
                assert [row.id for row in rows] == names, query
                assert all(0 < len(page.rows) <= query.limit for page in results[:-1])
                exact = query.is_all or len(names) <= max_total
                assert {(page.total, page.is_exact) for page in results} == {(len(names) if exact else max_total, exact)}
                assert sorted(row.number for row in rows) == index.numbers(query)
            everything = index.numbers(EpisodeQuery())
            episodes = [(group, scored) for group in stored for scored in group.episodes]
            assert [(record.group, record.scored) for record in index.records(everything)] == episodes
            facets = index.facets()
            assert facets.episodes == len(episodes) and facets.kinds == Counter(group.kind for group, _ in episodes)
            assert facets.tools.get("python", 0) == len(index.numbers(EpisodeQuery(tool="python")))


@pytest.mark.slow
@given(st.lists(records(Group), max_size=3))
def test_any_group_can_be_indexed(drawn: list[Group]) -> None:
    """Names, texts and numbers chosen by a model, a sandbox or a worker never prevent a group from being stored."""
    with tempfile.TemporaryDirectory() as folder, closing(SqliteStore(Path(folder) / "experience.sqlite")) as store:
        stored = store.put_all(numbered(drawn))
        with EpisodeIndex(Path(folder)) as index:
            page = index.search(EpisodeQuery(limit=1000))
            assert all(stored) and len(page.rows) == sum(len(group.episodes) for group in drawn)
            assert len(list(index.records(index.numbers(EpisodeQuery())))) == len(page.rows)
            index.facets()


def test_a_row_has_the_figures_of_its_episode_and_the_state_of_its_group(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "experience.sqlite")
    turns = tuple(
        replace(
            episode("x", score=Score(value=1.0), tools=tools, version=version, tokens=2).episode.trajectories[0].turns[0],
            ended_at=50.0 + version,
        )
        for version, tools in ((3, ["submit", "python"]), (5, ["python"]))
    )
    played = Episode(id="e", task_id="t7", task_key="k", trajectories=(Trajectory(agent="main", turns=turns),), wall_s=2.5)
    score = Score(value=0.5, parts={"format": 1.0, "odd": float("inf")})
    group = Group(index=7, task_id="t7", task_key="k", episodes=(ScoredEpisode(episode=played, score=score),), kind="join", split="train")
    store.put(group)
    store.commit(2, {7: GroupUse(tokens_trained=4)}, "c")
    with EpisodeIndex(tmp_path) as index:
        row = index.row("e")
        assert row == EpisodeRow(
            number=1,
            id="e",
            group=7,
            attempt=0,
            step=3,
            state="trained",
            unused="",
            phase="train",
            task_id="t7",
            kind="join",
            split="train",
            outcome="partial",
            stop_reason="submitted",
            score=0.5,
            parts={"format": 1.0},
            exclusion="",
            blame="",
            oldest_version=3,
            newest_version=5,
            tokens=4,
            turns=2,
            tools=("submit", "python"),
            seconds=2.5,
            sampled_at=55.0,
        )
        record = index.episode("e")
        assert record is not None and record.group == group and record.scored == group.episodes[0]
        assert index.group(7) == group
        assert index.episode("none") is None and index.group(8) is None
    store.close()


def test_a_late_score_updates_the_row(tmp_path: Path) -> None:
    store, pending = SqliteStore(tmp_path / "experience.sqlite"), Score(value=None, pending=(PendingPart(name="review"),), partial=0.25)
    for index in range(2):
        store.put(Group(index=index, task_id="t", task_key="k", episodes=(episode(f"e{index}", score=pending),)))
    with EpisodeIndex(tmp_path) as index:
        assert {(row.outcome, row.state, row.score) for row in index.search(EpisodeQuery()).rows} == {("pending", "parked", None)}
        store.add_score(LateScore(episode_id="e0", part="review", value=1.0, scored_by="ann", key="1"), now=10.0)
        (row,) = index.search(EpisodeQuery(outcome="solved")).rows
        assert (row.id, row.score, row.parts, row.state) == ("e0", 1.25, {"review": 1.0}, "ready")
        record = index.episode("e0")
        assert record is not None and record.scored.score.value == 1.25
    store.close()


def test_a_repeated_evaluation_replaces_the_episodes_of_the_first(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "experience.sqlite")
    store.put(Group(index=0, task_id="t", task_key="k", episodes=(episode("g000000-0-a0", score=Score(value=1.0)),)))

    def evaluate(value: float, text: str) -> None:
        store.delete_evaluated("step8")
        scored = (episode("step8-heldout-00000-a0", score=Score(value=value), text=text, tools=["python"]),)
        store.put_evaluated("step8", 8, Group(index=0, task_id="h", task_key="k", episodes=scored, split="heldout", kind="join"))

    evaluate(0.0, "alpha")
    evaluate(1.0, "beta")
    with EpisodeIndex(tmp_path) as index:
        (row,) = index.search(EpisodeQuery(phase="step8")).rows
        assert (row.state, row.step, row.group, row.split, row.score) == ("evaluated", 8, None, "heldout", 1.0)
        record = index.episode(row.id)
        assert record is not None and record.scored.score.value == 1.0 and record.group.kind == "join"
        assert [len(index.numbers(EpisodeQuery(text=text))) for text in ("alpha", "beta")] == [0, 1]
        assert len(index.numbers(EpisodeQuery(tool="python"))) == 1 and index.facets().episodes == 2
    assert store.entries()[0].index == 0 and len(store.entries()) == 1, "evaluations are not groups of the ledger"
    store.close()


def test_a_residual_adds_no_episode(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "experience.sqlite")
    late = Score(value=None, pending=(PendingPart(name="review", residual=True),), partial=0.25)
    store.put(Group(index=0, task_id="t", task_key="k", episodes=(episode("e", score=late),)))
    assert store.has(-1)
    store.add_score(LateScore(episode_id="e", part="review", value=1.0, scored_by="ann", key="1"), now=10.0)
    with EpisodeIndex(tmp_path) as index:
        (row,) = index.search(EpisodeQuery()).rows
        assert (row.group, row.score, row.outcome) == (0, 0.25, "partial"), "the score of its first training step"
    store.close()


@pytest.mark.parametrize(
    "query", [EpisodeQuery(after="x"), EpisodeQuery(after="1:nan"), EpisodeQuery(text="***"), EpisodeQuery(group=1 << 70)]
)
def test_an_invalid_query_is_an_error_of_the_user(tmp_path: Path, query: EpisodeQuery) -> None:
    with closing(store_in(tmp_path, [])), EpisodeIndex(tmp_path) as index, pytest.raises(UserError):
        index.search(query)


@pytest.mark.parametrize(
    "text", ['"', "alpha OR beta", "text:alpha", "NEAR(alpha)", "alpha\0", "(", "al\ud800", "x" * 5000, "-alpha", "^alpha"]
)
def test_the_syntax_of_the_full_text_search_is_only_text(tmp_path: Path, text: str) -> None:
    group = Group(index=0, task_id="t", task_key="k", episodes=(episode("e", score=Score(value=1.0), text="alpha beta"),))
    with closing(store_in(tmp_path, [group])), EpisodeIndex(tmp_path) as index:
        try:
            results = index.search(EpisodeQuery(text=text)).total
        except UserError as error:
            assert "no word" in str(error)
        else:
            assert results == (text in ("alpha\0", "-alpha", "^alpha"))


def test_a_run_without_episodes_or_index_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        EpisodeIndex(tmp_path)
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(UserError, match="no stored groups yet"):
        EpisodeIndex(tmp_path)


def older_store(folder: Path, groups_to_store: list[Group]) -> None:
    """A store of schema 4, which has no table of episodes."""
    store_in(folder, groups_to_store).close()
    with closing(sqlite3.connect(folder / "experience.sqlite")) as db:
        for name in ("episodes", "labels", "evaluated", "episode_tools", "episode_text"):
            db.execute(f"DROP TABLE {name}")
        db.execute("PRAGMA user_version = 4")
        db.commit()


def test_groups_without_episodes_are_not_copied(tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / "experience.sqlite", keep_steps=1)) as store:
        for step in range(3):
            store.put(Group(index=step, task_id="t", task_key="k", episodes=(episode(f"e{step}", score=Score(value=1.0)),)))
            store.commit(step, {step: GroupUse(tokens_trained=2)}, "c")
        assert copy_episodes(tmp_path, store) == 1
    with EpisodeIndex(tmp_path) as index:
        assert [record.group.index for record in index.records(index.numbers(EpisodeQuery()))] == [2]


def test_the_episodes_of_an_older_store_are_copied_and_the_store_does_not_change(tmp_path: Path) -> None:
    stored = [Group(index=n, task_id="t", task_key="k", episodes=(episode(f"e{n}", score=Score(value=1.0)),)) for n in range(40)]
    older_store(tmp_path, stored)
    before = (tmp_path / "experience.sqlite").read_bytes()
    with pytest.raises(UserError, match="no index"):
        EpisodeIndex(tmp_path)
    with closing(OlderStore(tmp_path / "experience.sqlite")) as older:
        assert not older.has_index and copy_episodes(tmp_path, older) == 40
        with pytest.raises(StoreError):
            older.put(stored[0])
        assert copy_episodes(tmp_path, older) == 40, "a copy is replaced"
    with EpisodeIndex(tmp_path) as index:
        assert [record.group for record in index.records(index.numbers(EpisodeQuery()))] == stored
        assert {row.step for row in index.search(EpisodeQuery(limit=100)).rows} == set(range(1, 21))
    assert (tmp_path / "experience.sqlite").read_bytes() == before
    assert {path.name.removesuffix("-shm").removesuffix("-wal") for path in tmp_path.iterdir()} == {"experience.sqlite", "episodes.sqlite"}


def test_a_reader_sees_each_commit_and_does_not_stop_the_writer(tmp_path: Path) -> None:
    with closing(store_in(tmp_path, [])) as store, EpisodeIndex(tmp_path) as index:
        for number in range(5):
            store.put(Group(index=number, task_id="t", task_key="k", episodes=(episode(f"e{number}", score=Score(value=1.0)),)))
            assert index.search(EpisodeQuery()).total == number + 1


@pytest.mark.parametrize("position", range(0, 40_000, 1301))
def test_a_damaged_store_is_a_clear_error(tmp_path_factory: pytest.TempPathFactory, intact: Path, position: int) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    path = folder / "experience.sqlite"
    content = bytearray(intact.read_bytes())
    content[position % len(content) : position % len(content) + 400] = b"\xff" * 400
    path.write_bytes(content)
    try:
        with EpisodeIndex(folder, timeout_s=2.0) as index:
            for row in index.search(EpisodeQuery(limit=1000)).rows:
                index.episode(row.id)
            index.search(EpisodeQuery(text="alpha"))
            index.search(EpisodeQuery(sort="score", tool="python"))
            index.facets()
    except AgentRLError as error:
        assert str(path) in str(error)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("intact")
    stored = [
        Group(
            index=index, task_id="t", task_key="k", episodes=(episode(f"e{index}", score=Score(value=1.0), tools=["python"], text="alpha"),)
        )
        for index in range(60)
    ]
    store_in(folder, stored).close()
    return folder / "experience.sqlite"


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE episodes SET parts = '[1]'",
        "UPDATE episodes SET kind = 77",
        "UPDATE episodes SET tokens = 'many'",
        "UPDATE episodes SET tools = x'ff'",
        "UPDATE episodes SET parts = printf('%.*c', 100000, '[')",
        "UPDATE episodes SET attempt = 5",
        "DELETE FROM groups",
        "CREATE VIEW v AS SELECT 1",
    ],
)
def test_rows_that_agentrl_does_not_write_are_a_clear_error(tmp_path: Path, intact: Path, change: str) -> None:
    shutil.copy(intact, tmp_path / "experience.sqlite")
    with closing(sqlite3.connect(tmp_path / "experience.sqlite")) as db:
        db.execute(change)
        db.commit()
    with pytest.raises(StoreError, match=r"experience\.sqlite"), EpisodeIndex(tmp_path) as index:
        index.search(EpisodeQuery())
        index.episode("e1")


def test_a_store_that_is_a_link_out_of_the_folder_is_not_read(tmp_path: Path, intact: Path) -> None:
    (tmp_path / "experience.sqlite").symlink_to(intact)
    with pytest.raises(StoreError, match="link"):
        EpisodeIndex(tmp_path)


def test_a_query_that_takes_too_long_ends(tmp_path: Path, intact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(intact, tmp_path / "experience.sqlite")
    monkeypatch.setattr("agentrl.base.database._STEPS", 1)
    with EpisodeIndex(tmp_path) as index:
        index._timeout_s = -1.0
        with pytest.raises(StoreError, match="took longer"):
            index.search(EpisodeQuery(text="alpha"))


def test_a_read_only_folder_can_be_read(tmp_path: Path, intact: Path) -> None:
    shutil.copy(intact, tmp_path / "experience.sqlite")
    results: list[Any] = []
    tmp_path.chmod(0o500)
    try:
        with EpisodeIndex(tmp_path) as index:
            results = list(index.search(EpisodeQuery(limit=3)).rows)
    finally:
        tmp_path.chmod(0o700)
    assert len(results) == 3


@pytest.mark.parametrize(
    ("value", "threshold", "expected"),
    [
        (9.0, 475.0, "partial"),
        (480.0, 475.0, "solved"),
        (-80.0, -100.0, "solved"),
        (-150.0, -100.0, "failed"),
        (2.0, None, "partial"),
        (0.0, 1.0, "failed"),
        (None, None, "excluded"),
    ],
)
def test_the_outcome_depends_on_the_threshold_of_the_task(value: float | None, threshold: float | None, expected: str) -> None:
    assert outcome(episode("e", score=Score(value=value, reason="" if value is not None else "none")), threshold) == expected
