"""The complete loop on two CPU cores: a small agent learns to answer questions about tables by running code.

    python recipes/quickstart.py
    agentrl train recipes/quickstart.py learner.lr=3e-4 --run-dir runs/x      # the same recipe with overrides

The run takes three to ten minutes, depending on the machine. No component is simulated: vLLM serves the policy, Docker or bubblewrap runs
the code, and DeepSpeed updates the weights. For a larger model on a GPU, see `tables_qwen3_gpu.py`, which is the same recipe with different
settings.
"""

from agentrl.config import (
    EvalConfig,
    GroupConfig,
    LearnerConfig,
    ObjectiveConfig,
    PolicyConfig,
    Recipe,
    RolloutConfig,
    SamplingConfig,
    ServingConfig,
    TasksConfig,
)

recipe = Recipe(
    name="quickstart",
    steps=24,
    max_staleness=1,
    policy=PolicyConfig(model="recipes/models/tables-base", dtype="float32", max_model_len=512),
    tasks=TasksConfig(family="sandboxes.tables:Tables"),
    rollout=RolloutConfig(group=GroupConfig(size=8), groups_per_step=16, concurrency=64),
    evaluation=EvalConfig(heldout=160, heldout_real=96, sampling=SamplingConfig(temperature=0.0)),
    serving=ServingConfig(max_num_seqs=64, kv_cache_gb=0.5, threads=1),
    objective=ObjectiveConfig(clip_low=0.2, clip_high=0.28),
    learner=LearnerConfig(lr=3e-4, zero_stage=2, ranks=1, threads=1, max_tokens_per_microbatch=2048),
)

if __name__ == "__main__":
    from agentrl.cli import run_recipe

    run_recipe(__file__)
