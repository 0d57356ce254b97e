"""The peer's process: TRL's GRPOTrainer on a setting's recipe. Started by `benchmarks.contest.trl`, never by hand.

    python -m benchmarks.contest.trl_worker WORK

`WORK/job.json` has the job. The worker adds lines to `WORK/events.jsonl`, writes the newest weights to `WORK/weights`, and after
every evaluation step waits for a line on its standard input: `go` or `stop`. Its clock is stopped while it waits.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from agentrl.agent import load_tools
from agentrl.agent.template import read_template
from agentrl.base.files import append_lines, json_line
from agentrl.base.processes import process_age_s
from agentrl.cli.running import load_recipe
from agentrl.config import Recipe
from agentrl.errors import UserError
from agentrl.records import Task
from agentrl.session.models import find_model
from agentrl.session.preflight import open_chat
from agentrl.task import open_family
from benchmarks.contest.environment import Host, environment, final_text, messages_of
from benchmarks.contest.setting import ROOT
from benchmarks.contest.together import Together

_SEEN = {"reward": "reward", "logprob_gap": "sampling/sampling_logp_difference/mean"}  # the gap: vLLM against the trainer
_NOTHING = 1e-3  # smaller advantages are rounding errors
_KV_CACHE_GIB = 1  # of vLLM in the trainer's process


@dataclass
class Clock:
    """A clock of this process that excludes pauses, with the seconds per activity."""

    left_out_s: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)

    def now(self) -> float:
        return process_age_s() - self.left_out_s

    @contextmanager
    def into(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.monotonic() - started

    @contextmanager
    def stopped(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.left_out_s += time.monotonic() - started


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]  # of a package without types
    """GRPOTrainer that records its seconds per activity and its tokens. It computes nothing else differently."""

    clock: Clock
    sampled = trained = episodes = 0

    def _generate_single_turn(self, *arguments: Any, **named: Any) -> Any:
        with self.clock.into("rollout"):
            return super()._generate_single_turn(*arguments, **named)

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> Any:
        with self.clock.into("score"):
            return super()._calculate_rewards(*arguments, **named)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self.clock.into("generate_and_score"):
            batch = super()._generate_and_score_completions(inputs)
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        per_row = mask.sum(-1)
        self.episodes += len(per_row)
        self.sampled += int(per_row.sum())
        self.trained += int(per_row[batch["advantages"].abs() > _NOTHING].sum())
        return batch


class Reporter(TrainerCallback):  # type: ignore[misc]
    """After every step reports the figures and writes the weights. After an evaluation step waits for `go` or `stop`."""

    def __init__(self, work: Path, base: Path, every: int, clock: Clock, host: Host) -> None:
        self.trainer: Any = None
        self._work, self._base, self._every, self._clock, self._host = work, base, every, clock, host

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._clock.spent["start"] = self._clock.now()
        self._report("begun")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        clock_s, step, asks = self._clock.now(), int(state.global_step), False
        with self._clock.stopped():
            if self._every:
                save(self.trainer.model, self._base, self._work / "weights")
                asks = step % self._every == 0 or step == state.max_steps
            seen = {name: _latest(self.trainer, key) for name, key in _SEEN.items()}
            self._report("step", step=step, clock_s=clock_s, asks=asks, **seen, **self._figures(clock_s))
            if asks and sys.stdin.readline().strip() != "go":
                control.should_training_stop = True

    def _figures(self, clock_s: float) -> dict[str, Any]:
        spent = dict(self._clock.spent)
        generate_and_score_s, tools = spent.pop("generate_and_score", 0.0), self._host.tool_s
        parts = {**spent, "wait": tools}
        parts["other"] = max(0.0, generate_and_score_s - spent.get("rollout", 0.0) - spent.get("score", 0.0) - tools)
        parts["update"] = max(0.0, clock_s - sum(parts.values()))
        names = ("sampled", "trained", "episodes")
        return {"parts": parts, "faults": self._host.faults, **{name: getattr(self.trainer, name) for name in names}}

    def _report(self, what: str, **more: Any) -> None:
        append_lines(self._work / "events.jsonl", [json_line({"event": what, **more})])


def save(model: Any, base: Path, folder: Path) -> None:
    """Writes a copy of the base model's folder with these weights, atomically."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part / "weights")
    for file in base.iterdir():
        if file.is_file() and ".safetensors" not in file.name and file.name != "SHA256SUMS":
            shutil.copy2(file, part)
    os.replace(part / "weights" / "model.safetensors", part / "model.safetensors")
    shutil.rmtree(part / "weights")
    old = folder.with_name(folder.name + ".old")
    if folder.exists():
        os.replace(folder, old)
    os.replace(part, folder)
    shutil.rmtree(old, ignore_errors=True)


