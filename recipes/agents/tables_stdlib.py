"""The agent in `tables_sdk.py`, written with Python's standard library instead of the SDK, for sandboxes that contain nothing else.

Reads the question from standard input, lets the model run code in the current folder, and prints the answer that it submits.
"""

import json
import os
import subprocess
import sys
import urllib.request


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


def ask(messages: list) -> dict:
    body = {"model": os.environ.get("AGENTRL_MODEL", "gpt-5"), "messages": messages, "tools": TOOLS}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def main() -> None:
    messages = [{"role": "user", "content": sys.stdin.read()}]
    while True:
        message = ask(messages)
        if not message.get("tool_calls"):
            print(message["content"])
            return
        messages.append(message)
        for call in message["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "submit":
                print(arguments.get("answer", ""))
                return
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": run(str(arguments.get("code", "")))})


if __name__ == "__main__":
    main()
