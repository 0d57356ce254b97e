"""The token rows with which a version is probed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agentrl.learner.publish import PROBE_ROWS, select_probe_rows, write_base_probe
from agentrl.records import Episode, Group, Message, Probe, Score, ScoredEpisode, Trajectory, Turn, VersionSpan
from agentrl.serving.probe import read_probe


def group(index: int, *token_ids: int) -> Group:
    turns = tuple(
        Turn(
            prompt_ids=token_ids[:-1],
            completion_ids=(last,),
            logprobs=(-1.0,),
            versions=(VersionSpan(version=0, start=0, end=1),),
            message=Message(role="assistant", content=""),
            finish_reason="stop",
        )
        for last in token_ids[-1:]
    )
    trajectories = (Trajectory(agent="main", turns=turns),) if turns else ()
    episode = Episode(id=f"e{index}", task_id="t", task_key="k", trajectories=trajectories)
    return Group(index=index, task_id="t", task_key="k", episodes=(ScoredEpisode(episode=episode, score=Score(value=1.0)),))


def test_probe_rows_are_the_ends_of_contexts() -> None:
    groups = tuple(group(index, *range(1000), 2000 + index) for index in range(PROBE_ROWS + 2))
    rows = select_probe_rows(groups, vocabulary=5000, max_model_len=1024)
    assert len(rows) == PROBE_ROWS
    assert [row[-1] for row in rows] == [2000 + index for index in range(PROBE_ROWS)]
    assert all(1 < len(row) <= 128 and row[:-1] == tuple(range(1000))[-len(row) + 1 :] for row in rows)


def test_a_probe_row_is_shorter_than_the_context() -> None:
    (row,) = select_probe_rows((group(0, *range(100)),), vocabulary=5000, max_model_len=64)
    assert len(row) == 63


def test_groups_without_tokens_get_a_fixed_probe_row() -> None:
    (row,) = select_probe_rows((group(0), group(1)), vocabulary=5, max_model_len=64)
    assert row == tuple(token % 5 for token in range(16))


class Counting:
    """A policy of 900 tokens, each followed by the next."""

    image_token = None

    lm = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=900)))
    ranks = SimpleNamespace(is_first=True, from_first=int)

    def probe(self, rows: tuple[tuple[int, ...], ...]) -> Probe:
        return Probe(
            token_ids=rows,
            logprobs=tuple((-1.0,) * (len(row) - 1) for row in rows),
            next_ids=tuple((row[-1] + 1,) for row in rows),
            next_logprobs=((-1.0,),) * len(rows),
        )


def test_the_rows_of_version_0_start_with_ordinary_tokens_and_continue_greedily(tmp_path: Path) -> None:
    """Tokens at the ends of the vocabulary, which may be control tokens, are avoided."""
    folder = tmp_path / "versions" / "000000"
    folder.mkdir(parents=True)
    engine: Any = Counting()
    access: Any = SimpleNamespace(folder=tmp_path, base_probe_written=lambda: None)
    write_base_probe(access, engine)
    probe = read_probe(folder)
    assert probe is not None and probe.token_ids == (tuple(range(300, 312)), tuple(range(600, 612)))
    (folder / "probe.json").write_text("{}")
    write_base_probe(access, engine)
    assert (folder / "probe.json").read_text() == "{}", "a resumed run keeps its probe"
