"""Supervised training with TRL's trainers, on token ids instead of text."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.base.files import commit_folder, partial_folder
from agentrl.base.scratch import ScratchFolder
from agentrl.errors import UserError
from agentrl.judge import reward_model
from agentrl.judge.labels import TextPreference
from agentrl.judge.rendering import PromptField
from agentrl.supervised.select import Preference

_SCALE_PAIRS = 256  # pairs that determine the scale of a reward model
_NOT_COPIED = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", ".*"),
    *("config.json", "version.json", "update.json", "probe.json"),
)


def train_sft(rows: Sequence[dict[str, list[int]]], model: Path, out: Path, *, epochs: float, lr: float, batch: int, seed: int) -> float:
    """Fine-tunes `model` on `rows` (`select_demonstrations`), writes a model folder, and returns the final loss in nats per token.

    The final loss of every function in this module is the mean over the last tenth of the steps, at least one. Every function raises
    `UserError` if there is nothing to train on, if the tokenizer has no padding token, or if the training diverges. `out` is then
    unchanged.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    _require(rows, "an episode with a high enough score", "lower --min-score, or use a run that has trained longer")
    with ScratchFolder() as work:
        common = _common(work, model, epochs, lr, batch, seed)
        trainer = SFTTrainer(
            model=_start(AutoModelForCausalLM, model),
            args=SFTConfig(**common, dataset_kwargs={"skip_prepare_dataset": True}, max_length=None),
            train_dataset=Dataset.from_list(list(rows)),
            processing_class=_tokenizer(model),
        )
        return _train(trainer, model, out)


