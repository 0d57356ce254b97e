"""Trains the policy with any external agent program, which stays unchanged: an HTTP server implements the program's protocol, and records
the samples as exact tokens.

`ExternalProgram` is the `agentrl.protocols.Agent` that runs a program in the episode's sandbox. `Gateway` serves sessions. A `Session`
answers the requests from one program with samples from the policy of the program's episode.
"""

from agentrl.gateway.program import ExternalProgram
from agentrl.gateway.rewards import posted_reward
from agentrl.gateway.server import Gateway
from agentrl.gateway.session import Session
from agentrl.gateway.tokens import ConversationTokens

__all__ = ["ConversationTokens", "ExternalProgram", "Gateway", "Session", "posted_reward"]
