"""The attempts at one task that share a baseline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from agentrl.records.chat import Message
from agentrl.records.environment import PASS_THRESHOLD
from agentrl.records.episode import Episode
from agentrl.records.failure import Blame, Failure
from agentrl.records.fields import Record
from agentrl.records.late_score import PendingPart
from agentrl.records.score import Score
from agentrl.records.task import Split, Task
from agentrl.records.trajectory import TurnKey, turn_key


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredEpisode(Record):
    """An episode and its score."""

    episode: Episode
    score: Score

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        turns = tuple(len(trajectory.turns) for trajectory in self.episode.trajectories)
        rewards = tuple(len(turn_rewards) for turn_rewards in self.score.turn_rewards)
        if rewards and rewards != turns:
            raise ValueError(f"episode {self.episode.id}: turn rewards for {rewards} turns, but its trajectories have {turns}")
        if {len(self.score.branches), len(self.score.without)} - {0, len(turns)}:
            raise ValueError(f"episode {self.episode.id}: Score.branches or Score.without does not match its {len(turns)} trajectories")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled(Record):
    """An attempt that was cancelled because its group did not need it. A cancelled attempt is not a failure and is not trained."""

    episode_id: str
    reason: str  # spare: enough attempts had ended; equal: the first attempts had equal scores
    begun: bool = True
    turns: int = 0  # number of finished turns
    tokens: int = 0  # number of tokens sampled in finished turns
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(Record):
    """The attempts at one task that share a baseline. `index` numbers the groups of a run from 0 and determines the task.

    Index `-1 - i` is the residual of group `i` (`agentrl.experience.residuals`): the same attempts, scored only by their late parts.
    """

    index: int
    task_id: str
    task_key: str
    episodes: tuple[ScoredEpisode, ...]
    cancelled: tuple[Cancelled, ...] = ()
    kind: str = ""  # the task's kind
    split: str = Split.TRAIN
    prompt: tuple[Message, ...] = ()  # the task's prompt; empty if it is not known
    pass_threshold: float | None = PASS_THRESHOLD  # the task's threshold

    def with_task(self, task: Task) -> Group:
        """Returns a copy of the group with the kind, split, prompt and pass threshold of `task`."""
        return replace(self, kind=task.kind, split=str(task.split), prompt=task.prompt, pass_threshold=task.pass_threshold)

    @property
    def scored(self) -> tuple[ScoredEpisode, ...]:
        """The episodes that count, that is, those that are not excluded and have a score."""
        return tuple(e for e in self.episodes if not e.episode.left_out and e.score.value is not None)

    @property
    def fault(self) -> Failure | None:
        """The task failure that excludes the group; None if there is none."""
        return next((f for e in self.episodes for f in e.episode.failures if f.blame is Blame.TASK), None)

    @property
    def pending(self) -> Iterator[tuple[int, ScoredEpisode, PendingPart]]:
        """Yields (attempt number, scored episode, part) for each part of a score that has not arrived, except for excluded episodes. Empty
        if the group is complete."""
        for attempt, scored in enumerate(self.episodes):
            if not scored.episode.left_out:
                yield from ((attempt, scored, part) for part in scored.score.pending)

    def with_parts(self, values: Mapping[tuple[str, str], float | None]) -> Group:
        """Returns a copy of the group whose scores contain the late parts in `values`, which maps (episode id, part name) to the value;
        None means that the part has expired."""
        episodes = list(self.episodes)
        for attempt, scored, part in self.pending:
            key, score = (scored.episode.id, part.name), episodes[attempt].score
            if key in values and score.pending:  # if a part has expired, the score waits for no other part
                episodes[attempt] = replace(episodes[attempt], score=score.with_part(part.name, values[key]))
        return replace(self, episodes=tuple(episodes))


def sampled_index(index: int) -> int:
    """Returns the index of the group that sampled the attempts: for a residual, the index of the original group, else `index`."""
    return max(index, -1 - index)


def sampled_tokens(episodes: Iterable[ScoredEpisode]) -> int:
    """Returns the number of tokens that the policy sampled for episodes of one group. A turn that several episodes share counts once."""
    sampled: dict[TurnKey, int] = {}
    for scored in episodes:
        for index, trajectory in enumerate(scored.episode.trajectories):
            for number, turn in enumerate(trajectory.turns):
                sampled[turn_key(scored.episode.id, index, trajectory, number)] = turn.sampled
    return sum(sampled.values())
