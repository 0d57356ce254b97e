"""LlamaIndex: a function agent with a tool and an output class, which it requests after the last turn."""

import asyncio
import os

from common import MODEL, PROMPT, PROTOCOL, STREAM, report, shell
from llama_index.core.agent.workflow import FunctionAgent
from pydantic import BaseModel


class Repair(BaseModel):
    """The result of the repair."""

    file: str
    passed: bool


def model() -> object:
    if PROTOCOL == "messages":
        from llama_index.llms.anthropic import Anthropic

        return Anthropic(model="claude-sonnet-4-5", max_tokens=1000)
    from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses

    kind = OpenAILike if PROTOCOL == "chat" else OpenAILikeResponses
    known = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 100_000}
    return kind(model=MODEL, api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], **known)


async def main() -> None:
    agent = FunctionAgent(tools=[shell], llm=model(), system_prompt="Use the shell.", output_cls=Repair, streaming=STREAM)
    response = await agent.run(PROMPT)
    report(**response.get_pydantic_model(Repair).model_dump())


asyncio.run(main())
