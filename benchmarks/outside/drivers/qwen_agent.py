"""Qwen-Agent: an assistant with a registered tool. Its calls and results are text; with `use_raw_api` its results of tools have no
`tool_call_id`, which chat completions require.
"""

import json
import os
from typing import ClassVar

from common import MODEL, PROMPT, report, shell
from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool, register_tool


@register_tool("shell")
class Shell(BaseTool):
    description = "Runs a shell command and returns what it prints."
    parameters: ClassVar = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}

    def call(self, params: str, **_: object) -> str:
        return shell(json.loads(params)["command"])


llm = {"model": MODEL, "model_server": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
bot = Assistant(llm=llm, system_message="Use the shell. Answer in JSON.", function_list=["shell"])
*_, answer = bot.run(messages=[{"role": "user", "content": PROMPT}])
report(**json.loads(answer[-1]["content"]))
