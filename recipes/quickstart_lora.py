"""The quickstart with LoRA: the base policy does not change, and a version is a low-rank adapter of a tenth of its size.

    agentrl train recipes/quickstart_lora.py
    agentrl train recipes/quickstart_lora.py learner.lora.rank=4 --run-dir runs/x

Except for the learning rate, everything else is the quickstart's: tasks, sandboxes, policy and evaluation. In the run folder, `model/` is
the merged model and `adapter/` the adapter.
"""

from agentrl.config import LoraConfig
from recipes.quickstart import recipe as base

recipe = base.but({"name": "quickstart-lora", "learner.lr": 4e-3, "learner.lora": LoraConfig(rank=8, alpha=16.0)})
