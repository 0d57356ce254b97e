"""Trains the quickstart's base policy from scratch: a 1M-parameter Qwen3 model that has learned the tool-call format and some tasks.

Writes demonstrations of mixed quality for the `tables` family (`sandboxes/tables/demonstrations.py`), trains a byte-level BPE
tokenizer and then the model on them with TRL's SFTTrainer, and saves a folder that transformers and vLLM can load.

    python recipes/base_policy.py                                   # the policy that is shipped in recipes/models/tables-base
    python recipes/base_policy.py --steps 200 --out /tmp/early      # faster, but worse
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # as the command line does, because content is imported from the project root

from agentrl.agent import load_tools  # noqa: E402
from agentrl.agent.chat import ChatFormat  # noqa: E402
from agentrl.base.files import sha256_file  # noqa: E402
from agentrl.records import Split, Task  # noqa: E402
from sandboxes.tables import Tables  # noqa: E402
from sandboxes.tables.demonstrations import Act, demonstrate  # noqa: E402

MODEL = ROOT / "recipes/models/tables-base"
TEMPLATE = MODEL / "chat_template.jinja"
FAMILY_SEED = 1_000_003  # far from the seeds that runs use, so that training on tasks with seed 0, 1, ... is not a repetition
VOCABULARY = 640
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# A quotation mark and each digit are always separate tokens, so a name in quotes has the same tokens in a question and in a program, and to
# copy the name is to copy tokens. Runs of other punctuation, as in `": {"`, may become one token.
PIECES = r"\\.|'| ?\p{L}+[(\[]?|\p{N}| ?[^\s\p{L}\p{N}'\\]+(?: [^\s\p{L}\p{N}'\\]+)?|\s+"
BUCKET = 12  # number of batches whose demonstrations are sorted by length together
MOST_TOKENS = 384  # longer demonstrations (far less than 1%) are excluded


def demonstrations(seed: int, first: int, count: int) -> Iterator[tuple[Task, list[Act]]]:
    """Yields `count` demonstrations (task, acts) from the infinite training split, starting with number `first`."""
    family = Tables(seed=FAMILY_SEED + seed, wild=True)
    for index in range(first, first + count):
        task = family.task(Split.TRAIN, index)
        yield task, demonstrate(task, Random(f"demonstration:{seed}:{index}"))


def train_tokenizer(seed: int, count: int) -> Any:
    """Returns a byte-level BPE tokenizer with the chat template. Decoding returns the exact text."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(PIECES), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKERS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        text
        for task, acts in demonstrations(seed, 0, count)
        for act in acts
        for text in (task.prompt[0].content, _plain(act.completion), act.observation or "")
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<|endoftext|>", eos_token="<|im_end|>", clean_up_tokenization_spaces=False, model_max_length=1024
    )
    tokenizer.chat_template = TEMPLATE.read_text()
    return tokenizer


def _plain(text: str) -> str:
    for token in (*SPECIAL, *MARKERS):
        text = text.replace(token, "")
    return text


def encode(chat: ChatFormat, tokenizer: Any, task: Task, acts: list[Act]) -> dict[str, list[int]]:
    """Returns the token ids of a demonstration and its labels, which are -100 for tokens that the policy does not sample.

    Every segment (prompt, completion, tool delta) is tokenized separately, as in rollouts, so the token sequences are the
    same as in rollouts.
    """
    schemas = [tool.schema for tool in load_tools(task.tools).values()]
    ids = list(chat.opening(task.prompt, schemas))
    labels = [-100] * len(ids)
    for act in acts:
        completion = tokenizer.encode(act.completion, add_special_tokens=False)
        ids += completion
        labels += completion if act.learn else [-100] * len(completion)
        if act.observation is not None:
            delta = chat.tool_delta([act.observation])
            ids += delta
            labels += [-100] * len(delta)
    return {"input_ids": ids, "labels": labels}


def make_dataset(tokenizer: Any, seed: int, count: int, batch: int) -> Any:
    """Returns up to `count` tokenized demonstrations as a datasets.Dataset, in training order. Shows a progress bar.

    Each batch contains demonstrations of similar length, which halves the padding. The batches are in random order. Excludes demonstrations
    of more than `MOST_TOKENS` tokens and incomplete batches.
    """
    from datasets import Dataset
    from tqdm import tqdm

    chat = ChatFormat(tokenizer)
    rows = [encode(chat, tokenizer, task, acts) for task, acts in tqdm(demonstrations(seed, 0, count), "demonstrations", count)]
    rows = [row for row in rows if len(row["input_ids"]) <= MOST_TOKENS]
    batches = []
    for start in range(0, len(rows), BUCKET * batch):
        bucket = sorted(rows[start : start + BUCKET * batch], key=lambda row: len(row["input_ids"]))
        batches += [bucket[at : at + batch] for at in range(0, len(bucket) - batch + 1, batch)]
    Random(seed).shuffle(batches)
    return Dataset.from_list([row for rows_of_batch in batches for row in rows_of_batch])


