"""Pydantic AI: an agent with a tool and an output type, which is a tool of its own, or the format of the answer (`native`)."""

import asyncio
import sys

from common import MODEL, PROMPT, PROTOCOL, STREAM, report, shell
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput


class Repair(BaseModel):
    file: str
    passed: bool


def model() -> object:
    if PROTOCOL == "messages":
        from pydantic_ai.models.anthropic import AnthropicModel

        return AnthropicModel("claude-sonnet-4-5" if "native" in sys.argv else MODEL)  # for this name it has native output
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

    return (OpenAIChatModel if PROTOCOL == "chat" else OpenAIResponsesModel)(MODEL)


async def main() -> None:
    output = NativeOutput(Repair) if "native" in sys.argv else Repair
    agent = Agent(model(), instructions="Use the shell.", tools=[shell], output_type=output, model_settings={"max_tokens": 1000})
    if STREAM:
        async with agent.run_stream(PROMPT) as result:
            repair = await result.get_output()
    else:
        repair = (await agent.run(PROMPT)).output
    report(**repair.model_dump())


asyncio.run(main())
