"""agentrl: reinforcement-learning post-training for tool-using language-model agents.

The light face of the package: records, errors, the recipe. Importing it pulls no torch, vllm or deepspeed.
"""

from agentrl import records
from agentrl.errors import AgentRLError, InfrastructureError, UserError
from agentrl.recipe import Recipe

__version__ = "0.1.0"
__all__ = ["AgentRLError", "InfrastructureError", "Recipe", "UserError", "__version__", "records"]
