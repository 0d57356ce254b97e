"""Converts messages to token ids, each exactly once, and completions back to messages.

A conversation is not rendered or tokenized again as it grows. The opening prompt is tokenized once; a completion keeps the ids that were
sampled; tool outputs are tokenized once, as the delta that the chat template puts between two assistant turns. So the policy is conditioned
on, and trained on, exactly the ids that were in its context.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from agentrl.agent.arguments import argument_errors
from agentrl.agent.forms import Frame, Reading
from agentrl.agent.images import UNREADABLE, ImageTokens
from agentrl.agent.rendering import OTHER, THINK, ControlTokenEscaper, Renderer, Tokenizer
from agentrl.agent.template import SHIPPED_TEMPLATES, TOOL, auto_tokenizer, probe_tokenizer, select_template
from agentrl.agent.template_probe import SHOWN, find_form, rewrites
from agentrl.base.media import MediaFolder
from agentrl.errors import UserError
from agentrl.records import Message, ToolCall, ToolResult
from agentrl.records.chat import user_message
from agentrl.records.images import MARK, REFERENCE
from agentrl.records.limits import Thinking

WITHHELD = "error: this output is not shown: it contains control tokens of the model"

Rewritten = Literal["refuse", "restart"]
"""What to do with a chat template that cannot be extended exactly."""

_MARKUP = re.compile(r"<\|[^\s<>|]{1,64}\|>|<\uff5c[^\s<>\uff5c]{1,64}\uff5c>|<(?:start|end)_of_turn>")  # how control tokens are spelled
_MOST_WITHHELD = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCompletion:
    """A completion parsed into a message, and the errors in its invalid tool calls. The agent sees these errors."""

    message: Message
    errors: tuple[str, ...] = ()
    answer: str = ""  # the message without the reasoning
    call_ids: tuple[str, ...] = ()  # the ids that the model gave the message's tool calls; empty if the form has no ids
    end: int | None = None  # the token that ended the turn; None if the completion was cut off


class ChatFormat:
    """Renders conversations to exact token ids for one tokenizer, and parses completions. If the tokenizer has several templates, the
    template for tools is used.

    `thinking` describes how the model marks and ends its reasoning; None means that the model has no such marks.

    Args:
        tool_format: name of a form of tool calls (`agentrl.agent.forms.FORMS`). None selects the form that reads what the template writes.
        rewritten: `restart` accepts a template that cannot be extended exactly (see `exact`). The agent must then start a new context
            instead of extending the old one.

    Raises:
        UserError: the tokenizer has no chat template or no end-of-turn token, `tool_format` is unknown, no form reads the template's tool
            calls, `rewritten` is `restart` for a template that can be extended exactly, or the template is unusable: it does not end an
            assistant turn with an end-of-turn token, does not show tool outputs, writes control tokens that the tokenizer splits, or, if
            `rewritten` is `refuse`, rewrites earlier turns.
    """

    def __init__(self, tokenizer: Tokenizer, *, tool_format: str | None = None, rewritten: Rewritten = "refuse") -> None:
        tokenizer.chat_template = select_template(tokenizer.chat_template)
        if not tokenizer.chat_template:
            raise UserError(
                "policy.model: its tokenizer has no chat template",
                fix=f"set policy.chat_template to a built-in template ({', '.join(SHIPPED_TEMPLATES)}) or a file, or use a chat model",
            )
        if tokenizer.eos_token_id is None:
            raise UserError(
                "policy.model: its tokenizer has no eos_token, so turns cannot end", fix="set eos_token in tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer)
        control = _control_tokens(tokenizer)
        self._escaper = ControlTokenEscaper(control)
        self._control_ids = frozenset(control.values()) - {tokenizer.unk_token_id}  # any text may contain the unknown token
        self._withheld: dict[object, tuple[int, ...]] = {}  # keyed by the number of outputs and their calls, or by "user"
        detected = find_form(self._renderer, control, str(tokenizer.eos_token), tool_format)
        self._seam, self._form, self._detected = detected.seam, detected.form, detected
        self._check_control_tokens()
        self.tool_format = detected.form.name
        self.form_summary = f"tool calls: {detected.form.name} ({detected.how})"
        delta = self._renderer.ids(self._seam.between(SHOWN))
        ends = {end for end in detected.ends if end not in detected.form.inner}
        handed = {*detected.form.hands_over, *(ends if len(ends) > 1 else ())}
        self._hands_over = delta[0] in {control.get(end) for end in handed}  # a turn may end with the first token of the next turn
        known = (control.get(end) for end in (*detected.form.ends, *detected.form.hands_over, *sorted(ends)))
        stops = [int(tokenizer.eos_token_id), delta[0], *(end for end in known if end is not None)]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(stops))
        own = {control.get(token) for token in (*detected.form.inner, *THINK)} | {*self._renderer.ids(detected.written), *stops}
        self._forged = frozenset(self._controls(delta)) - own
        marked = THINK[1] in str(tokenizer.chat_template) or THINK[1] in control
        self.thinking = Thinking(end=self._renderer.ids(f"\n{THINK[1]}\n\n"), unfinished=self._unfinished) if marked else None
        self.thinks_first = self._renderer.text([{"role": "user", "content": "-"}]).rstrip().endswith(THINK[0])
        self.rewrite_reason = rewrites(self._renderer, detected)
        self._rewritten = rewritten
        self._check_extended(self.rewrite_reason)
        if rewritten == "restart" and not self.user_rewrite_reason:
            message = "policy.rewritten_context=restart has no effect: this chat template can be extended exactly"
            raise UserError(message, fix="remove the setting")

    def read_images(self, images: ImageTokens | None) -> None:
        """Sets the reader of images in strings. None, the initial value, treats references to images as text."""
        self._renderer.images = images
        if images is not None:  # the template's marks around an image are part of the image
            self._control_ids -= {*self._renderer.ids(images.around)}

    @property
    def reads_images(self) -> bool:
        """Whether the model reads images."""
        return self._renderer.images is not None

    def render_user(self, content: Any) -> str:
        """Renders a conversation that consists of one user message. `content` is a string or a list of content parts."""
        return str(self._tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False))

    async def refer(self, text: str) -> str:
        """Stores the images in a string, and returns the string with references to them. If the model reads only text, replaces the images
        with a note. Raises `InvalidImage` if an image is invalid, or if there are too many."""
        if MARK not in text:
            return text
        if self._renderer.images is None:
            return REFERENCE.sub(UNREADABLE, text)
        return await asyncio.to_thread(self._renderer.images.refer, text)

    @cached_property
    def user_rewrite_reason(self) -> str:
        """The reason why user messages between the turns prevent an exact extension of a context; empty if they do not. Probed on first
        access."""
        try:
            return self.rewrite_reason or rewrites(self._renderer, self._detected, users=True)
        except UserError as error:
            return error.message

    def check_user_turns(self) -> None:
        """Raises `UserError` if user messages cannot extend a context exactly and `rewritten` is `refuse`. Agents that need user messages
        call this method early."""
        self._check_extended(self.user_rewrite_reason, " by user messages")

    @property
    def exact(self) -> bool:
        """Whether a context can always be extended by deltas. If it cannot, `rewrite_reason` states the reason."""
        return not self.rewrite_reason

    def opening(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Returns the token ids of the prompt, up to the first assistant turn. Raises `UserError` if the template rejects the prompt."""
        return self._renderer.ids(self._renderer.text(self._renderer.messages(messages), schemas))

    def tool_delta(self, outputs: Sequence[str], after: ParsedCompletion | None = None) -> tuple[int, ...]:
        """Returns the token ids from the end-of-turn token of one assistant turn, exclusive, to the start of the next turn, with the tool
        outputs.

        Outputs are untrusted: control tokens in them are escaped, so that a program cannot forge a turn. If the tokenizer still produces a
        control token because it normalizes characters, all outputs are withheld.

        Args:
            after: the turn to which the outputs belong. `outputs` starts with the outputs of the turn's calls, in order; the errors of its
                invalid calls follow. Some templates repeat a call's name or id. None means that the names and ids are unknown, and that the
                turn ends with the template's end-of-turn token.

        Raises:
            RuntimeError: the template is not `exact`.
        """
        _require_exact(self.rewrite_reason)
        names = [call.name for call in after.message.tool_calls] if after else []
        numbers = list(after.call_ids) if after else []
        key = (len(outputs), tuple(names), tuple(numbers))
        if key not in self._withheld:
            if len(self._withheld) >= _MOST_WITHHELD:  # the keys contain names and ids that the policy wrote
                self._withheld.clear()
            self._withheld[key] = self._delta([WITHHELD] * len(outputs), names, numbers)
        return self._unforged(self._delta([self.escape_text(output) for output in outputs], names, numbers), self._withheld[key], after)

    def user_delta(self, text: str, after: ParsedCompletion | None = None) -> tuple[int, ...]:
        """Returns the token ids from the end-of-turn token of one assistant turn, exclusive, to the start of the next turn, with one user
        message.

        The text is untrusted, as in `tool_delta`. The turn `after` must have no tool calls.

        Raises:
            RuntimeError: the template cannot be extended exactly by user messages (`user_rewrite_reason`).
        """
        _require_exact(self.user_rewrite_reason)
        key = "user"
        if key not in self._withheld:
            self._withheld[key] = self._renderer.ids(self._seam.before_user(WITHHELD))
        ids = self._renderer.ids(self._seam.before_user(self.escape_text(text)))
        return self._unforged(ids, self._withheld[key], after)

    def answer_delta(self, results: Sequence[ToolResult], after: ParsedCompletion) -> tuple[int, ...]:
        """Returns the token ids that show the recorded results of the turn `after`: the user message that follows it, or its tool
        outputs. Raises `RuntimeError` if `answer_rewrite_reason` is not empty."""
        text = user_message(after.message, results)
        return self.tool_delta([result.output for result in results], after) if text is None else self.user_delta(text, after)

    def answer_rewrite_reason(self, results: Sequence[ToolResult], after: ParsedCompletion) -> str:
        """Returns the reason why `answer_delta` cannot extend a context by these results; empty if it can."""
        return self.rewrite_reason if user_message(after.message, results) is None else self.user_rewrite_reason

    def _unforged(self, ids: tuple[int, ...], withheld: tuple[int, ...], after: ParsedCompletion | None) -> tuple[int, ...]:
        """Returns `ids`, or `withheld` if the control tokens in `ids` differ from those in `withheld`. Omits the first token, which ends
        the turn `after`, unless a turn may end with the first token of the next one and `after` ended with a different token."""
        ids = ids if self._controls(ids) == self._controls(withheld) else withheld
        return ids if self._hands_over and after is not None and after.end not in (None, ids[0]) else ids[1:]

    def render_conversation(
        self, prompt: Sequence[Message], conversation: Sequence[Message], schemas: Sequence[Mapping[str, Any]]
    ) -> tuple[int, ...]:
        """Returns the ids of a complete conversation for a template that is not `exact`.

        `conversation` contains all messages after the prompt. These messages are untrusted: control tokens in them are escaped. Raises
        `UserError` if the template rejects the conversation.
        """
        escaped = [self.escape_message(message) for message in conversation]
        hidden = [replace(message, content=WITHHELD) if message.role != "assistant" else message for message in escaped]
        ids, withheld = self.opening([*prompt, *escaped], schemas), self.opening([*prompt, *hidden], schemas)
        return ids if self._controls(ids) == self._controls(withheld) else withheld

    def escape_message(self, message: Message) -> Message:
        """Returns the message with control tokens escaped in its text and its calls."""
        calls = tuple(
            ToolCall(name=self.escape_text(call.name), arguments=self.escape_value(call.arguments)) for call in message.tool_calls
        )
        return replace(message, content=self.escape_text(message.content), tool_calls=calls)

    def escape_value(self, value: Any) -> Any:
        """Returns the JSON value with control tokens escaped in its strings and keys."""
        if isinstance(value, str):
            return self.escape_text(value)
        if isinstance(value, Mapping):
            return {self.escape_text(key): self.escape_value(item) for key, item in value.items()}
        return [self.escape_value(item) for item in value] if isinstance(value, list | tuple) else value

    def text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of a completion, with control tokens but without the end-of-turn token."""
        ids = list(token_ids)
        return self._renderer.decode(ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids)

    def argument_errors(self, schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
        """Returns the errors in the arguments of a call to the tool with this schema; empty if there are none."""
        return argument_errors(schema, arguments)

    def frame(self, name: str) -> Frame | None:
        """Returns the text around the arguments of a call to this tool; None if guided decoding cannot enforce the form."""
        frame = self._form.frame
        return None if frame is None else frame.of(name)

    def parse(self, token_ids: Sequence[int], schemas: Sequence[Mapping[str, Any]] = (), *, calls: bool = True) -> ParsedCompletion:
        """Parses a completion into a message. Invalid tool calls become `errors` and never raise an exception.

        Args:
            schemas: the schemas of the task's tools, which determine the types of arguments that a form writes without quotes.
            calls: False treats tool calls as text.
        """
        ids = list(token_ids)
        end = ids.pop() if ids and ids[-1] in self.stop_token_ids else None
        own = next((n for n, token in enumerate(ids) if token in self._forged), len(ids))
        text, forged = self._renderer.decode(ids[:own]), self._renderer.decode(ids[own:])
        thought, text, closed = self._thinking(text)
        reading = self._form.read(text, schemas)
        if not calls and (reading.calls or reading.errors):
            reading = Reading(content=text)
        errors = reading.errors
        if calls and not closed and any(opens in thought for opens in self._form.opens):
            errors += (f"a tool call inside your thinking is not run: end your thinking with {THINK[1]} first",)
        if calls and any(opens in forged for opens in self._form.opens):
            errors += ("a turn cannot start another one: the tool calls after its control token were not run",)
        if reading.thinking:
            thought = f"{THINK[0]}\n{reading.thinking}\n{THINK[1]}\n\n"
        answer = (reading.content + forged).strip()
        message = Message(role="assistant", content=(thought + answer).strip(), tool_calls=reading.calls)
        return ParsedCompletion(message=message, errors=errors, answer=answer, call_ids=reading.ids, end=end)

    def answer_of(self, message: Message) -> str:
        """Returns the text of a parsed message without the reasoning."""
        return self._thinking(message.content)[1].strip()

    def _thinking(self, text: str) -> tuple[str, str, bool]:
        """Returns the reasoning with its marks, the text after it, and whether the reasoning has ended."""
        if self.thinks_first and not text.lstrip().startswith(THINK[0]):
            text = f"{THINK[0]}\n{text}"
        if not text.lstrip().startswith(THINK[0]):
            return "", text, True
        thought, closed, rest = text.partition(THINK[1])
        space = rest[: len(rest) - len(rest.lstrip())]
        return thought + closed + space, rest, bool(closed)

    def _unfinished(self, token_ids: Sequence[int]) -> bool:
        thought, _, closed = self._thinking(self._renderer.decode(token_ids))
        return bool(thought) and not closed

    def escape_text(self, text: str) -> str:
        """Returns `text` with control tokens escaped: `<|im_end|>` becomes `< |im_end|>`."""
        return self._escaper.escape(text)

    def tool_problem(self, schema: Mapping[str, Any]) -> str:
        """Returns the reason why the policy cannot use a tool with this function schema; empty if it can."""
        required = schema["function"]["parameters"].get("required", ())
        if unwritable := [name for name in required if self._form.argument and not re.fullmatch(self._form.argument, name)]:
            return f"calls of the form {self.tool_format} cannot have an argument named {unwritable[0]!a}"
        if self.escape_value(schema) != schema:
            return "its schema contains a control token of the model"
        try:
            self.opening([Message(role="user", content="-")], [schema] if self.shows_tools() else [])
        except UserError as error:
            return error.message[:300]
        return ""

    def choice_problem(self, choice: str, turn_tokens: int) -> str:
        """Returns the reason why a turn of at most `turn_tokens` tokens cannot consist of the text `choice`; empty if it can."""
        if self.escape_text(choice) != choice:
            return "it contains a control token of the model"
        ids = self._renderer.ids(choice)
        thought = self._renderer.ids(f"{THINK[1]}\n\n") if self.thinks_first else ()
        read = self.parse((*thought, *ids))
        if read.errors or read.message.tool_calls:
            return "the model's answer would be read as a call"
        if read.answer != choice:
            return f"the model's answer would be read as {read.answer[:80]!a}"
        return f"it has {len(ids)} tokens, but limits.turn_tokens is {turn_tokens}" if len(ids) >= turn_tokens else ""

    def shows_tools(self) -> bool:
        """Returns whether the template shows tools to the model. A template may ignore or reject tools."""
        try:
            text = self._renderer.text([{"role": "user", "content": "-"}], [TOOL])
        except UserError:
            return False
        return str(TOOL["function"]["name"]) in text

    def _delta(self, outputs: Sequence[str], names: Sequence[str], numbers: Sequence[str]) -> tuple[int, ...]:
        return self._renderer.ids(self._seam.between(outputs, names, numbers))

    def _check_extended(self, reason: str, how: str = "") -> None:
        if reason and self._rewritten == "refuse":
            raise UserError(
                f"policy.model: its chat template cannot be extended exactly{how}: {reason}",
                fix=f"{OTHER}; or set policy.rewritten_context=restart, so that each turn starts a new context",
            )

    def _check_control_tokens(self) -> None:
        """Raises `UserError` if the tokenizer does not encode each piece of markup in the template as one known token.

        The model does not know markup of several tokens as a control token, and the escaper would not escape this markup in tool outputs.
        """
        turns = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "-"}, {"role": "tool", "content": "-"}]
        text = self._seam.between(SHOWN)
        for messages, tools in ((turns, ()), ([{"role": "system", "content": "-"}, *turns], [TOOL])):
            with suppress(UserError):  # the template may reject tools or system messages
                text += self._renderer.text(messages, tools)
        for token in sorted({*_MARKUP.findall(text), str(self._tokenizer.eos_token)}):
            ids = self._renderer.ids(token)
            if len(ids) != 1 or ids[0] == self._tokenizer.unk_token_id != self._tokenizer.eos_token_id:
                raise UserError(
                    f"the chat template writes {token!r}, which this tokenizer splits into {len(ids)} tokens",
                    fix="set policy.chat_template to a template with the model's control tokens, or use a different model",
                )

    def _controls(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self._control_ids]


def load_chat(
    folder: str,
    template: str | None = None,
    *,
    tool_format: str | None = None,
    rewritten: Rewritten = "refuse",
    media: MediaFolder | None = None,
) -> ChatFormat:
    """Returns the chat format for a model folder or id. `template` replaces the model's template; None keeps it. Imports transformers.

    Tests the tokenizer and the template in a separate process first (`probe_tokenizer`). `media` is the folder for the conversations'
    images. Raises the errors of `probe_tokenizer`, `ChatFormat` and `ImageTokens.load`, `ImportError` if transformers is not installed, and
    any exception of transformers if the tokenizer does not load.
    """
    load = auto_tokenizer().from_pretrained  # first, so that a missing package is reported as missing
    probe_tokenizer(folder, template)
    tokenizer = load(folder, trust_remote_code=False)
    if template is not None:
        tokenizer.chat_template = template
    chat = ChatFormat(tokenizer, tool_format=tool_format, rewritten=rewritten)
    chat.read_images(ImageTokens.load(folder, chat.render_user, media))
    return chat


def _require_exact(reason: str) -> None:
    if reason:
        raise RuntimeError(f"this chat template cannot be extended by deltas: {reason}")


def _control_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns a mapping from each string that is always one token to its id. Excludes runs of white space, which some tokenizers add for
    code."""
    added = {str(token): (number, bool(token.special)) for number, token in tokenizer.added_tokens_decoder.items()}
    named = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return {text: number for text, (number, special) in added.items() if special or not text.isspace()} | named
