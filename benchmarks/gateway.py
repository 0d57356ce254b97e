"""Measures a long coding session through the gateway: 283 requests, 225 of them by sub-agents, and a context of 15K to 156K tokens.

    python benchmarks/gateway.py
    python benchmarks/gateway.py --json

The client is a separate process that requests chat completions over loopback, as an agent program does. The policy is a script that
answers at once, so only the gateway is measured. Prints the CPU time and memory of the driver process for the session, the share of the
tokenizer, the CPU time of a request without the tokenizer, and the latency that the client sees, which depends on other load of the
machine. The exit status is 1 if a sampled token is not in exactly one sample, or a figure misses its target: 2 s of CPU time without the
tokenizer, 64 MiB, and a median of 3 ms of CPU time per request.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import json
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.agent import ChatFormat
from agentrl.gateway import ConversationTokens, Gateway, Session
from agentrl.objective import counted_samples
from agentrl.protocols import LiveEpisode
from agentrl.records import Episode, Group, Limits, Message, SandboxSpec, Score, ScoredEpisode, Split, Task
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.testing import ReplayPolicy, ScriptedSandboxes, byte_tokenizer
from agentrl.testing.sandboxes import printing

MAX_CPU_S, MAX_MIB, MAX_MS = 2.0, 64.0, 3.0
WORKERS, AT_ONCE, REQUESTS_OF_ONE = 15, 3, 15  # 225 requests of sub-agents, three at a time
MAIN_REQUESTS = 58
FIRST, WIDEST, SUMMED, WORKERS_FIRST, WORKERS_STEP = 15_000, 156_000, 20_000, 8_000, 1_500  # tokens
TASK = "Look into part number {number} of the code and say what is there"
WORDS = [a + b + c for a in "bcdfglmnprst" for b in ("a", "e", "io", "u") for c in ("n", "rd", "st", "ck", "m")]
_SAY = re.compile(r"say-([a-z]+)(\d*)")


# ------------------------------------------------------------------------------------------------ the client, in its own process


@dataclass(slots=True)
class Client:
    """One conversation over one connection. Texts are random words, about one token each."""

    host: str
    key: str
    seconds: list[float]
    link: http.client.HTTPConnection | None = None

    def ask(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
        body = json.dumps({"model": "policy", "messages": messages, "tools": list(tools)}).encode()
        self.link = self.link or http.client.HTTPConnection(self.host, timeout=120)
        began = time.perf_counter()
        self.link.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"})
        answer = self.link.getresponse()
        content = answer.read()
        self.seconds.append(time.perf_counter() - began)
        if answer.status != 200:
            raise RuntimeError(content[:500])
        message: dict[str, Any] = json.loads(content)["choices"][0]["message"]
        messages.append(message)
        return message


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": {"type": "object"}}}


def results(message: dict[str, Any], texts: Sequence[str]) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call["id"], "content": text} for call, text in zip(message["tool_calls"], texts, strict=True)]


def work(client: Client, number: int) -> str:
    """Runs a sub-agent, which makes fourteen tool calls and returns a report."""
    rng = random.Random(number)
    task = TASK.format(number=number)
    messages = [{"role": "system", "content": words(rng, WORKERS_FIRST)}, {"role": "user", "content": f"{task}. say-look"}]
    for at in range(REQUESTS_OF_ONE - 1):
        message = client.ask(messages, [tool("look")])
        last = at == REQUESTS_OF_ONE - 2
        messages += results(message, [words(rng, WORKERS_STEP - 150) + (" say-report" if last else " say-look")])
    return str(client.ask(messages, [tool("look")])["content"])


def lead(host: str, key: str) -> list[float]:
    """Runs the main agent. Returns the duration of each request in seconds."""
    rng, seconds, tools = random.Random(0), list[float](), [tool("look"), tool("ask")]
    main = Client(host, key, seconds)
    messages = [{"role": "system", "content": words(rng, FIRST)}, {"role": "user", "content": "Begin. say-look"}]
    turns = MAIN_REQUESTS - 3  # the last one requests a summary; two more follow in the new context
    step = (WIDEST - FIRST) // turns - 150
    started = 0
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for at in range(turns):
            message = main.ask(messages, tools)
            action = "sum" if at == turns - 1 else f"ask{started}" if at % 8 == 4 and started < WORKERS else "look"
            if len(message["tool_calls"]) == AT_ONCE:
                reports = list(threads.map(lambda number: work(Client(host, key, seconds), number), range(started, started + AT_ONCE)))
                started += AT_ONCE
                texts = [f"{report} {words(rng, step // AT_ONCE)}" for report in reports]
                action = action.replace(f"ask{started - AT_ONCE}", f"ask{started}")
            else:
                texts = [words(rng, step)]
            texts[-1] += f" say-{action}"
            messages += results(message, texts)
    summary = main.ask(messages, tools)["content"]
    messages = [messages[0], {"role": "user", "content": f"{summary} {words(rng, SUMMED - FIRST - 1600)} say-look"}]
    messages += results(main.ask(messages, tools), ["seen say-report"])
    main.ask(messages, tools)
    return seconds


# ------------------------------------------------------------------------------------------------ the driver's side


def trained_tokenizer() -> Any:
    """Returns the tests' byte tokenizer with merges learned from `WORDS`: a token is about one word, as in real vocabularies."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    plain = byte_tokenizer()
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    raw.train_from_iterator([words(random.Random(n), 400) for n in range(40)], trainer)
    trained = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=plain.eos_token, pad_token=plain.pad_token, extra_special_tokens=plain.all_special_tokens
    )
    trained.chat_template = plain.chat_template
    return trained


