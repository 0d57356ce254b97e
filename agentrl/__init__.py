"""agentrl: reinforcement-learning post-training for tool-using language-model agents.

The light face of the package: records, errors, the recipe. Importing it pulls no torch, vllm or deepspeed; nor anything else before
it is used, since the pytest plug-in is imported in every pytest run.
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
        found = globals()[name] = getattr(module, name) if _WHERE[name] else module
        return found


__version__ = "0.1.0"
__all__ = ["AgentRLError", "InfrastructureError", "Recipe", "UserError", "__version__", "records"]
