"""OpenAI chat messages: requests, fine-tuning lines, logs of request and response, the batch API's files.

Described at https://platform.openai.com/docs/api-reference/chat. Taken are an object with `messages`, a bare list of messages, and an
object whose `request` or `body` holds the former and whose `response` holds a chat completion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.errors import UserError
from agentrl.failure.formats.conversations import Conversation, build_trace, conversations_of
from agentrl.failure.formats.values import (
    Gaps,
    arguments_text,
    as_object,
    as_objects,
    as_string,
    build_message,
    build_origin,
    build_tool_call,
    message_text,
    object_or_empty,
    printable_label,
    tool_schemas,
)
from agentrl.failure.trace import ImportedMessage, Trace

NAME = "openai"
_ASKED = ("messages", "request", "body", "choices", "response")
_KNOWN = {
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "function_call",
    "refusal",
    "reasoning_content",
    "reasoning",
    "annotations",
}


def recognises(document: Any) -> bool:
    """Whether a JSON document claims to be of this format."""
    if isinstance(document, list):
        return bool(document) and isinstance(document[0], dict) and ("role" in document[0] or _of_responses(document[0]))
    return isinstance(document, dict) and (any(key in document for key in _ASKED) or isinstance(document.get("input"), list))


def parse(document: Any, where: Mapping[str, str]) -> Trace:
    """The trace of one document. Raises `ValueError` that says what is wrong with it."""
    gaps = Gaps()
    whole: dict[str, Any] = {"messages": document} if isinstance(document, list) else as_object(document, "the document")
    asked = next((found for key in ("request", "body") if isinstance(found := whole.get(key), dict)), whole)
    answer = as_object(whole.get("response"), "response") if "choices" not in whole else whole
    answer = answer["body"] if isinstance(answer.get("body"), dict) else answer
    asking = as_objects(asked.get("messages"), "messages")
    if "input" in asked or "output" in answer or any(map(_of_responses, asking)):
        raise UserError(
            "is of the Responses API, which is not read", fix="export the chat messages: role, content, tool_calls, tool_call_id"
        )
    said = [parse_message(item, f"messages[{number}]", gaps) for number, item in enumerate(asking)]
    if not said:
        gaps.add("what was asked")
    choices = as_objects(answer.get("choices"), "choices")
    if choices:
        said.append(parse_message(as_object(choices[0].get("message"), "choices[0].message"), "choices[0].message", gaps))
    elif (failed := answer.get("error") or whole.get("error")) is not None:
        gaps.add(f"an answer of the model: the response is an error, {_error(failed)}")
    elif "response" in whole:
        gaps.add("an answer of the model")
    if len(choices) > 1:
        gaps.add("choices besides the first", len(choices) - 1)
    if not said:
        raise ValueError("holds no messages")
    known = build_origin(
        id=whole.get("custom_id") or object_or_empty(whole.get("metadata")).get("trace") or answer.get("id") or whole.get("id"),
        model=answer.get("model") or asked.get("model"),
    )
    gaps.add("times of the messages")
    return build_trace(NAME, said, {**where, **known}, gaps, tools=tool_schemas(asked.get("tools"), gaps))


def _error(failed: Any) -> str:
    """A short description of an error."""
    told = object_or_empty(failed)
    words = (printable_label(told.get(key)) for key in ("type", "code", "message"))
    return ", ".join(dict.fromkeys(word for word in words if word)) or printable_label(failed) or "which says nothing"


def parse_message(item: Mapping[str, Any], what: str, gaps: Gaps) -> ImportedMessage:
    """One message of the chat completions API. Raises `ValueError`."""
    role = as_string(item.get("role"), f"{what}.role")
    calls = as_objects(item.get("tool_calls"), f"{what}.tool_calls")
    functions = [(one.get("id"), as_object(one.get("function") or one.get("custom"), f"{what}.tool_calls")) for one in calls]
    if isinstance(item.get("function_call"), dict):  # the API's older form, which knows one call and no id
        functions.append((None, item["function_call"]))
    made = [
        build_tool_call(function.get("name"), function.get("arguments", function.get("input")), what, gaps) for _, function in functions
    ]
    ids = [as_string(id, f"{what}.tool_calls.id") for id, _ in functions]
    text = message_text(item.get("content"), f"{what}.content", gaps) or as_string(item.get("refusal"), f"{what}.refusal")
    for key in sorted(set(item) - _KNOWN):
        if item[key] not in (None, [], {}):
            gaps.add(f"{printable_label(key)} of a message: it is not kept")
    role = "tool" if role == "function" else role
    answers = as_string(item.get("tool_call_id"), f"{what}.tool_call_id") if role == "tool" else ""
    if role == "tool" and not answers:
        gaps.add("which call an answer of a tool is for")
    agent = printable_label(item.get("name")) if role == "assistant" else ""
    reasoning = as_string(item.get("reasoning_content") or item.get("reasoning"), f"{what}.reasoning_content")
    return build_message(role, text, calls=made, call_ids=ids, answers=answers, agent=agent, reasoning=reasoning)


def documents(trace: Trace) -> Iterator[dict[str, Any]]:
    """A trace as chat messages: one object for each agent, since a list of messages has one."""
    for line in conversations_of(trace):
        if line.messages:
            yield _conversation(trace, line)


def _conversation(trace: Trace, line: Conversation) -> dict[str, Any]:
    about = {"trace": trace.id, **({"agent": line.label} if line.label else {})}
    offered = {"tools": [dict(tool) for tool in trace.tools]} if trace.tools else {}
    return {
        "messages": [_written(one.imported, number, line.label) for number, one in enumerate(line.messages)],
        **offered,
        "metadata": about,
    }


def _written(one: ImportedMessage, number: int, label: str) -> dict[str, Any]:
    told = one.message
    written: dict[str, Any] = {"role": told.role, "content": told.content}
    if one.agent != label:
        written["name"] = one.agent
    if told.tool_calls:
        ids = [one.call_ids[at] if at < len(one.call_ids) else "" for at in range(len(told.tool_calls))]
        written["tool_calls"] = [
            {"id": id or f"call_{number}_{at}", "type": "function", "function": {"name": made.name, "arguments": arguments_text(made)}}
            for at, (id, made) in enumerate(zip(ids, told.tool_calls, strict=True))
        ]
        written["content"] = told.content or None
    if told.role == "tool":
        written["tool_call_id"] = one.answers
    if one.reasoning:
        written["reasoning_content"] = one.reasoning
    return written


def _of_responses(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") in ("function_call", "function_call_output", "reasoning")