def train_dpo(
    pairs: Sequence[Preference], model: Path, out: Path, *, beta: float, epochs: float, lr: float, batch: int, seed: int
) -> float:
    """Trains with direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290) from `model`, which is also the reference model.

    Writes a model folder and returns the final loss.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig

    _require(pairs, "a task with attempts of different scores", "lower --margin, or use an earlier part of the run")
    tokenizer = _tokenizer(model)
    with ScratchFolder() as work:
        trainer = _exact_dpo_trainer()(
            model=_start(AutoModelForCausalLM, model),
            ref_model=_start(AutoModelForCausalLM, model),
            args=DPOConfig(**_common(work, model, epochs, lr, batch, seed), beta=beta, max_length=None, remove_unused_columns=False),
            train_dataset=Dataset.from_list([_dpo_row(pair) for pair in pairs]),
            processing_class=tokenizer,
            data_collator=_masked_collator(tokenizer.pad_token_id),
        )
        return _train(trainer, model, out)


def train_reward_model(
    pairs: Sequence[Preference] | Sequence[TextPreference],
    model: Path,
    out: Path,
    *,
    epochs: float,
    lr: float,
    batch: int,
    seed: int,
    shows: tuple[PromptField, ...] = (),
) -> float:
    """Trains a model from `model`'s trunk to score the better episode of a pair higher (Bradley-Terry).

    Writes a folder for `AutoModelForSequenceClassification` with a record of the model's input and scale, and returns the final loss.
    Raises `UserError` also if the trained model's mean score is not higher for the better sides. `shows`: the prompt fields that the text
    of each `TextPreference` contains.
    """
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, set_seed
    from trl import RewardConfig, RewardTrainer

    _require(pairs, "a task with attempts of different scores", "lower --margin, or use an earlier part of the run")
    set_seed(seed)  # also initializes the head
    tokenizer = _tokenizer(model)
    start = _start(AutoModelForSequenceClassification, model, num_labels=1)
    start.config.pad_token_id = tokenizer.pad_token_id
    longest = int(start.config.max_position_embeddings)
    rows = [_reward_row(pair, tokenizer, longest) for pair in pairs]
    with ScratchFolder() as work:
        trainer = RewardTrainer(
            model=start,
            args=RewardConfig(**_common(work, model, epochs, lr, batch, seed), max_length=None),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        return _train(trainer, model, out, finish=partial(_record_reward_model, rows=rows, shows=shows, longest=longest))


def _require(rows: Sequence[Any], what: str, fix: str) -> None:
    if not rows:
        raise UserError(f"the run does not contain {what}", fix=fix)


def _start(kind: Any, model: Path, **options: Any) -> Any:
    """Loads the model with float32 weights, because rounding would lose most updates to bfloat16 weights at these learning rates."""
    import torch

    return kind.from_pretrained(model, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, **options)


def _own_dtype(model: Path) -> Any:
    import torch
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model, trust_remote_code=False).dtype or torch.float32


def _common(work: Path, model: Path, epochs: float, lr: float, batch: int, seed: int) -> dict[str, Any]:
    import torch

    return {
        "output_dir": str(work),
        "num_train_epochs": epochs,
        "per_device_train_batch_size": batch,
        "learning_rate": lr,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,  # a value below 1 means a share of the steps
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "bf16": torch.cuda.is_available() and _own_dtype(model) == torch.bfloat16,  # computation only; the weights are float32
        "report_to": [],
        "seed": seed,
        "data_seed": seed,
    }


def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    if tokenizer.pad_token_id is None:
        raise UserError(f"the tokenizer of {model} has no padding token", fix="set pad_token in its tokenizer_config.json")
    return tokenizer


def _train(trainer: Any, model: Path, out: Path, *, finish: Callable[[Any, Path], None] = lambda trained, folder: None) -> float:
    """Trains, writes the folder, and returns the final loss. Calls `finish` with the trained model and the unfinished folder."""
    trainer.train()
    if not all(parameter.isfinite().all() for parameter in trainer.model.parameters()):  # TRL logs a NaN loss as 0
        raise UserError("the training diverged: weights are not finite, so no model is saved", fix="lower --lr")
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    part = partial_folder(out)
    try:
        shutil.copytree(model, part, ignore=shutil.ignore_patterns(*_NOT_COPIED), dirs_exist_ok=True)
        trainer.model.config.use_cache = True
        trainer.model.to(_own_dtype(model)).save_pretrained(part)
        finish(trainer.model, part)
        commit_folder(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)  # a committed folder has been renamed
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)


def _reward_row(pair: Preference | TextPreference, tokenizer: Any, longest: int) -> dict[str, list[int]]:
    """Returns the token ids of both sides of a pair, truncated to their last `longest` tokens. Text is tokenized as a server of the reward
    model tokenizes it."""
    if isinstance(pair, Preference):
        sides = [[*pair.prompt_ids, *pair.chosen_ids], [*pair.prompt_ids, *pair.rejected_ids]]
    else:
        sides = [list(tokenizer(text)["input_ids"]) for text in (pair.chosen, pair.rejected)]
    return {"chosen_ids": sides[0][-longest:], "rejected_ids": sides[1][-longest:]}


def _record_reward_model(
    trained: Any, folder: Path, *, rows: Sequence[dict[str, list[int]]], shows: tuple[PromptField, ...], longest: int
) -> None:
    """Records the model's input and scale: the mean score of better sides becomes 0.88, and that of worse sides 0.12 (logistic(+-2))."""
    import torch

    trained.eval()
    with torch.inference_mode():
        numbers = {
            side: [float(trained(torch.tensor([row[side]], device=trained.device)).logits[0, 0]) for row in rows[:_SCALE_PAIRS]]
            for side in ("chosen_ids", "rejected_ids")
        }
    better, worse = (sum(values) / len(values) for values in numbers.values())
    if not better > worse:
        raise UserError(
            "the model does not score the better attempt of a pair higher, so it is not saved", fix="raise --epochs or --lr, or add labels"
        )
    reward_model.save_record(folder, shows=shows, offset=(better + worse) / 2, scale=(better - worse) / 4, max_tokens=longest)


def _dpo_row(pair: Preference) -> dict[str, Any]:
    return {
        "prompt_ids": list(pair.prompt_ids),
        "chosen_ids": list(pair.chosen_ids),
        "rejected_ids": list(pair.rejected_ids),
        "chosen_mask": [int(written) for written in pair.chosen_mask],
        "rejected_mask": [int(written) for written in pair.rejected_mask],
    }


def _exact_dpo_trainer() -> Any:
    from trl import DPOTrainer

    class ExactTokens(DPOTrainer):  # type: ignore[misc]  # trl's types are not followed
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset  # already token ids; TRL's method expects text

    return ExactTokens


def _masked_collator(pad_token_id: int) -> Any:
    """Returns TRL's collator with tool output excluded from the completion."""
    import torch
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    class Masked(DataCollatorForPreference):  # type: ignore[misc]  # trl's types are not followed
        def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
            output: dict[str, Any] = super().torch_call(examples)
            written = [[0] * len(row["prompt_ids"]) + row[f"{side}_mask"] for side in ("chosen", "rejected") for row in examples]
            for row, mask in zip(output["completion_mask"], written, strict=True):
                row[: len(mask)] *= torch.tensor(mask)
            return output

    return Masked(pad_token_id=pad_token_id)
