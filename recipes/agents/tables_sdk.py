"""An agent that answers questions about tables, written with the OpenAI SDK and without agentrl.

Reads the question from standard input, lets the model run code in the current folder, and prints the answer that the model submits.
"""

import json
import os
import subprocess
import sys

from openai import OpenAI


def tool(name: str, description: str, argument: str) -> dict:
    schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [tool("python", "Runs Python code and returns what it prints.", "code"), tool("submit", "Hands in the answer.", "answer")]


def run(code: str) -> str:
    try:
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, errors="replace", timeout=10)
    except (subprocess.TimeoutExpired, ValueError) as error:
        return f"error: {error}"[-400:]
    return "\n".join(text for text in (result.stdout.rstrip(), result.stderr.rstrip()) if text)[-400:]


def main() -> None:
    client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY
    messages = [{"role": "user", "content": sys.stdin.read()}]
    while True:
        completion = client.chat.completions.create(model=os.environ.get("AGENTRL_MODEL", "gpt-5"), messages=messages, tools=TOOLS)
        message = completion.choices[0].message
        if not message.tool_calls:
            print(message.content)
            return
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            if call.function.name == "submit":
                print(arguments.get("answer", ""))
                return
            messages.append({"role": "tool", "tool_call_id": call.id, "content": run(str(arguments.get("code", "")))})


if __name__ == "__main__":
    main()
