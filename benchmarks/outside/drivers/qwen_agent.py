"""Qwen-Agent: an assistant with a registered tool, whose calls are text in its prompt, or tools of the API (`raw`)."""

import json
import os
import sys
from typing import ClassVar

from common import MODEL, PROMPT, STREAM, report, shell
from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool, register_tool


@register_tool("shell")
class Shell(BaseTool):
    description = "Runs a shell command and returns what it prints."
    parameters: ClassVar = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}

    def call(self, params: str, **_: object) -> str:
        return shell(json.loads(params)["command"])


generate = {"use_raw_api": True} if "raw" in sys.argv else {"fncall_prompt_type": "nous"}
llm = {"model": MODEL, "model_server": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"], "generate_cfg": generate}
bot = Assistant(llm=llm, system_message="Use the shell. Answer in JSON.", function_list=["shell"])
messages = [{"role": "user", "content": PROMPT}]
if STREAM:
    *_, answer = bot.run(messages=messages)
else:
    answer = bot.run_nonstream(messages=messages)
report(**json.loads(answer[-1]["content"]))
