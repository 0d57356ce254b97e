"""The quickstart with LoRA: the base policy stays as it is, and a version is a low-rank adapter to it, a tenth of its size.

    agentrl train recipes/quickstart_lora.py
    agentrl train recipes/quickstart_lora.py learner.lora.rank=4 --run-dir runs/x

Everything else but the learning rate is the quickstart's: the same tasks, sandboxes, policy and evaluation. `model/` in the run
folder is the result as a whole model, `adapter/` what was trained.
"""

from agentrl.config import LoraConfig
from recipes.quickstart import recipe as base

recipe = base.but({"name": "quickstart-lora", "learner.lr": 4e-3, "learner.lora": LoraConfig(rank=8, alpha=16.0)})
