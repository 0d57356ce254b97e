"""Messages through a chat template: as text, and as the ids of that text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from agentrl.agent.template import SHIPPED_TEMPLATES
from agentrl.base.error_text import one_line_error
from agentrl.base.processes import deadline_alarm
from agentrl.errors import UserError
from agentrl.records import Message

THINK = ("<think>", "</think>")
"""Around what the model thought, in the content of a message, whatever the model's own marks are."""

RENDER_S = 10.0
"""Seconds of CPU time that a template may take to render one conversation."""

NO_ID = "0" * 9
"""The id of a call that the model gave none; 9 letters or digits, as Mistral's template demands."""

OTHER = f"set policy.chat_template ({', '.join(SHIPPED_TEMPLATES)}, or a file)"
"""What to do about a template that cannot be used."""

_SAMPLE = " a\n\n  b\tC\u00e9\u00e9 12345 <a|b> \u4e2d\u6587 \U0001f600\u200d "
_THOUGHT = re.compile(r"\s*<think>\n?(.*?)\n?</think>\s*(.*)", re.DOTALL)
_READS_THINKING = re.compile(r"""message\.thinking\b|message\[.thinking.\]|["']thinking["'] in message""")
_SAFE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that chats need."""

    chat_template: Any
    eos_token: Any
    eos_token_id: Any
    unk_token_id: Any
    all_special_tokens: list[str]
    all_special_ids: list[int]
    added_tokens_decoder: dict[int, Any]

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def encode(self, text: str, **kwargs: Any) -> list[int]: ...

    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...


class _TooLong(Exception):
    """A rendering has exceeded its CPU time: a template may behave differently on messages that its test did not include."""


def _too_long() -> _TooLong:
    return _TooLong(f"it takes more than {RENDER_S:g} s of CPU time")


class Renderer:
    """A tokenizer's chat template, and the form of messages that it takes.

    `arguments_as_text` is set if it takes the arguments of a call as JSON text only, and `results_as_user` if it has no tool messages:
    tool results are then in the user's turn between two turns of the assistant.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.arguments_as_text = False
        self.results_as_user = False
        template = str(tokenizer.chat_template)
        self.thinking_key = (
            "reasoning_content" if "reasoning_content" in template else "thinking" if _READS_THINKING.search(template) else ""
        )
        self._encode = encoder(tokenizer)
        self.knows_thinking = bool(self.thinking_key) or THINK[1] in template

    def text(self, messages: Sequence[Mapping[str, Any]], schemas: Sequence[Mapping[str, Any]] = ()) -> str:
        """A conversation up to where the next turn of the assistant begins. Raises `UserError` for what the template does not take."""
        tools = [dict(s) for s in schemas] or None
        try:
            with deadline_alarm(RENDER_S, _too_long, cpu=True):
                return str(self.tokenizer.apply_chat_template(list(messages), tools=tools, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # a template is a program, and may raise anything
            roles = ", ".join(str(message["role"]) for message in messages)
            raise UserError(
                f"the chat template cannot render messages of {roles}{' with tools' if tools else ''}: {one_line_error(error)}", fix=OTHER
            ) from error

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._encode(text))

    def said(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, control tokens included."""
        if not ids:
            return ""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """As a template takes them. Calls get ids, and what tools gave gets the ids of the calls before it, in order."""
        chats: list[dict[str, Any]] = []
        results: list[dict[str, Any]] = []
        count = 0
        waiting: list[tuple[str, str]] = []
        for message in messages:
            if message.role == "tool":
                number, name = waiting.pop(0) if waiting else (NO_ID, "tool")
                results.append(tool_message(message.content, name=name, number=number))
                continue
            chat: dict[str, Any] = {"role": message.role, "content": message.content}
            if message.role == "assistant":
                chat |= self._thought(message.content)
            if message.tool_calls:
                waiting = [(f"call{count + n:05d}", call.name) for n, call in enumerate(message.tool_calls)]
                count += len(waiting)
                chat["tool_calls"] = [
                    self.call(call.name, call.arguments, number) for call, (number, _) in zip(message.tool_calls, waiting, strict=True)
                ]
            if results and self.results_as_user and message.role == "user":  # the roles of such templates alternate
                chat["content"] = f"{self.results(results)[0]['content']}\n{message.content}"
                results = []
            chats += [*self.results(results), chat]
            results = []
        return chats + self.results(results)

    def results(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Consecutive tool messages in the form that the template takes."""
        if not self.results_as_user or not messages:
            return [dict(message) for message in messages]
        shown = "\n".join(f"<tool_response>\n{message['content']}\n</tool_response>" for message in messages)
        return [{"role": "user", "content": shown}]

    def call(self, name: str, arguments: Mapping[str, Any], number: str = NO_ID) -> dict[str, Any]:
        """A tool call as templates take it."""
        given: Any = json.dumps(arguments, ensure_ascii=False) if self.arguments_as_text else dict(arguments)
        return {"id": number, "type": "function", "function": {"name": name, "arguments": given}}

    def _thought(self, content: str) -> dict[str, Any]:
        """What was thought, apart from the rest, for a template that takes it apart."""
        found = _THOUGHT.fullmatch(content) if self.thinking_key else None
        return {} if found is None else {self.thinking_key: found[1], "content": found[2]}


def encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Text to its ids, without what begins and ends a document: past the wrapper of `transformers` where that gives the same ids.

    The wrapper takes a third of the time of a turn's encoding, and has offsets made that nobody reads.
    """

    def wrapped(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    fast = getattr(getattr(tokenizer, "backend_tokenizer", None), "encode_batch_fast", None)
    if fast is None:
        return wrapped

    def direct(text: str) -> list[int]:
        ids: list[int] = fast([text], add_special_tokens=False)[0].ids
        return ids

    sample = _SAMPLE.join(tokenizer.all_special_tokens) + _SAMPLE
    return direct if wrapped(sample) == direct(sample) else wrapped


def tool_message(content: str, *, name: str = "tool", number: str = NO_ID) -> dict[str, Any]:
    """What a tool gave, as templates take it; a name that is more than a word is left out, since the policy wrote it."""
    return {"role": "tool", "name": name if _SAFE_NAME.fullmatch(name) else "tool", "tool_call_id": number or NO_ID, "content": content}
