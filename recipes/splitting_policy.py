"""Trains the initial policy for `recipes/splitting.py`: the quickstart's policy learns by imitation to read pages and to call helpers.

The demonstrations are of mixed quality (`sandboxes/pages/demonstrations.py`). The result is shipped in recipes/models/splitting-base. An
existing folder is not replaced.

    python recipes/splitting_policy.py --out recipes/models/mine
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # as the command line does, because content is imported from the project root

from agentrl.agent import load_tools  # noqa: E402
from agentrl.agent.chat import ChatFormat  # noqa: E402
from agentrl.agent.delegation import delegate_schema  # noqa: E402
from agentrl.base.files import sha256_file  # noqa: E402
from agentrl.config.rollout import DelegationConfig  # noqa: E402
from agentrl.records import Message  # noqa: E402
from sandboxes.pages.demonstrations import Demonstration, demonstrations  # noqa: E402

BASE = ROOT / "recipes/models/tables-base"
MODEL = ROOT / "recipes/models/splitting-base"
BATCH = 32


def encode(chat: ChatFormat, tokenizer: Any, demonstration: Demonstration) -> dict[str, list[int]]:
    """Returns a demonstration's token ids and labels (-100 for tokens that the policy does not sample), truncated to an episode's context.

    Every segment (prompt, completion, tool output) is tokenized separately, as in rollouts.
    """
    schemas = [tool.schema for tool in load_tools(demonstration.task.tools).values()]
    offers = [delegate_schema(DelegationConfig())] if demonstration.delegates else []
    ids = list(chat.opening((Message(role="user", content=demonstration.prompt),), [*schemas, *offers]))
    labels = [-100] * len(ids)
    for move in demonstration.moves:
        sampled = tokenizer.encode(move.says, add_special_tokens=False)
        ids, labels = ids + sampled, labels + (sampled if move.learn else [-100] * len(sampled))
        if move.shown:
            delta = list(chat.tool_delta(list(move.shown)))
            ids, labels = ids + delta, labels + [-100] * len(delta)
    room = demonstration.task.limits.episode_tokens
    return {"input_ids": ids[:room], "labels": labels[:room]}


def rows(count: int, seed: int) -> Iterator[dict[str, list[int]]]:
    """Yields `count` encoded demonstrations."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BASE, trust_remote_code=False)
    chat = ChatFormat(tokenizer)
    for demonstration in demonstrations(seed, count):
        yield encode(chat, tokenizer, demonstration)


def make(out: Path = MODEL, *, steps: int = 300, lr: float = 1e-3, seed: int = 0) -> float:
    """Trains the policy and returns the final loss in nats per token."""
    from agentrl.supervised.tune import train_sft

    loss = train_sft(list(rows(steps * BATCH, seed)), BASE, out, epochs=1.0, lr=lr, batch=BATCH, seed=seed)
    write_card(out, {"steps": steps, "demonstrations per step": BATCH, "learning rate": lr, "seed": seed, "last loss": f"{loss:.4f}"})
    return loss


def write_card(out: Path, facts: dict[str, Any]) -> None:
    """Writes README.md, which replaces the README.md of the initial policy, and the SHA-256 of every file."""
    lines = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    (out / "README.md").write_text(
        "# splitting-base\n\n"
        "The initial policy of `recipes/splitting.py`: the policy of the quickstart, fine-tuned on demonstrations of reading pages and\n"
        "calling helpers. At first it splits a third of its tasks, and its helpers make mistakes. The model has no other use.\n\n"
        f"Created by `python recipes/splitting_policy.py`:\n\n{lines}\n\n"
        "`SHA256SUMS` lists the files. Licence: Apache-2.0, like the rest of the repository.\n"
    )
    files = sorted(path for path in out.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    (out / "SHA256SUMS").write_text("".join(f"{sha256_file(path)}  {path.name}\n" for path in files))


def main(
    out: Annotated[Path, typer.Option(help="Folder to write.")] = MODEL,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of 32 demonstrations.")] = 300,
    lr: Annotated[float, typer.Option(min=0, help="Highest learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Trains the policy if its folder does not exist."""
    if (out / "config.json").exists():
        print(f"{out} already exists")
        return
    began = time.monotonic()
    loss = make(out, steps=steps, lr=lr, seed=seed)
    print(f"{out}: {steps} steps, last loss {loss:.4f} nats per token, {(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    typer.run(main)
