"""Trains any external agent program unchanged: an HTTP server implements the program's protocol, and records what it samples as exact
tokens.

`ExternalProgram` is the `agentrl.protocols.Agent` that runs a program in the episode's sandbox. `Gateway` serves sessions; a `Session`
answers the requests of one program with samples of its episode's policy.
"""

from agentrl.gateway.program import ExternalProgram
from agentrl.gateway.rewards import posted_reward
from agentrl.gateway.server import Gateway
from agentrl.gateway.session import Session
from agentrl.gateway.tokens import ConversationTokens

__all__ = ["ConversationTokens", "ExternalProgram", "Gateway", "Session", "posted_reward"]
