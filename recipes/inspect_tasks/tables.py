"""A task set for inspect_ai: the quickstart's questions about tables, with inspect's own agent, tools and scorer.

inspect eval recipes/inspect_tasks/tables.py --model ...        # as an evaluation
agentrl train recipes/inspect_tables.py                         # as training tasks
"""

from inspect_ai import Task, task
from inspect_ai.agent import AgentSubmit, react
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import Score, Target, accuracy, scorer
from inspect_ai.solver import TaskState
from inspect_ai.tool import Tool, tool
from inspect_ai.util import sandbox

from agentrl.records import Split
from rewards.tables import says
from sandboxes.tables import Tables


@tool
def python() -> Tool:
    async def execute(code: str) -> str:
        """Runs Python code and returns what it prints.

        Args:
            code: Python source.
        """
        result = await sandbox().exec(["python3", "-I", "-c", code], timeout=10)
        return "\n".join(text for text in (result.stdout.rstrip(), result.stderr.rstrip()) if text)[-400:]

    return execute


@tool
def submit() -> Tool:
    async def execute(answer: str) -> str:
        """Hands in the answer.

        Args:
            answer: The answer.
        """
        return answer

    return execute


@scorer(metrics=[accuracy()])
def exact():
    async def score(state: TaskState, target: Target) -> Score:
        answer = state.output.completion[:1000]
        return Score(value="C" if says(answer, target.text, state.metadata["tolerance"]) else "I", answer=answer)

    return score


@task
def tables(count: int = 2000, seed: int = 0, kinds: str = "") -> Task:
    family = Tables(seed, kinds=kinds)
    tasks = [family.task(Split.TRAIN, index) for index in range(count)]
    samples = [
        Sample(
            id=each.id,
            input=each.prompt[0].content,
            target=str(each.data["answer"]),
            files=dict(each.files),
            metadata={"tolerance": each.data["tolerance"]},
        )
        for each in tasks
    ]
    agent = react(prompt=None, tools=[python()], submit=AgentSubmit(tool=submit(), answer_only=True))
    return Task(dataset=MemoryDataset(samples), solver=agent, scorer=exact(), sandbox="docker")
