"""OpenAI Agents SDK: a triage agent hands over to an agent with a function tool and an output type."""

import asyncio

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from common import MODEL, PROMPT, PROTOCOL, STREAM, report, shell
from openai import AsyncOpenAI
from pydantic import BaseModel


class Repair(BaseModel):
    file: str
    passed: bool


async def main() -> None:
    kind = OpenAIChatCompletionsModel if PROTOCOL == "chat" else OpenAIResponsesModel
    model = kind(MODEL, AsyncOpenAI())
    repairer = Agent(
        name="Repairer",
        handoff_description="Repairs code.",
        instructions="Repair the file. Use the shell.",
        tools=[function_tool(shell)],
        output_type=Repair,
        model=model,
        model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0.5),
    )
    triage = Agent(name="Triage", instructions="Hand the task over to the right agent.", handoffs=[repairer], model=model)
    if STREAM:
        result = Runner.run_streamed(triage, PROMPT)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(triage, PROMPT)
    report(**result.final_output.model_dump())


asyncio.run(main())
