"""Compares one learner update on this machine: agentrl (forests of shared prefixes), TRL's GRPOTrainer and a plain padded loop.

    python benchmarks/learner.py [--repeat 9] [--size small|base] [--threads 1] [--store]
    python benchmarks/learner.py --only tree --clock cpu        # one case; processor time, on a machine that others use too
    python benchmarks/learner.py --model recipes/models/tables-base --prompt 300 --answers 64    # a group on a real model's weights

All contenders use the same random Qwen3 model, samples, advantages and thread count. Forward, backward and optimizer step are timed;
generation is not. --model uses the weights of a folder and behaviour logprobs that it computes, without the plain loop. Contenders
alternate within each repetition. TRL runs with its fastest settings on this machine: no KL reference model, its fused output head, and for
each case the fastest batch (1, 2, 4, ... samples, or those that fit the token budget). Samples are sorted and batched to minimize padding.
Gradients are compared before anything is timed, because times are comparable only if all compute the same update. --store stores every time
in docs/results and writes the tables of docs/results.md from the stored times. At the end, the memory of the output head at a vocabulary of
151,936 is measured, each variant in a separate process (not with --model or --only).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agentrl.base.files import write_atomically  # noqa: E402
from agentrl.config import ObjectiveConfig, OffPolicyConfig  # noqa: E402
from agentrl.learner.forest import register  # noqa: E402
from agentrl.learner.packing import build_micro_batch, plan_micro_batches  # noqa: E402
from agentrl.learner.token_scorer import LOGITS_AT_ONCE, LogprobHead, TokenScorer  # noqa: E402
from agentrl.objective.policy_loss import TrainedTokens, policy_loss  # noqa: E402
from agentrl.records import Sample  # noqa: E402
from agentrl.testing.tiny_model import make_tokenizer  # noqa: E402
from benchmarks import stored  # noqa: E402
from benchmarks.updates import BUDGET, CPU, SIZES, VOCABULARY, Case, bound, by_length, cases, folder_cases, shape_of  # noqa: E402

PAGE = ROOT / "docs" / "results.md"
BEGIN, END = "<!-- made by benchmarks/learner.py: begin -->", "<!-- made by benchmarks/learner.py: end -->"
CODE = ("agentrl/learner", "agentrl/objective", "agentrl/model", "benchmarks/learner.py", "benchmarks/updates.py")
OBJECTIVE = ObjectiveConfig(clip_low=0.2, clip_high=0.2, off_policy=OffPolicyConfig(preset="none"))  # TRL truncates nothing here
HEAD = {"vocabulary": 151_936, "hidden": 1024, "tokens": 8192}


def make_tokenizer_of(model: str) -> Any:
    if model in SIZES:
        return make_tokenizer()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def make_model(size: str, attention: str) -> Any:
    """A random model of one of `SIZES`, or the one in a folder, in float32."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    if size not in SIZES:
        return AutoModelForCausalLM.from_pretrained(size, dtype=torch.float32, attn_implementation=attention).train()
    hidden, layers, heads, kv_heads, mlp = SIZES[size]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=mlp,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        attn_implementation=attention,
    )
    return Qwen3ForCausalLM(config).train()


class Ours:
    """The learner's own path."""

    name = "agentrl"

    def __init__(self, size: str) -> None:
        self.model = make_model(size, register())
        self.scorer = TokenScorer(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)

    def tokens(self, case: Case) -> int:
        micro_batches = plan_micro_batches(case.samples, rank=0, ranks=1, max_tokens=BUDGET)
        return sum(build_micro_batch(rows, CPU).input_ids.numel() for rows in micro_batches)

    def backward(self, case: Case) -> None:
        for rows in plan_micro_batches(case.samples, rank=0, ranks=1, max_tokens=BUDGET):
            batch = build_micro_batch(rows, CPU)
            logprobs, entropy = self.scorer(batch.input_ids, batch.layout, batch.positions, batch.targets, 1.0)
            tokens = (batch.behaviour, batch.advantages, batch.sequence)
            surrogate(logprobs[batch.expand], tokens, case.trained, entropy[batch.expand]).backward()


class Padded:
    """The plain loop: rows padded on the right, logits of every position."""

    name = "padded loop"

    def __init__(self, size: str) -> None:
        self.model = make_model(size, "sdpa")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)

    def tokens(self, case: Case) -> int:
        return sum(len(rows) * len(rows[0].token_ids) for rows in by_length(case.samples))

    def backward(self, case: Case) -> None:
        for rows in by_length(case.samples):
            ids, mask, behaviour, advantages = padded(rows, 0)
            logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
            logprobs = logits.gather(-1, ids[:, 1:, None]).squeeze(-1)
            keep = mask[:, 1:]
            sequence = torch.arange(len(rows))[:, None].expand_as(keep)
            surrogate(logprobs[keep], (behaviour[:, 1:][keep], advantages[:, 1:][keep], sequence[keep]), case.trained, None).backward()


