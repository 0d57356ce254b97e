"""How a chat template goes on: what it puts between two turns of the assistant, and the proof that it only ever adds to a conversation.

Nothing about a model is taken on trust. The form of its tool calls is the one whose reader gives back what the template writes, and
a template is extended by deltas only where random conversations, rendered whole, are what the deltas add up to, as text and as ids.
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

MARK = "\ue000assistant turn\ue000"  # private-use characters: found again in a rendered template, never in real text
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
"""A tool with arguments of every kind, for proofs."""

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
    """The control tokens that the template writes directly after the assistant's text, if a user or a tool's result follows.

    If there are several, a turn ends with the first token of the next turn.
    """
    found: list[str] = []
    for following in (_USER, tool_message(SHOWN[0])):
        with suppress(UserError):  # the template may not accept such a conversation
            _, _, rest = renderer.text([_USER, {"role": "assistant", "content": MARK}, following]).partition(MARK)
            found += sorted((token for token in control if token and rest.startswith(token)), key=len)[-1:]
    return tuple(dict.fromkeys(found))


def shows_calls(renderer: Renderer) -> bool:
    """Whether the template shows a call. Tries arguments as an object, then as text, and sets the working choice on the renderer."""
    for as_text in (False, True):
        renderer.arguments_as_text = as_text
        try:
            text = renderer.text([_USER, _said(renderer, "tool"), *(tool_message(output) for output in SHOWN)])
        except UserError:
            continue
        if MARK in text:
            return True
    renderer.arguments_as_text = False
    return False


def puts_results_in_user_turn(renderer: Renderer) -> bool:
    """Whether tool results must be part of a user message: the template raises an error on tool messages, or does not show them.

    Sets this choice on the renderer. If the template shows them in neither way, the choice is tool messages.
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


def _said(renderer: Renderer, name: str) -> dict[str, Any]:
    call = renderer.call(name, {"code": MARK}, NO_ID)
    return {"role": "assistant", "content": "", "tool_calls": [call]}


class Seam:
    """What a template puts between two turns of the assistant, which holds what tools gave.

    Raises `UserError` on construction for a template that takes no such conversation, does not end a turn with one of `ends`, or
    does not show each output once and in order.

    Args:
        ends: texts of the tokens that may end a turn.
        eos: the tokenizer's own, for messages.
        calls: whether the template shows calls (`shows_calls`).
    """

    def __init__(self, renderer: Renderer, ends: Collection[str], *, eos: str, calls: bool) -> None:
        self._renderer = renderer
        self._eos = eos
        self._ends = re.compile("|".join(re.escape(end) for end in sorted(ends, key=len, reverse=True)))
        self.shows_calls = calls
        delta = self.between(SHOWN)
        at = [delta.find(output) for output in SHOWN]
        if not 0 <= at[0] < at[1] or any(delta.count(output) > 1 for output in SHOWN):
            raise UserError("policy.model: its chat template does not show what tools gave, each output once and in order", fix=OTHER)

    def between(self, outputs: Sequence[str], names: Sequence[str] = (), numbers: Sequence[str] = ()) -> str:
        """The text from the token that ends one turn, that token included, to the start of the next.

        Args:
            names: of the tools that gave the outputs, where a call was made; of the others there are none.
            numbers: what the model called those calls, where its form has that.
        """
        given = [
            tool_message(output, name=names[n] if n < len(names) else "tool", number=numbers[n] if n < len(numbers) else NO_ID)
            for n, output in enumerate(outputs)
        ]
        said = _said(self._renderer, given[0]["name"] if given else "tool") if self.shows_calls else {"role": "assistant", "content": MARK}
        _, found, rest = self._renderer.text([_USER, said, *self._renderer.results(given)]).partition(MARK)
        end = (self._ends.search if self.shows_calls else self._ends.match)(rest)
        if not found or end is None:
            raise UserError(
                f"policy.model: its chat template does not end an assistant turn with {self._eos!r}",
                fix="tool-using rollouts need a template that puts the eos token, or another that ends turns, right after each assistant"
                f" message: {OTHER}, or eos_token in tokenizer_config.json",
            )
        return rest[end.start() :]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateForm:
    """The form of a template's calls, and what is known of it."""

    form: CallForm
    seam: Seam
    how: str  # for people: where the form was taken from
    parallel: bool  # whether a turn may hold several calls
    written: str  # turns as the template writes them
    ends: tuple[str, ...]  # tokens that the template writes after the assistant's text (`turn_ends`)


def find_form(renderer: Renderer, control: Collection[str], eos: str, name: str | None) -> TemplateForm:
    """The form in which the model is asked to call tools: the one of a name, or the one that reads what the template writes.

    A turn ends with a token that the template writes there, the tokenizer's eos, or an end token of the form.

    Raises `UserError` for a name that there is not, for a form that does not read the template's calls, and as `Seam` does.
    """
    given = None if name is None else call_form(name)
    ends, calls = turn_ends(renderer, control), shows_calls(renderer)

    def seam_of(form: CallForm) -> Seam:
        own = {end for end in (*form.ends, *form.hands_over) if end in control}
        return Seam(renderer, ({eos, *ends} - {*form.inner}) | own, eos=eos, calls=calls)

    if not calls:
        form = given or FORMS["hermes"]
        how = "policy.tool_format" if given else "the template has no form for calls, and the task must ask for this one"
        how += "; it has no tool messages, so tool results are in the user's turn" if puts_results_in_user_turn(renderer) else ""
        return TemplateForm(form=form, seam=seam_of(form), how=how, parallel=True, written="", ends=ends)
    single, double = _call(random.Random(0)), (_call(random.Random(1)), _call(random.Random(2)))
    shown, unfit = "", None
    for form in [given] if given else FORMS.values():
        try:
            seam = seam_of(form)
            said = _written(renderer, seam, (single,))
        except UserError as error:
            unfit = unfit or error
            continue
        shown = shown or ascii(said[:120])
        reading = form.read(said, [TOOL])
        if reading.calls == (single,) and not reading.errors:
            more, parallel = _several(renderer, seam, form, double)
            how = "policy.tool_format" if given else "read off the chat template"
            return TemplateForm(form=form, seam=seam, how=how, parallel=parallel, written=said + more, ends=ends)
    if unfit is not None and not shown:
        raise unfit
    if given:
        raise UserError(
            f"policy.tool_format={name} does not read the calls that the chat template writes: {shown}",
            fix="leave it out, and the form is read off the template, or name another: " + ", ".join(FORMS),
        )
    raise UserError(
        f"policy.model: no reader knows the tool calls that its chat template writes: {shown}",
        fix=f"known are {', '.join(FORMS)}: {OTHER} that writes one of them",
    )