def configuration(recipe: Recipe, options: dict[str, Any], work: Path, *, completion: int, turn: int, turns: int, seed: int) -> GRPOConfig:
    """Converts the recipe to TRL's configuration. `completion`: tokens of an episode after its prompt; `turn`: of one turn."""
    batch = recipe.rollout.group.size * recipe.rollout.groups_per_step
    micro = int(options["micro_batch"]) or batch
    if batch % micro:
        raise UserError(f"micro_batch={micro} does not divide the {batch} episodes of a step", fix="choose a divisor")
    learner, objective = recipe.learner, recipe.objective
    return GRPOConfig(
        output_dir=str(work / "trainer"),
        seed=seed,
        max_steps=recipe.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=batch // micro,
        num_generations=recipe.rollout.group.size,
        max_completion_length=completion,
        generation_kwargs={"max_new_tokens": turn},
        max_tool_calling_iterations=turns,
        temperature=recipe.rollout.sampling.temperature,
        top_p=recipe.rollout.sampling.top_p,
        top_k=recipe.rollout.sampling.top_k,
        min_p=recipe.rollout.sampling.min_p or None,
        learning_rate=learner.lr,
        lr_scheduler_type="constant_with_warmup" if learner.lr_schedule == "constant" else learner.lr_schedule,
        warmup_steps=learner.warmup_steps,
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_grad_norm,
        beta=0.0,
        epsilon=objective.clip_low,
        epsilon_high=objective.clip_high,
        loss_type="dapo",  # mean over all tokens of the step, as in agentrl
        scale_rewards="group" if objective.divides_by_std else "none",
        shuffle_dataset=False,
        remove_unused_columns=False,
        gradient_checkpointing=bool(options["gradient_checkpointing"]),
        cache_implementation=options["cache"] or None,
        use_transformers_continuous_batching=bool(options["continuous_batching"]),
        use_vllm=bool(options["vllm"]),
        vllm_mode="colocate",  # the alternative, a server, takes new weights only over NCCL
        vllm_max_model_length=recipe.policy.max_model_len,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )


def main(work: Path) -> None:
    job = json.loads((work / "job.json").read_text())
    options: dict[str, Any] = job["options"]
    torch.set_num_threads(int(options["threads"]))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(_KV_CACHE_GIB)
    _, recipe = load_recipe(ROOT / job["recipe"], job["arguments"])
    batch = recipe.rollout.group.size * recipe.rollout.groups_per_step
    recipe = recipe.but({"sandbox.max_open": max(batch, recipe.sandbox.max_open)})  # all episodes of the batch are in flight at once
    base = find_model(recipe.policy.model, ROOT)
    host = Host(recipe, open_family(recipe.tasks, seed=recipe.seed, root=ROOT), open_chat(base, template_of(recipe)))
    try:
        host.open(ROOT, f"peers-{work.name}")
        train(host, recipe, options, base, work, every=int(job["every"]))
    finally:
        host.close()


def template_of(recipe: Recipe) -> str | None:
    """The chat template that the recipe has in place of the model's own."""
    name = recipe.policy.chat_template
    return None if name is None else read_template(name, ROOT)


