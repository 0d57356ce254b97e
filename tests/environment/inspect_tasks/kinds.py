"""inspect tasks whose samples score, fail and end in every way. The id of a sample names the way."""

import anyio
from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageSystem, ChatMessageUser, get_model
from inspect_ai.scorer import Score, includes, mean, scorer
from inspect_ai.solver import generate, solver, use_tools
from inspect_ai.tool import tool
from inspect_ai.util import sandbox

VALUES = {
    **{"C": "C", "P": "P", "I": "I", "N": "N", "yes": "yes", "text number": "0.25", "true": True, "float": -1.5},
    **{"dict": {"a": 1, "b": "I", "c": None}, "list": [1, 0, "P"], "unscored": Score.unscored(reason="grader_failed").value},
    **{"word": "grade A", "nothing": {}, "infinite": float("inf"), "part unscored": {"a": 1, "b": float("nan")}, "known word": "A+"},
}


def samples(names):
    return MemoryDataset([Sample(id=name, input=f"do {name}", target="right") for name in names])


@scorer(metrics=[mean()])
def value_of_sample():
    async def score(state, target):
        return Score(value=VALUES[state.sample_id], explanation=f"because {state.sample_id}", answer=state.output.completion)

    return score


@scorer(metrics=[mean()])
def fails():
    async def score(state, target):
        match state.sample_id:
            case "scorer raises":
                raise ValueError("no grade")
            case "scorer hangs":
                await anyio.sleep(3600)
            case "scorer asks the policy":
                await get_model().generate("Is this right? " + state.output.completion)
            case "scorer is silent":
                return None
        return Score(value=1.0)

    return score


@solver
def misbehaves():
    async def solve(state, generate):
        match state.sample_id:
            case "raises":
                raise RuntimeError("broken solver")
            case "raises late":
                await generate(state)
                raise RuntimeError("broken solver")
            case "hangs":
                await anyio.sleep(3600)
            case "loops":
                while True:
                    state = await generate(state)
                    state.messages.append(ChatMessageUser(content="go on"))
            case "too long":
                state.messages.append(ChatMessageUser(content="x" * 100_000))
            case "no sandbox":
                await sandbox().exec(["true"])
        return await generate(state)

    return solve


@tool
def look():
    async def execute(path: str) -> str:
        """Reads a file.

        Args:
            path: The file.
        """
        if path == "/broken":
            raise ValueError("a bug of the tool")
        return await sandbox().read_file(path)

    return execute


@task
def values(only: str = ""):
    return Task(dataset=samples([only] if only else VALUES), solver=generate(), scorer=value_of_sample())


@task
def two_scorers():
    return Task(dataset=samples(["C", "float"]), solver=generate(), scorer=[value_of_sample(), includes()])


FAULTS = ("raises", "raises late", "hangs", "loops", "too long", "no sandbox", "fine")
SCORERS = ("scorer raises", "scorer hangs", "scorer asks the policy", "scorer is silent")


@task
def faults():
    return Task(dataset=samples([*FAULTS, *SCORERS]), solver=misbehaves(), scorer=fails())


@scorer(metrics=[mean()])
def file_says():
    async def score(state, target):
        text = await sandbox().read_file("answer.txt")
        roles = [message.role for message in state.messages]
        calls = [call.function for message in state.messages for call in getattr(message, "tool_calls", None) or ()]
        return Score(value=text.strip() == target.text, explanation=f"{roles} {calls}", answer=state.output.completion)

    return score


@task
def with_files():
    sample = Sample(
        id="one",
        input=[ChatMessageSystem(content="Be brief."), ChatMessageUser(content="Copy in.txt to answer.txt.")],
        target="seven",
        files={"in.txt": "seven"},
    )
    return Task(dataset=[sample], solver=[use_tools(look()), generate()], scorer=file_says(), sandbox=("docker", "compose.yaml"))


@task
def with_tool():
    sample = [Sample(id=name, input="Read in.txt", target="seven", files={"in.txt": "seven"}) for name in ("reads", "misses", "breaks")]
    return Task(dataset=sample, solver=[use_tools(look()), generate()], scorer=includes(), sandbox="docker")


def not_registered():
    return "a string"


@task
def no_scorer():
    return Task(dataset=samples(["a"]), solver=generate())


@task
def no_samples():
    return Task(dataset=[], scorer=includes())


@task
def same_ids():
    return Task(dataset=samples(["a", "a"]), scorer=includes())


@task
def missing_import():
    import a_package_that_no_environment_has  # noqa: F401


@task
def unreachable_hub():
    try:
        import an_optional_package  # noqa: F401
    except ImportError:  # not the cause of the next error
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")  # noqa: B904


@task
def broken():
    raise KeyError("dataset")


@task
def quits():
    raise SystemExit(3)
