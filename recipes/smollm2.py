"""SmolLM2, a pretrained language model with 135M parameters, learns to solve reasoning-gym problems with a tool, on two CPU cores.

    make smollm2                              # installs packages, and creates the model folder recipes/models/smollm2
    agentrl check recipes/smollm2.py          # checks the tasks in real sandboxes
    agentrl eval recipes/smollm2.py           # measures the model before training
    agentrl train recipes/smollm2.py

There is no supervised step: training starts from the published model. Each prompt contains two solved problems of the same kind.
Evaluations are greedy, on held-out problems of the trained kinds and (split `heldout_real`) on problems of kinds that are never trained. To
measure the model without the tool, before and after training:

    agentrl eval evals/smollm2_no_tool.py
    agentrl eval evals/smollm2_no_tool.py --model runs/smollm2/model
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
    SamplingConfig,
    ServingConfig,
    TasksConfig,
)

recipe = Recipe(
    name="smollm2",
    steps=28,
    max_staleness=0,
    policy=PolicyConfig(model="recipes/models/smollm2", dtype="float32", max_model_len=1024),
    tasks=TasksConfig(
        family=Part(
            "sandboxes.reasoning:Reasoning",
            options={
                "datasets": 'basic_arithmetic(max_terms=3 max_digits=2 operators=["+","-","*"]), chain_sum, products, spell_backward',
                "heldout_kinds": "count_bits, lcm, bitwise_arithmetic, letter_counting",
                "turn_tokens": 96,
            },
        ),
        weighting=True,
    ),
    rollout=RolloutConfig(group=GroupConfig(size=8), groups_per_step=8, concurrency=64, sampling=SamplingConfig(top_k=20, min_p=0.1)),
    evaluation=EvalConfig(heldout=80, heldout_real=48, sampling=SamplingConfig(temperature=0.0)),
    serving=ServingConfig(max_num_seqs=64, kv_cache_gb=1.25),
    objective=ObjectiveConfig(clip_low=0.2, clip_high=0.28),
    learner=LearnerConfig(lr=2e-5, zero_stage=0, ranks=1, max_tokens_per_microbatch=1536),
)

if __name__ == "__main__":
    from agentrl.cli import run_recipe

    run_recipe(__file__)
