"""Scripted replacements for a policy, a sandbox, a chat endpoint and a clock, for tests of code that uses these."""

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
