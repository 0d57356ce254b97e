"""SmolLM2 with LoRA: the published weights do not change, and each version is a low-rank adapter.

    agentrl train recipes/smollm2_lora.py

Except for LoRA, the learning rate and the number of steps, everything is as in `smollm2.py`. Each step publishes a version of 5 MB instead
of 540 MB.
"""

from agentrl.config import LoraConfig
from recipes.smollm2 import recipe as base

recipe = base.but({"name": "smollm2-lora", "steps": 20, "learner.lr": 2e-4, "learner.lora": LoraConfig(rank=16, alpha=32.0)})

if __name__ == "__main__":
    from agentrl.cli import run_recipe

    run_recipe(__file__)
