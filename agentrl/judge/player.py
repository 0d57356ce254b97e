"""A player for the agent `players` (`rollout.agent=players`) whose moves come from a model behind an endpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.errors import EnvironmentFault, JudgeError
from agentrl.judge.endpoint import Endpoint


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndpointPlayer:
    """Plays roles of games: `rival = EndpointPlayer(endpoint=Endpoint(url=..., model=...))`, in a recipe `opponent="mine:rival"`.

    The model sees all observations of its role. The model's reply must name exactly one of the allowed actions.
    """

    endpoint: Endpoint
    instructions: str = ""

    async def __call__(self, role: str, observations: Sequence[str], actions: Sequence[str]) -> str:
        """Returns an action. Raises `JudgeError` if the endpoint fails or returns no message, and `EnvironmentFault` if the message does
        not name exactly one allowed action."""
        wanted = f"\n\nAnswer with one of these, and nothing else: {', '.join(actions)}" if actions else ""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        shown = "\n".join(observations)
        reply = await self.endpoint.ask([*messages, {"role": "user", "content": f"You are {role}.\n{shown}{wanted}"}])
        if not reply.is_content:  # the text is then a refusal or the raw response
            raise JudgeError(f"{self.endpoint.model} returned no move: {reply.problem}")
        text = reply.text.strip()
        if not actions or text in actions:
            return text
        named = [action for action in actions if re.search(rf"(?<!\w){re.escape(action)}(?!\w)", text)]
        if len(named) != 1:
            raise EnvironmentFault(
                f"the answer of {self.endpoint.model} contains {len(named)} allowed actions instead of one: {text!r:.200}"
            )
        return named[0]
