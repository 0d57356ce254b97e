"""Renders messages with a chat template, as text and as token ids.

Escapes the control tokens of a tokenizer in untrusted text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from agentrl.agent.images import ImageTokens
from agentrl.agent.template import SHIPPED_TEMPLATES
from agentrl.base.error_text import one_line_error
from agentrl.base.processes import deadline_alarm
from agentrl.errors import UserError
from agentrl.records import Message

THINK = ("<think>", "</think>")
"""Marks around the reasoning in a message's content, regardless of the marks that the model writes."""

RENDER_S = 10.0
"""Maximum CPU seconds to render one conversation."""

NO_ID = "0" * 9
"""Placeholder id for a call that has none: nine letters or digits, as Mistral's template requires."""

OTHER = f"set policy.chat_template ({', '.join(SHIPPED_TEMPLATES)}, or a file)"
"""The fix for an unusable template."""

_SAMPLE = " a\n\n  b\tC\u00e9\u00e9 12345 <a|b> \u4e2d\u6587 \U0001f600\u200d "
_THOUGHT = re.compile(r"\s*<think>\n?(.*?)\n?</think>\s*(.*)", re.DOTALL)
_READS_THINKING = re.compile(r"""message\.thinking\b|message\[.thinking.\]|["']thinking["'] in message""")
_SAFE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that chat formats need."""

    chat_template: Any
    eos_token: Any
    eos_token_id: Any
    unk_token_id: Any
    all_special_tokens: list[str]
    all_special_ids: list[int]
    added_tokens_decoder: dict[int, Any]

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Renders messages in the chat-completions format."""

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        """Returns the token ids of a string."""

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        """Returns the text of token ids."""


class _TooLong(Exception):
    """A rendering exceeded its limit on CPU time. A template may be slower on messages that its test did not include."""