def _several(renderer: Renderer, seam: Seam, form: CallForm, calls: tuple[ToolCall, ...]) -> tuple[str, bool]:
    """Several calls in one turn, as the template writes them; nothing where it takes one at a time."""
    try:
        said = _written(renderer, seam, calls)
    except UserError:
        return "", False
    reading = form.read(said, [TOOL])
    return said, reading.calls == calls and not reading.errors


def _written(renderer: Renderer, seam: Seam, calls: tuple[ToolCall, ...]) -> str:
    """A turn of calls alone, as the template writes it, up to the token that ends it."""
    said = Message(role="assistant", content="", tool_calls=calls)
    asked = [Message(role="user", content="-")]
    outputs = [f"{SHOWN[0]}{n}" for n in range(len(calls))]
    results = [Message(role="tool", content=output) for output in outputs]
    before = renderer.text(renderer.messages(asked))
    whole = renderer.text(renderer.messages([*asked, said, *results]))
    delta = seam.between(outputs, [call.name for call in calls], [f"call{n:05d}" for n in range(len(calls))])
    old, new = renderer.ids(before), renderer.ids(whole)  # not the texts, which may part within a token
    same = next((n for n, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), len(old))
    return renderer.said(new[same:]).removesuffix(delta)


def rewrites(renderer: Renderer, seam: Seam, found: TemplateForm) -> str:
    """Why a template cannot be extended exactly; empty where random conversations are what their parts add up to."""
    for seed in range(4):
        if reason := _rewrites(renderer, seam, found, _beginning(renderer, seed), random.Random(seed)):
            return reason
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beginning:
    """What a conversation begins with."""

    messages: tuple[Message, ...]
    schemas: tuple[Mapping[str, Any], ...]


def _beginning(renderer: Renderer, seed: int) -> _Beginning:
    """Every other one has a system message and tools, if the template takes such."""
    asked = Message(role="user", content=_TEXTS[seed])
    full = _Beginning(messages=(Message(role="system", content=_TEXTS[-1 - seed]), asked), schemas=(TOOL,))
    if seed % 2:
        with suppress(UserError):
            renderer.text(renderer.messages(full.messages), full.schemas)
            return full
    return _Beginning(messages=(asked,), schemas=())


def _rewrites(renderer: Renderer, seam: Seam, found: TemplateForm, begun: _Beginning, draw: random.Random) -> str:
    """One conversation of three rounds, rendered whole after each of them."""
    messages = list(begun.messages)
    before, calls_so_far = renderer.text(renderer.messages(messages), begun.schemas), 0
    thinks = renderer.knows_thinking and not before.rstrip().endswith(THINK[1])  # else it is told that its thinking is over
    for _ in range(3):
        calls = tuple(_call(draw) for _ in range(draw.randint(1, 2) if found.parallel else 1)) if seam.shows_calls else ()
        thought = f"{draw.choice(_TEXTS)}{MARK}" if thinks and draw.random() < 0.7 else ""
        outputs = [draw.choice(_TEXTS) for _ in range(max(1, len(calls)))]
        text = "" if calls else draw.choice(_TEXTS)
        content = f"{THINK[0]}\n{thought}\n{THINK[1]}\n\n{text}" if thought else text
        messages += [Message(role="assistant", content=content, tool_calls=calls), *(Message(role="tool", content=o) for o in outputs)]
        whole = renderer.text(renderer.messages(messages), begun.schemas)
        delta = seam.between(outputs, [c.name for c in calls], [f"call{calls_so_far + n:05d}" for n in range(len(calls))])
        calls_so_far += len(calls)
        if not whole.startswith(before):
            return "it writes what came before anew when a turn is added"
        if not whole.endswith(delta) or len(whole) < len(before) + len(delta):
            return "what it puts between two turns depends on the turns before them"
        if thought and thought not in whole[len(before) :]:
            return "it leaves out what the model thought"
        if renderer.ids(whole) != renderer.ids(whole[: -len(delta)]) + renderer.ids(delta):
            return "the tokenizer makes other tokens of the end of one turn and the start of the next together than of each"
        before = whole
    return ""


def _call(draw: random.Random) -> ToolCall:
    arguments: dict[str, Any] = {
        "code": draw.choice(_TEXTS) + draw.choice(("", "\n")),
        "n": draw.randint(-9, 99),
        "ratio": draw.choice((0.5, -2.25e-7)),
        "flag": draw.random() < 0.5,
        "more": [None, {"a": draw.choice(_TEXTS)}],
        "last": draw.choice(_TEXTS),
    }
    return ToolCall(name="try_this", arguments=arguments)