def train(host: Host, recipe: Recipe, options: dict[str, Any], base: Path, work: Path, *, every: int) -> None:
    """Builds the trainer and runs it to its end. Raises `UserError` if its prompts differ from agentrl's."""
    clock = Clock()
    TimedTrainer.clock = clock
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    tokenizer.chat_template = template_of(recipe) or tokenizer.chat_template
    tokenizer.response_template = qwen3_template  # TRL's own, for the Hermes form of tool calls
    groups = range(recipe.steps * recipe.rollout.groups_per_step)
    tasks = [host.task(group) for group in groups]
    single = tasks[0].limits.turns == 1
    prompts = [_opening(host, task) for task in tasks]
    room = min(tasks[0].limits.episode_tokens, recipe.policy.max_model_len) - max(map(len, prompts))
    turn = min(tasks[0].limits.turn_tokens, room)
    arguments = configuration(
        recipe, options, work, completion=turn if single else room, turn=turn, turns=tasks[0].limits.turns, seed=recipe.seed
    )
    reporter = Reporter(work, base, every, clock, host)
    together = not single and options["rollouts"] == "together"
    trainer_prompts = [_prompt(tokenizer, task, single, group) for group, task in zip(groups, tasks, strict=True)]
    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, recipe.policy.dtype)),
        args=arguments,
        train_dataset=_dataset(trainer_prompts),
        processing_class=tokenizer,
        callbacks=[reporter],
        **(_one_turn(host) if single else _together(host) if together else _turns(host, tokenizer, tasks[0], room)),
    )
    reporter.trainer = trainer
    if not together:  # whose prompts are ours
        check_prompts(trainer, trainer_prompts[:8], prompts[:8])
    trainer.train()


def _dataset(prompts: list[Any]) -> Dataset:
    """Returns rows with the group's index. The prompt is not stored in Arrow, which would add the arguments of all calls to each call."""
    numbered = Dataset.from_dict({"group": list(range(len(prompts)))})
    return numbered.with_transform(lambda rows: {"prompt": [prompts[group] for group in rows["group"]], "group": rows["group"]})


def check_prompts(trainer: Any, prompts: list[Any], ours: list[tuple[int, ...]]) -> None:
    """Raises `UserError` unless the trainer tokenizes a prompt as agentrl does."""
    trainer._batch_environments = [None] * len(prompts)
    theirs, _, _ = trainer._tokenize_prompts(prompts)
    for their, our in zip(theirs, ours, strict=True):
        if tuple(their) != our:
            raise UserError(
                f"TRL tokenizes a prompt differently: its {len(their)} tokens start with {list(their)[:8]}, agentrl's with {list(our)[:8]}",
                fix="use a chat template that renders tools from their schema, and a tokenizer that adds no special tokens",
            )


def _one_turn(host: Host) -> dict[str, Any]:
    """Returns a reward function that scores completions."""

    def reward(completion_ids: list[list[int]], group: list[int], **_: Any) -> list[float | None]:
        return host.gather([host.score_completion(number, ids) for number, ids in zip(group, completion_ids, strict=True)])

    return {"reward_funcs": reward}


def _turns(host: Host, tokenizer: Any, task: Task, room: int) -> dict[str, Any]:
    """Returns agentrl's tools as an environment, and a reward function that scores its final state."""
    ending = "end " * (2 * room)
    if len(tokenizer.encode(ending)) <= room:
        raise UserError("the text that ends an episode has too few tokens", fix="use a longer `ending` in benchmarks/contest/trl_worker.py")
    kind = environment(host, list(load_tools(task.tools).values()), ending)

    def reward(completions: list[Any], completion_ids: list[list[int]], environments: list[Any], **_: Any) -> list[float | None]:
        ended = [bool(ids) and ids[-1] in host.chat.stop_token_ids for ids in completion_ids]
        final_states = zip(environments, map(final_text, completions), ended, strict=True)
        return host.gather([env._score(text if has_ended else None) for env, text, has_ended in final_states])

    return {"reward_funcs": reward, "environment_factory": kind}


def _together(host: Host) -> dict[str, Any]:
    """Returns the rollout function of `together`, whose episodes are already scored."""

    def reward(score: list[float | None], **_: Any) -> list[float | None]:
        return score

    return {"reward_funcs": reward, "rollout_func": Together(host)}


def _opening(host: Host, task: Task) -> tuple[int, ...]:
    return host.chat.opening(task.prompt, [tool.schema for tool in load_tools(task.tools).values()])


def _prompt(tokenizer: Any, task: Task, single: bool, group: int) -> Any:
    """Returns messages, or for one-turn tasks the text that the template renders from them, tools included."""
    messages = messages_of(task, group)
    if not single:
        return messages
    schemas = [dict(tool.schema) for tool in load_tools(task.tools).values()] or None
    return tokenizer.apply_chat_template(messages, tools=schemas, add_generation_prompt=True, tokenize=False)


def _latest(trainer: Any, name: str) -> float | None:
    values = trainer._metrics["train"].get(name) or []
    return float(values[-1]) if values else None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
