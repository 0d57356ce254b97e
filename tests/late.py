"""A run folder with groups that wait for late scores, as a killed or live driver leaves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.experience import SqliteStore
from agentrl.records import (
    Episode,
    Group,
    Message,
    PendingPart,
    SandboxSpec,
    Score,
    ScoredEpisode,
    Split,
    Task,
    ToolResult,
    Trajectory,
    Turn,
    VersionSpan,
)
from agentrl.session.transcript import PendingTranscripts
from tests.driving import make_recipe

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\u202e"
REVIEW = PendingPart(name="review", low=0.0, high=1.0)


def late_task(index: int, question: str = "How many?") -> Task:
    return Task(
        id=f"t{index}",
        family="f",
        prompt=(Message(role="user", content=question),),
        tools=("python", "submit"),
        sandbox=SandboxSpec(image="none"),
        verifiers=(),
        data={"answer": "412"},
        split=Split.TRAIN,
    )


def late_group(index: int, *parts: PendingPart, size: int = 2, answer: str = HOSTILE) -> Group:
    """`size` attempts, each of which waits for the parts."""
    turn = Turn(
        prompt_ids=(1, 2, 3),
        completion_ids=(4, 5),
        logprobs=(-0.1, -0.2),
        versions=(VersionSpan(version=3, start=0, end=2),),
        message=Message(role="assistant", content=answer),
        tool_results=(ToolResult(name="python", output=answer, ok=True),),
        finish_reason="stop",
    )
    task = late_task(index)
    trajectory = Trajectory(agent="main", turns=(turn,))
    episodes = [
        Episode(id=f"g{index}-{attempt}", task_id=task.id, task_key=task.key, trajectories=(trajectory,), answer=answer)
        for attempt in range(size)
    ]
    scored = tuple(ScoredEpisode(episode=episode, score=Score(value=None, pending=parts or (REVIEW,))) for episode in episodes)
    return Group(index=index, task_id=task.id, task_key=task.key, episodes=scored)


def write_run(folder: Path, *groups: Group, question: str = "How many?") -> Path:
    """Writes a run folder with these groups and returns it."""
    folder.mkdir()
    (folder / "recipe.json").write_text(make_recipe().model_dump_json())
    with opened_store(folder) as store:
        for group in groups:
            PendingTranscripts(folder).write(late_task(group.index, question), group, step=0)
            store.put(group)
    return folder


@contextmanager
def opened_store(folder: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(folder / "experience.sqlite")
    try:
        yield store
    finally:
        store.close()
