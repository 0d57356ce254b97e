"""Scripted stand-ins for a policy and a sandbox, for tests of the loop around them. Real parts are tested with real parts."""

from agentrl.testing.policies import ScriptedPolicy, byte_tokenizer
from agentrl.testing.sandboxes import ScriptedSandboxes

__all__ = ["ScriptedPolicy", "ScriptedSandboxes", "byte_tokenizer"]
