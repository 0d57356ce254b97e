"""A simulated user for `agentrl.environment.dialogue` whose messages come from a model behind an endpoint."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.environment.dialogue import INSTRUCTIONS, Said, user_messages
from agentrl.errors import JudgeError
from agentrl.judge.endpoint import Endpoint

_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndpointUser:
    """Plays the user: `customer = EndpointUser(endpoint=Endpoint(url=..., model=...))`, with the option `user="mine:customer"`.

    In the model's prompt, the brief is the system message, the agent's messages are user messages, and the model's own messages are
    assistant messages. Use a temperature above 0 so that the users in different episodes differ.
    """

    endpoint: Endpoint
    instructions: str = INSTRUCTIONS

    async def __call__(self, brief: str, dialogue: Said) -> str:
        """Returns the user's next message. Raises `JudgeError` if the endpoint fails or returns no text three times in a row."""
        messages = [{"role": role, "content": text} for role, text in user_messages(brief, dialogue, self.instructions)]
        for _ in range(_TRIES):
            reply = await self.endpoint.ask(messages)
            if reply.text.strip() and reply.is_content:
                return reply.text
        raise JudgeError(f"the simulated user {self.endpoint.model} returned no text: {reply.problem or 'empty'}")
