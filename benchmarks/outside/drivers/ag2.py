"""AG2: an agent with a tool and a response schema."""

import asyncio

from ag2 import Agent
from common import MODEL, PROMPT, PROTOCOL, STREAM, report, shell
from pydantic import BaseModel


class Repair(BaseModel):
    file: str
    passed: bool


def config() -> object:
    if PROTOCOL == "messages":
        from ag2.config import AnthropicConfig

        return AnthropicConfig(model=MODEL, max_tokens=1000, streaming=STREAM)
    from ag2.config import OpenAIConfig, OpenAIResponsesConfig

    return (OpenAIConfig if PROTOCOL == "chat" else OpenAIResponsesConfig)(model=MODEL, streaming=STREAM)


async def main() -> None:
    agent = Agent("repairer", prompt="Use the shell.", config=config(), tools=[shell], response_schema=Repair)
    reply = await agent.ask(PROMPT)
    report(**(await reply.content()).model_dump())


asyncio.run(main())
