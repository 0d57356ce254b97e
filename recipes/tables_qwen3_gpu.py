"""The quickstart's task family with a Qwen3 model with 0.6B to 4B parameters on one GPU.

    agentrl train recipes/tables_qwen3_gpu.py
    agentrl train recipes/tables_qwen3_gpu.py policy.model=Qwen/Qwen3-4B serving.gpu_memory_utilization=0.35

Episodes may be long, because Qwen3 thinks before it acts. The server and the learner share the GPU. `serving.gpu_memory_utilization` is the
fraction of GPU memory that the server uses. The learner needs about 16 bytes per parameter (weights, gradients and Adam's moments) and room
for activations: 0.6B parameters should fit into 24 GB, and 4B parameters need a GPU with 141 GB.
"""

from agentrl.config import (
    EvalConfig,
    GroupConfig,
    LearnerConfig,
    ObjectiveConfig,
    Part,
    PolicyConfig,
    Recipe,
    RolloutConfig,
    ServingConfig,
    TasksConfig,
)

recipe = Recipe(
    name="tables-qwen3",
    steps=60,
    max_staleness=1,
    device="cuda",
    policy=PolicyConfig(model="Qwen/Qwen3-0.6B", dtype="bfloat16", max_model_len=4096),
    tasks=TasksConfig(family=Part("sandboxes.tables:Tables", options={"turn_tokens": 1024, "episode_tokens": 4096})),
    rollout=RolloutConfig(group=GroupConfig(size=8), groups_per_step=32, concurrency=128),
    evaluation=EvalConfig(heldout=256, heldout_real=96, every=20),
    serving=ServingConfig(max_num_seqs=256, gpu_memory_utilization=0.4),
    objective=ObjectiveConfig(clip_low=0.2, clip_high=0.28),
    learner=LearnerConfig(lr=1e-6, warmup_steps=5, zero_stage=2, kernels="liger", max_tokens_per_microbatch=16384),
)

if __name__ == "__main__":
    from agentrl.cli import run_recipe

    run_recipe(__file__)
