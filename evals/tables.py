"""Evaluation suite of the `tables` family: every real task, and as many generated held-out ones.

agentrl eval evals/tables.py --model runs/quickstart/model
"""

from agentrl.config import EvalConfig, PolicyConfig, Recipe, RolloutConfig, ServingConfig, TasksConfig

recipe = Recipe(
    name="tables",
    policy=PolicyConfig(model="recipes/models/tables-base", dtype="float32", max_model_len=512),
    tasks=TasksConfig(family="sandboxes.tables:Tables"),
    rollout=RolloutConfig(concurrency=64),
    evaluation=EvalConfig(heldout=240, heldout_real=240),
    serving=ServingConfig(max_num_seqs=64, kv_cache_gb=0.5, threads=1),
)