class Renderer:
    """A tokenizer's chat template, and the form of messages that it accepts.

    `arguments_as_text` is set if the template accepts the arguments of a call only as JSON text. `results_as_user` is set if the template
    does not show tool messages, so that tool results must be in a user turn.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.arguments_as_text = False
        self.results_as_user = False
        self.images: ImageTokens | None = None
        self._in_parts = False
        template = str(tokenizer.chat_template)
        self.thinking_key = (
            "reasoning_content" if "reasoning_content" in template else "thinking" if _READS_THINKING.search(template) else ""
        )
        self._encode = encoder(tokenizer)
        self.knows_thinking = bool(self.thinking_key) or THINK[1] in template
        self._in_parts = self._reads_only_parts()

    def _reads_only_parts(self) -> bool:
        """Whether the template shows the content of a message only as a list of parts, as some vision-language models' templates do."""
        try:
            if (word := "zebra") in self.text([{"role": "user", "content": word}]):
                return False
        except UserError:
            pass
        try:
            return word in self.text([{"role": "user", "content": [{"type": "text", "text": word}]}])
        except UserError:
            return False

    def text(self, messages: Sequence[Mapping[str, Any]], schemas: Sequence[Mapping[str, Any]] = ()) -> str:
        """Renders a conversation up to the start of the next assistant turn. Raises `UserError` if the template rejects the
        conversation."""
        tools = [dict(schema) for schema in schemas] or None
        if self._in_parts:
            messages = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
        try:
            with deadline_alarm(RENDER_S, lambda: _TooLong(f"it takes more than {RENDER_S:g} s of CPU time"), cpu=True):
                return str(self.tokenizer.apply_chat_template(list(messages), tools=tools, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # a template is a program, and may raise anything
            roles = ", ".join(str(message["role"]) for message in messages)
            raise UserError(
                f"the chat template cannot render messages of {roles}{' with tools' if tools else ''}: {one_line_error(error)}", fix=OTHER
            ) from error

    def ids(self, text: str) -> tuple[int, ...]:
        """Returns the token ids of a string and of the images in it, without adding special tokens. Raises the errors of
        `ImageTokens.ids`."""
        return tuple(self._encode(text)) if self.images is None else self.images.ids(text, self._encode)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of sampled token ids, with control tokens."""
        if not ids:
            return ""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Converts messages to the chat-completions format. Calls receive ids, and tool results receive the ids of the calls before them;
        `NO_ID` if there is no such call."""
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
            if results and self.results_as_user and message.role == "user":  # such templates require alternating roles
                chat["content"] = f"{self.results(results)[0]['content']}\n{message.content}"
                results = []
            chats += [*self.results(results), chat]
            results = []
        return chats + self.results(results)

    def results(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns consecutive tool messages in the form that the template accepts."""
        if not self.results_as_user or not messages:
            return [dict(message) for message in messages]
        shown = "\n".join(f"<tool_response>\n{message['content']}\n</tool_response>" for message in messages)
        return [{"role": "user", "content": shown}]

    def call(self, name: str, arguments: Mapping[str, Any], number: str = NO_ID) -> dict[str, Any]:
        """Returns a tool call in the form that the template accepts."""
        rendered: Any = json.dumps(arguments, ensure_ascii=False) if self.arguments_as_text else dict(arguments)
        return {"id": number, "type": "function", "function": {"name": name, "arguments": rendered}}

    def _thought(self, content: str) -> dict[str, Any]:
        """Returns the reasoning and the rest of the content under separate keys; empty if the template has no key for the reasoning or the
        content has no reasoning."""
        match = _THOUGHT.fullmatch(content) if self.thinking_key else None
        return {} if match is None else {self.thinking_key: match[1], "content": match[2]}


def encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Returns a function that encodes a string as token ids, without adding special tokens.

    The function bypasses the wrapper of `transformers` if this does not change the ids of a sample. The wrapper takes a third of the time
    to encode a turn.
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
    """Returns a tool result as a message for templates. A name that is not a plain word becomes `tool`, because the policy wrote it."""
    return {"role": "tool", "name": name if _SAFE_NAME.fullmatch(name) else "tool", "tool_call_id": number or NO_ID, "content": content}


_SEPARATORS = " \N{MIDDLE DOT}\N{REPLACEMENT CHARACTER}"
_PRIVATE = range(0xF0000, 0xFFFFE)


class ControlTokenEscaper:
    """Escapes `tokens` by inserting a character that no token contains, usually a space, after the first character of each.

    No token can span that character, so one pass is enough, even if tokens overlap. A token of one character is replaced.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        known = {token for token in tokens if token}
        used = set("".join(known))
        unused = _unused(used)
        self._separator = next(unused)
        self._replacement = "\N{REPLACEMENT CHARACTER}" if "\N{REPLACEMENT CHARACTER}" not in used else self._separator
        self._alone = {token for token in known if len(token) == 1}
        self._pattern = re.compile(_first_characters(known)) if known else None

    def escape(self, text: str) -> str:
        """Returns the text without any of the tokens, in time linear in its length."""
        return text if self._pattern is None else self._pattern.sub(self._broken, text)

    def _broken(self, match: re.Match[str]) -> str:
        return self._replacement if match[0] in self._alone else match[0] + self._separator


def _unused(used: set[str]) -> Iterator[str]:
    """Yields characters that no token contains, the most readable ones first."""
    yield from (character for character in _SEPARATORS if character not in used)
    yield from (chr(number) for number in _PRIVATE if chr(number) not in used)


def _first_characters(tokens: set[str]) -> str:
    """Returns a pattern that matches the first character of each token."""
    rests: dict[str, set[str]] = {}
    for token in tokens:
        rests.setdefault(token[0], set()).add(token[1:])
    ends = {first: "" if "" in texts else f"(?={_any_of(texts)})" for first, texts in sorted(rests.items())}
    return "|".join(re.escape(first) + end for first, end in ends.items())


def _any_of(texts: set[str]) -> str:
    """Returns a pattern that matches any of the strings, and the shortest one if several match. Common prefixes are factored out, so that
    matching many strings costs as little as matching one."""
    if "" in texts:
        return ""
    branches: dict[str, set[str]] = {}
    for text in texts:
        branches.setdefault(text[0], set()).add(text[1:])
    return "(?:" + "|".join(_stem(first, rests) for first, rests in sorted(branches.items())) + ")"


def _stem(first: str, rests: set[str]) -> str:
    """Returns the pattern for one branch: the common prefix of its strings, then the alternatives."""
    stem = first
    while "" not in rests and len({rest[0] for rest in rests}) == 1:
        stem += next(iter(rests))[0]
        rests = {rest[1:] for rest in rests}
    return re.escape(stem) + _any_of(rests)
