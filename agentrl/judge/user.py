"""A model behind an endpoint as the simulated user of `agentrl.environment.dialogue`."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.environment.dialogue import INSTRUCTIONS, Said, user_messages
from agentrl.errors import JudgeError
from agentrl.judge.endpoint import Endpoint

_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndpointUser:
    """Plays the user: `customer = EndpointUser(endpoint=Endpoint(url=..., model=...))`, with the option `user="mine:customer"`.

    The model sees its brief as the system message, the agent's texts as messages of its user, and its own as its answers. Use a
    temperature above 0 for users that differ.
    """

    endpoint: Endpoint
    instructions: str = INSTRUCTIONS

    async def __call__(self, brief: str, dialogue: Said) -> str:
        """Returns the next text. Raises `JudgeError` if the endpoint fails, or returns no text three times."""
        messages = [{"role": role, "content": text} for role, text in user_messages(brief, dialogue, self.instructions)]
        for _ in range(_TRIES):
            reply = await self.endpoint.ask(messages)
            cut = "cut off" in reply.problem
            if reply.text.strip() and (cut or not reply.problem):
                return reply.text
        raise JudgeError(f"the simulated user {self.endpoint.model} returned no text: {reply.problem or 'empty'}")