class Trl:
    """GRPOTrainer's own loss and backward pass, on batches of the shape that it makes: prompts padded left, completions right."""

    name = "TRL GRPOTrainer"
    most: int | None = None  # samples of a batch

    def __init__(self, size: str) -> None:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        self.model = make_model(size, "sdpa")
        self._folder = tempfile.TemporaryDirectory()
        arguments = GRPOConfig(
            output_dir=self._folder.name,
            per_device_train_batch_size=8,
            num_generations=8,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.2,
            loss_type="bnpo",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            learning_rate=0.0,
        )
        self.trainer = GRPOTrainer(
            model=self.model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 8),
            processing_class=make_tokenizer_of(size),
        )
        self.trainer.current_gradient_accumulation_steps = 1
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)

    def tune(self, case: Case, clock: Callable[[], float], repeat: int) -> dict[str, list[float]]:
        """Sets the batch that is fastest on a case; the seconds of each. Batches of equal composition are timed once."""
        seconds: dict[str, list[float]] = {}
        sizes: dict[int, int | None] = {len(by_length(case.samples, most)): most for most in (None, *_powers(len(case.samples)))}
        for most in sorted(sizes.values(), key=lambda most: most or len(case.samples)):
            self.most = most
            timed_update(self, case, clock)
            seconds[self.batch] = [timed_update(self, case, clock) for _ in range(repeat)]
            log(f"{case.name}: {self.name}, {self.batch}: {statistics.median(seconds[self.batch]):.3f} s")
        self.most = min(sizes.values(), key=lambda most: statistics.median(seconds[_batch(most)]))
        return seconds

    @property
    def batch(self) -> str:
        return _batch(self.most)

    def tokens(self, case: Case) -> int:
        inputs = [self._inputs(rows) for rows in by_length(case.samples, self.most)]
        return sum(batch["prompt_ids"].numel() + batch["completion_ids"].numel() for batch in inputs)

    def backward(self, case: Case) -> None:
        for rows in by_length(case.samples, self.most):
            inputs = self._inputs(rows)
            share = (inputs["completion_mask"] * inputs["tool_mask"]).sum() / case.trained  # its loss is a mean over the batch
            (self.trainer.compute_loss(self.trainer.model, inputs) * share).backward()

    def _inputs(self, rows: Sequence[Sample]) -> dict[str, Tensor]:
        starts = [row.loss_mask.index(True) for row in rows]
        ids = [torch.tensor(row.token_ids) for row in rows]
        left, right = max(starts), max(len(row.token_ids) - start for row, start in zip(rows, starts, strict=True))
        inputs = {
            "prompt_ids": torch.zeros(len(rows), left, dtype=torch.long),
            "completion_ids": torch.zeros(len(rows), right, dtype=torch.long),
        }
        inputs |= {name.replace("ids", "mask"): torch.zeros_like(tensor) for name, tensor in inputs.items()}
        inputs["tool_mask"] = torch.zeros_like(inputs["completion_ids"])
        inputs["old_per_token_logps"] = torch.zeros(len(rows), right)
        for n, (row, start) in enumerate(zip(rows, starts, strict=True)):
            length = len(row.token_ids) - start
            inputs["prompt_ids"][n, left - start :] = ids[n][:start]
            inputs["prompt_mask"][n, left - start :] = 1
            inputs["completion_ids"][n, :length] = ids[n][start:]
            inputs["completion_mask"][n, :length] = 1
            inputs["tool_mask"][n, :length] = torch.tensor(row.loss_mask[start:]).long()
            inputs["old_per_token_logps"][n, :length] = torch.tensor(row.logprobs[start:])
        inputs["advantages"] = torch.tensor([row.advantages[start] for row, start in zip(rows, starts, strict=True)])
        return inputs


def _batch(most: int | None) -> str:
    return f"batches of {BUDGET:,} tokens" if most is None else f"batches of {most}"


def _powers(count: int) -> list[int]:
    return [2**n for n in range(count.bit_length()) if 2**n <= count]


