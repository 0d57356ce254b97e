"""Probes a chat template: its form of tool calls, its text between two assistant turns, and whether it only appends to a conversation.

The probe assumes nothing about a model. A template's form of tool calls is the form whose reader returns the calls that the template wrote.
A template is extended by deltas only if random conversations, rendered in full, equal the concatenation of their deltas, both as text and
as ids.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from agentrl.agent.forms import FORMS, CallForm, call_form
from agentrl.agent.rendering import NO_ID, OTHER, THINK, Renderer, tool_message
from agentrl.errors import UserError
from agentrl.records import Message, ToolCall

MARK = "\ue000assistant turn\ue000"  # private-use characters, which real text does not contain
SHOWN = ("\ue000first output\ue000", "\ue000second output\ue000")

_USER = {"role": "user", "content": "-"}
_KINDS = {"code": "string", "n": "integer", "ratio": "number", "flag": "boolean", "more": "array", "last": "string"}
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "try_this",
        "description": "Tries it.",
        "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in _KINDS.items()}, "required": ["code"]},
    },
}
"""A tool with arguments of every JSON type, for probes."""

_TEXTS = (
    "print('\u00e9')",
    'if a < b & "c":\n    d = "\\n"',
    "\u4f60\u597d \U0001f600\u200d",
    "[1, {2}] </b> 3%",
    "true",
    "\u0301a  b",
    "x",
)


def turn_ends(renderer: Renderer, control: Collection[str]) -> tuple[str, ...]:
    """Returns the control tokens that the template writes directly after the assistant's text, if a user message or a tool result follows.

    If there are several such tokens, the template has no end-of-turn token: each turn ends with the first token of the next turn.
    """
    ends: list[str] = []
    for following in (_USER, tool_message(SHOWN[0])):
        with suppress(UserError):  # the template may not accept such a conversation
            _, _, rest = renderer.text([_USER, {"role": "assistant", "content": MARK}, following]).partition(MARK)
            ends += sorted((token for token in control if token and rest.startswith(token)), key=len)[-1:]
    return tuple(dict.fromkeys(ends))


def shows_calls(renderer: Renderer) -> bool:
    """Returns whether the template shows a call. Tries the arguments as an object, then as text, and sets `renderer.arguments_as_text` to
    the form that works."""
    for as_text in (False, True):
        renderer.arguments_as_text = as_text
        with suppress(UserError):
            if MARK in renderer.text([_USER, _calling_turn(renderer, "tool"), *(tool_message(output) for output in SHOWN)]):
                return True
    renderer.arguments_as_text = False
    return False


def puts_results_in_user_turn(renderer: Renderer) -> bool:
    """Returns whether tool results must be part of a user message, and configures the renderer accordingly.

    Tool results must be part of a user message if the template rejects or ignores tool messages but shows user messages.
    """
    results = [tool_message(output) for output in SHOWN]

    def shows(as_user: bool) -> bool:
        renderer.results_as_user = as_user
        with suppress(UserError):
            text = renderer.text([_USER, {"role": "assistant", "content": MARK}, *renderer.results(results)])
            return any(output in text for output in SHOWN)
        return False

    renderer.results_as_user = not shows(False) and shows(True)
    return renderer.results_as_user


def _calling_turn(renderer: Renderer, name: str) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [renderer.call(name, {"code": MARK}, NO_ID)]}


class Seam:
    """The text that a template puts between two assistant turns, with the tool outputs.

    Args:
        ends: tokens that may end a turn, as strings.
        eos: the tokenizer's eos token, for error messages.
        calls: whether the template shows calls (`shows_calls`).

    Raises:
        UserError: the template rejects a conversation with tool outputs, does not end a turn with one of `ends`, or does not show each
            output once and in order.
    """

    def __init__(self, renderer: Renderer, ends: Collection[str], *, eos: str, calls: bool) -> None:
        self._renderer = renderer
        self._eos = eos
        self._ends = re.compile("|".join(re.escape(end) for end in sorted(ends, key=len, reverse=True)))
        self.shows_calls = calls
        delta = self.between(SHOWN)
        at = [delta.find(output) for output in SHOWN]
        if not 0 <= at[0] < at[1] or any(delta.count(output) > 1 for output in SHOWN):
            raise UserError("policy.model: its chat template does not show tool outputs exactly once and in order", fix=OTHER)

    def between(self, outputs: Sequence[str], names: Sequence[str] = (), numbers: Sequence[str] = ()) -> str:
        """Returns the text from the token that ends one turn, inclusive, to the start of the next turn. Raises the errors of `Seam`.

        Args:
            names: the tools' names for the first outputs. The name for every other output is "tool".
            numbers: the ids that the model gave these calls, if its form has ids.
        """
        results = [
            tool_message(output, name=names[n] if n < len(names) else "tool", number=numbers[n] if n < len(numbers) else NO_ID)
            for n, output in enumerate(outputs)
        ]
        turn: dict[str, Any] = {"role": "assistant", "content": MARK}
        if self.shows_calls:
            turn = _calling_turn(self._renderer, results[0]["name"] if results else "tool")
        return self._after(turn, self._renderer.results(results))

    def before_user(self, text: str) -> str:
        """Returns the text from the token that ends a turn without calls, inclusive, to the start of the next turn, with one user
        message."""
        return self._after({"role": "assistant", "content": MARK}, [{"role": "user", "content": text}])

    def _after(self, turn: Mapping[str, Any], following: Sequence[Mapping[str, Any]]) -> str:
        """Returns the rendered text after the mark in `turn`, starting with the token that ends the turn. The text of a call may follow the
        mark."""
        _, mark, rest = self._renderer.text([_USER, turn, *following]).partition(MARK)
        end = (self._ends.search if turn.get("tool_calls") else self._ends.match)(rest)
        if not mark or end is None:
            raise UserError(
                f"policy.model: its chat template does not end an assistant turn with {self._eos!r}",
                fix=f"{OTHER}, or set eos_token in tokenizer_config.json: an end-of-turn token must follow each assistant message",
            )
        return rest[end.start() :]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateForm:
    """A template's form of tool calls, and what the probe observed."""

    form: CallForm
    seam: Seam
    how: str  # how the form was selected, as text for users
    parallel: bool  # whether a turn may contain several calls
    written: str  # turns as the template writes them
    ends: tuple[str, ...]  # tokens that the template writes after the assistant's text (`turn_ends`)


