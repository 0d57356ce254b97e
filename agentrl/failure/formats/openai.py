"""Reads and writes OpenAI chat messages: requests, fine-tuning lines, logs of requests and responses, and batch API files.

https://platform.openai.com/docs/api-reference/chat describes them. An input is a list of messages, an object with the key `messages`, or an
object whose `request` or `body` contains `messages` and whose `response` is a chat completion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.errors import UserError
from agentrl.failure.formats import values
from agentrl.failure.formats.conversations import build_trace, conversations_of
from agentrl.failure.formats.values import Gaps, as_object, as_objects, as_string, printable_label
from agentrl.failure.trace import ImportedMessage, Trace

NAME = "openai"
_REQUEST_KEYS = ("messages", "request", "body", "choices", "response")
_RESPONSE_TYPES = ("function_call", "function_call_output", "reasoning")
_KNOWN_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "function_call"}
_KNOWN_KEYS |= {"refusal", "reasoning_content", "reasoning", "annotations"}


def recognizes(document: Any) -> bool:
    """Whether a JSON document appears to contain OpenAI chat messages."""
    if isinstance(document, list):
        return bool(document) and isinstance(document[0], dict) and ("role" in document[0] or _is_of_responses_api(document[0]))
    return isinstance(document, dict) and (any(key in document for key in _REQUEST_KEYS) or isinstance(document.get("input"), list))


def parse(document: Any, location: Mapping[str, str]) -> Trace:
    """Returns the trace in a document of OpenAI chat messages.

    If the document is invalid, raises a `ValueError` that describes the problem.
    """
    gaps = Gaps()
    data: dict[str, Any] = {"messages": document} if isinstance(document, list) else as_object(document, "the document")
    request = next((value for key in ("request", "body") if isinstance(value := data.get(key), dict)), data)
    response = as_object(data.get("response"), "response") if "choices" not in data else data
    response = response["body"] if isinstance(response.get("body"), dict) else response
    prompt = as_objects(request.get("messages"), "messages")
    if "input" in request or "output" in response or any(map(_is_of_responses_api, prompt)):
        fix = "export the chat messages: role, content, tool_calls, tool_call_id"
        raise UserError("has the form of the Responses API, which is not supported", fix=fix)
    messages = [parse_message(item, f"messages[{number}]", gaps) for number, item in enumerate(prompt)]
    if not messages:
        gaps.add("the prompt")
    choices = as_objects(response.get("choices"), "choices")
    if choices:
        messages.append(parse_message(as_object(choices[0].get("message"), "choices[0].message"), "choices[0].message", gaps))
    elif (error := response.get("error") or data.get("error")) is not None:
        gaps.add(f"an answer of the model: the response is an error, {_describe_error(error)}")
    elif "response" in data:
        gaps.add("an answer of the model")
    if len(choices) > 1:
        gaps.add("choices other than the first", len(choices) - 1)
    if not messages:
        raise ValueError("contains no messages")
    metadata = values.object_or_empty(data.get("metadata"))
    conversation, agent = (printable_label(metadata.get(key)) for key in ("trace", "agent"))  # written by `documents`
    if conversation and agent:
        conversation += f" / {agent}"
    origin = values.build_origin(
        id=data.get("custom_id") or conversation or response.get("id") or data.get("id"),
        model=response.get("model") or request.get("model"),
    )
    gaps.add("times of the messages")
    return build_trace(NAME, messages, {**location, **origin}, gaps, tools=values.tool_schemas(request.get("tools"), gaps))


def parse_message(item: Mapping[str, Any], what: str, gaps: Gaps) -> ImportedMessage:
    """Parses one message of the chat completions API. Raises `ValueError` if the message is invalid."""
    role = values.parse_role(item.get("role"), f"{what}.role")
    calls = as_objects(item.get("tool_calls"), f"{what}.tool_calls")
    functions = [(call.get("id"), as_object(call.get("function") or call.get("custom"), f"{what}.tool_calls")) for call in calls]
    if isinstance(item.get("function_call"), dict):  # the API's older form: one call, without an id
        functions.append((None, item["function_call"]))
    for key in sorted(set(item) - _KNOWN_KEYS):
        if item[key] not in (None, [], {}):
            gaps.add(f"{printable_label(key)} of a message: it is not kept")
    answers = as_string(item.get("tool_call_id"), f"{what}.tool_call_id") if role == "tool" else ""
    if role == "tool" and not answers:
        gaps.add("the call that a tool's result belongs to")
    return values.build_message(
        role,
        values.message_text(item.get("content"), f"{what}.content", gaps) or as_string(item.get("refusal"), f"{what}.refusal"),
        calls=[values.build_tool_call(one.get("name"), one.get("arguments", one.get("input")), what, gaps) for _, one in functions],
        call_ids=[as_string(id, f"{what}.tool_calls.id") for id, _ in functions],
        answers=answers,
        agent=printable_label(item.get("name")) if role == "assistant" else "",
        reasoning=as_string(item.get("reasoning_content") or item.get("reasoning"), f"{what}.reasoning_content"),
        gaps=gaps,
    )


def documents(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yields one object with the key `messages` for each non-empty conversation in a trace."""
    tools = {"tools": [dict(tool) for tool in trace.tools]} if trace.tools else {}
    for conversation in conversations_of(trace):
        if conversation.messages:
            label = conversation.label
            messages = [_written(one.imported, number, label) for number, one in enumerate(conversation.messages)]
            yield {"messages": messages, **tools, "metadata": {"trace": trace.id, **({"agent": label} if label else {})}}


def _written(one: ImportedMessage, number: int, label: str) -> dict[str, Any]:
    message = one.message
    written: dict[str, Any] = {"role": message.role, "content": message.content}
    if one.agent != label:
        written["name"] = one.agent
    if message.tool_calls:
        written["content"] = message.content or None
        written["tool_calls"] = []
        for index, call in enumerate(message.tool_calls):
            id = one.call_ids[index] if index < len(one.call_ids) else ""
            function = {"name": call.name, "arguments": values.arguments_text(call)}
            written["tool_calls"].append({"id": id or f"call_{number}_{index}", "type": "function", "function": function})
    if message.role == "tool":
        written["tool_call_id"] = one.answers
    if one.reasoning:
        written["reasoning_content"] = one.reasoning
    return written


def _describe_error(error: Any) -> str:
    details = values.object_or_empty(error)
    texts = (printable_label(details.get(key)) for key in ("type", "code", "message"))
    return ", ".join(dict.fromkeys(text for text in texts if text)) or printable_label(error) or "without a description"


def _is_of_responses_api(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") in _RESPONSE_TYPES