def padded(rows: Sequence[Sample], fill: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    width = max(len(row.token_ids) for row in rows)
    ids = torch.full((len(rows), width), fill)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    behaviour, advantages = torch.zeros(len(rows), width), torch.zeros(len(rows), width)
    for n, row in enumerate(rows):
        length = len(row.token_ids)
        ids[n, :length] = torch.tensor(row.token_ids)
        mask[n, :length] = torch.tensor(row.loss_mask)
        behaviour[n, :length] = torch.tensor(row.logprobs)
        advantages[n, :length] = torch.tensor(row.advantages)
    return ids, mask, behaviour, advantages


def surrogate(logprobs: Tensor, batch: tuple[Tensor, Tensor, Tensor], trained: int, entropy: Tensor | None) -> Tensor:
    """The quickstart's loss; `batch` holds behaviour logprobs, advantages and sequence numbers [N]."""
    behaviour, advantages, sequence = batch
    tokens = TrainedTokens(logprobs=logprobs, behaviour=behaviour, advantages=advantages, sequence=sequence, entropy=entropy)
    return policy_loss(tokens, OBJECTIVE, denominator=trained).loss


def on_policy(case: Case, scorer: TokenScorer) -> Case:
    """Replaces the behaviour logprobs by the model's. Random tokens are so unlikely for a real model that ratios to guessed logprobs would
    all be clipped, and the gradients would be 0."""
    scored: dict[str, Sample] = {}
    with torch.no_grad():
        for sample in case.samples:
            batch = build_micro_batch(plan_micro_batches([sample], rank=0, ranks=1, max_tokens=BUDGET)[0], CPU)
            logprobs, _ = scorer(batch.input_ids, batch.layout, batch.positions, batch.targets, 1.0)
            values = iter(logprobs[batch.expand].tolist())
            scored[sample.episode_id] = replace(sample, logprobs=tuple(next(values) if on else 0.0 for on in sample.loss_mask))
    return replace(case, samples=tuple(scored[sample.episode_id] for sample in case.samples))


def timed_update(contender: Any, case: Case, clock: Callable[[], float]) -> float:
    start = clock()
    contender.backward(case)
    contender.optimizer.step()
    seconds = clock() - start
    contender.optimizer.zero_grad()
    return seconds


def gradient(contender: Any, case: Case) -> Tensor:
    contender.optimizer.zero_grad()
    contender.backward(case)
    flat = torch.cat([parameter.grad.flatten() for parameter in contender.model.parameters()])
    contender.optimizer.zero_grad()
    return flat


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def check_same_update(contenders: Sequence[Any], cases: Sequence[Case]) -> None:
    for case in cases:
        log(f"{case.name}: comparing gradients")
        gradients = [gradient(contender, case) for contender in contenders]
        for contender, other in zip(contenders[1:], gradients[1:], strict=True):
            gap = ((other - gradients[0]).norm() / gradients[0].norm()).item()
            if gap > 1e-4:
                raise SystemExit(f"{case.name}: the gradient of {contender.name} differs from ours by {gap:.2g}")


def measure(size: str, repeat: int, *, cases: list[Case], clock: Callable[[], float]) -> list[dict[str, Any]]:
    """The seconds of each contender on each case, in turns, with what they computed. Exits if the contenders' gradients differ."""
    shape = shape_of(size)
    ours, trl = Ours(size), Trl(size)
    contenders: list[Any] = [ours, trl]
    if size in SIZES:
        contenders.append(Padded(size))
    else:
        log(f"{size}: logprobs of sampling")
        cases = [on_policy(case, ours.scorer) for case in cases]
    check_same_update(contenders, cases)
    results = []
    for case in cases:
        seconds_by_batch = trl.tune(case, clock, max(1, repeat // 3))
        times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        for contender in contenders:
            timed_update(contender, case, clock)
        for turn in range(repeat):
            log(f"{case.name}: turn {turn + 1} of {repeat}")
            for contender in contenders:
                times[contender.name].append(timed_update(contender, case, clock))
        results.append(
            {
                "case": case.name,
                "trained": case.trained,
                "tokens": {contender.name: contender.tokens(case) for contender in contenders},
                "seconds": times,
                "bound": bound(case, shape) if size in SIZES else None,
                "batch": trl.batch,
                "tried": seconds_by_batch,
            }
        )
    return results


def ratios_to_ours(result: dict[str, Any], name: str) -> list[float]:
    """The ratio of a contender's time to ours, by repetition."""
    return [theirs / mine for theirs, mine in zip(result["seconds"][name], result["seconds"][Ours.name], strict=True)]


def table(results: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| batch | | tokens computed | seconds, median (range) | trained tokens/s | ratio to agentrl (range) | FLOP bound | reached |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        for name, values in result["seconds"].items():
            median, ratios = statistics.median(values), ratios_to_ours(result, name)
            limit = result["bound"] if name == Padded.name else None
            bound_cells = (f"{limit:.2f}", f"{statistics.median(ratios) / limit:.0%}") if limit else ("", "")
            spread = f"{median:.3f} ({min(values):.3f} to {max(values):.3f})"
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            first = result["case"] if name == Ours.name else ""
            label = f"{name}, {result['batch']}" if name == Trl.name else name
            line = [first, label, f"{result['tokens'][name]:,}", spread, f"{result['trained'] / median:,.0f}", ratio, *bound_cells]
            lines.append("| " + " | ".join(line) + " |")
    return "\n".join(lines)


def write_page() -> None:
    """Writes the tables of docs/results.md from all stored times."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    sections = []
    for path in sorted(stored.RESULTS.glob("learner*.json")):
        result = json.loads(path.read_text())
        origin, clock = result["origin"], "" if result["clock"] == "wall" else f", {result['clock']} time"
        source = f"`{origin['command']}` on {stored.describe_machines([origin['machine']])}{clock}, commit {origin['commit']}."
        sections += [f"Model `{name}`. {source}\n\n{table(cases)}" for name, cases in result["models"].items()]
    write_atomically(PAGE, "\n\n".join([f"{before}{BEGIN}", *sections, f"{END}{after}"]))


def head_peak(kind: str) -> None:
    """Prints by how many MiB scoring and its backward pass raise this process's peak memory. Runs alone, in its own process."""
    torch.manual_seed(0)
    weight = nn.Linear(HEAD["hidden"], HEAD["vocabulary"], bias=False)
    hidden = torch.randn(HEAD["tokens"], HEAD["hidden"], requires_grad=True)
    targets = torch.randint(HEAD["vocabulary"], (HEAD["tokens"],))
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far, and the one inherited from the parent, are forgotten
    before = peak_mib()
    if kind == "chunked":
        logprobs, _ = LogprobHead(weight, LOGITS_AT_ONCE)(hidden, targets, 1.0)
    else:
        logprobs = F.linear(hidden, weight.weight).float().log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    logprobs.sum().backward()
    print(peak_mib() - before)


def peak_mib() -> float:
    """This process's highest resident memory so far."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def head_table() -> str:
    peaks = {}
    for kind in ("full", "chunked"):
        command = [sys.executable, __file__, "--head", kind]
        peaks[kind] = float(subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ).stdout)
    shape = f"{HEAD['tokens']:,} tokens, vocabulary {HEAD['vocabulary']:,}, hidden {HEAD['hidden']:,}, float32"
    return (
        f"Peak memory of the output head's forward and backward pass ({shape}), above weights and inputs: "
        f"full logits {peaks['full']:,.0f} MiB, chunked {peaks['chunked']:,.0f} MiB, {peaks['full'] / peaks['chunked']:.1f} times less."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--size", choices=list(SIZES), nargs="+", default=["small"])
    parser.add_argument("--model", help="model folder to use instead of a random model of a size")
    parser.add_argument("--prompt", type=int, default=300, help="with --model: tokens of the group's shared prompt (default 300)")
    parser.add_argument("--answers", type=int, nargs="+", default=[64], help="with --model: tokens of an answer; each value is a case")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="run only cases whose name contains this string, without the memory measurement")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: CPU time of this process, for a shared machine")
    parser.add_argument("--store", action="store_true", help="store the times in docs/results, and write the tables of docs/results.md")
    parser.add_argument("--head", choices=["full", "chunked"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.head:
        head_peak(options.head)
        return
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    if options.model:
        groups = folder_cases(options.model, options.prompt, options.answers)
        subjects = {options.model: groups}
    else:
        subjects = {size: [case for case in cases(0) if options.only in case.name] for size in options.size}
    command = shlex.join(["python", "benchmarks/learner.py", *sys.argv[1:]])
    origin = stored.origin(command, CODE, seeds=[0])
    results = {Path(name).name: measure(name, options.repeat, cases=model_cases, clock=clock) for name, model_cases in subjects.items()}
    if options.store:
        name = f"learner-{Path(options.model).name}" if options.model else "learner"
        stored.keep(name, origin, clock=options.clock, models=results)
        write_page()
    parts = [f"## Model `{name}`\n\n{table(result)}" for name, result in results.items()]
    text = "\n\n".join(parts if options.only or options.model else [*parts, f"## Memory\n\n{head_table()}"])
    print(text)


if __name__ == "__main__":
    main()
