"""Messages to token ids, each exactly once, and completions back to messages.

A conversation is never rendered and tokenized again as it grows. The opening prompt is tokenized once; a completion is kept
as the ids that were sampled; what the tools answered is tokenized once, as the delta the chat template puts between two
assistant turns. The policy is therefore always conditioned on, and trained on, the very ids that were in its context.

What the model says becomes a record in `agentrl.agent.calls`, what a program says becomes tokens here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.agent.calls import read_calls
from agentrl.agent.fence import Fence
from agentrl.errors import UserError
from agentrl.records import Message

WITHHELD = "error: this output is not shown: it reads as control tokens of the model"
_MARK = "\ue000assistant turn\ue000"  # private-use characters: found again in a rendered template, never in real text


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
        control = _control_tokens(tokenizer)
        self._fence = Fence(control)
        self._control_ids = frozenset(control.values()) - {tokenizer.unk_token_id}  # which any text may have
        self._withheld: dict[int, tuple[int, ...]] = {}  # by the number of outputs
        self.stop_token_ids: tuple[int, ...] = (int(tokenizer.eos_token_id),)
        self.tool_delta([""])  # a template that cannot be continued is refused here, not in the middle of an episode

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

    def _delta(self, outputs: Sequence[str]) -> tuple[int, ...]:
        tools = [{"role": "tool", "content": output} for output in outputs]
        text = self._render([{"role": "user", "content": "-"}, {"role": "assistant", "content": _MARK}, *tools], schemas=())
        _, found, delta = text.partition(_MARK)
        eos = self._tokenizer.eos_token
        if not found or not delta.startswith(eos):
            raise UserError(
                f"policy.model: its chat template does not end an assistant turn with {eos!r}",
                fix="tool-using rollouts need a template that puts the eos token right after each assistant message",
            )
        return self._encode(delta.removeprefix(eos))

    def _controls(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self._control_ids]

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


def _control_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Texts that are one token wherever they stand, and their ids; without runs of white space, which some tokenizers add for code."""
    added = {str(token): (number, bool(token.special)) for number, token in tokenizer.added_tokens_decoder.items()}
    named = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return {text: number for text, (number, special) in added.items() if special or not text.isspace()} | named
