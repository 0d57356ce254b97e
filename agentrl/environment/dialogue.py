"""Conversations as environments: a simulated user with a hidden goal answers the agent's messages, and a backend answers the agent's calls.

    EnvironmentSpec(ref="agentrl.environment.dialogue:Dialogues", options={"user": "mine:customer", "brief": "You want a refund."})

The user's messages are observations. The tokens of the user's messages are not trained on, unless the policy plays the user and
`train_user` is set. All rewards are 0. Verifiers score what the agent did and said, never the user's opinion, because an agent can persuade
a user model.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from agentrl.errors import EnvironmentFault, PluginError, PolicyFault, PromptRefusedError
from agentrl.plugins.references import resolve
from agentrl.records import EnvironmentSpec, Observation, Step, ToolCall

END = "[END]"
"""If a user's reply ends with this marker, the conversation ends. In a message from the agent, the marker is replaced by `[END ]`."""
AGENT, USER = "agent", "user"
POLICY, TRAINED = "policy", "trained"
UNREADABLE = "(a message that cannot be read)"
LEFT = "(The user has left.)"
INSTRUCTIONS = """You play a person who talks to a service agent. Stay in this role. Write only what the person says, in one or two \
sentences. Do not help the agent, do not invent facts, and give details only if you are asked for them. If you know whether your request \
was granted or declined, say goodbye and end your message with [END]. The person:

"""
GREETING = "Hello. How can I help you?"
Said = Sequence[tuple[str, str]]
"""The conversation so far, as pairs (`agent` or `user`, text)."""
User = Callable[[str, Said], str | Awaitable[str]]
"""Returns the user's next message. Arguments: the brief, which contains the hidden goal, and the conversation."""
Translate = Callable[[str, Said], str | ToolCall]
"""Converts an action from a fixed list to a message to the user, or to a call. Arguments: the action and the conversation."""


