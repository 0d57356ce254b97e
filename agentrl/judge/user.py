"""A model behind an endpoint as the simulated user of `agentrl.environment.dialogue`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.errors import JudgeError
from agentrl.judge.endpoint import Endpoint

INSTRUCTIONS = """You play a person who talks to a service agent. Stay in this role. Write only what the person says, in one or two \
sentences. Do not help the agent, do not invent facts, and give details only if you are asked for them. If you know whether your request \
was granted or declined, say goodbye and end your message with [END]. The person:

"""
GREETING = "Hello. How can I help you?"
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndpointUser:
    """Plays the user: `customer = EndpointUser(endpoint=Endpoint(url=..., model=...))`, with the option `user="mine:customer"`.

    The model sees its brief as the system message, the agent's texts as messages of its user, and its own as its answers. Use a
    temperature above 0 for users that differ.
    """

    endpoint: Endpoint
    instructions: str = INSTRUCTIONS

    async def __call__(self, brief: str, said: Sequence[tuple[str, str]]) -> str:
        """Returns the next text. Raises `JudgeError` if the endpoint fails, or returns no text three times."""
        messages = [{"role": "system", "content": f"{self.instructions}{brief}"}, {"role": "user", "content": GREETING}]
        messages += [{"role": "assistant" if speaker == "user" else "user", "content": text} for speaker, text in said]
        for _ in range(_TRIES):
            reply = await self.endpoint.ask(messages)
            cut = "cut off" in reply.problem
            if reply.text.strip() and (cut or not reply.problem):
                return reply.text
        raise JudgeError(f"the simulated user {self.endpoint.model} returned no text: {reply.problem or 'empty'}")
