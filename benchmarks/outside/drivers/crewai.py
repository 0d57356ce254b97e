"""CrewAI: a crew of one agent with a tool, and a task with a pydantic output."""

from common import MODEL, PROMPT, PROTOCOL, STREAM, report, shell
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from pydantic import BaseModel


class Repair(BaseModel):
    file: str
    passed: bool


if PROTOCOL == "messages":
    model = LLM(model=MODEL, provider="anthropic", max_tokens=1000, stream=STREAM)
else:
    model = LLM(model=MODEL, provider="openai", api="completions" if PROTOCOL == "chat" else "responses", stream=STREAM)
agent = Agent(role="Repairer", goal="Repair code.", backstory="You use the shell.", tools=[tool("shell")(shell)], llm=model)
task = Task(description=PROMPT, expected_output="The file and whether its test passed.", agent=agent, output_pydantic=Repair)
output = Crew(agents=[agent], tasks=[task]).kickoff()
report(**output.pydantic.model_dump())
