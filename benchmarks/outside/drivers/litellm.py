"""LiteLLM: a loop over its completion functions, with a tool and a response format."""

import json

import litellm
from common import MODEL, PROMPT, PROTOCOL, STREAM, report, shell
from pydantic import BaseModel


class Repair(BaseModel):
    file: str
    passed: bool


SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
FUNCTION = {"name": "shell", "description": "Runs a shell command.", "parameters": SCHEMA}


def completions() -> str:
    """Chat completions, or Anthropic's messages behind the same function."""
    name = f"anthropic/{MODEL}" if PROTOCOL == "messages" else f"openai/{MODEL}"
    tools = [{"type": "function", "function": FUNCTION}]
    messages = [{"role": "user", "content": PROMPT}]
    while True:
        shape = None if PROTOCOL == "messages" else Repair
        answer = litellm.completion(model=name, messages=messages, tools=tools, response_format=shape, stream=STREAM, max_tokens=1000)
        if STREAM:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = shell(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def responses() -> str:
    items = [{"role": "user", "content": PROMPT}]
    while True:
        answer = litellm.responses(
            model=f"openai/{MODEL}", input=items, tools=[{"type": "function", **FUNCTION}], text_format=Repair, stream=STREAM
        )
        if STREAM:
            answer = [event for event in answer if event.type == "response.completed"][-1].response
        items += [item.model_dump(exclude_none=True) if hasattr(item, "model_dump") else item for item in answer.output]
        calls = [item for item in items if item.get("type") == "function_call"]
        done = {item["call_id"] for item in items if item.get("type") == "function_call_output"}
        if all(call["call_id"] in done for call in calls):
            return items[-1]["content"][0]["text"]
        for call in calls:
            if call["call_id"] not in done:
                output = shell(**json.loads(call["arguments"]))
                items.append({"type": "function_call_output", "call_id": call["call_id"], "output": output})


known = {"litellm_provider": "openai", "mode": "chat", "supports_native_streaming": True}
litellm.register_model({MODEL: known, f"openai/{MODEL}": known})  # it does not stream Responses of models that it does not know
report(**json.loads(responses() if PROTOCOL == "responses" else completions()))