def find_form(renderer: Renderer, control: Collection[str], eos: str, name: str | None) -> TemplateForm:
    """Returns the form of tool calls: the form named `name`, or the form that reads what the template writes.

    A turn ends with a token that the template writes at the end of a turn, the tokenizer's eos token, or an end token of the form.

    Raises:
        UserError: as for `Seam`, or the form is unknown or does not read the template's calls.
    """
    named_form = None if name is None else call_form(name)
    ends, calls = turn_ends(renderer, control), shows_calls(renderer)

    def seam_of(form: CallForm) -> Seam:
        own = {end for end in (*form.ends, *form.hands_over) if end in control}
        return Seam(renderer, ({eos, *ends} - {*form.inner}) | own, eos=eos, calls=calls)

    if not calls:
        form = named_form or FORMS["hermes"]
        how = "policy.tool_format" if named_form else "the template has no form for calls, so the task's prompt must describe this form"
        how += "; it has no tool messages, so tool results are in the user's turn" if puts_results_in_user_turn(renderer) else ""
        return TemplateForm(form=form, seam=seam_of(form), how=how, parallel=True, written="", ends=ends)
    single, pair = _random_call(random.Random(0)), (_random_call(random.Random(1)), _random_call(random.Random(2)))
    shown, tool_problem = "", None
    for form in [named_form] if named_form else FORMS.values():
        try:
            seam = seam_of(form)
            text = _written(renderer, seam, (single,))
        except UserError as error:
            tool_problem = tool_problem or error
            continue
        shown = shown or ascii(text[:120])
        if _reads(form, text, (single,)):
            parallel = False
            with suppress(UserError):  # the template may allow one call per turn
                several = _written(renderer, seam, pair)
                text, parallel = text + several, _reads(form, several, pair)
            how = "policy.tool_format" if named_form else "detected from the chat template"
            return TemplateForm(form=form, seam=seam, how=how, parallel=parallel, written=text, ends=ends)
    if tool_problem is not None and not shown:
        raise tool_problem
    if named_form:
        raise UserError(
            f"policy.tool_format={name} does not read the calls that the chat template writes: {shown}",
            fix=f"remove the setting to detect the form, or use one of {', '.join(FORMS)}",
        )
    raise UserError(
        f"policy.model: its chat template writes tool calls in an unknown form: {shown}",
        fix=f"{OTHER} to a template that writes one of these forms: {', '.join(FORMS)}",
    )


def _reads(form: CallForm, text: str, calls: tuple[ToolCall, ...]) -> bool:
    reading = form.read(text, [TOOL])
    return reading.calls == calls and not reading.errors