class Clock:
    """Adds up the CPU seconds of this thread over the timed blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        began = time.thread_time()
        try:
            yield
        finally:
            self.seconds += time.thread_time() - began


class Script:
    """Returns the policy's text, which depends on the last word of the prompt. The time of this function is not measured."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.own, self.encoding, self.sampled = tokenizer, Clock(), Clock(), 0
        self.between: list[float] = []  # CPU seconds from one policy request to the next, without the policy and the tokenizer
        self._last = 0.0
        self._completions: dict[tuple[str, str], tuple[int, ...]] = {}
        encode = tokenizer.encode

        def timed(text: str, **options: Any) -> list[int]:
            with self.encoding.running():
                return list(encode(text, **options))

        tokenizer.encode = timed

    def __call__(self, prompt: Sequence[int]) -> tuple[int, ...]:
        spent = self.encoding.seconds
        self.between.append(time.thread_time() - spent - self._last)
        with self.own.running():
            [*_, (kind, number)] = _SAY.findall(self.tokenizer.decode(prompt[-60:]))
            if (kind, number) not in self._completions:
                self._completions[kind, number] = (*self.tokenizer.encode(self._text(kind, number)), self.tokenizer.eos_token_id)
        self.encoding.seconds = spent
        self.sampled += len(self._completions[kind, number])
        self._last = time.thread_time() - spent
        return self._completions[kind, number]

    def _text(self, kind: str, number: str) -> str:
        rng = random.Random(kind + number)
        if kind == "ask":
            tasks = [TASK.format(number=int(number) + at) for at in range(AT_ONCE)]
            return words(rng, 50) + "".join(_call("ask", {"task": task}) for task in tasks)
        if kind == "look":
            return words(rng, 100) + _call("look", {"at": words(rng, 20)})
        return words(rng, 1500 if kind == "sum" else 200)


def _call(name: str, arguments: dict[str, str]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@dataclass(slots=True)
class Measured:
    """An agent that starts the client, and measures its own process meanwhile."""

    tokens: ConversationTokens
    script: Script
    cpu_s: float = 0.0
    mib: float = 0.0
    seconds: tuple[float, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)

    async def act(self, episode: LiveEpisode) -> str:
        session = Session(episode=episode, tokens=self.tokens, models=("policy",))
        gateway = Gateway()
        async with gateway.session(session) as key:
            gc.collect()
            before, began = _peak_from_here(), time.process_time()
            address = gateway.url.removeprefix("http://")
            client = await asyncio.create_subprocess_exec(
                *(sys.executable, __file__, "--client", address, key), stdout=asyncio.subprocess.PIPE
            )
            out, _ = await client.communicate()
        self.cpu_s = time.process_time() - began - self.script.own.seconds
        self.mib = _status("VmHWM") - before
        self.seconds = tuple(json.loads(out))
        self.counts = {name: count for name, count in session.counts.items() if count}
        return "answered"


def _status(name: str) -> float:
    """Returns a value of /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def _peak_from_here() -> float:
    """Resets the peak memory of this process. Returns its current memory in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def run() -> tuple[Episode, Measured]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # so that its time is this thread's
    tokenizer = trained_tokenizer()
    script = Script(tokenizer)
    agent = Measured(ConversationTokens(ChatFormat(tokenizer)), script)
    runner = EpisodeRunner(
        agent=agent,
        policy=ReplayPolicy(script),
        sandboxes=ScriptedSandboxes(printing("")),
        sampling=Sampling(),
        max_model_len=200_000,
        request_timeout_s=60.0,
    )
    limits = Limits(turns=1000, turn_tokens=4000, episode_tokens=200_000, wall_s=900.0)
    prompt = (Message(role="user", content="-"),)
    task = Task(
        id="t", family="f", prompt=prompt, tools=(), sandbox=SandboxSpec(image="-"), verifiers=(), data={}, split=Split.TRAIN, limits=limits
    )
    return asyncio.run(runner.run(task, episode_id="e")), agent


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.add_argument("--client", nargs=2, metavar=("ADDRESS", "KEY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        print(json.dumps(lead(*args.client)))
        return 0
    episode, agent = run()
    if episode.failures:
        print(episode.failures, file=sys.stderr)
        return 1
    group = Group(index=0, task_id="t", task_key="k", episodes=(ScoredEpisode(episode=episode, score=Score(value=1.0)),))
    samples = counted_samples([group])
    turns = [turn for trajectory in episode.trajectories for turn in trajectory.turns]
    figures = {
        "requests": len(agent.seconds),
        "by_sub_agents": sum(len(trajectory.turns) for trajectory in episode.trajectories if trajectory.agent == "sub-agent"),
        "trajectories": len(episode.trajectories),
        "longest_context": max(len(sample.token_ids) for sample in samples),
        "sampled_tokens": agent.script.sampled,
        "trained_tokens": sum(sum(sample.loss_mask) for sample in samples),
        "cpu_s": round(agent.cpu_s, 2),
        "cpu_tokenizer_s": round(agent.script.encoding.seconds, 2),
        "peak_mib": round(agent.mib, 1),
        "request_cpu_p50_ms": round(1000 * statistics.median(agent.script.between[1:]), 2),
        "request_client_p50_ms": round(1000 * statistics.median(agent.seconds), 2),
        "counts": agent.counts,
    }
    all_trained = figures["sampled_tokens"] == figures["trained_tokens"] == sum(len(turn.completion_ids) for turn in turns)
    own_s = agent.cpu_s - agent.script.encoding.seconds
    met = all_trained and own_s <= MAX_CPU_S and agent.mib <= MAX_MIB and figures["request_cpu_p50_ms"] <= MAX_MS
    print(json.dumps({**figures, "met": met}) if args.json else "\n".join(f"| {name} | {value} |" for name, value in figures.items()))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
