"""Messages to token ids, each exactly once, and completions back to messages.

A conversation is never rendered and tokenized again as it grows. The opening prompt is tokenized once; a completion is kept
as the ids that were sampled; what the tools answered is tokenized once, as the delta the chat template puts between two
assistant turns. The policy is therefore always conditioned on, and trained on, the very ids that were in its context.

What the model says becomes a record in `agentrl.agent.calls`, what a program says becomes tokens here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.agent.calls import read_calls
from agentrl.agent.fence import Fence
from agentrl.agent.pretrained import auto_tokenizer
from agentrl.agent.template import SHIPPED, TOOL
from agentrl.causes import short
from agentrl.errors import UserError
from agentrl.records import Message

WITHHELD = "error: this output is not shown: it reads as control tokens of the model"
_MARK = "\ue000assistant turn\ue000"  # private-use characters: found again in a rendered template, never in real text
_SHOWN = ("\ue000first output\ue000", "\ue000second output\ue000")
_MARKUP = re.compile(r"<\|[^\s<>|]{1,64}\|>|<\uff5c[^\s<>\uff5c]{1,64}\uff5c>|<(?:start|end)_of_turn>")  # how control tokens are spelled


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCompletion:
    """A completion as a message, and what was wrong with its tool calls (shown to the agent), if anything."""

    message: Message
    errors: tuple[str, ...] = ()


class ChatFormat:
    """Exact tokens for one tokenizer.

    Raises `UserError` on construction when the tokenizer has no chat template or no end-of-turn token, or a template that cannot be
    continued exactly: one that does not end a turn of the assistant with that token, that does not show what tools gave, or whose
    control tokens the tokenizer would split.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.chat_template:
            raise UserError(
                "policy.model: its tokenizer has no chat template",
                fix=f"set policy.chat_template to one that ships ({', '.join(SHIPPED)}) or to a file, or use an instruction-tuned model",
            )
        if tokenizer.eos_token_id is None:
            raise UserError(
                "policy.model: its tokenizer has no eos_token, so turns cannot end", fix="set eos_token in tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        control = _control_tokens(tokenizer)
        self._fence = Fence(control)
        self._control_ids = frozenset(control.values()) - {tokenizer.unk_token_id}  # which any text may have
        self._withheld: dict[int, tuple[int, ...]] = {}  # by the number of outputs
        self.stop_token_ids: tuple[int, ...] = (int(tokenizer.eos_token_id),)
        self._check_continued()  # a template that cannot be is refused here, not in the middle of an episode
        self._check_control_tokens()

    def opening(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Ids of the prompt up to where the first assistant turn begins."""
        text = self._render([_as_chat(m) for m in messages], schemas=schemas)
        return self._encode(text)

    def tool_delta(self, outputs: Sequence[str]) -> tuple[int, ...]:
        """Ids between the end-of-turn token of one assistant turn and the start of the next, holding the tools' outputs.

        Outputs are hostile: text that spells a control token is broken up, so that a program cannot forge a turn. A tokenizer may
        still find one, in letters that it holds to be the same; then nothing of these outputs is shown.
        """
        if len(outputs) not in self._withheld:
            self._withheld[len(outputs)] = self._delta([WITHHELD] * len(outputs))
        ids, withheld = self._delta([self.defang(output) for output in outputs]), self._withheld[len(outputs)]
        return ids if self._controls(ids) == self._controls(withheld) else withheld

    def parse(self, token_ids: Sequence[int]) -> ParsedCompletion:
        """The message in a completion. Whatever is wrong with its tool calls becomes `errors`, never an exception."""
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        calls, errors, content = read_calls(str(self._tokenizer.decode(ids, skip_special_tokens=False)))
        return ParsedCompletion(message=Message(role="assistant", content=content, tool_calls=calls), errors=errors)

    def defang(self, text: str) -> str:
        """Breaks up every control token spelled in `text`: `<|im_end|>` becomes `< |im_end|>`."""
        return self._fence.break_up(text)

    def shows_tools(self) -> bool:
        """Whether the template tells the model of its tools; one may leave them out, or refuse them."""
        try:
            text = self._render([{"role": "user", "content": "-"}], schemas=[TOOL])
        except UserError:
            return False
        return str(TOOL["function"]["name"]) in text

    def _delta(self, outputs: Sequence[str]) -> tuple[int, ...]:
        return self._encode(self._between(outputs))

    def _between(self, outputs: Sequence[str]) -> str:
        """What the template puts between the end-of-turn token of one assistant turn and the start of the next."""
        tools = [{"role": "tool", "content": output} for output in outputs]
        text = self._render([{"role": "user", "content": "-"}, {"role": "assistant", "content": _MARK}, *tools], schemas=())
        _, found, delta = text.partition(_MARK)
        eos = self._tokenizer.eos_token
        if not found or not delta.startswith(eos):
            raise UserError(
                f"policy.model: its chat template does not end an assistant turn with {eos!r}",
                fix="tool-using rollouts need a template that puts the eos token right after each assistant message: set"
                f" policy.chat_template ({', '.join(SHIPPED)}, or a file), or eos_token in tokenizer_config.json",
            )
        return delta.removeprefix(eos)

    def _check_continued(self) -> None:
        delta = self._between(_SHOWN)
        at = [delta.find(output) for output in _SHOWN]
        if not 0 <= at[0] < at[1] or any(delta.count(output) > 1 for output in _SHOWN):
            raise UserError(
                "policy.model: its chat template does not show what tools gave, each output once and in order",
                fix=f"set policy.chat_template ({', '.join(SHIPPED)}, or a file)",
            )

    def _check_control_tokens(self) -> None:
        """What is spelled like a control token must be one: in pieces it means nothing to the model, and a program could write it too."""
        turns = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "-"}, {"role": "tool", "content": "-"}]
        text = self._render(turns, schemas=())
        with suppress(UserError):  # it may take no tools, or no system message
            text += self._render([{"role": "system", "content": "-"}, *turns], schemas=[TOOL])
        for token in sorted({*_MARKUP.findall(text), str(self._tokenizer.eos_token)}):
            ids = self._encode(token)
            if len(ids) != 1 or ids[0] == self._tokenizer.unk_token_id != self._tokenizer.eos_token_id:
                raise UserError(
                    f"the chat template writes {token!r}, which is no token of this tokenizer: it makes {len(ids)} of it",
                    fix="set policy.chat_template to a template that is made for the model's control tokens, or use another model",
                )

    def _controls(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self._control_ids]

    def _render(self, messages: list[dict[str, Any]], *, schemas: Sequence[Mapping[str, Any]]) -> str:
        tools = [dict(s) for s in schemas] or None
        try:
            return str(self._tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # a template is a program, and may raise anything
            roles = ", ".join(str(message["role"]) for message in messages)
            raise UserError(
                f"the chat template cannot render messages of {roles}{' with tools' if tools else ''}: {short(error)}",
                fix=f"set policy.chat_template ({', '.join(SHIPPED)}, or a file)",
            ) from error

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def load_chat(folder: str, template: str | None = None) -> ChatFormat:
    """The chat format of a model folder or id, with a `template` in place of its own; imports transformers."""
    tokenizer = auto_tokenizer().from_pretrained(folder, trust_remote_code=False)
    if template is not None:
        tokenizer.chat_template = template
    return ChatFormat(tokenizer)


def _as_chat(message: Message) -> dict[str, Any]:
    chat: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        chat["tool_calls"] = [
            {"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}} for c in message.tool_calls
        ]
    return chat


def _control_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Texts that are one token wherever they stand, and their ids; without runs of white space, which some tokenizers add for code."""
    added = {str(token): (number, bool(token.special)) for number, token in tokenizer.added_tokens_decoder.items()}
    named = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return {text: number for text, (number, special) in added.items() if special or not text.isspace()} | named