def _written(renderer: Renderer, seam: Seam, calls: tuple[ToolCall, ...]) -> str:
    """Returns a turn with only these calls, as the template writes it, up to the end-of-turn token."""
    user, turn = Message(role="user", content="-"), Message(role="assistant", content="", tool_calls=calls)
    outputs = [f"{SHOWN[0]}{n}" for n in range(len(calls))]
    results = [Message(role="tool", content=output) for output in outputs]
    before = renderer.text(renderer.messages([user]))
    full = renderer.text(renderer.messages([user, turn, *results]))
    delta = seam.between(outputs, [call.name for call in calls], [f"call{n:05d}" for n in range(len(calls))])
    old, new = renderer.ids(before), renderer.ids(full)  # not the texts, which may diverge within a token
    same = next((n for n, (left, right) in enumerate(zip(old, new, strict=False)) if left != right), len(old))
    return renderer.decode(new[same:]).removesuffix(delta)


def rewrites(renderer: Renderer, detected: TemplateForm, *, users: bool = False) -> str:
    """Returns why a template cannot be extended exactly; empty if random conversations equal the concatenation of their parts. Raises
    `UserError` if the template rejects a conversation.

    Args:
        users: whether some turns are followed by user messages, before and after turns with tool results.
    """
    for seed in range(4):
        messages, schemas = _random_opening(renderer, seed)
        draw = random.Random(seed)
        answers = draw.choice(("utu", "uut", "tuu")) if users else "ttt"
        if reason := _rewrites(renderer, detected, messages, schemas, answers, draw):
            return reason
    return ""


def _random_opening(renderer: Renderer, seed: int) -> tuple[list[Message], tuple[Mapping[str, Any], ...]]:
    """Returns the first messages of a conversation and its tools.

    Odd seeds have a system message and a tool, if the template accepts them.
    """
    user = Message(role="user", content=_TEXTS[seed])
    if seed % 2:
        messages = [Message(role="system", content=_TEXTS[-1 - seed]), user]
        with suppress(UserError):
            renderer.text(renderer.messages(messages), (TOOL,))
            return messages, (TOOL,)
    return [user], ()


def _rewrites(
    renderer: Renderer,
    detected: TemplateForm,
    messages: list[Message],
    schemas: Sequence[Mapping[str, Any]],
    answers: str,
    draw: random.Random,
) -> str:
    """Renders one conversation in full after each round. Returns why the template cannot be extended exactly; empty if it can. `answers`
    contains "u" for each turn before a user message, and "t" for each turn before tool results."""
    seam = detected.seam
    before, calls_so_far = renderer.text(renderer.messages(messages), schemas), 0
    thinks = renderer.knows_thinking and not before.rstrip().endswith(THINK[1])  # otherwise the template disables reasoning
    for answer in answers:
        many = 0 if answer == "u" or not seam.shows_calls else draw.randint(1, 2) if detected.parallel else 1
        calls = tuple(_random_call(draw) for _ in range(many))
        thought = f"{draw.choice(_TEXTS)}{MARK}" if thinks and draw.random() < 0.7 else ""
        outputs = [draw.choice(_TEXTS) for _ in range(max(1, len(calls)))]
        text = "" if calls else draw.choice(_TEXTS)
        content = f"{THINK[0]}\n{thought}\n{THINK[1]}\n\n{text}" if thought else text
        role = "user" if answer == "u" else "tool"
        messages += [Message(role="assistant", content=content, tool_calls=calls), *(Message(role=role, content=o) for o in outputs)]
        full = renderer.text(renderer.messages(messages), schemas)
        numbers = [f"call{calls_so_far + n:05d}" for n in range(len(calls))]
        delta = seam.before_user(outputs[0]) if answer == "u" else seam.between(outputs, [c.name for c in calls], numbers)
        calls_so_far += len(calls)
        if not full.startswith(before):
            return "it rewrites earlier turns when a turn is added"
        if not full.endswith(delta) or len(full) < len(before) + len(delta):
            return "its text between two turns depends on earlier turns"
        if thought and thought not in full[len(before) :]:
            return "it drops the model's reasoning"
        if renderer.ids(full) != renderer.ids(full[: -len(delta)]) + renderer.ids(delta):
            return "the tokenizer merges tokens across the end of a turn"
        before = full
    return ""


def _random_call(draw: random.Random) -> ToolCall:
    arguments: dict[str, Any] = {
        "code": draw.choice(_TEXTS) + draw.choice(("", "\n")),
        "n": draw.randint(-9, 99),
        "ratio": draw.choice((0.5, -2.25e-7)),
        "flag": draw.random() < 0.5,
        "more": [None, {"a": draw.choice(_TEXTS)}],
        "last": draw.choice(_TEXTS),
    }
    return ToolCall(name="try_this", arguments=arguments)
