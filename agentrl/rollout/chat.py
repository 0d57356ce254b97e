"""Messages to token ids, each exactly once, and completions back to messages.

A conversation is never rendered and tokenized again as it grows. The opening prompt is tokenized once; a completion is kept
as the ids that were sampled; what the tools answered is tokenized once, as the delta the chat template puts between two
assistant turns. The policy is therefore always conditioned on, and trained on, the very ids that were in its context.

Tool calls follow the Hermes form that Qwen3 uses: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.errors import UserError
from agentrl.records import Message, ToolCall

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_OPEN = "<tool_call>"
_MARK = "\ue000assistant turn\ue000"  # private-use characters: found again in a rendered template, never in real text


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that chats need."""

    chat_template: Any
    eos_token: Any
    eos_token_id: Any
    all_special_tokens: list[str]

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def encode(self, text: str, **kwargs: Any) -> list[int]: ...

    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...

    def get_added_vocab(self) -> dict[str, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCompletion:
    """A completion as a message, and what was wrong with its tool calls (shown to the agent), if anything."""

    message: Message
    errors: tuple[str, ...] = ()


class ChatFormat:
    """Exact tokens for one tokenizer.

    Raises `UserError` on construction when the tokenizer has no chat template or no end-of-turn token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.chat_template:
            raise UserError(
                "policy.model: its tokenizer has no chat template",
                fix="use an instruction-tuned model, or add chat_template.jinja to the model folder",
            )
        if tokenizer.eos_token_id is None:
            raise UserError(
                "policy.model: its tokenizer has no eos_token, so turns cannot end", fix="set eos_token in tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._control = sorted({*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(re.escape(text) for text in self._control))
        self.stop_token_ids: tuple[int, ...] = (int(tokenizer.eos_token_id),)
        self.tool_delta([""])  # a template that cannot be continued is refused here, not in the middle of an episode

    def opening(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Ids of the prompt up to where the first assistant turn begins."""
        text = self._render([_as_chat(m) for m in messages], schemas=schemas)
        return self._encode(text)

    def tool_delta(self, outputs: Sequence[str]) -> tuple[int, ...]:
        """Ids between the end-of-turn token of one assistant turn and the start of the next, holding the tools' outputs.

        Outputs are hostile: text that spells a control token is broken up, so that a program cannot forge a turn.
        """
        tools = [{"role": "tool", "content": self.defang(output)} for output in outputs]
        text = self._render([{"role": "user", "content": "-"}, {"role": "assistant", "content": _MARK}, *tools], schemas=())
        _, found, delta = text.partition(_MARK)
        eos = self._tokenizer.eos_token
        if not found or not delta.startswith(eos):
            raise UserError(
                f"policy.model: its chat template does not end an assistant turn with {eos!r}",
                fix="tool-using rollouts need a template that puts the eos token right after each assistant message",
            )
        return self._encode(delta.removeprefix(eos))

    def parse(self, token_ids: Sequence[int]) -> ParsedCompletion:
        """The message in a completion. Malformed tool calls become `errors`, never exceptions."""
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        text = str(self._tokenizer.decode(ids, skip_special_tokens=False))
        calls: list[ToolCall] = []
        errors: list[str] = []
        for body in _CALL.findall(text):
            call = _parse_call(body)
            if isinstance(call, ToolCall):
                calls.append(call)
            else:
                errors.append(call)
        if text.count(_OPEN) > len(calls) + len(errors):
            errors.append("a tool call was opened but not closed")
        content = _CALL.sub("", text).strip()
        return ParsedCompletion(message=Message(role="assistant", content=content, tool_calls=tuple(calls)), errors=tuple(errors))

    def defang(self, text: str) -> str:
        """Breaks up every control token spelled in `text`: `<|im_end|>` becomes `< |im_end|>`."""
        while self._control_pattern.search(text):
            text = self._control_pattern.sub(lambda m: f"{m[0][0]} {m[0][1:]}", text)
        return text

    def _render(self, messages: list[dict[str, Any]], *, schemas: Sequence[Mapping[str, Any]]) -> str:
        tools = [dict(s) for s in schemas] or None
        return str(self._tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def load_chat(folder: str) -> ChatFormat:
    """The chat format of a model folder or id; imports transformers."""
    from transformers import AutoTokenizer  # heavy: only where a tokenizer is really needed

    return ChatFormat(AutoTokenizer.from_pretrained(folder))


def _as_chat(message: Message) -> dict[str, Any]:
    chat: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        chat["tool_calls"] = [
            {"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}} for c in message.tool_calls
        ]
    return chat


def _parse_call(body: str) -> ToolCall | str:
    try:
        data = json.loads(body)
    except (json.JSONDecodeError, RecursionError) as error:
        return f"tool call is not valid JSON: {error}"
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return 'tool call must be an object with "name" and "arguments"'
    arguments = data.get("arguments", {})
    if not isinstance(arguments, dict):
        return 'tool call "arguments" must be an object'
    return ToolCall(name=data["name"], arguments=arguments)
