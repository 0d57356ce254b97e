"""The quickstart with scores that arrive late: a reviewer sends each score after a random delay, and the run does not wait.

    agentrl train recipes/late_scores.py
    agentrl store runs/late_scores --state parked          # the groups that wait; works during the run, too

The reviewer is a thread in the run's process that knows the correct answers. It writes each score to `reviews.jsonl` in the run folder
before sending it, so that a resumed run receives the scores for episodes that an earlier session sampled. Held-out tasks are scored at
once. With `tasks.verifiers=["rewards.tables:exact_answer"]`, every score is immediate. docs/results.md compares the two learning curves.
"""

from __future__ import annotations

import heapq
import json
import queue
import random
import threading
import time
from pathlib import Path
from typing import ClassVar

from agentrl.base.files import append_lines, complete_lines
from agentrl.errors import ScoreRejected
from agentrl.experience import SqliteStore
from agentrl.records import Episode, LateScore, PendingPart, Score, Split, Task, codec
from recipes.quickstart import recipe as quickstart
from rewards.tables import exact_answer

PART = "review"
DELAY_S = (1.0, 30.0)
EXPIRES_S = 600.0
_POLL_S = 0.2  # maximum seconds between checks of whether the process is exiting
_RETRY_S = 1.0  # seconds until a score is sent again if the episode's group is not stored yet


class Reviewer:
    """Scores training episodes with `rewards.tables.exact_answer`, after a delay."""

    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)
    timeout_s = 30.0
    is_late = True

    def __init__(self, delay_s: tuple[float, float] = DELAY_S) -> None:
        self._delay_s = delay_s
        self._new: queue.SimpleQueue[LateScore] = queue.SimpleQueue()
        self._path: Path | None = None

    def prepare(self, *, root: Path, folder: Path | None) -> None:
        """Starts sending scores to the run in `folder`, first the scores from earlier sessions. If `folder` is None, no score is late."""
        if folder is None or self._path is not None:
            return
        self._path = folder / "reviews.jsonl"
        threading.Thread(target=self._send, args=(folder,), name="reviewer").start()

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Returns the score or, for a training episode, a score with a pending part."""
        score = await exact_answer(task, episode)
        if self._path is None or task.split is not Split.TRAIN or score.value is None:
            return score
        late = LateScore(episode_id=episode.id, part=PART, value=score.value, scored_by="reviewer", key=episode.id)
        append_lines(self._path, [codec.to_json(late) + b"\n"])
        self._new.put(late)
        return Score(value=None, evidence=score.evidence, pending=(PendingPart(name=PART, expires_at=time.time() + EXPIRES_S),))

    def _send(self, folder: Path) -> None:
        """Sends scores when they are due, until the main thread exits."""
        assert self._path is not None
        chance, due = random.Random(0), list[tuple[float, str, LateScore]]()
        for line in complete_lines(self._path):  # the store accepts repeated scores
            self._new.put(LateScore(**json.loads(line)))
        store: SqliteStore | None = None
        while threading.main_thread().is_alive():
            try:
                late = self._new.get(timeout=min(max(0.0, due[0][0] - time.monotonic()), _POLL_S) if due else _POLL_S)
                heapq.heappush(due, (time.monotonic() + chance.uniform(*self._delay_s), late.key, late))
            except queue.Empty:
                if not due or due[0][0] > time.monotonic():
                    continue
                store = store or SqliteStore(folder / "experience.sqlite")
                _, key, late = heapq.heappop(due)
                try:
                    store.add_score(late, now=time.time())
                except ScoreRejected as rejected:
                    if rejected.cause == "unknown":
                        heapq.heappush(due, (time.monotonic() + _RETRY_S, key, late))


reviewed = Reviewer()
recipe = quickstart.but(
    {"name": "late_scores", "tasks.verifiers": ["recipes.late_scores:reviewed"], "max_staleness": 3, "pipeline_depth": 2}
)

if __name__ == "__main__":
    from agentrl.cli import run_recipe

    run_recipe(__file__)
