"""LangGraph: the agent of `create_agent`, a compiled graph, with a tool and a response format (a tool, or the format of the answer)."""

import sys

from common import MODEL, PROMPT, PROTOCOL, STREAM, report, shell
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.tools import tool
from pydantic import BaseModel


class Repair(BaseModel):
    """The result of the repair."""

    file: str
    passed: bool


if PROTOCOL == "messages":
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model=MODEL, max_tokens=1000, streaming=STREAM)
else:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, use_responses_api=PROTOCOL == "responses", streaming=STREAM)
strategy = ProviderStrategy(Repair) if "native" in sys.argv else ToolStrategy(Repair)
agent = create_agent(model, [tool(shell)], system_prompt="Use the shell.", response_format=strategy)
state = agent.invoke({"messages": [{"role": "user", "content": PROMPT}]})
report(**state["structured_response"].model_dump())