def make_model(tokenizer: Any) -> Any:
    """Returns a Qwen3 model with 0.9M random parameters in float32. Heads have 32 dimensions, the minimum for vLLM's CPU attention."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=0.04,  # the default, 0.02, is for wide layers
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def train(model: Any, tokenizer: Any, dataset: Any, *, steps: int, batch: int, lr: float, seed: int, save_every: int, work: Path) -> float:
    """Fine-tunes the model with a one-cycle learning rate. Returns the mean loss over the last 5% of the steps, in nats per token."""
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        output_dir=str(work),
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=lr,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, steps // 20),
        adam_beta2=0.98,
        weight_decay=0.01,
        max_grad_norm=1.0,
        logging_steps=max(1, steps // 100),
        logging_first_step=True,
        save_strategy="steps" if save_every else "no",
        save_steps=save_every or steps,
        save_only_model=True,
        train_sampling_strategy="sequential",
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        packing=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        seed=seed,
        data_seed=seed,
    )
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    tail = losses[-max(1, len(losses) // 20) :]
    return float(sum(tail) / len(tail))


def save(model: Any, tokenizer: Any, out: Path, card: str) -> None:
    """Writes the folder: the weights, the configuration, the tokenizer, the chat template, the card, and the SHA-256 of every file."""
    from transformers import GenerationConfig

    out.mkdir(parents=True, exist_ok=True)
    model.config.use_cache = True  # training disabled it
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(out, safe_serialization=True)
    tokenizer.save_pretrained(out)
    (out / "README.md").write_text(card)
    files = sorted(path for path in out.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    (out / "SHA256SUMS").write_text("".join(f"{sha256_file(path)}  {path.name}\n" for path in files))


def model_card(facts: dict[str, Any]) -> str:
    lines = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    return (
        "# tables-base\n\n"
        "The base policy of the quickstart: a small Qwen3-shaped model that writes well-formed tool calls, copies names from the\n"
        "question into programs, and answers some of the questions of the `tables` family. It was trained on demonstrations of\n"
        "mixed quality. Most of them are deliberately careless, so its most likely program is usually wrong and reinforcement\n"
        "learning can improve it. The model has no other use.\n\n"
        f"Created by `python recipes/base_policy.py`:\n\n{lines}\n\n"
        "`SHA256SUMS` lists the files. Licence: Apache-2.0, like the rest of the repository.\n"
    )


def main(
    out: Annotated[Path, typer.Option(help="Folder to write.")] = MODEL,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 2600,
    batch: Annotated[int, typer.Option(min=1, help="Demonstrations per step.")] = 32,
    examples: Annotated[int, typer.Option(min=100, help="Number of distinct demonstrations to write.")] = 85_000,
    lr: Annotated[float, typer.Option(min=0, help="Highest learning rate.")] = 3e-3,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    save_every: Annotated[int, typer.Option(min=0, help="Steps between checkpoints, which are written next to OUT. 0: none.")] = 0,
) -> None:
    """Trains the base policy of the quickstart (about 40 minutes on 2 cores) and writes it to OUT."""
    import torch
    from transformers import set_seed

    torch.set_num_threads(threads)
    set_seed(seed)
    started = time.monotonic()
    tokenizer = train_tokenizer(seed, min(examples, 6000))
    dataset = make_dataset(tokenizer, seed, min(examples, steps * batch), batch)
    model = make_model(tokenizer)
    checkpoints = Path(f"{out}-checkpoints") if save_every else Path(tempfile.mkdtemp())
    try:
        loss = train(model, tokenizer, dataset, steps=steps, batch=batch, lr=lr, seed=seed, save_every=save_every, work=checkpoints)
    finally:
        if not save_every:
            shutil.rmtree(checkpoints)
    facts = {
        "parameters": model.num_parameters(),
        "vocabulary": VOCABULARY,
        "steps": steps,
        "demonstrations per step": batch,
        "different demonstrations": len(dataset),
        "learning rate": lr,
        "seed": seed,
        "last training loss (nats per token)": round(loss, 4),
        "minutes": round((time.monotonic() - started) / 60, 1),
    }
    save(model, tokenizer, out, model_card(facts))
    print(json.dumps(facts))


if __name__ == "__main__":
    typer.run(main)
