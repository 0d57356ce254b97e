"""The quickstart with LoRA: the base policy does not change, and each version is a low-rank adapter a tenth the size of the policy.

    agentrl train recipes/quickstart_lora.py
    agentrl train recipes/quickstart_lora.py learner.lora.rank=4 --run-dir runs/x

Except for LoRA and the learning rate, everything is as in the quickstart: tasks, sandboxes, policy and evaluation. In the run folder,
`model/` is the merged model, and `adapter/` is the adapter.
"""

from agentrl.config import LoraConfig
from recipes.quickstart import recipe as base

recipe = base.but({"name": "quickstart-lora", "learner.lr": 4e-3, "learner.lora": LoraConfig(rank=8, alpha=16.0)})
