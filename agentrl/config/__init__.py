"""The configuration of a run: the recipe and its sections (`agentrl.config.recipe.__all__`). Importing this package does not import torch,
vllm or deepspeed."""

from agentrl.config.recipe import *  # noqa: F403
from agentrl.config.recipe import __all__ as __all__
