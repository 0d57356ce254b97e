"""smolagents: an agent that writes Python code with stop sequences, or one that calls tools (`tools`)."""

import json
import sys

from common import MODEL, PROMPT, STREAM, report, shell
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(model_id=MODEL)
kind = ToolCallingAgent if "tools" in sys.argv else CodeAgent
agent = kind(tools=[tool(shell)], model=model, stream_outputs=STREAM, max_steps=6)
answer = agent.run(PROMPT)
report(**(answer if isinstance(answer, dict) else json.loads(str(answer))))
