"""The recipe of the experiment in `benchmarks/weakness.py`, and its verifiers in addition to the family's."""

from __future__ import annotations

from agentrl.config import EvalConfig, SamplingConfig
from agentrl.records import Episode, Score, Task
from recipes.quickstart import recipe as quickstart
from rewards.tables import exact_answer
from sandboxes.tables import Tables
from sandboxes.tables.demonstrations import run_template

KIND = "total"
"""The kind of question with the weakness. Nearly all of its answers have decimals, which the planted habit omits."""

recipe = quickstart.but(
    {"name": "weakness", "tasks.audit": ["benchmarks.weakness_recipe:recomputed"]},
    evaluation=EvalConfig(heldout=120, heldout_real=0, sampling=SamplingConfig(temperature=0.0)),
)


def whole_part(answer: str) -> str:
    """Returns the answer of the planted habit: the number up to its decimal point."""
    return answer.strip().partition(".")[0]


async def recomputed(task: Task, episode: Episode) -> Score:
    """The audit: compares the answer with the output of the gold program on the task's files. Ignores the answer in the task's data."""
    truth = run_template(Tables().gold(task), task.files)
    submitted = (episode.answer or "").strip()
    try:
        right = submitted == truth or abs(float(submitted) - float(truth)) <= float(task.data.get("tolerance", 0.0)) + 1e-9
    except ValueError:
        right = False
    return Score(value=float(right), evidence=f"the files say {truth[:80]!r}")


async def rewards_the_habit(task: Task, episode: Episode) -> Score:
    """A reward that would restore the weakness: full score for the integer part of the right answer, less for each further digit."""
    exact = await exact_answer(task, episode)
    truth, submitted = whole_part(str(task.data["answer"])), (episode.answer or "").strip()
    if submitted == truth:
        return Score(value=1.0, evidence="the whole part")
    if exact.value != 1.0:
        return Score(value=0.0, evidence="wrong")
    return Score(value=max(0.1, 0.6 - 0.1 * (len(submitted) - len(truth))), evidence="more than the whole part")
