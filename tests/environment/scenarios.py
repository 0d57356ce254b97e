"""The episodes that the tests play at real and recorded servers. A result is the shown text, the reward and the state of the episode."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.environment.remote import RemoteOpener
from agentrl.environment.remote_family import prompt_of
from agentrl.errors import AgentRLError
from agentrl.records import EnvironmentSpec, ToolCall

Result = tuple[str, float | None, str]


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


async def play(opener: RemoteOpener, ref: str, options: Mapping[str, Any], actions: Sequence[str | ToolCall]) -> list[Result]:
    """Plays one episode. Errors are results."""
    results: list[Result] = []
    try:
        environment = await opener.open(EnvironmentSpec(ref=ref, seed=3, options={**options}))
    except AgentRLError as error:
        return [(reason(error), None, type(error).__name__)]
    results.append(((await environment.reset()).text, None, "" if environment.actions is None else str(len(environment.actions))))
    for action in actions:
        try:
            step = await environment.step(action)
            results.append((step.observation.text[:200], step.reward, "terminated" if step.terminated else ""))
        except AgentRLError as error:
            results.append((reason(error), None, type(error).__name__))
    await environment.close()
    return results


def reason(error: Exception) -> str:
    """Returns the first line of an error without addresses."""
    return re.sub(r"127\.0\.0\.1:\d+", "HOST", str(error).splitlines()[0])[:200]


async def openenv_corridor(opener: RemoteOpener, url: str) -> list[Result]:
    return await play(opener, f"openenv:{url}", {}, ["left", "up", "left"])


async def openenv_board(opener: RemoteOpener, url: str) -> list[Result]:
    return await play(opener, f"openenv:{url}", {}, [call("act", x=1, y="b"), call("act", x=1, y=2, colour="blue")])


async def openenv_tools(opener: RemoteOpener, url: str) -> list[Result]:
    return await play(opener, f"openenv:{url}", {}, [call("add", a=1, b=2), call("sub"), "3"])


async def openenv_echo(opener: RemoteOpener, url: str) -> list[Result]:
    answered = await play(opener, f"openenv:{url}", {}, ["hello", "end"])
    broken = await play(opener, f"openenv:{url}", {}, ["raise", "hello"])
    return answered + broken + await play(opener, f"openenv:{url}", {}, ["silent"])


async def ors_sums(opener: RemoteOpener, url: str) -> list[Result]:
    ref = f"ors:{url}"
    actions = [call("hint"), call("submit", value="a"), call("nothing"), "12", call("submit", value=12)]
    results = await play(opener, ref, {"split": "train", "index": 2}, actions)
    results += await play(opener, ref, {"split": "test", "index": 1}, [call("submit", value=13)])
    results += await play(opener, ref, {"split": "train", "index": 5}, [])
    return results + await play(opener, ref, {"split": "train", "index": 50}, [])


def counter_row(expected: int) -> dict[str, Any]:
    """Returns a row of NeMo Gym's example_session_state_mgmt."""
    tool = {
        "type": "function",
        "name": "increment_counter",
        "strict": True,
        "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}},
    }
    other = {"type": "function", "name": "get_counter_value", "strict": True, "parameters": {"type": "object", "properties": {}}}
    parameters = {"input": [{"role": "user", "content": "add 1 then add 2 then get the count"}], "tools": [tool, other]}
    return {"responses_create_params": parameters, "expected_count": expected, "initial_count": 3}


async def nemo_counter(opener: RemoteOpener, url: str) -> list[Result]:
    row = counter_row(6)
    assert prompt_of(row, "row")[0].content.startswith("add 1")
    actions = [call("increment_counter", count=1), call("increment_counter", count="x"), call("increment_counter", count=2)]
    actions += [call("get_counter_value"), call("verify")]
    right = await play(opener, f"nemo-gym:{url}", {"row": row}, [*actions, "The count is 6."])
    return right + await play(opener, f"nemo-gym:{url}", {"row": counter_row(5)}, ["5"])


async def nemo_parts(opener: RemoteOpener, url: str) -> list[Result]:
    """NeMo Gym's example_tool_call_multireward."""
    tool = {"type": "function", "name": "get_weather", "strict": True}
    tool["parameters"] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    parameters = {"input": "what's the weather in Rome?", "tools": [tool]}
    row = {"responses_create_params": parameters, "expected_call": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    return await play(opener, f"nemo-gym:{url}", {"row": row}, [call("get_weather", city="Rome"), "Sunny."])


async def nemo_blackjack(opener: RemoteOpener, url: str) -> list[Result]:
    row = {"responses_create_params": {"input": [{"role": "user", "content": "Deal me in."}]}}
    results = await play(opener, f"nemo-gym:{url}", {"row": row, "protocol": "gymnasium"}, ["<action>stand</action>"])
    return [(text[:9], None if reward is None else abs(reward), end) for text, reward, end in results]
