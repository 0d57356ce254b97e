"""Scripted stand-ins for a policy, a sandbox, a chat endpoint and a clock, for tests of what goes on around them. Real parts are tested
with real parts.
"""

from agentrl.testing.chat_server import ChatServer, ScriptedAnswer
from agentrl.testing.clock import JumpingClock
from agentrl.testing.policies import ReadingPolicy, ReplayPolicy, ScriptedPolicy, byte_tokenizer
from agentrl.testing.sandboxes import ScriptedSandboxes

__all__ = [
    "ChatServer",
    "JumpingClock",
    "ReadingPolicy",
    "ReplayPolicy",
    "ScriptedAnswer",
    "ScriptedPolicy",
    "ScriptedSandboxes",
    "byte_tokenizer",
]
