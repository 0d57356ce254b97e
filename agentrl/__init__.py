"""agentrl: reinforcement-learning post-training for tool-using language-model agents.

Exports the module `records`, the base classes of errors and the class `Recipe`. Each name is imported on first use, so that the pytest
plug-in adds little to the start of a pytest run. None of these imports loads torch, vllm or deepspeed.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl import records
    from agentrl.config import Recipe
    from agentrl.errors import AgentRLError, InfrastructureError, UserError
else:
    _WHERE = {"records": "", "AgentRLError": "errors", "InfrastructureError": "errors", "UserError": "errors", "Recipe": "config"}

    def __getattr__(name):
        from importlib import import_module

        if name not in _WHERE:
            raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
        module = import_module(f"agentrl.{_WHERE[name] or name}")
        value = globals()[name] = getattr(module, name) if _WHERE[name] else module
        return value


__version__ = "0.1.0"
__all__ = ["AgentRLError", "InfrastructureError", "Recipe", "UserError", "__version__", "records"]
