"""inspect's conformance checks of a sandbox as samples of a task: the score of a sample is whether its check passes."""

import inspect

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import Score, mean, scorer
from inspect_ai.solver import solver
from inspect_ai.util import sandbox
from inspect_ai.util._sandbox import self_check

CHECKS = {name: check for name, check in vars(self_check).items() if name.startswith("test_") and inspect.iscoroutinefunction(check)}


@solver
def run_check():
    async def solve(state, generate):
        try:
            await CHECKS[state.input_text](sandbox())
            state.metadata["failed"] = ""
        except BaseException as error:
            state.metadata["failed"] = f"{type(error).__name__}: {error}"
            raise
        return state

    return solve


@scorer(metrics=[mean()])
def passed():
    async def score(state, target):
        failed = state.metadata.get("failed", "did not run")
        return Score(value=0 if failed else 1, explanation=failed)

    return score


@task
def checks():
    return Task(
        dataset=MemoryDataset([Sample(id=name, input=name) for name in CHECKS]), solver=run_check(), scorer=passed(), sandbox="docker"
    )
