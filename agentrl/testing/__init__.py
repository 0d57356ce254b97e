"""Scripted replacements of a policy, a sandbox, a chat endpoint and a clock, for tests of the code around them."""

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