class Backend(Protocol):
    """The system on which the agent's calls act in one episode. The system's state depends only on the calls so far."""

    schemas: Sequence[dict[str, Any]]  # function schemas of the calls

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Applies a call and returns its result. An error that the agent can correct is returned as a result."""
        ...


def user_messages(brief: str, dialogue: Said, instructions: str = INSTRUCTIONS) -> list[tuple[str, str]]:
    """Returns the messages for a model that plays the user, as pairs (role, text). In these messages, the agent has the role `user`."""
    shown = [("assistant" if speaker == USER else "user", text) for speaker, text in dialogue]
    return [("system", f"{instructions}{brief}"), ("user", GREETING), *shown]


class Dialogues:
    """An `agentrl.protocols.EnvironmentOpener` for conversations."""

    async def open(self, spec: EnvironmentSpec) -> Dialogue:
        """Returns a conversation. The arguments of `Dialogue` come from the options in `spec`. Raises `PluginError` if an option is
        invalid."""
        try:
            return Dialogue(**spec.options)
        except (TypeError, ValueError) as error:
            raise PluginError(f"{spec.ref}: {error}", fix="correct the options of the environment") from None

    async def close(self) -> None:
        """Does nothing: conversations share no resources."""


class Dialogue:
    """One conversation. A conversation ends when a reply of the user ends with `END`, or after `turns` replies.

    Args:
        user: plug-in reference of a `User`: a function, which may be async, or an object such as `agentrl.judge.user.EndpointUser`. If
            `user` is `policy`, the episode's policy plays the user, in a separate trajectory whose agent is `user`. The turns of that
            trajectory have no completion tokens unless `train_user` is set.
        brief: describes the user and their goal; only the user sees it.
        instructions: the agent's system message.
        opening: the user's first message. The opening is fixed, so an episode can start without the user's model.
        backend: plug-in reference of a class whose instances are `Backend`s. The class is called with the argument `records`.
        actions: if not empty, the strings from which the agent must choose; `translate` must then be the plug-in reference of a
            `Translate`.
        turns: maximum number of replies.
        chars: maximum length of a message from the agent or the user, in characters. Longer messages are truncated.
        step_s: deadline for the user's reply, in seconds.
        train_user: whether to train on the user's tokens. Requires that the policy plays the user.

    Raises `ValueError` if an option is invalid, and `PluginError` if a reference does not resolve.
    """

    takes_text = True

    def __init__(
        self,
        *,
        user: str,
        brief: str,
        instructions: str = "",
        opening: str = "Hello.",
        backend: str = "",
        records: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        translate: str = "",
        turns: int = 12,
        chars: int = 1000,
        step_s: float = 300.0,
        train_user: bool = False,
    ) -> None:
        if train_user and user != POLICY:
            raise ValueError(f"train_user requires user={POLICY}")
        if turns < 1 or chars < 1 or not step_s > 0 or not opening:
            raise ValueError("turns, chars and step_s must be positive, and opening must not be empty")
        if bool(actions) != bool(translate):
            raise ValueError("actions and translate must be set together")
        self.instructions, self.step_s = instructions, step_s
        self.said: list[tuple[str, str]] = []
        self._calls: list[tuple[str, dict[str, Any]]] = []
        self._user: User | None = None if user == POLICY else resolve(user)
        self.policy_user = "" if self._user is not None else TRAINED if train_user else POLICY  # if not empty, `play_user` must be called
        self._translate: Translate | None = resolve(translate) if translate else None
        self._backend: Backend | None = resolve(backend)(records or {}) if backend else None
        schemas = () if self._backend is None else tuple(self._backend.schemas)
        self.actions: Sequence[str] | Sequence[dict[str, Any]] | None = tuple(actions) or schemas or None
        self._brief, self._opening, self._turns, self._chars = brief, opening, turns, chars
        self._shown = ""

    def play_user(self, user: User) -> None:
        """Sets the function that plays the user. Must be called if the policy plays the user."""
        self._user = user

    async def reset(self) -> Observation:
        """Returns the user's first message."""
        self.said.append((USER, self._opening))
        return self._observation(self._opening)

    async def step(self, action: str | ToolCall) -> Step:
        """Applies a call, or sends a message to the user. Returns the result of the call, the user's reply, or an error for an empty
        message. Raises `EnvironmentFault` if the user gives no valid reply."""
        if self._translate is not None and isinstance(action, str):
            action = self._translate(action, tuple(self.said))
        if isinstance(action, ToolCall):
            return Step(observation=self._observation(self._call(action.name, dict(action.arguments))))
        if not action.strip():
            return Step(observation=self._observation("error: the message is empty"))
        self.said.append((AGENT, action[: self._chars].replace(END, "[END ]")))
        reply = await self._reply()
        self.said.append((USER, reply))
        text, ended = reply.removesuffix(END).rstrip(), reply.endswith(END)
        if not ended and sum(speaker == AGENT for speaker, _ in self.said) >= self._turns:
            text, ended = f"{text}\n{LEFT}", True
        return Step(observation=self._observation(text), terminated=ended)

    async def close(self) -> None:
        """Does nothing: a conversation has no resources to free."""

    async def snapshot(self) -> bytes:
        """Returns the conversation and its calls as JSON, so that a resumed episode does not request the user's replies again."""
        return json.dumps({"said": self.said, "calls": self._calls, "shown": self._shown}).encode()

    async def restore(self, state: bytes) -> Observation:
        """Repeats the calls in a snapshot, restores its conversation and returns the last observation."""
        saved = json.loads(state)
        self.said = [(str(speaker), str(text)) for speaker, text in saved["said"]]
        for name, arguments in saved["calls"]:
            self._call(name, arguments)
        return self._observation(saved["shown"])

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        self._calls.append((name, arguments))
        if self._backend is None:
            return f"error: there is no function {name}"
        return self._backend.call(name, arguments)

    def _observation(self, text: str) -> Observation:
        self._shown = text
        return Observation(text=text)

    async def _reply(self) -> str:
        """Returns the user's next message.

        If a user model rejects the conversation, for example because of its content or length, the request is repeated with the agent's
        messages replaced by a placeholder. The placeholder prevents an agent from ending its episode with a fault. Raises
        `EnvironmentFault` if the reply is invalid.
        """
        dialogue = tuple(self.said)
        try:
            text = await self._ask(dialogue)
        except PromptRefusedError:
            text = await self._ask(tuple((speaker, UNREADABLE if speaker == AGENT else words) for speaker, words in dialogue))
        if not isinstance(text, str) or not text.strip():
            raise EnvironmentFault(f"the simulated user returned {type(text).__name__ if not isinstance(text, str) else 'an empty string'}")
        text, ended = text.strip(), text.strip().endswith(END)
        words = text.removesuffix(END).replace(END, "").strip()[: self._chars]
        return f"{words} {END}".strip() if ended else words or LEFT

    async def _ask(self, dialogue: Said) -> Any:
        if self._user is None:
            raise PluginError("the policy can play the user only if the agent supports it", fix="set rollout.agent=turns")
        try:
            reply = self._user(self._brief, dialogue)
            return await reply if inspect.isawaitable(reply) else reply
        except PolicyFault as error:  # the simulated user failed, not the agent
            raise EnvironmentFault(f"the simulated user failed: {error}") from error
